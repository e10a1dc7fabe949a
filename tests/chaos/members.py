"""Change the members of an elastic federation many times, and see whether what its cells hold stays the same.

    python -m tests.chaos.members [--rounds 2000] [--changes 200] [--case plain|codec] [--journal folder|service]
        [--allocator exact|default] [--traces] [--out FILE]

Two cells stay for the whole run. A third one comes, makes some rounds, leaves in order, and comes again in the same
process; in every tenth visit it is killed instead, and a new process comes. All cells note now and then how many
threads, descriptors, process groups, keys of the store that it serves, and how much memory their process has: resident,
given out by glibc, and kept by it of what was given back.
``journal_ms`` is the time that a round spends in the journal, and ``round_ms`` that of a round, both medians.

Printed as JSON: for each cell and number its mean in the second and in the last fifth of the run, its highest, and its
slope for a hundred changes. The exit code is 1 if a mean has grown by more than its allowance, ``ALLOWANCES``.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import xffl
from tests.chaos.storm import REPO, environment
from tests.ports import free_port
from xffl.distributed import ElasticParameters
from xffl.elastic import federation
from xffl.elastic.lighthouse_client import coordination
from xffl.journal.folder import JournalFolder
from xffl.journal.service import JournalService, RemoteJournal

CASES: dict[str, dict[str, Any]] = {
    "plain": {"every": 2},
    "codec": {"every": 3, "delay": 1, "aggregator": {"codec": "int8"}},
}
"""Options of the rounds"""
GUEST = 2
"""The cell that comes and goes"""
KILLED_EVERY = 10
"""In every so many visits the guest is killed"""
AHEAD_S = 0.1
"""How long a cell that stays waits after each round while the guest is late"""
SAMPLES = 100
"""How often a cell that stays notes what it holds"""
TOKEN = "the token of the members"
ALLOCATORS: dict[str, dict[str, str]] = {
    "exact": {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072", "TORCH_FR_BUFFER_SIZE": "0"},
    "default": {},
}
"""Variables without which glibc keeps some MB of what is freed, and torch the last 2,000 collective calls"""
ALLOWANCES = {
    "threads": 1.0,
    "descriptors": 2.0,
    "groups": 0.0,
    "store_keys": 1.0,
    "given_out_mib": 0.5,
    "resident_mib": 8.0,
}
"""How much more a process may hold in the last fifth of the run than in the second one, in the mean"""


@dataclass(frozen=True)
class Plan:
    """What a process of the run is told."""

    url: str
    folder: Path
    case: str
    rounds: int
    changes: int

    @property
    def between(self) -> int:
        """Rounds from a change to the next."""
        return self.rounds // self.changes

    def write(self, name: str, number: int) -> None:
        """Let the other processes know a number."""
        partial = self.folder / f"{name}.{os.getpid()}"
        partial.write_text(str(number))
        partial.replace(self.folder / name)

    def read(self, name: str) -> int:
        """Return a number that a process has written, 0 before it has."""
        file = self.folder / name
        return int(file.read_text()) if file.exists() else 0


class Watch:
    """Notes what this process holds, and how long its rounds take."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._stores: list[weakref.ref[TCPStore]] = []
        self._journal_s = 0.0
        self._rounds: list[tuple[float, float]] = []
        self._traced: tuple[tracemalloc.Snapshot, collections.Counter[str]] | None = None
        self._began = time.monotonic()
        federation.serve_store = self._recording(federation.serve_store)  # type: ignore[attr-defined]
        for kind in (JournalFolder, RemoteJournal):
            for name in ("put", "read_from"):
                setattr(kind, name, self._timed(getattr(kind, name)))

    def _recording(self, serve: Callable[..., TCPStore]) -> Callable[..., TCPStore]:
        def record(**options: Any) -> TCPStore:
            store = serve(**options)
            self._stores = [weakref.ref(store)]
            return store

        return record

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args)
            finally:
                self._journal_s += time.perf_counter() - began

        return timed

    def note_round(self) -> None:
        """Note how long the round took that has just ended."""
        now = time.monotonic()
        self._rounds.append((now - self._began, self._journal_s))
        self.restart()

    def restart(self) -> None:
        """Let the next round begin now."""
        self._began = time.monotonic()
        self._journal_s = 0.0

    def sample(self, number: int) -> None:
        """Write what this process holds after a round."""
        status = Path("/proc/self/status").read_text()
        stores = [store for reference in self._stores if (store := reference()) is not None]
        held = {
            "round": number,
            "process": os.getpid(),
            "threads": int(status.split("Threads:")[1].split()[0]),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "groups": len(dist.distributed_c10d._world.pg_map),
            "store_keys": sum(store.num_keys() for store in stores),
            "resident_mib": round(int(status.split("VmRSS:")[1].split()[0]) / 1024, 2),
            **measure_allocator(),
            **self._trace(number),
            "round_ms": round(1000 * statistics.median(seconds for seconds, _ in self._rounds), 2),
            "journal_ms": round(1000 * statistics.median(seconds for _, seconds in self._rounds), 2),
        }
        self._rounds.clear()
        with self._file.open("a") as file:
            file.write(json.dumps(held) + "\n")

    def _trace(self, number: int) -> dict[str, Any]:
        """Return what Python's objects take since the first sample, where they are traced."""
        if not tracemalloc.is_tracing():
            return {}
        gc.collect()
        snapshot = tracemalloc.take_snapshot()
        kinds = collections.Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())
        told: dict[str, Any] = {"traced_kib": round(sum(one.size for one in snapshot.traces) / 1024, 1)}
        if self._traced is None:
            self._traced = snapshot, kinds
        elif self._traced is not None:
            before, kinds_before = self._traced
            lines = snapshot.compare_to(before, "lineno")[:12]
            told["lines"] = [f"{one.traceback}: {one.size_diff} bytes, {one.count_diff} objects" for one in lines]
            told["kinds"] = dict((kinds - kinds_before).most_common(12))
        return told


class Mallinfo(ctypes.Structure):
    """What glibc's ``mallinfo2`` returns, over all arenas."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


def measure_allocator() -> dict[str, float]:
    """Return how much memory is given out by glibc, and how much it keeps of what was given back."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = Mallinfo
    told = library.mallinfo2()
    return {
        "given_out_mib": round((told.uordblks + told.hblkhd) / 2**20, 3),
        "kept_free_mib": round(told.fordblks / 2**20, 3),
    }


class Cell:
    """A cell of one rank."""

    def __init__(self, plan: Plan, cell: int) -> None:
        self._plan = plan
        self._cell = cell
        self._watch = Watch(plan.folder / f"{cell}.jsonl")
        self._newest = 0

    def run(self) -> None:
        """Train until the run is over."""
        torch.set_num_threads(1)
        elastic = ElasticParameters(lighthouse=self._plan.url, least_cells=1)
        with xffl.session(cell=self._cell, cells=3, elastic=elastic, timeout_s=60) as state:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            options = CASES[self._plan.case]
            scaling = xffl.FederatedScaling(model, optimizer, state, on_round=self._on_round, **options)
            generator = torch.Generator().manual_seed(self._cell)

            def step() -> None:
                model(torch.randn(4, 64, generator=generator)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

            if self._cell == GUEST:
                self._visit(scaling, step)
            else:
                with scaling:
                    while not self._plan.read("end"):
                        step()

    def _visit(self, scaling: xffl.FederatedScaling, step: Callable[[], None]) -> None:
        """Come and leave, until there were enough changes."""
        plan = self._plan
        while (made := plan.read("changes")) < plan.changes:
            while plan.read("newest") < plan.read("next"):
                time.sleep(0.01)
            is_killed = (made // 2) % KILLED_EVERY == KILLED_EVERY - 1
            plan.write("changes", made + 2)  # it comes and goes
            self._newest = 0
            first = plan.read("newest")
            with scaling:
                while self._newest < first + plan.between:
                    step()
                self._watch.sample(self._newest)
                plan.write("next", self._newest + plan.between)
                if is_killed:
                    os.kill(os.getpid(), signal.SIGKILL)

    def _on_round(self, report: Any) -> None:
        plan = self._plan
        self._newest = report.round
        self._watch.note_round()
        if self._cell == GUEST:
            return
        if self._cell == 0:
            plan.write("newest", report.round)
        if report.round % max(1, plan.rounds // SAMPLES) == 0:
            self._watch.sample(report.round)
        if report.round > plan.read("next") + plan.between and not plan.read("end"):
            time.sleep(AHEAD_S)
        self._watch.restart()


def measure(case: str, rounds: int, changes: int, journal: str, allocator: str, *, traces: bool) -> dict[str, Any]:
    """Run the federation, and return what its cells held."""
    with tempfile.TemporaryDirectory(prefix="members-") as place, ExitStack() as stack:
        folder = Path(place)
        lighthouse = coordination().LighthouseServer(
            bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=2000, heartbeat_timeout_ms=2000, quorum_tick_ms=20
        )
        stack.callback(lighthouse.shutdown)
        where = str(folder / "journal")
        if journal == "service":
            service = JournalService(JournalFolder(folder / "journal"), TOKEN.encode(), "127.0.0.1", 0)
            stack.callback(service.close)
            where = service.url
        plan = Plan(f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}", folder, case, rounds, changes)
        environ = environment() | {"XFFL_TOKEN": TOKEN, "XFFL_JOURNAL": where, "OMP_NUM_THREADS": "1"}
        environ |= {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        environ |= {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"}
        environ |= ALLOCATORS[allocator] | ({"PYTHONTRACEMALLOC": "1"} if traces else {})

        def start(cell: int) -> subprocess.Popen[bytes]:
            words = [plan.url, place, case, str(rounds), str(changes), str(cell)]
            with (folder / "output.log").open("ab") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.chaos.members", "--cell", *words],
                    env=environ | {"MASTER_PORT": str(free_port())},
                    stdout=output,
                    stderr=output,
                    cwd=REPO,
                )
            stack.callback(process.kill)
            return process

        plan.write("next", plan.between)
        began = time.monotonic()
        staying = [start(0), start(1)]
        code = -signal.SIGKILL
        while code == -signal.SIGKILL and plan.read("changes") < changes:
            code = start(GUEST).wait()
        while plan.read("newest") < rounds and all(process.poll() is None for process in staying):
            plan.write("next", rounds)
            time.sleep(0.1)
        made = {"rounds": plan.read("newest"), "changes": plan.read("changes")}
        plan.write("end", 1)
        codes = [code, *(process.wait() for process in staying)]
        if any(code not in (0, -signal.SIGKILL) for code in codes):
            raise SystemExit(f"cells ended with {codes}: {(folder / 'output.log').read_text()[-4000:]}")
        samples = [read_samples(folder / f"{cell}.jsonl") for cell in range(3)]
        return {
            "case": case,
            "journal": journal,
            "allocator": allocator,
            **made,
            "seconds": round(time.monotonic() - began),
            "cells": [summarize(of_cell, made["rounds"] / changes) for of_cell in samples],
            "samples": samples,
        }


def read_samples(file: Path) -> list[dict[str, Any]]:
    """Return what a cell has noted, of the guest what its process has that made the most visits."""
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    process = statistics.mode(sample["process"] for sample in samples)
    return [sample for sample in samples if sample["process"] == process]


def summarize(samples: Sequence[dict[str, Any]], between: float) -> dict[str, dict[str, float]]:
    """Return by name what a process held early and late, its highest, and its slope for a hundred changes."""
    fifth = max(1, len(samples) // 5)
    rounds = [sample["round"] for sample in samples]
    summary = {}
    for name in (*ALLOWANCES, "kept_free_mib", "round_ms", "journal_ms"):
        values = [sample[name] for sample in samples]
        slope = statistics.linear_regression(rounds[fifth:], values[fifth:]).slope if len(values) > fifth + 1 else 0.0
        summary[name] = {
            "early": round(statistics.mean(values[fifth : 2 * fifth] or values), 2),
            "late": round(statistics.mean(values[-fifth:]), 2),
            "highest": max(values),
            "slope": round(100 * between * slope, 3),
        }
    return summary


def find_growth(result: dict[str, Any]) -> list[str]:
    """Return what a process held more of at the end of the run, with its cell."""
    return [
        f"{name} of cell {cell}"
        for cell, summary in enumerate(result["cells"])
        for name, allowance in ALLOWANCES.items()
        if summary[name]["late"] > summary[name]["early"] + allowance
    ]


def main(words: list[str] | None = None) -> int:
    """Print what the cells held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--changes", type=int, default=200, help="how often the guest comes or goes")
    parser.add_argument("--case", choices=CASES, default="plain")
    parser.add_argument("--journal", choices=("folder", "service"), default="folder")
    parser.add_argument("--allocator", choices=ALLOCATORS, default="exact", help="whether glibc and torch keep memory")
    parser.add_argument("--traces", action="store_true", help="trace Python's objects, which takes long")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cell", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.cell:
        url, folder, case, rounds, changes, cell = args.cell
        Cell(Plan(url, Path(folder), case, int(rounds), int(changes)), int(cell)).run()
        return 0
    result = measure(args.case, args.rounds, args.changes, args.journal, args.allocator, traces=args.traces)
    grown = find_growth(result)
    print(json.dumps({**{name: result[name] for name in result if name != "samples"}, "grown": grown}, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps({**result, "grown": grown}, indent=1) + "\n")
    return int(bool(grown))


if __name__ == "__main__":
    sys.exit(main())
