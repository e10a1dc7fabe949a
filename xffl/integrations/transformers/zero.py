"""ZeRO in a Trainer: the engine that DeepSpeed has made of a cell, as rounds take it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from xffl.distributed.values.gradients import mark_reduced
from xffl.errors import ConfigError
from xffl.parallel.zero.deepspeed import EngineOptimizer
from xffl.parallel.zero.mark import mark
from xffl.parallel.zero.view import Masters

__all__ = ["check_engine", "take_engine"]

STAGES = (1, 2, 3)


def check_engine(trainer: Any) -> None:
    """Refuse a configuration of DeepSpeed whose master weights rounds do not find; local.

    :param trainer: The Trainer.
    :raises ConfigError: if there is one; the text has the line to write.
    """
    if not trainer.is_deepspeed_enabled:
        return
    plugin = trainer.accelerator.state.deepspeed_plugin
    zero = plugin.deepspeed_config.get("zero_optimization", {})
    if plugin.zero_stage not in STAGES:
        raise ConfigError(
            f"federate takes ZeRO's stages 1 to 3, but the stage is {plugin.zero_stage}; write "
            "'zero_optimization': {'stage': 1}, or leave deepspeed out"
        )
    if zero.get("round_robin_gradients", False) is True:
        raise ConfigError("federate does not know round_robin_gradients of ZeRO; leave it out")


def take_engine(engine: Any) -> tuple[nn.Module, Optimizer]:
    """Return the model that an engine trains, its masters marked, and an optimizer whose steps are the engine's.

    Collective over the cell, which is the default group. DeepSpeed steps its optimizer once for each group of
    parameters, and Trainer calls ``engine.step`` alone: so this becomes a step of the optimizer that is returned.

    :param engine: DeepSpeed's engine, before training.
    :return: The model and the optimizer, for :class:`xffl.FederatedScaling`.
    :raises ConfigError: if the engine's optimizer keeps no masters that are known.
    """
    zero = engine.optimizer
    if not any(hasattr(zero, name) for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")):
        raise ConfigError(
            f"federate does not know the master weights of DeepSpeed's {type(zero).__name__}; leave grad_accum_dtype "
            "out of the configuration of DeepSpeed, or take another stage of ZeRO"
        )
    model: nn.Module = engine.module
    mesh = init_device_mesh(engine.device.type, (dist.get_world_size(),))
    mark(model, Masters(engine, model, mesh))
    mark_reduced(model, mesh.get_group(), by="DeepSpeed")
    optimizer = EngineOptimizer.around(TrainerEngine(engine.step), zero.optimizer)
    engine.step = lambda *_, **__: optimizer.step()
    return model, optimizer


class TrainerEngine:
    """What :class:`EngineOptimizer` asks of a model: the engine's step, as it was, and nothing to prepare for it.

    :param step: Steps the engine.
    """

    def __init__(self, step: Callable[[], Any]) -> None:
        self.engine = SimpleNamespace(step=step)

    def working(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: the default group is the cell already."""
        return nullcontext()
