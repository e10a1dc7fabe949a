"""Algorithms compared over several seeds: what each ends with and how soon it is good, in numbers and as a picture."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xffl.errors import ConfigError
from xffl.planning.drawing import INK, MUTED, PALETTE, checked_path, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Standing", "algorithms_figure", "standings"]

NEEDED = ("run", "seed", "round", "accuracy")
# Inches.
WIDTH, HEIGHT = 9.6, 5.0
ROW_STEP = 0.16
"""Distance of two seeds' dots in a row, of the row's height."""


@dataclass(frozen=True)
class Standing:
    """How an algorithm did, over its seeds.

    :param run: The algorithm's name.
    :param seeds: Number of seeds.
    :param curve: For each round its number, and the accuracies' mean, minimum and maximum, 0 to 1.
    :param finals: Accuracy after the last round, for each seed.
    :param reached: First round whose accuracy is the target or more, for each seed; ``None`` where none is.
    """

    run: str
    seeds: int
    curve: tuple[tuple[int, float, float, float], ...]
    finals: tuple[float, ...]
    reached: tuple[int | None, ...]

    @property
    def final(self) -> float:
        """Mean accuracy after the last round."""
        return statistics.fmean(self.finals)

    @property
    def spread(self) -> float:
        """Standard deviation of the accuracy after the last round, of the sample; 0 for a single seed."""
        return statistics.stdev(self.finals) if self.seeds > 1 else 0.0

    @property
    def typical_round(self) -> float:
        """Median over the seeds of the first round that is good enough; infinite where half of them never are."""
        return float(statistics.median(math.inf if first is None else first for first in self.reached))


def standings(records: Iterable[Mapping[str, Any]], target: float = 0.9) -> list[Standing]:
    """Sum up the measurements of several algorithms and seeds; local.

    :param records: Dicts with ``run``, ``seed``, ``round`` and ``accuracy`` (0 to 1). Others are not read.
    :param target: The accuracy that is good enough.
    :return: One for each algorithm, in the order in which they first appear.
    :raises ConfigError: if there is no record, one lacks a field, or the seeds of an algorithm have different rounds.
    """
    lines: dict[str, dict[int, dict[int, float]]] = {}
    for row in records:
        if missing := [key for key in NEEDED if row.get(key) is None]:
            raise ConfigError(f"record {dict(row)} lacks {', '.join(missing)}; give {', '.join(NEEDED)}")
        points = lines.setdefault(str(row["run"]), {}).setdefault(int(row["seed"]), {})
        points[int(row["round"])] = float(row["accuracy"])
    if not lines:
        raise ConfigError("there are no records to sum up; give those of a metrics.jsonl that has lines")
    return [_standing(run, list(seeds.values()), target) for run, seeds in lines.items()]


def _standing(run: str, seeds: list[dict[int, float]], target: float) -> Standing:
    rounds = sorted(seeds[0])
    if any(sorted(points) != rounds for points in seeds):
        raise ConfigError(f"the seeds of {run} were measured after different rounds; let all run to the same end")
    curve = []
    for number in rounds:
        values = [points[number] for points in seeds]
        curve.append((number, statistics.fmean(values), min(values), max(values)))
    return Standing(
        run,
        len(seeds),
        tuple(curve),
        tuple(points[rounds[-1]] for points in seeds),
        tuple(next((number for number in rounds if points[number] >= target), None) for points in seeds),
    )


def algorithms_figure(
    records: Iterable[Mapping[str, Any]], path: str | os.PathLike[str], *, target: float = 0.9, title: str = ""
) -> None:
    """Draw how the accuracy of several algorithms rises, and when each seed reaches a target.

    Local. On the left a line for each algorithm, the mean over its seeds, in a band from their worst to their best. On
    the right a row for each with a dot for each seed at the first round that reaches the target, and a bar at their
    median; hollow dots at the right edge never reach it. The rows' names have the lines' colours.

    :param records: As for :func:`standings`.
    :param path: Where to write; ``.svg`` or ``.png``.
    :param target: The accuracy that is good enough, 0 to 1.
    :param title: What is compared.
    :raises ConfigError: as :func:`standings`, if there are more algorithms than colours, if the suffix is another, or
        if matplotlib is missing.
    """
    file = checked_path(path)
    found = standings(records, target)
    if len(found) > len(PALETTE):
        raise ConfigError(f"{len(found)} algorithms cannot be told apart by {len(PALETTE)} colours; draw fewer at once")
    figure = new_figure(WIDTH, HEIGHT)
    curves = figure.add_axes((0.062, 0.115, 0.515, 0.755))
    dots = figure.add_axes((0.70, 0.115, 0.285, 0.755))
    _draw_curves(curves, found, target)
    _draw_rounds(dots, found, target)
    figure.text(0.018, 0.955, title, fontsize=12, fontweight="bold", color=INK, va="center")
    save(figure, file)


def _draw_curves(axes: Axes, found: list[Standing], target: float) -> None:
    for colour, one in zip(PALETTE, found, strict=False):
        rounds = [point[0] for point in one.curve]
        mean, worst, best = ([100 * point[at] for point in one.curve] for at in (1, 2, 3))
        axes.fill_between(rounds, worst, best, color=colour, alpha=0.10, linewidth=0)
        axes.plot(rounds, mean, color=colour, linewidth=2.0, label=one.run)
    axes.axhline(100 * target, color=MUTED, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.set_ylabel("accuracy (%)", color=INK)
    axes.set_title(_seeds(found), fontsize=9.5, color=MUTED, loc="left")
    # The start is far below where the lines differ.
    most = max(len(one.curve) for one in found)
    low = min(point[1] for one in found for point in one.curve[most // 8 :])
    axes.set_ylim(max(0.0, 100 * low - 6), 100)
    axes.set_xlim(0, max(one.curve[-1][0] for one in found))
    axes.set_xlabel("round", color=INK)
    axes.grid(axis="y", color="#E1E5EA", linewidth=0.8)
    _plain(axes)


def _seeds(found: list[Standing]) -> str:
    counts = sorted({one.seeds for one in found})
    told = " or ".join(str(count) for count in counts)
    return f"mean of {told} seeds, band: worst to best" if counts != [1] else "one seed"


def _draw_rounds(axes: Axes, found: list[Standing], target: float) -> None:
    last = max(one.curve[-1][0] for one in found)
    never = 1.1 * last
    for row, (colour, one) in enumerate(zip(PALETTE, found, strict=False)):
        ordered = sorted(one.reached, key=lambda first: math.inf if first is None else first)
        for index, first in enumerate(ordered):
            # Seeds that reach it in the same round stand above each other.
            y = row + ROW_STEP * (index - (len(ordered) - 1) / 2)
            face = "none" if first is None else colour
            axes.plot(never if first is None else first, y, "o", color=colour, markerfacecolor=face, markersize=5)
        if math.isfinite(one.typical_round):
            axes.plot([one.typical_round] * 2, [row - 0.42, row + 0.42], color=colour, linewidth=1.6, alpha=0.6)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_yticks(range(len(found)))
    axes.set_yticklabels([f"{one.run}\n{_final(one)}" for one in found])
    has_never = any(first is None for one in found for first in one.reached)
    axes.set_xlim(0, (1.08 * never) if has_never else 1.05 * last)
    ticks = [tick for tick in axes.get_xticks() if tick <= last]
    axes.set_xticks([*ticks, never] if has_never else ticks)
    axes.set_xticklabels([f"{tick:.0f}" for tick in ticks] + (["never"] if has_never else []))
    axes.set_xlabel(f"first round with {100 * target:.0f} %", color=INK)
    axes.set_title("each seed, bar: median", fontsize=9.5, color=MUTED, loc="left")
    axes.grid(axis="x", color="#E1E5EA", linewidth=0.8)
    _plain(axes)
    for colour, label in zip(PALETTE, axes.get_yticklabels(), strict=False):
        label.set_color(colour)
        label.set_fontweight("bold")


def _final(one: Standing) -> str:
    return f"{100 * one.final:.1f} %" + (f" ± {100 * one.spread:.1f}" if one.seeds > 1 else "")


def _plain(axes: Axes) -> None:
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, length=0, labelsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#B4BCC5")
