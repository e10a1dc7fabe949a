"""Small commands: ``xffl env``, ``init``, ``list``, ``logs`` and ``report``."""

from __future__ import annotations

import json
import os
import shlex
import sys
import threading
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from xffl.checks import decimal, one_of, shown
from xffl.cli.main import command_parser
from xffl.cli.terminal import new_table, print_table
from xffl.cluster import environment
from xffl.cluster.launch.logs import Stream, list_rank_files
from xffl.cluster.network import use_interface
from xffl.cluster.recognition.launchers import LAUNCHERS
from xffl.errors import ConfigError
from xffl.extras import install_command
from xffl.topology import MAX_RANKS

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from xffl.aggregation.algorithms.registry import AlgorithmInfo

__all__ = ["COMMANDS"]


_INIT_EXAMPLES = """\
examples:
  xffl init demo && cd demo && xffl exec config.yaml
  xffl init demo --template language_model
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
    place = environment.detect_environment()
    federated, hsdp = environment.requested_federation()
    missing = {row.name: row.missing(os.environ) for row in LAUNCHERS if row.is_told}
    if options.json:
        values = {**asdict(place), "federated": federated, "hsdp": hsdp, "interface": interface, "missing": missing}
        print(json.dumps(values, indent=2))
        return 0
    rendezvous = "none is needed" if place.master_addr is None else f"{place.master_addr}:{place.master_port}"
    print(f"launcher    {place.launcher}\nwhy         {place.reason}\nrank        {place.rank} of {place.world_size}")
    print(f"on its node {place.node_local_rank} of {_told(place.node_local_size)}")
    print(f"node        {_told(place.node_rank)} of {_told(place.node_world_size)}\nrendezvous  {rendezvous}")
    print(f"federation  XFFL_FEDERATED {_shown(federated)}, XFFL_HSDP {_shown(hsdp)}")
    print(f"interface   XFFL_IFNAME {_shown(interface)}")
    print("launchers   in the order in which they were looked for:")
    for row in LAUNCHERS:
        if not row.is_told:  # it has not been at work, or this process would have been refused
            continue
        verdict = "no, " + ("it comes later" if row.matches(os.environ) else "its variables are another step's")
        if row.name == place.launcher:
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
    return {path.name: path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("_")}


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
    table = new_table()
    for column in ("kind", "name", "what it does", "paper"):
        table.add_column(column, no_wrap=column in ("kind", "name"))
    shows_bytes = options.kind in (None, "algorithm")
    if shows_bytes:  # of each fp32 parameter, in the mean over rounds
        table.add_column("what moves")
        table.add_column("bytes a parameter and round")
    if options.kind is not None:
        table.add_column("options")
    for entry in listed:
        takes = [describe_entry(entry)] if options.kind is not None else []
        moves = [entry.moves or "-", "-" if entry.nbytes is None else f"{entry.nbytes:.3g}"] if shows_bytes else []
        table.add_row(entry.kind, entry.name, entry.line, entry.paper or "-", *moves, *takes)
    print_table(table)
    return 0


def _describe(entry: AlgorithmInfo) -> str | None:
    """Write the options of an entry; ``None`` where PyTorch, which the class that has them needs, is not installed."""
    from xffl.aggregation.algorithms.registry import describe_entry

    try:
        return describe_entry(entry)
    except ConfigError as wrong:
        missing = wrong.__cause__
        if isinstance(missing, ModuleNotFoundError) and str(missing.name).partition(".")[0] == "torch":
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
    present = {file.rank for file in list_rank_files(folder)}
    if not options.follow and not (present if ranks is None else present & ranks):
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
    for run in written.runs:
        for note in run.notes:
            print(printable(f"  {run.name}: {note}"))
    return 0


COMMANDS = {
    "env": (_parse_env, _env),
    "init": (_parse_init, _init),
    "list": (_parse_list, _list),
    "logs": (_parse_logs, _logs),
    "report": (_parse_report, _report),
}
"""For each command what makes its parser, and what runs it and returns an exit code."""
