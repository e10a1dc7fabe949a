"""State of the distributed run: who this process is, which groups it has, and the setters that make them.

:class:`DistributedState` is the one source of ranks. Its setters check what they are given, let the ranks compare it,
and only then fill the fields. Those that make process groups (:meth:`~DistributedState.set_fsdp`,
:meth:`~DistributedState.set_hsdp`, :meth:`~DistributedState.set_federated_scaling`) are transactions: all ranks have
the new set-up, or all are as they were. Set-ups form a stack, so that ``unset_*`` brings back the one before.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from xffl.checks import integer, one_of
from xffl.cluster.environment import checks_world
from xffl.cluster.network import Timeouts
from xffl.cluster.sizes import read_federation, read_replica_size
from xffl.distributed.activity import RunActivity
from xffl.distributed.agreement.consistency import run_on_all_ranks
from xffl.distributed.groups import (
    ALL_KINDS,
    OF_STREAM,
    cell_mesh,
    check_backend,
    check_device,
    check_link_backend,
    check_streams,
    destroy_group,
    make_groups,
    new_group,
    with_host_side,
    without_host_side,
)
from xffl.distributed.several_worlds.cell_world import CellWorld
from xffl.distributed.state_text import state_text
from xffl.errors import ConfigError, StateError, TopologyError
from xffl.topology import DataPlace, Topology

if TYPE_CHECKING:
    from xffl.distributed.failures.world_check import WorldCheck
    from xffl.distributed.parameters import ElasticParameters
    from xffl.distributed.several_worlds.cross_world import CrossWorldGroup
    from xffl.distributed.several_worlds.isolated_cell import IsolatedCell
    from xffl.journal.cell import CellJournal

__all__ = ["DEFAULT_TIMEOUT_S", "DistributedState", "create_device_mesh", "logger"]

logger: logging.Logger = logging.getLogger("xffl")
"""Default xFFL logger"""

DEFAULT_TIMEOUT_S = 600.0
"""Seconds after which a collective over the world gives up."""

_CROSS_CELL = ("xffl_federated",)
"""How the descriptions of groups of senders begin, see :func:`xffl.distributed.groups.make_groups`."""
_RELAYING = ("xffl_replica", "xffl_federation", "xffl_holders", "xffl_part")
"""Those of intra-cell groups that hand on what has crossed: they wait for senders, who wait for other cells."""
_COLLECTIVES_ALONE = (*_RELAYING, "xffl_shard")
"""Those of groups in which no rank sends to a single other one."""

_SETUP_FIELDS = (
    *("_topology", "replica_local_rank", "replica_local_size", "replica_rank", "replica_world_size"),
    *("federated_local_rank", "federated_local_size", "federated_rank", "federated_world_size"),
    *("fsdp_mesh", "hsdp_mesh", "is_sender", "receive_from", "federated_group", "replica_group", "federation"),
)
"""The fields that a set-up fills; each set-up says all of them."""


@dataclass
class DistributedState:
    """This dataclass traces all the distributed environment parameters; ``None`` where a feature is off.

    Every setter raises on wrong input and leaves the state as it was. On an initialized world every rank must call it:
    the ranks first compare their arguments (one all-reduce of 16 bytes), so that all raise the same error. A setter
    that makes process groups returns once all ranks have made theirs.
    """

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
    ranks that send nothing. Unequal federated groups without HSDP cut the model differently, so that no two of their
    ranks hold the same shard: all ranks of the world are in one group there, and averaging over it would mix the shards
    of one federated group. :class:`xffl.Aggregator` averages federated groups of any sizes"""
    replica_group: tuple[dist.ProcessGroup, ...] | None = None
    """Process groups, one for each stream, of the ranks that hold the same shard inside the federated group.

    These and those of ``federated_group`` are made with the state and not at their first use: to make a group is
    collective, and a script may use a handle on some ranks alone. Rounds on GPUs have groups of their own. The second
    and further ones here have no connections before NCCL's first collective on them."""
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
    _cell_world: CellWorld | None = field(default=None, init=False, repr=False)
    """What :func:`set_cell_world` was given: the place of this world among others; ``None`` where there are none"""
    _data_place: DataPlace | None = field(default=None, init=False, repr=False)
    """What :func:`set_data_place` was given"""
    _setups: list[Setup] = field(default_factory=list, init=False, repr=False, compare=False)
    """Set-ups, oldest first; the newest is the one that shows."""
    _link_backend: dist.Backend | None = field(default=None, init=False, repr=False)
    _timeouts: Timeouts = field(default=Timeouts.within(DEFAULT_TIMEOUT_S), init=False, repr=False, compare=False)
    """Timeouts of the world and its groups: a vote on the world outlives a stuck exchange."""
    _activity: RunActivity = field(default_factory=RunActivity, init=False, repr=False, compare=False)
    _meetings: Counter[str] = field(default_factory=Counter, init=False, repr=False, compare=False)

    def __str__(self) -> str:
        """Write the fields that are set as a table of two columns."""
        return state_text({item.name: getattr(self, item.name) for item in fields(self)})

    @property
    def timeouts(self) -> Timeouts:
        """Timeouts of the world and its groups."""
        return self._timeouts

    @property
    def link_backend(self) -> dist.Backend | None:
        """Backend of what crosses cells, the world too; ``None`` where it is :attr:`backend`."""
        return self._link_backend

    @property
    def activity(self) -> RunActivity:
        """What the run has done with its federation, for the lines at the end of a session."""
        return self._activity

    @property
    def meetings(self) -> Counter[str]:
        """How many loaders of each kind have been made with this state, by which cells pair them to compare samples."""
        return self._meetings

    @property
    def setup_number(self) -> int:
        """Which set-up of the world the newest one of this state is, the same on all ranks; 0 where there is none."""
        return self._setups[-1].number if self._setups else 0

    @property
    def handle_count(self) -> int:
        """Process groups of each kind that carry a round: one for each stream."""
        return 1 if self.streams is None else len(self.streams)

    @property
    def topology(self) -> Topology:
        """The arithmetic behind the set-up: the federation's, else one cell of all ranks; needs ``set_global``."""
        return Topology(self._place()[1]) if self._topology is None else self._topology

    @property
    def lone_cell(self) -> tuple[int, tuple[int, ...]] | None:
        """Which cell this job is, and the ranks of all, where each cell is a job of its own.

        Rounds go over files, or, where the federation is :attr:`elastic`, among the cells that are there.
        """
        return None if self._cell_world is None else self._cell_world.lone_cell

    @property
    def elastic(self) -> ElasticParameters | None:
        """How this job, which is one cell, makes rounds with others that may be lost; ``None`` without."""
        return None if self._cell_world is None else self._cell_world.elastic

    @property
    def isolated(self) -> IsolatedCell | None:
        """This rank's place in the job, where the job's cells are worlds of their own; ``None`` elsewhere.

        The state's other fields then describe the world of this rank's cell.
        """
        return None if self._cell_world is None else self._cell_world.isolated

    @property
    def job_rank(self) -> int | None:
        """This rank's number among all ranks of the job: ``rank``, unless the job's cells are :attr:`isolated`."""
        return self.rank if self._cell_world is None else self._cell_world.job_rank(self.rank)

    @property
    def is_first_of_job(self) -> bool:
        """Whether this rank writes and speaks where one rank does so for the whole job."""
        return self.job_rank == 0

    @property
    def job_topology(self) -> Topology:
        """The cells of the whole job: :attr:`topology`, unless the job's cells are :attr:`isolated`."""
        return self.topology if self._cell_world is None else self._cell_world.job_topology(self.topology)

    @property
    def job_group(self) -> CrossWorldGroup | None:
        """The group of all ranks of the job, by the job's numbers, where the job's cells are :attr:`isolated`.

        ``None`` elsewhere: then torch.distributed's default group has all ranks of the job.

        :raises StateError: if this rank has left the job.
        """
        return None if self._cell_world is None else self._cell_world.job_group

    @property
    def cell_journal(self) -> CellJournal | None:
        """What this job, which is one cell of an elastic federation, knows of the run's journal; on its rank 0 only.

        It was read before the session gave this state, and so before any checkpoint was.
        """
        return None if self._cell_world is None else self._cell_world.journal

    @property
    def data_place(self) -> DataPlace:
        """The cells that samples are dealt out to, and this rank's number among their ranks; needs ``set_global``.

        Where this job is one cell of several that are jobs of their own, those of all jobs, as they would be in one.
        Loaders, samplers and streams take the state, and ask for this.

        :raises StateError: if the state does not know its rank and world yet.
        """
        job = DataPlace(self.topology, self._place()[0])
        if self._data_place is not None:
            return self._data_place
        return job if self._cell_world is None else self._cell_world.data_place(job)

    @property
    def cell(self) -> int:
        """The number of this rank's cell among all cells of the federation; needs ``set_global``.

        Valid in one process (0), in one job with and without federation, where the job's cells are :attr:`isolated`,
        and where each cell is a job of its own, over files or in an elastic federation. In the last three
        ``federated_rank`` is ``None``, and :attr:`topology` has this world's ranks only.

        :raises StateError: if the state does not know its rank and world yet.
        """
        return self.data_place.cell

    @property
    def cells(self) -> int:
        """How many cells the federation has, this one among them, also where they are jobs of their own.

        In an elastic federation as many as there may be.

        :raises StateError: if the state does not know its rank and world yet.
        """
        return self.data_place.cells

    @property
    def cell_rank(self) -> int:
        """This rank's number among the ranks of its cell.

        :raises StateError: if the state does not know its rank and world yet.
        """
        return self.data_place.cell_rank

    @property
    def cell_size(self) -> int:
        """How many ranks this rank's cell has.

        :raises StateError: if the state does not know its rank and world yet.
        """
        return self.data_place.cell_size

    def is_node_setup(self) -> bool:
        """Return whether the local compute node information is set up."""
        return None not in (self.node_local_rank, self.node_local_size, self.node_rank, self.node_world_size)

    def is_fsdp_setup(self) -> bool:
        """Return whether FSDP is set up."""
        return self.fsdp_mesh is not None

    def is_hsdp_setup(self) -> bool:
        """Return whether HSDP is set up; the device mesh is not looked at."""
        replica = (self.replica_local_rank, self.replica_local_size, self.replica_rank, self.replica_world_size)
        return None not in replica

    def is_federated_scaling_setup(self) -> bool:
        """Return whether Federated Scaling is set up."""
        own = (self.federated_local_rank, self.federated_rank)
        return None not in (*own, self.federated_local_size, self.federated_world_size)

    def create_process_group(self, ranks: tuple[int, ...] | torch.Tensor, group_desc: str | None) -> dist.ProcessGroup:
        """Create a new process group with the specified ranks, collective over these only.

        All ranks of the world must make the same number of groups in the same order (a rank that has none makes one of
        itself), since a group is named by how many the rank has made. The timeout is that of the group's level
        (:class:`xffl.cluster.network.Timeouts`); a group that hands on results in a cell outlasts the exchange before
        it. With a :attr:`link_backend` a group that crosses cells gets it, and one inside a cell the other one.

        :param ranks: Ranks making up the group, this one among them; the group counts them in ascending order.
        :param group_desc: Description of the process group.
        :return: Process group handle.
        :raises TopologyError: if the ranks are not of this world, or this rank is not among them.
        :raises StateError: if torch.distributed is not initialized.
        """
        rank, world_size = self._initialized_place("create_process_group")
        levels, name = self._timeouts, group_desc or ""
        timeout_s = levels.home_s
        if name.startswith(_CROSS_CELL):
            timeout_s = levels.across_s
        elif name.startswith(_RELAYING):
            timeout_s = (levels.across_s + levels.session_s) / 2
        checked = _check_ranks(ranks, rank, world_size)
        backend: str | None = None  # the world's
        if self._link_backend is not None:
            crosses = len({self.topology.cell_of(one) for one in (min(checked), max(checked))}) > 1
            backend = self._link_backend if crosses else self.backend
        if name.endswith(OF_STREAM):
            backend = without_host_side(backend or dist.get_backend_config())
        has_messages = not name.startswith(_COLLECTIVES_ALONE)
        return new_group(checked, timeout_s, group_desc, backend, has_messages=has_messages)

    # The process, its node and its device ----------------------------------------------------------------------------

    def set_global(
        self,
        backend: dist.Backend | str,
        device_type: torch.device | str,
        master_addr: str | None,
        master_port: int | None,
        rank: int,
        world_size: int,
        *,
        link_backend: str | None = None,
    ) -> None:
        """Set global process group information; collective over the world, where it is initialized.

        :param backend: Communication backend to use, which this build of torch has.
        :param device_type: Type of device to use, ``cpu`` or ``cuda``.
        :param master_addr: Address of the master node for the rendez-vous; empty where ranks meet otherwise.
        :param master_port: Port of the master node for the rendez-vous; 0 where ranks meet otherwise.
        :param rank: Global process rank, ``0 <= rank < world_size``.
        :param world_size: Global world size, at least 1.
        :param link_backend: Backend between federated groups, as :func:`xffl.session` takes it; where it is another one
            than inside them, torch.distributed must have been initialized with it.
        :raises ConfigError: if a backend, device or rendez-vous are invalid.
        :raises TopologyError: if the rank is outside the world, or torch.distributed or the node says otherwise.
        :raises StateError: if a set-up stands on what was said before.
        """
        with _comparison("arguments of set_global") as share:
            if self._setups:
                raise StateError(f"set_global comes before {self._setups[-1].call}; undo that first")
            place = _check_place("rank", rank, "world_size", world_size)
            _check_world(place)
            _check_node(self.node_local_size, self.node_world_size, place[1])
            device = torch.device(check_device("device_type", device_type).type)
            if master_addr is not None and not isinstance(master_addr, str):
                raise ConfigError(f"master_addr must be a host name or an address, got {master_addr!r}; give rank 0's")
            port = None if master_port is None else integer("master_port", master_port, 0, 65535)
            if bool(master_addr) != bool(port):
                raise ConfigError(
                    f"master_addr {master_addr!r} and master_port {port} belong together; give both or none"
                )
            checked = check_backend(backend)
            link = check_link_backend(link_backend, checked, device)
            if link is not None:
                _check_link(link)
                checked = with_host_side(checked)
            share(f"{checked}, {link}, {device}, {master_addr}, {port}, {place[1]} ranks")
        self.backend = checked
        self.device_type = device
        self._link_backend = link
        self.master_addr = master_addr
        self.master_port = port
        self.rank, self.world_size = place

    def set_node(self, node_local_rank: int, node_local_size: int, node_rank: int, node_world_size: int) -> None:
        """Set the process' information relative to the local node; collective over the world, where it is initialized.

        Nodes may hold different numbers of processes.

        :param node_local_rank: Local compute node rank, ``0 <= node_local_rank < node_local_size``.
        :param node_local_size: World size of the local compute node.
        :param node_rank: Rank of the local compute node among all the available nodes in the training.
        :param node_world_size: Number of compute nodes involved in the training process.
        :raises TopologyError: if a rank is outside its size, or the nodes do not fit the world.
        """
        with _comparison("arguments of set_node") as share:
            local = _check_place("node_local_rank", node_local_rank, "node_local_size", node_local_size)
            node = _check_place("node_rank", node_rank, "node_world_size", node_world_size)
            _check_node(local[1], node[1], self.world_size)
            share(f"{node[1]} nodes")
        self.node_local_rank, self.node_local_size = local
        self.node_rank, self.node_world_size = node

    def set_exec_device(self, current_device: torch.device | int, streams: int | None = None) -> None:
        """Set the device that this process works on, and make it torch's current one; collective over the world.

        :param current_device: Training device; a number is the index of a GPU.
        :param streams: Number of CUDA streams to instantiate; None means 4 on CUDA and none on CPU.
        :raises ConfigError: if there is no such device, it is not of the state's type, or CPU is to have streams.
        :raises StateError: if groups were made for another number of streams.
        """
        with _comparison("arguments of set_exec_device") as share:
            kind = None if self.device_type is None else self.device_type.type
            device = check_device("current_device", current_device, kind)
            if device == torch.device("cuda"):  # without an index
                device = torch.device("cuda", torch.cuda.current_device())
            count = check_streams(streams, device)
            if self._setups and (count or 1) != self.handle_count:
                raise StateError(
                    f"{count} streams were asked for, but {self._setups[-1].call} made groups for {self.handle_count}; "
                    "call set_exec_device before it"
                )
            share(f"{device.type}, streams={count}")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.current_device = device
        new = (torch.cuda.Stream(device) for _ in range(count or 0))  # type: ignore[no-untyped-call]
        self.streams = None if count is None else tuple(new)

    def set_init_device(self, init_device: torch.device | None, meta_initialization: bool = False) -> None:
        """Set the device that models are initialized on; collective over the world, where it is initialized.

        :param init_device: Initialization device; ranks may differ. None means the meta device where meta
            initialization is asked for, else the device that the process works on.
        :param meta_initialization: If meta device initialization is required.
        :raises ConfigError: if the device does not exist, or is the meta device without meta initialization.
        """
        with _comparison("arguments of set_init_device") as share:
            one_of("meta_initialization", meta_initialization, (True, False))
            if init_device is None:
                device = torch.device("meta") if meta_initialization else None
            else:
                device = check_device("init_device", init_device, may_be_meta=True)
                if device.type == "meta" and not meta_initialization:
                    raise ConfigError("init_device 'meta' needs meta_initialization=True, as it holds no values")
            share(f"meta_initialization={meta_initialization}")
        self.init_device = device
        self.meta_initialization = meta_initialization

    # FSDP and HSDP over the world -------------------------------------------------------------------------------------

    def _get_global_fsdp_mesh(self) -> DeviceMesh | None:
        """Return a mesh of all ranks, and make its group; collective over the world, where it is initialized."""
        if not dist.is_initialized():
            return None
        rank, world_size = self._initialized_place("_get_global_fsdp_mesh")
        topology = Topology(world_size)
        groups = make_groups(self._create_group, topology, rank, {"federation"}, handles=1)
        return cell_mesh(topology, rank, groups, self._device_kind())

    def set_fsdp(self, mesh: DeviceMesh | None = None) -> None:
        """Enable PyTorch's FSDP functionality; a second call replaces the first.

        Collective over the world: one group of all ranks is made where no mesh is given.

        :param mesh: An FSDP device mesh of one dimension that holds this rank; None means all ranks.
        :raises ConfigError: if FSDP cannot shard over the mesh.
        :raises StateError: if HSDP or a federation is set up, or torch.distributed is not initialized.
        """
        with _comparison("arguments of set_fsdp") as share:
            self._check_order("set_fsdp")
            checked: DeviceMesh | None = None
            if mesh is not None:
                from xffl.distributed.given_mesh import check_mesh

                checked = check_mesh(mesh, self._device_kind())
            share("no mesh" if checked is None else "a mesh")
        replaced = self._setups[-1] if self._setups else None
        with setup_transaction(self, "set_fsdp"):
            self.fsdp_mesh = self._get_global_fsdp_mesh() if checked is None else checked
        if replaced is not None:  # its groups stay until all ranks have the new ones; undoing goes back to before it
            self._setups[-1].before = replaced.before
            self._setups.remove(replaced)
            replaced.destroy()

    def _set_global_hsdp_mesh(self) -> DeviceMesh | None:
        """Make the groups of this rank's shard and replica, and return their mesh; collective over the world."""
        if not dist.is_initialized():
            return None
        rank, _ = self._initialized_place("_set_global_hsdp_mesh")
        if not self.is_hsdp_setup():
            raise StateError("an HSDP mesh needs replicas; call set_hsdp(n), which sets them up")
        groups = make_groups(
            self._create_group, topology=self.topology, rank=rank, kinds={"shard", "replica"}, handles=self.handle_count
        )
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
        with _comparison("arguments of set_hsdp") as share:
            self._check_order("set_hsdp")
            size = _replica_size(hsdp)
            topology = Topology(self._place()[1], None, size, cell_shape)
            share(f"{size}{_shape_text(topology)}")
        with setup_transaction(self, "set_hsdp"):
            self._topology = topology
            self._partial_hsdp_setup(size)
            self._set_global_hsdp_mesh()

    def _partial_hsdp_setup(self, hsdp: int) -> None:
        """Fill the fields of HSDP without making its mesh; collective over the world, where it is initialized."""
        rank, world_size = self._place()
        sizes, shape = (None, None) if self._topology is None else (self._topology.sizes, self._topology.cell_shape)
        size = _replica_size(hsdp)
        topology = Topology(world_size, sizes, size, shape)
        at = topology.coordinates(rank)
        self._partial_hsdp_setup_manual(at.shard, topology.shards(at.cell), at.replica, topology.replica_counts)

    def _partial_hsdp_setup_manual(
        self, replica_local_rank: int, replica_local_size: int, replica_rank: int, replica_world_size: tuple[int, ...]
    ) -> None:
        """Fill the fields of HSDP with what is given; collective over the world, where it is initialized."""
        if self.is_hsdp_setup():
            raise StateError(f"HSDP with replicas of {self.replica_local_size} is set up; call unset_hsdp() first")
        shard, size, replica = replica_local_rank, replica_local_size, replica_rank
        topology = _check_replicas(
            shard, size=size, replica=replica, counts=replica_world_size, place=self._place(), inside=self._topology
        )
        with setup_transaction(self, "set_hsdp"):
            self._topology = topology
            self.replica_local_rank = shard
            self.replica_local_size = size
            self.replica_rank = replica
            self.replica_world_size = topology.replica_counts

    def unset_hsdp(self) -> None:
        """Restore what was before :meth:`set_hsdp`, if it was called, and destroy its groups.

        Collective over the world, where it is initialized.

        :raises StateError: if HSDP belongs to a federation.
        """
        with _comparison("states at unset_hsdp") as share:
            if self.is_federated_scaling_setup():
                raise StateError("HSDP belongs to the federation; call unset_federated_scaling() instead")
            share("HSDP" if self.is_hsdp_setup() else "no HSDP")
        if self.is_hsdp_setup():
            rollback(self)

    # Federated scaling ------------------------------------------------------------------------------------------------

    def set_federated_scaling(
        self,
        federated_group_size: tuple[int, ...] | int | str,
        hsdp: int | None = None,
        cell_shape: Mapping[str, int] | None = None,
    ) -> None:
        """Cut the world into federated groups that average their models from time to time.

        Collective over the world: every rank makes a group of its cell, with HSDP also of its replica and its shard,
        and one of the senders of its shard (of itself where it sends nothing). It replaces a global FSDP, or a global
        HSDP where ``hsdp`` or ``cell_shape`` is given, until :meth:`unset_federated_scaling`.

        :param federated_group_size: Ranks of each federated group, in rank order, which sum to the world's size; one
            number means equal groups of that size. A text such as ``4,4`` is read as ``XFFL_FEDERATED`` is.
        :param hsdp: Size of an HSDP replica, a divisor of every group's size; None means that each group is one
            replica, sharded with FSDP.
        :param cell_shape: Sizes of the axes of the mesh inside a group, outermost first, such as ``{"pp": 2,
            "dp_replicate": -1, "dp_shard": 2, "tp": 2}``. Replicas are counted along ``dp_replicate``, where -1 stands
            for what a group's size leaves; a rank's shard is its place along all other axes. It says the size of a
            replica, so ``hsdp`` may be left out.
        :raises TopologyError: if groups, replicas or axes of these sizes do not fill the world.
        :raises StateError: if a federation is set up, or a global HSDP that this does not replace, or torch.distributed
            is not initialized.
        """
        with _comparison("arguments of set_federated_scaling") as share:
            self._check_order("set_federated_scaling", replaces_hsdp=(hsdp, cell_shape) != (None, None))
            if federated_group_size is None:
                raise TopologyError("federated sizes None name no cell; give the ranks of each, or call set_fsdp()")
            sizes = read_federation(federated_group_size, "federated_group_size")
            if isinstance(sizes, str):
                raise ConfigError(
                    f"federated_group_size {sizes!r} is a rule, which finds cells by the hosts of all ranks; give it "
                    "to xffl.session(federated=...), or give sizes like 4,4 here"
                )
            topology = Topology(self._place()[1], sizes, read_replica_size(hsdp, "hsdp"), cell_shape)
            replicas = f"hsdp={topology.replica_size}{_shape_text(topology)}"
            share(f"federated sizes {topology.sizes}, {replicas}, {self.handle_count} streams")
            is_checked = checks_world() and topology.cells > 1
        with setup_transaction(self, "set_federated_scaling") as setup:
            self._topology = topology
            if topology.replica_size is not None:
                self._partial_hsdp_setup(topology.replica_size)
            if min(topology.sizes) == max(topology.sizes):
                self._set_symmetric_federated_scaling(topology.sizes)
            else:
                self._set_asymmetric_federated_scaling(topology.sizes)
        if is_checked:
            from xffl.distributed.failures.world_check import WorldCheck

            setup.world_check = WorldCheck(topology.cells, is_speaker=self.rank == 0)

    def _set_symmetric_federated_scaling(self, federated_group_size: tuple[int, ...] | int) -> None:
        """Create the process groups of federated groups of one size: a step of :meth:`set_federated_scaling`."""
        sizes = self._federated_topology(federated_group_size).sizes
        if min(sizes) != max(sizes):
            raise TopologyError(f"federated sizes {sizes} differ; call set_federated_scaling for any sizes")
        self._set_asymmetric_federated_scaling(sizes)

    def _set_asymmetric_federated_scaling(self, federated_group_size: tuple[int, ...] | int) -> None:
        """Create the process groups of federated groups of any sizes: a step of :meth:`set_federated_scaling`."""
        topology = self._federated_topology(federated_group_size)
        rank, _ = self._initialized_place("set_federated_scaling")
        at = topology.coordinates(rank)
        self._topology = topology
        self.federated_rank = at.cell
        self.federated_world_size = topology.cells
        self.federated_local_rank = at.local_rank
        self.federated_local_size = topology.sizes
        self._set_rank_role()
        groups = make_groups(
            self._create_group, topology=topology, rank=rank, kinds=ALL_KINDS, handles=self.handle_count
        )
        (self.federation,) = groups["federation"] or (None,)
        self.replica_group = groups.get("replica")
        self.federated_group = groups["federated"]
        mesh = cell_mesh(topology, rank, groups, self._device_kind())
        self.fsdp_mesh, self.hsdp_mesh = (None, mesh) if topology.is_hsdp else (mesh, None)

    def _federated_topology(self, sizes: tuple[int, ...] | int) -> Topology:
        """Return the topology of a federation that is being set up; the replicas' size stands in the state."""
        if not self._setups or not self._setups[-1].is_open:
            raise StateError("this is a step of set_federated_scaling; call that instead")
        shape = None if self._topology is None else self._topology.cell_shape
        return Topology(self._place()[1], sizes, self.replica_local_size, shape)

    def _set_rank_role(self) -> None:
        """Set whether this rank sends its shard to other cells, or else from whom it receives the average."""
        if not self.is_federated_scaling_setup():
            raise StateError("senders are between federated groups only; call set_federated_scaling first")
        at = self.topology.coordinates(self._place()[0])
        self.is_sender = at.is_sender
        self.receive_from = at.receive_from

    def _get_communicating_processes(self, federated_rank: int) -> tuple[int, ...]:
        """Return the senders of a federated group, by shard."""
        return self.topology.senders(federated_rank)

    def unset_federated_scaling(self) -> None:
        """Restore what was before :meth:`set_federated_scaling`, if it was called, and destroy the groups made for it.

        Collective over the world, where it is initialized.
        """
        with _comparison("states at unset_federated_scaling") as share:
            share("a federation" if self.is_federated_scaling_setup() else "no federation")
        if self.is_federated_scaling_setup():
            rollback(self)

    # Internals -------------------------------------------------------------------------------------------------------

    def _place(self) -> tuple[int, int]:
        """Return the rank and the world's size."""
        if self.rank is None or self.world_size is None:
            raise StateError("the state does not know its rank and world yet; call set_global first")
        return self.rank, self.world_size

    def _initialized_place(self, call: str) -> tuple[int, int]:
        """Return the rank and the world's size, of a world that is initialized."""
        place = self._place()
        if not dist.is_initialized():
            raise StateError(f"{call}: torch.distributed is not initialized; use xffl.session() or init_process_group")
        _check_world(place)
        return place

    def _create_group(self, ranks: tuple[int, ...], group_desc: str) -> dist.ProcessGroup:
        """Make a group that goes with the newest set-up."""
        group = self.create_process_group(ranks, group_desc)
        if self._setups:
            self._setups[-1].groups.append(group)
        return group

    def _device_kind(self) -> str:
        return "cpu" if self.device_type is None else self.device_type.type

    def _check_order(self, call: str, replaces_hsdp: bool = False) -> None:
        """Raise where a set-up that makes groups cannot follow those that stand."""
        self._initialized_place(call)
        if self.is_federated_scaling_setup():
            raise StateError(
                f"{call} cannot follow set_federated_scaling({self.federated_local_size}); call "
                "unset_federated_scaling() first"
            )
        if self.is_hsdp_setup() and not replaces_hsdp:
            raise StateError(f"{call} cannot follow set_hsdp({self.replica_local_size}); call unset_hsdp() first")


@dataclass(eq=False)
class Setup:
    """One set-up: the call that made it, the fields to put back and the groups to destroy with it."""

    call: str
    before: dict[str, Any]
    world: dist.ProcessGroup | None
    groups: list[dist.ProcessGroup] = field(default_factory=list)
    number: int = 0
    """Set-ups that this rank has made in its world until now; all ranks make them together"""
    is_open: bool = True
    """Whether the set-up is still being made; its steps belong to it."""
    world_check: WorldCheck | None = None
    """What reports collectives over all cells, where this is asked for"""

    def destroy(self) -> None:
        """Destroy the groups, newest first. Nothing moves; groups of a world that is gone went with it."""
        if self.world is not None and self.world is _world():
            while self.groups:
                destroy_group(self.groups.pop())


@contextmanager
def setup_transaction(state: DistributedState, call: str) -> Iterator[Setup]:
    """Put a set-up on top of a state while the block fills its fields; within another set-up, be a step of that.

    The block gets the set-up.

    Collective over the world: all ranks have it, or all raise the same error and are as they were. Where making a group
    failed (a network that broke, not an argument), its half may stay behind in the store: make a new world then.
    """
    setups = state._setups
    if setups and setups[-1].is_open:
        yield setups[-1]
        return
    setup = Setup(call, {name: getattr(state, name) for name in _SETUP_FIELDS}, _world())
    for name in _SETUP_FIELDS:
        setattr(state, name, None)
    setups.append(setup)
    try:
        # The comparison comes after the last group is made, so that no rank uses one that another has not made yet.
        with run_on_all_ranks(
            f"outcomes of {call}",
            convert=lambda wrong: StateError(f"{call} could not make its process groups: {wrong}"),
        ) as share:
            yield setup
            share("done")
        setup.number = _count_setup()
        setup.is_open = False
    except BaseException:
        rollback(state)
        raise


def _count_setup() -> int:
    """Count a set-up of this rank in the store of the world, and return which one it is; local."""
    world = _world()
    if world is None or dist.get_backend() == "fake":  # a world that only looks like one has no store
        return 0
    return int(world.get_group_store().add(f"xffl_setups/{dist.get_rank()}", 1))


def rollback(state: DistributedState, *, destroys: bool = True) -> None:
    """Put back the fields of before the newest set-up, and destroy its groups. Nothing moves."""
    setup = state._setups.pop()
    for name, value in setup.before.items():
        setattr(state, name, value)
    if setup.world_check is not None:
        setup.world_check.remove()
    if destroys:  # NCCL waits until all that a group carries has ended; a rank that leaves by itself must not
        setup.destroy()


def _comparison(what: str) -> AbstractContextManager[Callable[[object], None]]:
    """Let the ranks compare what the block shares, or raise alike what a check in it raised; collective over the world.

    An argument of a kind that no check expects is a :class:`ConfigError`, too.
    """
    return run_on_all_ranks(
        what, convert=lambda wrong: ConfigError(f"{what} cannot be read: {wrong}"), kinds=(TypeError, ValueError)
    )


def _world() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None


def _check_place(what: str, place: object, size_name: str, size: object) -> tuple[int, int]:
    """Return a place counted from 0 and the number of places."""
    places = integer(size_name, size, error=TopologyError)
    return integer(what, place, 0, places - 1, hint=f"{size_name} is {places}", error=TopologyError), places


def _check_world(place: tuple[int, int]) -> None:
    """Raise where torch.distributed is initialized for another rank or world than the state."""
    if dist.is_initialized() and place != (dist.get_rank(), dist.get_world_size()):
        raise TopologyError(
            f"rank {place[0]} of {place[1]} is not what torch.distributed was initialized with, rank {dist.get_rank()} "
            f"of {dist.get_world_size()}; give set_global the same"
        )


def _check_link(link: str) -> None:
    """Raise where torch.distributed is initialized with NCCL, which may cross cells then."""
    if dist.is_initialized() and "nccl" in (config := dist.get_backend_config()):
        raise ConfigError(
            f"link_backend {link!r} keeps NCCL inside cells, but torch.distributed was initialized with {config!r}; "
            f"initialize it with {link!r}"
        )


def _check_node(local_size: int | None, nodes: int | None, world_size: int | None) -> None:
    """Raise where nodes of at least one rank each cannot make up the world."""
    if local_size is None or nodes is None or world_size is None:
        return
    if local_size > world_size - (nodes - 1) or (nodes == 1 and local_size != world_size):
        raise TopologyError(
            f"a node of {local_size} ranks among {nodes} nodes does not fit the world of {world_size} ranks; give "
            "sizes where every node holds at least one rank and all together hold the world"
        )


def _check_ranks(ranks: object, rank: int, world_size: int) -> tuple[int, ...]:
    """Return the ranks of a group that holds this rank."""
    if isinstance(ranks, torch.Tensor):
        ranks = ranks.flatten().tolist()
    if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Iterable):
        raise TopologyError(f"ranks must be a tuple of ranks, got {ranks!r}")
    members = tuple(integer("rank", member, 0, world_size - 1, error=TopologyError) for member in ranks)
    if len(set(members)) != len(members):
        raise TopologyError(f"ranks {members} name a rank twice; give each once")
    if rank not in members:
        raise TopologyError(f"rank {rank} is none of the group's ranks {members}; only members make a group")
    return members


def _check_replicas(
    shard: object, size: object, replica: object, counts: object, place: tuple[int, int], inside: Topology | None
) -> Topology:
    """Return the topology of cells of replicas of ``size`` ranks, in which this rank has its place."""
    rank, world_size = place
    knob = "give the replicas of each federated group, (n,) without federation"
    if isinstance(counts, (str, bytes)) or not isinstance(counts, Sequence) or not counts:
        raise TopologyError(f"replica_world_size must be a tuple of integers, got {counts!r}; {knob}")
    numbers = [_check_place("replica 0", 0, "replica_world_size", count)[1] for count in counts]
    shard, ranks = _check_place("replica_local_rank", shard, "replica_local_size", size)
    if sum(numbers) * ranks != world_size:
        raise TopologyError(
            f"{numbers} replicas of {ranks} need {sum(numbers) * ranks} ranks, but the world has {world_size}"
        )
    shape = None if inside is None else inside.cell_shape
    topology = Topology(world_size, tuple(number * ranks for number in numbers), ranks, shape)
    at = topology.coordinates(rank)
    if (at.shard, at.replica) != (shard, replica):
        raise TopologyError(
            f"replica_local_rank {shard} and replica_rank {replica!r} are not those of rank {rank}, which are "
            f"{at.shard} and {at.replica}; give those, or call set_hsdp({ranks})"
        )
    return topology


def _shape_text(topology: Topology) -> str:
    return "" if topology.cell_shape is None else f", cell_shape={dict(topology.cell_shape)}"


def _replica_size(hsdp: object) -> int:
    hint = "give the ranks that hold one copy of the model"
    return integer("replica size (hsdp)", read_replica_size(hsdp, "hsdp"), hint=hint, error=TopologyError)


def place_of(state: DistributedState) -> tuple[int, int]:
    """Return the rank and the world's size of a state; StateError where it does not know them yet; local."""
    return state._place()


def make_state(timeouts: Timeouts) -> DistributedState:
    """Return a state of which nothing is set yet, for a world with these timeouts; local."""
    state = DistributedState()
    state._timeouts = timeouts
    return state


def set_cell_world(state: DistributedState, world: CellWorld) -> None:
    """Say that a state's world is one cell, and that the other cells are other worlds; local.

    :param state: The rank's state.
    :param world: The place of its world among all cells.
    """
    state._cell_world = world


def cell_world_of(state: DistributedState) -> CellWorld | None:
    """Return what :func:`set_cell_world` was given; ``None`` where this job has all cells in one world; local."""
    return state._cell_world


def leave_job(state: DistributedState) -> None:
    """Close this rank's connections to the other cells of its job, if its cell is isolated; local.

    :param state: The rank's state.
    """
    if state._cell_world is not None:
        state._cell_world = state._cell_world.left()


def take_off_setups(state: DistributedState, *, destroys: bool) -> None:
    """Take all set-ups off a state. Nothing moves, so no other rank may be using their groups any more."""
    while state._setups:
        rollback(state, destroys=destroys)


def set_data_place(state: DistributedState, place: DataPlace | None) -> None:
    """Say where a rank's data lies, in place of what follows from the state; local.

    A world of replica groups does so: they are jobs of their own, which share the samples of one cell.

    :param state: The rank's state.
    :param place: The place among all ranks that samples are dealt out to; ``None`` takes it back.
    """
    state._data_place = place


def create_device_mesh(mesh_shape: tuple[int, ...]) -> torch.Tensor:
    """Create a Tensor of distributed process ranks with the specified dimensions.

    :param mesh_shape: Dimensions of the mesh, each at least 1.
    :return: Tensor of ranks, counted from 0 along the last dimension first, in the shape of the mesh.
    :raises TopologyError: if there is no dimension, or one is less than 1.
    """
    knob = "give the number of ranks along each dimension"
    asked: object = mesh_shape
    if isinstance(asked, str) or not isinstance(asked, Sequence) or not asked:
        raise TopologyError(f"mesh shape must be a tuple of integers, got {asked!r}; {knob}")
    shape = [integer("mesh dimension", size, hint=knob, error=TopologyError) for size in asked]
    return torch.arange(prod(shape)).reshape(shape)
