"""The JSON lines of a run: curves and rounds, also of a file whose last line a kill has cut off."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Progress", "RoundLine", "Series", "Values", "read_rounds", "read_values"]

FOREGROUND = ("pack", "commit", "wait")
"""Phases of a delayed round in which training stands still; the others go on behind local steps."""


class Series(NamedTuple):
    """One value over a run, in the order of the file.

    :param steps: Optimizer steps.
    :param times: Unix seconds.
    :param values: The values; NaN and infinite ones stay.
    """

    steps: NDArray[np.float64]
    times: NDArray[np.float64]
    values: NDArray[np.float64]


class Progress(NamedTuple):
    """How far a cell has come: its largest step, epoch (from 0) and number of samples."""

    step: int
    epoch: int
    samples: int


@dataclass(frozen=True)
class Values:
    """What a file of metrics holds.

    :param series: By the value's name.
    :param progress: How far it goes; ``None`` without a record.
    :param records: Lines that were read.
    :param times: First and last time; ``None`` without a record.
    :param pause: Longest time between two records.
    """

    series: dict[str, Series] = field(default_factory=dict)
    progress: Progress | None = None
    records: int = 0
    times: tuple[float, float] | None = None
    pause: float = 0.0


@dataclass(frozen=True)
class RoundLine:
    """One round, as the first rank of a cell has told it.

    :param time: Unix seconds at its end.
    :param step: The cell's step.
    :param number: The round's number.
    :param seconds: From the call to the new weights; of a delayed round with the local steps made meanwhile.
    :param hidden: Seconds in which the slow link was busy while the rank worked on the round.
    :param phases: Seconds in each phase.
    :param bytes_across: What the cell sent to others.
    :param bytes_home: What the cell's ranks sent to each other.
    :param dropped: Cells that were left out.
    :param steps: Local steps of each cell since the last round.
    :param update_norms: L2 norm of each cell's update; empty where nobody measures.
    :param is_skipped: Whether the cells' models were so close that nothing moved.
    :param extras: Other numbers: ``codec_error``, and what ``divergence`` holds.
    """

    time: float
    step: int
    number: int
    seconds: float
    hidden: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    bytes_across: float = 0.0
    bytes_home: float = 0.0
    dropped: tuple[int, ...] = ()
    steps: tuple[float, ...] = ()
    update_norms: tuple[float, ...] = ()
    is_skipped: bool = False
    extras: dict[str, float] = field(default_factory=dict)

    @property
    def is_delayed(self) -> bool:
        """Whether it went on behind local steps."""
        return "wait" in self.phases

    @property
    def exposed(self) -> float:
        """Seconds in which training stood still for it."""
        if not self.is_delayed:
            return self.seconds
        return min(self.seconds, sum(self.phases.get(name, 0.0) for name in FOREGROUND))

    @property
    def behind(self) -> float:
        """Seconds in which it went on behind local steps."""
        return self.seconds - self.exposed


def read_values(path: Path, notes: list[str]) -> Values:
    """Read a file of metrics; lines that cannot be read are left out and noted.

    :param path: ``metrics/cell_0.jsonl`` or another of its form.
    :param notes: What is found wrong is added here.
    :return: What it holds.
    """
    times, steps = array("d"), array("d")
    columns: dict[str, tuple[array[int], array[float]]] = {}
    epoch = samples = 0
    for record in _records(path, ("time", "step", "values"), notes):
        row = len(times)
        times.append(record["time"])
        steps.append(record["step"])
        epoch, samples = max(epoch, _whole(record, "epoch")), max(samples, _whole(record, "samples"))
        for name, value in record["values"].items():
            # Nearly all values are floats: these take the short way.
            number = value if type(value) is float else find_number(value)
            if number is not None:
                column = columns.get(name)
                if column is None:
                    column = columns[name] = (array("q"), array("d"))
                column[0].append(row)
                column[1].append(number)
    if not times:
        return Values()
    when, where = _floats(times), _floats(steps)
    series = {
        name: Series(where[rows], when[rows], _floats(numbers))
        for name, (places, numbers) in columns.items()
        for rows in (np.frombuffer(places, dtype=np.int64),)
    }
    pause = float(np.max(np.diff(when))) if len(when) > 1 else 0.0
    progress = Progress(int(where.max()), epoch, samples)
    return Values(series, progress, len(times), (float(when.min()), float(when.max())), pause)


def read_rounds(path: Path, notes: list[str]) -> list[RoundLine]:
    """Read a file of rounds; lines that cannot be read are left out and noted.

    :param path: ``rounds/cell_0.jsonl`` or another of its form.
    :param notes: What is found wrong is added here.
    :return: The rounds, in the order of the file.
    """
    return [_round(record) for record in _records(path, ("time", "step", "round", "seconds"), notes)]


def find_number(value: object) -> float | None:
    """Return what a value of a file means as a number; ``None`` where it is none.

    :param value: A number, or ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``.
    :return: The number.
    """
    if isinstance(value, bool) or not (isinstance(value, (int, float)) or value in ("NaN", "Infinity", "-Infinity")):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if int(value) > 0 else -math.inf


def _records(path: Path, needed: tuple[str, ...], notes: list[str]) -> Iterator[dict[str, Any]]:
    """Give the objects of a file that have what is needed, with finite times, and note what else is there."""
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
            is_last_bad = not _is_whole(record, needed)
            if is_last_bad:
                bad += 1
            else:
                yield record
    if is_last_bad:
        notes.append(f"{name}: the last line is cut off, or being written; it is left out")
        bad -= 1
    if bad:
        notes.append(
            f"{name}: {bad} line{'s' if bad > 1 else ''} cannot be read and {'are' if bad > 1 else 'is'} left out"
        )


def _is_whole(record: object, needed: tuple[str, ...]) -> bool:
    if not isinstance(record, dict):
        return False
    for key in needed:
        value = record.get(key)
        if key == "values":
            if not isinstance(value, dict):
                return False
        elif not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < 1e15:
            return False
    return True


def _round(record: dict[str, Any]) -> RoundLine:
    divergence = record.get("divergence")
    extras = {f"divergence/{name}": value for name, value in _numbers(divergence).items()}
    if (error := find_number(record.get("codec_error"))) is not None:
        extras["codec_error"] = error
    return RoundLine(
        time=float(record["time"]),
        step=int(record["step"]),
        number=int(record["round"]),
        seconds=max(0.0, float(record["seconds"])),
        hidden=_amount(record.get("hidden")),
        phases={name: _amount(value) for name, value in _numbers(record.get("phases")).items()},
        bytes_across=_amount(record.get("bytes_across")),
        bytes_home=_amount(record.get("bytes_home")),
        dropped=tuple(int(cell) for cell in _list(record.get("dropped")) if math.isfinite(cell)),
        steps=tuple(_list(record.get("steps"))),
        update_norms=tuple(_list(record.get("update_norms"))),
        is_skipped=record.get("is_skipped") is True,
        extras=extras,
    )


def _numbers(given: object) -> dict[str, float]:
    """Return the numbers of a mapping."""
    if not isinstance(given, dict):
        return {}
    found = ((name, find_number(value)) for name, value in given.items())
    return {name: value for name, value in found if value is not None}


def _list(given: object) -> list[float]:
    """Return a list's numbers, NaN for what is none, so that each cell keeps its place."""
    if not isinstance(given, list):
        return []
    found = (find_number(value) for value in given)
    return [math.nan if value is None else value for value in found]


def _amount(given: object) -> float:
    """Return what cannot be negative; 0 where it is missing."""
    value = find_number(given)
    return value if value is not None and 0 <= value < math.inf else 0.0


def _whole(record: dict[str, Any], key: str) -> int:
    value = record.get(key)
    if type(value) is int:
        return value
    number = find_number(value)
    return int(number) if number is not None and math.isfinite(number) else 0


def _floats(numbers: array[float]) -> NDArray[np.float64]:
    return np.frombuffer(numbers, dtype=np.float64)
