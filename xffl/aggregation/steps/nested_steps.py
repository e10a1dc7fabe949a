"""Steps of optimizers that make other steps: which of them count."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from xffl.aggregation.steps.wrapped_optimizers import StepHook
from xffl.compat.optimizer_steps import enclosing_steps
from xffl.errors import ConfigError

__all__ = ["outermost"]


def outermost(hook: StepHook, given: Sequence[Optimizer]) -> StepHook:
    """Return a step hook that leaves out the step of a parent class, a part of the step that has begun.

    It raises where an optimizer steps inside the step of another one that is given for the same parameters.
    """
    file = inspect.getfile(hook)

    def outer_hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        outer = enclosing_steps(file)
        if optimizer in outer:
            return
        if outer:
            _check_apart(optimizer, [other for other in outer if any(other is known for known in given)])
        hook(optimizer, args, kwargs)

    return outer_hook


def _check_apart(optimizer: Optimizer, outer: Sequence[Optimizer]) -> None:
    """Raise where an optimizer steps inside another one's step and both hold the same parameters: it is one step."""
    mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for other in outer:
        if any(id(parameter) in mine for group in other.param_groups for parameter in group["params"]):
            raise ConfigError(
                f"optimizer {type(optimizer).__name__} steps inside the step of {type(other).__name__}, and both are "
                "given for the same parameters, so their step would count twice; give "
                f"{type(other).__name__} only"
            )
