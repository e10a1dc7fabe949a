"""The stream of a GPU that rounds work on, and how long it takes for them."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from types import TracebackType

import torch

from xffl.aggregation.engine.groups import RoundScope
from xffl.aggregation.report import Phase, RoundProfile

__all__ = ["GpuProfile", "StreamWork", "stream_of"]


def stream_of(scope: RoundScope, gpu: torch.device) -> torch.cuda.Stream:
    """Return the stream that rounds work on: the first of the state's, or a new one."""
    streams = scope.state.streams
    return streams[0] if streams else torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]


class StreamWork:
    """Lets a block work on a stream of its own, which the caller's waits for once the block has succeeded.

    :param stream: The stream. It starts from what the caller's stream has been given so far.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._entered = ExitStack()

    def __enter__(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._entered.enter_context(torch.cuda.stream(self._stream))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.close()
        if error is None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


class GpuProfile(RoundProfile):
    """The profile of a round whose phases are timed on the GPU's current stream: the host only hands them over.

    Rounds use ``marks``, events of the GPU, again: the profile of a round must not be asked any more once the next one
    has begun.
    """

    def __init__(self, marks: list[torch.cuda.Event]) -> None:
        super().__init__()
        self._marks = marks
        self._marked = 0
        # The phases, which the GPU may not have come to, with the seconds that they took the host, their start and end.
        self._handed_over: list[tuple[str, float, torch.cuda.Event, torch.cuda.Event]] = []
        self._first_mark: torch.cuda.Event | None = None
        self._last_mark: torch.cuda.Event | None = None

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase. Of what a GPU has still to do, those that it took the host: nobody waits for the others."""
        seconds = super().phases
        for name, on_host, start, end in self._handed_over:
            seconds[name] += _between(start, end, on_host) - on_host
        return seconds

    @property
    def hidden(self) -> float:
        """Seconds from the first post to the last arrival in which the GPU did not wait for the slow link."""
        if self._first_mark is None or self._last_mark is None:
            return 0.0
        return max(0.0, _between(self._first_mark, self._last_mark, 0.0) - self.phases.get("across", 0.0))

    def record_send(self, nbytes: int) -> None:
        """Note that something has been asked for on the slow link, or ``nbytes`` have been given to it."""
        self.bytes_across += nbytes
        if self._first_mark is None:
            self._first_mark = self.mark()

    def arrived(self) -> None:
        """Note that something has come over the slow link."""
        self._last_mark = self.mark()

    def mark(self) -> torch.cuda.Event:
        """Mark where the GPU's current stream is."""
        if self._marked == len(self._marks):
            self._marks.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        mark = self._marks[self._marked]
        self._marked += 1
        mark.record()
        return mark

    def hand_over(self, phase: str, on_host: float, start: torch.cuda.Event) -> None:
        """Note a phase that the host has handed over to the GPU, which is to end here."""
        self._handed_over.append((phase, on_host, start, self.mark()))

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Add the seconds of a phase up, and show it to a profiler as ``xffl.NAME``."""
        return _GpuPhase(self, name, is_noting=False)

    def capture_failure(self, phase: str) -> AbstractContextManager[None]:
        """Note a local failure for the vote and go on, so that no other rank waits for this one."""
        return _GpuPhase(self, phase, is_noting=True)


class _GpuPhase(Phase):
    """A phase that a GPU works through after the host has gone on."""

    __slots__ = ("_from", "_gpu_profile")

    def __init__(self, profile: GpuProfile, name: str, *, is_noting: bool) -> None:
        super().__init__(profile, name, is_noting=is_noting)
        self._gpu_profile = profile

    def __enter__(self) -> None:
        super().__enter__()
        self._from = self._gpu_profile.mark()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        is_noted = super().__exit__(kind, error, trace)
        self._gpu_profile.hand_over(self._name, self._seconds, self._from)
        return is_noted


def _between(start: torch.cuda.Event, end: torch.cuda.Event, otherwise: float) -> float:
    """Return the seconds between two marks; ``otherwise`` before the GPU has come to the second one."""
    if not end.query():  # type: ignore[no-untyped-call]
        return otherwise
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3
