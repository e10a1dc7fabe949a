"""The ranks of an epoch meet at a store before they connect to each other, so that nobody waits long for a lost one.

Between the meeting of the leaders and the first connection a cell may be killed. Gloo would wait for its ranks until
its timeout is over, ten seconds, in which no cell makes a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

__all__ = ["await_ranks", "delete_keys_of_groups", "keys_of_group"]

HERE_KEY = "here"
"""How many ranks have come."""
LOST_KEY = "lost"
"""Why the others need not be waited for."""
LOOK_S = 0.3
"""How often who waits looks for members that are lost."""
SHORTEST_S, LONGEST_S = 0.002, 0.1
"""Bounds of the time between two questions to the store, which is a quarter of the time that has been waited."""
MOST_OWN_KEYS = 3
"""Keys of a cell's store that belong to no group, at most; torch has one of its own."""


def keys_of_group(group: str, size: int) -> list[str]:
    """Return the keys that the ranks of an epoch may leave at the store where they met and connected.

    :param group: The name of the epoch's group.
    :param size: Number of ranks.
    :return: Also keys that are rarely written.
    """
    addresses = [f"0/{rank}" for rank in range(size)]  # gloo's own names
    return [f"{group}/{key}" for key in (HERE_KEY, LOST_KEY, *addresses)]


def delete_keys_of_groups(store: TCPStore, earlier: Sequence[tuple[str, int]], kept: Sequence[tuple[str, int]]) -> None:
    """Delete what the ranks of earlier groups have left at a store, where this process serves it.

    Beside their own keys these are the notes of ranks that have waited for long, whose names nobody else knows: the
    store's keys are listed only where there are more than there should be.

    :param store: The store.
    :param earlier: The names of these groups, with how many ranks each has had.
    :param kept: Those of the groups whose keys stay.
    """
    for name, size in earlier:
        for key in keys_of_group(name, size):
            store.delete_key(key)
    expected = MOST_OWN_KEYS + sum(len(keys_of_group(name, size)) for name, size in kept)
    if store.num_keys() > expected:
        beginnings = tuple(f"{name}/" for name, _ in earlier)
        for key in store.list_keys():
            if key.startswith(beginnings):
                store.delete_key(key)


def await_ranks(store: Store, size: int, *, within_s: float, find_lost: Callable[[], str] | None = None) -> None:
    """Wait until all ranks of an epoch are at its store; collective over them.

    :param store: The store, with keys of this epoch alone.
    :param size: Number of ranks.
    :param within_s: Seconds until who waits gives up.
    :param find_lost: Called every :data:`LOOK_S` while ranks are missing: tells in words which member is lost, if one
        is. The others hear it through the store, so one rank of a cell is enough.
    :raises RuntimeError: if a member is lost, or ranks have not come in time; or if the store does not answer.
    """
    begun = looked = time.monotonic()
    present = store.add(HERE_KEY, 1)
    while True:
        # Also where all have come: some may have given up before the last one came, or have found a member lost.
        if store.check([LOST_KEY]):
            raise RuntimeError(store.get(LOST_KEY).decode())
        if present >= size:
            return
        now = time.monotonic()
        lost = ""
        if now > begun + within_s:
            lost = f"{size - present} of {size} ranks have not come to the store within {within_s:g} s"
        elif find_lost is not None and now > looked + LOOK_S:
            looked = now
            lost = find_lost()
        if lost:
            store.set(LOST_KEY, lost)
            raise RuntimeError(lost)
        time.sleep(min(max(SHORTEST_S, (now - begun) / 4), LONGEST_S))
        present = store.add(HERE_KEY, 0)
