"""Parameters that FSDP leaves whole: as one process on the same batches, in accumulation, rounds and checkpoints."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import xffl
from tests.ports import free_port
from tests.ranks.test_state import new_state
from tests.ranks.test_strategies_page import shown
from tests.tasks import whole_weights
from tests.worlds import be_launched, run_world
from xffl.checkpoint import load_checkpoint, save_checkpoint
from xffl.distributed import DistributedState
from xffl.parallel import DistributedStrategy

WHOLE = ("scale", "*.shift")


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.shift = nn.Parameter(torch.linspace(-1.0, 1.0, 4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.shift.to(x.dtype)


class Scaled(nn.Module):
    """A scalar, and a layer with two data types: FSDP takes neither."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.layer = Shifted()
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.scale * self.layer(x)))


def _built() -> Scaled:
    torch.manual_seed(3)
    return Scaled()


def _batch(step: int, part: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * step + part))


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def _expected(parts: list[list[int]], steps: int) -> dict[str, torch.Tensor]:
    """Train one process; ``parts`` are those of a step's batches that each rank gets, in order."""
    model = _built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        for part in chain(*parts):
            (_loss(model, _batch(step, part)) / len([*chain(*parts)])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert found[name].dtype == values.dtype
        torch.testing.assert_close(found[name], values, rtol=1e-5, atol=1e-6, msg=name)


def _train(
    state: DistributedState, steps: int, mode: str, cell: list[int], **how: Any
) -> tuple[nn.Module, torch.optim.Optimizer, list[list[int]]]:
    """Train with two micro-batches a step: synchronized at the last, or at each, or not over replicas in the first."""
    model: Any = xffl.shard(_built(), state, keep_whole=WHOLE, **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    mine = cell.index(dist.get_rank())
    parts = [[2 * rank, 2 * rank + 1] for rank in range(len(cell))]
    for step in range(steps):
        for number, part in enumerate(parts[mine]):
            is_last = number == 1
            if mode == "sync last":
                model.set_requires_gradient_sync(is_last)
            elif mode == "replicas last":
                model.set_requires_all_reduce(is_last)
            (_loss(model, _batch(step, part)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, parts


def fsdp_and_rounds(rank: int, world_size: int, folder: str) -> None:
    state = new_state(rank, world_size)
    for hsdp in (None, 2):
        if hsdp is None:
            state.set_fsdp()
        else:
            state.set_hsdp(hsdp)
        for mode in ("sync last", "sync each", *(["replicas last"] if hsdp else [])):
            for how in ({}, {"wrap": [Shifted]}):
                model, optimizer, parts = _train(state, 3, mode, [*range(world_size)], **how)
                _same(whole_weights(model), _expected(parts, 3))
                assert not isinstance(model.scale.grad, torch.Tensor)
        path = f"{folder}/{hsdp}"
        save_checkpoint(path, {"model": model, "optimizer": optimizer}, state)
        again: Any = xffl.shard(Scaled(), state, keep_whole=WHOLE)
        other = torch.optim.AdamW(again.parameters())
        load_checkpoint(path, {"model": again, "optimizer": other}, state)
        for name, values in whole_weights(model).items():
            assert torch.equal(whole_weights(again)[name], values), name
        assert torch.equal(other.state[again.scale]["exp_avg"], optimizer.state[model.scale]["exp_avg"])
        if hsdp is not None:
            state.unset_hsdp()
    state.set_federated_scaling((2, 2))
    cell = [rank // 2 * 2, rank // 2 * 2 + 1]
    model, _, parts = _train(state, 1 + rank // 2, "sync last", cell)  # the cells differ
    before = [_expected(parts, 1), _expected(parts, 2)]
    xffl.Aggregator(model, state).aggregate()
    _same(whole_weights(model), {name: (before[0][name] + before[1][name]) / 2 for name in before[0]})
    state.unset_federated_scaling()


def test_parameters_left_whole_train_as_in_one_process(tmp_path: Path) -> None:
    run_world(4, fsdp_and_rounds, str(tmp_path))


class Branching(nn.Module):
    """The caller chooses what a pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, is_whole: bool) -> dict[str, tuple[torch.Tensor, ...]]:
        y = self.layer(x)
        return {"y": (y * self.scale if is_whole else y,)}


def clipped(rank: int, world_size: int) -> None:
    """The function that the page on strategies shows, for loops without a strategy."""
    kept: dict[str, Any] = {"torch": torch}
    exec(shown("from torch.distributed.tensor import DTensor"), kept)
    state = new_state(rank, world_size)
    for hsdp in (None, 2):
        if hsdp is None:
            state.set_fsdp()
        else:
            state.set_hsdp(hsdp)
        model = xffl.shard(_built(), state, keep_whole=WHOLE)
        plain = _built()
        _loss(model, _batch(0, rank)).backward()
        for part in range(world_size):
            (_loss(plain, _batch(0, part)) / world_size).backward()
        norm = kept["clip_grad_norm"](model, 0.01)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.01).double())
        for name, one in model.named_parameters():
            gradient: Any = one.grad
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            torch.testing.assert_close(whole, plain.get_parameter(name).grad, rtol=1e-5, atol=1e-6)
        if hsdp is not None:
            state.unset_hsdp()


def test_gradients_of_cut_and_whole_parameters_are_clipped_together() -> None:
    run_world(4, clipped)


def unused(rank: int, world_size: int) -> None:
    """The pass that reduces uses other parameters than the one before it."""
    state = new_state(rank, world_size)
    for hsdp, setting in ((None, "set_requires_gradient_sync"), (2, "set_requires_all_reduce")):
        if hsdp is None:
            state.set_fsdp()
        else:
            state.set_hsdp(hsdp)
        torch.manual_seed(3)
        plain = Branching()
        torch.manual_seed(3)
        model: Any = xffl.shard(Branching(), state, keep_whole=["scale"])
        for step in range(2):
            for number, is_whole in enumerate((True, True, False)):
                getattr(model, setting)(number == 2)
                model(_batch(step, 3 * rank + number), is_whole)["y"][0].square().sum().backward()
                for one in range(world_size):
                    (plain(_batch(step, 3 * one + number), is_whole)["y"][0].square().sum() / world_size).backward()
            # The second step adds to the gradients of the first.
            torch.testing.assert_close(model.scale.grad, plain.scale.grad, rtol=1e-5, atol=1e-6)
        getattr(model, setting)(False)
        model(_batch(9, rank), True)["y"][0].square().sum().backward()
        model.zero_grad()
        getattr(model, setting)(True)
        model(_batch(9, rank), False)["y"][0].square().sum().backward()
        assert model.scale.grad is None
        if hsdp is not None:
            state.unset_hsdp()


def test_parameters_unused_in_the_pass_that_reduces_are_reduced_in_it() -> None:
    run_world(4, unused)


def strategies(rank: int, world_size: int, port: int) -> None:
    be_launched(rank, world_size, port)
    distributed = {"strategy": "fsdp", "device": "cpu", "keep_whole": WHOLE}
    config = {"distributed": distributed, "training": {"gradient_accumulation": 2, "batch_size": 6}}
    with DistributedStrategy.from_config(config) as strategy:
        with torch.device("meta"):
            bare = Scaled()

        def fill(module: nn.Module) -> None:
            whole = {"scale": _built().scale, "shift": _built().layer.shift}
            for name, parameter in module.named_parameters(recurse=False):
                if name in whole:
                    parameter.copy_(whole[name])
            if isinstance(module, nn.Linear):
                module.reset_parameters()

        torch.manual_seed(3)
        model: Any = strategy.wrap_model(bare, init_weights=fill)
        first = _built()
        assert torch.equal(model.scale, first.scale) and torch.equal(model.layer.shift, first.layer.shift)
        first.load_state_dict(whole_weights(model))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in strategy.micro_batches([_batch(0, 2 * rank), _batch(0, 2 * rank + 1)], model):
            strategy.backward(_loss(model, x))
        norm = strategy.clip_grad_norm(model, 1e6)
        for part in range(4):
            (_loss(first, _batch(0, part)) / 4).backward()
        for name in ("scale", "layer.shift"):
            torch.testing.assert_close(model.get_parameter(name).grad, first.get_parameter(name).grad)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(first.parameters(), 1e6).to(norm.dtype))
        strategy.step(optimizer)


def test_strategies_leave_parameters_whole() -> None:
    run_world(2, strategies, free_port(), init=False)


def refusals(rank: int, world_size: int) -> None:
    state = new_state(rank, world_size)
    state.set_fsdp()
    hint = r"keep_whole=\['{}'\] \(or all of the model, by hsdp=1\)"
    for names, told in (
        ((), "'scale' is a scalar.*" + hint.format("scale")),
        (("scale",), "'layer.linear.weight' .*" + hint.format("layer.linear.weight")),
        (("sale",), "keep_whole names 'sale', but no parameter of the model is called so"),
        ("scale", "keep_whole must be a list of names of parameters, got 'scale'"),
        ((3,), "keep_whole holds 3"),
    ):
        with pytest.raises(xffl.ConfigError, match=told):
            xffl.shard(_built(), state, keep_whole=names)  # type: ignore[arg-type]
    model: Any = xffl.shard(_built(), state, keep_whole=WHOLE)
    with pytest.raises(xffl.ConfigError, match="scale the loss instead"):
        model.set_gradient_divide_factor(1.0)
    state.set_hsdp(1)
    model = xffl.shard(_built(), state)  # the other remedy
    _loss(model, _batch(0, rank)).backward()
    state.unset_hsdp()
    strategy = DistributedStrategy.from_config(
        {"distributed": {"strategy": "fsdp", "device_parameters": {"tp": 2}, "keep_whole": WHOLE, "device": "cpu"}}
    )
    strategy.setup(new_state(rank, world_size))
    with pytest.raises(xffl.ConfigError, match="is for FSDP and HSDP"):
        strategy.wrap_model(_built())


def test_parameters_that_cannot_be_cut_name_what_to_write() -> None:
    run_world(2, refusals)


def ignored_by_own_fsdp(rank: int, world_size: int) -> None:
    state = new_state(rank, world_size)
    state.set_federated_scaling((2, 1))
    model = Scaled()
    fully_shard(model, mesh=state.fsdp_mesh, ignored_params={model.scale})
    told = r"'scale' is a plain tensor.*xffl\.shard\(model, state, keep_whole=\['scale'\]\)"
    with pytest.raises(xffl.ConfigError, match=told):
        xffl.Aggregator(model, state)
    state.unset_federated_scaling()


def test_scalars_that_an_own_fully_shard_ignores_name_what_to_write() -> None:
    run_world(3, ignored_by_own_fsdp)
