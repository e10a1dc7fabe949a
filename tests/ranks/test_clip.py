"""The server's clip: the pseudo-gradient's norm over the part of the model that is exchanged, the same on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import xffl
from tests.ranks.test_algorithms import vector
from tests.ranks.test_protected import Array, build, moved, same_bits
from tests.ranks.test_round import make_state
from tests.worlds import run_world
from xffl.aggregation.algorithms.server_optimizer import server_of
from xffl.aggregation.engine.global_model import GlobalModel
from xffl.aggregation.federations.hierarchical import Level, Levels
from xffl.errors import ConfigError
from xffl.naming import Writer

LAYOUTS = [((2, 2), None), ((4, 2), 2), ((2, 2), 1), ((3, 1, 2), None), ((1, 1, 1), None), ((4,), None)]

SGD = "sgd:lr=0.7,momentum=0.9,nesterov=true,clip=0.4"

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small buckets": {"bucket_bytes": 24},
    "two hops, rails": {"bucket_bytes": 24, "form": "two_hop", "rails": True},
    "codec": {"codec": "fp16"},
    "longer than any": {"server": "sgd:lr=0.7,momentum=0.9,nesterov=true,clip=99.0"},
    "fednova": {"combine": "fednova"},
}


def plain_step(values: Array, gradient: Array, momentum: Array, limit: float) -> tuple[Array, Array, float]:
    """Return the next values and momentum of SGD with Nesterov momentum, and the norm before it was clipped."""
    norm = float(np.linalg.norm(gradient))
    gradient = gradient * min(1.0, limit / norm)
    momentum = 0.9 * momentum + gradient
    return values - 0.7 * (gradient + 0.9 * momentum), momentum, norm


def clipped(rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None) -> dict[str, float]:
    """Return how far rounds are from the plain computation, at most."""
    state = make_state(rank, sizes, hsdp)
    weights = np.arange(1.0, len(sizes) + 1)
    cell = state.topology.cell_of(rank)
    found = {}
    for name, way in WAYS.items():
        model = build(state)
        aggregator = xffl.Aggregator(model, state, **({"server": SGD} | way))
        limit = 99.0 if name == "longer than any" else 0.4
        values = vector(model)
        momentum = np.zeros_like(values)
        worst = 0.0
        for number in range(3):
            steps = moved(model, state, number, size=0.5 if number else 0.01)  # the first is not clipped
            report = aggregator.aggregate(float(weights[cell]) / sizes[cell])
            assert report.step_norm is not None
            mean = np.average(steps, axis=0, weights=weights)
            values, momentum, norm = plain_step(values, -mean, momentum, limit)
            assert (norm > limit) == (number > 0 and limit < 9.0), (name, norm)
            worst = max(worst, abs(report.step_norm / norm - 1.0), float(np.abs(vector(model) - values).max()))
        assert same_bits(model, world_size), name
        found[name] = worst
    return found


@pytest.mark.parametrize("sizes, hsdp", LAYOUTS, ids=str)
def test_a_clipped_step_is_that_of_a_plain_computation(sizes: tuple[int, ...], hsdp: int | None) -> None:
    for found in run_world(sum(sizes), clipped, sizes, hsdp):
        coarse = found.pop("codec")
        assert coarse < 2e-3 and max(found.values()) < 2e-6, found


def others(rank: int, world_size: int) -> dict[str, bool]:
    """Clipped steps of fragments, behind local steps, and on levels; a vote that is lost; a state."""
    state = make_state(rank, (1, 1, 1, 1), None)
    found = {}

    model = build(state)
    parts = xffl.Aggregator(model, state, server=SGD, fragments=2)
    before = vector(model)
    moved(model, state, 1, size=0.5)
    reports = [parts.aggregate(), parts.aggregate()]
    told = [report.step_norm or 0.0 for report in reports]
    # Each fragment is as long as the clip then: 0.7 * (1 + 0.9) times it.
    moves = np.linalg.norm(vector(model) - before)
    found["fragments"] = min(told) > 0.4 and np.isclose(moves, 0.7 * 1.9 * 0.4 * np.sqrt(2.0), rtol=1e-5)

    model = build(state)
    delayed = xffl.Aggregator(model, state, server=SGD, overlap=True)
    before = vector(model)
    moved(model, state, 1, size=0.5)
    pending = delayed.aggregate_async(alpha=0.0)
    moved(model, state, 2)
    pending.merge(keeps_steps=False)
    found["delayed"] = np.isclose(np.linalg.norm(vector(model) - before), 0.7 * 1.9 * 0.4, rtol=1e-5)

    model = build(state)
    levels = Levels(model, state, [Level(), Level(groups=(2, 2))], server=SGD)
    before = vector(model)
    moved(model, state, 1 + rank // 2, size=0.5)
    levels.aggregate()
    found["levels"] = np.isclose(np.linalg.norm(vector(model) - before), 0.7 * 1.9 * 0.4, rtol=1e-5)
    return {name: bool(one) for name, one in found.items()}


def test_clipped_steps_of_fragments_delays_and_levels() -> None:
    for found in run_world(4, others):
        assert found == dict.fromkeys(("fragments", "delayed", "levels"), True)


def failing(rank: int, world_size: int) -> str:
    """A rank that cannot measure its part keeps all others from writing."""
    state = make_state(rank, (1, 1), None)
    model = build(state)
    aggregator = xffl.Aggregator(model, state, server=SGD)
    before = vector(model)
    moved(model, state, 1)

    def fail(*_: Any) -> Any:
        raise MemoryError("nothing left")

    measured = GlobalModel.squared_distance
    if rank == 1:
        GlobalModel.squared_distance = fail  # type: ignore[method-assign]
    with pytest.raises(xffl.RoundError) as refused:
        aggregator.aggregate()
    GlobalModel.squared_distance = measured  # type: ignore[method-assign]
    assert not np.array_equal(vector(model), before)  # the local steps
    assert aggregator.aggregate().step_norm is not None
    return str(refused.value)


def test_a_rank_that_cannot_measure_says_so_in_the_vote() -> None:
    told = {*run_world(2, failing)}
    assert len(told) == 1 and "rank 1 (cell 1): MemoryError: nothing left" in told.pop()


@pytest.mark.parametrize("clip", ["0.0", "-1.0", "none", "true"])
def test_a_clip_that_is_no_length_is_refused(clip: str) -> None:
    with pytest.raises(ConfigError, match="clip of the server must be a number > 0.*pseudo-gradient's greatest norm"):
        server_of(f"sgd:lr=1.0,clip={clip}", writer=Writer.USER)
