"""What a process keeps for itself, random numbers, saving beside the training, the pointer, and safetensors."""

from __future__ import annotations

import io
import json
import math
import os
import random
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

import xffl
from tests.kept import ALONE, Extra, Own
from tests.unit.test_checkpoint import seal, stepped
from xffl.checkpoint import (
    AsyncSaver,
    CheckpointManager,
    RandomState,
    consolidate_checkpoint,
    find_latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from xffl.checkpoint.torch_files import load_archive
from xffl.cli.main import main
from xffl.distributed.distributed_state import DistributedState
from xffl.extras import install_command
from xffl.files import read_sealed
from xffl.training.mixins.state import PLACE, StateMixin

PARTS = {"part": Own(1)}


def draw() -> tuple[Any, ...]:
    return random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand(), torch.randn(3), torch.rand(2)


# Own state ------------------------------------------------------------------------------------------------------------


def test_random_numbers_go_on_as_if_never_stopped(tmp_path: Path) -> None:
    draw()  # an odd number of normals is left over in each generator
    random.gauss(0, 1), np.random.randn(), torch.randn(3)
    save_checkpoint(tmp_path / "it", PARTS, ALONE, own={"random": RandomState()})
    first = draw()
    draw()
    load_checkpoint(tmp_path / "it", PARTS, ALONE, own={"random": RandomState()})
    assert repr(draw()) == repr(first)
    state = RandomState().state_dict()
    with pytest.raises(xffl.CheckpointError, match="saved where a rank had a GPU"):
        RandomState("cpu").load_state_dict({**state, "cuda": torch.zeros(1)})
    with pytest.raises(xffl.ConfigError, match="device must be this rank's device, got 'toaster'"):
        RandomState("toaster")


def test_own_state_comes_back_without_what_else_its_memory_holds(tmp_path: Path) -> None:
    long = torch.arange(100_000.0)
    bf16 = torch.tensor([1.5], dtype=torch.bfloat16)
    value = {"cut": long[3:5], "empty": torch.zeros(0, 2), "bf16": bf16, 3: (1, None), "nan": float("nan")}
    save_checkpoint(tmp_path / "it", PARTS, ALONE, own={"one": Own(value), "two": Own([])})
    assert (tmp_path / "it" / "cell_0" / "own_0.pt").stat().st_size < 10_000
    found, two = Own(None), Own(None)
    load_checkpoint(tmp_path / "it", PARTS, ALONE, own={"two": two, "one": found})
    assert two.value == [] and found.value[3] == (1, None) and found.value["nan"] != found.value["nan"]
    assert found.value["cut"].tolist() == [3, 4] and found.value["bf16"].dtype == torch.bfloat16
    assert found.value["empty"].shape == (0, 2)


def test_own_state_that_does_not_fit_is_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "it", PARTS, ALONE, own={"codec": Own(1)})
    save_checkpoint(tmp_path / "none", PARTS, ALONE)
    kept = Own(7)

    def told(name: str, **given: Any) -> str:
        with pytest.raises(xffl.CheckpointError) as error:
            load_checkpoint(tmp_path / name, PARTS, ALONE, **given)
        return str(error.value)

    assert "['codec'] were not asked for" in told("it") and "name in reset" in told("it")
    assert "it has no ['codec']" in told("none", own={"codec": kept})
    assert "it has no ['x'] and ['codec'] were" in told("it", own={"x": kept})
    assert "reset names ['kodec']" in told("it", own={"codec": kept}, reset=["kodec"])
    load_checkpoint(tmp_path / "it", PARTS, ALONE, reset=["codec"])
    load_checkpoint(tmp_path / "none", PARTS, ALONE, own={"codec": kept}, reset=["codec"])
    load_checkpoint(tmp_path / "it", PARTS, ALONE, own={"codec": kept}, reset=["codec"])
    assert kept.value == 7
    for own, match in (
        ([kept], "own is list"),
        ({"a/b": kept}, "without '/'"),
        ({"x": 3}, "is int"),
        ({"x": torch.Generator()}, r"torch.*Generator; give RandomState\(.*, generators=\{'x': \.\.\.\}\)"),
        ({"x": random.Random(1)}, r"random\.Random; give RandomState"),
        ({"x": np.random.default_rng(1)}, r"Generator; give RandomState"),
        ({"x": nn.Linear(1, 1)}, "models and optimizers as parts"),
        ({"x": Own(object())}, "x/value is object"),
        ({"x": Own(torch.eye(2).to_sparse())}, "a rank keeps dense ones"),
    ):
        with pytest.raises(xffl.ConfigError, match=match):
            save_checkpoint(tmp_path / "it", PARTS, ALONE, own=own)  # type: ignore[arg-type]
    for given, match in (({"reset": "codec"}, "reset is 'codec'"), ({"local": [1]}, "local is")):
        with pytest.raises(xffl.ConfigError, match=match):
            load_checkpoint(tmp_path / "it", PARTS, ALONE, **given)  # type: ignore[arg-type]
    with pytest.raises(xffl.ConfigError, match="after_round"):
        save_checkpoint(tmp_path / "it", PARTS, ALONE, after_round=1)  # type: ignore[arg-type]


def test_a_planted_pickle_in_own_state_is_not_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.mkdir, (tmp_path / "ran",)

    save_checkpoint(tmp_path / "it", PARTS, ALONE, own={"own": Own(1)})
    for planted in (Bomb(), {"values": "{}", "tensors": Bomb()}, [1], {"values": "{}", "tensors": {}}):
        torch.save(planted, tmp_path / "it" / "cell_0" / "own_0.pt")
        seal(tmp_path / "it")
        with pytest.raises(xffl.CheckpointError, match=r"own_0\.pt holds no own state"):
            load_checkpoint(tmp_path / "it", PARTS, ALONE, own={"own": Own(2)})
    assert not (tmp_path / "ran").exists()


# Beside the training --------------------------------------------------------------------------------------------------


def test_what_is_written_later_is_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold the thread before it writes, and change everything meanwhile."""
    from xffl.checkpoint import save as saving

    go, prepare = threading.Event(), saving._prepare

    def held(*args: Any) -> None:
        assert go.wait(30)
        prepare(*args)

    monkeypatch.setattr(saving, "_prepare", held)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    own = Own([torch.ones(2), {"x": 1}])
    parts = {"model": model, "optimizer": optimizer, "part": Own([torch.zeros(3)])}
    before = json.dumps([str(model.state_dict()), str(optimizer.state_dict())])
    with AsyncSaver(ALONE) as saver:
        saver.save(tmp_path / "it", parts, values={"step": 1}, own={"own": own})
        stepped(model, optimizer, 5.0)
        optimizer.param_groups[0]["lr"] = 9
        own.value[0].zero_()
        own.value[1]["x"] = 2
        parts["part"].value[0].fill_(7)
        assert not (tmp_path / "it").exists()
        go.set()
    assert load_checkpoint(tmp_path / "it", parts, ALONE, own={"own": own}) == {"step": 1}
    assert json.dumps([str(model.state_dict()), str(optimizer.state_dict())]) == before
    assert own.value[0].tolist() == [1, 1] and own.value[1] == {"x": 1}
    assert parts["part"].value[0].tolist() == [0, 0, 0]
    with pytest.raises(xffl.StateError, match="closed"):
        saver.save(tmp_path / "it", parts)


def test_what_goes_wrong_beside_is_raised_once_and_the_next_save_works(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    saver = AsyncSaver(ALONE)
    for act in (saver.wait, lambda: saver.save(tmp_path / "good", PARTS)):
        saver.save(tmp_path / "file", PARTS)
        with pytest.raises(xffl.CheckpointError, match="is no checkpoint that could be replaced"):
            act()
        assert not (tmp_path / "good").exists()
    with pytest.raises(xffl.ConfigError, match="without '/'"):
        saver.save(tmp_path / "good", {"a/b": Own(1)})
    saver.save(tmp_path / "good", PARTS)
    saver.wait()
    load_checkpoint(tmp_path / "good", PARTS, ALONE)
    saver.save(tmp_path / "file", PARTS)
    with pytest.raises(xffl.CheckpointError):
        saver.close()
    saver.close()
    for wrong in (0, -1, "1", True, float("nan")):
        with pytest.raises(xffl.ConfigError, match="timeout_s"):
            AsyncSaver(ALONE, timeout_s=wrong)  # type: ignore[arg-type]
    with pytest.raises(xffl.StateError):
        AsyncSaver(DistributedState())


def test_a_process_that_fails_writes_to_the_end_and_says_why(tmp_path: Path) -> None:
    script = """
    import sys, torch, torch.distributed as dist
    from xffl.checkpoint import AsyncSaver
    from xffl.distributed.distributed_state import DistributedState

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.Linear(3000, 3000)
    with AsyncSaver(DistributedState(rank=0, world_size=1)) as saver:
        saver.save(sys.argv[1], {"model": model})
        raise ZeroDivisionError
    """
    given = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "it")]
    ran = subprocess.run(given, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1 and ran.stderr.rstrip().endswith("ZeroDivisionError"), ran.stderr
    load_checkpoint(tmp_path / "it", {"model": nn.Linear(3000, 3000)}, ALONE)


# The pointer and rotation ---------------------------------------------------------------------------------------------


class Late:
    """A trainer that saves beside its training."""

    def __init__(self, saver: AsyncSaver) -> None:
        self.saver = saver

    def save_checkpoint(self, path: Path, values: Any = None) -> Any:
        return self.saver.save(path, PARTS, values=values)


class Now:
    def save_checkpoint(self, path: Path, values: Any = None) -> None:
        save_checkpoint(path, PARTS, ALONE, values=values)


class Never:
    def save_checkpoint(self, path: Path) -> None:
        pass


@pytest.mark.parametrize("is_late", [False, True])
def test_the_pointer_is_believed_only_where_it_is_right(tmp_path: Path, is_late: bool) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2, keep_every=4)
    folder, saver = manager.output_dir, AsyncSaver(ALONE)
    strategy = Late(saver) if is_late else Now()
    pointer = folder / "latest"
    for step in (4, 5, 6, 8, 9, 10):
        manager.save(strategy, step, values={"step": step})
    saver.wait()
    kept = {"step_4", "step_8", "step_9", "step_10", "latest"}
    assert {entry.name for entry in folder.iterdir()} == kept and pointer.read_text() == "step_10\n"
    manager.save(strategy, 7, values={"step": 7})  # after going back
    saver.wait()
    assert find_latest_checkpoint(tmp_path) == folder / "step_7"
    for stale in ("step_4", "step_99", "final", "", "../checkpoints/step_8", "best", "\udcff"):
        pointer.write_bytes(stale.encode(errors="surrogateescape"))
        assert find_latest_checkpoint(tmp_path) == folder / "step_7", stale  # saves are counted
    pointer.write_text("step_7\n")
    (folder / "step_7" / "checkpoint.json").unlink()
    assert find_latest_checkpoint(tmp_path) == folder / "step_10"
    pointer.unlink()
    assert find_latest_checkpoint(tmp_path) == folder / "step_10"
    shutil.rmtree(folder / "step_7")
    manager.save_final(strategy, values={"step": 10})
    saver.wait()
    assert find_latest_checkpoint(tmp_path) == folder / "final" and pointer.read_text() == "final\n"
    kept -= {"step_9"}  # step_7 came after it
    assert {entry.name for entry in folder.iterdir()} == kept | {"final"}
    (folder / "step_10").rename(folder / ".step_10.old")  # a kill between two renames
    pointer.write_text("step_10")
    assert find_latest_checkpoint(tmp_path) == folder / "final"
    shutil.rmtree(folder / "final")
    assert find_latest_checkpoint(tmp_path) == folder / "step_10"
    saver.close()


def test_nothing_is_deleted_for_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.save(Now(), 1)
    with pytest.raises(xffl.CheckpointError, match="return what AsyncSaver"):
        manager.save(Never(), 2)
    saver = AsyncSaver(ALONE)
    (manager.output_dir / "step_3").write_text("in the way")
    manager.save(Late(saver), 3)
    with pytest.raises(xffl.CheckpointError, match="is no checkpoint that could be replaced"):
        saver.close()
    assert find_latest_checkpoint(tmp_path) == manager.output_dir / "step_1"
    for wrong in (0, 1.5, True):
        with pytest.raises(xffl.ConfigError, match="keep_every"):
            CheckpointManager(tmp_path, keep_every=wrong)  # type: ignore[arg-type]


# Safetensors ----------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.one, self.two = nn.Embedding(5, 4), nn.LayerNorm(4), nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.small = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(3))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("of_a_kind_that_safetensors_has_not", torch.zeros(3, dtype=torch.complex128))


def test_a_model_is_written_as_safetensors(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    parts = {"model": model, "ema": other, "optimizer": optimizer, "part": Own(1)}
    save_checkpoint(tmp_path / "it", parts, ALONE)
    done = consolidate_checkpoint(tmp_path / "it", tmp_path / "out")
    assert done.files == ("model.safetensors",) and done.ties == {"head.weight": "embed.weight"}
    found = load_file(tmp_path / "out" / "model.safetensors")
    want = {key: value for key, value in model.state_dict().items() if key != "head.weight"}
    assert found.keys() == want.keys()  # equal norms are no tied ones
    assert all(torch.equal(found[key], want[key]) and found[key].dtype == want[key].dtype for key in want)
    again = Tied()
    load_model(again, tmp_path / "out" / "model.safetensors")
    assert torch.equal(again.head.weight, model.head.weight)
    assert main(["consolidate", str(tmp_path / "it"), str(tmp_path / "cut"), "--part=ema", "--max-shard-bytes=40"]) == 0
    told = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    files = sorted(set(told["weight_map"].values()))
    assert len(files) == 4 and files[0] == "model-00001-of-00004.safetensors"
    assert told["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    for name, file in told["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "cut" / file)[name], other.state_dict()[name])


def test_shards_are_filled_and_no_fuller(tmp_path: Path) -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(5)])
    save_checkpoint(tmp_path / "it", {"model": model, "other": nn.Linear(2, 2)}, ALONE)
    for limit, files in ((7, 5), (8, 5), (15, 5), (16, 3), (40, 1)):
        done = consolidate_checkpoint(tmp_path / "it", tmp_path / str(limit), max_shard_bytes=limit)
        shards = [name for name in done.files if name.endswith(".safetensors")]
        assert len(shards) == files and (done.size_bytes, done.tensors) == (40, 5)


class Remembering(nn.Linear):
    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": torch.ones(3)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        pass


def test_tensors_of_an_extra_state_are_no_weights(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "it", {"model": Remembering(2, 2)}, ALONE)
    consolidate_checkpoint(tmp_path / "it", tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"weight", "bias"}


TABLE = torch.arange(12.0).reshape(3, 4)
EXTRA_STATES: dict[str, tuple[Any, Any]] = {  # what was saved, and what a fresh model has
    "a tensor in a dictionary": ({"t": torch.ones(3)}, {}),
    "the same dictionary": ({"t": torch.ones(3), 1: True}, {"t": torch.zeros(3), 1: False}),
    "a tensor": (torch.arange(5, dtype=torch.uint8), torch.arange(5, 10, dtype=torch.uint8)),
    "another size": (torch.arange(5, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)),
    "no elements": (torch.empty(0, dtype=torch.uint8), torch.ones(3, dtype=torch.uint8)),
    "another dtype": (torch.ones(2, dtype=torch.float8_e4m3fn), torch.ones(2)),
    "nothing here": (TABLE.to(torch.complex64).mul(1j).conj(), None),
    "nothing there": (None, TABLE),
    "a value here": (TABLE[:, 1:2], {"t": TABLE}),
    "a tensor here": ({"t": [TABLE.T, (TABLE[:1, 0], math.inf)]}, TABLE),
    "elements that share memory": ({"t": TABLE[0].expand(3, 4)}, {"t": torch.zeros(1, 4).expand(3, 4)}),
    "one expanded tensor": (TABLE[0].expand(3, 4), TABLE[1].expand(3, 4)),
    "numbers and texts": ({"a": {"b": (1, 2.5, None, [True])}, 3: "x"}, 7),
}


@pytest.mark.parametrize("case", EXTRA_STATES)
def test_extra_states_come_back_whatever_is_there(case: str, tmp_path: Path) -> None:
    saved, here = EXTRA_STATES[case]
    model = nn.ModuleDict({"one": Extra(saved), "two": nn.Sequential(Extra(3), nn.Linear(2, 2))})
    save_checkpoint(tmp_path / "now", {"model": model}, ALONE)
    with AsyncSaver(ALONE) as saver:
        saver.save(tmp_path / "later", {"model": model})
    for name in ("now", "later"):
        again = nn.ModuleDict({"one": Extra(here), "two": nn.Sequential(Extra(None), nn.Linear(2, 2))})
        load_checkpoint(tmp_path / name, {"model": again}, ALONE)
        assert repr(again["one"].extra) == repr(saved) and again["two"][0].extra == 3
        assert all(map(torch.equal, again.parameters(), model.parameters()))
        assert not isinstance(here, torch.Tensor) or again["one"].extra is not here


def test_an_extra_state_that_is_refused_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    saved = nn.Sequential(Extra({"t": torch.ones(2)}), Extra("refused"), nn.Linear(2, 2))
    save_checkpoint(tmp_path / "it", {"model": saved, "other": nn.Sequential(Extra(1))}, ALONE)
    first = torch.zeros(3)
    model, other = nn.Sequential(Extra({"t": first, "n": 4}), Extra(5), nn.Linear(2, 2)), nn.Sequential(Extra(6))
    before = {name: value.clone() for name, value in model.named_parameters()}
    with pytest.raises(xffl.CheckpointError, match="ValueError: a state of another version; nothing was loaded"):
        load_checkpoint(tmp_path / "it", {"other": other, "model": torch.compile(model)}, ALONE)
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    assert repr(model[0].extra) == repr({"t": torch.zeros(3), "n": 4}) and (model[1].extra, other[0].extra) == (5, 6)


def test_an_object_that_refuses_its_state_tells_that_weights_were_written(tmp_path: Path) -> None:
    class Refusing(Own):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise xffl.CheckpointError("the state is that of another set-up")

    save_checkpoint(tmp_path / "it", {"model": nn.Linear(2, 2), "part": Own(1)}, ALONE, own={"rounds": Own(1)})
    for part, own in ((Refusing(1), Own(1)), (Own(1), Refusing(1))):
        with pytest.raises(xffl.CheckpointError, match="another set-up; models and optimizers may be loaded in part"):
            load_checkpoint(tmp_path / "it", {"model": nn.Linear(2, 2), "part": part}, ALONE, own={"rounds": own})


class Classed(torch.Tensor):
    """What torch writes, and reads only with code."""


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    def holding(buffer: torch.Tensor) -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("kept", buffer)
        return model

    classed, expanded = TABLE.as_subclass(Classed), TABLE[0].expand(3, 4)
    for parts, match in (
        ({"model": Extra(io.BytesIO(b"x"))}, "model/_extra_state is BytesIO"),
        ({"model": nn.Sequential(Extra({"a": [b"x"]}))}, "model/0._extra_state/a/0 is bytes"),
        ({"model": Extra({"a": TABLE.to_sparse()})}, "tensor 'model/_extra_state/a' is torch.sparse_coo"),
        ({"model": Extra({"a": classed})}, "'model/_extra_state/a' is Classed of torch.float32, which"),
        ({"model": holding(classed)}, "'model/kept' is Classed of torch.float32, which torch.load"),
        ({"own": Own([classed])}, "'own/value/0' is Classed of torch.float32, which torch.load"),
        ({"model": holding(expanded)}, "'model/kept' is expanded.*clone"),
    ):
        with pytest.raises(xffl.ConfigError, match=match):
            save_checkpoint(tmp_path / "it", parts, ALONE)
    with pytest.raises(xffl.ConfigError, match="'kept/value' is Classed of torch.float32, which torch.load"):
        save_checkpoint(tmp_path / "it", {"model": nn.Linear(1, 1)}, ALONE, own={"kept": Own(classed)})
    assert not os.listdir(tmp_path)
    again = Own(torch.zeros(1).expand(3, 4))
    save_checkpoint(tmp_path / "it", {"own": Own(expanded)}, ALONE)  # which gets a new tensor
    load_checkpoint(tmp_path / "it", {"own": again}, ALONE)
    assert torch.equal(again.value, expanded)


class Views(nn.Module):
    """Tensors that begin at the same place and are not the same."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.arange(16.0).view(4, 4))
        self.turned, self.top = nn.Parameter(self.whole.detach().T), nn.Parameter(self.whole.detach()[:2])


def test_views_are_no_tied_tensors(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "it", {"model": Views()}, ALONE)
    assert consolidate_checkpoint(tmp_path / "it", tmp_path / "out").ties == {}
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in Views().state_dict().items())


def test_what_an_earlier_call_has_left_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, synced, sync = nn.Linear(2, 2), [], os.fsync

    def note(handle: Any) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle if isinstance(handle, int) else handle.fileno()}"))
        sync(handle)

    save_checkpoint(tmp_path / "it", {"model": model}, ALONE)
    (tmp_path / ".out.partial").mkdir()  # by a kill
    (tmp_path / ".out.partial" / "model.safetensors").write_text("half")
    (tmp_path / ".out.partial" / "more").write_text("half")
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os, "fsync", note)
    consolidate_checkpoint(tmp_path / "it", tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    partial = f"{tmp_path}/.out.partial"
    assert synced == [f"{partial}/model.safetensors", partial, str(tmp_path)] and not Path(partial).exists()


def test_what_cannot_be_consolidated_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    save_checkpoint(tmp_path / "it", {"model": model, "part": Own(torch.ones(1))}, ALONE)

    def told(kind: type[Exception] = xffl.ConfigError, at: str = "it", **given: Any) -> str:
        with pytest.raises(kind) as error:
            consolidate_checkpoint(tmp_path / at, given.pop("out", tmp_path / "out"), **given)
        assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))
        return str(error.value)

    assert "['model', 'part'], not 'ema'" in told(xffl.CheckpointError, part="ema")
    assert "is no model" in told(xffl.CheckpointError, part="part")
    assert "from 0 to 0" in told(cell=1) and "max_shard_bytes" in told(max_shard_bytes=0)
    assert "exists already" in told(out=tmp_path / "it") and "config.json" in told(pretrained=tmp_path)
    assert "does not exist" in told(xffl.CheckpointError, at="none")
    save_checkpoint(tmp_path / "complex", {"model": Complex()}, ALONE)
    assert "torch.complex128; see that" in told(xffl.CheckpointError, at="complex")
    file = tmp_path / "it" / "cell_0" / "__0_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert str(file) in told(xffl.CheckpointError)
    torch.save({"a": torch.ones(1)}, file)
    file.write_bytes(file.read_bytes().ljust(len(data), b"\0")[: len(data)])
    seal(tmp_path / "it")
    assert str(file) in told(xffl.CheckpointError)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert install_command("safetensors") in told()


def test_transformers_reads_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 16)
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 2)
    for is_tied in (True, False):
        config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=is_tied, dtype="float32")
        model = transformers.LlamaForCausalLM(config).eval()
        config.save_pretrained(tmp_path / f"config_{is_tied}")
        (tmp_path / f"config_{is_tied}" / "modeling_evil.py").write_text("raise RuntimeError")
        save_checkpoint(tmp_path / "it", {"model": model}, ALONE)
        for limit in (5_000, 10**9):
            out = tmp_path / f"{is_tied}_{limit}"
            given = {"max_shard_bytes": limit, "pretrained": tmp_path / f"config_{is_tied}"}
            done = consolidate_checkpoint(tmp_path / "it", out, **given)  # type: ignore[arg-type]
            assert bool(done.ties) == is_tied and (len(done.files) > 1) == (limit < 10**9)
            assert not list(out.glob("*.py"))
            again, info = transformers.LlamaForCausalLM.from_pretrained(out, output_loading_info=True)
            assert not any(info.values()), info
            tokens = torch.arange(6)[None]
            assert torch.equal(again.eval()(tokens).logits, model(tokens).logits)


def test_the_place_of_an_elastic_cell_keeps_a_part_of_any_name(tmp_path: Path) -> None:
    parts = {"ranks": SimpleNamespace(state_dict=lambda: {"mine": 3}), "trainer": SimpleNamespace(state_dict=dict)}
    trainer: Any = SimpleNamespace(
        state=SimpleNamespace(elastic=True, rank=0),
        world=SimpleNamespace(world_size=2),
        checkpoint_parts=lambda: parts,
        run_directory=SimpleNamespace(path=tmp_path),
    )
    StateMixin.keep_place(trainer)
    kept = load_archive(read_sealed(tmp_path / PLACE, 10**6), limit=10**6)
    assert kept["ranks"] == {"mine": 3}
