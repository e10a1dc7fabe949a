"""Quantized models that are spread train like whole ones in one process, and take part in rounds and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import xffl
from tests.decoder import Block, Decoder, text_batch
from tests.ranks.test_strategies import full_weights, joined
from tests.unit.test_quantize import KINDS, trainer_of
from tests.worlds import run_world
from xffl.distributed.parameters import DeviceParameters
from xffl.errors import ConfigError
from xffl.parallel import DistributedConfig
from xffl.training.mixins import quantize

STEPS = 3
ALONE = DistributedConfig(strategy="single", device="cpu")
FSDP = DistributedConfig(strategy="fsdp", wrap=(Block,), device="cpu")
DDP = DistributedConfig(strategy="ddp", device="cpu")
TENSOR = DistributedConfig(strategy="fsdp", device_parameters=DeviceParameters(tp=2, dp_shard=1), device="cpu")
CELLS = DistributedConfig(strategy="fsdp", federated=(1, 1), device="cpu")
Found = dict[str, Any]


def make() -> Decoder:
    return Decoder(layers=1)


@contextmanager
def set_up(kind: str | None, spread: DistributedConfig) -> Iterator[Any]:
    """Make a trainer's model on the meta device, quantize and spread it."""
    trainer = trainer_of(make, kind, distributed=spread, configures=False)
    trainer.strategy.setup(joined(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None)
    try:
        trainer.configure()
        trainer.setup()
        trainer.apply_quantization()
        yield trainer
    finally:
        trainer.strategy.teardown()


def train(kind: str | None, spread: DistributedConfig, *, is_cut: bool = False, folder: Path | None = None) -> Found:
    """Train a few steps: every rank with the whole batch, or with its part of it."""
    with set_up(kind, spread) as trainer:
        model, world, losses = trainer.model, trainer.world, []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        start = full_weights(model)
        for step in range(STEPS):
            tokens, targets = (part.chunk(2)[world.dp_rank] if is_cut else part for part in text_batch(step))
            loss = trainer.strategy.forward_backward(model, tokens, target=targets)
            trainer.strategy.step(optimizer)
            losses.append(world.all_reduce(loss, "mean", "dp_cp").item())
        if folder is not None:
            trainer.strategy.save_checkpoint(folder, model, optimizer)
        classes = [type(module).__name__ for module in model.modules()]
        return {"losses": losses, "start": start, "weights": full_weights(model), "classes": classes}


def run(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in KINDS:
        found[kind] = {
            "fsdp": train(kind, FSDP, folder=folder / kind),
            "fsdp, cut": train(kind, FSDP, is_cut=True),
            "ddp": train(kind, DDP),
            "tensor": train(kind, TENSOR),
        }
        check_rounds(kind)
    check_wholes()
    return {**found, "told": differ(rank, world_size)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """What each rank of one world has found."""
    return run_world(2, run, folder)


def check_rounds(kind: str) -> None:
    """Two cells train on text of their own; after a round both have the mean of their weights."""
    with set_up(kind, CELLS) as trainer:
        tokens, targets = text_batch(dist.get_rank())
        trainer.strategy.forward_backward(trainer.model, tokens, target=targets)
        trainer.strategy.step(torch.optim.SGD(trainer.model.parameters(), lr=0.3))
        mine = full_weights(trainer.model)
        xffl.Aggregator(trainer.model, trainer.strategy.state).aggregate(1.0)
        for name, weight in full_weights(trainer.model).items():
            both = [torch.empty_like(weight) for _ in range(2)]
            dist.all_gather(both, mine[name])
            assert not both[0].equal(both[1]), name
            assert (weight - (both[0] + both[1]) / 2).abs().max() <= 1e-6 * weight.abs().max(), name


def distance(one: Found, other: Found) -> float:
    return max((one["weights"][name] - other["weights"][name]).abs().max().item() for name in one["weights"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_spread_model_trains_like_a_whole_one(kind: str, ranks: list[dict[str, Any]], folder: Path) -> None:
    """With one process as the oracle; a value between two steps of rounding may go to either one."""
    plain, alone = train(None, ALONE), train(kind, ALONE)
    moved = distance(plain, alone)
    apart = max(abs(a - b) for a, b in zip(plain["losses"], alone["losses"], strict=True))
    assert 1e-4 < apart < 0.01 and moved > 1e-4
    assert alone["losses"][-1] < alone["losses"][0] - 0.05
    for told in (found[kind] for found in ranks):
        for name, found in told.items():
            layers = {"int8": "Int8Linear", "fp8": "Float8Linear"}[kind]
            assert found["classes"].count(layers) == 7 and found["classes"].count("Linear") == 1, name
            assert list(found["start"]) == list(plain["start"]), name
            assert all(values.equal(plain["start"][key]) for key, values in found["start"].items()), name
            # A rank's part of a batch has a scale of its own in fp8, and other roundings.
            is_exact = name in ("fsdp", "ddp") or (name == "tensor" and kind == "fp8")
            assert distance(found, alone) < (1e-6 if is_exact else moved), name
            for a, b in zip(found["losses"], alone["losses"], strict=True):
                assert abs(a - b) < (1e-6 if is_exact else apart), name
            if (kind, name) == ("int8", "fsdp, cut"):
                assert abs(found["losses"][0] - alone["losses"][0]) < 1e-6
    with set_up(None, ALONE) as trainer:
        optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.3)
        trainer.strategy.load_checkpoint(folder / kind, trainer.model, optimizer)
        assert all(weight.equal(told["fsdp"]["weights"][name]) for name, weight in full_weights(trainer.model).items())


def check_wholes() -> None:
    """Rounding a tensor that is cut over ranks gives what rounding all of it gives."""
    torch.manual_seed(0)
    values = torch.randn(6, 8, requires_grad=True)
    rounded = quantize._rounded(values)
    for dim in (0, 1):
        cut = distribute_tensor(values, init_device_mesh("cpu", (2,)), [Shard(dim)])
        assert quantize._rounded(cut).full_tensor().equal(rounded)


def differ(rank: int, world_size: int) -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    trainer = trainer_of(model, "int8", exclude=(str(rank),), distributed=DDP, configures=False)
    trainer.strategy.setup(joined(rank, world_size))
    with pytest.raises(ConfigError) as raised:
        trainer.configure()
    with pytest.raises(ConfigError, match=r"'2' matches no linear layer.*\(rank 1 of 2\)"):
        trainer_of(model, "int8", exclude=(str(rank + 1),), distributed=DDP)
    assert [type(layer) is nn.Linear for layer in model] == [True, True]
    trainer.strategy.teardown()
    return str(raised.value)


def test_all_ranks_decide_alike(ranks: list[dict[str, Any]]) -> None:
    one, other = (found["told"] for found in ranks)
    assert one == other and "ranks were given different layers to quantize: rank 0: int8: model.1; rank 1:" in one
