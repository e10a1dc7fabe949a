"""A rank of an elastic cell: trains until its model has some rounds behind it with all cells, and tells so."""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import xffl


def main() -> None:
    shared: list[int] = []
    with xffl.session(timeout_s=60) as state:
        assert state.lone_cell is not None, "xffl exec makes this job one cell"
        cell, sizes = state.lone_cell
        model = xffl.shard(nn.Linear(4, 2), state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def on_round(report: xffl.RoundReport) -> None:
            if all(report.weights):
                shared.append(report.round)

        with xffl.FederatedScaling(model, optimizer, state, every=2, on_round=on_round):
            while len(shared) < int(sys.argv[1]):
                model(torch.ones(3, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.02)
        mean = xffl.mean_over_cell(torch.tensor(10.0 * cell + state.rank), state)
        assert mean.item() == 10 * cell + (state.topology.world_size - 1) / 2, mean
        print(f"cell {cell}/{len(sizes)} rank {state.rank}/{state.topology.world_size} shared rounds", flush=True)


if __name__ == "__main__":
    main()
