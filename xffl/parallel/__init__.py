"""How the model is spread inside a cell, and the strategies that training scripts call."""

from xffl.parallel.config import DDPConfig, DistributedConfig, StrategyConfig, TrainingConfig, read_config
from xffl.parallel.deepspeed import DeepSpeedStrategy
from xffl.parallel.native import DDPStrategy, FSDPStrategy, HSDPStrategy, NativeStrategy, SingleStrategy
from xffl.parallel.shard import shard
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

SingleGPUStrategy = SingleStrategy
"""What the reference document calls it; it trains on a CPU as well."""

STRATEGIES: dict[str, type[DistributedStrategy]] = {
    strategy.name: strategy for strategy in (SingleStrategy, DDPStrategy, FSDPStrategy, HSDPStrategy, DeepSpeedStrategy)
}
"""The strategies by name."""
