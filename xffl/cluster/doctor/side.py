"""What one host does for the doctor: it looks at itself, and answers what rank 0 asks."""

from __future__ import annotations

import hashlib
import os
import resource
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from xffl.cluster.cells import Federation
from xffl.cluster.doctor.findings import Finding
from xffl.cluster.doctor.folder import visit
from xffl.cluster.doctor.host import check_interfaces, check_limits, check_packages, find_versions, rank_facts
from xffl.cluster.doctor.meeting import Message
from xffl.cluster.doctor.pairs import TorchProcess, check_torch, child_environ
from xffl.cluster.doctor.programs import check_gpus, check_slurm
from xffl.cluster.doctor.reach import Listeners, try_hosts
from xffl.cluster.environment import ProcessEnvironment
from xffl.cluster.hosts import host_identity
from xffl.cluster.network import list_interfaces
from xffl.cluster.slurm.allocation import own_host

__all__ = ["HostSide", "Request", "findings_of", "import_limit_s", "introduce", "is_shown"]

_COMPARED = ("XFFL_", "NCCL_", "GLOO_", "TORCH_")
_SHOWN = ("NCCL_", "GLOO_")
_SHOWN_ALSO = ("XFFL_IFNAME", "XFFL_CONTROL_IFNAME", "XFFL_FEDERATED", "XFFL_HSDP")
_OWN_VARIABLES = ("XFFL_HOST",)
_NETWORK = Path("/proc/self/ns/net")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the doctor is asked to look at."""

    pair_program: Path
    """Script of the processes with torch."""
    shared: Path | None = None
    """Folder that all hosts are to share; ``None`` for the one that the process is in."""
    needs: frozenset[str] = field(default_factory=frozenset)
    """What is an error where it is missing: ``mpi``, ``slurm``, ``gpu``."""
    federated: Federation | None = None
    """Sizes of the cells or a rule for them, whose pairs add with each other; hosts do where it is ``None``."""
    federated_by: str = "--federated"
    """What says so."""
    with_torch: bool = True
    timeout_s: float = 15.0
    """How long one wait for another host may take."""


def introduce(place: ProcessEnvironment | None, environ: Mapping[str, str]) -> Message:
    """Return what every rank tells rank 0 about itself at once.

    :param place: Where it stands.
    :param environ: Its environment.
    :return: Facts for comparison.
    """
    found = {**rank_facts(environ), "host": asdict(own_host(environ)), "machine": _machine()}
    found["node"] = 0 if place is None else place.node_rank
    found["is_head"] = place is None or place.node_local_rank == 0
    found["environ"] = {
        name: text if is_shown(name) else hashlib.sha256(text.encode()).hexdigest()[:8]
        for name, text in environ.items()
        if name.startswith(_COMPARED) and name not in _OWN_VARIABLES
    }
    return found


def is_shown(name: str) -> bool:
    """Tell whether a variable's value may be sent and printed; of others, which may hold secrets, it is a hash."""
    return name.startswith(_SHOWN) or name in _SHOWN_ALSO


class HostSide:
    """The checks of one host, run by its first rank."""

    def __init__(
        self,
        request: Request,
        place: ProcessEnvironment | None,
        launcher: str,
        mpi: Finding,
        environ: Mapping[str, str],
    ) -> None:
        """Start what takes long: a process that imports torch.

        :param request: What to look at.
        :param place: Where this rank stands; ``None`` where that could not be found out.
        :param launcher: Row of the table of launchers that started this process.
        :param mpi: What was found about MPI already.
        :param environ: Environment to read.
        """
        self._mpi = mpi
        self._files = resource.getrlimit(resource.RLIMIT_NOFILE)  # rank 0 raises its own later
        self.request, self.place, self.launcher, self.environ = request, place, launcher, environ
        self.node = 0 if place is None else place.node_rank
        self.handlers = {
            "look": lambda question: self.look(question["machines"]),
            "reach": self.reach,
            "folder": lambda question: visit({**question, "node": self.node}),
            "torch": lambda question: self.torch(question["count"]),
            "pairs": self.pairs,
        }
        self._listeners: Listeners | None = None
        self._gpus = 0
        self._torch: list[TorchProcess] = []
        if request.with_torch:
            self._start_torch()

    def look(self, machines: int) -> Message:
        """Look at this host, and listen for the others.

        :param machines: Hosts of the job that are different machines.
        :return: Findings, and what the others must know to reach this host.
        """
        world_size = 1 if self.place is None else self.place.world_size
        versions = find_versions()
        interfaces = list_interfaces()
        network, address = check_interfaces(self.environ, machines, interfaces)
        gpus, self._gpus = check_gpus("gpu" in self.request.needs, self.environ)
        findings = [
            *check_packages(versions),
            self._mpi,
            check_slurm(self.launcher, "slurm" in self.request.needs, self.environ),
            gpus,
            *network,
            *check_limits(world_size, self._files),
        ]
        token = f"{socket.gethostname()}/{self.node}/{os.getpid()}/{time.time_ns()}"
        self._listeners = Listeners(token) if machines > 1 or world_size > 1 else None
        return {
            "findings": [asdict(finding) for finding in findings],
            "versions": versions,
            "address": address,
            "addresses": [interface.address for interface in interfaces if interface.address],
            "ports": [] if self._listeners is None else self._listeners.ports,
            "token": token,
        }

    def reach(self, question: Message) -> Message:
        """Try to reach the other hosts.

        :param question: ``hosts`` as :func:`try_hosts` takes them, ``timeout_s``.
        :return: What :func:`try_hosts` found.
        """
        return try_hosts(question["hosts"], question["timeout_s"])

    def torch(self, count: int) -> Message:
        """Tell what torch is here.

        :param count: Processes that will add with others.
        :return: ``finding``, and for each process what it told.
        """
        if not self.request.with_torch:
            return {"finding": None, "told": []}
        while len(self._torch) < count:
            self._start_torch()
        deadline = time.monotonic() + import_limit_s(self.request.timeout_s)
        told = [process.hear(deadline) for process in self._torch]
        return {"finding": asdict(check_torch(told[0], self._gpus, self.environ)), "told": told}

    def pairs(self, question: Message) -> Message:
        """Let this host's processes add with others in one round.

        :param question: ``turn``; ``processes``: what to tell those that take part, by number; ``limit_s``.
        :return: By number, what the process told; without ``turn`` where it told nothing.
        """
        chosen = {number: self._torch[int(number)] for number in question["processes"]}
        for number, process in chosen.items():
            process.tell(question["processes"][number])
        deadline = time.monotonic() + question["limit_s"]
        results = {}
        for number, process in chosen.items():
            told = process.hear(deadline)
            while told.get("turn", question["turn"]) != question["turn"]:
                told = process.hear(deadline)  # what comes late is of a round that is over
            results[number] = told
        return {"results": results}

    def close(self) -> None:
        """End what was started."""
        for process in self._torch:
            process.end()
        if self._listeners is not None:
            self._listeners.close()

    def _start_torch(self) -> None:
        environ = child_environ(self.environ)
        self._torch.append(TorchProcess(self.request.pair_program, environ, self.request.timeout_s))


def import_limit_s(timeout_s: float) -> float:
    """Return how long importing torch may take; a cold file system needs a minute."""
    return 45.0 + timeout_s


def findings_of(answer: Mapping[str, Any]) -> list[Finding]:
    """Return the findings of an answer to ``look``.

    :param answer: The answer.
    :return: The findings.
    """
    return [Finding(**finding) for finding in answer["findings"]]


def _machine() -> str:
    """Name this machine and its network: containers and namespaces on one machine may each have their own."""
    try:
        network = os.readlink(_NETWORK)
    except OSError:
        network = ""
    return f"{host_identity()}/{network}"
