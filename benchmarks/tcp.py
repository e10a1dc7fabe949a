"""A raw TCP transfer in both directions at once: what a link gives to a program that does nothing else."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable

__all__ = ["connect", "swap"]

AT_ONCE = 2**20
"""Bytes offered to the kernel, or asked of it, in one call."""


def connect(address: str, port: int, *, listens: bool, ready: Callable[[], object], timeout_s: float) -> socket.socket:
    """Return this side of a connection; collective over its two sides.

    :param address: Address of the side that listens.
    :param port: Port of that side.
    :param listens: Whether this is that side.
    :param ready: Returns once both sides have called it: then the port is open.
    :param timeout_s: Seconds after which waiting for the other side gives up.
    """
    if listens:
        with socket.create_server((address, port)) as server:
            server.settimeout(timeout_s)
            ready()
            connection, _ = server.accept()
    else:
        ready()
        connection = socket.create_connection((address, port), timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setblocking(False)
    return connection


def swap(connection: socket.socket, outgoing: memoryview, incoming: memoryview, timeout_s: float) -> None:
    """Send ``outgoing`` and fill ``incoming``, both at once; the other side does the same with the same sizes.

    :param connection: From :func:`connect`.
    :param outgoing: What to send.
    :param incoming: Where to put what the other side sends.
    :param timeout_s: Seconds without any progress after which this gives up.
    """
    sent = received = 0
    poll = select.poll()
    while sent < len(outgoing) or received < len(incoming):
        wanted = (select.POLLOUT if sent < len(outgoing) else 0) | (select.POLLIN if received < len(incoming) else 0)
        poll.register(connection, wanted)
        ready = poll.poll(1e3 * timeout_s)
        if not ready:
            raise TimeoutError(f"{sent} bytes sent and {received} received, then nothing for {timeout_s:g} s")
        events = ready[0][1]
        if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
            count = connection.recv_into(incoming[received : received + AT_ONCE])
            if not count:
                raise ConnectionError(f"the other side left after {received} of {len(incoming)} bytes")
            received += count
        if events & select.POLLOUT:
            sent += connection.send(outgoing[sent : sent + AT_ONCE])
