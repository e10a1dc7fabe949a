"""The rank arithmetic against oracles that know nothing of formulas."""

from __future__ import annotations

import itertools
import sys
import time
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xffl.errors import TopologyError, XfflError
from xffl.topology import Coordinates, RankGroup, Topology


@st.composite
def federations(draw: st.DrawFn) -> Topology:
    """Any federation of up to 8 cells, with or without replicas."""
    replica_size = draw(st.none() | st.integers(1, 5))
    replicas = draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    sizes = tuple(count * (replica_size or 1) for count in replicas)
    return Topology(sum(sizes), sizes, replica_size)


class Table:
    """Every rank of a federation, dealt out one by one."""

    def __init__(self, topology: Topology) -> None:
        self.rows: list[tuple[int, int, int, int]] = []  # cell, local rank, replica, shard
        for cell, size in enumerate(topology.sizes):
            per_replica = topology.replica_size or size
            for local, (replica, shard) in enumerate(itertools.product(range(size // per_replica), range(per_replica))):
                self.rows.append((cell, local, replica, shard))

    def ranks(self, wanted: Callable[[int, int, int, int], bool]) -> tuple[int, ...]:
        return tuple(rank for rank, row in enumerate(self.rows) if wanted(*row))

    def sender(self, cell: int, shard: int) -> int:
        holders = self.ranks(lambda c, _, __, s: (c, s) == (cell, shard))
        return holders[shard % len(holders)]


@settings(max_examples=200, deadline=None)
@given(federations())
def test_every_rank_of_random_federations(topology: Topology) -> None:
    table = Table(topology)
    assert len(table.rows) == topology.world_size
    for rank, (cell, local, replica, shard) in enumerate(table.rows):
        at = topology.coordinates(rank)
        sender = table.sender(cell, shard)
        assert at == (rank, cell, local, replica, shard, rank == sender, None if rank == sender else sender)
        assert topology.rank_of(cell, replica, shard) == rank
        groups = {group.kind: group for group in topology.groups_of(rank)}
        assert groups["federation"].ranks == table.ranks(lambda c, *_, cell=cell: c == cell)
        if topology.is_hsdp:
            assert groups["shard"].ranks == table.ranks(lambda c, _, k, __, w=(cell, replica): (c, k) == w)
            assert groups["replica"].ranks == table.ranks(lambda c, _, __, s, w=(cell, shard): (c, s) == w)
        else:
            assert set(groups) == {"federation", "federated"}
        if rank != sender:
            assert groups["federated"] == ("federated", (rank,), False)
        elif topology.is_hsdp or len(set(topology.sizes)) == 1:
            assert groups["federated"].ranks == tuple(table.sender(c, shard) for c in range(topology.cells))
        else:
            assert groups["federated"].ranks == tuple(range(topology.world_size))


@settings(max_examples=100, deadline=None)
@given(federations())
def test_groups_are_those_of_the_ranks_in_one_order(topology: Topology) -> None:
    groups = list(topology.groups())
    assert len(set(groups)) == len(groups)
    kinds = [kind for kind, _ in itertools.groupby(groups, key=lambda group: group.kind)]
    for rank in range(topology.world_size):
        own = topology.groups_of(rank)
        assert [group.kind for group in own] == kinds  # equally many on every rank, in the same order
        expected = {group for group in groups if rank in group.ranks}
        member = {group for group in own if group.member}
        # A receiver stands in the all-ranks group only where every rank sends.
        assert member == expected


@settings(max_examples=100, deadline=None)
@given(federations())
def test_one_sender_for_each_shard_and_cell(topology: Topology) -> None:
    for cell in range(topology.cells):
        senders = topology.senders(cell)
        assert len(set(senders)) == len(senders) == topology.shards(cell)
        assert [topology.coordinates(rank).shard for rank in senders] == list(range(topology.shards(cell)))
        replicas = [topology.coordinates(rank).replica for rank in senders]
        counts = [replicas.count(replica) for replica in range(topology.replicas(cell))]
        assert max(counts) - min(counts) <= 1  # spread evenly over replicas


def test_the_contract_s_example() -> None:
    topology = Topology(8, (4, 4), 2)
    assert topology.replica_counts == (2, 2)
    assert topology.senders(0) == (0, 3)
    assert topology.senders(1) == (4, 7)
    assert topology.federated_group(1) == (3, 7)
    assert topology.coordinates(6) == (6, 1, 2, 1, 0, False, 4)
    assert Topology(8, 4) == Topology(8, (4,)) == Topology(8, (4, 4))
    assert Topology(8).sizes == (8,)


def test_mesh_inside_the_cell() -> None:
    """``replica`` is the dp_replicate coordinate, ``shard`` the linear index of all others."""
    shape = {"pp": 2, "cp": 1, "dp_replicate": 3, "dp_shard": 2, "tp": 2}
    topology = Topology(48, (24, 24), cell_shape=shape)
    assert topology.replica_size == 8
    assert topology.replica_counts == (3, 3)
    coordinates = itertools.product(*(range(size) for size in shape.values()))
    for local, (pp, _, replica, dp_shard, tp) in enumerate(coordinates):
        for cell in (0, 1):
            at = topology.coordinates(24 * cell + local)
            assert (at.replica, at.shard) == (replica, (pp * 2 + dp_shard) * 2 + tp)
            assert topology.rank_of(cell, at.replica, at.shard) == at.rank
    derived = Topology(36, (24, 12), cell_shape={**shape, "dp_replicate": -1, "pp": 1})
    assert derived.replica_counts == (6, 3)


def test_plain_cell_shape_is_hsdp() -> None:
    plain = Topology(12, (8, 4), 2)
    shaped = Topology(12, (8, 4), cell_shape={"dp_replicate": -1, "dp_shard": 2})
    assert [plain.coordinates(r) for r in range(12)] == [shaped.coordinates(r) for r in range(12)]


@pytest.mark.parametrize(
    "sizes, replica_size",
    [
        ((10,), 2),
        (tuple([6, 14] * 5_000), 2),
        (tuple([1, 3] * 25_000), None),
        ((50_000, *[2] * 25_000), 2),
    ],
)
def test_a_large_world_costs_one_rank_little(sizes: tuple[int, ...], replica_size: int | None) -> None:
    """No Python code runs for each cell or each rank, and all ranks are written down once at most.

    Counted, not timed: that is the same on each machine. The time is there for what counts do not see, a loop in C for
    each cell over all cells, which takes minutes.
    """

    def of_one_rank() -> tuple[Topology, Coordinates, tuple[RankGroup, ...]]:
        topology = Topology(100_000, sizes, replica_size)
        return topology, topology.coordinates(77_777), topology.groups_of(77_777)

    start = time.process_time()
    topology, at, groups = of_one_rank()
    assert time.process_time() - start < 0.1
    assert topology.rank_of(at.cell, at.replica, at.shard) == 77_777
    assert all(77_777 in group.ranks for group in groups)
    steps = steps_of(of_one_rank)
    assert 50 < steps < 10_000, steps
    tracemalloc.start()
    try:
        of_one_rank()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 7_000_000, peak


def steps_of(call: Callable[[], object]) -> int:
    """Count the instructions that Python itself runs in a call."""
    steps = 0

    def count(frame: FrameType, event: str, _: object) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
    return steps


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: Topology(8, (4, 3)), r"\(4, 3\) sum to 7, but the world has 8 ranks; give sizes that sum to 8"),
    (lambda: Topology(8, (4, 4, 4)), "sum to 12"),
    (lambda: Topology(8, 3), "3 does not divide the world of 8"),
    (lambda: Topology(8, (3,)), "does not divide"),
    (lambda: Topology(8, 16), "does not divide"),
    (lambda: Topology(8, ()), "name no cell"),
    (lambda: Topology(8, (8, 0)), "federated size must be a positive integer, got 0"),
    (lambda: Topology(8, (9, -1)), "federated size must be a positive integer, got -1"),
    (lambda: Topology(8, 0), "federated size must be a positive integer, got 0"),
    (lambda: Topology(8, -4), "federated size must be a positive integer, got -4"),
    (lambda: Topology(8, (4.0, 4.0)), "must be a positive integer, got"),  # type: ignore[arg-type]
    (lambda: Topology(8, "4,4"), "must be a positive integer, got"),  # type: ignore[arg-type]
    (lambda: Topology(8, ("4", "4")), "must be a positive integer, got"),  # type: ignore[arg-type]
    (lambda: Topology(8, True), "must be a positive integer, got"),
    (lambda: Topology(8, np.array([4, 4])), "must be a positive integer, got"),  # type: ignore[arg-type]
    (lambda: Topology(2, (True, True)), "must be a positive integer, got"),
    (lambda: Topology(8, 2.5), "must be a positive integer, got"),  # type: ignore[arg-type]
    (lambda: Topology(8, (4, None)), "must be a positive integer, got"),  # type: ignore[arg-type]
    (lambda: Topology(0), "world size must be a positive integer, got 0"),
    (lambda: Topology(-1), "world size must be a positive integer, got -1"),
    (lambda: Topology(2.0), "world size must be a positive integer, got 2.0"),  # type: ignore[arg-type]
    (lambda: Topology("8"), "world size must be a positive integer, got '8'"),  # type: ignore[arg-type]
    (lambda: Topology(8, (4, 4), 3), "3 does not divide cell 0 of 4"),
    (lambda: Topology(10, (4, 6), 4), "4 does not divide cell 1 of 6"),
    (lambda: Topology(8, (4, 4), 8), "does not divide"),
    (lambda: Topology(8, (4, 4), 0), r"replica size \(hsdp\) must be a positive integer, got 0"),
    (lambda: Topology(8, (4, 4), -2), r"replica size \(hsdp\) must be a positive integer, got -2"),
    (lambda: Topology(8, (4, 4), True), r"replica size \(hsdp\) must be a positive integer, got True"),
    (lambda: Topology(8, (4, 4), 2.0), r"replica size \(hsdp\) must be a positive integer, got 2.0"),  # type: ignore[arg-type]
    (lambda: Topology(8, (4, 4), "2"), r"replica size \(hsdp\) must be a positive integer, got '2'"),  # type: ignore[arg-type]
    (lambda: Topology(8, 4, cell_shape={"tp": 2}), "dp_replicate"),
    (
        lambda: Topology(8, 4, cell_shape={"dp_replicate": 2, "tp": 0}),
        "cell shape's tp must be a positive integer, got 0",
    ),
    (lambda: Topology(8, 4, cell_shape={"dp_replicate": 4, "tp": 2}), "dp_replicate=4"),
    (lambda: Topology(8, 4, 4, cell_shape={"dp_replicate": 2, "tp": 2}), "leave one out"),
    (lambda: Topology(8, 4, cell_shape={"dp_replicate": -1, "tp": 3}), "does not divide"),
    (lambda: Topology(4).coordinates(4), "rank must be an integer from 0 to 3, got 4"),
    (lambda: Topology(4).coordinates(9), "got 9; count from 0"),
    (lambda: Topology(4).coordinates(-1), "rank must be .* got -1"),
    (lambda: Topology(4).coordinates(True), "rank must be an integer from 0 to 3, got True"),
    (lambda: Topology(4).coordinates(1.0), "rank must be an integer from 0 to 3, got 1.0"),  # type: ignore[arg-type]
    (lambda: Topology(4, 2).shards(2), "cell must be an integer from 0 to 1, got 2"),
    (lambda: Topology(4, 2).federation(-1), "cell must be .* got -1"),
    (lambda: Topology(4, 2).rank_of(0, 1, 0), "replica must be an integer from 0 to 0, got 1"),
    (lambda: Topology(4, 2, 1).rank_of(0, 0, 1), "shard must be an integer from 0 to 0, got 1"),
]


@pytest.mark.parametrize("wrong, message", WRONG)
def test_impossible_combinations_name_value_rule_and_knob(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(TopologyError, match=message) as caught:
        wrong()
    assert isinstance(caught.value, XfflError) and isinstance(caught.value, ValueError)
    assert ";" in str(caught.value) or "differs" in str(caught.value)  # what is wrong; how to mend it
