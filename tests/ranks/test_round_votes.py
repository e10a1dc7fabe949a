"""What a round does when something is wrong: everyone learns it, and nobody steps on with other weights."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import xffl
from tests.ports import free_port
from tests.ranks.test_round import digests, make_state
from tests.rounds import aggregator_of
from tests.worlds import WorldError, run_world
from xffl.aggregation.engine import buffers as looks
from xffl.aggregation.engine import cell, transport
from xffl.aggregation.engine.decision.consensus import AgreedRound, RoundBroken, RoundInput
from xffl.aggregation.engine.decision.elastic_votes import ElasticCoordinator, RoundInDoubt
from xffl.aggregation.engine.groups import RoundScope
from xffl.aggregation.engine.several_worlds.compared_at_once import ComparisonAtOnce
from xffl.aggregation.engine.voting.ballots import BallotTree
from xffl.aggregation.engine.voting.votes import MOST_NUMBERS, MergeMode, RoundStatus, Seal, VotePhase, VoteTree
from xffl.cluster.network import Timeouts
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.groups import Groups
from xffl.distributed.several_worlds.cross_world import CrossWorldGroup
from xffl.message_sizes import ballots as ballot_sizes
from xffl.topology import Topology


def net(seed: int | None = None) -> nn.Module:
    torch.manual_seed(dist.get_rank() if seed is None else seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))


def raised(call: Callable[[], object]) -> str:
    """The class and text of the XfflError that a call raises."""
    try:
        call()
    except xffl.XfflError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def plant(model: nn.Module, value: float, name: str = "0.weight") -> None:
    with torch.no_grad():
        model.get_parameter(name)[0, 0] = value


def check_alike(told: str, *parts: str) -> None:
    gathered: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(gathered, told)
    assert set(gathered) == {told}, gathered
    for part in parts:
        assert part in told, told


def nonfinite(rank: int, world_size: int) -> None:
    state = make_state(rank, (2, 1), 1)
    model = net(state.topology.cell_of(rank))
    aggregator = aggregator_of(model, state)
    for value in (float("nan"), float("inf"), float("-inf")):
        saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if rank == 2:
            plant(model, value)
        before = digests(model)
        check_alike(raised(aggregator.aggregate), "RoundError", "cell 1", "'0.weight'", "keep their weights")
        assert digests(model) == before
        model.load_state_dict(saved)
    assert aggregator.aggregate().round == 1  # the next clean round takes place, and is the first


def nonfinite_and_weightless(rank: int, world_size: int) -> None:
    """What a cell holds that does not count is no reason to refuse a round, and none to be told."""
    state = make_state(rank, (1, 1, 1), None)
    model = net()
    aggregator = xffl.Aggregator(model, state)
    if rank < 2:
        plant(model, float("nan"))
    told = raised(lambda: aggregator.aggregate(float(rank)))
    check_alike(told, "RoundError", "cell 1 holds", "rank 1")
    assert "cell 0" not in told and "rank 0" not in told


def drop_cell(rank: int, world_size: int) -> None:
    state = make_state(rank, (1, 1, 1), None)
    model = net()
    aggregator = xffl.Aggregator(model, state, nonfinite="drop_cell")
    with torch.no_grad():
        model[0].weight.fill_(float(rank))
        model[1].num_batches_tracked.fill_(rank)
    if rank == 0:
        plant(model, float("nan"))
    report = aggregator.aggregate(rank + 1.0)
    assert (report.weights, report.dropped) == ((0.0, 2.0, 3.0), (0,))
    torch.testing.assert_close(model[0].weight, torch.full((8, 6), (2 * 1 + 3 * 2) / 5.0), rtol=0, atol=1e-6)
    assert model[1].num_batches_tracked == 1  # cell 0 was left out, so "first" is cell 1
    plant(model, float("nan"))
    check_alike(raised(aggregator.aggregate), "RoundError", "no cell", "(0, 1, 2)")


WEIGHTS: list[tuple[str, Callable[[int], Any], tuple[str, ...]]] = [
    ("negative", lambda rank: -1.0, ("ConfigError", "weight must be a number >= 0, got -1.0")),
    ("negative on one rank", lambda rank: -1.0 if rank == 1 else 1.0, ("ConfigError", "-1.0")),
    ("nan", lambda rank: float("nan"), ("ConfigError", "nan")),
    ("infinite on one rank", lambda rank: float("inf") if rank == 2 else 1.0, ("ConfigError", "inf")),
    ("all zero", lambda rank: 0.0, ("ConfigError", "all cells are 0")),
    ("a string", lambda rank: "3", ("ConfigError", "must be a number >= 0, got '3'")),
    ("a bool", lambda rank: True, ("ConfigError", "must be a number >= 0, got True")),
    ("a tensor of two", lambda rank: torch.ones(2), ("ConfigError", "must be a number >= 0")),
    ("none on some ranks", lambda rank: None if rank == 0 else 1.0, ("ConfigError", "[0] gave no weight")),
    ("an overflowing sum", lambda rank: 1.7e308, ("ConfigError", "no finite sum")),
]


def weights(rank: int, world_size: int) -> None:
    state = make_state(rank, (2, 1), None)
    model = net(state.topology.cell_of(rank))
    aggregator = aggregator_of(model, state)
    before = digests(model)
    for _, weight, parts in WEIGHTS:
        told = raised(lambda weight=weight: aggregator.aggregate(weight(rank)))  # type: ignore[misc]
        check_alike(told, *parts)
        assert digests(model) == before
    assert aggregator.aggregate(torch.tensor(2.0)).round == 1


def other_rounds(rank: int, world_size: int) -> None:
    state = make_state(rank, (1, 1), None)
    aggregator = xffl.Aggregator(net(), state)
    aggregator.load_state_dict({"rounds": 4 + rank})
    check_alike(raised(aggregator.aggregate), "RoundError", "rank 0 in round 5", "rank 1 in round 6")


def other_aggregators(rank: int, world_size: int) -> None:
    """Two models of one shape, whose rounds come in another order on one rank."""
    state = make_state(rank, (1, 1), None)
    models = [net(), net()]
    for value, model in enumerate(models):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
    aggregators = [xffl.Aggregator(model, state) for model in models]
    for number in (rank, 1 - rank):
        error = raised(aggregators[number].aggregate)
        check_alike(error, "RoundError", "different aggregators", "call those of several models in the same order")
    assert {float(p.min()) for p in models[0].parameters()} == {0.0}
    assert {float(p.max()) for p in models[1].parameters()} == {1.0}
    assert [aggregator.aggregate().round for aggregator in aggregators] == [1, 1]


class Odd(nn.Module):
    """A model that differs between ranks in one way."""

    def __init__(self, rank: int, how: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5 if (how, rank) == ("shape", 1) else 4)
        self.second = nn.Linear(4, 4, dtype=torch.float64 if (how, rank) == ("dtype", 1) else torch.float32)
        self.third = nn.Linear(4, 4).requires_grad_((how, rank) != ("frozen", 1))
        if (how, rank) != ("missing", 1):
            self.fourth = nn.Linear(4, 4)


def other_models(rank: int, world_size: int) -> None:
    state = make_state(rank, (1, 1), None)
    for how, parts in {
        "shape": ("'first.bias'", "(4,) float32", "ranks 0", "(5,) float32", "ranks 1"),
        "dtype": ("'second.bias'", "float32", "float64"),
        "frozen": ("'third.bias'", "average", "local"),
        "missing": ("'fourth.bias'", "missing on ranks 1"),
    }.items():
        check_alike(raised(lambda how=how: xffl.Aggregator(Odd(rank, how), state)), "ConfigError", *parts)  # type: ignore[misc]
        check_alike(
            raised(lambda how=how: xffl.shard(Odd(rank, how), state)) if how != "frozen" else "ConfigError",
            "ConfigError",
        )  # type: ignore[misc]
    check_alike(
        raised(lambda: xffl.Aggregator(net(), state, bucket_bytes=100 + rank)), "ConfigError", "bucket", "ranks 0"
    )


def wrong_options(rank: int, world_size: int) -> None:
    state = make_state(rank, (1, 1), None)
    model = net()
    model.register_buffer("picks", torch.zeros(3, dtype=torch.int64))
    model.register_parameter("sparse", nn.Parameter(torch.zeros(3, 3).to_sparse()))
    local = {"sparse": "local"}
    for options, parts in [
        ({}, ("'sparse'", "'local'")),
        ({"policies": {**local, "0.weigth": "first"}}, ("0.weigth", "match no tensor")),
        ({"policies": {**local, "0.*": "mean"}}, ("policy for '0.*' must be one of 'average', ", "got 'mean'")),
        ({"policies": {**local, "picks": "average"}}, ("'picks'", "int64", "'first' or 'local'")),
        ({"policies": "local"}, ("policies must be a mapping", "got 'local'")),
        ({"policies": local, "server": {"name": "diloco", "device": "cuda:99"}}, ("cuda:99", "not available")),
        ({"policies": local, "bucket_bytes": 0}, ("bucket_bytes", "got 0")),
        ({"policies": local, "bucket_bytes": "1M"}, ("bucket_bytes", "got '1M'")),
        ({"policies": local, "nonfinite": "ignore"}, ("'ignore'", "'reject', 'drop_cell'")),
        ({"policies": local, "atomic": "yes"}, ("atomic must be one of True, False, got 'yes'",)),
    ]:
        check_alike(raised(lambda o=options: xffl.Aggregator(model, state, **o)), "ConfigError", *parts)  # type: ignore[misc]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for every in (0, -1, 2.0, True, None):
        told = raised(lambda every=every: xffl.FederatedScaling(model, optimizer, state, every=every))  # type: ignore[misc]
        check_alike(told, "ConfigError", f"every must be a positive integer, got {every!r}")
    told = raised(lambda: xffl.FederatedScaling(model, optimizer, state, every=1, aggregator="int8"))  # type: ignore[arg-type]
    check_alike(told, "ConfigError", "aggregator must be an Aggregator or a mapping", "got 'int8'")
    aggregator = xffl.Aggregator(model, state, policies=local)
    for wrong in (None, {}):
        check_alike(
            raised(lambda w=wrong: aggregator.load_state_dict(w)),
            "CheckpointError",
            "must be what its state_dict returned",
        )  # type: ignore[misc]


def policies(rank: int, world_size: int) -> None:
    state = make_state(rank, (1, 1), None)
    model = net()
    chosen = {"0.bias": "local", "0.*": "first", "*tracked": "local"}
    aggregator = xffl.Aggregator(model, state, policies=chosen)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(rank))
    aggregator.aggregate()
    values = {name: float(parameter.detach().reshape(-1)[0]) for name, parameter in model.named_parameters()}
    assert values == {"0.weight": 0.0, "0.bias": float(rank), "1.weight": 0.5, "1.bias": 0.5}


def local_failure(rank: int, world_size: int, options: dict[str, Any], where: str) -> None:
    """A rank that fails in the middle keeps up with the exchange, and all learn why at once."""
    state = make_state(rank, (2, 2), None)
    # Buffers are looked at before the round is opened.
    model = xffl.shard(nn.Linear(6, 8) if where == "looks" else net(), state)
    aggregator = xffl.Aggregator(model, state, bucket_bytes=64, **options)
    module: Any = {"crossing": transport, "looks": looks, "home": cell}[where]
    name = "sum_of_squares" if where == "looks" else "weighted_mean"
    if rank == 2:  # others at home wait for what it carries
        whole = getattr(module, name)

        def fail_once(*_: object, **named: bool) -> None:
            setattr(module, name, whole)
            raise MemoryError("planted on rank 2")

        setattr(module, name, fail_once)
    before, start = digests(model), time.monotonic()
    told = raised(aggregator.aggregate)
    assert time.monotonic() - start < 20
    where_told = "the round could not be opened" if where == "looks" else "rank 2 (cell 1)"
    check_alike(told, "RoundError", f"{where_told}: MemoryError: planted on rank 2")
    if options.get("atomic", True):
        assert digests(model) == before and not aggregator.is_torn
        assert aggregator.aggregate().round == 1
        return
    assert aggregator.is_torn
    for use in (
        aggregator.aggregate,
        lambda: model(torch.ones(2, 6)),
        lambda: xffl.Aggregator(model, state) and model(torch.ones(2, 6)),
    ):
        check_alike(raised(use), "RoundError", "torn", "load a checkpoint")
    model.load_state_dict(model.state_dict())
    assert not aggregator.is_torn and aggregator.aggregate().round == 1
    assert model(torch.ones(2, 6)).isfinite().all()


def cannot_pack(rank: int, world_size: int) -> None:
    """A rank that fails before anything moves: all learn why, and nothing is torn, atomic or not."""
    state = make_state(rank, (2, 1), 1)
    model = net(state.topology.cell_of(rank))
    aggregator = aggregator_of(model, state, atomic=False)
    before = digests(model)
    if rank == 1:
        kept, model[0].weight = model[0].weight, nn.Parameter(torch.zeros(2, 2))
    check_alike(
        raised(aggregator.aggregate), "ConfigError", "'0.weight'", "(8, 6)", "(2, 2)", "new Aggregator", "rank 1"
    )
    if rank == 1:
        model[0].weight = kept
    assert digests(model) == before and not aggregator.is_torn
    assert aggregator.aggregate().round == 1


def stuck(rank: int, world_size: int) -> None:
    """A peer that lives but does not move: the exchange times out, the vote outlives it, and all keep their weights."""
    state = DistributedState()
    state.set_global(dist.Backend("gloo"), torch.device("cpu"), "", 0, rank, world_size)
    state._timeouts = Timeouts.within(4.0)  # the groups' timeouts are parts of it; the world's is that of run_world
    state.set_federated_scaling((1, 1))
    model = net()
    aggregator = xffl.Aggregator(model, state)
    before = digests(model)

    def hang(*_: object, **__: object) -> None:
        threading.Event().wait(5.0)
        raise TimeoutError("rank 1 was stuck")

    if rank == 1:
        transport.CrossCellTransport._post = hang  # type: ignore[method-assign,assignment]
    told = raised(aggregator.aggregate)
    check_alike(
        told, "RoundError", "keep their weights", "rank 0 (cell 0): RuntimeError", "rank 1 (cell 1): TimeoutError"
    )
    assert digests(model) == before and not aggregator.is_torn


def dies(rank: int, world_size: int) -> str:
    state = make_state(rank, (2, 2), None)
    aggregator = xffl.Aggregator(xffl.shard(net(), state), state, bucket_bytes=64)
    if rank == 2:
        transport.weighted_mean = lambda *_, **__: os._exit(17)  # type: ignore[assignment]
    aggregator.aggregate()
    return "the round took place"


def everybody(rank: int, world_size: int) -> None:
    """Every ballot reaches every rank, unchanged, whatever the cells."""
    for sizes, hsdp in (((7,), None), ((1,) * 7, None), ((4, 2, 1), 1), ((5, 2), None), ((2, 4, 1), 1)):
        topology = Topology(7, sizes, hsdp)
        for number in range(3):
            statuses = [
                RoundStatus(
                    number,
                    weight=1e-300 * (r + 1),
                    is_flushing=bool(r % 2),
                    attempt=2**60 + r,
                    is_uniform=r % 2 == 0,
                    is_absent=r == 3,
                    is_finished=r == number,
                    is_nonfinite=r == 5,
                    is_failed=r == 6,
                    is_encoding=r > 2,
                    phase=VotePhase(number % 2),
                    merge=MergeMode(r % 3),
                    seal=Seal(r % 4),
                    is_trained=r > 3,
                    is_accepted=r % 3 == 0,
                    square=1e300 / (r + 1),
                    numbers=tuple(r + place / 7 for place in range(MOST_NUMBERS)),
                )
                for r in range(7)
            ]
            votes = VoteTree(topology, rank, 0, torch.device("cpu"))
            assert votes.gather(statuses[rank], None, math.inf) == statuses
            ballots = BallotTree(topology, rank, 0, torch.device("cpu"))
            for room in (1024, 0):  # with 0 what the head has no room for comes in a second message
                with mock.patch.object(ballot_sizes, "BALLOT_ROOM_BYTES", room):
                    assert ballots.gather(statuses[rank], None, math.inf) == statuses


def sealed(rank: int, world_size: int, answer: Seal, has_values: bool, store: int) -> None:
    """A round counts if and only if its record stands; where that is not known, it waits until it is known."""
    state = make_state(rank, (1, 1), None)
    server = dist.TCPStore("127.0.0.1", store, is_master=rank == 0, wait_for_workers=False)
    dist.barrier()
    group = CrossWorldGroup(
        address=f"127.0.0.1:{store}", name="sealed", rank=rank, size=2, first=0, connect_s=10.0, timeout_s=10.0
    )
    asked: list[tuple[float, ...]] = []

    def seal(weights: tuple[float, ...]) -> Seal:
        asked.append(weights)
        if rank == 1:
            return Seal.NOT_ASKED
        if answer is Seal.NOT_ASKED:  # this rank is lost after it has published
            group.poison()
            return Seal.STANDS
        return answer

    groups: Groups = {"federation": (state.create_process_group((rank,), "cell"),), "replica": None}
    coordinate = partial(ElasticCoordinator, seal=seal)
    scope = RoundScope(state, state.topology, groups=groups, cross_world=group, coordinate=coordinate)
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(float(rank))
    aggregator = xffl.Aggregator(model, scope)
    given = RoundInput(is_absent=not has_values)
    doubted: list[AgreedRound] = []
    if answer is Seal.STANDS:
        report = aggregator.participate(given)
        assert report is not None and report.round == 1
    elif answer is Seal.OTHER_STANDS:
        with pytest.raises(RoundBroken, match="another record") as broken:
            aggregator.participate(given)
        assert not isinstance(broken.value, RoundInDoubt)
    else:
        with pytest.raises(RoundInDoubt) as doubt:
            aggregator.participate(given)
        doubted.append(doubt.value.outcome)
    assert asked == [(1.0, 1.0) if has_values else (0.0, 0.0)]
    is_taken = answer is Seal.STANDS
    assert (model.weight == (0.5 if is_taken and has_values else rank)).all()
    for outcome in doubted:
        report = aggregator.resolve(outcome)
        assert report.round == 1
        assert (model.weight == (0.5 if has_values else rank)).all()
    assert len(doubted) == (answer in (Seal.UNKNOWN, Seal.NOT_ASKED))
    assert aggregator.rounds == (0 if answer is Seal.OTHER_STANDS else 1)
    dist.barrier()
    del server


@pytest.mark.parametrize("has_values", [True, False], ids=["values", "empty"])
@pytest.mark.parametrize("answer", Seal, ids=["publisher lost", "stands", "other stands", "unknown"])
def test_a_sealed_round_counts_if_its_record_stands(answer: Seal, has_values: bool) -> None:
    run_world(2, sealed, answer, has_values, free_port())


def compared_between_worlds(rank: int, world_size: int, differing: str, messages: int, store: int) -> None:
    """Make an aggregator of two cells that are worlds of their own, and count what they compare in."""
    state = make_state(rank, (1, 1), None)
    server = dist.TCPStore("127.0.0.1", store, is_master=rank == 0, wait_for_workers=False)
    dist.barrier()
    group = CrossWorldGroup(
        address=f"127.0.0.1:{store}", name="compared", rank=rank, size=2, first=0, connect_s=10.0, timeout_s=10.0
    )
    groups: Groups = {"federation": (state.create_process_group((rank,), "cell"),), "replica": None}
    coordinate = partial(ElasticCoordinator, seal=lambda _: Seal.STANDS)
    scope = RoundScope(
        state, state.topology, groups=groups, cross_world=group, compare=ComparisonAtOnce, coordinate=coordinate
    )
    if differing == "number" and rank == 1:
        state.activity.number_aggregator(lambda number: number + 5)
    model = nn.Linear(2 + (differing == "model" and rank == 1), 2, bias=False)
    reduce = group.all_reduce
    with mock.patch.object(group, "all_reduce", side_effect=reduce) as counted:
        if differing == "model":
            with pytest.raises(xffl.ConfigError, match="'weight' differs"):
                xffl.Aggregator(model, scope)
        else:
            aggregator = xffl.Aggregator(model, scope)
    assert counted.call_count == messages
    if differing != "model":
        assert aggregator.participate(RoundInput()) is not None
    dist.barrier()
    del server


@pytest.mark.parametrize(
    "differing, messages",
    # An error is told after the comparison of the models alone, in an all-gather of the lengths and of the texts.
    [("", 1), ("number", 2), ("model", 4)],
)
def test_cells_that_are_worlds_compare_in_one_message_what_is_alike(differing: str, messages: int) -> None:
    run_world(2, compared_between_worlds, differing, messages, free_port())


@pytest.mark.parametrize(
    "case, ranks",
    [
        (everybody, 7),
        (nonfinite, 3),
        (cannot_pack, 3),
        (stuck, 2),
        (nonfinite_and_weightless, 3),
        (drop_cell, 3),
        (weights, 3),
        (other_rounds, 2),
        (other_aggregators, 2),
        (other_models, 2),
        (wrong_options, 2),
        (policies, 2),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_all_ranks_conclude_alike(case: Callable[[int, int], None], ranks: int) -> None:
    run_world(ranks, case)


@pytest.mark.parametrize(
    "options, where",
    [
        ({}, "looks"),
        ({}, "home"),
        ({"form": "two_hop"}, "crossing"),
        ({"atomic": False}, "crossing"),
        ({"combine": "geometric_median"}, "crossing"),
    ],
    ids=str,
)
def test_a_local_failure_is_told_to_all(options: dict[str, Any], where: str) -> None:
    run_world(4, local_failure, options, where)


def test_a_rank_that_dies_in_mid_round_ends_the_others() -> None:
    start = time.monotonic()
    with pytest.raises(WorldError):
        run_world(4, dies)
    assert time.monotonic() - start < 60
