"""The checks of a whole job: the agents of its hosts are found and asked, and their answers compared.

There are three ways to the agents: this process alone, the ranks of a launcher (each first rank of a host connects to
rank 0, which asks), and ssh to the hosts of a list. From then on they are the same.
"""

from __future__ import annotations

import os
import resource
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any

from xffl.checks import shorten
from xffl.cluster.cells import arrange, sizes_of_ranks
from xffl.cluster.doctor.agent import THREADS, HostChecks, Line, Message, Program, attempt, import_limit_s, take_part
from xffl.cluster.doctor.compare import (
    Report,
    compare_clocks,
    compare_environments,
    compare_folders,
    compare_names,
    compare_pairs,
    compare_ports,
    compare_versions,
    merge,
    partners,
)
from xffl.cluster.doctor.probe import (
    ERROR,
    MPI_LAUNCHERS,
    OK,
    WARNING,
    Finding,
    Request,
    check_mpi,
    check_threads,
    rank_facts,
)
from xffl.cluster.environment import ProcessEnvironment, detect_environment
from xffl.cluster.hosts import interface_address
from xffl.cluster.launch.affinity import limit_threads
from xffl.cluster.launch.launchers import LAUNCHERS
from xffl.cluster.launch.ssh import job_of_hosts, shared_environment, ssh_command
from xffl.cluster.network import SLURM_PORTS
from xffl.cluster.slurm.allocation import Host, find_allocation
from xffl.errors import LaunchError, XfflError
from xffl.topology import Topology

__all__ = ["Examination", "Peer", "examine", "examine_hosts"]

_MPI_LIMIT_S = 60.0
_SSH_S = 40.0
"""For ssh to answer: its own limit for a connection is 20 s, and Python has to start."""
_PROBE_S = 90.0
"""For a host's checks of itself, beside torch: four programs of 20 s each."""
_FOLDER_S = 10.0
_SLACK_S = 30.0
_HELLO_S = 3.0
"""How long a rank may be silent after it has connected; a stranger who is holds up the others for no longer."""
_TABLE = ("name", "address", "ports")
"""What a host is told of another one."""


# Ways to the agents ---------------------------------------------------------------------------------------------------


@dataclass
class Peer:
    """A host that answers."""

    line: Line
    ranks: list[Message]
    """Facts of its ranks."""
    address: str | None = None
    """Where its connection came from."""


def examine(request: Request, tell: Callable[[Report], None], environ: Mapping[str, str] | None = None) -> int:
    """Check this host, or all hosts of a job; under a launcher every rank calls it.

    Rank 0 gives the report about all hosts to ``tell``. A host whose ranks cannot reach rank 0 gives its own. The exit
    code is 1 where this process reported an error, else 0.
    """
    environ = dict(os.environ if environ is None else environ)
    row = next((row for row in LAUNCHERS if row.matches(environ)), None)
    launcher = "none" if row is None else row.name
    is_mpi = launcher in MPI_LAUNCHERS
    is_head = row is None or environ.get(row.variables["node_local_rank"], "0") == "0"
    # MPI_Init of a wrong library may end the whole job, so each rank checks it before. Elsewhere it can wait.
    mpi = check_mpi(launcher, "mpi" in request.needs, environ) if is_mpi else None
    place, wrong = _find_place(mpi, tell if is_head else None, environ)
    ranks = 1 if place is None else place.world_size
    if place is not None and ranks > 1:
        is_head = place.node_local_rank == 0 or place.rank == 0
    elif not is_head:
        return 0
    checks = HostChecks(request, environ, launcher, mpi) if is_head else None
    own = place or ProcessEnvironment()
    facts = {**rank_facts(environ), "rank": own.rank, "world_size": own.world_size, "node": own.node_rank}
    facts["is_head"] = own.node_local_rank == 0
    try:
        if place is not None and place.rank > 0:
            return _follow(request, place, facts, checks, tell, environ)
        assert checks is not None
        report = _lead(request, place, facts, checks, wrong, environ)
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
    found = [finding for finding in reached if isinstance(finding, Finding)]
    if peers:
        found.insert(0, Finding("ssh", OK, f"{len(peers)} of {len(hosts)} hosts answer without a question"))
    try:
        report = Examination(request, peers, sum(host.slots for host in hosts), found).run()
    finally:
        for peer in peers:
            peer.line.close()
    return replace(report, hosts=tuple(host.name for host in hosts)) if not peers else report


def _reach(host: Host, first: int, job: Message, environ: Mapping[str, str]) -> Peer | Finding:
    """Start the agent of a host that takes ranks from ``first`` on, or tell what keeps it from taking them."""
    line: Program | None = None
    try:
        line = Program(ssh_command(host, environ, "xffl.cluster.doctor.agent"), environ)
        line.send({**job, "environ": {**job["environ"], "XFFL_HOST": host.name}})
        facts = line.receive(_SSH_S)
        if "refused" not in facts:
            ranks = [{**facts, "host": asdict(host), "rank": first + at} for at in range(host.slots)]
            return Peer(line, ranks, (host.address or host.name).rpartition("@")[2])
        why, advice = f"used: {facts['refused']}", "use the same environment and folder on all hosts"
    except (OSError, ValueError) as error:
        why = f"{'reached' if line is None or isinstance(error, TimeoutError) else 'used'}: {error}"
        python = environ.get("XFFL_PYTHON") or sys.executable
        advice = f"try ssh -o BatchMode=yes {host.address or host.name} {python} --version; XFFL_SSH and XFFL_PYTHON "
        advice += "name others"
    if line is not None:
        line.close()
    return Finding("ssh", ERROR, f"cannot be {why}", advice, host.name)


def _find_place(
    mpi: Finding | None, tell: Callable[[Report], None] | None, environ: Mapping[str, str]
) -> tuple[ProcessEnvironment | None, list[Finding]]:
    """Find out where this rank stands, or why that cannot be found out."""
    advice = "see the lines above; xffl env shows what the launcher has set"
    if mpi is not None and mpi.status == ERROR:
        # MPI_Init of a wrong library may abort, or make each rank a world of its own.
        return None, [Finding("launcher", ERROR, "the other ranks are not looked for without a working MPI", advice)]

    def give_up() -> None:
        text = f"the ranks could not communicate over MPI within {_MPI_LIMIT_S:g} s"
        hint = "name the network for MPI (OMPI_MCA_btl_tcp_if_include, UCX_NET_DEVICES, or -iface with MPICH)"
        if tell is not None and mpi is not None:
            tell(Report((mpi, Finding("launcher", ERROR, text, hint))))
        os._exit(1)

    watch = threading.Timer(_MPI_LIMIT_S, give_up)
    watch.daemon = True
    if mpi is not None:
        watch.start()
    try:
        return detect_environment(_without_bad_interfaces(environ)), []
    except XfflError as error:
        return None, [Finding("launcher", ERROR, str(error), advice)]
    finally:
        watch.cancel()


def _without_bad_interfaces(environ: Mapping[str, str]) -> dict[str, str]:
    """Leave out interfaces that cannot be used, so that the ranks meet all the same; their check reports them."""
    found = dict(environ)
    for variable in ("XFFL_IFNAME", "XFFL_CONTROL_IFNAME", "GLOO_SOCKET_IFNAME"):
        try:
            is_usable = not interface_address(found.get(variable, "").partition(",")[0]).startswith("127.")
        except LaunchError:
            is_usable = False
        if not is_usable:
            found.pop(variable, None)
    return found


def _lead(
    request: Request,
    place: ProcessEnvironment | None,
    facts: Message,
    checks: HostChecks,
    before: list[Finding],
    environ: Mapping[str, str],
) -> Report:
    """Wait for the other ranks, if there are any, and check all hosts as rank 0."""
    own, other = map(Line, socket.socketpair())
    threading.Thread(target=take_part, args=(other, facts, checks), daemon=True).start()
    peers = {facts["node"]: Peer(own, [own.receive(request.timeout_s)])}
    ranks, met = 1, {}
    if place is None or place.world_size == 1:
        if request.federated is not None:
            before = [*before, _check_cells_of_job(request, environ)]
            request = replace(request, federated=None)
    else:
        ranks, port = place.world_size, _meeting_port(place, environ)
        peers[facts["node"]].address = place.master_addr
        try:
            met = _gather(port, ranks, request.timeout_s)
        except OSError as error:
            text = f"rank 0 cannot listen at port {port} ({error.strerror}); another job may use it"
            before = [*before, Finding("meeting", ERROR, text, "set MASTER_PORT")]
        else:
            # The first rank of a host answers for it; the others only wait for the end.
            for there, line, address in met.values():
                if there["is_head"]:
                    peers.setdefault(there["node"], Peer(line, [], address)).line = line
            for there, _, _ in met.values():
                if there["node"] in peers:
                    peers[there["node"]].ranks.append(there)
            before = [*before, _judge_meeting(met, place, port, len(peers), request.timeout_s)]
    try:
        return Examination(request, [peers[node] for node in sorted(peers)], ranks, before).run()
    finally:
        for line in (own, *(line for _, line, _ in met.values())):
            with suppress(OSError):
                line.send({"end": True})
            line.close()


def _judge_meeting(met: Collection[int], place: ProcessEnvironment, port: int, hosts: int, timeout_s: float) -> Finding:
    where = f"{place.master_addr}:{port}"
    if absent := [rank for rank in range(1, place.world_size) if rank not in met]:
        advice = "see what its host reports; open the port, name the interface (XFFL_CONTROL_IFNAME), or --timeout"
        text = f"rank {shorten(absent)} did not connect to {where} within {timeout_s:g} s"
        return Finding("meeting", ERROR, text, advice)
    text = f"{place.world_size} ranks of {hosts} host{'s' * (hosts > 1)} met at {where} ({place.launcher})"
    return Finding("meeting", OK, text)


def _gather(port: int, world_size: int, timeout_s: float) -> dict[int, tuple[Message, Line, str]]:
    """Wait for all other ranks: facts, line and address by rank; an OSError says that the port is taken."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # rank 0 needs one file for each rank
    met: dict[int, tuple[Message, Line, str]] = {}
    deadline = time.monotonic() + timeout_s
    with socket.create_server(("", port), backlog=min(world_size, 4096)) as listener:
        while len(met) < world_size - 1 and (left_s := deadline - time.monotonic()) > 0:
            listener.settimeout(left_s)
            try:
                connection, address = listener.accept()
            except ConnectionAbortedError:
                continue
            except OSError:  # the time is up, or no file is left, which the limit's finding tells
                break
            connection.settimeout(None)
            line = Line(connection)
            try:
                hello = line.receive(min(left_s, _HELLO_S))
            except OSError:
                hello = {}
            rank: Any = hello.get("rank")
            if hello.get("world_size") == world_size and rank in range(1, world_size) and rank not in met:
                met[rank] = hello, line, str(address[0])
            else:
                line.close()
    return dict(sorted(met.items()))


def _follow(
    request: Request,
    place: ProcessEnvironment,
    facts: Message,
    checks: HostChecks | None,
    tell: Callable[[Report], None],
    environ: Mapping[str, str],
) -> int:
    """Connect to rank 0, and answer for this host if this is its first rank."""
    address, port = str(place.master_addr), _meeting_port(place, environ)
    deadline = time.monotonic() + request.timeout_s
    while True:
        try:
            connection = socket.create_connection((address, port), max(deadline - time.monotonic(), 0.1))
            break
        except OSError as error:
            if time.monotonic() + 0.1 < deadline:
                time.sleep(0.1)
                continue
            if checks is None:
                return 1
            text = f"rank {place.rank} cannot reach rank 0 at {address}:{port} ({error.strerror or error})"
            advice = (
                "see the lines on interface and names; check the address (XFFL_CONTROL_IFNAME, MASTER_ADDR), and open "
                "the port between the compute nodes"
            )
            probed = attempt(checks.probe, place.node_world_size, place.world_size).get("findings", [])
            name = facts["host"]["name"]
            found = [*(Finding(**each) for each in probed), Finding("meeting", ERROR, text, advice)]
            tell(Report(merge([replace(finding, host=name) for finding in found], [name]), (name,)))
            return 1
    connection.settimeout(None)
    line = Line(connection)
    try:
        return 0 if take_part(line, facts, checks) else 1
    finally:
        line.close()


def _meeting_port(place: ProcessEnvironment, environ: Mapping[str, str]) -> int:
    """Return the port to meet at: the rendezvous's, unless torchrun's agent listens there already."""
    assert place.master_port is not None
    if place.launcher != "torchrun" or environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() != "true":
        return place.master_port
    first, last = SLURM_PORTS
    return first + place.master_port * 7919 % (last - first + 1)


# The examination ------------------------------------------------------------------------------------------------------


@dataclass
class Examination:
    """All checks of the hosts that answer, in their order. The first host is that of rank 0."""

    request: Request
    peers: Sequence[Peer]
    world_size: int
    findings: list[Finding] = field(default_factory=list)
    """What is known before."""

    def __post_init__(self) -> None:
        named = [str(peer.ranks[0]["host"]["name"]) for peer in self.peers]
        names = [f"{name}#{at}" if named.count(name) > 1 else name for at, name in enumerate(named)]
        self._hosts = dict(zip(names, self.peers, strict=True))
        self._failures: dict[str, Finding] = {}
        """By host, why it is not asked any more."""

    def run(self) -> Report:
        """Ask all hosts and compare their answers."""
        found = [*self.findings, *compare_environments([rank for peer in self.peers for rank in peer.ranks])]
        machines = len({peer.ranks[0]["machine"] for peer in self.peers})
        clocks = self._start(machines)
        probes = self._hear(_PROBE_S + import_limit_s(self.request.timeout_s))
        for name, probe in probes.items():
            found += [replace(Finding(**each), host=name) for each in probe["findings"]]
            probe["name"] = self._hosts[name].ranks[0]["host"]["name"]
            # Without a name or an interface that works, a host is at least known by where its connection came from.
            probe["address"] = probe["address"] or self._hosts[name].address or "127.0.0.1"
        if len(probes) > 1:
            found += compare_versions({name: probe["versions"] for name, probe in probes.items()})
            found += compare_clocks(clocks)
        found += [replace(check_threads(peer.ranks), host=name) for name, peer in self._hosts.items()]
        units, cells = self._place_units(list(probes))
        found += [*cells, *self._meet(probes, units, with_names=machines > 1), *self._failures.values()]
        names = tuple(self._hosts)
        if len(names) == 1:
            found = [replace(finding, host=finding.host or names[0]) for finding in found]
        return Report(merge(found, names), names, self.world_size)

    def _meet(
        self, probes: Mapping[str, Message], units: Sequence[tuple[str, str]], *, with_names: bool
    ) -> list[Finding]:
        """Let the hosts check what they find of each other, with an all-reduce of each pair of units."""
        names, wait_s = list(probes), min(_FOLDER_S, self.request.timeout_s)
        path = os.path.abspath(self.request.shared or os.curdir)
        folder = {"path": path, "token": secrets.token_hex(4), "hosts": len(names), "patience_s": wait_s}
        both = {(min(low, high), max(low, high)) for low in range(len(units)) for high in partners(low, len(units))}
        # A host without a store has a finding about its torch already.
        pairs = sorted(pair for pair in both if all(probes[units[at][1]]["store"] for at in pair))
        tasks: dict[str, list[tuple[tuple[int, int], int]]] = {name: [] for name in names}
        for pair in pairs:
            for rank in range(2):
                tasks[units[pair[rank]][1]].append((pair, rank))
        for number, name in enumerate(names):
            stores = [(pair, rank, probes[units[pair[0]][1]]) for pair, rank in tasks[name]]
            others = {names[at]: probes[names[at]] for at in partners(number, len(names))}
            table = {
                "hosts": {other: {key: probe[key] for key in _TABLE} for other, probe in others.items()},
                "folder": {**folder, "host": number},
                "pairs": [[str(pair), rank, lender["address"], lender["store"]] for pair, rank, lender in stores],
            }
            self._send(name, table)
        most = max(map(len, tasks.values()), default=0)
        answers = self._hear(self.request.timeout_s * (2 + most // THREADS) + 2 * wait_s + _SLACK_S)
        found: list[Finding] = []
        for answer in answers.values():
            answer["folder"]["unseen"] = [names[number] for number in answer["folder"]["unseen"]]
        if len(names) > 1:
            found += [*(compare_names(probes, answers) if with_names else ()), *compare_ports(probes, answers)]
        is_named = self.request.shared is not None
        found += compare_folders(path, {name: answer["folder"] for name, answer in answers.items()}, is_named=is_named)
        results: dict[tuple[int, int], list[Message]] = {
            pair: [{"error": f"{units[at][0]}: no answer", "is_silent": True} for at in pair] for pair in pairs
        }
        for name, answer in answers.items():
            for (pair, rank), half in zip(tasks[name], answer["pairs"], strict=True):
                if "error" in half:
                    half["error"] = f"{units[pair[rank]][0]}: {half['error']}"
                results[pair][rank] = half
        return found + compare_pairs([name for name, _ in units], results)

    def _place_units(self, hosts: Sequence[str]) -> tuple[list[tuple[str, str]], list[Finding]]:
        """Return what is paired, cells or hosts, each with its host, and the finding about cells."""
        units = [(name, name) for name in hosts]
        if len(units) == 1:
            units = [(f"{name} (rank {rank})", name) for rank, name in enumerate([*hosts, *hosts])]
        if self.request.federated is None:
            return units, []
        ranks = [(rank, name) for name, peer in self._hosts.items() for rank in peer.ranks]
        ranks.sort(key=lambda item: int(item[0]["rank"]))
        if len(ranks) < self.world_size:
            text = f"not checked, since {self.world_size - len(ranks)} of {self.world_size} ranks are missing"
            return units, [Finding("cells", WARNING, text, "see the lines on meeting and ssh")]
        hosts_of_ranks = [Host(**{**rank["host"], "switches": tuple(rank["host"]["switches"])}) for rank, _ in ranks]
        topology, finding = _check_cells(self.request, hosts_of_ranks)
        if topology is None:
            return units, [finding]
        firsts = [ranks[topology.federation(cell)[0]][1] for cell in range(topology.cells)]
        cells = [(f"cell {cell} ({name})", name) for cell, name in enumerate(firsts) if name in hosts]
        return (cells if len(cells) > 1 else units), [finding]

    def _start(self, machines: int) -> dict[str, tuple[float, float]]:
        """Let all hosts begin, and return how far each clock is ahead of the first one's, and the bound of the error.

        The other clock is read in the middle of a round trip, so half the trip bounds the error.
        """
        clocks: dict[str, tuple[float, float]] = {}
        for name, peer in self._hosts.items():
            sent, started = time.time(), time.monotonic()
            self._send(name, {"machines": machines, "ranks": self.world_size})
            try:
                told = peer.line.receive(self.request.timeout_s)["time"]
                half = (time.monotonic() - started) / 2
                clocks[name] = told - (sent + half), half
            except OSError as error:
                self._fail(name, f"lost: {error}")
        first = clocks.pop(next(iter(self._hosts), ""), None)
        if first is None:
            return {}
        return {name: (ahead - first[0], doubt + first[1]) for name, (ahead, doubt) in clocks.items()}

    def _send(self, name: str, message: Message) -> None:
        try:
            self._hosts[name].line.send(message)
        except OSError as error:
            self._fail(name, f"lost: {error}")

    def _hear(self, timeout_s: float) -> dict[str, Message]:
        """Return the next answers of the hosts that have one in time."""
        deadline, answers = time.monotonic() + timeout_s, {}
        for name in [name for name in self._hosts if name not in self._failures]:
            try:
                answer = self._hosts[name].line.receive(deadline - time.monotonic())
            except OSError as error:
                self._fail(name, f"lost: {error}")
                continue
            if "failed" in answer:
                self._fail(name, f"the check failed: {answer['failed']}")
            else:
                answers[name] = answer
        return answers

    def _fail(self, name: str, text: str) -> None:
        advice = "repair what is named here on that host, and run the doctor again"
        self._failures.setdefault(name, Finding("host", ERROR, text, advice, name))


def _check_cells(request: Request, ranks: Sequence[Host]) -> tuple[Topology | None, Finding]:
    """Check that the cells that are asked for fit ranks on these hosts."""
    federated = request.federated
    assert federated is not None
    try:
        topology = Topology(len(ranks), sizes_of_ranks(ranks, federated) if isinstance(federated, str) else federated)
    except XfflError as error:
        return None, Finding("cells", ERROR, str(error), f"correct {request.federated_by}")
    return topology, Finding("cells", OK, f"{topology.cells} cells of {shorten(topology.sizes, 8)}")


def _check_cells_of_job(request: Request, environ: Mapping[str, str]) -> Finding:
    """Check the cells with the hosts of the job in whose batch script this process runs."""
    federated = request.federated
    try:
        allocation = find_allocation(environ, needs_switches=str(federated).startswith("auto"))
        if allocation is None:
            advice = "run it inside the job: in its batch script, or with srun, mpirun or --hosts"
            return Finding("cells", WARNING, "not checked: the hosts of the job are not known here", advice)
        hosts = arrange(allocation.hosts, federated).hosts if isinstance(federated, str) else allocation.hosts
    except XfflError as error:
        return Finding("cells", ERROR, str(error), f"correct {request.federated_by}")
    return _check_cells(request, [host for host in hosts for _ in range(host.slots)])[1]
