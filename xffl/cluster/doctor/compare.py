"""The examination of a job: its hosts are asked twice, and their answers compared. All verdicts on several hosts."""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from xffl.checks import group, shorten
from xffl.cluster.cells import sizes_of_ranks
from xffl.cluster.doctor import probe
from xffl.cluster.doctor.lines import Line, Message
from xffl.cluster.doctor.messages import explain, read_answer, read_probe, read_time
from xffl.cluster.doctor.probe import ERROR, OK, WARNING, Finding, Request
from xffl.cluster.lighthouse.page import CellStatus
from xffl.cluster.network import SLURM_PORTS
from xffl.cluster.runtimes import Runtime, group_by_runtime, runtime_table
from xffl.cluster.sizes import Federation
from xffl.cluster.slurm.allocation import Host
from xffl.errors import ConfigError, XfflError
from xffl.topology import Topology

__all__ = ["Examination", "Peer", "Report", "check_cells", "ephemeral_ports", "merge"]

_PROBE_S = 90.0  # for a host's checks of itself, beside torch: four programs of 20 s each
_FOLDER_S = 10.0
_SLACK_S = 30.0
_TABLE = ("name", "address", "ports")  # what a host needs to know of another one
_CLOCK_WARNING_S = 0.1  # from here on the order of events in the logs of different hosts is in doubt
_CLOCK_ERROR_S = 5.0  # the newest of several files is not the last one written; soon munge and ssh refuse each other
_LEAST_FREE = 2**30
_SLOW_FOLDER_S = 2.0
_SLOW_MIB_S = 5.0  # a slower pair gets a warning: 40 Mbit/s, at which 1 GiB takes more than three minutes
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_ALL_PAIRS = 64  # hosts or cells up to which each one is paired with every other
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


# The report -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """All findings about the hosts of a job."""

    findings: tuple[Finding, ...]
    hosts: tuple[str, ...] = ()  # the hosts that were checked
    ranks: int = 1

    @property
    def exit_code(self) -> int:
        """1 if there is an error, else 0."""
        return int(self.count(ERROR) > 0)

    def count(self, status: str) -> int:
        """Count the findings of a status."""
        return sum(finding.status == status for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Return the report as ``xffl doctor --json`` prints it."""
        return {
            "hosts": list(self.hosts),
            "ranks": self.ranks,
            "findings": [asdict(finding) for finding in self.findings],
            "counts": {status: self.count(status) for status in (OK, WARNING, ERROR)},
            "exit_code": self.exit_code,
        }


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


def compare_environments(ranks: Sequence[Mapping[str, Any]]) -> list[Finding]:
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


def describe_runtime(versions: Mapping[str, str], report: Mapping[str, Any]) -> Runtime:
    """Return what this host runs: what a process said about its torch, or versions alone where it said nothing."""
    known = {name: str(report[name]) for name in ("processor", "torch", "cuda") if name in report}
    if "nccl" in report:
        known["nccl"] = ".".join(map(str, report["nccl"] or ())) or "none"
    return Runtime(**{"torch": versions["torch"], **known}, xffl=versions["xffl"], python=versions["python"])


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


def compare_names(hosts: Mapping[str, Mapping[str, Any]], answers: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Tell whose names do not resolve where, or to another host."""
    if len({host["name"] for host in hosts.values()}) < len(hosts):
        return [Finding("names", OK, "several nodes have the same name: one machine, or the names are not set")]
    findings = []
    for name, answer in answers.items():
        unknown = [other for other, addresses in answer["names"].items() if not addresses]
        wrong = [
            f"{other} is {addresses[0]}, none of its {', '.join(hosts[other]['addresses'])}"
            for other, addresses in answer["names"].items()
            if addresses and not set(addresses) & set(hosts[other]["addresses"])
        ]
        texts = [f"{shorten(unknown)} not found"] if unknown else []
        texts += [shorten(wrong, 3)] if wrong else []
        if texts:
            advice = "add the hosts to /etc/hosts or DNS; until then set XFFL_IFNAME, and MASTER_ADDR (or "
            advice += "XFFL_CONTROL_IFNAME under mpirun) to an address"
            findings.append(Finding("names", status=WARNING, text="; ".join(texts), advice=advice, host=name))
    return findings or [Finding("names", OK, f"the names of {len(hosts)} hosts resolve on each other")]


def compare_ports(hosts: Mapping[str, Mapping[str, Any]], answers: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Tell which hosts cannot connect to which."""
    findings = []
    first, last = ephemeral_ports()
    ranges = f"ports {SLURM_PORTS[0]}-{SLURM_PORTS[1]} and {first}-{last}"
    advice = f"open {ranges} between the compute nodes, or name the interface that joins them with XFFL_IFNAME"
    for name, answer in answers.items():
        failures = [
            (why, f"{hosts[key]['name']} ({hosts[key]['address']}:{port})") for key, port, why in answer["failures"]
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
        elif answer["seen_s"] > _SLOW_FOLDER_S:
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


def partners(number: int, count: int) -> list[int]:
    """Return the numbers of those that one of many is paired with: all, from 65 on at distances 1, 2, 4, ..."""
    if count <= _ALL_PAIRS:
        return [other for other in range(count) if other != number]
    return [(number + 2**power) % count for power in range((count - 1).bit_length())]


def compare_pairs(
    units: Sequence[str], results: Mapping[tuple[int, int], Sequence[Mapping[str, Any]]]
) -> list[Finding]:
    """Judge the all-reduces of pairs of ``units``; both sides gave an ``error``, or ``seconds`` and ``mib``."""
    rates: dict[tuple[int, int], float] = {}
    failed: dict[tuple[int, int], str] = {}
    for pair, halves in results.items():
        # A side that reports nothing, or that cannot connect, explains why the other one waits in vain.
        wrong = [str(half["error"]) for half in halves if "is_silent" in half]
        wrong += sorted((half["error"] for half in halves if "error" in half), key=lambda why: "connect to" not in why)
        if wrong:
            failed[pair] = wrong[0]
        else:
            rates[pair] = max(half["mib"] / half["seconds"] for half in halves)
    advice = "set XFFL_IFNAME to the interface that joins the hosts (docs: Network and threads); see the lines on "
    advice += "interface, names and ports"
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


def compare_runs(url: str, views: Mapping[str, Message]) -> list[Finding]:
    """Judge what the hosts see of an elastic run."""
    advice = "start it (xffl lighthouse), correct --elastic, or open its port to this host"
    findings = [
        Finding("lighthouse", status=ERROR, text=one["error"], advice=advice, host=host)
        for host, one in views.items()
        if "error" in one
    ]
    views = {host: view for host, view in views.items() if "error" not in view}
    if not views:
        return findings
    first = next(iter(views.values()))
    cells = [CellStatus(**cell) for cell in first["cells"]]
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


def _judge_stores(views: Mapping[str, Message]) -> list[Finding]:
    """Tell from which hosts the ranks of a new epoch could not meet at the store of one of its cells."""
    findings: list[Finding] = []
    first, last = ephemeral_ports()
    advice = f"open ports {first}-{last} between the hosts of all cells, or name the interface that joins them "
    advice += "(XFFL_IFNAME) in that cell's job; if its process hangs, end it"
    for host, view in views.items():
        addresses = {cell["life"]: cell["store"] for cell in view["cells"]}
        for life, reason in view["stores"].items():
            if reason is not None:
                text = f"that of {_cells([life])} at {addresses[life]} cannot be used: {reason}"
                findings.append(Finding("stores", status=ERROR, text=text, advice=advice, host=host))
    lives = dict.fromkeys(life for view in views.values() for life in view["stores"])
    return findings or ([Finding("stores", OK, f"those of {_cells(lives)} answer")] if lives else [])


def _judge_tokens(views: Mapping[str, Message]) -> list[Finding]:
    """Tell which cells run with another token than a host has."""
    findings = []
    for host, view in views.items():
        if "token_error" in view:
            findings.append(Finding("token", status=ERROR, text=view["token_error"], advice=_TOKEN_ADVICE, host=host))
        for verdict, lives in group((verdict, life) for life, verdict in view.get("tokens", {}).items()).items():
            status, text = _VERDICTS[verdict]
            where = "" if status == OK else host
            findings.append(
                Finding("token", status=status, text=f"{_cells(lives)}: {text}", advice=_TOKEN_ADVICE, host=where)
            )
    return list(dict.fromkeys(findings))


def _cells(lives: Iterable[str]) -> str:
    """Name the cells that these starts are of."""
    numbers = [life.partition(".")[0] for life in lives]
    return f"{'cell' if len(numbers) == 1 else 'cells'} {shorten(numbers, 8)}"


# The examination ------------------------------------------------------------------------------------------------------


@dataclass
class Peer:
    """A host that answers."""

    line: Line
    ranks: list[Message]  # facts of its ranks
    address: str | None = None  # where its connection came from


@dataclass
class Examination:
    """All checks of the hosts that answer, in their order. The first host is that of rank 0."""

    request: Request
    peers: Sequence[Peer]
    world_size: int
    findings: list[Finding] = field(default_factory=list)  # what is known before

    def __post_init__(self) -> None:
        named = [str(peer.ranks[0]["host"]["name"]) for peer in self.peers]
        names = [f"{name}#{at}" if named.count(name) > 1 else name for at, name in enumerate(named)]
        self._hosts = dict(zip(names, self.peers, strict=True))
        self._cells: dict[str, set[int]] = {}  # by host, the cells that have ranks there, once they are placed
        self._clocks: dict[str, tuple[float, float]] = {}  # how far each is ahead of this one, and the error's bound
        self._failures: dict[str, Finding] = {}  # by host, why it is not asked any more

    def run(self) -> Report:
        """Ask all hosts and compare their answers."""
        findings = [*self.findings, *compare_environments([rank for peer in self.peers for rank in peer.ranks])]
        machines = len({peer.ranks[0]["machine"] for peer in self.peers})
        request = {"machines": machines, "ranks": self.world_size}
        limit_s = _PROBE_S + probe.import_limit_s(self.request.timeout_s)
        if self.request.elastic is not None:
            limit_s += 4 * self.request.timeout_s + _SLACK_S  # its page, its stores, and their keys
        probes = self._ask(dict.fromkeys(self._hosts, request), limit_s, lambda answer, _: read_probe(answer))
        for name, answer in probes.items():
            findings += [replace(Finding(**each), host=name) for each in answer["findings"]]
            answer["name"] = self._hosts[name].ranks[0]["host"]["name"]
            # Without a name or an interface that works, a host is at least known by where its connection came from.
            answer["address"] = answer["address"] or self._hosts[name].address or "127.0.0.1"
        if len(probes) > 1:
            findings += compare_versions({name: answer["versions"] for name, answer in probes.items()})
            findings += compare_clocks(self._clocks) if next(iter(self._hosts)) in self._clocks else []
        findings += [replace(probe.check_threads(peer.ranks), host=name) for name, peer in self._hosts.items()]
        units, cells = self._place_units(list(probes))
        runtimes = {
            name: describe_runtime(answer["versions"], answer.get("torch", {})) for name, answer in probes.items()
        }
        findings += [*compare_runtimes(runtimes, self._cells), *cells]
        if self.request.elastic is None:  # else cells have gloo between them
            findings += compare_links(units, {name: answer.get("nccl") for name, answer in probes.items()})
        findings += self._meet(probes, units, with_names=machines > 1)
        if self.request.elastic is not None:
            runs = {name: answer["run"] for name, answer in probes.items() if answer["run"] is not None}
            findings += compare_runs(self.request.elastic, runs)
        findings += self._failures.values()
        names = tuple(self._hosts)
        if len(names) == 1:
            findings = [replace(finding, host=finding.host or names[0]) for finding in findings]
        return Report(merge(findings, names), names, self.world_size)

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
        requests: dict[str, Message] = {}
        for number, name in enumerate(names):
            stores = [(pair, rank, probes[units[pair[0]][1]]) for pair, rank in tasks[name]]
            others = {names[at]: probes[names[at]] for at in partners(number, len(names))}
            requests[name] = {
                "hosts": {other: {key: answer[key] for key in _TABLE} for other, answer in others.items()},
                "folder": {**folder, "host": number},
                "pairs": [[str(pair), rank, lender["address"], lender["store"]] for pair, rank, lender in stores],
            }
        most = max(map(len, tasks.values()), default=0)
        limit_s = self.request.timeout_s * (2 + most // probe.THREADS) + 2 * wait_s + _SLACK_S
        answers = self._ask(requests, limit_s, read_answer)
        findings = compare_names(probes, answers) if with_names and len(names) > 1 else []
        findings += compare_ports(probes, answers) if len(names) > 1 else []
        folders = {name: answer["folder"] for name, answer in answers.items()}
        for seen in folders.values():
            seen["unseen"] = [names[number] for number in seen["unseen"]]
        findings += compare_folders(path, folders, is_named=self.request.shared is not None)
        results: dict[tuple[int, int], list[Message]] = {
            pair: [{"error": f"{units[at][0]}: no answer", "is_silent": True} for at in pair] for pair in pairs
        }
        for name, answer in answers.items():
            for (pair, rank), half in zip(tasks[name], answer["pairs"], strict=True):
                if "error" in half:
                    half["error"] = f"{units[pair[rank]][0]}: {half['error']}"
                results[pair][rank] = half
        return findings + compare_pairs([name for name, _ in units], results)

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
        topology, finding = check_cells(self.request.federated, self.request.federated_by, hosts_of_ranks)
        if topology is None:
            return units, [finding]
        for rank, (_, name) in enumerate(ranks):
            self._cells.setdefault(name, set()).add(topology.cell_of(rank))
        firsts = [ranks[topology.federation(cell)[0]][1] for cell in range(topology.cells)]
        cells = [(f"cell {cell} ({name})", name) for cell, name in enumerate(firsts) if name in hosts]
        return (cells if len(cells) > 1 else units), [finding]

    def _ask(
        self, requests: Mapping[str, Message], timeout_s: float, read: Callable[[Message, Message], Message]
    ) -> dict[str, Message]:
        """Return the answers to requests; that a host gives none becomes a finding, and it is not asked any more.

        What it has sent is read together with the request.
        """
        answers: dict[str, Message] = {}
        for name in [name for name in requests if name not in self._failures]:
            line, sent, started = self._hosts[name].line, time.time(), time.monotonic()
            try:
                line.send(requests[name])
                if "machines" in requests[name]:
                    # It tells its time in the middle of a round trip, so half the trip bounds the error.
                    clock = read_time(line.receive(self.request.timeout_s))
                    half = (time.monotonic() - started) / 2
                    self._clocks[name] = clock - (sent + half), half
            except OSError as error:
                self._fail(name, f"lost: {error}")
            except ConfigError as error:
                self._fail(name, explain(error))
        deadline = time.monotonic() + timeout_s
        for name in [name for name in requests if name not in self._failures]:
            try:
                told_at_last = self._hosts[name].line.receive(deadline - time.monotonic())
                answers[name] = read(told_at_last, requests[name])
            except OSError as error:
                self._fail(name, f"lost: {error}")
            except ConfigError as error:
                self._fail(name, explain(error))
        for name in [name for name, answer in answers.items() if "failed" in answer]:
            self._fail(name, f"the check failed: {answers.pop(name)['failed']}")
        return answers

    def _fail(self, name: str, text: str) -> None:
        advice = "repair what is named here on that host, and run the doctor again"
        self._failures[name] = Finding("host", status=ERROR, text=text, advice=advice, host=name)


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
