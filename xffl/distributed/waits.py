"""Calls that every rank must make: a rank that waits long in one for the others says in which, and waits on."""

from __future__ import annotations

import inspect
import sys
import threading
from types import FrameType, TracebackType

from xffl.callers import find_caller

__all__ = ["TELL_AFTER_S", "NamedWait"]

TELL_AFTER_S = 30.0
"""Seconds after which a rank that waits in a collective call names it."""


class NamedWait:
    """A wait for other ranks: a block in which this rank can do nothing until all of them have come.

    After ``TELL_AFTER_S`` seconds one line on standard error names the call that the block belongs to, with the line of
    the script. The block goes on until its own timeout.

    :param what: What the ranks compare, for a call that has no public name.
    :param rank: This rank.
    :param size: How many ranks are waited for, this one included; one waits for nobody.
    """

    def __init__(self, what: str, rank: int, size: int) -> None:
        self._what = what
        self._rank = rank
        self._size = size
        self._frame: FrameType | None = None
        self._timer: threading.Timer | None = None

    def __enter__(self) -> None:
        if self._size == 1:
            return
        frame = inspect.currentframe()
        # The caller's stack is only read when the time is over: until the block ends this thread does not leave it.
        self._frame = None if frame is None else frame.f_back
        self._timer = threading.Timer(TELL_AFTER_S, self._tell, [TELL_AFTER_S])
        self._timer.daemon = True
        self._timer.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        self._frame = None  # it holds what the callers hold

    def _tell(self, seconds: float) -> None:
        caller = find_caller(self._frame)
        where = "" if caller.place is None else f" at {caller.place}"
        call = f"a call that compares {self._what}" if caller.call is None else caller.call
        print(
            f"xffl: rank {self._rank} has waited {seconds:g} s in {call}{where} for others of {self._size} ranks: "
            "every rank must make this call. If some never do, make it on all; until the timeout this rank waits on",
            file=sys.stderr,
            flush=True,
        )
