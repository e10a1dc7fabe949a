"""The test harness itself: a failure of one rank is the failure, and nothing hangs."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.worlds import WorldError, fake_world, run_world


def total(rank: int, world_size: int, more: int) -> int:
    x = torch.tensor(rank + more)
    dist.all_reduce(x)
    return int(x)


def tensor(rank: int, world_size: int) -> torch.Tensor:
    return torch.full((2,), rank)


def one_raises(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("only here")
    dist.all_reduce(torch.ones(1))


def one_dies(rank: int, world_size: int) -> str:
    if rank == 1:
        dist.recv(torch.ones(1), src=0)  # rank 0 has made the group by now
        os._exit(17)
    dist.send(torch.ones(1), dst=1)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        return "told"
    return "not told"


def one_waits(rank: int, world_size: int) -> None:
    if rank == 1:
        threading.Event().wait()


def unpicklable(rank: int, world_size: int) -> object:
    return lambda: rank


def test_results_come_by_rank() -> None:
    assert run_world(3, total, 10) == [33, 33, 33]


def test_tensors_come_whole() -> None:
    assert [x.tolist() for x in run_world(2, tensor, init=False)] == [[0, 0], [1, 1]]


def test_the_first_failure_is_the_failure() -> None:
    with pytest.raises(WorldError, match=r"(?s)rank 1 of 3 failed first.*KeyError: 'only here'"):
        run_world(3, one_raises)


def one_dies_silently(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(17)
    dist.all_reduce(torch.ones(1))


def test_a_dead_rank_is_the_failure() -> None:
    with pytest.raises(WorldError, match=r"rank 1 of 2 failed first:\s+the process died with exit code 17"):
        run_world(2, one_dies_silently)


def test_a_rank_may_be_meant_to_die() -> None:
    told, dead = run_world(2, one_dies, mortal=[1])
    assert told == "told" and "exit code 17" in dead


def test_a_late_rank_is_killed() -> None:
    run_world(1, one_waits, init=False)  # the first one of all waits for imports
    start = time.monotonic()
    with pytest.raises(WorldError, match=r"ranks \[1\] of 2 did not end within 4 s"):
        run_world(2, one_waits, timeout_s=4.0, init=False)
    assert time.monotonic() - start < 60


def test_a_result_must_be_picklable() -> None:
    with pytest.raises(WorldError, match="rank"):
        run_world(1, unpicklable)


def test_fake_world_is_large_and_goes_away() -> None:
    with fake_world(4096, 77):
        assert (dist.get_rank(), dist.get_world_size()) == (77, 4096)
    assert not dist.is_initialized()
