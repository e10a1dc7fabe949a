"""Where others are looked for that listen: how long their names, networks and ports are tried."""

from __future__ import annotations

import errno
import socket
import sys
import time

from xffl.cluster.network import LOOPBACK, list_interfaces
from xffl.errors import LaunchError

__all__ = [
    "UnansweredError",
    "await_listener",
    "connection_error",
    "find_listener",
    "resolve_patiently",
]

KNOBS = "set MASTER_ADDR to an address of rank 0's host and MASTER_PORT to a free port of it"
"""What messages about the place of rank 0 say may be set"""

_NO_WAY_S = 10.0
"""How long a name that does not resolve, or a network that this host has no way to, is tried again."""
_SILENT_S = 30.0
"""How long a host is tried again that does not answer at all, or whose network says that it is not there."""
_TRY_S = 5.0
_TELL_S = 30.0
"""How long somebody waits for a listener before a line says for whom."""
_PAUSE_S = 0.1


class UnansweredError(LaunchError):
    """Nobody listens where this process looks for rank 0, which need not know of it."""


def connection_error(host: str, port: int | str, timeout_s: float) -> str | None:
    """Try to connect to a port; return why that is not possible."""
    try:
        socket.create_connection((host, int(port)), timeout_s).close()
    except TimeoutError:
        return "no answer: packets are dropped"
    except (OSError, ValueError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def resolve_patiently(host: str, patience_s: float | None = None) -> list[str]:
    """Return the addresses of a host, those of IPv4 first; a name that does not resolve yet is tried again."""
    deadline = time.monotonic() + (_NO_WAY_S if patience_s is None else patience_s)
    while True:
        try:
            infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            infos.sort(key=lambda entry: entry[0] != socket.AF_INET)
            return list(dict.fromkeys(str(entry[4][0]) for entry in infos))
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"the address {host!r}, where ranks are to meet, does not resolve on {socket.gethostname()} "
                    f"({getattr(error, 'strerror', None) or error}); set MASTER_ADDR to an address of rank 0's host"
                ) from error
        time.sleep(_PAUSE_S)


def find_listener(host: str, port: int, timeout_s: float) -> str:
    """Return the address at which somebody listens at a port of a host: its own, or if it is this host, loopback."""
    addresses = resolve_patiently(host, min(timeout_s, _NO_WAY_S))
    is_here = any(interface.address in addresses for interface in list_interfaces())
    deadline = time.monotonic() + timeout_s
    while True:
        for address in (host, LOOPBACK) if is_here else (host,):
            if (why := connection_error(address, port, _TRY_S)) is None:
                return address
        if time.monotonic() > deadline:
            raise LaunchError(f"nothing answers at {host}:{port} ({why}); {KNOBS}")
        time.sleep(_PAUSE_S)


def await_listener(host: str, port: int, timeout_s: float, *, is_patient: bool = False, waiting: str = "") -> None:
    """Wait until somebody listens at a port of a host; a connection is made, and closed again.

    A host that refuses is up, and the rank that is to listen there may start later. A name that does not resolve and a
    network that is down get better within seconds or not at all, unless ``is_patient``.
    Raises LaunchError if nobody comes to listen there in time. Who waits for long says so in a line, once, if it has a
    name (``waiting``).
    """
    begun = time.monotonic()
    resolve_patiently(host, timeout_s if is_patient else min(timeout_s, _NO_WAY_S))
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
