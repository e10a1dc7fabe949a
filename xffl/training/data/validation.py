"""Validation: every sample is counted exactly once, while all ranks make the same number of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import numpy as np

from xffl.checks import integer
from xffl.errors import ConfigError
from xffl.topology import Topology
from xffl.training.data.batches import Batches, Key, Randomness, check_indexed, read
from xffl.training.data.rng import AUGMENTING
from xffl.training.data.sampler import data_place, even_cut

__all__ = ["ValidationLoader", "validation_loader"]

SCOPES = ("cell", "federation")


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
    :raises ConfigError: if an argument cannot be meant, or the dataset is empty.
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
        check_indexed(dataset)
        self.dataset = dataset
        self.batch_size = integer("batch_size", batch_size, 1)
        self.samples = len(dataset)
        """Samples of all ranks that share them out."""
        if not self.samples:
            raise ConfigError("the dataset for validation has no samples; give it some, or do not validate")
        self._place, self._places = place, places
        self.steps = -(-self.samples // (self.batch_size * places))
        """Batches of a pass: the same number on all ranks that share the samples out."""
        self.batch_samples = 0
        """Samples that count in the batch that was yielded last."""
        self.batches = read(
            Batches(dataset, collate, Randomness(seed, AUGMENTING), place),
            _Keys(self),
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
        """Return this rank's samples of a step.

        :param step: Number of the batch, from 0.
        :return: Their indices; none where the step has too few.
        """
        start, stop = even_cut(self.samples, self.steps, step)
        first, last = even_cut(stop - start, self._places, self._place)
        return range(start + first, start + last)


def validation_loader(
    dataset: Any,
    topology: Topology,
    rank: int,
    *,
    batch_size: int,
    over: Literal["cell", "federation"] = "cell",
    **options: Any,
) -> ValidationLoader:
    r"""Share a dataset out for validation; local, with the same arguments on all ranks except ``rank``.

    :param dataset: Map-style: for ``over="cell"`` all of what this rank's cell validates on, for ``"federation"`` the
        same in all cells.
    :param topology: The federation, ``state.topology``.
    :param rank: This process's global rank.
    :param batch_size: Samples of each rank in a step, at most.
    :param over: ``"cell"``: each cell counts all samples, which its ranks share out; ``"federation"``: the ranks of all
        cells share them out, and each sample is counted once in the world. Between rounds the cells' models differ;
        right after a round both give the same means.
    :param \**options: More of :class:`ValidationLoader`: workers, collate and others.
    :return: The loader.
    :raises ConfigError: if an argument cannot be meant, or the dataset is empty.
    """
    place, places = data_place(topology, rank)
    if over not in SCOPES:
        raise ConfigError(f"over {over!r} is unknown; give one of {', '.join(SCOPES)}")
    if over == "federation":
        counts = [data_place(topology, topology.federation(cell)[0])[1] for cell in range(topology.cells)]
        place, places = sum(counts[: topology.cell_of(rank)]) + place, sum(counts)
    return ValidationLoader(dataset, place, places, batch_size=batch_size, **options)


class _Keys(Iterable[Key]):
    """The keys of a pass. A rank without a sample reads the first one of the dataset."""

    def __init__(self, loader: ValidationLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Key]:
        return (Key(0, step, np.array(self._loader.share(step) or [0])) for step in range(self._loader.steps))

    def __len__(self) -> int:
        return self._loader.steps
