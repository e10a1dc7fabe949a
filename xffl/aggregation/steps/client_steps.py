"""What clients, and the effective number of local steps, need at each of them."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from xffl.aggregation.algorithms.clients import Client, check_step
from xffl.aggregation.steps.normalized_steps import NormalizedSteps
from xffl.aggregation.steps.step_observers import StepObserver

__all__ = ["ClientSteps", "MomentumSteps"]


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
