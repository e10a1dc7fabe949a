"""The lighthouse of cells in several jobs, which a file names: who runs it, with sockets in place of lighthouses."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from xffl.errors import LaunchError
from xffl.jobs import lighthouse
from xffl.jobs.lighthouse import SharedLighthouse

SILENCE_S = 0.3


class Listener:
    """Stands for the process of a lighthouse, which takes some time to start."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket: socket.socket | None = None

    def listen(self) -> None:
        host, _, port = self.address.rpartition(":")
        self.socket = socket.create_server((host, int(port)))

    def keep(self) -> bool:
        return True

    def stop(self) -> None:
        if self.socket is not None:
            self.socket.close()


class Job(SharedLighthouse):
    """One job's part, with what its lighthouse is."""

    def look(self) -> str:
        """Let it look at the file once, and return what it runs: HOST:PORT."""
        self._due = 0.0
        assert self.keep()
        return "" if self._own is None else self._own.address

    def listen(self) -> None:
        assert isinstance(self._own, Listener)
        self._own.listen()

    def die(self) -> None:
        assert self._own is not None
        self._own.stop()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(lighthouse, "LighthouseProcess", Listener)
    monkeypatch.setattr(lighthouse, "_require_torchft", lambda: None)
    monkeypatch.setattr(lighthouse, "_SILENCE_S", SILENCE_S)
    monkeypatch.setenv("XFFL_IFNAME", "lo")
    return tmp_path / "run" / "lighthouse"


@pytest.fixture
def jobs(file: Path) -> Iterator[list[Job]]:
    found = [Job(str(file)) for _ in range(3)]
    yield found
    for job in found:
        job.stop()


def named(file: Path) -> str:
    return file.read_text().strip().removeprefix("http://")


def test_of_several_that_start_at_once_the_one_that_the_file_names_stays(file: Path, jobs: list[Job]) -> None:
    assert len({job.look() for job in jobs}) == 3  # there is no file yet
    assert not file.exists()  # none is ready
    for job in jobs[:2]:
        job.listen()
    address = jobs[1].look()
    assert named(file) == address
    assert [job.look() for job in jobs] == ["", address, ""] == [job.look() for job in jobs]
    assert list(file.parent.iterdir()) == [file]


def test_one_that_has_written_at_the_same_moment_ends(file: Path, jobs: list[Job]) -> None:
    first, second, _ = jobs
    for job in (first, second):
        job.look()
        job.listen()
    first.look()
    before = named(file)
    file.unlink()  # as the second has seen it when it wrote
    after = second.look()
    assert named(file) == after != before
    assert (first.look(), second.look()) == ("", after) == (first.look(), second.look())


def test_another_job_takes_over_after_a_silence(file: Path, jobs: list[Job]) -> None:
    first, second, third = jobs
    first.look()
    first.listen()
    first.look()
    assert second.look() == third.look() == ""
    first.die()
    assert second.look() == ""  # it may only be started again
    time.sleep(SILENCE_S + 0.1)
    assert second.look() != "" and named(file) != second.look()
    second.listen()
    assert second.look() == named(file)
    # The first one's host has come back.
    assert first.look() == "" and third.look() == ""


def test_a_file_that_was_removed_is_written_again(file: Path, jobs: list[Job]) -> None:
    [first, second, _] = jobs
    first.look()
    first.listen()
    address = first.look()
    file.unlink()
    assert second.look() != address  # it has seen no file
    assert first.look() == address == named(file)
    assert second.look() == ""


def test_who_ends_takes_the_file_away_unless_it_names_another_one(file: Path, jobs: list[Job]) -> None:
    first, second, _ = jobs
    first.look()
    first.listen()
    first.look()
    first.stop()
    assert not file.exists()
    second.look()
    second.listen()
    second.look()
    file.write_text("http://127.0.0.1:1\n")
    second.stop()
    assert named(file) == "127.0.0.1:1"


def test_a_file_that_cannot_be_used_is_told_once(
    file: Path, jobs: list[Job], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file.mkdir()
    for _ in range(2):
        jobs[0].look()
    told = capsys.readouterr().err
    assert told.startswith(f"xffl: the lighthouse's file {file} cannot be used (") and told.count("\n") == 1
    (tmp_path / "plain").touch()
    with pytest.raises(LaunchError, match="cannot be written"):
        Job(str(tmp_path / "plain" / "lighthouse"))


def test_what_answers_nothing_is_none(file: Path, jobs: list[Job]) -> None:
    file.write_text("nonsense")
    assert jobs[0].look() == ""
    time.sleep(SILENCE_S + 0.1)
    assert jobs[0].look() != ""
