"""What a training loop has for a round: the local steps that wait for one, and how a round takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from xffl.aggregation.config import RoundConfig
from xffl.aggregation.contributions import ContributionTracker, NormalizedSteps, Snapshot, StepTimer
from xffl.aggregation.engine.consensus import RoundInput, checked_weight
from xffl.aggregation.rounds.hooks import LoopHooks

__all__ = ["RoundOffer", "StepLedger"]


class StepLedger:
    """What the local steps of this rank have made that no round has taken in yet, and how long a step takes; local."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], weigh: Callable[[], float] | None) -> None:
        self._model = model
        self._optimizers = optimizers
        self._weigh = weigh
        self.clear(fragments=1)

    def clear(self, fragments: int) -> None:
        """Forget everything, and count for so many fragments from now on."""
        self.tracker = ContributionTracker(fragments)
        self.normalized_steps = NormalizedSteps(self._optimizers)
        self.timer = StepTimer(next((one.device for one in self._model.parameters()), torch.device("cpu")))

    @property
    def is_weighed(self) -> bool:
        """Whether the caller counts samples or tokens."""
        return self._weigh is not None

    def count(self, fragment: int) -> float:
        """Ask the caller for its count, and return what waits for the next round of a fragment."""
        self.tracker.add_count(checked_weight(self._weigh))
        return self.tracker.count(fragment)

    def add_step(self, effort: float) -> None:
        """Note a local step and its effective number."""
        self.tracker.add_step(effort)
        self.timer.add_step()

    def add_rest(self) -> None:
        """Note what optimizers have stepped since the last local step."""
        self.tracker.add_effort(self.normalized_steps.of_step())

    def forget_steps(self, fragments: int) -> None:
        """Forget the steps of a model that another one has replaced."""
        if self._weigh is not None:
            self._weigh()  # what it has counted is gone with them
        self.tracker = ContributionTracker(fragments)


class RoundOffer:
    """What this rank gives to a round. Whoever makes the round claims it for each try; local.

    A claim is read when the model is, so a try that raises has taken nothing. After the try :meth:`take` says that the
    round has it, or :meth:`set_aside` that nobody knows yet. What was taken so is committed, or put back, when it is
    known what became of the round.
    """

    def __init__(
        self,
        ledger: StepLedger,
        config: RoundConfig,
        hooks: LoopHooks,
        check_counted: Callable[[], None],
        *,
        is_finishing: bool = False,
        gives_up: bool = False,
    ) -> None:
        self._ledger = ledger
        self._config = config
        self.hooks = hooks
        self.check_counted = check_counted
        """Raise StateError where the model has changed and no step was counted; collective over the world."""
        self._is_finishing = is_finishing
        self._gives_up = gives_up

    def claim(self, fragment: int) -> RoundInput:
        """Return what this rank gives to a try to make the round of a fragment."""
        tracker, client = self._ledger.tracker, self._config.client
        return RoundInput(
            weight=(lambda: self._ledger.count(fragment)) if self._ledger.is_weighed else None,
            is_absent=not tracker.is_waiting(fragment),
            is_finished=self._is_finishing and (self._gives_up or not tracker.has_others(fragment)),
            steps=tracker.effort(fragment),
            seconds=self._ledger.timer.step_seconds,
            prepare=None if client is None else client.before_round,
        )

    def least_divergence(self, rounds: int) -> float | None:
        """Return how far the cells must be from each other for the next round to move anything."""
        return self._config.schedule.least_divergence(rounds)

    def is_waiting(self, fragment: int) -> bool:
        """Tell whether steps that were made since wait for a round of a fragment."""
        return self._ledger.tracker.is_waiting(fragment)

    def take(self, fragment: int) -> Snapshot:
        """Take what the last try was given, which has ended the round, and measure the steps' time anew."""
        self._ledger.timer.clear()
        return self.set_aside(fragment)

    def set_aside(self, fragment: int) -> Snapshot:
        """Take what the last try was given, of which it is not known yet whether it counts."""
        return self._ledger.tracker.snapshot(fragment)

    def commit(self, taken: Snapshot) -> None:
        """Note that what was taken counts."""
        self._ledger.tracker.commit(taken)

    def put_back(self, taken: Snapshot) -> None:
        """Let what was taken wait for the next round, since this one does not count."""
        self._ledger.tracker.rollback(taken)
