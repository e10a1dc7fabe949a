"""Time that training takes, without validations and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["TrainingClock"]


class TrainingClock:
    """A clock that can be stopped; what stops it may be stopped itself.

    :param now: What tells the time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._paused_s = 0.0
        self._depth = 0
        self._stopped_at = 0.0

    def read(self) -> float:
        """Return the seconds that have passed while it was not stopped, from any beginning."""
        return (self._stopped_at if self._depth else self._now()) - self._paused_s

    def stop(self) -> None:
        """Stop it until as many calls of :meth:`go_on`."""
        if self._depth == 0:
            self._stopped_at = self._now()
        self._depth += 1

    def go_on(self) -> None:
        """Let it run on; nothing happens where it was not stopped."""
        if self._depth == 0:
            return
        self._depth -= 1
        if self._depth == 0:
            self._paused_s += self._now() - self._stopped_at
