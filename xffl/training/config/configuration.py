"""One configuration of four sources: defaults, files, the environment and the command line, each beating those before.

Every value knows where it came from, and so does every mistake.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from importlib import import_module
from typing import Any, Generic, TypeVar

from xffl.cluster.environment import requested_settings
from xffl.cluster.exit_codes import ExitCode
from xffl.cluster.slurm.submit import SlurmConfig
from xffl.errors import ConfigError, XfflError
from xffl.training.config.launching import LaunchConfig, ask_for_cells, config_class, find_trainer, fit
from xffl.training.config.schema import Key, Section, describe
from xffl.training.config.settings import COMMAND_LINE, DEFAULT, Settings, Source, read_words
from xffl.training.config.typed import name_of_type, to_plain
from xffl.training.config.yaml_text import write_yaml

__all__ = [
    "LaunchConfig",
    "Resolved",
    "help_text",
    "job_trainer",
    "main",
    "print_text",
    "read_configuration",
    "read_job",
    "to_plain",
]

T = TypeVar("T")

_TRAINER = Key(str | None, None, "Dotted path of the trainer's class.")
_SECTIONS: dict[str, tuple[type, str]] = {
    "launch": (LaunchConfig, "How xffl exec starts it."),
    "slurm": (SlurmConfig, "What xffl submit asks SLURM for."),
}
"""Beside the keys of the configuration's class."""


@dataclass(frozen=True)
class Resolved(Generic[T]):
    """A configuration, and where its values came from."""

    config: T
    origins: dict[str, str]
    """The origin of each value by its dotted key: ``default``, ``file NAME``, ``environment NAME``, ``command line``.
    """
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    trainer: str | None = None
    """The dotted path of the trainer's class, where one was given."""


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
    :raises ConfigError: if a file cannot be read, a key is unknown or a value cannot be meant.
    """
    words = read_words(overrides)
    root = describe(kind)
    for name in ("trainer", *_SECTIONS, "config"):
        if name in root.keys:
            raise ConfigError(f"field {name!r} of {kind.__qualname__} is a word of xffl exec; name it otherwise")
    sections = {name: dataclasses.replace(describe(one), doc=doc) for name, (one, doc) in _SECTIONS.items()}
    job: dict[str, Key | Section] = {"trainer": _TRAINER, **sections}
    import_module("xffl.training.callbacks")  # whose names stand for them in class_path
    tree = Settings(dataclasses.replace(root, keys={**root.keys, **job}))
    for file in (*files, *words.files):
        tree.put_file(os.fspath(file))
    tree.put_environment(requested_settings(environ))
    for key, text, is_added in words.settings:
        path = tuple(key.split("."))
        if is_added:
            tree.add(path, text)
        else:
            tree.put(path, text, Source(COMMAND_LINE, is_text=True))
    config = tree.build(root, ())
    chosen = {name: tree.build(section, (name,)) for name, section in sections.items()}
    # What is left out of the section slurm says nothing to anybody but xffl submit.
    asked = {key: origin for key, origin in tree.origins(chosen["slurm"], ("slurm",)).items() if origin != DEFAULT}
    origins = {**tree.origins(config, ()), **tree.origins(chosen["launch"], ("launch",)), **asked}
    trainer = tree.value(("trainer",), _TRAINER) if ("trainer",) in tree.given else None
    if trainer is not None:
        origins["trainer"] = tree.given["trainer",].source.origin
    return Resolved(config, origins, chosen["launch"], chosen["slurm"], trainer)


def read_job(
    file: str, words: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> tuple[type, Resolved[Any]]:
    """Return what a configuration file asks ``xffl exec`` for; its folder comes first where modules are looked for.

    :param file: A YAML file with the key ``trainer``.
    :param words: Words of a command line, as :func:`read_configuration` takes them.
    :param environ: Environment; ``None`` means the process's own.
    :return: The trainer's class, and its configuration.
    :raises ConfigError: if there is no such trainer, or the configuration cannot be meant.
    """
    trainer = job_trainer(file, words, environ)
    return trainer, read_configuration(config_class(trainer), [file], words, environ)


def job_trainer(file: str, words: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> type:
    """Return the class of the trainer that a configuration file names; the same as :func:`read_job` for the rest.

    :param file: A YAML file with the key ``trainer``.
    :param words: Words of a command line.
    :param environ: Environment; ``None`` means the process's own.
    :return: The class.
    :raises ConfigError: if there is no such trainer.
    """
    settings = Settings(Section(LaunchConfig, {"trainer": _TRAINER}, MISSING))
    for one in (file, *read_words(words).files):
        settings.put_file(one, only="trainer")
    variable = requested_settings(environ).get("XFFL_TRAINER")
    given = [(f"environment {variable}", variable)] if variable is not None else []
    given += [(COMMAND_LINE, text) for key, text, _ in read_words(words).settings if key == "trainer"]
    for origin, text in given:
        settings.put(("trainer",), text, Source(origin, is_text=True))
    if ("trainer",) not in settings.given:
        raise ConfigError(f"file {file} names no trainer; write trainer: train.MyTrainer, the dotted path of its class")
    name = settings.value(("trainer",), _TRAINER)
    return find_trainer(name, os.path.dirname(os.path.abspath(file)))


def print_text(resolved: Resolved[Any]) -> str:
    """Return a configuration as YAML, with the origin of each value behind it; it reads back as the same; local.

    :param resolved: The configuration.
    :return: The text.
    """
    job = {} if resolved.trainer is None else {"trainer": resolved.trainer}
    slurm = {key: value for key, value in to_plain(resolved.slurm).items() if _is_given(resolved.origins, key)}
    asked = {"slurm": slurm} if slurm else {}
    plain = {**job, "launch": to_plain(resolved.launch), **asked, **to_plain(resolved.config)}
    return "".join(_annotated(plain, resolved.origins, ""))


def help_text(kind: type, usage: str) -> str:
    """Return what may be configured: all keys, with types, defaults and what is written about them; local.

    :param kind: The configuration's class.
    :param usage: How to give them.
    :return: The text.
    """
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
    for name, (one, doc) in _SECTIONS.items():
        _add_keys(parser, dataclasses.replace(describe(one), doc=doc), name)
    _add_keys(parser, describe(kind), "")
    return parser.format_help()


def main(trainer: type, argv: Sequence[str] | None = None) -> Any:
    """Train as a command line says: what a script of one's own ends with.

    .. code-block:: python

       if __name__ == "__main__":
           xffl.training.main(MyTrainer)

    ``python train.py --config config.yaml --training.epochs 3`` trains in one process; ``xffl exec``, ``torchrun``,
    ``srun`` and ``mpirun`` start more. A mistake in the configuration, and one that does not fit the processes that
    were started, is told in one line, with exit code 2. What training raises is passed on.

    :param trainer: The trainer's class; its annotation ``config`` names the configuration's.
    :param argv: Words of the command line; ``None`` means this process's.
    :return: What ``fit`` returns; ``None`` after ``--help`` or ``--print_config``.
    :raises SystemExit: if the configuration cannot be meant, or does not fit what was started.
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
        ask_for_cells(resolved.config, resolved.launch, resolved.origins)
    except XfflError as error:
        print(f"xffl: {type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(ExitCode.REFUSED) from error
    return fit(trainer, resolved.config, resolved.origins)


def _is_given(origins: Mapping[str, str], key: str) -> bool:
    """Tell whether something else than a default has set a key of the section slurm, or a part of it."""
    name = f"slurm.{key}"
    return any(one == name or one.startswith(f"{name}.") for one in origins)


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
        told = [origins.get(key, "default")]
        told += [f"{part[len(inside) :]}: {origin}" for part, origin in origins.items() if part.startswith(inside)]
        first, *rest = write_yaml({name: value}).splitlines()
        yield f"{indent}{first}  # {' '.join(', '.join(told).split())}\n"
        yield from (f"{indent}{line}\n" for line in rest)


def _add_keys(parser: argparse.ArgumentParser, section: Section, name: str) -> None:
    """Tell the keys of a section, and of those inside it."""
    group = parser.add_argument_group(name or "keys of the first level", section.doc or None)
    for key, one in section.keys.items():
        if isinstance(one, Key):
            value = one.default if section.default in (MISSING, None) else getattr(section.default, key)
            default = "" if value is MISSING else f" (default: {_shown(value)})"
            text = f"{one.doc}{default}".strip().replace("%", "%%")
            kind = name_of_type(one.kind).replace("%", "%%")
            group.add_argument(f"--{name}{'.' * bool(name)}{key}", metavar=kind, help=text, dest="_")
    for key, one in section.keys.items():
        if isinstance(one, Section):
            inner = dataclasses.replace(one, doc=one.doc + (" By default left out." if one.default is None else ""))
            _add_keys(parser, inner, f"{name}{'.' * bool(name)}{key}")


def _shown(value: Any) -> str:
    return write_yaml([to_plain(value)]).removeprefix("- ").strip().replace("\n", " ")
