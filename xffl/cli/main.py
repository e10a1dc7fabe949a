"""The ``xffl`` command: parses, calls, and turns errors into one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from jsonargparse import ArgumentParser

from xffl import __version__
from xffl.cli import bench, consolidate, env, execute, init, listing, plan, report
from xffl.cli.formatter import HelpFormatter
from xffl.errors import XfflError

__all__ = ["build_parser", "main"]

_EXAMPLES = """\
examples:
  xffl plan --federated 4,4 --hsdp 2 --params 8e9 --link-gbps 10
  xffl init demo
  xffl exec config.yaml --training.epochs 3
  xffl exec --processes 4 --federated 2,2 train.py
  xffl bench --processes 4 --federated 2,2
  xffl env
  xffl list algorithms

xffl COMMAND --help tells more.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    :param argv: Command line without the program's name; ``None`` means this process's.
    :return: Exit code: 0, 2 for an :class:`~xffl.errors.XfflError` or a wrong option, 130 after Ctrl-C; ``exec`` passes
        on the code of the rank that failed first.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    command: list[str] = []
    if words[:1] == ["exec"]:
        words, command = execute.split_command(words)
    try:
        chosen = build_parser().parse_args(words)
        name = chosen.subcommand
        options = chosen[name]
        if name == "exec":
            return execute.run(options, command)
        run = {
            "bench": bench.run,
            "consolidate": consolidate.run,
            "env": env.run,
            "init": init.run,
            "list": listing.run,
            "plan": plan.run,
            "report": report.run,
        }[name]
        return run(options)
    except XfflError as error:
        print(f"xffl: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has gone ("xffl plan ... | head"); Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def build_parser() -> ArgumentParser:
    """Return the parser of the command line, without the script of ``exec`` and what follows it."""
    parser = ArgumentParser(
        prog="xffl",
        description="Train one sharded model on several groups of GPUs that are joined by slow links.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
        version=__version__,
    )
    commands = parser.add_subcommands(required=True)
    commands.add_subcommand("exec", execute.build_parser(), help="start a script in several processes on this machine")
    commands.add_subcommand("bench", bench.build_parser(), help="time the paths between ranks, and rounds over them")
    commands.add_subcommand("consolidate", consolidate.build_parser(), help="write a checkpoint's model as safetensors")
    commands.add_subcommand("env", env.build_parser(), help="show who started this process, and how that was found out")
    commands.add_subcommand("init", init.build_parser(), help="write a project that runs, to begin with")
    commands.add_subcommand("list", listing.build_parser(), help="show the algorithms by name, with their papers")
    commands.add_subcommand("plan", plan.build_parser(), help="draw a federation and count the traffic of a round")
    commands.add_subcommand("report", report.build_parser(), help="write a page about a run, or about several compared")
    return parser
