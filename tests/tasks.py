"""A small trainer for tests: digits, with dropout and a scheduler, so that a resumed run has much to forget."""

from __future__ import annotations

import gzip
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from xffl.training import (
    BaseTrainer,
    BaseTrainerConfig,
    EvalMetricConfigMixin,
    EvalMetricMixin,
    FederatedConfigMixin,
    FederatedMixin,
    SetupConfigMixin,
    SetupMixin,
)

__all__ = ["TaskConfig", "TaskTrainer", "digits", "whole_weights"]

HELD_OUT = 97


@dataclass(kw_only=True)
class TaskConfig(BaseTrainerConfig, SetupConfigMixin, EvalMetricConfigMixin, FederatedConfigMixin):
    """What the tests vary."""

    learning_rate: float = 0.01
    samples: int = 300
    dropout: float = 0.2
    optimizer: str = "AdamW"


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (1797, 64) from 0 to 1, and labels.

    They are read from scikit-learn's file: its ``load_digits`` imports scipy and pandas, which take as long as torch.
    """
    package = importlib.util.find_spec("sklearn")
    assert package is not None and package.origin is not None, "these tests need scikit-learn"
    with gzip.open(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        table = np.loadtxt(file, delimiter=",")
    return torch.tensor(table[:, :-1] / 16).float(), torch.tensor(table[:, -1].astype(int))


class TaskTrainer(BaseTrainer, SetupMixin, EvalMetricMixin, FederatedMixin):
    """An MLP with dropout."""

    config: TaskConfig

    def configure_models(self) -> None:
        self.model = nn.Sequential(
            nn.Linear(64, 30), nn.ReLU(), nn.Dropout(self.config.dropout), nn.LayerNorm(30), nn.Linear(30, 10)
        )

    def configure_optimizers(self) -> None:
        kind = getattr(torch.optim, self.config.optimizer)
        self.optimizer = kind(self.model.parameters(), lr=self.config.learning_rate)

    def configure_schedulers(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.97)

    def configure_metrics(self) -> None:
        import torchmetrics  # seconds, as above

        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        images, labels = digits()
        count = HELD_OUT + self.config.samples
        return (
            self.train_loader(TensorDataset(images[HELD_OUT:count], labels[HELD_OUT:count])),
            self.validation_loader(TensorDataset(images[:HELD_OUT], labels[:HELD_OUT])),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.backward(loss)
        if not self.is_accumulating_gradients:
            norm = self.step(self.model, self.optimizer)
            if norm is not None:
                self.log_scalar("train/grad_norm", norm)
        self.log_scalar("train/loss", loss, weight=len(labels))
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        logits = self.model(images)
        self.accuracy(logits, labels)
        return {"loss": F.cross_entropy(logits, labels)}


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every tensor of a model by its bare name, whole; collective over the cell."""
    found = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found[name.replace("module.", "")] = whole.detach().clone()
    return found
