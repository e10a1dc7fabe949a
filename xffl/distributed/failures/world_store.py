"""The store of the world: connections to it, and the notes that ranks leave there while they wait for each other."""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from xffl.distributed.collectives import Group
from xffl.distributed.several_worlds.cross_world import CrossWorldGroup
from xffl.errors import LaunchError

__all__ = ["WaitingNote", "WaitingNotes", "clone_of", "clone_store", "connected_at_once", "turn_of_waiting"]

LOG = logging.getLogger(__name__)

_IN_A_SECOND = 100  # connections, which rank 0 opens and closes
_MOST_S = 10.0  # in which all have connected: a second has more of them where there are more than 1,000 ranks


def connected_at_once(ranks: int) -> int:
    """Return how many of so many ranks that begin to wait at once connect to the store within a second; local."""
    return min(ranks, max(_IN_A_SECOND, math.ceil(ranks / _MOST_S)))


def turn_of_waiting(ranks: int) -> float:
    """Return after how many more seconds one of so many ranks that begin to wait at once connects to the store; local.

    They take turns, since rank 0 has an open file for each rank that is connected. A number that a script seeds is not
    touched.
    """
    return random.SystemRandom().uniform(0, min(_MOST_S, ranks / _IN_A_SECOND))


def clone_store(otherwise: str) -> Store:
    """Return a connection of its own to the store of the world: no other thread's calls wait for those over it; local.

    :param otherwise: What the caller's user may do where there is none.
    :return: The store; where torch.distributed is not initialized, one of this process.
    :raises LaunchError: if no second connection can be opened.
    """
    store = _store_of_world()
    try:
        return clone_of(store)
    except RuntimeError as lost:
        raise LaunchError(
            f"no second connection to the store of the world could be opened ({lost}); see that rank 0 can be reached, "
            f"or {otherwise}"
        ) from lost


def _store_of_world() -> Store:
    """Return the store of the world, or one of this process where there is no world; local."""
    world = dist.group.WORLD if dist.is_initialized() else None
    return HashStore() if world is None else world.get_group_store()


def clone_of(store: Store) -> Store:
    """Return another connection to a store, or the store where it has none; local. RuntimeError if it cannot."""
    try:
        clone: Store = store.clone()  # type: ignore[attr-defined]
        return clone
    except RuntimeError as lost:
        # A store written in Python (the fake one, or a user's) has no clone, and no connection that a call would keep
        # busy. Torch says so by this text alone.
        if "pure virtual function" in str(lost):
            LOG.debug("the store of the world cannot be cloned: one connection is shared with everything else")
            return store
        raise


@dataclass(frozen=True)
class WaitingNote:
    """What a rank waits in: a call of all ranks, and the line of the script."""

    call: str
    where: str


class WaitingNotes:
    """Notes of the ranks of a group that have waited for a while, from which each can read who has not come; local.

    Nothing is written while ranks come in time. A note stays where its rank has given up, so that who gives up after it
    does not count it as absent. Each call has a connection of its own to the store, which is closed when it ends, since
    rank 0 has an open file for each of them. :meth:`remove`, which many ranks call at once, takes that of the world.
    """

    def __init__(self, group: Group | None) -> None:
        self._group_store: Store | None = None
        self._written: WaitingNote | None = None
        self._is_speaker = False
        if isinstance(group, CrossWorldGroup):
            self._group_store = group.store
            self._own = group.rank()
            self._first = group.first
            self._ranks = list(range(group.size()))
            self._name = "all"
            return
        self._own = dist.get_rank()
        self._first = 0
        self._ranks = list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)
        self._name = "all" if group is None else group.group_name

    def write(self, note: WaitingNote) -> None:
        """Note that this rank waits."""
        store = self._connect()
        store.set(self._key(self._own), json.dumps([note.call, note.where]))
        self._written = note
        store.add(self._key_of("count", note), 1)

    def remove(self) -> None:
        """Note that this rank waits no more."""
        store = self._group_store or _store_of_world()
        store.delete_key(self._key(self._own))
        self._leave_call(store)

    def leave_call(self) -> None:
        """Note that this rank is no longer one of those that wait in the call; that it had come stays."""
        if self._written is not None:
            self._leave_call(self._connect())

    def _leave_call(self, store: Store) -> None:
        if self._written is None:
            return
        store.add(self._key_of("count", self._written), -1)
        if self._is_speaker:
            store.delete_key(self._key_of("told", self._written))
        self._written = None
        self._is_speaker = False

    def become_speaker(self) -> bool:
        """Tell whether this rank is the first to tell of its wait; it does so for all that wait in the same call.

        The next wait there is told of again once this rank waits no more.
        """
        if self._written is not None:
            self._is_speaker = self._connect().add(self._key_of("told", self._written), 1) == 1
        return self._is_speaker

    def count_alike(self) -> int:
        """Return how many other ranks wait in the same call, at the same line."""
        return 0 if self._written is None else self._connect().add(self._key_of("count", self._written), 0) - 1

    def read(self, most: int) -> dict[int, WaitingNote | None]:
        """Return the note of each of the first other ranks, with ``None`` for one that does not wait."""
        found: dict[int, WaitingNote | None] = {}
        store = self._connect()
        for rank in self._others()[:most]:
            key = self._key(rank)
            is_there = store.check([key])
            found[self._first + rank] = WaitingNote(*json.loads(store.get(key))) if is_there else None
        return found

    def _connect(self) -> Store:
        return self._group_store or clone_store("see the other ranks' output")

    def _others(self) -> Sequence[int]:
        return [rank for rank in self._ranks if rank != self._own]

    def _key(self, name: int | str) -> str:
        return f"xffl_waits/{self._name}/{name}"

    def _key_of(self, what: str, note: WaitingNote) -> str:
        return self._key(f"{what}/{note.call}{note.where}")
