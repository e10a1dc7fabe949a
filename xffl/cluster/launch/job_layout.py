"""The layout of ranks over hosts, and checks of what was asked for. Nothing is started here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from xffl.cluster.batch import BATCH_SYSTEMS, BatchSystem
from xffl.cluster.cells import arrange
from xffl.cluster.recognition.launcher import Launcher
from xffl.cluster.sizes import Federation
from xffl.cluster.slurm.allocation import Allocation, Host
from xffl.compat.datasets import ENVIRON
from xffl.errors import ConfigError, LaunchError
from xffl.topology import Topology

__all__ = ["JobLayout", "LaunchOptions", "check_started", "fit_hosts", "lay_out"]

_SHOWN = 6
_SYSTEMS = {system.kind: system for system in BATCH_SYSTEMS}


@dataclass(frozen=True)
class JobLayout:
    """Hosts in the order of their ranks, and the cells that these form."""

    hosts: tuple[Host, ...]
    sizes: int | tuple[int, ...] | None  # ranks of each cell, or of all cells; None where the script is to say
    replica_size: int | None
    topology: Topology
    cell: int | None = None  # which cell all of them are, where each cell of an elastic run is a job of its own

    def cell_of(self, rank: int) -> int | None:
        """Return the cell of a rank, where the cells are known."""
        return self.cell if self.sizes is None else self.topology.cell_of(rank)


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How ranks are started and ended."""

    environ: Mapping[str, str]  # variables for the ranks
    timeout_s: float | None = None
    grace_s: float = 10.0  # for ranks to end by themselves, before they are killed
    log_dir: str | None = None
    is_labelled: bool = False  # whether cell and rank stand before each line that ranks print
    source: str | None = None  # the script itself, where it was read here; see script.read_source


def fit_hosts(
    allocation: Allocation, processes: int | None, *, knob: str = "--processes", environ: Mapping[str, str] = ENVIRON
) -> tuple[Host, ...]:
    """Return the hosts with as many slots as ranks are asked for, each with a GPU of its own where hosts have some."""
    hosts = _fitted(allocation, processes, knob, environ)
    crowded = next((host for host in hosts if host.gpus and host.slots > host.gpus), None)
    if crowded is not None and environ.get("CUDA_VISIBLE_DEVICES") != "":  # else the ranks are to use none
        asks = f"--gpus-per-node={crowded.slots} (or --gpus-per-task=1), or --ntasks-per-node={crowded.gpus}"
        if allocation.kind == "hosts":
            asks = "as many slots as gpus in --hosts"
        raise LaunchError(
            f"{crowded.slots} ranks on {crowded.name} would share {crowded.gpus} GPUs, but each needs one. HINT: give "
            f"{asks}; set CUDA_VISIBLE_DEVICES to nothing for ranks on CPUs"
        )
    return hosts


def lay_out(hosts: Sequence[Host], federated: Federation | None, replica_size: int | None) -> JobLayout:
    """Lay ranks over hosts, cell by cell where the cells are to be found."""
    if isinstance(federated, str):
        arranged = arrange(hosts, federated, replica_size)
        hosts, federated = arranged.hosts, arranged.sizes
    world_size = sum(host.slots for host in hosts)
    return JobLayout(tuple(hosts), federated, replica_size, Topology(world_size, federated, replica_size))


def check_started(launcher: Launcher, started: int, processes: int | None, knob: str = "--processes") -> None:
    """Compare what a launcher has started with what is asked for."""
    if processes is None:
        return
    remedy = f"leave {knob} out"
    if processes != started:
        remedy += (
            f". HINT: for {processes} ranks start it with {launcher.again.format(processes)}, or without a launcher "
            f"around it; with --launcher local it starts {processes} on this machine"
        )
    raise ConfigError(f"{knob} is {processes}, but {launcher.title} has started {started} processes already; {remedy}")


def _fitted(allocation: Allocation, processes: int | None, knob: str, environ: Mapping[str, str]) -> tuple[Host, ...]:
    hosts, slots = allocation.hosts, allocation.slots
    if processes is None or processes == slots:
        return hosts
    if processes < 1:
        Topology(processes)  # says so
    if (system := _SYSTEMS.get(allocation.kind)) is not None:
        return _spread(allocation, processes, knob, system)
    if allocation.kind != "slurm":
        hint = f"change the slots of --hosts, or leave {knob} out"
        raise ConfigError(f"{knob} is {processes}, but the hosts take {slots} ranks ({_shown(hosts)}). HINT: {hint}")
    if environ.get("SLURM_NTASKS") or environ.get("SLURM_NTASKS_PER_NODE"):
        raise LaunchError(
            f"{knob} is {processes}, but job {allocation.job} has {slots} tasks ({_shown(hosts)}). HINT: ask SLURM "
            f"for --ntasks={processes} (or --nodes and --ntasks-per-node), or leave {knob} out: each task is one rank"
        )
    # No tasks were asked for: SLURM's count is one for each node, or one for each of its CPUs.
    if processes < len(hosts):
        raise LaunchError(
            f"{knob} is {processes}, but job {allocation.job} has {len(hosts)} nodes, of which each takes a rank at "
            f"least. HINT: ask SLURM for --nodes={processes} or fewer"
        )
    return _divided(hosts, processes)


def _divided(hosts: Sequence[Host], processes: int) -> tuple[Host, ...]:
    """Return hosts with so many ranks in parts that are as even as they can be, the larger ones first."""
    each, more = divmod(processes, len(hosts))
    return tuple(replace(host, slots=each + (at < more)) for at, host in enumerate(hosts))


def _spread(allocation: Allocation, processes: int, knob: str, system: BatchSystem) -> tuple[Host, ...]:
    """Return the hosts of a job of PBS or LSF with fewer ranks than slots, which are often one for each core."""
    hosts, job = allocation.hosts, f"{system.name} job {allocation.job}"
    if processes > allocation.slots:
        raise LaunchError(
            f"{knob} is {processes}, but {job} has {allocation.slots} slots ({_shown(hosts)}). HINT: {system.ask}, or "
            f"leave {knob} out: each slot is one rank"
        )
    if processes < len(hosts):
        raise LaunchError(
            f"{knob} is {processes}, but {job} has {len(hosts)} hosts, of which each takes a rank at least. HINT: ask "
            f"{system.name} for {processes} hosts or fewer, or give --hosts"
        )
    spread = _divided(hosts, processes)
    for host, given in zip(spread, hosts, strict=True):
        if host.slots > given.slots:
            raise LaunchError(
                f"{knob} is {processes}: even parts are {host.slots} ranks on {host.name}, which has {given.slots} "
                f"slots of {job} ({_shown(hosts)}). HINT: {system.ask}, or give --hosts with the slots of each"
            )
    return spread


def _shown(hosts: Sequence[Host]) -> str:
    slots = ", ".join(f"{host.slots} on {host.name}" for host in hosts[:_SHOWN])
    return slots + (f" and {len(hosts) - _SHOWN} more hosts" if len(hosts) > _SHOWN else "")
