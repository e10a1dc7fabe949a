"""What comes between rounds and once went wrong: tears that others do not hear of, states, ends, wrong arguments."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import xffl
from tests.ranks.test_levels import break_above
from tests.ranks.test_round import make_state
from tests.ranks.test_round_edges import linear
from tests.ranks.test_round_votes import raised
from tests.rounds import aggregator_of
from tests.worlds import run_world
from xffl.aggregation.algorithms.combiners import AggregationWeights, CellStats, Mean
from xffl.aggregation.engine.decision.consensus import RoundInput
from xffl.aggregation.federations.hierarchical import Level, Levels
from xffl.errors import TornError

NONE = "nothing was raised"
PRIVACY = {"name": "dp_fedavg", "clip": 1.0, "noise": 0.5, "seed": 7}


def moved(model: nn.Module, by: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by)


def tear(broken: xffl.Aggregator, called: xffl.Aggregator | Levels) -> None:
    """Call for a round whose outcome one aggregator cannot learn."""
    coordinator = broken._coordinator
    close = coordinator._close

    def fail(*args: Any) -> None:
        raise TornError("planted")

    coordinator._close = fail  # type: ignore[method-assign]
    with pytest.raises(xffl.RoundError, match="planted"):
        called.aggregate()
    coordinator._close = close  # type: ignore[method-assign]


def torn_level(rank: int, world_size: int, number: int, options: dict[str, Any]) -> str:
    """After a tear of one level, no level remembers the model of before."""
    state = make_state(rank, (1, 1, 1, 1), None)
    model = linear(16)
    levels = Levels(model, state, [Level(**options), Level(every=3, groups=(2, 2), **options)])
    saved = {name: values.clone() for name, values in model.state_dict().items()}
    for _ in range(2 if number else 4):
        moved(model, 1.0)
        levels.aggregate()
    tear(levels._stages[number].aggregator, levels)
    assert levels.is_torn
    model.load_state_dict(saved)
    for _ in range(3):
        told = raised(levels.aggregate)
        assert torch.equal(model.weight, saved["weight"])
    return told


@pytest.mark.parametrize("number", [0, 1])
def test_a_tear_is_forgotten_by_all_levels(number: int) -> None:
    assert set(run_world(4, torn_level, number, {"codec": "topk:0.05"})) == {NONE}
    for told in run_world(4, torn_level, number, {"options": {"server": "sgd:lr=0.5"}}):
        assert "load the aggregator's state of the same checkpoint" in told


def two_aggregators(rank: int, world_size: int) -> None:
    """Two aggregators of one model: what tears it for one is heard of by the other, also where it saves first."""
    state = make_state(rank, (1, 1), None)
    model = linear(16)
    torn, other = (xffl.Aggregator(model, state, codec="int8") for _ in range(2))
    other.aggregate()
    saved, known = {name: values.clone() for name, values in model.state_dict().items()}, other.state_dict()
    assert known["codecs"]["seeded"] == [0]
    tear(torn, torn)
    model.load_state_dict(saved)
    assert other.state_dict()["codecs"]["seeded"] == []
    other.load_state_dict(known)
    assert other.state_dict()["codecs"]["seeded"] == [0]


def few_secure_cells(rank: int, world_size: int, atomic: bool) -> None:
    """Too few cells for a secure sum: nothing was sent, so nothing is torn."""
    state = make_state(rank, (1, 1, 1), None)
    model = linear(8, seed=rank)
    aggregator = xffl.Aggregator(model, state, secure=True, atomic=atomic)
    aggregator.aggregate(1.0)
    moved(model, rank)
    before = model.weight.detach().clone()
    with pytest.raises(xffl.RoundError, match="secure sum needs 3") as caught:
        aggregator.aggregate(0.0 if rank == 2 else 1.0)
    assert str(caught.value).count("secure sum needs") == 1
    assert torch.equal(model.weight, before) and not aggregator.is_torn
    assert aggregator.aggregate(1.0).round == 2


@dataclass(frozen=True)
class Choosy(Mean):
    """A mean of three cells, or of none."""

    def weigh(self, seen: CellStats) -> AggregationWeights:
        if len(seen.weights) < 3:
            raise ValueError("not enough for me")
        return super().weigh(seen)


def choosy_combiner(rank: int, world_size: int) -> None:
    """What a combiner will not weigh is rejected before anything moves, also with nothing beside the model."""
    state = make_state(rank, (1, 1, 1), None)
    model = linear(8, seed=rank)
    before = model.weight.detach().clone()
    aggregator = xffl.Aggregator(model, state, combine=Choosy(), atomic=False)
    with pytest.raises(xffl.RoundError, match=r"values of cells \(0, 1\): ValueError: not enough for me"):
        aggregator.aggregate(0.0 if rank == 2 else 1.0)
    assert torch.equal(model.weight, before) and not aggregator.is_torn
    assert aggregator.aggregate(1.0).round == 1


def other_states(rank: int, world_size: int) -> None:
    """A state with parts that an aggregator has no use for is refused."""
    state = make_state(rank, (1, 1, 1, 1), None)

    def layers() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

    def saved(**options: Any) -> dict[str, Any]:
        model = layers()
        aggregator = xffl.Aggregator(model, state, **options)
        for _ in range(2):
            moved(model, 0.01 * rank)
            aggregator.aggregate()
        return aggregator.state_dict()

    def climbing(every: int) -> Levels:
        return Levels(layers(), state, [Level(), Level(every=every, groups=(2, 2))])

    levels = climbing(2)
    levels.aggregate()
    plain = xffl.Aggregator(layers(), state)
    for found, into, told in (
        (saved(codec="int8"), plain, "what lossy codecs remember"),
        (saved(server="fedadam:lr=0.1"), plain, "the last agreed model"),
        (saved(privacy=PRIVACY, server="fedadam"), xffl.Aggregator(layers(), state, server="fedadam"), "privacy"),
        (saved(fragments=3), xffl.Aggregator(layers(), state, fragments=2), "3 fragments, and this aggregator has 2"),
        (levels.state_dict(), plain, "levels above"),
        (levels.state_dict(), climbing(3), "every 2 rounds of the level below, and this one meets every 3"),
    ):
        with pytest.raises(xffl.CheckpointError, match=told):
            into.load_state_dict(found)
        assert into.rounds == 0
    again = climbing(2)
    again.load_state_dict(levels.state_dict())
    assert again.rounds == 1


def ending_schedule(rank: int, world_size: int) -> list[str]:
    """A schedule that has come to its end rejects rounds and leaves the model whole."""
    state = make_state(rank, (1, 1), None)
    model = linear(4)
    rates = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4]
    server = {"name": "sgd", "lr": 1.0, "schedule": rates.__getitem__}
    aggregator = xffl.Aggregator(model, state, server=server)
    told = []
    for _ in range(9):
        moved(model, 1.0 + rank)
        before = model.weight.detach().clone()
        told.append(raised(aggregator.aggregate))
        assert not aggregator.is_torn and torch.equal(model.weight, before) == (told[-1] != NONE)
    return told


def wrong_words(rank: int, world_size: int) -> None:
    """What cannot be meant on one rank is told to all, at once, and the next round takes place."""
    state = make_state(rank, (2,), 1)
    model = linear(8)
    aggregator = aggregator_of(model, state, overlap=True)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("steps must be .* >= 0, got None", lambda: aggregator.aggregate(1.0, steps=None if rank else 2.0)),  # type: ignore[arg-type]
        (
            "steps must be .* >= 0, got nan",
            lambda: aggregator.aggregate(1.0, steps=float("nan") if rank else 2.0),
        ),
        (
            "alpha must be a number >= 0 and < 1, got 1.0",
            lambda: aggregator.aggregate_async(1.0, alpha=1.0 if rank else 0.5).merge(),
        ),
        (
            "alpha must be a number >= 0 and < 1, got 'x'",
            lambda: aggregator.aggregate_async(1.0, alpha="x" if rank else 0.5).merge(),
        ),  # type: ignore[arg-type]
        (
            "seconds .*, got -1.0",
            lambda: aggregator.aggregate_async(1.0, seconds=-1.0 if rank else 0.5).merge(),
        ),
    ]
    for told, call in calls:
        start = time.monotonic()
        with pytest.raises(xffl.ConfigError, match=told):
            call()
        assert time.monotonic() - start < 40.0 and aggregator.rounds == 0 and aggregator.under_way is None
    assert aggregator.aggregate_async(1.0, alpha=0.5).merge().round == 1


def seeded_noise(rank: int, world_size: int) -> None:
    """Resumed, seeded noise goes on where it was: no round gets that of another."""
    state = make_state(rank, (1, 1), None)

    def train(stops: bool) -> list[torch.Tensor]:
        model = linear(8)
        aggregator = xffl.Aggregator(model, state, privacy=PRIVACY)
        seen = []
        for number in range(4):
            if stops and number == 2:
                kept = aggregator.state_dict()
                aggregator = xffl.Aggregator(model, state, privacy=PRIVACY)
                aggregator.load_state_dict(kept)
            before = model.weight.detach().clone()
            aggregator.aggregate()
            seen.append(model.weight.detach() - before)
        return seen

    whole, resumed = train(False), train(True)
    assert all(map(torch.equal, whole, resumed))
    for one, other in ((0, 1), (0, 2), (1, 3)):
        pair = torch.stack([whole[one].flatten(), whole[other].flatten()])
        assert abs(torch.corrcoef(pair)[0, 1].item()) < 0.5


def skipped(rank: int, world_size: int) -> None:
    """A round in which nothing moved reports no error of a codec."""
    state = make_state(rank, (1, 1), None)
    model = linear(8)
    aggregator = xffl.Aggregator(model, state, codec="int4", norms=True)
    aggregator.aggregate()
    moved(model, 0.01 * (1 + rank))
    assert (aggregator.aggregate().codec_error or 0.0) > 0.0
    report = aggregator.participate(RoundInput(1.0), least_divergence=1e9)
    assert report is not None and report.is_skipped and report.codec_error is None


def part_of_the_world(rank: int, world_size: int) -> None:
    """Ranks of a part are counted in it, as the message says."""
    state = make_state(rank, (1, 1, 1, 1), None)
    levels = Levels(linear(8), state, [Level(), Level(every=99, groups=(2, 2))])
    if rank < 2:
        levels.aggregate(1.0)
        return
    with pytest.raises(xffl.ConfigError, match=r"rank 1 of 2\b.*ranks 2 to 3 of the world"):
        levels.aggregate(-1.0 if rank == 3 else 1.0)


def edge_of_a_type(rank: int, world_size: int, dtype: torch.dtype, codec: str) -> None:
    """Finite values stay finite, whatever a code adds to them."""
    state = make_state(rank, (1, 1), None)
    limit = torch.finfo(dtype).max
    model = nn.ParameterList([nn.Parameter(torch.zeros(64).to(dtype))])
    aggregator = xffl.Aggregator(model, state, codec=codec)
    aggregator.aggregate()
    with torch.no_grad():
        model[0].copy_(torch.linspace(-limit, limit, 64))
    for value in (None, 1.0, 1.0):
        if value is not None:
            with torch.no_grad():
                model[0].fill_(value)
        aggregator.aggregate()
        assert model[0].float().isfinite().all() and (model[0].float().abs() <= limit).all()


def lasting_nan(rank: int, world_size: int) -> None:
    """A loop with a cell whose values stay NaN ends, also where there are fragments left."""
    state = make_state(rank, (1, 1), None)
    model = nn.ParameterList([nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    aggregator = xffl.Aggregator(model, state, fragments=2)
    scaling = xffl.FederatedScaling(model, optimizer, state, every=5, aggregator=aggregator)

    def loop() -> None:
        with scaling:
            for parameter in model:
                parameter.grad = torch.full((4,), float("nan") if rank else 1.0)
            optimizer.step()

    with pytest.raises(xffl.RoundError, match="not finite"):
        loop()


def interrupted_hook(rank: int, world_size: int) -> None:
    """A loop's merge that was interrupted can be taken up again."""
    state = make_state(rank, (1, 1), None)
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with xffl.FederatedScaling(model, optimizer, state, every=2, delay=1) as scaling:
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, float(rank))
            optimizer.step()
        pending = scaling.aggregator.under_way
        assert pending is not None
        conclude = pending._conclude

        def interrupted(*args: Any) -> None:
            raise KeyboardInterrupt

        pending._conclude = interrupted  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            scaling.settle()
        pending._conclude = conclude
        assert scaling.is_under_way
        scaling.settle()
        assert scaling.aggregator.rounds == 1


def taken_below(rank: int, world_size: int) -> None:
    """What a level has taken before one above failed is part of the state, and counts once."""
    state = make_state(rank, (1, 1, 1, 1), None)
    model = linear()
    chosen = [Level(), Level(groups=(2, 2))]
    levels = Levels(model, state, chosen)
    break_above(levels, rank)
    with pytest.raises(xffl.RoundError, match="no room"):
        levels.aggregate(rank + 1.0)
    other = Levels(model, state, chosen)
    other.load_state_dict(levels.state_dict())
    other.aggregate(rank + 11.0)
    assert other.reports[0] is not None and other.reports[0].weights == (10.0, 10.0)


def left_under_way(rank: int, world_size: int, how: str) -> None:
    """A round of a run that has gone wrong is not merged into the checkpoint that is loaded then."""
    state = make_state(rank, (1, 1), None)
    model = linear(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaling = xffl.FederatedScaling(model, optimizer, state, every=4, delay=2)
    good = {name: value.clone() for name, value in model.state_dict().items()}

    def step(times: int) -> None:
        for _ in range(times):
            model(torch.ones(8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def is_good() -> bool:
        return all(torch.equal(value, good[name]) for name, value in model.state_dict().items())

    with pytest.raises(ValueError, match="spike"), scaling:  # noqa: PT012 - the block is what is left
        saved = scaling.state_dict()
        moved(model, 100.0 * (rank + 1))
        step(4)
        pending = scaling.aggregator.under_way
        assert pending is not None and scaling.is_under_way
        if how == "inside":
            model.load_state_dict(good)
            scaling.load_state_dict(saved)
            step(2)
            assert is_good() and not scaling.is_under_way
        raise ValueError("a spike of the loss")
    model.load_state_dict(good)
    with scaling:
        if how == "state":
            scaling.load_state_dict(saved)
        step(3)
        assert is_good() and not scaling.is_under_way
        with pytest.raises(xffl.StateError, match="ended already"):
            pending.merge()
        step(3)
        assert is_good() and scaling.aggregator.rounds == 1


def discarded_in_a_block(rank: int, world_size: int) -> None:
    """Weights may be put back in the middle of a delay; what the dropped round had counted counts in the next one."""
    state = make_state(rank, (1, 1), None)
    model = linear(seed=0)
    good = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    weights: list[Any] = []
    with xffl.FederatedScaling(
        model,
        optimizer,
        state,
        every=4,
        delay=2,
        weight=lambda: 4.0,
        on_round=lambda told: weights.append(told.weights),
    ) as scaling:
        scaling.discard()
        moved(model, 100.0 * (rank + 1))
        for number in range(1, 11):
            model(torch.ones(8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert scaling.is_under_way == (number in (4, 5, 8, 9))
            if number == 5:
                scaling.discard()
                model.load_state_dict(good)
                assert not scaling.is_under_way and scaling.aggregator.rounds == 0
        assert weights == [(8.0, 8.0)] and scaling.aggregator.rounds == 1
    assert all(torch.equal(value, good[name]) for name, value in model.state_dict().items())


def discarded(rank: int, world_size: int) -> None:
    """A round that is dropped leaves the model alone and does not count; the next one does."""
    state = make_state(rank, (1, 1), None)
    model = linear(seed=rank)
    aggregator = xffl.Aggregator(model, state, overlap=True)
    aggregator.discard()
    before = model.weight.detach().clone()
    pending = aggregator.aggregate_async()
    with pytest.raises(xffl.StateError, match="merge or discard it first"):
        aggregator.aggregate()
    aggregator.discard()
    assert aggregator.under_way is None and pending.is_done() and aggregator.rounds == 0
    assert torch.equal(model.weight, before)
    assert aggregator.aggregate().round == 1 and not torch.equal(model.weight, before)


def started_before_a_tear(rank: int, world_size: int) -> None:
    """A round that another one's tear has overtaken is not merged into what was loaded since."""
    state = make_state(rank, (1, 1), None)
    model = nn.ModuleList([linear(seed=0), linear(seed=1)])
    one, two = (xffl.Aggregator(model, state, overlap=True, policies={part: "local"}) for part in ("1.*", "0.*"))
    good = {name: value.clone() for name, value in model.state_dict().items()}
    moved(model, 100.0 * (rank + 1))
    pending = two.aggregate_async()
    tear(one, one)
    model.load_state_dict(good)
    with pytest.raises(xffl.StateError, match="a checkpoint after an inconsistent round has written tensors"):
        pending.merge()
    assert all(torch.equal(value, good[name]) for name, value in model.state_dict().items())
    assert two.under_way is None and two.aggregate().round == 1


@pytest.mark.parametrize(
    "ranks, case, args",
    [
        *((2, left_under_way, (how,)) for how in ("model", "state", "inside")),
        (2, discarded, ()),
        (2, discarded_in_a_block, ()),
        (2, started_before_a_tear, ()),
        (2, two_aggregators, ()),
        (3, few_secure_cells, (True,)),
        (3, few_secure_cells, (False,)),
        (3, choosy_combiner, ()),
        (4, other_states, ()),
        (2, wrong_words, ()),
        (2, seeded_noise, ()),
        (2, skipped, ()),
        (4, part_of_the_world, ()),
        *((2, edge_of_a_type, (torch.float16, codec)) for codec in ("bf16", "int8", "int4")),
        (2, edge_of_a_type, (torch.float8_e4m3fn, "int8")),
        (2, lasting_nan, ()),
        (2, interrupted_hook, ()),
        (4, taken_below, ()),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_after(ranks: int, case: Callable[..., None], args: tuple[Any, ...]) -> None:
    run_world(ranks, case, *args, timeout_s=60.0)


def test_a_schedule_that_ends_tears_nothing() -> None:
    first, second = run_world(2, ending_schedule)
    assert first == second and first[:7] == [NONE] * 7
    told = "ConfigError: the schedule of the server's learning rate, .* fails at step 7: IndexError: list index"
    assert all(re.match(told, one) for one in first[7:]), first
