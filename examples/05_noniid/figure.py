"""Algorithms compared over several seeds: the accuracy that each ends with and how soon it is good."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xffl.planning.figures import INK, MUTED, PALETTE, new_figure, plain_axes, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Inches.
WIDTH, HEIGHT = 9.6, 5.0
ROW_STEP = 0.16
"""Distance of two seeds' dots in a row, of the row's height."""


@dataclass(frozen=True)
class Result:
    """How an algorithm did, over its seeds.

    ``curve`` has for each round its number and the accuracies' mean, minimum and maximum, 0 to 1; ``finals`` the
    accuracy of each seed after the last round; ``reached`` the first round of each seed that reaches the target.
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


def sum_up_seeds(records: Iterable[Mapping[str, Any]], target: float = 0.9) -> list[Result]:
    """Sum up records (``run``, ``seed``, ``round``, ``accuracy``) by algorithm, in the order of first appearance."""
    lines: dict[str, dict[int, dict[int, float]]] = {}
    for row in records:
        points = lines.setdefault(row["run"], {}).setdefault(row["seed"], {})
        points[row["round"]] = row["accuracy"]
    return [_sum_up(run, list(seeds.values()), target) for run, seeds in lines.items()]


def _sum_up(run: str, seeds: list[dict[int, float]], target: float) -> Result:
    rounds = sorted(seeds[0])
    if any(sorted(points) != rounds for points in seeds):
        raise ValueError(f"the seeds of {run} were measured after different rounds")
    curve = []
    for number in rounds:
        values = [points[number] for points in seeds]
        curve.append((number, statistics.fmean(values), min(values), max(values)))
    return Result(
        run,
        len(seeds),
        tuple(curve),
        tuple(points[rounds[-1]] for points in seeds),
        tuple(next((number for number in rounds if points[number] >= target), None) for points in seeds),
    )


def algorithms_figure(
    records: Iterable[Mapping[str, Any]], file: Path, *, target: float = 0.9, title: str = ""
) -> None:
    """Draw how the accuracy of several algorithms rises, and when each seed reaches a target.

    On the left a line for each algorithm, the mean over its seeds, in a band from their worst to their best. On the
    right a row for each with a dot for each seed at the first round that reaches the target, and a bar at their median;
    hollow dots at the right edge never reach it. The rows' names have the lines' colours.
    """
    found = sum_up_seeds(records, target)
    figure = new_figure(WIDTH, HEIGHT)
    curves = figure.add_axes((0.062, 0.115, 0.515, 0.755))
    dots = figure.add_axes((0.70, 0.115, 0.285, 0.755))
    _draw_curves(curves, found, target)
    _draw_rounds(dots, found, target)
    figure.text(0.018, 0.955, title, fontsize=12, fontweight="bold", color=INK, va="center")
    save(figure, file)


def _draw_curves(axes: Axes, found: list[Result], target: float) -> None:
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
    plain_axes(axes, grid="y")


def _seeds(found: list[Result]) -> str:
    counts = sorted({one.seeds for one in found})
    told = " or ".join(str(count) for count in counts)
    return f"mean of {told} seeds, band: worst to best" if counts != [1] else "one seed"


def _draw_rounds(axes: Axes, found: list[Result], target: float) -> None:
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
    plain_axes(axes, grid="x")
    for colour, label in zip(PALETTE, axes.get_yticklabels(), strict=False):
        label.set_color(colour)
        label.set_fontweight("bold")


def _final(one: Result) -> str:
    return f"{100 * one.final:.1f} %" + (f" ± {100 * one.spread:.1f}" if one.seeds > 1 else "")
