"""Rounds of runs: on the time axis, what each phase took, and what moved."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from xffl.planning.drawing import INK, MUTED, PALETTE, new_figure
from xffl.run_report.curves import Line, Panel, draw_panels, looks_of, plain_axes, tick_text, time_unit
from xffl.run_report.lines import RoundLine, Series
from xffl.run_report.numbers import label_text, seconds_text
from xffl.run_report.reading import FEDERATION, Run
from xffl.run_report.summary import cell_name, mean_phases

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["phases_figure", "rounds_figure", "traffic_figure"]

STEPS, EXPOSED, BEHIND = "#E1E5EA", PALETTE[3], PALETTE[5]
PHASES = ("vote", "pack", "encode", "across", "combine", "home", "commit", "wait")
"""Each has its colour in all pictures, in the order of the palette."""
MAX_LANES = 16
MAX_BLOCKS = 200
"""Rounds of a lane that are drawn one by one; of more, bins show the shares of time."""
BINS = 240
CLOSE_UP = 4
"""Rounds of the close-up."""
# Inches.
WIDTH, LANE, HEAD, FOOT, LEGEND = 9.6, 0.34, 0.42, 0.55, 0.3
LETTER, EDGE = 0.075, 0.25


class _Lane(NamedTuple):
    """The rounds of one cell."""

    name: str
    rounds: list[RoundLine]
    start: float
    end: float


def rounds_figure(runs: Sequence[Run]) -> tuple[Figure, str]:
    """Draw when each cell trained and when it stood still for a round.

    Local. A row is a cell. Of a single run with more rounds than a few, a second panel looks at some of them closely.

    :param runs: The runs; those without rounds are left out.
    :return: The figure, and what it shows.
    :raises ConfigError: if matplotlib is missing.
    """
    lanes, hidden = _lanes(runs)
    # A run may have nothing but a round that took no time.
    longest = max(1e-3, *(lane.end - lane.start for lane in lanes))
    spans = [(0.0, longest)]
    if len(runs) == 1 and max(len(lane.rounds) for lane in lanes) > 2 * CLOSE_UP:
        spans.append(_close_up(lanes))
    height = len(spans) * (HEAD + LANE * len(lanes) + FOOT) + LEGEND
    figure = new_figure(WIDTH, height)
    left = EDGE + LETTER * max(len(label_text(lane.name)) for lane in lanes)
    told, top = [], height
    for index, span in enumerate(spans):
        top -= HEAD
        inner = LANE * len(lanes)
        axes = figure.add_axes((left / WIDTH, (top - inner) / height, (WIDTH - left - EDGE) / WIDTH, inner / height))
        told += _draw_lanes(axes, lanes, span, is_close=index > 0)
        top -= inner + FOOT
    _legend(figure)
    caption = [
        "Each row is a cell on the wall clock. Grey: local steps. Orange: training stands still for a round (exposed). "
        "Light blue: a round goes on behind local steps (hidden).",
        *dict.fromkeys(told),
    ]
    if len(spans) > 1:
        caption.append("Below: some rounds from the middle, with the local steps between them.")
    return figure, " ".join([*caption, *hidden])


def _lanes(runs: Sequence[Run]) -> tuple[list[_Lane], list[str]]:
    """Choose the rows, and say what is left out."""
    lanes, told = [], []
    with_rounds = [run for run in runs if run.rounds]
    each = max(1, MAX_LANES // len(with_rounds))
    for run in with_rounds:
        assert run.started is not None and run.ended is not None
        cells = sorted(run.rounds)
        for cell in cells[:each]:
            name = cell_name(cell) if len(runs) == 1 else f"{run.name}, {cell_name(cell)}"
            lanes.append(_Lane(name, run.rounds[cell], run.started, run.ended))
        if len(cells) > each:
            told.append(f"The first {each} of the {len(cells)} cells of {run.name} are drawn.")
    told += [f"{run.name} has no rounds." for run in runs if not run.rounds]
    return lanes, told


def _close_up(lanes: list[_Lane]) -> tuple[float, float]:
    """Return a stretch of time around a few rounds in the middle of the first lane."""
    lane = lanes[0]
    middle = len(lane.rounds) // 2
    first, last = lane.rounds[middle - CLOSE_UP // 2], lane.rounds[middle + CLOSE_UP // 2 - 1]
    before = lane.rounds[middle - CLOSE_UP // 2 - 1].time
    return before - lane.start, last.time - lane.start + 0.3 * max(0.0, first.time - first.seconds - before)


def _draw_lanes(axes: Axes, lanes: list[_Lane], span: tuple[float, float], *, is_close: bool) -> list[str]:
    unit, scale = time_unit(span[1] - span[0] if is_close else span[1])
    told = []
    for row, lane in enumerate(lanes):
        end = min(span[1], lane.end - lane.start)
        axes.broken_barh([(span[0] / scale, (end - span[0]) / scale)], (row - 0.36, 0.72), color=STEPS, linewidth=0)
        inside = [
            one
            for one in lane.rounds
            if span[0] <= one.time - lane.start and one.time - one.seconds - lane.start <= span[1]
        ]
        if len(inside) > MAX_BLOCKS:
            _draw_shares(axes, lane, inside, row, scale)
            told.append(
                f"Where a row has more than {MAX_BLOCKS} rounds, it shows the shares of time in {BINS} stretches "
                "instead of single rounds."
            )
        else:
            exposed, behind = _blocks(inside, lane.start, scale)
            axes.broken_barh(behind, (row - 0.36, 0.72), color=BEHIND, linewidth=0)
            axes.broken_barh(exposed, (row - 0.36, 0.72), color=EXPOSED, linewidth=0.4)
        if is_close:
            _write_steps(axes, inside, row, lane, span, scale)
    axes.set_xlim(span[0] / scale, span[1] / scale)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_title(
        "rounds, some of them closely" if is_close else "rounds", fontsize=11, fontweight="bold", color=INK, loc="left"
    )
    plain_axes(axes)
    axes.grid(visible=False)
    axes.set_yticks(range(len(lanes)), [label_text(lane.name) for lane in lanes])
    axes.xaxis.set_major_formatter(tick_text)
    axes.set_xlabel(f"time since the start ({unit})", color=INK)
    return told


def _blocks(
    rounds: list[RoundLine], start: float, scale: float
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return when training stood still, and when rounds went on behind it, as places and widths."""
    exposed, behind = [], []
    for one in rounds:
        begin, end = one.time - one.seconds - start, one.time - start
        if not one.is_delayed:
            exposed.append((begin / scale, one.seconds / scale))
            continue
        # Values are packed at its begin; at its end the merge waits for what is still under way.
        pack = min(one.phases.get("pack", 0.0), one.exposed)
        merge = one.exposed - pack
        exposed += [(begin / scale, pack / scale), ((end - merge) / scale, merge / scale)]
        behind.append(((begin + pack) / scale, one.behind / scale))
    return exposed, behind


def _draw_shares(axes: Axes, lane: _Lane, rounds: list[RoundLine], row: int, scale: float) -> None:
    """Draw the shares of time in stretches: standing still from below, hidden rounds above that."""
    edges = np.linspace(0.0, lane.end - lane.start, BINS + 1)
    shares = []
    for blocks in _blocks(rounds, lane.start, 1.0):
        begins, widths = np.array(blocks or [(0.0, 0.0)]).T
        order = np.argsort(begins)
        begins, ends = begins[order], (begins + widths)[order]
        # How much lies before each edge: blocks that are over, and the begun part of others.
        done = np.array([np.clip(edge - begins, 0.0, ends - begins).sum() for edge in edges])
        shares.append(np.clip(np.diff(done) / np.diff(edges), 0.0, 1.0))
    x = edges / scale
    base = row + 0.36
    exposed = 0.72 * shares[0]
    both = np.minimum(0.72, exposed + 0.72 * shares[1])
    for low, high, colour in ((exposed, both, BEHIND), (np.zeros(BINS), exposed, EXPOSED)):
        axes.stairs(base - high, x, baseline=base - low, fill=True, color=colour, linewidth=0)


def _write_steps(
    axes: Axes, rounds: list[RoundLine], row: int, lane: _Lane, span: tuple[float, float], scale: float
) -> None:
    """Write between two rounds how many local steps lie there, where there is room."""
    for before, after in pairwise(rounds):
        steps = after.step - before.step
        first, last = before.time - lane.start, after.time - after.seconds - lane.start
        if last <= first and after.is_delayed:
            first, last = before.time - lane.start, after.time - lane.start
        if steps > 0 and last - first > 0.07 * (span[1] - span[0]):
            place = ((first + last) / 2 / scale, row)
            axes.text(*place, f"{steps:,} steps", fontsize=8, color=INK, ha="center", va="center", clip_on=True)


def _legend(figure: Figure) -> None:
    from matplotlib.patches import Patch

    names = ((STEPS, "local steps"), (EXPOSED, "training stands still"), (BEHIND, "round behind local steps"))
    figure.legend(
        handles=[Patch(color=colour, label=name) for colour, name in names],
        loc="lower center",
        ncols=3,
        frameon=False,
        fontsize=9,
    )


def phases_figure(runs: Sequence[Run]) -> tuple[Figure, str]:
    """Draw what a round spends its time on, as one bar for each cell.

    Local.

    :param runs: The runs; those without rounds are left out.
    :return: The figure, and what it shows.
    :raises ConfigError: if matplotlib is missing.
    """
    lanes, hidden = _lanes(runs)
    means = [mean_phases(lane.rounds) for lane in lanes]
    names = [name for name in PHASES if any(name in one for one in means)]
    others = sorted({name for one in means for name in one} - set(PHASES))
    height = HEAD + LANE * len(lanes) + FOOT + LEGEND
    figure = new_figure(WIDTH, height)
    left = EDGE + LETTER * max(len(label_text(lane.name)) for lane in lanes)
    inner = LANE * len(lanes) / height
    axes = figure.add_axes((left / WIDTH, (FOOT + LEGEND) / height, (WIDTH - left - 1.6) / WIDTH, inner))
    longest = max(sum(one.values()) for one in means)
    unit, scale = ("s", 1.0) if longest >= 1 else ("ms", 1e-3)
    ends = np.zeros(len(lanes))
    for name in [*names, *others]:
        widths = np.array([one.get(name, 0.0) for one in means]) / scale
        colour = PALETTE[PHASES.index(name)] if name in PHASES else MUTED
        axes.barh(range(len(lanes)), widths, left=ends, height=0.66, color=colour, label=label_text(name))
        ends += widths
    for row, end in enumerate(ends):
        axes.text(end, row, f" {seconds_text(float(end) * scale)}", fontsize=9, color=INK, va="center")
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    plain_axes(axes)
    axes.grid(visible=False)
    axes.set_yticks(range(len(lanes)), [label_text(lane.name) for lane in lanes])
    axes.xaxis.set_major_formatter(tick_text)
    axes.set_xlabel(f"mean time of a round ({unit})", color=INK)
    axes.set_title("phases of a round", fontsize=11, fontweight="bold", color=INK, loc="left")
    figure.legend(loc="lower center", ncols=len(names) + len(others), frameon=False, fontsize=9)
    caption = "What the first rank of each cell spends a round on, in the mean over its rounds."
    if any(one.is_delayed for lane in lanes for one in lane.rounds):
        caption += " Of delayed rounds training waits only for pack, commit and wait; the others go on behind it."
    return figure, " ".join([caption, *hidden])


def traffic_figure(runs: Sequence[Run]) -> tuple[Figure, str]:
    """Draw how many bytes have been sent so far, across cells and at home.

    Local. Of a single run each cell's and their sum are shown, of several the sum of each.

    :param runs: The runs; those without rounds are left out.
    :return: The figure, and what it shows.
    :raises ConfigError: if matplotlib is missing.
    """
    panels, thinning = [], 1
    for field, label in (("bytes_across", "sent across cells"), ("bytes_home", "sent at home")):
        lines: list[Line] = []
        for index, run in enumerate(runs):
            if not run.rounds or run.started is None:
                continue
            cells = sorted(run.rounds) if len(runs) == 1 else []
            looks = looks_of(runs, index, cells, has_all=True)
            for cell in [*cells, *([] if len(run.rounds) == 1 and cells else [FEDERATION])]:
                of_cell = (
                    [one for lane in run.rounds.values() for one in lane] if cell == FEDERATION else run.rounds[cell]
                )
                lines.append(Line(looks[cell], _so_far(of_cell, field, run.started), run.started, is_stairs=True))
        panels.append(Panel(lines, "time", label, is_bytes=True))
    figure, thinning = draw_panels("traffic of rounds", panels, share_y=False)
    told = ["Bytes sent so far, over the slow link between cells (left) and inside cells (right)."]
    told += [f"{run.name} has no rounds." for run in runs if not run.rounds]
    if thinning > 1:
        told.append(f"Of long lines every {thinning:,}th round is drawn, and the last.")
    return figure, " ".join(told)


def _so_far(rounds: list[RoundLine], field: str, start: float) -> Series:
    """Sum what was sent, in the order of time, from 0 at the start."""
    ordered = sorted(rounds, key=lambda one: one.time)
    sums = np.cumsum([0.0, *(getattr(one, field) for one in ordered)])
    steps = [0.0, *(float(one.step) for one in ordered)]
    return Series(np.array(steps), np.array([start, *(one.time for one in ordered)]), sums)
