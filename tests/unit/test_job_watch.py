"""Who failed, when a launcher loses patience, and what is told of a job that was stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xffl.cluster.launch.failure import ExitCode, FailureRecord, JobWatch, RankFailure, caught_signals

ROOT = Path(__file__).parents[2]
FULL = """
import signal, time
def stop(number, frame):
    raise OSError("disk full while writing the checkpoint")
signal.signal(signal.SIGTERM, stop)
print("up")
time.sleep(60)
"""
TIME_TO_START_S = 12


def record(at: float, *, lost_peer: bool = False, code: int = 1) -> FailureRecord:
    return FailureRecord(at, code, "ValueError: x", "Traceback\n", is_xffl=False, lost_peer=lost_peer)


def test_the_first_rank_without_a_word_counts() -> None:
    watch = JobWatch(None, 5.0)
    assert watch.result() is None and not watch.is_overdue()
    watch.add_record(0, record(1.0, lost_peer=True))
    assert not watch.is_overdue(-6.0)  # the cause is still to come
    watch.add_code(2, -9)
    watch.add_code(1, -9)  # ended by the launcher
    assert watch.is_overdue(-6.0) and not watch.is_overdue()
    failure = watch.result()
    assert not isinstance(failure, int) and failure is not None and (failure.rank, failure.exit_code) == (2, 137)
    watch.add_record(3, record(2.0))
    failure = watch.result()
    assert not isinstance(failure, int) and failure is not None and (failure.rank, failure.exit_code) == (3, 1)


def test_where_a_peer_was_lost_it_is_told_which_ranks_may_be_it() -> None:
    def told(watch: JobWatch) -> str:
        failure = watch.result()
        assert isinstance(failure, RankFailure)
        return failure.describe()

    watch = JobWatch(None, 5.0)
    watch.add_record(0, record(2.0, lost_peer=True))
    assert told(watch) == "failed with ValueError: x"
    watch.add_left(3)
    assert told(watch) == "failed with ValueError: x; rank 3 left with code 0"
    watch.add_lasting([2, 1])
    assert told(watch) == "failed with ValueError: x; rank 3 left with code 0, and ranks 1, 2 went on, and may hang"
    watch.add_record(1, record(3.0))  # the cause itself
    assert told(watch) == "failed with ValueError: x"


def test_an_end_by_sigterm_counts_where_there_is_no_other() -> None:
    def found(watch: JobWatch) -> tuple[int, int]:
        failure = watch.result()
        assert isinstance(failure, RankFailure)
        return failure.rank, failure.exit_code

    watch = JobWatch(None, 5.0)
    watch.add_code(2, -15)
    watch.add_code(1, -15)
    assert found(watch) == (2, 143)
    watch.add_record(0, record(1.0, lost_peer=True))
    assert found(watch) == (0, 1)  # the launcher may have ended rank 2
    watch.add_code(3, 17)
    assert found(watch) == (3, 17)
    watch = JobWatch(None, 5.0)
    watch.add_record(0, record(1.0, lost_peer=True))
    watch.add_code(2, -15, is_own=True)
    assert found(watch) == (2, 143)


def test_a_failure_while_the_job_is_stopped_is_told() -> None:
    watch = JobWatch(None, 5.0)
    watch.stop(signal.SIGINT)
    for rank, found in enumerate((record(1.0, code=130), record(2.0, lost_peer=True))):
        watch.add_record(rank, found)
    assert watch.result() == 130
    watch.add_record(2, record(3.0))
    failure = watch.result()
    assert isinstance(failure, RankFailure) and (failure.rank, failure.exit_code) == (2, 130)
    assert failure.describe() == "failed with ValueError: x"


@pytest.mark.parametrize(("words", "code"), [([], 143), (["--timeout", "{timeout}"], 124)])
def test_a_checkpoint_that_fails_on_this_machine(words: list[str], code: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FULL)
    words = [word.format(timeout=TIME_TO_START_S) for word in words]
    command = [sys.executable, "-m", "xffl", "exec", "--processes", "1", *words, "script.py"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        if not words:
            process.terminate()
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code and err.count("Traceback") == 1, err
    assert err.splitlines()[-1] == "xffl: rank 0 failed with OSError: disk full while writing the checkpoint"


def test_a_stopped_job() -> None:
    watch = JobWatch(0.0, 5.0)
    while not watch.is_late:
        time.sleep(0.001)
    watch.stop(0)
    assert watch.result() == ExitCode.TIMEOUT and not watch.is_late
    watch = JobWatch(None, 5.0)
    watch.stop(signal.SIGTERM)
    watch.add_code(1, 1)
    assert watch.result() == 143
    watch.add_record(0, record(1.0, code=75))
    failure = watch.result()
    assert not isinstance(failure, int) and failure is not None and failure.exit_code == ExitCode.PREEMPTED


def test_patience_is_lost_once(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = JobWatch(None, 5.0)
    watch.add_record(1, record(2.0))  # told, and not ended yet
    assert watch.is_overdue(-6.0)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watch = JobWatch(None, 5.0)
    watch.add_code(0, 1)
    now[0] += 4
    watch.add_code(1, -9)
    watch.stop(signal.SIGTERM)
    assert not watch.is_overdue()
    now[0] += 2
    assert watch.is_overdue()


def test_the_first_signal_gives_the_exit_code() -> None:
    watch = JobWatch(None, 5.0)
    watch.stop(signal.SIGTERM)
    watch.stop(signal.SIGINT)
    assert watch.result() == 128 + signal.SIGTERM


def test_signals_are_kept_for_later() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with caught_signals() as come:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert sorted(come()) == [(signal.SIGUSR1, False), (signal.SIGTERM, True)] and come() == []
    assert signal.getsignal(signal.SIGUSR1) == before
