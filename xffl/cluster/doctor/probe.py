"""Checks of one host: what it finds of itself, then of the other hosts. Nothing here needs torch.

Each check returns a :class:`~xffl.cluster.doctor.messages.Finding`. Programs get a time limit.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import xffl
from xffl.checks import decimal, shown
from xffl.cluster.doctor.messages import (
    ERROR,
    OK,
    WARNING,
    Answer,
    Finding,
    FolderAnswer,
    HostReport,
    Member,
    Plan,
)
from xffl.cluster.hosts import resolve
from xffl.cluster.launch.ssh_agent import free_port
from xffl.cluster.network import LOOPBACK, Interface, host_identity, list_interfaces
from xffl.cluster.reaching import connection_error
from xffl.cluster.runtimes import Runtime
from xffl.cluster.sizes import Federation
from xffl.cluster.slurm.allocation import own_host
from xffl.costs import EXCHANGE_FORMAT
from xffl.errors import ConfigError
from xffl.files import write_whole
from xffl.reading import COUNT_LIMIT

__all__ = ["FORMAT", "Request", "examine_host", "partners", "rank_facts", "try_others"]

REQUIRED = {"torch": (2, 11), "numpy": (1, 24), "mpi4py": (4, 0), "PyYAML": (), "jsonargparse": (4, 49), "rich": (13,)}
"""The packages that xffl needs and their lowest versions, as in ``setup.cfg``."""

FORMAT = "exchange format"
"""Among the versions, the number of the format of what cells exchange, which all must have in common."""

_FURTHER = ("safetensors", "torchmetrics", "transformers", "deepspeed", "torchao")
"""Packages that take part in training where they are installed, so that all hosts should have the same."""

_SHM = Path("/dev/shm")
_LEAST_SHM = 2**28
_INFINIBAND = Path("/sys/class/infiniband")
_NAMES = ("XFFL_IFNAME", "XFFL_CONTROL_IFNAME", "GLOO_SOCKET_IFNAME")

_LIMIT_S = 20.0

_SLOW_IMPORT_S = 30.0
_SHARED_BY_NCCL = (2, 30)  # the first NCCL that supports several ranks on one GPU

_COMPARED = ("XFFL_", "NCCL_", "GLOO_", "TORCH_")
_SHOWN = ("NCCL_", "GLOO_")
_SHOWN_ALSO = ("XFFL_IFNAME", "XFFL_CONTROL_IFNAME", "XFFL_FEDERATED", "XFFL_HSDP")

_CONNECT_S = 5.0
THREADS = 16
"""How many hosts, pairs of hosts, or stores of cells a host tries at a time."""
FOLDER_S = 10.0
"""How long hosts wait for each other in the shared folder, unless ``--timeout`` is less."""
FOLDER_TURNS = 40  # how often a file is replaced while others read it
_PAGE = 4096
_TOKEN = re.compile(r"[0-9a-f]{8}")
_ALL_PAIRS = 64  # hosts or cells up to which each one is paired with every other


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of ``xffl doctor``."""

    shared: str | None = None  # folder that all hosts must share; None for the current one
    needs: tuple[str, ...] = ()  # what is an error if it is missing: gpu
    federated: Federation | None = None  # cells or a rule for them, of which pairs are tested; None: pairs of hosts
    federated_by: str = "--federated"  # option or variable that gives them
    with_torch: bool = True
    timeout_s: float = 15.0  # how long one wait for another host may take
    elastic: str | None = None  # address of the lighthouse of an elastic run that is looked at, too


def find_versions() -> dict[str, str]:
    """Return versions by package, ``""`` where a needed one is missing, and a hash of xffl's files; imports nothing."""
    digest, folder = hashlib.sha256(), Path(xffl.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode())
        digest.update(file.read_bytes())
    versions = {"python": platform.python_version(), "xffl": xffl.__version__}
    versions["xffl source"] = digest.hexdigest()[:12]
    versions[FORMAT] = str(EXCHANGE_FORMAT)
    for name in (*REQUIRED, *_FURTHER):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name in REQUIRED:
                versions[name] = ""
    return versions


def check_packages(versions: Mapping[str, str]) -> list[Finding]:
    """Compare the packages of this host with what xffl needs."""
    wrong = [f"{name} not installed" for name in REQUIRED if not versions[name]]
    for name, least in REQUIRED.items():
        # The leading numbers of a version, such as (2, 13, 0) of 2.13.0+cpu.
        numbers = re.match(r"[0-9]+(?:\.[0-9]+)*", versions[name])
        if versions[name] and (tuple(map(int, numbers[0].split("."))) if numbers else ()) < least:
            wrong.append(f"{name} {versions[name]} (needs {'.'.join(map(str, least))})")
    python = Finding("python", OK, f"{versions['python']} ({sys.executable}), xffl {versions['xffl']}")
    advice = "install xffl into the job's environment, in its repository: pip install -e . -c constraints.txt"
    text = "; ".join(wrong) or ", ".join(f"{name} {versions[name]}" for name in REQUIRED)
    return [python, Finding("packages", ERROR if wrong else OK, text, advice)]


def check_interfaces(
    environ: Mapping[str, str], nodes: int, interfaces: Sequence[Interface], physical: Collection[str] | None = None
) -> tuple[list[Finding], str | None]:
    """Look at the interfaces of this host, and at those that are asked for by name; return its address, too."""
    known = {interface.name: interface for interface in interfaces}
    # gloo takes a list, xffl one name.
    asked = {variable: environ[variable] for variable in _NAMES if environ.get(variable)}
    if "GLOO_SOCKET_IFNAME" in asked:
        asked["GLOO_SOCKET_IFNAME"] = asked["GLOO_SOCKET_IFNAME"].partition(",")[0]
    physical = find_physical() if physical is None else physical
    usable = [i.name for i in known.values() if i.is_up and i.address and (nodes == 1 or not i.is_loopback)]
    offer = f"to one of: {', '.join(usable) or 'none is up here'}"
    findings = [
        _judge(known, variable=variable, name=name, nodes=nodes, physical=physical, offer=offer)
        for variable, name in asked.items()
    ]
    chosen = asked.get("XFFL_IFNAME") or asked.get("GLOO_SOCKET_IFNAME")
    if chosen:
        return findings, known[chosen].address if chosen in known else None
    shown = "; ".join(str(interface) for interface in known.values()) or "none"
    name = socket.gethostname()
    addresses = resolve(name)
    by_address = {interface.address: interface for interface in known.values() if interface.address}
    # gloo takes the first address that it can listen at; all of 127.0.0.0/8 is on this host, on no interface's list.
    first = next((address for address in addresses if address in by_address or address.startswith("127.")), None)
    of_first = by_address.get(first) if first is not None else None
    if of_first is None or of_first.is_loopback:
        where = f"{name} is {first or addresses[0]}" if addresses else f"{name} does not resolve"
        text = f"gloo would listen on loopback, since {where}; here are {shown}"
        if nodes > 1:
            return [*findings, Finding("interface", ERROR, text, f"set XFFL_IFNAME {offer}")], None
        return [*findings, Finding("interface", OK, f"{shown}; one host needs loopback only")], "127.0.0.1"
    text = f"{of_first}, where the host's name points; here are {shown}"
    return [*findings, Finding("interface", OK, text)], of_first.address


def _judge(
    known: Mapping[str, Interface], variable: str, name: str, nodes: int, physical: Collection[str], offer: str
) -> Finding:
    """Say whether an interface that is asked for can be used."""
    address, wrong, advice = known.get(name), "", f"set {variable} {offer}"
    if address is None:
        wrong = f"but there is no such interface{'; it takes one name' if ',' in name else ''}"
    elif not address.is_up:
        wrong = "which is down"
    elif address.address is None:
        wrong = "which has no IPv4 address"
    elif address.is_loopback and nodes > 1:
        wrong = "which is loopback: other hosts cannot reach it"
    if address is None or wrong:
        return Finding("interface", ERROR, f"{variable}={name}, {wrong}", advice)
    speed = sys.maxsize if address.speed_mbit is None else address.speed_mbit
    cards = [i for i in known.values() if i.name in physical and i.is_up and i.address]
    faster = [i for i in cards if (i.speed_mbit or 0) > speed]
    if faster and variable != "XFFL_CONTROL_IFNAME":
        return Finding("interface", WARNING, f"{variable}: {address}, but {faster[0]} is faster", advice)
    return Finding("interface", OK, f"{variable}: {address}")


def find_physical(folder: Path = Path("/sys/class/net")) -> set[str]:
    """Return the interfaces that lead to a network: cards, bonds, VLANs and IPoIB, no bridges of containers."""
    names = set()
    for link in folder.iterdir() if folder.is_dir() else ():
        with suppress(OSError):  # a file that is no interface, or an interface that was removed
            is_card = (link / "device").exists() or (link / "bonding").is_dir()
            is_infiniband = is_card or (link / "type").read_text().strip() == "32"
            if is_infiniband or "DEVTYPE=vlan" in (link / "uevent").read_text().split():
                names.add(link.name)
    return names


def check_limits(world_size: int, files: tuple[int, int] | None = None) -> list[Finding]:
    """Look at open files, locked memory and shared memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE) if files is None else files
    unlimited = resource.RLIM_INFINITY
    wanted = 4 * world_size + 256
    status, text = OK, "unlimited" if hard == unlimited else f"{hard} at most"
    if soft != hard:
        text += f", to which a session raises the limit of {soft}"
    if hard != unlimited and hard < wanted:
        status = ERROR if hard < world_size else WARNING
        text += f", but {world_size} ranks may need {wanted} for their connections"
    advice = f"ask the site to raise the hard limit (ulimit -Hn) to {wanted}"
    findings = [Finding("open files", status, text, advice)]
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has_rdma = _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())
    status, text = OK, "unlimited" if locked == unlimited else f"{locked // 1024} KiB at most"
    if not has_rdma:
        text += ", no InfiniBand here"
    elif locked != unlimited:
        status, text = WARNING, f"{text}, and InfiniBand registers buffers there"
    advice = "ulimit -l unlimited in the job; under SLURM PropagateResourceLimitsExcept=MEMLOCK"
    findings.append(Finding("locked memory", status, text, advice))
    free, text = 0, f"{_SHM} is missing or cannot be written; loaders' workers use it"
    if _SHM.is_dir() and os.access(_SHM, os.W_OK):
        free = shutil.disk_usage(_SHM).free
        text = f"{free / 2**30:.1f} GiB free"
    advice = "mount a larger one: docker run --shm-size=8g, apptainer --bind /dev/shm; or num_workers: 0"
    return [*findings, Finding("/dev/shm", OK if free >= _LEAST_SHM else WARNING, text, advice)]


def rank_facts(environ: Mapping[str, str], ranks: Sequence[int], node: int, local_size: int | None) -> Member:
    """Return what a rank knows of itself: CPUs, threads, host, and its variables as far as they are compared."""
    return Member(
        ranks=list(ranks),
        node=node,
        local_size=local_size,
        host=own_host(environ),
        cpus=sorted(os.sched_getaffinity(0)),
        threads=decimal(environ.get("OMP_NUM_THREADS", "").partition(",")[0]),
        environ={
            name: text if is_shown(name) else hashlib.sha256(text.encode()).hexdigest()[:8]
            for name, text in environ.items()
            if name.startswith(_COMPARED) and name != "XFFL_HOST"
        },
        report=None,
    )


def is_shown(name: str) -> bool:
    """Tell whether a variable's value may be sent and printed; of others, which may hold secrets, it is a hash."""
    return name.startswith(_SHOWN) or name in _SHOWN_ALSO


def check_threads(ranks: Sequence[Mapping[str, Any]]) -> Finding:
    """Compare the threads of a node's ranks with the CPUs that they may use."""
    cpus = set().union(*(set(rank["cpus"]) for rank in ranks))
    threads = [len(rank["cpus"]) if rank["threads"] is None else rank["threads"] for rank in ranks]
    settings = sorted({"unset" if rank["threads"] is None else str(rank["threads"]) for rank in ranks})
    share = max(1, len(cpus) // len(ranks))
    wrong, advice = "", f"set OMP_NUM_THREADS={share}, or XFFL_BIND=cores; under SLURM ask for --cpus-per-task"
    crowded = [len(rank["cpus"]) for rank, count in zip(ranks, threads, strict=True) if count > len(rank["cpus"])]
    if len(ranks) > len(cpus):
        wrong, advice = ": ranks share CPUs", "start fewer ranks, or ask for more CPUs"
    elif sum(threads) > len(cpus):
        wrong = f": {sum(threads)} threads want {len(cpus)} CPUs"
    elif crowded:
        wrong = f": a rank is bound to {crowded[0]} CPUs, fewer than its threads"
    text = f"{len(ranks)} rank{'s' * (len(ranks) > 1)} on {len(cpus)} CPUs, OMP_NUM_THREADS {'/'.join(settings)}{wrong}"
    return Finding("threads", WARNING if wrong else OK, text, advice)


# Programs: GPUs, torch -------------------------------------------------------------------------------------------


def check_gpus(needed: bool, environ: Mapping[str, str]) -> tuple[Finding, int]:
    """Look for GPUs with the vendors' own commands."""
    asked = [name for name in ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS") if environ.get(name)]
    nvidia = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    failures = []
    for program, *options in (nvidia, ("rocm-smi", "--showproductname", "--csv")):
        if shutil.which(program, path=environ.get("PATH")) is None:
            continue
        code, output = _run([program, *options], environ)
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        if program == "rocm-smi":
            lines = [line for line in lines if re.match(r"card[0-9]+,", line)]
        if code != 0 or not lines:
            failures.append(f"{program} fails: {_reason(output)}")  # a node of AMD's may have NVIDIA's command as well
            continue
        return Finding("gpus", OK, f"{len(lines)} x {' / '.join(dict.fromkeys(lines))}"), len(lines)
    if failures:
        advice = "load the driver on this node, or take the node out of the job"
        return Finding("gpus", ERROR if needed or asked else WARNING, "; ".join(failures), advice), 0
    if needed or asked:
        why = f"{asked[0]}={environ[asked[0]]} promises some" if asked else "they are needed"
        advice = "ask for them (--gpus-per-node), and see that the driver's commands are on PATH"
        return Finding("gpus", ERROR, f"neither nvidia-smi nor rocm-smi is here, but {why}", advice), 0
    return Finding("gpus", OK, "none; training will use the CPU"), 0


def _run(command: Sequence[str], environ: Mapping[str, str]) -> tuple[int, str]:
    """Run a program; return its exit code, -1 where it cannot be started or does not end, and all that it printed."""
    try:
        ran = subprocess.run(
            list(command), env={**os.environ, **environ}, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, errors="replace", timeout=_LIMIT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return -1, "it did not answer"
    return ran.returncode, ran.stdout + ran.stderr


def _reason(output: str) -> str:
    """Return the line of an output that says what is wrong: the last one that is no loader's detail."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if re.match(r"(\w+Error|error|fatal)\b", line, re.IGNORECASE)]
    return (telling or lines or ["no message"])[-1][:160]


def check_torch(report: Mapping[str, Any], gpus: int, environ: Mapping[str, str]) -> Finding:
    """Judge what a process said about its torch."""
    if "error" in report:
        advice = "run python -c 'import torch' there; reinstall torch for this machine (docs: Install)"
        return Finding("torch", ERROR, f"torch cannot be loaded: {report['error']}", advice)
    backends = ", ".join(report["backends"]) or "none"
    text = f"{report['torch']}, backends {backends}, {report['gpus']} GPUs"
    if "gloo" not in report["backends"]:
        return Finding("torch", ERROR, f"{text}: gloo is missing", "install a build of torch with gloo")
    if gpus and not report["gpus"] and environ.get("CUDA_VISIBLE_DEVICES") != "":
        advice = "install the build of torch for this driver (CUDA or ROCm), and look at CUDA_VISIBLE_DEVICES"
        return Finding("torch", ERROR, f"{text}, but the node has {gpus}", advice)
    if report["gpus"] and "nccl" not in report["backends"]:
        return Finding("torch", WARNING, f"{text}: nccl is missing", "install a build of torch with NCCL or RCCL")
    if report["gpus"]:
        text += f", NCCL {'.'.join(map(str, report['nccl']))}; ranks that share a GPU need backend='gloo'"
        if tuple(report["nccl"]) >= _SHARED_BY_NCCL:
            text += " or NCCL_MULTI_RANK_GPU_ENABLE=1"
        if environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            advice = "leave CUDA_DEVICE_MAX_CONNECTIONS out, or set 8 or more (docs: Network and threads)"
            text += "; CUDA_DEVICE_MAX_CONNECTIONS=1: rounds behind local steps are refused"
            return Finding("torch", WARNING, text, advice)
    if report["import_s"] > _SLOW_IMPORT_S:
        advice = "put the environment on a faster file system, or into a container image"
        return Finding("torch", WARNING, f"{text}; it took {report['import_s']:.0f} s to load", advice)
    return Finding("torch", OK, text)


def nccl_of(report: Mapping[str, Any]) -> str | None:
    """Return what GPUs communicate by, such as ``nccl 2.27.3``, of what a process said about its torch."""
    if not report.get("gpus") or not report.get("nccl"):
        return None
    return f"{'rccl' if report.get('is_rccl') else 'nccl'} {'.'.join(map(str, report['nccl']))}"


# All checks of a host -------------------------------------------------------------------------------------------------


def examine_host(
    request: Request, environ: Mapping[str, str], machines: int, world_size: int
) -> tuple[HostReport, int, list[socket.socket]]:
    """Check this host for a job of so many machines and ranks, without torch.

    :param request: The options of the command.
    :param environ: The variables of the rank.
    :param machines: How many machines the job is on, by the names of its hosts.
    :param world_size: The number of its ranks.
    :return: The report, the number of GPUs, and the sockets at which other hosts are to reach this one.
    """
    versions, interfaces = find_versions(), list_interfaces()
    network, address = check_interfaces(environ, machines, interfaces)
    alone, _ = check_interfaces(environ, 1, interfaces)
    if machines == 1 and not any(environ.get(name) for name in _NAMES):
        address = LOOPBACK  # as stores and gloo in a job of one host
    gpu_finding, gpus = check_gpus("gpu" in request.needs, environ)
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/net")
    listeners = []
    if world_size > 1:
        # Linux completes connections to a port with a listener, up to the backlog: nobody needs to accept them.
        # Where no address is found, which is an error of the interface, they are tried at what the name resolves to.
        listeners = [socket.create_server((address or "", port), backlog=256) for port in (free_port(), 0)]
    report = HostReport(
        findings=[*check_packages(versions), gpu_finding, *network, *check_limits(world_size)],
        alone=alone,
        machine=f"{host_identity()}/{namespace}",
        versions=versions,
        runtime=Runtime(torch=versions["torch"], xffl=versions["xffl"], python=versions["python"]),
        nccl=None,
        address=address,
        ports=[int(listener.getsockname()[1]) for listener in listeners],
    )
    return report, gpus, listeners


def try_others(request: Request, plan: Plan, place: int) -> Answer:
    """Check the shared folder together with the other hosts, and how this one reaches them; no pairs yet."""
    if not _TOKEN.fullmatch(plan["token"]):  # it names a folder, and whoever reaches the store may have written it
        raise ConfigError(f"the token of its plan is {shown(plan['token'])}")
    hosts = plan["hosts"]
    patience_s = min(FOLDER_S, request.timeout_s)
    folder = visit_folder(shared_folder(request), plan["token"], host=place, hosts=len(hosts), patience_s=patience_s)
    others = [hosts[other] for other in partners(place, len(hosts))]
    attempts = [(host["name"], host["address"], port) for host in others for port in host["ports"]]
    limit_s = min(_CONNECT_S, request.timeout_s)
    with ThreadPoolExecutor(THREADS) as pool:
        reasons = list(pool.map(lambda attempt: connection_error(attempt[1], attempt[2], limit_s), attempts))
    failures = [(name, port, why) for (name, _, port), why in zip(attempts, reasons, strict=True) if why]
    return Answer(folder=folder, failures=failures, tried=len(attempts), pairs={}, run=None)


def partners(number: int, count: int) -> list[int]:
    """Return the numbers of those that one of many is paired with: all, from 65 on at distances 1, 2, 4, ..."""
    if count <= _ALL_PAIRS:
        return [other for other in range(count) if other != number]
    return [(number + 2**power) % count for power in range((count - 1).bit_length())]


def shared_folder(request: Request) -> str:
    """Return the folder that all hosts are to share."""
    return os.path.abspath(request.shared or os.curdir)


# The shared folder ----------------------------------------------------------------------------------------------------


def visit_folder(path: str, token: str, host: int, hosts: int, patience_s: float) -> FolderAnswer:
    """Test from one host whether a folder is shared, with files in a folder inside of it that is removed again.

    Host 0 of so many makes that folder and replaces a file many times while all read it; each other one leaves a file
    that host 0 must see. The answer: ``seen_s`` (how late the folder is seen, or ``None``), ``torn`` (how many reads
    saw half a file), ``error``, ``free`` bytes, ``kind`` of file system, and the hosts whose files are ``unseen``. No
    file locks are tested, since xffl uses none.
    """
    folder, started = Path(path), time.monotonic()
    marks = folder / f".xffl-doctor-{token}"
    is_made = False
    kind, absent = _file_system(folder), list(range(1, hosts)) if host == 0 else []
    answer: FolderAnswer = {"seen_s": None, "torn": 0, "error": None, "free": 0, "kind": kind, "unseen": []}
    try:
        if host == 0:
            marks.mkdir()
            is_made = True
            write_whole(marks / "turning", "a" * _PAGE)
            write_whole(marks / "seen", token)
        while _read(marks / "seen") != token:
            if time.monotonic() - started > patience_s:
                missing = "what rank 0's host writes is not seen" if folder.is_dir() else "is not there"
                return {**answer, "error": missing}
            time.sleep(0.02)
        answer["seen_s"] = time.monotonic() - started
        for turn in range(FOLDER_TURNS):
            if host == 0:
                write_whole(marks / "turning", "ab"[turn % 2] * _PAGE)
            text = _read(marks / "turning")
            answer["torn"] += text is not None and (len(text) != _PAGE or len(set(text)) != 1)
            time.sleep(0.002)
        answer["free"] = min(shutil.disk_usage(folder).free, COUNT_LIMIT)
        if host != 0:
            write_whole(marks / f"host-{host}", token)
        deadline = time.monotonic() + patience_s
        while absent := [other for other in absent if _read(marks / f"host-{other}") != token]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)  # a file system may show a file late
    except OSError as error:
        return {**answer, "error": f"cannot be written ({error.strerror or error})"}
    finally:
        if is_made:
            shutil.rmtree(marks, ignore_errors=True)
    return {**answer, "unseen": absent}


def _file_system(path: Path) -> str:
    """Return the kind of file system of a path, as Linux calls it; ``unknown`` where it does not tell."""
    kinds, full = {}, Path(os.path.realpath(path))
    with suppress(OSError):
        kinds = dict(line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines())
    return next((kinds[str(folder)] for folder in (full, *full.parents) if str(folder) in kinds), "unknown")


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
