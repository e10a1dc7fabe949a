"""Connecting to a store that a rank of another world serves, and that goes when this rank ends."""

from __future__ import annotations

import errno
import os
import time
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from xffl.cluster.reaching import connection_error

__all__ = ["StoreGone", "connect_store"]

_TRY_S = 2.0
"""How long a try to connect lasts, after which it is seen again whether anybody listens."""


class StoreGone(RuntimeError):
    """Nobody listens at the address of a store that was served before."""


def connect_store(address: str, within_s: float) -> TCPStore:
    """Connect to a store that is served since its process started; local.

    Where nobody listens any more, torch's client would try again until its whole time is over. That may also come about
    after it was seen that somebody listens: so a try is short, and looks first.

    :param address: HOST:PORT.
    :param within_s: Seconds until this gives up, and until the client gives up later, in each call.
    :return: A client of the store.
    :raises StoreGone: if nobody listens there.
    :raises RuntimeError: if nobody answers in time.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + within_s
    while True:
        left_s = max(0.1, deadline - time.monotonic())
        if connection_error(host, port, left_s) == os.strerror(errno.ECONNREFUSED):
            raise StoreGone(f"nothing listens at {address}")
        limit = timedelta(seconds=min(_TRY_S, left_s))
        try:
            client = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=limit)
        except RuntimeError:
            if time.monotonic() >= deadline:
                raise
        else:
            client.set_timeout(timedelta(seconds=within_s))
            return client
