"""Read batches through torch's ``DataLoader`` so that each of them can be made again: its samples and its random draws.

What the loaders of this folder share. The loader's "samples" are whole batches here: a key says which samples are in a
batch and which random stream belongs to it, so the process that reads it, and what it read before, do not matter.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from xffl.checks import integer
from xffl.errors import ConfigError

__all__ = [
    "Batches",
    "Columns",
    "Key",
    "Randomness",
    "as_is",
    "check_indexed",
    "find_columns",
    "identity_of",
    "is_pinned",
    "read",
]


class Key(NamedTuple):
    """One batch of one rank."""

    epoch: int
    step: int
    indices: npt.NDArray[np.int64]


class Randomness:
    r"""The global random generators of Python, numpy and torch (CPU), seeded for a while.

    Local. Datasets and augmentations draw from them, and so does the model (dropout): each must not disturb the other.

    :param seed: A whole number, 0 or more.
    :param \*stream: What the draws are for; streams of one seed are independent.
    """

    def __init__(self, seed: int, *stream: int) -> None:
        self._stream = (integer("seed", seed, 0), *map(int, stream))
        # A generator of our own takes the place of numpy's: to copy the state of numpy's own takes longer than a batch.
        self._numpy = np.random.MT19937(0)

    @contextmanager
    def of(self, *numbers: int) -> Iterator[None]:
        r"""Seed the generators, and set them back at the end.

        :param \*numbers: Which stream: the draws are the same whenever these are.
        """
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


class Batches(Dataset[Any]):
    """A dataset of samples as one of collated batches.

    :param dataset: Map-style: it has a length and takes an index.
    :param collate: Makes a batch of a list of samples; ``None`` takes torch's ``default_collate``.
    :param randomness: The stream of the cell.
    :param place: Which of the cell's parts the rank takes: each has draws of its own.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any] | None, randomness: Randomness, place: int
    ) -> None:
        self._dataset, self._collate = dataset, collate or default_collate
        self._randomness, self._place = randomness, place
        self._is_random = self._collate is not default_collate or _is_random(dataset)
        self._columns = find_columns(dataset) if self._collate is default_collate else None

    def __getitem__(self, key: Key) -> Any:
        if self._columns is not None:
            return self._columns.rows(key.indices)
        with self._randomness.of(key.epoch, key.step, self._place) if self._is_random else nullcontext():
            # Some datasets read many samples faster together; torch's own loader asks in the same way.
            together = getattr(self._dataset, "__getitems__", None)
            indices = key.indices.tolist()
            samples = together(indices) if together else [self._dataset[index] for index in indices]
            return self._collate(samples)


class Columns:
    """Tensors whose rows are samples: a batch is read in one go, and is what ``default_collate`` makes of its samples.

    :param tensors: The tensors.
    :param places: The rows that are samples, in order; ``None`` for all.
    """

    def __init__(self, tensors: tuple[torch.Tensor, ...], places: torch.Tensor | None) -> None:
        self._tensors, self._places = tensors, places

    def rows(self, indices: npt.NDArray[np.int64]) -> list[torch.Tensor]:
        """Return a batch.

        :param indices: Samples.
        :return: Their rows of each tensor.
        """
        chosen = torch.from_numpy(indices)
        if self._places is not None:
            chosen = self._places.index_select(0, chosen)
        return [tensor.index_select(0, chosen) for tensor in self._tensors]


def find_columns(dataset: Any) -> Columns | None:
    """Return the tensors of a ``TensorDataset``, or of a subset of one.

    :param dataset: Any.
    :return: The tensors and the rows; ``None`` where the dataset is something else.
    """
    places: torch.Tensor | None = None
    while type(dataset) is Subset:
        inner = torch.as_tensor(dataset.indices)
        if inner.dim() != 1 or inner.dtype != torch.int64 or not len(inner) or inner.min() < 0:
            return None
        places = inner if places is None else inner[places]
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or any(one.layout != torch.strided for one in dataset.tensors):
        return None
    return Columns(dataset.tensors, places)


def check_indexed(dataset: Any) -> None:
    """Refuse a dataset that has no length or takes no index.

    :param dataset: What was given as one.
    :raises ConfigError: if it is a stream, or no dataset.
    """
    is_indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not is_indexed:
        raise ConfigError(
            f"{type(dataset).__name__} is no dataset with a length and an index; give one that has __len__ and "
            "__getitem__, or take CellStream for a stream of samples"
        )


def identity_of(dataset: Any) -> str:
    """Return what a dataset, or the one that it is a subset of, says that it is.

    :param dataset: Any; it may have an attribute ``identity``.
    :return: Its text, or nothing.
    """
    if type(dataset) is Subset and (inner := identity_of(dataset.dataset)):
        indices = np.asarray(dataset.indices).astype("<i8")
        return f"{inner} {hashlib.sha256(indices.tobytes()).hexdigest()}"
    return str(getattr(dataset, "identity", ""))


def is_pinned(pin_memory: bool | None) -> bool:
    """Say whether batches are put into pinned memory.

    :param pin_memory: As asked for; ``None`` where there is CUDA.
    :return: Whether they are.
    """
    return torch.cuda.is_available() if pin_memory is None else pin_memory


def read(
    batches: Dataset[Any],
    keys: Iterable[Key] | None,
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
    """Return torch's loader of whole batches; local.

    :param batches: By key, or a stream of them.
    :param keys: Which batches, in order; ``None`` for a stream.
    :param seed: Of the numbers that torch's loader draws for itself.
    :param workers: Processes that read; 0 reads in this one.
    :param pin_memory: Whether batches are put into pinned memory; ``None`` where there is CUDA.
    :param prefetch_factor: Batches that each worker reads ahead.
    :param is_persistent: Whether workers live on over epochs.
    :param timeout_s: How long to wait for a worker's batch; 0 waits for ever.
    :param worker_init: Called in each worker with its number.
    :param start_method: How workers start, such as ``"fork"``; ``None`` is Python's default.
    :return: The loader.
    :raises ConfigError: if an argument cannot be meant.
    """
    count = integer("workers", workers, 0)
    ahead = integer("prefetch_factor", prefetch_factor, 1)
    try:
        return DataLoader(
            batches,
            batch_size=None,
            sampler=keys,
            num_workers=count,
            collate_fn=as_is,
            pin_memory=is_pinned(pin_memory),
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


def as_is(batch: Any) -> Any:
    """Return what is given: a batch is collated already.

    :param batch: The batch.
    :return: The same.
    """
    return batch


def _is_random(dataset: Any) -> bool:
    """Say whether a dataset may draw random numbers."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is not TensorDataset and bool(getattr(dataset, "is_random", True))
