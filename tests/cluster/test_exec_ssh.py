"""``xffl exec --hosts`` over real ssh, to two loopback addresses with an sshd each."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import require
from tests.cluster.exec_jobs import (
    DEADLINE_S,
    FOLDER,
    HOSTILE,
    ISOLATED,
    LAYOUT,
    RANK,
    SESSION,
    XFFL,
    check_isolated,
    finish,
    start,
    told,
)
from tests.ports import free_ports
from tests.processes import still_there

MINISSH = Path(__file__).parent / "ssh" / "minissh.sh"
A, B = "127.0.0.2", "127.0.0.3"
TWO = [*XFFL, "exec", "--hosts", f"{A}:2,{B}:1", "--federated", r"hosts:\d$"]
OF_JOB = [*XFFL, "exec", "--federated", r"hosts:\d$"]
LIMIT_S = 30


@pytest.fixture(scope="module")
def ssh(base_environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Bring up two hosts, and give the environment in which xffl reaches them."""
    path = os.pathsep.join((os.environ["PATH"], "/usr/sbin"))
    for program in ("sshd", "ssh", "ssh-keygen"):
        require(shutil.which(program, path=path), f"{program} (openssh-server)")
    folder = tmp_path_factory.mktemp("ssh") / "s"
    pairs = [f"{address}:{port}" for address, port in zip((A, B), free_ports(2), strict=True)]
    environ = {**base_environ, "SS_DIR": str(folder), "SS_HOSTS": " ".join(pairs)}
    try:
        subprocess.run([str(MINISSH), "up"], env=environ, check=True, timeout=60)
        yield {**base_environ, "XFFL_SSH": f"ssh -F {folder}/config"}
    finally:
        subprocess.run([str(MINISSH), "down"], env=environ, check=False, timeout=60)


def test_arguments_and_folder_survive(ssh: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    words = [RANK, str(folder), "end", "0", *HOSTILE]
    code, out, err = finish(start([*TWO, *words], {**ssh, "XFFL_HSDP": "1", "HOME": "/nowhere"}, folder))
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"hello from {rank}" for rank in range(3)]
    assert sorted(err.splitlines()) == [f"trouble at {rank}" for rank in range(3)]
    found = told(folder, 3)
    for rank, one in enumerate(found):
        assert one["argv"] == words and one["cwd"] == str(folder) and one["rank"] == rank
        assert (one["XFFL_FEDERATED"], one["XFFL_HSDP"], one["XFFL_RUNNER"]) == ("2,1", "1", None)
        assert (one["XFFL_HOST"], one["node"], one["MASTER_ADDR"]) == ([A, A, B][rank], [0, 0, 1][rank], A)


def test_hosts_as_isolated_cells(ssh: dict[str, str], tmp_path: Path) -> None:
    code, _, err = finish(start([*TWO, "--isolate", ISOLATED, str(tmp_path)], ssh, tmp_path))
    assert code == 0, err
    check_isolated(tmp_path, (2, 1))


def test_two_jobs_at_once(ssh: dict[str, str], tmp_path: Path) -> None:
    """The hosts of one are given; those of the other are in the file of its PBS job."""
    file = tmp_path / "nodes"
    file.write_text(f"{A}\n{B}\n{A}\n")
    pbs = {**ssh, "PBS_NODEFILE": str(file), "PBS_JOBID": "12.head", "PBS_TASKNUM": "1", "PBS_NODENUM": "0"}
    both = [start([*TWO, LAYOUT, "2,1"], ssh, tmp_path), start([*OF_JOB, LAYOUT, "2,1"], pbs, tmp_path)]
    for process in both:
        code, out, err = finish(process)
        assert code == 0, err
        joined = sorted((json.loads(line) for line in out.splitlines()), key=lambda one: int(one["rank"]))
        assert [(one["cell"], one["total"], one["node"]) for one in joined] == [
            (0, 6.0, [0, 2, 0, 2]), (0, 6.0, [1, 2, 0, 2]), (1, 6.0, [0, 1, 1, 2]),
        ]  # fmt: skip
        assert A in joined[0]["listens"]  # the store, at the address where the ranks meet; gloo at the host's name
        assert not {"0.0.0.0", "::"} & {address for one in joined for address in one["listens"]}


def test_the_hosts_of_an_lsf_job(ssh: dict[str, str], tmp_path: Path) -> None:
    lsf = {**ssh, "LSB_JOBID": "7", "LSB_MCPU_HOSTS": f"{A} 8 {B} 8"}
    words = ["--processes", "3", RANK, str(tmp_path), "end", "0"]
    code, _, err = finish(start([*OF_JOB, *words], lsf, tmp_path))
    assert code == 0, err
    found = told(tmp_path, 3)
    assert [(one["XFFL_HOST"], one["node"], one["XFFL_FEDERATED"]) for one in found] == [
        (A, 0, "2,1"), (A, 0, "2,1"), (B, 1, "2,1"),
    ]  # fmt: skip
    # One host is this one, where processes need no ssh, and no slots.
    alone = {**lsf, "LSB_MCPU_HOSTS": f"{A} 1", "XFFL_SSH": "false"}
    code, out, err = finish(start([*XFFL, "exec", *words], alone, tmp_path))
    assert (code, out.count("hello")) == (0, 3), err
    for environ, more, message in (
        (lsf, ["--processes", "17"], "LSF job 7 has 16 slots (8 on 127.0.0.2, 8 on 127.0.0.3). HINT: ask LSF"),
        (lsf, ["--elastic"], "--elastic starts all cells on this machine or in a SLURM job, but this job has 2 hosts"),
        ({**lsf, "LSB_MCPU_HOSTS": f"{A} 1 {B}"}, [], "it must be pairs of a host and its slots"),
        ({**lsf, "LSF_PM_TASKID": "2"}, [], "LSF_PM_TASKID=2 looks like LSF's blaunch"),
        ({**lsf, "CUDA_VISIBLE_DEVICES": "GPU-8932f937"}, [], "names GPUs of this host"),
    ):
        code, _, err = finish(start([*OF_JOB, *more, RANK], environ, tmp_path))
        assert code == 2 and message in err and err.count("\n") == 1, err


@pytest.mark.parametrize(
    ("way", "code", "words"),
    [
        ("raise", 1, "failed with ValueError: seven years " + "of luck" * 300),
        ("kill", 137, "was killed by SIGKILL (signal 9)"),
        ("exit", 17, "exited with code 17"),
    ],
)
def test_a_failing_rank_ends_the_ranks_on_all_hosts(
    way: str, code: int, words: str, ssh: dict[str, str], tmp_path: Path
) -> None:
    began = time.monotonic()
    ended, _, err = finish(start([*TWO, RANK, str(tmp_path), way, "2"], ssh, tmp_path), LIMIT_S)
    assert ended == code and time.monotonic() - began < LIMIT_S
    lines = [line for line in err.splitlines() if not line.startswith("trouble at")]
    assert lines[-1] == f"xffl: rank 2 (cell 1) {words}; all other ranks were stopped"
    assert err.count("Traceback") == (way == "raise") and "runner.py" not in err
    # On a busy machine another rank may be ended before it has written.
    assert not still_there([json.loads(file.read_text())["pid"] for file in tmp_path.glob("told.?")], DEADLINE_S)


def test_a_session_that_loses_a_rank(ssh: dict[str, str], tmp_path: Path) -> None:
    code, out, err = finish(start([*TWO, SESSION, "kill"], ssh, tmp_path))
    assert (code, out.count("joined"), err.count("Traceback")) == (137, 3, 0), err
    assert err.splitlines()[-1].startswith("xffl: rank 2 (cell 1) was killed by SIGKILL")


@pytest.mark.parametrize(
    ("number", "way", "code"), [("USR2", "leave", 75), ("TERM", "leave", 75), ("INT", "stay", 130)]
)
def test_signals_reach_the_ranks(number: str, way: str, code: int, ssh: dict[str, str], tmp_path: Path) -> None:
    process = start([*TWO, RANK, str(tmp_path), way, "9"], ssh, tmp_path)
    pids = [one["pid"] for one in told(tmp_path, 3)]
    process.send_signal(signal.Signals[f"SIG{number}"])
    ended, out, err = finish(process)
    assert ended == code, err
    assert out.count(f"asked to leave by SIG{number}") == (3 if way == "leave" else 0)
    assert not still_there(pids, DEADLINE_S)


def test_a_killed_launcher_leaves_no_ranks(ssh: dict[str, str], tmp_path: Path) -> None:
    process = start([*TWO, RANK, str(tmp_path), "stay", "9"], ssh, tmp_path)
    pids = [one["pid"] for one in told(tmp_path, 3)]
    process.kill()
    assert not still_there(pids, DEADLINE_S)
    finish(process)


def test_the_time_limit(ssh: dict[str, str], tmp_path: Path) -> None:
    code, _, err = finish(start([*TWO, "--timeout", "3", RANK, str(tmp_path), "stay", "0"], ssh, tmp_path))
    assert code == 124 and err.splitlines()[-1] == "xffl: stopped all ranks after 3.0 s, as --timeout says"


def test_logs_and_the_merged_stream(ssh: dict[str, str], tmp_path: Path) -> None:
    lines = {
        f"[cell {rank // 2} rank {rank}] {words} {rank}" for rank in range(3) for words in ("hello from", "trouble at")
    }
    code, out, err = finish(start([*TWO, "--merge", RANK, str(tmp_path), "end", "0"], ssh, tmp_path))
    assert code == 0 and {*out.splitlines(), *err.splitlines()} == lines
    code, out, err = finish(start([*TWO, "--log-dir", "l o", "--merge", RANK, ".", "end", "0"], ssh, tmp_path))
    assert (code, err) == (0, "") and {*out.splitlines()} == lines


def test_hosts_that_cannot_be_used(ssh: dict[str, str], tmp_path: Path) -> None:
    config = Path(ssh["XFFL_SSH"].rpartition(" ")[2])
    text = config.read_text()
    with socket.socket() as closed, socket.socket() as mute:
        closed.bind((B, 0))  # and nobody listens there
        mute.bind((B, 0))
        mute.listen()  # and nobody answers
        ports = [f"Host {B}\n    Port {probe.getsockname()[1]}\n{text}" for probe in (closed, mute)]
        no_keys = text.replace(f"{config.parent}/known_hosts", f"{tmp_path}/none")
        no_identity = text.replace(f'IdentityFile "{config.parent}/id"', "IdentityFile /dev/null")
        assert text not in (no_identity, no_keys)
        cases = [
            ("Host key verification failed", "its key is not known here", no_keys, {}),
            (f"host {B} cannot be used: ", "Connection refused", ports[0], {}),
            (f"host {B} cannot be used: ", "Connection timed out", ports[1], {}),
            ("Permission denied", "ssh must not ask for a password", no_identity, {}),
            ("cannot be used: ", "HINT: /no/python it's with xffl must", text, {"XFFL_PYTHON": "/no/python it's"}),
        ]
        for number, (message, remedy, written, more) in enumerate(cases):
            chosen = tmp_path / f"config{number}"
            chosen.write_text(written)
            environ = {**ssh, "XFFL_SSH": f"ssh -F {chosen}", **more}
            code, out, err = finish(start([*TWO, RANK, str(tmp_path), "end", "0"], environ, tmp_path))
            assert (code, out) == (2, "") and err.count("\n") == 1, err
            assert err.startswith("xffl: LaunchError: host ") and message in err and remedy in err, err
    assert not list(tmp_path.glob("told.*"))


def test_what_does_not_fit_the_hosts(ssh: dict[str, str], tmp_path: Path) -> None:
    code, _, err = finish(start([*TWO, "nothing.py"], ssh, tmp_path))
    assert code == 2 and "script 'nothing.py' does not exist in" in err and "on every host" in err
    code, _, err = finish(start([*TWO, "--processes", "5", RANK], ssh, tmp_path))
    assert code == 2 and "--processes is 5, but the hosts take 3 ranks (2 on 127.0.0.2, 1 on 127.0.0.3)" in err
