"""The loop: data, metrics, callbacks, records, and a trainer that puts the public parts together.

:mod:`xffl.training.data.partition` deals a dataset out to the cells, as index arrays over any dataset, without torch;
:mod:`xffl.training.data.sampler` turns a cell's part into the batches of each of its ranks, and
:mod:`xffl.training.data.loaders` reads them; :class:`BaseTrainer` and its mixins train on them. The names below are
imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xffl.lazy import lazy_names

if TYPE_CHECKING:
    from xffl.training.callbacks.base import Callback, CallbackCollection
    from xffl.training.config.configuration import main
    from xffl.training.config.dataclasses import BaseTrainerConfig, ExperimentConfig, TrainingParameters
    from xffl.training.data.loaders import CellLoader, adopt_loader, validation_loader
    from xffl.training.data.streams import CellStream
    from xffl.training.data.tokens import TokenDataset
    from xffl.training.mixins.federated import FederatedConfigMixin, FederatedMixin, FederationConfig
    from xffl.training.mixins.loaders import DataConfig, DataLoaderSetupMixin
    from xffl.training.mixins.logging import (
        LoggerConfigMixin,
        LoggerMixin,
        MLflowLoggerMixin,
        TensorBoardLoggerMixin,
        WandBLoggerConfigMixin,
        WandBLoggerMixin,
    )
    from xffl.training.mixins.models import (
        ModelSetupMixin,
        OptimizerAndSchedulerSetupMixin,
        SetupConfig,
        SetupConfigMixin,
        SetupMixin,
    )
    from xffl.training.mixins.quantize import QuantizeConfigMixin, QuantizeMixin
    from xffl.training.mixins.validation import EvalMetricConfigMixin, EvalMetricMixin
    from xffl.training.preemption import PreemptedExit, Preemption
    from xffl.training.trainer import BaseTrainer

__all__ = [
    "BaseTrainer",
    "BaseTrainerConfig",
    "Callback",
    "CallbackCollection",
    "CellLoader",
    "CellStream",
    "DataConfig",
    "DataLoaderSetupMixin",
    "EvalMetricConfigMixin",
    "EvalMetricMixin",
    "ExperimentConfig",
    "FederatedConfigMixin",
    "FederatedMixin",
    "FederationConfig",
    "LoggerConfigMixin",
    "LoggerMixin",
    "MLflowLoggerMixin",
    "ModelSetupMixin",
    "OptimizerAndSchedulerSetupMixin",
    "PreemptedExit",
    "Preemption",
    "QuantizeConfigMixin",
    "QuantizeMixin",
    "SetupConfig",
    "SetupConfigMixin",
    "SetupMixin",
    "TensorBoardLoggerMixin",
    "TokenDataset",
    "TrainingParameters",
    "WandBLoggerConfigMixin",
    "WandBLoggerMixin",
    "adopt_loader",
    "main",
    "validation_loader",
]

__getattr__, __dir__ = lazy_names(__name__)
