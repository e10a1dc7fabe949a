"""Hosts and slots of a job, as its batch system tells them: SLURM, PBS, LSF or Flux. No rank is started here."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from xffl.checks import shown
from xffl.cluster.host_lists import MAX_HOSTS, expand_hosts
from xffl.cluster.hosts import resolve
from xffl.cluster.recognition.find import find_launcher
from xffl.cluster.recognition.launcher import read_number
from xffl.cluster.slurm.allocation import Allocation, Host, find_allocation
from xffl.compat.datasets import ENVIRON
from xffl.errors import LaunchError
from xffl.files import read_text

__all__ = ["BATCH_SYSTEMS", "BatchSystem", "find_job", "is_here"]

_FILE_BYTES = 2**24
_FLUX_S = 60
_MOST_SLOTS = 2**20
_NAME = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9_.:-]{0,254}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class BatchSystem:
    """A batch system besides SLURM: how one of its jobs is recognized, and what tells the hosts."""

    kind: str  # of its allocations
    name: str
    job: str  # variable of the job's number
    signs: tuple[str, ...]  # variables of which its jobs have at least one
    read_hosts: Callable[[Mapping[str, str]], tuple[Host, ...]]
    ask: str  # how to ask it for so many ranks on so many hosts
    is_outer: bool = True  # whether it gives hosts to others, which may stand in its jobs

    def find_sign(self, environ: Mapping[str, str]) -> str | None:
        """Return a variable by which a process is in a job of this batch system; ``None`` without any."""
        return next((name for name in self.signs if environ.get(name)), None)


@dataclass(frozen=True, kw_only=True)
class HostVariables:
    """The variables of a batch system that tell hosts, each as often as it has slots; the most reliable one first."""

    file: str  # names the file with a line for each slot
    counts: str | None = None  # has pairs of host and slots
    names: str | None = None  # has a name for each slot

    @property
    def all(self) -> tuple[str, ...]:
        """The variables that there are."""
        return tuple(name for name in (self.file, self.counts, self.names) if name is not None)

    def read_hosts(self, environ: Mapping[str, str]) -> tuple[Host, ...]:
        """Return hosts as the most reliable variable tells them; the others must name the same."""
        counts = {name: self._read_slots(name, environ[name]) for name in self.all if environ.get(name)}
        (source, slots), *others = counts.items()
        for name, other in others:
            if other.keys() != slots.keys():
                raise LaunchError(
                    f"{source} has the hosts {_few(slots)}, but {name} has {_few(other)}; these variables are the "
                    "job's: unset what is left of another job, or give --hosts"
                )
        return tuple(Host(name, count) for name, count in slots.items())

    def _read_slots(self, name: str, text: str) -> Counter[str]:
        """Read the hosts and slots that a variable tells, in the order in which hosts come first."""
        where = f"{name}={shown(text)}"
        hint = "start from the job's script on its first host, or give --hosts, or --launcher local for this host alone"
        if name != self.file:
            words = text.split()
            if name == self.counts:
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


_PBS = HostVariables(file="PBS_NODEFILE")
_LSF = HostVariables(file="LSB_DJOB_HOSTFILE", counts="LSB_MCPU_HOSTS", names="LSB_HOSTS")


def _ask_flux(environ: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the hosts of the Flux instance in whose script this process stands, each with a slot for each GPU or core.

    The instance is the one at ``FLUX_URI``; two commands ask it.
    """
    flux = shutil.which("flux", path=environ.get("PATH"))
    hint = "start from the script of flux batch or flux alloc, or give --hosts, or --launcher local for this host alone"
    if flux is None:
        raise LaunchError(f"this is inside a Flux instance (FLUX_URI), but there is no flux in PATH. HINT: {hint}")

    def ask(*words: str) -> str:
        command = [flux, *words]
        try:
            ran = subprocess.run(
                command,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_FLUX_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LaunchError(f"{' '.join(command)}: {error}. HINT: {hint}") from error
        if ran.returncode:
            said = ran.stderr.strip() or f"exit code {ran.returncode}"
            raise LaunchError(f"{' '.join(command)} failed: {shown(said)}. HINT: {hint}")
        return ran.stdout

    names = expand_hosts(ask("hostlist", "instance").strip())
    listing = ask("resource", "list", "--states=up", "--no-header", "--format={nnodes} {ncores} {ngpus}")
    rows = [
        [read_number("what flux resource list says", word) for word in line.split()] for line in listing.splitlines()
    ]
    nodes, cores, gpus = (sum(column) for column in zip(*rows, strict=True)) if rows else (0, 0, 0)
    if nodes != len(set(names)):
        raise LaunchError(
            f"flux hostlist names {len(set(names))} hosts, but flux resource list has {nodes} that are up. HINT: {hint}"
        )
    kind, count = ("GPUs", gpus) if gpus else ("cores", cores)
    slots, left = divmod(count, max(nodes, 1))
    if left:
        raise LaunchError(
            f"the {nodes} hosts of the Flux instance have unequal numbers of {kind}, {count} in all. HINT: give "
            "--hosts with the slots of each"
        )
    where = "flux hostlist"
    return tuple(Host(name, slots, gpus=gpus // nodes or None) for name in _count(((name, 1) for name in names), where))


BATCH_SYSTEMS: tuple[BatchSystem, ...] = (
    BatchSystem(
        kind="pbs",
        name="PBS",
        job="PBS_JOBID",
        signs=_PBS.all,
        read_hosts=_PBS.read_hosts,
        ask="ask PBS for slots with mpiprocs (-l select=2:ncpus=8:mpiprocs=4), or ppn (-l nodes=2:ppn=4)",
    ),
    BatchSystem(
        kind="lsf",
        name="LSF",
        job="LSB_JOBID",
        signs=_LSF.all,
        read_hosts=_LSF.read_hosts,
        ask='ask LSF for slots with bsub -n 8 -R "span[ptile=4]"',
    ),
    BatchSystem(
        kind="flux",
        name="Flux",
        job="FLUX_ENCLOSING_ID",
        signs=("FLUX_URI",),
        read_hosts=_ask_flux,
        ask="ask Flux for nodes with as many cores or GPUs each (flux batch --nodes=2 --exclusive)",
        is_outer=False,
    ),
)
"""The batch systems besides SLURM, whose jobs say far more."""


def find_job(
    environ: Mapping[str, str] = ENVIRON, *, wants_switches: bool = False, needs_switches: bool = False
) -> Allocation | None:
    """Find the job in whose script this process stands, and is no rank of a launcher yet; ``None`` where it is in none.

    For what is asked about switches, see :func:`xffl.cluster.slurm.allocation.find_allocation`.
    """
    allocation = find_allocation(environ, wants_switches=wants_switches, needs_switches=needs_switches)
    if allocation is not None or find_launcher(environ) is not None:
        return allocation
    systems = {system: sign for system in BATCH_SYSTEMS if (sign := system.find_sign(environ)) is not None}
    if len(systems) > 1:  # the hosts of an instance of Flux in a job are the job's
        systems = {system: sign for system, sign in systems.items() if system.is_outer}
    if not systems:
        return None
    if len(systems) > 1:
        names = " and ".join(systems.values())
        raise LaunchError(
            f"{names} are both set, but a job is of one batch system; unset what is left of another job, or give "
            "--hosts"
        )
    (system,) = systems
    return Allocation(system.kind, system.read_hosts(environ), environ.get(system.job) or "of no number")


def is_here(host: Host) -> bool:
    """Tell whether a host is the one that this process runs on; local."""
    here, name = socket.gethostname(), host.address or host.name
    if name.partition(".")[0] in (here.partition(".")[0], "localhost"):
        return True
    addresses = {*resolve(name)}
    return bool(addresses & {*resolve(here)}) or any(address.startswith("127.") for address in addresses)


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
