"""Stores at which ranks meet: that of torchrun's agent, or one of rank 0, which listens at one address only."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from xffl.cluster.environment import ProcessEnvironment
from xffl.cluster.listening import open_listener
from xffl.cluster.network import LOOPBACK
from xffl.cluster.reaching import await_listener
from xffl.compat.datasets import ENVIRON

__all__ = ["arrive", "has_agents_store", "serve_store"]

_BACK_S = 10.0
"""How long rank 0 tries whether an address leads back to it."""


def has_agents_store(place: ProcessEnvironment, environ: Mapping[str, str] = ENVIRON) -> bool:
    """Tell whether torchrun's agent has a store for the ranks, at the address where they meet."""
    shares = environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    return place.launcher == "torchrun" and dist.is_torchelastic_launched() and shares


def arrive(store: Store, world_size: int) -> int:
    """Return the number of the world that this rank is among the first ``world_size`` ranks of."""
    # All ranks of a world arrive before one of the next does, since none leaves before all have met.
    return int(store.add("xffl_arrivals", 1) - 1) // world_size


def serve_store(host: str, port: int, world_size: int | None, timeout: timedelta, *, is_local: bool) -> TCPStore:
    """Make a store in this process; see :func:`~xffl.cluster.listening.open_listener` for where it listens.

    Where that is at all addresses, a line says so.
    """
    opened = open_listener(host, port, is_local=is_local)
    if opened.is_everywhere:
        print(
            f"xffl: {host} is no address of this host that others reach, so the store of the ranks listens at port "
            f"{opened.port} of all of its addresses; set XFFL_CONTROL_IFNAME to the interface (docs: Security)",
            file=sys.stderr,
        )
        try:
            # As the others do: it must lead back to here, where somebody listens already.
            await_listener(host, opened.port, min(timeout.total_seconds(), _BACK_S))
        except BaseException:
            opened.socket.close()
            raise
    return TCPStore(
        opened.address or LOOPBACK,
        opened.port,
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=opened.socket.detach(),
    )
