"""Checksums of files: what was written is what is read."""

from __future__ import annotations

import hashlib
from pathlib import Path

from xffl.errors import CheckpointError

__all__ = ["ALGORITHM", "FileEntry", "check_file", "checksum", "entry_of"]

ALGORITHM = "sha256"
"""Name of the algorithm, as the index of a cell tells it."""
BLOCK_BYTES = 1 << 20

FileEntry = tuple[int, str]
"""Bytes and checksum of a file."""


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file.

    :param path: The file.
    :return: The digest in hexadecimal.
    """
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def entry_of(path: Path) -> FileEntry:
    """Return what an index says of a file, read back from where it was written.

    :param path: The file.
    :return: Bytes and checksum.
    """
    return path.stat().st_size, checksum(path)


def check_file(path: Path, entry: FileEntry) -> None:
    """Read a file and compare it with what its index says.

    :param path: The file.
    :param entry: Bytes and checksum.
    :raises CheckpointError: if it is another one.
    """
    size, digest = entry
    found = path.stat().st_size if path.is_file() else None
    if found != size:
        told = "is missing" if found is None else f"has {found} bytes in place of {size}"
        raise CheckpointError(f"{path} {told}; the checkpoint is damaged, load another one")
    if checksum(path) != digest:
        raise CheckpointError(
            f"{path} is not as it was written (its {ALGORITHM} differs); the checkpoint is damaged, load another one"
        )
