"""Hosts: their names and addresses. No process talks to another."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Iterable
from contextlib import suppress

from xffl.errors import LaunchError

__all__ = [
    "node_address",
    "reachable_address",
    "resolve",
    "route_address",
]


_SCONTROL_S = 60


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
    here = socket.gethostname()
    for address in resolve(here):
        if not address.startswith("127."):
            return address
    for peer in peers:
        for address in resolve(peer):
            with suppress(OSError):  # no route to this one
                if not (source := route_address(address, 9)).startswith("127."):
                    return source
    hint = "set XFFL_IFNAME to a network interface, or MASTER_ADDR and MASTER_PORT"
    raise LaunchError(f"host {here!r} resolves to no address that other hosts can reach; {hint}")


def route_address(host: str, port: int) -> str:
    """Return this host's address on the way to another one; nothing is sent, and an OSError says that there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def resolve(name: str) -> tuple[str, ...]:
    """Return the IPv4 addresses of a host's name, none where it does not resolve."""
    try:
        infos = socket.getaddrinfo(name, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in infos))
