"""The topology as plain text, for terminals and batch logs (ASCII only)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import islice

from xffl.errors import ConfigError
from xffl.planning.pieces import Piece, count_pieces, exchange_pieces
from xffl.topology import Topology

__all__ = ["counted", "describe_cell", "describe_ranks", "describe_world", "topology_text"]

MAX_CELLS = 8
"""Cells drawn in full; of more, only :data:`FEW_CELLS` are."""
FEW_CELLS = 3
MAX_ROWS = 8
MAX_COLUMNS = 16
MIN_WIDTH = 40
INDENT = "  "


def topology_text(topology: Topology, width: int | None = None) -> str:
    """Draw the cells, replicas and shards of a world, who sends each shard, and which senders exchange it.

    Local and pure. Large worlds are elided, and every elision says how much is left out.

    :param topology: The federation.
    :param width: Columns to fill, at least 40; ``None`` takes the terminal's width, 100 where there is no terminal.
    :return: Lines of at most ``width`` ASCII characters.
    :raises ConfigError: if the width is too small for a picture.
    """
    if width is None:
        width = max(MIN_WIDTH, shutil.get_terminal_size((100, 24)).columns)
    if width < MIN_WIDTH:
        raise ConfigError(f"width {width} is too small for a picture of the topology; give at least {MIN_WIDTH}")
    shown = topology.cells if topology.cells <= MAX_CELLS else FEW_CELLS
    blocks = [_cell_block(topology, cell, width) for cell in range(shown)]
    lines = [*_wrap(describe_world(topology), width), "", *_side_by_side(blocks, width)]
    if shown < topology.cells:
        lines += _wrap(_describe_hidden(topology, shown), width)
    if topology.cells > 1:
        told = "[r] is a sender: it carries its shard to the other cells and the average to its column."
        lines += ["", *_wrap(told, width)]
    return "\n".join([*lines, "", *_exchange_lines(topology, width)])


def describe_world(topology: Topology) -> str:
    """Describe the world's shape.

    :param topology: The federation.
    :return: One line: ranks, cells, replicas.
    """
    ranks = counted(topology.world_size, "rank")
    low, high = min(topology.sizes), max(topology.sizes)
    if topology.cells == 1:
        where = "one cell (no federation)"
    elif low == high:
        where = f"{topology.cells} cells of {low}"
    elif topology.cells <= MAX_CELLS:
        where = f"{topology.cells} cells of {', '.join(map(str, topology.sizes[:-1]))} and {topology.sizes[-1]}"
    else:
        where = f"{topology.cells} cells of {low} to {high}"
    if topology.replica_size is None or {topology.replica_size} == set(topology.sizes):
        return f"{ranks} in {where}; each cell is one replica"
    return f"{ranks} in {where}; replicas of {counted(topology.replica_size, 'rank')} (HSDP)"


def describe_cell(topology: Topology, cell: int) -> str:
    """Describe a cell's shape.

    :param topology: The federation.
    :param cell: The cell.
    :return: Such as ``2 replicas x 4 shards``.
    """
    return f"{counted(topology.replicas(cell), 'replica')} x {counted(topology.shards(cell), 'shard')}"


def describe_ranks(topology: Topology, cell: int) -> str:
    """Describe the ranks of a cell.

    :param topology: The federation.
    :param cell: The cell.
    :return: Such as ``ranks 8-15``.
    """
    first, last = topology.offsets[cell], topology.offsets[cell + 1] - 1
    return f"ranks {first}-{last}" if last > first else f"rank {first}"


def counted(number: int, what: str) -> str:
    """Put a number before its noun.

    :param number: How many.
    :param what: The noun, for one of them.
    :return: Such as ``1 rank`` or ``2 ranks``.
    """
    return f"{number} {what}{'' if number == 1 else 's'}"


def _cell_block(topology: Topology, cell: int, width: int) -> list[str]:
    """Draw one cell as a box: a row for each replica, a column for each shard."""
    replicas, shards = topology.replicas(cell), topology.shards(cell)
    last = topology.offsets[cell + 1] - 1
    rows = replicas if replicas <= MAX_ROWS else MAX_ROWS - 1
    cells_wide = max(len(str(last)) + 2, len(str(shards - 1)) + 1) + 1
    labels = max(len("shard"), len(f"replica {rows - 1}"))
    fit = min(MAX_COLUMNS, (width - 4 - labels - len(" ...")) // cells_wide)
    columns = shards if shards <= fit else max(1, fit)
    more = " ..." if columns < shards else ""
    body = ["shard".ljust(labels) + "".join(f"{shard} ".rjust(cells_wide) for shard in range(columns)) + more]
    for replica in range(rows):
        marks = [_mark(topology, cell, replica, shard).rjust(cells_wide) for shard in range(columns)]
        body.append(f"replica {replica}".ljust(labels) + "".join(marks) + more)
    if rows < replicas:
        body.append(f"... {counted(replicas - rows, 'more replica')}")
    if columns < shards:
        body.append(f"... {counted(shards - columns, 'more shard')}")
    return _box(f"cell {cell}: {describe_ranks(topology, cell)}", [describe_cell(topology, cell), *body], width)


def _mark(topology: Topology, cell: int, replica: int, shard: int) -> str:
    rank = topology.rank_of(cell, replica, shard)
    is_sender = topology.cells > 1 and rank == topology.sender(cell, shard)
    return f"[{rank}]" if is_sender else f"{rank} "


def _box(title: str, body: Sequence[str], width: int) -> list[str]:
    inner = min(width - 4, max(len(title) + 2, *map(len, body)))
    return [
        f"+- {title} ".ljust(inner + 3, "-") + "+",
        *(f"| {line[:inner].ljust(inner)} |" for line in body),
        "+" + "-" * (inner + 2) + "+",
    ]


def _side_by_side(blocks: Sequence[Sequence[str]], width: int) -> list[str]:
    """Set blocks next to each other as long as they fit."""
    lines: list[str] = []
    row: list[Sequence[str]] = []
    for block in blocks:
        if row and sum(len(other[0]) + len(INDENT) for other in row) + len(block[0]) > width:
            lines += _join(row)
            row = []
        row.append(block)
    return lines + _join(row)


def _join(row: Sequence[Sequence[str]]) -> list[str]:
    height = max(len(block) for block in row)
    padded = [[*block, *[" " * len(block[0])] * (height - len(block))] for block in row]
    return [INDENT.join(parts).rstrip() for parts in zip(*padded, strict=True)]


def _describe_hidden(topology: Topology, shown: int) -> str:
    hidden = topology.sizes[shown:]
    low, high = min(hidden), max(hidden)
    size = f"{low}" if low == high else f"{low} to {high}"
    ranks = f"ranks {topology.offsets[shown]}-{topology.world_size - 1}"
    return f"... {counted(len(hidden), 'more cell')} of {size} ({ranks})"


def _exchange_lines(topology: Topology, width: int) -> list[str]:
    """List the senders that exchange each piece of the model."""
    if topology.cells == 1:
        return _wrap("There is one cell: nothing crosses between cells.", width)
    count = count_pieces(topology)
    shown = count if count <= MAX_ROWS else MAX_ROWS - 1
    pieces = list(islice(exchange_pieces(topology), shown))
    if topology.is_cut_alike:
        lines = _wrap("Between cells, over the slow link, the senders of each shard exchange it:", width)
        names = [f"shard {shard}" for shard in range(shown)]
        kind = "shard"
    else:
        lines = _wrap(
            "Between cells, over the slow link, senders exchange what their shards have in common (the cells cut the "
            "model differently; shares of the model):",
            width,
        )
        names = [f"{piece.start} to {piece.stop}" for piece in pieces]
        kind = "piece"
    labels = max(map(len, names))
    for name, piece in zip(names, pieces, strict=True):
        lines.append(_owners_line(topology, f"{INDENT}{name.ljust(labels)}  ", piece, width))
    if shown < count:
        lines.append(f"{INDENT}... {counted(count - shown, f'more {kind}')}")
    return lines


def _owners_line(topology: Topology, start: str, piece: Piece, width: int) -> str:
    """Write a piece's owners, one for each cell, as far as they fit."""
    line = start
    for cell in range(topology.cells):
        mark = ("" if cell == 0 else " <-> ") + f"[{piece.owner(topology, cell)}]"
        after = topology.cells - cell - 1
        rest = f" ... {counted(after + 1, 'more cell')}"
        # A mark may stand if it is the last one, or if a later elision still fits behind it.
        if len(line) + len(mark) + (len(rest) if after else 0) > width or (after and cell >= MAX_CELLS):
            return line + rest
        line += mark
    return line


def _wrap(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return lines
