"""Rounds of options that are drawn at random; ``tests/chaos/draws.py`` says what they are held against."""

from __future__ import annotations

import pytest

from tests.chaos.draws import LAYOUTS, TOGETHER, draw, judge, run_draws
from tests.worlds import run_world


@pytest.mark.parametrize("layout", range(1, len(LAYOUTS)), ids=lambda layout: str(LAYOUTS[layout]))
def test_rounds_are_those_that_numpy_computes(layout: int) -> None:
    numbers = list(range(layout * TOGETHER, layout * TOGETHER + 6))
    ranks = run_world(sum(LAYOUTS[layout][0]), run_draws, numbers)
    verdicts = {number: judge(draw(number), list(results)) for number, *results in zip(numbers, *ranks, strict=True)}
    assert {*verdicts.values()} <= {"equal", "refused"}, verdicts
    assert "equal" in verdicts.values()
