"""Hosts and slots of a job, as its batch system tells them: SLURM, PBS or LSF. Nothing is started here."""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from xffl.checks import shown
from xffl.cluster.host_lists import MAX_HOSTS
from xffl.cluster.hosts import resolve
from xffl.cluster.recognition.find import find_launcher
from xffl.cluster.recognition.launcher import read_number
from xffl.cluster.slurm.allocation import Allocation, Host, find_allocation
from xffl.errors import LaunchError
from xffl.files import read_text

__all__ = ["BATCH_SYSTEMS", "BatchSystem", "find_job", "is_here"]

_FILE_BYTES = 2**24
_MOST_SLOTS = 2**20
_NAME = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9_.:-]{0,254}", re.ASCII)


@dataclass(frozen=True)
class BatchSystem:
    """A batch system that gives the script of a job its hosts, each as often as it has slots."""

    kind: str  # of its allocations
    name: str
    job: str  # variable of the job's number
    file: str  # variable that names the file with a line for each slot
    counts: str | None  # variable that has pairs of host and slots
    names: str | None  # variable that has a name for each slot
    ask: str  # how to ask it for so many ranks on so many hosts

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables that tell hosts, the most reliable one first."""
        return tuple(name for name in (self.file, self.counts, self.names) if name is not None)


BATCH_SYSTEMS: tuple[BatchSystem, ...] = (
    BatchSystem(
        kind="pbs",
        name="PBS",
        job="PBS_JOBID",
        file="PBS_NODEFILE",
        counts=None,
        names=None,
        ask="ask PBS for slots with mpiprocs (-l select=2:ncpus=8:mpiprocs=4), or ppn (-l nodes=2:ppn=4)",
    ),
    BatchSystem(
        kind="lsf",
        name="LSF",
        job="LSB_JOBID",
        file="LSB_DJOB_HOSTFILE",
        counts="LSB_MCPU_HOSTS",
        names="LSB_HOSTS",
        ask='ask LSF for slots with bsub -n 8 -R "span[ptile=4]"',
    ),
)
"""The batch systems besides SLURM, whose jobs say far more."""


def find_job(
    environ: Mapping[str, str] = os.environ, *, wants_switches: bool = False, needs_switches: bool = False
) -> Allocation | None:
    """Find the job in whose script this process stands, and is no rank of a launcher yet; ``None`` where it is in none.

    For what is asked about switches, see :func:`xffl.cluster.slurm.allocation.find_allocation`.
    """
    found = find_allocation(environ, wants_switches=wants_switches, needs_switches=needs_switches)
    if found is not None or find_launcher(environ) is not None:
        return found
    systems = [system for system in BATCH_SYSTEMS if any(environ.get(name) for name in system.variables)]
    if not systems:
        return None
    if len(systems) > 1:
        told = " and ".join(next(name for name in system.variables if environ.get(name)) for system in systems)
        raise LaunchError(
            f"{told} are both set, but a job is of one batch system; unset what is left of another job, or give --hosts"
        )
    (system,) = systems
    hosts = _read_hosts(system, environ)
    return Allocation(system.kind, hosts, environ.get(system.job) or "of no number")


def is_here(host: Host) -> bool:
    """Tell whether a host is the one that this process runs on; local."""
    own, name = socket.gethostname(), host.address or host.name
    if name.partition(".")[0] in (own.partition(".")[0], "localhost"):
        return True
    addresses = {*resolve(name)}
    return bool(addresses & {*resolve(own)}) or any(address.startswith("127.") for address in addresses)


def _read_hosts(system: BatchSystem, environ: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the hosts of a job, as the most reliable of its variables tells them; the others must name the same."""
    told = {name: _read_slots(system, name, environ[name]) for name in system.variables if environ.get(name)}
    (source, slots), *others = told.items()
    for name, other in others:
        if other.keys() != slots.keys():
            raise LaunchError(
                f"{source} has the hosts {_few(slots)}, but {name} has {_few(other)}; these variables are the job's: "
                "unset what is left of another job, or give --hosts"
            )
    return tuple(Host(name, count) for name, count in slots.items())


def _read_slots(system: BatchSystem, name: str, text: str) -> Counter[str]:
    """Read the hosts and slots that a variable tells, in the order in which hosts come first."""
    where = f"{name}={shown(text)}"
    hint = "start from the job's script on its first host, or give --hosts, or --launcher local for this host alone"
    if name != system.file:
        words = text.split()
        if name == system.counts:
            return _count(_pairs(words, where), where)
        return _count(((word, 1) for word in words), where)
    try:
        lines = read_text(Path(text), _FILE_BYTES).splitlines()
    except (OSError, ValueError) as error:
        raise LaunchError(f"{where} cannot be read ({error}). HINT: {hint}") from error
    for number, line in enumerate(lines, 1):
        if len(line.split()) > 1:
            raise LaunchError(
                f"line {number} of {where} is {shown(line)}; each line is the name of a host, as often as it has "
                f"slots. HINT: {hint}"
            )
    return _count(((line.strip(), 1) for line in lines if line.strip()), where)


def _pairs(words: list[str], where: str) -> Iterable[tuple[str, int]]:
    if len(words) % 2:
        raise LaunchError(f"{where} has {len(words)} words; it must be pairs of a host and its slots, such as a 4 b 4")
    return [(name, read_number(f"the slots of {shown(name)} in {where}", count)) for name, count in _by_two(words)]


def _by_two(words: list[str]) -> Iterable[tuple[str, str]]:
    return zip(words[::2], words[1::2], strict=True)


def _count(entries: Iterable[tuple[str, int]], where: str) -> Counter[str]:
    slots: Counter[str] = Counter()
    for name, count in entries:
        # A name that starts with "-" would be an option of ssh.
        if _NAME.fullmatch(name) is None:
            raise LaunchError(f"{where} has the host {shown(name)}; names have letters, digits and . - _ only")
        if not 1 <= count <= _MOST_SLOTS:
            raise LaunchError(f"{where} gives {shown(name)} {count} slots; give 1 to {_MOST_SLOTS}")
        slots[name] += count
    if len(slots) > MAX_HOSTS:
        raise LaunchError(f"{where} names {len(slots)} hosts; give at most {MAX_HOSTS}")
    if not slots:
        raise LaunchError(f"{where} names no host; give --hosts, or --launcher local for this host alone")
    return slots


def _few(slots: Mapping[str, int]) -> str:
    names = list(slots)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
