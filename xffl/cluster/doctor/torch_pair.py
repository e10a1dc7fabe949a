"""A process of ``xffl doctor`` with torch: it reports torch, then runs all-reduces with the processes of other hosts.

It speaks by lines of JSON: first it reads where its store is to listen, and reports version, processor, backends, GPUs,
NCCL and the store's port; then it reads a list of pairs, runs them, and reports how they went; or a list of stores, and
reports what they hold at a key.
Nobody imports this file, since torch may be broken.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Waiting
from datetime import timedelta
from functools import partial
from typing import Any

__all__ = ["main"]

THREADS = 16  # pairs at a time
_ELEMENTS = 2**20  # 4 MiB: 0.2 s on a link of 200 Mbit/s, above which latency does not count
_PROBE_S = 2.0


def main() -> None:
    """Do what the lines on standard input say; the command line holds the time limit of one all-reduce in seconds."""
    # The modules beside this file are not for torch's imports.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or os.curdir) != here]
    timeout_s = float(sys.argv[1])
    started = time.monotonic()
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    import_s = time.monotonic() - started
    # Every process has a store that the lower one of a pair lends to it.
    asked = json.loads(sys.stdin.readline() or "{}")
    if asked.get("loopback"):  # all hosts are this one
        os.environ.setdefault("GLOO_SOCKET_IFNAME", asked["loopback"])
    address = asked.get("address", "")
    listener = socket.create_server((address, 0), backlog=1024)
    store = TCPStore(
        address or "127.0.0.1",
        listener.getsockname()[1],
        None,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    report = {
        "torch": torch.__version__,
        # As xffl.distributed.agreement.consistency.own_runtime tells it in training.
        "cuda": torch.version.cuda or torch.version.hip or "none",
        "processor": str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else cpu,
        "import_s": import_s,
        "backends": [name for name in ("gloo", "nccl", "mpi", "ucc") if getattr(dist, f"is_{name}_available")()],
        "gpus": torch.cuda.device_count(),
        "nccl": list(torch.cuda.nccl.version()) if dist.is_nccl_available() else None,  # type: ignore[no-untyped-call]
        "is_rccl": torch.version.hip is not None,
        "port": store.port,
    }
    print(json.dumps(report), flush=True)
    for line in iter(sys.stdin.readline, ""):  # to its end: others may still use the store
        asked = json.loads(line)
        # Each in a thread: one that waits for a silent partner does not delay the others.
        with ThreadPoolExecutor(THREADS) as pool:
            if "stores" in asked:
                results = list(pool.map(partial(_read, timeout_s, asked["key"]), asked["stores"]))
            else:
                results = list(pool.map(lambda pair: _all_reduce(timeout_s, *pair), asked["pairs"]))
        print(json.dumps({"results": results}), flush=True)
    os._exit(0)  # a thread of gloo may still wait for a partner that never came


def _read(timeout_s: float, key: str, place: str) -> dict[str, str]:
    """Return what a store holds at a key, nothing where it has no such key, as its ``proof``; or an ``error``."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, _, port = place.rpartition(":")

    def read() -> str:
        store = TCPStore(host, int(port), timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
        return str(store.get(key).decode(errors="replace")) if store.check([key]) else ""

    try:
        # In a thread: torch waits without end for a store whose process is stopped.
        return {"proof": ThreadPoolExecutor(1).submit(read).result(timeout_s)}
    except Waiting:
        return {"error": "it takes connections, but does not answer"}
    except (RuntimeError, ValueError) as error:
        return {"error": " ".join(str(error).split())[:200]}


def _all_reduce(timeout_s: float, pair: str, rank: int, address: str, port: int) -> dict[str, Any]:
    """Run two all-reduces with the process of the same pair and store; return the second's time or an ``error``."""
    import torch
    from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

    deadline = time.monotonic() + timeout_s
    try:
        # A store that is out of reach must not take all the time that torch would give it.
        socket.create_connection((address, port), min(_PROBE_S, timeout_s)).close()
    except OSError as error:
        return {"error": f"cannot connect to {address}:{port}: {error.strerror or error}"}
    try:
        # In a thread: torch waits without end for a store whose process is stopped.
        connected = ThreadPoolExecutor(1).submit(TCPStore, address, port, timeout=_left(deadline))
        store = PrefixStore(pair, connected.result(_left(deadline).total_seconds()))
        # Not by init_process_group: after one that failed, torch would look for the next partner under another name.
        group: Any = ProcessGroupGloo(store, rank, 2, _left(deadline))  # torch's stubs leave its methods out
        values = torch.full((_ELEMENTS,), float(rank) + 1, dtype=torch.float32)
        group.allreduce([values]).wait()
        if not bool((values == 3).all()):
            return {"error": "the sum is wrong"}
        started = time.monotonic()
        group.allreduce([values]).wait()
        seconds = time.monotonic() - started
        group.barrier().wait()
    except Waiting:
        return {"error": f"the store at {address}:{port} does not answer"}
    except (RuntimeError, ValueError) as error:
        return {"error": " ".join(str(error).split())[:200]}
    return {"seconds": seconds, "mib": values.nbytes / 2**20}


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.1))


if __name__ == "__main__":
    main()
