"""All of the doctor that needs torch: what it is built with, the store of rank 0, and all-reduces of two hosts.

Only the child of :mod:`~xffl.cluster.doctor.member` imports it, since torch may be broken.
"""

from __future__ import annotations

import json
import platform
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Waiting
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from xffl.cluster.doctor.messages import PairResult, Place, read
from xffl.cluster.doctor.probe import THREADS
from xffl.cluster.reaching import connection_error
from xffl.cluster.run_token import PROOF_KEY

__all__ = ["HostStore", "all_reduce", "describe_torch", "read_proofs"]

T = TypeVar("T")

_ELEMENTS = 2**20  # 4 MiB: 0.2 s on a link of 200 Mbit/s, above which latency does not count
_CONNECT_S = 2.0


def describe_torch() -> dict[str, Any]:
    """Return what this process finds out about its torch."""
    torch.set_num_threads(1)
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {
        "torch": torch.__version__,
        # As xffl.distributed.agreement.consistency.own_runtime tells it in training.
        "cuda": torch.version.cuda or torch.version.hip or "none",
        "processor": str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else cpu,
        "backends": [name for name in ("gloo", "nccl", "mpi", "ucc") if getattr(dist, f"is_{name}_available")()],
        "gpus": torch.cuda.device_count(),
        "nccl": list(torch.cuda.nccl.version()) if dist.is_nccl_available() else None,  # type: ignore[no-untyped-call]
        "is_rccl": torch.version.hip is not None,
    }


class HostStore:
    """Rank 0's store, where the hosts write JSON for each other; each error of torch is an OSError here."""

    def __init__(self, address: str, port: int, timeout_s: float, listener: socket.socket | None = None) -> None:
        """Serve it at a socket that listens, or connect to it.

        Raises an OSError where no store answers there in time.
        """
        is_server, descriptor = listener is not None, None if listener is None else listener.detach()
        self._place = address, port, timeout_s
        connect = partial(
            TCPStore,
            address,
            port,
            None,
            is_master=is_server,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
        self._store = _within(timeout_s, connect)

    def write(self, key: str, message: Any) -> None:
        """Write a message, once for each key."""
        _ask(self._store.set, key, json.dumps(message, default=asdict))

    def wait(self, keys: Sequence[str], timeout_s: float) -> list[str]:
        """Wait until all keys have been written; return those that have been, in order, when the time is over."""
        try:
            if keys:
                _ask(self._store.wait, list(keys), timedelta(seconds=max(timeout_s, 0.01)))
        except TimeoutError:
            return [key for key in keys if _ask(self._store.check, [key])]
        return list(keys)

    def read(self, kind: Any, key: str, timeout_s: float) -> Any:
        """Return what was written at a key, checked as :func:`xffl.cluster.doctor.messages.read` does."""
        if not self.wait([key], timeout_s):
            raise TimeoutError("it did not answer in time")
        return read(kind, bytes(_ask(self._store.get, key)))

    def group(self, name: str, rank: int, timeout_s: float) -> Any:
        """Return a group over gloo of two processes that give the same name."""
        from torch.distributed import ProcessGroupGloo  # a build may lack it

        # By a connection of its own, since who waits holds it up for all. Not by init_process_group: after one that
        # failed, torch would look for the next partner under another name.
        store = HostStore(*self._place)._store
        return ProcessGroupGloo(PrefixStore(name, store), rank, 2, timedelta(seconds=timeout_s))


def _ask(call: Callable[..., T], *arguments: Any) -> T:
    """Return what a call of a store returns; an OSError says what went wrong."""
    try:
        return call(*arguments)
    except RuntimeError as error:
        if "timeout" in str(error).lower():
            raise TimeoutError("it did not answer in time") from None
        raise ConnectionError("its store has gone") from None


def _within(timeout_s: float, call: Callable[[], T]) -> T:
    """Return what a call returns, from a thread: torch waits without end for a store whose process is stopped."""
    try:
        return ThreadPoolExecutor(1).submit(call).result(timeout_s)
    except Waiting:
        raise TimeoutError("it takes connections, but does not answer") from None
    except (RuntimeError, ValueError) as error:
        raise ConnectionError(" ".join(str(error).split())[:200]) from None


def all_reduce(store: HostStore, timeout_s: float, pair: str, rank: int, partner: Place) -> PairResult:
    """Run two all-reduces with the host that has the other rank of a pair; return the second's time or an ``error``."""
    deadline = time.monotonic() + timeout_s
    if rank == 1 and partner["ports"]:  # gloo's own errors name no address
        address, port = partner["address"], partner["ports"][-1]
        if (why := connection_error(address, port, min(_CONNECT_S, timeout_s))) is not None:
            return {"error": f"cannot connect to {address}:{port}: {why}"}
    try:
        group = store.group(pair, rank, max(deadline - time.monotonic(), 0.1))
        values = torch.full((_ELEMENTS,), float(rank) + 1, dtype=torch.float32)
        group.allreduce([values]).wait()
        if not bool((values == 3).all()):
            return {"error": "the sum is wrong"}
        started = time.monotonic()
        group.allreduce([values]).wait()
        seconds = time.monotonic() - started
        group.barrier().wait()
    except (RuntimeError, ValueError) as error:
        return {"error": " ".join(str(error).split())[:200]}
    return {"seconds": seconds, "mib": values.nbytes / 2**20}


def read_proofs(timeout_s: float, stores: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return what the stores of an elastic run's cells hold as ``proof`` of its token, nothing where no cell put one.

    It is an ``error`` instead where a store does not answer.
    """

    def read_one(place: str) -> dict[str, str]:
        host, _, port = place.rpartition(":")
        limit = timedelta(seconds=timeout_s)

        def get() -> str:
            store = TCPStore(host, int(port), timeout=limit, wait_for_workers=False)
            return str(store.get(PROOF_KEY).decode(errors="replace")) if store.check([PROOF_KEY]) else ""

        try:
            return {"proof": _within(timeout_s, get)}
        except OSError as error:
            return {"error": str(error)}

    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(stores, pool.map(read_one, stores.values()), strict=True))
