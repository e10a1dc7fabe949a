"""The folder of a checkpoint: its record, and how it comes and goes without ever being half there.

.. code-block:: text

   step_100/                  a whole checkpoint
     checkpoint.json          its record: what it holds, and the checksum of each cell's index and of itself
     cell_0/index.json        where each tensor of the cell lies, the plain values, and the files' checksums
     cell_0/__3_0.distcp      what rank 3 of the cell has written
     cell_0/own_3.pt          what rank 3 of the cell keeps for itself
   latest                     the name of the newest one, written by CheckpointManager
   .step_100.partial/         being written, or left by a save that was killed
   .step_100.old/             the one before, while the new one takes its name
   .step_100.removed/         being deleted
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xffl.errors import CheckpointError

__all__ = [
    "INDEX",
    "Record",
    "aside",
    "delete",
    "find_record",
    "publish",
    "read_pointer",
    "read_record",
    "record_text",
    "remove_checkpoint",
    "settle",
    "sync",
    "sync_all",
    "write_pointer",
    "write_text",
]

LATEST = "latest"
RECORD = "checkpoint.json"
INDEX = "index.json"
"""Name of the file that tells where a cell's tensors lie."""
FORMAT = "xffl checkpoint"
VERSION = 2


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
    cell_shape: tuple[tuple[str, int], ...] | None
    """Sizes of the axes of the mesh inside a cell"""
    after_round: bool
    """Whether all cells held the same averaged weights"""
    parts: tuple[str, ...]
    own: tuple[str, ...]
    """Names of what each rank keeps for itself"""
    values: dict[str, Any]
    """Plain values, as :func:`xffl.distributed.plain.to_plain` writes them"""
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


def delete(path: Path) -> None:
    """Delete a folder; of a link to one, such as to an archive, the link alone.

    :param path: The folder or the link.
    """
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


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
    file = folder / RECORD
    try:
        raw = file.read_bytes().decode("utf-8")
        told = json.loads(raw)
    except FileNotFoundError:
        what = (
            "does not exist" if not folder.exists() else f"is no checkpoint of xffl, or an unfinished one: no {RECORD}"
        )
        raise CheckpointError(f"checkpoint {folder} {what}; give the folder of a finished one") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; the checkpoint is damaged, load another one") from error
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        raise CheckpointError(f"{file} is not of xffl; give the folder of a checkpoint of xffl")
    if (version := told.get("version")) != VERSION:
        raise CheckpointError(
            f"{file} has format version {version!r}, this xffl reads version {VERSION}; load it with the xffl that "
            f"wrote it ({told.get('xffl')})"
        )
    if raw != _sealed(told):
        raise CheckpointError(
            f"{file} is not as it was written (its checksum differs); the checkpoint is damaged, load another one"
        )
    record = _record_of(told, file)
    if lost := [cell for cell in record.indexes if not (folder / cell / INDEX).is_file()]:
        raise CheckpointError(
            f"checkpoint {folder} lacks the index of a cell, {lost[0]}/{INDEX}; it is damaged, load another one"
        )
    return record


def record_text(record: Record) -> str:
    """Return what the record's file holds: JSON, and the checksum of all of it but the checksum.

    :param record: The record.
    :return: The text, which is the only one of this record.
    """
    return _sealed({"format": FORMAT, "version": VERSION, **asdict(record)})


def _sealed(fields: Mapping[str, Any]) -> str:
    body = {name: value for name, value in fields.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(body, indent=1).encode()).hexdigest()
    return json.dumps({**body, "sha256": digest}, indent=1) + "\n"


def _record_of(told: dict[str, Any], file: Path) -> Record:
    try:
        fields = {name: value for name, value in told.items() if name not in ("format", "version", "sha256")}
        fields |= {name: tuple(told[name]) for name in ("cells", "parts", "own")}
        fields["cell_shape"] = None if (shape := told["cell_shape"]) is None else tuple(map(tuple, shape))
        return Record(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} lacks fields: {error}; the checkpoint is damaged, load another one") from error


def write_text(path: Path, text: str) -> None:
    """Write a file so that it survives a power cut.

    :param path: The file.
    :param text: What it holds.
    """
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def sync(path: Path) -> None:
    """Make what a file holds, or the names in a folder, survive a power cut.

    :param path: The file or folder.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_all(folder: Path) -> None:
    """Make all files of a folder and of those in it survive a power cut, with their names.

    :param folder: The folder, without links.
    """
    for parent, _, files in os.walk(folder):
        for name in files:
            sync(Path(parent, name))
        sync(Path(parent))


def publish(path: Path, record: Record) -> None:
    """Give the finished partial folder its name; one process calls it, when all ranks have written theirs.

    A kill at any moment leaves the checkpoint of before or the new one, under its name or, between two renames, where
    :func:`settle` finds it.

    :param path: The checkpoint.
    :param record: What it says of itself.
    """
    partial, old = aside(path, "partial"), aside(path, "old")
    write_text(partial / RECORD, record_text(record))
    sync(partial)
    if path.exists():
        if old.exists():  # of a save that was killed while it deleted this
            delete(old)
        path.rename(old)
    partial.rename(path)
    sync(path.parent)
    if old.exists():
        delete(old)


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint; what a kill leaves of it is not taken for one.

    :param path: The checkpoint.
    """
    found, old, removed = settle(path), aside(path, "old"), aside(path, "removed")
    if found != old and old.exists():
        delete(old)  # while the newer one stands: it would show again afterwards
    if removed.exists():
        delete(removed)
    found.rename(removed)
    delete(removed)


def write_pointer(path: Path) -> None:
    """Let the file ``latest`` beside a checkpoint name it, at once; one process calls it.

    :param path: The checkpoint.
    """
    new = path.with_name(f".{LATEST}.new")
    write_text(new, path.name + "\n")
    new.replace(path.with_name(LATEST))
    sync(path.parent)


def read_pointer(folder: Path) -> str | None:
    """Return the name in the file ``latest``, which may be of nothing that is there.

    :param folder: The folder of checkpoints.
    :return: The name, or ``None`` where there is no such file.
    """
    try:
        return (folder / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
