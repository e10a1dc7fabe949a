"""``xffl logs``: show the log files that ``xffl exec --log-dir`` has made, as one stream."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from xffl.cli.formatter import HelpFormatter
from xffl.cluster.exit_codes import ExitCode
from xffl.cluster.launch.logs import Stream, list_rank_files
from xffl.errors import ConfigError

__all__ = ["build_parser", "run"]

_EXAMPLES = """\
examples:
  xffl logs runs/demo/logs
  xffl logs runs/demo/logs --follow --ranks 0,4-7

Without --follow the files are shown one rank after the other. Ctrl-C ends --follow.
"""


def build_parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    parser = ArgumentParser(
        description="Show what ranks printed, with the cell and the rank before each line.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("folder", type=str, metavar="DIR", help="what was given as --log-dir")
    parser.add_argument("--follow", action="store_true", help="go on as the files grow")
    parser.add_argument("--ranks", type=str, metavar="LIST", help="show these only: 0,4-7")
    return parser


def run(options: Namespace) -> int:
    """Show the files.

    :param options: What :func:`build_parser` parses.
    :return: Exit code 0.
    :raises ConfigError: if there is no such folder, or no file of such a rank in it.
    """
    ranks = None if options.ranks is None else _read_ranks(options.ranks)
    folder = Path(options.folder)
    found = {file.rank for file in list_rank_files(folder)}
    if not options.follow and not (found if ranks is None else found & ranks):
        shown = "any rank" if ranks is None else f"ranks {options.ranks}"
        raise ConfigError(f"folder {options.folder!r} holds no log file of {shown}; give that of --log-dir")
    stream = Stream(folder, sys.stdout.buffer, ranks)
    if options.follow:
        stream.follow(threading.Event().wait)
    stream.copy(is_end=True)
    return ExitCode.OK


def _read_ranks(text: str) -> set[int]:
    ranks: set[int] = set()
    for item in text.split(","):
        first, dash, last = item.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise ConfigError(f"--ranks {text!r} has {item!r}; give numbers and ranges like 0,4-7")
        ranks.update(range(int(first), int(last) + 1))
    return ranks
