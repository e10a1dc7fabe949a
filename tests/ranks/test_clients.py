"""Clients on sharded models, against simulations of whole cells in one process that know of no shards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import xffl
from tests.ranks.test_round import complete, digests, make_state
from tests.worlds import run_world
from xffl.aggregation.algorithms.clients import Client, FedProx, Scaffold
from xffl.aggregation.algorithms.schedules import PerCell
from xffl.distributed.distributed_state import DistributedState

LAYOUTS = [((2, 2), None), ((4, 2), None), ((2, 1), 1)]
RATE = 0.1
ROUNDS = 4

Values = list[torch.Tensor]
Change = Callable[[int, Values, Values], Values]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    inputs = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(4, 3, generator=generator, dtype=torch.float64) + rank


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, numbers: range) -> None:
    for number in numbers:
        inputs, targets = batch(number, rank)
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


class Federation:
    """Dense cells: plain lists of weights, and SGD written out."""

    def __init__(self, sizes: tuple[int, ...], momentum: float) -> None:
        self.model = net()
        self.x: Values = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.y = [[one.clone() for one in self.x] for _ in sizes]
        self.ranks = [range(sum(sizes[:cell]), sum(sizes[: cell + 1])) for cell in range(len(sizes))]
        self.momentum = momentum
        self.buffers: list[Values] = [[torch.zeros_like(one) for one in self.x] for _ in sizes]
        self.made = [0] * len(sizes)

    def gradients(self, cell: int) -> Values:
        """The mean over the ranks of a cell, each with its own batch."""
        values = [one.clone().requires_grad_() for one in self.y[cell]]
        names = [name for name, _ in self.model.named_parameters()]
        losses = []
        for rank in self.ranks[cell]:
            inputs, targets = batch(self.made[cell], rank)
            outputs = torch.func.functional_call(self.model, dict(zip(names, values, strict=True)), (inputs,))
            losses.append(nn.functional.mse_loss(outputs, targets))
        return list(torch.autograd.grad(torch.stack(losses).mean(), values))

    def train(self, cell: int, steps: int, change: Change = lambda cell, gradients, values: gradients) -> None:
        for _ in range(steps):
            gradients = change(cell, self.gradients(cell), self.y[cell])
            for buffer, value, gradient in zip(self.buffers[cell], self.y[cell], gradients, strict=True):
                buffer.mul_(self.momentum).add_(gradient)
                value.sub_(buffer, alpha=RATE)
            self.made[cell] += 1

    def meet(self, values: Values) -> None:
        self.x = [one.clone() for one in values]
        self.y = [[one.clone() for one in values] for _ in self.y]

    def mean(self) -> Values:
        return [torch.stack(each).mean(0) for each in zip(*self.y, strict=True)]


def close(model: nn.Module, expected: Values) -> None:
    for parameter, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(complete(parameter), value, rtol=1e-9, atol=1e-11)


def run(
    state: DistributedState,
    rank: int,
    counts: Sequence[int],
    *,
    momentum: float = 0.0,
    rounds: int = ROUNDS,
    **options: Any,
) -> nn.Module:
    """Train with a number of local steps in each cell between two rounds."""
    assert state.federated_rank is not None
    model = xffl.shard(net(), state)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
    reports: list[xffl.RoundReport] = []

    def note(report: xffl.RoundReport) -> None:
        reports.append(report)
        if options.get("aggregator"):  # the paper's local solver starts each round without momentum
            optimizer.state.clear()

    with xffl.FederatedScaling(model, optimizer, state, every=PerCell(counts), on_round=note, **options):
        train(model, optimizer, rank, range(rounds * counts[state.federated_rank]))
    assert [report.round for report in reports] == list(range(1, rounds + 1))
    return model


def prox(state: DistributedState, rank: int, sizes: tuple[int, ...]) -> None:
    """Without a pull every bit is that of no client; with one, that of the dense cells."""
    counts = [3] * len(sizes)
    plain, still = (run(state, rank, counts, momentum=0.9, client=client) for client in (None, FedProx(mu=0.0)))
    assert digests(plain) == digests(still)
    dense = Federation(sizes, momentum=0.9)

    def pull(cell: int, gradients: Values, values: Values) -> Values:
        return [g + 0.7 * (y - x) for g, y, x in zip(gradients, values, dense.x, strict=True)]

    for _ in range(ROUNDS):
        for cell, steps in enumerate(counts):
            dense.train(cell, steps, pull)
        dense.meet(dense.mean())
    pulled = run(state, rank, counts, momentum=0.9, client="fedprox:mu=0.7")
    close(pulled, dense.x)
    assert digests(pulled) != digests(plain)


def whole(model: nn.Module, locals_: dict[str, torch.Tensor]) -> Values:
    """The complete tensors that a client holds this rank's elements of, in the parameters' order."""
    parts = []
    for name, parameter in model.named_parameters():
        part = locals_[name.removeprefix("module.")]
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            shape, stride = parameter.shape, parameter.stride()
            part = DTensor.from_local(part, mesh, placements, shape=shape, stride=stride).full_tensor()
        parts.append(part)
    return parts


def scaffold(state: DistributedState, rank: int, sizes: tuple[int, ...]) -> None:
    """The paper's algorithm with c and c_i of each cell, unequal steps, over several rounds."""
    counts = [3 + 2 * cell for cell in range(len(sizes))]
    dense = Federation(sizes, momentum=0.0)
    c = [torch.zeros_like(one) for one in dense.x]
    own = [copy.deepcopy(c) for _ in sizes]

    def correct(cell: int, gradients: Values, values: Values) -> Values:
        return [g - mine + all_ for g, mine, all_ in zip(gradients, own[cell], c, strict=True)]

    for _ in range(ROUNDS):
        for cell, steps in enumerate(counts):
            dense.train(cell, steps, correct)
        own = [
            [
                mine - all_ + (x - y) / (counts[cell] * RATE)
                for mine, all_, x, y in zip(own[cell], c, dense.x, dense.y[cell], strict=True)
            ]
            for cell in range(len(sizes))
        ]
        c = [torch.stack(each).mean(0) for each in zip(*own, strict=True)]
        dense.meet(dense.mean())
    client = Scaffold()
    model = run(state, rank, counts, client=client)
    close(model, dense.x)
    saved = client.state_dict()
    for got, expected in zip(whole(model, saved["variates"]), c, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-10)
    corrections = whole(model, saved["corrections"])
    told: list[Values] = [[] for _ in range(sum(sizes))]
    dist.all_gather_object(told, corrections)
    firsts = [ranks[0] for ranks in dense.ranks]
    for each in zip(*(told[first] for first in firsts), strict=True):
        assert max(one.abs().max() for one in each) > 1e-3
        torch.testing.assert_close(torch.stack(each).sum(0), torch.zeros_like(each[0]), rtol=0, atol=1e-12)


def nova(state: DistributedState, rank: int, sizes: tuple[int, ...], momentum: float) -> None:
    """Unequal steps count alike: the mean of normalized updates, by samples, as in the paper."""
    counts = [2 + 4 * cell for cell in range(len(sizes))]
    dense = Federation(sizes, momentum)
    shares = [size * (cell + 1) for cell, size in enumerate(sizes)]
    shares = [share / sum(shares) for share in shares]
    lengths = [(k - momentum * (1 - momentum**k) / (1 - momentum)) / (1 - momentum) for k in counts]
    tau = sum(share * length for share, length in zip(shares, lengths, strict=True))
    for _ in range(ROUNDS):
        for cell, steps in enumerate(counts):
            dense.train(cell, steps)
        dense.buffers = [[torch.zeros_like(one) for one in dense.x] for _ in sizes]
        moved = [
            sum(p * (y - x) / a for p, a, y in zip(shares, lengths, ys, strict=True))
            for x, *ys in zip(dense.x, *dense.y, strict=True)
        ]
        dense.meet([x + tau * one for x, one in zip(dense.x, moved, strict=True)])
    assert state.federated_rank is not None
    weight = 1.0 + state.federated_rank
    model = run(state, rank, counts, momentum=momentum, aggregator={"combine": "fednova"}, weight=lambda: weight)
    close(model, dense.x)


def in_a_layout(rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None) -> None:
    state = make_state(rank, sizes, hsdp)
    prox(state, rank, sizes)
    scaffold(state, rank, sizes)
    nova(state, rank, sizes, momentum=0.0)
    nova(state, rank, sizes, momentum=0.8)


@pytest.mark.parametrize("sizes, hsdp", LAYOUTS, ids=str)
def test_clients_and_fednova_are_those_of_dense_cells(sizes: tuple[int, ...], hsdp: int | None) -> None:
    run_world(sum(sizes), in_a_layout, sizes, hsdp, timeout_s=240.0)


class Heads(nn.Module):
    """A body that all share, a head of each cell, and a frozen embedding; the body's two layers are one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Linear(6, 6, dtype=torch.float64).requires_grad_(False)
        self.body = nn.Linear(6, 6, dtype=torch.float64)
        self.again = self.body
        self.head = nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(torch.tanh(self.body(self.embed(inputs)))))  # type: ignore[no-any-return]


def partly(rank: int, world_size: int) -> None:
    """What stays in the cell and what is frozen has no client: a head trains as it would alone."""
    state = make_state(rank, (2, 2), None)
    for client in (Scaffold(), FedProx(mu=0.5)):
        model = xffl.shard(Heads(), state)
        optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=RATE)
        policies = {"head.*": "local"}
        held: list[bool] = []

        def note(report: xffl.RoundReport, model: nn.Module = model, held: list[bool] = held) -> None:
            told: list[Any] = [None] * world_size
            dist.all_gather_object(told, [complete(model.head.bias), complete(model.body.bias)])
            held.append(torch.equal(told[0][1], told[2][1]) and not torch.equal(told[0][0], told[2][0]))

        with xffl.FederatedScaling(
            model, optimizer, state, every=2, client=client, aggregator={"policies": policies}, on_round=note
        ):
            train(model, optimizer, rank, range(6))
            model(torch.zeros(4, 6, dtype=torch.float64))  # leaves a gathered copy behind
        assert held == [True] * 3
        names = {key for one in client.state_dict().values() for key in one}
        assert names == {"body.weight", "body.bias"}


class Recorder(Client):
    """A client of one's own, in the order of its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def setup(self, parameters: Any, optimizers: Any) -> None:
        self.calls.append(f"setup {sorted(parameters)} {len(optimizers)}")

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append("before step")

    def after_step(self, optimizer: torch.optim.Optimizer, factors: Sequence[float]) -> None:
        self.calls.append(f"after step {list(factors)}")

    def before_round(self) -> None:
        self.calls.append("before round")

    def after_round(self, *, is_dropped: bool) -> None:
        self.calls.append(f"after round {is_dropped}")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def in_order(rank: int, world_size: int) -> None:
    """A rejected round has no after; a dropped cell is told so; two optimizers each have their steps."""
    state = make_state(rank, (1, 1), None)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.0) for layer in model]
    for nonfinite, ends in (("reject", []), ("drop_cell", [f"after round {rank == 1}"])):
        client = Recorder()
        scaling = xffl.FederatedScaling(
            model, optimizers, state, every=1, client=client, aggregator={"nonfinite": nonfinite}
        )
        with scaling:
            kept = copy.deepcopy(model.state_dict())
            if rank == 1:
                with torch.no_grad():
                    model[0].weight.fill_(float("nan"))
            try:
                for optimizer in optimizers:
                    optimizer.step()
                assert nonfinite == "drop_cell"
            except xffl.RoundError:
                assert nonfinite == "reject"
            model.load_state_dict(kept)
            for optimizer in optimizers:
                optimizer.step()
        names = ["0.bias", "0.weight", "1.bias", "1.weight"]
        steps = ["before step", "after step [1.0]"] * 2
        assert client.calls == [
            *(f"setup {names} 2", *steps, "before round", *ends),
            *(*steps, "before round", "after round False"),
            "before round",  # nothing is left for the closing one
        ]


def test_what_rounds_do_not_average_has_no_client() -> None:
    run_world(4, partly)


def test_clients_are_called_in_order() -> None:
    run_world(2, in_order)


def in_two_blocks(rank: int, world_size: int) -> None:
    """What a client remembers outlives a block, also where the next one makes another aggregator."""
    state = make_state(rank, (1, 1), None)
    whole = []
    for blocks in ([range(12)], [range(4), range(4, 12)]):
        model = xffl.shard(net(), state)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        scaling = xffl.FederatedScaling(
            model, optimizer, state, every=4, client="scaffold", aggregator={"overlap": True}
        )
        for steps in blocks:
            with scaling:
                train(model, optimizer, rank, steps)
        whole.append(digests(model))
    assert whole[0] == whole[1]


def test_a_client_goes_on_in_a_second_block() -> None:
    run_world(2, in_two_blocks)


class Stop(Exception):
    """Ends a with block without a round."""


def stopped(
    state: DistributedState, rank: int, first: int, saved: dict[str, Any] | None, last: int | None, **options: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    """Train from step ``first`` to ``last``, or to the end; resume from what was saved, in a new model."""
    assert state.federated_rank is not None
    model = xffl.shard(net(), state)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
    scaling = xffl.FederatedScaling(model, optimizer, state, weight=lambda: 1.0 + rank, **options)
    state_dict: dict[str, Any] = {}
    with suppress(Stop), scaling:
        if saved is not None:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            scaling.load_state_dict(saved["scaling"])
        train(model, optimizer, rank, range(first, 13 + 4 * state.federated_rank if last is None else last))
        state_dict = copy.deepcopy(
            {"scaling": scaling.state_dict(), "optimizer": optimizer.state_dict(), "model": model.state_dict()}
        )
        if last is not None:
            raise Stop
    return state_dict, digests(model)


def resumes(rank: int, world_size: int) -> None:
    state = make_state(rank, (2, 2), None)
    cell = state.federated_rank or 0
    uneven: dict[str, Any] = {"every": PerCell((4, 6))}
    # Where each cell stops: both after as many rounds or checks, and in the middle of a window.
    cases: list[tuple[tuple[int, int], dict[str, Any]]] = [
        ((6, 9), {**uneven, "client": "scaffold"}),
        ((6, 9), {**uneven, "client": "fedprox:mu=0.3"}),
        ((6, 9), {**uneven, "algorithm": "fednova"}),
        ((6, 5), {"every": "warmup:rounds=1,every=2,then=5", "aggregator": {"server": "fedadam"}}),
        ((7, 7), {"every": {"name": "divergence", "every": 2, "threshold": 0.5}}),
    ]
    for at, options in cases:
        _, expected = stopped(state, rank, 0, None, None, **options)
        saved, _ = stopped(state, rank, 0, None, at[cell], **options)
        _, got = stopped(state, rank, at[cell], saved, None, **options)
        assert got == expected, options
        forgetful = {**saved, "scaling": {**saved["scaling"], "since": 0}}
        assert stopped(state, rank, at[cell], forgetful, None, **options)[1] != expected, options


def test_resuming_in_the_middle_equals_never_having_stopped() -> None:
    run_world(4, resumes, timeout_s=240.0)


class Failing(FedProx):
    """Cannot get ready for a round on one rank."""

    def before_round(self) -> None:
        if dist.get_rank() == 1:
            raise MemoryError("no room")


def failing(rank: int, world_size: int) -> None:
    state = make_state(rank, (1, 1), None)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaling = xffl.FederatedScaling(model, optimizer, state, every=1, client=Failing(0.1))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(xffl.RoundError, match="could not be opened: MemoryError: no room"), scaling:
        optimizer.step()


def test_a_client_that_fails_on_one_rank_is_told_to_all() -> None:
    run_world(2, failing, timeout_s=40.0)


def wrong(rank: int, world_size: int) -> None:
    state = make_state(rank, (1, 1), None)
    model = nn.Linear(2, 2)
    sgd, adam = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters())
    made = xffl.Aggregator(model, state)
    cases: list[tuple[torch.optim.Optimizer, dict[str, Any], str]] = [
        (sgd, {"client": "fedprox", "delay": 1}, "leave one of them out"),
        (sgd, {"client": "fedprox", "aggregator": {"fragments": 2}}, "fragments is 2"),
        (sgd, {"client": "fedprox", "aggregator": made}, "give aggregator={option: value}"),
        (sgd, {"client": "fedprox:mu=-1"}, "mu must be a number >= 0, got -1"),
        (sgd, {"client": "fedprocks"}, "'fedprocks' is unknown"),
        (sgd, {"client": FedProx(mu=0.1 + rank)}, r"FedProx\(mu=1.1\)"),
        (sgd, {"client": Scaffold() if rank else None}, "client=None"),
        (sgd, {"algorithm": "scaffold", "client": "fedprox"}, "a client of its own"),
        (sgd, {"algorithm": "fedavgm", "aggregator": made}, "give aggregator={option: value}"),
        (sgd, {"algorithm": "fedavgm", "aggregator": {"server": "fedadam"}}, "aggregator sets server"),
        (adam, {"client": "scaffold"}, "Adam"),
    ]
    for optimizer, options, told in cases:
        with pytest.raises(xffl.ConfigError, match=told):
            xffl.FederatedScaling(model, optimizer, state, every=3, **options).__enter__()
    with xffl.FederatedScaling(model, sgd, state, every=3, client="fedprox") as scaling:
        with pytest.raises(xffl.ConfigError, match="closure"):
            sgd.step(lambda: 1.0)
        saved = scaling.state_dict()
    with pytest.raises(xffl.StateError, match="enter it first"):
        scaling.load_state_dict(saved)
    plain = xffl.FederatedScaling(model, sgd, state, every=3)
    with plain, pytest.raises(xffl.CheckpointError, match="saved with a client"):
        plain.load_state_dict(saved)


def test_wrong_clients_are_refused_on_all_ranks() -> None:
    run_world(2, wrong)
