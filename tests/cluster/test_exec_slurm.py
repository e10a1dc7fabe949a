"""``xffl exec`` inside jobs of a real SLURM, and under its srun."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.cluster.exec_jobs import (
    ALIKE,
    DEADLINE_S,
    FOLDER,
    HOSTILE,
    ISOLATED,
    LAYOUT,
    OWN_ERROR,
    RANK,
    SESSION,
    XFFL,
    check_isolated,
    finish,
    seconds_since_one_left,
    start,
    told,
)
from tests.processes import still_there
from tests.ranks.test_pages import scripts_of

REPO = Path(__file__).parents[2]
THREE = ["salloc", "-Q", "-N3", "-w", "a1,a2,b1", "--ntasks-per-node=1"]
EXEC = [*XFFL, "exec"]
TWO_NODES = ["-N2", "-n3", "-w", "a1,b1"]
LIMIT_S = 30


def test_arguments_and_folder_survive(slurm: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    alloc = ["salloc", "-Q", "-N3", "-w", "a1,a2,b1", "--ntasks-per-node=2"]
    words = [RANK, str(folder), "end", "0", *HOSTILE]
    code, out, err = finish(start([*alloc, *EXEC, "--federated", "auto", "--hsdp", "2", *words], slurm, folder))
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"hello from {rank}" for rank in range(6)]
    found = told(folder, 6)
    for rank, one in enumerate(found):
        assert one["argv"] == words and one["cwd"] == str(folder)
        assert (one["XFFL_FEDERATED"], one["XFFL_HSDP"], one["XFFL_RUNNER"]) == ("4,2", "2", None)
        assert (one["rank"], one["SLURMD_NODENAME"], one["node"]) == (rank, ["a1", "a2", "b1"][rank // 2], rank // 2)


def test_a_batch_script_with_uneven_nodes(slurm: dict[str, str], tmp_path: Path) -> None:
    code = tmp_path / "code"
    command = " ".join([*EXEC, "--federated", "auto", "--log-dir", "logs", RANK, str(tmp_path), "end", "0"])
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n{command}\necho $? >{code}.part; mv {code}.part {code}\n")
    options = ["-w", "a1,a2,b1", "-N3", "-n6", "-o", "job.log"]  # four, one and one
    subprocess.run(["sbatch", "-Q", *options, str(script)], env=slurm, cwd=tmp_path, check=True, timeout=60)
    deadline = time.monotonic() + 60
    while not code.exists():
        assert time.monotonic() < deadline, (tmp_path / "job.log").read_text()
        time.sleep(0.1)
    assert code.read_text() == "0\n", (tmp_path / "job.log").read_text()
    nodes = [one["SLURMD_NODENAME"] for one in told(tmp_path, 6)]
    assert nodes == ["a1", "a1", "a1", "a1", "a2", "b1"]
    assert {one["XFFL_FEDERATED"] for one in told(tmp_path, 6)} == {"5,1"}
    names = sorted(file.name for file in (tmp_path / "logs").iterdir())
    assert names == [*(f"rank_0000{rank}_cell_0.log" for rank in range(5)), "rank_00005_cell_1.log"]


def test_cells_whose_nodes_lie_apart_come_together(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "cells").write_text("x a1 b1\ny a2\n")
    alloc = [*THREE, *EXEC, "--federated", "file:cells"]
    code, _, err = finish(start([*alloc, RANK, ".", "end", "0"], slurm, tmp_path))
    assert code == 0, err
    found = told(tmp_path, 3)
    assert [(one["SLURMD_NODENAME"], one["XFFL_FEDERATED"]) for one in found] == [
        ("a1", "2,1"),
        ("b1", "2,1"),
        ("a2", "2,1"),
    ]
    code, out, err = finish(start([*alloc, LAYOUT, "2,1"], slurm, tmp_path))
    assert code == 0, err
    joined = sorted((json.loads(line) for line in out.splitlines()), key=lambda one: int(one["rank"]))
    assert [(one["cell"], one["total"]) for one in joined] == [(0, 6.0), (0, 6.0), (1, 6.0)]


TRAINER = """
import os
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Training:
    epochs: int = 1


@dataclass
class Config:
    training: Training = field(default_factory=Training)


class Trainer:
    config: Config

    def __init__(self, config, *, callbacks=(), origins=None):
        self.config = config

    def fit(self):
        told = os.environ["SLURMD_NODENAME"], os.environ["XFFL_FEDERATED"], self.config.training.epochs
        Path("ran." + os.environ["SLURM_PROCID"]).write_text(repr(told))
"""


def test_a_configuration(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "fake_train.py").write_text(TRAINER)
    (tmp_path / "config.yaml").write_text("trainer: fake_train.Trainer\nlaunch: {federated: auto}\n")
    command = [*THREE, *EXEC, "config.yaml", "--training.epochs", "3"]
    code, _, err = finish(start(command, slurm, tmp_path))
    assert code == 0, err
    found = [(tmp_path / f"ran.{rank}").read_text() for rank in range(3)]
    assert found == [f"('{node}', '2,1', 3)" for node in ("a1", "a2", "b1")]
    code, _, err = finish(start([*command, "--launch.processes", "2"], slurm, tmp_path))
    assert code == 2 and "LaunchError: launch.processes (command line) is 2, but job" in err


WRONG = [
    (
        [*THREE, *EXEC, "--processes", "4", RANK],
        "LaunchError: --processes is 4, but job",
        "HINT: ask SLURM for --ntasks=4",
    ),
    (
        [*THREE, *EXEC, "--processes", "2", RANK],
        "LaunchError: --processes is 2, but job",
        "(1 on a1, 1 on a2, 1 on b1)",
    ),
    ([*THREE, *EXEC, "--federated", "2,2", RANK], "TopologyError: federated sizes (2, 2) sum to 4", "has 3 ranks"),
    (
        ["srun", "-n1", *EXEC, "--processes", "4", RANK],
        "ConfigError: --processes is 4, but srun has started 1",
        "HINT: for 4",
    ),
    (
        ["srun", "-n1", *EXEC, "--hosts", "a:4", RANK],
        "ConfigError: --hosts is given, but srun has started 1",
        "leave it",
    ),
    (["srun", "-n1", *EXEC, "--merge", RANK], "ConfigError: --merge is for the command that starts", "xffl logs DIR"),
    (
        [*EXEC, "--launcher", "srun", RANK],
        "LaunchError: --launcher srun is for the inside of a SLURM job",
        "HINT: start",
    ),
    (
        ["salloc", "-Q", "-N1", "env", "XFFL_SRUN=no-srun", *EXEC, RANK],
        "LaunchError: this is inside job",
        "HINT: load SLURM's module",
    ),
    (
        ["salloc", "-Q", "-N1", *EXEC, "--processes", "64", RANK],
        "LaunchError: srun ended with exit code 1: ",
        "More processors requested than permitted",
    ),
    (
        ["salloc", "-Q", "-n2", "-wa1", "env", "-u", "CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE=1", *EXEC, RANK],
        "LaunchError: 2 ranks on a1 would share 1 GPUs",
        "HINT: give --gpus-per-node=2",
    ),
]


@pytest.mark.parametrize(("command", "message", "remedy"), WRONG, ids=[message[:48] for _, message, _ in WRONG])
def test_what_does_not_fit_is_one_line(
    command: list[str], message: str, remedy: str, slurm: dict[str, str], tmp_path: Path
) -> None:
    code, out, err = finish(start(command, slurm, tmp_path))
    lines = [line for line in err.splitlines() if not line.startswith("srun: error:")]
    assert (code, out, len(lines)) == (2, "", 1), err
    assert lines[0].startswith(f"xffl: {message}") and remedy in lines[0]


@pytest.mark.parametrize(
    ("way", "code", "words"),
    [
        ("raise", 1, "failed with ValueError: seven years " + "of luck" * 300),
        ("kill", 137, "was killed by SIGKILL (signal 9)"),
        ("exit", 17, "exited with code 17"),
    ],
)
def test_a_failing_rank_ends_the_step(way: str, code: int, words: str, slurm: dict[str, str], tmp_path: Path) -> None:
    command = [*THREE, *EXEC, "--federated", "auto", RANK, str(tmp_path), way, "2"]
    ended, _, err = finish(start(command, slurm, tmp_path), LIMIT_S)
    assert ended == code, err
    lines = [line for line in err.splitlines() if not line.startswith("trouble at")]
    assert lines[-1] == f"xffl: rank 2 (cell 1) {words}; all other ranks were stopped"
    if way == "raise":
        assert lines[0] == "Traceback (most recent call last):" and err.count("Traceback") == 1
        assert "runner.py" not in err and "raise ValueError" in err
    else:
        assert len(lines) == 1, err


def test_a_session_that_loses_a_rank(slurm: dict[str, str], tmp_path: Path) -> None:
    command = [*THREE, *EXEC, "--federated", "auto", SESSION, "raise"]
    ended, out, err = finish(start(command, slurm, tmp_path))
    assert ended == 1 and out.count("joined") == 3, err
    assert seconds_since_one_left(out) < LIMIT_S
    assert err.splitlines()[-1].startswith("xffl: rank 2 (cell 1) failed with ValueError: mine")
    assert err.count("Traceback") == 1


def test_the_time_limit(slurm: dict[str, str], tmp_path: Path) -> None:
    code, _, err = finish(start([*THREE, *EXEC, "--timeout", "2", RANK, str(tmp_path), "stay", "0"], slurm, tmp_path))
    assert code == 124 and err.splitlines()[-1] == "xffl: stopped all ranks after 2.0 s, as --timeout says"


def in_shell(*words: str) -> list[str]:
    """Run a command that leaves its process id, since salloc's is another."""
    return ["bash", "-c", 'echo $$ >pid; exec "$@"', "bash", *words]


@pytest.mark.parametrize(
    ("number", "way", "code"), [("USR2", "leave", 75), ("TERM", "leave", 75), ("TERM", "stay", 143)]
)
def test_signals_reach_the_ranks(number: str, way: str, code: int, slurm: dict[str, str], tmp_path: Path) -> None:
    process = start([*THREE, *in_shell(*EXEC, RANK, str(tmp_path), way, "9")], slurm, tmp_path)
    ranks = told(tmp_path, 3)
    os.kill(int((tmp_path / "pid").read_text()), signal.Signals[f"SIG{number}"])
    ended, out, err = finish(process)
    assert ended == code, err
    assert out.count(f"asked to leave by SIG{number}") == (3 if way == "leave" else 0)
    said = (
        "asked to leave and has saved its state (exit code 75)" if way == "leave" else "stopped all ranks after SIGTERM"
    )
    assert said in err.splitlines()[-1]
    assert not still_there([one["pid"] for one in ranks], DEADLINE_S)


def test_a_killed_launcher_leaves_no_ranks(slurm: dict[str, str], tmp_path: Path) -> None:
    process = start([*THREE, *in_shell(*EXEC, RANK, str(tmp_path), "stay", "9")], slurm, tmp_path)
    ranks = told(tmp_path, 3)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert not still_there([one["pid"] for one in ranks], DEADLINE_S)
    finish(process)


def test_two_jobs_at_once_on_one_node(slurm: dict[str, str], tmp_path: Path) -> None:
    command = ["salloc", "-Q", "-N1", "-n2", "-w", "a1", *EXEC, "--log-dir"]
    both = [start([*command, f"logs{job}", LAYOUT, "1,1"], slurm, tmp_path) for job in range(2)]
    for job, process in enumerate(both):
        code, out, err = finish(process)
        assert (code, out) == (0, ""), err
        texts = [(tmp_path / f"logs{job}" / f"rank_0000{rank}.log").read_text() for rank in range(2)]
        joined = [json.loads(text.splitlines()[-1]) for text in texts]
        assert [(one["total"], one["listens"]) for one in joined] == [(3.0, ["127.0.0.1"])] * 2


def test_logs_and_the_merged_stream(slurm: dict[str, str], tmp_path: Path) -> None:
    lines = {
        f"[cell {rank // 2} rank {rank}] {words} {rank}" for rank in range(3) for words in ("hello from", "trouble at")
    }
    command = [*THREE, *EXEC, "--federated", "auto", "--merge"]
    code, out, err = finish(start([*command, RANK, str(tmp_path), "end", "0"], slurm, tmp_path))
    assert code == 0 and {*out.splitlines(), *err.splitlines()} == lines
    assert all("hello" in line for line in out.splitlines())
    code, out, err = finish(start([*command, "--log-dir", "l o", RANK, str(tmp_path), "raise", "1"], slurm, tmp_path))
    assert code == 1 and lines <= {*out.splitlines()} and "[cell 0 rank 1] ValueError: seven years" in out
    assert err.splitlines()[-1].startswith("xffl: rank 1 (cell 0) failed with ValueError")
    code, out, _ = finish(start([*XFFL, "logs", "l o", "--ranks", "0,2"], slurm, tmp_path))
    assert code == 0 and set(out.splitlines()) == {line for line in lines if "rank 1" not in line}


def test_under_srun_each_process_is_a_rank(slurm: dict[str, str], tmp_path: Path) -> None:
    step = ["srun", "-N2", "-n3", "-w", "a1,b1", *EXEC, "--federated", "2,1"]
    code, _, err = finish(
        start([*step, "--log-dir", "logs", RANK, str(tmp_path), "end", "0", *HOSTILE[1:]], slurm, tmp_path)
    )
    assert code == 0, err
    assert [one["argv"][4:] for one in told(tmp_path, 3)] == [HOSTILE[1:]] * 3
    assert {file.name for file in (tmp_path / "logs").iterdir()} == {
        "rank_00000_cell_0.log", "rank_00001_cell_0.log", "rank_00002_cell_1.log",
    }  # fmt: skip
    code, _, err = finish(start(["srun", "-K", *step[1:], RANK, str(tmp_path), "raise", "1"], slurm, tmp_path))
    assert code != 0 and err.count("Traceback") == 1 and "in_place" not in err and "runpy" not in err
    assert "xffl: rank 1 failed with ValueError: seven years" in err
    code, _, err = finish(start(["srun", "-K", *step[1:], RANK, str(tmp_path), "lost", "2"], slurm, tmp_path))
    assert code != 0 and "Traceback" not in err
    assert "xffl: rank 2 lost another rank: RuntimeError: [gloo] Connection closed by peer" in err


@pytest.mark.parametrize("start_by", [["salloc", "-Q", *TWO_NODES, *EXEC], ["srun", *TWO_NODES, *EXEC]])
def test_nodes_as_isolated_cells(start_by: list[str], slurm: dict[str, str], tmp_path: Path) -> None:
    isolated = [*start_by, "--isolate", "--federated", "2,1", ISOLATED, str(tmp_path)]
    code, _, err = finish(start(isolated, slurm, tmp_path))
    assert code == 0, err
    ranks = check_isolated(tmp_path, (2, 1))
    assert [(one["LOCAL_RANK"], one["LOCAL_WORLD_SIZE"]) for one in ranks] == [("0", "2"), ("1", "2"), ("0", "1")]


@pytest.mark.parametrize("framework", ["transformers", "lightning"])
def test_trainers_of_frameworks_on_nodes_as_cells(framework: str, slurm: dict[str, str], tmp_path: Path) -> None:
    """The srun of docs/frameworks.rst: the models that the cells write in the end are one model."""
    pytest.importorskip(framework)
    words = ["train.py"]
    if framework == "transformers":
        pytest.importorskip("peft")
        shutil.copy(REPO / "examples/07_trainer/train.py", tmp_path)
        words += ["--steps", "10"]
        name = "trained/cell_{}/model.safetensors"
    else:
        [script] = scripts_of("frameworks")
        save = 'torch.save(module.state_dict(), cell_folder("runs") / f"model_{trainer.global_rank}.pt")'
        (tmp_path / "train.py").write_text(f"{script.text}\n{save}\n")
        name = "runs/cell_{}/model_0.pt"
    environ = {**slurm, "HF_HUB_OFFLINE": "1"}
    command = ["srun", "--kill-on-bad-exit", *TWO_NODES, *EXEC, "--isolate", "--federated", "2,1", *words]
    code, _, err = finish(start(command, environ, tmp_path))
    assert code == 0, err
    first, second = (tmp_path / name.format(cell) for cell in range(2))
    assert first.read_bytes() == second.read_bytes()


DIES = """
class Mortality(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        if os.path.exists("is_mortal") and rounds.state.is_first_of_job and trainer.global_step == 25:
            os.remove("is_mortal")
            os.kill(os.getpid(), 9)


module = Module()
"""
"""In its first life the first rank is killed between two rounds; both cells have saved before the one at step 20."""


@pytest.mark.long
def test_a_killed_srun_of_lightning_goes_on_to_the_same_bits(slurm: dict[str, str], tmp_path: Path) -> None:
    """The script of docs/frameworks.rst, two nodes as two cells: the same srun again continues it."""
    pytest.importorskip("lightning")
    [script] = scripts_of("frameworks")
    text = script.text.replace("module = Module()\n", DIES)
    text = text.replace("callbacks=[", "callbacks=[Mortality(), rounds := ")
    assert text.count("Mortality") == 2
    text += """
torch.save(module.state_dict(), cell_folder("runs") / f"model_{trainer.global_rank}.pt")
print("resumed" if rounds.resumed else "began", flush=True)
"""
    command = ["srun", "--kill-on-bad-exit", *TWO_NODES, *EXEC, "--isolate", "--federated", "2,1", "train.py"]
    models = []
    for name, lives in (("whole", 1), ("killed", 2)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(text)
        if lives == 2:
            (folder / "is_mortal").touch()
            code, _, err = finish(start(command, slurm, folder))
            assert code != 0 and not (folder / "is_mortal").exists(), err
        code, out, err = finish(start(command, slurm, folder))
        assert code == 0, err
        assert out.split().count("resumed") == (3 if lives == 2 else 0)
        models += [(folder / f"runs/cell_{cell}/model_0.pt").read_bytes() for cell in range(2)]
    assert models == models[:1] * 4


def test_replica_groups_are_steps_of_a_job(slurm: dict[str, str], tmp_path: Path) -> None:
    """The batch script of docs/fault_tolerance.rst: a group that loses a rank is started again, and catches up."""
    page = (REPO / "docs/fault_tolerance.rst").read_text()
    lines = textwrap.dedent(page.partition("#SBATCH")[2].partition("\n\n")[0].partition("\n")[2])
    rank = REPO / "tests/cluster/group_rank.py"
    script = lines.replace("xffl exec config.yaml", shlex.join([*EXEC, str(rank), str(tmp_path)]))
    script = script.replace("xffl lighthouse", shlex.join([*XFFL, "lighthouse"])).replace("$HOME", str(tmp_path))
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{script}\n")
    options = ["-w", "a1,b1", "-N2", "--ntasks-per-node=2", "-o", "job.log", "--wait"]
    subprocess.run(["sbatch", "-Q", *options, "job.sh"], env=slurm, cwd=tmp_path, check=True, timeout=200)
    told = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("group_*.json"))]
    log = (tmp_path / "job.log").read_text()
    assert (tmp_path / "died").exists() and len(told) == 4, log
    assert told == told[:1] * 4, (told, log)
    assert told[0]["step"] >= 120


def test_a_reader_that_goes_ends_the_step(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nwhile True:\n    print('step', file=sys.stderr)\n")
    inner = shlex.join([*EXEC, "train.py"]) + " 2>&1 | head -n 1; echo ${PIPESTATUS[0]}"
    code, out, err = finish(start([*THREE, "bash", "-c", inner], slurm, tmp_path), LIMIT_S)
    assert (code, out) == (0, "step\n141\n"), err


def test_a_rank_that_is_ended_from_outside(slurm: dict[str, str], tmp_path: Path) -> None:
    process = start([*THREE, *EXEC, RANK, str(tmp_path), "stay", "9"], slurm, tmp_path)
    os.kill(told(tmp_path, 3)[1]["pid"], signal.SIGTERM)
    code, _, err = finish(process, LIMIT_S)
    assert code == 143 and err.splitlines()[-1].endswith(
        " was killed by SIGTERM (signal 15); all other ranks were stopped"
    )


def test_a_log_file_that_cannot_be_written_is_one_line(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "logs" / "rank_00002.log").mkdir(parents=True)
    command = [*THREE, *EXEC, "--log-dir", "logs", RANK, str(tmp_path), "stay", "9"]
    code, _, err = finish(start(command, slurm, tmp_path), LIMIT_S)
    assert code == 2 and "Traceback" not in err
    assert "xffl: rank 2 failed with ConfigError: log file" in err.splitlines()[-1], err


LIVES = """
import os, signal, socket, time
host, port = os.environ["XFFL_LIGHTHOUSE"].removeprefix("http://").split(":")
while socket.socket().connect_ex((host, int(port))):
    time.sleep(0.1)
cell, life, rank = (os.environ[name] for name in ("XFFL_CELL", "XFFL_RESTARTS", "SLURM_PROCID"))
print(cell, life, rank, os.environ["SLURM_STEP_NUM_TASKS"], os.environ["SLURMD_NODENAME"], flush=True)
if (cell, life, rank) == ("0/2", "0", "1"):
    os.kill(os.getpid(), signal.SIGKILL)
elif cell == "1/2":
    while not os.path.exists("back"):
        time.sleep(0.1)
elif life == "1":
    open("back", "w").close()
else:
    signal.pause()
"""


def test_the_cells_of_an_elastic_run_are_steps(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LIVES)
    command = [*THREE, *EXEC, "--elastic", "--federated", "auto", "--log-dir", "logs", "train.py"]
    code, _, err = finish(start(command, slurm, tmp_path), LIMIT_S + 30)
    assert code == 0 and "cell 0 ended with exit code 137; it is started again (restart 1 of 3)" in err, err
    logs = {str(path.relative_to(tmp_path / "logs")): path.read_text() for path in (tmp_path / "logs").rglob("*.log")}
    assert logs.keys() == {f"cell_0/life_{life}/rank_0000{rank}_cell_0.log" for life in (0, 1) for rank in (0, 1)} | {
        "cell_1/life_0/rank_00000_cell_1.log"
    }
    assert logs["cell_0/life_1/rank_00001_cell_0.log"] == "0/2 1 1 2 a2\n"
    assert logs["cell_1/life_0/rank_00000_cell_1.log"] == "1/2 0 0 1 b1\n"
    command = [*THREE[:-1], "--ntasks-per-node=2", *EXEC, "--elastic", "--federated", "3,3", "train.py"]
    code, _, err = finish(start(command, slurm, tmp_path))
    assert code == 2 and "cells 0 and 1 share host a2" in err, err


def test_whose_error_it_is(slurm: dict[str, str], tmp_path: Path) -> None:
    """The script's own connection is no lost rank, and what all ranks raise is told once, with xffl exec or without."""
    (tmp_path / "own.py").write_text(OWN_ERROR)
    (tmp_path / "alike.py").write_text(ALIKE)
    two = ["srun", "-Q", "-N2", "-w", "a1,a2"]
    code, _, err = finish(start([*two, "--kill-on-bad-exit=1", *EXEC, "own.py"], slurm, tmp_path))
    assert code != 0 and "xffl: rank 1 failed with ConnectionRefusedError" in err, err
    assert "create_connection(closed" in err and "rank 1 lost" not in err
    for words, expected in (([*EXEC, "alike.py"], 2), ([sys.executable, "alike.py"], 1)):
        code, _, err = finish(start([*two, *words], slurm, tmp_path))
        assert code == expected and err.count("sum to 3, but the world has 2 ranks") == 1, err
        assert "Traceback" not in err and err.count("alike.py:2)") == 1


def test_a_module_and_a_stream(slurm: dict[str, str], tmp_path: Path) -> None:
    """The launcher of a job hands what it has read to the ranks; under srun, where it has read nothing, it refuses."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "value.py").write_text("VALUE = 7\n")
    (tmp_path / "pkg" / "train.py").write_text("import sys\nfrom .value import VALUE\nprint(VALUE, sys.argv[1:])\n")
    (tmp_path / "random.py").write_text("raise SystemExit('the working folder was looked into')")
    code, out, err = finish(start([*THREE, *EXEC, "-m", "pkg.train", "--lr", "1"], slurm, tmp_path))
    assert code == 0 and sorted(out.splitlines()) == ["7 ['--lr', '1']"] * 3, err
    here = f"{shlex.join([*THREE, *EXEC, '-', '--lr', '1'])} <<'END'\nimport sys\nprint('stream', sys.argv)\nEND\n"
    code, out, err = finish(start(["bash", "-c", here], slurm, tmp_path))
    assert code == 0 and out.splitlines() == ["stream ['-', '--lr', '1']"] * 3, err
    two = ["srun", "-Q", "-N2", "-w", "a1,a2"]
    code, out, err = finish(start([*two, *EXEC, "/dev/stdin"], slurm, tmp_path))
    assert code == 2 and out == "" and "a launcher has started 2 processes" in err, err
