"""A group whose ranks belong to several worlds, as the cells of an elastic federation, which are jobs of their own."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
import queue
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from xffl.cluster.listening import gloo_beyond_this_host
from xffl.compat.pytorch import close_gloo_connections
from xffl.compat.sockets import (
    find_connections,
    limit_silence,
    name_of_socket,
    open_sockets,
    sockets_opened_since,
)
from xffl.distributed.groups import in_turn
from xffl.distributed.several_worlds.distant_store import connect_store

__all__ = ["WEIGHTS_TAG", "CrossWorldGroup", "Work"]

WEIGHTS_TAG = 7_100
"""Lowest tag of a round's messages with weights: the caller may send its own over the same group."""

PROOF_TAG = 7_901
NONCE_BYTES = 32
SILENT_S = 10  # seconds in which the host at the other end of a connection has to answer
WATCH_S = 0.2  # how often who waits for a message looks whether a connection is lost
END_S = 2.0  # how long a thread has to notice that its wait was ended
# Behind so many messages that came within so many seconds each, the next one is waited for as a quick one.
QUICK_IN_A_ROW, QUICK_S = 16, 0.05


class Work(Protocol):
    """What is under way, and can be waited for."""

    def wait(self) -> Any:
        """Wait until it has ended; raise RuntimeError where it failed."""


@dataclass(frozen=True)
class _Opened:
    """What a group holds until it is closed."""

    group: dist.ProcessGroupGloo
    store: PrefixStore


class CrossWorldGroup:
    """A gloo group over the ranks of several worlds, which all make it with the same name; collective over them.

    They meet at the store of an address, HOST:PORT, which is served already; no other group of it is called, or was, as
    this one. A rank counts its peers as it counts the ranks of its own world, from ``first`` on: rank ``r`` of the
    group is ``first + r``. Raises RuntimeError where the others do not come within ``connect_s``, and at once where the
    store is gone. Every wait ends after
    ``timeout_s``, which may be changed between messages, and that for a message where the last ones were quick after
    ``quick_timeout_s``.

    Its threads and connections last until :meth:`close`, whoever still refers to it.
    """

    def __init__(
        self, address: str, name: str, rank: int, size: int, *, first: int, connect_s: float, timeout_s: float
    ) -> None:
        host, _, port = address.rpartition(":")
        self.name = name
        self.first = first
        self.timeout_s = timeout_s
        limit = timedelta(seconds=connect_s)
        # gloo reads variables of the process, which this sets; and all sockets that are opened here are the group's.
        with in_turn():
            others = open_sockets()
            store = PrefixStore(name, connect_store(address, connect_s))
            with gloo_beyond_this_host(host):
                group = dist.ProcessGroupGloo(store, rank, size, limit)
            opened = sockets_opened_since(others)
        self._rank = rank
        self._size = size
        self._opened: _Opened | None = _Opened(group, store)
        self._works: dict[int, dist.Work] = {}
        """Messages under way, by number. Each holds all connections of the group, so this alone refers to them."""
        self._numbers = itertools.count()
        # A host that is gone resets nothing. Without this only the time that a message may take would tell, and that
        # has to be long, since a slow link is no lost one. gloo sets no such options, and does not tell its sockets.
        for descriptor in opened:
            limit_silence(descriptor, SILENT_S)
        self.quick_timeout_s = timeout_s
        self._quick = 0
        self._connections = find_connections(opened, others, int(port), size - 1)
        self._waits: queue.SimpleQueue[tuple[dist.Work, timedelta, queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        self._waiter = threading.Thread(target=_wait, args=[self._waits], name="xffl-messages", daemon=True)
        self._waiter.start()
        weakref.finalize(self, _leave, weakref.ref(self))  # where the process ends first

    def __del__(self) -> None:
        if hasattr(self, "_waiter"):
            self.end_waits()
            self._waits.put(None)

    def close(self) -> None:
        """End the threads and close the connections; local. Whoever uses the group afterwards gets a RuntimeError.

        A second call does nothing.
        """
        self._opened = None
        self._works.clear()
        self._waits.put(None)

    def end_waits(self) -> None:
        """End the wait for a message that this rank has given up, if there is one; local.

        The thread that waits would abort the process if that ended first: torch takes the GIL when the wait is over.
        """
        if self._opened is None or not self._works:
            return
        self.poison()
        self._works.clear()
        self._waits.put(None)
        self._waiter.join(END_S)

    @property
    def _gloo(self) -> Any:
        """Gloo's group; RuntimeError where this one is closed."""
        return self._use().group

    @property
    def store(self) -> PrefixStore:
        """Where the ranks have met, under the group's name; RuntimeError where this group is closed."""
        return self._use().store

    def _use(self) -> _Opened:
        if self._opened is None:
            raise RuntimeError(f"the group {self.name} was closed")
        return self._opened

    def wait(self, number: int, *, is_received: bool) -> Any:
        """Wait for a message that was sent or is received; RuntimeError where it does not come, or a rank is lost.

        Where a connection ends in the middle of a message, gloo's wait goes on until its time is over (30.0 s of 30 s),
        and nothing but that ends it. So where messages take long, another thread waits; where they are quick, that
        would cost 10 % of a round on busy cores (0.5 ms a message), and the time of one is kept short.
        """
        begun = time.monotonic()
        is_quick = self._quick >= QUICK_IN_A_ROW
        quick = timedelta(seconds=self.quick_timeout_s)
        answer = self._work(number).wait(quick) if is_quick else self._wait_apart(number, self.timeout_s)
        self._works.pop(number, None)
        if is_received:
            self._quick = self._quick + 1 if time.monotonic() - begun < QUICK_S else 0
        return answer

    def _wait_apart(self, number: int, timeout_s: float) -> Any:
        """Have another thread wait, and see meanwhile whether a connection is lost."""
        result: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waits.put((self._work(number), timedelta(seconds=timeout_s), result))
        while True:
            try:
                answer = result.get(timeout=WATCH_S)
            except queue.Empty:
                if self._opened is None:
                    raise RuntimeError(f"the group {self.name} was closed in the middle of a message") from None
                if any(name_of_socket(descriptor) != name for descriptor, name in self._connections.items()):
                    raise RuntimeError(f"a rank of the group {self.name} was lost in the middle of a message") from None
                continue
            if isinstance(answer, Exception):
                raise answer
            return answer

    def _note(self, work: dist.Work) -> int:
        """Return the number under which a message is waited for."""
        number = next(self._numbers)
        self._works[number] = work
        return number

    def _work(self, number: int) -> dist.Work:
        """Return a message under way; RuntimeError where the group was closed since."""
        work = self._works.get(number)
        if work is None:
            raise RuntimeError(f"the group {self.name} was closed in the middle of a message")
        return work

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    def rank(self) -> int:
        """Return this rank, from 0."""
        return self._rank

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        """Start to send to a rank of the group."""
        return _Message(self._note(self._gloo.send(tensors, rank, tag)), self, is_received=False)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        """Start to receive from a rank of the group."""
        return _Message(self._note(self._gloo.recv(tensors, rank, tag)), self, is_received=True)

    def all_reduce(self, values: torch.Tensor, op: Any) -> None:
        """Reduce values in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = op
        options.timeout = timedelta(seconds=self.timeout_s)
        self._gloo.allreduce([values], options).wait(timedelta(seconds=self.timeout_s))

    def barrier(self, messages: int) -> None:
        """Wait until all ranks are here, of which one may first send so many messages, each as long as one may take."""
        options, within_s = dist.AllreduceOptions(), self.timeout_s * (1 + messages)
        options.timeout = timedelta(seconds=within_s)
        number = self._note(self._gloo.allreduce([torch.zeros(1, dtype=torch.float32)], options))
        self._wait_apart(number, within_s)
        self._works.pop(number, None)

    def all_gather(self, rows: list[torch.Tensor], values: torch.Tensor) -> None:
        """Gather the values of each rank."""
        table = torch.zeros(len(rows), *values.shape, dtype=values.dtype)
        table[self.rank()] = values
        self.all_reduce(table, dist.ReduceOp.SUM)  # each row is zero in all tables but one
        for row, gathered in zip(rows, table, strict=True):
            row.copy_(gathered)

    def broadcast(self, values: torch.Tensor, source: int) -> None:
        """Replace values by those of a rank of the group."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        options.timeout = timedelta(seconds=self.timeout_s)
        self._gloo.broadcast([values], options).wait(timedelta(seconds=self.timeout_s))

    def unproven(self, token: bytes, timeout_s: float, agreed: bytes = b"") -> list[int]:
        """Return the ranks that do not know a token, or have agreed on something else; collective over the group.

        Neither is sent. Each two ranks send each other 32 random bytes, then an HMAC of both, of their numbers, of the
        group's name and of what they have agreed on.
        """
        others = [rank for rank in range(self.size()) if rank != self.rank()]
        mine = os.urandom(NONCE_BYTES)

        def proof(sender: int, receiver: int, nonces: bytes) -> bytes:
            asked = f"{self.name} {sender} {receiver} ".encode() + nonces + agreed
            return hmac.new(token, asked, hashlib.sha256).digest()

        theirs = self._swap(dict.fromkeys(others, mine), timeout_s)
        proofs = {rank: proof(self.rank(), rank, theirs[rank] + mine) for rank in others}
        expected = {rank: proof(rank, self.rank(), mine + theirs[rank]) for rank in others}
        told = self._swap(proofs, timeout_s)
        return [rank for rank in others if not hmac.compare_digest(told[rank], expected[rank])]

    def _swap(self, texts: Mapping[int, bytes], timeout_s: float) -> dict[int, bytes]:
        """Send 32 bytes to each of some ranks, and return what they have sent."""
        arrived = {rank: torch.zeros(NONCE_BYTES, dtype=torch.uint8) for rank in texts}
        sent = {rank: torch.frombuffer(bytearray(text), dtype=torch.uint8) for rank, text in texts.items()}
        works = [self._gloo.recv([values], rank, PROOF_TAG) for rank, values in arrived.items()]
        works += [self._gloo.send([values], rank, PROOF_TAG) for rank, values in sent.items()]
        for work in works:
            work.wait(timedelta(seconds=timeout_s))
        return {rank: values.numpy().tobytes() for rank, values in arrived.items()}

    def poison(self) -> None:
        """Close this rank's connections, so that the waits of all others end at once; local.

        From a rank that is dead a receive fails at once, and closes nothing: one of the others has to do it.
        """
        close_gloo_connections(self._gloo, self.rank(), self.size())


class _Message:
    """A message that is sent or received."""

    def __init__(self, number: int, group: CrossWorldGroup, *, is_received: bool) -> None:
        self._number = number
        self._group = group
        self._is_received = is_received

    def wait(self) -> Any:
        return self._group.wait(self._number, is_received=self._is_received)


def _leave(group: weakref.ref[CrossWorldGroup]) -> None:
    """End what a group still waits for when the process ends; nothing where the group has gone before."""
    if (left := group()) is not None:
        left.end_waits()


def _wait(waits: queue.SimpleQueue[tuple[dist.Work, timedelta, queue.SimpleQueue[Any]] | None]) -> None:
    """Wait for the messages of a group, one after the other, until it is gone."""
    while (asked := waits.get()) is not None:
        work, limit, result = asked
        try:
            result.put(work.wait(limit))
        except Exception as error:  # noqa: BLE001 - told to who waits
            result.put(error)
        del asked, work
