"""The vote that a cell of an elastic run leaves for its next job: sealed, read once, and never waited for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from xffl.elastic.federation import ElasticFederation
from xffl.files import read_sealed_json, write_sealed_json

VOTE = {"lineage": "abc", "lives": ["0.1a", "0.2b"]}


def inherit(file: Path) -> Any:
    """Return what a federation takes over from a file."""
    federation: Any = SimpleNamespace(_lighthouse=object(), _vote=None, _inherited=None)
    ElasticFederation.inherit_vote(federation, file)
    assert federation._vote == file
    return federation._inherited


def test_a_vote_is_sealed_and_read_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "vote.json"
    version = SimpleNamespace(is_agreed=True, lineage="abc", voters={"0.1a", "0.2b"})
    leaving: Any = SimpleNamespace(
        standing=SimpleNamespace(version=version, latest=None),
        life="0.2b",
        _vote=file,
        _may_have_agreed=False,
        _inherited_votes=lambda: ["0.1a"],
    )
    ElasticFederation._leave_vote(leaving)
    assert read_sealed_json(file) == {"lineage": "abc", "lives": ["0.2b", "0.1a"]}
    assert inherit(file) == ("abc", ("0.2b", "0.1a"))
    assert not file.exists() and inherit(file) is None and not caplog.records
    file.write_text(json.dumps(VOTE))  # of an earlier version
    assert inherit(file) == ("abc", ("0.1a", "0.2b"))


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "fifo"])
def test_a_damaged_vote_is_told_and_not_used(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "vote.json"
    write_sealed_json(file, VOTE)
    text = file.read_text()
    file.unlink()
    if damage == "fifo":
        os.mkfifo(file)
    else:
        file.write_text({"cut": text[:40], "changed": text.replace("0.1a", "0.3a"), "empty": ""}[damage])
    assert inherit(file) is None
    assert f"{file} cannot be used" in caplog.text
