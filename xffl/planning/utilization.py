"""Utilization over the bandwidth between cells."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from xffl.errors import ConfigError
from xffl.planning.drawing import INK, MUTED, PALETTE, checked_path, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["utilization_figure"]

NEEDED = ("panel", "run", "gbps", "utilization")
STYLES = ("-", "--", "-.", ":")
PANEL, HEIGHT = 4.6, 4.4
"""Inches."""


def utilization_figure(records: Iterable[Mapping[str, Any]], path: str | os.PathLike[str]) -> None:
    """Draw the share of time spent on training over the rate of the link between cells, one panel for each setting.

    Local. Panels and lines appear in the order in which the records name them first.

    :param records: Dicts with ``panel`` (its title), ``run`` (the line's name), ``gbps`` (above 0) and ``utilization``
        (0 to 1). Other fields are not read.
    :param path: Where to write; ``.svg`` or ``.png``.
    :raises ConfigError: if there is no record, one lacks a field, the suffix is another, or matplotlib is missing.
    """
    target = checked_path(path)
    rows = list(records)
    if not rows:
        raise ConfigError("there are no forecasts to draw; give at least one")
    for row in rows:
        if missing := [key for key in NEEDED if row.get(key) is None]:
            raise ConfigError(f"record {dict(row)} lacks {', '.join(missing)}; the figure needs {', '.join(NEEDED)}")
    panels = list(dict.fromkeys(str(row["panel"]) for row in rows))
    names = list(dict.fromkeys(str(row["run"]) for row in rows))
    width = PANEL * len(panels) + 0.4
    figure = new_figure(width, HEIGHT)
    axes_row = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, panel in zip(axes_row, panels, strict=True):
        _draw_panel(axes, panel, [row for row in rows if str(row["panel"]) == panel], names)
    axes_row[0].set_ylabel("time spent on local steps (%)", color=INK)
    drawn = {label: line for axes in axes_row for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    columns = min(3 if len(panels) > 1 else 1, len(names))
    figure.legend([drawn[name] for name in names], names, loc="lower center", ncols=columns, frameon=False, fontsize=9)
    lines = -(-len(names) // columns)
    figure.subplots_adjust(left=0.7 / width, right=0.985, top=0.91, bottom=(0.72 + 0.21 * lines) / HEIGHT, wspace=0.08)
    save(figure, target)


def _draw_panel(axes: Axes, panel: str, rows: list[Mapping[str, Any]], names: list[str]) -> None:
    for index, name in enumerate(names):
        points = sorted(
            (float(row["gbps"]), 100 * float(row["utilization"])) for row in rows if str(row["run"]) == name
        )
        if points:
            axes.plot(
                [rate for rate, _ in points],
                [share for _, share in points],
                label=name,
                color=PALETTE[index % len(PALETTE)],
                linestyle=STYLES[index % len(STYLES)],
                linewidth=1.9,
            )
    axes.set_xscale("log")
    axes.set_ylim(0, 102)
    axes.xaxis.set_major_formatter(lambda rate, _: f"{rate:g}")
    axes.set_title(panel, fontsize=11, fontweight="bold", color=INK, loc="left")
    axes.set_xlabel("link between cells (Gbit/s)", color=INK)
    axes.grid(color="#E1E5EA", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=MUTED, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#B4BCC5")
