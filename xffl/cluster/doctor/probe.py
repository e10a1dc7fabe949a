"""Probe of one host: what it finds of itself, then of the other hosts. It answers rank 0 with lines of JSON.

Each check returns a :class:`Finding`. Programs get a time limit, and what may abort a process that loads it (an MPI
library, torch) is loaded in a child.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import xffl
from xffl.checks import decimal
from xffl.cluster.doctor.lines import Line, Message, Program
from xffl.cluster.doctor.messages import read_request
from xffl.cluster.hosts import resolve
from xffl.cluster.launch.ssh_agent import free_port, refusal
from xffl.cluster.lighthouse.page import visit_run
from xffl.cluster.network import LOOPBACK, Interface, host_identity, list_interfaces
from xffl.cluster.reaching import connection_error
from xffl.cluster.run_token import PROOF_KEY
from xffl.cluster.sizes import Federation
from xffl.cluster.slurm.allocation import own_host
from xffl.costs import EXCHANGE_FORMAT
from xffl.files import write_whole

__all__ = [
    "ERROR",
    "FORMAT",
    "OK",
    "WARNING",
    "Finding",
    "HostChecks",
    "Request",
    "answer_requests",
    "import_limit_s",
    "main",
    "take_part",
]

OK = "ok"
"""Nothing to do."""
WARNING = "warning"
"""The job may run, but not as well as it could."""
ERROR = "error"
"""The job will fail, or compute wrongly."""

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

_PATIENCE_S = 900  # how long a host waits for the next request, if rank 0's host disappears without closing
_CONNECT_S = 5.0
THREADS = 16  # pairs at a time, as in torch_pair
_SLACK_S = 5.0
FOLDER_TURNS = 40  # how often a file is replaced while others read it
_PAGE = 4096


@dataclass(frozen=True)
class Finding:
    """The verdict of one check on one host, or on all."""

    check: str  # name of the check, such as clock
    status: str  # ok, warning or error
    text: str
    advice: str = ""  # what to do about it; of what is ok it is dropped
    host: str = ""  # where it was found; empty for what concerns all hosts

    def __post_init__(self) -> None:
        object.__setattr__(self, "advice", "" if self.status == OK else self.advice)


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


def rank_facts(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what a rank reports about itself: CPUs, threads, host, and its variables as far as they are compared."""
    threads = environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    network = ""
    with suppress(OSError):  # containers on one machine may each have a network of their own
        network = os.readlink("/proc/self/ns/net")
    return {
        "cpus": sorted(os.sched_getaffinity(0)),
        "threads": decimal(threads),
        "host": asdict(own_host(environ)),
        "machine": f"{host_identity()}/{network}",
        "environ": {
            name: text if is_shown(name) else hashlib.sha256(text.encode()).hexdigest()[:8]
            for name, text in environ.items()
            if name.startswith(_COMPARED) and name != "XFFL_HOST"
        },
    }


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


# The checks of a host -------------------------------------------------------------------------------------------------


class HostChecks:
    """The checks of one host: first of itself, then of what it finds of the others."""

    def __init__(self, request: Request, environ: Mapping[str, str]) -> None:
        """Start importing torch, which takes long."""
        self._request = request
        self._environ = environ
        self._files = resource.getrlimit(resource.RLIMIT_NOFILE)  # rank 0 raises its own later
        self._listeners: list[socket.socket] = []
        self._torch: Program | None = None
        if request.with_torch:
            full = {**os.environ, **environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
            if environ.get("XFFL_IFNAME"):
                full["GLOO_SOCKET_IFNAME"] = environ["XFFL_IFNAME"]
            script = Path(__file__).with_name("torch_pair.py")
            self._torch = Program([sys.executable, str(script), str(request.timeout_s)], full)

    def answer(self, request: Message) -> Message:
        """Answer a request, by ``failed`` where a check raises: whatever is wrong with a host is reported."""
        try:
            asked = read_request(request)
            return self.meet(asked) if "folder" in asked else self.probe(asked["machines"], asked["ranks"])
        except Exception as error:  # noqa: BLE001  # whatever it is
            return {"failed": f"{type(error).__name__}: {error}"}

    def probe(self, machines: int, ranks: int) -> Message:
        """Check this host, for a job of so many machines and ranks; return findings and what others must know of it."""
        versions, interfaces = find_versions(), list_interfaces()
        network, address = check_interfaces(self._environ, machines, interfaces)
        if machines == 1 and not any(self._environ.get(name) for name in _NAMES):
            address = LOOPBACK  # as stores and gloo in a job of one host
        gpus, count = check_gpus("gpu" in self._request.needs, self._environ)
        findings = [
            *check_packages(versions),
            gpus,
            *network,
            *check_limits(ranks, self._files),
        ]
        report: Message = {}
        if self._torch is not None:
            loopback = next((i.name for i in interfaces if i.address == LOOPBACK), None)
            with suppress(OSError):  # it has ended, and tells why
                self._torch.send({"address": address or "", "loopback": loopback if address == LOOPBACK else None})
            report = _hear(self._torch, import_limit_s(self._request.timeout_s))
            findings.append(check_torch(report, count, self._environ))
        if ranks > 1:
            # Linux completes connections to a port with a listener, up to the backlog: nobody needs to accept them.
            # Where no address is found, which is an error above, the others try that from which the host has come.
            ports = (free_port(), 0)
            self._listeners = [socket.create_server((address or "", port), backlog=256) for port in ports]
        return {
            "findings": [asdict(finding) for finding in findings],
            "versions": versions,
            "torch": report,
            "address": address,
            "addresses": [interface.address for interface in interfaces if interface.address],
            "ports": [int(listener.getsockname()[1]) for listener in self._listeners],
            "store": report.get("port"),
            "nccl": nccl_of(report),
            "run": self._visit_run(self._torch if "port" in report else None),
        }

    def _visit_run(self, program: Program | None) -> Message | None:
        """Look at the elastic run that is asked for, and with torch into the stores of its cells."""
        if self._request.elastic is None:
            return None
        timeout_s = self._request.timeout_s
        read_proofs = None if program is None else partial(_read_proofs, program, timeout_s)
        return visit_run(self._request.elastic, timeout_s, self._environ, read_proofs)

    def meet(self, table: Message) -> Message:
        """Check what this host finds of the other ``hosts``, in the ``folder``, and by all-reduces in its ``pairs``."""
        pairs: list[list[Any]] = table["pairs"]
        results: list[Message] = []
        program = self._torch if pairs else None  # pairs are only given to hosts whose torch has answered
        if program is not None:
            program.send({"pairs": pairs})  # beside the other checks
        findings = {"folder": visit_folder(**table["folder"]), **try_hosts(table["hosts"], self._request.timeout_s)}
        if program is not None:
            answer = _hear(program, self._request.timeout_s * (1 + len(pairs) // THREADS) + _SLACK_S)
            results = answer.get("results") or [{"error": answer["error"], "is_silent": True}] * len(pairs)
        return {**findings, "pairs": results}

    def close(self) -> None:
        """End what was started."""
        for owned in (self._torch, *self._listeners):
            if owned is not None:
                owned.close()


def _hear(program: Program, timeout_s: float) -> Message:
    """Return the next message of the process with torch, or its ``error``."""
    try:
        return program.receive(timeout_s)
    except OSError as error:
        return {"error": str(error)}


def _read_proofs(program: Program, timeout_s: float, stores: Message) -> Message:
    """Return by cell what the process with torch reads from the stores of an elastic run's cells, or its error."""
    program.send({"stores": list(stores.values()), "key": PROOF_KEY})
    answer = _hear(program, timeout_s * (1 + len(stores) // THREADS) + _SLACK_S)
    results = answer.get("results") or [{"error": answer["error"]}] * len(stores)
    return dict(zip(stores, results, strict=True))


def import_limit_s(timeout_s: float) -> float:
    """Return how long importing torch may take; a cold file system needs a minute."""
    return 45.0 + timeout_s


def take_part(line: Line, facts: Message, checks: HostChecks | None) -> bool:
    """Answer rank 0 as one rank, with the checks of the host if it is the first one there; return if it ends in order.

    Rank 0 hears facts; when it says ``machines`` and ``ranks`` the time and the probe; then what is found of others.
    """
    try:
        line.send(facts)
    except OSError:
        return False
    return answer_requests(line, checks)


def answer_requests(line: Line, checks: HostChecks | None) -> bool:
    """Answer rank 0 until it says that it has ended; return if it does."""
    try:
        while "end" not in (request := line.receive(_PATIENCE_S)):
            if checks is None:
                return False  # what asks all ranks of a host is not rank 0 of the doctor
            if "machines" in request:
                line.send({"time": time.time()})
            line.send(checks.answer(request))
    except OSError:
        return False
    return True


def try_hosts(hosts: Mapping[str, Message], timeout_s: float) -> Message:
    """Resolve the ``names`` of other hosts, connect to their ports, and return the ``failures``: key, port, reason."""
    attempts = [(key, host["address"], port) for key, host in hosts.items() for port in host["ports"]]
    limit_s = min(_CONNECT_S, timeout_s)

    with ThreadPoolExecutor(THREADS) as pool:
        names = list(pool.map(lambda host: resolve(host["name"]), hosts.values()))
        reasons = list(pool.map(lambda attempt: connection_error(attempt[1], attempt[2], limit_s), attempts))
    return {
        "names": dict(zip(hosts, names, strict=True)),
        "failures": [[key, port, why] for (key, _, port), why in zip(attempts, reasons, strict=True) if why],
        "tried": len(attempts),
    }


# The shared folder ----------------------------------------------------------------------------------------------------


def visit_folder(path: str, token: str, host: int, hosts: int, patience_s: float) -> Message:
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
    answer: Message = {"seen_s": None, "torn": 0, "error": None, "free": 0, "kind": kind, "unseen": []}
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
        answer["free"] = shutil.disk_usage(folder).free
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


def main(job: Message) -> None:
    """Be the probe of a host that ssh has reached; its first message tells about the host, or why it is ``refused``."""
    signal.alarm(_PATIENCE_S)
    os.environ.update(job["environ"])
    line = Line()
    if (why := refusal(job)) is not None:
        line.send({"refused": why})
        return
    checks = HostChecks(Request(**job["request"]), os.environ)
    try:
        take_part(line, rank_facts(os.environ), checks)
    finally:
        checks.close()
