"""Values of a configuration: YAML 1.2 with line numbers, objects that texts name, and plain values to write.

PyYAML follows YAML 1.1, where ``no`` is false, ``1e-3`` a text, ``12:30`` a number and ``010`` eight. jsonargparse
makes the objects that a dotted path or a ``class_path`` names. It does not read plain values here (4.53 was tried),
since it reads texts again, by the rules of YAML 1.1: ``epochs: '3'`` would be 3, ``epochs: 12:30`` 750, ``is_on: yes``
true, and ``extra: {version: '1'}`` would hold a number. Its errors have several lines, and no file or line.
"""

from __future__ import annotations

import collections.abc
import enum
import inspect
import os
import re
import types
from argparse import ArgumentError
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path as FilePath
from typing import Any, Literal, Union, get_args, get_origin

import torch
import yaml
from jsonargparse import ArgumentParser
from jsonargparse.typing import register_type

from xffl.checks import closest
from xffl.errors import ConfigError
from xffl.training.callbacks.base import Callback

__all__ = ["load_file", "load_text", "make_object", "members", "name_of_type", "plain_type", "to_plain", "write_yaml"]

Path = tuple[str, ...]
"""The keys that lead to a value."""
PLAIN = (bool, int, float, str)
LISTS = (list, tuple, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
SETS = (set, frozenset, collections.abc.Set)

# YAML -----------------------------------------------------------------------------------------------------------------

_NUMBER = r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
_RULES = (
    ("tag:yaml.org,2002:null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("tag:yaml.org,2002:int", r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    ("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789")),
)


class _Loader(yaml.SafeLoader):
    """Safe loader with the rules of YAML 1.2; what they take for a float, PyYAML reads alike."""

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Read an integer: leading zeros mean nothing."""
        text = self.construct_scalar(node)
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


class _Dumper(yaml.SafeDumper):
    """Safe dumper that quotes whatever either version of YAML would take for something else than a text."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write equal values out, each time."""
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Keep each text on a line of its own, so that a comment can follow it."""
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Loader.yaml_implicit_resolvers = {}  # those of version 1.1
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile("^<<$"), ["<"])
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Dumper.add_representer(str, _Dumper.represent_text)
for _tag, _pattern, _first in _RULES:
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), _first)
    _Dumper.add_implicit_resolver(_tag, re.compile(_pattern), _first)


def load_text(text: str) -> Any:
    """Return the value of a YAML text; ValueError where it is none."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise ValueError(f"{place}{problem}") from error


def load_file(name: str) -> tuple[dict[str, Any], dict[Path, int]]:
    """Return the mapping that a file holds, and the line of each key."""
    lines: dict[Path, int] = {}
    try:
        text = FilePath(name).read_text(encoding="utf-8")
        data = load_text(text)
    except OSError as error:
        raise ConfigError(f"file {name} cannot be read: {error.strerror}; give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"file {name} is not UTF-8 text: {error}") from error
    except ValueError as error:
        raise ConfigError(f"file {name} is not valid YAML: {error}") from error
    _find_lines(yaml.compose(text, _Loader), (), lines, name)
    if not isinstance(data, dict | None):
        raise ConfigError(f"file {name} holds {data!r}; write keys and values, such as training: {{epochs: 3}}")
    return data or {}, lines


def _find_lines(node: yaml.Node | None, path: Path, lines: dict[Path, int], name: str) -> None:
    """Note the lines of keys, and refuse keys that are no texts or given twice."""
    if len(path) > 32:  # deeper than any configuration: an alias may hold itself
        return
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            _find_lines(item, (*path, str(number)), lines, name)
    if not isinstance(node, yaml.MappingNode):
        return
    seen = set()
    for key, value in node.value:
        line = key.start_mark.line + 1
        here = (*path, *key.value.split("."))
        if key.value in seen and key.value != "<<":
            raise ConfigError(f"file {name}, line {line}: {'.'.join(here)} is given twice; leave one of them out")
        seen.add(key.value)
        lines.setdefault(here, line)
        _find_lines(value, here, lines, name)


def write_yaml(data: Any) -> str:
    """Return YAML that reads back as what was given, with YAML 1.1's rules and with 1.2's."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**30))


def to_plain(value: Any) -> Any:
    """Return a configuration, or a part of it, as mappings, lists, texts, numbers, booleans and ``None``.

    Classes and functions become dotted paths, members of enumerations their names, objects ``class_path`` and
    ``init_args``: the attributes named as the arguments are, with an underscore before it or without.
    """
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, PLAIN):
        return value
    if isinstance(value, (os.PathLike, torch.device, torch.dtype)):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {to_plain(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((to_plain(item) for item in value), key=repr)
    if isinstance(value, type) or inspect.isroutine(value):
        return f"{value.__module__}.{value.__qualname__}"
    if is_dataclass(value) and not isinstance(value, Callback):
        return {one.name: to_plain(getattr(value, one.name)) for one in fields(value) if one.init}
    held = getattr(value, "__dict__", {})
    names = {name: name if name in held else f"_{name}" for name in inspect.signature(type(value)).parameters}
    given = {name: to_plain(held[attribute]) for name, attribute in names.items() if attribute in held}
    return {"class_path": to_plain(type(value)), **({"init_args": given} if given else {})}


# Types ----------------------------------------------------------------------------------------------------------------


def plain_type(kind: Any) -> Any:
    """Return the type behind NewType and names of types; ``get_type_hints`` has removed Annotated."""
    while (inner := getattr(kind, "__supertype__", getattr(kind, "__value__", None))) is not None:
        kind = inner
    return kind


def members(kind: Any) -> list[Any]:
    """Return the types of a union, else the type itself."""
    kind = plain_type(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return [one for member in get_args(kind) for one in members(member)]
    return [kind]


def name_of_type(kind: Any) -> str:
    """Return an annotation as one would write it, without modules."""
    kind = plain_type(kind)
    if kind is type(None):
        return "null"
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(map(name_of_type, members(kind)))
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return " or ".join(member.name for member in kind)
    if isinstance(kind, type) and not get_args(kind):
        return kind.__name__
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", str(kind))


def _find_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError("give a name such as float32")
    return found


register_type(torch.dtype, to_plain, _find_dtype, fail_already_registered=False)
register_type(torch.device, str, torch.device, (RuntimeError, TypeError, ValueError), fail_already_registered=False)


def make_object(value: Any, kind: Any) -> Any:
    """Return what a text or a class_path names; ValueError with the reason where there is no such thing."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and isinstance(value, str):
        value = value.rpartition(".")[2]  # a member's dotted path is its name, too
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=kind)
    try:
        return parser.instantiate(parser.parse_object({"value": value}))["value"]
    except (ArgumentError, AttributeError, ImportError, TypeError, ValueError) as error:
        raise ValueError(_reason(error, value, kind)) from error


def _reason(error: Exception, value: Any, kind: Any) -> str:
    """Return what jsonargparse says in one line, with the nearest name where one is unknown."""
    text = re.sub(r"^Parser key \"value\":\s*", "", " ".join(str(error).split()))
    unknown = re.search(r"class_path '(?:(.+?)\.)?([^.]+?)': Option '(.+?)' is not accepted", text)
    if unknown:
        found = getattr(import_module(unknown[1]), unknown[2]) if unknown[1] else kind
        names = [name for name in inspect.signature(found).parameters if name != "self"]
        near = closest(unknown[3], names)
        hint = f"did you mean {near}?" if near else f"there are: {', '.join(names) or 'none'}"
        return f"{unknown[2]} has no argument {unknown[3]}; {hint}"
    wrong = re.search(r"class_path '(\S+)\.(\w+)': Parser key \"(\w+)\": ", text)
    if wrong and isinstance(value, Mapping) and text.count("class_path") == 1:
        made = inspect.signature(getattr(import_module(wrong[1]), wrong[2]), eval_str=True).parameters[wrong[3]]
        given = (value.get("init_args") or value).get(wrong[3])
        return f"{wrong[3]} of {wrong[2]} is {given!r}, but {name_of_type(made.annotation)} is expected"
    written = value.get("class_path") if isinstance(value, Mapping) else value
    if isinstance(kind, type) and isinstance(written, str) and "Expected a dot import path" in text:
        near = closest(written, _subclasses(kind))
        hint = f"did you mean {near!r}?" if near else "give the dotted path of a class"
        return f"there is no {kind.__name__} {written!r}; {hint}"
    return text


def _subclasses(kind: type) -> set[str]:
    """Return the names of all classes below one that are imported."""
    below: list[type] = kind.__subclasses__()
    return {one.__name__ for one in below}.union(*map(_subclasses, below))
