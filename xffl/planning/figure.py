"""The topology as a figure: cells as panels, ranks as squares, one rail for each piece that crosses between cells.

A square's colour tells which piece of the model it holds. A sender is outlined and drops a line onto the rail of its
piece; a rail joins the senders that exchange it over the slow link.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from xffl.planning.drawing import INK, MUTED, PALETTE, checked_path, new_figure, save, tint, write
from xffl.planning.pieces import Piece, count_pieces, exchange_pieces
from xffl.planning.text import counted, describe_cell, describe_ranks, describe_world
from xffl.topology import Topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["topology_figure"]

# How much of a world is drawn.
MAX_CELLS, MAX_ROWS, MAX_COLUMNS, MAX_PIECES = 4, 4, 8, 8

# Lengths are in units of a square's side; y grows downwards.
INCHES = 0.52
GAP = 0.55
LABELS = 2.1
TITLE = 1.3
HEAD = 2.2
PANEL_GAP = 0.7
PANEL_MIN = 5.4
NOTE = 2.6
RAIL = 0.62
LEGEND_LINE = 0.72
MARGIN = 0.45
WIDTH_MIN = 12.0
"""Room for the legend."""


@dataclass(frozen=True)
class _Panel:
    """Where one cell is drawn, and how much of it."""

    topology: Topology
    cell: int
    left: float

    @property
    def rows(self) -> int:
        replicas = self.topology.replicas(self.cell)
        return replicas if replicas <= MAX_ROWS else MAX_ROWS - 1

    @property
    def columns(self) -> int:
        return min(self.topology.shards(self.cell), MAX_COLUMNS)

    @property
    def hidden_rows(self) -> int:
        return self.topology.replicas(self.cell) - self.rows

    @property
    def hidden_columns(self) -> int:
        return self.topology.shards(self.cell) - self.columns

    @property
    def width(self) -> float:
        squares = LABELS + self.columns * (1 + GAP) + (NOTE if self.hidden_columns else 0.0)
        return max(PANEL_MIN, squares)

    @property
    def bottom(self) -> float:
        return self.y(self.rows) + (0.7 if self.hidden_rows else 0.0)

    def x(self, column: int) -> float:
        """Return the left edge of a column's squares."""
        return self.left + LABELS + column * (1 + GAP)

    def y(self, row: int) -> float:
        """Return the upper edge of a row's squares."""
        return TITLE + HEAD + row * (1 + GAP)


def topology_figure(topology: Topology, path: str | os.PathLike[str]) -> None:
    """Draw the cells, replicas, shards and senders of a world into a file.

    Local. Of large worlds a part is drawn, with notes of how much is left out.

    :param topology: The federation.
    :param path: Where to write; ``.svg`` or ``.png``.
    :raises ConfigError: if the suffix is another, or matplotlib is not installed.
    """
    target = checked_path(path)
    panels = _panels(topology)
    pieces = list(islice(exchange_pieces(topology), MAX_PIECES))
    hidden_pieces = count_pieces(topology) - len(pieces)
    hidden_cells = topology.cells - len(panels)
    bottom = max(panel.bottom for panel in panels)
    rails = bottom + 0.9
    rail_rows = 0 if topology.cells == 1 else len(pieces) + (hidden_pieces > 0)
    legend = (rails + rail_rows * RAIL if rail_rows else bottom) + 0.8
    height = legend + LEGEND_LINE * (0.4 + len(_legend_lines(topology)) - 1)
    span = panels[-1].left + panels[-1].width + (NOTE if hidden_cells else 0.0)
    width = max(WIDTH_MIN, span)
    figure = new_figure((width + 2 * MARGIN) * INCHES, (height + 2 * MARGIN) * INCHES)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(-MARGIN, width + MARGIN)
    axes.set_ylim(height + MARGIN, -MARGIN)
    axes.set_axis_off()
    write(axes, 0.0, 0.35, describe_world(topology), size=12, weight="bold")
    if rail_rows:
        _rectangle(axes, 0.0, rails, span, rail_rows * RAIL, "#E9EDF1", rounding=0.2)
        write(axes, 0.15, rails - 0.3, "slow link between cells", colour=MUTED)
    for panel in panels:
        _draw_panel(axes, panel, pieces, bottom)
    if hidden_cells:
        note = f"… {hidden_cells}\nmore\n{'cell' if hidden_cells == 1 else 'cells'}"
        write(axes, span - NOTE / 2, (TITLE + bottom) / 2, note, size=10, colour=MUTED, align="center")
    for index, piece in enumerate(pieces if rail_rows else ()):
        level = rails + (index + 0.5) * RAIL
        name = f"shard {index}" if topology.is_cut_alike else f"{piece.start} to {piece.stop}"
        write(axes, 0.25, level, name)
        last = _draw_rail(axes, panels, pieces, index, level)
        if hidden_cells:
            _line(axes, [last, span - 0.3], [level, level], _colour(index), dotted=True)
    if rail_rows and hidden_pieces:
        kind = "more shard" if topology.is_cut_alike else "more piece"
        write(axes, 0.25, rails + (len(pieces) + 0.5) * RAIL, f"… {counted(hidden_pieces, kind)}", colour=MUTED)
    _draw_legend(axes, topology, legend)
    save(figure, target)


def _panels(topology: Topology) -> list[_Panel]:
    """Place as many cells as are drawn, from left to right."""
    panels: list[_Panel] = []
    left = 0.0
    for cell in range(topology.cells if topology.cells <= MAX_CELLS else MAX_CELLS - 1):
        panels.append(_Panel(topology, cell, left))
        left += panels[-1].width + PANEL_GAP
    return panels


def _draw_panel(axes: Axes, panel: _Panel, pieces: list[Piece], bottom: float) -> None:
    """Draw a cell: its frame, headings, ranks, and what is left out of it."""
    topology, cell = panel.topology, panel.cell
    _rectangle(
        axes, panel.left, TITLE - 0.2, panel.width, bottom - TITLE + 0.2, "#F7F8FA", edge="#B4BCC5", rounding=0.2
    )
    write(axes, panel.left + 0.3, TITLE + 0.25, f"cell {cell}", size=11, weight="bold")
    write(
        axes,
        panel.left + 0.3,
        TITLE + 0.85,
        f"{describe_ranks(topology, cell)}: {describe_cell(topology, cell)}",
        colour=MUTED,
    )
    for column in range(panel.columns):
        write(axes, panel.x(column) + 0.5, panel.y(0) - 0.4, f"shard {column}", size=8, align="center")
    for row in range(panel.rows):
        write(axes, panel.left + 0.3, panel.y(row) + 0.5, f"replica {row}", size=8)
        for column in range(panel.columns):
            _draw_rank(axes, panel, row, column, pieces)
    if panel.hidden_rows:
        write(
            axes,
            panel.left + 0.3,
            panel.y(panel.rows) + 0.1,
            f"… {counted(panel.hidden_rows, 'more replica')}",
            colour=MUTED,
        )
    if panel.hidden_columns:
        middle = (panel.y(0) + panel.y(panel.rows) - GAP) / 2
        note = f"… {panel.hidden_columns}\nmore\nshards"
        write(axes, panel.x(panel.columns) + NOTE / 2 - 0.3, middle, note, colour=MUTED, align="center")


def _draw_rank(axes: Axes, panel: _Panel, row: int, column: int, pieces: list[Piece]) -> None:
    """Draw a rank as a square with one stripe for each piece that it holds, and what it hands on at home."""
    topology, cell = panel.topology, panel.cell
    rank = topology.rank_of(cell, row, column)
    sender_row = topology.coordinates(topology.sender(cell, column)).replica
    is_sender = topology.cells > 1 and row == sender_row
    x, y, shards = panel.x(column), panel.y(row), topology.shards(cell)
    _rectangle(axes, x, y, 1.0, 1.0, "#D9DEE3")
    for index, piece in enumerate(pieces):
        if piece.shard(topology, cell) == column:
            start, stop = (float(edge * shards) - column for edge in (piece.start, piece.stop))
            _rectangle(axes, x + start, y, stop - start, 1.0, tint(_colour(index), 0.7 if is_sender else 0.3))
    _rectangle(axes, x, y, 1.0, 1.0, "none", edge=INK if is_sender else "#8A949E", line=2.2 if is_sender else 0.8)
    write(axes, x + 0.5, y + 0.5, str(rank), size=10, weight="bold" if is_sender else "normal", align="center")
    if topology.cells > 1 and row < sender_row:
        _arrow(axes, x + 0.5, y + 1 + GAP - 0.06, y + 1 + 0.06)
    elif topology.cells > 1 and row > sender_row:
        _arrow(axes, x + 0.5, y - GAP + 0.06, y - 0.06)


def _draw_rail(axes: Axes, panels: list[_Panel], pieces: list[Piece], index: int, level: float) -> float:
    """Draw the rail of a piece and a line down to it from its sender in each cell; return the rail's right end."""
    colour, dots = _colour(index), []
    for panel in panels:
        topology, cell = panel.topology, panel.cell
        column = pieces[index].shard(topology, cell)
        owned = [other for other, piece in enumerate(pieces) if piece.shard(topology, cell) == column]
        # Lines of one sender never cross: the one that runs farthest right leaves the square highest.
        place = (owned.index(index) + 1) / (len(owned) + 1)
        x = panel.x(column) + 1 + GAP * place
        row = topology.coordinates(topology.sender(cell, column)).replica
        if row < panel.rows:
            y = panel.y(row) + 1 - place
            _line(axes, [panel.x(column) + 1, x, x], [y, y, level], colour)
        else:
            _line(axes, [x, x], [panel.y(panel.rows) - GAP / 2, panel.bottom], colour, dotted=True)
            _line(axes, [x, x], [panel.bottom, level], colour)
        dots.append(x)
    _line(axes, [dots[0], dots[-1]], [level, level], colour, line=2.4)
    axes.plot(dots, [level] * len(dots), "o", color=colour, markersize=5.5, markeredgecolor="white", zorder=5)
    return dots[-1]


def _legend_lines(topology: Topology) -> dict[str, str]:
    """Return the marks to explain and what they mean."""
    if topology.cells == 1:
        return {
            "rank": "a rank; ranks of one colour hold the same shard",
            "": "one cell: nothing crosses between cells",
        }
    lines = {
        "sender": "sender: carries its shard between cells; one colour is one part of the model",
        "rail": "the senders on a rail exchange that part; each sends it once to each of the others",
    }
    if max(topology.replica_counts) > 1:
        lines["arrow"] = "the sender broadcasts the average to its column at home"
    return lines


def _draw_legend(axes: Axes, topology: Topology, top: float) -> None:
    """Explain the marks, one to a line."""
    for index, (mark, meaning) in enumerate(_legend_lines(topology).items()):
        y = top + index * LEGEND_LINE
        if mark == "rank":
            _rectangle(axes, 0.1, y - 0.22, 0.44, 0.44, tint(_colour(0), 0.3), edge="#8A949E")
        elif mark == "sender":
            _rectangle(axes, 0.1, y - 0.22, 0.44, 0.44, tint(_colour(0), 0.7), edge=INK, line=2.2)
        elif mark == "rail":
            ends = [0.05, 0.6]
            _line(axes, ends, [y, y], _colour(0), line=2.4)
            axes.plot(ends, [y, y], "o", color=_colour(0), markersize=5.5, markeredgecolor="white", zorder=5)
        elif mark == "arrow":
            _arrow(axes, 0.32, y - 0.2, y + 0.2)
        write(axes, 1.0, y, meaning)


def _colour(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def _line(axes: Axes, x: list[float], y: list[float], colour: str, *, line: float = 1.6, dotted: bool = False) -> None:
    axes.plot(x, y, color=colour, linewidth=line, linestyle=":" if dotted else "-", solid_joinstyle="round", zorder=4)


def _arrow(axes: Axes, x: float, start: float, stop: float) -> None:
    style = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 8}
    axes.annotate("", (x, stop), (x, start), arrowprops=style, zorder=5)


def _rectangle(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    *,
    edge: str = "none",
    line: float = 0.8,
    rounding: float = 0.0,
) -> None:
    from matplotlib.patches import FancyBboxPatch

    style = f"round,pad=0,rounding_size={rounding}" if rounding else "square,pad=0"
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=fill, edgecolor=edge, linewidth=line, zorder=2)
    )
