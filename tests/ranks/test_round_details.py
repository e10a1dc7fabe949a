"""Details of rounds that a change could lose without any other test noticing, each found by losing it on purpose."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import xffl
from tests.ranks.test_round import complete, digests, make_state
from tests.ranks.test_round_edges import everyones, linear
from tests.ranks.test_round_rare import interrupt_halfway
from tests.rounds import aggregator_of
from tests.worlds import run_world
from xffl.aggregation import compression as feedback
from xffl.aggregation.engine import groups as routes
from xffl.aggregation.engine import transport
from xffl.aggregation.engine.decision.consensus import RoundInput
from xffl.aggregation.engine.stages.codecs import Codecs
from xffl.aggregation.engine.stages.masks import Masks
from xffl.aggregation.engine.transport import start_moves
from xffl.aggregation.federations.hierarchical import Level, Levels
from xffl.costs import IN_FLIGHT

# What is averaged -----------------------------------------------------------------------------------------------------


def shaken(model: nn.Module, rank: int, number: int) -> None:
    """Move a model by random numbers of a rank and a round."""
    torch.manual_seed(100 * number + rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))


def failed_round(rank: int, world_size: int) -> None:
    """What a codec was to send in a round that failed is not lost, and not sent twice."""
    state = make_state(rank, (1, 1), None)

    def train(fails: bool) -> dict[str, str]:
        model = linear(32)
        aggregator = xffl.Aggregator(model, state, codec="topk:0.1")
        mean = transport.weighted_mean
        for number in range(4):
            shaken(model, rank, number)
            if number == 2 and fails:

                def fail(*args: Any, **named: Any) -> None:
                    raise MemoryError("planted")

                transport.weighted_mean = mean if rank else fail  # type: ignore[assignment]
                with pytest.raises(xffl.RoundError, match="planted"):
                    aggregator.aggregate(1.0)
                transport.weighted_mean = mean
            aggregator.aggregate(0.0 if number == 2 and rank == 1 else 1.0)
        return digests(model)

    assert train(False) == train(True)


def failed_code(rank: int, world_size: int) -> None:
    """A rank that cannot encode sends something all the same, so that nobody waits for it, and tells why."""
    state = make_state(rank, (1, 1), None)
    model = linear(32)
    aggregator = xffl.Aggregator(model, state, codec="int8")
    aggregator.aggregate()
    shaken(model, rank, 0)
    before, start = digests(model), time.monotonic()
    failing = mock.patch.object(feedback.ErrorFeedback, "encode", side_effect=MemoryError("planted"))
    with failing if rank else nullcontext(), pytest.raises(xffl.RoundError, match="planted"):
        aggregator.aggregate()
    assert time.monotonic() - start < 20 and digests(model) == before
    assert aggregator.aggregate().round == 2


def listening_cell(rank: int, world_size: int) -> None:
    """A cell that gives nothing to a round keeps what its codec is still to send."""
    state = make_state(rank, (1, 1), None)
    model = linear(32)
    aggregator = xffl.Aggregator(model, state, codec="topk:0.1")
    for number in range(2):
        shaken(model, rank, number)
        aggregator.aggregate(1.0)
    shaken(model, rank, 2)
    before, after = {}, {}
    for kept, weight in ((before, None), (after, 1.0 - rank)):
        if weight is not None:
            aggregator.aggregate(weight)
        for lane in aggregator.state_dict()["codecs"]["lanes"].values():
            kept |= {name: values for name, values in lane.items() if name.startswith("left")}
    assert before
    assert all(torch.equal(before[name], after[name]) == (rank == 1) for name in before)


def dropped_cell(rank: int, world_size: int) -> None:
    """NaN of a cell that is left out does not come back with what its codec is still to send."""
    state = make_state(rank, (1, 1), None)
    model = linear(32)
    aggregator = xffl.Aggregator(model, state, codec="topk:0.1", nonfinite="drop_cell")
    for number in range(4):
        shaken(model, rank, number)
        if number == 2 and rank == 1:
            with torch.no_grad():
                model.weight[0, 0] = float("nan")
        assert aggregator.aggregate().dropped == ((1,) if number == 2 else ())
        assert model.weight.isfinite().all()


def far_apart(rank: int, world_size: int) -> None:
    """Values whose difference leaves fp32 have a mean that does not, and codes that do not."""
    state = make_state(rank, (1, 1), None)
    for form in ("auto", "two_hop"):
        model = nn.ParameterList([nn.Parameter(torch.full((8,), 3e38 * (1 - 2 * rank)))])
        xffl.Aggregator(model, state, form=form).aggregate()
        assert (model[0] == 0.0).all()
    model = nn.ParameterList([nn.Parameter(torch.full((64,), -3e38))])
    aggregator = xffl.Aggregator(model, state, codec="topk:1.0")
    aggregator.aggregate()
    with torch.no_grad():
        model[0].fill_(3e38)
    for _ in range(2):
        aggregator.aggregate()
        assert model[0].isfinite().all()


def exact_buffers(rank: int, world_size: int) -> None:
    """No codec writes buffers."""
    state = make_state(rank, (1, 1), None)
    model = nn.BatchNorm1d(64)
    aggregator = xffl.Aggregator(model, state, codec="int4")
    aggregator.aggregate()
    torch.manual_seed(rank)
    model.running_mean.copy_(torch.randn(64))
    one, other = everyones(model.running_mean.clone())
    aggregator.aggregate()
    torch.testing.assert_close(model.running_mean, (one + other) / 2)


def fragments_start_exact(rank: int, world_size: int) -> None:
    """Each part of the model gets its agreed state by a round of its own, in which nothing is encoded."""
    state = make_state(rank, (1, 1), None)
    model = nn.Sequential(linear(seed=rank), linear(seed=rank))
    aggregator = xffl.Aggregator(model, state, codec="int4", fragments=2)
    wanted = [torch.stack(everyones(layer.weight.detach().clone())).mean(0) for layer in model]
    errors = [aggregator.aggregate().codec_error for _ in range(2)]
    assert errors == [None, None]
    assert all(torch.allclose(layer.weight, mean, atol=1e-6) for layer, mean in zip(model, wanted, strict=True))
    assert aggregator.aggregate().codec_error == 0.0


def measured(rank: int, world_size: int) -> None:
    """The error of a code is what all lanes left out, relative to what they had to send."""
    state = make_state(rank, (1, 1), None)
    model = nn.ParameterList([torch.zeros(2), torch.zeros(2, dtype=torch.float64)])
    aggregator = xffl.Aggregator(model, state, codec="topk:0.5")
    aggregator.aggregate()
    with torch.no_grad():
        model[0].copy_(torch.tensor([4.0, 3.0]))
        model[1].copy_(torch.tensor([0.0, 12.0 + 72.0 * rank]))
    wanted = 3.0 / math.hypot(4.0, 3.0, 12.0 + 72.0 * rank)
    assert [aggregator.aggregate().codec_error for _ in range(3)] == [pytest.approx(wanted, rel=1e-6), 0.0, 0.0]


def seeds(rank: int, world_size: int) -> None:
    """No two codes of a run are rounded by the same random numbers."""
    state = make_state(rank, (1, 1), None)
    model = nn.Sequential(linear(), linear().double())
    aggregator = xffl.Aggregator(model, state, codec="int4:rounding=stochastic", bucket_bytes=128)
    codecs, transfers = aggregator._exchange.find(Codecs), aggregator._exchange.transfers
    assert codecs is not None
    assert [len(transfer.buckets) for transfer in transfers] == [2, 4]
    found = []
    for number in range(3):
        for transfer in transfers:
            places = [feedback.CodePlace(bucket.number, cell) for bucket in transfer.buckets for cell in (None, 0, 1)]
            found += [codecs.seed_of(number, transfer, place) for place in places]
    everywhere = [*itertools.chain.from_iterable(everyones(found))]
    assert len(set(everywhere)) == len(everywhere) == 2 * 3 * 6 * 3


# Delays ---------------------------------------------------------------------------------------------------------------


def moved_meanwhile(rank: int, world_size: int) -> None:
    """A merge finds tensors that were put elsewhere while the round was under way."""
    state = make_state(rank, (1, 1), None)
    model = linear()
    aggregator = xffl.Aggregator(model, state, overlap=True)
    for alpha, keeps, expected in (
        (None, True, 0.5),
        (None, False, 0.5),
        (0.0, True, 0.5),
        (0.5, True, 0.5 * rank + 0.25),
    ):
        with torch.no_grad():
            model.weight.fill_(float(rank))
        pending = aggregator.aggregate_async(alpha=alpha)
        model.weight.data = model.weight.data.clone()  # as model.to() does
        pending.merge(keeps_steps=keeps)
        assert (model.weight == expected).all(), (alpha, keeps)


def counters(rank: int, world_size: int) -> None:
    """A merge replaces what is taken from the first cell, whatever has been counted meanwhile."""
    state = make_state(rank, (1, 1), None)
    model = nn.BatchNorm1d(4)
    aggregator = xffl.Aggregator(model, state, overlap=True)
    for alpha in (None, 0.5):
        model.num_batches_tracked.fill_(10 + rank)
        pending = aggregator.aggregate_async(alpha=alpha)
        model.num_batches_tracked.add_(4 + rank)
        pending.merge()
        assert model.num_batches_tracked == 10


def rounded_once(rank: int, world_size: int) -> None:
    """A merge of narrow values adds in fp32 and rounds once."""
    state = make_state(rank, (1, 1), None)
    for dtype in (torch.bfloat16, torch.float16):
        torch.manual_seed(rank)
        start, step = torch.randn(500).to(dtype), (0.1 * torch.randn(500)).to(dtype)
        model = nn.ParameterList([nn.Parameter(start.clone())])
        pending = xffl.Aggregator(model, state, overlap=True).aggregate_async()
        with torch.no_grad():
            model[0].add_(step)
        now = model[0].detach().clone()
        pending.merge()
        one, other = everyones(start)
        mean = ((one.float() + other.float()) / 2).to(dtype)
        expected = mean.double() + (now.double() - start.double())
        assert torch.equal(model[0].detach(), expected.float().to(dtype))


def merged_by_size(rank: int, world_size: int) -> None:
    """A merge has room for each bucket, also where larger ones come later; and keeps it."""
    state = make_state(rank, (1, 1), None)
    start = (torch.full((5,), float(rank), dtype=torch.bfloat16), torch.full((100,), float(rank)))
    model = nn.ParameterList([nn.Parameter(values) for values in start])
    aggregator = xffl.Aggregator(model, state, overlap=True)
    for _ in range(2):
        with torch.no_grad():
            for parameter in model:
                parameter.fill_(float(rank))
        aggregator.aggregate_async().merge()
        assert all(bool((parameter == 0.5).all()) for parameter in model)
        assert [buffer.nbytes for buffer in aggregator._exchange.memory.packs._free] == [400]


def told_of_a_delay(rank: int, world_size: int) -> None:
    """A round in the background hears of steps and of how long they take."""
    state = make_state(rank, (1, 1), None)
    aggregator = xffl.Aggregator(linear(), state, overlap=True, combine="fednova")
    report = aggregator.aggregate_async(steps=2.0 + 4 * rank, seconds=0.5 + rank).merge()
    assert report.steps == (2.0, 6.0) and report.step_seconds == (0.5, 1.5)


# Votes ----------------------------------------------------------------------------------------------------------------


def interrupted_in_place(rank: int, world_size: int) -> None:
    """What is interrupted while it writes into the model has torn it."""
    state = make_state(rank, (1, 1), None)
    model = linear(64, seed=rank)
    aggregator = xffl.Aggregator(model, state, bucket_bytes=1024, atomic=False)
    under_way = interrupt_halfway(aggregator, lag_s=0.0 if rank else 0.5)
    assert aggregator.is_torn
    dist.barrier()
    assert under_way


def other_start(rank: int, world_size: int) -> None:
    """A model with the same values in other places is another model to start from."""
    state = make_state(rank, (1, 1), None)
    model = linear()
    if rank:
        model.weight.data = model.weight.data.flip(0)
    with pytest.raises(xffl.ConfigError, match="start from other values"):
        xffl.Aggregator(model, state, server="fedadam")


def found_by_one_shard(rank: int, world_size: int) -> None:
    """What one rank of a dropped cell has found stands in everybody's report."""
    state = make_state(rank, (2, 2), None)
    model = xffl.shard(linear(), state)
    aggregator = xffl.Aggregator(model, state, nonfinite="drop_cell")
    if rank == 3:
        with torch.no_grad():
            model.weight.to_local()[0, 0] = float("nan")
    report = aggregator.aggregate()
    assert report.dropped == (1,) and report.nonfinite == {1: ("weight",)}
    assert complete(model.weight).isfinite().all()


def counted_apart(rank: int, world_size: int) -> None:
    """A process that has had more aggregators than another makes the next one together with it."""
    state = make_state(rank, (1, 1), None)
    state.activity._last_number += 3 * rank
    for number in (4, 5):
        aggregator = xffl.Aggregator(linear(), state)
        assert aggregator.aggregate().round == 1 and aggregator._coordinator._number == number


def masks_apart(rank: int, world_size: int) -> None:
    """Ranks that have used more masks than others go on with the highest number."""
    state = make_state(rank, (1, 1, 1), None)
    aggregator = xffl.Aggregator(linear(), state, secure=True)
    if rank == 1:
        masks = aggregator._exchange.find(Masks)
        assert masks is not None
        masks.masker.start_attempt(5, (0, 1, 2))
    assert aggregator.aggregate().round == 1


# Reports and pace -----------------------------------------------------------------------------------------------------


def home_bytes(rank: int, world_size: int) -> None:
    """Buffers go round at home for their mean, and once more with the result."""
    state = make_state(rank, (2, 2), None)
    report = xffl.Aggregator(nn.BatchNorm1d(16, affine=False), state, policies={"num*": "local"}).aggregate()
    both = 2 * 16 * 4
    assert sum(everyones(report.bytes_home)) == 2 * 2 * both + 2 * both


def slowest_rank(rank: int, world_size: int) -> None:
    """A cell's step takes as long as that of its slowest rank."""
    state = make_state(rank, (2, 2), None)
    report = aggregator_of(linear(), state).participate(RoundInput(seconds=1.0 + rank))
    assert report is not None and report.step_seconds == (2.0, 4.0)


def levels_tell(rank: int, world_size: int) -> None:
    """Levels tell of steps by the state's cells, and count the rounds below as steps."""
    state = make_state(rank, (1, 1, 1, 1), None)
    levels = Levels(linear(), state, [Level(), Level(groups=(3, 1))])
    report = levels.participate(RoundInput(seconds=1.0 + rank))
    assert report is not None
    assert report.step_seconds == ((1.0, 2.0, 3.0, 0.0) if rank < 3 else (0.0, 0.0, 0.0, 4.0))
    levels = Levels(linear(), state, [Level(), Level(every=3, groups=(2, 2))])
    for _ in range(3):
        levels.aggregate()
    assert levels.reports[1] is not None and levels.reports[1].steps == (3.0, 3.0)


def resting_norms(rank: int, world_size: int) -> None:
    """Norms are measured from the model as it was written: without a step they are 0, also in bf16."""
    state = make_state(rank, (1, 1), None)
    model = linear(32).bfloat16()
    aggregator = xffl.Aggregator(model, state, server="sgd:lr=0.3", norms=True)
    for number in range(3):
        shaken(model, rank, number)
        aggregator.aggregate()
    assert aggregator.aggregate().update_norms == (0.0, 0.0)


def norms_of_a_delay(rank: int, world_size: int) -> None:
    """Where all replicas keep a copy, the norm of the cell's update still counts it once."""
    state = make_state(rank, (2, 2), 1)
    model = linear()
    aggregator = aggregator_of(model, state, overlap=True, norms=True)
    with torch.no_grad():
        model.weight.add_(0.5 + rank // 2)
    norms = aggregator.aggregate_async().merge().update_norms
    assert norms == pytest.approx((4.0, 12.0), rel=1e-5)


class Heard:
    """A message under way that tells when it is waited for."""

    def __init__(self, work: dist.Work, told: list[str]) -> None:
        self._work, self._told = work, told

    def wait(self) -> None:
        self._told.append("waited")
        self._work.wait()


def under_way(rank: int, world_size: int) -> None:
    """Several buckets are sent before the first is waited for."""
    state = make_state(rank, (1, 1), None)
    for form, atomic in (("auto", True), ("all_gather", False), ("two_hop", True)):
        aggregator = xffl.Aggregator(linear(64, seed=rank), state, bucket_bytes=1024, form=form, atomic=atomic)
        told: list[str] = []

        def posted(receive: Any, send: Any, group: dist.ProcessGroup, tag: int, told: list[str] = told) -> list[Heard]:
            told.extend(["sent"] * len(send))
            return [Heard(work, told) for work in start_moves(receive, send, group, tag)]

        with mock.patch.object(transport, "start_moves", posted):
            aggregator.aggregate()
        # In two hops each cell sends every other bucket first.
        assert told.index("waited") >= (2 if form == "two_hop" else 4) and told.count("sent") == 16, form


def few_packed(rank: int, world_size: int) -> None:
    """Of small tensors, which are packed, few buckets are under way: each takes a buffer more."""
    state = make_state(rank, (1, 1), None)
    for size, depth in ((5, IN_FLIGHT), (60, 12)):
        model = nn.ParameterList([nn.Parameter(torch.zeros(size)) for _ in range(2160 // size)])
        (transfer,) = xffl.Aggregator(model, state, bucket_bytes=240)._exchange.transfers
        assert len(transfer.buckets) == 36 and transfer.depth == depth


def rails_of_little(rank: int, world_size: int) -> None:
    """All replicas have some to carry, also of a shard of few buckets."""
    state = make_state(rank, (2, 2), 1)
    assert aggregator_of(linear(64), state, rails=True).aggregate().bytes_across > 0


def connected(rank: int, world_size: int) -> None:
    """NCCL connects groups when a round is set up, all of them, on ranks that share some in one order."""
    state = make_state(rank, (2, 2), 1)
    seen: list[str] = []
    place = routes.RoundScope(state, state.topology)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "transfer_device", lambda state: torch.device("meta"))
        patch.setattr(dist, "all_reduce", lambda values, op, group: seen.append(group.group_name))
        made = routes.select_groups(place, multi_rail=False, is_own=True, holders=[(0,)])
    groups = (*made.across, made.replica, made.cell, *made.holders.values())  # votes go over gloo's side of the world
    assert {group.group_name for group in groups if group is not None} == set(seen) and len(set(seen)) == len(seen)
    told: list[list[str]] = [[]] * world_size
    dist.all_gather_object(told, seen)
    for other in told:
        assert [name for name in seen if name in other] == [name for name in other if name in seen]


@pytest.mark.parametrize(
    "ranks, case",
    [
        *((2, case) for case in (failed_round, listening_cell, dropped_cell, far_apart, exact_buffers, seeds)),
        *((2, case) for case in (failed_code, fragments_start_exact, measured, counted_apart, few_packed)),
        (2, merged_by_size),
        *((2, case) for case in (moved_meanwhile, counters, rounded_once, told_of_a_delay)),
        *((2, case) for case in (interrupted_in_place, other_start)),
        (3, masks_apart),
        *((4, case) for case in (home_bytes, slowest_rank, levels_tell, rails_of_little, connected)),
        *((4, case) for case in (norms_of_a_delay, found_by_one_shard)),
        *((2, case) for case in (resting_norms, under_way)),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_a_detail(ranks: int, case: Callable[[int, int], None]) -> None:
    run_world(ranks, case, timeout_s=60.0)
