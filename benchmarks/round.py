"""Time full rounds against one raw flat all-reduce of the same bytes on the same ranks.

    xffl exec --processes 2 --federated 1,1 benchmarks/round.py [--megabytes 64] [--tensors 157] [--repeats 7]

The two are interleaved, so that the noise of a shared machine meets both; the figure of merit is the ratio of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import xffl


def tensors_of(megabytes: float, count: int) -> list[int]:
    """Share ``megabytes`` of fp32 out over ``count`` tensors: every third one tiny, the others equal."""
    tiny = count // 3
    large = int(megabytes * 2**20 / 4 / max(1, count - tiny))
    return [64 + index if index % 3 == 2 else large for index in range(count)]


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a collective call, from when all ranks are ready."""
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=64.0)
    parser.add_argument("--tensors", type=int, default=157)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with xffl.session() as state:
        model = nn.ParameterList(nn.Parameter(torch.randn(n)) for n in tensors_of(options.megabytes, options.tensors))
        flat = torch.randn(sum(parameter.numel() for parameter in model))
        rounds = {name: xffl.Aggregator(model, state, atomic=name == "atomic") for name in ("atomic", "in place")}
        calls: dict[str, Callable[[], object]] = {"raw all-reduce": lambda: dist.all_reduce(flat)}
        calls |= {f"round, {name}": aggregator.aggregate for name, aggregator in rounds.items()}
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for repeat in range(options.repeats + 1):
            for name, call in calls.items():
                duration = timed(call)
                if repeat:  # the first pass warms connections and memory up
                    seconds[name].append(duration)
        if state.rank == 0:
            report(options, state.topology.sizes, seconds)


def report(options: argparse.Namespace, sizes: tuple[int, ...], seconds: dict[str, list[float]]) -> None:
    """Print the medians and their ratios, and write them with what they were measured on."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    raw = medians["raw all-reduce"]
    for name, median in medians.items():
        print(f"{name:16s} {1e3 * median:8.1f} ms   {median / raw:5.2f}x")
    if options.out:
        record = {
            "benchmark": "round",
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "xffl": xffl.__version__},
            "cells": sizes,
            "megabytes": options.megabytes,
            "tensors": options.tensors,
            "seconds": seconds,
            "ratios": {name: median / raw for name, median in medians.items()},
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
