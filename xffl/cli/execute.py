"""``xffl exec``: start a script in several processes on this machine."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from jsonargparse import ArgumentParser, Namespace

from xffl.cli.formatter import HelpFormatter
from xffl.cluster.environment import parse_sizes, requested_federation
from xffl.cluster.failure import RankFailure
from xffl.cluster.launch import launch_local
from xffl.errors import ConfigError
from xffl.topology import Topology

__all__ = ["build_parser", "run", "split_command"]

_FLAGS = ("-h", "--help", "--traceback")
"""The options that take no value; after any other, the next word is its value."""

_EXAMPLES = """\
SCRIPT stands after xffl's options; everything behind it belongs to the script, whatever it looks like.

examples:
  xffl exec --processes 4 --federated 2,2 train.py --lr 0.1
  xffl exec --processes 8 --federated 4,4 --hsdp 2 train.py

In the script, xffl.session() without arguments takes this federation. When a rank fails, all are ended, its traceback
is shown, and its exit code returned (128 + n after signal n, 2 for an error of xffl's own).
"""


def build_parser() -> ArgumentParser:
    """Return the parser of the options that stand before the script."""
    parser = ArgumentParser(
        usage="xffl exec [options] SCRIPT [arguments]",
        description="Start a script in several processes on this machine.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--processes", type=int, required=True, metavar="N", help="processes to start")
    parser.add_argument("--federated", type=str, metavar="SIZES", help="ranks of each cell (2,2), or of all cells (2)")
    parser.add_argument("--hsdp", type=int, metavar="RANKS", help="ranks that hold one copy of the model")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="end the job after this time; exit code 124")
    parser.add_argument("--traceback", action="store_true", help="show the traceback of errors of xffl's own, too")
    return parser


def split_command(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Cut ``exec [options] SCRIPT [arguments]`` before the script.

    :param words: Command line from ``exec`` on.
    :return: What is xffl's, and the script with its arguments.
    """
    at = 1
    while at < len(words) and words[at].startswith("-"):
        if words[at] == "--":
            return list(words[:at]), list(words[at + 1 :])
        at += 1 if "=" in words[at] or words[at] in _FLAGS else 2
    return list(words[:at]), list(words[at:])


def run(options: Namespace, command: Sequence[str]) -> int:
    """Start the job, and tell how it ended.

    :param options: What :func:`build_parser` parses.
    :param command: Script and its arguments.
    :return: Exit code for this process.
    :raises XfflError: if the set-up is wrong; no process has been started then.
    """
    if not command:
        raise ConfigError("no script is given; write xffl exec --processes N SCRIPT [arguments]")
    if options.timeout is not None and not options.timeout > 0:
        raise ConfigError(f"--timeout is {options.timeout}; give seconds above 0, or leave it out")
    sizes, replica_size = requested_federation()
    if options.federated is not None:
        sizes = parse_sizes(options.federated, "--federated")
    if options.hsdp is not None:
        replica_size = options.hsdp
    topology = Topology(options.processes, sizes, replica_size)
    environ = {}
    if sizes is not None:
        environ["XFFL_FEDERATED"] = ",".join(map(str, sizes if isinstance(sizes, tuple) else (sizes,)))
    if replica_size is not None:
        environ["XFFL_HSDP"] = str(replica_size)
    ended = launch_local(options.processes, command, environ=environ, timeout_s=options.timeout)
    if isinstance(ended, RankFailure):
        cell = None if sizes is None else topology.cell_of(ended.rank)
        _tell(ended, topology.world_size, cell, with_traceback=options.traceback)
        return ended.exit_code
    if ended == 124:
        print(f"xffl: stopped all ranks after {options.timeout} s, as --timeout says", file=sys.stderr)
    elif ended:
        print(f"xffl: stopped all ranks after {signal.Signals(ended - 128).name}", file=sys.stderr)
    return ended


def _tell(failure: RankFailure, processes: int, cell: int | None, *, with_traceback: bool) -> None:
    record = failure.record
    if record is not None and (with_traceback or not record.is_xffl):
        sys.stderr.write(record.traceback)
    rest = "" if processes == 1 else "; all other ranks were stopped"
    # Without sizes from outside the script makes the cells, if any.
    where = "" if cell is None else f" (cell {cell})"
    print(f"xffl: rank {failure.rank}{where} {failure.describe()}{rest}", file=sys.stderr)
