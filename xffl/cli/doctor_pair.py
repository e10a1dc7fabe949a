"""A process of ``xffl doctor`` with torch, started by that command only: tells about torch, then adds with others.

It speaks by lines of JSON. First it tells its version, backends, GPUs and the port of its store. Then it reads the list
of all such processes, each with the address of its store, adds with each of them in turn, and tells how it went.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

__all__ = ["main", "partners"]

_ELEMENTS = 2**20


def main() -> None:
    """Do as the lines on standard input say, with a time limit in seconds from the command line for each addition."""
    here = os.path.dirname(os.path.abspath(__file__))
    # The modules of the command line are not for torch's imports.
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or os.curdir) != here]
    timeout = timedelta(seconds=float(sys.argv[1]))
    started = time.monotonic()
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    import_s = time.monotonic() - started
    # Every process has a store that the lower one of a pair lends to it.
    store = TCPStore("127.0.0.1", 0, None, True, timeout, False)
    told = {
        "torch": torch.__version__,
        "import_s": import_s,
        "backends": [name for name in ("gloo", "nccl", "mpi", "ucc") if getattr(dist, f"is_{name}_available")()],
        "gpus": torch.cuda.device_count(),
        "port": store.port,
    }
    _tell(told)
    line = sys.stdin.readline()
    if line:
        question = json.loads(line)
        _tell({"pairs": _add_with_all(question["unit"], question["stores"], timeout)})
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo may still wait for a partner that never came


def partners(unit: int, count: int) -> list[int]:
    """Return the order in which a process meets the others, so that all of a round are in pairs at once.

    The tournament of the circle method: an odd number gets a round off.

    :param unit: Number of the process.
    :param count: How many there are.
    :return: Numbers of the others, in that order.
    """
    even = count + count % 2
    found = []
    for turn in range(even - 1):
        if unit == even - 1:
            # 2 x = turn (mod even - 1): the one who would meet himself.
            other = turn * (even // 2) % (even - 1)
        else:
            other = (turn - unit) % (even - 1)
            other = even - 1 if other == unit else other
        if other < count:
            found.append(other)
    return found


def _add_with_all(unit: int, stores: Sequence[tuple[str, int]], timeout: timedelta) -> dict[int, dict[str, Any]]:
    return {other: _add_with(unit, other, stores, timeout) for other in partners(unit, len(stores))}


def _add_with(unit: int, other: int, stores: Sequence[tuple[str, int]], timeout: timedelta) -> dict[str, Any]:
    """Add with one other process over gloo, and time a second addition."""
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    low, high = sorted((unit, other))
    try:
        store = TCPStore(*stores[low], None, False, timeout)
        dist.init_process_group(
            "gloo",
            store=PrefixStore(f"{low}-{high}", store),
            rank=int(unit == high),
            world_size=2,
            timeout=timeout,
        )
        values = torch.full((_ELEMENTS,), float(unit == high) + 1)
        dist.all_reduce(values)
        right = bool((values == 3).all())
        started = time.monotonic()
        dist.all_reduce(values)
        seconds = time.monotonic() - started
        dist.barrier()
        dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        found = {"error": " ".join(str(error).split())[:200]}
    else:
        return {"seconds": seconds, "mib": values.nbytes / 2**20} if right else {"error": "the sum is wrong"}
    if dist.is_initialized():
        dist.destroy_process_group()
    return found


def _tell(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
