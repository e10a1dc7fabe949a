"""Optimizers of today in cells: sharded steps are those of one process, and killed runs end with equal bits."""

from __future__ import annotations

import importlib
import json
import os
import signal
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import _muon

import xffl
from tests.ranks.test_round import complete, digests, make_state
from tests.worlds import run_world
from xffl.checkpoint import load_checkpoint, save_checkpoint

Optimizers = list[torch.optim.Optimizer]


def net(width: int = 7) -> nn.Module:
    """Give an embedding, matrices that 2 and 4 shards cut unevenly, a norm, and a head of one row."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(11, 6),
        nn.Flatten(),
        nn.Linear(18, width),
        nn.LayerNorm(width),
        nn.Tanh(),
        nn.Linear(width, 5),
        nn.Linear(5, 1),
    )


def muon_and_adamw(model: nn.Module) -> Optimizers:
    """Muon for the matrices between, AdamW for embedding, head, norm and biases, as their authors advise."""
    named = dict(model.named_parameters())
    inner = [name for name, value in named.items() if value.dim() == 2 and name.split(".")[-2] in ("2", "5")]
    rest = [value for name, value in named.items() if name not in inner]
    matrices = [named[name] for name in inner]
    return [torch.optim.Muon(matrices, lr=0.05, weight_decay=0.1), torch.optim.AdamW(rest, lr=0.01)]


def step(model: nn.Module, optimizers: Optimizers, number: int, cell: int = 0) -> None:
    generator = torch.Generator().manual_seed(100 * number + cell)
    tokens = torch.randint(11, (8, 3), generator=generator)
    nn.functional.mse_loss(model(tokens), tokens.float().sum(1, keepdim=True) * (1 + cell)).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def in_fp32(grad: torch.Tensor, coefficients: Any, steps: int, eps: float) -> torch.Tensor:
    """Iterate as torch does, but in fp32: bf16 rounds so much that a wrong sum over shards would not show."""
    a, b, c = coefficients
    x = grad.T if grad.size(0) > grad.size(1) else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.size(0) > grad.size(1) else x


def trained(model: nn.Module, iterate: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    with mock.patch.object(_muon, "_zeropower_via_newtonschulz", iterate):
        optimizers = muon_and_adamw(model)
        for number in range(6):
            step(model, optimizers, number)
    return {name: complete(value).clone() for name, value in model.named_parameters()}


def as_one_process(rank: int, world: int) -> None:
    state = make_state(rank, (world,), None)
    by_torch = _muon._zeropower_via_newtonschulz
    ends = {
        (is_sharded, iterate is in_fp32): trained(
            xffl.shard(net(), state, wrap=[nn.Linear]) if is_sharded else net(), iterate
        )
        for is_sharded in (False, True)
        for iterate in (in_fp32, by_torch)
    }
    for name, whole in ends[False, True].items():
        torch.testing.assert_close(ends[True, True][name], whole, rtol=1e-4, atol=1e-5, msg=name)
    spread = [ends[False, False][name] - whole for name, whole in ends[False, True].items()]
    apart = [ends[True, False][name] - whole for name, whole in ends[False, False].items()]
    assert 0 < torch.cat([one.flatten() for one in spread]).norm() < 0.1
    assert torch.cat([one.flatten() for one in apart]).norm() <= torch.cat([one.flatten() for one in spread]).norm()
    if world == 2:
        model = xffl.shard(nn.Linear(5, 1, bias=False), state)
        model(torch.ones(1, 5)).sum().backward()
        optimizer: torch.optim.Optimizer = torch.optim.Muon(model.parameters())
        with pytest.raises(RuntimeError, match="Sharding propagation failed"):  # as the manual says of torch 2.13
            optimizer.step()


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_muon_on_shards_steps_as_in_one_process(shards: int) -> None:
    run_world(shards, as_one_process)


def schedule_free(model: nn.Module) -> Optimizers:
    optimizer = importlib.import_module("schedulefree").AdamWScheduleFree(model.parameters(), lr=0.02, warmup_steps=3)
    optimizer.train()
    return [optimizer]


def low_bit(model: nn.Module) -> Optimizers:
    """8 bits for all but the second matrix, which has 4."""
    kinds = importlib.import_module("torchao.optim")
    named = dict(model.named_parameters())
    second = [value for name, value in named.items() if name.endswith("5.weight")]
    rest = [value for name, value in named.items() if not name.endswith("5.weight")]
    return [kinds.AdamW8bit(rest, lr=0.01), kinds.AdamW4bit(second, lr=0.01)]


KINDS: dict[str, tuple[Callable[[nn.Module], Optimizers], int, int | None, dict[str, Any]]] = {
    "muon": (muon_and_adamw, 7, None, {"algorithm": "muloco", "moments": "average:exp_avg=2,exp_avg_sq=2"}),
    "schedule-free": (schedule_free, 7, None, {"moments": "average:z=1"}),
    "low bit": (low_bit, 2048, None, {}),
    "adafactor": (lambda model: [torch.optim.Adafactor(model.parameters(), lr=0.05)], 7, 1, {}),
}
"""How optimizers are made, the width of their model, the ranks of a copy of it, and what rounds do."""

PACKAGES = {"schedule-free": "schedulefree", "low bit": "torchao"}

PRESENT = {name: made for name, made in KINDS.items() if find_spec(PACKAGES.get(name, "torch"))}
"""Those whose package is there."""

ROUND_EVERY, SAVED_AFTER, STEPS = 2, 3, 7


def lives(rank: int, world: int, folder: str, first: int) -> dict[str, Any]:
    """Train with each optimizer from the start, save on the way, be killed in the end; or go on from what is saved."""
    torch.compiler.set_stance("force_eager")  # torchao would have its steps compiled
    ends: dict[str, Any] = {}
    for name, (make, width, hsdp, options) in PRESENT.items():
        state = make_state(rank, (2, 2), hsdp)
        model = xffl.shard(net(width), state, wrap=[nn.Linear])
        optimizers = make(model)
        parts = {"model": model} | {f"optimizer {place}": one for place, one in enumerate(optimizers)}
        reports: list[xffl.RoundReport] = []
        scaling = xffl.FederatedScaling(model, optimizers, state, every=ROUND_EVERY, on_round=reports.append, **options)
        with scaling:
            if first:
                load_checkpoint(f"{folder}/{name}", parts, state, own={"rounds": scaling})
            for number in range(first, STEPS):
                step(model, optimizers, number, state.cell)
                if number + 1 == SAVED_AFTER:
                    save_checkpoint(f"{folder}/{name}", parts, state, own={"rounds": scaling})
        bits = digests(model)
        for optimizer in optimizers:
            if hasattr(optimizer, "eval"):
                optimizer.eval()
        states = [value for one in optimizers for state in one.state.values() for value in state.values()]
        kinds = {type(value.to_local() if isinstance(value, DTensor) else value).__name__ for value in states}
        ends[name] = {"bits": bits, "evaluated": digests(model), "states": sorted(kinds)}
        ends[name]["sent"] = [report.bytes_across for report in reports]
    if not first:
        Path(folder, f"{rank}.json").write_text(json.dumps(ends))
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    return ends


def test_a_run_that_was_killed_ends_with_equal_bits(tmp_path: Path) -> None:
    killed = run_world(4, lives, str(tmp_path), 0, mortal=(0, 1, 2, 3))
    assert all("exit code -9" in story for story in killed), killed
    straight = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    again = run_world(4, lives, str(tmp_path), SAVED_AFTER)
    for name in PRESENT:
        first = straight[0][name]
        for what in ("bits", "evaluated"):
            assert all(ended[name][what] == first[what] for ended in straight + again), (name, what)
        assert len(first["sent"]) == 4, "the last round is that of the loop's end"
    if "low bit" in PRESENT:
        assert straight[0]["low bit"]["states"] == ["OptimState4bit", "OptimState8bit", "Tensor"]
    muon = [sum(of_round) for of_round in zip(*(ended["muon"]["sent"] for ended in straight), strict=True)]
    assert muon[0] < muon[1], "the first moments of AdamW are in each second round"
