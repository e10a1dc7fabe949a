"""Configurations: what each source says, which one wins, where values come from, and how mistakes are told."""

from __future__ import annotations

import enum
import json
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from xffl.cli.main import main as command_line
from xffl.cluster.environment import federation_variables, requested_federation
from xffl.distributed.parameters import DeviceParameters
from xffl.errors import ConfigError, TopologyError
from xffl.extras import install_command
from xffl.parallel.config import DistributedConfig
from xffl.training import DataConfig, FederatedConfigMixin, FederationConfig
from xffl.training.callbacks import Callback, CheckpointCallback
from xffl.training.config.configuration import (
    LaunchConfig,
    Resolved,
    choose_federation,
    config_class,
    help_text,
    main,
    print_text,
    read_configuration,
    read_job,
    read_resolved,
    to_plain,
    write_resolved,
)
from xffl.training.config.dataclasses import BaseTrainerConfig, ExperimentConfig
from xffl.training.config.variables import requested_settings
from xffl.yaml_text import parse_yaml, write_yaml


class Color(enum.Enum):
    RED = 1
    GREEN = 2


class Counting(Callback):
    """A callback of a user's."""

    def __init__(self, every: int = 1, tags: list[str] | None = None, name: str = "x") -> None:
        self.every, self._tags, self.name = every, tags, name


@dataclass
class Kept(Callback):
    every: int = 1


class Picky(Callback):
    def __init__(self, needed: int) -> None:
        if needed > 9:
            raise ConfigError(f"needed {needed} is above 9")
        self.needed = needed


@dataclass(frozen=True, kw_only=True)
class Stage:
    width: int = 8
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How it learns.

    :param lr: Step size, in 100 % of cases above 0.
    :param kind: Which one.
    """

    lr: float = 1e-3
    kind: Literal["adam", "sgd"] = "adam"

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ConfigError(f"lr {self.lr} is not above 0")


@dataclass(kw_only=True)
class MyConfig(BaseTrainerConfig, FederatedConfigMixin):
    """A user's.

    :param model_dim: Width of :class:`some.module.Model`,
        in ``features``.
    """

    model_dim: int = 768
    ratio: float = 0.5
    note: str | None = None
    title: str = "a"
    is_on: bool = False
    color: Color = Color.RED
    pair: tuple[int, str] = (1, "a")
    sizes: int | tuple[int, ...] | None = None
    either: int | str = 0
    anything: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    tags: set[int] = field(default_factory=set)
    where: Path = Path("here")
    layer: type | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device | None = None
    stages: list[Stage] = field(default_factory=list)
    optimizer: OptimizerConfig | None = None
    tuned: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=0.25, kind="sgd"))
    experiment: ExperimentConfig = field(default_factory=lambda: ExperimentConfig(name="digits", seed=3))
    data: DataConfig = field(default_factory=DataConfig)


class MyTrainer:
    config: MyConfig

    def fit(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass(kw_only=True)
class Nested(BaseTrainerConfig):
    T_max: int = 1
    outer: Outer = field(default_factory=lambda: Outer(inner=OptimizerConfig(lr=0.5, kind="sgd")))
    experiment: ExperimentConfig = field(default_factory=lambda: ExperimentConfig(name="digits"))


@dataclass
class Derived:
    width: int
    double: int = field(init=False, default=0)


def read(
    tmp_path: Path, *texts: str, words: Sequence[str] = (), environ: dict[str, str] | None = None, kind: Any = MyConfig
) -> Resolved[Any]:
    """Resolve files ``0.yaml``, ``1.yaml``, ... and the other sources."""
    files = []
    for number, text in enumerate(texts):
        files.append(tmp_path / f"{number}.yaml")
        files[-1].write_text(text, encoding="utf-8")
    return read_configuration(kind, files, words, environ or {})


def command(*words: str) -> Any:
    return read_configuration(MyConfig, (), words, {}).config


# Who wins -------------------------------------------------------------------------------------------------------------


def test_each_source_beats_those_before(tmp_path: Path) -> None:
    files = ("training: {epochs: 2, batch_size: 2, log_every: 2, max_steps: 2}", "training: {epochs: 3, batch_size: 3}")
    environ = {"XFFL_TRAINING__EPOCHS": "4", "XFFL_TRAINING__LOG_EVERY": "4", "XFFL_MODEL_DIM": "4"}
    found = read(tmp_path, *files, words=("--training.epochs", "5", "--training.epochs=6"), environ=environ)
    training = found.config.training
    assert (training.epochs, training.log_every, training.batch_size, training.max_steps) == (6, 4, 3, 2)
    assert (training.gradient_accumulation, found.config.model_dim) == (1, 4)
    assert {key: found.origins[f"training.{key}"] for key in ("epochs", "log_every", "batch_size", "max_steps")} == {
        "epochs": "command line",
        "log_every": "environment XFFL_TRAINING__LOG_EVERY",
        "batch_size": f"file {tmp_path}/1.yaml",
        "max_steps": f"file {tmp_path}/0.yaml",
    }
    assert found.origins["training.gradient_accumulation"] == "default"
    assert found.origins["model_dim"] == "environment XFFL_MODEL_DIM"


def test_every_leaf_has_an_origin(tmp_path: Path) -> None:
    found = read(tmp_path, "optimizer: {lr: 1e-4}\nlaunch: {processes: 2}\ntrainer: a.B")

    def leaves(plain: Any, path: tuple[str, ...] = ()) -> list[str]:
        if isinstance(plain, dict) and ".".join(path) not in found.origins:
            return [leaf for name, value in plain.items() for leaf in leaves(value, (*path, name))]
        return [".".join(path)]

    expected = {*leaves(to_plain(found.config)), *leaves(to_plain(found.launch), ("launch",)), "trainer"}
    assert set(found.origins) == expected
    assert (found.trainer, found.launch.processes) == ("a.B", 2)
    assert found.origins["optimizer.lr"].startswith("file ") and found.origins["optimizer.kind"] == "default"


def test_config_on_the_command_line_is_a_file_however_late(tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text("training: {epochs: 9, batch_size: 9}")
    words = ["--training.epochs=2", "--config", str(tmp_path / "more.yaml")]
    found = read(tmp_path, "training: {epochs: 1, batch_size: 1}", words=words, environ={"XFFL_RATIO": ".125"})
    assert (found.config.training.epochs, found.config.training.batch_size, found.config.ratio) == (2, 9, 0.125)


def test_defaults_of_the_class_stay_and_what_follows_from_them_follows_the_new_value() -> None:
    config = command("--tuned.lr", "1e-5")
    assert config.tuned == OptimizerConfig(lr=1e-5, kind="sgd")
    config = command("--experiment.name", "mnist")
    assert config.experiment == ExperimentConfig(name="mnist", seed=3)
    assert config.experiment.output_dir == "runs/mnist"
    assert command().experiment.output_dir == "runs/digits"


def test_sections_that_may_be_left_out(tmp_path: Path) -> None:
    assert command().optimizer is None
    assert command("--optimizer.lr=2").optimizer == OptimizerConfig(lr=2.0)
    assert command("--optimizer", "{}").optimizer == OptimizerConfig()
    assert command("--optimizer={lr: 3}", "--optimizer.kind=sgd").optimizer == OptimizerConfig(lr=3.0, kind="sgd")
    found = read(tmp_path, "optimizer: {lr: 2}", words=["--optimizer", "null"])
    assert found.config.optimizer is None and found.origins["optimizer"] == "command line"
    found = read(tmp_path, "optimizer: {lr: 2}", words=["--optimizer", "null", "--optimizer.kind", "sgd"])
    assert found.config.optimizer == OptimizerConfig(kind="sgd")
    found = read(tmp_path, "optimizer: null", words=["--optimizer.kind", "sgd"])
    assert found.config.optimizer == OptimizerConfig(kind="sgd")
    assert read(tmp_path, "training:\n").config.training.epochs == 1  # nothing stands below it
    text = "distributed: {device_parameters: {dp_shard: auto, comm: {init_timeout_seconds: 5}}}"
    parameters = read(tmp_path, text).config.distributed.device_parameters
    assert parameters == DeviceParameters.FSDP(comm=type(parameters.comm)(init_timeout_seconds=5.0))


# Values ---------------------------------------------------------------------------------------------------------------

HOSTILE = ["", " ", "a b", "it's", '"q"', "a=b", "--x", "-", "é ü 😀", "a: b", "#x", "[", "{", "*", "&", "no", "1e-3"]
HOSTILE += ["null ", "'", "\\", "a\nb", "\t", "$HOME", "`id`", "%d", "!x", "@", "2026-11-21", "12:30", "0x", "~", ":"]


@pytest.mark.parametrize("text", [*HOSTILE, "null", "true", "3"])
def test_texts_stay_what_they_are(text: str, tmp_path: Path) -> None:
    nothing = None if text == "null" else text
    assert command(f"--title={text}").title == text
    assert command(f"--note={text}").note == nothing
    if not text.startswith("--"):
        assert command("--title", text, "--model_dim", "3").title == text
    environ = {"XFFL_TITLE": text, "XFFL_NOTE": text}
    config = read_configuration(MyConfig, (), (), environ).config
    assert (config.title, config.note) == (text, nothing)
    # In a file what is quoted is a text; null is, too.
    config = read(tmp_path, write_yaml({"title": text, "note": text, "words": [text], "extra": {text: text}})).config
    assert (config.title, config.note, config.words, config.extra) == (text, text, [text], {text: text})


VALUES: list[tuple[str, str, Any]] = [
    ("model_dim", "-3", -3),
    ("model_dim", "010", 10),
    ("ratio", "1e-3", 1e-3),
    ("ratio", "-1E5", -1e5),
    ("ratio", "3", 3.0),
    ("ratio", ".5", 0.5),
    ("ratio", ".inf", float("inf")),
    ("is_on", "true", True),
    ("is_on", "False", False),
    ("note", "null", None),
    ("note", "3", "3"),
    ("color", "GREEN", Color.GREEN),
    ("color", "tests.unit.test_configuration.Color.GREEN", Color.GREEN),
    ("pair", "[2, b]", (2, "b")),
    ("sizes", "[2, 2]", (2, 2)),
    ("sizes", "4", 4),
    ("sizes", "null", None),
    ("sizes", "[]", ()),
    ("either", "3", 3),
    ("either", "'3'", "3"),
    ("either", "x y", "x y"),
    ("anything", "1e-3", 1e-3),
    ("anything", "no", "no"),
    ("anything", "'3'", "3"),
    ("anything", "null", None),
    ("anything", "{a: [1, null, {b: true}]}", {"a": [1, None, {"b": True}]}),
    ("extra", "{codec: int8, lr: 1e-4, deep: {a: '1'}}", {"codec": "int8", "lr": 1e-4, "deep": {"a": "1"}}),
    ("counts", "{a: 1}", {"a": 1}),
    ("words", "['1', no, b c]", ["1", "no", "b c"]),
    ("where", "a/b c", Path("a/b c")),
    ("where", "3", Path("3")),
    ("layer", "torch.nn.Linear", torch.nn.Linear),
    ("layer", "null", None),
    ("dtype", "bfloat16", torch.bfloat16),
    ("device", "meta", torch.device("meta")),
    ("tags", "[2, 1]", {1, 2}),
    ("stages", "[{width: 3}, {name: '7'}]", [Stage(width=3), Stage(name="7")]),
]


@pytest.mark.parametrize(("key", "text", "value"), VALUES)
def test_values_of_all_types_from_all_sources(key: str, text: str, value: Any, tmp_path: Path) -> None:
    sources = [
        command(f"--{key}={text}"),
        command(f"--{key}", text),
        read_configuration(MyConfig, (), (), {f"XFFL_{key.upper()}": text}).config,
    ]
    if (key, text) not in (("note", "3"), ("where", "3")):  # numbers in a file are no texts
        sources.append(read(tmp_path, f"{key}: {text}").config)
    for config in sources:
        found = getattr(config, key)
        assert found == value and type(found) is type(value)


def test_a_number_is_a_text_where_texts_name_values() -> None:
    @dataclass
    class Priced:
        price: Decimal = Decimal(1)

    assert read_configuration(Priced, (), ["--price=0.1"], {}).config.price == Decimal("0.1")


def test_sets_are_written_in_order() -> None:
    assert to_plain({str(number) for number in range(10)}) == [str(number) for number in range(10)]


def test_what_is_written_of_dataclasses_makes_them_again() -> None:
    path = "tests.unit.test_configuration.Kept"
    assert to_plain(Kept(3)) == {"class_path": path, "init_args": {"every": 3}}
    assert to_plain(Derived(3)) == {"width": 3}


def test_defaults_inside_of_defaults_and_capitals_stay(tmp_path: Path) -> None:
    found = read(tmp_path, "T_max: 5", words=["--outer.inner.kind=adam"], kind=Nested).config
    assert (found.outer.inner, found.T_max) == (OptimizerConfig(lr=0.5, kind="adam"), 5)
    assert read(tmp_path, environ={"XFFL_T_MAX": "6"}, kind=Nested).config.T_max == 6


def test_quoted_values_of_files_are_texts(tmp_path: Path) -> None:
    text = "either: '3'\nnote: 'null'\nanything: '1e-3'\nextra: {a: '1', b: 'no', c: 'true'}\nwords: ['1', 'null']"
    config = read(tmp_path, text).config
    assert (config.either, config.note, config.anything) == ("3", "null", "1e-3")
    assert (config.extra, config.words) == ({"a": "1", "b": "no", "c": "true"}, ["1", "null"])
    assert read(tmp_path, "training: {mixed_precision: no}").config.training.mixed_precision == "no"


def test_classes_by_dotted_path(tmp_path: Path) -> None:
    config = read(tmp_path, "distributed: {strategy: fsdp, wrap: [torch.nn.Linear, torch.nn.LayerNorm]}").config
    assert config.distributed == DistributedConfig(strategy="fsdp", wrap=(torch.nn.Linear, torch.nn.LayerNorm))
    assert command("--distributed.wrap=[torch.nn.Linear]").distributed.wrap == (torch.nn.Linear,)
    assert command("--distributed.wrap+=torch.nn.Linear").distributed.wrap == (torch.nn.Linear,)


def test_parts_of_mappings(tmp_path: Path) -> None:
    words = ["--extra.a.b=1e-3", "--extra.codec", "int8", "--extra.c='3'", "--extra.d="]
    found = read(tmp_path, "extra: {codec: fp16, x: [1, 2]}", words=words, environ={"XFFL_EXTRA__RAILS": "true"})
    given = {"codec": "int8", "x": [1, 2], "rails": True}
    assert found.config.extra == given | {"a": {"b": 1e-3}, "c": "3", "d": ""}
    assert found.origins["extra"].startswith("file ") and found.origins["extra.codec"] == "command line"
    assert found.origins["extra.rails"] == "environment XFFL_EXTRA__RAILS"
    found = read(tmp_path, "extra: {a: 1}", words=["--extra.b=2", "--extra={c: 3}"])
    assert found.config.extra == {"c": 3} and [key for key in found.origins if key.startswith("extra.")] == []
    assert command("--words+=a", "--words+=[b, c]", "--words.1=x").words == ["a", "x", "c"]
    # The environment has no order: a part counts beside the whole, wherever it stands.
    environ = {"XFFL_EXTRA__A": "1", "XFFL_EXTRA": "{b: 2}"}
    assert read_configuration(MyConfig, (), (), environ).config.extra == {"a": 1, "b": 2}


def test_callbacks_by_class_path(tmp_path: Path) -> None:
    text = """
callbacks:
  - class_path: CheckpointCallback
  - class_path: tests.unit.test_configuration.Counting
    init_args: {every: 3, tags: [a, '1'], name: '7'}
  - Counting
"""
    words = ["--callbacks+=Counting", "--callbacks.every=5", "--callbacks.init_args.name", "8", "--callbacks.1.every=4"]
    found = read(tmp_path, text, words=words)
    first, *others = found.config.callbacks
    assert type(first) is CheckpointCallback and all(type(one) is Counting for one in others)
    assert [(one.every, one._tags, one.name) for one in others] == [
        (4, ["a", "1"], "7"),
        (1, None, "x"),
        (5, None, "8"),
    ]
    assert found.origins["callbacks"].startswith("file ") and found.origins["callbacks.3"] == "command line"
    assert command("--callbacks=[Counting]").callbacks[0].every == 1
    (other,) = read(
        tmp_path, "callbacks: [CheckpointCallback]", words=["--callbacks.0.class_path=Counting"]
    ).config.callbacks
    assert type(other) is Counting
    text = "callbacks: [{class_path: Picky, init_args: {needed: 10}}, Counting]"
    with pytest.raises(ConfigError, match=r"^callbacks.0 in file .*0.yaml, line 1 is invalid: needed 10 is above 9"):
        read(tmp_path, text, words=["--callbacks.1.every=4"])
    assert to_plain(others[0]) == {
        "class_path": "tests.unit.test_configuration.Counting",
        "init_args": {"every": 4, "tags": ["a", "1"], "name": "7"},
    }


# Mistakes -------------------------------------------------------------------------------------------------------------

WRONG_FILES = [
    ("training:\n  epoch: 3\n", "training.epoch @2 is unknown; did you mean training.epochs?"),
    ("launch: {isolate: true}", "launch.isolate @1 is unknown; the trainer of a configuration keeps its cells apart"),
    ("trainin: {epochs: 3}", "trainin @1 is unknown; did you mean training?"),
    ("epochs: 3", "epochs @1 is unknown; did you mean training.epochs?"),
    ("optimizer: {lrr: 3}", "optimizer.lrr @1 is unknown; did you mean optimizer.lr?"),
    ("stages:\n- {width: 1}\n- {widht: 2}", "stages.1.widht @3 is unknown; did you mean stages.1.width?"),
    ("processes: 3", "processes @1 is unknown; did you mean launch.processes?"),
    ("launch: {process: 3}", "launch.process @1 is unknown; did you mean launch.processes?"),
    ("training: 3", "training @1 is 3, but it is a section; give some of its keys: batch_size,"),
    ("training: {epochs: '3'}", "training.epochs @1 is '3', but int is expected; leave out the quotes"),
    ("training:\n  epochs: 3.0", "training.epochs @2 is 3.0, but int is expected"),
    ("training: {epochs: true}", "training.epochs @1 is True, but int is expected"),
    ("training: {epochs: null}", "training.epochs @1 is None, but int is expected"),
    ("ratio: .nan", "ratio @1 is nan, but float is expected; nan is no number"),
    ("training: {epochs: .inf}", "training.epochs @1 is inf, but int is expected"),
    ("title: 3", "title @1 is 3, but str is expected; put it in quotes"),
    ("is_on: yes", "is_on @1 is 'yes', but bool is expected; write true or false"),
    ("sizes: [2, x]", "sizes.1 @1 is 'x', but int is expected"),
    ("pair: [1]", "pair @1 is [1], but tuple[int, str] is expected; it has 1 items"),
    ("color: BLUE", "color @1 is 'BLUE', but RED or GREEN is expected"),
    ("optimizer: {kind: adm}", "optimizer.kind @1 is 'adm', but 'adam' or 'sgd' is expected; did you"),
    ("words: a", "words @1 is 'a', but list[str] is expected; write a list in brackets"),
    ("counts: {a: x}", "counts.a @1 is 'x', but int is expected"),
    ("layer: torch.nn.Linea", "layer @1 is 'torch.nn.Linea', but type or null is expected; module 'torch.nn' has no"),
    ("layer: Linear", "layer @1 is 'Linear', but type or null is expected; there is no type 'Linear'; give the dotted"),
    ("optimizer: {lr: -1}", "optimizer: lr -1.0 is not above 0 (optimizer.lr: file config.yaml)"),
    ("training: {epochs: 0}", "training.epochs must be a positive integer, got 0 (training.epochs: file config.yaml)"),
    ("launch: {processes: 0}", "launch.processes must be a positive integer, got 0; give such a number, or leave it"),
    (
        "callbacks: [LearningRateMonitor]",
        "there is no LearningRateMonitor any more; leave it out, and write self.log_sc",
    ),
    (
        "callbacks: [{class_path: xffl.training.callbacks.ModelSummaryCallback, init_args: {depth: 3}}]",
        "there is no xffl.training.callbacks.ModelSummaryCallback any more; leave it out, and write print",
    ),
    (
        "callbacks: [Countin]",
        "callbacks.0 @1 is 'Countin', but Callback is expected; there is no Callback 'Countin' (did you "
        "mean 'Counting'?); choose one of ",
    ),
    ("callbacks: [{class_path: Counting, init_args: {evry: 3}}]", "Counting has no argument evry; did you mean eve"),
    (
        "callbacks:\n  - class_path: Counting\n    init_args: {every: x}",
        "callbacks.0 @1 is invalid: every of Counting is 'x', but int is expected",
    ),
    ("callbacks: [{class_path: Picky, init_args: {needed: 10}}]", "callbacks.0 @1 is invalid: needed 10 is above 9"),
    ("callbacks: [Picky]", "callbacks.0 @1 is 'Picky', but Callback is expected;"),
    ("a: [1\nb: 2\n", "file config.yaml is not valid YAML: line 2, column"),
    ("a:\n\t- 1", "file config.yaml is not valid YAML: line 2, column 1"),
    ("title: a\nmodel_dim: 1\ntitle: b", "file config.yaml, line 3: title is given twice"),
    ("- 1", "file config.yaml holds [1]; write keys and values"),
    (
        "x: !!python/object/apply:os.system [echo]",
        "file config.yaml is not valid YAML: line 1, column 4: could not determin",
    ),
    ("? [1]\n: 2", "file config.yaml is not valid YAML: line 1, column 3: found unhashable key"),
    (
        "distributed:\n  device_parameters:\n    comm: {init_timeout: 3}",
        "distributed.device_parameters.comm.init_timeout @3 is unknown; did you mean distributed.device_parameters",
    ),
    ("distributed: {wrap: [torch.nn.Linea]}", "distributed.wrap.0 @1 is 'torch.nn.Linea', but type is expected; modu"),
    ("dtype: bfloat61", "dtype @1 is 'bfloat61', but dtype is expected;"),
    ("device: toaster", "device @1 is 'toaster', but device or null is expected;"),
    ("either: 1.5", "either @1 is 1.5, but int or str is expected; put it in quotes"),
    ("extra: 3", "extra @1 is 3, but dict[str, Any] is expected"),
    ("counts: {1: 1}", "counts.1 @1 is 1, but str is expected; put it in quotes"),
    ("tags: 3", "tags @1 is 3, but set[int] is expected; write a list in brackets"),
    ("stages: [3]", "stages.0 @1 is 3, but Stage is expected"),
    ("model_dim: 12:30", "model_dim @1 is '12:30', but int is expected"),
    ("layer: math.pi", "layer @1 is 'math.pi', but type or null is expected;"),
    ("callbacks: [{init_args: {}}]", "callbacks.0 @1 is invalid: class_path is missing; give the class"),
    ("callbacks: [{class_path: nowhere.Mine}]", "callbacks.0 @1 is invalid: Problem with given class_path 'nowhere.M"),
    ("callbacks: [null]", "callbacks.0 @1 is None, but Callback is expected"),
    ("slurm: {node: 3}", "slurm.node @1 is unknown; did you mean slurm.nodes?"),
    ("a: *nothing", "file config.yaml is not valid YAML: line 1, column 4: found undefined alias 'nothing'"),
    ("trainer: 3", "trainer is 3 (file config.yaml); give the dotted path of a class"),
    ("trainer: ../.train", "trainer is '../.train' (file config.yaml); give the dotted path of a class"),
]
WRONG_WORDS = [
    ("--training.epoch 3", "training.epoch @ is unknown; did you mean training.epochs?"),
    ("--training.epochs.x 3", "training.epochs.x @ is unknown"),
    ("--training.epochs three", "training.epochs @ is 'three', but int is expected"),
    ("--training.epochs 3.0", "training.epochs @ is 3.0, but int is expected"),
    ("--training.epochs=", "training.epochs @ is '', but int is expected"),
    ("--training.epochs", "--training.epochs @ has no value; write --training.epochs VALUE"),
    ("--title --ratio 3", "--title @ has no value"),
    ("-x 3", "'-x' @ is not an option; write --key value"),
    ("x", "'x' @ is not an option"),
    ("--", "'--' @ is not an option"),
    ("--=3", "'--=3' @ is not an option"),
    ("--sizes 2,2", "sizes @ is '2,2', but int or tuple[int, ...] or null is expected; write a list"),
    ("--title+=x", "--title+ adds to a list, which that is not; leave the + out"),
    ("--training+=x", "--training+ adds to a list"),
    ("--callbacks.every=3", "callbacks.every @ is unknown; there are 0 items"),
    ("--callbacks.0.every=3", "callbacks.0 @ is unknown; there are 0 items, counted from 0"),
    ("--optimizer.lr 0", "optimizer: lr 0.0 is not above 0 (optimizer.lr: command line)"),
    ("--optimizer 3", "optimizer @ is 3, but it is a section; give some of its keys: lr, kind"),
    ("--training null", "training @ is None, but it is a section"),
    ("--config nowhere.yaml", "file nowhere.yaml cannot be read: No such file or directory"),
    ("--federation.delay 2", "federation.delay 2 is for rounds, and there are none; give federation.every, or leave"),
    ("--federation.alpha 0.5", "federation.alpha 0.5 is for rounds, and there are none; give federation.every, or le"),
    ("--federation.client fedprox:mu=0.1", "federation.client 'fedprox:mu=0.1' is for rounds, and there are none; gi"),
    ("--federation.aggregator.codec int8", "federation.aggregator {'codec': 'int8'} is for rounds, and there are non"),
    ("--training.validate_every_rounds 2", "training.validate_every_rounds 2 is for rounds, and there are none; give"),
    ("--federation.every 0", "federation: every must be a positive integer, got 0; give the local steps between two"),
    (
        "--federation.every balanced:evry=3",
        "federation: schedule 'balanced' has no option evry (did you mean 'every'?); there are: every",
    ),
    ("--federation.algorithm diloco --federation.every -1", "federation: every must be a positive integer, got -1"),
    (
        "--federation.algorithm fedadm",
        "federation: algorithm 'fedadm' is unknown (did you mean 'fedadam'?); choose one of fedavg,",
    ),
    ("--federation.every 9 --federation.delay 9", "federation: delay must be an integer from 0 to 8, got 9"),
    ("--federation.every 9 --federation.delay -1", "federation: delay must be an integer from 0 to 8, got -1"),
    ("--federation.algorithm fedavg", "federation: every must be a positive integer, got None; give the local steps"),
    (
        "--federation.algorithm fedavg --federation.every 3 --federation.delay 3",
        "delay must be an integer from 0 to 2, got 3; give loc",
    ),
    ("--federation.every 9 --federation.alpha 0.5", "alpha 0.5 is for delayed rounds, but delay is 0; give a delay"),
    (
        "--federation.algorithm fedavg --federation.every 3 --federation.alpha 2",
        "federation: alpha must be a number >= 0 and < 1, got 2.0",
    ),
    (
        "--federation.every 9 --federation.client fedprix",
        "federation: client 'fedprix' is unknown (did you mean 'fedprox'?); choose one of",
    ),
    ("--federation.algorithm fedavg --federation.every 9 --federation.client fedprix", "client 'fedprix' is unknown"),
    ("--federation.every 9 --federation.aggregator.codek int8", "aggregator option must be one of 'policies', 'bucke"),
    (
        "--federation.algorithm diloco --federation.every 3 --federation.aggregator.codek int8",
        "'gradients_reduced_by_caller', got 'codek' (did you mean 'codec'?",
    ),
    (
        "--federation.every 9 --federation.aggregator.levels '[{evry: 2}]'",
        "federation: a level has no evry (did you mean 'every'?); choose from",
    ),
    ("--data.workers -1", "data.workers must be an integer of 0 or more, got -1 (data.workers: command line)"),
    ("--data.prefetch_factor 0", "data.prefetch_factor must be a positive integer, got 0"),
    ("--data.validation_batch_size 0", "data.validation_batch_size must be a positive integer, got 0"),
    ("--training '{epochs: x}'", "training.epochs @ is 'x', but int is expected"),
    ("--training '{'", "training @ is '{', but it is a section; give some of its keys: batch_size,"),
    ("--words '['", "words @ is '[', but list[str] is expected; write a list in brackets"),
    ("--stages+='{widht: 3}'", "stages.0.widht @ is unknown; did you mean stages.0.width?"),
    ("--callbacks+=Counting --callbacks.evry 3", "callbacks.0 @ is invalid: Counting has no argument evry; did you"),
    ("--callbacks+=Counting --callbacks.1.every 3", "callbacks.1 @ is unknown; there are 1 items, counted from 0"),
    ("--extra+=3", "--extra+ adds to a list, which that is not; leave the + out"),
    ("--anything+=3 --anything.x 3", "anything.0 @ is 3, and has no x"),
    ("--trainer tests.unit.test_configuration.Nothing", "trainer tests.unit.test_configuration.Nothing ("),
    ("--trainer null", "trainer is 'null' (command line); give the dotted path of a class"),
]
WRONG_VARIABLES = [
    ("XFFL_TRAINING__EPOCH=x", "training.epoch @ is unknown; did you mean training.ep"),
    ("XFFL_TRAINIG__EPOCHS=x", "trainig.epochs @ is unknown; did you mean training."),
    ("XFFL_MODEL_DIMM=x", "model_dimm @ is unknown; did you mean model_dim?"),
    ("XFFL__WIDTH=x", "width @ is unknown"),
    ("XFFL_TRAINING__EPOCHS=x", "training.epochs @ is 'x', but int is expected"),
    ("XFFL_TRAINING={epoch: 3}", "training.epoch @ is unknown; did you mean training.epochs?"),
    ("XFFL_TRAINING=x", "training @ is 'x', but it is a section; give some of its keys: batch_size,"),
    ("XFFL_OPTIMIZER__LR=0", "optimizer: lr 0.0 is not above 0 (optimizer.lr: environment XFFL_OPTIMIZER__LR)"),
    ("XFFL_CALLBACKS=[Countin]", "callbacks.0 @ is 'Countin', but Callback is expected"),
]
WRONG = [("in file config.yaml, line ", *one) for one in WRONG_FILES]
WRONG += [("on the command line", *one) for one in WRONG_WORDS]
WRONG += [("in environment ", *one) for one in WRONG_VARIABLES]
"""What ``@`` stands for in messages, what is given, and the message."""


@pytest.mark.parametrize(("place", "text", "message"), WRONG)
def test_mistakes_are_one_line(
    place: str,
    text: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The line names the key, where it comes from and what is allowed; nothing is started, and the exit code is 2."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    variable, _, value = text.partition("=") if place.startswith("in env") else ("", "", "")
    (tmp_path / "config.yaml").write_text(text if place.startswith("in file") else "", encoding="utf-8")
    if variable:
        monkeypatch.setenv(variable, value)
    trainer = [] if "trainer" in text else ["--trainer", "tests.unit.test_configuration.MyTrainer"]
    words = shlex.split(text) if place.startswith("on") else []
    assert command_line(["exec", "config.yaml", *trainer, *words]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1 and told.err.startswith("xffl: ConfigError: "), told.err
    assert message.replace("@", f"{place}{variable}") in told.err


def test_other_variables_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {
        "XFFL_FEDERATED": "2,2",
        "XFFL_HSDP": "1",
        "XFFL_IFNAME": "lo",
        "XFFL_SHARED": "/x",
        "TRAINING__EPOCHS": "x",
    }
    assert to_plain(read_configuration(MyConfig, (), (), others).config) == to_plain(command())
    assert requested_settings(others) == {"XFFL_SHARED": "/x"}
    monkeypatch.setenv("XFFL_RATIO", "0.75")  # what is read where nothing is given
    assert read_configuration(MyConfig).config.ratio == 0.75
    assert read_configuration(MyConfig, environ={"XFFL__MODEL_DIM": "3"}).config.model_dim == 3


def test_configurations_that_cannot_be() -> None:
    @dataclass
    class Needs:
        size: int
        launched: bool = False

    with pytest.raises(ConfigError, match="size is missing; give it in a file, or --size VALUE"):
        read_configuration(Needs, (), (), {})
    assert read_configuration(Needs, (), ("--size=3",), {}).config == Needs(3)

    @dataclass
    class Reserved:
        launch: int = 3

    with pytest.raises(ConfigError, match="field 'launch' of .*Reserved is a word of xffl exec"):
        read_configuration(Reserved, (), (), {})
    with pytest.raises(ConfigError, match="must be a dataclass"):
        read_configuration(int, (), (), {})

    @dataclass
    class Unknown:
        size: Nothing = 3  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(ConfigError, match="cannot be resolved: name 'Nothing' is not defined"):
        read_configuration(Unknown, (), (), {})


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (
            "--federation.every 9 --federation.delay 8 --federation.alpha 0.5 --federation.aggregator.codec int8",
            {"every": 9, "delay": 8, "alpha": 0.5, "aggregator": {"codec": "int8"}},
        ),
        (
            "--federation.every 4 --federation.algorithm streaming_diloco --training.validate_every_rounds 3",
            {"every": 4, "algorithm": "streaming_diloco"},
        ),
        (
            "--federation.every 3 --federation.algorithm fedprox:mu=0.1",
            {"every": 3, "algorithm": "fedprox:mu=0.1"},
        ),
        (
            "--federation.every balanced:every=3 --federation.client scaffold",
            {"every": "balanced:every=3", "client": "scaffold"},
        ),
        (
            "--federation.every 9 --federation.aggregator.levels '[{}, {every: 2, groups: [2]}]'",
            {"every": 9, "aggregator": {"levels": [{}, {"every": 2, "groups": [2]}]}},
        ),
        ("--federation.weight equal", {"weight": "equal"}),
    ],
)
def test_rounds_that_can_be_meant(words: str, given: dict[str, object]) -> None:
    found = command(*shlex.split(words)).federation
    assert found == FederationConfig(**given)  # type: ignore[arg-type]


# There and back -------------------------------------------------------------------------------------------------------


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    text = """
trainer: train.T
launch: {processes: 4, federated: [2, 2], timeout_s: 1e3}
distributed: {strategy: fsdp, wrap: [torch.nn.Linear], device_parameters: {dp_shard: auto, comm: {}}}
training: {mixed_precision: no, max_grad_norm: 1}
extra: {a: 'no', b: 1e-5, c: [null, '1e-3', {d: '12:30'}], é: "x\\ny"}
optimizer: {lr: 1e-4}
color: GREEN
sizes: [2, 2]
either: '3'
dtype: float16
stages: [{name: 'null'}]
callbacks: [{class_path: Counting, init_args: {every: 3, tags: ['1']}}]
"""
    found = read(tmp_path, text, words=["--extra.x=1", "--title=# it's\n", "--where", "a b"])
    written = print_text(found)
    assert "epochs: 1  # default" in written and 'title: "# it\'s\\n"  # command line' in written
    again = read(tmp_path, written)
    callbacks = found.config.callbacks
    assert to_plain(again.config) == to_plain(found.config)
    again.config.callbacks = callbacks  # objects without equality
    assert again.config == found.config and again.launch == found.launch and again.trainer == found.trainer
    # What the run's folder keeps, and any other YAML reader sees the same.
    plain = to_plain(found.config)
    assert to_plain(read(tmp_path, write_yaml(plain)).config) == plain
    assert to_plain(read(tmp_path, json.dumps(plain)).config) == plain
    assert yaml.safe_load(write_yaml(plain)) == plain


class Forgetful(Callback):
    """A callback that does not keep its argument."""

    def __init__(self, every: int) -> None:
        self.doubled = 2 * every


def test_ranks_get_what_the_command_has_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    text = """
trainer: tests.unit.test_configuration.MyTrainer
optimizer: {}
anything: {1: '1', a: [1e-3, "\\n\\0", .inf]}
callbacks: [{class_path: Forgetful, init_args: {every: 3}}]
experiment: {name: é}
"""
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    words = ["--extra.b=2", "--callbacks+=Forgetful", "--callbacks.every=4", "--tuned.lr=1e-5", "--slurm.nodes=2"]
    _, resolved = read_job(str(tmp_path / "config.yaml"), words, {"XFFL_TITLE": "3", "XFFL_NOTE": "null"})
    word = write_resolved(str(tmp_path / "config.yaml"), resolved)
    monkeypatch.setenv("XFFL_TITLE", "other")
    (tmp_path / "config.yaml").write_text("changed since")
    trainer, again = read_resolved(word)
    assert trainer is MyTrainer and print_text(again) == print_text(resolved)
    assert [one.doubled for one in again.config.callbacks] == [6, 8]
    assert again.config.anything == {1: "1", "a": [1e-3, "\n\0", float("inf")]}
    assert (again.config.extra, again.config.title) == ({"b": 2}, "3")
    assert (again.launch, again.slurm, again.origins) == (resolved.launch, resolved.slurm, resolved.origins)
    long = replace(resolved, given={"title": random.Random(0).randbytes(200_000).hex()})
    with pytest.raises(ConfigError, match="keep long lists in a file that the trainer reads"):
        write_resolved("config.yaml", long)


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.sampled_from(HOSTILE)
trees = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(trees)
def test_yaml_reads_back_by_both_versions(tree: Any) -> None:
    written = write_yaml({"a": tree})
    assert parse_yaml(written) == {"a": tree} and yaml.safe_load(written) == {"a": tree}


@given(st.text())
def test_a_text_takes_one_line(text: str) -> None:
    assert write_yaml({"a": text}).count("\n") == 1


def test_help_tells_every_key() -> None:
    told = help_text(MyConfig, "xffl exec config.yaml")
    words = " ".join(told.split())
    for key in command_keys():
        assert f"--{key} " in words, key
    assert "--model_dim int Width of Model, in features. (default: 768)" in words
    assert "--optimizer.lr float Step size, in 100 % of cases above 0. (default: 0.001)" in words
    assert "--tuned.lr float Step size, in 100 % of cases above 0. (default: 0.25)" in words
    assert "--experiment.name str The run's name. (default: digits)" in words
    assert "--optimizer.kind 'adam' or 'sgd' Which one. (default: adam)" in words


def command_keys() -> list[str]:
    words = ["--optimizer={}", "--distributed.device_parameters={}"]
    return list(read_configuration(MyConfig, (), words, {}).origins)


# Trainers and their start ---------------------------------------------------------------------------------------------

TRAINER = """
from __future__ import annotations
from dataclasses import dataclass
from xffl.training.config.dataclasses import BaseTrainerConfig

@dataclass(kw_only=True)
class Config(BaseTrainerConfig):
    width: int = 3

class Base:
    config: BaseTrainerConfig
    def __init__(self, config, *, callbacks=(), origins=None):
        self.config, self.origins = config, origins

class Trainer(Base):
    config: Config
    def fit(self):
        return (self.config.width, self.origins["width"])

class Bare:
    def fit(self): ...

class Hidden(Base):
    config: "Nowhere"
    def fit(self): ...

value = 3
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Return a function that writes a configuration beside a trainer, and gives its path."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mytrain", raising=False)
    (tmp_path / "mytrain.py").write_text(TRAINER)

    def write(text: str) -> str:
        (tmp_path / "config.yaml").write_text(text)
        return str(tmp_path / "config.yaml")

    yield write
    sys.modules.pop("mytrain", None)


def test_jobs_and_their_trainers(project: Callable[[str], str], tmp_path: Path) -> None:
    file = project("trainer: mytrain.Trainer\nwidth: 4\nlaunch: {processes: 2}")
    trainer, resolved = read_job(file, ["--width", "5"], {})
    assert (trainer.__name__, resolved.config.width, resolved.launch.processes) == ("Trainer", 5, 2)
    assert trainer(resolved.config, origins=resolved.origins).fit() == (5, "command line")
    assert config_class(trainer).__name__ == "Config"
    assert sys.path[0] == str(tmp_path)
    bare = project("trainer: mytrain.Nothing")
    assert read_job(bare, [], {"XFFL_TRAINER": "mytrain.Trainer"})[0] is trainer
    assert read_job(bare, ["--trainer=mytrain.Trainer"], {})[1].origins["trainer"] == "command line"
    for name, message in (
        (
            "mytrain.Nothing",
            r"trainer mytrain.Nothing \(command line\): module mytrain has no such name; name a class with",
        ),
        ("mytrain.value", "module mytrain has 3 there; name a class with a method fit"),
        ("mytran.Trainer", "there is no module 'mytran' in .*; did you mean mytrain?"),
        ("mytrain.Trainr", "has no such name; did you mean mytrain.Trainer?"),
        ("Trainer", r"trainer is 'Trainer' \(command line\); give the dotted path of a class"),
        ("mytrain.Bare", "trainer Bare does not say what its configuration is"),
        ("mytrain.Hidden", "annotation config: .*Nowhere.* of Hidden cannot be resolved"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_job(file, ["--trainer", name], {})
    with pytest.raises(ConfigError, match="names no trainer; write trainer: train.MyTrainer"):
        read_job(project("width: 3"), [], {})
    with pytest.raises(ConfigError, match="widht in file .* line 2 is unknown; did you mean width?"):
        read_job(project("trainer: mytrain.Trainer\nwidht: 3"), [], {})
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):
        read_job(file, ["--trainer", "broken.Trainer"], {})


def test_a_script_of_ones_own(
    project: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = read_job(project("trainer: mytrain.Trainer"), [], {})[0]
    assert main(trainer, ["--width=7"]) == (7, "command line")
    assert main(trainer, ["--config", project("width: 9\nlaunch: {processes: 1}")])[0] == 9
    assert main(trainer, ["--print_config", "--width=2"]) is None
    assert "\nwidth: 2  # command line\n" in capsys.readouterr().out
    assert main(trainer, ["--help"]) is None and "--width int" in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        main(trainer, ["--widht=7"])
    told = capsys.readouterr()
    assert left.value.code == 2 and told.out == ""
    assert told.err == "xffl: ConfigError: widht on the command line is unknown; did you mean width?\n"
    for words, message in (
        ("--launch.processes=2", "ConfigError: launch.processes is 2 (command line), but there is 1; start 2"),
        ("--launch.federated=[1,1]", "TopologyError: federated sizes (1, 1) sum to 2, but the world has 1"),
    ):
        with pytest.raises(SystemExit) as left:
            main(trainer, [words])
        told = capsys.readouterr()
        assert left.value.code == 2 and told.err.startswith(f"xffl: {message}") and told.err.count("\n") == 1, told.err

    def fail(self: Any) -> None:
        raise ConfigError("found while training")

    monkeypatch.setattr(trainer, "fit", fail)
    with pytest.raises(ConfigError, match="found while training"):  # with its traceback
        main(trainer, [])


def test_the_cells_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(origin: str, launch: Any, world: int = 4, config: Any = None, **options: Any) -> Any:
        resolved = Resolved(config, {"launch.federated": origin}, launch=LaunchConfig(federated=launch, hsdp=1))
        return choose_federation(resolved, world, **options)

    assert choose("file x", (2, 2)) == ((2, 2), 1)
    assert choose("file x", (2, 2), federated=(3, 1), hsdp=1) == ((3, 1), 1)
    monkeypatch.setenv("XFFL_FEDERATED", "1,3")
    assert choose("file x", (2, 2))[0] == (1, 3)
    assert choose("command line", (2, 2))[0] == (2, 2)
    assert choose("environment XFFL_LAUNCH__FEDERATED", (2, 2))[0] == (2, 2)
    assert choose("command line", (2, 2), federated=4)[0] == 4
    monkeypatch.delenv("XFFL_FEDERATED")
    config = BaseTrainerConfig(distributed=DistributedConfig(federated=2))
    assert choose("default", None, config=config) == (None, 1)
    assert choose("file x", (2, 2), config=config)[0] == (2, 2)  # the same cells in other words
    with pytest.raises(ConfigError, match=r"by launch.federated \(file x\), but distributed.federated is 2"):
        choose("file x", (3, 1), config=config)
    for wrong, sources in (
        ({"launch": (2, 3)}, r"launch.federated \(file x\) and launch.hsdp \(default\)"),
        ({"launch": (2, 2), "hsdp": 3}, r"launch.federated \(file x\) and --hsdp"),
        ({"launch": (2, 3), "federated": (3, 3), "hsdp": 1}, "--federated and --hsdp"),
        ({"launch": None, "world": 3, "config": config}, r"distributed.federated and launch.hsdp \(default\)"),
    ):
        with pytest.raises(TopologyError, match=rf"\(asked for by {sources}\)$"):
            choose("file x", **wrong)
    for sizes, hsdp in ((None, None), ((2, 2), 1), (4, None), (None, 2)):
        assert requested_federation(federation_variables(sizes, hsdp)) == (sizes, hsdp)


# Projects -------------------------------------------------------------------------------------------------------------


def init(name: str, template: str | None = None) -> int:
    words = ["init", name] + ([] if template is None else ["--template", template])
    return command_line(words)


@pytest.mark.parametrize("template", ["digits", "language_model"])
def test_init_writes_a_project_that_can_be_read(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("torchmetrics")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "train", raising=False)
    name = 'it\'s a "d\u00e9mo": #1'
    assert init(f"new/{name}", template) == 0
    folder = tmp_path / "new" / name
    assert sorted(one.name for one in folder.iterdir()) == [".gitignore", "README.md", "config.yaml", "train.py"]
    assert (folder / "README.md").read_text().startswith(f"# {name}\n")
    code = [line for line in (folder / "train.py").read_text().splitlines() if line.strip()]
    classes = [place for place, line in enumerate(code) if line.startswith("class ") and "Trainer(" in line]
    assert len(classes) == 1 and len(code) - classes[0] < 60
    trainer, resolved = read_job(str(folder / "config.yaml"), [], {})
    monkeypatch.delitem(sys.modules, "train")
    assert resolved.trainer == f"train.{trainer.__name__}" and resolved.config.experiment.name == name
    assert (resolved.launch.processes, resolved.launch.federated) == (4, (2, 2))
    assert resolved.config.federation.every and [type(one).__name__ for one in resolved.config.callbacks]
    # A second time it would overwrite what is there.
    capsys.readouterr()
    (folder / "train.py").write_text("mine")
    assert init(f"new/{name}", template) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert (folder / "train.py").read_text() == "mine"


def test_init_says_what_it_cannot_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert init("demo", "nothing") == 2 and not (tmp_path / "demo").exists()
    assert "--template must be one of 'digits', 'language_model', got 'nothing'" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert init("file") == 2 and init("/") == 2 and init("file/below") == 2
    (tmp_path / "empty").mkdir()
    assert init("empty") == 0
    monkeypatch.chdir(tmp_path / "empty")
    assert init(".") == 2  # it is not empty any more


@pytest.mark.parametrize("template", ["digits", "language_model"])
def test_to_read_a_project_takes_no_slow_imports(template: str, tmp_path: Path) -> None:
    """The command reads the trainer before it starts ranks, and for ``--print_config`` and ``--help`` alone."""
    code = (
        "import sys\n"
        "from xffl.cli.main import main\n"
        f"assert main(['init', 'demo', '--template', {template!r}]) == 0\n"
        "assert main(['exec', 'demo/config.yaml', '--print_config']) == 0\n"
        "slow = ('torch._dynamo', 'torchmetrics', 'transformers', 'matplotlib')\n"
        "sys.exit(' '.join(name for name in slow if name in sys.modules) or 0)"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "trainer: train." in ran.stdout


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "train", raising=False)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert init("demo") == 0
    assert install_command("examples") in Path("demo/README.md").read_text().splitlines()
    with pytest.raises(ConfigError, match=f"train.py needs scikit-learn, .*{re.escape(install_command('examples'))}"):
        read_job("demo/config.yaml", [], {})
    monkeypatch.delitem(sys.modules, "train", raising=False)


def test_variables_of_the_package_are_no_settings() -> None:
    own = ["BIND", "CONTROL_IFNAME", "FEDERATED", "HOST", "HSDP", "IFNAME", "PYTHON", "SRUN", "SSH", "TEMPLATES"]
    assert requested_settings({f"XFFL_{name}": "x" for name in own}) == {}


def test_a_mixin_checks_its_own_section() -> None:
    @dataclass(kw_only=True)
    class Mixin:
        width: int = 1

        def __post_init__(self) -> None:
            if self.width < 1:
                raise ConfigError("width")

    @dataclass(kw_only=True)
    class Config(BaseTrainerConfig, Mixin): ...

    assert Config().width == 1
    with pytest.raises(ConfigError, match="width"):
        Config(width=0)
