"""Elastic federations: cells that are worlds of their own, killed at each point of a round, late, stopped, alone."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import xffl
from tests.ports import free_port
from tests.rows import some_of
from tests.worlds import be_launched, run_world
from xffl.aggregation.algorithms.clients import Scaffold, local
from xffl.aggregation.engine.decision.consensus import RoundInput
from xffl.aggregation.engine.stages.first_round import FirstRound
from xffl.aggregation.engine.stages.hand_over import SharedValues
from xffl.aggregation.federations import elastic
from xffl.aggregation.federations.elastic import ElasticAggregator
from xffl.cluster.lighthouse.page import read_lighthouse
from xffl.costs import EXCHANGE_FORMAT
from xffl.distributed import ElasticParameters
from xffl.distributed.failures import faults
from xffl.distributed.failures.faults import PHASES, Fault
from xffl.elastic import federation
from xffl.elastic.federation import ElasticFederation
from xffl.elastic.lighthouse_client import Lighthouse, coordination
from xffl.elastic.roster import CellRecord, Epoch
from xffl.journal.folder import JournalFolder
from xffl.journal.records import JournalUnreachable, make_id
from xffl.journal.who_continues import Member, attempt_of

pytestmark = pytest.mark.skipif(find_spec("torchft") is None, reason="needs the extra elastic")

ROOT = Path(__file__).parents[2]
SIZES = (2, 2, 1)
ROUNDS = 6


@dataclass
class Plan:
    """What each process of a test is told."""

    url: str
    sizes: tuple[int, ...]
    ports: tuple[int, ...]
    folder: str = ""  # where the ranks of cells that are not late tell that they are ready
    rounds: int = ROUNDS
    fault: str = ""
    connect_s: float = federation.CONNECT_S
    unknown_s: float = federation.CELL_HEARTBEAT_TIMEOUT_S  # patience with a missing cell of which nothing is known
    second: str = ""  # a fault of another cell
    options: dict[str, Any] = field(default_factory=dict)
    late: tuple[int, ...] = ()  # cells that come once the others have made some rounds
    steps: dict[int, int] = field(default_factory=dict)  # steps that a cell makes in all, instead of rounds
    parameters: dict[str, Any] = field(default_factory=dict)
    step_s: float = 0.01
    pauses: dict[int, float] = field(default_factory=dict)  # seconds that each step of a cell takes longer
    widths: dict[int, int] = field(default_factory=dict)  # of a cell's own model
    saves: dict[int, int] = field(default_factory=dict)  # the round after which a cell saves, where it goes on from
    checkpoints: str = ""
    is_bare: bool = False  # the model has no buffers
    keywords: dict[str, Any] = field(default_factory=dict)  # of FederatedScaling
    biases: dict[int, float] = field(default_factory=dict)  # what a cell gives to the last round
    tokens: dict[int, str] = field(default_factory=dict)  # of cells that know another one than the run's
    doubles: dict[int, int] = field(default_factory=dict)  # cells that say they are another one
    hsdp: int | None = None


@dataclass
class Told:
    """What one rank has seen: by round what its model was, who took part, how long it took; and its steps."""

    cell: int
    digests: dict[int, str] = field(default_factory=dict)
    cells: dict[int, tuple[int, ...]] = field(default_factory=dict)
    weights: dict[int, tuple[float, ...]] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    tries: dict[int, int] = field(default_factory=dict)
    agreed: dict[int, str] = field(default_factory=dict)  # what servers and norms go on from
    norms: dict[int, tuple[float, ...] | None] = field(default_factory=dict)
    corrections: dict[int, torch.Tensor] = field(default_factory=dict)  # of SCAFFOLD
    spent: Any = None  # what privacy has cost
    skipped: int = 0
    starts_equal: bool | None = None  # whether its first step went from what was agreed on
    keys: int = 0  # of the store that the cell serves, behind its last round
    looks: dict[int, int] = field(default_factory=dict)  # how often values had been read for a comparison
    steps: int = 0


def start_lighthouse(port: int, join_s: float = 20.0) -> Any:
    times = {"join_timeout_ms": round(1000 * join_s), "heartbeat_timeout_ms": 2000, "quorum_tick_ms": 100}
    return coordination().LighthouseServer(bind=f"127.0.0.1:{port}", min_replicas=1, **times)


def of_all(url: str, cells: int) -> ElasticParameters:
    """Return what a cell is given so that no round is made without one of the cells, however late it comes."""
    return ElasticParameters(lighthouse=url, least_cells=cells)


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the run of a test a journal of its own."""
    monkeypatch.setenv("XFFL_JOURNAL", str(tmp_path / "journal"))


@pytest.fixture
def lighthouse(journal: None) -> Iterator[str]:
    server = start_lighthouse(0)
    yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


failures: list[str] = []
"""What mortal ranks have raised."""


def digest(model: nn.Module) -> str:
    """The bits of all of the cell's shards, which other cells may cut otherwise."""
    whole = hashlib.sha256()
    for one in model.state_dict().values():
        whole.update((one.full_tensor() if hasattr(one, "full_tensor") else one).numpy().tobytes())
    return whole.hexdigest()


def digest_of_agreed(state: dict[str, Any]) -> str:
    """The bits of the last agreed model and of what its server keeps, of all of the cell's shards."""
    if "agreed" not in state:
        return ""
    shards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shards, state["agreed"])

    def put_together(parts: list[Any]) -> Any:
        if isinstance(parts[0], dict):
            keys = sorted({key for part in parts for key in part}, key=str)
            return {key: put_together([part[key] for part in parts if key in part]) for key in keys}
        is_cut = isinstance(parts[0], torch.Tensor) and parts[0].dim() > 0
        return torch.cat(parts).numpy().tobytes() if is_cut else str(parts[0])

    return hashlib.sha256(repr(put_together(shards)).encode()).hexdigest()


def member(rank: int, world: int, plan: Plan) -> Told:
    """Be a rank of a cell that trains, until it has made its rounds or its steps."""
    cell = next(cell for cell, _ in enumerate(plan.sizes) if rank < sum(plan.sizes[: cell + 1]))
    while cell in plan.late and not (Path(plan.folder) / "late").exists():
        time.sleep(0.01)
    be_launched(rank - sum(plan.sizes[:cell]), plan.sizes[cell], plan.ports[cell])
    federation.CONNECT_S = plan.connect_s
    federation.CELL_HEARTBEAT_TIMEOUT_S = plan.unknown_s
    os.environ["XFFL_FAULT"] = plan.second if plan.second.startswith(f"{cell}:") else plan.fault
    os.environ["XFFL_TOKEN"] = plan.tokens.get(cell, "the run's own token")
    told, used = Told(cell), 0
    elastic = ElasticParameters(lighthouse=plan.url, **plan.parameters)
    number, cells = plan.doubles.get(cell, cell), len(plan.sizes) - len(plan.doubles)
    with (
        xffl.session(cell=number, cells=cells, hsdp=plan.hsdp, elastic=elastic, timeout_s=60) as state,
        mock.patch.object(federation, "UNLIKE_S", 2.0),
        mock.patch.object(FirstRound, "_read_sums", autospec=True, side_effect=FirstRound._read_sums) as read,
    ):
        (Path(plan.folder) / str(rank)).write_text(str(os.getpid()))
        while not plan.late and len(os.listdir(plan.folder)) < world:
            time.sleep(0.01)
        torch.manual_seed(cell)
        wide = plan.widths.get(cell, 7)
        layers = [nn.Linear(5, wide), nn.Tanh(), *([] if plan.is_bare else [nn.BatchNorm1d(wide)]), nn.Linear(wide, 3)]
        model = xffl.shard(nn.Sequential(*layers), state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)

        def weight() -> float:
            nonlocal used
            if cell in plan.biases and scaling.aggregator.rounds == plan.rounds - 1:
                with torch.no_grad():
                    model[-1].bias.fill_(plan.biases[cell])
            new, used = told.steps - used, told.steps
            return float(new)

        def on_round(report: Any) -> None:
            if report.is_skipped:
                told.skipped += 1
                return
            told.digests[report.round] = digest(model)
            told.cells[report.round], told.weights[report.round] = report.cells, report.weights
            told.seconds[report.round], told.tries[report.round] = report.seconds, report.tries
            told.looks[report.round] = read.call_count
            told.agreed[report.round] = digest_of_agreed(scaling.aggregator.state_dict())
            told.norms[report.round] = report.update_norms
            if isinstance(client, Scaffold):
                kept = [None] * dist.get_world_size()
                dist.all_gather_object(kept, list(client.state_dict()["corrections"].values()))
                told.corrections[report.round] = torch.cat(
                    [torch.cat(parts).flatten() for parts in zip(*kept, strict=True)]
                )
            if report.round == 4:
                (Path(plan.folder) / "late").touch()
            if plan.saves.get(cell) == report.round:
                torch.save((model.state_dict(), scaling.state_dict()), f"{plan.checkpoints}/{cell}.pt")

        client = Scaffold() if plan.keywords.get("client") == "scaffold" else None

        def compare(*unused: Any) -> None:
            agreed = None if scaling.is_under_way else scaling.aggregator.state_dict().get("agreed")
            if told.starts_equal is None and agreed is not None:
                named = model.named_parameters()  # of replicas in DDP
                mine = {name.removeprefix("module."): local(one).flatten() for name, one in named}
                told.starts_equal = all(one.equal(agreed["model"][name]) for name, one in mine.items() if one.numel())

        optimizer.register_step_pre_hook(compare)
        keywords: dict[str, Any] = {"every": 2, "weight": weight} | plan.keywords | {"client": client}
        scaling = xffl.FederatedScaling(model, optimizer, state, on_round=on_round, aggregator=plan.options, **keywords)
        generator = torch.Generator().manual_seed(rank)
        assert scaling.total_weight == 0.0
        with scaling:
            if plan.checkpoints and not plan.saves:
                weights, rounds = torch.load(f"{plan.checkpoints}/{cell}.pt", weights_only=False)
                model.load_state_dict(weights)
                scaling.load_state_dict(rounds)
            while told.steps < plan.steps[cell] if cell in plan.steps else scaling.aggregator.rounds < plan.rounds:
                model(torch.randn(4, 5, generator=generator)).square().sum().backward()
                told.steps += 1
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(plan.step_s + plan.pauses.get(cell, 0.0))
                if scaling.is_under_way:
                    with pytest.raises(xffl.StateError):
                        scaling.state_dict()
            store = scaling.aggregator._federation._store
            told.keys = 0 if store is None else store.num_keys()
        told.spent = scaling.aggregator.state_dict().get("privacy")
    if plan.fault.endswith("stop") and rank == 0:
        os.kill(int((Path(plan.folder) / plan.fault[0]).read_text()), signal.SIGKILL)  # a rank of a cell of one
    return told


def run(url: str, sizes: tuple[int, ...] = SIZES, mortal: tuple[int, ...] = (), **more: Any) -> list[Told]:
    """Run cells; what the ranks have told that have ended well."""
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(url, sizes, tuple(free_port() for _ in sizes), folder, **more)
        told = run_world(sum(sizes), member, plan, init=False, timeout_s=100, mortal=mortal)
    failures.extend(one for one in told if isinstance(one, str))
    return [one for one in told if isinstance(one, Told)]


def check_alike(told: list[Told], *, is_whole: bool = True) -> None:
    """All that took part in a round hold the same bits behind it, and name the same cells."""
    for number in {number for one in told for number in one.digests}:
        for what in ("cells", "weights", "agreed", "norms", *(["digests"] if is_whole else [])):
            assert len({getattr(one, what)[number] for one in told if number in one.digests}) == 1, (number, what)


@pytest.mark.parametrize("phase", ["publish", "published"])
def test_a_round_counts_if_its_record_stands_when_its_publisher_is_killed(lighthouse: str, phase: str) -> None:
    told = run(lighthouse, mortal=(0, 1), fault=f"0:0:{phase}:3")
    assert [one.cell for one in told] == [1, 1, 2]
    check_alike(told)
    for one in told:
        assert one.cells[3] == ((0, 1, 2) if phase == "published" else (1, 2))
        assert one.cells[ROUNDS] == (1, 2)
        assert sum(weights[one.cell] for weights in one.weights.values()) == one.steps * SIZES[one.cell]


NOT_EVERYWHERE = ("enter", "half", "share", "publish", "published")


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase not in NOT_EVERYWHERE])
def test_who_is_left_goes_on_where_a_rank_is_killed(lighthouse: str, phase: str) -> None:
    """Each point of a round, in turn for the rank that speaks for its cell and for the other one."""
    victim = 0 if phase in ("told", "meet", "opened", "agreed") else 1
    told = run(lighthouse, mortal=(2, 3), fault=f"1:{victim}:{phase}:3")
    survivors = [one for one in told if one.cell != 1]
    assert len(survivors) == 3
    check_alike(told)
    assert survivors[0].keys == 5  # the token's proof, how many ranks have come, and the addresses of three
    for one in survivors:
        assert one.cells[ROUNDS] == (0, 2)
        assert max(one.seconds.values()) < 15.0
        assert one.looks[2] == one.looks[ROUNDS]  # those that are left were compared before
        # Each step was counted once: in the round that was lost, or in the one that took its place.
        counted = sum(weights[one.cell] for weights in one.weights.values())
        assert counted == one.steps * SIZES[one.cell]


@pytest.mark.parametrize("cell", [0, 1])
def test_a_cell_that_is_lost_before_its_ranks_have_connected_is_not_waited_for(lighthouse: str, cell: int) -> None:
    """The others hear it, and do not wait until their time for connecting is over, which here outlasts the test.

    Cell 0 has the store where all ranks meet.
    """
    ranks = (2 * cell, 2 * cell + 1)
    told = run(lighthouse, mortal=ranks, fault=f"{cell}:0:enter:1", rounds=3, connect_s=300.0)
    others = (1 - cell, 2)
    assert [one.cell for one in told] == [others[0], others[0], 2]
    check_alike(told)
    for one in told:
        assert {*one.cells.values()} == {others}


def test_a_round_whose_record_stands_is_taken_by_all(lighthouse: str) -> None:
    """The record is published while the others lose a cell, so that all are in doubt."""
    told = run(lighthouse, mortal=(2, 3), fault="1:0:agreed:3")
    assert {one.cell for one in told} == {0, 2}
    check_alike(told)
    for one in told:
        assert one.cells[3] == (0, 1, 2)  # with the steps of the cell that was lost
        assert one.weights[3][1] > 0
        assert sum(weights[one.cell] for weights in one.weights.values()) == one.steps * SIZES[one.cell]


@pytest.mark.parametrize(
    "phase", some_of(("exchange", "close", "half", "told", "agreed"), "exchange", "close", "agreed")
)
def test_of_two_cells_one_goes_on_where_the_other_is_killed(lighthouse: str, phase: str) -> None:
    told = run(lighthouse, (2, 2), mortal=(2, 3), fault=f"1:0:{phase}:3")
    assert [one.cell for one in told] == [0, 0]
    check_alike(told)
    for one in told:
        assert one.cells[ROUNDS] == (0,)
        assert one.looks[2] == one.looks[ROUNDS]  # with which there is nobody to compare
        assert sum(weights[0] for weights in one.weights.values()) == one.steps * 2


def test_two_cells_agree_on_the_mean_where_values_of_one_are_huge(lighthouse: str) -> None:
    check_alike(run(lighthouse, (2, 1), biases={0: 1.0 / 3, 1: -3e38}))


def test_two_cells_refuse_what_is_not_finite(lighthouse: str) -> None:
    failures.clear()
    assert not run(lighthouse, (2, 1), mortal=(0, 1, 2), biases={1: float("nan")})
    assert len(failures) == 3
    for text in failures:
        assert "RoundError" in text
        assert "cell 1 holds values that are not finite in '3.bias'" in text


def test_a_cell_that_is_left_out_for_what_is_not_finite_has_no_norm(lighthouse: str) -> None:
    told = run(
        lighthouse, (1, 1), rounds=3, biases={1: float("nan")}, options={"nonfinite": "drop_cell", "norms": True}
    )
    check_alike(told)
    for one in told:
        norms = one.norms[3]
        assert one.weights[3][0] > 0 == one.weights[3][1]
        assert norms is not None and norms[0] > 0 == norms[1]


def test_a_cell_that_is_silent_is_given_up(lighthouse: str) -> None:
    """It stops in the exchange; its heartbeats stop with it, and its messages never come."""
    told = run(lighthouse, (1, 1, 1), mortal=(1,), fault="1:0:exchange:4:stop", rounds=6)
    check_alike(told)
    assert [one.cell for one in told] == [0, 2]
    for one in told:
        assert one.cells[4] == (0, 2)
        assert one.tries[4] > 1
        assert one.seconds[4] < 20.0  # messages may take ten seconds


SERVERS = {
    "fedadam": "fedadam:lr=0.02,clip=0.3",
    "fedyogi": "fedyogi:lr=0.02",
    "momentum": "fedavgm:lr=0.1",
    "schedule": {"name": "AdamW", "lr": 0.02, "schedule": "StepLR:step_size=2,gamma=0.9"},
}


OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"server": SERVERS[name]} for name in ("fedadam", "fedyogi", "momentum")},
    "fragments": {"server": SERVERS["schedule"], "fragments": 3},  # which needs norms, too
}


@pytest.mark.parametrize("name", some_of(OPTIONS, "fedadam", "fedyogi", "momentum"))
def test_a_late_cell_of_another_size_takes_over_the_model_and_the_server(lighthouse: str, name: str) -> None:
    # The lowest cell is the late one: neither its integer buffers nor anything else of it may count.
    options = OPTIONS[name]
    told = run(lighthouse, (3, 2, 1), late=(0,), rounds=60, step_s=0.02, options=options)
    check_alike(told, is_whole="fragments" not in options)
    assert all(one.starts_equal for one in told)
    late = [one for one in told if one.cell == 0]
    assert len(late) == 3
    first = min(late[0].digests)
    assert 2 < first < 60
    before = next(one for one in told if one.cell == 1)
    assert before.cells[first - 2] == (1, 2)
    assert before.cells[first - 1] == (0, 1, 2)  # counts 0 there: it has made no step
    assert before.weights[first - 1][0] == 0.0
    assert late[0].weights[first][0] > 0
    assert len(set(before.agreed.values())) == len(before.agreed)
    if "fragments" in options:
        norms = before.norms[first]
        assert norms is not None and min(norms) > 0
        norms = before.norms[first - 1]
        assert norms is not None and norms[0] == 0.0 < min(norms[1:])  # it was behind, with a start of its own


def test_a_cell_that_has_waited_for_long_cuts_no_slower_one(journal: None) -> None:
    """The lighthouse waits for cells that live, but counts from when the first one asked: here, the late one."""
    server = start_lighthouse(0, join_s=1.5)
    try:
        url = f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
        told = run(url, (1, 1, 1), late=(2,), rounds=7, step_s=1.0, pauses={1: 0.15})
    finally:
        server.shutdown()
    check_alike(told)
    assert len(told) == 3
    for one in told:
        assert one.weights[7] == (2.0, 2.0, 2.0)
        assert sum(weights[one.cell] for weights in one.weights.values()) == one.steps


def wait_for_each_other(rank: int, world: int, plan: Plan) -> Told:
    with mock.patch.object(federation, "CELL_JOIN_TIMEOUT_S", 1.0):
        return member(rank, world, plan)


def test_cells_whose_steps_take_unlike_times_lose_no_round(journal: None, tmp_path: Path) -> None:
    """Rounds of 0.8, 1.6 and 3.2 s: the lighthouse, and a cell that knows nothing of another, wait for 1 s each."""
    server = start_lighthouse(0, join_s=1.0)
    try:
        url = f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
        plan = Plan(
            url,
            (1, 1, 1),
            tuple(free_port() for _ in range(3)),
            folder=str(tmp_path / "ranks"),
            rounds=4,
            step_s=0.4,
            pauses={1: 0.4, 2: 1.2},
        )
        os.mkdir(plan.folder)
        told = run_world(3, wait_for_each_other, plan, init=False, timeout_s=100)
    finally:
        server.shutdown()
    check_alike(told)
    for one in told:
        assert one.weights == dict.fromkeys(range(2, 5), (2.0, 2.0, 2.0))
        assert one.steps == 6


def test_a_late_cell_takes_all_of_it_from_another_one_where_the_giving_cell_is_lost(lighthouse: str) -> None:
    told = run(
        lighthouse,
        (2, 2, 1, 1),
        mortal=(0, 1),
        late=(3,),
        fault="0:1:share:1",
        rounds=60,
        step_s=0.02,
        options=OPTIONS["fedadam"],
    )
    assert [one.cell for one in told] == [1, 1, 2, 3]
    check_alike(told)
    for one in told:
        assert one.starts_equal
        assert one.cells[60] == (1, 2, 3)
    survivor = told[0]
    assert sum(weights[1] for weights in survivor.weights.values()) == survivor.steps * 2


def be_on_a_slow_link(rank: int, world: int, plan: Plan) -> Told:
    """Be one of three cells; each bucket of what a late one takes over needs a tenth of what a message may take."""
    prepare = SharedValues.prepare

    def slowly(self: SharedValues) -> None:
        time.sleep(0.1)
        prepare(self)

    with mock.patch.object(elastic, "LEAST_TIMEOUT_S", 1.0), mock.patch.object(SharedValues, "prepare", slowly):
        return member(rank, world, plan)


def test_a_late_cell_that_takes_over_for_long_breaks_no_round(lighthouse: str) -> None:
    """Longer than a message may take, as where rounds move little of a model; the third cell waits meanwhile."""
    options = {"server": SERVERS["momentum"], "bucket_bytes": 16}
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(lighthouse, (1, 1, 1), tuple(free_port() for _ in range(3)), folder, late=(2,), options=options)
        plan.rounds, plan.step_s = 24, 0.05
        told = run_world(3, be_on_a_slow_link, plan, init=False, timeout_s=100)
    check_alike(told)
    assert max(tries for one in told for tries in one.tries.values()) == 1
    assert told[0].weights[24] == (2.0, 2.0, 2.0)


def test_a_late_cell_with_another_model_is_refused_alone(lighthouse: str) -> None:
    failures.clear()
    told = run(lighthouse, (1, 1, 1), mortal=(2,), late=(2,), widths={2: 8}, steps={0: 300, 1: 300}, rounds=150)
    assert [one.cell for one in told] == [0, 1]
    check_alike(told)
    [text] = failures
    assert "ConfigError" in text and "(8,) float32 parameter, average on ranks 2" in text
    for one in told:
        assert max(one.tries.values()) > 1
        assert sum(weights[one.cell] for weights in one.weights.values()) == one.steps


def test_a_stranger_may_tell_the_lighthouse_anything(lighthouse: str) -> None:
    """And comes to the meeting as one that has not proven that it knows the token."""
    second, torchft = timedelta(seconds=1), coordination()
    heart = torchft.ManagerServer(
        replica_id="x",
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        bind="127.0.0.1:0",
        store_addr="127.0.0.1:1",
        world_size=1,
        heartbeat_interval=second / 10,
        connect_timeout=second,
        quorum_retries=0,
    )

    seen = threading.Event()

    def come() -> None:
        asked = {"timeout": 30 * second, "address": "", "store_address": "", "step": 0, "world_size": 1}
        while not seen.is_set():
            torchft.LighthouseClient(lighthouse, second).quorum(replica_id="x", data={"proof": "\u00e9"}, **asked)

    stranger = threading.Thread(target=come)
    stranger.start()
    place = Lighthouse(lighthouse, "0.abc", b"secret")
    record, meeting = CellRecord(0, 2, "0.abc", address="127.0.0.1:1"), None
    try:
        while meeting is None or not meeting.unproven:
            meeting = place.meet(record, 10.0)
            assert meeting is None or [one.cell for one in meeting.records] == [0]
        assert meeting.unproven == ("x",)
    finally:
        seen.set()
        place.leave()
        stranger.join()
        heart.shutdown()


def test_a_cell_with_another_token_is_refused_alone(lighthouse: str) -> None:
    failures.clear()
    told = run(
        lighthouse, (1, 1, 1), mortal=(2,), tokens={2: "that of another run"}, parameters={"meeting_timeout_s": 30.0}
    )
    assert [one.cell for one in told] == [0, 1]
    check_alike(told)
    [text] = failures
    assert "runs with another token than this cell 2" in text
    for one in told:
        assert one.cells[ROUNDS] == (0, 1)


def test_of_two_jobs_with_one_number_the_earlier_one_ends(lighthouse: str) -> None:
    failures.clear()
    told = run(lighthouse, (1, 1, 1), mortal=(1,), late=(2,), doubles={2: 1}, rounds=60, step_s=0.03)
    assert [one.cell for one in told] == [0, 2]
    check_alike(told)
    [text] = failures
    assert "ConfigError: another job is cell 1 of this run since record" in text
    assert told[0].cells[60] == (0, 1)


def mixed_member(rank: int, world: int, plan: Plan, formats: dict[int, int], torches: dict[int, str]) -> Any:
    """Be the only rank of a cell that runs another xffl or torch; return what it has written, and seen or raised."""
    if rank in formats:
        for module in ("xffl.elastic.roster", "xffl.costs"):
            sys.modules[module].EXCHANGE_FORMAT = formats[rank]  # type: ignore[attr-defined]
        to_plain = CellRecord.to_plain
        CellRecord.to_plain = lambda one: to_plain(one) | {"format": formats[rank]}  # type: ignore[method-assign]
    torch.__version__ = torches.get(rank, torch.__version__)
    written = io.StringIO()
    with contextlib.redirect_stderr(written):
        try:
            told: Told | str = member(rank, world, plan)
        except xffl.ConfigError as error:
            told = str(error)
    return written.getvalue(), told


def run_mixed(url: str, formats: dict[int, int], torches: dict[int, str], **more: Any) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(url, (1, 1, 1), tuple(free_port() for _ in range(3)), folder, **more)
        return run_world(3, mixed_member, plan, formats, torches, init=False, timeout_s=100)


def test_a_cell_of_another_exchange_format_is_refused_alone(lighthouse: str) -> None:
    steps = {"late": (2,), "steps": {0: 300, 1: 300}, "rounds": 150}
    *others, (_, refusal) = run_mixed(lighthouse, {2: 9}, {}, **steps)
    here = f"(xffl {xffl.__version__})"
    advice = "run versions of xffl that have one exchange format in all cells"
    own = f"{EXCHANGE_FORMAT} {here}"
    assert refusal in {
        f"the exchange format of cell {cell} is {own}, that of this cell is 9 {here}; {advice}" for cell in (0, 1)
    }
    check_alike([told for _, told in others])
    for written, told in others:
        assert [line for line in written.splitlines() if "waits" not in line] == [
            f"xffl: the exchange format of cell 2 is 9 {here}, that of this cell is {own}; {advice}; it is left out"
        ]
        assert told.cells[max(told.cells)] == (0, 1)


def test_what_differs_between_cells_is_told_once(lighthouse: str) -> None:
    found = run_mixed(lighthouse, {}, {1: "2.11.0"})
    lines = (written.splitlines(keepends=True) for written, _ in found)
    assert ["".join(line for line in written if "waits" not in line) for written in lines] == [
        "xffl: what the cells run differs, which is allowed "
        "(docs: Versions and formats, What may differ between cells):\n"
        "xffl:   cells       torch\n"
        f"xffl:   cells 0, 2  {torch.__version__}\n"
        "xffl:   cell 1      2.11.0\n",
        "",
        "",
    ]
    check_alike([told for _, told in found])
    assert {told.cells[ROUNDS] for _, told in found} == {(0, 1, 2)}


def test_cells_that_have_finished_leave(lighthouse: str) -> None:
    told = run(lighthouse, (1, 1, 1), steps={0: 4, 1: 8, 2: 12})
    check_alike(told)
    last = {one.cell: max(one.digests) for one in told}
    assert last[0] < last[1] < last[2]
    assert told[2].cells[last[2]] == (2,)
    for one in told:
        assert sum(weights[one.cell] for weights in one.weights.values()) == one.steps


@pytest.mark.parametrize("codec", some_of(("int8", "topk:0.1"), "topk:0.1"))
def test_a_codec_begins_anew_where_cells_have_changed(lighthouse: str, codec: str) -> None:
    keywords = {"every": {"name": "per_cell", "counts": [2, 3, 2]}}
    told = run(
        lighthouse,
        (2, 1, 1),
        mortal=(3,),
        fault="2:0:exchange:4",
        options={"codec": codec},
        rounds=8,
        keywords=keywords,
    )
    check_alike(told)
    assert told[0].weights[2] == (4.0, 3.0, 2.0)
    assert {one.cell for one in told} == {0, 1}
    assert told[0].cells[8] == (0, 1)


def test_corrections_of_cells_add_up_to_zero_also_where_a_round_was_in_doubt(lighthouse: str) -> None:
    keywords = {"client": "scaffold", "weight": None}
    told = run(lighthouse, mortal=(2, 3), fault="1:0:agreed:3", keywords=keywords)
    check_alike(told)
    by_cell = {one.cell: one for one in told}
    assert sorted(by_cell) == [0, 2]
    # In the round behind that in doubt a cell that was in doubt has made no step.
    later = [number for number, weights in by_cell[0].weights.items() if weights == (1.0, 0.0, 1.0)]
    assert {5, 6} <= {*later} <= {4, 5, 6, 7}
    for number in later:
        both = [by_cell[cell].corrections[number] for cell in (0, 2)]
        assert float(both[0].abs().max()) > 1e-3
        torch.testing.assert_close(both[0], -both[1])
    # In the round of which cell 2 has heard late all three have counted.
    assert by_cell[0].weights[3] == (1.0, 1.0, 1.0)
    assert not torch.allclose(by_cell[0].corrections[3], -by_cell[2].corrections[3])


@pytest.mark.parametrize("phase", some_of(("exchange", "half", "told"), "exchange", "half"))
def test_no_part_of_the_server_is_lost_with_a_cell(lighthouse: str, phase: str) -> None:
    told = run(lighthouse, mortal=(2, 3), fault=f"1:0:{phase}:3", options=OPTIONS["fedadam"])
    survivors = [one for one in told if one.cell != 1]
    assert len(survivors) == 3
    check_alike(told)
    for one in survivors:
        assert one.cells[ROUNDS] == (0, 2)
        assert sum(weights[one.cell] for weights in one.weights.values()) == one.steps * SIZES[one.cell]
        assert len(set(one.agreed.values())) == len(one.agreed)


def test_replicas_do_not_wait_for_a_cell_that_was_lost(lighthouse: str) -> None:
    """It is lost behind the first vote, of which not all ranks of the other cell have heard when it is."""
    told = run(lighthouse, (3, 3), mortal=(0, 1, 2), fault="0:1:opened:3", options=OPTIONS["fedadam"], hsdp=1)
    assert [one.cell for one in told] == [1, 1, 1]
    check_alike(told)
    for one in told:
        assert one.cells[ROUNDS] == (1,)


@pytest.mark.parametrize("phase", some_of(("exchange", "half", "told"), "half", "told"))
def test_a_delayed_round_that_breaks_is_put_back(lighthouse: str, phase: str) -> None:
    keywords = {"delay": 1, "every": 2}
    fault = f"1:0:{phase}:4"
    told = run(lighthouse, mortal=(2, 3), fault=fault, rounds=8, keywords=keywords, options={"norms": True})
    check_alike(told, is_whole=False)
    assert {one.cell for one in told} == {0, 2}
    for one in told:
        assert one.cells[8] == (0, 2)
        assert sum(weights[one.cell] for weights in one.weights.values()) == one.steps * SIZES[one.cell]


def test_fragments_in_turn_behind_local_steps_outlive_a_cell(lighthouse: str) -> None:
    """Streaming DiLoCo: each step counts once for each part of the model."""
    options = {"fragments": 2, "server": SERVERS["momentum"]}
    keywords = {"delay": 1, "every": 2, "alpha": 0.5}
    told = run(lighthouse, mortal=(2, 3), fault="1:1:exchange:5", rounds=10, keywords=keywords, options=options)
    check_alike(told, is_whole=False)
    assert {one.cell for one in told} == {0, 2}
    for one in told:
        assert one.cells[10] == (0, 2)
        assert sum(weights[one.cell] for weights in one.weights.values()) == 2 * one.steps * SIZES[one.cell]


def test_a_late_cell_counts_what_privacy_has_cost_before_it_came(lighthouse: str) -> None:
    privacy = {"name": "dp_fedavg", "clip": 1.0, "noise": 0.1}
    told = run(
        lighthouse,
        (1, 1, 2),
        late=(2,),
        rounds=60,
        step_s=0.02,
        options={"privacy": privacy},
        keywords={"weight": None},
        is_bare=True,
    )
    check_alike(told)
    first = min(told[2].digests)
    before = {tuple(one[:2]): one[3] for one in told[0].spent["spent"] if one[2] == 2}
    assert list(before.values()) == [first - 2]  # the first round of all is no exchange
    # What it makes as a fresh cell counts for the cell, whose life before may have cost as much.
    assert told[2].spent == told[0].spent


def test_a_round_by_divergence_is_skipped_by_all(lighthouse: str) -> None:
    keywords = {"every": {"name": "divergence", "every": 2, "threshold": 1e9}}
    told = run(lighthouse, (1, 1, 1), steps={0: 6, 1: 6, 2: 6}, keywords=keywords)
    check_alike(told)
    for one in told:
        assert one.skipped == 3
        assert sum(weights[one.cell] for weights in one.weights.values()) == one.steps


SCRIPT = """
import hashlib, json, os, time, torch, xffl
from tests.processes import await_cells

with xffl.session() as state:
    await_cells(2)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lost, back = int(os.environ["XFFL_RESTARTS"]), 0

    def on_round(report):
        global lost, back
        lost += report.weights[1] == 0.0
        back += bool(lost and report.weights[1])
        bits = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
        told = [report.round, hashlib.sha256(bits).hexdigest()[:12], report.weights, time.time()]
        print("told", json.dumps(told), flush=True)

    with xffl.FederatedScaling(model, optimizer, state, every=4, on_round=on_round):
        while back < 3:
            model(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.02)
"""


def test_a_cell_that_is_killed_comes_back(journal: None, tmp_path: Path) -> None:
    """As a user sees it: one command, a script that knows of nothing, a process that is killed on its way."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "xffl", "exec", "--elastic", "--federated", "1,1", str(script)]
    environ = os.environ | {"XFFL_FAULT": "1:0:exchange:4", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "cell 1 ended with exit code 137; it is started again (restart 1 of 3)" in done.stderr
    rounds: dict[int, list[Any]] = {}
    for line in done.stdout.splitlines():
        number, *told = json.loads(line.removeprefix("told "))
        rounds.setdefault(number, []).append(told)
    both = [number for number, told in rounds.items() if len(told) == 2]
    alone = [number for number, told in rounds.items() if told[0][1][1] == 0.0]
    for number in both:
        (bits, weights, _), (other_bits, other_weights, _) = rounds[number]
        assert (bits, weights) == (other_bits, other_weights)
    assert min(both) < min(alone) < max(both)
    # The survivor's next round, after heartbeats have ended and the cell was looked for again.
    lost = max(number for number in both if number < min(alone))
    assert rounds[min(alone)][0][2] - rounds[lost][0][2] < 30.0


def test_a_cell_that_comes_back_after_the_end_does_not_wait_for_it(journal: None, tmp_path: Path) -> None:
    """The launcher has seen the other one finish; who was killed holds nothing, and nobody gives it a model."""
    script = tmp_path / "train.py"
    late = "    while lost and not os.path.exists('finished'):\n        time.sleep(0.05)\n"
    text = SCRIPT.replace("while back < 3", "for _ in range(40)")
    text = text.replace("    with xffl.FederatedScaling", f"{late}    with xffl.FederatedScaling")
    impatience = "from xffl.elastic import federation\nfederation.CELL_JOIN_TIMEOUT_S = 2.0\n"
    script.write_text(f"{impatience}{text}open('finished', 'w').close()\n")
    command = [sys.executable, "-m", "xffl", "exec", "--elastic", "--federated", "1,1", str(script)]
    environ = os.environ | {"XFFL_FAULT": "1:0:exchange:4", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2, done.stderr
    assert "cell 0 has finished the run, and no cell that is left holds its model" in done.stderr
    assert "cell 1 ended with exit code 2 and is not started again" in done.stderr


def enter_with_a_dead_cell(rank: int, world: int, plan: Plan) -> float:
    be_launched(0, 1, plan.ports[0])
    connects = mock.patch("xffl.elastic.federation.CONNECT_S", 60.0)
    with connects, xffl.session(cell=0, cells=2, elastic=plan.url) as state:
        federation = ElasticFederation(state)
        epoch = federation.meet()
        [own] = epoch.members
        dead = replace(own, cell=1, life="1.0", address=f"127.0.0.1:{free_port()}")
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="cell 1 was lost after it had met"):
            federation.enter(replace(epoch, members=(own, dead)))
        seconds = time.monotonic() - start
        federation.leave()
    return seconds


def test_a_cell_that_is_lost_while_it_waits_for_the_others_is_not_waited_for(lighthouse: str) -> None:
    """Its heartbeat is still fresh when the meeting ends; to connect to it would take a minute here."""
    [seconds] = run_world(1, enter_with_a_dead_cell, Plan(lighthouse, (1,), (free_port(),)), init=False)
    assert seconds < 30.0


def test_a_lighthouse_that_is_started_again_divides_nobody(journal: None, tmp_path: Path) -> None:
    """It knows nobody then, and says so to whoever asks first: cells look again for those that they miss."""
    port = free_port()
    servers = [start_lighthouse(port)]

    def start_again() -> None:
        deadline = time.monotonic() + 90
        while not (tmp_path / "0.pt").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        servers.pop().shutdown()
        time.sleep(2.0)
        servers.append(start_lighthouse(port))

    thread = threading.Thread(target=start_again)
    thread.start()
    try:
        told = run(
            f"http://127.0.0.1:{port}", (1, 1, 1), rounds=30, step_s=0.1, saves={0: 5}, checkpoints=str(tmp_path)
        )
    finally:
        thread.join()
        servers.pop().shutdown()
    check_alike(told)
    for one in told:
        assert sorted(one.digests) == list(range(min(one.digests), 31))
        assert one.cells[30] == (0, 1, 2)
        assert set(one.tries.values()) == {1}
        assert max(one.seconds.values()) > 1.0, "the lighthouse was never missed"


def name_lighthouse(file: Path, server: Any) -> None:
    hidden = file.with_suffix(".new")
    hidden.write_text(f"http://127.0.0.1:{server.address().rpartition(':')[2]}\n")
    hidden.replace(file)


def test_a_lighthouse_that_a_file_names_may_be_another_one_at_any_time(tmp_path: Path) -> None:
    file = tmp_path / "lighthouse"
    servers = [start_lighthouse(0)]
    first, second = (Lighthouse(f"file:{file}", f"{cell}.0", b"") for cell in range(2))

    def ask(line: Lighthouse, seconds: float, **more: Any) -> list[tuple[int, bool]] | None:
        cell = 0 if line is first else 1
        meeting = line.meet(CellRecord(cell, 2, f"{cell}.0", **more), seconds)
        return None if meeting is None else [record.cell for record in meeting.records]

    begun = time.monotonic()
    with pytest.raises(
        xffl.LaunchError, match=r"the lighthouse file:.* does not answer \(.* a file that cannot be read"
    ):
        ask(first, 0.3)
    assert time.monotonic() - begun < 3, "errors that come at once were asked for again, whatever the time"
    name_lighthouse(file, servers[0])
    assert ask(first, 20) == [0]
    assert ask(second, 1) is None  # the first lives, and is waited for
    # Both lighthouses are there. The first cell trains, and its heartbeats go to the other one; the second waits there.
    servers.append(start_lighthouse(0))
    name_lighthouse(file, servers[1])
    url, deadline = file.read_text().strip(), time.monotonic() + 60
    while not any(one.cell == 0 for one in read_lighthouse(url).cells):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert ask(second, 3) is None
    assert ask(first, 20, round=1) == [0, 1]
    assert ask(second, 20) == [0, 1]
    for one in (first, second):
        one.leave()
    for server in servers:
        server.shutdown()


def test_a_lighthouse_that_moves_divides_nobody(journal: None, tmp_path: Path) -> None:
    file, saves = tmp_path / "lighthouse", tmp_path / "saves"
    saves.mkdir()
    servers: list[Any] = []

    def move() -> None:
        deadline = time.monotonic() + 90
        for has_begun in (lambda: time.monotonic() > deadline - 88, (saves / "0.pt").exists):
            while not has_begun() and time.monotonic() < deadline:
                time.sleep(0.01)
            servers.append(start_lighthouse(0))
            name_lighthouse(file, servers[-1])
        time.sleep(1.5)
        servers.pop(0).shutdown()

    thread = threading.Thread(target=move)
    thread.start()
    try:
        told = run(f"file:{file}", (2, 1, 1), rounds=40, step_s=0.1, saves={0: 5}, checkpoints=str(saves))
    finally:
        thread.join()
        servers.pop().shutdown()
    check_alike(told)
    for one in told:
        assert sorted(one.digests) == list(range(min(one.digests), 41))
        assert one.cells[40] == (0, 1, 2) and all(len(cells) == 3 for cells in one.cells.values())


def test_after_an_outage_of_all_cells_the_newest_checkpoint_counts(lighthouse: str, tmp_path: Path) -> None:
    options = {"server": SERVERS["fedadam"]}
    saved = run(lighthouse, (1, 1), saves={0: 4, 1: 6}, checkpoints=str(tmp_path), options=options)
    told = run(lighthouse, (1, 1), checkpoints=str(tmp_path), rounds=10, options=options)
    check_alike(told)
    for one in told:
        assert min(one.digests) == 8  # that of cell 1 was taken over in the seventh
        assert one.weights[8] == (2.0, 2.0)
    assert saved[1].digests[6] not in (told[0].digests[8], saved[1].digests[4])


HANDED_OVER: dict[str, dict[str, Any]] = {
    "plain": {},
    "finished": {},  # all leave in the round
    "nothing trained": {"norms": True},  # nor in the first round of all, which is none of agreed models
    "momentum": {"server": SERVERS["momentum"], "overlap": True},  # as behind local steps
    "fragments": OPTIONS["fragments"],
    "server": {"server": SERVERS["fedadam"]},
    "codec": {"codec": "int8", "form": "two_hop"},
    "privacy": {"privacy": {"name": "dp_fedavg", "clip": 0.1, "noise": 0.5}},
}


@dataclass
class Life:
    """What a rank has seen in one life of its cell: models by round, and what goes with them."""

    started: str  # with this model
    digests: dict[int, str] = field(default_factory=dict)
    agreed: dict[int, str] = field(default_factory=dict)
    spent: dict[int, Any] = field(default_factory=dict)  # what privacy has cost
    weights: list[tuple[float, ...]] = field(default_factory=list)
    total_weight: float = 0.0


def live(name: str, cell: int, state: Any, saved: dict[int, Any]) -> Life:
    """Be a cell that trains to the third round and saves each; after an outage, to the fifth one."""
    is_back = bool(saved)
    torch.manual_seed(10 * is_back + cell)
    norm = [] if name == "privacy" else [nn.BatchNorm1d(7)]
    model = xffl.shard(nn.Sequential(nn.Linear(5, 7), *norm, nn.Linear(7, 3)), state)
    rounds, life = ElasticAggregator(model, state, **HANDED_OVER[name]), Life(digest(model))
    if is_back and cell:
        weights, before = saved[4 - cell]
        model.load_state_dict(weights)
        rounds.load_state_dict(before)

    def note(report: Any = None) -> None:
        kept = rounds.state_dict()
        life.digests[rounds.rounds], life.agreed[rounds.rounds] = digest(model), digest_of_agreed(kept)
        life.spent[rounds.rounds], life.total_weight = kept.get("privacy"), rounds.total_weight
        life.weights += [] if report is None else [report.weights]
        saved[rounds.rounds] = {key: one.clone() for key, one in model.state_dict().items()}, kept

    if name == ("finished" if is_back else "nothing trained"):
        rounds.open(is_finished=is_back)
        note(rounds.participate(RoundInput(is_absent=True)))
    else:
        rounds.join()
        note()
    while rounds.rounds < (3 if not is_back else 4 if name == "finished" else 5):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9).add_(0.1 * (1 + cell) + 0.01 * rounds.rounds)
        rounds.open()
        note(rounds.participate(RoundInput()))
    rounds.close()
    return life


def come_back(rank: int, world: int, plan: Plan, names: list[str]) -> dict[str, list[Life]]:
    """Be a cell that ends with all others, and comes back without a checkpoint, with an old one, or with the newest."""
    cell = next(cell for cell, _ in enumerate(plan.sizes) if rank < sum(plan.sizes[: cell + 1]))
    be_launched(rank - sum(plan.sizes[:cell]), plan.sizes[cell], plan.ports[cell])
    os.environ["XFFL_TOKEN"] = "the run's own token"
    told: dict[str, list[Life]] = {}
    with xffl.session(
        cell=cell, cells=len(plan.sizes), hsdp=plan.hsdp, elastic=of_all(plan.url, len(plan.sizes)), timeout_s=60
    ) as state:
        for name in names:
            saved: dict[int, Any] = {}
            told[name] = [live(name, cell, state, saved) for _ in range(2)]
    return told


@pytest.mark.parametrize(
    ("sizes", "hsdp", "names"),
    [
        ((1, 1), None, ["plain", "nothing trained"]),
        ((2, 2, 2), 1, ["server", "momentum"]),
        ((2, 2, 1), None, ["fragments", "codec"]),
        ((2, 2, 1), None, ["finished", "privacy"]),
    ],
)
def test_where_no_cell_has_anything_to_give_those_behind_take_the_model_over(
    lighthouse: str, sizes: tuple[int, ...], hsdp: int | None, names: list[str]
) -> None:
    """After an outage of all cells: the lowest has no checkpoint, another one an older one."""
    plan = Plan(lighthouse, sizes, tuple(free_port() for _ in sizes), hsdp=hsdp)
    told = run_world(sum(sizes), come_back, plan, names, init=False, timeout_s=100)
    for name in names:
        first, second = ([one[name][number] for one in told] for number in range(2))
        kinds = ("agreed",) if name == "fragments" else ("agreed", "digests")  # of parts in turn only one is alike
        trained, last = first[0].digests[3], max(second[0].digests)
        assert trained not in (first[0].digests[2], second[0].started)
        for kind, number in ((kind, number) for kind in kinds for number in (1, 2, 3)):
            assert len({getattr(one, kind)[number] for one in first}) == 1, (name, kind, number)
        for kind in kinds:
            # The server has made no step.
            assert {getattr(one, kind)[4] for one in second} == {getattr(first[0], kind)[3]}, (name, kind)
            assert len({getattr(one, kind)[last] for one in second}) == 1, (name, kind)
        new = len(sizes) * (last - 4) / (3 if name == "fragments" else 1)
        for one in second:
            assert one.spent[4] == first[0].spent[3]
            assert one.total_weight == first[0].total_weight + new
        if name == "nothing trained":
            assert {one.digests[1] for one in first} == {first[0].started}
        if name in ("finished", "nothing trained"):
            assert {one.weights[0] for one in (second if name == "finished" else first)} == {(0.0,) * len(sizes)}


def lose_a_voter(rank: int, world: int, plan: Plan) -> Told:
    """Be one of three cells; cell 1 is killed behind the second vote of cell 2's first round."""
    enter = ElasticFederation.enter

    def entering(self: ElasticFederation, epoch: Epoch) -> Any:
        if rank == 1 and 2 in epoch.cells and epoch.base is not None:
            faults._fault = Fault("agreed", 1, signal.SIGKILL, now=99)
        return enter(self, epoch)

    with mock.patch.object(ElasticFederation, "enter", entering):
        return member(rank, world, plan)


def test_a_cell_that_comes_in_a_round_in_doubt_takes_part_in_the_next_one(lighthouse: str) -> None:
    """The others have met it for that, and would wait for it."""
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(lighthouse, (1, 1, 1), tuple(free_port() for _ in range(3)), folder, late=(2,), rounds=60)
        plan.step_s = 0.02
        told = run_world(3, lose_a_voter, plan, init=False, timeout_s=100, mortal=(1,))
    survivors = [one for one in told if isinstance(one, Told)]
    assert [one.cell for one in survivors] == [0, 2]
    check_alike(survivors)
    for one in survivors:
        assert one.cells[60] == (0, 2)
        assert max(one.seconds.values()) < 8.0  # to connect to a cell that is not there takes ten
    assert max(survivors[0].tries.values()) <= 2
    assert survivors[0].cells[min(survivors[1].cells) - 2] == (0, 1, 2)  # that was in doubt


def lose_the_journal(rank: int, world: int, plan: Plan, method: str, loser: int) -> Told:
    """Be one of two cells, of which one cannot use the journal from its third round to the fourth of the others."""
    enter = ElasticFederation.enter
    used = getattr(JournalFolder, method)
    is_lost = False

    def entering(self: ElasticFederation, epoch: Epoch) -> Any:
        nonlocal is_lost
        is_lost = is_lost or (rank == loser and epoch.base_round == 2)
        return enter(self, epoch)

    def using(self: JournalFolder, *given: Any) -> Any:
        if is_lost and not (Path(plan.folder) / "late").exists():
            raise JournalUnreachable("no space left, or no network")
        return used(self, *given)

    with (
        mock.patch.object(ElasticFederation, "enter", entering),
        mock.patch.object(JournalFolder, method, using),
        mock.patch.object(federation, "CONNECT_S", 1.0),
        mock.patch.object(federation, "CELL_JOIN_TIMEOUT_S", 1.0),
        mock.patch.object(federation, "MOST_TRIES", 3),
    ):
        return member(rank, world, plan)


@pytest.mark.parametrize(("method", "loser"), [("read_from", 1), ("put", 0)], ids=["read", "write"])
def test_a_cell_that_cannot_use_the_journal_is_left_out_until_it_can(journal: None, method: str, loser: int) -> None:
    port = free_port()
    server = start_lighthouse(port, join_s=1.0)
    try:
        with tempfile.TemporaryDirectory() as folder:
            plan = Plan(f"http://127.0.0.1:{port}", (1, 1), (free_port(), free_port()), folder, rounds=60)
            plan.step_s = 0.05
            told = run_world(2, lose_the_journal, plan, method, loser, init=False, timeout_s=70)
    finally:
        server.shutdown()
    check_alike(told)
    by_cell = {one.cell: one for one in told}
    assert by_cell[1 - loser].cells[4] == (1 - loser,)
    assert by_cell[loser].cells[60] == (0, 1)


def meet_a_damaged_journal(rank: int, world: int, plan: Plan) -> str:
    be_launched(rank, world, plan.ports[0])
    with xffl.session(cell=0, cells=2, elastic=plan.url, timeout_s=60) as state:
        joined = ElasticFederation(state)
        name = make_id()
        joined.holding.say_yes(
            attempt_of(
                run=name,
                number=0,
                name=name,
                base=None,
                members=[Member(0, make_id(), -1)],
                weights={0: 1.0},
                federation=2,
            )
        )
        (Path(os.environ["XFFL_JOURNAL"]) / "000000000.json").write_text("no record")
        with pytest.raises(xffl.CheckpointError) as refused:
            joined.end_doubt()
        joined.leave()
    return str(refused.value)


def test_all_ranks_of_a_cell_in_doubt_hear_that_the_journal_is_damaged(lighthouse: str) -> None:
    told = run_world(2, meet_a_damaged_journal, Plan(lighthouse, (2,), (free_port(),)), init=False, timeout_s=60)
    assert all("000000000.json" in text for text in told)


def come_seconds_later(rank: int, world: int, plan: Plan) -> Told:
    """Be one of two cells, of which the second one asks for others seconds after the first."""
    meet = Lighthouse.meet
    is_late = rank == 1

    def meeting(self: Lighthouse, *given: Any) -> Any:
        nonlocal is_late
        if is_late:
            time.sleep(6.0)
            is_late = False
        return meet(self, *given)

    with mock.patch.object(Lighthouse, "meet", meeting):
        return member(rank, world, plan)


def test_cells_that_start_again_wait_for_each_other(lighthouse: str, tmp_path: Path) -> None:
    run(lighthouse, (1, 1), saves={0: 4, 1: 4}, checkpoints=str(tmp_path), rounds=4)
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(lighthouse, (1, 1), (free_port(), free_port()), folder, rounds=8, checkpoints=str(tmp_path))
        told = run_world(2, come_seconds_later, plan, init=False, timeout_s=100)
    check_alike(told)
    assert all(set(one.cells.values()) == {(0, 1)} for one in told)


class StepCount:
    """Local steps since the last round, as a script counts them for its weights."""

    def __init__(self) -> None:
        self.steps = 0

    def take(self) -> float:
        """Return their number, and count anew."""
        taken = self.steps
        self.steps = 0
        return float(taken)


def come_back_late(
    rank: int, world: int, url: str, ports: tuple[int, ...], options: dict[str, Any], is_weighed: bool
) -> dict[int, tuple[int, tuple[float, ...], tuple[float, ...], float]]:
    """Be a cell whose parameters count the local steps in them; the second one starts from what it saved after a round.

    Return by round the fragment that has moved, the weights, the steps, and what the fragment's parameter has counted.
    """
    be_launched(0, 1, ports[rank])
    os.environ["XFFL_TOKEN"] = "the run's own token"
    told = {}
    count = StepCount()

    def on_round(report: Any) -> None:
        told[report.round] = report.fragment, report.weights, report.steps, parameters[report.fragment].item()

    with xffl.session(cell=rank, cells=world, elastic=of_all(url, world), timeout_s=60) as state:
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        parameters = list(model.parameters())
        for parameter in parameters:
            nn.init.zeros_(parameter)
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        with xffl.FederatedScaling(
            model,
            optimizer,
            state,
            every=10,
            weight=count.take if is_weighed else None,
            on_round=on_round,
            aggregator=options,
        ) as scaling:
            is_back = False
            while scaling.aggregator.rounds < 7:
                model(torch.zeros(1, 1))
                for parameter in parameters:
                    parameter.grad = torch.full_like(parameter, -1.0)
                count.steps += 1
                optimizer.step()
                if rank == 1 and scaling.aggregator.rounds == 3 and scaling.steps_left == 3 and not is_back:
                    is_back = True
                    scaling.load_state_dict(scaling.state_dict())
                    assert not scaling.join()
    return told


@pytest.mark.parametrize(
    ("options", "is_weighed"),
    [({}, False), ({}, True), ({"fragments": 2}, True)],
    ids=["plain", "weighed", "fragments"],
)
def test_steps_that_wait_in_a_checkpoint_of_the_newest_round_count_when_its_cell_joins(
    lighthouse: str, options: dict[str, Any], is_weighed: bool
) -> None:
    ports = (free_port(), free_port())
    told = run_world(2, come_back_late, lighthouse, ports, options, is_weighed, init=False, timeout_s=60)
    counted = [0.0, 0.0]
    for number, (fragment, weights, steps, value) in told[0].items():
        counted[fragment] += sum(map(math.prod, zip(weights, steps, strict=True))) / sum(weights)
        assert value == pytest.approx(counted[fragment]), number
        assert weights == (steps if is_weighed else (1.0, 1.0))
    assert told[0] == told[1]
    assert told[1][4][2] == ((20.0, 17.0) if options else (10.0, 7.0))
    assert told[1][5][2] == ((20.0, 17.0) if options else (10.0, 10.0))
    assert told[1][6][2] == ((20.0, 20.0) if options else (10.0, 10.0))


def come_back_behind(rank: int, world: int, url: str, ports: tuple[int, ...]) -> dict[int, tuple[Any, ...]]:
    """Be a cell whose parameter counts the local steps in it; both start again, the second one from an older round.

    Return by round the weights, what the cell was told of all weights, and what the parameter has counted.
    """
    be_launched(0, 1, ports[rank])
    os.environ["XFFL_TOKEN"] = "the run's own token"
    told = {}
    count = StepCount()
    older: dict[str, Any] = {}

    def on_round(report: Any) -> None:
        told[report.round] = report.weights, scaling.total_weight, model.weight.item()

    with xffl.session(cell=rank, cells=world, elastic=of_all(url, world), timeout_s=60) as state:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with xffl.FederatedScaling(model, optimizer, state, every=10, weight=count.take, on_round=on_round) as scaling:
            has_come_back = False
            while scaling.aggregator.rounds < 5:
                model(torch.zeros(1, 1))
                model.weight.grad = torch.full_like(model.weight, -1.0)
                count.steps += 1
                optimizer.step()
                if scaling.aggregator.rounds == 2 and not older:
                    older = copy.deepcopy({"model": model.state_dict(), "scaling": scaling.state_dict()})
                if scaling.aggregator.rounds == 3 and scaling.steps_left == 7 and not has_come_back:
                    has_come_back = True
                    if rank == 1:
                        model.load_state_dict(older["model"])
                        count.steps = 0
                    scaling.load_state_dict(older["scaling"] if rank == 1 else scaling.state_dict())
                    scaling.join()
    return told


def test_steps_in_a_model_that_others_take_over_count_at_once(lighthouse: str) -> None:
    """Both start again, and one takes over what the other one holds: a round to which only that one gives something."""
    ports = (free_port(), free_port())
    told = run_world(2, come_back_behind, lighthouse, ports, init=False, timeout_s=60)
    assert told[0].pop(4) == ((3.0, 0.0), 43.0, 23.0)
    assert told[0] == told[1]
    assert told[0] == {
        2: ((10.0, 10.0), 20.0, 10.0),
        3: ((10.0, 10.0), 40.0, 20.0),
        5: ((10.0, 10.0), 63.0, 33.0),
    }


def resume_before_a_delayed_round(rank: int, world: int, url: str, ports: tuple[int, ...]) -> list[tuple[int, bool]]:
    """Be a cell that goes on from a state saved just before a delayed round was to start.

    Return the steps that are left after joining and after one more step, and whether a round is under way.
    """
    be_launched(0, 1, ports[rank])
    os.environ["XFFL_TOKEN"] = "the run's own token"
    told = []
    with xffl.session(cell=rank, cells=world, elastic=of_all(url, world), timeout_s=60) as state:
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        options = {"overlap": True}
        with xffl.FederatedScaling(model, optimizer, state, every=4, delay=2, aggregator=options) as scaling:
            scaling.join()
            scaling.load_state_dict({**scaling.state_dict(), "since": 4, "target": 4})
            scaling.join()
            told.append((scaling.steps_left, scaling.is_under_way))
            model(torch.zeros(1, 1)).sum().backward()
            optimizer.step()
            told.append((scaling.steps_left, scaling.is_under_way))
    return told


def test_a_cell_that_joins_makes_its_steps_before_its_next_delayed_round(lighthouse: str) -> None:
    told = run_world(2, resume_before_a_delayed_round, lighthouse, (free_port(), free_port()), init=False, timeout_s=60)
    assert told == [[(4, False), (3, False)]] * 2


def wait_for_a_lighthouse(rank: int, world: int, plan: Plan) -> str:
    be_launched(0, 1, plan.ports[0])
    with xffl.session(cell=0, cells=3, elastic=ElasticParameters(lighthouse=plan.url, **plan.parameters)) as state:
        model = xffl.shard(nn.Linear(2, 2), state)
        with pytest.raises(xffl.RoundError) as refused, xffl.FederatedScaling(model, None, state, every=1):
            model(torch.zeros(1, 2))
    return str(refused.value)


def test_a_cell_that_finds_no_others_says_what_it_waits_for(lighthouse: str) -> None:
    [text] = run_world(
        1,
        wait_for_a_lighthouse,
        Plan(lighthouse, (1,), (free_port(),), parameters={"meeting_timeout_s": 2.0}),
        init=False,
    )
    assert text == "cell 0 found no cells for a round within 2 s: a round needs 2 of 3 cells, but only cell 0 came"
    gone = f"http://127.0.0.1:{free_port()}"
    [text] = run_world(
        1, wait_for_a_lighthouse, Plan(gone, (1,), (free_port(),), parameters={"meeting_timeout_s": 8.0}), init=False
    )
    assert text.startswith(f"cell 0 found no cells for a round within 8 s: the lighthouse {gone} does not answer")


def ends(rank: int, ranks: int, url: str, case: str) -> str:
    """Be the only cell that is left, and leave: without others for a round, or with a model that none takes."""
    be_launched(rank, ranks, free_port())
    os.environ["XFFL_TOKEN"] = "the run's own token"
    elastic = ElasticParameters(lighthouse=url, meeting_timeout_s=1.0 if case == "alone" else 8.0)
    with xffl.session(cell=0, cells=3 if case == "alone" else 2, elastic=elastic) as state:
        model = xffl.shard(nn.Linear(2, 2), state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaling = xffl.FederatedScaling(model, optimizer, state, every=100)
        try:
            with scaling:
                if case == "not finite":
                    model(torch.zeros(1, 2)).sum().backward()
                    optimizer.step()
                    with torch.no_grad():
                        model.weight.fill_(float("nan"))
        except xffl.RoundError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("alone", "cell 0 found no cells for a round within 1 s: a round needs 2 of 3 cells"),
        ("not finite", "not finite in"),
    ],
)
def test_a_cell_whose_last_round_cannot_be_made_ends(lighthouse: str, case: str, told: str) -> None:
    [text] = run_world(1, ends, lighthouse, case, init=False, timeout_s=30)
    assert told in text


def test_of_three_cells_of_which_two_die_one_after_the_other_the_last_one_goes_on(lighthouse: str) -> None:
    told = run(lighthouse, (1, 1, 1), mortal=(0, 1), fault="0:0:exchange:3", second="1:0:exchange:5", rounds=8)
    [one] = told
    assert one.cell == 2
    assert one.cells[4] == (1, 2)
    assert one.cells[8] == (2,)
    assert sum(weights[2] for weights in one.weights.values()) == one.steps


def test_a_lost_cell_is_not_waited_for_again_where_the_next_try_loses_another_one(lighthouse: str) -> None:
    """Cell 0 is lost in a round, and cell 1 when it is tried again; cell 2 goes on at once, as both are known to be."""
    faults_of_one_round = {"fault": "0:0:exchange:3", "second": "1:0:enter:3"}
    [told] = run(lighthouse, (1, 1, 1), mortal=(0, 1), rounds=4, unknown_s=30.0, **faults_of_one_round)
    assert told.cells[3] == (2,)
    assert told.seconds[3] < 20.0


def test_a_cell_that_starts_again_knows_who_has_finished(lighthouse: str, tmp_path: Path) -> None:
    """Cell 1 has left; cell 0 goes on alone, saves, and starts again from that."""
    run(lighthouse, (1, 1), steps={1: 6}, rounds=8, saves={0: 8}, checkpoints=str(tmp_path))
    (tmp_path / "again").mkdir()
    waits = {"meeting_timeout_s": 5.0, "restarts": 1}
    plan = Plan(lighthouse, (1, 1), (free_port(),) * 2, str(tmp_path / "again"), 10, parameters=waits)
    [told] = run_world(1, member, replace(plan, checkpoints=str(tmp_path)), init=False, timeout_s=60)
    assert told.cells[10] == (0,) and told.weights[10] == (2.0, 0.0)


def test_what_a_fault_may_be() -> None:
    for text in ("1:0:exchange", "a:0:exchange:1", "1:0:exchange:x"):
        with pytest.raises(xffl.ConfigError, match="give CELL:RANK:PHASE:ROUND, such as 1:0:exchange:3"):
            Fault.from_text(text, 1, 0)
    with pytest.raises(xffl.ConfigError, match="phase in XFFL_FAULT"):
        Fault.from_text("1:0:never:1", 1, 0)
    assert Fault.from_text("1:0:close:3", 0, 0) is None  # another one's
    assert Fault.from_text("1:0:close:3:stop", 1, 0) == Fault("close", 3, signal.SIGSTOP)


def refuse(rank: int, world: int, plan: Plan) -> list[str]:
    be_launched(0, 1, plan.ports[0])
    texts = []
    with xffl.session(cell=0, cells=2, elastic=plan.url) as state:
        model = xffl.shard(nn.Linear(2, 2), state)
        wrong_options: tuple[dict[str, Any], ...] = (
            {"aggregator": {"secure": True}},
            {"aggregator": {"atomic": False}},
            {"aggregator": {"levels": []}},
        )
        for options in wrong_options:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with (
                pytest.raises(xffl.ConfigError) as wrong,
                xffl.FederatedScaling(
                    model,
                    optimizer,
                    state,
                    every=2,
                    **options,
                ),
            ):
                pass
            texts.append(str(wrong.value))
        assert dist.get_world_size() == 1
    with pytest.raises(xffl.ConfigError, match="not which cell this job is"), xffl.session(elastic=plan.url):
        pass
    return texts


def test_what_an_elastic_federation_cannot_do_is_refused_by_name(lighthouse: str) -> None:
    [texts] = run_world(1, refuse, Plan(lighthouse, (1,), (free_port(),)), init=False)
    names = ("secure=True", "atomic=True", "levels")
    for text, name in zip(texts, names, strict=True):
        assert name in text
