"""Train a small network in cells that lack most classes, with each of several algorithms and seeds.

Four cells of one process each, and a round after each pass of a cell over its data::

    xffl exec --processes 4 --federated 1,1,1,1 train.py --runs fedavg scaffold --seeds 0 1

On a single process it is the centralized run: one cell that has all data, in batches four times as large::

    xffl exec --processes 1 --federated 1 train.py

All trainings of a job run in the same processes, one after the other. With ``--out FILE`` the measurements are appended
to a file, one JSON object a line. With ``--grid`` everything that is tried for an algorithm is trained, and measured on
the validation part instead of the test part; ``choose.py`` does that.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import noniid
import torch
from methods import CENTRALIZED, GRIDS, Trial, chosen_trials, grid_trials
from torch import nn

import xffl
from xffl.training.data.sampler import CellBatchSampler


def train(
    state: xffl.DistributedState, trial: Trial, data: noniid.Data, *, seed: int, rounds: int, part: str
) -> list[dict[str, Any]]:
    """Train one model from scratch and return what was measured after each round; collective over the world."""
    cells = state.cells
    parts = noniid.deal(data.labels, cells, "noniid", seed)
    batch_size = noniid.BATCH_SIZE * noniid.CELLS // cells
    sampler = CellBatchSampler(parts, state, batch_size=batch_size, seed=seed)
    model = noniid.initialize(seed)
    # Without momentum: SCAFFOLD's theory is that of plain steps, and so all have them.
    optimizer = torch.optim.SGD(model.parameters(), lr=trial.lr)
    images, labels = data.training
    records: list[dict[str, Any]] = []
    begin = time.perf_counter()

    def after_round(report: xffl.RoundReport) -> None:
        accuracy, loss = noniid.measure(model, getattr(data, part))  # all cells hold the same now
        records.append(
            {
                "run": trial.run,
                "seed": seed,
                "round": report.round,
                "step": report.round * sampler.steps,
                "accuracy": accuracy,
                "loss": loss,
                "bytes_across": report.bytes_across,
                "seconds": round(time.perf_counter() - begin, 3),
                "part": part,
                **{key: value for key, value in asdict(trial).items() if key != "run"},
            }
        )

    # Cells have equally many samples, so every cell counts the same.
    with xffl.FederatedScaling(
        model, optimizer, state, every=sampler.steps, algorithm=trial.algorithm, on_round=after_round
    ):
        for batch in noniid.epochs(sampler, rounds):
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return records


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=list(GRIDS), help="algorithms; by default all that fit")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--grid", action="store_true", help="train all that is tried, measure on the validation part")
    parser.add_argument("--out", type=Path, help="append measurements to this file (JSON lines)")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    with xffl.session() as state:
        is_centralized = state.cells == 1
        fitting = [run for run in GRIDS if (run == CENTRALIZED) == is_centralized]
        runs = fitting if options.runs is None else options.runs
        if misfits := sorted(set(runs) - set(fitting)):
            raise xffl.ConfigError(
                f"--runs {' '.join(misfits)} cannot be done in {state.cells} cells; start centralized with "
                "--federated 1, and the others with --federated 1,1,1,1"
            )
        data = noniid.load()
        part = "validation" if options.grid else "test"
        for trial in grid_trials() if options.grid else chosen_trials():
            for seed in options.seeds if trial.run in runs else ():
                records = train(state, trial, data, seed=seed, rounds=options.rounds, part=part)
                if state.rank:
                    continue
                if options.out is not None:
                    with options.out.open("a") as file:
                        file.writelines(json.dumps(record) + "\n" for record in records)
                last = records[-1]
                print(
                    f"{trial.run} ({trial.text}), seed {seed}: {part} accuracy {last['accuracy']:.1%} after "
                    f"{last['round']} rounds, {last['seconds']:.1f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
