"""Runs as they are reported: a folder each, or the folders of an elastic run's cells as one, with who took part."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xffl.errors import ConfigError, TopologyError
from xffl.run_report.reader import Attendance, Metrics, RoundRecord, Run, elastic_place, is_run, read_run
from xffl.topology import Topology

__all__ = ["CellTotals", "History", "Presence", "find_runs", "read_runs"]

# Who took part --------------------------------------------------------------------------------------------------------


class Presence(Enum):
    """What a cell did in a round; one that has left is not missed."""

    CONTRIBUTED = "contributed"
    IDLE = "there with weight 0"
    MISSED = "missed"
    LEFT = "has left"


class CellTotals(NamedTuple):
    """What a cell did in all rounds: how many in which way, the last that it was in, restarts, and what counted.

    Restarts are ``None`` where they were not recorded. Of a model that is averaged in fragments, steps and weights are
    those of the fragment with the most.
    """

    contributed: int
    idle: int
    missed: int
    last: int | None
    restarts: int | None
    steps: float
    weight: float


@dataclass(frozen=True)
class History:
    """The rounds of an elastic run in order, each as the first cell has recorded it; ``apart`` counts those left out.

    Cells that did not know of each other may have made rounds of the same numbers: those count that led to the last.
    """

    rounds: tuple[RoundRecord, ...]
    apart: int

    @classmethod
    def of(cls, records: Iterable[RoundRecord]) -> History:
        """Put together what all cells have recorded; a cell that was restarted may have lost its own records."""
        variants: dict[int, dict[str, RoundRecord]] = {}
        for record in records:
            there = record.attendance
            if there is None or record.is_skipped:
                continue
            of_number = variants.setdefault(record.number, {})
            known = of_number.get(there.membership, record)
            tried = _there(known)._replace(tries=max(there.tries, _there(known).tries))
            of_number[there.membership] = replace(min(record, known, key=attrgetter("time")), attendance=tried)
        rounds: list[RoundRecord] = []
        for _, of_number in sorted(variants.items(), reverse=True):
            alike = [one for one in of_number.values() if rounds and _who(one) == _who(rounds[-1])]
            rounds.append(max(alike or of_number.values(), key=attrgetter("time")))
        return cls(tuple(reversed(rounds)), sum(map(len, variants.values())) - len(rounds))

    @property
    def cells(self) -> int:
        """How many cells are known."""
        return max(max(len(_there(record).weights), 1 + max(_there(record).cells)) for record in self.rounds)

    @property
    def repeated(self) -> int:
        """How many tries of rounds were not taken."""
        return sum(_there(record).tries - 1 for record in self.rounds)

    @property
    def epochs(self) -> list[tuple[int, int]]:
        """The places of the first and the last of consecutive rounds that the same cells made, without a restart."""
        epochs = groupby(range(len(self.rounds)), lambda at: _who(self.rounds[at]))
        return [(places[0], places[-1]) for places in (list(of_epoch) for _, of_epoch in epochs)]

    def states(self, cell: int) -> list[Presence]:
        """Return what a cell did in each round."""

        def state(there: Attendance) -> Presence:
            if cell not in there.cells:
                return Presence.LEFT if cell in there.left else Presence.MISSED
            weighs = any(weight > 0 for weight in there.weights[cell : cell + 1])
            return Presence.CONTRIBUTED if weighs else Presence.IDLE

        return [state(_there(record)) for record in self.rounds]

    def lives(self, cell: int) -> list[int | None]:
        """Return how often a cell had been started again by each round; ``None`` where it is not known."""
        several = map(_there, self.rounds)
        return [dict(zip(there.cells, there.restarts, strict=False)).get(cell) for there in several]

    def restarts(self, cell: int) -> list[int]:
        """Return the places of the first rounds after a restart of a cell."""
        known = [(0, 0), *((at, life) for at, life in enumerate(self.lives(cell)) if life is not None)]
        return [at for (_, before), (at, life) in pairwise(known) if life != before]

    def totals(self, cell: int) -> CellTotals:
        """Sum up what a cell did."""
        states, known = self.states(cell), [0, *(life for life in self.lives(cell) if life is not None)]
        # A run that was started again as a whole counts its restarts from 0.
        restarts = sum(after - before if after >= before else after for before, after in pairwise(known))
        steps: dict[int, float] = defaultdict(float)
        weights: dict[int, float] = defaultdict(float)
        for record, state in zip(self.rounds, states, strict=True):
            if state == Presence.CONTRIBUTED:
                weights[record.fragment] += _there(record).weights[cell]
                steps[record.fragment] += sum(_there(record).steps[cell : cell + 1])
        return CellTotals(
            states.count(Presence.CONTRIBUTED),
            idle=states.count(Presence.IDLE),
            missed=states.count(Presence.MISSED),
            last=max((record.number for record in self.rounds if cell in _there(record).cells), default=None),
            restarts=restarts if len(known) > 1 else None,
            steps=max(steps.values(), default=0.0),
            weight=max(weights.values(), default=0.0),
        )

    def place(self, times: NDArray[np.float64], start: float) -> NDArray[np.float64]:
        """Return how far the run was at Unix seconds, in rounds: 2.5 is in the middle between rounds 2 and 3."""
        numbers = [float(record.number) for record in self.rounds]
        when = np.maximum.accumulate([start, *(record.time for record in self.rounds)])
        return np.interp(times, when, [numbers[0] - 1, *numbers])

    def spans(self, cell: int, start: float, end: float) -> list[tuple[float, float]]:
        """Return when a cell was at work, as far as its rounds tell, in Unix seconds.

        The first span begins at the ``start`` where the cell was in the first round; the last one goes up to the
        ``end``, its last record.
        """
        spans: list[tuple[float, float]] = []
        lives, is_there = self.lives(cell), False
        for at, record in enumerate(self.rounds):
            was_there, is_there = is_there, cell in _there(record).cells
            if is_there and was_there and lives[at] == lives[at - 1]:
                spans[-1] = (spans[-1][0], record.time)
            elif is_there:
                spans.append((start if at == 0 else record.time - record.seconds, record.time))
        if spans:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end))
        return spans


def _there(record: RoundRecord) -> Attendance:
    assert record.attendance is not None, "a history has only rounds of elastic runs"
    return record.attendance


def _who(record: RoundRecord) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return _there(record).cells, _there(record).restarts


# Folders --------------------------------------------------------------------------------------------------------------


class RunPlace(NamedTuple):
    """Where a run is: its folder, and those of its cells, by their numbers, where they are an elastic run's."""

    folder: Path
    cells: dict[int, Path]


def find_runs(folders: Sequence[str | os.PathLike[str]]) -> list[RunPlace]:
    """Find what is to be reported: several cells of one elastic run, or the folder that holds them, are one run."""
    if not folders:
        raise ConfigError("no run folder is given; give one or more, such as runs/demo")
    places: list[RunPlace] = []
    whole: set[Path] = set()
    seen: set[Path] = set()
    by_parent: dict[Path, RunPlace] = {}
    given = [*map(Path, folders)]
    queued = _queued_cells(given)
    whole |= {path.resolve().parent for path in queued}
    for folder in given:
        if folder in queued:
            continue
        inside = [] if is_run(folder) or not folder.is_dir() else sorted(filter(is_run, folder.iterdir()))
        is_whole = bool(inside) and all(elastic_place(path_inside) is not None for path_inside in inside)
        for path in inside if is_whole else [folder]:
            resolved, place_in_run = path.resolve(), elastic_place(path)
            if place_in_run is None:
                places.append(RunPlace(path, {}))
                continue
            if resolved.parent not in by_parent:
                by_parent[resolved.parent] = RunPlace(path.parent, {})
                places.append(by_parent[resolved.parent])
            other = by_parent[resolved.parent].cells.setdefault(place_in_run[0], path)
            if other.resolve() != resolved:
                raise ConfigError(f"{other} and {path} are both of cell {place_in_run[0]} of one run; give one")
            if resolved in seen:
                raise ConfigError(f"run {path} is given twice; give each run once")
            seen.add(resolved)
        if is_whole:
            whole.add(folder.resolve())
    # One cell alone is a run like any other, unless its run was asked for.
    return [
        RunPlace(next(iter(place.cells.values())), {})
        if len(place.cells) == 1 and place.folder.resolve() not in whole
        else place
        for place in places
    ]


def _queued_cells(folders: Sequence[Path]) -> list[Path]:
    """Return the folders of cells that have written no record yet, beside those of other cells of their run."""
    parents = {path.resolve().parent for path in folders if is_run(path) and elastic_place(path) is not None}
    return [
        path
        for path in folders
        if re.fullmatch(r"cell_[0-9]+", path.resolve().name)
        and path.is_dir()
        and not is_run(path)
        and path.resolve().parent in parents
    ]


def read_runs(folders: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """Read several runs, and name each by the end of its path that no other has."""
    places = find_runs(folders)
    resolved = [place.folder.resolve() for place in places]
    runs = []
    for index, (place, path) in enumerate(zip(places, resolved, strict=True)):
        if path in resolved[:index]:
            raise ConfigError(f"run {place.folder} is given twice; give each run once")
        others = [other.parts for other in resolved if other != path]
        length = 1
        while length < len(path.parts) and any(other[-length:] == path.parts[-length:] for other in others):
            length += 1
        name = "/".join(path.parts[-length:])
        runs.append(_join_cells(place, name) if place.cells else read_run(place.folder, name))
    return runs


def _join_cells(place: RunPlace, name: str) -> Run:
    """Read the cells of an elastic run as one run: what each has recorded is that of its cell."""
    parts = {cell: read_run(path, f"cell {cell}") for cell, path in sorted(place.cells.items())}
    rounds = {cell: records for cell, part in parts.items() for records in part.rounds.values()}
    history = History.of(record for records in rounds.values() for record in records)
    first = next(iter(parts.values()))
    sizes = max(
        (place_in_run[1] for place_in_run in map(elastic_place, place.cells.values()) if place_in_run is not None),
        key=len,
    )
    notes: dict[str, list[str]] = {}
    for cell, part in parts.items():
        for note in part.notes:
            notes.setdefault(note, []).append(f"cell {cell}")
    run = replace(
        first,
        folder=place.folder,
        name=name,
        metrics=_joined_metrics(parts),
        rounds=rounds,
        topology=_joined_topology(sizes, parts),
        partition=next((part.partition for part in parts.values() if part.partition is not None), None),
        checkpoints=tuple(f"cell_{cell}/{name}" for cell, part in parts.items() for name in part.checkpoints),
        latest=", ".join(f"{part.latest} (cell {cell})" for cell, part in parts.items() if part.latest),
        notes=[],
        parts=parts,
        history=history if history.rounds else None,
    )
    run.notes.extend(note if len(who) == len(parts) else f"{', '.join(who)}: {note}" for note, who in notes.items())
    known = max(len(sizes), history.cells if history.rounds else 0)
    if absent := sorted({*range(known)} - {*parts}):
        run.notes.append(f"no folder of cell {', '.join(map(str, absent[:20]))}{', ...' if len(absent) > 20 else ''}")
    if history.apart:
        run.notes.append(f"{history.apart} rounds, made by cells without the others, were not continued")
    return run


def _joined_metrics(parts: Mapping[int, Run]) -> dict[int | None, Metrics]:
    """Return the metrics of each cell; what it has measured at rounds, over all cells of its world, is its own, too."""
    of_cells = {cell: metrics for cell, part in parts.items() for metrics in part.cell_metrics.values()}
    taken = {name for metrics in of_cells.values() for name in metrics.series}
    joined: dict[int | None, Metrics] = {}
    for cell, metrics in of_cells.items():
        at_rounds = parts[cell].metrics[None].series if None in parts[cell].metrics else {}
        more = {f"{name} at rounds" if name in taken else name: series for name, series in at_rounds.items()}
        joined[cell] = replace(metrics, series={**metrics.series, **more})
    return joined


def _joined_topology(sizes: Sequence[int], parts: Mapping[int, Run]) -> Topology | None:
    """Return the topology of all cells, with the ranks that each has had last; ``None`` where they are not known."""
    shapes = {cell: part.topology for cell, part in parts.items() if part.topology is not None}
    ranks = [shapes[cell].world_size if cell in shapes else size for cell, size in enumerate(sizes)]
    if not ranks and [*shapes] == [*range(len(shapes))]:  # of an older run, whose cells are all here
        ranks = [shape.world_size for shape in shapes.values()]
    inner = [(shape.replica_size, shape.cell_shape) for shape in shapes.values()]
    replica, mesh = inner[0] if inner and all(one == inner[0] for one in inner) else (None, None)
    try:
        return Topology(sum(ranks), tuple(ranks), replica, mesh) if ranks else None
    except TopologyError:  # replicas that go into the cells that are here, and not into the others
        return None
