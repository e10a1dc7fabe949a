"""Validation accuracy over the rounds of the runs, one panel for each setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xffl.planning.figures import INK, colour_of, new_figure, plain_axes, save

STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P")


def curves_figure(records: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw the records of a ``metrics.jsonl``: those without a setting in all panels, those of a cell as a line."""
    settings = list(dict.fromkeys(row["setting"] for row in records if row["setting"] is not None))
    names = list(dict.fromkeys(_name(row) for row in records))
    figure = new_figure(5.4 * len(settings), 4.6)
    axes_row = figure.subplots(1, len(settings), squeeze=False)[0]
    lines: dict[str, Any] = {}
    for axes, setting in zip(axes_row, settings, strict=True):
        points: dict[str, dict[int, float]] = {}
        for row in records:
            if row["setting"] in (None, setting):
                points.setdefault(_name(row), {})[row["round"]] = 100 * row["accuracy"]
        for name, curve in points.items():
            index, rounds = names.index(name), sorted(curve)
            (lines[name],) = axes.plot(
                rounds,
                [curve[number] for number in rounds],
                color=colour_of(index),
                linestyle=STYLES[index % len(STYLES)],
                marker=MARKERS[index % len(MARKERS)],
                # Few enough marks to tell lines apart where colours cannot.
                markevery=(index % len(rounds), max(1, len(rounds) // 6)),
                markersize=4.5,
                linewidth=1.8,
            )
        axes.set_title(setting, fontsize=11, fontweight="bold", color=INK, loc="left")
        axes.set_xlabel("round", color=INK)
        axes.xaxis.get_major_locator().set_params(integer=True)
        plain_axes(axes, grid="y")
    axes_row[0].set_ylabel("validation accuracy (%)", color=INK)
    figure.legend(
        [lines[name] for name in names], names, loc="lower center", ncols=min(4, len(names)), frameon=False, fontsize=9
    )
    figure.subplots_adjust(left=0.7 / (5.4 * len(settings)), right=0.985, top=0.91, bottom=0.21, wspace=0.16)
    save(figure, file)


def _name(row: Mapping[str, Any]) -> str:
    return str(row["run"]) if row["cell"] is None else f"{row['run']}, cell {row['cell']}"
