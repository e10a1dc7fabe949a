"""A log file for each rank, and one stream of them all with the rank and the cell before each line."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from xffl.errors import ConfigError

__all__ = ["RankFile", "Stream", "following", "line_prefix", "list_rank_files", "make_log_dir", "redirect", "sizes_now"]

_NAME = re.compile(r"rank_(\d+)(?:_cell_(\d+))?\.log")
_POLL_S = 0.2
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, order=True)
class RankFile:
    """The log file of one rank."""

    rank: int
    cell: int | None = field(compare=False)
    """Its cell; ``None`` where the cells were not known when the rank was started."""
    folder: Path = field(compare=False)

    @property
    def path(self) -> Path:
        """Where it lies."""
        cell = "" if self.cell is None else f"_cell_{self.cell}"
        return self.folder / f"rank_{self.rank:05d}{cell}.log"


def make_log_dir(folder: str) -> str:
    """Make the folder of the log files, so that a mistake is told before a rank is started; local.

    :param folder: The folder; it may exist.
    :return: Its absolute path.
    :raises ConfigError: if it cannot be made or written.
    """
    path = os.path.abspath(folder)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--log-dir {folder!r} cannot be made: {error.strerror}; give another folder") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"--log-dir {folder!r} cannot be written; give another folder")
    return path


def list_rank_files(folder: Path) -> tuple[RankFile, ...]:
    """List the log files of a folder, by rank.

    :param folder: Folder that was given as ``--log-dir``.
    :return: The files.
    :raises ConfigError: if there is no such folder.
    """
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise ConfigError(f"folder {str(folder)!r} cannot be read: {error.strerror}; give that of --log-dir") from error
    matches = [match for match in map(_NAME.fullmatch, names) if match is not None]
    found = [RankFile(int(name[1]), None if name[2] is None else int(name[2]), folder) for name in matches]
    return tuple(sorted(found))


def redirect(file: RankFile) -> int:
    """Send standard output and error of this process to a log file from now on; what the file holds stays.

    :param file: The file of this process's rank.
    :return: A file descriptor of what standard error was before, which processes started from here do not get.
    :raises ConfigError: if the file cannot be written.
    """
    try:
        file.folder.mkdir(parents=True, exist_ok=True)
        log = os.open(file.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    except OSError as error:
        raise ConfigError(
            f"log file {file.path} cannot be written: {error.strerror}; give another --log-dir"
        ) from error
    before = os.dup(2)
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    return before


def line_prefix(rank: int, cell: int | None) -> bytes:
    """Return what stands before a rank's lines where several ranks' lines are shown.

    :param rank: The rank.
    :param cell: Its cell, where it is known.
    :return: Such as ``[cell 0 rank 3]`` and a blank.
    """
    return b"[rank %d] " % rank if cell is None else b"[cell %d rank %d] " % (cell, rank)


def sizes_now(folder: Path) -> dict[Path, int]:
    """Note how long the log files are, so that a stream can begin there.

    :param folder: The folder.
    :return: Bytes of each file.
    """
    return {file.path: file.path.stat().st_size for file in list_rank_files(folder)}


class Stream:
    """Copies what is added to a folder's log files, line by line with a prefix.

    :param folder: The folder; files may still come.
    :param out: Where the lines go.
    :param ranks: Ranks whose lines are shown; ``None`` for all.
    :param begin: Where to begin in files, as :func:`sizes_now` says; others are read from their first byte on.
    """

    def __init__(
        self, folder: Path, out: BinaryIO, ranks: Collection[int] | None = None, begin: dict[Path, int] | None = None
    ) -> None:
        self.folder, self.out, self.ranks = folder, out, ranks
        self._read_to = dict(begin or {})
        self._rest: dict[Path, bytes] = {}

    def copy(self, *, is_end: bool = False) -> bool:
        """Copy what has come since the last call.

        :param is_end: Whether lines that have no end yet are to be shown, too.
        :return: Whether there was anything.
        """
        has_more = False
        for file in list_rank_files(self.folder):
            if self.ranks is None or file.rank in self.ranks:
                has_more |= self._copy_one(file, is_end)
        self.out.flush()
        return has_more

    def _copy_one(self, file: RankFile, is_end: bool) -> bool:
        prefix, at, path = line_prefix(file.rank, file.cell), self._read_to.get(file.path, 0), file.path
        has_more = False
        if path.stat().st_size > at:
            with path.open("rb") as log:
                log.seek(at)
                while chunk := log.read(_CHUNK_BYTES):
                    *lines, self._rest[path] = (self._rest.get(path, b"") + chunk).split(b"\n")
                    self.out.writelines(prefix + line + b"\n" for line in lines)
                    has_more = True
                self._read_to[path] = log.tell()
        if is_end and (rest := self._rest.pop(path, b"")):
            self.out.write(prefix + rest + b"\n")
        return has_more

    def follow(self, is_over: Callable[[], bool]) -> None:
        """Copy until nothing more will come.

        :param is_over: Tells whether all ranks have ended.
        """
        while not is_over():
            self.copy()
            time.sleep(_POLL_S)
        self.copy(is_end=True)


@contextmanager
def following(folder: Path | None, out: BinaryIO) -> Iterator[None]:
    """Show what the ranks write into a folder while the block runs, and the rest at its end.

    :param folder: The folder; ``None`` shows nothing.
    :param out: Where the lines go.
    """
    if folder is None:
        yield
        return
    over = threading.Event()
    stream = Stream(folder, out, begin=sizes_now(folder))
    thread = threading.Thread(target=stream.follow, args=(over.is_set,), name="xffl logs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
