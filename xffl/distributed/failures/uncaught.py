"""Errors of xffl that end the ranks of a script which no ``xffl exec`` has started: told once, in one line.

Under plain ``srun``, ``mpirun`` or ``torchrun`` Python shows the traceback of an uncaught exception on every rank. For
an error that all ranks raise alike that is the same text once for each rank, so one of them tells it. An error that
only some ranks raise, or with which the script answers another one, keeps its traceback.
"""

from __future__ import annotations

import sys
from functools import partial
from types import TracebackType

import torch.distributed as dist

from xffl.distributed.failures.ending import Hook, note_in_world, show
from xffl.distributed.failures.first_failure import JoinedWorld
from xffl.errors import XfflError
from xffl.topology import Topology

__all__ = ["keep_store", "note_end", "tell_once"]


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
    note_in_world(error, _world() or _last_world(), topology)


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

    def __init__(self, otherwise: Hook, last_world: JoinedWorld | None = None) -> None:
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
        show(error, partial(self.otherwise, kind, error, traceback))
