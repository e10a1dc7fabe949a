"""Ways to the hosts of a job: this process alone, the ranks of a launcher, or ssh to the hosts of a list.

Under a launcher each rank connects to rank 0, which asks the first one of each host. From then on the ways are the same
(:mod:`~xffl.cluster.doctor.compare`).
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import accumulate

from xffl.checks import shorten
from xffl.cluster.batch import find_job
from xffl.cluster.cells import arrange
from xffl.cluster.doctor import probe
from xffl.cluster.doctor.compare import Examination, Peer, Report, check_cells, merge
from xffl.cluster.doctor.gathering import HELLO_S, Arrival, gather
from xffl.cluster.doctor.lines import Line, Message, Program
from xffl.cluster.doctor.messages import read_facts, read_welcome
from xffl.cluster.doctor.probe import ERROR, OK, WARNING, Finding, HostChecks, Request, answer_requests, take_part
from xffl.cluster.environment import ProcessEnvironment, detect_environment
from xffl.cluster.launch.affinity import limit_threads
from xffl.cluster.launch.ssh import job_of_hosts, shared_environment, ssh_command
from xffl.cluster.network import LOOPBACK, SLURM_PORTS, host_identity, interface_address
from xffl.cluster.recognition.find import find_launcher
from xffl.cluster.sizes import Federation
from xffl.cluster.slurm.allocation import Host
from xffl.compat.datasets import ENVIRON
from xffl.errors import ConfigError, LaunchError, XfflError

__all__ = ["examine", "examine_hosts"]

_Tell = Callable[[Report], object]  # what is done with a report

_MPI_LIMIT_S = 60.0
_SSH_S = 40.0  # for ssh to answer: its own limit for a connection is 20 s, and Python has to start


def examine(request: Request, tell: _Tell, environ: Mapping[str, str] = ENVIRON) -> int:
    """Check this host, or all hosts of a job; under a launcher every rank calls it.

    Rank 0 gives the report about all hosts to ``tell``. A host whose ranks cannot reach rank 0 gives its own. The exit
    code is 1 where this process reported an error, else 0.
    """
    environ = dict(environ)
    row = find_launcher(environ)
    is_head = row is None or environ.get(row.variables["node_local_rank"], "0") == "0"
    place, known = _find_place(tell if is_head else None, environ)
    if place.world_size > 1:
        is_head = place.node_local_rank == 0 or place.rank == 0
    elif not is_head:
        return 0
    checks = HostChecks(request, environ) if is_head else None
    facts = {**probe.rank_facts(environ), "rank": place.rank, "world_size": place.world_size}
    facts["node"] = _number_of_host() if place.node_rank is None else place.node_rank
    facts["is_head"] = place.node_local_rank == 0
    try:
        if place.world_size == 1 and request.federated is not None:
            known.append(_check_cells_of_job(request.federated, request.federated_by, environ))
            request = replace(request, federated=None)
        port = _meeting_port(place, environ)
        if checks is None or place.rank > 0:
            return _follow(request, place=place, port=port, facts=facts, checks=checks, tell=tell)
        report = _lead(request, place=place, port=port, facts=facts, checks=checks, known=known)
    finally:
        if checks is not None:
            checks.close()
    tell(report)
    return report.exit_code


def examine_hosts(hosts: Sequence[Host], request: Request, environ: Mapping[str, str]) -> Report:
    """Check the hosts of a list over ssh; those that cannot be reached are findings."""
    variables = shared_environment(environ)
    limit_threads(variables)
    job = {**job_of_hosts(variables), "request": asdict(request)}
    firsts = accumulate((host.slots for host in hosts), initial=0)
    with ThreadPoolExecutor(min(32, len(hosts))) as pool:
        reached = list(pool.map(lambda host, first: _reach(host, first, job, environ), hosts, firsts))
    peers = [peer for peer in reached if isinstance(peer, Peer)]
    failures = [finding for finding in reached if isinstance(finding, Finding)]
    if peers:
        failures.insert(0, Finding("ssh", OK, f"{len(peers)} of {len(hosts)} hosts answer without a question"))
    try:
        report = Examination(request, peers, sum(host.slots for host in hosts), failures).run()
    finally:
        for peer in peers:
            peer.line.close()
    return report if peers else replace(report, hosts=tuple(host.name for host in hosts))


def _reach(host: Host, first: int, job: Message, environ: Mapping[str, str]) -> Peer | Finding:
    """Start the agent of a host that takes ranks from ``first`` on, or tell what keeps it from taking them."""
    line: Program | None = None
    try:
        line = Program(ssh_command(host, environ, "xffl.cluster.doctor.probe"), environ)
        line.send({**job, "environ": {**job["environ"], "XFFL_HOST": host.name}})
        answer = line.receive(_SSH_S)
        if "refused" not in answer:
            facts = read_facts(answer)
            ranks = [{**facts, "host": asdict(host), "rank": first + at} for at in range(host.slots)]
            return Peer(line, ranks, (host.address or host.name).rpartition("@")[2])
        why, advice = f"used: {str(answer['refused'])[:1000]}", "use the same environment and folder on all hosts"
    except (OSError, ValueError) as error:
        why = f"{'reached' if line is None or isinstance(error, TimeoutError) else 'used'}: {error}"
        python = environ.get("XFFL_PYTHON") or sys.executable
        advice = f"try ssh -o BatchMode=yes {host.address or host.name} {python} --version; XFFL_SSH and XFFL_PYTHON "
        advice += "name others"
    if line is not None:
        line.close()
    return Finding("ssh", status=ERROR, text=f"cannot be {why}", advice=advice, host=host.name)


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


def _lead(
    request: Request, place: ProcessEnvironment, port: int, facts: Message, checks: HostChecks, known: list[Finding]
) -> Report:
    """Wait for the other ranks, if there are any, and check all hosts as rank 0."""
    own, other = map(Line, socket.socketpair())
    threading.Thread(target=take_part, args=(other, facts, checks), daemon=True).start()
    peers = {facts["node"]: Peer(own, [own.receive(request.timeout_s)])}
    lines, ranks = [own], place.world_size
    if ranks > 1:
        peers[facts["node"]].address = place.master_addr
        where = f"{place.master_addr}:{port}"
        met: dict[int, Arrival] = {}
        try:
            met = gather(str(place.master_addr), port, ranks, request.timeout_s, is_local=place.is_on_one_host)
        except (OSError, LaunchError) as error:
            text = f"rank 0 cannot listen at port {port} ({error})"
            known.append(Finding("meeting", ERROR, text, "set MASTER_PORT; another job may use this one"))
        else:
            # The first rank of a host answers for it; the others only wait for the end.
            for there in met.values():
                lines.append(there.line)
                if there.facts["is_head"]:
                    peers.setdefault(there.facts["node"], Peer(there.line, [], there.address))
            for there in met.values():
                if there.facts["node"] in peers:
                    peers[there.facts["node"]].ranks.append(there.facts)
            text = f"{ranks} ranks of {len(peers)} host{'s' * (len(peers) > 1)} met at {where} ({place.launcher})"
            if absent := [rank for rank in range(1, ranks) if rank not in met]:
                text = f"rank {shorten(absent)} did not connect to {where} within {request.timeout_s:g} s"
            advice = "see what its host reports; open the port, name the interface (XFFL_CONTROL_IFNAME), or --timeout"
            known.append(Finding("meeting", ERROR if absent else OK, text, advice))
    try:
        return Examination(request, list(peers.values()), ranks, known).run()
    finally:
        for line in lines:
            with suppress(OSError):
                line.send({"end": True})
            line.close()


def _follow(
    request: Request, place: ProcessEnvironment, port: int, facts: Message, checks: HostChecks | None, tell: _Tell
) -> int:
    """Connect to rank 0, and answer for this host if this is its first rank."""
    address = LOOPBACK if place.is_on_one_host else str(place.master_addr)
    deadline = time.monotonic() + request.timeout_s
    while True:
        line: Line | None = None
        try:
            line = Line(socket.create_connection((address, port), max(deadline - time.monotonic(), 0.1)))
            line.send(facts)
            read_welcome(line.receive(max(deadline - time.monotonic(), HELLO_S)))
            break
        except (OSError, ConfigError) as error:
            why = getattr(error, "strerror", None) or str(error)
            if line is not None:
                line.close()
                why = f"something answers there, but not as rank 0: {why}"
        if time.monotonic() + 0.1 < deadline:
            time.sleep(0.1)
            continue
        if checks is not None:
            text = f"rank {place.rank} cannot reach rank 0 at {address}:{port} ({why})"
            advice = "see the lines on interface and names; check the address (XFFL_CONTROL_IFNAME, MASTER_ADDR), and "
            advice += "open the port between the compute nodes"
            probe = checks.answer({"machines": place.node_world_size or place.world_size, "ranks": place.world_size})
            findings = [Finding(**each) for each in probe.get("findings", [])]
            findings, name = [*findings, Finding("meeting", ERROR, text, advice)], facts["host"]["name"]
            tell(Report(merge([replace(finding, host=name) for finding in findings], [name]), (name,)))
        return 1
    try:
        return 0 if answer_requests(line, checks) else 1
    finally:
        line.close()


def _meeting_port(place: ProcessEnvironment, environ: Mapping[str, str]) -> int:
    """Return the port to meet at: the rendezvous's, unless torchrun's agent listens there already."""
    if place.master_port is None:  # one process meets nobody
        return 0
    if place.launcher != "torchrun" or environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() != "true":
        return place.master_port
    first, last = SLURM_PORTS
    return first + place.master_port * 7919 % (last - first + 1)


def _check_cells_of_job(federated: Federation, by: str, environ: Mapping[str, str]) -> Finding:
    """Check the cells with the hosts of the job in whose batch script this process runs."""
    try:
        allocation = find_job(environ, needs_switches=str(federated).startswith("auto"))
        if allocation is None:
            advice = "run it inside the job: in its batch script, or with srun, mpirun or --hosts"
            return Finding("cells", WARNING, "not checked: the hosts of the job are not known here", advice)
        hosts = arrange(allocation.hosts, federated).hosts if isinstance(federated, str) else allocation.hosts
    except XfflError as error:
        return Finding("cells", ERROR, str(error), f"correct {by}")
    return check_cells(federated, by, [host for host in hosts for _ in range(host.slots)])[1]
