"""Buckets under way, which take their steps in turn, so that the slow link waits neither for processor nor for home."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

__all__ = ["Flights"]


class Flights:
    """What is under way: iterators that yield for how many starts of others they can pause; local and deterministic."""

    def __init__(self) -> None:
        self._tick = 0
        # With their numbers, by the tick at which they go on.
        self._due: dict[int, list[tuple[int, Iterator[int]]]] = {}

    def start(self, flight: Iterator[int]) -> None:
        """Let one begin, and all whose time has come take their next step, in the order in which they began."""
        self._due.setdefault(self._tick, []).append((self._tick, flight))
        self._advance(self._tick)
        self._tick += 1

    def drain(self) -> None:
        """Let all come to their end."""
        while self._due:
            self._advance(min(self._due))

    def _advance(self, tick: int) -> None:
        for number, flight in sorted(self._due.pop(tick, ()), key=itemgetter(0)):
            if (pause := next(flight, None)) is not None:
                self._due.setdefault(tick + pause, []).append((number, flight))
