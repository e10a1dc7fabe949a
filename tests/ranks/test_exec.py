"""``xffl exec`` with real processes. The scripts need no torch, so that each run costs about two seconds."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.processes import is_alive, still_there
from tests.rows import some_of
from xffl.cluster.launch.runner import RankJob

DEADLINE_S = 120
ROOT = Path(__file__).parents[2]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Give this process's environment without what another launcher or test may have left."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XFFL_", "TORCHELASTIC", "OMP_"))}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH"))))
    # A launcher that is killed cannot remove its folder.
    return {**kept, "TMPDIR": str(tmp_path)}


@pytest.fixture
def xffl(tmp_path: Path, environ: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts ``xffl exec OPTIONS SCRIPT ARGUMENTS`` in a fresh folder."""
    started: list[subprocess.Popen[str]] = []

    def start(options: str, script: str, *arguments: str, name: str = "script.py") -> subprocess.Popen[str]:
        (tmp_path / name).write_text(script)
        command = [sys.executable, "-m", "xffl", "exec", *options.split(), name, *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=tmp_path, env=environ, **pipes))  # type: ignore[call-overload]
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=DEADLINE_S)
    return process.returncode, out, err


def test_success_passes_arguments_and_federation(xffl: Start, tmp_path: Path) -> None:
    hostile = ["--processes", "a b", "$HOME ${local_rank} $$", 'it\'s "q"', "", "-", "--", "*", "\n", "é", "`id`;"]
    script = """
        import json, os, sys
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "XFFL_FEDERATED", "XFFL_HSDP", "OMP_NUM_THREADS", "MASTER_ADDR")
        told = {"argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path[0]}
        told.update({name: os.environ[name] for name in names})
        open(f"told.{os.environ['RANK']}", "w").write(json.dumps(told))
    """
    name = "a'; echo foo $(id) ${local_rank}.py"
    code, out, err = finish(
        xffl("--processes 4 --federated (2,2) --hsdp 1", textwrap.dedent(script), *hostile, name=name)
    )
    assert (code, out) == (0, "") and err.startswith(f"xffl: --processes after {name} goes to the script")
    assert err.count("\n") == 1
    for rank in range(4):
        told = json.loads((tmp_path / f"told.{rank}").read_text())
        assert told["argv"] == [name, *hostile] and told["name"] == "__main__" and told["file"] == str(tmp_path / name)
        assert told["path"] == str(tmp_path)
        assert (told["RANK"], told["WORLD_SIZE"], told["LOCAL_RANK"]) == (str(rank), "4", str(rank))
        assert (told["XFFL_FEDERATED"], told["XFFL_HSDP"], told["OMP_NUM_THREADS"]) == ("2,2", "1", "1")


def test_a_federation_of_one_cell_is_told_once_and_before_the_ranks(xffl: Start) -> None:
    script = "import os; print(os.environ['XFFL_FEDERATED'], os.environ['XFFL_LAUNCHED_CELLS'])"
    code, out, err = finish(xffl("--processes 2 --federated hosts:. --require-cells 1", script))
    assert code == 0 and out == "2 1\n" * 2
    assert err.startswith("xffl: federated hosts:. puts all 2 ranks into one cell") and err.count("\n") == 1


def test_the_launcher_takes_no_torch(xffl: Start, tmp_path: Path) -> None:
    """Ranks start at once: to import torch takes a second and more, which each of them pays by itself."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    code, out, err = finish(xffl("--processes 2 --federated 1", "import sys\nprint('torch' in sys.modules)"))
    assert (code, out, err) == (0, "False\n" * 2, "")


PORT = """
import errno, os, socket, sys
port, rank = int(os.environ["MASTER_PORT"]), int(os.environ["RANK"])
assert os.environ["MASTER_ADDR"] == "127.0.0.1" and os.environ["GROUP_WORLD_SIZE"] == "1"
if sys.argv[1] == "others":  # nobody is given the port, whoever asks
    if rank == 0:
        for address in ("127.0.0.1", "127.0.0.2", "0.0.0.0"):
            try:
                socket.socket().bind((address, port))
            except OSError as error:
                assert error.errno == errno.EADDRINUSE
            else:
                raise AssertionError(f"the port is not held for {address}")
else:  # as a script that knows nothing of xffl
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    ranks = torch.ones(1)
    dist.all_reduce(ranks)
    assert ranks == 2
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("who", ["others", "torch"])
def test_ranks_meet_at_a_port_that_is_held_for_them(xffl: Start, who: str, environ: dict[str, str]) -> None:
    environ |= {"TORCHELASTIC_RUN_ID": "above", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": "1"}
    code, out, err = finish(xffl("--processes 2", PORT, who))
    assert (code, out, err) == (0, "", "")


def test_ranks_that_do_not_end_are_killed_after_their_grace(xffl: Start) -> None:
    script = "import os, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(os.getpid())\nsignal.pause()"
    process = xffl("--processes 2 --grace 0.5", script)
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert (code, err) == (143, "xffl: stopped all ranks after SIGTERM\n")
    assert not still_there(pids, DEADLINE_S)


SLOW = """
import signal, sys, threading
how = sys.argv[1]
def leave(number, frame):
    if how == "saves":  # and lingers, longer than the grace
        sys.exit(75)
    if how == "fails":
        threading.Thread(target=threading.Event().wait).start()
        raise OSError("disk full while writing the checkpoint")
signal.signal(signal.SIGTERM, leave)
print("up")
signal.pause()
"""


@pytest.mark.parametrize(
    ("how", "code", "told"),
    [
        ("saves", 75, "xffl: the job was asked to leave and has saved its state (exit code 75); start it again"),
        (
            "fails",
            143,
            "xffl: rank {rank} failed with OSError: disk full while writing the checkpoint; all other ranks",
        ),
    ],
)
def test_what_a_rank_has_told_before_it_is_killed_counts(xffl: Start, how: str, code: int, told: str) -> None:
    process = xffl("--processes 2 --grace 3", SLOW, how)
    assert [process.stdout.readline() for _ in range(2)] == ["up\n"] * 2
    process.send_signal(signal.SIGTERM)
    ended, _, err = finish(process)
    assert ended == code and any(err.splitlines()[-1].startswith(told.format(rank=rank)) for rank in range(2)), err


@pytest.mark.parametrize(
    "answer", some_of(("sys.exit(75)", "sys.exit(143)", "raise ValueError('mine')"), "sys.exit(143)")
)
def test_answers_to_the_end_of_another_rank_are_no_causes(xffl: Start, answer: str) -> None:
    script = f"""
        import os, signal, sys, time
        def leave(number, frame):
            {answer}
        signal.signal(signal.SIGTERM, leave)
        open("up" + os.environ["RANK"], "w").close()
        while not os.path.exists("up0") or not os.path.exists("up1"):
            time.sleep(0.01)
        if os.environ["RANK"] == "1":
            os._exit(9)
        signal.pause()
    """
    ended, _, err = finish(xffl("--processes 2", textwrap.dedent(script)))
    assert (ended, err) == (9, "xffl: rank 1 exited with code 9; all other ranks were stopped\n")


CHILD = """
import signal, subprocess, sys
child = "import os, signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: {how}); print(os.getpid(), flush=True)"
words = [sys.executable, "-c", child.format(how=sys.argv[1]) + "; time.sleep(60)"]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(sys.argv[2])))
subprocess.Popen(words)
signal.pause()
"""


@pytest.mark.parametrize("own", ["0", "1"])
def test_what_ranks_have_started_gets_its_grace_too(xffl: Start, own: str, tmp_path: Path) -> None:
    how = "(time.sleep(0.3), open('saved', 'w').close(), os._exit(0))"
    process = xffl("--processes 1 --grace 60", CHILD, how, own)
    assert process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 143 and (tmp_path / "saved").exists()
    process = xffl("--processes 1 --grace 0.3", CHILD, "None", own)  # and is killed then
    pid = int(process.stdout.readline())
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 143 and not still_there([pid], 5.0)


def test_a_second_ctrl_c_kills_what_is_left(xffl: Start) -> None:
    script = (
        "import signal\nfor number in (2, 15):\n    signal.signal(number, signal.SIG_IGN)\nprint('up')\nsignal.pause()"
    )
    process = xffl("--processes 1 --grace 100", script)
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)  # batch systems may say it twice
    process.send_signal(signal.SIGINT)
    assert finish(process) == (143, "", "xffl: stopped all ranks after SIGTERM\n")


def test_a_failure_is_told_whatever_comes_while_the_others_end(xffl: Start) -> None:
    script = """
        import os, signal, time
        signal.signal(signal.SIGTERM, lambda *_: print("told", flush=True))
        if os.environ["RANK"] == "0":
            open("up", "w").close()
        else:
            while not os.path.exists("up"):  # before, SIGTERM would simply end the other one
                time.sleep(0.01)
            os.kill(os.getpid(), 9)
        while True:
            signal.pause()
    """
    process = xffl("--processes 2 --grace 2", textwrap.dedent(script))
    assert process.stdout.readline() == "told\n"
    process.send_signal(signal.SIGTERM)
    told = "xffl: rank 1 was killed by SIGKILL (signal 9); all other ranks were stopped\n"
    code, _, err = finish(process)
    assert (code, err) == (137, told)


def test_a_job_that_was_told_to_ignore_how_children_end(tmp_path: Path) -> None:
    (tmp_path / "above.py").write_text(
        "import os, signal, sys\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nos.execv(sys.executable, sys.argv[1:])"
    )
    words = ["-m", "xffl", "exec", "--processes", "1", "script.py"]
    (tmp_path / "script.py").write_text("raise ValueError('mine')")
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "above.py", sys.executable, *words], cwd=tmp_path, env=environ, capture_output=True, text=True,
        timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 1 and "failed with ValueError: mine" in ran.stderr


def test_a_rank_whose_launcher_has_gone_already_does_not_begin(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("open('begun', 'w').close()")
    for parent, code in ((os.getpid(), 0), (1, 137)):
        ran = subprocess.run(
            [sys.executable, "-m", "xffl.cluster.launch.runner", "script.py"],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), **RankJob(parent=parent).variables()},
            timeout=DEADLINE_S, check=False,
        )  # fmt: skip
        assert ran.returncode == code and (tmp_path / "begun").exists() == (code == 0)
        (tmp_path / "begun").unlink(missing_ok=True)


def test_a_failing_rank_is_shown_once_and_ends_the_job(xffl: Start) -> None:
    script = (
        "import os, signal\n"
        "print('hello from', os.environ['RANK'])\n"
        "def unlucky():\n"
        "    raise ValueError('seven years')\n"
        "if os.environ['RANK'] == '2':\n"
        "    unlucky()\n"
        "signal.pause()\n"
    )
    code, out, err = finish(xffl("--processes 4 --federated 2,2", script))
    assert code == 1
    assert "hello from 2" in out
    assert err.count("Traceback") == 1 and err.count("raise ValueError") == 1
    assert "runpy" not in err and "runner.py" not in err and "elastic" not in err
    assert err.endswith("xffl: rank 2 (cell 1) failed with ValueError: seven years; all other ranks were stopped\n")


def test_what_follows_from_the_first_failure_is_not_shown(xffl: Start, tmp_path: Path) -> None:
    # Rank 0 opens the pipe when rank 1 is about to die without a word, and reports its loss before rank 1 is found.
    os.mkfifo(tmp_path / "pipe")
    script = """
import os
if os.environ["RANK"] == "1":
    os.open("pipe", os.O_RDONLY)
    os._exit(17)
os.open("pipe", os.O_WRONLY)
raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1")
"""
    code, _, err = finish(xffl("--processes 2", script))
    assert (code, err) == (17, "xffl: rank 1 exited with code 17; all other ranks were stopped\n")


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        ("os._exit(17)", 17, "exited with code 17"),
        pytest.param("sys.exit(3)", 3, "exited with code 3", marks=pytest.mark.long),
        ("sys.exit('no data')", 1, "exited with code 1"),
        ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL (signal 9)"),
        pytest.param("os.kill(os.getpid(), 11)", 139, "was killed by SIGSEGV (signal 11)", marks=pytest.mark.long),
    ],
)
def test_exit_codes(xffl: Start, ending: str, code: int, words: str) -> None:
    script = f"import os, signal, sys\nif os.environ['RANK'] == '1':\n    {ending}\nsignal.pause()\n"
    ended, _, err = finish(xffl("--processes 2", script))
    assert ended == code
    assert err.endswith(f"xffl: rank 1 {words}; all other ranks were stopped\n") and "Traceback" not in err
    assert ("no data" in err) == ("no data" in ending)


def test_an_error_of_xffls_own_is_one_line(xffl: Start) -> None:
    script = "from xffl import TopologyError\nraise TopologyError('sizes (2, 3) do not fit; give others')\n"
    code, _, err = finish(xffl("--processes 3", script))
    assert code == 2 and err.count("\n") == 1
    assert "failed with TopologyError: sizes (2, 3) do not fit; give others" in err
    code, _, err = finish(xffl("--processes 3 --traceback", script))
    assert code == 2 and err.count("Traceback") == 1


def test_a_script_with_a_syntax_error(xffl: Start) -> None:
    code, _, err = finish(xffl("--processes 2", "x = (\n"))
    assert code == 1 and err.count("SyntaxError: '(' was never closed") == 2 and "runpy" not in err


READY = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(os.getpid(), child.pid)
signal.pause()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_stop_everything(xffl: Start, number: signal.Signals, code: int) -> None:
    process = xffl("--processes 2", READY)
    pids = [int(word) for _ in range(2) for word in process.stdout.readline().split()]
    assert len(pids) == 4 and all(map(is_alive, pids))
    process.send_signal(number)
    ended, _, err = finish(process)
    assert not still_there(pids, DEADLINE_S)
    assert ended == code
    told = [line for line in err.splitlines() if line.startswith("xffl")]
    assert told == [f"xffl: stopped all ranks after {number.name}"]
    assert "script.py" not in err


def test_a_killed_launcher_leaves_no_ranks(xffl: Start) -> None:
    process = xffl("--processes 2", "import os, signal\nprint(os.getpid())\nsignal.pause()\n")
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.kill()
    assert not still_there(pids, DEADLINE_S)
    assert not any(map(is_alive, pids))


ROUNDS = """
import os, torch, xffl
torch.manual_seed(0)
with xffl.session() as state:
    aggregator = xffl.Aggregator(torch.nn.Linear(4, 2), state, gradients_reduced_by_caller=True)
    aggregator.aggregate()
    print(state.rank, os.getpid(), flush=True)
    while True:
        aggregator.aggregate()
"""


def test_a_rank_that_is_killed_between_rounds_ends_the_job(xffl: Start) -> None:
    """The others are in a round with it, and learn of its end from a connection that breaks, or from the launcher."""
    process = xffl("--processes 3 --federated 2,1", ROUNDS)
    pids = {int(rank): int(pid) for rank, pid in (process.stdout.readline().split() for _ in range(3))}
    killed_at = time.monotonic()
    os.kill(pids[2], signal.SIGKILL)
    code, _, err = finish(process)
    seconds = time.monotonic() - killed_at
    told = "xffl: rank 2 (cell 1) was killed by SIGKILL (signal 9); all other ranks were stopped\n"
    assert code == 137 and err.endswith(told) and "Traceback" not in err, err
    assert seconds < DEADLINE_S / 4 and not any(map(is_alive, pids.values())), seconds


@pytest.mark.parametrize("end, code", [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
def test_a_rank_that_fails_leaves_no_children(xffl: Start, tmp_path: Path, end: str, code: int) -> None:
    script = f"""
        import os, subprocess, sys, time
        if os.environ["RANK"] == "0":
            time.sleep(60)
        nowhere = subprocess.DEVNULL
        child = subprocess.Popen(["sleep", "60"], stdout=nowhere, stderr=nowhere)
        print(child.pid, file=open("child", "w"), flush=True)
        {end}
    """
    ended, _, err = finish(xffl("--processes 2", textwrap.dedent(script)))
    assert ended == code, err
    child = int((tmp_path / "child").read_text())
    assert still_there([child], 5.0) == []


def test_the_time_limit(xffl: Start) -> None:
    code, _, err = finish(xffl("--processes 2 --timeout 1", "import signal\nsignal.pause()\n"))
    assert (code, err) == (124, "xffl: stopped all ranks after 1.0 s, as --timeout says\n")


def test_logs_and_the_merged_stream(xffl: Start, tmp_path: Path) -> None:
    script = "import os, sys\nprint('out', os.environ['RANK'])\nsys.stderr.write('no end')\n"
    script += "assert 'XFFL_RUNNER' not in os.environ\n"
    lines = {f"[cell {rank} rank {rank}] {words}" for rank in range(2) for words in (f"out {rank}", "no end")}
    for options in ("--merge", "--merge --log-dir logs"):
        code, out, err = finish(xffl(f"--processes 2 --federated 1 {options}", script))
        assert (code, err) == (0, "") and set(out.splitlines()) == lines
    names = ["rank_00000_cell_0.log", "rank_00001_cell_1.log"]
    assert sorted(file.name for file in (tmp_path / "logs").iterdir()) == names
    code, out, err = finish(xffl("--processes 2 --log-dir logs", "raise ValueError('seven years')"))
    assert (code, out) == (1, "") and err.count("Traceback") == 1
    # The other rank may be ended before it has a file.
    logs = [file.read_text() for file in (tmp_path / "logs").glob("rank_0000?.log")]
    assert any("ValueError: seven years" in log for log in logs)


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_ranks_may_leave_after_a_signal(xffl: Start, number: signal.Signals) -> None:
    script = f"""
import signal, sys
signal.signal({int(number)}, lambda *_: sys.exit(75))
print("ready")
while True:
    signal.pause()
"""
    process = xffl("--processes 2", script)
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(number)
    code, _, err = finish(process)
    assert (code, err.count("\n")) == (75, 1) and "has saved its state (exit code 75)" in err


SESSION = """
import os, signal, sys, torch, torch.distributed as dist, xffl
with xffl.session(device="cpu") as state:
    x = torch.ones(1)
    dist.all_reduce(x)
    print(state.rank, state.federated_rank, os.getpid())
    if state.rank == 2 and sys.argv[1] == "leave":
        os._exit(0)
    dist.all_reduce(x)
    signal.pause()
"""


def test_a_rank_that_leaves_with_0_while_others_wait_is_told(xffl: Start) -> None:
    ended, _, err = finish(xffl("--processes 3 --federated 2,1", SESSION, "leave"))
    assert ended == 1
    assert re.fullmatch(
        r"xffl: rank [01] \(cell 0\) failed with .*; rank 2 left with code 0.*; all other ranks were stopped",
        err.splitlines()[-1],
    )


def test_a_rank_for_which_others_have_waited_in_vain_is_told(xffl: Start) -> None:
    script = """
import os, signal, time
rank = os.environ["RANK"]
if rank in ("1", "2"):
    signal.pause()
open("up" + rank, "w").close()  # who is told as going on may not have started yet
while not os.path.exists("up0") or not os.path.exists("up3"):
    time.sleep(0.01)
raise RuntimeError("[gloo] Timed out waiting 1000ms for recv operation to complete")
"""
    ended, _, err = finish(xffl("--processes 4", script))
    assert ended == 1 and err.endswith("to complete; ranks 1, 2 went on, and may hang; all other ranks were stopped\n")


def test_ctrl_c_ends_a_session(xffl: Start) -> None:
    process = xffl("--processes 2 --federated 1", SESSION, "stay")
    ranks = sorted(process.stdout.readline().split() for _ in range(2))
    assert [rank[:2] for rank in ranks] == [["0", "0"], ["1", "1"]]
    process.send_signal(signal.SIGINT)
    ended, _, err = finish(process)
    assert ended == 130 and "Traceback" not in err
    assert not still_there([int(rank[2]) for rank in ranks], DEADLINE_S)


# Elastic runs: each cell is a job of its own -----------------------------------------------------------------------


PLACE = """
import os, signal, sys, time
cell, life, rank = os.environ["XFFL_CELL"], os.environ["XFFL_RESTARTS"], os.environ["RANK"]
def tell(*words):
    print(cell, life, rank, os.environ["WORLD_SIZE"], *words)
def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.02)
"""


def children_of(pid: int) -> dict[int, str]:
    """Return the processes that one has started, each with its command line."""
    pids = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return {pid: Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in pids}


def test_a_cell_that_fails_comes_back_while_the_others_go_on(xffl: Start, tmp_path: Path) -> None:
    script = """
tell()
open(f"token.{cell[0]}.{life}.{rank}", "w").write(os.environ["XFFL_TOKEN"] + open("/proc/self/cmdline").read())
if cell == "0/2":
    wait_for("back")
elif life == "1":
    wait_for(f"token.1.1.{1 - int(rank)}")
    open("back", "w").close()
elif rank == "1":
    wait_for("token.1.0.0")
    os.kill(os.getpid(), signal.SIGKILL)
else:
    signal.pause()
"""
    words = "--elastic --federated 1,2 --require-cells 2 --merge --log-dir logs"
    code, out, err = finish(xffl(words, PLACE + script))
    lines = [f"[cell 1 rank {rank}] 1/2 {life} {rank} 2" for life in range(2) for rank in range(2)]
    assert code == 0 and sorted(out.splitlines()) == sorted(["[cell 0 rank 0] 0/2 0 0 1", *lines])
    first, *others = err.splitlines()
    assert re.fullmatch(
        r"xffl: xffl cells http://127.0.0.1:\d+ --journal \S+/journal shows the cells of this run", first
    )
    assert others == [
        "xffl: rank 1 (cell 1) was killed by SIGKILL (signal 9); all other ranks of the cell were stopped",
        "xffl: cell 1 ended with exit code 137; it is started again (restart 1 of 3)",
    ]
    shown = subprocess.run(
        [sys.executable, "-m", "xffl", "logs", "logs"], cwd=tmp_path, capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert shown.stdout.splitlines() == ["[cell 0 rank 0] 0/2 0 0 1", *lines]
    told = [file.read_text() for file in tmp_path.glob("token.*")]
    tokens = {text[:64] for text in told}
    assert len(told) == 5 and len(tokens) == 1 and not any(tokens & set(text[64:].split("\0")) for text in told)


def test_a_cell_that_has_used_up_its_restarts_is_told_and_the_others_go_on(xffl: Start, tmp_path: Path) -> None:
    script = """
if cell == "1/2":
    open("new", "w").write(f"{os.getpid()} {os.getppid()}")
    os.rename("new", f"life.{life}")
    sys.exit(7)
wait_for("life.1")
# Until the launcher has seen its end.
for pid in set(open("life.1").read().split()) - {str(os.getppid())}:
    while os.path.exists(f"/proc/{pid}"):
        time.sleep(0.02)
tell("done")
"""
    code, out, err = finish(xffl("--elastic --processes 2 --federated 1 --restarts 1", PLACE + script))
    assert (code, out) == (7, "0/2 0 0 1 done\n")
    first, *others = err.splitlines()
    assert re.fullmatch(
        r"xffl: xffl cells http://127.0.0.1:\d+ --journal \S+/journal shows the cells of this run", first
    )
    assert others == [
        "xffl: rank 0 (cell 1) exited with code 7",
        "xffl: cell 1 ended with exit code 7; it is started again (restart 1 of 1)",
        "xffl: rank 0 (cell 1) exited with code 7",
        "xffl: cell 1 ended with exit code 7 and is not started again: --restarts is 1",
    ]


def test_what_would_fail_in_the_same_way_is_not_started_again(xffl: Start) -> None:
    script = """
from xffl.errors import ConfigError, RoundError
if cell == "0/2" or life == "1":
    raise ConfigError("no")
raise RoundError("others")
"""
    code, _, err = finish(xffl("--elastic --federated 1,1", PLACE + script))
    assert code == 2 and err.count("is started again") == 1 and err.count("it would fail in the same way") == 2, err
    assert "xffl: cell 1 ended with exit code 2; it is started again" in err


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 75), (signal.SIGUSR2, 140), (signal.SIGKILL, -9)],
)
def test_signals_reach_all_cells_and_leave_nothing(xffl: Start, number: signal.Signals, code: int) -> None:
    script = """
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
print(os.getpid())
while True:
    signal.pause()
"""
    process = xffl("--elastic --federated 1,2 --grace 5", PLACE + script)
    pids = [int(process.stdout.readline()) for _ in range(3)]
    started = children_of(process.pid)
    assert len(started) == 3 and sum(" lighthouse --bind 127.0.0.1:" in command for command in started.values()) == 1
    process.send_signal(number)
    ended, _, err = finish(process)
    assert ended == code and "again" not in err.replace("start it again", ""), err
    assert not still_there([*pids, *started], DEADLINE_S)


def test_a_cell_that_is_to_be_started_again_is_not_after_a_signal(xffl: Start) -> None:
    script = "if cell == '0/2':\n    open('up', 'w').close()\n    wait_for('never')\nwait_for('up')\nsys.exit(3)\n"
    process = xffl("--elastic --federated 1,1", PLACE + script)
    while "it is started again" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGTERM)
    assert finish(process) == (143, "", "xffl: stopped all ranks of cell 0 after SIGTERM\n")


def test_the_time_limit_is_that_of_the_run(xffl: Start) -> None:
    code, _, err = finish(xffl("--elastic --federated 1,1 --timeout 1.5", PLACE + "signal.pause()"))
    assert code == 124 and err.splitlines()[-1] == "xffl: stopped all cells after 1.5 s, as --timeout says"


def test_a_lighthouse_that_dies_is_started_again_at_its_port(xffl: Start) -> None:
    script = """
import socket
host, port = os.environ["XFFL_LIGHTHOUSE"].removeprefix("http://").split(":")
print("ready")
wait_for("killed")
while socket.socket().connect_ex((host, int(port))):
    time.sleep(0.05)
"""
    process = xffl("--elastic --federated 1,1", PLACE + script)
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    before = {pid for pid, command in children_of(process.pid).items() if " lighthouse " in command}
    os.kill(*before, signal.SIGKILL)
    Path(f"/proc/{process.pid}/cwd/killed").touch()
    code, _, err = finish(process)
    told = "xffl: the lighthouse has died, and is started again at the same port"
    assert (code, err.splitlines()[1:]) == (0, [told])


def test_a_run_whose_lighthouse_cannot_be_had_ends(xffl: Start, tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "torchft").mkdir()
    (tmp_path / "torchft" / "__init__.py").write_text("raise ImportError('broken')")
    environ["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{environ['PYTHONPATH']}"
    code, _, err = finish(xffl("--elastic --federated 1,1", PLACE + "signal.pause()"))
    assert code == 2 and "xffl: ConfigError: a lighthouse needs torchft" in err and "again" not in err
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torchft'] = None\n")
    code, out, err = finish(xffl("--elastic --federated 1,1", PLACE + "tell()"))
    assert (code, out) == (2, "") and err.startswith("xffl: ConfigError: an elastic run needs torchft")
    assert "; run: pip install " in err and err.count("\n") == 1


def test_one_cell_of_a_run_whose_lighthouse_is_elsewhere(xffl: Start, environ: dict[str, str]) -> None:
    words = "--elastic 127.0.0.1:1 --cell 1/3 --processes 2 --restarts 2"
    code, _, err = finish(xffl(words, PLACE + "tell()"))
    assert code == 2 and "LaunchError" in err and "set XFFL_TOKEN" in err and err.count("\n") == 1
    environ |= {"XFFL_TOKEN": "mine-for-this-run", "SLURM_RESTART_COUNT": "4"}
    script = """
tell(os.environ["XFFL_LIGHTHOUSE"], os.environ["XFFL_TOKEN"])
open(f"told.{life}.{rank}", "w").close()
wait_for(f"told.{life}.{1 - int(rank)}")
sys.exit(3 if life == "4" else 0)
"""
    code, out, err = finish(xffl(words, PLACE + script))
    lines = [f"1/3 {life} {rank} 2 http://127.0.0.1:1 mine-for-this-run" for life in (4, 5) for rank in (0, 1)]
    assert code == 0 and sorted(out.splitlines()) == lines
    assert "cell 1 ended with exit code 3; it is started again (restart 1 of 2)" in err


def test_a_job_runs_the_lighthouse_until_it_ends_and_then_another_one_does(
    xffl: Start, environ: dict[str, str], tmp_path: Path
) -> None:
    environ["XFFL_TOKEN"] = "mine-for-this-run"
    file = tmp_path / "run" / "lighthouse"

    def start(cell: int) -> subprocess.Popen[str]:
        return xffl(f"--elastic file:run/lighthouse --cell {cell}/2 --processes 1", PLACE + script)

    def lighthouse_of(process: subprocess.Popen[str]) -> list[str]:
        return [command for command in children_of(process.pid).values() if " lighthouse --bind " in command]

    def wait_until_named(process: subprocess.Popen[str]) -> str:
        line = process.stderr.readline()
        found = re.fullmatch(r"xffl: this job runs the lighthouse, at (http://(\S+))\n", line)
        assert found is not None, line
        assert file.read_text() == f"{found[1]}\n" and f" --bind {found[2]} " in lighthouse_of(process)[0]
        return found[1]

    script = 'print(os.environ["XFFL_LIGHTHOUSE"], flush=True)\nsignal.pause()\n'
    first = start(0)
    urls = [wait_until_named(first)]
    second = start(1)
    assert [one.stdout.readline() for one in (first, second)] == [f"file:{file}\n"] * 2
    assert not lighthouse_of(second)
    first.send_signal(signal.SIGTERM)
    assert finish(first) == (143, "", "xffl: stopped all ranks of cell 0 after SIGTERM\n")
    urls.append(wait_until_named(second))  # at its next look
    second.kill()  # nothing takes the file away
    assert not still_there(list(children_of(second.pid)), DEADLINE_S) and file.exists()
    third = start(0)
    urls.append(wait_until_named(third))
    third.send_signal(signal.SIGTERM)
    finish(third)
    assert len(set(urls)) == 3 and not file.exists() and os.listdir(file.parent) == []


def test_a_preempted_cell_comes_back_but_in_a_job_that_has_to_leave(xffl: Start, environ: dict[str, str]) -> None:
    environ["XFFL_TOKEN"] = "mine-for-this-run"
    words, script = (
        "--elastic a:1 --cell 0/2 --processes 1 --launcher local",
        PLACE + "sys.exit(0 if life == '1' else 75)",
    )
    code, _, err = finish(xffl(words, script))
    assert code == 0 and "cell 0 ended with exit code 75; it is started again" in err
    environ["SLURM_JOB_ID"] = "1"
    told = "xffl: cell 0 was asked to leave and has saved its state (exit code 75); start it again\n"
    assert finish(xffl(words, script)) == (75, "", told)
