"""``xffl lighthouse --journal``: the journal of a run, served beside the lighthouse."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.ports import free_port
from xffl.cli.main import main
from xffl.journal.place import derive_journal, open_journal
from xffl.journal.records import VoidRecord, make_id

pytestmark = pytest.mark.skipif(find_spec("torchft") is None, reason="needs the extra elastic")

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


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--journal-port", "1"], "--journal-port 1 is for --journal"),
        (["--journal", "http://10.0.0.1:1"], "give the folder that this host is to keep it in"),
        (["--journal", "--bind", "127.0.0.1:65535"], "the lighthouse has port 65535"),
    ],
    ids=["port", "address", "last_port"],
)
def test_what_is_no_journal_of_a_lighthouse(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XFFL_TOKEN", TOKEN)
    assert main(["lighthouse", *words]) == 2
    assert told in capsys.readouterr().err
