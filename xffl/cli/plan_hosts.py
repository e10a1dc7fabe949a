"""The part of ``xffl plan`` about hosts: which cell each is in, the order of their ranks, and where replicas stand."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from xffl.cluster.cells import Arrangement, Federation, arrange, parse_federation
from xffl.cluster.environment import complete_federation
from xffl.cluster.slurm.allocation import (
    Host,
    find_allocation,
    parse_hosts,
    read_topology,
    show_topology,
    with_switches,
)
from xffl.errors import ConfigError, LaunchError
from xffl.topology import Topology

__all__ = ["add_options", "asked_federation", "describe", "find_hosts", "knob", "lines", "order"]

_MAX_HOSTS = 16
_MAX_CELLS = 8


def add_options(parser: ArgumentParser) -> None:
    """Add the options about hosts."""
    group = parser.add_argument_group("hosts; by default those of the SLURM job that this shell stands in")
    group.add_argument(
        "--hosts", type=str, metavar="LIST", help="a:4,b[1-3]:8 (host:ranks), or @FILE with a host a line"
    )
    group.add_argument(
        "--topology", type=str, metavar="FILE", help="output of scontrol show topology, or a topology.conf"
    )


def asked_federation(options: Namespace) -> tuple[Federation | None, int | None, tuple[str, ...]]:
    """Return the sizes or the rule, and the replica size, from options or else the environment."""
    asked = None if options.federated is None else parse_federation(options.federated, "--federated")
    return complete_federation(asked, options.hsdp)


def knob(options: Namespace) -> str:
    """Return what gives the federation: the option, else the variable."""
    return "XFFL_FEDERATED" if options.federated is None else "--federated"


def find_hosts(options: Namespace, federated: Federation | None) -> tuple[Host, ...] | None:
    """Return the hosts that are described, or that the job has; ``None`` where only sizes are asked for."""
    if not isinstance(federated, str):
        if options.topology is not None:
            raise ConfigError(f"--topology {options.topology} would not be read; give --federated auto, too")
        return None if options.hosts is None else parse_hosts(options.hosts)
    is_auto = federated.startswith("auto")
    if options.hosts is not None:
        hosts = parse_hosts(options.hosts)
    else:
        is_silent = options.topology is None  # else the file tells
        job = find_allocation(wants_switches=is_silent, needs_switches=is_silent and is_auto)
        if job is None:
            raise ConfigError(
                f"{knob(options)} {federated} finds cells by hosts, but this is no SLURM job; call it in the batch "
                "script or in the shell of salloc, or describe hosts with --hosts a[1-4]:4,b[1-4]:4"
            )
        hosts = job.hosts
    if options.topology is not None:
        return with_switches(hosts, _read_topology(options.topology))
    if is_auto and not all(host.switches for host in hosts):
        return with_switches(hosts, read_topology(show_topology()))
    return hosts


def _read_topology(file: str) -> dict[str, tuple[str, ...]]:
    try:
        found = read_topology(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, LaunchError) as error:
        raise ConfigError(f"--topology {file}: {error}; give what scontrol show topology prints") from error
    if not found:
        raise ConfigError(f"--topology {file} names no switch with nodes; give what scontrol show topology prints")
    return found


def order(hosts: tuple[Host, ...], federated: Federation | None, replica_size: int | None) -> Arrangement:
    """Return hosts in the order of their ranks, as ``xffl exec`` orders them by a rule, and the cells that it finds."""
    if isinstance(federated, str):
        return arrange(hosts, federated, replica_size)
    return Arrangement(hosts, (), ())


def describe(arrangement: Arrangement, topology: Topology, federated: Federation | None) -> dict[str, Any]:
    """Describe where ranks and replicas stand, for people and for JSON."""
    starts = (0, *accumulate(host.slots for host in arrangement.hosts))
    cells = []
    for cell in range(topology.cells):
        first, end = topology.offsets[cell], topology.offsets[cell + 1]
        on: dict[int, set[int]] = {}  # host to the cell's replicas on it
        spread = []
        for replica in range(topology.replicas(cell)):
            below = {bisect_right(starts, rank) - 1 for rank in topology.shard_group(cell, replica)}
            spread.append(len(below))
            for host in below:
                on.setdefault(host, set()).add(replica)
        hosts = [
            {
                "name": arrangement.hosts[host].name,
                "switches": arrangement.hosts[host].switches,
                "ranks": (max(starts[host], first), min(starts[host + 1], end) - 1),
                "replicas": sorted(on[host]),
            }
            for host in sorted(on)
        ]
        name = arrangement.names[cell] if arrangement.names else None
        cells.append({"name": name, "ranks": (first, end - 1), "hosts": hosts, "hosts_of_replicas": spread})
    return {"rule": federated if isinstance(federated, str) else None, "cells": cells}


def lines(placed: dict[str, Any]) -> list[str]:
    """Write for people what :func:`describe` returns."""
    by = "" if placed["rule"] is None else f", with cells by {placed['rule']}"
    told = ["", f"Hosts in the order of their ranks{by}:"]
    for number, cell in enumerate(placed["cells"][:_MAX_CELLS]):
        hosts, name = cell["hosts"], "" if cell["name"] is None else f" ({cell['name']})"
        told.append(f"  cell {number}{name}: {_run('rank', *cell['ranks'])} on {_count(len(hosts), 'host')}")
        width = max(len(host["name"]) for host in hosts[:_MAX_HOSTS])
        for host in hosts[:_MAX_HOSTS]:
            ranks = _run("rank", *host["ranks"])
            replicas = _run("replica", host["replicas"][0], host["replicas"][-1])
            below = f"  below {'.'.join(host['switches'])}" if host["switches"] else ""
            told.append(f"    {host['name']:<{width}}  {ranks:<14}  {replicas:<14}{below}".rstrip())
        if len(hosts) > _MAX_HOSTS:
            told.append(f"    and {len(hosts) - _MAX_HOSTS} more hosts")
        counts = sorted(Counter(cell["hosts_of_replicas"]).items())
        each = [f"{_count(n, 'replica')} on {_count(k, 'host')}{' each' if n > 1 else ''}" for k, n in counts]
        told.append(f"    {', '.join(each)}")
    if len(placed["cells"]) > _MAX_CELLS:
        told.append(f"  and {len(placed['cells']) - _MAX_CELLS} more cells")
    return told


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _run(what: str, first: int, last: int) -> str:
    return f"{what} {first}" if first == last else f"{what}s {first}-{last}"
