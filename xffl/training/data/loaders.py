"""Loaders: each rank's batches of its cell's samples, resumable to the sample, on torch's ``DataLoader``.

Nothing here communicates. All ranks of a cell make the same number of batches, so the collectives of its model meet.
:mod:`xffl.training.data.validation` is for counting everything once, :mod:`xffl.training.data.streams` for data without
an index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from xffl.errors import ConfigError
from xffl.topology import Topology
from xffl.training.data.batches import Batches, Key, Randomness, check_indexed, identity_of, read
from xffl.training.data.partition import iid
from xffl.training.data.parts import Partition
from xffl.training.data.rng import AUGMENTING
from xffl.training.data.sampler import CellBatchSampler, data_place
from xffl.training.data.streams import CellStream
from xffl.training.data.validation import validation_loader

__all__ = ["CellLoader", "adopt_loader", "options_of", "parts_by_ranks", "validation_loader"]


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

    Local. All ranks of a cell give the same arguments, except ``rank``, and make the same calls.

    :param dataset: Map-style: torch's, a Hugging Face ``Dataset``, a list.
    :param topology: The federation, ``state.topology``.
    :param rank: This process's global rank.
    :param batch_size: Samples of each rank in a step, at most.
    :param part: Which samples are the cell's: a partition of the dataset, this cell's own indices, ``"own"`` where the
        dataset is this cell's alone, or ``None`` to deal the dataset out at random by ``seed``, to each cell as many
        samples as its ranks can take (:func:`parts_by_ranks`).
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
    :raises ConfigError: if an argument cannot be meant, or a rank would have no sample in some step.
    """

    def __init__(
        self,
        dataset: Any,
        topology: Topology,
        rank: int,
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
    ) -> None:
        check_indexed(dataset)
        self.dataset = dataset
        self.sampler = CellBatchSampler(
            _part_of(dataset, topology, part, seed),
            topology,
            rank,
            batch_size=batch_size,
            seed=seed,
            is_shuffled=is_shuffled,
            drop_last=drop_last,
            is_padded=is_padded,
        )
        """Which samples come, and where the loop stands."""
        place, _ = data_place(topology, rank)
        self.batches = read(
            Batches(dataset, collate, Randomness(seed, AUGMENTING, self.cell), place),
            _Keys(self.sampler),
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

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of the epoch, then stand at the start of the next one."""
        return self.sampler.follow(self.batches)

    def __len__(self) -> int:
        """Count the batches of a whole epoch."""
        return self.sampler.steps

    @property
    def cell(self) -> int:
        """The rank's cell."""
        return self.sampler.cell

    @property
    def batch_size(self) -> int:
        """Samples of each rank in a step, at most."""
        return self.sampler.batch_size

    @property
    def batch_samples(self) -> int:
        """This rank's samples in the batch that was yielded last; 0 at the start of an epoch."""
        return self.sampler.samples_of(self.position - 1) if self.position else 0

    @property
    def samples(self) -> int:
        """Samples of the whole cell in an epoch."""
        return self.sampler.samples

    @property
    def samples_seen(self) -> int:
        """Samples that the whole cell has taken since the first epoch; ranks that share a part count once."""
        return self.sampler.samples_seen

    @property
    def epoch(self) -> int:
        """The epoch that comes next, or is being drawn, from 0."""
        return self.sampler.epoch

    @property
    def position(self) -> int:
        """Batches of the epoch that the loop has taken."""
        return self.sampler.position

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; the current one keeps its position, another starts at its first batch. Local.

        :param epoch: From 0.
        :raises ConfigError: if it is no such number.
        """
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop stands; local, and the same on all ranks of the cell.

        :return: Numbers and strings only, for :meth:`load_state_dict`.
        """
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


def parts_by_ranks(samples: int, topology: Topology, *, seed: int = 0) -> Partition:
    """Deal samples out to the cells at random, in proportion to the ranks that take data; local.

    So all cells make equally many steps in an epoch, but for rounding.

    :param samples: Length of the dataset.
    :param topology: The federation.
    :param seed: Of the random order.
    :return: The partition, the same on all ranks.
    :raises ConfigError: if there are fewer samples than cells.
    """
    shares = [data_place(topology, topology.federation(cell)[0])[1] for cell in range(topology.cells)]
    return iid(samples, topology.cells, seed=seed, shares=shares)


def adopt_loader(
    loader: Any, topology: Topology, rank: int, *, part: Partition | npt.ArrayLike | None = None, seed: int = 0
) -> Any:
    """Turn a plain ``DataLoader`` into a :class:`CellLoader` of the same dataset; local.

    Batch size, workers, collate function, ``drop_last`` and the rest are kept, and samples are shuffled if the loader
    does so. Its generator is not used: ``seed`` decides. A ``DistributedSampler`` is replaced, as a cell's ranks share
    the samples here anyway. Batches are in pinned memory if the loader says so, or where there is CUDA.

    :param loader: A ``DataLoader`` with ``shuffle`` True or False. A loader that keeps its own position (one with
        ``state_dict`` and ``load_state_dict``) is returned as it is.
    :param topology: The federation, ``state.topology``.
    :param rank: This process's global rank.
    :param part: Which samples are the cell's, as in :class:`CellLoader`.
    :param seed: Of the parts, the shuffling and the augmentation.
    :return: The loader to use.
    :raises ConfigError: if the loader draws samples in a way that cannot be shared out.
    """
    if isinstance(loader, CellLoader | CellStream) or (
        hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    ):
        return loader
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"{type(loader).__name__} is no DataLoader; give one, or a loader with state_dict and load_state_dict"
        )
    options = options_of(loader)
    return CellLoader(
        loader.dataset,
        topology,
        rank,
        part=part,
        seed=seed,
        is_shuffled=_is_shuffled(loader.sampler),
        drop_last=loader.drop_last,
        is_persistent=loader.persistent_workers,
        timeout_s=loader.timeout,
        worker_init=loader.worker_init_fn,
        **options,
    )


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return what a plain ``DataLoader`` of all samples says, as options for training and for validation; local.

    :param loader: The loader.
    :return: Options of :class:`CellLoader` and of :class:`~xffl.training.data.validation.ValidationLoader`.
    :raises ConfigError: if the loader draws samples in a way that cannot be shared out.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            f"the DataLoader reads the stream {type(loader.dataset).__name__}, which has no index to share out; take "
            "CellStream(dataset, topology, rank, batch_size=...)"
        )
    if type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
        raise ConfigError(
            f"the DataLoader has batch_size {loader.batch_size} and batch_sampler "
            f"{type(loader.batch_sampler).__name__}, so who takes which samples is not known; give it a batch_size and "
            "shuffle, and choose samples with torch.utils.data.Subset"
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


def _part_of(
    dataset: Any, topology: Topology, part: Partition | npt.ArrayLike | None, seed: int
) -> Partition | npt.ArrayLike:
    """Return the partition, or the cell's own indices."""
    count = len(dataset)
    if part is None:
        return parts_by_ranks(count, topology, seed=seed)
    if isinstance(part, str):
        if part != "own":
            raise ConfigError(f'part {part!r} is unknown; give "own", a Partition, indices, or None')
        return np.arange(count)
    if isinstance(part, Partition):
        if part.samples != count:
            raise ConfigError(
                f"the partition is of {part.samples} samples, but the dataset has {count}; make it for this dataset"
            )
        return part
    try:
        given: npt.NDArray[Any] = np.asarray(part)
    except ValueError as wrong:  # lists of unequal lengths
        raise ConfigError(f"the part is no array ({wrong}); give a Partition, or a 1-D array of indices") from wrong
    is_whole = given.ndim == 1 and len(given) and np.issubdtype(given.dtype, np.integer)  # the sampler tells if not
    if is_whole and (given.min() < 0 or given.max() >= count):
        raise ConfigError(
            f"the part has samples {given.min()} to {given.max()}, but the dataset has {count}; count from 0 to "
            f"{count - 1}"
        )
    return given


class _Keys(Iterable[Key]):
    """The keys of the batches that a sampler draws."""

    def __init__(self, sampler: CellBatchSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[Key]:
        epoch, position = self._sampler.epoch, self._sampler.position
        return (Key(epoch, step, indices) for step, indices in enumerate(self._sampler.draw(), start=position))

    def __len__(self) -> int:
        # Of what is left: torch's loader warns where it yields more or fewer than it says.
        return self._sampler.steps - self._sampler.position
