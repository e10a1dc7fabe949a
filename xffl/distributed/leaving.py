"""What communicates on a thread of its own when its process leaves the world or ends."""

from __future__ import annotations

import atexit
from typing import Protocol
from weakref import WeakSet

__all__ = ["leave_after", "stop_threads", "wait_for_threads"]


class _Waits(Protocol):
    """Something under way that can be waited for."""

    def wait(self) -> None: ...

    def stop(self, within_s: float) -> None: ...


_STOP_S = 2.0
"""How long something under way may take to end by itself where nobody waits for its result, and when it is told to."""

_under_way: WeakSet[_Waits] = WeakSet()


def leave_after(work: _Waits) -> None:
    """Have this process wait for something that communicates on a thread of its own when it leaves the world; local.

    Where the process ends without having left, what is under way is stopped.

    :param work: Something to wait for, or to stop where this process leaves alone; kept only as long as somebody else
        keeps it.
    """
    _under_way.add(work)


def wait_for_threads() -> None:
    """Wait until nothing is under way; local, but what is under way may need other ranks."""
    for work in list(_under_way):
        work.wait()


@atexit.register
def stop_threads() -> None:
    """End what is still under way, within seconds; local.

    A thread that wakes up in C++ while Python ends its process aborts it (before Python 3.14).
    """
    for work in list(_under_way):
        work.stop(_STOP_S)
