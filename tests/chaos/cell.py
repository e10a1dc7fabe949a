"""A rank of a cell that is to be killed: local steps are a wait of fixed length, and each round is written down.

Started by ``tests/chaos/storm.py`` through ``xffl exec --elastic``. Below the given folder it writes which process is
which rank, in a file that is as old as its last step, and a line for each round: when it stood, its number, digest of
all weights, cells, their weights, tries, and what its epoch is called.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import xffl
from xffl.distributed import ElasticParameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--least", type=int)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--form", default="auto")
    args = parser.parse_args()
    torch.set_num_threads(1)
    life = int(os.environ["XFFL_RESTARTS"])
    elastic = ElasticParameters(lighthouse=os.environ["XFFL_LIGHTHOUSE"], restarts=life, least_cells=args.least)
    with xffl.session(elastic=elastic, timeout_s=60) as state:
        assert state.lone_cell is not None
        cell, rank = state.lone_cell[0], state.rank
        at_work = args.folder / f"{cell}.{rank}.pid"
        at_work.write_text(f"{os.getpid()} {life}")
        torch.manual_seed(cell + 100 * life)
        wide = args.width
        model = xffl.shard(nn.Sequential(nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, wide)), state)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(1000 * cell + (rank or 0))

        def on_round(report: Any) -> None:
            bits = hashlib.sha256()
            for one in model.parameters():
                whole = one.full_tensor() if hasattr(one, "full_tensor") else one
                bits.update(whole.detach().numpy().tobytes())
            if rank == 0:
                told = [time.time(), report.round, bits.hexdigest()[:16], report.cells, report.weights, report.tries]
                told.append(report.membership)
                with (args.folder / f"{cell}.{life}.jsonl").open("a") as file:
                    file.write(json.dumps(told) + "\n")

        how = {"form": args.form}
        with xffl.FederatedScaling(model, optimizer, state, every=args.every, on_round=on_round, aggregator=how):
            while True:
                model(torch.randn(4, wide, generator=generator)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                os.utime(at_work)
                time.sleep(args.step_s)


if __name__ == "__main__":
    main()
