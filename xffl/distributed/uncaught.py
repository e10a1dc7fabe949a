"""Errors of xffl that end the ranks of a script which no ``xffl exec`` has started: told once, in one line.

Under plain ``srun``, ``mpirun`` or ``torchrun`` Python shows the traceback of an uncaught exception on every rank. For
an error that all ranks raise alike that is the same text once for each rank, so one of them tells it. An error that
only some ranks raise, or with which the script answers another one, keeps its traceback.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from xffl.cluster.launch.failure import (
    describe_failure,
    is_left_to_others,
    is_noted_alike,
    is_of_all,
    is_only_lost_peer,
    leave_together,
    note_alike,
    note_failure,
    text_of,
)
from xffl.errors import XfflError

__all__ = ["note_end", "tell_once"]

_ASK_S = 2.0  # how long a rank that fails asks the others' store
_LINGER_S = 1.0  # how long the first rank that fails waits for the others, and rank 0, whose process holds the store
_POLL_S = 0.02
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def tell_once() -> None:
    """Let an uncaught error of xffl be told by one rank of those that raise it, in one line; local, for this process.

    Everything else is shown as before, by whatever was to show it. The exit code stays Python's.
    """
    if not isinstance(sys.excepthook, _TellOnce):
        sys.excepthook = _TellOnce(sys.excepthook)


def note_end(error: BaseException) -> None:
    """Note that an error ends this rank's part of the world, which it is about to leave; local.

    The time of the failure is noted before the others lose this rank, so that it counts as the first to fail. Where it
    is an error of xffl, the ranks that raise the same one find out by the store of the world who of them tells it.
    """
    note_failure(error)
    if not isinstance(error, XfflError) or is_noted_alike(error):
        return
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.group.WORLD is None:
        return
    # A thread of its own: a store whose host has stopped would keep the caller, and so its end, waiting.
    asking = threading.Thread(target=_choose_speaker, args=[error, dist.group.WORLD], daemon=True)
    asking.start()
    asking.join(_ASK_S)


def _choose_speaker(error: XfflError, world: dist.ProcessGroup) -> None:
    """Be the one that tells an error if no other rank has come with it before."""
    digest = hashlib.sha256(f"{type(error).__name__}: {text_of(error)}".encode(errors="replace")).hexdigest()
    key = f"xffl_errors/{digest}"
    try:
        store = world.get_group_store()
        is_speaker = store.add(key, 1) == 1
    except RuntimeError:  # the store has gone with rank 0: this rank tells its error itself
        return
    is_waiting = is_speaker or world.rank() == 0
    is_met = is_waiting and _await_all(store, key, world, is_speaker=is_speaker)
    note_alike(error, is_speaker=is_speaker, is_of_all=is_met)


def _await_all(store: Store, key: str, world: dist.ProcessGroup, *, is_speaker: bool) -> bool:
    """Wait a moment for all ranks to come with the same error; tell whether they have.

    Rank 0 stays until the speaker knows, too: the store ends with it.
    """
    deadline = time.monotonic() + _LINGER_S
    try:
        while time.monotonic() < deadline:
            if store.add(key, 0) == world.size():
                if is_speaker:
                    store.set(f"{key}/known", "")
                    return True
                if store.check([f"{key}/known"]):
                    return True
            time.sleep(_POLL_S)
    except RuntimeError:  # rank 0 has gone, with another error or none
        return False
    return False


class _TellOnce:
    """What Python calls with an uncaught exception."""

    def __init__(self, otherwise: _Hook) -> None:
        self._otherwise = otherwise

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not isinstance(error, XfflError):
            self._otherwise(kind, error, traceback)
            return
        note_end(error)
        only_lost = is_only_lost_peer(error)
        if not is_noted_alike(error) and not only_lost:
            self._otherwise(kind, error, traceback)
            return
        if not is_left_to_others(error):
            record = describe_failure(error)
            if not only_lost and (record.has_cause or not is_of_all(error)):
                self._otherwise(kind, error, traceback)
            print(f"xffl: {record.text}", file=sys.stderr, flush=True)
        leave_together(error)
