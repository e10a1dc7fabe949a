"""Train handwritten digits in three cells with five seeds, each without and with kills, and compare the final losses.

    python -m tests.chaos.accuracy [--rounds 120] [--kills 2:20 1:55 0:85] [--seeds 5]

All runs make the same number of rounds with real steps, then say the loss and the accuracy on the same held-out images.
``2:20`` kills cell 2 after round 20: it loses its steps since then, and comes back some rounds later with the others'
model and an empty optimizer. The steps of runs with kills wait, so that a cell can come back within them; those of the
others do not, since waits change no value.

Printed is a line for each run, then whether the median loss under kills is inside the range of the seeds without. The
exit code is 1 if it is above that range, cells disagree about a final model, a killed cell did not come back, or a run
began anew.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.chaos.storm import environment

CELLS, EVERY, BATCH = 3, 10, 16
HELD_OUT = 360
STEP_S = 0.05


def train(folder: Path, rounds: int, seed: int, step_s: float) -> None:
    """Be the one rank of a cell."""
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits
    from torch import nn

    import xffl

    torch.set_num_threads(1)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))  # in all runs the same
    images, labels = (images / 16).float()[order], labels[order]
    with xffl.session(timeout_s=60) as state:
        assert state.lone_cell is not None
        cell, life = state.lone_cell[0], int(os.environ["XFFL_RESTARTS"])
        (folder / f"{cell}.pid").write_text(str(os.getpid()))
        torch.manual_seed(seed)
        model = xffl.shard(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        own = torch.arange(HELD_OUT + cell, len(labels), CELLS)
        chance = torch.Generator().manual_seed(1000 * seed + 100 * cell + life)
        while len(list(folder.glob("*.pid"))) < CELLS:  # without waits the others would have ended before a late one
            time.sleep(0.01)

        def on_round(report: Any) -> None:
            with (folder / f"{cell}.rounds").open("a") as file:
                file.write(f"{report.round} {life} {report.weights[cell]:g}\n")

        with xffl.FederatedScaling(model, optimizer, state, every=EVERY, on_round=on_round) as scaling:
            while scaling.aggregator.rounds < rounds:
                batch = own[torch.randint(len(own), (BATCH,), generator=chance)]
                F.cross_entropy(model(images[batch]), labels[batch]).backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(step_s)
        with torch.no_grad():
            scores = model(images[:HELD_OUT])
        loss = F.cross_entropy(scores, labels[:HELD_OUT]).item()
        accuracy = (scores.argmax(1) == labels[:HELD_OUT]).float().mean().item()
    (folder / f"{cell}.end").write_text(json.dumps([loss, accuracy]))


def told(folder: Path, cell: int) -> list[tuple[int, int, float]]:
    """Return the rounds of a cell: number, its life, its weight."""
    path = folder / f"{cell}.rounds"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(number), int(life), float(weight)) for number, life, weight in map(str.split, lines)]


def run(rounds: int, seed: int, kills: list[tuple[int, int]]) -> dict[str, Any]:
    """Train once; return what the cells say at the end, and the rounds to which each of them has contributed."""
    folder = Path(tempfile.mkdtemp(prefix="accuracy-"))
    command = [sys.executable, "-m", "xffl", "exec", "--elastic", "--federated", ",".join("1" * CELLS)]
    command += [__file__, "--folder", str(folder), "--rounds", str(rounds), "--seed", str(seed)]
    command += ["--step-s", str(STEP_S if kills else 0.0)]
    left = list(kills)
    with (folder / "output.log").open("wb") as output:
        launcher = subprocess.Popen(command, env=environment(), stdout=output, stderr=output, start_new_session=True)
        try:
            while launcher.poll() is None:
                # Any cell may be the one that is away; who is told of a round is told by the others, too.
                now = max((number for cell in range(CELLS) for number, *_ in told(folder, cell)[-1:]), default=0)
                while left and now >= left[0][1]:
                    cell, _ = left.pop(0)
                    os.kill(int((folder / f"{cell}.pid").read_text()), signal.SIGKILL)
                time.sleep(0.05)
        finally:
            if launcher.poll() is None:
                launcher.send_signal(signal.SIGTERM)
                launcher.wait(timeout=60)
    ends = [json.loads(path.read_text()) for path in sorted(folder.glob("*.end"))]
    if launcher.returncode or len(ends) != CELLS:
        raise SystemExit(f"the run has failed; see {folder}/output.log")
    lines = [told(folder, cell) for cell in range(CELLS)]
    return {
        "seed": seed,
        "kills": len(kills) - len(left),
        "loss": ends[0][0],
        "accuracy": ends[0][1],
        "alike": all(end == ends[0] for end in ends),
        "contributed": [sum(weight > 0 for *_, weight in one) for one in lines],
        "whole": all(one[0] < other[0] for line in lines for one, other in pairwise(line)),  # no round was made twice
        "back": all(any(life and weight for _, life, weight in lines[cell]) for cell, _ in kills),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--kills", nargs="*", default=["2:20", "1:55", "0:85"], help="CELL:ROUND, in their order")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of a rank
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--step-s", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder is not None:
        train(args.folder, args.rounds, args.seed, args.step_s)
        return 0
    kills = [(int(cell), int(number)) for cell, number in (text.split(":") for text in args.kills)]
    results = []
    for seed, faults in ((seed, faults) for seed in range(args.seeds) for faults in ([], kills)):
        results.append(run(args.rounds, seed, faults))
        print(json.dumps(results[-1]), flush=True)
    without = [one["loss"] for one in results if not one["kills"]]
    under = statistics.median(one["loss"] for one in results if one["kills"])
    place = "below" if under < min(without) else "above" if under > max(without) else "inside"
    print(f"median loss under kills {under:.4f}: {place} {min(without):.4f} to {max(without):.4f}, the range without")
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    return int(place == "above" or not all(one["alike"] and one["whole"] and one["back"] for one in results))


if __name__ == "__main__":
    sys.exit(main())
