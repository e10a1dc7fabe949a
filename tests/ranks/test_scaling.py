"""Rounds in a training loop: oracles that do not know of rounds, and cells that do not march in step."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import xffl
from tests.ranks.test_round import complete, digests, make_state
from tests.rounds import replace_exchange
from tests.worlds import run_world
from xffl.aggregation.algorithms.clients import FedProx
from xffl.aggregation.engine.groups import RoundScope
from xffl.aggregation.steps.wrapped_optimizers import steps_may_nest
from xffl.checkpoint import AsyncSaver, load_checkpoint, save_checkpoint
from xffl.distributed.distributed_state import DistributedState
from xffl.integrations.first_model import weights_put_aside
from xffl.parallel import FSDPStrategy
from xffl.training.callbacks.param_norms import trained_parameters


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(step: int, source: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + source)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, source: int) -> None:
    inputs, targets = batch(step, source)
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [complete(parameter).clone() for parameter in model.parameters()]


def starts_from_rank_0(rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None) -> list[float]:
    state = make_state(rank, sizes, hsdp)
    model = net(seed=rank)  # different on every rank
    model.register_buffer("steps", torch.tensor(rank))
    model = xffl.shard(model, state)
    return [float(w.double().sum()) for w in weights(model)] + [float(b) for b in model.buffers()]


@pytest.mark.parametrize("sizes, hsdp", [((4, 2), 2), ((4, 2), None), ((3, 1), 1), ((2, 2), None)], ids=str)
def test_all_ranks_start_from_rank_0_s_weights(sizes: tuple[int, ...], hsdp: int | None) -> None:
    expected = [float(p.detach().double().sum()) for p in net(seed=0).parameters()] + [0.0]
    assert run_world(sum(sizes), starts_from_rank_0, sizes, hsdp) == [expected] * sum(sizes)


def one_cell(rank: int, world_size: int) -> None:
    plain = fully_shard(net(), mesh=init_device_mesh("cpu", (world_size,), mesh_dim_names=("oracle",)))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(7):
        train_step(plain, optimizer, step, rank)
    state = make_state(rank, (world_size,), None)
    model = xffl.shard(net(), state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with xffl.FederatedScaling(model, optimizer, state, every=2):
        for step in range(7):
            train_step(model, optimizer, step, rank)
    assert digests(model) == digests(plain)


def test_one_cell_is_plain_fsdp() -> None:
    run_world(4, one_cell)


def every_step(rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None) -> None:
    ddp = nn.parallel.DistributedDataParallel(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(5):
        train_step(ddp, optimizer, step, rank)
    state = make_state(rank, sizes, hsdp)
    model = xffl.shard(net(), state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with xffl.FederatedScaling(model, optimizer, state, every=1, weight=lambda: 4.0):
        for step in range(5):
            train_step(model, optimizer, step, rank)
    for ours, theirs in zip(weights(model), weights(ddp), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "sizes, hsdp", [((1, 1), None), ((2, 2), None), ((2, 2), 1), ((4, 2), 2), ((3, 1), None)], ids=str
)
def test_a_round_after_every_sgd_step_is_ddp(sizes: tuple[int, ...], hsdp: int | None) -> None:
    run_world(sum(sizes), every_step, sizes, hsdp)


def twins(rank: int, world_size: int) -> list[dict[str, str]]:
    state = make_state(rank, (2, 2), None)
    model = xffl.shard(net(), state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    history: list[dict[str, str]] = []
    with xffl.FederatedScaling(model, optimizer, state, every=3, on_round=lambda _: history.append(digests(model))):
        for step in range(9):
            train_step(model, optimizer, step, rank % 2)
            history.append(digests(model))
    return history


def test_cells_with_the_same_data_and_seeds_stay_the_same() -> None:
    histories = run_world(4, twins)
    assert len(histories[0]) == 12
    assert all(history == histories[0] for history in histories)
    assert all(histories[0][i] == histories[0][i + 1] for i in (2, 6, 10))  # a round between equals changes no bit


def uneven(
    rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None, weigh: bool
) -> tuple[list[tuple[float, ...]], dict[str, str]]:
    state = make_state(rank, sizes, hsdp)
    model = xffl.shard(net(), state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    reports: list[xffl.RoundReport] = []
    counted = [0]

    def weight() -> float:
        fresh, counted[0] = counted[0], 0
        return float(fresh)

    federation = xffl.FederatedScaling(
        model, optimizer, state, every=5, weight=weight if weigh else None, on_round=reports.append
    )
    with federation:
        for step in range(13 if state.federated_rank == 0 else 31):
            counted[0] += 4
            train_step(model, optimizer, step, rank)
    assert [report.round for report in reports] == list(range(1, len(reports) + 1))
    assert [report.is_last for report in reports] == [False] * (len(reports) - 1) + [True]
    return [report.weights for report in reports], digests(model)


@pytest.mark.parametrize("sizes, hsdp", [((1, 1), None), ((2, 2), None), ((2, 1), 1), ((3, 1), None)], ids=str)
@pytest.mark.parametrize("weigh", [False, True])
def test_loaders_of_13_and_31_batches_finish_and_agree(sizes: tuple[int, ...], hsdp: int | None, weigh: bool) -> None:
    results = run_world(sum(sizes), uneven, sizes, hsdp, weigh)
    assert all(result == results[0] for result in results)
    a, b = (4.0 * sizes[0], 4.0 * sizes[1]) if weigh else (1.0, 1.0)
    five, three = (5, 3) if weigh else (1, 1)
    # Cell 0: two full rounds, its last three steps in the third, then nothing; cell 1: six rounds and one step more.
    expected = [(five * a, five * b)] * 2 + [(three * a, five * b)] + [(0.0, five * b)] * 3 + [(0.0, b)]
    assert results[0][0] == expected


def even_finish(rank: int, world_size: int) -> int:
    state = make_state(rank, (1, 1), None)
    model = xffl.shard(net(), state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with xffl.FederatedScaling(model, optimizer, state, every=5) as federation:
        for step in range(10):
            train_step(model, optimizer, step, rank)
    return federation.aggregator.rounds


def test_nothing_pending_means_no_further_round() -> None:
    assert run_world(2, even_finish) == [2, 2]


def leaves_by_exception(rank: int, world_size: int) -> str:
    state = make_state(rank, (1, 1), None)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    try:
        with xffl.FederatedScaling(model, optimizer, state, every=5):
            train_step(model, optimizer, 0, rank)
            if rank == 0:
                raise KeyError("the user's own")
            raise ValueError("another")
    except (KeyError, ValueError) as error:
        caught = type(error).__name__
    train_step(model, optimizer, 1, rank)  # the hook is gone: no round is tried however many steps follow
    for step in range(9):
        train_step(model, optimizer, step, rank)
    return caught


def test_leaving_by_an_exception_does_not_communicate() -> None:
    assert run_world(2, leaves_by_exception, timeout_s=60.0) == ["KeyError", "ValueError"]


def torn_at_the_end(rank: int, world_size: int) -> None:
    """A closing round that tears the model is the last thing that is tried."""
    state = make_state(rank, (1, 1), None)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaling = xffl.FederatedScaling(model, optimizer, state, every=9, aggregator={"atomic": False})
    scaling.__enter__()
    tries = 0

    def broken(*args: Any) -> None:
        nonlocal tries
        tries += 1
        raise MemoryError("no room")

    replace_exchange(scaling.aggregator, broken)
    train_step(model, optimizer, 0, rank)
    with pytest.raises(xffl.RoundError, match="no room"):
        scaling.__exit__(None, None, None)
    assert tries == 1 and scaling.aggregator.is_torn


def test_a_torn_model_ends_the_block() -> None:
    run_world(2, torn_at_the_end)


def rejected_in_parts(rank: int, world_size: int) -> None:
    """A block whose closing rounds are rejected ends, though other parts of the model still wait for theirs."""
    state = make_state(rank, (1, 1), None)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaling = xffl.FederatedScaling(model, optimizer, state, every=9, aggregator={"fragments": 2})
    scaling.__enter__()
    train_step(model, optimizer, 0, rank)
    if rank:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
    with pytest.raises(xffl.RoundError, match="cell 1 holds values that are not finite"):
        scaling.__exit__(None, None, None)
    assert scaling.aggregator.rounds == 0 and scaling.meetings == 2


def test_a_rejected_end_does_not_wait_for_other_parts() -> None:
    run_world(2, rejected_in_parts)


def two_hops_apart(rank: int, world_size: int) -> None:
    """A single-process FedAvg over the cells' own optimizers gives the same weights."""
    state = make_state(rank, (1, 1, 1), None)
    model = xffl.shard(net(), state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with xffl.FederatedScaling(model, optimizer, state, every=4, weight=lambda: 1.0 + rank):
        for step in range(8):
            train_step(model, optimizer, step, rank)
    clients = [copy.deepcopy(net()) for _ in range(3)]
    optimizers = [torch.optim.SGD(client.parameters(), lr=0.05, momentum=0.9) for client in clients]
    for first in (0, 4):
        for source, (client, own) in enumerate(zip(clients, optimizers, strict=True)):
            for step in range(first, first + 4):
                train_step(client, own, step, source)
        with torch.no_grad():
            for parameters in zip(*(client.parameters() for client in clients), strict=True):
                mean = sum((1.0 + i) * p.double() for i, p in enumerate(parameters)) / 6.0
                for parameter in parameters:
                    parameter.copy_(mean)  # type: ignore[arg-type]
    for ours, theirs in zip(weights(model), weights(clients[0]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_federated_averaging_with_momentum_and_weights() -> None:
    run_world(3, two_hops_apart)


def evaluates_between_rounds(rank: int, world_size: int) -> None:
    """A forward pass without a backward one leaves FSDP2's gathered copy behind; a round must not let it grow stale."""
    state = make_state(rank, (2, 2), None)
    model = xffl.shard(net(), state)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().fill_(float(state.federated_rank))  # type: ignore[attr-defined]
    inputs = torch.ones(2, 6)
    model(inputs)
    xffl.Aggregator(model, state).aggregate()
    oracle = net()
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.fill_(0.5)
    torch.testing.assert_close(model(inputs), oracle(inputs), rtol=0, atol=0)
    dist.barrier()


def test_a_round_after_an_evaluation_is_seen_by_the_next_forward() -> None:
    run_world(4, evaluates_between_rounds)


class Tied(nn.Module):
    """A language model's embedding and head in small."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8, bias=False)
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.embed(inputs) + self.head(inputs)  # type: ignore[no-any-return]


def tied(rank: int, world_size: int) -> list[str]:
    state = make_state(rank, (2, 2), None)
    model = xffl.shard(Tied(), state)
    assert model.embed.weight is model.head.weight
    told = []
    for wrap in ([nn.Linear], ["Linear"], [nn.Conv2d]):
        try:
            xffl.shard(Tied(), state, wrap=wrap)  # type: ignore[arg-type]
        except xffl.ConfigError as error:
            told.append(str(error))
    return told


def test_shard_keeps_ties_and_refuses_what_it_cannot_do() -> None:
    told = run_world(4, tied)
    assert all(texts == told[0] for texts in told)
    assert "'embed.weight' and 'head.weight'" in told[0][0]
    assert "give classes of layers" in told[0][1] and "no such layer" in told[0][2]


def not_stepped(rank: int, world_size: int) -> list[str]:
    """In cells of two and one, sharding gives cell 0 other parameters and leaves cell 1 those that were there."""
    state = make_state(rank, (2, 1), None)
    model, other = net(), net()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    model = xffl.shard(model, state)
    foreign = torch.optim.SGD(other.parameters(), lr=0.1)
    told = []
    for optimizers in (early, foreign, [foreign, torch.optim.SGD(model.parameters(), lr=0.1)]):
        try:
            xffl.FederatedScaling(model, optimizers, state, every=1)
            told.append("nothing")
        except xffl.ConfigError as error:
            told.append(str(error))
    return told


def test_an_optimizer_that_leaves_the_model_alone_is_refused() -> None:
    told = run_world(3, not_stepped)
    assert all(texts == told[0] for texts in told)
    early, foreign, both = told[0]
    assert "make the optimizer after xffl.shard" in early and "(ranks 0-1 of 3)" in early
    assert "so it would not be trained" in foreign and "ranks" not in foreign  # all have found the same
    assert both == "nothing"


def assigned(model: nn.Module) -> None:
    """Give a model other parameters with the same values, as load_state_dict(assign=True) does."""
    copies = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(copies, assign=True)


def replaced(rank: int, world_size: int) -> dict[str, str]:
    """Replace parameters that optimizers and DDP hold; in cells of two (DDP) and one (plain)."""
    state = make_state(rank, (2, 1), 1)
    told: dict[str, str] = {}

    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = net()
        model[1].register_buffer("seen", torch.zeros(1))
        model = xffl.shard(model, state)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def train(
        name: str,
        before: Callable[[nn.Module], object] = lambda _: None,
        inside: Callable[[nn.Module], object] = lambda _: None,
        **options: Any,
    ) -> None:
        model, optimizer = start()
        before(model)
        rounds: list[int] = []
        try:
            with xffl.FederatedScaling(
                model, optimizer, state, on_round=lambda report: rounds.append(report.round), **{"every": 1, **options}
            ):
                train_step(model, optimizer, 0, rank)
                inside(model)
                train_step(model, optimizer, 1, rank)
            told[name] = f"nothing, {rounds}"
        except xffl.ConfigError as error:
            told[name] = f"{error}, {rounds}"

    def one(model: nn.Module) -> None:
        layer = model.get_submodule("module.2" if hasattr(model, "module") else "2")
        layer.weight = nn.Parameter(layer.weight.detach().clone())

    def on_rank_2(model: nn.Module) -> None:
        if rank == 2:  # in a cell of DDP torch itself would wait for the others
            one(model)

    def added(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        layer = model.get_submodule("module.2" if hasattr(model, "module") else "2")
        layer.register_parameter("adapter", nn.Parameter(torch.zeros(3, 8)))

    def counted(model: nn.Module) -> None:
        model.load_state_dict(model.state_dict())
        normed = model.get_submodule("module.1" if hasattr(model, "module") else "1")
        normed.seen = normed.seen + 1  # a buffer may be another object

    def weight_norm(model: nn.Module) -> None:
        nn.utils.parametrizations.weight_norm(model.get_submodule("module.2" if hasattr(model, "module") else "2"))

    train("inside", inside=assigned)
    train("inside, one of rank 2", inside=on_rank_2)
    train("inside, delayed", inside=assigned, every=2, delay=1, aggregator={"overlap": True})
    train("inside, weight_norm", inside=weight_norm)
    train("before", before=assigned)
    train("before, one", before=one)
    train("before, weight_norm", before=weight_norm)
    train("before, adapter", before=added)
    train("loaded", before=lambda model: model.load_state_dict(model.state_dict()), inside=counted)

    model, optimizer = start()
    scaling = xffl.FederatedScaling(model, optimizer, state, every=1)
    assigned(model)
    try:
        scaling.__enter__()
    except xffl.ConfigError as error:
        told["between"] = str(error)
    # DDP adds up gradients of the old ones, though the optimizer holds the new.
    try:
        xffl.FederatedScaling(model, torch.optim.SGD(model.parameters(), lr=0.1), state, every=1).__enter__()
    except xffl.ConfigError as error:
        told["ddp"] = str(error)
    # Without an optimizer that it knows of, an aggregator notices, too.
    model, _ = start()
    aggregator = xffl.Aggregator(model, state)
    aggregator.aggregate()
    on_rank_2(model)
    try:
        aggregator.aggregate()
    except xffl.ConfigError as error:
        told["aggregator"] = str(error)
    told["rounds"] = str(aggregator.rounds)
    return told


def test_parameters_that_are_replaced_are_no_longer_trained() -> None:
    told = run_world(3, replaced)
    assert all(one == told[0] for one in told)
    found = told[0]
    for name in ("inside", "inside, one of rank 2", "inside, delayed", "aggregator"):
        assert "were replaced by other objects" in found[name] and "assign=False" in found[name], name
    assert "'2.weight'" in found["inside, one of rank 2"] and "(rank 2 of 3)" in found["inside, one of rank 2"]
    assert found["inside"].endswith("[1]") and found["rounds"] == "1"
    assert "tensors have changed" in found["inside, weight_norm"]
    assert "so it would not be trained" in found["before"] and "so it would not be trained" in found["between"]
    assert "so it would not be trained" in found["before, adapter"]
    assert "'2.weight'" in found["before, one"] and "after" in found["before, one"]
    assert "original1" in found["before, weight_norm"]
    assert "DDP averages the gradients of the old one" in found["ddp"] and "(ranks 0-1 of 3)" in found["ddp"]
    assert found["loaded"] == "nothing, [1, 2]"


def gathered(rank: int, world_size: int, folder: str) -> dict[str, str]:
    """After a forward pass without a backward one FSDP's outermost unit holds other parameters than its optimizer."""
    state = make_state(rank, (2,), None)
    strategy = FSDPStrategy({"distributed": {"strategy": "fsdp"}})
    strategy.setup(state)
    model = strategy.wrap_model(net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train_step(model, optimizer, 0, rank)
    told: dict[str, str] = {}

    def attempt(name: str, call: Callable[[], object]) -> None:
        with torch.no_grad():
            model(batch(0, rank)[0])
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters()), "nothing is tested"
        try:
            told[name] = str(call())
        except xffl.XfflError as error:
            told[name] = str(error)

    def enter() -> None:
        with xffl.FederatedScaling(model, optimizer, state, every=1), torch.no_grad():
            model(batch(0, rank)[0])

    def saves() -> None:
        with AsyncSaver(state) as saver:
            saver.save(f"{folder}/async", {"optimizer": optimizer, "model": model})

    def clipped() -> float:
        return float(strategy.clip_grad_norm(model, 1e9))

    def put_aside() -> float:
        with weights_put_aside(model):
            return sum(float(complete(value).abs().sum()) for value in model.state_dict().values())

    parts = {"optimizer": optimizer, "model": model}
    attempt("scaling", enter)
    trained = digests(model)
    attempt("put aside", put_aside)
    assert digests(model) == trained
    aggregator = xffl.Aggregator(model, state)
    attempt("regroup", lambda: aggregator.regroup(RoundScope(state, state.topology, goes_on=True)))
    attempt("save", lambda: save_checkpoint(f"{folder}/plain", parts, state))
    attempt("load", lambda: load_checkpoint(f"{folder}/plain", parts, state))
    attempt("async", saves)
    attempt("trained", lambda: {type(one.data) for one in trained_parameters({"model": model}).values()} - {DTensor})
    nn.functional.mse_loss(model(batch(1, rank)[0]), batch(1, rank)[1]).backward()
    right = clipped()
    attempt("clip", lambda: None if clipped() == right > 0 else "another norm")
    return told


def test_what_compares_parameters_reshards_first(tmp_path: Path) -> None:
    for told in run_world(2, gathered, str(tmp_path)):
        assert told == {
            "scaling": "None",
            "put aside": "0.0",
            "regroup": "None",
            "save": "None",
            "load": "{}",
            "async": "None",
            "trained": "set()",
            "clip": "None",
        }


def compiled(rank: int, world_size: int, what: str) -> tuple[list[int], torch.Tensor]:
    """Train with the optimizer's step, or all of a step, given to the compiler."""
    state = make_state(rank, (1, 1), None)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    # Without foreach, torch 2.11's compiler makes add_(alpha=) a product and a sum, which rounds twice.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)

    def train(inputs: torch.Tensor) -> None:
        model(inputs).square().mean().backward()
        step()
        optimizer.zero_grad()

    step = torch.compile(optimizer.step, backend="eager") if what == "step" else optimizer.step
    run = torch.compile(train, backend="eager") if what == "train" else train
    rounds: list[int] = []
    with xffl.FederatedScaling(model, optimizer, state, every=2, on_round=lambda told: rounds.append(told.round)):
        for number in range(7):
            run(torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank)))
    return rounds, model.weight.detach().clone()


def test_rounds_take_place_between_compiled_steps() -> None:
    plain, *others = (run_world(2, compiled, what) for what in ("nothing", "step", "train"))
    for told in others:
        for (rounds, weight), (expected, other) in zip(told, plain, strict=True):
            assert rounds == expected == [1, 2, 3, 4] and torch.equal(weight, other)


class Mine(torch.optim.SGD):
    """An optimizer whose step calls its parent's, and runs out of memory where it is told to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            self.fails = False
            raise MemoryError
        return super().step(closure)


class Named(torch.optim.SGD):
    """An optimizer whose step calls its parent's, and bears its name."""

    @functools.wraps(torch.optim.SGD.step)
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Keeping(torch.optim.SGD):
    """An optimizer that makes a second copy of the weights in its third step."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.steps += 1
        for parameter in self.param_groups[0]["params"] if self.steps == 3 else ():
            self.state[parameter]["slow"] = parameter.detach().clone()


class Noted(FedProx):
    """A client that counts how often gradients are changed."""

    changes = 0

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.changes += 1
        super().before_step(optimizer)


def called(state: DistributedState, rank: int, kind: type[torch.optim.SGD], way: str) -> tuple[int, ...]:
    """Make four steps in one way of many, one of them in a callback; return what was counted."""
    model = xffl.shard(net(), state)
    optimizer = kind(model.parameters(), lr=0.1)
    client = None if way in ("closure", "within") else Noted(mu=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    rounds: list[int] = []

    def note(report: xffl.RoundReport) -> None:
        rounds.append(report.round)
        if way == "within" and len(rounds) == 1:
            train_step(model, optimizer, 9, rank)

    with xffl.FederatedScaling(model, optimizer, state, every=2, client=client, on_round=note) as scaling:
        if way == "scheduled":
            torch.optim.lr_scheduler.StepLR(optimizer, 1)
        step = torch.compile(optimizer.step, backend="eager") if way == "compiled" else optimizer.step
        for number in range(3 if way == "within" else 4):
            inputs, targets = batch(number, rank)
            loss = nn.functional.mse_loss(model(inputs), targets)
            (scaler.scale(loss) if way == "scaled" else loss).backward()
            if way == "closure":
                step(loss.detach)
            elif way == "scaled":
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.fails = way == "fails" and number == 1  # type: ignore[attr-defined]
                with contextlib.suppress(MemoryError):  # the batch is given up
                    step()
            optimizer.zero_grad()
        counted = (scaling.local_steps, len(rounds), 0 if client is None else client.changes)
    return (*counted, len(rounds))


def subclassed(rank: int, world_size: int) -> None:
    state = make_state(rank, (1, 1), None)
    for kind in (torch.optim.SGD, Mine, Named):
        for way in ("plain", "closure", "compiled", "scheduled", "scaled", "within", "fails"):
            expected = (4, 2, 0 if way in ("closure", "within") else 4, 2)
            if kind is Mine and way == "fails":
                expected = (3, 1, 4, 2)
            assert called(state, rank, kind, way) == expected, (kind, way)


def test_a_step_that_calls_its_parent_s_is_one_step() -> None:
    run_world(2, subclassed)


@pytest.mark.parametrize("kind", [Mine, Named])
def test_steps_inside_of_steps_are_expected_of_classes_that_have_their_own(kind: type[torch.optim.SGD]) -> None:
    class Heir(torch.optim.SGD):
        pass

    plain, heir, other = (made([nn.Parameter(torch.ones(1))], lr=0.1) for made in (torch.optim.SGD, Heir, kind))
    assert not steps_may_nest([plain]) and not steps_may_nest([heir])
    assert steps_may_nest([other]) and steps_may_nest([plain, heir])


def keeps_copy(rank: int, world_size: int, ends: str) -> str:
    """Make a copy of the weights after the first round, in a block that ends in one way or the other."""
    state = make_state(rank, (1, 1), None)
    model = nn.Linear(64, 64)
    optimizer = Keeping(model.parameters(), lr=1e-4)
    scaling = xffl.FederatedScaling(model, optimizer, state, every=1)
    with contextlib.redirect_stderr(io.StringIO()) as told, contextlib.suppress(KeyError), scaling:
        for _ in range(4):
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
        if ends == "by an error":
            raise KeyError
    return told.getvalue()


@pytest.mark.parametrize("ends", ["by itself", "by an error"])
def test_a_copy_of_the_weights_that_comes_late_is_told_at_the_end(ends: str) -> None:
    first, second = run_world(2, keeps_copy, ends)
    assert "optimizer Keeping keeps a copy of the weights in its state ('slow')" in first and not second


def backward(model: nn.Module, step: int, rank: int) -> None:
    model.zero_grad()
    inputs, targets = batch(step, rank)
    nn.functional.mse_loss(model(inputs), targets).backward()


def several(rank: int, world_size: int, sizes: tuple[int, ...]) -> None:
    """Whichever optimizer steps after the last of the list: all that was stepped is in a round, with a weight."""
    state = make_state(rank, sizes, None)
    cell = state.topology.cell_of(rank)
    for order, every, batches, options in (
        ("ba", 2, (4, 4), {}),
        ("ba", 1, (2, 5), {}),  # cell 0 answers rounds, with nothing to give after the first
        ("abaa", 2, (2, 3), {"aggregator": {"combine": "fednova"}}),
        ("a", 2, (3, 3), {}),
        ("a", 2, (3, 3), {"delay": 1}),
        ("ba", 2, (3, 3), {"delay": 1}),
        ("ba", 1, (3, 3), {"aggregator": {"fragments": 2}}),
    ):
        model = xffl.shard(net(), state)
        optimizers = {"a": torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)}
        optimizers["b"] = torch.optim.SGD(model[2].parameters(), lr=0.1)
        fresh = 0
        reports: list[xffl.RoundReport] = []

        def count() -> float:
            nonlocal fresh
            seen, fresh = fresh, 0
            return float(seen)

        scaling = xffl.FederatedScaling(
            model, list(optimizers.values()), state, every=every, weight=count, on_round=reports.append, **options
        )
        with scaling:
            for step in range(batches[cell]):
                fresh += 4 + 4 * cell
                backward(model, step, rank)
                for name in order:
                    optimizers[name].step()
            assert scaling.local_steps == batches[cell] * order.count("b")
            here = weights(model)
        told: list[Any] = [None] * world_size
        dist.all_gather_object(told, (here, weights(model)))
        case = (order, every, batches, options)
        for _, there in told:
            for one, other in zip(weights(model), there, strict=True):
                assert torch.equal(one, other), case
        if batches[0] == batches[1] and not options:  # the last round took in what each cell had then
            first, last = told[0][0], told[-1][0]
            for one, x, y in zip(weights(model), first, last, strict=True):
                torch.testing.assert_close(one, (x + 2 * y) / 3, msg=str(case))
        assert all(weight > 0 for weight in reports[0].weights), case
        if batches == (2, 5):
            assert [report.weights[0] > 0 for report in reports] == [True, True, True, False, False, False], case
            assert all(report.weights[1] > 0 for report in reports), case


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2)], ids=str)
def test_what_steps_after_the_last_optimizer_is_in_a_round(sizes: tuple[int, ...]) -> None:
    run_world(sum(sizes), several, sizes)


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except xffl.XfflError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def uncounted(rank: int, world_size: int, sizes: tuple[int, ...]) -> list[str]:
    """Train without a call of step(); or with one inside the backward pass."""
    state = make_state(rank, sizes, None)
    model = xffl.shard(net(), state)
    named = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def leave(change: Callable[[], object], given: Any = optimizer, **options: Any) -> str:
        def run() -> None:
            with xffl.FederatedScaling(model, given, state, every=1, **options) as scaling:
                change()
                if options:
                    scaling.load_state_dict(scaling.state_dict())

        return refused(run)

    def shift(where: int | None = None) -> None:
        if where in (None, rank):
            parameter = named["2.weight"].data  # as optimizers of one's own do; it leaves tensors' versions alone
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).sub_(0.5)

    def in_backward(order: int) -> None:  # with a model of its own: FSDP does not outlive an error there
        model = xffl.shard(net(), state)
        each = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
        for parameter, one in zip(model.parameters(), each, strict=True):
            parameter.register_post_accumulate_grad_hook(lambda _, one=one: one.step())
        with xffl.FederatedScaling(model, each[::order], state, every=1):
            backward(model, 0, rank)

    def evaluate() -> None:
        with torch.no_grad():
            model(batch(0, rank)[0])  # FSDP's outermost unit stays gathered

    def count_in_backward() -> None:
        model = xffl.shard(net(), state)
        with xffl.FederatedScaling(model, None, state, every=1) as scaling:
            model[0].bias.register_post_accumulate_grad_hook(lambda _: scaling.step())
            backward(model, 0, rank)

    def count_twice() -> None:
        with xffl.FederatedScaling(model, optimizer, state, every=1) as scaling:
            scaling.step()

    told = [
        leave(evaluate),
        leave(lambda: None, None),
        leave(shift, aggregator={"policies": {"*.bias": "average"}}),  # the state that is loaded knows of the change
        leave(shift),
        leave(lambda: shift(world_size - 1)),
        leave(shift, None),
        refused(lambda: in_backward(1)),
        refused(lambda: in_backward(-1)),
        refused(count_in_backward),
        refused(count_twice),
        refused(lambda: xffl.FederatedScaling(model, None, state, every=1, client="fedprox")),
        refused(lambda: xffl.FederatedScaling(model, optimizer if rank else None, state, every=1)),
        refused(xffl.FederatedScaling(model, None, state, every=1).step),
    ]
    told.append(counted_by_hand(state, rank))
    return told


def counted_by_hand(state: DistributedState, rank: int) -> str:
    """A loop that counts its steps itself, after hooks have stepped in the backward pass, is one that calls step()."""
    found: list[Any] = []
    for is_fused in (False, True):
        model = xffl.shard(net(), state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        reports: list[xffl.RoundReport] = []
        given = None if is_fused else optimizer
        with xffl.FederatedScaling(model, given, state, every=2, on_round=reports.append) as scaling:
            if is_fused:
                for parameter in model.parameters():
                    one = torch.optim.SGD([parameter], lr=0.1)
                    parameter.register_post_accumulate_grad_hook(lambda _, one=one: one.step())
            for step in range(5 + state.topology.cell_of(rank)):
                backward(model, step, rank)
                scaling.step() if is_fused else optimizer.step()
            assert scaling.local_steps == step + 1
        found.append(([report.round for report in reports], digests(model)))
    return "the same" if found[0] == found[1] else str(found)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2)], ids=str)
def test_training_that_no_step_counts_is_told(sizes: tuple[int, ...]) -> None:
    told = run_world(sum(sizes), uncounted, sizes)
    assert all(texts == told[0] for texts in told)
    still, idle, loaded, *uncounted_, forwards, backwards, by_hand, twice, client, apart, early, same = told[0]
    assert still == idle == loaded == "nothing"
    for text in uncounted_:
        assert text.startswith("StateError: parameters have changed") and "scaling.step()" in text
    assert f"rank {sum(sizes) - 1} of {sum(sizes)}" in uncounted_[1] and "With optimizer=None" in uncounted_[2]
    for text in (forwards, backwards, by_hand):
        assert text.startswith("ConfigError: ") and "inside a backward pass" in text and "scaling.step()" in text
    assert "counts a local step already" in twice and "optimizer is None" in client
    assert "by step()" in apart and "by optimizers" in apart and "enter it first" in early
    assert same == "the same"
