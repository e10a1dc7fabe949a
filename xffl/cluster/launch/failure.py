"""Failures of ranks: a small record from each rank to the launcher, and the rule for which one was first.

When one rank fails, the others soon fail too, with "connection closed by peer" and the like. The launcher shows the
first failure alone, so ranks print no traceback but write a record, and :func:`first_failure` picks one.
"""

from __future__ import annotations

import json
import signal
import time
import traceback
from collections.abc import Container, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from xffl.cluster.exit_codes import ExitCode, code_of_signal
from xffl.errors import XfflError

__all__ = [
    "FailureRecord",
    "RankFailure",
    "describe_failure",
    "first_failure",
    "note_failure",
    "read_failure",
    "record_failure",
    "stopped_result",
]

_LOST_PEER = (
    "broken pipe",
    "connection closed by peer",
    "connection refused",
    "connection reset",
    "connection was closed",
    "connection was likely closed",
    "dead peer",
    "failed to recv",
    "remote process exited",
    "socket closed",
    "timed out waiting",
)
"""What gloo, NCCL and the store say, in lower case, when another rank has gone."""

_NOTED_AT = "_xffl_noted_at"


@dataclass(frozen=True)
class FailureRecord:
    """What a rank writes about the exception that ended it."""

    time: float
    """When the rank had failed, in seconds since the epoch."""
    exit_code: int
    headline: str
    """The exception in one line; empty for a rank that left by ``sys.exit``."""
    traceback: str
    is_xffl: bool
    """Whether it is an :class:`~xffl.errors.XfflError`, which needs no traceback to be understood."""
    lost_peer: bool
    """Whether it only says that another rank has gone."""


@dataclass(frozen=True)
class RankFailure:
    """The failure that ended a job."""

    rank: int
    exit_code: int
    """What the launcher exits with: the rank's own code, or 128 + n after signal n."""
    record: FailureRecord | None
    """What the rank wrote; ``None`` where it was killed or left by ``os._exit``."""
    suspects: str = ""
    """Where it only lost a peer: the ranks that may be the one, in words."""

    def describe(self) -> str:
        """Return in words how the rank ended."""
        if self.record is not None and self.record.headline:
            suspects = f"; {self.suspects}" if self.record.lost_peer and self.suspects else ""
            return f"failed with {self.record.headline}{suspects}"
        if self.record is None and self.exit_code > 128:
            number = self.exit_code - 128
            name = signal.Signals(number).name if number in set(signal.Signals) else "a signal"
            return f"was killed by {name} (signal {number})"
        return f"exited with code {self.exit_code}"


def note_failure(error: BaseException) -> None:
    """Note on an exception that it has happened by now, if nobody has before.

    Whoever tears connections down while an exception passes calls this first: what the other ranks then fail with is
    later by the clock.
    """
    if not hasattr(error, _NOTED_AT):
        setattr(error, _NOTED_AT, time.time())


def describe_failure(error: BaseException, *, skip: Container[str] = ()) -> FailureRecord:
    """Describe what ended this rank."""
    note_failure(error)
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in skip:
        frames = frames.tb_next
    leaves = isinstance(error, SystemExit)
    return FailureRecord(
        time=getattr(error, _NOTED_AT),
        exit_code=_exit_code(error),
        headline="" if leaves else f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": "),
        traceback="" if leaves else "".join(traceback.format_exception(type(error), error, frames)),
        is_xffl=isinstance(error, XfflError),
        lost_peer=any(sign in str(link).lower() for link in _chain(error) for sign in _LOST_PEER),
    )


def record_failure(record: FailureRecord, folder: str, rank: int) -> None:
    """Write what ended this rank where the launcher finds it."""
    file = _file(folder, rank)
    file.with_suffix(".new").write_text(json.dumps(asdict(record)))
    file.with_suffix(".new").replace(file)  # whole, or not at all: the rank may be killed meanwhile


def read_failure(folder: str, rank: int) -> FailureRecord | None:
    """Read what :func:`record_failure` has written.

    Returns the record; ``None`` where the rank wrote none, or was killed while it did.
    """
    try:
        return FailureRecord(**json.loads(_file(folder, rank).read_text()))
    except (FileNotFoundError, ValueError):
        return None


def _file(folder: str, rank: int) -> Path:
    return Path(folder, f"{rank}.json")


def first_failure(exit_codes: Mapping[int, int], records: Mapping[int, FailureRecord]) -> RankFailure:
    """Pick the failure that the others followed from.

    That is the earliest of the ranks that failed by themselves; where every record only tells of a lost peer, a rank
    that died without a word was that peer. Ranks ended by SIGTERM come last, since the launcher ends the survivors so.
    """

    def order(rank: int) -> tuple[int, float, int]:
        record = records.get(rank)
        if record is None:
            return (4 if exit_codes[rank] == -signal.SIGTERM else 2, 0.0, rank)
        return (3 if record.lost_peer else 1, record.time, rank)

    rank = min(exit_codes, key=order)
    record, code = records.get(rank), exit_codes[rank]
    if record is not None:
        return RankFailure(rank, record.exit_code, record)
    return RankFailure(rank, code_of_signal(-code) if code < 0 else code, None)


def stopped_result(exit_code: int, records: Mapping[int, FailureRecord]) -> RankFailure | int:
    """Tell how a job that was stopped has ended.

    Ranks may fail on their way out, such as by a full disk while they write their last checkpoint. That is no reason
    for another code, but is to be told.

    Returns the earliest failure that is more than a lost peer, an interruption or an exit as asked, with that code; the
    code alone where there is none.
    """
    expected = (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)
    failed = {
        rank: record
        for rank, record in records.items()
        if record.headline and not record.lost_peer and record.exit_code not in expected
    }
    if not failed:
        return int(exit_code)
    return replace(first_failure(dict.fromkeys(failed, exit_code), failed), exit_code=exit_code)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        if error.code is None:
            return ExitCode.OK
        return error.code & 0xFF if isinstance(error.code, int) else ExitCode.FAILED
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    return ExitCode.REFUSED if isinstance(error, XfflError) else ExitCode.FAILED


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
