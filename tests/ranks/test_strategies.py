"""Every strategy trains like one process with the whole batch, and its rounds are weighted means."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

import xffl
from tests.decoder import Block, Decoder, loss_of, text_batch
from tests.worlds import run_world
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.parameters import DeviceParameters
from xffl.parallel import DDPConfig, DistributedConfig, DistributedStrategy, StrategyConfig, TrainingConfig

STEPS = 6
FEW = 3
RATE = 1e-3
"""Steps of cases that only compute in another way what another case computes."""
Arguments = dict[str, Any]
T = TypeVar("T")

CASES: dict[str, tuple[int, str, Arguments, Arguments]] = {
    "single": (1, "single", {}, {}),
    "ddp": (2, "ddp", {"dp_replicate": "auto"}, {}),
    "ddp, static": (2, "ddp", {"dp_replicate": 2}, {"ddp": DDPConfig(static_graph=True, bucket_cap_mb=0.01)}),
    "fsdp": (4, "fsdp", {"dp_shard": "auto"}, {}),
    "fsdp, layers": (2, "fsdp", {"dp_shard": 2, "fsdp_forward_prefetch": True}, {"wrap": (Block,)}),
    "fsdp, recomputed": (2, "fsdp", {"dp_shard": 2, "activation_checkpointing": "full"}, {"wrap": (Block,)}),
    "fsdp, selective": (2, "fsdp", {"dp_shard": 2, "activation_checkpointing": "selective"}, {"wrap": (Block,)}),
    "fsdp, kept whole": (2, "fsdp", {"dp_shard": 2, "reshard_after_forward": False}, {"wrap": (Block,)}),
    "fsdp, offloaded": (2, "fsdp", {"dp_shard": 2, "cpu_offload": True}, {"wrap": (Block,)}),
    "hsdp": (4, "hsdp", {"dp_shard": 2, "dp_replicate": "auto"}, {"wrap": (Block,)}),
    "tensor": (2, "fsdp", {"tp": 2}, {}),
    "tensor, whole activations": (2, "fsdp", {"tp": 2, "sequence_parallel": False}, {}),
    "tensor, cut loss": (2, "fsdp", {"tp": 2, "loss_parallel": True}, {}),
    "fsdp and tensor": (4, "fsdp", {"dp_shard": "auto", "tp": 2}, {"wrap": (Block,)}),
    "replicas and tensor": (4, "hsdp", {"dp_replicate": 2, "tp": 2}, {"wrap": (Block,)}),
    "context": (2, "fsdp", {"cp": 2}, {"wrap": (Block,)}),
    "fsdp and context": (4, "fsdp", {"dp_shard": 2, "cp": 2}, {"wrap": (Block,)}),
    "pipeline": (2, "fsdp", {"pp": 2}, {}),
    "pipeline, gpipe": (2, "fsdp", {"pp": 2, "pp_schedule": "gpipe", "pp_micro_batches": 4}, {}),
    "pipeline and fsdp": (4, "fsdp", {"pp": 2, "dp_shard": 2}, {"wrap": (Block,)}),
    "pipeline and ddp": (4, "hsdp", {"pp": 2, "dp_replicate": 2}, {}),
    "pipeline and tensor": (4, "fsdp", {"pp": 2, "tp": 2}, {}),
    "hsdp and tensor": (8, "hsdp", {"dp_replicate": 2, "dp_shard": 2, "tp": 2}, {"wrap": (Block,)}),
    "pipeline, fsdp and tensor": (8, "fsdp", {"pp": 2, "dp_shard": 2, "tp": 2}, {"wrap": (Block,)}),
    "fsdp, uneven cut": (3, "fsdp", {"dp_shard": 3}, {"wrap": (Block,)}),
}


def configure(strategy: str, mesh: Arguments, options: Arguments, **training: Any) -> StrategyConfig:
    return StrategyConfig(
        distributed=DistributedConfig(strategy=strategy, device_parameters=DeviceParameters(**mesh), **options),
        training=TrainingConfig(**training),
    )


def joined(rank: int, world_size: int) -> DistributedState:
    """The state of a world that the test has joined."""
    state = DistributedState()
    state.set_global("gloo", "cpu", None, None, rank, world_size)
    state.set_node(rank, world_size, 0, 1)
    return state


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter by its bare name, whole."""
    found = {}
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found[name.replace("module.", "")] = whole.detach().clone()
    return found


def steps_of(name: str) -> int:
    """How long a case is trained."""
    return FEW if "," in name or " and " in name else STEPS


def train_alone(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with one process and the whole batch, by hand."""
    torch.manual_seed(0)
    model = Decoder(layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    for step in range(steps):
        tokens, targets = text_batch(step, batch=24)
        loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, full_weights(model)


def train(rank: int, world_size: int, name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with a strategy, each rank with its part of the batch."""
    _, strategy_name, mesh, options = CASES[name]
    strategy = DistributedStrategy.from_config(configure(strategy_name, mesh, options))
    strategy.setup(joined(rank, world_size))
    torch.manual_seed(rank)  # only rank 0's weights count
    model = strategy.wrap_model(Decoder(layers=2), loss=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    world = strategy.world
    for step in range(steps_of(name)):
        tokens, targets = (part.chunk(world.dp_size)[world.dp_rank] for part in text_batch(step, batch=24))
        tokens, targets = strategy.split_sequence(tokens, targets)
        loss = strategy.forward_backward(model, tokens, target=targets)
        assert strategy.step(optimizer)
        losses.append(world.all_reduce(loss, "mean", "dp_cp").item())
    weights = full_weights(model)
    strategy.teardown()
    return losses, weights


def each(rank: int, world_size: int, run: Callable[[int, int, str], T], names: list[str]) -> dict[str, T]:
    """Run several cases one after the other in one world."""
    return {name: run(rank, world_size, name) for name in names}


@pytest.mark.parametrize("ranks", sorted({ranks for ranks, *_ in CASES.values()}))
def test_strategies_train_like_one_process(ranks: int) -> None:
    alone = {steps: train_alone(steps) for steps in (FEW, STEPS)}
    assert alone[STEPS][0][-1] < alone[STEPS][0][0] - 0.2
    names = [name for name, case in CASES.items() if case[0] == ranks]
    told = run_world(ranks, each, train, names, timeout_s=240)
    for name in names:
        losses, weights = alone[steps_of(name)]
        assert set().union(*(found[name][1] for found in told)) == set(weights), name
        for found, held in (found[name] for found in told):
            assert max(abs(a - b) for a, b in zip(found, losses, strict=True)) < 1e-5, name
            assert held and max((held[key] - weights[key]).abs().max().item() for key in held) < 1e-5, name


ROUNDS, BETWEEN = 2, 2
WEIGHTS = (1.0, 3.0)
SAME = (
    *("ddp, static", "fsdp, layers", "fsdp, selective", "fsdp, kept whole", "pipeline, gpipe", "tensor, cut loss"),
    *("fsdp", "replicas and tensor", "pipeline and ddp", "pipeline and tensor"),
)
"""Cases whose tensors lie as in another one, or as in test_round_mesh."""
FEDERATED = {name: case for name, case in CASES.items() if case[0] <= 4 and name not in SAME}


def round_batch(cell: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each cell has text of its own."""
    return text_batch(20 * cell + step, batch=24)


def average_alone() -> list[dict[str, torch.Tensor]]:
    """Train two models by hand, and average them from time to time; their weights after each round."""
    torch.manual_seed(0)
    cells = [Decoder(layers=2), Decoder(layers=2)]
    cells[1].load_state_dict(cells[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=5e-4) for model in cells]
    found = []
    for number in range(ROUNDS):
        for cell, (model, optimizer) in enumerate(zip(cells, optimizers, strict=True)):
            for step in range(BETWEEN):
                tokens, targets = round_batch(cell, BETWEEN * number + step)
                loss_of(model(tokens), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            for one, other in zip(*(model.parameters() for model in cells), strict=True):
                mean = (WEIGHTS[0] * one.double() + WEIGHTS[1] * other.double()) / sum(WEIGHTS)
                one.copy_(mean)
                other.copy_(mean)
        found.append(full_weights(cells[0]))
    return found


def federate(rank: int, world_size: int, name: str) -> list[dict[str, torch.Tensor]]:
    """Train two cells with a strategy, and average them from time to time; the weights after each round."""
    size, strategy_name, mesh, options = CASES[name]
    config = configure(strategy_name, mesh, {**options, "federated": (size, size)})
    strategy = DistributedStrategy.from_config(config)
    strategy.setup(joined(rank, world_size))
    world = strategy.world
    torch.manual_seed(rank)
    model = strategy.wrap_model(Decoder(layers=2), loss=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    cell = strategy.state.topology.cell_of(rank)
    aggregator = xffl.Aggregator(model, strategy.state)
    found = []
    for number in range(ROUNDS):
        for step in range(BETWEEN):
            parts = (part.chunk(world.dp_size)[world.dp_rank] for part in round_batch(cell, BETWEEN * number + step))
            tokens, targets = strategy.split_sequence(*parts)
            strategy.forward_backward(model, tokens, target=targets)
            strategy.step(optimizer)
        # A rank's own count: the cells' sums are 1 to 3.
        report = aggregator.aggregate(weight=WEIGHTS[cell] / size)
        assert report.weights == pytest.approx(WEIGHTS)
        found.append(full_weights(model))
    strategy.teardown()
    return found


@pytest.mark.parametrize("ranks", sorted({ranks for ranks, *_ in FEDERATED.values()}))
def test_rounds_of_strategies_are_weighted_means(ranks: int) -> None:
    dense = average_alone()
    names = [name for name, case in FEDERATED.items() if case[0] == ranks]
    told = run_world(2 * ranks, each, federate, names, timeout_s=240)
    for name, (number, weights) in itertools.product(names, enumerate(dense)):
        held = [found[name][number] for found in told]
        assert set().union(*held) == set(weights), name
        for key, values in weights.items():
            holders = [found[key] for found in held if key in found]
            assert (holders[0] - values).abs().max() < 1e-5, (name, key)
            # What two ranks hold is the same to the bit, in the same cell and in the other.
            assert all(torch.equal(holders[0], other) for other in holders[1:]), (name, key)
