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
import torch.distributed as dist
from torch import nn

import xffl
from xffl.training import partition
from xffl.training.sampler import CellBatchSampler

sys.path.append(str(Path(__file__).resolve().parents[1] / "01_digits"))
import digits

__all__ = ["BATCH_SIZE", "CELLS", "Data", "Measure", "build_model", "deal", "initialize", "load", "samplers_epochs"]

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


def samplers_epochs(sampler: CellBatchSampler, epochs: int) -> Iterator[list[int]]:
    """Yield the batches of some epochs, each in an order of its own."""
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        yield from sampler


class Measure:
    """Measures a model that is the same on all ranks; they share the images out."""

    def __init__(self, model: nn.Module, part: tuple[torch.Tensor, torch.Tensor], state: xffl.DistributedState) -> None:
        self.model = model
        self.images, self.labels = (tensor[state.rank :: state.world_size] for tensor in part)

    @torch.no_grad()
    def __call__(self) -> tuple[float, float]:
        """Return the accuracy and the mean loss over the whole part; collective over the world."""
        logits = self.model(self.images)
        loss = nn.functional.cross_entropy(logits, self.labels, reduction="sum").item()
        correct = (logits.argmax(dim=1) == self.labels).sum().item()
        totals = torch.tensor([correct, loss, len(self.labels)], dtype=torch.float64)
        dist.all_reduce(totals)
        correct, loss, count = totals.tolist()
        return correct / count, loss / count
