"""From options to a request: options, variables and the configuration are read here, once, and nowhere later."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial

from xffl.cluster.environment import ISOLATED_VARIABLE
from xffl.cluster.launch.runner import take_share
from xffl.cluster.launch.script import CONFIGURATIONS
from xffl.errors import ConfigError
from xffl.jobs.asked_cells import NO_CELLS, read_cells
from xffl.jobs.options import JobOptions
from xffl.jobs.place import find_start
from xffl.jobs.programs.configured import print_help, read_configured
from xffl.jobs.programs.script import read_script
from xffl.jobs.request import JobRequest, Limits, Output, Role
from xffl.jobs.started import count_started
from xffl.jobs.starts import Job, request_start

__all__ = ["MissingProcessesError", "resolve"]


class MissingProcessesError(Exception):
    """Nobody has said how many ranks are to start."""


def resolve(options: JobOptions, command: Sequence[str]) -> JobRequest:
    """Return what this process is to do, and how, for options and the words that stand behind them; local.

    From then on torch is imported if ``command`` is a configuration, and this process has its share of the node's
    cores if it is a rank.
    """
    _check(options, command)
    if options.launcher == "auto":
        take_share()  # a configuration's trainer imports torch
    os.environ.pop(ISOLATED_VARIABLE, None)  # of a job in whose cell this command starts another
    is_configuration = command[0].endswith(CONFIGURATIONS)
    flags = _read_flags(command[1:]) if is_configuration else set()
    if "help" in flags:
        usage = "xffl exec [options] {} [--KEY VALUE ...]"
        return JobRequest(role=Role.SHOWN, work=partial(print_help, command[0], command[1:], usage))
    is_shown = "print_config" in flags
    started = None if is_shown else count_started(options)
    cells = read_cells(options, options.over_files(), started)
    job: Job
    if is_configuration:
        job = configured = read_configured(options, command, cells)
        if is_shown:
            return JobRequest(role=Role.SHOWN, work=configured.show)
    else:
        job = read_script(options, command, cells, started)
    if started is not None:
        work, variables = job.rank(started)
        if options.merge:
            hint = "give --log-dir DIR and read it with xffl logs DIR --follow"
            raise ConfigError(
                f"--merge is for the command that starts the ranks, and a launcher has started them; {hint}"
            )
        return JobRequest(
            role=Role.RANK,
            variables={**cells.variables, **variables},
            limits=Limits(timeout_s=options.timeout),
            output=Output(log_dir=options.log_dir),
            work=work,
        )
    if (done := job.done()) is not None:
        return JobRequest(role=Role.SHOWN, work=partial(print, f"xffl: {done}", file=sys.stderr))
    if cells.is_all and job.federated is None:
        raise ConfigError(NO_CELLS)
    start = find_start(
        options,
        job.processes,
        job.federated,
        knob=job.processes_by,
        is_all=cells.is_all,
        default=job.default,
    )
    if start is None:
        raise MissingProcessesError
    return request_start(options, job, cells, start)


def _check(options: JobOptions, command: Sequence[str]) -> None:
    """Refuse numbers that cannot be, and a command without a script."""
    if not command:
        raise ConfigError(
            "no script is given; write xffl exec --processes N SCRIPT [arguments], or xffl exec config.yaml"
        )
    for name, seconds in (("timeout", options.timeout), ("grace", options.grace)):
        if seconds is not None and not seconds > 0:
            raise ConfigError(f"--{name} is {seconds}; give seconds above 0, or leave it out")


def _read_flags(words: Sequence[str]) -> set[str]:
    """Return what is asked for behind a configuration besides values."""
    from xffl.training.config.configuration import read_words

    return read_words(words).flags
