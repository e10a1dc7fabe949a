"""A slow link between two network namespaces, in user space: rate, one-way delay, and a queue that drops at its end.

It stands in for tc's netem on kernels without it. A TUN device "wan" in each namespace is one end of the link. Once
both exist the relay goes on in the background and its process id is printed; the devices vanish when it ends.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
LARGEST_PACKET = 65536
AT_ONCE = 256
"""Packets read before those that are due are passed on."""

LATE_S = 2e-3
"""How late the relay may come to packets that have waited for it: up to this the link counts as never idle."""


def enter_namespace(name: str) -> None:
    """Move this thread, and those it starts, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if libc.setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {name}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(descriptor)


def open_end(namespace: str) -> int:
    """Make the device "wan" in a namespace; what is routed to it is read from the descriptor."""
    enter_namespace(namespace)
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", b"wan", IFF_TUN | IFF_NO_PI))
    return descriptor


class Direction:
    """One way across: packets leave at the link's rate and arrive a delay later; a full queue drops them."""

    def __init__(self, source: int, target: int, rate_mbit: float, delay_ms: float, queue_ms: float) -> None:
        self.source, self.target = source, target
        self.seconds_per_byte = 8.0 / (rate_mbit * 1e6)
        self.delay_s, self.queue_s = delay_ms / 1e3, queue_ms / 1e3
        self.under_way: deque[tuple[float, bytes]] = deque()
        self.free_at = 0.0

    def pull(self) -> None:
        """Read packets, and reckon when each arrives."""
        now = time.monotonic()
        for _ in range(AT_ONCE):
            try:
                packet = os.read(self.source, LARGEST_PACKET)
            except BlockingIOError:
                return
            start = now if now - self.free_at > LATE_S else self.free_at
            if start - now <= self.queue_s:
                self.free_at = start + len(packet) * self.seconds_per_byte
                self.under_way.append((self.free_at + self.delay_s, packet))

    def push(self) -> float | None:
        """Pass on the packets that are due; return the seconds until the next is, or ``None`` if there is none."""
        now = time.monotonic()
        while self.under_way and self.under_way[0][0] <= now:
            with suppress(OSError):  # the other end is down
                os.write(self.target, self.under_way.popleft()[1])
        return self.under_way[0][0] - now if self.under_way else None


def go_on_in_background() -> None:
    """Let the caller's command end with this process's id on its output, and leave its session."""
    child = os.fork()
    if child:
        print(child)
        sys.stdout.flush()
        os._exit(0)
    os.setsid()
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))  # a link does not slow down because its hosts are busy
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(nowhere, stream)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("namespaces", nargs=2)
    parser.add_argument("--rate-mbit", type=float, default=200.0)
    parser.add_argument("--delay-ms", type=float, default=10.0)
    parser.add_argument("--queue-ms", type=float, default=100.0)
    options = parser.parse_args()
    ends = [open_end(namespace) for namespace in options.namespaces]
    link = (options.rate_mbit, options.delay_ms, options.queue_ms)
    ways = [Direction(ends[0], ends[1], *link), Direction(ends[1], ends[0], *link)]
    go_on_in_background()
    poll = select.epoll()
    for end in ends:
        poll.register(end, select.EPOLLIN)
    while True:
        due = [seconds for way in ways if (seconds := way.push()) is not None]
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, min(due)) if due else None)}
        for way in ways:
            if way.source in ready:
                way.pull()


if __name__ == "__main__":
    main()
