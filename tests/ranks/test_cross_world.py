"""Group over the ranks of several worlds: who waits is told at once that another rank goes no further."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.ports import free_port
from tests.worlds import run_world
from xffl.distributed.collectives import CrossWorldGroup

DEAD, WAITING, POISONING = range(3)
STAYS_S = 6.0


def poison_behind_a_dead_rank(rank: int, world: int, port: int) -> float:
    if rank == WAITING:
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        assert store.port == port
    group = CrossWorldGroup(f"127.0.0.1:{port}", "g", rank, world, first=0, connect_s=60, timeout_s=30)
    group.all_reduce(torch.ones(1), dist.ReduceOp.SUM)
    if rank == DEAD:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        group.recv([torch.zeros(1)], DEAD if rank == POISONING else POISONING, 1).wait()
    if rank == POISONING:
        group.poison()
        time.sleep(STAYS_S)  # its end would close its connections, too
    return time.monotonic() - start


def prove(rank: int, world: int, port: int) -> list[int]:
    if rank == 0:
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        assert store.port == port
    group = CrossWorldGroup(f"127.0.0.1:{port}", "g", rank, world, first=0, connect_s=60, timeout_s=30)
    unproven = group.unproven(b"another" if rank == 2 else b"the run's", 30)
    group.all_reduce(torch.ones(1), dist.ReduceOp.SUM)  # all have looked
    return unproven


def test_ranks_without_the_runs_token_are_known() -> None:
    assert run_world(3, prove, free_port(), init=False) == [[2], [2], [0, 1]]


def test_a_rank_is_told_of_another_ones_end_also_where_a_third_has_died() -> None:
    """To receive from the dead one fails at once, and closes no connection; so the others waited for their timeout."""
    assert (POISONING + 1) % 3 == DEAD
    _, waited_s, _ = run_world(3, poison_behind_a_dead_rank, free_port(), init=False, mortal={DEAD})
    assert waited_s < STAYS_S - 1
