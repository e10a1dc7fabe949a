"""The state in real worlds: every field of every rank, collectives over every group, set-ups that come off again."""

from __future__ import annotations

import gc
from dataclasses import fields
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.worlds import run_world
from xffl.cluster.network import Timeouts
from xffl.distributed import DistributedState
from xffl.errors import StateError
from xffl.topology import Topology

CPU = torch.device("cpu")
LAYOUTS: list[tuple[tuple[int, ...], int | None]] = [
    ((2, 2), 2),
    ((4, 2), 2),
    ((2, 4), 1),
    ((4, 2), None),
    ((2, 2), None),
    ((1, 2, 3), None),
]


def new_state(rank: int, world_size: int) -> DistributedState:
    state = DistributedState()
    state.set_global("gloo", CPU, None, None, rank, world_size)
    state.set_node(rank, world_size, 0, 1)
    state.set_exec_device(CPU)
    return state


def snapshot(state: DistributedState) -> dict[str, Any]:
    """All fields, private ones too; groups and meshes by identity."""
    return {f.name: list(v) if isinstance(v := getattr(state, f.name), list) else v for f in fields(state)}


def members(group: dist.ProcessGroup | None) -> list[int] | None:
    return None if group is None else dist.get_process_group_ranks(group)


def oracle(sizes: tuple[int, ...], hsdp: int | None) -> list[dict[str, Any]]:
    """The fields of every rank, by walking over cells, replicas and shards in order (DESIGN.md, section 2)."""
    table: list[dict[str, Any]] = []
    cells: list[list[list[int]]] = []  # cell, replica, shard -> rank
    start = 0
    for size in sizes:
        step = hsdp or size
        cells.append([list(range(k, k + step)) for k in range(start, start + size, step)])
        start += size
    senders = [[cell[s % len(cell)][s] for s in range(len(cell[0]))] for cell in cells]
    alike = len({len(cell[0]) for cell in cells}) == 1
    for c, cell in enumerate(cells):
        everyone = [rank for replica in cell for rank in replica]
        for k, replica in enumerate(cell):
            for s, rank in enumerate(replica):
                sends = senders[c][s] == rank
                across = [row[s] for row in senders] if alike else list(range(start))
                row: dict[str, Any] = {
                    "federated_rank": c,
                    "federated_world_size": len(sizes),
                    "federated_local_rank": everyone.index(rank),
                    "federated_local_size": sizes,
                    "is_sender": sends,
                    "receive_from": None if sends else senders[c][s],
                    "federated_group": across if sends else None,
                    "federation": everyone,
                    "replica_local_rank": s if hsdp else None,
                    "replica_local_size": hsdp,
                    "replica_rank": k if hsdp else None,
                    "replica_world_size": tuple(len(other) for other in cells) if hsdp else None,
                    "replica_group": [other[s] for other in cell] if hsdp else None,
                    "mesh": cell if hsdp else everyone,
                }
                table.append(row)
    return table


def check_fields(state: DistributedState, want: dict[str, Any]) -> None:
    for name, value in want.items():
        if name == "mesh":
            continue
        have = getattr(state, name)
        if name in ("federated_group", "replica_group"):
            assert have is None or len(have) == 1
            have = None if have is None else members(have[0])
        elif name == "federation":
            have = members(have)
        assert have == value, (name, have, value)


def check_collectives(state: DistributedState, want: dict[str, Any]) -> None:
    """A sum over each group is the sum of its ranks; all ranks make the same calls in the same order."""
    groups = {"federation": state.federation}
    for name in ("replica_group", "federated_group"):
        handles = getattr(state, name)
        groups[name] = handles[0] if handles else None
    for name, group in groups.items():
        if group is not None:
            x = torch.tensor([dist.get_rank()])
            dist.all_reduce(x, group=group)
            assert int(x) == sum(want[name]), name


def check_mesh(mesh: DeviceMesh | None, ranks: Any, names: tuple[str, ...]) -> None:
    assert mesh is not None
    assert mesh.mesh.tolist() == ranks
    assert mesh.mesh_dim_names is not None
    assert tuple(map(str, mesh.mesh_dim_names)) == names
    x = torch.ones(1)
    for dim in range(mesh.ndim):
        dist.all_reduce(x, group=mesh.get_group(dim))
    assert int(x) == mesh.size()


def all_layouts(rank: int, world_size: int, layouts: list[tuple[tuple[int, ...], int | None]]) -> str:
    """One world for all layouts of its size: each is set up, checked and taken off."""
    state = new_state(rank, world_size)
    fresh = snapshot(state)
    for turn, (sizes, hsdp) in enumerate(layouts):
        want = oracle(sizes, hsdp)[rank]
        state.set_federated_scaling(list(sizes) if turn % 2 else sizes, hsdp)  # type: ignore[arg-type]
        check_fields(state, want)
        check_collectives(state, want)
        assert (state.is_federated_scaling_setup(), state.is_hsdp_setup()) == (True, hsdp is not None)
        assert state.is_fsdp_setup() == (hsdp is None)
        assert (state.fsdp_mesh is None) == (hsdp is not None) == (state.hsdp_mesh is not None)
        check_mesh(
            state.hsdp_mesh if hsdp else state.fsdp_mesh, want["mesh"], ("replica", "shard") if hsdp else ("shard",)
        )
        assert state.topology == Topology(world_size, sizes, hsdp)
        for cell in range(len(sizes)):
            shards = [row for row in oracle(sizes, hsdp) if row["federated_rank"] == cell and row["is_sender"]]
            assert len(state._get_communicating_processes(cell)) == len(shards)
        assert ("federated_group" in str(state)) == state.is_sender
        dist.barrier()
        state.unset_federated_scaling()
        assert snapshot(state) == fresh
        state.unset_federated_scaling()  # nothing is left to unset
        assert snapshot(state) == fresh
    return "done"


@pytest.mark.parametrize("world_size", [4, 6])
def test_every_field_of_every_rank(world_size: int) -> None:
    layouts = [layout for layout in LAYOUTS if sum(layout[0]) == world_size]
    assert run_world(world_size, all_layouts, layouts * 2) == ["done"] * world_size


def global_setups(rank: int, world_size: int) -> None:
    state = new_state(rank, world_size)
    fresh = snapshot(state)
    assert not state.is_fsdp_setup() and not state.is_hsdp_setup() and state.is_node_setup()
    assert state.topology == Topology(world_size)

    state.set_hsdp(2)
    assert (state.replica_local_rank, state.replica_local_size) == (rank % 2, 2)
    assert (state.replica_rank, state.replica_world_size) == (rank // 2, (2,))
    assert state.is_sender is None and state.federation is None and state.federated_group is None
    assert state.replica_group is not None and members(state.replica_group[0]) == [rank % 2, rank % 2 + 2]
    check_mesh(state.hsdp_mesh, [[0, 1], [2, 3]], ("replica", "shard"))
    assert state.topology == Topology(4, None, 2) and not state.is_federated_scaling_setup()
    assert state._get_communicating_processes(0) == (0, 3)
    state.unset_hsdp()
    assert snapshot(state) == fresh
    state.unset_hsdp()
    assert snapshot(state) == fresh

    state.set_fsdp()
    check_mesh(state.fsdp_mesh, [0, 1, 2, 3], ("shard",))
    plain = snapshot(state)
    state.set_hsdp(2)  # replaces FSDP until it is unset
    assert not state.is_fsdp_setup() and state.is_hsdp_setup()
    hsdp = snapshot(state)
    state.set_federated_scaling(2, hsdp=1)  # replaces the global HSDP
    assert state.replica_world_size == (2, 2) and state.federated_local_size == (2, 2)
    dist.barrier()
    state.unset_federated_scaling()
    assert snapshot(state) == hsdp
    check_mesh(state.hsdp_mesh, [[0, 1], [2, 3]], ("replica", "shard"))  # its groups are alive
    dist.barrier()
    state.unset_hsdp()
    assert snapshot(state) == plain
    state.set_federated_scaling((2, 2))  # replaces FSDP
    assert state.fsdp_mesh is not plain["fsdp_mesh"]
    dist.barrier()
    state.unset_federated_scaling()
    assert snapshot(state) == plain
    check_mesh(state.fsdp_mesh, [0, 1, 2, 3], ("shard",))

    half = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))["inner"]
    state.set_fsdp(half)  # replaces the world's mesh, and its group is gone
    assert state.fsdp_mesh is half and len(state._setups) == 1


def test_global_setups_replace_and_restore() -> None:
    run_world(4, global_setups)


def many_turns(rank: int, world_size: int) -> int:
    """Groups of the same ranks get the same name again; a rank that lags must not meet the addresses of before."""
    state = new_state(rank, world_size)
    for turn in range(6):
        state.set_federated_scaling((2, 2), hsdp=(1, 2)[turn % 2])
        for group in (state.federation, *(state.federated_group or ())):
            dist.all_reduce(torch.ones(1), group=group)
        dist.barrier()
        state.unset_federated_scaling()
    return len(dist.distributed_c10d._world.pg_names)  # type: ignore[attr-defined]


def test_groups_are_destroyed_and_made_again() -> None:
    assert run_world(4, many_turns) == [1] * 4  # the world alone is left


def train(mesh: DeviceMesh, seed: int) -> list[float]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    full = [p.full_tensor().sum().item() for p in model.parameters()]  # type: ignore[attr-defined]
    return losses + full


def join(rank: int, world_size: int, store: str) -> None:
    """Make a world over a file of its own."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
    )


def generations(rank: int, world_size: int, folder: str) -> list[list[float]]:
    """The same layouts over three worlds of one process, after sessions with other groups."""
    found = []
    made: list[DeviceMesh] = []
    for generation in range(3):
        join(rank, world_size, f"{folder}/{generation}")
        state = new_state(rank, world_size)
        if generation == 1:
            state.set_fsdp()  # another number of groups than in the first world
        for hsdp in (None, 2):
            state.set_federated_scaling((4,), hsdp)
            mesh = state.fsdp_mesh or state.hsdp_mesh
            assert mesh is not None and mesh.mesh_dim_names is not None
            assert str(mesh.mesh_dim_names[-1]) == "shard" and mesh not in made
            made.append(mesh)
            found.append(train(mesh, seed=7))
            gc.collect()
            dist.barrier()
            state.unset_federated_scaling()
        dist.barrier()
        dist.destroy_process_group()
        with pytest.raises(StateError, match="not initialized"):
            state.set_federated_scaling((4,))
    return found


def test_meshes_of_later_worlds_train(tmp_path: Any) -> None:
    for found in run_world(4, generations, str(tmp_path), init=False):
        first, *later = [torch.tensor(row) for row in found]
        for row in later:
            torch.testing.assert_close(row, first)


def world_ends_first(rank: int, world_size: int, folder: str) -> None:
    """A world that is destroyed under the state takes its groups along; the state still comes off, and on again."""
    for generation in range(2):
        join(rank, world_size, f"{folder}/{generation}")
        if generation == 0:
            state = new_state(rank, world_size)
            fresh = snapshot(state)
        else:
            state.unset_federated_scaling()
            assert snapshot(state) == fresh
        state.set_federated_scaling((1, 1))
        assert state.federated_group is not None
        dist.all_reduce(torch.ones(1), group=state.federated_group[0])
        dist.barrier()
        dist.destroy_process_group()
        assert "federated_group" in str(state)


def test_a_world_that_ended_first(tmp_path: Any) -> None:
    run_world(2, world_ends_first, str(tmp_path), init=False)


def one_rank_cannot(rank: int, world_size: int) -> str:
    """Groups that cannot be made on one rank leave the state of all ranks as it was."""
    state = new_state(rank, world_size)
    state.set_fsdp()
    before = snapshot(state)
    if rank == 2:

        def broken(ranks: Any, group_desc: Any) -> Any:
            raise OSError("no more sockets")

        state.create_process_group = broken  # type: ignore[method-assign]
    state._timeouts = Timeouts.within(4.0)
    try:
        state.set_federated_scaling((2, 2), 1)
    except StateError as error:
        told = str(error)
    assert snapshot(state) == {**before, "_timeouts": Timeouts.within(4.0)}
    check_mesh(state.fsdp_mesh, [0, 1, 2, 3], ("shard",))  # what stood before still works
    return told


def test_one_rank_that_cannot_make_groups_is_told_to_all() -> None:
    told = run_world(4, one_rank_cannot)
    assert len(set(told)) == 1 and "set_federated_scaling could not make its process groups" in told[0], told
    assert "no more sockets" in told[0] and "rank 2" in told[0]


def partial_steps(rank: int, world_size: int) -> None:
    state = new_state(rank, world_size)
    fresh = snapshot(state)
    state._partial_hsdp_setup(2)
    assert state.is_hsdp_setup() and state.hsdp_mesh is None and state.topology == Topology(4, None, 2)
    mesh = state._set_global_hsdp_mesh()
    check_mesh(mesh, [[0, 1], [2, 3]], ("replica", "shard"))
    dist.barrier()
    state.unset_hsdp()
    assert snapshot(state) == fresh
    state._partial_hsdp_setup_manual(rank % 2, 2, rank // 2, (2,))
    by_hand = snapshot(state)
    state.unset_hsdp()
    state._partial_hsdp_setup(2)
    assert {k: v for k, v in snapshot(state).items() if k != "_setups"} == {
        k: v for k, v in by_hand.items() if k != "_setups"
    }
    state.unset_hsdp()
    check_mesh(state._get_global_fsdp_mesh(), [0, 1, 2, 3], ("shard",))
    assert snapshot(state) == fresh
    pair = (0, 1) if rank < 2 else (2, 3)
    group = state.create_process_group(torch.tensor(pair), None)
    assert members(group) == list(pair)
    x = torch.tensor([rank])
    dist.all_reduce(x, group=group)
    assert int(x) == sum(pair)


def test_steps_by_themselves() -> None:
    run_world(4, partial_steps)
