"""By the store of a world its ranks find out which of them has failed first, and which tells an error that all have."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

from xffl.cluster.launch.failure import is_noted_alike, is_only_lost_peer, note_alike, note_first, text_of
from xffl.errors import XfflError, public_name
from xffl.topology import Topology, ranks_text

__all__ = ["JoinedWorld", "tell_failure"]


_LINGER_S = 1.0  # how long the first rank that fails waits for the others, and rank 0, whose process holds the store

_MARK_S = 0.5  # how long a rank that lost another one waits for those that are left to say that they are

_POLL_S = 0.02

_FIRST = "xffl_first_failure"

_LEFT = "xffl_left"

_SILENT = "xffl_silent"

_MOST_LOOKING = 4  # ranks that look for those that are gone, each with a question for every rank; they tell the others

_SHOWN = 200  # characters of an error that other ranks show


@dataclass(frozen=True)
class JoinedWorld:
    """The store of the ranks that this process is or was one of."""

    store: Store
    rank: int
    size: int
    topology: Topology | None = None
    """Which rank is in which cell, where that is known"""
    has_worlds: bool = False
    """Whether each cell is a world of its own, in which ranks have other numbers than here"""


def tell_failure(error: BaseException, world: JoinedWorld) -> None:
    """Tell the other ranks of an error, and ask what they tell."""
    try:
        if is_only_lost_peer(error):
            _name_first(error, world)
        else:
            what = " ".join(f"{public_name(error)}: {text_of(error)}".split())[:_SHOWN]
            world.store.compare_set(_FIRST, "", json.dumps([world.rank, what]))
        if isinstance(error, XfflError) and not is_noted_alike(error):
            _choose_speaker(error, world)
    except (RuntimeError, ValueError):  # it has gone with rank 0, or keeps nothing: this rank tells its error itself
        return


def _name_first(error: BaseException, world: JoinedWorld) -> None:
    """Note on an error, which says that another rank has gone, which rank that is.

    A rank that fails says so before it leaves. One that is killed says nothing: it is one of those that do not come to
    the store while the ranks that are left do.
    """
    silent = () if world.store.check([_FIRST]) else _find_silent(world)
    if world.store.check([_FIRST]):
        rank, what = json.loads(world.store.get(_FIRST).decode())
        if rank != world.rank:
            note_first(error, f"{_place_of(rank, world)} ended first, with {what}")
    elif silent:
        # Some of several may only wait for a rank that has not left yet, and have lost nobody.
        which = "which was" if len(silent) == 1 else "one of which was"
        note_first(
            error,
            f"nothing was heard since of {_named(silent, world)}, {which} killed (out of memory?) or hangs",
        )


def _find_silent(world: JoinedWorld) -> tuple[int, ...]:
    """Return the ranks that do not say in time that they are left."""
    store = world.store
    store.set(f"{_LEFT}/{world.rank}", "")
    place = store.add(_LEFT, 1)
    here = place
    deadline = time.monotonic() + _MARK_S
    while here < world.size and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        here = store.add(_LEFT, 0)
    if here >= world.size:
        return ()
    if place <= _MOST_LOOKING:
        silent = tuple(rank for rank in range(world.size) if not store.check([f"{_LEFT}/{rank}"]))
        store.set(_SILENT, json.dumps(silent))
        return silent
    deadline += _MARK_S
    while not store.check([_SILENT]):
        if time.monotonic() >= deadline:
            return ()
        time.sleep(_POLL_S)
    return tuple(rank for rank in json.loads(store.get(_SILENT).decode()) if rank != world.rank)


def _place_of(rank: int, world: JoinedWorld) -> str:
    """Write which rank this is, also in its cell where that is a world of its own."""
    if world.topology is None or not world.has_worlds:
        return f"rank {rank}"
    cell = world.topology.cell_of(rank)
    return f"rank {rank} of the job, which is rank {rank - world.topology.offsets[cell]} of cell {cell},"


def _named(ranks: Sequence[int], world: JoinedWorld) -> str:
    """Write which ranks these are, and of which cells where there are several."""
    if world.topology is None or world.topology.cells == 1:
        return ranks_text(ranks)
    cells = sorted({world.topology.cell_of(rank) for rank in ranks})
    return f"{ranks_text(ranks)} ({ranks_text(cells).replace('rank', 'cell')})"


def _choose_speaker(error: XfflError, world: JoinedWorld) -> None:
    """Be the one that tells an error if no other rank has come with it before."""
    digest = hashlib.sha256(f"{public_name(error)}: {text_of(error)}".encode(errors="replace")).hexdigest()
    key = f"xffl_errors/{digest}"
    is_speaker = world.store.add(key, 1) == 1
    is_waiting = is_speaker or world.rank == 0
    is_met = is_waiting and _await_all(key, world, is_speaker=is_speaker)
    note_alike(error, is_speaker=is_speaker, is_of_all=is_met)


def _await_all(key: str, world: JoinedWorld, *, is_speaker: bool) -> bool:
    """Wait a moment for all ranks to come with the same error; tell whether they have.

    Rank 0 stays until the speaker knows, too: the store ends with it.
    """
    deadline = time.monotonic() + _LINGER_S
    store = world.store
    try:
        while time.monotonic() < deadline:
            if store.add(key, 0) == world.size:
                if is_speaker:
                    store.set(f"{key}/known", "")
                    return True
                if store.check([f"{key}/known"]):
                    return True
            time.sleep(_POLL_S)
    except RuntimeError:  # rank 0 has gone, with another error or none
        return False
    return False
