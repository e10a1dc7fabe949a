"""What it costs to be ready to leave: microseconds of ``is_due`` in each optimizer step, while nobody asks.

Run it as ``python benchmarks/preemption.py [--world 2]``; ranks are processes of this machine that share a TCP store.
It prints JSON: the median, over seven runs of 20,000 calls, of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import xffl
from xffl.training import Preemption

CALLS = 20_000
RUNS = 7


def calls(preemption: Preemption) -> float:
    """Return microseconds of a call."""
    start = time.perf_counter()
    for step in range(CALLS):
        assert not preemption.is_due(step)
    return (time.perf_counter() - start) / CALLS * 1e6


def measure(rank: int, world: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    state = xffl.distributed.setup_distributed_process_group(
        rank=rank,
        world_size=world,
        group_local_rank=rank,
        group_local_size=world,
        group_rank=0,
        group_world_size=1,
        master_addr="127.0.0.1",
        master_port=port,
        backend="gloo",
        device="cpu",
        federated=1,
    )
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    found = {}
    for name, signals in (("off", []), ("on", ["USR2", "TERM"])):
        with Preemption(state, signals) as preemption:
            found[name] = statistics.median(calls(preemption) for _ in range(RUNS))
            preemption.is_due_at_end()  # several cells and no rounds
    with (
        Preemption(state) as preemption,
        xffl.FederatedScaling(model, optimizer, state, every=10**6) as rounds,
    ):
        preemption.follow(rounds, lambda: None)
        found["on, with rounds"] = statistics.median(calls(preemption) for _ in range(RUNS))
    told: list[Any] = [None] * world
    dist.all_gather_object(told, found)
    if rank == 0:
        results.put({name: round(max(one[name] for one in told), 2) for name in found})
    xffl.distributed.cleanup_distributed_process_group(state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    world = parser.parse_args().world
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    port = store.port
    del store
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    mp.spawn(measure, args=(world, port, results), nprocs=world)
    about = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    json.dump({"is_due_us": results.get(), "world": world, "about": about}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
