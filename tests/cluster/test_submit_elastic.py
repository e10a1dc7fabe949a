"""``xffl submit --elastic`` on a real SLURM: a batch job for each cell."""

from __future__ import annotations

import re
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cluster.exec_jobs import XFFL

pytestmark = pytest.mark.skipif(find_spec("torchft") is None, reason="needs the extra elastic")

DEADLINE_S = 180.0

# Steps are slow until the test has seen what it wants to; each round is written down.
TRAINER = """
import hashlib
import os
import time
from pathlib import Path

from train import DigitsTrainer
from xffl.training import Callback


class SlowTrainer(DigitsTrainer):
    waits = 0

    def training_step(self, batch, batch_idx):
        if Path("slow").exists():
            self.waits += 1
            # SLURM lets a job that it puts back wait for up to two minutes, in which the others must not finish.
            time.sleep(0.25 if self.waits < 120 else 1.0)
        return super().training_step(batch, batch_idx)


class Rounds(Callback):
    def post_round(self, trainer, report):
        bits = hashlib.sha256()
        for one in trainer.model.state_dict().values():
            bits.update(one.numpy().tobytes())
        cell, cells = os.environ["XFFL_CELL"][0], "".join(map(str, report.cells))
        with open(f"rounds.{cell}", "a") as file:
            print(os.environ["XFFL_RESTARTS"], report.round, bits.hexdigest(), cells, file=file, flush=True)
"""


class Round(NamedTuple):
    """One round as a cell has seen it."""

    life: int
    round: int
    digest: str
    cells: str


class Run:
    """The run, its jobs, and what they have written."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self.folder, self._environ = folder, environ
        self.jobs: list[str] = []

    def rounds(self, cell: int) -> list[Round]:
        file = self.folder / f"rounds.{cell}"
        lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return [Round(int(life), int(number), digest, cells) for life, number, digest, cells in lines]

    def call(self, *command: str) -> str:
        """Call one of SLURM's commands."""
        return subprocess.run(command, env=self._environ, check=True, capture_output=True, text=True, timeout=60).stdout

    def log(self, cell: int) -> str:
        file = self.folder / f"runs/demo/cell_{cell}/slurm/{self.jobs[cell]}.log"
        return file.read_text() if file.exists() else ""

    def wait(self, what: str, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"no {what}: {self.call('squeue')}" + "".join(map(self.log, range(3))))
            time.sleep(0.1)

    def wait_for_rounds(self, cells: str, cell: int, life: int) -> None:
        """Wait for two rounds of these cells from now on, as a life of one of them has seen them."""
        before = len(self.rounds(cell))

        def made() -> bool:
            return [(one.life, one.cells) for one in self.rounds(cell)[before:]].count((life, cells)) > 1

        self.wait(f"rounds of cells {cells}", made)


@pytest.mark.timeout(600)
def test_jobs_of_cells_are_requeued_preempted_and_late(slurm: dict[str, str], tmp_path: Path) -> None:
    """The requeued one has the lighthouse, which another job takes over."""
    subprocess.run([*XFFL, "init", "demo"], cwd=tmp_path, env=slurm, check=True, capture_output=True)
    run = Run(tmp_path / "demo", slurm)
    (run.folder / "slow_train.py").write_text(TRAINER)
    config = run.folder / "config.yaml"
    text = config.read_text().replace(", validate_every_rounds: 1", "").replace("every_rounds: 2", "every_rounds: 5")
    config.write_text(text + "  - class_path: slow_train.Rounds\n")
    (run.folder / "slow").touch()
    words = [
        "--trainer=slow_train.SlowTrainer",
        "--federation.every=3",
        "--training.epochs=10",
        "--slurm.extra=[--hold]",
    ]
    command = [*XFFL, "submit", "config.yaml", "--elastic", "--cells=3", "--federated=1", *words]
    with subprocess.Popen(
        command, cwd=run.folder, env=slurm, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as following:
        try:
            assert following.stderr is not None and following.stdout is not None
            run.jobs = [following.stderr.readline().split()[3] for _ in range(3)]
            lighthouse = run.folder / "runs/demo/lighthouse"
            run.call("scontrol", "release", run.jobs[0])
            run.wait("lighthouse", lighthouse.exists)
            first = lighthouse.read_text()
            run.call("scontrol", "release", run.jobs[1])
            run.wait_for_rounds("01", 0, 0)  # two of three begin
            run.call("scontrol", "release", run.jobs[2])
            run.wait_for_rounds("012", 2, 0)
            run.call("scontrol", "requeue", run.jobs[0])
            run.wait_for_rounds("12", 1, 0)
            assert lighthouse.read_text() != first
            run.call("scancel", "--signal=USR2", run.jobs[1])  # as SLURM before the time limit: to the ranks alone
            run.wait("return of cell 1", lambda: any(one.life for one in run.rounds(1)))
            run.wait_for_rounds("012", 0, 1)
            (run.folder / "slow").unlink()
            out, err = following.communicate(timeout=DEADLINE_S)
        finally:
            subprocess.run(["scancel", *run.jobs], env=slurm, check=False)
    assert following.returncode == 0, err
    for cell, job in enumerate(run.jobs):
        assert f"xffl: job {job} (cell {cell}) ended: COMPLETED\n" in err
        assert f"\n[cell {cell}] " in f"\n{out}"
    digests = defaultdict(set)
    for cell in range(3):
        for one in run.rounds(cell):
            digests[one.round].add(one.digest)
        assert {one.life for one in run.rounds(cell)} == ({0} if cell == 2 else {0, 1})
    assert {len(found) for found in digests.values()} == {1}  # no two models are called alike
    assert sorted(digests) == list(range(2, max(digests) + 1))  # the first is the start
    assert f"xffl: this job runs the lighthouse, at {first}" in run.log(0)
    assert re.search("this job runs the lighthouse", run.log(1) + run.log(2))
    assert f"xffl: job {run.jobs[1]} is put back into the queue, after 0 restarts" in run.log(1)
    assert not lighthouse.exists()  # whoever ended last has put it out
    token = (run.folder / "runs/demo/token").read_text().strip()
    scripts = [*run.folder.glob("runs/demo/cell_*/slurm/*.sbatch")]
    assert len(scripts) == 3 and not any(token in script.read_text() for script in scripts)
