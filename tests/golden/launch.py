"""Run cases, or command lines, on the tree that stands first on ``PYTHONPATH``; write what they tell as JSON.

One process imports torch and the tree, and each rank is a fork of it, so that a world starts in a fraction of a second.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import re
import runpy
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PRELOAD = (
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.pipelining"),
    *("torch.nn.parallel", "sklearn.datasets", "torchmetrics", "deepspeed.runtime.zero.muon.muon_optimizer"),
)
"""What is imported when it is first used, seconds on every rank."""
TIMES = ("time", "seconds", "phases", "hidden", "step_seconds")
"""Fields of reports and records that no two runs share."""
A_WORLD = 16
"""Cases of one world at most."""
DEADLINE_S = 240.0


def load_tree() -> None:
    """Import xffl from the tree, and the cases from beside this file."""
    tree = os.environ["PYTHONPATH"].split(os.pathsep)[0]
    import xffl

    assert xffl.__file__ is not None and Path(xffl.__file__).is_relative_to(tree), f"{xffl.__file__} is not in {tree}"
    sys.path[0] = str(ROOT)  # instead of this folder; what xffl still imports comes from its own folder
    import_module("tests.golden.cases")
    for name in PRELOAD:
        with suppress(ImportError):
            import_module(name)
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # more ranks than cores, see tests/conftest.py


def records_of(run: Path) -> dict[str, Any]:
    """Return what a run's folder holds but for times: records, what it was asked for, and the names of its files."""
    found: dict[str, Any] = {"files": sorted(str(one.relative_to(run)) for one in run.rglob("*") if one.is_file())}
    for file in sorted([*run.glob("metrics/*.jsonl"), *run.glob("rounds/*.jsonl")]):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        found[file.name + " of " + file.parent.name] = [
            {name: value for name, value in line.items() if name not in TIMES} for line in lines
        ]
    found |= {file.name: file.read_text().splitlines()[0] for file in sorted(run.glob("metrics/*.csv"))}
    for file in (run / "origins.json", run / "partition.json"):
        found[file.name] = json.loads(file.read_text()) if file.exists() else None
    return found


def options_of(text: str) -> dict[str, str]:
    """Return the options and arguments that a ``--help`` lists, each with its default."""
    found = {}
    for block in re.split(r"\n(?=  \S)", "\n" + text.partition("\nexamples:")[0])[1:]:
        header = re.split(r"\s{2,}|\n", block.strip())[0]
        if not re.fullmatch(r"-.*|[\w-]+", header):
            continue  # a line of an example
        defaults = re.findall(r"default: ([^()]*)\)", block.partition("\n\n")[0])
        found[header] = defaults[-1] if defaults else ""
    return found


def digests_under(folder: Path) -> dict[str, str]:
    """Return the digests of the files that ``xffl`` has written for others: what is no JSON."""
    files = sorted(one for one in folder.rglob("*") if one.is_file() and one.suffix != ".json")
    return {str(one.relative_to(folder)): hashlib.sha256(one.read_bytes()).hexdigest() for one in files}


def forked(job: Callable[[], object], log: Path) -> int:
    """Start a process that does something, and return its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    if (pid := os.fork()) != 0:
        return pid
    code = 1
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        job()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - told in the log
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def be_rank(rank: int, world_size: int, names: list[str], stem: Path, folder: Path) -> None:
    """Be a rank of a world; the first one writes what was told after each case."""
    import torch
    import torch.distributed as dist

    cases = import_module("tests.golden.cases")
    gc.freeze()  # what was imported need not be looked through by each rank
    torch.set_num_threads(1)
    store = dist.FileStore(str(stem) + ".store", world_size)
    wait = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=wait)
    told: dict[str, Any] = {}
    for name, record in cases.run_cases(names, folder):
        told[name] = record
        if rank == 0:
            Path(f"{stem}.json").write_text(json.dumps(told))


def run_worlds(names: list[str], jobs: int, scratch: Path, folder: Path) -> dict[str, Any]:
    """Run cases; a world that hangs or dies leaves those that it had not ended."""
    cases = import_module("tests.golden.cases")
    stages: list[list[tuple[int, list[str]]]] = [[], []]
    for size, alike in sorted(cases.by_size(names).items(), reverse=True):
        for stage in (0, 1):
            part = [name for name in alike if name.startswith("load ") == bool(stage)]
            stages[stage] += [(size, part[at : at + A_WORLD]) for at in range(0, len(part), A_WORLD)]
    told: dict[str, Any] = {}
    for number, worlds in enumerate(stages):  # what was saved is loaded afterwards
        running: dict[Path, tuple[set[int], float, list[str]]] = {}
        while worlds or running:
            while worlds and len(running) < jobs:
                size, names = worlds.pop(0)
                stem = scratch / f"world-{number}-{len(worlds)}"
                pids = {
                    forked(lambda r=rank, s=size, n=names, t=stem: be_rank(r, s, n, t, folder), Path(f"{stem}.log"))  # type: ignore[misc]
                    for rank in range(size)
                }
                running[stem] = (pids, time.monotonic() + DEADLINE_S, names)
            time.sleep(0.05)
            for stem, (pids, deadline, names) in list(running.items()):
                ended = {pid: code for pid in pids if (code := os.waitpid(pid, os.WNOHANG))[0]}
                pids.difference_update(ended)
                if any(code[1] for code in ended.values()) or time.monotonic() > deadline:
                    for pid in pids:
                        os.kill(pid, signal.SIGKILL)
                        os.waitpid(pid, 0)
                    pids.clear()
                if not pids:
                    del running[stem]
                    file = Path(f"{stem}.json")
                    found = json.loads(file.read_text()) if file.exists() else {}
                    log = Path(f"{stem}.log").read_text(errors="replace")[-3000:]
                    told |= {name: found.get(name, {"lost": log}) for name in names}
    return told


def run_commands(lines: list[list[str]], scratch: Path, folder: Path) -> dict[str, Any]:
    """Run command lines of ``xffl``, with the folder for ``@``; return the exit code and what each has printed."""

    def run(words: list[str]) -> None:
        os.chdir(scratch)
        sys.argv = ["xffl", *words]
        runpy.run_module("xffl", run_name="__main__", alter_sys=True)

    told = {}
    for line in lines:
        words = [word.replace("@", str(folder)) for word in line]
        log = scratch / "command.log"
        log.unlink(missing_ok=True)
        _, status = os.waitpid(forked(lambda words=words: run(words), log), 0)  # type: ignore[misc]
        told[" ".join(line)] = {"code": os.waitstatus_to_exitcode(status), "text": log.read_text()}
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run the cases with this in their names")
    parser.add_argument("--names", help="JSON: run these cases")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--scratch", type=Path, required=True, help="an empty folder")
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints are written and read")
    parser.add_argument("--commands", default="[]", help="JSON: command lines to run, too")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    load_tree()
    everything = import_module("tests.golden.table").CASES
    names = json.loads(asked.names) if asked.names else [name for name in everything if asked.only in name]
    cases = run_worlds(names, asked.jobs, asked.scratch, asked.folder)
    commands = run_commands(json.loads(asked.commands), asked.scratch, asked.folder)
    files = digests_under(asked.folder / "made")
    asked.out.write_text(json.dumps({"cases": cases, "commands": commands, "files": files}, indent=1))


if __name__ == "__main__":
    main()
