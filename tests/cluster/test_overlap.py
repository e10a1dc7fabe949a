"""Rounds behind local steps, over a slow link between two cells in network namespaces."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.benchmark import measure

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def measured(slow_link: None, base_environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Give what a run with a small model has written; its steps wait, as where a GPU computes."""
    out = tmp_path_factory.mktemp("overlap") / "overlap.json"
    options = ["--megabytes", "8", "--rate-mbit", "400", "--delay-ms", "5", "--blocks", "3", "--modes", "wait"]
    return measure("overlap.py", base_environ, out, *options, "--contenders", "sync,overlap")


def test_a_round_that_is_waited_for_costs_its_time(measured: dict[str, Any]) -> None:
    # A third, in theory: a round takes as long as 10 steps, and there is one after every 20.
    assert 0.15 <= measured["rows"]["wait"]["sync"]["lost"] <= 0.6


def test_a_round_behind_steps_costs_little(measured: dict[str, Any]) -> None:
    # Of three blocks on a machine that does other things as well; benchmarks/overlap.py with more is the measurement.
    assert measured["rows"]["wait"]["overlap"]["lost"] <= 0.15


def test_both_move_the_same_bytes(measured: dict[str, Any]) -> None:
    blocks = measured["samples"]["wait"]
    told = [sample["told"] for name in ("sync", "overlap") for sample in blocks[name]]
    assert {rank["rounds"] for ranks in told for rank in ranks} == {3}
    for ranks in told:
        cells = [sum(rank["bytes_across"] for rank in half) for half in (ranks[:2], ranks[2:])]
        assert cells == [3 * measured["model_bytes"]] * 2
