"""``xffl cells`` and the journal of a run: who holds the newest model, and how a cell is forgotten."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.journal_records import RUN, newest_of, next_round
from tests.unit.test_lighthouse_page import FULL, served
from xffl.cli.main import main
from xffl.journal.folder import JournalFolder
from xffl.journal.records import ForgetRecord, Record, Start, StartRecord, make_id
from xffl.journal.service import JournalService
from xffl.journal.who_continues import recover_record

TOKEN = "the token of this run"

FIRST = next_round(1, (0, 1, 2))
RECORDS: tuple[Record, ...] = (
    StartRecord(RUN, 0, RUN, tuple(Start(cell, make_id(), None) for cell in (0, 1, 2))),
    FIRST,
    next_round(2, (0, 2), FIRST),
)


@pytest.fixture
def folder(tmp_path: Path) -> JournalFolder:
    folder = JournalFolder(tmp_path / "journal")
    for record in RECORDS:
        folder.put(record)
    return folder


def forget(cell: int, place: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["cells", "http://127.0.0.1:1", "--journal", str(place), "--forget", str(cell)])
    read = capsys.readouterr()
    return code, read.out + read.err


def test_cells_are_forgotten_one_after_the_other(folder: JournalFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert forget(2, folder.path, capsys) == (
        0,
        "record 3 forgets what cell 2 holds; cell 0 may hold the model of round 2 (record 2), the newest\n",
    )
    assert forget(0, folder.path, capsys) == (
        0,
        "record 4 forgets what cell 0 holds; cell 1 may hold the model of round 1 (record 1), the newest\n",
    )
    code, told = forget(1, folder.path, capsys)
    assert code == 0 and told.endswith("has no round whose model a cell may hold\n")
    assert [record.cell for record in folder.read_from(3) if isinstance(record, ForgetRecord)] == [2, 0, 1]


def test_a_cell_is_forgotten_through_the_service(
    folder: JournalFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XFFL_TOKEN", TOKEN)
    service = JournalService(folder, TOKEN.encode(), "127.0.0.1", 0)
    try:
        monkeypatch.setenv("XFFL_JOURNAL", service.url)
        assert main(["cells", "http://127.0.0.1:1", "--forget", "2"]) == 0
        assert "record 3 forgets what cell 2 holds" in capsys.readouterr().out
    finally:
        service.close()
    assert newest_of(folder) == 3


def test_who_loses_the_number_is_told_what_stands(
    folder: JournalFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put = JournalFolder.put
    other = next_round(3, (0, 2), FIRST)

    def put_after_another(self: JournalFolder, record: Record) -> Record:
        put(self, other)
        return put(self, record)

    monkeypatch.setattr(JournalFolder, "put", put_after_another)
    code, told = forget(2, folder.path, capsys)
    assert code == 1 and told == (
        "xffl: StateError: cell 2 is not forgotten: meanwhile record 3 has come to the journal, round 2 of cells 0, 2; "
        "look at the run again, and ask again if it is still needed\n"
    )
    assert folder.read_from(3) == [other]


def test_what_cannot_be_forgotten(folder: JournalFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert forget(3, folder.path, capsys) == (
        2,
        f"xffl: ConfigError: no record of the journal {folder.path} has a cell 3: there is nothing to forget\n",
    )
    code, told = forget(0, tmp_path / "other", capsys)
    assert code == 2 and f"there is no journal {tmp_path}/other" in told and not (tmp_path / "other").exists()
    words = ["cells", "http://127.0.0.1:1", "--journal", str(folder.path), "--forget", "0", "--json"]
    assert main(words) == 2
    assert "leave --watch and --json out" in capsys.readouterr().err
    assert newest_of(folder) == 2


def test_a_number_that_no_cell_has_does_not_come_to_a_recovered_journal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = JournalFolder(tmp_path / "journal")
    recovered = recover_record()
    folder.put(recovered)
    assert forget(1, folder.path, capsys)[0] == 0  # it may be needed before any cell has come
    code, told = forget(5000, folder.path, capsys)
    assert code == 2 and "--forget is 5000; a run of 4096 cells has cell 0 to cell 4095" in told
    folder.put(replace(next_round(2, (0, 1)), run=recovered.run))
    code, told = forget(3, folder.path, capsys)
    assert code == 2 and "--forget is 3; a run of 3 cells has cell 0 to cell 2" in told
    assert newest_of(folder) == 2


def test_cells_shows_who_holds_the_newest_model(folder: JournalFolder, capsys: pytest.CaptureFixture[str]) -> None:
    def look(*words: str) -> str:
        with served(FULL) as url:  # cells 0 and 1 live there, cell 2 is lost
            assert main(["cells", url, "--journal", str(folder.path), *words]) == 0
        return capsys.readouterr().out

    assert look().splitlines()[-1] == "cells 0, 2 may hold the model of round 2 (record 2), the newest"
    told = json.loads(look("--json"))["journal"]
    assert told == {
        "place": str(folder.path),
        "trouble": None,
        "newest": 2,
        "round": 2,
        "record": 2,
        "holders": [0, 2],
        "waited_for": [],
    }
    forget(0, folder.path, capsys)
    assert json.loads(look("--json"))["journal"]["waited_for"] == [2]
    assert look().splitlines()[-1] == (
        "cell 2 may hold the model of round 2 (record 2), the newest: others wait for it; start it, or give up what it "
        "holds by --forget 2"
    )
