"""A store and links of one rank that is played alone: they count what it does and answer as if all others did alike.

The store keeps what the rank itself has set, and makes up what others would have set before. Links carry no payload: a
collective leaves the values as they are, so that all ranks seem to have this one's, and a vote's table comes filled
with its row. What torch's gloo does for a call is counted by its algorithms (of torch 2.11 to 2.13):
``third_party/gloo/gloo/{allreduce,allgather,broadcast,barrier}.cc``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from xffl.aggregation.engine.voting.ballots import Ballots
from xffl.aggregation.engine.voting.votes import PACKED, VOTE_TAG, RoundStatus
from xffl.cluster.recognition.claims import Claim
from xffl.costs import MOST_IN_TABLES, STATUS_BYTES, neighbours_of_barrier
from xffl.message_sizes.ballots import BALLOT_LENGTH_BYTES, ranks_below
from xffl.planning.startup import (
    ADDRESS_BYTES,
    messages_of_all_gather,
    messages_of_all_reduce,
    messages_of_broadcast,
    store_bytes_of_group,
    store_requests_of_group,
)
from xffl.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BACKEND", "Counts", "Play", "RecordedGroup", "RecordedStore"]

BACKEND = "gloo_recorded"
"""xffl looks for gloo in a backend's name."""


@dataclass
class Counts:
    """What one rank does in one phase.

    :param messages: Messages that it sends to other ranks.
    :param message_bytes: Their bytes.
    :param requests: Requests to rank 0's stores.
    :param store_bytes: Bytes that these carry, both ways.
    :param connections: Ranks to which a connection is opened, for each group anew.
    :param groups: Groups that are made, without those of one rank.
    :param python_s: Processor seconds of the process.
    """

    messages: int = 0
    message_bytes: int = 0
    requests: int = 0
    store_bytes: int = 0
    connections: int = 0
    groups: int = 0
    python_s: float = 0.0
    calls: Counter[str] = field(default_factory=Counter)


class Play:
    """One rank that is played: who it is, and what it has done, phase by phase.

    :param topology: The world.
    :param rank: The rank.
    """

    def __init__(self, topology: Topology, rank: int) -> None:
        self.topology = topology
        self.rank = rank
        self.phases: dict[str, Counts] = {}
        self.stores: list[RecordedStore] = []
        self.row = torch.zeros(STATUS_BYTES, dtype=torch.uint8)
        self.counts = Counts()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens in the block under a name."""
        import time

        before = self.counts
        self.counts = self.phases.setdefault(name, Counts())
        begun = time.process_time()
        try:
            yield
        finally:
            self.counts.python_s += time.process_time() - begun
            self.counts = before

    def send(self, call: str, messages: int, nbytes: int) -> None:
        """Count messages of a call."""
        self.counts.messages += messages
        self.counts.message_bytes += nbytes
        self.counts.calls[call] += messages

    def ask(self, request: str, nbytes: int, requests: int = 1) -> None:
        """Count requests to a store."""
        self.counts.requests += requests
        self.counts.store_bytes += nbytes
        self.counts.calls[f"store {request}"] += requests


class RecordedStore(dist.Store):  # type: ignore[name-defined,misc]
    """What rank 0's store is to the rank that is played."""

    def __init__(self, play: Play) -> None:
        super().__init__()
        self._play = play
        play.stores.append(self)  # torch holds on to the part in C++ alone
        self._kept: dict[str, bytes] = {}
        self._counters: Counter[str] = Counter()
        self.port = 1

    def set(self, key: str, value: str | bytes) -> None:
        """Keep a value."""
        value = value.encode() if isinstance(value, str) else value
        self._play.ask("set", len(key) + len(value))
        self._kept[key] = value

    def get(self, key: str) -> bytes:
        """Return what is kept, or what another rank would have set."""
        value = self._value(key)
        self._play.ask("get", len(key) + len(value))
        return value

    def add(self, key: str, number: int) -> int:
        """Return a counter's value: where all ranks count, they come in their order."""
        self._play.ask("add", len(key) + 8)
        name = key.rpartition("/")[2]
        before = self._play.rank if name in _ALL_COUNT and not self._counters[key] else 0
        self._counters[key] += before + number
        return self._counters[key]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Return what stands there: this rank's own where nobody else needs to have set another value."""
        value = self._kept.setdefault(key, desired.encode())
        self._play.ask("compare_set", len(key) + len(expected) + len(desired) + len(value))
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Count that others are waited for, who have come already."""
        self._play.ask("wait", sum(map(len, keys)))

    def check(self, keys: Sequence[str]) -> bool:
        """Tell that all is there."""
        self._play.ask("check", sum(map(len, keys)))
        return True

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return several values at once."""
        values = [self._value(key) for key in keys]
        self._play.ask("multi_get", sum(map(len, keys)) + sum(map(len, values)))
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        """Keep several values at once."""
        self._play.ask("multi_set", sum(map(len, keys)) + sum(map(len, values)))

    def set_timeout(self, timeout: timedelta) -> None:
        """Wait for nobody."""

    def list_keys(self) -> list[str]:
        """Fail: a store is never listed, since it holds the keys of all ranks."""
        raise AssertionError("a rank lists the store of all ranks")

    def _value(self, key: str) -> bytes:
        if key in self._kept:
            return self._kept[key]
        if key == "verdict":
            return b"null"
        if key == "store":
            return b"127.0.0.1 1"
        name, _, number = key.partition("/")
        assert name == "claim", f"no rank would have set {key!r}"
        return _claim(int(number) - 1, self._play.topology.world_size).to_text().encode()


_ALL_COUNT = ("xffl_arrivals", "claims", "arrived", "read")
"""Counters to which each rank of the world adds once."""
RANKS_OF_NODE = 8
"""Ranks of a node of the world that is played, or all where these are no multiple."""


def _claim(rank: int, world_size: int) -> Claim:
    of_node = RANKS_OF_NODE if world_size % RANKS_OF_NODE == 0 else world_size
    return Claim(
        rank=rank,
        local_rank=rank % of_node,
        local_size=of_node,
        host=f"node{rank // of_node}",
        node_rank=rank // of_node,
        node_world_size=world_size // of_node,
        world_size=world_size,
    )


class _Done:
    """A call that has ended."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Tell that it has ended."""
        return True


class RecordedGroup(dist.ProcessGroup):
    """A group of gloo as the rank that is played sees it.

    :param play: The rank that is played.
    :param store: The part of the world's store that is for the group.
    :param rank: Its rank in the group.
    :param size: The ranks of the group.
    :param is_lazy: Whether gloo connects it at its first messages.
    :param is_short: Whether the addresses of a mesh have no numbers of pairs.
    """

    def __init__(
        self, play: Play, store: dist.Store, rank: int, size: int, *, is_lazy: bool, is_short: bool = False
    ) -> None:
        super().__init__(rank, size)
        self._group_store = store
        self._play = play
        self._number = rank
        self._members = size
        self._connected: set[int] = set()
        if size == 1:
            return
        play.counts.groups += 1
        self._is_lazy = is_lazy
        if is_lazy:
            play.ask("group", ADDRESS_BYTES)
        else:
            # The one that says that the rank has come is xffl's own.
            play.ask("group", store_bytes_of_group(size, is_short=is_short), store_requests_of_group(size) - 1)
            self._connected.update(other for other in range(size) if other != rank)
            play.counts.connections += size - 1

    def _connect(self, others: set[int]) -> None:
        if opened := others - self._connected - {self._number}:
            self._connected |= opened
            self._play.counts.connections += len(opened)
            self._play.ask("connection", ADDRESS_BYTES * len(opened), len(opened))

    def size(self) -> int:
        """Return how many ranks it has."""
        return self._members

    def rank(self) -> int:
        """Return the rank in it."""
        return self._number

    def get_group_store(self) -> dist.Store:
        """Return its part of the world's store."""
        return self._group_store

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        """Return the name that torch has given to it."""
        return self._name

    def getBackendName(self) -> str:
        """Return the name that torch asks for."""
        return BACKEND

    def _ring(self) -> None:
        self._connect({(self._number + 1) % self._members, (self._number - 1) % self._members})

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> _Done:
        """Leave the values as they are: all have the same."""
        self._ring()
        nbytes = tensors[0].nbytes
        self._play.send("all_reduce", messages_of_all_reduce(self._members, tensors[0].numel()), 2 * nbytes)
        return _Done()

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> _Done:
        """Give this rank's values for those of all."""
        self._ring()
        for output in outputs[0]:
            output.copy_(inputs[0])
        messages = messages_of_all_gather(self._members)
        self._play.send("all_gather", messages, messages * inputs[0].nbytes)
        return _Done()

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> _Done:
        """Leave the values as they are."""
        messages = messages_of_broadcast(self._members)
        self._tree()
        self._play.send("broadcast", messages, messages * tensors[0].nbytes)
        return _Done()

    def barrier(self, opts: Any = None) -> _Done:
        """Wait for nobody."""
        self._tree()
        self._play.send("barrier", math.ceil(math.log2(self._members)) if self._members > 1 else 0, 0)
        return _Done()

    def _tree(self) -> None:
        self._connect(neighbours_of_barrier(self._number, self._members))

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> _Done:
        """Count a message."""
        self._connect({peer})
        self._play.send("vote" if tag == VOTE_TAG else "values", 1, tensors[0].nbytes)
        return _Done()

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> _Done:
        """Give zeros; in a vote this rank's status as that of all."""
        self._connect({peer})
        values = tensors[0]
        if tag == VOTE_TAG and values.numel() >= STATUS_BYTES:
            if self._play.topology.world_size > MOST_IN_TABLES:
                self._write(values, peer)
            else:
                self._fill(values, peer)
        else:
            values.zero_()
        return _Done()

    def _write(self, head: torch.Tensor, peer: int) -> None:
        topology = self._play.topology
        ranks = topology.world_size
        if peer > self._number or not self._is_below(peer):
            cell = topology.cell_of(peer)
            ranks = ranks_below(peer - topology.offsets[cell], topology.sizes[cell])
        status = RoundStatus.unpacked(PACKED.unpack(self._play.row.numpy().tobytes()))
        data = Ballots.joined([Ballots.of(status)] * ranks).to_bytes()
        data = len(data).to_bytes(BALLOT_LENGTH_BYTES, "little") + data
        head.zero_()
        head[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def _fill(self, table: torch.Tensor, peer: int) -> None:
        topology = self._play.topology
        table = table.view(-1, STATUS_BYTES)
        row = self._play.row
        if table.shape[0] == topology.world_size or not self._is_below(peer):
            table.copy_(row.expand_as(table))
            return
        table.zero_()
        start = topology.offsets[topology.cell_of(peer)]
        level = [peer - start]
        while level:
            table[torch.tensor(level)] = row
            level = [below for place in level for below in (2 * place + 1, 2 * place + 2) if below < len(table)]

    def _is_below(self, peer: int) -> bool:
        return self._play.topology.cell_of(peer) == self._play.topology.cell_of(self._number)
