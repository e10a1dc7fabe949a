"""A run folder, read: whatever of it exists, and notes of what does not."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from xffl.errors import ConfigError, TopologyError
from xffl.run_report.lines import Progress, RoundLine, Series, Values, read_rounds, read_values
from xffl.topology import Topology

__all__ = ["FEDERATION", "Partition", "Run", "read_run", "read_runs"]

FEDERATION = -1
"""Stands for all cells together where else a cell's number stands."""
MARKS = ("environment.json", "origins.json", "topology.json", "partition.json", "metrics", "rounds")
"""A folder with one of these is a run. A configuration alone makes none: projects have one, too."""
MAX_DEPTH = 20
LONG_PAUSE_S = 60.0


@dataclass(frozen=True)
class Partition:
    """Who has what: the classes' names, and each cell's samples of each class."""

    labels: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Run:
    """What a run folder holds.

    :param folder: Where it is.
    :param name: What it is called in the report.
    :param values: Metrics by cell, and of :data:`FEDERATION`.
    :param rounds: Rounds by cell.
    :param topology: The federation; ``None`` where it is not known.
    :param is_federated: Whether a federation was asked for.
    :param partition: Who has what; ``None`` where it is not known.
    :param configuration: Values by dotted name.
    :param origins: Where each value comes from.
    :param environment: What ``environment.json`` holds.
    :param checkpoints: Names of the checkpoints.
    :param latest: Name of the newest; empty without one.
    :param notes: What is missing, and what could not be read.
    """

    folder: Path
    name: str
    values: dict[int, Values] = field(default_factory=dict)
    rounds: dict[int, list[RoundLine]] = field(default_factory=dict)
    topology: Topology | None = None
    is_federated: bool = False
    partition: Partition | None = None
    configuration: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    checkpoints: tuple[str, ...] = ()
    latest: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def lacks_federation(self) -> bool:
        """Whether a federation or rounds were asked for, and all ranks are in one cell."""
        names = ("federation.every", "federation.algorithm")
        is_asked = self.is_federated or any(self.configuration.get(name) is not None for name in names)
        return is_asked and self.topology is not None and self.topology.cells == 1

    @cached_property
    def series(self) -> dict[str, dict[int, Series]]:
        """Each value's curves, by cell; rounds give ``rounds/update_norm``, ``rounds/codec_error`` and divergences."""
        found: dict[str, dict[int, Series]] = {}
        for cell, values in sorted(self.values.items()):
            for name, series in values.series.items():
                found.setdefault(name, {})[cell] = series
        for name, by_cell in _series_of_rounds(self.rounds).items():
            found.setdefault(name, {}).update(by_cell)
        return found

    @cached_property
    def started(self) -> float | None:
        """Unix seconds of the start, or of the first record; ``None`` where nothing was recorded."""
        begun = [values.times[0] for values in self.values.values() if values.times is not None]
        begun += [one.time - one.seconds for lines in self.rounds.values() for one in lines]
        if not begun:
            return None
        told = _timestamp(self.environment.get("started_at"))
        # A run that was resumed tells its latest start.
        return min(begun) if told is None else min(*begun, told)

    @cached_property
    def ended(self) -> float | None:
        """Unix seconds of the last record; ``None`` where there is none."""
        ends = [values.times[1] for values in self.values.values() if values.times is not None]
        ends += [one.time for lines in self.rounds.values() for one in lines]
        return max(ends, default=None)

    @property
    def seconds(self) -> float | None:
        """From the start to the last record; ``None`` where there is none."""
        return None if self.started is None or self.ended is None else self.ended - self.started

    @property
    def progress(self) -> dict[int, Progress]:
        """How far each cell has come."""
        return {
            cell: values.progress
            for cell, values in sorted(self.values.items())
            if cell != FEDERATION and values.progress is not None
        }


def read_runs(folders: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """Read several run folders, and call each by the end of its path that no other has.

    :param folders: The folders.
    :return: One run for each.
    :raises ConfigError: if there is none, one is no run folder, or one is given twice.
    """
    if not folders:
        raise ConfigError("no run folder is given; give one or more, such as runs/demo")
    paths = [Path(folder) for folder in folders]
    resolved = [path.resolve() for path in paths]
    for index, path in enumerate(resolved):
        if path in resolved[:index]:
            raise ConfigError(f"run {paths[index]} is given twice; give each run once")
    return [read_run(path, name) for path, name in zip(paths, _names(resolved), strict=True)]


def read_run(folder: str | os.PathLike[str], name: str | None = None) -> Run:
    """Read a run folder, as far as it has been written; local.

    :param folder: Such as ``runs/demo``.
    :param name: What to call it; ``None`` takes the folder's name.
    :return: The run, with notes of what is missing.
    :raises ConfigError: if the folder is none of a run.
    """
    path = Path(folder)
    _check_is_run(path)
    notes: list[str] = []
    values = {
        cell: read_values(file, notes) for cell, file in _files(path / "metrics", r"(?:cell_(\d+)|federation)\.jsonl")
    }
    rounds = {cell: read_rounds(file, notes) for cell, file in _files(path / "rounds", r"cell_(\d+)\.jsonl")}
    checkpoints = path / "checkpoints"
    told = _json(path / "topology.json", notes)
    run = Run(
        folder=path,
        name=path.resolve().name if name is None else name,
        values={cell: found for cell, found in values.items() if found.records},
        rounds={cell: found for cell, found in rounds.items() if found},
        topology=_topology(told, notes),
        is_federated=told.get("federated") is True,
        partition=_partition(_json(path / "partition.json", []), notes),
        configuration=_configuration(path / "config.yaml", notes),
        origins={str(key): str(value) for key, value in _json(path / "origins.json", notes).items()},
        environment=_json(path / "environment.json", notes),
        checkpoints=_subfolders(checkpoints),
        latest=_line(checkpoints / "latest"),
        notes=notes,
    )
    notes += _missing(run)
    return run


def _check_is_run(path: Path) -> None:
    if any((path / mark).exists() for mark in MARKS):
        return
    rule = f"a run folder has {', '.join(MARKS[:-1])} or {MARKS[-1]}"
    if not path.is_dir():
        raise ConfigError(f"run {str(path)!r} is no folder; {rule}: give the output_dir of an experiment")
    inside = sorted(
        child for child in path.iterdir() if child.is_dir() and any((child / mark).exists() for mark in MARKS)
    )
    if inside:
        shown = ", ".join(str(child) for child in inside[:4]) + (", ..." if len(inside) > 4 else "")
        raise ConfigError(f"folder {str(path)!r} is no run, but holds runs; give some of these: {shown}")
    raise ConfigError(f"folder {str(path)!r} is no run; {rule}: give the output_dir of an experiment")


def _names(paths: list[Path]) -> list[str]:
    """Return the shortest ends of paths that differ."""
    names = []
    for path in paths:
        others = [other.parts for other in paths if other != path]
        length = 1
        while length < len(path.parts) and any(other[-length:] == path.parts[-length:] for other in others):
            length += 1
        names.append("/".join(path.parts[-length:]))
    return names


def _files(folder: Path, pattern: str) -> list[tuple[int, Path]]:
    """Return the files of cells with their numbers, all cells together first."""
    if not folder.is_dir():
        return []
    found = []
    for file in folder.iterdir():
        if (match := re.fullmatch(pattern, file.name)) and file.is_file():
            found.append((FEDERATION if match[1] is None else int(match[1]), file))
    return sorted(found)


def _subfolders(folder: Path) -> tuple[str, ...]:
    if not folder.is_dir():
        return ()
    return tuple(sorted(child.name for child in folder.iterdir() if child.is_dir() and not child.name.startswith(".")))


def _line(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace").strip()[:200] if file.is_file() else ""


def _json(file: Path, notes: list[str]) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError) as error:
        notes.append(f"{file.name} cannot be read: {error}")
        return {}
    if not isinstance(found, dict):
        notes.append(f"{file.name} holds no object and is left out")
        return {}
    return found


def _topology(told: dict[str, Any], notes: list[str]) -> Topology | None:
    if not told:
        return None
    try:
        cells = tuple(told["cells"])
        found = Topology(told["world_size"], cells, told.get("replica_size"), told.get("cell_shape"))
        # To a topology a single size is that of all cells.
        if found.sizes != cells:
            raise TopologyError(f"cells {list(cells)} do not sum to {found.world_size} ranks")
        return found
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        notes.append(f"topology.json does not describe a federation: {type(error).__name__}: {error}")
        return None


def _partition(told: dict[str, Any], notes: list[str]) -> Partition | None:
    if not told:
        return None
    try:
        counts = tuple(tuple(int(count) for count in row) for row in told["counts"])
        labels = tuple(str(label) for label in told.get("labels") or range(len(counts[0])))
        if not labels or any(len(row) != len(labels) for row in counts) or min(map(min, counts)) < 0:
            raise ValueError("counts are not one of 0 or more for each label")
        return Partition(labels, counts)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        notes.append(f"partition.json does not say who has what: {type(error).__name__}: {error}")
        return None


def _configuration(file: Path, notes: list[str]) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8", errors="replace"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        notes.append(f"config.yaml cannot be read: {error}")
        return {}
    return _flat(found) if isinstance(found, dict) else {}


def _flat(tree: dict[Any, Any], start: str = "", depth: int = 0) -> dict[str, Any]:
    """Name the leaves of nested mappings with dots."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{start}{key}"
        if isinstance(value, dict) and value and depth < MAX_DEPTH:
            found |= _flat(value, f"{name}.", depth + 1)
        else:
            found[name] = value
    return found


def _timestamp(told: object) -> float | None:
    """Return a time that names its zone in Unix seconds."""
    if not isinstance(told, str):
        return None
    try:
        # Python 3.10 does not know the letter.
        when = datetime.fromisoformat(told.replace("Z", "+00:00"))
    except ValueError:
        return None
    return None if when.tzinfo is None else when.timestamp()


def _series_of_rounds(rounds: dict[int, list[RoundLine]]) -> dict[str, dict[int, Series]]:
    """Return the curves that rounds hold: norms of all cells' updates from the first file, else each cell's own."""
    points: dict[str, dict[int, list[tuple[float, float, float]]]] = {}
    for place, (cell, lines) in enumerate(sorted(rounds.items())):
        for one in lines:
            for name, value in one.extras.items():
                # All ranks know the same divergence.
                is_shared = name.startswith("divergence/")
                if is_shared and place:
                    continue
                by_cell = points.setdefault(f"rounds/{name}", {})
                by_cell.setdefault(FEDERATION if is_shared else cell, []).append((one.step, one.time, value))
            for other, norm in enumerate(one.update_norms if place == 0 else ()):
                points.setdefault("rounds/update_norm", {}).setdefault(other, []).append((one.step, one.time, norm))
    return {
        name: {cell: Series(*np.array(rows, dtype=np.float64).T) for cell, rows in by_cell.items()}
        for name, by_cell in points.items()
    }


def _missing(run: Run) -> list[str]:
    """Say what a report of the run will lack, and why that may be."""
    notes = []
    if not run.values:
        notes.append("no metrics yet: the run has just started, was stopped before the first record, or logs nothing")
    elif not any(name.startswith("val/") for name in run.series):
        notes.append("no validation: no value val/... was recorded")
    if run.lacks_federation:
        notes.append("no federation, though one was asked for: all ranks are in one cell")
    if not run.rounds:
        alone = run.topology is not None and run.topology.cells == 1
        notes.append("no rounds: there is one cell" if alone else "no rounds were recorded")
    if run.topology is not None and run.values:
        absent = [str(cell) for cell in range(run.topology.cells) if cell not in run.values]
        if absent:
            notes.append(f"no metrics of cell {', '.join(absent[:20])}{', ...' if len(absent) > 20 else ''}")
    wanted = (
        ("topology.json", run.topology is None),
        ("partition.json", run.partition is None),
        ("config.yaml", not run.configuration),
        ("origins.json", not run.origins),
        ("environment.json", not run.environment),
    )
    notes += [f"no {name}" for name, is_absent in wanted if is_absent and not any(name in note for note in run.notes)]
    if "final" not in run.checkpoints:
        notes.append("no checkpoint 'final': the run has not finished, or keeps none")
    pause = max((values.pause for cell, values in run.values.items() if cell != FEDERATION), default=0.0)
    if run.seconds and pause > LONG_PAUSE_S and pause > 0.2 * run.seconds:
        notes.append(f"times include a pause of {pause:.0f} s without a record, as when a run is resumed")
    return notes
