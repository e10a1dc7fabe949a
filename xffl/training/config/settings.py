"""What files, the environment and a command line say of a configuration, key by key, and the dataclasses made of it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, is_dataclass
from typing import Any

from xffl.errors import ConfigError
from xffl.training.config.schema import Key, Path, Section, describe, find_nearest, walk
from xffl.training.config.typed import Mismatch, members, name_of_type, nearest, read_text, to_plain, typed
from xffl.training.config.yaml_text import Keys, load_file, load_text

__all__ = ["Settings", "Words", "read_words"]

COMMAND_LINE = "command line"
DEFAULT = "default"


@dataclass(frozen=True)
class Words:
    """A command line that was taken apart."""

    files: tuple[str, ...]
    settings: tuple[tuple[str, str, bool], ...]
    """Dotted key, text, and whether it is added to a list."""
    flags: frozenset[str]


FLAGS = {"-h": "help", "--help": "help", "--print_config": "print_config", "--print-config": "print_config"}


def read_words(words: Sequence[str]) -> Words:
    """Take a command line apart: ``--key value``, ``--key=value``, ``--key+=value``, ``--config FILE`` and flags.

    :param words: The command line.
    :return: Its parts.
    :raises ConfigError: if a word is no option, or a value is missing.
    """
    files, settings, flags = [], [], set()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word in FLAGS:
            flags.add(FLAGS[word])
            continue
        name, is_pair, text = word[2:].partition("=")
        if not word.startswith("--") or not name.removesuffix("+"):
            raise ConfigError(f"{word!r} on the command line is no option; write --key value, as --training.epochs 3")
        if not is_pair:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"--{name} on the command line has no value; write --{name} VALUE or --{name}=VALUE")
            text = rest.pop(0)
        if name == "config":
            files.append(text)
        else:
            settings.append((name.removesuffix("+"), text, name.endswith("+")))
    return Words(tuple(files), tuple(settings), frozenset(flags))


@dataclass(frozen=True)
class Source:
    """Where values come from."""

    origin: str
    is_text: bool = False
    lines: Keys = field(default_factory=dict)
    is_caseless: bool = False

    def at(self, written: Path) -> str:
        """Tell the place, with the line where there is one."""
        line = next((self.lines[written[:n]] for n in range(len(written), 0, -1) if written[:n] in self.lines), None)
        place = "on the command line" if self.origin == COMMAND_LINE else f"in {self.origin}"
        return place + ("" if line is None else f", line {line}")


@dataclass(frozen=True)
class Given:
    """A value that something else than a default has given."""

    value: Any
    source: Source
    where: str
    is_text: bool = False


class Settings:
    """What was given so far, key by key.

    :param root: All keys that there are.
    :param prefix: Keys that lead to it, for messages.
    """

    def __init__(self, root: Section, prefix: Path = ()) -> None:
        self.root, self.prefix = root, prefix
        self.given: dict[Path, Given] = {}
        self.parts: dict[str, str] = {}
        """Origins of what was set inside of values, by dotted key."""

    # What sources say -------------------------------------------------------------------------------------------------

    def put_file(self, name: str, only: str | None = None) -> None:
        """Take a file over, or one key of its first level."""
        try:
            with open(name, encoding="utf-8") as file:
                data, lines = load_file(file.read(), name)
        except UnicodeDecodeError as error:
            raise ConfigError(f"file {name} is no text in UTF-8: {error}") from error
        except OSError as error:
            raise ConfigError(f"file {name} cannot be read: {error.strerror}; give the path of a YAML file") from error
        if only is not None:
            data = {key: value for key, value in data.items() if key == only}
        self._put_mapping((), data, Source(f"file {name}", lines=lines), ())

    def put_environment(self, settings: Mapping[str, str]) -> None:
        """Take variables over; one without a double underscore counts where it names a key of the first level."""
        first = {name.lower(): name for name in self.root.keys}
        for variable, text in sorted(settings.items()):
            path = tuple(variable.removeprefix("XFFL_").strip("_").lower().split("__"))
            if len(path) == 1 and path[0] not in first and not variable.startswith("XFFL__"):
                if near := nearest(path[0], first):
                    raise ConfigError(
                        f"{path[0]} in environment {variable} is unknown; did you mean XFFL_{near.upper()}?"
                    )
                continue
            self.put(path, text, Source(f"environment {variable}", is_text=True, is_caseless=True))

    def put(self, path: Path, value: Any, source: Source, written: Path | None = None) -> None:
        """Take a value over."""
        written = path if written is None else written
        path, node, rest = self._find(path, source, written)
        where = source.at(written)
        if isinstance(node, Section):
            self._put_section(path, node, value, source, written)
            return
        if rest:
            old = self._raw(path, node)
            if isinstance(old, list) and old and not rest[0].isdecimal():
                rest = (str(len(old) - 1), *rest)  # the last item, which was added just before
            raw = _assign(old, rest, value, self._name(path), where)
            self._set_part(path, rest, Given(raw, source, where))
        else:
            self._set(path, Given(value, source, where, source.is_text))

    def add(self, path: Path, text: str) -> None:
        """Add what the command line says to a list."""
        source = Source(COMMAND_LINE, is_text=True)
        path, node, rest = self._find(path, source, path)
        old = None if isinstance(node, Section) else self._raw(path, node)
        if isinstance(node, Section) or rest or not isinstance(old, (list, type(None))):
            raise ConfigError(f"--{'.'.join((*path, *rest))}+ adds to a list, which that is not; leave the + out")
        try:
            new = load_text(text)
        except ValueError:
            new = text
        for item in new if isinstance(new, list) else [new]:
            old = [*(old or []), item]
            self._set_part(path, (str(len(old) - 1),), Given(old, source, source.at(path)))

    def _put_mapping(self, path: Path, values: Mapping[Any, Any], source: Source, written: Path) -> None:
        plain = dataclasses.replace(source, is_text=False)
        for key, value in values.items():
            self.put((*path, *str(key).split(".")), value, plain, (*written, str(key)))

    def _put_section(self, path: Path, node: Section, value: Any, source: Source, written: Path) -> None:
        if source.is_text:
            try:
                value = load_text(value)
            except ValueError as error:
                raise ConfigError(f"{self._name(path)} {source.at(written)} is no YAML: {error}") from error
        if isinstance(value, Mapping):
            self._drop_none((*path, ""))
            if not value and node.is_optional:
                self.given[path] = Given({}, source, source.at(written))
            self._put_mapping(path, value, source, written)
        elif value is not None or (source.is_text and not node.is_optional):
            raise ConfigError(
                f"{self._name(path)} {source.at(written)} is {value!r}, but it is a section; give some of its keys: "
                f"{', '.join(node.keys)}"
            )
        elif node.is_optional:
            for one in [one for one in self.given if one[: len(path)] == path]:
                del self.given[one]
            self._set(path, Given(None, source, source.at(written)))

    def _set(self, path: Path, given: Given, *, is_part: bool = False) -> None:
        self._drop_none(path)
        if not is_part:
            name = self._name(path) + "."
            self.parts = {key: origin for key, origin in self.parts.items() if not key.startswith(name)}
        self.given[path] = given

    def _set_part(self, path: Path, rest: Path, given: Given) -> None:
        """Take over a value of which a part has changed; the other parts stay where they came from."""
        if path in self.given:
            self.parts[self._name((*path, *rest))] = given.source.origin
            given = dataclasses.replace(given, source=self.given[path].source)
        self._set(path, given, is_part=True)

    def _drop_none(self, path: Path) -> None:
        """Forget that a section around a key was left out."""
        for length in range(1, len(path)):
            self.given.pop(path[:length], None)

    def _find(self, path: Path, source: Source, written: Path) -> tuple[Path, Key | Section, Path]:
        """Return a key's own name, the key, and what of the path leads into its value."""
        node: Key | Section = self.root
        for at, word in enumerate(path):
            if isinstance(node, Key):
                if _is_closed(node.kind):
                    break
                return path[:at], node, path[at:]
            names = {name.lower(): name for name in node.keys} if source.is_caseless else {word: word}
            name = names.get(word)
            if name is None or name not in node.keys:
                break
            path = (*path[:at], name, *path[at + 1 :])
            node = node.keys[name]
        else:
            return path, node, ()
        near = find_nearest(self.root, path)
        hint = f"; did you mean {self._name((near,))}?" if near else f"; there are: {', '.join(self.root.keys)}"
        raise ConfigError(f"{self._name(path)} {source.at(written)} is unknown{hint}")

    def _raw(self, path: Path, key: Key) -> Any:
        """Return a key's value as YAML would hold it."""
        if path not in self.given:
            return None if key.default is MISSING else to_plain(key.default)
        given = self.given[path]
        if not given.is_text:
            return given.value
        try:
            return read_text(given.value, key.kind)
        except Mismatch as error:
            raise self._mismatch(path, key, given, error) from error

    # What comes of it -------------------------------------------------------------------------------------------------

    def build(self, section: Section, path: Path) -> Any:
        """Make a section's dataclass."""
        arguments = {} if section.default in (MISSING, None) else _told_apart(section.default)
        for name, one in section.keys.items():
            here = (*path, name)
            if isinstance(one, Key):
                if here in self.given:
                    arguments[name] = self.value(here, one)
                elif one.default is MISSING and name not in arguments:
                    raise ConfigError(
                        f"{self._name(here)} is missing; give it in a file, or --{self._name(here)} VALUE"
                    )
            elif here in self.given and self.given[here].value is None:
                arguments[name] = None
            elif any(given[: len(here)] == here for given in self.given) or one.default is MISSING:
                inner = dataclasses.replace(one, default=arguments[name]) if name in arguments else one
                arguments[name] = self.build(inner, here)
        try:
            return section.kind(**arguments)
        except (ConfigError, TypeError, ValueError) as error:
            raise ConfigError(self._refused(section, path, str(error))) from error

    def value(self, path: Path, key: Key) -> Any:
        """Return a given value in its type."""
        given = self.given[path]

        def make(kind: type, values: Mapping[str, Any], inside: Path) -> Any:
            tree = Settings(describe(kind), (*self.prefix, *path, *inside))
            tree._put_mapping((), values, given.source, (*path, *inside))
            return tree.build(tree.root, ())

        try:
            return typed(self._raw(path, key), key.kind, make)
        except Mismatch as error:
            raise self._mismatch(path, key, given, error) from error

    def origins(self, value: Any, path: Path) -> dict[str, str]:
        """Return the origin of each value of a configuration."""
        if not is_dataclass(value) or (path and not isinstance(self._node(path), Section)):
            given = self.given.get(path)
            found = {".".join(path): DEFAULT if given is None else given.source.origin}
            inside = ".".join(path) + "."
            return {**found, **{key: origin for key, origin in self.parts.items() if key.startswith(inside)}}
        found = {}
        for one in dataclasses.fields(value):
            if one.init:
                found |= self.origins(getattr(value, one.name), (*path, one.name))
        return found

    def _node(self, path: Path) -> Key | Section | None:
        return next((node for found, node in walk(self.root) if found == path), None)

    def _mismatch(self, path: Path, key: Key, given: Given, error: Mismatch) -> ConfigError:
        name = self._name((*path, *error.path))
        if error.path:
            return ConfigError(f"{name} {given.where} cannot be meant: {error.reason}")
        hint = f"; {error.reason}" if error.reason else ""
        value = repr(given.value)
        value = value if len(value) <= 200 else f"{value[:200]}..."
        return ConfigError(f"{name} {given.where} is {value}, but {name_of_type(key.kind)} is expected{hint}")

    def _refused(self, section: Section, path: Path, text: str) -> str:
        """Say in which section values were refused, and where those came from that the message names."""
        name = self._name(path)
        told = text if not name or text.startswith(f"{name}.") else f"{name}: {text}"
        origins = [
            f"{self._name(given)}: {found.source.origin}"
            for given, found in self.given.items()
            if given[:-1] == path and re.search(rf"\b{re.escape(given[-1])}\b", text)
        ]
        return f"{told} ({', '.join(origins)})" if origins else told

    def _name(self, path: Path) -> str:
        return ".".join((*self.prefix, *path))


def _is_closed(kind: Any) -> bool:
    """Tell whether values of this type have nothing inside that has a name."""
    return all(choice in (bool, int, float, str, type(None), type) for choice in members(kind))


def _assign(raw: Any, rest: Path, value: Any, name: str, where: str) -> Any:
    """Return a plain value with a part of it replaced."""
    if not rest:
        if not isinstance(value, str):
            return value
        try:
            return load_text(value) if value else value
        except ValueError:
            return value
    word = rest[0]
    if isinstance(raw, list):
        at = int(word) if word.isdecimal() else len(raw)
        if at >= len(raw):
            raise ConfigError(f"{name}.{word} {where} is unknown; there are {len(raw)} items, counted from 0")
        return [*raw[:at], _assign(raw[at], rest[1:], value, f"{name}.{at}", where), *raw[at + 1 :]]
    if isinstance(raw, str) and raw[:1].isidentifier():
        raw = {"class_path": raw}
    if not isinstance(raw, (Mapping, type(None))):
        raise ConfigError(f"{name} {where} is {raw!r}, and has no {word}")
    raw = dict(raw or {})
    if "class_path" in raw and word not in ("class_path", "init_args"):
        word, rest = "init_args", ("init_args", *rest)
    if "class_path" in raw and len(rest) == 2 and word == "init_args":
        # jsonargparse reads texts for the types of arguments.
        return {**raw, word: {**(raw.get(word) or {}), rest[1]: value}}
    return {**raw, word: _assign(raw.get(word), rest[1:], value, f"{name}.{word}", where)}


def _told_apart(instance: Any) -> dict[str, Any]:
    """Return the arguments that an instance was made with, as far as others do not follow from them.

    A name of a folder that follows from the name of a run must follow the new name where that is changed.
    """
    kind = type(instance)
    values = {one.name: getattr(instance, one.name) for one in dataclasses.fields(instance) if one.init}
    for name in list(values):
        fewer = {key: value for key, value in values.items() if key != name}
        try:
            if getattr(kind(**fewer), name) == values[name]:
                values = fewer
        except (TypeError, ValueError):
            continue
    return values
