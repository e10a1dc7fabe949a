"""Network interfaces of this host, ports and connections, and how long each level of a job waits for the other side."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path

from xffl.cluster.hosts import interface_address
from xffl.errors import ConfigError, LaunchError

__all__ = [
    "CELL_HEARTBEAT_TIMEOUT_S",
    "CELL_JOIN_TIMEOUT_S",
    "LOCAL_VARIABLE",
    "SLURM_PORTS",
    "Interface",
    "Timeouts",
    "connection_error",
    "control_address",
    "ephemeral_ports",
    "list_interfaces",
]

LOCAL_VARIABLE = "XFFL_LOCAL_IFNAME"
"""The interface that a session has given gloo by itself, since all of its ranks are on one host. It is in the
environment beside ``GLOO_SOCKET_IFNAME``, so that jobs which the script starts do not take it for the user's choice."""

SLURM_PORTS = (20000, 31999)
"""Where the rendezvous of a SLURM step lies, see :mod:`xffl.cluster.recognition.launchers`."""

CELL_HEARTBEAT_TIMEOUT_S = 2
"""Seconds without a heartbeat after which a cell of an elastic federation counts as lost; cells look again for one that
they miss after as long."""
CELL_JOIN_TIMEOUT_S = 20
"""Seconds that a cell which is late for a round, but lives, is waited for."""

_CONNECT_S = 30.0
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_INTERFACES = Path("/sys/class/net")


@dataclass(frozen=True)
class Interface:
    """One network interface of this host."""

    name: str
    is_up: bool
    address: str | None = None  # its IPv4 address, in dotted form
    speed_mbit: int | None = None  # what the card says of its rate; None where it does not, as virtual ones

    @property
    def is_loopback(self) -> bool:
        """Whether no other host can be reached over it."""
        return self.name == "lo" or (self.address or "").startswith("127.")

    def __str__(self) -> str:
        """Write it the short way, such as ``ib0 10.1.0.7 up 100 Gbit/s``."""
        words = [self.name, self.address or "no IPv4 address", "up" if self.is_up else "down"]
        if self.speed_mbit is not None:
            words.append(f"{self.speed_mbit / 1000:g} Gbit/s")
        return " ".join(words)


def list_interfaces(folder: Path = _INTERFACES) -> tuple[Interface, ...]:
    """List the network interfaces of this host (of this network namespace), by name."""
    names = sorted(name for _, name in socket.if_nameindex())
    return tuple(
        Interface(name, _is_up(folder / name), _find_address(name), _find_speed(folder / name)) for name in names
    )


def control_address(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return this host's address on the interface over which ranks meet, ``None`` where no interface is asked for.

    That is the interface of ``XFFL_CONTROL_IFNAME``, else that of the data: of ``XFFL_IFNAME``, else of
    ``GLOO_SOCKET_IFNAME``, the first where a list is set.
    """
    variables = ("XFFL_CONTROL_IFNAME", "XFFL_IFNAME", "GLOO_SOCKET_IFNAME")
    variable = next((variable for variable in variables if environ.get(variable)), None)
    if variable is None:
        return None
    name = environ[variable]
    if variable == variables[-1] and name == environ.get(LOCAL_VARIABLE):
        return None  # a session's own choice for the ranks of this host
    return interface_address(name if variable == variables[0] else name.partition(",")[0], variable)


def ephemeral_ports() -> tuple[int, int]:
    """Return the first and last port that Linux hands out by itself: stores, gloo and NCCL listen there."""
    if not _EPHEMERAL.exists():
        return 32768, 60999
    first, last = _EPHEMERAL.read_text().split()
    return int(first), int(last)


def connection_error(host: str, port: int | str, timeout_s: float) -> str | None:
    """Try to connect to a port; return why that is not possible."""
    try:
        socket.create_connection((host, int(port)), timeout_s).close()
    except TimeoutError:
        return "no answer: packets are dropped"
    except (OSError, ValueError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long each level of a job waits, in seconds; an inner level gives up before the one around it.

    So what fails is told by the level that knows why: a lost host by its connection, a dead rank by its cell and not by
    the other cells, a cell that is gone by the exchange, and not by a vote of all. Each must be less than the next:
    ``connect_s < home_s < across_s < session_s``.
    """

    connect_s: float  # for a connection to the store of the world, which is up: a wrong control interface shows so
    home_s: float  # for a collective inside a cell
    across_s: float  # for an exchange between cells
    session_s: float  # for a collective over the world, such as the vote of a round

    def __post_init__(self) -> None:
        levels = [(level.name, getattr(self, level.name)) for level in fields(self)]
        for name, value in levels:
            _check_seconds(name, value)
        for (inner, short), (outer, long) in pairwise(levels):
            if not short < long:
                order = " < ".join(level.name for level in fields(self))
                raise ConfigError(
                    f"{inner} {short:g} is not less than {outer} {long:g}; keep {order}: lower {inner} or raise {outer}"
                )

    @classmethod
    def within(cls, session_s: float) -> Timeouts:
        """Return the levels that fit below the timeout of a session."""
        _check_seconds("session_s", session_s)
        return cls(
            connect_s=min(_CONNECT_S, session_s / 4),
            home_s=session_s / 2,
            across_s=session_s * 3 / 4,
            session_s=float(session_s),
        )


def _check_seconds(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e9:
        raise ConfigError(f"{name} must be a positive number of seconds, got {value!r}")


def _is_up(folder: Path) -> bool:
    """Tell whether an interface is up; a loopback or tunnel's state is "unknown", so its flag decides."""
    try:
        state = (folder / "operstate").read_text().strip()
        return state == "up" or (state == "unknown" and bool(int((folder / "flags").read_text(), 16) & 1))
    except (OSError, ValueError):
        return True  # /sys may show another namespace than this process's


def _find_speed(folder: Path) -> int | None:
    with suppress(OSError, ValueError):  # the card is down, or has no rate
        return max(int((folder / "speed").read_text()), 0) or None
    return None


def _find_address(name: str) -> str | None:
    with suppress(LaunchError):
        return interface_address(name)
    return None
