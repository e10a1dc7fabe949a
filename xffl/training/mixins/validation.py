"""Validation: the same loop whether a cell is measured or the federation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from xffl.errors import ConfigError
from xffl.training.mixins.base import TrainerMixin

__all__ = ["ValidationMixin"]


class ValidationMixin(TrainerMixin):
    """Measure a trainer's models; every trainer has it."""

    training: bool = False
    """Whether the models are in training mode"""
    last_validation: tuple[str, dict[str, float]] | None = None
    """Whose model was measured last since the start (``cell`` or ``federation``), and the values"""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Measure a batch, without gradients and with models in evaluation mode; overload it.

        :param batch: What the loader gave, on this rank's device.
        :param batch_idx: Its number.
        :return: Means over the batch by name, which are averaged over all samples.
        """
        raise ConfigError(f"{type(self).__name__} has a validation loader but no validation_step; overload it")

    def count_samples(self, batch: Any) -> int:
        """Return how many samples a batch of this rank has: the rows of its first tensor; overload it for others.

        :param batch: What the loader gave.
        :return: The number of samples.
        """
        tensor = _first_tensor(batch)
        if tensor is None:
            raise ConfigError(
                f"a batch of {type(batch).__name__} has no tensor whose rows are samples; overload count_samples"
            )
        return len(tensor)

    def train(self) -> None:
        """Set all models to training mode."""
        self.training = True
        for model in self.named_models().values():
            model.train()

    def eval(self) -> None:
        """Set all models to evaluation mode."""
        self.training = False
        for model in self.named_models().values():
            model.eval()

    @torch.no_grad()
    def perform_validation_epoch(self, over: str = "cell") -> dict[str, float]:
        """Measure the models on the validation data.

        :param over: ``cell``: collective over the cell, whose samples count; ``federation``: collective over the world,
            all cells' samples count.
        :return: The metrics, the same on all ranks of the cell (of the world).
        """
        was_training = self.training
        self.eval()
        self.callbacks.pre_val_epoch(self)
        self.reset_metrics()
        for batch_idx, given in enumerate(self.val_dataloader):
            batch = self.strategy.to_device(given)
            self.callbacks.pre_val_batch(self, batch, batch_idx)
            count = getattr(self.val_dataloader, "batch_samples", None)
            count = self.count_samples(batch) if count is None else count
            with self.train_context(), self.measuring(count):
                output = self.validation_step(batch, batch_idx)
            self.update_outputs(output, count)
            self.callbacks.post_val_batch(self, output, batch, batch_idx)
        metrics = self.compute_metrics(over)
        self.log_metrics(metrics, over=over)
        self.last_validation = (over, metrics)
        self.callbacks.val_metrics(self, metrics)
        self.callbacks.post_val_epoch(self)
        if was_training:
            self.train()
        self.callbacks.post_validation(self, metrics)
        return metrics


def _first_tensor(batch: Any) -> torch.Tensor | None:
    """Return the first tensor with rows in a tensor, or in mappings and sequences of them."""
    if isinstance(batch, torch.Tensor):
        return batch if batch.dim() else None
    inside: Sequence[Any] = ()
    if isinstance(batch, Mapping):
        inside = list(batch.values())
    elif isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        inside = batch
    return next((found for one in inside if (found := _first_tensor(one)) is not None), None)
