"""Where processes of a job listen, and how long others wait for them: on loopback within a host, else at one address.

What listens at all addresses of a host is open to every network that the host is on, and nothing that torch's stores
and gloo hear is authenticated (docs/security.rst).
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass

from xffl.cluster.network import LOCAL_VARIABLE, connection_error, control_address, list_interfaces
from xffl.errors import LaunchError

__all__ = [
    "LOOPBACK",
    "Opened",
    "PortHeldError",
    "UnansweredError",
    "await_listener",
    "find_listener",
    "gloo_beyond_this_host",
    "is_loopback",
    "keep_gloo_local",
    "open_listener",
    "release_gloo",
]

LOOPBACK = "127.0.0.1"
"""The address of this host that only its own processes reach."""
_GLOO = "GLOO_SOCKET_IFNAME"

_BUSY_S = 3.0
"""How long a port is tried again that is taken: a job that is just ending may still have it."""
_NO_WAY_S = 10.0
"""How long a name that does not resolve, or a network that this host has no way to, is tried again."""
_SILENT_S = 30.0
"""How long a host is tried again that does not answer at all, or whose network says that it is not there."""
_TRY_S = 5.0
_TELL_S = 30.0
"""How long somebody waits for a listener before a line says for whom."""
_PAUSE_S = 0.1


class PortHeldError(LaunchError):
    """The port where this process is to listen is held by another one."""


class UnansweredError(LaunchError):
    """Nobody listens where this process looks for rank 0, which need not know of it."""


@dataclass(frozen=True)
class Opened:
    """A socket that listens, and where."""

    socket: socket.socket
    address: str
    port: int
    is_everywhere: bool = False
    """Whether it listens at all addresses, since the one that was asked for is none of this host's."""


def is_loopback(host: str) -> bool:
    """Tell whether a host is written as an address of loopback, or by loopback's name."""
    return host in ("localhost", "::1") or host.startswith("127.")


def open_listener(host: str, port: int, *, is_local: bool, environ: Mapping[str, str] = os.environ) -> Opened:
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
    addresses = _resolve(host, _NO_WAY_S)
    for address in addresses:
        if is_loopback(address) and address != host:
            continue  # as in Debian's /etc/hosts: the others know this name by another address
        try:
            opened = _open(address, port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise LaunchError(f"{host}:{port} cannot be listened at ({error.strerror}); {_KNOBS}") from error
            continue
        down = next((one for one in list_interfaces() if one.address == address and not one.is_up), None)
        if down is not None:
            opened.socket.close()
            raise LaunchError(
                f"the interface of {host} on {socket.gethostname()} is down ({down}), so no other host reaches rank 0; "
                f"{_KNOBS}"
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


_KNOBS = "set MASTER_ADDR to an address of rank 0's host and MASTER_PORT to a free port of it"


def _resolve(host: str, patience_s: float) -> list[str]:
    """Return the addresses of a host, those of IPv4 first."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found.sort(key=lambda entry: entry[0] != socket.AF_INET)
            return list(dict.fromkeys(str(entry[4][0]) for entry in found))
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"the address {host!r}, where ranks are to meet, does not resolve on {socket.gethostname()} "
                    f"({getattr(error, 'strerror', None) or error}); set MASTER_ADDR to an address of rank 0's host"
                ) from error
        time.sleep(_PAUSE_S)


def find_listener(host: str, port: int, timeout_s: float) -> str:
    """Return the address at which somebody listens at a port of a host: its own, or if it is this host, loopback."""
    addresses = _resolve(host, min(timeout_s, _NO_WAY_S))
    is_here = any(one.address in addresses for one in list_interfaces())
    deadline = time.monotonic() + timeout_s
    while True:
        for address in (host, LOOPBACK) if is_here else (host,):
            if (why := connection_error(address, port, _TRY_S)) is None:
                return address
        if time.monotonic() > deadline:
            raise LaunchError(f"nothing answers at {host}:{port} ({why}); {_KNOBS}")
        time.sleep(_PAUSE_S)


def await_listener(host: str, port: int, timeout_s: float, *, is_patient: bool = False, waiting: str = "") -> None:
    """Wait until somebody listens at a port of a host; a connection is made, and closed again.

    A host that refuses is up, and the rank that is to listen there may start later. A name that does not resolve and a
    network that is down get better within seconds or not at all, unless ``is_patient``.
    Raises LaunchError if nobody comes to listen there in time. Who waits for long says so in a line, once, if it has a
    name (``waiting``).
    """
    begun = time.monotonic()
    _resolve(host, timeout_s if is_patient else min(timeout_s, _NO_WAY_S))
    while True:
        left_s = begun + timeout_s - time.monotonic()
        try:
            socket.create_connection((host, port), max(0.1, min(_TRY_S, left_s))).close()
            return
        except (OSError, OverflowError) as error:
            patience_s = timeout_s if is_patient else min(timeout_s, _patience_of(error))
            if time.monotonic() - begun > patience_s:
                why = "no answer: packets are dropped" if isinstance(error, TimeoutError) else str(error)
                raise UnansweredError(
                    f"nothing answers at {host}:{port}, where rank 0 is to listen ({why}; tried for {patience_s:g} s "
                    f"from {socket.gethostname()}); see that rank 0 was started and that this host reaches its "
                    "network, and set MASTER_ADDR and MASTER_PORT, or XFFL_CONTROL_IFNAME, the network interface"
                ) from error
            if waiting and time.monotonic() - begun > _TELL_S:
                print(
                    f"xffl: {waiting} has waited {_TELL_S:g} s for rank 0 to listen at {host}:{port} ({error}); see "
                    "that rank 0 was started, and that all were given the same MASTER_ADDR and MASTER_PORT",
                    file=sys.stderr,
                )
                waiting = ""
        time.sleep(_PAUSE_S)


def _patience_of(error: Exception) -> float:
    if isinstance(error, TimeoutError) or getattr(error, "errno", None) in (errno.EHOSTUNREACH, errno.EHOSTDOWN):
        return _SILENT_S
    return float("inf") if isinstance(error, (ConnectionError, InterruptedError)) else _NO_WAY_S


# gloo listens at the address of the host's name, or at that of the interface which a variable names -------------------


def keep_gloo_local(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let gloo listen on loopback in this process, unless an interface is named; :func:`release_gloo` takes it back."""
    if environ.get(_GLOO):
        return
    loopback = next((one.name for one in list_interfaces() if one.is_up and one.address == LOOPBACK), None)
    if loopback is not None:
        environ.update({_GLOO: loopback, LOCAL_VARIABLE: loopback})


def release_gloo(environ: MutableMapping[str, str] = os.environ) -> None:
    """Take back what :func:`keep_gloo_local` has set, here or in a process above this one."""
    local = environ.pop(LOCAL_VARIABLE, None)
    if local is not None and environ.get(_GLOO) == local:
        del environ[_GLOO]


@contextmanager
def gloo_beyond_this_host(store: str, environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Let gloo listen while the block runs where ranks at other hosts reach it, unless their store is on loopback."""
    kept = {name: environ[name] for name in (_GLOO, LOCAL_VARIABLE) if name in environ}
    try:
        if not is_loopback(store):
            release_gloo(environ)
        yield
    finally:
        environ.update(kept)
