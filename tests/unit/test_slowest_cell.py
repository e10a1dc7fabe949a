"""Which cell the others wait for: found in records of rounds, and not claimed where cells are equal within noise."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_run_report import Page, round_line, write
from xffl.run_report import write_report
from xffl.run_report.elastic import read_runs
from xffl.run_report.pace import find_slowest_cells, measure_waits
from xffl.run_report.reader import Run, read_run
from xffl.run_report.summary import slowest_text, summary_rows

PERIOD = 10.0
EXCHANGE = 0.5


def files_of(
    arrivals: list[list[float]],
    *,
    commits: tuple[float, ...] = (0.01, 0.3, 0.02),
    skew: tuple[float, ...] = (0, 70, -5),
    is_delayed: bool = False,
) -> dict[str, Any]:
    """Return the records of rounds to which cells come at the given seconds after the first possible moment.

    The hosts' clocks differ by ``skew``, and cells need different times to write the new values.
    """
    rows: dict[str, str] = {}
    for number, late in enumerate(arrivals, 1):
        end = max(late) + EXCHANGE
        for cell, arrival in enumerate(late):
            phases = {"vote": 0.01 + max(late) - arrival, "across": EXCHANGE, "commit": commits[cell]}
            took = end - arrival + commits[cell]
            if is_delayed:
                # Two seconds of local steps run behind the round.
                took = max(took, 2.0)
                phases["wait"] = max(0.0, end - arrival - 2.0)
            when = number * PERIOD + end + commits[cell] + skew[cell]
            name = f"rounds/cell_{cell}.jsonl"
            rows[name] = rows.get(name, "") + round_line(number, 4 * number, when, took, phases=phases)
    return rows


def run_of(folder: Path, arrivals: list[list[float]], **how: Any) -> Run:
    return read_run(write(folder, files_of(arrivals, **how)))


def noisy(means: tuple[float, ...], spread: float, rounds: int, seed: int) -> list[list[float]]:
    draw = random.Random(seed)
    return [[max(0.0, mean + draw.uniform(-spread, spread)) for mean in means] for _ in range(rounds)]


def test_the_wait_for_a_planted_slow_cell_is_measured_without_comparing_clocks(tmp_path: Path) -> None:
    run = run_of(tmp_path, noisy((1.0, 3.0, 1.5), 0.2, 20, seed=1))
    waits = measure_waits(run)
    assert len(waits) == 20
    assert all(one[1] == pytest.approx(0.0) for one in waits)
    found = find_slowest_cells(run)
    assert found is not None
    assert found.cells == (1,)
    # Cell 0 waits 2 s for it, cell 2 1.5 s.
    assert found.waited == pytest.approx(1.75, abs=0.1)
    assert found.share == pytest.approx(0.175, abs=0.01)
    assert slowest_text(run).startswith("cell 1: others wait 1.8 s a round (18.0 %")
    assert dict(summary_rows(run))["slowest cell"] == slowest_text(run)


def test_equal_cells_within_noise_are_not_blamed(tmp_path: Path) -> None:
    """Of 300 runs, some of five rounds only, at most one is expected to name a cell by chance."""
    blamed = []
    for seed in range(300):
        cells = 2 + seed % 2
        run = run_of(tmp_path / str(seed), noisy((1.0,) * cells, 0.8, 5 + seed % 20, seed))
        if find_slowest_cells(run) is not None:
            blamed.append(seed)
        else:
            assert slowest_text(run).startswith("none")
    assert len(blamed) <= 2, blamed


@pytest.mark.parametrize(
    "arrivals",
    [
        pytest.param([[1.0, 3.0]] * 4, id="too few rounds"),
        pytest.param([[1.0, 1.05]] * 20, id="immaterial: half a percent of the time between rounds"),
        pytest.param([[1.0, 1.0]] * 19 + [[1.0, 60.0]], id="late once"),
        pytest.param([[1.0, 2.0], [2.0, 1.0]] * 10, id="in turn"),
    ],
)
def test_what_is_no_slow_cell(arrivals: list[list[float]], tmp_path: Path) -> None:
    assert find_slowest_cells(run_of(tmp_path, arrivals)) is None


def test_cells_that_are_equally_late_are_named_together(tmp_path: Path) -> None:
    run = run_of(tmp_path, noisy((1.0, 3.0, 3.0), 0.3, 24, seed=3))
    found = find_slowest_cells(run)
    assert found is not None
    assert found.cells == (1, 2)
    assert slowest_text(run).startswith("cell 1 and cell 2: others wait 2")


def test_of_delayed_rounds_only_what_local_steps_do_not_hide_counts(tmp_path: Path) -> None:
    # Cell 0 comes 3 s before the last: 2 s of it, less the exchange, are hidden.
    run = run_of(tmp_path / "seen", [[0.0, 3.0]] * 10, is_delayed=True)
    found = find_slowest_cells(run)
    assert found is not None
    assert found.cells == (1,)
    assert found.waited == pytest.approx(1.5)
    assert find_slowest_cells(run_of(tmp_path / "hidden", [[0.0, 1.4]] * 10, is_delayed=True)) is None


def test_records_of_one_cell_say_nothing(tmp_path: Path) -> None:
    run = run_of(tmp_path, [[1.0]] * 10)
    assert measure_waits(run) == []
    assert find_slowest_cells(run) is None
    assert slowest_text(run) == "–"


def test_the_cells_of_an_elastic_run_are_compared_in_the_rounds_that_they_made_together(tmp_path: Path) -> None:
    for cell in range(2):
        rows = []
        for number in range(2, 14):
            # Cell 1 is away in rounds 6 and 7, which cell 0 makes alone; it comes a second late to the others.
            if cell == 1 and number in (6, 7):
                continue
            cells = [0] if number in (6, 7) else [0, 1]
            took = EXCHANGE + (1.0 if cell == 0 and len(cells) == 2 else 0.0)
            there = {"cells": cells, "membership": f"{number}.{len(cells)}", "weights": [4, 4], "steps": [4, 4]}
            rows.append(round_line(number, 4 * number, PERIOD * number, took, phases={"vote": 0.1}, **there))
        shape = {"world_size": 1, "cells": [1], "elastic": {"cell": cell, "cells": [1, 1]}}
        write(tmp_path / f"cell_{cell}", {"rounds/cell_0.jsonl": "".join(rows), "topology.json": shape})
    (run,) = read_runs([tmp_path])
    assert len(measure_waits(run)) == 10
    found = find_slowest_cells(run)
    assert found is not None
    assert found.cells == (1,)
    assert found.waited == pytest.approx(1.0)


def test_the_page_names_it_for_one_run_and_for_several_compared(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shape = {"topology.json": json.dumps({"world_size": 2, "cells": [1, 1]})}
    slow = write(tmp_path / "slow", files_of([[1.0, 3.0]] * 8) | shape)
    even = write(tmp_path / "even", files_of([[1.0, 1.0]] * 8) | shape)
    told = "cell 1: others wait 2 s a round (20.0 % of the time between rounds)"
    page = Page(write_report([slow]).page)
    assert page.row("slowest cell") == [told]
    assert f"Slowest: {told}." in page.text
    compared = Page(write_report([even, slow], tmp_path / "out").page)
    assert compared.row("slowest cell") == ["none: no cell comes later than the others beyond noise", told]
    assert f"Slowest in slow: {told}." in compared.text
    assert "Slowest in even" not in compared.text
