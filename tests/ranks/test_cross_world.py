"""Group over the ranks of several worlds: who waits is told at once that another rank goes no further."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.ports import free_port
from tests.worlds import run_world
from xffl.cluster.reaching import find_listener
from xffl.compat.sockets import open_sockets, sockets_opened_since
from xffl.distributed.several_worlds.cross_world import CrossWorldGroup

DEAD, WAITING, POISONING = range(3)
STAYS_S = 20.0


def join(rank: int, world: int, port: int) -> CrossWorldGroup:
    """Make the group when the store is served, which one of its ranks does."""
    find_listener("127.0.0.1", port, 60.0)
    return CrossWorldGroup(f"127.0.0.1:{port}", "g", rank, world, first=0, connect_s=60, timeout_s=30)


def poison_behind_a_dead_rank(rank: int, world: int, port: int) -> float:
    if rank == WAITING:
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        assert store.port == port
    group = join(rank, world, port)
    group.all_reduce(torch.ones(1), dist.ReduceOp.SUM)
    if rank == DEAD:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        group.recv([torch.zeros(1)], DEAD if rank == POISONING else POISONING, 1).wait()
    seconds = time.monotonic() - start
    heard = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=STAYS_S))
    if rank == POISONING:
        group.poison()
        with suppress(RuntimeError):
            heard.wait(["heard"], timedelta(seconds=STAYS_S))  # its end would close its connections, too
    else:
        heard.set("heard", "")
    return seconds


def prove(rank: int, world: int, port: int) -> list[int]:
    if rank == 0:
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        assert store.port == port
    group = join(rank, world, port)
    unproven = group.unproven(b"another" if rank == 2 else b"the run's", 30)
    group.all_reduce(torch.ones(1), dist.ReduceOp.SUM)  # all have looked
    return unproven


def test_ranks_without_the_runs_token_are_known() -> None:
    assert run_world(3, prove, free_port(), init=False) == [[2], [2], [0, 1]]


def test_a_rank_is_told_of_another_ones_end_also_where_a_third_has_died() -> None:
    """To receive from the dead one fails at once, and closes no connection; so the others waited for their timeout."""
    assert (POISONING + 1) % 3 == DEAD
    _, waited_s, _ = run_world(3, poison_behind_a_dead_rank, free_port(), init=False, mortal={DEAD})
    assert waited_s < 0.7 * STAYS_S


def options_of_connections(rank: int, world: int, port: int) -> list[tuple[int, int]]:
    if rank == 0:
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        assert store.port == port
    before = open_sockets()
    group = join(rank, world, port)
    group.all_reduce(torch.ones(1), dist.ReduceOp.SUM)
    found = []
    for descriptor in sockets_opened_since(before):
        with socket.socket(fileno=os.dup(descriptor)) as one:
            if one.type != socket.SOCK_STREAM or one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            if one.getsockname()[1] != port:  # rank 0's store waits for nobody; others may have come to it before
                names = (socket.SOL_SOCKET, socket.SO_KEEPALIVE), (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                found.append((one.getsockopt(*names[0]), one.getsockopt(*names[1])))
    group.all_reduce(torch.ones(1), dist.ReduceOp.SUM)  # all have looked
    return found


def test_connections_find_out_that_a_host_is_gone() -> None:
    """What they do then is seen on network namespaces (tests/cluster/test_partition.py)."""
    for found in run_world(3, options_of_connections, free_port(), init=False):
        assert len(found) == 3 and {*found} == {(1, 10_000)}  # two to the others, and one to the store


def lose_a_rank_in_a_message(rank: int, world: int, port: int) -> float:
    """Rank 0 is killed while it sends, which takes some tenths of a second; the others wait for what it sends."""
    if rank == WAITING:
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        assert store.port == port
    group = join(rank, world, port)
    values = torch.zeros(2**26)
    group.all_reduce(torch.ones(1), dist.ReduceOp.SUM)
    if rank == DEAD:
        works = [group.send([values], other, 1) for other in range(1, world)]
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()
        for work in works:
            work.wait()
        time.sleep(30)
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        group.recv([values], DEAD, 1).wait()
    return time.monotonic() - start


def test_a_rank_that_is_lost_in_a_message_is_not_waited_for() -> None:
    """Gloo ends a wait for a message that has begun only after its time, whatever became of the connection."""
    _, *waited = run_world(3, lose_a_rank_in_a_message, free_port(), init=False, mortal={DEAD})
    assert max(waited) < STAYS_S
