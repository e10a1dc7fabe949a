"""A configuration of four sources (defaults, files, the environment, the command line), its trainer and its start.

Every value knows where it came from, and so does every mistake.
"""

from __future__ import annotations

import argparse
import base64
import copy
import dataclasses
import inspect
import os
import sys
import typing
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar

from xffl.checks import closest
from xffl.cluster.environment import detect_environment, request_federation, requested_federation, sources_named
from xffl.cluster.launch.failure import ExitCode, tell_unmet
from xffl.cluster.sizes import Federation
from xffl.cluster.slurm.submit import SlurmConfig
from xffl.errors import ConfigError, XfflError
from xffl.topology import Topology
from xffl.training.config.dataclasses import LaunchConfig
from xffl.training.config.settings import (
    COMMAND_LINE,
    DEFAULT,
    Key,
    Settings,
    Source,
    keys_of,
    load_file,
    name_of_type,
    to_plain,
    walk,
)
from xffl.training.config.variables import requested_settings
from xffl.yaml_text import parse_yaml, write_yaml

__all__ = [
    "Resolved",
    "ask_for_cells",
    "choose_federation",
    "config_class",
    "help_text",
    "job_trainer",
    "main",
    "print_text",
    "read_configuration",
    "read_job",
    "read_job_with",
    "read_resolved",
    "read_words",
    "with_settings",
    "write_resolved",
]

T = TypeVar("T")

_FLAGS = {"-h": "help", "--help": "help", "--print_config": "print_config", "--print-config": "print_config"}
_LONGEST = 120_000
"""Linux allows a variable of 128 KiB."""
_LONGEST_TEXT = 2**24
"""What these may hold before they are compressed"""


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What a configuration says beside the keys of its class.

    :param trainer: Dotted path of the trainer's class.
    :param launch: How xffl exec starts it.
    :param slurm: What xffl submit asks SLURM for.
    """

    trainer: str | None = None
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)


@dataclass(frozen=True)
class Resolved(_Job, Generic[T]):
    """A configuration, where its values came from, and what is said beside it."""

    config: T
    origins: dict[str, str]
    """The origin of each value by its dotted key: ``default``, ``file NAME``, ``environment NAME``, ``command line``.
    """
    given: dict[str, Any] = field(default_factory=dict)
    """What the sources say, as YAML holds it."""
    sources: dict[tuple[str, ...], Source] = field(default_factory=dict)
    """Where each of them says so."""


# Reading --------------------------------------------------------------------------------------------------------------


class Words(NamedTuple):
    """A command line that was taken apart."""

    files: list[str]
    settings: list[tuple[str, str, bool]]
    """Dotted key, text, and whether it is added to a list."""
    flags: set[str]


def read_words(words: Sequence[str]) -> Words:
    """Take a command line apart: ``--key value``, ``--key=value``, ``--key+=value``, ``--config FILE`` and flags."""
    result = Words([], [], set())
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word in _FLAGS:
            result.flags.add(_FLAGS[word])
            continue
        name, is_pair, text = word[2:].partition("=")
        if not word.startswith("--") or not name.removesuffix("+"):
            raise ConfigError(
                f"{word!r} on the command line is not an option; write --key value, as --training.epochs 3"
            )
        if not is_pair:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"--{name} on the command line has no value; write --{name} VALUE or --{name}=VALUE")
            text = rest.pop(0)
        if name == "config":
            result.files.append(text)
        else:
            result.settings.append((name.removesuffix("+"), text, name.endswith("+")))
    return result


def read_configuration(
    kind: type[T],
    files: Iterable[str | os.PathLike[str]] = (),
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Resolved[T]:
    """Return a configuration from files, the environment and a command line; local.

    Beside the keys of the dataclass, all may hold ``trainer`` and the sections ``launch`` and ``slurm``, which ``xffl
    exec`` and ``xffl submit`` read.

    :param kind: A dataclass; fields that are dataclasses are its sections.
    :param files: YAML files; later ones beat earlier ones.
    :param overrides: Words of a command line, such as ``--training.epochs 3``; ``--config FILE`` adds a file.
    :param environ: Environment, of which variables such as ``XFFL_TRAINING__EPOCHS`` are read; ``None`` means the
        process's own.
    :return: The configuration and the origins of its values.
    :raises ConfigError: if a file cannot be read, a key is unknown or a value is invalid.
    """
    return _resolve(kind, _read_sources(kind, files, overrides, environ))


def _read_sources(
    kind: type, files: Iterable[str | os.PathLike[str]], overrides: Sequence[str], environ: Mapping[str, str] | None
) -> Settings:
    words = read_words(overrides)
    settings = _settings_of(kind)
    for file in (*files, *words.files):
        data, lines = load_file(os.fspath(file))
        settings.put_items((), data, Source(f"file {os.fspath(file)}", lines))
    settings.put_environment(requested_settings(environ))
    for key, text, is_added in words.settings:
        path = tuple(key.split("."))
        if is_added:
            settings.add(path, text)
        else:
            settings.put(path, text, Source(COMMAND_LINE), is_text=True)
    return settings


def _settings_of(kind: type) -> Settings:
    """Return settings of a configuration's class and of its start, none given yet."""
    import_module("xffl.training.callbacks")  # whose names stand for them in class_path
    for name in (*keys_of(_Job), "config"):
        if name in keys_of(kind):
            raise ConfigError(f"field {name!r} of {kind.__qualname__} is a word of xffl exec; rename it")
    return Settings({**keys_of(kind), **keys_of(_Job)})


def _resolve(kind: type[T], settings: Settings) -> Resolved[T]:
    config: T = settings.build(kind, (), settings.tree)
    job = settings.build(_Job, (), settings.tree)
    origins = settings.origins(config)
    # What is left out of trainer and slurm says nothing to xffl exec.
    origins |= {key: one for key, one in settings.origins(job).items() if one != DEFAULT or key.startswith("launch.")}
    return Resolved(config, origins, settings.tree, settings.sources, **vars(job))


def read_job(
    file: str, words: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> tuple[type, Resolved[Any]]:
    """Return the class of the trainer that a configuration file names, and its configuration, as ``xffl exec`` does."""
    trainer = job_trainer(file, words, environ)
    return trainer, read_configuration(config_class(trainer), [file], words, environ)


def read_job_with(settings: Mapping[str, Any], file: str, words: Sequence[str] = ()) -> tuple[type, Resolved[Any]]:
    """Return what :func:`read_job` does, with values of dotted keys that beat those of the command line."""
    trainer = job_trainer(file, words)
    kind = config_class(trainer)
    sources = _read_sources(kind, [file], words, None)
    _put(sources, settings)
    return trainer, _resolve(kind, sources)


def with_settings(resolved: Resolved[T], settings: Mapping[str, Any]) -> Resolved[T]:
    """Return a configuration with other values of dotted keys, which beat those it has; no source is read again."""
    kind = type(resolved.config)
    changed = _settings_of(kind)
    changed.tree = copy.deepcopy(resolved.given)
    changed.sources = dict(resolved.sources)
    _put(changed, settings)
    return _resolve(kind, changed)


def _put(settings: Settings, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        settings.put(tuple(key.split(".")), value, Source(COMMAND_LINE))


def job_trainer(file: str, words: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> type:
    """Return the class of the trainer that a configuration file names, whatever else the file holds.

    From now on modules are looked for in the file's folder before all other places.
    """
    command = read_words(words)
    files = ((f"file {source}", load_file(source)[0]) for source in (file, *command.files))
    given = [(data["trainer"], origin) for origin, data in files if "trainer" in data]
    if (variable := requested_settings(environ).get("XFFL_TRAINER")) is not None:
        given.append((variable, "environment XFFL_TRAINER"))
    given += [(text, COMMAND_LINE) for key, text, _ in command.settings if key == "trainer"]
    if not given:
        raise ConfigError(f"file {file} names no trainer; write trainer: train.MyTrainer, the dotted path of its class")
    return _find_trainer(*given[-1], os.path.dirname(os.path.abspath(file)))


def write_resolved(file: str, resolved: Resolved[Any]) -> str:
    """Return a configuration as one word for :func:`read_resolved`: what the sources said, not the objects made of it.

    So a callback need not keep its arguments.
    """
    folder = os.path.dirname(os.path.abspath(file))
    text = write_yaml([folder, resolved.trainer, resolved.given, resolved.origins])
    word = base64.b64encode(zlib.compress(text.encode())).decode()
    if len(word) > _LONGEST:
        raise ConfigError(
            f"the configuration takes {len(word)} bytes, and ranks can be given {_LONGEST}; keep long lists in a file "
            "that the trainer reads"
        )
    return word


def read_resolved(word: str) -> tuple[type, Resolved[Any]]:
    """Return the trainer's class and the configuration that :func:`write_resolved` wrote; no source is read again."""
    folder, name, given, origins = parse_yaml(zlib.decompress(base64.b64decode(word)), limit=_LONGEST_TEXT)
    trainer = _find_trainer(name, origins["trainer"], folder)
    settings = _settings_of(config_class(trainer))
    settings.tree = given
    settings.sources = {tuple(key.split(".")): Source(origin) for key, origin in origins.items() if origin != DEFAULT}
    return trainer, dataclasses.replace(_resolve(config_class(trainer), settings), origins=origins)


def _find_trainer(name: Any, origin: str, folder: str) -> type:
    module, _, attribute = name.rpartition(".") if isinstance(name, str) else ("", "", "")
    if not module or not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(
            f"trainer is {name!r} ({origin}); give the dotted path of a class, such as train.DigitsTrainer"
        )
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
    try:
        trainer = getattr(import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, and lacks another one
        near = closest(error.name, [file.stem for file in Path(folder).glob("*.py")])
        raise ConfigError(
            f"trainer {name} ({origin}): there is no module {error.name!r} in {folder}, nor installed; "
            + (f"did you mean {near}?" if near else f"put {error.name}.py beside the configuration")
        ) from error
    if not isinstance(trainer, type) or not callable(getattr(trainer, "fit", None)):
        what = "has no such name" if trainer is None else f"has {trainer!r} there"
        names = [
            attribute_name
            for attribute_name, item in vars(import_module(module)).items()
            if callable(getattr(item, "fit", None))
        ]
        near = closest(attribute, names)
        hint = f"did you mean {module}.{near}?" if near else "name a class with a method fit"
        raise ConfigError(f"trainer {name} ({origin}): module {module} {what}; {hint}")
    return trainer


def config_class(trainer: type) -> type:
    """Return the dataclass that a trainer's annotation ``config`` names, of the first class in its order that says."""
    for base in trainer.__mro__:
        hint = inspect.get_annotations(base).get("config")
        if hint is None:
            continue
        names = {**vars(sys.modules[base.__module__]), base.__name__: base}
        try:
            kind = typing.get_type_hints(SimpleNamespace(__annotations__={"config": hint}), globalns=names)["config"]
        except NameError as error:
            raise ConfigError(
                f"annotation config: {hint} of {base.__qualname__} cannot be resolved: {error}; import it outside "
                "'if TYPE_CHECKING'"
            ) from error
        if isinstance(kind, type) and is_dataclass(kind):
            return kind
    raise ConfigError(
        f"trainer {trainer.__qualname__} does not say what its configuration is; annotate it: config: MyTrainerConfig"
    )


# Showing --------------------------------------------------------------------------------------------------------------


def print_text(resolved: Resolved[Any]) -> str:
    """Return a configuration as YAML, with the origin of each value behind it; it reads back as the same; local."""
    plain: dict[str, Any] = {} if resolved.trainer is None else {"trainer": resolved.trainer}
    plain["launch"] = to_plain(resolved.launch)
    asked = {key.split(".")[1] for key in resolved.origins if key.startswith("slurm.")}
    if asked:
        plain["slurm"] = {key: value for key, value in to_plain(resolved.slurm).items() if key in asked}
    plain |= to_plain(resolved.config)
    return "".join(_annotated(plain, resolved.origins, ""))


def _annotated(plain: Mapping[str, Any], origins: Mapping[str, str], above: str) -> Iterable[str]:
    """Yield lines of YAML."""
    indent = "  " * above.count(".")
    for name, value in plain.items():
        key = f"{above}{name}"
        inside = f"{key}."
        if isinstance(value, dict) and key not in origins and value:
            yield f"{indent}{name}:\n"
            yield from _annotated(value, origins, inside)
            continue
        parts = [origins.get(key, DEFAULT)]
        parts += [f"{part[len(inside) :]}: {origin}" for part, origin in origins.items() if part.startswith(inside)]
        first, *rest = write_yaml({name: value}).splitlines()
        yield f"{indent}{first}  # {' '.join(', '.join(parts).split())}\n"
        yield from (f"{indent}{line}\n" for line in rest)


def help_text(kind: type, usage: str) -> str:
    """Return what may be configured: all keys, with types, defaults and what is written about them; local."""
    parser = argparse.ArgumentParser(
        usage=usage,
        description="Defaults, then files, then the environment (XFFL_TRAINING__EPOCHS=3), then this command line: "
        "each beats those before it.",
        add_help=False,
    )
    more = parser.add_argument_group("this command line")
    added = "Add to a list, such as callbacks; then --callbacks.every 3 is for the one that was added."
    more.add_argument("--KEY+=VALUE", action="store_true", help=added)
    more.add_argument("--config", metavar="FILE", help="One more YAML file, which beats those before it.")
    shown = "Print the configuration with the origin of each value, and end."
    more.add_argument("--print_config", action="store_true", help=shown)
    more.add_argument("--help", action="store_true", help="Print this, and end.")
    _add_keys(parser, {name: key for name, key in keys_of(_Job).items() if key.section is not None})
    _add_keys(parser, keys_of(kind))
    return parser.format_help()


def _add_keys(parser: argparse.ArgumentParser, keys: Mapping[str, Key]) -> None:
    """Add keys, those of each section as a group of their own."""
    groups: dict[tuple[str, ...], Any] = {(): parser.add_argument_group("keys of the first level")}
    for path, key, default in walk(keys):
        name = ".".join(path)
        has_default = default is not None or key.factory is not None
        if key.section is not None:
            doc = f"{key.doc} By default left out." if default is None and has_default else key.doc
            groups[path] = parser.add_argument_group(name, doc or None)
            continue
        shown = write_yaml([to_plain(default)]).removeprefix("- ").strip().replace("\n", " ")
        text = f"{key.doc} (default: {shown})".strip() if has_default else key.doc
        metavar = name_of_type(key.hint).replace("%", "%%")
        groups[path[:-1]].add_argument(f"--{name}", metavar=metavar, help=text.replace("%", "%%"), dest="_")


# Starting -------------------------------------------------------------------------------------------------------------


def main(trainer: type, argv: Sequence[str] | None = None) -> Any:
    """Train as a command line says: what a script of one's own ends with.

    .. code-block:: python

       if __name__ == "__main__":
           xffl.training.main(MyTrainer)

    ``python train.py --config config.yaml --training.epochs 3`` trains in one process; ``xffl exec``, ``torchrun``,
    ``srun`` and ``mpirun`` start more. A mistake in the configuration, and one that does not fit the processes that
    were started, is reported in one line, with exit code 2. What training raises is passed on.

    :param trainer: The trainer's class; its annotation ``config`` names the configuration's.
    :param argv: Words of the command line; ``None`` means this process's.
    :return: What ``fit`` returns; ``None`` after ``--help`` or ``--print_config``.
    :raises SystemExit: if the configuration is invalid, or does not fit what was started.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        flags = read_words(words).flags
        kind = config_class(trainer)
        if "help" in flags:
            print(help_text(kind, f"{os.path.basename(sys.argv[0])} [--config FILE] [--KEY VALUE ...]"), end="")
            return None
        resolved: Resolved[Any] = read_configuration(kind, (), words)
        if "print_config" in flags:
            print(print_text(resolved), end="")
            return None
        ask_for_cells(resolved)
    except XfflError as error:
        tell_unmet(error)
        raise SystemExit(ExitCode.REFUSED) from error
    return trainer(resolved.config, origins=resolved.origins).fit()


def choose_federation(
    resolved: Resolved[Any], world_size: int, *, federated: Federation | None = None, hsdp: int | None = None
) -> tuple[Federation | None, int | None]:
    """Return the cells and replicas that are asked for, as :func:`xffl.session` takes them; local.

    Options of ``xffl exec`` beat the section ``launch`` where the command line or the environment has set it, which
    beats ``XFFL_FEDERATED`` and ``XFFL_HSDP``, which beat it where a file has. ``distributed.federated`` of the
    configuration may not differ.
    """
    variable, variable_hsdp = requested_federation()

    def pick(option: Any, name: str, variable: Any) -> tuple[Any, str]:
        """Return the value that beats the others, and where it comes from."""
        origin = resolved.origins.get(f"launch.{name}", DEFAULT)
        given = (getattr(resolved.launch, name), f"launch.{name} ({origin})")
        variables = (variable, f"XFFL_{name.upper()}")
        order = (variables, given) if origin.startswith("file ") else (given, variables)
        chosen = ((option, f"--{name}"), *order)
        return next(((value, source) for value, source in chosen if value is not None), (None, ""))

    sizes, source = pick(federated, "federated", variable)
    replica_size, replica_source = pick(hsdp, "hsdp", variable_hsdp)

    def fitted(sizes: int | tuple[int, ...] | None, source: str) -> Topology:
        with sources_named(filter(None, (source, replica_source))):
            return Topology(world_size, sizes, replica_size)

    asked = getattr(getattr(resolved.config, "distributed", None), "federated", None)
    is_same = sizes is None or asked in (None, sizes)
    if isinstance(asked, str):
        # xffl exec has put what it found by a rule into the variable.
        is_same = is_same or sizes == variable
        sizes = asked if sizes is None else sizes
    elif asked is not None:
        wanted = fitted(asked, "distributed.federated")
        is_same = is_same or (not isinstance(sizes, str) and fitted(sizes, source) == wanted)
    if not is_same:
        raise ConfigError(
            f"cells of {sizes} are asked for by {source}, but distributed.federated is {asked}; leave one of them out"
        )
    if not isinstance(sizes, str):
        fitted(sizes, source)
    return sizes, replica_size


def ask_for_cells(resolved: Resolved[Any], *, federated: Federation | None = None, hsdp: int | None = None) -> None:
    """Check that a configuration fits the processes that were started, and ask for its cells; local.

    ``federated`` and ``hsdp`` are options that beat the configuration.
    """
    launch, place = resolved.launch, detect_environment()
    if launch.processes not in (None, place.world_size):
        origin = resolved.origins.get("launch.processes")
        by = "there is" if place.launcher == "none" else f"{place.launcher} has started"
        raise ConfigError(
            f"launch.processes is {launch.processes} ({origin}), but {by} {place.world_size}; "
            f"start {launch.processes}, or give --launch.processes {place.world_size}"
        )
    request_federation(*choose_federation(resolved, place.world_size, federated=federated, hsdp=hsdp))
