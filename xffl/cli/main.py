"""The ``xffl`` command: parses, calls, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, DefaultHelpFormatter

from xffl import __version__
from xffl.checks import one_of, visible
from xffl.cli.numbers import NUMBER_TYPES
from xffl.cli.terminal import visible_output
from xffl.cli.upstream import refuse_upstream_command
from xffl.cluster.launch.failure import ExitCode, code_of_lost_output, tell_unmet
from xffl.errors import XfflError

__all__ = ["COMMANDS", "CommandParser", "HelpFormatter", "build_parser", "command_parser", "main"]

COMMANDS = {
    "aggregate": ("exports", "make a round from the exports of cells without a common network"),
    "exec": ("execute", "start a script or a configuration in several processes: here, by srun or by ssh"),
    "bench": ("bench", "time the paths between ranks, and rounds over them"),
    "cells": ("cells", "show the cells of an elastic run: which are alive, and which hold the newest model"),
    "consolidate": ("exports", "write a checkpoint's model as safetensors"),
    "doctor": ("doctor", "check the machines of a job before it waits in the queue"),
    "env": ("misc", "show which launcher started this process, and how that was detected"),
    "init": ("misc", "write a small project to start from"),
    "lighthouse": ("lighthouse", "run the server where cells and replica groups find each other"),
    "list": ("misc", "show the algorithms by name, with their papers"),
    "logs": ("misc", "show what ranks printed, with rank and cell before each line"),
    "plan": ("plan", "draw a federation and count the traffic of a round"),
    "report": ("misc", "write a page about one run, or a comparison of several"),
    "submit": ("submit", "submit a batch job to SLURM and follow it"),
    "workflow": ("workflow", "write a workflow that trains each cell in a facility of its own"),
}
"""Each command with its module in this package, which is loaded only if it is called, and what it does.

A module has ``build_parser`` and ``run``, or several commands and ``COMMANDS`` with both functions of each.
"""

_RAW = ("bench", "cells", "exec", "list", "logs", "submit")
"""Commands whose output is that of the user's own ranks, or is drawn for a terminal, with nothing of others in it."""

_OF_RANKS = ("bench", "exec")
"""Commands that launchers start once for each rank."""

_EXAMPLES = """\
examples:
  xffl plan --federated 4,4 --hsdp 2 --params 8e9 --link-gbps 10
  xffl init demo
  xffl exec config.yaml --training.epochs 3
  xffl exec --processes 4 --federated 2,2 train.py
  xffl submit config.yaml --dry-run
  xffl bench --processes 4 --federated 2,2
  xffl doctor
  xffl list algorithms

xffl COMMAND --help shows the options of a command.
"""


class HelpFormatter(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Show types and defaults, as jsonargparse does, and leave the lines of descriptions and examples as they are."""

    def _get_help_string(self, action: argparse.Action) -> str:
        """Leave out defaults that say nothing: no value, and a flag that is not set."""
        text: str = super()._get_help_string(action)
        if inspect.isfunction(action.type):
            text = text.replace("%(type)s", action.type.__name__)
        if action.default in (None, False):
            text = text.replace(", default: %(default)s)", ")").replace(" (default: %(default)s)", "")
        return text


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command."""
    _open_standard_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if not words:
            build_parser().print_help(sys.stderr)
            return ExitCode.REFUSED
        if words[0] not in COMMANDS:
            if not words[0].startswith("-"):
                refuse_upstream_command(words[0])
                one_of("command", words[0], tuple(COMMANDS))
            build_parser().parse_args(words)  # shows the help or the version, or says what is wrong
            return ExitCode.OK
        name, arguments, script = words[0], words[1:], None
        command = import_module(f"xffl.cli.{COMMANDS[name][0]}")
        if name == "exec":
            words, script = command.split_command(words)
            arguments = words[1:]
        elif name == "submit":
            arguments = command.join_elastic(arguments)
        build, run = getattr(command, "COMMANDS", {}).get(name) or (command.build_parser, command.run)
        parser: ArgumentParser = build()
        parser.prog = f"xffl {name}"
        options = parser.parse_args(arguments)
        with nullcontext() if name in _RAW else visible_output():
            code: int = run(options) if script is None else run(options, script)
            sys.stdout.flush()
        return code
    except XfflError as error:
        if words[0] in _OF_RANKS:
            # One that starts ranks is none itself, whatever variables it has been left.
            tell_unmet(error, {} if any(map(_starts_ranks, words)) else os.environ)
        else:
            print(visible(f"xffl: {type(error).__name__}: {error}"), file=sys.stderr)
        return ExitCode.REFUSED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except OSError as error:
        if (lost := code_of_lost_output(error)) is not None:
            return lost
        # A file that was named cannot be used. Ranks and their scripts show the traceback.
        if error.filename is None or words[0] == "exec":
            raise
        print(visible(f"xffl: {error.filename}: {error.strerror}; give another"), file=sys.stderr)
        return ExitCode.REFUSED


def _open_standard_streams() -> None:
    """Open what is closed of this process's standard input, output and error on the null device (``xffl plan >&-``).

    Python gives such a stream as ``None``, and the next file or socket that anyone opens would get its number: what
    ranks print would end in it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
            place: int | str = os.devnull  # whoever has opened the number since Python's start keeps it
        except OSError:
            place = number
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, number)
            if nowhere != number:
                os.close(nowhere)
            os.set_inheritable(number, True)  # for ranks; dup2 does nothing where the two numbers are the same
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            # On the number itself: a rank's log file takes its place.
            stream = open(  # noqa: SIM115
                place, mode, buffering=1, encoding="utf-8", errors="backslashreplace", closefd=place != number
            )
            setattr(sys, name, stream)


def _starts_ranks(word: str) -> bool:
    """Tell whether a word of a command asks it to start ranks itself; pure."""
    return word.partition("=")[0] in ("--processes", "--hosts")


class CommandParser(ArgumentParser):
    """A parser of a command: it reads all numbers alike, and says in one line what is wrong."""

    def add_argument(self, *args: Any, **more: Any) -> argparse.Action:
        """Add an option; one of type ``int`` takes counts such as 7b, too."""
        if "type" in more:
            more["type"] = NUMBER_TYPES.get(more["type"], more["type"])
        action: argparse.Action = super().add_argument(*args, **more)
        return action

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Tell what is wrong with the words, and leave with exit code 2."""
        parser = getattr(ex, "subcommand_parser", None) or self
        name = parser.prog.replace(" [options]", "")
        line = visible(" ".join(message.split())).rstrip(".")
        print(f"{name}: {line}; {name} --help shows what it takes", file=sys.stderr)
        sys.exit(int(ExitCode.REFUSED))


def command_parser(description: str | None = None, examples: str | None = None, **more: Any) -> CommandParser:
    """Return a parser of a command whose help begins with a description and ends with examples."""
    return CommandParser(description=description, epilog=examples, formatter_class=HelpFormatter, **more)


def build_parser() -> ArgumentParser:
    """Return the parser of a command line that calls no command: those have parsers of their own."""
    description = "Train one sharded model on several groups of GPUs that are joined by slow links."
    parser = command_parser(description, _EXAMPLES, prog="xffl", version=__version__)
    commands = parser.add_subcommands(required=True)
    for name, (_, summary) in COMMANDS.items():
        commands.add_subcommand(name, command_parser(), help=summary)
    return parser
