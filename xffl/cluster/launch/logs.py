"""Logs of ranks: lines cut from pieces, messages in marked lines, a file for each rank, and one stream of them all."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from xffl.errors import ConfigError
from xffl.files import create
from xffl.json_text import parse_json

if TYPE_CHECKING:
    from xffl.cluster.launch.merged_lines import MergedLines

__all__ = [
    "LineBuffer",
    "MarkedLines",
    "Message",
    "RankFile",
    "RankLines",
    "Stream",
    "following",
    "line_prefix",
    "list_rank_files",
    "make_log_dir",
    "mark",
    "rank_lines",
    "redirect",
]

_LONGEST_BYTES = 1 << 16


class LineBuffer:
    """Cuts at each newline, and at each carriage return, with which a progress bar begins anew.

    What has no end is kept until it has one or is 64 KiB long, so that an endless line costs neither memory nor time.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Take the next piece; return the lines that are complete now, and what is too long to be kept."""
        lines = (self._rest + piece).splitlines(keepends=True)  # of bytes: at \n, \r and \r\n alone
        # A carriage return that comes last may be half of the end of a line.
        self._rest = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        if len(self._rest) > _LONGEST_BYTES:
            lines.append(self.flush())
        return lines

    def flush(self) -> bytes:
        """Return what has no end yet, and forget it."""
        rest = self._rest
        self._rest = b""
        return rest


# Messages of ranks on other hosts, in marked lines on standard error --------------------------------------------------


_MARK = b"\x1exffl:"
_LINE_BYTES = 600
_TEXT_CHARACTERS = 60_000  # longer texts, such as tracebacks of endless recursion, lose their middle
_LABEL = re.compile(rb"^ *\d+: $")  # what srun --label puts before each line


class Message(NamedTuple):
    """What a rank reported."""

    rank: int
    content: dict[str, Any]


def mark(rank: int, content: Mapping[str, Any]) -> list[bytes]:
    """Write a message as marked lines, each short enough to be written to a pipe in one go."""
    packed = base64.b64encode(json.dumps(_shortened(content)).encode())
    parts = [packed[at : at + _LINE_BYTES] for at in range(0, len(packed), _LINE_BYTES)]
    return [b"%s%d.%d.%d:%s\n" % (_MARK, rank, at, len(parts), part) for at, part in enumerate(parts)]


class MarkedLines:
    """Takes messages out of a stream of lines in which those of several ranks may alternate."""

    def __init__(self) -> None:
        self._parts: dict[int, list[bytes]] = {}

    def take(self, line: bytes) -> tuple[bytes, Message | None]:
        """Read one line; return what of it is no message, and the message that is complete now, if any."""
        before, mark, rest = line.partition(_MARK)
        if not mark:
            return line, None
        before = b"" if not before or _LABEL.match(before) else before + b"\n"
        try:
            place, _, part = rest.rstrip(b"\r\n").partition(b":")
            rank, at, count = (int(number) for number in place.split(b"."))
            parts = self._parts.setdefault(rank, [])
            if at == 0:
                parts.clear()
            parts.append(part)
            if at + 1 < count:
                return before, None
            del self._parts[rank]
            content = parse_json(base64.b64decode(b"".join(parts), validate=True))
            return (before, Message(rank, content)) if isinstance(content, dict) else (line, None)
        except ValueError:  # a script that prints such a thing itself
            return line, None


def _shortened(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _TEXT_CHARACTERS:
        half = _TEXT_CHARACTERS // 2
        return f"{value[:half]}\n... {len(value) - 2 * half} characters are left out ...\n{value[-half:]}"
    if isinstance(value, Mapping):
        return {key: _shortened(inner) for key, inner in value.items()}
    return value


# Files ----------------------------------------------------------------------------------------------------------------


_NAME = re.compile(r"rank_([0-9]+)(?:_cell_([0-9]+))?\.log")
# In an elastic run each cell has a folder, with one for each time it was started; very many ranks have several.
_FOLDER = re.compile(r"(?:ranks|cell|life)_([0-9]+)")
_FILES_PER_FOLDER = 256
_POLL_S = 0.2
_FILES_PER_S = 1000  # files that are looked at, at most: a folder may be on a file system that many share
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, order=True)
class RankFile:
    """The log file of one rank."""

    rank: int
    cell: int | None = field(compare=False)  # None where the cells were not known when the rank was started
    folder: Path = field(compare=False)

    @classmethod
    def of_job(cls, rank: int, cell: int | None, folder: Path, world_size: int) -> RankFile:
        """Return the file of a rank of a job: with more than 256 ranks in a folder of 256, ``ranks_00512``."""
        if world_size > _FILES_PER_FOLDER:
            folder = folder / f"ranks_{rank - rank % _FILES_PER_FOLDER:05d}"
        return cls(rank, cell, folder)

    @property
    def path(self) -> Path:
        """Where it lies."""
        cell = "" if self.cell is None else f"_cell_{self.cell}"
        return self.folder / f"rank_{self.rank:05d}{cell}.log"


def make_log_dir(folder: str) -> str:
    """Make the folder of the log files, so that a mistake is reported before a rank is started; local."""
    path = os.path.abspath(folder)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--log-dir {folder!r} cannot be made: {error.strerror}; give another folder") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"--log-dir {folder!r} cannot be written; give another folder")
    return path


def list_rank_files(folder: Path) -> tuple[RankFile, ...]:
    """List the log files of a folder and of those in it that are for 256 ranks, or a cell of an elastic run, each."""
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise ConfigError(f"folder {str(folder)!r} cannot be read: {error.strerror}; give that of --log-dir") from error
    matches = [match for match in map(_NAME.fullmatch, names) if match is not None]
    rank_files = [RankFile(int(name[1]), None if name[2] is None else int(name[2]), folder) for name in matches]
    inner = sorted((int(match[1]), match[0]) for match in map(_FOLDER.fullmatch, names) if match is not None)
    return (*sorted(rank_files), *(file for _, name in inner for file in list_rank_files(folder / name)))


def redirect(file: RankFile) -> int:
    """Send standard output and error of this process to a log file from now on; what the file holds stays."""
    try:
        file.folder.mkdir(parents=True, exist_ok=True)
        log = create(file.path, "append")
    except OSError as error:
        why = f"cannot be written: {error.strerror}"
        raise ConfigError(f"log file {file.path} {why}; give another --log-dir") from error
    with log:
        before = os.dup(2)
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    return before


def line_prefix(rank: int, cell: int | None) -> bytes:
    """Return what stands before a rank's lines where several ranks' are shown, such as ``[cell 0 rank 3]``."""
    return b"[rank %d] " % rank if cell is None else b"[cell %d rank %d] " % (cell, rank)


class RankLines:
    """Writes lines of ranks to a stream as they come."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def write(self, rank: int | None, prefix: bytes, line: bytes) -> None:
        """Take a line of a rank, if it is known whose it is, with what is to stand before it."""
        self._out.write(prefix + line)

    def tell(self) -> None:
        """Say what is due of lines that were not written; to be called now and then."""

    def end(self) -> None:
        """Say all that is left to say; no line comes any more."""


_MANY_RANKS = 64


def rank_lines(out: BinaryIO, world_size: int) -> RankLines | MergedLines:
    """Return what writes the lines of a job's ranks; of more than 64 ranks it shortens them."""
    if world_size <= _MANY_RANKS:
        return RankLines(out)
    from xffl.cluster.launch.merged_lines import MergedLines

    return MergedLines(out)


def sizes_now(folder: Path) -> dict[Path, int]:
    """Note how long the log files are, so that a stream can begin there."""
    return {file.path: file.path.stat().st_size for file in list_rank_files(folder)}


class Stream:
    """Copies what is added to a folder's log files, line by line with a prefix.

    Of a job of more than 64 ranks (``world_size``) what is shown is shortened, by
    :mod:`xffl.cluster.launch.merged_lines`.
    """

    def __init__(
        self,
        folder: Path,
        out: BinaryIO,
        ranks: Collection[int] | None = None,
        begin: dict[Path, int] | None = None,
        *,
        world_size: int = 1,
    ) -> None:
        self.folder = folder
        self.out = out
        self.ranks = ranks
        self._lines = rank_lines(out, world_size)
        self._read_to = dict(begin or {})
        self._buffers: defaultdict[Path, LineBuffer] = defaultdict(LineBuffer)
        self._looked_at = 0

    def copy(self, *, is_end: bool = False) -> None:
        """Copy what has come since the last call."""
        files = [file for file in list_rank_files(self.folder) if self.ranks is None or file.rank in self.ranks]
        for file in files:
            self._copy_one(file, is_end)
        self._looked_at = len(files)
        if is_end:
            self._lines.end()
        self._lines.tell()
        self.out.flush()

    def _copy_one(self, file: RankFile, is_end: bool) -> None:
        prefix, at, path = line_prefix(file.rank, file.cell), self._read_to.get(file.path, 0), file.path
        buffer = self._buffers[path]
        if os.path.exists(path) and path.stat().st_size > at:  # somebody may have removed it
            with path.open("rb") as log:
                log.seek(at)
                while chunk := log.read(_CHUNK_BYTES):
                    for line in buffer.feed(chunk):
                        self._lines.write(file.rank, prefix, line if line.endswith((b"\n", b"\r")) else line + b"\n")
                self._read_to[path] = log.tell()
        if is_end and (rest := buffer.flush()):
            self._lines.write(file.rank, prefix, rest + b"\n")

    def follow(self, wait: Callable[[float], bool]) -> None:
        """Copy until nothing more will come."""
        is_over = False
        while not is_over:
            self.copy()
            is_over = wait(max(_POLL_S, self._looked_at / _FILES_PER_S))
        self.copy(is_end=True)


@contextmanager
def following(folder: Path, out: BinaryIO, world_size: int = 1) -> Iterator[None]:
    """Show what ranks write into a folder while the block runs; if the reader closes, SIGTERM ends its ranks."""
    over = threading.Event()
    stream = Stream(folder, out, begin=sizes_now(folder), world_size=world_size)
    troubles: list[Exception] = []

    def follow() -> None:
        try:
            stream.follow(over.wait)
        except Exception as error:  # noqa: BLE001 - raised in the main thread
            troubles.append(error)
            if not over.is_set():
                os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=follow, name="xffl logs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if troubles:
        raise troubles[0]
