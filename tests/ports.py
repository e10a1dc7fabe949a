"""Ports for what tests start, which nobody else takes between looking and listening."""

from __future__ import annotations

import itertools
import os
import socket
from contextlib import suppress

__all__ = ["WORKER", "WORKERS", "free_port", "free_ports"]

WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
"""Number of this worker among those that run files of tests side by side."""
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))

_SHARE = range(10_000 + WORKER * (10_000 // WORKERS), 10_000 + (WORKER + 1) * (10_000 // WORKERS))
# Below what Linux hands out by itself, and below what xffl takes: there, tests beside this one listen on all addresses
# at ports that look free on one of them.
# Processes that start together have neighbouring numbers, and may be of different runs of tests, which share the ports.
_turn = itertools.count(os.getpid() * 97)


def free_ports(count: int) -> list[int]:
    """Return ports of this worker where nobody listens, on any address; the next call returns others."""
    found: list[int] = []
    for _ in _SHARE:
        port = _SHARE[next(_turn) % len(_SHARE)]
        with suppress(OSError), socket.create_server(("", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"only {len(found)} of {count} ports are free between {_SHARE.start} and {_SHARE.stop - 1}")


def free_port() -> int:
    """Return one such port."""
    return free_ports(1)[0]
