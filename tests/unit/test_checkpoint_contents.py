"""What a checkpoint holds of a model, an optimizer and a program: more than tensors, tensors of classes, generators."""

from __future__ import annotations

import linecache
import random
import warnings
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import xffl
from tests.kept import ALONE, Extra, Own
from tests.low_bit import Coded, Hollow, LowBitSGD
from xffl.checkpoint import AsyncSaver, RandomState, consolidate_checkpoint, load_checkpoint, save_checkpoint
from xffl.checkpoint.contents import collect


class Configured(nn.Linear):
    """A layer whose state dict has its constructor's arguments, as neuralop's BaseModel."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(3, 3)
        self.arguments = arguments
        self.told: Any = None
        self.count = nn.Buffer(torch.zeros(1))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        if state.get("_metadata") is None:
            state["_metadata"] = self.arguments
        return state

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        state = dict(state_dict)
        self.told = state.pop("_metadata")
        return super().load_state_dict(state, *args, **kwargs)


class Unplain:
    pass


@pytest.mark.parametrize("value", [torch.nn.functional.gelu, Unplain(), nn.ReLU, Path("x"), {"deep": [Unplain()]}])
def test_what_a_state_dict_has_beside_tensors_is_left_out(value: Any, tmp_path: Path) -> None:
    model = Configured(act=value, table=torch.ones(2), n=3)
    model.count.fill_(4)
    with pytest.warns(UserWarning, match=r"does not keep 'model/_metadata' \(model/_metadata/act"):
        save_checkpoint(tmp_path / "it", {"model": model}, ALONE)
    again = Configured(act="another", n=5)
    load_checkpoint(tmp_path / "it", {"model": again}, ALONE)
    assert torch.equal(again.weight, model.weight) and again.count.item() == 4
    assert again.told == {"act": "another", "n": 5}  # what is here stays, and reaches the model's load_state_dict


def test_plain_entries_of_a_state_dict_come_back_or_are_skipped(tmp_path: Path) -> None:
    model = Configured(act="gelu", n=3, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_checkpoint(tmp_path / "plain", {"model": model}, ALONE)
        save_checkpoint(tmp_path / "skipped", {"model": model}, ALONE, skip=["model/_metadata"])
        function = Configured(act=torch.nn.functional.gelu)
        save_checkpoint(tmp_path / "function", {"model": function}, ALONE, skip=["model/_metadata"])
        with AsyncSaver(ALONE) as saver:
            saver.save(tmp_path / "later", {"model": function}, skip=["model/_metadata"])
    for name, here, told in (
        ("plain", {"n": 1}, {"act": "gelu", "n": 3, "dtype": torch.bfloat16}),
        ("plain", {"act": torch.nn.functional.relu}, {"act": torch.nn.functional.relu}),
        ("skipped", {"n": 1}, {"n": 1}),
        ("function", {"n": 1}, {"n": 1}),
        ("later", {"act": torch.nn.functional.relu}, {"act": torch.nn.functional.relu}),
    ):
        again = Configured(**here)
        load_checkpoint(tmp_path / name, {"model": again}, ALONE)
        assert again.told == told, name
    consolidate_checkpoint(tmp_path / "function", tmp_path / "model")
    for skip, match in (
        (["model/weight"], "'model/weight', which is no entry that can be left out"),
        (["model/other"], "'model/other', which is no entry"),
        ("model/_metadata", "give a list of names"),
    ):
        with pytest.raises(xffl.ConfigError, match=match):
            save_checkpoint(tmp_path / "it", {"model": model}, ALONE, skip=skip)


@pytest.mark.parametrize("act", ["gelu", torch.nn.functional.gelu])
@pytest.mark.parametrize("wrap", [nn.Sequential, torch.compile])
def test_the_model_may_lie_inside_others(act: Any, wrap: Any, tmp_path: Path) -> None:
    """A module around it takes no entry beside tensors in its load_state_dict; torch.compile hides the model's own."""
    model, again = wrap(Configured(act=act)), wrap(Configured(act=act, n=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_checkpoint(tmp_path / "it", {"model": model}, ALONE)
    load_checkpoint(tmp_path / "it", {"model": again}, ALONE)
    assert all(map(torch.equal, again.parameters(), model.parameters()))
    told = getattr(again, "_orig_mod", again)[0].told if wrap is nn.Sequential else again._orig_mod.told
    assert told == (None if wrap is nn.Sequential else {"act": act, **({} if act == "gelu" else {"n": 2})})


def test_the_warning_names_all_in_one(tmp_path: Path) -> None:
    outer = Configured(act=torch.nn.functional.gelu)
    optimizer = torch.optim.SGD(outer.parameters(), 0.1)
    optimizer.param_groups[0]["norm"] = torch.nn.functional.normalize
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        save_checkpoint(tmp_path / "it", {"outer": outer, "optimizer": optimizer}, ALONE)
    assert [(one.filename, one.category) for one in told] == [(__file__, UserWarning)]
    assert "save_checkpoint(" in linecache.getline(told[0].filename, told[0].lineno)
    assert "'outer/_metadata'" in str(told[0].message) and "optimizer/group/outer/weight/norm'" in str(told[0].message)
    optimizer.param_groups[0]["lr"] = 5
    load_checkpoint(tmp_path / "it", {"outer": outer, "optimizer": optimizer}, ALONE)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["norm"] is torch.nn.functional.normalize


def test_what_training_needs_is_not_left_out(tmp_path: Path) -> None:
    """Extra states, states of parameters and parts that are not plain are refused: a load could not do without them."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.state[model.weight]["odd"] = Unplain()
    for parts, match in (
        ({"model": Extra(Unplain())}, "model/_extra_state is Unplain"),
        ({"model": model, "optimizer": optimizer}, "optimizer/state/model/weight/odd is Unplain"),
        ({"part": Own(Unplain())}, "part/value is Unplain"),
    ):
        with pytest.raises(xffl.ConfigError, match=match):
            save_checkpoint(tmp_path / "it", parts, ALONE)  # type: ignore[arg-type]
    model = nn.Sequential(Extra({"a": 1}), Configured(act=len))
    contents = collect({"model": model})
    assert "model/0._extra_state" in contents.values and list(contents.left_out) == ["model/_metadata"]


def test_what_is_loaded_inside_inference_mode_trains_on(tmp_path: Path) -> None:
    model, again = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer, other = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(again.parameters())
    trained(optimizer, model, range(2))
    with torch.inference_mode():
        save_checkpoint(tmp_path / "it", {"model": model, "optimizer": optimizer}, ALONE)
        with AsyncSaver(ALONE) as saver:
            saver.save(tmp_path / "later", {"model": model, "optimizer": optimizer})
        for name in ("it", "later"):
            load_checkpoint(tmp_path / name, {"model": again, "optimizer": other}, ALONE)
        evaluated = nn.Linear(8, 8)
        save_checkpoint(tmp_path / "model", {"model": model}, ALONE)
        load_checkpoint(tmp_path / "model", {"model": evaluated}, ALONE)
    assert torch.equal(evaluated.weight, model.weight)
    for one, its in ((optimizer, model), (other, again)):
        trained(one, its, range(2, 4))
    assert all(map(torch.equal, again.parameters(), model.parameters()))


# Tensors of classes ---------------------------------------------------------------------------------------------------


def trained(optimizer: torch.optim.Optimizer, model: nn.Module, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def inner_bits(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Everything that the states of an optimizer are made of."""
    bits: list[Any] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            one = optimizer.state[parameter]["momentum"]
            names, context = one.__tensor_flatten__() if isinstance(one, Coded) else ([], None)
            parts = [getattr(one, name) for name in names] or [one]
            bits.append((type(one).__name__, context, one.dtype, [part.tolist() for part in parts]))
    return bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_bit_states_go_on_as_if_never_stopped(dtype: torch.dtype, tmp_path: Path) -> None:
    def made(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8)).to(dtype)
        return {"model": model, "optimizer": LowBitSGD(model.parameters())}

    def train(parts: dict[str, Any], steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            parts["model"](torch.randn(4, 8, dtype=dtype)).square().mean().backward()
            parts["optimizer"].step()
            parts["optimizer"].zero_grad()

    kept = made(0)
    train(kept, range(3))
    before = inner_bits(kept["optimizer"])
    assert [kind for kind, *_ in before] == ["Coded", "Tensor", "Coded", "Tensor"]
    save_checkpoint(tmp_path / "it", kept, ALONE)
    with AsyncSaver(ALONE) as saver:
        saver.save(tmp_path / "later", kept)
        train(kept, range(3, 6))  # while the thread writes what was copied
    for name in ("it", "later"):
        for steps in range(2):  # into an optimizer without a state, and into one with another
            again = made(1)
            train(again, range(steps))
            load_checkpoint(tmp_path / name, again, ALONE)
            assert inner_bits(again["optimizer"]) == before
            train(again, range(3, 6))
            assert inner_bits(again["optimizer"]) == inner_bits(kept["optimizer"])
            assert all(map(torch.equal, again["model"].parameters(), kept["model"].parameters()))


def test_tensors_of_classes_are_kept_wherever_they_are(tmp_path: Path) -> None:
    values = torch.randn(4, 8)

    def model_of(one: torch.Tensor) -> nn.Module:
        model = nn.Linear(2, 2)
        model.coded = nn.Buffer(one)
        return model

    parts = {"model": model_of(Coded.of(values)), "part": Own([Coded.of(values * 2), 1]), "extra": Extra(None)}
    parts["extra"].extra = {"deep": Coded.of(values * 3)}
    own = {"own": Own({"kept": Coded.of(values * 4)})}
    save_checkpoint(tmp_path / "it", parts, ALONE, own=own)  # type: ignore[arg-type]
    again = {"model": model_of(Coded.of(values * 9)), "part": Own(None), "extra": Extra(None)}
    there = again["model"].coded
    other = {"own": Own(None)}
    load_checkpoint(tmp_path / "it", again, ALONE, own=other)  # type: ignore[arg-type]
    found = [again["model"].coded, again["part"].value[0], again["extra"].extra["deep"], other["own"].value["kept"]]
    for number, one in enumerate(found):
        assert type(one) is Coded and torch.equal(one.decoded(), Coded.of(values * (number + 1)).decoded())
    assert again["model"].coded is there  # filled where it lies
    with pytest.raises(xffl.CheckpointError, match=r"'model/coded' .*Coded.*safetensors"):
        consolidate_checkpoint(tmp_path / "it", tmp_path / "model")
    with pytest.raises(xffl.CheckpointError, match="'model/coded' is .*Coded in it, here a plain tensor"):
        load_checkpoint(tmp_path / "it", again | {"model": model_of(values)}, ALONE, own=other)  # type: ignore[arg-type]
    coded = Coded.of(values.view(2, 16))
    with pytest.raises(xffl.CheckpointError, match=r"'model/coded' is \(4, 8\) torch.float32 in it, here \(2, 16\)"):
        load_checkpoint(tmp_path / "it", again | {"model": model_of(coded)}, ALONE, own=other)  # type: ignore[arg-type]


def test_a_class_that_cannot_be_made_again_is_refused_with_the_reason(tmp_path: Path) -> None:
    model = nn.Linear(8, 4)
    for kind, match in (
        (Hollow, "is Hollow of torch.float32.*__tensor_flatten__"),
        (Forgetful.of, "does not make again from its parts.*becomes .* with"),
        (Pathed.of, "a context that a checkpoint does not keep .*PosixPath"),
    ):
        optimizer = LowBitSGD(model.parameters(), kind=kind)
        trained(optimizer, model, range(1))
        with pytest.raises(xffl.ConfigError, match="optimizer/state/model/weight/momentum") as error:
            save_checkpoint(tmp_path / "it", {"model": model, "optimizer": optimizer}, ALONE)
        error.match(match)


class Forgetful(Coded):
    """Comes back as another data type."""

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Coded:
        return cls(parts["codes"], parts["scales"], parts["table"], context[0], torch.float16)


class Pathed(Coded):
    """Has more than plain values as its context."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales", "table"], [self.own_shape, Path("x")]


def test_a_class_that_is_not_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(8, 4)
    optimizer = LowBitSGD(model.parameters())
    trained(optimizer, model, range(1))
    monkeypatch.setattr(Coded, "__module__", "elsewhere.low_bit")
    save_checkpoint(tmp_path / "it", {"model": model, "optimizer": optimizer}, ALONE)
    monkeypatch.undo()
    with pytest.raises(xffl.CheckpointError, match=r"class elsewhere\.low_bit\.Coded.*import the package.*elsewhere"):
        load_checkpoint(tmp_path / "it", {"model": model, "optimizer": LowBitSGD(model.parameters())}, ALONE)


class Called(Coded):
    """A class of the program that the model and the optimizer do not use."""

    calls: ClassVar[list[Any]] = []

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Coded:
        cls.calls.append(context)
        return super().__tensor_unflatten__(parts, context, size, stride)


def trained_parts(optimizer_class: type[torch.optim.Optimizer], steps: int, **options: Any) -> dict[str, Any]:
    model = nn.Linear(8, 4)
    optimizer = optimizer_class(model.parameters(), **options)
    trained(optimizer, model, range(steps))
    return {"model": model, "optimizer": optimizer}


def test_a_class_that_nobody_vouches_for_is_not_called(tmp_path: Path) -> None:
    saved = trained_parts(LowBitSGD, 1, kind=Called.of)
    own = {"own": Own(Called.of(torch.randn(4, 8)))}
    save_checkpoint(tmp_path / "it", saved, ALONE)
    save_checkpoint(tmp_path / "kept", {"part": Own(1)}, ALONE, own=own)
    Called.calls.clear()
    for parts in (trained_parts(LowBitSGD, 0), trained_parts(LowBitSGD, 1), trained_parts(torch.optim.SGD, 0)):
        before = parts["model"].weight.detach().clone()
        with pytest.raises(xffl.CheckpointError, match=r"Called.*add_safe_globals.*nothing was loaded"):
            load_checkpoint(tmp_path / "it", parts, ALONE)
        assert torch.equal(parts["model"].weight, before)
    with pytest.raises(xffl.CheckpointError, match=r"Called.*add_safe_globals"):
        load_checkpoint(tmp_path / "kept", {"part": Own(1)}, ALONE, own={"own": Own(None)})
    assert Called.calls == []
    load_checkpoint(tmp_path / "it", trained_parts(LowBitSGD, 1, kind=Called.of), ALONE)  # the class of what is there
    assert len(Called.calls) == 1
    fresh = trained_parts(LowBitSGD, 0)
    with torch.serialization.safe_globals([Called]):
        load_checkpoint(tmp_path / "it", fresh, ALONE)
    assert isinstance(fresh["optimizer"].state[fresh["model"].weight]["momentum"], Called)


class Lying(Coded):
    """Is made with another shape than it was."""

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Coded:
        shape, dtype = context
        return cls(parts["codes"], parts["scales"], parts["table"], *cls.made_as(shape, dtype))

    made_as: ClassVar[Any] = staticmethod(lambda shape, dtype: (shape, dtype))


@pytest.mark.parametrize("wrong", [lambda shape, dtype: ((2, 16), dtype), lambda shape, _: (shape, torch.int32)])
def test_what_is_made_must_be_what_was_saved(wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path / "it", trained_parts(LowBitSGD, 1, kind=Lying.of), ALONE)
    monkeypatch.setattr(Lying, "made_as", staticmethod(wrong))
    with pytest.raises(xffl.CheckpointError, match=r"weight/momentum' is \(4, 8\) torch.float32 .*its parts make"):
        load_checkpoint(tmp_path / "it", trained_parts(LowBitSGD, 1, kind=Lying.of), ALONE)


class PlainSGD(LowBitSGD):
    """Keeps the same state in plain tensors."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, kind=torch.clone)


def test_a_state_of_another_kind_than_that_of_the_optimizer_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "coded", trained_parts(LowBitSGD, 1), ALONE)
    save_checkpoint(tmp_path / "plain", trained_parts(PlainSGD, 1), ALONE)
    for name, kind, match in (
        ("coded", PlainSGD, r"weight/momentum' is .*Coded in it, here a plain tensor.*nothing was loaded"),
        ("plain", LowBitSGD, r"weight/momentum' is a plain tensor in it, here .*Coded; nothing was loaded"),
    ):
        parts = trained_parts(kind, 1)
        before = parts["model"].weight.detach().clone()
        with pytest.raises(xffl.CheckpointError, match=match):
            load_checkpoint(tmp_path / name, parts, ALONE)
        assert torch.equal(parts["model"].weight, before)


# Generators of a program ----------------------------------------------------------------------------------------------


def generators(seed: int) -> dict[str, Any]:
    bits = {name: getattr(np.random, name)(seed) for name in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")}
    return {
        "torch": torch.Generator().manual_seed(seed),
        **{name: np.random.Generator(one) for name, one in bits.items()},
        "legacy": np.random.RandomState(seed),
        "python": random.Random(seed),
    }


def draw(own: dict[str, Any]) -> list[Any]:
    """Draw an odd number of normals, of which some generators keep one, and integers of half a word."""
    found: list[Any] = [
        torch.randn(3, generator=own["torch"]).tolist(),
        own["python"].gauss(0, 1),
        own["python"].random(),
    ]
    for one in own.values():
        if isinstance(one, np.random.Generator):
            found.append([one.normal(size=3).tolist(), one.integers(9, dtype=np.int32), one.random(dtype=np.float32)])
    return [*found, own["legacy"].randn(3).tolist(), own["legacy"].rand()]


def test_generators_of_a_program_go_on(tmp_path: Path) -> None:
    own = generators(1)
    order = torch.utils.data.DataLoader(range(9), shuffle=True, generator=own["torch"])  # type: ignore[arg-type]
    draw(own), list(order)
    save_checkpoint(tmp_path / "it", {"part": Own(1)}, ALONE, own={"random": RandomState(generators=own)})
    wanted = [draw(own), [one.item() for one in order], draw(own)]
    again = generators(2)
    other = torch.utils.data.DataLoader(range(9), shuffle=True, generator=again["torch"])  # type: ignore[arg-type]
    load_checkpoint(tmp_path / "it", {"part": Own(2)}, ALONE, own={"random": RandomState(generators=again)})
    assert [draw(again), [one.item() for one in other], draw(again)] == wanted


def test_generators_that_do_not_fit_are_named(tmp_path: Path) -> None:
    kept = {"data": torch.Generator()}
    save_checkpoint(tmp_path / "it", {"part": Own(1)}, ALONE, own={"random": RandomState(generators=kept)})
    save_checkpoint(tmp_path / "none", {"part": Own(1)}, ALONE, own={"random": RandomState()})
    for name, given, match in (
        ("it", {}, r"has the generators \['data'\]: \['data'\] were not asked for"),
        ("it", {"data": kept["data"], "more": random.Random()}, r"it has no \['more'\]"),
        ("none", kept, r"it has no \['data'\]"),
        (
            "it",
            {"data": np.random.default_rng(0)},
            "'data' was saved as torch.Generator on cpu and is numpy.* of PCG64",
        ),
    ):
        state = random.getstate()
        part = Own(2)
        with pytest.raises(xffl.CheckpointError, match=match) as error:
            load_checkpoint(tmp_path / name, {"part": part}, ALONE, own={"random": RandomState(generators=given)})
        assert random.getstate() == state
        assert part.value == 2 and "nothing was loaded" in str(error.value) and "in part" not in str(error.value)
    for wrong, match in (
        ([kept["data"]], "generators is list"),
        ({"data": 3}, "generator 'data' is int; give a torch"),
        ({"data": random.SystemRandom()}, "generator 'data' is SystemRandom, which has no state"),
    ):
        with pytest.raises(xffl.ConfigError, match=match):
            RandomState(generators=wrong)  # type: ignore[arg-type]
