"""What one rank notes while a round runs."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

from torch.autograd import profiler

__all__ = ["Journal", "span"]


def span(name: str) -> AbstractContextManager[object]:
    """Show what is done in it to a profiler, if one is looking.

    :param name: How it is shown: ``xffl.NAME``.
    :return: The context; one that does nothing where nobody looks, since torch's costs 10 us and more even then,
        some hundred times in a round.
    """
    return profiler.record_function(f"xffl.{name}") if profiler._is_profiler_enabled else nullcontext()


class Journal:
    """Seconds of each phase, bytes sent, and the first local failure of one round.

    ``phases`` holds the seconds by name, ``bytes_across`` and ``bytes_home`` what this rank sent to other cells and to
    its own, ``failure`` the first exception of :meth:`noting`.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.bytes_across = 0
        self.bytes_home = 0
        self.phases: dict[str, float] = {}
        self._first_post = self._last_arrival = math.inf

    @property
    def hidden(self) -> float:
        """Seconds from the first post to the last arrival in which this rank did not wait for the slow link."""
        if self._last_arrival == math.inf:
            return 0.0
        return max(0.0, self._last_arrival - self._first_post - self.phases.get("across", 0.0))

    def posted(self, nbytes: int) -> None:
        """Note that something has been given to the slow link, or asked for.

        :param nbytes: Bytes that leave.
        """
        self.bytes_across += nbytes
        if self._first_post == math.inf:
            self._first_post = time.perf_counter()

    def arrived(self) -> None:
        """Note that something has come over the slow link."""
        self._last_arrival = time.perf_counter()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Add the seconds of a phase up, and show it to a profiler as ``xffl.NAME``."""
        return _Phase(self, name, is_noting=False)

    def noting(self, phase: str) -> AbstractContextManager[None]:
        """Note a local failure for the vote and go on, so that no other rank waits for this one."""
        return _Phase(self, phase, is_noting=True)


class _Phase:
    """A phase while it lasts. A bucket goes through six of them, and a generator would cost several times as much."""

    __slots__ = ("_is_noting", "_journal", "_name", "_span", "_start")

    def __init__(self, journal: Journal, name: str, *, is_noting: bool) -> None:
        self._journal, self._name, self._is_noting = journal, name, is_noting

    def __enter__(self) -> None:
        self._start = time.perf_counter()
        self._span = span(self._name) if profiler._is_profiler_enabled else None
        if self._span is not None:
            self._span.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._span is not None:
            self._span.__exit__(kind, error, trace)
        phases = self._journal.phases
        phases[self._name] = phases.get(self._name, 0.0) + time.perf_counter() - self._start
        if not self._is_noting or not isinstance(error, Exception):
            return False
        self._journal.failure = self._journal.failure or error  # told to all ranks by the vote
        return True
