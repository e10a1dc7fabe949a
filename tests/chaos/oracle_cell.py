"""A rank of a cell whose model shows which of its local steps are in it, and how much each of them counts.

Started by ``tests/chaos/oracle.py`` through ``xffl exec --elastic``. The model has a slot for each local step of each
cell, and a step adds 1 to its slot, in each of two parameters. A slot is used once, whatever becomes of its step. So a
model that rounds have made has, in the slot of a step, the share that the step's cell had in the round that took it in.

The script keeps its own account of the steps that no round has taken in yet, by what a user is told: reports, and which
fragments a round has taken over. Its model without these steps is what the cells have agreed on. In a file below the
given folder the first rank of a cell writes a line for each

start      the checkpoint that it starts from: the lineage, and the steps that wait
step       before it is made: its slot
round      its number and lineage, the weights, and by fragment the steps that it has counted
model      the lineage, and a digest of what the cells have agreed on by it, which is in a file of the folder ``models``
residuals  the lineage, and a file of that folder with what codecs have left out of what this cell has sent by then;
           after a start what its checkpoint has of that
dropped    by fragment the steps that went with a model that was replaced
end        it has left in order: the lineage, and the steps that wait
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import secrets
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

import xffl
from tests.chaos.ledger_cell import Checkpoints
from tests.chaos.oracle_draws import PARTS, SLOTS, Draw
from xffl.distributed import DistributedState, ElasticParameters


class Slots(nn.Module):
    """A model with a slot for each step of each cell."""

    def __init__(self, cells: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(cells * SLOTS)) for _ in range(PARTS))

    def forward(self, slot: Tensor) -> Tensor:
        """Return a loss whose gradient is -1 in a slot."""
        return -torch.stack([part[slot].sum() for part in self.parts]).sum()


class Account:
    """The steps of a cell that no round has taken in, by fragment, as a user can know them."""

    def __init__(self, fragments: int) -> None:
        self.waiting: list[list[int]] = [[] for _ in range(fragments)]
        self.offered: list[list[int]] = [[] for _ in range(fragments)]
        """Those that waited when a round asked for the weight last."""
        self.untold = 0
        """Steps that no round was told of."""
        self.handed: list[int] = []
        """Steps that are in all cells' models, since this cell has handed its own over, and still wait."""

    def add(self, slot: int) -> None:
        """Note a step."""
        for steps in self.waiting:
            steps.append(slot)
        self.untold += 1

    def ask(self) -> int:
        """Return how many steps were made since the last question."""
        self.offer()
        untold = self.untold
        self.untold = 0
        return untold

    def offer(self) -> None:
        """Note that a round takes in what waits now."""
        self.offered = [list(steps) for steps in self.waiting]

    def count(self, fragment: int) -> list[int]:
        """Return the steps that a round of a fragment has counted, which wait no longer."""
        counted = self.offered[fragment]
        self.waiting[fragment] = [slot for slot in self.waiting[fragment] if slot not in counted]
        return counted

    def drop(self, fragment: int) -> list[int]:
        """Return the steps that went with the fragment's model."""
        dropped = self.waiting[fragment]
        self.waiting[fragment] = []
        return dropped


class Cell:
    """What a rank does and writes down."""

    def __init__(self, folder: Path, draw: Draw, state: DistributedState) -> None:
        assert state.lone_cell is not None
        self.cell = state.lone_cell[0]
        self._folder = folder
        self._draw = draw
        self._rank = dist.get_rank()
        self._book = (folder / f"{self.cell}.ledger").open("a", buffering=1)
        self._life = f"{self.cell}.{secrets.token_hex(4)}"
        self._account = Account(draw.fragments)
        self._lineage = ""
        self._turn = 0  # of checkpoints
        self._checkpoints = Checkpoints(folder, self.cell, self._rank, state.world_size)
        self._model = xffl.shard(Slots(draw.cells), state)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1.0)
        options: dict[str, Any] = {"fragments": draw.fragments, "codec": draw.codec, "overlap": draw.delay > 0}
        if draw.server is not None:
            options["server"] = draw.server
        every: Any = draw.every
        if draw.threshold is not None:
            every = {"name": "divergence", "every": draw.every, "threshold": draw.threshold}
        self.scaling = xffl.FederatedScaling(
            self._model,
            self._optimizer,
            state,
            every=every,
            weight=self._weigh if draw.is_weighed else None,
            on_round=self._end_round,
            aggregator=options,
            delay=draw.delay,
            client=draw.client,
        )

    def run(self) -> None:
        """Train until the run is to end."""
        draw = self._draw
        with self.scaling:
            slot = self._start()
            self.scaling.join()
            self._settle()
            self._write_model()
            (self._folder / f"{self.cell}.{self._rank}.pid").write_text(f"{os.getpid()} 0")
            while not self._is_over(slot):
                self._settle()
                self._write("step", slot=slot)
                self._account.add(slot)
                self._model(torch.tensor([self.cell * SLOTS + slot])).backward()
                self._optimizer.step()
                self._optimizer.zero_grad()
                slot += 1
                if slot % draw.save_every == self.cell and not self.scaling.is_under_way:
                    self._save()
                time.sleep(draw.step_s)
            self._settle()
        self._settle()
        self._write_model()
        self._write("end", lineage=self.scaling.lineage, waiting=self._account.waiting)

    def _start(self) -> int:
        """Load a checkpoint, if there is one, and return the first slot that no life of this cell has used."""
        path = self._folder / f"{self.cell}.ledger"
        starts, used = 0, -1
        for line in path.read_text().splitlines():
            if line.startswith('{"what": "start"'):
                starts += 1
            elif line.startswith('{"what": "step"'):
                used = int(line.partition('"slot": ')[2].rstrip("}"))
        whole = self._checkpoints.whole()
        if len(whole) > 1 and random.Random(f"{self._draw.number} {self.cell} {starts}").random() < self._draw.older:
            whole.pop()
        told = [used + 1, max(whole, default=-1)]
        dist.broadcast_object_list(told, src=0)
        first, turn = told
        saved = self._checkpoints.load(turn)
        if saved is not None:
            self._model.load_state_dict(saved["model"])
            self._optimizer.load_state_dict(saved["optimizer"])
            self.scaling.load_state_dict(saved["scaling"])
            self._account.waiting = saved["waiting"]
            self._account.untold = saved["untold"]
            self._account.handed = saved["handed"]
            self._lineage = saved["lineage"]
        self._write("start", lineage=self._lineage, waiting=self._account.waiting)
        self._write_residuals(None if saved is None else saved["scaling"]["aggregator"].get("residuals"), self._lineage)
        self._turn = first * 1000
        return first

    def _is_over(self, slot: int) -> bool:
        """Tell whether this cell has made its last step, the same on all of its ranks."""
        is_over = [slot >= SLOTS or slot >= self._draw.leaves[self.cell] or (self._folder / "finish").exists()]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(is_over, src=0)
        return is_over[0]

    def _weigh(self) -> float:
        untold = self._account.ask()
        return 0.0 if self._rank else float(untold)  # it is added up over the ranks of the cell

    def _end_round(self, report: Any) -> None:
        if report.is_skipped:
            return
        fragment = report.fragment
        taken_over = self.scaling.aggregator.taken_over
        if not self._draw.is_weighed and not self._draw.delay:
            self._account.offer()
        counted: list[int] = []
        if report.weights[self.cell] and fragment not in taken_over:
            counted = self._account.count(fragment)
        self._write(
            "round",
            number=report.round,
            lineage=self.scaling.lineage,
            base=self._lineage,
            weights=report.weights,
            fragment=fragment,
            steps=counted,
            taken_over=sorted(taken_over),
            total=self.scaling.total_weight,
        )
        self._drop(taken_over)
        self._lineage = self.scaling.lineage
        self._write_model()
        self._write_agreed_residuals()
        if report.round % 3 == self.cell % 3 and not self.scaling.is_under_way:
            self._save()

    def _settle(self) -> None:
        """Look for a round of which nobody was told, since no cell had anything to give."""
        if self.scaling.lineage == self._lineage:
            return
        if self.scaling.aggregator.has_handed_over:
            self._account.handed = list(self._account.waiting[0])
        self._write("round", number=self.scaling.aggregator.rounds, lineage=self.scaling.lineage, base=self._lineage)
        self._drop(self.scaling.aggregator.taken_over)
        self._lineage = self.scaling.lineage
        self._write_agreed_residuals()

    def _write_agreed_residuals(self) -> None:
        if self._draw.shows_residuals:
            self._write_residuals(self.scaling.aggregator.state_dict().get("residuals"), self._lineage)

    def _drop(self, fragments: frozenset[int]) -> None:
        dropped = {fragment: self._account.drop(fragment) for fragment in sorted(fragments)}
        if any(dropped.values()):
            self._write("dropped", lineage=self.scaling.lineage, steps=dropped)
        if not any(self._account.waiting):
            self._account.untold = 0

    def _write_model(self) -> None:
        """Write down what the cells have agreed on: the model without the steps that wait."""
        parts = [part.full_tensor() if hasattr(part, "full_tensor") else part for part in self._model.parameters()]
        if self._rank:
            return
        agreed = np.stack([part.detach().numpy().copy() for part in parts])
        for index, part in enumerate(agreed):
            steps = {*self._account.waiting[index % self._draw.fragments]} - {*self._account.handed}
            places = [self.cell * SLOTS + slot for slot in sorted(steps)]
            # FedProx pulls a step back a little; what it must not move are the slots of others.
            part[places] -= 1 if self._draw.client is None else part[places]
        digests = [hashlib.sha256(part.tobytes()).hexdigest()[:16] for part in agreed]
        lineage = self.scaling.lineage
        path = self._folder / "models" / f"{lineage}.{'.'.join(digests)}.npz"
        if not path.exists():
            save_model(path, agreed)
        self._write("model", lineage=lineage, digests=digests, waiting=list(map(len, self._account.waiting)))

    def _write_residuals(self, residuals: Any, lineage: str) -> None:
        """Write down what codecs have left out on this cell's ranks, each of which has an equal part of a tensor."""
        if not self._draw.shows_residuals:
            return
        mine = [None if residuals is None else residuals.get(f"parts.{index}") for index in range(PARTS)]
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, [None if part is None else part.numpy() for part in mine])
        if self._rank:
            return
        numel = self._draw.cells * SLOTS // len(told)
        nothing = np.zeros(numel, dtype=np.float32)
        rows = [[nothing if rank[index] is None else rank[index] for rank in told] for index in range(PARTS)]
        path = self._folder / "models" / f"residuals.{secrets.token_hex(8)}.npz"
        save_model(path, np.stack([np.concatenate(row) for row in rows]))
        self._write("residuals", lineage=lineage, file=path.name)

    def _save(self) -> None:
        self._turn += 1
        rounds = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        waiting = [list(steps) for steps in self._account.waiting]
        own = {
            "waiting": waiting,
            "untold": self._account.untold,
            "handed": list(self._account.handed),
            "lineage": self._lineage,
        }
        self._checkpoints.save(self._turn, rounds | {"scaling": self.scaling.state_dict()} | own)

    def _write(self, what: str, **told: Any) -> None:
        if self._rank == 0:
            self._book.write(json.dumps({"what": what, "time": time.time(), "life": self._life, **told}) + "\n")


def save_model(path: Path, agreed: npt.NDArray[np.float32]) -> None:
    """Save the values that are not 0."""
    rows, columns = np.nonzero(agreed)
    draft = path.with_name(f".{secrets.token_hex(4)}.npz")
    np.savez(draft, rows=rows, columns=columns, values=agreed[rows, columns])
    draft.rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    args, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    draw = Draw(**json.loads((args.folder / "draw.json").read_text()))
    elastic = ElasticParameters(
        lighthouse=os.environ["XFFL_LIGHTHOUSE"], restarts=int(os.environ.get("XFFL_RESTARTS", "0"))
    )
    with xffl.session(elastic=elastic, timeout_s=60) as state:
        Cell(args.folder, draw, state).run()


if __name__ == "__main__":
    main()
