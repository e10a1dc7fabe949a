"""Calls that every rank must make: a rank that waits long in one says in which, and for whom, and waits on."""

from __future__ import annotations

import inspect
import sys
import threading
from contextlib import suppress
from types import FrameType, TracebackType

import torch.distributed as dist

from xffl.callers import find_caller
from xffl.distributed.collectives import Group
from xffl.distributed.cross_world import CrossWorldGroup
from xffl.distributed.failures.world_store import WaitingNote, WaitingNotes
from xffl.errors import XfflError
from xffl.topology import ranks_text

__all__ = ["TELL_AFTER_S", "NamedWait"]

TELL_AFTER_S = 30.0
"""Seconds after which a rank that waits in a collective call names it."""
NOTE_AFTER_S = 2.0
"""Seconds after which it leaves a note, from which the others know that it has come."""
_LOOK_S = 2.0  # how long a rank that gives up looks for the notes of the others
_MOST_READ = 256  # notes: in a large world each rank that waits asks one store


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
        self._timer = None  # which refers to this object
        if error is not None and self._missed:
            error.args = (f"{error}; {self._missed}",)

    def _watch(self, tell_after_s: float) -> None:
        """Leave a note, tell of the wait when it is long, and look once more who has not come when it was in vain."""
        self._is_watched = True  # before the look at what ends it
        if self._is_over.is_set():
            return
        caller = find_caller(self._frame)
        call = f"a call that compares {self._what}" if caller.call is None else caller.call
        own = WaitingNote(call, "" if caller.place is None else f" at {caller.place}")
        notes: WaitingNotes | None = None
        with suppress(RuntimeError):  # the store has gone: then nobody is named
            notes = WaitingNotes(self._group)
            notes.write(own)
        if not self._is_over.wait(tell_after_s - min(NOTE_AFTER_S, tell_after_s / 2)):
            self._tell(own, notes, tell_after_s)
            self._is_over.wait()
        if notes is None:
            return
        if self._is_given_up:
            self._missed = self._describe_absent(own, notes)
        else:
            with suppress(RuntimeError):
                notes.remove()

    def _tell(self, own: WaitingNote, notes: WaitingNotes | None, seconds: float) -> None:
        absent = "" if notes is None else self._describe_absent(own, notes)
        rank = self._group.first + self._group.rank() if isinstance(self._group, CrossWorldGroup) else dist.get_rank()
        print(
            f"xffl: rank {rank} has waited {seconds:g} s in {own.call}{own.where} for others of {self._size} ranks: "
            f"{absent}{': ' if absent else ''}every rank must make this call. If some never do, make it on all; until "
            "the timeout this rank waits on",
            file=sys.stderr,
            flush=True,
        )

    def _describe_absent(self, own: WaitingNote, notes: WaitingNotes) -> str:
        """Say which ranks have not come, and which wait elsewhere; nothing where all have come."""
        found: dict[int, WaitingNote | None] = {}
        with suppress(RuntimeError):
            found = notes.read(_MOST_READ)
        absent = [rank for rank, note in found.items() if note is None]
        texts = [f"{ranks_text(absent)} {'have' if len(absent) > 1 else 'has'} not come"] if absent else []
        others = {rank: note for rank, note in found.items() if note is not None and note.call != own.call}
        texts += [f"rank {rank} waits in {note.call}{note.where}" for rank, note in list(others.items())[:4]]
        return ", ".join(texts)
