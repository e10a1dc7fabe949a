"""Elastic federations whose models show which local steps are in them (tests/chaos/oracle.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chaos.oracle import FINDINGS, audit, run_draw
from tests.chaos.oracle_cell import save_model
from tests.chaos.oracle_draws import PARTS, SLOTS, Draw, draw
from xffl.journal.folder import JournalFolder
from xffl.journal.records import RoundRecord, make_id
from xffl.journal.who_continues import Member, attempt_of


@pytest.mark.skipif(find_spec("torchft") is None, reason="needs the extra elastic")
def test_each_step_is_in_the_model_once(tmp_path: Path) -> None:
    """With delayed rounds of two fragments, as all processes and then a cell are killed, and resume between rounds."""
    drawn = Draw(
        1,
        (1, 1),
        every=5,
        step_s=0.02,
        save_every=7,
        older=0.5,
        is_weighed=True,
        is_shared=False,
        fragments=2,
        delay=2,
        faults=((1.0, "all", 0), (3.0, "cell", 1)),
        leaves=(SLOTS, SLOTS),
    )
    result = run_draw(drawn, tmp_path / "run")
    assert not any(result[name] for name in FINDINGS), (result, (tmp_path / "run" / "output.log").read_text())
    assert result["lives"] >= 4 and result["steps"] > 0


def test_draws_are_the_same_for_a_number() -> None:
    assert draw(7) == draw(7)
    drawn = [draw(number) for number in range(100)]
    assert (
        len({(one.sizes, one.delay, one.codec, str(one.client), str(one.server), one.fragments) for one in drawn}) > 50
    )


class Run:
    """What two cells leave behind: in their first round both have a step, in the second one of them has two."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.drawn = Draw(
            0,
            (1, 1),
            every=1,
            step_s=0.0,
            save_every=1,
            older=0.0,
            is_weighed=True,
            is_shared=True,
            leaves=(SLOTS, SLOTS),
        )
        (folder / "models").mkdir()
        journal = JournalFolder(folder / "journal")
        self.lines: list[list[dict[str, Any]]] = [[], []]
        self.models: dict[str, dict[tuple[int, int], float]] = {}
        chain: list[RoundRecord] = []
        for weights in ({0: 0, 1: 0}, {0: 1, 1: 1}, {0: 2, 1: 0}):
            name = make_id()
            base = chain[-1] if chain else None
            held = None if base is None else base.model
            record = attempt_of(
                run=chain[0].id if chain else name,
                number=len(chain),
                name=name,
                base=base,
                members=[Member(cell, make_id(), -1, held) for cell in weights],
                weights={cell: float(weight) for cell, weight in weights.items()},
                federation=2,
                left=(),
            )
            journal.put(record)
            chain.append(record)
        self.founding, self.first, self.second = (record.lineage for record in chain)
        self.steps: list[dict[str, list[int]]] = [
            {self.first: [0], self.second: [1, 2]},
            {self.first: [0], self.second: []},
        ]
        first = {(0, 0): 0.5, (1, 0): 0.5}
        self.models = {self.founding: {}, self.first: first, self.second: {**first, (0, 1): 1.0, (0, 2): 1.0}}
        self.made = [[0, 1, 2], [0]]
        self.residuals: dict[str, dict[tuple[int, int], float]] = {}
        self.unequal = False
        self.ended = True

    def audit(self) -> dict[str, Any]:
        """Write what the cells have told, and return what the audit finds."""
        for cell in range(2):
            lines: list[dict[str, Any]] = [{"what": "step", "slot": slot} for slot in self.made[cell]]
            for lineage, values in self.models.items():
                if lineage in self.steps[cell]:
                    told = self.steps[cell][lineage]
                    lines.append({"what": "round", "lineage": lineage, "weights": [1, 1], "steps": told})
                digests = [lineage, str(self.unequal * cell)]
                self._save(f"{lineage}.{'.'.join(digests)}.npz", values)
                lines.append({"what": "model", "lineage": lineage, "digests": digests})
                if lineage in self.residuals:
                    self._save(f"residuals.{cell}.{lineage}.npz", self.residuals[lineage] if cell == 0 else {})
                    lines.append({"what": "residuals", "lineage": lineage, "file": f"residuals.{cell}.{lineage}.npz"})
            if self.ended:
                lines.append({"what": "end", "lineage": self.second, "waiting": [[]]})
            text = "".join(json.dumps({"life": f"{cell}.a", **line}) + "\n" for line in lines)
            (self.folder / f"{cell}.ledger").write_text(text)
        return audit(self.drawn, self.folder)

    def _save(self, name: str, values: dict[tuple[int, int], float]) -> None:
        model = np.zeros((PARTS, 2 * SLOTS), dtype=np.float32)
        for (owner, slot), value in values.items():
            model[:, owner * SLOTS + slot] = value
        save_model(self.folder / "models" / name, model)


def _told_otherwise(run: Run) -> None:
    run.steps[0][run.second] = [1, 3]


def _told_too_few(run: Run) -> None:
    run.steps[0][run.second] = [1]


def _counts_twice(run: Run) -> None:
    run.models[run.second][0, 0] = 1.5


def _has_another_share(run: Run) -> None:
    run.models[run.second][0, 2] = 0.5


def _has_not_counted(run: Run) -> None:
    del run.models[run.second][0, 2]


def _has_lost(run: Run) -> None:
    run.made[1].append(1)


def _is_unequal(run: Run) -> None:
    run.unequal = True


def _has_no_end(run: Run) -> None:
    run.ended = False


@pytest.mark.parametrize(
    ("change", "findings"),
    [
        (None, set()),
        (_told_otherwise, {"told"}),
        (_told_too_few, {"told", "weights"}),
        (_counts_twice, {"shares", "weights", "told"}),
        (_has_another_share, {"shares"}),
        (_has_not_counted, {"weights", "told", "lost"}),
        (_has_lost, {"lost"}),
        (_is_unequal, {"unequal"}),
        (_has_no_end, {"last"}),
    ],
)
def test_what_an_audit_finds(change: Callable[[Run], None] | None, findings: set[str], tmp_path: Path) -> None:
    run = Run(tmp_path)
    if change is not None:
        change(run)
    result = run.audit()
    assert {name for name in FINDINGS if result[name]} == findings, result


@pytest.mark.parametrize(("left", "rounds"), [(0.75, []), (0.5, [3]), (0.0, [3])], ids=["kept", "less", "lost"])
def test_an_audit_adds_what_codecs_have_left_out_to_the_model(left: float, rounds: list[int], tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.drawn = replace(run.drawn, codec="int8")
    run.residuals = {run.founding: {}, run.first: {(0, 0): 0.125}, run.second: {(0, 1): left}}
    run.models[run.first] = {(0, 0): 0.375, (1, 0): 0.5}
    run.models[run.second] = {(0, 0): 0.5, (1, 0): 0.5, (0, 1): 0.25, (0, 2): 1.0}
    result = run.audit()
    assert [wrong[0] for wrong in result["residuals"]] == rounds and result["exact"] == 1
    assert {name for name in FINDINGS if result[name]} <= {"residuals"}
