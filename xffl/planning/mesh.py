"""The mesh inside a cell: which rank stands where along its axes, as plain text."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

from xffl.checks import integer
from xffl.errors import ConfigError
from xffl.planning.text import MIN_WIDTH, counted

__all__ = [
    "COLUMN_AXES",
    "MAX_COLUMNS",
    "MAX_ROWS",
    "MESH_AXES",
    "MOVES",
    "ROW_AXES",
    "Grid",
    "describe_mesh",
    "mesh_text",
]

ROW_AXES = ("pp", "cp", "dp_replicate")
"""Axes that a drawing runs downwards, the outer ones first."""

COLUMN_AXES = ("dp_shard", "tp")
"""Axes that a drawing runs across."""

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

MAX_ROWS = 8
"""Rows that are drawn; of more, one less and a note."""

MAX_COLUMNS = 16
"""Columns that are drawn."""


@dataclass(frozen=True)
class Grid:
    """The ranks of a cell in rows and columns.

    :param axes: Ranks along each of :data:`MESH_AXES`, by name; those left out have 1.
    :param first_rank: The cell's first rank.
    :raises ConfigError: if an axis is unknown or has no rank.
    """

    axes: Mapping[str, int]
    first_rank: int = 0

    def __post_init__(self) -> None:
        for axis, size in self.axes.items():
            if axis not in MESH_AXES:
                raise ConfigError(f"axis {axis!r} is none of {', '.join(MESH_AXES)}")
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
    """Describe a mesh.

    :param axes: Ranks along the axes.
    :return: Such as ``pp 2 x dp_shard 4``, or ``1 rank``.
    """
    grid = Grid(axes)
    return " x ".join(f"{axis} {grid.size(axis)}" for axis in grid.shown(MESH_AXES)) or "1 rank"


def mesh_text(axes: Mapping[str, int], *, first_rank: int = 0, cell: int = 0, width: int | None = None) -> str:
    """Draw the mesh inside a cell.

    Local and pure. Rows are stages, parts of sequences and replicas, columns shards and parts of layers. Of a large
    mesh a part is drawn, and what is left out is told.

    :param axes: Ranks along the axes.
    :param first_rank: The cell's first rank.
    :param cell: The cell's number.
    :param width: Columns of text to fill, at least 40; ``None`` takes the terminal's, 100 where there is none.
    :return: Lines of ASCII characters.
    :raises ConfigError: if an axis is unknown or has no rank, or the width is too small for a picture.
    """
    if width is None:
        width = max(MIN_WIDTH, shutil.get_terminal_size((100, 24)).columns)
    if width < MIN_WIDTH:
        raise ConfigError(f"width {width} is too small for a picture of a mesh; give at least {MIN_WIDTH}")
    grid = Grid(axes, first_rank)
    labels = [" ".join(f"{_brief(axis)} {at}" for axis, at in p.items()) or "rank" for p in grid.places(ROW_AXES)]
    rows = grid.rows if grid.rows <= MAX_ROWS else MAX_ROWS - 1
    heads = grid.shown(COLUMN_AXES)
    indent = max([len(label) for label in labels[:rows]] + [len(axis) for axis in heads])
    wide = 2 + max(len(str(grid.rank(grid.rows - 1, grid.columns - 1))), len(str(grid.columns)))
    fit = min(MAX_COLUMNS, (width - 2 - indent - len(" ...")) // wide)
    columns = grid.columns if grid.columns <= fit else max(1, fit)
    more = " ..." if columns < grid.columns else ""
    lines = textwrap.wrap(f"Mesh of cell {cell}: {describe_mesh(axes)}", width, subsequent_indent="  ")
    for axis in heads:
        numbers = [place[axis] for place in grid.places(COLUMN_AXES)[:columns]]
        lines.append("  " + axis.ljust(indent) + "".join(str(number).rjust(wide) for number in numbers) + more)
    for row in range(rows):
        ranks = "".join(f"{grid.rank(row, column)}".rjust(wide) for column in range(columns))
        lines.append("  " + labels[row].ljust(indent) + ranks + more)
    if rows < grid.rows:
        lines.append(f"  ... {counted(grid.rows - rows, 'more row')}")
    if columns < grid.columns:
        lines.append(f"  ... {counted(grid.columns - columns, 'more column')}")
    return "\n".join(lines)


def _brief(axis: str) -> str:
    return "replica" if axis == "dp_replicate" else axis
