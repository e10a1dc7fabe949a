"""What one rank of ``wan.py`` does: join the others from inside its host's namespace, and run contenders when told."""

from __future__ import annotations

import os
import signal
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tcp import connect, swap
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import xffl
from tests.cluster.net.wan_relay import enter_namespace
from xffl.distributed.distributed_state import DistributedState

__all__ = ["CONTENDERS", "LAYER_BYTES", "REPLICA_SIZE", "Seat", "be_rank"]

WIDTH = 1024
LAYER_BYTES = 4 * WIDTH * (WIDTH + 1)
"""The model is a stack of linear layers of this size, in fp32."""

REPLICA_SIZE = 2
MASTER_PORT, RAW_PORT = 29500, 29700
"""Ports of hosts in namespaces, where nobody else is."""

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Seat:
    """Where a rank sits, and what it is to measure.

    :param rank: Its rank.
    :param hosts: The namespace of each rank.
    :param addresses: The address of each rank's host.
    :param layers: Layers of the model.
    :param contenders: Names of :data:`CONTENDERS`.
    """

    rank: int
    hosts: tuple[str, ...]
    addresses: tuple[str, ...]
    layers: int
    contenders: tuple[str, ...]

    def environ(self) -> dict[str, str]:
        """Return what torchrun would set on this rank, and what xffl reads."""
        host = self.hosts[self.rank]
        mates = [rank for rank, other in enumerate(self.hosts) if other == host]
        names = list(dict.fromkeys(self.hosts))
        cell = len(self.hosts) // 2
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(len(self.hosts)),
            "LOCAL_RANK": str(mates.index(self.rank)),
            "LOCAL_WORLD_SIZE": str(len(mates)),
            "GROUP_RANK": str(names.index(host)),
            "GROUP_WORLD_SIZE": str(len(names)),
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(MASTER_PORT + len(self.hosts)),
            "XFFL_FEDERATED": f"{cell},{cell}",
            "XFFL_HSDP": str(REPLICA_SIZE),
            "XFFL_IFNAME": "eth0",
        }


class Contender(NamedTuple):
    """Something to measure: what is done beforehand, in the given repeat, what counts, and what there is to tell."""

    run: Callable[[], object]
    prepare: Callable[[int], object] = lambda repeat: None
    tell: Callable[[], dict[str, Any]] = dict


@dataclass
class Bench:
    """What the contenders of a rank share.

    :param seat: Where the rank sits.
    :param state: The federation.
    :param model: The model, spread by xffl.
    """

    seat: Seat
    state: DistributedState
    model: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self.model = xffl.shard(build(self.seat.layers), self.state, wrap=(nn.Linear,))

    @property
    def shard_bytes(self) -> int:
        return sum(local.nbytes for local in locals_of(self.model))


def build(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def locals_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the part of each parameter that this rank holds."""
    for parameter in model.parameters():
        value = parameter.detach()
        yield value.to_local() if isinstance(value, DTensor) else value


def _raw(bench: Bench) -> Contender:
    """Swap this shard's bytes with the sender of the other cell, over a TCP connection that stays open."""
    here, shard = bench.state.federated_rank, bench.state.replica_local_rank
    assert here is not None and shard is not None, "the session is a federation with HSDP"
    topology = bench.state.topology
    if not topology.coordinates(bench.seat.rank).is_sender:
        dist.barrier()
        return Contender(run=lambda: None)
    connection = connect(
        bench.seat.addresses[topology.sender(1, shard)],
        RAW_PORT + shard,
        listens=here == 1,
        ready=dist.barrier,
        timeout_s=TIMEOUT_S,
    )
    outgoing, incoming = (memoryview(bytearray(os.urandom(bench.shard_bytes))) for _ in range(2))
    return Contender(run=lambda: swap(connection, outgoing, incoming, TIMEOUT_S))


def _round(**options: Any) -> Callable[[Bench], Contender]:
    """Return what makes a contender of an :class:`xffl.Aggregator` with these options."""

    def make(bench: Bench) -> Contender:
        aggregator = xffl.Aggregator(bench.model, bench.state, **options)
        reports: list[xffl.RoundReport] = []

        def train(repeat: int) -> None:
            """Let the cells drift apart, their replicas alike: a codec finds noise to write, as after training."""
            at = bench.state.topology.coordinates(bench.seat.rank)
            noise = torch.Generator().manual_seed(1000 * repeat + 10 * at.cell + at.shard)
            for local in locals_of(bench.model):
                local.add_(torch.randn(local.shape, generator=noise), alpha=1e-3)

        def tell() -> dict[str, Any]:
            report = reports.pop()
            told = {entry.name: getattr(report, entry.name) for entry in fields(report)}
            checksum = 0
            for local in locals_of(bench.model):
                checksum = zlib.crc32(local.numpy(), checksum)
            return told | {"shard": bench.state.replica_local_rank, "checksum": checksum}

        return Contender(run=lambda: reports.append(aggregator.aggregate()), prepare=train, tell=tell)

    return make


def _all_reduce(bench: Bench) -> Contender:
    """Add the whole model up over all ranks, flat: gloo's ring knows nothing of cells."""
    flat = torch.empty(REPLICA_SIZE * bench.shard_bytes // 4)
    return Contender(run=lambda: dist.all_reduce(flat), prepare=lambda repeat: flat.fill_(1.0))


def _every_replica(bench: Bench) -> Contender:
    """Let each rank average its shard with the same rank of the other cell, as if it were the only replica."""
    cell = len(bench.seat.hosts) // 2
    pairs = [dist.new_group([rank, rank + cell]) for rank in range(cell)]
    pair = pairs[bench.seat.rank % cell]
    shard = torch.empty(bench.shard_bytes // 4)
    return Contender(run=lambda: dist.all_reduce(shard, group=pair), prepare=lambda repeat: shard.fill_(1.0))


def _hsdp_step(bench: Bench) -> Contender:
    """Make one optimizer step of plain HSDP over all ranks, with its gradients synchronized over all."""
    replicas = len(bench.seat.hosts) // REPLICA_SIZE
    mesh = init_device_mesh("cpu", (replicas, REPLICA_SIZE), mesh_dim_names=("wan_replica", "wan_shard"))
    model = build(bench.seat.layers)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.ones(1, WIDTH)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Contender(run=step)


CONTENDERS: dict[str, Callable[[Bench], Contender]] = {
    "tcp": _raw,
    "round": _round(),
    "in_place": _round(atomic=False),
    "two_hop": _round(form="two_hop"),
    "rails": _round(rails=True),
    "bf16": _round(codec="bf16"),
    "int8": _round(codec="int8"),
    "int4": _round(codec="int4"),
    "diloco": _round(server="diloco"),
    "all_reduce": _all_reduce,
    "every_replica": _every_replica,
    "hsdp_step": _hsdp_step,
}
"""What can be measured, by name."""


def be_rank(pipe: Connection, seat: Seat) -> None:
    """Be one rank, and do what comes through the pipe until it is ``None``; the answer to all is a value or a failure.

    :param pipe: To ``wan.py``: it says ``("prepare", name, repeat)``, ``("run", name)`` or ``("tell", name)``.
    :param seat: Where this rank sits.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who has started the ranks ends them
    try:
        enter_namespace(seat.hosts[seat.rank])
        os.environ.update(seat.environ())
        torch.set_num_threads(1)
        with xffl.session(backend="gloo", device=torch.device("cpu"), timeout_s=TIMEOUT_S) as state:
            bench = Bench(seat, state)
            contenders = {name: CONTENDERS[name](bench) for name in seat.contenders}
            pipe.send((None, None))
            while (told := pipe.recv()) is not None:
                pipe.send((_do(contenders, *told), None))
    except BaseException:  # noqa: BLE001 - told to the one who has started the ranks
        pipe.send((None, traceback.format_exc()))
    pipe.close()


def _do(contenders: dict[str, Contender], what: str, name: str, repeat: int = 0) -> Any:
    contender = contenders[name]
    if what == "prepare":
        contender.prepare(repeat)
        return None
    if what == "tell":
        return contender.tell()
    start = time.monotonic()  # one clock for all processes of a machine
    contender.run()
    return start, time.monotonic()
