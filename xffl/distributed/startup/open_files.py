"""How many files a process may open, and how many the connections of a session need."""

from __future__ import annotations

import math
import resource
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from xffl.compat.gloo_connections import is_lazy
from xffl.compat.sockets import count_open_files
from xffl.costs import neighbours_of_barrier, neighbours_of_votes
from xffl.errors import ConfigError
from xffl.topology import Topology

__all__ = ["FileLimit", "connections_of_group", "connections_of_votes", "files_of_groups", "files_of_store"]

GROUP_FILES = 4
"""What a gloo group of one rank opens: a listening socket, and what wakes its thread (torch 2.13)."""
STORE_FILES = 11
"""What rank 0's store opens before others connect to it (torch 2.13)."""


@dataclass(frozen=True)
class FileLimit:
    """The open files of this process before a session, and how many there may be.

    :param used: How many are open.
    :param most: How many may be; ``inf`` without a limit.
    """

    used: int
    most: float

    @classmethod
    def raised(cls) -> FileLimit:
        """Raise this process's limit as far as it may, for the processes that it starts, too; local."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            with suppress(OSError, ValueError):  # macOS has a lower one beside it
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
                soft = hard
        return cls(count_open_files(), math.inf if soft == resource.RLIM_INFINITY else soft)

    def check(self, rank: int, world_size: int, files: int) -> None:
        """Raise ConfigError if a rank that opens so many files in a session cannot; local."""
        if (needed := self.used + files) > self.most:
            raise ConfigError(
                f"rank {rank} of {world_size} needs {needed} open files for its connections, but may have {self.most}, "
                f"the hard limit; raise that where its host starts jobs (ulimit -Hn {needed}, LimitNOFILE of slurmd or "
                "of the container's service, limits.conf), or start fewer ranks"
            )


def files_of_store(rank: int, world_size: int) -> int:
    """Return how many files the store of a world needs in one of its ranks."""
    return STORE_FILES + world_size - 1 if rank == 0 else 1


def files_of_groups(sizes: Iterable[int], *, has_messages: bool = False) -> int:
    """Return how many files gloo groups of so many ranks need; see :func:`xffl.distributed.groups.connected`."""
    return sum(GROUP_FILES + connections_of_group(size, has_messages=has_messages) for size in sizes)


def connections_of_group(size: int, *, has_messages: bool = False) -> int:
    """Return to how many others gloo connects a rank of a group of so many ranks."""
    if has_messages or not is_lazy(size):
        return size - 1
    return len(neighbours_of_barrier(0, size))


def connections_of_votes(topology: Topology, rank: int) -> int:
    """Return how many connections the votes of rounds open beside those of the world's barrier: none in a mesh."""
    if not is_lazy(topology.world_size):
        return 0
    return len(neighbours_of_votes(topology, rank) - neighbours_of_barrier(rank, topology.world_size))
