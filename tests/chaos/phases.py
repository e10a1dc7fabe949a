"""End or stop one process of an elastic federation at each point of a round, and measure what the others lose by it.

    python -m tests.chaos.phases [--runs kills stops lighthouse] [--round 6] [--out FILE]

Three cells of two, two and one ranks, started by ``xffl exec --elastic``; a round every four steps. For each phase of
:mod:`xffl.distributed.failures.faults` three runs: the first rank of a cell is killed, its other rank, and a whole cell
(that of one rank). In two more the cell of one rank is stopped for a while, as if its host did not answer: in its
steps, and in the exchange. Phases that only the first rank of a cell comes to have no run for the other rank. Last,
the lighthouse is killed while a cell is at each of the phases, and away for ``--lighthouse-s`` seconds.

Printed is a line for each run: the gap and the return of ``storm.py``, where the return of a cell that was stopped is
that after it goes on, and the gap of a lighthouse that after it may start again. The exit code is 1 if a gap or a
return is missed, a round was unequal, or a process was left; and where the lighthouse was away, if the next round was
not made by all cells, in the same epoch, at the first try, or if more than the round under way was made without it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from tests.chaos.storm import LATEST_S, Job, Kill, Xffl, measure, wait_for_all, watch
from xffl.distributed.failures.faults import PHASES

SIZES = (2, 2, 1)
LEADER, OTHER, WHOLE = (0, 0), (0, 1), (2, 0)
VICTIMS = dict.fromkeys(PHASES, (LEADER, OTHER, WHOLE)) | {
    "half": (LEADER, WHOLE),
    "told": (LEADER, WHOLE),
    "publish": (LEADER,),
    "published": (LEADER,),
}
"""Ranks that come to each phase: the first rank of each cell tells votes, that of the lowest one puts the record."""
NEVER = ("repeated", "without a cell", "unequal", "anew", "left")
"""What must not be. Rounds that a cell's end broke may be made again; those runs do not count them."""
RUNS = ("kills", "stops", "lighthouse")
RETURN_S = 30.0
SLOWEST_START_S = 60.0


def ended_at(federation: Xffl, rank: tuple[int, int]) -> float:
    """Wait until a rank that was at work has ended, and return when that was."""
    deadline = time.time() + SLOWEST_START_S
    while federation.living().get(rank, (0, 1))[1] == 0:
        if time.time() > deadline:
            raise SystemExit(f"the fault did not come about; see {federation.folder}/output.log")
        watch([federation], time.time() + 0.02)
    return time.time()


def run(name: str, victim: tuple[int, int], job: Job, stop_s: float) -> dict[str, Any]:
    """Start a federation, let a process of it end or stop, and measure what follows."""
    folder = Path(tempfile.mkdtemp(prefix="phases-"))
    federation = Xffl(job, folder)
    cell = victim[0]
    try:
        wait_for_all([federation], SLOWEST_START_S)
        begun = time.time()
        if stop_s:
            pid, _ = federation.living()[victim]
            if not job.fault:
                os.kill(pid, signal.SIGSTOP)
            while state_of(pid) != "T":
                watch([federation], time.time() + 0.02)
            kill = Kill(time.time(), cell, 0)
            watch([federation], kill.time + stop_s)
            os.kill(pid, signal.SIGCONT)
            back_from = time.time()
        else:
            kill = Kill(ended_at(federation, victim), cell, 0)
            back_from = kill.time
        back = None
        while back is None and time.time() < back_from + RETURN_S:
            watch([federation], time.time() + 0.2)
            later = (one for one in federation.told()[cell] if one.life or (stop_s and one.time > back_from))
            back = next((one.time - back_from for one in later if one.weights[cell]), None)
    finally:
        federation.stop()
    found = measure(federation.told(), [kill], begun, time.time(), job.cells)
    gap = found["gap"].get("median")
    told = {
        "fault": name,
        "rank": "{}:{}".format(*victim),
        "gap": gap,
        "return": None if back is None else round(back, 2),
    }
    return told | {"unequal": found["unequal"], "anew": found["anew"], "left": federation.left(), "folder": str(folder)}


def run_without_lighthouse(phase: str, victim: tuple[int, int], job: Job, away_s: float) -> dict[str, Any]:
    """Start a federation, kill its lighthouse while a cell is at a phase, and keep it away for so many seconds."""
    federation = Xffl(job, folder := Path(tempfile.mkdtemp(prefix="phases-")))
    try:
        wait_for_all([federation], SLOWEST_START_S)
        begun = time.time()
        pid, _ = federation.living()[victim]
        while state_of(pid) != "T":
            watch([federation], time.time() + 0.01)
        killed_at = time.time()
        if not federation.kill_lighthouse():
            raise RuntimeError("the launcher has no lighthouse that could be killed")
        os.kill(pid, signal.SIGCONT)
        while time.time() < killed_at + away_s:
            federation.kill_lighthouse()
            watch([federation], time.time() + 0.1)
        back_at = time.time()
        while all(one.time < back_at + 1 for one in federation.told()[0]) and time.time() < back_at + LATEST_S:
            watch([federation], time.time() + 0.2)
        watch([federation], time.time() + 2)
    finally:
        federation.stop()
    told = federation.told()
    found = measure(told, [], begun, time.time(), job.cells)
    later = [one.time - back_at for one in told[0] if one.time > back_at]
    rounds = [one for one in told[0] if one.time > killed_at]
    numbers = [one.number for one in told[0]]
    return {
        "fault": phase,
        "rank": "lighthouse",
        "gap": round(min(later), 2) if later else None,
        "while away": sum(one.time < back_at for one in rounds),
        "rounds": len(rounds),
        "epochs": len({one.epoch for one in told[0] if one.number >= rounds[0].number - 1}),
        "repeated": sum(one.tries - 1 for one in rounds) + (len(numbers) - 1 - numbers[-1] + numbers[0]),
        "without a cell": sum(not all(one.weights) for one in rounds),
        "unequal": found["unequal"],
        "anew": found["anew"],
        "left": federation.left(),
        "folder": str(folder),
    }


def state_of(pid: int) -> str:
    """Return the state of a process, ``T`` where it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=RUNS)
    parser.add_argument("--round", type=int, default=6)
    parser.add_argument("--stop-s", type=float, default=40.0)
    parser.add_argument("--lighthouse-s", type=float, default=10.0)
    of_each_round = [phase for phase in PHASES if phase not in ("enter", "share")]  # these need a change of cells
    parser.add_argument("--phases", nargs="*", choices=of_each_round, default=of_each_round)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    def fault_of(victim: tuple[int, int], phase: str, *kind: str) -> str:
        return ":".join((*map(str, victim), phase, str(args.round), *kind))

    runs: dict[str, list[tuple[Callable[..., dict[str, Any]], str]]] = {
        "kills": [
            (partial(run, phase, victim, stop_s=0), fault_of(victim, phase))
            for phase in args.phases
            for victim in VICTIMS[phase]
        ],
        "stops": [
            (partial(run, "stopped in its steps", WHOLE, stop_s=args.stop_s), ""),
            (partial(run, "stopped in the exchange", WHOLE, stop_s=args.stop_s), fault_of(WHOLE, "exchange", "stop")),
        ],
        "lighthouse": [
            (partial(run_without_lighthouse, phase, victim, away_s=args.lighthouse_s), fault_of(victim, phase, "stop"))
            for phase in args.phases
            for victim in VICTIMS[phase][-1:]
        ],
    }
    results: list[dict[str, Any]] = []
    for measured, fault in chain.from_iterable(runs[kind] for kind in args.runs):
        results.append(measured(job=Job(cells=len(SIZES), every=4, step_s=0.05, sizes=SIZES, fault=fault)))
        print(json.dumps(results[-1]), flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(results, indent=1) + "\n")
    missed = [one for one in results if None in (one["gap"], one.get("return", 0)) or any(map(one.get, NEVER))]
    missed += [one for one in results if one.get("epochs", 1) > 1 or one.get("while away", 0) > 1]
    gaps = sorted(LATEST_S if one["gap"] is None else one["gap"] for one in results)
    print(f"{len(results)} runs, {len(missed)} missed a bound; gap {gaps[len(gaps) // 2]:.1f} / {gaps[-1]:.1f} s")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
