"""Every way of moving a round gives the same bits, and moves what it says."""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import xffl
from tests.ranks.test_round import (
    build,
    check_values,
    complete,
    digests,
    fill,
    kept_local,
    make_state,
    tensors,
    weightings,
)
from tests.rounds import aggregator_of
from tests.worlds import run_world
from xffl.aggregation.engine import transport
from xffl.aggregation.engine.exchange import RoundRun
from xffl.aggregation.engine.transport import Move, start_moves
from xffl.aggregation.report import RoundProfile

LAYOUTS = [((1, 1), None), ((2, 4), 2), ((3, 1), None), ((1, 2, 1), None)]


def every_way(rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None) -> int:
    """All forms, with rails and without, atomic and in place, in all sizes of buckets: one result, to the bit."""
    state = make_state(rank, sizes, hsdp)
    assert state.federated_rank is not None
    model = build("shard", "mixed", state)
    weight, weights = weightings(sizes, rank, state.federated_rank)[1]
    results = set()
    # Of an element each, where that is quick, and not of ten in a world of six.
    sizes_of_buckets = [*({2: [8], 4: [40]}.get(world_size, [])), 100, 1 << 20]
    ways = list(itertools.product(["all_gather", "two_hop"], [False, True], [False, True], sizes_of_buckets))
    for form, rails, atomic, bucket_bytes in ways:
        aggregator = xffl.Aggregator(
            model, state, bucket_bytes=bucket_bytes, atomic=atomic, form=form, rails=rails, fragments=1
        )
        fill(model, rank, state.federated_rank)
        before = kept_local(model)
        aggregator.aggregate(weight)
        check_values(model, before, sizes, weights)
        mine = tuple((n, d) for n, d in digests(model).items() if not n.startswith("frozen") and n != "scratch")
        gathered: list[object] = [None] * world_size
        dist.all_gather_object(gathered, mine)
        assert all(other == mine for other in gathered), (form, rails, atomic, bucket_bytes)
        results.add(mine)
    assert len(results) == 1
    return len(ways)


@pytest.mark.parametrize("sizes, hsdp", LAYOUTS, ids=str)
def test_every_way_gives_the_same_bits(sizes: tuple[int, ...], hsdp: int | None) -> None:
    ways = 24 if sum(sizes) <= 4 else 16
    assert run_world(sum(sizes), every_way, sizes, hsdp) == [ways] * sum(sizes)


def over_handles(rank: int, world_size: int, options: dict[str, Any]) -> list[int]:
    """Buckets take turns on the groups that a state has for each stream; returns the messages on each."""
    state = make_state(rank, (2, 2), None)
    assert state.federated_group is not None and state.federated_rank is not None
    ranks = dist.get_process_group_ranks(state.federated_group[0])
    state.federated_group += tuple(dist.new_group(ranks, use_local_synchronization=True) for _ in range(2))
    model = build("shard", "mixed", state)
    aggregator = xffl.Aggregator(model, state, bucket_bytes=100, **options)
    counts: collections.Counter[object] = collections.Counter()

    def counted(receive: Sequence[Move], send: Sequence[Move], group: dist.ProcessGroup, tag: int) -> list[dist.Work]:
        counts[group] += len(send)
        return start_moves(receive, send, group, tag)

    weight, weights = weightings((2, 2), rank, state.federated_rank)[1]
    with mock.patch.object(transport, "start_moves", counted):
        for _ in range(2):
            fill(model, rank, state.federated_rank)
            before = {name: complete(tensor).clone() for name, tensor, _ in tensors(model)}
            aggregator.aggregate(weight)
            check_values(model, before, (2, 2), weights)
    assert set(counts) == set(state.federated_group)
    return [counts[group] for group in state.federated_group]


@pytest.mark.parametrize("options", [{}, {"form": "two_hop", "atomic": False}], ids=str)
def test_buckets_take_turns_on_the_groups_of_streams(options: dict[str, Any]) -> None:
    for counts in run_world(4, over_handles, options):
        assert min(counts) >= 4  # a lane of few buckets begins with the first group


def sent(
    rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None, *ways: tuple[str, bool]
) -> list[tuple[int, int]]:
    """Bytes across and at home, for each form with rails or without."""
    state = make_state(rank, sizes, hsdp)
    model = xffl.shard(nn.Linear(64, 96, bias=False), state)
    reports = [
        xffl.Aggregator(model, state, bucket_bytes=1000, form=form, rails=rails).aggregate() for form, rails in ways
    ]
    return [(report.bytes_across, report.bytes_home) for report in reports]


@pytest.mark.parametrize(
    "sizes, hsdp, rails", [((2, 2, 2), None, False), ((1, 1, 1, 1), None, False), ((2, 4, 2), 2, True)], ids=str
)
def test_two_hops_move_less_where_there_are_more_than_two_cells(
    sizes: tuple[int, ...], hsdp: int | None, rails: bool
) -> None:
    cells, size = len(sizes), 64 * 96 * 4
    told = run_world(sum(sizes), sent, sizes, hsdp, ("all_gather", rails), ("two_hop", rails))
    gathered, hopped = zip(*told, strict=True)
    assert sum(across for across, _ in gathered) == cells * (cells - 1) * size
    assert sum(across for across, _ in hopped) == 2 * (cells - 1) * size  # 2 (C - 1) / C from each of C cells
    assert [home for _, home in gathered] == [home for _, home in hopped]


@pytest.mark.parametrize("form", ["all_gather", "two_hop"])
def test_rails_share_the_carrying_among_replicas(form: str) -> None:
    single, railed = zip(*run_world(8, sent, (4, 4), 2, (form, False), (form, True)), strict=True)
    assert sum(across for across, _ in railed) == sum(across for across, _ in single)
    assert sorted(across > 0 for across, _ in single) == [False] * 4 + [True] * 4
    shares = [across for across, _ in railed]
    assert min(shares) > 0 and max(shares) - min(shares) <= 2000  # a bucket or two
    assert sum(home for _, home in railed) == sum(home for _, home in single)


def fragments(rank: int, world_size: int) -> list[list[str]]:
    """Each round moves one part of the model, in turn; the other parts keep every bit."""
    state = make_state(rank, (2, 2), 1)
    model = nn.ModuleDict({f"layer{index}": nn.Linear(9, 9) for index in range(5)})
    aggregator = aggregator_of(model, state, fragments=3, bucket_bytes=64)
    moved: list[list[str]] = []
    for number in range(6):
        with torch.no_grad():
            for index, parameter in enumerate(model.parameters()):
                parameter.fill_(10.0 * index + (state.federated_rank or 0))
        report = aggregator.aggregate()
        assert report.fragment == number % 3 and report.round == number + 1
        for index, (name, parameter) in enumerate(model.named_parameters()):
            is_moved = bool((parameter == 10.0 * index + 0.5).all())
            assert is_moved or (parameter == 10.0 * index + (state.federated_rank or 0)).all(), name
        values = {name: float(parameter.view(-1)[0]) % 1 for name, parameter in model.named_parameters()}
        moved.append([name for name, rest in values.items() if rest == 0.5])
    return moved


def test_fragments_take_turns() -> None:
    seen = run_world(4, fragments)
    assert all(moved == seen[0] for moved in seen)
    assert seen[0][:3] == seen[0][3:]
    assert sorted(itertools.chain(*seen[0][:3])) == sorted(
        f"layer{i}.{leaf}" for i in range(5) for leaf in ("weight", "bias")
    )
    sizes = [sum(81 if name.endswith("weight") else 9 for name in moved) for moved in seen[0][:3]]
    assert max(sizes) - min(sizes) <= 81


def wrong(rank: int, world_size: int) -> None:
    state = make_state(rank, (1, 1), None)
    model = nn.Linear(3, 3)
    for options, told in (
        ({"form": "ring"}, "form must be one of 'auto', 'all_gather', 'two_hop', got 'ring'"),
        ({"rails": 2}, "rails must be one of True, False, got 2"),
        ({"fragments": 0}, "fragments must be a positive integer, got 0"),
        ({"fragments": 3}, "2 tensors make no 3 fragments"),
        ({"codec": "int9"}, "int9"),
        ({"codec": {"wight": "int8"}}, "codecs ['wight'] match no tensor"),
        ({"form": "two_hop"} if rank else {}, "form="),
        ({"codec": "int8"} if rank else {}, "int8"),
    ):
        with pytest.raises(xffl.ConfigError) as error:
            xffl.Aggregator(model, state, **options)  # type: ignore[arg-type]
        assert told in str(error.value)
        # All are told, also where only one was wrong.
        texts: list[str] = [""] * world_size
        dist.all_gather_object(texts, str(error.value))
        assert len(set(texts)) == 1


def test_wrong_options_are_told_to_all() -> None:
    run_world(2, wrong)


def profiled(rank: int, world_size: int) -> dict[str, int]:
    state = make_state(rank, (2, 2), 1)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    aggregator = aggregator_of(model, state, codec="int8", bucket_bytes=4096)
    aggregator.aggregate()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        report = aggregator.aggregate()
    spans = {event.key: event.count for event in profile.key_averages() if event.key.startswith("xffl.")}
    assert {f"xffl.{phase}" for phase in report.phases} <= set(spans)
    assert report.seconds >= sum(report.phases.values()) > 0.0
    assert 0.0 < report.hidden <= report.seconds or not state.is_sender
    return spans


def test_phases_are_spans_of_a_profile() -> None:
    sends, receives = set(), set()
    for rank, spans in enumerate(run_world(4, profiled)):
        assert spans["xffl.vote"] == 2 and spans["xffl.commit"] == 1
        (sends if rank in (0, 2) else receives).add(frozenset(spans))
    common = {"xffl.vote", "xffl.pack", "xffl.home", "xffl.commit", "xffl.combine"}
    assert receives == {frozenset(common)}
    assert sends == {frozenset(common | {"xffl.encode", "xffl.across", "xffl.post"})}


def accounted(rank: int, world_size: int, options: dict[str, Any]) -> tuple[float, float]:
    """Return the seconds of a round in which messages are handed over slowly, and what its phases add up to."""
    state = make_state(rank, (1, 1), None)
    model = nn.ParameterList([nn.Parameter(torch.randn(2**12)) for _ in range(4)])
    aggregator = xffl.Aggregator(model, state, bucket_bytes=2**14, **options)
    aggregator.aggregate()

    def slow(receive: Sequence[Move], send: Sequence[Move], group: dist.ProcessGroup, tag: int) -> list[dist.Work]:
        time.sleep(0.02 + 0.05 * rank)
        return start_moves(receive, send, group, tag)

    with mock.patch.object(transport, "start_moves", slow):
        report = aggregator.aggregate()
    assert report.phases["post"] >= 0.08
    assert 0.0 < report.hidden <= report.seconds - report.phases["across"]
    assert rank or report.phases["across"] >= 0.04
    if "form" not in options:  # there, some hops post nothing
        assert report.hidden >= report.phases["post"]  # from the first question to the last answer
    return report.seconds, sum(report.phases.values())


@pytest.mark.parametrize("options", [{}, {"atomic": False}, {"codec": "int8"}, {"form": "two_hop"}], ids=str)
def test_phases_add_up_to_the_round(options: dict[str, Any]) -> None:
    for seconds, phases in run_world(2, accounted, options):
        assert 0.8 * seconds < phases <= seconds


def in_turn(
    rank: int, world_size: int, elements: list[int], options: dict[str, Any]
) -> tuple[list[int], int, int, int]:
    """Return the elements of each message, the buffers that a round set aside, all that it has made, and its bytes."""
    state = make_state(rank, (1, 1), None)
    model = nn.ParameterList([nn.Parameter(torch.full((count,), float(rank))) for count in elements])
    aggregator = xffl.Aggregator(model, state, form="two_hop", bucket_bytes=4000, **options)
    exchange = aggregator._exchange
    sent: list[int] = []

    def counted(receive: Sequence[Move], send: Sequence[Move], group: dist.ProcessGroup, tag: int) -> list[dist.Work]:
        sent.extend(values.numel() for values, _ in send)
        return start_moves(receive, send, group, tag)

    RoundRun(exchange, 0, RoundProfile())
    ready = len(exchange.link.slots._free)
    with mock.patch.object(transport, "start_moves", counted):
        report = aggregator.aggregate(1.0 + 2.0 * rank)
    assert all(bool((parameter == 0.75).all()) for parameter in model)
    return sent, ready, len(exchange.link.slots._free), report.bytes_across


@pytest.mark.parametrize("options", [{}, {"atomic": False}], ids=str)
@pytest.mark.parametrize(
    "elements, messages",
    [
        ([1000] * 30, [[1000] * 30] * 2),  # of two buckets, each cell combines one
        ([1000] * 3, [[1000, 1000, 500, 500]] * 2),  # the odd one by halves, so that both directions are in use
        ([1000, 700], [[500, 350, 500, 350]] * 2),  # unlike ones, too
    ],
    ids=["even", "odd", "unlike"],
)
def test_two_cells_combine_buckets_in_turn(
    elements: list[int], messages: list[list[int]], options: dict[str, Any]
) -> None:
    for (sent, ready, made, nbytes), wanted in zip(run_world(2, in_turn, elements, options), messages, strict=True):
        assert sorted(sent) == sorted(wanted) and nbytes == 4 * sum(elements)
        assert made == ready > 0  # what a round needs is there before it begins, and no more
