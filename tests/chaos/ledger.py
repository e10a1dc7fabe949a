"""Kill processes of an elastic federation, restart all from the checkpoints, and see that no step has counted twice.

    python -m tests.chaos.ledger [--kills 10] [--pause 20] [--seed 0] [--out FILE]

Three cells of two, one and one ranks and a lighthouse, a command for each; what has ended is started again. Cells save
checkpoints at several points of a period, and go on from the newest one that is whole. At random moments, ``--pause``
seconds apart in the mean, one of these is killed: a rank, the launcher of a cell, all processes of a cell, the
lighthouse, all processes of the run. Each step has a name; the cells write down in which round which steps have counted
(``ledger_cell.py``). The rounds that led to the model at the end are the *surviving lineage*.

Printed as JSON: what was killed, the number of rounds of the surviving lineage and of others, steps made and counted,
and what must be none:

twice      steps that have counted in two rounds of the surviving lineage
weights    rounds in which a cell's weight was not the number of its steps that have counted
lost       steps that have counted in no round, though their life has lived to see a later round
unequal    rounds of one lineage that were not the same to the bit in two cells
unknown    rounds of the surviving lineage that nobody has told of
left       processes that were there after the end

The exit code is 1 if one of them is not, or the cells were not all in the last rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.jobs import LIGHTHOUSE, Jobs
from tests.chaos.storm import Job, watch
from xffl.cluster.launch.local import held_port

__all__ = ["KINDS", "audit", "kill", "run"]

KINDS = ("rank", "launcher", "cell", "lighthouse", "all")
SIZES = (2, 1, 1)
RETURN_S = 60.0
"""After the last kill, for a round to which all cells contribute."""


def tree(pid: int) -> list[int]:
    """Return a process and all that it has started, and these."""
    found = [pid]
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += tree(int(child))
    return found


def kill(kind: str, cell: int, jobs: Jobs) -> None:
    """Kill one kind of process, or several at once; what stands for itself is started again by the jobs."""
    launchers = jobs.processes
    if kind == "rank":
        ranks = [pid for (one, _), (pid, _) in jobs.living().items() if one == cell]
        victims = ranks[-1:]
    elif kind == "launcher":
        victims = [launchers[cell].pid]
    elif kind == "cell":
        victims = tree(launchers[cell].pid)
    elif kind == "lighthouse":
        victims = tree(launchers[LIGHTHOUSE].pid)
    else:
        victims = [pid for process in launchers.values() for pid in tree(process.pid)]
    for pid in victims:
        with suppress(ProcessLookupError):  # its parent's end was its own
            os.kill(pid, signal.SIGKILL)


def read(folder: Path, cells: int) -> list[list[dict[str, Any]]]:
    """Return the lines of each cell; the last one of a process that was killed may be cut off."""
    lines: list[list[dict[str, Any]]] = []
    for cell in range(cells):
        path, told = folder / f"{cell}.ledger", []
        for line in path.read_text().splitlines() if path.exists() else []:
            with suppress(json.JSONDecodeError):
                told.append(json.loads(line))
        lines.append(told)
    return lines


def last_whole_round(lines: list[list[dict[str, Any]]]) -> float:
    """Return when the last round was told of to which all cells have contributed; 0 if there was none."""
    rounds = [one for told in lines for one in told if one["what"] == "round" and one["weights"]]
    return max((one["time"] for one in rounds if all(one["weights"])), default=0.0)


@dataclass
class Round:
    """What all cells have told of one round: by its lineage there is one."""

    number: int
    base: str = ""  # the lineage of the round before; told by a cell that has not taken the model over
    at: float = 0.0  # when it was told of first
    weights: tuple[float, ...] = ()
    steps: dict[int, list[str]] = field(default_factory=dict)  # by cell, of those that have told of it
    digests: set[str] = field(default_factory=set)


def audit(lines: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Sum up over the surviving lineage which steps have counted."""
    rounds: dict[str, Round] = {}
    for cell, told in enumerate(lines):
        for one in told:
            if one["what"] != "round":
                continue
            found = rounds.setdefault(one["lineage"], Round(one["number"], at=one["time"]))
            found.digests |= {one["digest"]} - {""}
            found.at = min(found.at, one["time"])
            if not one["takes_over"]:
                found.base = one["base"]
            if one["weights"] is not None:
                found.weights = tuple(one["weights"])
                found.steps[cell] = one["steps"]
    at = max(rounds, key=lambda name: (rounds[name].number, rounds[name].at))
    surviving: list[str] = []
    while at in rounds:
        if at in surviving:
            raise ValueError(f"round {rounds[at].number} ({at}) is said to lead to itself")
        surviving.append(at)
        at = rounds[at].base
    counted: dict[str, int] = {}
    twice, weights = [], []
    for name in reversed(surviving):
        found = rounds[name]
        for cell, weight in enumerate(found.weights):
            # A cell that was killed before it could tell of the round has been asked for its weight.
            asked = (one["steps"] for one in reversed(lines[cell]) if one["what"] == "asked" and one["time"] < found.at)
            steps = found.steps[cell] if cell in found.steps else next(asked, []) if weight else []
            if len(steps) != weight:
                weights.append((found.number, cell, weight, len(steps)))
            twice += [step for step in steps if step in counted]
            counted |= dict.fromkeys(steps, found.number)
    made, lost = 0, []
    for told in lines:
        steps = [one for one in told if one["what"] == "step"]
        made += len(steps)
        for life in {one["life"] for one in steps}:
            seen = [one["time"] for one in told if one["life"] == life and one.get("lineage") in surviving]
            own = (one for one in steps if one["life"] == life and one["time"] < max(seen, default=0.0))
            lost += [one["step"] for one in own if one["step"] not in counted]
    numbers = [rounds[name].number for name in surviving]
    return {
        "rounds": len(surviving),
        "other rounds": len(rounds) - len(surviving),
        "steps": made,
        "counted": len(counted),
        "twice": twice,
        "weights": weights,
        "lost": lost,
        "unequal": [found.number for found in rounds.values() if len(found.digests) > 1],
        "unknown": [number for number in range(1, max(numbers)) if number not in numbers],
    }


def run(kinds: list[str], jobs: Jobs, pause_s: float, chance: random.Random) -> dict[str, Any]:
    """Kill what is asked for, one after the other, wait until all cells are back, and audit what they have told."""
    cells = jobs.job.cells
    wait_for_all(jobs, time.time())
    kills = []
    for kind in kinds:
        watch([jobs], time.time() + chance.uniform(0.5, 1.5) * pause_s)
        cell = chance.randrange(cells)
        kills.append([kind, cell] if kind in ("rank", "launcher", "cell") else [kind])
        killed_at = time.time()
        kill(kind, cell, jobs)
    wait_for_all(jobs, killed_at)
    jobs.stop()
    return {"kills": kills} | audit(read(jobs.folder, cells)) | {"left": jobs.left()}


def wait_for_all(jobs: Jobs, since: float) -> None:
    """Wait for a round after a time to which all cells contribute."""
    deadline = time.time() + RETURN_S
    while last_whole_round(read(jobs.folder, jobs.job.cells)) <= since:
        if time.time() > deadline:
            raise SystemExit(f"no round of all cells came; see {jobs.folder}/output.log")
        watch([jobs], time.time() + 0.2)


def missed(result: dict[str, Any]) -> list[str]:
    """Return what must be none and is not."""
    return [name for name in ("twice", "weights", "lost", "unequal", "unknown", "left") if result[name]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--pause", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    kinds = [KINDS[turn % len(KINDS)] for turn in range(args.kills)]
    chance.shuffle(kinds)
    folder = Path(tempfile.mkdtemp(prefix="ledger-"))
    with held_port() as port:
        jobs = federation(folder, port)
        try:
            result = run(kinds, jobs, args.pause, chance)
        finally:
            jobs.stop()
    result |= {"folder": str(folder), "missed": missed(result)}
    print(json.dumps(result))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(result["missed"]))


def federation(folder: Path, port: int) -> Jobs:
    """Start the cells and their lighthouse."""
    job = Job(cells=len(SIZES), sizes=SIZES, every=10, step_s=0.1)
    return Jobs(job, folder, address=f"127.0.0.1:{port}", script="ledger_cell.py", restarts=True)


if __name__ == "__main__":
    sys.exit(main())
