"""One of five cells sends garbage in every round: what becomes of the model, with each combiner.

Five cells of one process each, with a fifth of the images each, at random::

    xffl exec --processes 5 --federated 1,1,1,1,1 garbage.py

Cell 3 trains like the others, and spoils its model just before each round. ``run.py`` starts this, too. With ``--out
FILE`` the results are appended to a file, one JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import noniid
import torch
import torch.distributed as dist
from torch import nn

import xffl
from xffl.aggregation.algorithms.clients import Client, local
from xffl.training.data.sampler import CellBatchSampler

CELLS, BAD_CELL = 5, 3
LR, BATCH_SIZE, EVERY = 0.35, 64, 5
"""Local learning rate, samples of a step, and steps between rounds: chosen on the validation part, with seeds 100 to
103, so that combiners end near the clean run (docs/noniid.rst). The rate stays: honest updates that shrink under a
fixed clip would leave the last rounds to the bad cell."""
COMBINERS = ("mean", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "norm_clipping")
CLEAN = "clean"
KINDS: Mapping[str, str] = {
    "flip": "its update with the sign turned, ten times as long",
    "huge": "1e30 in all places",
    "nan": "NaN in one place",
}


class Garbage(Client):
    """Spoil what a cell sends; its local steps are honest.

    Derived from xffl's class for what cells do between rounds, as somebody who wants to do harm might.

    :param kind: One of ``KINDS``; ``clean`` does nothing.
    :param is_bad: Whether this rank's cell is the one that does it.
    """

    def __init__(self, kind: str, *, is_bad: bool) -> None:
        self.kind, self.is_bad = kind, is_bad
        self.parameters: dict[str, nn.Parameter] = {}
        self.agreed: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def setup(self, parameters: Mapping[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.parameters = dict(parameters)
        self.agreed = {name: local(one).clone() for name, one in self.parameters.items()}

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave the gradients as they are."""

    @torch.no_grad()
    def before_round(self) -> None:
        for number, (name, parameter) in enumerate(self.parameters.items() if self.is_bad else ()):
            values = local(parameter)
            if self.kind == "flip":
                values.copy_(self.agreed[name] - 10.0 * (values - self.agreed[name]))
            elif self.kind == "huge":
                values.fill_(1e30)
            elif self.kind == "nan" and number == len(self.parameters) - 1:
                values.view(-1)[0] = torch.nan

    @torch.no_grad()
    def after_round(self, *, is_dropped: bool) -> None:
        for name, parameter in self.parameters.items():
            self.agreed[name].copy_(local(parameter))

    def state_dict(self) -> dict[str, Any]:
        return {"agreed": {name: one.clone() for name, one in self.agreed.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.agreed = {name: one.clone() for name, one in state["agreed"].items()}

    def __str__(self) -> str:
        return f"Garbage({self.kind})"


@dataclass(frozen=True)
class Case:
    """A training.

    :param garbage: What the bad cell sends: one of ``KINDS``, or ``clean``.
    :param combine: How the cells' values become one.
    :param nonfinite: What is done about values that are not finite.
    """

    garbage: str
    combine: str
    nonfinite: str = "reject"


@dataclass(frozen=True)
class Ended:
    """How a training ended; the same on all ranks.

    :param accuracy: Of the honest cells' models on the test part, the mean. They have one model after a round; where a
        round was rejected each has its own.
    :param rounds: Rounds that took place.
    :param error: What ended it before its time; empty if nothing did.
    :param dropped: How often each cell was left out of a round.
    :param named: The tensors that cells were left out for.
    :param norm: Median length of the honest cells' updates.
    """

    accuracy: float
    rounds: int
    error: str
    dropped: dict[int, int]
    named: dict[int, list[str]]
    norm: float


def train(state: xffl.DistributedState, case: Case, data: noniid.Data, *, seed: int, rounds: int, clip: float) -> Ended:
    """Train one model from scratch; collective over the world."""
    parts = noniid.deal(data.labels, CELLS, "iid", seed)
    sampler = CellBatchSampler(parts, state, batch_size=BATCH_SIZE, seed=seed)
    model = noniid.initialize(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    images, labels = data.training
    reports: list[xffl.RoundReport] = []
    combine = {"name": case.combine, **({"clip": clip} if case.combine == "norm_clipping" else {})}
    scaling = xffl.FederatedScaling(
        model,
        optimizer,
        state,
        every=EVERY,
        client=Garbage(case.garbage, is_bad=state.rank == BAD_CELL),
        aggregator={"combine": combine, "nonfinite": case.nonfinite, "norms": True},
        on_round=reports.append,
    )
    error = ""
    try:
        with scaling:
            steps = rounds * EVERY
            for batch in islice(noniid.epochs(sampler, steps), steps):
                nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
                optimizer.step()
                optimizer.zero_grad()
    except xffl.RoundError as rejected:  # on all ranks alike
        error = str(rejected)
    accuracies = [0.0] * CELLS
    dist.all_gather_object(accuracies, noniid.measure(model, data.test)[0])
    # What the bad cell has spoiled last may never have been sent.
    honest = [cell for cell in range(CELLS) if cell != BAD_CELL]
    accuracy = statistics.fmean(accuracies[cell] for cell in honest)
    named: dict[int, set[str]] = {}
    for report in reports:
        for cell, names in report.nonfinite.items():
            named.setdefault(cell, set()).update(names)
    dropped = [cell for report in reports for cell in report.dropped]
    norms = [report.update_norms[cell] for report in reports if report.update_norms for cell in honest]
    return Ended(
        accuracy,
        sum(not report.is_skipped for report in reports),
        error,
        {cell: dropped.count(cell) for cell in sorted(set(dropped))},
        {cell: sorted(names) for cell, names in named.items()},
        statistics.median(norms) if norms else 0.0,
    )


def cases() -> Iterator[Case]:
    """Yield all that is tried but the clean run, which comes first."""
    for kind in ("flip", "huge"):
        for combine in COMBINERS:
            yield Case(kind, combine)
    yield Case("nan", "mean")
    for combine in COMBINERS:
        yield Case("nan", combine, "drop_cell")


def trainings(
    state: xffl.DistributedState, data: noniid.Data, *, seed: int, rounds: int, tried: Sequence[Case]
) -> Iterator[tuple[Case, Ended]]:
    """Train without garbage, which tells how long an honest update is, and then with it; collective over the world."""
    clean = Case(CLEAN, "mean")
    ended = train(state, clean, data, seed=seed, rounds=rounds, clip=1.0)
    yield clean, ended
    for case in tried:
        yield case, train(state, case, data, seed=seed, rounds=rounds, clip=ended.norm)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rounds", type=int, default=180)
    parser.add_argument("--out", type=Path, help="append results to this file (JSON lines)")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    with xffl.session() as state:
        if state.topology.sizes != (1,) * CELLS:
            raise xffl.ConfigError(f"cells {state.topology.sizes} are not five of one rank; start with 1,1,1,1,1")
        data = noniid.load()
        for seed in options.seeds:
            for case, ended in trainings(state, data, seed=seed, rounds=options.rounds, tried=list(cases())):
                if state.rank:
                    continue
                if options.out is not None:
                    with options.out.open("a") as file:
                        file.write(json.dumps({**asdict(case), "seed": seed, **asdict(ended)}) + "\n")
                told = f"; ended by: {ended.error}" if ended.error else ""
                told += f"; left out: {ended.dropped} {ended.named}" if ended.dropped else ""
                print(
                    f"{case.garbage}, {case.combine}, {case.nonfinite}, seed {seed}: test accuracy "
                    f"{ended.accuracy:.1%} after {ended.rounds} rounds{told}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
