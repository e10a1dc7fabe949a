"""The folder of a checkpoint: its record, and how it comes and goes without ever being half there.

.. code-block:: text

   step_100/                  a whole checkpoint
     checkpoint.json          its record: what it holds, and the checksum of each cell's index
     cell_0/index.json        where each tensor of the cell lies, and the plain values
     cell_0/__3_0.distcp      what rank 3 of the cell has written
   .step_100.partial/         being written, or left by a save that was killed
   .step_100.old/             the one before, while the new one takes its name
   .step_100.removed/         being deleted
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xffl.errors import CheckpointError

__all__ = [
    "INDEX",
    "Record",
    "aside",
    "checksum",
    "find_record",
    "publish",
    "read_record",
    "remove_checkpoint",
    "settle",
    "sync_folder",
    "write_text",
]

RECORD = "checkpoint.json"
INDEX = "index.json"
"""Name of the file that tells where a cell's tensors lie."""
FORMAT = "xffl checkpoint"
VERSION = 1


@dataclass(frozen=True)
class Record:
    """What a checkpoint says of itself."""

    xffl: str
    torch: str
    saved_at: str
    """ISO 8601, UTC"""
    world_size: int
    cells: tuple[int, ...]
    """Ranks of each cell"""
    replica_size: int | None
    parts: tuple[str, ...]
    values: dict[str, Any]
    """Plain values, as :func:`xffl.checkpoint.plain.to_plain` writes them"""
    indexes: dict[str, str]
    """SHA-256 of each cell's index by the cell's folder"""


def aside(path: Path, kind: str) -> Path:
    """Return the hidden folder beside a checkpoint that holds its ``partial``, ``old`` or ``removed`` form.

    :param path: The checkpoint.
    :param kind: Which form.
    :return: Where it lies.
    """
    return path.with_name(f".{path.name}.{kind}")


def settle(path: Path) -> Path:
    """Return where a checkpoint lies: under its name, or still aside where a kill came between two renames.

    :param path: The checkpoint as the user names it.
    :return: A folder, which may not exist.
    """
    old = aside(path, "old")
    return old if not path.exists() and (old / RECORD).is_file() else path


def find_record(folder: Path) -> Record | None:
    """Read the record of a folder that may be no checkpoint.

    :param folder: Any path.
    :return: The record, or ``None`` where there is no whole checkpoint that this version can read.
    """
    try:
        return read_record(folder)
    except CheckpointError:
        return None


def read_record(folder: Path) -> Record:
    """Read the record of a checkpoint.

    :param folder: The checkpoint's folder.
    :return: The record.
    :raises CheckpointError: if the folder is no whole checkpoint of this version.
    """
    try:
        told = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        what = (
            "does not exist" if not folder.exists() else f"is no checkpoint of xffl, or an unfinished one: no {RECORD}"
        )
        raise CheckpointError(f"checkpoint {folder} {what}; give the folder of a finished one") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder / RECORD} cannot be read: {error}; the checkpoint is damaged, load another one"
        ) from error
    if not isinstance(told, dict) or told.pop("format", None) != FORMAT:
        raise CheckpointError(f"{folder / RECORD} is not of xffl; give the folder of a checkpoint of xffl")
    if (version := told.pop("version", None)) != VERSION:
        raise CheckpointError(
            f"checkpoint {folder} has format version {version!r}, this xffl reads version {VERSION}; load it with the "
            f"xffl that wrote it ({told.get('xffl')})"
        )
    try:
        record = Record(**{**told, "cells": tuple(told["cells"]), "parts": tuple(told["parts"])})
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / RECORD} lacks fields: {error}; the checkpoint is damaged") from error
    if not all((folder / cell / INDEX).is_file() for cell in record.indexes):
        raise CheckpointError(f"checkpoint {folder} lacks the index of a cell; it is damaged, load another one")
    return record


def write_text(path: Path, text: str) -> None:
    """Write a file so that it survives a power cut.

    :param path: The file.
    :param text: What it holds.
    """
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut.

    :param folder: The folder.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a small file.

    :param path: The file.
    :return: The digest in hexadecimal.
    """
    return hashlib.sha256(path.read_bytes()).hexdigest()


def publish(path: Path, record: Record) -> None:
    """Give the finished partial folder its name; one process calls it, when all ranks have written theirs.

    A kill at any moment leaves the checkpoint of before or the new one, under its name or, between two renames, where
    :func:`settle` finds it.

    :param path: The checkpoint.
    :param record: What it says of itself.
    """
    partial, old = aside(path, "partial"), aside(path, "old")
    text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(record)}, indent=1, allow_nan=False)
    write_text(partial / RECORD, text + "\n")
    sync_folder(partial)
    if path.exists():
        if old.exists():  # of a save that was killed while it deleted this
            shutil.rmtree(old)
        path.rename(old)
    partial.rename(path)
    sync_folder(path.parent)
    if old.exists():
        shutil.rmtree(old)


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint; what a kill leaves of it is not taken for one.

    :param path: The checkpoint.
    """
    found, old, removed = settle(path), aside(path, "old"), aside(path, "removed")
    if found != old and old.exists():
        shutil.rmtree(old)  # while the newer one stands: it would show again afterwards
    if removed.exists():
        shutil.rmtree(removed)
    found.rename(removed)
    shutil.rmtree(removed)
