"""Failures of ranks, exit codes, the end of a job, and which cells of an elastic run have not ended.

When one rank fails, the others soon fail too, with "connection closed by peer" and the like. The launcher shows the
first failure alone, so ranks print no traceback but write a record, and :func:`first_failure` picks one.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields, replace
from enum import IntEnum
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from xffl.callers import is_of_package, is_of_python, is_of_script
from xffl.checks import decimal, visible
from xffl.cluster.recognition.refusals import told_rank
from xffl.compat.datasets import ENVIRON
from xffl.errors import ConfigError, TopologyError, XfflError, public_name
from xffl.files import read_bytes, write_whole
from xffl.json_text import parse_json
from xffl.reading import Fields

__all__ = [
    "ExitCode",
    "FailureRecord",
    "JobWatch",
    "RankFailure",
    "caught_signals",
    "code_of_lost_output",
    "code_of_signal",
    "describe_failure",
    "find_place",
    "first_failure",
    "is_left_to_others",
    "is_noted_alike",
    "is_of_all",
    "is_only_lost_peer",
    "leave_together",
    "line_of",
    "note_alike",
    "note_end",
    "note_failure",
    "note_first",
    "note_hint",
    "note_unmet",
    "parse_failure",
    "read_failure",
    "record_failure",
    "tell_unmet",
    "text_of",
]


class ExitCode(IntEnum):
    """How a job or a rank ended, where it did not choose a code of its own."""

    OK = 0
    FAILED = 1  # a rank raised, or left with a message
    REFUSED = 2  # An XfflError: what was asked for cannot be done. Starting again changes nothing
    PREEMPTED = 75  # asked to leave early: a checkpoint is written; starting the same command again goes on from it
    TIMEOUT = 124  # --timeout was over
    INTERRUPTED = 130  # Ctrl-C
    BROKEN_PIPE = 141  # the reader of standard output has closed it


def code_of_lost_output(error: OSError) -> ExitCode | None:
    """Return the exit code where what this process prints can no longer be written; ``None`` for other errors.

    What is still to be written goes nowhere: Python would complain once more when it flushes at exit.
    """
    code, streams = ExitCode.FAILED, [sys.stdout]
    if isinstance(error, BrokenPipeError):  # the reader has closed the pipe ("xffl plan ... | head")
        code, streams = ExitCode.BROKEN_PIPE, [sys.stdout, sys.stderr]
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        print(f"xffl: {error}", file=sys.stderr)
    else:
        return None
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream.fileno())
    return code


def code_of_signal(number: int) -> int:
    """Return the exit code that stands for an end by a signal, as a shell does."""
    return 128 + number


_SIGNS = (
    *("broken pipe", "connection closed by peer", "connection refused", "connection reset", "connection was closed"),
    *("connection was likely closed", "dead peer", "failed to recv", "remote process exited", "socket closed"),
    *("timed out waiting", "was lost in the middle of a message", "another rank of the job has ended"),
)
"""What gloo, NCCL, the store, and xffl between worlds say, in lower case, when another rank was lost. The script's own
connections to others end in the same words: :func:`_tells_of_lost_peer` finds out who has said them."""
_NEVER_OF_PEERS = (ConfigError, TopologyError)
_TORCH = f"{os.sep}torch{os.sep}distributed{os.sep}"

_MAX_BYTES = 2**24
"""Of a record; its traceback may be long"""
_NOTED_AT = "_xffl_noted_at"
_HINT = "_xffl_hint"
_FIRST = "_xffl_first"
_IS_SPEAKER = "_xffl_is_speaker"
_IS_OF_ALL = "_xffl_is_of_all"
_UNMET = "_xffl_unmet"
QUIET_S = 2.0
"""How long ranks stay that raise the same error: many launchers end all ranks when one has left, which may be before
the one that tells the error has done so, and the exit code of a rank that was ended is that of the signal."""


@dataclass(frozen=True)
class FailureRecord:
    """What a rank writes about the exception that ended it."""

    time: float  # when the rank had failed, in seconds since the epoch
    exit_code: int
    headline: str  # the exception in one line; empty for a rank that left by sys.exit
    traceback: str
    is_xffl: bool  # whether it is an XfflError, which needs no traceback to be understood
    lost_peer: bool  # whether it says that another rank was lost
    place: str = ""  # the line of the script, FILE:LINE, that an XfflError came through
    has_cause: bool = False  # whether it is an XfflError with which the script answers another error, to be shown too

    @property
    def text(self) -> str:
        """The exception in one line, with the line of the script where there is no traceback to show it."""
        return f"{self.headline} (at {self.place})" if self.place else self.headline


@dataclass(frozen=True)
class RankFailure:
    """The failure that ended a job."""

    rank: int
    exit_code: int  # what the launcher exits with: the rank's own code, or 128 + n after signal n
    record: FailureRecord | None  # what the rank wrote; None where it was killed or left by os._exit
    suspects: str = ""  # where it only lost a peer: the ranks that may be the one, in words

    def describe(self) -> str:
        """Return in words how the rank ended."""
        if self.record is not None and self.record.headline:
            suspects = f"; {self.suspects}" if self.record.lost_peer and self.suspects else ""
            return f"failed with {self.record.text}{suspects}"
        if self.record is None and self.exit_code > 128:
            number = self.exit_code - 128
            name = signal.Signals(number).name if number in set(signal.Signals) else "a signal"
            return f"was killed by {name} (signal {number})"
        return f"exited with code {self.exit_code}"


def note_failure(error: BaseException) -> None:
    """Note when an exception happened, once; who closes connections while it passes calls this first."""
    if _noted(error, _NOTED_AT) is None:
        _note(error, _NOTED_AT, time.time())


def note_hint(error: BaseException, hint: str) -> None:
    """Note what the user may do about an exception of Python itself; it is printed with the exception's text."""
    _note(error, _HINT, hint)


def note_first(error: BaseException, first: str) -> None:
    """Note which rank has failed first, on the exception of one that has only lost another, to be printed with it."""
    _note(error, _FIRST, first)


def note_end(error: BaseException) -> None:
    """Let the hook that a session has set for uncaught exceptions ask the other ranks about an error, if there is one.

    Rooms that do not import torch call this; see :mod:`xffl.distributed.failures.uncaught`.
    """
    ask = getattr(sys.excepthook, "note_end", None)
    if ask is not None:
        ask(error)


def _note(error: BaseException, name: str, value: object) -> None:
    """Note something on an exception, also on one whose class refuses attributes, as a frozen dataclass does."""
    object.__setattr__(error, name, value)


def _noted(error: BaseException, name: str) -> Any:
    """Return what was noted on an exception, without asking its class; ``None`` if nothing was."""
    try:
        return object.__getattribute__(error, name)
    except AttributeError:
        return None


def text_of(error: BaseException) -> str:
    """Return the text of an exception; that it has none where its own ``__str__`` fails."""
    try:
        return str(error)
    except Exception as wrong:  # noqa: BLE001 - it must not hide the exception that is reported
        return f"(its text cannot be made: {type(wrong).__name__})"


def describe_failure(error: BaseException, *, skip: Container[str] = ()) -> FailureRecord:
    """Describe what ended this rank."""
    note_failure(error)
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in skip:
        frames = frames.tb_next
    leaves, is_xffl = isinstance(error, SystemExit), isinstance(error, XfflError)
    advice = _noted(error, _HINT)
    hint = "" if advice is None else f". HINT: {advice}"
    first = "" if (note := _noted(error, _FIRST)) is None else f"; {note}"
    text = f"{public_name(error)}: {' '.join(text_of(error).split())}".removesuffix(": ")
    headline = visible(f"{text}{first}{hint}")
    return FailureRecord(
        time=_noted(error, _NOTED_AT),
        exit_code=_exit_code(error),
        headline="" if leaves else headline,
        traceback="" if leaves else "".join(traceback.format_exception(type(error), error, frames)),
        is_xffl=is_xffl,
        lost_peer=any(map(_tells_of_lost_peer, _chain(error))),
        place=(find_place(error.__traceback__) or "") if is_xffl else "",
        has_cause=is_xffl and _answers_another(error),
    )


def find_place(traceback: TracebackType | None) -> str | None:
    """Find the line of the script, ``FILE:LINE``, that a traceback goes through last; ``None`` where there is none."""
    place = None
    while traceback is not None:
        frame, path = traceback.tb_frame, traceback.tb_frame.f_code.co_filename
        # Code without a file is the script's own with -c and on standard input; dataclasses make some, too.
        if is_of_script(path) and (not path.startswith("<") or frame.f_globals.get("__name__") == "__main__"):
            place = f"{path}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return None if place is None else place.removeprefix(f"{os.getcwd()}{os.sep}")


def _answers_another(error: BaseException) -> bool:
    """Tell whether code outside xffl has raised an error because of one that is none of xffl's.

    What xffl raises says in its own text what it follows from; what the script raises need not.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    is_own = frames is not None and is_of_package(frames.tb_frame.f_code.co_filename)
    return not is_own and any(not isinstance(link, XfflError) for link in _chain(error))


def is_only_lost_peer(error: BaseException) -> bool:
    """Tell whether an exception and all that led to it say no more than that another rank was lost."""
    links = list(_chain(error))
    verdicts = list(map(_tells_of_lost_peer, links))
    return any(verdicts) and all(
        verdict or isinstance(link, XfflError) for verdict, link in zip(verdicts, links, strict=True)
    )


def _tells_of_lost_peer(error: BaseException) -> bool:
    """Tell whether torch.distributed, or xffl after it, says that another rank was lost.

    The script's own connections end with the same words: a tracking server that is down refuses a connection, too.
    """
    text = text_of(error).lower()
    if not any(sign in text for sign in _SIGNS) or isinstance(error, _NEVER_OF_PEERS):
        return False
    if isinstance(error, XfflError) or type(error).__module__.startswith("torch.distributed"):  # DistBackendError, ...
        return True
    if isinstance(error, RuntimeError) and "gloo" in text:  # from C++, called by whoever waits
        return True
    return _is_raised_by_torch(error.__traceback__)


def _is_raised_by_torch(frames: TracebackType | None) -> bool:
    """Tell whether the last frame that is none of Python's own library is one of torch.distributed, or of xffl."""
    is_theirs = False
    while frames is not None:
        path = frames.tb_frame.f_code.co_filename
        if not is_of_python(path):
            is_theirs = _TORCH in path or is_of_package(path)
        frames = frames.tb_next
    return is_theirs


def note_alike(error: BaseException, *, is_speaker: bool, is_of_all: bool = True) -> None:
    """Note once who tells an error that other ranks may raise, too.

    ``is_speaker``: whether this rank tells it when it ends; ``is_of_all``: whether all ranks are known to raise it.
    """
    note_failure(error)
    if not is_noted_alike(error):
        _note(error, _IS_SPEAKER, is_speaker)
        _note(error, _IS_OF_ALL, is_of_all)


def is_noted_alike(error: BaseException) -> bool:
    """Tell whether it is known who of the ranks tells an error."""
    return _noted(error, _IS_SPEAKER) is not None


def is_of_all(error: BaseException) -> bool:
    """Tell whether all ranks are known to raise an error, so that one line of one rank says enough of it."""
    return _noted(error, _IS_OF_ALL) is True


def note_unmet(error: BaseException, rank: int, *, is_speaker: bool) -> None:
    """Note that a rank raises an error before it has met the others, who cannot hear of it and may raise it, too.

    The speaker tells it in one line; each of the others tells its first words, so that an error of one rank is not lost
    and those of thousands leave no thousands of tracebacks.
    """
    if not is_noted_alike(error):
        note_alike(error, is_speaker=is_speaker)
        if not is_speaker:
            _note(error, _UNMET, rank)


def line_of(error: BaseException, record: FailureRecord) -> str | None:
    """Return the line by which this rank tells an error of xffl; ``None`` where it is left to another rank."""
    if not is_left_to_others(error):
        return f"xffl: {record.text}"
    rank = _noted(error, _UNMET)
    return None if rank is None else f"xffl: rank {rank} has not met the others: {_first_words(record.headline)}"


def tell_unmet(error: XfflError, environ: Mapping[str, str] = ENVIRON) -> None:
    """Report an error from before this process has met others, and wait until they have reported theirs, if any.

    Where a launcher has started several, rank 0 tells all of it and the others its first words.
    """
    if is_noted_alike(error):  # the ranks have met
        line = line_of(error, describe_failure(error))
        if line is not None:
            print(line, file=sys.stderr, flush=True)
        leave_together(error)
        return
    rank = told_rank(environ)
    text = visible(f"{public_name(error)}: {error}")
    if not rank:
        print(f"xffl: {text}", file=sys.stderr, flush=True)
    else:
        print(f"xffl: rank {rank} has not met the others: {_first_words(text)}", file=sys.stderr, flush=True)
    if rank is not None and decimal(environ.get("WORLD_SIZE", "")) != 1:
        note_unmet(error, rank, is_speaker=rank == 0)
        leave_together(error)


def _first_words(text: str) -> str:
    """Return what a message says is wrong, without what to do about it: up to the first semicolon not in brackets."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == ";" and depth <= 0:
            return text[:at]
    return text


def leave_together(error: BaseException) -> None:
    """Wait until all ranks that raise the same error may leave: a moment after they have."""
    if is_noted_alike(error):
        time.sleep(max(0.0, _noted(error, _NOTED_AT) + QUIET_S - time.time()))


def is_left_to_others(error: BaseException) -> bool:
    """Tell whether another rank tells this error, which several raise, so that this one says nothing when it ends."""
    return _noted(error, _IS_SPEAKER) is False


def record_failure(record: FailureRecord, folder: str, rank: int) -> None:
    """Write what ended this rank where the launcher finds it."""
    write_whole(_file(folder, rank), json.dumps(asdict(record)))  # the rank may be killed meanwhile


def read_failure(folder: str, rank: int) -> FailureRecord | None:
    """Read what :func:`record_failure` has written; ``None`` where the rank wrote none, or was killed while it did."""
    try:
        return parse_failure(parse_json(read_bytes(_file(folder, rank), _MAX_BYTES)))
    except (OSError, ValueError):
        return None


def parse_failure(content: Any) -> FailureRecord | None:
    """Return the record that a rank has printed, as JSON holds it; ``None`` where it is none, as a script may print."""
    readers: dict[str, Callable[[Fields, str], Any]] = {
        "float": Fields.number,
        "int": partial(Fields.integer, minimum=-(2**31), maximum=2**31),
        "str": partial(Fields.text, limit=_MAX_BYTES),
        "bool": Fields.boolean,
    }
    try:
        values = Fields(content, "the record of a rank")
        # A record of another version may lack what has a default, or have more.
        known = [one for one in fields(FailureRecord) if one.name in values or one.default is MISSING]
        return FailureRecord(**{one.name: readers[str(one.type)](values, one.name) for one in known})
    except ConfigError:
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
    own_code = code_of_signal(-code) if code < 0 else code
    return RankFailure(rank, own_code if record is None else record.exit_code, record)


def stopped_result(exit_code: int, records: Mapping[int, FailureRecord]) -> RankFailure | int:
    """Return the code of a job that was stopped, with the earliest failure of a rank on its way out, if any."""
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
        code = ExitCode.OK if error.code is None else error.code
        return code & 0xFF if isinstance(code, int) else ExitCode.FAILED
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


# The end of a job, as a launcher sees it ------------------------------------------------------------------------------


_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


class JobWatch:
    """Collects how ranks end, and tells when the rest is to be ended."""

    def __init__(self, timeout_s: float | None, grace_s: float) -> None:
        self.grace_s = grace_s
        self.stopped_by: int | None = None  # the signal that stopped the job, or 0 for the time limit
        self._limit = None if timeout_s is None else time.monotonic() + timeout_s
        self._grace_until: float | None = None
        self._records: dict[int, FailureRecord] = {}
        self._codes: dict[int, int] = {}
        self._terminated: dict[int, int] = {}  # the same of ranks ended by SIGTERM
        self._is_ended_by_others = False  # whether it is known that another than the launcher sent that SIGTERM
        self._left: set[int] = set()
        self._lasting: set[int] = set()

    def add_record(self, rank: int, record: FailureRecord) -> None:
        """Take over what a rank has reported of its failure."""
        self._records[rank] = record
        if not record.lost_peer:
            self.start_grace()

    def add_code(self, rank: int, code: int, *, is_own: bool = False) -> None:
        """Take over that a rank has ended, with -n after signal n; of ranks that left no record the first counts.

        The launcher ends the others, by SIGTERM, which counts only where there is no other end.
        """
        if rank not in self._records and code != -signal.SIGTERM and not self._codes:
            self._codes[rank] = code
        elif rank not in self._records and code == -signal.SIGTERM and not self._terminated:
            self._terminated[rank] = code
            self._is_ended_by_others = is_own
        self.start_grace()

    def add_left(self, rank: int) -> None:
        """Note that a rank has left with code 0 before any was asked to end: others may still wait for it."""
        self._left.add(rank)

    def add_lasting(self, ranks: Iterable[int]) -> None:
        """Take over which ranks went on after others had lost a peer, until all were asked to end."""
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
        """Return the failure that ended the job or its exit code, once all ranks have ended; ``None`` if none failed.

        It is 75 where ranks left so, 128 + n or 124 where the job was stopped (with a failure on the way out, if any).
        """
        failure = self._failure()
        if self.stopped_by is None or (failure is not None and failure.exit_code == ExitCode.PREEMPTED):
            return failure
        return stopped_result(code_of_signal(self.stopped_by) if self.stopped_by else ExitCode.TIMEOUT, self._records)

    def _failure(self) -> RankFailure | None:
        records = {rank: record.exit_code for rank, record in self._records.items()}
        codes = {**self._terminated, **self._codes, **records}
        if not codes:
            return None
        failure = first_failure(codes, self._records)
        if self._is_ended_by_others and failure.record is not None and failure.record.lost_peer:
            return first_failure(self._terminated, {})  # the peer that was lost
        # Which ranks may be the peer that was lost.
        groups = ((sorted(self._left), "left with code 0"), (sorted(self._lasting), "went on, and may hang"))
        endings = [f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {how}" for ranks, how in groups if ranks]
        return replace(failure, suspects=", and ".join(endings))


@contextmanager
def caught_signals() -> Iterator[Callable[[], list[tuple[int, bool]]]]:
    """Collect signals while the block runs; yield what takes them out: each number, and whether it ends the job."""
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
