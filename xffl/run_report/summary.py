"""A run in numbers: how far it came, what it ended with, what was best, what its rounds cost."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from xffl.run_report.lines import RoundLine, Series
from xffl.run_report.numbers import bytes_text, number_text, seconds_text
from xffl.run_report.reading import FEDERATION, Run
from xffl.run_report.sections import in_order

__all__ = ["Standing", "Totals", "cell_name", "is_better_high", "standings", "summary", "totals", "value_text"]

HIGH = re.compile(
    r"accuracy|acc|top\d+|f1|auc|auroc|ap|map|precision|recall|specificity|bleu|rouge\w*|iou|dice|jaccard|r2"
)
LOW = re.compile(r"loss|perplexity|ppl|error|err|mae|mse|rmse|wer|cer|nll")
"""Words in the names of values that should be large, and of those that should be small."""
MAX_CELLS = 8
"""Cells whose numbers are told one by one."""


@dataclass(frozen=True)
class Standing:
    """What became of one value in a cell, or over all cells.

    :param name: The value's name.
    :param cell: The cell; :data:`~xffl.run_report.reading.FEDERATION` for all.
    :param records: How often it was recorded.
    :param nonfinite: How many of these are NaN or infinite.
    :param last: The last one.
    :param last_step: Its step.
    :param low: The smallest finite one; NaN where none is.
    :param high: The largest finite one.
    :param best: The one of these two that is better; ``None`` where nobody knows which is.
    :param best_step: The step at which it was reached first.
    """

    name: str
    cell: int
    records: int
    nonfinite: int
    last: float
    last_step: int
    low: float
    high: float
    best: float | None
    best_step: int | None


@dataclass(frozen=True)
class Totals:
    """What a run came to, over all cells.

    :param steps: Optimizer steps of each cell.
    :param epochs: Epoch of each cell, from 0.
    :param samples: Samples over all cells.
    :param seconds: From the start to the last record; ``None`` where nothing was recorded.
    :param rounds: Rounds.
    :param dropped: How often a cell was left out of one.
    :param bytes_across: What all cells sent to others.
    :param bytes_home: What ranks sent to others of their cell.
    :param exposed: Seconds in which training stood still for rounds, mean over cells.
    :param behind: Seconds in which rounds went on behind local steps, mean over cells.
    :param hidden: Seconds in which the slow link was busy while ranks worked on the round, mean over cells.
    :param throughput: Median of each ``throughput/`` value; of samples and tokens the sum over cells, else the mean.
    :param memory: Largest of each ``memory/`` value.
    """

    steps: dict[int, int]
    epochs: dict[int, int]
    samples: int
    seconds: float | None
    rounds: int
    dropped: int
    bytes_across: float
    bytes_home: float
    exposed: float
    behind: float
    hidden: float
    throughput: dict[str, float]
    memory: dict[str, float]


def totals(run: Run) -> Totals:
    """Sum a run up.

    :param run: The run.
    :return: What it came to.
    """
    lines = [one for of_cell in run.rounds.values() for one in of_cell]
    cells = max(1, len(run.rounds))
    # Every cell tells of the same rounds.
    dropped = {one.number: len(one.dropped) for one in lines}
    return Totals(
        steps={cell: progress.step for cell, progress in run.progress.items()},
        epochs={cell: progress.epoch for cell, progress in run.progress.items()},
        samples=sum(progress.samples for progress in run.progress.values()),
        seconds=run.seconds,
        rounds=len({one.number for one in lines if not one.is_skipped}),
        dropped=sum(dropped.values()),
        bytes_across=math.fsum(one.bytes_across for one in lines),
        bytes_home=math.fsum(one.bytes_home for one in lines),
        exposed=math.fsum(one.exposed for one in lines) / cells,
        behind=math.fsum(one.behind for one in lines) / cells,
        hidden=math.fsum(one.hidden for one in lines) / cells,
        throughput=_throughput(run),
        memory={
            name: max(float(finite.max()) for finite in found)
            for name, by_cell in run.series.items()
            if name.startswith("memory/") and (found := _finite(by_cell.values()))
        },
    )


def standings(run: Run, name: str | None = None) -> list[Standing]:
    """Tell what became of each value, all cells together first.

    :param run: The run.
    :param name: The only value to tell of; ``None`` takes all.
    :return: One for each value and cell.
    """
    names = run.series if name is None else {name} & set(run.series)
    return [_standing(one, cell, series) for one in names for cell, series in run.series[one].items()]


def summary(run: Run) -> list[tuple[str, str]]:
    """Tell a run's totals in words.

    :param run: The run.
    :return: What each is called, and its text; a dash where it is not known. The same names for every run, but for
        the kinds of throughput and memory.
    """
    told = totals(run)
    rows = [
        ("ranks and cells", _federation(run)),
        ("steps", _of_cells(told.steps)),
        ("epoch, from 0", _of_cells(told.epochs)),
        ("samples, all cells", number_text(told.samples) if told.steps else "–"),
        ("time", "–" if told.seconds is None else seconds_text(told.seconds)),
    ]
    rows += [(f"last {name}", text) for name, text in _ends(run)]
    if told.rounds:
        left_out = f", {told.dropped} times a cell was left out" if told.dropped else ""
        share = f" ({100 * told.exposed / told.seconds:.1f} % of the time)" if told.seconds else ""
        rows += [
            ("rounds", f"{told.rounds:,}{left_out}"),
            ("sent across cells", bytes_text(told.bytes_across)),
            ("sent at home", bytes_text(told.bytes_home)),
            ("exposed: training stood still for rounds", f"{seconds_text(told.exposed)}{share}"),
            ("hidden behind local steps", seconds_text(told.behind)),
            ("hidden behind a round's own work", seconds_text(told.hidden)),
        ]
    else:
        rows += [("rounds", "none")]
    rows += [(name.partition("/")[2].replace("_", " "), number_text(rate)) for name, rate in told.throughput.items()]
    rows += [
        (f"most {name.partition('/')[2]}".replace("_", " "), value_text(name, most))
        for name, most in told.memory.items()
    ]
    return [*rows, ("checkpoints", _checkpoints(run))]


def value_text(name: str, value: float) -> str:
    """Write a value with the unit that its name tells.

    :param name: Such as ``memory/resident_bytes``.
    :param value: The value.
    :return: Such as ``1.2 GB``.
    """
    if name.endswith("bytes"):
        return bytes_text(value)
    return seconds_text(value) if name.endswith("seconds") else number_text(value)


def is_better_high(name: str) -> bool | None:
    """Tell whether a value should be large.

    :param name: Such as ``val/accuracy``.
    :return: Whether; ``None`` where its name does not tell.
    """
    words = re.split(r"[^a-z0-9]+", name.rpartition("/")[2].lower())
    if any(LOW.fullmatch(word) for word in words):
        return False
    return True if any(HIGH.fullmatch(word) for word in words) else None


def cell_name(cell: int) -> str:
    """Name a cell.

    :param cell: Its number, or :data:`~xffl.run_report.reading.FEDERATION`.
    :return: Such as ``cell 0`` or ``all cells``.
    """
    return "all cells" if cell == FEDERATION else f"cell {cell}"


def _standing(name: str, cell: int, series: Series) -> Standing:
    values = series.values
    places = np.flatnonzero(np.isfinite(values))
    wants_high = is_better_high(name)
    best = best_step = None
    low = high = math.nan
    if len(places):
        finite = values[places]
        low, high = float(finite.min()), float(finite.max())
        if wants_high is not None:
            place = places[int(finite.argmax() if wants_high else finite.argmin())]
            best, best_step = float(values[place]), int(series.steps[place])
    last, last_step = float(values[-1]), int(series.steps[-1])
    return Standing(name, cell, len(values), len(values) - len(places), last, last_step, low, high, best, best_step)


def _throughput(run: Run) -> dict[str, float]:
    found = {}
    for name, by_cell in run.series.items():
        own = [series for cell, series in by_cell.items() if cell != FEDERATION]
        medians = [float(np.median(finite)) for finite in _finite(own or by_cell.values())]
        if name.startswith("throughput/") and medians:
            is_shared_out = "samples" in name or "tokens" in name
            found[name] = math.fsum(medians) if is_shared_out else statistics.fmean(medians)
    return found


def _finite(several: Iterable[Series]) -> list[np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Return the finite values of each that has some."""
    kept = [series.values[np.isfinite(series.values)] for series in several]
    return [values for values in kept if len(values)]


def _ends(run: Run) -> list[tuple[str, str]]:
    """Tell the last and the best of each value whose direction is known: over all cells where that was recorded."""
    rows = []
    for name in in_order(run.series):
        by_cell = run.series[name]
        if is_better_high(name) is None or not name.startswith(("train/", "val/", "test/")):
            continue
        cells = [FEDERATION] if FEDERATION in by_cell else sorted(by_cell)
        texts = []
        for cell in cells[:MAX_CELLS]:
            one = _standing(name, cell, by_cell[cell])
            best = "" if one.best is None else f" (best {number_text(one.best)} at step {one.best_step:,})"
            texts.append((f"{cell_name(cell)} " if len(by_cell) > 1 else "") + f"{number_text(one.last)}{best}")
        rows.append((name, "; ".join(texts) + ("; ..." if len(cells) > MAX_CELLS else "")))
    return rows


def _federation(run: Run) -> str:
    if run.topology is None:
        cells = len(run.progress)
        return f"{cells} cell{'' if cells == 1 else 's'} with metrics" if cells else "–"
    shape = run.topology
    sizes = ", ".join(map(str, shape.sizes[:MAX_CELLS])) + (", ..." if shape.cells > MAX_CELLS else "")
    replicas = "" if shape.replica_size is None else f"; replicas of {shape.replica_size}"
    lack = "; a federation was asked for, and there is none" if run.lacks_federation else ""
    return f"{shape.world_size:,} in {shape.cells:,} cell{'' if shape.cells == 1 else 's'} ({sizes}){replicas}{lack}"


def _of_cells(numbers: dict[int, int]) -> str:
    """Write one number where all cells have the same, else each cell's."""
    if not numbers:
        return "–"
    if len(set(numbers.values())) == 1:
        return f"{next(iter(numbers.values())):,}"
    if len(numbers) > MAX_CELLS:
        return f"{min(numbers.values()):,} to {max(numbers.values()):,}"
    return ", ".join(f"{number:,} (cell {cell})" for cell, number in numbers.items())


def _checkpoints(run: Run) -> str:
    if not run.checkpoints:
        return "none"
    latest = f"; latest {run.latest}" if run.latest else ""
    return f"{len(run.checkpoints)}{', with final' if 'final' in run.checkpoints else ''}{latest}"


def mean_phases(lines: list[RoundLine]) -> dict[str, float]:
    """Return the mean seconds of each phase of rounds.

    :param lines: Rounds of a cell.
    :return: By the phase's name, in the order in which they appear.
    """
    names = dict.fromkeys(name for one in lines for name in one.phases)
    return {name: math.fsum(one.phases.get(name, 0.0) for one in lines) / len(lines) for name in names}
