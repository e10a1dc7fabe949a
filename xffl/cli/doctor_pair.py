"""A process of ``xffl doctor`` with torch, started by that command only: tells about torch, then adds with others.

It speaks by lines of JSON. First it tells its version, backends, GPUs, NCCL and the port of its store. Then each line
that it reads names a partner; it adds with that one and tells at once how it went.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any

__all__ = ["main"]

_ELEMENTS = 2**20
_PROBE_S = 2.0


def main() -> None:
    """Do as the lines on standard input say, with a time limit in seconds from the command line for each addition."""
    here = os.path.dirname(os.path.abspath(__file__))
    # The modules of the command line are not for torch's imports.
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or os.curdir) != here]
    timeout_s = float(sys.argv[1])
    started = time.monotonic()
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    import_s = time.monotonic() - started
    # Every process has a store that the lower one of a pair lends to it.
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=timeout_s), False)
    told = {
        "torch": torch.__version__,
        "import_s": import_s,
        "backends": [name for name in ("gloo", "nccl", "mpi", "ucc") if getattr(dist, f"is_{name}_available")()],
        "gpus": torch.cuda.device_count(),
        "nccl": list(torch.cuda.nccl.version()) if dist.is_nccl_available() else None,  # type: ignore[no-untyped-call]
        "port": store.port,
    }
    _tell(told)
    for line in sys.stdin:
        question = json.loads(line)
        _tell({"turn": question["turn"], **_add(question, timeout_s)})
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo may still wait for a partner that never came


def _add(question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Add with one other process over gloo, and time a second addition.

    :param question: ``pair``: a name that both have; ``rank``: 0 or 1; ``store``: address and port that both go to.
    :param timeout_s: How long to wait for the other one.
    :return: ``seconds`` and ``mib``, or ``error``.
    """
    import torch
    from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

    deadline = time.monotonic() + timeout_s
    address, port = question["store"]
    try:
        # A store that is out of reach shall not take all the time that torch would give it.
        socket.create_connection((address, port), min(_PROBE_S, timeout_s)).close()
    except OSError as error:
        return {"error": f"cannot connect to {address}:{port}: {error.strerror or error}"}
    try:
        store = _connect(address, port, deadline)
        # Not by init_process_group: after one that failed, torch would look for the next partner under another name.
        # torch's stubs leave its methods out.
        group: Any = ProcessGroupGloo(PrefixStore(question["pair"], store), question["rank"], 2, _left(deadline))
        values = torch.full((_ELEMENTS,), float(question["rank"]) + 1)
        group.allreduce([values]).wait()
        right = bool((values == 3).all())
        started = time.monotonic()
        group.allreduce([values]).wait()
        seconds = time.monotonic() - started
        group.barrier().wait()
    except (RuntimeError, ValueError) as error:
        return {"error": " ".join(str(error).split())[:200]}
    return {"seconds": seconds, "mib": values.nbytes / 2**20} if right else {"error": "the sum is wrong"}


def _connect(address: str, port: int, deadline: float) -> Any:
    """Connect to a store, in a thread: torch waits without an end for one whose process is stopped."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    found: queue.Queue[Any] = queue.Queue()

    def connect() -> None:
        try:
            found.put(TCPStore(address, port, None, False, _left(deadline)))
        except (RuntimeError, ValueError) as error:
            found.put(error)

    threading.Thread(target=connect, daemon=True).start()
    try:
        store = found.get(timeout=_left(deadline).total_seconds())
    except queue.Empty:
        raise RuntimeError(f"the store at {address}:{port} does not answer") from None
    if isinstance(store, Exception):
        raise store
    return store


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.1))


def _tell(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
