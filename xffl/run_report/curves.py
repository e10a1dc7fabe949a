"""Curves of runs: one value against steps and against time, of each cell and of all, thinned where they are long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xffl.planning.drawing import INK, MUTED, PALETTE, new_figure
from xffl.run_report.lines import Series
from xffl.run_report.numbers import label_text, number_text
from xffl.run_report.reading import FEDERATION, Run
from xffl.run_report.summary import cell_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "Line",
    "Look",
    "Panel",
    "Stretches",
    "curves_caption",
    "curves_of",
    "draw_panels",
    "every_kth",
    "looks_of",
    "plain_axes",
    "run_style",
    "thinned",
    "tick_text",
    "time_unit",
]

STYLES = ("-", "--", "-.", ":")
WIDTH, HEIGHT, LEGEND_ROW = 9.6, 3.0, 0.2
"""Inches."""
POINTS, POINTS_MAX, POINTS_MIN = 2500, 250, 50
"""Points of a panel, and of a line at most and at least."""
MAX_CELLS = 32
"""Cells of a run that are drawn."""
FEW = 30
"""Points that are marked one by one."""
CROSSES = 50
GRID = "#E1E5EA"
LOG_RANGE = 100
"""From how much between the smallest and the largest value on the axis is logarithmic."""


class Look(NamedTuple):
    """How a line is drawn.

    :param label: Its name in the legend; lines of one label are told once.
    :param colour: As ``#RRGGBB``.
    :param style: Of matplotlib.
    :param width: In points.
    :param alpha: 1 is opaque.
    """

    label: str
    colour: str
    style: str = "-"
    width: float = 1.4
    alpha: float = 1.0


class Line(NamedTuple):
    """One line of a picture.

    :param look: How it is drawn.
    :param series: The points.
    :param start: Unix seconds at which its time begins.
    :param is_stairs: Whether the value stays until the next point.
    """

    look: Look
    series: Series
    start: float
    is_stairs: bool = False


class Panel(NamedTuple):
    """One panel of a picture.

    :param lines: What it shows.
    :param x: ``step`` or ``time``.
    :param label: What stands at the y axis.
    :param is_bytes: Whether the values are bytes.
    """

    lines: Sequence[Line]
    x: str
    label: str
    is_bytes: bool = False


def run_style(index: int) -> tuple[str, str]:
    """Return the colour and the line style of one of several runs.

    :param index: Its place.
    :return: Colour and style; both repeat only after all pairs.
    """
    return PALETTE[index % len(PALETTE)], STYLES[index // len(PALETTE) % len(STYLES)]


def curves_of(runs: Sequence[Run], name: str) -> list[Line]:
    """Choose the lines that show a value: of one run its cells, of several a colour for each run.

    :param runs: The runs; those that lack the value are left out.
    :param name: The value's name.
    :return: The lines, those of all cells together last, so that they lie above.
    """
    lines = []
    for index, run in enumerate(runs):
        by_cell = run.series.get(name)
        if by_cell is None or run.started is None:
            continue
        cells = [cell for cell in sorted(by_cell) if cell != FEDERATION]
        shown = cells[:: -(-len(cells) // MAX_CELLS)] if cells else []
        looks = looks_of(runs, index, shown, has_all=FEDERATION in by_cell)
        for cell in [*shown, *([FEDERATION] if FEDERATION in by_cell else [])]:
            lines.append(Line(looks[cell], by_cell[cell], run.started))
    return sorted(lines, key=lambda line: line.look.width)


def looks_of(runs: Sequence[Run], index: int, cells: Sequence[int], *, has_all: bool) -> dict[int, Look]:
    """Choose how a run's cells are drawn: a single run's in a colour each, one of several in the colour of the run.

    :param runs: All runs.
    :param index: Which of them.
    :param cells: Its cells.
    :param has_all: Whether there is a line of all cells together, behind which single ones stand back.
    :return: For each cell and for all together.
    """
    if len(runs) > 1:
        colour, style = run_style(index)
        cell_look = Look(runs[index].name, colour, style, 0.8 if has_all else 1.3, 0.4 if has_all else 0.9)
        return {**dict.fromkeys(cells, cell_look), FEDERATION: Look(runs[index].name, colour, style, 2.0)}
    if len(cells) <= len(PALETTE):
        found = {cell: Look(cell_name(cell), colour) for cell, colour in zip(cells, PALETTE, strict=False)}
    else:
        found = dict.fromkeys(cells, Look("single cells", MUTED, width=0.8, alpha=0.5))
    return {**found, FEDERATION: Look(cell_name(FEDERATION), INK, STYLES[1] if cells else "-", 2.0)}


def draw_panels(title: str, panels: Sequence[Panel], *, share_y: bool) -> tuple[Figure, int]:
    """Draw lines into panels side by side, with one legend.

    :param title: What is shown.
    :param panels: The panels.
    :param share_y: Whether they have the same y axis.
    :return: The figure, and the largest number of records that a drawn point stands for (1: nothing is left out).
    :raises ConfigError: if matplotlib is missing.
    """
    labels = list(dict.fromkeys(line.look.label for panel in panels for line in panel.lines))
    columns = max(1, min(4, len(labels)))
    rows = -(-len(labels) // columns) if len(labels) > 1 else 0
    height = HEIGHT + LEGEND_ROW * rows
    figure = new_figure(WIDTH, height)
    all_axes = figure.subplots(1, len(panels), squeeze=False, sharey=share_y)[0]
    thinning = 1
    handles: dict[str, Any] = {}
    for axes, panel in zip(all_axes, panels, strict=True):
        thinning = max(thinning, _draw_panel(axes, panel, handles))
        if axes is all_axes[0] or not share_y:
            axes.set_ylabel(label_text(panel.label), color=INK)
    figure.text(0.012, 1 - 0.19 / height, label_text(title), fontsize=11, fontweight="bold", color=INK, va="center")
    if rows:
        shown = [label_text(label) for label in labels]
        figure.legend(
            [handles[label] for label in labels], shown, loc="lower center", ncols=columns, frameon=False, fontsize=9
        )
    bottom = 0.5 + LEGEND_ROW * rows + (0.04 if rows else 0.0)
    wspace = 0.06 if share_y else 0.26
    figure.subplots_adjust(left=0.085, right=0.985, top=1 - 0.42 / height, bottom=bottom / height, wspace=wspace)
    return figure, thinning


def _draw_panel(axes: Axes, panel: Panel, handles: dict[str, Any]) -> int:
    from matplotlib.ticker import MaxNLocator

    limit = min(POINTS_MAX, max(POINTS_MIN, POINTS // max(1, len(panel.lines))))
    longest = max((float(line.series.times[-1]) - line.start for line in panel.lines), default=0.0)
    unit, scale = time_unit(longest)
    thinning, low, high = 1, np.inf, -np.inf
    for line in panel.lines:
        x = line.series.steps if panel.x == "step" else (line.series.times - line.start) / scale
        points = (every_kth if line.is_stairs else thinned)(x, line.series.values, limit)
        thinning = max(thinning, points.length)
        (drawn,) = axes.plot(
            points.x,
            points.mean,
            color=line.look.colour,
            linestyle=line.look.style,
            linewidth=line.look.width,
            alpha=line.look.alpha,
            marker="o" if len(points.x) <= FEW and not line.is_stairs else None,
            markersize=3.5,
            drawstyle="steps-post" if line.is_stairs else "default",
        )
        if points.length > 1 and not line.is_stairs:
            band = axes.fill_between(points.x, points.low, points.high, color=line.look.colour, linewidth=0)
            band.set_alpha(0.2 * line.look.alpha)
        if line.look.label not in handles or line.look.width > handles[line.look.label].get_linewidth():
            handles[line.look.label] = drawn
        _mark_nonfinite(axes, x[~np.isfinite(line.series.values)], line.look.colour)
        if np.isfinite(points.mean).any():
            low, high = min(low, float(np.nanmin(points.low))), max(high, float(np.nanmax(points.high)))
    axes.set_xlabel("optimizer step" if panel.x == "step" else f"time since the start ({unit})", color=INK)
    if low > 0 and high > LOG_RANGE * low:
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=panel.x == "step"))
    axes.xaxis.set_major_formatter(tick_text)
    plain_axes(axes, panel.is_bytes)
    return thinning


def _mark_nonfinite(axes: Axes, x: NDArray[np.float64], colour: str) -> None:
    """Set crosses onto the lower edge where values are not finite."""
    if len(x):
        kept = x[:: -(-len(x) // CROSSES)]
        edge = axes.get_xaxis_transform()
        axes.plot(kept, [0.03] * len(kept), "x", color=colour, markersize=5, transform=edge, clip_on=False)


class Stretches(NamedTuple):
    """A long line, a point for each stretch of it.

    :param x: Mean place of each.
    :param mean: Mean of its finite values; NaN where it has none.
    :param low: The smallest of them.
    :param high: The largest.
    :param length: Most records of a stretch; 1 where nothing is left out.
    """

    x: NDArray[np.float64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    length: int


def thinned(x: NDArray[np.float64], values: NDArray[np.float64], limit: int) -> Stretches:
    """Sum a long line up in stretches of equally many records, so that its outline stays.

    :param x: Places in order.
    :param values: The values; those that are not finite count for nothing.
    :param limit: Most stretches; a line of no more records stays as it is.
    :return: The stretches.
    """
    finite = np.isfinite(values)
    count = len(values)
    if count <= limit:
        kept = np.where(finite, values, np.nan)
        return Stretches(x, kept, kept, kept, 1)
    edges = np.linspace(0, count, limit + 1).astype(np.int64)
    starts = edges[:-1]
    numbers = np.add.reduceat(finite.astype(np.float64), starts)
    numbers[numbers == 0] = np.nan
    means = np.add.reduceat(np.where(finite, values, 0.0), starts) / numbers
    low = np.minimum.reduceat(np.where(finite, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, values, -np.inf), starts)
    is_empty = np.isnan(numbers)
    low[is_empty] = high[is_empty] = np.nan
    lengths = np.diff(edges)
    return Stretches(np.add.reduceat(x, starts) / lengths, means, low, high, int(lengths.max()))


def every_kth(x: NDArray[np.float64], values: NDArray[np.float64], limit: int) -> Stretches:
    """Leave out all but some records of a line of stairs; the last one stays.

    :param x: Places in order.
    :param values: The values.
    :param limit: About how many stay.
    :return: The records that stay.
    """
    step = max(1, -(-len(values) // limit))
    kept = np.unique(np.append(np.arange(0, len(values), step), len(values) - 1))
    return Stretches(x[kept], values[kept], values[kept], values[kept], step)


def time_unit(seconds: float) -> tuple[str, float]:
    """Choose the unit of a time axis.

    :param seconds: The longest time.
    :return: The unit, and its seconds.
    """
    if seconds < 180:
        return ("s", 1.0) if seconds >= 0.5 else ("ms", 1e-3)
    return ("min", 60.0) if seconds < 3 * 3600 else ("h", 3600.0)


def curves_caption(name: str, runs: Sequence[Run], thinning: int) -> str:
    """Say what a picture of a value shows, and what it leaves out.

    :param name: The value's name.
    :param runs: The runs.
    :param thinning: What :func:`draw_panels` has returned.
    :return: Sentences.
    """
    has_all = any(FEDERATION in run.series.get(name, {}) for run in runs)
    has_cells = any(set(run.series.get(name, {})) - {FEDERATION} for run in runs)
    if len(runs) == 1:
        what = "each cell" * has_cells + " and " * (has_all and has_cells) + "all cells together" * has_all
    else:
        what = "each run" + (": thick for all cells together, thin for each cell" if has_all and has_cells else "")
    told = [f"{name} of {what}, against optimizer steps (left) and wall-clock time (right)."]
    for run in runs:
        by_cell = run.series.get(name)
        at = f" of {run.name}" if len(runs) > 1 else ""
        if by_cell is None:
            told.append(f"{run.name} has not recorded it.")
            continue
        cells = len([cell for cell in by_cell if cell != FEDERATION])
        if cells > MAX_CELLS:
            told.append(f"Every {-(-cells // MAX_CELLS)}th of the {cells} cells{at} is drawn.")
        if cells > 1 and all(_is_same(by_cell, cell) for cell in by_cell if cell != FEDERATION):
            told.append(f"All cells{at} have the same values: their lines lie on each other.")
        bad = sum(int((~np.isfinite(series.values)).sum()) for series in by_cell.values())
        if bad:
            told.append(f"{bad:,} value{'s' if bad > 1 else ''}{at} not finite: crosses on the axis mark where.")
    if thinning > 1:
        told.append(
            f"Long lines are thinned: each point is the mean of up to {thinning:,} records, in a band from their "
            "smallest to their largest."
        )
    return " ".join(told)


def _is_same(by_cell: Mapping[int, Series], cell: int) -> bool:
    """Tell whether a cell has the values of the first cell."""
    first = by_cell[min(other for other in by_cell if other != FEDERATION)]
    return np.array_equal(first.steps, by_cell[cell].steps) and np.array_equal(first.values, by_cell[cell].values, True)


def plain_axes(axes: Axes, is_bytes: bool = False) -> None:
    """Give axes the look of the house: a light grid, few lines.

    :param axes: The axes.
    :param is_bytes: Whether y counts bytes.
    """
    from matplotlib.ticker import EngFormatter, NullFormatter

    axes.yaxis.set_major_formatter(EngFormatter("B") if is_bytes else tick_text)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=MUTED, length=0, labelsize=9)
    axes.margins(x=0.02)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#B4BCC5")


def tick_text(value: float, _: float | None = None) -> str:
    """Write a number at an axis, without what binary fractions leave behind: 0.30000000000000004 is 0.3.

    :param value: The number.
    :return: Such as ``0.3`` or ``41,234.5``.
    """
    rounded = float(f"{value:.6g}")
    return number_text(rounded) if rounded == int(rounded) else f"{rounded:,.6g}"
