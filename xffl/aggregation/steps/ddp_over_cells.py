"""The look for a wrapper around the model that a framework has made for itself, over the ranks of several cells.

The check of gradients sees the model that rounds are made with (:mod:`xffl.aggregation.engine.planning.coverage`).
Trainers of frameworks wrap it afterwards, over torch.distributed's default group: in one world of several cells
gradients then cross in every step, and rounds average models that are equal. Nothing else would show it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from xffl.aggregation.steps.step_observers import StepObserver
from xffl.compat.ddp import running_wrapper
from xffl.distributed.agreement.consistency import ranks_text
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import ConfigError

__all__ = ["WrapperWatch"]


class WrapperWatch(StepObserver):
    """Refuses the first local step if the model was called by a wrapper that reduces gradients over several cells.

    Only calls count: a wrapper that is left from earlier training reduces nothing. A model that is compiled inside the
    wrapper is not looked at, since its calls run no hooks.

    :param model: The model that rounds average, without wrappers.
    :param state: The state of a world of several cells.
    """

    def __init__(self, model: nn.Module, state: DistributedState) -> None:
        self._cell = state.cell
        self._ranks = frozenset(state.topology.federation(state.cell))
        self._was_called = False
        """Whether the model was called in training"""
        self._outer: frozenset[int] = frozenset()
        """The ranks of a wrapper beyond the cell that has called it"""
        self.handle: RemovableHandle = model.register_forward_pre_hook(self._note_call)
        """The hook of the model, which is taken off with the first step or where the block is left"""

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Raise where a wrapper beyond the cell has called the model; look no further after a step without one."""
        if self._outer:
            raise ConfigError(
                f"DistributedDataParallel over {ranks_text(self._outer)} trains this model, beyond the ranks of cell "
                f"{self._cell}: gradients cross between cells in every step, and rounds average equal models. A "
                "framework that wraps the model by itself (Trainer, Lightning) does so over the default process group; "
                "make that the cell's: start with xffl exec --isolate, or open xffl.session(isolate=True), before the "
                "framework makes it, and take the state from xffl.adopt()"
            )
        if self._was_called:
            self.handle.remove()
            self.is_over = True

    def _note_call(self, model: nn.Module, args: Any) -> None:
        """Note a call of the model, and who calls it if its backward pass reduces gradients beyond the cell."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self._was_called = True
        wrapper = running_wrapper()
        if wrapper is not None and wrapper.require_backward_grad_sync:
            ranks = _ranks_of(wrapper)
            if not ranks <= self._ranks:
                self._outer = ranks


def _ranks_of(wrapper: DistributedDataParallel) -> frozenset[int]:
    """Return the ranks over which a wrapper reduces; none of a group that torch does not know, such as torchft's."""
    try:
        return frozenset(dist.get_process_group_ranks(wrapper.process_group))
    except (KeyError, ValueError):
        return frozenset()
