"""``xffl exec``: start a script, or what a configuration asks for, in several processes on this machine."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from xffl.cli.formatter import HelpFormatter
from xffl.cluster.environment import detect_environment, federation_variables, parse_sizes, requested_federation
from xffl.cluster.failure import RankFailure
from xffl.cluster.launch import launch_local
from xffl.cluster.launchers import LAUNCHERS
from xffl.errors import ConfigError
from xffl.topology import Topology

__all__ = ["build_parser", "run", "split_command"]

_FLAGS = ("-h", "--help", "--traceback")
"""The options that take no value; after any other, the next word is its value."""
_CONFIGURATIONS = (".yaml", ".yml")
_RANK = Path(__file__).with_name("exec_rank.py")
"""What each process runs that is started for a configuration."""

_EXAMPLES = """\
SCRIPT stands after xffl's options; everything behind it belongs to the script, whatever it looks like.

examples:
  xffl exec --processes 4 --federated 2,2 train.py --lr 0.1
  xffl exec --processes 8 --federated 4,4 --hsdp 2 train.py
  xffl exec config.yaml --training.epochs 3
  xffl exec config.yaml --print_config
  srun -N 2 --ntasks-per-node 4 xffl exec config.yaml

In the script, xffl.session() without arguments takes this federation. When a rank fails, all are ended, its traceback
is shown, and its exit code returned (128 + n after signal n, 2 for an error of xffl's own).

A SCRIPT that ends in .yaml or .yml is a configuration: it names the trainer (trainer: train.MyTrainer, beside the file)
and how to start it (launch: {processes: 4, federated: [2, 2]}), which the options here beat. Behind it stand values for
its keys; xffl exec config.yaml --help lists them. Under srun, mpirun or torchrun nothing is started: each process is
one rank.
"""


def build_parser() -> ArgumentParser:
    """Return the parser of the options that stand before the script."""
    parser = ArgumentParser(
        usage="xffl exec [options] SCRIPT [arguments]",
        description="Start a script, or what a configuration asks for, in several processes on this machine.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--processes", type=int, metavar="N", help="processes to start; a script needs it")
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
    :param command: Script and its arguments, or a configuration and values for its keys.
    :return: Exit code for this process.
    :raises XfflError: if the set-up is wrong; no process has been started then.
    """
    if not command:
        raise ConfigError(
            "no script is given; write xffl exec --processes N SCRIPT [arguments], or xffl exec config.yaml"
        )
    if options.timeout is not None and not options.timeout > 0:
        raise ConfigError(f"--timeout is {options.timeout}; give seconds above 0, or leave it out")
    if command[0].endswith(_CONFIGURATIONS):
        return _run_configuration(options, command[0], command[1:])
    if options.processes is None:
        build_parser().error("--processes N is required to start a script")
    sizes, replica_size = requested_federation()
    if options.federated is not None:
        sizes = parse_sizes(options.federated, "--federated")
    if options.hsdp is not None:
        replica_size = options.hsdp
    topology = Topology(options.processes, sizes, replica_size)
    return _start(topology, sizes, replica_size, command, options.timeout, with_traceback=options.traceback)


def _run_configuration(options: Namespace, file: str, words: Sequence[str]) -> int:
    """Train as a configuration says: in processes started here, or in this one where a launcher has started it."""
    from xffl.training.configuration import help_text, job_trainer, print_text, read_job
    from xffl.training.launching import choose_federation, config_class, run_here
    from xffl.training.settings import read_words

    flags = read_words(words).flags
    if "help" in flags:
        usage = f"xffl exec [options] {os.path.basename(file)} [--KEY VALUE ...]"
        print(help_text(config_class(job_trainer(file, words)), usage), end="")
        return 0
    trainer, resolved = read_job(file, words)
    if "print_config" in flags:
        print(print_text(resolved), end="")
        return 0
    asked = None if options.federated is None else parse_sizes(options.federated, "--federated")
    launch, origins = resolved.launch, resolved.origins
    if any(row.matches(os.environ) for row in LAUNCHERS):
        if options.processes is not None:
            found = detect_environment()
            raise ConfigError(
                f"--processes is {options.processes}, but {found.launcher} has started {found.world_size} processes "
                "already; leave it out"
            )
        run_here(trainer, resolved.config, launch, origins, federated=asked, hsdp=options.hsdp)
        return 0
    detect_environment()  # says so where half a launcher's variables are set
    processes = next((n for n in (options.processes, launch.processes) if n is not None), 1)
    sizes, replica_size = choose_federation(
        resolved.config, launch, origins, processes, federated=asked, hsdp=options.hsdp
    )
    timeout_s = options.timeout if options.timeout is not None else launch.timeout_s
    topology = Topology(processes, sizes, replica_size)
    command = [str(_RANK), file, *words]
    return _start(topology, sizes, replica_size, command, timeout_s, with_traceback=options.traceback)


def _start(
    topology: Topology,
    sizes: int | tuple[int, ...] | None,
    replica_size: int | None,
    command: Sequence[str],
    timeout_s: float | None,
    *,
    with_traceback: bool,
) -> int:
    """Start the processes, and tell how the job ended."""
    environ = federation_variables(sizes, replica_size)
    ended = launch_local(topology.world_size, command, environ=environ, timeout_s=timeout_s)
    if isinstance(ended, RankFailure):
        cell = None if sizes is None else topology.cell_of(ended.rank)
        _tell(ended, topology.world_size, cell, with_traceback=with_traceback)
        return ended.exit_code
    if ended == 124:
        print(f"xffl: stopped all ranks after {timeout_s} s, as --timeout says", file=sys.stderr)
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
