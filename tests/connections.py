"""What the kernel has counted on the connections of this process."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress

from xffl.compat.sockets import open_sockets

__all__ = ["sent_by_ports"]

TCP_INFO_BYTES = 232
SENT = slice(200, 208)
"""``tcpi_bytes_sent`` of ``struct tcp_info`` in ``linux/tcp.h``, of Linux 4.19 and newer"""
SENT_AGAIN = slice(208, 216)
"""``tcpi_bytes_retrans``"""


def sent_by_ports() -> dict[tuple[int, int], int]:
    """Return how many bytes were sent on each TCP connection, by the ports of this end and the other one; local.

    Bytes that were sent again, since they were lost, count once.
    """
    sent = {}
    for descriptor in open_sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
            counts = [int.from_bytes(told[place], sys.byteorder) for place in (SENT, SENT_AGAIN)]
            sent[connection.getsockname()[1], connection.getpeername()[1]] = counts[0] - counts[1]
    return sent
