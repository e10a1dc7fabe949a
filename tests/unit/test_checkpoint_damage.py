"""Checkpoints that a purge or an interrupted delete has damaged: named at the start, and never a silent way back."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.test_run_directory import Config
from xffl.checkpoint import auto_resume, find_latest_checkpoint, save_checkpoint
from xffl.checkpoint.damage import find_damage, find_lost
from xffl.checkpoint.format import write_pointer
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import CheckpointError, ConfigError
from xffl.training.run_directory import RunDirectory

ALONE = DistributedState(rank=0, world_size=1)


class Own:
    def state_dict(self) -> dict[str, int]:
        return {"value": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"value": 1}


class Trainer:
    """Notes what it is told to load."""

    loaded: Path | None = None

    def load_checkpoint(self, path: Path) -> None:
        self.loaded = path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Make a run with records and the checkpoints step_10, step_20, best and final."""
    RunDirectory.open(tmp_path, ALONE, Config()).close()
    (tmp_path / "metrics" / "cell_0.jsonl").write_text(
        "".join(json.dumps({"time": 1.0, "step": step, "values": {}}) + "\n" for step in range(1, 31))
    )
    for name, step in (("step_10", 10), ("best", 15), ("step_20", 20), ("final", 30)):
        path = tmp_path / "checkpoints" / name
        save_checkpoint(path, {"own": Own()}, ALONE, values={"step": step})
        if name != "best":
            write_pointer(path)
    return tmp_path


def start(run: Path) -> Path | None:
    """Start the run again as a trainer does, and return what it goes on from."""
    is_resumed = find_latest_checkpoint(run) is not None
    RunDirectory.open(run, ALONE, Config(), is_resumed=is_resumed, may_restart=True).close()
    trainer = Trainer()
    auto_resume(SimpleNamespace(experiment=SimpleNamespace(output_dir=run)), trainer)
    return trainer.loaded


def contents(run: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def lose_record(path: Path) -> None:
    (path / "checkpoint.json").unlink()


def lose_files(path: Path) -> None:
    for file in filter(Path.is_file, list(path.rglob("*"))):
        file.unlink()


def lose_archive(path: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to("/archive/that/is/gone")


@pytest.mark.parametrize("lose", [lose_record, lose_files, lose_archive])
@pytest.mark.parametrize("name", ["final", "step_20", "best"])
def test_a_checkpoint_without_its_record_is_named_at_the_start(
    run: Path, name: str, lose: Callable[[Path], None]
) -> None:
    damaged = run / "checkpoints" / name
    lose(damaged)
    before = contents(run)
    goes_on = "step_20" if name == "final" else "final"
    with pytest.raises(CheckpointError, match=rf"{damaged}\. Put checkpoint.json back; .* goes on from {goes_on}"):
        start(run)
    with pytest.raises(CheckpointError, match=r"experiment\.reset does not skip this"):
        auto_resume(SimpleNamespace(experiment=SimpleNamespace(output_dir=run)), Trainer())
    assert contents(run) == before
    if damaged.is_symlink():
        damaged.unlink()
    else:
        shutil.rmtree(damaged)  # as the message says
    assert start(run) == run / "checkpoints" / goes_on


def test_a_run_whose_checkpoints_are_all_damaged_keeps_its_records(run: Path) -> None:
    for path in (run / "checkpoints").glob("*/checkpoint.json"):
        path.unlink()
    before = contents(run)
    with pytest.raises(CheckpointError, match=r"/final, .*/step_10, .*delete .*/checkpoints: the run then begins anew"):
        start(run)
    assert find_latest_checkpoint(run) is None and contents(run) == before
    shutil.rmtree(run / "checkpoints")
    assert start(run) is None and not (run / "metrics" / "cell_0.jsonl").exists()


def test_a_checkpoint_that_is_gone_as_a_whole_is_told(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = run / "checkpoints"
    for name in ("final", "best"):
        shutil.rmtree(folder / name)
    assert find_lost(folder) == "final" and start(run) == folder / "step_20"
    assert "latest names final, which is not there any more: going back to step_20" in caplog.text
    for name in ("step_10", "step_20"):
        shutil.rmtree(folder / name)
    before = contents(run)
    with pytest.raises(CheckpointError, match=r"latest names final, and neither this nor any other .*begins anew"):
        start(run)
    assert contents(run) == before


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """Make a run with records, and the folder of checkpoints without any."""
    RunDirectory.open(tmp_path, ALONE, Config()).close()
    (tmp_path / "metrics" / "cell_0.jsonl").write_text('{"time": 1.0, "step": 3, "values": {}}\n')
    return tmp_path


def link_to_nothing(folder: Path) -> None:
    folder.rmdir()
    folder.symlink_to(folder.parent / "unmounted" / "checkpoints")


def put_a_file(folder: Path) -> None:
    folder.rmdir()
    folder.write_text("")


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (link_to_nothing, r"checkpoints is a link to .*unmounted/checkpoints, which is not there"),
        (put_a_file, r"checkpoints is no folder"),
        (lambda folder: (folder / "latest").write_bytes(b"\xff\xfe"), "latest names no checkpoint .*cannot be read"),
        (lambda folder: (folder / "latest").write_text(""), "latest names no checkpoint .*it is empty"),
        (lambda folder: os.mkfifo(folder / "latest"), "latest names no checkpoint .*FIFO"),
        (lambda folder: (folder / "latest").symlink_to("gone"), "latest names no checkpoint .*No such file"),
    ],
)
def test_what_may_hide_checkpoints_is_no_reason_to_begin_anew(
    spoil: Callable[[Path], Any], match: str, bare: Path
) -> None:
    spoil(bare / "checkpoints")
    before = contents(bare)
    for options in ({"may_restart": True}, {"is_resumed": True}, {}):
        with pytest.raises(CheckpointError, match=match):
            RunDirectory.open(bare, ALONE, Config(), **options)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match=match):
            auto_resume(SimpleNamespace(experiment=SimpleNamespace(output_dir=bare)), Trainer())
    assert contents(bare) == before


def test_a_pointer_that_cannot_be_read_is_not_needed_beside_a_checkpoint(run: Path) -> None:
    (run / "checkpoints" / "latest").write_bytes(b"\xff")
    assert start(run) == run / "checkpoints" / "final"


def test_records_are_kept_where_the_folder_cannot_be_made_ready(bare: Path) -> None:
    (bare / "pictures").rmdir()
    (bare / "pictures").write_text("")
    before = contents(bare)
    with pytest.raises(ConfigError, match="cannot be written: .*pictures"):
        RunDirectory.open(bare, ALONE, Config(), may_restart=True)
    assert contents(bare) == before


def test_hidden_and_foreign_folders_are_no_damage(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = run / "checkpoints"
    for name in (".step_30.partial", ".step_5.removed", ".best.old"):
        (folder / name / "cell_0").mkdir(parents=True)
        (folder / name / "cell_0" / "__0_0.distcp").write_bytes(b"1")
    (folder / "step_900").mkdir()
    (folder / "step_901" / "shards").mkdir(parents=True)
    (folder / "best_of_all" / "cell_0").mkdir(parents=True)
    (folder / "notes").write_text("")
    caplog.set_level(logging.WARNING)
    assert find_damage(folder) == [] and start(run) == folder / "final" and not caplog.records
    os.rename(folder / "final", folder / ".final.old")  # a kill between two renames
    assert find_lost(folder) is None and start(run) == folder / "final"


def test_who_looks_for_the_latest_is_told_of_the_damage(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    lose_record(run / "checkpoints" / "final")
    assert find_latest_checkpoint(run) == run / "checkpoints" / "step_20"
    assert "final does not count as a checkpoint, since it has lost its record, checkpoint.json" in caplog.text


def test_a_run_that_begins_anew_is_told_before_it_wants_the_name(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "step_1"
    save_checkpoint(path, {"own": Own()}, ALONE)
    lose_record(path)
    options: dict[str, Any] = {"is_resumed": False, "may_restart": False}
    with pytest.raises(CheckpointError, match=str(path)):
        RunDirectory.open(tmp_path, ALONE, Config(), **options)
