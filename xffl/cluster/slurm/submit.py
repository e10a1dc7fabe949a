"""Batch jobs of SLURM: what a configuration asks for, and the script that is made of it.

A script has the words of ``xffl exec``, and no request that was read before (:class:`xffl.jobs.request.JobRequest`): it
is read, kept and run again by people, who may change it; a template, the shell and the tasks of an array put further
words behind it; and what a request holds first is known when the job starts: its hosts, cells by ``auto``, the
environment of the nodes. So the words are read once, on the job's first node; what ``xffl submit`` reads of them before
is whether they can be right. Other batch systems get no scripts from xffl. Inside a job of any of them, and of SLURM,
the hosts come through one interface, :func:`xffl.cluster.batch.find_job`.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from xffl.checks import integer_fields, shown
from xffl.compat.datasets import ENVIRON
from xffl.errors import ConfigError, LaunchError
from xffl.files import create, make_folders, read_given, read_text, write_whole

__all__ = [
    "MAX_JOBS",
    "Job",
    "SlurmConfig",
    "cancel_jobs",
    "earlier_jobs",
    "find_template",
    "refuse_busy",
    "render_script",
    "run_slurm",
    "shape_cell",
    "submit_job",
    "tasks_of_node",
    "tasks_of_sweep",
    "word_of",
]

TEMPLATE = "job.sbatch"
MAX_JOBS = 10_000
"""The most jobs of one command: SLURM holds as many in all unless its MaxJobCount says otherwise"""
_TIME = re.compile(r"(?:([0-9]{1,9})-)?([0-9]{1,9})(?::([0-9]{1,9}))?(?::([0-9]{1,9}))?")
_JOB = re.compile(r"[0-9]{1,18}(?:_[0-9]{1,18})?")
_MAX_BYTES = 2**20
_PLACE = re.compile(r"@([A-Z_]+)@")


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """What ``xffl submit`` asks SLURM for.

    :param partition: Where the job queues.
    :param nodes: Nodes of the job.
    :param tasks_per_node: Ranks on each node; by default one for each GPU that is asked for, else the node's share of
        launch.processes, else one.
    :param cpus_per_task: Cores of each rank.
    :param gpus_per_node: GPUs of each node: their number, or kind and number, such as a100:4.
    :param memory: Memory of each node, such as 64G; 0 for all of it.
    :param time: Time limit: minutes, or 12:30:00, or 2-00:00:00.
    :param account: The account that is charged.
    :param qos: Quality of service.
    :param constraint: Features that nodes must have.
    :param nodelist: Nodes to take, such as a[1-2],b1; by default SLURM chooses.
    :param switches: Most leaf switches that the nodes may hang on, and how long to wait for that: 1@12:00:00.
    :param dependency: Jobs to wait for, such as afterany:123, or singleton.
    :param signal: Sent to the ranks before the time limit; a trainer then writes a checkpoint and ends.
    :param signal_s: How long before the time limit, in seconds; null for no signal.
    :param requeue: Whether a job that was interrupted goes back into the queue.
    :param max_restarts: How often a job goes back after such a signal.
    :param array: One task of a job array for each combination of these values, such as {experiment.seed: [0, 1, 2]}.
    :param array_limit: Most tasks of an array that run at the same time.
    :param setup: Lines that make the environment in the job, or one file of them, such as workflows/env/cuda.sh.
    :param extra: More options of sbatch, as they stand behind #SBATCH, such as --exclusive.
    :param output: File of the job's output, with SLURM's %j; by default in the run's folder.
    """

    partition: str | None = None
    nodes: int = 1
    tasks_per_node: int | None = None
    cpus_per_task: int | None = None
    gpus_per_node: int | str | None = None
    memory: int | str | None = None
    time: int | str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    switches: int | str | None = None
    dependency: str | None = None
    signal: str = "USR2"
    signal_s: int | None = 90
    requeue: bool = True
    max_restarts: int = 100
    array: dict[str, Any] = field(default_factory=dict)
    array_limit: int | None = None
    setup: str | tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    output: str | None = None

    def __post_init__(self) -> None:
        counts = ("tasks_per_node", "cpus_per_task", "array_limit")
        integer_fields(self, "nodes", prefix="slurm.")
        integer_fields(self, *counts, prefix="slurm.", hint="give more, or leave it out", may_be_none=True)
        integer_fields(self, "signal_s", minimum=0, prefix="slurm.", may_be_none=True)
        integer_fields(self, "max_restarts", minimum=0, prefix="slurm.")
        if self.array_limit is not None and not self.array:
            raise ConfigError(
                f"slurm.array_limit {self.array_limit} is for the tasks of slurm.array, which has none; give it "
                "values, or leave the limit out"
            )
        if not re.fullmatch(r"[A-Z0-9+-]+", self.signal):
            raise ConfigError(f"slurm.signal {self.signal!r} is no signal; give its name, such as USR2")
        gpus = self.gpus_per_node
        if gpus is not None and not re.fullmatch(r"(?:[^:,\s]+:)?[1-9][0-9]{0,8}", str(gpus)):
            raise ConfigError(f"slurm.gpus_per_node {shown(gpus)} must be a number of GPUs, such as 4 or a100:4")
        limit_s = _seconds(self.time)
        if limit_s is not None and self.signal_s is not None and limit_s <= self.signal_s:
            raise ConfigError(
                f"slurm.time {self.time} is {limit_s} s, and slurm.signal_s {self.signal_s}: the signal would come at "
                "once; give more time, or fewer seconds"
            )
        for line in self.extra:
            if not line.startswith("-"):
                raise ConfigError(f"slurm.extra has {line!r}, which is no option of sbatch; write --name=value")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as its script tells it."""

    name: str
    folder: str  # where the command runs
    run_folder: str  # where it writes; the script and the output are kept in its folder "slurm"
    log: str  # the file of its output, absolute, with SLURM's %j
    command: tuple[str, ...]
    tasks_per_node: int
    tasks: tuple[tuple[str, ...], ...] = ()  # for each task of an array, the words behind the command
    is_exclusive: bool = False  # whether no other job may write to the run's folder at the same time
    cell: int | None = None  # which cell of an elastic run it is; it goes back into the queue after a failure, too


def tasks_of_node(slurm: SlurmConfig, processes: int | None, *, cell: int | None = None) -> int:
    """Return how many ranks each node of a job gets, which may be that of a cell whose ranks are given."""
    wanted = slurm.tasks_per_node
    if wanted is None and slurm.gpus_per_node is not None:
        wanted = int(str(slurm.gpus_per_node).rpartition(":")[2])
    if wanted is None and processes is not None and processes % slurm.nodes == 0:
        wanted = processes // slurm.nodes
    wanted = 1 if wanted is None else wanted
    if processes not in (None, wanted * slurm.nodes):
        knob = f"--launch.processes {wanted * slurm.nodes}, or " if cell is None else ""
        raise ConfigError(
            f"{'launch.processes' if cell is None else f'the size of cell {cell}'} is {processes}, but slurm asks for "
            f"{slurm.nodes} nodes of {wanted} tasks; give {knob}another --slurm.nodes or --slurm.tasks_per_node"
        )
    return wanted


def shape_cell(slurm: SlurmConfig, sizes: Sequence[int], cell: int) -> tuple[SlurmConfig, int]:
    """Return the section for one cell's job, and its ranks on each node; ``slurm.nodes`` are those of the largest."""
    most, size = max(sizes), sizes[cell]
    tasks = tasks_of_node(slurm, most, cell=sizes.index(most))
    if size < tasks:
        return replace(slurm, nodes=1), size
    if size % tasks:
        raise ConfigError(
            f"cell {cell} has {size} ranks, which do not fill nodes of {tasks}, as the largest cell has them; give "
            "another --slurm.nodes or --slurm.tasks_per_node, or submit the cells by --cell with a shape of their own"
        )
    return replace(slurm, nodes=size // tasks), tasks


def tasks_of_sweep(array: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the values that each task of an array has for some dotted keys; the last key changes fastest."""
    flat: dict[str, list[Any]] = {}

    def flatten(values: Mapping[str, Any], above: str) -> None:
        for name, value in values.items():
            key = f"{above}{name}"
            if isinstance(value, Mapping):
                flatten(value, f"{key}.")
            elif isinstance(value, (list, tuple)) and value:
                flat[key] = list(value)
            else:
                raise ConfigError(f"slurm.array.{key} is {value!r}; give the list of its values, such as [0, 1, 2]")

    flatten(array, "")
    if not flat:
        return ()
    if (count := math.prod(map(len, flat.values()))) > MAX_JOBS:
        raise ConfigError(f"slurm.array has {count} tasks, one for each set of values; give at most {MAX_JOBS}")
    return tuple(dict(zip(flat, chosen, strict=True)) for chosen in itertools.product(*flat.values()))


def word_of(key: str, value: Any) -> str:
    """Return the word of a command line that sets a key."""
    # JSON is YAML, which is what such words hold. A text stands for itself.
    return f"--{key}={value if isinstance(value, str) else json.dumps(value)}"


def find_template(name: str | None = None, environ: Mapping[str, str] = ENVIRON) -> str:
    """Return the template of batch scripts: the named one, else that of ``XFFL_TEMPLATES``, the user or xffl."""
    folder = environ.get("XFFL_TEMPLATES")
    chosen = Path(name) if name else Path(folder) / TEMPLATE if folder else None
    if chosen is None:
        home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", ""), ".config")
        of_user = Path(home) / "xffl" / "templates" / TEMPLATE
        if not (os.path.isabs(home) and of_user.is_file()):
            return (files("xffl.cluster.slurm") / "templates" / TEMPLATE).read_text(encoding="utf-8")
        chosen = of_user
    try:
        return read_given(chosen).replace("\r\n", "\n")
    except (OSError, ValueError) as error:
        knob = "--template" if name else "XFFL_TEMPLATES" if folder else "the template"
        raise ConfigError(f"{knob}: {chosen} cannot be read ({error}); give a text file with @COMMAND@") from error


def render_script(slurm: SlurmConfig, job: Job, template: str) -> str:
    """Return the batch script of a job."""
    texts = {
        "COMMAND": shlex.join(job.command),
        "DIRECTIVES": "\n".join(f"#SBATCH {line}" for line in _directives(slurm, job)),
        "FOLDER": shlex.quote(job.folder),
        "MAX_RESTARTS": str(slurm.max_restarts if slurm.requeue else 0),
        "NAME": shlex.quote(job.name),
        "REQUEUES": _REQUEUES if job.cell is None else _REQUEUES_CELL,
        "SETUP": _setup(slurm.setup),
        "TASK": _task(job.tasks),
    }
    named = {"FOLDER": job.folder, "NAME": job.name}
    places = _PLACE.findall(template)
    if "COMMAND" not in places or "DIRECTIVES" not in places:
        raise ConfigError("the template of batch scripts lacks @COMMAND@ or @DIRECTIVES@; put both into it")
    if job.tasks and "TASK" not in places:
        raise ConfigError("the template of batch scripts lacks @TASK@, which tells an array's tasks apart; put it in")
    unknown = sorted(set(places) - texts.keys())
    if unknown:
        known = ", ".join(f"@{name}@" for name in texts)
        raise ConfigError(f"the template of batch scripts has @{unknown[0]}@, which nothing fills; there are {known}")

    def fill(place: re.Match[str]) -> str:
        line = template[template.rfind("\n", 0, place.start()) + 1 : place.start()]
        if line.startswith("#") and place[1] in named:  # sbatch reads it, or it must end with the line
            return _quoted_for_sbatch(f"@{place[1]}@", named[place[1]])
        return texts[place[1]]

    script = _PLACE.sub(fill, template)
    if odd := re.search("[\0\ud800-\udfff]", script):
        line = script.count("\n", 0, odd.start()) + 1
        raise ConfigError(
            f"line {line} of the batch script would have the character {odd[0]!r}, which SLURM does not take; leave it "
            "out of names, words and values"
        )
    return script


def _directives(slurm: SlurmConfig, job: Job) -> list[str]:
    """Return the options of sbatch, each as it stands behind #SBATCH."""
    array = None
    if job.tasks:
        array = f"0-{len(job.tasks) - 1}" + (f"%{slurm.array_limit}" if slurm.array_limit else "")

    def asked(*names: str) -> dict[str, Any]:
        return {name.replace("_", "-"): getattr(slurm, name) for name in names}

    options: dict[str, Any] = {
        "job-name": job.name,
        "output": job.log,
        "open-mode": "append",
        **asked("partition", "account", "qos", "constraint", "nodelist", "nodes"),
        "ntasks-per-node": job.tasks_per_node,
        **asked("cpus_per_task", "gpus_per_node"),
        "mem": slurm.memory,
        **asked("time", "switches", "dependency"),
        "array": array,
        # Without a "B:" before the name: to the ranks, and not to the script.
        "signal": None if slurm.signal_s is None else f"{slurm.signal}@{slurm.signal_s}",
    }
    lines = []
    for name, value in options.items():
        if value is not None:
            lines.append(f"--{name}={_quoted_for_sbatch(f'--{name}', str(value))}")
    lines.append("--requeue" if slurm.requeue else "--no-requeue")
    for line in slurm.extra:
        if not line.isprintable():
            raise ConfigError(f"slurm.extra has {line!r}; give each item one option, in printable characters")
    return [*lines, *slurm.extra]


def _quoted_for_sbatch(what: str, text: str) -> str:
    """Quote a value for a line that sbatch reads; raise where none of its quotes would keep the value what it is.

    To sbatch a backslash is an escape inside of single quotes, too, where it is none to a shell: a quote behind it
    would end the value, and what follows would be options of the job.
    """
    if text == "" or not text.isprintable() or "\\" in text:
        raise ConfigError(
            f"{what} of the batch script would be {text!r}; give printable characters in one line, without a "
            "backslash, which sbatch takes for an escape"
        )
    return shlex.quote(text)


_REQUEUES = '[ "$status" -eq 75 ]'
_REQUEUES_CELL = f'{_REQUEUES} || {{ [ "$SECONDS" -ge 600 ] && [[ ! $status =~ ^(0|124|130|143)$ ]]; }}'
"""What fails or is refused in the first ten minutes, after the restarts of ``xffl exec``, would probably do so again;
later it may be the node, or the other cells, for which it has waited in vain. 124 is a time limit, 130 and 143 are
signals."""


def _setup(setup: str | tuple[str, ...]) -> str:
    """Return the lines that make the environment."""
    if not isinstance(setup, str):
        return "\n".join(setup) or ": # slurm.setup"
    if not os.path.isfile(setup):
        raise ConfigError(f"slurm.setup is {setup!r}, and there is no such file; give a file, or a list of lines")
    return f"source {shlex.quote(os.path.abspath(setup))}"


def _task(tasks: Sequence[Sequence[str]]) -> str:
    """Return the lines that set what is this task's own."""
    if not tasks:
        return "# What stands behind this script's name goes to the command, too."
    lines = ["# What this task of the array has of its own.", "case $SLURM_ARRAY_TASK_ID in"]
    lines += [f"    {number}) set -- {shlex.join(words)} ;;" for number, words in enumerate(tasks)]
    lines += ['    *) echo "xffl: the array has no task $SLURM_ARRAY_TASK_ID" >&2; exit 2 ;;', "esac"]
    return "\n".join(lines)


def _seconds(limit: int | str | None) -> int | None:
    """Return a time limit in seconds, ``None`` where there is none."""
    if limit is None or str(limit).upper() in ("UNLIMITED", "INFINITE"):
        return None
    if (match := _TIME.fullmatch(str(limit))) is None:
        hint = "give minutes, hours like 12:30:00, or days like 2-00:00:00"
        raise ConfigError(f"slurm.time {shown(limit)} is no time; {hint}")
    days, *rest = match.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is not None:  # D-H, D-H:M, D-H:M:S
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:  # M, M:S
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


# SLURM's commands -----------------------------------------------------------------------------------------------------


_DEADLINE_S = 120.0


def submit_job(script: str, job: Job, *, is_chained: bool = False) -> str:
    """Hand a batch script to SLURM, and keep a copy of it beside the job's output."""
    import fcntl  # POSIX only

    folder = Path(job.run_folder) / "slurm"
    try:
        make_folders(folder)
        make_folders(Path(job.log).parent)
        jobs = create(folder / "jobs", "append")
    except OSError as error:
        hint = "give another experiment.output_dir"
        raise LaunchError(f"{folder} cannot be written: {error.strerror}; {hint}") from error
    with jobs:
        with suppress(OSError):  # not every shared file system locks; two submissions at one moment are rare
            fcntl.flock(jobs, fcntl.LOCK_EX)
        if not is_chained:
            refuse_busy(job)
        ran = run_slurm(["sbatch", "--parsable"], script)
        if ran.returncode != 0:
            lines = (line.removeprefix("sbatch: ").removeprefix("error: ") for line in ran.stderr.splitlines())
            raise LaunchError(f"sbatch refused the job: {'; '.join(lines)}; change the section slurm (--dry-run)")
        number = ran.stdout.strip().partition(";")[0]
        try:
            jobs.write(f"{number}\n".encode())
            write_whole(folder / f"{number}.sbatch", script)
        except OSError as error:
            raise LaunchError(
                f"job {number} is submitted, but {folder} cannot be written: {error.strerror}; squeue -j {number} "
                f"shows the job, scancel {number} ends it"
            ) from error
    return number


def earlier_jobs(run_folder: str) -> list[str]:
    """Return the numbers of the jobs that were submitted for a run's folder before."""
    path = Path(run_folder) / "slurm" / "jobs"
    hint = "remove the file if no job of this run is left"
    try:
        jobs = read_text(path, _MAX_BYTES).split()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise LaunchError(f"{path} cannot be read: {error}; {hint}") from error
    for job in jobs:
        if not _JOB.fullmatch(job):
            raise LaunchError(f"{path} holds {shown(job)}, which is no number of a job; {hint}")
    return jobs


def refuse_busy(job: Job) -> None:
    """Raise where an earlier job that has not ended writes to the folder of a job that has to have it for itself."""
    busy = find_busy(earlier_jobs(job.run_folder)) if job.is_exclusive else None
    if busy is not None:
        raise LaunchError(
            f"job {busy}, which has not ended, writes to {job.run_folder}; give another experiment.output_dir or "
            f"experiment.name, scancel {busy}, or --slurm.dependency afterany:{busy}"
        )


def find_busy(jobs: Sequence[str]) -> str | None:
    """Return the first of some jobs of this user that has not ended yet, if any."""
    if not jobs:
        return None
    ran = run_slurm(["squeue", "--me", "--noheader", "--format=%F"])
    if ran.returncode != 0:
        raise LaunchError(f"squeue failed: {' '.join(ran.stderr.split())}; try again when the controller answers")
    alive = set(ran.stdout.split())
    return next((job for job in jobs if job in alive), None)


def cancel_jobs(jobs: Sequence[str]) -> None:
    """Cancel jobs, with all tasks of an array."""
    ran = run_slurm(["scancel", *jobs])
    if ran.returncode != 0:
        message = " ".join(ran.stderr.split())
        raise LaunchError(f"scancel {' '.join(jobs)} failed: {message}; squeue --me shows what is left")


def run_slurm(command: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    """Run one of SLURM's commands."""
    environ = dict(os.environ)
    if "SLURM_JOB_ID" in environ:
        # A job that is submitted from inside another is not to inherit its tasks and places.
        kept = ("SLURM_CONF", "SLURM_CLUSTERS")
        environ = {name: value for name, value in environ.items() if not name.startswith("SLURM_") or name in kept}
    if shutil.which(command[0]) is None:
        hint = "submit from a login node of a SLURM cluster, or see --dry-run"
        raise LaunchError(f"{command[0]} is not there; HINT: {hint}")
    try:
        return subprocess.run(
            list(command), input=text, env=environ, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"{command[0]} did not answer in {_DEADLINE_S:.0f} s; see whether SLURM is up") from error
