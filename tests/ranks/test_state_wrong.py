"""Wrong set-ups: every rank raises the same XfflError within seconds, and its state is as it was.

The cases of a world share it, one after the other: a rank that went on, or raised something else, would leave the
others in a collective that it is not in, so a mistake cannot hide.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks.test_state import CPU, new_state, snapshot
from tests.worlds import run_world
from xffl import errors
from xffl.distributed import DistributedState
from xffl.distributed.distributed_state import take_off_setups
from xffl.errors import ConfigError, StateError, TopologyError, XfflError

Call = Callable[[DistributedState, int], Any]
DEADLINE_S = 10.0


@dataclass(frozen=True)
class Wrong:
    """A call that must fail.

    ``call`` gets the state and the rank; ``before`` puts the state where it must stay.
    """

    name: str
    call: Call
    error: type[XfflError]
    parts: Sequence[str]
    before: Call | None = None


def federate(*args: Any, **kwargs: Any) -> Call:
    return lambda state, rank: state.set_federated_scaling(*args, **kwargs)


def on(ranks: Sequence[int], call: Call, otherwise: Call) -> Call:
    return lambda state, rank: (call if rank in ranks else otherwise)(state, rank)


def global_(**changes: Any) -> Call:
    """A call of set_global that is right but for the changes."""

    def call(state: DistributedState, rank: int) -> None:
        right = {"backend": "gloo", "device_type": CPU, "master_addr": None, "master_port": None}
        state.set_global(**{**right, "rank": rank, "world_size": dist.get_world_size(), **changes})

    return call


def new_and_global(**changes: Any) -> Call:
    return lambda state, rank: global_(**changes)(DistributedState(), rank)


HSDP = lambda state, rank: state.set_hsdp(2)  # noqa: E731 - rows of a table
FSDP = lambda state, rank: state.set_fsdp()  # noqa: E731
CELLS = federate((2, 2))

FOUR: list[Wrong] = [
    # Sizes
    Wrong("sum too large", federate((4, 4)), TopologyError, ["(4, 4) sum to 8", "4 ranks", "give sizes that sum to 4"]),
    Wrong("sum too small", federate((2, 1)), TopologyError, ["(2, 1) sum to 3", "4 ranks"]),
    Wrong("no divisor", federate(3), TopologyError, ["3 does not divide the world of 4"]),
    Wrong("no divisor in a tuple", federate((3,)), TopologyError, ["3 does not divide the world of 4"]),
    Wrong("larger than the world", federate(8), TopologyError, ["8 does not divide the world of 4"]),
    Wrong("zero", federate(0), TopologyError, ["federated size must be a positive integer, got 0"]),
    Wrong("zero cell", federate((4, 0)), TopologyError, ["federated size must be a positive integer, got 0"]),
    Wrong("negative", federate(-2), TopologyError, ["federated size must be a positive integer, got -2"]),
    Wrong(
        "negative that sums", federate((6, -2)), TopologyError, ["federated size must be a positive integer, got -2"]
    ),
    Wrong("empty", federate(()), TopologyError, ["name no cell"]),
    Wrong("None", federate(None), TopologyError, ["None name no cell"]),
    Wrong("string", federate("2;2"), ConfigError, ["federated_group_size is '2;2'; give sizes like 4,4"]),
    Wrong("strings", federate(("2", "2")), TopologyError, ["must be a positive integer, got '2'"]),
    Wrong("floats", federate((2.0, 2.0)), TopologyError, ["must be a positive integer, got 2.0"]),
    Wrong("bool", federate(True), TopologyError, ["must be a positive integer, got True"]),
    Wrong("bools", federate((True, 3)), TopologyError, ["must be a positive integer, got True"]),
    Wrong("nested", federate(((2, 2),)), TopologyError, ["must be a positive integer, got (2, 2)"]),
    Wrong("dict", federate({"a": 2, "b": 2}), TopologyError, ["must be a positive integer, got"]),
    Wrong("array", federate(np.array([2.0, 2.0])), XfflError, []),
    Wrong(
        "array for hsdp", lambda s, r: s.set_hsdp(np.array([2.0])), TopologyError, ["must be a positive integer, got"]
    ),
    # Replicas
    Wrong("hsdp no divisor", federate((2, 2), hsdp=3), TopologyError, ["(hsdp) 3 does not divide cell 0 of 2"]),
    Wrong("hsdp divides one cell", federate((3, 1), hsdp=3), TopologyError, ["(hsdp) 3 does not divide cell 1 of 1"]),
    Wrong("hsdp spans cells", federate((2, 2), hsdp=4), TopologyError, ["(hsdp) 4 does not divide cell 0"]),
    Wrong("hsdp zero", federate((2, 2), hsdp=0), TopologyError, ["(hsdp) must be a positive integer, got 0"]),
    Wrong("hsdp negative", federate((2, 2), hsdp=-1), TopologyError, ["(hsdp) must be a positive integer, got -1"]),
    Wrong("hsdp bool", federate((2, 2), hsdp=True), TopologyError, ["(hsdp) must be a positive integer, got True"]),
    Wrong(
        "hsdp string",
        federate((2, 2), hsdp="two"),
        ConfigError,
        ["hsdp is 'two'; give the ranks that hold one copy of the model"],
    ),
    Wrong("hsdp float", federate((2, 2), hsdp=2.0), TopologyError, ["(hsdp) must be a positive integer, got 2.0"]),
    Wrong("hsdp tuple", federate((2, 2), hsdp=(2,)), TopologyError, ["(hsdp) must be a positive integer, got (2,)"]),
    Wrong("global hsdp no divisor", lambda s, r: s.set_hsdp(3), TopologyError, ["(hsdp) 3 does not divide"]),
    Wrong(
        "global hsdp None",
        lambda s, r: s.set_hsdp(None),
        TopologyError,
        ["(hsdp) must be a positive integer, got None"],
    ),
    Wrong("global hsdp zero", lambda s, r: s.set_hsdp(0), TopologyError, ["(hsdp) must be a positive integer, got 0"]),
    Wrong(
        "global hsdp bool",
        lambda s, r: s.set_hsdp(True),
        TopologyError,
        ["(hsdp) must be a positive integer, got True"],
    ),
    # Ranks that differ
    Wrong(
        "other sizes on some ranks",
        on([0, 1], federate((1, 3)), federate((2, 2))),
        ConfigError,
        ["different arguments of set_federated_scaling", "ranks 0-1: federated sizes (1, 3)", "ranks 2-3: ", "(2, 2)"],
    ),
    Wrong(
        "other hsdp on one rank",
        on([3], federate((2, 2), 1), federate((2, 2), 2)),
        ConfigError,
        ["different arguments of set_federated_scaling", "hsdp=2", "rank 3: ", "hsdp=1", "all ranks the same"],
    ),
    Wrong(
        "no hsdp on one rank", on([1], federate((2, 2)), federate((2, 2), 2)), ConfigError, ["rank 1: ", "hsdp=None"]
    ),
    Wrong(
        "one rank with a bad size",
        on([2], federate((2, 3)), federate((2, 2))),
        TopologyError,
        ["(2, 3) sum to 5", "(rank 2 of 4)"],
    ),
    Wrong(
        "two ranks with different bad sizes",
        on([1], federate("x"), on([3], federate((2, 2), 3), federate((2, 2)))),
        ConfigError,
        ["federated_group_size is 'x'", "(rank 1 of 4)", "rank 3: ", "(hsdp) 3"],
    ),
    Wrong(
        "different calls",
        on([0], HSDP, CELLS),
        ConfigError,
        ["different calls", "rank 0: arguments of set_hsdp: 2", "ranks 1-3: arguments of set_federated_scaling"],
    ),
    Wrong("other global hsdp", lambda s, r: s.set_hsdp(1 + r % 2), ConfigError, ["set_hsdp", "ranks 0, 2: 1"]),
    Wrong(
        "one rank with a mesh",
        lambda s, r: s.set_fsdp(s.fsdp_mesh if r == 0 else None),
        ConfigError,
        ["set_fsdp", "rank 0: a mesh", "ranks 1-3: no mesh"],
        before=FSDP,
    ),
    Wrong(
        "one rank set up already",
        lambda s, r: (s if r else _other(s, r)).set_federated_scaling((2, 2)),
        StateError,
        ["call set_global first", "rank 0 of 4"],
    ),
    # Order
    Wrong("federated twice", CELLS, StateError, ["call unset_federated_scaling() first"], before=CELLS),
    Wrong("other federation", federate((1, 3)), StateError, ["(2, 2)", "unset_federated_scaling()"], before=CELLS),
    Wrong("hsdp in a federation", HSDP, StateError, ["set_hsdp", "unset_federated_scaling()"], before=CELLS),
    Wrong("fsdp in a federation", FSDP, StateError, ["set_fsdp", "unset_federated_scaling()"], before=CELLS),
    Wrong("fsdp with hsdp", FSDP, StateError, ["set_hsdp(2)", "unset_hsdp()"], before=HSDP),
    Wrong("hsdp twice", HSDP, StateError, ["set_hsdp(2)", "unset_hsdp()"], before=HSDP),
    Wrong("federation without hsdp after it", CELLS, StateError, ["set_hsdp(2)", "unset_hsdp()"], before=HSDP),
    Wrong(
        "unset_hsdp in a federation",
        lambda s, r: s.unset_hsdp(),
        StateError,
        ["unset_federated_scaling()"],
        before=federate((2, 2), 2),
    ),
    Wrong("set_global after groups", global_(), StateError, ["set_global comes before set_hsdp"], before=HSDP),
    Wrong("unknown world", lambda s, r: DistributedState().set_fsdp(), StateError, ["call set_global first"]),
    Wrong("partial hsdp twice", lambda s, r: s._partial_hsdp_setup(1), StateError, ["unset_hsdp()"], before=HSDP),
    # The process
    Wrong(
        "rank outside",
        new_and_global(rank=9),
        TopologyError,
        ["rank must be an integer from 0 to 3, got 9; world_size is 4"],
    ),
    Wrong("rank is the size", new_and_global(rank=4), TopologyError, ["rank must be an integer from 0 to 3, got 4"]),
    Wrong("negative rank", new_and_global(rank=-1), TopologyError, ["rank must be an integer from 0 to 3, got -1"]),
    Wrong("rank a bool", new_and_global(rank=True), TopologyError, ["integer from 0 to 3, got True"]),
    Wrong("rank a string", new_and_global(rank="0"), TopologyError, ["integer from 0 to 3, got '0'"]),
    Wrong("no rank", new_and_global(rank=None), TopologyError, ["integer from 0 to 3, got None"]),
    Wrong("empty world", new_and_global(world_size=0), TopologyError, ["world_size must be a positive integer, got 0"]),
    Wrong(
        "negative world",
        new_and_global(world_size=-4),
        TopologyError,
        ["world_size must be a positive integer, got -4"],
    ),
    Wrong(
        "another world", new_and_global(rank=0, world_size=5), TopologyError, ["rank 0 of 5", "was initialized with"]
    ),
    Wrong("unknown backend", new_and_global(backend="glu"), ConfigError, ["'glu' is unknown", "gloo"]),
    Wrong("no backend", new_and_global(backend=None), ConfigError, ["backend must be a name", "got None"]),
    Wrong("unknown device", new_and_global(device_type="gpu"), ConfigError, ["must be a device", "got 'gpu'"]),
    Wrong("meta device", new_and_global(device_type="meta"), ConfigError, ["must be 'cpu' or 'cuda', got 'meta'"]),
    Wrong(
        "bad port",
        new_and_global(master_addr="a", master_port=70000),
        ConfigError,
        ["master_port must be an integer from 0 to 65535, got 70000"],
    ),
    Wrong("port alone", new_and_global(master_port=29511), ConfigError, ["belong together"]),
    Wrong(
        "address a number",
        new_and_global(master_addr=1, master_port=1),
        ConfigError,
        ["master_addr must be a host name or an address, got 1"],
    ),
    Wrong(
        "another master on one rank",
        lambda s, r: new_and_global(master_addr=f"host{r // 3}", master_port=1234)(s, r),
        ConfigError,
        ["different arguments of set_global", "ranks 0-2: ", "host0", "rank 3: ", "host1"],
    ),
    Wrong(
        "local rank outside", lambda s, r: s.set_node(4, 4, 0, 1), TopologyError, ["node_local_rank must be", "got 4"]
    ),
    Wrong(
        "node rank outside",
        lambda s, r: s.set_node(0, 2, 2, 2),
        TopologyError,
        ["node_rank must be", "got 2; node_world_size is 2"],
    ),
    Wrong(
        "empty node",
        lambda s, r: s.set_node(0, 0, 0, 1),
        TopologyError,
        ["node_local_size must be a positive integer, got 0"],
    ),
    Wrong("node too large", lambda s, r: s.set_node(0, 4, 0, 2), TopologyError, ["does not fit the world of 4"]),
    Wrong("one small node", lambda s, r: s.set_node(0, 3, 0, 1), TopologyError, ["does not fit the world of 4"]),
    Wrong("other nodes", lambda s, r: s.set_node(0, 1, 0, 2 + r % 2), ConfigError, ["ranks 0, 2: 2 nodes"]),
    Wrong("a GPU on CPU", lambda s, r: s.set_exec_device(0), ConfigError, ["must be a cpu device, got 'cuda:0'"]),
    Wrong("streams on CPU", lambda s, r: s.set_exec_device(CPU, 2), ConfigError, ["streams 2", "cpu has none"]),
    Wrong(
        "no streams", lambda s, r: s.set_exec_device(CPU, 0), ConfigError, ["streams must be a positive integer, got 0"]
    ),
    Wrong("no device", lambda s, r: s.set_exec_device(None), ConfigError, ["must be a device", "got None"]),
    Wrong("meta as init device", lambda s, r: s.set_init_device("meta"), ConfigError, ["meta_initialization=True"]),
    Wrong(
        "meta no truth",
        lambda s, r: s.set_init_device(None, 1),
        ConfigError,
        ["meta_initialization must be one of True, False, got 1"],
    ),
    # Meshes and steps
    Wrong("no mesh", lambda s, r: s.set_fsdp("shard"), ConfigError, ["mesh must be a DeviceMesh", "got 'shard'"]),
    Wrong(
        "two-dimensional mesh",
        lambda s, r: s.set_fsdp(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))),
        ConfigError,
        ["has 2 dimensions", "call set_hsdp"],
    ),
    Wrong(
        "replicas by hand of another world",
        lambda s, r: s._partial_hsdp_setup_manual(r % 2, 2, r // 2, (3,)),
        TopologyError,
        ["need 6 ranks, but the world has 4"],
    ),
    Wrong(
        "no replicas by hand",
        lambda s, r: s._partial_hsdp_setup_manual(r % 2, 2, r // 2, ()),
        TopologyError,
        ["replica_world_size must be", "got ()"],
    ),
    Wrong(
        "no such cell",
        lambda s, r: s._get_communicating_processes(2),
        TopologyError,
        ["cell must be", "got 2"],
        before=CELLS,
    ),
    Wrong(
        "group of strings", lambda s, r: s.create_process_group("0123", ""), TopologyError, ["must be a tuple of ranks"]
    ),
    Wrong("group outside", lambda s, r: s.create_process_group((0, 4), ""), TopologyError, ["rank must be", "got 4"]),
    Wrong("rank twice", lambda s, r: s.create_process_group((0, 0, 1, 2, 3), ""), TopologyError, ["twice"]),
]

UNEVEN: list[Wrong] = [
    Wrong("sizes of four ranks", federate((2, 2)), TopologyError, ["(2, 2) sum to 4", "6 ranks"]),
    Wrong("hsdp divides one cell", federate((4, 2), 4), TopologyError, ["(hsdp) 4 does not divide cell 1 of 2"]),
    Wrong("hsdp divides the world", federate((4, 2), 3), TopologyError, ["(hsdp) 3 does not divide cell 0 of 4"]),
    Wrong(
        "cells turned round on one rank",
        on([5], federate((2, 4)), federate((4, 2))),
        ConfigError,
        ["ranks 0-4: federated sizes (4, 2)", "rank 5: federated sizes (2, 4)"],
    ),
    Wrong(
        "each rank its own",
        lambda s, r: s.set_federated_scaling([(6,), (5, 1), (4, 2), (3, 3), (2, 4), (1, 5)][r]),
        ConfigError,
        ["rank 0: federated sizes (6,)", "rank 3: federated sizes (3, 3)", "2 other values"],
    ),
]


def _other(state: DistributedState, rank: int) -> DistributedState:
    """A state that was told less than the others'."""
    other = DistributedState()
    other.streams = state.streams
    return other


TABLES = {4: FOUR, 6: UNEVEN}


def try_all(rank: int, world_size: int) -> list[tuple[str, str, float, bool]]:
    told = []
    for row in TABLES[world_size]:
        state = new_state(rank, world_size)
        if row.before is not None:
            row.before(state, rank)
        before = snapshot(state)
        start = time.monotonic()
        try:
            row.call(state, rank)
            what = ("nothing", "no error")
        except XfflError as error:
            what = (type(error).__name__, str(error))
        told.append((*what, time.monotonic() - start, snapshot(state) == before))
        dist.barrier()
        take_off_setups(state, destroys=True)
    # After all this the world is as good as new.
    state = new_state(rank, world_size)
    state.set_federated_scaling((world_size // 2,), 1)
    assert state.federation is not None
    dist.all_reduce(torch.ones(1), group=state.federation)
    return told


@pytest.mark.parametrize("world_size", sorted(TABLES))
def test_wrong_setups(world_size: int) -> None:
    told = run_world(world_size, try_all, timeout_s=200.0)
    assert len(told[0]) == len(TABLES[world_size])
    for number, row in enumerate(TABLES[world_size]):
        answers = {ranks[number][:2] for ranks in told}
        assert len(answers) == 1, (row.name, answers)
        kind, text = answers.pop()
        assert issubclass(getattr(errors, kind, Exception), row.error), (row.name, kind, text)
        for part in row.parts:
            assert part in text, (row.name, part, text)
        assert all(ranks[number][2] < DEADLINE_S for ranks in told), row.name
        assert all(ranks[number][3] for ranks in told), f"{row.name} changed the state"


def test_there_are_enough() -> None:
    names = [row.name for row in FOUR]
    assert len(names) >= 40 and len(set(names)) == len(names)
