"""Rounds of two cells of one rank each: weights, memory in pieces, shared memory, what autograd and the caller see."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import xffl
from tests.ranks.test_round import digests, make_state
from tests.worlds import run_world
from xffl.aggregation.algorithms.combiners import AggregationWeights, CellStats, Mean


def local(parameter: Any) -> torch.Tensor:
    tensor: torch.Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return tensor.detach()


def model_of(rank: int, state: Any) -> nn.Module:
    """A large tensor in several buckets, and small ones that share one."""
    torch.manual_seed(rank)
    return xffl.shard(nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 2)), state)


def make(rank: int, sizes: tuple[int, ...], **options: Any) -> tuple[nn.Module, xffl.Aggregator]:
    state = make_state(rank, sizes, None)
    model = model_of(rank, state)
    aggregator = xffl.Aggregator(model, state, bucket_bytes=256, **options)
    return model, aggregator


def whole(model: nn.Module) -> list[torch.Tensor]:
    return [local(parameter).detach().clone() for parameter in model.parameters()]


def shake(model: nn.Module, rank: int) -> None:
    """Let cells differ, which start alike."""
    torch.manual_seed(rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape))


def weightless(rank: int, world_size: int) -> None:
    """What a cell of weight 0 holds does not count, finite or not: it gets the other's, to the bit."""
    model, aggregator = make(rank, (1, 1))
    shake(model, rank)
    mine = whole(model)
    if rank == 0:
        with torch.no_grad():
            model[2].bias.fill_(math.inf)  # type: ignore[index, union-attr, operator]
    report = aggregator.aggregate(float(rank))
    assert report.weights == (0.0, 1.0) and (report.bytes_across > 0) == (rank == 1)
    for parameter, value in zip(model.parameters(), mine, strict=True):
        wanted = value if rank == 1 else torch.empty_like(value)
        dist.broadcast(wanted, 1)
        assert torch.equal(local(parameter), wanted)


def packed_by(aggregator: xffl.Aggregator) -> list[int]:
    """Return a list that gets the number of each bucket that is packed from now on."""
    packed: list[int] = []
    layout = aggregator._exchange.layout
    pack = layout.pack

    def counted(bucket: Any, into: torch.Tensor) -> None:
        packed.append(bucket.number)
        pack(bucket, into)

    layout.pack = counted  # type: ignore[method-assign]
    return packed


def strided(rank: int, world_size: int) -> None:
    """What does not lie in one run of memory is packed, on the ranks where it is so, and once for each round."""
    state = make_state(rank, (1, 1), None)
    torch.manual_seed(rank)
    value = torch.randn(160, 50)
    model = nn.ParameterList(
        [nn.Parameter(value.t() if rank else value.t().contiguous()), nn.Parameter(value[0, :3].clone())]
    )
    aggregator = xffl.Aggregator(model, state, bucket_bytes=512)
    packed = packed_by(aggregator)
    for _ in range(2):
        with torch.no_grad():
            for parameter in model:
                parameter.add_(torch.randn(parameter.shape))
        values = [parameter.detach().contiguous().clone() for parameter in model]
        for parameter in values:
            dist.all_reduce(parameter)
        packed.clear()
        aggregator.aggregate()
        for parameter, total in zip(model, values, strict=True):
            assert torch.allclose(parameter, total / 2, atol=1e-6)
        (transfer,) = aggregator._exchange.transfers
        strewn = [bucket.number for bucket in transfer.buckets if bucket.pieces[0].item == 0 and rank == 1]
        # With the small tensor, which is packed on both ranks, or lies in one run of memory.
        assert sorted(packed) == sorted(strewn)
    assert model[0].is_contiguous() == (rank == 0)


def packed(rank: int, world_size: int) -> None:
    """Small tensors share buckets: packed once for each round, looked at then, and not kept for a later round."""
    state = make_state(rank, (1, 1), None)
    model = nn.ParameterList([nn.Parameter(torch.full((5,), float(rank))) for _ in range(40)])
    aggregator = xffl.Aggregator(model, state, bucket_bytes=256)
    (transfer,) = aggregator._exchange.transfers
    count = len(transfer.buckets)
    assert count == 4
    found = packed_by(aggregator)
    for number in range(4):
        with torch.no_grad():
            for parameter in model:
                parameter.fill_(10.0 * number + rank)
            if number % 2 and rank == 1:
                model[7][2] = math.nan
        if number % 2:
            with pytest.raises(xffl.RoundError, match=r"cell 1 holds values that are not finite in '7'"):
                aggregator.aggregate()
            assert (model[0] == 10.0 * number + rank).all()
            continue
        found.clear()
        aggregator.aggregate()
        assert all(bool((parameter == 10.0 * number + 0.5).all()) for parameter in model)
        assert sorted(found) == list(range(count))


class Alike(Mean):
    """Cells count alike, whatever their weights."""

    def weigh(self, seen: CellStats) -> AggregationWeights:
        return AggregationWeights((1.0,) * len(seen.weights))


def counted_alike(rank: int, world_size: int) -> None:
    """Cells count for what the combiner says, not for their weights."""
    model, aggregator = make(rank, (1, 1), combine=Alike())
    shake(model, rank)
    wanted = whole(model)
    for value in wanted:
        dist.all_reduce(value)
    report = aggregator.aggregate(1.0 + 9.0 * rank)
    assert report.weights == (1.0, 10.0) and report.shares == (0.5, 0.5)
    for parameter, value in zip(model.parameters(), wanted, strict=True):
        assert torch.allclose(local(parameter), value / 2, atol=1e-6)


def seen_by_autograd(rank: int, world_size: int) -> None:
    """A backward pass finds out that a round came between, where values lie in one run of memory, too."""
    state = make_state(rank, (1, 1), None)
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    aggregator = xffl.Aggregator(model, state, bucket_bytes=1024)
    loss = model(torch.ones(1, 32)).sum()
    aggregator.aggregate()
    (transfer,) = aggregator._exchange.transfers
    assert all(len(bucket.pieces) == 1 for bucket in transfer.buckets)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def shared(rank: int, world_size: int) -> None:
    """Tensors that share memory, some in part and some across buckets, are averaged once."""
    state = make_state(rank, (1, 1), None)
    memory = torch.randn(600, generator=torch.Generator().manual_seed(rank))
    model = nn.ParameterList(
        [nn.Parameter(memory[:400]), nn.Parameter(memory[100:500].view(20, 20)), nn.Parameter(memory[490:])]
    )
    wanted = memory.clone()
    dist.all_reduce(wanted)
    aggregator = xffl.Aggregator(model, state, bucket_bytes=256)
    aggregator.aggregate()
    assert torch.allclose(memory, wanted / 2, atol=1e-6)
    both = [torch.empty_like(memory) for _ in range(2)]
    dist.all_gather(both, memory)
    assert torch.equal(*both)


def shared_by_lanes(rank: int, world_size: int) -> None:
    """Memory that several lanes share, one of them combined before, is averaged once."""
    state = make_state(rank, (1, 1), None)
    memory = torch.randn(400, generator=torch.Generator().manual_seed(rank))
    model = nn.ParameterList([nn.Parameter(memory[:200]), nn.Parameter(memory[100:300], requires_grad=False)])
    model.register_buffer("mean", memory[250:])
    wanted = memory.clone()
    dist.all_reduce(wanted)
    aggregator = xffl.Aggregator(model, state, bucket_bytes=256, policies={"1": "average"})
    assert len(aggregator._exchange.transfers) == 3
    aggregator.aggregate()
    assert torch.allclose(memory, wanted / 2, atol=1e-6)
    both = [torch.empty_like(memory) for _ in range(2)]
    dist.all_gather(both, memory)
    assert torch.equal(*both)


def beside_the_caller(rank: int, world_size: int) -> None:
    """What a script sends over the same group on its own is not taken for a bucket."""
    state = make_state(rank, (1, 1), None)
    assert state.federated_group is not None
    group, number = state.federated_group[0], torch.zeros(64)
    aggregator = xffl.Aggregator(nn.Linear(16, 16), state, bucket_bytes=256)
    work = dist.irecv(number, 1, group=group) if rank == 0 else None
    aggregator.aggregate()
    if work is None:
        dist.send(torch.full((64,), 7.0), 0, group=group)
    else:
        work.wait()
        assert (number == 7.0).all()


def inferred(rank: int, world_size: int) -> None:
    """A first round in inference mode spoils no later one."""
    state = make_state(rank, (1, 1), None)
    memory = torch.full((300,), float(rank))
    model = nn.ParameterList([nn.Parameter(memory[:200]), nn.Parameter(memory[100:])])
    aggregator = xffl.Aggregator(model, state, bucket_bytes=256)
    with torch.inference_mode():
        aggregator.aggregate()
    assert (memory == 0.5).all()
    memory.fill_(float(rank))
    aggregator.aggregate(1.0 + 2.0 * rank)
    assert (memory == 0.75).all()


def untouched(rank: int, world_size: int) -> None:
    """Until the last vote the model is what it was, and no copy is made of what lies in one run of memory."""
    model, aggregator = make(rank, (1, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(float(rank))
    before = digests(model)
    coordinator: Any = aggregator._coordinator
    cast: Callable[..., Any] = coordinator._gather_status
    seen: list[bool] = []

    def checked(*given: Any) -> Any:
        seen.append(digests(model) == before)
        return cast(*given)

    coordinator._gather_status = checked
    aggregator.aggregate()
    assert seen == [True, True] and digests(model) != before


CASES: tuple[Callable[[int, int], None], ...] = (
    weightless,
    strided,
    packed,
    counted_alike,
    seen_by_autograd,
    shared,
    shared_by_lanes,
    beside_the_caller,
    inferred,
    untouched,
)


def all_cases(rank: int, world_size: int) -> None:
    for case in CASES:
        case(rank, world_size)


def test_two_cells_of_one_rank_each() -> None:
    run_world(2, all_cases)
