"""Mistakes that one rank sees before it can meet the others, such as a RANK beyond the world: told to all of them.

The others wait for this rank at the store where all meet, and would do so until their timeout. It needs no place of its
own to tell them there what is wrong: the address of the store suffices.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import Store  # type: ignore[attr-defined]

from xffl.checks import decimal, index_of
from xffl.cluster.environment import ProcessEnvironment, detect_environment
from xffl.cluster.launch.failure import note_alike, note_unmet
from xffl.cluster.listening import PortHeldError
from xffl.cluster.network import LOOPBACK
from xffl.cluster.reaching import find_listener
from xffl.cluster.recognition.launchers import LAUNCHERS
from xffl.cluster.recognition.refusals import told_rank
from xffl.compat.datasets import ENVIRON
from xffl.distributed.agreement.differences import rebuild_error
from xffl.distributed.failures.uncaught import tell_once
from xffl.distributed.startup.joining import agents_store, join_store
from xffl.distributed.startup.stores import has_agents_store, serve_store
from xffl.distributed.startup.unmet import wait_for_readers
from xffl.errors import LaunchError, XfflError, public_name

__all__ = ["ClaimedPlace", "claimed_place", "end_on_store", "own_place", "raise_at_meeting", "refuse_second_rank_0"]

_REACH_S = 10.0
"""How long a rank tries to reach the store, which may be started after it."""
_SECOND_S = 5.0
"""How long what has the port may take to answer as a store does."""
_KNOWN_S = 2.0
"""How long after a connection rank 0 may take to say how many ranks there are."""


@dataclass(frozen=True)
class ClaimedPlace:
    """What a process that cannot take part knows of the world that it was to be part of."""

    rank: int | None
    """``None`` where it cannot be read; it may lie outside the world"""
    world_size: int | None
    master_addr: str
    master_port: int
    is_on_one_host: bool
    """Whether all ranks are said to be on this host, so that they meet on loopback"""
    has_agents_store: bool
    """Whether they meet at the store of torchrun's agent"""


def claimed_place(arguments: Mapping[str, Any], environ: Mapping[str, str] = ENVIRON) -> ClaimedPlace | None:
    """Return what can be read of this process's place although something is wrong with it; local.

    ``None`` where the address of the meeting is not known, or no other rank is said to be there.
    """
    told: dict[str, Any] = {name: value for name, value in arguments.items() if value is not None}
    row = next((row for row in LAUNCHERS if row.is_told and not row.missing(environ)), None)
    names = {"master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT"}
    if row is not None:
        names |= {**row.variables, **row.more}
    texts = {field: environ[name].strip() for field, name in names.items() if environ.get(name, "").strip()}

    def number(field: str) -> int | None:
        return index_of(told[field]) if field in told else decimal(texts.get(field, ""))

    address, port, size = told.get("master_addr", texts.get("master_addr")), number("master_port"), number("world_size")
    if not isinstance(address, str) or port is None or not 0 < port < 65536 or size == 1 or (row is None and not told):
        return None
    is_one_node = size is not None and number("node_local_size") == size
    launcher = "arguments" if row is None or "master_addr" in told or "master_port" in told else row.name
    place = ProcessEnvironment(
        world_size=size or 0,
        node_local_size=size if is_one_node else None,
        node_world_size=1 if is_one_node else None,
        master_addr=address,
        launcher=launcher,
    )
    return ClaimedPlace(
        rank=number("rank"),
        world_size=size,
        master_addr=address,
        master_port=port,
        is_on_one_host=place.is_on_one_host,
        has_agents_store=has_agents_store(place, environ),
    )


def own_place() -> ClaimedPlace | None:
    """Return the place of this process as its launcher tells it, for a mistake of another kind; ``None`` where alone.

    Under an MPI launcher as collective as :func:`~xffl.cluster.environment.detect_environment`, which the others call.
    """
    try:
        place = detect_environment()
    except LaunchError:
        return claimed_place({})
    if place.master_addr is None or place.master_port is None:
        return None
    return ClaimedPlace(
        rank=place.rank,
        world_size=place.world_size,
        master_addr=place.master_addr,
        master_port=place.master_port,
        is_on_one_host=place.is_on_one_host,
        has_agents_store=has_agents_store(place),
    )


def raise_at_meeting(error: XfflError, place: ClaimedPlace | None) -> NoReturn:
    """Raise an error on this rank, and on all that wait at the store where the ranks of its world meet.

    Local: nobody else has to call it. Where the store cannot be reached within seconds, this rank alone raises.
    """
    if place is None:
        _raise_unmet(error, None)
    tell_once()
    try:
        store = _reach(place)
    except (XfflError, RuntimeError, OSError):  # what was wrong before says more than that nobody is there
        store = None
    if store is None:
        _raise_unmet(error, place.rank)
    end_on_store(
        store, rank=place.rank, world_size=place.world_size, error=error, timeout_s=_REACH_S, is_speaker=place.rank == 0
    )


def refuse_second_rank_0(held: PortHeldError, place: ProcessEnvironment, address: str, port: int) -> NoReturn:
    """Raise that the port is held at which this process, as rank 0, is to listen; local.

    Where it is held by the store of another rank 0, whose ranks are still meeting, all of them raise that there are
    two.
    """
    error = LaunchError(
        f"two processes were started as rank 0 of the ranks that meet at {address}:{port}; give each a rank (RANK) of "
        "its own, or if they are of two jobs, a MASTER_PORT for each job"
    )
    try:
        store = _join(address, port, place.world_size, _SECOND_S)
    except (XfflError, RuntimeError, OSError):  # another program has the port
        store = None
    if store is None:
        raise LaunchError(str(held)) from None
    end_on_store(store, rank=place.rank, world_size=place.world_size, error=error, timeout_s=_KNOWN_S, is_speaker=False)


def end_on_store(
    store: Store, rank: int | None, world_size: int | None, error: XfflError, timeout_s: float, *, is_speaker: bool
) -> NoReturn:
    """Raise an error on all ranks that wait at the store where they meet, or come to it later, and on this one.

    Local, for a rank that cannot take part: the others find the verdict in
    :func:`~xffl.distributed.startup.meeting.check_consistent_on_store`.
    ``is_speaker``: whether it tells the error; rank 0 does, where it waits with the others.
    """
    teller = "a process whose rank cannot be read" if rank is None else f"rank {rank}"
    store.compare_set("error", "", json.dumps([public_name(error), f"{error} (first told by {teller})"]))
    verdict = store.get("error").decode()
    store.set("verdict", verdict)
    wait_for_readers(store, rank, world_size, timeout_s)
    refused = rebuild_error(*json.loads(verdict))
    note_alike(refused, is_speaker=is_speaker)
    raise refused


def _raise_unmet(error: XfflError, rank: int | None) -> NoReturn:
    """Raise an error on this rank, which cannot tell the others of it; if it is one of several, rank 0 speaks."""
    rank = told_rank(os.environ) if rank is None else rank
    if rank is not None:
        tell_once()
        note_unmet(error, rank, is_speaker=rank == 0)
    raise error


def _reach(place: ClaimedPlace) -> Store | None:
    """Return the store where the others meet or will meet."""
    if place.has_agents_store:
        return agents_store(place.rank or 0, place.world_size or 1, _REACH_S)
    if place.rank != 0:
        return _join(place.master_addr, place.master_port, place.world_size, _REACH_S)
    timeout = timedelta(seconds=_REACH_S)
    return serve_store(place.master_addr, place.master_port, None, timeout, is_local=place.is_on_one_host)


def _join(address: str, port: int, world_size: int | None, timeout_s: float) -> Store | None:
    """Join the store of rank 0; ``None`` if it is not that of a world whose ranks are still meeting."""
    # Rank 0 listens on loopback where it knows that all ranks are on its host; this one may not know it.
    host = find_listener(address, port, timeout_s)
    store = join_store(host, port, None, timeout_s, is_local=host == LOOPBACK)
    store.wait(["xffl_world_size"], timedelta(seconds=_KNOWN_S))
    size = decimal(store.get("xffl_world_size").decode()) or world_size
    number = store.add("xffl_arrivals", 1)
    # Once all have met, what is written here would reach nobody, or the next world.
    return store if size is None or number <= size else None
