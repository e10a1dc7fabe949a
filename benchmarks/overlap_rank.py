"""What one rank of ``overlap.py`` does: make local steps, with and without rounds, and tell how long they took."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from wan_rank import CONTENDERS, Bench, Contender, locals_of

import xffl

__all__ = ["SCHEDULES", "TRAININGS", "Pace", "Schedule"]

SIDE = 192
"""Side of the matrices that real compute multiplies, a fraction of a millisecond each."""


@dataclass(frozen=True)
class Schedule:
    """When there are rounds.

    :param every: Local steps between two rounds.
    :param delay: Steps that go on while a round is under way.
    :param fragments: Parts of the model that are exchanged in turn.
    """

    every: int
    delay: int
    fragments: int = 1


@dataclass(frozen=True)
class Pace:
    """What a step is in one block.

    :param seed: Seed of what the cells differ by beforehand.
    :param seconds: How long a step waits.
    :param products: Matrix products that a step computes instead, if any.
    :param steps: Steps that are timed.
    """

    seed: int
    seconds: float = 0.0
    products: int = 0
    steps: int = 0


SCHEDULES: dict[str, Schedule | None] = {
    "none": None,
    "sync": Schedule(every=20, delay=0),
    "overlap": Schedule(every=20, delay=15),
    "fragments": Schedule(every=5, delay=4, fragments=4),
}
"""The contenders that train: every element of the model crosses once in 20 steps, or none does."""


class Compute:
    """The compute of a step: a wait, as if a GPU did it, or matrix products on this rank's core."""

    def __init__(self) -> None:
        self._left, self._right = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
        self._out = torch.empty(SIDE, SIDE)

    def __call__(self, pace: Pace) -> None:
        if not pace.products:
            time.sleep(pace.seconds)
        for _ in range(pace.products):
            torch.mm(self._left, self._right, out=self._out)


class Training:
    """A block of local steps: made anew for each block, on an aggregator that stays.

    The model's parameters get no gradients, so that the optimizer's own step costs nothing: what is measured is what
    rounds take away from the steps.
    """

    def __init__(self, bench: Bench, schedule: Schedule | None) -> None:
        self._bench, self._schedule = bench, schedule
        self._optimizer = torch.optim.SGD(bench.model.parameters(), lr=0.1)
        self._compute = Compute()
        self._aggregator: xffl.Aggregator | None = None
        if schedule is not None:
            self._aggregator = xffl.Aggregator(
                bench.model, bench.state, fragments=schedule.fragments, overlap=schedule.delay > 0
            )
        self._pace = Pace(0)
        self._rounds: Any = nullcontext()
        self._reports: list[xffl.RoundReport] = []
        self._spans: list[tuple[float, float]] = []

    def prepare(self, pace: Pace) -> None:
        """Let the cells drift apart, and get ready for rounds."""
        self._pace = pace
        self._reports, self._spans = [], []
        at = self._bench.state.topology.coordinates(self._bench.seat.rank)
        noise = torch.Generator().manual_seed(1000 * pace.seed + 10 * at.cell + at.shard)
        for local in locals_of(self._bench.model):
            local.add_(torch.randn(local.shape, generator=noise), alpha=1e-3)
        if self._schedule is not None:
            self._rounds = xffl.FederatedScaling(
                self._bench.model,
                self._optimizer,
                self._bench.state,
                every=self._schedule.every,
                delay=self._schedule.delay,
                aggregator=self._aggregator,
                on_round=self._reports.append,
            )
        dist.barrier()

    def run(self) -> None:
        """Make the steps; what leaving the rounds costs comes after the clock has stopped."""
        lead = 0 if self._schedule is None else self._schedule.delay
        with self._rounds:
            for _ in range(lead + self._pace.steps):
                begun = time.monotonic()
                self._compute(self._pace)
                computed = time.monotonic()
                self._optimizer.step()
                self._spans.append((computed - begun, time.monotonic() - computed))
        self._spans = self._spans[lead:]

    def tell(self) -> dict[str, Any]:
        """Return seconds of computing and of all that hangs on the optimizer's steps, and what the rounds noted."""
        told: dict[str, Any] = {
            "compute_s": sum(compute for compute, _ in self._spans),
            "step_s": [step for _, step in self._spans],
        }
        if self._schedule is None:
            return told
        checksum = 0
        for local in locals_of(self._bench.model):
            checksum = zlib.crc32(local.numpy(), checksum)
        timed = self._reports[: self._pace.steps // self._schedule.every]
        names = dict.fromkeys(name for report in timed for name in report.phases)
        phases = {name: sum(report.phases.get(name, 0.0) for report in timed) for name in names}
        told |= {
            "rounds": len(timed),
            "round_s": [report.seconds for report in timed],
            "bytes_across": sum(report.bytes_across for report in timed),
            "phases": phases,
        }
        return told | {"shard": self._bench.state.replica_local_rank, "checksum": checksum}


def _training(schedule: Schedule | None) -> Callable[[Bench], Contender]:
    def make(bench: Bench) -> Contender:
        training = Training(bench, schedule)
        return Contender(run=training.run, prepare=training.prepare, tell=training.tell)  # type: ignore[arg-type]

    return make


def _products(bench: Bench) -> Contender:
    """Compute, on all ranks at once, to find out how long it takes."""
    compute, pace = Compute(), [Pace(0)]

    def prepare(given: Pace) -> None:
        pace[0] = given
        dist.barrier()

    return Contender(run=lambda: compute(pace[0]), prepare=prepare)  # type: ignore[arg-type]


TRAININGS = {name: _training(schedule) for name, schedule in SCHEDULES.items()}
# wan.py's ranks look their contenders up there; they import this file before they make them.
CONTENDERS |= {"products": _products, **TRAININGS}
