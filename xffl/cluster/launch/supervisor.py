"""The end of a job, as a launcher sees it: failures of ranks, signals and the time limit."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from xffl.cluster.exit_codes import ExitCode, code_of_signal
from xffl.cluster.launch.failure import FailureRecord, RankFailure, first_failure, stopped_result

__all__ = ["JobWatch", "caught_signals"]

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


class JobWatch:
    """Collects how ranks end, and tells when the rest is to be ended."""

    def __init__(self, timeout_s: float | None, grace_s: float) -> None:
        self.grace_s = grace_s
        self.stopped_by: int | None = None
        """The signal that stopped the job, or 0 for the time limit."""
        self._limit = None if timeout_s is None else time.monotonic() + timeout_s
        self._grace_until: float | None = None
        self._records: dict[int, FailureRecord] = {}
        self._codes: dict[int, int] = {}
        self._terminated: dict[int, int] = {}
        """The same of ranks ended by SIGTERM."""
        self._is_ended_by_others = False
        """Whether it is known that another than the launcher sent that SIGTERM."""
        self._left: set[int] = set()
        self._lasting: set[int] = set()

    def add_record(self, rank: int, record: FailureRecord) -> None:
        """Take over what a rank has told of its failure."""
        self._records[rank] = record
        if not record.lost_peer:
            self.start_grace()

    def add_code(self, rank: int, code: int, *, is_own: bool = False) -> None:
        """Take over that a rank has ended, with -n after signal n.

        Of ranks that left no record the first counts: the launcher ends the others. An end by SIGTERM counts only where
        there is no other, since the launcher ends ranks so.
        """
        if rank not in self._records and code != -signal.SIGTERM and not self._codes:
            self._codes[rank] = code
        elif rank not in self._records and code == -signal.SIGTERM and not self._terminated:
            self._terminated[rank] = code
            self._is_ended_by_others = is_own
        self.start_grace()

    def add_left(self, rank: int) -> None:
        """Take over that a rank has left with code 0 before any was told to end: others may still wait for it."""
        self._left.add(rank)

    def add_lasting(self, ranks: Iterable[int]) -> None:
        """Take over which ranks went on after others had lost a peer, until all were told to end."""
        self._lasting.update(ranks)

    def start_grace(self) -> None:
        """Give the ranks that are left no more than their grace."""
        if self._grace_until is None:
            self._grace_until = time.monotonic() + self.grace_s

    def stop(self, number: int) -> None:
        """Note that a signal stops the job, or with 0 the time limit."""
        if self.stopped_by is None:
            self.stopped_by = number
        self.start_grace()

    @property
    def is_late(self) -> bool:
        """Whether the time limit is over, and nobody has stopped the job yet."""
        return self.stopped_by is None and self._limit is not None and time.monotonic() > self._limit

    def is_overdue(self, more_s: float = 0.0) -> bool:
        """Tell whether ranks that are left have had their grace, and so many seconds more."""
        return self._grace_until is not None and time.monotonic() > self._grace_until + more_s

    def result(self) -> RankFailure | int | None:
        """Return the failure that ended the job or its exit code, once all ranks have ended.

        Returns 75 where ranks left so, 128 + n or 124 where the job was stopped (with the failure of a rank that did
        not manage to end in order); ``None`` where no rank has told or shown a failure.
        """
        failure = self._failure()
        if self.stopped_by is not None:
            if failure is not None and failure.exit_code == ExitCode.PREEMPTED:
                return failure
            return stopped_result(
                code_of_signal(self.stopped_by) if self.stopped_by else ExitCode.TIMEOUT, self._records
            )
        return failure

    def _failure(self) -> RankFailure | None:
        records = {rank: record.exit_code for rank, record in self._records.items()}
        codes = {**self._terminated, **self._codes, **records}
        if not codes:
            return None
        failure = first_failure(codes, self._records)
        if self._is_ended_by_others and failure.record is not None and failure.record.lost_peer:
            return first_failure(self._terminated, {})  # the peer that was lost
        return replace(failure, suspects=self._suspects())

    def _suspects(self) -> str:
        """Tell which ranks may be the lost peer of one that failed."""
        groups = ((self._left, "left with code 0"), (self._lasting, "went on, and may hang"))
        return ", and ".join(
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))} {how}" for ranks, how in groups if ranks
        )


@contextmanager
def caught_signals() -> Iterator[Callable[[], list[tuple[int, bool]]]]:
    """Collect the signals that come while the block runs. What was ignored before (nohup) stays so.

    Returns a function that takes out what has come: each signal's number, and whether it ends the job (INT, TERM, HUP
    and QUIT) or means something to the ranks (USR1 and USR2).
    """
    before = {number: signal.getsignal(number) for number in (*_STOPPING, *_PASSED_ON)}
    come: deque[int] = deque()

    def take() -> list[tuple[int, bool]]:
        return [(number, number in _STOPPING) for number in (come.popleft() for _ in range(len(come)))]

    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: come.append(number))
    try:
        yield take
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
