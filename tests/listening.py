"""Listening sockets of processes, read from /proc: what a job offers to whoever can reach its hosts."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["Listener", "descendants", "find_listeners"]

_LISTENS = "0A"
"""The state LISTEN, as /proc/net/tcp writes it."""


class Listener(NamedTuple):
    """A socket of a process at which others may connect."""

    process: int
    address: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this host reach it."""
        return ipaddress.ip_address(self.address).is_loopback

    @property
    def is_everywhere(self) -> bool:
        """Whether it listens at all addresses of the host."""
        return ipaddress.ip_address(self.address).is_unspecified


def descendants(parent: int) -> set[int]:
    """Return a process and all that it, or what it has started, has started and that still runs."""
    children: dict[int, set[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError):  # it has ended meanwhile
                stat = Path("/proc", entry, "stat").read_text(errors="replace")
                children.setdefault(int(stat.rpartition(")")[2].split()[1]), set()).add(int(entry))
    found, new = {parent}, [parent]
    while new:
        own = children.get(new.pop(), set()) - found
        found |= own
        new += own
    return found


def find_listeners(processes: set[int]) -> set[Listener]:
    """Return the TCP sockets, of IPv4 and IPv6, that listen in these processes."""
    found = set()
    for process in processes:
        inodes = _inodes(process)
        for table in ("tcp", "tcp6") if inodes else ():
            with suppress(OSError):  # it has ended meanwhile
                lines = Path("/proc", str(process), "net", table).read_text().splitlines()[1:]
                found |= {Listener(process, *_place(line)) for line in lines if _belongs(line, inodes)}
    return found


def _inodes(process: int) -> set[str]:
    found = set()
    with suppress(OSError):  # it has ended meanwhile
        for descriptor in os.listdir(f"/proc/{process}/fd"):
            with suppress(OSError):
                if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{process}/fd/{descriptor}")):
                    found.add(match[1])
    return found


def _belongs(line: str, inodes: set[str]) -> bool:
    fields = line.split()
    return fields[3] == _LISTENS and fields[9] in inodes


def _place(line: str) -> tuple[str, int]:
    """Read the local address of a line: words of four bytes in the host's order, and the port."""
    digits, _, port = line.split()[1].partition(":")
    words = (digits[at : at + 8] for at in range(0, len(digits), 8))
    packed = b"".join(struct.pack("=I", int(word, 16)) for word in words)
    address = socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
    if address.startswith("::ffff:"):  # an IPv4 address at a socket of IPv6
        address = address.removeprefix("::ffff:")
    return address, int(port, 16)
