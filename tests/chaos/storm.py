"""Kill random ranks of an elastic federation, and measure what the cells that are left lose by it.

    python tests/chaos/storm.py [--minutes 10] [--cells 4] [--ranks 2] [--faults-an-hour 60 125] [--lighthouse 2]

First a run without faults, then one for each rate; local steps are waits of fixed length, so that the cores of this
machine do not decide. Faults come at random times, of equal chance for every rank; ``--lighthouse`` kills that as often
in each run. Printed as a table, and written to ``--out`` as JSON:

gap       seconds from a kill to the next round of the cells that are left
return    seconds from a kill to the next round to which the cell that was killed contributes
share     cells that contribute to a round, of all cells, in the mean over time; beside it what faults allow at least:
          1 - F T / (3600 C) - 0.03, with F faults an hour, a return after T seconds, C cells
rounds    rounds a second, as a share of the run without faults

The exit code is 1 if a round was not the same to the bit on all of its cells, or a process was left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

CELL = Path(__file__).with_name("cell.py")
REPO = Path(__file__).resolve().parents[2]


@dataclass
class Round:
    """What one cell has told of one round."""

    time: float
    number: int
    digest: str
    cells: tuple[int, ...]
    weights: tuple[float, ...]
    tries: int


def start(folder: Path, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    sizes = ",".join([str(args.ranks)] * args.cells)
    command = [sys.executable, "-m", "xffl", "exec", "--elastic", "--federated", sizes, "--restarts", "1000"]
    command += ["--grace", "1", str(CELL), str(folder), "--step-s", str(args.step_s), "--every", str(args.every)]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    with (folder / "output.log").open("wb") as output:
        return subprocess.Popen(command, env=environ, stdout=output, stderr=output, start_new_session=True)


def rounds_of(folder: Path) -> dict[int, list[Round]]:
    """What each cell has told so far."""
    told = {}
    for path in sorted(folder.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        told[int(path.stem)] = [Round(at, *rest[:2], *map(tuple, rest[2:4]), rest[4]) for at, *rest in lines]
    return told


def wait_for_all(folder: Path, cells: int, deadline: float) -> None:
    """Wait until all cells have contributed to a round."""
    while time.monotonic() < deadline:
        for told in rounds_of(folder).values():
            if any(all(one.weights) and len(one.weights) == cells for one in told):
                return
        time.sleep(0.2)
    raise SystemExit(f"the cells did not come to a round; see {folder}/output.log")


def kill(pattern: str, folder: Path, chance: random.Random) -> int | None:
    """Kill a random process of those whose numbers are in files of this name; return its cell."""
    for path in chance.sample(found := sorted(folder.glob(pattern)), len(found)):
        try:
            os.kill(int(path.read_text()), signal.SIGKILL)
        except (ProcessLookupError, ValueError):  # it has ended, or is being written
            continue
        return int(path.name.split(".")[0])
    return None


def kill_lighthouse(launcher: int) -> None:
    """Kill the lighthouse, a child of the launcher."""
    found = subprocess.run(["pgrep", "-P", str(launcher), "-f", "xffl lighthouse"], capture_output=True, text=True)
    for pid in found.stdout.split():
        os.kill(int(pid), signal.SIGKILL)


def run(rate: float, args: argparse.Namespace, chance: random.Random) -> dict[str, Any]:
    """Run all cells for so many minutes under so many faults an hour, and measure."""
    folder = Path(tempfile.mkdtemp(prefix=f"storm-{rate:g}-", dir=args.keep))
    launcher = start(folder, args)
    try:
        wait_for_all(folder, args.cells, time.monotonic() + 180)
        begun = time.time()
        end = begun + 60 * args.minutes
        times = [(begun + at, "rank") for at in fault_times(rate, 60 * args.minutes, chance)]
        if rate:
            times += [
                (begun + (place + 1) / (args.lighthouse + 1) * 60 * args.minutes, "lighthouse")
                for place in range(args.lighthouse)
            ]
        kills: list[tuple[float, int]] = []
        for at, what in sorted(times):
            time.sleep(max(0.0, at - time.time()))
            if what == "lighthouse":
                kill_lighthouse(launcher.pid)
            elif (cell := kill("*.pid", folder, chance)) is not None:
                kills.append((time.time(), cell))
        time.sleep(max(0.0, end - time.time()))
        ended = time.time()
        told = rounds_of(folder)
    finally:
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(timeout=60)
    left = subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True).stdout.split()
    return measure(told, kills, begun, ended, rate, args) | {"left": len(left), "folder": str(folder)}


def fault_times(rate: float, seconds: float, chance: random.Random) -> list[float]:
    times, at = [], 0.0
    while rate and (at := at + chance.expovariate(rate / 3600)) < seconds - 30:  # the last ones must be able to return
        times.append(at)
    return times


def measure(
    told: dict[int, list[Round]],
    kills: list[tuple[float, int]],
    begun: float,
    ended: float,
    rate: float,
    args: argparse.Namespace,
) -> dict[str, Any]:
    first: dict[int, Round] = {}
    unequal = 0
    for one in sorted((one for rounds in told.values() for one in rounds), key=lambda one: one.time):
        kept = first.setdefault(one.number, one)
        unequal += (kept.digest, kept.cells, kept.weights) != (one.digest, one.cells, one.weights)
    rounds = [one for one in sorted(first.values(), key=lambda one: one.time) if begun <= one.time <= ended]
    gaps, returns = [], []
    for at, cell in kills:
        gaps += [next((one.time - at for one in rounds if one.time > at and cell not in one.cells), None)]
        returns += [next((one.time - at for one in told.get(cell, ()) if one.time > at and one.weights[cell]), None)]
    # A cell's share of the time: each round stands for the time since the one before it.
    spans = [later.time - one.time for one, later in pairwise(rounds)]
    share = sum(
        span * sum(weight > 0 for weight in later.weights) for span, later in zip(spans, rounds[1:], strict=True)
    ) / (sum(spans) * args.cells)
    known = [one for one in returns if one is not None]
    allowed = 1 - rate * (statistics.median(known) if known else 0.0) / (3600 * args.cells) - 0.03
    return {
        "faults an hour": rate,
        "kills": len(kills),
        "gap": summary(gaps),
        "return": summary(returns),
        "share": round(share, 4),
        "allowed": round(allowed, 4),
        "rounds a second": round(len(rounds) / (ended - begun), 4),
        "unequal": unequal,
    }


def summary(values: list[float | None]) -> dict[str, float]:
    known = sorted(value for value in values if value is not None)
    if not known:
        return {"never": len(values)}
    median = round(statistics.median(known), 2)
    return {"median": median, "worst": round(known[-1], 2), "never": len(values) - len(known)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--cells", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--faults-an-hour", type=float, nargs="+", default=[60, 125])
    parser.add_argument("--lighthouse", type=int, default=0, help="how often the lighthouse is killed in a run")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--step-s", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="where the runs' folders are made, else a temporary one")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    results = []
    for rate in (0.0, *args.faults_an_hour):
        results.append(result := run(rate, args, chance))
        result["rounds"] = round(result["rounds a second"] / results[0]["rounds a second"], 4)
        print(json.dumps(result), flush=True)
    if args.out is not None:
        args.out.write_text(
            json.dumps({"arguments": {key: str(one) for key, one in vars(args).items()}, "results": results}, indent=1)
        )
    return int(any(result["unequal"] or result["left"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
