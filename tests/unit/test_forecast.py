"""The forecast against closed forms, limits, the traffic of a round, and the codecs' own sizes."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from xffl.aggregation import aggregator
from xffl.aggregation.compression import codec_of
from xffl.aggregation.engine import exchange
from xffl.aggregation.engine.voting.votes import PACKED
from xffl.costs import STATUS_BYTES
from xffl.distributed.groups import DEFAULT_STREAMS
from xffl.errors import ConfigError
from xffl.planning import (
    Link,
    codec_bytes,
    codec_limits,
    codec_ratio,
    forecast_data_parallel,
    forecast_round,
    round_traffic,
)
from xffl.planning import forecast as module
from xffl.planning.forecast import BACKWARD_SHARE
from xffl.topology import Topology

TWO = Topology(8, (4, 4), 2)
NO_TIME = Link(math.inf)


def forecast(topology: Topology = TWO, **changed: Any) -> Any:
    given_ = {
        "parameters": 1e9,
        "link": Link(10.0, 0.01),
        "home": Link(200.0, 5e-6),
        "step_s": 1.0,
        "every": 100,
    }
    return forecast_round(topology, **{**given_, **changed})


@st.composite
def federations(draw: st.DrawFn) -> Topology:
    replica_size = draw(st.none() | st.integers(1, 4))
    sizes = tuple(count * (replica_size or 1) for count in draw(st.lists(st.integers(1, 5), min_size=1, max_size=5)))
    return Topology(sum(sizes), sizes, replica_size)


SETTINGS = st.fixed_dictionaries(
    {
        "form": st.sampled_from(["auto", "all_gather", "two_hop"]),
        "rails": st.booleans(),
        "own_links": st.booleans(),
        "atomic": st.booleans(),
        "codec_ratio": st.sampled_from([None, 1.0, 0.5, 0.26, 0.13]),
        "bucket_bytes": st.sampled_from([2**16, 2**22, 2**26]),
        "fragments": st.integers(1, 4),
        "backend": st.sampled_from(["gloo", "nccl"]),
    }
)


def test_the_forecast_knows_the_numbers_of_the_exchange() -> None:
    assert module.BUCKET_BYTES == aggregator.DEFAULT_BUCKET_BYTES
    assert (module.STREAMS, module.HOME_LAG) == (DEFAULT_STREAMS, exchange.HOME_LAG)
    assert PACKED.size == STATUS_BYTES


# Limits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_infinite_rates_leave_the_latencies(backend: str) -> None:
    told = forecast(
        link=Link(math.inf, 0.01),
        home=Link(math.inf, 1e-3),
        memory_gbps=math.inf,
        bucket_bytes=2**40,
        form="all_gather",
        backend=backend,
    )
    if backend == "gloo":  # 2 votes: two steps up, after a word, across after another, two down; a word, a bucket; home
        assert told.seconds == pytest.approx(2 * (5 * 1e-3 + 0.02) + 0.02 + 1e-3)
    else:  # the same without words
        assert told.seconds == pytest.approx(2 * (4 * 1e-3 + 0.01) + 0.01 + 1e-3)


def test_no_latency_leaves_what_the_link_needs() -> None:
    """Closed form: the model's bytes over the link's rate, as round_traffic says, and votes of a few bytes."""
    told = forecast(link=Link(10.0), home=NO_TIME, memory_gbps=math.inf)
    votes = 2 * 4 * STATUS_BYTES * 8 / 10e9
    assert told.seconds == pytest.approx(round_traffic(TWO, 1e9, link_gbps=10)["all_gather"]["seconds"] + votes)
    assert told.phases["stall"] == pytest.approx(0.0, abs=1e-9)


HIDDEN: dict[str, tuple[Topology, dict[str, Any]]] = {
    "slow link": (TWO, {"link": Link(1.0, 0.01)}),
    "link": (TWO, {}),
    "three cells": (Topology(12, (4, 4, 4), 2), {"link": Link(10.0, 0.025)}),
    "card": (Topology(32, (4,) * 8, 4), {"link": Link(10.0, 1e-3), "home": Link(10.0, 5e-5)}),
    "memory": (TWO, {"link": Link(25.0, 1e-3), "memory_gbps": 50}),
    "codec": (TWO, {"link": Link(100.0, 1e-3), "codec_ratio": 0.25}),
}
IDLE: dict[str, tuple[Topology, dict[str, Any], float]] = {
    "small buckets far away": (Topology(12, (4, 4, 4), 2), {"link": Link(10.0, 0.05), "bucket_bytes": 2**20}, 2.5),
    "long fast link": (TWO, {"link": Link(100.0, 0.05)}, 5.0),
    "long fast link, nccl": (TWO, {"link": Link(100.0, 0.05), "backend": "nccl"}, 10.0),
}


def busiest(course: Any) -> float:
    """Closed form of a round: its votes, its passes over the model, and the resource that is busy longest."""
    always = ("vote", "pack", "fill", "drain", "commit")
    return sum(course.phases[phase] for phase in always) + max(course.busy.values())


@pytest.mark.parametrize(("topology", "changed"), HIDDEN.values(), ids=HIDDEN)
def test_simulation_agrees_with_the_busiest_resource_where_latency_is_hidden(
    topology: Topology, changed: dict[str, Any]
) -> None:
    told = forecast(topology, **changed)
    assert told.seconds == pytest.approx(busiest(told), rel=0.02)


@pytest.mark.parametrize(("topology", "changed", "factor"), IDLE.values(), ids=IDLE)
def test_simulation_says_more_where_latency_is_not_hidden(
    topology: Topology, changed: dict[str, Any], factor: float
) -> None:
    told = forecast(topology, **changed)
    assert told.seconds > factor * busiest(told)


@pytest.mark.parametrize(
    ("sizes", "depth", "ballots"),
    [((1, 1), 0, 1), ((4, 4), 2, 4), ((3, 5), 2, 5), ((2, 2, 4), 2, 8), ((8,), 3, 0), ((9, 16, 7), 4, 32)],
)
def test_votes_climb_a_tree_and_cross_once(sizes: tuple[int, ...], depth: int, ballots: int) -> None:
    """Oracle: the tree of ``vote.cast`` walked child by child, and what each first rank sends to and gets from all."""
    deepest = 0
    for size in sizes:
        for place in range(size):
            steps, at = 0, place
            while at:
                steps, at = steps + 1, (at - 1) // 2
            deepest = max(deepest, steps)
    assert deepest == depth
    cells = len(sizes)
    assert cells == 1 or max(max((cells - 1) * size, sum(sizes) - size) for size in sizes) == ballots
    topology, home, across = Topology(sum(sizes), sizes), 1e-3, 0.01 if cells > 1 else 0.0
    options: dict[str, Any] = {"link": Link(1e-3, 0.01), "home": Link(math.inf, home), "parameters": 1.0}
    seconds = ballots * STATUS_BYTES * 8e-6
    told = forecast(topology, **options, backend="nccl").phases["vote"]
    assert told == pytest.approx(2 * (2 * depth * home + across + seconds))
    told = forecast(topology, **options, backend="gloo").phases["vote"]
    assert told == pytest.approx(2 * ((2 * depth + bool(depth)) * home + 2 * across + seconds))


def test_votes_cost_what_they_move_at_home() -> None:
    """A parent takes in two messages and hands out two, at each level of the tree."""
    topology = Topology(8192, 4096)
    told = forecast(topology, link=Link(math.inf), home=Link(1.0), parameters=1.0, backend="nccl").phases["vote"]
    # More than 64 ranks: 8 bytes of length, 96 of runs, 192 of a status, and room for 1,024 more.
    assert told == pytest.approx(2 * 12 * 2 * (1320 + 1320) * 8e-9)


@pytest.mark.parametrize(("form", "passes"), [("all_gather", 8 + 2 * (1 + 4)), ("two_hop", 8 + (1 + 4 + 4) + 4)])
def test_codecs_cost_passes_over_memory(form: str, passes: int) -> None:
    """A code is worth four passes: a sender writes and reads its own, then reads all, or a part, the result twice."""
    told = forecast(form=form, codec_ratio=0.25, memory_gbps=8.0)
    assert told.busy["processor"] == pytest.approx(passes * 2e9 * 8 / 8e9)


@pytest.mark.parametrize("rails", [False, True])
@pytest.mark.parametrize(("replicas", "depth"), [(1, 0), (2, 1), (3, 2), (4, 2), (8, 3)])
def test_results_go_down_a_tree_at_home(replicas: int, depth: int, rails: bool) -> None:
    told = forecast(Topology(4 * replicas, 2 * replicas, 2), home=Link(10.0), rails=rails)
    assert told.busy["home"] == pytest.approx(depth * 2e9 * 8 / 10e9)


@pytest.mark.parametrize(("replicas", "rails", "at_once"), [(2, True, 1), (4, True, 1), (8, True, 1), (4, False, 2)])
def test_broadcasts_at_home_wait_for_each_other_on_rails(replicas: int, rails: bool, at_once: int) -> None:
    """A broadcast is waited for two buckets later, which on rails are not this rank's own: no two are under way."""
    free = {"link": NO_TIME, "home": Link(math.inf, 0.01), "memory_gbps": math.inf}
    told = forecast(Topology(4 * replicas, 2 * replicas, 2), rails=rails, **free)
    latency = 0.01 * math.log2(replicas)
    waits = math.ceil(told.buckets) / at_once
    assert told.seconds - told.phases["vote"] == pytest.approx(waits * latency, abs=latency)


@pytest.mark.parametrize("form", ["auto", "all_gather", "two_hop"])
def test_nothing_crosses_in_one_cell(form: str) -> None:
    told = forecast(Topology(8, 8, 2), form=form)
    assert told.bytes_across == told.bytes_across_per_cell == 0
    assert told.phases["across"] == told.phases["fill"] == told.phases["stall"] == 0
    assert told.bytes_home == 3 * 4e9
    assert told.seconds < 2


def test_one_rank_has_nobody_to_wait_for() -> None:
    told = forecast(Topology(1))
    assert told.phases["vote"] == told.phases["across"] == told.phases["drain"] == 0


def test_utilization_is_the_share_of_local_steps() -> None:
    told = forecast()
    assert told.utilization == pytest.approx(100 / (100 + told.exposed))
    assert told.exposed == pytest.approx(told.seconds)
    hidden = forecast(delay=20)
    assert hidden.seconds == told.seconds and hidden.exposed == pytest.approx(
        told.phases["pack"] + told.phases["commit"]
    )
    assert hidden.utilization == pytest.approx(100 / (100 + hidden.exposed))
    partly = forecast(delay=1)
    assert partly.exposed == pytest.approx(told.seconds - 1)


@settings(deadline=None, max_examples=60)
@given(federations(), SETTINGS)
def test_phases_add_up_and_bytes_are_those_of_the_traffic(topology: Topology, options: dict[str, Any]) -> None:
    told = forecast(topology, **options)
    assert sum(told.phases.values()) == pytest.approx(told.seconds)
    assert min(told.phases.values()) >= 0
    assert 0 < told.utilization <= 1
    traffic = round_traffic(topology, 1e9 / options["fragments"])
    form = traffic[told.form]
    ratio = 1.0 if options["codec_ratio"] is None else options["codec_ratio"]
    assert told.bytes_across_per_cell == pytest.approx(form["bytes_per_cell"] * ratio)
    assert told.bytes_across == pytest.approx(form["bytes_total"] * ratio)
    assert told.bytes_home == pytest.approx(traffic["home_bytes_total"])
    if topology.cells > 1 and not options["own_links"]:
        assert told.phases["across"] == pytest.approx(told.bytes_across_per_cell * 8 / 10e9)
    assert json.loads(json.dumps(asdict(told))) == asdict(told)


IN_STEP: dict[str, Any] = {
    "form": "all_gather",
    "rails": False,
    "own_links": False,
    "atomic": True,
    "codec_ratio": 0.5,
    "bucket_bytes": 2**22,
    "fragments": 1,
    "backend": "gloo",
}
"""Where each word of a receiver was just ahead of a bucket, or just behind, from the first to the last."""


@settings(deadline=None, max_examples=60)
@given(federations(), SETTINGS, st.floats(1.01, 20.0), st.floats(-3.0, -1.0))
@example(Topology(4, (1, 1, 1, 1)), IN_STEP, 12 / 11, math.log10(0.011))
@example(
    Topology(12, (3, 3, 3, 3)),
    {**IN_STEP, "form": "two_hop", "codec_ratio": 0.26, "bucket_bytes": 2**26, "fragments": 2},
    1.09375,
    -2.0,
)
@example(
    Topology(12, (3, 3, 3, 3)),
    {**IN_STEP, "codec_ratio": 0.13, "fragments": 2, "atomic": False},
    1.01,
    -2.0,
)
def test_more_is_never_faster(topology: Topology, options: dict[str, Any], factor: float, way: float) -> None:
    """What is slower, farther or larger takes longer; with gloo it may gain as much as the words' mean is inexact."""
    rate, latency = 10.0, 10**way
    told = forecast(topology, **{**options, "link": Link(rate, latency)})
    slower = forecast(topology, **{**options, "link": Link(rate / factor, latency)})
    farther = forecast(topology, **{**options, "link": Link(rate, latency * factor)})
    larger = forecast(topology, **{**options, "link": Link(rate, latency), "parameters": 1e9 * factor})
    slack = 0.01 if options["backend"] == "gloo" else 1e-9
    for more in (slower, larger, farther):
        assert more.seconds >= told.seconds * (1 - slack)


@pytest.mark.parametrize("cells", [1, 2, 3, 5])
@pytest.mark.parametrize("parameters", [1e3, 1e9])
def test_auto_takes_the_form_that_the_exchange_takes(cells: int, parameters: float) -> None:
    told = forecast(Topology(4 * cells, 4, 2), parameters=parameters)
    assert told.form == ("two_hop" if cells > 1 and parameters > 1e3 else "all_gather")
    coded = forecast(Topology(4 * cells, 4, 2), parameters=parameters, codec_ratio=0.5)
    assert coded.form == ("two_hop" if cells > 2 and parameters > 1e3 else "all_gather")
    # bf16 for a model in bf16: as many bytes, but codes, which two hops would write twice.
    same = forecast(Topology(4 * cells, 4, 2), parameters=parameters, codec_ratio=1.0)
    assert same.form == coded.form
    assert cells == 1 or same.busy["processor"] > told.busy["processor"]


def test_auto_looks_at_the_smallest_shard() -> None:
    cells = [(1, 8), (8, 8), (1, 1)]
    forms = [forecast(Topology(sum(sizes), sizes), parameters=1e7, atomic=False).form for sizes in cells]
    assert forms == ["all_gather", "all_gather", "two_hop"]


def test_the_hosts_memory_takes_its_copies() -> None:
    """By hand: a shard of 4 GB at 4 GB/s; out while others cross, or at the start and when merged; back at the end.

    With replicas back before it is handed round to them, and then all is on the GPU.
    """
    given: dict[str, Any] = {
        "link": Link(math.inf),
        "home": NO_TIME,
        "memory_gbps": 32e6,
        "parameters": 1e9,
        "every": 9,
    }
    alone, replicas = Topology(2, 1), Topology(4, 2, 1)
    for cells, options, pack, processor, commit in (
        (alone, {}, 0.0, 1.0, 1.0),
        (alone, {"delay": 1}, 1.0, 0.0, 2.0),
        (alone, {"atomic": False}, 0.0, 2.0, 0.0),
        (replicas, {}, 0.0, 2.0, 0.0),
        (replicas, {"delay": 1}, 1.0, 1.0, 0.0),
        (replicas, {"atomic": False}, 0.0, 2.0, 0.0),
    ):
        told = forecast(cells, **given, **options, pcie_gbps=32.0)
        assert told.form == "two_hop"
        assert told.phases["pack"] == pytest.approx(pack, abs=1e-3)
        assert told.busy["processor"] == pytest.approx(processor, abs=1e-3)
        assert told.phases["commit"] == pytest.approx(commit, abs=1e-3)


def test_nccl_takes_four_buckets_at_a_time() -> None:
    free = {"link": Link(math.inf, 0.01), "home": NO_TIME, "memory_gbps": math.inf}
    told = forecast(Topology(2, 1), **free, backend="nccl", form="all_gather", bucket_bytes=10**6)
    assert told.seconds - told.phases["vote"] == pytest.approx(told.buckets / 4 * 0.01, rel=0.05)


def test_rails_multiply_bandwidth_only_where_every_sender_has_a_link() -> None:
    wide = Topology(16, 8, 2)  # two cells of four replicas
    options: dict[str, Any] = {"link": Link(1.0), "home": NO_TIME, "memory_gbps": math.inf}
    plain, shared = forecast(wide, **options), forecast(wide, **options, rails=True)
    assert shared.seconds == pytest.approx(plain.seconds, rel=1e-3)
    one, four = forecast(wide, **options, own_links=True), forecast(wide, **options, own_links=True, rails=True)
    assert plain.seconds / one.seconds == pytest.approx(2, rel=1e-3)
    assert one.seconds / four.seconds == pytest.approx(4, rel=1e-3)
    assert {told.bytes_across for told in (plain, shared, one, four)} == {plain.bytes_across}


def test_rails_give_every_replica_something_to_carry() -> None:
    """A shard of one bucket: cut into as many for each replica as are in flight."""
    told = forecast(Topology(16, 8, 2), parameters=2**20 // 2, rails=True)
    assert told.buckets == pytest.approx(module.IN_FLIGHT)
    assert forecast(Topology(16, 8, 2), parameters=2**20 // 2).buckets < 1
    # Buckets are those of the cell with most replicas everywhere: one replica alone has four times as many.
    assert forecast(Topology(10, (2, 8), 2), parameters=2**20 // 2, rails=True).buckets == 4 * module.IN_FLIGHT


def test_the_slowest_size_of_cell_counts() -> None:
    slow_home = Link(1.0)
    uneven = forecast(Topology(18, (2, 16), 2), home=slow_home)
    assert uneven.phases["drain"] == pytest.approx(forecast(Topology(32, 16, 2), home=slow_home).phases["drain"])
    assert uneven.seconds > forecast(Topology(4, 2, 2), home=slow_home).seconds


def test_thousands_of_ranks_take_no_time() -> None:
    start = time.process_time()
    told = forecast(Topology(8192, 8, 8), parameters=100e9, bucket_bytes=2**16)
    assert time.process_time() - start < 1
    assert told.form == "two_hop" and told.buckets > 500_000


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"parameters": 0}, "parameters must be a number > 0, got 0"),
        ({"parameters": "8e9"}, "parameters must be a number > 0, got '8e9'"),
        ({"step_s": math.nan}, "step_s must be a number > 0, got nan"),
        ({"codec_ratio": True}, "codec_ratio must be a number > 0, got True"),
        ({"every": 0}, "every must be a positive integer, got 0"),
        ({"bucket_bytes": 1.5}, "bucket_bytes must be a positive integer, got 1.5"),
        ({"form": "ring"}, "form must be one of 'auto', .*, got 'ring'"),
        ({"backend": "mpi"}, "backend must be one of 'gloo', 'nccl', got 'mpi'"),
        ({"backend": "nccl", "pcie_gbps": 200.0}, "pcie_gbps 200.0 is for gloo between cells, but backend is 'nccl'"),
        ({"pcie_gbps": -1}, "rate_gbps must be a number > 0"),
        ({"delay": 100}, "delay must be below the 100 steps between two rounds, got 100"),
        ({"delay": 1, "atomic": False}, "delay 1 needs atomic rounds"),
    ],
)
def test_numbers_that_cannot_be_meant(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        forecast(**changed)


@pytest.mark.parametrize(("rate", "latency"), [(0, 0), (-1, 0), (math.nan, 0), (1, -1), (1, math.inf), ("1", 0)])
def test_links_that_cannot_be_meant(rate: Any, latency: Any) -> None:
    with pytest.raises(ConfigError, match="give"):
        Link(rate, latency)


# Data parallelism -----------------------------------------------------------------------------------------------------


def test_data_parallelism_crosses_in_every_step() -> None:
    told = forecast_data_parallel(
        Topology(16, 4, 2), parameters=1e9, link=Link(10.0, 0.01), home=Link(200.0), step_s=1.0, bytes_per_parameter=2
    )
    assert told.bytes_across_per_cell == 2 * 3 / 4 * 2e9
    assert told.seconds == pytest.approx(3e9 * 8 / 10e9 + 2 * 3 * 0.01)
    assert told.exposed == pytest.approx(told.seconds - BACKWARD_SHARE)
    assert told.utilization == pytest.approx(1 / (1 + told.exposed))


def test_data_parallelism_goes_round_a_ring_at_home() -> None:
    four = Topology(16, 8, 2)
    told = forecast_data_parallel(four, parameters=1e9, link=Link(math.inf), home=Link(5.0, 1e-3), step_s=1.0)
    assert told.seconds == pytest.approx(2 * 3 / 4 * 2e9 * 8 / 5e9 + 2 * 3 * 1e-3)


def test_data_parallelism_hides_behind_the_backward_pass() -> None:
    told = forecast_data_parallel(TWO, parameters=1e6, link=Link(100.0), home=Link(200.0), step_s=1.0)
    assert told.exposed == 0 and told.utilization == 1
    own = forecast_data_parallel(TWO, parameters=1e9, link=Link(1.0), home=NO_TIME, step_s=1.0, own_links=True)
    shared = forecast_data_parallel(TWO, parameters=1e9, link=Link(1.0), home=NO_TIME, step_s=1.0)
    assert shared.seconds == pytest.approx(4 * own.seconds)


# Codecs ---------------------------------------------------------------------------------------------------------------

CODECS = [
    "bf16",
    "fp16",
    "int8",
    "int4",
    "int8:block=7",
    "int8:block=65536",
    "int4:block=128,scale=fp32",
    "int8:rounding=stochastic",
    "topk:0.01",
    "topk:0.07,value=fp16",
    "topk:1",
    "int2",
    "int2:block=7",
    "sparseloco",
    "sparseloco:density=0.3,decay=1",
]


@given(st.sampled_from(CODECS), st.integers(0, 10**7))
def test_sizes_are_those_of_the_codecs(codec: str, numel: int) -> None:
    made = codec_of(codec)
    assert made is not None
    assert codec_bytes(codec, numel) == codec_bytes(str(made), numel) == made.nbytes(numel)


def test_a_codec_pays_below_the_rate_at_which_ranks_code() -> None:
    one, two = (codec_limits(Topology(2 * n, (n, n), n), memory_gbps=100.0) for n in (1, 4))
    assert one["bf16"] > one["int8"] > one["int4"] > one["int2"] > one["sparseloco"] > 0
    assert all(two[name] == pytest.approx(4 * limit) for name, limit in one.items()), "four ranks code at a time"
    assert codec_limits(Topology(8, (4, 4), 4), memory_gbps=100.0, own_links=True) == one
    assert codec_limits(Topology(8, (4, 4), 1), memory_gbps=100.0, rails=True) == two
    assert codec_limits(Topology(4, (4,)), memory_gbps=100.0) == {}
    three = codec_limits(Topology(3, (1, 1, 1)), memory_gbps=100.0)
    # Values as they are cross 4/3 times; what three cells have sent is decoded.
    assert three["int8"] == pytest.approx(4 / 3 * 100 / (4.4 + 3 * 0.7))


def test_ratios() -> None:
    assert codec_ratio("none") == codec_ratio("none", 2.0) == 1
    assert codec_ratio("bf16") == 0.5 and codec_ratio("bf16", 2.0) == 1
    assert codec_ratio("int8") < 0.27 and codec_ratio("int4") < 0.14
    assert codec_bytes("none", 10) == 40


@pytest.mark.parametrize(
    "codec",
    [
        *("zip", "", "bf16:block=64", "int8:block=0", "int8:block=x", "int8:bits=4", "int8:block=64,block=64"),
        *("int4:scale=bf16", "int8:rounding=up"),
        *("topk", "topk:0", "topk:2", "topk:x", "topk:nan", "topk:0.1,value=int8"),
    ],
)
def test_unknown_codecs_are_refused_here_as_there(codec: str) -> None:
    for made in (codec_of, lambda name: codec_bytes(name, 10)):
        with pytest.raises(ConfigError, match="give"):
            made(codec)
