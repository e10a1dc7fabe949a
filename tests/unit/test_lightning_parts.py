"""What FederatedRounds refuses, and which checkpoints of Lightning's stay; without a fit."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from tests.unit.test_federate import STATE, OtherCell
from xffl.distributed.several_worlds.cell_notes import LoneNotes
from xffl.errors import ConfigError
from xffl.integrations.checkpoints import CellCheckpoints
from xffl.integrations.dealing import deal_out
from xffl.integrations.lightning.lightning_files import LightningFiles
from xffl.integrations.weights import find_count
from xffl.topology import DataPlace, Topology
from xffl.training.data.loaders import CellLoader
from xffl.training.data.partition import iid
from xffl.training.data.sampler import CellBatchSampler

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


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([{"monitor": "loss"}], r"monitor='loss'\).* add ModelCheckpoint\(every_n_train_steps=100\)"),
        ([{"train_time_interval": timedelta(hours=1)}], "train_time_interval"),
        ([{"monitor": "loss"}, {"save_weights_only": True}], "monitor='loss'"),
        ([{"monitor": "loss"}, {"every_n_train_steps": 10}], None),
        ([{"monitor": "loss", "save_top_k": -1}], None),
        ([{"monitor": "step", "mode": "max", "save_top_k": 3}], None),
        ([{"monitor": "loss", "save_weights_only": True}], None),
        ([], None),
    ],
)
def test_isolated_cells_need_checkpoints_of_like_steps(given: list[dict[str, Any]], text: str | None) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from xffl.integrations.lightning.refusals import check_saves

    trainer = SimpleNamespace(checkpoint_callbacks=[ModelCheckpoint("here", **options) for options in given])
    isolated: Any = SimpleNamespace(isolated=object(), cells=2)
    with pytest.raises(ConfigError, match=text) if text else nullcontext():
        check_saves(trainer, isolated, 10)
    elastic: Any = SimpleNamespace(isolated=None, cells=2)
    check_saves(trainer, elastic, 10)  # goes on from its own


@pytest.mark.parametrize(
    ("every", "is_alike"),
    [
        (None, True),
        ("divergence:every=2,threshold=0.4", True),
        ("per_cell:counts=[2,2]", True),
        ("per_cell:counts=[2,3]", False),
        ("seconds:seconds=60", False),
        ("balanced:every=10", False),
        ("epochs:epochs=1,steps_per_epoch=[20,36]", False),
        ({"name": "warmup", "rounds": 2, "every": 1, "then": 10}, True),
        ({"name": "warmup", "rounds": 2, "every": 1, "then": "balanced:every=10"}, False),
    ],
)
def test_cells_that_make_unlike_steps_need_checkpoints_of_rounds(every: Any, is_alike: bool) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from xffl.integrations.lightning import RoundCheckpoint
    from xffl.integrations.lightning.refusals import check_saves

    isolated: Any = SimpleNamespace(isolated=object(), cells=2)
    of_steps, of_epochs = ModelCheckpoint("here", every_n_train_steps=10), ModelCheckpoint("here")
    of_rounds, of_a_metric = RoundCheckpoint("here", every_n_rounds=5), {"monitor": "loss", "every_n_rounds": 5}
    text = r"unlike numbers of steps between two rounds.* add RoundCheckpoint\(every_n_rounds=10\)"
    for saves, is_refused in (
        ([of_steps], not is_alike),
        ([of_epochs], not is_alike and "epochs" not in str(every)),
        ([of_steps, of_rounds], False),
        ([], False),
    ):
        with pytest.raises(ConfigError, match=text) if is_refused else nullcontext():
            check_saves(SimpleNamespace(checkpoint_callbacks=saves), isolated, every)
    with pytest.raises(ConfigError, match="monitor='loss'"):
        check_saves(SimpleNamespace(checkpoint_callbacks=[RoundCheckpoint("here", **of_a_metric)]), isolated, every)


def test_a_checkpoint_of_rounds_saves_after_each_that_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from xffl.integrations.lightning import RoundCheckpoint

    saved: list[int] = []
    rounds = [3]
    monkeypatch.setattr(ModelCheckpoint, "on_train_batch_end", lambda *_, **__: saved.append(rounds[-1]))
    saves, other = RoundCheckpoint(every_n_rounds=2), RoundCheckpoint(every_n_rounds=3)
    assert saves.state_key != other.state_key
    with pytest.raises(ConfigError, match=r"add FederatedRounds\(...\) to the same Trainer"):
        saves.on_train_start(None, None)
    saves.follow(lambda: rounds[-1])
    saves.on_train_start(None, None)
    for made in (3, 4, 4, 5, 6, 6):
        rounds.append(made)
        saves.on_train_batch_end(None, None, None, None, 0)
    assert saved == [4, 6]


class LongerCell(LoneNotes):
    """Notes of a cell beside another one whose epochs have as many batches as it has told."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self._batches = batches

    def gather(self, name: str) -> tuple[str, ...]:
        return (*super().gather(name), f"{self._batches} 1")


@pytest.mark.parametrize(
    ("given", "others", "every", "text"),
    [
        ([{}], 36, 10, r"20, 36 batches in the cells.* add ModelCheckpoint\(every_n_train_steps=100\)"),
        ([{"every_n_epochs": 2}, {"monitor": "loss", "every_n_train_steps": 10}], 36, None, "20, 36 batches"),
        ([{}], 20, 10, None),
        ([{}, {"every_n_train_steps": 10}], 36, 10, None),
        ([{"save_weights_only": True}], 36, 10, None),
        ([{}], 36, {"name": "epochs", "epochs": 1, "steps_per_epoch": [20, 36]}, None),
        ([{}], 36, {"name": "epochs", "epochs": 1, "steps_per_epoch": 20}, "20, 36 batches"),
    ],
)
def test_isolated_cells_with_unequal_epochs_need_checkpoints_of_steps(
    given: list[dict[str, Any]], others: int, every: Any, text: str | None
) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from xffl.integrations.lightning.refusals import check_epochs

    trainer = SimpleNamespace(
        checkpoint_callbacks=[ModelCheckpoint("here", **options) for options in given],
        num_training_batches=20,
        accumulate_grad_batches=1,
    )
    isolated: Any = SimpleNamespace(isolated=object(), cells=2, cell=0)
    with pytest.raises(ConfigError, match=text) if text else nullcontext():
        check_epochs(trainer, isolated, LongerCell(others), every)


def test_loaders_whose_data_nobody_dealt_out_are_refused() -> None:
    from xffl.integrations.lightning.refusals import check_data

    samples = TensorDataset(torch.zeros(40, 1))
    part = deal_out(samples, cell=1, cells=2, seed=0)
    place = DataPlace(Topology(2, (1, 1)), 1)
    two_cells: Any = SimpleNamespace(cells=2)
    own = DataLoader(samples, batch_size=4)
    for loaders in (
        DataLoader(part, batch_size=4),
        [DataLoader(Subset(part, range(8))), DataLoader(ConcatDataset([part, part]))],
        CellLoader(samples, place, batch_size=4),
        DataLoader(samples, batch_sampler=CellBatchSampler(iid(40, 2), place, batch_size=4)),
    ):
        check_data(SimpleNamespace(train_dataloader=loaders), two_cells)
    for loaders in (own, {"a": DataLoader(part), "b": own}, DataLoader(ConcatDataset([part, samples])), [samples]):
        with pytest.raises(ConfigError, match=r"cell_split\(dataset\).* FederatedRounds\(data='own'\)"):
            check_data(SimpleNamespace(train_dataloader=loaders), two_cells)
    alone: Any = SimpleNamespace(cells=1)
    check_data(SimpleNamespace(train_dataloader=own), alone)


def test_a_removal_that_was_killed_is_finished_at_the_next_start(tmp_path: Path) -> None:
    def die(path: Path) -> None:
        raise KeyboardInterrupt

    notes = OtherCell("0 1")
    for step, meetings in ((2, 0), (4, 1)):
        files = LightningFiles([tmp_path], die)
        checkpoints = CellCheckpoints(files, STATE, notes)
        path = tmp_path / f"step={step}.ckpt"
        path.write_text("weights")
        checkpoints.prepare(files.folder_of(path))
        checkpoints.save(files.folder_of(path), step, meetings, {"step": step})
    files.note_unwanted(files.folder_of(tmp_path / "step=2.ckpt"))
    with pytest.raises(KeyboardInterrupt):
        checkpoints.remove_surplus()
    (tmp_path / "step=1.ckpt.xffl").mkdir()  # the rest of another removal
    (tmp_path / "step=6.ckpt.xffl").mkdir()
    (tmp_path / "step=6.ckpt").write_text("unfinished, or of a user who removed the marker")
    LightningFiles([tmp_path], lambda path: path.unlink(missing_ok=True)).finish_removals()
    kept = ["step=4.ckpt", "step=4.ckpt.xffl", "step=6.ckpt", "step=6.ckpt.xffl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


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
