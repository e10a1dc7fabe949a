"""The strategies that training scripts call, and how each spreads a model over the ranks of a cell.

A script makes a ``DistributedStrategy`` (``strategy.py``) of a ``StrategyConfig`` (``config.py``). ``wrap_model`` of
``NativeStrategy`` (``native.py``) gives the model to ``spread`` (``spread.py``): checks on all ranks, rank 0's weights,
the layers of this stage (``pipeline.py``) cut over ``tp`` (``tensor_parallel.py``), then FSDP2 or DDP over the rest of
the mesh, and values for models on the meta device (``meta_init.py``). In training, ``PipelineModel`` runs the stages
with torch's schedules (``torch_pipeline.py``, which loads torch's compiler), and ``context_parallel.py`` lets attention
see whole sequences. ``DeepSpeedStrategy`` (``deepspeed.py``) spreads by ZeRO; rounds see its master weights through
``zero_view.py``.

The names below are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xffl.parallel.config import DDPConfig, DistributedConfig, StrategyConfig, TrainingConfig, read_config
    from xffl.parallel.deepspeed import DeepSpeedStrategy
    from xffl.parallel.native import DDPStrategy, FSDPStrategy, HSDPStrategy, NativeStrategy, SingleStrategy
    from xffl.parallel.native import SingleStrategy as SingleGPUStrategy
    from xffl.parallel.spread import shard
    from xffl.parallel.strategy import DistributedStrategy
__all__ = [
    "STRATEGIES",
    "DDPConfig",
    "DDPStrategy",
    "DeepSpeedStrategy",
    "DistributedConfig",
    "DistributedStrategy",
    "FSDPStrategy",
    "HSDPStrategy",
    "NativeStrategy",
    "SingleGPUStrategy",
    "SingleStrategy",
    "StrategyConfig",
    "TrainingConfig",
    "read_config",
    "shard",
]

STRATEGIES: dict[str, type[DistributedStrategy]]
"""The strategies by name; made at its first use."""

_HOMES = {
    **{name: ("config", name) for name in ("DDPConfig", "DistributedConfig", "StrategyConfig", "TrainingConfig")},
    "DDPStrategy": ("native", "DDPStrategy"),
    "DeepSpeedStrategy": ("deepspeed", "DeepSpeedStrategy"),
    "DistributedStrategy": ("strategy", "DistributedStrategy"),
    "FSDPStrategy": ("native", "FSDPStrategy"),
    "HSDPStrategy": ("native", "HSDPStrategy"),
    "NativeStrategy": ("native", "NativeStrategy"),
    "SingleGPUStrategy": ("native", "SingleStrategy"),  # the reference document's name; it trains on a CPU as well
    "SingleStrategy": ("native", "SingleStrategy"),
    "read_config": ("config", "read_config"),
    "shard": ("spread", "shard"),
}
"""Modules and names of what is imported when it is first used."""

_CHOICES = ("SingleStrategy", "DDPStrategy", "FSDPStrategy", "HSDPStrategy", "DeepSpeedStrategy")
"""The classes in ``STRATEGIES``, which maps their names in configurations to them."""


def __getattr__(name: str) -> object:
    if name == "STRATEGIES":
        strategies = (getattr(import_module(f"xffl.parallel.{_HOMES[c][0]}"), c) for c in _CHOICES)
        # Kept, so that a strategy that a user adds stays.
        return globals().setdefault(name, {strategy.name: strategy for strategy in strategies})
    if name not in _HOMES:
        raise AttributeError(f"module 'xffl.parallel' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(f"xffl.parallel.{module}"), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
