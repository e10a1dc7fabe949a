"""``xffl init``: write a project that runs, to begin with."""

from __future__ import annotations

import json
import shlex
import sys
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from xffl.cli.formatter import HelpFormatter
from xffl.errors import ConfigError
from xffl.extras import install_command

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

__all__ = ["build_parser", "run"]

_EXAMPLES = """\
examples:
  xffl init demo && cd demo && xffl exec config.yaml
  xffl init demo --template language_model
"""

_NAME = "@NAME@"
"""Stands for the project's name in the templates; in YAML for the same in quotes."""
_INSTALL = "@INSTALL@"
"""Stands for the command that installs what the digits need."""


def build_parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    parser = ArgumentParser(
        description="Write a project that runs into a new or empty folder: a configuration, a trainer, a page about "
        "them.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="folder to make; its last part names the run")
    kinds = ", ".join(sorted(_templates()))
    parser.add_argument("--template", type=str, default="digits", metavar="KIND", help=f"one of {kinds}")
    return parser


def run(options: Namespace) -> int:
    """Write the project.

    :param options: What :func:`build_parser` parses.
    :return: Exit code 0.
    :raises ConfigError: if there is no such template, or the folder is not empty or cannot be made.
    """
    templates = _templates()
    if options.template not in templates:
        raise ConfigError(f"--template is {options.template!r}; give one of {', '.join(sorted(templates))}")
    folder = Path(options.name)
    name = folder.resolve().name
    if not name:
        raise ConfigError(f"{options.name!r} is no folder for a project; give a name, such as demo")
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{options.name} is there already and not empty; give the name of a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(templates[options.template].iterdir(), key=lambda file: file.name):
            # Templates are no modules of xffl, so they are kept as text.
            target = folder / file.name.removesuffix(".txt").replace("dot.", ".")
            quoted = json.dumps(name, ensure_ascii=False) if target.suffix == ".yaml" else name
            text = file.read_text(encoding="utf-8").replace(_NAME, quoted)
            if _INSTALL in text:
                text = text.replace(_INSTALL, install_command("examples"))
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{options.name} cannot be written: {error.strerror}; give another folder") from error
    print(f"wrote {folder}; go on with: cd {shlex.quote(str(folder))} && xffl exec config.yaml", file=sys.stderr)
    return 0


def _templates() -> dict[str, Traversable]:
    folder = files("xffl.cli") / "templates"
    return {one.name: one for one in folder.iterdir() if one.is_dir() and not one.name.startswith("_")}
