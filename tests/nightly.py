"""The long forms of tests, one after the other: ``make nightly``, some hours on two cores.

    python -m tests.nightly [--only NAME ...] [--seeds 20] [--logs runs/nightly]

CI runs a short form of each. A part that fails does not end the others. What a part prints goes to a file below
``--logs``; at the end comes a table of all parts, and the exit code is 1 if one has failed. Parts that need root, or
system packages that ``tests/cluster/install.sh`` installs, are listed as skipped where these are missing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Part:
    """One long test: its commands, and what this machine must have for it."""

    name: str
    what: str
    commands: tuple[tuple[str, ...], ...]
    environment: tuple[tuple[str, str], ...] = ()
    missing: Callable[[], str] = lambda: ""


def missing_for_networks() -> str:
    """Return what emulated links need and this machine lacks, or nothing."""
    if os.geteuid() != 0:
        return "needs root"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"needs {', '.join(absent)} (tests/cluster/install.sh)" if absent else ""


def parts(seeds: int) -> tuple[Part, ...]:
    """Return all parts, the shortest first."""
    python = sys.executable
    late = ("-p", "tests.late", "--late")
    property_tests = (python, "-m", "pytest", "-q", "-m", "hypothesis", "-n", "2", "--dist", "loadfile", "tests/unit")
    return (
        Part(
            name="storage",
            what="checkpoints whose saves are killed, refused, replaced while they are read",
            commands=((python, "-m", "tests.chaos.storage", "--long"),),
        ),
        Part(
            name="inputs",
            what="mutated and hostile inputs of every reader of files and of peers",
            commands=((python, "-m", "tests.chaos.inputs", "--long"), (python, "-m", "tests.hostile", "--long")),
        ),
        Part(
            name="nccl",
            what="all strategies and rounds against NCCL's rules",
            commands=((python, "-m", "pytest", "-q", "-m", "long or not long", "tests/ranks/test_nccl.py"),),
            environment=(("NCCL_ALL", "1"),),
        ),
        Part(
            name="rows",
            what="tests and rows of tables that CI leaves out",
            commands=(
                (python, "-m", "pytest", "-q", "-m", "long", "-n", "2", "tests/unit", "tests/ranks"),
                (python, "-m", "pytest", "-q", "-m", "long", "tests/cluster"),
            ),
        ),
        Part(
            name="mutants",
            what="each comparison of the modules that decide is flipped once, and a test has to notice",
            commands=((python, "-m", "tests.mutants"),),
        ),
        Part(
            name="late",
            what="tests of ranks on a machine where processes begin late and stand still at times",
            commands=tuple(
                (python, "-m", "pytest", "-q", "-n", "3", "--dist", "loadfile", *late, str(seed), "tests/ranks")
                for seed in (1, 2)
            ),
        ),
        Part(
            name="draws",
            what="rounds of random options against numpy",
            commands=((python, "-m", "tests.chaos.draws", "--draws", "2000"),),
        ),
        Part(
            name="journal",
            what="cells that follow the rule of the journal, over 50,000 rounds",
            commands=((python, "-m", "tests.chaos.journal", "--long"),),
        ),
        Part(
            name="phases",
            what="an elastic federation that loses a process at each point of a round",
            commands=((python, "-m", "tests.chaos.phases"),),
        ),
        Part(
            name="ledger",
            what="no step of an elastic run counts twice, whatever is killed",
            commands=((python, "-m", "tests.chaos.ledger", "--kills", "10"),),
        ),
        Part(
            name="trainer",
            what="a federated Trainer of transformers that is killed again and again",
            commands=((python, "-m", "tests.chaos.trainer"),),
        ),
        Part(
            name="partition",
            what="an elastic federation whose network breaks",
            commands=((python, "-m", "tests.chaos.partition"),),
            missing=missing_for_networks,
        ),
        Part(
            name="storm",
            what="random kills at 60 and 125 faults an hour",
            commands=((python, "-m", "tests.chaos.storm", "--minutes", "10"),),
        ),
        Part(
            name="properties",
            what=f"property tests with {seeds} seeds",
            commands=tuple((*property_tests, f"--hypothesis-seed={seed}") for seed in range(seeds)),
        ),
    )


def run(part: Part, log: Path) -> str:
    """Run the commands of a part, all of them; return what became of it."""
    reason = part.missing()
    if reason:
        return f"skipped: {reason}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **dict(part.environment)}
    failed = []
    with log.open("w") as out:
        for command in part.commands:
            print("+", *command, file=out, flush=True)
            done = subprocess.run(command, cwd=REPO, env=environment, stdout=out, stderr=subprocess.STDOUT)
            if done.returncode != 0:
                failed.append(f"exit code {done.returncode} of {' '.join(command[2:])}")
    return f"failed: {'; '.join(failed)}" if failed else "passed"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in parts(1)]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--seeds", type=int, default=20, help="seeds for the property tests")
    parser.add_argument("--logs", type=Path, default=REPO / "runs/nightly", help="folder for what the parts print")
    options = parser.parse_args(words)
    if options.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {options.seeds}")
    options.logs.mkdir(parents=True, exist_ok=True)
    results = []
    for part in parts(options.seeds):
        if part.name not in options.only:
            continue
        print(f"{part.name}: {part.what}", flush=True)
        since = time.monotonic()
        result = run(part, options.logs / f"{part.name}.log")
        results.append((part.name, result, time.monotonic() - since))
    print(f"\n{'part':<12} {'minutes':>7}  result (logs: {options.logs})")
    for name, result, seconds in results:
        print(f"{name:<12} {seconds / 60:>7.1f}  {result}")
    return 1 if any(result.startswith("failed") for _, result, _ in results) else 0


if __name__ == "__main__":
    sys.exit(main())
