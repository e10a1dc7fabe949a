"""Figures: what all of them share (matplotlib on demand, colours, saving), and the topology.

In the figure of a topology, a square is a rank and its colour tells which piece of the model it holds. A sender has a
thick outline and a line down to the rail of its piece; a rail joins the senders that exchange it over the slow link.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xffl.errors import ConfigError
from xffl.extras import optional_import
from xffl.files import written_whole
from xffl.planning.text import (
    Piece,
    count_pieces,
    counted,
    describe_cell,
    describe_ranks,
    describe_world,
    exchange_pieces,
    piece_name,
)
from xffl.topology import Topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PALETTE", "checked_path", "colour_of", "new_figure", "plain_axes", "save", "tint", "topology_figure"]

SUFFIXES = (".png", ".svg")
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C6D00", "#999999")
"""Colours that colour-blind readers can tell apart (Okabe and Ito 2008, their yellow and black exchanged)."""
INK = "#1B1F24"  # text and outlines
MUTED = "#626B75"  # what stands back
FRAME = "#B4BCC5"  # frames and axes
GRID = "#E1E5EA"
TEXT: dict[str, Any] = {"size": 9, "color": INK, "weight": "normal", "va": "center", "zorder": 6}


def checked_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a figure, after a check of its suffix."""
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"figure {str(path)!r} has no known format; give a name that ends in {' or '.join(SUFFIXES)}")
    return target


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of a size in inches, which belongs to no window and no global state."""
    with optional_import("report", "figures need matplotlib"):
        from matplotlib.figure import Figure
    return Figure(figsize=(width, height), facecolor="white")


def save(figure: Figure, path: Path) -> None:
    """Write a figure; the same figure gives the same bytes, and text in an SVG stays text."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    is_svg = path.suffix.lower() == ".svg"
    kind = path.suffix.removeprefix(".").lower() or None
    # Aside and then renamed: what has the name, such as a link of somebody else, is replaced and not written to.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "xffl"}), written_whole(path) as file:
        figure.savefig(file, format=kind, dpi=160, metadata={"Date": None} if is_svg else None)


def colour_of(index: int) -> str:
    """Return the colour of a number; colours repeat."""
    return PALETTE[index % len(PALETTE)]


def tint(colour: str, strength: float) -> str:
    """Mix a colour with white: 0 gives white, 1 the colour."""
    parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - (255 - part) * strength):02X}" for part in parts)


def plain_axes(axes: Axes, grid: str = "") -> None:
    """Give axes few lines, and a light grid along ``x``, ``y`` or ``both``."""
    if grid:
        axes.grid(axis=grid, color=GRID, linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=MUTED, length=0, labelsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FRAME)


def draw_text(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Write a text into axes, centred on its height; the style is matplotlib's."""
    axes.text(x, y, text, **{**TEXT, **style})


def draw_rectangle(
    axes: Axes, x: float, y: float, width: float, height: float, fill: str, rounding: float = 0.0, **style: Any
) -> None:
    """Draw a rectangle into axes, also with round corners; the style is matplotlib's."""
    from matplotlib.patches import FancyBboxPatch

    box = f"round,pad=0,rounding_size={rounding}" if rounding else "square,pad=0"
    style = {"edgecolor": "none", "linewidth": 0.8, **style}
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=box, facecolor=fill, zorder=2, **style))


# The topology: how much of a world is drawn.
MAX_CELLS, MAX_ROWS, MAX_COLUMNS, MAX_PIECES = 4, 4, 8, 8

RANK: dict[str, Any] = {"edgecolor": "#8A949E"}
SENDER: dict[str, Any] = {"edgecolor": INK, "linewidth": 2.2}

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
WIDTH_MIN = 12.0  # room for the legend


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

    Local. Of large worlds a part is drawn, with notes that say how much is left out.

    :param topology: The federation.
    :param path: Where to write; ``.svg`` or ``.png``.
    :raises ConfigError: if the suffix is another, or matplotlib is not installed.
    """
    target = checked_path(path)
    panels: list[_Panel] = []
    left = 0.0
    for cell in range(topology.cells if topology.cells <= MAX_CELLS else MAX_CELLS - 1):
        panels.append(_Panel(topology, cell, left))
        left += panels[-1].width + PANEL_GAP
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
    draw_text(axes, 0.0, 0.35, describe_world(topology), size=12, weight="bold")
    if rail_rows:
        draw_rectangle(axes, x=0.0, y=rails, width=span, height=rail_rows * RAIL, fill="#E9EDF1", rounding=0.2)
        draw_text(axes, 0.15, rails - 0.3, "slow link between cells", color=MUTED)
    for panel in panels:
        _draw_panel(axes, panel, pieces, bottom)
    if hidden_cells:
        note = f"… {hidden_cells}\nmore\n{'cell' if hidden_cells == 1 else 'cells'}"
        draw_text(axes, span - NOTE / 2, (TITLE + bottom) / 2, note, size=10, color=MUTED, ha="center")
    for index, piece in enumerate(pieces if rail_rows else ()):
        level = rails + (index + 0.5) * RAIL
        draw_text(axes, 0.25, level, piece_name(topology, index, piece))
        last = _draw_rail(axes, panels=panels, pieces=pieces, index=index, level=level)
        if hidden_cells:
            _line(axes, [last, span - 0.3], [level, level], colour_of(index), dotted=True)
    if rail_rows and hidden_pieces:
        kind = "more shard" if topology.is_cut_alike else "more piece"
        draw_text(axes, 0.25, rails + (len(pieces) + 0.5) * RAIL, f"… {counted(hidden_pieces, kind)}", color=MUTED)
    _draw_legend(axes, topology, legend)
    save(figure, target)


def _draw_panel(axes: Axes, panel: _Panel, pieces: list[Piece], bottom: float) -> None:
    """Draw a cell: its frame, headings, ranks, and what is left out of it."""
    topology, cell, left = panel.topology, panel.cell, panel.left + 0.3
    height = bottom - TITLE + 0.2
    draw_rectangle(
        axes,
        x=panel.left,
        y=TITLE - 0.2,
        width=panel.width,
        height=height,
        fill="#F7F8FA",
        edgecolor=FRAME,
        rounding=0.2,
    )
    draw_text(axes, left, TITLE + 0.25, f"cell {cell}", size=11, weight="bold")
    shape = f"{describe_ranks(topology, cell)}: {describe_cell(topology, cell)}"
    draw_text(axes, left, TITLE + 0.85, shape, color=MUTED)
    for column in range(panel.columns):
        draw_text(axes, panel.x(column) + 0.5, panel.y(0) - 0.4, f"shard {column}", size=8, ha="center")
    for row in range(panel.rows):
        draw_text(axes, left, panel.y(row) + 0.5, f"replica {row}", size=8)
        for column in range(panel.columns):
            _draw_rank(axes, panel=panel, row=row, column=column, pieces=pieces)
    if panel.hidden_rows:
        note = f"… {counted(panel.hidden_rows, 'more replica')}"
        draw_text(axes, left, panel.y(panel.rows) + 0.1, note, color=MUTED)
    if panel.hidden_columns:
        middle = (panel.y(0) + panel.y(panel.rows) - GAP) / 2
        note = f"… {panel.hidden_columns}\nmore\nshards"
        draw_text(axes, panel.x(panel.columns) + NOTE / 2 - 0.3, middle, note, color=MUTED, ha="center")


def _draw_rank(axes: Axes, panel: _Panel, row: int, column: int, pieces: list[Piece]) -> None:
    """Draw a rank as a square with one stripe for each piece that it holds, and the broadcast in its column."""
    topology, cell = panel.topology, panel.cell
    rank = topology.rank_of(cell, row, column)
    sender_row = topology.coordinates(topology.sender(cell, column)).replica
    is_sender = topology.cells > 1 and row == sender_row
    x, y, shards = panel.x(column), panel.y(row), topology.shards(cell)
    draw_rectangle(axes, x=x, y=y, width=1.0, height=1.0, fill="#D9DEE3")
    for index, piece in enumerate(pieces):
        if piece.shard(topology, cell) == column:
            start, stop = (float(edge * shards) - column for edge in (piece.start, piece.stop))
            draw_rectangle(
                axes,
                x=x + start,
                y=y,
                width=stop - start,
                height=1.0,
                fill=tint(colour_of(index), 0.7 if is_sender else 0.3),
            )
    draw_rectangle(axes, x=x, y=y, width=1.0, height=1.0, fill="none", **(SENDER if is_sender else RANK))
    draw_text(axes, x + 0.5, y + 0.5, str(rank), size=10, weight="bold" if is_sender else "normal", ha="center")
    if topology.cells > 1 and row < sender_row:
        _arrow(axes, x + 0.5, y + 1 + GAP - 0.06, y + 1 + 0.06)
    elif topology.cells > 1 and row > sender_row:
        _arrow(axes, x + 0.5, y - GAP + 0.06, y - 0.06)


def _draw_rail(axes: Axes, panels: list[_Panel], pieces: list[Piece], index: int, level: float) -> float:
    """Draw the rail of a piece and a line down to it from its sender in each cell; return the rail's right end."""
    colour, dots = colour_of(index), []
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
        "sender": "sender: sends its shard to the other cells; one colour is one part of the model",
        "rail": "the senders on a rail exchange that part; each sends it once to each of the others",
    }
    if max(topology.replica_counts) > 1:
        lines["arrow"] = "the sender broadcasts the average to its column in the cell"
    return lines


def _draw_legend(axes: Axes, topology: Topology, top: float) -> None:
    """Explain the marks, one to a line."""
    for index, (mark, meaning) in enumerate(_legend_lines(topology).items()):
        y = top + index * LEGEND_LINE
        if mark in ("rank", "sender"):
            strength, style = (0.3, RANK) if mark == "rank" else (0.7, SENDER)
            draw_rectangle(axes, x=0.1, y=y - 0.22, width=0.44, height=0.44, fill=tint(colour_of(0), strength), **style)
        elif mark == "rail":
            ends = [0.05, 0.6]
            _line(axes, ends, [y, y], colour_of(0), line=2.4)
            axes.plot(ends, [y, y], "o", color=colour_of(0), markersize=5.5, markeredgecolor="white", zorder=5)
        elif mark == "arrow":
            _arrow(axes, 0.32, y - 0.2, y + 0.2)
        draw_text(axes, 1.0, y, meaning)


def _line(axes: Axes, x: list[float], y: list[float], colour: str, *, line: float = 1.6, dotted: bool = False) -> None:
    axes.plot(x, y, color=colour, linewidth=line, linestyle=":" if dotted else "-", solid_joinstyle="round", zorder=4)


def _arrow(axes: Axes, x: float, start: float, stop: float) -> None:
    style = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 8}
    axes.annotate("", (x, stop), (x, start), arrowprops=style, zorder=5)
