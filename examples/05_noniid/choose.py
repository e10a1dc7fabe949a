"""Choose learning rates and the like on the validation part, with as many tries for each algorithm.

Every setting in ``methods.py`` is trained with two seeds that the comparison does not use. The best has the highest
validation accuracy, averaged over all rounds and both seeds: that rewards both a fast start and a good end. What was
tried and chosen is written into ``chosen.json``, which ``train.py`` reads. Takes some five minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from jobs import read_records, start
from methods import CHOSEN, GRIDS, Trial, grid_trials
from noniid import CELLS
from rich.console import Console
from rich.table import Table

SEEDS = (100, 101)


def score(records: list[dict[str, Any]], trial: Trial) -> float:
    """Return a setting's accuracy, averaged over rounds and seeds."""
    wanted = (trial.run, trial.lr, trial.options)
    accuracies = [r["accuracy"] for r in records if (r["run"], r["lr"], r["options"]) == wanted]
    return math.fsum(accuracies) / len(accuracies)


def table(scored: list[tuple[Trial, float]], best: dict[str, Trial]) -> Table:
    """Return all that was tried as a table for the terminal."""
    result = Table(title="Validation accuracy, averaged over rounds and seeds", title_justify="left")
    for name in ("algorithm", "setting"):
        result.add_column(name)
    result.add_column("accuracy", justify="right")
    for trial, accuracy in scored:
        is_best = trial == best[trial.run]
        result.add_row(trial.run, trial.text, f"{accuracy:.1%}", style="bold" if is_best else None)
    return result


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=CHOSEN, help="where to write what was chosen")
    parser.add_argument("--work", type=Path, default=Path("runs/noniid"), help="folder for the measurements")
    parser.add_argument("--rounds", type=int, default=40)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    measured = work / "grid.jsonl"
    measured.write_text("")
    for cells in (CELLS, 1):
        start("train.py", cells, "--grid", "--seeds", *SEEDS, "--rounds", options.rounds, "--out", measured)
    records = read_records(measured)
    scored = [(trial, score(records, trial)) for trial in grid_trials()]
    best = {run: max((one for one in scored if one[0].run == run), key=lambda one: one[1])[0] for run in GRIDS}
    found = {
        "seeds": SEEDS,
        "rounds": options.rounds,
        "chosen": {run: {"lr": trial.lr, "options": trial.options} for run, trial in best.items()},
        "tried": [
            {"run": trial.run, "lr": trial.lr, "options": trial.options, "accuracy": round(accuracy, 4)}
            for trial, accuracy in scored
        ],
    }
    options.out.write_text(json.dumps(found, indent=2) + "\n")
    console = Console()
    console.print(table(scored, best))
    console.print(f"  {options.out}", highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
