"""Train the language model of a run again in one process, by DiLoCo written anew, with the same cells in each round.

    python -m tests.chaos.reference PROJECT [--seeds 3]

PROJECT is the folder of the language model of ``tests/chaos/slurm.py``. Which cells have contributed to a round is in
its records; here they make twelve steps each and are averaged, without xffl, its rounds or its restarts, until all have
trained on as many samples. So what the run has lost by cells that were away is told from what xffl has lost.

Printed is, for each seed, the held-out loss as the mean over the models of the last eight rounds: with the cells of the
run, and with all three cells in each round.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F

from tests.chaos.curve import lines
from tests.chaos.slurm import BATCH, CELLS, EVERY, LAST
from xffl.training.data.tokens import TokenDataset

ALL = list(range(CELLS))
Batch = tuple[torch.Tensor, torch.Tensor]


def batches(samples: Any, part: list[int], seed: int) -> Iterator[Batch]:
    """Yield batches of a cell's part for ever, in a new order in each epoch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(part), generator=generator).tolist()
        for start in range(0, len(order), BATCH):
            rows = [samples[part[place]] for place in order[start : start + BATCH]]
            inputs, targets = (torch.stack([torch.as_tensor(row[side]) for row in rows]) for side in (0, 1))
            yield inputs, targets


def train(model: torch.nn.Module, rounds: list[list[int]], most: float, seed: int) -> float:
    """Train with these cells in the first rounds, and with all in those that follow; return the loss at the end."""
    windows = TokenDataset(list("\n".join(topics.topics.values()).encode()), sequence_length=64)
    training, held_out = windows.split(0.95)
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(seed)).tolist()
    streams = [batches(training, order[cell::CELLS], 100 * seed + cell) for cell in ALL]
    inputs, targets = (torch.stack([torch.as_tensor(row[side]) for row in held_out]) for side in (0, 1))
    models = [copy.deepcopy(model) for _ in ALL]
    optimizers = [torch.optim.AdamW(one.parameters(), 3e-3) for one in models]
    server = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    seen, losses = 0, []
    while seen < most:
        here = rounds[len(losses)] if len(losses) < len(rounds) else ALL
        for cell in here:
            models[cell].load_state_dict(model.state_dict())
            for _ in range(EVERY):
                batch, target = next(streams[cell])
                optimizers[cell].zero_grad()
                F.cross_entropy(models[cell](batch), target.flatten()).backward()
                torch.nn.utils.clip_grad_norm_(models[cell].parameters(), 1.0)
                optimizers[cell].step()
                seen += len(batch)
        with torch.no_grad():
            theirs = [list(models[cell].parameters()) for cell in here]
            for place, parameter in enumerate(model.parameters()):
                parameter.grad = parameter - torch.stack([one[place] for one in theirs]).mean(0)
            server.step()
            losses.append(float(F.cross_entropy(model(inputs), targets.flatten())))
    return fmean(losses[-LAST:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, str(args.project))
    from train import LanguageModel, ModelConfig  # type: ignore[import-not-found]

    told = {one["round"]: one["weights"] for one in lines(args.project / "runs/run/cell_0/rounds/cell_0.jsonl")}
    most = sum(map(sum, told.values()))
    # Of the first, which takes a model over, nobody tells, and of others not where cell 0 was away.
    known = [told.get(number) for number in range(2, max(told) + 1)]
    rounds = [[cell for cell in ALL if weights is None or weights[cell]] for weights in known]
    for seed in range(args.seeds):
        for name, cells in (("cells of the run", rounds), ("all cells", [])):
            torch.manual_seed(seed)
            loss = train(LanguageModel(ModelConfig()), cells, most, seed)
            print(json.dumps({"seed": seed, "with": name, "val/loss": round(loss, 4)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
