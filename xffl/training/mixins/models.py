"""Models, made whole or on the meta device and spread over the cell, then their optimizers and schedulers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from xffl.distributed.values.sharding import sharded_parameters
from xffl.errors import ConfigError
from xffl.parallel.spread import is_meta
from xffl.training.mixins.base import TrainerMixin, names_set_by
from xffl.training.mixins.loaders import DataConfig, DataLoaderSetupMixin

__all__ = ["ModelSetupMixin", "OptimizerAndSchedulerSetupMixin", "SetupConfig", "SetupConfigMixin", "SetupMixin"]


@dataclass(frozen=True, kw_only=True)
class SetupConfig:
    """How models are made.

    :param meta_device: Whether ``configure_models`` runs on the meta device, so that no rank ever holds a whole model;
        ``None`` for yes, except with DeepSpeed.
    """

    meta_device: bool | None = None


class ModelSetupMixin(TrainerMixin):
    """Make a trainer's models and spread them as ``config.distributed`` says.

    Models are the modules that :meth:`configure_models` sets as attributes.
    """

    _model_names: tuple[str, ...] = ()

    def configure_models(self) -> None:
        """Set the models as attributes (``self.model = ...``), whole; override it.

        With ``setup.meta_device`` it runs under ``torch.device("meta")``: models cost no memory, and get their weights
        part by part when they are spread.
        """
        raise ConfigError(f"{type(self).__name__} has no models; override configure_models and set self.model there")

    def post_configure_models(self) -> None:
        """Change models before they are spread: freeze layers, add adapters. Does nothing by itself."""

    def init_weights(self) -> None:
        """Initialize the models' weights; override it, or leave it to each module's ``reset_parameters``.

        Of models on the meta device it is called once for each module that has tensors of its own; the model's
        attribute then stands for that module alone, whole and on the CPU, so that ``self.model.apply(fn)`` initializes
        module by module, as it does for a whole model. What it does must not depend on the module's name. What it
        leaves without values is as the modules' ``reset_parameters`` make it.
        """

    def module_initializer(self, name: str) -> Callable[[nn.Module], object] | None:
        """Return what initializes the modules of a model on the meta device, one at a time.

        By default that is :meth:`init_weights`, where it is overridden, else ``None``: each module's
        ``reset_parameters``. For models of Hugging Face return
        ``xffl.training.models.ModuleInitializer(self.model)``.

        :param name: The model's attribute.
        :return: Called with each module, whose own tensors are whole.
        """
        if not self._has_init_weights:
            return None

        def initialize(module: nn.Module) -> None:
            alone = copy.copy(module)
            alone._modules = {}
            with self._standing_in(name, alone):
                self.init_weights()

        return initialize

    def post_setup_models(self) -> None:
        """Change models after they are spread: load weights into them. Does nothing by itself."""

    def compute_loss(self, output: Any, target: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of an output, for :meth:`BaseTrainer.forward_backward`; override it to use that.

        :param output: What the model returned.
        :param target: What it is compared with.
        :return: The mean over its elements.
        """
        raise ConfigError(f"{type(self).__name__} has no loss; override compute_loss, which forward_backward calls")

    def named_models(self) -> dict[str, nn.Module]:
        """Return the models by the names of their attributes."""
        return {name: getattr(self, name) for name in self._model_names}

    def configure(self) -> None:
        """Make the models; local."""
        is_bare = self.section("setup", SetupConfig).meta_device
        if is_bare is None:  # DeepSpeed takes models with weights only
            is_bare = self.config.distributed.strategy != "deepspeed"
        self.world.set_determinism(self.config.experiment.seed, deterministic=self.config.experiment.deterministic)
        with torch.device("meta") if is_bare else nullcontext():
            names = names_set_by(self.configure_models, self, nn.Module)
        # A loss function, say, is a module and no model.
        made = {name: getattr(self, name) for name in names}
        self._model_names = tuple(name for name, model in made.items() if [*model.parameters(), *model.buffers()])
        if not self._model_names:
            raise ConfigError(
                f"{type(self).__name__}.configure_models has set no module with weights; set self.model = ... there"
            )
        self.post_configure_models()
        super().configure()

    def setup(self) -> None:
        """Spread the models, all cells from the same weights; collective over the world."""
        has_loss = type(self).compute_loss is not ModelSetupMixin.compute_loss
        whole = self.named_models()
        self.world.set_determinism(self.config.experiment.seed)
        for name, model in whole.items():
            is_bare = is_meta(model)
            if self._has_init_weights and not is_bare:
                with self._standing_in(name, model):
                    self.init_weights()
            spread = self.strategy.wrap_model(
                model,
                loss=self.compute_loss if has_loss else None,
                init_weights=self.module_initializer(name) if is_bare else None,
            )
            setattr(self, name, spread)
        # Dropout and the like: ranks with data of their own draw numbers of their own.
        self.world.set_determinism(self.config.experiment.seed, "dp", "federated")
        self.are_models_spread = True
        self.post_setup_models()
        super().setup()

    @property
    def _has_init_weights(self) -> bool:
        return type(self).init_weights is not ModelSetupMixin.init_weights

    @contextmanager
    def _standing_in(self, name: str, module: nn.Module) -> Iterator[None]:
        """Let a model's attribute be another module, and the other models' an empty one, for the length of a block."""
        kept = self.named_models()
        for other in kept:
            setattr(self, other, module if other == name else nn.Module())
        try:
            yield
        finally:
            for other, model in kept.items():
                setattr(self, other, model)


class OptimizerAndSchedulerSetupMixin(TrainerMixin):
    """Make a trainer's optimizers and schedulers, after the models are spread.

    They are what :meth:`configure_optimizers` and :meth:`configure_schedulers` set as attributes.
    """

    _optimizer_names: tuple[str, ...] = ()
    _scheduler_names: tuple[str, ...] = ()

    def configure_optimizers(self) -> None:
        """Set the optimizers as attributes (``self.optimizer = ...``), of the spread models; override it."""
        raise ConfigError(
            f"{type(self).__name__} has no optimizer; override configure_optimizers and set self.optimizer there"
        )

    def configure_schedulers(self) -> None:
        """Set schedulers as attributes; by default there are none.

        They step as ``training.scheduler_interval`` says. A ``ReduceLROnPlateau`` is yours to step, in a callback.
        """

    def named_optimizers(self) -> dict[str, Optimizer]:
        """Return the optimizers by the names of their attributes."""
        return {name: getattr(self, name) for name in self._optimizer_names}

    def named_schedulers(self) -> dict[str, LRScheduler]:
        """Return the schedulers by the names of their attributes."""
        return {name: getattr(self, name) for name in self._scheduler_names}

    def setup(self) -> None:
        """Make optimizers and schedulers; collective over the world with DeepSpeed, else local."""
        if not self.are_models_spread:
            raise ConfigError(
                f"{type(self).__name__} makes optimizers before models are spread; let ModelSetupMixin stand before "
                "OptimizerAndSchedulerSetupMixin, or take SetupMixin"
            )
        self._optimizer_names = names_set_by(self.configure_optimizers, self, Optimizer)
        if not self._optimizer_names:
            raise ConfigError(
                f"{type(self).__name__}.configure_optimizers has set no optimizer; set self.optimizer = ... there"
            )
        for name, optimizer in self.named_optimizers().items():
            setattr(self, name, self.strategy.wrap_optimizer(self.model_of(optimizer), optimizer))
        self._scheduler_names = names_set_by(self.configure_schedulers, self, LRScheduler)
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
        with warnings.catch_warnings() if interval == "epoch" else nullcontext():
            if interval == "epoch":  # where a run that was saved at an epoch's last batch goes on with the epoch's end
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler", UserWarning)
            for scheduler in self.named_schedulers().values():
                if scheduler.optimizer in optimizers and not isinstance(scheduler, ReduceLROnPlateau):
                    scheduler.step()


@dataclass(kw_only=True)
class SetupConfigMixin:
    """The sections of models and data.

    :param setup: How models are made.
    :param data: How batches are made.
    """

    setup: SetupConfig = field(default_factory=SetupConfig)
    data: DataConfig = field(default_factory=DataConfig)


class SetupMixin(ModelSetupMixin, OptimizerAndSchedulerSetupMixin, DataLoaderSetupMixin):
    """Models, then optimizers and schedulers, then data."""
