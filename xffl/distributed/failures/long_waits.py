"""What a rank notes and tells of a wait for others that has become long."""

from __future__ import annotations

import sys
from contextlib import suppress
from types import FrameType

import torch.distributed as dist

from xffl.callers import find_caller
from xffl.distributed.collectives import Group
from xffl.distributed.failures.world_store import WaitingNote, WaitingNotes
from xffl.distributed.several_worlds.cross_world import CrossWorldGroup
from xffl.topology import ranks_text

__all__ = ["LongWait"]

_MOST_READ = 256  # notes: in a large world each rank that waits asks one store


class LongWait:
    """A wait that has lasted some seconds: it has a note in the world's store, from which others know of it.

    :param what: What the ranks compare, for a call that has no public name.
    :param frame: Where this rank waits.
    :param group: The group whose ranks are waited for; by default the world.
    :param size: How many ranks these are.
    """

    def __init__(self, what: str, frame: FrameType | None, *, group: Group | None, size: int) -> None:
        caller = find_caller(frame)
        call = f"a call that compares {what}" if caller.call is None else caller.call
        self._group = group
        self._size = size
        self._own = WaitingNote(call, "" if caller.place is None else f" at {caller.place}")
        self._notes: WaitingNotes | None = None
        with suppress(RuntimeError):  # the store has gone: then nobody is named
            self._notes = WaitingNotes(group)
            self._notes.write(self._own)

    def tell(self, seconds: float) -> None:
        """Write a line about the wait, which has taken so many seconds, for all ranks that wait in the same call."""
        absent, more = "", ""
        if self._notes is not None:
            with suppress(RuntimeError):
                if not self._notes.become_speaker():
                    return
                if (others := self._notes.count_alike()) > 0:
                    more = f" (and {others} more)"
            absent = self._describe_absent(self._notes)
        rank = self._group.first + self._group.rank() if isinstance(self._group, CrossWorldGroup) else dist.get_rank()
        print(
            f"xffl: rank {rank}{more} has waited {seconds:g} s in {self._own.call}{self._own.where} for others of "
            f"{self._size} ranks: {absent}{': ' if absent else ''}every rank must make this call. If some never do, "
            "make it on all; until the timeout this rank waits on",
            file=sys.stderr,
            flush=True,
        )

    def end(self, *, is_given_up: bool) -> str:
        """Take the note back; of a wait that was given up it stays, and what is returned says who has not come."""
        if self._notes is None:
            return ""
        if is_given_up:
            absent = self._describe_absent(self._notes)
            with suppress(RuntimeError):
                self._notes.leave_call()
            return absent
        with suppress(RuntimeError):
            self._notes.remove()
        return ""

    def _describe_absent(self, notes: WaitingNotes) -> str:
        """Say which ranks have not come, and which wait elsewhere; nothing where all have come."""
        found: dict[int, WaitingNote | None] = {}
        with suppress(RuntimeError):
            found = notes.read(_MOST_READ)
        absent = [rank for rank, note in found.items() if note is None]
        texts = [f"{ranks_text(absent)} {'have' if len(absent) > 1 else 'has'} not come"] if absent else []
        others = {rank: note for rank, note in found.items() if note is not None and note.call != self._own.call}
        texts += [f"rank {rank} waits in {note.call}{note.where}" for rank, note in list(others.items())[:4]]
        return ", ".join(texts)
