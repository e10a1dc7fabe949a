"""Does it help to give each rank cores of its own? Ranks train a small model with ``XFFL_BIND=cores`` and without.

Every arm runs in fresh processes on this machine, one arm after the other, several times; the medians are compared.

    python benchmarks/binding.py --processes 2 --repeats 5 --out binding.json
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

from xffl.cluster.hardware import describe_host
from xffl.cluster.launch.affinity import allowed_cpus, bind_if_asked, find_cores

ARMS = {
    "one thread": {"OMP_NUM_THREADS": "1"},
    "one thread, bound": {"OMP_NUM_THREADS": "1", "XFFL_BIND": "cores"},
    "torch's threads": {},
    "XFFL_BIND alone": {"XFFL_BIND": "cores"},
}
WIDTH, BATCH = 512, 64


def train(rank: int, steps: int) -> None:
    """Be one rank, whose threads have the cores that it is given."""
    bind_if_asked()
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rate = steps_per_second(steps)
    if rank == 0:
        print(json.dumps({"steps_per_s": rate, "threads": torch.get_num_threads()}))
    gc.collect()  # while a model holds the group, the group's threads outlive the interpreter, which aborts
    dist.destroy_process_group()


def steps_per_second(steps: int) -> float:
    """Time the same work on every rank, with an all-reduce of the gradients after each step."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    inputs = torch.randn(BATCH, WIDTH)

    def step() -> None:
        model(inputs).square().mean().backward()

    for _ in range(10):
        step()
    dist.barrier()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    dist.barrier()
    return steps / (time.perf_counter() - started)


def measure(processes: int, steps: int, variables: dict[str, str]) -> dict[str, float]:
    """Run one arm once."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = {name: text for name, text in os.environ.items() if name not in ("OMP_NUM_THREADS", "XFFL_BIND")}
    base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)} | variables
    base |= {"LOCAL_WORLD_SIZE": str(processes), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    command = [sys.executable, __file__, "--processes", str(processes), "--steps", str(steps), "--rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)],
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"a rank failed with {variables}")
    return dict(json.loads(outputs[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        train(options.rank, options.steps)
        return
    samples: dict[str, list[float]] = {name: [] for name in ARMS}
    for _ in range(options.repeats):
        for name, variables in ARMS.items():
            samples[name].append(measure(options.processes, options.steps, variables)["steps_per_s"])
    first = statistics.median(samples["one thread"])
    print(f"{options.processes} ranks on {len(find_cores(allowed_cpus()))} cores; load {os.getloadavg()[0]:.1f}")
    for name, found in samples.items():
        middle = statistics.median(found)
        spread = f"{min(found):.1f} to {max(found):.1f}"
        print(f"{name:<20} {middle:7.1f} steps/s ({spread})  {middle / first:.2f} x one thread")
    if options.out is not None:
        when = datetime.now(timezone.utc).isoformat(timespec="seconds")
        told = {"host": describe_host(), "python": platform.python_version(), "when": when}
        told |= {"processes": options.processes, "load": os.getloadavg(), "samples": samples}
        options.out.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
