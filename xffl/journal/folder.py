"""A journal in a folder: one file for each record, which nothing changes once it has its name.

A record is written to a temporary file beside its place, flushed to the disk, and then given its name by ``link``,
which fails if the name exists. So a number has one content, whoever tries, and its file is never seen half written:

- ``open`` with ``O_EXCL`` on the final name would not do. A process that is killed after it would leave a file without
  content, and nobody could tell whether its writer still lives.
- ``rename`` would not do either: it replaces the record that stands.

An answer of the file system says little: NFS may report that a name exists although this very call has made it, and may
report that a name is missing although it has just said that it exists. So what stands under the number is read, and its
id decides. Before a record is returned for the first time, the folder is flushed to the disk as well, whoever has
published it: its writer may have been killed between the two.

Records are never deleted. A process that is killed may leave a temporary file; the service removes those of its folder
at its start, because nobody else writes there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from xffl.errors import CheckpointError, ConfigError
from xffl.files import create, make_folders, open_regular, read_bytes, read_limited, sync
from xffl.journal.records import (
    LONGEST_RECORD,
    JournalUnreachable,
    Record,
    make_id,
    read_record,
    record_text,
)

__all__ = ["JournalFolder", "hold_folder"]

_TEMPORARY = re.compile(r"\.([0-9]{9}\.json|check)\.[0-9a-f]{32}")
_LOCK = ".lock"
_READ_AGAIN_S = 0.05
"""Seconds until a name is looked up again that exists and cannot be read: the lookup may have been cached."""
_LOOKUPS = 100
_MOST_READ = 1000
"""The most records that one call reads"""


class JournalFolder:
    """A journal in a folder that the cells share, or in one that a service keeps.

    :param path: The folder; it is made if it does not exist.
    :raises ConfigError: if the folder cannot be made or used, or its file system cannot publish a record once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._flushed = 0  # records before this number are known to be on the disk
        try:
            make_folders(path)
            self._check_links()
        except OSError as error:
            is_file = path.exists() and not path.is_dir()
            reason = "it is a file, not a folder" if is_file else error.strerror or error
            raise ConfigError(
                f"the journal's folder {path} cannot be used ({reason}); give a folder of a file system with hard "
                "links that this job may write, or use the journal of the lighthouse"
            ) from error

    def _check_links(self) -> None:
        """Raise OSError unless a name can be given once, and only once."""
        first = self._write(f".check.{make_id()}", b"1")
        second = self._write(f".check.{make_id()}", b"2")
        place = self.path / f".check.{make_id()}"
        try:
            os.link(first, place)
            with suppress(FileExistsError):
                os.link(second, place)
                raise OSError(errno.ENOTSUP, "a second link replaces the first one", str(self.path))
            if read_bytes(place, 1) != b"1":
                raise OSError(errno.EIO, "a file does not hold what was written", str(self.path))
        finally:
            for file in (first, second, place):
                file.unlink(missing_ok=True)

    @property
    def where(self) -> str:
        """The folder."""
        return str(self.path)

    def heed(self, is_stopping: Callable[[], bool] | None) -> None:
        """Do nothing: a file system is not asked again and again.

        :param is_stopping: What is not asked.
        """

    # Records ----------------------------------------------------------------------------------------------------------

    def put(self, record: Record) -> Record:
        """Publish a record unless another one has its number, and return the record that stands under the number.

        :param record: The record; the one before it must stand.
        :return: The record that stands, on the disk.
        :raises JournalUnreachable: if it is not known what stands.
        :raises CheckpointError: if something else than a record stands there, or the record could not be read there.
        """
        text = record_text(record)
        read_record(text, f"record {record.number}")  # one that no cell can read would end the run
        place = self._place(record.number)
        reason = ""
        try:
            if record.number > 0 and not self._place(record.number - 1).exists():
                raise JournalUnreachable(f"record {record.number} of {self.path} has no record before it")
            beside = self._write(f".{place.name}.{make_id()}", text.encode())
            try:
                os.link(beside, place)
            except OSError as error:  # whatever it says: what stands there decides
                reason = str(error)
            finally:
                with suppress(OSError):
                    beside.unlink()
            # A file that exists may be looked up in a cache that does not know of it yet.
            standing = self._read(record.number, lookups=_LOOKUPS if reason else 1)
            if standing is not None:
                self._flush(standing.number + 1)
        except OSError as error:
            raise JournalUnreachable(f"record {record.number} was not written to {self.path} ({error})") from error
        if standing is None:
            raise JournalUnreachable(f"record {record.number} was not written to {self.path} ({reason})")
        return standing

    def read_from(self, number: int) -> list[Record]:
        """Return the records from a number on, in order and without a gap, possibly not all of them.

        :param number: Number of the first record to return.
        :return: The records, on the disk: none if there is no record of that number.
        :raises JournalUnreachable: if a record cannot be read.
        :raises CheckpointError: if something else than a record stands there.
        """
        with self._naming_reads():
            records = list(self._records_from(number))
            self._flush_new(number, len(records))
        return records

    def read_texts(self, number: int, most_bytes: int) -> list[bytes]:
        """Return the texts of the records from a number on, as many as a limit allows; see :meth:`read_from`.

        :param number: Number of the first record.
        :param most_bytes: The most bytes of all texts together.
        :return: The texts, in order and without a gap.
        :raises JournalUnreachable: if a record cannot be read.
        :raises CheckpointError: if something else than a record stands there.
        """
        texts: list[bytes] = []
        left = most_bytes
        with self._naming_reads():
            for record in self._records_from(number):
                text = record_text(record).encode()
                left -= len(text)
                if left < 0:
                    break
                texts.append(text)
            self._flush_new(number, len(texts))
        return texts

    def _records_from(self, number: int) -> Iterator[Record]:
        """Read records one after another, each when it is asked for."""
        for following in range(number, number + _MOST_READ):
            record = self._read(following, lookups=1)
            if record is None:
                return
            yield record

    @contextmanager
    def _naming_reads(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise JournalUnreachable(f"the journal {self.path} cannot be read ({error})") from error

    def _flush_new(self, number: int, count: int) -> None:
        """Flush the folder if one of some records that were read may not be on the disk yet."""
        if count > 0 and number + count > self._flushed:
            self._flush(number + count)

    def _flush(self, end: int) -> None:
        """Flush the folder, in which all records before a number exist."""
        sync(self.path)
        self._flushed = max(self._flushed, end)

    def _place(self, number: int) -> Path:
        return self.path / f"{number:09d}.json"

    def _read(self, number: int, *, lookups: int) -> Record | None:
        """Return the record that stands under a number, ``None`` if there is none after some lookups."""
        place = self._place(number)
        for lookup in range(lookups):
            if lookup > 0:
                time.sleep(_READ_AGAIN_S)
                with suppress(OSError):
                    sync(self.path)  # a new file handle makes an NFS client ask for the folder again
            with suppress(FileNotFoundError):
                record = read_record(read_bytes(place, LONGEST_RECORD), str(place))
                if record.number != number:
                    raise CheckpointError(f"{place} holds record {record.number}; restore the file, or the folder")
                return record
        return None

    def _write(self, name: str, content: bytes) -> Path:
        """Write a file and flush it to the disk."""
        path = self.path / name
        try:
            with create(path) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            raise
        return path

    def remove_temporaries(self) -> None:
        """Remove what killed processes have left; only a process that holds the folder alone may do it."""
        for path in list(self.path.iterdir()):
            if _TEMPORARY.fullmatch(path.name):
                path.unlink(missing_ok=True)


@contextmanager
def hold_folder(path: Path) -> Iterator[None]:
    """Keep a folder from being served twice on this host, by other processes or by this one.

    The lock belongs to the open file. A POSIX record lock would belong to the process: it would not keep the process
    from serving the folder twice, and would end when any of its files of that name is closed.

    :param path: The folder, which must exist.
    :yield: While it is held.
    :raises ConfigError: if it is held, or its file system has no locks.
    """
    lock = path / _LOCK
    with create(lock, "append") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise ConfigError(f"{path} cannot be locked ({error}); give a folder on a disk of this host") from error
            with open_regular(lock) as held:
                holder = read_limited(held, lock, 200).decode(errors="replace").strip() or "another process"
            raise ConfigError(
                f"the journal in {path} is served by {holder}; end that, or give another folder"
            ) from None
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {os.uname().nodename}\n".encode())
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a process that was forked meanwhile has the open file, too
