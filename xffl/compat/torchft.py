"""Workarounds of torchft 0.2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["managers_at"]


@contextmanager
def managers_at(address: str) -> Iterator[None]:
    """Let the managers that are made in this block listen at one address of this host.

    torchft 0.2 listens on all interfaces, and its ``Manager`` has no argument for it:
    https://github.com/meta-pytorch/torchft/blob/main/torchft/manager.py.

    :param address: An address of this host; the port is free.
    :yield: Nothing.
    """
    import torchft.manager  # an extra

    server = torchft.manager.ManagerServer
    torchft.manager.ManagerServer = lambda **options: server(**options | {"bind": f"{address}:0"})
    try:
        yield
    finally:
        torchft.manager.ManagerServer = server
