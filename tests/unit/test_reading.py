"""Values that others wrote: what is read, and what is refused by name before it costs time or fails elsewhere."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from xffl.checks import number, shown
from xffl.errors import CheckpointError, ConfigError
from xffl.files import read_fields, sealed_json
from xffl.json_text import parse_json
from xffl.reading import Fields
from xffl.yaml_text import parse_yaml, write_yaml

DIGITS = "9" * 5000
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {k: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not JSON"),
        ('{"a": 1', "not JSON"),
        (b"\xff\xfe{", "utf-8"),
        (f'{{"a": {DIGITS}}}', "5000 digits"),
        (f'{{"a": -{"9" * 400}}}', "401 digits"),
        ('{"a": 1, "a": 2}', "'a' is given twice"),
        ("[" * 100_000, "nested more than 64 deep"),
        ("[" * 100 + "]" * 100, "nested more than 64 deep"),
        ('{"a": "\\ud800"}', "surrogate"),
    ],
)
def test_json_that_is_refused(text: str | bytes, told: str) -> None:
    """Each has a reason in one line."""
    with pytest.raises(ValueError, match=told):
        parse_json(text)


def test_json_that_is_read() -> None:
    """What the program writes reads back, NaN too unless only finite numbers are wanted."""
    value = {"a": [1, 2.5, None, True, "x"], "b": {"c": "\U0001f600"}, "d": -(2**128)}
    assert parse_json(json.dumps(value)) == value
    assert math.isnan(parse_json("NaN"))
    for text in ("NaN", "-Infinity", "[1e999]"):
        with pytest.raises(ValueError, match="number"):
            parse_json(text, is_finite=True)
    with pytest.raises(ValueError, match="at most 10 are read"):
        parse_json('"0123456789"', limit=10)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (BOMB, "line 6, column 4: a value with its aliases has more than 524288 characters"),
        (MERGES, "aliases has more than"),
        ("a: &a [*a]", "an alias stands inside"),
        ("[" * 5000, "nested more than 64 deep"),
        (f"a: {DIGITS}", "5000 digits"),
        (f"a: 0x{DIGITS}", "digits"),
        ("a: !!bool maybe", "does not fit its type"),
        ("a: !!timestamp x", "does not fit its type"),
        ("a: !!float x", "does not fit its type"),
        ("? [a]\n: 1", "unhashable"),
        ("a: !!python/name:os.system", "could not determine a constructor"),
        ('"\\UFFFFFFFF"', "it is not YAML"),
        ('"\\ud800"', "surrogate"),
        ("a: *b", "undefined alias"),
        ("- 0\n" * 100_000, "line 26214, column 3: there are more than 26214 values"),
        ("a: 1\n--- \nb: 2", "line 2, column 1: but found another document"),
        (b"\xff", "utf-8"),
    ],
)
def test_yaml_that_is_refused(text: str | bytes, told: str) -> None:
    """Each has a reason in one line, and at once."""
    with pytest.raises(ValueError, match=told) as caught:
        parse_yaml(text)
    assert "\n" not in str(caught.value)


def test_yaml_that_is_read() -> None:
    """Rules of YAML 1.2, anchors and merges; what is written reads back."""
    assert parse_yaml("a: &a {x: 1e-3, y: no}\nb: {<<: *a, y: 010}\nc: [*a, 12:30, 0x10, 0o17]") == {
        "a": {"x": 1e-3, "y": "no"},
        "b": {"x": 1e-3, "y": 10},
        "c": [{"x": 1e-3, "y": "no"}, "12:30", 16, 15],
    }
    value = {"a": ["1e-3", "no", "x\ny"], "b": None}
    assert parse_yaml(write_yaml(value)) == value
    assert parse_yaml("") is None


def fields(**values: Any) -> Fields:
    return Fields(values, "file x", error=CheckpointError, hint="delete it")


def test_fields_that_are_read() -> None:
    """Each method returns its type; unknown names are allowed."""
    one = fields(n=3, x=1, ok=True, name="cell", sizes=[1, 2], inner={"deep": [{"rank": 4}]}, loss=math.nan, none=None)
    assert (one.integer("n"), one.number("x", above=0), one.boolean("ok"), one.text("name", 4)) == (
        3,
        1.0,
        True,
        "cell",
    )
    assert one.list_of("sizes", 2, Fields.integer, 1) == [1, 2]
    assert [item.integer("rank") for item in one.mapping("inner").list_of("deep", 9, Fields.mapping)] == [4]
    assert one.choice("name", ("cell", "rank")) == "cell"
    assert math.isnan(one.real("loss"))
    assert one.optional("none", Fields.integer) is None
    assert one.optional("absent", Fields.text, 5) is None
    assert fields(counts={"a": 1, "b": 2}).mapping_of("counts", 2, Fields.integer) == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("read", "told"),
    [
        (lambda one: one.integer("absent"), r"absent of file x is missing; delete it"),
        (lambda one: one.integer("nam"), r"\(there is 'name'\)"),
        (lambda one: one.integer("text"), r"text of file x must be an integer from 0 to \d+, got '3'; delete it"),
        (lambda one: one.integer("true"), r"got True"),
        (lambda one: one.integer("huge"), r"got an integer of some 5001 digits"),
        (lambda one: one.integer("n", 5, 6), r"must be an integer from 5 to 6, got 3"),
        (lambda one: one.number("huge"), r"must be a finite number, got an integer of some 5001 digits"),
        (lambda one: one.number("nan"), r"must be a finite number, got nan"),
        (lambda one: one.number("text"), r"must be a finite number, got '3'"),
        (lambda one: one.real("true"), r"must be a number, got True"),
        (lambda one: one.boolean("n"), r"must be true or false, got 3"),
        (lambda one: one.text("n"), r"must be a text, got 3"),
        (lambda one: one.text("nul"), r"must be a text, got"),
        (lambda one: one.text("empty", may_be_empty=False), r"a text that is not empty, got ''"),
        (lambda one: one.text("long", 10), r"a text of 50000 characters; at most 10 are read"),
        (lambda one: one.choice("long", ("a", "b")), r"must be one of 'a', 'b', got 'x{199}\.\.\.; delete it"),
        (lambda one: one.mapping("n"), r"n of file x must be a mapping of names to values, got 3"),
        (lambda one: one.mapping("odd"), r"must have texts as names, got 1"),
        (lambda one: one.list_of("text", 9, Fields.integer), r"must be a list, got '3'"),
        (lambda one: one.list_of("sizes", 2, Fields.integer), r"has 3 items; at most 2 are read"),
        (lambda one: one.list_of("sizes", 3, Fields.integer), r"sizes\[2\] of file x must be .*, got 'x'"),
        (lambda one: one.mapping("deep").mapping("a").integer("b"), r"deep\.a\.b of file x must be"),
        (lambda one: one.mapping_of("deep", 0, Fields.any), r"deep of file x has 1 names; at most 0"),
        (lambda one: one.refuse_others("nam"), r"name of file x is unknown; did you mean 'nam'\?"),
    ],
)
def test_fields_that_are_refused(read: Any, told: str) -> None:
    """The class that was asked for, with the place, the rule, the value and the remedy, and no endless line."""
    one = fields(
        name=1,
        n=3,
        text="3",
        true=True,
        nan=math.nan,
        huge=int("9" * 4000) * 10**1000,
        nul="a\0b",
        empty="",
        long="x" * 50_000,
        odd={1: 2},
        sizes=[1, 2, "x"],
        deep={"a": {"b": None}},
    )
    with pytest.raises(CheckpointError, match=told) as caught:
        read(one)
    assert len(str(caught.value)) < 400
    assert str(caught.value).endswith("delete it")


def test_a_value_that_is_no_mapping() -> None:
    """What was parsed may be anything."""
    for value in (None, [1], "text", 3, True, {1: 2}):
        with pytest.raises(ConfigError, match="file x must "):
            Fields(value, "file x")


def test_files_of_fields(tmp_path: Path) -> None:
    """Whatever is wrong with a file is one error with its path."""
    file = tmp_path / "a.json"
    file.write_text(sealed_json({"round": 3}))
    assert read_fields(file).integer("round") == 3
    assert len(read_fields(file, limit=file.stat().st_size)) == 2
    cases: list[tuple[Path, str]] = [(tmp_path, "it is a folder"), (tmp_path / "none", "No such file")]
    for name, content in {
        "empty": b"",
        "list": b"[]",
        "bytes": b"\xff",
        "digits": f'{{"a": {DIGITS}}}'.encode(),
    }.items():
        (tmp_path / name).write_bytes(content)
        cases.append((tmp_path / name, ""))
    os.mkfifo(tmp_path / "fifo")
    cases.append((tmp_path / "fifo", "not a regular file"))
    os.truncate(tmp_path / "empty", 2**40)
    cases.append((tmp_path / "empty", "at most 268435456 are read"))
    for path, told in cases:
        with pytest.raises(CheckpointError, match=rf"file {path} .*{told}.*give another"):
            read_fields(path, error=CheckpointError, hint="give another")


def test_numbers_beyond_floats_are_shown() -> None:
    """An error about a number is no second error."""
    huge = 10**5000
    with pytest.raises(ConfigError, match="must be a finite number, got an integer of some 5001 digits"):
        number("rate", huge)
    assert shown([huge]) == "a list that cannot be shown"
    assert shown("x" * 300) == "'" + "x" * 199 + "..."
    assert shown({"a": 1}) == "{'a': 1}"
