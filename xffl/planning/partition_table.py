"""Who has what: each cell's samples of each class, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TextIO

from xffl.errors import ConfigError
from xffl.planning.text import counted

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Holding", "checked_classes", "checked_counts", "holdings", "partition_table"]

PLAIN_WIDTH = 120
"""Columns where there is no terminal."""
MAX_CELLS = 32
"""Rows; of more cells, the last rows are left out."""
NOTE = "skew: how far the cell's mixture of classes is from that of all cells, 0 (the same) to 1 (nothing in common)"


class Holding(NamedTuple):
    """What one cell has, in numbers."""

    samples: int
    share: float
    """Of the samples of all cells, 0 to 1."""
    classes: int
    """Classes of which it has a sample."""
    skew: float
    """Total variation distance between the cell's mixture of classes and that of all cells together, 0 to 1."""


def partition_table(counts: Sequence[Sequence[int]], file: TextIO, *, classes: Sequence[object] | None = None) -> None:
    """Write who has what as a table: in colour to a terminal, elsewhere in plain characters.

    Local. Cells and classes that do not fit are left out, and notes say how many; sums are of all.

    :param counts: Samples of each class in each cell, (cells, classes): ``partition.table(labels)``.
    :param file: Where to write.
    :param classes: Names of the classes; ``None`` numbers them from 0.
    :raises ConfigError: if the counts are no such table, or the names are not one for each class.
    """
    from rich.box import MARKDOWN, SIMPLE_HEAD
    from rich.console import Console

    rows = checked_counts(counts)
    names = checked_classes(classes, rows)
    is_terminal = file.isatty()
    console = Console(file=file, width=None if is_terminal else PLAIN_WIDTH, highlight=False, markup=False)
    shown = _fitting_classes(rows, names, console.width)
    table = _table(rows, names[:shown])
    table.box = SIMPLE_HEAD if is_terminal else MARKDOWN
    with console.capture() as captured:
        console.print(table)
    # rich pads with blank lines and spaces.
    file.write("\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip()) + "\n")
    notes = [NOTE]
    if len(rows) > MAX_CELLS:
        notes.append(f"... {counted(len(rows) - MAX_CELLS, 'more cell')}")
    if shown < len(names):
        left_out = len(names) - shown
        notes.append(f"... {left_out} more class{'' if left_out == 1 else 'es'}: {names[shown]} to {names[-1]}")
    console.print("\n".join(notes), style="dim")


def holdings(counts: Sequence[Sequence[int]]) -> list[Holding]:
    """Sum each cell's samples up.

    :param counts: As for :func:`partition_table`.
    :return: One for each cell. A cell without samples has skew 0.
    :raises ConfigError: if the counts are no such table.
    """
    rows = checked_counts(counts)
    totals = [sum(column) for column in zip(*rows, strict=True)]
    everything = sum(totals)
    found = []
    for row in rows:
        size = sum(row)
        apart = sum(abs(has / size - total / everything) for has, total in zip(row, totals, strict=True)) if size else 0
        share = size / everything if everything else 0.0
        found.append(Holding(size, share, sum(has > 0 for has in row), apart / 2))
    return found


def checked_counts(counts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return a table of counts as lists of ints.

    :param counts: As for :func:`partition_table`, also an array.
    :return: The same numbers.
    :raises ConfigError: if there is no cell or no class, rows differ in length, or a number is below 0.
    """
    try:
        rows = [[int(count) for count in row] for row in counts]
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"counts are no table of whole numbers ({error}); give a row for each cell") from error
    if not rows or not rows[0]:
        raise ConfigError("there are no counts to show; give those of at least one cell and one class")
    for cell, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise ConfigError(
                f"cell {cell} has counts of {len(row)} classes, cell 0 of {len(rows[0])}; give a rectangle"
            )
        if min(row) < 0:
            raise ConfigError(f"cell {cell} has a count of {min(row)}; give numbers of samples, 0 or more")
    return rows


def checked_classes(classes: Sequence[object] | None, counts: Sequence[Sequence[int]]) -> list[str]:
    """Return the names of the classes.

    :param classes: What was given; ``None`` numbers them from 0.
    :param counts: The table that they head.
    :return: A name for each of its columns.
    :raises ConfigError: if there are more or fewer of them.
    """
    names = [str(name) for name in (range(len(counts[0])) if classes is None else classes)]
    if len(names) != len(counts[0]):
        raise ConfigError(f"there are {len(names)} names for {len(counts[0])} classes; give one for each")
    return names


def _fitting_classes(rows: list[list[int]], names: list[str], width: int) -> int:
    """Count the classes whose columns fit beside what is told of each cell."""
    left = width - len("| cell | ") - sum(len(head) + 3 for head in ("samples", "100.0 %", "classes", "skew"))
    totals = [sum(column) for column in zip(*rows, strict=True)]
    for index, (name, total) in enumerate(zip(names, totals, strict=True)):
        left -= max(len(name), len(str(total))) + 3
        if left < 0:
            return max(1, index)
    return len(names)


def _table(rows: list[list[int]], names: list[str]) -> Table:
    """Return the table: a row for each cell, and one for all."""
    from rich.table import Table

    table = Table(header_style="bold")
    for head in ("cell", "samples", "share", "classes", "skew"):
        table.add_column(head, justify="right", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for cell, (row, has) in enumerate(list(zip(rows, holdings(rows), strict=True))[:MAX_CELLS]):
        # A class that the cell lacks is an empty place, which is what one looks for.
        entries = (str(count or "") for count in row[: len(names)])
        table.add_row(
            str(cell), str(has.samples), f"{100 * has.share:.1f} %", str(has.classes), f"{has.skew:.2f}", *entries
        )
    if len(rows) > MAX_CELLS:
        table.add_row("...")
    totals = [sum(column) for column in zip(*rows, strict=True)]
    found = str(sum(total > 0 for total in totals))
    table.add_row("all", str(sum(totals)), "", found, "", *map(str, totals[: len(names)]), style="bold")
    return table
