"""Two small trainings whose last loss is worth comparing: handwritten digits, and a language model on Python's help.

Both use data that come with what is installed: scikit-learn's digits (``examples/01_digits``), and the 465,048
characters of English in ``pydoc_data.topics``. Cells differ: each owns half of the digits, or every other topic. All
learning rates fall to zero, as in trainings that are meant to end: what a last step happened to do counts little.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import xffl
from xffl.aggregation.compression import ErrorFeedback
from xffl.aggregation.engine.stages import codecs

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "01_digits"))
import digits
from train import build_model

__all__ = ["TASKS", "Ended", "Task", "train", "without_feedback"]

Batch = tuple[torch.Tensor, torch.Tensor]
CONTEXT = 64
WIDTH, HEADS, LAYERS = 64, 4, 2
TOPIC_HELD_OUT = 0.1


@dataclass(frozen=True)
class Task:
    """A training, the same in all runs but for what its rounds do.

    :param build: Makes the model, from torch's seed.
    :param optimizer: Makes its optimizer.
    :param batches: Yields as many batches as asked for, for a cell, a rank in it, and a seed.
    :param data: The data to measure a loss on, the same on all ranks: what was trained on, and what was held out.
    :param steps: Steps in the benchmark.
    :param every: Steps between two rounds.
    """

    build: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batches: Callable[[xffl.DistributedState, int, int], Iterator[Batch]]
    data: Callable[[int], tuple[Batch, Batch]]
    steps: int
    every: int


@dataclass(frozen=True)
class Ended:
    """How a training ended.

    :param training: Mean loss on the training data of all cells.
    :param validation: Mean loss on what was held out.
    :param bytes_across: Bytes that one cell sent to the others in a round, the first and the last left out.
    :param codec_error: The mean of what the codec left out in a round, relative; 0 without one.
    """

    training: float
    validation: float
    bytes_across: float
    codec_error: float


class Forgetful(ErrorFeedback):
    """What a codec would be without error feedback; the package offers no such option."""

    def commit(self, stage: torch.Tensor | None) -> torch.Tensor | None:
        spare = super().commit(stage)
        self._residuals.clear()
        return spare


@contextmanager
def without_feedback() -> Iterator[None]:
    """Let aggregators that are made in the block forget what their codecs leave out."""
    with mock.patch.object(codecs, "ErrorFeedback", Forgetful):
        yield


def _digits_of(state: xffl.DistributedState, steps: int, seed: int) -> Iterator[Batch]:
    """Yield batches of 16 samples a rank, epoch after epoch."""
    at = state.topology.coordinates(state.rank)
    images, labels = digits.load()
    training, _ = digits.split(labels, seed)
    part = digits.part_of_cell(training, labels, "iid", at.cell, state.topology.cells, seed)
    batches = digits.Batches(part, 16, at.local_rank, state.topology.sizes[at.cell], (seed, digits.SHUFFLING, at.cell))
    made = 0
    while made < steps:
        for batch in batches:
            if made == steps:
                return
            yield torch.from_numpy(images[batch]), torch.from_numpy(labels[batch])
            made += 1


def _digits_measured(seed: int) -> tuple[Batch, Batch]:
    images, labels = digits.load()
    training, held_out = (
        (torch.from_numpy(images[part]), torch.from_numpy(labels[part])) for part in digits.split(labels, seed)
    )
    return training, held_out


class LanguageModel(nn.Module):
    """A transformer decoder over characters: (N, CONTEXT) characters -> (N, vocabulary, CONTEXT) logits of the next."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, vocabulary)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.characters(text) + self.positions, mask=self.mask, is_causal=True)
        logits: torch.Tensor = self.head(hidden)
        return logits.transpose(1, 2)


def _texts() -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """Return the beginnings of the topics in the order of their names, their held-out ends, and the vocabulary."""
    names = sorted(topics)
    vocabulary = sorted(set("\n".join(topics[name] for name in names)))
    number = {character: index for index, character in enumerate(vocabulary)}
    training, held_out = [], []
    for name in names:
        text = torch.tensor([number[character] for character in topics[name]])
        cut = round((1.0 - TOPIC_HELD_OUT) * len(text))
        training.append(text[:cut])
        held_out.append(text[cut:])
    return training, held_out, len(vocabulary)


def _pieces(text: torch.Tensor, starts: np.ndarray) -> Batch:
    """Return pieces of a text, and the same one character later."""
    rows = torch.from_numpy(starts)[:, None] + torch.arange(CONTEXT + 1)
    pieces = text[rows]
    return pieces[:, :-1], pieces[:, 1:]


def _text_of(state: xffl.DistributedState, steps: int, seed: int) -> Iterator[Batch]:
    """Yield batches of 16 pieces a rank, from anywhere in the cell's topics."""
    at = state.topology.coordinates(state.rank)
    text = torch.cat(_texts()[0][at.cell :: state.topology.cells])
    ranks = state.topology.sizes[at.cell]
    for step in range(steps):
        stream = digits.random_stream(seed, digits.SHUFFLING, at.cell, step)
        starts = stream.integers(len(text) - CONTEXT, size=16 * ranks)
        yield _pieces(text, starts[at.local_rank :: ranks])


def _text_measured(seed: int) -> tuple[Batch, Batch]:
    """Return a tenth of the training text, evenly spread, and all that was held out."""
    training, held_out, _ = _texts()
    whole, rest = torch.cat(training), torch.cat(held_out)
    return (
        _pieces(whole, np.arange(0, len(whole) - CONTEXT, 10 * CONTEXT)),
        _pieces(rest, np.arange(0, len(rest) - CONTEXT, CONTEXT)),
    )


DIGITS = Task(
    build=build_model,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.02),
    batches=_digits_of,
    data=_digits_measured,
    steps=360,
    every=10,
)
TASKS = {
    "digits": DIGITS,
    "digits_fast": replace(DIGITS, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)),
    "text": Task(
        build=lambda: LanguageModel(_texts()[2]),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
        batches=_text_of,
        data=_text_measured,
        steps=300,
        every=20,
    ),
}
"""The tasks, by name. The fast one has the example's learning rate and momentum, and depends on chance."""


def train(
    task: Task, state: xffl.DistributedState, codec: str, *, seed: int, steps: int | None = None, moved: float = 0.0
) -> Ended:
    """Train a task from scratch, with a round every now and then, and measure what came of it.

    Collective over the world. Everything but the codec follows from the seed.

    :param task: One of :data:`TASKS`.
    :param state: The federation.
    :param codec: How parameters are written on the slow link.
    :param seed: Seed of the split, the initialization and the shuffling.
    :param steps: Steps of each cell; by default those of the task.
    :param moved: By which part of themselves initial weights are moved, at random.
    :return: The losses, the same on all ranks.
    """
    steps = task.steps if steps is None else steps
    torch.manual_seed(seed)
    whole = task.build()
    with torch.no_grad():
        for parameter in whole.parameters() if moved else ():
            parameter.mul_(1.0 + moved * torch.randn(parameter.shape))
    model = xffl.shard(whole, state)
    optimizer = task.optimizer(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    reports: list[xffl.RoundReport] = []
    aggregator = xffl.Aggregator(model, state, codec=codec)
    rounds = xffl.FederatedScaling(
        model, optimizer, state, every=task.every, on_round=reports.append, aggregator=aggregator
    )
    with rounds:
        for inputs, targets in task.batches(state, steps, seed):
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    between = reports[1 : steps // task.every]
    noted = torch.tensor(
        [[report.bytes_across, report.codec_error or 0.0] for report in between], dtype=torch.float64
    ).mean(0)
    dist.all_reduce(noted)
    sent, error = noted.tolist()
    training, validation = (loss_of(model, data) for data in task.data(seed))
    return Ended(training, validation, sent / state.topology.cells, error / state.world_size)


@torch.no_grad()
def loss_of(model: nn.Module, data: Batch, size: int = 256) -> float:
    """Return the mean loss of the model; all ranks of a cell call this together, since FSDP's forward is collective."""
    model.eval()
    total = count = 0.0
    for inputs, targets in zip(*(tensor.split(size) for tensor in data), strict=True):
        total += nn.functional.cross_entropy(model(inputs), targets, reduction="sum").item()
        count += targets.numel()
    model.train()
    return total / count
