"""Rare models and moments in which rounds once went wrong: odd types, shared and untied tensors, interrupts."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import xffl
from tests.ranks.test_round import make_state
from tests.ranks.test_round_edges import everyones, linear, shaken
from tests.rounds import aggregator_of, replace_exchange
from tests.worlds import run_world
from xffl.aggregation.engine import buffers as pool
from xffl.aggregation.engine import transport
from xffl.aggregation.engine.planning.transfers import RoundContext
from xffl.aggregation.engine.transport import Move, start_moves


def constant(value: float, dtype: torch.dtype, size: int = 16) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.full((size,), value).to(dtype))])


def narrow_steps(rank: int, world_size: int, dtype: torch.dtype, codec: str) -> None:
    """What a codec leaves out is known, and sent later, in types that could not hold the step itself."""
    state = make_state(rank, (1, 1), None)
    model = constant(1.0, dtype)
    aggregator = xffl.Aggregator(model, state, codec=codec)
    aggregator.aggregate()
    with torch.no_grad():
        model[0].copy_(torch.full((16,), 0.0123))
    wanted = model[0].detach().clone()
    for _ in range(3):
        report = aggregator.aggregate()
        is_there = torch.equal(model[0], wanted)
        assert is_there == (report.codec_error == 0.0)
        assert is_there or codec != "topk:1.0"
    assert is_there


def huge_steps(rank: int, world_size: int, codec: str) -> None:
    """The way from one value to another may be longer than the type reaches."""
    state = make_state(rank, (1, 1), None)
    model = constant(-40_000.0, torch.float16)
    aggregator = xffl.Aggregator(model, state, codec=codec)
    aggregator.aggregate()
    with torch.no_grad():
        model[0].fill_(40_000.0)
    for _ in range(2):  # fp16 as a code reaches 65504, so it takes two steps
        aggregator.aggregate()
    assert ((model[0].float() - 40_000.0).abs() < 400.0).all()


def eight_bits(rank: int, world_size: int) -> None:
    """Types that torch computes nothing in take part in all kinds of rounds."""
    state = make_state(rank, (1, 1), None)
    kinds: list[dict[str, Any]] = [{}, {"overlap": True}, {"overlap": True, "norms": True}, {"codec": "int8"}]
    for options in (*kinds, {"combine": "median"}, {"server": "fedadam:lr=0.1"}):
        model = nn.ParameterList([*constant(0.0, torch.float8_e4m3fn), *constant(0.0, torch.float32)])
        aggregator = xffl.Aggregator(model, state, **options)
        for number, alpha in enumerate((None, 0.5), 1):
            for tensor in model:
                tensor.data.copy_(torch.full((16,), float(rank)))
            if "overlap" in options:
                report = aggregator.aggregate_async(alpha=alpha).merge()
                own = 0.0 if alpha is None else alpha * rank
                wanted = own + (1.0 if alpha is None else 1.0 - alpha) * 0.5
            else:
                report, wanted = aggregator.aggregate(), 0.5
            assert report.round == number
            if "server" not in options:
                assert all((tensor.float() - wanted).abs().max() < 0.01 for tensor in model), (options, model)
        assert "overlap" in options or torch.equal(*everyones(model[0].detach().view(torch.uint8).clone()))


def default_type(rank: int, world_size: int) -> None:
    """Scratch of a codec does not follow torch's default."""
    state = make_state(rank, (1, 1), None)
    for dtype in (torch.bfloat16, torch.float64):
        model = constant(float(rank), torch.float32)
        torch.set_default_dtype(dtype)
        try:
            aggregator = xffl.Aggregator(model, state, codec="int8")
        finally:
            torch.set_default_dtype(torch.float32)
        for _ in range(2):
            with torch.no_grad():
                model[0].fill_(float(rank))
            aggregator.aggregate()
        assert (model[0] - 0.5).abs().max() < 1e-3


def counted_alike(rank: int, world_size: int) -> None:
    """What rounds compute and count does not follow a program's default data type: neither narrower nor wider."""
    state = make_state(rank, (1, 1), None)

    def federation(ways: dict[str, Any], rounds: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6, dtype=torch.float32), nn.BatchNorm1d(6, dtype=torch.float32))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        reports: list[xffl.RoundReport] = []
        counts = itertools.count(301.0 + rank)
        client = ways.pop("client", None)
        made = xffl.FederatedScaling(
            model,
            optimizer,
            state,
            every=1,
            weight=lambda: next(counts),
            on_round=reports.append,
            aggregator=ways,
            client=client,
        )
        with made as scaling:
            for step in range(rounds):
                torch.manual_seed(10 * step + rank)
                model(torch.randn(4, 6, dtype=torch.float32)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        told = [(one.weights, one.scale, one.shares, one.update_norms, one.codec_error) for one in reports]
        kept = [values.clone() for values in model.state_dict().values()]
        return {"model": kept, "told": told, "total": scaling.total_weight, "state": state_of(scaling)}

    for ways, rounds in (
        ({"server": "fedadam:is_bias_corrected=true"}, 3),
        ({"server": "AdamW:lr=0.01", "norms": True}, 3),
        ({"server": "diloco", "codec": "topk:0.5"}, 3),
        ({"combine": "norm_clipping:clip=0.01", "codec": "int8"}, 3),
        ({"client": "scaffold"}, 3),
    ):
        usual = federation(dict(ways), rounds)
        for dtype in (torch.bfloat16, torch.float64):
            torch.set_default_dtype(dtype)
            try:
                found = federation(dict(ways), rounds)
            finally:
                torch.set_default_dtype(torch.float32)
            assert_alike(found, usual, f"{ways} {dtype}")


def state_of(scaling: xffl.FederatedScaling) -> dict[str, Any]:
    """What a checkpoint would keep of the rounds, but for a report with its times."""
    return {name: value for name, value in scaling.state_dict().items() if name != "report"}


def assert_alike(found: Any, wanted: Any, where: str) -> None:
    """Compare to the bit; a step's count of torch's own optimizers may be wider."""
    if isinstance(wanted, torch.Tensor):
        is_count = wanted.ndim == 0 and found.dtype == torch.float64
        assert is_count or found.dtype == wanted.dtype, (where, found.dtype)
        assert torch.equal(found.to(wanted.dtype), wanted), where
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for name in wanted:
            assert_alike(found[name], wanted[name], f"{where} {name}")
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), where
        for one, other in zip(found, wanted, strict=True):
            assert_alike(one, other, where)
    else:
        assert found == wanted or found != found, (where, found, wanted)


class ScheduleFree(torch.optim.Optimizer):
    """SGD that evaluates a mean of its steps, as the optimizers of the package schedulefree: z is in its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "train_mode": True})

    @torch.no_grad()
    def _swap(self, weight: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.lerp_(self.state[parameter]["z"], weight)

    def train(self) -> None:
        self._swap(1 - 0.9)

    def eval(self) -> None:
        self._swap(1 - 1 / 0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                z = self.state[parameter].setdefault("z", parameter.clone())
                parameter.lerp_(z, 0.2).sub_(parameter.grad, alpha=0.01)
                z.sub_(parameter.grad, alpha=group["lr"])


def second_copies(rank: int, world_size: int) -> None:
    """Who evaluates other weights than those that rounds average is told so once, and what gives one model does."""
    state = make_state(rank, (1, 1), None)
    for kind, moments, said in (
        (ScheduleFree, None, 1),
        (ScheduleFree, "average", 0),
        (torch.optim.AdamW, None, 0),
        (torch.optim.ASGD, None, 1),
    ):
        model = linear(8)
        optimizer = kind(model.parameters())
        with io.StringIO() as stream, contextlib.redirect_stderr(stream):
            with xffl.FederatedScaling(model, optimizer, state, every=2, moments=moments):
                for step in range(4):
                    torch.manual_seed(10 * step + rank)
                    model(torch.randn(4, 8)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            lines = [line for line in stream.getvalue().splitlines() if f"optimizer {kind.__name__}" in line]
        assert len(lines) == (said if rank == 0 else 0), lines
        mean = torch.optim.swa_utils.AveragedModel(model)  # a mean of the cell's own weights
        mean.module.weight.data.add_(rank)
        xffl.Aggregator(mean, state).aggregate()
        assert torch.allclose(mean.module.weight, model.weight + 0.5)
        assert len({repr(one) for one in everyones(model.weight.tolist())}) == 1
        if moments is not None:
            optimizer.eval()
            assert len({repr(one) for one in everyones(model.weight.tolist())}) == 1
        elif isinstance(optimizer, ScheduleFree):
            assert rank or (
                "train() and eval()" in lines[0] and "xffl.Aggregator(model, state).aggregate()" in lines[0]
            )
            optimizer.eval()
            assert len({repr(one) for one in everyones(model.weight.tolist())}) == 2
            xffl.Aggregator(model, state).aggregate()
            assert len({repr(one) for one in everyones(model.weight.tolist())}) == 1
        elif lines:
            assert "keeps a copy of the weights in its state ('ax')" in lines[0]


def shared_in_a_delay(rank: int, world_size: int) -> None:
    """A merge of tensors that share memory would count local steps twice."""
    state = make_state(rank, (1, 1), None)
    first = linear(4)
    second = linear(4)
    second.weight = nn.Parameter(first.weight.data)
    aggregator = xffl.Aggregator(nn.Sequential(first, second), state, overlap=True, bucket_bytes=64)
    with pytest.raises(xffl.ConfigError, match=r"'0\.weight' and '1\.weight' share memory"):
        aggregator.aggregate_async().merge()


def untied(rank: int, world_size: int) -> None:
    """Loaded from a file without shared storage, a tied weight becomes two, of which the plan knows one."""
    state = make_state(rank, (1, 1), None)
    model = nn.ModuleDict({"one": linear(4), "two": linear(4)})
    model["two"].weight = model["one"].weight
    aggregator = xffl.Aggregator(model, state)
    copies = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(copies, assign=True)
    with pytest.raises(xffl.ConfigError, match=r"look at two\.weight: .*untied"):
        aggregator.aggregate()
    # The other way round: two that become one.
    model = nn.ModuleDict({"one": linear(4), "two": linear(4)})
    aggregator = xffl.Aggregator(model, state)
    model["two"].weight = model["one"].weight
    with pytest.raises(xffl.ConfigError, match=r"look at two\.weight: .*tied"):
        aggregator.aggregate()


def served_in_inference(rank: int, world_size: int) -> None:
    """What a round or a load inside inference mode has made can be written by later rounds."""
    state = make_state(rank, (1, 1), None)
    for options in ({"server": "fedadam:lr=0.1"}, {"codec": "int4"}, {"atomic": False}, {"form": "two_hop"}):
        model = linear(4)
        aggregator = xffl.Aggregator(model, state, **options)  # type: ignore[arg-type]
        with torch.inference_mode():
            assert aggregator.aggregate().round == 1
        shaken(model)
        assert aggregator.aggregate().round == 2
        with torch.inference_mode():
            aggregator.load_state_dict(aggregator.state_dict())
        for number in (3, 4):
            shaken(model)
            assert aggregator.aggregate().round == number
        usual, inside = linear(4), linear(4)
        with torch.inference_mode():
            made_inside = xffl.Aggregator(inside, state, **options)  # type: ignore[arg-type]
        made_outside = xffl.Aggregator(usual, state, **options)  # type: ignore[arg-type]
        for number in (1, 2):
            for one, rounds in ((inside, made_inside), (usual, made_outside)):
                torch.manual_seed(10 * number + rank)
                shaken(one)
                assert rounds.aggregate().round == number
            assert torch.equal(inside.weight, usual.weight), options
    with torch.inference_mode():
        evaluated = linear(4)
        assert xffl.Aggregator(evaluated, state).aggregate().round == 1  # all of it inside, as an evaluation may be
    with pytest.raises(xffl.ConfigError, match=r"'(bias|weight)' was made inside torch.inference_mode"):
        xffl.Aggregator(evaluated, state)


def unfit_without_weight(rank: int, world_size: int) -> None:
    """What is not finite does not stay, though its cell has nothing to say in the round."""
    state = make_state(rank, (1, 1), None)
    for alpha in (None, 0.5):
        model = constant(1.0 if rank == 0 else float("nan"), torch.float32)
        aggregator = xffl.Aggregator(model, state, overlap=True)
        report = aggregator.aggregate_async(1.0 - rank, alpha=alpha).merge()
        assert report.dropped == () and (model[0] == 1.0).all()


def other_combiner(rank: int, world_size: int) -> None:
    """A codec's memory goes with the parts that the form makes, and the form with the combiner."""
    state = make_state(rank, (1, 1, 1), None)
    model = linear(256, seed=rank)
    first = xffl.Aggregator(model, state, codec="int8")
    first.aggregate()
    with pytest.raises(xffl.CheckpointError, match="form=two_hop|form=auto"):
        xffl.Aggregator(model, state, codec="int8", combine="median").load_state_dict(first.state_dict())
    again = xffl.Aggregator(model, state, codec="int8")
    again.load_state_dict(first.state_dict())
    shaken(model)
    assert again.aggregate().round == 2


def interrupt_halfway(aggregator: xffl.Aggregator, lag_s: float) -> list[dist.Work]:
    """Run a round in which a signal comes when the third bucket is to be sent; return what is under way.

    gloo takes back what has not left when its handle goes, and a slower rank would never get to its third bucket.
    """
    calls = 0
    under_way: list[dist.Work] = []

    def interrupted(receive: Sequence[Move], send: Sequence[Move], group: dist.ProcessGroup, tag: int) -> Any:
        nonlocal calls
        if not under_way:
            time.sleep(lag_s)
        calls += bool(send)
        if calls == 3:
            raise KeyboardInterrupt
        works = start_moves(receive, send, group, tag)
        under_way.extend(works)
        return works

    with mock.patch.object(transport, "start_moves", interrupted), pytest.raises(KeyboardInterrupt):
        aggregator.aggregate()
    return under_way


def interrupted_halfway(rank: int, world_size: int, form: str) -> None:
    """Nothing of the model has changed, but messages are under way that a next round would take for its own."""
    state = make_state(rank, (1, 1), None)
    model = linear(64, seed=rank)
    before = model.weight.detach().clone()
    aggregator = xffl.Aggregator(model, state, bucket_bytes=1024, form=form)
    under_way = interrupt_halfway(aggregator, lag_s=0.0 if rank else 0.5)
    assert torch.equal(model.weight, before) and not aggregator.is_torn and not aggregator.can_go_on
    with pytest.raises(xffl.RoundError, match="an exchange was interrupted here"):
        aggregator.aggregate()
    assert torch.equal(model.weight, before) and not aggregator.is_torn
    assert under_way


def cut_off(rank: int, world_size: int, folder: str) -> None:
    """After a vote for which somebody came too late only new connections help, as the error says."""

    def join(name: str, seconds: float) -> tuple[nn.Module, xffl.Aggregator]:
        store = dist.FileStore(os.path.join(folder, name), world_size)
        wait = timedelta(seconds=seconds)
        dist.init_process_group("gloo", store=store, timeout=wait, world_size=world_size, rank=rank)
        model = linear(seed=rank)
        return model, xffl.Aggregator(model, make_state(rank, (1, 1), None))

    given_up = os.path.join(folder, "given up")
    model, aggregator = join("first", 4.0)
    before = model.weight.detach().clone()
    while rank == 1 and not os.path.exists(given_up):
        time.sleep(0.05)
    with pytest.raises(xffl.RoundError, match=f"round 1 could not be opened, .*in a vote with ranks \\[{1 - rank}\\]"):
        aggregator.aggregate()
    if rank == 0:
        open(given_up, "w").close()
    assert not aggregator.can_go_on
    with pytest.raises(xffl.StateError, match="end the process group on all ranks and join again"):
        aggregator.aggregate()
    assert torch.equal(model.weight, before)
    dist.destroy_process_group()
    model, aggregator = join("second", 40.0)
    assert aggregator.aggregate().round == 1
    assert not torch.equal(model.weight, before)
    dist.destroy_process_group()


def buffers_are_there(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """All memory is there before the first vote, where lanes of several types follow each other, too."""
    state = make_state(rank, (world_size // 2,) * 2, 1)
    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    values = (torch.randn(2000), torch.randn(100, 80).t())  # what is turned has to be packed
    model = nn.ParameterList([nn.Parameter(value.to(kind)) for kind in kinds for value in values])
    model.register_buffer("mean", torch.randn(2000))
    model.register_buffer("count", torch.arange(2000))
    aggregator = aggregator_of(model, state, **{"bucket_bytes": 2**16, **options})
    take, made = pool.Pool.acquire, 0

    def counted(self: pool.Pool, nbytes: int = 0) -> torch.Tensor:
        nonlocal made
        made += not self._free or nbytes > self._nbytes
        return take(self, nbytes)

    def watched(exchange: Callable[[], RoundContext]) -> RoundContext:
        pool.Pool.acquire = counted  # type: ignore[method-assign]
        context = exchange()
        pool.Pool.acquire = take  # type: ignore[method-assign]
        return context

    replace_exchange(aggregator, watched)
    for _ in range(2):
        aggregator.aggregate()
    assert made == 0


def resizable(rank: int, world_size: int) -> None:
    """A round leaves storages what they were: others free and fill them again."""
    state = make_state(rank, (1, 1), None)
    model = nn.Sequential(linear(), linear())
    aggregator = xffl.Aggregator(model, state)
    aggregator.aggregate()
    storage = model[0].weight.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    with pytest.raises(xffl.ConfigError, match=r"'0\.weight' has no memory"):
        aggregator.aggregate()
    storage.resize_(size)
    with torch.no_grad():
        model[0].weight.fill_(float(rank))
    assert aggregator.aggregate().round == 2
    assert (model[0].weight == 0.5).all()


@pytest.mark.parametrize(
    "ranks, case, args",
    [
        *(
            (2, narrow_steps, (dtype, codec))
            for dtype in (torch.bfloat16, torch.float16)
            for codec in ("topk:1.0", "fp16")
        ),
        *((2, huge_steps, (codec,)) for codec in ("int8", "topk:1.0", "fp16", "bf16")),
        (2, eight_bits, ()),
        (2, default_type, ()),
        (2, counted_alike, ()),
        (2, second_copies, ()),
        (2, shared_in_a_delay, ()),
        (2, untied, ()),
        (2, served_in_inference, ()),
        (2, unfit_without_weight, ()),
        (3, other_combiner, ()),
        (2, interrupted_halfway, ("auto",)),
        (2, interrupted_halfway, ("two_hop",)),
        (2, buffers_are_there, ({},)),
        (2, buffers_are_there, ({"atomic": False},)),
        (4, buffers_are_there, ({"atomic": False, "form": "all_gather", "bucket_bytes": 2**10},)),
        (2, buffers_are_there, ({"form": "two_hop", "codec": "int8"},)),
        (2, buffers_are_there, ({"combine": "geometric_median", "codec": "int8", "bucket_bytes": 2**10},)),
        (2, buffers_are_there, ({"combine": "geometric_median", "atomic": False, "bucket_bytes": 2**10},)),
        (2, resizable, ()),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_rare(ranks: int, case: Callable[..., None], args: tuple[Any, ...]) -> None:
    run_world(ranks, case, *args, timeout_s=60.0)


def test_a_vote_that_was_cut_off(tmp_path: Path) -> None:
    run_world(2, cut_off, str(tmp_path), timeout_s=60.0, init=False)
