"""End or stop one process of an elastic federation at each point of a round, and measure what the others lose by it.

    python -m tests.chaos.phases [--round 6] [--stop-s 40] [--out FILE]

Three cells of two, two and one ranks, started by ``xffl exec --elastic``; a round every four steps. For each phase of
:mod:`xffl.distributed.faults` three runs: the first rank of a cell is killed, its other rank, and a whole cell (that of
one rank). In two more the cell of one rank is stopped for a while, as if its host did not answer: in its steps, and in
the exchange. Phases that only the first rank of a cell comes to have no run for the other rank.

Printed is a line for each run: the gap and the return of ``storm.py``, where the return of a cell that was stopped is
that after it goes on. The exit code is 1 if a gap or a return is missed, a round was unequal, or a process was left.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.chaos.storm import LATEST_S, Job, Kill, Xffl, measure, wait_for_all, watch
from xffl.distributed.faults import PHASES

SIZES = (2, 2, 1)
LEADER, OTHER, WHOLE = (0, 0), (0, 1), (2, 0)
OF_LEADERS = ("half", "told")
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
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--round", type=int, default=6)
    parser.add_argument("--stop-s", type=float, default=40.0)
    of_each_round = [phase for phase in PHASES if phase != "share"]
    parser.add_argument("--phases", nargs="*", choices=of_each_round, default=of_each_round)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    runs = [
        (phase, victim, f"{victim[0]}:{victim[1]}:{phase}:{args.round}", 0.0)
        for phase in args.phases
        for victim in (LEADER, OTHER, WHOLE)
        if victim != OTHER or phase not in OF_LEADERS
    ]
    if args.stop_s:
        runs.append(("stopped in its steps", WHOLE, "", args.stop_s))
        runs.append(("stopped in the exchange", WHOLE, f"2:0:exchange:{args.round}:stop", args.stop_s))
    results = []
    for name, victim, fault, stop_s in runs:
        job = Job(cells=len(SIZES), every=4, step_s=0.05, sizes=SIZES, fault=fault)
        results.append(run(name, victim, job, stop_s))
        print(json.dumps(results[-1]), flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(results, indent=1) + "\n")
    missed = [one for one in results if one["gap"] is None or one["return"] is None or one["unequal"] or one["left"]]
    gaps = sorted(LATEST_S if one["gap"] is None else one["gap"] for one in results)
    print(f"{len(results)} runs, {len(missed)} missed a bound; gap {gaps[len(gaps) // 2]:.1f} / {gaps[-1]:.1f} s")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
