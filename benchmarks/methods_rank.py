"""What a rank of ``methods.py`` trains: a decoder of two million parameters over bytes, on the sources of Python.

A step has the same pieces of text for all methods and numbers of cells, dealt out to the ranks. Everything but the
method follows from the seed: initial weights, and the pieces of each step.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import xffl

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for tests.decoder, which is no part of the package

from tests.decoder import Decoder

CONTEXT, WIDTH, HEADS, LAYERS = 128, 256, 4, 3
HELD_OUT_EVERY, HELD_OUT_PIECES = 20, 256
"""Each twentieth file is held out; the loss is taken on so many pieces of these."""

ADAM, MUON = 1e-3, 2e-2
"""Highest learning rates."""

METHODS: dict[str, dict[str, Any] | None] = {
    "synchronous": None,
    "fedavg": {"algorithm": "fedavg"},
    "diloco": {"algorithm": "diloco"},
    "muloco": {"algorithm": "muloco"},
    "desloc": {"algorithm": "desloc"},
    "sparseloco": {"algorithm": "sparseloco"},
    "int8": {"algorithm": "diloco", "aggregator": {"codec": "int8"}},
    "int4": {"algorithm": "diloco", "aggregator": {"codec": "int4"}},
    "int2": {"algorithm": "diloco", "aggregator": {"codec": "int2"}},
}
"""What each method gives to :class:`xffl.FederatedScaling`; ``None``: gradients are averaged in each step instead."""


def read_sources(is_held_out: bool) -> torch.Tensor:
    """Return the sources of Python's library, one behind the other, without its tests and what is installed beside."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
    files = sorted(path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts))
    chosen = [path for place, path in enumerate(files) if (place % HELD_OUT_EVERY == 0) is is_held_out]
    return torch.frombuffer(bytearray(b"\0".join(path.read_bytes() for path in chosen)), dtype=torch.uint8)


def pieces_at(text: torch.Tensor, starts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pieces of a text, and the same one byte later."""
    rows = text[torch.from_numpy(starts)[:, None] + torch.arange(CONTEXT + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def rate(step: int, steps: int) -> float:
    """Return the part of the learning rate that a step has: it rises for a twentieth, and falls like a cosine."""
    warm_up = max(steps // 20, 1)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1.0 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))


def make_optimizers(method: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return AdamW; with ``muloco`` Muon for the matrices of the layers, and AdamW for the rest."""
    named = dict(model.named_parameters())
    matrices = [name for name, value in named.items() if method == "muloco" and "layers." in name and value.dim() == 2]
    rest = [value for name, value in named.items() if name not in matrices]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=ADAM)]
    if matrices:
        optimizers.append(torch.optim.Muon([named[name] for name in matrices], lr=MUON))
    return optimizers


@torch.no_grad()
def held_out_loss(model: nn.Module, state: xffl.DistributedState) -> float:
    """Return the loss in nats a byte on what is held out; each rank computes a part of it. Collective."""
    text = read_sources(is_held_out=True)
    starts = np.linspace(0, len(text) - CONTEXT - 1, HELD_OUT_PIECES).astype(np.int64)[state.rank :: state.world_size]
    sums = torch.zeros(2, dtype=torch.float64)
    for some in np.array_split(starts, max(len(starts) // 16, 1)):
        inputs, targets = pieces_at(text, some)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
        sums += torch.tensor([loss.item(), targets.numel()], dtype=torch.float64)
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def train(options: argparse.Namespace) -> None:
    """Train by a method; rank 0 writes how it ended. Collective."""
    torch.set_num_threads(1)  # ranks share the cores
    text = read_sources(is_held_out=False)
    keywords = METHODS[options.method]
    reports: list[xffl.RoundReport] = []
    with xffl.session() as state:
        torch.manual_seed(options.seed)
        model = xffl.shard(Decoder(WIDTH, HEADS, LAYERS), state)
        optimizers = make_optimizers(options.method, model)
        schedules = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, options.steps))
            for optimizer in optimizers
        ]
        begun = time.monotonic()
        with ExitStack() as stack:
            if keywords is not None:
                rounds = xffl.FederatedScaling(
                    model, optimizers, state, every=options.every, on_round=reports.append, **keywords
                )
                stack.enter_context(rounds)
            for step in range(options.steps):
                starts = np.random.default_rng((options.seed, step)).integers(len(text) - CONTEXT, size=options.pieces)
                inputs, targets = pieces_at(text, starts[state.rank :: state.world_size])
                F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
                for optimizer, schedule in zip(optimizers, schedules, strict=True):
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
        seconds = time.monotonic() - begun
        parameters = sum(parameter.numel() for parameter in model.parameters())
        # The first round of a codec is exact.
        sent = torch.tensor([float(report.bytes_across) for report in reports[1:]], dtype=torch.float64)
        if len(sent):
            dist.all_reduce(sent)
        ranks = state.world_size
        across = sent.mean().item() / ranks if len(sent) else 8.0 * parameters * (ranks - 1) / ranks
        ended = {
            "held_out": held_out_loss(model, state),
            "rounds": len(reports) or options.steps,
            "bytes_a_round": across,
            "parameters": parameters,
            "text": len(text),
            "seconds": seconds,
        }
        if state.rank == 0:
            partial = options.out.with_suffix(".partial")
            partial.write_text(json.dumps(ended) + "\n")
            partial.replace(options.out)  # a row that was stopped leaves no file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=tuple(METHODS))
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--pieces", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
