"""YAML by the rules of YAML 1.2, read within limits and written so that either version reads it back.

PyYAML follows YAML 1.1, where ``no`` is false, ``1e-3`` a text, ``12:30`` a number and ``010`` eight; here the rules of
YAML 1.2 hold. Plain values only: no tag makes an object.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from xffl.text_limits import DEPTH_LIMIT, has_surrogate, number_of_digits

__all__ = ["YAML_LIMIT", "compose_yaml", "flattened", "parse_yaml", "write_yaml"]

YAML_LIMIT = 2**19
"""The most characters of a YAML text, and of what it holds with its aliases written out; PyYAML takes seconds for it"""
CHARACTERS_OF_VALUE = 20
"""A text may hold a twentieth as many values as characters: PyYAML takes 50 us for each"""

_NUMBER = r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
_RULES = (
    ("tag:yaml.org,2002:null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("tag:yaml.org,2002:int", r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    ("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789")),
)


class _Loader(yaml.SafeLoader):
    """Safe loader with the rules of YAML 1.2 and limits; what they take for a float, PyYAML reads alike."""

    def __init__(self, text: str, limit: int, depth: int) -> None:
        super().__init__(text)
        self._limit = limit
        self._depth = depth
        self._level = 0
        self._count = 0
        self._sizes: dict[int, int] = {}
        """Characters of each node that is complete, with its aliases written out, by the node's identity"""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node unless it lies too deep, is an alias of what it lies in, or is too large written out."""
        is_alias = self.check_event(yaml.AliasEvent)
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        self._level += 1
        self._count += 1
        if self._count > self._limit // CHARACTERS_OF_VALUE:
            problem = f"there are more than {self._limit // CHARACTERS_OF_VALUE} values"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        if self._level > self._depth + 1:
            raise yaml.MarkedYAMLError(problem=f"values are nested more than {self._depth} deep", problem_mark=mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._level -= 1
        if is_alias and id(node) not in self._sizes:
            raise yaml.MarkedYAMLError(problem="an alias stands inside the value that it names", problem_mark=mark)
        if not is_alias and node is not None:
            self._sizes[id(node)] = size = self._size_of(node)
            if size > self._limit:
                problem = f"a value with its aliases has more than {self._limit} characters"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        return node

    def _size_of(self, node: yaml.Node) -> int:
        """Return the characters of a node whose parts are complete."""
        if isinstance(node, yaml.ScalarNode):
            if has_surrogate(node.value):
                problem = "half of a surrogate pair is no character"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
            return len(node.value) + 1
        if isinstance(node, yaml.MappingNode):
            return 1 + sum(self._sizes[id(key)] + self._sizes[id(value)] for key, value in node.value)
        return 1 + sum(self._sizes[id(item)] for item in node.value)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Read an integer: leading zeros mean nothing."""
        text = self.construct_scalar(node)
        if len(text) > 2 and text[:2] in ("0o", "0x"):
            number_of_digits("0" * len(text))
            return int(text, 0)
        return number_of_digits(text)


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

_CONSTRUCTION_ERRORS = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""What PyYAML's constructors let through where a tag does not fit its text, such as ``!!bool maybe``"""


def parse_yaml(text: str | bytes, *, limit: int = YAML_LIMIT, depth: int = DEPTH_LIMIT) -> Any:
    """Return the value of a YAML text; a ValueError says what is wrong with it, and where.

    Bytes are decoded as UTF-8. The limit counts the text with its aliases written out, too: a few lines of aliases of
    aliases can hold more than any memory.
    """
    loader, node = _compose(text, limit, depth)
    if node is None:
        return None
    try:
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(_reason(error)) from error
    except _CONSTRUCTION_ERRORS as error:
        raise ValueError(f"a value does not fit its type: {' '.join(str(error).split())[:200]}") from error


def compose_yaml(text: str | bytes, *, limit: int = YAML_LIMIT, depth: int = DEPTH_LIMIT) -> yaml.Node | None:
    """Return the nodes of a YAML text, which know their lines; a ValueError says what is wrong with it."""
    return _compose(text, limit, depth)[1]


def write_yaml(data: Any) -> str:
    """Return YAML that reads back as what was given, with YAML 1.1's rules and with 1.2's."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**30))


def _compose(text: str | bytes, limit: int, depth: int) -> tuple[_Loader, yaml.Node | None]:
    if len(text) > limit:
        raise ValueError(f"it has {len(text)} characters; at most {limit} are read")
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        loader = _Loader(text, limit, depth)
        return loader, loader.get_single_node()
    except yaml.YAMLError as error:
        raise ValueError(_reason(error)) from error
    except (ValueError, OverflowError, RecursionError) as error:  # an escape that is no character, such as \UFFFFFFFF
        raise ValueError(f"it is not YAML: {' '.join(str(error).split())[:200]}") from error


def _reason(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = " ".join(str(getattr(error, "problem", None) or error).split())[:300]
    place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
    return f"{place}{problem}"


def flattened(plain: Mapping[Any, Any], prefix: str = "", depth: int = 20) -> dict[str, Any]:
    """Return the values of nested mappings by their dotted names, of which an empty mapping is one.

    What is nested deeper is a value, too: YAML can nest a mapping in itself.
    """
    values: dict[str, Any] = {}
    for name, value in plain.items():
        if isinstance(value, Mapping) and value and depth:
            values |= flattened(value, f"{prefix}{name}.", depth - 1)
        else:
            values[f"{prefix}{name}"] = value
    return values
