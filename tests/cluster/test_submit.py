"""Batch jobs on a real SLURM of two cells of four nodes: ``xffl submit``, and the scripts of workflows/slurm."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.conftest import ROOT, slurm_up
from xffl.cluster.slurm.submit import Job, SlurmConfig, find_template, render_script
from xffl.errors import ConfigError

WORKFLOWS = ROOT / "workflows" / "slurm"
HOSTILE = "a'; echo foo"
FITTING = ["--gpus-per-node=2", "--ntasks-per-node=2", "--cpus-per-task=2", "--time=10"]
"""What makes gpu.sbatch fit the nodes here."""
DEADLINE_S = 400.0


@pytest.fixture(scope="module")
def environ(base_environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Bring up two cells of four nodes, each with two pretended GPUs, and have ``xffl`` on the PATH."""
    base = {**base_environ, "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))}
    folder = tmp_path_factory.mktemp("submit") / "s"
    with slurm_up("a:4 b:4", base, folder, MS_GPUS="/dev/null /dev/zero") as found:
        yield found


@pytest.fixture
def start(environ: dict[str, str], tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs a command in a folder with a hostile name."""
    folder = tmp_path / HOSTILE
    folder.mkdir()

    def run(*words: str, cwd: Path = folder, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        ran = subprocess.run(
            words, cwd=cwd, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE_S,
            check=False,
        )  # fmt: skip
        assert code in (None, ran.returncode), f"{words}: {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
        return ran

    return run


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """Wait until something holds, and return it."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.2)
    pytest.fail(f"no {what} within {DEADLINE_S} s")


def state_of(job: str, environ: dict[str, str]) -> dict[str, str]:
    """Return what scontrol says of a job."""
    shown = subprocess.run(
        ["scontrol", "-o", "show", "job", job], env=environ, capture_output=True, text=True, check=True
    ).stdout
    return dict(re.findall(r"(\w+)=(\S+)", shown))


def wait_for_end(job: str, environ: dict[str, str]) -> dict[str, str]:
    def ended() -> dict[str, str] | None:
        found = state_of(job, environ)
        return found if found["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL") else None

    found: dict[str, str] = wait_for(ended, f"end of job {job}")
    return found


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[line.index("{") :]) for line in text.splitlines() if "{" in line]


# xffl submit ----------------------------------------------------------------------------------------------------------


SLOW = """
import time
from dataclasses import replace
from pathlib import Path
from train import DigitsTrainer

class SlowTrainer(DigitsTrainer):
    def training_step(self, batch, batch_idx):
        if Path("slow").exists():
            Path("began").touch()
            time.sleep(2)
        return super().training_step(batch, batch_idx)
"""
TRAINING = ["xffl", "submit", "config.yaml", "--trainer=slow_train.SlowTrainer", "--launch.federated=auto"]
TRAINING += ["--launch.processes=2", "--slurm.nodes=2", "--slurm.nodelist=a1,b1", "--training.epochs=3"]
TRAINING += ["--slurm.time=10", "--slurm.signal_s=20"]


@pytest.fixture(scope="module")
def project(environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the project of ``xffl init`` in a folder with a hostile name, with a trainer that can be slowed down."""
    folder = tmp_path_factory.mktemp("projects") / HOSTILE
    folder.mkdir()
    subprocess.run(["xffl", "init", "demo"], cwd=folder, env=environ, check=True, capture_output=True)
    (folder / "demo" / "slow_train.py").write_text(SLOW)
    return folder / "demo"


@pytest.fixture(scope="module")
def whole(environ: dict[str, str], project: Path) -> subprocess.CompletedProcess[str]:
    """Train in two cells from the start to the end, and give what the command has told."""
    return subprocess.run(
        [*TRAINING, f"--experiment.name={HOSTILE}"], cwd=project, env=environ, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip


def test_the_digits_train_in_two_cells_found_from_the_topology(
    whole: subprocess.CompletedProcess[str], project: Path
) -> None:
    ran, run = whole, project / "runs" / HOSTILE
    assert ran.returncode == 0, ran.stderr
    assert json.loads((run / "topology.json").read_text())["cells"] == [1, 1]
    records = [json.loads(line) for line in (run / "metrics" / "federation.jsonl").read_text().splitlines()]
    accuracy = [record["values"]["val/accuracy"] for record in records if "val/accuracy" in record["values"]]
    assert accuracy[-1] > 0.6
    (log,) = (run / "slurm").glob("*.log")
    # What the job printed was shown; SLURM and xffl tell what they have to tell on the other stream.
    assert ran.stdout == log.read_text() != ""
    assert "is RUNNING" in ran.stderr and ran.stderr.endswith("ended: COMPLETED\n")
    assert (run / "slurm" / f"{log.stem}.sbatch").read_text().startswith("#!/bin/bash\n")


TELL = """
import json, os, sys, time
names = ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_RESTART_COUNT", "SLURM_ARRAY_TASK_ID", "SLURMD_NODENAME",
         "SLURM_GPUS_ON_NODE", "XFFL_FEDERATED", "OMP_NUM_THREADS")
print(json.dumps({**{name: os.environ.get(name) for name in names}, "words": sys.argv[1:]}), flush=True)
if os.path.exists("wait"):
    time.sleep(600)
if os.path.exists("fail") and os.environ.get("SLURM_ARRAY_TASK_ID", "0") == "0":
    sys.exit(int(open("fail").read()) if "SLURM_RESTART_COUNT" not in os.environ else 0)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Give the hostile folder, with a script that tells how it was started."""
    found = tmp_path / HOSTILE
    found.mkdir(exist_ok=True)
    (found / "tell it.py").write_text(TELL)
    return found


def test_words_of_a_script_survive_and_its_exit_code_comes_back(
    start: Callable[..., subprocess.CompletedProcess[str]], folder: Path
) -> None:
    words = ["two  words", HOSTILE, '$HOME `id` "x" \\ %j', "", "-n", "--federated"]
    options = ["--slurm.nodes", "2", "--slurm.tasks_per_node", "2", "--federated", "auto"]
    ran = start("xffl", "submit", *options, "--slurm.nodelist=a2,b3", "tell it.py", *words)
    told = sorted(json_lines(ran.stdout), key=lambda one: int(one["SLURM_PROCID"]))
    assert [one["words"] for one in told] == [words] * 4
    assert [(one["SLURMD_NODENAME"], one["XFFL_FEDERATED"]) for one in told] == [
        ("a2", "2,2"), ("a2", "2,2"), ("b3", "2,2"), ("b3", "2,2"),
    ]  # fmt: skip
    (folder / "fail").write_text("7")
    ran = start("xffl", "submit", "tell it.py", code=7)
    assert re.search(r"ended: FAILED, exit code 7; see /.*\.log\n$", ran.stderr), ran.stderr


def test_a_sweep_runs_at_once_on_one_node_and_each_task_has_its_folder(
    start: Callable[..., subprocess.CompletedProcess[str]], project: Path
) -> None:
    sweep = "{experiment.seed: [0, 1]}"
    words = ["--slurm.tasks_per_node=2", "--launch.processes=2", "--launch.federated=1,1", "--slurm.nodelist=a1"]
    ran = start("xffl", "submit", "config.yaml", *words, "--training.epochs=1", f"--slurm.array={sweep}", cwd=project)
    runs = [project / "runs" / "demo" / f"task_{task}" for task in range(2)]
    configurations = [yaml.safe_load((run / "config.yaml").read_text()) for run in runs]
    assert [one["experiment"]["seed"] for one in configurations] == [0, 1]
    losses = [(run / "metrics" / "federation.csv").read_text().splitlines()[-1] for run in runs]
    assert losses[0].split(",")[-1] != losses[1].split(",")[-1]
    assert set(re.findall(r"^\[(\d+_\d)\] ", ran.stdout, re.MULTILINE)) == set(
        re.findall(r"job (\d+_\d) ended", ran.stderr)
    )
    # The two had one node at the same time: the second began before the first had ended.
    order = re.findall(r"job \d+_(\d) is (RUNNING|COMPLETED)", ran.stderr)
    assert {order.index(("0", "RUNNING")), order.index(("1", "RUNNING"))} == {0, 1}, order


def test_ctrl_c_cancels_and_a_cancelled_job_does_not_rise_again(environ: dict[str, str], folder: Path) -> None:
    (folder / "wait").touch()
    command = ["xffl", "submit", "--cancel-on-interrupt", "--slurm.signal=USR2", "tell it.py"]
    with subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        job = json.loads(process.stdout.readline())["SLURM_JOB_ID"]
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    assert process.returncode == 130
    assert wait_for_end(job, environ)["JobState"] == "CANCELLED"
    assert state_of(job, environ)["Restarts"] == "0"


def test_a_second_job_in_the_same_folder_is_refused(
    start: Callable[..., subprocess.CompletedProcess[str]], project: Path, environ: dict[str, str]
) -> None:
    held = ["xffl", "submit", "config.yaml", "--no-follow", "--slurm.extra=[--hold]", "--experiment.name=held"]
    job = start(*held, cwd=project).stdout.strip()
    ran = start(*held, cwd=project, code=2)
    assert f"job {job}, which has not ended, writes to" in ran.stderr and ran.stderr.count("\n") == 1
    subprocess.run(["scancel", job], env=environ, check=True)
    wait_for_end(job, environ)


@pytest.mark.slow
@pytest.mark.timeout(900)  # SLURM looks at time limits every half a minute, and the machine may be busy
def test_a_job_at_its_time_limit_goes_on_later_with_the_same_result(
    whole: subprocess.CompletedProcess[str], project: Path, environ: dict[str, str]
) -> None:
    (project / "slow").touch()
    command = [*TRAINING, "--experiment.name=halves"]
    with subprocess.Popen(
        command, cwd=project, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        job = wait_for(lambda: list((project / "runs/halves/slurm").glob("*.sbatch")), "job")[0].stem
        start_s = time.monotonic()
        wait_for((project / "began").exists, "first step")
        # It would train for two minutes more, and has one or two since its start: USR2 comes when 20 to 50 s are left.
        minutes = 1 if time.monotonic() - start_s < 12 else 2
        subprocess.run(["scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}"], env=environ, check=True)
        wait_for(lambda: process.poll() is not None or state_of(job, environ)["Restarts"] == "1", "restart")
        (project / "slow").unlink()
        # What is left takes seconds; on a busy machine the start takes longer.
        subprocess.run(["scontrol", "update", f"JobId={job}", "TimeLimit=10"], env=environ, check=False)
        assert process.stdout is not None
        told = process.stdout.read()
    assert process.returncode == 0, told
    assert re.search(rf"xffl: job {job} is PENDING \(BeginTime\).*job {job} is RUNNING.*COMPLETED", told, re.DOTALL), (
        told
    )

    def values(run: str, file: str) -> list[Any]:
        lines = (project / "runs" / run / file).read_text().splitlines()
        records = [json.loads(line) for line in lines]
        return [{key: one[key] for key in ("step", "samples", "values")} for one in records]

    for file in ("metrics/cell_0.jsonl", "metrics/cell_1.jsonl", "metrics/federation.jsonl"):
        assert values("halves", file) == values(HOSTILE, file) != []


# Names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a'; echo foo", 'say "hi" $HOME `id` !x', "# a  b #c", "%x %j", "-n", "é ü", "a:b=c"])
def test_sbatch_takes_a_jobs_name_as_it_is(
    name: str, start: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    job = Job(
        name=name, folder=str(tmp_path), run_folder=str(tmp_path), log=f"{tmp_path}/%j.log", command=("true",),
        tasks_per_node=1,
    )  # fmt: skip
    script = tmp_path / "script"
    script.write_text(render_script(SlurmConfig(extra=("--hold",)), job, find_template()))
    number = start("sbatch", "--parsable", str(script)).stdout.strip()
    shown = start("scontrol", "--oneliner", "show", "job", number).stdout
    start("scancel", number)
    assert f" JobName={name} UserId=" in shown and "Comment=" not in shown
    # A backslash would end the quotes: what follows would be an option of the job.
    with pytest.raises(ConfigError, match="without a backslash"):
        render_script(SlurmConfig(), replace(job, name=f"a\\' --comment=INJECTED '{name}"), find_template())


# workflows/slurm ------------------------------------------------------------------------------------------------------


def batch(start: Callable[..., subprocess.CompletedProcess[str]], *words: str) -> str:
    """Run sbatch until the job has ended, and return its number."""
    job = start("sbatch", "--parsable", *words).stdout.strip()
    wait_for(lambda: not start("squeue", "-h", "-j", job, code=None).stdout, f"end of job {job}")
    return job


@pytest.mark.parametrize("name", ["cpu", "gpu", "cells", "array"])
def test_slurm_takes_each_script_as_it_is(name: str, start: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    fitting = FITTING if name == "gpu" else []
    ran = start("sbatch", "--test-only", *fitting, str(WORKFLOWS / f"{name}.sbatch"), "config.yaml")
    assert "to start at" in ran.stderr
    # What is commented out is taken as well, once the names are a site's own.
    text = (WORKFLOWS / f"{name}.sbatch").read_text()
    assert "##SBATCH --partition=" in text and "#SBATCH --signal=USR2@" in text and "# <-" in text


def test_cpu(start: Callable[..., subprocess.CompletedProcess[str]], folder: Path) -> None:
    job = batch(start, str(WORKFLOWS / "cpu.sbatch"), "tell it.py", "a  b", HOSTILE)
    told = json_lines((folder / f"xffl-{job}.log").read_text())
    assert [one["words"] for one in told] == [["a  b", HOSTILE]] * 4
    assert {one["SLURM_PROCID"] for one in told} == set("0123") and {one["OMP_NUM_THREADS"] for one in told} == {"1"}


def test_gpu(start: Callable[..., subprocess.CompletedProcess[str]], folder: Path) -> None:
    job = batch(start, *FITTING, str(WORKFLOWS / "gpu.sbatch"), "tell it.py")
    told = json_lines((folder / f"xffl-{job}.log").read_text())
    assert len(told) == 4 and {one["SLURM_GPUS_ON_NODE"] for one in told} == {"2"}
    assert {one["OMP_NUM_THREADS"] for one in told} == {"2"} and len({one["SLURMD_NODENAME"] for one in told}) == 2


def test_cells(start: Callable[..., subprocess.CompletedProcess[str]], folder: Path) -> None:
    example = str(ROOT / "examples" / "01_digits" / "train.py")
    words = ["--nodes=2", "--nodelist=a1,b1", str(WORKFLOWS / "cells.sbatch"), example, "--setting", "noniid"]
    job = batch(start, *words, "--epochs", "2")
    log = (folder / f"xffl-{job}.log").read_text()
    assert "2 ranks in 2 cells of 1" in log, log
    assert re.search(r"federated, noniid data: accuracy \d\d\.\d% after", log), log


@pytest.mark.timeout(900)  # SLURM holds a job back for two minutes before it runs again
def test_a_task_of_an_array_goes_back_alone(
    start: Callable[..., subprocess.CompletedProcess[str]], folder: Path
) -> None:
    (folder / "fail").write_text("75")
    words: Sequence[str] = ["--array=0-1", "--ntasks-per-node=1", str(WORKFLOWS / "array.sbatch"), "tell it.py"]
    job = batch(start, *words)
    told = {task: json_lines((folder / f"xffl-{job}_{task}.log").read_text()) for task in (0, 1)}
    for task, restarts in ((0, [None, "1"]), (1, [None])):
        assert [one["SLURM_RESTART_COUNT"] for one in told[task]] == restarts
        assert told[task][-1]["words"] == [f"--experiment.seed={task}", f"--experiment.output_dir=runs/seeds/{task}"]
