"""A storm in small (tests/chaos/storm.py): processes of a run with the real launcher are killed from outside."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.chaos.storm import Job, Xffl, measure, return_after, wait_for_all, watch

pytestmark = pytest.mark.skipif(find_spec("torchft") is None, reason="needs the extra elastic")


def test_cells_that_are_killed_come_back_and_leave_nothing_behind(tmp_path: Path) -> None:
    """One after the other, at no certain point of a round; the cell with the epoch's store among them."""
    federation = Xffl(Job(cells=3, ranks=1, every=4, step_s=0.05), tmp_path)
    try:
        wait_for_all([federation], 60)
        begun = time.time()
        for cell in (2, 0):
            kill = federation.kill(cell, 0)
            while return_after(kill, federation.told()) is None:
                assert time.time() < kill.time + 30, (tmp_path / "output.log").read_text()
                watch([federation], time.time() + 0.2)
    finally:
        federation.stop()
    found = measure(federation.told(), federation.kills, begun, time.time(), 3)
    assert found["kills"] == 2
    assert found["gap"]["never"] == 0, found  # none was longer than 15 s
    assert found["return"]["worst"] < 30, found
    assert found["unequal"] == 0, found
    assert federation.left() == 0
