"""Reader of run folders: whatever exists of a run, with notes of what is missing or cannot be read."""

from __future__ import annotations

import json
import math
import os
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import yaml
from numpy.typing import NDArray

from xffl.checks import shorten
from xffl.errors import ConfigError, TopologyError
from xffl.topology import Topology

__all__ = ["FEDERATION", "Metrics", "Partition", "RoundRecord", "Run", "Series", "read_run", "read_runs"]

FEDERATION = -1
"""Stands for all cells together in the place of a cell's number."""
FILES = ("environment", "origins", "topology", "partition")
MARKS = (*(f"{name}.json" for name in FILES), "metrics", "rounds")
"""A folder with one of these is a run. A configuration alone is no mark: projects have one, too."""
EXPOSED_PHASES = ("pack", "commit", "wait")
"""Phases of a delayed round in which training stands still; the others run behind local steps."""
MAX_DEPTH = 20
LONG_PAUSE_S = 60.0
T = TypeVar("T")


class Series(NamedTuple):
    """One value over a run: optimizer steps, Unix seconds and values in the order of the file, also non-finite ones."""

    steps: NDArray[np.float64]
    times: NDArray[np.float64]
    values: NDArray[np.float64]


@dataclass(frozen=True)
class Metrics:
    """A file of metrics: series by name, and the largest step, epoch (from 0) and number of samples."""

    series: dict[str, Series]
    step: int
    epoch: int
    samples: int
    first_time: float
    last_time: float
    longest_pause: float


@dataclass(frozen=True)
class RoundRecord:
    """One round, as recorded by the first rank of a cell; times and durations in seconds.

    ``seconds`` go from the call to the new weights, of a delayed round with the local steps in between; ``hidden`` is
    the time in which the slow link was busy while the rank worked on the round; ``bytes_home`` stay inside the cell.
    ``is_skipped`` marks a round in which the models were so close that nothing moved; ``extras`` are the codec's error
    and the divergences.
    """

    time: float
    step: int
    number: int
    seconds: float
    hidden: float
    phases: dict[str, float]
    bytes_across: float
    bytes_home: float
    dropped: tuple[int, ...]
    update_norms: tuple[float, ...]
    is_skipped: bool
    extras: dict[str, float]

    @property
    def is_delayed(self) -> bool:
        """Whether it ran behind local steps."""
        return "wait" in self.phases

    @property
    def exposed(self) -> float:
        """Seconds in which training stood still for it."""
        if not self.is_delayed:
            return self.seconds
        return min(self.seconds, sum(self.phases.get(name, 0.0) for name in EXPOSED_PHASES))


@dataclass(frozen=True)
class Partition:
    """The classes' names, and each cell's samples of each class."""

    labels: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Run:
    """A run folder; ``topology`` and ``partition`` are ``None`` where they are unknown, dicts and texts are empty.

    ``metrics`` and ``rounds`` are by cell; ``is_federated`` says whether a federation was asked for; ``configuration``
    and ``origins`` are by dotted name; ``notes`` list what is missing and what could not be read.
    """

    folder: Path
    name: str
    metrics: dict[int, Metrics]
    rounds: dict[int, list[RoundRecord]]
    topology: Topology | None
    is_federated: bool
    partition: Partition | None
    configuration: dict[str, Any]
    origins: dict[str, str]
    environment: dict[str, Any]
    checkpoints: tuple[str, ...]
    latest: str
    notes: list[str]

    @property
    def lacks_federation(self) -> bool:
        """Whether a federation or rounds were asked for, and all ranks are in one cell."""
        names = ("federation.every", "federation.algorithm")
        is_asked = self.is_federated or any(self.configuration.get(name) is not None for name in names)
        return is_asked and self.topology is not None and self.topology.cells == 1

    @property
    def cell_metrics(self) -> dict[int, Metrics]:
        """The metrics of single cells, in their order."""
        return {cell: metrics for cell, metrics in sorted(self.metrics.items()) if cell != FEDERATION}

    @cached_property
    def series(self) -> dict[str, dict[int, Series]]:
        """Each value's series by cell; rounds give norms, errors of codecs, divergences, and cells that were there."""
        series: dict[str, dict[int, Series]] = {}
        for cell, metrics in sorted(self.metrics.items()):
            for name, values in metrics.series.items():
                series.setdefault(name, {})[cell] = values
        for name, by_cell in _series_of_rounds(self.rounds).items():
            series.setdefault(name, {}).update(by_cell)
        return series

    @cached_property
    def started(self) -> float | None:
        """Unix seconds of the start, or of the first record; ``None`` where nothing was recorded."""
        first = [metrics.first_time for metrics in self.metrics.values()]
        first += [record.time - record.seconds for records in self.rounds.values() for record in records]
        start = _timestamp(self.environment.get("started_at"))
        # A run that was resumed has its latest start there, and records before it.
        return min(*first, first[0] if start is None else start) if first else None

    @cached_property
    def ended(self) -> float | None:
        """Unix seconds of the last record; ``None`` where there is none."""
        last = [metrics.last_time for metrics in self.metrics.values()]
        return max(last + [record.time for records in self.rounds.values() for record in records], default=None)

    @property
    def seconds(self) -> float | None:
        """From the start to the last record; ``None`` where there is none."""
        return None if self.started is None or self.ended is None else self.ended - self.started


def read_runs(folders: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """Read several run folders, and name each by the end of its path that no other has."""
    if not folders:
        raise ConfigError("no run folder is given; give one or more, such as runs/demo")
    resolved = [Path(folder).resolve() for folder in folders]
    runs = []
    for index, (folder, path) in enumerate(zip(folders, resolved, strict=True)):
        if path in resolved[:index]:
            raise ConfigError(f"run {folder} is given twice; give each run once")
        others = [other.parts for other in resolved if other != path]
        length = 1
        while length < len(path.parts) and any(other[-length:] == path.parts[-length:] for other in others):
            length += 1
        runs.append(read_run(folder, "/".join(path.parts[-length:])))
    return runs


def read_run(folder: str | os.PathLike[str], name: str | None = None) -> Run:
    """Read a run folder as far as it has been written; without a name, that of the folder is taken."""
    path = Path(folder)
    _check_is_run(path)
    notes: list[str] = []
    metrics = {cell: read_metrics(file, notes) for cell, file in _cell_files(path / "metrics")}
    rounds = {cell: read_rounds(file, notes) for cell, file in _cell_files(path / "rounds")}
    files = {name: _load(path / f"{name}.json", json.loads, notes) for name in FILES}
    topology, partition = files["topology"], files["partition"]
    checkpoints = path / "checkpoints"
    latest = checkpoints / "latest"
    saved = [child.name for child in checkpoints.iterdir() if child.is_dir()] if checkpoints.is_dir() else []
    run = Run(
        folder=path,
        name=path.resolve().name if name is None else name,
        metrics={cell: found for cell, found in metrics.items() if found is not None},
        rounds={cell: found for cell, found in rounds.items() if found},
        topology=_make(_topology, topology, notes, "topology.json does not describe a federation"),
        is_federated=topology.get("federated") is True,
        partition=_make(_partition, partition, notes, "partition.json does not describe a partition"),
        configuration=_flatten(_load(path / "config.yaml", yaml.safe_load, notes)),
        origins={str(key): str(value) for key, value in files["origins"].items()},
        environment=files["environment"],
        checkpoints=tuple(sorted(name for name in saved if not name.startswith("."))),
        latest=latest.read_text(encoding="utf-8", errors="replace").strip()[:200] if latest.is_file() else "",
        notes=notes,
    )
    notes += _missing(run)
    return run


def _check_is_run(path: Path) -> None:
    if any((path / mark).exists() for mark in MARKS):
        return
    rule = f"a run folder has {', '.join(MARKS[:-1])} or {MARKS[-1]}: give the output_dir of an experiment"
    if not path.is_dir():
        raise ConfigError(f"run {str(path)!r} is not a folder; {rule}")
    if inside := sorted(child for child in path.iterdir() if any((child / mark).exists() for mark in MARKS)):
        raise ConfigError(f"folder {str(path)!r} is not a run, but holds runs; give some of these: {shorten(inside)}")
    raise ConfigError(f"folder {str(path)!r} is not a run; {rule}")


def _cell_files(folder: Path) -> list[tuple[int, Path]]:
    """Return the JSON lines of cells with their numbers, all cells together first."""
    files = []
    for file in folder.iterdir() if folder.is_dir() else ():
        if (match := re.fullmatch(r"(?:cell_(\d+)|federation)\.jsonl", file.name)) and file.is_file():
            files.append((FEDERATION if match[1] is None else int(match[1]), file))
    return sorted(files)


def read_metrics(path: Path, notes: list[str]) -> Metrics | None:
    """Read ``metrics/cell_0.jsonl`` or another of its form; ``None`` without a record."""
    times, steps = array("d"), array("d")
    columns: dict[str, tuple[array[int], array[float]]] = {}
    epoch = samples = 0
    for record in _records(path, ("time", "step", "values"), notes):
        row = len(times)
        times.append(record["time"])
        steps.append(record["step"])
        epoch, samples = max(epoch, _integer(record.get("epoch"))), max(samples, _integer(record.get("samples")))
        for name, value in record["values"].items():
            # Nearly all values are floats: these take the short way.
            number = value if type(value) is float else _number(value)
            if number is not None:
                column = columns.get(name)
                if column is None:
                    column = columns[name] = (array("q"), array("d"))
                column[0].append(row)
                column[1].append(number)
    if not times:
        return None
    when, where, series = np.frombuffer(times), np.frombuffer(steps), {}
    for name, (rows, numbers) in columns.items():
        index = np.frombuffer(rows, dtype=np.int64)
        series[name] = Series(where[index], when[index], np.frombuffer(numbers))
    pause = float(np.diff(when).max()) if len(when) > 1 else 0.0
    return Metrics(series, int(where.max()), epoch, samples, float(when.min()), float(when.max()), pause)


def read_rounds(path: Path, notes: list[str]) -> list[RoundRecord]:
    """Read ``rounds/cell_0.jsonl`` or another of its form."""
    rounds = []
    for record in _records(path, ("time", "step", "round", "seconds"), notes):
        extras = {f"divergence/{name}": value for name, value in _numbers(record.get("divergence")).items()}
        if (error := _number(record.get("codec_error"))) is not None:
            extras["codec_error"] = error
        if cells := _list(record.get("cells")):  # of an elastic run
            extras["cells_there"] = float(len(cells))
            extras["cells_averaged"] = float(sum(weight > 0 for weight in _list(record.get("weights"))))
        rounds.append(
            RoundRecord(
                time=float(record["time"]),
                step=int(record["step"]),
                number=int(record["round"]),
                seconds=max(0.0, float(record["seconds"])),
                hidden=_amount(record.get("hidden")),
                phases={name: _amount(value) for name, value in _numbers(record.get("phases")).items()},
                bytes_across=_amount(record.get("bytes_across")),
                bytes_home=_amount(record.get("bytes_home")),
                dropped=tuple(int(cell) for cell in _list(record.get("dropped")) if math.isfinite(cell)),
                update_norms=tuple(_list(record.get("update_norms"))),
                is_skipped=record.get("is_skipped") is True,
                extras=extras,
            )
        )
    return rounds


def _records(path: Path, needed: tuple[str, ...], notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file that have what is needed, with finite numbers, and note how many lines are left out.

    The last line of a run that was killed, or is still being written, may be cut off.
    """
    bad, is_last_bad = 0, False
    name = f"{path.parent.name}/{path.name}"
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            is_last_bad = not (isinstance(record, dict) and all(_is_usable(key, record.get(key)) for key in needed))
            if is_last_bad:
                bad += 1
            else:
                yield record
    if is_last_bad:
        notes.append(f"{name}: the last line is cut off, or being written; it is left out")
        bad -= 1
    if bad:
        notes.append(
            f"{name}: {bad} {'lines' if bad > 1 else 'line'} cannot be read and {'are' if bad > 1 else 'is'} left out"
        )


def _is_usable(key: str, value: object) -> bool:
    if key == "values":
        return isinstance(value, dict)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15


def _number(value: object) -> float | None:
    """Return a number of a file, also ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``; ``None`` where it is none."""
    if isinstance(value, bool) or not (isinstance(value, (int, float)) or value in ("NaN", "Infinity", "-Infinity")):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if int(value) > 0 else -math.inf


def _numbers(mapping: object) -> dict[str, float]:
    """Return the numbers of a mapping."""
    numbers = {name: _number(value) for name, value in mapping.items()} if isinstance(mapping, dict) else {}
    return {name: value for name, value in numbers.items() if value is not None}


def _list(values: object) -> list[float]:
    """Return the numbers of a list, NaN for what is none, so that each cell keeps its place."""
    numbers = [_number(value) for value in values] if isinstance(values, list) else []
    return [math.nan if number is None else number for number in numbers]


def _amount(value: object) -> float:
    """Return a number that cannot be negative; 0 where it is missing."""
    number = _number(value)
    return number if number is not None and 0 <= number < math.inf else 0.0


def _integer(value: object) -> int:
    if type(value) is int:
        return value
    number = _number(value)
    return int(number) if number is not None and math.isfinite(number) else 0


def _load(file: Path, parse: Callable[[str], Any], notes: list[str]) -> dict[str, Any]:
    """Return the mapping that a file holds, an empty one where it is missing or cannot be read."""
    if not file.is_file():
        return {}
    try:
        content = parse(file.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        notes.append(f"{file.name} cannot be read: {error}")
        return {}
    if not isinstance(content, dict):
        notes.append(f"{file.name} holds no object and is left out")
        return {}
    return content


def _make(make: Callable[[dict[str, Any]], T], content: dict[str, Any], notes: list[str], wrong: str) -> T | None:
    """Return what is made of a file's content, ``None`` where it is empty or wrong."""
    try:
        return make(content) if content else None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        notes.append(f"{wrong}: {type(error).__name__}: {error}")
        return None


def _topology(content: dict[str, Any]) -> Topology:
    cells = tuple(content["cells"])
    topology = Topology(content["world_size"], cells, content.get("replica_size"), content.get("cell_shape"))
    # Topology takes a single size as that of all cells.
    if topology.sizes != cells:
        raise TopologyError(f"cells {list(cells)} do not sum to {topology.world_size} ranks")
    return topology


def _partition(content: dict[str, Any]) -> Partition:
    counts = tuple(tuple(int(count) for count in row) for row in content["counts"])
    labels = tuple(str(label) for label in content.get("labels") or range(len(counts[0])))
    if not labels or any(len(row) != len(labels) for row in counts) or min(map(min, counts)) < 0:
        raise ValueError("counts are not one of 0 or more for each label")
    return Partition(labels, counts)


def _flatten(tree: dict[Any, Any], prefix: str = "", depth: int = 0) -> dict[str, Any]:
    """Name the leaves of nested mappings with dots; YAML can nest a mapping in itself."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and depth < MAX_DEPTH:
            leaves |= _flatten(value, f"{name}.", depth + 1)
        else:
            leaves[name] = value
    return leaves


def _timestamp(text: object) -> float | None:
    """Return a time with a time zone in Unix seconds."""
    try:
        # Python 3.10 does not know the letter.
        when = datetime.fromisoformat(text.replace("Z", "+00:00")) if isinstance(text, str) else None
    except ValueError:
        return None
    return None if when is None or when.tzinfo is None else when.timestamp()


def _series_of_rounds(rounds: dict[int, list[RoundRecord]]) -> dict[str, dict[int, Series]]:
    """Return the series that rounds hold: norms of all cells' updates from the first file, else each cell's own."""
    points: dict[str, dict[int, list[tuple[float, float, float]]]] = {}

    def add(name: str, cell: int, record: RoundRecord, value: float) -> None:
        by_cell = points.setdefault(f"rounds/{name}", {})
        by_cell.setdefault(cell, []).append((record.step, record.time, value))

    for index, (cell, records) in enumerate(sorted(rounds.items())):
        for record in records:
            for name, value in record.extras.items():
                # All ranks record the same divergences.
                is_shared = name.startswith("divergence/")
                if not is_shared or index == 0:
                    add(name, FEDERATION if is_shared else cell, record, value)
            for other, norm in enumerate(record.update_norms if index == 0 else ()):
                add("update_norm", other, record, norm)
    return {
        name: {cell: Series(*np.array(rows, dtype=np.float64).T) for cell, rows in by_cell.items()}
        for name, by_cell in points.items()
    }


def _missing(run: Run) -> list[str]:
    """List what a report of the run will lack, and why that may be."""
    notes = []
    if not run.metrics:
        notes.append("no metrics yet: the run has just started, was stopped before the first record, or logs nothing")
    elif not any(name.startswith("val/") for name in run.series):
        notes.append("no validation: no value val/... was recorded")
    if run.lacks_federation:
        notes.append("no federation, though one was asked for: all ranks are in one cell")
    if not run.rounds:
        is_alone = run.topology is not None and run.topology.cells == 1
        notes.append("no rounds: there is one cell" if is_alone else "no rounds were recorded")
    if run.topology is not None and run.metrics:
        absent = [str(cell) for cell in range(run.topology.cells) if cell not in run.metrics]
        if absent:
            notes.append(f"no metrics of cell {', '.join(absent[:20])}{', ...' if len(absent) > 20 else ''}")
    for name in ("topology.json", "partition.json", "config.yaml", "origins.json", "environment.json"):
        content = run.configuration if name == "config.yaml" else getattr(run, name.removesuffix(".json"))
        if not content and not any(name in note for note in run.notes):
            notes.append(f"no {name}")
    if "final" not in run.checkpoints:
        notes.append("no checkpoint 'final': the run has not finished, or keeps none")
    pause = max((metrics.longest_pause for metrics in run.cell_metrics.values()), default=0.0)
    if run.seconds and pause > LONG_PAUSE_S and pause > 0.2 * run.seconds:
        notes.append(f"times include a pause of {pause:.0f} s without a record, as when a run is resumed")
    return notes
