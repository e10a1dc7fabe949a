"""The fields of the state, and what its setters share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from xffl.cluster.network import Timeouts
from xffl.distributed import checks
from xffl.distributed.agreement import agree
from xffl.distributed.layers import Layer
from xffl.distributed.text import state_table
from xffl.errors import ConfigError, StateError, XfflError
from xffl.topology import Topology

__all__ = ["DEFAULT_TIMEOUT_S", "StateFields"]

DEFAULT_TIMEOUT_S = 600.0
"""Seconds after which a collective over the world gives up."""

_ACROSS = ("xffl_federated",)
"""How the descriptions of groups of senders begin, see :func:`xffl.distributed.groups.make_groups`."""
_RELAYING = ("xffl_replica", "xffl_federation", "xffl_holders", "xffl_part")
"""Those of groups over which what has crossed is handed round at home: they wait for senders who wait for others."""

T = TypeVar("T")


@dataclass
class StateFields:
    """Everything that a process knows about its place; ``None`` where a feature is off."""

    backend: dist.Backend | None = None
    """Communication backend"""
    master_addr: str | None = None
    """Rendez-vous address"""
    master_port: int | None = None
    """Rendez-vous port"""
    rank: int | None = None
    """Global rank"""
    world_size: int | None = None
    """Global world size"""
    node_local_rank: int | None = None
    """Rank of the process inside the local computing node"""
    node_local_size: int | None = None
    """Number of processes on the local computing node"""
    node_rank: int | None = None
    """Rank of the computing node with respect to all the other ones"""
    node_world_size: int | None = None
    """Global number of computing nodes involved in the training process"""
    replica_local_rank: int | None = None
    """Rank of the process inside the local replica sharding group: the shard that it holds"""
    replica_local_size: int | None = None
    """Group size of a replica sharding group"""
    replica_rank: int | None = None
    """Rank of the replica among those of the world (of the federated group, if there is one)"""
    replica_world_size: tuple[int, ...] | None = None
    """Number of replicas in the world (in each federated group, if there are any)"""
    federated_local_rank: int | None = None
    """Rank of the process inside the local federated group"""
    federated_local_size: tuple[int, ...] | None = None
    """Sizes of all federated groups"""
    federated_rank: int | None = None
    """Federated group rank with respect to all the other ones"""
    federated_world_size: int | None = None
    """Global number of federated groups involved in the training process"""
    fsdp_mesh: DeviceMesh | None = None
    """FSDP device mesh, ``[shards]``"""
    hsdp_mesh: DeviceMesh | None = None
    """HSDP device mesh, ``[replicas, shards]``"""
    is_sender: bool | None = None
    """True if the rank should communicate (All-Gather) across network cells, False otherwise"""
    receive_from: int | None = None
    """The rank from which to receive the averaged parameters (Broadcast), ``None`` on senders"""
    federated_group: tuple[dist.ProcessGroup, ...] | None = None
    """Process groups, one for each stream, of the ranks that hold the same shard across federated groups; ``None`` on
    ranks that send nothing"""
    replica_group: tuple[dist.ProcessGroup, ...] | None = None
    """Process groups, one for each stream, of the ranks that hold the same shard inside the federated group"""
    federation: dist.ProcessGroup | None = None
    """Process group of all ranks of the same federated group"""
    device_type: torch.device | None = None
    """Chosen deployment device"""
    current_device: torch.device | int | None = None
    """Specific device currently in use by the process"""
    init_device: torch.device | None = None
    """Chosen initialization device"""
    meta_initialization: bool | None = None
    """True if meta initialization is enabled, False otherwise"""
    streams: tuple[torch.cuda.Stream, ...] | None = None
    """Pool of available CUDA streams"""

    _topology: Topology | None = field(default=None, init=False, repr=False)
    """What stands behind the fields of the set-up."""
    _lone_cell: tuple[int, tuple[int, ...]] | None = field(default=None, init=False, repr=False)
    _layers: list[Layer] = field(default_factory=list, init=False, repr=False, compare=False)
    """Set-ups, oldest first; the newest is the one that shows."""
    _timeouts: Timeouts = field(default=Timeouts.within(DEFAULT_TIMEOUT_S), init=False, repr=False, compare=False)
    """Timeouts of the world and its groups: a vote on the world outlives a stuck exchange."""

    def __str__(self) -> str:
        """Write the fields that are set as a table of two columns."""
        return state_table({f.name: getattr(self, f.name) for f in fields(self) if not f.name.startswith("_")})

    @property
    def topology(self) -> Topology:
        """The arithmetic behind the set-up: the federation's, else one cell of all ranks.

        :raises StateError: before ``set_global``.
        """
        return Topology(self._place()[1]) if self._topology is None else self._topology

    @property
    def lone_cell(self) -> tuple[int, tuple[int, ...]] | None:
        """Which cell this job is, and the ranks of all, where each cell is a job of its own: rounds go over files."""
        return self._lone_cell

    @property
    def data_place(self) -> tuple[Topology, int]:
        """The ranks that samples are dealt out to, and this rank's number among them.

        Those of this world; where this job is one cell of several that are jobs of their own, those of all jobs, as
        they would be in one.

        :raises StateError: before ``set_global``.
        """
        rank = self._place()[0]
        if self._lone_cell is None:
            return self.topology, rank
        cell, sizes = self._lone_cell
        replica = self.topology.replica_size  # other cells may be laid out otherwise
        if replica is not None and any(size % replica for size in sizes):
            replica = None
        dealt = Topology(sum(sizes), sizes, replica, self.topology.cell_shape)
        return dealt, dealt.offsets[cell] + rank

    def is_node_setup(self) -> bool:
        """Check if the local compute node information is set up.

        :return: True if the local compute node information is set up, False otherwise.
        """
        return None not in (self.node_local_rank, self.node_local_size, self.node_rank, self.node_world_size)

    def is_fsdp_setup(self) -> bool:
        """Check if FSDP is set up.

        :return: True if FSDP is set up, False otherwise.
        """
        return self.fsdp_mesh is not None

    def is_hsdp_setup(self) -> bool:
        """Check if HSDP is set up. Does not check the HSDP device mesh.

        :return: True if HSDP is set up, False otherwise.
        """
        replica = (self.replica_local_rank, self.replica_local_size, self.replica_rank, self.replica_world_size)
        return None not in replica

    def is_federated_scaling_setup(self) -> bool:
        """Check if Federated Scaling is set up.

        :return: True if Federated Scaling is set up, False otherwise.
        """
        own = (self.federated_local_rank, self.federated_rank)
        return None not in (*own, self.federated_local_size, self.federated_world_size)

    def create_process_group(self, ranks: tuple[int, ...] | torch.Tensor, group_desc: str | None) -> dist.ProcessGroup:
        """Create a new process group with the specified ranks.

        Collective over these ranks only. All ranks of the world must make the same number of groups in the same order
        (a rank that has none makes one of itself), since torch derives a group's name from how many the rank has. The
        group's timeout is that of its level (:class:`xffl.cluster.network.Timeouts`); a group over which the results of
        rounds are handed round at home waits longer than the exchange that it waits for.

        :param ranks: Ranks making up the group, this one among them; the group counts them in ascending order.
        :param group_desc: Description of the process group.
        :return: Process group handle.
        :raises TopologyError: if the ranks are none of this world, or this rank is not among them.
        :raises StateError: if torch.distributed is not initialized.
        """
        rank, world_size = self._joined_place("create_process_group")
        levels, name = self._timeouts, group_desc or ""
        timeout_s = levels.home_s
        if name.startswith(_ACROSS):
            timeout_s = levels.across_s
        elif name.startswith(_RELAYING):
            timeout_s = (levels.across_s + levels.session_s) / 2
        group: dist.ProcessGroup = dist.new_group(
            list(checks.check_ranks(ranks, rank, world_size)),
            timeout=timedelta(seconds=timeout_s),
            use_local_synchronization=True,
            group_desc=group_desc,
        )
        return group

    def _agreed(self, what: str, check: Callable[[], T], show: Callable[[T], str] = str) -> T:
        """Check arguments, let the ranks compare what they found, and return it.

        Collective over the world, where it is initialized.
        """
        try:
            found = check()
        except XfflError as error:
            agree(what, "", error=error)
            raise
        except (TypeError, ValueError) as error:  # an argument of a kind that nobody thought of
            agree(what, "", error=ConfigError(f"{what} cannot be read: {error}"))
            raise
        agree(what, show(found))
        return found

    def _place(self) -> tuple[int, int]:
        """Return the rank and the world's size."""
        if self.rank is None or self.world_size is None:
            raise StateError("the state does not know its rank and world yet; call set_global first")
        return self.rank, self.world_size

    def _joined_place(self, call: str) -> tuple[int, int]:
        """Return the rank and the world's size, of a world that is initialized."""
        place = self._place()
        if not dist.is_initialized():
            raise StateError(
                f"{call} makes process groups, but torch.distributed is not initialized; open xffl.session(), or call "
                "init_process_group first"
            )
        checks.check_world(place)
        return place

    def _create(self, ranks: tuple[int, ...], group_desc: str) -> dist.ProcessGroup:
        """Make a group that goes with the newest set-up."""
        group = self.create_process_group(ranks, group_desc)
        if self._layers:
            self._layers[-1].groups.append(group)
        return group

    def _device_kind(self) -> str:
        return "cpu" if self.device_type is None else self.device_type.type

    def _handles(self) -> int:
        """Count the handles of groups that carry a round: one for each stream."""
        return 1 if self.streams is None else len(self.streams)
