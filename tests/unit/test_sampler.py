"""Samplers give each cell its part and each rank its share, and resume between any two batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from xffl.errors import ConfigError, StateError, TopologyError
from xffl.topology import DataPlace, Topology
from xffl.training.data.partition import dirichlet, iid
from xffl.training.data.place import share_of
from xffl.training.data.position import EpochPosition
from xffl.training.data.sampler import CellBatchSampler, CellOrder, CellSampler

TOPOLOGIES = [
    Topology(1),
    Topology(4, (2, 2)),
    Topology(6, (4, 2)),
    Topology(6, (4, 2), 2),
    Topology(8, (4, 4), 2),
    Topology(6, (1, 2, 3)),
]
EPOCHS = 2


class Numbers(Dataset[int]):
    """A dataset whose samples are their indices."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


def show(topology: Topology) -> str:
    return f"{topology.sizes}-{topology.replica_size}"


def as_lists(batches: Any) -> list[list[int]]:
    return [list(map(int, batch)) for batch in batches]


def loader_of(sampler: CellBatchSampler | CellSampler, samples: int = 1000, workers: int = 0, **more: Any) -> Any:
    if isinstance(sampler, CellSampler):
        more = {"sampler": sampler, "batch_size": sampler.batch_size, **more}
    else:
        more = {"batch_sampler": sampler, **more}
    return DataLoader(Numbers(samples), num_workers=workers, **more)


# Who takes what -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=show)
@given(batch_size=st.integers(2, 9), extra=st.integers(0, 80), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_an_epoch_has_every_sample_once(topology: Topology, batch_size: int, extra: int, seed: int) -> None:
    samples = 6 * topology.world_size + extra
    parts = iid(samples, topology.cells, shares=topology.sizes, seed=seed, minimum=6)
    samplers = [
        CellBatchSampler(parts, DataPlace(topology, rank), batch_size=batch_size, seed=seed)
        for rank in range(topology.world_size)
    ]
    for epoch in range(EPOCHS):
        taken = []
        for sampler in samplers:
            sampler.set_epoch(epoch)
            taken.append(as_lists(sampler))
        for cell in range(topology.cells):
            mine = [taken[rank] for rank in topology.federation(cell)]
            first = samplers[topology.offsets[cell]]
            assert all(len(batches) == first.steps == len(first) for batches in mine)
            sizes = {len(batch) for batches in mine for batch in batches}
            assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1 and max(sizes) <= batch_size
            drawn = sorted(index for batches in mine for batch in batches for index in batch)
            assert drawn == parts.parts[cell].tolist()


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=show)
@pytest.mark.parametrize("tail", ["drop_last", "is_padded"])
@pytest.mark.parametrize("kind", [CellBatchSampler, CellSampler])
def test_full_batches_leave_out_or_repeat(topology: Topology, tail: str, kind: Any) -> None:
    parts = iid(241, topology.cells, shares=topology.sizes)
    for cell in range(topology.cells):
        drawn: list[int] = []
        for rank in topology.federation(cell):
            sampler = kind(parts, DataPlace(topology, rank), batch_size=4, **{tail: True})
            batches = as_lists(loader_of(sampler))
            assert {len(batch) for batch in batches} == {4} and len(batches) == sampler.steps
            drawn += [index for batch in batches for index in batch]
        have, step = len(parts.parts[cell]), 4 * topology.sizes[cell]
        if tail == "drop_last":
            assert len(set(drawn)) == len(drawn) == have // step * step
        else:
            assert set(drawn) == set(parts.parts[cell].tolist()) and len(drawn) == -(-have // step) * step
            assert max(drawn.count(index) for index in set(drawn)) <= 2


@given(ranks=st.integers(1, 5), batch_size=st.integers(1, 6), samples=st.integers(1, 120))
@settings(deadline=None)
def test_single_samples_make_the_loaders_batches(ranks: int, batch_size: int, samples: int) -> None:
    topology = Topology(ranks)
    try:
        samplers = [
            CellSampler(range(samples), DataPlace(topology, rank), batch_size=batch_size) for rank in range(ranks)
        ]
    except ConfigError:
        # Only where the last step has too few samples for all ranks.
        assert 0 < samples % (ranks * batch_size) < ranks
        return
    taken = [as_lists(loader_of(sampler)) for sampler in samplers]
    assert {len(batches) for batches in taken} == {samplers[0].steps}
    for sampler, batches in zip(samplers, taken, strict=True):
        assert len(sampler) == sum(map(len, batches))
        assert all(len(batch) == batch_size for batch in batches[:-1])
    assert sorted(index for batches in taken for batch in batches for index in batch) == list(range(samples))
    last = [len(batches[-1]) for batches in taken]
    assert max(last) - min(last) <= 1


def test_cells_never_overlap_and_shuffle_by_themselves() -> None:
    topology = Topology(4, (2, 2))
    labels = np.arange(400) % 10
    parts = dirichlet(labels, 2, alpha=0.3, minimum=50)
    taken = [
        {index for batch in CellBatchSampler(parts, DataPlace(topology, r), batch_size=8) for index in batch}
        for r in range(4)
    ]
    assert not (taken[0] | taken[1]) & (taken[2] | taken[3])
    assert taken[0] | taken[1] == set(parts.parts[0].tolist())
    # The same indices in two cells: each has an order of its own.
    same = [next(iter(CellBatchSampler(range(100), DataPlace(topology, rank), batch_size=8))) for rank in (0, 2)]
    assert same[0] != same[1]


def test_each_epoch_and_seed_has_its_order() -> None:
    orders = set()
    for seed in range(3):
        sampler = CellBatchSampler(range(40), DataPlace(Topology(1), 0), batch_size=8, seed=seed)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            orders.add(json.dumps(as_lists(sampler)))
            sampler.set_epoch(epoch)
            assert json.dumps(as_lists(sampler)) in orders
    assert len(orders) == 9


def test_shuffling_is_the_same_on_every_machine() -> None:
    sampler = CellBatchSampler(range(12), DataPlace(Topology(4, (2, 2)), 3), batch_size=3, seed=7)
    sampler.set_epoch(5)
    assert as_lists(sampler) == [[0, 6, 10], [5, 1, 11]]


def test_validation_keeps_the_order_and_the_counts() -> None:
    topology = Topology(6, (4, 2))
    for cell in range(2):
        taken = []
        for rank in topology.federation(cell):
            sampler = CellBatchSampler(range(10, 47), DataPlace(topology, rank), batch_size=8, is_shuffled=False)
            taken.append(as_lists(sampler))
            assert as_lists(sampler) == taken[-1]
        in_order = [index for step in zip(*taken, strict=True) for batch in step for index in batch]
        assert in_order == list(range(10, 47))


SHAPED = [
    (Topology(16, (8, 8), cell_shape={"dp_replicate": 2, "dp_shard": 2, "tp": 2}), [0, 0, 1, 1, 2, 2, 3, 3], 4),
    (Topology(16, (8, 8), cell_shape={"pp": 2, "dp_replicate": -1, "tp": 2}), [0, 0, 1, 1, 0, 0, 1, 1], 2),
    (Topology(4, 4, cell_shape={"pp": 4, "dp_replicate": 1}), [0, 0, 0, 0], 1),
    (Topology(8, (4, 4), 2), [0, 1, 2, 3], 4),
]


@pytest.mark.parametrize("topology, places, count", SHAPED)
def test_ranks_that_share_a_sample_are_told_so(topology: Topology, places: list[int], count: int) -> None:
    for rank in range(topology.world_size):
        assert share_of(DataPlace(topology, rank)) == (places[rank % len(places)], count)


def test_cells_of_different_size_share_samples_each_by_its_own_replicas() -> None:
    topology = Topology(12, (8, 4), 4, {"dp_replicate": -1, "dp_shard": 2, "tp": 2})
    assert [share_of(DataPlace(topology, rank)) for rank in (0, 2, 4, 6)] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert [share_of(DataPlace(topology, rank)) for rank in (8, 9, 10, 11)] == [(0, 2), (0, 2), (1, 2), (1, 2)]


def test_tensor_parallel_ranks_take_the_same_samples() -> None:
    topology = SHAPED[0][0]
    taken = [as_lists(CellBatchSampler(iid(100, 2), DataPlace(topology, rank), batch_size=4)) for rank in range(16)]
    assert taken[0] == taken[1] and taken[2] == taken[3] and taken[0] != taken[2]


@pytest.mark.parametrize(("tail", "whole"), [({}, 23), ({"drop_last": True}, 20), ({"is_padded": True}, 24)])
def test_samples_seen_are_counted_over_epochs(tail: dict[str, bool], whole: int) -> None:
    one, two = (CellBatchSampler(range(23), DataPlace(Topology(2), rank), batch_size=2, **tail) for rank in range(2))
    for epoch in range(2):
        taken = 0
        for at, _ in enumerate(one.follow(one)):
            taken += one.samples_of(at) + two.samples_of(at)
            assert one.samples_seen == epoch * whole + taken
    assert one.samples_seen == 2 * whole


def test_a_loop_that_was_left_is_not_followed_any_more() -> None:
    sampler = CellBatchSampler(range(20), DataPlace(Topology(1), 0), batch_size=4)
    for _ in sampler.follow(sampler):
        break
    list(sampler)
    with pytest.raises(StateError, match="not known"):
        sampler.state_dict()


# Resuming -------------------------------------------------------------------------------------------------------------

LAYOUT = Topology(4, (2, 2))


def fresh(rank: int = 1, kind: Any = CellBatchSampler, **more: Any) -> Any:
    return kind(iid(300, 2), DataPlace(LAYOUT, rank), batch_size=4, seed=3, **more)


def run(sampler: Any, epochs: int = 3, workers: int = 0) -> Iterator[tuple[int, list[int]]]:
    """A training loop: yields the epoch and the batch that it trains on."""
    loader = loader_of(sampler, workers=workers, prefetch_factor=4 if workers else None)
    while sampler.epoch < epochs:
        epoch = sampler.epoch
        for batch in sampler.follow(loader):
            yield epoch, batch.tolist()


@pytest.mark.parametrize("kind, workers", [(CellBatchSampler, 0), (CellSampler, 0), (CellBatchSampler, 2)])
def test_resuming_equals_never_having_stopped(kind: Any, workers: int) -> None:
    whole = list(run(fresh(kind=kind)))
    steps = fresh(kind=kind).steps
    assert len(whole) == 3 * steps
    for stop in (1, steps - 1, steps, steps + 1, 2 * steps + 3) if not workers else (3, steps):
        sampler = fresh(kind=kind)
        loop = run(sampler, workers=workers)
        before = [next(loop) for _ in range(stop)]
        # The workers have drawn ahead by now.
        state = json.loads(json.dumps(sampler.state_dict()))
        loop.close()
        other = fresh(kind=kind)
        other.load_state_dict(state)
        assert before + list(run(other, workers=workers)) == whole


@pytest.mark.parametrize("consumed", [0, 1, 7, 19])
def test_a_loop_may_count_for_itself(consumed: int) -> None:
    sampler = fresh()
    sampler.set_epoch(2)
    whole = as_lists(sampler)
    assert len(whole) == 19
    state = sampler.state_dict(consumed=consumed)
    other = fresh()
    other.load_state_dict(state)
    other.set_epoch(2)  # the loop's own call; it keeps the position
    assert other.position == consumed and as_lists(other) == whole[consumed:]


def test_a_loop_that_breaks_goes_on_where_it_was() -> None:
    whole = list(run(fresh(), epochs=1))
    sampler, seen = fresh(), []
    for batch in sampler.follow(sampler):
        seen.append((0, batch))
        if len(seen) == 5:
            break
    assert sampler.position == 5
    assert seen + list(run(sampler, epochs=1)) == whole
    assert (sampler.epoch, sampler.position) == (1, 0)


@pytest.mark.parametrize("epoch, position", [(-1, 0), (0, 6), (1.5, 1)])
def test_a_position_that_is_refused_changes_nothing(epoch: float, position: int) -> None:
    at = EpochPosition()
    assert at.load_state_dict({"epoch": 2, "position": 3}, most=5) and not at.choose(2)
    with pytest.raises(ConfigError):
        at.load_state_dict({"epoch": epoch, "position": position}, most=5)
    assert at.state_dict() == {"epoch": 2, "position": 3}


def test_state_is_the_same_on_all_ranks_of_a_cell_only() -> None:
    states = [fresh(rank).state_dict() for rank in range(4)]
    assert states[0] == states[1] != states[2] == states[3]
    with pytest.raises(ConfigError, match="saved with cell 0, but this one has 1"):
        fresh(2).load_state_dict(states[0])


def test_a_position_that_is_not_known_is_not_saved() -> None:
    sampler = fresh()
    next(iter(loader_of(sampler)))
    with pytest.raises(StateError, match="follow"):
        sampler.state_dict()
    assert sampler.state_dict(consumed=1)["position"] == 1
    sampler.set_epoch(1)
    assert sampler.state_dict()["position"] == 0


def test_an_epoch_is_not_drawn_twice_by_mistake() -> None:
    sampler = fresh()
    first = as_lists(sampler)
    with pytest.raises(StateError, match="call set_epoch"):
        iter(sampler)
    sampler.set_epoch(0)
    assert as_lists(sampler) == first


def test_a_loader_of_another_sampler_is_noticed() -> None:
    sampler = fresh()
    with pytest.raises(StateError, match="ended at 3 of 19 batches; is this sampler its batch_sampler"):
        list(sampler.follow([1, 2, 3]))
    sampler = fresh(kind=CellSampler)
    with pytest.raises(
        StateError, match="more than the 19 batches of the epoch; is this sampler its sampler, with batch"
    ):
        list(sampler.follow(loader_of(sampler, batch_size=2)))


@pytest.mark.parametrize("kind", [CellBatchSampler, CellSampler])
def test_other_ranks_may_go_on_with_the_same_steps(kind: Any) -> None:
    def cells(ranks: int, batch_size: int) -> list[Any]:
        return [
            kind(range(150), DataPlace(Topology(ranks), rank), batch_size=batch_size, seed=3) for rank in range(ranks)
        ]

    def steps(samplers: list[Any]) -> list[set[int]]:
        taken = [as_lists(loader_of(sampler)) for sampler in samplers]
        return [{index for batch in step for index in batch} for step in zip(*taken, strict=True)]

    whole = steps(cells(4, 6))
    state = cells(4, 6)[0].state_dict(consumed=3)
    for ranks, batch_size in ((1, 24), (2, 12), (6, 4)):
        others = cells(ranks, batch_size)
        for other in others:
            other.load_state_dict(state)
        assert steps(others) == whole[3:]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"samples_a_step": 10}, "samples_a_step 10, but this one has 8"),
        ({"seed": 4}, "seed 4"),
        ({"tail": "pad"}, "tail 'pad'"),
        ({"data": "0"}, "data '0'"),
        ({"kind": "CellSampler"}, "kind 'CellSampler'"),
        ({"position": 20}, "batches consumed of an epoch must be an integer from 0 to 19, got 20"),
        ({"position": -1}, "batches consumed of an epoch must be an integer from 0 to 19, got -1"),
        ({"epoch": -1}, "epoch must be an integer of 0 or more, got -1"),
    ],
)
def test_a_state_of_other_batches_is_refused(change: dict[str, Any], message: str) -> None:
    sampler = fresh()
    with pytest.raises(ConfigError, match=message):
        sampler.load_state_dict({**sampler.state_dict(), **change})
    assert (sampler.epoch, sampler.position) == (0, 0)
    with pytest.raises(ConfigError, match="lacks 'seed'"):
        sampler.load_state_dict({name: value for name, value in sampler.state_dict().items() if name != "seed"})


# Wrong input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, message",
    [
        ({"part": iid(100, 3)}, "the partition is for 3 cells, but there are 2"),
        ({"part": []}, "cell 0 has no samples"),
        ({"part": [[1]]}, r"shape \(1, 1\)"),
        ({"part": [0.5]}, "float64"),
        ({"part": [1]}, "1 samples for 2 ranks"),
        ({"part": [1, 2, 3], "batch_size": 1}, "1 samples for 2 ranks"),
        ({"part": [1, 2, 3], "drop_last": True}, "less than a step of 4 on each of 2 ranks"),
        ({"batch_size": 0}, "batch_size must be a positive integer, got 0"),
        ({"seed": -1}, "seed must be an integer of 0 or more, got -1"),
        ({"is_shuffled": 1}, "is_shuffled must be True or False, got 1"),
        ({"drop_last": True, "is_padded": True}, "both True"),
    ],
)
@pytest.mark.parametrize("kind", [CellBatchSampler, CellSampler])
def test_what_cannot_be_meant_is_refused(kind: type[CellOrder[Any]], change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"part": range(40), "state": DataPlace(LAYOUT, 0), "batch_size": 4, **change}
    with pytest.raises(ConfigError, match=message):
        kind(**arguments)


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(TopologyError, match="rank must be an integer from 0 to 3, got 4"):
        CellBatchSampler(range(40), DataPlace(LAYOUT, 4), batch_size=4)
