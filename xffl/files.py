"""Files and folders that must survive a power cut, and errors of file systems that say what is wrong and where.

Every small file that a later start of a run reads is written here: aside, flushed to the disk, then renamed. Reads go
through :func:`open_regular`, which does not wait for a writer where somebody has put a FIFO in a file's place.

Who may read a file is decided in one place, too: every file that xffl makes has the mode that the user's umask leaves
(:func:`create`), whatever it holds; a secret, such as a run's token, has mode 0600 from the moment at which it exists.
Nothing is written through a symbolic link that somebody may have put where a file is expected.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal

from xffl.errors import ConfigError, XfflError
from xffl.json_text import JSON_LIMIT, parse_json
from xffl.reading import Fields

__all__ = [
    "create",
    "find_os_error",
    "make_folders",
    "naming_errors",
    "open_regular",
    "read_bytes",
    "read_fields",
    "read_given",
    "read_limited",
    "read_sealed",
    "read_text",
    "remove_file",
    "sealed_json",
    "sync",
    "write_sealed",
    "write_whole",
    "written_whole",
]

TEXT_FILE_LIMIT = 2**24
"""The most bytes of a file that is written by hand, such as a list of hosts"""
ENOTSUPP = 524
"""Linux's own number, which some file systems let through to programs; the module errno does not know it."""
FOLDER_SYNC_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, ENOTSUPP)
"""What file systems answer that cannot flush a folder: CIFS before Linux 4.17, some FUSE mounts."""
SEAL = b"xffl-sealed sha256 "
WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG, errno.ESTALE)
"""What a library may hide that fails to write"""
RUST_ERROR = re.compile(r"\(os error ([0-9]{1,9})\)")
"""How libraries written in Rust, such as safetensors, end the text of an error of the operating system"""


# Making them ----------------------------------------------------------------------------------------------------------


def create(path: Path, how: Literal["new", "replace", "append"] = "new", *, is_secret: bool = False) -> BinaryIO:
    """Open a file for writing, never through a link: another user may have put one there that leads elsewhere.

    The file gets the mode that the umask leaves, and a secret one 0600, whatever the umask is.

    :param path: The file. Links among the folders above it are followed.
    :param how: ``new`` raises a FileExistsError where anything has the name; ``replace`` and ``append`` take a regular
        file that is there, which keeps its mode.
    :param is_secret: Whether only its owner may read it; needs ``new``.
    :return: The open file, unbuffered where it is appended to, so that each write is one.
    :raises OSError: where the path is a link, a FIFO, a socket, a device or a folder.
    """
    if is_secret and how != "new":
        raise ValueError(f"a secret goes into a new file, not one to {how}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    flags |= {"new": os.O_EXCL, "replace": 0, "append": os.O_APPEND}[how]
    try:
        handle = os.open(path, flags, 0o600 if is_secret else 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise OSError(
                errno.ELOOP, "it is a link, which xffl does not write through; remove it", str(path)
            ) from None
        raise
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, f"it is {_kind_text(mode)}, not a regular file", str(path))
        os.set_blocking(handle, True)
        if is_secret:
            os.fchmod(handle, 0o600)  # a umask such as 0777 leaves less, and its owner could not read it
        if how == "replace":
            os.ftruncate(handle, 0)
        return os.fdopen(handle, "ab", 0) if how == "append" else os.fdopen(handle, "wb")
    except BaseException:
        os.close(handle)
        raise


# Making them durable --------------------------------------------------------------------------------------------------


def sync(path: Path) -> None:
    """Make what a file holds, or the names in a folder, survive a power cut.

    A folder that cannot be flushed, or not be opened for it, is left to the file system: its files are on the disk.
    Errors of the device (EIO) are raised.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError:
        if path.is_dir():  # one may make files in it and not list them
            return
        raise
    try:
        os.fsync(handle)
    except OSError as error:
        is_folder = stat.S_ISDIR(os.fstat(handle).st_mode)
        if not is_folder or error.errno not in FOLDER_SYNC_REFUSED:
            raise _named(error, path) from error
    finally:
        os.close(handle)


def make_folders(path: Path) -> None:
    """Make a folder, and those above it that are missing; each new one survives a power cut.

    As :meth:`Path.mkdir` with ``parents`` and ``exist_ok``, which leaves the names of new folders in the cache.
    """
    missing = []
    folder = path
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for one in reversed(missing):
        one.mkdir(exist_ok=True)  # another process may have made it meanwhile
        sync(one.parent)
    if not path.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def remove_file(path: Path) -> None:
    """Remove a file that may not be there, so that a power cut does not bring it back."""
    with suppress(FileNotFoundError):
        path.unlink()
        sync(path.parent)


@contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """Write a file whole or not at all, whoever else writes it, and flush it to the disk: readers never see half of it.

    What fails in the block is raised as :func:`naming_errors` does.
    """
    beside = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        with naming_errors(path):
            with create(beside) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
            sync(path.parent)
    except BaseException:
        with suppress(OSError):  # what kept it from being written is what its user has to see
            beside.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a text as :func:`written_whole`."""
    with written_whole(path) as file:
        file.write(text.encode())


# Sealing them ---------------------------------------------------------------------------------------------------------


def write_sealed(path: Path, content: bytes) -> None:
    """Write a file whole, with a first line that holds its SHA-256 and its length."""
    with written_whole(path) as file:
        file.write(SEAL + f"{hashlib.sha256(content).hexdigest()} {len(content)}\n".encode())
        file.write(content)


def read_sealed(path: Path, limit: int = JSON_LIMIT) -> bytes:
    """Return what :func:`write_sealed` was given; a ValueError says what is wrong with the file.

    A file without the first line, as earlier versions wrote it, is returned as it is. ``limit`` is as for
    :func:`read_bytes`.
    """
    data = read_bytes(path, limit)
    if not data.startswith(SEAL):
        return data
    head, _, content = data.partition(b"\n")
    digest, _, length = head.removeprefix(SEAL).partition(b" ")
    if length != str(len(content)).encode():
        raise ValueError(f"it has {len(content)} bytes in place of {length.decode(errors='replace')}")
    if digest != hashlib.sha256(content).hexdigest().encode():
        raise ValueError("it is not as it was written (its sha256 differs)")
    return content


def sealed_json(fields: Mapping[str, Any]) -> str:
    """Return the fields as JSON, with the SHA-256 of what the JSON of all others is as ``sha256``."""
    body = {name: value for name, value in fields.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(body, indent=1).encode()).hexdigest()
    return json.dumps({**body, "sha256": digest}, indent=1) + "\n"


# Reading them ---------------------------------------------------------------------------------------------------------


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, or raise an OSError where its path is that of a FIFO, a socket, a device or a folder.

    To open a FIFO or to read from a device may wait for ever.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, f"it is {_kind_text(mode)}, not a regular file", str(path))
        os.set_blocking(handle, True)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_bytes(path: Path, limit: int = JSON_LIMIT) -> bytes:
    """Return what a regular file holds; an OSError says so where that is more than ``limit`` bytes."""
    with open_regular(path) as file:
        return read_limited(file, path, limit)


def read_limited(file: BinaryIO, path: Path, limit: int) -> bytes:
    """Return what an open file holds; an OSError that names ``path`` where it has more than ``limit`` bytes.

    A file may have holes, so its size on the disk says nothing of the memory that it takes.
    """
    size = os.fstat(file.fileno()).st_size
    content = b"" if size > limit else file.read(limit + 1)  # it may grow meanwhile
    if max(size, len(content)) > limit:
        raise OSError(errno.EFBIG, f"it has {max(size, len(content))} bytes; at most {limit} are read", str(path))
    return content


def read_given(path: Path, limit: int = TEXT_FILE_LIMIT) -> str:
    """Return the UTF-8 text of a file that a user has named, which may be a pipe, such as a shell makes of ``<(...)``.

    What cannot be read is an OSError; bytes that are no UTF-8, and a path that is none, are a ValueError.
    """
    with open(path, "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit} bytes", str(path))
    return content.decode("utf-8")


def read_fields(
    path: Path,
    *,
    error: type[XfflError] = ConfigError,
    hint: str = "",
    limit: int = JSON_LIMIT,
    is_finite: bool = False,
) -> Fields:
    """Return the fields of a file that holds a JSON object, to be read with their types and limits.

    Whatever is wrong with the file raises ``error`` with its path: it cannot be opened, is no regular file, is longer
    than ``limit`` bytes, or holds something else. See :func:`xffl.json_text.parse_json`.
    """
    try:
        value = parse_json(read_bytes(path, limit), is_finite=is_finite)
    except (OSError, ValueError) as reason:
        told = reason.strerror if isinstance(reason, OSError) and reason.strerror else str(reason)
        raise error(f"file {path} cannot be read: {told}" + (f"; {hint}" if hint else "")) from reason
    return Fields(value, f"file {path}", error=error, hint=hint)


def read_text(path: Path, limit: int = JSON_LIMIT) -> str:
    """Return the UTF-8 text that a regular file holds; bytes that are none are a ValueError.

    ``limit`` is as for :func:`read_bytes`.
    """
    return read_bytes(path, limit).decode("utf-8")


def _kind_text(mode: int) -> str:
    kinds = {
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFDIR: "a folder",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "of another kind")


# What is wrong --------------------------------------------------------------------------------------------------------


def find_os_error(error: BaseException) -> OSError | None:
    """Return the error of the operating system behind another one: itself, or what a library has made of it.

    torch.save raises a RuntimeError about positions in the file, with the OSError as its context; safetensors writes
    the number into its text.
    """
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        if isinstance(at, OSError) and at.errno is not None:
            return at
        if match := RUST_ERROR.search(str(at)):
            number = int(match[1])
            return OSError(number, os.strerror(number))
        at = at.__cause__ or at.__context__
    return None


@contextmanager
def naming_errors(path: Path) -> Iterator[None]:
    """Raise an error of the operating system in the block, also one that a library hides, as an OSError with a path.

    So a full disk is told as ``[Errno 28] No space left on device: PATH``, whatever wrote.
    """
    try:
        yield
    except Exception as error:
        hidden = find_os_error(error)
        is_plain = hidden is error and hidden.filename is None
        is_hidden = hidden is not None and hidden is not error and hidden.errno in WRITE_ERRORS
        if hidden is None or isinstance(error, XfflError) or not (is_plain or is_hidden):
            raise
        raise _named(hidden, path) from error


def _named(error: OSError, path: Path) -> OSError:
    number = error.errno or errno.EIO
    return OSError(number, os.strerror(number), error.filename or str(path))
