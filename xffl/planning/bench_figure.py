"""What ``xffl bench`` has measured, as bars."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xffl.errors import ConfigError
from xffl.planning.bench_table import bench_title, size_text
from xffl.planning.drawing import INK, MUTED, PALETTE, checked_path, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["bench_figure"]

KINDS = ("ring", "all-reduce", "round")
NEEDED = ("kind", "name", "payload_bytes", "seconds", "samples", "ratio")
WIDTH = 8.6
BAR, HEAD, FOOT = 0.3, 0.42, 0.55
"""Inches: of a bar, and above and below those of a panel."""
TITLE = 0.4
LEFT, RIGHT = 2.1, 0.25
VALUES = 1.45
"""Room for what stands behind the longest bar, as a multiple of it."""


def bench_figure(record: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Draw the times of a record of ``xffl bench`` as horizontal bars, grouped by kind, one panel for each payload.

    Local. A bar is the median; a thin line goes from the fastest sample to the slowest. A dotted line marks the
    all-reduce over the world, which all are compared with.

    :param record: What :func:`xffl.aggregation.bench.measure` returns, or what ``bench.json`` holds.
    :param path: Where to write; ``.svg`` or ``.png``.
    :raises ConfigError: if there is no row, one lacks a field, the suffix is another, or matplotlib is missing.
    """
    target = checked_path(path)
    rows: list[Mapping[str, Any]] = list(record["rows"])
    if not rows:
        raise ConfigError("there are no rows to draw; give the record of an xffl bench that has finished")
    for row in rows:
        if missing := [key for key in NEEDED if row.get(key) is None]:
            raise ConfigError(f"row {dict(row)} lacks {', '.join(missing)}; the figure needs {', '.join(NEEDED)}")
    payloads = sorted({row["payload_bytes"] for row in rows})
    panels = [[row for row in rows if row["payload_bytes"] == payload] for payload in payloads]
    heights = [BAR * (len(panel) + 0.6 * len({row["kind"] for row in panel})) for panel in panels]
    height = TITLE + sum(HEAD + inner + FOOT for inner in heights)
    figure = new_figure(WIDTH, height)
    figure.text(0.02, 1 - 0.3 / height, bench_title(record), color=INK, fontsize=9.5, fontweight="bold", va="center")
    top = height - TITLE
    for payload, panel, inner in zip(payloads, panels, heights, strict=True):
        top -= HEAD
        axes = figure.add_axes((LEFT / WIDTH, (top - inner) / height, (WIDTH - LEFT - RIGHT) / WIDTH, inner / height))
        _draw_panel(
            axes,
            panel,
            f"messages of {size_text(payload)}"
            + (", rounds of that model" if any(row["kind"] == "round" for row in panel) else ""),
        )
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
    axes.grid(axis="x", color="#E1E5EA", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, length=0, labelsize=9)
    for name in axes.get_yticklabels():
        name.set_color(INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#B4BCC5")
