"""What the answers of the hosts of a job say when they are compared. All verdicts on several hosts."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from xffl.checks import group, shorten
from xffl.cluster.cells import sizes_of_ranks
from xffl.cluster.doctor import probe
from xffl.cluster.doctor.messages import (
    ERROR,
    OK,
    WARNING,
    Answer,
    Finding,
    HostReport,
    Member,
    PairResult,
    Place,
    Plan,
    Report,
    RunView,
)
from xffl.cluster.doctor.probe import Request
from xffl.cluster.network import LOOPBACK, SLURM_PORTS
from xffl.cluster.runtimes import Runtime, group_by_runtime, runtime_table
from xffl.cluster.sizes import Federation
from xffl.cluster.slurm.allocation import Host
from xffl.errors import XfflError
from xffl.topology import Topology

__all__ = ["Survey", "check_cells", "ephemeral_ports", "merge"]

_CLOCK_WARNING_S = 0.1  # from here on the order of events in the logs of different hosts is in doubt
_CLOCK_ERROR_S = 5.0  # the newest of several files is not the last one written; soon munge and ssh refuse each other
_LEAST_FREE = 2**30
_SLOW_FOLDER_S = 2.0
_SLOW_MIB_S = 5.0  # a slower pair gets a warning: 40 Mbit/s, at which 1 GiB takes more than three minutes
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TOKEN_ADVICE = "give the same one to all cells, and to the doctor: XFFL_TOKEN_FILE, or XFFL_TOKEN"
_FORMAT_ADVICE = "run versions of xffl that have one exchange format in all cells"
_SAME_ADVICE = "use the same environment on all hosts: a shared one, or one container image"
_VERDICTS = {  # of what elastic.visit_run says of a cell's token
    "same": (OK, "this host's token"),
    "none": (OK, "no token, as this host"),
    "differs": (ERROR, "another token than this host's"),
    "none there": (ERROR, "no token, but this host has one"),
    "none here": (WARNING, "a token, but this host has none to compare it with"),
    "no proof": (WARNING, "no proof of a token: another version of xffl"),
}
_MAY_DIFFER = ("python", "xffl", "torch")  # versions of which compare_runtimes tells


def merge(findings: Iterable[Finding], hosts: Sequence[str]) -> tuple[Finding, ...]:
    """Write the same finding of several hosts as one, whose ``host`` names them all; keep the order of the checks."""
    everywhere = "both hosts" if len(hosts) == 2 else f"all {len(hosts)} hosts"
    merged = []
    for finding, named in group((replace(finding, host=""), finding.host) for finding in findings).items():
        at = [host for host in dict.fromkeys(named) if host]
        merged.append(replace(finding, host=everywhere if set(at) >= set(hosts) and len(hosts) > 1 else shorten(at)))
    order = list(dict.fromkeys(finding.check for finding in merged))
    return tuple(sorted(merged, key=lambda finding: order.index(finding.check)))


# Comparisons ----------------------------------------------------------------------------------------------------------


def compare_environments(ranks: Sequence[Member]) -> list[Finding]:
    """Tell which variables the ranks do not have in common; values that may be secret are not shown."""
    differing = []
    for name in dict.fromkeys(name for rank in ranks for name in rank["environ"]):
        values = {rank["environ"].get(name) for rank in ranks}
        if len(values) > 1:
            known = sorted(value for value in values if value is not None)
            if not probe.is_shown(name):
                known = ["set"] if len(known) == 1 else ["differs"]
            differing.append(f"{name} ({shorten([*known, *(['unset'] if None in values else [])], 3)})")
    if not differing:
        return []
    advice = "give them to all ranks: srun --export=ALL, mpirun -x NAME (Open MPI) or -genvall (MPICH)"
    return [Finding("environment", WARNING, f"ranks differ in {shorten(differing)}", advice)]


def compare_versions(versions: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Tell in which packages the hosts differ that should be the same in all cells: a finding for each, or one."""
    # Files that differ in one version of xffl are a copy that somebody has edited, or not brought up to date.
    is_one_xffl = len({installed.get("xffl") for installed in versions.values()}) == 1
    findings, alike = [], 0
    for name in dict.fromkeys(name for installed in versions.values() for name in installed):
        where = group((installed.get(name) or "not installed", host) for host, installed in versions.items())
        alike += len(where) == 1
        if len(where) > 1 and name not in _MAY_DIFFER and (name != "xffl source" or is_one_xffl):
            shown = "; ".join(f"{version} on {shorten(hosts, 3)}" for version, hosts in where.items())
            status, advice = (ERROR, _FORMAT_ADVICE) if name == probe.FORMAT else (WARNING, _SAME_ADVICE)
            findings.append(Finding("versions", status, f"{name} differs: {shown}", advice))
    return findings or [Finding("versions", OK, f"{alike} packages are the same on {len(versions)} hosts")]


def compare_runtimes(runtimes: Mapping[str, Runtime], cells: Mapping[str, Collection[int]]) -> list[Finding]:
    """Tell what the hosts run that may differ between cells, as a table; inside one of their cells it is a warning."""
    groups = group_by_runtime(runtimes.items())
    lines = runtime_table([(shorten(hosts, 3), runtime) for runtime, hosts in groups.items()], "hosts")
    if not lines:
        return []
    within = [{cell for host in hosts for cell in cells.get(host, ())} for hosts in groups.values()]
    counts = Counter(cell for of_runtime in within for cell in of_runtime)
    mixed = sorted(cell for cell, count in counts.items() if count > 1)
    where = f"inside {'cell' if len(mixed) == 1 else 'cells'} {shorten(mixed, 8)}"
    head = f"differ {where}:" if mixed else "may differ between cells:"
    advice = "use the same environment, and one kind of processor, on all hosts of a cell"
    return [Finding("runtimes", WARNING if mixed else OK, "\n".join([head, *lines]), advice)]


def compare_clocks(clocks: Mapping[str, tuple[float, float]]) -> list[Finding]:
    """Judge hosts' clocks, that of rank 0's host first: how far each is ahead of the asker's, and the error's bound."""
    (_, (base, base_doubt)), *others = clocks.items()
    findings, most = [], 0.0
    for host, (ahead, doubt) in others:
        ahead, doubt = ahead - base, doubt + base_doubt
        most, sure = max(most, abs(ahead)), abs(ahead) - doubt
        if sure > _CLOCK_WARNING_S:
            text = f"{abs(ahead):.3f} s {'ahead of' if ahead > 0 else 'behind'} rank 0's host (+/- {doubt:.3f} s)"
            status = ERROR if sure > _CLOCK_ERROR_S else WARNING
            findings.append(
                Finding(
                    "clock", status=status, text=text, advice="let chrony or ntpd set the clock of this host", host=host
                )
            )
    return findings or [Finding("clock", OK, f"{len(clocks)} hosts differ by {1000 * most:.1f} ms at most")]


def compare_ports(hosts: Mapping[str, Place], answers: Mapping[str, Answer]) -> list[Finding]:
    """Tell which hosts cannot connect to which."""
    findings = []
    first, last = ephemeral_ports()
    ranges = f"ports {SLURM_PORTS[0]}-{SLURM_PORTS[1]} and {first}-{last}"
    advice = f"open {ranges} between the compute nodes, or name the interface that joins them with XFFL_IFNAME"
    for name, answer in answers.items():
        failures = [
            (why, f"{key} ({hosts[key]['address']}:{port})") for key, port, why in answer["failures"] if key in hosts
        ]
        for reason, peers in group(failures).items():
            text = f"cannot connect to {shorten(peers, 4)}: {reason}"
            findings.append(Finding("ports", status=ERROR, text=text, advice=advice, host=name))
    tried = sum(answer["tried"] for answer in answers.values())
    return findings or [Finding("ports", OK, f"{tried} connections between {len(hosts)} hosts, in {ranges}")]


def compare_folders(path: str, answers: Mapping[str, Mapping[str, Any]], *, is_named: bool = True) -> list[Finding]:
    """Judge what the hosts saw in a folder; only one that was named must be writable."""
    findings = []
    names = list(answers)
    if names and answers[names[0]]["seen_s"] is None:  # the others cannot see it either
        text = f"{path}: {answers[names[0]]['error']}"
        hint = "name a folder for runs that all nodes can write (--shared)"
        return [Finding("shared folder", status=ERROR if is_named else WARNING, text=text, advice=hint, host=names[0])]
    advice = "give a folder of a file system that all nodes mount (--shared DIR), and keep runs there"
    for name, answer in answers.items():
        status, hint = ERROR, advice
        if answer["error"] is not None:
            text = f"{answer['error']} ({answer['kind']})"
        elif answer["torn"]:
            text = f"{answer['torn']} of {probe.FOLDER_TURNS} reads saw half a file while it was replaced"
            hint = "renames are not atomic there: keep checkpoints on another file system"
        elif (answer["seen_s"] or 0.0) > _SLOW_FOLDER_S:
            status, text = WARNING, f"a new file is seen after {answer['seen_s']:.1f} s"
            hint = "the file system caches names for long: expect checkpoints to be found late"
        elif answer["free"] < _LEAST_FREE:
            status, text = WARNING, f"{answer['free'] / 2**20:.0f} MiB free"
            hint = "make room; a checkpoint may not fit"
        else:
            continue
        findings.append(Finding("shared folder", status=status, text=f"{path}: {text}", advice=hint, host=name))
    unseen = [name for answer in answers.values() for name in answer["unseen"]]
    if unseen and not findings:
        text = f"{path}: rank 0's host does not see what {shorten(unseen)} wrote"
        findings.append(Finding("shared folder", ERROR, text, advice))
    if findings or not answers:
        return findings
    free = min(answer["free"] for answer in answers.values()) / 2**30
    kinds = "/".join(sorted({answer["kind"] for answer in answers.values()}))
    where = "" if len(answers) == 1 else f", seen by {len(answers)} hosts"
    return [Finding("shared folder", OK, f"{path} ({kinds}){where}, renames are atomic, {free:.1f} GiB free")]


def compare_pairs(units: Sequence[str], results: Mapping[tuple[int, int], Sequence[PairResult]]) -> list[Finding]:
    """Judge the all-reduces of pairs of ``units``; both sides gave an ``error``, or ``seconds`` and ``mib``."""
    rates: dict[tuple[int, int], float] = {}
    failed: dict[tuple[int, int], str] = {}
    for pair, halves in results.items():
        # A side that reports nothing, or anything but a timeout, explains why the other one waits in vain.
        wrong = [str(half["error"]) for half in halves if "is_silent" in half]
        wrong += sorted((half["error"] for half in halves if "error" in half), key=lambda why: "timeout" in why)
        if wrong:
            failed[pair] = wrong[0]
        else:
            rates[pair] = max(half["mib"] / half["seconds"] for half in halves)
    advice = "set XFFL_IFNAME to the interface that joins the hosts (docs: Network and threads); see the lines on "
    advice += "interface and ports"
    findings = [Finding("all-reduce", ERROR, text, advice) for text in _by_unit(units, failed)]
    slow = {pair: f"{rate:.1f} MiB/s" for pair, rate in rates.items() if rate < _SLOW_MIB_S}
    hint = "see that XFFL_IFNAME names the fastest interface; on a slow link use a codec and rounds far apart"
    findings += [Finding("all-reduce", WARNING, f"slow: {text}", hint) for text in _by_unit(units, slow)]
    if rates:
        text = f"{len(rates)} {'pair' if len(rates) == 1 else 'pairs'} of {len(units)} over gloo, "
        ends = [min(rates, key=rates.__getitem__), max(rates, key=rates.__getitem__)][: len(rates)]
        shown = [f"{rates[pair]:.0f} MiB/s ({units[pair[0]]} and {units[pair[1]]})" for pair in ends]
        findings.append(Finding("all-reduce", OK, text + " to ".join(shown)))
    return findings


def _by_unit(units: Sequence[str], pairs: Mapping[tuple[int, int], str]) -> list[str]:
    """Write each pair once, under the unit that is in most of them: most likely that one is at fault."""
    texts, left = [], dict(pairs)
    while left:
        counts = Counter(number for pair in left for number in pair)
        worst = min(counts, key=lambda number: (-counts[number], number))
        mine = {pair: reason for pair, reason in left.items() if worst in pair}
        others = [units[other] for other in sorted(low + high - worst for low, high in mine)]
        texts.append(f"{units[worst]} and {shorten(others, 4)}: {next(iter(mine.values()))}")
        left = {pair: reason for pair, reason in left.items() if pair not in mine}
    return texts


# An elastic run -------------------------------------------------------------------------------------------------------


def compare_links(units: Sequence[tuple[str, str]], nccl: Mapping[str, str | None]) -> list[Finding]:
    """Tell which units (each with its host) have GPUs that cannot share a group over NCCL: by what each host's do."""
    libraries = ((nccl.get(host), name) for name, host in units)
    by_library = group((library, name) for library, name in libraries if library is not None)
    if len(by_library) < 2:
        return []
    text = "; ".join(f"{shorten(names, 3)}: {library}" for library, names in by_library.items())
    advice = "use link_backend=gloo between cells, and one library inside each (docs: Network and threads)"
    return [Finding("links", WARNING, f"GPUs do not speak one NCCL: {text}", advice)]


def compare_runs(url: str, views: Mapping[str, RunView]) -> list[Finding]:
    """Judge what the hosts see of an elastic run."""
    advice = "start it (xffl lighthouse), correct --elastic, or open its port to this host"
    findings = [
        Finding("lighthouse", status=ERROR, text=one["error"], advice=advice, host=host)
        for host, one in views.items()
        if "error" in one
    ]
    views = {host: view for host, view in views.items() if {"cells", "meeting", "stores"} <= view.keys()}
    if not views:
        return findings
    first = next(iter(views.values()))
    cells = first["cells"]
    if not findings:
        known = f"knows {_cells(cell.life for cell in cells)}" if cells else "knows no cell yet"
        last = "no meeting so far" if first["meeting"] is None else f"the last meeting was number {first['meeting']}"
        findings = [Finding("lighthouse", OK, f"{url} answers and {known}; {last}")]
    if not cells:
        return findings
    lost = [f"{_cells([cell.life])} for {cell.seen_s or 0:.0f} s" for cell in cells if cell.is_lost]
    text = f"none of {shorten(lost)}" if lost else f"those of {_cells(cell.life for cell in cells)} arrive"
    advice = "see the output of its job: it has finished or failed, is stopped, or is cut off from the lighthouse"
    findings.append(Finding("heartbeats", WARNING if lost else OK, text, advice))
    heard = Counter(cell.cell for cell in cells if not cell.is_lost and cell.cell is not None)
    twice = [number for number, jobs in heard.items() if jobs > 1]
    if twice:
        text = f"two jobs run as {_cells(map(str, twice))}"
        findings.append(Finding("heartbeats", WARNING, text, "cells make no round meanwhile: end one of the two jobs"))
    return [*findings, *_judge_stores(views), *_judge_tokens(views)]


def _judge_stores(views: Mapping[str, RunView]) -> list[Finding]:
    """Tell from which hosts the ranks of a new epoch could not meet at the store of one of its cells."""
    findings: list[Finding] = []
    first, last = ephemeral_ports()
    advice = f"open ports {first}-{last} between the hosts of all cells, or name the interface that joins them "
    advice += "(XFFL_IFNAME) in that cell's job; if its process hangs, end it"
    for host, view in views.items():
        addresses = {cell.life: cell.store for cell in view["cells"]}
        for life, reason in view["stores"].items():
            if reason is not None:
                text = f"that of {_cells([life])} at {addresses.get(life)} cannot be used: {reason}"
                findings.append(Finding("stores", status=ERROR, text=text, advice=advice, host=host))
    lives = dict.fromkeys(life for view in views.values() for life in view["stores"])
    return findings or ([Finding("stores", OK, f"those of {_cells(lives)} answer")] if lives else [])


def _judge_tokens(views: Mapping[str, RunView]) -> list[Finding]:
    """Tell which cells run with another token than a host has."""
    findings = []
    for host, view in views.items():
        if "token_error" in view:
            findings.append(Finding("token", status=ERROR, text=view["token_error"], advice=_TOKEN_ADVICE, host=host))
        for verdict, lives in group((verdict, life) for life, verdict in view.get("tokens", {}).items()).items():
            status, text = _VERDICTS.get(verdict, _VERDICTS["no proof"])
            where = "" if status == OK else host
            findings.append(
                Finding("token", status=status, text=f"{_cells(lives)}: {text}", advice=_TOKEN_ADVICE, host=where)
            )
    return list(dict.fromkeys(findings))


def _cells(lives: Iterable[str]) -> str:
    """Name the cells that these starts are of."""
    numbers = [life.partition(".")[0] for life in lives]
    return f"{'cell' if len(numbers) == 1 else 'cells'} {shorten(numbers, 8)}"


# The survey -----------------------------------------------------------------------------------------------------------


@dataclass
class Survey:
    """What the programs of a job have told, by their numbers, and what follows; that of rank 0 is the first.

    The first program of each host speaks for it.
    """

    request: Request
    members: Mapping[int, Member]
    world_size: int
    with_pairs: bool = True  # whether hosts have torch
    findings: list[Finding] = field(default_factory=list)  # what is known before
    clocks: dict[int, tuple[float, float]] = field(default_factory=dict)  # ahead of rank 0's, and the error's bound
    answers: dict[int, Answer] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)  # what is wrong with a program's messages

    def __post_init__(self) -> None:
        heads: dict[int, int] = {}  # by node
        for number, member in self.members.items():
            if member["report"] is not None:
                heads.setdefault(member["node"], number)
        names = [self.members[number]["host"].name for number in heads.values()]
        self.hosts = {
            number: f"{name}#{at}" if names.count(name) > 1 else name
            for at, (number, name) in enumerate(zip(heads.values(), names, strict=True))
        }
        """The names of the hosts, by the number of the program that speaks for each."""
        members = [member for member in self.members.values() if member["node"] in heads]
        ranks = {rank: member for member in members for rank in member["ranks"]}
        self._ranks = [(self.hosts[heads[ranks[rank]["node"]]], ranks[rank]) for rank in sorted(ranks)]
        self.missing = [rank for rank in range(self.world_size) if rank not in ranks]
        """The ranks that have told nothing."""
        self._cells: dict[str, set[int]] = {}  # by host, the cells that have ranks there
        self._of_cells: list[Finding] = []
        self._units: list[tuple[str, str]] = []  # what is paired, cells or hosts, each with its host

    def report_of(self, number: int) -> HostReport:
        """Return what a host has found of itself."""
        report = self.members[number]["report"]
        assert report is not None
        return report

    def plan(self) -> Plan:
        """Return what the hosts that have answered so far are to try of each other; once."""
        tried = {number: name for number, name in self.hosts.items() if number not in self.failures}
        places = {name: at for at, name in enumerate(tried.values())}
        self._units = self._place_units(list(places))
        both = set[tuple[int, int]]()
        for low in range(len(self._units) if self.with_pairs else 0):
            both |= {(min(low, high), max(low, high)) for high in probe.partners(low, len(self._units))}
        return Plan(
            token=secrets.token_hex(4),
            hosts=[
                Place(
                    number=number,
                    name=name,
                    address=self.report_of(number)["address"] or LOOPBACK,
                    ports=self.report_of(number)["ports"],
                )
                for number, name in tried.items()
            ],
            pairs=[
                (low, high, places[self._units[low][1]], places[self._units[high][1]]) for low, high in sorted(both)
            ],
        )

    def report(self, plan: Plan) -> Report:
        """Compare what the hosts have told, and have found by a plan."""
        names = tuple(self.hosts.values())
        reports = {name: self.report_of(number) for number, name in self.hosts.items()}
        findings = [*self.findings, *compare_environments([member for _, member in self._ranks])]
        # Hosts of several names may be one machine, such as the nodes of a SLURM that somebody tries at home.
        is_one_machine = not self.missing and len({report["machine"] for report in reports.values()}) == 1
        findings += [
            replace(each, host=name)
            for name, report in reports.items()
            for each in (_alone(report) if is_one_machine else report["findings"])
        ]
        if len(names) > 1:
            findings += compare_versions({name: report["versions"] for name, report in reports.items()})
            clocks = {self.hosts[number]: clock for number, clock in self.clocks.items()}
            findings += compare_clocks({names[0]: (0.0, 0.0), **clocks})
        for name in names:
            ranks = [member for host, member in self._ranks if host == name]
            if ranks and ranks[0]["local_size"] in (None, len(ranks)):
                findings.append(replace(probe.check_threads(ranks), host=name))
        findings += compare_runtimes({name: report["runtime"] for name, report in reports.items()}, self._cells)
        findings += self._of_cells
        if self.request.elastic is None:  # else cells have gloo between them
            findings += compare_links(self._units, {name: report["nccl"] for name, report in reports.items()})
        findings += self._compare_answers(plan)
        advice = "repair what is named here on that host, and run the doctor again"
        findings += [
            Finding("host", status=ERROR, text=text, advice=advice, host=self.hosts.get(number, f"rank {number}"))
            for number, text in self.failures.items()
        ]
        if len(names) == 1:
            findings = [replace(finding, host=finding.host or names[0]) for finding in findings]
        return Report(merge(findings, names), names, self.world_size)

    def _compare_answers(self, plan: Plan) -> list[Finding]:
        hosts = {host["name"]: host for host in plan["hosts"]}
        names = list(hosts)
        answers = {self.hosts[number]: answer for number, answer in self.answers.items()}
        findings = compare_ports(hosts, answers) if len(hosts) > 1 else []
        folders: dict[str, dict[str, Any]] = {
            name: {**answer["folder"], "unseen": [names[at] for at in answer["folder"]["unseen"] if at < len(names)]}
            for name, answer in answers.items()
        }
        path = probe.shared_folder(self.request)
        findings += compare_folders(path, folders, is_named=self.request.shared is not None)
        results: dict[tuple[int, int], list[PairResult]] = {}
        for low, high, *_ in plan["pairs"]:
            for rank, (unit, host) in enumerate((self._units[low], self._units[high])):
                silent: PairResult = {"error": "no answer", "is_silent": True}
                half = answers[host]["pairs"].get(f"{low}-{high}.{rank}", silent) if host in answers else silent
                if "error" not in half and not (half.get("seconds", 0.0) > 0.0 and "mib" in half):
                    half = {"error": "it sent no result"}
                half = {**half, "error": f"{unit}: {half['error']}"} if "error" in half else half
                results.setdefault((low, high), []).append(half)
        findings += compare_pairs([name for name, _ in self._units], results)
        if self.request.elastic is not None:
            runs = {name: answer["run"] for name, answer in answers.items() if answer["run"] is not None}
            findings += compare_runs(self.request.elastic, runs)
        return findings

    def _place_units(self, hosts: Sequence[str]) -> list[tuple[str, str]]:
        """Return what is paired, cells or hosts, each with its host; see whether the cells fit the ranks."""
        units = [(name, name) for name in hosts]
        if len(units) == 1:
            units = [(f"{name} (rank {rank})", name) for rank, name in enumerate([*hosts, *hosts])]
        if self.request.federated is None:
            return units
        if self.missing:
            text = f"not checked, since {len(self.missing)} of {self.world_size} ranks are missing"
            self._of_cells.append(Finding("cells", WARNING, text, "see the lines on meeting and ssh"))
            return units
        hosts_of_ranks = [member["host"] for _, member in self._ranks]
        topology, finding = check_cells(self.request.federated, self.request.federated_by, hosts_of_ranks)
        self._of_cells.append(finding)
        if topology is None:
            return units
        for rank, (name, _) in enumerate(self._ranks):
            self._cells.setdefault(name, set()).add(topology.cell_of(rank))
        firsts = [self._ranks[topology.federation(cell)[0]][0] for cell in range(topology.cells)]
        cells = [(f"cell {cell} ({name})", name) for cell, name in enumerate(firsts) if name in hosts]
        return cells if len(cells) > 1 else units


def _alone(report: HostReport) -> list[Finding]:
    """Return what a host has found of itself, with what holds of its interfaces if there is no other machine."""
    before = list(takewhile(lambda finding: finding.check != "interface", report["findings"]))
    behind = [finding for finding in report["findings"][len(before) :] if finding.check != "interface"]
    return [*before, *report["alone"], *behind]


def check_cells(federated: Federation, by: str, ranks: Sequence[Host]) -> tuple[Topology | None, Finding]:
    """Check that the cells that are asked for, by an option or variable, fit ranks on these hosts."""
    try:
        topology = Topology(len(ranks), sizes_of_ranks(ranks, federated) if isinstance(federated, str) else federated)
    except XfflError as error:
        return None, Finding("cells", ERROR, str(error), f"correct {by}")
    return topology, Finding("cells", OK, f"{topology.cells} cells of {shorten(topology.sizes, 8)}")


def ephemeral_ports() -> tuple[int, int]:
    """Return the first and last port that Linux hands out by itself: stores, gloo and NCCL listen there."""
    if not _EPHEMERAL.exists():
        return 32768, 60999
    first, last = _EPHEMERAL.read_text().split()
    return int(first), int(last)
