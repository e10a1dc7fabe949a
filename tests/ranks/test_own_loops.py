"""Helpers of training loops of one's own: accumulation without reductions, and means over a cell."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import xffl
from tests.ranks.test_state import new_state
from tests.worlds import run_world
from xffl.distributed.distributed_state import set_cell_world
from xffl.distributed.several_worlds.cell_world import CellWorld
from xffl.errors import StateError

MICRO_BATCHES = 3
REDUCTIONS = ("gloo:all_reduce", "gloo:allreduce", "gloo:reduce_scatter", "gloo:_reduce_scatter_base")


class Scaled(nn.Module):
    """Layers, and a scalar that FSDP cannot cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.scale * self.layers(x)
        return scaled


def _built(kind: Callable[[], nn.Module] = Scaled) -> Any:
    torch.manual_seed(3)
    return kind()


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def _batch(number: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(number))


def _backward(model: nn.Module, batch: torch.Tensor, share: float) -> int:
    """Run a batch forward and backward, and return how many reductions that has made."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        (model(batch).square().mean() * share).backward()
    return sum(event.name.startswith(REDUCTIONS) for event in profile.events())


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
    return [one.full_tensor() if isinstance(one, DTensor) else one for one in gradients]


def _check_accumulation(model: nn.Module, plain: nn.Module, rank: int, world_size: int) -> None:
    """Compare accumulated gradients with those of one batch, and what the passes reduce with a pass by itself."""
    at_once = _backward(model, _batch(99), 0.0)
    model.zero_grad()
    for step in range(2):
        batches = [_batch(100 * step + number) for number in range(MICRO_BATCHES * world_size)]
        reductions = []
        for index in range(MICRO_BATCHES):
            with nullcontext() if index + 1 == MICRO_BATCHES else xffl.no_sync(model):
                reductions.append(_backward(model, batches[MICRO_BATCHES * rank + index], 1 / MICRO_BATCHES))
        assert reductions == [0, 0, at_once], (reductions, at_once)
        _backward(plain, torch.cat(batches), 1.0)
        pairs = zip(_gradients(model), _gradients(plain), strict=True)
        assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-7) for one, other in pairs)
        model.zero_grad()
        plain.zero_grad()


def _sharded(state: xffl.DistributedState) -> nn.Module:
    model: nn.Module = xffl.shard(_built(), state, wrap=(nn.Linear,), keep_whole=["scale"])
    return model


def _of_two_wrappers() -> nn.Module:
    layers = _built(_layers)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return nn.Sequential(DistributedDataParallel(layers[0]), layers[1], fully_shard(layers[2], mesh=mesh))


def accumulated(rank: int, world_size: int) -> None:
    state = new_state(rank, world_size)
    _check_accumulation(DistributedDataParallel(_built()), _built(), rank, world_size)
    _check_accumulation(_of_two_wrappers(), _built(_layers), rank, world_size)
    state.set_fsdp()
    _check_accumulation(_sharded(state), _built(), rank, world_size)
    state = new_state(rank, world_size)
    state.set_hsdp(2)
    _check_accumulation(_sharded(state), _built(), rank, world_size)

    # Replicas whose gradients the caller leaves apart stay apart behind the block, also after an exception.
    model: Any = _sharded(state)
    at_once = _backward(model, _batch(0), 1.0)
    model.set_requires_all_reduce(False)
    apart = _backward(model, _batch(0), 1.0)
    with pytest.raises(ZeroDivisionError), xffl.no_sync(model), xffl.no_sync(nn.ModuleList([model])):
        1 / 0  # noqa: B018
    assert _backward(model, _batch(0), 1.0) == apart < at_once
    model.set_requires_gradient_sync(True)
    assert _backward(model, _batch(0), 1.0) == at_once
    with xffl.no_sync(model):
        compiled: Any = torch.compile(model, backend="eager")
        assert _backward(compiled, _batch(0), 1.0) == 0

    flat = FullyShardedDataParallel(_built(_layers), device_id=torch.device("cpu"))
    with xffl.no_sync(nn.ModuleDict({"model": flat})):
        assert _backward(flat, _batch(0), 1.0) == 0
    assert _backward(flat, _batch(0), 1.0) == 1
    with xffl.no_sync(_built()):
        pass


def test_accumulated_gradients_are_those_of_one_batch_and_are_reduced_once() -> None:
    run_world(4, accumulated)


def means(rank: int, world_size: int) -> None:
    state = new_state(rank, world_size)
    assert xffl.mean_over_cell(float(rank), state) == 1.5
    set_cell_world(state, CellWorld(1, (2, 4)))
    assert xffl.mean_over_cell(torch.tensor(rank), state).item() == 1.5
    state = new_state(rank, world_size)
    state.set_federated_scaling((3, 1))
    cell, of_cell = state.cell, (0, 1, 2) if rank < 3 else (3,)
    loss = torch.tensor([rank + 0.5, 1.0], requires_grad=True, dtype=torch.bfloat16)
    mean = xffl.mean_over_cell(loss, state)
    assert mean.dtype == torch.bfloat16 and not mean.requires_grad
    assert mean.tolist() == [sum(of_cell) / len(of_cell) + 0.5, 1.0]

    # A rank without tokens has no loss, and does not count.
    weights = [0, 3, 1, 5]
    value = math.nan if rank == 0 else 0.1 * rank
    weighted = xffl.mean_over_cell(value, state, weight=weights[rank])
    expected = (3 * 0.1 + 0.2) / 4 if cell == 0 else 0.1 * 3
    assert weighted == pytest.approx(expected, rel=1e-15)
    everywhere = [torch.zeros(1, dtype=torch.float64) for _ in range(world_size)]
    dist.all_gather(everywhere, torch.tensor([weighted], dtype=torch.float64))
    assert len({everywhere[number].item() for number in of_cell}) == 1
    assert math.isnan(xffl.mean_over_cell(1.0, state, weight=torch.tensor(0)))

    if cell == 0:
        cut = distribute_tensor(torch.arange(3.0), state.fsdp_mesh, [Shard(0)])
        assert xffl.mean_over_cell(cut, state).tolist() == [0.0, 1.0, 2.0]


def test_a_mean_over_a_cell_is_weighted_and_equal_on_its_ranks() -> None:
    run_world(4, means)


def test_a_mean_in_one_process_needs_no_group_and_one_of_several_does() -> None:
    state = xffl.DistributedState()
    state.set_global("gloo", "cpu", None, None, 0, 1)
    assert xffl.mean_over_cell(torch.tensor(3), state).item() == 3.0
    state = xffl.DistributedState()
    state.set_global("gloo", "cpu", "127.0.0.1", 29500, 1, 4)
    with pytest.raises(StateError, match="cell 0 has 4 ranks, but .* has 1; call mean_over_cell"):
        xffl.mean_over_cell(3.0, state)
