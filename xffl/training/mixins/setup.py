"""What makes a trainer ready: models, optimizers and schedulers, data."""

from __future__ import annotations

from dataclasses import dataclass, field

from xffl.training.mixins.loaders import DataConfig, DataLoaderSetupMixin
from xffl.training.mixins.models import ModelSetupMixin
from xffl.training.mixins.optimizers import OptimizerAndSchedulerSetupMixin

__all__ = ["SetupConfig", "SetupConfigMixin", "SetupMixin"]


@dataclass(frozen=True, kw_only=True)
class SetupConfig:
    """How models are made.

    :param meta_device: Whether ``configure_models`` runs on the meta device, so that no rank ever holds a whole model;
        ``None`` for yes, except with DeepSpeed.
    """

    meta_device: bool | None = None


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
