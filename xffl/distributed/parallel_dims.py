"""The named meshes and groups inside a cell: pipeline, context, replica, shard and tensor axes, and what joins them."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.groups import fresh_suffix
from xffl.distributed.parameters import AXES, DeviceParameters, MeshSizes
from xffl.errors import ConfigError, StateError
from xffl.topology import Topology

__all__ = ["JOINED", "CellMeshes", "ParallelDims", "WorldDims", "dtype_of", "make_cell_meshes"]


JOINED = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("cp", "dp_shard"),
    "dp_cp": ("cp", "dp_replicate", "dp_shard"),
}
"""Axes that count as one: ranks with data of their own; those that FSDP cuts a copy over; those whose losses differ."""

MODEL_AXES = ("dp_replicate", "dp_shard_cp", "tp")
"""The axes of the mesh that FSDP and tensor parallelism share; torch wants both to be parts of one mesh."""


@dataclass(frozen=True)
class ParallelDims:
    """Where a rank stands in the mesh of its cell."""

    sizes: dict[str, int]
    at: dict[str, int]

    @classmethod
    def of(cls, mesh: MeshSizes, topology: Topology, rank: int) -> ParallelDims:
        """Return a rank's place; pure."""
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
        return prod(self.sizes[axis] for axis in JOINED.get(name, (name,)))

    def rank(self, name: str) -> int:
        """Return the coordinate along an axis or along axes that count as one, the outermost counting most."""
        rank = 0
        for axis in JOINED.get(name, (name,)):
            rank = rank * self.sizes[axis] + self.at[axis]
        return rank

    def peers(self, axes: Sequence[str], first: int) -> tuple[int, ...]:
        """Return the ranks that differ from this one along some axes only, in order."""
        steps = {axis: prod(self.sizes[inner] for inner in AXES[AXES.index(axis) + 1 :]) for axis in AXES}
        own = first + sum(self.at[axis] * steps[axis] for axis in AXES if axis not in axes)
        ranges = [range(0, self.sizes[axis] * steps[axis], steps[axis]) for axis in axes]
        return tuple(own + sum(offsets) for offsets in itertools.product(*ranges))


@dataclass(frozen=True)
class CellMeshes:
    """The meshes and groups of a rank, complete once made."""

    mesh: MeshSizes
    dims: ParallelDims
    world_mesh: DeviceMesh
    model_mesh: DeviceMesh
    by_name: dict[str, DeviceMesh]
    groups: dict[str, dist.ProcessGroup]

    def group(self, name: str) -> dist.ProcessGroup:
        """Return the group of a name."""
        if name not in self.groups:
            raise ConfigError(f"mesh {name!r} is none of {', '.join(self.groups)}{_why_not(name)}")
        return self.groups[name]

    def get_mesh(self, name: str) -> DeviceMesh:
        """Return the mesh of one dimension of a name; errors as :meth:`group`."""
        self.group(name)
        if name not in self.by_name:
            raise ConfigError(f"mesh {name!r} is a group of ranks without coordinates; give one of {[*self.by_name]}")
        return self.by_name[name]


def make_cell_meshes(
    create: Callable[[tuple[int, ...], str], dist.ProcessGroup],
    mesh: MeshSizes,
    state: DistributedState,
    device_type: str,
) -> CellMeshes:
    """Make the groups and meshes of a rank.

    Collective over the world: every rank makes a group for each set of axes of which one has more than one rank
    anywhere, one of itself, and with cells of equal size one of the ranks at the same place in all cells.
    """
    topology, rank = state.topology, dist.get_rank()
    cell = state.federation if state.federation is not None else dist.group.WORLD
    assert cell is not None and dist.group.WORLD is not None, "the state has joined the world"
    dims = ParallelDims.of(mesh, topology, rank)
    first = topology.offsets[topology.cell_of(rank)]
    is_wide = {axis: size != 1 for axis, size in mesh.axes.items()}
    wide = tuple(axis for axis in AXES if is_wide[axis])
    made: dict[tuple[str, ...], dist.ProcessGroup] = {(): create((rank,), "xffl_self"), wide: cell}
    if not wide:
        made[()] = cell
    named = {axis: (axis,) for axis in AXES} | JOINED
    groups = {}
    for name, axes in named.items():
        key = tuple(axis for axis in axes if is_wide[axis])
        if key not in made:
            made[key] = create(dims.peers(key, first), f"xffl_{name}")
        groups[name] = made[key]
    groups |= {"cell": cell, "world": dist.group.WORLD}
    if min(topology.sizes) == max(topology.sizes):
        here = rank - first
        groups["federated"] = create(tuple(offset + here for offset in topology.offsets[:-1]), "xffl_all_cells")
    cell_ranks = topology.federation(topology.cell_of(rank))
    # The parts of a mesh are meshes, too, and may hold the ranks of one that another world had.
    suffix = fresh_suffix("DistributedWorld", device_type)
    world_mesh = DeviceMesh.from_group(
        [groups[axis] for axis in AXES],
        device_type,
        mesh=torch.tensor(cell_ranks, device="cpu").view([dims.sizes[axis] for axis in AXES]),
        mesh_dim_names=tuple(f"{axis}{suffix}" for axis in AXES),
    )
    stage = dims.peers(("dp_replicate", "cp", "dp_shard", "tp"), first)
    model_mesh = DeviceMesh.from_group(
        [groups[axis] for axis in MODEL_AXES],
        device_type,
        mesh=torch.tensor(stage, device="cpu").view([dims.size(axis) for axis in MODEL_AXES]),
        mesh_dim_names=tuple(f"{axis}{suffix}" for axis in MODEL_AXES),
    )
    by_name = _by_name(world_mesh, model_mesh)
    for name in ("dp", "dp_cp", "federated"):
        if name in groups:
            by_name[name] = DeviceMesh.from_group(groups[name], device_type, mesh_dim_names=(f"{name}{suffix}",))
    return CellMeshes(mesh, dims, world_mesh, model_mesh, by_name, groups)


def _by_name(world_mesh: DeviceMesh, model_mesh: DeviceMesh) -> dict[str, DeviceMesh]:
    """Return the parts of both meshes along one axis; FSDP's and tensor parallelism's are parts of the model's."""
    found: dict[str, DeviceMesh] = {}
    for names, mesh in ((AXES, world_mesh), (MODEL_AXES, model_mesh)):
        assert mesh.mesh_dim_names is not None, "made with names"
        for name, shown in zip(names, mesh.mesh_dim_names, strict=True):
            found[name] = mesh[shown]
    return found


def _why_not(name: str) -> str:
    return ": it needs cells of equal size" if name == "federated" else ""


class WorldDims:
    """What can be asked of a world that is set up; nothing moves."""

    def __init__(self, device_parameters: DeviceParameters) -> None:
        self.device_parameters = device_parameters
        self.lone_cell: int | None = None
        """Which cell this world is, where each cell is a job of its own; counts for seeds"""
        self._state: DistributedState | None = None
        self._meshes: CellMeshes | None = None
        self._device: torch.device | None = None

    @property
    def _made(self) -> CellMeshes:
        if self._meshes is None:
            raise StateError("the world is not set up; call setup() first")
        return self._meshes

    @property
    def is_set_up(self) -> bool:
        """Whether ranks and meshes are known."""
        return self._state is not None

    @property
    def state(self) -> DistributedState:
        """The one source of ranks."""
        if self._state is None:
            raise StateError("the world is not set up; call setup() first")
        return self._state

    @property
    def rank(self) -> int:
        """Rank of this process in the world."""
        return self.state._place()[0]

    @property
    def world_size(self) -> int:
        """Number of all processes, of all cells."""
        return self.state._place()[1]

    @property
    def local_rank(self) -> int:
        """Rank of this process on its node."""
        local_rank = self.state.node_local_rank
        return 0 if local_rank is None else local_rank

    @property
    def device(self) -> torch.device:
        """What this process computes on."""
        if self._device is None:  # asked for in every step
            device = self.state.current_device if self.state.current_device is not None else self.state.device_type
            self._device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cpu")
        return self._device

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0 of the world."""
        return self.rank == 0

    @property
    def dims(self) -> ParallelDims:
        """Sizes of the mesh inside this rank's cell and the rank's coordinates in it."""
        return self._made.dims

    def dims_of_cell(self, cell: int) -> ParallelDims:
        """Return the sizes of the mesh inside any cell, with the place of its first rank."""
        return ParallelDims.of(self._made.mesh, self.state.topology, self.state.topology.offsets[cell])

    @property
    def dp_size(self) -> int:
        """Ranks of the cell with data of their own."""
        return self.dims.size("dp")

    @property
    def dp_rank(self) -> int:
        """This rank's number among those with data of their own."""
        return self.dims.rank("dp")

    @property
    def dp_replicate_size(self) -> int:
        """Replicas in the cell."""
        return self.dims.size("dp_replicate")

    @property
    def dp_replicate_rank(self) -> int:
        """The replica that this rank belongs to."""
        return self.dims.rank("dp_replicate")

    @property
    def dp_shard_size(self) -> int:
        """Ranks with data of their own that FSDP cuts a replica over."""
        return self.dims.size("dp_shard")

    @property
    def dp_shard_rank(self) -> int:
        """This rank's place along ``dp_shard``."""
        return self.dims.rank("dp_shard")

    @property
    def cp_size(self) -> int:
        """Ranks that share a sequence."""
        return self.dims.size("cp")

    @property
    def cp_rank(self) -> int:
        """The part of a sequence that this rank works on."""
        return self.dims.rank("cp")

    @property
    def tp_size(self) -> int:
        """Ranks that share a layer."""
        return self.dims.size("tp")

    @property
    def tp_rank(self) -> int:
        """The part of each layer that this rank works on."""
        return self.dims.rank("tp")

    @property
    def pp_size(self) -> int:
        """Stages of the pipeline."""
        return self.dims.size("pp")

    @property
    def pp_rank(self) -> int:
        """The stage that this rank works on."""
        return self.dims.rank("pp")

    @property
    def dp_enabled(self) -> bool:
        """Whether ranks of the cell have data of their own."""
        return self.dims.size("dp") > 1

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether the cell has replicas."""
        return self.dims.size("dp_replicate") > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether FSDP cuts the model over ranks with data of their own."""
        return self.dims.size("dp_shard") > 1

    @property
    def fsdp_enabled(self) -> bool:
        """Whether FSDP cuts the model, over ``dp_shard`` and ``cp``."""
        return self.dims.size("dp_shard_cp") > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are cut."""
        return self.dims.size("cp") > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are cut."""
        return self.dims.size("tp") > 1

    @property
    def pp_enabled(self) -> bool:
        """Whether the model is a pipeline."""
        return self.dims.size("pp") > 1

    @property
    def loss_parallel_enabled(self) -> bool:
        """Whether logits stay cut along the vocabulary for the loss."""
        return self.tp_enabled and self.device_parameters.loss_parallel

    @property
    def mixed_precision_enabled(self) -> bool:
        """Whether computation is done in another data type than float32."""
        return self.device_parameters.param_dtype != "float32"

    @property
    def mixed_precision_dtype(self) -> torch.dtype:
        """What computation is done in."""
        return dtype_of(self.device_parameters.param_dtype)

    # Determinism ------------------------------------------------------------------------------------------------------

    def seed_for(self, seed: int, *axes: str) -> int:
        r"""Return a seed that is the same on ranks at the same place along some axes, and another elsewhere; local.

        :param seed: The run's seed.
        :param \*axes: ``federated``, or axes as in :meth:`size`; none for the same seed on all ranks.
        :return: A whole number of 63 bits; the run's seed itself where no axis is given.
        :raises ConfigError: if there is no such axis.
        """
        for axis in axes:
            if axis not in (*AXES, *JOINED, "federated"):
                raise ConfigError(f"axis {axis!r} is none of {', '.join((*AXES, *JOINED, 'federated'))}")
        if not axes:
            return seed
        cell = self.state.topology.cell_of(self.rank) if self.lone_cell is None else self.lone_cell
        place = [(axis, cell if axis == "federated" else self.dims.rank(axis)) for axis in sorted(axes)]
        digest = hashlib.blake2b(repr((seed, place)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def set_determinism(self, seed: int, *axes: str, deterministic: bool = False) -> int:
        r"""Seed Python, numpy and torch on this rank; local.

        :param seed: The run's seed.
        :param \*axes: Axes along which ranks draw different numbers, as in :meth:`seed_for`. Ranks that share a layer
            or a copy of the model have to agree on dropout and initialization: ``dp`` and ``federated`` are the usual.
        :param deterministic: Whether torch is to take deterministic algorithms only, from now on.
        :return: The seed that was set.
        """
        own = self.seed_for(seed, *axes)
        random.seed(own)
        np.random.seed(own % 2**32)
        torch.manual_seed(own)
        if deterministic:
            torch.use_deterministic_algorithms(True)
        return own


def dtype_of(name: str) -> torch.dtype:
    """Return torch's data type of a name that :class:`DeviceParameters` accepts."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), "checked by DeviceParameters"
    return dtype
