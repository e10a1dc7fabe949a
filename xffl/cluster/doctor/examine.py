"""Ways to the hosts of a job: this process alone, the ranks of a launcher, or ssh to the hosts of a list.

On each way the hosts do the same (:mod:`~xffl.cluster.doctor.member`).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import accumulate
from typing import Any

from xffl.cluster.batch import find_job
from xffl.cluster.cells import arrange
from xffl.cluster.doctor.compare import check_cells, merge
from xffl.cluster.doctor.member import PATIENCE_S, Part, take_part
from xffl.cluster.doctor.messages import ERROR, LARGEST, OK, WARNING, Finding, Report, check_value
from xffl.cluster.doctor.probe import Request
from xffl.cluster.environment import ProcessEnvironment, detect_environment
from xffl.cluster.launch.affinity import limit_threads
from xffl.cluster.launch.ssh import job_of_hosts, shared_environment, ssh_command
from xffl.cluster.launch.ssh_agent import free_port, refusal
from xffl.cluster.network import LOOPBACK, SLURM_PORTS, host_identity, interface_address
from xffl.cluster.recognition.find import find_launcher
from xffl.cluster.sizes import Federation
from xffl.cluster.slurm.allocation import Host
from xffl.compat.datasets import ENVIRON
from xffl.errors import LaunchError, XfflError
from xffl.json_text import parse_json

__all__ = ["examine", "examine_hosts"]

_Tell = Callable[[Report], object]  # what is done with a report

_MPI_LIMIT_S = 60.0
_SSH_S = 40.0  # for ssh to answer: its own limit for a connection is 20 s, and Python has to start


def examine(request: Request, tell: _Tell, environ: Mapping[str, str] = ENVIRON) -> int:
    """Check this host, or all hosts of a job; under a launcher every rank calls it.

    Rank 0 gives the report about all hosts to ``tell``. A host whose ranks cannot reach rank 0 gives its own. The exit
    code is 1 where this process reported an error, or cannot do its part, else 0.
    """
    environ = dict(environ)
    row = find_launcher(environ)
    is_head = row is None or environ.get(row.variables["node_local_rank"], "0") == "0"
    place, known = _find_place(tell if is_head else None, environ)
    if place.world_size > 1:
        is_head = place.node_local_rank == 0 or place.rank == 0
    if not is_head and (place.world_size == 1 or not request.with_torch):
        return 0
    if request.federated is not None and (place.world_size == 1 or not request.with_torch):
        known.append(_check_cells_of_job(request.federated, request.federated_by, environ, place.world_size))
        request = replace(request, federated=None)
    return take_part(request, _part_of(place, environ, is_head=is_head), known, tell)


def _part_of(place: ProcessEnvironment, environ: Mapping[str, str], *, is_head: bool) -> Part:
    """Return what the program of this rank stands for."""
    return Part(
        number=place.rank,
        count=place.world_size,
        ranks=(place.rank,),
        world_size=place.world_size,
        local_size=place.node_local_size,
        node=_number_of_host() if place.node_rank is None else place.node_rank,
        is_head=is_head,
        machines=1 if place.is_on_one_host else place.node_world_size or place.world_size,
        address=LOOPBACK if place.is_on_one_host else str(place.master_addr),
        port=_meeting_port(place, environ),
        launcher=place.launcher,
    )


def examine_hosts(hosts: Sequence[Host], request: Request, environ: Mapping[str, str]) -> Report:
    """Check the hosts of a list over ssh; those that cannot be reached are findings."""
    variables = shared_environment(environ)
    limit_threads(variables)
    job = {**job_of_hosts(variables), "request": asdict(request)}
    firsts = list(accumulate((host.slots for host in hosts), initial=0))
    with ThreadPoolExecutor(len(hosts)) as pool:
        reached = list(pool.map(lambda host: _run_there(host, {**job, "part": None}, environ, _SSH_S), hosts))
        findings = [answer for answer in reached if isinstance(answer, Finding)]
        there = [at for at, answer in enumerate(reached) if not isinstance(answer, Finding)]
        if not there:
            return Report(tuple(findings), tuple(host.name for host in hosts), firsts[-1])
        findings.insert(0, Finding("ssh", OK, f"{len(there)} of {len(hosts)} hosts answer without a question"))
        first = hosts[there[0]]
        parts = [
            Part(
                number=number,
                count=len(there),
                ranks=tuple(range(firsts[at], firsts[at + 1])),
                world_size=firsts[-1],
                local_size=hosts[at].slots,
                node=at,
                machines=len(there),
                address=environ.get("MASTER_ADDR") or (first.address or first.name).rpartition("@")[2],
                port=check_value(int, reached[there[0]].get("ready")),
                launcher="ssh",
                host=hosts[at],
            )
            for number, at in enumerate(there)
        ]

        def run(part: Part) -> Any:
            assert part.host is not None
            return _run_there(part.host, {**job, "part": asdict(part)}, environ, PATIENCE_S + _SSH_S)

        answers = list(pool.map(run, parts))
    findings += [answer for answer in answers if isinstance(answer, Finding)]
    lines = [answer["report"] for answer in answers if not isinstance(answer, Finding)]
    reports = [check_value(Report, report) for report in lines if report is not None]
    names = tuple(dict.fromkeys(name for report in reports for name in report.hosts))
    findings += [finding for report in reports for finding in report.findings]
    return Report(merge(findings, names), names, firsts[-1])


def _run_there(host: Host, job: Mapping[str, Any], environ: Mapping[str, str], limit_s: float) -> Any:
    """Run :func:`main` on a host, and return the last message that it prints; or tell what keeps it from being used."""
    variables = {**job["environ"], "XFFL_HOST": host.name}
    try:
        ran = subprocess.run(
            ssh_command(host, environ, "xffl.cluster.doctor.examine"), env=dict(environ), capture_output=True,
            input=(json.dumps({**job, "environ": variables}) + "\n").encode(), timeout=limit_s, check=False,
        )  # fmt: skip
        for line in reversed(ran.stdout.splitlines()):  # a login script may print something, too
            with suppress(ValueError):
                message = parse_json(line, limit=LARGEST, is_finite=True)
                if not isinstance(message, dict):
                    continue
                if "refused" in message:
                    why, advice = str(message["refused"])[:1000], "use the same environment and folder on all hosts"
                    return Finding("ssh", status=ERROR, text=f"cannot be used: {why}", advice=advice, host=host.name)
                if ran.returncode == 0 or message.get("report", message) is not None:
                    return message  # else it was cut off before it could tell
        said = [line for line in ran.stderr.decode(errors="replace").splitlines() if line.strip()]
        why = f"used: {said[-1].strip()[:200] if said else f'exit code {ran.returncode}'}"
    except subprocess.TimeoutExpired:
        why = "reached: it did not answer in time"
    except (OSError, ValueError) as error:
        why = f"reached: {error}"
    python = environ.get("XFFL_PYTHON") or sys.executable
    advice = (
        f"try ssh -o BatchMode=yes {host.address or host.name} {python} --version; XFFL_SSH and XFFL_PYTHON name others"
    )
    return Finding("ssh", status=ERROR, text=f"cannot be {why}", advice=advice, host=host.name)


def main(job: Mapping[str, Any]) -> None:
    """Do on a host that ssh has reached what a job asks for, and print the answer as a line of JSON.

    That is a port which is free there, or, once the host has a part in the job, the report that it has to tell.
    """
    signal.alarm(2 * PATIENCE_S)
    os.environ.update(job["environ"])
    if (why := refusal(job)) is not None:
        print(json.dumps({"refused": why}))
    elif job["part"] is None:
        print(json.dumps({"ready": free_port()}))
    else:
        part = job["part"]
        part["host"] = check_value(Host, part["host"])
        options = job["request"]
        sizes = options["federated"]
        request = Request(**{**options, "federated": tuple(sizes) if isinstance(sizes, list) else sizes})
        print(json.dumps({"report": None}), flush=True)
        take_part(request, Part(**part), [], lambda report: print(json.dumps({"report": asdict(report)})))


def _find_place(tell: _Tell | None, environ: Mapping[str, str]) -> tuple[ProcessEnvironment, list[Finding]]:
    """Find out where this rank stands; where that is not possible it stands alone, and a finding says why."""
    advice = "see the lines above; xffl env shows what the launcher has set"

    def give_up() -> None:
        text = f"the ranks could not communicate over MPI within {_MPI_LIMIT_S:g} s"
        hint = "name the network for MPI (OMPI_MCA_btl_tcp_if_include, UCX_NET_DEVICES, or -iface with MPICH)"
        if tell is not None:
            tell(Report((Finding("launcher", ERROR, text, hint),)))
        os._exit(1)

    watch = threading.Timer(_MPI_LIMIT_S, give_up)
    watch.daemon = True
    watch.start()  # those of an MPI launcher agree on where to meet over MPI
    try:
        return detect_environment(_without_bad_interfaces(environ)), []
    except XfflError as error:
        return ProcessEnvironment(), [Finding("launcher", ERROR, str(error), advice)]
    finally:
        watch.cancel()


def _number_of_host() -> int:
    """Return a number that all ranks on this host find, and no others, where nobody has numbered the nodes."""
    return int.from_bytes(hashlib.sha256(host_identity().encode()).digest()[:6], "big")


def _without_bad_interfaces(environ: Mapping[str, str]) -> dict[str, str]:
    """Leave out interfaces that cannot be used, so that the ranks meet all the same; their check reports them."""
    variables = dict(environ)
    for variable in ("XFFL_IFNAME", "XFFL_CONTROL_IFNAME", "GLOO_SOCKET_IFNAME"):
        with suppress(LaunchError):
            if not interface_address(variables.get(variable, "").partition(",")[0]).startswith("127."):
                continue
        variables.pop(variable, None)
    return variables


def _meeting_port(place: ProcessEnvironment, environ: Mapping[str, str]) -> int:
    """Return the port to meet at: the rendezvous's, unless torchrun's agent listens there already."""
    if place.master_port is None:  # one process meets nobody
        return 0
    if place.launcher != "torchrun" or environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() != "true":
        return place.master_port
    first, last = SLURM_PORTS
    return first + place.master_port * 7919 % (last - first + 1)


def _check_cells_of_job(federated: Federation, by: str, environ: Mapping[str, str], world_size: int) -> Finding:
    """Check the cells with the hosts of the job in whose batch script this process runs."""
    if world_size > 1 and not isinstance(federated, str):
        return check_cells(federated, by, [Host("")] * world_size)[1]
    try:
        allocation = find_job(environ, needs_switches=str(federated).startswith("auto"))
        if allocation is None:
            advice = "run it inside the job: in its batch script, or with srun, mpirun or --hosts"
            return Finding("cells", WARNING, "not checked: the hosts of the job are not known here", advice)
        hosts = arrange(allocation.hosts, federated).hosts if isinstance(federated, str) else allocation.hosts
    except XfflError as error:
        return Finding("cells", ERROR, str(error), f"correct {by}")
    return check_cells(federated, by, [host for host in hosts for _ in range(host.slots)])[1]
