"""The strategies that training scripts call, and how each spreads a model over the ranks of a cell.

A script makes a ``DistributedStrategy`` (``strategy.py``) of a ``StrategyConfig`` (``config.py``). ``wrap_model`` of
``NativeStrategy`` (``native.py``) gives the model to ``spread`` (``spread.py``): checks on all ranks, rank 0's weights,
the layers of this stage (``axes/pipeline.py``) cut over ``tp`` (``axes/tensor_parallel.py``), then FSDP2 or DDP over
the rest of the mesh, and values for models on the meta device. In training, ``PipelineModel`` runs the stages with
torch's schedules, and ``axes/context_parallel.py`` lets attention see whole sequences. ``DeepSpeedStrategy``
(``zero/deepspeed.py``) spreads by ZeRO; rounds see its master weights through ``zero/view.py``.

The names below are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xffl.lazy import lazy_names

if TYPE_CHECKING:
    from xffl.parallel.config import DDPConfig, DistributedConfig, StrategyConfig, TrainingConfig, read_config
    from xffl.parallel.native import (
        DDPStrategy,
        FSDPStrategy,
        HSDPStrategy,
        NativeStrategy,
        SingleGPUStrategy,
        SingleStrategy,
    )
    from xffl.parallel.spread import shard
    from xffl.parallel.strategy import DistributedStrategy
    from xffl.parallel.zero.deepspeed import DeepSpeedStrategy

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

__getattr__, __dir__ = lazy_names(__name__, STRATEGIES="xffl.parallel.native")
