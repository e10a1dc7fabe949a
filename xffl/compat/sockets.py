"""Sockets of this process that a library has opened and does not show: those of gloo, of TCPStore, of torchft's client.

gloo, TCPStore (torch 2.13) and torchft 0.2 set no options by which a connection ends whose other host is silent, and
tell neither descriptors nor which connection a message uses:
https://github.com/pytorch/gloo/blob/main/gloo/transport/tcp/pair.cc,
https://github.com/pytorch/pytorch/blob/v2.11.0/torch/csrc/distributed/c10d/socket.cpp. So the descriptors in
``/proc/self/fd`` are compared before and after.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

__all__ = [
    "count_open_files",
    "cut_connection",
    "cut_connections_to",
    "find_connections",
    "limit_silence",
    "listening_address",
    "name_of_socket",
    "open_sockets",
    "sockets_opened_since",
]

INTERNET = (socket.AF_INET, socket.AF_INET6)


def open_sockets() -> dict[int, str]:
    """Return what the kernel calls each socket of this process, by descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was closed meanwhile
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found[int(name)] = target
    return found


def count_open_files() -> int:
    """Return how many files this process has open; 0 where the system does not show them."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


def sockets_opened_since(before: Mapping[int, str]) -> set[int]:
    """Return the descriptors of sockets that :func:`open_sockets` has not returned before.

    They may have the numbers of sockets that were closed since.
    """
    return {descriptor for descriptor, name in open_sockets().items() if before.get(descriptor) != name}


@contextmanager
def _use_socket(descriptor: int) -> Iterator[socket.socket]:
    """Use a socket by a descriptor of its own; OSError if it was closed, also where its number is something else's."""
    copy = os.dup(descriptor)
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with connection:
        yield connection


def cut_connection(descriptor: int, port: int) -> None:
    """End a TCP connection of this process, whoever waits for it, if it leads to a port."""
    with suppress(OSError), _use_socket(descriptor) as connection:  # it was closed meanwhile
        if connection.family in INTERNET and connection.getpeername()[1] == port:
            connection.shutdown(socket.SHUT_RDWR)


def cut_connections_to(address: tuple[str, int]) -> None:
    """End all TCP connections of this process that others have opened to where it listens."""
    for descriptor in open_sockets():
        with suppress(OSError), _use_socket(descriptor) as connection:
            # To ask for its peer raises where it is no connection.
            if connection.family in INTERNET and connection.getsockname()[:2] == address and connection.getpeername():
                connection.shutdown(socket.SHUT_RDWR)


def limit_silence(descriptor: int, seconds: int, peer: tuple[str, int] | None = None) -> None:
    """Let a TCP connection end where its other host is silent for so many seconds, with data under way or without.

    By itself the kernel tries for a quarter of an hour, and ever less often: a link that was down for half a minute has
    been up again for as long when the next packet is sent. Other sockets are left as they are, and where a peer is
    given, connections to others.
    """
    with suppress(OSError), _use_socket(descriptor) as connection:  # it was closed meanwhile
        is_tcp = connection.family in INTERNET and connection.type == socket.SOCK_STREAM
        if not is_tcp or (peer is not None and connection.getpeername()[:2] != peer):
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, seconds // 2))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)


def find_connections(opened: Iterable[int], others: Mapping[int, str], store_port: int, count: int) -> dict[int, str]:
    """Return which of the sockets that were opened with a group are its connections, and what they are called.

    None of them if they cannot be told from others that were opened at the same time. ``others`` are those from before;
    where one was closed since, its number may be that of the socket at which this group listens.
    """
    listening, found = {store_port}, {}
    for descriptor in (number for number, name in others.items() if name_of_socket(number) == name):
        if (address := listening_address(descriptor)) is not None:
            listening.add(address[1])  # of a store, where others come and go
    for descriptor in opened:
        with suppress(OSError), _use_socket(descriptor) as one:
            # To ask for its peer raises where it is no connection.
            if one.family in INTERNET and not {one.getsockname()[1], one.getpeername()[1]} & listening:
                found[descriptor] = name_of_socket(descriptor)
    return found if len(found) == count else {}


def listening_address(descriptor: int) -> tuple[str, int] | None:
    """Return host and port at which a socket of this process listens; ``None`` if it does not."""
    with suppress(OSError), _use_socket(descriptor) as opened:  # it was closed meanwhile
        if opened.family in INTERNET and opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            host, port = opened.getsockname()[:2]
            return host, port
    return None


def name_of_socket(descriptor: int) -> str:
    """Return what the kernel calls a socket: no other one has the name; empty where it was closed."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
