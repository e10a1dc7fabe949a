"""The store of the world: connections to it, and the notes that ranks leave there while they wait for each other."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from xffl.distributed.collectives import Group
from xffl.distributed.several_worlds.cross_world import CrossWorldGroup
from xffl.errors import LaunchError

__all__ = ["WaitingNote", "WaitingNotes", "clone_of", "clone_store"]

LOG = logging.getLogger(__name__)


def clone_store(otherwise: str) -> Store:
    """Return a connection of its own to the store of the world: no other thread's calls wait for those over it; local.

    :param otherwise: What the caller's user may do where there is none.
    :return: The store; where torch.distributed is not initialized, one of this process.
    :raises LaunchError: if no second connection can be opened.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None:
        return HashStore()
    store = world.get_group_store()
    try:
        return clone_of(store)
    except RuntimeError as lost:
        raise LaunchError(
            f"no second connection to the store of the world could be opened ({lost}); see that rank 0 can be reached, "
            f"or {otherwise}"
        ) from lost


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
    does not count it as absent.
    """

    def __init__(self, group: Group | None) -> None:
        self._store: Store
        self._written: WaitingNote | None = None
        self._is_speaker = False
        if isinstance(group, CrossWorldGroup):
            self._store = group.store
            self._own = group.rank()
            self._first = group.first
            self._ranks = list(range(group.size()))
            self._name = "all"
            return
        self._store = clone_store("see the other ranks' output")
        self._own = dist.get_rank()
        self._first = 0
        self._ranks = list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)
        self._name = "all" if group is None else group.group_name

    def write(self, note: WaitingNote) -> None:
        """Note that this rank waits."""
        self._store.set(self._key(self._own), json.dumps([note.call, note.where]))
        self._written = note
        self._store.add(self._key_of("count", note), 1)

    def remove(self) -> None:
        """Note that this rank waits no more."""
        self._store.delete_key(self._key(self._own))
        self.leave_call()

    def leave_call(self) -> None:
        """Note that this rank is no longer one of those that wait in the call; that it had come stays."""
        if self._written is None:
            return
        self._store.add(self._key_of("count", self._written), -1)
        if self._is_speaker:
            self._store.delete_key(self._key_of("told", self._written))
        self._written = None
        self._is_speaker = False

    def become_speaker(self) -> bool:
        """Tell whether this rank is the first to tell of its wait; it does so for all that wait in the same call.

        The next wait there is told of again once this rank waits no more.
        """
        if self._written is not None:
            self._is_speaker = self._store.add(self._key_of("told", self._written), 1) == 1
        return self._is_speaker

    def count_alike(self) -> int:
        """Return how many other ranks wait in the same call, at the same line."""
        return 0 if self._written is None else self._store.add(self._key_of("count", self._written), 0) - 1

    def read(self, most: int) -> dict[int, WaitingNote | None]:
        """Return the note of each of the first other ranks, with ``None`` for one that does not wait."""
        found: dict[int, WaitingNote | None] = {}
        for rank in self._others()[:most]:
            key = self._key(rank)
            is_there = self._store.check([key])
            found[self._first + rank] = WaitingNote(*json.loads(self._store.get(key))) if is_there else None
        return found

    def _others(self) -> Sequence[int]:
        return [rank for rank in self._ranks if rank != self._own]

    def _key(self, name: int | str) -> str:
        return f"xffl_waits/{self._name}/{name}"

    def _key_of(self, what: str, note: WaitingNote) -> str:
        return self._key(f"{what}/{note.call}{note.where}")
