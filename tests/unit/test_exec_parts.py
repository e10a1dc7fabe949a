"""The parts of ``xffl exec`` that start nothing: layouts, messages of ranks, srun's words, log files, who failed."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.unit.test_allocation import THREE_LEVELS, UNEVEN
from xffl.cli.main import COMMANDS, main
from xffl.cluster.launch import runner, srun, ssh
from xffl.cluster.launch.failure import ExitCode, JobWatch, code_of_signal
from xffl.cluster.launch.job_layout import JobLayout, LaunchOptions, check_started, fit_hosts, lay_out
from xffl.cluster.launch.logs import MarkedLines, Message, RankFile, Stream, following, list_rank_files, mark, sizes_now
from xffl.cluster.launch.runner import RankJob
from xffl.cluster.launch.srun import launch_srun, read_task_ends, srun_command
from xffl.cluster.launch.ssh import shared_environment, ssh_command
from xffl.cluster.recognition.launchers import LAUNCHERS
from xffl.cluster.slurm.allocation import Allocation, Host, find_allocation
from xffl.errors import ConfigError, LaunchError, TopologyError
from xffl.jobs import ranks

ROOT = Path(__file__).parents[2]
HOSTS = (Host("b1", 2, address="10.0.0.2"), Host("a1", 1))
HELP_MODULES = 150
"""What help may import beside its parser; numpy alone has a hundred."""
OF_ONE_RANK = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"), "1"),
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}
"""As torchrun sets them."""
HELP = """
import sys
import jsonargparse, yaml
sys.modules["torch"] = None
before = len(sys.modules)
from xffl.cli.main import main
try:
    main([*sys.argv[1:], "--help"])
except SystemExit as ended:
    assert not ended.code, ended
print(len(sys.modules) - before)
"""


# The command line -----------------------------------------------------------------------------------------------------


def computing(code: str, *words: str) -> tuple[str, float]:
    """Run some Python without srun and ssh; return what it printed, and the seconds that it computed."""
    before = os.times()
    command = [sys.executable, "-c", code, *words]
    environ = {**os.environ, "PATH": ""}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)
    after = os.times()
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, sum(after[2:4]) - sum(before[2:4])


def test_help_of_every_command_is_quick_and_needs_no_torch() -> None:
    needed = max(computing("import jsonargparse, yaml")[1] for _ in range(3))  # what help cannot do without
    for words in ([], *([name] for name in COMMANDS)):
        text, seconds = computing(HELP, *words)
        *lines, imported = text.splitlines()
        assert "usage" in lines[0] and int(imported) < HELP_MODULES, (words, imported)
        assert seconds < 10 * needed, words


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exce"]) == 2
    assert "did you mean 'exec'?" in capsys.readouterr().err


@pytest.mark.parametrize("found", [None, Path("run/checkpoints/step_7")])
def test_a_run_that_has_failed_tells_from_where_it_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, found: Path | None
) -> None:
    (tmp_path / "config.yaml").write_text(
        "trainer: tests.tasks.TaskTrainer\nexperiment: {output_dir: run}\nlaunch: {processes: 1}\n"
    )
    monkeypatch.setattr(ranks, "launch_local", lambda *args: ExitCode.FAILED)
    monkeypatch.setattr("xffl.checkpoint.manager.find_latest_checkpoint", lambda folder: found)
    assert main(["exec", str(tmp_path / "config.yaml")]) == ExitCode.FAILED
    told = capsys.readouterr().err
    assert told.endswith(f"xffl: the same command continues from {found}\n") if found else "continues" not in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["exec", "--hosts", "a:2", "--launcher", "local", __file__], "--hosts is for ssh, but --launcher is local"),
        (["exec", "--launcher", "ssh", __file__], "--launcher ssh needs to know the hosts"),
        (["exec", "--launcher", "srun", __file__], "--launcher srun is for the inside of a SLURM job"),
        (["exec", "--processes", "2", "--grace", "0", __file__], "--grace is 0.0; give seconds above 0"),
        (["exec", "--processes", "2", "--log-dir", f"{__file__}/x", __file__], "cannot be made: Not a directory"),
        (["exec", "--hosts", "a:2", "--federated", "x", __file__], "--federated is 'x'"),
        (["logs", "/nowhere at all"], "folder '/nowhere at all' cannot be read: No such file"),
        (["logs", str(Path(__file__).parent)], "has no log file of any rank"),
        (["logs", ".", "--ranks", "1-x"], "such as 0,4-7, got '1-x'"),
    ],
)
def test_wrong_options(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == ExitCode.REFUSED
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1


def test_numbers_of_exit_codes() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "OK": 0, "FAILED": 1, "REFUSED": 2, "PREEMPTED": 75, "TIMEOUT": 124, "INTERRUPTED": 130, "BROKEN_PIPE": 141,
    }  # fmt: skip
    assert code_of_signal(signal.SIGINT) == ExitCode.INTERRUPTED
    page = (ROOT / "docs" / "exit_codes.rst").read_text()
    assert all(f"``{code:d}``" in page for code in ExitCode)


# Layouts --------------------------------------------------------------------------------------------------------------


def slurm(*slots: int, gpus: int | None = None) -> Allocation:
    return Allocation("slurm", tuple(Host(f"n{at}", count, gpus=gpus) for at, count in enumerate(slots)), "7")


def test_ranks_are_fitted_to_hosts() -> None:
    def fitted(allocation: Allocation, processes: int | None, **environ: str) -> list[int]:
        return [host.slots for host in fit_hosts(allocation, processes, environ=environ)]

    assert fitted(slurm(3, 1), None) == fitted(slurm(3, 1), 4, SLURM_NTASKS="4") == [3, 1]
    # Nobody has asked for tasks: the ranks are spread over the nodes.
    assert fitted(slurm(1, 1), 5) == [3, 2] and fitted(slurm(64, 64), 4) == [2, 2] and fitted(slurm(4, 4), 2) == [1, 1]
    assert fitted(slurm(4, 4, gpus=2), 4) == [2, 2]
    assert fitted(slurm(4, gpus=2), None, CUDA_VISIBLE_DEVICES="") == [4]
    own = find_allocation({**UNEVEN, "SLURM_GPUS_PER_TASK": "1", "SLURM_GPUS_ON_NODE": "2"})
    assert own is not None and fitted(own, None) == [2, 3]
    for allocation, processes, environ, message in (
        (slurm(2, 2), 3, {"SLURM_NTASKS": "4"}, r"3, but job 7 has 4 tasks \(2 on n0, 2 on n1\). HINT: .*--ntasks=3"),
        (slurm(2, 2), 8, {"SLURM_NTASKS_PER_NODE": "2"}, r"8, but job 7 has 4 tasks"),
        (slurm(1, 1, 1), 2, {}, r"2, but job 7 has 3 nodes, .* HINT: ask SLURM for --nodes=2"),
        (slurm(4, gpus=2), None, {}, r"4 ranks on n0 would share 2 GPUs.* HINT: give --gpus-per-node=4 .*per-node=2"),
        (slurm(2, 2, gpus=2), 6, {}, r"3 ranks on n0 would share 2 GPUs"),
        (Allocation("hosts", (Host("a", 2, gpus=1),)), None, {}, r"HINT: give as many slots as gpus in --hosts"),
    ):
        with pytest.raises(LaunchError, match=message):
            fit_hosts(allocation, processes, environ=environ)
    with pytest.raises(ConfigError, match=r"launch.processes is 2, but the hosts take 3 ranks .* slots of --hosts"):
        fit_hosts(Allocation("hosts", HOSTS), 2, knob="launch.processes")
    with pytest.raises(TopologyError, match="world size must be a positive integer, got 0"):
        fit_hosts(slurm(2), 0)


def test_cells_order_the_hosts() -> None:
    hosts = (Host("a1", 2), Host("b1", 1), Host("a2", 2))
    layout = lay_out(hosts, "hosts:^.", 1)
    assert [host.name for host in layout.hosts] == ["a1", "a2", "b1"] and layout.sizes == (4, 1)
    assert [layout.cell_of(rank) for rank in range(5)] == [0, 0, 0, 0, 1]
    assert lay_out(hosts, None, None).cell_of(4) is None
    with pytest.raises(TopologyError, match="sum to 4"):
        lay_out(hosts, (2, 2), None)


def test_cells_of_hosts_by_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``exec --hosts`` asks scontrol for ``auto`` as ``plan --hosts`` does, and for nothing else."""
    (tmp_path / "shown").write_text(THREE_LEVELS)
    program = tmp_path / "scontrol"
    program.write_text(f"#!/bin/sh\necho >> {tmp_path}/asked\nexec /bin/cat {tmp_path}/shown\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found: list[tuple[list[str], object]] = []

    def start(layout: JobLayout, *words: object, **options: object) -> int:
        found.append(([host.name for host in layout.hosts], layout.sizes))
        return 0

    monkeypatch.setattr(ssh, "launch_ssh", start)
    words = ["exec", "--hosts", "b1:1,a1:2,b2:1", "--federated"]
    assert main([*words, "4", __file__]) == main([*words, "hosts:^.", __file__]) == 0
    assert not (tmp_path / "asked").exists()
    assert main([*words, "auto", __file__]) == 0 and (tmp_path / "asked").exists()
    assert found == [(["b1", "a1", "b2"], 4), (["b1", "b2", "a1"], (2, 2)), (["b1", "b2", "a1"], (2, 2))]


@pytest.mark.parametrize(("variables", "told"), [({}, "1"), ({"OMP_NUM_THREADS": "3"}, "3"), ({"XFFL_BIND": "1"}, "4")])
def test_a_rank_in_place_takes_its_threads(
    variables: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"PATH": "x", **variables}
    with mock.patch.dict(os.environ, environ, clear=True):
        monkeypatch.setattr(
            runner, "bind_if_asked", lambda: os.environ.get("XFFL_BIND") and os.environ.update(OMP_NUM_THREADS="4")
        )
        runner.take_share()
        assert dict(os.environ) == environ, "no launcher has started this process"
        os.environ.update(OF_ONE_RANK)
        runner.take_share()
        assert os.environ["OMP_NUM_THREADS"] == told


@pytest.mark.parametrize("name", ["script.py", "config.yaml"])
def test_threads_are_chosen_before_torch_is_imported(name: str, tmp_path: Path) -> None:
    script = "import os, sys; print(os.environ['OMP_NUM_THREADS'], 'torch' in sys.modules)\n"
    (tmp_path / "script.py").write_text(script)
    # The file of a configuration's trainer is run while the configuration is read; without a trainer that is an error.
    (tmp_path / "config.yaml").write_text("trainer: script.MyTrainer\n")
    environ = {key: text for key, text in os.environ.items() if key != "OMP_NUM_THREADS"}
    environ |= {**OF_ONE_RANK, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "xffl", "exec", str(tmp_path / name)]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout.split()[:1] == ["1"], ran.stderr


@pytest.mark.parametrize(
    ("script", "words", "code", "said"),
    [
        ("raise ValueError('mine')", [], 1, "xffl: failed with ValueError: mine\n"),
        (
            "raise RuntimeError('[gloo] Connection reset by peer')",
            [],
            1,
            "xffl: lost another rank: RuntimeError: [gloo] Connection reset by peer\n",
        ),
        ("import time; time.sleep(60)", ["--timeout", "2"], 124, "xffl: stopped after 2.0 s, as --timeout says\n"),
        ("import sys; sys.exit('no more')", ["--log-dir", "logs"], 1, "no more\n"),
        (
            "from xffl import ConfigError; raise ConfigError('no')",
            ["--log-dir", "logs"],
            2,
            "xffl: ConfigError: no (at script.py:2)\n",
        ),
        ("import sys; sys.exit(7)", ["--timeout", "60"], 7, ""),
        ("", [], 0, ""),
    ],
)
def test_how_a_rank_in_place_ends(script: str, words: list[str], code: int, said: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"print('begun')\n{script}\n")
    environ = {**os.environ, **OF_ONE_RANK, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "xffl", "exec", *words, "script.py"]
    ran = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr.endswith(said)) == (code, True), ran.stderr
    assert ran.stderr.count("Traceback") == ("ValueError" in said) and "runner.py" not in ran.stderr
    log = tmp_path / "logs" / "rank_00000.log"
    assert "begun\n" in (log.read_text() if words[:1] == ["--log-dir"] else ran.stdout)
    assert not log.exists() or said in log.read_text()


def test_what_a_launcher_started_is_compared() -> None:
    rows = {row.name: row for row in LAUNCHERS}
    check_started(rows["slurm"], 4, None)
    with pytest.raises(ConfigError, match="4, but srun has started 1 processes already.*HINT.*srun --ntasks=4"):
        check_started(rows["slurm"], 1, 4)
    with pytest.raises(ConfigError, match="HINT: for 4 ranks start it with mpirun -n 4"):
        check_started(rows["openmpi"], 1, 4)
    with pytest.raises(ConfigError, match="already; leave --processes out$"):
        check_started(rows["openmpi"], 4, 4)


# Messages of ranks ----------------------------------------------------------------------------------------------------


def test_messages_come_out_of_mixed_lines() -> None:
    contents = [{"failure": {"traceback": f"line {rank} é\n" * 400}} for rank in range(3)]
    streams = [mark(rank, content) for rank, content in enumerate(contents)]
    assert all(len(line) < 1000 and line.endswith(b"\n") for lines in streams for line in lines)
    mixed = [b"mine\n", *(line for lines in zip(*streams, strict=True) for line in lines), b"no end"]
    mixed[2] = b"begun by another " + mixed[2]
    mixed[3] = b" 2: " + mixed[3]  # srun --label
    reader, rest, found = MarkedLines(), b"", []
    for line in mixed:
        kept, message = reader.take(line)
        rest += kept
        found += [message] if message else []
    assert rest == b"mine\nbegun by another \nno end"
    assert found == [Message(rank, content) for rank, content in enumerate(contents)]


def test_what_only_looks_like_a_message_is_shown() -> None:
    reader = MarkedLines()
    for line in (b"\x1exffl:x\n", b"\x1exffl:1.0.1:no base 64!\n", b"\x1exffl:\n"):
        assert reader.take(line) == (line, None)
    (line,) = mark(4, {"a": 1})
    assert reader.take(line) == (b"", Message(4, {"a": 1}))
    # A message that broke off spoils none that follows, and a terminal ends lines in its own way.
    begun, *_ = mark(4, {"a": "x" * 1000})
    assert reader.take(begun) == (b"", None)
    assert reader.take(line.replace(b"\n", b"\r\n")) == (b"", Message(4, {"a": 1}))


def test_long_texts_lose_their_middle() -> None:
    reader, message = MarkedLines(), None
    for line in mark(0, {"failure": {"traceback": "a" * 10**6 + "end"}}):
        _, message = reader.take(line)
    assert message is not None
    text = message.content["failure"]["traceback"]
    assert len(text) < 10**5 and text.endswith("aend") and "characters are left out" in text


def test_the_variable_of_a_rank_is_taken_out() -> None:
    job = RankJob(("a b", ":", "\n"), "logs", is_marked=True, is_tied=False)
    environ = {"PATH": "x", **job.variables()}
    assert RankJob.pop(environ) == job and environ == {"PATH": "x"}
    assert RankJob.pop(environ) == RankJob()


# srun and ssh ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "ends"),
    [
        ("srun: error: a1: task 0: Exited with exit code 17\n", {0: 17}),
        ("srun: error: a1: tasks 0-1,3: Killed\n", {0: -9, 1: -9, 3: -9}),
        ("srun: error: n-1.site: task 12: Segmentation fault (core dumped)\n", {12: -11}),
        ("srun: error: a1: task 2: Terminated\n", {2: -15}),
        ("srun: error: n1: tasks 2-3: Out Of Memory\n", {2: -9, 3: -9}),
        ("srun: error: a1: task 2: Something new\n", {2: 1}),
        ("srun: error: Unable to create step for job 1: More processors requested than permitted\n", None),
        ("hello\n", None),
    ],
)
def test_ends_of_tasks(line: str, ends: dict[int, int] | None) -> None:
    assert read_task_ends(line) == ends


FAKE = """
import json, os, sys
names = ("MASTER_ADDR", "XFFL_FEDERATED", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_ID")
told = {name: os.environ.get(name) for name in names} | {"argv": sys.argv[1:], "stdin": sys.stdin.read()}
told |= {"hosts": open(os.environ["SLURM_HOSTFILE"]).read(), "job": json.loads(os.environ["XFFL_RUNNER"])}
open(sys.argv[1], "w").write(json.dumps(told))
print("srun: Job 3 step creation temporarily disabled, retrying (Requested nodes are busy)", file=sys.stderr)
sys.exit(int(sys.argv[2]))
"""


def test_what_srun_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fake.py").write_text(FAKE)
    for name, text in {"SLURM_NTASKS": "9", "SLURM_NTASKS_PER_NODE": "3", "SLURM_JOB_ID": "3"}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "5")
    monkeypatch.setenv("XFFL_SRUN", f"{sys.executable} {tmp_path}/fake.py {tmp_path}/told 0 --mem=1G")
    layout = lay_out(HOSTS, (2, 1), None)
    command = [__file__, ":", "a\nb"]
    assert launch_srun(layout, command, LaunchOptions(environ={"XFFL_FEDERATED": "2,1"}, log_dir="/x")) == 0
    told = json.loads((tmp_path / "told").read_text())
    # The address of rank 0's host, which SLURM would name second.
    assert (told["MASTER_ADDR"], told["XFFL_FEDERATED"], told["stdin"]) == ("10.0.0.2", "2,1", "")
    assert (told["SLURM_NTASKS"], told["SLURM_NTASKS_PER_NODE"], told["SLURM_JOB_ID"]) == (None, None, "3")
    assert told["hosts"] == "b1\nb1\na1\n" and told["job"]["command"] == command and told["job"]["log_dir"] == "/x"
    options = ["--ntasks=3", "--nodes=2", "--distribution=arbitrary", "--kill-on-bad-exit=1", "--export=ALL"]
    assert told["argv"][2:-3] == ["--mem=1G", *options, "--cpus-per-task=5"]
    assert "step creation temporarily disabled" in capfd.readouterr().err
    monkeypatch.setenv("XFFL_SRUN", f"{sys.executable} {tmp_path}/fake.py {tmp_path}/told 3")
    with pytest.raises(LaunchError, match="srun ended with exit code 3: it says nothing"):
        launch_srun(layout, command, LaunchOptions(environ={}))
    with pytest.raises(LaunchError, match="no no-srun in PATH. HINT"):
        srun_command(layout, {"XFFL_SRUN": "no-srun -x", "SLURM_JOB_ID": "3"})


def test_a_scancel_that_hangs_counts_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    step = srun._Step(lay_out(HOSTS, None, None), JobWatch(None, 5.0), False)
    program = tmp_path / "scancel"
    for body, limit_s, expected in (
        ("exec /bin/sleep 60", 0.2, False),
        ("exit 1", 60.0, False),
        ("exit 0", 60.0, True),
    ):
        monkeypatch.setattr(srun, "_SCANCEL_S", limit_s)
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
        assert step._cancel(signal.SIGTERM) is expected


def test_what_ssh_is_told() -> None:
    words = ssh_command(Host("a", 1), {})
    assert words[0] == "ssh" and words[-3:-1] == ["--", "a"]
    assert "BatchMode=yes" in words and "StrictHostKeyChecking=yes" in words
    other = ssh_command(Host("a", 1, address="me@10.0.0.1"), {"XFFL_SSH": "ssh -F 'my file'", "XFFL_PYTHON": "/o'p"})
    assert other[:5] == ["ssh", "-F", "my file", "--", "me@10.0.0.1"]
    ran = subprocess.run(
        ["sh", "-c", other[-1].replace("exec ", "printf %s ", 1)], capture_output=True, text=True, check=True
    )
    assert ran.stdout.startswith("/o'p-u-cimport sys; sys.path[0] or sys.path.pop(0); import json")
    kept = shared_environment(
        {"PATH": "p", "HOME": "h", "SLURM_JOB_ID": "1", "NCCL_X": "y", "MASTER_PORT": "1", "_": "x"}
    )
    assert kept == {"PATH": "p", "NCCL_X": "y"}


# Log files ------------------------------------------------------------------------------------------------------------


def test_a_stream_of_log_files(tmp_path: Path) -> None:
    one, other = RankFile(0, 0, tmp_path), RankFile(12, None, tmp_path)
    assert (one.path.name, other.path.name) == ("rank_00000_cell_0.log", "rank_00012.log")
    one.path.write_bytes(b"old\n")
    (tmp_path / "rank_1.txt").write_text("not one")
    out = io.BytesIO()
    stream = Stream(tmp_path, out, begin=sizes_now(tmp_path))
    stream.copy()
    assert out.getvalue() == b""
    with one.path.open("ab") as first, other.path.open("wb") as second:
        first.write(b"a\nb")
        second.write(b"\xff\n")
        for file in (first, second):
            file.flush()
        stream.copy()
        assert out.getvalue() == b"[cell 0 rank 0] a\n[rank 12] \xff\n"
        first.write(b"c")
    stream.copy(is_end=True)
    assert out.getvalue().endswith(b"\n[cell 0 rank 0] bc\n")
    assert [(file.rank, file.cell) for file in list_rank_files(tmp_path)] == [(0, 0), (12, None)]
    only = io.BytesIO()
    Stream(tmp_path, only, {0}).copy(is_end=True)
    assert only.getvalue() == b"[cell 0 rank 0] old\n[cell 0 rank 0] a\n[cell 0 rank 0] bc\n"


def test_a_log_file_keeps_what_it_holds_and_only_what_is_new_is_shown(tmp_path: Path) -> None:
    file, out = RankFile(3, 1, tmp_path), io.BytesIO()
    imports = "from pathlib import Path; from xffl.cluster.launch.logs import *"
    code = imports + "; redirect(RankFile(3, 1, Path())); print({})"
    subprocess.run([sys.executable, "-c", code.format("'old'")], cwd=tmp_path, check=True, timeout=60)
    with following(tmp_path, out):
        subprocess.run([sys.executable, "-c", code.format("'new', end=''")], cwd=tmp_path, check=True, timeout=60)
    assert file.path.read_text() == "old\nnew" and out.getvalue() == b"[cell 1 rank 3] new\n"
