"""An end to gloo's waits for connections from ranks that are lost: after one timeout, and not after five.

Of two ranks that connect over gloo the one with the lower address waits for the other, five times as long as the
group's timeout, and it does not notice that this one is gone (``Pair::waitUntilConnected``, torch 2.11 to 2.13:
https://github.com/pytorch/gloo/blob/main/gloo/transport/tcp/pair.h). Nothing that torch has ends such a wait. So this
process connects to where its own group listens, as the rank that has not come would: it gives that rank's number, eight
bytes, by which gloo tells connections apart (``Device::connectAsInitiator``), and hangs up.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Collection
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from xffl.compat.sockets import cut_connections_to, listening_address, open_sockets, sockets_opened_since

__all__ = ["ConnectionWait"]

_LATE_S = 1.0
"""How long after its timeout a wait is ended: gloo's own error, if there is one, comes first."""
_CALL_S = 5.0
"""How long this process may try to connect to itself."""


class _Listening(NamedTuple):
    """How long a group waits, and where it listens."""

    timeout_s: float
    addresses: tuple[tuple[str, int], ...]


_made: WeakKeyDictionary[dist.ProcessGroup, _Listening] = WeakKeyDictionary()
"""Groups whose ranks connect later, too; lives as long as they do"""


class ConnectionWait:
    """A block in which this rank connects to others of a group over gloo; RuntimeError where one does not come in time.

    :param peers: The numbers that these have in the group. Its own may be among them; none in a group of one rank.
    :param timeout_s: How many seconds each is waited for.
    :param addresses: Where the group listens; by default it is made in the block.
    """

    def __init__(
        self, peers: Collection[int], timeout_s: float, addresses: tuple[tuple[str, int], ...] | None = None
    ) -> None:
        self._peers = peers
        self._timeout_s = timeout_s
        self._known = addresses
        self._before: dict[int, str] = {}
        self._is_ended = False
        self._timer = threading.Timer(timeout_s + _LATE_S, self._end)
        self._timer.daemon = True

    @classmethod
    def of(cls, group: dist.ProcessGroup, peers: Collection[int]) -> ConnectionWait | nullcontext[None]:
        """Return the block for a group that was made before; one that ends nothing where :meth:`keep` was not called.

        :param group: The group.
        :param peers: Ranks of the world to which this one connects.
        :return: The block.
        """
        listening = _made.get(group)
        if listening is None:
            return nullcontext()
        return cls([dist.get_group_rank(group, peer) for peer in peers], *listening)

    def __enter__(self) -> None:
        if not self._peers:
            return
        if self._known is None:
            self._before = open_sockets()
        self._timer.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._is_ended and error is None:
            raise RuntimeError(f"not all ranks of a group have connected within {self._timeout_s:g} s")

    def keep(self, group: dist.ProcessGroup) -> None:
        """Note where the group listens that was made in the block, for blocks in which its ranks connect; local."""
        _made[group] = _Listening(self._timeout_s, self._addresses())

    def _addresses(self) -> tuple[tuple[str, int], ...]:
        if self._known is not None:
            return self._known
        opened = map(listening_address, sorted(sockets_opened_since(self._before)))
        return tuple(address for address in opened if address is not None)

    def _end(self) -> None:
        for address in self._addresses():
            self._is_ended = True
            for peer in self._peers:
                with suppress(OSError), socket.create_connection(address, _CALL_S) as call:
                    call.sendall(struct.pack("=q", peer))
            cut_connections_to(address)  # no rank waits for a message of this one, either
