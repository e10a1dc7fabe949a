"""What a rank of ``diloco.py`` trains: a small byte-level language model on Python's help, with rounds or without.

The text is ``pydoc_data.topics``, 0.46 MB of English. Of each topic the first eight tenths are trained on, the next
tenth is for choosing learning rates, and the last tenth is held out. Cells differ: each owns every other topic.
Everything but the method follows from the seed: initial weights, the bytes of each step, the inner optimizer.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from wan_rank import CONTENDERS, Bench, Contender, locals_of

import xffl

__all__ = ["GRIDS", "NAMES", "STEPS", "Block", "Ended", "Method", "Rates", "Training", "make_method", "parameters"]

CONTEXT, WIDTH, HEADS, LAYERS = 64, 80, 4, 2
PIECES = 4
"""Pieces of text in a cell's step, whatever its number of ranks."""

STEPS, WARM_UP = 8000, 100
CUTS = (0.8, 0.9)
"""Where a topic's training part ends, and where its held-out part begins."""

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Method:
    """How the cells train together.

    :param algorithm: Given to :class:`xffl.FederatedScaling`; ``None``: no rounds.
    :param every: Local steps between two rounds.
    :param is_synchronous: Whether all ranks are one HSDP world instead, with a cell for each replica.
    """

    algorithm: Mapping[str, Any] | None = None
    every: int = 0
    is_synchronous: bool = False


@dataclass(frozen=True)
class Rates:
    """Learning rates of a method.

    :param inner: The highest of the inner optimizer.
    :param outer: That of the server; ``None`` without one.
    """

    inner: float
    outer: float | None = None

    def __str__(self) -> str:
        return f"inner {self.inner:g}" + ("" if self.outer is None else f", outer {self.outer:g}")


def streaming(outer: float) -> dict[str, Any]:
    return {"name": "streaming_diloco", "lr": outer, "fragments": 2, "delay": 5, "alpha": 0.5}


def make_method(name: str, rates: Rates | None = None) -> tuple[Method, Rates]:
    """Return a method of :data:`NAMES`, with rates other than the chosen ones if some are given."""
    family, _, every = name.partition("_")
    rates = rates or CHOSEN[family]
    if family in ("sync", "none"):
        return Method(is_synchronous=family == "sync"), rates
    algorithm = {
        "fedavg": {"name": "fedavg"},
        "diloco": {"name": "diloco", "lr": rates.outer},
        "streaming": streaming(rates.outer or 0.0),
    }[family]
    return Method(algorithm, int(every) // algorithm.get("fragments", 1)), rates  # type: ignore[call-overload]


INNER = (2e-3, 4e-3, 8e-3)
GRIDS: dict[str, list[Rates]] = {
    "sync": [Rates(inner) for inner in INNER],
    "fedavg": [Rates(inner) for inner in INNER],
    "diloco": [*(Rates(4e-3, outer) for outer in (0.3, 0.5, 0.7)), Rates(2e-3, 0.5)],
}
"""What ``choose`` tries for each algorithm, with 50 steps between rounds. DiLoCo takes over the inner rate of the other
two, and Streaming DiLoCo the outer one of DiLoCo."""

CHOSEN = {
    "sync": Rates(4e-3),
    "none": Rates(4e-3),
    "fedavg": Rates(4e-3),
    "diloco": Rates(4e-3, 0.5),
    "streaming": Rates(4e-3, 0.5),
}
"""What ``choose`` found, on a part of the text that is not held out and with a seed that is not reported."""

NAMES = (
    *("none", "sync", "fedavg_10", "fedavg_50", "fedavg_200"),
    *("diloco_10", "diloco_50", "diloco_200", "streaming_50"),
)
"""The contenders, by algorithm and by the steps after which a tensor crosses again."""


class LanguageModel(nn.Module):
    """A transformer decoder over bytes: (N, CONTEXT) bytes -> (N, 256, CONTEXT) logits of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.bytes(text) + self.positions, mask=self.mask, is_causal=True)
        logits: torch.Tensor = self.head(hidden)
        return logits.transpose(1, 2).contiguous()  # FSDP2 warns of views


def parameters() -> int:
    """Return the number of the model's parameters."""
    return sum(parameter.numel() for parameter in LanguageModel().parameters())


def texts(part: int) -> list[torch.Tensor]:
    """Return a part of each topic, in the order of their names: 0 to train on, 1 to choose by, 2 held out."""
    found = []
    for name in sorted(topics):
        text = torch.frombuffer(bytearray(topics[name].encode()), dtype=torch.uint8).long()
        first, second = (round(cut * len(text)) for cut in CUTS)
        found.append((text[:first], text[first:second], text[second:])[part])
    return found


def pieces(text: torch.Tensor, starts: np.ndarray) -> Batch:
    """Return pieces of a text, and the same one byte later."""
    rows = torch.from_numpy(starts)[:, None] + torch.arange(CONTEXT + 1)
    found = text[rows]
    return found[:, :-1], found[:, 1:]


def batches(state: xffl.DistributedState, seed: int) -> Iterator[Batch]:
    """Yield this rank's share of its cell's steps, without end."""
    at = state.topology.coordinates(state.rank)
    text = torch.cat(texts(0)[at.cell :: state.topology.cells])
    ranks, step = state.topology.sizes[at.cell], 0
    while True:
        starts = np.random.default_rng((seed, at.cell, step)).integers(len(text) - CONTEXT, size=PIECES)
        yield pieces(text, starts[at.local_rank :: ranks])
        step += 1


def rate(step: int, steps: int) -> float:
    """Return the part of the inner learning rate that a step has: it rises, and falls to zero like a cosine."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.5 * (1.0 + math.cos(math.pi * (step - WARM_UP) / (steps - WARM_UP)))


@dataclass(frozen=True)
class Ended:
    """How a training ended; the same on all ranks.

    :param choosing: Mean loss, in nats a byte, on the part that learning rates are chosen by.
    :param held_out: The same on what was held out.
    :param rounds: Rounds that took place.
    :param bytes_across: Bytes of parameters that one cell sent to the other; of the synchronous run, of gradients,
        as an all-reduce of two replicas has to.
    """

    choosing: float
    held_out: float
    rounds: int
    bytes_across: float


class Training:
    """One training. Making, advancing and ending it are collective over the world.

    :param state: The federation, of equal cells.
    :param method: How the cells train together.
    :param seed: Seed of the initial weights and of the text's order.
    :param steps: Steps of the whole training.
    :param inner_rate: Highest learning rate of the inner optimizer.
    """

    def __init__(
        self,
        state: xffl.DistributedState,
        method: Method,
        seed: int,
        *,
        steps: int,
        inner_rate: float,
    ) -> None:
        self._state, self._method = state, method
        self.reports: list[xffl.RoundReport] = []
        self.steps_made = 0
        torch.manual_seed(seed)
        model = LanguageModel()
        self.model = xffl.shard(model, one_world(state) if method.is_synchronous else state)
        self._batches = batches(state, seed)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=inner_rate)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: rate(step, steps))
        self._block = ExitStack()
        if method.algorithm is not None:
            rounds = xffl.FederatedScaling(
                self.model,
                self._optimizer,
                state,
                every=method.every,
                algorithm=method.algorithm,
                on_round=self.reports.append,
            )
            self._block.enter_context(rounds)

    def advance(self, steps: int) -> list[tuple[float, float]]:
        """Make some steps; return of each the seconds of both passes, and of the optimizer's step with its rounds."""
        spans = []
        for _ in range(steps):
            begun = time.monotonic()
            inputs, targets = next(self._batches)
            nn.functional.cross_entropy(self.model(inputs), targets).backward()
            computed = time.monotonic()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._schedule.step()
            spans.append((computed - begun, time.monotonic() - computed))
        self.steps_made += steps
        return spans

    def end(self) -> None:
        """Merge what is under way, and let all cells hold the same model."""
        self._block.close()

    def ended(self) -> Ended:
        """Return how the training ended; call it after :meth:`end`."""
        sent = torch.tensor(float(sum(report.bytes_across for report in self.reports)), dtype=torch.float64)
        dist.all_reduce(sent)
        across = sent.item() / self._state.topology.cells
        if self._method.is_synchronous:
            across = 4.0 * parameters() * self.steps_made
        return Ended(loss_of(self.model, 1), loss_of(self.model, 2), len(self.reports), across)


def one_world(state: xffl.DistributedState) -> xffl.DistributedState:
    """Return a state in which the cells of a federation are the replicas of one HSDP world."""
    world = xffl.DistributedState()
    device = torch.device("cpu")
    world.set_global(
        backend="gloo",
        device_type=device,
        master_addr="",
        master_port=0,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
    )
    world.set_exec_device(device)
    world.set_hsdp(state.topology.sizes[0])
    return world


@torch.no_grad()
def loss_of(model: nn.Module, part: int, size: int = 64) -> float:
    """Return the mean loss on a part of all topics; all ranks of a cell call this together."""
    text = torch.cat(texts(part))
    data = pieces(text, np.arange(0, len(text) - CONTEXT, CONTEXT))
    total = count = 0.0
    for inputs, targets in zip(*(tensor.split(size) for tensor in data), strict=True):
        total += nn.functional.cross_entropy(model(inputs), targets, reduction="sum").item()
        count += targets.numel()
    return total / count


@dataclass(frozen=True)
class Block:
    """Steps of a training that are timed in one go.

    :param seed: Seed of the training.
    :param steps: How many steps.
    :param of: Steps of the whole training.
    """

    seed: int
    steps: int
    of: int


class Timed:
    """A training over the link, block by block."""

    def __init__(self, bench: Bench, name: str) -> None:
        self._bench = bench
        self._method, self._rates = make_method(name)
        self._training: Training | None = None
        self._block = Block(0, 0, 0)
        self._spans: list[tuple[float, float]] = []
        self._told = 0

    def prepare(self, block: Block) -> None:
        """Begin the training before its first block."""
        self._block = block
        if self._training is None:
            self._training = Training(
                self._bench.state, self._method, block.seed, steps=block.of, inner_rate=self._rates.inner
            )
        dist.barrier()

    def run(self) -> None:
        """Make a block's steps, and end the training with the last one."""
        assert self._training is not None, "prepared before it is run"
        self._spans = self._training.advance(self._block.steps)
        if self._training.steps_made == self._block.of:
            self._training.end()

    def tell(self) -> dict[str, Any]:
        """Return seconds and what the rounds noted; after the last block the losses, and a checksum of the weights."""
        training = self._training
        assert training is not None, "prepared before it is run"
        reports, self._told = training.reports[self._told :], len(training.reports)
        told: dict[str, Any] = {
            "compute_s": [compute for compute, _ in self._spans],
            "step_s": [step for _, step in self._spans],
            "round_s": [report.seconds for report in reports],
            "phases": [dict(report.phases) for report in reports],
        }
        if training.steps_made < self._block.of:
            return told
        told["ended"] = vars(training.ended())
        if self._method == Method():  # cells that never met differ
            return told
        checksum = 0
        for local in locals_of(training.model):
            checksum = zlib.crc32(local.numpy(), checksum)
        return told | {"shard": self._bench.state.replica_local_rank, "checksum": checksum}


def _timed(name: str) -> Callable[[Bench], Contender]:
    def make(bench: Bench) -> Contender:
        timed = Timed(bench, name)
        return Contender(run=timed.run, prepare=timed.prepare, tell=timed.tell)  # type: ignore[arg-type]

    return make


# wan.py's ranks look their contenders up there; they import this file before they make them.
CONTENDERS |= {name: _timed(name) for name in NAMES}
