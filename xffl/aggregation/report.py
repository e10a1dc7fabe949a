"""A round as its caller sees it: its report, and the profile behind that."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from torch.autograd import profiler

from xffl.compat.pytorch import is_profiling

__all__ = ["ElasticRoundReport", "Phase", "RoundProfile", "RoundReport"]


@dataclass(frozen=True)
class RoundReport:
    """What one round did, as this rank saw it.

    :param round: The round's number, from 1; the same on all ranks.
    :param weights: The weight of each cell; the same on all ranks.
    :param bytes_across: Bytes that this rank sent to other cells.
    :param bytes_home: Bytes that this rank sent inside its cell.
    :param seconds: Wall-clock time on this rank, from the call to the new weights; of a delayed round with the steps
        made meanwhile.
    :param dropped: Cells whose values were left out for not being finite; the same on all ranks.
    :param is_last: Whether all ranks had finished: no round follows; the same on all ranks.
    :param fragment: Part of the model that was exchanged, from 0; the same on all ranks.
    :param phases: Seconds that this rank spent in each phase: ``vote``, ``pack``, ``encode``, ``post`` (handing
        messages to the backend), ``across`` (waiting for the slow link), ``combine``, ``home`` (waiting for the cell),
        ``commit``; of a delayed round all but ``pack`` and ``commit`` in the background, and ``wait``, how long its
        merge had to wait for them.
    :param hidden: Seconds between the first post and the last arrival in which this rank did not wait for the slow
        link, but worked.
    :param shares: What each cell's values counted for, as the combiner has weighed them; they sum to 1.
    :param scale: What the way from the last agreed model to the combined one was multiplied by.
    :param step_norm: L2 norm of the pseudo-gradient (what the global model differs by from the combined one) before it
        was clipped; ``None`` without a server that clips it.
    :param steps: Effective local steps of each cell since its last round.
    :param step_seconds: Seconds that a local step took in each cell; 0 where nobody has measured.
    :param update_norms: L2 norm of each cell's update, of the part that was exchanged; ``None`` where nobody measures.
    :param nonfinite: For each dropped cell the tensors with values that were not finite (three at most of each rank).
    :param is_skipped: Whether the cells' models were so close that nothing moved; such a round does not count.
    :param codec_error: What lossy codecs left out of what this rank had to send, relative to it, in the L2 norm; it is
        sent later. ``None`` where none was used, or where it had to send so much that squares left fp32.
    """

    round: int
    weights: tuple[float, ...]
    bytes_across: int
    bytes_home: int
    seconds: float
    dropped: tuple[int, ...] = ()
    is_last: bool = False
    fragment: int = 0
    shares: tuple[float, ...] = ()
    scale: float = 1.0
    steps: tuple[float, ...] = ()
    step_seconds: tuple[float, ...] = ()
    update_norms: tuple[float, ...] | None = None
    nonfinite: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    is_skipped: bool = False
    phases: Mapping[str, float] = field(default_factory=dict)
    hidden: float = 0.0
    codec_error: float | None = None
    step_norm: float | None = None

    @property
    def weight_taken(self) -> float:
        """Sum of the weights of the cells whose values were taken in: how many samples, where weights are samples."""
        if self.is_skipped:
            return 0.0
        taken = list(self.weights)
        for cell in self.dropped:
            taken[cell] = 0.0
        return sum(taken)


@dataclass(frozen=True)
class ElasticRoundReport(RoundReport):
    """What one round of an elastic federation did; ``weights`` and what else is by cell has 0 for cells not there.

    :param cells: The cells that took part.
    :param membership: What their epoch is called: the same as in the round before where nobody was lost or has come.
    :param tries: How often the round was begun: more than once where a cell was lost on the way.
    :param restarts: How often each of ``cells`` was started again before.
    :param left: The cells that had finished the run before, and are not here.
    :param told: What each of ``cells`` has told the others at the meeting for this round, see
        :class:`xffl.aggregation.LoopHooks`.
    """

    cells: tuple[int, ...] = ()
    membership: str = ""
    tries: int = 1
    restarts: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    told: tuple[Mapping[str, Any], ...] = ()

    @property
    def cell_counts(self) -> tuple[int, int, int]:
        """How many cells are known, are alive (took part), and were averaged."""
        return len(self.weights), len(self.cells), sum(weight > 0 for weight in self.weights)


class RoundProfile:
    """Seconds of each phase, bytes sent, and the first local failure of one round.

    This form is for what the host does; :class:`~xffl.aggregation.engine.streams.GpuProfile` times what a GPU does.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.is_cut_off = False
        """Whether another cell was lost"""
        self.has_left = False
        """Whether nothing more is exchanged with other cells: one was lost, or this rank cannot go on with that"""
        self.bytes_across = 0
        self.bytes_home = 0
        self._seconds: dict[str, float] = {}
        self._first_post: float | None = None
        self._last_arrival: float | None = None

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase."""
        return dict(self._seconds)

    @property
    def hidden(self) -> float:
        """Seconds from the first post to the last arrival in which this rank did not wait for the slow link."""
        if self._first_post is None or self._last_arrival is None:
            return 0.0
        return max(0.0, self._last_arrival - self._first_post - self._seconds.get("across", 0.0))

    def add(self, phase: str, seconds: float) -> None:
        """Add to the seconds of a phase."""
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def record_send(self, nbytes: int) -> None:
        """Note that something has been asked for on the slow link, or ``nbytes`` have been given to it."""
        self.bytes_across += nbytes
        if self._first_post is None:
            self._first_post = time.perf_counter()

    def arrived(self) -> None:
        """Note that something has come over the slow link."""
        self._last_arrival = time.perf_counter()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Add the seconds of a phase up, and show it to a profiler as ``xffl.NAME``."""
        return Phase(self, name, is_noting=False)

    def capture_failure(self, phase: str) -> AbstractContextManager[None]:
        """Note a local failure for the vote and go on, so that no other rank waits for this one."""
        return Phase(self, phase, is_noting=True)


class Phase:
    """A phase while it lasts. A bucket goes through six of them, and a generator would cost several times as much.

    With ``is_noting`` an exception that ends it is the round's failure, and goes no further.
    """

    __slots__ = ("_is_noting", "_name", "_profile", "_seconds", "_span", "_start")

    def __init__(self, profile: RoundProfile, name: str, *, is_noting: bool) -> None:
        self._profile = profile
        self._name = name
        self._is_noting = is_noting

    def __enter__(self) -> None:
        self._start = time.perf_counter()
        # Not where nobody looks, since it costs 10 us and more even then, some hundred times in a round.
        self._span: AbstractContextManager[object] | None = None
        if is_profiling():
            shown: AbstractContextManager[object] = profiler.record_function(f"xffl.{self._name}")
            shown.__enter__()
            self._span = shown

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._span is not None:
            self._span.__exit__(kind, error, trace)
        profile = self._profile
        self._seconds = time.perf_counter() - self._start
        profile.add(self._name, self._seconds)
        if not self._is_noting or not isinstance(error, Exception):
            return False
        profile.failure = profile.failure or error  # told to all ranks by the vote
        return True
