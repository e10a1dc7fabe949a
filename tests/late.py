"""A plugin of pytest that makes processes late, as on a busy machine: ``pytest -p tests.late --late SEED``.

A process beside the tests looks for those that they start. Of each group that comes at once, such as the ranks of a
world, some neighbours are stopped for seconds right away, so that whole cells begin late; later any process may be
stopped for a moment, pytest itself included. What it does is written to ``runs/late/SEED.log``. A test that fails only
so depends on who comes first, or on seconds.
"""

from __future__ import annotations

import atexit
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

LOOK_S = 0.02
LATE_SHARE = 0.4
"""Share of groups of new processes of which some are stopped at once."""
LATE_S = (1.0, 6.0)
"""How long these begin late."""
BETWEEN_S = (0.5, 4.0)
"""How long after one pause the next one begins."""
PAUSE_S = (0.3, 1.5)
"""Less than the two seconds after which an elastic run takes a cell for lost: this many tests are about."""
LOGS = Path(__file__).parents[1] / "runs" / "late"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--late", type=int, default=1, metavar="SEED", help="seed for which processes are late, and when")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return  # the process that has started the workers looks after them, too
    words = [sys.executable, "-m", "tests.late", str(os.getpid()), str(config.option.late)]
    delaying = subprocess.Popen(words, cwd=Path(__file__).parents[1], start_new_session=True)
    atexit.register(delaying.terminate)


class Delays:
    """Stops processes below one, and lets them go on."""

    def __init__(self, root: int, seed: str) -> None:
        self._root = root
        self._random = random.Random(seed)
        self._known = {root}
        self._stopped: dict[int, float] = {}
        """By process, when it goes on"""
        self._next_pause = time.monotonic()
        LOGS.mkdir(parents=True, exist_ok=True)
        self._log = (LOGS / f"{seed}.log").open("w", buffering=1)

    def run(self) -> None:
        """Delay processes until the first one has ended, or this process is asked to end."""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        try:
            while os.path.exists(f"/proc/{self._root}"):
                self._look()
                time.sleep(LOOK_S)
        finally:
            for pid in list(self._stopped):
                self._resume(pid)

    def _look(self) -> None:
        now = time.monotonic()
        for pid, until in list(self._stopped.items()):
            if now > until:
                self._resume(pid)
        alive = descendants(self._root)
        new = [pid for pid in alive if pid not in self._known]
        self._known = {self._root, *alive}
        if new and self._random.random() < LATE_SHARE:
            first, last = sorted(self._random.choices(range(len(new)), k=2))
            seconds = self._random.uniform(*LATE_S)
            for pid in new[first : last + 1]:
                self._stop(pid, seconds, "begins late")
        elif now > self._next_pause:
            self._next_pause = now + self._random.uniform(*BETWEEN_S)
            self._stop(self._random.choice([self._root, *alive]), self._random.uniform(*PAUSE_S), "pauses")

    def _stop(self, pid: int, seconds: float, what: str) -> None:
        # A process that a test has stopped must not go on because of this one.
        if pid in self._stopped or pid == os.getpid() or state_of(pid) in ("T", "Z", ""):
            return
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGSTOP)
            self._stopped[pid] = time.monotonic() + seconds
            print(f"{time.time():.2f} {pid} {what} {seconds:.1f} s: {command_of(pid)}", file=self._log)

    def _resume(self, pid: int) -> None:
        del self._stopped[pid]
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGCONT)


def descendants(root: int) -> list[int]:
    """Return the processes below one but this process, in the order in which they were started."""
    below: list[int] = []
    left = [root]
    while left:
        pid = left.pop()
        with suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with suppress(OSError):
                    children = Path(f"/proc/{pid}/task/{task}/children").read_text().split()
                    left.extend(int(child) for child in children if int(child) != os.getpid())
        if pid != root:
            below.append(pid)
    return sorted(below)


def state_of(pid: int) -> str:
    """Return the letter of a process's state, or nothing if it has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def command_of(pid: int) -> str:
    """Return the beginning of a process's command."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:120]
    return ""


if __name__ == "__main__":
    Delays(int(sys.argv[1]), sys.argv[2]).run()
