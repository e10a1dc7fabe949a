"""Who has what: each cell's samples of each class, as a heat map with the cells' sizes beside it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from xffl.planning.drawing import INK, MUTED, PALETTE, checked_path, new_figure, save, tint
from xffl.planning.partition_table import Holding, checked_classes, checked_counts, holdings
from xffl.planning.text import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["partition_figure"]

# Inches.
FIELD_WIDTH, FIELD_HEIGHT = 0.58, 0.42
MAP_MIN, MAP_MAX = 1.7, 9.0
BARS = 1.9
HEAD, FOOT = 0.9, 0.52
GAP, RIGHT, EDGE = 0.16, 0.15, 0.18
LETTER, TITLE_LETTER = 0.078, 0.112
"""Width of a letter of the labels, and of the title."""

NUMBERS_WIDTH, NUMBERS_HEIGHT = 0.36, 0.2
"""Smallest field that has room for its number."""
LABEL_STEP = 0.2
"""Least distance of two labels of an axis."""


def partition_figure(
    counts: Sequence[Sequence[int]],
    path: str | os.PathLike[str],
    *,
    classes: Sequence[object] | None = None,
    title: str | None = None,
) -> None:
    """Draw how many samples of each class each cell has into a file.

    Local. A row is a cell, a column a class; a field is as dark as it has samples. Bars on the right are the cells'
    sizes. Where fields are large enough, their numbers stand in them.

    :param counts: Samples of each class in each cell, (cells, classes): ``partition.table(labels)``.
    :param path: Where to write; ``.svg`` or ``.png``.
    :param classes: Names of the classes; ``None`` numbers them from 0.
    :param title: What the figure shows, such as ``partition.method``.
    :raises ConfigError: if the counts are no such table, the names are not one for each class, the suffix is another,
        or matplotlib is not installed.
    """
    target = checked_path(path)
    rows = checked_counts(counts)
    names = checked_classes(classes, rows)
    has = holdings(rows)
    width = min(MAP_MAX, max(MAP_MIN, FIELD_WIDTH * len(names)))
    height = min(MAP_MAX, max(FIELD_HEIGHT, FIELD_HEIGHT * len(rows)))
    is_upright = LETTER * max(map(len, names)) > 0.9 * width / len(names)
    left = EDGE + LETTER * len(f"cell {len(rows) - 1}") + 0.1
    headings = (title or "Who has what", _summary(rows, has))
    foot = FOOT + (LETTER * max(map(len, names)) if is_upright else 0.0)
    heading_width = EDGE + max(TITLE_LETTER * len(headings[0]), LETTER * len(headings[1]))
    whole_width = max(left + width + GAP + BARS, heading_width) + RIGHT
    whole_height = HEAD + height + foot
    figure = new_figure(whole_width, whole_height)
    bottom, tall = foot / whole_height, height / whole_height
    axes = figure.add_axes((left / whole_width, bottom, width / whole_width, tall))
    bars = figure.add_axes(((left + width + GAP) / whole_width, bottom, BARS / whole_width, tall))
    _draw_map(axes, rows, names, (width / len(names), height / len(rows)), is_upright)
    _draw_bars(bars, has, height / len(rows))
    x, y = EDGE / whole_width, [1 - down / whole_height for down in (0.28, 0.57)]
    figure.text(x, y[0], headings[0], fontsize=11, fontweight="bold", color=INK, va="center")
    figure.text(x, y[1], headings[1], fontsize=9, color=MUTED, va="center")
    save(figure, target)


def _summary(rows: list[list[int]], has: list[Holding]) -> str:
    """Say in a line how large and how unlike the cells are."""
    sizes = [one.samples for one in has]
    total = sum(sizes)
    mean = sum(one.samples * one.skew for one in has) / total if total else 0.0
    classes = f"{len(rows[0])} class{'' if len(rows[0]) == 1 else 'es'}"
    return f"{total:,} samples of {classes} in {counted(len(rows), 'cell')}; mean skew {mean:.2f}"


def _draw_map(
    axes: Axes, rows: list[list[int]], names: list[str], field: tuple[float, float], is_upright: bool
) -> None:
    """Draw the fields, with numbers where these fit."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.ticker import FixedLocator

    most = max(1, max(map(max, rows)))
    # Nothing is white, so that it differs from little.
    tints = [tint(PALETTE[0], 0.1), PALETTE[0], "#00304F"]
    # Nothing is white, so that it differs from little.
    shades = LinearSegmentedColormap.from_list("counts", tints).with_extremes(under="white")
    edges_x, edges_y = range(len(names) + 1), range(len(rows) + 1)
    is_large = field[0] >= NUMBERS_WIDTH and field[1] >= NUMBERS_HEIGHT
    axes.pcolormesh(
        edges_x,
        edges_y,
        rows,
        cmap=shades,
        vmin=1e-9,
        vmax=most,
        edgecolors="#E1E5EA" if is_large else "face",
        linewidth=0.8 if is_large else 0.1,
    )
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
        spine.set_color("#B4BCC5")


def _label_step(field: float) -> int:
    """Return the distance of labels in fields: 1, 2 or 5, or ten times as much, and so on."""
    power = 1
    while 5 * power * field < LABEL_STEP:
        power *= 10
    return next(step * power for step in (1, 2, 5) if step * power * field >= LABEL_STEP)


def _draw_bars(axes: Axes, has: list[Holding], height: float) -> None:
    """Draw the cells' sizes as bars, with numbers where these fit."""
    most = max(1, max(one.samples for one in has))
    axes.barh(
        [cell + 0.5 for cell in range(len(has))],
        [one.samples for one in has],
        height=0.62 if height >= NUMBERS_HEIGHT else 1.0,
        color=tint(PALETTE[0], 0.45),
    )
    axes.set_ylim(len(has), 0)
    # Room for what stands behind the longest bar.
    axes.set_xlim(0, most * (1.95 if height >= NUMBERS_HEIGHT else 1.05))
    if height >= NUMBERS_HEIGHT:
        for cell, one in enumerate(has):
            text = f" {one.samples:,} ({100 * one.share:.0f} %)"
            axes.text(one.samples, cell + 0.5, text, fontsize=9, color=INK, ha="left", va="center")
    axes.set_yticks([])
    axes.set_xticks([] if height >= NUMBERS_HEIGHT else [0, most])
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(colors=MUTED, length=0, labelsize=9)
    axes.set_xlabel("samples", color=INK, loc="left")
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color("#B4BCC5")
