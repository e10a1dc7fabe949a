"""Loaders: each rank's batches of its cell's samples, resumable to the sample, on torch's ``DataLoader``.

:class:`CellLoader` is for training, :class:`ValidationLoader` counts every sample once, :func:`adopt_loader` converts a
plain ``DataLoader``; :mod:`xffl.training.data.streams` is for data without an index. All ranks of a cell make the same
number of batches, so the collectives of its model meet. Nothing is communicated, except that the ranks compare a few
samples before their first batch (:mod:`xffl.training.data.first_samples`).

Torch's loader is given whole batches as its "samples", each named by a :class:`Key`: the indices in it, and the random
stream that belongs to it. So a batch can be made again, whichever process reads it and whatever it has read before.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from xffl.checks import integer, one_of
from xffl.errors import ConfigError
from xffl.topology import DataPlace
from xffl.training.data.first_samples import FirstSamples, Meeting
from xffl.training.data.partition import Partition, iid, index_array
from xffl.training.data.place import OWN, WHOLE, Placed, cell_shares, place_of, share_of, takes_state
from xffl.training.data.rng import AUGMENTING
from xffl.training.data.sampler import ADVICE_CELL, CellBatchSampler, even_cut

__all__ = [
    "CellLoader",
    "Key",
    "Probe",
    "Randomness",
    "ValidationLoader",
    "adopt_loader",
    "identity_of",
    "open_loader",
    "options_of",
    "parts_by_ranks",
    "tensor_rows",
    "validation_loader",
]

ADVICE_COMMON = (
    "All ranks share one dataset out here, so each must have the whole of it in the same order: leave out what splits "
    "it by rank (a Subset of a rank's indices, datasets' split_dataset_by_node), and give what splits or shuffles it "
    '(random_split, train_test_split) a seed that is the same on all ranks; or give part="own" where each cell has '
    "data of its own, or is_compared=False where only the augmentation of samples differs"
)

# Training -------------------------------------------------------------------------------------------------------------


class CellLoader(Iterable[Any]):
    """One rank's batches of its cell's samples, epoch by epoch.

    Iterating goes on where the last loop stopped, yields the rest of the epoch, and then goes on to the next epoch::

        while loader.epoch < epochs:
            for batch in loader:
                train(batch)  # loader.state_dict() may be saved after the step

    A resumed loader yields the batches that would have come, and what random augmentation would have made of them:
    while a batch is read and collated, the global generators of Python, numpy and torch (CPU) are seeded by ``seed``,
    cell, epoch, number of the batch and the rank's place in the cell, and set back afterwards. The number of workers
    does not matter. Generators of a dataset's own, and those of a GPU, are not touched: what they draw is not
    reproduced. A dataset that draws nothing may say so by an attribute ``is_random = False``, which saves some
    microseconds a batch; a ``TensorDataset`` and token windows need not say it.

    Before its first batch each rank compares two samples with those that the others have under the same indices: where
    they differ, a dataset was split by rank before it came here, or at random without a seed, and all ranks raise
    ConfigError. Floating-point numbers are compared roughly, as processors compute unlike last digits. A dataset that
    gives another sample each time it is asked for one is not compared. The ranks of a cell wait for each other there,
    for a minute at most, and cells for each other for 5 s at most (less where the session's timeout is short): a cell
    that comes later raises alone. Cells compare loaders of the same class and length of dataset, part, batch size and
    seed, so they may iterate over unlike ones in another order.

    To make one is local. All ranks of a cell give the same arguments, and make the same calls.

    :param dataset: Map-style: torch's, a Hugging Face ``Dataset``, a list.
    :param state: The state of this process, which knows its cell and its place in it; where there is none, a
        :class:`xffl.topology.DataPlace`.
    :param batch_size: Samples of each rank in a step, at most.
    :param part: Which samples are the cell's: a partition of the dataset, this cell's own indices, ``"own"`` where the
        dataset is this cell's alone, ``"whole"`` to deal all samples to every cell, each with a shuffle of its own, or
        ``None`` to deal the dataset out at random by ``seed``, to each cell as many samples as its ranks can take
        (:func:`parts_by_ranks`).
    :param seed: Of the parts, the shuffling and the augmentation, which are independent of each other.
    :param is_shuffled: Whether each epoch has a new random order.
    :param drop_last: Leave out what does not fill a step on all ranks.
    :param is_padded: Repeat some samples so that all batches are full.
    :param workers: Processes that read ahead; 0 reads in this process.
    :param pin_memory: Whether batches are put into pinned memory; ``None`` where there is CUDA.
    :param prefetch_factor: Batches that each worker reads ahead.
    :param collate: Makes a batch of a list of samples; ``None`` takes torch's ``default_collate``.
    :param is_persistent: Whether workers live on over epochs.
    :param timeout_s: How long to wait for a worker's batch; 0 waits for ever.
    :param worker_init: Called in each worker with its number.
    :param start_method: How workers start, such as ``"fork"``; ``None`` is Python's default.
    :param is_compared: Whether ranks compare the options, the partition and two samples, see above.
    :raises ConfigError: if an argument is invalid, or a rank would have no sample in some step.
    """

    @takes_state
    def __init__(
        self,
        dataset: Any,
        state: Placed | DataPlace,
        *,
        batch_size: int,
        part: Partition | npt.ArrayLike | None = None,
        seed: int = 0,
        is_shuffled: bool = True,
        drop_last: bool = False,
        is_padded: bool = False,
        workers: int = 0,
        pin_memory: bool | None = None,
        prefetch_factor: int = 2,
        collate: Callable[[list[Any]], Any] | None = None,
        is_persistent: bool = True,
        timeout_s: float = 0,
        worker_init: Callable[[int], None] | None = None,
        start_method: Any = None,
        is_compared: bool = True,
    ) -> None:
        _check_indexed(dataset)
        self.dataset = dataset
        self.sampler = CellBatchSampler(
            _part_of(dataset, state, part, seed),
            state,
            batch_size=batch_size,
            seed=seed,
            is_shuffled=is_shuffled,
            drop_last=drop_last,
            is_padded=is_padded,
            is_compared=is_compared,
        )
        """Which samples come, and where the loop stands."""
        self.cell = self.sampler.cell
        self.batch_size = self.sampler.batch_size
        self.samples = self.sampler.samples
        """The rank's cell, samples of each rank in a step, at most, and those of the whole cell in an epoch."""
        place, _ = share_of(place_of(state))
        # Of a partition, or indices, a rank may have no other samples than its cell's.
        is_common = part is None or (isinstance(part, str) and part == WHOLE)
        self._keys = _EpochKeys(
            self.sampler, Probe((0, len(dataset) // 2) if is_common else (self.sampler.first_index,))
        )
        self.batches = open_loader(
            _Batches(dataset, collate, Randomness(seed, AUGMENTING, self.cell), place),
            self._keys,
            seed=seed,
            workers=workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            is_persistent=is_persistent,
            timeout_s=timeout_s,
            worker_init=worker_init,
            start_method=start_method,
        )
        """Torch's loader. To put something around it that draws ahead, iterate over ``sampler.follow(...)`` of that."""
        self._meeting: Meeting | None = None
        if is_compared:
            meeting = Meeting(
                state,
                type(dataset).__name__,
                over_cells=is_common,
                advice=ADVICE_COMMON if is_common else ADVICE_CELL,
                # The samples that are compared do not depend on the seed.
                kind=f"{part if isinstance(part, str) else ''} {batch_size} {seed}",
                length=len(dataset),
            )
            self._meeting = meeting if meeting.is_needed else None

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of the epoch, then stand at the start of the next one."""
        return self.sampler.follow(self.batches if self._meeting is None else self._compared())

    def __len__(self) -> int:
        """Count the batches of a whole epoch."""
        return self.sampler.steps

    def _compared(self) -> Iterator[Any]:
        """Yield the batches, once the ranks have compared samples; they are read where the batches are."""
        meeting = self._meeting
        self._meeting = None
        self._keys.begin_with_probe = True
        assert meeting is not None, "only called with one"
        try:
            batches = iter(self.batches)  # with workers it asks for the keys twice
            self._keys.begin_with_probe = False
            first = next(batches)
        except Exception as error:
            self._keys.begin_with_probe = False
            with suppress(ConfigError):  # the others would wait for this rank
                meeting.compare(FirstSamples(error=f"{type(error).__name__}: {error}"))
            raise
        meeting.compare(replace(first, layout=f"identity {identity_of(self.dataset)!r}"))
        yield from batches

    @property
    def batch_samples(self) -> int:
        """This rank's samples in the batch that was yielded last; 0 at the start of an epoch."""
        return self.sampler.samples_of(self.position - 1) if self.position else 0

    @property
    def samples_seen(self) -> int:
        """Samples that the whole cell has taken since the first epoch; ranks that share a part count once."""
        return self.sampler.samples_seen

    @property
    def epoch(self) -> int:
        """The epoch that comes next, or is being drawn, from 0."""
        return self.sampler.at.epoch

    @property
    def position(self) -> int:
        """Batches of the epoch that the loop has taken."""
        return self.sampler.at.batches

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; the current one keeps its position, another starts at its first batch. Local."""
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop stands; local, and the same on all ranks of the cell."""
        return {**self.sampler.state_dict(), "dataset": identity_of(self.dataset)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a loop stood; local, and to be called on all ranks of the cell, before iterating.

        :param state: What :meth:`state_dict` returned on a rank of this cell.
        :raises ConfigError: if it is of other data, another shuffling, or other steps than this loader's.
        """
        if state.get("dataset", "") != identity_of(self.dataset):
            raise ConfigError(
                f"the loader's state was saved with dataset {state.get('dataset')!r}, but this one is "
                f"{identity_of(self.dataset)!r}; give the same data, or start epoch {state.get('epoch')} anew with "
                "set_epoch"
            )
        self.sampler.load_state_dict(state)


@takes_state
def parts_by_ranks(samples: int, state: Placed | DataPlace, *, seed: int = 0) -> Partition:
    """Deal so many samples out to the cells at random, in proportion to the ranks that take data; local.

    So all cells make equally many steps in an epoch, but for rounding.
    """
    place = place_of(state)
    return iid(samples, place.cells, seed=seed, shares=cell_shares(place.topology))


def _part_of(
    dataset: Any, state: Placed | DataPlace, part: Partition | npt.ArrayLike | None, seed: int
) -> Partition | npt.ArrayLike:
    """Return the partition, or the cell's own indices."""
    count = len(dataset)
    if part is None:
        return parts_by_ranks(count, state, seed=seed)
    if isinstance(part, str):
        one_of("part", part, [OWN, WHOLE], hint="or give a Partition, indices or None")
        return np.arange(count)
    if isinstance(part, Partition):
        if part.samples != count:
            raise ConfigError(
                f"the partition is of {part.samples} samples, but the dataset has {count}; make it for this dataset"
            )
        return part
    indices = index_array("part", part)
    if len(indices) and (indices.min() < 0 or indices.max() >= count):
        raise ConfigError(
            f"the part has samples {indices.min()} to {indices.max()}, but the dataset has {count}; count from 0 to "
            f"{count - 1}"
        )
    return indices


# Loaders of the user's ------------------------------------------------------------------------------------------------


@takes_state
def adopt_loader(
    loader: Any,
    state: Placed | DataPlace,
    *,
    part: Partition | npt.ArrayLike | None = None,
    seed: int = 0,
    is_compared: bool = True,
) -> Any:
    """Turn a plain ``DataLoader`` into a :class:`CellLoader` of the same dataset; local.

    Batch size, workers, collate function, ``drop_last`` and the rest are kept, and samples are shuffled if the loader
    does so. Its generator is not used: ``seed`` decides. A ``DistributedSampler`` is replaced, as a cell's ranks share
    the samples here anyway. Batches are in pinned memory if the loader says so, or where there is CUDA.

    :param loader: A ``DataLoader`` with ``shuffle`` True or False. A loader that keeps its own position (one with
        ``state_dict`` and ``load_state_dict``) is returned as it is.
    :param state: The state of this process, as in :class:`CellLoader`.
    :param part: Which samples are the cell's, as in :class:`CellLoader`.
    :param seed: Of the parts, the shuffling and the augmentation.
    :param is_compared: Whether ranks compare what they read first, as in :class:`CellLoader`.
    :return: The loader to use.
    :raises ConfigError: if the loader draws samples in a way that cannot be shared out.
    """
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return loader
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"loader must be a DataLoader, or have state_dict and load_state_dict, got a {type(loader).__name__}"
        )
    return CellLoader(
        loader.dataset,
        state,
        part=part,
        seed=seed,
        drop_last=loader.drop_last,
        is_persistent=loader.persistent_workers,
        timeout_s=loader.timeout,
        worker_init=loader.worker_init_fn,
        **options_of(loader),
        is_shuffled=_is_shuffled(loader.sampler),
        is_compared=is_compared,
    )


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the options of a plain loader of all samples that training and validation share; raise for others."""
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            f"the DataLoader reads the stream {type(loader.dataset).__name__}, which has no index to share out; take "
            "CellStream(dataset, state, batch_size=...)"
        )
    if type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
        raise ConfigError(
            f"the DataLoader has batch_size {loader.batch_size} and batch_sampler "
            f"{type(loader.batch_sampler).__name__}, so its samples cannot be shared out over ranks; give it a "
            "batch_size and shuffle, and choose samples with torch.utils.data.Subset"
        )
    _is_shuffled(loader.sampler)
    return {
        "batch_size": loader.batch_size,
        "workers": loader.num_workers,
        "pin_memory": loader.pin_memory or None,
        "prefetch_factor": loader.prefetch_factor or 2,
        "collate": loader.collate_fn,
        "start_method": loader.multiprocessing_context,
    }


def _is_shuffled(sampler: Any) -> bool:
    """Say whether a sampler shuffles; refuse one that does anything else."""
    if type(sampler) is SequentialSampler:
        return False
    if type(sampler) is DistributedSampler:
        return sampler.shuffle
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return True
    raise ConfigError(
        f"the DataLoader draws by {type(sampler).__name__}, which cannot be shared out over ranks; give it "
        "shuffle=True or False, and choose samples with torch.utils.data.Subset"
    )


# Validation -----------------------------------------------------------------------------------------------------------


class ValidationLoader(Iterable[Any]):
    """One rank's share of a dataset, in the dataset's order; each ``iter()`` starts at the beginning.

    Where a step has fewer samples than there are ranks, those without one get a batch of one sample that does not
    count, since the forward pass of a sharded model is collective. :attr:`batch_samples` is 0 then, and the length of
    the batch otherwise: it is the weight of what the batch gives. Real batches are never filled up::

        for batch in loader:
            loss = step(batch)  # on all ranks
            total += float(loss) * loader.batch_samples
            count += loader.batch_samples

    Sums of these over the ranks that share the samples out, divided, are the exact mean. Ranks that share a part of the
    data (tensor, context or pipeline parallel) have the same batches; count one of them.

    Local. Random draws of the dataset are the same at each pass, and leave the global generators as they were.

    :param dataset: Map-style, the same on all ranks that share it out.
    :param place: Which part this rank takes, from 0.
    :param places: How many parts there are.
    :param batch_size: Samples of each rank in a step, at most.
    :param seed: Of what the dataset draws.
    :param workers: Processes that read ahead; 0 reads in this process.
    :param pin_memory: Whether batches are put into pinned memory; ``None`` where there is CUDA.
    :param prefetch_factor: Batches that each worker reads ahead.
    :param collate: Makes a batch of a list of samples; ``None`` takes torch's ``default_collate``.
    :param start_method: How workers start, such as ``"fork"``; ``None`` is Python's default.
    :raises ConfigError: if an argument is invalid, or the dataset is empty.
    """

    def __init__(
        self,
        dataset: Any,
        place: int,
        places: int,
        *,
        batch_size: int,
        seed: int = 0,
        workers: int = 0,
        pin_memory: bool | None = None,
        prefetch_factor: int = 2,
        collate: Callable[[list[Any]], Any] | None = None,
        start_method: Any = None,
    ) -> None:
        _check_indexed(dataset)
        self.dataset = dataset
        self.batch_size = integer("batch_size", batch_size, 1)
        self.samples = len(dataset)
        """Samples of all ranks that share them out."""
        if not self.samples:
            raise ConfigError("the dataset for validation has no samples; give it some, or do not validate")
        self.steps = -(-self.samples // (self.batch_size * places))
        """Batches of a pass: the same number on all ranks that share the samples out."""
        self.batch_samples = 0
        """Samples that count in the batch that was yielded last."""
        self._shares = _Shares(samples=self.samples, steps=self.steps, place=place, places=places)
        self.batches = open_loader(
            _Batches(dataset, collate, Randomness(seed, AUGMENTING), place),
            self._shares,
            seed=seed,
            workers=workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            start_method=start_method,
        )
        """Torch's loader."""

    def __iter__(self) -> Iterator[Any]:
        """Yield all batches, from the first."""
        for step, batch in enumerate(self.batches):
            self.batch_samples = len(self.share(step))
            yield batch

    def __len__(self) -> int:
        """Count the batches."""
        return self.steps

    def share(self, step: int) -> range:
        """Return this rank's samples of a step."""
        return self._shares.of_step(step)


@takes_state
def validation_loader(
    dataset: Any,
    state: Placed | DataPlace,
    *,
    batch_size: int,
    over: Literal["cell", "federation"] = "cell",
    **options: Any,
) -> ValidationLoader:
    r"""Share a dataset out for validation; local, with the same arguments on all ranks.

    :param dataset: Map-style: for ``over="cell"`` all of what this rank's cell validates on, for ``"federation"`` the
        same in all cells.
    :param state: The state of this process, as in :class:`CellLoader`.
    :param batch_size: Samples of each rank in a step, at most.
    :param over: ``"cell"``: each cell counts all samples, which its ranks share out; ``"federation"``: the ranks of all
        cells share them out, and each sample is counted once in the world. Between rounds the cells' models differ;
        right after a round both give the same means. Where each cell is a job of its own its ranks are the world, since
        no reduction reaches those of other cells: both are the same.
    :param \**options: More of :class:`ValidationLoader`: workers, collate and others.
    :return: The loader.
    :raises ConfigError: if an argument is invalid, or the dataset is empty.
    """
    one_of("over", over, ["cell", "federation"])
    # What is summed up over the ranks of this job must be shared out over them, not over those of other jobs.
    at = place_of(state).in_job
    place, places = share_of(at)
    if over == "federation":
        counts = cell_shares(at.topology)
        place, places = sum(counts[: at.cell]) + place, sum(counts)
    return ValidationLoader(dataset, place, places, batch_size=batch_size, **options)


# Batches that can be made again ---------------------------------------------------------------------------------------


class Key(NamedTuple):
    """The name of one batch of one rank: which samples are in it, and which random stream belongs to it."""

    epoch: int
    step: int
    indices: npt.NDArray[np.int64]


class Probe(NamedTuple):
    """Samples that ranks compare, in the place of a batch's key."""

    indices: tuple[int, ...]


# Torch's loader holds its keys, which must not lead back to the loader of this file that holds it: Python's search for
# cycles closes the queues of workers before it tells them to end, and each of them is waited for for 5 s.


class _EpochKeys(Iterable[Key | Probe]):
    """The keys of the batches that are left of an epoch, drawn anew whenever torch's loader is iterated over."""

    def __init__(self, sampler: CellBatchSampler, probe: Probe) -> None:
        self._sampler = sampler
        self._probe = probe
        self.begin_with_probe = False
        """Whether the samples that ranks compare come before the first batch."""

    def __iter__(self) -> Iterator[Key | Probe]:
        epoch, begin = self._sampler.at.epoch, self._sampler.at.batches
        keys = (Key(epoch, step, indices) for step, indices in enumerate(self._sampler.draw(), start=begin))
        return chain([self._probe], keys) if self.begin_with_probe else keys

    def __len__(self) -> int:
        # Of what is left: torch's loader warns where it yields more or fewer than it says.
        return self._sampler.steps - self._sampler.at.batches


@dataclass(frozen=True)
class _Shares(Iterable[Key]):
    """The keys of the batches of a pass over all samples, of which each rank has an even share of each step."""

    samples: int
    steps: int
    place: int
    places: int

    def __iter__(self) -> Iterator[Key]:
        # A rank without a sample reads the first one of the dataset.
        return (Key(0, step, np.array(self.of_step(step) or [0])) for step in range(self.steps))

    def __len__(self) -> int:
        return self.steps

    def of_step(self, step: int) -> range:
        """Return this rank's samples of a step."""
        start, stop = even_cut(self.samples, self.steps, step)
        first, last = even_cut(stop - start, self.places, self.place)
        return range(start + first, start + last)


class Randomness:
    """The global random generators of Python, numpy and torch (CPU), seeded for a while; local.

    Datasets and augmentations draw from them, and so does the model (dropout): each must not disturb the other.
    """

    def __init__(self, seed: int, *stream: int) -> None:
        self._stream = (integer("seed", seed, 0), *map(int, stream))
        # A generator of our own takes the place of numpy's: to copy the state of numpy's own takes longer than a batch.
        self._numpy = np.random.MT19937(0)

    @contextmanager
    def of(self, *numbers: int) -> Iterator[None]:
        """Seed the generators by these numbers, and set them back at the end."""
        digest = hashlib.blake2b(repr((*self._stream, *map(int, numbers))).encode(), digest_size=20).digest()
        generator = torch.default_generator
        numpy_random: Any = np.random  # numpy's annotations lack what its documentation names
        kept = random.getstate(), generator.get_state(), numpy_random.get_bit_generator()
        numpy_random.set_bit_generator(self._numpy)
        try:
            random.seed(int.from_bytes(digest[:8], "little"))
            # Not torch.manual_seed: that would seed the accelerators, too.
            generator.manual_seed(int.from_bytes(digest[8:16], "little"))
            np.random.seed(int.from_bytes(digest[16:20], "little"))
            yield
        finally:
            random.setstate(kept[0])
            generator.set_state(kept[1])
            numpy_random.set_bit_generator(kept[2])


READS = 6
"""How often two samples are read to see whether the dataset draws: a coin for each goes unseen on one rank in 1,000"""


class _Batches(Dataset[Any]):
    """A dataset of samples as one of collated batches; the draws of each ``place`` (a rank's part) are its own."""

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any] | None, randomness: Randomness, place: int
    ) -> None:
        self._dataset = dataset
        self._collate = collate or default_collate
        self._randomness = randomness
        self._place = place
        self._probing = Randomness(0)  # the same on all ranks, of whatever cell
        self._rows = tensor_rows(dataset) if self._collate is default_collate else None
        inner = dataset
        while type(inner) is Subset:
            inner = inner.dataset
        draws = type(inner) is not TensorDataset and bool(getattr(inner, "is_random", True))
        self._is_random = draws or self._collate is not default_collate

    def __getitem__(self, key: Key | Probe) -> Any:
        if isinstance(key, Probe):
            return self._probed(key)
        if self._rows is not None:
            tensors, places = self._rows
            chosen = torch.from_numpy(key.indices)
            if places is not None:
                chosen = places.index_select(0, chosen)
            return [tensor.index_select(0, chosen) for tensor in tensors]
        with self._randomness.of(key.epoch, key.step, self._place) if self._is_random else nullcontext():
            return self._collate(self._read(key.indices.tolist()))

    def _read(self, indices: list[int]) -> list[Any]:
        # Some datasets read many samples faster together; torch's own loader asks in the same way.
        together = getattr(self._dataset, "__getitems__", None)
        return list(together(indices)) if together else [self._dataset[index] for index in indices]

    def _probed(self, probe: Probe) -> FirstSamples:
        """Read some samples several times, with the global generators seeded alike on all ranks."""
        first: FirstSamples | None = None
        for _ in range(READS if self._is_random else 1):
            with self._probing.of():
                again = FirstSamples.of(self._read(list(probe.indices)), (0, 0))
            if first is not None and first.bits != again.bits:
                return FirstSamples(is_random=True)  # by a generator of its own
            first = again
        assert first is not None, "samples are read at least once"
        return first


def tensor_rows(dataset: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None] | None:
    """Return the tensors of a ``TensorDataset`` or a subset of one, and the rows that are its samples (None: all).

    Their rows make a batch in one go, the same as ``default_collate`` of its samples. None for any other dataset.
    """
    places: torch.Tensor | None = None
    while type(dataset) is Subset:
        inner = torch.as_tensor(dataset.indices)
        if inner.dim() != 1 or inner.dtype != torch.int64 or not len(inner) or inner.min() < 0:
            return None
        places = inner if places is None else inner[places]
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or any(tensor.layout != torch.strided for tensor in dataset.tensors):
        return None
    return dataset.tensors, places


def _check_indexed(dataset: Any) -> None:
    is_indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not is_indexed:
        raise ConfigError(
            f"dataset must have __len__ and __getitem__, got a {type(dataset).__name__}; take CellStream for a stream "
            "of samples"
        )


def identity_of(dataset: Any) -> str:
    """Return the attribute ``identity`` of a dataset, or of the one that it is a subset of; empty without one."""
    if type(dataset) is Subset and (inner := identity_of(dataset.dataset)):
        indices = np.asarray(dataset.indices).astype("<i8")
        return f"{inner} {hashlib.sha256(indices.tobytes()).hexdigest()}"
    return str(getattr(dataset, "identity", ""))


def open_loader(
    batches: Dataset[Any],
    keys: Iterable[Key | Probe] | None,
    *,
    seed: int,
    workers: int,
    pin_memory: bool | None,
    prefetch_factor: int,
    is_persistent: bool = True,
    timeout_s: float = 0,
    worker_init: Callable[[int], None] | None = None,
    start_method: Any = None,
) -> DataLoader[Any]:
    """Return torch's loader of whole batches, by key or (``keys`` None) of a stream of them; local."""
    count = integer("workers", workers, 0)
    ahead = integer("prefetch_factor", prefetch_factor, 1)
    try:
        return DataLoader(
            batches,
            batch_size=None,
            sampler=keys,
            num_workers=count,
            collate_fn=_unchanged,
            pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
            timeout=timeout_s if count else 0,
            worker_init_fn=worker_init,
            multiprocessing_context=start_method if count else None,
            # Without one, every iter() would draw from torch's global generator, and a resumed run draw other dropout.
            generator=torch.Generator().manual_seed(integer("seed", seed, 0) % 2**63),
            prefetch_factor=ahead if count else None,
            persistent_workers=is_persistent and bool(count),
        )
    except (ValueError, TypeError) as wrong:
        raise ConfigError(
            f"torch's DataLoader refuses timeout_s {timeout_s!r} or start_method {start_method!r}: {wrong}"
        ) from wrong


def _unchanged(batch: Any) -> Any:
    """Return a batch, which is collated already; a function of the module, since workers pickle it."""
    return batch
