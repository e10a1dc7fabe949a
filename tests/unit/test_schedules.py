"""Schedules: the steps of each cell follow from what all ranks know."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xffl.aggregation.algorithms.every_steps import EverySteps, Schedule, schedule_of
from xffl.aggregation.algorithms.schedules import (
    Balanced,
    Divergence,
    EveryEpochs,
    EverySeconds,
    PerCell,
    Warmup,
    share_out,
)
from xffl.aggregation.report import RoundReport
from xffl.errors import ConfigError

PACES = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=12)


def report(*paces: float) -> RoundReport:
    return RoundReport(1, (1.0,) * len(paces), 0, 0, 0.0, step_seconds=tuple(paces))


def by_cell(schedule: Schedule, cells: int, told: RoundReport | None, rounds: int = 0) -> list[int]:
    schedule.check(cells)
    return [schedule.steps(rounds, cell, told) for cell in range(cells)]


def test_fixed_numbers() -> None:
    told = report(1.0, 5.0, 0.0)
    assert by_cell(EverySteps(7), 3, told) == [7, 7, 7]
    assert by_cell(PerCell((4, 2, 1)), 3, told) == [4, 2, 1]
    assert by_cell(EveryEpochs(3, 5), 3, told) == [15, 15, 15]
    assert by_cell(EveryEpochs(2, [5, 9, 1]), 3, told) == [10, 18, 2]


def test_seconds_become_steps() -> None:
    schedule = EverySeconds(10.0, first=4)
    assert by_cell(schedule, 3, None) == [4, 4, 4]
    assert by_cell(schedule, 4, report(0.5, 3.0, 100.0, 0.0)) == [20, 3, 1, 4]


@given(PACES, st.floats(0.1, 1e3))
def test_cells_that_count_seconds_arrive_together(paces: list[float], seconds: float) -> None:
    for pace, steps in zip(paces, by_cell(EverySeconds(seconds), len(paces), report(*paces)), strict=True):
        assert steps >= 1
        assert abs(steps * pace - seconds) <= 0.5 * pace * (1 + 1e-9) or (steps == 1 and pace > seconds)


@settings(max_examples=300)
@given(PACES, st.integers(1, 500))
def test_balanced_steps_keep_their_mean_and_match_speeds(paces: list[float], every: int) -> None:
    steps = by_cell(Balanced(every), len(paces), report(*paces))
    assert sum(steps) == every * len(paces) and min(steps) >= 1
    speeds = [1 / pace for pace in paces]
    exact = [every * len(paces) * speed / sum(speeds) for speed in speeds]
    if min(exact) >= 1:
        assert all(abs(got - share) < 1 + 1e-9 * share for got, share in zip(steps, exact, strict=True))
    for one, speed in zip(steps, speeds, strict=True):
        assert all(one >= other - 1 for other, slower in zip(steps, speeds, strict=True) if speed >= slower)


def test_balanced_arrives_together() -> None:
    assert by_cell(Balanced(10), 3, None) == [10, 10, 10]
    assert by_cell(Balanced(10), 2, report(0.1, 0.3)) == [15, 5]
    assert by_cell(Balanced(2), 3, report(1.0, 1.0, 1e6)) == [3, 2, 1]  # every cell makes a step
    # A cell that made no step is left out of the balance.
    assert by_cell(Balanced(10), 3, report(0.1, 0.0, 0.3)) == [15, 10, 5]


@given(st.dictionaries(st.integers(0, 50), st.floats(1e-9, 1e9), min_size=1, max_size=20), st.integers(0, 100))
def test_shares_add_up(parts: dict[int, float], more: int) -> None:
    total = len(parts) + more
    shares = share_out(total, parts)
    assert set(shares) == set(parts) and sum(shares.values()) == total and min(shares.values()) >= 1


def test_divergence_names_its_threshold_and_the_warm_up_none() -> None:
    schedule = Warmup(rounds=3, every=2, then=Divergence(every=5, threshold=0.25))
    assert [schedule.steps(rounds, 0, None) for rounds in range(5)] == [2, 2, 2, 5, 5]
    assert [schedule.least_divergence(rounds) for rounds in range(5)] == [None, None, None, 0.25, 0.25]
    assert schedule.has_threshold and not Warmup(3, 2, 5).has_threshold
    assert EverySteps(3).least_divergence(0) is None


def test_warm_up_passes_on_what_comes_after() -> None:
    told = report(0.1, 0.3)
    assert by_cell(Warmup(1, 3, Balanced(10)), 2, told, rounds=1) == [15, 5]
    assert by_cell(Warmup(1, 3, 8), 2, told, rounds=0) == [3, 3]
    nested = Warmup(2, 1, Warmup(2, 3, 9))  # counts its rounds from its own start
    assert [nested.steps(rounds, 0, None) for rounds in range(5)] == [1, 1, 3, 3, 9]
    with pytest.raises(ConfigError, match="2 numbers for 3 cells"):
        Warmup(1, 3, PerCell([4, 2])).check(3)


class Own(Schedule):
    def __init__(self, least: int) -> None:
        self.least = least

    def steps(self, rounds: int, cell: int, report: RoundReport | None) -> int:
        return self.least + cell


def test_the_text_names_all_options_and_nothing_else() -> None:
    """Ranks compare it: equal schedules of other processes have the same text, different ones another."""
    schedules = [
        EverySteps(5),
        EverySteps(6),
        EveryEpochs(5, 6),
        EverySeconds(2.5),
        EverySeconds(2.5, first=3),
        Balanced(5),
        PerCell([5, 6]),
        Divergence(5, 0.1),
        Divergence(5, 0.2),
        Warmup(2, 3, 4),
        Warmup(2, 3, Balanced(4)),
        Own(3),
        Own(4),
    ]
    texts = [str(schedule) for schedule in schedules]
    assert len(set(texts)) == len(texts)
    assert [str(pickle.loads(pickle.dumps(schedule))) for schedule in schedules] == texts
    assert str(EverySteps(5)) == "EverySteps(every=5)" and str(Own(3)) == "Own(least=3)"
    assert str(Warmup(2, 3, 4)) == "Warmup(rounds=2, every=3, then=EverySteps(every=4))"
    assert str(PerCell([5, 6])) == str(PerCell((5, 6)))


def test_what_is_meant_by_every() -> None:
    own = Own(1)
    assert schedule_of(own) is own
    assert schedule_of(4) == EverySteps(4)


@pytest.mark.parametrize(
    "make, told",
    [
        (lambda: schedule_of(0), "every must be a positive integer, got 0"),
        (lambda: schedule_of(None), "every must be a positive integer, got None"),
        (lambda: schedule_of(True), "every must be a positive integer, got True"),
        (lambda: schedule_of(2.0), "every must be a positive integer, got 2.0"),
        (lambda: EveryEpochs(0, 3), "epochs must be a positive integer, got 0"),
        (lambda: EveryEpochs(1, 0), "steps_per_epoch must be a positive integer, got 0"),
        (lambda: EveryEpochs(1, [3, 0]), "steps_per_epoch must be a positive integer, got 0"),
        (lambda: EveryEpochs(1, [3, 4]).check(3), r"steps_per_epoch \(3, 4\) has 2 numbers for 3 cells"),
        (lambda: PerCell([1, 2]).check(1), "2 numbers for 1 cells"),
        (lambda: PerCell([1, -2]), "counts must be a positive integer, got -2"),
        (lambda: EverySeconds(0.0), "seconds must be a number > 0, got 0.0"),
        (lambda: EverySeconds(float("nan")), "seconds .* got nan"),
        (lambda: EverySeconds(float("inf")), "seconds .* got inf"),
        (lambda: EverySeconds(True), "seconds .* got True"),
        (lambda: EverySeconds(1.0, first=0), "first must be a positive integer, got 0"),
        (lambda: Balanced(0), "every must be a positive integer, got 0"),
        (lambda: Divergence(0, 1.0), "every must be a positive integer, got 0"),
        (lambda: Divergence(1, -1.0), "threshold .* got -1.0"),
        (lambda: Divergence(1, "far"), "threshold .* got 'far'"),  # type: ignore[arg-type]
        (lambda: Warmup(0, 1, 2), "rounds must be a positive integer, got 0"),
        (lambda: Warmup(1, 0, 2), "every must be a positive integer, got 0"),
        (lambda: Warmup(1, 1, 0), "every must be a positive integer, got 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(make: Callable[[], object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make()
