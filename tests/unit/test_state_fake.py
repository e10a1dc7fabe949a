"""The state without other processes: chosen ranks of large worlds over a fake group, and what needs no group at all."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import fields
from datetime import timedelta
from queue import Queue

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.worlds import fake_world
from xffl.cluster.environment import ProcessEnvironment
from xffl.compat.gloo_connections import BATCH_VARIABLE
from xffl.distributed import DistributedState, distributed_state
from xffl.distributed.agreement.consistency import ranks_text
from xffl.distributed.distributed_state import create_device_mesh
from xffl.distributed.groups import Gathering, Making, new_group, watched, without_host_side
from xffl.distributed.separate_groups import make_separate_groups
from xffl.distributed.startup.open_files import FileLimit, SessionFiles
from xffl.errors import ConfigError, StateError, TopologyError
from xffl.topology import Topology

CPU = torch.device("cpu")
WORLD = 4096
CELLS = (1024, 2048, 512, 512)
HSDP = 64


def big_state(rank: int, backend: str = "fake") -> DistributedState:
    state = DistributedState()
    state.set_global(backend, CPU, "", 0, rank, WORLD)
    return state


@pytest.mark.parametrize("rank", [0, 1, 63, 64, 1023, 1024, 1089, 3071, 3583, 4095])
def test_ranks_of_4096(rank: int) -> None:
    cell = next(c for c in range(4) if rank < sum(CELLS[: c + 1]))
    start = sum(CELLS[:cell])
    shard, replica, replicas = (rank - start) % HSDP, (rank - start) // HSDP, CELLS[cell] // HSDP
    begin = time.process_time()
    with fake_world(WORLD, rank):
        state = big_state(rank)
        state.set_federated_scaling(CELLS, HSDP)
        assert (state.federated_rank, state.federated_local_rank) == (cell, rank - start)
        assert (state.replica_local_rank, state.replica_rank) == (shard, replica)
        assert state.replica_world_size == (16, 32, 8, 8)
        sender = start + (shard % replicas) * HSDP + shard
        assert state.is_sender == (rank == sender)
        assert state.receive_from == (None if rank == sender else sender)
        assert (state.federated_group is None) == (rank != sender)
        if state.federated_group is not None:
            offsets = (0, 1024, 3072, 3584)
            want = [o + (shard % (size // HSDP)) * HSDP + shard for o, size in zip(offsets, CELLS, strict=True)]
            assert dist.get_process_group_ranks(state.federated_group[0]) == want
        assert state.federation is not None and state.replica_group is not None and state.hsdp_mesh is not None
        assert dist.get_process_group_ranks(state.federation) == list(range(start, start + CELLS[cell]))
        assert dist.get_process_group_ranks(state.replica_group[0]) == list(
            range(start + shard, start + CELLS[cell], HSDP)
        )
        assert tuple(state.hsdp_mesh.shape) == (replicas, HSDP)
        assert state.hsdp_mesh.get_coordinate() == (replica, shard) or state.hsdp_mesh.get_coordinate() == [
            replica,
            shard,
        ]
        assert "federated_group" in str(state) or not state.is_sender
        members = list(range(start + shard, start + CELLS[cell], HSDP))
        rest = "" if replicas == 8 else f" and {replicas - 8} more"
        assert f"ranks ({', '.join(map(str, members[:8]))}{rest}), 1 handle\n" in str(state)
        assert len(str(state).splitlines()) < 40 and max(map(len, str(state).splitlines())) < 200
        state.unset_federated_scaling()
        assert state.federation is None and state.hsdp_mesh is None
    assert time.process_time() - begin < 10


@pytest.mark.parametrize("cells, hsdp", [(2, 64), (64, 16), (512, 8)])
def test_a_rank_of_16384_joins_as_few_groups_and_is_set_up_in_time(cells: int, hsdp: int) -> None:
    world, size = 16384, 16384 // cells
    begin = time.process_time()
    with fake_world(world, 5000):
        state = DistributedState()
        state.set_global("fake", CPU, "", 0, 5000, world)
        state.set_federated_scaling((size,) * cells, hsdp)
        assert len(state._setups[-1].groups) == 4
        assert time.process_time() - begin < 5.0


def test_every_rank_makes_as_many_groups() -> None:
    counts = set()
    for rank in (0, 1, 64, 1089):
        with fake_world(WORLD, rank):
            state = big_state(rank)
            state.set_federated_scaling(CELLS, HSDP)
            counts.add(len(state._setups[-1].groups))
    assert counts == {4}


def test_one_handle_for_each_stream() -> None:
    with fake_world(8, 5):
        state = DistributedState()
        state.set_global("fake", CPU, None, None, 5, 8)
        state.streams = (object(), object(), object())  # type: ignore[assignment]  # no GPU here
        state.set_federated_scaling((4, 4), 2)
        assert state.replica_group is not None and state.federated_group is None
        assert len(state.replica_group) == 3 and len(set(state.replica_group)) == 3
        assert "ranks (5, 7), 3 handles\n" in str(state)
        assert len(state._setups[-1].groups) == 1 + 1 + 3 + 3  # the placeholders of a rank that sends nothing, too
        with pytest.raises(StateError, match="made groups for 3"):
            state.set_exec_device(CPU)


def test_rounds_make_handles_for_the_groups_whose_handles_they_use_in_turn() -> None:
    """With four CUDA streams: seven groups, of which NCCL connects each; of four replica groups it used one."""
    made: list[str] = []

    def create(ranks: tuple[int, ...], name: str) -> dist.ProcessGroup:
        made.append(name)
        return new_group(ranks, 60.0, name)

    with fake_world(8, 4):
        groups = make_separate_groups(create, Topology(8, (4, 4), 2), rank=4, timeout_s=60.0, senders=4)
    assert made == ["xffl_federation", "xffl_replica", "xffl_federated", *["xffl_federated_stream"] * 3]
    assert {kind: len(handles or ()) for kind, handles in groups.items()} == {
        "world": 1,
        "federation": 1,
        "replica": 1,
        "federated": 4,
    }
    made.clear()
    with fake_world(8, 4):  # senders of rails use one group of all ranks
        make_separate_groups(create, Topology(8, (4, 4), 2), rank=4, timeout_s=60.0, senders=0)
    assert made == ["xffl_federation", "xffl_replica"]


def test_further_handles_of_streams_have_no_connections_of_gloo() -> None:
    assert [without_host_side(each) for each in ("nccl", "gloo", "cpu:gloo,cuda:gloo")] == [
        *("nccl", "gloo", "cpu:gloo,cuda:gloo")
    ]
    asked: list[tuple[str, str | None]] = []

    def made(ranks: tuple[int, ...], timeout_s: float, name: str, backend: str | None, **_: object) -> object:
        asked.append((name, backend))
        return dist.new_group(ranks, use_local_synchronization=True)

    with fake_world(8, 5), pytest.MonkeyPatch.context() as patch:
        state = DistributedState()
        state.set_global("fake", CPU, None, None, 5, 8)
        state.streams = (object(), object())  # type: ignore[assignment]  # no GPU here
        patch.setattr(distributed_state, "new_group", made)
        patch.setattr(dist, "get_backend_config", lambda group=None: "cpu:gloo,cuda:nccl")
        state.set_federated_scaling((4, 4), 2)
    assert [name for name, _ in asked if name.endswith("_stream")] == [
        "xffl_replica_stream",
        "xffl_federated_placeholder_stream",
    ]
    assert {given for name, given in asked if name.endswith("_stream")} == {"cuda:nccl"}
    assert {given for name, given in asked if not name.endswith("_stream")} == {None}


def test_further_handles_of_streams_need_no_open_files() -> None:
    place = ProcessEnvironment(rank=1, world_size=64)
    needs = {}
    for streams in (1, 4):
        files = SessionFiles(FileLimit(used=0, most=0), place, store_files=1, waiting_files=4)
        for backend, link_backend in (("cpu:gloo,cuda:nccl", None), ("cpu:gloo,cuda:nccl", "gloo")):
            with pytest.raises(ConfigError, match="open files") as refused:
                files.check_groups((1,) * 64, (None, None), backend=backend, link_backend=link_backend, streams=streams)
            needs[streams, link_backend] = int(str(refused.value).split()[5])
    assert needs[1, None] == needs[4, None] == needs[1, "gloo"] < needs[4, "gloo"]


def test_a_group_that_is_made_after_an_interrupt_is_destroyed() -> None:
    goes_on = threading.Event()
    destroyed: Queue[object] = Queue()

    def interrupt(making: object, seconds: float) -> bool:
        raise KeyboardInterrupt

    with fake_world(2, 0), pytest.MonkeyPatch.context() as patch:
        group = dist.group.WORLD
        patch.setattr(dist, "destroy_process_group", destroyed.put)
        patch.setattr(Making, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            watched(lambda: group if goes_on.wait(30) else None, Gathering(dist.HashStore(), "here", 2, 30.0))
        assert destroyed.empty()
        goes_on.set()
        assert destroyed.get(timeout=30) is group


def test_threads_make_groups_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own name, timeout of the store and variables; what others make with torch meanwhile has its name."""
    monkeypatch.delenv(BATCH_VARIABLE, raising=False)
    store = dist.HashStore()
    begun: Queue[str] = Queue()
    goes_on = {name: threading.Event() for name in ("first", "second", "third")}
    seen: dict[str, list[tuple[str, timedelta, bool]]] = {name: [] for name in goes_on}

    def make(ranks: list[int], *, group_desc: str, **_: object) -> object:
        begun.put(group_desc)
        for _ in range(2):
            name = distributed_c10d._process_group_name(ranks, use_hashed_name=True)
            seen[group_desc].append((name, store.timeout, BATCH_VARIABLE in os.environ))
            assert goes_on[group_desc].wait(30)
        return dist.group.WORLD

    def start(desc: str, timeout_s: float) -> threading.Thread:
        thread = threading.Thread(target=new_group, args=([0, 1], timeout_s, desc, "gloo"), daemon=True)
        thread.start()
        return thread

    with fake_world(2, 0):
        monkeypatch.setattr(dist, "new_group", make)
        monkeypatch.setattr(type(dist.group.WORLD), "get_group_store", lambda group: store)
        usual = store.timeout
        threads = [start("first", 20.0)]
        assert begun.get(timeout=30) == "first"
        for desc, timeout_s in (("second", 5.0), ("third", 10.0)):
            threads.append(start(desc, timeout_s))
            time.sleep(0.05)
        assert distributed_c10d._process_group_name([0], use_hashed_name=True) != seen["first"][0][0]
        assert begun.empty()
        for name, thread in zip(goes_on, threads, strict=True):
            goes_on[name].set()
            thread.join(30)
    assert [begun.get(timeout=1) for _ in range(2)] == ["second", "third"]
    assert [times for [(_, times, _), _] in seen.values()] == [timedelta(seconds=each) for each in (20, 5, 10)]
    assert all(before == after and after[2] for before, after in seen.values()), seen
    assert len({name for [(name, _, _), _] in seen.values()}) == 3
    assert store.timeout == usual and BATCH_VARIABLE not in os.environ


def test_a_new_state_says_nothing() -> None:
    state = DistributedState()
    assert all(getattr(state, f.name) is None for f in fields(state) if not f.name.startswith("_"))
    assert not state.is_node_setup() and not state.is_fsdp_setup() and not state.is_hsdp_setup()
    assert not state.is_federated_scaling_setup()
    assert str(state) == "DistributedState: nothing is set"
    with pytest.raises(StateError, match="call set_global first"):
        _ = state.topology
    with pytest.raises(StateError, match="call set_global first"):
        state._get_communicating_processes(0)
    with pytest.raises(StateError, match="set_federated_scaling first"):
        state._set_rank_role()


def test_without_a_process_group() -> None:
    state = big_state(7, backend="gloo")
    assert state._get_global_fsdp_mesh() is None and state._set_global_hsdp_mesh() is None
    for call in (state.set_fsdp, lambda: state.set_hsdp(2), lambda: state.set_federated_scaling(CELLS)):
        with pytest.raises(StateError, match="torch.distributed is not initialized"):
            call()
    with pytest.raises(StateError, match="torch.distributed is not initialized"):
        state.create_process_group((7,), None)
    state._partial_hsdp_setup(HSDP)
    assert state.is_hsdp_setup() and state.replica_world_size == (64,) and state._set_global_hsdp_mesh() is None
    state.unset_hsdp()
    assert not state.is_hsdp_setup() and not state._setups


def test_steps_of_a_federation_are_no_calls_of_their_own() -> None:
    with fake_world(8, 5):
        state = DistributedState()
        state.set_global("fake", CPU, None, None, 5, 8)
        for step in (state._set_symmetric_federated_scaling, state._set_asymmetric_federated_scaling):
            with pytest.raises(StateError, match="step of set_federated_scaling"):
                step((4, 4))


def test_exec_device_on_a_cpu_build() -> None:
    state = DistributedState()
    state.set_exec_device(CPU)
    assert state.current_device == CPU and state.streams is None
    with pytest.raises(ConfigError, match="streams 4 were asked for, but cpu has none"):
        state.set_exec_device(CPU, streams=4)
    with pytest.raises(ConfigError, match=r"torch sees \d+ GPUs"):
        state.set_exec_device(999)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_exec_device_on_a_gpu() -> None:
    state = DistributedState()
    state.set_exec_device(torch.device("cuda", 0))
    assert state.streams is not None and len(state.streams) == 4
    state.set_exec_device(0, streams=2)
    assert state.current_device == torch.device("cuda", 0) and len(state.streams or ()) == 2


def test_init_device() -> None:
    state = DistributedState()
    state.set_init_device(None)
    assert (state.init_device, state.meta_initialization) == (None, False)
    state.set_init_device(None, True)
    assert (state.init_device, state.meta_initialization) == (torch.device("meta"), True)
    state.set_init_device(CPU, True)  # rank 0 of a model whose other ranks use the meta device
    assert (state.init_device, state.meta_initialization) == (CPU, True)
    with pytest.raises(ConfigError, match="meta_initialization=True"):
        state.set_init_device(torch.device("meta"))


def test_uneven_nodes() -> None:
    state = DistributedState()
    state.set_node(2, 3, 0, 2)  # 3 ranks here, 1 elsewhere
    assert state.is_node_setup()
    state.set_global("gloo", "cpu", "localhost", 29511, 2, 4)
    with pytest.raises(TopologyError, match="a node of 3 ranks among 3 nodes does not fit the world of 4"):
        state.set_node(2, 3, 0, 3)
    assert (state.node_local_size, state.node_world_size) == (3, 2)
    with pytest.raises(TopologyError, match="a node of 3 ranks"):
        state.set_global("gloo", "cpu", "localhost", 29511, 0, 3)
    assert state.world_size == 4


def test_device_mesh_of_ranks() -> None:
    assert create_device_mesh((2, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert create_device_mesh((4,)).tolist() == [0, 1, 2, 3]
    for wrong in ((), (0, 2), (2, -1), (True, 2), "22", 4, None, (2.0,)):
        with pytest.raises(TopologyError):
            create_device_mesh(wrong)  # type: ignore[arg-type]


def test_ranks_text() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([3, 0, 1, 2]) == "ranks 0-3"
    assert ranks_text([7, 0, 1, 4, 5, 6]) == "ranks 0-1, 4-7"
    assert ranks_text([0, 2]) == "ranks 0, 2"
