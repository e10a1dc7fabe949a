"""Kinds of tensors and cuts that the big table of layouts has no room for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import xffl
from tests.ranks.test_round import complete, make_state
from tests.rounds import aggregator_of
from tests.worlds import run_world
from xffl.distributed.distributed_state import DistributedState


def strided(rank: int, world_size: int) -> None:
    """Tensors with gaps or transposed, split over many buckets."""
    state = make_state(rank, (2, 1), 1)
    storage = torch.full((7, 10, 3), -1.0)
    model = nn.Module()
    model.gappy = nn.Parameter(storage[:, ::2, :2])
    model.turned = nn.Parameter(torch.empty(5, 4).t())
    model.scalar = nn.Parameter(torch.tensor(1.0 + state.federated_rank))
    model.precise = nn.Parameter(torch.full((3,), 0.1, dtype=torch.float64) * (1 + state.federated_rank))
    model.wave = nn.Parameter(torch.full((3,), 1 + 2j) * (1 + state.federated_rank))
    with torch.no_grad():
        model.gappy.copy_(torch.arange(70.0).view(7, 5, 2) + 100 * state.federated_rank)
        model.turned.copy_(torch.arange(20.0).view(4, 5) * (1 + state.federated_rank))
    aggregator_of(model, state, bucket_bytes=36).aggregate()
    assert torch.equal(model.gappy.detach(), torch.arange(70.0).view(7, 5, 2) + 50)
    assert torch.equal(model.turned.detach(), torch.arange(20.0).view(4, 5) * 1.5)
    assert model.scalar.item() == 1.5
    torch.testing.assert_close(model.precise.detach(), torch.full((3,), 0.15, dtype=torch.float64), rtol=1e-15, atol=0)
    torch.testing.assert_close(model.wave.detach(), torch.full((3,), 1.5 + 3j), rtol=1e-6, atol=0)
    untouched = storage.clone()
    untouched[:, ::2, :2] = -1.0
    assert (untouched == -1.0).all(), "a round wrote between the elements of a tensor"


def columns(rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None) -> None:
    """Weights cut along their columns, differently in each cell."""
    state = make_state(rank, sizes, hsdp)
    value = torch.arange(24.0 * 5).view(5, 24)
    model = nn.Linear(24, 5, bias=False)
    with torch.no_grad():
        model.weight.copy_(value * (1 + state.federated_rank))
    fully_shard(model, mesh=state.hsdp_mesh or state.fsdp_mesh, shard_placement_fn=lambda _: Shard(1))
    assert isinstance(model.weight, DTensor) and model.weight.placements[-1] == Shard(1)
    report = xffl.Aggregator(model, state, bucket_bytes=28).aggregate()
    assert torch.equal(complete(model.weight), value * 1.5)
    assert report.bytes_across in (0, value.nbytes // state.topology.shards(state.federated_rank or 0))


class Norm(nn.Module):
    """One sharded layer and one whose buffers every rank fills itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)


def no_federation(rank: int, world_size: int, hsdp: int | None) -> None:
    """Without a federation the world is one cell: parameters keep every bit, buffers become the mean of the ranks."""
    state = DistributedState()
    cpu = torch.device("cpu")
    state.set_global(dist.Backend("gloo"), cpu, "", 0, rank, world_size)
    if hsdp is None:
        state.set_fsdp()
    else:
        state.set_hsdp(hsdp)
    torch.manual_seed(0)
    model = xffl.shard(Norm(), state)
    before = [complete(parameter).clone() for parameter in model.parameters()]
    for name, buffer in model.named_buffers():
        buffer.fill_(rank if name.endswith("running_mean") else 2 + rank)
    report = xffl.Aggregator(model, state).aggregate(float(rank))
    assert report.weights == (sum(range(world_size)),) and report.bytes_across == 0
    assert all(torch.equal(complete(p), b) for p, b in zip(model.parameters(), before, strict=True))
    buffers = {name.removeprefix("module."): buffer for name, buffer in model.named_buffers()}
    mean = (world_size - 1) / 2
    assert torch.equal(buffers["norm.running_mean"], torch.full((8,), mean))
    assert torch.equal(buffers["norm.running_var"], torch.full((8,), 2 + mean))
    assert buffers["norm.num_batches_tracked"] == 2


def refusals(rank: int, world_size: int) -> list[str]:
    """Models that a round cannot take; all ranks say the same."""
    state = make_state(rank, (2, 2), None)
    over_all = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    other_mesh = fully_shard(nn.Linear(8, 8), mesh=over_all)
    two_axes = nn.Module()
    two_axes.weight = nn.Parameter(distribute_tensor(torch.ones(8, 8), grid, [Shard(0), Shard(1)]))
    lazy = nn.LazyLinear(3)
    with torch.device("meta"):
        meta = nn.Linear(3, 3)
    bare = nn.Module()
    bare.weight = nn.Parameter(torch.empty(3, device="meta"))
    flat = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
    clash = nn.Module()
    clash.module = nn.Linear(2, 2)
    clash.register_parameter("weight", nn.Parameter(torch.ones(2)))
    already = xffl.shard(nn.Linear(8, 8), state)
    attempts: list[Callable[[], object]] = [
        *(
            lambda model=model: xffl.Aggregator(model, state)
            for model in (other_mesh, two_axes, lazy, meta, flat, clash)
        ),  # type: ignore[misc]
        lambda: xffl.shard(bare, state),
        lambda: xffl.shard(already, state),
    ]
    told = []
    for attempt in attempts:
        with pytest.raises(xffl.ConfigError) as caught:
            attempt()
        told.append(str(caught.value))
    return told


@pytest.mark.parametrize(
    "world_size, case, args",
    [
        (3, strided, ()),
        (6, columns, ((4, 2), None)),
        (6, columns, ((4, 2), 2)),
        (4, no_federation, (None,)),
        (4, no_federation, (2,)),
        (2, no_federation, (1,)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_kinds(world_size: int, case: Callable[..., None], args: tuple[object, ...]) -> None:
    run_world(world_size, case, *args)


def test_models_that_no_round_can_take_are_refused_on_all_ranks() -> None:
    told = run_world(4, refusals)
    expected = [
        "cross between cells",
        "cross between cells",
        "no values yet",
        "no values yet",
        "FSDP1",
        "two tensors are called 'weight'",
        "tensors without values and no reset_parameters",
        "sharded already",
    ]
    for position, phrase in enumerate(expected):
        assert phrase in told[0][position], told[0][position]
    # The part of the model that a rank holds stands in the message; all else is the same.
    assert all(texts[1:] == told[0][1:] for texts in told)
