"""Cells with a mesh inside: training loops, levels, and what a round cannot take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import xffl
from tests.decoder import Decoder, loss_of, text_batch
from tests.ranks.test_round_mesh import (
    PLAN,
    Mesh,
    check_alike,
    check_mean,
    digests,
    everywhere,
    full,
    make_state,
    train,
)
from tests.rounds import aggregator_of
from tests.worlds import run_world
from xffl.aggregation.federations.hierarchical import Level, Levels, worlds_of
from xffl.distributed.distributed_state import DistributedState
from xffl.topology import Topology


def training(rank: int, world_size: int) -> list[dict[str, str]]:
    """FederatedScaling and levels over a decoder whose cells are tensor parallel."""
    sizes, shape = (2, 2, 2, 2), {"dp_replicate": 1, "tp": 2}
    state = make_state(rank, sizes, shape)
    mesh = Mesh(rank, sizes, shape)
    torch.manual_seed(0)
    model = parallelize_module(Decoder(), mesh.of("tp"), PLAN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # The norms between tensor-parallel layers stay plain: all ranks compute the same gradients of them.
    options = {"gradients_reduced_by_caller": True}
    with xffl.FederatedScaling(model, optimizer, state, every=2, aggregator=options):
        for step in range(3):
            tokens, targets = text_batch(4 * step + mesh.cell, 2, 8)
            loss_of(model(tokens), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    check_alike(full(model))

    levels = Levels(model, state, [Level(), Level(every=2, groups=(2, 2))], **options)
    for turn in range(2):
        train(model, mesh.cell, turn)
        before = everywhere(full(model))
        levels.aggregate()
        if turn == 0:  # the two cells of each facility have met
            first = 4 * (rank // 4)
            told, weights = before[first : first + 4], [1.0, 1.0]
            check_mean(told, full(model), [0, 0, 1, 1], weights)
    check_alike(full(model))
    check_mean(before, full(model), [0, 0, 1, 1, 2, 2, 3, 3], [1.0] * 4)
    levels.close()
    return [digests(full(model))]


def test_training_and_levels() -> None:
    assert run_world(8, training)


def test_replicas_inside_of_stages_do_not_join_to_larger_units() -> None:
    nested = Topology(16, 4, cell_shape={"pp": 2, "dp_replicate": 2})
    with pytest.raises(xffl.ConfigError, match="inside of pp"):
        worlds_of(nested, [(2, 2)], 0)
    joined = Topology(16, 4, cell_shape={"pp": 2, "dp_replicate": 1, "tp": 2})
    (low, first), (high, _) = worlds_of(joined, [(2, 2)], 13)
    assert (low.cell_shape, first) == (joined.cell_shape, 8)
    assert [high.coordinates(rank).shard for rank in range(16)] == [joined.coordinates(r).shard for r in range(16)]
    assert [high.replicas(cell) for cell in (0, 1)] == [2, 2]


def no_federation(rank: int, world_size: int) -> None:
    """The world as one cell of two stages: each stage's replicas agree on their buffers, weights keep every bit."""
    state = DistributedState()
    state.set_global(dist.Backend("gloo"), torch.device("cpu"), "", 0, rank, world_size)
    state.set_hsdp(2, cell_shape={"pp": 2, "dp_replicate": 2})
    assert (state.replica_local_rank, state.replica_rank) == divmod(rank, 2)
    model = nn.Module()
    model.add_module(f"stage{rank // 2}", nn.BatchNorm1d(3))
    for buffer in (one for name, one in model.named_buffers() if name.endswith("running_mean")):
        buffer.fill_(rank)
    weights = digests(dict(model.named_parameters()))
    assert aggregator_of(model, state).aggregate(1.0).bytes_across == 0
    assert digests(dict(model.named_parameters())) == weights
    means = [one for name, one in model.named_buffers() if name.endswith("running_mean")]
    assert [one.tolist() for one in means] == [[2.0 * (rank // 2) + 0.5] * 3]


def test_a_pipeline_without_a_federation() -> None:
    run_world(4, no_federation)


def refusals(rank: int, world_size: int) -> list[str]:
    """What a round over cells with a mesh cannot take; all ranks say the same."""
    sizes, shape = (4, 4), {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "tp": 2}
    plain = make_state(rank, sizes, {"dp_replicate": 4})
    plain.unset_federated_scaling()
    plain.set_federated_scaling(sizes)
    told = []

    def refuse(attempt: Callable[[], object], kind: type[Exception] = xffl.ConfigError) -> None:
        with pytest.raises(kind) as caught:
            attempt()
        told.append(str(caught.value))

    def cut(mesh: DeviceMesh, *placements: Shard | Replicate) -> nn.Module:
        model = nn.Module()
        model.weight = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, placements))
        return model

    def holding(name: str, *shape: int) -> nn.Module:
        model = nn.Module()
        model.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        return model

    mesh = Mesh(rank, sizes, shape)
    grid = mesh.of("dp_shard", "tp")
    refuse(lambda: aggregator_of(cut(grid, Shard(0), Shard(1)), plain))
    plain.unset_federated_scaling()
    wrong = {**shape, "tp": 4} if rank == 3 else shape
    refuse(lambda: make_state(rank, sizes, wrong), xffl.TopologyError)
    refuse(lambda: make_state(rank, sizes, {**shape, "tp": 2} if rank == 3 else {**shape, "dp_shard": 4, "tp": 1}))
    refuse(lambda: make_state(rank, sizes, {"tp": 2}), xffl.TopologyError)
    state = make_state(rank, sizes, shape)
    # Cells with different tp, the same sizes in another order, and other dimensions.
    tall = Mesh(rank, sizes, {"dp_shard": 1, "tp": 4} if rank >= 4 else {"dp_shard": 2, "tp": 2}, names="_tall")
    refuse(lambda: aggregator_of(cut(tall.of("dp_shard", "tp"), Shard(0), Shard(1)), state))
    refuse(lambda: aggregator_of(cut(grid, *((Shard(0), Shard(1)) if rank < 4 else (Shard(1), Shard(0)))), state))
    refuse(lambda: aggregator_of(cut(grid, *((Shard(0), Shard(1)) if rank < 4 else (Replicate(),) * 2)), state))
    # Shards of other ranks, parts that do not make up the whole, stages that say different things.
    over = DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("over",))
    refuse(lambda: aggregator_of(cut(over, Shard(0)), state))
    some = cut(grid, Shard(0), Shard(1))  # collective
    some = some if mesh.at["dp_shard"] else holding("weight", 8, 8)
    refuse(lambda: aggregator_of(some, state))
    refuse(lambda: aggregator_of(holding("weight", 8, 2 + mesh.at["tp"]), state))
    refuse(lambda: aggregator_of(holding(f"layer{mesh.at['tp']}", 8), state, policies={"layer[2]": "local"}))
    refuse(lambda: aggregator_of(holding("weight" if rank != 6 else "bias", 8), state))
    # A pattern may be for the tensors of some shards only.
    aggregator = aggregator_of(holding(f"layer{mesh.at['tp']}", 8), state, policies={"layer1": "local"})
    assert aggregator.aggregate().bytes_across == (32 if rank in (0, 4) else 0)
    aggregator.close()
    return told


def test_what_cannot_be_meant_is_refused_on_all_ranks() -> None:
    told = run_world(8, refusals)
    expected = [
        ["'weight'", "placements", "cell_shape"],
        ["does not divide", "rank 3"],
        ["different arguments of set_federated_scaling", "rank 3", "'dp_shard': 4"],
        ["dp_replicate"],
        ["'weight' differs", "ranks 0, 1, 2, 3", "S(0) 0/2 S(1) 1/2", "cut along axis 1", "ranks 4, 5, 6, 7"],
        ["'weight' differs", "S(1) 0/2 S(0) 1/2"],
        ["'weight' differs", "(8, 8) float32 parameter, average on ranks 4"],
        ["'weight'", "the replica here has ranks"],
        ["'weight' has 64 elements", "parts of 96"],
        ["'weight' is (8, 2) float32 parameter, average on shard 0 and (8, 3)", "names that they have in the whole"],
        ["policies ['layer[2]'] match no tensor"],
        ["'bias' differs", "missing"],
    ]
    assert all(texts == told[0] for texts in told)
    for text, phrases in zip(told[0], expected, strict=True):
        assert all(phrase in text for phrase in phrases), text
