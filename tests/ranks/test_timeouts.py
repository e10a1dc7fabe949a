"""Each level's own timeout at real groups, and the store of the world on the control interface."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import xffl
from tests.ports import free_port
from tests.worlds import run_world
from xffl.cluster.network import Timeouts, list_interfaces
from xffl.distributed.distributed_state import DistributedState

ROOT = Path(__file__).resolve().parents[2]
LEVELS = Timeouts(connect_s=0.5, home_s=1.0, across_s=3.0, session_s=100.0)


def waits(rank: int, world_size: int) -> float | None:
    """Wait for a rank that does not come: rank 0 in its replica, rank 3 across; the others only stay."""
    state = DistributedState()
    state.set_global(dist.Backend("gloo"), torch.device("cpu"), "", 0, rank, world_size)
    state._timeouts = LEVELS
    state.set_federated_scaling((2, 2), hsdp=2)
    assert state.hsdp_mesh is not None and state.federated_group is not None
    group = {0: state.hsdp_mesh.get_group("shard"), 3: state.federated_group[0]}.get(rank)
    dist.barrier()
    if group is None:
        time.sleep(4.5)
        return None
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="[Tt]imed? ?out"):
        dist.all_reduce(torch.ones(1), group=group)
    waited = time.monotonic() - started
    time.sleep(max(0.0, 4.5 - waited))
    return waited


def test_home_gives_up_before_across() -> None:
    home, _, _, across = run_world(4, waits, timeout_s=60.0)
    assert 0.9 <= home < 2.9 <= across < 10  # a world's is 30 s


def crosses_slowly(rank: int, world_size: int) -> bool:
    """Take part in a round whose exchange takes longer than ``home_s``, as a replica that waits at home for it."""
    from xffl.aggregation.crossing import Crossing

    state = DistributedState()
    state.set_global(dist.Backend("gloo"), torch.device("cpu"), "", 0, rank, world_size)
    state._timeouts = LEVELS
    state.set_federated_scaling((2, 2), hsdp=1)
    post = Crossing._post

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(2 * LEVELS.home_s)
        return post(*args, **kwargs)

    model = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(model.weight, float(state.topology.cell_of(rank)))
    aggregator = xffl.Aggregator(model, state)
    Crossing._post = slow  # type: ignore[method-assign]
    aggregator.aggregate()
    return bool((model.weight == 0.5).all())


def test_replicas_wait_for_an_exchange_that_is_slower_than_home() -> None:
    assert run_world(4, crosses_slowly, timeout_s=60.0) == [True] * 4


SESSION = """\
import json, sys, torch.distributed as dist, xffl
from xffl.cluster.network import Timeouts
levels = Timeouts(connect_s=5, home_s=20, across_s=25, session_s=float(sys.argv[1]))
with xffl.session(backend="gloo", device="cpu", timeouts=levels) as state:
    store = dist.group.WORLD.get_group_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    print(json.dumps([store.host, state._timeouts.across_s]))
"""


def run_session(address: str, *levels: str, **variables: str) -> list[subprocess.CompletedProcess[str]]:
    """Open a session in two processes that meet at an address of this host."""
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    place |= {"MASTER_ADDR": address, "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SESSION, levels[rank]],
            env={**os.environ, **place, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=100) for rank in ranks]
    return [
        subprocess.CompletedProcess([], rank.returncode, *output) for rank, output in zip(ranks, outputs, strict=True)
    ]


@pytest.fixture
def outside() -> str:
    """Return an address of this host that is not loopback."""
    found = [i.address for i in list_interfaces() if i.is_up and i.address and not i.is_loopback]
    if not found:
        pytest.skip("this host has no interface but loopback")
    return str(found[0])


def test_the_store_is_on_the_control_interface(outside: str) -> None:
    for variables, expected in (({}, outside), ({"XFFL_CONTROL_IFNAME": "lo"}, "127.0.0.1")):
        ranks = run_session(outside, "30", "30", **variables)
        assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr + ranks[1].stderr
        assert [json.loads(rank.stdout) for rank in ranks] == [[expected, 25.0]] * 2


def test_other_levels_and_a_wrong_interface_are_told_on_all_ranks() -> None:
    ranks = run_session("127.0.0.1", "30", "40")
    assert all("ranks were given different set-ups" in rank.stderr for rank in ranks)
    ranks = run_session("127.0.0.1", "30", "30", XFFL_CONTROL_IFNAME="none9")
    assert all("set XFFL_CONTROL_IFNAME to one of" in rank.stderr for rank in ranks)
