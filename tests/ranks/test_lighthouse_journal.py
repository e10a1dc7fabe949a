"""The journal of a run, served beside its lighthouse, and what launchers write to it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.ports import free_port
from xffl.cli.main import main
from xffl.errors import LaunchError
from xffl.jobs import cells
from xffl.jobs.cells import CellJob, launch_cells
from xffl.jobs.options import JobOptions
from xffl.jobs.resolve import resolve
from xffl.journal.folder import JournalFolder
from xffl.journal.place import derive_journal, open_journal
from xffl.journal.records import ForgetRecord, Record, RecoverRecord, Start, StartRecord, VoidRecord, make_id
from xffl.journal.service import JournalService

needs_torchft = pytest.mark.skipif(find_spec("torchft") is None, reason="needs the extra elastic")

TOKEN = "the token of this run"


@contextmanager
def lighthouse(home: Path, *words: str) -> Iterator[list[str]]:
    """Run a lighthouse with a journal, and yield the lines that it prints at its start."""
    command = [sys.executable, "-m", "xffl", "lighthouse", *words]
    environ = os.environ | {"HOME": str(home), "XFFL_TOKEN": TOKEN}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield [process.stdout.readline().strip() for _ in range(2)]
        finally:
            process.terminate()
            assert process.wait(20) == 0


@needs_torchft
def test_the_journal_stands_when_its_lighthouse_is_started_again(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    journal = open_journal(derive_journal(url), TOKEN.encode())
    name = make_id()
    record = VoidRecord(name, 0, name)
    words = ("--bind", url.removeprefix("http://"), "--journal")
    with lighthouse(tmp_path, *words) as lines:
        first, second = lines
        assert first == f"lighthouse at {url.removeprefix('http://')}"
        assert second.startswith(f"journal at {derive_journal(url)}, in {tmp_path}/.xffl/journal/")
        assert journal.put(record) == record
    with lighthouse(tmp_path, *words) as lines:
        assert lines == [first, second]
        assert journal.read_from(0) == [record]


@needs_torchft
def test_a_folder_and_a_port_may_be_given_and_are_used_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, folder = free_port(), str(tmp_path / "journal")
    monkeypatch.setenv("XFFL_TOKEN", TOKEN)
    words = ("--bind", f"127.0.0.1:{free_port()}", "--journal", folder)
    with lighthouse(tmp_path, *words, "--journal-port", str(port)) as lines:
        assert lines[1] == f"journal at http://127.0.0.1:{port}, in {folder}"
        assert main(["lighthouse", "--bind", f"127.0.0.1:{free_port()}", "--journal", folder]) == 2
    assert f"the journal in {folder} is served by process" in capsys.readouterr().err


@needs_torchft
def test_an_empty_journal_may_take_the_place_of_a_lost_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "journal"
    words = ("--bind", f"127.0.0.1:{free_port()}", "--journal", str(folder), "--recover")
    for _ in range(2):  # the second time it has begun already
        with lighthouse(tmp_path, *words):
            [record] = JournalFolder(folder).read_from(0)
            assert isinstance(record, RecoverRecord)
    name = make_id()
    JournalFolder(tmp_path / "other").put(VoidRecord(name, 0, name))
    monkeypatch.setenv("XFFL_TOKEN", TOKEN)
    assert main(["lighthouse", *words[:2], "--journal", str(tmp_path / "other"), "--recover"]) == 2
    assert f"has records of run {name}, and --recover is for one that is lost" in capsys.readouterr().err


@needs_torchft
def test_a_journal_is_recovered_before_it_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Record] = []

    def serve(self: JournalService, folder: JournalFolder, *_: object) -> None:
        served.extend(folder.read_from(0))
        raise LaunchError("this is enough")

    monkeypatch.setenv("XFFL_TOKEN", TOKEN)
    monkeypatch.setattr(JournalService, "__init__", serve)
    words = ["--bind", f"127.0.0.1:{free_port()}", "--journal", str(tmp_path / "journal"), "--recover"]
    assert main(["lighthouse", *words]) != 0
    [record] = served  # a cell that has a model ends where it reads an empty journal
    assert isinstance(record, RecoverRecord)


@needs_torchft
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--journal-port", "1"], "--journal-port 1 is for --journal"),
        (["--recover"], "--recover is for --journal"),
        (["--journal", "http://10.0.0.1:1"], "give the folder that this host is to keep it in"),
        (["--journal", "--bind", "127.0.0.1:65535"], "the lighthouse has port 65535"),
    ],
    ids=["port", "recover", "address", "last_port"],
)
def test_what_is_no_journal_of_a_lighthouse(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XFFL_TOKEN", TOKEN)
    assert main(["lighthouse", *words]) == 2
    assert told in capsys.readouterr().err


def job_of(folder: Path, journal: str, home: str | None = None, **variables: str) -> CellJob:
    """Return the job of cell 1 of two, which runs a script in a folder."""
    told = {"XFFL_CELL": "1/2", "XFFL_LIGHTHOUSE": "http://127.0.0.1:1", "XFFL_JOURNAL": journal}
    request = resolve(JobOptions(launcher="local", processes=1), [str(folder / "script.py")])
    return CellJob(1, replace(request, home=home), environ={**os.environ, **told, **variables})


@pytest.mark.parametrize(
    ("has_saved", "forgotten"), [(False, [1]), (True, []), (None, [])], ids=["lost", "saved", "unknown"]
)
def test_a_cell_that_is_lost_for_good_is_forgotten(
    has_saved: bool | None,
    forgotten: list[int],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = JournalFolder(tmp_path / "journal")
    name = make_id()
    folder.put(StartRecord(name, 0, name, (Start(1, make_id(), None),)))
    (tmp_path / "script.py").write_text("import sys\nsys.exit(7)\n")
    monkeypatch.setattr(cells, "may_have_saved", lambda home: has_saved)
    job = job_of(tmp_path, str(folder.path), home=None if has_saved is None else "run")
    assert launch_cells([job], restarts=0) == 7
    assert [record.cell for record in folder.read_from(1) if isinstance(record, ForgetRecord)] == forgotten
    assert ("forgets what cell 1 holds" in capfd.readouterr().err) == bool(forgotten)


def test_a_cell_that_its_journal_has_no_record_of_is_not_forgotten_again_and_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = JournalFolder(tmp_path / "journal")
    (tmp_path / "script.py").write_text("import sys\nsys.exit(7)\n")
    job = job_of(tmp_path, str(folder.path), home=str(tmp_path / "run"))
    assert launch_cells([job], restarts=0) == 7
    assert capfd.readouterr().err.count("has a cell 1: there is nothing to forget") == 1
    assert folder.read_from(0) == []


SESSION = """
import xffl
with xffl.session(timeout_s=20):
    pass
"""


def test_a_cell_with_another_token_than_the_journal_is_not_started_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    service = JournalService(JournalFolder(tmp_path / "journal"), TOKEN.encode(), "127.0.0.1", 0)
    try:
        (tmp_path / "script.py").write_text(SESSION)
        job = job_of(tmp_path, service.url, XFFL_TOKEN="the token of another run")
        assert launch_cells([job], restarts=3) == 2
    finally:
        service.close()
    told = capfd.readouterr().err
    assert f"ConfigError: the journal {service.url} has another token" in told
    assert "is not started again: it would fail in the same way" in told
