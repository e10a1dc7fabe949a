"""Break the network under an elastic federation, and measure what its cells lose by it.

    python -m tests.chaos.partition [--runs NAMES] [--seconds 30] [--out FILE]

For root, with what ``tests/cluster/install.sh`` installs. Three cells of one rank, each a job of its own on a host of
its own: ``a1`` and ``a2`` on side a, where ``head`` runs the lighthouse, and ``b1`` on side b, behind a link of 40
Mbit/s and 10 ms. A round every 3 s of local steps; a model of 4 MB, one message, of which the link takes two for each
round: 1.6 s. The network breaks after a round, or in the exchange of the next one. In turn:

link down       the link between the sides, for ``--seconds``
in an exchange  the same, while messages are on their way
one way         what side b sends is dropped, not what it gets; as long
three parts     as ``link down``, and ``a2`` is off its switch: the side of the lighthouse and the journal is one cell
                of three, which goes on
lighthouse      its host is off, as long
a tenth         of the rate of the link, for the rounds that begin in this time, at least one
host gone       ``b1`` is off its switch, in an exchange, and does not come back

Printed as JSON, one line for each run:

gap       seconds from the cut to the next round of the cells that can go on
apart     rounds that the cells which cannot go on have made meanwhile
trained   seconds from the cut to the last local step of those: they train until their next round is due
together  rounds, and seconds, from healing to the first one of all cells, and to the first to which all contribute
tries     of the rounds of a run, beyond one each
unequal   rounds that were not the same to the bit in all that took part
anew      rounds whose number was no higher than that of the one before

The exit code is 1 where a run has missed what docs/elastic.rst promises.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.chaos.jobs import LIGHTHOUSE, Jobs
from tests.chaos.storm import LATEST_S, Job, Round, environment, everything, wait_for_all, watch
from tests.cluster.hosts import ADDRESSES, Hosts, two_hosts_up

__all__ = ["RUNS", "federation_on", "missed", "run"]

PLACES = {LIGHTHOUSE: "head", 0: "a1", 1: "a2", 2: "b1"}
RATE_MBIT = 40
WIDTH = 700
JOB = Job(cells=3, ranks=1, every=30, step_s=0.1)
SETTLE_S = 1.0
"""A round that was all but made when the network broke is told within so many seconds."""
TOGETHER_S = 60.0
"""After healing, for a round of all cells."""


def network(environ: Mapping[str, str], folder: Path) -> AbstractContextManager[Hosts]:
    """Return the hosts, to be entered."""
    return two_hosts_up(environ, folder, nodes=2, NET_RATE_MBIT=str(RATE_MBIT))


@contextmanager
def federation_on(hosts: Hosts, folder: Path, job: Job = JOB, width: int = WIDTH) -> Iterator[Jobs]:
    """Start the cells and their lighthouse, and wait for the second round of all of them."""
    federation = Jobs(
        job,
        folder,
        address=f"{ADDRESSES['head']}:29510",
        options=("--width", str(width), "--form", "all_gather"),
        wrap=lambda place, command: hosts.command(PLACES[place], *command),
        environ=hosts.environ,
    )
    try:
        wait_for_all([federation], 60)
        yield federation
    finally:
        federation.stop()


def run(name: str, federation: Jobs, hosts: Hosts, seconds: float) -> dict[str, Any]:
    """Break the network in one way for a while, heal it, wait for all cells, and measure what they have told."""
    whole(federation, time.time())  # from a round of all cells on
    cut, heal, apart = RUNS[name]
    if name in IN_EXCHANGE:
        while any(time.time() - last_step(federation, cell) < 5 * federation.job.step_s for cell in range(3)):
            watch([federation], time.time() + 0.05)
    before, cut_at = federation.told(), time.time()
    cut(hosts)
    if heal is None:
        wait_for(federation, lambda one: one.time > cut_at + SETTLE_S and 2 not in one.cells, LATEST_S + seconds)
    elif name == "a tenth":
        while time.time() < cut_at + max(seconds, 1.0):
            whole(federation, time.time(), 3 * TOGETHER_S)
    else:
        watch([federation], cut_at + seconds)
    healed_at = time.time()
    stepped = [last_step(federation, cell) for cell in apart]
    if heal is not None:
        heal(hosts)
        whole(federation, healed_at)
    told = {cell: [one for one in lines if one not in before[cell]] for cell, lines in federation.told().items()}
    trained = {"trained": round(min(stepped) - cut_at, 1)} if stepped else {}
    return {"run": name, "seconds": round(healed_at - cut_at, 1)} | trained | analysed(told, apart, cut_at, healed_at)


def analysed(told: dict[int, list[Round]], apart: Sequence[int], cut_at: float, healed_at: float) -> dict[str, Any]:
    """Draw from the rounds since the cut what the docstring of this file defines."""
    cells = range(len(told))
    here = [one for cell in cells if cell not in apart for one in told[cell]]
    there = [one for cell in apart for one in told[cell]]
    alone = sorted(one.time for one in here if not {*apart} & {*one.cells} or not apart)
    later = sorted({one.number: one for one in reversed(everything(told)) if one.time > healed_at}.items())
    joined = [
        next(((turn + 1, round(one.time - healed_at, 1)) for turn, (_, one) in enumerate(later) if is_whole(one)), None)
        for is_whole in (lambda one: len(one.cells) == len(cells), lambda one: all(one.weights))
    ]
    contents: dict[int, set[tuple[Any, ...]]] = {}
    for one in everything(told):
        contents.setdefault(one.number, set()).add((one.digest, one.cells, one.weights))
    return {
        "gap": round(alone[0] - cut_at, 2) if alone and len(apart) < len(cells) else None,
        "apart": sum(cut_at + SETTLE_S < one.time < healed_at for one in there),
        "together": joined[0],
        "contribute": joined[1],
        "tries": sum(one.tries - 1 for one in everything(told)),
        "unequal": sum(len(found) > 1 for found in contents.values()),
        "anew": sum(later.number <= one.number for lines in told.values() for one, later in pairwise(lines)),
    }


def wait_for(federation: Jobs, condition: Callable[[Round], bool], within_s: float) -> Round:
    """Wait for a round that a cell tells of, and return it."""
    deadline = time.time() + within_s
    while True:
        found = next((one for one in everything(federation.told()) if condition(one)), None)
        if found is not None:
            return found
        if time.time() > deadline:
            raise SystemExit(f"no such round came within {within_s:g} s; see {federation.folder}/output.log")
        watch([federation], time.time() + 0.2)


def whole(federation: Jobs, since: float, within_s: float = TOGETHER_S) -> Round:
    """Wait for a round since a time that all cells have contributed to, and told of."""
    one = wait_for(federation, lambda one: one.time > since and all(one.weights), within_s)
    while not all(any(other.number == one.number for other in lines) for lines in federation.told().values()):
        watch([federation], time.time() + 0.05)
    return one


def last_step(federation: Jobs, cell: int) -> float:
    """Return when a cell has made its last local step."""
    return (federation.folder / f"{cell}.0.pid").stat().st_mtime


def divide(hosts: Hosts) -> None:
    """Leave the lighthouse with one cell of three."""
    hosts.join_sides(False)
    hosts.plug("a2", False)


def unite(hosts: Hosts) -> None:
    """Undo it."""
    hosts.join_sides(True)
    hosts.plug("a2", True)


RUNS: dict[str, tuple[Callable[[Hosts], None], Callable[[Hosts], None] | None, tuple[int, ...]]] = {
    "link down": (lambda hosts: hosts.join_sides(False), lambda hosts: hosts.join_sides(True), (2,)),
    "in an exchange": (lambda hosts: hosts.join_sides(False), lambda hosts: hosts.join_sides(True), (2,)),
    "one way": (lambda hosts: hosts.pass_on("b", False), lambda hosts: hosts.pass_on("b", True), (2,)),
    "three parts": (divide, unite, (1, 2)),
    "lighthouse": (lambda hosts: hosts.plug("head", False), lambda hosts: hosts.plug("head", True), (0, 1, 2)),
    "a tenth": (lambda hosts: hosts.limit_rate(RATE_MBIT / 10), lambda hosts: hosts.limit_rate(None), ()),
    "host gone": (lambda hosts: hosts.plug("b1", False), None, (2,)),
}
"""By name: what breaks the network, what heals it, and which cells make no round meanwhile."""
IN_EXCHANGE = ("in an exchange", "host gone")


def missed(result: dict[str, Any]) -> list[str]:
    """Return the promises that a run has broken."""
    name, apart = result["run"], RUNS[result["run"]][2]
    promises = {
        "gap": result["gap"] is not None and result["gap"] <= LATEST_S if 0 < len(apart) < JOB.cells else True,
        "apart": not result["apart"],
        "together": name == "host gone" or (result["together"] is not None and result["together"][0] <= 2),
        "tries": name != "a tenth" or not result["tries"],
        "unequal": not result["unequal"],
        "anew": not result["anew"],
    }
    return [promise for promise, is_kept in promises.items() if not is_kept]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = []
    folder = Path(tempfile.mkdtemp(prefix="partition-"))
    with network(environment(), folder / "net") as hosts, federation_on(hosts, folder) as federation:
        for name in args.runs:
            result = run(name, federation, hosts, args.seconds)
            results.append(result | {"missed": missed(result), "folder": str(folder)})
            print(json.dumps(results[-1]), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps({"seconds": args.seconds, "runs": results}, indent=1) + "\n")
    return int(any(result["missed"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
