"""Where a run's journal is, by the environment or by the address of the lighthouse."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from xffl.distributed.parameters import ElasticParameters
from xffl.distributed.startup.lone_cell import read_lone_cell
from xffl.errors import ConfigError, LaunchError
from xffl.journal.folder import JournalFolder
from xffl.journal.place import cells_command, derive_journal, open_journal, parse_journal, read_journal_variable
from xffl.journal.records import VoidRecord, make_id
from xffl.journal.service import JournalService

TOKEN = b"the token of this run"


def test_a_place_is_a_folder_or_an_address() -> None:
    assert parse_journal("x", " http://10.0.0.1:29511/ ") == "http://10.0.0.1:29511"
    assert parse_journal("x", "http://[::1]:29511") == "http://[::1]:29511"
    assert parse_journal("x", "runs/demo/journal") == os.path.abspath("runs/demo/journal")
    assert parse_journal("x", "~/journal") == os.path.expanduser("~/journal")


def test_the_journal_is_found_by_the_lighthouse(tmp_path: Path) -> None:
    assert derive_journal("http://10.0.0.1:29510") == "http://10.0.0.1:29511"
    assert derive_journal("[::1]:29510") == "http://[::1]:29511"
    assert derive_journal(f"file:{tmp_path}/lighthouse") == f"{tmp_path}/lighthouse.journal"


def test_the_command_for_operators_names_a_journal_that_the_lighthouse_does_not(tmp_path: Path) -> None:
    at = "http://10.0.0.1:29510"
    assert cells_command(at, derive_journal(at)) == f"xffl cells {at}"
    assert cells_command(at, None) == f"xffl cells {at}"
    assert cells_command(at, f"{tmp_path}/my journal") == f"xffl cells {at} --journal '{tmp_path}/my journal'"
    served = cells_command(at, derive_journal(at), {"XFFL_JOURNAL_FOLDER": "/runs/journal"})
    assert served == f"xffl cells {at} --journal /runs/journal"
    last = "http://10.0.0.1:65535"
    assert cells_command(last, "/runs/journal") == f"xffl cells {last} --journal /runs/journal"


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: parse_journal("XFFL_JOURNAL", "  "), "XFFL_JOURNAL is empty; give a folder"),
        (lambda: parse_journal("XFFL_JOURNAL", "http://10.0.0.1"), "XFFL_JOURNAL is 'http://10.0.0.1'; give HOST:PORT"),
        (lambda: derive_journal("http://10.0.0.1:65535"), "port 65535, and its journal would have the next one"),
    ],
    ids=["empty", "no_port", "last_port"],
)
def test_what_is_no_place(call: Callable[[], str], told: str) -> None:
    with pytest.raises(LaunchError, match=told):
        call()


def test_the_environment_names_a_place(tmp_path: Path) -> None:
    assert read_journal_variable({}) is None
    assert read_journal_variable({"XFFL_JOURNAL": " "}) is None
    assert read_journal_variable({"XFFL_JOURNAL": str(tmp_path)}) == str(tmp_path)


def test_folder_and_service_open_the_same_journal(tmp_path: Path) -> None:
    name = make_id()
    record = VoidRecord(name, 0, name)
    place = str(tmp_path / "runs" / "journal")
    assert open_journal(place, TOKEN).put(record) == record
    service = JournalService(JournalFolder(Path(place)), TOKEN, "127.0.0.1", 0)
    try:
        assert open_journal(service.url, TOKEN).read_from(0) == [record]
    finally:
        service.close()


def test_a_file_is_no_folder_of_a_journal(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"folder .*file cannot be used \(it is a file, not a folder\); give"):
        open_journal(str(tmp_path / "file"), TOKEN)


@pytest.mark.parametrize("named", [None, "/scratch/journal"])
def test_an_elastic_cell_has_a_journal(named: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if named is not None:
        monkeypatch.setenv("XFFL_JOURNAL", named)
    asked: tuple[str | ElasticParameters, ...] = (
        "http://10.0.0.1:29510",
        ElasticParameters(lighthouse="http://10.0.0.1:29510"),
    )
    for elastic in asked:
        cell = read_lone_cell(0, 2, elastic)
        assert cell is not None and cell.elastic is not None
        assert cell.elastic.journal == (named or "http://10.0.0.1:29511")
    cell = read_lone_cell(0, 2, ElasticParameters(lighthouse="file:/lighthouse", journal="/scratch/another"))
    assert cell is not None and cell.elastic is not None and cell.elastic.journal == "/scratch/another"
