"""What makes a trainer ready: models, optimizers and schedulers, data."""

from __future__ import annotations

from dataclasses import dataclass, field

from xffl.training.mixins.loaders import DataConfig, DataLoaderSetupMixin
from xffl.training.mixins.models import ModelSetupMixin, SetupConfig
from xffl.training.mixins.optimizers import OptimizerAndSchedulerSetupMixin

__all__ = ["SetupConfigMixin", "SetupMixin"]


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
