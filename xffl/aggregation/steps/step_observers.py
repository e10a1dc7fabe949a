"""What features do at the local steps of a loop; a loop without them has none of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import SGD, Optimizer

from xffl.aggregation.algorithms.clients import Client, check_step
from xffl.aggregation.steps.normalized_steps import NormalizedSteps

__all__ = ["ClientSteps", "MomentumSteps", "StepObserver", "needs_following"]


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


class MomentumSteps(StepObserver):
    """Follows the momentum of optimizers, from which the effective number of local steps is worked out."""

    def __init__(self, normalized_steps: NormalizedSteps) -> None:
        self._normalized_steps = normalized_steps

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Look whether the momentum is empty."""
        self._normalized_steps.before_step(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """Add the step up."""
        self._normalized_steps.after_step(optimizer)


def needs_following(optimizers: Sequence[Optimizer]) -> bool:
    """Tell whether local steps may count for other numbers than 1: momentum counts, and so do steps of several."""
    return len(optimizers) > 1 or any(isinstance(optimizer, SGD) for optimizer in optimizers)


class ClientSteps(StepObserver):
    """Lets a client change the local steps, and follows the momentum, of which it is told."""

    def __init__(self, client: Client, normalized_steps: NormalizedSteps) -> None:
        self._client = client
        self._normalized_steps = normalized_steps

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Let the client change the gradients."""
        self._normalized_steps.before_step(optimizer)
        check_step(optimizer, args, kwargs)
        self._client.before_step(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """Tell the client of the step."""
        self._client.after_step(optimizer, self._normalized_steps.after_step(optimizer))

    def after_round(self, *, is_dropped: bool) -> None:
        """Let the client take over what was agreed."""
        self._client.after_round(is_dropped=is_dropped)
