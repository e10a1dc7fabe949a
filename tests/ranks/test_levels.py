"""Rounds on several levels, against dense means of means, and what happens where one level fails or ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from torch import nn

import xffl
from tests.ranks.test_algorithms import build, geometric_median, mean, median, momentum, move, plain, vector
from tests.ranks.test_round import digests, make_state
from tests.rounds import replace_exchange
from tests.rows import some_of
from tests.worlds import run_world
from xffl.aggregation import Level, Levels
from xffl.aggregation.engine.decision.consensus import RoundInput
from xffl.aggregation.engine.planning.transfers import RoundContext

Array = npt.NDArray[np.float64]
Groups = tuple[tuple[int, ...], ...]
Rule = Callable[..., Array]

POLICIES = {"*fixed": "average"}
NODES: tuple[tuple[int, ...], int | None, Groups] = ((1,) * 8, None, ((2, 2, 2, 2), (2, 2)))
FACILITIES: list[tuple[tuple[int, ...], int | None, Groups]] = [
    ((2, 2, 2, 2), None, ((2, 2),)),
    ((2, 2, 2, 2), None, ((3, 1),)),
    ((4, 4), 2, ((1, 1),)),
    ((4, 2, 2), 2, ((2, 1),)),
    NODES,
]


RULES: dict[str, Rule] = {
    "mean": plain,
    "fedavgm": momentum(0.9, 0.9),
    "diloco": momentum(0.7, 0.9, is_nesterov=True),
    "geometric_median": geometric_median,
    "median": median,
}


class Dense:
    """All cells in one process; ``units[level]`` are the cells of each unit that meets there."""

    def __init__(self, start: Array, cells: int, groups: Groups, everys: Sequence[int], rules: Sequence[Rule]) -> None:
        self.models = [start] * cells
        self.units = [[[cell] for cell in range(cells)]]
        for sizes in groups:
            below = self.units[-1]
            ends = accumulate(sizes, initial=0)
            self.units.append([[cell for unit in below[a:b] for cell in unit] for a, b in pairwise(ends)])
        self.places = [*self.units[1:], [list(range(cells))]]
        self.everys, self.rules = everys, rules
        self.counts = [np.zeros(len(units)) for units in self.units]
        self.agreed = [[start] * len(places) for places in self.places]
        self.kept: list[list[dict[str, Any]]] = [[{} for _ in places] for places in self.places]
        self.number = 0

    def round(self, draws: Array, weights: Array) -> int:
        """Move all cells, and average as far up as is due; return the highest level."""
        self.models = [model + draw for model, draw in zip(self.models, draws, strict=True)]
        self.counts[0] = weights.copy()
        self.number += 1
        period = 1
        for level, every in enumerate(self.everys):
            period *= every
            if self.number % period:
                return level - 1
            for index, place in enumerate(self.places[level]):
                here = [unit for unit, cells in enumerate(self.units[level]) if cells[0] in place]
                values = [self.models[self.units[level][unit][0]] for unit in here]
                counts = self.counts[level][here]
                new = self.rules[level](
                    self.agreed[level][index], values, counts, np.ones(len(here)), self.kept[level][index]
                )
                for cell in place:
                    self.models[cell] = new
                self.agreed[level][index] = new
                for below in range(level):  # they go on from what came from above
                    for other, cells in enumerate(self.places[below]):
                        if cells[0] in place:
                            self.agreed[below][other] = new
                if level + 1 < len(self.units):
                    self.counts[level + 1][index] += counts.sum()
            self.counts[level][:] = 0.0
        return len(self.everys) - 1


def draws_of(number: int, cells: int, numel: int) -> Array:
    return np.random.default_rng(number).normal(size=(cells, numel)) * 0.1


def told(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def step(model: nn.Module, draw: Array) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ends = np.cumsum([parameter.numel() for parameter in trained])[:-1]
    with torch.no_grad():
        for parameter, part in zip(trained, np.split(draw, ends), strict=True):
            move(parameter, part)


def descend(optimizer: torch.optim.Optimizer, gradient: float) -> None:
    """Make a local step along the same gradient everywhere."""
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.full_like(parameter, gradient)
    optimizer.step()


def against_dense(
    rank: int,
    world_size: int,
    sizes: tuple[int, ...],
    hsdp: int | None,
    groups: Groups,
    everys: tuple[int, ...],
    options: tuple[dict[str, Any], ...],
    rules: tuple[str, ...],
    is_weighed: bool,
) -> float:
    """Rounds of cells that move at random; return the largest difference from the dense run, relative."""
    state = make_state(rank, sizes, hsdp)
    cell, cells = state.topology.cell_of(rank), len(sizes)
    model = build(state)
    chosen = [
        Level(every, groups=group, options=option)
        for every, group, option in zip(everys, (None, *groups), options, strict=True)
    ]
    levels = Levels(model, state, chosen, policies=POLICIES, bucket_bytes=40)
    start = vector(model)
    dense = Dense(start, cells, groups, everys, [RULES[rule] for rule in rules])
    worst = 0.0
    for number in range(9):
        draws = draws_of(number, cells, len(start))
        weights = np.random.default_rng([number]).integers(1, 9, cells) + 0.0 if is_weighed else np.ones(cells)
        step(model, draws[cell])
        report = levels.aggregate(float(weights[cell]) / sizes[cell] if is_weighed else None)
        highest = dense.round(draws, weights)
        worst = max(worst, float(np.abs(vector(model) - dense.models[cell]).max() / np.abs(dense.models[cell]).max()))
        assert [level for level, one in enumerate(levels.reports) if one is not None] == list(range(highest + 1))
        assert report.round == levels.reports[highest].round and levels.rounds == number + 1  # type: ignore[union-attr]
        assert len(report.step_seconds) == cells
        # All ranks that have met hold the same bits.
        all_bits = told(digests(model))
        for place in dense.places[highest]:
            ranks = [other for other in range(world_size) if state.topology.cell_of(other) in place]
            assert all(all_bits[other] == all_bits[ranks[0]] for other in ranks)
    levels.close()
    return worst


def difference(
    sizes: tuple[int, ...], hsdp: int | None, groups: Groups, everys: tuple[int, ...], *more: Any, weighed: bool = True
) -> float:
    """Return the largest relative difference from the dense run, over all ranks and rounds."""
    options, rules = more or (({},) * len(everys), ("mean",) * len(everys))
    found = run_world(sum(sizes), against_dense, sizes, hsdp, groups, everys, options, rules, weighed, timeout_s=240.0)
    return max(found)


@pytest.mark.parametrize("sizes, hsdp, groups", some_of(FACILITIES, FACILITIES[0], FACILITIES[2]), ids=str)
def test_many_rounds_equal_the_dense_means_of_means(sizes: tuple[int, ...], hsdp: int | None, groups: Groups) -> None:
    assert difference(sizes, hsdp, groups, (1, 2, 2)[: len(groups) + 1]) <= 1e-6


def test_without_counts_every_level_in_each_round_is_one_mean_over_cells() -> None:
    """Uneven facilities: a mean of means that counted facilities alike would differ."""
    flat = Dense(np.zeros(1), 4, ((3, 1),), (1, 1), (plain, plain))
    flat.round(np.array([[1.0], [2.0], [3.0], [10.0]]), np.ones(4))
    assert flat.models == [mean([np.array([x]) for x in (1.0, 2.0, 3.0, 10.0)], np.ones(4))] * 4
    assert difference((2, 2, 2, 2), None, ((3, 1),), (1, 1), weighed=False) <= 1e-6


def test_each_level_has_a_server_optimizer_of_its_own() -> None:
    """The lower ones go on from what came from above, instead of taking it for a step of their own."""
    options: tuple[dict[str, Any], ...] = ({"server": "fedavgm:lr=0.9"}, {"server": "diloco"})
    assert difference((1, 1, 1, 1), None, ((2, 2),), (1, 3), options, ("fedavgm", "diloco")) <= 1e-6


def test_each_level_has_a_combiner_a_form_and_rails_of_its_own() -> None:
    combiners = ({"combine": "geometric_median:iterations=2000"}, {"combine": "median"})
    assert (
        difference((1,) * 8, None, ((4, 4),), (1, 2), combiners, ("geometric_median", "median"), weighed=False) <= 1e-6
    )
    forms = ({"form": "two_hop", "rails": True}, {"form": "all_gather", "rails": True, "atomic": False})
    assert difference((2, 2, 2, 2), 1, ((2, 2),), (1, 2), forms, ("mean", "mean")) <= 1e-6


def moved(rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None, groups: Groups) -> list[int]:
    state = make_state(rank, sizes, hsdp)
    model = xffl.shard(nn.Linear(64, 96, bias=False), state)
    levels = Levels(model, state, [Level(), Level(groups=groups[0])], bucket_bytes=1000, form="all_gather")
    levels.aggregate()
    return [-1 if report is None else report.bytes_across for report in levels.reports]


@pytest.mark.parametrize(
    "sizes, hsdp, groups, shards",
    [
        ((1, 1), None, (1, 1), 1),
        ((1,) * 4, None, (2, 2), 1),
        ((1,) * 8, None, (4, 4), 1),
        ((2, 2), None, (1, 1), 2),
        ((2, 2, 2, 2), None, (2, 2), 2),
        ((4, 4), 2, (1, 1), 2),
    ],
    ids=str,
)
def test_a_shard_leaves_a_facility_once_however_many_cells_it_has(
    sizes: tuple[int, ...], hsdp: int | None, groups: tuple[int, ...], shards: int
) -> None:
    size, cells = 64 * 96 * 4, groups[0]
    found = run_world(sum(sizes), moved, sizes, hsdp, (groups,))
    half = len(found) // 2
    for facility in (found[:half], found[half:]):
        assert sorted(across for _, across in facility if across) == [size // shards] * shards
        assert sum(within for within, _ in facility) == cells * (cells - 1) * size


def codecs(rank: int, world_size: int) -> None:
    state = make_state(rank, (2, 2, 2, 2), None)
    cell = state.topology.cell_of(rank)
    model = build(state)
    levels = Levels(model, state, [Level(), Level(2, "int8", (2, 2))], policies=POLICIES)
    start = vector(model)
    dense = Dense(start, 4, ((2, 2),), (1, 2), (plain, plain))
    exact = 0
    for number in range(12):
        draws = draws_of(number, 4, len(start))
        step(model, draws[cell])
        levels.aggregate(1.0)
        dense.round(draws, np.full(4, 2.0))
        off = np.abs(vector(model) - dense.models[cell])
        lower, upper = levels.reports
        assert lower is not None and lower.codec_error is None
        if number % 2:
            assert upper is not None and all(other == digests(model) for other in told(digests(model)))
            if number == 1:
                exact = upper.bytes_across
                assert off.max() <= 1e-6
            else:
                assert off.max() <= 0.01  # of steps that go 0.1 far
                crossed = sum(told(upper.bytes_across)) < 0.5 * sum(told(exact))
                assert crossed and (upper.codec_error or 0.0) > 0.0 if exact else crossed


def test_each_level_has_a_codec_of_its_own() -> None:
    run_world(8, codecs)


def comes_from_above(rank: int, world_size: int, lower: dict[str, Any], codec: str) -> None:
    """What a level above has agreed on is no step of the level below."""
    state = make_state(rank, (1, 1, 1, 1), None)
    model = build(state)
    chosen = [Level(codec=codec, options=lower), Level(groups=(2, 2))]
    levels = Levels(model, state, chosen, policies=POLICIES)
    step(model, draws_of(rank, 1, len(vector(model)))[0])
    levels.aggregate()
    after = digests(model)
    levels.aggregate()
    assert digests(model) == after


@pytest.mark.parametrize("lower, codec", [({}, "topk:0.1"), ({"server": "sgd:lr=0.5"}, "none")], ids=str)
def test_a_level_goes_on_from_what_came_from_above(lower: dict[str, Any], codec: str) -> None:
    run_world(4, comes_from_above, lower, codec)


def rejected_below(rank: int, world_size: int) -> None:
    """The facility of the broken cell repeats its round; the other one waits for it where they meet."""
    state = make_state(rank, (1,) * 4, None)
    model = build(state)
    levels = Levels(model, state, [Level(), Level(2, groups=(2, 2))], policies=POLICIES)
    start = vector(model)
    dense = Dense(start, 4, ((2, 2),), (1, 2), (plain, plain))
    weights = np.array([1.0, 2.0, 3.0, 5.0])
    for number in range(6):
        draws = draws_of(number, 4, len(start))
        step(model, draws[rank])
        if number in (1, 2) and rank < 2:
            first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
            kept = first.detach().clone()
            if rank == 1:
                with torch.no_grad():
                    first[0, 0] = float("nan")
            before = digests(model)
            with pytest.raises(xffl.RoundError, match=r"(?s)cell 1 holds.*level 0: .* ranks 0 to 1"):
                levels.aggregate(weights[rank])
            assert levels.can_go_on and digests(model) == before and levels.rounds == number
            with torch.no_grad():
                first.copy_(kept)
        levels.aggregate(weights[rank])
        highest = dense.round(draws, weights)
        assert np.abs(vector(model) - dense.models[rank]).max() <= 1e-6
        assert (levels.reports[1] is not None) == (highest == 1)
        if levels.reports[1] is not None:
            assert levels.reports[1].weights == (6.0, 16.0)
    assert told(digests(model)) == [digests(model)] * 4


def break_above(levels: Levels, rank: int) -> Callable[[], None]:
    """Let the exchange of level 1 fail on rank 2; return what mends it."""
    guilty = [rank == 2]

    def broken(exchange: Callable[[], RoundContext]) -> RoundContext:
        context = exchange()
        if any(guilty):
            raise MemoryError("no room")
        return context

    replace_exchange(levels._stages[1].aggregator, broken)
    return guilty.clear


def rejected_above(rank: int, world_size: int, *, is_resumed: bool = False) -> None:
    """What the level below has taken in counts once; the level above is due again with the next round."""
    state = make_state(rank, (1,) * 4, None)
    model = build(state)
    levels = Levels(model, state, [Level(), Level(3, groups=(2, 2))], policies=POLICIES)
    mend = break_above(levels, rank)
    for _ in range(2):
        levels.aggregate(rank + 1.0)
    step(model, draws_of(rank, 1, len(vector(model)))[0])
    with pytest.raises(xffl.RoundError, match=r"no room.*level 1: .* ranks 0 to 3"):
        levels.aggregate(rank + 1.0)
    lower, upper = levels.reports
    assert lower is not None and lower.weights == ((1.0, 2.0), (3.0, 4.0))[rank // 2] and upper is None
    bits = told(digests(model))
    assert bits[0] == bits[1] != bits[2] == bits[3] and levels.can_go_on
    mend()
    if is_resumed:
        saved = levels.state_dict()
        levels = Levels(model, state, [Level(), Level(3, groups=(2, 2))], policies=POLICIES)
        levels.load_state_dict(saved)
    levels.aggregate(rank + 11.0)  # what the failed call was told, and 10 since
    lower, upper = levels.reports
    assert lower is not None and lower.weights == (10.0, 10.0)
    assert upper is not None and upper.weights == (3 * 3.0 + 20.0, 3 * 7.0 + 20.0)
    levels.aggregate(1.0)
    assert levels.reports[0].weights == (1.0, 1.0) and levels.reports[1] is None  # type: ignore[union-attr]


def resumed_above(rank: int, world_size: int) -> None:
    rejected_above(rank, world_size, is_resumed=True)


def told_once(rank: int, world_size: int) -> None:
    """Steps that the lowest level has taken in before a level above failed do not count there again."""
    state = make_state(rank, (1,) * 4, None)
    model = build(state)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    levels = Levels(model, state, [Level(options={"combine": "fednova"}), Level(groups=(2, 2))], policies=POLICIES)
    fails = [rank == 3]

    def broken(exchange: Callable[[], RoundContext]) -> RoundContext:
        context = exchange()
        if fails and fails.pop():
            raise MemoryError("no room")
        return context

    replace_exchange(levels._stages[1].aggregator, broken)
    lowest: list[xffl.RoundReport | None] = []

    def train(every: Any, steps: int) -> None:
        scaling = xffl.FederatedScaling(
            model, optimizer, state, every=every, aggregator=levels, on_round=lambda _: lowest.append(levels.reports[0])
        )
        with scaling:
            for _ in range(steps):
                for parameter in optimizer.param_groups[0]["params"]:
                    parameter.grad = torch.ones_like(parameter)
                try:
                    optimizer.step()
                except xffl.RoundError:
                    lowest.append(None)

    train("per_cell:counts=[10,20,10,20]", (11, 21)[rank % 2])
    assert lowest[0] is None and lowest[1] is not None
    assert lowest[1].steps == (1.0, 1.0) and lowest[1].shares == (0.5, 0.5)
    # A cell that finishes with nothing new after the failure gives nothing again.
    lowest.clear()
    fails.append(rank == 3)
    try:
        train(2, 1 if rank == 0 else 4)
        assert rank > 0
    except xffl.RoundError:
        assert rank == 0
    after = next(report for report in lowest if report is not None)
    assert after.weights == ((0.0, 1.0), (1.0, 1.0))[rank // 2]


def cut_off_above(rank: int, world_size: int) -> None:
    """Where a vote of a level above breaks off, no further round follows."""
    state = make_state(rank, (1,) * 4, None)
    levels = Levels(build(state), state, [Level(), Level(groups=(2, 2))], policies=POLICIES)

    def broken(*args: Any) -> None:
        raise RuntimeError("link down")

    levels._stages[1].aggregator._coordinator._gather_status = broken  # type: ignore[method-assign, assignment]
    assert levels.can_go_on
    with pytest.raises(xffl.RoundError, match="could not be opened, this rank keeps its weights: link down.*level 1"):
        levels.aggregate()
    assert not levels.can_go_on and not levels.is_torn


@pytest.mark.parametrize("case", [rejected_below, rejected_above, resumed_above, told_once, cut_off_above])
def test_a_rejected_round_is_made_up_for(case: Callable[[int, int], None]) -> None:
    run_world(4, case)


def train(
    rank: int, world_size: int, sizes: tuple[int, ...], groups: Groups, everys: tuple[int, ...], steps: tuple[int, ...]
) -> tuple[list[list[tuple[float, ...]]], dict[str, str]]:
    """Cells of different length in a training loop; return the weights of each level's rounds, and the last bits."""
    state = make_state(rank, sizes, None)
    cell = state.topology.cell_of(rank)
    model = build(state)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    chosen = [Level(every, groups=group) for every, group in zip(everys, (None, *groups), strict=True)]
    levels = Levels(model, state, chosen, policies=POLICIES)
    weights: list[list[tuple[float, ...]]] = [[] for _ in everys]
    counted = 0

    def note(report: xffl.RoundReport) -> None:
        assert len(report.step_seconds) == len(sizes)  # also where this facility only answers
        for level, one in enumerate(levels.reports):
            if one is not None:
                weights[level].append(one.weights)

    def count() -> float:
        nonlocal counted
        counted, fresh = 0, counted
        return fresh / sizes[cell]

    for part in range(2):  # the same levels serve two loops
        with xffl.FederatedScaling(
            model, optimizer, state, every=2, weight=count, aggregator=levels, on_round=note
        ) as scaling:
            for number in range(steps[cell]):
                for parameter in optimizer.param_groups[0]["params"]:
                    parameter.grad = torch.full_like(parameter, float(cell + number + part))
                counted += 1
                optimizer.step()
        assert scaling.aggregator is levels
    return weights, digests(model)


@pytest.mark.parametrize(
    "sizes, groups, everys, steps",
    [
        ((1,) * 4, ((2, 2),), (1, 2), (3, 5, 12, 4)),
        ((2, 1, 1), (), (1,), (3, 5, 4)),
        ((1,) * 4, ((3, 1),), (1, 3), (2, 0, 7, 1)),
        ((1,) * 8, ((2, 2, 2, 2), (2, 2)), (1, 2, 2), (3, 5, 12, 4, 1, 1, 20, 9)),
    ],
    ids=str,
)
def test_facilities_that_finish_early_answer_until_the_last_has(
    sizes: tuple[int, ...], groups: Groups, everys: tuple[int, ...], steps: tuple[int, ...]
) -> None:
    found = run_world(sum(sizes), train, sizes, groups, everys, steps)
    assert all(bits == found[0][1] for _, bits in found)
    dense = Dense(np.zeros(1), len(sizes), groups, everys, [plain] * len(everys))
    ends = [0, *accumulate(sizes)]
    for level, places in enumerate(dense.places):
        for place in places:
            here = [unit for unit in dense.units[level] if unit[0] in place]
            rows = found[ends[place[0]]][0][level]
            # Each step counts once on each level: none is lost at the end, none counts twice.
            assert [sum(column) for column in zip(*rows, strict=True)] == [
                2.0 * sum(steps[cell] for cell in unit) for unit in here
            ]
            for cell in place:
                assert found[ends[cell]][0][level] == rows


def configured(rank: int, world_size: int) -> list[dict[str, str]]:
    """The same levels as objects, and as a configuration file has them."""
    state = make_state(rank, (1,) * 4, None)
    bits = []
    for as_text in (False, True):
        model = build(state)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        if as_text:
            lower, upper = {"codec": "none"}, {"every": 2, "codec": "bf16", "groups": [2, 2]}
            aggregator: Any = {"levels": [lower, upper], "policies": POLICIES, "server": "fedavgm:lr=0.7"}
        else:
            levels = [Level(), Level(2, "bf16", (2, 2))]
            aggregator = Levels(model, state, levels, policies=POLICIES, server="fedavgm:lr=0.7")
        with xffl.FederatedScaling(model, optimizer, state, every=2, aggregator=aggregator) as scaling:
            assert isinstance(scaling.aggregator, Levels)
            for number in range(11):
                descend(optimizer, float(rank + number))
        assert scaling.aggregator.is_closed == as_text  # what it has made it gives back
        bits.append(digests(model))
    for wrong, told in (({"period": 2}, "a level has no period"), ({"groups": 2}, "groups=2 of level 1")):
        with pytest.raises(xffl.ConfigError, match=told):
            Levels(model, state, [{}, wrong])
    with pytest.raises(xffl.ConfigError, match="overlap=True, and without levels"):
        xffl.FederatedScaling(model, optimizer, state, every=2, delay=1, aggregator={"levels": [{}]})
    return bits


def test_levels_can_be_configured() -> None:
    for first, second in run_world(4, configured):
        assert first == second


def rejected_at_the_end(rank: int, world_size: int, steps: int) -> None:
    """A facility whose last round is rejected gives nothing to the level above, and takes its result."""
    state = make_state(rank, (1,) * 4, None)
    model = build(state)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    levels = Levels(model, state, [Level(), Level(2, groups=(2, 2))], policies=POLICIES)
    start = vector(model)
    scaling = xffl.FederatedScaling(model, optimizer, state, every=1, aggregator=levels)
    scaling.__enter__()
    for number in range(steps if rank < 2 else 6):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.full_like(parameter, rank + 1.0)
        if rank == 1 and number == steps - 1:
            parameter.grad.fill_(float("nan"))
        try:
            optimizer.step()
        except xffl.RoundError:
            assert rank < 2 and number == steps - 1
    if rank < 2:
        with pytest.raises(xffl.RoundError, match="cell 1 holds values that are not finite"):
            scaling.__exit__(None, None, None)
    else:
        scaling.__exit__(None, None, None)
    # Two steps of all, then four of the second facility, which is alone with its weight.
    np.testing.assert_allclose(vector(model), start - 2 * 2.5 - 4 * 3.5, atol=1e-5)
    assert told(digests(model)) == [digests(model)] * 4


@pytest.mark.parametrize("steps", [3, 4])  # with 4, a round that the level above has not taken came before
def test_a_facility_that_ends_with_a_rejected_round_takes_the_result_of_the_others(steps: int) -> None:
    run_world(4, rejected_at_the_end, steps)


def rejected_everywhere(rank: int, world_size: int) -> None:
    """Facilities that all ended with a rejected round count again in the next block."""
    state = make_state(rank, (1,) * 4, None)
    model = build(state)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    levels = Levels(model, state, [Level(), Level(2, groups=(2, 2))], policies=POLICIES)
    start, kept = vector(model), {name: value.clone() for name, value in model.state_dict().items()}

    def loop(steps: int, bad: float) -> None:
        with xffl.FederatedScaling(model, optimizer, state, every=2, aggregator=levels):
            for _ in range(steps):
                descend(optimizer, rank + 1.0 + bad)

    with pytest.raises(xffl.RoundError, match="holds values that are not finite"):
        loop(1, float("nan") if rank % 2 else 0.0)
    model.load_state_dict(kept)
    loop(4, 0.0)
    np.testing.assert_allclose(vector(model), start - 4 * 2.5, atol=1e-5)


def test_a_block_after_one_that_was_rejected_counts() -> None:
    run_world(4, rejected_everywhere)


def normalized(rank: int, world_size: int) -> None:
    """A combiner above is told how many rounds each facility has made since they last met."""
    state = make_state(rank, (1,) * 4, None)
    model = build(state)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    above = Level(2, groups=(2, 2), options={"combine": "fednova"})
    levels = Levels(model, state, [Level(), above], policies=POLICIES)
    start = vector(model)
    with xffl.FederatedScaling(model, optimizer, state, every=1, aggregator=levels):
        for _ in range(3 if rank < 2 else 4):
            descend(optimizer, rank + 1.0)
    # Two steps of all; then a round of the first facility (1.5, a third of the weight) and two of the second (3.5).
    rounds = (1 + 2 * 2) / 3
    np.testing.assert_allclose(vector(model), start - 2 * 2.5 - rounds * (1.5 + 2 * 3.5) / 3, atol=1e-5)


def test_rounds_below_are_the_steps_of_a_level() -> None:
    run_world(4, normalized)


def rejected_above_at_the_end(rank: int, world_size: int) -> None:
    """A last round of the highest level that is rejected is the end for all; then they may start again."""
    state = make_state(rank, (1,) * 4, None)
    model = build(state)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    levels = Levels(model, state, [Level(), Level(5, groups=(2, 2))], policies=POLICIES)
    tries = 0
    start = vector(model)

    def broken(exchange: Callable[[], RoundContext]) -> RoundContext:
        nonlocal tries
        tries += 1
        if tries > 1:
            return exchange()
        raise MemoryError("no room")

    def loop(steps: int) -> None:
        with xffl.FederatedScaling(model, optimizer, state, every=1, aggregator=levels):
            for _ in range(steps):
                descend(optimizer, rank + 1.0)

    replace_exchange(levels._stages[1].aggregator, broken)
    with pytest.raises(xffl.RoundError, match="no room"):
        loop(rank // 2 + 2)
    assert tries == 1 and not levels.can_go_on
    loop(1)
    # Facilities of 2 and 3 steps, with one more each, of 1.5 and of 3.5.
    np.testing.assert_allclose(vector(model), start - (6 * 3 * 1.5 + 8 * 4 * 3.5) / 14, atol=1e-5)
    assert told(digests(model)) == [digests(model)] * 4


def test_a_rejected_end_is_the_end_for_all() -> None:
    run_world(4, rejected_above_at_the_end)


def resumed(rank: int, world_size: int) -> None:
    state = make_state(rank, (2, 2, 2, 2), None)
    cell = state.topology.cell_of(rank)
    chosen = [Level(codec="bf16"), Level(3, "int8", (2, 2), {"server": "diloco"})]

    def run(levels: Levels, model: nn.Module, numbers: range) -> None:
        for number in numbers:
            step(model, draws_of(number, 4, len(vector(model)))[cell])
            levels.aggregate(cell + number + 1.0)

    model = build(state)
    levels = Levels(model, state, chosen, policies=POLICIES)
    run(levels, model, range(5))
    saved, weights = levels.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}
    run(levels, model, range(5, 9))
    expected = digests(model)
    other = build(state)
    fresh = Levels(other, state, chosen, policies=POLICIES)
    other.load_state_dict(weights)
    fresh.load_state_dict(saved)
    assert fresh.rounds == 5
    run(fresh, other, range(5, 9))
    assert digests(other) == expected
    with pytest.raises(xffl.CheckpointError, match="that of 1 levels, and there are 2"):
        fresh.load_state_dict({"rounds": 1})
    fresh.close()
    with pytest.raises(xffl.StateError, match="closed"):
        fresh.aggregate()
    run(levels, model, range(9, 12))  # the groups of others were not those that were given back


def test_resuming_between_two_levels_equals_never_having_stopped() -> None:
    run_world(8, resumed)


def wrong(rank: int, world_size: int) -> None:
    state = make_state(rank, (1, 1, 1), None)
    model = build(state)
    top = Level(groups=(2, 1))
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ([], {}, "a list of at least one Level"),
        ([2], {}, "level 0 must be a Level"),
        ([Level(2)], {}, "every of level 0 must be .*got 2"),
        ([Level(), Level(0, groups=(2, 1))], {}, "every of level 1 must be a positive integer, got 0"),
        ([Level(groups=(1, 1, 1))], {}, r"groups=\(1, 1, 1\) of level 0"),
        ([Level(), Level()], {}, "groups=None of level 1"),
        ([Level(), Level(groups=(2, 0, 1))], {}, r"groups=\(2, 0, 1\) of level 1"),
        ([Level(), Level(groups=(2, 2))], {}, "do not hold the 3 units"),
        ([Level(), top], {"overlap": True}, "levels take no overlap"),
        ([Level(), replace(top, options={"server": "fedadm:lr=1"})], {}, r"^level 1: server 'fedadm' is .* your own$"),
        ([Level(options={"fragments": 2}), top], {}, "levels take no fragments"),
        ([Level(), top if rank else Level(3, groups=(2, 1))], {}, "different levels"),
        (
            [Level(), Level(codec="itn8", groups=(2, 1))],
            {},
            r"^level 1: codec 'itn8' .*mean 'int8'.*; give one of [^()]*$",
        ),
        # Of two cells, and of one, no combiner can leave one out: facilities differ in what they are.
        ([Level(options={"combine": "krum:faulty=1"}), top], {}, "krum.*level 0"),
    ]
    for chosen, options, message in cases:
        with pytest.raises(xffl.ConfigError, match=f"(?s)(?i){message}") as error:
            Levels(model, state, chosen, **options)
        assert len(set(told(type(error.value)))) == 1
    levels = Levels(model, state, [Level(), top])
    with pytest.raises(xffl.StateError, match="without a threshold"):
        levels.participate(RoundInput(), least_divergence=1.0)
    with pytest.raises(xffl.StateError, match="overlap"):
        levels.aggregate_async()
    assert levels.aggregate().weights == (2.0, 1.0)
    levels.close()


def uneven(rank: int, world_size: int) -> None:
    state = make_state(rank, (2, 1), None)
    with pytest.raises(xffl.ConfigError, match="without HSDP cut the model in different ways"):
        Levels(build(state), state, [Level(), Level(groups=(1, 1))])


@pytest.mark.parametrize("case", [wrong, uneven])
def test_what_cannot_be_meant_is_told_to_all(case: Callable[[int, int], None]) -> None:
    run_world(3, case)
