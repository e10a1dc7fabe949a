"""Hosts that a job may use: of a SLURM allocation, or of a list. Nothing is started here."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from xffl.checks import decimal, shorten, shown
from xffl.cluster.host_lists import MAX_HOSTS, expand_counts, expand_hosts
from xffl.cluster.recognition.find import find_launcher
from xffl.cluster.recognition.launcher import read_number
from xffl.compat.datasets import ENVIRON
from xffl.errors import ConfigError, LaunchError
from xffl.files import read_given

__all__ = ["Allocation", "Host", "ask_switches", "find_allocation", "own_host", "parse_hosts"]

_SCONTROL_S = 60
_MAX_LEVELS = 64
_MAX_LISTED = 10 * MAX_HOSTS
"""Nodes at the switches of all lines together; a node may hang on several"""
_PAIR = re.compile(r"(?<!\w)(\w+)=(\S+)")
_COUNT_DIGITS = 6
_NAME = re.compile(r"(?:[A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_:][A-Za-z0-9_.:-]*", re.ASCII)


@dataclass(frozen=True)
class Host:
    """One host of an allocation."""

    name: str
    slots: int = 1  # ranks that it takes
    address: str | None = None  # where to reach it, if not by its name
    switches: tuple[str, ...] = ()  # from the top of the network to the host's own; empty where nothing is known
    gpus: int | None = None  # GPUs that the job may use there; None if unknown


@dataclass(frozen=True)
class Allocation:
    """Hosts in the order in which the ranks are to be laid over them."""

    kind: str  # "slurm", "hosts" (of a list), or "local"
    hosts: tuple[Host, ...]
    job: str | None = None

    @property
    def slots(self) -> int:
        """Ranks that all hosts together take."""
        return sum(host.slots for host in self.hosts)


def find_allocation(
    environ: Mapping[str, str] = ENVIRON, *, wants_switches: bool = False, needs_switches: bool = False
) -> Allocation | None:
    """Find the SLURM job in whose batch script or ``salloc`` this process stands, and is no rank of a launcher yet.

    ``scontrol`` is asked once for the network where the switches are wanted or needed.
    """
    job = environ.get("SLURM_JOB_ID")
    if not job or find_launcher(environ) is not None:
        return None
    if read_number("SLURM_HET_SIZE", environ.get("SLURM_HET_SIZE") or "1") > 1:
        raise LaunchError(
            f"job {job} is heterogeneous: it has {environ['SLURM_HET_SIZE']} components, whose hosts cannot be put in "
            "one order. HINT: ask for all nodes in one component, which may take different numbers of tasks, or start "
            "the ranks with srun --het-group=0-1 yourself"
        )
    listed = next((name for name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST") if environ.get(name)), None)
    if listed is None:
        hint = "start from the batch script or the shell of salloc, or unset SLURM_JOB_ID"
        raise LaunchError(f"SLURM_JOB_ID={job} tells of a job, but SLURM_JOB_NODELIST is not set. HINT: {hint}")
    names = expand_hosts(environ[listed])
    tasks = _tasks(environ, len(names), listed)
    is_asked = bool(environ.get("SLURM_NTASKS") or environ.get("SLURM_NTASKS_PER_NODE"))
    gpus = _gpus(environ, tasks, is_asked=is_asked)
    # The tasks that were asked for, else one for each GPU, else SLURM's own count.
    slots = tasks if is_asked else tuple(of_node or count for of_node, count in zip(gpus, tasks, strict=True))
    hosts = tuple(Host(name, count, gpus=of_node) for name, count, of_node in zip(names, slots, gpus, strict=True))
    if wants_switches or needs_switches:
        try:
            hosts = ask_switches(hosts, environ)
        except LaunchError:
            if needs_switches:
                raise
    return Allocation("slurm", hosts, job)


def _tasks(environ: Mapping[str, str], nodes: int, listed: str) -> tuple[int, ...]:
    """Return the tasks of each node, by SLURM's count; ``listed`` is the variable that names the nodes."""
    source = "SLURM_TASKS_PER_NODE"
    counts = expand_counts(environ.get(source) or f"1(x{nodes})")
    if source not in environ and environ.get("SLURM_NTASKS_PER_NODE"):
        source = "SLURM_NTASKS_PER_NODE"
        counts = (read_number(source, environ[source]),) * nodes
    if len(counts) != nodes:
        raise LaunchError(
            f"{source}={environ[source]} tells of {len(counts)} nodes, but {listed}={environ[listed]} of {nodes}. "
            "HINT: these variables are the job's; do not set one of them by hand"
        )
    asked = environ.get("SLURM_NTASKS")
    if asked and read_number("SLURM_NTASKS", asked) != sum(counts):
        raise LaunchError(
            f"SLURM_NTASKS={asked}, but {source}={environ.get(source, 'unset')} makes {sum(counts)} tasks on "
            f"{nodes} nodes. HINT: these variables are the job's; unset SLURM_NTASKS where it is set by hand or "
            "left from another job, and ask SLURM for --ntasks or --ntasks-per-node"
        )
    return counts


def _gpus(environ: Mapping[str, str], tasks: Sequence[int], *, is_asked: bool) -> tuple[int | None, ...]:
    """Return the GPUs of each node as far as SLURM tells: of a task, a node, this node, or all in even parts."""
    nodes, total = len(tasks), _count_gpus(environ, "SLURM_GPUS")
    if each := _count_gpus(environ, "SLURM_GPUS_PER_TASK"):
        return tuple(each * count for count in tasks)
    here = _count_gpus(environ, "SLURM_GPUS_PER_NODE") or _count_gpus(environ, "SLURM_GPUS_ON_NODE")
    if here is None and environ.get("SLURM_JOB_GPUS"):
        here = len(environ["SLURM_JOB_GPUS"].split(","))
    if here is None and total is not None and not is_asked and total % nodes == 0:
        here = total // nodes  # the login node has no GPUs of the job
    if total is None or (here is not None and here * nodes == total):
        return (here,) * nodes
    if is_asked:
        return (None,) * nodes
    raise LaunchError(
        f"SLURM_GPUS={environ['SLURM_GPUS']} are not spread evenly over {nodes} nodes"
        f"{'' if here is None else f': this node has {here}'}. HINT: ask with --gpus-per-node, or for tasks (--ntasks)"
    )


def _count_gpus(environ: Mapping[str, str], name: str) -> int | None:
    """Read a number of GPUs, which may be several of different kinds, such as ``a100:2,v100:2``."""
    text = environ.get(name)
    return sum(read_number(name, part.rpartition(":")[2]) for part in text.split(",")) if text else None


# Switches -------------------------------------------------------------------------------------------------------------


def show_topology(environ: Mapping[str, str] = ENVIRON) -> str:
    """Ask SLURM's controller for its network."""
    environ = dict(environ)
    environ.pop("SLURM_TOPO_LEN", None)  # it cuts lines short
    program = shutil.which("scontrol", path=environ.get("PATH"))
    if program is None:
        hint = "load SLURM's module, or give the cells by hosts:REGEX or file:PATH"
        raise LaunchError(f"cells of SLURM's network are asked for, but there is no scontrol in PATH. HINT: {hint}")
    try:
        shown = subprocess.run(
            [program, "show", "topology"], env=environ, capture_output=True, text=True, timeout=_SCONTROL_S,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if shown.returncode == 0:
            return shown.stdout
        reason = (shown.stderr or shown.stdout).strip() or f"exit code {shown.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    hint = "give the cells by hosts:REGEX or file:PATH instead"
    raise LaunchError(f"scontrol show topology failed: {reason}. HINT: {hint}")


def read_topology(text: str) -> dict[str, tuple[str, ...]]:
    """Read the output of ``scontrol show topology``, or a ``topology.conf``."""
    leaves: dict[str, set[str]] = {}  # node to the switches that it hangs on
    parents: dict[str, set[str]] = {}
    children: dict[str, tuple[str, ...]] = {}
    listed = 0
    for line in text.replace("\\\n", " ").splitlines():
        pairs = {name.lower(): value for name, value in _PAIR.findall(line.partition("#")[0]) if value != "(null)"}
        if (name := pairs.get("switchname") or pairs.get("blockname")) is None:
            continue
        children[name] = expand_hosts(pairs["switches"]) if "switches" in pairs else ()
        for child in children[name]:
            parents.setdefault(child, set()).add(name)
        if not children[name] and "nodes" in pairs:  # scontrol lists them at every switch above, too
            nodes = expand_hosts(pairs["nodes"])
            listed += len(nodes)
            for node in nodes:
                leaves.setdefault(node, set()).add(name)
        listed += len(children[name])
        if listed > _MAX_LISTED:
            raise LaunchError(f"the network has more than {_MAX_LISTED} nodes below switches; give fewer lines")
    heights = _heights(children)
    paths = {own: _path(own, parents, heights) for own in set(map(frozenset, leaves.values()))}
    return {node: paths[frozenset(own)] for node, own in leaves.items()}


def _heights(children: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    """Return how many levels of switches stand below each switch."""
    heights: dict[str, int] = {}
    levels = 0
    while waiting := {name: below for name, below in children.items() if name not in heights}:
        levels += 1
        if levels > _MAX_LEVELS:
            raise LaunchError(f"switches stand on more than {_MAX_LEVELS} levels; correct Switches= of some")
        known = [name for name, below in waiting.items() if not any(child in waiting for child in below)]
        if not known:
            raise LaunchError(f"switches {shorten(sorted(waiting))} stand above themselves; correct Switches= of one")
        heights |= {name: max((heights.get(child, 0) + 1 for child in waiting[name]), default=0) for name in known}
    return heights


def _path(own: Iterable[str], parents: Mapping[str, set[str]], heights: Mapping[str, int]) -> tuple[str, ...]:
    """Return the switches above, from the top; of each height one name."""
    levels: dict[int, set[str]] = {}
    rest = list(own)
    while rest:
        switch = rest.pop()
        level = levels.setdefault(heights[switch], set())
        if switch not in level:
            level.add(switch)
            rest += parents.get(switch, ())
    return tuple("+".join(sorted(levels[height])) for height in sorted(levels, reverse=True))


def with_switches(hosts: Iterable[Host], topology: Mapping[str, tuple[str, ...]]) -> tuple[Host, ...]:
    """Return hosts with the switches that a topology names for them; others stay as they are."""
    return tuple(replace(host, switches=topology.get(host.name, host.switches)) for host in hosts)


def ask_switches(hosts: Iterable[Host], environ: Mapping[str, str] = ENVIRON) -> tuple[Host, ...]:
    """Return hosts with the switches that SLURM's controller names for them."""
    return with_switches(hosts, read_topology(show_topology(environ)))


def own_host(environ: Mapping[str, str] = ENVIRON) -> Host:
    """Tell where this process runs, from what a SLURM step or else the host itself says; local."""
    name = environ.get("XFFL_HOST") or environ.get("SLURMD_NODENAME") or socket.gethostname()
    address, pattern = environ.get("SLURM_TOPOLOGY_ADDR", ""), environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")
    # The address ends in the node's name, which may hold dots; of another node it is left over from another step.
    if name != environ.get("SLURMD_NODENAME") or not address.endswith(f".{name}") or not pattern.endswith(".node"):
        return Host(name)
    parts = re.findall(r"(?:[^.\[\]]|\[[^\[\]]*\])+", address.removesuffix(f".{name}"))
    return Host(name, switches=tuple("+".join(sorted(expand_hosts(level))) for level in parts))


# Hosts that somebody wrote down ---------------------------------------------------------------------------------------


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read hosts such as ``a:4,b:4`` or ``n[01-04]:8``, or ``@FILE`` with a line for each.

    A line is ``NAME:SLOTS``, or ``NAME slots=4 address=10.0.0.1 gpus=4 switches=core.s1``; ``#`` begins a comment.
    """
    if text.startswith("@"):
        hosts = _read_hosts(Path(text[1:]))
    else:
        pieces = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
        if not pieces or ",".join(pieces) != text:
            raise ConfigError(f"hosts {shown(text)} cannot be read; write them like a:4,b:4 or n[01-04]:8, or @FILE")
        hosts = []
        for piece in pieces:
            _add_hosts(hosts, _hosts([piece.strip()], text))
    if not hosts:
        raise ConfigError(f"hosts {shown(text)} name no host; write them like a:4,b:4")
    if twice := [name for name, count in Counter(host.name for host in hosts).items() if count > 1]:
        raise ConfigError(f"hosts {shown(text)} name {shorten(twice)} twice; give each once, with all its slots")
    return tuple(hosts)


def _read_hosts(path: Path) -> list[Host]:
    try:
        lines = read_given(path).splitlines()
    except (OSError, ValueError) as error:
        hint = "give a readable file with a line such as a:4 for each host"
        raise ConfigError(f"hosts @{path}: {error}; {hint}") from error
    hosts: list[Host] = []
    for number, line in enumerate(lines, 1):
        if words := line.partition("#")[0].split():
            _add_hosts(hosts, _hosts(words, f"{path}, line {number}: {line.strip()}"))
    return hosts


def _add_hosts(hosts: list[Host], more: list[Host]) -> None:
    hosts += more
    if len(hosts) > MAX_HOSTS:
        raise ConfigError(f"hosts are more than {MAX_HOSTS}; give fewer")


def _hosts(words: list[str], where: str) -> list[Host]:
    """Read one entry: a name or a list of names, its slots, and what else the list says of it."""
    names, _, slots = words[0].rpartition(":") if ":" in words[0] else (words[0], "", "")
    values = {"slots": slots} if slots else {}
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key not in ("slots", "address", "gpus", "switches") or not value or key in values:
            raise ConfigError(
                f"hosts: {shown(where)} has {shown(word)}; write a line like a slots=4 address=10.0.0.1 gpus=4"
            )
        values[key] = value
    if not values.get("slots"):
        raise ConfigError(
            f"hosts: {shown(where)} does not say how many ranks {shown(names)} takes; write {names[:40]}:4"
        )
    counts = {key: decimal(values[key], _COUNT_DIGITS) for key in ("slots", "gpus") if key in values}
    slots_given = counts["slots"]
    if not slots_given or None in counts.values():
        raise ConfigError(
            f"hosts: {shown(where)} has slots {shown(values['slots'])} or gpus that are not valid; give 1 to "
            f"{10**_COUNT_DIGITS - 1}"
        )
    try:
        expanded = expand_hosts(names)
    except LaunchError as error:
        raise ConfigError(f"hosts: {shown(where)}: {error}") from error
    address = values.get("address")
    # A name that starts with "-" would be an option of ssh.
    if odd := [name for name in (*expanded, address or "a") if not _NAME.fullmatch(name)]:
        raise ConfigError(
            f"hosts: {shown(where)} has the name {shown(odd[0])}; give letters, digits and . - _ (user@ before it)"
        )
    if address is not None and len(expanded) > 1:
        raise ConfigError(f"hosts: {shown(where)} gives one address to {len(expanded)} hosts; give each its own")
    switches = tuple(values["switches"].split(".")) if "switches" in values else ()
    return [
        Host(name, slots=slots_given, address=address, switches=switches, gpus=counts.get("gpus")) for name in expanded
    ]
