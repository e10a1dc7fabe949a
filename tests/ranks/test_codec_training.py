"""Trainings with codecs end where exact ones do; benchmarks/codecs.py is the longer run."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from tests.ranks.test_round import make_state
from tests.worlds import run_world

pytest.importorskip("sklearn")
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from codec_tasks import TASKS, Ended, train, without_feedback

SEED = 0
FORGETFUL = "!"
"""Behind a codec's name: without error feedback."""


def trained(
    rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None, name: str, codecs: list[str], steps: int
) -> dict[str, Ended]:
    """Train a task with each codec, with more rounds than in the benchmark."""
    state = make_state(rank, sizes, hsdp)
    task = replace(TASKS[name], every=5)
    found = {}
    for codec in codecs:
        with without_feedback() if codec.endswith(FORGETFUL) else nullcontext():
            found[codec] = train(task, state, codec.removesuffix(FORGETFUL), seed=SEED, steps=steps)
    return found


def differences(found: dict[str, Ended], codec: str) -> list[float]:
    """Return by how much the losses are larger than with exact rounds, relative to these."""
    mine, its = found[codec], found["none"]
    return [mine.training / its.training - 1.0, mine.validation / its.validation - 1.0]


@pytest.mark.long  # trainings to their end; tests/ranks/test_round_codecs.py follows rounds to the bit
def test_codecs_end_within_half_a_percent_of_the_exact_loss_and_error_feedback_matters() -> None:
    """On digits, of which a guess has a loss of 2.3."""
    sparse = "topk:0.1"
    codecs = ["none", "int8", "int4", sparse, sparse + FORGETFUL]
    found = run_world(2, trained, (1, 1), None, "digits", codecs, 240)[0]
    exact = found["none"]
    assert max(exact.training, exact.validation) < 0.35
    for codec, most, least_error in (("int8", 0.27, 1e-3), ("int4", 0.14, 1e-2)):
        assert found[codec].bytes_across <= most * exact.bytes_across
        assert found[codec].codec_error > least_error
        assert all(abs(difference) <= 0.005 for difference in differences(found, codec)), found
    assert max(differences(found, sparse)) < 0.05
    assert min(differences(found, sparse + FORGETFUL)) > 0.2
