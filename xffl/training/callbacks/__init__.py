"""Callbacks of a trainer: the interface for the stages of a run, and those that come with xffl."""

from xffl.training.callbacks.base import Callback, CallbackCollection
from xffl.training.callbacks.checkpoint import CheckpointCallback
from xffl.training.callbacks.early_stopping import EarlyStoppingCallback
from xffl.training.callbacks.ema import EMACallback
from xffl.training.callbacks.monitors import MemoryCallback, ProfilerCallback, ThroughputCallback
from xffl.training.callbacks.param_norms import DriftCallback, GradientNormCallback, UpdateNormCallback
from xffl.training.callbacks.progress import ProgressCallback

__all__ = [
    "Callback",
    "CallbackCollection",
    "CheckpointCallback",
    "DriftCallback",
    "EMACallback",
    "EarlyStoppingCallback",
    "GradientNormCallback",
    "MemoryCallback",
    "ProfilerCallback",
    "ProgressCallback",
    "ThroughputCallback",
    "UpdateNormCallback",
]
