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
   .step_100.removed/         being deleted (.step_100.2.removed where a part of another one could not be)
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from dataclasses import fields as dataclass_fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from xffl import __version__
from xffl.checkpoint.opened import OpenFolder, aside, read_again_if_replaced
from xffl.checkpoint.removal import discard, sweep
from xffl.checkpoint.tables import FileEntry, StoredTensor, read_files, read_tensors
from xffl.checkpoint.torch_files import FileSlice, check_archive, load_archive
from xffl.checks import shown
from xffl.distributed.agreement.consistency import run_on_all_ranks
from xffl.distributed.collectives import Group
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.replicas.plain_values import Plain
from xffl.distributed.several_worlds.cross_world import CrossWorldGroup
from xffl.errors import CheckpointError, ConfigError, StateError, XfflError
from xffl.files import (
    TEXT_FILE_LIMIT,
    create,
    find_os_error,
    make_folders,
    naming_errors,
    read_text,
    sealed_json,
    sync,
)
from xffl.json_text import parse_json
from xffl.reading import Fields
from xffl.topology import Topology

__all__ = [
    "CellIndex",
    "OpenCheckpoint",
    "Record",
    "check_path",
    "find_record",
    "locate_checkpoint",
    "read_again_if_replaced",
    "read_record",
]

LATEST = "latest"
RECORD = "checkpoint.json"
INDEX = "index.json"  # where a cell's tensors are
FORMAT = "xffl checkpoint"
VERSION = 3
READS = (2, VERSION)
"""Versions that are read; records of version 2 have no ``save_number``."""
MOST_RANKS = 2**31
MOST_NAMES = 10**6
"""Parts, names of own state and values of a record at most"""
MOST_AXES = 64
VALUES_DEPTH = 200
"""How deep plain values may be nested"""
INDEX_LIMIT = 2**31
"""Characters of a cell's index at most, which has the plain values of parts"""


@dataclass(frozen=True)
class Record:
    """What a checkpoint says of itself."""

    xffl: str
    torch: str
    saved_at: str  # ISO 8601, UTC
    world_size: int
    cells: tuple[int, ...]  # ranks of each cell
    replica_size: int | None
    cell_shape: tuple[tuple[str, int], ...] | None  # sizes of the axes of the mesh inside a cell
    after_round: bool  # whether all cells held the same averaged weights
    parts: tuple[str, ...]
    own: tuple[str, ...]  # names of what each rank keeps for itself
    values: dict[str, Any]  # plain values, as ``to_plain`` writes them
    indexes: dict[str, str]  # SHA-256 of each cell's index by the cell's folder
    save_number: int = 0
    """Counts the saves into the folder that the checkpoint is in, from 1; clocks and steps may go back. 0 in what an
    xffl wrote that did not count."""

    @classmethod
    def now(cls, **fields: Any) -> Record:
        """Return the record of what is saved now by this version of xffl; the other fields are given."""
        saved_at = datetime.now(timezone.utc).isoformat()
        return cls(xffl=__version__, torch=torch.__version__, saved_at=saved_at, **fields)


def temporary_path(path: Path, kind: str) -> Path:
    """Return the hidden folder beside a checkpoint that holds its ``partial`` or ``old`` form."""
    return aside(path) if kind == "old" else path.with_name(f".{path.name}.{kind}")


def locate_checkpoint(path: Path) -> Path:
    """Return where a checkpoint lies: under its name, or still aside where a kill came between two renames."""
    old = temporary_path(path, "old")
    return old if not path.exists() and (old / RECORD).is_file() else path


class OpenCheckpoint(OpenFolder):
    """A checkpoint that is held open while it is read, so that all that is read is of one save; local.

    :param path: Its name; it is found aside, too, where a kill came between two renames.
    :raises CheckpointError: if it does not exist.
    """

    def __init__(self, path: Path) -> None:
        try:
            super().__init__(path, (RECORD,))
        except FileNotFoundError:
            raise CheckpointError(f"checkpoint {path} does not exist; give the folder of a finished one") from None
        except NotADirectoryError:
            raise CheckpointError(
                f"{path} is no checkpoint of xffl, since it is no folder; give the folder of a finished one"
            ) from None

    def read_record(self) -> Record:
        """Read the record."""
        with self.noticing_replacement():
            return _read_record(self)


def find_record(path: Path) -> Record | None:
    """Read the record of a folder that may be no checkpoint."""
    try:
        return read_record(path)
    except CheckpointError:
        return None


def read_record(path: Path) -> Record:
    """Read the record of a checkpoint, under its name or aside."""

    def read() -> Record:
        with OpenCheckpoint(path) as source:
            return source.read_record()

    return read_again_if_replaced(read)


def _read_record(source: OpenCheckpoint) -> Record:
    folder, file = source.path, source.path / RECORD
    try:
        raw = source.read_bytes(RECORD).decode("utf-8")
        content = parse_json(raw, depth=VALUES_DEPTH)
    except FileNotFoundError:
        raise CheckpointError(
            f"checkpoint {folder} is no checkpoint of xffl, or an unfinished one: no {RECORD}; give the folder of a "
            f"finished one, or put {RECORD} back from a backup"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; the checkpoint is damaged, load another one") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{file} is not of xffl; give the folder of a checkpoint of xffl")
    if (version := content.get("version")) not in READS:
        raise CheckpointError(
            f"{file} has format version {shown(version)}, this xffl reads versions {' and '.join(map(str, READS))}; "
            f"load it with the xffl that wrote it ({shown(content.get('xffl'))})"
        )
    if raw != sealed_json(content):
        raise CheckpointError(f"{file} is not as it was written (its checksum differs); load another checkpoint")
    record = _record_of(
        Fields(content, f"{file}", error=CheckpointError, hint="the checkpoint is damaged, load another one")
    )
    if lost := [cell for cell in record.indexes if not source.has(f"{cell}/{INDEX}")]:
        index = f"{lost[0]}/{INDEX}"
        if os.path.lexists(folder / index):
            raise CheckpointError(
                f"checkpoint {folder} has an index that is no regular file, {index}; load another one"
            )
        raise CheckpointError(f"checkpoint {folder} lacks the index of a cell, {index}; load another one")
    return record


def _record_of(fields: Fields) -> Record:
    """Return the record that a file holds, each value checked."""
    known = {one.name for one in dataclass_fields(Record)}
    fields.refuse_others(*known, "format", "version", "sha256")
    cells = fields.list_of("cells", MOST_RANKS, Fields.integer, 1, MOST_RANKS)
    if not cells:
        fields.fail(f"{fields.place('cells')} is empty; a checkpoint is of one cell at least")
    indexes = fields.mapping_of("indexes", MOST_RANKS, Fields.text)
    if others := sorted(indexes.keys() - {f"cell_{number}" for number in range(len(cells))}):
        fields.fail(f"{fields.place('indexes')} names {shown(others[0])}, but the checkpoint is of {len(cells)} cells")
    return Record(
        xffl=fields.text("xffl"),
        torch=fields.text("torch"),
        saved_at=fields.text("saved_at"),
        world_size=fields.integer("world_size", 1, MOST_RANKS),
        cells=tuple(cells),
        replica_size=fields.optional("replica_size", Fields.integer, 1, MOST_RANKS),
        cell_shape=_cell_shape_of(fields),
        after_round=fields.boolean("after_round"),
        parts=tuple(fields.list_of("parts", MOST_NAMES, Fields.text)),
        own=tuple(fields.list_of("own", MOST_NAMES, Fields.text)),
        values=fields.mapping_of("values", MOST_NAMES, Fields.any),
        indexes=indexes,
        save_number=fields.integer("save_number") if "save_number" in fields else 0,
    )


def _cell_shape_of(fields: Fields) -> tuple[tuple[str, int], ...] | None:
    """Return the names and sizes of the axes of the mesh in a cell; ``None`` where there is none."""
    if fields.any("cell_shape") is None:
        return None
    axes = []
    for pair in fields.list_of("cell_shape", MOST_AXES, Fields.any):
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
            fields.fail(f"{fields.place('cell_shape')} must be pairs of a name and a size, got {shown(pair)}")
        axes.append(
            (pair[0], Fields({"size": pair[1]}, fields.place("cell_shape"), error=CheckpointError).integer("size", 1))
        )
    return tuple(axes)


def record_text(record: Record) -> str:
    """Return what the record's file holds: JSON, and the checksum of all of it but the checksum."""
    return sealed_json({"format": FORMAT, "version": VERSION, **asdict(record)})


def write_text(path: Path, text: str) -> None:
    """Write a file so that it survives a power cut."""
    with naming_errors(path), create(path, "replace") as file:
        file.write(text.encode())
    sync(path)


def sync_all(folder: Path) -> None:
    """Make all files of a folder and of those in it survive a power cut, with their names."""
    for parent, _, files in os.walk(folder):
        for name in files:
            sync(Path(parent, name))
        sync(Path(parent))


@contextmanager
def partial_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder to write into; what is left of it is removed where the block fails."""
    partial = temporary_path(target, "partial")
    clear_leftovers(target)
    make_folders(partial.parent)
    partial.mkdir()
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def clear_leftovers(target: Path) -> None:
    """Delete what saves of this name have left that were killed, or could not delete."""
    sweep(target.parent, target.name)
    discard(temporary_path(target, "partial"), f"a save of {target} that did not end has left a folder")


def publish(path: Path, record: Record) -> None:
    """Give the finished partial folder its name; one process calls it, when all ranks have written theirs."""
    partial = temporary_path(path, "partial")
    record = replace(record, save_number=_last_number(path.parent) + 1)
    # The record comes last: a folder without it is no checkpoint. It must be on the disk before the folder is renamed,
    # or a power cut could leave the name without the record.
    write_text(partial / RECORD, record_text(record))
    sync(partial)
    replace_folder(path)


def _last_number(folder: Path) -> int:
    """Return the number of the last save into a folder, 0 without one."""
    # os.path.isfile() is False for folders beside it that this user may not enter, where Path.is_file() raises.
    here = [path for path in folder.iterdir() if os.path.isfile(path / RECORD) and not path.name.endswith(".partial")]
    records = [find_record(path) for path in here]
    return max((record.save_number for record in records if record is not None), default=0)


def replace_folder(path: Path) -> None:
    """Give the partial form of a folder its name, whatever had it before; a kill leaves one of them whole.

    The new one is whole when this returns. If the one before cannot be deleted, that is told and tried again later.
    """
    old = temporary_path(path, "old")
    if path.exists():
        discard(old, f"a save of {path} that was killed has left what it replaced")
        # Renamed, not deleted: until the next rename it is the only whole checkpoint, found by locate_checkpoint().
        path.rename(old)
    temporary_path(path, "partial").rename(path)
    # Both renames must be on the disk before the old checkpoint goes.
    sync(path.parent)
    discard(old, f"{path} is saved and whole")


def remove_checkpoint(path: Path, why: str) -> None:
    """Delete a checkpoint; what a kill or a failure leaves of it is not taken for one.

    ``why`` begins the message if some of it cannot be deleted, which is tried again later.
    """
    folder, old = locate_checkpoint(path), temporary_path(path, "old")
    # Aside first, while the newer one stands: it would show again afterwards.
    if folder == old or discard(old, why):
        discard(folder, why)


def write_pointer(path: Path) -> None:
    """Let the file ``latest`` beside a checkpoint name it, at once; one process calls it."""
    new = path.with_name(f".{LATEST}.new")
    new.unlink(missing_ok=True)  # of a start that was killed
    # A rename replaces the file at once, so that readers see the old name or the new one.
    write_text(new, path.name + "\n")
    new.replace(path.with_name(LATEST))
    sync(path.parent)


MOST_NAME = 200
"""Characters of a checkpoint's name at most; with what is put before and behind it, file systems have 255 bytes"""


def read_pointer(folder: Path) -> str | None:
    """Return the name in the file ``latest``, which may be of nothing that is there."""
    try:
        name = read_text(folder / LATEST, TEXT_FILE_LIMIT).strip()
    except (OSError, ValueError):
        return None
    return name if len(name.encode()) <= MOST_NAME and name.isprintable() and "/" not in name else None


ALGORITHM = "sha256"  # name of the algorithm in the index of a cell
BLOCK_BYTES = 1 << 20


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file that this process has written."""
    with path.open("rb") as stream:
        return checksum_of(stream)


def checksum_of(stream: BinaryIO) -> str:
    """Return the SHA-256 of what an open file holds."""
    digest = hashlib.sha256()
    while block := stream.read(BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()


def file_entry(path: Path) -> FileEntry:
    """Return what an index says of a file, read back from where it was written."""
    return path.stat().st_size, checksum(path)


# The tensors of a cell ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CellIndex:
    """What a cell's folder holds: tensors and plain values by name."""

    source: OpenCheckpoint
    cell: str  # name of the cell's folder
    tensors: dict[str, StoredTensor]
    values: dict[str, Plain]
    files: dict[str, FileEntry]  # bytes and checksum of each file
    ties: dict[str, str]  # tensors that are another one of the same model, by name

    @property
    def folder(self) -> Path:
        """The cell's folder, for messages; files are opened by :meth:`open`."""
        return self.source.path / self.cell

    def open(self, file: str) -> AbstractContextManager[BinaryIO]:
        """Open a file of the cell, which is that of the same save as all others; not while it is still read."""
        return self.source.open(f"{self.cell}/{file}")

    def hold(self, files: Iterable[str]) -> None:
        """Open files that are read later, so that a save that replaces the checkpoint cannot take them away."""
        self.source.hold(f"{self.cell}/{file}" for file in files)

    def check_file(self, file: str) -> None:
        """Read a file and compare it with what the index says."""
        path, (size, digest) = self.folder / file, self.files[file]
        try:
            with self.open(file) as stream:
                here = os.fstat(stream.fileno()).st_size
                if here != size:
                    raise CheckpointError(
                        f"{path} has {here} bytes in place of {size}; the checkpoint is damaged, load another one"
                    )
                found = checksum_of(stream)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing; the checkpoint is damaged, load another one") from None
        if found != digest:
            raise CheckpointError(
                f"{path} is not as it was written (its {ALGORITHM} differs); the checkpoint is damaged, load another "
                "one"
            )


class CellWriter(FileSystemWriter):
    """Write a cell's tensors, each rank a file, and the index by the cell's first rank."""

    def __init__(
        self, folder: Path, values: dict[str, Plain], ties: dict[str, str], files: dict[str, FileEntry]
    ) -> None:
        super().__init__(folder, sync_files=True)
        self.folder = folder
        self.values = values
        self.ties = ties
        self.files = files

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file and read it back for its checksum; a rank with nothing to write makes none."""
        pieces: list[WriteResult] = []
        if plan.items:
            with naming_errors(self.folder):  # before torch pickles it, which loses what lies behind it
                pieces = super().write_data(plan, planner).wait()
            sync(self.folder)
        places = [(piece, piece.storage_data) for piece in pieces]
        files = {name: file_entry(self.folder / name) for name in {place.relative_path for _, place in places}}
        written: Future[list[WriteResult]] = Future()
        written.set_result([replace(piece, storage_data=(at, files[at.relative_path])) for piece, at in places])
        return written

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index; called on the cell's first rank when all have written."""
        places = {written.index: written.storage_data for by_rank in results for written in by_rank}
        files = self.files | {place.relative_path: entry for place, entry in places.values()}
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, dcp.TensorStorageMetadata), "only tensors are given to torch"
            chunks = []
            for box in tensor.chunks:
                place, _ = places[dcp.MetadataIndex(name, box.offsets)]
                chunks.append([list(box.offsets), list(box.sizes), place.relative_path, place.offset, place.length])
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(tensor.size), "chunks": chunks}
        write_index(self.folder, files=files, tensors=tensors, ties=self.ties, values=self.values)


class _OpenFiles(FileSystem):
    """The files of a cell that is held open, for torch's reader."""

    def __init__(self, index: CellIndex) -> None:
        self._index = index

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with self._index.open(os.path.basename(path)) as stream:
            yield cast(io.IOBase, stream)


class CellReader(FileSystemReader):
    """Read a cell's tensors from where the index says; torch opens each with ``weights_only``."""

    def __init__(self, index: CellIndex) -> None:
        super().__init__(index.folder)
        self.fs = _OpenFiles(index)
        self.index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """Return the index in torch's form."""
        metadata = dcp.Metadata(state_dict_metadata={}, storage_data={})
        for name, tensor in self.index.tensors.items():
            boxes = [dcp.ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes)) for one in tensor.chunks]
            properties = dcp.TensorProperties(dtype=tensor.dtype)
            metadata.state_dict_metadata[name] = dcp.TensorStorageMetadata(properties, tensor.shape, boxes)
            metadata.storage_data |= {dcp.MetadataIndex(name, chunk.offsets): chunk for chunk in tensor.chunks}
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for; each piece is looked at before torch reads it."""
        for chunk in {self.storage_data[item.storage_index] for item in plan.items}:
            with self.index.open(chunk.relative_path) as stream:
                try:
                    check_archive(FileSlice(stream, chunk.offset, chunk.length))
                except ValueError as error:
                    raise CheckpointError(
                        f"{self.index.folder / chunk.relative_path} holds no tensor at {chunk.offset}: {error}; the "
                        "checkpoint is damaged, load another one"
                    ) from error
        return super().read_data(plan, planner)


def write_index(
    folder: Path, files: dict[str, Any], tensors: dict[str, Any], ties: dict[str, str], values: Mapping[str, Plain]
) -> None:
    """Write the index of a cell's folder."""
    index = {"checksum": ALGORITHM, "files": files, "tensors": tensors, "ties": ties, "values": values}
    write_text(folder / INDEX, json.dumps(index, allow_nan=False))
    sync(folder)


def read_index(source: OpenCheckpoint, record: Record, cell: int = 0) -> CellIndex:
    """Read the index of a cell of a checkpoint."""
    home = f"cell_{cell}"
    path = source.path / home / INDEX
    try:
        raw = source.read_bytes(f"{home}/{INDEX}", INDEX_LIMIT)
        if hashlib.sha256(raw).hexdigest() != record.indexes.get(home):
            raise CheckpointError(f"{path} is not the file that was saved (its checksum differs); load another one")
        content = parse_json(raw, limit=INDEX_LIMIT, depth=VALUES_DEPTH)
        if not isinstance(content, dict) or content.get("checksum") != ALGORITHM:
            raise ValueError(f"its checksums must be {ALGORITHM}")
        files = read_files(content.get("files"))
        tensors = read_tensors(content.get("tensors"), files)
        values, ties = content.get("values"), content.get("ties")
        if not isinstance(values, dict) or not isinstance(ties, dict):
            raise ValueError(f"its values and ties must be mappings, got {shown(values)} and {shown(ties)}")
        if wrong := [name for name, first in ties.items() if not isinstance(first, str)]:
            raise ValueError(f"the tie {shown(wrong[0])} must name a tensor, got {shown(ties[wrong[0]])}")
        return CellIndex(
            source=source,
            cell=home,
            tensors=tensors,
            values=values,
            files=files,
            ties=ties,
        )
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; the checkpoint is damaged, load another one") from error


def check_data(index: CellIndex, place: int = 0, places: int = 1) -> None:
    """Read this rank's share of a cell's files of tensors, dealt out by size, and compare them with their checksums."""
    names = {chunk.relative_path for tensor in index.tensors.values() for chunk in tensor.chunks}
    by_size = sorted(names, key=lambda name: (-index.files[name][0], name))
    index.hold(by_size)  # also those that others check and this rank reads
    for name in by_size[place::places]:
        index.check_file(name)


def read_tensor(index: CellIndex, name: str) -> torch.Tensor:
    """Read a whole tensor on the CPU, with no process group."""
    tensor = index.tensors[name]
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for chunk in tensor.chunks:
        file = index.folder / chunk.relative_path
        try:
            with index.open(chunk.relative_path) as stream:
                stream.seek(chunk.offset)
                piece = load_archive(stream.read(chunk.length))
            if not isinstance(piece, torch.Tensor) or piece.dtype != tensor.dtype:
                raise ValueError("it holds something else than a tensor of this dtype")
            box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            if tuple(piece.shape) != chunk.sizes:
                raise ValueError(f"it holds a tensor of shape {tuple(piece.shape)} in place of {chunk.sizes}")
            whole[box] = piece
        except (OSError, RuntimeError, ValueError) as error:
            reason = str(error) if isinstance(error, ValueError) else type(error).__name__
            raise CheckpointError(
                f"{file} does not hold {name!r}: {reason}; the checkpoint is damaged, load another one"
            ) from error
    return whole


# What the ranks do together -------------------------------------------------------------------------------------------

T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """The cell of this rank, and how it and the whole job talk.

    Ranks are the job's, also where the job's cells are worlds of their own: their checkpoint is that of one world.
    """

    number: int
    topology: Topology  # of the whole job
    rank: int
    group: dist.ProcessGroup | None  # the ranks of the cell; ``None`` for torch's default group, and without any
    world: Group | None = None  # all ranks of the job; ``None`` for torch's default group

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks of each cell."""
        return self.topology.sizes

    @property
    def place(self) -> int:
        """Rank in the cell, whose first one writes the index."""
        return self.rank - self.topology.offsets[self.number]


def this_cell(state: DistributedState, groups: tuple[Group, dist.ProcessGroup | None] | None = None) -> Cell:
    """Return the cell of this rank. Nothing moves.

    ``groups``, of all ranks of the job and of the cell, are used in place of the state's.
    """
    rank, world_size = state.rank, state.world_size
    if rank is None or world_size is None:
        raise StateError("the state does not know its rank and world yet; call set_global first")
    joined = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if joined != (rank, world_size):
        raise StateError(
            f"the state says rank {rank} of {world_size}, but torch.distributed rank {joined[0]} of {joined[1]}; give "
            "the state of this process, inside its session"
        )
    if state.isolated is not None:
        world, group = groups or (state.job_group, None)
        return Cell(state.isolated.cell, state.job_topology, rank=state.isolated.rank, group=group, world=world)
    world, group = groups or (None, state.federation)
    if group is None and not isinstance(world, CrossWorldGroup):
        group = world
    return Cell(state.topology.cell_of(rank), state.topology, rank=rank, group=group, world=world)


def check_path(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a checkpoint."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise ConfigError(f"path must be the checkpoint's folder, got {path!r}")
    folder = Path(os.path.abspath(path))
    if not folder.name or folder.name.startswith("."):
        raise ConfigError(f"path {folder} is hidden or has no name, as unfinished ones are; give another name")
    return folder


def run_collectively(
    what: str,
    act: Callable[[], T],
    path: Path,
    advice: str,
    show: Callable[[T], str] = lambda _: "done",
    *,
    world: Group | None,
    describe: Callable[[dict[int, str]], XfflError] | None = None,
) -> T:
    """Do this rank's share of something, which counts only where it worked on all ranks; collective over ``world``.

    ``world`` are all ranks of the job: ``state.job_group``, or a group in its place.
    """
    error: XfflError | None = None  # kept for the message where a rank dies before all have heard of it
    try:
        with run_on_all_ranks(f"{what} of a checkpoint", group=world, describe=describe) as share:
            try:
                result = act()
                share(show(result))
            except XfflError as wrong:
                error = wrong
                raise
            except (Exception, CheckpointException) as wrong:  # the latter, of DCP, is a BaseException
                error = CheckpointError(f"checkpoint {path}: {what} failed: {_reason(wrong)}; {advice}")
                raise error from wrong
    except XfflError:
        raise
    except RuntimeError as lost:  # a rank died: there is nobody to agree with
        before = f"{error} Also, " if error is not None else f"checkpoint {path}: "
        raise CheckpointError(f"{before}{what} was not confirmed by all ranks: {lost}; {advice}") from (error or lost)
    return result


def gather_in_cell(value: Any, cell: Cell) -> list[Any]:
    """Return a small value of each rank of the cell; collective over the cell."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * cell.sizes[cell.number]
    dist.all_gather_object(values, value, group=cell.group)
    return values


def _reason(error: BaseException) -> str:
    """Write an error as one line; torch's has those of several ranks in it."""
    if isinstance(error, CheckpointException):
        rank, (first, _) = min(error.failures.items(), key=lambda failure: failure[0])
        return f"rank {rank} of the cell: {_reason(first)}"
    if isinstance(error, pickle.UnpicklingError):  # torch's own text advises to run what the file holds
        return "a file holds something else than a tensor"
    hidden = find_os_error(error)
    behind = "" if hidden is None or hidden is error else f" ({hidden})"
    return f"{type(error).__name__}: {' '.join(str(error).split())}{behind}"
