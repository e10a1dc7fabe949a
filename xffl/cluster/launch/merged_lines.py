"""The output of very many ranks in one stream: what several print alike is shown once, and its rate has a bound.

A traceback is one piece of output: the lines of two ranks do not alternate in it, and equal ones are shown once.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO

__all__ = ["MergedLines"]

_WINDOW_S = 5.0  # how long after a line the same line of other ranks is counted and not shown
_MOST_LINES = 4096  # that are compared at a time
_BURST_BYTES = 16 << 20
_BYTES_PER_S = 1 << 20
# What differs in a warning that all ranks print: the rank and the time that torch and Python's logging put before it.
_DIFFERS = re.compile(
    rb"\brank[ :_=]?[0-9]+|\b[IWEF][0-9]{4} |\b[0-9]{4}-[0-9]{2}-[0-9]{2}\b|\b[0-9]{2}:[0-9]{2}:[0-9]{2}(?:[.,][0-9]+)?"
)

_TRACEBACK = b"Traceback (most recent call last)"
_INSIDE = re.compile(rb"(?:\[rank[0-9]+\]: )?[ \t]")  # torch puts the rank before each line of a traceback
_BLOCK_BYTES = 1 << 18  # of a traceback that is kept together

_Rank = tuple[bytes, int]  # with what stands before its lines: in an elastic run each cell has a rank 0


@dataclass
class _Block:
    """A traceback that a rank has not ended yet, and what stands before its lines."""

    began: float
    prefix: bytes
    lines: list[bytes]
    size: int = 0


@dataclass
class _Repeated:
    """A line that was shown, and who has printed it since."""

    began: float
    rank: _Rank | None
    text: bytes
    ranks: set[_Rank] = field(default_factory=set)  # others
    times: int = 0


class MergedLines:
    """Writes lines of many ranks to a stream: each line once for all ranks that print it within five seconds.

    A line behind it says how many have. The lines of a traceback go together, from its first to the one that is not
    indented and names the error, where it is known whose they are. More than 16 MiB at once, and 1 MiB a second then,
    are left out, by whole lines; a line says how many lines of how many ranks. Call it from one thread at a time.

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
        self._blocks: dict[_Rank, _Block] = {}  # the oldest first

    def write(self, rank: int | None, prefix: bytes, line: bytes) -> None:
        """Take a line of a rank, if it is known whose it is, with what is to stand before it."""
        now = self._clock()
        self.tell(now)
        whose = None if rank is None else (prefix, rank)
        if whose is None:
            self._write(now, None, prefix, [line])
            return
        block = self._blocks.get(whose)
        if block is None:
            if _TRACEBACK in line:
                self._blocks[whose] = _Block(now, prefix, [line])
            else:
                self._write(now, whose, prefix, [line])
            return
        block.lines.append(line)
        block.size += len(line)
        if not _INSIDE.match(line) or block.size > _BLOCK_BYTES:
            del self._blocks[whose]
            self._write(now, whose, prefix, block.lines)

    def _write(self, now: float, whose: _Rank | None, prefix: bytes, lines: list[bytes]) -> None:
        """Write lines that belong together, count them, or leave them out."""
        key = _DIFFERS.sub(b"", b"".join(lines).rstrip(b"\r\n"))
        before = self._recent.get(key)
        # What the rank itself prints again, such as the lines of a table, is shown again.
        if before is not None and (whose is None or whose != before.rank):
            before.times += 1
            if whose is not None:
                before.ranks.add(whose)
            return
        if not self._take(sum(len(prefix) + len(line) for line in lines), now):
            self._left_out += len(lines)
            if whose is not None:
                self._left_out_of.add(whose)
            return
        self._say_left_out()
        if before is None and len(self._recent) < _MOST_LINES:
            # Of a traceback the error says enough.
            self._recent[key] = _Repeated(now, whose, lines[-1].rstrip(b"\r\n"))
        self._out.write(b"".join(prefix + line for line in lines))

    def tell(self, now: float | None = None) -> None:
        """Say how often lines have been printed since they were shown, of those whose time is over."""
        now = self._clock() if now is None else now
        while self._blocks:
            whose = next(iter(self._blocks))
            if now - self._blocks[whose].began < _WINDOW_S:
                break
            self._write_block(whose)
        while self._recent:
            key = next(iter(self._recent))
            if now - self._recent[key].began < _WINDOW_S:
                return
            self._say_repeated(self._recent.pop(key))

    def end(self) -> None:
        """Say all that is left to say; no line comes any more."""
        while self._blocks:
            self._write_block(next(iter(self._blocks)))
        for repeated in self._recent.values():
            self._say_repeated(repeated)
        self._recent.clear()
        self._say_left_out()

    def _write_block(self, whose: _Rank) -> None:
        """Write what there is of a traceback that nothing ends."""
        block = self._blocks.pop(whose)
        self._write(self._clock(), whose, block.prefix, block.lines)

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
