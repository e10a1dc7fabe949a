"""The data: scikit-learn's handwritten digits, held-out part, each cell's part, and the batches of each rank.

1,797 real images of 8 x 8 pixels (E. Alpaydin and C. Kaynak, 1998), installed with scikit-learn: no download.
The split, the model's initialization and each cell's shuffling draw from random streams of their own, so that changing
one leaves the others as they are.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from sklearn.datasets import load_digits

CLASSES = 10
VALIDATION_SHARE = 0.2

# Names of the random streams; with the seed they start a generator each.
SPLIT, PARTS, INITIALIZATION, SHUFFLING = range(4)


def random_stream(seed: int, *stream: int) -> np.random.Generator:
    """Return the generator of one purpose: ``random_stream(seed, SHUFFLING, cell, epoch)``."""
    return np.random.default_rng((seed, *stream))


def load() -> tuple[np.ndarray, np.ndarray]:
    """Return the images, float32 (1797, 1, 8, 8) from 0 to 1, and their labels, int64 (1797,)."""
    images, labels = load_digits(return_X_y=True)
    return (images / 16.0).astype(np.float32).reshape(-1, 1, 8, 8), labels.astype(np.int64)


def split(labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices for training and for validation: a fifth of each class is held out."""
    stream = random_stream(seed, SPLIT)
    training, validation = [], []
    for digit in range(CLASSES):
        members = stream.permutation(np.flatnonzero(labels == digit))
        held_out = round(VALIDATION_SHARE * len(members))
        validation.append(members[:held_out])
        training.append(members[held_out:])
    return np.sort(np.concatenate(training)), np.sort(np.concatenate(validation))


def part_of_cell(
    training: np.ndarray, labels: np.ndarray, setting: str, cell: int, cells: int, seed: int
) -> np.ndarray:
    """Return the training indices that a cell owns.

    ``iid``: the samples are dealt out at random. ``noniid``: the classes are, so that of two cells one has the digits
    0 to 4 and the other 5 to 9.
    """
    if setting == "iid":
        return np.sort(np.array_split(random_stream(seed, PARTS).permutation(training), cells)[cell])
    return training[np.isin(labels[training], np.array_split(np.arange(CLASSES), cells)[cell])]


class Batches:
    """One rank's batches of its cell's data; iterating gives one epoch.

    Each epoch is shuffled anew, alike on all ranks of the cell. All of them make the same number of steps (FSDP is
    collective), every sample of the cell is taken exactly once by exactly one of them, and batches differ in size by at
    most one sample.
    """

    def __init__(self, indices: np.ndarray, batch_size: int, rank: int, ranks: int, stream: tuple[int, ...]) -> None:
        self.indices, self.rank, self.ranks, self.stream = indices, rank, ranks, stream
        self.steps = -(-len(indices) // (batch_size * ranks))
        self.epoch = 0

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[np.ndarray]:
        seed, *stream = self.stream
        shuffled = random_stream(seed, *stream, self.epoch).permutation(self.indices)
        self.epoch += 1
        for batch in np.array_split(shuffled, self.steps):
            yield np.array_split(batch, self.ranks)[self.rank]
