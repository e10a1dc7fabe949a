"""Summary of a run in numbers and texts: progress, last and best values, costs of rounds, configuration."""

from __future__ import annotations

import json
import math
import re
import shlex
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xffl.planning.text import bytes_text, counted
from xffl.run_report.pace import find_slowest_cells
from xffl.run_report.reader import Run, Series

__all__ = [
    "SECTIONS",
    "cell_name",
    "cell_table",
    "environment_tables",
    "label_text",
    "number_text",
    "printable",
    "read_settings",
    "seconds_text",
    "section_of",
    "slowest_text",
    "sort_names",
    "stem_of",
    "sum_up_values",
    "summary_rows",
    "value_rows",
    "value_text",
]

SECTIONS = {
    "Cells": (),
    "Training": ("train/",),
    "Validation": ("val/", "test/"),
    "Rounds and traffic": (),
    "Throughput": ("throughput/",),
    "Memory": ("memory/",),
    "Drift and norms": ("drift/", "norms/", "rounds/"),
    "Other values": ("",),
    "Data": (),
    "Topology": (),
}
"""Sections with figures in order, and the beginnings of the names of the values that belong there."""
FIRST = ("train/loss", "val/loss", "val/accuracy", "val/perplexity", "train/learning_rate")
"""Values that stand before others of their section."""
HIGH = re.compile(
    r"accuracy|acc|top[0-9]+|f1|auc|auroc|ap|map|precision|recall|specificity|bleu|rouge\w*|iou|dice|jaccard|r2"
)
LOW = re.compile(r"loss|perplexity|ppl|error|err|mae|mse|rmse|wer|cer|nll")
"""Words in the names of values that should be large, and of those that should be small."""
MAX_CELLS = 8
"""Cells whose numbers are written one by one."""
MAX_CELL_VALUES = 4
"""Values in the table of an elastic run's cells."""
MAX_TEXT = 2000
"""Letters of a configuration value."""
MAX_LABEL = 44
"""Letters of a name in a figure; of longer ones the middle is left out."""
MINUTE, HOUR, DAY = 60, 3600, 86400


def number_text(value: float) -> str:
    """Write a number with four digits, or whole with commas: ``0.1234``, ``1,234,567`` or ``3.2e-05``."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "infinity" if value > 0 else "-infinity"
    size = abs(value)
    if value == int(value) and size < 1e15:
        return f"{int(value):,}"
    if size >= 1e15 or size < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.0f}" if size >= 1e4 else f"{value:.4g}"


def seconds_text(seconds: float) -> str:
    """Write a duration in one or two units: ``350 ms``, ``12.3 s``, ``5 min 20 s`` or ``2 h 5 min``."""
    if not math.isfinite(seconds):
        return number_text(seconds)
    size = abs(seconds)
    if size == 0:
        return "0 s"
    # From these limits on, three digits would be rounded up to the next unit.
    if size < 0.9995e-3:
        return f"{1e6 * seconds:.3g} µs"
    if size < 0.9995:
        return f"{1e3 * seconds:.3g} ms"
    if size < MINUTE - 0.05:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    for large, small, names in ((DAY, HOUR, ("d", "h")), (HOUR, MINUTE, ("h", "min")), (MINUTE, 1, ("min", "s"))):
        if abs(whole) >= large:
            first, rest = divmod(round(whole / small), large // small)
            return f"{first:,} {names[0]}" + (f" {rest} {names[1]}" if rest else "")
    return f"{whole} s"


def value_text(name: str, value: float) -> str:
    """Write a value with the unit that its name implies."""
    if name.endswith("bytes"):
        return bytes_text(value)
    return seconds_text(value) if name.endswith("seconds") else number_text(value)


def printable(text: object) -> str:
    """Replace what may stand in no page and no figure: control characters, and halves of characters."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in str(text)
    )


def stem_of(name: str, taken: set[str]) -> str:
    """Return a file name for a figure, such as ``train_loss``, and add it in small letters to those that are taken."""
    base = re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("._")[:80] or "picture"
    stem, number = base, 1
    while stem.lower() in taken:
        number += 1
        stem = f"{base}_{number}"
    taken.add(stem.lower())
    return stem


def label_text(text: object) -> str:
    """Make a name fit for a figure: one line, not too long, without matplotlib's formulas and hidden labels."""
    line = " ".join(printable(text).split())
    if len(line) > MAX_LABEL:
        half = (MAX_LABEL - 1) // 2
        line = f"{line[:half]}…{line[-half:]}"
    # Labels with a leading underscore stay out of legends; dollars would begin a formula, and a backslash before one
    # would undo its escape.
    line = line.replace("\\$", "\\ $").replace("$", r"\$")
    return f" {line}" if line.startswith("_") else line or "(no name)"


def section_of(name: str) -> str:
    """Return the section that a value belongs to."""
    return next(section for section, starts in SECTIONS.items() if starts and name.startswith(starts))


def sort_names(names: Iterable[str]) -> list[str]:
    """Sort the names of values, each once: by section, the usual ones first, then by name."""
    sections = {section: index for index, section in enumerate(SECTIONS)}
    places = {name: index for index, name in enumerate(FIRST)}
    return sorted(set(names), key=lambda name: (sections[section_of(name)], places.get(name, len(FIRST)), name))


def is_better_high(name: str) -> bool | None:
    """Return whether a value should be large; ``None`` where its name does not say."""
    words = re.split(r"[^a-z0-9]+", name.rpartition("/")[2].lower())
    if any(LOW.fullmatch(word) for word in words):
        return False
    return True if any(HIGH.fullmatch(word) for word in words) else None


def cell_name(cell: int | None) -> str:
    """Name a cell, or all cells together."""
    return "all cells" if cell is None else f"cell {cell}"


@dataclass(frozen=True)
class ValueSummary:
    """One value in a cell, or over all cells.

    ``low`` and ``high`` are finite, NaN where nothing is; ``best`` is one of them, with the first step that reached it,
    and ``None`` where the name does not say which is better.
    """

    name: str
    cell: int | None  # None: all cells together
    records: int
    nonfinite: int
    last: float
    last_step: int
    low: float
    high: float
    best: float | None
    best_step: int | None


def sum_up_values(run: Run, name: str | None = None) -> list[ValueSummary]:
    """Sum up each value, or one, in each cell, all cells together first."""
    names = run.series if name is None else {name} & set(run.series)
    return [
        _sum_up_series(value_name, cell, series)
        for value_name in names
        for cell, series in run.series[value_name].items()
    ]


def _sum_up_series(name: str, cell: int | None, series: Series) -> ValueSummary:
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
    return ValueSummary(
        name,
        cell=cell,
        records=len(values),
        nonfinite=len(values) - len(places),
        last=last,
        last_step=last_step,
        low=low,
        high=high,
        best=best,
        best_step=best_step,
    )


def _finite(several: Iterable[Series]) -> list[NDArray[np.float64]]:
    """Return the finite values of each series that has some."""
    finite = [series.values[np.isfinite(series.values)] for series in several]
    return [values for values in finite if len(values)]


def summary_rows(run: Run) -> list[tuple[str, str]]:
    """Return the rows of the summary, names and texts; all runs have the same, but for throughput and memory.

    Seconds in which training stood still for rounds, in which rounds ran behind local steps, and in which the slow link
    was busy while ranks worked on the round are means over the cells.
    """
    metrics, records = run.cell_metrics, [record for of_cell in run.rounds.values() for record in of_cell]
    samples = sum(one.samples for one in metrics.values())
    living = {cell: one for cell, one in metrics.items() if cell not in run.gone_cells}
    rows = [
        ("ranks and cells", _federation_text(run)),
        ("steps", _by_cell_text({cell: one.step for cell, one in living.items()})),
        ("epoch, from 0", _by_cell_text({cell: one.epoch for cell, one in living.items()})),
        ("samples, all cells", number_text(samples) if metrics else "–"),
        ("time", "–" if run.seconds is None else seconds_text(run.seconds)),
    ]
    for name in sort_names(run.series):
        if is_better_high(name) is not None and name.startswith(("train/", "val/", "test/")):
            rows.append((f"last {name}", _last_text(name, _of_living(run, run.series[name]))))
    if rounds := len({record.number for record in records if not record.is_skipped}):
        # Every cell records the same rounds.
        dropped = sum({record.number: len(record.dropped) for record in records}.values())
        exposed = _mean_over_cells(run, "exposed")
        behind = _mean_over_cells(run, "behind")
        hidden = _mean_over_cells(run, "hidden")
        share = f" ({100 * exposed / run.seconds:.1f} % of the time)" if run.seconds else ""
        rows += [
            ("rounds", f"{rounds:,}{f', {dropped} times a cell was left out' if dropped else ''}"),
            *_elastic_rows(run),
            ("sent between cells", bytes_text(math.fsum(run.round_table["bytes_across"]))),
            ("sent within cells", bytes_text(math.fsum(run.round_table["bytes_home"]))),
            ("exposed: training stood still for rounds", f"{seconds_text(exposed)}{share}"),
            ("hidden behind local steps", seconds_text(behind)),
            ("hidden behind a round's own work", seconds_text(hidden)),
            ("slowest cell", slowest_text(run)),
        ]
    else:
        rows += [("rounds", "none")]
    rows += _rate_rows(run)
    finals = sum(name.rpartition("/")[2] == "final" for name in run.checkpoints)
    final = ", with final" if finals == max(1, len(run.parts)) else f", {finals} of them final" if finals else ""
    latest = f"; latest {run.latest}" if run.latest else ""
    return [*rows, ("checkpoints", f"{len(run.checkpoints)}{final}{latest}" if run.checkpoints else "none")]


def _of_living(run: Run, by_cell: dict[int | None, Series]) -> dict[int | None, Series]:
    """Leave out cells that are no more, unless there are no others."""
    return {cell: series for cell, series in by_cell.items() if cell not in run.gone_cells} or by_cell


def _mean_over_cells(run: Run, column: str) -> float:
    """Return the sum of a column of the rounds' table over all rounds, of each the mean over the cells in it."""
    table = run.round_table
    has_all = len({len(records) for records in run.rounds.values()}) == 1
    if has_all or run.history is not None:
        return math.fsum(table[column]) / len(run.rounds)
    _, places, recorded = np.unique(table["number"], return_inverse=True, return_counts=True)
    return math.fsum(table[column] / recorded[places])


def slowest_text(run: Run) -> str:
    """Name the cell that the others wait for, and for how long; say so where no cell is late beyond noise."""
    slowest = find_slowest_cells(run)
    if slowest is None:
        return "none: no cell comes later than the others beyond noise" if len(run.rounds) > 1 else "–"
    names = [cell_name(cell) for cell in slowest.cells[:MAX_CELLS]]
    named = ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else names[0]
    share = f"{100 * slowest.share:.1f} % of the time between rounds"
    more = ", ..." * (len(slowest.cells) > MAX_CELLS)
    return f"{named}{more}: others wait {seconds_text(slowest.waited)} a round ({share})"


def _rate_rows(run: Run) -> list[tuple[str, str]]:
    """Return the rows of throughput, of samples and tokens the sum of cells' medians, else the mean, and of memory."""
    throughput, memory = [], []
    for name, by_cell in run.series.items():
        shown = name.partition("/")[2].replace("_", " ")
        if name.startswith("throughput/"):
            of_cells = [series for cell, series in _of_living(run, by_cell).items() if cell is not None]
            if medians := [float(np.median(values)) for values in _finite(of_cells or by_cell.values())]:
                is_additive = "samples" in name or "tokens" in name
                rate = math.fsum(medians) if is_additive else statistics.fmean(medians)
                throughput.append((shown, number_text(rate)))
        elif name.startswith("memory/") and (finite := _finite(by_cell.values())):
            memory.append((f"most {shown}", value_text(name, max(float(values.max()) for values in finite))))
    return throughput + memory


def _elastic_rows(run: Run) -> list[tuple[str, str]]:
    """Return the rows of the summary that only an elastic run has: who took part, and what counted."""
    history = run.history
    if history is None:
        return []
    cells = [history.totals(cell) for cell in range(history.cells)]
    mean = sum(cell.contributed for cell in cells) / len(history.rounds)
    restarted = [f"{totals.restarts:,} (cell {cell})" for cell, totals in enumerate(cells) if totals.restarts]
    restarts = (", ".join(restarted[:MAX_CELLS]) or "none") + (", ..." if len(restarted) > MAX_CELLS else "")
    if all(totals.restarts is None for totals in cells):
        restarts = "not recorded"
    rows = [
        ("epochs, each of rounds by the same cells", f"{len(history.epochs):,}"),
        ("tries of rounds that were repeated", f"{history.repeated:,}"),
        ("cells that contribute to a round", f"{number_text(mean)} of {history.cells} in the mean"),
        ("restarts", restarts),
        ("steps that count in rounds", number_text(math.fsum(cell.steps for cell in cells))),
    ]
    if _counts_samples(run):
        rows.append(("samples that count in rounds", number_text(math.fsum(cell.weight for cell in cells))))
    return rows


def _counts_samples(run: Run) -> bool:
    """Tell whether the weights of rounds are samples."""
    return run.configuration.get("federation.weight") == "samples"


def cell_table(run: Run) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table of an elastic run's cells; without any for other runs."""
    history = run.history
    if history is None:
        return [], []
    is_weighed = _counts_samples(run)
    names = [name for name in sort_names(run.series) if name.startswith(("train/", "val/", "test/"))]
    names = [name for name in names if is_better_high(name) is not None][:MAX_CELL_VALUES]
    heads = ["", "contributed", "weight 0", "missed", "last round", "restarts", "steps counted"]
    heads += [*(["samples counted"] if is_weighed else []), "steps", "samples"]
    rows = []
    for cell in range(history.cells):
        totals, metrics = history.totals(cell), run.metrics.get(cell)
        row = [cell_name(cell), *(f"{number:,}" for number in (totals.contributed, totals.idle, totals.missed))]
        row += ["–" if number is None else f"{number:,}" for number in (totals.last, totals.restarts)]
        row += [number_text(totals.steps), *([number_text(totals.weight)] if is_weighed else [])]
        row += ["–", "–"] if metrics is None else [f"{metrics.step:,}", f"{metrics.samples:,}"]
        series = [run.series[name].get(cell) for name in names]
        rows.append(
            [*row, *("–" if of_value is None else number_text(float(of_value.values[-1])) for of_value in series)]
        )
    return [*heads, *names], rows


def _last_text(name: str, by_cell: dict[int | None, Series]) -> str:
    """Write the last and the best value: over all cells where that was recorded, else of each cell."""
    cells = [None] if None in by_cell else sorted(cell for cell in by_cell if cell is not None)
    texts = []
    for cell in cells[:MAX_CELLS]:
        value = _sum_up_series(name, cell, by_cell[cell])
        best = "" if value.best is None else f" (best {number_text(value.best)} at step {value.best_step:,})"
        texts.append((f"{cell_name(cell)} " if len(by_cell) > 1 else "") + f"{number_text(value.last)}{best}")
    return "; ".join(texts) + ("; ..." if len(cells) > MAX_CELLS else "")


def _federation_text(run: Run) -> str:
    shape = run.topology
    if shape is None:
        return f"{counted(len(run.cell_metrics), 'cell')} with metrics" if run.cell_metrics else "–"
    sizes = ", ".join(map(str, shape.sizes[:MAX_CELLS])) + (", ..." if shape.cells > MAX_CELLS else "")
    replicas = "" if shape.replica_size is None else f"; replicas of {shape.replica_size}"
    lack = "; a federation was asked for, and there is none" if run.lacks_federation else ""
    return f"{shape.world_size:,} in {shape.cells:,} cell{'' if shape.cells == 1 else 's'} ({sizes}){replicas}{lack}"


def _by_cell_text(numbers: dict[int, int]) -> str:
    """Write one number where all cells have the same, else each cell's."""
    if not numbers:
        return "–"
    if len(set(numbers.values())) == 1:
        return f"{next(iter(numbers.values())):,}"
    if len(numbers) > MAX_CELLS:
        return f"{min(numbers.values()):,} to {max(numbers.values()):,}"
    return ", ".join(f"{number:,} (cell {cell})" for cell, number in numbers.items())


def value_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Return the rows of the table of values: name, run (of several), cell, and eight columns of numbers."""
    rows = []
    for run in runs:
        for value in sum_up_values(run):
            arrow = {None: "", True: " ↑", False: " ↓"}[is_better_high(value.name)]
            numbers = [value_text(value.name, value.last), f"{value.last_step:,}"]
            numbers.append("–" if value.best is None else value_text(value.name, value.best) + arrow)
            numbers.append("–" if value.best_step is None else f"{value.best_step:,}")
            numbers += [value_text(value.name, value.low), value_text(value.name, value.high), f"{value.records:,}"]
            numbers.append(f"{value.nonfinite:,}" if value.nonfinite else "")
            run_name = [run.name] if len(runs) > 1 else []
            rows.append([value.name, *run_name, cell_name(value.cell), *numbers])
    order = {name: index for index, name in enumerate(sort_names(row[0] for row in rows))}
    return sorted(rows, key=lambda row: order[row[0]])


class Setting(NamedTuple):
    """A value of the configuration in every run: texts and origins are empty where a run has none."""

    name: str
    texts: tuple[str, ...]
    origins: tuple[str, ...]
    differs: bool

    @property
    def row(self) -> list[str]:
        """The row of the page's table: of one run value and origin, of several each value with its origin."""
        if len(self.texts) == 1:
            return [self.name, self.texts[0], self.origins[0] or "–"]
        pairs = zip(self.texts, self.origins, strict=True)
        cells = [f"{text} ({origin})" if origin else text or "–" for text, origin in pairs]
        return [f"≠ {self.name}" if self.differs else self.name, *cells]


def read_settings(runs: Sequence[Run]) -> list[Setting]:
    """Compare the configurations of runs value by value, in the order of the files."""
    settings = []
    for name in dict.fromkeys(name for run in runs for name in run.configuration):
        having = [name in run.configuration for run in runs]
        texts = [_setting_text(run.configuration[name]) if has else "" for run, has in zip(runs, having, strict=True)]
        origins = [_origin_of(run, name) if has else "" for run, has in zip(runs, having, strict=True)]
        # A run without any configuration differs in nothing: it is not known.
        known = {(text, has) for text, has, run in zip(texts, having, runs, strict=True) if run.configuration}
        settings.append(Setting(name, tuple(texts), tuple(origins), len(known) > 1))
    return settings


def _origin_of(run: Run, name: str) -> str:
    """Return the origin of a value, else that of the nearest mapping around it."""
    while name and name not in run.origins:
        name = name.rpartition(".")[0]
    return run.origins.get(name, "") if name else ""


def _setting_text(value: Any) -> str:
    """Write a value as it would stand in a file; of a very long one the beginning."""
    if isinstance(value, str):
        text = value if value else '""'
    elif value is None or isinstance(value, (bool, int, float)):
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    else:
        try:
            text = json.dumps(value, default=str, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            # Keys of other types, or lists that hold themselves.
            text = str(value)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text):,} letters)"


def environment_tables(run: Run) -> tuple[list[list[str]], list[tuple[list[str], list[list[str]]]], str]:
    """Return the environment: its rows, heads and rows of the tables of hosts and runtimes, packages in a line."""
    rows = [
        [str(name), _environment_text(name, value)]
        for name, value in run.environment.items()
        if name not in ("packages", "hosts", "runtimes") and value is not None
    ]
    tables = []
    for name in ("hosts", "runtimes"):
        listed = run.environment.get(name)
        entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
        if entries:
            heads = list(dict.fromkeys(str(key) for entry in entries for key in entry))
            cells = [[_environment_text(key, entry.get(key, "–")) for key in heads] for entry in entries]
            tables.append((heads, cells))
    packages = run.environment.get("packages")
    named = packages.items() if isinstance(packages, dict) else ()
    return rows, tables, ", ".join(f"{name} {version}" for name, version in named)


def _environment_text(name: str, value: Any) -> str:
    if name == "command" and isinstance(value, list):
        return shlex.join(str(word) for word in value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return number_text(value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
