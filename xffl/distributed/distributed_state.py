"""Who talks to whom: the state of one process in the world, its cell and its replica.

The fields and methods are a public contract; the arithmetic behind them is :class:`xffl.topology.Topology`. A set-up is
a layer over the one before: it counts only once all ranks have made their groups, and taking it off restores what was.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from xffl.checks import integer
from xffl.distributed import checks
from xffl.distributed.groups import ALL_KINDS, cell_mesh, make_groups
from xffl.distributed.layers import laid, take_off
from xffl.distributed.process_state import ProcessState
from xffl.errors import StateError, TopologyError
from xffl.topology import Topology

__all__ = ["DistributedState", "create_device_mesh", "logger"]

logger: logging.Logger = logging.getLogger("xffl")
"""Default xFFL logger"""


@dataclass
class DistributedState(ProcessState):
    """This dataclass traces all the distributed environment parameters.

    Every setter raises on wrong input and leaves the state as it was. On an initialized world every rank must call it:
    the ranks first compare their arguments (one all-reduce of 16 bytes), so that all raise the same error. A setter
    that makes process groups returns once all ranks have made theirs.
    """

    # FSDP and HSDP over the world -------------------------------------------------------------------------------------

    def _get_global_fsdp_mesh(self) -> DeviceMesh | None:
        """Return a standard global FSDP device mesh.

        Collective over the world, where it is initialized: one group of all ranks is made.

        :return: A global FSDP device mesh if the distributed PyTorch environment is initialized, None otherwise.
        """
        if not dist.is_initialized():
            return None
        rank, world_size = self._joined_place("_get_global_fsdp_mesh")
        topology = Topology(world_size)
        groups = make_groups(self._create, topology, rank, {"federation"}, handles=1)
        return cell_mesh(topology, rank, groups, self._device_kind())

    def set_fsdp(self, mesh: DeviceMesh | None = None) -> None:
        """Enable PyTorch's FSDP functionality; a second call replaces the first.

        Collective over the world: one group of all ranks is made where no mesh is given.

        :param mesh: An FSDP device mesh of one dimension that holds this rank; None means all ranks.
        :raises ConfigError: if the mesh is none that FSDP can shard over.
        :raises StateError: if HSDP or a federation is set up, or torch.distributed is not initialized.
        """

        def check() -> DeviceMesh | None:
            self._check_order("set_fsdp")
            return None if mesh is None else checks.check_mesh(mesh, self._device_kind())

        given = self._agreed("arguments of set_fsdp", check, lambda it: "no mesh" if it is None else "a mesh")
        replaced = self._layers[-1] if self._layers else None
        with laid(self, "set_fsdp"):
            self.fsdp_mesh = self._get_global_fsdp_mesh() if given is None else given
        if replaced is not None:
            self._layers[-1].before = replaced.before
            self._layers.remove(replaced)
            replaced.destroy()

    def _set_global_hsdp_mesh(self) -> DeviceMesh | None:
        """Make the groups of this rank's shard and replica, and return the HSDP device mesh over them.

        Collective over the world, where it is initialized.

        :return: A global HSDP device mesh if the distributed PyTorch environment is initialized, None otherwise.
        :raises StateError: if the replicas are not set up.
        """
        if not dist.is_initialized():
            return None
        rank, _ = self._joined_place("_set_global_hsdp_mesh")
        if not self.is_hsdp_setup():
            raise StateError("an HSDP mesh needs replicas; call set_hsdp(n), which sets them up")
        groups = make_groups(self._create, self.topology, rank, {"shard", "replica"}, self._handles())
        self.replica_group = groups["replica"]
        self.hsdp_mesh = cell_mesh(self.topology, rank, groups, self._device_kind())
        return self.hsdp_mesh

    def set_hsdp(self, hsdp: int, cell_shape: Mapping[str, int] | None = None) -> None:
        """Enable global PyTorch's HSDP functionality; it replaces a global FSDP until :meth:`unset_hsdp`.

        Collective over the world: every rank makes a group of its replica and, for each stream, one of its shard.

        :param hsdp: Size of an HSDP replica, a divisor of the world's size.
        :param cell_shape: As in :meth:`set_federated_scaling`; the world is the cell.
        :raises TopologyError: if replicas of that size do not fill the world, or the shape has others.
        :raises StateError: if HSDP or a federation is set up, or torch.distributed is not initialized.
        """

        def check() -> Topology:
            self._check_order("set_hsdp")
            size = _replica_size(hsdp)
            return Topology(self._place()[1], None, size, cell_shape)

        topology = self._agreed("arguments of set_hsdp", check, lambda it: f"{it.replica_size}{_shape_text(it)}")
        with laid(self, "set_hsdp"):
            self._topology = topology
            assert topology.replica_size is not None
            self._partial_hsdp_setup(topology.replica_size)
            self._set_global_hsdp_mesh()

    def _partial_hsdp_setup(self, hsdp: int) -> None:
        """Initialize PyTorch's HSDP parameters without creating the device mesh.

        Collective over the world, where it is initialized.

        :param hsdp: Size of an HSDP replica; it divides the world, or every cell of the federation being set up.
        :raises TopologyError: if it does not.
        :raises StateError: if HSDP is set up.
        """
        rank, world_size = self._place()
        sizes, shape = (None, None) if self._topology is None else (self._topology.sizes, self._topology.cell_shape)
        size = _replica_size(hsdp)
        topology = Topology(world_size, sizes, size, shape)
        at = topology.coordinates(rank)
        self._partial_hsdp_setup_manual(at.shard, topology.shards(at.cell), at.replica, topology.replica_counts)

    def _partial_hsdp_setup_manual(
        self, replica_local_rank: int, replica_local_size: int, replica_rank: int, replica_world_size: tuple[int, ...]
    ) -> None:
        """Partial set up of PyTorch's HSDP functionality, to be completed by instantiating the HSDP device mesh.

        Collective over the world, where it is initialized.

        :param replica_local_rank: Rank of the current process within its model replica.
        :param replica_local_size: Local world size of a model replica.
        :param replica_rank: Rank of the current model replica among those of its federated group.
        :param replica_world_size: Number of replicas available for each federated group.
        :raises TopologyError: if the numbers do not describe this rank of this world.
        :raises StateError: if HSDP is set up.
        """
        if self.is_hsdp_setup():
            raise StateError(f"HSDP with replicas of {self.replica_local_size} is set up; call unset_hsdp() first")
        shard, size, replica = replica_local_rank, replica_local_size, replica_rank
        topology = checks.check_replicas(shard, size, replica, replica_world_size, self._place(), self._topology)
        with laid(self, "set_hsdp"):
            self._topology = topology
            self.replica_local_rank, self.replica_local_size = shard, size
            self.replica_rank, self.replica_world_size = replica, topology.replica_counts

    def unset_hsdp(self) -> None:
        """Unset all HSDP related variables: restore what was before :meth:`set_hsdp`, and destroy its groups.

        Collective over the world, where it is initialized. Nothing happens where HSDP is not set up.

        :raises StateError: if HSDP belongs to a federation.
        """

        def check() -> str:
            if self.is_federated_scaling_setup():
                raise StateError("HSDP belongs to the federation; call unset_federated_scaling() instead")
            return "HSDP" if self.is_hsdp_setup() else "no HSDP"

        if self._agreed("states at unset_hsdp", check) == "HSDP":
            take_off(self)

    # Federated scaling ------------------------------------------------------------------------------------------------

    def set_federated_scaling(
        self,
        federated_group_size: tuple[int, ...] | int,
        hsdp: int | None = None,
        cell_shape: Mapping[str, int] | None = None,
    ) -> None:
        """Cut the world into federated groups that average their models from time to time.

        Collective over the world: every rank makes a group of its cell, with HSDP also of its replica and its shard,
        and one of the senders of its shard (of itself where it sends nothing). It replaces a global FSDP, or a global
        HSDP where ``hsdp`` or ``cell_shape`` is given, until :meth:`unset_federated_scaling`.

        :param federated_group_size: Ranks of each federated group, in rank order, which sum to the world's size; one
            number means equal groups of that size.
        :param hsdp: Size of an HSDP replica, a divisor of every group's size; None means that each group is one
            replica, sharded with FSDP.
        :param cell_shape: Sizes of the axes of the mesh inside a group, outermost first, for groups with tensor,
            context or pipeline parallelism, such as ``{"pp": 2, "dp_replicate": -1, "dp_shard": 2, "tp": 2}``. Replicas
            are counted along ``dp_replicate``, where -1 stands for what a group's size leaves; a rank's shard is its
            place along all other axes. It says the size of a replica, so ``hsdp`` may be left out.
        :raises TopologyError: if groups, replicas or axes of these sizes do not fill the world.
        :raises StateError: if a federation is set up, or a global HSDP where ``hsdp`` and ``cell_shape`` are None, or
            torch.distributed is not initialized.
        """

        def check() -> Topology:
            self._check_order("set_federated_scaling", replaces_hsdp=(hsdp, cell_shape) != (None, None))
            if federated_group_size is None:
                raise TopologyError("federated sizes None name no cell; give the ranks of each, or call set_fsdp()")
            return Topology(self._place()[1], federated_group_size, hsdp, cell_shape)

        topology = self._agreed(
            "arguments of set_federated_scaling",
            check,
            lambda it: (
                f"federated sizes {it.sizes}, hsdp={it.replica_size}{_shape_text(it)}, {self._handles()} streams"
            ),
        )
        with laid(self, "set_federated_scaling"):
            self._topology = topology
            if topology.replica_size is not None:
                self._partial_hsdp_setup(topology.replica_size)
            if min(topology.sizes) == max(topology.sizes):
                self._set_symmetric_federated_scaling(topology.sizes)
            else:
                self._set_asymmetric_federated_scaling(topology.sizes)

    def _set_symmetric_federated_scaling(self, federated_group_size: tuple[int, ...] | int) -> None:
        """Create the process groups of federated groups of one size: a step of :meth:`set_federated_scaling`.

        :param federated_group_size: Number of processes making up one federated group, or of each of them.
        :raises TopologyError: if the sizes differ.
        :raises StateError: if it is called by itself.
        """
        topology = self._federated_topology(federated_group_size)
        if min(topology.sizes) != max(topology.sizes):
            raise TopologyError(f"federated sizes {topology.sizes} differ; call set_federated_scaling for any sizes")
        self._federate(topology)

    def _set_asymmetric_federated_scaling(self, federated_group_size: tuple[int, ...] | int) -> None:
        """Create the process groups of federated groups of any sizes: a step of :meth:`set_federated_scaling`.

        The groups bring together all the ranks handling corresponding shards of the model. E.g.: if a model is sharded
        among four processes and replicated across two process groups (i.e., device_mesh=[[0,1,2,3],[4,5,6,7]]), then
        they are the processes having the same local rank (i.e., [[0,4][1,5][2,6][3,7]]).

        :param federated_group_size: Number of processes making up each federated group.
        :raises TopologyError: if the sizes do not fill the world.
        :raises StateError: if it is called by itself.
        """
        self._federate(self._federated_topology(federated_group_size))

    def _federated_topology(self, sizes: tuple[int, ...] | int) -> Topology:
        """Return the topology of a federation that is being set up; the replicas' size stands in the state."""
        if not self._layers or not self._layers[-1].is_open:
            raise StateError("this is a step of set_federated_scaling; call that instead")
        shape = None if self._topology is None else self._topology.cell_shape
        return Topology(self._place()[1], sizes, self.replica_local_size, shape)

    def _federate(self, topology: Topology) -> None:
        """Fill the fields of a federation, and make its groups and the cell's mesh."""
        rank, _ = self._joined_place("set_federated_scaling")
        at = topology.coordinates(rank)
        self._topology = topology
        self.federated_rank, self.federated_world_size = at.cell, topology.cells
        self.federated_local_rank, self.federated_local_size = at.local_rank, topology.sizes
        self._set_rank_role()
        groups = make_groups(self._create, topology, rank, ALL_KINDS, self._handles())
        (self.federation,) = groups["federation"] or (None,)
        self.replica_group = groups.get("replica")
        self.federated_group = groups["federated"]
        mesh = cell_mesh(topology, rank, groups, self._device_kind())
        self.fsdp_mesh, self.hsdp_mesh = (None, mesh) if topology.is_hsdp else (mesh, None)

    def _set_rank_role(self) -> None:
        """Set whether this rank sends its shard to other cells, or else from whom it receives the average.

        :raises StateError: if no federation is set up.
        """
        if not self.is_federated_scaling_setup():
            raise StateError("senders are between federated groups only; call set_federated_scaling first")
        at = self.topology.coordinates(self._place()[0])
        self.is_sender, self.receive_from = at.is_sender, at.receive_from

    def _get_communicating_processes(self, federated_rank: int) -> tuple[int, ...]:
        """Return the senders of a federated group, by shard.

        :param federated_rank: The federated group, counted from 0.
        :return: One rank for each shard of the model.
        :raises TopologyError: if there is no such group.
        :raises StateError: before :meth:`set_global`.
        """
        return self.topology.senders(federated_rank)

    def unset_federated_scaling(self) -> None:
        """Unset Federated Scaling parameters: restore what was before, and destroy the groups made for it.

        Collective over the world, where it is initialized. Nothing happens where no federation is set up.
        """

        def check() -> str:
            return "a federation" if self.is_federated_scaling_setup() else "no federation"

        if self._agreed("states at unset_federated_scaling", check) == "a federation":
            take_off(self)

    def _forget(self, *, destroys: bool = True) -> None:
        """Take all set-ups off. Nothing moves, so no other rank may be using their groups any more.

        :param destroys: As for :func:`xffl.distributed.layers.take_off`.
        """
        while self._layers:
            take_off(self, destroys=destroys)

    # What the parts share ---------------------------------------------------------------------------------------------

    def _check_order(self, call: str, replaces_hsdp: bool = False) -> None:
        """Raise where a set-up that makes groups cannot follow those that stand."""
        self._joined_place(call)
        if self.is_federated_scaling_setup():
            raise StateError(
                f"{call} cannot follow set_federated_scaling({self.federated_local_size}); call "
                "unset_federated_scaling() first"
            )
        if self.is_hsdp_setup() and not replaces_hsdp:
            raise StateError(f"{call} cannot follow set_hsdp({self.replica_local_size}); call unset_hsdp() first")


def _shape_text(topology: Topology) -> str:
    return "" if topology.cell_shape is None else f", cell_shape={dict(topology.cell_shape)}"


def _replica_size(hsdp: object) -> int:
    hint = "give the ranks that hold one copy of the model"
    return integer("replica size (hsdp)", hsdp, hint=hint, error=TopologyError)


def create_device_mesh(mesh_shape: tuple[int, ...]) -> torch.Tensor:
    """Create a Tensor of distributed process ranks with the specified dimensions.

    :param mesh_shape: Dimensions of the mesh, each at least 1.
    :return: Tensor of ranks, counted from 0 along the last dimension first, in the shape of the mesh.
    :raises TopologyError: if there is no dimension, or one is less than 1.
    """
    knob = "give the number of ranks along each dimension"
    given: object = mesh_shape
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise TopologyError(f"mesh shape {given!r} has no dimensions; {knob}")
    shape = [integer("mesh dimension", size, hint=knob, error=TopologyError) for size in given]
    return torch.arange(prod(shape)).reshape(shape)
