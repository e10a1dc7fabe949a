"""``xffl cells``: who is known to the lighthouse of an elastic run, and which model its journal says is the newest."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from xffl.checks import integer, number, visible
from xffl.cli.main import command_parser
from xffl.cli.terminal import new_table, print_table
from xffl.cluster import run_token
from xffl.cluster.lighthouse import address as lighthouse_address
from xffl.errors import ConfigError, StateError, XfflError, public_name
from xffl.topology import cells_text

if TYPE_CHECKING:
    from rich.console import Group

    from xffl.cluster.lighthouse.page import CellStatus, LighthouseStatus
    from xffl.journal.records import Journal, Record

__all__ = ["build_parser", "run"]

_EXAMPLES = """\
examples:
  xffl cells http://10.0.0.1:29510
  xffl cells file:runs/demo/lighthouse --watch 5
  xffl cells 10.0.0.1:29510 --json
  xffl cells file:runs/demo/lighthouse --forget 2

A cell is lost if its heartbeats have stopped: it failed, hangs, is cut off, or has finished. Round, ranks and store are
those that it gave at the last meeting, if it took part. The page of the lighthouse and the run's journal are read; no
cell is asked.
"""
_LOOK_S = 2.0
"""How long to ask a journal for a look; a first try has longer"""
_FORGET_S = 10.0
"""How long to ask a journal to forget a cell"""


def build_parser() -> ArgumentParser:
    """Return the parser of the options."""
    parser = command_parser(
        "Show the cells of an elastic run: which are alive, and which hold the newest model.", _EXAMPLES
    )
    address = "address of its lighthouse: http://HOST:PORT, or file:PATH with it"
    parser.add_argument("url", type=str, metavar="URL", help=address)
    parser.add_argument("--json", action="store_true", help="print JSON")
    watch = "show it again after so many seconds (2), until Ctrl-C"
    parser.add_argument("--watch", type=float, nargs="?", const=2.0, metavar="SECONDS", help=watch)
    place = "the run's journal: its folder, or http://HOST:PORT; by default by XFFL_JOURNAL, or by the lighthouse"
    parser.add_argument("--journal", type=str, metavar="PLACE", help=place)
    forget = "give up what this cell holds, so that no other cell waits for it"
    parser.add_argument("--forget", type=int, metavar="CELL", help=forget)
    return parser


def run(options: Namespace) -> int:
    """Show what lighthouse and journal tell, or have the journal forget a cell."""
    journal = _JournalReader(_place_of(options))
    if options.forget is not None:
        if options.watch is not None or options.json:
            raise ConfigError("--forget writes a record and shows nothing; leave --watch and --json out")
        return _forget(journal, integer("--forget", options.forget, 0))
    if options.watch is not None:
        number("--watch", options.watch, 0.1, below=1e6, hint="in seconds")
    first = _look(options.url, journal)
    if options.json or options.watch is None or not sys.stdout.isatty():
        _follow(options, journal, first, partial(_print_look, as_json=options.json))
    else:
        from rich.live import Live

        with Live(auto_refresh=False) as live:
            _follow(options, journal, first, lambda *look: live.update(_draw_look(*look), refresh=True))
    return 0


def _forget(journal: _JournalReader, cell: int) -> int:
    """Have the journal forget a cell, and tell what follows; 1 where the same command may succeed later."""
    from xffl.journal.records import JournalUnreachable

    try:
        print(visible(journal.forget(cell)))
    except (JournalUnreachable, StateError) as error:
        print(visible(f"xffl: {public_name(error)}: {error}"), file=sys.stderr)
        return 1
    return 0


def _place_of(options: Namespace) -> str:
    """Return where the run's journal is."""
    from xffl.journal.place import derive_journal, parse_journal, read_journal_variable

    if options.journal is not None:
        return parse_journal("--journal", options.journal)
    return read_journal_variable() or derive_journal(options.url)


# The journal ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _JournalStatus:
    """What the journal says of the newest model that a cell may still hold."""

    place: str
    trouble: str = ""  # why it cannot be read
    newest: int = -1  # number of the newest record
    round: int | None = None  # of the model; None if no cell holds one
    record: int | None = None  # number of the record that made the model
    holders: tuple[int, ...] = ()  # cells that may hold it

    def waited_for(self, living: Collection[int]) -> tuple[int, ...]:
        """Return the cells without which the living ones cannot go on."""
        return () if {*self.holders} & {*living} else self.holders

    def tell(self, living: Collection[int]) -> str:
        """Return it as a sentence."""
        if self.trouble:
            return f"the run's journal is not known here: {self.trouble}; give --journal PLACE, if it is elsewhere"
        if self.round is None:
            return f"the journal {self.place} has no round whose model a cell may hold"
        model = f"the model of round {self.round} (record {self.record})"
        if waited_for := self.waited_for(living):
            they, them, hold = ("it", "it", "holds") if len(waited_for) == 1 else ("they", "them", "hold")
            return (
                f"{cells_text(waited_for)} may hold {model}, the newest: others wait for {them}; start {them}, or "
                f"give up what {they} {hold} by --forget {waited_for[0]}"
            )
        return f"{cells_text(self.holders)} may hold {model}, the newest"


class _JournalReader:
    """The journal of a run as somebody outside reads it, record after record."""

    def __init__(self, place: str) -> None:
        from xffl.journal.who_continues import History

        self._place = place
        self._history = History()

    def look(self) -> _JournalStatus:
        """Read what is new."""
        try:
            self._read(_LOOK_S)
        except XfflError as error:
            return _JournalStatus(self._place, trouble=str(error))
        newest = self._history.newest
        held = self._history.find_holders()
        if held is None:
            return _JournalStatus(self._place, newest=newest)
        record, holders = held
        return _JournalStatus(self._place, newest=newest, round=record.round, record=record.number, holders=holders)

    def forget(self, cell: int) -> str:
        """Publish the record that forgets what a cell holds; tell what follows from it."""
        from xffl.journal.records import MOST_CELLS
        from xffl.journal.who_continues import forget_of

        journal = self._read(_FORGET_S)
        if not self._history.has_cell(cell) and not self._history.is_recovered:
            raise ConfigError(f"no record of the journal {self._place} has a cell {cell}: there is nothing to forget")
        newest = next(self._history.rounds(), None)
        cells = MOST_CELLS if newest is None else newest.federation
        if cell >= cells:
            raise ConfigError(f"--forget is {cell}; a run of {cells} cells has cell 0 to cell {cells - 1}")
        record = forget_of(self._history, cell)
        standing = journal.put(record)
        if standing.id != record.id:
            raise StateError(
                f"cell {cell} is not forgotten: meanwhile record {standing.number} has come to the journal, "
                f"{_describe_record(standing)}; look at the run again, and ask again if it is still needed"
            )
        self._history.add([record])
        status = self.look()
        return f"record {record.number} forgets what cell {cell} holds; {status.tell(status.holders)}"

    def _read(self, patience_s: float) -> Journal:
        """Read the records that are not known yet, and return the journal."""
        from xffl.journal.place import find_journal

        token = run_token.run_token()
        journal = find_journal(self._place, token, patience_s)
        while records := journal.read_from(self._history.newest + 1):
            self._history.add(records)
        return journal


def _describe_record(record: Record) -> str:
    from xffl.journal.records import ForgetRecord, RecoverRecord, RoundRecord, StartRecord

    if isinstance(record, RoundRecord):
        return f"round {record.round} of {cells_text(record.cells)}"
    if isinstance(record, StartRecord):
        return f"a start of {cells_text([start.cell for start in record.starts])}"
    if isinstance(record, ForgetRecord):
        return f"which forgets what cell {record.cell} holds"
    if isinstance(record, RecoverRecord):
        return "with which a journal begins that takes the place of a lost one"
    return "which gives up a round"


# What is shown --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Look:
    url: str
    status: LighthouseStatus
    journal: _JournalStatus

    @property
    def living(self) -> set[int]:
        """The numbers of the cells whose heartbeats arrive."""
        return {cell.cell for cell in self.status.cells if cell.cell is not None and not cell.is_lost}


def _look(address: str, journal: _JournalReader) -> _Look:
    from xffl.cluster.lighthouse.page import read_lighthouse

    url = lighthouse_address.resolve_lighthouse(address)
    return _Look(url, read_lighthouse(url), journal.look())


def _follow(options: Namespace, journal: _JournalReader, look: _Look, show: Callable[[_Look, str], None]) -> None:
    """Show a look, and with ``--watch`` each later one, or why there is none: lighthouses are started again."""
    trouble = ""
    while True:
        show(look, trouble)
        if options.watch is None:
            return
        time.sleep(options.watch)
        try:
            look, trouble = _look(options.url, journal), ""
        except XfflError as error:
            trouble = str(error)


def _print_look(look: _Look, trouble: str, *, as_json: bool) -> None:
    """Print a look as a table, or as one object on one line; or why there is none."""
    if trouble:
        print(visible(f"xffl: {trouble}"), file=sys.stderr, flush=True)
        return
    if not as_json:
        print_table(_draw_look(look, ""))
        sys.stdout.flush()
        return
    status = look.status
    meeting = None if status.meeting is None else {"number": status.meeting, "age_s": status.age_s}
    cells = [_describe_cell(status, cell) for cell in status.cells]
    record = {"lighthouse": look.url, "meeting": meeting, "cells": cells, "journal": _describe_journal(look)}
    print(json.dumps(record), flush=True)


def _describe_cell(status: LighthouseStatus, cell: CellStatus) -> dict[str, Any]:
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


def _describe_journal(look: _Look) -> dict[str, Any]:
    journal = look.journal
    return {
        "place": journal.place,
        "trouble": journal.trouble or None,
        "newest": journal.newest,
        "round": journal.round,
        "record": journal.record,
        "holders": journal.holders,
        "waited_for": journal.waited_for(look.living),
    }


def _draw_look(look: _Look, trouble: str) -> Group:
    """Return the cells as a table of rich, with the last meeting and the newest model below it."""
    from rich.console import Group
    from rich.text import Text

    status = look.status
    table = new_table()
    for column in ("cell", "life", "state", "round", "lag", "ranks", "store", "last seen", "met"):
        is_text = column in ("life", "state", "store", "met")
        table.add_column(column, no_wrap=True, justify="left" if is_text else "right")
    for cell in status.cells:
        seen = None if cell.seen_s is None else f"{cell.seen_s:.1f} s ago"
        row = {**_describe_cell(status, cell), "seen_s": seen, "met": "yes" if cell.has_met else "no"}
        words = ["-" if value is None else visible(str(value)) for value in row.values()]
        table.add_row(*words, style="red" if cell.is_lost else "")
    met = sum(cell.has_met for cell in status.cells)
    line = "no cells have met yet"
    if status.age_s is not None:
        line = f"meeting {status.meeting} was {status.age_s:.1f} s ago, with {met} of these {len(status.cells)} cells"
    lines = [Text(line), Text(visible(look.journal.tell(look.living)))]
    return Group(*([table] if status.cells else []), *lines, *([Text(visible(trouble), "red")] if trouble else []))
