"""Where processes of a job listen: on loopback within a host, else at one address.

What listens at all addresses of a host is open to every network that the host is on, and nothing that torch's stores
and gloo hear is authenticated (docs/security.rst).
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass

from xffl.cluster.network import (
    GLOO_VARIABLE,
    LOCAL_VARIABLE,
    LOOPBACK,
    control_address,
    is_loopback,
    list_interfaces,
    release_gloo,
)
from xffl.cluster.reaching import KNOBS, resolve_patiently
from xffl.compat.datasets import ENVIRON
from xffl.errors import LaunchError

__all__ = [
    "Opened",
    "PortHeldError",
    "gloo_beyond_this_host",
    "open_listener",
]


_BUSY_S = 3.0
"""How long a port is tried again that is taken: a job that is just ending may still have it."""
_PAUSE_S = 0.1


class PortHeldError(LaunchError):
    """The port where this process is to listen is held by another one."""


@dataclass(frozen=True)
class Opened:
    """A socket that listens, and where."""

    socket: socket.socket
    address: str
    port: int
    is_everywhere: bool = False
    """Whether it listens at all addresses, since the one that was asked for is none of this host's."""


def open_listener(host: str, port: int, *, is_local: bool, environ: Mapping[str, str] = ENVIRON) -> Opened:
    """Listen at a port where others look for this host: on loopback if all are here, else at the address of its name.

    That is the first address of ``host`` which this host has, and which is not loopback unless ``host`` is written as
    such; where it has none of them, that of the interface for the rendezvous, if one is named, else all addresses:
    behind a translation of addresses a host does not know the one by which others reach it.

    :param host: Address or name by which the others know this host.
    :param port: The port; 0 for any that is free.
    :param is_local: Whether all others are on this host.
    :param environ: Where ``XFFL_CONTROL_IFNAME`` and its like are looked up.
    :return: The socket, which the caller closes or hands on.
    :raises LaunchError: if the name does not resolve, its interface is down, or the port is taken.
    """
    if is_local:
        return _open(LOOPBACK, port)
    addresses = resolve_patiently(host)
    for address in addresses:
        if is_loopback(address) and address != host:
            continue  # as in Debian's /etc/hosts: the others know this name by another address
        try:
            opened = _open(address, port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise LaunchError(f"{host}:{port} cannot be listened at ({error.strerror}); {KNOBS}") from error
            continue
        down = next(
            (interface for interface in list_interfaces() if interface.address == address and not interface.is_up), None
        )
        if down is not None:
            opened.socket.close()
            raise LaunchError(
                f"the interface of {host} on {socket.gethostname()} is down ({down}), so no other host reaches rank 0; "
                f"{KNOBS}"
            )
        return opened
    if (named := control_address(environ)) is not None and not is_loopback(named):
        return _open(named, port)
    return _open("", port)


def _open(address: str, port: int) -> Opened:
    """Listen at an address of this host, or at all of them; OSError where the address is none of it."""
    deadline = time.monotonic() + _BUSY_S
    while True:
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            opened = socket.create_server((address, port), family=family, backlog=4096)
            return Opened(opened, address, int(opened.getsockname()[1]), is_everywhere=not address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            if time.monotonic() > deadline:
                raise PortHeldError(
                    f"port {port} of {address or 'all addresses'} on {socket.gethostname()} is held by another "
                    "program, or by another process with RANK=0; set MASTER_PORT to a port that is free there, the "
                    "same on all ranks, and give each process a rank of its own"
                ) from error
        time.sleep(_PAUSE_S)


@contextmanager
def gloo_beyond_this_host(store: str, environ: MutableMapping[str, str] = ENVIRON) -> Iterator[None]:
    """Let gloo listen while the block runs where ranks at other hosts reach it, unless their store is on loopback."""
    kept = {name: environ[name] for name in (GLOO_VARIABLE, LOCAL_VARIABLE) if name in environ}
    try:
        if not is_loopback(store):
            release_gloo(environ)
        yield
    finally:
        environ.update(kept)
