"""Figures of runs: values against steps and time, rounds on the wall clock, who took part, phases, what they sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xffl.planning.figures import FRAME, INK, MUTED, PALETTE, new_figure, plain_axes
from xffl.run_report.elastic import History, Presence
from xffl.run_report.reader import RoundRecord, Run, Series
from xffl.run_report.summary import cell_name, label_text, number_text, seconds_text
from xffl.run_report.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "STYLES",
    "bars_figure",
    "participation_figure",
    "rounds_figure",
    "run_style",
    "traffic_figure",
    "value_figure",
]

# What is shown, and what is left out with a note.
MAX_CELLS, MAX_LANES, MAX_EPOCHS = 32, 16, 100
POINTS, MAX_POINTS, MIN_POINTS = 2500, 250, 50
"""Points of a panel, and of a line at most and at least."""
MAX_BLOCKS, BINS = 200, 240
"""Rounds of a row that are drawn one by one; of more, bins show the shares of time."""
CLOSE_UP = 4
"""Rounds of the close-up."""
MAX_MARKS, MAX_CROSSES = 30, 50
"""Points of a line that are marked one by one, and crosses for values that are not finite."""
LOG_RANGE = 100
"""From this ratio of the largest to the smallest value on the axis is logarithmic."""

# Inches.
WIDTH, HEIGHT, LEGEND_ROW = 9.6, 3.0, 0.2
LANE, HEAD, FOOT, LEGEND = 0.34, 0.42, 0.55, 0.3
LETTER, EDGE = 0.075, 0.25

DRAWN_LIMIT = 1e300
"""Values beyond it are marked as NaN and infinity are: matplotlib's margins would overflow"""
STYLES = {"-": "solid", "--": "dashed", "-.": "double", ":": "dotted"}
"""Lines of matplotlib and of CSS."""
STEPS, EXPOSED, BEHIND, EPOCH = "#E1E5EA", PALETTE[3], PALETTE[5], "#F7F0DC"
STATES = {Presence.CONTRIBUTED: PALETTE[0], Presence.IDLE: PALETTE[1], Presence.MISSED: "white"}
"""Colours of what a cell does in a round of an elastic run."""
BYTES = {"bytes_across": "sent between cells", "bytes_home": "sent within cells"}
"""Columns of the rounds' table that count bytes, and how an axis names them."""
PHASES = ("vote", "pack", "encode", "across", "combine", "home", "commit", "wait")
"""Each has its colour in all figures, in the order of the palette."""


# Lines ----------------------------------------------------------------------------------------------------------------


class Look(NamedTuple):
    """How a line is drawn; lines of one label have one entry in the legend."""

    label: str
    colour: str
    style: str = "-"
    width: float = 1.4
    alpha: float = 1.0


Line = tuple[Look, Series, float]
"""A line of a figure, and the Unix seconds at which its time axis begins."""


class Panel(NamedTuple):
    """One panel of a figure: its lines, ``step``, ``round`` or ``time`` on the x axis, and a name for the y axis.

    Rounds stand in the place of the steps of a series. Bands lie behind the lines.
    """

    lines: Sequence[Line]
    x: str
    label: str
    is_bytes: bool = False
    bands: Sequence[tuple[float, float]] = ()


def run_style(index: int) -> tuple[str, str]:
    """Return the colour and the line style of one of several runs; both repeat only after all pairs."""
    return PALETTE[index % len(PALETTE)], list(STYLES)[index // len(PALETTE) % len(STYLES)]


def _looks_of(runs: Sequence[Run], index: int, cells: Sequence[int], *, has_all: bool) -> dict[int | None, Look]:
    """Return how cells are drawn: of one run in a colour each, of several in their run's; all together stand out."""
    if len(runs) > 1:
        colour, style = run_style(index)
        cell_look = Look(
            runs[index].name, colour=colour, style=style, width=0.8 if has_all else 1.3, alpha=0.4 if has_all else 0.9
        )
        return {**dict.fromkeys(cells, cell_look), None: Look(runs[index].name, colour, style, 2.0)}
    looks: dict[int | None, Look]
    if len(cells) <= len(PALETTE):
        looks = {cell: Look(cell_name(cell), colour) for cell, colour in zip(cells, PALETTE, strict=False)}
    else:
        looks = dict.fromkeys(cells, Look("single cells", MUTED, width=0.8, alpha=0.5))
    return {**looks, None: Look(cell_name(None), INK, "--" if cells else "-", 2.0)}


def value_figure(runs: Sequence[Run], name: str) -> tuple[Figure, str]:
    """Draw a value against steps and time; return the figure and its caption."""
    lines: list[Line] = []
    by_round: list[Line] = []
    notes = []
    has_all = has_cells = False
    for index, run in enumerate(runs):
        of_run = f" of {run.name}" if len(runs) > 1 else ""
        by_cell = run.series.get(name)
        if by_cell is None or run.started is None:
            notes.append(f"{run.name} has not recorded it.")
            continue
        cells = sorted(cell for cell in by_cell if cell is not None)
        together = [None] if None in by_cell else []
        has_all, has_cells = has_all or bool(together), has_cells or bool(cells)
        every = -(-len(cells) // MAX_CELLS) or 1
        looks = _looks_of(runs, index, cells[::every], has_all=bool(together))
        for cell in [*cells[::every], *together]:
            series = by_cell[cell]
            if run.history is not None:
                spans = [] if cell is None else run.history.spans(cell, run.started, run.started)
                series = _broken(series, spans)
                begun = min((metrics.first_time for metrics in run.metrics.values()), default=run.started)
                placed = series._replace(steps=run.history.place(series.times, begun))
                by_round.append((looks[cell], placed, run.started))
            lines.append((looks[cell], series, run.started))
        if every > 1:
            notes.append(f"Every {every}th of the {len(cells)} cells{of_run} is drawn.")
        if len(cells) > 1 and _are_same([by_cell[cell] for cell in cells]):
            notes.append(f"All cells{of_run} have the same values: their lines lie on each other.")
        if bad := sum(int((~is_drawable(series.values)).sum()) for series in by_cell.values()):
            notes.append(f"{bad:,} value{'s' if bad > 1 else ''}{of_run} not finite: crosses on the axis mark where.")
    # Lines of all cells together, the widest, lie above the others.
    for drawn in (lines, by_round):
        drawn.sort(key=lambda line: line[0].width)
    label, is_bytes = name.rpartition("/")[2].replace("_", " "), name.endswith("bytes")
    bands, band_notes = _epoch_bands(runs)
    if all(run.history is not None for run in runs):
        panels = [Panel(by_round, x="round", label=label, is_bytes=is_bytes, bands=bands["round"])]
    else:
        panels = [Panel(lines, "step", label, is_bytes)]
    panels.append(Panel(lines, x="time", label=label, is_bytes=is_bytes, bands=bands["time"]))
    figure, thinning = draw_panels(name, panels)
    if len(runs) == 1:
        what = "each cell" * has_cells + " and " * (has_all and has_cells) + "all cells together" * has_all
    else:
        what = "each run" + (": thick for all cells together, thin for each cell" if has_all and has_cells else "")
    if thinning > 1:
        notes.append(
            f"Long lines are thinned: each point is the mean of up to {thinning:,} records, in a band from their "
            "smallest to their largest."
        )
    left = "optimizer steps" if panels[0].x == "step" else "rounds"
    return figure, " ".join(
        [f"{name} of {what}, against {left} (left) and wall-clock time (right).", *band_notes, *notes]
    )


def _broken(series: Series, spans: Sequence[tuple[float, float]]) -> Series:
    """Put a gap into a line, a record without time, where a cell was away and for most of it has recorded nothing."""
    places = []
    for (_, left), (back, _) in pairwise(spans):
        place = int(np.searchsorted(series.times, back))
        if 0 < place < len(series.times) and back - series.times[place - 1] > 0.5 * (back - left):
            places.append(place)
    return Series(*(np.insert(values, places, np.nan) for values in series))


def _epoch_bands(runs: Sequence[Run]) -> tuple[dict[str, list[tuple[float, float]]], list[str]]:
    """Return the bands of every second epoch of an elastic run, in rounds and in seconds, and what they are."""
    history, start = runs[0].history, runs[0].started
    bands: dict[str, list[tuple[float, float]]] = {"round": [], "time": []}
    if len(runs) > 1 or history is None or start is None:
        return bands, []
    if len(history.epochs) > MAX_EPOCHS:
        return bands, [f"The {len(history.epochs):,} epochs are too many for bands."]
    for (_, before), (_, last) in list(pairwise(history.epochs))[::2]:
        first, end = history.rounds[before], history.rounds[last]
        ended = runs[0].ended if last == len(history.rounds) - 1 else end.time
        bands["round"].append((first.number, end.number))
        bands["time"].append((first.time - start, (ended or end.time) - start))
    return bands, ["Bands: epochs, in which the same cells made the rounds."]


def _are_same(several: Sequence[Series]) -> bool:
    first = several[0]
    return all(
        np.array_equal(first.steps, other.steps) and np.array_equal(first.values, other.values, equal_nan=True)
        for other in several
    )


def traffic_figure(runs: Sequence[Run], columns: Sequence[str] = tuple(BYTES)) -> tuple[Figure, str]:
    """Draw the bytes sent so far between and within cells: of a single run by cell, and the sum of each run."""
    panels = []
    for name in columns:
        lines: list[Line] = []
        for index, run in enumerate(runs):
            if not run.rounds or run.started is None:
                continue
            cells = sorted(run.rounds) if len(runs) == 1 else []
            by_cell: dict[int | None, Table] = {cell: run.round_table.where("cell", cell) for cell in cells}
            looks = _looks_of(runs, index, cells, has_all=True)
            if len(by_cell) != 1:
                by_cell[None] = run.round_table
            for cell, table in by_cell.items():
                ordered = table.sorted_by("time")
                steps, times = np.insert(ordered["step"], 0, 0.0), np.insert(ordered["time"], 0, run.started)
                sums = np.cumsum(np.insert(ordered[name], 0, 0.0))
                lines.append((looks[cell], Series(steps, times, sums), run.started))
        panels.append(Panel(lines, "time", BYTES[name], is_bytes=True))
    figure, thinning = draw_panels("traffic of rounds", panels, stairs=True)
    notes = ["Bytes sent so far, over the slow link between cells (left) and inside cells (right)."]
    notes += [f"{run.name} has no rounds." for run in runs if not run.rounds]
    if thinning > 1:
        notes.append(f"Of long lines every {thinning:,}th round is drawn, and the last.")
    return figure, " ".join(notes)


def draw_panels(title: str, panels: Sequence[Panel], *, stairs: bool = False) -> tuple[Figure, int]:
    """Draw lines into panels side by side with one legend; also return how many records a drawn point stands for."""
    labels = list(dict.fromkeys(look.label for panel in panels for look, *_ in panel.lines))
    columns = max(1, min(4, len(labels)))
    rows = -(-len(labels) // columns) if len(labels) > 1 else 0
    height = HEIGHT + LEGEND_ROW * rows
    figure = new_figure(WIDTH, height)
    all_axes = figure.subplots(1, len(panels), squeeze=False, sharey=not stairs)[0]
    thinning = 1
    handles: dict[str, Any] = {}
    for axes, panel in zip(all_axes, panels, strict=True):
        thinning = max(thinning, _draw_panel(axes, panel, handles, stairs=stairs))
        if axes is all_axes[0] or stairs:
            axes.set_ylabel(label_text(panel.label), color=INK)
    figure.text(0.012, 1 - 0.19 / height, label_text(title), fontsize=11, fontweight="bold", color=INK, va="center")
    if rows:
        shown = [label_text(label) for label in labels]
        figure.legend(
            [handles[label] for label in labels], shown, loc="lower center", ncols=columns, frameon=False, fontsize=9
        )
    bottom = 0.5 + LEGEND_ROW * rows + (0.04 if rows else 0.0)
    wspace = 0.26 if stairs else 0.06
    figure.subplots_adjust(left=0.085, right=0.985, top=1 - 0.42 / height, bottom=bottom / height, wspace=wspace)
    return figure, thinning


def _draw_panel(axes: Axes, panel: Panel, handles: dict[str, Any], *, stairs: bool) -> int:
    from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter

    limit = min(MAX_POINTS, max(MIN_POINTS, POINTS // max(1, len(panel.lines))))
    unit, scale = _time_unit(max((float(series.times[-1]) - start for _, series, start in panel.lines), default=0.0))
    thinning, low, high = 1, np.inf, -np.inf
    is_time = panel.x == "time"
    _draw_bands(axes, panel.bands, scale if is_time else 1.0)
    for look, series, start in panel.lines:
        x = (series.times - start) / scale if is_time else series.steps
        points = thin(x, series.values, limit, stairs=stairs)
        thinning = max(thinning, points.length)
        (drawn,) = axes.plot(
            points.x,
            points.mean,
            color=look.colour,
            linestyle=look.style,
            linewidth=look.width,
            alpha=look.alpha,
            marker="o" if len(points.x) <= MAX_MARKS and not stairs else None,
            markersize=3.5,
            drawstyle="steps-post" if stairs else "default",
        )
        if points.length > 1 and not stairs:
            band = axes.fill_between(points.x, points.low, points.high, color=look.colour, linewidth=0)
            band.set_alpha(0.2 * look.alpha)
        if look.label not in handles or look.width > handles[look.label].get_linewidth():
            handles[look.label] = drawn
        bad = x[~is_drawable(series.values)]
        if len(bad):
            bad = bad[:: -(-len(bad) // MAX_CROSSES)]
            edge = axes.get_xaxis_transform()
            axes.plot(bad, [0.03] * len(bad), "x", color=look.colour, markersize=5, transform=edge, clip_on=False)
        if np.isfinite(points.mean).any():
            low, high = min(low, float(np.nanmin(points.low))), max(high, float(np.nanmax(points.high)))
    names = {"step": "optimizer step", "round": "round", "time": f"time since the start ({unit})"}
    axes.set_xlabel(names[panel.x], color=INK)
    if low > 0 and high > LOG_RANGE * low:
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=not is_time))
    axes.xaxis.set_major_formatter(_tick_text)
    axes.yaxis.set_major_formatter(EngFormatter("B") if panel.is_bytes else _tick_text)
    if panel.is_bytes and axes.get_ylim()[1] < 1:  # nothing was sent: no ticks in fractions of a byte
        axes.set_ylim(0, 1)
    axes.yaxis.set_minor_formatter(NullFormatter())
    plain_axes(axes, grid="y")
    axes.margins(x=0.02)
    return thinning


def _draw_bands(axes: Axes, bands: Sequence[tuple[float, float]], scale: float) -> None:
    for low, high in bands:
        axes.axvspan(low / scale, high / scale, color=EPOCH, linewidth=0, zorder=0)


class Stretches(NamedTuple):
    """A line with a point for each stretch of records: its place, and mean, smallest and largest of the finite values.

    ``length`` is the number of records of the longest stretch; 1 where nothing is left out.
    """

    x: NDArray[np.float64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    length: int


def is_drawable(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Tell which values an axis can show: those that are finite, also with a margin around them."""
    return np.abs(values) < DRAWN_LIMIT


def thin(x: NDArray[np.float64], values: NDArray[np.float64], limit: int, *, stairs: bool = False) -> Stretches:
    """Sum a long line up in stretches of equally many records; of stairs, leave records out."""
    if stairs:
        step = max(1, -(-len(values) // limit))
        kept = np.unique(np.append(np.arange(0, len(values), step), len(values) - 1))
        return Stretches(x[kept], mean=values[kept], low=values[kept], high=values[kept], length=step)
    finite = is_drawable(values)
    if len(values) <= limit:
        kept = np.where(finite, values, np.nan)
        return Stretches(x, mean=kept, low=kept, high=kept, length=1)
    edges = np.linspace(0, len(values), limit + 1).astype(np.int64)
    starts, lengths = edges[:-1], np.diff(edges)
    numbers = np.add.reduceat(finite.astype(np.float64), starts)
    numbers[numbers == 0] = np.nan
    mean = np.add.reduceat(np.where(finite, values, 0.0), starts) / numbers
    low = np.minimum.reduceat(np.where(finite, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, values, -np.inf), starts)
    low[np.isnan(numbers)] = high[np.isnan(numbers)] = np.nan
    return Stretches(np.add.reduceat(x, starts) / lengths, mean=mean, low=low, high=high, length=int(lengths.max()))


def _time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit of a time axis of that length, and its seconds."""
    if seconds < 180:
        return ("s", 1.0) if seconds >= 0.5 else ("ms", 1e-3)
    return ("min", 60.0) if seconds < 3 * 3600 else ("h", 3600.0)


def _tick_text(value: float, _: float | None = None) -> str:
    """Write a number at an axis, without what binary fractions leave behind: 0.30000000000000004 is 0.3."""
    rounded = float(f"{value:.6g}")
    return number_text(rounded) if rounded == int(rounded) else f"{rounded:,.6g}"


# Rounds ---------------------------------------------------------------------------------------------------------------


class _Lane(NamedTuple):
    """The rounds of one cell, a row of a figure, and when it was at work; times in Unix seconds."""

    name: str
    rounds: list[RoundRecord]
    table: Table
    start: float
    end: float
    spans: list[tuple[float, float]]


def _lanes(runs: Sequence[Run]) -> tuple[list[_Lane], list[str]]:
    """Choose the rows, and note what is left out."""
    lanes, notes = [], []
    with_rounds = [run for run in runs if run.rounds]
    each = max(1, MAX_LANES // len(with_rounds))
    for run in with_rounds:
        assert run.started is not None and run.ended is not None
        for cell in sorted(run.rounds)[:each]:
            name = cell_name(cell) if len(runs) == 1 else f"{run.name}, {cell_name(cell)}"
            spans = [(run.started, run.ended)]
            if run.history is not None:
                last = run.metrics[cell].last_time if cell in run.metrics else run.started
                spans = run.history.spans(cell, run.started, last)
            lanes.append(
                _Lane(
                    label_text(name),
                    rounds=run.rounds[cell],
                    table=run.round_table.where("cell", cell),
                    start=run.started,
                    end=run.ended,
                    spans=spans,
                )
            )
        if len(run.rounds) > each:
            notes.append(f"The first {each} of the {len(run.rounds)} cells of {run.name} are drawn.")
    return lanes, notes + [f"{run.name} has no rounds." for run in runs if not run.rounds]


def _lane_axes(
    figure: Figure, names: Sequence[str], top: float, right: float, title: str, x_label: str, pad: float = 6.0
) -> Axes:
    """Add axes with a row for each name below a height in inches, and a title so many points above."""
    width, height = figure.get_size_inches()
    left, inner = EDGE + LETTER * max(map(len, names)), LANE * len(names)
    axes = figure.add_axes((left / width, (top - inner) / height, (width - left - right) / width, inner / height))
    axes.set_title(title, fontsize=11, fontweight="bold", color=INK, loc="left", pad=pad)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(x_label, color=INK)
    axes.xaxis.set_major_formatter(_tick_text)
    plain_axes(axes)
    return axes


def rounds_figure(runs: Sequence[Run]) -> tuple[Figure, str]:
    """Draw when each cell, a row, trained and when it stood still, some rounds closely; return figure and caption."""
    from matplotlib.patches import Patch

    lanes, hidden = _lanes(runs)
    bands, band_notes = _epoch_bands(runs)
    # A run may have nothing but a round that took no time.
    spans = [(0.0, max(1e-3, *(lane.end - lane.start for lane in lanes)))]
    if len(runs) == 1 and max(len(lane.rounds) for lane in lanes) > 2 * CLOSE_UP:
        spans.append(_close_up(max(lanes, key=lambda lane: len(lane.rounds))))
    panel = HEAD + LANE * len(lanes) + FOOT
    height = len(spans) * panel + LEGEND
    figure = new_figure(WIDTH, height)
    notes = []
    for index, span in enumerate(spans):
        unit, scale = _time_unit(span[1] - (span[0] if index else 0.0))
        title = "rounds, some of them closely" if index else "rounds"
        names = [lane.name for lane in lanes]
        axes = _lane_axes(
            figure,
            names=names,
            top=height - index * panel - HEAD,
            right=EDGE,
            title=title,
            x_label=f"time since the start ({unit})",
        )
        _draw_bands(axes, bands["time"], scale)
        notes += _draw_lanes(axes, lanes, span, scale, is_close=index > 0)
    kinds = ((STEPS, "local steps"), (EXPOSED, "training stands still"), (BEHIND, "round behind local steps"))
    handles = [Patch(color=colour, label=name) for colour, name in kinds]
    figure.legend(handles=handles, loc="lower center", ncols=3, frameon=False, fontsize=9)
    caption = [
        "Each row is a cell on the wall clock. Grey: local steps. Orange: training stands still for a round (exposed). "
        "Light blue: a round runs behind local steps (hidden)."
    ]
    if any(run.history for run in runs):
        lost = "rounds of which a restart has lost the record are not marked"
        caption += [f"Nothing is drawn where a cell was in no round; {lost}.", *band_notes]
    caption += dict.fromkeys(notes)
    if len(spans) > 1:
        caption.append("Below: some rounds from the middle, with the local steps between them.")
    return figure, " ".join([*caption, *hidden])


def _close_up(lane: _Lane) -> tuple[float, float]:
    """Return a stretch of time around a few rounds in the middle."""
    middle = len(lane.rounds) // 2
    first, last = lane.rounds[middle - CLOSE_UP // 2], lane.rounds[middle + CLOSE_UP // 2 - 1]
    before = lane.rounds[middle - CLOSE_UP // 2 - 1].time
    return before - lane.start, last.time - lane.start + 0.3 * max(0.0, first.time - first.seconds - before)


def _draw_lanes(
    axes: Axes, lanes: list[_Lane], span: tuple[float, float], scale: float, *, is_close: bool
) -> list[str]:
    notes = []
    for row, lane in enumerate(lanes):
        work = [(max(span[0], first - lane.start), min(span[1], last - lane.start)) for first, last in lane.spans]
        bars = [(first / scale, (last - first) / scale) for first, last in work if last > first]
        axes.broken_barh(bars, (row - 0.36, 0.72), color=STEPS, linewidth=0)
        inside = [
            record
            for record in lane.rounds
            if span[0] <= record.time - lane.start and record.time - record.seconds - lane.start <= span[1]
        ]
        if len(inside) > MAX_BLOCKS:
            _draw_shares(axes, lane=lane, rounds=inside, row=row, scale=scale)
            notes.append(
                f"Where a row has more than {MAX_BLOCKS} rounds, it shows the shares of time in {BINS} stretches "
                "instead of single rounds."
            )
        else:
            exposed, behind = _blocks(inside, lane.start, scale)
            axes.broken_barh(behind, (row - 0.36, 0.72), color=BEHIND, linewidth=0)
            axes.broken_barh(exposed, (row - 0.36, 0.72), color=EXPOSED, linewidth=0.4)
        for before, after in pairwise(inside if is_close else ()):
            # The number of local steps between two rounds, where there is room.
            first, last = before.time - lane.start, after.time - after.seconds - lane.start
            if last <= first and after.is_delayed:
                last = after.time - lane.start
            is_next = after.number <= before.number + 1  # else the cell may have been away
            if is_next and (steps := after.step - before.step) > 0 and last - first > 0.07 * (span[1] - span[0]):
                place = ((first + last) / 2 / scale, row)
                axes.text(*place, f"{steps:,} steps", fontsize=8, color=INK, ha="center", va="center", clip_on=True)
    axes.set_xlim(span[0] / scale, span[1] / scale)
    return notes


def _blocks(
    rounds: list[RoundRecord], start: float, scale: float
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return when training stood still, and when rounds ran behind it, as places and widths."""
    exposed, behind = [], []
    for record in rounds:
        begin, end = record.time - record.seconds - start, record.time - start
        if not record.is_delayed:
            exposed.append((begin / scale, record.seconds / scale))
            continue
        # Values are packed at its begin; at its end the merge waits for what is still under way.
        pack = min(record.phases.get("pack", 0.0), record.exposed)
        merge = record.exposed - pack
        exposed += [(begin / scale, pack / scale), ((end - merge) / scale, merge / scale)]
        behind.append(((begin + pack) / scale, (record.seconds - record.exposed) / scale))
    return exposed, behind


def _draw_shares(axes: Axes, lane: _Lane, rounds: list[RoundRecord], row: int, scale: float) -> None:
    """Draw the shares of time in stretches: standing still from below, hidden rounds above that."""
    edges = np.linspace(0.0, lane.end - lane.start, BINS + 1)
    shares = []
    for blocks in _blocks(rounds, lane.start, 1.0):
        begins, widths = np.array(blocks or [(0.0, 0.0)]).T
        # How much lies before each edge: blocks that are over, and the begun part of others.
        done = np.array([np.clip(edge - begins, 0.0, widths).sum() for edge in edges])
        shares.append(np.clip(np.diff(done) / np.diff(edges), 0.0, 1.0))
    base, exposed = row + 0.36, 0.72 * shares[0]
    both = np.minimum(0.72, exposed + 0.72 * shares[1])
    for low, high, colour in ((exposed, both, BEHIND), (np.zeros(BINS), exposed, EXPOSED)):
        axes.stairs(base - high, edges / scale, baseline=base - low, fill=True, color=colour, linewidth=0)


def participation_figure(history: History, title: str) -> tuple[Figure, str]:
    """Draw what each cell of an elastic run, a row, did in each round, with the epochs behind; also return the caption.

    Consecutive rounds in which a cell does the same are one block.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    cells, numbers = range(min(history.cells, MAX_LANES)), [record.number for record in history.rounds]
    head = HEAD + LEGEND_ROW  # with the epochs' names
    height = head + LANE * len(cells) + FOOT + LEGEND
    figure = new_figure(WIDTH, height)
    names = [cell_name(cell) for cell in cells]
    axes = _lane_axes(
        figure, names=names, top=height - head, right=EDGE, title=label_text(title), x_label="round", pad=18.0
    )
    first, last = numbers[0] - 0.5, numbers[-1] + 0.5
    shown = history.epochs if len(history.epochs) <= MAX_EPOCHS else []
    for index, (begin, end) in enumerate(shown):
        low, high = numbers[begin] - 0.5, numbers[end] + 0.5
        if index % 2:
            axes.axvspan(low, high, color=EPOCH, linewidth=0, zorder=0)
        share = (high - low) / (last - first)
        if share > 0.02:
            text = f"epoch {index + 1}" if share > 0.08 else f"{index + 1}"
            at = axes.get_xaxis_transform()
            axes.text((low + high) / 2, 1.03, text, fontsize=8, color=MUTED, ha="center", transform=at)
    size = 6 if sum(len(history.restarts(row)) for row in cells) <= MAX_MARKS * len(cells) / 2 else 3
    for row in cells:
        # What is done in a round, and the place among the rounds without gaps that it begins.
        done = zip(numbers, history.states(row), strict=True)
        for (state, _), block in groupby(enumerate(done), lambda entry: (entry[1][1], entry[1][0] - entry[0])):
            inside = [number for _, (number, _) in block]
            if state == Presence.LEFT:
                place = (inside[0] - 0.5, row)
                axes.annotate(
                    "has left",
                    place,
                    xytext=(4, 0),
                    textcoords="offset points",
                    fontsize=8,
                    color=MUTED,
                    va="center",
                )
                continue
            bar, colour = (inside[0] - 0.5, len(inside)), STATES[state]
            (edge, hatch) = (FRAME, "/////") if state == Presence.MISSED else (colour, None)
            axes.broken_barh([bar], (row - 0.3, 0.6), facecolor=colour, edgecolor=edge, hatch=hatch, linewidth=0.4)
        lives = [numbers[at] - 0.5 for at in history.restarts(row)]
        axes.plot(lives, [row - 0.3] * len(lives), "v", color=INK, markersize=size, clip_on=False)
    axes.set_xlim(first, last)
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    handles: list[Patch | Line2D] = [
        Patch(facecolor=STATES[Presence.CONTRIBUTED], label="contributes"),
        Patch(facecolor=STATES[Presence.IDLE], label="there with weight 0"),
        Patch(facecolor="white", edgecolor=FRAME, hatch="/////", label="not there"),
        Line2D([], [], linestyle="", marker="v", color=INK, markersize=size, label="first round after a restart"),
    ]
    figure.legend(handles=handles, loc="lower center", ncols=4, frameon=False, fontsize=9)
    caption = [
        "Each row is a cell, each column a round. With weight 0 a cell takes the model over, or has no new steps. One "
        "that has left for good has finished. Bands: epochs, in which the same cells made the rounds."
    ]
    if len(history.epochs) > MAX_EPOCHS:
        caption.append(f"The {len(history.epochs):,} epochs are too many for bands.")
    if history.cells > len(cells):
        caption.append(f"The first {len(cells)} of the {history.cells} cells are drawn.")
    return figure, " ".join(caption)


def bars_figure(
    runs: Sequence[Run],
    columns: Sequence[str],
    reduce: Callable[[NDArray[np.float64]], float],
    title: str,
    caption: str,
    x_label: str,
) -> tuple[Figure, str]:
    """Draw a bar for each cell, stacked of seconds in columns of the rounds' table; return the figure and its caption.

    ``columns`` are names or patterns, such as ``phase/*``; ``reduce`` makes one number of a column's rows of a cell,
    such as ``numpy.mean``.
    """
    lanes, hidden = _lanes(runs)
    tables = [lane.table for lane in lanes]
    parts = {name: name.rpartition("/")[2] for table in tables for name in table.names(*columns)}
    known = ("between rounds", *PHASES)
    names = sorted(parts, key=lambda name: (known.index(parts[name]) if parts[name] in known else len(known), name))
    bars = {name: np.array([float(reduce(table[name])) for table in tables]) for name in names}
    figure = new_figure(WIDTH, HEAD + LANE * len(lanes) + FOOT + LEGEND)
    unit, scale = _time_unit(float(sum(bars.values(), np.zeros(len(lanes))).max()))
    axes = _lane_axes(
        figure,
        names=[lane.name for lane in lanes],
        top=LANE * len(lanes) + FOOT + LEGEND,
        right=1.6,
        title=title,
        x_label=f"{x_label} ({unit})",
    )
    ends = np.zeros(len(lanes))
    for name, seconds in bars.items():
        part = parts[name]
        colour = PALETTE[PHASES.index(part)] if part in PHASES else STEPS if part in known else MUTED
        axes.barh(range(len(lanes)), seconds / scale, left=ends, height=0.66, color=colour, label=label_text(part))
        ends += seconds / scale
    for row, end in enumerate(ends):
        axes.text(end, row, f" {seconds_text(float(end) * scale)}", fontsize=9, color=INK, va="center")
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.margins(x=0.02)
    figure.legend(loc="lower center", ncols=len(names), frameon=False, fontsize=9, columnspacing=1.2)
    return figure, " ".join([caption, *hidden])
