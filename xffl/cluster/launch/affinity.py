"""Cores and threads of a rank, so that the ranks of a node do not crowd each other."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from xffl.cluster.host_lists import expand_counts
from xffl.cluster.recognition.find import find_launcher
from xffl.compat.datasets import ENVIRON
from xffl.errors import ConfigError

__all__ = ["Share", "bind_if_asked", "limit_threads", "share_machine", "take_turns_if_crowded", "visible_gpus"]

_CPUS = Path("/sys/devices/system/cpu")
_OFF = ("", "0", "no", "off", "none")
_ON = ("1", "yes", "on", "cores")
_SCHEDULERS = ("", "batch", "other")


class Binding(NamedTuple):
    """The part of a node that a rank has."""

    cpus: tuple[int, ...]  # as Linux counts them: hardware threads
    threads: int  # for computing: one for each core, since two on one core share its arithmetic units


def allowed_cpus() -> tuple[int, ...]:
    """Return the CPUs that this process may run on, as SLURM, a container or ``taskset`` left them."""
    return tuple(sorted(os.sched_getaffinity(0)))


def find_cores(cpus: Sequence[int], folder: Path = _CPUS) -> tuple[tuple[int, ...], ...]:
    """Sort CPUs into cores: hardware threads of one core belong together, cores of one socket stand side by side."""
    cores: dict[tuple[int, int], list[int]] = {}
    for cpu in sorted(cpus):
        topology = folder / f"cpu{cpu}" / "topology"
        try:
            key = (int((topology / "physical_package_id").read_text()), int((topology / "core_id").read_text()))
        except (OSError, ValueError):
            key = (0, cpu)
        cores.setdefault(key, []).append(cpu)
    return tuple(tuple(cores[key]) for key in sorted(cores))


def share_cores(cores: Sequence[tuple[int, ...]], local_rank: int, local_size: int) -> Binding:
    """Return this rank's contiguous part of a node's cores; where there are fewer cores than ranks, ranks share one."""
    if not 0 <= local_rank < local_size:
        raise ConfigError(f"local rank {local_rank} is not among {local_size} ranks of the node; give 0 to size - 1")
    if len(cores) < local_size:
        return Binding(cores[local_rank * len(cores) // local_size], 1)
    first, last = (part * len(cores) // local_size for part in (local_rank, local_rank + 1))
    return Binding(tuple(sorted(cpu for core in cores[first:last] for cpu in core)), last - first)


def is_bound(environ: Mapping[str, str] = ENVIRON) -> bool:
    """Tell whether a launcher has given this process cores of its own already; they must not be divided again.

    ``srun --cpu-bind`` and Open MPI's ``mpirun`` say so to what they start themselves; processes further down inherit
    what they said. Of others the process that started this one is looked at, which has more CPUs then.
    """
    row = find_launcher(environ)
    launcher = None if row is None else row.name
    if launcher == "openmpi" and environ.get("OMPI_MCA_orte_bound_at_launch") == "1":
        return True
    if launcher == "slurm" and environ.get("SLURM_CPU_BIND_TYPE", "none").partition(":")[0] not in ("", "none"):
        return True
    try:
        return set(os.sched_getaffinity(0)) < set(os.sched_getaffinity(os.getppid()))
    except OSError:
        return False


def limit_threads(environ: MutableMapping[str, str] = ENVIRON) -> None:
    """Set one thread for each rank (torch takes all) unless ``OMP_NUM_THREADS`` or ``XFFL_BIND`` say otherwise."""
    if not is_wanted(environ):
        environ.setdefault("OMP_NUM_THREADS", "1")


def is_wanted(environ: Mapping[str, str] = ENVIRON) -> bool:
    """Tell whether ``XFFL_BIND`` asks for cores of each rank's own."""
    asked = environ.get("XFFL_BIND", "").strip().lower()
    if asked not in (*_ON, *_OFF):
        raise ConfigError(f"XFFL_BIND is {environ['XFFL_BIND']!r}; give cores, or none to leave the choice to Linux")
    return asked in _ON


def bind_if_asked(environ: MutableMapping[str, str] = ENVIRON) -> None:
    """Give this process its part of the node's cores where ``XFFL_BIND`` asks for it; call it before torch is imported.

    The process and what it starts later run on those CPUs only. ``OMP_NUM_THREADS`` is set to their cores unless it is
    set already. Cores that a launcher has given are kept as they are, and without a launcher nothing is done. Local.
    """
    if not is_wanted(environ):
        return
    place = _place(environ)
    if place is None:
        _refuse_unknown_size(environ)
        return
    is_kept = is_bound(environ)
    cpus, threads = share_cores(find_cores(allowed_cpus()), *((0, 1) if is_kept else place))
    if not is_kept:
        os.sched_setaffinity(0, cpus)
    environ.setdefault("OMP_NUM_THREADS", str(threads))


@dataclass(frozen=True)
class Share:
    """What one of several jobs has of this machine."""

    environ: Mapping[str, str]  # variables that tell it to the job's ranks
    cpus: tuple[int, ...]


def share_machine(sizes: Sequence[int], environ: Mapping[str, str] = ENVIRON) -> list[Share]:
    """Divide this machine among jobs of so many ranks, each of which takes its ranks for all that are here.

    GPUs are divided where each rank can have one, cores where ``XFFL_BIND`` asks for it; with more ranks than CPUs all
    take turns, as those of one job do.
    """
    cores, world_size = find_cores(allowed_cpus()), sum(sizes)
    gpus = visible_gpus(environ)
    is_crowded = world_size > len(allowed_cpus()) and hasattr(os, "SCHED_BATCH")
    shares, first = [], 0
    for size in sizes:
        cpus_of, last = {}, first + size
        if len(gpus) >= world_size:
            cpus_of["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:last])
        if is_crowded and not environ.get("XFFL_SCHED"):
            cpus_of["XFFL_SCHED"] = "batch"
        mine = cores[first * len(cores) // world_size : last * len(cores) // world_size]
        if not is_wanted(environ) or not mine:
            mine = cores
        shares.append(Share(cpus_of, tuple(sorted(cpu for core in mine for cpu in core))))
        first = last
    return shares


def visible_gpus(environ: Mapping[str, str] = ENVIRON) -> list[str]:
    """Return the names of the GPUs that processes of this one may use, as ``CUDA_VISIBLE_DEVICES`` lists them."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]
    return [name for name in visible.split(",") if name.strip()]


def take_turns_if_crowded(environ: Mapping[str, str] = ENVIRON) -> bool:
    """Have the threads of this rank wait for their turn where its node has more ranks than CPUs; local.

    By default Linux lets a thread that is woken up go before the one that has woken it. Where ranks share a CPU that
    sets each sender aside as soon as the receiver hears of it, while it holds a lock that gloo's own thread spins for.
    With ``SCHED_BATCH`` it goes on to the end of its turn: steps of FSDP by 4 and 8 ranks on 2 cores took two thirds of
    the time. ``XFFL_SCHED`` says otherwise: ``batch`` or ``other``, Linux's default. Return whether this process, and
    what it starts later, waits so from now on.
    """
    asked = environ.get("XFFL_SCHED", "").strip().lower()
    if asked not in _SCHEDULERS:
        raise ConfigError(f"XFFL_SCHED is {environ['XFFL_SCHED']!r}; give batch or other")
    if not hasattr(os, "SCHED_BATCH"):  # Linux alone has it
        return False
    place = _place(environ)
    is_crowded = place is not None and not is_bound(environ) and place[1] > len(allowed_cpus())
    if asked == "batch" or (is_crowded and not asked and os.sched_getscheduler(0) == os.SCHED_OTHER):
        try:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        except OSError as refused:
            if asked:
                raise ConfigError(f"XFFL_SCHED=batch is not allowed here: {refused}; leave it out") from refused
    elif asked == "other" and os.sched_getscheduler(0) == os.SCHED_BATCH:  # of a rank above
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return os.sched_getscheduler(0) == os.SCHED_BATCH


def _place(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the rank of this process on its node and the processes there; ``None`` where no launcher tells."""
    row = find_launcher(environ)
    if row is None:
        return None
    fields = row.read(environ)
    if "node_local_size" not in fields and row.name == "slurm":
        counts = expand_counts(environ["SLURM_STEP_TASKS_PER_NODE"])
        if not 0 <= fields["node_rank"] < len(counts):
            return None  # what is wrong is reported when the ranks meet
        fields["node_local_size"] = counts[fields["node_rank"]]
    if "node_local_size" not in fields and 1 in (fields["world_size"], fields.get("node_world_size")):
        fields["node_local_size"] = fields["world_size"]
    size = fields.get("node_local_size")
    return None if size is None else (fields["node_local_rank"], size)


def _refuse_unknown_size(environ: Mapping[str, str]) -> None:
    """Raise where cores are to be divided among the ranks of a node, but nobody tells how many there are."""
    row = find_launcher(environ)
    if row is not None and row.name != "slurm":
        raise ConfigError(
            f"XFFL_BIND={environ['XFFL_BIND']} divides the cores of a node among its ranks, but {row.title} does not "
            "tell how many they are; set LOCAL_WORLD_SIZE, or leave XFFL_BIND out"
        )
