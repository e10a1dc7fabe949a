"""Groups of all ranks of a job whose cells are worlds of their own; they meet at the store of the job."""

from __future__ import annotations

import time

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from xffl.distributed.several_worlds.cross_world import CrossWorldGroup
from xffl.distributed.several_worlds.distant_store import StoreGone, connect_store
from xffl.distributed.several_worlds.isolated_cell import IsolatedCell
from xffl.errors import LaunchError

__all__ = ["ENDED", "connect_job_store", "get_from_job", "join_job"]

ENDED = "ended"
"""What a rank leaves at the store of the job that ends by an error: whoever waits for it does so in vain"""
_FIRST_LOOK_S = 0.001
_LOOK_S = 0.25
"""How long a rank that waits for others pauses before it looks again whether they are there, or one of them has ended:
twice as long each time, up to this"""
_LOOKS_PER_S = 1000.0
"""Of all ranks together, at the store of the job"""


def join_job(isolated: IsolatedCell, name: str, timeout_s: float, *, first: int = 0) -> CrossWorldGroup:
    """Return a new group of the ranks of all cells; collective over the job.

    :param isolated: The place of this rank in the job.
    :param name: What the group is for; all ranks make their groups of a name in the same order.
    :param timeout_s: How long ranks are waited for.
    :param first: The number from which the group counts its ranks; by default the job's numbers.
    :return: The group.
    :raises LaunchError: if the others do not come, or one of them has failed before.
    """
    size = sum(isolated.sizes)
    try:
        store = connect_job_store(isolated, timeout_s)
        # Each rank counts its own groups of this name: the same number on all of them.
        number = store.add(f"groups/{name}/{isolated.rank}", 1)
        # gloo would wait for a rank that has failed until the time is over.
        are_here = f"here/{name}/{number}"
        if store.add(f"{are_here}/count", 1) == size:
            store.set(are_here, "")
        get_from_job(store, are_here, isolated, timeout_s)
        return CrossWorldGroup(
            address=isolated.store,
            name=f"{name}/{number}",
            rank=isolated.rank,
            size=size,
            first=first,
            connect_s=timeout_s,
            timeout_s=timeout_s,
        )
    except LaunchError:
        raise
    except StoreGone as gone:
        raise _store_is_gone() from gone
    except RuntimeError as broken:
        raise LaunchError(
            f"rank {isolated.rank} could not join the ranks of all cells at {isolated.store}: {broken}; see the other "
            "ranks' output, and name the network interface with XFFL_IFNAME"
        ) from broken


def connect_job_store(isolated: IsolatedCell, timeout_s: float) -> TCPStore:
    """Return a connection to the store of the job; local.

    :param isolated: The place of this rank in the job.
    :param timeout_s: How long the store is waited for, now and in each call.
    :return: The store.
    :raises LaunchError: if nobody listens there any more: all ranks were there when their cells were isolated.
    """
    try:
        return connect_store(isolated.store, timeout_s)
    except StoreGone as gone:
        raise _store_is_gone() from gone


def _store_is_gone() -> LaunchError:
    return LaunchError(
        "another rank of the job has ended: rank 0, whose process held the store of the job; see its output"
    )


def get_from_job(store: TCPStore, key: str, isolated: IsolatedCell, timeout_s: float) -> bytes:
    """Return what another rank leaves at the store of the job; waits until it has, or a rank has ended. Local.

    :param store: A connection to the store.
    :param key: The name.
    :param isolated: The place of this rank in the job.
    :param timeout_s: How long it is waited for.
    :return: The value.
    :raises LaunchError: if a rank of any cell has ended by an error, or the time is over.
    :raises RuntimeError: if the store has gone with the job's rank 0.
    """
    deadline = time.monotonic() + timeout_s
    at_most_s = max(_LOOK_S, sum(isolated.sizes) / _LOOKS_PER_S)
    pause_s = _FIRST_LOOK_S
    # Not by the store's own wait: torch writes a line each time that one of these is over.
    while not store.check([key]):
        if store.check([ENDED]) and not store.check([key]):  # which may have come before that end
            raise LaunchError(
                f"another rank of the job has ended while rank {isolated.rank} was waiting for it; see its output"
            )
        if time.monotonic() >= deadline:
            raise LaunchError(
                f"rank {isolated.rank} has waited {timeout_s:g} s in vain for other ranks of the job; see their "
                "output, or raise timeout_s"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, at_most_s)
    return store.get(key)
