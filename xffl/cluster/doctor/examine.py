"""The order of the checks: alone on one host, or as the ranks of a job, which rank 0 leads."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from xffl.cluster.allocation import Host
from xffl.cluster.cells import sizes_of_ranks
from xffl.cluster.doctor.findings import ERROR, OK, WARNING, Finding, Report, in_words, merge
from xffl.cluster.doctor.folder import Folder, compare_folders
from xffl.cluster.doctor.host import check_threads
from xffl.cluster.doctor.meeting import Hub, Message, answer, join
from xffl.cluster.doctor.pairs import compare_pairs
from xffl.cluster.doctor.programs import MPI_LAUNCHERS, check_mpi
from xffl.cluster.doctor.reach import compare_clocks, compare_names, compare_ports, compare_versions
from xffl.cluster.doctor.side import HostSide, Request, findings_of, introduce
from xffl.cluster.environment import ProcessEnvironment, detect_environment
from xffl.cluster.hosts import interface_address
from xffl.cluster.launchers import LAUNCHERS, Launcher
from xffl.cluster.network import SLURM_PORTS
from xffl.errors import LaunchError, XfflError
from xffl.topology import Topology

__all__ = ["examine"]

_LOOK_S = 90.0
_PATIENCE_S = 300.0
_MPI_LIMIT_S = 60.0

_Told = Callable[[Report], None]


def examine(request: Request, tell: _Told, environ: Mapping[str, str] | None = None) -> int:
    """Check this host, or all hosts of a job; under a launcher every rank calls it.

    Rank 0 tells about all hosts. A host whose ranks cannot reach rank 0 tells about itself.

    :param request: What to look at.
    :param tell: Gets the report, in the processes that have one.
    :param environ: Environment to read; ``None`` means the process's own.
    :return: Exit code: 1 where this process told of an error, else 0.
    """
    environ = dict(os.environ if environ is None else environ)
    row = next((row for row in LAUNCHERS if row.matches(environ)), None)
    launcher = "none" if row is None else row.name
    mpi = check_mpi(launcher, "mpi" in request.needs, environ)
    place, wrong = _find_place(row, mpi, request, tell, environ)
    is_head = place.node_local_rank == 0 if place is not None else _is_first(row, environ)
    if place is not None and place.world_size > 1 and not is_head:
        return _follow(request, place, None, environ)
    if not is_head:
        return 0
    side = HostSide(request, place, launcher, mpi, environ)
    try:
        if place is None or place.world_size == 1:
            report = _alone(side, wrong)
        elif place.rank != 0:
            return _follow(request, place, side, environ, tell)
        else:
            report = _Lead(side, place, environ).examine()
    finally:
        side.close()
    tell(report)
    return report.exit_code


def _find_place(
    row: Launcher | None, mpi: Finding, request: Request, tell: _Told, environ: Mapping[str, str]
) -> tuple[ProcessEnvironment | None, list[Finding]]:
    """Find out where this rank stands, or why that cannot be found out."""
    advice = "see the lines above; xffl env shows what the launcher has set"
    is_mpi = row is not None and row.name in MPI_LAUNCHERS
    if is_mpi and mpi.status == ERROR:
        # MPI_Init of a wrong library may abort, or make each rank a world of its own.
        return None, [Finding("launcher", ERROR, "the other ranks are not looked for without a working MPI", advice)]
    watch = threading.Timer(_MPI_LIMIT_S, _give_up, (tell, mpi))
    watch.daemon = True
    if is_mpi:
        watch.start()
    try:
        return detect_environment(_without_bad_interfaces(environ)), []
    except XfflError as error:
        return None, [Finding("launcher", ERROR, str(error), advice)]
    finally:
        watch.cancel()


def _give_up(tell: _Told, mpi: Finding) -> None:
    """End a rank whose MPI does not carry the first message."""
    text = f"the ranks could not speak over MPI within {_MPI_LIMIT_S:g} s"
    advice = "name the network for MPI (OMPI_MCA_btl_tcp_if_include, UCX_NET_DEVICES, or -iface with MPICH)"
    tell(Report((mpi, Finding("launcher", ERROR, text, advice))))
    os._exit(1)


def _without_bad_interfaces(environ: Mapping[str, str]) -> dict[str, str]:
    """Leave out interfaces that cannot be used, so that the ranks meet all the same; the check tells of them."""
    found = dict(environ)
    for variable in ("XFFL_IFNAME", "XFFL_CONTROL_IFNAME", "GLOO_SOCKET_IFNAME"):
        try:
            if found.get(variable) and not interface_address(found[variable].partition(",")[0]).startswith("127."):
                continue
        except LaunchError:
            pass
        found.pop(variable, None)
    return found


def _is_first(row: Launcher | None, environ: Mapping[str, str]) -> bool:
    """Tell by the launcher's variable alone whether this is the first rank of its node."""
    return row is None or environ.get(row.variables.get("node_local_rank", ""), "0") == "0"


def _alone(side: HostSide, before: Sequence[Finding]) -> Report:
    """Check this host only."""
    told = introduce(side.place, side.environ)
    name = told["host"]["name"]
    found = [*before, *findings_of(side.look(1)), check_threads([told])]
    folder, unseen = Folder(_folder(side.request), secrets.token_hex(4)), []
    error = folder.open()
    if error is None:
        seen = folder.turn()
        unseen = folder.close({0: name}, 1.0)
        found += compare_folders(folder.path, {0: name}, {0: seen}, unseen)
    else:
        found.append(_unwritable(side.request, folder, error))
    units = [f"process {number} of {name}" for number in range(2)]
    answers = {0: side.torch(2)}
    found += _judge_torch({0: name}, answers)
    stores = [told.get("port") for told in answers[0]["told"]]
    if len(stores) == 2 and None not in stores:
        question = _pairs_question([(0, "127.0.0.1", port) for port in stores], side.request.timeout_s)
        found += compare_pairs(units, _results({0: side.pairs(question)}))
    return Report(merge([replace(finding, host=name) for finding in found], [name]), (name,))


def _follow(
    request: Request,
    place: ProcessEnvironment,
    side: HostSide | None,
    environ: Mapping[str, str],
    tell: _Told | None = None,
) -> int:
    """Tell rank 0 about this rank, and answer for its host if it is the first rank there."""
    assert place.master_addr is not None
    told = introduce(place, environ)
    try:
        port = _meeting_port(place, environ)
        connection = join(place.master_addr, port, place.rank, place.world_size, told, request.timeout_s)
    except LaunchError as error:
        if side is None or tell is None:
            return 1
        advice = "see the lines on interface and names; open the port between the compute nodes"
        found = [*findings_of(side.look(place.node_world_size)), Finding("meeting", ERROR, str(error), advice)]
        name = told["host"]["name"]
        tell(Report(merge([replace(finding, host=name) for finding in found], [name]), (name,)))
        return 1
    return 0 if answer(connection, {} if side is None else side.handlers, _PATIENCE_S) else 1


class _Lead:
    """The side of rank 0: it asks the first rank of every node, and compares."""

    def __init__(self, side: HostSide, place: ProcessEnvironment, environ: Mapping[str, str]) -> None:
        self.side, self.place, self.request = side, place, side.request
        self.environ = environ
        self.told: dict[int, Message] = {}
        self.heads: dict[int, int] = {}
        """First rank of each node."""
        self.names: dict[int, str] = {}

    def examine(self) -> Report:
        port = _meeting_port(self.place, self.environ)
        own = introduce(self.place, self.environ)
        try:
            hub = Hub(port, self.place.world_size)
        except LaunchError as error:
            report = _alone(self.side, [Finding("meeting", ERROR, str(error), "set MASTER_PORT")])
            return replace(report, ranks=self.place.world_size)
        try:
            self.told = {0: own, **hub.wait_for_ranks(self.request.timeout_s)}
            self._name_hosts()
            found = [self._judge_meeting(port), *self._compare_environments()]
            found += self._look(hub)
            found += [replace(check_threads(ranks), host=name) for name, ranks in self._by_host().items()]
            found += self._share_folder(hub)
            found += self._add(hub)
            found += [
                Finding("meeting", ERROR, f"rank {rank} was lost: {reason}", "see its output", self._name_of(rank))
                for rank, reason in hub.lost.items()
            ]
        finally:
            hub.close()
        hosts = tuple(self.names.values())
        return Report(merge(found, hosts), hosts, self.place.world_size)

    def _name_hosts(self) -> None:
        """Note the nodes' first ranks and names; nodes of the same name get their number."""
        for rank in sorted(self.told):
            if self.told[rank]["is_head"]:
                self.heads[self.told[rank]["node"]] = rank
        named = {node: str(self.told[rank]["host"]["name"]) for node, rank in self.heads.items()}
        repeated = {name for name in named.values() if list(named.values()).count(name) > 1}
        self.names = {node: f"{name}#{node}" if name in repeated else name for node, name in sorted(named.items())}

    def _name_of(self, rank: int) -> str:
        return self.names.get(self.told[rank]["node"], "") if rank in self.told else ""

    def _by_host(self) -> dict[str, list[Message]]:
        found: dict[str, list[Message]] = {}
        for rank in self.told:
            if self._name_of(rank):
                found.setdefault(self._name_of(rank), []).append(self.told[rank])
        return found

    def _judge_meeting(self, port: int) -> Finding:
        where = f"{self.place.master_addr}:{port}"
        absent = [str(rank) for rank in range(self.place.world_size) if rank not in self.told]
        if absent:
            text = f"rank {in_words(absent)} did not come to {where} within {self.request.timeout_s:g} s"
            advice = "see what its host says; open the port, name the interface (XFFL_CONTROL_IFNAME), or --timeout"
            return Finding("meeting", ERROR, text, advice)
        hosts = "1 host" if len(self.heads) == 1 else f"{len(self.heads)} hosts"
        text = f"{self.place.world_size} ranks of {hosts} met at {where} ({self.place.launcher})"
        return Finding("meeting", OK, text)

    def _compare_environments(self) -> list[Finding]:
        """Tell which variables the ranks do not have in common."""
        names = dict.fromkeys(name for told in self.told.values() for name in told["environ"])
        differing = []
        for name in names:
            values = {told["environ"].get(name) for told in self.told.values()}
            if len(values) > 1:
                shown = in_words(sorted("unset" if value is None else value for value in values), 3)
                differing.append(f"{name} ({shown})")
        if not differing:
            return []
        advice = "give them to all ranks: srun --export=ALL, mpirun -x NAME (Open MPI) or -genvall (MPICH)"
        return [Finding("environment", WARNING, f"ranks differ in {in_words(differing)}", advice)]

    def _look(self, hub: Hub) -> list[Finding]:
        """Let every host look at itself, then at the others."""
        machines = len({self.told[rank]["machine"] for rank in self.heads.values()})
        looked = self._ask(hub, {"do": "look", "machines": machines}, _LOOK_S)
        found = [replace(f, host=self.names[node]) for node, seen in looked.items() for f in findings_of(seen)]
        if len(looked) > 1:
            found += compare_versions({self.names[node]: seen["versions"] for node, seen in looked.items()})
        clocks = {
            self.names[node]: measured
            for node, rank in self.heads.items()
            if rank != 0 and (measured := hub.measure_clock(rank, self.request.timeout_s)) is not None
        }
        found += compare_clocks(clocks)
        self.hosts = {
            node: {**seen, "name": self.told[self.heads[node]]["host"]["name"]} for node, seen in looked.items()
        }
        for node, seen in self.hosts.items():
            # Without a name or an interface that works, the host is at least known by where it came from.
            seen["address"] = seen["address"] or hub.addresses.get(self.heads[node]) or self.place.master_addr
            del seen["findings"], seen["versions"]
        if len(self.hosts) > 1:
            wait_s = min(5.0, self.request.timeout_s)
            question = {"do": "reach", "hosts": {str(node): seen for node, seen in self.hosts.items()}}
            limit_s = self.request.timeout_s + wait_s * (1 + len(self.hosts) // 4)
            reached = self._ask(hub, {**question, "timeout_s": wait_s}, limit_s)
            found += compare_names(self.hosts, reached) if machines > 1 else []
            found += compare_ports(self.hosts, reached)
        return found

    def _share_folder(self, hub: Hub) -> list[Finding]:
        folder = Folder(_folder(self.request), secrets.token_hex(4))
        error = folder.open()
        if error is not None:
            return [_unwritable(self.request, folder, error)]
        patience_s = min(10.0, self.request.timeout_s)
        question = {"do": "folder", "folder": str(folder.path), "token": folder.token, "patience_s": patience_s}
        answers = self._ask(hub, question, patience_s + self.request.timeout_s, folder.turn)
        unseen = folder.close({n: self.names[n] for n, seen in answers.items() if seen["error"] is None}, patience_s)
        return compare_folders(folder.path, self.names, answers, unseen)

    def _add(self, hub: Hub) -> list[Finding]:
        """Let torch add across every pair of cells, or of hosts where there are no cells."""
        if not self.request.with_torch:
            return []
        units, found = self._units()
        counts = {node: sum(at == node for _, at in units) for node in self.names}
        question: Message = {"do": "torch", "count": max(1, *counts.values())}
        told = self._ask(hub, question, self.side.import_limit_s + 15.0)
        found += _judge_torch(self.names, told)
        stores: list[tuple[int, str, int]] = []
        names: list[str] = []
        used = dict.fromkeys(self.names, 0)
        for name, node in units:
            processes = told.get(node, {"told": []})["told"]
            number, used[node] = used[node], used[node] + 1
            if number < len(processes) and "port" in processes[number]:
                stores.append((node, str(self.hosts[node]["address"]), int(processes[number]["port"])))
                names.append(name)
        if len(stores) < 2:
            return found
        pairs = _pairs_question(stores, self.request.timeout_s)
        answers = self._ask(hub, pairs, pairs["limit_s"] + 10.0)
        return found + compare_pairs(names, _results(answers))

    def _units(self) -> tuple[list[tuple[str, int]], list[Finding]]:
        """Return what is paired, each with the number of its node."""
        nodes = sorted(node for node in self.names if node in self.hosts)
        hosts = [(self.names[node], node) for node in nodes]
        if len(hosts) == 1:
            hosts = [(f"process {number} of {hosts[0][0]}", hosts[0][1]) for number in range(2)]
        federated = self.request.federated
        if federated is None or len(self.told) < self.place.world_size:
            return hosts, []
        try:
            if isinstance(federated, str):
                told = [self.told[rank]["host"] for rank in sorted(self.told)]
                places = [Host(**{**host, "switches": tuple(host["switches"])}) for host in told]
                federated = sizes_of_ranks(places, federated)
            topology = Topology(self.place.world_size, federated)
        except XfflError as error:
            return hosts, [Finding("cells", ERROR, str(error), "mend --federated or XFFL_FEDERATED")]
        shown = Finding("cells", OK, f"{topology.cells} cells of {in_words([str(size) for size in topology.sizes], 8)}")
        firsts = [topology.federation(cell)[0] for cell in range(topology.cells)]
        cells = [(f"cell {cell} ({self._name_of(rank)})", self.told[rank]["node"]) for cell, rank in enumerate(firsts)]
        cells = [(name, node) for name, node in cells if node in self.hosts]
        return (cells if len(cells) > 1 else hosts), [shown]

    def _ask(
        self, hub: Hub, question: Message, timeout_s: float, own: Callable[[], Message] | None = None
    ) -> dict[int, Any]:
        """Ask the first ranks of all nodes, this one too; the answers are by node."""
        handler = self.side.handlers[question["do"]]
        answers = hub.ask(list(self.heads.values()), question, timeout_s, own or (lambda: handler(question)))
        return {node: answers[rank] for node, rank in sorted(self.heads.items()) if rank in answers}


def _judge_torch(names: Mapping[int, str], answers: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    return [replace(Finding(**told["finding"]), host=names[node]) for node, told in answers.items() if told["finding"]]


def _pairs_question(stores: Sequence[tuple[int, str, int]], timeout_s: float) -> Message:
    """Return the question for all hosts: where each process's store is, and whose it is."""
    units: dict[str, list[int]] = {}
    for unit, (node, _, _) in enumerate(stores):
        units.setdefault(str(node), []).append(unit)
    rounds = len(stores)
    limit_s = min(2 * timeout_s + rounds, 240.0)
    return {
        "do": "pairs",
        "stores": [[address, port] for _, address, port in stores],
        "units": units,
        "limit_s": limit_s,
    }


def _results(answers: Mapping[int, Mapping[str, Any]]) -> dict[int, Any]:
    return {int(unit): told for answer in answers.values() for unit, told in answer["results"].items()}


def _folder(request: Request) -> Path:
    return Path(os.path.abspath(request.shared or os.curdir))


def _unwritable(request: Request, folder: Folder, error: str) -> Finding:
    """Judge a folder that rank 0's host cannot write; only one that was named must be fit."""
    if request.shared is None:
        text = f"{folder.path}, the current one, cannot be written ({error})"
        return Finding("shared folder", WARNING, text, "name the folder for runs with --shared DIR")
    advice = "give a folder that exists and can be written on all nodes"
    return Finding("shared folder", ERROR, f"{folder.path} cannot be written ({error})", advice)


def _meeting_port(place: ProcessEnvironment, environ: Mapping[str, str]) -> int:
    """Return the port to meet at: the rendezvous's, unless torchrun's agent listens there already."""
    assert place.master_port is not None
    if place.launcher != "torchrun" or environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() != "true":
        return place.master_port
    first, last = SLURM_PORTS
    return first + place.master_port * 7919 % (last - first + 1)
