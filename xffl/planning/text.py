"""Text about a federation in ASCII, for terminals and batch logs: the topology, and numbers with their units."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import islice
from typing import NamedTuple

from xffl.errors import ConfigError
from xffl.topology import Topology

__all__ = ["Piece", "bytes_text", "counted", "describe_world", "exchange_pieces", "seconds_text", "topology_text"]

MAX_CELLS, FEW_CELLS = 8, 3  # cells that are drawn in full, and how many are of more
MAX_ROWS = 8
MAX_COLUMNS = 16
MIN_WIDTH = 40
INDENT = "  "


class Piece(NamedTuple):
    """The share of the model from ``start`` to ``stop``, each between 0 and 1."""

    start: Fraction
    stop: Fraction

    def shard(self, topology: Topology, cell: int) -> int:
        """Return the shard of a cell that the piece lies in."""
        return int(self.start * topology.shards(cell))

    def owner(self, topology: Topology, cell: int) -> int:
        """Return the rank that sends the piece to the other cells."""
        return topology.sender(cell, self.shard(topology, cell))


def exchange_pieces(topology: Topology) -> Iterator[Piece]:
    """Yield the pieces of the model that senders exchange, from its start to its end; all tensors count as cut evenly.

    Cells that cut alike exchange shard by shard; cells that cut differently exchange the common refinement of their
    cuts, so that a sender may own several pieces.
    """
    counts = _shard_counts(topology)
    start = Fraction(0)
    while start < 1:
        stop = min(Fraction(int(start * count) + 1, count) for count in counts)
        yield Piece(start, stop)
        start = stop


def count_pieces(topology: Topology) -> int:
    """Count what :func:`exchange_pieces` yields."""
    counts = _shard_counts(topology)
    if len(counts) == 1:
        return counts[0]
    return len({Fraction(shard, count) for count in counts for shard in range(count)})


def _shard_counts(topology: Topology) -> list[int]:
    """Return the different numbers of shards that cells cut the model into."""
    return sorted(set(topology.sizes)) if topology.replica_size is None else [topology.replica_size]


def piece_name(topology: Topology, index: int, piece: Piece) -> str:
    """Name a piece: by its shard where all cells cut the model alike."""
    return f"shard {index}" if topology.is_cut_alike else f"{piece.start} to {piece.stop}"


def topology_text(topology: Topology, width: int | None = None) -> str:
    """Draw the cells, replicas and shards of a world, who sends each shard, and which senders exchange it.

    Local and pure. Of large worlds a part is drawn, and each omission says how much is left out.

    :param topology: The federation.
    :param width: Columns to fill, at least 40; ``None`` takes the terminal's width, 100 where there is no terminal.
    :return: Lines of at most ``width`` ASCII characters.
    :raises ConfigError: if the width is too small for a picture.
    """
    width = text_width(width, "the topology")
    shown = topology.cells if topology.cells <= MAX_CELLS else FEW_CELLS
    blocks = [_cell_block(topology, cell, width) for cell in range(shown)]
    lines = [*_wrap(describe_world(topology), width), "", *_side_by_side(blocks, width)]
    if shown < topology.cells:
        low, high = min(topology.sizes[shown:]), max(topology.sizes[shown:])
        size = f"{low}" if low == high else f"{low} to {high}"
        ranks = f"ranks {topology.offsets[shown]}-{topology.world_size - 1}"
        lines += _wrap(f"... {counted(topology.cells - shown, 'more cell')} of {size} ({ranks})", width)
    if topology.cells > 1:
        legend = "[r] is a sender: it sends its shard to the other cells, and the average to its column."
        lines += ["", *_wrap(legend, width)]
    return "\n".join([*lines, "", *_exchange_lines(topology, width)])


def text_width(width: int | None, what: str) -> int:
    """Return the columns of a text picture: those that were asked for, or the terminal's."""
    if width is None:
        return max(MIN_WIDTH, shutil.get_terminal_size((100, 24)).columns)
    if width < MIN_WIDTH:
        raise ConfigError(f"width {width} is too small for a picture of {what}; give at least {MIN_WIDTH}")
    return width


def describe_world(topology: Topology) -> str:
    """Describe the shape of a world in one line: ranks, cells, replicas."""
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
    """Describe the shape of a cell, such as ``2 replicas x 4 shards``."""
    return f"{counted(topology.replicas(cell), 'replica')} x {counted(topology.shards(cell), 'shard')}"


def describe_ranks(topology: Topology, cell: int) -> str:
    """Describe the ranks of a cell, such as ``ranks 8-15``."""
    first, last = topology.offsets[cell], topology.offsets[cell + 1] - 1
    return f"ranks {first}-{last}" if last > first else f"rank {first}"


def counted(number: int, what: str) -> str:
    """Write a number and its noun, such as ``1 rank`` or ``2 ranks``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def bytes_text(count: float) -> str:
    """Write a number of bytes with three digits and a decimal unit, such as ``3.2 GB``."""
    if not math.isfinite(count):
        return "NaN" if math.isnan(count) else "infinity" if count > 0 else "-infinity"
    units = ("B", "kB", "MB", "GB", "TB", "PB")
    power = 0
    # 999.6 would be written as 1e+03.
    while power < len(units) - 1 and abs(count) / 1000**power >= 999.5:
        power += 1
    scaled = count / 1000**power
    return f"{scaled:,.0f} {units[power]}" if abs(scaled) >= 1000 else f"{scaled:.3g} {units[power]}"


def seconds_text(seconds: float) -> str:
    """Write seconds with three or four digits and a unit, such as ``32.09 s`` or ``10 ms``."""
    if 0 < seconds < 0.9995:  # what three digits would round to 1000 is written in the next unit
        return f"{1e3 * seconds:.3g} ms" if seconds >= 0.9995e-3 else f"{1e6 * seconds:.3g} us"
    return f"{seconds:.4g} s" if seconds < 9999.5 else f"{seconds:.0f} s"


def _cell_block(topology: Topology, cell: int, width: int) -> list[str]:
    """Draw one cell as a box: a row for each replica, a column for each shard."""
    replicas, shards = topology.replicas(cell), topology.shards(cell)
    last = topology.offsets[cell + 1] - 1

    def mark(replica: int, shard: int) -> str:
        rank = topology.rank_of(cell, replica, shard)
        return f"[{rank}]" if topology.cells > 1 and rank == topology.sender(cell, shard) else f"{rank} "

    heads = {"shard": [f"{shard} " for shard in range(shards)]}
    labels = [f"replica {replica}" for replica in range(replicas)]
    wide = max(len(str(last)) + 2, len(str(shards - 1)) + 1) + 1
    grid = grid_lines(heads, labels, shards, mark, wide=wide, room=width - 4, nouns=("replica", "shard"))
    body = [describe_cell(topology, cell), *grid]
    title = f"cell {cell}: {describe_ranks(topology, cell)}"
    inner = min(width - 4, max(len(title) + 2, *map(len, body)))
    return [
        f"+- {title} ".ljust(inner + 3, "-") + "+",
        *(f"| {line[:inner].ljust(inner)} |" for line in body),
        "+" + "-" * (inner + 2) + "+",
    ]


def grid_lines(
    heads: Mapping[str, Sequence[object]],
    labels: Sequence[str],
    columns: int,
    mark: Callable[[int, int], object],
    *,
    wide: int,
    room: int,
    nouns: tuple[str, str],
) -> list[str]:
    """Write marks in rows and columns of a width, below heads, as far as they fit, and how much is left out."""
    rows = len(labels) if len(labels) <= MAX_ROWS else MAX_ROWS - 1
    indent = max(map(len, [*labels[:rows], *heads]))
    fit = min(MAX_COLUMNS, (room - indent - len(" ...")) // wide)
    shown = columns if columns <= fit else max(1, fit)
    more = " ..." if shown < columns else ""
    table = [*heads.items(), *((labels[row], [mark(row, column) for column in range(shown)]) for row in range(rows))]
    lines = [
        label.ljust(indent) + "".join(str(one).rjust(wide) for one in line[:shown]) + more for label, line in table
    ]
    for left_out, noun in zip((len(labels) - rows, columns - shown), nouns, strict=True):
        if left_out:
            lines.append(f"... {counted(left_out, f'more {noun}')}")
    return lines


def _side_by_side(blocks: Sequence[Sequence[str]], width: int) -> list[str]:
    """Set blocks next to each other as long as they fit."""
    rows: list[list[Sequence[str]]] = []
    for block in blocks:
        if not rows or sum(len(other[0]) + len(INDENT) for other in rows[-1]) + len(block[0]) > width:
            rows.append([])
        rows[-1].append(block)
    lines = []
    for row in rows:
        height = max(map(len, row))
        padded = [[*block, *[" " * len(block[0])] * (height - len(block))] for block in row]
        lines += [INDENT.join(parts).rstrip() for parts in zip(*padded, strict=True)]
    return lines


def _exchange_lines(topology: Topology, width: int) -> list[str]:
    """List the senders that exchange each piece of the model."""
    if topology.cells == 1:
        return _wrap("There is one cell: nothing crosses between cells.", width)
    count = count_pieces(topology)
    shown = count if count <= MAX_ROWS else MAX_ROWS - 1
    pieces = list(islice(exchange_pieces(topology), shown))
    kind, text = "shard", "Between cells, over the slow link, the senders of each shard exchange it:"
    if not topology.is_cut_alike:
        kind = "piece"
        text = (
            "Between cells, over the slow link, senders exchange what their shards have in common (the cells cut the "
            "model differently; shares of the model):"
        )
    names = [piece_name(topology, index, piece) for index, piece in enumerate(pieces)]
    labels = max(map(len, names))
    starts = [f"{INDENT}{name.ljust(labels)}  " for name in names]
    lines = _wrap(text, width)
    lines += [_owners_line(topology, start, piece, width) for start, piece in zip(starts, pieces, strict=True)]
    if shown < count:
        lines.append(f"{INDENT}... {counted(count - shown, f'more {kind}')}")
    return lines


def _owners_line(topology: Topology, start: str, piece: Piece, width: int) -> str:
    """Write the owners of a piece, one for each cell, as far as they fit."""
    line = start
    for cell in range(topology.cells):
        mark = ("" if cell == 0 else " <-> ") + f"[{piece.owner(topology, cell)}]"
        after = topology.cells - cell - 1
        rest = f" ... {counted(after + 1, 'more cell')}"
        # A mark may stand if it is the last one, or if the note of what is left out still fits behind it.
        if len(line) + len(mark) + (len(rest) if after else 0) > width or (after and cell >= MAX_CELLS):
            return line + rest
        line += mark
    return line


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
