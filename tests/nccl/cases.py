"""What ranks do on pretended GPUs: they set up, share a model, and make rounds."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from threading import Thread as RealThread
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn

import xffl
from tests.decoder import Decoder, loss_of, text_batch
from tests.nccl.gpus import BACKEND, guard, pretended_gpu
from tests.nccl.traces import Record
from tests.ports import free_port
from tests.ranks.test_strategies import CASES, configure
from tests.rounds import make_rounds
from tests.worlds import be_launched, run_world
from xffl.aggregation.engine.decision.consensus import RoundBroken, RoundInput
from xffl.aggregation.federations.elastic import ElasticAggregator
from xffl.aggregation.federations.hierarchical import Level, Levels
from xffl.distributed import ElasticParameters
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.session import cleanup_distributed_process_group, setup_distributed_process_group
from xffl.parallel import DistributedStrategy

__all__ = ["elastic_rounds", "isolated_rounds", "rounds", "traces_of", "training"]


def traces_of(
    ranks: int, case: Callable[..., None], *args: Any, timeout_s: float = 120.0, **named: Any
) -> tuple[list[list[Record]], list[str]]:
    """Let ranks, each with a GPU, do something, and return what they have asked for.

    :param ranks: Processes, all on one node.
    :param case: Called on each as ``case(*args, **named)``.
    :return: The traces, by rank, and the races between streams on any of them.
    """
    guard()  # made once, not by each of the ranks
    told = run_world(ranks, _be_rank, free_port(), partial(case, *args, **named), init=False, timeout_s=timeout_s)
    return [trace for trace, _ in told], [
        f"rank {rank}: {race}" for rank, (_, found) in enumerate(told) for race in found
    ]


def _be_rank(rank: int, world_size: int, port: int, case: Callable[[], None]) -> tuple[list[Record], list[str]]:
    be_launched(rank, world_size, port)
    with pretended_gpu(rank, gpus=world_size) as (trace, races):
        case()
        return list(trace), list(dict.fromkeys(races))


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "little":
        return nn.Linear(24, 16)
    if kind == "buffers":
        return nn.Sequential(nn.Linear(24, 16), nn.BatchNorm1d(16), nn.Linear(16, 9))
    return nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 130, bias=False), nn.Linear(130, 33))


def rounds(
    cells: tuple[int, ...],
    hsdp: int | None = None,
    *many: dict[str, Any],
    backend: str = BACKEND,
    link_backend: str | None = None,
    plant: Callable[[], None] | None = None,
) -> None:
    """Set up, and make rounds of each kind: of a model of its own, which is shared first.

    :param cells: Sizes of the federated groups; none for a world that is one cell.
    :param many: Options of aggregators, and of :func:`_make_rounds`; by default plain rounds.
    :param plant: Puts a fault in before anything is shared.
    """
    state = setup_distributed_process_group(
        backend=backend, device="cuda", federated=cells or None, hsdp=hsdp, link_backend=link_backend
    )
    if plant is not None:
        plant()
    for options in many or ({},):
        _make_rounds(state, **options)
    if link_backend is not None:
        check_links(state)
    cleanup_distributed_process_group(state)
    assert not dist.is_initialized()


def check_links(state: DistributedState) -> None:
    """Raise where a group that has NCCL, used or not, crosses cells."""
    for group in c10d._world.pg_map:
        ranks, config = dist.get_process_group_ranks(group), dist.get_backend_config(group)
        cells = {state.topology.cell_of(rank) for rank in ranks}
        assert len(cells) == 1 or "nccl" not in config, f"{group.group_desc} of {ranks}: {config}"


def _make_rounds(
    state: DistributedState,
    *,
    model: str = "plain",
    count: int = 2,
    behind: float | bool = False,
    groups: tuple[int, ...] = (),
    **options: Any,
) -> None:
    """Make rounds.

    :param groups: Cells of each facility, where rounds climb two levels.
    :param behind: Whether they take place behind the next steps: merged with this ``alpha``, or without one.
    """
    weight = None if "privacy" in options else 1.0
    shared = xffl.shard(model_of(model), state)
    if groups:
        levels = [Level(), Level(groups=groups, **options)]
        aggregator: xffl.Aggregator | Levels = Levels(shared, state, levels, bucket_bytes=2**14)
    else:
        aggregator = xffl.Aggregator(shared, state, **{"bucket_bytes": 2**14, "overlap": bool(behind), **options})

    @torch.no_grad()
    def step() -> None:
        for parameter in shared.parameters():
            parameter.mul_(0.9)

    make_rounds(aggregator, step, count, weight, behind)


def training(
    name: str,
    *,
    precision: str | None = None,
    federated: tuple[int, ...] | None = None,
    link_backend: str | None = None,
    steps: int = 1,
) -> None:
    """Train some steps by a strategy, with a round after each.

    :param name: One of the cases of ``tests/ranks/test_strategies.py``.
    """
    _, strategy_name, mesh, options = CASES[name]
    options = {**options, "backend": BACKEND, "device": "cuda", "federated": federated, "link_backend": link_backend}
    with DistributedStrategy.from_config(
        configure(strategy_name, mesh, options, mixed_precision=precision)
    ) as strategy:
        model = strategy.wrap_model(Decoder(layers=mesh.get("pp", 1)), loss=loss_of)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        aggregator = xffl.Aggregator(model, strategy.state)
        for step in range(steps):
            batch = (part.to(strategy.device) for part in text_batch(step))
            tokens, targets = strategy.split_sequence(*batch)
            strategy.forward_backward(model, tokens, target=targets)
            strategy.clip_grad_norm(model, 0.5)
            strategy.step(optimizer)
            aggregator.aggregate(1.0)
        aggregator.close()
        if link_backend is not None:
            check_links(strategy.state)


def elastic_rounds(url: str, ports: tuple[int, int], **options: Any) -> None:
    """Make rounds of two elastic cells of two ranks each; one breaks, and then cell 1 takes the model over again.

    What must answer while rounds go on, such as a cell's heartbeats, runs in threads of its own.

    :param ports: Where the ranks of each cell meet.
    :param options: Of the aggregator.
    """
    cell, rank = divmod(int(os.environ["RANK"]), 2)
    be_launched(rank, 2, ports[cell])
    elastic = ElasticParameters(lighthouse=url, least_cells=2)
    session = xffl.session(cell=cell, cells=2, elastic=elastic, backend=BACKEND, device="cuda", hsdp=1, timeout_s=60)
    with mock.patch.object(threading, "Thread", RealThread), session as state:
        model = xffl.shard(model_of("buffers"), state)
        aggregator = ElasticAggregator(model, state, **options)
        aggregator.join()
        before = aggregator.state_dict()
        _make_elastic_round(aggregator)
        lost = RuntimeError("a connection was lost")
        loses = mock.patch("xffl.aggregation.engine.transport.start_moves", side_effect=lost)
        with loses if (cell, rank) == (1, 0) else nullcontext(), pytest.raises(RoundBroken):
            _make_elastic_round(aggregator)  # without what one cell had to send
        _make_elastic_round(aggregator)
        if cell == 1:
            aggregator.load_state_dict(before)
        _make_elastic_round(aggregator)
        aggregator.close()
        aggregator.give_back_groups()


def isolated_rounds(**options: Any) -> None:
    """Make rounds of two isolated cells of two ranks each.

    :param options: Of the aggregator, and of :func:`_make_rounds`.
    """
    session = xffl.session(federated=(2, 2), isolate=True, backend=BACKEND, device="cuda", hsdp=1, timeout_s=60)
    with mock.patch.object(threading, "Thread", RealThread), session as state:
        _make_rounds(state, **options)


def _make_elastic_round(aggregator: ElasticAggregator) -> None:
    aggregator.open()
    aggregator.participate(RoundInput(1.0))
