"""Cells of an elastic federation that are jobs of their own: a command for each, and one for their lighthouse."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.chaos.storm import HERE, REPO, System, environment

__all__ = ["LIGHTHOUSE", "Jobs"]

LIGHTHOUSE = -1
"""Stands for the lighthouse among the numbers of the cells."""


def _as_it_is(place: int, command: list[str]) -> list[str]:
    return command


@dataclass
class Jobs(System):
    """Jobs that run; one that has ended is an error, or is started again."""

    address: str = "127.0.0.1:29510"
    """HOST:PORT where the lighthouse listens."""
    script: str = "cell.py"
    options: Sequence[str] = ()
    """Of the script, behind those of the job."""
    wrap: Callable[[int, list[str]], list[str]] = _as_it_is
    """Makes of the command of a cell, or of the lighthouse, the one that runs it on its host."""
    environ: Mapping[str, str] = field(default_factory=dict)
    restarts: bool = False

    def __post_init__(self) -> None:
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        for place in (LIGHTHOUSE, *range(self.job.cells)):
            self._start(place)

    def _start(self, place: int) -> None:
        command = [sys.executable, "-m", "xffl"]
        if place == LIGHTHOUSE:
            command += ["lighthouse", "--bind", self.address, "--heartbeat-timeout", "2"]
            command += ["--journal", str(self.folder / "journal")]
        else:
            ranks = (self.job.sizes or [self.job.ranks] * self.job.cells)[place]
            command += ["exec", "--elastic", f"http://{self.address}", "--cell", f"{place}/{self.job.cells}"]
            command += ["--processes", str(ranks), "--restarts", "1000", "--grace", "1", str(HERE / self.script)]
            command += [str(self.folder), *self.job.words(), *self.options]
        with (self.folder / "output.log").open("ab") as output:
            self.processes[place] = subprocess.Popen(
                self.wrap(place, command),
                env=environment() | {"XFFL_TOKEN": "the run's own token"} | self.environ,
                cwd=REPO,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def poll(self) -> None:
        for place, process in self.processes.items():
            if process.poll() is not None:
                if not self.restarts:
                    raise SystemExit(f"job {place} has ended with {process.returncode}; see {self.folder}/output.log")
                self._start(place)

    def stop(self) -> None:
        """End all jobs: first the cells, as a user does."""
        processes, self.processes = self.processes, {}
        for place, process in processes.items():
            if place != LIGHTHOUSE:
                process.send_signal(signal.SIGTERM)
        try:
            for place, process in processes.items():
                if place != LIGHTHOUSE:
                    process.wait(timeout=30)
        finally:
            for process in processes.values():
                process.kill()
                process.wait()
