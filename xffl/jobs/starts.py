"""Requests to start ranks, or the cells of an elastic run that start theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from xffl.cluster import environment
from xffl.cluster.launch.job_layout import JobLayout, lay_out
from xffl.cluster.sizes import Federation, check_cells
from xffl.cluster.slurm.allocation import Allocation, Host
from xffl.errors import ConfigError
from xffl.jobs.asked_cells import NO_CELLS, AskedCells
from xffl.jobs.options import JobOptions
from xffl.jobs.request import JobRequest, Limits, Output, Place, Role

__all__ = ["GRACE_S", "RESTARTS", "Job", "request_start"]

GRACE_S = 10.0
"""How long ranks may take to end, unless an option says otherwise"""
RESTARTS = 3
"""How often a cell of an elastic run is started again, unless an option says otherwise"""


class Job(Protocol):
    """What is the same about a script and a configuration."""

    @property
    def command(self) -> tuple[str, ...]:
        """What ranks run that are started here: the words behind python."""

    @property
    def source(self) -> str | None:
        """The script itself, where it was read here."""

    @property
    def variables(self) -> Mapping[str, str]:
        """What tells ranks of it."""

    @property
    def processes(self) -> int | None:
        """How many ranks are asked for."""

    @property
    def processes_by(self) -> str:
        """Who asks for them."""

    @property
    def federated(self) -> Federation | None:
        """The cells that are asked for, or a rule that finds them."""

    @property
    def timeout_s(self) -> float | None:
        """How long ranks may take, as a configuration says."""

    @property
    def home(self) -> str | None:
        """The folder of the run, where it is known."""

    @property
    def resumes(self) -> bool:
        """Whether the same job goes on from a checkpoint of its run."""

    @property
    def stale(self) -> str | None:
        """The folder of the measurement before, if it is one."""

    @property
    def default(self) -> int | None:
        """How many ranks there are on this machine, if nobody says it."""

    def of_cell(self, number: int, cells: int, processes: int | None) -> Job:
        """Return the job of one cell of an elastic run."""

    def lay_out(self, start: Allocation) -> tuple[JobLayout, Federation | None]:
        """Lay ranks over hosts; return the cells that were asked for, too."""

    def rank(self, started: int) -> tuple[Callable[[], object], Mapping[str, str]]:
        """Return what this process is to do, which is one of so many ranks, and the variables for that."""

    def done(self) -> str | None:
        """Tell what has been made of it before; ``None`` where it is to be made."""


def request_start(options: JobOptions, job: Job, cells: AskedCells, start: Allocation) -> JobRequest:
    """Return the request to start ranks, or the cells that start theirs."""
    grace_s = options.grace or GRACE_S
    limits = Limits(timeout_s=options.timeout, grace_s=grace_s)
    layout, federated = job.lay_out(start)
    number = None if cells.elastic is None else cells.elastic[0]
    request = JobRequest(
        role=Role.RANKS,
        command=job.command,
        source=job.source,
        place=Place(kind=start.kind, launcher=options.launcher, layout=replace(layout, cell=number)),
        limits=limits,
        output=Output(log_dir=options.log_dir, is_merged=options.merge, with_traceback=options.traceback),
        home=job.home,
        resumes=job.resumes and cells.lone is None and not cells.over_files,
        stale=job.stale,
        restarts=RESTARTS if options.restarts is None else int(options.restarts),
    )
    if cells.is_all:
        of_cells = _all_cells(request, job)
        check_cells(layout.topology.cells, cells.required, federated)
        return replace(request, role=Role.ALL_CELLS, variables=cells.variables, cells=of_cells)
    variables = {**environment.federation_variables(layout.sizes, layout.replica_size), **cells.variables}
    if layout.sizes is not None:  # else the script says what its cells are, and its session checks them
        topology = layout.topology
        environment.accept_cells(federated, topology.cells, topology.world_size, cells.required)
        variables["XFFL_LAUNCHED_CELLS"] = str(topology.cells)
    of_job = Limits(timeout_s=job.timeout_s, timeout_by="launch.timeout_s", grace_s=grace_s)
    request = replace(request, variables={**variables, **job.variables})
    if cells.is_kept and cells.elastic is not None:
        check_cells(cells.elastic[1], cells.required, None)
        alone = replace(request, limits=of_job, output=replace(request.output, log_dir=None))
        return replace(request, role=Role.ONE_CELL, variables=cells.variables, cells=(alone,))
    return replace(request, limits=of_job) if options.timeout is None else request


def _all_cells(request: JobRequest, job: Job) -> tuple[JobRequest, ...]:
    """Return the requests of all cells of an elastic run."""
    start, layout = request.started, request.started.layout
    if start.kind not in ("local", "slurm"):
        raise ConfigError(
            f"--elastic starts all cells on this machine or in a SLURM job, but this job has {len(layout.hosts)} hosts "
            "that are not SLURM's; start xffl lighthouse, and a job for each cell: xffl exec --elastic "
            "http://HOST:PORT --cell 0/2; or give --launcher local"
        )
    if layout.sizes is None:
        raise ConfigError(NO_CELLS)
    sizes, is_local = layout.topology.sizes, start.kind == "local"
    hosts = [(Host(layout.hosts[0].name, size),) for size in sizes] if is_local else _hosts_of_cells(layout)
    cells = []
    for number, size in enumerate(sizes):
        of_cell = job.of_cell(number, len(sizes), size)
        ranks = replace(lay_out(hosts[number], None, layout.replica_size), cell=number)
        alone = replace(
            request,
            command=of_cell.command,
            source=of_cell.source,
            variables={**environment.federation_variables(None, layout.replica_size), **of_cell.variables},
            place=replace(start, launcher="local" if is_local else "srun", layout=ranks),
            limits=replace(request.limits, timeout_s=of_cell.timeout_s, timeout_by="launch.timeout_s"),
            output=Output(with_traceback=request.output.with_traceback),
            home=of_cell.home,
        )
        cells.append(alone)
    return tuple(cells)


def _hosts_of_cells(layout: JobLayout) -> list[tuple[Host, ...]]:
    """Return the hosts of each cell, which are its own."""
    hosts, cells = list(layout.hosts), []
    for cell, size in enumerate(layout.topology.sizes):
        chosen: list[Host] = []
        while sum(host.slots for host in chosen) < size:
            chosen.append(hosts.pop(0))
        if sum(host.slots for host in chosen) != size:
            raise ConfigError(
                f"cells {cell} and {cell + 1} share host {chosen[-1].name}, but an elastic cell is a step with hosts "
                "of its own; give sizes that end with a host, or start a job for each cell: xffl exec --elastic URL "
                "--cell 0/2"
            )
        cells.append(tuple(chosen))
    return cells
