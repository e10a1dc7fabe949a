"""Where a rank stands in its world and in the mesh of its cell."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch

from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.meshes import JOINED, CellMeshes, Place
from xffl.distributed.parameters import AXES, DeviceParameters
from xffl.errors import ConfigError, StateError

__all__ = ["Standing", "dtype_of"]


class Standing:
    """What can be asked of a world that is set up; nothing moves.

    :param device_parameters: What is asked of the ranks inside a cell.
    """

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
    def place(self) -> Place:
        """Sizes of the mesh inside this rank's cell and the rank's coordinates in it."""
        return self._made.place

    def place_in(self, cell: int) -> Place:
        """Return the sizes of the mesh inside any cell, with the place of its first rank.

        :param cell: The cell, from 0.
        :return: The place.
        """
        return Place.of(self._made.mesh, self.state.topology, self.state.topology.offsets[cell])

    @property
    def dp_size(self) -> int:
        """Ranks of the cell with data of their own."""
        return self.place.size("dp")

    @property
    def dp_rank(self) -> int:
        """This rank's number among those with data of their own."""
        return self.place.rank("dp")

    @property
    def dp_replicate_size(self) -> int:
        """Replicas in the cell."""
        return self.place.size("dp_replicate")

    @property
    def dp_replicate_rank(self) -> int:
        """The replica that this rank belongs to."""
        return self.place.rank("dp_replicate")

    @property
    def dp_shard_size(self) -> int:
        """Ranks with data of their own that FSDP cuts a replica over."""
        return self.place.size("dp_shard")

    @property
    def dp_shard_rank(self) -> int:
        """This rank's place along ``dp_shard``."""
        return self.place.rank("dp_shard")

    @property
    def cp_size(self) -> int:
        """Ranks that share a sequence."""
        return self.place.size("cp")

    @property
    def cp_rank(self) -> int:
        """The part of a sequence that this rank works on."""
        return self.place.rank("cp")

    @property
    def tp_size(self) -> int:
        """Ranks that share a layer."""
        return self.place.size("tp")

    @property
    def tp_rank(self) -> int:
        """The part of each layer that this rank works on."""
        return self.place.rank("tp")

    @property
    def pp_size(self) -> int:
        """Stages of the pipeline."""
        return self.place.size("pp")

    @property
    def pp_rank(self) -> int:
        """The stage that this rank works on."""
        return self.place.rank("pp")

    @property
    def dp_enabled(self) -> bool:
        """Whether ranks of the cell have data of their own."""
        return self.place.size("dp") > 1

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether the cell has replicas."""
        return self.place.size("dp_replicate") > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether FSDP cuts the model over ranks with data of their own."""
        return self.place.size("dp_shard") > 1

    @property
    def fsdp_enabled(self) -> bool:
        """Whether FSDP cuts the model, over ``dp_shard`` and ``cp``."""
        return self.place.size("dp_shard_cp") > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are cut."""
        return self.place.size("cp") > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are cut."""
        return self.place.size("tp") > 1

    @property
    def pp_enabled(self) -> bool:
        """Whether the model is a pipeline."""
        return self.place.size("pp") > 1

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
        place = [(axis, cell if axis == "federated" else self.place.rank(axis)) for axis in sorted(axes)]
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
