"""``xffl cells``: who is known to the lighthouse of an elastic run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from xffl.checks import number
from xffl.cli.main import HelpFormatter, new_table, print_table
from xffl.errors import XfflError

if TYPE_CHECKING:
    from rich.console import Group

    from xffl.cluster.lighthouse_page import CellStatus, LighthouseStatus

__all__ = ["build_parser", "run"]

_EXAMPLES = """\
examples:
  xffl cells http://10.0.0.1:29510
  xffl cells file:runs/demo/lighthouse --watch 5
  xffl cells 10.0.0.1:29510 --json

A cell is lost if its heartbeats have stopped: it failed, hangs, is cut off, or has finished. Round, ranks and store are
those that it told at the last meeting, if it was there. Only the page of the lighthouse is read; no cell is asked.
"""


def build_parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    parser = ArgumentParser(
        description="Show who is known to the lighthouse of an elastic run: cells, their rounds and heartbeats.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("url", type=str, metavar="URL", help="its address: http://HOST:PORT, or file:PATH with it")
    parser.add_argument("--json", action="store_true", help="print JSON")
    watch = "show it again after so many seconds (2), until Ctrl-C"
    parser.add_argument("--watch", type=float, nargs="?", const=2.0, metavar="SECONDS", help=watch)
    return parser


def run(options: Namespace) -> int:
    """Read the page of the lighthouse, and print what it tells."""
    if options.watch is not None:
        number("--watch", options.watch, 0.1, below=1e6, hint="in seconds")
    url, status = _read(options.url)
    if options.json or options.watch is None or not sys.stdout.isatty():
        _follow(options, url, status, partial(_print, as_json=options.json))
    else:
        from rich.live import Live

        with Live(auto_refresh=False) as live:
            _follow(options, url, status, lambda *told: live.update(_table(*told), refresh=True))
    return 0


def _read(address: str) -> tuple[str, LighthouseStatus]:
    from xffl.cluster.environment import resolve_lighthouse
    from xffl.cluster.lighthouse_page import read_lighthouse

    url = resolve_lighthouse(address)
    return url, read_lighthouse(url)


def _follow(
    options: Namespace, url: str, status: LighthouseStatus, show: Callable[[str, LighthouseStatus, str], None]
) -> None:
    """Show a status, and with ``--watch`` each later one, or why there is none: lighthouses are started again."""
    trouble = ""
    while True:
        show(url, status, trouble)
        if options.watch is None:
            return
        time.sleep(options.watch)
        try:
            (url, status), trouble = _read(options.url), ""
        except XfflError as error:
            trouble = str(error)


def _print(url: str, status: LighthouseStatus, trouble: str, *, as_json: bool) -> None:
    """Print a status as a table, or as one object on one line; or why there is none."""
    if trouble:
        print(f"xffl: {trouble}", file=sys.stderr, flush=True)
        return
    if not as_json:
        print_table(_table(url, status, ""))
        sys.stdout.flush()
        return
    meeting = None if status.meeting is None else {"number": status.meeting, "age_s": status.age_s}
    cells = [_plain(status, cell) for cell in status.cells]
    print(json.dumps({"lighthouse": url, "meeting": meeting, "cells": cells}), flush=True)


def _plain(status: LighthouseStatus, cell: CellStatus) -> dict[str, Any]:
    return {
        "cell": cell.cell,
        "life": cell.life,
        "state": "lost" if cell.is_lost else "alive",
        "round": cell.round,
        "lag": status.lag_of(cell),
        "ranks": cell.ranks,
        "store": cell.store or None,
        "seen_s": cell.seen_s,
        "met": cell.has_met,
    }


def _table(url: str, status: LighthouseStatus, trouble: str) -> Group:
    """Return the cells as a table of rich, with the last meeting below it."""
    from rich.console import Group
    from rich.text import Text

    table = new_table()
    for column in ("cell", "life", "state", "round", "lag", "ranks", "store", "last seen", "met"):
        is_text = column in ("life", "state", "store", "met")
        table.add_column(column, no_wrap=True, justify="left" if is_text else "right")
    for cell in status.cells:
        seen = None if cell.seen_s is None else f"{cell.seen_s:.1f} s ago"
        told = {**_plain(status, cell), "seen_s": seen, "met": "yes" if cell.has_met else "no"}
        words = ["-" if value is None else str(value) for value in told.values()]
        table.add_row(*words, style="red" if cell.is_lost else "")
    met = sum(cell.has_met for cell in status.cells)
    line = "no cells have met yet"
    if status.age_s is not None:
        line = f"meeting {status.meeting} was {status.age_s:.1f} s ago, with {met} of these {len(status.cells)} cells"
    return Group(*([table] if status.cells else []), Text(line), *([Text(trouble, "red")] if trouble else []))
