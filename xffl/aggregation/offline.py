"""Rounds of exports, made by a single process: tensors are read, combined and written piece by piece.

Only the current pieces are in memory.
"""

from __future__ import annotations

import hashlib
import io
import math
import mmap
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from xffl.aggregation.algorithms.combiners import Combiner, Coordinatewise, total_of
from xffl.aggregation.algorithms.registry import make
from xffl.aggregation.algorithms.server_optimizer import (
    SavedServer,
    ServerOptimizer,
    read_saved_server,
    server_of,
    take_step,
)
from xffl.aggregation.arithmetic import combined, weighted_mean, wide_type
from xffl.aggregation.engine.buffers import sum_of_squares
from xffl.aggregation.engine.planning.transfers import RoundContext
from xffl.aggregation.engine.stages.weighing import weigh_cells
from xffl.aggregation.exports import (
    CELL_FOLDER,
    PART,
    RoundPlan,
    check_combiner,
    check_kind,
    compare,
    is_written,
    read_tensor_kinds,
)
from xffl.checkpoint.format import (
    INDEX,
    CellIndex,
    OpenCheckpoint,
    Record,
    check_data,
    check_path,
    checksum,
    find_record,
    locate_checkpoint,
    partial_folder,
    publish,
    read_again_if_replaced,
    read_index,
    write_index,
)
from xffl.checkpoint.tables import StoredTensor
from xffl.costs import EXPORT_FORMAT
from xffl.distributed.replicas.plain_values import Plain, from_plain, to_plain
from xffl.errors import CheckpointError, ConfigError
from xffl.files import create, naming_errors, sync
from xffl.naming import Writer
from xffl.reading import Fields

__all__ = ["Box", "OfflineServer", "PieceReader", "PieceWriter", "Round", "aggregate_exports", "boxes"]

PIECE_BYTES = 8 << 20  # bytes that are read at a time
DATA = "__0_0.distcp"
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a piece of a tensor."""


class PieceReader:
    """The tensors of a checkpoint of one cell, read in pieces.

    It is held open until ``opened`` ends, so that all pieces come from the same save.
    """

    def __init__(self, path: Path, part: str, opened: ExitStack) -> None:
        self.path = path
        self._part = part
        self._source, self.record, self.index = read_again_if_replaced(lambda: _open_to_read(path))
        opened.callback(self._source.close)
        self._files: dict[str, Bytes] = {}
        self._pieces: dict[tuple[str, int], Bytes] = {}

    def check_data(self) -> None:
        """Compare the files with their checksums."""
        with self._source.noticing_replacement():
            check_data(self.index)

    def kind(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return a tensor's data type and shape."""
        tensor = self._tensor(name)
        return tensor.dtype, tuple(tensor.shape)

    def check_kinds(self, kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """Refuse files whose tensors have other data types or shapes than their values say."""
        for name, kind in kinds.items():
            if self.kind(name) != kind:
                raise CheckpointError(
                    f"{self.index.folder / INDEX} has {name!r} as {self.kind(name)}, and {self.path} says {kind}; "
                    "write it anew"
                )

    def _tensor(self, name: str) -> StoredTensor:
        tensor = self.index.tensors.get(f"{self._part}/{name}")
        if tensor is None:
            raise CheckpointError(f"{self.index.folder / INDEX} has no tensor {name!r} of {self._part}; write it anew")
        return tensor

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a piece of a tensor as a flat copy of real numbers."""
        tensor = self._tensor(name)
        width = tensor.dtype.itemsize
        starts, sizes = box
        if len(sizes) != len(tensor.shape):
            raise CheckpointError(f"{self.index.folder / INDEX} has {name!r} in the shape {tuple(tensor.shape)}")
        piece = np.empty((*sizes, width), np.uint8)
        filled = 0
        for chunk in tensor.chunks:
            low = [max(a, b) for a, b in zip(starts, chunk.offsets, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(starts, sizes, chunk.offsets, chunk.sizes, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                source = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offsets, strict=True))
                target = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, starts, strict=True))
                data = self._bytes(
                    name,
                    file=chunk.relative_path,
                    offset=chunk.offset,
                    length=chunk.length,
                    shape=(*chunk.sizes, width),
                )
                piece[target] = data[source]
                filled += math.prod(b - a for a, b in zip(low, high, strict=True))
        if filled != math.prod(sizes):
            raise CheckpointError(f"{self.index.folder / INDEX} does not have all of {name!r}; write it anew")
        real = tensor.dtype.to_real() if tensor.dtype.is_complex else tensor.dtype
        return torch.from_numpy(piece.reshape(-1)).view(real)

    def _bytes(self, name: str, file: str, offset: int, length: int, shape: tuple[int, ...]) -> Bytes:
        """Return the bytes of a tensor that torch.save wrote at an offset of a file, as a view of the mapped file."""
        if (file, offset) not in self._pieces:
            with self._source.noticing_replacement(), self.index.open(file) as stream:
                if file not in self._files:
                    self._files[file] = np.asarray(np.memmap(stream, np.uint8, "r"))
                try:
                    start, size = _find_storage(stream, offset + length)
                    if size != math.prod(shape):
                        raise ValueError(f"{size} bytes in place of {math.prod(shape)}")
                    if not offset <= start <= start + size <= offset + length:
                        raise ValueError(
                            f"bytes {start} to {start + size} lie outside of {offset} to {offset + length}"
                        )
                except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
                    raise CheckpointError(
                        f"{self.index.folder / file} holds no {name!r} as xffl writes it ({error}); write it anew"
                    ) from error
            self._pieces[file, offset] = self._files[file][start : start + size]
        piece = self._pieces[file, offset]
        if piece.size != math.prod(shape):  # another tensor has named the same bytes
            raise CheckpointError(
                f"{self.index.folder / file} holds no {name!r} as xffl writes it ({piece.size} bytes in place of "
                f"{math.prod(shape)}); write it anew"
            )
        return piece.reshape(shape)


def _open_to_read(path: Path) -> tuple[OpenCheckpoint, Record, CellIndex]:
    """Open a checkpoint of one cell and all of its files, before another save can remove them."""
    source = OpenCheckpoint(path)
    try:
        with source.noticing_replacement():
            record = source.read_record()
            index = read_index(source, record)
            index.hold(sorted(index.files))
            return source, record, index
    except BaseException:
        source.close()
        raise


class PieceWriter:
    """A checkpoint of one cell that is written in pieces, and gets its final name when it is complete.

    Leaving its ``with`` block by an exception removes what was written.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        before = locate_checkpoint(target)
        if before != target:
            before.rename(target)
        self._cleanup = ExitStack()
        self._home = self._cleanup.enter_context(partial_folder(target)) / CELL_FOLDER
        self._home.mkdir()
        self._file = self._cleanup.enter_context(create(self._home / DATA))
        self._sum = hashlib.sha256()
        self._size = 0
        self._tensors: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> PieceWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self._cleanup.__exit__(*error)

    def write(self, name: str, box: Box, values: torch.Tensor, shape: Sequence[int]) -> None:
        """Write a piece of a tensor."""
        buffer = io.BytesIO()
        torch.save(values.view(box[1]), buffer)
        data = buffer.getbuffer()
        with naming_errors(self._home / DATA):
            self._file.write(data)
        self._sum.update(data)
        dtype = str(values.dtype).removeprefix("torch.")
        entry = self._tensors.setdefault(name, {"dtype": dtype, "shape": list(shape), "chunks": []})
        entry["chunks"].append([list(box[0]), list(box[1]), DATA, self._size, len(data)])
        self._size += len(data)

    def publish(self, part: str, part_values: Mapping[str, Plain], values: Mapping[str, Plain]) -> None:
        """Write the index, with values of the part, and the record; then rename the folder to its final name."""
        with naming_errors(self._home / DATA):
            self._file.close()
        sync(self._home / DATA)
        write_index(
            self._home,
            files={DATA: (self._size, self._sum.hexdigest())},
            tensors=self._tensors,
            ties={},
            values=part_values,
        )
        record = Record.now(
            world_size=1,
            cells=(1,),
            replica_size=None,
            cell_shape=None,
            after_round=True,
            parts=(part,),
            own=(),
            values=dict(values),
            indexes={CELL_FOLDER: checksum(self._home / INDEX)},
        )
        publish(self._target, record)


def boxes(dtype: torch.dtype, shape: tuple[int, ...]) -> Iterator[Box]:
    """Divide a tensor into boxes that follow each other in memory, of a few MiB at most; pure."""
    limit = max(1, PIECE_BYTES // dtype.itemsize)
    if math.prod(shape) <= limit:
        yield (0,) * len(shape), shape
        return
    # The first axis along which several rows fit into a box; axes before it are cut into single rows.
    axis = next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) <= limit)
    step, inner = limit // math.prod(shape[axis + 1 :]), shape[axis + 1 :]
    for outer in np.ndindex(*shape[:axis]):
        for start in range(0, shape[axis], step):
            yield (*outer, start, *(0 for _ in inner)), (*(1 for _ in outer), min(step, shape[axis] - start), *inner)


def _find_storage(stream: BinaryIO, end: int) -> tuple[int, int]:
    """Return the offset and size of the storage in the torch.save archive that ends at ``end``."""
    # zipfile treats the bytes before the archive as a prefix, and still counts offsets from the beginning of the file.
    with mmap.mmap(stream.fileno(), end, access=mmap.ACCESS_READ) as archive:
        try:
            entries = zipfile.ZipFile(archive).infolist()  # type: ignore[call-overload]
        except Exception as error:  # damaged archives raise errors of many kinds
            raise ValueError(f"no archive: {type(error).__name__}") from error
        storages = [entry for entry in entries if entry.filename.rpartition("/")[0].endswith("/data")]
        if len(storages) != 1:
            raise ValueError(f"{len(storages)} storages in place of one")
        entry = storages[0]
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError("it is compressed")
        # A local header has 30 bytes, a name and an extra field; its last four bytes are the lengths of these two.
        lengths = archive[entry.header_offset + 26 : entry.header_offset + 30]
    start = entry.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    return start, entry.file_size


STATE = "server"
"""The only part of a state. Its tensors are ``server/model/NAME``, and the rule's ``server/KEY/NAME``."""


class OfflineServer:
    """The steps of a server optimizer, piece by piece, with its state in a folder for each round."""

    def __init__(
        self,
        server: ServerOptimizer,
        folder: Path,
        values: Mapping[str, Any],
        start: Path | None,
        opened: ExitStack,
    ) -> None:
        self._server = server
        self._tensors = values["tensors"]
        self.target = folder / f"round_{values['round']}"
        self._saved = SavedServer(0, {}, server.asked)
        before = folder / f"round_{values['round'] - 1}"
        record = find_record(before)
        if record is not None and record.parts == (STATE,):
            self._old = PieceReader(before, STATE, opened)
            self._prefix = "model/"
            self._take_up(before)
        elif start is not None:
            self._old = PieceReader(start, PART, opened)
            self._prefix = ""
            check_kind(start, self._old.record, "global")
            compare(self._old.record.values["global"]["tensors"], self._tensors, str(start), "the exports")
        else:
            raise CheckpointError(
                f"{folder} has no state of round {values['round'] - 1}, so the model from which the cells started is "
                "not known; for the first round give it (--start)"
            )
        self._old.check_data()
        self._check_old(Fields(values, "the exports", error=CheckpointError))
        self._numbers = server.numbers(self._saved.step)
        self._scale = 1.0

    @property
    def is_clipped(self) -> bool:
        """Whether the norm of the pseudo-gradient is needed before the first step."""
        return self._server.clip is not None

    @torch.no_grad()
    def squared_distance(self, name: str, box: Box, mean: torch.Tensor) -> float:
        """Return the squared L2 norm of a piece of the pseudo-gradient, in fp64."""
        step = torch.sub(self._old_weights(name, box, mean).to(mean.dtype).double(), mean.double()).reshape(-1)
        return float(step.dot(step))

    def clip(self, squares: Iterable[float]) -> None:
        """Clip the pseudo-gradient, whose pieces have these squared norms, to the server's limit."""
        limit = self._server.clip
        norm = math.sqrt(total_of([*squares]))
        self._scale = 1.0 if limit is None or norm <= limit else limit / norm

    def _old_box(self, box: Box, mean: torch.Tensor) -> Box:
        """Return the box of a piece in the old state, or in the model from which the cells started."""
        # A state holds real numbers: a complex tensor has an axis more there, for real and imaginary parts.
        is_pairs = mean.numel() != math.prod(box[1])
        return ((*box[0], 0), (*box[1], 2)) if is_pairs and self._prefix else box

    def _old_weights(self, name: str, box: Box, mean: torch.Tensor) -> torch.Tensor:
        """Return the global values of a piece before the step."""
        return self._old.read(f"{self._prefix}{name}", self._old_box(box, mean)).to(wide_type(mean.dtype))

    def _take_up(self, before: Path) -> None:
        """Go on from the state after the round before, whose values somebody else may have written."""
        hint = "it is damaged, go on from another state"
        try:
            plain = from_plain(self._old.record.values[STATE], {})
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{before} has no state of a server optimizer ({error}); {hint}") from error
        saved = Fields(plain, f"{before}", error=CheckpointError, hint=hint)
        read_tensor_kinds(saved)
        compare(saved.any("tensors"), self._tensors, str(before), "the exports")
        self._saved = read_saved_server(saved)
        self._server.check_saved(
            self._saved,
            f"{before}",
            "begin a new state: give an empty folder as --state, and the last global model as --start",
        )

    def _check_old(self, values: Fields) -> None:
        """Refuse a state, or a start model, whose tensors are not those that are stepped."""
        wanted: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name, (dtype, shape) in read_tensor_kinds(values).items():
            if not self._prefix:
                wanted[name] = dtype, shape
            elif self._tensors[name][1]:
                real = dtype.to_real() if dtype.is_complex else dtype
                kind = wide_type(real), (*shape, 2) if dtype.is_complex else shape
                wanted |= {f"{self._prefix}{name}": kind}
                for key in self._saved.elements.values():
                    wanted[f"{key}/{name}"] = kind
        self._old.check_kinds(wanted)

    @torch.no_grad()
    def step(
        self, name: str, box: Box, mean: torch.Tensor, shape: tuple[int, ...], writer: PieceWriter
    ) -> torch.Tensor:
        """Return the new global values of a piece of a tensor, and write its state."""
        # A state holds real numbers: a complex tensor has an axis more there, for real and imaginary parts.
        is_pairs = mean.numel() != math.prod(box[1])
        real_shape, real_box = ((*shape, 2), ((*box[0], 0), (*box[1], 2))) if is_pairs else (shape, box)
        old_box = self._old_box(box, mean)
        weights = self._old_weights(name, box, mean)
        rule = self._server.rule
        state = rule.init(weights)
        for key, old_key in self._saved.elements.items():
            state[key] = self._old.read(f"{old_key}/{name}", old_box)
        take_step(rule, values=weights, mean=mean, state=state, numbers=self._numbers, scale=self._scale)
        writer.write(f"{STATE}/model/{name}", real_box, weights, real_shape)
        for key, values in state.items():
            writer.write(f"{STATE}/{key}/{name}", real_box, values, real_shape)
        return weights.to(mean.dtype)

    def publish(self, writer: PieceWriter) -> None:
        """Publish the state after the round."""
        saved = {
            "tensors": self._tensors,
            "asked": self._server.asked,
            "elements": [*self._server.state_names],
            "step": self._saved.step + 1,
        }
        writer.publish(STATE, {}, {STATE: to_plain(saved, STATE)})


_HINTS = {
    "cells": "give exports of one round",
    "sizes": "train all cells with the same sizes of cells, by which samples are dealt out",
    "round": "give exports of one round",
    "start": "give exports of cells that have started from the same global model",
    "plan": "give all cells the same configuration of rounds",
}


@dataclass(frozen=True)
class Round:
    """A round of exports: its number, its cells, and the size of its result."""

    number: int
    cells: int
    shares: tuple[float, ...]  # weight of each cell, divided by the sum of all
    tensors: int
    size_bytes: int  # of the tensors of the result
    differences: tuple[str, ...] = ()  # between the specs in the exports and the given ones
    was_there: bool = False  # whether the result of the same exports existed already, undamaged


class _Export(PieceReader):
    """An export, with its values."""

    def __init__(self, path: str | Path, opened: ExitStack) -> None:
        super().__init__(check_path(path), PART, opened)
        self.path = Path(path)
        check_kind(self.path, self.record, "export")
        self.values: dict[str, Any] = self.record.values["export"]
        self.check_kinds(read_tensor_kinds(Fields(self.values, str(self.path), error=CheckpointError)))


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
    """Make a round of the exports of all cells, given in any order, in one process.

    The files of all inputs are compared with their checksums first. The result is a checkpoint of one part, which gets
    its name when it is complete; :func:`xffl.aggregation.exports.load_global` loads it into any layout. It has the same
    bits as the result of a round over the network. If the complete result of the same exports exists, nothing is done;
    that of an earlier round is replaced. ``is_tried`` checks everything and writes nothing.

    ``weights`` are in the order of the cells' numbers, and replace those in the exports. ``combine`` and ``server`` are
    as for :class:`xffl.Aggregator`, by default those of the cells' configuration
    (:class:`xffl.aggregation.exports.RoundPlan`); round 0 has no server optimizer. A server optimizer needs ``state``,
    the folder in which its state is kept between rounds, and in its first round ``start``, the model from which all
    cells started: the result of this function for exports that the cells made before their first step. ``progress`` is
    called with a stage, the bytes done and the bytes in all.
    """
    with ExitStack() as opened:
        return _aggregate(
            opened,
            paths,
            check_path(out),
            weights=weights,
            combine=combine,
            server=server,
            state=state,
            start=start,
            is_tried=is_tried,
            progress=progress,
        )


def _aggregate(
    opened: ExitStack,
    paths: Sequence[str | Path],
    target: Path,
    *,
    weights: Sequence[float] | None,
    combine: object,
    server: object,
    state: str | Path | None,
    start: str | Path | None,
    is_tried: bool,
    progress: Callable[[str, int, int], None] | None,
) -> Round:
    """Make the round of :func:`aggregate_exports`, with inputs that are held open until ``opened`` ends."""
    exports = _open_exports(paths, opened)
    values = exports[0].values
    given = {"combine": combine, "server": server}
    plan = RoundPlan(**(values.get("plan") or {}), writer=Writer.OTHERS)
    is_stepped = values["round"] > 0 or server is not None
    combine_spec, server_spec = plan.read(given if is_stepped else {**given, "server": "none"})
    combiner = make("combine", combine_spec, writer=plan.writer if combine is None else Writer.USER)
    optimizer = None
    if is_stepped:
        optimizer = server_of(server_spec, writer=plan.writer if server is None else Writer.USER)
    if optimizer is not None and state is None:
        raise ConfigError("a server optimizer needs a folder in which its state is kept between rounds; give --state")
    context = _context(exports, combiner, weights)
    kinds = [exports[0].kind(name) for name in values["tensors"]]
    size_bytes = sum(math.prod(shape) * dtype.itemsize for dtype, shape in kinds)
    shares = tuple(context.share(cell) for cell in range(values["cells"]))
    counted = [
        [export.record.indexes[CELL_FOLDER], export.values["weight"], export.values["steps"]] for export in exports
    ]
    asked = [str(combiner), None if optimizer is None else str(optimizer), None if weights is None else list(weights)]
    made_of = {"exports": counted, "asked": asked}
    made = Round(
        values["round"],
        cells=values["cells"],
        shares=shares,
        tensors=len(kinds),
        size_bytes=size_bytes,
        differences=tuple(plan.compare(given)),
    )
    if is_written(target, "global", {"made_of": made_of}):
        return replace(made, was_there=True)
    sizes = [sum(size for size, _ in export.index.files.values()) for export in exports]
    report = _StageProgress(progress, sum(sizes))
    for export, size in zip(exports, sizes, strict=True):
        export.check_data()
        report("checked", size)
    _check_target(target)
    outer = None
    if optimizer is not None and state is not None:
        first = None if start is None else check_path(start)
        outer = OfflineServer(optimizer, folder=check_path(state), values=values, start=first, opened=opened)
    report = _StageProgress(progress, size_bytes)
    _check_values(exports, report)
    if not is_tried:
        _write(target, exports=exports, context=context, combiner=combiner, outer=outer, report=report, made_of=made_of)
    return made


def _check_target(target: Path) -> None:
    """Refuse to replace anything except the result of another round."""
    record = find_record(target)
    is_result = record is not None and record.parts == (PART,) and "global" in record.values
    if target.exists() and not is_result and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"{target} exists and is no result of xffl aggregate, which would be replaced; give another")


class _StageProgress:
    """Counts the bytes that each stage has done, and reports them."""

    def __init__(self, report: Callable[[str, int, int], None] | None, size: int) -> None:
        self._report = report
        self._size = size
        self._done = Counter[str]()

    def __call__(self, stage: str, count: int) -> None:
        self._done[stage] += count
        if self._report is not None:
            self._report(stage, self._done[stage], self._size)


def _open_exports(paths: Sequence[str | Path], opened: ExitStack) -> list[_Export]:
    """Return the exports in the order of their cells; raises if they do not belong to the same round."""
    if not paths:
        raise ConfigError("no export is given; give the folder of each cell")
    by_cell: dict[int, _Export] = {}
    exports = [_Export(path, opened) for path in paths]
    first = exports[0]
    for export in exports:
        values = export.values
        for what, hint in _HINTS.items():
            if values.get(what) != first.values.get(what):
                raise CheckpointError(
                    f"{export.path} is of {what} {values.get(what)}, {first.path} of {first.values.get(what)}; {hint}"
                )
        compare(values["tensors"], first.values["tensors"], str(export.path), str(first.path))
        if values["cell"] in by_cell:
            raise CheckpointError(
                f"{export.path} and {by_cell[values['cell']].path} are both of cell {values['cell']}; give one of each"
            )
        by_cell[values["cell"]] = export
    cells = first.values["cells"]
    if missing := sorted(set(range(cells)) - by_cell.keys()):
        raise CheckpointError(f"the export of cell {missing[0]} of {cells} is missing; give one of each")
    return [by_cell[cell] for cell in sorted(by_cell)]


def _context(exports: Sequence[_Export], combiner: Combiner, weights: Sequence[float] | None) -> RoundContext:
    """Return the cells' weights as a round has them."""
    check_combiner(combiner)
    counts = (
        [export.values["weight"] for export in exports] if weights is None else [float(weight) for weight in weights]
    )
    if len(counts) != len(exports):
        raise ConfigError(f"{len(counts)} weights are given for {len(exports)} cells; give one for each")
    if not all(math.isfinite(count) and count >= 0.0 for count in counts) or not any(counts):
        raise ConfigError(f"weights {counts} must be finite, none negative and one positive")
    steps = tuple(export.values["steps"] for export in exports)
    context = RoundContext(tuple(counts), first=0, number=exports[0].values["round"], steps=steps)
    combiner.check(len(context.cells))
    return weigh_cells(context, combiner)


def _check_values(exports: Sequence[_Export], report: _StageProgress) -> None:
    """Refuse values that are not finite, as the ranks of a round do."""
    for name, (policy, *_) in exports[0].values["tensors"].items():
        kind = exports[0].kind(name)
        for box in boxes(*kind) if policy == "average" else ():
            for export in exports:
                values = export.read(name, box)
                if not math.isfinite(sum_of_squares(values).item()) and not values.isfinite().all():
                    raise CheckpointError(
                        f"{export.path}: tensor {name!r} of cell {export.values['cell']} has values that are not "
                        "finite; nothing was combined"
                    )
            report("inspected", math.prod(box[1]) * kind[0].itemsize)


def _write(
    target: Path,
    exports: Sequence[_Export],
    context: RoundContext,
    combiner: Combiner,
    outer: OfflineServer | None,
    report: _StageProgress,
    made_of: Mapping[str, Any],
) -> None:
    """Combine, piece by piece, and publish the result."""
    values = exports[0].values
    try:
        with (
            PieceWriter(target) as writer,
            nullcontext() if outer is None else PieceWriter(outer.target) as state_writer,
        ):
            if outer is not None and outer.is_clipped:
                outer.clip(_squares_of_step(exports, context, combiner, outer))
            for name, (policy, is_stepped, *_) in values["tensors"].items():
                dtype, shape = exports[0].kind(name)
                for box in boxes(dtype, shape):
                    piece = _combine(exports, context=context, combiner=combiner, name=name, policy=policy, box=box)
                    if outer is not None and state_writer is not None and is_stepped:
                        piece = outer.step(name, box=box, mean=piece, shape=shape, writer=state_writer)
                    writer.write(f"{PART}/{name}", box, piece.view(dtype), shape)
                    report("combined", piece.nbytes)
            result = {"format": EXPORT_FORMAT, **{name: values[name] for name in ("round", "cells", "tensors")}}
            result |= {"shares": [context.share(cell) for cell in range(values["cells"])], "made_of": made_of}
            if outer is not None and state_writer is not None:
                outer.publish(state_writer)  # before the result: a repeated round starts from the previous state again
            writer.publish(PART, exports[0].index.values, {"global": result})
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}; see that there is space") from error


def _squares_of_step(
    exports: Sequence[_Export], context: RoundContext, combiner: Combiner, outer: OfflineServer
) -> Iterator[float]:
    """Yield the squared norms of all pieces of the pseudo-gradient."""
    for name, (policy, is_stepped, *_) in exports[0].values["tensors"].items():
        for box in boxes(*exports[0].kind(name)) if is_stepped else ():
            yield outer.squared_distance(
                name, box, _combine(exports, context=context, combiner=combiner, name=name, policy=policy, box=box)
            )


def _combine(
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
        weighted_mean(values, [context.counts[cell] for cell in context.cells], out)
    return out
