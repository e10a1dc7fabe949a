"""The output of very many ranks in one stream: what several print alike is shown once, and its rate has a bound."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO

__all__ = ["ManyRanks"]

_WINDOW_S = 5.0  # how long after a line the same line of other ranks is counted and not shown
_MOST_LINES = 4096  # that are compared at a time
_BURST_BYTES = 16 << 20
_BYTES_PER_S = 1 << 20
# What differs in a warning that all ranks print: the rank and the time that torch and Python's logging put before it.
_DIFFERS = re.compile(
    rb"\brank[ :_=]?[0-9]+|\b[IWEF][0-9]{4} |\b[0-9]{4}-[0-9]{2}-[0-9]{2}\b|\b[0-9]{2}:[0-9]{2}:[0-9]{2}(?:[.,][0-9]+)?"
)

_Rank = tuple[bytes, int]  # with what stands before its lines: in an elastic run each cell has a rank 0


@dataclass
class _Repeated:
    """A line that was shown, and who has printed it since."""

    began: float
    rank: _Rank | None
    text: bytes
    ranks: set[_Rank] = field(default_factory=set)  # others
    times: int = 0


class ManyRanks:
    """Writes lines of many ranks to a stream: each line once for all ranks that print it within five seconds.

    A line behind it says how many have. More than 16 MiB at once, and 1 MiB a second then, are left out, by whole
    lines; a line says how many lines of how many ranks. Call it from one thread at a time.

    :param out: Where the lines go.
    :param clock: Seconds that only grow.
    """

    def __init__(self, out: BinaryIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._clock = clock
        self._recent: dict[bytes, _Repeated] = {}  # the oldest first
        self._credit = float(_BURST_BYTES)
        self._credited = clock()
        self._left_out = 0
        self._left_out_of: set[_Rank] = set()

    def write(self, rank: int | None, prefix: bytes, line: bytes) -> None:
        """Take a line of a rank, if it is known whose it is, with what is to stand before it."""
        now = self._clock()
        self.tell(now)
        key = _DIFFERS.sub(b"", line.rstrip(b"\r\n"))
        before = self._recent.get(key)
        whose = None if rank is None else (prefix, rank)
        # What the rank itself prints again, such as the lines of a table, is shown again.
        if before is not None and (whose is None or whose != before.rank):
            before.times += 1
            if whose is not None:
                before.ranks.add(whose)
            return
        if not self._take(len(prefix) + len(line), now):
            self._left_out += 1
            if whose is not None:
                self._left_out_of.add(whose)
            return
        self._say_left_out()
        if before is None and len(self._recent) < _MOST_LINES:
            self._recent[key] = _Repeated(now, whose, line.rstrip(b"\r\n"))
        self._out.write(prefix + line)

    def tell(self, now: float | None = None) -> None:
        """Say how often lines have been printed since they were shown, of those whose time is over."""
        now = self._clock() if now is None else now
        while self._recent:
            key = next(iter(self._recent))
            if now - self._recent[key].began < _WINDOW_S:
                return
            self._say_repeated(self._recent.pop(key))

    def end(self) -> None:
        """Say all that is left to say; no line comes any more."""
        for repeated in self._recent.values():
            self._say_repeated(repeated)
        self._recent.clear()
        self._say_left_out()

    def _say_repeated(self, repeated: _Repeated) -> None:
        if not repeated.times:
            return
        others = len(repeated.ranks)
        who = f"{others} other rank{'s' if others > 1 else ''}" if others else f"{repeated.times} times more"
        if others and repeated.times != others:
            who += f", {repeated.times} times"
        self._out.write(f"[{who}] ".encode() + repeated.text + b"\n")

    def _say_left_out(self) -> None:
        if not self._left_out:
            return
        ranks = len(self._left_out_of)
        whose = f" of {ranks} rank{'s' if ranks > 1 else ''}" if ranks else ""
        text = (
            f"xffl: {self._left_out} lines{whose} are left out here: the ranks print more than {_BYTES_PER_S >> 20} "
            "MiB a second; --log-dir DIR keeps all of them\n"
        )
        self._out.write(text.encode())
        self._left_out = 0
        self._left_out_of.clear()

    def _take(self, size: int, now: float) -> bool:
        """Tell whether so many bytes may be written now, and count them."""
        self._credit = min(_BURST_BYTES, self._credit + (now - self._credited) * _BYTES_PER_S)
        self._credited = now
        # Once something was left out, a second's worth is to have gathered: no lines between lines about lines.
        if self._credit < (_BYTES_PER_S if self._left_out else size):
            return False
        self._credit -= size
        return True
