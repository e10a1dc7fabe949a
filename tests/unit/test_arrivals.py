"""How long the cells of an elastic federation wait for one that lives and has not come."""

from __future__ import annotations

import itertools

import pytest

from xffl.elastic.arrivals import ROUNDS, UNKNOWN_FACTOR, Arrivals, may_still_come, reach_of


@pytest.mark.parametrize(
    ("seconds", "reach_s"),
    [
        ((), 0.0),
        ((10.0,), 40.0),
        ((10.0, 10.0, 10.0), 40.0),
        ((10.0, 10.0, 10.0, 40.0), 100.0),  # it was once late by 30 s, as where it evaluates
        ((10.0, 20.0), 70.0),
    ],
)
def test_a_cell_may_need_longer_than_it_has(seconds: tuple[float, ...], reach_s: float) -> None:
    assert reach_of(seconds) == reach_s
    assert reach_of(tuple(3.0 * one for one in seconds)) == 3.0 * reach_s  # whatever the pace of a run is


def waits_until(reach_s: float, own_s: float, meeting_timeout_s: float = 1800.0, stretch: float = 1.0) -> float:
    """How long after the last meeting a cell that came to this one after ``own_s`` gives up one that has not."""
    seconds = (one / 2 for one in itertools.count())
    return next(
        since_s
        for since_s in seconds
        if since_s >= own_s
        and not may_still_come(
            reach_s,
            own_s=own_s,
            stretch=stretch,
            since_meeting_s=since_s,
            waited_s=since_s - own_s,
            meeting_timeout_s=meeting_timeout_s,
        )
    )


def test_a_cell_that_lives_is_waited_for_as_long_as_its_rounds_say() -> None:
    assert waits_until(reach_of([40.0] * 4), own_s=10.0) == 160.0
    # Of the first round nothing is known but how long this cell took for it.
    assert waits_until(0.0, own_s=10.0) == UNKNOWN_FACTOR * 10.0


def test_cells_that_all_evaluate_in_a_round_wait_for_each_other() -> None:
    fast, slow = Arrivals(), Arrivals()
    for arrivals, seconds in ((fast, 10.0), (slow, 40.0)):
        for number in range(12):
            arrivals.note_end(100.0 * number)
            arrivals.note_arrival(100.0 * number + seconds, is_again=False)
        arrivals.note_end(2000.0)
    assert fast.stretch == 1.0
    reach_s = slow.reach_s  # told at the meeting before the evaluation, which takes ten times as long as the steps
    fast.note_arrival(2000.0 + 110.0, is_again=False)
    assert fast.stretch == 11.0
    assert waits_until(reach_s, fast.own_s) < 440.0  # without that the slow one would lose its round
    assert waits_until(reach_s, fast.own_s, stretch=fast.stretch) == 11.0 * 160.0


def test_nobody_is_waited_for_until_the_waiting_cell_would_end() -> None:
    assert waits_until(4000.0, own_s=10.0) == 10.0 + 1740.0
    assert waits_until(4000.0, own_s=10.0, meeting_timeout_s=20.0) == 20.0


def test_what_a_cell_tells_follows_from_its_last_rounds() -> None:
    arrivals = Arrivals()
    arrivals.note_arrival(3.0, is_again=False)
    assert arrivals.since_meeting(4.0) is None
    assert arrivals.reach_s == 0.0  # it was at no meeting before
    now = 5.0
    for seconds in (2.0, 2.0, 2.0):
        arrivals.note_end(now)
        now += seconds
        arrivals.note_arrival(now, is_again=False)
    assert (arrivals.own_s, arrivals.reach_s) == (2.0, 8.0)
    arrivals.note_end(now)
    arrivals.note_arrival(now + 0.1, is_again=True)  # the round has broken: no steps were made
    assert arrivals.reach_s == 8.0
    assert arrivals.since_meeting(now + 1.0) == 1.0
    for seconds in (6.0,) * ROUNDS:  # it has become slower
        arrivals.note_end(now)
        now += seconds
        arrivals.note_arrival(now, is_again=False)
    assert arrivals.reach_s == 24.0
