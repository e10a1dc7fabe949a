"""Validation accuracy over the rounds of a run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from xffl.errors import ConfigError
from xffl.planning.drawing import INK, MUTED, PALETTE, checked_path, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["curves_figure"]

NEEDED = ("run", "round", "accuracy")
STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P")


class _Curve(NamedTuple):
    """One line: its name, and its points by round."""

    name: str
    points: tuple[tuple[int, float], ...]


def curves_figure(records: Iterable[Mapping[str, Any]], path: str | os.PathLike[str]) -> None:
    """Draw the validation accuracy of each run over the rounds, one panel for each setting.

    Local. A record without a setting (``None``) belongs to all panels, one with a cell is a line of its own.

    :param records: The dicts of ``metrics.jsonl``: ``run``, ``round`` and ``accuracy`` (0 to 1), and where they apply
        ``setting`` and ``cell``. Others are not read.
    :param path: Where to write; ``.svg`` or ``.png``.
    :raises ConfigError: if there is no record, one lacks a field, the suffix is another, or matplotlib is missing.
    """
    target = checked_path(path)
    rows = list(records)
    if not rows:
        raise ConfigError("there are no records to draw; give those of a metrics.jsonl that has lines")
    for row in rows:
        if missing := [key for key in NEEDED if row.get(key) is None]:
            raise ConfigError(f"record {dict(row)} lacks {', '.join(missing)}; curves need {', '.join(NEEDED)}")
    settings = list(dict.fromkeys(row["setting"] for row in rows if row.get("setting") is not None)) or [None]
    names = list(dict.fromkeys(_name(row) for row in rows))
    figure = new_figure(5.4 * len(settings), 4.6)
    axes_row = figure.subplots(1, len(settings), squeeze=False)[0]
    for axes, setting in zip(axes_row, settings, strict=True):
        curves = _curves(row for row in rows if row.get("setting") in (None, setting))
        _draw_panel(axes, setting, curves, names)
    axes_row[0].set_ylabel("validation accuracy (%)", color=INK)
    drawn = {label: line for axes in axes_row for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        [drawn[name] for name in names], names, loc="lower center", ncols=min(4, len(names)), frameon=False, fontsize=9
    )
    figure.subplots_adjust(left=0.7 / (5.4 * len(settings)), right=0.985, top=0.91, bottom=0.21, wspace=0.16)
    save(figure, target)


def _name(row: Mapping[str, Any]) -> str:
    return str(row["run"]) if row.get("cell") is None else f"{row['run']}, cell {row['cell']}"


def _curves(rows: Iterable[Mapping[str, Any]]) -> list[_Curve]:
    """Gather the points of each line, in the order in which the lines first appear."""
    points: dict[str, dict[int, float]] = {}
    for row in rows:
        points.setdefault(_name(row), {})[int(row["round"])] = float(row["accuracy"])
    return [_Curve(name, tuple(sorted(line.items()))) for name, line in points.items()]


def _draw_panel(axes: Axes, setting: str | None, curves: list[_Curve], names: list[str]) -> None:
    from matplotlib.ticker import MaxNLocator

    for curve in curves:
        index = names.index(curve.name)
        rounds = [number for number, _ in curve.points]
        axes.plot(
            rounds,
            [100 * accuracy for _, accuracy in curve.points],
            label=curve.name,
            color=PALETTE[index % len(PALETTE)],
            linestyle=STYLES[index % len(STYLES)],
            marker=MARKERS[index % len(MARKERS)],
            # Few enough marks to tell lines apart where colours cannot.
            markevery=(index % len(rounds), max(1, len(rounds) // 6)),
            markersize=4.5,
            linewidth=1.8,
        )
    axes.set_title(setting or "", fontsize=11, fontweight="bold", color=INK, loc="left")
    axes.set_xlabel("round", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#E1E5EA", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#B4BCC5")
