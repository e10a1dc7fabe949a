"""Steps of cells that are killed and go on from checkpoints (tests/chaos/ledger.py): none counts in two rounds."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.ledger import audit, federation, missed, run
from xffl.cluster.launch.local import held_port


@pytest.mark.long  # half a minute; CI holds whole models against the same rule in tests/ranks/test_oracle.py
@pytest.mark.skipif(find_spec("torchft") is None, reason="needs the extra elastic")
def test_no_step_counts_twice_where_all_processes_are_killed(tmp_path: Path) -> None:
    """First all at once, so that all go on from checkpoints of different rounds; then the rank of a cell."""
    with held_port() as port:
        jobs = federation(tmp_path, port)
        try:
            result = run(["all", "rank"], jobs, 3.0, random.Random(1))
        finally:
            jobs.stop()
    assert not missed(result), (result, (tmp_path / "output.log").read_text())
    assert result["counted"] > 0 < result["rounds"]


def test_what_an_audit_finds() -> None:
    def line(what: str, at: float, **told: Any) -> dict[str, Any]:
        return {"what": what, "time": at, "life": "a", **told}

    def round_of(at: float, number: int, base: str, lineage: str, steps: list[str], **more: Any) -> dict[str, Any]:
        told = {"number": number, "base": base, "lineage": lineage, "digest": lineage, "weights": [len(steps), 1]}
        return line("round", at, **{**told, "takes_over": False, "steps": steps, **more})

    def step(at: float, name: str) -> dict[str, Any]:
        return line("step", at, step=name)

    # The other cell was killed before it could tell of either round, but was asked.
    other = [step(0, "x"), line("asked", 1, steps=["x"]), step(3, "y"), line("asked", 4, steps=["y"])]
    first, second = round_of(2, 1, "", "l1", ["a1"]), round_of(5, 2, "l1", "l2", ["a2"])
    found = audit([[step(0, "a1"), first, step(3, "a2"), second], other])
    assert found["rounds"] == 2 and found["counted"] == 4 and not missed(found | {"left": 0})
    again = round_of(5, 2, "l1", "l2", ["a1"])
    assert audit([[step(0, "a1"), first, step(3, "a2"), again], other])["twice"] == ["a1"]
    assert audit([[step(0, "a1"), first, step(3, "a2"), again], other])["lost"] == ["a2"]
    heavy = round_of(5, 2, "l1", "l2", ["a2"], weights=[2, 1])
    assert audit([[step(0, "a1"), first, step(3, "a2"), heavy], other])["weights"] == [(2, 0, 2, 1)]
    # What has counted in a round that nobody went on from may count again.
    dead = round_of(5, 2, "l1", "dead", ["a2"])
    alive = [round_of(6, 2, "l1", "l2", ["a2"]), round_of(8, 3, "l2", "l3", [], weights=[0, 0])]
    found = audit([[step(0, "a1"), first, step(3, "a2"), dead, *alive], other])
    assert not found["twice"] and found["other rounds"] == 1
    assert audit([[step(0, "a1"), first, alive[1]], other])["unknown"] == [1, 2]
    unequal = round_of(2, 1, "", "l1", [], digest="another")
    assert audit([[step(0, "a1"), first], [unequal]])["unequal"] == [1]
