"""Errors of xffl that end the ranks of a script which no ``xffl exec`` has started: told once, in one line.

Under plain ``srun``, ``mpirun`` or ``torchrun`` Python shows the traceback of an uncaught exception on every rank. For
an error that all ranks raise alike that is the same text once for each rank, so one of them tells it. An error that
only some ranks raise, or with which the script answers another one, keeps its traceback.
"""

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

__all__ = ["keep_store", "note_end", "tell_once"]

_ASK_S = 2.0  # how long a rank that fails asks the others' store
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def tell_once() -> None:
    """Let an uncaught error of xffl be told by one rank of those that raise it, in one line; local, for this process.

    Everything else is shown as before, by whatever was to show it. The exit code stays Python's.
    """
    if not isinstance(sys.excepthook, _TellOnce):
        sys.excepthook = _TellOnce(sys.excepthook)


def keep_store() -> None:
    """Keep the store of the world, which all ranks are about to leave together, for errors that follow; local.

    Rank 0's process serves it for as long as it lives, or until the next session of this process ends.
    """
    if (world := _world()) is not None:
        # torch puts a hook of its own around the one before with each process group, and never takes it off.
        otherwise = sys.excepthook.otherwise if isinstance(sys.excepthook, _TellOnce) else sys.excepthook
        sys.excepthook = _TellOnce(otherwise, world)


def note_end(error: BaseException, topology: Topology | None = None) -> None:
    """Note that an error ends this rank's part of the world, which it is about to leave; local.

    The time of the failure is noted before the others lose this rank, so that it counts as the first to fail. By the
    store of the world a rank that fails tells the others so; one that has lost another rank finds out which has failed
    first; and ranks that raise the same error of xffl find out who of them tells it.
    """
    note_failure(error)
    if is_noted_alike(error):
        return
    world = _world() or _last_world()
    if dist.is_initialized() and is_isolated():
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


def _world() -> JoinedWorld | None:
    """Return the world that this process is in; ``None`` where there is none, or no other rank."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or world.size() == 1:
        return None
    try:
        return JoinedWorld(world.get_group_store(), world.rank(), world.size())
    except RuntimeError:  # a group that was made without one
        return None


def _last_world() -> JoinedWorld | None:
    """Return the world that this process has left together with all other ranks."""
    return sys.excepthook.last_world if isinstance(sys.excepthook, _TellOnce) else None


class _TellOnce:
    """What Python calls with an uncaught exception."""

    def __init__(self, otherwise: _Hook, last_world: JoinedWorld | None = None) -> None:
        self.otherwise = otherwise
        self.last_world = last_world

    def note_end(self, error: BaseException) -> None:
        """Do what :func:`note_end` does, for rooms that do not import torch."""
        note_end(error)

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not isinstance(error, XfflError):
            self.otherwise(kind, error, traceback)
            return
        note_end(error)
        only_lost = is_only_lost_peer(error)
        if not is_noted_alike(error) and not only_lost:
            self.otherwise(kind, error, traceback)
            return
        record = describe_failure(error)
        line = line_of(error, record)
        if line is not None:
            if not only_lost and (record.has_cause or not is_of_all(error)):
                self.otherwise(kind, error, traceback)
            print(line, file=sys.stderr, flush=True)
        leave_together(error)
