"""The side of rank 0: it waits for the ranks of the job, asks the first one of every node, and compares."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from xffl.cluster.cells import Federation, sizes_of_ranks
from xffl.cluster.doctor.findings import ERROR, OK, WARNING, Finding, Report, in_words, merge
from xffl.cluster.doctor.folder import Folder, compare_folders
from xffl.cluster.doctor.host import check_threads
from xffl.cluster.doctor.meeting import Hub, Message, attempt
from xffl.cluster.doctor.programs import MPI_LIMIT_S
from xffl.cluster.doctor.reach import compare_clocks, compare_names, compare_ports, compare_versions, peers_of
from xffl.cluster.doctor.rounds import ROUNDS_S, Unit, add_in_rounds, round_limit_s
from xffl.cluster.doctor.side import HostSide, Request, findings_of, import_limit_s, introduce, is_shown
from xffl.cluster.environment import ProcessEnvironment
from xffl.cluster.slurm.allocation import Host
from xffl.errors import XfflError
from xffl.topology import Topology

__all__ = [
    "CHECKS",
    "FAILED",
    "LOOK_S",
    "Lead",
    "check_cells",
    "folder_of",
    "judge_torch",
    "meeting_s",
    "patience_s",
    "unwritable",
]

LOOK_S = 90.0
"""For a host's look at itself: four programs of 20 s each."""
CHECKS = {"look": "host", "reach": "ports", "folder": "shared folder", "torch": "torch", "pairs": "all-reduce"}
"""What a question is about, for the line that tells of an error there."""
FAILED = "mend what the error names on that host, and look again"
"""What to do where a look at a host has failed."""
_REACH_S = 5.0
_FOLDER_S = 10.0
_TORCH_SLACK_S = 15.0
_ROUND_SLACK_S = 5.0


def meeting_s(timeout_s: float) -> float:
    """Return how long ranks wait for each other at first: some come late, since they ask for their MPI before."""
    return timeout_s + MPI_LIMIT_S


def patience_s(timeout_s: float) -> float:
    """Return how long a rank waits for rank 0's next question: the sum of the limits of all that lies between."""
    # Rank 0 may itself take each limit before it waits as long for the others; it tries up to 63 hosts' ports.
    asked_s = LOOK_S + (timeout_s + 17 * _REACH_S) + (_FOLDER_S + timeout_s)
    asked_s += import_limit_s(timeout_s) + _TORCH_SLACK_S + round_limit_s(timeout_s) + _ROUND_SLACK_S
    return meeting_s(timeout_s) + 2 * asked_s + 8 * timeout_s + ROUNDS_S


class Lead:
    """The side of rank 0: it asks the first rank of every node, and compares."""

    def __init__(self, side: HostSide, place: ProcessEnvironment, hub: Hub, port: int) -> None:
        """Only note what is there.

        :param side: The checks of this host.
        :param place: Where this rank stands.
        :param hub: Where the others come to.
        :param port: Where it listens.
        """
        self.side, self.place, self.request = side, place, side.request
        self.hub, self.port = hub, port
        self.hosts: dict[int, Message] = {}
        """What the others must know to reach each node."""
        self.failures: list[Finding] = []
        self.told: dict[int, Message] = {}
        self.heads: dict[int, int] = {}
        """First rank of each node."""
        self.names: dict[int, str] = {}

    def examine(self) -> Report:
        """Wait for the ranks, let the hosts look at themselves and at each other, and compare."""
        try:
            own = introduce(self.place, self.side.environ)
            self.told = {0: own, **self.hub.wait_for_ranks(meeting_s(self.request.timeout_s))}
            self._name_hosts()
            found = [*self._judge_meeting(), *self._compare_environments()]
            found += self._look()
            found += [replace(check_threads(ranks), host=name) for name, ranks in self._by_host().items()]
            found += self._share_folder()
            found += self._add()
            found += self.failures
            found += [
                Finding("meeting", ERROR, f"rank {rank} was lost: {reason}", "see its output", self._name_of(rank))
                for rank, reason in self.hub.lost.items()
            ]
        finally:
            self.hub.close()
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

    def _judge_meeting(self) -> list[Finding]:
        where = f"{self.place.master_addr}:{self.port}"
        found = []
        if self.hub.refused is not None:
            text = f"rank 0 could let in {len(self.told) - 1} of {self.place.world_size - 1} ranks: {self.hub.refused}"
            advice = f"put ulimit -n {4 * self.place.world_size + 256} into the job, or ask the site for more"
            found.append(Finding("open files", ERROR, text, advice, self._name_of(0)))
        absent = [str(rank) for rank in range(self.place.world_size) if rank not in self.told]
        if absent:
            text = f"rank {in_words(absent)} did not come to {where} within {meeting_s(self.request.timeout_s):g} s"
            advice = "see what its host says; open the port, name the interface (XFFL_CONTROL_IFNAME), or --timeout"
            return [*found, Finding("meeting", ERROR, text, advice)]
        hosts = "1 host" if len(self.heads) == 1 else f"{len(self.heads)} hosts"
        text = f"{self.place.world_size} ranks of {hosts} met at {where} ({self.place.launcher})"
        return [*found, Finding("meeting", OK, text)]

    def _compare_environments(self) -> list[Finding]:
        """Tell which variables the ranks do not have in common."""
        names = dict.fromkeys(name for told in self.told.values() for name in told["environ"])
        differing = []
        for name in names:
            values = {told["environ"].get(name) for told in self.told.values()}
            if len(values) > 1:
                differing.append(f"{name} ({_show(name, values)})")
        if not differing:
            return []
        advice = "give them to all ranks: srun --export=ALL, mpirun -x NAME (Open MPI) or -genvall (MPICH)"
        return [Finding("environment", WARNING, f"ranks differ in {in_words(differing)}", advice)]

    def _look(self) -> list[Finding]:
        """Let every host look at itself, then at the others."""
        machines = len({self.told[rank]["machine"] for rank in self.heads.values()})
        looked = self._ask_all({"do": "look", "machines": machines}, LOOK_S)
        found = [replace(f, host=self.names[node]) for node, seen in looked.items() for f in findings_of(seen)]
        if len(looked) > 1:
            found += compare_versions({self.names[node]: seen["versions"] for node, seen in looked.items()})
        clocks = {
            self.names[node]: measured
            for node, rank in self.heads.items()
            if rank != 0 and (measured := self.hub.measure_clock(rank, self.request.timeout_s)) is not None
        }
        found += compare_clocks(clocks)
        self.hosts = {
            node: {**seen, "name": self.told[self.heads[node]]["host"]["name"]} for node, seen in looked.items()
        }
        for node, seen in self.hosts.items():
            # Without a name or an interface that works, the host is at least known by where it came from.
            seen["address"] = seen["address"] or self.hub.addresses.get(self.heads[node]) or self.place.master_addr
            del seen["findings"], seen["versions"]
        if len(self.hosts) > 1:
            wait_s = min(_REACH_S, self.request.timeout_s)
            peers = {node: peers_of(node, list(self.hosts)) for node in self.hosts}
            questions: dict[int, Message] = {
                node: {"do": "reach", "hosts": {str(peer): self.hosts[peer] for peer in others}, "timeout_s": wait_s}
                for node, others in peers.items()
            }
            most = max(len(others) for others in peers.values())
            reached = self._ask(questions, self.request.timeout_s + wait_s * (1 + most // 4))
            found += compare_names(self.hosts, reached) if machines > 1 else []
            found += compare_ports(self.hosts, reached)
        return found

    def _share_folder(self) -> list[Finding]:
        folder = Folder(folder_of(self.request), secrets.token_hex(4))
        error = folder.open()
        if error is not None:
            return [unwritable(self.request, folder, error)]
        patience_s = min(_FOLDER_S, self.request.timeout_s)
        question = {"do": "folder", "folder": str(folder.path), "token": folder.token, "patience_s": patience_s}
        answers = self._ask_all(question, patience_s + self.request.timeout_s, folder.turn)
        unseen = folder.close({n: self.names[n] for n, seen in answers.items() if seen["error"] is None}, patience_s)
        return compare_folders(folder.path, self.names, answers, unseen)

    def _add(self) -> list[Finding]:
        """Let torch add across every pair of cells, or of hosts where there are no cells."""
        places, found = self._places()
        if not self.request.with_torch:
            return found
        counts = {node: sum(at == node for _, at in places) for node in self.names}
        question: Message = {"do": "torch", "count": max(1, *counts.values())}
        told = self._ask_all(question, import_limit_s(self.request.timeout_s) + _TORCH_SLACK_S)
        found += judge_torch(self.names, told)
        units: list[Unit] = []
        used = dict.fromkeys(self.names, 0)
        for name, node in places:
            processes = told.get(node, {"told": []})["told"]
            number, used[node] = used[node], used[node] + 1
            if number < len(processes) and "port" in processes[number]:
                store = (str(self.hosts[node]["address"]), int(processes[number]["port"]))
                units.append(Unit(name, node, number, store))
        if len(units) < 2:
            return found
        return found + add_in_rounds(units, self._ask_round, self.request.timeout_s)

    def _ask_round(self, questions: Mapping[int, Message], limit_s: float) -> Mapping[int, Any]:
        return self._ask(questions, limit_s + _ROUND_SLACK_S)

    def _places(self) -> tuple[list[tuple[str, int]], list[Finding]]:
        """Return what is paired, each with the number of its node."""
        nodes = sorted(node for node in self.names if node in self.hosts)
        hosts = [(self.names[node], node) for node in nodes]
        if len(hosts) == 1:
            hosts = [(f"process {number} of {hosts[0][0]}", hosts[0][1]) for number in range(2)]
        federated = self.request.federated
        if federated is None:
            return hosts, []
        missing = self.place.world_size - len(self.told)
        if missing:
            text = f"not looked at, since {missing} of {self.place.world_size} ranks are missing"
            return hosts, [Finding("cells", WARNING, text, "see the line on the meeting")]
        told = [self.told[rank]["host"] for rank in sorted(self.told)]
        ranks = [Host(**{**host, "switches": tuple(host["switches"])}) for host in told]
        topology, finding = check_cells(federated, ranks, self.request.federated_by)
        if topology is None:
            return hosts, [finding]
        firsts = [topology.federation(cell)[0] for cell in range(topology.cells)]
        cells = [(f"cell {cell} ({self._name_of(rank)})", self.told[rank]["node"]) for cell, rank in enumerate(firsts)]
        cells = [(name, node) for name, node in cells if node in self.hosts]
        return (cells if len(cells) > 1 else hosts), [finding]

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
            return hosts, [Finding("cells", ERROR, str(error), f"mend {self.request.federated_by}")]
        shown = Finding("cells", OK, f"{topology.cells} cells of {in_words([str(size) for size in topology.sizes], 8)}")
        firsts = [topology.federation(cell)[0] for cell in range(topology.cells)]
        cells = [(f"cell {cell} ({self._name_of(rank)})", self.told[rank]["node"]) for cell, rank in enumerate(firsts)]
        cells = [(name, node) for name, node in cells if node in self.hosts]
        return (cells if len(cells) > 1 else hosts), [shown]

    def _ask(
        self, questions: Mapping[int, Message], timeout_s: float, own: Callable[[], Message] | None = None
    ) -> dict[int, Any]:
        """Ask the first ranks of nodes, each its own question; the answers are by node, without those that failed."""
        by_rank = {self.heads[node]: question for node, question in questions.items()}
        mine = by_rank.pop(0, None)

        def meanwhile() -> Message:
            if mine is None:
                return {}
            return attempt(self.side.handlers[mine["do"]] if own is None else lambda _: own(), mine)

        answers = self.hub.ask(by_rank, timeout_s, meanwhile)
        told = {node: answers[self.heads[node]] for node in sorted(questions) if self.heads[node] in answers}
        self.failures += [
            Finding(
                CHECKS[questions[node]["do"]], ERROR, f"cannot be looked at: {seen['failed']}", FAILED, self.names[node]
            )
            for node, seen in told.items()
            if "failed" in seen
        ]
        return {node: seen for node, seen in told.items() if "failed" not in seen}

    def _ask_all(self, question: Message, timeout_s: float, own: Callable[[], Message] | None = None) -> dict[int, Any]:
        """Ask all of them the same."""
        return self._ask(dict.fromkeys(self.heads, question), timeout_s, own)


def judge_torch(names: Mapping[int, str], answers: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """Return what nodes say of their torch, each with the node's name."""
    return [replace(Finding(**told["finding"]), host=names[node]) for node, told in answers.items() if told["finding"]]


def folder_of(request: Request) -> Path:
    """Return the folder that all hosts are to share."""
    return Path(os.path.abspath(request.shared or os.curdir))


def unwritable(request: Request, folder: Folder, error: str) -> Finding:
    """Judge a folder that rank 0's host cannot write; only one that was named must be fit."""
    if request.shared is None:
        text = f"{folder.path}, the current one, cannot be written ({error})"
        return Finding("shared folder", WARNING, text, "name the folder for runs with --shared DIR")
    advice = "give a folder that exists and can be written on all nodes"
    return Finding("shared folder", ERROR, f"{folder.path} cannot be written ({error})", advice)


def check_cells(federated: Federation, ranks: Sequence[Host], knob: str) -> tuple[Topology | None, Finding]:
    """Judge what is said of cells for ranks.

    :param federated: Sizes of the cells or a rule for them.
    :param ranks: Host of each rank.
    :param knob: What says so.
    :return: The topology, ``None`` where there is none, and the finding.
    """
    try:
        sizes = sizes_of_ranks(ranks, federated) if isinstance(federated, str) else federated
        topology = Topology(len(ranks), sizes)
    except XfflError as error:
        return None, Finding("cells", ERROR, str(error), f"mend {knob}")
    text = f"{topology.cells} cells of {in_words([str(size) for size in topology.sizes], 8)}"
    return topology, Finding("cells", OK, text)


def _show(name: str, values: Collection[str | None]) -> str:
    """Write the values of a variable that ranks do not have in common, or only that they differ."""
    known = sorted(value for value in values if value is not None)
    if not is_shown(name):
        known = ["set"] if len(known) == 1 else ["differs"]
    return in_words([*known, *(["unset"] if None in values else [])], 3)
