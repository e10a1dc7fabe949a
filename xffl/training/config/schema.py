"""What a configuration may hold: the keys of its dataclasses, with types, defaults and what is written about them."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, is_dataclass
from typing import Any

from xffl.errors import ConfigError
from xffl.training.config.typed import as_section, nearest

__all__ = ["Key", "Section", "describe", "find_nearest", "walk"]

Path = tuple[str, ...]


@dataclass(frozen=True)
class Key:
    """A field with a value."""

    kind: Any
    """The annotation, resolved."""
    default: Any
    """Its default, or ``MISSING``."""
    doc: str = ""


@dataclass(frozen=True)
class Section:
    """A dataclass, or a field that holds one."""

    kind: type
    keys: dict[str, Key | Section]
    default: Any
    """The instance that is there where nothing is given; ``None`` where the section is left out then; ``MISSING``
    where one is made of the keys' defaults."""
    is_optional: bool = False
    doc: str = ""


def describe(kind: type, default: Any = MISSING, *, above: tuple[type, ...] = ()) -> Section:
    """Return the keys of a dataclass; local.

    :param kind: The dataclass.
    :param default: The instance that is there where nothing is given.
    :param above: The dataclasses around it: one that holds itself is a value there, and no section.
    :return: The section.
    :raises ConfigError: if an annotation cannot be resolved.
    """
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise ConfigError(f"configuration {kind!r} is no dataclass; decorate it with @dataclass(kw_only=True)")
    try:
        hints = typing.get_type_hints(kind, include_extras=True)
    except NameError as error:
        raise ConfigError(
            f"an annotation of {kind.__qualname__} cannot be resolved: {error}; import what it names outside "
            "'if TYPE_CHECKING'"
        ) from error
    docs = _documented(kind)
    above = (*above, kind)
    keys: dict[str, Key | Section] = {}
    for one in dataclasses.fields(kind):
        if one.init:
            value = one.default if one.default_factory is MISSING else one.default_factory()
            keys[one.name] = _field(one, hints[one.name], value, docs.get(one.name, ""), above)
    return Section(kind, keys, default)


def _field(one: dataclasses.Field[Any], hint: Any, value: Any, doc: str, above: tuple[type, ...]) -> Key | Section:
    kind, is_optional = as_section(hint)
    if kind is None or kind in above:
        return Key(hint, value, doc)
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value)  # maybe a class below the annotation, with more keys
    # A factory that is the class itself makes nothing but defaults.
    factory: object = one.default_factory
    is_plain = factory is kind
    inner = describe(kind, above=above)
    return Section(kind, inner.keys, MISSING if is_plain else value, is_optional, doc)


def walk(section: Section, path: Path = ()) -> Iterator[tuple[Path, Key | Section]]:
    """Yield all keys and sections below a section, in their order; local.

    :param section: The section.
    :param path: The keys that lead to it.
    :yield: The keys that lead to each, and what it is.
    """
    for name, one in section.keys.items():
        yield (*path, name), one
        if isinstance(one, Section):
            yield from walk(one, (*path, name))


def find_nearest(root: Section, path: Path) -> str | None:
    """Return the known key that looks most like an unknown one.

    :param root: The whole configuration.
    :param path: The unknown key.
    :return: A dotted key: of the same section, else with such a last name, else alike as a whole; or ``None``.
    """
    known = {".".join(one): one for one, _ in walk(root)}
    beside = {one[-1]: name for name, one in known.items() if one[:-1] == path[:-1]}
    last: dict[str, str] = {}
    for name, one in known.items():
        last.setdefault(one[-1], name)
    for names in (beside, last):
        if near := nearest(path[-1], names):
            return names[near]
    return nearest(".".join(path), known)


_PARAM = re.compile(r":param\s+(?:[^:\n]*\s)?(\w+):\s*(.*?)(?=\n\s*:[a-z]|\n\s*\n|\Z)", re.DOTALL)
_ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?([^`]+)`")


def _documented(kind: type) -> dict[str, str]:
    """Return what the docstrings of a class and those below it say of its fields."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        for name, text in _PARAM.findall(inspect.cleandoc(one.__dict__.get("__doc__") or "")):
            found[name] = _ROLE.sub(r"\1", " ".join(text.split())).replace("``", "")
    return found
