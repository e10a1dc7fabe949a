"""``xffl list``: show the algorithms that there are, with their papers."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from xffl.cli.formatter import HelpFormatter

if TYPE_CHECKING:
    from xffl.aggregation.algorithms.registry import AlgorithmInfo

__all__ = ["build_parser", "run"]

_EXAMPLES = """\
examples:
  xffl list algorithms
  xffl list algorithms --kind combine
  xffl list algorithms --json
"""

_FILE_WIDTH = 240
"""Columns where the output is no terminal: wide enough that an entry stays on its line."""


def build_parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    parser = ArgumentParser(
        description="Show the algorithms and their parts by name. Each can be given as text, name:option=value, or as "
        'a mapping, {"name": ..., option: value}; instead of a name, the dotted path of a class of your own.',
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("what", choices=("algorithms",), help="what to list")
    parser.add_argument("--kind", type=str, help="one kind only, with options: algorithm, server, combine, client, ...")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(options: Namespace) -> int:
    """Print the entries of the registry.

    :param options: What :func:`build_parser` parses.
    :return: Exit code 0.
    :raises ConfigError: if there is no such kind.
    """
    from rich.console import Console
    from rich.table import Table

    from xffl.aggregation.algorithms.registry import entries

    found = entries(options.kind)
    if options.json:
        print(json.dumps([asdict(entry) for entry in found], indent=2))
        return 0
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("kind", "name", "what it does", "paper"):
        table.add_column(column, no_wrap=column in ("kind", "name"))
    if options.kind is not None:
        table.add_column("options")
    for entry in found:
        told = [_options(entry)] if options.kind is not None else []
        table.add_row(entry.kind, entry.name, entry.line, entry.paper or "-", *told)
    width = None if sys.stdout.isatty() else _FILE_WIDTH
    # Types have brackets, which are no markup.
    Console(file=sys.stdout, width=width, markup=False, emoji=False, highlight=False).print(table)
    return 0


def _options(entry: AlgorithmInfo) -> str:
    """Tell an entry's options; for all but algorithms this imports what it names, and torch with it."""
    from xffl.aggregation.algorithms.registry import describe_options, load

    if not entry.target:
        words = {**entry.aggregator, **entry.scaling}
        return ", ".join(f"{key} = {value}" for key, value in words.items()) or "none"
    target = load(entry.target, f"{entry.kind} {entry.name!r}")
    return describe_options(target, leading=1 if entry.kind == "server" else 0, preset=entry.options)
