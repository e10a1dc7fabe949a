"""How far the host may be ahead of a GPU in a round, so that a peer that is gone is noticed by the host, in time."""

from __future__ import annotations

import time
from collections import deque

import torch

from xffl.report.forms import MOST_IN_FLIGHT

__all__ = ["Progress"]

HASTE = 0.8
"""How much of a timeout the host waits for a GPU.

At the end of it NCCL ends the process, and counts from when a message is given, before it is noted here.
"""

POLL_S = 1e-4
"""How often a GPU is asked."""


class Progress:
    """Waits for a GPU some messages behind what it has been given; without a GPU gloo's own waits do that.

    NCCL's clock for a message starts when it is given, and ``work.wait()`` holds up the stream, not the host. If all of
    an exchange were given at once, its timeout would be one for the whole of it, and the host would learn of a peer
    that is gone from NCCL's watchdog, which ends the process. So the host waits, with a deadline, for what it gave
    :data:`~xffl.report.forms.MOST_IN_FLIGHT` messages before.

    :param device: Where values move.
    :param within_s: Seconds that a message may take.
    """

    def __init__(self, device: torch.device, within_s: float) -> None:
        self._device, self._within_s = device, HASTE * within_s
        self._marks: deque[tuple[torch.cuda.Event, float]] = deque()

    def note(self) -> None:
        """Note that the current stream waits for a message, and wait for one of those before."""
        if self._device.type == "cuda":
            mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
            mark.record(torch.cuda.current_stream(self._device))
            self._marks.append((mark, time.monotonic()))
            self._await(MOST_IN_FLIGHT)

    def drain(self) -> None:
        """Wait until the GPU has done all that the current stream was given.

        :raises RuntimeError: if it does not in time: then a peer does not answer.
        """
        self.note()
        self._await(0)

    def forget(self) -> None:
        """Begin anew, whatever became of the messages before."""
        self._marks.clear()

    def _await(self, behind: int) -> None:
        """Wait for all that was noted but the last few."""
        while len(self._marks) > behind:
            mark, noted = self._marks.popleft()
            while not mark.query():  # type: ignore[no-untyped-call]
                if time.monotonic() > noted + self._within_s:
                    raise RuntimeError(f"a rank did not answer within {self._within_s:g} s")
                time.sleep(POLL_S)
