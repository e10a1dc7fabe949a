"""A round over files: what ``xffl aggregate`` makes of the exports of cells that no network joins.

No process group, and no more memory than some pieces of a tensor: inputs are mapped, combined piece by piece with the
arithmetic of a round over the network, and written as they come. The result has the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from xffl.aggregation.combine import Combiner, Coordinatewise
from xffl.aggregation.exports import (
    PART,
    RoundPlan,
    check_combiner,
    check_folder,
    compare,
    digest_of_folder,
    read_told,
)
from xffl.aggregation.looks import energy_of
from xffl.aggregation.mean import combined, weighted_mean
from xffl.aggregation.offline_server import OfflineServer
from xffl.aggregation.pieces import Box, PieceReader, PieceWriter, boxes
from xffl.aggregation.registry import make
from xffl.aggregation.server import server_of
from xffl.aggregation.tracks import Turnout
from xffl.aggregation.weighing import weighed
from xffl.checkpoint.folder import find_record
from xffl.checkpoint.steps import check_path
from xffl.errors import CheckpointError, ConfigError

__all__ = ["Round", "aggregate_exports"]

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
    turnout = _turnout(exports, combiner, weights)
    sizes = {name: _bytes_of(exports[0], name) for name in told["tensors"]}
    shares = tuple(turnout.share(cell) for cell in range(told["cells"]))
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
    turnout = _looked(exports, turnout, note)
    if not is_tried:
        _write(target, exports, turnout, combiner, outer, note, made_of)
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


def _turnout(exports: Sequence[_Export], combiner: Combiner, weights: Sequence[float] | None) -> Turnout:
    """Return what the cells count for."""
    check_combiner(combiner)
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
            note("looked", math.prod(box[1]) * exports[0].kind(name)[0].itemsize)
    return replace(turnout, is_fused=is_moderate)


def _write(
    target: Path,
    exports: Sequence[_Export],
    turnout: Turnout,
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
                made = _combined(exports, turnout, combiner, name, policy, box)
                if outer is not None and is_stepped:
                    made = outer.step(name, box, made, shape)
                writer.write(f"{PART}/{name}", box, made.view(dtype), shape)
                note("combined", made.nbytes)
        shares = [turnout.share(cell) for cell in range(told["cells"])]
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
    dtype, shape = export.kind(name)
    return math.prod(shape) * dtype.itemsize


def _boxes(export: _Export, name: str) -> Iterator[Box]:
    return boxes(*export.kind(name))
