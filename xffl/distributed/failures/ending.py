"""What a rank does about the error that ends it: it tells the other ranks, and the user."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType

import torch.distributed as dist

from xffl.cluster.environment import is_isolated
from xffl.cluster.launch.failure import (
    describe_failure,
    is_noted_alike,
    is_of_all,
    is_only_lost_peer,
    leave_together,
    line_of,
    note_failure,
)
from xffl.distributed.failures.first_failure import JoinedWorld, tell_failure
from xffl.errors import XfflError
from xffl.topology import Topology

__all__ = ["Hook", "note_in_world", "show"]

_ASK_S = 2.0  # how long a rank that fails asks the others' store
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
"""What Python calls with an uncaught exception."""


def note_in_world(error: BaseException, world: JoinedWorld | None, topology: Topology | None) -> None:
    """Note that an error ends this rank, and ask the others about it, for two seconds at most; local.

    :param error: The error.
    :param world: The world of this process, or the last one; ``None`` where there is none, or no other rank.
    :param topology: How the world is spread, where it does not tell.
    """
    note_failure(error)
    is_isolated_rank = dist.is_initialized() and is_isolated()
    if is_noted_alike(error) and not is_isolated_rank:
        return
    if is_isolated_rank:  # what the ranks of a cell raise alike, other cells have not heard of
        from xffl.distributed.failures.isolated_job import find_job

        world = find_job(_ASK_S) or world
    if world is None:
        return
    if world.topology is None:
        world = replace(world, topology=topology)
    # A thread of its own: a store whose host has stopped would keep the caller, and so its end, waiting.
    asking = threading.Thread(target=tell_failure, args=[error, world], daemon=True)
    asking.start()
    asking.join(_ASK_S)


def show(error: XfflError, show_traceback: Callable[[], object]) -> None:
    """Show an error of xffl that was noted: by one rank of those that raise it, in one line; local.

    :param error: The error.
    :param show_traceback: Shows it as it would be shown otherwise.
    """
    only_lost = is_only_lost_peer(error)
    if not is_noted_alike(error) and not only_lost:
        show_traceback()
        return
    record = describe_failure(error)
    line = line_of(error, record)
    if line is not None:
        if not only_lost and (record.has_cause or not is_of_all(error)):
            show_traceback()
        print(line, file=sys.stderr, flush=True)
    leave_together(error)
