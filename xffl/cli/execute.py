"""``xffl exec``: start a script, or what a configuration asks for, in several processes: here, by srun or by ssh."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from xffl.checks import integer, number
from xffl.cli.exec_isolated import run_isolated
from xffl.cli.main import command_parser
from xffl.cluster import environment, run_token
from xffl.cluster.batch import find_job, is_here
from xffl.cluster.environment import ISOLATED_VARIABLE
from xffl.cluster.launch.affinity import share_machine
from xffl.cluster.launch.elastic import (
    CellJob,
    SharedLighthouse,
    launch_cells,
    own_lighthouse,
    run_folder,
    step_variables,
)
from xffl.cluster.launch.failure import ExitCode, FailureRecord, RankFailure, record_failure
from xffl.cluster.launch.job_layout import JobLayout, LaunchOptions, check_started, fit_hosts, lay_out
from xffl.cluster.launch.launch import launch_local
from xffl.cluster.launch.logs import following, make_log_dir
from xffl.cluster.launch.runner import RankJob, be_rank, run_script, take_share
from xffl.cluster.launch.script import CONFIGURATIONS, check_command, is_module, is_stream, read_source
from xffl.cluster.lighthouse import address as lighthouse_address
from xffl.cluster.over_files import OverFiles, read_over_files
from xffl.cluster.recognition.find import find_launcher, launcher_of
from xffl.cluster.sizes import Federation, check_cells
from xffl.cluster.sizes_text import parse_cell, parse_federation
from xffl.cluster.slurm.allocation import Allocation, Host, ask_switches, own_host, parse_hosts
from xffl.errors import ConfigError, LaunchError, XfflError
from xffl.files import TEXT_FILE_LIMIT, read_text
from xffl.journal.place import JOURNAL_FOLDER_VARIABLE, JOURNAL_VARIABLE, cells_command, derive_journal
from xffl.json_text import parse_json
from xffl.topology import Topology

if TYPE_CHECKING:
    from xffl.aggregation.exports import RoundPlan

__all__ = ["build_parser", "is_lighthouse", "print_help", "run", "split_command"]

_FLAGS = ("-h", "--help", "--traceback", "--merge", "--isolate")  # after any other option, the next word is its value
_RANK = Path(__file__).with_name("exec_rank.py")  # what each process runs that is started for a configuration
_ISOLATED = Path(__file__).with_name("exec_isolated.py")  # what each process runs whose cell is a world of its own
_GRACE_S = 10.0
_RESTARTS = 3
_OF_ALL_CELLS = ("XFFL_FEDERATED", "XFFL_LAUNCHED_CELLS", "XFFL_REQUIRE_CELLS")  # wrong for the job of one cell
_RUN = ".run"  # behind the name of a file of what is measured: the folder of the run that measures

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
    restarts = f"with --elastic, how often each cell is restarted (default: {_RESTARTS})"
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
    grace = f"time for ranks to exit after a signal or another rank's failure (default: {_GRACE_S:g})"
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
    if not command:
        raise ConfigError(
            "no script is given; write xffl exec --processes N SCRIPT [arguments], or xffl exec config.yaml"
        )
    for name in ("timeout", "grace"):
        if options[name] is not None and not options[name] > 0:
            raise ConfigError(f"--{name} is {options[name]}; give seconds above 0, or leave it out")
    if options.require_cells is not None:
        environment.require_cells(options.require_cells)
    if options.launcher == "auto":
        take_share()  # a configuration's trainer imports torch
    os.environ.pop(ISOLATED_VARIABLE, None)  # of a job in whose cell this command starts another
    over_files = read_over_files({name: options[name] for name in ("cell", "from", "export", "measure")})
    of_cell = RankJob.pop(os.environ)  # where this command has started this one for a cell
    options.failures = of_cell.failures
    options.source = of_cell.source
    if not command[0].endswith(CONFIGURATIONS):
        _look_at_script(options, command, is_first=of_cell == RankJob())
    if options.elastic is not None or (over_files.cell is not None and os.environ.get("XFFL_LIGHTHOUSE", "").strip()):
        _check_elastic(options, over_files)
        if options.elastic and _started(options) is None:
            return _start_one_cell(options, command)
        over_files = OverFiles()
    if options.restarts is not None and options.elastic is None:
        raise ConfigError(f"--restarts {options.restarts} is for cells that xffl exec --elastic starts; leave it out")
    if options.meeting_timeout is not None and options.elastic is None:
        raise ConfigError(f"--meeting-timeout {options.meeting_timeout:g} is for --elastic; leave it out")
    if options.isolate:
        _check_isolate(options, command, over_files)
    if command[0].endswith(CONFIGURATIONS):
        return _run_configuration(options, command[0], command[1:], over_files)
    if over_files.measure is not None:
        raise ConfigError("--measure is for a configuration, whose trainer knows how to measure; leave it out")
    os.environ.update(over_files.variables())
    if (done := _what_script_has_done(over_files)) is not None and _started(options) is None:
        print(f"xffl: {done}", file=sys.stderr)
        return ExitCode.OK
    asked = None if options.federated is None else parse_federation(options.federated, "--federated")
    federated, replica_size, sources = environment.complete_federation(asked, options.hsdp)
    if (started := _started(options)) is not None:
        if not isinstance(federated, str):
            with environment.sources_named(sources):
                Topology(started, federated, replica_size)
        environment.request_federation(federated, replica_size)
        if options.isolate:
            return _be_rank(options, lambda: run_isolated(command))
        return _be_rank(options, lambda: run_script(command, options.source))
    if options.elastic is not None and federated is None:
        raise ConfigError(_NO_CELLS)
    start = _find_start(options, options.processes, federated)
    if start is None:
        build_parser().error("--processes N is required to start a script on one machine")
    with environment.sources_named(sources):
        layout = lay_out(start.hosts, federated, replica_size)
    if options.elastic is not None:
        return _start_all_cells(options, start=start, layout=layout, command=command, federated=federated)
    if options.isolate:
        if layout.sizes is None:
            raise ConfigError("--isolate makes cells worlds of their own; give --federated, such as 2,2")
        command = [str(_ISOLATED), *command]
    return _start(options, start, layout, command, federated=federated)


def _check_isolate(options: Namespace, command: Sequence[str], over_files: OverFiles) -> None:
    """Refuse what does not go with cells of one job that are worlds of their own."""
    if options.elastic is not None or lighthouse_address.elastic_cell() is not None or over_files:
        raise ConfigError(
            "--isolate is for a job of all cells; with --elastic or --cell each cell is a job, and so a world of its "
            "own, already: leave --isolate out"
        )
    if command[0].endswith(CONFIGURATIONS):
        raise ConfigError(
            "--isolate is for scripts; the trainer of a configuration keeps its cells apart in one world, where it "
            "also compares their metrics: leave --isolate out"
        )
    if options.source is not None:
        raise ConfigError(
            f"--isolate runs a script by its path or as a module, but {command[0]!r} is read once; write it to a file"
        )


def _look_at_script(options: Namespace, command: Sequence[str], *, is_first: bool) -> None:
    """Read the script here where ranks could not read it, see that there is one, and say what may be a mistake."""
    started = _started(options)
    if options.source is None and is_stream(command[0]):
        if started is not None and started > 1:
            raise LaunchError(
                f"script {command[0]!r} can be read once, but a launcher has started {started} processes; write it to "
                "a file, and give the path of that, or leave the launcher out: xffl exec --processes N starts ranks "
                "itself and hands them the text"
            )
        options.source = read_source(command[0])
    if options.source is None and options.hosts is None:  # hosts that ssh reaches look for it themselves
        check_command(command)
    if is_first and started is None:
        _hint_at_options(command)


def _hint_at_options(command: Sequence[str]) -> None:
    """Say which words behind the script look like options of this command; the script may have some of these names."""
    known = {name for action in build_parser()._actions for name in action.option_strings if name.startswith("--")}
    behind = command[2 if is_module(command) else 1 :]
    behind = behind[: behind.index("--")] if "--" in behind else behind
    mine = [word for word in behind if word.partition("=")[0] in known - {"--help"}]
    if mine:
        names = ", ".join(dict.fromkeys(word.partition("=")[0] for word in mine))
        who = "-m " + command[1] if is_module(command) else command[0]
        print(
            f"xffl: {names} behind {who} goes to the script; an option of xffl exec stands before it: "
            f"xffl exec {mine[0]} ... {who}",
            file=sys.stderr,
        )


def _run_configuration(options: Namespace, file: str, words: Sequence[str], over_files: OverFiles) -> int:
    """Train as a configuration says: in processes started here, or in this one where a launcher has started it."""
    from xffl.training.config import configuration

    flags = configuration.read_words(words).flags
    if "help" in flags:
        return print_help(file, words, "xffl exec [options] {} [--KEY VALUE ...]")
    words = [*words, *_words_over_files(over_files)]
    trainer, resolved = configuration.read_job(file, words)
    if over_files:
        words = [*words, *_words_of_cell(over_files, resolved, options)]
        trainer, resolved = configuration.read_job(file, words)
        options.federated = None  # a job of one cell
    elif (cell := lighthouse_address.elastic_cell()) is not None:
        words = [*words, *_words_of_elastic_cell(*cell, resolved, options)]
        trainer, resolved = configuration.read_job(file, words)
    if "print_config" in flags:
        print(configuration.print_text(resolved), end="")
        return ExitCode.OK
    asked = None if options.federated is None else parse_federation(options.federated, "--federated")
    launch = resolved.launch
    if _started(options) is not None:

        def train() -> None:
            configuration.ask_for_cells(resolved, federated=asked, hsdp=options.hsdp)
            trainer(resolved.config, origins=resolved.origins).fit()

        return _be_rank(options, train)
    if (done := _what_is_done(resolved.config)) is not None:
        print(f"xffl: {done}", file=sys.stderr)
        return ExitCode.OK
    if over_files.measure is not None:
        shutil.rmtree(f"{over_files.measure}{_RUN}", ignore_errors=True)  # of the measurement before
    processes, knob = options.processes, "--processes"
    if processes is None and launch.processes is not None:
        processes, knob = launch.processes, f"launch.processes ({resolved.origins.get('launch.processes', 'default')})"
    own = getattr(getattr(resolved.config, "distributed", None), "federated", None)
    wishes = (asked, launch.federated, environment.requested_federation()[0], own)
    start = _find_start(options, processes, next((wish for wish in wishes if wish is not None), None), knob)
    if start is None:
        start = Allocation("local", (Host(own_host().name, 1),))
    federated, replica_size = configuration.choose_federation(resolved, start.slots, federated=asked, hsdp=options.hsdp)
    layout = lay_out(start.hosts, federated, replica_size)
    if options.elastic is not None:
        experiment = getattr(resolved.config, "experiment", None)
        return _start_all_cells(
            options,
            start=start,
            layout=layout,
            command=[file, *words],
            federated=federated,
            home=None if experiment is None else experiment.output_dir,
        )
    word = configuration.hand_over(file, resolved)
    code = _start(options, start, layout, [str(_RANK)], federated=federated, limit_s=launch.timeout_s, resolved=word)
    experiment = getattr(resolved.config, "experiment", None)
    is_lone_cell = over_files or lighthouse_address.elastic_cell()
    has_failed = code not in (ExitCode.OK, ExitCode.REFUSED, ExitCode.PREEMPTED)
    if has_failed and not is_lone_cell and experiment is not None and experiment.resume:
        from xffl.checkpoint.manager import find_latest_checkpoint

        if (latest := find_latest_checkpoint(experiment.output_dir)) is not None:
            print(f"xffl: the same command continues from {latest}", file=sys.stderr)
    return code


def print_help(file: str, words: Sequence[str], usage: str) -> int:
    """Print the help of a configuration, with its name in the place of ``{}`` in the usage."""
    from xffl.training.config.configuration import config_class, help_text, job_trainer

    print(help_text(config_class(job_trainer(file, words)), usage.format(os.path.basename(file))), end="")
    return ExitCode.OK


def _words_over_files(over_files: OverFiles) -> list[str]:
    """Return the settings with which a configuration's job trains one cell, or measures a model."""
    export = over_files.export if over_files.measure is None else None
    asked = {"cell": over_files.cell, "start_from": over_files.start, "export_to": export}
    asked["measure_to"] = over_files.measure
    words = [word for key, one in asked.items() if one is not None for word in (f"--federation.{key}", one)]
    if over_files.measure is None:
        return words
    # Beside a run of the same name, of which it is no part.
    own = {"callbacks": "[]", "experiment.output_dir": f"{over_files.measure}{_RUN}", "experiment.resume": "false"}
    return [*words, *(word for key, one in own.items() for word in (f"--{key}", one))]


def _words_of_cell(over_files: OverFiles, resolved: Any, options: Namespace) -> list[str]:
    """Return the settings with which a job that was meant for all cells is one of them, with the ranks of that one."""
    own = getattr(getattr(resolved.config, "distributed", None), "federated", None)
    words = ["--launch.federated", "null", *(() if own is None else ("--distributed.federated", "null"))]
    given = None if options.federated is None else parse_federation(options.federated, "--federated")
    federated = next((one for one in (given, resolved.launch.federated, own) if one is not None), None)
    number, cells = (0, 1) if over_files.cell is None else parse_cell(over_files.cell, "--cell")
    if isinstance(cells, int) and isinstance(federated, int):
        cells = (federated,) * cells
    elif isinstance(federated, tuple) and over_files.cell is not None and len(federated) != _count(cells):
        raise ConfigError(
            f"--cell is {over_files.cell}, of {_count(cells)} cells, but the configuration has {len(federated)}; give "
            "as many"
        )
    elif isinstance(cells, int) and isinstance(federated, tuple):
        cells = federated  # as they would be in one job
    if isinstance(cells, tuple):
        words += ["--launch.processes", str(cells[number])]
    if over_files.cell is None:
        return words
    if over_files.measure is None and resolved.origins.get("experiment.output_dir") == "default":
        # Beside those of the other cells, should they be trained from the same folder.
        words += ["--experiment.output_dir", os.path.join(resolved.config.experiment.output_dir, f"cell_{number}")]
    return [*words, "--federation.cell", f"{number}/{cells if isinstance(cells, int) else ','.join(map(str, cells))}"]


def _words_of_elastic_cell(number: int, cells: int, resolved: Any, options: Namespace) -> list[str]:
    """Return the settings with which a job that was meant for all cells of an elastic run is one of them."""
    own = getattr(getattr(resolved.config, "distributed", None), "federated", None)
    words = ["--launch.federated", "null", *(() if own is None else ("--distributed.federated", "null"))]
    sizes = resolved.launch.federated if own is None else own
    if options.processes is None and isinstance(sizes, (int, tuple)):
        ranks = (sizes,) * cells if isinstance(sizes, int) else sizes
        if len(ranks) != cells:
            raise ConfigError(
                f"this is cell {number} of {cells}, but the configuration has {len(ranks)} cells; give --processes"
            )
        words += ["--launch.processes", str(ranks[number])]
    if (experiment := getattr(resolved.config, "experiment", None)) is not None:
        words += ["--experiment.output_dir", os.path.join(experiment.output_dir, f"cell_{number}")]
    return words


def _what_is_done(config: Any) -> str | None:
    """Tell where the job of a cell, or a measurement, has been made before; ``None`` where it is to be made."""
    asked = getattr(config, "federation", None)
    if asked is None or not asked.is_alone:
        return None
    from xffl.aggregation.exports import read_global

    round_before, start = (0, None) if asked.start_from is None else read_global(asked.start_from)
    if asked.measure_to is not None:
        try:
            told = parse_json(read_text(Path(asked.measure_to), TEXT_FILE_LIMIT))
        except (OSError, ValueError):
            return None
        is_same = isinstance(told, dict) and told.get("start") == start is not None
        return f"{asked.measure_to} has the values of {asked.start_from} already" if is_same else None
    if asked.export_to is None or (asked.round is None and start is None):
        return None
    number = round_before + 1 if asked.round is None else asked.round
    return _exported(asked.export_to, cell=asked.cell, number=number, start=start, plan=asked.plan)


def _what_script_has_done(over_files: OverFiles) -> str | None:
    """Tell where a script's job of one cell has been made before; ``None`` where it is to be made."""
    if over_files.cell is None or over_files.export is None or not os.path.isdir(over_files.export):
        return None
    from xffl.aggregation.exports import read_global

    before, start = (0, None) if over_files.start is None else read_global(over_files.start)
    return _exported(over_files.export, cell=over_files.cell, number=before + 1, start=start, plan=None)


def _exported(export: str, cell: str, number: int, start: str | None, plan: RoundPlan | None) -> str | None:
    """Tell where a cell's export for a round stands already."""
    from xffl.aggregation.exports import is_exported

    place, cells = parse_cell(cell, "--cell")
    if is_exported(export, cell=place, cells=_count(cells), round=number, start=start, plan=plan):
        return f"{export} is the export of cell {place} for round {number} already, and whole"
    return None


def _count(cells: int | tuple[int, ...]) -> int:
    return cells if isinstance(cells, int) else len(cells)


def _started(options: Namespace) -> int | None:
    """Return how many processes a launcher has started, of which this is one; ``None`` where none has."""
    if options.launcher != "auto":
        return None
    row = launcher_of(os.environ) if options.hosts is None else find_launcher(os.environ)
    if row is None:
        return None
    started: int = row.read(os.environ)["world_size"]
    if options.hosts is not None:
        raise ConfigError(f"--hosts is given, but {row.title} has started {started} processes already; leave it out")
    check_started(row, started, options.processes)
    return started


def _be_rank(options: Namespace, work: Callable[[], object]) -> int:
    if options.merge:
        hint = "give --log-dir DIR and read it with xffl logs DIR --follow"
        raise ConfigError(f"--merge is for the command that starts the ranks, and a launcher has started them; {hint}")
    log_dir = None if options.log_dir is None else make_log_dir(options.log_dir)
    return be_rank(work, timeout_s=options.timeout, log_dir=log_dir)


def _find_start(
    options: Namespace, processes: int | None, federated: Federation | None, knob: str = "--processes"
) -> Allocation | None:
    """Choose where the ranks start; ``None`` where it would be here, and nobody says how many."""
    rule = federated if isinstance(federated, str) else ""
    needs_switches = rule.startswith("auto")
    way = options.launcher
    if options.hosts is not None and way not in ("auto", "ssh"):
        raise ConfigError(f"--hosts is for ssh, but --launcher is {way}; leave one of them out")
    if options.hosts is not None:
        hosts = parse_hosts(options.hosts)
        if needs_switches and not all(host.switches for host in hosts):
            hosts = ask_switches(hosts)
        allocation = Allocation("hosts", hosts)
        return replace(allocation, hosts=fit_hosts(allocation, processes, knob=knob))
    job = None
    if way != "local":
        job = find_job(wants_switches=bool(rule), needs_switches=needs_switches)
    if way == "ssh" and (job is None or job.kind == "slurm"):
        raise ConfigError("--launcher ssh needs to know the hosts; give --hosts a:4,b:4, or @FILE")
    if way == "srun" and job is not None and job.kind != "slurm":
        job = None
    if way == "auto" and job is not None and job.kind != "slurm" and len(job.hosts) == 1 and is_here(job.hosts[0]):
        # The whole job is on this host, where processes need no ssh; there may be more of them than slots.
        processes, job = processes or job.slots, None
    if job is not None:
        return replace(job, hosts=fit_hosts(job, processes, knob=knob))
    if way == "srun":
        hint = "start it with salloc, from a batch script, or with xffl submit"
        raise LaunchError(f"--launcher srun is for the inside of a SLURM job, and this is not. HINT: {hint}")
    if options.elastic is not None and rule:
        raise ConfigError(
            f"federated {rule} finds cells of hosts, but all cells start on this machine; give sizes, such as 2,2"
        )
    if options.elastic is not None and processes is None and isinstance(federated, tuple):
        processes = sum(federated)
    return None if processes is None else Allocation("local", (Host(own_host().name, processes),))


_NO_CELLS = (
    "--elastic without an address starts all cells; give --federated, such as 2,2, or the address of a lighthouse and "
    "--cell"
)


def _check_elastic(options: Namespace, over_files: OverFiles) -> None:
    """Refuse what does not go with an elastic run, and make this job the cell that it is to be, if it is one."""
    given = {"from": over_files.start, "export": over_files.export, "measure": over_files.measure}
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"--{name} {value} is for rounds over files, but --elastic or XFFL_LIGHTHOUSE "
                "asks for an elastic run; leave one of them out"
            )
    if options.restarts is not None:
        integer("--restarts", options.restarts, 0)
    if options.meeting_timeout is not None:
        seconds = number("--meeting-timeout", options.meeting_timeout, above=0, below=1e9, hint="give seconds")
        os.environ[lighthouse_address.MEETING_TIMEOUT_VARIABLE] = f"{seconds:g}"
    by_hand = "start xffl lighthouse, and a job for each cell: xffl exec --elastic http://HOST:PORT --cell 0/2"
    if options.elastic == "":
        if over_files.cell is not None:
            raise ConfigError(f"--cell {over_files.cell} needs the lighthouse's address: --elastic http://HOST:PORT")
        if (started := _started(options)) is not None:
            raise ConfigError(f"--elastic starts all cells, but a launcher has started {started} processes; {by_hand}")
        if options.hosts is not None or options.launcher == "ssh":
            raise ConfigError(f"--elastic starts all cells on this machine or in a SLURM job, not by ssh; {by_hand}")
        return
    if over_files.cell is None:
        hint = "give --cell, such as 0/2, or leave the address out to start all cells"
        raise ConfigError(f"--elastic {options.elastic} joins one cell to a run; {hint}")
    if sizes := options.federated or os.environ.get("XFFL_FEDERATED", "").strip():
        raise ConfigError(
            f"--federated {sizes} is for a job of several cells, but this one is cell {over_files.cell}; give its "
            "ranks by --processes"
        )
    if options.restarts is not None and (options.elastic is None or _started(options) is not None):
        raise ConfigError(f"--restarts {options.restarts} is for ranks that --elastic starts itself; leave it out")
    own_number, cells = parse_cell(over_files.cell, "--cell")
    os.environ["XFFL_CELL"] = f"{own_number}/{_count(cells)}"
    if options.elastic is not None:
        os.environ["XFFL_LIGHTHOUSE"] = lighthouse_address.parse_lighthouse("--elastic", options.elastic)


def _start_all_cells(
    options: Namespace,
    start: Allocation,
    layout: JobLayout,
    command: Sequence[str],
    *,
    federated: Federation | None,
    home: str | None = None,
) -> int:
    """Start a lighthouse, and each cell as a job of its own: on this machine, or as a step of the SLURM job.

    The run's journal is in its folder, which is ``home``; a script that has none has it for as long as the cells run.
    """
    if start.kind not in ("local", "slurm"):
        raise ConfigError(
            f"--elastic starts all cells on this machine or in a SLURM job, but this job has {len(start.hosts)} hosts "
            "that are not SLURM's; start xffl lighthouse, and a job for each cell: xffl exec --elastic "
            "http://HOST:PORT --cell 0/2; or give --launcher local"
        )
    if layout.sizes is None:
        raise ConfigError(_NO_CELLS)
    sizes, is_local = layout.topology.sizes, start.kind == "local"
    check_cells(len(sizes), environment.required_cells(), federated)
    environ = _environ_of_cells()
    token: dict[str, str] = {}
    if not run_token.has_token(environ):
        token = {"XFFL_TOKEN": os.urandom(32).hex()}
        environ |= token
    run_token.token_of(environ)
    with ExitStack() as stack:
        # Each cell by itself would tear others' lines.
        log_dir = _follow_logs(options, stack, layout, is_local=is_local)
        temporary = stack.enter_context(run_folder())
        folder = None
        if not environ.get(JOURNAL_VARIABLE, "").strip():
            folder = Path(_journal_beside(home) if home else f"{temporary}/journal")
        lighthouse = stack.enter_context(own_lighthouse() if is_local else own_lighthouse(layout, folder, token))
        environ["XFFL_LIGHTHOUSE"] = url = f"http://{lighthouse.address}"
        if folder is not None:
            environ[JOURNAL_VARIABLE] = lighthouse.journal or str(folder)
            environ[JOURNAL_FOLDER_VARIABLE] = str(folder)
        shows = cells_command(url, environ[JOURNAL_VARIABLE], environ)
        print(f"xffl: {shows} shows the cells of this run", file=sys.stderr)
        more = _options_of_cell(options, "grace", "hsdp")
        if options.merge and log_dir is None:
            more.append("--merge")
        shares = share_machine(sizes) if is_local else [None] * len(sizes)
        steps = [{}] * len(sizes) if is_local else step_variables(layout)
        jobs = []
        for number, (size, share, step) in enumerate(zip(sizes, shares, steps, strict=True)):
            where = [f"--launcher={'local' if is_local else 'srun'}", f"--processes={size}"]
            own = {**environ, **step, **(share.environ if share else {}), "XFFL_CELL": f"{number}/{len(sizes)}"}
            jobs.append(
                CellJob(
                    number,
                    options=[*where, *more],
                    command=command,
                    environ=own,
                    share=share,
                    log_dir=log_dir,
                    source=options.source,
                    has_saved=partial(_has_checkpoint, f"{home}/cell_{number}") if home else None,
                )
            )
        return launch_cells(
            jobs,
            restarts=_restarts(options),
            timeout_s=options.timeout,
            lighthouse=lighthouse,
            folder=temporary,
        )


def _journal_beside(home: str) -> str:
    """Return where the jobs of ``xffl submit`` look for the journal of a run with this folder."""
    return derive_journal(f"file:{os.path.abspath(home)}/lighthouse")


def _has_checkpoint(folder: str) -> bool:
    """Tell whether a cell with this folder has a checkpoint, or may have one that cannot be read at the moment."""
    from xffl.checkpoint.manager import find_latest_checkpoint

    with suppress(XfflError, OSError):
        return find_latest_checkpoint(folder) is not None
    return True


def _has_saved(options: Namespace, command: Sequence[str], number: int, cells: int) -> bool:
    """Tell whether one cell of a configuration has a checkpoint; of others nobody knows where they save."""
    from xffl.training.config import configuration

    if command[0].endswith(CONFIGURATIONS):
        with suppress(XfflError, OSError):  # as above
            _, resolved = configuration.read_job(command[0], command[1:])
            words = [*command[1:], *_words_of_elastic_cell(number, cells, resolved, options)]
            _, resolved = configuration.read_job(command[0], words)
            experiment = getattr(resolved.config, "experiment", None)
            return experiment is None or _has_checkpoint(experiment.output_dir)
    return True


def _start_one_cell(options: Namespace, command: Sequence[str]) -> int:
    """Start this cell of a run, and start it again when it fails."""
    run_token.token_of()
    number, cells = lighthouse_address.elastic_cell() or (0, 1)
    check_cells(cells, environment.required_cells(), None)
    words = _options_of_cell(options, "processes", "hosts", "launcher", "grace", "hsdp")
    if options.merge:
        words.append("--merge")
    log_dir = None if options.log_dir is None else make_log_dir(options.log_dir)
    job = CellJob(
        number,
        words,
        command,
        environ=_environ_of_cells(),
        log_dir=log_dir,
        source=options.source,
        has_saved=partial(_has_saved, options, command, number, cells),
    )
    kind, _, file = os.environ["XFFL_LIGHTHOUSE"].partition(":")
    with ExitStack() as stack:
        lighthouse = None
        if kind == "file":
            lighthouse = SharedLighthouse(file)
            stack.callback(lighthouse.stop)
        return launch_cells([job], restarts=_restarts(options), timeout_s=options.timeout, lighthouse=lighthouse)


def _follow_logs(options: Namespace, stack: ExitStack, layout: JobLayout, *, is_local: bool) -> str | None:
    """Return the folder of the ranks' logs, if any, and show them while the stack is open, if that is asked for."""
    log_dir = None if options.log_dir is None else make_log_dir(options.log_dir)
    if options.merge and log_dir is None and is_local:
        log_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="xffl-logs-"))
    if options.merge and log_dir is not None:
        stack.enter_context(following(Path(log_dir), sys.stdout.buffer, layout.topology.world_size))
    return log_dir


def _restarts(options: Namespace) -> int:
    return _RESTARTS if options.restarts is None else int(options.restarts)


def _options_of_cell(options: Namespace, *names: str) -> list[str]:
    """Return the words by which the job of a cell gets options of this command."""
    words = [f"--{name}={options[name]}" for name in names if options[name] is not None]
    return [*words, *(["--traceback"] if options.traceback else [])]


def _environ_of_cells() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if name not in _OF_ALL_CELLS}


def _start(
    options: Namespace,
    start: Allocation,
    layout: JobLayout,
    command: Sequence[str],
    *,
    federated: Federation | None,
    limit_s: float | None = None,
    resolved: str | None = None,
) -> int:
    """Start the processes and tell how the job ended; ``limit_s`` and ``resolved`` are of a configuration."""
    timeout_s, knob = (limit_s, "launch.timeout_s") if options.timeout is None else (options.timeout, "--timeout")
    if (cell := lighthouse_address.elastic_cell()) is not None:
        layout = replace(layout, cell=cell[0])
    environ = environment.federation_variables(layout.sizes, layout.replica_size) | read_over_files().variables()
    if layout.sizes is not None:  # else the script says what its cells are, and its session checks them
        cells = layout.topology.cells
        environment.accept_cells(federated, cells, layout.topology.world_size, environment.required_cells())
        environ["XFFL_LAUNCHED_CELLS"] = str(cells)
    if resolved is not None:
        environ["XFFL_RESOLVED"] = resolved
    with ExitStack() as stack:
        log_dir = _follow_logs(options, stack, layout, is_local=start.kind == "local")
        asked = LaunchOptions(
            environ=environ,
            timeout_s=timeout_s,
            grace_s=options.grace or _GRACE_S,
            log_dir=log_dir,
            is_labelled=options.merge and log_dir is None,
            source=options.source,
        )
        if start.kind == "local":
            ended = launch_local(start.slots, command, asked)
        elif start.kind == "slurm":
            from xffl.cluster.launch.srun import launch_srun

            ended = launch_srun(layout, command, asked)
        else:
            from xffl.cluster.launch.host_shells import shell_of
            from xffl.cluster.launch.ssh import launch_ssh

            ended = launch_ssh(layout, command, asked, shell_of(start.kind, options.launcher, os.environ))
    if isinstance(ended, RankFailure):
        if options.failures is not None:
            record = ended.record or FailureRecord(
                time.time(), exit_code=ended.exit_code, headline="", traceback="", is_xffl=False, lost_peer=False
            )
            record_failure(record, options.failures, 0)
        _tell(ended, layout, with_traceback=options.traceback)
        return ended.exit_code
    ranks = "all ranks" if cell is None else f"all ranks of cell {cell[0]}"
    if ended == ExitCode.TIMEOUT:
        print(f"xffl: stopped {ranks} after {timeout_s} s, as {knob} says", file=sys.stderr)
    elif ended == ExitCode.PREEMPTED:
        print(_preempted(layout), file=sys.stderr)
    elif ended > 128:
        print(f"xffl: stopped {ranks} after {signal.Signals(ended - 128).name}", file=sys.stderr)
    return ended


def _preempted(layout: JobLayout) -> str:
    who = "the job" if layout.cell is None else f"cell {layout.cell}"
    return f"xffl: {who} was asked to leave and has saved its state (exit code {ExitCode.PREEMPTED}); start it again"


def _tell(failure: RankFailure, layout: JobLayout, *, with_traceback: bool) -> None:
    record = failure.record
    if failure.exit_code == ExitCode.PREEMPTED:
        print(_preempted(layout), file=sys.stderr)
        return
    if record is not None and (with_traceback or record.has_cause or not record.is_xffl):
        sys.stderr.write(record.traceback)
    others = "all other ranks" if layout.cell is None else "all other ranks of the cell"
    rest = "" if layout.topology.world_size == 1 else f"; {others} were stopped"
    # Without sizes from outside the script makes the cells, if any.
    cell = layout.cell_of(failure.rank)
    where = "" if cell is None else f" (cell {cell})"
    print(f"xffl: rank {failure.rank}{where} {failure.describe()}{rest}", file=sys.stderr)
