"""Train in three cells that are batch jobs of a real SLURM, which requeues one, preempts one, and starts one late.

    sudo python -m tests.chaos.slurm [--late-s 600] [--times 3] [--rounds 40] [--faulty 0] [--seeds 3] [--out FILE]

Hosts are network namespaces (``tests/cluster/net``) on two sides of a link of 200 Mbit/s and 10 ms, with SLURM over
them. The digits and the language model that ``xffl init`` writes train at the same time, each by ``xffl submit
--elastic``, for as many samples of all cells together as so many rounds of twelve steps of each have: with 40 for about
as many as these have by default. Steps wait, so that two cores do not decide. Cells 0 and 2 are on one side of the
link, cell 1 on the other. Of each run cell 0, whose job has the lighthouse, is requeued, cell 1 gets SIGUSR2 as before
a time limit, and cell 2 is released so many seconds after the others, and requeued later. Runs of each task with
several seeds (``--faulty 0 1 2``) go through this at the same time. Then both tasks train with the seeds 0, 1 and so on
without faults, in one ``xffl exec --elastic``.

Printed is, for each run, the held-out loss as the mean over the models of the last eight rounds (that of one model
moves by as much as the seeds differ), to how many rounds each cell has contributed, and in which lives; for each task
the losses with faults, and by how much they differ from those without where the seed is the same. Runs end with the
first round after so many samples, some with almost a round more than others, which counts: so those without faults are
compared at as many samples as the run had, between their last two rounds. The exit code is 1 if a job does not end
well, cells of a run end in different rounds or on one side of the link, rounds of one number have two models, or a loss
is above all those without faults.
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
from statistics import fmean
from typing import Any

from tests.chaos.curve import lines
from tests.chaos.storm import environment
from tests.cluster.hosts import Hosts, slurm_over, two_hosts_up

CELLS, EVERY, BATCH, LAST = 3, 12, 8, 8
UNDER_WAY = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")
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
    last, hosts, samples = [], [], dict[int, float]()
    for cell in range(CELLS):
        told = [line.split() for line in (project / f"rounds.{cell}").read_text().splitlines()]
        for _, number, digest, *weights in told:
            digests[number].add(digest)
            samples[int(number)] = sum(map(float, weights))
        contributed.append(sum(float(weights[cell]) > 0 for _, _, _, *weights in told))
        lives.append(sorted({int(life) for life, *_ in told}))
        last.append(int(told[-1][1]))
        environment_file = project / "runs" / "run" / f"cell_{cell}" / "environment.json"
        hosts += [host["host"] for host in json.loads(environment_file.read_text())["hosts"]]
    told = lines(project / "runs" / "run" / "cell_0" / "metrics" / "federation.jsonl")
    losses = [line["values"]["val/loss"] for line in told if "val/loss" in line["values"]]
    measured = [line["values"] for line in told if "val/loss" in line["values"]][-LAST:]
    total = sum(samples.values())
    return {
        "rounds": last,
        "values": {name: round(fmean(values[name] for values in measured), 4) for name in measured[-1]},
        "last": [round(values["val/loss"], 4) for values in measured],
        "samples": [total - samples[max(samples)], total],
        "before": round(fmean(losses[-LAST - 1 : -1]), 4),
        "contributed": contributed,
        "lives": lives,
        "hosts": hosts,
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


def run(folder: Path, late_s: float, rounds: int, times: float, seeds: list[int]) -> dict[str, list[dict[str, Any]]]:
    """Train both tasks as jobs of SLURM, with each seed."""
    step_s = late_s * times / (EVERY * rounds)
    projects = {(task, seed): folder / f"{task}_slurm_{seed}" for task in TASKS for seed in seeds}
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts_up(environment(), folder / "net", len(seeds)))
        short = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ms-")))
        cluster = Cluster(hosts, stack.enter_context(slurm_over(hosts, short / "slurm", len(seeds))))
        jobs: list[list[str]] = []
        for (task, seed), project in projects.items():
            words = make(project, task, rounds, **{"experiment.seed": seed})
            command = [sys.executable, "-m", "xffl", "submit", "config.yaml", "--elastic", f"--cells={CELLS}"]
            command += ["--no-follow", "--federated=1", "--slurm.extra=[--hold]", *words]
            nodes = [f"{side}{seeds.index(seed) + 1}" for side in "aba"]
            places = [[f"--cell={cell}", f"--slurm.nodelist={node}"] for cell, node in enumerate(nodes)]
            told = [cluster.call(*command, *place, cwd=project, STEP_S=str(step_s)) for place in places]
            jobs.append([number.strip() for number in told])
        begun = time.monotonic()
        plan = [(0.0, 0, "release"), (0.0, 1, "release"), (late_s, 2, "release")]
        plan += [(0.25 * late_s, 0, "requeue"), (0.5 * late_s, 1, "preempt"), (1.5 * late_s, 2, "requeue")]
        for at, cell, what in sorted(plan):
            time.sleep(max(0.0, begun + at - time.monotonic()))
            for own in jobs:
                if what == "preempt":
                    cluster.call("scancel", "--signal=USR2", own[cell])
                else:
                    cluster.call("scontrol", what, own[cell])
            print(f"{time.monotonic() - begun:.0f} s: {what} cell {cell}", flush=True)
        deadline = begun + (times + 3) * late_s + 300
        states = cluster.states()
        while any(state in UNDER_WAY for state in states.values()):
            if time.monotonic() > deadline:
                raise SystemExit(f"the jobs did not end: {states}; see {folder}")
            time.sleep(1)
            states |= cluster.states()  # SLURM forgets a job some minutes after its end
        seconds = round(time.monotonic() - begun)
        results: dict[str, list[dict[str, Any]]] = {task: [] for task in TASKS}
        for ((task, seed), project), own in zip(projects.items(), jobs, strict=True):
            ended = [states[number] for number in own]
            results[task].append(sum_up(project) | {"seed": seed, "seconds": seconds, "states": ended})
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


def loss_at(found: dict[str, Any], samples: float) -> float:
    """Return the loss of a run after so many samples of all cells, from those of its last round and the one before."""
    (earlier, later), before = found["samples"], found["before"]
    at_end: float = found["values"]["val/loss"]
    return round(float(before + (at_end - before) * (samples - earlier) / (later - earlier)), 4)


def is_well(found: dict[str, Any]) -> bool:
    """Return whether all jobs of a run ended well, in one round, and on both sides of the link, with one lineage."""
    sides = {host[0] for host in found["hosts"]}
    return {*found["states"]} == {"COMPLETED"} and not found["unequal"] and len({*found["rounds"]}) == 1 < len(sides)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--late-s", type=float, default=600.0)
    parser.add_argument("--times", type=float, default=3.0, help="how many times as long the steps of a cell take")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--faulty", type=int, nargs="+", default=[0], help="seeds of the runs with faults")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each task without")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    results: dict[str, Any] = {"with": run(folder, args.late_s, args.rounds, args.times, args.faulty), "without": {}}
    is_missed = False
    for task, runs in results["with"].items():
        for found in runs:
            print(json.dumps({"task": task, **found}), flush=True)
            is_missed |= not is_well(found)
        seeds = [run_without(folder, task, args.rounds, seed) for seed in range(args.seeds)]
        results["without"][task] = seeds
        for found in runs:
            loss, samples = found["values"]["val/loss"], found["samples"][-1]
            clean = [loss_at(one, samples) for one in seeds]
            pair = clean[found["seed"]] if found["seed"] < len(clean) else None
            difference = None if pair is None else round(loss - pair, 4)
            print(f"{task}, seed {found['seed']}: {loss}; without faults {clean}, difference {difference}", flush=True)
            is_missed |= bool(clean) and loss > max(clean)
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    return int(is_missed)


if __name__ == "__main__":
    if os.geteuid():
        raise SystemExit("network namespaces and SLURM need root")
    sys.exit(main())
