"""When gloo connects the ranks of a group: all of them to all when it is made, or two of them at their first message.

In a mesh each rank stores 154 + 8 N bytes for a group of N ranks, reads that of all others, and keeps N - 1 sockets:
at 4,096 ranks rank 0's store hands out 552 GB. torch 2.11 to 2.13 connect lazily if ``TORCH_GLOO_LAZY_INIT`` says so,
which they read for each group that they make, and they take no option of a group in its place:
https://github.com/pytorch/pytorch/blob/v2.11.0/torch/csrc/distributed/c10d/ProcessGroupGloo.cpp
(``getDefaultGlooLazyInit``).

Lazy connections are worse in two ways, so they are for large groups, and opened when these are made. One side of a
pair waits for the other to connect: it notices that this one is lost only after five times the group's timeout
(``Pair::waitUntilConnected``), and not at once; and a message that is only to be started waits, too. In groups that run
collectives alone a barrier opens all connections that gloo's other collectives use, but those of gathers to one rank
and of all-to-all. In groups in which single ranks message each other all pairs are connected one after the other: a
rank then reads 154 bytes of each other one, and not 154 + 8 N. The votes of rounds message single ranks of the world,
too: an aggregator opens these connections when it is made.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from xffl.compat.datasets import ENVIRON

__all__ = ["LAZY_VARIABLE", "MESH_LIMIT", "MESH_LIMIT_OF_MANY", "connect_lazily", "is_lazy"]

LAZY_VARIABLE = "TORCH_GLOO_LAZY_INIT"
"""torch's own variable."""
MESH_LIMIT = 256
"""Ranks of the largest world whose groups are meshes: 66,000 requests of rank 0's store, and 144 MB from it."""
MESH_LIMIT_OF_MANY = 32
"""Ranks of the largest group that is a mesh in larger worlds, where there are many such groups."""

_TRUE = ("1", "y", "yes", "t", "true")
"""What torch takes for yes, in capitals, too."""


def is_lazy(size: int, environ: Mapping[str, str] = ENVIRON, *, world_size: int | None = None) -> bool:
    """Tell whether a group of so many ranks is to connect lazily; local.

    A value of the user's own decides for all sizes.

    :param size: Ranks of the group.
    :param environ: The environment.
    :param world_size: Ranks of the world that it is a part of; ``None``: it is the world.
    :return: Whether it is.
    """
    asked = None if environ is ENVIRON and _blocks.are_open else environ.get(LAZY_VARIABLE)
    if asked is not None:
        return asked.lower() in _TRUE
    # Connections over TLS, and those of other systems than Linux, refuse it.
    is_possible = sys.platform == "linux" and environ.get("GLOO_DEVICE_TRANSPORT", "TCP").upper() == "TCP"
    is_of_many = (size if world_size is None else world_size) > MESH_LIMIT
    return is_possible and is_of_many and size > min(MESH_LIMIT, MESH_LIMIT_OF_MANY)


class _Blocks:
    """Blocks of threads of this process that need the variable; it is process-wide, as torch's variable is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0

    @property
    def are_open(self) -> bool:
        """Whether the variable is what a block has set."""
        return self._open > 0

    def enter(self) -> bool:
        """Set the variable unless the user has; tell whether this block has to be left."""
        with self._lock:
            if not self._open and LAZY_VARIABLE in os.environ:
                return False
            self._open += 1
            os.environ[LAZY_VARIABLE] = "1"
            return True

    def leave(self) -> None:
        """Take the variable away where no other block needs it."""
        with self._lock:
            self._open -= 1
            if not self._open:
                os.environ.pop(LAZY_VARIABLE, None)


_blocks = _Blocks()
"""State of the process: the last block that is left takes the variable away."""


@contextmanager
def connect_lazily(asked: bool) -> Iterator[None]:
    """Let the groups that are made in the block connect lazily if that is asked for; a value of the user's own stays.

    Several threads may be in such blocks at once. A lock around them would let ranks wait for each other whose threads
    make their groups in unlike orders.

    :param asked: Whether it is.
    :yield: Nothing.
    """
    if not asked or not _blocks.enter():
        yield
        return
    try:
        yield
    finally:
        _blocks.leave()
