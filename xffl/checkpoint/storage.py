"""Where tensors lie in a cell's folder: torch's files, with an index in JSON in place of torch's pickled one."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
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

from xffl.checkpoint.folder import INDEX, sync_folder, write_text
from xffl.checkpoint.plain import Plain
from xffl.errors import CheckpointError

__all__ = ["CellIndex", "CellReader", "CellWriter", "read_index"]


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
class _Tensor:
    dtype: torch.dtype
    shape: torch.Size
    chunks: tuple[_Chunk, ...]


@dataclass(frozen=True)
class CellIndex:
    """What a cell's folder holds: tensors and plain values by name."""

    tensors: dict[str, _Tensor]
    values: dict[str, Plain]

    def files(self) -> dict[str, int]:
        """Return the bytes of each file.

        :return: Sizes by file name.
        """
        sizes: dict[str, int] = {}
        for chunk in (chunk for tensor in self.tensors.values() for chunk in tensor.chunks):
            sizes[chunk.relative_path] = max(sizes.get(chunk.relative_path, 0), chunk.offset + chunk.length)
        return sizes

    def metadata(self) -> Metadata:
        """Return what torch's planners and reader want to know.

        :return: The index in torch's form.
        """
        told = Metadata(state_dict_metadata={}, storage_data={})
        for name, tensor in self.tensors.items():
            boxes = [
                ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in tensor.chunks
            ]
            properties = TensorProperties(dtype=tensor.dtype)
            told.state_dict_metadata[name] = TensorStorageMetadata(properties, tensor.shape, boxes)
            told.storage_data |= {MetadataIndex(name, chunk.offsets): chunk for chunk in tensor.chunks}
        return told


class CellWriter(FileSystemWriter):
    """Write a cell's tensors, each rank a file, and the index by the cell's first rank.

    :param folder: The cell's folder.
    :param values: Plain values for the index; they count on the cell's first rank.
    """

    def __init__(self, folder: Path, values: dict[str, Plain]) -> None:
        super().__init__(folder, sync_files=True)
        self.folder = folder
        self.values = values

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file; ranks whose tensors another one writes make none.

        :param plan: What this rank writes.
        :param planner: Where it gets the data.
        :return: Where each piece lies.
        """
        if not plan.items:
            nothing: Future[list[WriteResult]] = Future()
            nothing.set_result([])
            return nothing
        written: Future[list[WriteResult]] = super().write_data(plan, planner)
        written.wait()
        sync_folder(self.folder)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index; called on the cell's first rank when all have written.

        :param metadata: The tensors and how they are cut.
        :param results: Where each piece lies, by rank.
        """
        places = {written.index: written.storage_data for by_rank in results for written in by_rank}
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata), "only tensors are given to torch"
            chunks = []
            for box in tensor.chunks:
                place = places[MetadataIndex(name, box.offsets)]
                chunks.append([list(box.offsets), list(box.sizes), place.relative_path, place.offset, place.length])
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(tensor.size), "chunks": chunks}
        write_text(self.folder / INDEX, json.dumps({"tensors": tensors, "values": self.values}, allow_nan=False))
        sync_folder(self.folder)


class CellReader(FileSystemReader):
    """Read a cell's tensors from where the index says; torch opens each with ``weights_only``.

    :param folder: The cell's folder.
    :param index: Its index.
    """

    def __init__(self, folder: Path, index: CellIndex) -> None:
        super().__init__(folder)
        self.index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        r"""Return the index in torch's form.

        :param \*args: None is used.
        :param \**kwargs: None is used.
        :return: The tensors and where they lie.
        """
        return self.index.metadata()


def read_index(folder: Path) -> CellIndex:
    """Read the index of a cell's folder.

    :param folder: The cell's folder.
    :return: What it holds.
    :raises CheckpointError: if it cannot be read.
    """
    path = folder / INDEX
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        tensors = {}
        for name, tensor in told["tensors"].items():
            chunks = tuple(_Chunk(tuple(chunk[0]), tuple(chunk[1]), *chunk[2:]) for chunk in tensor["chunks"])
            if any(os.path.basename(chunk.relative_path) != chunk.relative_path for chunk in chunks):
                raise ValueError(f"{name!r} lies outside the folder")
            dtype = getattr(torch, tensor["dtype"])
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{name!r} is of no known dtype")
            tensors[name] = _Tensor(dtype, torch.Size(tensor["shape"]), chunks)
        return CellIndex(tensors, dict(told["values"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; the checkpoint is damaged, load another one") from error
