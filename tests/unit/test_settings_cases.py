"""Each row of the table in ``xffl.training.config.settings``: what jsonargparse alone makes of an input, and xffl.

A row whose first half fails has become unnecessary: jsonargparse does it, too, and the code for it can go.
"""

from __future__ import annotations

import inspect
import re
from argparse import ArgumentError
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from jsonargparse import ArgumentParser

from xffl.errors import ConfigError
from xffl.training.callbacks import Callback
from xffl.training.config import settings
from xffl.training.config.configuration import Resolved, read_configuration


class CallbackOfCase(Callback):
    """A callback of a user's."""

    def __init__(self, every: int = 1) -> None:
        self.every = every


@dataclass(kw_only=True)
class Experiment:
    name: str = "demo"
    folder: str = ""

    def __post_init__(self) -> None:
        self.folder = self.folder or f"runs/{self.name}"


@dataclass(kw_only=True)
class Config:
    epochs: int = 1
    ratio: float = 0.5
    is_on: bool = False
    note: str | None = None
    either: int | str = 1
    extra: dict[str, Any] = field(default_factory=dict)
    words: list[str] = field(default_factory=lambda: ["a"])
    experiment: Experiment = field(default_factory=Experiment)
    callbacks: list[Callback] = field(default_factory=list)


class Case(NamedTuple):
    """An input, the value that jsonargparse alone gives a key, and that of xffl, or the end of its error."""

    name: str
    alone: Callable[[Any], bool]
    ours: Callable[[Any], bool] | str
    text: str = ""
    words: tuple[str, ...] = ()
    variables: Mapping[str, str] = {}


CASES = [
    Case(
        "quoted numbers",
        text="epochs: '3'",
        alone=lambda config: config.epochs == 3,
        ours="epochs in file {file}, line 1 is '3', but int is expected; leave out the quotes",
    ),
    Case(
        "quoted null",
        text="note: 'null'",
        alone=lambda config: config.note is None,
        ours=lambda config: config.note == "null",
    ),
    Case(
        "texts inside mappings",
        text="extra: {version: '1', answer: no}",
        alone=lambda config: config.extra == {"version": 1, "answer": False},
        ours=lambda config: config.extra == {"version": "1", "answer": "no"},
    ),
    Case(
        "several types",
        text="either: '3'",
        alone=lambda config: config.either == 3,
        ours=lambda config: config.either == "3",
    ),
    Case(
        "times",
        text="epochs: 12:30",
        alone=lambda config: config.epochs == 750,
        ours="epochs in file {file}, line 1 is '12:30', but int is expected",
    ),
    Case(
        "octal numbers",
        text="epochs: 010",
        alone=lambda config: config.epochs == 8,
        ours=lambda config: config.epochs == 10,
    ),
    Case(
        "yes and no",
        text="is_on: yes",
        alone=lambda config: config.is_on is True,
        ours="is_on in file {file}, line 1 is 'yes', but bool is expected; write true or false",
    ),
    Case(
        "not a number",
        text="ratio: .nan",
        alone=lambda config: config.ratio != config.ratio,
        ours="ratio in file {file}, line 1 is nan, but float is expected; nan is no number",
    ),
    Case(
        "keys given twice",
        text="epochs: 1\nepochs: 2",
        alone=lambda config: config.epochs == 2,
        ours="file {file}, line 2: epochs is given twice; leave one of them out",
    ),
    Case(
        "misspelled keys",
        text="words: [b]\nepohs: 3",
        alone=lambda error: error == "Group 'config' does not accept option 'epohs'",
        ours="epohs in file {file}, line 2 is unknown; did you mean epochs?",
    ),
    Case(
        "misspelled variables",
        variables={"XFFL_EXPERIMENT__NAM": "other"},
        alone=lambda config: config.experiment.name == "demo",
        ours="experiment.nam in environment XFFL_EXPERIMENT__NAM is unknown; did you mean experiment.name?",
    ),
    Case(
        "values that follow from others",
        text="experiment: {name: other}",
        alone=lambda config: config.experiment == Experiment(name="other", folder="runs/demo"),
        ours=lambda config: config.experiment == Experiment(name="other", folder="runs/other"),
    ),
    Case(
        "items of a list",
        words=("--config.words.0=x",),
        alone=lambda error: "Got value: NestedArg(key='0', val='x')" in error,
        ours=lambda config: config.words == ["x"],
    ),
    Case(
        "objects without a class",
        text="callbacks:\n  - init_args: {every: 2}",
        alone=lambda config: "Not a valid subclass" in config or type(config.callbacks[0]) is Callback,
        ours="callbacks.0 in file {file}, line 1 is invalid: class_path is missing; give the class that init_args are "
        "for",
    ),
    Case(
        "misspelled arguments",
        text="callbacks:\n  - class_path: tests.unit.test_settings_cases.CallbackOfCase\n    init_args: {evry: 2}",
        alone=lambda error: len(error.splitlines()) > 1 and "mean" not in error and "line" not in error,
        ours="callbacks.0 in file {file}, line 1 is invalid: CallbackOfCase has no argument evry; did you mean every?",
    ),
]


def read_alone(case: Case, file: Path | None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what jsonargparse alone makes of a case, or its error."""
    for name, value in case.variables.items():
        monkeypatch.setenv(name.replace("XFFL_", "XFFL_CONFIG__"), value)
    parser = ArgumentParser(exit_on_error=False, default_env=True, env_prefix="XFFL")
    parser.add_argument("--file", action="config")
    parser.add_argument("--config", type=Config, default=Config())
    try:
        found = parser.parse_args([*([] if file is None else [f"--file={file}"]), *case.words])
        return parser.instantiate(found).config
    except ArgumentError as error:
        return str(error)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_jsonargparse_does_not_do(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("config:\n" + "".join(f"  {line}\n" for line in case.text.splitlines()))
    assert case.alone(read_alone(case, file if case.text else None, monkeypatch)), "jsonargparse does it now, too"
    file.write_text(case.text)

    def read() -> Resolved[Config]:
        words = [word.replace("--config.", "--") for word in case.words]
        return read_configuration(Config, [file] if case.text else [], words, case.variables)

    if isinstance(case.ours, str):
        with pytest.raises(ConfigError) as caught:
            read()
        assert str(caught.value) == case.ours.format(file=file)
    else:
        assert case.ours(read().config)


def test_the_origin_of_each_value_is_known(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("epochs: 2")
    found = read_configuration(Config, [tmp_path / "a.yaml"], ["--words.0=x"], {"XFFL_EXPERIMENT__NAME": "b"})
    assert {name: origin for name, origin in found.origins.items() if origin != "default"} == {
        "epochs": f"file {tmp_path / 'a.yaml'}",
        "experiment.name": "environment XFFL_EXPERIMENT__NAME",
        "words": "command line",
    }


def test_each_row_of_the_table_has_a_test() -> None:
    table = re.split(r"^=.*$", inspect.getdoc(settings) or "", flags=re.MULTILINE)[2]
    rows = [line[:30].strip() for line in table.splitlines() if line[:1].isalpha()]
    assert rows == [*(case.name for case in CASES), "origins"]
