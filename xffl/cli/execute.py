"""``xffl exec``: start a script, or what a configuration asks for, in several processes: here, by srun or by ssh."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jsonargparse import ArgumentParser, Namespace

from xffl.cli.main import command_parser
from xffl.jobs.dispatch import carry_out
from xffl.jobs.options import JobOptions
from xffl.jobs.resolve import MissingProcessesError, resolve
from xffl.jobs.starts import GRACE_S, RESTARTS

__all__ = ["build_parser", "is_lighthouse", "run", "split_command"]

_FLAGS = ("-h", "--help", "--traceback", "--merge", "--isolate")  # after any other option, the next word is its value

_EXAMPLES = """\
SCRIPT follows xffl's options; everything after it is passed to the script unchanged. -m package.train in its place runs
a module, as python -m does, and - (or /dev/stdin, or a pipe) a script that is read here, once, for all ranks.

examples:
  xffl exec --processes 4 --federated 2,2 train.py --lr 0.1
  xffl exec --processes 8 --federated 4,4 --hsdp 2 train.py
  xffl exec config.yaml --training.epochs 3
  xffl exec config.yaml --print_config
  salloc -N 4 --ntasks-per-node 4 xffl exec --federated auto --log-dir logs config.yaml
  xffl exec --hosts a:4,b:4 --federated hosts:. train.py
  mpirun -n 8 xffl exec --federated 4,4 train.py
  xffl exec --processes 4 --federated 2,2 -m package.train --lr 0.1
  xffl exec --cell 0/2 --from global/round_2 --export cell_0/round_3 config.yaml
  xffl exec --isolate --processes 8 --federated 4,4 trainer_script.py
  xffl exec --elastic --federated 4,4 train.py
  xffl exec --elastic http://10.0.0.1:29510 --cell 0/2 --processes 4 train.py
  xffl exec --elastic file:runs/demo/lighthouse --cell 0/2 --processes 4 train.py

Where the processes start: in a SLURM job (salloc or a batch script) one for each task, by srun; with --hosts, and in a
job of PBS that has several hosts, by ssh; in one of LSF by blaunch, in one of Flux by flux run; otherwise on this
machine. Under srun, mpirun, torchrun and other
launchers nothing is started: each process is one rank.

In the script, xffl.session() without arguments uses these cells. When a rank fails, all others are stopped, its
traceback is shown, and its exit code is returned (128 + n after signal n, 2 for xffl's own errors, 75 if preempted).

A SCRIPT that ends in .yaml or .yml is a configuration: it names the trainer (trainer: train.MyTrainer, beside the file)
and how to start it (launch: {processes: 4, federated: [2, 2]}); the options above override the latter. Values for its
keys follow the file name; xffl exec config.yaml --help lists them.
"""


def build_parser() -> ArgumentParser:
    """Return the parser of the options that stand before the script."""
    parser = command_parser(
        "Start a script, or the training run of a configuration, in several processes: on this machine, on "
        "the nodes of a SLURM job, or on hosts by ssh.",
        _EXAMPLES,
        prog="xffl exec",
        usage="xffl exec [options] SCRIPT | -m MODULE | - [arguments]",
    )
    processes = "number of processes; required for a script on one machine"
    parser.add_argument("--processes", type=int, metavar="N", help=processes)
    cells = "ranks of each cell (2,2), or of all cells (2), or a rule: auto, auto:LEVEL, hosts:REGEX, file:PATH"
    parser.add_argument("--federated", type=str, metavar="SIZES", help=cells)
    parser.add_argument("--hsdp", type=int, metavar="RANKS", help="ranks that hold one copy of the model")
    fewest = "refuse to train if a rule finds fewer cells than this"
    parser.add_argument("--require-cells", type=int, metavar="N", help=fewest)
    hosts = "hosts for ssh and their processes: a:4,b:4, or @FILE"
    parser.add_argument("--hosts", type=str, metavar="LIST", help=hosts)
    ways = "what starts the ranks; auto chooses as described below"
    parser.add_argument("--launcher", choices=("auto", "srun", "ssh", "local"), default="auto", help=ways)
    timeout = "stop the job after this time, with exit code 124"
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help=timeout)
    isolate = "make each cell torch.distributed's default group, for scripts whose framework takes that group"
    parser.add_argument("--isolate", action="store_true", help=isolate)
    elastic = "restart cells that fail while the others continue; with the lighthouse's address, or a file for it "
    elastic += "(file:PATH), this job is one --cell of the run, without it, all cells and their lighthouse start here"
    parser.add_argument("--elastic", type=str, nargs="?", const="", metavar="URL", help=elastic)
    restarts = f"with --elastic, how often each cell is restarted (default: {RESTARTS})"
    parser.add_argument("--restarts", type=int, metavar="N", help=restarts)
    meeting = "with --elastic, how long a cell waits for others to make a round with (default: 1800)"
    parser.add_argument("--meeting-timeout", type=float, metavar="SECONDS", help=meeting)
    cell = "train one cell as a separate job, with rounds over files or --elastic: its number and how many (0/2)"
    parser.add_argument("--cell", type=str, metavar="C/CELLS", help=cell)
    parser.add_argument("--from", type=str, metavar="DIR", help="with --cell, the global model to start from")
    export = "with --cell, write this cell's contribution to the next round there"
    parser.add_argument("--export", type=str, metavar="DIR", help=export)
    measure = "do not train: evaluate the model of --from on the validation data and write the values there"
    parser.add_argument("--measure", type=str, metavar="FILE", help=measure)
    grace = f"time for ranks to exit after a signal or another rank's failure (default: {GRACE_S:g})"
    parser.add_argument("--grace", type=float, metavar="SECONDS", help=grace)
    parser.add_argument("--log-dir", type=str, metavar="DIR", help="write the output of each rank to a file there")
    parser.add_argument("--merge", action="store_true", help="put cell and rank before each line of the ranks' output")
    parser.add_argument("--traceback", action="store_true", help="show the traceback of xffl's own errors, too")
    return parser


def split_command(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Cut ``exec [options] SCRIPT [arguments]`` before the script, the ``-m`` of a module, or the ``-`` of a stream."""
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-", "-m"):
        if words[at] == "--":
            return list(words[:at]), list(words[at + 1 :])
        has_value = words[at] not in _FLAGS
        if words[at] == "--elastic":  # its value may be left out
            has_value = any(map(is_lighthouse, words[at + 1 : at + 2]))
        at += 1 if "=" in words[at] or not has_value else 2
    return list(words[:at]), list(words[at:])


def is_lighthouse(word: str) -> bool:
    """Tell whether a word behind ``--elastic`` is an address, and not the script."""
    return re.fullmatch(r"\w+://.*|[^/]+:[0-9]+/?|file:.*|[0-9]+(\.[0-9]+){3}", word) is not None


def run(options: Namespace, command: Sequence[str]) -> int:
    """Start the job, and tell how it ended; or be one rank of it, where a launcher has started this process."""
    try:
        request = resolve(JobOptions.of(vars(options)), command)
    except MissingProcessesError:
        build_parser().error("--processes N is required to start a script on one machine")
    return carry_out(request)
