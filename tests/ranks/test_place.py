"""Real ranks compare the first samples that they read: data that split or shuffle themselves are refused on all."""

from __future__ import annotations

import multiprocessing
import random
import time
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from tests.ranks.test_round import make_state
from tests.worlds import run_world
from xffl.cluster.network import Timeouts
from xffl.distributed import DistributedState
from xffl.errors import ConfigError
from xffl.topology import DataPlace
from xffl.training.data import first_samples
from xffl.training.data.loaders import CellLoader, adopt_loader
from xffl.training.data.partition import iid
from xffl.training.data.sampler import CellBatchSampler, CellSampler
from xffl.training.data.streams import CellStream

SAMPLES = 48


class Stream(IterableDataset[Any]):
    """A stream with what may be wrong with it."""

    def __init__(self, kind: str = "whole") -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[Any]:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        order = list(range(SAMPLES))
        if self.kind == "split":  # as webdataset's split_by_node, datasets' split_dataset_by_node
            order = order[rank::ranks]
        elif self.kind == "unseeded":
            random.Random(f"{rank} but no seed").shuffle(order)
        elif self.kind == "of the cell":
            order = [one + 100 * (rank // 2) for one in order]
        elif self.kind == "seeded globally":
            random.shuffle(order)
        elif self.kind == "broken" and rank == 3:
            raise OSError("the disk of rank 3 is gone")
        elif self.kind == "uneven":
            order = list(range(100 * rank, 100 * rank + 8 + rank))
        elif self.kind == "empty on one":
            order = [] if rank == 3 else order
        return iter(order)


class Moody(Dataset[Any]):
    """Samples with augmentation by a generator of the dataset's own."""

    def __init__(self) -> None:
        self.draws = random.Random(f"{dist.get_rank()}")

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return index, self.draws.random() < 0.5


def told(make: Any) -> str:
    """What all ranks raise, which must be the same on all of them; empty where they read on."""
    try:
        for _ in make():
            pass
        text = ""
    except (ConfigError, OSError) as error:
        text = f"{type(error).__name__}: {error}"
    return text


def alike(make: Any, ranks: int = 4) -> str:
    """Check that all ranks raise the same, or so many that stand next to each other, and return it."""
    text = told(make)
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    first = dist.get_rank() // ranks * ranks
    assert len(set(texts[first : first + ranks])) == 1, texts
    return text


def refuses(state: DistributedState) -> None:
    """Streams."""
    for workers in (0, 1):
        text = alike(partial(CellStream, Stream("split"), state, batch_size=2, workers=workers))
        assert text.startswith(
            "ConfigError: the ranks do not read the same data from Stream: rank 0 begins with 0; rank 1"
        )
        assert "leave out what splits it by rank" in text and 'part="rank"' in text
    for part in (None, "own", "whole"):
        unseeded = partial(CellStream, Stream("unseeded"), state, batch_size=2, part=part)
        text = alike(unseeded, 4 if part is None else 2)
        assert "do not read the same data" in text and "shuffle by a seed" in text
    assert 'part="own"' in alike(lambda: CellStream(Stream("of the cell"), state, batch_size=2))
    for kind, part in (
        ("of the cell", "own"),
        ("seeded globally", None),
        ("seeded globally", "whole"),
        ("whole", None),
    ):
        assert alike(partial(CellStream, Stream(kind), state, batch_size=2, part=part)) == ""
    assert alike(lambda: CellStream(Stream("unseeded"), state, batch_size=2, is_compared=False)) == ""
    own = told(lambda: CellStream(Stream("broken"), state, batch_size=2))
    assert ("OSError: the disk" if state.rank == 3 else "rank 3: OSError: the disk of rank 3 is gone") in own
    assert "begins with no sample" in alike(lambda: CellStream(Stream("empty on one"), state, batch_size=2))


def goes_on(state: DistributedState) -> None:
    """Cells stand at unlike positions when they are started again: nothing to compare there, and nobody waits."""
    stream = CellStream(Stream(), state, batch_size=2)
    batches = iter(stream)
    for _ in range(1 + state.cell):
        next(batches)
    expected = [batch.tolist() for batch in batches]
    again = CellStream(Stream(), state, batch_size=2)
    again.load_state_dict({**stream.state_dict(), "epoch": 0, "position": 1 + state.cell})
    assert [batch.tolist() for batch in again] == expected
    # The same samples as without a comparison.
    place = DataPlace(state.topology, state.rank or 0)
    for workers in (0, 1):
        streams = [CellStream(Stream(), at, batch_size=2, workers=workers) for at in (state, place)]
        first, other = ([[batch.tolist() for batch in one] for _ in range(2)] for one in streams)
        assert first == other and streams[0].state_dict() == streams[1].state_dict()
        numbers = TensorDataset(torch.arange(SAMPLES))
        loaders = [CellLoader(numbers, at, batch_size=2, workers=workers) for at in (state, place)]
        first, other = ([[batch[0].tolist() for batch in one] for _ in range(2)] for one in loaders)
        assert first == other and loaders[0].state_dict() == loaders[1].state_dict()


def takes_own(state: DistributedState) -> None:
    """Each rank's stream is its own: 8, 9, 10 and 11 samples, of which the cells train 8 and 10 a rank."""
    stream = CellStream(Stream("uneven"), state, batch_size=2, part="rank")
    rank = state.rank or 0
    for epoch in range(2):
        most = (8, 10)[state.cell]
        assert [one for batch in stream for one in batch.tolist()] == list(range(100 * rank, 100 * rank + most))
        assert (stream.epoch, stream.samples_seen) == (epoch + 1, 2 * most * (epoch + 1))
    own = told(lambda: CellStream(Stream("broken"), state, batch_size=2, part="rank"))
    if state.cell == 1:
        assert ("OSError: the disk" if rank == 3 else "another rank of this cell could not read") in own


def compares_datasets(state: DistributedState) -> None:
    """Datasets with an index: shorter ones, parts of unlike datasets, and datasets that were split before."""
    rank, numbers = state.rank or 0, TensorDataset(torch.arange(SAMPLES))
    longer = TensorDataset(torch.arange(SAMPLES + rank % 2))
    text = alike(lambda: CellLoader(longer, state, batch_size=2))
    assert "a partition of 48 samples with digest" in text and "All cells must make the same partition" in text
    for make in (
        lambda: CellLoader(longer, state, batch_size=2, part="own"),
        lambda: CellLoader(longer, state, batch_size=2, part="whole"),
        lambda: CellBatchSampler(range(len(longer)), state, batch_size=2),
        lambda: CellLoader(numbers, state, batch_size=2, part="own", seed=rank),
        lambda: CellLoader(numbers, state, batch_size=2 + rank % 2, part="own"),
    ):
        assert "The ranks of a cell share its samples out" in alike(make, 2)
    assert "the same partition" in alike(lambda: CellBatchSampler(iid(48, 2, seed=state.cell), state, batch_size=2))
    split = Subset(numbers, range(rank, SAMPLES, 4))  # as long on all ranks
    for part in (None, "whole", "own"):
        for workers in (0, 1):
            before = partial(CellLoader, split, state, batch_size=2, part=part, workers=workers)
            text = alike(before, 2 if part == "own" else 4)
            assert "do not read the same data from Subset" in text
    assert "what splits it by rank" in alike(lambda: adopt_loader(DataLoader(split, batch_size=2), state))
    assert alike(lambda: CellLoader(split, state, batch_size=2, is_compared=False)) == ""
    of_cell = Subset(numbers, range(state.cell, SAMPLES, 2))
    assert 'part="own"' in alike(lambda: CellLoader(of_cell, state, batch_size=2))
    assert alike(lambda: CellLoader(of_cell, state, batch_size=2, part="own")) == ""
    assert alike(lambda: CellLoader(Moody(), state, batch_size=2)) == ""
    # The samples of cells that were split by rank need not be equally many.
    short = TensorDataset(torch.arange(SAMPLES - state.cell))
    text = alike(lambda: CellLoader(short, state, batch_size=3))
    assert "a partition of 48 samples" in text and "a partition of 47 samples" in text


def taken(loader: Any) -> list[int]:
    return [int(one) for (batch,) in loader for one in batch]


def tells_loaders_apart(state: DistributedState, patch: pytest.MonkeyPatch) -> None:
    """Cells iterate over loaders in another order, or over one that the others have not: no error, and no long wait."""
    patch.setattr(first_samples, "ACROSS_S", 0.3)
    start = time.monotonic()
    ones, others = TensorDataset(torch.arange(40.0)), TensorDataset(torch.arange(100.0, 180.0))
    alike_in_length = TensorDataset(torch.arange(200.0, 240.0))
    for part in (None, "whole"):
        loaders = [CellLoader(data, state, batch_size=2, part=part) for data in (ones, others, alike_in_length)]
        counts = [len(taken(loader)) for loader in (loaders if state.cell == 0 else loaders[::-1])]
        assert all(counts)
        dist.barrier()
    streams = [CellStream(data, state, batch_size=2) for data in (Stream(), Stream("seeded globally"))]
    for stream in streams if state.cell == 0 else streams[::-1]:
        assert len(list(stream)) == SAMPLES // 8
    dist.barrier()
    if state.cell == 0:  # one more loader, before one that all cells have
        assert taken(CellLoader(TensorDataset(torch.arange(16.0)), state, batch_size=2, part="whole", seed=7))
    assert alike(lambda: CellLoader(ones, state, batch_size=4, part="whole", seed=8)) == ""
    assert time.monotonic() - start < 30.0


def begins_anew_with_each_state(state: DistributedState) -> None:
    """What one cell has made with the state of an earlier session does not shift the numbers of this one's loaders."""
    before, after, last = (make_state(dist.get_rank(), (2, 2), None) for _ in range(3))
    if state.cell == 0:
        CellStream(Stream(), before, batch_size=7)
    text = alike(partial(CellStream, Stream("of the cell"), after, batch_size=7))
    assert text.startswith("ConfigError: the ranks do not read the same data from Stream: ranks 0-1 begin with 0; ")
    # What was left at the store of the world in an earlier session is not taken for what this one reads.
    next(iter(CellStream(Stream(), last, batch_size=7)))


def turns_it_off(state: DistributedState) -> None:
    """Without a comparison nothing is asked for, neither of the samples nor of the partition."""
    rank = state.rank or 0
    with pytest.MonkeyPatch.context() as patch:

        def refuse(*_: Any) -> None:
            raise AssertionError("compared")

        patch.setattr(first_samples.Meeting, "compare", refuse)
        longer = TensorDataset(torch.arange(SAMPLES + 8 * (rank // 2)))
        assert taken(CellLoader(longer, state, batch_size=2, is_compared=False))
        assert taken(adopt_loader(DataLoader(longer, batch_size=2), state, is_compared=False))
        for sampler in (CellBatchSampler, CellSampler):
            assert list(sampler(iid(48, 2, seed=rank // 2), state, batch_size=2, is_compared=False))
        with pytest.raises(AssertionError, match="compared"):
            taken(CellLoader(TensorDataset(torch.arange(SAMPLES)), state, batch_size=2))
    dist.barrier()


class Computed(Dataset[Any]):
    """Samples whose last digits depend on the processor; or those of the last half are other ones."""

    is_random = False

    def __init__(self, cell: int, by: float, *, is_late: bool = False) -> None:
        self.cell, self.by, self.is_late = cell, by, is_late

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        value = torch.sin(torch.arange(400.0) * (index + 1) / 7)
        noise = self.by * self.cell * torch.cos(torch.arange(400.0) * 5)
        return value if self.is_late and index < SAMPLES // 2 else value + noise


def compares_roughly(state: DistributedState) -> None:
    """Unlike processors compute unlike last digits; what is shown is what differs."""
    for workers in (0, 1):
        assert alike(partial(CellLoader, Computed(state.cell, 1e-6), state, batch_size=2, workers=workers)) == ""
    text = alike(lambda: CellLoader(Computed(state.cell, 0.1, is_late=True), state, batch_size=2))
    assert "ranks 0-1 have as sample 1 a Tensor with digest" in text
    shown = [part.split()[0] for part in text.split("digest ")[1:]]
    assert len(shown) == 2 and shown[0].strip(";.") != shown[1].strip(";.")


def raises_late(state: DistributedState, patch: pytest.MonkeyPatch) -> None:
    """A cell that comes when the other has gone on finds what it has left, and says so."""
    patch.setattr(first_samples, "ACROSS_S", 0.3)
    make = partial(CellStream, Stream("of the cell"), state, batch_size=2)
    late = make()
    text = told(lambda: late) if state.cell == 0 else ""
    dist.barrier()
    text = told(lambda: late) if state.cell == 1 else text
    if state.cell == 0:
        assert text == ""
    else:
        assert "ranks 0-1 begin with 0; ranks 2-3 begin with 100" in text
        assert "Not all ranks raise this: cell 0 came first, waited for 0.3 s for the other cells" in text
    dist.barrier()


def waits_no_longer(state: DistributedState, patch: pytest.MonkeyPatch) -> None:
    """A rank that looks at a batch by itself is not held up for ever; what it has read is compared later."""
    patch.setattr(state, "_timeouts", Timeouts.within(0.9))
    stream = CellStream(Stream(), state, batch_size=2)
    if state.rank == 0:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            assert next(iter(stream)).tolist() == [0, 4]
        assert "rank 0 has waited for 0.3 s for all of ranks 0-1" in str(found[-1].message)
    dist.barrier()
    patch.undo()
    if state.rank != 0:
        assert next(iter(stream)).tolist() == [state.rank, 4 + (state.rank or 0)]


def compare(rank: int, world_size: int) -> None:
    # Beside gloo's threads each rank has workers, which Python denies to the daemons that ranks of a test are.
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    state = make_state(rank, (2, 2), None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_samples, "ACROSS_S", 60.0)  # a busy machine may hold a cell up
        for compared in (
            refuses,
            goes_on,
            takes_own,
            compares_datasets,
            begins_anew_with_each_state,
            turns_it_off,
            compares_roughly,
        ):
            compared(state)
    for check in (tells_loaders_apart, raises_late, waits_no_longer):
        with pytest.MonkeyPatch.context() as patch:
            check(state, patch)


def test_ranks_compare_what_they_read_first() -> None:
    run_world(4, compare)
