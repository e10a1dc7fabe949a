"""The mesh inside a cell as a figure: ranks as squares, in frames along its axes, and the other cells beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from xffl.planning.drawing import MUTED, PALETTE, checked_path, new_figure, save, tint, write
from xffl.planning.mesh import COLUMN_AXES, MAX_COLUMNS, MAX_ROWS, MESH_AXES, MOVES, ROW_AXES, Grid, describe_mesh
from xffl.planning.text import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["mesh_figure"]

# Lengths are in units of a square's side; y grows downwards.
INCHES = 0.46
GAP = 0.22
GROUP_GAP = 0.5
"""Between shards, and between stages, parts of sequences and replicas that differ in an outer axis."""
LABELS = 4.6
HEAD = 2.5
LINE = 0.66
MARGIN = 0.4
STUB = 2.4
"""Width of the frame that stands for the other cells."""
WIDTH_MIN = 15.5
"""Room for the legend."""

OUTSIDE = "cells: every so many steps a round averages the parts that ranks at the same place hold"


def mesh_figure(
    axes: Mapping[str, int], path: str | os.PathLike[str], *, cells: int = 1, first_rank: int = 0, cell: int = 0
) -> None:
    """Draw the mesh inside a cell into a file, and what moves along each axis.

    Local. Ranks of one colour belong to one stage of the pipeline. Of a large mesh a part is drawn, with notes of how
    much is left out.

    :param axes: Ranks along the axes.
    :param path: Where to write; ``.svg`` or ``.png``.
    :param cells: Number of cells in the federation.
    :param first_rank: The cell's first rank.
    :param cell: The cell's number.
    :raises ConfigError: if an axis is unknown or has no rank, the suffix is another, or matplotlib is not installed.
    """
    target = checked_path(path)
    grid = Grid(axes, first_rank)
    rows = grid.rows if grid.rows <= MAX_ROWS else MAX_ROWS - 1
    columns = min(grid.columns, MAX_COLUMNS)
    x, right = _places(grid.places(COLUMN_AXES)[:columns], LABELS)
    y, bottom = _places(grid.places(ROW_AXES)[:rows], HEAD + LINE * len(grid.shown(COLUMN_AXES)))
    bottom += LINE * ((rows < grid.rows) + (columns < grid.columns))
    right = max(right, LABELS + 4.0)
    legend = [axis for axis in MESH_AXES if grid.size(axis) > 1]
    height = bottom + 0.9 + LINE * (len(legend) + (cells > 1))
    width = max(WIDTH_MIN, right + (STUB + 1.6 if cells > 1 else 0.3))
    figure = new_figure((width + 2 * MARGIN) * INCHES, (height + 2 * MARGIN) * INCHES)
    area = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    area.set_xlim(-MARGIN, width + MARGIN)
    area.set_ylim(height + MARGIN, -MARGIN)
    area.set_axis_off()
    _square(area, 0.0, 0.0, right, bottom, fill="#F7F8FA", edge="#B4BCC5")
    write(area, 0.3, 0.55, f"cell {cell}", size=11, weight="bold")
    write(area, 0.3, 1.15, describe_mesh(axes), colour=MUTED)
    _draw_ranks(area, grid, x, y)
    notes = [(grid.rows - rows, "more row"), (grid.columns - columns, "more column")]
    for line, (count, what) in enumerate([note for note in notes if note[0]]):
        write(area, 0.3, bottom - LINE * (line + 0.5), f"… {counted(count, what)}", colour=MUTED)
    if cells > 1:
        _draw_others(area, right, bottom, cells)
    for line, axis in enumerate(legend):
        write(area, 0.1, bottom + 0.8 + line * LINE, axis, weight="bold")
        write(area, 3.4, bottom + 0.8 + line * LINE, MOVES[axis])
    if cells > 1:
        write(area, 0.1, bottom + 0.8 + len(legend) * LINE, "federated", weight="bold")
        write(area, 3.4, bottom + 0.8 + len(legend) * LINE, OUTSIDE)
    save(figure, target)


def _places(places: list[dict[str, int]], start: float) -> tuple[list[float], float]:
    """Return where squares begin, with a wider gap where more than the innermost axis changes, and the end."""
    found, at = [], start
    for index, place in enumerate(places):
        if index:
            outer = [axis for axis in place if place[axis] != places[index - 1][axis]][:-1]
            at += 1.0 + GAP + (GROUP_GAP if outer else 0.0)
        found.append(at)
    return found, at + 1.0 + 0.35


def _draw_ranks(area: Axes, grid: Grid, x: list[float], y: list[float]) -> None:
    """Draw the ranks, and the numbers of rows and columns along each axis."""
    heads = grid.shown(COLUMN_AXES)
    for line, axis in enumerate(heads):
        level = y[0] - LINE * (len(heads) - line) + 0.1
        write(area, 0.3, level, axis, size=8, colour=MUTED)
        for left, place in zip(x, grid.places(COLUMN_AXES), strict=False):
            write(area, left + 0.5, level, str(place[axis]), size=8, align="center")
    sides = grid.shown(ROW_AXES)
    for line, axis in enumerate(sides):
        write(area, 0.3 + 1.35 * line, HEAD - 0.45, axis.removeprefix("dp_"), size=8, colour=MUTED)
    for row, (top, at) in enumerate(zip(y, grid.places(ROW_AXES), strict=False)):
        for line, axis in enumerate(sides):
            write(area, 0.3 + 1.35 * line, top + 0.5, str(at[axis]), size=8)
        for column, left in enumerate(x):
            colour = tint(PALETTE[at.get("pp", 0) % len(PALETTE)], 0.35)
            _square(area, left, top, 1.0, 1.0, fill=colour, edge="#8A949E")
            write(area, left + 0.5, top + 0.5, str(grid.rank(row, column)), align="center")


def _draw_others(area: Axes, right: float, bottom: float, cells: int) -> None:
    """Draw a frame for the other cells, and the slow link to them."""
    left, middle = right + 1.4, bottom / 2
    _square(area, left, 0.0, STUB, bottom, fill="#F7F8FA", edge="#B4BCC5")
    others = "the\nother\ncell" if cells == 2 else f"{cells - 1}\nother\ncells"
    write(area, left + STUB / 2, middle, others, align="center", colour=MUTED)
    style = {"arrowstyle": "<|-|>", "color": PALETTE[3], "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0}
    area.annotate("", (left - 0.05, middle), (right + 0.05, middle), arrowprops=style, zorder=5)
    write(area, right + 0.7, middle - 0.75, "slow\nlink", size=8, colour=MUTED, align="center")


def _square(area: Axes, x: float, y: float, width: float, height: float, *, fill: str, edge: str) -> None:
    from matplotlib.patches import Rectangle

    area.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor=edge, linewidth=0.8, zorder=2))
