"""Small commands: ``xffl cells``, ``env``, ``init``, ``lighthouse``, ``list``, ``logs`` and ``report``."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from xffl.checks import decimal, integer, number, one_of, shown, visible
from xffl.cli.main import command_parser
from xffl.cluster import environment, lighthouse_address, run_token
from xffl.cluster.launch.logs import Stream, list_rank_files
from xffl.cluster.network import use_interface
from xffl.cluster.recognition.launchers import LAUNCHERS
from xffl.errors import ConfigError, XfflError
from xffl.extras import install_command, optional_import
from xffl.topology import MAX_RANKS

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from rich.console import Group, RenderableType
    from rich.table import Table

    from xffl.aggregation.algorithms.registry import AlgorithmInfo
    from xffl.cluster.lighthouse_page import CellStatus, LighthouseStatus

__all__ = ["COMMANDS"]


_CELLS_EXAMPLES = """\
examples:
  xffl cells http://10.0.0.1:29510
  xffl cells file:runs/demo/lighthouse --watch 5
  xffl cells 10.0.0.1:29510 --json

A cell is lost if its heartbeats have stopped: it failed, hangs, is cut off, or has finished. Round, ranks and store are
those that it told at the last meeting, if it was there. Only the page of the lighthouse is read; no cell is asked.
"""

_INIT_EXAMPLES = """\
examples:
  xffl init demo && cd demo && xffl exec config.yaml
  xffl init demo --template language_model
"""

_LIGHTHOUSE_EXAMPLES = """\
Start it once, inside the job or the allocation, before the replica groups:

  xffl lighthouse --bind 127.0.0.1:29510 --token-file ~/.xffl-token &
  export XFFL_LIGHTHOUSE=127.0.0.1:29510 XFFL_TOKEN_FILE=~/.xffl-token
  XFFL_ISLAND=0/2 xffl exec --processes 2 train.py &
  XFFL_ISLAND=1/2 xffl exec --processes 2 train.py

It has no authentication, and its page (http://HOST:PORT) can kill a group: bind it to the loopback interface, or to a
network that only the job's hosts reach.
"""

_LIST_EXAMPLES = """\
examples:
  xffl list algorithms
  xffl list algorithms --kind combine
  xffl list algorithms --json
"""

_LOGS_EXAMPLES = """\
examples:
  xffl logs runs/demo/logs
  xffl logs runs/demo/logs --follow --ranks 0,4-7

Without --follow the files are shown one rank after the other. Ctrl-C ends --follow.
"""

_REPORT_EXAMPLES = """\
examples:
  xffl report runs/demo
  xffl report runs/fedavg runs/diloco --out runs/compared
  xffl report runs/elastic/cell_*

It needs matplotlib and jinja2 ({install}). For a run that has not finished, the page
shows what has been recorded so far.
"""

_NAME = "@NAME@"  # stands for the project's name in the templates; in YAML for the same in quotes
_INSTALL = "@INSTALL@"  # stands for the command that installs what the digits need


def _parse_env() -> ArgumentParser:
    parser = command_parser(
        "Show which launcher started this process, and how that was detected. Start it like a script: "
        "mpirun -n 4 xffl env, srun -n 4 xffl env, or just xffl env."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _env(options: Namespace) -> int:
    """Print what was detected. Under an MPI launcher it is collective, like the detection itself."""
    interface = use_interface(None)
    found = environment.detect_environment()
    federated, hsdp = environment.requested_federation()
    missing = {row.name: row.missing(os.environ) for row in LAUNCHERS if row.is_told}
    if options.json:
        told = {**asdict(found), "federated": federated, "hsdp": hsdp, "interface": interface, "missing": missing}
        print(json.dumps(told, indent=2))
        return 0
    rendezvous = "none is needed" if found.master_addr is None else f"{found.master_addr}:{found.master_port}"
    print(f"launcher    {found.launcher}\nwhy         {found.reason}\nrank        {found.rank} of {found.world_size}")
    print(f"on its node {found.node_local_rank} of {_told(found.node_local_size)}")
    print(f"node        {_told(found.node_rank)} of {_told(found.node_world_size)}\nrendezvous  {rendezvous}")
    print(f"federation  XFFL_FEDERATED {_shown(federated)}, XFFL_HSDP {_shown(hsdp)}")
    print(f"interface   XFFL_IFNAME {_shown(interface)}")
    print("launchers   in the order in which they were looked for:")
    for row in LAUNCHERS:
        if not row.is_told:  # it has not been at work, or this process would have been refused
            continue
        verdict = "no, " + ("it comes later" if row.matches(os.environ) else "its variables are another step's")
        if row.name == found.launcher:
            verdict = "yes"
        elif missing[row.name]:
            verdict = f"no, without {', '.join(missing[row.name])}"
        print(f"  {row.name:<9} {verdict}")
    return 0


def _told(number: int | None) -> str:
    return "(the ranks find it out when they meet)" if number is None else str(number)


def _shown(value: object) -> str:
    return "is not set" if value is None else f"is {value}"


def _parse_init() -> ArgumentParser:
    parser = command_parser(
        "Write a small project into a new or empty folder: a configuration, a trainer and a README.", _INIT_EXAMPLES
    )
    parser.add_argument("name", metavar="NAME", help="folder to create; its last part is the name of the run")
    kinds = ", ".join(sorted(_templates()))
    parser.add_argument("--template", type=str, default="digits", metavar="KIND", help=f"one of {kinds}")
    return parser


def _init(options: Namespace) -> int:
    """Write the project."""
    templates = _templates()
    one_of("--template", options.template, sorted(templates))
    folder = Path(options.name)
    name = folder.resolve().name
    if not name:
        raise ConfigError(f"NAME must name a folder, such as demo, got {options.name!r}")
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{options.name} exists and is not empty; give the name of a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(templates[options.template].iterdir(), key=lambda file: file.name):
            # Templates are no modules of xffl, so they are kept as text.
            target = folder / file.name.removesuffix(".txt").replace("dot.", ".")
            quoted = json.dumps(name, ensure_ascii=False) if target.suffix == ".yaml" else name
            text = file.read_text(encoding="utf-8").replace(_NAME, quoted)
            target.write_text(text.replace(_INSTALL, install_command("examples")), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{options.name} cannot be written: {error.strerror}; give another folder") from error
    print(f"wrote {folder}; next: cd {shlex.quote(str(folder))} && xffl exec config.yaml", file=sys.stderr)
    return 0


def _templates() -> dict[str, Traversable]:
    folder = files("xffl.cli") / "templates"
    return {one.name: one for one in folder.iterdir() if one.is_dir() and not one.name.startswith("_")}


def _parse_lighthouse() -> ArgumentParser:
    parser = command_parser(
        "Run the server where cells and replica groups find each other (torchft's lighthouse), until it is stopped.",
        _LIGHTHOUSE_EXAMPLES,
    )
    parser.add_argument("--bind", type=str, default="127.0.0.1:29510", metavar="HOST:PORT", help="address to listen at")
    parser.add_argument("--min-replicas", type=int, default=1, metavar="N", help="number of groups that must be there")
    silence = "seconds without a heartbeat after which a group counts as lost"
    parser.add_argument("--heartbeat-timeout", type=float, default=5.0, metavar="S", help=silence)
    join = "seconds to wait for groups that are alive but have not joined"
    parser.add_argument("--join-timeout", type=float, default=10.0, metavar="S", help=join)
    token = "write a new token of the run there, unless the file has one"
    parser.add_argument("--token-file", type=str, metavar="PATH", help=token)
    return parser


def _lighthouse(options: Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    replicas, times = integer("--min-replicas", options.min_replicas), {}
    for name in ("heartbeat_timeout", "join_timeout"):
        seconds = number(f"--{name.replace('_', '-')}", options[name], 0.1, below=1e6, hint="in seconds")
        times[f"{name}_ms"] = round(1000 * seconds)
    if options.token_file is not None:
        run_token.make_token_file(Path(options.token_file))
    stopped = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: stopped.set())
    host, port = lighthouse_address.read_address("--bind", options.bind)
    os.environ.setdefault("RUST_LOG", "error")  # read when torchft is imported
    with optional_import("elastic", "a lighthouse needs torchft, which has wheels for x86-64 Linux"):
        from torchft.coordination import LighthouseServer
    try:
        server = LighthouseServer(bind=f"{host}:{port}", min_replicas=replicas, quorum_tick_ms=100, **times)
    except RuntimeError as error:
        raise ConfigError(f"--bind {options.bind!r} cannot be bound ({error}); give another HOST:PORT") from error
    print(f"lighthouse at {options.bind}", flush=True)
    stopped.wait()
    server.shutdown()
    return 0


def _parse_list() -> ArgumentParser:
    parser = command_parser(
        "Show the algorithms and their parts by name. In a configuration or script write name:option=value "
        'or the mapping {"name": ..., option: value}; the dotted path of your own class may replace a name.',
        _LIST_EXAMPLES,
    )
    parser.add_argument("what", choices=("algorithms",), help="what to list")
    parser.add_argument("--kind", type=str, help="one kind only, with options: server, server_schedule, combine, ...")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _list(options: Namespace) -> int:
    """Print the entries of the registry."""
    from xffl.aggregation.algorithms.registry import describe_entry, entries

    listed = entries(options.kind)
    if options.json:
        print(json.dumps([{**asdict(entry), "takes": _describe(entry)} for entry in listed], indent=2))
        return 0
    table = _new_table()
    for column in ("kind", "name", "what it does", "paper"):
        table.add_column(column, no_wrap=column in ("kind", "name"))
    if options.kind is not None:
        table.add_column("options")
    for entry in listed:
        takes = [describe_entry(entry)] if options.kind is not None else []
        table.add_row(entry.kind, entry.name, entry.line, entry.paper or "-", *takes)
    _print_table(table)
    return 0


def _describe(entry: AlgorithmInfo) -> str | None:
    """Write the options of an entry; ``None`` where PyTorch, which the class that has them needs, is not installed."""
    from xffl.aggregation.algorithms.registry import describe_entry

    try:
        return describe_entry(entry)
    except ConfigError as wrong:
        if isinstance(missing := wrong.__cause__, ModuleNotFoundError) and missing.name == "torch":
            return None
        raise


def _parse_logs() -> ArgumentParser:
    parser = command_parser("Show the output of ranks, with cell and rank before each line.", _LOGS_EXAMPLES)
    parser.add_argument("folder", type=str, metavar="DIR", help="folder that was given as --log-dir")
    parser.add_argument("--follow", action="store_true", help="continue to show what is written")
    parser.add_argument("--ranks", type=str, metavar="LIST", help="show only these: 0,4-7")
    return parser


def _logs(options: Namespace) -> int:
    """Show the files."""
    ranks = None if options.ranks is None else _read_ranks(options.ranks)
    folder = Path(options.folder)
    found = {file.rank for file in list_rank_files(folder)}
    if not options.follow and not (found if ranks is None else found & ranks):
        shown = "any rank" if ranks is None else f"ranks {options.ranks}"
        raise ConfigError(f"folder {options.folder!r} has no log file of {shown}; give the folder of --log-dir")
    stream = Stream(folder, sys.stdout.buffer, ranks)
    if options.follow:
        stream.follow(threading.Event().wait)
    stream.copy(is_end=True)
    return 0


def _read_ranks(text: str) -> set[int]:
    ranks: set[int] = set()
    for item in text.split(","):
        first, dash, last = item.strip().partition("-")
        start, end = decimal(first), decimal(last if dash else first)
        if start is None or end is None or not start <= end < MAX_RANKS:
            raise ConfigError(f"--ranks must be numbers and ranges such as 0,4-7, got {shown(item)} in {shown(text)}")
        ranks.update(range(start, end + 1))
    return ranks


def _parse_report() -> ArgumentParser:
    parser = command_parser(
        "Write report.html, one self-contained file, and its figures as PNG files: of one run into its "
        "folder pictures/, of several runs, which are compared, into --out. The cells of an elastic run, or the folder "
        "that holds them, are one run.",
        _REPORT_EXAMPLES.format(install=install_command("report")),
    )
    parser.add_argument("runs", nargs="+", type=str, metavar="RUN", help="run folders: output_dir of experiments")
    parser.add_argument("--out", type=str, metavar="FOLDER", help="where to write; required for several runs")
    return parser


def _report(options: Namespace) -> int:
    """Write the report, and print its place and what it lacks."""
    from xffl.run_report import write_report
    from xffl.run_report.summary import printable

    written = write_report(options.runs, options.out)
    print(printable(f"{written.page} and {len(written.pictures)} figures beside it"))
    for one in written.runs:
        for note in one.notes:
            print(printable(f"  {one.name}: {note}"))
    return 0


def _parse_cells() -> ArgumentParser:
    parser = command_parser(
        "Show who is known to the lighthouse of an elastic run: cells, their rounds and heartbeats.", _CELLS_EXAMPLES
    )
    parser.add_argument("url", type=str, metavar="URL", help="its address: http://HOST:PORT, or file:PATH with it")
    parser.add_argument("--json", action="store_true", help="print JSON")
    watch = "show it again after so many seconds (2), until Ctrl-C"
    parser.add_argument("--watch", type=float, nargs="?", const=2.0, metavar="SECONDS", help=watch)
    return parser


def _cells(options: Namespace) -> int:
    """Read the page of the lighthouse, and print what it tells."""
    if options.watch is not None:
        number("--watch", options.watch, 0.1, below=1e6, hint="in seconds")
    url, status = _read_status(options.url)
    if options.json or options.watch is None or not sys.stdout.isatty():
        _follow_status(options, url, status, partial(_print_status, as_json=options.json))
    else:
        from rich.live import Live

        with Live(auto_refresh=False) as live:
            _follow_status(options, url, status, lambda *told: live.update(_cells_table(*told), refresh=True))
    return 0


def _read_status(address: str) -> tuple[str, LighthouseStatus]:
    from xffl.cluster.lighthouse_page import read_lighthouse

    url = lighthouse_address.resolve_lighthouse(address)
    return url, read_lighthouse(url)


def _follow_status(
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
            (url, status), trouble = _read_status(options.url), ""
        except XfflError as error:
            trouble = str(error)


def _print_status(url: str, status: LighthouseStatus, trouble: str, *, as_json: bool) -> None:
    """Print a status as a table, or as one object on one line; or why there is none."""
    if trouble:
        print(visible(f"xffl: {trouble}"), file=sys.stderr, flush=True)
        return
    if not as_json:
        _print_table(_cells_table(url, status, ""))
        sys.stdout.flush()
        return
    meeting = None if status.meeting is None else {"number": status.meeting, "age_s": status.age_s}
    cells = [_describe_cell(status, cell) for cell in status.cells]
    print(json.dumps({"lighthouse": url, "meeting": meeting, "cells": cells}), flush=True)


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


def _cells_table(url: str, status: LighthouseStatus, trouble: str) -> Group:
    """Return the cells as a table of rich, with the last meeting below it."""
    from rich.console import Group
    from rich.text import Text

    table = _new_table()
    for column in ("cell", "life", "state", "round", "lag", "ranks", "store", "last seen", "met"):
        is_text = column in ("life", "state", "store", "met")
        table.add_column(column, no_wrap=True, justify="left" if is_text else "right")
    for cell in status.cells:
        seen = None if cell.seen_s is None else f"{cell.seen_s:.1f} s ago"
        told = {**_describe_cell(status, cell), "seen_s": seen, "met": "yes" if cell.has_met else "no"}
        words = ["-" if value is None else visible(str(value)) for value in told.values()]
        table.add_row(*words, style="red" if cell.is_lost else "")
    met = sum(cell.has_met for cell in status.cells)
    line = "no cells have met yet"
    if status.age_s is not None:
        line = f"meeting {status.meeting} was {status.age_s:.1f} s ago, with {met} of these {len(status.cells)} cells"
    return Group(*([table] if status.cells else []), Text(line), *([Text(visible(trouble), "red")] if trouble else []))


def _new_table() -> Table:
    """Return a table without lines, to which columns and rows are to be added."""
    from rich.table import Table

    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))


def _print_table(table: RenderableType) -> None:
    """Print a table; where the output is no terminal so wide that each entry stays on its line."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 240
    Console(file=sys.stdout, width=width, markup=False, emoji=False, highlight=False).print(table)


COMMANDS = {
    "cells": (_parse_cells, _cells),
    "env": (_parse_env, _env),
    "init": (_parse_init, _init),
    "lighthouse": (_parse_lighthouse, _lighthouse),
    "list": (_parse_list, _list),
    "logs": (_parse_logs, _logs),
    "report": (_parse_report, _report),
}
"""For each command what makes its parser, and what runs it and returns an exit code."""
