"""Optimizers and learning-rate schedulers of a trainer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from xffl.distributed.sharding import sharded_parameters
from xffl.errors import ConfigError
from xffl.training.mixins.base import Attributes, TrainerMixin

__all__ = ["OptimizerAndSchedulerSetupMixin"]


class OptimizerAndSchedulerSetupMixin(TrainerMixin):
    """Make a trainer's optimizers and schedulers, after the models are spread.

    They are what :meth:`configure_optimizers` and :meth:`configure_schedulers` set as attributes.
    """

    _optimizers: Attributes[Optimizer] | None = None
    _schedulers: Attributes[LRScheduler] | None = None

    def configure_optimizers(self) -> None:
        """Set the optimizers as attributes (``self.optimizer = ...``), of the spread models; overload it."""
        raise ConfigError(
            f"{type(self).__name__} has no optimizer; overload configure_optimizers and set self.optimizer there"
        )

    def configure_schedulers(self) -> None:
        """Set schedulers as attributes; by default there are none.

        They step as ``training.scheduler_interval`` says. A ``ReduceLROnPlateau`` is yours to step, in a callback.
        """

    def named_optimizers(self) -> dict[str, Optimizer]:
        """Return the optimizers by the names of their attributes."""
        return {} if self._optimizers is None else {name: getattr(self, name) for name in self._optimizers.names}

    def named_schedulers(self) -> dict[str, LRScheduler]:
        """Return the schedulers by the names of their attributes."""
        return {} if self._schedulers is None else {name: getattr(self, name) for name in self._schedulers.names}

    def setup(self) -> None:
        """Make optimizers and schedulers; collective over the world with DeepSpeed, else local."""
        if not self.are_models_spread:
            raise ConfigError(
                f"{type(self).__name__} makes optimizers before models are spread; let ModelSetupMixin stand before "
                "OptimizerAndSchedulerSetupMixin, or take SetupMixin"
            )
        self._optimizers = Attributes(self, Optimizer)
        with self._optimizers.watched():
            self.configure_optimizers()
        if not self._optimizers.names:
            raise ConfigError(
                f"{type(self).__name__}.configure_optimizers has set no optimizer; set self.optimizer = ... there"
            )
        for name, optimizer in self.named_optimizers().items():
            setattr(self, name, self.strategy.wrap_optimizer(self.model_of(optimizer), optimizer))
        self._schedulers = Attributes(self, LRScheduler)
        with self._schedulers.watched():
            self.configure_schedulers()
        super().setup()

    def checkpoint_parts(self) -> dict[str, Any]:
        """Return the schedulers."""
        return {**super().checkpoint_parts(), **self.named_schedulers()}

    def model_of(self, optimizer: Optimizer) -> nn.Module:
        """Return the model that an optimizer trains."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        models = self.named_models().values()
        owners = [model for model in models if any(id(one) in held for one in sharded_parameters(model).values())]
        if len(owners) != 1:
            raise ConfigError(
                f"an optimizer ({type(optimizer).__name__}) holds parameters of {len(owners)} models of the trainer; "
                "make one for each model, of the parameters that it has after it is spread"
            )
        return owners[0]

    def step_schedulers(self, interval: str, *optimizers: Optimizer) -> None:
        """Step the schedulers, if this is their interval; local."""
        if self.config.training.scheduler_interval != interval:
            return
        with _in_any_order() if interval == "epoch" else nullcontext():
            for scheduler in self.named_schedulers().values():
                if scheduler.optimizer in optimizers and not isinstance(scheduler, ReduceLROnPlateau):
                    scheduler.step()

    def learning_rates(self) -> dict[str, float]:
        """Return the learning rate of each optimizer's first group, by the optimizer's name."""
        rates = {name: one.param_groups[0].get("lr", 0.0) for name, one in self.named_optimizers().items()}
        return {name: float(rate.item() if isinstance(rate, torch.Tensor) else rate) for name, rate in rates.items()}


@contextmanager
def _in_any_order() -> Iterator[None]:
    """Keep torch from warning where a run that was saved at an epoch's last batch goes on with the epoch's end."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler", UserWarning)
        yield
