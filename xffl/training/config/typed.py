"""Values of a configuration: from what YAML or a text holds to what a field's annotation asks for, and back.

Values of a file have types already, so plain types are compared and nothing is read twice (a quoted ``"3"`` stays a
text). What is named by a text (classes, members of enumerations, paths, objects by ``class_path``) is
`jsonargparse <https://jsonargparse.readthedocs.io>`_'s.
"""

from __future__ import annotations

import collections.abc
import difflib
import enum
import inspect
import os
import re
import types
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import torch
from jsonargparse import ArgumentParser

from xffl.errors import ConfigError, XfflError
from xffl.training.callbacks.base import Callback
from xffl.training.config.yaml_text import load_text

__all__ = ["Mismatch", "as_section", "members", "name_of_type", "nearest", "read_text", "to_plain", "typed"]

_LISTS = (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_SETS = (set, frozenset, collections.abc.Set)
_PLAIN = (bool, int, float, str)


class Mismatch(Exception):
    """Say that a value is not of the type that is asked for; it becomes a ConfigError where the key is known.

    :param reason: What is wrong; empty where there is nothing to say but the two.
    :param path: Keys below the field that lead to the value.
    """

    def __init__(self, reason: str = "", path: tuple[str, ...] = ()) -> None:
        super().__init__(reason)
        self.reason, self.path = reason, path


def typed(value: Any, kind: Any, make: Callable[[type, Mapping[str, Any], tuple[str, ...]], Any]) -> Any:
    """Return a value in the type that an annotation asks for; local.

    :param value: What YAML holds, or an object of that type.
    :param kind: The annotation, resolved.
    :param make: Makes a dataclass of a mapping; the last argument are the keys that lead to it.
    :return: The value: lists may become tuples, whole numbers floats, texts what they name.
    :raises Mismatch: if it is of another type.
    """
    kind = _plain_kind(kind)
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if kind in (Any, object):
        return value
    if origin in (Union, types.UnionType):
        return _one_of(value, inner, make)
    if origin is Literal:
        if not any(value == choice and type(value) is type(choice) for choice in inner):
            near = nearest(str(value), map(str, inner))
            raise Mismatch(f"did you mean {near!r}?" if near else "")
        return value
    if kind in (None, type(None)) or kind in _PLAIN:
        return _scalar(value, kind)
    if origin in (*_LISTS, *_MAPPINGS, *_SETS, tuple):
        return _container(value, origin, inner, make)
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, Mapping):
        return make(kind, value, ())
    if origin not in (type, collections.abc.Callable) and isinstance(kind, type) and isinstance(value, kind):
        return value
    return _by_name(value, kind)


def read_text(text: str, kind: Any) -> Any:
    """Return what a text of the command line or the environment says where a type is asked for; local.

    Where a text may stand it is taken as it is, unless another of the types that may stand there fits. Only ``null`` is
    ``None``.

    :param text: The text.
    :param kind: The annotation, resolved.
    :return: The value, as YAML would hold it.
    :raises Mismatch: if it is no YAML where only lists or mappings may stand.
    """
    choices = members(kind)
    if text == "null" and (type(None) in choices or Any in choices):
        return None
    rest = [choice for choice in choices if choice is not type(None)]
    if rest == [str]:
        return text
    try:
        value = load_text(text)
    except ValueError as error:
        if all(_is_structure(choice) for choice in rest):
            raise Mismatch(str(error)) from error
        return text
    if value is None or (isinstance(value, str) and text[:1] not in ("'", '"')):
        return text  # nothing, or what PyYAML takes a comment from: a text all the same
    names_things = [choice for choice in rest if choice is str or _is_named(choice)]
    if isinstance(value, (str, dict)) or not names_things:
        return value if str not in rest or isinstance(value, str) or _fits(value, rest) else text
    return value if _fits(value, rest) else text


def _fits(value: Any, kinds: list[Any]) -> bool:
    """Tell whether a value is of one of some types without being a name of something."""
    for kind in kinds:
        if kind is str or (_is_named(kind) and not isinstance(value, dict)):
            continue
        try:
            typed(value, kind, lambda made, given, path: given)
        except Mismatch:
            continue
        return True
    return False


def members(kind: Any) -> list[Any]:
    """Return the types of which an annotation allows one.

    :param kind: The annotation, resolved.
    :return: Those of a union, else itself.
    """
    kind = _plain_kind(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return [one for member in get_args(kind) for one in members(member)]
    return [kind]


def as_section(kind: Any) -> tuple[type | None, bool]:
    """Tell whether an annotation stands for a section: one dataclass, maybe left out.

    :param kind: The annotation, resolved.
    :return: The dataclass, or ``None``; and whether ``None`` may stand there.
    """
    choices = members(kind)
    kinds = [choice for choice in choices if choice is not type(None)]
    is_one = len(kinds) == 1 and isinstance(kinds[0], type) and is_dataclass(kinds[0])
    return (kinds[0] if is_one else None), type(None) in choices


def name_of_type(kind: Any) -> str:
    """Return an annotation as one would write it.

    :param kind: The annotation, resolved.
    :return: Its text, without modules.
    """
    kind = _plain_kind(kind)
    if kind is type(None):
        return "null"
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(name_of_type(choice) for choice in members(kind))
    if get_origin(kind) is Literal:
        return " or ".join(repr(choice) for choice in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return " or ".join(member.name for member in kind)
    if isinstance(kind, type) and not get_args(kind):
        return kind.__name__
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", str(kind))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that looks most like another, if one does.

    :param name: What was written.
    :param known: What there is.
    :return: The nearest, or ``None``.
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return near[0] if near else None


def to_plain(value: Any) -> Any:
    """Return a configuration, or a part of it, as YAML can hold it; local.

    Classes and functions become dotted paths, members of enumerations their names, objects ``class_path`` and
    ``init_args``: the attributes named as the arguments are, with an underscore before it or without.

    :param value: A dataclass, or anything that one holds.
    :return: Mappings, lists, texts, numbers, truth values and ``None``.
    """
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, (os.PathLike, torch.device)):
        return str(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {to_plain(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((to_plain(item) for item in value), key=repr)
    if isinstance(value, type) or inspect.isroutine(value):
        return _path(value)
    if is_dataclass(value) and not isinstance(value, Callback):
        return {one.name: to_plain(getattr(value, one.name)) for one in fields(value) if one.init}
    plain = {"class_path": _path(type(value))}
    given = _init_args(value)
    return {**plain, "init_args": to_plain(given)} if given else plain


def _init_args(value: object) -> dict[str, Any]:
    """Return what an object was made with, as far as it tells."""
    held = vars(value) if hasattr(value, "__dict__") else {}
    names = {name: name if name in held else f"_{name}" for name in inspect.signature(type(value)).parameters}
    return {name: held[attribute] for name, attribute in names.items() if attribute in held}


def _path(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _plain_kind(kind: Any) -> Any:
    """Look behind Annotated, NewType and names of types."""
    while True:
        if get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        elif hasattr(kind, "__supertype__"):
            kind = kind.__supertype__
        elif hasattr(kind, "__value__"):
            kind = kind.__value__
        else:
            return kind


def _is_structure(kind: Any) -> bool:
    return (get_origin(kind) or kind) in (*_LISTS, *_MAPPINGS, *_SETS, tuple) or is_dataclass(kind)


def _is_named(kind: Any) -> bool:
    """Tell whether values of this type are named by texts, so that a number is a text, too."""
    return not (kind in (Any, None, type(None), *_PLAIN) or get_origin(kind) is Literal or _is_structure(kind))


def _one_of(value: Any, kinds: tuple[Any, ...], make: Callable[..., Any]) -> Any:
    """Return a value in the first type of several that it fits, its own before all."""
    flat = [one for kind in kinds for one in members(kind)]
    wrong: list[Mismatch | ConfigError] = []
    for kind in sorted(flat, key=lambda kind: kind is not type(value)):
        try:
            return typed(value, kind, make)
        except (Mismatch, ConfigError) as error:
            wrong.append(error)
    # What went wrong deep inside tells more than that the others do not fit at all.
    deep = [error for error in wrong if isinstance(error, ConfigError) or error.path or error.reason]
    raise min(deep, key=lambda error: isinstance(error, Mismatch), default=Mismatch())


def _scalar(value: Any, kind: Any) -> Any:
    if kind in (None, type(None)):
        if value is None:
            return None
    elif type(value) is kind:
        return value
    elif kind is float and type(value) is int:
        return float(value)
    elif kind is not str and isinstance(value, str) and _would_be(value, kind):
        raise Mismatch("leave out the quotes")
    elif kind is str and isinstance(value, _PLAIN):
        raise Mismatch("put it in quotes")
    elif kind is bool and value in ("yes", "no", "on", "off"):
        raise Mismatch("write true or false")
    raise Mismatch()


def _would_be(text: str, kind: Any) -> bool:
    try:
        return type(load_text(text)) is kind
    except ValueError:
        return False


def _container(value: Any, origin: Any, inner: tuple[Any, ...], make: Callable[..., Any]) -> Any:
    """Return a list, tuple, set or mapping with items of their types."""
    if origin in _MAPPINGS:
        if not isinstance(value, Mapping):
            raise Mismatch()
        key_kind, item_kind = inner or (Any, Any)
        pairs = ((key, _item(item, item_kind, key, make)) for key, item in value.items())
        return {_item(key, key_kind, key, make): item for key, item in pairs}
    if not isinstance(value, (list, tuple)) and not (origin in _SETS and isinstance(value, (set, frozenset))):
        raise Mismatch("write a list in brackets" if isinstance(value, _PLAIN) else "")
    items: list[Any] = [*value]
    if origin is tuple and inner and inner[-1] is not Ellipsis:
        kinds = [] if inner == ((),) else list(inner)
        if len(kinds) != len(items):
            raise Mismatch(f"it has {len(items)} items")
    else:
        kinds = [inner[0] if inner else Any] * len(items)
    done = [_item(item, kind, str(at), make) for at, (item, kind) in enumerate(zip(items, kinds, strict=True))]
    if origin in _SETS:
        return frozenset(done) if origin is frozenset else set(done)
    return tuple(done) if origin is tuple else done


def _item(value: Any, kind: Any, key: object, make: Callable[..., Any]) -> Any:
    """Return an item in its type; what goes wrong knows where."""
    try:
        return typed(value, kind, lambda made, given, path: make(made, given, (str(key), *path)))
    except Mismatch as error:
        raise Mismatch(error.reason or f"{value!r} is no {name_of_type(kind)}", (str(key), *error.path)) from error


def _by_name(value: Any, kind: Any) -> Any:
    """Return what a text or a class_path names."""
    if kind in (torch.dtype, torch.device):
        return _of_torch(value, kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and isinstance(value, str):
        value = value.rpartition(".")[2]  # a member's dotted path is its name, too
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument("--value", type=kind)
        made = parser.instantiate(parser.parse_object({"value": value}))["value"]
    except XfflError as error:
        raise Mismatch(str(error)) from error
    except (ArgumentError, AttributeError, ImportError, TypeError, ValueError) as error:
        raise Mismatch(_told(error, value, kind)) from error
    if kind is type and not isinstance(made, type):
        raise Mismatch(f"{value!r} is no class")
    return made


def _of_torch(value: Any, kind: Any) -> Any:
    """Return a data type or a device of its name."""
    try:
        found = torch.device(value) if kind is torch.device else getattr(torch, str(value).removeprefix("torch."))
    except (AttributeError, RuntimeError, TypeError) as error:
        raise Mismatch(str(error)) from error
    if not isinstance(found, kind):
        raise Mismatch("give a name such as float32")
    return found


def _told(error: Exception, value: Any, kind: Any) -> str:
    """Say what jsonargparse found, with the nearest name where one is unknown."""
    text = re.sub(r"^Parser key \"value\":\s*", "", " ".join(str(error).split()))
    unknown = re.search(r"class_path '(?:(.+?)\.)?([^.]+?)': Option '(.+?)' is not accepted", text)
    if unknown:
        found = getattr(import_module(unknown[1]), unknown[2]) if unknown[1] else kind
        names = [name for name in inspect.signature(found).parameters if name != "self"]
        near = nearest(unknown[3], names)
        hint = f"did you mean {near}?" if near else f"there are: {', '.join(names) or 'none'}"
        return f"{unknown[3]} is no argument of {unknown[2]}; {hint}"
    written = value.get("class_path") if isinstance(value, Mapping) else value
    if isinstance(kind, type) and isinstance(written, str) and "Expected a dot import path" in text:
        near = nearest(written, _subclasses(kind))
        return f"there is no {kind.__name__} {written!r}; " + (
            f"did you mean {near!r}?" if near else "give the dotted path of a class"
        )
    return text


def _subclasses(kind: type) -> set[str]:
    """Return the names of all classes below one that are imported."""
    below: list[type] = kind.__subclasses__()
    return {one.__name__ for one in below}.union(*map(_subclasses, below))
