"""Loggers, which write the values of a run: JSON lines and CSV always, others as extras.

:class:`xffl.training.loggers.base.Logger` is the interface; one process of each cell has the cell's loggers.
"""

from xffl.training.loggers.base import Logger
from xffl.training.loggers.files import CSVLogger, JSONLinesLogger
from xffl.training.loggers.mlflow import MLflowLogger
from xffl.training.loggers.tensorboard import TensorBoardLogger
from xffl.training.loggers.wandb import WandBLogger

__all__ = ["CSVLogger", "JSONLinesLogger", "Logger", "MLflowLogger", "TensorBoardLogger", "WandBLogger"]
