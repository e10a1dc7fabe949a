"""How long a local step takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["Pace"]


class Pace:
    """Measure how long this rank's local steps take, without the rounds between them; local.

    What the caller does between two steps counts (loading, evaluating), since it makes others wait, too.

    :param device: Where the steps work: what it has still to do when a round comes is waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._steps = 0
        self._since = time.perf_counter()

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a step since the last :meth:`clear`, up to the last pause; 0 without a step."""
        return self._seconds / self._steps if self._steps else 0.0

    def add_step(self) -> None:
        """Note a local step."""
        self._steps += 1

    def clear(self) -> None:
        """Forget the steps so far: a round has told how long they took."""
        self._seconds, self._steps = 0.0, 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock for what is no local step."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # not that of a round under way
        self._seconds += time.perf_counter() - self._since
        try:
            yield
        finally:
            self._since = time.perf_counter()
