"""Storage of a cell's tensors: torch's files, with an index in JSON in place of torch's pickled one."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from xffl.checkpoint.format import ALGORITHM, INDEX, FileEntry, check_file, checksum, file_entry, sync, write_text
from xffl.distributed.sharding import Plain
from xffl.errors import CheckpointError

__all__ = ["CellIndex", "CellReader", "CellWriter", "check_data", "read_index", "read_tensor"]


@dataclass(frozen=True)
class _Chunk:
    """A box of a tensor and the bytes of a file that hold it. torch's reader knows the last four by these names."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


@dataclass(frozen=True)
class _WrittenPiece:
    """Where a rank has written a piece, and what its file is."""

    relative_path: str
    offset: int
    length: int
    file: FileEntry


@dataclass(frozen=True)
class _StoredTensor:
    dtype: torch.dtype
    shape: torch.Size
    chunks: tuple[_Chunk, ...]


@dataclass(frozen=True)
class CellIndex:
    """What a cell's folder holds: tensors and plain values by name."""

    tensors: dict[str, _StoredTensor]
    values: dict[str, Plain]
    files: dict[str, FileEntry]
    """Bytes and checksum of each file"""
    ties: dict[str, str]
    """Tensors that are another one of the same model, by name"""

    def data_files(self) -> list[str]:
        """Return the files that hold tensors, the largest first."""
        names = {chunk.relative_path for tensor in self.tensors.values() for chunk in tensor.chunks}
        return sorted(names, key=lambda name: (-self.files[name][0], name))

    def metadata(self) -> Metadata:
        """Return what torch's planners and reader want to know."""
        metadata = Metadata(state_dict_metadata={}, storage_data={})
        for name, tensor in self.tensors.items():
            boxes = [
                ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in tensor.chunks
            ]
            properties = TensorProperties(dtype=tensor.dtype)
            metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, tensor.shape, boxes)
            metadata.storage_data |= {MetadataIndex(name, chunk.offsets): chunk for chunk in tensor.chunks}
        return metadata


class CellWriter(FileSystemWriter):
    """Write a cell's tensors, each rank a file, and the index by the cell's first rank."""

    def __init__(
        self,
        folder: Path,
        values: dict[str, Plain],
        ties: Mapping[str, str] | None = None,
        files: Mapping[str, FileEntry] | None = None,
    ) -> None:
        super().__init__(folder, sync_files=True)
        self.folder = folder
        self.values = values
        self.ties = dict(ties or {})
        self.files = dict(files or {})

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file and read it back for its checksum; a rank with nothing to write makes none."""
        pieces: list[WriteResult] = []
        if plan.items:
            pieces = super().write_data(plan, planner).wait()
            sync(self.folder)
        names = {piece.storage_data.relative_path for piece in pieces}
        files = {name: file_entry(self.folder / name) for name in names}
        for number, piece in enumerate(pieces):
            at = piece.storage_data
            place = _WrittenPiece(at.relative_path, at.offset, at.length, files[at.relative_path])
            pieces[number] = replace(piece, storage_data=place)
        written: Future[list[WriteResult]] = Future()
        written.set_result(pieces)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index; called on the cell's first rank when all have written."""
        places = {written.index: written.storage_data for by_rank in results for written in by_rank}
        files = self.files | {place.relative_path: place.file for place in places.values()}
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata), "only tensors are given to torch"
            chunks = []
            for box in tensor.chunks:
                place = places[MetadataIndex(name, box.offsets)]
                chunks.append([list(box.offsets), list(box.sizes), place.relative_path, place.offset, place.length])
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(tensor.size), "chunks": chunks}
        index = {"checksum": ALGORITHM, "files": files, "tensors": tensors, "ties": self.ties, "values": self.values}
        write_text(self.folder / INDEX, json.dumps(index, allow_nan=False))
        sync(self.folder)


class CellReader(FileSystemReader):
    """Read a cell's tensors from where the index says; torch opens each with ``weights_only``."""

    def __init__(self, folder: Path, index: CellIndex) -> None:
        super().__init__(folder)
        self.index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        r"""Return the index in torch's form."""
        return self.index.metadata()


def read_index(folder: Path, digest: str | None) -> CellIndex:
    """Read the index of a cell's folder."""
    path = folder / INDEX
    try:
        if checksum(path) != digest:
            raise CheckpointError(
                f"{path} is not the file that was saved (its checksum differs); load another checkpoint"
            )
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["checksum"] != ALGORITHM:
            raise ValueError(f"its checksums are {content['checksum']!r}")
        files = {str(name): (int(size), str(checked)) for name, (size, checked) in content["files"].items()}
        tensors = {}
        for name, tensor in content["tensors"].items():
            chunks = tuple(_Chunk(tuple(chunk[0]), tuple(chunk[1]), *chunk[2:]) for chunk in tensor["chunks"])
            if any(chunk.relative_path not in files for chunk in chunks):
                raise ValueError(f"{name!r} lies in no file that it knows")
            dtype = getattr(torch, tensor["dtype"])
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{name!r} is of no known dtype")
            tensors[name] = _StoredTensor(dtype, torch.Size(tensor["shape"]), chunks)
        if wrong := [name for name in files if os.path.basename(name) != name]:
            raise ValueError(f"{wrong[0]!r} lies outside the folder")
        return CellIndex(tensors, dict(content["values"]), files, dict(content["ties"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; the checkpoint is damaged, load another one") from error


def check_data(folder: Path, index: CellIndex, place: int = 0, places: int = 1) -> None:
    """Read this rank's share of a cell's files and compare them with their checksums."""
    for name in index.data_files()[place::places]:
        check_file(folder / name, index.files[name])


def read_tensor(folder: Path, index: CellIndex, name: str) -> torch.Tensor:
    """Read a whole tensor on the CPU, with no process group."""
    tensor = index.tensors[name]
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for chunk in tensor.chunks:
        file = folder / chunk.relative_path
        try:
            with file.open("rb") as stream:
                stream.seek(chunk.offset)
                piece = torch.load(io.BytesIO(stream.read(chunk.length)), map_location="cpu", weights_only=True)
            if not isinstance(piece, torch.Tensor) or piece.dtype != tensor.dtype:
                raise ValueError("it holds something else than a tensor of this dtype")
            box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[box] = piece
        except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
            raise CheckpointError(
                f"{file} does not hold {name!r}: {type(error).__name__}; the checkpoint is damaged, load another one"
            ) from error
    return whole
