"""What FederatedRounds refuses, and which checkpoints of Lightning's stay; without a fit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.test_federate import STATE, OtherCell
from xffl.errors import ConfigError
from xffl.integrations.checkpoints import CellCheckpoints
from xffl.integrations.lightning.lightning_files import LightningFiles
from xffl.integrations.weights import find_count

lightning = pytest.importorskip("lightning")


def make_trainer(strategy: Any, *callbacks: Any) -> Any:
    return SimpleNamespace(callbacks=callbacks, checkpoint_callbacks=callbacks, strategy=strategy)


def test_what_would_part_the_cells_is_refused_by_name() -> None:
    from lightning.pytorch import callbacks, strategies
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    from xffl.integrations.lightning.refusals import check_trainer

    strategy = strategies.SingleDeviceStrategy()
    check_trainer(make_trainer(strategy, callbacks.EarlyStopping("loss"), callbacks.ModelCheckpoint("here")))
    for trainer, text in (
        (make_trainer(strategy, callbacks.StochasticWeightAveraging(0.1)), "StochasticWeightAveraging"),
        (make_trainer(strategy, callbacks.LearningRateFinder()), "LearningRateFinder: .* give lr"),
        (make_trainer(strategy, callbacks.OnExceptionCheckpoint("here")), "OnExceptionCheckpoint"),
        (make_trainer(strategies.FSDPStrategy()), "FSDPStrategy; give .*ModelParallelStrategy"),
        (make_trainer(strategies.DDPStrategy(checkpoint_io=AsyncCheckpointIO())), "AsyncCheckpointIO"),
        (make_trainer(strategies.SingleDeviceStrategy(checkpoint_io=AsyncCheckpointIO())), "AsyncCheckpointIO"),
        (make_trainer(strategy, callbacks.ModelCheckpoint("memory://there")), "memory://there"),
        (make_trainer(strategy, callbacks.ModelCheckpoint("here", monitor="loss", save_last=True)), "save_last=True"),
    ):
        with pytest.raises(ConfigError, match=text):
            check_trainer(trainer)


def test_rows_are_those_of_the_first_tensor_however_deep() -> None:
    count = find_count("samples", 0)
    count.add({"meta": "text", "both": (torch.tensor(1.0), [torch.zeros(3, 4), torch.zeros(5)])})
    assert count.counted() == 3
    with pytest.raises(ConfigError, match="a batch has no names: it is a str; give a number"):
        count.add("text")
    with pytest.raises(ConfigError, match="a batch has no names: it is a list"):
        find_count("tokens", 0).add([torch.zeros(3, 4)])


def test_what_lightning_removes_stays_while_a_slower_cell_needs_it(tmp_path: Path) -> None:
    files = LightningFiles([tmp_path], lambda path: path.unlink())
    checkpoints = CellCheckpoints(files, STATE, OtherCell("0 1"))
    for step, meetings in ((2, 0), (4, 1), (6, 2)):
        path = tmp_path / f"step={step}.ckpt"
        path.write_text("weights")
        checkpoints.prepare(files.folder_of(path))
        checkpoints.save(files.folder_of(path), step, meetings, {"step": step})
    for step in (2, 4):
        files.note_unwanted(files.folder_of(tmp_path / f"step={step}.ckpt"))
    checkpoints.remove_surplus()
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["step=4.ckpt", "step=6.ckpt"]
    resumed = CellCheckpoints(files, STATE, OtherCell("0 1")).agree("", starts_over=False)
    assert resumed is not None and files.path_of(resumed.folder) == tmp_path / "step=4.ckpt"


def test_a_checkpoint_that_is_written_over_without_rounds_is_not_gone_on_from(tmp_path: Path) -> None:
    from xffl.integrations.lightning.cell_rounds import CellRounds

    path = tmp_path / "last.ckpt"
    files = LightningFiles([tmp_path], Path.unlink)
    notes = OtherCell("0")
    checkpoints = CellCheckpoints(files, STATE, notes)
    checkpoints.prepare(files.folder_of(path))
    path.write_text("weights")
    checkpoints.save(files.folder_of(path), 2, 0, {})
    strategy = SimpleNamespace(root_device=torch.device("cpu"), remove_checkpoint=Path.unlink)
    rounds = CellRounds(
        SimpleNamespace(strategy=strategy),
        STATE,
        notes=notes,
        files=files,
        checkpoints=checkpoints,
        count=find_count("samples", 0),
        options={},
        resumed=None,
    )
    rounds.save(path, path.touch)
    assert not checkpoints.is_whole(files.folder_of(path))


def test_a_cell_has_its_part_and_folder_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from xffl.integrations.lightning import cell_folder, cell_split

    assert list(cell_split(range(4))) == [0, 1, 2, 3]
    parts = []
    for rank in (0, 1):
        monkeypatch.setenv("XFFL_ISOLATED", f"{rank} 1,1 localhost:1")
        parts.append(list(cell_split(range(4))))
        assert cell_folder("runs") == Path(f"runs/cell_{rank}")
    assert sorted(parts[0] + parts[1]) == [0, 1, 2, 3]
    monkeypatch.delenv("XFFL_ISOLATED")
    monkeypatch.setenv("XFFL_CELL", "1/2")
    assert list(cell_split(range(4))) == parts[1]
