"""Cells from the machine: a rule names the cell of each host, and hosts are put in an order in which cells are whole.

Pure, but for the file that a rule may name, and the process in which an expression is searched that may never end.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from math import prod
from pathlib import Path
from typing import Any

from xffl.checks import group, shorten, shown
from xffl.cluster.host_lists import expand_hosts
from xffl.cluster.sizes_text import FORMS, parse_federation
from xffl.cluster.slurm.allocation import Host
from xffl.errors import ConfigError, LaunchError, TopologyError
from xffl.files import read_given

__all__ = [
    "Arrangement",
    "arrange",
    "match_hosts",
    "sizes_of_ranks",
]


_SHOWN = 8  # hosts that a message writes out


@dataclass(frozen=True)
class Arrangement:
    """Hosts in an order in which ranks can be laid over them, one host after the other."""

    hosts: tuple[Host, ...]
    names: tuple[str, ...]  # of the cells
    sizes: tuple[int, ...]  # ranks of each cell


# Cells of hosts -------------------------------------------------------------------------------------------------------


def name_cells(hosts: Sequence[Host], rule: str) -> tuple[str, ...]:
    """Return the name of each host's cell."""
    if not hosts:
        raise TopologyError(f"rule {rule!r} has no hosts to find cells of; give at least one")
    kind, _, rest = rule.partition(":")
    if not isinstance(parse_federation(rule, "rule"), str):
        raise ConfigError(f"{rule!r} is no rule but sizes; {FORMS}")
    if kind == "auto":
        return _cells_by_switch(hosts, rule, int(rest) if rest else None)
    if kind == "hosts":
        cell_of_host = match_hosts(rest, [host.name for host in hosts], rule)
        remedy = "correct the expression, whose first group (or else the whole match) names the cell"
    else:
        listed = _read_cells(Path(rest), rule)
        cell_of_host = {host.name: listed.get(host.name) for host in hosts}
        remedy = "list them in the file"
    if missing := [name for name, cell in cell_of_host.items() if not cell]:
        raise TopologyError(f"rule {rule!r} names no cell for {_listed(missing)}; {remedy}")
    return tuple(str(cell_of_host[host.name]) for host in hosts)


_MATCH_S = 5.0
_NESTED = re.compile(r"\)[*+?{]|\\[1-9]|\(\?P=")
"""A group that is repeated, or a reference to one: what may make a search take time exponential in the text"""
_REPEATED = re.compile(r"[*+{]")
_MATCHER = (
    "import json, re, sys\n"
    "pattern, names = json.load(sys.stdin)\n"
    "found = [re.search(pattern, name) for name in names]\n"
    "json.dump([match and match[min(match.re.groups, 1)] for match in found], sys.stdout)"
)


def match_hosts(pattern: str, names: Sequence[str], rule: str) -> dict[str, str | None]:
    """Return what a regular expression finds in each name: its first group, or without groups the whole match.

    Python cannot stop a search, so one that may never end gets a process of its own.
    """
    if not _NESTED.search(pattern) and len(_REPEATED.findall(pattern)) <= 3:
        compiled = re.compile(pattern)
        matches = [compiled.search(name) for name in names]
        return {name: match and match[min(compiled.groups, 1)] for name, match in zip(names, matches, strict=True)}
    command = [sys.executable, "-I", "-S", "-c", _MATCHER]
    try:
        ran = subprocess.run(
            command,
            input=json.dumps([pattern, list(names)]),
            capture_output=True,
            text=True,
            check=True,
            timeout=_MATCH_S,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"rule {rule!r} was searched in the names of {len(names)} hosts for {_MATCH_S:g} s without an end; write "
            "it without a repetition inside of a repetition, such as hosts:^([a-z]+)"
        ) from None
    except subprocess.CalledProcessError as ended:
        why = ended.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"rule {rule!r} cannot be searched in the names of hosts ({why}); simplify it") from ended
    return dict(zip(names, json.loads(ran.stdout), strict=True))


def _cells_by_switch(hosts: Sequence[Host], rule: str, level: int | None) -> tuple[str, ...]:
    """Name cells by the switch at a level below the top; one that stands above several tops is thought of."""
    if unknown := [host.name for host in hosts if not host.switches]:
        raise TopologyError(
            f"rule {rule!r} needs the switches of every host, but those of {_listed(unknown)} are not known: there is "
            "no SLURM_TOPOLOGY_ADDR, scontrol show topology does not name them, or there is no scontrol. HINT: SLURM's "
            "topology/tree plugin is not configured there; use hosts:REGEX or file:PATH"
        )
    tops = {host.switches[0] for host in hosts}
    paths = [host.switches if len(tops) == 1 else ("", *host.switches) for host in hosts]
    if level is None:
        # A host that hangs on the top switch itself, beside others below it, is in a cell of that name.
        return tuple(path[min(1, len(path) - 1)] for path in paths)
    if short := [host.name for host, path in zip(hosts, paths, strict=True) if len(path) <= level]:
        depth = min(map(len, paths)) - 1
        raise TopologyError(
            f"rule {rule!r} asks for switches {level} levels below the top, but {_listed(short)} have fewer; "
            + (f"give a level of 1 to {depth}" if depth else "give auto: all stand below one switch")
        )
    return tuple(path[level] for path in paths)


def _read_cells(path: Path, rule: str) -> dict[str, str]:
    """Read the cell of each host that a file lists."""
    try:
        text = read_given(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"rule {rule!r}: {error}; give a readable file with lines such as: a n[1-4]") from error
    entries = _yaml_entries(text, rule) if path.suffix in (".yaml", ".yml") else _line_entries(text, rule)
    cells: dict[str, str] = {}
    for cell, hosts in entries:
        try:
            names = expand_hosts(hosts)
        except LaunchError as error:
            raise ConfigError(f"rule {rule!r}, cell {cell}: {error}") from error
        for name in names:
            if cells.setdefault(name, cell) != cell:
                raise ConfigError(f"rule {rule!r} lists host {name} in cells {cells[name]} and {cell}; leave one out")
    return cells


def _line_entries(text: str, rule: str) -> list[tuple[str, str]]:
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if len(words) == 1:
            raise ConfigError(
                f"rule {rule!r}, line {number} is {shown(line)}; write a cell and its hosts, such as a n[1-4]"
            )
        entries += [(words[0], word.strip(",")) for word in words[1:]]
    return entries


def _yaml_entries(text: str, rule: str) -> list[tuple[str, str]]:
    from xffl.yaml_text import parse_yaml  # of no use without such a file

    try:
        read: Any = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"rule {rule!r} is no YAML: {error}") from error
    if not isinstance(read, Mapping):
        raise ConfigError(f"rule {rule!r} holds no cells; write a line such as a: n[1-4], or a: [n1, n2], for each")
    entries = []
    for cell, hosts in read.items():
        listed = hosts if isinstance(hosts, list) else [hosts]
        if not listed or not all(isinstance(item, str) for item in listed):
            raise ConfigError(
                f"rule {rule!r}, cell {str(cell)[:100]} is {shown(hosts)}; give a list of hosts, or one like n[1-4]"
            )
        entries += [(str(cell), item) for item in listed]
    return entries


# Cells of ranks -------------------------------------------------------------------------------------------------------


def arrange(hosts: Sequence[Host], rule: str, replica_size: int | None = None) -> Arrangement:
    """Put hosts in an order in which each cell is a run of ranks, cell by cell; :func:`order_hosts` orders each."""
    members = group(zip(name_cells(hosts, rule), hosts, strict=True))
    sizes = tuple(sum(host.slots for host in cell) for cell in members.values())
    ordered: list[Host] = []
    for (name, cell), size in zip(members.items(), sizes, strict=True):
        if replica_size is not None and (replica_size < 1 or size % replica_size):
            shown = ", ".join(f"{host.name} with {host.slots}" for host in cell[:_SHOWN])
            raise TopologyError(
                f"replica size (hsdp) {replica_size} does not divide cell {name} of {size} ranks ({shown}"
                f"{', ...' if len(cell) > _SHOWN else ''}); give a size that divides every cell, or ask for other hosts"
            )
        ordered += order_hosts(cell, replica_size)
    return Arrangement(tuple(ordered), tuple(members), sizes)


def sizes_of_ranks(places: Sequence[Host], rule: str) -> tuple[int, ...]:
    """Return the sizes of the cells that running ranks form."""
    cells = dict(zip((host.name for host in places), name_cells(places, rule), strict=True))
    runs: list[list[Any]] = []  # name, first rank, size
    for rank, place in enumerate(places):
        if not runs or runs[-1][0] != cells[place.name]:
            runs.append([cells[place.name], rank, 0])
        runs[-1][2] += 1
    times = Counter(name for name, *_ in runs)
    if twice := next((name for name, count in times.items() if count > 1), None):
        ends = [(first, first + size - 1) for name, first, size in runs if name == twice]
        parts = " and ".join(f"{first}-{last}" if first < last else f"{first}" for first, last in ends[:_SHOWN])
        raise TopologyError(
            f"rule {rule!r} puts ranks {parts} into cell {twice}, and others between them, but a cell is one run of "
            "ranks. HINT: start with xffl exec, which orders the hosts, or with srun --distribution=block and nodes "
            "listed by cell"
        )
    return tuple(size for _, _, size in runs)


def _listed(names: Sequence[str]) -> str:
    each = list(dict.fromkeys(names))
    return f"{'host' if len(each) == 1 else 'hosts'} {shorten(each, _SHOWN)}"


# The order of the hosts of a cell -------------------------------------------------------------------------------------


_MAX_STATES = 100_000  # choices that are looked through for the best groups: about a second


def order_hosts(hosts: Sequence[Host], replica_size: int | None) -> tuple[Host, ...]:
    """Order the hosts of one cell: replicas touch as few hosts as possible, and then stand below the lowest switches.

    They are the fewest where the hosts differ in no more than a few ways (fewer than 100,000 choices), otherwise few.
    """
    places = _by_switch(hosts)
    if replica_size is None:
        return tuple(hosts[at] for at in places)
    rests = {at: hosts[at].slots % replica_size for at in places}
    order = {at: number for number, at in enumerate(places)}
    near = _group_by_switch(hosts, places, rests, replica_size)
    anywhere, _ = _most_groups(places, rests, replica_size)
    groups = near if len(near) >= len(anywhere) else anywhere
    # All hosts together hold whole replicas, and so do those that no group has taken, if choices were too many.
    taken = set(chain(*groups))
    groups.append([at for at in places if at not in taken])
    in_order = [sorted(members, key=order.__getitem__) for members in groups if members]
    return tuple(hosts[at] for members in sorted(in_order, key=lambda members: order[members[0]]) for at in members)


def _by_switch(hosts: Sequence[Host]) -> list[int]:
    """Return the hosts' places, in their order, but with those below one switch beside each other."""
    seen: dict[tuple[str, ...], int] = {}
    # A host's key has the number of each switch above it, from the top; they are counted as they are met.
    keys = [
        [seen.setdefault(path, len(seen)) for path in accumulate((name,) for name in host.switches)] for host in hosts
    ]
    return sorted(range(len(hosts)), key=keys.__getitem__)


def _group_by_switch(
    hosts: Sequence[Host], places: Sequence[int], rests: dict[int, int], replica_size: int
) -> list[list[int]]:
    """Form groups below the lowest switches first, and of what is left over below those above them."""
    groups: list[list[int]] = []
    left = list(places)
    for depth in range(max(len(host.switches) for host in hosts), -1, -1):
        pools = group((hosts[at].switches[:depth], at) for at in left).values()
        left = []
        for pool in pools:
            best, rest = _most_groups(pool, rests, replica_size)
            groups += best
            left += rest
    return groups


def _most_groups(places: Sequence[int], rests: dict[int, int], replica_size: int) -> tuple[list[list[int]], list[int]]:
    """Form as many groups as possible whose rests sum to whole replicas; also return the hosts that are left over."""
    # Taken from the end, so that those in front come first.
    waiting = group((rests[at], at) for at in reversed(places))
    groups = [[at] for at in reversed(waiting.pop(0, []))]
    # Two rests that fill a replica are a group in one of the best solutions: what else they were grouped with is one.
    for rest in sorted(waiting):
        one, other = waiting[rest], waiting.get(replica_size - rest, [])
        while one and other and (one is not other or len(one) > 1):
            groups.append([one.pop(), other.pop()])
    kinds = sorted(rest for rest, members in waiting.items() if members)
    for counts in _best_groups(kinds, [len(waiting[rest]) for rest in kinds], replica_size):
        groups.append([waiting[rest].pop() for rest, count in zip(kinds, counts, strict=True) for _ in range(count)])
    return groups, sorted(at for members in waiting.values() for at in members)


def _best_groups(kinds: Sequence[int], counts: Sequence[int], replica_size: int) -> list[tuple[int, ...]]:
    """Return groups of whole replicas, each as the number of hosts of each kind; as many as possible.

    Every choice of hosts is looked through from the smallest on. The most groups in a choice are one more than in the
    best choice with one host less where the choice holds whole replicas, and else as many.
    """
    tried = list(counts)
    while prod(count + 1 for count in tried) > _MAX_STATES:
        largest = tried.index(max(tried))
        tried[largest] //= 2
    groups = _groups_of(kinds, tried, replica_size)
    if groups and tried != list(counts):
        used = [sum(group[kind] for group in groups) for kind in range(len(kinds))]
        groups += _best_groups(kinds, [n - m for n, m in zip(counts, used, strict=True)], replica_size)
    return groups


def _groups_of(kinds: Sequence[int], counts: Sequence[int], replica_size: int) -> list[tuple[int, ...]]:
    # A choice of hosts is a number whose digits, each in a base of its own, count the hosts of each kind.
    weights = [prod(count + 1 for count in counts[:kind]) for kind in range(len(kinds))]
    states = prod(count + 1 for count in counts)
    most, totals, last = [0] * states, [0] * states, [-1] * states
    best = 0
    for state in range(1, states):
        for kind, weight in enumerate(weights):
            if state // weight % (counts[kind] + 1) and (last[state] < 0 or most[state - weight] > most[state]):
                most[state], last[state] = most[state - weight], kind
        totals[state] = totals[state - weights[last[state]]] + kinds[last[state]]
        if totals[state] % replica_size == 0:
            most[state] += 1
            best = state if most[state] > most[best] else best
    groups: list[Counter[int]] = []
    while best:
        if totals[best] % replica_size == 0:
            groups.append(Counter())
        groups[-1][last[best]] += 1
        best -= weights[last[best]]
    return [tuple(group[kind] for kind in range(len(kinds))) for group in groups]
