"""Settings of files, the environment and a command line, merged key by key, and what is made of them.

jsonargparse makes the objects that a dotted path or a ``class_path`` names. All else is read here, since jsonargparse
(4.53 was tried) reads texts again, by the rules of YAML 1.1, which neither ``set_loader`` nor ``parse_object`` changes,
and its errors have several lines and name no file, line or item. These are the cases; each row has a test in
``tests/unit/test_settings_cases.py``, which fails when jsonargparse treats it as this module does.

==============================  =========================================  =============================================
case                            jsonargparse alone                         here
==============================  =========================================  =============================================
quoted numbers                  ``epochs: '3'`` is the number 3            an error: leave out the quotes
quoted null                     ``note: 'null'`` is ``None``               the text ``null``
texts inside mappings           ``{version: '1', answer: no}``: numbers    the texts that they are
                                and booleans
several types                   ``'3'`` for ``int | str`` is a number      a text
times                           ``epochs: 12:30`` is 750                   an error: a text, no number
octal numbers                   ``epochs: 010`` is 8                       10, as YAML 1.2 says
yes and no                      ``is_on: yes`` is true                     an error: write true or false
not a number                    ``.nan`` for a float is taken              an error, since it makes every result NaN
keys given twice                the last one counts                        an error with its line
misspelled keys                 an error without file and line             file, line, and the nearest key
misspelled variables            ignored                                    an error with the nearest key
values that follow from others  keep what followed from the default        follow the new value: ``output_dir`` of
                                                                           an experiment's new name
items of a list                 ``--words.0=x`` is an error                replaces the first item
objects without a class         ``init_args`` alone make the base class    an error: ``class_path`` is missing
misspelled arguments            an error of several lines                  one line, with the nearest argument
origins                         not known                                  default, file, environment or command line of
                                                                           each value
==============================  =========================================  =============================================
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import inspect
import os
import re
import types
import typing
from argparse import ArgumentError
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from importlib import import_module
from pathlib import Path as FilePath
from typing import Any, Literal, Union, get_args, get_origin

import torch
import yaml
from jsonargparse import ArgumentParser
from jsonargparse.typing import register_type

from xffl.checks import closest, decimal, did_you_mean, is_decimal, shown
from xffl.distributed.values.sharding import dtype_of
from xffl.errors import ConfigError
from xffl.files import read_given
from xffl.training.callbacks.base import REMOVED, Callback
from xffl.yaml_text import compose_yaml, parse_yaml

__all__ = [
    "COMMAND_LINE",
    "DEFAULT",
    "Key",
    "Settings",
    "Source",
    "keys_of",
    "load_file",
    "name_of_type",
    "to_plain",
    "walk",
]

COMMAND_LINE = "command line"
"""Origin of what the command line says."""
DEFAULT = "default"
"""Origin of what no source says."""
Path = tuple[str, ...]
"""The keys that lead to a value."""
PLAIN = (bool, int, float, str)
LISTS = (list, tuple, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
SETS = (set, frozenset, collections.abc.Set)
REFUSED = {
    "launch.isolate": "the trainer of a configuration keeps its cells apart in one world, where it compares their "
    "metrics; isolated cells are for scripts: xffl exec --isolate --federated 4,4 train.py"
}
"""Keys that somebody may look for, and why there are none"""

# YAML -----------------------------------------------------------------------------------------------------------------


def load_file(name: str) -> tuple[dict[str, Any], dict[Path, int]]:
    """Return the mapping that a file holds, and the line of each key."""
    lines: dict[Path, int] = {}
    try:
        text = read_given(FilePath(name))
        data = parse_yaml(text)
    except OSError as error:
        raise ConfigError(f"file {name} cannot be read: {error.strerror}; give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"file {name} is not UTF-8 text: {error}") from error
    except ValueError as error:
        raise ConfigError(f"file {name} is not valid YAML: {error}") from error
    _find_lines(compose_yaml(text), (), lines, name)
    if not isinstance(data, dict | None):
        raise ConfigError(f"file {name} holds {shown(data)}; write keys and values, such as training: {{epochs: 3}}")
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
        return [inner for member in get_args(kind) for inner in members(member)]
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
    return dtype_of(name.removeprefix("torch."))


register_type(torch.dtype, to_plain, _find_dtype, fail_already_registered=False)
register_type(torch.device, str, torch.device, (RuntimeError, TypeError, ValueError), fail_already_registered=False)


def make_object(value: Any, kind: Any) -> Any:
    """Return what a text or a class_path names; ValueError with the reason where there is no such thing."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and isinstance(value, str):
        value = value.rpartition(".")[2]  # a member's dotted path is its name, too
    if isinstance(value, Mapping) and value.keys() == {"init_args"}:  # jsonargparse would make the base class of it
        raise ValueError("class_path is missing; give the class that init_args are for")
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
        called = getattr(import_module(unknown[1]), unknown[2]) if unknown[1] else kind
        names = [name for name in inspect.signature(called).parameters if name != "self"]
        near = closest(unknown[3], names)
        hint = f"did you mean {near}?" if near else f"there are: {', '.join(names) or 'none'}"
        return f"{unknown[2]} has no argument {unknown[3]}; {hint}"
    wrong = re.search(r"class_path '(\S+)\.(\w+)': Parser key \"(\w+)\": ", text)
    if wrong and isinstance(value, Mapping) and text.count("class_path") == 1:
        made = inspect.signature(getattr(import_module(wrong[1]), wrong[2]), eval_str=True).parameters[wrong[3]]
        given = (value.get("init_args") or value).get(wrong[3])
        return f"{wrong[3]} of {wrong[2]} is {given!r}, but {name_of_type(made.annotation)} is expected"
    written = value.get("class_path") if isinstance(value, Mapping) else value
    if kind is Callback and (instead := _instead_of(written)) is not None:
        return f"there is no {written} any more; leave it out, and {instead}"
    if isinstance(kind, type) and isinstance(written, str) and "Expected a dot import path" in text:
        # Of plain types, classes of any kind may be meant.
        names = [] if kind is type else sorted(name for name in _subclasses(kind) if not name.startswith("_"))
        choice = f"choose one of {', '.join(names)}, or give" if names else "give"
        meant = did_you_mean(written, names)
        return f"there is no {kind.__name__} {written!r}{meant}; {choice} the dotted path of a class"
    return text


def _instead_of(written: object) -> str | None:
    """Return what to do in place of a callback that earlier versions had."""
    if not isinstance(written, str) or ("." in written and not written.startswith("xffl.")):
        return None
    return REMOVED.get(written.rpartition(".")[2])


def _subclasses(kind: type) -> set[str]:
    """Return the names of all classes below one that are imported."""
    below: list[type] = type.__subclasses__(kind)
    return {subclass.__name__ for subclass in below}.union(*map(_subclasses, below))


# Keys -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """A field of a dataclass, and what is written about it."""

    hint: Any
    doc: str = ""
    factory: Callable[[], Any] | None = None  # makes its default; None where a value is required
    section: type | None = None  # the dataclass whose keys are set one by one, where it holds one

    def default(self) -> Any:
        """Return its default, ``None`` where there is none."""
        return None if self.factory is None else self.factory()


_PARAM = re.compile(r":param\s+(?:[^:\n]*\s)?(\w+):\s*(.*?)(?=\n\s*:[a-z]|\n\s*\n|\Z)", re.DOTALL)
_ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?([^`]+)`")


@functools.cache
def keys_of(kind: type) -> dict[str, Key]:
    """Return the keys of a dataclass."""
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise ConfigError(f"configuration {kind!r} must be a dataclass; decorate it with @dataclass(kw_only=True)")
    try:
        hints = typing.get_type_hints(kind)
    except NameError as error:
        raise ConfigError(
            f"an annotation of {kind.__qualname__} cannot be resolved: {error}; import what it names outside "
            "'if TYPE_CHECKING'"
        ) from error
    docs = {}
    for base in reversed(kind.__mro__):
        for name, text in _PARAM.findall(inspect.cleandoc(base.__dict__.get("__doc__") or "")):
            docs[name] = _ROLE.sub(r"\1", " ".join(text.split())).replace("``", "")
    by_name = {}
    for item in (item for item in dataclasses.fields(kind) if item.init):
        factory = None if item.default_factory is MISSING else item.default_factory
        if item.default is not MISSING:
            factory = functools.partial(getattr, item, "default")
        kinds = [member for member in members(hints[item.name]) if member is not type(None)]
        section = kinds[0] if len(kinds) == 1 and isinstance(kinds[0], type) and is_dataclass(kinds[0]) else None
        if section is not None and factory is not None and (default := factory()) is not None:
            section = type(default)  # maybe a class below the annotation, with more keys
        by_name[item.name] = Key(hints[item.name], docs.get(item.name, ""), factory, section)
    return by_name


def walk(
    keys: Mapping[str, Key], above: Path = (), holder: Any = None, sections: tuple[type, ...] = ()
) -> Iterator[tuple[Path, Key, Any]]:
    """Yield each key with its path and its default, a section before its own keys."""
    for name, key in keys.items():
        default = key.default() if holder is None else getattr(holder, name)
        yield (*above, name), key, default
        if key.section is not None and key.section not in sections:  # a section may hold itself
            yield from walk(keys_of(key.section), (*above, name), default, (*sections, key.section))


def _nearest(keys: Mapping[str, Key], path: Path) -> str | None:
    """Return the key nearest to an unknown one: by the last name in its section or in any, else as a whole."""
    known = [known_path for known_path, _, _ in walk(keys)]
    for near in ([known_path for known_path in known if known_path[:-1] == path[:-1]], known):
        if word := closest(path[-1], [known_path[-1] for known_path in near]):
            return ".".join(next(known_path for known_path in near if known_path[-1] == word))
    return closest(".".join(path), map(".".join, known))


# Settings -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A file, a variable or the command line."""

    origin: str
    lines: Mapping[Path, int] = field(default_factory=dict)
    """Lines of a file's keys."""

    def place(self, path: Path) -> str:
        """Return the place of a key, with the line where there is one."""
        line = next((self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines), None)
        place = "on the command line" if self.origin == COMMAND_LINE else f"in {self.origin}"
        return place + ("" if line is None else f", line {line}")


class _Mismatch(ConfigError):
    """Says that the value at a path is of another type, for a reason or none."""

    def __init__(self, text: str, path: Path, reason: str) -> None:
        super().__init__(text)
        self.path = path
        self.reason = reason


class Settings:
    """What sources say of some keys: each setting replaces those before."""

    def __init__(self, keys: Mapping[str, Key]) -> None:
        self.keys = keys
        self.tree: dict[str, Any] = {}
        """Values as YAML holds them; sections are mappings."""
        self.sources: dict[Path, Source] = {}
        """Sources of values, and of parts of values that were set on their own."""

    # What sources say -------------------------------------------------------------------------------------------------

    def put_environment(self, settings: Mapping[str, str]) -> None:
        """Take variables over; one without a double underscore counts where it looks like a key of the first level."""
        first = [name.lower() for name in self.keys]
        for variable, text in sorted(settings.items()):
            path = tuple(variable.removeprefix("XFFL_").strip("_").lower().split("__"))
            if len(path) > 1 or variable.startswith("XFFL__") or closest(path[0], first):
                self.put(path, text, Source(f"environment {variable}"), is_text=True)

    def put_items(self, path: Path, values: Mapping[Any, Any], source: Source) -> None:
        """Take the values of a mapping over, such as those of a file."""
        for key, value in values.items():
            self.put((*path, *str(key).split(".")), value, source)

    def put(self, path: Path, value: Any, source: Source, *, is_text: bool = False) -> None:
        """Take a value over: of a key, of all keys of a section, or a part of a value, such as an item of a mapping.

        The type of the key says how a text of the environment or the command line is read.
        """
        path, key, rest = self._find(path, source)
        if key.section is not None:
            self._put_section(path, key, value, source, is_text=is_text)
        elif rest:
            old = self._plain(path, key)
            if isinstance(old, list) and old and not is_decimal(rest[0]):
                rest = (str(len(old) - 1), *rest)  # the last item, which was added just before
            self._set(
                path,
                _with_part(old, rest=rest, value=value, name=".".join(path), place=source.place(path)),
                source,
                rest,
            )
        else:
            self._set(path, self._read_text(value, key.hint, path) if is_text else value, source)

    def add(self, path: Path, text: str) -> None:
        """Add what the command line says to a list."""
        path, key, rest = self._find(path, Source(COMMAND_LINE))
        old = None if key.section is not None else self._plain(path, key)
        if key.section is not None or rest or not isinstance(old, list | None):
            raise ConfigError(f"--{'.'.join((*path, *rest))}+ adds to a list, which that is not; leave the + out")
        new = _read(text)
        for item in new if isinstance(new, list) else [new]:
            old = [*(old or []), item]
            self._set(path, old, Source(COMMAND_LINE), (str(len(old) - 1),))

    def _put_section(self, path: Path, key: Key, value: Any, source: Source, *, is_text: bool) -> None:
        name, place = ".".join(path), source.place(path)
        value = _read(value) if is_text else value
        if isinstance(value, Mapping):
            self._holder((*path, ""))
            self.put_items(path, value, source)
        elif value is None and type(None) in members(key.hint):
            self._set(path, None, source)
        elif value is not None or is_text:  # else nothing stands below the key of a file
            assert key.section is not None
            keys = ", ".join(keys_of(key.section))
            raise ConfigError(f"{name} {place} is {value!r}, but it is a section; give some of its keys: {keys}")

    def _holder(self, path: Path) -> dict[str, Any]:
        """Return the mapping that holds a key; a section that was left out exists from now on."""
        holder = self.tree
        for at, name in enumerate(path[:-1]):
            if holder.get(name) is None:
                holder[name] = {}
                self.sources.pop(path[: at + 1], None)
            holder = holder[name]
        return holder

    def _set(self, path: Path, value: Any, source: Source, part: Path = ()) -> None:
        """Set a value; where only a part of it is new, the whole stays where it came from."""
        self._holder(path)[path[-1]] = value
        if part and path in self.sources:
            self.sources[(*path, *part)] = source
        else:
            self.sources = {
                set_path: known for set_path, known in self.sources.items() if set_path[: len(path)] != path
            }
            self.sources[path] = source

    def _find(self, path: Path, source: Source) -> tuple[Path, Key, Path]:
        """Return a key's own path, the key, and what of the path leads into its value."""
        keys = self.keys
        for at, word in enumerate(path):
            if source.origin.startswith("environment "):  # variables are written in capitals
                word = next((name for name in keys if name.lower() == word), word)
                path = (*path[:at], word, *path[at + 1 :])
            key, rest = keys.get(word), path[at + 1 :]
            is_plain = key is not None and all(kind in (*PLAIN, type(None), type) for kind in members(key.hint))
            if key is None or (rest and is_plain):
                break
            if key.section is None or not rest:
                return path[: at + 1], key, rest
            keys = keys_of(key.section)
        raise self._unknown(path, source, self.keys)

    def _unknown(self, path: Path, source: Source, keys: Mapping[str, Key], above: Path = ()) -> ConfigError:
        near = _nearest(keys, path[len(above) :])
        hint = f"did you mean {'.'.join((*above, near))}?" if near else f"there are: {', '.join(keys)}"
        hint = REFUSED.get(".".join(path), hint)
        return ConfigError(f"{'.'.join(path)} {source.place(path)} is unknown; {hint}")

    def _plain(self, path: Path, key: Key) -> Any:
        """Return a key's value as YAML would hold it."""
        return self._holder(path)[path[-1]] if path in self.sources else to_plain(key.default())

    def _read_text(self, text: str, kind: Any, path: Path) -> Any:
        """Return what a text says where a type is expected, as YAML would hold it.

        Where a text may stand it is taken as it is, unless another of the types that may stand there fits. Only
        ``null`` is ``None``.
        """
        choices = [choice for choice in members(kind) if choice is not type(None)]
        if text == "null" and (len(choices) < len(members(kind)) or Any in choices):
            return None
        value = _read(text)
        if choices == [str] or value is None or (isinstance(value, str) and text[:1] not in ("'", '"')):
            return text
        # Values of other types than these are named by texts, so that a number is a text, too: 0.1 of a Decimal.
        literal = (Any, Literal, *PLAIN, *LISTS, *MAPPINGS, *SETS)
        is_mapping = isinstance(value, Mapping)
        plain = [
            choice_kind
            for choice_kind in choices
            if is_mapping or (get_origin(choice_kind) or choice_kind) in literal or is_dataclass(choice_kind)
        ]
        for read, kinds in ((value, plain), (text, choices)):
            for choice_kind in kinds:
                try:
                    self._convert(read, choice_kind, path)
                except ConfigError:
                    continue
                return read
        return value if plain == choices else text

    # What comes of it -------------------------------------------------------------------------------------------------

    def build(self, kind: type, path: Path, values: Mapping[str, Any], default: Any = None) -> Any:
        """Make the dataclass of a section; ``default`` is the instance that counts if nothing is given."""
        arguments = {} if default is None else _arguments(default)
        for name, key in keys_of(kind).items():
            here = (*path, name)
            if name in values and (key.section is None or not isinstance(values[name], Mapping)):
                try:
                    arguments[name] = self._convert(values[name], key.hint, here)
                except _Mismatch as error:
                    raise ConfigError(str(error)) from error
            elif key.section is not None and (name in values or key.factory is None):
                inner = arguments.get(name, key.default())
                arguments[name] = self.build(key.section, here, values.get(name, {}), inner)
            elif key.factory is None and name not in arguments:
                option = ".".join(here)
                raise ConfigError(f"{option} is missing; give it in a file, or --{option} VALUE")
        try:
            return kind(**arguments)
        except (ConfigError, TypeError, ValueError) as error:
            text, section = str(error), ".".join(path)
            named_text = text if not section or text.startswith(f"{section}.") else f"{section}: {text}"
            given = {set_path[-1]: source.origin for set_path, source in self.sources.items() if set_path[:-1] == path}
            named = [name for name in given if re.search(rf"\b{re.escape(name)}\b", text)]
            origins = ", ".join(f"{'.'.join((*path, name))}: {given[name]}" for name in named)
            raise ConfigError(f"{named_text} ({origins})" if origins else named_text) from error

    def _convert(self, value: Any, kind: Any, path: Path) -> Any:
        """Return a value as YAML holds it in the type that an annotation asks for; nothing is guessed.

        Lists may become tuples, integers floats, mappings dataclasses, texts what they name.
        """
        kind = plain_type(kind)
        origin = get_origin(kind) or kind
        if kind in (Any, object):
            return value
        if len(members(kind)) > 1:
            return self._convert_union(value, kind, path)
        if origin in (*LISTS, *MAPPINGS, *SETS):
            return self._convert_items(value, kind, path)
        if isinstance(kind, type) and is_dataclass(kind):
            if isinstance(value, Mapping):
                for name in value:
                    if name not in keys_of(kind):
                        raise self._unknown((*path, str(name)), self._source(path), keys_of(kind), path)
                return self.build(kind, path, value)
        elif origin is Literal:
            if any(value == choice and type(value) is type(choice) for choice in get_args(kind)):
                return value
        elif kind in (*PLAIN, type(None)):
            if kind is float and value != value:
                raise self._mismatch(value, kind, path, "nan is no number")
            if type(value) is kind:
                return value
            if kind is float and type(value) is int:
                return float(value)
        elif isinstance(kind, type) and origin is not type and isinstance(value, kind):  # such as Hashable
            return value
        elif value is not None:
            try:
                return make_object(value, kind)
            except ValueError as error:
                if isinstance(value, Mapping):
                    place = self._source(path).place(path)
                    raise ConfigError(f"{'.'.join(path)} {place} is invalid: {error}") from error
                raise self._mismatch(value, kind, path, str(error) if isinstance(value, str) else "") from error
        raise self._mismatch(value, kind, path)

    def _convert_union(self, value: Any, kind: Any, path: Path) -> Any:
        """Return a value in the first type of several that it fits, its own before all."""
        errors: list[ConfigError] = []
        for member in sorted(members(kind), key=lambda member: member is not type(value)):
            try:
                return self._convert(value, member, path)
            except ConfigError as error:
                errors.append(error)
        # What is wrong deep inside tells more than that the other types do not fit at all.
        here = [error for error in errors if isinstance(error, _Mismatch) and error.path == path]
        if deep := [error for error in errors if error not in here]:
            raise deep[0]
        raise self._mismatch(value, kind, path, next((error.reason for error in here if error.reason), ""))

    def _convert_items(self, value: Any, kind: Any, path: Path) -> Any:
        """Return a list, tuple, set or mapping with items of their types."""
        origin, inner = get_origin(kind) or kind, get_args(kind)
        if origin in MAPPINGS:
            if not isinstance(value, Mapping):
                raise self._mismatch(value, kind, path)
            key_kind, item_kind = inner or (Any, Any)
            return {
                self._convert(key, key_kind, (*path, str(key))): self._convert(item, item_kind, (*path, str(key)))
                for key, item in value.items()
            }
        if not isinstance(value, list | tuple) and not (origin in SETS and isinstance(value, set | frozenset)):
            raise self._mismatch(value, kind, path)
        has_places = origin is tuple and inner and inner[-1] is not Ellipsis
        kinds = inner if has_places else (inner[0] if inner else Any,) * len(value)
        if len(kinds) != len(value):
            raise self._mismatch(value, kind, path, f"it has {len(value)} items")
        items = [self._convert(one, kinds[at], (*path, str(at))) for at, one in enumerate(value)]
        return (origin if origin in (tuple, frozenset) else set if origin in SETS else list)(items)

    def origins(self, config: Any, path: Path = ()) -> dict[str, str]:
        """Return the origin of each value of a section, and of parts that come from elsewhere, by dotted key."""
        by_key: dict[str, str] = {}
        kind: type = type(config)
        for name, key in keys_of(kind).items():
            here, value = (*path, name), getattr(config, name)
            if key.section is not None and is_dataclass(value):
                by_key |= self.origins(value, here)
                continue
            by_key[".".join(here)] = DEFAULT
            by_key |= {
                ".".join(set_path): source.origin
                for set_path, source in self.sources.items()
                if set_path[: len(here)] == here
            }
        return by_key

    def _source(self, path: Path) -> Source:
        """Return where a value comes from, or the part of it that was set last."""
        below = [source for set_path, source in self.sources.items() if set_path[: len(path)] == path]
        above = (self.sources[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.sources)
        return below[-1] if below else next(above, Source(DEFAULT))

    def _mismatch(self, value: Any, kind: Any, path: Path, reason: str = "") -> _Mismatch:
        hint = reason or _hint(value, members(kind))
        place = self._source(path).place(path)
        text = f"{'.'.join(path)} {place} is {shown(value)}, but {name_of_type(kind)} is expected"
        return _Mismatch(f"{text}; {hint}" if hint else text, path, reason)


def _hint(value: Any, kinds: Sequence[Any]) -> str:
    """Say how a value of a wrong type may have been meant."""
    if isinstance(value, str):
        if bool in kinds and value in ("yes", "no", "on", "off"):
            return "write true or false"
        if str not in kinds and type(_read(value)) in kinds:
            return "leave out the quotes"
        literals = [str(literal) for kind in kinds if get_origin(kind) is Literal for literal in get_args(kind)]
        enums = [name for kind in kinds for name in getattr(kind, "__members__", ())]
        if near := closest(value, [*literals, *enums]):
            return f"did you mean {near!r}?"
    if isinstance(value, PLAIN):
        if any((get_origin(kind) or kind) in (*LISTS, *SETS) for kind in kinds):
            return "write a list in brackets"
        if str in kinds:
            return "put it in quotes"
    return ""


def _read(text: str) -> Any:
    """Return what YAML says, or the text where it is none."""
    try:
        return parse_yaml(text)
    except ValueError:
        return text


def _with_part(old: Any, rest: Path, value: Any, name: str, place: str) -> Any:
    """Return a plain value with a part of it replaced."""
    if not rest:
        return _read(value) if isinstance(value, str) and value else value
    word = rest[0]
    if isinstance(old, list):
        number = decimal(word)
        at = len(old) if number is None else number
        if at >= len(old):
            raise ConfigError(f"{name}.{word} {place} is unknown; there are {len(old)} items, counted from 0")
        return [
            *old[:at],
            _with_part(old[at], rest=rest[1:], value=value, name=f"{name}.{at}", place=place),
            *old[at + 1 :],
        ]
    if isinstance(old, str) and old[:1].isidentifier():
        old = {"class_path": old}
    if not isinstance(old, Mapping | None):
        raise ConfigError(f"{name} {place} is {old!r}, and has no {word}")
    old = dict(old or {})
    if "class_path" in old and word not in ("class_path", "init_args"):
        word, rest = "init_args", ("init_args", *rest)
    if "class_path" in old and len(rest) == 2 and word == "init_args":
        # jsonargparse reads texts for the types of arguments.
        return {**old, word: {**(old.get(word) or {}), rest[1]: value}}
    return {**old, word: _with_part(old.get(word), rest=rest[1:], value=value, name=f"{name}.{word}", place=place)}


def _arguments(instance: Any) -> dict[str, Any]:
    """Return the arguments that an instance was made with, as far as others do not follow from them.

    A name of a folder that follows from the name of a run must follow the new name where that is changed.
    """
    values = {item.name: getattr(instance, item.name) for item in dataclasses.fields(instance) if item.init}
    for name in list(values):
        fewer = {key: value for key, value in values.items() if key != name}
        try:
            if getattr(type(instance)(**fewer), name) == values[name]:
                values = fewer
        except (TypeError, ValueError):
            continue
    return values
