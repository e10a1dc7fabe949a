"""Train a small network on handwritten digits, in cells that average their models now and then.

Two cells of two processes on this machine, each cell with its own part of the data::

    xffl exec --processes 4 --federated 2,2 train.py --setting noniid

Inside a cell the model is sharded with FSDP and every step is synchronous. Between the cells nothing moves, except for
a round after every ``--every`` steps. Two runs to compare with: each cell for itself, and all data in one cell::

    xffl exec --processes 4 --federated 2,2 train.py --setting noniid --mode alone
    xffl exec --processes 4 --federated 4   train.py --mode centralized

With ``--out FILE`` the measurements are appended to a file, one JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import digits
import torch
import torch.distributed as dist
from torch import nn

import xffl


def build_model() -> nn.Module:
    """Return a network of two convolutions; the running means of its BatchNorms are averaged in a round, too."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),  # (N, 1, 8, 8) -> (N, 16, 8, 8)
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),  # -> (N, 32, 8, 8)
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),  # -> (N, 32, 4, 4)
        nn.Flatten(),  # -> (N, 512)
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, digits.CLASSES),
    )


class Validation:
    """Measures the model on the held-out images, and keeps what it measured."""

    def __init__(
        self, model: nn.Module, state: xffl.DistributedState, images: torch.Tensor, labels: torch.Tensor
    ) -> None:
        # The ranks of a cell share the images out; each makes one forward pass, because FSDP's are collective.
        mine = slice(state.cell_rank, None, state.cell_size)
        self.images, self.labels = images[mine], labels[mine]
        self.model, self.group = model, state.federation
        self.start = time.perf_counter()
        self.records: list[dict[str, Any]] = []

    @torch.no_grad()
    def measure(self, step: int, bytes_across: int = 0) -> None:
        """Count what the model gets right; all ranks of a cell call this together."""
        self.model.eval()
        logits = self.model(self.images)
        self.model.train()
        loss = nn.functional.cross_entropy(logits, self.labels, reduction="sum").item()
        correct = (logits.argmax(dim=1) == self.labels).sum().item()
        totals = torch.tensor([correct, loss, len(self.labels)], dtype=torch.float64)
        dist.all_reduce(totals, group=self.group)
        correct, loss, count = totals.tolist()
        self.records.append(
            {
                "round": len(self.records) + 1,
                "step": step,
                "accuracy": correct / count,
                "loss": loss / count,
                "seconds": round(time.perf_counter() - self.start, 3),
                "bytes_across": bytes_across,
            }
        )


class SampleCount:
    """How many samples this rank has seen since the last round: its weight in the next."""

    def __init__(self) -> None:
        self.steps = self.samples = 0

    def add(self, samples: int) -> None:
        self.steps += 1
        self.samples += samples

    def take(self) -> int:
        samples, self.samples = self.samples, 0
        return samples


def train(state: xffl.DistributedState, setting: str | None, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train one model from scratch and return what was measured on the way."""
    cell = state.cell

    images, labels = digits.load()
    training, held_out = digits.split(labels, options.seed)
    if setting is not None:
        training = digits.part_of_cell(training, labels, setting, cell, state.cells, options.seed)
    stream = (options.seed, digits.SHUFFLING, cell)
    batches = digits.Batches(training, options.batch_size, state.cell_rank, state.cell_size, stream)
    x, y = torch.from_numpy(images), torch.from_numpy(labels)

    torch.manual_seed(int(digits.random_stream(options.seed, digits.INITIALIZATION).integers(2**31)))
    model = xffl.shard(build_model(), state)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    validation = Validation(model, state, x[held_out], y[held_out])
    seen = SampleCount()

    def after_round(report: xffl.RoundReport) -> None:
        validation.measure(seen.steps, report.bytes_across)

    is_federated = options.mode == "federated"
    rounds: Any = nullcontext()
    if is_federated:
        rounds = xffl.FederatedScaling(
            model, optimizer, state, every=options.every, weight=seen.take, on_round=after_round
        )
    with rounds:
        for _ in range(options.epochs):
            for batch in batches:
                loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
                loss.backward()
                seen.add(len(batch))
                optimizer.step()
                optimizer.zero_grad()
                if not is_federated and seen.steps % options.every == 0:
                    validation.measure(seen.steps)
    if not is_federated and seen.steps % options.every:
        validation.measure(seen.steps)
    return validation.records


def collect(
    mine: list[dict[str, Any]], state: xffl.DistributedState, mode: str, setting: str | None
) -> list[dict[str, Any]]:
    """Bring the measurements of all cells to rank 0; the other ranks get an empty list."""
    everyone: list[Any] | None = [None] * state.world_size if state.rank == 0 else None
    dist.gather_object(mine, everyone)
    if everyone is None:
        return []
    # Cells that train alone have a curve each; a federation has the same model everywhere after a round.
    cells = range(state.topology.cells) if mode == "alone" else [None]
    merged = []
    for cell in cells:
        ranks = state.topology.federation(cell) if cell is not None else range(state.world_size)
        for index, record in enumerate(everyone[ranks[0]]):
            bytes_across = sum(everyone[rank][index]["bytes_across"] for rank in ranks)
            merged.append({"run": mode, "setting": setting, "cell": cell, **record, "bytes_across": bytes_across})
    return merged


def report(records: list[dict[str, Any]], out: Path | None) -> None:
    """Append measurements to a file, and print the last one of each curve."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    for record in {record["cell"]: record for record in records}.values():
        where = "" if record["cell"] is None else f", cell {record['cell']}"
        data = "all data" if record["setting"] is None else f"{record['setting']} data"
        print(
            f"{record['run']}{where}, {data}: accuracy {record['accuracy']:.1%} after {record['step']} steps, "
            f"{record['seconds']:.1f} s",
            flush=True,
        )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--setting", nargs="+", choices=["iid", "noniid"], default=["iid"], help="how cells share the data"
    )
    parser.add_argument("--mode", choices=["federated", "alone", "centralized"], default="federated")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--every", type=int, default=10, help="steps between two rounds (or measurements)")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--batch-size", type=int, default=16, help="samples a step, on each rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="append measurements to this file (JSON lines)")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    with xffl.session() as state:
        is_centralized = options.mode == "centralized"
        if is_centralized and state.cells > 1:
            raise xffl.ConfigError(
                f"--mode centralized means one cell, but there are {state.cells}; start it without --federated"
            )
        for setting in [None] if is_centralized else options.setting:
            records = train(state, setting, options)
            report(collect(records, state, options.mode, setting), options.out)


if __name__ == "__main__":
    main()
