"""Scopes and process groups of rounds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from xffl.aggregation.engine.holder_groups import make_holder_groups
from xffl.compat.gloo_connections import is_lazy
from xffl.distributed.agreement.consistency import (
    cell_gpu,
    connect,
    control_device,
    home_device,
    run_on_all_ranks,
    sends_from_gpu,
    transfer_device,
)
from xffl.distributed.collectives import Group
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.groups import Create, Groups
from xffl.distributed.separate_groups import make_separate_groups
from xffl.distributed.several_worlds.cross_world import CrossWorldGroup
from xffl.topology import Topology

if TYPE_CHECKING:
    from xffl.aggregation.engine.arena import Arena
    from xffl.aggregation.engine.decision.consensus import RoundCoordinator
    from xffl.aggregation.engine.exchange import Exchange
    from xffl.aggregation.engine.setup import Comparison
    from xffl.aggregation.engine.stages.first_round import FirstRound
    from xffl.aggregation.options import Options

__all__ = [
    "RoundGroups",
    "RoundScope",
    "make_creator",
    "select_groups",
]


@dataclass(frozen=True)
class RoundScope:
    """A run of ranks that averages by itself: the whole world, a part of it such as one facility, or several worlds.

    Where cells are worlds of their own, only the ranks of this rank's own cell are in its world: ``first`` is negative
    in all cells but the first.
    """

    state: DistributedState  # the state that describes the world
    topology: Topology  # the cells of this run; their ranks are counted from first
    first: int = 0  # the rank of the world that they are counted from
    # groups that were made for it, a world among them where it is a part; None: the state's
    groups: Groups | None = None
    own: tuple[dist.ProcessGroup, ...] = ()  # all of these groups, placeholders too
    cross_world: CrossWorldGroup | None = None  # the group of all its ranks, where cells are worlds of their own
    # groups of the ranks of the cell that hold the same part of some tensor, by shards; None: made where needed
    holders: Mapping[tuple[int, ...], dist.ProcessGroup] | None = None
    arena: Arena | None = None  # memory of a scope before, which its rounds use again
    goes_on: bool = False  # what was agreed on last is told or taken over afterwards, instead of read from the model
    # leaves what was opened for it alone, when its aggregator is closed; collective over all its ranks
    leave: Callable[[], None] | None = None
    # makes what compares the ranks before their rounds, of their group; None: Comparison
    compare: Callable[[Group | None], Comparison] | None = None
    # makes what compares the ranks' values in their first round; None: FirstRound
    make_first_round: Callable[..., FirstRound] | None = None
    # makes what votes on its rounds; None: RoundCoordinator
    coordinate: Callable[[Exchange, RoundScope, Options, int], RoundCoordinator] | None = None

    @property
    def rank(self) -> int:
        """This rank, as the topology counts."""
        return dist.get_rank() - self.first

    @property
    def number(self) -> int:
        """What tells this rank from all others of the job, for noise that no two of them share."""
        isolated = self.state.isolated
        return dist.get_rank() if isolated is None else isolated.rank

    @property
    def is_elastic(self) -> bool:
        """Whether cells may come and go, in mid-training, too."""
        return self.coordinate is not None

    @property
    def device(self) -> torch.device:
        """Where weights lie while they cross from cell to cell."""
        return torch.device("cpu") if self.cross_world is not None else transfer_device(self.state)

    @property
    def home_device(self) -> torch.device | None:
        """The GPU that results lie on while they are handed round inside a cell, where they cross in host memory."""
        return home_device(self.state) if self.cross_world is None else cell_gpu(self.state)

    @property
    def gpu(self) -> torch.device | None:
        """The GPU that rounds send from, if only inside cells."""
        return self.device if self.device.type == "cuda" else self.home_device

    @property
    def world(self) -> Group | None:
        """The group of all its ranks."""
        if self.cross_world is not None:
            return self.cross_world
        handles = None if self.groups is None else self.groups.get("world")
        return handles[0] if handles else dist.group.WORLD


@dataclass(eq=False)
class RoundGroups:
    """The process groups that a rank's rounds use.

    An exchange that fails on GPUs leaves messages under way in them; :meth:`abort` ends those, and :meth:`renew` puts
    other groups in their place.
    """

    world: Group | None  # the group of all ranks, which votes
    # the groups in which senders swap shards, bucket by bucket in turn: NCCL works off those of a group one after
    # the other, each with its latency. None on a rank that sends nothing
    across: tuple[Group | None, ...]
    replica: dist.ProcessGroup | None  # the ranks of the cell that hold this rank's shard; None where there is one
    cell: dist.ProcessGroup | None  # all ranks of the cell; None where there is one
    multi_rail: bool = False  # whether the replicas of a shard take turns in sending its buckets
    own: tuple[dist.ProcessGroup, ...] = ()  # groups that were made for this alone, placeholders too
    first: int = 0  # the rank of the world that the topology's ranks are counted from
    # by the shards that hold the same elements, where they are several but not all, the ranks of the cell that hold
    # one of these
    holders: Mapping[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    # makes groups like these; collective over the world. None where others belong to more than this
    make: Callable[[], RoundGroups] | None = None
    is_aborted: bool = False

    def abort(self) -> None:
        """End what was given to the groups that were made for this, so that nothing waits for it; local."""
        for group in self.own:
            group.abort()
        self.is_aborted = True

    def close_connections(self, *, is_with_vote: bool) -> None:
        """Close this rank's connections, so that no rank waits for it in these groups; local.

        Without ``is_with_vote`` only where values are exchanged and nobody votes.
        """
        from xffl.distributed.failures.closed_connections import close_connections

        for group in {*self.across, self.replica, self.cell, *self.holders.values(), self.world}:
            if group is not None and (is_with_vote or group is not self.world):
                close_connections(group)

    def renew(self) -> None:
        """Make groups in the place of those that were aborted; collective over the world."""
        assert self.make is not None, "asked for where there is one"
        made = self.make()
        for name in ("world", "across", "replica", "cell", "own", "holders"):
            setattr(self, name, getattr(made, name))
        self.is_aborted = False


def select_groups(
    scope: RoundScope, *, multi_rail: bool, is_own: bool, holders: Collection[tuple[int, ...]] = ()
) -> RoundGroups:
    """Pick the groups of a round, without those of one rank; collective over the world: NCCL connects each of them."""
    state, groups, world = scope.state, scope.groups, scope.world
    across: tuple[Group | None, ...] = ()
    replica = cell = None
    made: list[dist.ProcessGroup] = []
    device, gpu = scope.device, scope.gpu
    if (is_own or gpu is not None) and groups is None:
        create = make_creator(state, made, scope.first)
        groups = make_separate_groups(
            create,
            topology=scope.topology,
            rank=scope.rank,
            timeout_s=state.timeouts.session_s,
            senders=0 if multi_rail or scope.topology.cells == 1 else state.handle_count,
        )
        made += groups["world"] or ()
        world = made[-1]
    if groups is not None:
        across = groups.get("federated") or ()
        replica, cell = (handles[0] if (handles := groups.get(kind)) else None for kind in ("replica", "federation"))
    elif state.is_federated_scaling_setup():
        across = state.federated_group or ()
        replica = state.replica_group[0] if state.replica_group else None
        cell = state.federation
    else:
        replica = state.hsdp_mesh.get_group(0) if state.hsdp_mesh is not None else None
        assert not isinstance(world, CrossWorldGroup), "a scope over several worlds has groups"
        cell = world
    replica, cell = (None if group is None or group.size() == 1 else group for group in (replica, cell))
    shared = scope.holders or {}
    if scope.holders is None and holders:
        create = make_creator(state, made, scope.first)
        shared = make_holder_groups(create, topology=scope.topology, rank=scope.rank, holders=holders)
    if multi_rail or scope.cross_world is not None:
        across = (world,)
    if multi_rail and scope.cross_world is None and is_lazy(dist.get_world_size()):
        from xffl.distributed.startup.open_files import check_mesh

        # The world's group has the connections of collectives alone, and senders start messages before their peers do.
        with run_on_all_ranks("open files of rails", group=world):
            check_mesh(scope.rank, scope.topology.world_size)
        rails = make_creator(state, made, scope.first)
        across = (rails(tuple(range(scope.topology.world_size)), "xffl_federated_rails"),)
    votes = () if control_device(world).type == "cpu" else (world,)
    # In a round some ranks may not take part, and one behind local steps would connect beside what these send.
    home = (replica, cell, *shared.values())
    # A cell of an elastic federation has connected its groups when it made them: here a rank may be lost.
    if gpu is not None and device != gpu and not scope.is_elastic:
        connect([group for group in home if group is not None and sends_from_gpu(group)], gpu)
    connect((*across, *home, *votes), device)
    make = partial(select_groups, scope, multi_rail=multi_rail, is_own=is_own, holders=holders)
    own = (*made, *scope.own)
    return RoundGroups(
        world,
        across=across,
        replica=replica,
        cell=cell,
        multi_rail=multi_rail,
        own=own,
        first=scope.first,
        holders=shared,
        make=None if scope.own else make,
    )


def make_creator(state: DistributedState, made: list[dist.ProcessGroup], first: int) -> Create:
    """Return what makes a group of ranks counted from ``first``, and notes it."""

    def create(ranks: tuple[int, ...], name: str) -> dist.ProcessGroup:
        made.append(state.create_process_group(tuple(first + rank for rank in ranks), name))
        return made[-1]

    return create
