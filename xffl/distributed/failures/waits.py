"""Calls that every rank must make: a rank that waits long in one says in which, and for whom, and waits on."""

from __future__ import annotations

import inspect
import threading
from types import FrameType, TracebackType

import torch.distributed as dist

from xffl.distributed.collectives import Group
from xffl.distributed.failures.long_waits import LongWait
from xffl.distributed.failures.world_store import turn_of_waiting
from xffl.errors import XfflError

__all__ = ["TELL_AFTER_S", "NamedWait"]

TELL_AFTER_S = 30.0
"""Seconds after which a rank that waits in a collective call names it."""
NOTE_AFTER_S = 2.0
"""Seconds after which it leaves a note, from which the others know that it has come; up to ten more in large worlds."""
_LOOK_S = 2.0  # how long a rank that gives up looks for the notes of the others


class NamedWait:
    """A wait for other ranks: a block in which this rank can do nothing until all of them have come.

    After ``TELL_AFTER_S`` seconds one line on standard error names the call that the block belongs to, with the line of
    the script, and the ranks that have not come. The block goes on until its own timeout. If that ends it, the error's
    text gets the ranks that have not come by then.

    :param what: What the ranks compare, for a call that has no public name.
    :param group: The group whose ranks are waited for; by default the world. One of a single rank waits for nobody.
    """

    def __init__(self, what: str, group: Group | None = None) -> None:
        self._what = what
        self._group = group
        self._size = dist.get_world_size() if group is None else group.size()
        self._frame: FrameType | None = None
        self._timer: threading.Timer | None = None
        self._is_watched = False
        self._is_over = threading.Event()
        self._is_given_up = False
        self._missed = ""

    def __enter__(self) -> None:
        if self._size == 1:
            return
        frame = inspect.currentframe()
        # The caller's stack is only read when the time is over: until the block ends this thread does not leave it.
        self._frame = None if frame is None else frame.f_back
        del frame  # a frame that refers to itself keeps all that its callers hold until the garbage collector runs
        self._timer = threading.Timer(min(NOTE_AFTER_S, TELL_AFTER_S / 2), self._watch, [TELL_AFTER_S])
        self._timer.daemon = True
        self._timer.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is None:
            return
        self._is_given_up = isinstance(error, RuntimeError) and not isinstance(error, XfflError)
        self._is_over.set()
        self._timer.cancel()
        # A watch that begins from here on does nothing, and to wait for its thread would cost a switch of threads.
        if self._is_watched:
            self._timer.join(_LOOK_S)  # a store that does not answer is no reason to wait on
        self._frame = None  # it holds what the callers hold
        # The timer's thread refers to this object and may end late. A group that goes on it while the process ends
        # aborts the process: torch's destructor takes the GIL.
        self._group = None
        self._timer = None  # which refers to this object
        if error is not None and self._missed:
            error.args = (f"{error}; {self._missed}",)

    def _watch(self, tell_after_s: float) -> None:
        """Leave a note, tell of the wait when it is long, and look once more who has not come when it was in vain."""
        self._is_watched = True  # before the look at what ends it
        if self._is_over.wait(turn_of_waiting(self._size)):
            return
        wait = LongWait(self._what, self._frame, group=self._group, size=self._size)
        if not self._is_over.wait(tell_after_s - min(NOTE_AFTER_S, tell_after_s / 2)):
            wait.tell(tell_after_s)
            self._is_over.wait()
        self._missed = wait.end(is_given_up=self._is_given_up)
