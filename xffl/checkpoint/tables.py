"""The table of a cell's tensors, as its index has it: where each lies in the files, checked when it is read.

A table is refused that leaves elements of a tensor out or has them twice, that lies outside its files, or that claims
more elements than the bytes of its files can hold: whoever reads by the table takes no more memory than the files have.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from xffl.checks import shown
from xffl.distributed.values.sharding import dtype_of

__all__ = ["Chunk", "FileEntry", "StoredTensor", "read_counts", "read_files", "read_tensors"]

FileEntry = tuple[int, str]
"""Bytes and checksum of a file"""

MOST_DIMENSIONS = 64
"""Dimensions of a tensor at most, as torch has it"""
MOST_ELEMENTS = 2**62
"""Elements of a tensor at most; their product with any size of an element is a number of 64 bits or near it"""
ELEMENTS_OF_A_BYTE = 8
"""Elements that a byte of a file may hold at most: classes of tensors may keep single bits"""


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor and the bytes of a file that hold it. torch's reader knows the last four by these names."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


@dataclass(frozen=True)
class StoredTensor:
    """A tensor: what it is, and the boxes that it is kept in, which have each element once."""

    dtype: torch.dtype
    shape: torch.Size
    chunks: tuple[Chunk, ...]


def read_files(value: Any) -> dict[str, FileEntry]:
    """Return what an index says of its files; a ValueError says what is wrong."""
    if not isinstance(value, dict):
        raise ValueError(f"files must be a mapping, got {shown(value)}")
    files: dict[str, FileEntry] = {}
    for name, entry in value.items():
        if os.path.basename(name) != name or name in ("", ".", "..") or "\0" in name:
            raise ValueError(f"{shown(name)} lies outside the folder")
        if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[1], str):
            raise ValueError(f"file {shown(name)} must have its bytes and its checksum, got {shown(entry)}")
        (size,) = read_counts(entry[:1], f"file {shown(name)}")
        files[name] = (size, entry[1])
    return files


def read_tensors(value: Any, files: Mapping[str, FileEntry]) -> dict[str, StoredTensor]:
    """Return the tensors of an index; a ValueError says what is wrong."""
    if not isinstance(value, dict):
        raise ValueError(f"tensors must be a mapping, got {shown(value)}")
    return {name: _read_tensor(name, fields, files) for name, fields in value.items()}


def read_counts(value: Any, what: str, most: int = MOST_ELEMENTS) -> tuple[int, ...]:
    """Return a list of integers, none negative, of which there are as many as a tensor may have dimensions."""
    if not isinstance(value, list) or len(value) > MOST_DIMENSIONS:
        raise ValueError(f"{what} must be a list of {MOST_DIMENSIONS} integers at most, got {shown(value)}")
    for one in value:
        if type(one) is not int or not 0 <= one <= most:
            raise ValueError(f"{what} must be integers from 0 to {most}, got {shown(one)}")
    return tuple(value)


def _read_tensor(name: str, value: Any, files: Mapping[str, FileEntry]) -> StoredTensor:
    if not isinstance(value, dict) or not isinstance(value.get("chunks"), list):
        raise ValueError(f"{shown(name)} must have a dtype, a shape and chunks, got {shown(value)}")
    shape = read_counts(value.get("shape"), f"the shape of {shown(name)}")
    if math.prod(shape) > MOST_ELEMENTS:
        raise ValueError(f"{shown(name)} has the shape {shape}; {MOST_ELEMENTS} elements are read at most")
    dtype = dtype_of(value.get("dtype"))
    chunks = tuple(_read_chunk(name, chunk, shape, files) for chunk in value["chunks"])
    _check_cover(name, shape, chunks)
    return StoredTensor(dtype, torch.Size(shape), chunks)


def _read_chunk(name: str, value: Any, shape: tuple[int, ...], files: Mapping[str, FileEntry]) -> Chunk:
    if not isinstance(value, list) or len(value) != 5:
        raise ValueError(f"a chunk of {shown(name)} must have offsets, sizes, file, offset and length, {shown(value)}")
    offsets = read_counts(value[0], f"offsets of {shown(name)}")
    sizes = read_counts(value[1], f"sizes of {shown(name)}")
    if not len(offsets) == len(sizes) == len(shape):
        raise ValueError(f"a chunk of {shown(name)} has offsets {offsets} and sizes {sizes} for the shape {shape}")
    for start, size, whole in zip(offsets, sizes, shape, strict=True):
        if start + size > whole:
            raise ValueError(f"a chunk of {shown(name)} at {offsets} of sizes {sizes} leaves the shape {shape}")
    file = value[2]
    if not isinstance(file, str) or file not in files:
        raise ValueError(f"{shown(name)} lies in {shown(file)}, which is no file that it knows")
    offset, length = read_counts(value[3:], f"places of {shown(name)}")
    if offset + length > files[file][0]:
        raise ValueError(
            f"{shown(name)} lies at {offset} to {offset + length} of {file}, which has {files[file][0]} bytes"
        )
    if math.prod(sizes) > ELEMENTS_OF_A_BYTE * length:
        raise ValueError(f"{shown(name)} has {math.prod(sizes)} elements in {length} bytes")
    return Chunk(offsets=offsets, sizes=sizes, relative_path=file, offset=offset, length=length)


def _check_cover(name: str, shape: tuple[int, ...], chunks: Iterable[Chunk]) -> None:
    """Refuse boxes that leave elements out or have some twice."""
    filled = [chunk for chunk in chunks if 0 not in chunk.sizes]
    elements = sum(math.prod(chunk.sizes) for chunk in filled)
    if elements != math.prod(shape):
        raise ValueError(f"the chunks of {shown(name)} have {elements} elements, and its shape {shape} another number")
    if len(filled) > 1 and not (_is_grid(shape, filled) or _are_disjoint(filled)):
        raise ValueError(f"chunks of {shown(name)} overlap, so that others of its elements are in none")


def _is_grid(shape: tuple[int, ...], chunks: list[Chunk]) -> bool:
    """Tell whether boxes are the cells of a grid, each once, as ranks that share a tensor evenly write it."""
    cells = 1
    for axis, whole in enumerate(shape):
        starts = sorted({chunk.offsets[axis] for chunk in chunks})
        ends = dict(zip(starts, (*starts[1:], whole), strict=True))
        if any(chunk.offsets[axis] + chunk.sizes[axis] != ends[chunk.offsets[axis]] for chunk in chunks):
            return False
        cells *= len(starts)
    return cells == len(chunks) == len({chunk.offsets for chunk in chunks})


MOST_COMPARED = 10_000_000
"""Pairs of boxes that are compared at most, some seconds; a grid, or boxes along one dimension, need few or none"""


def _are_disjoint(chunks: list[Chunk]) -> bool:
    """Tell whether no two boxes share an element: those that begin before another one ends are compared with it."""
    ordered = sorted(chunks, key=lambda chunk: chunk.offsets)
    active: list[Chunk] = []
    compared = 0
    for chunk in ordered:
        active = [one for one in active if one.offsets[0] + one.sizes[0] > chunk.offsets[0]] if chunk.sizes else active
        compared += len(active)
        if compared > MOST_COMPARED:
            raise ValueError(f"a tensor lies in {len(chunks)} boxes without order, too many to compare")
        if any(_overlap(one, chunk) for one in active):
            return False
        active.append(chunk)
    return True


def _overlap(one: Chunk, other: Chunk) -> bool:
    return all(
        max(first, second) < min(first + length, second + width)
        for first, length, second, width in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )
