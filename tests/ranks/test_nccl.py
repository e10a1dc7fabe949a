"""Rounds, shared models and training steps on pretended GPUs, held against NCCL's rules; docs/nccl.rst says which."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import _random

import xffl
from tests.nccl.cases import elastic_rounds, isolated_rounds, model_of, rounds, traces_of, training
from tests.nccl.gpus import BACKEND, Stream
from tests.nccl.rules import faults_of
from tests.nccl.traces import Call, Copy, HostCall, HostWait, Join, Record
from tests.ports import free_port
from tests.ranks.test_elastic import start_lighthouse
from tests.ranks.test_strategies import CASES, configure
from tests.rows import some_of
from tests.worlds import WorldError
from xffl.aggregation.algorithms.registry import make
from xffl.aggregation.algorithms.server_optimizer import server_of
from xffl.aggregation.bench import Effort, measure
from xffl.aggregation.engine import transport
from xffl.aggregation.engine.buffers import BucketMemory
from xffl.aggregation.engine.exchange import ExchangeWalk
from xffl.aggregation.engine.gpu_memory import HostCopies
from xffl.aggregation.engine.groups import RoundScope
from xffl.aggregation.engine.streams import StreamWork
from xffl.aggregation.engine.transport import Progress
from xffl.aggregation.engine.voting.votes import VOTE_TAG
from xffl.aggregation.options import Options
from xffl.aggregation.privacy import Privacy
from xffl.costs import MOST_IN_FLIGHT
from xffl.distributed.agreement import consistency as backends
from xffl.distributed.session import cleanup_distributed_process_group, setup_distributed_process_group
from xffl.errors import ConfigError
from xffl.naming import Writer
from xffl.parallel import DistributedStrategy
from xffl.planning import round_traffic
from xffl.topology import Topology
from xffl.training.callbacks.param_norms import copies_of, local, spread_like

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None and shutil.which("g++") is None, reason="needs g++: torch for CPUs has no device guard"
)

ALL = bool(os.environ.get("NCCL_ALL"))
"""Whether every case is run, as ``make nccl`` does; else those that ask NCCL for something that others do not."""

Layout = tuple[tuple[int, ...], int | None]

LAYOUTS: list[Layout] = [((2, 2), None), ((4, 2), None), ((3, 1), None), ((2, 2), 1), ((4, 2), 2)]
"""Sizes of cells, and the ranks of a replica; all options are tried on each."""

PRIVATE = Privacy(clip=1.0, noise=1.0)
CHOICES: dict[str, list[Any]] = {
    "layout": LAYOUTS + ([((3, 1), 1), ((1, 2, 1), None), ((4, 4), 2)] if ALL else []),
    "codec": ["none", "bf16", "int8", "topk:0.1"] + (["fp16", "int4"] if ALL else []),
    "form": ["all_gather", "two_hop"],
    "behind": [False, True, 0.5],
    "server": [None, "fedadam:lr=0.03", "torch.optim.AdamW:lr=0.1"],
    "combine": ["mean", "median"],
    "fragments": [1, 2],
    "rails": [False, True],
    "atomic": [True, False],
    "nonfinite": ["reject", "drop_cell"],
    "norms": [False, True],
    "privacy": [None, PRIVATE],
    "model": ["little", "buffers"],
}
"""What a round may be asked for; the first of each is what is meant where nothing is said."""


make_once, server_once = cache(make), cache(server_of)


def go_together(
    *, layout: Layout, behind: object, codec: str, model: str, combine: str, server: str | None, **options: Any
) -> bool:
    """Whether an aggregator takes these, by its own check."""
    if options["privacy"] and model == "buffers":  # which would cross as they are
        return False
    made = {
        "combine": make_once("combine", combine, writer=Writer.USER),
        "server": server_once(server, writer=Writer.USER),
    }
    try:
        Options.of(bucket_bytes=2**10, overlap=bool(behind), secure=False, **made, **options)
    except ConfigError:
        return False
    return True


def covering(
    choices: dict[str, list[Any]], allowed: Callable[..., bool], strength: int = 2
) -> Iterator[dict[str, Any]]:
    """Yield few rows, each a choice of everything, in which all choices meet that go together.

    :param strength: How many of them at a time: 2 for all pairs.
    """
    usual = {name: values[0] for name, values in choices.items()}
    places = [[(name, place) for place in range(len(values))] for name, values in choices.items()]
    wanted = {
        frozenset(chosen)
        for names in combinations(places, strength)
        for chosen in product(*names)
        if allowed(**{**usual, **{name: choices[name][place] for name, place in chosen}})
    }
    while wanted:
        row = dict(min(wanted, key=sorted))
        for name in [name for name in choices if name not in row]:
            others = list(combinations(row.items(), strength - 1))
            met = [
                sum(frozenset((*some, (name, place))) in wanted for some in others)
                for place in range(len(choices[name]))
            ]
            for place in sorted(range(len(met)), key=lambda place: -met[place]):
                row[name] = place
                if allowed(**usual | {key: choices[key][value] for key, value in row.items()}):
                    break
        wanted -= {frozenset(chosen) for chosen in combinations(row.items(), strength)}
        yield {name: choices[name][place] for name, place in row.items()}


def options_of(layout: Layout) -> tuple[dict[str, Any], ...]:
    """Return what rounds of a layout are asked for: all that is said otherwise than usual."""
    rows = covering(CHOICES, go_together, 3 if ALL else 2)
    chosen = [
        {name: value for name, value in row.items() if name != "layout"} for row in rows if row["layout"] == layout
    ]
    counts = [row["fragments"] + (row["codec"] != "none") for row in chosen]  # a codec shortens no first round
    return tuple({**row, "bucket_bytes": 2**11, "count": count} for row, count in zip(chosen, counts, strict=True))


BUFFERS, CELL = "aggregation/engine/buffers.py", "aggregation/engine/exchange.py"
MEANS, GPU_MEMORY = "aggregation/engine/cell.py", "aggregation/engine/gpu_memory.py"
CODED = {"model": "little", "bucket_bytes": 2**10}
STEPPED = {"server": "fedadam:lr=0.03"}
ROUNDS: dict[str, tuple[tuple[int, ...], int | None, tuple[dict[str, Any], ...]]] = {
    "one cell, fsdp": ((), None, ({}, {"behind": True})),
    "one cell, hsdp": ((), 2, ({},)),
    "two ranks": ((1, 1), None, ({}, {"model": "buffers"}, {"codec": "int8", **CODED})),
    "three ranks": ((1, 1, 1), None, ({"form": "two_hop"}, {"secure": True}, {"combine": "median"})),
    "a pair between": ((1, 2, 1), None, ({}, {"codec": "topk:0.1", "form": "all_gather", **CODED})),
    "eight": ((4, 4), 2, ({"rails": True, "model": "little"},)),
    "levels": ((1,) * 4, None, ({"groups": (2, 2)}, {"groups": (1, 3), "codec": "bf16"})),
    "levels, hsdp": ((2, 1, 2), 1, ({"groups": (2, 1), "every": 2},)),
    "server": (
        (2, 2),
        1,
        (
            {**STEPPED, "rails": True, "norms": True, "count": 2},
            {**STEPPED, "codec": "int8", "count": 3, **CODED},
            {**STEPPED, "behind": 0.5, "fragments": 2, "count": 3},
        ),
    ),
    "server of three cells": ((1, 2, 1), None, ({**STEPPED, "privacy": PRIVATE, "model": "little"}, {**STEPPED})),
    "krum": ((1,) * 5, None, ({"combine": "krum:faulty=1", "model": "little"},)),
    "some pairs of options": ((2, 2), 1, ()),
    **{f"pairs of options, {cells}, {hsdp}": (cells, hsdp, ()) for cells, hsdp in CHOICES["layout"]},
}


ROUNDS_IN_CI = {"three ranks", "levels", "server", "krum", "some pairs of options"}


@pytest.mark.timeout(1800 if ALL else 300)
@pytest.mark.parametrize("name", some_of(ROUNDS, *ROUNDS.keys() - ROUNDS_IN_CI))
def test_rounds_keep_nccls_rules(name: str) -> None:
    """Set-up, shared weights and rounds: nobody hangs, everything fits, no stream runs into another."""
    cells, hsdp, options = ROUNDS[name]
    if not options:
        options = options_of((cells, hsdp))[:: 4 if name.startswith("some") else 1]
    traces, races = traces_of(sum(cells) or 4, rounds, cells, hsdp, *options, timeout_s=1700 if ALL else 200)
    assert faults_of(traces) + races == []
    assert all(any(isinstance(record, Call) for record in trace) for trace in traces)


def test_few_rows_have_all_pairs() -> None:
    """And none that an aggregator refuses."""
    rows = list(covering(CHOICES, go_together))
    assert len(rows) < 60 and all(go_together(**row) for row in rows)
    for first, second in combinations(CHOICES, 2):
        met = {(str(row[first]), str(row[second])) for row in rows}
        for one, other in product(CHOICES[first], CHOICES[second]):
            usual = {name: values[0] for name, values in CHOICES.items()}
            assert ((str(one), str(other)) in met) == go_together(**usual | {first: one, second: other})


READ_ONCE: list[dict[str, Any]] = [{}, {"rails": True}, {"atomic": False}, {"fragments": 2, "count": 4}]


@pytest.mark.parametrize("options", some_of(READ_ONCE, *READ_ONCE[:3]), ids=str)
def test_a_round_reads_once_of_a_gpu(options: dict[str, Any]) -> None:
    """Whether all values are finite; and its host learns of its end.

    When an aggregator is made, what ranks compute of fixed patterns is read at once, and the sums that the first round
    compares; these again in that round.
    """
    traces, races = traces_of(4, rounds, (2, 2), 1, {"count": 2, **options})
    assert faults_of(traces) + races == []
    reads = [sum(isinstance(record, HostWait) and record.reads for record in trace) for trace in traces]
    assert max(reads) == options.get("count", 2) + 3


def test_a_server_reads_few_numbers_of_a_gpu() -> None:
    """What all cells start from is compared tensor by tensor, and read at once.

    So are the sums of a first round, and what ranks compute of fixed patterns.
    """
    traces, _ = traces_of(2, rounds, (1, 1), None, {"server": "fedadam:lr=0.03", "count": 1, "model": "buffers"})
    assert sum(isinstance(record, HostWait) and record.reads for record in traces[0]) <= 5


def test_gloo_carries_what_lies_on_gpus() -> None:
    """Ranks that share a GPU: what moves goes through the memory of the host."""
    traces, races = traces_of(4, rounds, (3, 1), None, {}, {"behind": True}, backend="gloo")
    assert races == [] and not any(isinstance(record, Call) for trace in traces for record in trace)


LINKED: dict[str, tuple[tuple[int, ...], int | None, tuple[dict[str, Any], ...]]] = {
    "equal": ((2, 2), None, ({}, {"behind": True}, {"behind": 0.5}, {"codec": "int8", **CODED})),
    "unequal": ((3, 1), None, ({"model": "buffers"}, {"atomic": False}, {"server": "fedadam:lr=0.03"})),
    "replicas": ((4, 2), 2, ({"rails": True}, {"fragments": 2, "count": 4}, {"norms": True})),
    "replicas, in place": ((4, 2), 2, ({"atomic": False}, {"atomic": False, "codec": "int8", "count": 3, **CODED})),
    "replicas, behind": (
        (2, 2),
        1,
        ({"behind": True}, {"behind": 0.5, "model": "buffers"}, {"behind": True, "codec": "bf16", "form": "two_hop"}),
    ),
    "unlike numbers of replicas": (
        (3, 1, 2),
        1,
        ({"form": "all_gather", "model": "buffers"}, {"form": "two_hop", "codec": "int8", "count": 3, **CODED}),
    ),
    "replicas, compared": ((3, 2, 2), 1, ({"combine": "geometric_median"}, {"combine": "median", "rails": True})),
    "replicas, stepped": (
        (2, 1),
        1,
        ({**STEPPED}, {**STEPPED, "codec": "int8", "count": 3, **CODED}, {**STEPPED, "behind": True, "rails": True}),
    ),
    "replicas, private": (
        (2, 1, 2),
        1,
        ({"privacy": PRIVATE}, {"secure": True}, {"privacy": PRIVATE, "behind": True, **STEPPED}),
    ),
    "three cells": ((1, 2, 1), None, ({"form": "two_hop"}, {"combine": "median"}, {"secure": True})),
    "levels": ((2, 1, 2), 1, ({"groups": (2, 1), "every": 2},)),
}


LINKED_IN_CI = {"equal", "replicas, stepped"}


def crossing(traces: list[list[Record]], cells: tuple[int, ...]) -> list[str]:
    """Return the calls over NCCL of groups that cross cells, by the line that makes them."""
    topology = Topology(sum(cells), cells)
    calls = [record for trace in traces for record in trace if isinstance(record, Call)]
    return sorted({call.at for call in calls if len({topology.cell_of(rank) for rank in call.group[1]}) > 1})


def over_gloo_inside(traces: list[list[Record]], cells: tuple[int, ...]) -> list[str]:
    """Return what rounds send over gloo inside cells, beside votes and small numbers, by the line that does."""
    topology, found = Topology(sum(cells), cells), set()
    for rank, trace in enumerate(traces):
        for call in trace:
            if not isinstance(call, HostCall) or not call.at.startswith(("aggregation/engine/", "parallel/spread.py")):
                continue
            others = call.group[1] if call.peer is None else (call.peer,)
            is_inside = {topology.cell_of(other) for other in others} == {topology.cell_of(rank)}
            is_control = call.tag == VOTE_TAG or (call.peer is None and call.nbytes <= CONTROL_BYTES)
            if is_inside and set(others) != {rank} and not is_control:
                found.add(f"{call.kind} of {call.nbytes} bytes over {call.group} at {call.at}")
    return sorted(found)


CONTROL_BYTES = 8 * 9
"""Of a norm, or of the distances between three cells."""


def handed_round(traces: list[list[Record]], cells: tuple[int, ...]) -> set[int]:
    """Return the ranks that get results over NCCL, after a look at the groups that these come by."""
    topology, ranks = Topology(sum(cells), cells), set()
    for rank, trace in enumerate(traces):
        for call in trace:
            if isinstance(call, Call) and call.at.startswith((CELL, MEANS)):
                assert {topology.cell_of(one) for one in call.group[1]} == {topology.cell_of(rank)}
                ranks.add(rank)
    return ranks


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", some_of(LINKED, *LINKED.keys() - LINKED_IN_CI))
def test_no_nccl_group_crosses_cells_and_no_payload_goes_over_gloo_inside(name: str) -> None:
    """With ``link_backend="gloo"``: neither of rounds nor the world; and what goes through the host is in order."""
    cells, hsdp, options = LINKED[name]
    traces, races = traces_of(sum(cells), rounds, cells, hsdp, *options, link_backend="gloo", timeout_s=380)
    assert crossing(traces, cells) == [] == over_gloo_inside(traces, cells)
    assert faults_of(traces) + races == []
    if "replicas" in name:
        topology = Topology(sum(cells), cells, hsdp)
        replicas = {rank for rank in range(sum(cells)) if topology.replicas(topology.cell_of(rank)) > 1}
        assert handed_round(traces, cells) == replicas


@pytest.mark.timeout(200)
def test_elastic_cells_send_no_payload_over_gloo_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in rounds, nor where one breaks, nor where a cell takes over the model and what its server keeps."""
    monkeypatch.setenv("XFFL_JOURNAL", str(tmp_path / "journal"))
    lighthouse = start_lighthouse(0)
    try:
        url = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
        ports = (free_port(), free_port())
        traces, races = traces_of(4, elastic_rounds, url, ports, **STEPPED, bucket_bytes=2**10, timeout_s=180)
    finally:
        lighthouse.shutdown()
    assert races == []
    for world in (traces[:2], traces[2:]):  # each cell is one of its own
        assert over_gloo_inside(world, (2,)) == [] == faults_of(world)
        assert handed_round(world, (2,)) == {0, 1}


def test_isolated_cells_send_no_payload_over_gloo_inside() -> None:
    traces, races = traces_of(4, isolated_rounds, **STEPPED)
    assert races == []
    for world in (traces[:2], traces[2:]):  # each cell is one of its own
        assert over_gloo_inside(world, (2,)) == [] == faults_of(world)
        assert handed_round(world, (2,)) == {0, 1}


@pytest.mark.parametrize("options", some_of([{}, STEPPED], {}), ids=str)
def test_gloo_hands_results_round_where_no_gpu_does(options: dict[str, Any]) -> None:
    """What the records are for: they do tell of it."""
    traces, races = traces_of(4, rounds, (2, 2), 1, options, link_backend="gloo", plant=without_a_home_gpu)
    assert faults_of(traces) + races == [] and not handed_round(traces, (2, 2))
    assert any(found.startswith("broadcast") and CELL in found for found in over_gloo_inside(traces, (2, 2)))


def without_a_home_gpu() -> None:
    mock.patch.object(RoundScope, "home_device", None).start()


COPIED: list[tuple[int | None, dict[str, Any]]] = [
    (None, {}),
    (2, {}),
    (2, {"behind": True}),
    (2, {"atomic": False}),
    (1, {"combine": "median", "form": "all_gather"}),
    *([(2, {"behind": 0.5})] if ALL else []),
]


@pytest.mark.parametrize(("hsdp", "options"), some_of(COPIED, *(row for row in COPIED if row != COPIED[2])), ids=str)
def test_a_round_copies_through_the_host_what_the_plan_says(hsdp: int | None, options: dict[str, Any]) -> None:
    """Replicas copy nothing; without them what goes on behind steps is copied once more, to be merged."""
    cells = (4, 2)
    topology = Topology(6, cells, hsdp)
    elements = sum(parameter.numel() for parameter in model_of("plain").parameters())
    pcie = round_traffic(topology, elements, pcie_gbps=100.0)["pcie"]
    copied: dict[tuple[int, str], tuple[int, int]] = {}  # out and back, of all ranks of a role together
    # The second round alone: before the first, ranks read what a server starts from.
    for count, sign in ((1, -1), (2, 1)):
        traces, _ = traces_of(6, rounds, cells, hsdp, {**options, "count": count}, link_backend="gloo")
        for rank, trace in enumerate(traces):
            at = topology.coordinates(rank)
            role = at.cell, "sender" if at.is_sender else "replica"
            out, back = copied.get(role, (0, 0))
            for copy in trace:
                if isinstance(copy, Copy) and copy.at.startswith((BUFFERS, GPU_MEMORY)):
                    out, back = out + sign * copy.nbytes * copy.to_host, back + sign * copy.nbytes * (not copy.to_host)
            copied[role] = out, back
    for (cell, role), (out, back) in copied.items():
        kind, ranks = pcie["cell_kinds"][cell], sum(topology.coordinates(r).cell == cell for r in range(6))
        senders = topology.shards(cell)
        count, said = senders if role == "sender" else ranks - senders, kind[role]
        is_merged_by_host = "behind" in options and kind["replica"] is None
        assert out == pytest.approx(count * said["bytes_to_host"] * (2 if is_merged_by_host else 1))
        assert back == pytest.approx(count * said["bytes_to_gpu"])


def benched() -> None:
    state = setup_distributed_process_group(
        backend=BACKEND, device="cuda", federated=(2, 2), hsdp=1, link_backend="gloo"
    )
    with mock.patch("xffl.aggregation.bench.round_variants", return_value={"two-hop": {"codec": "none"}}):
        record = measure(state, Effort(0.02, repeats=1, warmup=1))
    assert record is None or record["layout"]["link_backend"] == "gloo"


@pytest.mark.long  # tests/ranks/test_bench.py measures the same groups over gloo
def test_a_benchmark_measures_what_each_group_sends_from() -> None:
    traces, races = traces_of(4, benched)
    assert crossing(traces, (2, 2)) == [] and faults_of(traces) + races == []
    for trace in traces:
        calls = [
            record for record in trace if isinstance(record, Call) and record.at.startswith("aggregation/bench.py")
        ]
        assert {len(call.group[1]) for call in calls} == {2} and {call.kind for call in calls} == {"allreduce"}


def test_by_default_nccl_crosses_cells() -> None:
    traces, _ = traces_of(4, rounds, (2, 2))
    assert any(place.startswith("aggregation/engine/transport.py") for place in crossing(traces, (2, 2)))


@pytest.mark.long  # what trains is above, in one cell; rounds over such links, too
def test_cells_train_over_nccl_with_gloo_between_them() -> None:
    traces, races = traces_of(6, training, "hsdp", federated=(4, 2), link_backend="gloo")
    assert crossing(traces, (4, 2)) == []
    assert faults_of(traces) + races == []
    assert all(any(isinstance(record, Call) for record in trace) for trace in traces)


TRAINED = (
    *("single", "ddp, static", "fsdp, offloaded", "hsdp", "fsdp and tensor", "fsdp and context"),
    *("pipeline and fsdp", "pipeline and ddp"),
)
"""Of the strategies' cases those that send something in another way."""
TRAINED_AT_NIGHT = tuple(name for name in TRAINED if name not in ("hsdp", "pipeline and fsdp"))


@pytest.mark.parametrize("name", CASES if ALL else some_of(TRAINED, *TRAINED_AT_NIGHT))
def test_training_keeps_nccls_rules(name: str) -> None:
    traces, races = traces_of(CASES[name][0], training, name, steps=2 if "static" in name or ALL else 1)
    assert faults_of(traces) + races == []


@pytest.mark.long  # as the one above over other links
def test_cells_that_train_apart_keep_nccls_rules() -> None:
    traces, races = traces_of(6, training, "hsdp", federated=(4, 2), precision="bf16")
    assert faults_of(traces) + races == []


# What was wrong -------------------------------------------------------------------------------------------------------


def draws(cells: tuple[int, ...]) -> None:
    """One cell draws random numbers for a DTensor, and the other never does."""
    state = setup_distributed_process_group(backend=BACKEND, device="cuda", federated=cells)
    model = xffl.shard(model_of("plain"), state)
    if state.federated_rank == 0:
        # torch takes tensors without values for a program that is traced, for which it shares nothing.
        real = mock.patch("torch.distributed.tensor._dispatch._are_we_tracing", return_value=False, create=True)
        with real:
            torch.nn.init.normal_(next(model.parameters()).detach())
        assert _random._rng_tracker is not None


def test_a_draw_for_a_dtensor_is_nobody_elses_business() -> None:
    """Torch would give the ranks of all cells rank 0's random state, whenever each of them comes to its first draw."""
    traces, races = traces_of(4, draws, (2, 2))
    assert faults_of(traces) + races == []


def normalized(cells: tuple[int, ...]) -> None:
    """The second cell trains a step more than the first, with normalization over the batches of its ranks."""
    state = setup_distributed_process_group(backend=BACKEND, device="cuda", federated=cells, hsdp=1)
    layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model = xffl.shard(nn.SyncBatchNorm.convert_sync_batchnorm(layers), state)

    def statistics(count: int) -> Callable[..., tuple[torch.Tensor, ...]]:
        return lambda values, *_: tuple(values.new_zeros(8) for _ in range(count))

    kernels = {  # which torch has for GPUs alone
        "batch_norm_stats": statistics(2),
        "batch_norm_gather_stats_with_counts": statistics(2),
        "batch_norm_elemt": lambda values, *_: values.clone(),
        "batch_norm_backward_reduce": statistics(4),
        "batch_norm_backward_elemt": lambda values, *_: values.clone(),
    }
    # While a graph is captured no values are asked for.
    with mock.patch.multiple(torch, **kernels), mock.patch("torch.cuda.is_current_stream_capturing", return_value=True):
        for _ in range(1 + state.topology.cell_of(dist.get_rank())):
            model(torch.randn(4, 8, device=state.current_device)).sum().backward()


def test_batches_are_normalized_inside_a_cell() -> None:
    """By itself SyncBatchNorm takes the world, also from inside a DDP group."""
    traces, races = traces_of(4, normalized, (2, 2))
    assert faults_of(traces) + races == []
    own = [record for record in traces[3] if isinstance(record, Call) and record.kind == "allgather_base"]
    assert own and all(len(record.group[1]) == 2 for record in own)


def offloaded(path: str) -> None:
    """What is made beside shards that FSDP keeps on the CPU, by callbacks and by loading, lies there, too."""
    mesh = {"dp_shard": 2, "cpu_offload": True}
    config = configure("fsdp", mesh, {"backend": BACKEND, "device": "cuda"})
    with DistributedStrategy.from_config(config) as strategy:
        model = strategy.wrap_model(model_of("plain"), loss=lambda output, target: output.sum())
        for parameter in model.parameters():
            (copy,) = copies_of({"": parameter}).values()
            made = spread_like(copy, parameter)
            assert made.shape == parameter.shape and local(made).device == copy.device == torch.device("cpu")
            assert local(made).data_ptr() == copy.data_ptr()
        optimizer, other = (torch.optim.SGD(model.parameters()) for _ in range(2))
        for parameter in model.parameters():
            optimizer.state[parameter]["rows"] = torch.arange(10.0)
        strategy.save_checkpoint(path, {"model": model, "optimizer": optimizer})
        strategy.load_checkpoint(path, {"model": model, "optimizer": other})
        for parameter in model.parameters():
            rows = local(other.state[parameter]["rows"])
            assert rows.device == torch.device("cpu") and rows.tolist() == list(range(10))


def test_what_lies_beside_offloaded_shards(tmp_path: Path) -> None:
    traces, races = traces_of(2, offloaded, str(tmp_path / "saved"))
    assert faults_of(traces) + races == []


def one_gpu() -> None:
    with pytest.raises(ConfigError, match=r"ranks 0-1 have the same GPU of .*, which NCCL refuses"):
        setup_distributed_process_group(backend=BACKEND, device="cuda:0", federated=(1, 1))


def test_two_ranks_on_one_gpu_are_told() -> None:
    traces, _ = traces_of(2, one_gpu)
    assert not any(isinstance(record, Call) for trace in traces for record in trace)  # before anything is given to it


def shared_gpus() -> None:
    asked: dict[str, Any] = {"backend": BACKEND, "federated": (2, 2), "link_backend": "gloo"}
    with pytest.raises(ConfigError, match=r"ranks 0-1 have the same GPU of .*, which NCCL refuses"):
        setup_distributed_process_group(device="cuda:0", **asked)
    state = setup_distributed_process_group(device=f"cuda:{int(os.environ['RANK']) % 2}", **asked)
    cleanup_distributed_process_group(state)


def test_two_cells_may_share_gpus_with_gloo_between_them() -> None:
    traces, _ = traces_of(4, shared_gpus)
    assert not any(isinstance(record, Call) for trace in traces for record in trace)


def one_at_a_time() -> None:
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    state = setup_distributed_process_group(backend=BACKEND, device="cuda", federated=(1, 1))
    model = xffl.shard(model_of("little"), state)
    xffl.Aggregator(model, state).close()
    with pytest.raises(ConfigError, match="CUDA_DEVICE_MAX_CONNECTIONS=1 lets a GPU begin one thing at a time"):
        xffl.Aggregator(model, state, overlap=True)


def test_rounds_behind_steps_need_a_gpu_that_does_several_things() -> None:
    traces, races = traces_of(2, one_at_a_time)
    assert faults_of(traces) + races == []


def late(cells: tuple[int, ...], late_rank: int, **asked: Any) -> None:
    """A rank's GPU does not come to the end of the first exchange; the second round takes place."""
    state = setup_distributed_process_group(backend=BACKEND, device="cuda", federated=cells, **asked)
    model = xffl.shard(model_of("plain"), state)
    aggregator = xffl.Aggregator(model, state, bucket_bytes=2**12)
    before = aggregator.own_groups
    patch = mock.patch.object(Progress, "note", side_effect=RuntimeError("a rank did not answer within 1 s"))
    with patch if dist.get_rank() == late_rank else mock.MagicMock(), pytest.raises(xffl.RoundError) as refused:
        aggregator.aggregate(1.0)
    assert f"rank {late_rank}" in str(refused.value) and "all ranks keep their weights" in str(refused.value)
    assert all(group in ABORTED for group in before)
    assert aggregator.can_go_on and aggregator.aggregate(1.0).round == 1
    assert not set(before) & set(aggregator.own_groups)


ABORTED: list[dist.ProcessGroup] = []


def after_a_late_gpu(cells: tuple[int, ...], late_rank: int, **asked: Any) -> None:
    def note(group: dist.ProcessGroup) -> None:
        ABORTED.append(group)

    with mock.patch.object(dist.ProcessGroup, "abort", note):
        late(cells, late_rank, **asked)


def test_further_handles_of_a_state_get_no_communicator_of_nccl() -> None:
    """A state has three further handles of its senders and of its replicas; rounds use three of their own."""
    traces, _ = traces_of(4, rounds, (2, 2), 1)
    for rank, trace in enumerate(traces):  # of each cell the first rank sends
        used = {record.group for record in trace if isinstance(record, Call) and "_stream" in record.group[0]}
        assert [name.split()[0] for name, _ in used] == ["xffl_federated_stream"] * (0 if rank % 2 else 3), used


@pytest.mark.parametrize("asked", [{}, {"link_backend": "gloo", "hsdp": 1}], ids=str)
def test_a_round_that_fails_on_a_gpu_leaves_the_callers_stream_free(asked: dict[str, Any]) -> None:
    """It waits for the round's only once all have agreed, so that the model can be read if they have not."""
    traces, _ = traces_of(4, after_a_late_gpu, (2, 2), 1, **asked)
    for trace in traces:
        calls = [record for record in trace if isinstance(record, Call) and record.at.startswith("aggregation/")]
        assert calls and all(record.stream != 0 for record in calls)
        joined = {trace[record.call] for record in trace if isinstance(record, Join) and record.stream == 0}
        assert not joined & set(calls)


def test_a_host_is_a_few_messages_ahead_of_its_gpu() -> None:
    """NCCL's timeout begins when a message is given, so it must not be one for the whole of an exchange."""
    traces, _ = traces_of(2, rounds, (1, 1), None, {"bucket_bytes": 2**10, "count": 1})
    for trace in traces:
        most = ahead = 0
        for record in trace:
            if isinstance(record, Call) and record.kind == "batch":
                ahead += 1
            elif isinstance(record, HostWait):
                ahead = min(ahead, 2 * MOST_IN_FLIGHT)
            most = max(most, ahead)
        batches = sum(isinstance(record, Call) and record.kind == "batch" for record in trace)
        assert batches > 4 * MOST_IN_FLIGHT and most <= 2 * MOST_IN_FLIGHT + 1


# Faults that are put in -----------------------------------------------------------------------------------------------


def unconnected() -> None:
    for place in ("xffl.parallel.spread", "xffl.aggregation.engine.groups"):
        mock.patch(f"{place}.connect").start()


def in_another_order() -> None:
    def backwards(groups: Any, device: torch.device) -> None:
        connect([*groups][:: -1 if dist.get_rank() % 2 else 1], device)

    connect = backends.connect
    mock.patch("xffl.aggregation.engine.groups.connect", backwards).start()


def one_by_one() -> None:
    def apart(receive: Any, send: Any, group: Any, tag: int) -> list[Any]:
        works = [dist.isend(values.view(torch.uint8), peer, group, tag) for values, peer in send]
        return works + [dist.irecv(values.view(torch.uint8), peer, group, tag) for values, peer in receive]

    mock.patch.object(transport, "start_moves", apart).start()


def first_one_way() -> None:
    def halves(receive: Any, send: Any, group: Any, tag: int) -> list[Any]:
        works: list[Any] = []
        for operation, given in ((dist.irecv, receive), (dist.isend, send)):
            moves = [dist.P2POp(operation, values.view(torch.uint8), peer, group, tag) for values, peer in given]
            works += dist.batch_isend_irecv(moves) if moves else []
        return works

    mock.patch.object(transport, "start_moves", halves).start()


def cut(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.uint8)[: -4 if dist.get_rank() == 1 else None]


def of_another_size() -> None:
    def short(receive: Any, send: Any, group: Any, tag: int) -> Any:
        return start([(cut(values), peer) for values, peer in receive], send, group, tag)

    start = transport.start_moves
    mock.patch.object(transport, "start_moves", short).start()


def another_collective() -> None:
    def broadcast(values: torch.Tensor, **options: Any) -> Any:
        return real(cut(values), **options)

    real = dist.broadcast
    mock.patch.object(dist, "broadcast", broadcast).start()


def another_kind() -> None:
    def connect(groups: Any, device: torch.device) -> None:
        for group in dict.fromkeys(group for group in groups if group is not None):
            values = torch.zeros(1, device=device)
            if dist.get_rank() == 1:
                dist.all_gather_into_tensor(values.new_empty(group.size()), values, group=group)
            else:
                dist.all_reduce(values, group=group)

    mock.patch("xffl.parallel.spread.connect", connect).start()


def on_another_gpu() -> None:
    mock.patch("xffl.parallel.spread.transfer_device", return_value=torch.device("cuda", 0)).start()


def strided() -> None:
    def connect(groups: Any, device: torch.device) -> None:
        dist.all_reduce(torch.zeros(4, 2, device=device)[:, 0])

    mock.patch("xffl.parallel.spread.connect", connect).start()


def of_16_bits() -> None:
    def connect(groups: Any, device: torch.device) -> None:
        dist.all_reduce(torch.zeros(4, dtype=torch.int16, device=device))

    mock.patch("xffl.parallel.spread.connect", connect).start()


def not_waited_for() -> None:
    mock.patch.object(transport.CrossCellTransport, "_arrive").start()


def the_caller_goes_on() -> None:
    """Neither the caller's stream nor the host waits for a round's stream."""

    def enter(self: StreamWork) -> None:
        self._entered.enter_context(torch.cuda.stream(self._stream))

    def leave(self: StreamWork, *unused: object) -> None:
        self._entered.close()

    mock.patch.object(StreamWork, "__enter__", enter).start()
    mock.patch.object(StreamWork, "__exit__", leave).start()
    mock.patch.object(Progress, "drain").start()


def the_host_waits_alone() -> None:
    """A rank waits for its part of a collective before the others have begun theirs, and they for it."""

    def connect(groups: Any, device: torch.device) -> None:
        given = [group for group in groups if group is not None]
        values = torch.zeros(1, device=device)
        for group in given:
            dist.all_reduce(values, group=group)
        for group in given[:: 1 if dist.get_rank() else -1]:
            dist.all_reduce(values, group=group)
            values.item()

    mock.patch("xffl.parallel.spread.connect", connect).start()


PLANTED: list[tuple[tuple[int, ...], Callable[[], None], str]] = [
    ((2, 1), in_another_order, "hangs in allreduce at distributed/collectives.py"),
    ((1, 1), one_by_one, "is no batch: NCCL connects the two by themselves"),
    ((1, 1), of_another_size, "where rank"),
    ((1, 1), not_waited_for, "on another stream"),
    ((4, 2), unconnected, "is first used by ranks [0, 4] only"),
    ((1, 1), first_one_way, "never ends"),
    ((2, 2), another_collective, "meets broadcast at parallel/spread.py"),
    ((2, 2), another_kind, "meets allgather_base at parallel/spread.py"),
    ((2, 2), the_host_waits_alone, "hangs in a wait of the host at item() at parallel/spread.py"),
    ((1, 1), the_caller_goes_on, "on another stream"),
]
"""The first four are a hang, a batch, a size and a race; the others come to the same findings by other ways."""


@pytest.mark.parametrize(("cells", "plant", "told"), some_of(PLANTED, *PLANTED[4:]))
def test_faults_that_are_put_in_are_found(cells: tuple[int, ...], plant: Callable[[], None], told: str) -> None:
    hsdp, options = (1, {"rails": True}) if plant is in_another_order else (None, {})
    traces, races = traces_of(sum(cells), rounds, cells, hsdp, options, plant=plant)
    faults = faults_of(traces) + races
    assert any(told in fault for fault in faults), faults


def nobody_settles() -> None:
    mock.patch.object(HostCopies, "settle").start()


def nobody_finishes() -> None:
    without_a_home_gpu()
    mock.patch.object(HostCopies, "finish").start()


def nobody_holds_writes() -> None:
    without_a_home_gpu()
    mock.patch.object(HostCopies, "hold_writes").start()


def brought_on_another_stream() -> None:
    def bring(self: HostCopies, values: torch.Tensor, into: torch.Tensor) -> None:
        with torch.cuda.stream(torch.cuda.Stream(into.device)):  # type: ignore[no-untyped-call]
            bring_here(self, values, into)

    bring_here = HostCopies.bring
    mock.patch.object(HostCopies, "bring", bring).start()


def copied_before_its_mean() -> None:
    mock.patch.object(Stream, "wait_stream").start()


def host_memory_is_used_again() -> None:
    """The result of a bucket is written over while it is still on its way to the GPU."""

    def end(self: ExchangeWalk, transfer: Any, bucket: Any, memory: BucketMemory) -> None:
        real(self, transfer, bucket, memory)
        memory.out.cpu().zero_() if memory.out.device.type == "cpu" else None

    real = ExchangeWalk.end
    mock.patch.object(ExchangeWalk, "end", end).start()


RACES: list[tuple[Callable[[], None], dict[str, Any], str]] = [
    (nobody_settles, {}, "what aten::copy_ at aggregation/engine/buffers.py"),
    (nobody_finishes, {}, "still reads"),
    (the_caller_goes_on, {}, f"broadcast at {CELL}"),
    (nobody_holds_writes, {"behind": True}, "writes what aten::copy_ at aggregation/engine/buffers.py"),
    (brought_on_another_stream, {}, f"broadcast at {CELL}"),
    (copied_before_its_mean, {"model": "buffers"}, "writes, on another stream"),
    (host_memory_is_used_again, {}, "still reads"),
]


@pytest.mark.parametrize(("plant", "options", "told"), some_of(RACES, *RACES[3:]))
def test_faults_of_the_hosts_memory_are_found(plant: Callable[[], None], options: dict[str, Any], told: str) -> None:
    """A bucket is sent before it has come, filled again before it has gone, or trained before it has been read.

    Or it is handed round inside the cell before it is on the GPU, or written before it has come round.
    """
    _, races = traces_of(4, rounds, (2, 2), 1, options, link_backend="gloo", plant=plant)
    assert any(told in race for race in races), races


@pytest.mark.parametrize(
    ("plant", "told"),
    [
        (on_another_gpu, "a tensor on cuda:0, but this rank works on GPU 1"),
        (strided, "is not contiguous"),
        (of_16_bits, "NCCL does not know torch.int16"),
    ],
)
def test_what_nccl_refuses_is_refused(plant: Callable[[], None], told: str) -> None:
    with pytest.raises(WorldError, match=told):
        traces_of(2, rounds, (1, 1), plant=plant)


def test_gloo_does_not_send_from_gpus() -> None:
    with pytest.raises(WorldError, match="a tensor on cuda:[01] over cpu:gloo,cuda:gloo"):
        traces_of(2, rounds, (1, 1), backend="gloo", plant=gpu_to_gloo)


def gpu_to_gloo() -> None:
    here = torch.device("cuda", torch.cuda.current_device())
    mock.patch("xffl.parallel.spread.transfer_device", return_value=here).start()
