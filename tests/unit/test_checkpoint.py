"""Checkpoints of one process: what comes back, what is refused, and what a kill at any moment leaves."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import pickle
import shutil
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import xffl
from tests.kept import ALONE, Own
from xffl.checkpoint import (
    CheckpointManager,
    auto_resume,
    consolidate_checkpoint,
    find_latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from xffl.checkpoint.format import CellIndex, read_record, record_text
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.replicas.plain_values import from_plain, tensors_named, to_plain
from xffl.errors import ReplacedError
from xffl.training.models.weights import new_folder

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.sampled_from(["__tuple__", "__tensor__", "__float__"]), inner)
        | st.dictionaries(st.integers() | st.tuples(st.integers(), st.text()), inner)
        | st.dictionaries(st.integers(), st.integers()).map(Counter)
    ),
    max_leaves=20,
)


def seal(path: Path) -> None:
    """Make the checksums of a checkpoint fit its files."""
    record = read_record(path)
    for cell in record.indexes:
        index = json.loads((path / cell / "index.json").read_text())
        for name in index["files"]:
            data = (path / cell / name).read_bytes()
            index["files"][name] = [len(data), hashlib.sha256(data).hexdigest()]
        (path / cell / "index.json").write_text(json.dumps(index))
        record.indexes[cell] = hashlib.sha256((path / cell / "index.json").read_bytes()).hexdigest()
    (path / "checkpoint.json").write_text(record_text(record))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, value: float = 1.0) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()


# Plain values ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_values_come_back_as_they_were(value: Any) -> None:
    text = json.dumps(to_plain(value, "it"), allow_nan=False)
    found = from_plain(json.loads(text), {})
    assert found == value and repr(found) == repr(value)  # 1, 1.0 and True are equal, but not the same


def test_what_json_has_not_comes_back_too() -> None:
    tensors: dict[str, torch.Tensor] = {}
    one, other = torch.ones(2), torch.zeros(())
    value = {"a": [one, math.inf], "b": {3: (other, -0.0)}, "nan": math.nan, "dtype": torch.bfloat16}
    plain = to_plain(value, "part", tensors)
    assert list(tensors_named(plain)) == list(tensors) == ["part/a/0", "part/b/3/0"]
    found = from_plain(json.loads(json.dumps(plain, allow_nan=False)), tensors)
    assert found["a"][0] is one and found["a"][1] == math.inf and found["b"][3][0] is other and math.isnan(found["nan"])
    assert math.copysign(1, found["b"][3][1]) == -1 and found["dtype"] is torch.bfloat16
    for wrong in (object(), {1}, b"x", 1j, lambda: 0, torch.device("cpu")):
        with pytest.raises(xffl.ConfigError, match="it/0 is .*no pickled code"):
            to_plain([wrong], "it")
    with pytest.raises(xffl.ConfigError, match="give tensors as a part"):
        to_plain({"x": one}, "values")
    with pytest.raises(xffl.ConfigError, match="two tensors are called 'it/1'"):
        to_plain({1: one, "1": other}, "it", {})


# One process ----------------------------------------------------------------------------------------------------------


def test_one_process_needs_no_process_group_and_no_file_is_a_pickle(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    stepped(model, optimizer)
    own = Own({"tensor": torch.arange(6).view(2, 3)[:, 1:], "twice": [torch.tensor(2.5), 3]})
    save_checkpoint(str(tmp_path / "it"), {"model": model, "optimizer": optimizer, "own": own}, ALONE, values={"x": 1})
    weight, momentum = model.weight.detach().clone(), optimizer.state[model.weight]["momentum_buffer"].clone()
    stepped(model, optimizer, 7.0)
    optimizer.param_groups[0]["lr"] = 9
    fresh = Own(None)
    parts = {"own": fresh, "model": model, "optimizer": optimizer}
    assert load_checkpoint(tmp_path / "it", parts, ALONE) == {"x": 1}
    assert torch.equal(model.weight, weight) and optimizer.param_groups[0]["lr"] == 0.5
    assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], momentum)
    assert torch.equal(fresh.value["tensor"], torch.tensor([[1, 2], [4, 5]])) and fresh.value["twice"][1] == 3
    files = sorted(str(file.relative_to(tmp_path / "it")) for file in (tmp_path / "it").rglob("*") if file.is_file())
    assert files == ["cell_0/__0_0.distcp", "cell_0/index.json", "checkpoint.json"]
    for name in files[1:]:
        json.loads((tmp_path / "it" / name).read_text())


def test_only_checkpoints_and_empty_folders_are_replaced(tmp_path: Path) -> None:
    parts = {"own": Own(1)}
    (tmp_path / "empty").mkdir()
    save_checkpoint(tmp_path / "empty", parts, ALONE)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    for name in ("file", "folder"):
        with pytest.raises(xffl.CheckpointError, match="is no checkpoint that could be replaced"):
            save_checkpoint(tmp_path / name, parts, ALONE)
    with pytest.raises(xffl.CheckpointError, match=r"preparing failed: (NotADirectory|FileExists)Error"):
        save_checkpoint(tmp_path / "file" / "it", parts, ALONE)
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "folder"]
    assert load_checkpoint(tmp_path / "empty", parts, ALONE) == {}


def test_a_planted_pickle_is_not_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    model = nn.Linear(2, 2)
    save_checkpoint(tmp_path / "it", {"model": model}, ALONE)
    home = tmp_path / "it" / "cell_0"
    (home / ".metadata").write_bytes(pickle.dumps(Bomb()))
    load_checkpoint(tmp_path / "it", {"model": model}, ALONE)
    file = home / "__0_0.distcp"
    size = file.stat().st_size
    torch.save(Bomb(), file)
    file.write_bytes(file.read_bytes()[:size].ljust(size, b"\0"))
    with pytest.raises(xffl.CheckpointError, match=r"__0_0\.distcp is not as it was written"):
        load_checkpoint(tmp_path / "it", {"model": model}, ALONE)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(xffl.CheckpointError, match=rf"__0_0\.distcp has {size - 1} bytes in place of {size}"):
        load_checkpoint(tmp_path / "it", {"model": model}, ALONE)
    file.write_bytes(whole)
    seal(tmp_path / "it")  # a forger knows how checksums are made
    with pytest.raises(xffl.CheckpointError, match=r"reading failed.*load another checkpoint"):
        load_checkpoint(tmp_path / "it", {"model": model}, ALONE)
    assert not (tmp_path / "ran").exists()


def test_files_outside_the_folder_are_not_read(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_checkpoint(tmp_path / "it", {"model": model}, ALONE)
    index = tmp_path / "it" / "cell_0" / "index.json"
    index.write_text(index.read_text().replace("__0_0.distcp", "../cell_0/__0_0.distcp"))
    seal(tmp_path / "it")
    with pytest.raises(xffl.CheckpointError, match=r"'\.\./cell_0/__0_0\.distcp' lies outside the folder"):
        load_checkpoint(tmp_path / "it", {"model": model}, ALONE)


class Hoarding(torch.optim.SGD):
    """Keeps more than a state of its parameters."""

    def __init__(self, parameters: Any, more: dict[str, Any]) -> None:
        super().__init__(parameters)
        self.more = more

    def state_dict(self) -> dict[str, Any]:
        kept = super().state_dict()
        return {**kept, **self.more, "state": {**kept["state"], **self.more.get("state", {})}}


@pytest.mark.parametrize("more", [{"clock": 1}, {"state": {"clock": {}}}])
def test_a_state_of_its_own_is_refused_of_an_optimizer(more: dict[str, Any], tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(xffl.ConfigError, match="keeps 'clock' beside its parameters' state"):
        save_checkpoint(tmp_path / "it", {"model": model, "optimizer": Hoarding(model.parameters(), more)}, ALONE)


def test_a_wide_state_does_not_become_narrow_where_there_is_a_narrow_one(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2, bias=False).bfloat16()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = made()
    wide = torch.full((2, 2), 1 / 3)
    optimizer.state[model.weight]["momentum_buffer"] = wide.clone()
    save_checkpoint(tmp_path / "it", {"model": model, "optimizer": optimizer}, ALONE)
    again, other = made()
    stepped(again, other)
    load_checkpoint(tmp_path / "it", {"model": again, "optimizer": other}, ALONE)
    assert torch.equal(other.state[again.weight]["momentum_buffer"], wide)


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    model, path = nn.Linear(2, 2), tmp_path / "it"
    other = torch.optim.SGD(nn.Linear(2, 2).parameters())
    sparse, meta = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")
    sparse.register_buffer("s", torch.eye(2).to_sparse())
    for parts, match in (
        ({}, "mapping"),
        ([model], "mapping"),
        ({"a/b": model}, "without '/'"),
        ({"": model}, "without '/'"),
        ({"model": 3}, "is int"),
        ({"optimizer": torch.optim.SGD(model.parameters())}, "no model among the parts"),
        ({"model": model, "optimizer": other}, "after the model is sharded"),
        ({"model": sparse}, "sparse"),
        ({"model": meta}, "meta device"),
    ):
        with pytest.raises(xffl.ConfigError, match=match):
            save_checkpoint(path, parts, ALONE)  # type: ignore[arg-type]
    for values, match in (([1], "mapping"), ({1: 1}, "names are strings"), ({"x": torch.ones(1)}, "tensors as a part")):
        with pytest.raises(xffl.ConfigError, match=match):
            save_checkpoint(path, {"model": model}, ALONE, values=values)  # type: ignore[arg-type]
    for wrong in ("/", tmp_path / ".hidden", "", 3):
        with pytest.raises(xffl.ConfigError):
            save_checkpoint(wrong, {"model": model}, ALONE)  # type: ignore[arg-type]
        with pytest.raises(xffl.ConfigError):
            load_checkpoint(wrong, {"model": model}, ALONE)  # type: ignore[arg-type]
    with pytest.raises(xffl.StateError, match="set_global"):
        save_checkpoint(path, {"model": model}, DistributedState())
    with pytest.raises(xffl.StateError, match="rank 1 of 2"):
        save_checkpoint(path, {"model": model}, DistributedState(rank=1, world_size=2))
    assert not os.listdir(tmp_path)


def test_what_does_not_fit_is_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    saved = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(saved.parameters())
    stepped(saved, optimizer)
    save_checkpoint(tmp_path / "it", {"model": saved, "optimizer": optimizer}, ALONE)

    def told(model: nn.Module, groups: list[Any] | None = None) -> str:
        before = {key: value.clone() for key, value in model.state_dict().items()}
        its = torch.optim.Adam(groups or model.parameters())
        with pytest.raises(xffl.CheckpointError) as error:
            load_checkpoint(tmp_path / "it", {"model": model, "optimizer": its}, ALONE)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        return str(error.value)

    assert "'model/0.weight' is (2, 2) torch.float32 in it, here (2, 3)" in told(
        nn.Sequential(nn.Linear(3, 2), saved[1])
    )
    assert "here (2, 2) torch.float64" in told(nn.Sequential(nn.Linear(2, 2).double(), saved[1]))
    assert "'model/2.weight' is missing in it" in told(nn.Sequential(*saved, nn.Linear(2, 2)))
    assert "'model/1.num_batches_tracked' has no place here" in told(nn.Sequential(saved[0]))
    assert "'optimizer' of 'model/" not in told(nn.Sequential(saved[0]))
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert "'optimizer/state/model/1.bias' has no place here" in told(model, list(model[0].parameters()))
    # Groups cut otherwise fit while their options are the same.
    again = torch.optim.Adam([{"params": model[0].parameters()}, {"params": model[1].parameters()}], lr=9)
    load_checkpoint(tmp_path / "it", {"model": model, "optimizer": again}, ALONE)
    assert [group["lr"] for group in again.param_groups] == [0.001, 0.001]
    again.param_groups[1]["lr"] = 5
    save_checkpoint(tmp_path / "two", {"model": model, "optimizer": again}, ALONE)
    with pytest.raises(xffl.CheckpointError, match="groups with other options"):
        load_checkpoint(tmp_path / "two", {"model": saved, "optimizer": optimizer}, ALONE)


def test_one_optimizer_may_serve_two_models_compiled_ones_too(tmp_path: Path) -> None:
    models = {"one": nn.Linear(2, 2), "two": nn.Sequential(nn.Linear(2, 1))}
    optimizer = torch.optim.Adam([p for model in models.values() for p in model.parameters()])
    for model in models.values():
        stepped(model, optimizer)
    save_checkpoint(tmp_path / "it", {**models, "optimizer": optimizer}, ALONE)
    other = {"one": nn.Linear(2, 2), "two": torch.compile(nn.Sequential(nn.Linear(2, 1)))}
    again = torch.optim.Adam([p for model in reversed(other.values()) for p in model.parameters()])
    load_checkpoint(tmp_path / "it", {**other, "optimizer": again}, ALONE)
    assert torch.equal(other["one"].weight, models["one"].weight)
    assert torch.equal(other["two"]._orig_mod[0].bias, models["two"][0].bias)
    for mine, its in (
        (other["one"].bias, models["one"].bias),
        (other["two"]._orig_mod[0].weight, models["two"][0].weight),
    ):
        assert torch.equal(again.state[mine]["exp_avg"], optimizer.state[its]["exp_avg"])


# Damage and kills -----------------------------------------------------------------------------------------------------


def test_damage_is_told(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    save_checkpoint(tmp_path / "good", {"model": model}, ALONE)

    def told(name: str, change: Any) -> str:
        shutil.copytree(tmp_path / "good", tmp_path / name)
        change(tmp_path / name)
        with pytest.raises(xffl.CheckpointError) as error:
            load_checkpoint(tmp_path / name, {"model": model}, ALONE)
        assert name in str(error.value)
        return str(error.value)

    def edit(**fields: Any) -> Any:
        def change(path: Path) -> None:
            record = json.loads((path / "checkpoint.json").read_text())
            (path / "checkpoint.json").write_text(json.dumps({**record, **fields}))

        return change

    assert "__0_0.distcp has" in told("cut", lambda path: os.truncate(path / "cell_0" / "__0_0.distcp", 100))
    assert "__0_0.distcp is missing" in told("lost", lambda path: (path / "cell_0" / "__0_0.distcp").unlink())
    assert "lacks the index" in told("no_index", lambda path: (path / "cell_0" / "index.json").unlink())
    assert "checksum" in told("other_index", lambda path: (path / "cell_0" / "index.json").write_text("{}"))
    assert "unfinished" in told("no_record", lambda path: (path / "checkpoint.json").unlink())
    assert "cannot be read" in told("bad_record", lambda path: (path / "checkpoint.json").write_text("{"))
    assert "cannot be read" in told("deep", lambda path: (path / "checkpoint.json").write_text("[" * 100_000))
    with pytest.raises(xffl.CheckpointError, match="record failed: OSError"):
        load_checkpoint(tmp_path / ("x" * 300), {"model": model}, ALONE)
    assert "not of xffl" in told("foreign", edit(format="other"))
    for version in (1, 4):
        text = told(f"version_{version}", edit(version=version))
        assert f"format version {version}, this xffl reads versions 2 and 3; load it with the xffl that wrote" in text
    assert "checkpoint.json is not as it was written" in told("lacking", edit(cells=None))


def test_a_flipped_byte_anywhere_is_told_with_the_name_of_the_file(tmp_path: Path) -> None:
    model, own, parts = nn.Linear(2, 2), Own([1.5, torch.arange(3)]), {"schedule": Own("text")}
    save_checkpoint(tmp_path / "it", {"model": model, **parts}, ALONE, values={"step": 1}, own={"own": own})
    files = sorted(file for file in (tmp_path / "it").rglob("*") if file.is_file())
    assert [file.name for file in files] == ["__0_0.distcp", "index.json", "own_0.pt", "checkpoint.json"]
    before, loaded = model.weight.clone(), []
    own.load_state_dict = loaded.append  # type: ignore[method-assign]
    for file in files:
        data = file.read_bytes()
        for place in range(0, len(data), 2 if file.suffix == ".json" else len(data) // 40):
            flip = (0x01, 0x20, 0x80)[place % 3]
            file.write_bytes(data[:place] + bytes([data[place] ^ flip]) + data[place + 1 :])
            with pytest.raises(xffl.CheckpointError) as told:
                load_checkpoint(tmp_path / "it", {"model": model, **parts}, ALONE, own={"own": own})
            assert str(file) in str(told.value), (place, flip)
        file.write_bytes(data)
    assert torch.equal(model.weight, before) and not loaded
    load_checkpoint(tmp_path / "it", {"model": model, **parts}, ALONE, own={"own": own})
    assert loaded


def is_new(path: Path) -> bool:
    return "own" in read_record(path if path.exists() else path.with_name(f".{path.name}.old")).own


class Killed(BaseException):
    """Stands in for a kill: nothing of the save goes on after it."""


def deadly(act: Callable[..., Any], left: list[int]) -> Callable[..., Any]:
    """Let what changes the file system die when none of the moments is left."""

    def change(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return act(*args, **kwargs)

    return change


def noted_syncs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which every file that is flushed from now on adds its name."""
    synced, sync = [], os.fsync

    def note(handle: Any) -> None:
        number = handle if isinstance(handle, int) else handle.fileno()
        synced.append(os.readlink(f"/proc/self/fd/{number}"))
        sync(handle)

    monkeypatch.setattr(os, "fsync", note)
    return synced


def test_a_checkpoint_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = noted_syncs(monkeypatch)
    save_checkpoint(tmp_path / "it", {"own": Own(torch.ones(2))}, ALONE)
    partial = f"{tmp_path}/.it.partial"
    assert {f"{partial}/cell_0/__0_0.distcp", f"{partial}/cell_0/index.json", f"{partial}/cell_0"} <= set(synced)
    assert synced[-3:] == [f"{partial}/checkpoint.json", partial, str(tmp_path)]
    assert f"{partial}/cell_0" in synced[synced.index(f"{partial}/cell_0/index.json") :], "the index's name, too"


def test_folders_of_models_survive_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path / "it", {"own": nn.Linear(2, 2)}, ALONE)
    synced = noted_syncs(monkeypatch)
    consolidate_checkpoint(tmp_path / "it", tmp_path / "out", part="own")
    partial = f"{tmp_path}/.out.partial"
    assert synced == [f"{partial}/model.safetensors", partial, str(tmp_path)]
    synced.clear()
    with new_folder(tmp_path / "new", ("*.json",), is_writer=True, world=None) as target:
        assert target is not None
        (target / "config.json").write_text("{}")
    partial = f"{tmp_path}/.new.partial"
    assert synced == [f"{partial}/config.json", partial, str(tmp_path)]


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Die before each change of the file system in turn: what is found is the old one or the new one, never nothing."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # slow, and nothing here cuts the power
    model = nn.Linear(2, 2)
    changes = [
        (Path, "rename"),
        (Path, "open"),
        (Path, "mkdir"),
        (shutil, "rmtree"),
        (os, "fsync"),
        (os, "rmdir"),
        (torch, "save"),
    ]
    found = []
    for moment in range(100):
        folder = tmp_path / str(moment) / "checkpoints"
        path = folder / "step_1"
        save_checkpoint(path, {"model": model}, ALONE, values={"turn": 0})
        # What another kill may have left.
        shutil.copytree(path, folder / ".step_1.partial")
        shutil.copytree(path, folder / ".step_1.old")
        left = [moment]
        with monkeypatch.context() as patch:
            for home, name in changes:
                patch.setattr(home, name, deadly(getattr(home, name), left))
            try:
                save_checkpoint(path, {"model": model}, ALONE, values={"turn": 1}, own={"own": Own(1)})
                is_whole = True
            except (Killed, xffl.CheckpointError):
                is_whole = False
        latest = find_latest_checkpoint(tmp_path / str(moment))
        assert latest == path, moment
        values = load_checkpoint(latest, {"model": model}, ALONE, reset=["own"] if is_new(latest) else [])
        found.append(values["turn"])
        save_checkpoint(path, {"model": model}, ALONE, values={"turn": 2})
        assert load_checkpoint(path, {"model": model}, ALONE) == {"turn": 2}
        assert os.listdir(folder) == ["step_1"]
        if is_whole:
            break
    assert is_whole and found == sorted(found) and {0, 1} == set(found) and len(found) > 10


# Rotation -------------------------------------------------------------------------------------------------------------


class Strategy:
    """What a manager saves through."""

    def __init__(self) -> None:
        self.loaded: Path | None = None

    def save_checkpoint(self, path: Path, **kwargs: Any) -> None:
        save_checkpoint(path, {"own": Own(1)}, ALONE, **kwargs)

    def load_checkpoint(self, path: Path) -> None:
        self.loaded = path


def test_rotation_keeps_the_newest_the_final_and_what_is_not_ours(tmp_path: Path) -> None:
    strategy = Strategy()
    manager = CheckpointManager(tmp_path, keep_last=2)
    strategy.save_checkpoint(manager.output_dir / "final")
    strategy.save_checkpoint(manager.output_dir / "best")
    (manager.output_dir / "step_0").mkdir()  # foreign
    (manager.output_dir / ".step_50.partial").mkdir()
    (manager.output_dir / ".step_2.removed").mkdir()
    for step in (2, 9, 10, 100):
        manager.save(strategy, step, values={"step": step})
    kept = {".step_50.partial", "best", "final", "latest", "step_0", "step_10", "step_100"}
    assert set(os.listdir(manager.output_dir)) == kept
    shutil.copytree(manager.output_dir / "step_10", manager.output_dir / ".step_10.old")  # left by a kill
    manager.save(strategy, 101)
    assert set(os.listdir(manager.output_dir)) == kept - {"step_10"} | {"step_101"}
    for wrong in (0, -1, 1.5, True, None):
        with pytest.raises(xffl.ConfigError, match="keep_last"):
            CheckpointManager(tmp_path, keep_last=wrong)  # type: ignore[arg-type]
    with pytest.raises(xffl.ConfigError, match="output_dir"):
        CheckpointManager(3)  # type: ignore[arg-type]
    with pytest.raises(xffl.ConfigError, match="step must be an integer of 0 or more, got -1"):
        manager.save(strategy, -1)


def test_of_a_link_to_an_archive_the_link_is_deleted(tmp_path: Path) -> None:
    strategy, manager, archive = Strategy(), CheckpointManager(tmp_path / "run", keep_last=1), tmp_path / "archive"
    archive.mkdir()
    for step in (1, 2, 2):
        manager.save(strategy, step, values={"step": step})
        path = manager.output_dir / f"step_{step}"
        if not (archive / path.name).exists():
            path.rename(archive / path.name)
            path.symlink_to(archive / path.name)
    assert sorted(os.listdir(manager.output_dir)) == ["latest", "step_2"] and not path.is_symlink()
    for step in (1, 2):
        assert load_checkpoint(archive / f"step_{step}", {"own": Own(0)}, ALONE) == {"step": step}


def test_the_latest_is_found(tmp_path: Path) -> None:
    strategy, folder = Strategy(), tmp_path / "checkpoints"
    config = SimpleNamespace(experiment=SimpleNamespace(output_dir=tmp_path))
    assert find_latest_checkpoint(tmp_path) is None and not auto_resume(config, strategy)
    folder.mkdir()
    (folder / "step_900").mkdir()
    (folder / ".step_800.partial").mkdir()
    assert find_latest_checkpoint(str(tmp_path)) is None and strategy.loaded is None
    strategy.save_checkpoint(folder / "final", values={"step": 20})
    assert find_latest_checkpoint(tmp_path) == folder / "final"
    strategy.save_checkpoint(folder / "step_100")
    assert find_latest_checkpoint(tmp_path) == folder / "step_100"
    strategy.save_checkpoint(folder / "step_9")
    strategy.save_checkpoint(folder / "best_200")
    assert find_latest_checkpoint(tmp_path) == folder / "step_9"
    strategy.save_checkpoint(folder / "step_100")
    assert auto_resume(config, strategy) and strategy.loaded == folder / "step_100"
    strategy.save_checkpoint(folder / "final", values={"step": 1})
    assert find_latest_checkpoint(tmp_path) == folder / "final"
    strategy.save_checkpoint(folder / "step_100")
    assert find_latest_checkpoint(tmp_path) == folder / "step_100"
    (folder / "step_100").rename(folder / ".step_100.old")  # a kill between two renames
    assert find_latest_checkpoint(tmp_path) == folder / "step_100"
    load_checkpoint(folder / "step_100", {"own": Own(2)}, ALONE)

    def other_model(path: Any) -> None:
        raise xffl.ConfigError("nothing was loaded")

    told = pytest.raises(xffl.ConfigError, match="nothing was loaded; to begin anew, give .*experiment.name")
    with mock.patch.object(strategy, "load_checkpoint", other_model), told:
        auto_resume(config, strategy)
    strategy.loaded = None
    (folder / "step_9" / "checkpoint.json").write_text("{")
    assert find_latest_checkpoint(tmp_path) == folder / "step_100"
    with pytest.raises(xffl.CheckpointError, match="step_9 away, and the run goes on from step_100"):
        auto_resume(config, strategy)
    assert strategy.loaded is None


def test_the_latest_is_what_was_saved_last_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, manager = Strategy(), CheckpointManager(tmp_path, keep_last=2)

    class Back(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) - timedelta(hours=1)

    for step in (100, 200, 300):
        manager.save(strategy, step)
    # 300 is of a branch that was given up: the run went on from 100, and meanwhile the clock was set back.
    monkeypatch.setattr("xffl.checkpoint.format.datetime", Back)
    manager.save(strategy, 150)
    assert (manager.output_dir / "latest").read_text() == "step_150\n"
    assert find_latest_checkpoint(tmp_path) == manager.output_dir / "step_150"
    manager.save(strategy, 120)
    assert {path.name for path in manager.output_dir.glob("step_*")} == {"step_150", "step_120"}
    assert find_latest_checkpoint(tmp_path) == manager.output_dir / "step_120"
    manager.save_final(strategy, values={"step": 120})
    manager.save(strategy, 125, values={"step": 125})
    assert find_latest_checkpoint(tmp_path) == manager.output_dir / "step_125"


def uncount(path: Path) -> None:
    """Make a checkpoint one of an xffl that did not count saves."""
    record = json.loads((path / "checkpoint.json").read_text())
    del record["save_number"], record["sha256"]
    record["version"] = 2
    digest = hashlib.sha256(json.dumps(record, indent=1).encode()).hexdigest()
    (path / "checkpoint.json").write_text(json.dumps({**record, "sha256": digest}, indent=1) + "\n")


def test_what_was_not_counted_is_older_than_what_was(tmp_path: Path) -> None:
    strategy, manager = Strategy(), CheckpointManager(tmp_path, keep_last=3)
    folder = manager.output_dir
    for name, step in (("step_9", 9), ("step_1000", 1000), ("step_500", 500), ("final", 1000)):
        strategy.save_checkpoint(folder / name, values={"step": step})
        uncount(folder / name)
    assert load_checkpoint(folder / "final", {"own": Own(0)}, ALONE) == {"step": 1000}
    assert find_latest_checkpoint(tmp_path) == folder / "final"
    shutil.rmtree(folder / "final")
    assert find_latest_checkpoint(tmp_path) == folder / "step_1000"
    (folder / "latest").write_text("step_500")  # a run that went back to step 9
    assert find_latest_checkpoint(tmp_path) == folder / "step_500"
    manager.save(strategy, 7)
    assert find_latest_checkpoint(tmp_path) == folder / "step_7"
    assert {path.name for path in folder.glob("step_*")} == {"step_7", "step_1000", "step_500"}
    manager.save(strategy, 8)
    assert {path.name for path in folder.glob("step_*")} == {"step_8", "step_7", "step_1000"}
    assert [read_record(folder / f"step_{step}").save_number for step in (7, 8, 1000)] == [1, 2, 0]


# What cannot be deleted -----------------------------------------------------------------------------------------------


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return names of files that cannot be deleted, as NFS does it for a file that is open somewhere."""
    names: set[str] = set()

    def refusing(act: Callable[..., None]) -> Callable[..., None]:
        def change(path: Any, **kwargs: Any) -> None:
            if os.path.basename(path) in names:
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
            act(path, **kwargs)

        return change

    monkeypatch.setattr(os, "unlink", refusing(os.unlink))
    return names


def test_what_cannot_be_deleted_ends_nothing_and_is_tried_again(
    tmp_path: Path, busy: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    strategy, manager = Strategy(), CheckpointManager(tmp_path, keep_last=1)
    folder, best = manager.output_dir, manager.output_dir / "best"
    config = SimpleNamespace(experiment=SimpleNamespace(output_dir=tmp_path))
    manager.save(strategy, 1)
    strategy.save_checkpoint(best, values={"turn": 0})
    (folder / "step_1" / "cell_0" / ".nfs0001").write_text("open elsewhere")
    busy |= {".nfs0001", "index.json"}
    for step in (2, 3):
        caplog.clear()
        manager.save(strategy, step, values={"step": step})
        assert find_latest_checkpoint(tmp_path) == folder / f"step_{step}"
        assert f"step_{step} is saved and whole; {folder}/step_{step - 1} is not needed any more" in caplog.text
        assert "Device or resource busy" in caplog.text and "tried again" in caplog.text
    for turn in (1, 2, 3):  # a reader holds all that were there before
        strategy.save_checkpoint(best, values={"turn": turn})
        assert load_checkpoint(best, {"own": Own(0)}, ALONE) == {"turn": turn}
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} == {"step_3", "best", "latest"}
    assert len(list(folder.glob(".*.removed"))) == 2 + 3
    # A name whose remains could not be deleted is free, and what remains is not taken for it.
    manager.save(strategy, 2, values={"step": 2})
    assert load_checkpoint(folder / "step_2", {"own": Own(0)}, ALONE) == {"step": 2}
    caplog.clear()
    assert auto_resume(config, strategy) and strategy.loaded == folder / "step_2"
    assert "still cannot be deleted" in caplog.text
    busy.clear()
    assert auto_resume(config, strategy)
    assert {path.name for path in folder.iterdir()} == {"step_2", "best", "latest"}


def test_what_was_left_of_a_name_is_deleted_by_its_next_save(tmp_path: Path, busy: set[str]) -> None:
    best = tmp_path / "best"
    for _ in range(2):
        save_checkpoint(best, {"own": Own(1)}, ALONE)
        busy.add("index.json")
    assert os.listdir(tmp_path / ".best.removed") == ["cell_0"]
    (tmp_path / ".other.removed").mkdir()
    busy.clear()
    save_checkpoint(best, {"own": Own(1)}, ALONE)
    assert sorted(os.listdir(tmp_path)) == [".other.removed", "best"]


def test_what_cannot_even_be_moved_away_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    strategy, manager, rename = Strategy(), CheckpointManager(tmp_path, keep_last=1), Path.rename

    def refuse(path: Path, target: Any) -> Any:
        if str(target).endswith(".removed"):
            raise OSError(errno.EBUSY, "busy")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    for step in (1, 2):
        manager.save(strategy, step)
    assert sorted(os.listdir(manager.output_dir)) == ["latest", "step_1", "step_2"]
    assert (
        "step_2 is saved and whole" in caplog.text
        and "step_1 is not needed any more, but cannot be moved" in caplog.text
    )
    monkeypatch.undo()
    manager.save(strategy, 3)
    assert sorted(os.listdir(manager.output_dir)) == ["latest", "step_3"]


def test_folders_of_models_are_replaced_while_the_one_before_is_open(tmp_path: Path, busy: set[str]) -> None:
    for turn in range(2):
        with new_folder(tmp_path / "out", ("*.json",), is_writer=True, world=None) as target:
            assert target is not None
            (target / "config.json").write_text(str(turn))
        busy.add("config.json")
    assert (tmp_path / "out" / "config.json").read_text() == "1"


# Replaced while it is read --------------------------------------------------------------------------------------------


def filled(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(value)
    return model


def save_all(path: Path, value: int) -> None:
    save_checkpoint(path, {"model": filled(value)}, ALONE, values={"v": value}, own={"own": Own([value])})


def between(act: Callable[..., Any], moment: int, disturb: Callable[[], None], names: tuple[str, ...]) -> Any:
    """Return ``act`` so that something else happens before its call of this number, among those of files of names."""
    calls = [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        if any(str(args[0]).endswith(name) for name in names):
            if calls[0] == moment:
                calls[0] += 1
                disturb()
            calls[0] += 1
        return act(*args, **kwargs)

    return call


READ = ("checkpoint.json", "index.json", ".distcp", "own_0.pt", "it", ".it.old")


@pytest.mark.parametrize("deletes", [False, True])
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_never_a_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deletes: bool
) -> None:
    """Replace it before each opening of a file in turn; what is loaded is all of one save."""
    found = []
    for moment in range(30):
        path = tmp_path / str(moment) / "it"
        save_all(path, 1)
        model, own = filled(0), Own(None)
        writing: list[int] = []

        def disturb(path: Path = path, writing: list[int] = writing) -> None:
            if not writing:
                writing.append(1)
                save_all(path, 2)
                if not deletes:  # a reader on another host, whose files go later
                    return
                shutil.rmtree(path.with_name(".it.removed"), ignore_errors=True)

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", between(os.open, moment, disturb, READ))
            if not deletes:
                patch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
            values = load_checkpoint(path, {"model": model}, ALONE, own={"own": own})
        loaded = {float(x) for tensor in model.state_dict().values() for x in tensor.flatten()}
        assert (loaded, own.value) == ({float(values["v"])}, [values["v"]]), moment
        found.append(values["v"])
        if not writing:
            break
    assert {1, 2} == set(found) and 5 < len(found) < 30


@pytest.mark.parametrize("part", ["a checkpoint", "the newest of a run"])
def test_what_is_consolidated_while_it_is_replaced_is_of_one_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    found = []
    for moment in range(30):
        run = tmp_path / str(moment)
        path = run / "checkpoints" / "step_1"
        save_all(path, 1)
        writing: list[int] = []

        def disturb(path: Path = path, writing: list[int] = writing) -> None:
            if not writing:
                writing.append(1)
                if part == "a checkpoint":
                    save_all(path, 2)
                else:
                    save_all(path.with_name("step_2"), 2)
                    shutil.rmtree(path)

        with monkeypatch.context() as patch:
            names = ("checkpoint.json", "index.json", ".distcp", "step_1")
            patch.setattr(os, "open", between(os.open, moment, disturb, names))
            consolidate_checkpoint(path if part == "a checkpoint" else run, run / "out")
        tensors = load_file(run / "out" / "model.safetensors").values()
        values = {float(x) for tensor in tensors for x in tensor.flatten()}
        assert len(values) == 1, moment
        found += values
        if not writing:
            break
    assert {1, 2} == set(found) and 4 < len(found) < 30


def test_a_checkpoint_that_is_always_replaced_is_an_error_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model, replaced = tmp_path / "it", filled(0), []
    save_all(path, 1)

    def replace_first(index: CellIndex, file: str) -> None:
        replaced.append(file)
        save_all(path, 2)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))  # NFS, of a file that another host has deleted

    monkeypatch.setattr(CellIndex, "check_file", replace_first)
    told = "was replaced or deleted by another process while it was read .*Stale.*so in 5 tries"
    with pytest.raises(ReplacedError, match=told):
        load_checkpoint(path, {"model": model}, ALONE, own={"own": Own(None)})
    assert len(replaced) == 5
    assert {float(x) for tensor in model.state_dict().values() for x in tensor.flatten()} == {0.0}


def test_a_pipe_in_the_place_of_a_file_does_not_hang(tmp_path: Path) -> None:
    for name in ("checkpoint.json", "cell_0/index.json", "cell_0/__0_0.distcp"):
        path = tmp_path / name.replace("/", "_")
        save_checkpoint(path, {"model": nn.Linear(2, 2)}, ALONE)
        (path / name).unlink()
        os.mkfifo(path / name)
        with pytest.raises(xffl.CheckpointError, match=r"no regular file"):
            load_checkpoint(path, {"model": nn.Linear(2, 2)}, ALONE)
