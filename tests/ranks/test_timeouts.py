"""Each level's own timeout at real groups, and the store of the world on the control interface."""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import xffl
from tests.ports import free_port
from tests.ranks.test_session import be_rank
from tests.rounds import aggregator_of
from tests.worlds import run_world
from xffl.cluster.network import Interface, Timeouts, list_interfaces
from xffl.distributed.distributed_state import DistributedState

LEVELS = Timeouts(connect_s=0.5, home_s=1.0, across_s=3.0, session_s=100.0)


def waits(rank: int, world_size: int) -> str:
    """Wait for a rank that does not come: rank 0 in its replica, rank 3 across; the others only stay.

    Return how long the error says that this rank has waited.
    """
    state = DistributedState()
    state.set_global(dist.Backend("gloo"), torch.device("cpu"), "", 0, rank, world_size)
    state._timeouts = LEVELS
    state.set_federated_scaling((2, 2), hsdp=2)
    assert state.hsdp_mesh is not None and state.federated_group is not None
    group = {0: state.hsdp_mesh.get_group("shard"), 3: state.federated_group[0]}.get(rank)
    dist.barrier()
    told = ""
    if group is not None:
        with pytest.raises(RuntimeError, match="[Tt]imed? ?out") as late:
            dist.all_reduce(torch.ones(1), group=group)
        told = ", ".join(re.findall(r"(\d+) ?ms", str(late.value)))
    dist.barrier()
    return told


def test_home_gives_up_before_across() -> None:
    home, _, _, across = run_world(4, waits, timeout_s=60.0)
    assert (home, across) == ("1000", "3000")  # a world's is 30 s


def crosses_slowly(rank: int, world_size: int) -> bool:
    """Take part in a round whose exchange takes longer than ``home_s``, as a replica that waits at home for it."""
    from xffl.aggregation.engine.transport import CrossCellTransport

    state = DistributedState()
    state.set_global(dist.Backend("gloo"), torch.device("cpu"), "", 0, rank, world_size)
    state._timeouts = replace(LEVELS, across_s=40.0)
    state.set_federated_scaling((2, 2), hsdp=1)
    post = CrossCellTransport._post

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(2 * LEVELS.home_s)
        return post(*args, **kwargs)

    model = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(model.weight, float(state.topology.cell_of(rank)))
    aggregator = aggregator_of(model, state)
    CrossCellTransport._post = slow  # type: ignore[method-assign]
    aggregator.aggregate()
    return bool((model.weight == 0.5).all())


def test_replicas_wait_for_an_exchange_that_is_slower_than_home() -> None:
    assert run_world(4, crosses_slowly, timeout_s=60.0) == [True] * 4


def opens(
    rank: int, world_size: int, port: int, address: str, session_s: tuple[float, float], variables: dict[str, str]
) -> Any:
    """Open a session as a rank that a launcher has started; return where the store is, or what was told."""
    be_rank(rank, world_size, port)
    os.environ.update(variables, MASTER_ADDR=address)
    os.environ.pop("GLOO_SOCKET_IFNAME", None)  # which worlds of tests set
    levels = Timeouts(connect_s=5.0, home_s=20.0, across_s=25.0, session_s=session_s[rank])
    try:
        with xffl.session(backend="gloo", device="cpu", timeouts=levels) as state:
            assert dist.group.WORLD is not None and state._timeouts is not None
            store = dist.group.WORLD.get_group_store()
            while hasattr(store, "underlying_store"):
                store = store.underlying_store
            return store.host, state._timeouts.across_s
    except xffl.XfflError as error:
        return str(error)


def open_session(address: str, *session_s: float, **variables: str) -> list[Any]:
    """Open a session in two processes that meet at an address of this host."""
    return run_world(2, opens, free_port(), address, session_s, variables, init=False)


@pytest.fixture
def outside() -> Interface:
    """Return an interface of this host that is not loopback."""
    found = [i for i in list_interfaces() if i.is_up and i.address and not i.is_loopback]
    if not found:
        pytest.skip("this host has no interface but loopback")
    return found[0]


def test_the_store_of_one_host_is_on_loopback_unless_an_interface_is_named(outside: Interface) -> None:
    for variables, expected in (({}, "127.0.0.1"), ({"XFFL_CONTROL_IFNAME": outside.name}, outside.address)):
        assert open_session(str(outside.address), 30.0, 30.0, **variables) == [(expected, 25.0)] * 2


def test_other_levels_and_a_wrong_interface_are_told_on_all_ranks() -> None:
    told = open_session("127.0.0.1", 30.0, 40.0)
    assert all("ranks were given different set-ups" in one for one in told)
    told = open_session("127.0.0.1", 30.0, 30.0, XFFL_CONTROL_IFNAME="none9")
    assert all("XFFL_CONTROL_IFNAME: interface 'none9'" in one and "give one of" in one for one in told)
