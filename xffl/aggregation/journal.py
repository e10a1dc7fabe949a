"""What one rank notes while a round runs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

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

    def posted(self) -> None:
        """Note that something has been given to the slow link."""
        self._first_post = min(self._first_post, time.perf_counter())

    def arrived(self) -> None:
        """Note that something has come over the slow link."""
        self._last_arrival = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of a phase up, and show it to a profiler as ``xffl.NAME``."""
        start = time.perf_counter()
        try:
            with span(name):
                yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - start

    @contextmanager
    def noting(self, phase: str) -> Iterator[None]:
        """Note a local failure for the vote and go on, so that no other rank waits for this one."""
        try:
            with self.phase(phase):
                yield
        except Exception as error:  # noqa: BLE001 - told to all ranks by the vote
            self.failure = self.failure or error
