"""Steps of optimizers whose gradients are there when they begin."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.optim import LBFGS, Optimizer

__all__ = ["call_closure_first"]


def call_closure_first(optimizer: Optimizer) -> None:
    """Let an optimizer's ``step(closure)`` call the closure and then step without it; local.

    Lightning runs forward and backward in a closure that it gives to ``step``, so that what looks at gradients before a
    step, as a client does, would see those of the step before. LBFGS, which calls the closure several times, stays as
    it is.

    :param optimizer: The optimizer, which is changed.
    """
    if isinstance(optimizer, LBFGS):
        return
    step: Callable[..., Any] = optimizer.step

    @wraps(step)
    def compute_and_step(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        loss = None if closure is None else closure()
        step(**kwargs)
        return loss

    optimizer.step = compute_and_step  # type: ignore[method-assign]
