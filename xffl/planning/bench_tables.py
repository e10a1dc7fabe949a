"""Measurements of ``xffl bench``, as tables and as bars."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from xffl.checks import shown
from xffl.errors import ConfigError
from xffl.planning.figures import INK, MUTED, PALETTE, checked_path, new_figure, plain_axes, save
from xffl.planning.partition import new_table, plain_console, write_table
from xffl.planning.text import bytes_text, describe_world
from xffl.reading import Fields
from xffl.topology import Topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

__all__ = ["bench_figure", "bench_table"]

PLAIN_WIDTH = 160  # columns where there is no terminal: nothing is cut
OVERVIEW_NOTES = (
    "ratio: to the all-reduce over the world of the same bytes",
    "across, home: bytes that the busiest rank sends to other cells and to its own, where they are known",
)
PHASES_NOTES = (
    "ms in each phase, on the rank that spends most in it; across: waiting for the slow link; hidden: work behind it",
    "error: what the codec leaves for later rounds, relative to what was to be sent",
)
PHASES = ("vote", "pack", "encode", "post", "across", "combine", "home", "commit")

MOST_ROWS = 10_000
"""The most hosts, rows and other items of a record"""
KINDS = ("ring", "all-reduce", "round")
NEEDED = ("kind", "name", "payload_bytes", "seconds", "samples", "ratio")
WIDTH = 8.6
BAR, HEAD, FOOT = 0.3, 0.42, 0.55  # inches: of a bar, and above and below those of a panel
TITLE = 0.4
LEFT, RIGHT = 2.1, 0.25
VALUES = 1.45  # room for what stands behind the longest bar, as a multiple of it


def bench_table(record: Mapping[str, Any], file: TextIO) -> None:
    """Write measurements as tables: in colour to a terminal, elsewhere in plain characters.

    Local.

    :param record: What :func:`xffl.aggregation.bench.measure` returns, or what ``bench.json`` holds.
    :param file: Where to write.
    :raises ConfigError: if the record lacks a field, or one has another type.
    """
    _check_record(record)
    console = plain_console(file, PLAIN_WIDTH)
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    console.print(_title(record), style="bold")
    for host in record["hosts"]:
        device = "" if host["device"] == "cpu" else f", {host['device']}"
        console.print(f"{host['host']} ({host['ranks']}): {host['cpu']}, {host['cores']} cores{device}")
    when = f"{record['date']}; load {record['load_before']:.1f} before"
    link = record["layout"].get("link_backend")
    between = "" if link is None else f", {link} between cells"
    console.print(f"{record['layout']['backend']}{between}; {versions}; {when}\n")
    tables = [(_overview(record["rows"]), OVERVIEW_NOTES)]
    rounds = [row for row in record["rows"] if row["kind"] == "round"]
    tables += [(_phases(rounds), PHASES_NOTES)] if rounds else []
    for table, notes in tables:
        write_table(console, table)
        console.print("\n".join(notes) + "\n", style="dim")
    if not rounds:
        console.print("There is one cell, so there is no round to time: give --federated.")


def _check_record(record: Mapping[str, Any]) -> None:
    """Raise where something that a table or a figure shows is not there, or is of another type."""
    fields = Fields(record, "the record of xffl bench", hint="give what bench.json of xffl bench holds")
    fields.mapping_of("versions", MOST_ROWS, Fields.any)
    for host in fields.list_of("hosts", MOST_ROWS, Fields.mapping):
        for name in ("host", "ranks", "cpu", "device", "cores"):
            host.any(name)
    fields.any("date")
    fields.number("load_before")
    layout = fields.mapping("layout")
    layout.text("backend")
    layout.integer("world_size", 1)
    layout.list_of("federated_sizes", layout.integer("world_size"), Fields.integer, 1)
    layout.any("replica_size")
    fields.mapping("model").integer("bytes")
    fields.mapping("model").integer("tensors")
    fields.mapping("effort").integer("repeats")
    for row in fields.list_of("rows", MOST_ROWS, Fields.mapping):
        _check_row(row)


def _check_row(row: Fields) -> None:
    for name in ("kind", "name", "ranks"):
        row.text(name)
    row.integer("payload_bytes")
    for name in ("seconds", "gbytes_per_s", "ratio"):
        row.number(name, 0)
    for name in ("bytes_across", "bytes_home"):
        if row.any(name) is not None:
            row.mapping(name).number("busiest", 0)
    if row.text("kind") == "round":
        row.mapping_of("phases", MOST_ROWS, Fields.number)
        row.number("hidden", 0)
        if row.any("codec_error") is not None:
            row.real("codec_error")


def _title(record: Mapping[str, Any]) -> str:
    """Describe in a line what was measured on which ranks."""
    layout, model, effort = record["layout"], record["model"], record["effort"]
    topology = Topology(layout["world_size"], tuple(layout["federated_sizes"]), layout["replica_size"])
    return (
        f"{describe_world(topology)}; model of {bytes_text(model['bytes'])} in {model['tensors']} tensors; "
        f"medians of {effort['repeats']}"
    )


def _overview(rows: Sequence[Mapping[str, Any]]) -> Table:
    """List all rows by kind: time, rate, ratio and bytes."""
    table = new_table(("kind", "what", "ranks", "ms", "GB/s", "ratio", "across", "home"), left=2)
    for row in rows:
        milliseconds = 1e3 * row["seconds"]
        table.add_row(
            row["kind"],
            # The payload of a round is the model.
            row["name"] if row["kind"] == "round" else f"{row['name']}, {bytes_text(row['payload_bytes'])}",
            row["ranks"],
            f"{milliseconds:.3f}" if milliseconds < 10 else f"{milliseconds:.1f}",
            f"{row['gbytes_per_s']:.3f}" if row["gbytes_per_s"] >= 5e-4 else "",
            f"{row['ratio']:.2f}",
            *("" if row[way] is None else bytes_text(row[way]["busiest"]) for way in ("bytes_across", "bytes_home")),
        )
    return table


def _phases(rounds: Sequence[Mapping[str, Any]]) -> Table:
    """List the phases of each round, and what its codec leaves out."""
    names = [name for name in PHASES if any(name in row["phases"] for row in rounds)]
    table = new_table(("round", *names, "hidden", "error"), left=1)
    for row in rounds:
        table.add_row(
            row["name"],
            *(f"{1e3 * row['phases'][name]:.1f}" if name in row["phases"] else "" for name in names),
            f"{1e3 * row['hidden']:.1f}",
            "" if row["codec_error"] is None else f"{row['codec_error']:.2g}",
        )
    return table


def bench_figure(record: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Draw the times of a record of ``xffl bench`` as horizontal bars, grouped by kind, one panel for each payload.

    Local. A bar is the median; a thin line goes from the fastest sample to the slowest. A dotted line marks the
    all-reduce over the world, which all are compared with.

    :param record: What :func:`xffl.aggregation.bench.measure` returns, or what ``bench.json`` holds.
    :param path: Where to write; ``.svg`` or ``.png``.
    :raises ConfigError: if there is no row, one lacks a field, the suffix is another, or matplotlib is missing.
    """
    target = checked_path(path)
    rows: list[Mapping[str, Any]] = record["rows"] if isinstance(record.get("rows"), list) else []
    if not rows:
        raise ConfigError("there are no rows to draw; give the record of an xffl bench that has finished")
    for row in rows:
        if missing := [key for key in NEEDED if not isinstance(row, Mapping) or row.get(key) is None]:
            raise ConfigError(f"row {shown(row)} lacks {', '.join(missing)}; the figure needs {', '.join(NEEDED)}")
    _check_record(record)
    for read in Fields(record, "the record of xffl bench").list_of("rows", MOST_ROWS, Fields.mapping):
        read.choice("kind", KINDS)
        if not read.list_of("samples", MOST_ROWS, Fields.number, 0):
            read.fail(f"{read.place('samples')} is empty")
    payloads = sorted({row["payload_bytes"] for row in rows})
    panels = [[row for row in rows if row["payload_bytes"] == payload] for payload in payloads]
    heights = [BAR * (len(panel) + 0.6 * len({row["kind"] for row in panel})) for panel in panels]
    height = TITLE + sum(HEAD + inner + FOOT for inner in heights)
    figure = new_figure(WIDTH, height)
    figure.text(0.02, 1 - 0.3 / height, _title(record), color=INK, fontsize=9.5, fontweight="bold", va="center")
    top = height - TITLE
    for payload, panel, inner in zip(payloads, panels, heights, strict=True):
        top -= HEAD
        axes = figure.add_axes((LEFT / WIDTH, (top - inner) / height, (WIDTH - LEFT - RIGHT) / WIDTH, inner / height))
        has_rounds = any(row["kind"] == "round" for row in panel)
        title = f"messages of {bytes_text(payload)}" + (", rounds of that model" if has_rounds else "")
        _draw_panel(axes, panel, title)
        top -= inner + FOOT
    save(figure, target)


def _draw_panel(axes: Axes, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Draw the bars of one payload, a gap between kinds."""
    place, places = 0.0, []
    for index, row in enumerate(rows):
        place += 0.0 if index == 0 else 1.0 if rows[index - 1]["kind"] == row["kind"] else 1.6
        places.append(place)
    longest = max(max(row["samples"]) for row in rows)
    unit, scale = ("ms", 1e3) if longest >= 1e-3 else ("us", 1e6)
    for row, at in zip(rows, places, strict=True):
        value, samples = scale * row["seconds"], [scale * seconds for seconds in row["samples"]]
        axes.barh(at, value, height=0.72, color=PALETTE[KINDS.index(row["kind"])], zorder=3)
        axes.plot([min(samples), max(samples)], [at, at], color=INK, linewidth=1.0, zorder=4)
        label = f"{value:.3g} {unit}, {row['ratio']:.2f}x"
        # White behind the words, so that the dotted line does not cross them.
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
        x = max(samples) + 0.012 * scale * longest
        axes.text(x, at, label, fontsize=8.5, color=INK, va="center", bbox=box, zorder=5)
        if (row["kind"], row["name"]) == ("all-reduce", "world"):
            axes.axvline(value, color=MUTED, linewidth=1.0, linestyle=":", zorder=2)
    axes.set_yticks(places, [f"{row['kind']}: {row['name']}" for row in rows])
    axes.set_ylim(places[-1] + 0.65, -0.65)
    axes.set_xlim(0, VALUES * scale * longest)
    axes.set_title(title, fontsize=10, fontweight="bold", color=INK, loc="left")
    axes.set_xlabel(f"time ({unit}), and ratio to the all-reduce over the world", color=INK, fontsize=9)
    plain_axes(axes, grid="x")
    for name in axes.get_yticklabels():
        name.set_color(INK)
