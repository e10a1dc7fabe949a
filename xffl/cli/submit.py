"""``xffl submit``: a batch job of SLURM for what a configuration asks for, or for a script."""

from __future__ import annotations

import argparse
import dataclasses
import getpass
import os
import signal
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import starmap
from pathlib import Path
from types import FrameType
from typing import Any

from jsonargparse import ArgumentParser, Namespace

import xffl
from xffl.checks import integer
from xffl.cli.execute import is_lighthouse
from xffl.cli.main import command_parser
from xffl.cluster.launch.failure import ExitCode, code_of_signal
from xffl.cluster.launch.script import CONFIGURATIONS, check_command, is_stream, name_of
from xffl.cluster.lighthouse.address import parse_lighthouse
from xffl.cluster.run_token import has_token, make_token_file, token_of
from xffl.cluster.sizes import Federation
from xffl.cluster.sizes_text import parse_federation
from xffl.cluster.slurm import submit
from xffl.cluster.slurm.job_monitor import Follower, exit_code_of, expand_pattern, log_pattern
from xffl.cluster.slurm.submit import Job, SlurmConfig, cancel_jobs, shape_cell, tasks_of_node, tasks_of_sweep, word_of
from xffl.errors import ConfigError, LaunchError
from xffl.jobs.options import JobOptions
from xffl.jobs.programs.configured import configured_cells, experiment_of, print_help

__all__ = ["build_parser", "join_elastic", "run"]

_PROGRAM = str(Path(xffl.__file__).with_name("__main__.py"))
"""What a job runs: by its path, since ``python -m`` looks for Python's own modules in the job's folder first."""
_FLAGS = ("--dry-run", "--follow", "--no-follow", "--cancel-on-interrupt", "--merge", "--isolate")
_VALUES = ("--template", "--federated", "--hsdp", "--require-cells", "--log-dir", "--elastic", "--cells", "--cell")

_EXAMPLES = f"""\
FILE is a configuration with a section slurm, followed by values for its keys, as for xffl exec, or the options above.
Or it is a script: everything after it is passed to the script, and --slurm.KEY VALUE must be before it.

examples:
  xffl submit config.yaml --dry-run
  xffl submit config.yaml --slurm.nodes 4 --training.epochs 3
  xffl submit config.yaml --federated auto --no-follow
  xffl submit config.yaml --slurm.array '{{experiment.seed: [0, 1, 2]}}'
  xffl submit --slurm.nodes 2 --slurm.tasks_per_node 4 --federated auto train.py --lr 0.1
  xffl submit config.yaml --elastic --cells 3
  xffl submit config.yaml --elastic --cells 3 --cell 1 --slurm.nodelist b1

{textwrap.fill("The keys of slurm are " + ", ".join(one.name for one in dataclasses.fields(SlurmConfig)) + ".", 100)}

The exit code is the job's. Ctrl-C asks whether to cancel the job; without an answer it continues.
"""


def build_parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    parser = command_parser(
        "Submit a batch job to SLURM that runs xffl exec on its nodes, and follow it.",
        _EXAMPLES,
        usage="xffl submit [options] FILE [values]",
        allow_abbrev=False,  # words behind FILE are looked at, too
    )
    parser.add_argument("--dry-run", action="store_true", help="print the batch script and exit")
    parser.add_argument("--follow", action="store_true", help="follow the job and show its output (default)")
    parser.add_argument("--no-follow", action="store_true", help="print the job's number and exit")
    cancel = "cancel the job at Ctrl-C or SIGTERM without asking"
    parser.add_argument("--cancel-on-interrupt", action="store_true", help=cancel)
    parser.add_argument("--template", type=str, metavar="FILE", help="template of the batch script instead of xffl's")
    parser.add_argument("--federated", type=str, metavar="CELLS", help="cells, as for xffl exec: 4,4 or auto")
    parser.add_argument("--hsdp", type=int, metavar="RANKS", help="ranks that hold one copy, as for xffl exec")
    fewest = "let the job fail if it gets fewer cells, as for xffl exec"
    parser.add_argument("--require-cells", type=int, metavar="N", help=fewest)
    elastic = "submit a job for each cell, as xffl exec --elastic starts it; they find each other by a file in the "
    elastic += "run's folder, or by the lighthouse at this address"
    parser.add_argument("--elastic", type=str, nargs="?", const="", metavar="URL", help=elastic)
    cells = "with --elastic, the number of cells, unless --federated or launch.federated gives the ranks of each"
    parser.add_argument("--cells", type=int, metavar="N", help=cells)
    cell = "with --elastic, submit the job of this cell alone, such as one that was cancelled"
    parser.add_argument("--cell", type=int, metavar="C", help=cell)
    parser.add_argument("--log-dir", type=str, metavar="DIR", help="write a file for each rank, as for xffl exec")
    parser.add_argument("--merge", action="store_true", help="put cell and rank before each line, as for xffl exec")
    isolate = "make each cell of a script torch.distributed's default group, as for xffl exec"
    parser.add_argument("--isolate", action="store_true", help=isolate)
    for one in dataclasses.fields(SlurmConfig):
        # Texts: they are read with the configuration, as those behind it are.
        parser.add_argument(f"--slurm.{one.name}", type=str, help=argparse.SUPPRESS)
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="FILE [values]", help="what the job runs")
    return parser


def join_elastic(words: Sequence[str]) -> list[str]:
    """Write ``--elastic`` and its value in one word: it may have none, and is not to take the file for it.

    The ``-m`` of a module, or the ``-`` of a stream, ends the options.
    """
    joined, at = list(words), 0
    while at < len(joined) and joined[at].startswith("-"):
        if joined[at] in ("-m", "-"):
            return [*joined[:at], "--", *joined[at:]]
        if joined[at] == "--elastic":
            url = [word for word in joined[at + 1 : at + 2] if is_lighthouse(word)]
            joined[at : at + 1 + len(url)] = [f"--elastic={''.join(url)}"]
        at += 1 if "=" in joined[at] or joined[at] in (*_FLAGS, "-h", "--help") else 2
    return joined


def run(options: Namespace) -> int:
    """Submit the job, or those of all cells, and follow them."""
    if options.words[:1] == ["--"]:
        del options.words[0]
    file, *words = options.words or [""]
    is_configuration = file.endswith(CONFIGURATIONS)
    if is_configuration:
        options, words = _take_options(options, words)
        if {"-h", "--help"} & set(words):
            print_help(file, words, "xffl submit {} [options] [--KEY VALUE ...]")
            return 0
    elif not file:
        raise ConfigError("no file is given; write xffl submit config.yaml, or xffl submit [options] SCRIPT")
    elif is_stream(file):
        hint = "write the script to a file, and give the path of that"
        raise ConfigError(f"{file!r} can be read now, but not when the job starts; {hint}")
    else:
        check_command(options.words, "write xffl submit config.yaml, or xffl submit [options] SCRIPT")
    if options.follow and options.no_follow:
        raise ConfigError("--follow and --no-follow are both given; leave one of them out")
    if options.require_cells is not None:
        integer("--require-cells", options.require_cells)  # reported before it queues
    if options.elastic is None:
        for name in ("cells", "cell"):
            if options[name] is not None:
                raise ConfigError(f"--{name} {options[name]} is for the jobs of an elastic run; give --elastic, too")
    if options.isolate and (is_configuration or options.elastic is not None):
        raise ConfigError(
            "--isolate is for scripts whose cells are one job; the trainer of a configuration keeps its cells apart in "
            "one world, and with --elastic each cell is a job, and so a world of its own, already: leave --isolate out"
        )
    template = submit.find_template(options.template)
    planned = (_plan_configuration if is_configuration else _plan_script)(file, words, options)
    scripts = [submit.render_script(slurm, job, template) for job, slurm in planned]
    if options.dry_run:
        print("\n".join(scripts), end="")
        return 0
    if not is_configuration and "--dry-run" in words:
        hint = "so the job is submitted; for a dry run put it before the file name"
        _tell(f"--dry-run after {file} is passed to the script, {hint}")
    jobs = _submit(planned, scripts)
    if options.no_follow:
        print(*jobs, sep="\n")
        return 0
    for number, job in jobs.items():
        output = expand_pattern(job.log, {"j": number, "A": number, "a": "*", "x": job.name}) or job.log
        _tell(f"submitted job {number} ({job.name}); its output goes to {output}")
    return _follow(jobs, cancels=options.cancel_on_interrupt)


def _submit(planned: Sequence[tuple[Job, SlurmConfig]], scripts: Sequence[str]) -> dict[str, Job]:
    """Submit all jobs, or none; return them by their numbers."""
    for job, slurm in planned:
        if slurm.dependency is None:
            submit.refuse_busy(job)
    jobs: dict[str, Job] = {}
    for (job, slurm), script in zip(planned, scripts, strict=True):
        try:
            jobs[submit.submit_job(script, job, is_chained=slurm.dependency is not None)] = job
        except LaunchError:
            if jobs:
                cancel_jobs(list(jobs))
                _tell(f"cancelled {_jobs_text(jobs)}, since not all cells could be submitted")
            raise
    return jobs


def _take_options(options: Namespace, words: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Take this command's own options from the words behind a configuration."""
    mine, others = [], []
    rest = join_elastic(words)
    while rest:
        word = rest.pop(0)
        if word in _FLAGS or word.startswith(tuple(f"{name}=" for name in _VALUES)):
            mine.append(word)
        elif word in _VALUES:
            mine += [word, *rest[:1]]
            rest = rest[1:]
        else:
            others.append(word)
    behind = build_parser().parse_args([*mine, "FILE"])
    merged = options.clone()
    for name, value in vars(behind).items():
        if name not in ("words", "slurm") and value is not None and value is not False:
            merged[name] = value
    return merged, others


def _slurm_words(options: Namespace) -> list[str]:
    return [f"--slurm.{name}={text}" for name, text in vars(options.slurm).items() if text is not None]


def _plan_configuration(file: str, words: Sequence[str], options: Namespace) -> list[tuple[Job, SlurmConfig]]:
    """Read a configuration for each task of the job, so that mistakes are reported before it queues."""
    from xffl.training.config.configuration import read_job, read_words

    _, resolved = read_job(file, [*_slurm_words(options), *words])
    slurm = resolved.slurm
    experiment = experiment_of(resolved)
    name = getattr(experiment, "name", Path(file).stem)
    run_folder = os.path.abspath(getattr(experiment, "output_dir", os.path.join("runs", name)))
    heard = [name.removeprefix("SIG") for name in getattr(experiment, "preempt_signals", (slurm.signal,))]
    if slurm.signal_s is not None and slurm.signal.removeprefix("SIG") not in heard:
        raise ConfigError(
            f"slurm.signal is {slurm.signal}, but the run listens to {', '.join(heard) or 'none'}: it would be killed; "
            "add the signal to experiment.preempt_signals, or give --slurm.signal_s null"
        )
    taken = read_words(words)
    passed = [f"--config={given}" for given in taken.files]
    others = (given for given in taken.settings if given[0].split(".")[0] != "slurm")
    passed += [f"--{key}{'+' * is_added}={text}" for key, text, is_added in others]
    if options.elastic is not None:
        elastic = _Elastic(name, run_folder, [file, *passed], options, is_exclusive=experiment is not None)
        return elastic.plan(slurm, configured_cells(resolved), resolved.launch.processes)
    layout = tasks_of_node(slurm, resolved.launch.processes)
    tasks, folders = [], []
    for number, changes in enumerate(tasks_of_sweep(slurm.array)):
        if experiment is not None and not {"experiment.name", "experiment.output_dir"} & changes.keys():
            changes |= {"experiment.output_dir": os.path.join(experiment.output_dir, f"task_{number}")}
        task = list(starmap(word_of, changes.items()))
        _, given = read_job(file, [*_slurm_words(options), *words, *task])
        if given.slurm != slurm or tasks_of_node(slurm, given.launch.processes) != layout:
            raise ConfigError(f"slurm.array changes {', '.join(changes)}; all tasks of an array are of one shape")
        tasks.append(tuple(task))
        folders.append(getattr(experiment_of(given), "output_dir", str(number)))
    if (twice := next((folder for folder in folders if folders.count(folder) > 1), None)) is not None:
        raise ConfigError(f"several tasks of slurm.array write to {twice}; give each an experiment.output_dir")
    job = _job(
        name,
        run_folder=run_folder,
        words=[file, *passed],
        slurm=slurm,
        tasks_per_node=layout,
        tasks=tuple(tasks),
        options=JobOptions.of(vars(options)),
    )
    return [(dataclasses.replace(job, is_exclusive=experiment is not None), slurm)]


def _plan_script(file: str, words: Sequence[str], options: Namespace) -> list[tuple[Job, SlurmConfig]]:
    """Take the section slurm from the options and the environment; the rest is the script's own."""
    from xffl.training.config.configuration import read_configuration

    resolved = read_configuration(_Nothing, (), _slurm_words(options))
    slurm = resolved.slurm
    if not {"slurm.signal", "slurm.signal_s"} & resolved.origins.keys():
        slurm = dataclasses.replace(slurm, signal_s=None)  # which would kill a script that does not listen to it
    if slurm.signal_s is not None:
        _tell(
            f"slurm sends {slurm.signal} to the script {slurm.signal_s} s before the time limit, which ends a script "
            "that does not listen to it (xffl.training.Preemption); leave --slurm.signal and --slurm.signal_s out then"
        )
    name = name_of([file, *words])
    run_folder = os.path.abspath(os.path.join("runs", name))
    if options.elastic is not None:
        elastic = _Elastic(name, run_folder, [file, *words], options, is_exclusive=not options.elastic)
        return elastic.plan(slurm, None, None)
    tasks = tuple(tuple(starmap(word_of, changes.items())) for changes in tasks_of_sweep(slurm.array))
    return [
        (
            _job(
                name,
                run_folder=run_folder,
                words=[file, *words],
                slurm=slurm,
                tasks_per_node=tasks_of_node(slurm, None),
                tasks=tasks,
                options=JobOptions.of(vars(options)),
            ),
            slurm,
        )
    ]


@dataclasses.dataclass(frozen=True)
class _Nothing:
    """A script is configured by itself."""


@dataclasses.dataclass(frozen=True)
class _Elastic:
    """An elastic run whose cells are jobs."""

    name: str
    run_folder: str
    words: Sequence[str]  # what each job runs: the file, and what stands behind it
    options: Namespace
    is_exclusive: bool

    def plan(
        self, slurm: SlurmConfig, federated: Federation | None, processes: int | None
    ) -> list[tuple[Job, SlurmConfig]]:
        """Return the job of each cell, or of the one that is asked for; ``federated`` is that of a configuration."""
        if slurm.array:
            raise ConfigError(
                "slurm.array makes one job of many runs, but --elastic many jobs of one run; leave one of them out"
            )
        sizes, cells = self._sizes(federated)
        number = self.options.cell
        if number is not None and integer("--cell", number, 0) >= cells:
            raise ConfigError(f"--cell is {number}, but there are {cells} cells, from 0; give 0 to {cells - 1}")
        place = parse_lighthouse("--elastic", self.options.elastic or f"file:{self.run_folder}/lighthouse")
        environ = self._token()
        planned = []
        for cell in range(cells) if number is None else (number,):
            shape, tasks = (slurm, tasks_of_node(slurm, processes)) if sizes is None else shape_cell(slurm, sizes, cell)
            folder = os.path.join(self.run_folder, f"cell_{cell}")
            job = _job(
                f"{self.name}_cell_{cell}",
                run_folder=folder,
                words=self.words,
                slurm=shape,
                tasks_per_node=tasks,
                tasks=(),
                # What the cells of an elastic run are is said to each by its own options.
                options=dataclasses.replace(
                    JobOptions.of(vars(self.options)),
                    federated=None,
                    elastic=place,
                    cell=f"{cell}/{cells}",
                    processes=None if sizes is None else sizes[cell],
                ),
            )
            lives = environ
            if number is not None and (before := len(submit.earlier_jobs(folder))):
                # Submitted again, it may have lost what the run has made of the model, as a requeued one.
                lives = environ | {"XFFL_EARLIER_JOBS": str(before)}
            if lives:
                # Not in the script's own lines, which a site may have replaced.
                prefix = ("env", *(f"{name}={text}" for name, text in lives.items()))
                job = dataclasses.replace(job, command=(*prefix, *job.command))
            planned.append((dataclasses.replace(job, cell=cell, is_exclusive=self.is_exclusive), shape))
        numbered = ((str(at), job) for at, (job, _) in enumerate(planned))
        logs = {expand_pattern(job.log, {"j": at, "A": at, "x": job.name}) for at, job in numbered}
        if len(logs) < len(planned) and None not in logs:
            raise ConfigError(f"slurm.output {slurm.output!r} is one file for all cells; put %j or %x into its name")
        return planned

    def _sizes(self, federated: Federation | None) -> tuple[tuple[int, ...] | None, int]:
        """Return the ranks of each cell, if they are said, and how many cells there are."""
        options = self.options
        asked = federated if options.federated is None else parse_federation(options.federated, "--federated")
        if isinstance(asked, str) and options.federated is not None:
            raise ConfigError(f"--federated {asked} finds cells in one job, but each is a job of its own; give sizes")
        if isinstance(asked, tuple):
            if options.cells not in (None, len(asked)):
                raise ConfigError(
                    f"--cells is {options.cells}, but federated {','.join(map(str, asked))} has {len(asked)} cells; "
                    "leave it out, or give --federated the ranks of all cells, or one number for each of them"
                )
            return asked, len(asked)
        if options.cells is None:
            raise ConfigError(
                "--elastic needs the number of cells; give --cells, such as 3, or the ranks of each: --federated 4,4,2"
            )
        cells = integer("--cells", options.cells, 1, submit.MAX_JOBS, hint="each is a job")
        return ((asked,) * cells if isinstance(asked, int) else None), cells

    def _token(self) -> dict[str, str]:
        """Return the variable that names the file of the run's token, which is made where the user gives none."""
        file = os.environ.get("XFFL_TOKEN_FILE", "").strip()
        if has_token():
            token_of()  # raises what is wrong with it
        else:
            file = os.path.join(self.run_folder, "token")
            if not self.options.dry_run:
                make_token_file(Path(file))
        return {"XFFL_TOKEN_FILE": os.path.abspath(file)} if file else {}


def _job(
    name: str,
    run_folder: str,
    words: Sequence[str],
    slurm: SlurmConfig,
    tasks_per_node: int,
    tasks: tuple[tuple[str, ...], ...],
    options: JobOptions,
) -> Job:
    if tasks and options.log_dir is not None:
        raise ConfigError(
            f"--log-dir {options.log_dir!r} is one folder, and each task of slurm.array has a rank 0, which would "
            "write to the same file there; leave it out, each task's output is a file of its own"
        )
    own_log = None if slurm.output else log_pattern(os.path.join(run_folder, "slurm"), bool(tasks))
    return Job(
        name=name,
        folder=os.getcwd(),
        run_folder=run_folder,
        log=own_log or os.path.abspath(str(slurm.output)),
        command=(sys.executable, _PROGRAM, "exec", *options.words(), *words),
        tasks_per_node=tasks_per_node,
        tasks=tasks,
    )


def _follow(jobs: Mapping[str, Job], *, cancels: bool) -> int:
    """Show jobs until they have ended, and return the exit code of the first that has one."""
    follower = Follower(jobs, getpass.getuser(), partial(print, end="", flush=True), _tell)
    try:
        with _terminable():
            endings = follower.follow()
    except KeyboardInterrupt as stop:
        is_terminated = isinstance(stop, _Terminated)
        if cancels or (not is_terminated and _agrees(jobs)):
            cancel_jobs(list(jobs))
            _tell(f"cancelled {_jobs_text(jobs)}")
        else:
            shown = f"squeue -j {','.join(jobs)} shows {{}}, scancel {' '.join(jobs)} ends {{}}"
            does, what = ("continue", "them") if len(jobs) > 1 else ("continues", "it")
            _tell(f"{_jobs_text(jobs)} {does}; {shown.format(what, what)}")
        return code_of_signal(signal.SIGTERM) if is_terminated else ExitCode.INTERRUPTED
    logs = follower.logs()
    for task, ending in sorted(endings.items()):
        how = f", exit code {ending.exit_code}; see {logs.get(task, 'its output')}"
        _tell(f"job {follower.name(task)} ended: {ending.state}{'' if ending.state == 'COMPLETED' else how}")
    known = {task.partition("_")[0] for task in endings}
    if (lost := next((number for number in jobs if number not in known), None)) is not None:
        raise LaunchError(f"job {lost} has ended, and SLURM no longer knows how; see its output in {jobs[lost].log}")
    return exit_code_of(endings)


def _jobs_text(jobs: Mapping[str, Job]) -> str:
    return f"job{'s' * (len(jobs) > 1)} {', '.join(jobs)}"


def _agrees(jobs: Mapping[str, Job]) -> bool:
    """Ask whether to cancel jobs; nobody there to answer means no."""
    if not sys.stdin.isatty():
        return False
    try:
        return input(f"\nxffl: cancel {_jobs_text(jobs)}? [y/N] ").strip().lower() in ("y", "yes")
    except (EOFError, KeyboardInterrupt):
        return False


class _Terminated(KeyboardInterrupt):
    """SIGTERM has come."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the block like Ctrl-C, though nobody is asked then."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    before: Any = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _tell(line: str) -> None:
    print(f"xffl: {line}", file=sys.stderr, flush=True)
