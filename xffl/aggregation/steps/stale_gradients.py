"""Gradients of a model that was replaced between a backward pass and the optimizer's step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from xffl.aggregation.algorithms.clients import has_closure

__all__ = ["StaleGradients"]


class StaleGradients:
    """Lets the first step of each optimizer change nothing after the model was replaced; local.

    Its gradients are dropped only when it is about to step: whoever unscales or clips them before still finds them.
    """

    def __init__(self) -> None:
        self._stale: list[Optimizer] = []
        """Optimizers whose gradients are those of the model before."""
        self._void: list[Optimizer] = []
        """Optimizers in a step that changes nothing."""

    def note_replaced(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Note that the values of a model were replaced, and drop gradients that none of these optimizers uses."""
        self._stale = list(optimizers)
        used = {id(parameter) for optimizer in optimizers for parameter in _parameters_of(optimizer)}
        for parameter in model.parameters():
            if id(parameter) not in used:
                parameter.grad = None

    def begin_step(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Drop the gradients that a step would use, if they are stale; tell whether the step changes nothing.

        A step with a closure computes gradients anew, those of all optimizers, so it counts.
        """
        self._void = [other for other in self._void if other is not optimizer]  # of a step that has raised
        if all(other is not optimizer for other in self._stale):
            return False
        computes_anew = has_closure(args, kwargs)
        dropped = list(self._stale) if computes_anew else [optimizer]
        self._stale = [other for other in self._stale if all(other is not known for known in dropped)]
        for known in dropped:
            for parameter in _parameters_of(known):
                parameter.grad = None
        if computes_anew:
            return False
        self._void.append(optimizer)
        return True

    def end_step(self, optimizer: Optimizer) -> bool:
        """Tell whether the step that an optimizer has made has changed nothing."""
        is_void = any(other is optimizer for other in self._void)
        self._void = [other for other in self._void if other is not optimizer]
        return is_void


def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
