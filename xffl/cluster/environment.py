"""The place of this process among all: from explicit arguments, from the launcher that started it, or alone.

This package is the only reader of the environment's process variables; the launchers it knows are a table in
:mod:`xffl.cluster.recognition.launchers`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from xffl.checks import integer
from xffl.cluster.network import is_loopback
from xffl.cluster.recognition.arguments import complete_arguments
from xffl.cluster.recognition.find import find_launcher, launcher_of
from xffl.cluster.recognition.launcher import Fields, read_number
from xffl.cluster.recognition.launchers import KNOWS_NODES
from xffl.cluster.sizes import Federation, check_cells, lone_cell, read_federation, read_replica_size
from xffl.compat.datasets import ENVIRON
from xffl.errors import ConfigError, LaunchError, TopologyError

__all__ = [
    "ISOLATED_VARIABLE",
    "ProcessEnvironment",
    "accept_cells",
    "checks_world",
    "complete_federation",
    "detect_environment",
    "federation_variables",
    "is_isolated",
    "is_lone_cell_requested",
    "request_federation",
    "requested_federation",
    "required_cells",
    "sources_named",
]

ISOLATED_VARIABLE = "XFFL_ISOLATED"
"""Tells a rank whose other variables are those of its cell where it is in the whole job."""

_PARTS = (("rank", "world_size"), ("node_local_rank", "node_local_size"), ("node_rank", "node_world_size"))
"""Fields that count from 0, each with the field that says to where."""
_ARGUMENTS = (*chain(*_PARTS), "master_addr", "master_port")
_OF_NODES = ("node_local_size", "node_rank", "node_world_size")
"""Fields that may be left open until the ranks meet."""


@dataclass(frozen=True)
class ProcessEnvironment:
    """Where this process stands among all.

    The rendezvous is ``None`` where the world is this one process and no address was given. Nodes may hold different
    numbers of ranks; ``node_local_size`` is that of this rank's node. What the launcher does not tell of the nodes is
    ``None``: the ranks find it out together when they meet (:mod:`xffl.distributed.startup.meeting`).
    """

    rank: int = 0
    world_size: int = 1
    node_local_rank: int = 0
    node_local_size: int | None = 1
    node_rank: int | None = 0
    node_world_size: int | None = 1
    master_addr: str | None = None
    master_port: int | None = None
    launcher: str = "none"
    reason: str = "no launcher's variables are set"

    @property
    def is_on_one_host(self) -> bool:
        """Whether all ranks of the world are known to be on this host; the same on all of them."""
        if self.world_size == 1:
            return True
        # Without arguments for the nodes all ranks count as those of one, wherever they are.
        is_known = self.launcher in KNOWS_NODES or is_loopback(self.master_addr or "")
        return is_known and self.node_world_size == 1 and self.node_local_size == self.world_size

    def node(self) -> tuple[int, int, int]:
        """Return the number of ranks on this node, its number, and how many nodes there are, once all are known."""
        if self.node_local_size is None or self.node_rank is None or self.node_world_size is None:
            raise LaunchError(
                f"{self.launcher} does not tell rank {self.rank} its node, and the ranks have not met yet; call "
                "xffl.session, or set LOCAL_WORLD_SIZE, GROUP_RANK and GROUP_WORLD_SIZE"
            )
        return self.node_local_size, self.node_rank, self.node_world_size


def detect_environment(
    environ: Mapping[str, str] = ENVIRON, *, names: Mapping[str, str] | None = None, **arguments: Any
) -> ProcessEnvironment:
    """Find out where this process stands.

    Under an MPI launcher it is collective over ``MPI.COMM_WORLD`` unless variables and arguments tell where to meet, so
    every rank must call it with the same kinds of arguments. Otherwise no process talks to another.

    An argument, of the name of a field from ``rank`` to ``master_port``, beats the launcher's variable unless it is
    ``None``. A world size other than the launcher's means that the caller started the processes: nothing is taken from
    the launcher then, and without arguments for the nodes all ranks are on one node. Messages call arguments as
    ``names`` says.
    """
    called = {name: (names or {}).get(name, name) for name in _ARGUMENTS}
    merged = Fields()
    for name, value in arguments.items():
        if value is not None:
            merged.take(f"argument {called[name]}", **{name: value})
    _check(merged)
    row = find_launcher(environ)
    claimed = row.read(environ) if row is not None else {}
    if row is None or merged.get("world_size", claimed["world_size"]) != claimed["world_size"]:
        complete_arguments(merged, environ, called)
        launcher, reason = ProcessEnvironment.launcher, ProcessEnvironment.reason
        if merged:
            launcher, reason = "arguments", "rank and world size were given"
    else:
        if "rank" not in merged:
            launcher_of(environ)  # raises where other variables say that this is another rank
        for name, variable in {**row.variables, **row.more}.items():
            if name in claimed:
                merged.take(variable, **{name: claimed[name]})
        _check(merged)
        row.complete(merged, environ)
        launcher, reason = (row.name, f"{', '.join((*row.variables.values(), *row.also))} are set")
    _check(merged)
    if merged.get("world_size", 1) == 1 and not {"master_addr", "master_port"} <= merged.keys():
        # Half a rendezvous is of no use to a single process, which needs none.
        merged.pop("master_addr", None)
        merged.pop("master_port", None)
    is_open = merged.get("world_size", 1) > 1
    fields = {**dict.fromkeys(_OF_NODES), **merged} if is_open else merged
    return ProcessEnvironment(**fields, launcher=launcher, reason=reason)


def _check(merged: Fields) -> None:
    """Raise where fields are impossible or contradict each other; fields that are not known yet are left out."""
    sources = merged.sources
    for name, value in merged.items():
        if name != "master_addr":
            merged[name] = integer(sources[name], value, None, error=LaunchError)
    for part, whole in _PARTS:
        size = merged.get(whole)
        if size is not None and size < 1:
            raise LaunchError(f"{sources[whole]}={size} is less than 1; start at least one process")
        if merged.get(part, 0) < 0 or (size is not None and merged.get(part, 0) >= size):
            limit = "what is counted from 0" if size is None else f"0 to {size - 1}, as {sources[whole]}={size} says"
            raise LaunchError(f"{sources[part]}={merged[part]} is outside {limit}; give every process its own place")
    if not str(merged.get("master_addr", "an address")).strip():
        raise LaunchError(f"{sources['master_addr']} is {merged['master_addr']!r}; give the address of rank 0's host")
    if not 0 < merged.get("master_port", 1) < 65536:
        raise LaunchError(f"{sources['master_port']}={merged['master_port']} must be a port from 1 to 65535")
    if any(whole not in merged for _, whole in _PARTS):
        return
    world, local, nodes = (merged[whole] for _, whole in _PARTS)
    if local > world - (nodes - 1) or (nodes == 1 and local != world):
        raise LaunchError(
            f"{sources['node_local_size']}={local} ranks on this node do not fit {sources['world_size']}={world} ranks "
            f"on {sources['node_world_size']}={nodes} nodes; every node holds at least one"
        )


def requested_federation(environ: Mapping[str, str] = ENVIRON) -> tuple[Federation | None, int | None]:
    """Return sizes or a rule from ``XFFL_FEDERATED``, and the replica size from ``XFFL_HSDP``; ``None`` where unset."""
    federated, hsdp = (environ.get(name, "").strip() or None for name in ("XFFL_FEDERATED", "XFFL_HSDP"))
    return (
        read_federation(federated, "XFFL_FEDERATED"),
        None if hsdp is None else read_replica_size(hsdp, "XFFL_HSDP"),
    )


def complete_federation(
    federated: Federation | None, hsdp: int | None, environ: Mapping[str, str] = ENVIRON
) -> tuple[Federation | None, int | None, tuple[str, ...]]:
    """Fill in from the environment what arguments leave open; the last value is for :func:`sources_named`."""
    asked, replica_size = requested_federation(environ)
    variables = federation_variables(asked if federated is None else None, replica_size if hsdp is None else None)
    return (
        asked if federated is None else federated,
        replica_size if hsdp is None else hsdp,
        tuple(f"{name}={text}" for name, text in variables.items()),
    )


@contextmanager
def sources_named(sources: Iterable[str]) -> Iterator[None]:
    """Say where sizes come from, in the TopologyError of this block: that they do not fit."""
    try:
        yield
    except TopologyError as error:
        names = " and ".join(sources)
        if not names:
            raise
        raise TopologyError(f"{error} (asked for by {names})") from error


def federation_variables(federated: Federation | None, hsdp: int | None) -> dict[str, str]:
    """Return the variables from which :func:`requested_federation` reads a federation, as far as there is one."""
    values = {}
    if federated is not None:
        values["XFFL_FEDERATED"] = ",".join(map(str, federated if isinstance(federated, tuple) else (federated,)))
    if hsdp is not None:
        values["XFFL_HSDP"] = str(hsdp)
    return values


def request_federation(
    federated: Federation | None, hsdp: int | None, environ: MutableMapping[str, str] = ENVIRON
) -> None:
    """Ask for a federation in this process, as ``xffl exec`` does in the processes that it starts."""
    environ.update(federation_variables(federated, hsdp))


def is_lone_cell_requested(environ: Mapping[str, str] = ENVIRON) -> bool:
    """Tell whether variables say that this job is one cell of several jobs, or only what such a cell needs."""
    return any(environ.get(name, "").strip() for name in ("XFFL_CELL", "XFFL_FROM", "XFFL_EXPORT"))


def is_isolated(environ: Mapping[str, str] = ENVIRON) -> bool:
    """Tell whether this process is a rank of an isolated cell, so that its variables are those of the cell."""
    return bool(environ.get(ISOLATED_VARIABLE, "").strip())


def required_cells(environ: Mapping[str, str] = ENVIRON) -> int | None:
    """Return how many cells there must be at least, as ``XFFL_REQUIRE_CELLS`` says; ``None`` where unset or empty."""
    text = environ.get("XFFL_REQUIRE_CELLS", "").strip()
    return integer("XFFL_REQUIRE_CELLS", read_number("XFFL_REQUIRE_CELLS", text)) if text else None


def accept_cells(
    asked: Federation | None, cells: int, world_size: int, required: int | None, *, is_speaker: bool = True
) -> None:
    """Refuse fewer cells than are required, and say it in a line where a federation turns out to be one cell.

    A line is said, too, where sizes are only given by the variable that alpha-unito/xffl reads them from.
    """
    check_cells(cells, required, asked)
    if asked is None and is_speaker:
        from xffl.cluster.recognition.foreign_sizes import tell_foreign_sizes

        tell_foreign_sizes()
    # To ranks that xffl exec starts it has said so already.
    if asked is not None and cells == 1 and is_speaker and os.environ.get("XFFL_LAUNCHED_CELLS") != "1":
        print(lone_cell(asked, world_size), file=sys.stderr, flush=True)


def checks_world(environ: Mapping[str, str] = ENVIRON) -> bool:
    """Tell whether collectives of the script over all cells are to be reported, as ``XFFL_CHECK_WORLD=1`` says."""
    text = environ.get("XFFL_CHECK_WORLD", "").strip()
    if text not in ("", "0", "1"):
        raise ConfigError(
            f"XFFL_CHECK_WORLD is {text!r}; give 1 to have collectives of the script over all cells reported, or 0"
        )
    return text == "1"
