"""Time what a strategy adds to a step: against a loop by hand with the same settings, in one run.

    xffl exec --processes 2 benchmarks/strategies.py fsdp [--pairs 15] [--steps 20]
    xffl exec --processes 1 benchmarks/strategies.py single
    xffl exec --processes 4 benchmarks/strategies.py memory --megabytes 400

``fsdp`` compares the FSDP strategy with hand-written FSDP2, ``single`` the single strategy with a plain torch loop.
Pairs of both are interleaved, their order alternates, and a pair counts for the rank that took longest; told are the
median of the pairs' ratios (by hand / strategy: 1 is as fast), the lower end of its 95 % confidence interval (by order
statistics) and the processor time that a step takes more, in microseconds. ``memory`` measures how far the resident
memory of a rank rises above what it was after the process group was made, training with Adam.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pairs import summary, write_record
from torch import nn
from torch.distributed.fsdp import fully_shard

from xffl.cluster.hardware import resident_bytes
from xffl.distributed import DeviceParameters
from xffl.parallel import DistributedConfig, DistributedStrategy, StrategyConfig

MIB = 2**20


class Layer(nn.Module):
    """A residual step of two matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def build(width: int, layers: int) -> nn.Module:
    return nn.Sequential(*(Layer(width) for _ in range(layers)))


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def make_strategy(name: str) -> DistributedStrategy:
    parameters = DeviceParameters.FSDP() if name == "fsdp" else DeviceParameters.SINGLE_DEVICE()
    distributed = DistributedConfig(strategy=name, device_parameters=parameters, wrap=(Layer,))
    return DistributedStrategy.from_config(StrategyConfig(distributed=distributed))


def contenders(options: argparse.Namespace, strategy: DistributedStrategy) -> dict[str, Callable[[], None]]:
    """Return a step of each kind on a model of its own, from the same weights."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, y = (torch.randn(options.batch, options.width, generator=generator) for _ in range(2))
    torch.manual_seed(0)
    by_hand = build(options.width, options.layers)
    torch.manual_seed(0)
    model = strategy.wrap_model(build(options.width, options.layers), loss=mean_square)
    if options.what == "fsdp":
        for layer in by_hand:
            fully_shard(layer, mesh=strategy.world.get_mesh("fsdp"))
        fully_shard(by_hand, mesh=strategy.world.get_mesh("fsdp"))
    plain = torch.optim.AdamW(by_hand.parameters(), lr=1e-3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def hand_step() -> None:
        mean_square(by_hand(x), y).backward()
        plain.step()
        plain.zero_grad()

    def strategy_step() -> None:
        for batch, target in strategy.micro_batches([(x, y)], model):
            strategy.forward_backward(model, batch, target=target)
            strategy.step(optimizer)

    return {"by hand": hand_step, "strategy": strategy_step}


def compare(options: argparse.Namespace) -> dict[str, Any] | None:
    """Time interleaved pairs; rank 0 returns what was found."""
    with make_strategy(options.what) as strategy:
        calls = contenders(options, strategy)
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        cpu: dict[str, list[float]] = {name: [] for name in calls}
        for pair in range(options.pairs + 1):  # the first makes buffers and optimizer states
            for name in sorted(calls, reverse=pair % 2 == 0):
                dist.barrier()
                gc.collect()
                start, start_cpu = time.perf_counter(), time.process_time()
                for _ in range(options.steps):
                    calls[name]()
                dist.barrier()
                seconds[name].append(time.perf_counter() - start)
                cpu[name].append(time.process_time() - start_cpu)
        longest = strategy.world.all_reduce(torch.tensor(list(seconds.values()), dtype=torch.float64), "max")
        busiest = strategy.world.all_reduce(torch.tensor(list(cpu.values()), dtype=torch.float64), "mean")
        if strategy.rank != 0:
            return None
        told = dict(zip(calls, longest[:, 1:].tolist(), strict=True))
        busy = dict(zip(calls, busiest[:, 1:].tolist(), strict=True))
    found = summary(told["by hand"], told["strategy"], busy["by hand"], busy["strategy"], options.steps)
    print(
        f"{options.what}: by hand / strategy {found['ratio']:.3f}, at least {found['ratio_lower_95']:.3f} (95 %), "
        f"{found['step_ms']:.2f} ms a step, {found['cpu_added_us_per_step']:+.0f} us of processor time added"
    )
    return found


def weigh(options: argparse.Namespace) -> dict[str, Any] | None:
    """Measure the peak of a rank's memory while it makes a model on the meta device and trains it with Adam."""
    name = "single" if int(os.environ.get("WORLD_SIZE", "1")) == 1 else "fsdp"
    layers = max(1, round(options.megabytes * 1e6 / 4 / (8 * options.width**2)))
    with make_strategy(name) as strategy:
        strategy.world.all_reduce(torch.zeros(1))  # connections are made with the first collective
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = resident_bytes("VmRSS")
        with torch.device("meta"):
            bare = build(options.width, layers)
        parameters = sum(parameter.numel() for parameter in bare.parameters())
        model = strategy.wrap_model(bare, loss=mean_square)
        made = resident_bytes("VmHWM") - before
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        x = torch.randn(options.batch, options.width)
        for _ in range(2):  # the second has optimizer states beside gradients
            strategy.forward_backward(model, x, target=-x)
            strategy.step(optimizer)
        rise = strategy.world.all_reduce(torch.tensor([made, resident_bytes("VmHWM") - before]), "max").tolist()
        if strategy.rank != 0:
            return None
    print(
        f"{name} over {options.megabytes:g} MB of weights: made with {rise[0] / MIB:.0f} MiB, trained with "
        f"{rise[1] / MIB:.0f} MiB"
    )
    return {"parameter_bytes": 4 * parameters, "made_bytes": rise[0], "peak_bytes": rise[1], "strategy": name}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("fsdp", "single", "memory"))
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--megabytes", type=float, default=400.0, help="weights of the model, for memory")
    parser.add_argument("--out", type=Path, help="write JSON there")
    options = parser.parse_args()
    write_record("strategies", options, weigh(options) if options.what == "memory" else compare(options))


if __name__ == "__main__":
    main()
