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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from xffl import __version__
from xffl.aggregation.algorithms.combiners import Combiner, Coordinatewise
from xffl.aggregation.algorithms.registry import make
from xffl.aggregation.algorithms.server import ServerOptimizer, asked_of, server_of
from xffl.aggregation.engine.exchange import sum_of_squares, weigh_cells
from xffl.aggregation.engine.plan import RoundContext
from xffl.aggregation.exports import (
    PART,
    RoundPlan,
    check_combiner,
    check_folder,
    compare,
    digest_of_folder,
    read_told,
)
from xffl.aggregation.mean import combined, weighted_mean, wide_type
from xffl.checkpoint.format import (
    ALGORITHM,
    INDEX,
    Record,
    check_path,
    find_record,
    locate_checkpoint,
    publish,
    read_record,
    sync,
    temporary_path,
    write_text,
)
from xffl.checkpoint.storage import check_data, read_index
from xffl.distributed.sharding import Plain, from_plain, to_plain
from xffl.errors import CheckpointError, ConfigError

__all__ = ["Box", "OfflineServer", "PieceReader", "PieceWriter", "Round", "aggregate_exports", "boxes"]


PIECE_BYTES = 8 << 20
"""What is read at a time."""
DATA = "__0_0.distcp"
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a piece of a tensor begins, and its sizes."""


class PieceReader:
    """The tensors of a checkpoint of one cell, read in pieces."""

    def __init__(self, path: Path, part: str) -> None:
        folder = locate_checkpoint(path)
        self.path, self._part, self.home = path, part, folder / "cell_0"
        self.index = read_index(self.home, read_record(folder).indexes.get(self.home.name))
        self._maps: dict[str, mmap.mmap] = {}
        self._pieces: dict[tuple[str, int], np.ndarray[Any, np.dtype[np.uint8]]] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(size for size, _ in self.index.files.values())

    def check(self) -> None:
        """Compare the files with their checksums."""
        check_data(self.home, self.index)

    def kind(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return a tensor's data type and shape."""
        tensor = self.index.tensors[f"{self._part}/{name}"]
        return tensor.dtype, tuple(tensor.shape)

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a piece of a tensor as a flat copy of real numbers."""
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
    """A checkpoint of one cell that is written in pieces, and takes its name when it is whole."""

    def __init__(self, target: Path) -> None:
        self._target, self._partial = target, temporary_path(target, "partial")
        before = locate_checkpoint(target)
        if before != target:
            before.rename(target)
        if self._partial.exists():  # of a call that was killed
            shutil.rmtree(self._partial)
        self._home = self._partial / "cell_0"
        self._home.mkdir(parents=True)
        self._file, self._sum, self._size = (self._home / DATA).open("wb"), hashlib.sha256(), 0
        self._tensors: dict[str, dict[str, Any]] = {}

    def write(self, name: str, box: Box, values: torch.Tensor, shape: Sequence[int]) -> None:
        """Write a piece of a tensor."""
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
        """Give the folder its name."""
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
    """Cut a tensor into boxes that follow each other in memory, of a few MiB at most; pure."""
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


STATE = "server"
"""The only part of a state; its tensors are ``server/model/NAME``, and ``server/KEY/NAME`` of the optimizer."""


class OfflineServer:
    """Take the agreed model on by a round, as the ranks do in a networked round; elementwise."""

    def __init__(self, server: ServerOptimizer, folder: Path, told: Mapping[str, Any], start: Path | None) -> None:
        self._server, self._told = server, told
        self._target = folder / f"round_{told['round']}"
        self._writer: PieceWriter | None = None
        self._numbers: dict[str, Any] = {}
        self._elements: list[str] = []
        probe = server.make([torch.zeros(1)])
        self._schedule = server.make_schedule(probe)
        self._asked, self._probe = asked_of(probe, self._schedule), probe
        before = folder / f"round_{told['round'] - 1}"
        record = find_record(locate_checkpoint(before))
        if record is not None and record.parts == (STATE,):
            kept: dict[str, Any] = from_plain(record.values[STATE], {})
            compare(kept["tensors"], told["tensors"], str(before), "the exports")
            saved = kept["asked"]
            others = sorted(key for key in self._asked.keys() & saved.keys() if self._asked[key] != saved[key])
            if others:
                there, here = (", ".join(f"{key}={one[key]}" for key in others) for one in (saved, self._asked))
                raise CheckpointError(
                    f"{before} is the state of a server optimizer with {there}, and {here} is asked for; go on with "
                    "the same server"
                )
            self._old, self._prefix = PieceReader(before, STATE), "model/"
            self._elements, self._numbers = kept["elements"], kept["numbers"]
            probe.param_groups[0].update(kept["options"])
            if self._schedule is not None:
                self._schedule.load_state_dict(kept["schedule"])
        elif start is not None:
            first = read_told(start, "global")
            compare(first["tensors"], told["tensors"], str(start), "the exports")
            self._old, self._prefix = PieceReader(start, PART), ""
        else:
            raise CheckpointError(
                f"{folder} has no state of round {told['round'] - 1}, so the model that the cells have started from is "
                "not known; for a first round give it (--start)"
            )
        self._old.check()
        self._made: Optimizer | None = None
        self._made_elements: list[str] = []

    def begin(self) -> None:
        """Begin to write the state after the round."""
        self._writer = PieceWriter(self._target)

    @torch.no_grad()
    def step(self, name: str, box: Box, mean: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Take a piece of a tensor on."""
        assert self._writer is not None, "begun"
        # The state is of real numbers; those of a complex tensor are pairs of them.
        is_pairs = mean.numel() != math.prod(box[1])
        flat, whole = ((*shape, 2), ((*box[0], 0), (*box[1], 2))) if is_pairs else (shape, box)
        place = whole if self._prefix else box
        kept = self._old.read(f"{self._prefix}{name}", place).to(wide_type(mean.dtype))
        optimizer = self._server.make([kept])
        optimizer.param_groups[0].update({key: _copied(value) for key, value in self._options().items()})
        state = {key: self._old.read(f"{key}/{name}", place) for key in self._elements}
        state |= {key: _number(value) for key, value in self._numbers.items()}
        if state:
            optimizer.state[kept].update(state)
        # From what was written, so that what rounding to a narrow type has left out is not taken for a step.
        kept.grad = torch.sub(kept.to(mean.dtype).to(kept.dtype), mean.to(kept.dtype))
        optimizer.step()
        made = optimizer.state.get(kept, {})
        elements = sorted(
            key for key, value in made.items() if isinstance(value, torch.Tensor) and value.shape == kept.shape != ()
        )
        self._writer.write(f"{STATE}/model/{name}", whole, kept.detach(), flat)
        for key in elements:
            self._writer.write(f"{STATE}/{key}/{name}", whole, made[key].detach(), flat)
        if kept.numel() or self._made is None:
            self._made, self._made_elements = optimizer, elements
            self._made_numbers = {key: _plain(value) for key, value in made.items() if key not in elements}
        return kept.to(mean.dtype)

    def publish(self) -> None:
        """Give the state after the round its name."""
        assert self._writer is not None and self._made is not None, "begun, and something was trained"
        self._probe.param_groups[0]["params"][0].grad = torch.zeros(1)
        self._probe.step()
        if self._schedule is not None:
            self._schedule.step()
        kept = {
            "tensors": self._told["tensors"],
            "asked": self._asked,
            "elements": self._made_elements,
            "numbers": self._made_numbers,
            "options": self._options(),
            "schedule": None if self._schedule is None else self._schedule.state_dict(),
        }
        self._writer.publish(STATE, {}, {STATE: to_plain(kept, STATE)})

    def discard(self) -> None:
        """Leave nothing of it."""
        if self._writer is not None:
            self._writer.discard()

    def _options(self) -> dict[str, Any]:
        return {key: value for key, value in self._probe.param_groups[0].items() if key != "params"}


def _plain(value: Any) -> Any:
    """Write what an optimizer counts: numbers, also as tensors of one element."""
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "value": value.item()}
    return value


def _number(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"dtype", "value"}:
        return torch.tensor(value["value"], dtype=getattr(torch, value["dtype"]))
    return value


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


_HINTS = {
    "cells": "give exports of one round",
    "round": "give exports of one round",
    "start": "give exports of cells that have started from the same global model",
    "sizes": "train all cells with the same sizes of cells, by which samples are dealt out",
    "plan": "give all cells the same configuration of rounds",
}


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
    was_there: bool = False
    """Whether the result of the same exports stood there already, as it was written"""


class _Export(PieceReader):
    """An export, and what it says of itself."""

    def __init__(self, path: str | Path) -> None:
        self.told: dict[str, Any] = read_told(Path(path), "export")
        super().__init__(check_path(path), PART)
        self.path = Path(path)


def aggregate_exports(
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    weights: Sequence[float] | None = None,
    combine: object = None,
    server: object = None,
    state: str | Path | None = None,
    start: str | Path | None = None,
    is_tried: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Round:
    """Make a round of the exports of all cells, in one process.

    The files of all inputs are compared with their checksums first. The result is a checkpoint of one part, with
    checksums of its own, which takes its name when it is whole: :func:`xffl.aggregation.exports.load_global` loads it
    into any layout. It has the bits that a round over the network gives on processors of this kind. To make a round
    again gives the same; where its result stands there whole, nothing is done.

    :param paths: The exports' folders, in any order.
    :param out: The folder to make; a result of an earlier round there is replaced.
    :param weights: What each cell counts for, by its number; by default as each has counted.
    :param combine: As for :class:`xffl.Aggregator`; what needs distances, norms or the model before is refused. By
        default what the cells were asked for (:class:`xffl.aggregation.exports.RoundPlan`), else the mean.
    :param server: As for :class:`xffl.Aggregator`: a server optimizer; needs ``state``. By default what the cells were
        asked for, else none. Round 0 has none.
    :param state: The folder where the server optimizer's state goes from round to round, a folder for each; not used
        where there is none.
    :param start: For the first round of a server optimizer: the model that all cells have started from, as this made it
        of one export of each cell before its first step.
    :param is_tried: Whether to check all and write nothing.
    :param progress: Called with a stage, the bytes done and all of its bytes.
    :return: What was made.
    :raises ConfigError: if an argument cannot be meant.
    :raises CheckpointError: if an export cannot be trusted, or the exports do not go together; nothing is written.
    """
    target = check_path(out)
    exports = _open(paths)
    told = exports[0].told
    planned = RoundPlan(**(told.get("plan") or {})).read()
    combiner = make("combine", planned[0] if combine is None else combine)
    optimizer = server_of(planned[1] if server is None else server) if told["round"] > 0 or server is not None else None
    if optimizer is not None and state is None:
        raise ConfigError("a server optimizer needs the folder where its state goes from round to round; give --state")
    context = _context(exports, combiner, weights)
    sizes = {name: _bytes_of(exports[0], name) for name in told["tensors"]}
    shares = tuple(context.share(cell) for cell in range(told["cells"]))
    counted = [[digest_of_folder(one.path), one.told["weight"], one.told["steps"]] for one in exports]
    asked = [str(combiner), None if optimizer is None else str(optimizer), None if weights is None else list(weights)]
    made_of = {"exports": counted, "asked": asked}
    made = Round(told["round"], told["cells"], shares, len(sizes), sum(sizes.values()))
    if _stands(target, made_of):
        return replace(made, was_there=True)
    _check_files(exports, progress or (lambda *_: None))
    _check_target(target)
    outer = None
    if optimizer is not None and state is not None:
        outer = OfflineServer(optimizer, check_path(state), told, None if start is None else check_path(start))
    note = _Noting(progress, made.size_bytes)
    context = _looked(exports, context, note)
    if not is_tried:
        _write(target, exports, context, combiner, outer, note, made_of)
    return made


def _stands(target: Path, made_of: Mapping[str, Any]) -> bool:
    """Tell whether the result of the same exports stands there, as it was written."""
    try:
        return read_told(target, "global").get("made_of") == made_of and check_folder(target) is not None
    except CheckpointError:
        return False


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


def _open(paths: Sequence[str | Path]) -> list[_Export]:
    """Read what the exports say of themselves, and compare it."""
    if not paths:
        raise ConfigError("no export is given; give the folder of each cell")
    found: dict[int, _Export] = {}
    first: _Export | None = None
    for path in paths:
        export = _Export(path)
        told = export.told
        first = first or export
        for what in ("cells", "sizes", "round", "start", "plan"):
            if told.get(what) != first.told.get(what):
                raise CheckpointError(
                    f"{path} is of {what} {told.get(what)}, {first.path} of {first.told.get(what)}; {_HINTS[what]}"
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
    return [found[cell] for cell in sorted(found)]


def _check_files(exports: Sequence[_Export], progress: Callable[[str, int, int], None]) -> None:
    """Compare the exports' files with their checksums."""
    sizes = [export.size_bytes for export in exports]
    for number, export in enumerate(exports):
        export.check()
        progress("checked", sum(sizes[: number + 1]), sum(sizes))


def _context(exports: Sequence[_Export], combiner: Combiner, weights: Sequence[float] | None) -> RoundContext:
    """Return what the cells count for."""
    check_combiner(combiner)
    given = [export.told["weight"] for export in exports] if weights is None else [float(weight) for weight in weights]
    if len(given) != len(exports):
        raise ConfigError(f"{len(given)} weights are given for {len(exports)} cells; give one for each")
    if not all(math.isfinite(weight) and weight >= 0.0 for weight in given) or not any(given):
        raise ConfigError(f"weights {given} must be finite, none negative and one positive")
    steps = tuple(export.told["steps"] for export in exports)
    context = RoundContext(tuple(given), first=0, number=exports[0].told["round"], steps=steps)
    combiner.check(len(context.cells))
    return weigh_cells(context, combiner)


def _looked(exports: Sequence[_Export], context: RoundContext, note: _Noting) -> RoundContext:
    """Refuse values that are not finite, and tell how the others may be combined, as the ranks of a round do."""
    is_moderate = True
    for name, (policy, *_) in exports[0].told["tensors"].items():
        for box in _boxes(exports[0], name) if policy == "average" else ():
            for export in exports:
                values = export.read(name, box)
                if not math.isfinite(sum_of_squares(values).item()):
                    if not values.isfinite().all():
                        raise CheckpointError(
                            f"{export.path}: tensor {name!r} of cell {export.told['cell']} has values that are not "
                            "finite; nothing was combined"
                        )
                    is_moderate = False
            note("looked", math.prod(box[1]) * exports[0].kind(name)[0].itemsize)
    return replace(context, is_fused=is_moderate)


def _write(
    target: Path,
    exports: Sequence[_Export],
    context: RoundContext,
    combiner: Combiner,
    outer: OfflineServer | None,
    note: _Noting,
    made_of: Mapping[str, Any],
) -> None:
    """Combine, piece by piece, and publish the result."""
    told = exports[0].told
    writer: PieceWriter | None = None
    try:
        writer = PieceWriter(target)
        if outer is not None:
            outer.begin()
        for name, (policy, is_stepped, *_) in told["tensors"].items():
            dtype, shape = exports[0].kind(name)
            for box in _boxes(exports[0], name):
                made = _combined(exports, context, combiner, name, policy, box)
                if outer is not None and is_stepped:
                    made = outer.step(name, box, made, shape)
                writer.write(f"{PART}/{name}", box, made.view(dtype), shape)
                note("combined", made.nbytes)
        shares = [context.share(cell) for cell in range(told["cells"])]
        kept = {name: told[name] for name in ("round", "cells", "tensors")} | {"shares": shares, "made_of": made_of}
        if outer is not None:
            outer.publish()  # before the result: a round that is made again begins from the state before it
        writer.publish(PART, exports[0].index.values, {"global": kept})
    except BaseException as error:
        if writer is not None:
            writer.discard()
        if outer is not None:
            outer.discard()
        if isinstance(error, OSError):
            raise CheckpointError(f"{target} cannot be written: {error}; see that there is space") from error
        raise


def _combined(
    exports: Sequence[_Export], context: RoundContext, combiner: Combiner, name: str, policy: str, box: Box
) -> torch.Tensor:
    """Return a piece of the result, flat."""
    if policy == "first":
        return exports[context.first].read(name, box)
    values = [exports[cell].read(name, box) for cell in context.cells]
    out = torch.empty_like(values[0])
    if isinstance(combiner, Coordinatewise):
        combined(combiner.combine, values, out)
    else:
        weighted_mean(values, [context.counts[cell] for cell in context.cells], out, is_fused=context.is_fused)
    return out


def _bytes_of(export: _Export, name: str) -> int:
    dtype, shape = export.kind(name)
    return math.prod(shape) * dtype.itemsize


def _boxes(export: _Export, name: str) -> Iterator[Box]:
    return boxes(*export.kind(name))
