"""A folder that stays the same while it is read, although a save replaces it or a rotation deletes it meanwhile.

A save gives a new folder the name of the old one, so a reader that looks up the name for each file may get files of two
saves. :class:`OpenFolder` looks the name up once and opens all files relative to that descriptor. What was opened stays
readable after it was deleted, on local file systems and on most others; where it does not, the reader notices that the
name now belongs to another folder, and :func:`read_again_if_replaced` starts over.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from xffl.errors import CheckpointError, ConfigError, ReplacedError
from xffl.files import read_limited
from xffl.json_text import JSON_LIMIT

__all__ = ["TRIES", "OpenFolder", "aside", "read_again_if_replaced"]

T = TypeVar("T")
F = TypeVar("F", bound="OpenFolder")

TRIES = 5
"""How often a reader begins before it gives up, where each time the folder was replaced while it was read"""
HELD_FILES = 128
"""Files that a folder holds open at most; a process may open 1,024 on most systems"""
LOOKS = 20
"""How often a name is looked up that a save moves aside and gives to another folder at the same time"""
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""What a name answers that belongs to nothing any more"""


def aside(path: Path) -> Path:
    """Return where a folder lies while a new one takes its name."""
    return path.with_name(f".{path.name}.old")


class OpenFolder:
    """A folder that is held open; local.

    :param path: Its name, under which it may be replaced. Between the two renames of a save it lies aside, and is
        opened there if it is whole.
    :param marks: Names of files, one of which a whole folder has.
    :raises FileNotFoundError: if there is none.
    """

    def __init__(self, path: Path, marks: Sequence[str]) -> None:
        self.name = path
        self._marks = marks
        self._files: dict[str, BinaryIO] = {}
        self._handle, self.path = self._find()

    def __enter__(self: F) -> F:
        """Return the folder."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Close all files and the folder; a second call does nothing."""
        while self._files:
            self._files.popitem()[1].close()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """Yield a file of the folder, at its start; one reader at a time.

        It stays open until :meth:`close`, while there are not too many, so that it can be read again.
        """
        held = self._files.get(name)
        if held is None:
            held = self._open(name)
            if len(self._files) >= HELD_FILES:
                with held:
                    yield held
                return
            self._files[name] = held
        held.seek(0)
        yield held

    def hold(self, names: Iterable[str]) -> None:
        """Open files now that are read later, so that they cannot be deleted between; those that are not there wait."""
        for name in names:
            if len(self._files) >= HELD_FILES:
                return
            try:
                with self.open(name):
                    pass
            except OSError as error:
                if error.errno == errno.EMFILE:  # the rest is opened when it is read
                    return
                if not isinstance(error, FileNotFoundError):
                    raise

    def read_bytes(self, name: str, limit: int = JSON_LIMIT) -> bytes:
        """Return what a file holds; an OSError says so where that is more than ``limit`` bytes."""
        with self.open(name) as stream:
            return read_limited(stream, self.path / name, limit)

    def has(self, name: str) -> bool:
        """Tell whether the folder has a file of this name."""
        return _has(self._handle, name)

    @property
    def descriptor_path(self) -> Path:
        """A path of the folder that is held open, whatever its name is now, for libraries that open files by path."""
        return Path(f"/proc/self/fd/{self._handle}")

    def is_replaced(self) -> bool:
        """Tell whether the name belongs to another folder now, or to none."""
        try:
            mine = os.fstat(self._handle)
        except OSError as error:
            return error.errno == errno.ESTALE  # what NFS answers for what another host has deleted
        for path in (self.name, aside(self.name)):
            try:
                there = os.stat(path)
            except OSError as error:
                if error.errno in GONE:
                    continue
                return False
            return (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino)
        return True

    @contextmanager
    def noticing_replacement(self) -> Iterator[None]:
        """Raise :class:`~xffl.errors.ReplacedError` in place of an error of the block, if the folder was replaced."""
        try:
            yield
        except (Exception, CheckpointException) as error:  # the latter, of DCP, is a BaseException
            if isinstance(error, (ReplacedError, ConfigError)) or not self.is_replaced():
                raise
            raise _replaced(self.name, error) from error

    def check_not_replaced(self) -> None:
        """Raise :class:`~xffl.errors.ReplacedError` if the name belongs to another folder now.

        Where all ranks have opened a folder before one of them calls this, and it raises on none, all have the same.
        """
        if self.is_replaced():
            raise _replaced(self.name, None)

    def _find(self) -> tuple[int, Path]:
        """Open the folder, under its name or aside."""
        # A save may move the folder between two looks: the name is free, and a moment later what lay aside is gone.
        for _ in range(LOOKS):
            with suppress(FileNotFoundError):
                return os.open(self.name, os.O_RDONLY | os.O_DIRECTORY), self.name
            old = aside(self.name)
            with suppress(FileNotFoundError):
                handle = os.open(old, os.O_RDONLY | os.O_DIRECTORY)
                if any(_has(handle, mark) for mark in self._marks):
                    return handle, old
                os.close(handle)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.name))

    def _open(self, name: str) -> BinaryIO:
        # Without O_NONBLOCK a FIFO in the place of a file would wait for a writer for ever.
        handle = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._handle)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise OSError(errno.EINVAL, "it is no regular file", str(self.path / name))
        return os.fdopen(handle, "rb")


def read_again_if_replaced(read: Callable[[], T]) -> T:
    """Call a reader, and call it again where what it read was replaced meanwhile; local."""
    for _ in range(TRIES - 1):
        with suppress(ReplacedError):
            return read()
    try:
        return read()
    except ReplacedError as error:
        raise ReplacedError(f"{error} (so in {TRIES} tries)") from error


def _replaced(path: Path, error: BaseException | None) -> CheckpointError:
    reason = "" if error is None else f" ({type(error).__name__}: {error})"
    return ReplacedError(
        f"{path} was replaced or deleted by another process while it was read{reason}; read it again, or give one that "
        "nothing replaces"
    )


def _has(handle: int, name: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=handle).st_mode)
    except FileNotFoundError:
        return False
