"""Schedules in a training loop: cells with unequal steps meet in the same rounds, and nobody waits for nobody."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import xffl
from tests.ranks.test_clients import RATE, Federation, Values, close, net, train
from tests.ranks.test_round import digests, make_state
from tests.worlds import run_world
from xffl.aggregation.algorithms.every_steps import Schedule
from xffl.aggregation.algorithms.schedules import Balanced, EverySeconds, PerCell
from xffl.aggregation.rounds import offer as pace


def counted(rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None, delay: int) -> list[Any]:
    """Steps as weights: what each cell gave to each round."""
    state = make_state(rank, sizes, hsdp)
    cell = state.federated_rank or 0
    model = xffl.shard(net(), state)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    made, seen = 0, 0
    reports: list[xffl.RoundReport] = []

    def weight() -> float:
        nonlocal seen
        fresh, seen = made - seen, made
        return fresh / sizes[cell]

    scaling = xffl.FederatedScaling(
        model, optimizer, state, every=PerCell((2, 5)), delay=delay, weight=weight, on_round=reports.append
    )
    with scaling:
        for number in range((7, 21)[cell]):
            made += 1
            train(model, optimizer, rank, range(number, number + 1))
    told: list[Any] = [None] * world_size
    dist.all_gather_object(told, digests(model))
    assert all(one == told[0] for one in told)
    assert [report.round for report in reports] == list(range(1, len(reports) + 1))
    return [tuple(round(weight, 9) for weight in report.weights) for report in reports]


@pytest.mark.parametrize("sizes, hsdp", [((2, 2), None), ((4, 2), 2), ((2, 1), None)], ids=str)
@pytest.mark.parametrize("delay", [0, 1, 4])
def test_cells_with_unequal_steps_meet(sizes: tuple[int, ...], hsdp: int | None, delay: int) -> None:
    """A delay of 4 is longer than a window of cell 0: it merges before it starts the next round."""
    results = run_world(sum(sizes), counted, sizes, hsdp, delay)
    expected = [(2.0, 5.0)] * 3 + [(1.0, 5.0), (0.0, 1.0)]
    assert results == [expected] * sum(sizes)


class Clock:
    """A clock that only steps move, and whatever a round does."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def timed(rank: int, world_size: int) -> None:
    """Step times are told in the round, rounds are not counted in them, and the next windows follow from them."""
    state = make_state(rank, (1, 1), None)
    seconds = (0.1, 0.3)[rank]
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    clock = Clock()
    pace.time = SimpleNamespace(perf_counter=clock.perf_counter)  # type: ignore[assignment]
    for schedule, windows in (
        (Balanced(8), [(8, 8), (12, 4), (12, 4)]),
        (EverySeconds(2.4, first=5), [(5, 5), (24, 8), (24, 8)]),
    ):
        reports: list[xffl.RoundReport] = []
        at: list[int] = []

        def slow(report: xffl.RoundReport, reports: list[xffl.RoundReport] = reports) -> None:
            reports.append(report)
            clock.now += 1000.0

        clock.now += 500.0  # before the block
        with xffl.FederatedScaling(model, optimizer, state, every=schedule, on_round=slow):
            for number in range(sum(window[rank] for window in windows)):
                clock.now += seconds
                train(model, optimizer, rank, range(number, number + 1))
                at += [number + 1] * (len(reports) - len(at))
        assert at == [sum(window[rank] for window in windows[: number + 1]) for number in range(3)]
        for report in reports:
            assert report.step_seconds == pytest.approx((0.1, 0.3), rel=1e-9)
        assert [report.steps for report in reports] == [tuple(map(float, window)) for window in windows]


def test_measured_step_times_balance_the_cells() -> None:
    run_world(2, timed)


def diverging(rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None) -> None:
    """Rounds take place where the dense cells have moved far enough, and skipped steps count in the next."""
    state = make_state(rank, sizes, hsdp)
    cell = state.federated_rank or 0
    every, checks, threshold = 2, 12, 0.75
    counts = [1.0, 3.0]
    dense = Federation(sizes, momentum=0.0)
    expected: list[bool] = []
    values: list[Values] = []
    for _ in range(checks):
        for one in range(len(sizes)):
            dense.train(one, every)
        squares = [sum(float((y - x).pow(2).sum()) for x, y in zip(dense.x, ys, strict=True)) for ys in dense.y]
        divergence = math.sqrt(sum(p * square for p, square in zip(counts, squares, strict=True)) / sum(counts))
        expected.append(divergence >= threshold)
        if expected[-1]:
            dense.meet([(1.0 * a + 3.0 * b) / 4.0 for a, b in zip(*dense.y, strict=True)])
        values.append([one.clone() for one in dense.y[cell]])
    first = expected.index(True)  # fails where no check finds them far apart
    assert not all(expected[first:]), "the threshold tells checks apart"

    model = xffl.shard(net(), state)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    reports: list[xffl.RoundReport] = []

    def note(report: xffl.RoundReport) -> None:
        reports.append(report)
        if len(reports) <= checks:
            close(model, values[len(reports) - 1])

    spec = f"divergence:every={every},threshold={threshold}"
    scaling = xffl.FederatedScaling(
        model, optimizer, state, every=spec, weight=lambda: counts[cell] * every / sizes[cell], on_round=note
    )
    with scaling:
        train(model, optimizer, rank, range(every * checks))
    assert [not report.is_skipped for report in reports[:checks]] == expected
    weights = []
    waiting = 0
    for is_taken in expected:
        waiting += every
        if is_taken:
            weights.append(tuple(count * waiting for count in counts))
            waiting = 0
    assert [report.weights for report in reports[:checks] if not report.is_skipped] == weights
    is_open = not expected[-1]  # what was skipped at the end is taken in by the closing round
    assert len(reports) == checks + is_open and not reports[-1].is_skipped
    told: list[Any] = [None] * world_size
    dist.all_gather_object(told, digests(model))
    assert all(one == told[0] for one in told)


@pytest.mark.parametrize("sizes, hsdp", [((2, 2), None), ((4, 2), 2), ((4, 2), None)], ids=str)
def test_rounds_follow_the_divergence(sizes: tuple[int, ...], hsdp: int | None) -> None:
    run_world(sum(sizes), diverging, sizes, hsdp)


def by_name(rank: int, world_size: int) -> None:
    """An algorithm is its parts, and a mapping is an aggregator made by hand."""
    state = make_state(rank, (2, 2), None)

    def trained(**options: Any) -> dict[str, str]:
        model = xffl.shard(net(), state)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        if options.pop("is_made", False):
            options["aggregator"] = xffl.Aggregator(model, state, **options["aggregator"])
        with xffl.FederatedScaling(model, optimizer, state, **options):
            train(model, optimizer, rank, range(9))
        return digests(model)

    plain = trained(every=3)
    for ways in (
        [
            {"every": 3, "algorithm": "fedavgm:lr=0.5"},
            {"every": "steps:every=3", "aggregator": {"server": "fedavgm:lr=0.5"}},
            {"every": {"name": "steps", "every": 3}, "aggregator": {"server": "fedavgm:lr=0.5"}, "is_made": True},
        ],
        [{"every": 3, "algorithm": "fedprox:mu=0.5"}, {"every": 3, "client": {"name": "fedprox", "mu": 0.5}}],
        [
            {"every": 3, "algorithm": {"name": "streaming_diloco", "fragments": 2}},
            {
                "every": 3,
                "delay": 1,
                "alpha": 0.5,
                "aggregator": {"server": "diloco:lr=0.4", "fragments": 2, "overlap": True},
            },
        ],
    ):
        first, *others = (trained(**way) for way in ways)
        assert all(other == first for other in others) and first != plain


def test_an_algorithm_is_its_parts() -> None:
    run_world(4, by_name)


class Stubborn(Schedule):
    """Wants a round at once."""

    def steps(self, rounds: int, cell: int, report: xffl.RoundReport | None) -> int:
        return 0


def wrong(rank: int, world_size: int) -> None:
    state = make_state(rank, (1, 1), None)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for options, told in (
        ({"every": PerCell((1, 2, 3))}, "3 numbers for 2 cells"),
        ({"every": PerCell((1, 2 + rank))}, r"every=PerCell\(counts=\(1, 3\)\)"),
        ({"every": "divergence:every=2,threshold=1.0", "delay": 1}, "delay is 1; leave one out"),
        ({"every": "divergence:every=2,threshold=1.0", "aggregator": {"fragments": 2}}, "fragments is 2"),
        ({"every": "sometimes"}, "'sometimes' is unknown"),
        ({"every": "steps:every=0"}, "every must be a positive integer, got 0"),
        ({"every": None, "algorithm": "fedprox"}, "every must be a positive integer, got None"),
        (
            {"every": Stubborn()},
            r"steps of schedule Stubborn.* for cell \d after 0 rounds must be a positive integer, got 0",
        ),
    ):
        with pytest.raises(xffl.ConfigError, match=told):
            xffl.FederatedScaling(model, optimizer, state, **options).__enter__()  # type: ignore[arg-type]


def test_wrong_schedules_are_refused_on_all_ranks() -> None:
    run_world(2, wrong)
