"""A storm in small (tests/chaos/storm.py): processes of a run with the real launcher are killed from outside."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.chaos.storm import Job, Kill, Round, Xffl, measure, return_after, wait_for_all, watch


@pytest.mark.skipif(find_spec("torchft") is None, reason="needs the extra elastic")
def test_cells_that_are_killed_come_back_and_leave_nothing_behind(tmp_path: Path) -> None:
    """One after the other, at no certain point of a round; the cell with the epoch's store among them."""
    federation = Xffl(Job(cells=3, ranks=1, every=4, step_s=0.05), tmp_path)
    try:
        wait_for_all([federation], 120)
        begun = time.time()
        for cell in (2, 0):
            kill = federation.kill(cell, 0)
            while return_after(kill, federation.told()) is None:
                assert time.time() < kill.time + 90, (tmp_path / "output.log").read_text()
                watch([federation], time.time() + 0.2)
    finally:
        federation.stop()
    found = measure(federation.told(), federation.kills, begun, time.time(), 3)
    assert found["kills"] == 2
    assert found["gap"]["never"] == 0, found  # none was longer than 15 s
    assert found["return"]["worst"] < 90, found
    assert found["unequal"] == 0, found
    assert federation.left() == 0


@pytest.mark.long  # half a minute; tests/ranks/test_elastic.py kills two of three cells one after the other
@pytest.mark.skipif(find_spec("torchft") is None, reason="needs the extra elastic")
def test_cells_that_are_left_go_on_however_few_they_are(tmp_path: Path) -> None:
    """The launcher has started them all, so they know that nobody else can hold the run's model."""
    federation = Xffl(Job(cells=3, ranks=1, every=4, step_s=0.05), tmp_path)
    try:
        wait_for_all([federation], 120)
        kills = [federation.kill(cell, 0) for cell in (0, 1)]
        while any(return_after(kill, federation.told()) is None for kill in kills):
            assert time.time() < kills[0].time + 90, (tmp_path / "output.log").read_text()
            watch([federation], time.time() + 0.2)
    finally:
        federation.stop()
    told = federation.told()
    alone = [one for one in told[2] if one.cells == (2,)]
    assert alone and alone[0].time < kills[0].time + 15, (tmp_path / "output.log").read_text()
    numbers = [one.number for one in told[2]]
    assert numbers == [*range(numbers[0], numbers[-1] + 1)]
    both = {one.number: one.digest for one in told[2]}
    assert all(one.digest == both[one.number] for cell in (0, 1) for one in told[cell] if one.life == 1)


def test_what_a_storm_measures() -> None:
    def round_of(number: int, at: float, *cells: int, idle: int = 9, digest: str = "", life: int = 0) -> Round:
        weights = tuple(float(cell in cells and cell != idle) for cell in range(3))
        return Round(life, at, number, digest, cells, weights, 1)

    both = [round_of(1, 9.0, 0, 1, 2), round_of(2, 11.0, 0, 1, 2), round_of(3, 20.0, 0, 1, 2, idle=2)]
    both += [round_of(4, 21.0, 0, 1, 2)]
    again = [both[0], *(one._replace(life=1) for one in both[2:])]
    kills = [Kill(10.0, 2, 0), Kill(22.0, 0, 0)]
    found = measure({0: both, 1: both, 2: again}, kills, 9.0, 39.0, 3)
    # The first round after the kill has the victim's values; nobody makes one after the second kill.
    assert found["gap"] == {"median": 1.0, "worst": 1.0, "never": 1}
    assert found["return"] == {"median": 11.0, "worst": 11.0, "never": 1}
    assert found["share"] == round((2 + 9 * 2 / 3 + 1) / 12, 4)
    assert (found["unequal"], found["anew"], found["rounds a second"]) == (0, 0, 0.1333)
    other = [*both[:-1], round_of(4, 21.0, 0, 1, 2, digest="another"), round_of(2, 22.0, 0, 1, 2)]
    found = measure({0: both, 1: both, 2: other}, [], 9.0, 39.0, 3)
    assert (found["unequal"], found["anew"]) == (1, 1)
