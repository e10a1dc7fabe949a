"""What one host tells about itself: versions, interfaces, limits, threads. Nothing is sent anywhere."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import xffl
from xffl.cluster.doctor.findings import ERROR, OK, WARNING, Finding
from xffl.cluster.network import Interface, list_interfaces, resolve

__all__ = [
    "REQUIRED",
    "check_interfaces",
    "check_limits",
    "check_packages",
    "check_threads",
    "find_physical",
    "find_versions",
    "rank_facts",
]

REQUIRED = {
    "torch": (2, 11),
    "numpy": (1, 24),
    "mpi4py": (4, 0),
    "PyYAML": (),
    "jsonargparse": (4, 49),
    "rich": (13,),
}
"""The packages that xffl needs and their lowest versions, as in ``setup.cfg``."""

_FURTHER = ("safetensors", "torchmetrics", "transformers", "deepspeed", "torchao")
"""Packages that take part in training where they are installed, so that all hosts should have the same."""

_SHM = Path("/dev/shm")
_LEAST_SHM = 2**28
_INFINIBAND = Path("/sys/class/infiniband")
_INTERFACES = Path("/sys/class/net")
_INFINIBAND_TYPE = "32"
_NAMES = ("XFFL_IFNAME", "XFFL_CONTROL_IFNAME", "GLOO_SOCKET_IFNAME")


def find_versions() -> dict[str, str]:
    """Return what this host runs, without importing it: package to version, ``""`` where a needed one is missing.

    ``xffl source`` is a hash of the package's files, which differs where somebody has edited a copy.
    """
    versions = {"python": platform.python_version(), "xffl": xffl.__version__, "xffl source": _source_hash()}
    for name in (*REQUIRED, *_FURTHER):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name in REQUIRED:
                versions[name] = ""
    return versions


def check_packages(versions: Mapping[str, str]) -> list[Finding]:
    """Compare the packages of this host with what xffl needs.

    :param versions: What :func:`find_versions` tells.
    :return: Findings.
    """
    findings = [
        Finding("python", OK, f"{versions['python']} ({sys.executable}), xffl {versions['xffl']}"),
    ]
    missing = [name for name in REQUIRED if not versions[name]]
    old = [
        f"{name} {versions[name]} (needs {'.'.join(map(str, least))})"
        for name, least in REQUIRED.items()
        if versions[name] and _numbers(versions[name]) < least
    ]
    if missing or old:
        told = [f"{', '.join(missing)} not installed"] if missing else []
        told += [f"too old: {', '.join(old)}"] if old else []
        advice = "install xffl into the job's environment, in its repository: pip install -e . -c constraints.txt"
        findings.append(Finding("packages", ERROR, "; ".join(told), advice))
    else:
        shown = ", ".join(f"{name} {versions[name]}" for name in REQUIRED)
        findings.append(Finding("packages", OK, shown))
    return findings


def check_interfaces(
    environ: Mapping[str, str],
    nodes: int,
    interfaces: Sequence[Interface] | None = None,
    physical: Collection[str] | None = None,
) -> tuple[list[Finding], str | None]:
    """Look at the interfaces of this host, and at those that are asked for by name.

    :param environ: Environment to read.
    :param nodes: Hosts of the job.
    :param interfaces: The interfaces; by default this host's.
    :param physical: Names of those with a card behind them; by default what :func:`find_physical` tells.
    :return: Findings, and the address at which gloo will listen, ``None`` where it will not find one.
    """
    known = {interface.name: interface for interface in (list_interfaces() if interfaces is None else interfaces)}
    # gloo takes a list, xffl one name.
    asked = {
        variable: environ[variable] if variable.startswith("XFFL_") else environ[variable].partition(",")[0]
        for variable in _NAMES
        if environ.get(variable)
    }
    physical = find_physical() if physical is None else physical
    findings = [_judge(known, variable, name, nodes, physical) for variable, name in asked.items()]
    chosen = asked.get("XFFL_IFNAME") or asked.get("GLOO_SOCKET_IFNAME")
    if chosen:
        return findings, known[chosen].address if chosen in known else None
    shown = "; ".join(str(interface) for interface in known.values()) or "none"
    name = socket.gethostname()
    addresses = resolve(name)
    own = {interface.address: interface for interface in known.values() if interface.address}
    # gloo takes the first address that it can listen at; all of 127.0.0.0/8 is on this host, on no interface's list.
    first = next((address for address in addresses if address in own or address.startswith("127.")), None)
    found = own.get(first) if first is not None else None
    if found is None or found.is_loopback:
        usable = [i.name for i in known.values() if i.is_up and i.address and not i.is_loopback]
        where = f"{name} is {first or addresses[0]}" if addresses else f"{name} does not resolve"
        advice = f"set XFFL_IFNAME to one of: {', '.join(usable) or 'none is up here'}"
        text = f"gloo would listen on loopback, since {where}; here are {shown}"
        if nodes > 1:
            return [*findings, Finding("interface", ERROR, text, advice)], None
        return [*findings, Finding("interface", OK, f"{shown}; one host needs loopback only")], "127.0.0.1"
    text = f"{found}, where the host's name points; here are {shown}"
    return [*findings, Finding("interface", OK, text)], found.address


def _judge(known: Mapping[str, Interface], variable: str, name: str, nodes: int, physical: Collection[str]) -> Finding:
    """Say whether an interface that is asked for can be used."""
    usable = [i.name for i in known.values() if i.is_up and i.address and (nodes == 1 or not i.is_loopback)]
    advice = f"set {variable} to one of: {', '.join(usable) or 'none is up here'}"
    if name not in known:
        rule = "; it takes one name" if "," in name else ""
        return Finding("interface", ERROR, f"{variable}={name}, but there is no such interface{rule}", advice)
    found = known[name]
    if not found.is_up:
        return Finding("interface", ERROR, f"{variable}={name}, which is down", advice)
    if found.address is None:
        return Finding("interface", ERROR, f"{variable}={name}, which has no IPv4 address", advice)
    if found.is_loopback and nodes > 1:
        text = f"{variable}={name}, which is loopback: other hosts cannot reach it"
        return Finding("interface", ERROR, text, advice)
    faster = [
        i
        for i in known.values()
        if i.name in physical and i.is_up and i.address
        if found.speed_mbit is not None and (i.speed_mbit or 0) > found.speed_mbit
    ]
    if faster and variable != "XFFL_CONTROL_IFNAME":
        return Finding("interface", WARNING, f"{variable}: {found}, but {faster[0]} is faster", advice)
    return Finding("interface", OK, f"{variable}: {found}")


def find_physical(folder: Path = _INTERFACES) -> set[str]:
    """Return the interfaces that lead to a network: cards, bonds, VLANs and IPoIB, no bridges of containers.

    :param folder: Where Linux tells about interfaces.
    :return: Their names.
    """
    found = set()
    for own in folder.iterdir() if folder.is_dir() else ():
        try:
            has_card = (own / "device").exists() or (own / "bonding").is_dir()
            is_infiniband = has_card or (own / "type").read_text().strip() == _INFINIBAND_TYPE
            if is_infiniband or "DEVTYPE=vlan" in (own / "uevent").read_text().split():
                found.add(own.name)
        except OSError:
            continue  # a file that is no interface, or one that has gone
    return found


def check_limits(world_size: int, files: tuple[int, int] | None = None) -> list[Finding]:
    """Look at open files, locked memory and shared memory.

    :param world_size: Ranks of the job; each of them may have a connection with this process.
    :param files: Soft and hard limit of open files; by default those of now.
    :return: Findings.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE) if files is None else files
    unlimited = resource.RLIM_INFINITY
    wanted = 4 * world_size + 256
    findings = [Finding("open files", OK, "unlimited" if soft == unlimited else f"{soft} at most")]
    if soft != unlimited and soft < wanted:
        can = "ulimit -n " + str(wanted) if hard == unlimited or hard >= wanted else "the site to raise the hard limit"
        text = f"{soft} at most, but {world_size} ranks may need {wanted} for their connections"
        findings = [Finding("open files", ERROR if soft < world_size else WARNING, text, f"put {can} into the job")]
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has_rdma = _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())
    shown = "unlimited" if locked == unlimited else f"{locked // 1024} KiB at most"
    if has_rdma and locked != unlimited:
        advice = "ulimit -l unlimited in the job; under SLURM PropagateResourceLimitsExcept=MEMLOCK"
        findings.append(Finding("locked memory", WARNING, f"{shown}, and InfiniBand registers buffers there", advice))
    else:
        findings.append(Finding("locked memory", OK, shown + ("" if has_rdma else ", no InfiniBand here")))
    findings.append(_check_shm())
    return findings


def _check_shm() -> Finding:
    advice = "mount a larger one: docker run --shm-size=8g, apptainer --bind /dev/shm; or num_workers: 0"
    if not _SHM.is_dir() or not os.access(_SHM, os.W_OK):
        return Finding("/dev/shm", WARNING, f"{_SHM} is missing or cannot be written; loaders' workers use it", advice)
    free = shutil.disk_usage(_SHM).free
    text = f"{free / 2**30:.1f} GiB free"
    return Finding("/dev/shm", WARNING if free < _LEAST_SHM else OK, text, advice if free < _LEAST_SHM else "")


def rank_facts(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what this rank may compute on: its CPUs, and its threads where they are set."""
    threads = environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return {"cpus": sorted(os.sched_getaffinity(0)), "threads": int(threads) if threads.isdecimal() else None}


def check_threads(ranks: Sequence[Mapping[str, Any]]) -> Finding:
    """Compare the threads of a node's ranks with the CPUs that they may use.

    :param ranks: What :func:`rank_facts` tells of each rank of the node.
    :return: The finding.
    """
    cpus = set().union(*(set(rank["cpus"]) for rank in ranks))
    threads = [len(rank["cpus"]) if rank["threads"] is None else rank["threads"] for rank in ranks]
    told = sorted({"unset" if rank["threads"] is None else str(rank["threads"]) for rank in ranks})
    text = (
        f"{len(ranks)} {'rank' if len(ranks) == 1 else 'ranks'} on {len(cpus)} CPUs, OMP_NUM_THREADS {'/'.join(told)}"
    )
    share = max(1, len(cpus) // len(ranks))
    advice = f"set OMP_NUM_THREADS={share}, or XFFL_BIND=cores; under SLURM ask for --cpus-per-task"
    crowded = [rank for rank, count in zip(ranks, threads, strict=True) if count > len(rank["cpus"])]
    if len(ranks) > len(cpus):
        return Finding("threads", WARNING, f"{text}: ranks share CPUs", "start fewer ranks, or ask for more CPUs")
    if sum(threads) > len(cpus):
        return Finding("threads", WARNING, f"{text}: {sum(threads)} threads want {len(cpus)} CPUs", advice)
    if crowded:
        few = len(crowded[0]["cpus"])
        return Finding("threads", WARNING, f"{text}: a rank is bound to {few} CPUs, fewer than its threads", advice)
    return Finding("threads", OK, text)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, such as (2, 13, 0) of 2.13.0+cpu."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _source_hash() -> str:
    digest = hashlib.sha256()
    folder = Path(xffl.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
