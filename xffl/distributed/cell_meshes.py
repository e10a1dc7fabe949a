"""The meshes inside a cell: data, context, tensor and pipeline parallelism."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from xffl.compat.group_names import fresh_names
from xffl.distributed.groups import MODEL_AXES, Create
from xffl.distributed.parameters import AXES, AXES_OF, MeshSizes
from xffl.topology import Topology

__all__ = [
    "CellMeshes",
    "ParallelDims",
    "make_cell_meshes",
]


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of the mesh of a cell, and the coordinates of a rank in it."""

    sizes: dict[str, int]
    at: dict[str, int]

    @classmethod
    def of(cls, mesh: MeshSizes, topology: Topology, rank: int) -> ParallelDims:
        """Return the sizes in a rank's cell, and its coordinates; pure."""
        cell = topology.cell_of(rank)
        ranks = topology.sizes[cell]
        known = prod(size for size in mesh.axes.values() if size != -1)
        sizes = {axis: ranks // known if size == -1 else size for axis, size in mesh.axes.items()}
        rest = rank - topology.offsets[cell]
        at = {}
        for axis in reversed(AXES):
            rest, at[axis] = divmod(rest, sizes[axis])
        return cls(sizes, at)

    def size(self, name: str) -> int:
        """Return the ranks along an axis or along axes that count as one."""
        return prod(self.sizes[axis] for axis in AXES_OF[name])

    def rank(self, name: str) -> int:
        """Return the coordinate along an axis or along axes that count as one, the outermost counting most."""
        rank = 0
        for axis in AXES_OF[name]:
            rank = rank * self.sizes[axis] + self.at[axis]
        return rank

    def peers(self, axes: Sequence[str], first: int) -> tuple[int, ...]:
        """Return the ranks that differ from this one along some axes only, in order."""
        # A step along an axis passes over all ranks of the axes inside of it.
        steps = {axis: prod(self.sizes[inner] for inner in AXES[AXES.index(axis) + 1 :]) for axis in AXES}
        own = first + sum(self.at[axis] * steps[axis] for axis in AXES if axis not in axes)
        ranges = [range(0, self.sizes[axis] * steps[axis], steps[axis]) for axis in axes]
        return tuple(own + sum(offsets) for offsets in itertools.product(*ranges))


@dataclass(frozen=True)
class CellMeshes:
    """The meshes of one dimension and the groups of a rank, by name, and the meshes that they are parts of."""

    mesh: MeshSizes
    dims: ParallelDims
    world_mesh: DeviceMesh
    model_mesh: DeviceMesh
    by_name: dict[str, DeviceMesh]
    groups: dict[str, dist.ProcessGroup]


def make_cell_meshes(
    create: Create, mesh: MeshSizes, topology: Topology, cell: dist.ProcessGroup | None, device_type: str
) -> CellMeshes:
    """Make the groups and meshes of a rank; collective over the world.

    Every rank makes a group for each set of axes of which one has more than one rank anywhere, one of itself, and with
    cells of equal size one of the ranks at the same place in all cells.
    """
    rank = dist.get_rank()
    cell = dist.group.WORLD if cell is None else cell
    assert cell is not None and dist.group.WORLD is not None, "the state has joined the world"
    dims = ParallelDims.of(mesh, topology, rank)
    first = topology.offsets[topology.cell_of(rank)]
    is_wide = {axis: size != 1 for axis, size in mesh.axes.items()}
    wide = tuple(axis for axis in AXES if is_wide[axis])
    made: dict[tuple[str, ...], dist.ProcessGroup] = {(): create((rank,), "xffl_self"), wide: cell}
    groups = {}
    for name, axes in AXES_OF.items():
        key = tuple(axis for axis in axes if is_wide[axis])
        if key not in made:
            made[key] = create(dims.peers(key, first), f"xffl_{name}")
        groups[name] = made[key]
    groups |= {"cell": cell, "world": dist.group.WORLD}
    if min(topology.sizes) == max(topology.sizes):
        here = rank - first
        groups["federated"] = create(tuple(offset + here for offset in topology.offsets[:-1]), "xffl_all_cells")
    # Parts of a mesh are meshes, too, and torch's caches may hold one of the same ranks of an earlier world.
    name_of = fresh_names("DistributedWorld", device_type)

    def mesh_of(axes: Sequence[str], ranks: tuple[int, ...]) -> DeviceMesh:
        table = torch.tensor(ranks, dtype=torch.int64, device="cpu").view([dims.size(axis) for axis in axes])
        names = tuple(map(name_of, axes))
        return DeviceMesh.from_group([groups[axis] for axis in axes], device_type, mesh=table, mesh_dim_names=names)

    world_mesh = mesh_of(AXES, topology.federation(topology.cell_of(rank)))
    model_mesh = mesh_of(MODEL_AXES, dims.peers(("dp_replicate", "cp", "dp_shard", "tp"), first))
    # FSDP's and tensor parallelism's axes are taken from the model's mesh, which counts last.
    by_name: dict[str, DeviceMesh] = {}
    for axes, parent in ((AXES, world_mesh), (MODEL_AXES, model_mesh)):
        by_name |= {axis: parent[name_of(axis)] for axis in axes}
    for name in ("dp", "dp_cp", "federated"):
        if name in groups:
            by_name[name] = DeviceMesh.from_group(groups[name], device_type, mesh_dim_names=(name_of(name),))
    return CellMeshes(mesh, dims=dims, world_mesh=world_mesh, model_mesh=model_mesh, by_name=by_name, groups=groups)
