"""A round over files: what ``xffl aggregate`` makes of the exports of cells that no network joins.

No process group, and no more memory than some pieces of a tensor: inputs are mapped, combined piece by piece with the
arithmetic of a round over the network, and written as they come. The result has the same bits.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import mmap
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from xffl import __version__
from xffl.aggregation.combine import Combiner, Coordinatewise, Weighting
from xffl.aggregation.exports import PART, compare, read_told
from xffl.aggregation.looks import energy_of
from xffl.aggregation.mean import combined, weighted_mean
from xffl.aggregation.registry import make
from xffl.aggregation.tracks import Turnout
from xffl.aggregation.weighing import weighed
from xffl.checkpoint.checksums import ALGORITHM
from xffl.checkpoint.folder import INDEX, Record, aside, find_record, publish, read_record, settle, sync, write_text
from xffl.checkpoint.steps import check_path
from xffl.checkpoint.storage import CellIndex, check_data, read_index
from xffl.errors import CheckpointError, ConfigError

__all__ = ["Round", "aggregate_exports"]

PIECE_BYTES = 8 << 20
"""What is combined at a time."""
DATA = "__0_0.distcp"
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a piece of a tensor begins, and its sizes."""


@dataclass(frozen=True)
class Round:
    """What a round of exports is made of."""

    number: int
    cells: int
    shares: tuple[float, ...]
    """What each cell counts for, of all"""
    tensors: int
    size_bytes: int
    """Of the tensors of the result"""


@dataclass
class _Export:
    """An export that is read."""

    path: Path
    home: Path
    index: CellIndex
    told: dict[str, Any]
    maps: dict[str, mmap.mmap] = field(default_factory=dict)
    pieces: dict[tuple[str, int], np.ndarray[Any, np.dtype[np.uint8]]] = field(default_factory=dict)

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a piece of a tensor as a flat copy of real numbers."""
        tensor = self.index.tensors[f"{PART}/{name}"]
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
            raise CheckpointError(f"{self.home / INDEX} does not say where all of {name!r} lies; export it anew")
        real = tensor.dtype.to_real() if tensor.dtype.is_complex else tensor.dtype
        return torch.from_numpy(found.reshape(-1)).view(real)

    def _bytes(
        self, name: str, file: str, offset: int, length: int, shape: tuple[int, ...]
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the bytes of one of torch's files inside a file, where they lie."""
        if (file, offset) not in self.pieces:
            if file not in self.maps:
                with (self.home / file).open("rb") as stream:
                    self.maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            whole = memoryview(self.maps[file])[offset : offset + length]
            try:
                start, size = _storage(whole)
                if size != math.prod(shape):
                    raise ValueError(f"{size} bytes in place of {math.prod(shape)}")
            except (ValueError, KeyError, zipfile.BadZipFile) as error:
                raise CheckpointError(
                    f"{self.home / file} does not hold {name!r} as xffl exports it ({error}); export it anew"
                ) from error
            flat = np.frombuffer(whole[start : start + size], np.uint8)
            self.pieces[file, offset] = flat
        return self.pieces[file, offset].reshape(shape)

    def close(self) -> None:
        """Give the mapped files back."""
        self.pieces.clear()
        self.maps.clear()


def aggregate_exports(
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    weights: Sequence[float] | None = None,
    combine: object = "mean",
    is_tried: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Round:
    """Make a round of the exports of all cells, in one process.

    The files of all inputs are compared with their checksums first. The result is a checkpoint of one part, with
    checksums of its own, which takes its name when it is whole: :func:`xffl.aggregation.exports.load_global` loads it
    into any layout. It has the bits that a round over the network gives on processors of this kind.

    :param paths: The exports' folders, in any order.
    :param out: The folder to make; a result of an earlier round there is replaced.
    :param weights: What each cell counts for, by its number; by default as each has counted.
    :param combine: As for :class:`xffl.Aggregator`; what needs distances, norms or the model before is refused.
    :param is_tried: Whether to check all and write nothing.
    :param progress: Called with a stage, the bytes done and all of its bytes.
    :return: What was made.
    :raises ConfigError: if an argument cannot be meant.
    :raises CheckpointError: if an export cannot be trusted, or the exports do not go together; nothing is written.
    """
    target = check_path(out)
    combiner = make("combine", combine)
    exports = _open(paths, progress or (lambda *_: None))
    told = exports[0].told
    turnout = _turnout(exports, combiner, weights)
    sizes = {name: _bytes_of(exports[0], name) for name in told["tensors"]}
    made = Round(
        told["round"],
        told["cells"],
        tuple(turnout.share(cell) for cell in range(told["cells"])),
        len(sizes),
        sum(sizes.values()),
    )
    _check_target(target)
    note = _Noting(progress, made.size_bytes)
    turnout = _looked(exports, turnout, note)
    if not is_tried:
        _write(target, exports, turnout, combiner, note)
    for export in exports:
        export.close()
    return made


def _check_target(target: Path) -> None:
    """Refuse to replace anything but the result of another round."""
    record = find_record(target)
    is_result = record is not None and record.parts == (PART,) and "global" in record.values
    if target.exists() and not is_result and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"{target} exists and is no result of xffl aggregate, which would be replaced; give another")


class _Noting:
    """Tells how far a stage has come."""

    def __init__(self, tell: Callable[[str, int, int], None] | None, size: int) -> None:
        self._tell, self._size, self._stage, self._done = tell, size, "", 0

    def __call__(self, stage: str, count: int) -> None:
        self._done = self._done + count if stage == self._stage else count
        self._stage = stage
        if self._tell is not None:
            self._tell(stage, self._done, self._size)


def _open(paths: Sequence[str | Path], progress: Callable[[str, int, int], None]) -> list[_Export]:
    """Read what the exports say of themselves, compare it, and compare their files with the checksums."""
    if not paths:
        raise ConfigError("no export is given; give the folder of each cell")
    found: dict[int, _Export] = {}
    first: _Export | None = None
    for path in paths:
        folder = settle(check_path(path))
        told = read_told(folder, "export")
        home = folder / "cell_0"
        export = _Export(Path(path), home, read_index(home, read_record(folder).indexes.get(home.name)), told)
        first = first or export
        for what in ("cells", "round"):
            if told[what] != first.told[what]:
                raise CheckpointError(
                    f"{path} is of {what} {told[what]}, {first.path} of {first.told[what]}; give exports of one round"
                )
        compare(told["tensors"], first.told["tensors"], str(path), str(first.path))
        if told["cell"] in found:
            raise CheckpointError(
                f"{path} and {found[told['cell']].path} are both of cell {told['cell']}; give one of each cell"
            )
        found[told["cell"]] = export
    assert first is not None, "there is a path"
    missing = sorted(set(range(first.told["cells"])) - found.keys())
    if missing:
        raise CheckpointError(f"the export of cell {missing[0]} of {first.told['cells']} is missing; give one of each")
    exports = [found[cell] for cell in sorted(found)]
    sizes = [sum(size for size, _ in export.index.files.values()) for export in exports]
    for number, export in enumerate(exports):
        check_data(export.home, export.index)
        progress("checked", sum(sizes[: number + 1]), sum(sizes))
    return exports


def _turnout(exports: Sequence[_Export], combiner: Combiner, weights: Sequence[float] | None) -> Turnout:
    """Return what the cells count for."""
    if isinstance(combiner, Weighting) and (combiner.needs_distances or combiner.needs_norms or combiner.has_scale):
        raise ConfigError(
            f"combine {type(combiner).__name__} needs more than the exports hold (distances, norms or the model "
            "before); give mean, or one that looks at each element by itself"
        )
    given = [export.told["weight"] for export in exports] if weights is None else [float(weight) for weight in weights]
    if len(given) != len(exports):
        raise ConfigError(f"{len(given)} weights are given for {len(exports)} cells; give one for each")
    if not all(math.isfinite(weight) and weight >= 0.0 for weight in given) or not any(given):
        raise ConfigError(f"weights {given} must be finite, none negative and one positive")
    steps = tuple(export.told["steps"] for export in exports)
    turnout = Turnout(tuple(given), first=0, number=exports[0].told["round"], steps=steps)
    combiner.check(len(turnout.cells))
    return weighed(turnout, combiner)


def _looked(exports: Sequence[_Export], turnout: Turnout, note: _Noting) -> Turnout:
    """Refuse values that are not finite, and tell how the others may be combined, as the ranks of a round do."""
    is_moderate = True
    for name, (policy, *_) in exports[0].told["tensors"].items():
        for box in _boxes(exports[0], name) if policy == "average" else ():
            for export in exports:
                values = export.read(name, box)
                if not math.isfinite(energy_of(values).item()):
                    if not values.isfinite().all():
                        raise CheckpointError(
                            f"{export.path}: tensor {name!r} of cell {export.told['cell']} has values that are not "
                            "finite; nothing was combined"
                        )
                    is_moderate = False
            note("looked", math.prod(box[1]) * exports[0].index.tensors[f"{PART}/{name}"].dtype.itemsize)
    return replace(turnout, is_fused=is_moderate)


def _write(target: Path, exports: Sequence[_Export], turnout: Turnout, combiner: Combiner, note: _Noting) -> None:
    """Combine, piece by piece, and publish the result."""
    before = settle(target)
    if before != target:
        before.rename(target)
    partial = aside(target, "partial")
    if partial.exists():  # of a call that was killed
        shutil.rmtree(partial)
    home = partial / "cell_0"
    home.mkdir(parents=True)
    told = exports[0].told
    tensors: dict[str, Any] = {}
    try:
        with (home / DATA).open("wb") as file:
            stream = _Hashed(file)
            for name, (policy, *_) in told["tensors"].items():
                kept = exports[0].index.tensors[f"{PART}/{name}"]
                chunks = []
                for box in _boxes(exports[0], name):
                    made = _combined(exports, turnout, combiner, name, policy, box)
                    whole = made.view(kept.dtype).view(box[1])
                    start = stream.size
                    buffer = io.BytesIO()
                    torch.save(whole, buffer)
                    stream.write(buffer.getbuffer())
                    chunks.append([list(box[0]), list(box[1]), DATA, start, stream.size - start])
                    note("combined", whole.nbytes)
                dtype = str(kept.dtype).removeprefix("torch.")
                tensors[f"{PART}/{name}"] = {"dtype": dtype, "shape": list(kept.shape), "chunks": chunks}
            file.flush()
        sync(home / DATA)
        index = {
            "checksum": ALGORITHM,
            "files": {DATA: (stream.size, stream.digest)},
            "tensors": tensors,
            "ties": {},
            "values": exports[0].index.values,
        }
        text = json.dumps(index, allow_nan=False)
        write_text(home / INDEX, text)
        sync(home)
        publish(target, _record(told, turnout, hashlib.sha256(text.encode()).hexdigest()))
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{target} cannot be written: {error}; see that there is space") from error


class _Hashed:
    """A file that is written, with its size and checksum so far."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._sum, self.size = file, hashlib.sha256(), 0

    def write(self, data: Any) -> None:
        self._file.write(data)
        self._sum.update(data)
        self.size += len(data)

    @property
    def digest(self) -> str:
        return self._sum.hexdigest()


def _record(told: Mapping[str, Any], turnout: Turnout, digest: str) -> Record:
    shares = [turnout.share(cell) for cell in range(told["cells"])]
    kept = {"round": told["round"], "cells": told["cells"], "shares": shares, "tensors": told["tensors"]}
    return Record(
        xffl=__version__,
        torch=torch.__version__,
        saved_at=datetime.now(timezone.utc).isoformat(),
        world_size=1,
        cells=(1,),
        replica_size=None,
        cell_shape=None,
        after_round=True,
        parts=(PART,),
        own=(),
        values={"global": kept},
        indexes={"cell_0": digest},
    )


def _combined(
    exports: Sequence[_Export], turnout: Turnout, combiner: Combiner, name: str, policy: str, box: Box
) -> torch.Tensor:
    """Return a piece of the result, flat."""
    if policy == "first":
        return exports[turnout.first].read(name, box)
    values = [exports[cell].read(name, box) for cell in turnout.cells]
    out = torch.empty_like(values[0])
    if isinstance(combiner, Coordinatewise):
        combined(combiner.combine, values, out)
    else:
        weighted_mean(values, [turnout.counts[cell] for cell in turnout.cells], out, is_fused=turnout.is_fused)
    return out


def _bytes_of(export: _Export, name: str) -> int:
    tensor = export.index.tensors[f"{PART}/{name}"]
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _boxes(export: _Export, name: str) -> Iterator[Box]:
    """Cut a tensor into boxes that follow each other in memory, of a few MiB at most."""
    tensor = export.index.tensors[f"{PART}/{name}"]
    yield from _cut(tuple(tensor.shape), max(1, PIECE_BYTES // tensor.dtype.itemsize))


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
