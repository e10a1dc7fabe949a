"""Loaders give every sample to one rank, keep the ranks of a cell in step, and resume what would have come."""

from __future__ import annotations

import gc
import json
import multiprocessing
import pickle
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from xffl.errors import ConfigError, StateError
from xffl.topology import DataPlace, Topology
from xffl.training.data.loaders import (
    CellLoader,
    Key,
    Randomness,
    _Batches,
    adopt_loader,
    parts_by_ranks,
    tensor_rows,
    validation_loader,
)
from xffl.training.data.partition import Partition, dirichlet
from xffl.training.data.place import share_of
from xffl.training.data.streams import CellStream
from xffl.training.mixins.loaders import DataLoaderSetupMixin

TOPOLOGIES = [
    Topology(1),
    Topology(4, (2, 2)),
    Topology(6, (4, 2), 2),
    Topology(6, (1, 2, 3)),
    Topology(8, (4, 4), cell_shape={"dp_replicate": 1, "dp_shard": 2, "tp": 2}),
]
LAYOUT = Topology(6, (4, 2))


class Noisy(Dataset[Any]):
    """Samples are their index and what the three generators give."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()), random.random(), np.random.rand()


class Together(Noisy):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def show(topology: Topology) -> str:
    return f"{topology.sizes}-{topology.cell_shape}"


def plain(batch: Any) -> Any:
    return [values.tolist() for values in batch] if isinstance(batch, list | tuple) else batch.tolist()


def numbers(samples: int) -> TensorDataset:
    return TensorDataset(torch.arange(samples))


def taken_by(loaders: list[Any]) -> list[list[list[int]]]:
    """The samples of each rank's batches in an epoch, or in a pass."""
    return [[plain(batch)[0] for batch in loader] for loader in loaders]


# Training -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=show)
@given(batch_size=st.integers(2, 7), extra=st.integers(0, 60), seed=st.integers(0, 9))
@settings(max_examples=8, deadline=None)
def test_an_epoch_has_every_sample_once(topology: Topology, batch_size: int, extra: int, seed: int) -> None:
    samples = 4 * topology.world_size + extra
    ranks = range(topology.world_size)
    loaders = [
        CellLoader(numbers(samples), DataPlace(topology, rank), batch_size=batch_size, seed=seed) for rank in ranks
    ]
    for epoch in range(2):
        taken = taken_by(loaders)
        seen: dict[tuple[int, int], list[list[int]]] = {}
        for rank, batches in enumerate(taken):
            assert len(batches) == len(loaders[rank])
            cell = topology.cell_of(rank)
            assert len(batches) == len(taken[topology.federation(cell)[0]])
            # Ranks that share a part have the same batches in the same order.
            place = (cell, share_of(DataPlace(topology, rank))[0])
            assert seen.setdefault(place, batches) == batches
        assert sorted(i for batches in seen.values() for batch in batches for i in batch) == list(range(samples))
        for rank in ranks:
            mine = [batches for (cell, _), batches in seen.items() if cell == topology.cell_of(rank)]
            count = sum(len(batch) for batches in mine for batch in batches)
            assert loaders[rank].samples == count and loaders[rank].samples_seen == (epoch + 1) * count
            assert (loaders[rank].epoch, loaders[rank].position) == (epoch + 1, 0)


def test_cells_have_as_many_steps_as_each_other() -> None:
    topology = Topology(6, (4, 2))
    assert parts_by_ranks(600, DataPlace(topology, 0)).sizes == (400, 200)
    assert {len(CellLoader(numbers(600), DataPlace(topology, rank), batch_size=10)) for rank in range(6)} == {10}
    # Ranks that share data count once.
    shaped = Topology(8, (4, 4), cell_shape={"dp_replicate": 1, "dp_shard": 2, "tp": 2})
    assert parts_by_ranks(100, DataPlace(shaped, 0)).sizes == (50, 50)


def test_parts_may_be_given() -> None:
    labels = np.arange(120) % 10
    parts = dirichlet(labels, 2, alpha=0.5, minimum=20)
    by_cell = [
        {
            i
            for rank in LAYOUT.federation(cell)
            for b in taken_by([CellLoader(numbers(120), DataPlace(LAYOUT, rank), batch_size=4, part=parts)])[0]
            for i in b
        }
        for cell in range(2)
    ]
    assert by_cell == [set(part.tolist()) for part in parts.parts]
    own = [
        taken_by(
            [CellLoader(numbers(30 + 10 * LAYOUT.cell_of(rank)), DataPlace(LAYOUT, rank), batch_size=4, part="own")]
        )[0]
        for rank in range(6)
    ]
    assert sorted(i for batches in own[:4] for batch in batches for i in batch) == list(range(30))
    assert sorted(i for batches in own[4:] for batch in batches for i in batch) == list(range(40))
    few = CellLoader(numbers(30), DataPlace(LAYOUT, 0), batch_size=2, part=range(10, 20), is_shuffled=False)
    assert taken_by([few]) == [[[10, 11], [15, 16]]]


def test_a_batch_tells_how_many_samples_it_has() -> None:
    loader = CellLoader(numbers(103), DataPlace(LAYOUT, 5), batch_size=8)
    seen, before = 0, 0
    others = CellLoader(numbers(103), DataPlace(LAYOUT, 4), batch_size=8)
    for batch, other in zip(loader, others, strict=True):
        assert loader.batch_samples == len(batch[0]) and others.batch_samples == len(other[0])
        seen = loader.samples_seen
        assert seen - before == len(batch[0]) + len(other[0])
        before = seen
    assert seen == loader.samples == 34


# Random draws ---------------------------------------------------------------------------------------------------------


def train(loader: Any, epochs: int = 3) -> Iterator[tuple[int, Any]]:
    """A training loop that sets the epoch, as most do, and draws random numbers of its own."""
    for epoch in range(loader.epoch, epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            yield epoch, plain(batch)
            torch.rand(3), random.random(), np.random.rand()


def noisy(rank: int = 1, **more: Any) -> CellLoader:
    return CellLoader(Noisy(90), DataPlace(LAYOUT, rank), batch_size=4, seed=5, **more)


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_equals_never_having_stopped(workers: int) -> None:
    whole = list(train(noisy()))
    steps = len(noisy())
    assert len(whole) == 3 * steps == 12
    for stop in range(1, 12) if not workers else (3, 2 * steps):
        loader = noisy(workers=workers)
        loop = train(loader)
        before = [next(loop) for _ in range(stop)]
        state = json.loads(json.dumps(loader.state_dict()))
        loop.close()
        other = noisy(workers=workers)
        other.load_state_dict(state)
        assert before + list(train(other)) == whole


def test_draws_do_not_depend_on_who_reads() -> None:
    whole = list(train(noisy(), epochs=2))
    assert list(train(noisy(workers=1, prefetch_factor=3), epochs=2)) == whole
    assert list(train(noisy(workers=2, is_persistent=False), epochs=2)) == whole
    spawned = CellLoader(Together(90), DataPlace(LAYOUT, 1), batch_size=4, seed=5)
    assert list(train(spawned, epochs=2)) == whole


def test_draws_differ_where_they_should() -> None:
    def draws(**more: Any) -> list[float]:
        return [
            value
            for rank in range(6)
            for _, batch in train(CellLoader(Noisy(90), DataPlace(LAYOUT, rank), batch_size=4, **more), epochs=2)
            for value in batch[1]
        ]

    found = draws()
    assert len(found) == len(set(found)) == 180  # over ranks, cells, epochs, batches and samples
    assert draws() == found
    assert not set(draws(seed=1)) & set(found)
    shaped = Topology(4, cell_shape={"dp_replicate": 1, "dp_shard": 2, "tp": 2})
    same = [list(train(CellLoader(Noisy(40), DataPlace(shaped, rank), batch_size=4), epochs=1)) for rank in range(4)]
    assert same[0] == same[1] != same[2] == same[3]


def test_the_models_draws_are_left_alone() -> None:
    def state() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()

    before = state()
    for workers in (0, 1):
        loader = noisy(workers=workers)
        next(iter(loader))
        list(loader)
        list(validation_loader(Noisy(9), DataPlace(LAYOUT, 0), batch_size=4, workers=workers))
        list(CellStream(Stream(9), DataPlace(LAYOUT, 0), batch_size=1, workers=workers))
    assert state() == before


def test_generators_come_back_after_an_error() -> None:
    before = torch.get_rng_state().tolist(), random.getstate(), np.random.get_bit_generator()
    with pytest.raises(ZeroDivisionError), Randomness(0).of(1):
        torch.rand(1), random.random(), np.random.rand(), 1 // 0
    assert (torch.get_rng_state().tolist(), random.getstate(), np.random.get_bit_generator()) == before


def test_a_collate_function_may_draw() -> None:
    def collate(samples: list[Any]) -> tuple[list[int], float]:
        return [int(sample[0]) for sample in samples], float(torch.rand(()))

    def run(loader: CellLoader) -> list[Any]:
        return list(loader)

    whole = run(CellLoader(numbers(90), DataPlace(LAYOUT, 1), batch_size=4, collate=collate))
    assert len({draw for _, draw in whole}) == len(whole)
    loader = CellLoader(numbers(90), DataPlace(LAYOUT, 1), batch_size=4, collate=collate)
    before = [next(iter(loader))]
    other = CellLoader(numbers(90), DataPlace(LAYOUT, 1), batch_size=4, collate=collate, workers=1, start_method="fork")
    other.load_state_dict(loader.state_dict())
    assert before + run(other) == whole


def test_a_dataset_that_draws_nothing_is_not_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("seeded")

    monkeypatch.setattr(Randomness, "of", refuse)
    list(CellLoader(numbers(40), DataPlace(LAYOUT, 0), batch_size=4))
    list(CellLoader(Subset(numbers(40), range(30)), DataPlace(LAYOUT, 0), batch_size=4))
    with pytest.raises(AssertionError, match="seeded"):
        list(CellLoader(Subset(Noisy(40), range(30)), DataPlace(LAYOUT, 0), batch_size=4))


# States ---------------------------------------------------------------------------------------------------------------


class Named(Noisy):
    identity = "first"


def named(dataset: Any, identity: str = "first") -> Any:
    dataset.identity = identity
    return dataset


def test_a_state_is_of_its_data() -> None:
    loader = CellLoader(Named(90), DataPlace(LAYOUT, 1), batch_size=4)
    state = loader.state_dict()
    assert state == CellLoader(Named(90), DataPlace(LAYOUT, 2), batch_size=4).state_dict()
    other = CellLoader(Named(90), DataPlace(LAYOUT, 1), batch_size=4)
    other.dataset.identity = "second"
    with pytest.raises(ConfigError, match="saved with dataset 'first', but this one is 'second'"):
        other.load_state_dict(state)
    stream, changed = (
        CellStream(data, DataPlace(LAYOUT, 1), batch_size=1) for data in (named(Stream(9)), named(Stream(9), "x"))
    )
    with pytest.raises(ConfigError, match="saved with dataset 'first', but this one has 'x'"):
        changed.load_state_dict(stream.state_dict())
    of_it, *others = (
        CellLoader(Subset(data, range(start, start + 60)), DataPlace(LAYOUT, 1), batch_size=4)
        for data, start in ((Named(90), 0), (named(Noisy(90), "second"), 0), (Named(90), 1))
    )
    for one in others:
        with pytest.raises(ConfigError, match="saved with dataset 'first "):
            one.load_state_dict(of_it.state_dict())
    with pytest.raises(ConfigError, match="saved with cell 0, but this one has 1"):
        CellLoader(Named(90), DataPlace(LAYOUT, 4), batch_size=4).load_state_dict(state)
    with pytest.raises(ConfigError, match="saved with data"):
        CellLoader(Named(91), DataPlace(LAYOUT, 1), batch_size=4).load_state_dict(state)


class Resuming(DataLoaderSetupMixin):
    """What a trainer that comes back with other ranks has of its loaders."""

    begins_anew = True

    def __init__(self, loader: Any, *, resets: bool = False) -> None:
        self.train_dataloader = loader
        self.config = SimpleNamespace(experiment=SimpleNamespace(reset=resets))

    def load(self, state: Any) -> None:
        self.checkpoint_parts()["train_dataloader"].load_state_dict(state)


def of_ranks(ranks: int, *, samples: int = 40, seed: int = 1, dataset: Any = None) -> CellLoader:
    place = DataPlace(Topology(ranks), 0)
    return CellLoader(numbers(samples) if dataset is None else dataset, place, batch_size=4, seed=seed)


def stream_of_ranks(ranks: int, *, seed: int = 1) -> CellStream:
    return CellStream(Stream(40), DataPlace(Topology(ranks), 0), batch_size=4, seed=seed)


@pytest.mark.parametrize("make", [of_ranks, stream_of_ranks])
def test_other_ranks_begin_an_epoch_anew_with_the_same_seed_and_data_only(make: Callable[..., Any]) -> None:
    """Their steps have another number of samples; any other difference is a mistake."""
    saved = make(1)
    saved.set_epoch(2)
    state = {**saved.state_dict(), "position": 3}
    loader = make(2)
    Resuming(loader).load(state)
    assert (loader.epoch, loader.state_dict()["position"]) == (2, 0)
    wrong = make(2, seed=5)
    with pytest.raises(ConfigError, match="seed 1, but this one has 5"):
        Resuming(wrong).load(state)
    assert wrong.epoch == 0
    Resuming(wrong, resets=True).load(state)
    assert wrong.epoch == 2
    if make is of_ranks:
        for other, message in ((make(2, samples=44), "data "), (make(2, dataset=named(Noisy(40), "x")), "dataset ")):
            with pytest.raises(ConfigError, match=message):
                Resuming(other).load(state)
    same = Resuming(make(2))
    same.begins_anew = False
    with pytest.raises(ConfigError):
        same.load(state)


def test_a_loop_that_breaks_goes_on_with_persistent_workers() -> None:
    whole = list(train(noisy(), epochs=1))
    loader, seen = noisy(workers=2), []
    while loader.epoch == 0:
        for batch in loader:
            seen.append((0, plain(batch)))
            break
    assert seen == whole


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dataset": object()}, "dataset must have __len__ and __getitem__, got a object"),
        ({"part": "mine"}, "part must be one of 'own', 'whole', got 'mine'"),
        ({"part": [0, 1, 2, 90]}, "samples 0 to 90, but the dataset has 90"),
        ({"part": dirichlet([0] * 80, 2, alpha=1)}, "partition is of 80 samples, but the dataset has 90"),
        ({"part": [[1]]}, "shape"),
        ({"part": [[1], [2, 3]]}, "part must be a 1-D array of integers"),
        ({"part": ["a", "b"]}, "part must be a 1-D array of integers, got <U1"),
        ({"workers": 1, "start_method": "toaster"}, "refuses timeout_s 0 or start_method 'toaster'"),
        ({"workers": 1, "timeout_s": -1}, "refuses timeout_s -1"),
        ({"part": Partition((np.arange(90), np.arange(0)), 90)}, "cell 1 has no samples"),  # told by cell 0, too
        ({"batch_size": 0}, "batch_size must be a positive integer, got 0"),
        ({"workers": -1}, "workers must be an integer of 0 or more, got -1"),
        ({"prefetch_factor": 0}, "prefetch_factor must be a positive integer, got 0"),
        ({"seed": -1}, "seed must be an integer of 0 or more, got -1"),
        ({"dataset": Noisy(5)}, "0 samples|1 samples|samples for 4 ranks"),
    ],
)
def test_what_cannot_be_meant_is_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"dataset": Noisy(90), "state": DataPlace(LAYOUT, 0), "batch_size": 4, **change}
    with pytest.raises(ConfigError, match=message):
        CellLoader(**arguments)


# Validation -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=show)
@given(samples=st.integers(1, 60), batch_size=st.integers(1, 7))
@settings(max_examples=10, deadline=None)
def test_validation_counts_every_sample_once(topology: Topology, samples: int, batch_size: int) -> None:
    ranks = range(topology.world_size)
    everyone = []
    for over in ("cell", "federation"):
        loaders = [
            validation_loader(numbers(samples), DataPlace(topology, r), batch_size=batch_size, over=over) for r in ranks
        ]  # type: ignore[arg-type]
        counted: list[dict[int, list[list[int]]]] = [{} for _ in range(topology.cells)]
        for rank, loader in enumerate(loaders):
            batches = []
            for batch in loader:
                assert 1 <= len(batch[0]) <= batch_size
                assert loader.batch_samples in (0, len(batch[0]))
                batches.append(plain(batch)[0][: loader.batch_samples])
            assert len(batches) == len(loader) == len(loaders[topology.federation(topology.cell_of(rank))[0]])
            of_cell = counted[topology.cell_of(rank)]
            assert of_cell.setdefault(share_of(DataPlace(topology, rank))[0], batches) == batches
        found = [sorted(i for batches in cell.values() for batch in batches for i in batch) for cell in counted]
        everyone.append(found)
    assert everyone[0] == [list(range(samples))] * topology.cells
    assert sorted(i for cell in everyone[1] for i in cell) == list(range(samples))


def test_each_pass_starts_at_the_beginning() -> None:
    loader = validation_loader(Noisy(50), DataPlace(LAYOUT, 4), batch_size=8, workers=2)
    whole = [plain(batch) for batch in loader]
    next(iter(loader))
    assert [plain(batch) for batch in loader] == whole
    assert loader.samples == 50 and len(whole) == 4
    with pytest.raises(ConfigError, match="no samples"):
        validation_loader(Noisy(0), DataPlace(LAYOUT, 0), batch_size=4)
    with pytest.raises(ConfigError, match="over must be one of 'cell', 'federation', got 'world'"):
        validation_loader(Noisy(9), DataPlace(LAYOUT, 0), batch_size=4, over="world")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda place: CellLoader(Noisy(50), place, batch_size=8, workers=1),
        lambda place: validation_loader(Noisy(50), place, batch_size=8, workers=1),
    ],
    ids=["training", "validation"],
)
def test_workers_end_with_the_last_reference_to_their_loader(make: Callable[[DataPlace], Any]) -> None:
    """Python's search for cycles would end them seconds later, while something else is done."""
    others = {worker.pid for worker in multiprocessing.active_children()}
    loader = make(DataPlace(LAYOUT, 0))
    next(iter(loader))
    (worker,) = [worker for worker in multiprocessing.active_children() if worker.pid not in others]
    gc.disable()
    try:
        del loader
        worker.join(30.0)
        assert not worker.is_alive()
    finally:
        gc.enable()


# Loaders of the user's ------------------------------------------------------------------------------------------------


def first_of(samples: list[Any]) -> torch.Tensor:
    return torch.tensor([sample[0] for sample in samples])


@pytest.mark.parametrize("is_shuffled", [True, False])
def test_a_plain_loader_is_adopted(is_shuffled: bool) -> None:
    given = DataLoader(
        Noisy(90), batch_size=4, shuffle=is_shuffled, collate_fn=first_of, num_workers=1, prefetch_factor=3
    )
    found = adopt_loader(given, DataPlace(LAYOUT, 1), seed=5)
    same = CellLoader(Noisy(90), DataPlace(LAYOUT, 1), batch_size=4, collate=first_of, seed=5, is_shuffled=is_shuffled)
    assert [plain(batch) for batch in found] == [plain(batch) for batch in same]
    assert (found.batches.num_workers, found.batches.prefetch_factor, found.batches.persistent_workers) == (1, 3, False)
    assert adopt_loader(found, DataPlace(LAYOUT, 1)) is found


def test_options_of_a_loader_are_kept() -> None:
    dropped = adopt_loader(DataLoader(numbers(90), batch_size=7, drop_last=True), DataPlace(LAYOUT, 4))
    assert {len(batch[0]) for batch in dropped} == {7} and dropped.samples == 28
    distributed = DataLoader(numbers(90), batch_size=4, sampler=DistributedSampler(numbers(90), 6, 1, shuffle=True))
    assert taken_by([adopt_loader(distributed, DataPlace(LAYOUT, 1))]) == taken_by(
        [CellLoader(numbers(90), DataPlace(LAYOUT, 1), batch_size=4)]
    )
    kept = Stateful()
    assert adopt_loader(kept, DataPlace(LAYOUT, 0)) is kept


class Stateful:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Stream(IterableDataset[Any]):
    """Samples are their number and what the generators give; they are shuffled by a small buffer."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        kept: list[int] = []
        for number in range(self.samples):
            kept.append(number)
            if len(kept) == 5:
                yield kept.pop(random.randrange(5)), torch.rand(()), self.epoch
        yield from ((number, torch.rand(()), self.epoch) for number in kept)


@pytest.mark.parametrize(
    "loader, message",
    [
        (lambda: DataLoader(numbers(9), sampler=WeightedRandomSampler([1.0] * 9, 9)), "draws by WeightedRandomSampler"),
        (lambda: DataLoader(numbers(9), sampler=RandomSampler(numbers(9), replacement=True)), "draws by RandomSampler"),
        (lambda: DataLoader(numbers(9), batch_sampler=[[1], [2]]), "batch_sampler list"),
        (lambda: DataLoader(numbers(9), batch_size=None), "batch_size None"),
        (lambda: DataLoader(Stream(9)), "take CellStream"),
        (lambda: [1, 2], "loader must be a DataLoader, .*got a list"),
    ],
)
def test_a_loader_that_cannot_be_shared_out_is_refused(loader: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        adopt_loader(loader(), DataPlace(LAYOUT, 0))


# Streams --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=show)
@given(samples=st.integers(32, 70), batch_size=st.integers(1, 4), drop_last=st.booleans())
@settings(max_examples=8, deadline=None)
def test_a_stream_is_dealt_out(topology: Topology, samples: int, batch_size: int, drop_last: bool) -> None:
    ranks = range(topology.world_size)
    loaders = [
        CellStream(Stream(samples), DataPlace(topology, r), batch_size=batch_size, drop_last=drop_last) for r in ranks
    ]
    for epoch in range(2):
        parts: dict[tuple[int, int], list[list[int]]] = {}
        lengths: dict[int, int] = {}
        for rank, loader in enumerate(loaders):
            before, batches, cell = loader.samples_seen, [], topology.cell_of(rank)
            for index, batch in enumerate(loader):
                assert loader.batch_samples == len(batch[0]) and loader.position == index + 1
                assert batch[2].tolist() == [epoch] * len(batch[0])
                batches.append(plain(batch)[0])
            assert lengths.setdefault(cell, len(batches)) == len(batches)
            assert parts.setdefault((cell, share_of(DataPlace(topology, rank))[0]), batches) == batches
            loader.seen = loader.samples_seen - before  # type: ignore[attr-defined]
        seen = sorted(i for batches in parts.values() for batch in batches for i in batch)
        assert len(seen) == len(set(seen)) and set(seen) <= set(range(samples))
        per_step = batch_size * len(parts)
        # What is left out is of the last step only.
        assert len(seen) >= samples // per_step * per_step
        if drop_last or topology.world_size == 1:
            assert len(seen) == (samples // per_step * per_step if drop_last else samples)
        for rank in ranks:
            mine = [b for (cell, _), batches in parts.items() if cell == topology.cell_of(rank) for b in batches]
            assert loaders[rank].seen == sum(map(len, mine))  # type: ignore[attr-defined]


class Counted(Stream):
    """A stream that keeps its own position, and draws as it goes."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.samples:
            self.at += 1
            yield self.at - 1, torch.rand(()), self.epoch
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize(
    "workers, resume, samples",
    [(0, "count", 72), (0, "count", 83), (0, "state", 72), (0, "state", 83), (1, "count", 83), (1, "state", 72)],
)
def test_a_stream_resumes(workers: int, resume: Any, samples: int) -> None:
    def stream(workers: int = workers) -> CellStream:
        kind = Counted if resume == "state" else Stream
        return CellStream(kind(samples), DataPlace(LAYOUT, 1), batch_size=4, seed=3, workers=workers, resume=resume)

    whole = list(train(stream(0)))
    steps = len(whole) // 3
    assert steps == (3 if samples == 72 else 4)
    for stop in range(1, len(whole)) if not workers else (1, steps):
        loader = stream()
        loop = train(loader)
        before = [next(loop) for _ in range(stop)]
        state = json.loads(json.dumps(loader.state_dict()))
        loop.close()
        other = stream()
        other.load_state_dict(state)
        assert before + list(train(other)) == whole
        # Of 24 samples in a step 16 are cell 0's, and 8 of the last 11.
        assert other.samples_seen == 3 * (48 if samples == 72 else 56)


@pytest.mark.parametrize("samples, rank, options", [(0, 0, {}), (3, 1, {}), (5, 4, {}), (23, 5, {"drop_last": True})])
def test_a_stream_without_a_step_is_an_error(samples: int, rank: int, options: dict[str, Any]) -> None:
    # Otherwise a loop that counts steps would never end.
    with pytest.raises(ConfigError, match=f"ended after {samples} samples, too few for one step of 6 ranks"):
        list(CellStream(Stream(samples), DataPlace(LAYOUT, rank), batch_size=4, **options))


def test_streams_of_cells() -> None:
    loaders = [CellStream(Stream(40), DataPlace(LAYOUT, rank), batch_size=2, part="own") for rank in range(6)]
    taken = taken_by(loaders)
    for ranks in (range(4), range(4, 6)):
        assert sorted(i for rank in ranks for batch in taken[rank] for i in batch) == list(range(40))
    with pytest.raises(ConfigError, match="saved with cell 0, but this one has 1"):
        loaders[4].load_state_dict(loaders[0].state_dict())
    with pytest.raises(ConfigError, match="lacks 'samples'"):
        loaders[4].load_state_dict({"epoch": 0, "position": 0})
    other = CellStream(Stream(20), DataPlace(LAYOUT, 0), batch_size=2, part="own")
    other.load_state_dict({**loaders[0].state_dict(), "epoch": 0, "position": 4})
    with pytest.raises(StateError, match="ended after 3 batches, but 4 were consumed"):
        list(other)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dataset": iter([1])}, "dataset must have an __iter__"),
        ({"dataset": 3}, "dataset must have an __iter__ .*got a int"),
        ({"part": "mine"}, "part of a stream must be one of 'own', 'whole', 'rank', got 'mine'"),
        ({"workers": 2}, "workers 2 would each read the whole stream"),
        ({"resume": "state"}, "Stream has no state_dict"),
        ({"resume": "guess"}, "resume must be one of 'count', 'state', got 'guess'"),
        ({"batch_size": 0}, "batch_size must be a positive integer, got 0"),
    ],
)
def test_a_stream_that_cannot_be_meant_is_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"dataset": Stream(9), "state": DataPlace(LAYOUT, 0), "batch_size": 4, **change}
    with pytest.raises(ConfigError, match=message):
        CellStream(**arguments)


@pytest.mark.parametrize(
    ("name", "topology", "options"),
    [
        ("batch_size", LAYOUT, {"batch_size": 3}),
        ("ranks", Topology(4, (4,)), {}),
        ("dataset", LAYOUT, {"identity": "others"}),
    ],
)
def test_the_state_of_a_stream_is_of_its_steps(name: str, topology: Topology, options: dict[str, Any]) -> None:
    def stream(topology: Topology = LAYOUT, batch_size: int = 2, identity: str = "mine") -> CellStream:
        return CellStream(named(Stream(40), identity), DataPlace(topology, 0), batch_size=batch_size)

    with pytest.raises(ConfigError, match=f"saved with {name} "):
        stream(topology, **options).load_state_dict(stream().state_dict())


def test_draws_of_a_stream_differ() -> None:
    def collate(samples: list[Any]) -> tuple[list[float], float]:
        return [draw.item() for _, draw, _ in samples], torch.rand(()).item()

    batches = [
        batch
        for rank in range(6)
        for batch in CellStream(Counted(72), DataPlace(LAYOUT, rank), batch_size=4, collate=collate)
    ]
    draws, collated = [draw for of_samples, _ in batches for draw in of_samples], [one for _, one in batches]
    assert len(set(draws)) == len(draws) == 72 and len(set(collated)) == len(collated) == 18


def test_cells_with_streams_of_their_own_draw_their_own() -> None:
    first, other = (
        {
            draw
            for batch in CellStream(Counted(16), DataPlace(LAYOUT, rank), batch_size=2, part="own")
            for draw in batch[1].tolist()
        }
        for rank in (0, 4)
    )
    assert first and other and not first & other


def test_a_stream_with_a_state_does_not_read_again() -> None:
    read: list[int] = []

    class Told(Counted):
        def __iter__(self) -> Iterator[Any]:
            for sample in super().__iter__():
                read.append(int(sample[0]))
                yield sample

    def stream() -> CellStream:
        return CellStream(Told(72), DataPlace(LAYOUT, 1), batch_size=4, resume="state")

    loader = stream()
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    read.clear()
    other = stream()
    other.load_state_dict(state)
    list(other)
    assert read == list(range(24, 72))


def test_the_last_step_of_a_stream_tells_what_each_rank_has() -> None:
    counts = []
    for rank in range(4):
        loader = CellStream(Stream(14), DataPlace(Topology(4), rank), batch_size=2)
        counts.append([loader.batch_samples for _ in loader])
    assert counts == [[2, 2], [2, 2], [2, 1], [2, 1]]


def test_what_workers_get_can_be_pickled() -> None:
    loader = noisy()
    again = pickle.loads(pickle.dumps(loader.batches.dataset))
    keys = list(pairwise([*loader.batches.sampler, None]))
    assert [plain(again[key]) for key, _ in keys] == [plain(batch) for batch in noisy()]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_rows_of_tensors_are_what_collating_their_samples_gives(depth: int) -> None:
    dataset: Any = TensorDataset(torch.randn(40, 3, 2), torch.arange(40), torch.rand(40).half())
    for _ in range(depth):
        dataset = Subset(dataset, np.random.default_rng(depth).permutation(len(dataset))[:-3].tolist())
    assert tensor_rows(dataset) is not None
    chosen = [5, 0, 17, 5]
    rows = _Batches(dataset, None, Randomness(0), 0)[Key(0, 0, np.array(chosen))]
    expected = default_collate([dataset[index] for index in chosen])
    assert type(rows) is type(expected)
    for mine, theirs in zip(rows, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
    assert tensor_rows(Noisy(3)) is None
    assert tensor_rows(Subset(TensorDataset(torch.arange(3)), [0, -1])) is None  # counted from the end
