"""Start real ranks on this machine, and count what they ask rank 0's store for and what they keep open.

- ``python -m tests.scale.real --ranks 32``: all groups are meshes, as in worlds of up to 256 ranks.
- ``... --ranks 32 --mesh 8``: groups are made as in larger worlds.
- ``... --ranks 32 --mesh 8 --lose 5``: rank 5 gets SIGKILL between two rounds.
- ``... --ranks 4 --keys 24000``: how long closing a delayed aggregator takes beside so many keys in the store.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import nn

import xffl
from tests.ports import free_port
from tests.rounds import aggregator_of
from tests.worlds import be_launched, run_world
from xffl.compat import gloo_connections
from xffl.compat.sockets import count_open_files, open_sockets
from xffl.distributed import session

__all__ = ["CountingStore", "Started", "close_aggregator", "start_rank"]

TIMEOUT_S = 120.0
"""Of the session; within a cell it is a half of this."""


class CountingStore(dist.Store):  # type: ignore[name-defined,misc]
    """A store that hands all requests on to another one, and counts them.

    :param store: The other one.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self.requests: Counter[str] = Counter()
        self.nbytes = 0

    def _count(self, name: str, *parts: Any) -> None:
        self.requests[name] += 1
        self.nbytes += sum(map(len, parts))

    def set(self, key: str, value: bytes) -> None:
        """Set a value."""
        self._count("set", key, value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait for a value, and return it."""
        value: bytes = self._store.get(key)
        self._count("get", key, value)
        return value

    def add(self, key: str, number: int) -> int:
        """Add to a counter."""
        self._count("add", key, range(8))
        return int(self._store.add(key, number))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set a value unless there is another one, and return what stands there."""
        self._count("compare_set", key, expected, desired)
        return bytes(self._store.compare_set(key, expected, desired))

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all keys are there."""
        self._count("check", *keys)
        return bool(self._store.check(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._count("wait", *keys)
        self._store.wait(keys, *([] if timeout is None else [timeout]))

    def delete_key(self, key: str) -> bool:
        """Delete a key."""
        self._count("delete", key)
        return bool(self._store.delete_key(key))

    def num_keys(self) -> int:
        """Return how many keys there are."""
        self._count("num_keys")
        return int(self._store.num_keys())

    def list_keys(self) -> list[str]:
        """Return all keys."""
        keys: list[str] = self._store.list_keys()
        self._count("list", *keys)
        return keys

    def has_extended_api(self) -> bool:
        """Tell torch that several values can be got at once."""
        return True

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for several values, and return them."""
        values: list[bytes] = self._store.multi_get(keys)
        self._count("multi_get", *keys, *values)
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """Set several values."""
        self._count("multi_set", *keys, *values)
        self._store.multi_set(keys, values)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long values are waited for."""
        self._store.set_timeout(timeout)


@dataclass(frozen=True)
class Started:
    """What one rank has seen.

    :param session_s: Seconds until its session was there.
    :param first_round_s: Seconds until its first round had ended, from the same moment.
    :param round_s: Seconds of a later round.
    :param files: Descriptors that are open after rounds.
    :param sockets: Those of them that are sockets.
    :param requests: Requests of the world's store, by their names.
    :param store_bytes: Bytes of these, both ways.
    :param lost_s: Seconds from the loss of a rank to the error of this one.
    :param error: The error's text.
    """

    session_s: float
    first_round_s: float
    round_s: float
    files: int
    sockets: int
    requests: Mapping[str, int]
    store_bytes: int
    lost_s: float = 0.0
    error: str = ""


def start_rank(rank: int, world_size: int, port: int, mesh: int | None, lost: int | None) -> Started:
    """Be a rank of two cells, make rounds, and lose a rank if one is named."""
    be_launched(rank, world_size, port)
    stores: list[CountingStore] = []
    world_store = session.world_store

    def counted(*asked: Any) -> CountingStore:
        stores.append(CountingStore(world_store(*asked)))
        return stores[-1]

    limit = gloo_connections.MESH_LIMIT if mesh is None else mesh
    started: Started | None = None
    lost_at = 0.0
    begun = time.monotonic()
    try:
        with (
            mock.patch.object(gloo_connections, "MESH_LIMIT", limit),
            mock.patch.object(session, "world_store", counted),
            xffl.session(federated=(world_size // 2,) * 2, timeout_s=TIMEOUT_S) as state,
        ):
            session_s = time.monotonic() - begun
            aggregator = aggregator_of(nn.Linear(64, 1, bias=False), state)
            aggregator.aggregate()
            first_round_s = time.monotonic() - begun
            round_at = time.monotonic()
            for _ in range(3):
                aggregator.aggregate()
            round_s = (time.monotonic() - round_at) / 3
            (store,) = stores
            requests = dict(store.requests)
            started = Started(
                session_s,
                first_round_s,
                round_s=round_s,
                files=count_open_files(),
                sockets=len(open_sockets()),
                requests=requests,
                store_bytes=store.nbytes,
            )
            dist.barrier()
            if lost is not None:
                lost_at = time.monotonic()
                if rank == lost:
                    os.kill(os.getpid(), signal.SIGKILL)
                while True:
                    aggregator.aggregate()
    except Exception as error:
        if lost is None or started is None:
            raise
        return Started(**{**vars(started), "lost_s": time.monotonic() - lost_at, "error": str(error)})
    return started


def close_aggregator(rank: int, world_size: int, port: int, keys: int) -> float:
    """Return the seconds that closing a delayed aggregator takes while rank 0's store has so many keys more."""
    be_launched(rank, world_size, port)
    with xffl.session(federated=(world_size // 2,) * 2, timeout_s=TIMEOUT_S) as state:
        if rank == 0:
            store = dist.group.WORLD.get_group_store()
            for number in range(keys):
                store.set(f"many/{number}", "x" * 20)
        aggregator = aggregator_of(nn.Linear(64, 1, bias=False), state, overlap=True)
        aggregator.aggregate_async().merge()
        dist.barrier()
        begun = time.monotonic()
        aggregator.close()
        seconds = time.monotonic() - begun
        dist.barrier()
    return seconds


def _print_started(told: Sequence[Any], seconds: float) -> None:
    ranks = [each for each in told if isinstance(each, Started)]
    print(f"{len(ranks)} of {len(told)} ranks ended by themselves; all had ended after {seconds:.1f} s")
    for name in ("session_s", "first_round_s", "round_s", "files", "sockets", "store_bytes", "lost_s"):
        values = [float(getattr(each, name)) for each in ranks]
        print(f"  {name:14} median {statistics.median(values):12.3f} most {max(values):12.3f}")
    requests: Counter[str] = sum((Counter(each.requests) for each in ranks), Counter())
    print(f"  requests of all {requests.total()}: {dict(requests)}")
    for error, count in Counter(each.error.partition("\n")[0][:100] for each in ranks if each.error).most_common(4):
        print(f"  {count} ranks: {error}")


def main() -> None:
    """Start what is asked for, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=32, help="an even number")
    parser.add_argument("--mesh", type=int, help="ranks of the largest world that counts as small")
    parser.add_argument("--lose", type=int, help="the rank that is killed")
    parser.add_argument("--keys", type=int, help="further keys in rank 0's store while an aggregator is closed")
    options = parser.parse_args()
    if options.keys is not None:
        for keys in (0, options.keys, 0, options.keys):
            closed = run_world(options.ranks, close_aggregator, free_port(), keys, init=False)
            print(f"{keys:8} keys: closed after {max(closed):.4f} s")
        return
    begun = time.monotonic()
    mortal = () if options.lose is None else range(options.ranks)
    told = run_world(
        options.ranks,
        start_rank,
        free_port(),
        options.mesh,
        options.lose,
        init=False,
        mortal=mortal,
        timeout_s=5 * TIMEOUT_S,
    )
    _print_started(told, time.monotonic() - begun)


if __name__ == "__main__":
    main()
