"""Train in three cells that are batch jobs of a real SLURM, which requeues one, preempts one, and starts one late.

    sudo python -m tests.chaos.slurm [--late-s 600] [--times 3] [--rounds 40] [--seeds 3] [--out FILE]

Hosts are network namespaces (``tests/cluster/net``) on two sides of a link of 200 Mbit/s and 10 ms, with SLURM over
them. The digits and the language model that ``xffl init`` writes train at the same time, each by ``xffl submit
--elastic``, for as many samples of all cells together as so many rounds of twelve steps of each have: with 40 for about
as many as these have by default. Steps wait, so that two cores do not decide. Of each run cell 0, whose job has
the lighthouse, is requeued, cell 1 gets SIGUSR2 as before a time limit, and cell 2 is released so many seconds after
the others, and requeued later. Then both train with several seeds without faults, in one ``xffl exec --elastic``.

Printed is, for each task, the held-out loss as the mean over the models of the last eight rounds (that of one model
moves by as much as the seeds differ), the same of the seeds, to how many rounds each cell has contributed, and in
which lives. The exit code is 1 if a job does not end well, the cells end in different rounds, rounds of one number have
two models, or a loss is above those of the seeds. The seeds' 95 % prediction interval is printed beside: another seed
is above the highest of five once in six times.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tests.chaos.curve import lines
from tests.chaos.storm import environment
from tests.cluster.hosts import Hosts, slurm_over, two_hosts_up

CELLS, EVERY, BATCH, LAST = 3, 12, 8, 8
TASKS = {"digits": "DigitsTrainer", "language_model": "LanguageTrainer"}
TRAINER = """
import hashlib
import os
import time

from train import {base}
from xffl.training import Callback


class SlowTrainer({base}):
    def training_step(self, batch, batch_idx):
        time.sleep(float(os.environ.get("STEP_S", 0)))
        return super().training_step(batch, batch_idx)


class Rounds(Callback):
    def post_round(self, trainer, report):
        bits = hashlib.sha256()
        for one in trainer.model.state_dict().values():
            bits.update((one.full_tensor() if hasattr(one, "full_tensor") else one).numpy().tobytes())
        cell, life = trainer.world.lone_cell, os.environ["XFFL_RESTARTS"]
        with open(f"rounds.{{cell}}", "a") as file:
            print(life, report.round, bits.hexdigest(), *report.weights, file=file, flush=True)
"""


def make(project: Path, task: str, rounds: int, **more: object) -> list[str]:
    """Make a project, and return the words of its configuration."""
    command = [sys.executable, "-m", "xffl", "init", "--template", task, str(project)]
    subprocess.run(command, check=True, capture_output=True)
    (project / "slow_train.py").write_text(TRAINER.format(base=TASKS[task]))
    config = project / "config.yaml"
    config.write_text(config.read_text() + "  - class_path: slow_train.Rounds\n")
    told: dict[str, object] = {"federation.every": EVERY, "training.max_steps": "null", "training.epochs": 10000}
    told |= {"training.batch_size": BATCH, "federation.max_samples": CELLS * EVERY * rounds * BATCH}
    told |= {"trainer": "slow_train.SlowTrainer", "training.validate_every_rounds": 1, "experiment.name": "run", **more}
    text = config.read_text()  # callbacks with a state come before the one that saves them
    saving = text[text.index("  - class_path: CheckpointCallback") : text.index("  - class_path: slow_train.Rounds")]
    config.write_text(text.replace(saving, "") + saving)
    return [f"--{key}={value}" for key, value in told.items()]


def sum_up(project: Path) -> dict[str, Any]:
    """Return the loss at the end, what each cell has contributed, and whether models of one name are equal."""
    digests, contributed, lives = defaultdict(set), [], []
    last = []
    for cell in range(CELLS):
        told = [line.split() for line in (project / f"rounds.{cell}").read_text().splitlines()]
        for _, number, digest, *_ in told:
            digests[number].add(digest)
        contributed.append(sum(float(weights[cell]) > 0 for _, _, _, *weights in told))
        lives.append(sorted({int(life) for life, *_ in told}))
        last.append(int(told[-1][1]))
    told = lines(project / "runs" / "run" / "cell_0" / "metrics" / "federation.jsonl")
    measured = [line["values"] for line in told if "val/loss" in line["values"]][-LAST:]
    return {
        "rounds": last,
        "values": {name: round(fmean(values[name] for values in measured), 4) for name in measured[-1]},
        "last": [round(values["val/loss"], 4) for values in measured],
        "contributed": contributed,
        "lives": lives,
        "unequal": sum(len(found) > 1 for found in digests.values()),
        "project": str(project),
    }


class Cluster:
    """SLURM's commands, called where users log in."""

    def __init__(self, hosts: Hosts, environ: dict[str, str]) -> None:
        self._hosts, self._environ = hosts, environ | {"OMP_NUM_THREADS": "1"}

    def call(self, *command: str, cwd: Path | None = None, **environ: str) -> str:
        done = subprocess.run(
            self._hosts.command("head", *command),
            env={**self._environ, **environ},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=120,
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} has failed: {done.stderr}")
        return done.stdout

    def states(self) -> dict[str, str]:
        """Return the states of jobs that SLURM knows."""
        told = self.call("squeue", "--noheader", "--states=all", "--format=%i %T")
        return dict(line.split()[:2] for line in told.splitlines())


def run(folder: Path, late_s: float, rounds: int, times: float) -> dict[str, dict[str, Any]]:
    """Train both tasks as jobs of SLURM."""
    step_s = late_s * times / (EVERY * rounds)
    results = {}
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts_up(environment(), folder / "net", 3))
        short = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ms-")))
        cluster = Cluster(hosts, stack.enter_context(slurm_over(hosts, short / "slurm", 3)))
        jobs: dict[str, list[str]] = {}
        for task in TASKS:
            project = folder / task
            words = make(project, task, rounds)
            command = [sys.executable, "-m", "xffl", "submit", "config.yaml", "--elastic", f"--cells={CELLS}"]
            command += ["--no-follow", "--federated=1", "--slurm.extra=[--hold]", *words]
            jobs[task] = cluster.call(*command, cwd=project, STEP_S=str(step_s)).split()
        begun = time.monotonic()
        plan = [(0.0, 0, "release"), (0.0, 1, "release"), (late_s, 2, "release")]
        plan += [(0.25 * late_s, 0, "requeue"), (0.5 * late_s, 1, "preempt"), (1.15 * late_s, 2, "requeue")]
        for at, cell, what in sorted(plan):
            time.sleep(max(0.0, begun + at - time.monotonic()))
            for task, own in jobs.items():
                if what == "preempt":
                    cluster.call("scancel", "--signal=USR2", own[cell])
                else:
                    cluster.call("scontrol", what, own[cell])
                print(f"{time.monotonic() - begun:.0f} s: {what} cell {cell} of {task}", flush=True)
        deadline = begun + (times + 3) * late_s + 300
        numbers = {number for own in jobs.values() for number in own}
        while any(state in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING") for state in cluster.states().values()):
            if time.monotonic() > deadline:
                raise SystemExit(f"the jobs did not end: {cluster.states()}; see {folder}")
            time.sleep(1)
        states = {number: state for number, state in cluster.states().items() if number in numbers}
        for task in TASKS:
            results[task] = sum_up(folder / task) | {
                "seconds": round(time.monotonic() - begun),
                "states": [states.get(number, "COMPLETED") for number in jobs[task]],
            }
    return results


def run_without(folder: Path, task: str, rounds: int, seed: int) -> dict[str, Any]:
    """Train a task in one command, without a fault."""
    project = folder / f"{task}_{seed}"
    words = make(project, task, rounds, **{"experiment.seed": seed})
    command = [sys.executable, "-m", "xffl", "exec", "--elastic", f"--processes={CELLS}", "--federated=1"]
    command += ["config.yaml", *words]
    with (project / "output.log").open("wb") as output:
        done = subprocess.run(command, cwd=project, env=environment(), stdout=output, stderr=output, timeout=1800)
    if done.returncode:
        raise SystemExit(f"the run has failed; see {project}/output.log")
    return sum_up(project) | {"seed": seed}


def prediction_limit(values: list[float]) -> float:
    """Return the upper end of the 95 % prediction interval of one more value, for values of a normal distribution."""
    quantile = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}[len(values)]  # Student's t
    return fmean(values) + quantile * stdev(values) * (1 + 1 / len(values)) ** 0.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--late-s", type=float, default=600.0)
    parser.add_argument("--times", type=float, default=3.0, help="how many times as long the steps of a cell take")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    results: dict[str, Any] = {"with": run(folder, args.late_s, args.rounds, args.times), "without": {}}
    is_missed = False
    for task, found in results["with"].items():
        print(json.dumps({"task": task, **found}), flush=True)
        seeds = [run_without(folder, task, args.rounds, seed) for seed in range(args.seeds)]
        results["without"][task] = seeds
        losses = [one["values"]["val/loss"] for one in seeds]
        print(f"{task}: {found['values']['val/loss']}; without faults {losses}", flush=True)
        is_missed |= any(state != "COMPLETED" for state in found["states"]) or found["unequal"] > 0
        is_missed |= len({*found["rounds"]}) > 1
        if len(losses) > 1:
            most = prediction_limit(losses)
            print(f"{task}: the seeds' 95 % prediction interval ends at {most:.4f}", flush=True)
        is_missed |= bool(losses) and found["values"]["val/loss"] > max(losses)
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    return int(is_missed)


if __name__ == "__main__":
    if os.geteuid():
        raise SystemExit("network namespaces and SLURM need root")
    sys.exit(main())
