"""What features do at the local steps of a loop; a loop without them has none of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

__all__ = ["StepObserver", "are_plain", "may_be_wrapped", "needs_following"]

PLAIN = frozenset({SGD, Adagrad, Adam, AdamW, NAdam, RAdam, RMSprop})
"""Optimizers of torch whose step makes no step of another one."""


class StepObserver:
    """Is called around each step of a loop's optimizers, and after its rounds; does nothing here."""

    is_over = False
    """Whether nothing is left to be done: the observer is taken out of the loop's list after the round."""

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Look at a step that is about to be made, with the arguments of its call."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Look at a step that was made."""

    def after_round(self, *, is_dropped: bool) -> None:
        """Take note of a round that counts; ``is_dropped`` tells whether this cell was left out of it."""


def are_plain(optimizers: Sequence[Optimizer]) -> bool:
    """Tell whether optimizers are one of torch's own, with nothing in it that has to be looked for."""
    return len(optimizers) == 1 and type(optimizers[0]) in PLAIN


def needs_following(optimizers: Sequence[Optimizer]) -> bool:
    """Tell whether local steps may count for other numbers than 1: momentum counts, and so do steps of several."""
    return len(optimizers) > 1 or any(isinstance(optimizer, SGD) for optimizer in optimizers)


def may_be_wrapped(model: nn.Module) -> bool:
    """Tell whether DistributedDataParallel can reduce a model's gradients: it refuses DTensors, so not under FSDP2."""
    return any(one.requires_grad and not isinstance(one, DTensor) for one in model.parameters())
