"""What ``xffl bench`` has measured, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from xffl.planning.text import describe_world
from xffl.topology import Topology

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["bench_table", "bench_title", "row_name", "size_text"]

PLAIN_WIDTH = 160
"""Columns where there is no terminal: nothing is cut."""
OVERVIEW_NOTES = (
    "ratio: to the all-reduce over the world of the same bytes",
    "across, home: bytes that the busiest rank sends to other cells and to its own, where they are known",
)
PHASES_NOTES = (
    "ms in each phase, on the rank that spends most in it; across: waiting for the slow link; hidden: work behind it",
    "error: what the codec leaves for later rounds, relative to what was to be sent",
)
PHASES = ("vote", "pack", "encode", "post", "across", "combine", "home", "commit")


def bench_table(record: Mapping[str, Any], file: TextIO) -> None:
    """Write what was measured as tables: in colour to a terminal, elsewhere in plain characters.

    Local.

    :param record: What :func:`xffl.aggregation.bench.measure` returns, or what ``bench.json`` holds.
    :param file: Where to write.
    """
    from rich.box import MARKDOWN, SIMPLE_HEAD
    from rich.console import Console

    is_terminal = file.isatty()
    console = Console(file=file, width=None if is_terminal else PLAIN_WIDTH, highlight=False, markup=False)
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    console.print(bench_title(record), style="bold")
    for host in record["hosts"]:
        device = "" if host["device"] == "cpu" else f", {host['device']}"
        console.print(f"{host['host']} ({host['ranks']}): {host['cpu']}, {host['cores']} cores{device}")
    when = f"{record['date']}; load {record['load_before']:.1f} before"
    console.print(f"{record['layout']['backend']}; {versions}; {when}\n")
    tables = [(_overview(record["rows"]), OVERVIEW_NOTES)]
    rounds = [row for row in record["rows"] if row["kind"] == "round"]
    tables += [(_phases(rounds), PHASES_NOTES)] if rounds else []
    for table, notes in tables:
        table.box = SIMPLE_HEAD if is_terminal else MARKDOWN
        with console.capture() as captured:
            console.print(table)
        # rich pads with blank lines and spaces.
        file.write("\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip()) + "\n")
        console.print("\n".join(notes) + "\n", style="dim")
    if not rounds:
        console.print("There is one cell, so there is no round to time: give --federated.")


def bench_title(record: Mapping[str, Any]) -> str:
    """Return what was measured on which ranks, in a line.

    :param record: As for :func:`bench_table`.
    :return: The line.
    """
    layout, model, effort = record["layout"], record["model"], record["effort"]
    topology = Topology(layout["world_size"], tuple(layout["federated_sizes"]), layout["replica_size"])
    return (
        f"{describe_world(topology)}; model of {size_text(model['bytes'])} in {model['tensors']} tensors; "
        f"medians of {effort['repeats']}"
    )


def row_name(row: Mapping[str, Any]) -> str:
    """Return a row's name with its payload, such as ``world, 8 B``; a round's payload is the model.

    :param row: One of a record's rows.
    :return: The name.
    """
    return str(row["name"]) if row["kind"] == "round" else f"{row['name']}, {size_text(row['payload_bytes'])}"


def size_text(count: float) -> str:
    """Write a number of bytes in three digits.

    :param count: Bytes, at least 0.
    :return: Such as ``8 B`` or ``67.4 MB`` (10^6 bytes).
    """
    units = ("B", "kB", "MB", "GB", "TB", "PB")
    power = 0
    while count >= 999.5 and power < len(units) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.3g} {units[power]}"


def _overview(rows: Sequence[Mapping[str, Any]]) -> Table:
    """List all rows by kind: time, rate, ratio and bytes."""
    table = _table(("kind", "what", "ranks", "ms", "GB/s", "ratio", "across", "home"), left=2)
    for row in rows:
        milliseconds = 1e3 * row["seconds"]
        table.add_row(
            row["kind"],
            row_name(row),
            row["ranks"],
            f"{milliseconds:.3f}" if milliseconds < 10 else f"{milliseconds:.1f}",
            f"{row['gbytes_per_s']:.3f}" if row["gbytes_per_s"] >= 5e-4 else "",
            f"{row['ratio']:.2f}",
            *("" if row[way] is None else size_text(row[way]["busiest"]) for way in ("bytes_across", "bytes_home")),
        )
    return table


def _phases(rounds: Sequence[Mapping[str, Any]]) -> Table:
    """List the phases of each round, and what its codec leaves out."""
    names = [name for name in PHASES if any(name in row["phases"] for row in rounds)]
    table = _table(("round", *names, "hidden", "error"), left=1)
    for row in rounds:
        table.add_row(
            row["name"],
            *(f"{1e3 * row['phases'][name]:.1f}" if name in row["phases"] else "" for name in names),
            f"{1e3 * row['hidden']:.1f}",
            "" if row["codec_error"] is None else f"{row['codec_error']:.2g}",
        )
    return table


def _table(heads: Sequence[str], *, left: int) -> Table:
    """Return an empty table whose first ``left`` columns are words."""
    from rich.table import Table

    table = Table(header_style="bold")
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index < left else "right", no_wrap=True)
    return table
