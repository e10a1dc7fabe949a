"""Workarounds of PyTorch 2.11 to 2.13, whose step hooks are not told in which step they run."""

from __future__ import annotations

import sys

from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

__all__ = ["enclosing_steps"]


def enclosing_steps(*files: str) -> list[Optimizer]:
    """Return the optimizers in whose ``step`` the call lies that a step hook was called for; innermost first.

    The hook itself must call it; ``files`` are other files that have such hooks. torch runs hooks in the ``step`` of a
    class and in that of its parent, so ``super().step()`` runs them once more, and torch 2.13 does not tell a hook
    which of them it is:
    https://github.com/pytorch/pytorch/blob/v2.11.0/torch/optim/optimizer.py (``profile_hook_step``). So the stack is
    read: a count of steps begun and ended would be wrong after a step that raised, which has no hook at its end.
    """
    hook = sys._getframe(1)
    of_hooks = {hook.f_code.co_filename, *files}
    steps: list[Optimizer] = []
    frame = hook.f_back
    # Whatever another hook has called (a callback that trains, say) is no part of the step of that hook.
    while frame is not None and frame.f_code.co_filename not in of_hooks:
        if frame.f_code.co_filename == torch_optimizer.__file__:  # torch's wrapper(*args, **kwargs) around a step
            args = frame.f_locals.get("args")
            if isinstance(args, tuple) and args and isinstance(args[0], Optimizer):
                steps.append(args[0])
        frame = frame.f_back
    return steps[1:]
