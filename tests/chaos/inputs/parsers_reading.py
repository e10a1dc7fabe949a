"""The reader of values itself, which all others are built on."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.inputs.parser import Parser
from xffl.errors import ConfigError
from xffl.files import read_fields, sealed_json
from xffl.reading import Fields
from xffl.yaml_text import parse_yaml

TREE = {"round": 3, "rate": 0.5, "name": "cell", "sizes": [1, 2, 3], "members": [{"rank": 0}, {"rank": 1}], "on": True}
YAML = b"""a: &a {x: 1e-3, y: [1, 2, {z: no}]}
b: {<<: *a, w: 010}
c:
- *a
- |
  some text
- "quoted \\u00e9"
d: {1: 2}
"""


def json_examples(folder: Path) -> list[bytes]:
    return [sealed_json(TREE).encode()]


def read_json(content: bytes, folder: Path) -> None:
    (folder / "x").write_bytes(content)
    fields = read_fields(folder / "x", hint="write it again")
    fields.integer("round")
    fields.number("rate", 0, 1)
    fields.text("name", 100)
    fields.boolean("on")
    fields.list_of("sizes", 1000, Fields.integer)
    for member in fields.list_of("members", 1000, Fields.mapping):
        member.integer("rank", 0, 7)
    fields.optional("loss", Fields.real)


def read_yaml(content: bytes, folder: Path) -> None:
    try:
        parse_yaml(content)
    except ValueError as error:
        if "\n" in str(error):
            raise AssertionError("a reason of several lines") from error
        raise ConfigError(str(error)) from error


PARSERS = (
    Parser("reader of JSON", "json", json_examples, read_json),
    Parser("reader of YAML", "yaml", lambda folder: [YAML], read_yaml),
)
