"""The figures of the page: which there are, in which section, and from which columns of the runs they are drawn.

:data:`ROUND_FIGURES` is the list of figures about rounds. A new one is an entry there: what it shows, from which
columns of the rounds' table (:attr:`xffl.run_report.reader.Run.round_table`), and how.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from xffl.checks import group
from xffl.planning.figures import save, topology_figure
from xffl.planning.partition import partition_figure
from xffl.planning.text import describe_world
from xffl.run_report.elastic import History
from xffl.run_report.figures import (
    bars_figure,
    participation_figure,
    rounds_figure,
    traffic_figure,
    value_figure,
)
from xffl.run_report.pace import find_slowest_cells
from xffl.run_report.reader import Partition, Run
from xffl.run_report.summary import (
    cell_name,
    label_text,
    section_of,
    slowest_text,
    sort_names,
    sum_up_values,
    value_text,
)
from xffl.topology import Topology

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ROUND_FIGURES", "PageFigure", "RoundFigure", "find_figures"]

T = TypeVar("T")

MAX_VALUES = 40
"""Values that have a figure."""
MAX_LISTED, MAX_DESCRIBED = 20, 6


class PageFigure(NamedTuple):
    """A figure of the page; the description is for readers who do not see it."""

    section: str
    title: str
    description: str
    draw: Callable[[], tuple[Callable[[Path], None], str]]
    """Draws it; returns what writes it into a PNG or SVG file, and its caption."""


class RoundFigure(NamedTuple):
    """A figure about the rounds of all runs."""

    title: str
    description: str
    columns: tuple[str, ...]
    """Columns of the rounds' table, or patterns of their names; without any of the last one there is no figure."""
    draw: Callable[[Sequence[Run], Sequence[str]], tuple[Figure, str]]
    """Draws these columns of runs; returns the figure and its caption."""


def _draw_rounds(runs: Sequence[Run], _: Sequence[str]) -> tuple[Figure, str]:
    figure, caption = rounds_figure(runs)
    late = [
        f"Slowest{f' in {run.name}' if len(runs) > 1 else ''}: {slowest_text(run)}."
        for run in runs
        if find_slowest_cells(run) is not None
    ]
    return figure, " ".join([caption, *late])


ROUND_FIGURES = (
    RoundFigure(
        title="rounds",
        description="Bars on a time axis: when each cell trained and when it stood still for a round. The summary has "
        "the sums.",
        columns=("seconds",),
        draw=_draw_rounds,
    ),
    RoundFigure(
        title="phases",
        description="Stacked bars of the mean time of each phase.",
        columns=("phase/*",),
        draw=partial(
            bars_figure,
            reduce=np.mean,
            title="phases of a round",
            x_label="mean time of a round",
            caption="The time that the first rank of each cell spends on a round, as the mean over its rounds. Of "
            "delayed rounds training waits only for pack, commit and wait; the other phases run behind local steps.",
        ),
    ),
    RoundFigure(
        title="seconds by phase",
        description="Stacked bars of each cell's seconds between rounds, and in the phases that kept it from training.",
        columns=("between rounds", "exposed/*"),
        draw=partial(
            bars_figure,
            reduce=np.sum,
            title="seconds of each cell by phase",
            x_label="time up to the last round",
            caption="Where each cell's time has gone up to its last round: between rounds, with local steps, "
            "validations and checkpoints, and in each phase of rounds while training stood still.",
        ),
    ),
    RoundFigure(
        title="traffic",
        description="Line charts of the bytes sent so far between and within cells. The summary has the sums.",
        columns=("bytes_across", "bytes_home"),
        draw=traffic_figure,
    ),
)
"""The figures about rounds, in the order of the page."""


def find_figures(runs: Sequence[Run]) -> tuple[list[PageFigure], list[str]]:
    """Return the figures that the page about these runs has, and notes of what is left out."""
    names = sort_names(name for run in runs for name in run.series)
    notes = []
    if left_out := names[MAX_VALUES:]:
        notes.append(f"{len(left_out)} more values have no figure: {', '.join(left_out[:MAX_LISTED])}")
    figures = [
        *(_of_value(runs, name) for name in names[:MAX_VALUES]),
        *(_of_cells(run.history, _of_run(run, runs)) for run in runs if run.history is not None),
        *(_of_rounds(runs, figure) for figure in ROUND_FIGURES if _has_columns(runs, figure)),
        *(_of_partition(partition, of) for partition, of in _group(runs, lambda run: run.partition)),
        *(_of_topology(topology, of) for topology, of in _group(runs, lambda run: run.topology)),
    ]
    return figures, notes


def _has_columns(runs: Sequence[Run], figure: RoundFigure) -> bool:
    """Tell whether some run has what a figure shows."""
    return any(run.round_table.names(figure.columns[-1]) for run in runs)


def _of_run(run: Run, runs: Sequence[Run]) -> str:
    return f" of {run.name}" if len(runs) > 1 else ""


def _group(runs: Sequence[Run], value_of: Callable[[Run], T | None]) -> list[tuple[T, str]]:
    """Return the different values that runs have, each with the words that name its runs where there are several."""
    groups = group((value, run.name) for run in runs if (value := value_of(run)) is not None)
    return [(value, f" of {', '.join(names)}" if len(runs) > 1 else "") for value, names in groups.items()]


def _of_value(runs: Sequence[Run], name: str) -> PageFigure:
    return PageFigure(
        section=section_of(name),
        title=name,
        description=_describe(name, runs),
        draw=lambda: _saved(*value_figure(runs, name)),
    )


def _of_cells(history: History, of: str) -> PageFigure:
    return PageFigure(
        section="Cells",
        title=f"cells{of}",
        description="A row for each cell, with a block where it contributed to a round. The table has the sums.",
        draw=lambda: _saved(*participation_figure(history, f"who took part in the rounds{of}")),
    )


def _of_rounds(runs: Sequence[Run], figure: RoundFigure) -> PageFigure:
    return PageFigure(
        section="Rounds and traffic",
        title=figure.title,
        description=figure.description,
        draw=lambda: _saved(*figure.draw(runs, figure.columns)),
    )


def _of_partition(partition: Partition, of: str) -> PageFigure:
    samples, classes, cells = sum(map(sum, partition.counts)), len(partition.labels), len(partition.counts)
    paint = partial(
        partition_figure,
        partition.counts,
        classes=[label_text(label) for label in partition.labels],
        title=label_text("Samples of each class" + of.replace(" of ", ": ", 1)),
    )
    return PageFigure(
        section="Data",
        title=f"partition{of}",
        description=f"Heat map of {samples:,} samples of {classes} classes in {cells} cells.",
        draw=lambda: (paint, f"Samples of each class in each cell{of}; the darker a field, the more samples."),
    )


def _of_topology(topology: Topology, of: str) -> PageFigure:
    caption = f"Cells, replicas and shards{of}; outlined ranks send over the slow link."
    return PageFigure(
        section="Topology",
        title=f"topology{of}",
        description=describe_world(topology),
        draw=lambda: (partial(topology_figure, topology), caption),
    )


def _saved(figure: Figure, caption: str) -> tuple[Callable[[Path], None], str]:
    return partial(save, figure), caption


def _describe(name: str, runs: Sequence[Run]) -> str:
    """Describe the figure of a value by the last values of its lines."""
    ends = []
    for run in runs:
        values = sum_up_values(run, name)
        together = [value for value in values if value.cell is None] or values
        at = f"{run.name}, " if len(runs) > 1 else ""
        ends += [f"{at}{cell_name(value.cell)}: {value_text(name, value.last)}" for value in together]
    more = f"; and {len(ends) - MAX_DESCRIBED} more" if len(ends) > MAX_DESCRIBED else ""
    listed = "; ".join(ends[:MAX_DESCRIBED])
    return f"Line charts of {name} against steps and against time. Last values: {listed}{more}."
