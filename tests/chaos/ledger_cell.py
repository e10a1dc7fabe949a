"""A rank of a cell that is to be killed, and goes on from its checkpoints; it writes down what becomes of each step.

Started by ``tests/chaos/ledger.py`` through ``xffl exec --elastic``. Each local step has a name, made of the cell, its
life and a number. In a file below the given folder the first rank of a cell writes a line for each

step     before it is made: its name
asked    time that rounds ask for the weight of what the cell gives, the number of its steps: their names
round    its number, its lineage and the one before, digest and weights, whether the cell has only taken the model over,
         and the names of the steps that have counted in it
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import xffl
from xffl.distributed import ElasticParameters

KEPT = 3
"""Checkpoints of a rank that are not deleted."""


class Checkpoints:
    """The checkpoints of a cell: a file of each rank; one counts if the files of all ranks are there."""

    def __init__(self, folder: Path, cell: int, rank: int, ranks: int) -> None:
        self._folder, self._cell, self._rank, self._ranks = folder, cell, rank, ranks

    def _turns(self, rank: int) -> set[int]:
        return {int(path.name.split(".")[2]) for path in self._folder.glob(f"{self._cell}.{rank}.*.pt")}

    def _path(self, turn: int) -> Path:
        return self._folder / f"{self._cell}.{self._rank}.{turn:09}.pt"

    def save(self, turn: int, state: dict[str, Any]) -> None:
        """Save this rank's part of the checkpoint of a turn, a number that the ranks of a cell have alike."""
        torch.save(state, draft := self._path(turn).with_suffix(".draft"))
        draft.rename(self._path(turn))
        for old in sorted(self._turns(self._rank))[:-KEPT]:
            self._path(old).unlink()

    def whole(self) -> list[int]:
        """Return the turns of the checkpoints that all ranks have, in order."""
        return sorted(set.intersection(*map(self._turns, range(self._ranks))))

    def load(self, turn: int | None = None) -> dict[str, Any] | None:
        """Return this rank's part of a checkpoint, by default the newest one that all ranks have.

        What is newer is deleted.
        """
        if turn is None:
            turn = max(self.whole(), default=-1)
        for newer in self._turns(self._rank):
            if newer > turn:
                self._path(newer).unlink()
        return torch.load(self._path(turn), weights_only=False) if turn >= 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--step-s", type=float, default=0.05)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lighthouse, restarts = os.environ["XFFL_LIGHTHOUSE"], int(os.environ["XFFL_RESTARTS"])
    with xffl.session(elastic=ElasticParameters(lighthouse=lighthouse, restarts=restarts), timeout_s=60) as state:
        assert state.lone_cell is not None
        cell, rank = state.lone_cell[0], state.rank or 0
        life = f"{cell}.{secrets.token_hex(4)}"
        if rank == 0:
            (args.folder / f"{cell}.{rank}.pid").write_text(f"{os.getpid()} {restarts}")
        book = (args.folder / f"{cell}.ledger").open("a", buffering=1)
        torch.manual_seed(cell)
        model = xffl.shard(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)), state)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        checkpoints = Checkpoints(args.folder, cell, rank, state.world_size)
        steps: list[str] = []  # that no round has counted
        asked = number = 0  # how many of them a round was told of; steps and rounds of all lives, for checkpoints
        lineage = ""

        def write(what: str, **told: Any) -> None:
            if rank == 0:
                book.write(json.dumps({"what": what, "time": time.time(), "life": life, **told}) + "\n")

        def weight() -> float:
            nonlocal asked
            before, asked = asked, len(steps)
            write("asked", steps=steps)
            return 0.0 if rank else float(asked - before)  # it is added up over the ranks of the cell

        def save() -> None:
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaling": scaling.state_dict()}
            own = {"steps": list(steps), "asked": asked, "number": number, "lineage": lineage}
            checkpoints.save(number, parts | own)

        def end_round(round_number: int, weights: Sequence[float] | None, digest: str) -> None:
            """Write a round down, and begin to collect steps for the next."""
            nonlocal asked, lineage
            before, lineage = lineage, scaling.aggregator.lineage
            told = {"number": round_number, "base": before, "lineage": lineage, "digest": digest}
            takes_over = scaling.aggregator.has_taken_over
            has_counted = weights is not None and not takes_over
            write("round", **told, weights=weights, takes_over=takes_over, steps=steps if has_counted else [])
            if has_counted or takes_over:
                steps.clear()
                asked = 0

        def on_round(report: Any) -> None:
            nonlocal number
            bits = hashlib.sha256()
            for one in model.parameters():
                whole = one.full_tensor() if hasattr(one, "full_tensor") else one
                bits.update(whole.detach().numpy().tobytes())
            end_round(report.round, report.weights, bits.hexdigest()[:16])
            number += 1
            if report.round % 3 == cell:
                save()

        scaling = xffl.FederatedScaling(model, optimizer, state, every=args.every, weight=weight, on_round=on_round)
        with scaling:
            if (saved := checkpoints.load()) is not None:
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
                scaling.load_state_dict(saved["scaling"])
                steps, asked, number, lineage = (saved[name] for name in ("steps", "asked", "number", "lineage"))
            scaling.join()
            if scaling.aggregator.lineage != lineage:  # else on_round was called for it, with steps of a checkpoint
                end_round(scaling.aggregator.rounds, None, "")
            while True:
                loss = model(torch.randn(4, 16)).square().mean()
                steps.append(f"{life}.{number}")
                write("step", step=steps[-1])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                number += 1
                if number % 7 == cell:
                    save()
                time.sleep(args.step_s)


if __name__ == "__main__":
    main()
