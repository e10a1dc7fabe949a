"""The meshes, groups, collectives and norms of a world, against what brute force says of every rank."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import xffl
from tests.ranks.test_strategies import joined
from tests.worlds import fake_world, run_world
from xffl.distributed.parameters import AXES, JOINED, CommParameters, DeviceParameters
from xffl.distributed.world import DistributedWorld
from xffl.errors import ConfigError, StateError

LAYOUTS: dict[str, tuple[int, dict[str, Any], tuple[int, ...] | None]] = {
    "one rank": (1, {}, None),
    "all axes of two": (8, {"pp": 2, "dp_shard": 2, "tp": 2}, None),
    "replicas and sequences": (8, {"cp": 2, "dp_replicate": 2, "dp_shard": 2}, None),
    "two cells": (8, {"dp_replicate": 2, "tp": 2}, (4, 4)),
    "unequal cells": (6, {"dp_replicate": "auto", "tp": 2}, (4, 2)),
    "unequal cells of one replica": (6, {"dp_shard": "auto"}, (4, 2)),
    "unequal cells of whole models": (3, {"dp_replicate": "auto"}, (2, 1)),
}


def neighbours(cell: list[int], sizes: list[int], axes: tuple[str, ...], rank: int) -> list[int]:
    """The ranks of a cell that differ from a rank along some axes only, by looking at all of them."""
    places = dict(zip(cell, itertools.product(*map(range, sizes)), strict=True))
    fixed = [index for index, axis in enumerate(AXES) if axis not in axes]
    return [other for other in cell if all(places[other][i] == places[rank][i] for i in fixed)]


def walk(rank: int, world_size: int, layout: str) -> None:
    """Compare everything that a rank knows with brute force, in two worlds one after the other."""
    _, mesh, federated = LAYOUTS[layout]
    cells = [[*range(world_size)]] if federated is None else []
    for size in federated or ():
        start = sum(map(len, cells))
        cells.append([*range(start, start + size)])
    (cell,) = [ranks for ranks in cells if rank in ranks]
    given = [mesh.get(axis, 1) for axis in AXES]
    known = math.prod(size for size in given if size != "auto")
    sizes = [len(cell) // known if size == "auto" else size for size in given]
    state = joined(rank, world_size)
    meshes: list[list[DeviceMesh]] = []
    for _ in (1, 2):
        world = DistributedWorld(DeviceParameters(**mesh), federated)
        with pytest.raises(StateError, match="call setup"):
            world.rank  # noqa: B018 - the property raises
        world.setup(state)
        with pytest.raises(StateError, match="set up already"):
            world.setup(state)
        assert (world.rank, world.world_size, world.is_global_zero) == (rank, world_size, rank == 0)
        names = world.world_mesh.mesh_dim_names
        assert names is not None and [str(name) for name in names] == list(AXES) and str(names) == str(AXES)
        meshes.append([world.world_mesh, *map(world.get_mesh, (*AXES, *JOINED))])
        # A copy equals the mesh's own names and no other mesh's: a state dict of DTensors can be loaded again.
        assert pickle.loads(pickle.dumps(names)) == copy.deepcopy(names) == names
        assert all(names != other[0].mesh_dim_names for other in meshes[:-1])
        assert world.world_mesh.mesh.tolist() == torch.tensor(cell).view(sizes).tolist()
        for name in (*AXES, *JOINED):
            expected = neighbours(cell, sizes, JOINED.get(name, (name,)), rank)
            assert world.get_mesh(name).mesh.tolist() == expected, name
            assert dist.get_process_group_ranks(world.get_mesh(name).get_group()) == expected, name
            assert world.dims.size(name) == len(expected) and world.dims.rank(name) == expected.index(rank)
        dp = neighbours(cell, sizes, JOINED["dp"], rank)
        assert (world.dp_size, world.dp_rank) == (len(dp), dp.index(rank))
        assert (world.tp_enabled, world.pp_enabled) == (mesh.get("tp", 1) > 1, mesh.get("pp", 1) > 1)
        communicate(world, cell, cells)
        world.teardown()
        with pytest.raises(StateError, match="call setup"):
            world.get_mesh("tp")
    # torch's caches take equal meshes for one, whose groups are gone with its world.
    assert not any(first in meshes[1] for first in meshes[0])
    assert dist.is_initialized()


def communicate(world: DistributedWorld, cell: list[int], cells: list[list[int]]) -> None:
    """Run every collective over every mesh."""
    rank = world.rank
    meshes = {"world": [*range(world.world_size)], "cell": cell}
    meshes |= {name: world.get_mesh(name).mesh.tolist() for name in (*AXES, *JOINED)}
    if len({len(ranks) for ranks in cells}) == 1:
        meshes["federated"] = [ranks[cell.index(rank)] for ranks in cells]
    else:
        with pytest.raises(ConfigError, match="federated.*cells of equal size"):
            world.get_mesh("federated")
    own = torch.tensor([[1.0 + rank, -rank, 0.5]])
    kept = own.clone()
    for name, ranks in meshes.items():
        values = torch.stack([torch.tensor([[1.0 + other, -other, 0.5]]) for other in ranks])
        assert torch.equal(world.all_reduce(own, mesh=name), values.sum(0))
        assert torch.allclose(world.all_reduce(own, "mean", name), values.mean(0))
        assert torch.equal(world.all_reduce(own.T, "max", name), values.amax(0).T)  # a transposed view
        assert torch.equal(world.all_reduce(own, "min", name), values.amin(0))
        assert torch.equal(world.all_gather(own, mesh=name), values)
        last = len(ranks) - 1
        assert torch.equal(world.broadcast(own, last, name), values[last])
        world.barrier(name)
    assert torch.equal(own, kept)
    assert world.all_gather(torch.tensor(rank)).tolist() == [*range(world.world_size)]
    turned = torch.tensor(1 + 2j * rank).conj()  # a view of memory that holds the opposite sign
    assert world.all_gather(turned).tolist() == [1 - 2j * other for other in range(world.world_size)]
    assert world.all_gather(turned.imag).tolist() == [-2.0 * other for other in range(world.world_size)]
    assert world.broadcast(turned.resolve_conj() if rank else turned).tolist() == 1
    for wrong, said in (
        (lambda: world.all_reduce(own, "product"), "op must be one of 'sum', .*, got 'product'"),
        (lambda: world.all_reduce(torch.tensor(1), "mean"), "int64 tensor has no mean"),
        (lambda: world.all_reduce(own, mesh="dq"), "mesh must be one of 'pp', .*, got 'dq'"),
        (lambda: world.get_mesh("world"), "group of ranks without coordinates"),
        (lambda: world.broadcast(own, len(cell), "cell"), "outside mesh 'cell'"),
        (lambda: world.seed_for(1, "dq"), "axis must be one of .*, got 'dq'"),
        (lambda: world.get_total_norm([], norm_type=0), "norm_type must be .* got 0"),
        (lambda: world.clip_grad_norm([], 0.0), "max_norm must be .* got 0.0"),
    ):
        with pytest.raises(ConfigError, match=said):
            wrong()
    told = world.all_gather(torch.tensor(world.seed_for(7, "dp", "federated"))).tolist()
    own_places = [(i, *place) for i, ranks in enumerate(cells) for place in [*map(tuple, places_of(world, ranks))]]
    assert len(set(told)) == len(set(own_places))
    assert world.seed_for(7) == 7


def places_of(world: DistributedWorld, ranks: list[int]) -> list[tuple[int, int]]:
    """Where each rank of a cell stands along ``dp_replicate`` and ``dp_shard``."""
    sizes = [world.dims.sizes[axis] for axis in AXES]
    known = math.prod(size for axis, size in zip(AXES, sizes, strict=True) if axis != "dp_replicate")
    sizes[AXES.index("dp_replicate")] = len(ranks) // known
    if math.prod(sizes) != len(ranks):  # dp_shard is what varies
        sizes = [1, 1, 1, len(ranks), 1]
    return [(place[2], place[3]) for place in itertools.product(*map(range, sizes))]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_meshes_and_collectives(layout: str) -> None:
    run_world(LAYOUTS[layout][0], walk, layout)


def norms(rank: int, world_size: int) -> list[tuple[str, float, float, float, float]]:
    """Norms of gradients that are cut in many ways, over a mesh of two stages, two shards and two parts of layers."""
    world = DistributedWorld(DeviceParameters(pp=2, dp_shard=2, tp=2))
    world.setup(joined(rank, world_size))
    generator = torch.Generator().manual_seed(3)
    dense = [[torch.randn(shape, generator=generator) for shape in ((6, 4), (7,), (3, 5), (1, 2))] for _ in range(2)]
    stage = dense[world.pp_rank]
    tp, shard = world.get_mesh("tp"), world.get_mesh("dp_shard_cp")
    made = [
        distribute_tensor(stage[0].clone(), tp, [Shard(0)]),
        distribute_tensor(stage[1].clone(), shard, [Shard(0)]),  # 7 over 2 ranks
        distribute_tensor(stage[2].clone(), tp, [Replicate()]),
        stage[3].clone(),
    ]
    parameters = []
    for gradient in made:
        parameter = nn.Parameter(gradient.detach() * 0 if not isinstance(gradient, DTensor) else gradient.clone())
        parameter.grad = gradient.to(torch.bfloat16).float() if gradient is made[3] else gradient
        parameters.append(parameter)
    dense[0][3], dense[1][3] = (values[3].to(torch.bfloat16).float() for values in dense)
    flat = torch.cat([values.flatten() for held in dense for values in held])
    found = []
    for order in (1.0, 2.0, 3.0, math.inf):
        got = world.get_total_norm(parameters, order)
        found.append((order, got.item(), torch.linalg.vector_norm(flat.double(), order).item()))
    before = world.clip_grad_norm(parameters, 0.25)
    assert abs(before.item() - found[1][1]) < 1e-6
    assert abs(world.get_total_norm(parameters).item() - 0.25) < 1e-5
    assert world.get_total_norm([nn.Parameter(torch.ones(2))]).item() == 0.0
    # A rank of the two has nothing of the first; the second is on both stages.
    short, narrow = nn.Parameter(distribute_tensor(torch.zeros(1), shard, [Shard(0)])), nn.Parameter(torch.zeros(2))
    short.grad = distribute_tensor(torch.tensor([-3.0]), shard, [Shard(0)])
    assert world.get_total_norm([short], math.inf).item() == 3.0
    narrow.data = narrow.bfloat16()
    narrow.grad = torch.tensor([1.0, 2.0**-5], dtype=torch.bfloat16)
    assert world.get_total_norm([narrow]).item() == pytest.approx(math.sqrt(2 + 2.0**-9), rel=1e-6)
    # A sparse gradient may hold an element several times, of which the sum counts.
    sparse = nn.Parameter(torch.zeros(4, 1))
    sparse.grad = torch.sparse_coo_tensor(torch.tensor([[1, 1, 2]]), torch.tensor([[1.0], [2.0], [4.0]]), (4, 1))
    assert world.get_total_norm([sparse], math.inf).item() == 4.0
    assert world.clip_grad_norm([sparse], 2.5).item() == pytest.approx(math.sqrt(2) * 5.0)  # on both stages
    assert world.get_total_norm([sparse]).item() == pytest.approx(2.5, rel=1e-5)
    if rank == world_size - 1:
        assert parameters[3].grad is not None
        parameters[3].grad[0, 0] = torch.nan
    # Of what all ranks hold the first one's counts; a value that is not finite there reaches all.
    if world.dims.at["tp"] == 0 and world.dims.at["dp_shard"] == 0 and world.pp_rank == 1:
        assert parameters[3].grad is not None
        parameters[3].grad[0, 0] = torch.inf
    with pytest.raises(StateError, match="norm is inf"):
        world.get_total_norm(parameters, error_if_nonfinite=True)
    world.teardown()
    return found


def missing_numbers(rank: int, world_size: int, guilty: int) -> list[float]:
    world = DistributedWorld(DeviceParameters.FSDP())
    world.setup(joined(rank, world_size))
    parameter = nn.Parameter(distribute_tensor(torch.ones(6), world.get_mesh("fsdp"), [Shard(0)]))
    parameter.grad = parameter.detach().clone()
    if rank == guilty:
        parameter.grad.to_local()[0] = torch.nan
    found = [world.get_total_norm([parameter], order).item() for order in (2.0, math.inf)]
    with pytest.raises(StateError, match="norm is nan"):
        world.get_total_norm([parameter], math.inf, error_if_nonfinite=True)
    world.teardown()
    return found


@pytest.mark.parametrize("guilty", [0, 2])
def test_what_is_no_number_reaches_all_norms(guilty: int) -> None:
    assert all(math.isnan(value) for found in run_world(3, missing_numbers, guilty) for value in found)


def test_norms_count_each_element_once() -> None:
    for found in run_world(8, norms):
        for order, got, expected in found:
            assert got == pytest.approx(expected, rel=1e-6), order


def fsdp_norm(rank: int, world_size: int) -> None:
    """The norm under FSDP2 and HSDP equals torch's own on the whole model."""
    state = joined(rank, world_size)
    for mesh in ({"dp_shard": 4}, {"dp_shard": 2, "dp_replicate": 2}, {"dp_shard": 2, "cp": 2}):
        world = DistributedWorld(DeviceParameters(**mesh))
        world.setup(state)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        whole = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        whole.load_state_dict(model.state_dict())
        fully_shard(model, mesh=world.get_mesh("fsdp"))
        x = torch.arange(10.0).view(2, 5)
        model(x).square().sum().backward()
        whole(x).square().sum().backward()
        dense = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters() if p.grad is not None])
        assert world.get_total_norm(model.parameters()).item() == pytest.approx(dense.item(), rel=1e-5)
        world.teardown()
        assert not state.is_hsdp_setup() and not state.is_fsdp_setup()


def test_norms_of_fsdp() -> None:
    run_world(4, fsdp_norm)


def test_a_world_of_its_own_process() -> None:
    with xffl.DistributedWorld(DeviceParameters.SINGLE_DEVICE()) as world:
        assert (world.rank, world.world_size, world.local_rank, world.device.type) == (0, 1, 0, "cpu")
        assert world.all_reduce(torch.tensor([2.0]), "mean").tolist() == [2.0]
        assert world.set_determinism(5) == 5
        first, others = torch.rand(3), (random.random(), np.random.random())
        world.set_determinism(5)
        assert torch.equal(torch.rand(3), first) and (random.random(), np.random.random()) == others
        world.set_determinism(5, "dp", "federated")
        assert not torch.equal(torch.rand(3), first)
        with world.train_context(), world.loss_parallel():
            assert not torch.is_autocast_enabled("cpu")
        assert world.get_fsdp_config()["reshard_after_forward"]
    assert not dist.is_initialized()
    with xffl.DistributedWorld(DeviceParameters(param_dtype="bfloat16")) as world, world.train_context():
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16


def test_sizes_that_do_not_fit_are_told_before_the_world_is_joined() -> None:
    with pytest.raises(ConfigError, match=r"tp=2 multiply to 2, but the world has 1 ranks; give sizes that multiply"):
        DistributedWorld(DeviceParameters(tp=2)).setup()
    assert not dist.is_initialized()
    with pytest.raises(ConfigError, match="give a DeviceParameters"):
        DistributedWorld({"tp": 2})  # type: ignore[arg-type]
    with pytest.raises(xffl.TopologyError, match="federated size 2 does not divide the world of 1"):
        DistributedWorld(DeviceParameters(), federated=2).setup()
    assert not dist.is_initialized()


def refuse(rank: int, world_size: int) -> None:
    state = joined(rank, world_size)
    state.set_hsdp(2)
    with pytest.raises(ConfigError, match="replicas of 2 ranks .* ask for 1"):
        DistributedWorld(DeviceParameters.DDP()).setup(state)
    with pytest.raises(ConfigError, match=r"cells of \(4,\) ranks, not \(2, 2\)"):
        DistributedWorld(DeviceParameters.HSDP(dp_shard=2), (2, 2)).setup(state)
    own = DeviceParameters.HSDP(dp_shard=2) if rank else DeviceParameters.HSDP(dp_shard=4)
    with pytest.raises(ConfigError, match="ask for 4"):
        DistributedWorld(own).setup(state)
    world = DistributedWorld(DeviceParameters.HSDP(dp_shard=2))
    world.setup(state)
    assert world.get_mesh("fsdp") is state.hsdp_mesh
    world.teardown()
    assert state.is_hsdp_setup()


def test_a_state_that_is_set_up_otherwise_is_refused() -> None:
    run_world(4, refuse)


def test_one_rank_of_thousands() -> None:
    with fake_world(4096, 1234):
        world = DistributedWorld(
            DeviceParameters(pp=4, cp=2, dp_replicate="auto", dp_shard=16, tp=4, comm=CommParameters()), (1024, 3072)
        )
        state = joined(1234, 4096)
        world.setup(state)
        assert world.dims.sizes == {"pp": 4, "cp": 2, "dp_replicate": 6, "dp_shard": 16, "tp": 4}
        assert world.dims.at == {"pp": 0, "cp": 0, "dp_replicate": 3, "dp_shard": 4, "tp": 2}
        assert world.get_mesh("tp").mesh.tolist() == [1232, 1233, 1234, 1235]
        assert len(world._groups) < 12
