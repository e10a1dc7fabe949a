"""A rank that is lost while the ranks of a group connect, or does not come: the others stop waiting for it."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from xffl.cluster.reaching import connection_error
from xffl.distributed.failures.world_store import clone_of, turn_of_waiting
from xffl.distributed.groups import Gathering, Making

__all__ = ["await_group"]

_Made = TypeVar("_Made", bound="dist.ProcessGroup | None")

_CONNECT_S = 2.0
"""How long a rank tries to connect to the store once more."""
_LOOKS = 10
"""How often a rank looks within a timeout, and at most once a second."""


def await_group(making: Making[_Made], gathering: Gathering) -> None:
    """Wait until a group is made, or has failed; RuntimeError where it will not be.

    Of two ranks that connect over gloo one waits for the other, five times as long as the group's timeout, and does not
    notice that this one is gone (``Pair::waitUntilConnected``, torch 2.11 to 2.13, is told five times the timeout, and
    ``Device::connectAsListener`` ignores it: https://github.com/pytorch/gloo/blob/main/gloo/transport/tcp/device.cc).
    Nothing ends such a wait. So it is left to its thread where another rank says that it cannot make the group, or
    where for one timeout no further rank has come and the group is not made.

    Each look has a connection of its own to the store, for which rank 0 has an open file, and ranks look one after
    another (:func:`~xffl.distributed.failures.world_store.turn_of_waiting`).
    """
    period = max(1.0, gathering.timeout_s / _LOOKS)
    here = 0
    deadline = time.monotonic() + gathering.timeout_s
    problem = ""
    is_known = False  # to the others, from the rank that has noticed it
    is_unreachable = False  # whether the store took no connection at the last look
    if making.wait(min(period, turn_of_waiting(gathering.size))):
        return
    while not problem:
        try:
            store = _second_connection(gathering.store)
            if store is None:  # over the first connection a thread may wait for as long as the store's timeout says
                problem = "the store of the ranks is gone: it takes no connections" if is_unreachable else ""
            elif store.check([gathering.failure]):
                reason = store.get(gathering.failure).decode(errors="replace")
                problem = f"another rank of the job has ended by: {reason}"
                is_known = True
            elif (arrived := store.add(gathering.arrivals, 0)) > here:
                here = arrived
                deadline = time.monotonic() + gathering.timeout_s
        except RuntimeError as gone:
            problem = f"the store of the ranks is gone: {gone}"
        if not problem:
            is_unreachable = store is None
            del store  # it is closed, so that another rank has its place
        left = deadline - time.monotonic()
        if not problem and left <= 0:
            absent = gathering.size - here
            others = f"{absent} of them" if absent else "connections: one of them was lost meanwhile"
            problem = f"timed out waiting {gathering.timeout_s:g} s for {others}"
        if making.wait(0 if problem else min(period, left)):
            return
    if not is_known:
        with suppress(RuntimeError):
            if (store := _second_connection(gathering.store)) is not None:
                store.set(gathering.failure, problem)
    raise RuntimeError(f"gloo could not connect the {gathering.size} ranks of a group: {problem}")


def _second_connection(store: Store) -> Store | None:
    """Return a connection to a store beside that over which a thread may wait for an address.

    That one where this process can open no other, and ``None`` where the store takes none.
    """
    inner = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    try:
        # torch tries for long to connect to a store that has gone, and writes lines about it.
        if isinstance(inner, TCPStore) and connection_error(inner.host, str(inner.port), _CONNECT_S) is not None:
            return None
        return clone_of(store)
    except RuntimeError:  # too many files are open, or it has gone now
        return store
