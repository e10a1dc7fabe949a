"""The job of a script, of a module, or of a text that was read here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xffl.cluster import environment
from xffl.cluster.launch.job_layout import JobLayout, lay_out
from xffl.cluster.launch.runner import run_script
from xffl.cluster.launch.script import check_command, is_module, is_stream, read_source
from xffl.cluster.over_files import OverFiles
from xffl.cluster.sizes import Federation
from xffl.cluster.slurm.allocation import Allocation
from xffl.errors import ConfigError, LaunchError
from xffl.jobs.asked_cells import AskedCells, describe_export
from xffl.jobs.options import JobOptions
from xffl.jobs.programs.isolated_rank import run_isolated
from xffl.topology import Topology

__all__ = ["ScriptJob", "hint_at_options", "read_script"]

_ISOLATED = Path(__file__).with_name("isolated_rank.py")  # what each process runs whose cell is a world of its own


@dataclass(frozen=True, kw_only=True)
class ScriptJob:
    """A script, and the cells that its ranks are to form."""

    words: tuple[str, ...]  # the script and its arguments
    source: str | None
    is_isolated: bool
    over_files: OverFiles
    processes: int | None
    federated: Federation | None
    replica_size: int | None
    sources: tuple[str, ...]  # who has said so, where it was the environment

    processes_by = "--processes"
    timeout_s: float | None = None  # of the configuration, which a script has not
    home: str | None = None  # nobody knows where it saves
    resumes = False
    stale: str | None = None  # it measures nothing
    default: int | None = None  # somebody has to say how many ranks there are

    @property
    def command(self) -> tuple[str, ...]:
        """What ranks run that are started here."""
        return (str(_ISOLATED), *self.words) if self.is_isolated else self.words

    @property
    def variables(self) -> Mapping[str, str]:
        """What tells ranks of it."""
        return self.over_files.variables()

    def of_cell(self, number: int, cells: int, processes: int | None) -> ScriptJob:
        """Return the job of one cell of an elastic run: the same script."""
        return self

    def lay_out(self, start: Allocation) -> tuple[JobLayout, Federation | None]:
        """Lay ranks over hosts; return the cells that were asked for, too."""
        with environment.sources_named(self.sources):
            layout = lay_out(start.hosts, self.federated, self.replica_size)
        if self.is_isolated and layout.sizes is None:
            raise ConfigError("--isolate makes cells worlds of their own; give --federated, such as 2,2")
        return layout, self.federated

    def rank(self, started: int) -> tuple[Callable[[], object], Mapping[str, str]]:
        """Return what this process is to do, which is one of so many ranks, and the variables for that."""
        if not isinstance(self.federated, str):
            with environment.sources_named(self.sources):
                Topology(started, self.federated, self.replica_size)
        asked = environment.federation_variables(self.federated, self.replica_size)
        work = (lambda: run_isolated(self.words)) if self.is_isolated else (lambda: run_script(self.words, self.source))
        return work, {**self.variables, **asked}

    def done(self) -> str | None:
        """Tell where the job of one cell has been made before; ``None`` where it is to be made."""
        asked = self.over_files
        if asked.cell is None or asked.export is None or not os.path.isdir(asked.export):
            return None
        from xffl.aggregation.exports import read_global

        before, start = (0, None) if asked.start is None else read_global(asked.start)
        return describe_export(asked.export, cell=asked.cell, number=before + 1, start=start, plan=None)


def read_script(options: JobOptions, command: Sequence[str], cells: AskedCells, started: int | None) -> ScriptJob:
    """Read the job of a script; ``started`` is how many processes a launcher has started, if any."""
    if cells.over_files.measure is not None:
        raise ConfigError("--measure is for a configuration, whose trainer knows how to measure; leave it out")
    source = _look_at_script(command, started, has_hosts=options.hosts is not None)
    if started is None:
        hint_at_options(command)
    if options.isolate and source is not None:
        raise ConfigError(
            f"--isolate runs a script by its path or as a module, but {command[0]!r} is read once; write it to a file"
        )
    federated, replica_size, sources = environment.complete_federation(cells.sizes, cells.replica_size)
    return ScriptJob(
        words=tuple(command),
        source=source,
        is_isolated=options.isolate,
        over_files=cells.over_files,
        processes=options.processes,
        federated=federated,
        replica_size=replica_size,
        sources=sources,
    )


def _look_at_script(command: Sequence[str], started: int | None, *, has_hosts: bool) -> str | None:
    """Read the script here where ranks could not read it, else see that there is one."""
    if is_stream(command[0]):
        if started is not None and started > 1:
            raise LaunchError(
                f"script {command[0]!r} can be read once, but a launcher has started {started} processes; write it to "
                "a file, and give the path of that, or leave the launcher out: xffl exec --processes N starts ranks "
                "itself and hands them the text"
            )
        return read_source(command[0])
    if not has_hosts:  # hosts that ssh reaches look for it themselves
        check_command(command)
    return None


def hint_at_options(command: Sequence[str]) -> None:
    """Say which words behind the script look like options of this command; the script may have some of these names."""
    behind = command[2 if is_module(command) else 1 :]
    behind = behind[: behind.index("--")] if "--" in behind else behind
    mine = [word for word in behind if word.partition("=")[0] in JobOptions.names()]
    if mine:
        names = ", ".join(dict.fromkeys(word.partition("=")[0] for word in mine))
        who = "-m " + command[1] if is_module(command) else command[0]
        print(
            f"xffl: {names} after {who} goes to the script; an option of xffl exec stands before it: "
            f"xffl exec {mine[0]} ... {who}",
            file=sys.stderr,
        )
