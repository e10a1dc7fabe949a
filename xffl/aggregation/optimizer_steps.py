"""Steps of optimizers: whose ``step`` is followed, and which calls belong to one step."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from xffl.errors import ConfigError

__all__ = ["check_apart", "check_outside_backward", "enclosing_calls", "unwrap"]

INNER = {"opacus": "original_optimizer", "accelerate": "optimizer"}
"""Packages of wrappers that leave the parameters alone once the optimizer inside has stepped, and where it is held."""


def enclosing_calls() -> list[Optimizer]:
    """Return the optimizers in whose ``step`` the call lies that a step hook was called for; innermost first.

    To be called by the hook itself. torch runs hooks in the ``step`` of a class and in that of its parent, so
    ``super().step()`` runs them once more. The stack is asked, since a count of what began and ended would be wrong
    after a step that raised: it has no hook at its end.
    """
    hook = sys._getframe(1)
    calls: list[Optimizer] = []
    frame = hook.f_back
    # Whatever another hook of the same file has called (a callback that trains, say) is no part of its step.
    while frame is not None and frame.f_code.co_filename != hook.f_code.co_filename:
        if frame.f_code.co_filename == torch_optimizer.__file__:  # torch's wrapper(*args, **kwargs) around a step
            args = frame.f_locals.get("args")
            if isinstance(args, tuple) and args and isinstance(args[0], Optimizer):
                calls.append(args[0])
        frame = frame.f_back
    return calls[1:]


def check_apart(optimizer: Optimizer, outer: Sequence[Optimizer]) -> None:
    """Raise where an optimizer steps inside another one's step and both hold the same parameters: it is one step."""
    mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for other in outer:
        if any(id(parameter) in mine for group in other.param_groups for parameter in group["params"]):
            raise ConfigError(
                f"optimizer {type(optimizer).__name__} steps inside the step of {type(other).__name__}, and both are "
                "given for the same parameters, so their step would count twice; give "
                f"{type(other).__name__} only"
            )


def check_outside_backward(what: str) -> None:
    """Raise where a step is made while a backward pass goes on, in which a round would change what it still reads."""
    if _in_backward():
        raise ConfigError(
            f"{what} inside a backward pass, where a round would change parameters that gradients are still computed "
            "from; give optimizer=None, and call scaling.step() after backward()"
        )


def _in_backward() -> bool:
    """Tell whether a backward pass is under way in this thread; torch has no public call for it."""
    return torch._C._current_graph_task_id() != -1


def unwrap(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers whose step hooks are called: those given, or those in wrappers that are known.

    Wrappers that never initialized themselves as optimizers have no hooks. Of others it is not known whether they
    change the parameters after the inner step (Lookahead does), where a round would have been too early.
    """
    found: list[Optimizer] = []
    for given in optimizers:
        optimizer = given
        while not _has_hooks(optimizer):
            packages = {kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__}
            held = [getattr(optimizer, name, None) for package, name in INNER.items() if package in packages]
            if len(held) != 1 or not isinstance(held[0], Optimizer):
                raise ConfigError(
                    f"optimizer {type(optimizer).__name__} does not call torch.optim.Optimizer.__init__, so its steps "
                    "cannot be counted; let it do so. Or give the optimizer inside it, if nothing changes the "
                    "parameters after that one's step; else optimizer=None, and call scaling.step() after each local "
                    "step"
                )
            optimizer = held[0]
        if any(optimizer is other for other in found):
            raise ConfigError(
                f"optimizer {type(optimizer).__name__} is given twice, as it is or in a wrapper, so its steps would "
                "count twice; give each optimizer once"
            )
        found.append(optimizer)
    return found


def _has_hooks(optimizer: Optimizer) -> bool:
    """Tell whether step hooks can be registered, and are called."""
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError:
        return False
    return bool(getattr(type(optimizer).step, "hooked", False))
