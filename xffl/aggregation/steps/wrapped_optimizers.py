"""Optimizers inside of others: whose steps are counted, and which may make steps of others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from xffl.errors import ConfigError

__all__ = ["StepHook", "steps_may_nest", "unwrap"]

StepHook: TypeAlias = Callable[[Optimizer, Any, Any], None]
"""What is called before or after a step, with the arguments of its call."""

INNER = {"opacus": "original_optimizer", "accelerate": "optimizer"}
"""Packages of wrappers that leave the parameters alone once the optimizer inside has stepped, and where it is held."""


def steps_may_nest(optimizers: Sequence[Optimizer]) -> bool:
    """Tell whether a step of one may make another one: of its parent class, or of another optimizer that is given."""
    if len(optimizers) > 1:
        return True
    for optimizer in optimizers:
        kinds = [kind for kind in type(optimizer).__mro__ if kind is not Optimizer and "step" in vars(kind)]
        if len({_without_hooks(vars(kind)["step"]) for kind in kinds}) > 1:
            return True
    return False


def _without_hooks(step: Any) -> Any:
    """Return a step without the wrapper that calls hooks, which torch puts around an inherited one into each class."""
    # A step of the user's own that was made by functools.wraps has the attributes of what it wraps, not its code.
    while getattr(step, "hooked", False) and inspect.getfile(step) == torch_optimizer.__file__:
        step = step.__wrapped__
    return step


def unwrap(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers whose step hooks are called: those given, or those in wrappers that are known.

    Wrappers that never initialized themselves as optimizers have no hooks. Of others it is not known whether they
    change the parameters after the inner step (Lookahead does), where a round would have been too early.
    """
    unwrapped: list[Optimizer] = []
    for optimizer in optimizers:
        while not _has_hooks(optimizer):
            packages = {kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__}
            inner = [getattr(optimizer, name, None) for package, name in INNER.items() if package in packages]
            if len(inner) != 1 or not isinstance(inner[0], Optimizer):
                raise ConfigError(
                    f"optimizer {type(optimizer).__name__} does not call torch.optim.Optimizer.__init__, so its steps "
                    "cannot be counted; let it do so. Or give the optimizer inside it, if nothing changes the "
                    "parameters after that one's step; else optimizer=None, and call scaling.step() after each local "
                    "step"
                )
            optimizer = inner[0]
        if any(optimizer is other for other in unwrapped):
            raise ConfigError(
                f"optimizer {type(optimizer).__name__} is given twice, as it is or in a wrapper, so its steps would "
                "count twice; give each optimizer once"
            )
        unwrapped.append(optimizer)
    return unwrapped


def _has_hooks(optimizer: Optimizer) -> bool:
    """Tell whether step hooks can be registered, and are called."""
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError:
        return False
    return bool(getattr(type(optimizer).step, "hooked", False))
