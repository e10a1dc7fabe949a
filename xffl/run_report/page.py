"""Page about one run, or about several compared: its figures, and the HTML file that holds them and the texts."""

from __future__ import annotations

import base64
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from xffl.errors import ConfigError
from xffl.extras import optional_import
from xffl.planning.figures import INK, MUTED, PALETTE, new_figure, plain_axes, save, topology_figure
from xffl.planning.partition import partition_figure
from xffl.planning.text import describe_world
from xffl.run_report.reader import FEDERATION, RoundRecord, Run, Series, read_runs
from xffl.run_report.summary import (
    SECTIONS,
    cell_name,
    environment_tables,
    label_text,
    mean_phases,
    number_text,
    printable,
    read_settings,
    seconds_text,
    section_of,
    sort_names,
    stem_of,
    sum_up_values,
    summary_rows,
    value_rows,
    value_text,
)

if TYPE_CHECKING:
    from jinja2 import Template
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Picture", "Report", "write_report"]

T = TypeVar("T")

# What is shown, and what is left out with a note.
MAX_VALUES, MAX_VALUE_ROWS, MAX_CELLS, MAX_LANES = 40, 400, 32, 16
MAX_LISTED, MAX_DESCRIBED = 20, 6
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

STYLES = {"-": "solid", "--": "dashed", "-.": "double", ":": "dotted"}
"""Lines of matplotlib and of CSS."""
STEPS, EXPOSED, BEHIND = "#E1E5EA", PALETTE[3], PALETTE[5]
PHASES = ("vote", "pack", "encode", "across", "combine", "home", "commit", "wait")
"""Each has its colour in all figures, in the order of the palette."""


# The files ------------------------------------------------------------------------------------------------------------


class Picture(NamedTuple):
    """A figure in a section of the page; the description is for readers who do not see it."""

    section: str
    title: str
    caption: str
    description: str
    file: str
    source: str


class Report(NamedTuple):
    """What was written.

    :param page: The HTML file.
    :param pictures: The figures; their PNG files stand beside the page.
    :param runs: The runs, with notes of what is missing in each.
    """

    page: Path
    pictures: list[Picture]
    runs: list[Run]


def write_report(runs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None) -> Report:
    """Write a page about one run, or about several compared, and its figures as PNG files.

    Local; of a run that is still going on, the page shows what has been written.

    :param runs: Run folders.
    :param out: Where to write; ``None`` takes ``pictures/`` in the folder of a single run.
    :return: What was written.
    :raises ConfigError: if a folder is not that of a run, or given twice, if there are several and no folder to write
        into, or more than figures can distinguish, or if matplotlib or jinja2 is missing.
    """
    most = len(PALETTE) * len(STYLES)
    if len(runs) > most:
        raise ConfigError(f"{len(runs)} runs cannot be told apart in one figure; give {most} at most")
    if out is None and len(runs) > 1:
        raise ConfigError(f"a page that compares {len(runs)} runs needs a folder of its own; give it with --out FOLDER")
    template = _load_template()
    found = read_runs(runs)
    folder = Path(out) if out is not None else found[0].folder / "pictures"
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is not a folder; give one with --out FOLDER, it is made if it is missing")
    folder.mkdir(parents=True, exist_ok=True)
    pictures, notes = draw_pictures(found, folder)
    values, settings = value_rows(found), read_settings(found)
    value_heads = ["of", "last", "at step", "best", "at step", "smallest", "largest", "records", "not finite"]
    text = template.render(
        runs=found,
        title=f"Run {found[0].name}" if len(found) == 1 else f"{len(found)} runs compared",
        swatches=[(colour, STYLES[style]) for colour, style in map(_run_style, range(len(found)))],
        summary=_merge_rows([dict(summary_rows(run)) for run in found]),
        different=[[setting.name, *setting.texts] for setting in settings if setting.differs],
        notes=[*notes, *(f"{run.name}: {note}" if len(found) > 1 else note for run in found for note in run.notes)],
        pictures=pictures,
        sections=list(dict.fromkeys(picture.section for picture in pictures)),
        value_heads=["value", *(["run"] if len(found) > 1 else []), *value_heads],
        values=values[:MAX_VALUE_ROWS],
        hidden_values=max(0, len(values) - MAX_VALUE_ROWS),
        settings=[setting.row for setting in settings],
        marked=[index for index, setting in enumerate(settings) if setting.differs],
        environments=[environment_tables(run) for run in found],
    )
    target = folder / "report.html"
    # Readers never see half a page.
    draft = folder / f".{target.name}.{os.getpid()}"
    draft.write_text(text, encoding="utf-8")
    draft.replace(target)
    return Report(target, pictures, found)


def _load_template() -> Template:
    with optional_import("report", "the page needs jinja2"):
        from jinja2 import Environment

    def finalize(value: object) -> object:
        # Whatever the page shows passes through here and is escaped afterwards, except what a macro has made.
        return value if hasattr(value, "__html__") else printable(value)

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=finalize)
    return environment.from_string(Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8"))


def _merge_rows(summaries: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Merge rows of several runs; one that only some have stands behind the row that it follows there."""
    names: list[str] = []
    for summary in summaries:
        place = 0
        for name in summary:
            if name not in names:
                names.insert(place, name)
            place = names.index(name) + 1
    return [[name, *(summary.get(name, "–") for summary in summaries)] for name in names]


# All figures ----------------------------------------------------------------------------------------------------------


@dataclass
class _Album:
    """The figures so far, with the names of their files."""

    folder: Path
    scratch: Path
    pictures: list[Picture] = field(default_factory=list)
    stems: set[str] = field(default_factory=set)

    def add(self, section: str, title: str, caption: str, description: str, paint: Callable[[Path], None]) -> None:
        """Add a figure; ``paint`` writes it as PNG and as SVG."""
        stem = stem_of(title, self.stems)
        vector = self.scratch / f"{stem}.svg"
        with warnings.catch_warnings():
            # Names in scripts that matplotlib's font lacks; a browser has them.
            warnings.filterwarnings("ignore", message="Glyph .* missing")
            paint(self.folder / f"{stem}.png")
            paint(vector)
        # Without the document type, and without who drew it when.
        svg = re.sub(r"<!DOCTYPE[^>]*>", "", vector.read_text(encoding="utf-8"), count=1)
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, count=1, flags=re.DOTALL)
        source = "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
        self.pictures.append(Picture(section, title, caption, description, f"{stem}.png", source))


def draw_pictures(runs: Sequence[Run], folder: Path) -> tuple[list[Picture], list[str]]:
    """Draw what the runs have recorded, PNG files into a folder; return the figures, and notes of what is missing."""
    notes = []
    with tempfile.TemporaryDirectory() as scratch:
        album = _Album(folder, Path(scratch))
        names = sort_names(name for run in runs for name in run.series)
        for name in names[:MAX_VALUES]:
            figure, caption = value_figure(runs, name)
            album.add(section_of(name), name, caption, _describe(name, runs), partial(save, figure))
        if left_out := names[MAX_VALUES:]:
            notes.append(f"{len(left_out)} more values have no figure: {', '.join(left_out[:MAX_LISTED])}")
        if any(run.rounds for run in runs):
            described = "Bars on a time axis: when each cell trained and when it stood still for a round."
            figures = [("rounds", f"{described} The summary has the sums.", rounds_figure(runs))]
            if any(record.phases for run in runs for records in run.rounds.values() for record in records):
                figures.append(("phases", "Stacked bars of the mean time of each phase.", phases_figure(runs)))
            described = "Line charts of the bytes sent so far between and within cells. The summary has the sums."
            figures.append(("traffic", described, traffic_figure(runs)))
            for title, described, (figure, caption) in figures:
                album.add("Rounds and traffic", title, caption, described, partial(save, figure))
        for partition, of in _group(runs, lambda run: run.partition):
            caption = f"Samples of each class in each cell{of}; the darker a field, the more samples."
            samples = sum(map(sum, partition.counts))
            described = (
                f"Heat map of {samples:,} samples of {len(partition.labels)} classes in {len(partition.counts)} cells."
            )
            paint = partial(
                partition_figure,
                partition.counts,
                classes=[label_text(label) for label in partition.labels],
                title=label_text("Samples of each class" + of.replace(" of ", ": ", 1)),
            )
            album.add("Data", f"partition{of}", caption, described, paint)
        for topology, of in _group(runs, lambda run: run.topology):
            caption = f"Cells, replicas and shards{of}; outlined ranks send over the slow link."
            album.add(
                "Topology", f"topology{of}", caption, describe_world(topology), partial(topology_figure, topology)
            )
    order = list(SECTIONS)
    return sorted(album.pictures, key=lambda picture: order.index(picture.section)), notes


def _group(runs: Sequence[Run], value_of: Callable[[Run], T | None]) -> list[tuple[T, str]]:
    """Return the different values that runs have, each with the words that name its runs where there are several."""
    groups: list[tuple[T, list[str]]] = []
    for run in runs:
        if (value := value_of(run)) is None:
            continue
        names = next((names for other, names in groups if other == value), None)
        if names is None:
            groups.append((value, [run.name]))
        else:
            names.append(run.name)
    return [(value, f" of {', '.join(names)}" if len(runs) > 1 else "") for value, names in groups]


def _describe(name: str, runs: Sequence[Run]) -> str:
    """Describe the figure of a value by the last values of its lines."""
    ends = []
    for run in runs:
        values = sum_up_values(run, name)
        together = [value for value in values if value.cell == FEDERATION] or values
        at = f"{run.name}, " if len(runs) > 1 else ""
        ends += [f"{at}{cell_name(value.cell)}: {value_text(name, value.last)}" for value in together]
    more = f"; and {len(ends) - MAX_DESCRIBED} more" if len(ends) > MAX_DESCRIBED else ""
    listed = "; ".join(ends[:MAX_DESCRIBED])
    return f"Line charts of {name} against steps and against time. Last values: {listed}{more}."


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
    """One panel of a figure: its lines, ``step`` or ``time`` on the x axis, and a name for the y axis."""

    lines: Sequence[Line]
    x: str
    label: str
    is_bytes: bool = False


def _run_style(index: int) -> tuple[str, str]:
    """Return the colour and the line style of one of several runs; both repeat only after all pairs."""
    return PALETTE[index % len(PALETTE)], list(STYLES)[index // len(PALETTE) % len(STYLES)]


def _looks_of(runs: Sequence[Run], index: int, cells: Sequence[int], *, has_all: bool) -> dict[int, Look]:
    """Return how cells are drawn: of one run in a colour each, of several in their run's; all together stand out."""
    if len(runs) > 1:
        colour, style = _run_style(index)
        cell_look = Look(runs[index].name, colour, style, 0.8 if has_all else 1.3, 0.4 if has_all else 0.9)
        return {**dict.fromkeys(cells, cell_look), FEDERATION: Look(runs[index].name, colour, style, 2.0)}
    if len(cells) <= len(PALETTE):
        looks = {cell: Look(cell_name(cell), colour) for cell, colour in zip(cells, PALETTE, strict=False)}
    else:
        looks = dict.fromkeys(cells, Look("single cells", MUTED, width=0.8, alpha=0.5))
    return {**looks, FEDERATION: Look(cell_name(FEDERATION), INK, "--" if cells else "-", 2.0)}


def value_figure(runs: Sequence[Run], name: str) -> tuple[Figure, str]:
    """Draw a value against steps and time; return the figure and its caption."""
    lines, notes = [], []
    has_all = has_cells = False
    for index, run in enumerate(runs):
        of_run = f" of {run.name}" if len(runs) > 1 else ""
        by_cell = run.series.get(name)
        if by_cell is None or run.started is None:
            notes.append(f"{run.name} has not recorded it.")
            continue
        cells = [cell for cell in sorted(by_cell) if cell != FEDERATION]
        together = [FEDERATION] if FEDERATION in by_cell else []
        has_all, has_cells = has_all or bool(together), has_cells or bool(cells)
        every = -(-len(cells) // MAX_CELLS) or 1
        looks = _looks_of(runs, index, cells[::every], has_all=bool(together))
        lines += [(looks[cell], by_cell[cell], run.started) for cell in [*cells[::every], *together]]
        if every > 1:
            notes.append(f"Every {every}th of the {len(cells)} cells{of_run} is drawn.")
        if len(cells) > 1 and _are_same([by_cell[cell] for cell in cells]):
            notes.append(f"All cells{of_run} have the same values: their lines lie on each other.")
        if bad := sum(int((~np.isfinite(series.values)).sum()) for series in by_cell.values()):
            notes.append(f"{bad:,} value{'s' if bad > 1 else ''}{of_run} not finite: crosses on the axis mark where.")
    # Lines of all cells together, the widest, lie above the others.
    lines.sort(key=lambda line: line[0].width)
    label = name.rpartition("/")[2].replace("_", " ")
    panels = [Panel(lines, x, label, name.endswith("bytes")) for x in ("step", "time")]
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
    return figure, " ".join([f"{name} of {what}, against optimizer steps (left) and wall-clock time (right).", *notes])


def _are_same(several: Sequence[Series]) -> bool:
    first = several[0]
    return all(
        np.array_equal(first.steps, other.steps) and np.array_equal(first.values, other.values, equal_nan=True)
        for other in several
    )


def traffic_figure(runs: Sequence[Run]) -> tuple[Figure, str]:
    """Draw the bytes sent so far between and within cells: of a single run by cell, and the sum of each run."""
    panels = []
    for name, label in (("bytes_across", "sent between cells"), ("bytes_home", "sent within cells")):
        lines: list[Line] = []
        for index, run in enumerate(runs):
            if not run.rounds or run.started is None:
                continue
            by_cell = {cell: run.rounds[cell] for cell in sorted(run.rounds)} if len(runs) == 1 else {}
            looks = _looks_of(runs, index, list(by_cell), has_all=True)
            if len(by_cell) != 1:
                by_cell[FEDERATION] = [record for records in run.rounds.values() for record in records]
            for cell, records in by_cell.items():
                ordered = sorted(records, key=lambda record: record.time)
                steps = [0.0, *(float(record.step) for record in ordered)]
                times = [run.started, *(record.time for record in ordered)]
                sums = np.cumsum([0.0, *(getattr(record, name) for record in ordered)])
                lines.append((looks[cell], Series(np.array(steps), np.array(times), sums), run.started))
        panels.append(Panel(lines, "time", label, is_bytes=True))
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
    for look, series, start in panel.lines:
        x = series.steps if panel.x == "step" else (series.times - start) / scale
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
        bad = x[~np.isfinite(series.values)]
        if len(bad):
            bad = bad[:: -(-len(bad) // MAX_CROSSES)]
            edge = axes.get_xaxis_transform()
            axes.plot(bad, [0.03] * len(bad), "x", color=look.colour, markersize=5, transform=edge, clip_on=False)
        if np.isfinite(points.mean).any():
            low, high = min(low, float(np.nanmin(points.low))), max(high, float(np.nanmax(points.high)))
    axes.set_xlabel("optimizer step" if panel.x == "step" else f"time since the start ({unit})", color=INK)
    if low > 0 and high > LOG_RANGE * low:
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=panel.x == "step"))
    axes.xaxis.set_major_formatter(_tick_text)
    axes.yaxis.set_major_formatter(EngFormatter("B") if panel.is_bytes else _tick_text)
    if panel.is_bytes and axes.get_ylim()[1] < 1:  # nothing was sent: no ticks in fractions of a byte
        axes.set_ylim(0, 1)
    axes.yaxis.set_minor_formatter(NullFormatter())
    plain_axes(axes, grid="y")
    axes.margins(x=0.02)
    return thinning


class Stretches(NamedTuple):
    """A line with a point for each stretch of records: its place, and mean, smallest and largest of the finite values.

    ``length`` is the number of records of the longest stretch; 1 where nothing is left out.
    """

    x: NDArray[np.float64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    length: int


def thin(x: NDArray[np.float64], values: NDArray[np.float64], limit: int, *, stairs: bool = False) -> Stretches:
    """Sum a long line up in stretches of equally many records; of stairs, leave records out."""
    if stairs:
        step = max(1, -(-len(values) // limit))
        kept = np.unique(np.append(np.arange(0, len(values), step), len(values) - 1))
        return Stretches(x[kept], values[kept], values[kept], values[kept], step)
    finite = np.isfinite(values)
    if len(values) <= limit:
        kept = np.where(finite, values, np.nan)
        return Stretches(x, kept, kept, kept, 1)
    edges = np.linspace(0, len(values), limit + 1).astype(np.int64)
    starts, lengths = edges[:-1], np.diff(edges)
    numbers = np.add.reduceat(finite.astype(np.float64), starts)
    numbers[numbers == 0] = np.nan
    mean = np.add.reduceat(np.where(finite, values, 0.0), starts) / numbers
    low = np.minimum.reduceat(np.where(finite, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, values, -np.inf), starts)
    low[np.isnan(numbers)] = high[np.isnan(numbers)] = np.nan
    return Stretches(np.add.reduceat(x, starts) / lengths, mean, low, high, int(lengths.max()))


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
    """The rounds of one cell, a row of a figure; times in Unix seconds."""

    name: str
    rounds: list[RoundRecord]
    start: float
    end: float


def _lanes(runs: Sequence[Run]) -> tuple[list[_Lane], list[str]]:
    """Choose the rows, and note what is left out."""
    lanes, notes = [], []
    with_rounds = [run for run in runs if run.rounds]
    each = max(1, MAX_LANES // len(with_rounds))
    for run in with_rounds:
        assert run.started is not None and run.ended is not None
        for cell in sorted(run.rounds)[:each]:
            name = cell_name(cell) if len(runs) == 1 else f"{run.name}, {cell_name(cell)}"
            lanes.append(_Lane(label_text(name), run.rounds[cell], run.started, run.ended))
        if len(run.rounds) > each:
            notes.append(f"The first {each} of the {len(run.rounds)} cells of {run.name} are drawn.")
    return lanes, notes + [f"{run.name} has no rounds." for run in runs if not run.rounds]


def _lane_axes(figure: Figure, lanes: list[_Lane], top: float, right: float, title: str, x_label: str) -> Axes:
    """Add axes with a row for each lane below a height in inches."""
    width, height = figure.get_size_inches()
    left, inner = EDGE + LETTER * max(len(lane.name) for lane in lanes), LANE * len(lanes)
    axes = figure.add_axes((left / width, (top - inner) / height, (width - left - right) / width, inner / height))
    axes.set_title(title, fontsize=11, fontweight="bold", color=INK, loc="left")
    axes.set_yticks(range(len(lanes)), [lane.name for lane in lanes])
    axes.set_xlabel(x_label, color=INK)
    axes.xaxis.set_major_formatter(_tick_text)
    plain_axes(axes)
    return axes


def rounds_figure(runs: Sequence[Run]) -> tuple[Figure, str]:
    """Draw when each cell, a row, trained and when it stood still, some rounds closely; return figure and caption."""
    from matplotlib.patches import Patch

    lanes, hidden = _lanes(runs)
    # A run may have nothing but a round that took no time.
    spans = [(0.0, max(1e-3, *(lane.end - lane.start for lane in lanes)))]
    if len(runs) == 1 and max(len(lane.rounds) for lane in lanes) > 2 * CLOSE_UP:
        spans.append(_close_up(lanes[0]))
    panel = HEAD + LANE * len(lanes) + FOOT
    height = len(spans) * panel + LEGEND
    figure = new_figure(WIDTH, height)
    notes = []
    for index, span in enumerate(spans):
        unit, scale = _time_unit(span[1] - (span[0] if index else 0.0))
        title = "rounds, some of them closely" if index else "rounds"
        axes = _lane_axes(figure, lanes, height - index * panel - HEAD, EDGE, title, f"time since the start ({unit})")
        notes += _draw_lanes(axes, lanes, span, scale, is_close=index > 0)
    names = ((STEPS, "local steps"), (EXPOSED, "training stands still"), (BEHIND, "round behind local steps"))
    handles = [Patch(color=colour, label=name) for colour, name in names]
    figure.legend(handles=handles, loc="lower center", ncols=3, frameon=False, fontsize=9)
    caption = [
        "Each row is a cell on the wall clock. Grey: local steps. Orange: training stands still for a round (exposed). "
        "Light blue: a round runs behind local steps (hidden).",
        *dict.fromkeys(notes),
    ]
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
        end = min(span[1], lane.end - lane.start)
        axes.broken_barh([(span[0] / scale, (end - span[0]) / scale)], (row - 0.36, 0.72), color=STEPS, linewidth=0)
        inside = [
            record
            for record in lane.rounds
            if span[0] <= record.time - lane.start and record.time - record.seconds - lane.start <= span[1]
        ]
        if len(inside) > MAX_BLOCKS:
            _draw_shares(axes, lane, inside, row, scale)
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
            if (steps := after.step - before.step) > 0 and last - first > 0.07 * (span[1] - span[0]):
                place = ((first + last) / 2 / scale, row)
                axes.text(*place, f"{steps:,} steps", fontsize=8, color=INK, ha="center", va="center", clip_on=True)
    axes.set_xlim(span[0] / scale, span[1] / scale)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
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


def phases_figure(runs: Sequence[Run]) -> tuple[Figure, str]:
    """Draw the mean time of each phase of a round, a bar for each cell; return the figure and its caption."""
    lanes, hidden = _lanes(runs)
    means = [mean_phases(lane.rounds) for lane in lanes]
    recorded = {name for mean in means for name in mean}
    names = [*(name for name in PHASES if name in recorded), *sorted(recorded - set(PHASES))]
    height = HEAD + LANE * len(lanes) + FOOT + LEGEND
    figure = new_figure(WIDTH, height)
    unit, scale = ("s", 1.0) if max(sum(mean.values()) for mean in means) >= 1 else ("ms", 1e-3)
    axes = _lane_axes(figure, lanes, height - HEAD, 1.6, "phases of a round", f"mean time of a round ({unit})")
    ends = np.zeros(len(lanes))
    for name in names:
        widths = np.array([mean.get(name, 0.0) for mean in means]) / scale
        colour = PALETTE[PHASES.index(name)] if name in PHASES else MUTED
        axes.barh(range(len(lanes)), widths, left=ends, height=0.66, color=colour, label=label_text(name))
        ends += widths
    for row, end in enumerate(ends):
        axes.text(end, row, f" {seconds_text(float(end) * scale)}", fontsize=9, color=INK, va="center")
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.margins(x=0.02)
    figure.legend(loc="lower center", ncols=len(names), frameon=False, fontsize=9)
    caption = "The time that the first rank of each cell spends on a round, as the mean over its rounds."
    if any(record.is_delayed for lane in lanes for record in lane.rounds):
        caption += " Of delayed rounds training waits only for pack, commit and wait; the others run behind it."
    return figure, " ".join([caption, *hidden])
