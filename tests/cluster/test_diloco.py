"""The language model of benchmarks/diloco.py, trained over a slow link between two cells in network namespaces."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.benchmark import measure

STEPS, ROUNDS = 30, 3


@pytest.fixture(scope="module")
def measured(slow_link: None, base_environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Give what a short run of some methods has written."""
    out = tmp_path_factory.mktemp("diloco") / "diloco.json"
    options = ["--steps", str(STEPS), "--block", "15", "--seeds", "0", "--delay-ms", "5", "--rate-mbit", "400"]
    methods = "none,sync,diloco_10"
    return measure("diloco.py", base_environ, out, "link", *options, "--methods", methods)


def test_bytes_on_the_link_are_those_of_rounds_and_of_gradients(measured: dict[str, Any]) -> None:
    model_bytes, rows = 4 * measured["parameters"], measured["rows"]
    assert rows["diloco_10"]["rounds"] == ROUNDS and rows["none"]["rounds"] == rows["sync"]["rounds"] == 0
    # Each way: headers, votes and what starting and ending cost come on top.
    for way in range(2):
        assert STEPS * model_bytes <= rows["sync"]["bytes"][way] <= 1.3 * STEPS * model_bytes
        assert ROUNDS * model_bytes <= rows["diloco_10"]["bytes"][way] <= 1.5 * ROUNDS * model_bytes
        assert rows["none"]["bytes"][way] <= 0.1 * model_bytes
    assert rows["sync"]["ended"]["bytes_across"] == STEPS * model_bytes
    assert rows["diloco_10"]["ended"]["bytes_across"] == ROUNDS * model_bytes


def test_all_ranks_of_a_shard_end_with_the_same_weights(measured: dict[str, Any]) -> None:
    for name in ("sync", "diloco_10"):
        told = measured["samples"][name][-1]["told"]
        for shard in range(2):
            assert len({rank["checksum"] for rank in told if rank["shard"] == shard}) == 1, name


def test_all_learn_and_synchronous_steps_most(measured: dict[str, Any]) -> None:
    losses = {name: row["ended"]["held_out"] for name, row in measured["rows"].items()}
    assert max(losses.values()) < 4.6, "a uniform guess is 5.5"
    # The same tokens: synchronous steps learn most from them.
    assert losses["sync"] < losses["none"]
