"""``xffl submit``: a batch job of SLURM for what a configuration asks for, or for a script."""

from __future__ import annotations

import argparse
import dataclasses
import getpass
import os
import signal
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from xffl.checks import integer
from xffl.cli.main import HelpFormatter
from xffl.cluster.launch.failure import ExitCode, code_of_signal
from xffl.cluster.slurm.job_monitor import Follower, exit_code_of, expand_pattern, log_pattern
from xffl.cluster.slurm.submit import (
    Job,
    SlurmConfig,
    cancel_job,
    find_template,
    render_script,
    submit_job,
    tasks_of_node,
    tasks_of_sweep,
    word_of,
)
from xffl.errors import ConfigError, LaunchError

__all__ = ["build_parser", "run"]

_CONFIGURATIONS = (".yaml", ".yml")
_PASSED_ON = ("federated", "hsdp", "require_cells", "log_dir", "merge")
"""Options that are those of xffl exec."""
_FLAGS = ("--dry-run", "--follow", "--no-follow", "--cancel-on-interrupt", "--merge")
_VALUES = ("--template", "--federated", "--hsdp", "--require-cells", "--log-dir")

_EXAMPLES = f"""\
FILE is a configuration with a section slurm, followed by values for its keys, as for xffl exec, or the options above.
Or it is a script: everything after it is passed to the script, and --slurm.KEY VALUE must be before it.

examples:
  xffl submit config.yaml --dry-run
  xffl submit config.yaml --slurm.nodes 4 --training.epochs 3
  xffl submit config.yaml --federated auto --no-follow
  xffl submit config.yaml --slurm.array '{{experiment.seed: [0, 1, 2]}}'
  xffl submit --slurm.nodes 2 --slurm.tasks_per_node 4 --federated auto train.py --lr 0.1

{textwrap.fill("The keys of slurm are " + ", ".join(one.name for one in dataclasses.fields(SlurmConfig)) + ".", 100)}

The exit code is the job's. Ctrl-C asks whether to cancel the job; without an answer it continues.
"""


def build_parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    parser = ArgumentParser(
        usage="xffl submit [options] FILE [values]",
        description="Submit a batch job to SLURM that runs xffl exec on its nodes, and follow it.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
        allow_abbrev=False,  # words behind FILE are looked at, too
    )
    parser.add_argument("--dry-run", action="store_true", help="print the batch script and exit")
    parser.add_argument("--follow", action="store_true", help="follow the job and show its output (default)")
    parser.add_argument("--no-follow", action="store_true", help="print the job's number and exit")
    parser.add_argument(
        "--cancel-on-interrupt", action="store_true", help="cancel the job at Ctrl-C or SIGTERM without asking"
    )
    parser.add_argument("--template", type=str, metavar="FILE", help="template of the batch script instead of xffl's")
    parser.add_argument("--federated", type=str, metavar="CELLS", help="cells, as for xffl exec: 4,4 or auto")
    parser.add_argument("--hsdp", type=int, metavar="RANKS", help="ranks that hold one copy, as for xffl exec")
    fewest = "let the job fail if it gets fewer cells, as for xffl exec"
    parser.add_argument("--require-cells", type=int, metavar="N", help=fewest)
    parser.add_argument("--log-dir", type=str, metavar="DIR", help="write a file for each rank, as for xffl exec")
    parser.add_argument("--merge", action="store_true", help="put cell and rank before each line, as for xffl exec")
    for one in dataclasses.fields(SlurmConfig):
        # Texts: they are read with the configuration, as those behind it are.
        parser.add_argument(f"--slurm.{one.name}", type=str, help=argparse.SUPPRESS)
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="FILE [values]", help="what the job runs")
    return parser


def run(options: Namespace) -> int:
    """Submit the job, and follow it."""
    file, *words = options.words or [""]
    is_configuration = file.endswith(_CONFIGURATIONS)
    if is_configuration:
        options, words = _take_options(options, words)
        if {"-h", "--help"} & set(words):
            return _help(file, words)
    elif not file:
        raise ConfigError("no file is given; write xffl submit config.yaml, or xffl submit [options] SCRIPT")
    elif not os.path.isfile(file):
        raise ConfigError(f"{file!r} is not a file; write xffl submit config.yaml, or xffl submit [options] SCRIPT")
    if options.follow and options.no_follow:
        raise ConfigError("--follow and --no-follow are both given; leave one of them out")
    if options.require_cells is not None:
        integer("--require-cells", options.require_cells)  # told before it queues
    template = find_template(options.template)
    job, slurm = (_plan_configuration if is_configuration else _plan_script)(file, words, options)
    script = render_script(slurm, job, template)
    if options.dry_run:
        print(script, end="")
        return 0
    if not is_configuration and "--dry-run" in words:
        _tell(
            f"--dry-run after {file} is passed to the script, so the job is submitted; for a dry run put it before the "
            "file name"
        )
    number = submit_job(script, job, is_chained=slurm.dependency is not None)
    if options.no_follow:
        print(number)
        return 0
    output = expand_pattern(job.log, {"j": number, "A": number, "a": "*", "x": job.name}) or job.log
    _tell(f"submitted job {number} ({job.name}); its output goes to {output}")
    return _follow(number, job, cancels=options.cancel_on_interrupt)


def _take_options(options: Namespace, words: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Take this command's own options from the words behind a configuration."""
    mine, others = [], []
    rest = list(words)
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


def _help(file: str, words: Sequence[str]) -> int:
    from xffl.training.config.configuration import config_class, help_text, job_trainer

    usage = f"xffl submit {os.path.basename(file)} [options] [--KEY VALUE ...]"
    print(help_text(config_class(job_trainer(file, words)), usage), end="")
    return 0


def _plan_configuration(file: str, words: Sequence[str], options: Namespace) -> tuple[Job, SlurmConfig]:
    """Read a configuration for each task of the job, so that mistakes are told before it queues."""
    from xffl.training.config.configuration import read_job, read_words

    slurm_words = [f"--slurm.{name}={text}" for name, text in vars(options.slurm).items() if text is not None]
    _, resolved = read_job(file, [*slurm_words, *words])
    slurm = resolved.slurm
    experiment = getattr(resolved.config, "experiment", None)
    name = getattr(experiment, "name", Path(file).stem)
    run_folder = os.path.abspath(getattr(experiment, "output_dir", os.path.join("runs", name)))
    heard = [name.removeprefix("SIG") for name in getattr(experiment, "preempt_signals", (slurm.signal,))]
    if slurm.signal_s is not None and slurm.signal.removeprefix("SIG") not in heard:
        raise ConfigError(
            f"slurm.signal is {slurm.signal}, but the run listens to {', '.join(heard) or 'none'}: it would be killed; "
            "add the signal to experiment.preempt_signals, or give --slurm.signal_s null"
        )
    layout = tasks_of_node(slurm, resolved.launch.processes)
    tasks, folders = [], []
    for number, changes in enumerate(tasks_of_sweep(slurm.array)):
        if experiment is not None and not {"experiment.name", "experiment.output_dir"} & changes.keys():
            changes |= {"experiment.output_dir": os.path.join(experiment.output_dir, f"task_{number}")}
        task = [word_of(key, value) for key, value in changes.items()]
        _, one = read_job(file, [*slurm_words, *words, *task])
        if one.slurm != slurm or tasks_of_node(slurm, one.launch.processes) != layout:
            raise ConfigError(f"slurm.array changes {', '.join(changes)}; all tasks of an array are of one shape")
        tasks.append(tuple(task))
        folders.append(getattr(getattr(one.config, "experiment", None), "output_dir", str(number)))
    if len(set(folders)) < len(folders):
        twice = next(folder for folder in folders if folders.count(folder) > 1)
        raise ConfigError(f"several tasks of slurm.array write to {twice}; give each an experiment.output_dir")
    taken = read_words(words)
    passed = [f"--config={one}" for one in taken.files]
    passed += [
        f"--{key}{'+' * is_added}={text}" for key, text, is_added in taken.settings if key.split(".")[0] != "slurm"
    ]
    job = _job(name, run_folder, [file, *passed], slurm, layout, tuple(tasks), options)
    return dataclasses.replace(job, is_exclusive=experiment is not None), slurm


def _plan_script(file: str, words: Sequence[str], options: Namespace) -> tuple[Job, SlurmConfig]:
    """Take the section slurm from the options and the environment; the rest is the script's own."""
    from xffl.training.config.configuration import read_configuration

    slurm_words = [f"--slurm.{name}={text}" for name, text in vars(options.slurm).items() if text is not None]
    resolved = read_configuration(_Nothing, (), slurm_words)
    slurm = resolved.slurm
    if not {"slurm.signal", "slurm.signal_s"} & resolved.origins.keys():
        slurm = dataclasses.replace(slurm, signal_s=None)  # which would kill a script that does not listen to it
    name = Path(file).stem
    tasks = tuple(
        tuple(word_of(key, value) for key, value in changes.items()) for changes in tasks_of_sweep(slurm.array)
    )
    run_folder = os.path.abspath(os.path.join("runs", name))
    return _job(name, run_folder, [file, *words], slurm, tasks_of_node(slurm, None), tasks, options), slurm


@dataclasses.dataclass(frozen=True)
class _Nothing:
    """A script is configured by itself."""


def _job(
    name: str,
    run_folder: str,
    words: Sequence[str],
    slurm: SlurmConfig,
    tasks_per_node: int,
    tasks: tuple[tuple[str, ...], ...],
    options: Namespace,
) -> Job:
    if tasks and options.log_dir is not None:
        raise ConfigError(
            f"--log-dir {options.log_dir!r} is one folder, and each task of slurm.array has a rank 0, which would "
            "write to the same file there; leave it out, each task's output is a file of its own"
        )
    given = {one: getattr(options, one) for one in _PASSED_ON}
    passed = [
        f"--{one.replace('_', '-')}" + ("" if value is True else f"={value}")
        for one, value in given.items()
        if value is not None and value is not False
    ]
    return Job(
        name=name,
        folder=os.getcwd(),
        run_folder=run_folder,
        log=os.path.abspath(slurm.output)
        if slurm.output
        else log_pattern(os.path.join(run_folder, "slurm"), bool(tasks)),
        command=(sys.executable, "-m", "xffl", "exec", *passed, *words),
        tasks_per_node=tasks_per_node,
        tasks=tasks,
    )


def _follow(number: str, job: Job, *, cancels: bool) -> int:
    """Show a job until it has ended, and return its exit code."""
    follower = Follower(number, job.log, job.name, getpass.getuser(), _write, _tell)
    try:
        with _terminable():
            endings = follower.follow()
    except KeyboardInterrupt as stop:
        is_terminated = isinstance(stop, _Terminated)
        if cancels or (not is_terminated and _agrees(number)):
            cancel_job(number)
            _tell(f"cancelled job {number}")
        else:
            _tell(f"job {number} continues; squeue -j {number} shows it, scancel {number} ends it")
        return code_of_signal(signal.SIGTERM) if is_terminated else ExitCode.INTERRUPTED
    if not endings:
        raise LaunchError(f"job {number} has ended, and SLURM no longer knows how; see its output in {job.log}")
    logs = follower.logs()
    for one, ending in sorted(endings.items()):
        how = "" if ending.state == "COMPLETED" else f", exit code {ending.exit_code}; see {logs.get(one, job.log)}"
        _tell(f"job {one} ended: {ending.state}{how}")
    return exit_code_of(endings)


def _agrees(number: str) -> bool:
    """Ask whether to cancel a job; nobody there to answer means no."""
    if not sys.stdin.isatty():
        return False
    try:
        return input(f"\nxffl: cancel job {number}? [y/N] ").strip().lower() in ("y", "yes")
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


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _tell(line: str) -> None:
    print(f"xffl: {line}", file=sys.stderr, flush=True)
