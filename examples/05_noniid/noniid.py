"""What both demonstrations share: the data in three parts, who has what, the network, and what is measured.

The images are those of ``examples/01_digits``. A fifth of each class is the *test* part, of which only results are
reported. A fifth of the rest is the *validation* part, on which learning rates and the like are chosen. Both cuts are
the same for all seeds, so that no image on which something was chosen is ever tested on. A seed decides which cell has
which samples, the initialization, and the order of the batches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from xffl.training.data import partition
from xffl.training.data.sampler import CellBatchSampler

sys.path.append(str(Path(__file__).resolve().parents[1] / "01_digits"))
import digits

__all__ = ["BATCH_SIZE", "CELLS", "Data", "build_model", "deal", "epochs", "initialize", "load", "measure"]

CELLS = 4
BATCH_SIZE = 16
"""Samples of a step in each of four cells; the centralized run takes as many as these together."""
TEST_SPLIT, VALIDATION_SPLIT = 0, 1
"""Seeds of the two cuts."""


@dataclass(frozen=True)
class Data:
    """Images (N, 1, 8, 8) from 0 to 1 and labels (N,), in three parts."""

    training: tuple[torch.Tensor, torch.Tensor]
    validation: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]

    @property
    def labels(self) -> np.ndarray:
        """The labels of the training part, which partitions are made from."""
        labels: np.ndarray = self.training[1].numpy()
        return labels


def load() -> Data:
    """Read the images and cut them: 1,151 to train on, 287 to choose on, 359 to test on."""
    images, labels = digits.load()
    rest, test = digits.split(labels, TEST_SPLIT)
    training, validation = (rest[part] for part in digits.split(labels[rest], VALIDATION_SPLIT))
    return Data(
        *((torch.from_numpy(images[part]), torch.from_numpy(labels[part])) for part in (training, validation, test))
    )


def deal(labels: np.ndarray, cells: int, setting: str, seed: int) -> partition.Partition:
    """Deal the training part out.

    ``noniid``: sorted by label and cut into as many shards as there are cells, so that of four each has two classes and
    a half. ``iid``: at random.
    """
    if setting == "iid":
        return partition.iid(labels, cells, seed=seed)
    return partition.shards(labels, cells, shards_per_cell=1, seed=seed)


def build_model() -> nn.Module:
    """Return a network of one hidden layer: 4,810 parameters, and no buffers.

    BatchNorm would be another experiment. Its running means are buffers, which a round averages without the server's
    step, and its batch statistics differ with the classes that a cell has.
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, digits.CLASSES))


def initialize(seed: int) -> nn.Module:
    """Return the network with the initial weights of a seed, the same on all ranks."""
    torch.manual_seed(int(digits.random_stream(seed, digits.INITIALIZATION).integers(2**31)))
    return build_model()


def epochs(sampler: CellBatchSampler, count: int) -> Iterator[list[int]]:
    """Yield the batches of some epochs, each in an order of its own."""
    for epoch in range(count):
        sampler.set_epoch(epoch)
        yield from sampler


@torch.no_grad()
def measure(model: nn.Module, part: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, float]:
    """Return the accuracy and the mean loss over a whole part; local."""
    images, labels = part
    logits = model(images)
    loss = nn.functional.cross_entropy(logits, labels).item()
    return (logits.argmax(dim=1) == labels).double().mean().item(), loss
