"""YAML as configurations are written in: with version 1.2's rules for numbers and truth values, and lines for mistakes.

PyYAML follows YAML 1.1, where ``no`` is false, ``1e-3`` a text, ``12:30`` a number and ``010`` eight.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from xffl.errors import ConfigError

__all__ = ["Keys", "load_file", "load_text", "write_yaml"]

Keys = dict[tuple[str, ...], int]
"""The line of each key of a file, by the keys that lead to it."""

_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_RULES = (
    ("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", _BOOL, list("tTfF")),
    ("tag:yaml.org,2002:int", _INT, list("-+0123456789")),
    ("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789")),
)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the rules of YAML 1.2, and no key twice."""

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Read a whole number: leading zeros mean nothing."""
        text = self.construct_scalar(node)
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        """Read a number."""
        return float(self.construct_scalar(node).lower().replace(".inf", "inf").replace(".nan", "nan"))


_Loader.yaml_implicit_resolvers = {}  # those of version 1.1
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile("^<<$"), ["<"])
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper that quotes whatever either version of YAML would take for something else than a text."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write equal values out, each time."""
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Keep each text on a line of its own, so that a comment can follow it."""
        style = None if text.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)
for _tag, _pattern, _first in _RULES:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)


def load_text(text: str) -> Any:
    """Return the value of a text such as stands behind an option; local.

    :param text: YAML in one line.
    :return: What it says.
    :raises ValueError: if it is no YAML.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(_told(error)) from error


def load_file(text: str, name: str) -> tuple[dict[str, Any], Keys]:
    """Return the mapping that a file holds; local.

    :param text: What stands in it.
    :param name: Its name, for messages.
    :return: The mapping, and the line of each key.
    :raises ConfigError: if it is no YAML, holds something else than a mapping, or a key twice.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        lines: Keys = {}
        _walk(node, (), lines, name)
        data = None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigError(f"file {name} is no YAML: {_told(error)}") from error
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"file {name} is no YAML: {error}") from error
    finally:
        loader.dispose()
    if data is None:
        return {}, {}
    if not isinstance(data, dict):
        raise ConfigError(f"file {name} holds {data!r}; write keys and values, such as training: {{epochs: 3}}")
    return data, lines


def write_yaml(data: Any) -> str:
    """Return YAML that reads back as what was given, with YAML 1.1's rules and with 1.2's; local.

    :param data: Mappings, lists, texts, numbers, truth values and ``None``.
    :return: The text.
    """
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**30))


def _walk(node: yaml.Node | None, path: tuple[str, ...], lines: Keys, name: str) -> None:
    """Note the lines of keys, and refuse keys that are no texts or stand there twice."""
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            if len(path) < _DEEPEST:
                _walk(item, (*path, str(number)), lines, name)
    if not isinstance(node, yaml.MappingNode):
        return
    seen = set()
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"file {name}, line {line}: a key is no word; write key: value")
        here = (*path, key.value)
        if key.value in seen and key.value != "<<":
            raise ConfigError(f"file {name}, line {line}: {'.'.join(here)} stands there twice; leave one of them out")
        seen.add(key.value)
        lines.setdefault(here, line)
        if len(here) < _DEEPEST:
            _walk(value, here, lines, name)


_DEEPEST = 32
"""Deeper than any configuration; an alias may hold itself."""


def _told(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = " ".join(str(getattr(error, "problem", None) or error).split())
    return problem if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
