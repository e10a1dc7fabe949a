"""The samples of each class in each cell, as a table and as a heat map with the cells' sizes beside it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from xffl.errors import ConfigError
from xffl.planning.figures import FRAME, GRID, INK, MUTED, PALETTE, checked_path, new_figure, save, tint
from xffl.planning.text import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console
    from rich.table import Table

__all__ = ["CellShare", "cell_shares", "partition_figure", "partition_table"]

PLAIN_WIDTH = 120  # columns where there is no terminal
MAX_CELLS = 32  # rows of the table; of more cells, the last rows are left out
NOTE = "skew: how far the cell's mixture of classes is from that of all cells, 0 (the same) to 1 (nothing in common)"

# Inches.
FIELD_WIDTH, FIELD_HEIGHT = 0.58, 0.42
MAP_MIN, MAP_MAX = 1.7, 9.0
BARS = 1.9
HEAD, FOOT = 0.9, 0.52
GAP, RIGHT, EDGE = 0.16, 0.15, 0.18
LETTER, TITLE_LETTER = 0.078, 0.112  # width of a letter of the labels, and of the title
NUMBERS_WIDTH, NUMBERS_HEIGHT = 0.36, 0.2  # the smallest field that has room for its number
LABEL_STEP = 0.2  # least distance of two labels of an axis


class CellShare(NamedTuple):
    """What one cell has: its samples, their share of all samples (0 to 1), and the classes of which it has a sample.

    ``skew`` is the total variation distance between the cell's mixture of classes and that of all cells, 0 to 1.
    """

    samples: int
    share: float
    classes: int
    skew: float


def partition_table(counts: Sequence[Sequence[int]], file: TextIO, *, classes: Sequence[object] | None = None) -> None:
    """Write the samples of each class in each cell as a table: in colour to a terminal, elsewhere in plain characters.

    Local. Cells and classes that do not fit are left out, with notes of how many; sums include them.

    :param counts: Samples of each class in each cell, (cells, classes): ``partition.table(labels)``.
    :param file: Where to write.
    :param classes: Names of the classes; ``None`` numbers them from 0.
    :raises ConfigError: if the counts are not such a table, or the names are not one for each class.
    """
    rows, names = _checked(counts, classes)
    console = plain_console(file, PLAIN_WIDTH)
    shown = _fitting_classes(rows, names, console.width)
    write_table(console, _table(rows, names[:shown]))
    notes = [NOTE]
    if len(rows) > MAX_CELLS:
        notes.append(f"... {counted(len(rows) - MAX_CELLS, 'more cell')}")
    if shown < len(names):
        left_out = len(names) - shown
        notes.append(f"... {left_out} more class{'' if left_out == 1 else 'es'}: {names[shown]} to {names[-1]}")
    console.print("\n".join(notes), style="dim")


def plain_console(file: TextIO, width: int) -> Console:
    """Return a console of rich that writes what it gets, in a width where the file is no terminal."""
    from rich.console import Console

    return Console(file=file, width=None if file.isatty() else width, highlight=False, markup=False)


def new_table(heads: Sequence[str], *, left: int = 0) -> Table:
    """Return an empty table whose first ``left`` columns are words, the others numbers."""
    from rich.table import Table

    table = Table(header_style="bold")
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index < left else "right", no_wrap=True)
    return table


def write_table(console: Console, table: Table) -> None:
    """Print a table of rich without the blank lines and spaces that rich pads it with."""
    from rich.box import MARKDOWN, SIMPLE_HEAD

    table.box = SIMPLE_HEAD if console.file.isatty() else MARKDOWN
    with console.capture() as captured:
        console.print(table)
    console.file.write("\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip()) + "\n")


def cell_shares(rows: Sequence[Sequence[int]]) -> list[CellShare]:
    """Sum up the samples of each cell; a cell without samples has skew 0."""
    totals = [sum(column) for column in zip(*rows, strict=True)]
    everything = sum(totals)
    shares = []
    for row in rows:
        size = sum(row)
        apart = sum(abs(has / size - total / everything) for has, total in zip(row, totals, strict=True)) if size else 0
        shares.append(CellShare(size, size / everything if everything else 0.0, sum(map(bool, row)), apart / 2))
    return shares


def _checked(counts: Sequence[Sequence[int]], classes: Sequence[object] | None) -> tuple[list[list[int]], list[str]]:
    """Return a table of counts, which may be an array, as lists of integers, and the names of its columns."""
    try:
        rows = [[int(count) for count in row] for row in counts]
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"counts must be a table of integers with a row for each cell ({error})") from error
    if not rows or not rows[0]:
        raise ConfigError("counts are empty; give those of at least one cell and one class")
    for cell, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise ConfigError(f"counts of cell {cell} have {len(row)} classes, those of cell 0 {len(rows[0])}")
        if min(row) < 0:
            raise ConfigError(f"counts of cell {cell} must be 0 or more, got {min(row)}")
    names = [str(name) for name in (range(len(rows[0])) if classes is None else classes)]
    if len(names) != len(rows[0]):
        raise ConfigError(f"there are {len(names)} names for {len(rows[0])} classes; give one for each")
    return rows, names


def _fitting_classes(rows: list[list[int]], names: list[str], width: int) -> int:
    """Count the classes whose columns fit beside the other columns."""
    left = width - len("| cell | ") - sum(len(head) + 3 for head in ("samples", "100.0 %", "classes", "skew"))
    totals = [sum(column) for column in zip(*rows, strict=True)]
    for index, (name, total) in enumerate(zip(names, totals, strict=True)):
        left -= max(len(name), len(str(total))) + 3
        if left < 0:
            return max(1, index)
    return len(names)


def _table(rows: list[list[int]], names: list[str]) -> Table:
    """Return the table: a row for each cell, and one for all."""
    table = new_table(["cell", "samples", "share", "classes", "skew", *names])
    for cell, (row, has) in enumerate(list(zip(rows, cell_shares(rows), strict=True))[:MAX_CELLS]):
        # An empty field is easier to find than a 0.
        entries = (str(count or "") for count in row[: len(names)])
        facts = (str(cell), str(has.samples), f"{100 * has.share:.1f} %", str(has.classes), f"{has.skew:.2f}")
        table.add_row(*facts, *entries)
    if len(rows) > MAX_CELLS:
        table.add_row("...")
    totals = [sum(column) for column in zip(*rows, strict=True)]
    classes = str(sum(total > 0 for total in totals))
    table.add_row("all", str(sum(totals)), "", classes, "", *map(str, totals[: len(names)]), style="bold")
    return table


def partition_figure(
    counts: Sequence[Sequence[int]],
    path: str | os.PathLike[str],
    *,
    classes: Sequence[object] | None = None,
    title: str | None = None,
) -> None:
    """Draw the number of samples of each class in each cell into a file.

    Local. A row is a cell, a column a class; a field is the darker the more samples it has. Bars on the right are the
    cells' sizes. Fields that are large enough show their numbers.

    :param counts: Samples of each class in each cell, (cells, classes): ``partition.table(labels)``.
    :param path: Where to write; ``.svg`` or ``.png``.
    :param classes: Names of the classes; ``None`` numbers them from 0.
    :param title: What the figure shows, such as ``partition.method``.
    :raises ConfigError: if the counts are not such a table, the names are not one for each class, the suffix is
        another, or matplotlib is not installed.
    """
    target = checked_path(path)
    rows, names = _checked(counts, classes)
    has = cell_shares(rows)
    width = min(MAP_MAX, max(MAP_MIN, FIELD_WIDTH * len(names)))
    height = min(MAP_MAX, max(FIELD_HEIGHT, FIELD_HEIGHT * len(rows)))
    is_upright = LETTER * max(map(len, names)) > 0.9 * width / len(names)
    left = EDGE + LETTER * len(f"cell {len(rows) - 1}") + 0.1
    total = sum(one.samples for one in has)
    skew = sum(one.samples * one.skew for one in has) / total if total else 0.0
    classes_text = f"{len(names)} class{'' if len(names) == 1 else 'es'}"
    summary = f"{total:,} samples of {classes_text} in {counted(len(rows), 'cell')}; mean skew {skew:.2f}"
    headings = (title or "Samples of each class", summary)
    foot = FOOT + (LETTER * max(map(len, names)) if is_upright else 0.0)
    heading_width = EDGE + max(TITLE_LETTER * len(headings[0]), LETTER * len(headings[1]))
    whole_width = max(left + width + GAP + BARS, heading_width) + RIGHT
    whole_height = HEAD + height + foot
    figure = new_figure(whole_width, whole_height)
    bottom, tall = foot / whole_height, height / whole_height
    axes = figure.add_axes((left / whole_width, bottom, width / whole_width, tall))
    bars = figure.add_axes(((left + width + GAP) / whole_width, bottom, BARS / whole_width, tall))
    _draw_map(axes, rows=rows, names=names, field=(width / len(names), height / len(rows)), is_upright=is_upright)
    _draw_bars(bars, has, height / len(rows))
    x, y = EDGE / whole_width, [1 - down / whole_height for down in (0.28, 0.57)]
    figure.text(x, y[0], headings[0], fontsize=11, fontweight="bold", color=INK, va="center")
    figure.text(x, y[1], headings[1], fontsize=9, color=MUTED, va="center")
    save(figure, target)


def _draw_map(
    axes: Axes, rows: list[list[int]], names: list[str], field: tuple[float, float], is_upright: bool
) -> None:
    """Draw the fields, with numbers where these fit."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.ticker import FixedLocator

    most = max(1, max(map(max, rows)))
    tints = [tint(PALETTE[0], 0.1), PALETTE[0], "#00304F"]
    # 0 is white, so that it differs from a small number.
    shades = LinearSegmentedColormap.from_list("counts", tints).with_extremes(under="white")
    edges_x, edges_y = range(len(names) + 1), range(len(rows) + 1)
    is_large = field[0] >= NUMBERS_WIDTH and field[1] >= NUMBERS_HEIGHT
    grid: dict[str, Any] = (
        {"edgecolors": GRID, "linewidth": 0.8} if is_large else {"edgecolors": "face", "linewidth": 0.1}
    )
    axes.pcolormesh(edges_x, edges_y, rows, cmap=shades, vmin=1e-9, vmax=most, **grid)
    axes.set_xlim(0, len(names))
    axes.set_ylim(len(rows), 0)
    letters = max(len(str(most)), 1)
    size = min(9.0, 9.0 * field[0] / (LETTER * (letters + 1)))
    if is_large and size >= 6:
        for cell, row in enumerate(rows):
            for index, count in enumerate(row):
                if count:
                    colour = "white" if count > 0.4 * most else INK
                    place = (index + 0.5, cell + 0.5)
                    axes.text(*place, str(count), fontsize=size, color=colour, ha="center", va="center")
    shown_x = range(0, len(names), _label_step(field[0]))
    shown_y = range(0, len(rows), _label_step(field[1]))
    axes.xaxis.set_major_locator(FixedLocator([index + 0.5 for index in shown_x]))
    axes.yaxis.set_major_locator(FixedLocator([cell + 0.5 for cell in shown_y]))
    axes.set_xticklabels([names[index] for index in shown_x], rotation=90 if is_upright else 0)
    axes.set_yticklabels([f"cell {cell}" for cell in shown_y])
    axes.set_xlabel("class", color=INK)
    axes.tick_params(colors=INK, length=0, labelsize=9)
    for spine in axes.spines.values():
        spine.set_color(FRAME)


def _label_step(field: float) -> int:
    """Return the distance of labels in fields: 1, 2 or 5, or ten times as much, and so on."""
    power = 1
    while 5 * power * field < LABEL_STEP:
        power *= 10
    return next(step * power for step in (1, 2, 5) if step * power * field >= LABEL_STEP)


def _draw_bars(axes: Axes, has: list[CellShare], height: float) -> None:
    """Draw the cells' sizes as bars, with numbers where these fit."""
    samples, is_tall = [one.samples for one in has], height >= NUMBERS_HEIGHT
    most = max(1, *samples)
    places = [cell + 0.5 for cell in range(len(has))]
    axes.barh(places, samples, height=0.62 if is_tall else 1.0, color=tint(PALETTE[0], 0.45))
    axes.set_ylim(len(has), 0)
    # Room for what stands behind the longest bar.
    axes.set_xlim(0, most * (1.95 if is_tall else 1.05))
    if is_tall:
        for cell, one in enumerate(has):
            text = f" {one.samples:,} ({100 * one.share:.0f} %)"
            axes.text(one.samples, cell + 0.5, text, fontsize=9, color=INK, ha="left", va="center")
    axes.set_yticks([])
    axes.set_xticks([] if is_tall else [0, most])
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(colors=MUTED, length=0, labelsize=9)
    axes.set_xlabel("samples", color=INK, loc="left")
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color(FRAME)
