"""``xffl exec`` above a stand-in for srun: what is shown, what the end is called, and that there is an end."""

from __future__ import annotations

import io
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from xffl.cluster.launch import logs, runner, srun
from xffl.cluster.launch.failure import ExitCode, RankFailure
from xffl.cluster.launch.logs import LineBuffer, MarkedLines, RankFile, Stream, list_rank_files
from xffl.cluster.launch.merged_lines import MergedLines
from xffl.cluster.launch.runner import RankJob
from xffl.cluster.launch.srun import launch_srun

DEADLINE_S = 30
EXEC = [sys.executable, "-m", "xffl", "exec"]
BEGIN = """
import json, os, signal, sys, time
from pathlib import Path
from xffl.cluster.launch.logs import mark

def say(text, stream=2):
    os.write(stream, text if isinstance(text, bytes) else text.encode())

def tell(rank, content):
    say(b"".join(mark(rank, content)))
"""
Fake = Callable[[str], dict[str, str]]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Return a function that puts a program in srun's place, in a job of one node with two tasks."""
    monkeypatch.chdir(tmp_path)

    def put(program: str) -> dict[str, str]:
        (tmp_path / "fake.py").write_text(BEGIN + program)
        (tmp_path / "train.py").write_text("pass")
        job = {"JOB_ID": "3", "JOB_NODELIST": "n1", "TASKS_PER_NODE": "2", "NTASKS": "2"}
        given = {f"SLURM_{name}": text for name, text in job.items()}
        given |= {"XFFL_SRUN": f"{sys.executable} {tmp_path}/fake.py", "PYTHONPATH": str(Path(__file__).parents[2])}
        for name, text in given.items():
            monkeypatch.setenv(name, text)
        return {**os.environ, **given}

    return put


def launched(world_size: int = 2, **options: float) -> RankFailure | int:
    from xffl.cluster.launch.job_layout import LaunchOptions, lay_out
    from xffl.cluster.slurm.allocation import Host

    return launch_srun(
        lay_out((Host("n1", world_size),), None, None), ["train.py"], LaunchOptions(environ={}, **options)
    )


# What is shown --------------------------------------------------------------------------------------------------------

ENDLESS = """
stream, text = (1, "0: step\\n") if "--label" in sys.argv else (2, "step\\n")
while True:
    say(text, stream)
"""
INTO_A_FILE = """
log = Path(json.loads(os.environ["XFFL_RUNNER"])["log_dir"], "rank_00000.log").open("a")
while True:
    log.write("step\\n")
    log.flush()
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("program", "words"), [(ENDLESS, []), (ENDLESS, ["--merge"]), (INTO_A_FILE, ["--merge", "--log-dir", "logs"])]
)
def test_a_reader_that_goes_ends_the_job(program: str, words: list[str], fake: Fake) -> None:
    with subprocess.Popen(
        [*EXEC, *words, "train.py"], env=fake(program), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith(b"step\n")
        process.stdout.close()
        try:
            assert process.wait(DEADLINE_S) == ExitCode.BROKEN_PIPE
        finally:
            process.kill()


def test_a_progress_bar_is_seen_as_it_grows(fake: Fake) -> None:
    program = 'say("1%\\r2%\\r3%"); signal.pause()'
    with subprocess.Popen([*EXEC, "train.py"], env=fake(program), stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        is_seen = bool(select.select([process.stderr], [], [], DEADLINE_S)[0])
        process.terminate()
        told = process.stderr.read()
    assert is_seen and process.returncode == 143 and told.startswith(b"1%\r2%\r3%")


def test_lines_are_cut() -> None:
    buffer = LineBuffer()
    pieces = [buffer.feed(piece) for piece in (b"a\nb", b"c\r", b"\n\x85d\r1%\r2", b"\r", b"")]
    assert pieces == [[b"a\n"], [], [b"bc\r\n", b"\x85d\r", b"1%\r"], [], []]
    assert buffer.flush() == b"2\r" and buffer.flush() == b""
    given = [b"x" * 1000] * 10_000
    assert sum(len(line) for piece in given for line in buffer.feed(piece)) + len(buffer.flush()) == 10**7
    assert max(map(len, buffer.feed(b"x" * 10**6))) == 10**6  # what is too long is not kept


def test_log_files_of_many_ranks_are_looked_at_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_FILES_PER_S", 10)
    for rank in range(30):
        RankFile(rank, None, tmp_path).path.write_text("1%\r2%")
    waited: list[float] = []

    def wait(pause_s: float) -> bool:
        waited.append(pause_s)
        return len(waited) == 2

    with (tmp_path / "out").open("wb") as out:
        Stream(tmp_path, out).follow(wait)
        assert waited == [3.0, 3.0]
    assert (tmp_path / "out").read_bytes().startswith(b"[rank 0] 1%\r[rank 1] 1%\r")


def check_shown_for(ranks: int, lines: list[bytes]) -> None:
    """See that a line of so many ranks is shown, and how many others have it; again where a busy machine is slow."""
    others = [int(line[1:].split()[0]) for line in lines if b" other rank" in line or b" times more] " in line]
    assert len(lines) <= 20 and sum(others) + len(lines) - len(others) == ranks


WARNED = """
for rank in range(4096):
    say(f"{rank}: [rank{rank}]:[W1130 07:31:{rank % 60:02d}.{rank} group.cpp:1] a group was not destroyed\\n", STREAM)
    say(f"{rank}: loss {rank}\\n", STREAM)
"""


@pytest.mark.parametrize(("stream", "is_labelled"), [(1, True), (2, True), (2, False)])
def test_a_warning_of_very_many_ranks_is_shown_once(
    stream: int, is_labelled: bool, fake: Fake, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    program = WARNED.replace("STREAM", str(stream))
    fake(program if is_labelled else program.replace("{rank}: ", "", 1).replace("{rank}: ", "", 1))
    assert launched(world_size=4096, is_labelled=is_labelled) == ExitCode.OK
    lines = capfdbinary.readouterr()[stream - 1].splitlines()
    warnings = [line for line in lines if b"not destroyed" in line]
    assert len(lines) == 4096 + len(warnings)
    check_shown_for(4096, warnings)
    assert (b"[rank 17] loss 17" if is_labelled else b"loss 17") in lines


def test_output_of_very_many_ranks_has_a_bound() -> None:
    now, out = [0.0], io.BytesIO()
    lines = MergedLines(out, lambda: now[0])
    for number in range(40_000):
        lines.write(number % 4096, b"", b"%d %s\n" % (number, b"x" * 1000))
    assert len(out.getvalue()) < (16 << 20) + 1000 and not out.getvalue().endswith(b"left out")
    now[0] = 2.0
    lines.write(7, b"[rank 7] ", b"later\n")
    *_, told, later = out.getvalue().splitlines()
    shown = len(out.getvalue().splitlines()) - 2
    assert told.startswith(b"xffl: %d lines of 4096 ranks are left out here" % (40_000 - shown))
    assert later == b"[rank 7] later"


def test_what_a_rank_itself_prints_again_is_shown() -> None:
    now, out = [0.0], io.BytesIO()
    lines = MergedLines(out, lambda: now[0])
    for rank, line in ((0, b"---\n"), (1, b"---\n"), (0, b"a\n"), (0, b"---\n"), (1, b"---\n"), (2, b"---\n")):
        lines.write(rank, b"", line)
    assert out.getvalue() == b"---\na\n---\n"
    now[0] = 6.0
    lines.tell()
    lines.write(3, b"", b"---\n")
    lines.end()
    assert out.getvalue() == b"---\na\n---\n[2 other ranks, 3 times] ---\n---\n"


def test_tracebacks_of_many_ranks_are_not_torn_and_shown_once() -> None:
    now, out = [0.0], io.BytesIO()
    lines = MergedLines(out, lambda: now[0])
    block = (
        b"[rank0]: Traceback (most recent call last):\n",
        b'[rank0]:   File "a.py", line 3\n',
        b"[rank0]: ValueError\n",
    )
    for line in block:  # all ranks print in step
        for rank in range(80):
            lines.write(rank, b"[rank %d] " % rank, line.replace(b"rank0", b"rank%d" % rank))
    for line in (block[0], b"  indented\n", b"ValueError: two\n", b"later\n"):
        lines.write(3, b"[rank 3] ", line)
    lines.write(4, b"[rank 4] ", block[0])  # it never ends
    lines.end()
    first = b"".join(b"[rank 0] " + line for line in block)
    other = b"".join(b"[rank 3] " + line for line in (block[0], b"  indented\n", b"ValueError: two\n", b"later\n"))
    assert out.getvalue() == first + other + b"[rank 4] " + block[0] + b"[79 other ranks] [rank0]: ValueError\n"


def test_ranks_of_one_number_in_several_elastic_cells_are_several() -> None:
    out = io.BytesIO()
    lines = MergedLines(out, lambda: 0.0)
    for cell in range(80):
        lines.write(0, b"[cell %d rank 0] " % cell, b"the same\n")
    lines.end()
    assert out.getvalue() == b"[cell 0 rank 0] the same\n[79 other ranks] the same\n"


def test_logs_of_very_many_ranks_have_folders_of_256(tmp_path: Path) -> None:
    for rank in range(700):
        file = RankFile.of_job(rank, rank // 350, tmp_path, 700)
        file.folder.mkdir(exist_ok=True)
        file.path.write_text("the same\n")
    assert [len(list(folder.iterdir())) for folder in sorted(tmp_path.iterdir())] == [256, 256, 188]
    assert file.path == tmp_path / "ranks_00512" / "rank_00699_cell_1.log"
    assert [file.rank for file in list_rank_files(tmp_path)] == [*range(700)]
    out = io.BytesIO()
    Stream(tmp_path, out, world_size=700).copy(is_end=True)
    check_shown_for(700, out.getvalue().splitlines())
    assert out.getvalue().startswith(b"[cell 0 rank 0] the same\n")
    assert RankFile.of_job(255, None, tmp_path, 256).path == tmp_path / "rank_00255.log"


# How it ended ---------------------------------------------------------------------------------------------------------


def test_what_only_looks_like_a_record_is_shown(fake: Fake, capfd: pytest.CaptureFixture[str]) -> None:
    fake(
        """
for rank, content in ((0, []), (0, 7), (0, {"failure": {"x": 1}}), (0, {"failure": []}), (9, {"step": None}), (1, {})):
    tell(rank, content)
record = dict(time=1.0, exit_code=1, headline="ValueError: x", traceback="", is_xffl=False, lost_peer=False)
tell(1, {"failure": record})
say("srun: error: n1: task 1: Exited with exit code 1\\n")
sys.exit(1)
"""
    )
    failure = launched()
    assert isinstance(failure, RankFailure) and (failure.rank, failure.describe()) == (1, "failed with ValueError: x")
    assert capfd.readouterr().err.count("xffl:") == 6


@pytest.mark.parametrize(
    ("said", "code", "words"),
    [
        ("srun: error: n1: task 1: Out Of Memory\n", 137, "was killed by SIGKILL"),
        ("a bar 10%srun: error: n1: task 1: Killed\n", 137, "was killed by SIGKILL"),
        ("srun: error: n1: task 1: Terminated\n", 143, "was killed by SIGTERM"),
    ],
)
def test_a_task_that_ended_badly(
    said: str, code: int, words: str, fake: Fake, capfd: pytest.CaptureFixture[str]
) -> None:
    fake(f'tell(0, {{"step": None}}); say({said!r}); sys.exit(1)')
    failure = launched()
    assert isinstance(failure, RankFailure) and (failure.rank, failure.exit_code) == (1, code)
    assert words in failure.describe() and capfd.readouterr().err == ("a bar 10%\n" if "bar" in said else "")


def test_what_may_go_well_another_time_is_no_refusal(fake: Fake) -> None:
    given = fake('tell(0, {"step": None}); say("srun: error: Node failure on n1\\n"); sys.exit(1)')
    ran = subprocess.run(
        [*EXEC, "train.py"], env=given, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert ran.returncode == ExitCode.FAILED
    assert ran.stderr.startswith("xffl: srun ended with exit code 1: Node failure on n1; see") and "\n" in ran.stderr


def test_srun_that_does_not_end_is_killed(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # A child of it holds its streams open longer.
    fake(
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    time.sleep(75)
    os._exit(0)
time.sleep(70)
"""
    )
    monkeypatch.setattr(srun, "_SLACK_S", 0.3)
    began = time.monotonic()
    assert launched(timeout_s=1.0, grace_s=0.3) == ExitCode.TIMEOUT
    assert time.monotonic() - began < 45


# The ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "ConfigError: log file "),
        ({"XFFL_BIND": "nonsense", "RANK": "1", "WORLD_SIZE": "2"}, "ConfigError: XFFL_BIND is 'nonsense'"),
    ],
)
def test_a_rank_that_cannot_begin_tells_it(given: dict[str, str], message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "train.py").write_text("pass")
    job = RankJob((str(tmp_path / "train.py"),), str(tmp_path / "file" / "logs"), is_marked=True)
    places = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    places |= {"GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "XFFL_HOST": "n1"}
    ran = subprocess.run(
        [sys.executable, "-m", "xffl.cluster.launch.runner"],
        env={**os.environ, **places, **given, **job.variables()},
        capture_output=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    reader, found = MarkedLines(), []
    for line in ran.stderr.splitlines(keepends=True):
        rest, told = reader.take(line)
        assert rest == b"", ran.stderr
        found += [told] if told is not None else []
    assert ran.returncode == ExitCode.REFUSED
    assert found[-1].content["failure"]["headline"].startswith(message), json.dumps(found[-1].content)


def test_a_failed_rank_leaves_when_its_story_has_had_time_to_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    # srun drops what is under way to it when the exit of a rank ends the step.
    reading, writing = os.pipe()
    found, reader = [], MarkedLines()

    def sleep(seconds: float) -> None:
        lines = os.read(reading, 1 << 16).splitlines(keepends=True)
        found.extend((seconds, told) for _, told in map(reader.take, lines) if told is not None)

    monkeypatch.setattr(runner.time, "sleep", sleep)
    monkeypatch.setattr(runner, "limit_exit", lambda code: None)
    assert runner._report(ValueError("mine"), RankJob(is_marked=True), 3, writing, has_log=False) == ExitCode.FAILED
    [(seconds, told)] = found
    assert seconds > 0.1 and told.rank == 3 and told.content["failure"]["headline"] == "ValueError: mine"
    for end in (reading, writing):
        os.close(end)
