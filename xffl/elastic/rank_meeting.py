"""The ranks of an epoch meet at a store before they connect to each other, so that nobody waits long for a lost one.

Between the meeting of the leaders and the first connection a cell may be killed. Gloo would wait for its ranks until
its timeout is over, ten seconds, in which no cell makes a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["await_ranks"]

HERE_KEY = "here"
"""How many ranks have come."""
LOST_KEY = "lost"
"""Why the others need not be waited for."""
LOOK_S = 0.3
"""How often who waits looks for members that are lost."""
SHORTEST_S, LONGEST_S = 0.002, 0.1
"""Bounds of the time between two questions to the store, which is a quarter of the time that has been waited."""


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
    while present < size:
        now = time.monotonic()
        if find_lost is not None and now > looked + LOOK_S:
            looked = now
            if lost := find_lost():
                store.set(LOST_KEY, lost)
        if store.check([LOST_KEY]):
            raise RuntimeError(store.get(LOST_KEY).decode())
        if now > begun + within_s:
            raise RuntimeError(f"{size - present} of {size} ranks have not come to the store within {within_s:g} s")
        time.sleep(min(max(SHORTEST_S, (now - begun) / 4), LONGEST_S))
        present = store.add(HERE_KEY, 0)
