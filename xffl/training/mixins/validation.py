"""Validation, the same loop whether a cell is measured or the federation, and its metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import nn

from xffl.errors import ConfigError
from xffl.training.metrics import WeightedSums, compute_metrics, metric_kinds, prepare_metrics, reduce_sums, uncounted
from xffl.training.mixins.base import TrainerMixin, names_set_by

__all__ = ["EvalMetricConfigMixin", "EvalMetricMixin", "MetricsConfig", "ValidationMixin"]


class ValidationMixin(TrainerMixin):
    """Measure a trainer's models; every trainer has it."""

    training: bool = False
    """Whether the models are in training mode"""
    last_validation: tuple[str, dict[str, float]] | None = None
    """Whose model was measured last since the start (``cell`` or ``federation``), and the values"""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Measure a batch, without gradients and with models in evaluation mode; override it.

        :param batch: What the loader gave, on this rank's device.
        :param batch_idx: Its number.
        :return: Means over the batch by name, which are averaged over all samples.
        """
        raise ConfigError(f"{type(self).__name__} has a validation loader but no validation_step; override it")

    def count_samples(self, batch: Any) -> int:
        """Return how many samples a batch of this rank has: the rows of its first tensor; override it for others.

        :param batch: What the loader gave.
        :return: The number of samples.
        """
        tensor = _first_tensor(batch)
        if tensor is None:
            raise ConfigError(
                f"a batch of {type(batch).__name__} has no tensor whose rows are samples; override count_samples"
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
    return next((inner for item in inside if (inner := _first_tensor(item)) is not None), None)


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """What validations measure beside what a trainer's metrics and ``validation_step`` do.

    :param perplexity: Whether to record ``val/perplexity``, the exponential of ``val/loss``. It is the perplexity of
        all tokens where ``validation_step`` returns the loss with its tokens: ``{"val_loss": (mean_loss, tokens)}``.
    """

    perplexity: bool = False


@dataclass(kw_only=True)
class EvalMetricConfigMixin:
    """The section of metrics.

    :param metrics: What validations measure.
    """

    metrics: MetricsConfig = field(default_factory=MetricsConfig)


class EvalMetricMixin(TrainerMixin):
    """Measure in validations, over all samples of the cell or of the federation.

    .. code-block:: python

       class MyTrainer(BaseTrainer, SetupMixin, EvalMetricMixin):
           def configure_metrics(self):
               self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)

           def validation_step(self, batch, batch_idx):
               logits = self.model(batch[0])
               self.accuracy.update(logits, batch[1])
               return {"val_loss": F.cross_entropy(logits, batch[1])}

    Records are ``val/accuracy`` and ``val/loss``, as one process would measure them over all samples. A number that
    ``validation_step`` returns is a mean over the batch's samples; where it is one over something else (tokens), it is
    returned with how many: ``{"val_loss": (loss, tokens)}``. The own ``compute()`` of a metric gives this rank's value.
    """

    _metric_names: tuple[str, ...] = ()

    def configure_metrics(self) -> None:
        """Make metrics of torchmetrics, or collections of them, as attributes; the same on all ranks. Override it."""

    def setup(self) -> None:
        """Make the metrics, on this rank's device."""
        self._outputs = WeightedSums(self.device)
        if type(self).configure_metrics is not EvalMetricMixin.configure_metrics:
            self._metric_names = names_set_by(self.configure_metrics, self, *metric_kinds())
            prepare_metrics(self.named_metrics(), self.device)
        super().setup()

    def named_metrics(self) -> dict[str, nn.Module]:
        """Return the metrics by the names of their attributes."""
        return {name: getattr(self, name) for name in self._metric_names}

    def reset_metrics(self) -> None:
        """Begin a validation."""
        self._outputs.clear()
        for metric in self.named_metrics().values():
            metric.reset()  # type: ignore[operator]

    def measuring(self, count: float) -> AbstractContextManager[None]:
        """Return the context of a ``validation_step``, in which metrics see nothing of a batch that does not count."""
        return uncounted(self.named_metrics()) if self._metric_names and not count else nullcontext()

    def update_outputs(self, output: Any, count: float) -> None:
        """Take in what ``validation_step`` has returned: numbers by name, or a loss alone; all else is left."""
        for name, value, weight in _numbers(output):
            self._outputs.add(name, value, float(count) if weight is None or not count else weight)

    def compute_metrics(self, over: str = "cell") -> dict[str, float]:
        """Return the metrics of the validation that has ended.

        Collective over the cell, or over the world for the federation.

        :param over: ``cell`` or ``federation``: whose samples count.
        :return: Numbers by name, such as ``val/accuracy``; the same on all ranks.
        :raises ConfigError: if the ranks have measured different things, or a metric nothing at all.
        """
        values = reduce_sums(self._outputs, self.state, over=over, device=self.device)
        if self._metric_names:
            computed = compute_metrics(self.named_metrics(), self.state, over=over)
            for name, value in computed.items():
                if f"val/{name}" in values:
                    raise ConfigError(
                        f"validation_step returns a number that is called val/{name} as the metric is; rename one"
                    )
                values[f"val/{name}"] = value
        asked: MetricsConfig = getattr(self.config, "metrics", None) or MetricsConfig()
        if asked.perplexity:
            if "val/loss" not in values:
                raise ConfigError(
                    f"metrics.perplexity needs val/loss, but the validation has {sorted(values)}; return "
                    "{'val_loss': (mean_loss, tokens)} in validation_step"
                )
            try:
                values["val/perplexity"] = math.exp(values["val/loss"])
            except OverflowError:
                values["val/perplexity"] = math.inf
        return values


def _numbers(output: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the numbers of an output with their names in records, and their weights where it says them."""
    named = output if isinstance(output, Mapping) else {"val_loss": output}
    for name, item in named.items():
        value, weight = item if isinstance(item, tuple) and len(item) == 2 else (item, None)
        if not _is_number(value) or not (weight is None or _is_number(weight)):
            continue
        plain = str(name)
        if not plain.startswith("val/"):
            plain = f"val/{plain.removeprefix('val_')}"
        yield plain, value, None if weight is None else float(weight)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, Real) and not isinstance(value, bool)
