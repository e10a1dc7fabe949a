"""``xffl exec --hosts`` with a stand-in for ssh that runs what it is told on this machine, or misbehaves."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

import xffl
from tests.processes import still_there
from xffl.cluster.launch import ssh
from xffl.cluster.launch.failure import ExitCode, RankFailure
from xffl.cluster.launch.host_shells import SSH, shell_of
from xffl.cluster.launch.job_layout import LaunchOptions, lay_out
from xffl.cluster.launch.ssh import launch_ssh, ssh_command
from xffl.cluster.slurm.allocation import Host
from xffl.errors import LaunchError

HOSTS = (Host("a", 1), Host("b", 1))
RUN = 'exec sh -c "$3"'
"""The words are --, the host and the command."""
LAST_S = 20
BIG = {"A": "x" * 100_000, "B": "x" * 100_000}
"""More than a pipe holds."""
END = "import os; print('hello from', os.environ['RANK'])"
ONE_ENDS = """
import os, signal, sys, time
def stop(number, frame):
    raise RuntimeError("[gloo] Connection closed by peer")
signal.signal(signal.SIGTERM, stop)
open("up." + os.environ["RANK"], "w").close()
while not (os.path.exists("up.0") and os.path.exists("up.1")):
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill({whom}, signal.{how})
time.sleep(60)
"""
CHILD = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
with open("part." + os.environ["RANK"], "w") as file:
    print(child.pid, file=file)
os.rename(file.name, "child." + os.environ["RANK"])
"""
PAUSED = """
import sys
from xffl.cluster.launch import ssh
from xffl.cluster.slurm.allocation import Host
from xffl.cluster.launch.host_shells import SSH, shell_of
from xffl.cluster.launch.job_layout import LaunchOptions, lay_out
ssh.BEAT_S, ssh._SILENCE_S = 0.1, 1.2
sys.exit(ssh.launch_ssh(lay_out((Host("a", 1),), None, None), ["script.py"], LaunchOptions(environ={})))
"""
TALK = """
import sys, time
for _ in range(3):
    print("x" * 99_999)
    time.sleep(1)
"""
SAVE = """
import os, signal, time
def save(number, frame):
    for _ in range(5):
        print("saving")
        time.sleep(0.1)
    open("saved", "w").close()
    os._exit(0)
signal.signal(signal.SIGTERM, save)
open("up", "w").close()
time.sleep(60)
"""
LIMITED = "ulimit {which} -n 30; exec {python} -m xffl exec --hosts {hosts} script.py"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a folder of its own, with a stand-in for ssh."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(xffl.__file__).parents[1]))
    monkeypatch.setenv("XFFL_SSH", f"sh {tmp_path}/ssh")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # nobody knows hosts a and b
    stand_in(RUN)
    Path("script.py").write_text(END)
    return tmp_path


def stand_in(lines: str) -> None:
    """Write what takes the place of ssh."""
    Path("ssh").write_text(f"{lines}\n")


def launch(
    script: str = END, *, hosts: tuple[Host, ...] = HOSTS, timeout_s: float | None = LAST_S
) -> RankFailure | int:
    """Run a script that is written for it."""
    Path("script.py").write_text(script)
    return launch_ssh(
        lay_out(hosts, None, None), ["script.py"], LaunchOptions(environ=BIG, timeout_s=timeout_s, grace_s=1.0)
    )


def test_a_rank_that_another_program_ends_is_the_failure() -> None:
    ended = launch(ONE_ENDS.format(whom="os.getpid()", how="SIGTERM"))
    assert isinstance(ended, RankFailure) and (ended.rank, ended.exit_code, ended.record) == (1, 143, None)


@pytest.mark.parametrize("end, left", [("sys.exit(3)", []), ("os.kill(os.getpid(), 9)", []), ("sys.exit(0)", [0, 1])])
def test_a_rank_that_fails_leaves_no_children(end: str, left: list[int]) -> None:
    """What one that ends well has started may go on: it was meant to."""
    launch(CHILD + end)
    pids = {rank: int(Path(f"child.{rank}").read_text()) for rank in (0, 1) if Path(f"child.{rank}").exists()}
    try:
        assert pids and [rank for rank, pid in pids.items() if still_there([pid], 0.0 if left else 5.0)] == left
    finally:
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_lost_peer_is_told_where_no_host_is_lost() -> None:
    ended = launch("raise RuntimeError('[gloo] Connection closed by peer')")
    assert isinstance(ended, RankFailure) and ended.record is not None and ended.record.lost_peer


def test_a_rank_that_left_with_0_while_another_one_lost_its_peer_is_named() -> None:
    ended = launch(
        "import os, time\nif os.environ['RANK'] == '1':\n    open('left', 'w').close()\n    raise SystemExit\n"
        "while not os.path.exists('left'):\n    time.sleep(0.01)\ntime.sleep(2)\n"
        "raise RuntimeError('[gloo] Socket closed')"
    )
    assert isinstance(ended, RankFailure)
    told = "failed with RuntimeError: [gloo] Socket closed; rank 1 left with code 0"
    assert (ended.rank, ended.describe()) == (0, told)


def test_a_lost_host_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(ONE_ENDS.format(whom="os.getppid()", how="SIGKILL")) == ExitCode.FAILED
    assert capfd.readouterr().err == "xffl: the connection to b broke: ssh says nothing; all ranks were stopped\n"


def test_a_host_that_hears_nothing_says_so(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ssh, "_SILENCE_S", 3.0)  # less than a beat
    assert launch("import signal, sys, time; signal.signal(15, lambda *_: sys.exit(0)); time.sleep(60)") == 1
    said = capfd.readouterr().err
    assert "ended its ranks: it has heard nothing for 3 s; all ranks were stopped" in said


def test_a_paused_reader_stops_nothing() -> None:
    Path("script.py").write_text(TALK)
    process = subprocess.Popen([sys.executable, "-c", PAUSED], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        select.select([process.stdout], [], [], LAST_S)
        time.sleep(2.5)  # more than twice as long as a host stands silence
        out, err = process.communicate(timeout=LAST_S)
    finally:
        process.kill()
    assert (process.returncode, err) == (0, b"") and out == (b"x" * 99_999 + b"\n") * 3


def test_a_progress_bar_comes_at_once() -> None:
    Path("script.py").write_text("import sys, time; sys.stderr.write('10%\\r20%\\r30%'); time.sleep(60)")
    process = subprocess.Popen([sys.executable, "-c", PAUSED], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        said = b""
        while said != b"10%\r20%\r":
            assert said in b"10%\r20%\r" and select.select([process.stderr], [], [], LAST_S)[0], said
            said += os.read(process.stderr.fileno(), 99)
        process.terminate()
        assert process.communicate(timeout=LAST_S)[1] == b"30%" and process.returncode == 143
    finally:
        process.kill()


def test_what_ssh_leaves_in_the_background(capfd: pytest.CaptureFixture[str]) -> None:
    stand_in(f"sleep {LAST_S} > /dev/null < /dev/null & echo $! >> pids; {RUN}")
    try:
        assert launch() == ExitCode.OK
    finally:
        for pid in Path("pids").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
    assert sorted(capfd.readouterr().out.splitlines()) == ["hello from 0", "hello from 1"]


def test_ranks_have_their_grace_when_the_connection_ends() -> None:
    Path("script.py").write_text(SAVE)
    job = {
        "cwd": os.getcwd(), "command": ["script.py"], "environ": {}, "path": str(Path(xffl.__file__).parents[1]),
        "version": xffl.__version__, "python": sys.version.split()[0], "grace_s": LAST_S, "silence_s": LAST_S,
        "world_size": 1, "host": "a", "first": 0, "slots": 1, "node_rank": 0, "nodes": 1, "meet": "127.0.0.1",
    }  # fmt: skip
    with subprocess.Popen(
        ["sh", "-c", ssh_command(HOSTS[0], {})[-1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(job).encode() + b"\n")
        process.stdin.flush()
        assert b"ready" in process.stdout.readline()
        process.stdin.write(json.dumps({"start": {}}).encode() + b"\n")
        process.stdin.flush()
        deadline = time.monotonic() + LAST_S
        while not Path("up").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.stdout.close()
        process.stdin.close()
        assert process.wait(LAST_S) == 0
    assert Path("saved").exists()


def test_no_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    for words, reason in (("no-such-ssh", "No such file or directory"), ("ssh 'a", "No closing quotation")):
        monkeypatch.setenv("XFFL_SSH", words)
        with pytest.raises(LaunchError, match=f"ssh to host a cannot be started: .*{reason}.* HINT: XFFL_SSH names"):
            launch()


def test_a_first_host_that_the_others_do_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR")
    hosts = (Host("known-to-ssh.invalid", 1), Host("b", 1))
    with pytest.raises(LaunchError, match=r"host .*: it does not know the first host's name 'known-to-ssh.invalid'"):
        launch(hosts=hosts)


@pytest.mark.parametrize(
    ("which", "message"),
    [("-H -S", "cannot be started: [Errno 24] Too many open files"), ("-S", "cannot be used: exit code 3. HINT")],
)
def test_many_hosts_and_few_open_files(which: str, message: str) -> None:
    stand_in("exit 3")
    hosts = ",".join(f"h{number}:1" for number in range(12))
    line = LIMITED.format(which=which, python=sys.executable, hosts=hosts)
    ran = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=LAST_S, check=False)
    assert ran.returncode == ExitCode.REFUSED and message in ran.stderr and ran.stderr.count("\n") == 1, ran.stderr


def test_the_time_limit_where_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "_SLACK_S", 0.5)
    stand_in(f"exec sleep {LAST_S}")
    began = time.monotonic()
    assert launch(timeout_s=0.5) == ExitCode.TIMEOUT and time.monotonic() - began < LAST_S / 2


def test_a_python_of_the_hosts_without_xffl(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PYTHONPATH")
    venv.create(folder / "bare", symlinks=True)
    monkeypatch.setenv("XFFL_PYTHON", str(folder / "bare" / "bin" / "python"))
    assert launch("import sys; print(sys.prefix, sys.argv)", hosts=HOSTS[:1]) == ExitCode.OK
    assert capfd.readouterr().out == f"{folder}/bare ['script.py']\n"


# What reaches the hosts of batch systems ------------------------------------------------------------------------------

SHELLS = {
    "ssh": 'for line; do :; done; echo "ssh $@" | grep -o " -- [^ ]*" >> calls; exec sh -c "$line"',
    "blaunch": 'echo " blaunch $1" >> calls; exec sh -c "$2"',
    "flux": """
case "$1" in
hostlist) echo a,b; exit;;
resource) echo 2 8 0; exit;;
esac
for word; do
  case "$word" in --requires=host:*) echo " flux ${word#--requires=host:}" >> calls;; esac
  line=$word
done
export FLUX_TASK_RANK=0 FLUX_JOB_SIZE=1 FLUX_TASK_LOCAL_ID=0
exec sh -c "$line"
""",
}
JOBS = {
    "pbs": {"PBS_NODEFILE": "nodes", "PBS_JOBID": "12.head", "PBS_TASKNUM": "1", "PBS_NODENUM": "0"},
    "lsf": {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 2 b 1"},
    "flux": {"FLUX_URI": "local:///tmp/flux"},
}
WHO = """
import os, sys
from xffl.cluster.recognition.find import find_launcher
told = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "XFFL_HOST", "XFFL_FEDERATED")]
print(*told, find_launcher(os.environ).name)
if os.environ["RANK"] == sys.argv[1]:
    sys.exit(17)
"""


def exec_in_job(kind: str, *words: str, **more: str) -> tuple[int, str, str]:
    """Start a job of three ranks in the script of a job of a batch system, whose programs are stand-ins."""
    Path("bin").mkdir(exist_ok=True)
    for name, lines in SHELLS.items():
        Path("bin", name).write_text(f"#!/bin/sh\n{lines}\n")
        Path("bin", name).chmod(0o755)
    Path("nodes").write_text("a\nb\na\n")
    Path("script.py").write_text(WHO)
    environ = {**os.environ, **JOBS[kind], "PATH": f"{Path('bin').absolute()}:/bin:/usr/bin", **more}
    del environ["XFFL_SSH"]  # which asks for ssh
    command = [sys.executable, "-m", "xffl", "exec", "--federated", "2,1", *words]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    return ran.returncode, ran.stdout, ran.stderr


@pytest.mark.parametrize(("kind", "way"), [("pbs", "--"), ("lsf", "blaunch"), ("flux", "flux")])
def test_a_batch_system_starts_ranks_by_what_it_has(kind: str, way: str) -> None:
    code, out, err = exec_in_job(kind, "--processes", "3", "script.py", "none")
    assert code == 0, err
    ranks = [f"{rank} 3 {host} 2,1 torchrun" for rank, host in enumerate("aab")]
    assert sorted(out.splitlines()) == ranks
    assert sorted(Path("calls").read_text().splitlines()) == [f" {way} a", f" {way} b"]


def test_a_failing_rank_of_a_batch_system() -> None:
    code, _, err = exec_in_job("flux", "--processes", "3", "script.py", "2")
    assert code == 17 and err == "xffl: rank 2 (cell 1) exited with code 17; all other ranks were stopped\n"


def test_ssh_stands_in_for_what_a_batch_system_has(folder: Path) -> None:
    (folder / "blaunch").write_text("#!/bin/sh\n")
    (folder / "blaunch").chmod(0o755)
    here, away = {"PATH": str(folder)}, {"PATH": "/nowhere"}
    blaunch = shell_of("lsf", "auto", here)
    assert blaunch.command(HOSTS[0], "exec x", {}) == ["blaunch", "a", "exec x"]
    assert blaunch.command(HOSTS[0], "exec x", {"XFFL_BLAUNCH": "other -x"}) == ["other", "-x", "a", "exec x"]
    assert shell_of("lsf", "ssh", here) is shell_of("lsf", "auto", {**here, "XFFL_SSH": "ssh -F x"}) is SSH
    assert shell_of("lsf", "auto", away) is shell_of("pbs", "auto", here) is shell_of("hosts", "auto", here) is SSH


def test_a_batch_system_that_does_not_start_ranks() -> None:
    code, _, err = exec_in_job("lsf", "script.py", "none", XFFL_BLAUNCH="sh -c 'echo task refused >&2; exit 3' --")
    assert code == 2 and "cannot be used: task refused. HINT: try blaunch " in err and "XFFL_BLAUNCH" in err
