"""Hosts: lists of names as SLURM writes them, and addresses that other hosts can reach. No process talks to another."""

from __future__ import annotations

import re
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from itertools import product
from pathlib import Path

from xffl.errors import LaunchError

__all__ = [
    "expand_counts",
    "expand_hosts",
    "host_identity",
    "interface_address",
    "node_address",
    "reachable_address",
    "resolve",
    "route_address",
]

_SIOCGIFADDR = 0x8915  # Linux: ask a socket for the IPv4 address of an interface
_SCONTROL_S = 60


def expand_hosts(text: str) -> tuple[str, ...]:
    """Expand a host list such as ``a[1-3,07],b09,login``, in its order; several brackets in one name multiply."""
    pieces = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if not pieces or ",".join(pieces) != text:
        raise LaunchError(f"host list {text!r} cannot be read; write it like a[1-3,07],b09,login")
    names: list[str] = []
    for piece in pieces:
        # Splitting at a captured group alternates: plain text, inside of a bracket, plain text, ...
        parts = re.split(r"\[([^\[\]]*)\]", piece)
        choices = [_numbers(part, text) if index % 2 else (part,) for index, part in enumerate(parts)]
        names += map("".join, product(*choices))
    return tuple(names)


def _numbers(ranges: str, text: str) -> tuple[str, ...]:
    numbers: list[str] = []
    for item in ranges.split(","):
        first, dash, last = item.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise LaunchError(f"host list {text!r} has the range {item!r}; write ranges like 1-3 or 08-10")
        # The width of the first number is kept: n[08-10] is n08, n09, n10.
        numbers.extend(str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return tuple(numbers)


def expand_counts(text: str) -> tuple[int, ...]:
    """Expand counts by node such as ``4(x2),3`` into ``(4, 4, 3)``."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            raise LaunchError(f"tasks per node {text!r} cannot be read at {item!r}; write them like 4(x2),3")
        counts.extend([int(match[1])] * int(match[2] or 1))
    return tuple(counts)


def host_identity() -> str:
    """Name this machine; the kernel's boot id, where there is one, tells hosts of the same name apart."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot_id.read_text().strip() if boot_id.exists() else ''}"


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


def node_address(name: str) -> str:
    """Return an address for a node of a SLURM cluster: its name, or what ``scontrol`` tells if that does not resolve.

    A start of many tasks is not to flood the controller.
    """
    if resolve(name) or shutil.which("scontrol") is None:
        return name
    command = ["scontrol", "-o", "show", "node", name]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        hint = "set MASTER_ADDR to an address of the first node"
        raise LaunchError(f"node {name!r} does not resolve, and scontrol did not answer: {error}; {hint}") from error
    match = re.search(r"\bNodeAddr=(\S+)", shown.stdout)
    return match[1] if match else name


def reachable_address(peers: Iterable[str]) -> str:
    """Return an address of this host, not loopback: of its name, else that on the route to a peer; nothing is sent."""
    own = socket.gethostname()
    for address in resolve(own):
        if not address.startswith("127."):
            return address
    for peer in peers:
        for address in resolve(peer):
            with suppress(OSError):  # no route to this one
                if not (source := route_address(address, 9)).startswith("127."):
                    return source
    hint = "set XFFL_IFNAME to a network interface, or MASTER_ADDR and MASTER_PORT"
    raise LaunchError(f"host {own!r} resolves to no address that other hosts can reach; {hint}")


def route_address(host: str, port: int) -> str:
    """Return this host's address on the way to another one; nothing is sent, and an OSError says that there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def resolve(name: str) -> tuple[str, ...]:
    """Return the IPv4 addresses of a host's name, none where it does not resolve."""
    try:
        found = socket.getaddrinfo(name, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
