"""Reader of a run folder: whatever exists of the run, with notes of what is missing or cannot be read."""

from __future__ import annotations

import math
import os
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from xffl.checks import shorten
from xffl.errors import ConfigError, TopologyError
from xffl.files import TEXT_FILE_LIMIT, open_regular, read_bytes
from xffl.json_text import parse_json
from xffl.planning.text import counted
from xffl.reading import COUNT_LIMIT
from xffl.run_report.table import Table
from xffl.topology import Topology
from xffl.yaml_text import flattened, parse_yaml

if TYPE_CHECKING:
    from xffl.run_report.elastic import History

__all__ = [
    "Attendance",
    "Metrics",
    "Partition",
    "RoundRecord",
    "Run",
    "Series",
    "elastic_place",
    "is_run",
    "read_run",
]

FILES = ("environment", "origins", "topology", "partition")
MARKS = (*(f"{name}.json" for name in FILES), "metrics", "rounds")
"""A folder with one of these is a run. A configuration alone is no mark: projects have one, too."""
EXPOSED_PHASES = ("pack", "commit", "wait")
"""Phases of a delayed round in which training stands still; the others run behind local steps."""
LONG_PAUSE_S = 60.0
LINE_LIMIT = 2**20
"""The most bytes of a record in JSON lines; longer lines are left out as damaged ones are."""
FILE_LIMIT = 2**30
"""The most bytes of a file of JSON lines that are read: those of some two million records"""
NAMES_LIMIT = 1000
"""The most names of values in a file, each of which is a row and a curve of the page"""
NAME_LIMIT = 200
"""The most characters of such a name"""
T = TypeVar("T")


class Series(NamedTuple):
    """One value over a run: optimizer steps, Unix seconds and values in the order of the file, also non-finite ones."""

    steps: NDArray[np.float64]
    times: NDArray[np.float64]
    values: NDArray[np.float64]


@dataclass(frozen=True)
class Metrics:
    """A file of metrics: series by name, the largest step and epoch (from 0), and the number of samples.

    A cell that returned to a run which had continued with fewer cells has counted its samples anew.
    """

    series: dict[str, Series]
    step: int
    epoch: int
    samples: int
    first_time: float
    last_time: float
    longest_pause: float


class Attendance(NamedTuple):
    """Who took part in a round of an elastic run.

    ``cells`` were there, each started again so often before as ``restarts`` says, which older records do not;
    ``weights`` and ``steps`` are of all known cells; ``left`` had left for good; ``membership`` names the meeting.
    """

    membership: str
    cells: tuple[int, ...]
    weights: tuple[float, ...]
    steps: tuple[float, ...]
    restarts: tuple[int, ...]
    left: tuple[int, ...]
    tries: int


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
    fragment: int
    attendance: Attendance | None

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

    ``metrics`` and ``rounds`` are by cell; of all cells together the key is ``None``. ``is_federated`` says whether a
    federation was asked for; ``configuration`` and ``origins`` are by dotted name; ``notes`` list what is
    missing and what could not be read. Of an elastic run, whose cells have folders of their own (``parts``, by cell),
    ``history`` tells who took part.
    """

    folder: Path
    name: str
    metrics: dict[int | None, Metrics]
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
    is_elastic: bool
    parts: dict[int, Run]
    history: History | None

    @property
    def lacks_federation(self) -> bool:
        """Whether a federation or rounds were asked for, and all ranks are in one cell."""
        names = ("federation.every", "federation.algorithm")
        is_asked = self.is_federated or any(self.configuration.get(name) is not None for name in names)
        return is_asked and not self.is_elastic and self.topology is not None and self.topology.cells == 1

    @property
    def cell_metrics(self) -> dict[int, Metrics]:
        """The metrics of single cells, in their order."""
        cells = sorted(cell for cell in self.metrics if cell is not None)
        return {cell: self.metrics[cell] for cell in cells}

    @property
    def gone_cells(self) -> tuple[int, ...]:
        """Cells that have records but left the run, which continued with fewer cells."""
        if self.topology is None or self.is_elastic or self.parts:
            return ()
        return tuple(cell for cell in self.cell_metrics if cell >= self.topology.cells)

    @cached_property
    def series(self) -> dict[str, dict[int | None, Series]]:
        """Each value's series by cell; rounds give norms, errors of codecs, divergences, and cells that took part."""
        series: dict[str, dict[int | None, Series]] = {}
        cells = sorted(self.metrics, key=lambda cell: (cell is not None, cell or 0))  # all cells together first
        for cell in cells:
            for name, values in self.metrics[cell].series.items():
                series.setdefault(name, {})[cell] = values
        for name, by_cell in _series_of_rounds(self).items():
            series.setdefault(name, {}).update(by_cell)
        return series

    @cached_property
    def round_table(self) -> Table:
        """All rounds of all cells, a row each.

        The columns are ``cell``, ``number``, ``step``, ``time``, ``seconds``, ``exposed``, ``hidden``, ``behind``,
        ``bytes_across`` and ``bytes_home`` of :class:`RoundRecord`; ``between rounds``, the seconds from the cell's
        previous round, or from its start, in which it trained; ``phase/NAME`` for each phase, and ``exposed/NAME`` for
        those in which training stood still.
        """
        return Table.of_rows(row for cell, records in sorted(self.rounds.items()) for row in self._rows(cell, records))

    def _rows(self, cell: int, records: Sequence[RoundRecord]) -> Iterator[dict[str, float]]:
        start = records[0].time - records[0].seconds if self.started is None else self.started
        spans = [(start, math.inf)] if self.history is None else self.history.spans(cell, start, start)
        begins = iter([*(begin for begin, _ in spans), math.inf])
        trained_from, next_begin = start, next(begins)
        for record in records:
            begin = record.time - record.seconds
            # A cell that was away trains again from where its next span begins.
            while next_begin <= begin:
                trained_from, next_begin = max(trained_from, next_begin), next(begins)
            until = record.time - record.exposed
            phases = record.phases
            yield {
                "cell": cell,
                "number": record.number,
                "step": record.step,
                "time": record.time,
                "seconds": record.seconds,
                "exposed": record.exposed,
                "hidden": record.hidden,
                "behind": record.seconds - record.exposed,
                "bytes_across": record.bytes_across,
                "bytes_home": record.bytes_home,
                "between rounds": max(0.0, until - trained_from),
                **{f"phase/{name}": value for name, value in phases.items()},
                **{
                    f"exposed/{name}": value
                    for name, value in phases.items()
                    if not record.is_delayed or name in EXPOSED_PHASES
                },
            }
            trained_from = max(trained_from, record.time)

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


def read_run(folder: str | os.PathLike[str], name: str | None = None) -> Run:
    """Read a run folder as far as it has been written; without a name, that of the folder is taken."""
    path = Path(folder)
    _check_is_run(path)
    notes: list[str] = []
    metrics = {cell: read_metrics(file, notes) for cell, file in _cell_files(path / "metrics")}
    rounds = {cell: read_rounds(file, notes) for cell, file in _cell_files(path / "rounds") if cell is not None}
    files = {name: _load(path / f"{name}.json", parse_json, notes) for name in FILES}
    topology, partition = files["topology"], files["partition"]
    checkpoints = path / "checkpoints"
    latest = checkpoints / "latest"
    saved = [child.name for child in checkpoints.iterdir() if child.is_dir()] if checkpoints.is_dir() else []
    run = Run(
        folder=path,
        name=path.resolve().name if name is None else name,
        metrics={cell: content for cell, content in metrics.items() if content is not None},
        rounds={cell: content for cell, content in rounds.items() if content},
        topology=_make(_topology, topology, notes, "topology.json does not describe a federation"),
        is_federated=topology.get("federated") is True,
        partition=_make(_partition, partition, notes, "partition.json does not describe a partition"),
        configuration=flattened(_load(path / "config.yaml", parse_yaml, notes)),
        origins={str(key): str(value) for key, value in files["origins"].items()},
        environment=files["environment"],
        checkpoints=tuple(sorted(name for name in saved if not name.startswith("."))),
        latest=_first_line(latest) if latest.is_file() else "",
        notes=notes,
        is_elastic=elastic_place(path) is not None,
        parts={},
        history=None,
    )
    notes += _missing(run)
    return run


def is_run(path: Path) -> bool:
    """Tell whether a folder is that of a run."""
    return any((path / mark).exists() for mark in MARKS)


def elastic_place(path: Path) -> tuple[int, tuple[int, ...]] | None:
    """Return of which cell of an elastic run a folder is, and the ranks of all cells; ``None`` where it is of none.

    Older runs do not say so: there the folder is called ``cell_1``, its rounds have epochs, and ranks are unknown.
    """
    place = _load(path / "topology.json", parse_json, []).get("elastic")
    if isinstance(place, dict) and type(place.get("cell")) is int:
        return place["cell"], tuple(int(size) for size in _list(place.get("cells")) if math.isfinite(size))
    match = re.fullmatch(r"cell_([0-9]{1,9})", path.resolve().name)
    rounds = path / "rounds" / "cell_0.jsonl"
    if match is None or not rounds.is_file():
        return None
    first = next(_lines(rounds, []), None)
    return (int(match[1]), ()) if first is not None and '"membership"' in first else None


def _check_is_run(path: Path) -> None:
    if is_run(path):
        return
    rule = f"a run folder has {', '.join(MARKS[:-1])} or {MARKS[-1]}: give the output_dir of an experiment"
    if not path.is_dir():
        raise ConfigError(f"run {str(path)!r} is not a folder; {rule}")
    if inside := sorted(filter(is_run, path.iterdir())):
        raise ConfigError(f"folder {str(path)!r} is not a run, but holds runs; give some of these: {shorten(inside)}")
    raise ConfigError(f"folder {str(path)!r} is not a run; {rule}")


def _cell_files(folder: Path) -> list[tuple[int | None, Path]]:
    """Return the JSON lines of cells with their numbers; ``None``, all cells together, is first."""
    together: list[tuple[int | None, Path]] = []
    cells: list[tuple[int, Path]] = []
    for file in folder.iterdir() if folder.is_dir() else ():
        if (match := re.fullmatch(r"(?:cell_([0-9]{1,9})|federation)\.jsonl", file.name)) and file.is_file():
            if match[1] is None:
                together.append((None, file))
            else:
                cells.append((int(match[1]), file))
    return [*together, *sorted(cells)]


def read_metrics(path: Path, notes: list[str]) -> Metrics | None:
    """Read ``metrics/cell_0.jsonl`` or another of its form; ``None`` without a record."""
    times, steps = array("d"), array("d")
    columns: dict[str, tuple[array[int], array[float]]] = {}
    epoch = samples = samples_before = 0
    names = _Names(path, notes)
    for record in _records(path, ("time", "step", "values"), notes):
        row = len(times)
        times.append(record["time"])
        steps.append(record["step"])
        epoch = max(epoch, _integer(record.get("epoch")))
        seen = _integer(record.get("samples"))
        if seen < samples:
            samples_before += samples
        samples = seen
        for name, value in record["values"].items():
            # Nearly all values are floats: these take the short way.
            number = value if type(value) is float else _number(value)
            if number is not None:
                column = columns.get(name)
                if column is None and not names.admit(name):
                    continue
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
    return Metrics(
        series=series,
        step=int(where.max()),
        epoch=epoch,
        samples=samples_before + samples,
        first_time=float(when.min()),
        last_time=float(when.max()),
        longest_pause=pause,
    )


def read_rounds(path: Path, notes: list[str]) -> list[RoundRecord]:
    """Read ``rounds/cell_0.jsonl`` or another of its form."""
    rounds = []
    names = _Names(path, notes)
    for record in _records(path, ("time", "step", "round", "seconds"), notes):
        divergence = names.admitted(_numbers(record.get("divergence")))
        extras = {f"divergence/{name}": value for name, value in divergence.items()}
        if (error := _number(record.get("codec_error"))) is not None:
            extras["codec_error"] = error
        rounds.append(
            RoundRecord(
                time=float(record["time"]),
                step=int(record["step"]),
                number=int(record["round"]),
                seconds=max(0.0, float(record["seconds"])),
                hidden=_amount(record.get("hidden")),
                phases={name: _amount(value) for name, value in names.admitted(_numbers(record.get("phases"))).items()},
                bytes_across=_amount(record.get("bytes_across")),
                bytes_home=_amount(record.get("bytes_home")),
                dropped=_indices(record.get("dropped")),
                update_norms=tuple(_list(record.get("update_norms"))),
                is_skipped=record.get("is_skipped") is True,
                extras=extras,
                fragment=_integer(record.get("fragment")),
                attendance=_attendance(record),
            )
        )
    return rounds


def _attendance(record: dict[str, Any]) -> Attendance | None:
    cells = _indices(record.get("cells"))
    if not cells:
        return None
    return Attendance(
        str(record.get("membership", "")),
        cells=cells,
        weights=tuple(_list(record.get("weights"))),
        steps=tuple(_list(record.get("steps"))),
        restarts=_indices(record.get("restarts")),
        left=_indices(record.get("left")),
        tries=max(1, _integer(record.get("tries"))),
    )


def _records(path: Path, needed: tuple[str, ...], notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file that have what is needed, with finite numbers, and note how many lines are left out.

    The last line of a run that was killed, or is still being written, may be cut off.
    """
    record: Any
    bad, is_last_bad = 0, False
    name = _told_name(path)
    for line in _lines(path, notes):
        if line is not None and not line.strip():
            continue
        try:
            record = None if line is None else parse_json(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and all(_is_usable(key, record.get(key)) for key in needed):
            is_last_bad = False
            yield record
        else:
            is_last_bad = True
            bad += 1
    if is_last_bad:
        notes.append(f"{name}: the last line is cut off, or being written; it is left out")
        bad -= 1
    if bad:
        notes.append(
            f"{name}: {bad} {'lines' if bad > 1 else 'line'} cannot be read and {'are' if bad > 1 else 'is'} left out"
        )


def _lines(path: Path, notes: list[str]) -> Iterator[str | None]:
    """Yield the lines of a file, ``None`` for one that is longer than any record, and note where the rest is left out.

    So whatever somebody has put into the file, little of it is held at once, and the reading ends.
    """
    with open_regular(path) as file:
        while file.tell() < FILE_LIMIT:
            line = file.readline(LINE_LIMIT + 1)
            if not line:
                return
            if len(line) <= LINE_LIMIT:
                yield line.decode("utf-8", errors="replace")
                continue
            while line and not line.endswith(b"\n") and file.tell() < FILE_LIMIT:
                line = file.readline(LINE_LIMIT)
            yield None
        if size := os.fstat(file.fileno()).st_size - file.tell():
            notes.append(f"{_told_name(path)}: its last {size} bytes are left out; the first {FILE_LIMIT} are read")


def _told_name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


class _Names:
    """The names of values of a file, of which there are at most ``NAMES_LIMIT``; the first one beyond is noted."""

    def __init__(self, path: Path, notes: list[str]) -> None:
        self._path = path
        self._notes = notes
        self._names: set[str] = set()
        self._is_told = False

    def admit(self, name: str) -> bool:
        """Tell whether values of a name are taken."""
        if name in self._names:
            return True
        if len(self._names) < NAMES_LIMIT and len(name) <= NAME_LIMIT:
            self._names.add(name)
            return True
        if not self._is_told:
            self._is_told = True
            self._notes.append(
                f"{_told_name(self._path)}: {NAMES_LIMIT} names of values, of at most {NAME_LIMIT} characters, are "
                "read; values of others are left out"
            )
        return False

    def admitted(self, values: dict[str, float]) -> dict[str, float]:
        """Return the values whose names are taken."""
        return {name: value for name, value in values.items() if self.admit(name)}


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


def _indices(values: object) -> tuple[int, ...]:
    """Return the whole numbers of a list."""
    return tuple(int(value) for value in _list(values) if math.isfinite(value))


def _amount(value: object) -> float:
    """Return a number that cannot be negative; 0 where it is missing."""
    number = _number(value)
    return number if number is not None and 0 <= number < math.inf else 0.0


def _integer(value: object) -> int:
    number = value if type(value) is int else _number(value)
    return int(number) if number is not None and abs(number) <= COUNT_LIMIT else 0


def _first_line(file: Path) -> str:
    with open_regular(file) as text:
        return text.read(1000).decode("utf-8", errors="replace").strip()[:200]


def _load(file: Path, parse: Callable[[str], Any], notes: list[str]) -> dict[str, Any]:
    """Return the mapping that a file holds, an empty one where it is missing or cannot be read."""
    if not file.is_file():
        return {}
    try:
        content = parse(read_bytes(file, TEXT_FILE_LIMIT).decode("utf-8", errors="replace"))
    except (OSError, ValueError) as error:
        notes.append(f"{file.name} cannot be read: {getattr(error, 'strerror', None) or error}")
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


def _timestamp(text: object) -> float | None:
    """Return a time with a time zone in Unix seconds."""
    try:
        # Python 3.10 does not know the letter.
        when = datetime.fromisoformat(text.replace("Z", "+00:00")) if isinstance(text, str) else None
    except ValueError:
        return None
    return None if when is None or when.tzinfo is None else when.timestamp()


def _series_of_rounds(run: Run) -> dict[str, dict[int | None, Series]]:
    """Return the series that rounds hold: what all ranks record alike from one cell, else each cell's own."""
    points: dict[str, dict[int | None, list[tuple[float, float, float]]]] = {}
    together: Sequence[RoundRecord] = next((records for _, records in sorted(run.rounds.items())), [])
    if run.history is not None:
        together = run.history.rounds

    def add(name: str, cell: int | None, record: RoundRecord, value: float) -> None:
        by_cell = points.setdefault(f"rounds/{name}", {})
        by_cell.setdefault(cell, []).append((record.step, record.time, value))

    for record in together:
        there = record.attendance
        for name, value in record.extras.items():
            if name.startswith("divergence/"):
                add(name, None, record, value)
        for cell, norm in enumerate(record.update_norms):
            if there is None or cell in there.cells:
                add("update_norm", cell, record, norm)
        if there is not None and run.history is None:  # which shows them otherwise
            add("cells_there", min(run.rounds), record, len(there.cells))
            add("cells_averaged", min(run.rounds), record, sum(weight > 0 for weight in there.weights))
    for cell, records in sorted(run.rounds.items()):
        for record in records:
            if (error := record.extras.get("codec_error")) is not None:
                add("codec_error", cell, record, error)
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
        is_alone = run.topology is not None and run.topology.cells == 1 and not run.is_elastic
        notes.append("no rounds: there is one cell" if is_alone else "no rounds were recorded")
    cells = 0 if run.topology is None or not run.metrics else run.topology.cells
    if absent := [str(cell) for cell in range(cells) if cell not in run.metrics]:
        notes.append(f"no metrics of cell {', '.join(absent[:20])}{', ...' if len(absent) > 20 else ''}")
    for cell in run.gone_cells:
        here = "fewer" if run.topology is None else counted(run.topology.cells, "cell")
        notes.append(
            f"cell {cell} has left: the run continued with {here}; its records end at step {run.metrics[cell].step}"
        )
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
