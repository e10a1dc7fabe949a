"""Time full rounds against one raw flat all-reduce of the same bytes, on the same groups, at the same time.

    xffl exec --processes 2 --federated 1,1 benchmarks/round.py [--tensors 157] [--parameters 100e6] [--repeats 7]
    xffl exec --processes 2 --federated 1,1 benchmarks/round.py --tensors 2000 --elements 512
    xffl exec --processes 4 --federated 2,2 benchmarks/round.py --form two_hop --codec int8 --rails
    xffl exec --processes 2 --federated 1,1 benchmarks/round.py --server diloco --beside torchft
    xffl exec --processes 2 --federated 1,1 benchmarks/round.py --memory

Each rank's shard lies flat for the raw all-reduce, over the ranks that exchange that shard in a round (with ``--plain``
all of the model, over the world); the groups work at once. Between two cells ``messages alone`` is the least that a
round over torch's messages can take: those of a round, a look at the values before and a mean after. The contenders
are interleaved, a sample counts for the rank that took longest, and the figure of merit is the ratio of medians.
``--memory`` measures instead how far the resident memory rises above what a rank had before its aggregator was made,
in a process of its own for each kind of round.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

import xffl
from xffl.aggregation.engine.buffers import copy_memory
from xffl.aggregation.engine.transport import start_moves
from xffl.cluster.hardware import resident_bytes
from xffl.compat.pytorch import memory_of

KINDS = {"atomic": True, "in-place": False}
MIB = 2**20
EXACT = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""glibc's allocator gives back what is freed. It would keep blocks of some MB otherwise, 5 to 12 MB from run to run."""
LARGEST_TINY = 640
"""Elements of what counts as a tiny tensor."""


class Tensors(nn.Module):
    """Parameters that are never used, of the given numbers of elements."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        for index, size in enumerate(sizes):
            self.register_parameter(f"t{index:05d}", nn.Parameter(torch.randn(size)))


def tensor_sizes(count: int, parameters: float, elements: int | None) -> list[int]:
    """Return the elements of each tensor: all alike, or 57 of 157 tiny (at most 640) and the rest sharing the others.

    :param count: Number of tensors.
    :param parameters: Elements of all together, where they are not alike.
    :param elements: Elements of each, where they are.
    """
    if elements is not None:
        return [elements] * count
    # As in a network, tiny ones stand between large ones.
    is_tiny = [(index + 1) * 57 // 157 > index * 57 // 157 for index in range(count)]
    sizes = [64 + 37 * index % 577 if tiny else 0 for index, tiny in enumerate(is_tiny)]
    large = [index for index, tiny in enumerate(is_tiny) if not tiny]
    rest = int(parameters) - sum(sizes)
    if not large or rest < len(large):
        raise SystemExit(f"--parameters {parameters:g} are too few for {count} tensors; give more, or --elements")
    for place, index in enumerate(large):
        sizes[index] = rest // len(large) + (place < rest % len(large))
    return sizes


def build(options: argparse.Namespace, state: xffl.DistributedState) -> nn.Module:
    """Return the model, spread over each cell as the state says unless ``--plain`` keeps it whole."""
    model = Tensors(tensor_sizes(options.tensors, options.parameters, options.elements))
    return model if options.plain else xffl.shard(model, state)


def local_parts(model: nn.Module) -> list[torch.Tensor]:
    """Return what this rank holds of each parameter."""
    parameters = [parameter.detach() for parameter in model.parameters()]
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in parameters]


class Messages:
    """Send every other large tensor to one peer, take the mean of the others, swap the means: a round without more."""

    DEPTH = 8

    def __init__(self, parts: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        self.group, self.me = group, dist.get_rank(group)
        self.peer = dist.get_global_rank(group, 1 - self.me)
        self.parts = [part.reshape(-1) for part in parts]
        self.buffers = [torch.zeros(max(map(len, self.parts))) for _ in range(self.DEPTH // 2 + 1)]

    def __call__(self) -> None:
        torch.stack([part.dot(part) for part in self.parts]).tolist()
        first, second = deque[list[dist.Work]](), deque[list[dist.Work]]()
        for number in range(len(self.parts) + 2 * self.DEPTH):
            if number < len(self.parts):
                first.append(self.move(number, self.parts[number], self.arriving(number), 1))
            if number >= self.DEPTH and first:
                self.wait(first.popleft())
                earlier = number - self.DEPTH
                mean = self.parts[earlier]
                if earlier % 2 == self.me:
                    torch.lerp(self.arriving(earlier), mean, 0.5, out=mean)
                second.append(self.move(earlier + 1, mean, mean, 2))
            if number >= 2 * self.DEPTH and second:
                self.wait(second.popleft())

    def arriving(self, number: int) -> torch.Tensor:
        return self.buffers[number // 2 % len(self.buffers)][: len(self.parts[number])]

    def move(self, turn: int, leaving: torch.Tensor, arriving: torch.Tensor, tag: int) -> list[dist.Work]:
        """Receive in one's turn, else send."""
        if turn % 2 == self.me:
            return start_moves([(arriving, self.peer)], [], self.group, tag)
        return start_moves([], [(leaving, self.peer)], self.group, tag)

    def wait(self, works: list[dist.Work]) -> None:
        for work in works:
            work.wait()


class Packed:
    """Pack all tensors, look at them, swap them with one peer, and write the mean: the same for small tensors."""

    def __init__(self, parts: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        self.group, self.peer = group, dist.get_global_rank(group, 1 - dist.get_rank(group))
        self.parts = [part.view(-1) for part in parts]
        self.own, self.other, self.mean = (torch.zeros(sum(map(len, parts))) for _ in range(3))
        self.memory = [*map(memory_of, self.parts)]
        sizes = [len(part) for part in parts]
        self.packed, self.written = ([*map(memory_of, one.split(sizes))] for one in (self.own, self.mean))

    def __call__(self) -> None:
        copy_memory(self.memory, self.packed)
        self.own.dot(self.own).item()
        for work in start_moves([(self.other, self.peer)], [(self.own, self.peer)], self.group, 1):
            work.wait()
        torch.lerp(self.own, self.other, 0.5, out=self.mean)
        copy_memory(self.written, self.memory)
        increment_version(self.parts)


class Drift:
    """Change the parameters a little before a round, so that a codec has something to write."""

    def __init__(self, model: nn.Module, state: xffl.DistributedState) -> None:
        self.model = model
        self.factor = 1.0 + 1e-3 * (1 + state.topology.cell_of(dist.get_rank()))  # alike on the replicas of a cell

    def __call__(self) -> None:
        for part in local_parts(self.model):
            part.mul_(self.factor)
        self.factor = 1.0 / self.factor


def contenders(
    options: argparse.Namespace, state: xffl.DistributedState
) -> tuple[dict[str, Callable[[], object]], Callable[[], None], int]:
    """Make what is timed, the raw all-reduce first; also what precedes each sample, and the bytes of the raw one."""
    if state.topology.cells == 1:
        raise SystemExit("nothing crosses in one cell; start two or more, as with: xffl exec --federated 1,1")
    model = build(options, state)
    parts = local_parts(model)
    flat = torch.cat([part.reshape(-1) for part in parts]).zero_()
    group = dist.group.WORLD if options.plain or not state.federated_group else state.federated_group[0]
    is_in = options.plain or state.is_sender or not state.is_federated_scaling_setup()
    peers = dist.get_world_size(group)

    def raw() -> None:
        if is_in:
            dist.all_reduce(flat, group=group)

    def by_parameter() -> None:
        for part in local_parts(model) if is_in else ():
            dist.all_reduce(part, group=group)
            part.div_(peers)

    asked = {"form": options.form, "codec": options.codec, "rails": options.rails}
    asked["gradients_reduced_by_caller"] = options.plain
    calls: dict[str, Callable[[], object]] = {"raw all-reduce": raw, "by parameter": by_parameter}
    large = [part for part in parts if part.numel() > LARGEST_TINY]
    if state.topology.cells == 2 and not options.plain:
        least = (lambda: Messages(large, group)) if large else (lambda: Packed(parts, group))
        calls["messages alone"] = least() if is_in else lambda: None
    for kind, atomic in KINDS.items():
        calls[f"round, {kind}"] = xffl.Aggregator(model, state, atomic=atomic, **asked).aggregate
    if options.server is not None:
        calls[options.server] = xffl.Aggregator(model, state, server=options.server, **asked).aggregate
    if options.beside == "torchft":
        calls["torchft's DiLoCo"] = torchft_round(model, state)
    is_still = options.codec == "none" and options.server is None
    return calls, (lambda: None) if is_still else Drift(model, state), flat.nbytes


def torchft_round(model: nn.Module, state: xffl.DistributedState) -> Callable[[], object]:
    """Return a sync of torchft's DiLoCo between the cells, each a replica group; the inner optimizer does not step."""
    from torchft import Manager, ProcessGroupGloo  # the extra elastic
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    address: list[Any] = [None]
    if state.rank == 0:
        torchft_round.server = LighthouseServer(  # type: ignore[attr-defined] - kept as long as the script runs
            bind="127.0.0.1:0", min_replicas=state.topology.cells, join_timeout_ms=10000
        )
        address[0] = f"http://127.0.0.1:{torchft_round.server.address().rpartition(':')[2]}"  # type: ignore[attr-defined]
    dist.broadcast_object_list(address, src=0)
    os.environ["TORCHFT_LIGHTHOUSE"] = address[0]
    parts = local_parts(model)
    copies = nn.ParameterList(nn.Parameter(part.clone()) for part in parts)
    port: list[Any] = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=lambda saved: None,
        state_dict=dict,
        min_replica_size=state.topology.cells,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=port[0].port,
        replica_id=f"cell_{state.rank}",
        hostname="127.0.0.1",
    )
    manager.kept = port  # type: ignore[attr-defined]
    inner = torch.optim.SGD(copies.parameters(), lr=0.0)
    outer = torch.optim.SGD(copies.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    DiLoCo(manager, [copies], inner, outer, sync_every=1, pin_memory=False).__enter__()
    return inner.step


def time_all(options: argparse.Namespace) -> dict[str, Any] | None:
    """Time all contenders, interleaved; rank 0 returns what was found."""
    with xffl.session() as state:
        calls, prepare, nbytes = contenders(options, state)
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for repeat in range(options.repeats + 2):  # a codec's first round is exact, the second makes its buffers
            for name, call in calls.items():
                prepare()
                dist.barrier()
                start = time.perf_counter()
                call()
                seconds = time.perf_counter() - start
                if repeat >= 2:
                    samples[name].append(seconds)
        longest = torch.tensor(list(samples.values()), dtype=torch.float64)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        if state.rank != 0:
            return None
        seconds_by_name = dict(zip(samples, longest.tolist(), strict=True))
        medians = {name: statistics.median(values) for name, values in seconds_by_name.items()}
        table = sys.stderr if options.out == "-" else sys.stdout
        for name, median in medians.items():
            print(f"{name:16s} {1e3 * median:8.1f} ms   {median / medians['raw all-reduce']:5.2f}x", file=table)
        return {
            **circumstances(options, state),
            "raw_bytes": nbytes,
            "seconds": seconds_by_name,
            "ratios": {name: median / medians["raw all-reduce"] for name, median in medians.items()},
        }


def weigh(options: argparse.Namespace) -> dict[str, Any] | None:
    """Measure the memory of one kind of round in this process; rank 0 returns that of the rank that took most."""
    with xffl.session() as state:
        model = build(options, state)
        shard = sum(part.nbytes for part in local_parts(model))
        prepare = Drift(model, state) if options.codec != "none" else lambda: None
        dist.barrier()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed must not pass for the model's
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = resident_bytes("VmRSS")
        asked = {"form": options.form, "codec": options.codec, "rails": options.rails}
        asked["gradients_reduced_by_caller"] = options.plain
        aggregator = xffl.Aggregator(model, state, atomic=KINDS[options.memory], **asked)
        for _ in range(3):
            aggregator.aggregate()
            prepare()
        rise = torch.tensor([resident_bytes("VmHWM") - before, shard])
        dist.all_reduce(rise, op=dist.ReduceOp.MAX)
        found = {**circumstances(options, state), "peak_bytes": int(rise[0]), "shard_bytes": int(rise[1])}
        if state.rank != 0:
            return None
        if options.out != "-":
            show_memory(options.memory, found, sys.stdout)
        return found


def show_memory(kind: str, found: dict[str, Any], file: TextIO) -> None:
    rise, shard = found["peak_bytes"] / MIB, found["shard_bytes"] / MIB
    over = rise - shard * KINDS[kind]
    print(
        f"round, {kind:9s} {rise:8.1f} MiB above {shard:.1f} MiB of shard; without its copy {over:8.1f} MiB", file=file
    )


def weigh_each(options: argparse.Namespace) -> dict[str, Any] | None:
    """Measure each kind of round in processes of their own, which join in this one's stead."""
    found = {}
    for kind in KINDS:
        command = [sys.executable, __file__, *sys.argv[1:], "--memory", kind, "--out", "-"]
        told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | EXACT).stdout
        if told:  # rank 0
            found[kind] = json.loads(told)
            show_memory(kind, found[kind], sys.stderr if options.out == "-" else sys.stdout)
    return {"memory": found} if found else None


def circumstances(options: argparse.Namespace, state: xffl.DistributedState) -> dict[str, Any]:
    """Return what was measured on and with."""
    return {
        "benchmark": "round",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "scheduler": "batch" if os.sched_getscheduler(0) == os.SCHED_BATCH else "other",  # XFFL_SCHED chooses
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "xffl": xffl.__version__},
        "cells": state.topology.sizes,
        "replica_size": state.topology.replica_size,
        "options": {name: value for name, value in vars(options).items() if name != "out"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=157)
    parser.add_argument("--parameters", type=float, default=100e6, help="elements of all tensors")
    parser.add_argument("--elements", type=int, help="elements of each tensor, instead")
    parser.add_argument("--plain", action="store_true", help="every rank holds all of the model, unsharded")
    parser.add_argument("--form", default="auto")
    parser.add_argument("--codec", default="none")
    parser.add_argument("--rails", action="store_true")
    parser.add_argument("--server", help="time rounds with this server optimizer too, such as diloco")
    parser.add_argument("--beside", choices=("torchft",), help="time the sync of another system, too")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--memory", nargs="?", const="each", choices=("each", *KINDS), help="measure memory, not time")
    parser.add_argument("--out", help="write JSON there; - prints it, and the table to standard error")
    options = parser.parse_args()
    if options.out not in (None, "-"):
        try:  # before all the work
            Path(options.out).parent.mkdir(parents=True, exist_ok=True)
            Path(options.out).touch()
        except OSError as wrong:
            parser.error(f"--out {options.out} cannot be written: {wrong}; give another file")
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats} is below 1; give 1 or more")
    if options.memory is None:
        record = time_all(options)
    else:
        record = weigh_each(options) if options.memory == "each" else weigh(options)
    if record is None or options.out is None:
        return
    text = json.dumps(record, indent=2) + "\n"
    if options.out == "-":
        sys.stdout.write(text)
        return
    Path(options.out).write_text(text)


if __name__ == "__main__":
    main()
