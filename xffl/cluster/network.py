"""This host in the network: its identity, its interfaces and which of them ranks use, and how long each level waits."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path

from xffl.compat.datasets import ENVIRON
from xffl.errors import ConfigError, LaunchError

__all__ = [
    "GLOO_VARIABLE",
    "LOCAL_VARIABLE",
    "LOOPBACK",
    "SLURM_PORTS",
    "Interface",
    "Timeouts",
    "control_address",
    "host_identity",
    "interface_address",
    "is_loopback",
    "keep_gloo_local",
    "list_interfaces",
    "release_gloo",
    "use_interface",
]

LOOPBACK = "127.0.0.1"
"""The address of this host that only its own processes reach."""

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
"""The interface that gloo takes."""

LOCAL_VARIABLE = "XFFL_LOCAL_IFNAME"
"""The interface that a session has given gloo by itself, since all of its ranks are on one host. It is in the
environment beside ``GLOO_SOCKET_IFNAME``, so that jobs which the script starts do not take it for the user's choice."""

SLURM_PORTS = (20000, 31999)
"""Where the rendezvous of a SLURM step lies, see :mod:`xffl.cluster.recognition.launchers`."""

_CONNECT_S = 30.0
_SIOCGIFADDR = 0x8915  # Linux: ask a socket for the IPv4 address of an interface
_INTERFACES = Path("/sys/class/net")


def host_identity() -> str:
    """Name this machine; the kernel's boot id, where there is one, tells hosts of the same name apart."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot_id.read_text().strip() if boot_id.exists() else ''}"


def is_loopback(host: str) -> bool:
    """Tell whether a host is written as an address of loopback, or by loopback's name."""
    return host in ("localhost", "::1") or host.startswith("127.")


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


def control_address(environ: Mapping[str, str] = ENVIRON) -> str | None:
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


def interface_address(name: str, source: str = "XFFL_IFNAME") -> str:
    """Find the IPv4 address of a network interface of this host."""
    import fcntl  # POSIX only: a module-level import would break the parsing of host lists elsewhere

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name.encode()[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            known = ", ".join(sorted(interface for _, interface in socket.if_nameindex()))
            raise LaunchError(
                f"{source}: interface {name!r} has no IPv4 address on {socket.gethostname()} ({error.strerror}); give "
                f"one of: {known}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def use_interface(name: str | None, environ: MutableMapping[str, str] = ENVIRON) -> str | None:
    """Bind gloo and NCCL to a network interface, by ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME``.

    Call it before :func:`~xffl.cluster.environment.detect_environment`, whose rendezvous under MPI follows it, and
    before process groups exist. ``XFFL_CONTROL_IFNAME`` names another interface for the rendezvous and its store.
    Whichever these use must have an address on every host, which is only looked for here. Where ``XFFL_IFNAME`` says
    another one than ``name``, it is changed, since whatever else looks for the interface reads it first.
    """
    chosen = name or environ.get("XFFL_IFNAME") or None
    if chosen is None:
        control_address(environ)  # every host may be that of rank 0
        return None
    known = sorted(interface for _, interface in socket.if_nameindex())
    source = "argument ifname" if name else "XFFL_IFNAME"
    if chosen not in known:
        raise LaunchError(
            f"{source}: interface {chosen!r} does not exist on {socket.gethostname()}; give one of: {', '.join(known)}"
        )
    names = {"GLOO_SOCKET_IFNAME": chosen, "NCCL_SOCKET_IFNAME": chosen}
    if environ.get("XFFL_IFNAME"):
        names["XFFL_IFNAME"] = chosen
    if environ.get("XFFL_CONTROL_IFNAME"):
        control_address(environ)
    else:
        interface_address(chosen, source)
    environ.update(names)
    return chosen


# gloo listens at the address of the host's name, or at that of the interface which a variable names -------------------


def keep_gloo_local(environ: MutableMapping[str, str] = ENVIRON) -> None:
    """Let gloo listen on loopback in this process, unless an interface is named; :func:`release_gloo` takes it back."""
    if environ.get(GLOO_VARIABLE):
        return
    loopback = next(
        (interface.name for interface in list_interfaces() if interface.is_up and interface.address == LOOPBACK), None
    )
    if loopback is not None:
        environ.update({GLOO_VARIABLE: loopback, LOCAL_VARIABLE: loopback})


def release_gloo(environ: MutableMapping[str, str] = ENVIRON) -> None:
    """Take back what :func:`keep_gloo_local` has set, here or in a process above this one."""
    local = environ.pop(LOCAL_VARIABLE, None)
    if local is not None and environ.get(GLOO_VARIABLE) == local:
        del environ[GLOO_VARIABLE]


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long each level of a job waits, in seconds; an inner level gives up before the one around it.

    What fails is reported where the cause is known: a lost host by its connection, a dead rank by its cell and not by
    the other cells, a lost cell by the exchange, and not by a vote of all. Each must be less than the next:
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
