"""Start-up, plan and rounds of one rank of a large world, by xffl's own code, over a recorded store and links."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import xffl
from tests.rounds import aggregator_of
from tests.scale.recorded import BACKEND, RANKS_OF_NODE, Play, RecordedGroup, RecordedStore
from xffl.aggregation.engine.voting.votes import RoundStatus
from xffl.compat.gloo_connections import LAZY_VARIABLE, SHORT_VARIABLE
from xffl.distributed import session
from xffl.distributed.startup import meeting, open_files
from xffl.topology import Topology

__all__ = ["play_rank", "sampled_ranks"]

FEATURES = 64
"""Features of the model that is averaged: counts are wanted, and no payload."""


def play_rank(topology: Topology, rank: int, **options: Any) -> Play:
    """Return what a rank has done: phases ``start``, ``plan``, ``first round``, ``round``, ``end``.

    :param topology: The world.
    :param rank: The rank.
    :param options: Options of the aggregator.
    """
    play = Play(topology, rank)
    with _recorded(play):
        start = play.phase("start")
        start.__enter__()
        with xffl.session(
            federated=topology.sizes,
            hsdp=topology.shards(0) if topology.is_hsdp else None,
            backend=BACKEND,
            device="cpu",
        ) as state:
            start.__exit__(None, None, None)
            model = nn.Linear(FEATURES, 1, bias=False)
            with play.phase("plan"):
                aggregator = aggregator_of(model, state, **options)
            with play.phase("first round"):
                aggregator.aggregate()
            with play.phase("round"):
                aggregator.aggregate()
            end = play.phase("end")
            end.__enter__()
            aggregator.close()
        end.__exit__(None, None, None)
    return play


def sampled_ranks(topology: Topology, most: int = 512) -> list[int]:
    """Return all ranks of a world that is small enough, else rank 0, and of two cells the first, last and a sender."""
    if topology.world_size <= most:
        return list(range(topology.world_size))
    chosen = {0, topology.world_size - 1}
    for cell in (0, topology.cells - 1):
        ranks = topology.federation(cell)
        sender = next(rank for rank in reversed(ranks) if topology.coordinates(rank).is_sender)
        chosen |= {ranks[0], ranks[1 % len(ranks)], ranks[-1], sender}
    return sorted(chosen)


@contextmanager
def _recorded(play: Play) -> Iterator[None]:
    """Make this process the rank that is played: its environment, its store, and its backend."""
    topology, rank = play.topology, play.rank
    of_node = RANKS_OF_NODE if topology.world_size % RANKS_OF_NODE == 0 else topology.world_size
    environment = {
        "RANK": rank,
        "WORLD_SIZE": topology.world_size,
        "LOCAL_RANK": rank % of_node,
        "LOCAL_WORLD_SIZE": of_node,
        "GROUP_RANK": rank // of_node,
        "GROUP_WORLD_SIZE": topology.world_size // of_node,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
    }

    class Connected(RecordedStore):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(play)

    def served(*_: Any, **__: Any) -> Connected:
        return Connected()

    def made(store: dist.Store, number: int, size: int, __: timedelta) -> RecordedGroup:
        return RecordedGroup(
            play,
            store,
            number,
            size,
            is_lazy=os.environ.get(LAZY_VARIABLE) == "1",
            is_short=os.environ.get(SHORT_VARIABLE) == "1",
        )

    packed = RoundStatus.packed

    def noting(status: RoundStatus) -> bytes:
        row = packed(status)
        play.row = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        return row

    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {name: str(value) for name, value in environment.items()}))
        stack.enter_context(_backend(made))
        for name in ("serve_store", "join_store"):
            stack.enter_context(mock.patch.object(meeting, name, served))
        stack.enter_context(mock.patch.object(meeting, "TCPStore", Connected))
        stack.enter_context(mock.patch.object(meeting, "host_identity", return_value=f"node{rank // of_node}"))
        stack.enter_context(mock.patch.object(RoundStatus, "packed", noting))
        for module in (session, open_files):
            stack.enter_context(mock.patch.object(module, "raise_file_limit", return_value=float("inf")))
        yield


@contextmanager
def _backend(make: Callable[..., RecordedGroup]) -> Iterator[None]:
    """Register the backend whose groups ``make`` makes, for the block."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, make, devices=["cpu"])
    plugin = dist.Backend._plugins[BACKEND.upper()]
    with mock.patch.dict(dist.Backend._plugins, {BACKEND.upper(): plugin._replace(creator_fn=make)}):
        yield
