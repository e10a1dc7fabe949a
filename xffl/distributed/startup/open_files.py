"""How many files the connections of a session need, where a process may not open many more."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from xffl.cluster.environment import ProcessEnvironment
from xffl.cluster.sizes import Federation
from xffl.compat.gloo_connections import is_lazy
from xffl.compat.sockets import count_open_files
from xffl.costs import neighbours_of_barrier, peers_in_votes
from xffl.distributed.failures.world_store import connected_at_once
from xffl.distributed.groups import STREAMED, without_host_side
from xffl.distributed.startup.file_limit import raise_file_limit
from xffl.distributed.startup.stores import has_agents_store
from xffl.errors import ConfigError, XfflError
from xffl.topology import Topology

__all__ = [
    "FileLimit",
    "SessionFiles",
    "check_mesh",
    "connections_of_group",
    "connections_of_votes",
    "files_of_groups",
    "files_of_store",
    "files_of_waiting",
]

GROUP_FILES = 4
"""What a gloo group of one rank opens: a listening socket, and what wakes its thread (torch 2.13)."""
STORE_FILES = 11
"""What rank 0's store opens before others connect to it (torch 2.13)."""
SECOND_CONNECTIONS = 2
"""To the store, which a rank has at most at one time beside that of its world: one looks for ranks that are lost while
a group connects (:mod:`xffl.distributed.failures.lost_in_connecting`), of which one is made at a time, and one has the
notes of a wait (:class:`xffl.distributed.failures.world_store.WaitingNotes`). Each is closed after its request."""
LOOKED_UP_FILES = 1
"""What torch opens beside a connection to the store while it is made: it looks up a name for the address, to write it
into its messages, in ``/etc/hosts`` or at a name server (torch 2.13)."""
TRIED_CONNECTIONS = 1
"""Those that a rank has closed, and rank 0 has not noticed yet: ranks that join try at one time whether the store is
there (16 ranks over loopback: 14 of them were open at once)."""


@dataclass(frozen=True)
class FileLimit:
    """The open files of this process before a session, and how many there may be.

    :param used: How many are open.
    :param most: How many may be; ``inf`` without a limit.
    """

    used: int
    most: float

    @classmethod
    def now(cls, most: float) -> FileLimit:
        """Count what this process has open; local."""
        return cls(count_open_files(), most)

    def check(self, rank: int, world_size: int, files: int, passing: int = 0) -> None:
        """Raise ConfigError if a rank that opens so many files in a session cannot; local.

        :param rank: The rank.
        :param world_size: How many ranks there are.
        :param files: How many it certainly opens.
        :param passing: How many more it may have for a moment, where others are late: a line says if they do not fit.
        """
        where = "where its host starts jobs (ulimit -Hn {}, LimitNOFILE of slurmd or of the container's service, "
        where += "limits.conf)"
        if (needed := self.used + files) > self.most:
            raise ConfigError(
                f"rank {rank} of {world_size} needs {needed} open files for its connections, but may have {self.most}, "
                f"the hard limit; raise that {where.format(needed + passing)}, or start fewer ranks"
            )
        if (needed := needed + passing) > self.most:
            print(
                f"xffl: rank {rank} of {world_size} may have {self.most} open files, the hard limit, and needs up to "
                f"{needed} for a moment while ranks wait for a late one: then connections may fail, and the ranks end "
                f"by a timeout. Raise the limit {where.format(needed)}",
                file=sys.stderr,
                flush=True,
            )


@dataclass(frozen=True)
class SessionFiles:
    """The files that a session needs in this rank, of which few are left.

    :param limit: How many this process has open, and may have.
    :param place: The place of this process.
    :param store_files: How many a store of all ranks needs here.
    :param waiting_files: How many more connections to it may be open here for a moment while ranks wait for each other.
    """

    limit: FileLimit
    place: ProcessEnvironment
    store_files: int
    waiting_files: int
    joining_files: int = 0
    """How many connections of others that try whether the store is there may be open here while ranks join."""

    @classmethod
    def of(cls, place: ProcessEnvironment, most: float, *, is_own_address: bool) -> SessionFiles:
        """Count for a process that may open ``most``; ``is_own_address`` tells that it brings no store of an agent."""
        is_elsewhere = has_agents_store(place) and not is_own_address
        return cls(
            FileLimit.now(most),
            place,
            store_files=1 if is_elsewhere else files_of_store(place.rank, place.world_size),
            waiting_files=files_of_waiting(place.rank, place.world_size, is_served_here=not is_elsewhere),
            joining_files=0 if is_elsewhere or place.rank > 0 else TRIED_CONNECTIONS * place.world_size,
        )

    def check_store(self) -> None:
        """Raise ConfigError if the ranks cannot even meet; local."""
        self.limit.check(self.place.rank, self.place.world_size, self.store_files)

    def check_groups(
        self,
        federated: Federation | None,
        mesh: tuple[int | None, Mapping[str, int] | None],
        *,
        backend: str,
        link_backend: str | None,
        streams: int | None,
    ) -> None:
        """Raise ConfigError if this rank cannot open what it needs at once, while it joins or makes its groups; local.

        A line on standard error says where that is enough only as long as no rank is late.

        :param federated: The sizes of the cells, or a rule that finds them.
        :param mesh: The size of a replica, and the shape of a cell.
        :param backend: The backend inside the cells.
        :param link_backend: That between cells, where it is another one.
        :param streams: Handles of each group that has several.
        """
        place = self.place
        most = stores_and_world = self.store_files
        is_gloo = "gloo" in (link_backend or backend)
        if is_gloo:
            stores_and_world += files_of_groups([place.world_size])
        most += stores_and_world + self.joining_files  # the store of the meeting is still open
        if federated is not None and not isinstance(federated, str):
            # What is wrong with the sizes is raised when the ranks have compared what they ask for.
            with suppress(XfflError):
                made = 0
                topology = Topology(place.world_size, federated, *mesh)
                for group in topology.groups_of(place.rank):
                    is_crossing = group.kind == "federated"
                    of_group = link_backend if is_crossing and link_backend else backend
                    if "gloo" in of_group:
                        has_handles = group.kind in STREAMED and "gloo" in without_host_side(of_group)
                        handles = (streams or 1) if has_handles else 1
                        made += handles * files_of_groups(
                            [len(group.ranks)], place.world_size, has_messages=is_crossing
                        )
                if is_gloo:
                    made += connections_of_votes(topology, place.rank)
                most = max(most, stores_and_world + made)
        self.limit.check(place.rank, place.world_size, most, passing=self.waiting_files)


def check_mesh(rank: int, world_size: int) -> None:
    """Raise ConfigError if this rank cannot open a group in which it is connected to all others; local."""
    files = files_of_groups([world_size], has_messages=True)
    FileLimit.now(raise_file_limit()).check(rank, world_size, files)


def files_of_store(rank: int, world_size: int) -> int:
    """Return how many files the store of a world needs in one of its ranks."""
    return STORE_FILES + world_size - 1 if rank == 0 else 1


def files_of_waiting(rank: int, world_size: int, *, is_served_here: bool) -> int:
    """Return how many files connections to the store of a world add for a moment while ranks wait for each other.

    :param rank: The rank.
    :param world_size: How many ranks there are.
    :param is_served_here: Whether rank 0 serves the store, and not the process that has started it.
    :return: Its own, and on rank 0 the other end of those of the ranks that connect within a second, of both kinds.
    """
    own = SECOND_CONNECTIONS * (1 + LOOKED_UP_FILES)
    if rank > 0 or not is_served_here:
        return own
    return own + SECOND_CONNECTIONS * connected_at_once(world_size)


def files_of_groups(sizes: Iterable[int], world_size: int | None = None, *, has_messages: bool = False) -> int:
    """Return how many files gloo groups of so many ranks need; see :func:`xffl.distributed.groups.connect_ranks`."""
    return sum(GROUP_FILES + connections_of_group(size, world_size, has_messages=has_messages) for size in sizes)


def connections_of_group(size: int, world_size: int | None = None, *, has_messages: bool = False) -> int:
    """Return to how many others gloo connects a rank of a group of so many ranks."""
    if has_messages or not is_lazy(size, world_size=world_size):
        return size - 1
    return len(neighbours_of_barrier(0, size))


def connections_of_votes(topology: Topology, rank: int) -> int:
    """Return how many connections the votes of rounds open beside those of the world's barrier: none in a mesh."""
    if not is_lazy(topology.world_size):
        return 0
    return len(peers_in_votes(topology, rank).ranks - neighbours_of_barrier(rank, topology.world_size))
