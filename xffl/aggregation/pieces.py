"""Tensors of a checkpoint's folder in pieces: mapped and read, combined by somebody, and written as they come.

Nothing is held in memory but the pieces that are under way.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import mmap
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xffl import __version__
from xffl.checkpoint.checksums import ALGORITHM
from xffl.checkpoint.folder import INDEX, Record, aside, publish, read_record, settle, sync, write_text
from xffl.checkpoint.storage import check_data, read_index
from xffl.distributed.plain import Plain
from xffl.errors import CheckpointError

__all__ = ["Box", "PieceReader", "PieceWriter", "boxes"]

PIECE_BYTES = 8 << 20
"""What is read at a time."""
DATA = "__0_0.distcp"
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a piece of a tensor begins, and its sizes."""


class PieceReader:
    """The tensors of a checkpoint of one cell, read in pieces.

    :param path: Its folder.
    :param part: The part that the tensors are of.
    """

    def __init__(self, path: Path, part: str) -> None:
        folder = settle(path)
        self.path, self._part, self.home = path, part, folder / "cell_0"
        self.index = read_index(self.home, read_record(folder).indexes.get(self.home.name))
        self._maps: dict[str, mmap.mmap] = {}
        self._pieces: dict[tuple[str, int], np.ndarray[Any, np.dtype[np.uint8]]] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(size for size, _ in self.index.files.values())

    def check(self) -> None:
        """Compare the files with their checksums.

        :raises CheckpointError: if one differs.
        """
        check_data(self.home, self.index)

    def kind(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return a tensor's data type and shape.

        :param name: The tensor.
        :return: Both.
        """
        tensor = self.index.tensors[f"{self._part}/{name}"]
        return tensor.dtype, tuple(tensor.shape)

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a piece of a tensor as a flat copy of real numbers.

        :param name: The tensor.
        :param box: The piece.
        :return: Its values.
        :raises CheckpointError: if the files do not hold it.
        """
        tensor = self.index.tensors[f"{self._part}/{name}"]
        width = tensor.dtype.itemsize
        starts, sizes = box
        found = np.empty((*sizes, width), np.uint8)
        filled = 0
        for chunk in tensor.chunks:
            low = [max(a, b) for a, b in zip(starts, chunk.offsets, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(starts, sizes, chunk.offsets, chunk.sizes, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                source = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offsets, strict=True))
                target = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, starts, strict=True))
                data = self._bytes(name, chunk.relative_path, chunk.offset, chunk.length, (*chunk.sizes, width))
                found[target] = data[source]
                filled += math.prod(b - a for a, b in zip(low, high, strict=True))
        if filled != math.prod(sizes):
            raise CheckpointError(f"{self.home / INDEX} does not say where all of {name!r} lies; write it anew")
        real = tensor.dtype.to_real() if tensor.dtype.is_complex else tensor.dtype
        return torch.from_numpy(found.reshape(-1)).view(real)

    def _bytes(
        self, name: str, file: str, offset: int, length: int, shape: tuple[int, ...]
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the bytes of one of torch's files inside a file, where they lie."""
        if (file, offset) not in self._pieces:
            if file not in self._maps:
                with (self.home / file).open("rb") as stream:
                    self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            whole = memoryview(self._maps[file])[offset : offset + length]
            try:
                start, size = _storage(whole)
                if size != math.prod(shape):
                    raise ValueError(f"{size} bytes in place of {math.prod(shape)}")
            except (ValueError, KeyError, zipfile.BadZipFile) as error:
                raise CheckpointError(
                    f"{self.home / file} does not hold {name!r} as xffl writes it ({error}); write it anew"
                ) from error
            flat = np.frombuffer(whole[start : start + size], np.uint8)
            self._pieces[file, offset] = flat
        return self._pieces[file, offset].reshape(shape)

    def close(self) -> None:
        """Give the mapped files back."""
        self._pieces.clear()
        self._maps.clear()


class PieceWriter:
    """A checkpoint of one cell that is written in pieces, and takes its name when it is whole.

    :param target: The folder to make; a checkpoint of that name is replaced.
    """

    def __init__(self, target: Path) -> None:
        self._target, self._partial = target, aside(target, "partial")
        before = settle(target)
        if before != target:
            before.rename(target)
        if self._partial.exists():  # of a call that was killed
            shutil.rmtree(self._partial)
        self._home = self._partial / "cell_0"
        self._home.mkdir(parents=True)
        self._file, self._sum, self._size = (self._home / DATA).open("wb"), hashlib.sha256(), 0
        self._tensors: dict[str, dict[str, Any]] = {}

    def write(self, name: str, box: Box, values: torch.Tensor, shape: Sequence[int]) -> None:
        """Write a piece of a tensor.

        :param name: The tensor.
        :param box: Where the piece lies in it.
        :param values: Its values, flat, in the tensor's data type.
        :param shape: The whole tensor's shape.
        """
        buffer = io.BytesIO()
        torch.save(values.view(box[1]), buffer)
        data = buffer.getbuffer()
        self._file.write(data)
        self._sum.update(data)
        dtype = str(values.dtype).removeprefix("torch.")
        kept = self._tensors.setdefault(name, {"dtype": dtype, "shape": list(shape), "chunks": []})
        kept["chunks"].append([list(box[0]), list(box[1]), DATA, self._size, len(data)])
        self._size += len(data)

    def publish(self, part: str, values: Mapping[str, Plain], told: Mapping[str, Plain]) -> None:
        """Give the folder its name.

        :param part: The only part.
        :param values: Plain values of the part.
        :param told: What the checkpoint says of itself.
        """
        self._file.close()
        sync(self._home / DATA)
        files = {DATA: (self._size, self._sum.hexdigest())}
        index = {"checksum": ALGORITHM, "files": files, "tensors": self._tensors, "ties": {}, "values": dict(values)}
        text = json.dumps(index, allow_nan=False)
        write_text(self._home / INDEX, text)
        sync(self._home)
        record = Record(
            xffl=__version__,
            torch=torch.__version__,
            saved_at=datetime.now(timezone.utc).isoformat(),
            world_size=1,
            cells=(1,),
            replica_size=None,
            cell_shape=None,
            after_round=True,
            parts=(part,),
            own=(),
            values=dict(told),
            indexes={"cell_0": hashlib.sha256(text.encode()).hexdigest()},
        )
        publish(self._target, record)

    def discard(self) -> None:
        """Leave nothing of it."""
        self._file.close()
        shutil.rmtree(self._partial, ignore_errors=True)


def boxes(dtype: torch.dtype, shape: tuple[int, ...]) -> Iterator[Box]:
    """Cut a tensor into boxes that follow each other in memory, of a few MiB at most; pure.

    :param dtype: Its data type.
    :param shape: Its shape.
    :yield: Each box.
    """
    yield from _cut(shape, max(1, PIECE_BYTES // dtype.itemsize))


def _cut(shape: tuple[int, ...], limit: int) -> Iterator[Box]:
    if math.prod(shape) <= limit or not shape:
        yield (0,) * len(shape), shape
        return
    row = math.prod(shape[1:])
    step = max(1, limit // row)
    for start in range(0, shape[0], step):
        count = min(step, shape[0] - start)
        for starts, sizes in _cut(shape[1:], limit) if count * row > limit else [((0,) * (len(shape) - 1), shape[1:])]:
            yield (start, *starts), (count, *sizes)


def _storage(data: memoryview) -> tuple[int, int]:
    """Return where the bytes of the only storage begin in one of torch's files, and how many they are."""
    archive = zipfile.ZipFile(io.BufferedReader(_Reader(data)))
    (entry,) = (one for one in archive.infolist() if one.filename.rpartition("/")[0].endswith("/data"))
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError("it is compressed")
    local = bytes(data[entry.header_offset : entry.header_offset + 30])
    start = entry.header_offset + 30 + int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
    return start, entry.file_size


class _Reader(io.RawIOBase):
    """A part of a mapped file, to be read like one; nothing is copied but what is asked for."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._place = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part = self._data[self._place : self._place + len(buffer)]
        buffer[: len(part)] = part
        self._place += len(part)
        return len(part)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: len(self._data)}[whence]
        self._place = base + offset
        return self._place

    def tell(self) -> int:
        return self._place
