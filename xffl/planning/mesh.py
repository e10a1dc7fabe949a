"""The mesh inside a cell, as plain text and as a figure: which rank stands where along its axes."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from xffl.checks import integer, one_of
from xffl.planning import figures
from xffl.planning.text import MAX_COLUMNS, MAX_ROWS, counted, grid_lines, text_width

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["MESH_AXES", "MOVES", "Grid", "describe_mesh", "mesh_figure", "mesh_text"]

ROW_AXES, COLUMN_AXES = ("pp", "cp", "dp_replicate"), ("dp_shard", "tp")  # that a drawing runs downwards, and across
MESH_AXES = ROW_AXES + COLUMN_AXES
"""All axes, in the order in which ranks are counted: the last one fastest."""

MOVES = {
    "pp": "stages of layers: activations go to the next, their gradients come back",
    "cp": "parts of each sequence: keys and values are gathered in each layer",
    "dp_replicate": "copies of the model: gradients are added up once a step",
    "dp_shard": "shards of the weights: gathered layer by layer, gradients reduced",
    "tp": "parts of each layer: activations are gathered and reduced in each layer",
}
"""What ranks along an axis share, and what moves between them."""

# Lengths are in units of a square's side; y grows downwards.
INCHES = 0.46
GAP = 0.22
GROUP_GAP = 0.5  # between shards, and between stages, parts of sequences and replicas that differ in an outer axis
LABELS = 4.6
HEAD = 2.5
LINE = 0.66
MARGIN = 0.4
STUB = 2.4  # width of the frame that stands for the other cells
WIDTH_MIN = 15.5  # room for the legend

OUTSIDE = "cells: every so many steps a round averages the parts that ranks at the same place hold"


@dataclass(frozen=True)
class Grid:
    """The ranks of a cell in rows and columns; axes of :data:`MESH_AXES` that are left out have 1 rank."""

    axes: Mapping[str, int]
    first_rank: int = 0

    def __post_init__(self) -> None:
        for axis, size in self.axes.items():
            one_of("axis of a mesh", axis, MESH_AXES)
            integer(f"ranks of axis {axis}", size)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return prod(self.size(axis) for axis in ROW_AXES)

    @property
    def columns(self) -> int:
        """Number of columns."""
        return prod(self.size(axis) for axis in COLUMN_AXES)

    def size(self, axis: str) -> int:
        """Return the ranks along an axis."""
        return self.axes.get(axis, 1)

    def rank(self, row: int, column: int) -> int:
        """Return the global rank at a place."""
        return self.first_rank + row * self.columns + column

    def shown(self, among: tuple[str, ...]) -> tuple[str, ...]:
        """Return the axes among some that have more than one rank."""
        return tuple(axis for axis in among if self.size(axis) > 1)

    def places(self, among: tuple[str, ...]) -> list[dict[str, int]]:
        """Return the coordinates of all rows, or of all columns, along the axes that have more than one rank."""
        shown = self.shown(among)
        return [dict(zip(shown, place, strict=True)) for place in product(*(range(self.size(axis)) for axis in shown))]


def describe_mesh(axes: Mapping[str, int]) -> str:
    """Describe a mesh, such as ``pp 2 x dp_shard 4``, or ``1 rank``."""
    grid = Grid(axes)
    return " x ".join(f"{axis} {grid.size(axis)}" for axis in grid.shown(MESH_AXES)) or "1 rank"


def mesh_text(axes: Mapping[str, int], *, first_rank: int = 0, cell: int = 0, width: int | None = None) -> str:
    """Draw the mesh inside a cell.

    Local and pure. Rows are stages, parts of sequences and replicas, columns shards and parts of layers. Of a large
    mesh a part is drawn, with notes that say how much is left out.

    :param axes: Ranks along the axes.
    :param first_rank: The cell's first rank.
    :param cell: The cell's number.
    :param width: Columns of text to fill, at least 40; ``None`` takes the terminal's, 100 where there is none.
    :return: Lines of ASCII characters.
    :raises ConfigError: if an axis is unknown or has no rank, or the width is too small for a picture.
    """
    width = text_width(width, "a mesh")
    grid = Grid(axes, first_rank)
    names = {"dp_replicate": "replica"}
    labels = [
        " ".join(f"{names.get(axis, axis)} {at}" for axis, at in place.items()) or "rank"
        for place in grid.places(ROW_AXES)
    ]
    places = grid.places(COLUMN_AXES)
    heads = {axis: [place[axis] for place in places] for axis in grid.shown(COLUMN_AXES)}
    wide = 2 + max(len(str(grid.rank(grid.rows - 1, grid.columns - 1))), len(str(grid.columns)))
    lines = textwrap.wrap(f"Mesh of cell {cell}: {describe_mesh(axes)}", width, subsequent_indent="  ")
    ranks = grid_lines(heads, labels, grid.columns, grid.rank, wide=wide, room=width - 2, nouns=("row", "column"))
    return "\n".join([*lines, *(f"  {line}" for line in ranks)])


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
    target = figures.checked_path(path)
    grid = Grid(axes, first_rank)
    rows = grid.rows if grid.rows <= MAX_ROWS else MAX_ROWS - 1
    columns = min(grid.columns, MAX_COLUMNS)
    x, right = _places(grid.places(COLUMN_AXES)[:columns], LABELS)
    y, bottom = _places(grid.places(ROW_AXES)[:rows], HEAD + LINE * len(grid.shown(COLUMN_AXES)))
    bottom += LINE * ((rows < grid.rows) + (columns < grid.columns))
    right = max(right, LABELS + 4.0)
    legend = {axis: MOVES[axis] for axis in grid.shown(MESH_AXES)} | ({"federated": OUTSIDE} if cells > 1 else {})
    height = bottom + 0.9 + LINE * len(legend)
    width = max(WIDTH_MIN, right + (STUB + 1.6 if cells > 1 else 0.3))
    figure = figures.new_figure((width + 2 * MARGIN) * INCHES, (height + 2 * MARGIN) * INCHES)
    area = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    area.set_xlim(-MARGIN, width + MARGIN)
    area.set_ylim(height + MARGIN, -MARGIN)
    area.set_axis_off()
    figures.draw_rectangle(area, x=0.0, y=0.0, width=right, height=bottom, fill="#F7F8FA", edgecolor=figures.FRAME)
    figures.draw_text(area, 0.3, 0.55, f"cell {cell}", size=11, weight="bold")
    figures.draw_text(area, 0.3, 1.15, describe_mesh(axes), color=figures.MUTED)
    _draw_ranks(area, grid, x, y)
    notes = [(grid.rows - rows, "more row"), (grid.columns - columns, "more column")]
    for line, (count, what) in enumerate([note for note in notes if note[0]]):
        figures.draw_text(area, 0.3, bottom - LINE * (line + 0.5), f"… {counted(count, what)}", color=figures.MUTED)
    if cells > 1:
        _draw_other_cells(area, right, bottom, cells)
    for line, (axis, meaning) in enumerate(legend.items()):
        figures.draw_text(area, 0.1, bottom + 0.8 + line * LINE, axis, weight="bold")
        figures.draw_text(area, 3.4, bottom + 0.8 + line * LINE, meaning)
    figures.save(figure, target)


def _places(places: list[dict[str, int]], start: float) -> tuple[list[float], float]:
    """Return where squares begin, with a wider gap where more than the innermost axis changes, and the end."""
    ranges, at = [], start
    for index, place in enumerate(places):
        if index:
            outer = [axis for axis in place if place[axis] != places[index - 1][axis]][:-1]
            at += 1.0 + GAP + (GROUP_GAP if outer else 0.0)
        ranges.append(at)
    return ranges, at + 1.0 + 0.35


def _draw_ranks(area: Axes, grid: Grid, x: list[float], y: list[float]) -> None:
    """Draw the ranks, and the numbers of rows and columns along each axis."""
    heads = grid.shown(COLUMN_AXES)
    for line, axis in enumerate(heads):
        level = y[0] - LINE * (len(heads) - line) + 0.1
        figures.draw_text(area, 0.3, level, axis, size=8, color=figures.MUTED)
        for left, place in zip(x, grid.places(COLUMN_AXES), strict=False):
            figures.draw_text(area, left + 0.5, level, str(place[axis]), size=8, ha="center")
    sides = grid.shown(ROW_AXES)
    for line, axis in enumerate(sides):
        figures.draw_text(area, 0.3 + 1.35 * line, HEAD - 0.45, axis.removeprefix("dp_"), size=8, color=figures.MUTED)
    for row, (top, at) in enumerate(zip(y, grid.places(ROW_AXES), strict=False)):
        for line, axis in enumerate(sides):
            figures.draw_text(area, 0.3 + 1.35 * line, top + 0.5, str(at[axis]), size=8)
        for column, left in enumerate(x):
            colour = figures.tint(figures.colour_of(at.get("pp", 0)), 0.35)
            figures.draw_rectangle(area, x=left, y=top, width=1.0, height=1.0, fill=colour, edgecolor="#8A949E")
            figures.draw_text(area, left + 0.5, top + 0.5, str(grid.rank(row, column)), ha="center")


def _draw_other_cells(area: Axes, right: float, bottom: float, cells: int) -> None:
    """Draw a frame for the other cells, and the slow link to them."""
    left, middle = right + 1.4, bottom / 2
    figures.draw_rectangle(area, x=left, y=0.0, width=STUB, height=bottom, fill="#F7F8FA", edgecolor=figures.FRAME)
    others = "the\nother\ncell" if cells == 2 else f"{cells - 1}\nother\ncells"
    figures.draw_text(area, left + STUB / 2, middle, others, ha="center", color=figures.MUTED)
    style = {"arrowstyle": "<|-|>", "color": figures.PALETTE[3], "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0}
    area.annotate("", (left - 0.05, middle), (right + 0.05, middle), arrowprops=style, zorder=5)
    figures.draw_text(area, right + 0.7, middle - 0.75, "slow\nlink", size=8, color=figures.MUTED, ha="center")
