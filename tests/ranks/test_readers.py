"""What readers of the reference documents write, as the documents have it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import xffl
from tests.ports import free_port
from tests.tasks import whole_weights
from tests.worlds import be_launched, run_world
from xffl.checkpoint import CheckpointManager, auto_resume
from xffl.distributed import DeviceParameters, DistributedWorld
from xffl.distributed.parameters import CommParameters
from xffl.parallel import DistributedConfig, DistributedStrategy
from xffl.training import (
    BaseTrainer,
    BaseTrainerConfig,
    Callback,
    ExperimentConfig,
    SetupConfig,
    SetupConfigMixin,
    SetupMixin,
    TrainingParameters,
)

# strategy_patterns.md -------------------------------------------------------------------------------------------------


def _trained(strategy: DistributedStrategy) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = strategy.wrap_model(nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)  # not given to wrap_optimizer
    strategy.backward(model(torch.ones(1, 3)).sum())
    strategy.step(optimizer)
    return model, optimizer


@pytest.mark.parametrize("kind", ["single", "ddp", "fsdp"])
def test_a_plain_optimizer_is_loaded_with_its_model(kind: str, tmp_path: Path) -> None:
    config = {"distributed": {"strategy": kind, "device": "cpu"}}
    run = SimpleNamespace(experiment=SimpleNamespace(output_dir=tmp_path))
    with DistributedStrategy.from_config(config) as strategy:
        model, optimizer = _trained(strategy)
        CheckpointManager(tmp_path).save(strategy, 7, model=model, optimizer=optimizer, epoch=1)
        strategy.save_checkpoint(tmp_path / "bare", model)
        moments = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    for resume in (
        lambda: auto_resume(run, strategy),
        lambda: strategy.load_checkpoint(tmp_path / "checkpoints" / "step_7"),
    ):
        with DistributedStrategy.from_config(config) as strategy:
            model = strategy.wrap_model(nn.Linear(3, 2))
            optimizer = torch.optim.AdamW(model.parameters())
            other = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1)  # of nothing that was wrapped
            resume()
            state = optimizer.state_dict()
            assert torch.equal(state["state"][0]["exp_avg"], moments) and state["param_groups"][0]["lr"] == 0.5
            assert other.param_groups[0]["lr"] == 0.1
            assert strategy.load_checkpoint(tmp_path / "bare") == {}  # a checkpoint without an optimizer
            kept = torch.optim.SGD(model.parameters(), lr=0.1)
            with pytest.raises(xffl.ConfigError, match=r"several optimizers hold parameters of the model \(AdamW, SGD"):
                resume()
            del kept
            resume()


# distributed_world.md -------------------------------------------------------------------------------------------------


def numbers_and_names(rank: int, world_size: int, port: int) -> list[Any]:
    be_launched(rank, world_size, port)
    found: list[Any] = []
    for _ in range(2):
        with DistributedWorld(DeviceParameters.FSDP(), device="cpu") as world:
            found.append(f"Mesh dims: {world.world_mesh.mesh_dim_names}")
            results = [
                world.all_reduce(1.0 + rank),
                world.all_reduce(rank, op="mean"),
                world.all_reduce(True, op="max"),
                world.all_reduce(np.float32(rank)),
                world.all_gather(rank),
                world.broadcast(0.1 + rank, src=1),
            ]
            found.append([one.tolist() for one in results])
            with pytest.raises(xffl.ConfigError, match=r"take a tensor or a number, got a list; give torch\.tensor"):
                world.all_reduce([1.0])  # type: ignore[arg-type]
    return found


def test_collectives_take_numbers_and_every_world_has_the_documented_names() -> None:
    for found in run_world(2, numbers_and_names, free_port(), init=False):
        assert found[0] == found[2] == "Mesh dims: ('pp', 'cp', 'dp_replicate', 'dp_shard', 'tp')"
        assert found[1] == found[3] == [3.0, 0.5, 1, 1.0, [0, 1], 1.1]


# trainer_core_concepts.md ---------------------------------------------------------------------------------------------


def test_options_of_the_documents_name_what_to_write() -> None:
    for options, told in (
        ({"dp_degree": 8, "enable_fsdp": True}, "no option 'dp_degree'; give dp_shard=8 for FSDP, or dp_replicate=8"),
        ({"enable_fsdp": True}, "FSDP is what dp_shard means"),
        ({"fsdp_limit_all_gathers": True}, "FSDP2 always limits"),
        ({"dp_shards": 2}, "did you mean 'dp_shard'"),
    ):
        for make in (DeviceParameters, DeviceParameters.FSDP):
            with pytest.raises(xffl.ConfigError, match=told):
                make(**options)  # type: ignore[arg-type]
        with pytest.raises(xffl.ConfigError, match=told):
            DistributedStrategy.from_config({"distributed": {"strategy": "fsdp", "device_parameters": options}})
    with pytest.raises(xffl.ConfigError, match="CommParameters option must be one of"):
        CommParameters(timeout=3)  # type: ignore[call-arg]
    with pytest.raises(xffl.ConfigError, match="dp_shard"):  # what was right stays
        DeviceParameters(dp_shard=0)


class TransformerLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.statistics = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = self.norm(x + self.attention(x, x, x)[0])
        return self.head(self.statistics(x.transpose(1, 2)).transpose(1, 2))


class DocumentedTrainer(BaseTrainer, SetupMixin):
    """The custom trainer, with its init_weights."""

    def configure_models(self) -> None:
        self.model = TransformerLM()

    def init_weights(self) -> None:
        def _init_weights(module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                module.weight.data.normal_(mean=0.0, std=0.02)
                if module.bias is not None:
                    module.bias.data.zero_()

        self.model.apply(_init_weights)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        tokens = torch.arange(32).view(8, 4) % 16
        return DataLoader(TensorDataset(tokens, tokens.roll(-1, 1)), batch_size=4), None

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        tokens, labels = batch
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), labels.flatten())
        return {"loss": loss}


class AveragingTrainer(DocumentedTrainer):
    """That of distributed_world.md, which returns an averaged loss."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.world.all_reduce(super().training_step(batch, batch_idx)["loss"], op="mean")}


@dataclass(kw_only=True)
class DocumentedConfig(BaseTrainerConfig, SetupConfigMixin):
    """Sections of the trainer."""


class _First(Callback):
    """Keeps the weights that training begins with."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def post_setup(self, trainer: Any) -> None:
        self.weights = whole_weights(trainer.model)


def _config(folder: str, strategy: str, **setup: Any) -> DocumentedConfig:
    return DocumentedConfig(
        experiment=ExperimentConfig(name="test", output_dir=folder, resume=False),
        training=TrainingParameters(epochs=1, batch_size=4, validate_every_epochs=None),
        distributed=DistributedConfig(strategy=strategy, device="cpu"),
        setup=SetupConfig(**setup),
    )


def documented(rank: int, world_size: int, port: int, folder: str, strategy: str) -> dict[str, torch.Tensor]:
    be_launched(rank, world_size, port)
    first = _First()
    trainer = DocumentedTrainer(_config(f"{folder}/{strategy}", strategy), callbacks=[first])
    trainer.fit()
    assert trainer.global_step == 1
    return first.weights


def test_what_init_weights_leaves_is_as_modules_make_it(tmp_path: Path) -> None:
    whole = TransformerLM().state_dict()
    for weights in run_world(2, documented, free_port(), str(tmp_path), "fsdp", init=False):
        assert weights.keys() == whole.keys()
        assert not any(values.isnan().any() for values in weights.values())
        for name in ("head", "attention.out_proj"):
            assert 0.005 < weights[f"{name}.weight"].std() < 0.05 and not weights[f"{name}.bias"].any()
        assert weights["embedding.weight"].std() > 0.5  # nn.Embedding's own
        assert 0.1 < weights["attention.in_proj_weight"].abs().max() <= math.sqrt(6 / (8 + 24))  # Xavier, of 24 rows
        assert torch.equal(weights["norm.weight"], torch.ones(8)) and not weights["norm.bias"].any()
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            assert torch.equal(weights[f"statistics.{name}"], whole[f"statistics.{name}"])


class _Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4, 8))


class ForgetfulTrainer(DocumentedTrainer):
    """Its model has a tensor that nothing initializes once it was built without values."""

    def configure_models(self) -> None:
        self.model = TransformerLM()
        self.model.positions = _Positions()


def mistakes(rank: int, world_size: int, folder: str) -> None:
    with pytest.raises(xffl.ConfigError, match=r"'table' of module 'positions' .* setup\.meta_device=False"):
        ForgetfulTrainer(_config(f"{folder}/forgets", "single")).fit()
    ForgetfulTrainer(_config(f"{folder}/whole", "single", meta_device=False)).fit()
    with pytest.raises(xffl.StateError, match="return the loss of this rank's own batch: world.all_reduce"):
        AveragingTrainer(_config(f"{folder}/averages", "single")).fit()


def test_mistakes_of_the_documented_trainer_name_the_way_out(tmp_path: Path) -> None:
    run_world(1, mistakes, str(tmp_path), init=False)
