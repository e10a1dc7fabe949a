"""Schedules of rounds: how many local steps each cell makes until the next one.

A schedule is computed from what all ranks know: the number of rounds so far and the report of the last round to which
cells gave something. So cells need not communicate to agree on the next round, and may make different numbers of steps
between the same two rounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xffl.aggregation.algorithms.every_steps import EverySteps, Schedule, schedule_of
from xffl.aggregation.report import RoundReport
from xffl.checks import integer, integer_fields, number
from xffl.errors import ConfigError

__all__ = ["Balanced", "Divergence", "EveryEpochs", "EverySeconds", "EverySteps", "PerCell", "Schedule", "Warmup"]


@dataclass(frozen=True)
class EveryEpochs(Schedule):
    """Meet after whole passes over the data; cells with loaders of different lengths make different numbers of steps.

    :param epochs: Passes between two rounds, at least 1.
    :param steps_per_epoch: Local steps of a pass: the length of a rank's loader, divided by the batches that are
        accumulated for a step; one number for all cells, or one for each.
    """

    epochs: int
    steps_per_epoch: int | Sequence[int]

    def __post_init__(self) -> None:
        integer_fields(self, "epochs", hint="give the passes between two rounds")
        object.__setattr__(self, "steps_per_epoch", _counts("steps_per_epoch", self.steps_per_epoch))

    def check(self, cells: int) -> None:  # noqa: D102
        _check_cells("steps_per_epoch", self.steps_per_epoch, cells)

    def steps(self, rounds: int, cell: int, report: RoundReport | None) -> int:  # noqa: D102
        steps = self.steps_per_epoch
        return self.epochs * (steps[cell] if isinstance(steps, Sequence) else steps)


@dataclass(frozen=True)
class EverySeconds(Schedule):
    """Meet after a time, which each cell converts to local steps by its measured time of a step.

    The times come from the vote of the last round, so nothing more is sent, all ranks of a cell count the same number
    of steps, and fast and slow cells arrive together.

    :param seconds: Seconds of local steps between two rounds.
    :param first: Local steps before the first round, and of a cell whose steps were not measured.
    """

    seconds: float
    first: int = 10

    def __post_init__(self) -> None:
        number("seconds", self.seconds, above=0.0, hint="give the time between two rounds")
        integer_fields(self, "first", hint="give the local steps before the first round")

    def steps(self, rounds: int, cell: int, report: RoundReport | None) -> int:  # noqa: D102
        step_seconds = 0.0 if report is None else report.step_seconds[cell]
        return max(1, round(self.seconds / step_seconds)) if step_seconds > 0 else self.first


@dataclass(frozen=True)
class Balanced(Schedule):
    """Share out the local steps so that fast and slow cells arrive together.

    The steps of a cell are proportional to its speed, as measured for the last round's vote, and their mean over the
    cells stays ``every``. Use ``combine="fednova"``, which accounts for the different numbers of steps.

    :param every: Local steps between two rounds, as a mean over the cells; before anything was measured, of each.
    """

    every: int

    def __post_init__(self) -> None:
        integer_fields(self, "every", hint="give the mean number of local steps between two rounds")

    def steps(self, rounds: int, cell: int, report: RoundReport | None) -> int:  # noqa: D102
        step_seconds = () if report is None else report.step_seconds
        # A cell without a measured time (it made no step) keeps ``every`` steps, and the others share out theirs.
        speeds = {index: 1.0 / seconds for index, seconds in enumerate(step_seconds) if seconds > 0}
        return share_out(self.every * len(speeds), speeds)[cell] if cell in speeds else self.every


def share_out(total: int, parts: Mapping[int, float]) -> dict[int, int]:
    """Share out a number in proportion, at least 1 to each, so that the sum is kept."""
    free = dict(parts)
    shares: dict[int, int] = {}
    exact: dict[int, float] = {}
    while free:
        rest, whole = total - len(shares), sum(free.values())
        exact = {taker: rest * (part / whole) for taker, part in free.items()}
        low = [taker for taker, share in exact.items() if share < 1.0]
        if not low:
            break
        shares.update(dict.fromkeys(low, 1))  # this leaves less for the others, so compute their shares again
        free = {taker: part for taker, part in free.items() if taker not in shares}
    shares.update({taker: math.floor(exact[taker]) for taker in free})
    left = total - sum(shares.values())
    for taker in sorted(free, key=lambda taker: (math.floor(exact[taker]) - exact[taker], taker))[:left]:
        shares[taker] += 1
    return shares


@dataclass(frozen=True)
class PerCell(Schedule):
    """Meet after a fixed number of local steps of each cell.

    :param counts: Local steps by cell, at least 1 each.
    """

    counts: Sequence[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", _counts("counts", tuple(self.counts)))

    def check(self, cells: int) -> None:  # noqa: D102
        _check_cells("counts", self.counts, cells)

    def steps(self, rounds: int, cell: int, report: RoundReport | None) -> int:  # noqa: D102
        return self.counts[cell]


@dataclass(frozen=True)
class Divergence(Schedule):
    """Meet only if the models have moved far enough since the last round.

    After every ``every`` local steps the cells exchange how far they are from the last agreed model: a vote of a few
    bytes a rank. The round takes place if the root mean square of these L2 distances, with the cells' weights, is at
    least the threshold; otherwise training goes on, and the steps count in the next round (dynamic averaging, Kamp et
    al., 2018, arXiv 1807.03210). Each rank keeps the last agreed values of what it holds in fp32; an aggregator that is
    made beforehand needs ``norms=True``.

    :param every: Local steps between two checks, at least 1.
    :param threshold: Least distance for a round, in the units of the weights.
    """

    has_threshold = True

    every: int
    threshold: float

    def __post_init__(self) -> None:
        integer_fields(self, "every", hint="give the local steps between two checks")
        number("threshold", self.threshold, above=0.0, hint="give the least distance for a round")

    def steps(self, rounds: int, cell: int, report: RoundReport | None) -> int:  # noqa: D102
        return self.every

    def least_divergence(self, rounds: int) -> float | None:  # noqa: D102
        return self.threshold


@dataclass(frozen=True)
class Warmup(Schedule):
    """Meet more often at first, while the models still change fast.

    :param rounds: Rounds of the warm-up, at least 1.
    :param every: Local steps between two of them, at least 1.
    :param then: What follows: local steps, a schedule, or its name with options.
    """

    rounds: int
    every: int
    then: int | str | Mapping[str, Any] | Schedule

    def __post_init__(self) -> None:
        integer_fields(self, "rounds", hint="give the rounds of the warm-up")
        integer_fields(self, "every", hint="give the local steps between two rounds of the warm-up")
        object.__setattr__(self, "then", schedule_of(self.then))

    @property
    def _next(self) -> Schedule:
        assert isinstance(self.then, Schedule), "__post_init__ has made it a schedule"
        return self.then

    @property
    def has_threshold(self) -> bool:  # type: ignore[override]  # noqa: D102
        return self._next.has_threshold

    def check(self, cells: int) -> None:  # noqa: D102
        self._next.check(cells)

    def steps(self, rounds: int, cell: int, report: RoundReport | None) -> int:  # noqa: D102
        return self.every if rounds < self.rounds else self._next.steps(rounds - self.rounds, cell, report)

    def least_divergence(self, rounds: int) -> float | None:  # noqa: D102
        return None if rounds < self.rounds else self._next.least_divergence(rounds - self.rounds)


def _counts(name: str, counts: int | Sequence[int]) -> int | tuple[int, ...]:
    """Return a count for all cells as it is, and one for each as a tuple."""
    hint = "give local steps, as one number or one for each cell"
    if isinstance(counts, Sequence):
        return tuple(integer(name, count, hint=hint) for count in counts)
    return integer(name, counts, hint=hint)


def _check_cells(name: str, counts: int | Sequence[int], cells: int) -> None:
    if isinstance(counts, Sequence) and len(counts) != cells:
        raise ConfigError(f"{name} {counts} has {len(counts)} numbers for {cells} cells; give one for each cell")
