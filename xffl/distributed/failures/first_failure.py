"""By the store of a world its ranks find out which of them has failed first, and which tells an error that all have."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

from xffl.cluster.launch.failure import is_only_lost_peer, note_alike, note_first, text_of
from xffl.errors import XfflError

__all__ = ["JoinedWorld", "tell_failure"]


_LINGER_S = 1.0  # how long the first rank that fails waits for the others, and rank 0, whose process holds the store

_POLL_S = 0.02

_FIRST = "xffl_first_failure"

_SHOWN = 200  # characters of an error that other ranks show


@dataclass(frozen=True)
class JoinedWorld:
    """The store of the ranks that this process is or was one of."""

    store: Store
    rank: int
    size: int


def tell_failure(error: BaseException, world: JoinedWorld) -> None:
    """Tell the other ranks of an error, and ask what they tell."""
    try:
        if is_only_lost_peer(error):
            _name_first(error, world)
        else:
            what = " ".join(f"{type(error).__name__}: {text_of(error)}".split())[:_SHOWN]
            world.store.compare_set(_FIRST, "", json.dumps([world.rank, what]))
        if isinstance(error, XfflError):
            _choose_speaker(error, world)
    except (RuntimeError, ValueError):  # it has gone with rank 0, or keeps nothing: this rank tells its error itself
        return


def _name_first(error: BaseException, world: JoinedWorld) -> None:
    """Note on an error, which says that another rank has gone, which rank has failed first, if one has told so."""
    if not world.store.check([_FIRST]):
        return
    rank, what = json.loads(world.store.get(_FIRST).decode())
    if rank != world.rank:
        note_first(error, f"rank {rank} ended first, with {what}")


def _choose_speaker(error: XfflError, world: JoinedWorld) -> None:
    """Be the one that tells an error if no other rank has come with it before."""
    digest = hashlib.sha256(f"{type(error).__name__}: {text_of(error)}".encode(errors="replace")).hexdigest()
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
