"""What a training loop gives to a round, the local steps that wait for one, and what became of the round."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from xffl.aggregation.engine.decision.consensus import RoundInput, checked_weight
from xffl.aggregation.report import RoundReport
from xffl.aggregation.rounds.config import RoundConfig
from xffl.aggregation.rounds.hooks import LoopHooks
from xffl.aggregation.steps.contributions import ContributionTracker, Snapshot, StepTimer
from xffl.aggregation.steps.normalized_steps import NormalizedSteps

__all__ = [
    "Averaged",
    "Empty",
    "FinalOffer",
    "HandedOver",
    "Outcome",
    "Part",
    "RoundOffer",
    "Skipped",
    "StepLedger",
    "outcome_of",
]


class StepLedger:
    """The local steps of this rank that wait for a round, what the caller counted, and how long a step takes; local."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], weigh: Callable[[], float] | None) -> None:
        self._model = model
        self._optimizers = optimizers
        self._weigh = weigh
        self.is_weighed = weigh is not None
        """Whether the caller counts samples or tokens."""
        self.clear(fragments=1)

    def clear(self, fragments: int) -> None:
        """Forget everything, and count for so many fragments from now on."""
        self.tracker = ContributionTracker(fragments)
        self.timer = StepTimer(next((one.device for one in self._model.parameters()), torch.device("cpu")))
        self._normalized_steps: NormalizedSteps | None = None

    @property
    def normalized_steps(self) -> NormalizedSteps:
        """The effective steps, which are followed once somebody has asked for them; else each local step counts 1."""
        if self._normalized_steps is None:
            self._normalized_steps = NormalizedSteps(self._optimizers)
        return self._normalized_steps

    def count(self, fragment: int) -> float:
        """Ask the caller for its count, and return what waits for the next round of a fragment."""
        self.tracker.add_count(checked_weight(self._weigh))
        return self.tracker.count(fragment)

    def add_rest(self) -> None:
        """Note what optimizers have stepped since the last local step."""
        if self._normalized_steps is not None:
            self.tracker.add_effort(self._normalized_steps.of_step())

    def forget_steps(self, fragments: Collection[int]) -> None:
        """Forget the steps of fragments that a round has replaced; those of other fragments wait on."""
        self.add_rest()
        if self._weigh is not None:
            self.tracker.add_count(checked_weight(self._weigh))
        self.tracker.forget(fragments)


class RoundOffer:
    """What this rank offers to a round: the steps that wait for one, and their weight; local.

    A backend calls :meth:`claim` before each try. Nothing leaves the ledger by that, so a try that fails needs no
    undoing. When the round has ended, or is in doubt, :meth:`take` removes its steps from the ledger. What was removed
    is committed if the round counts, and put back if it does not.
    """

    def __init__(
        self,
        ledger: StepLedger,
        config: RoundConfig,
        hooks: LoopHooks,
        check_counted: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._config = config
        self.hooks = hooks
        self.check_counted = check_counted
        """Raise StateError where the model has changed and no step was counted; collective over the world."""

    def claim(self, fragment: int) -> RoundInput:
        """Return what this rank gives to the next try of a fragment's round; the weight is a function to ask."""
        tracker, client = self._ledger.tracker, self._config.client
        return RoundInput(
            weight=(lambda: self._ledger.count(fragment)) if self._ledger.is_weighed else None,
            is_absent=not tracker.is_waiting(fragment),
            steps=tracker.effort(fragment),
            seconds=self._ledger.timer.step_seconds,
            prepare=None if client is None else client.before_round,
        )

    def is_waiting(self, fragment: int) -> bool:
        """Tell whether newer steps wait for a round of a fragment."""
        return self._ledger.tracker.is_waiting(fragment)

    def take(self, fragment: int, *, has_ended: bool = True) -> Snapshot:
        """Remove the steps that the last try was given; where the round has ended, their time is measured anew."""
        if has_ended:
            self._ledger.timer.clear()
        return self._ledger.tracker.snapshot(fragment)

    def commit(self, taken: Snapshot) -> None:
        """Note that the round with these steps counts."""
        self._ledger.tracker.commit(taken)

    def put_back(self, taken: Snapshot) -> None:
        """Let these steps wait for the next round, because this one does not count."""
        self._ledger.tracker.rollback(taken)


class FinalOffer(RoundOffer):
    """What a rank offers that has made its last step: it has finished once nothing waits for other fragments.

    With ``gives_up`` it has finished whatever waits.
    """

    def __init__(
        self,
        ledger: StepLedger,
        config: RoundConfig,
        hooks: LoopHooks,
        check_counted: Callable[[], None],
        *,
        gives_up: bool,
    ) -> None:
        super().__init__(ledger, config, hooks, check_counted)
        self._gives_up = gives_up

    def claim(self, fragment: int) -> RoundInput:
        """Return what this rank gives to the next try of a fragment's round, and whether it has finished then."""
        is_finished = self._gives_up or not self._ledger.tracker.has_others(fragment)
        return replace(super().claim(fragment), is_finished=is_finished)


class Part(Enum):
    """What this cell did in the round of a fragment."""

    GAVE = "gave"
    """Its values are in what was agreed on."""
    TOOK_OVER = "took over"
    """What was agreed on has replaced its values, whatever steps it had made."""
    NEITHER = "neither"
    """It got what was agreed on, and had nothing to give, or was left out for values that are not finite."""


@dataclass(frozen=True)
class Ended:
    """A round that has ended, as far as this cell is concerned.

    :param report: What the round did; ``None`` where there was none that all cells know of.
    :param taken: What was taken of this rank's local steps for it; there where a report is.
    :param parts: What this cell did in it, for each fragment that it was about.
    """

    counts: ClassVar[bool] = True
    """Whether the round counts, and the steps that it has taken are in the model."""
    is_written: ClassVar[bool] = True
    """Whether the model holds other values now, so that clients have to look at it."""
    has_values: ClassVar[bool] = True
    """Whether cells gave values, and told of their steps: what schedules and clients go by."""

    report: RoundReport | None
    taken: Snapshot | None = None
    parts: Mapping[int, Part] = field(default_factory=dict)

    @property
    def taken_over(self) -> frozenset[int]:
        """The fragments of this cell's model that were replaced, so that its steps since are gone."""
        return frozenset(fragment for fragment, part in self.parts.items() if part is Part.TOOK_OVER)

    @property
    def is_last(self) -> bool:
        """Whether all ranks have finished, so that no round follows."""
        return self.report is None or self.report.is_last


class Averaged(Ended):
    """The cells' values were combined, and the result stands in the model."""


class HandedOver(Ended):
    """No cell had anything to give, and the model of one has replaced that of others."""

    has_values = False


class Empty(Ended):
    """No cell had anything to give, so nothing moved; without a report all have finished, and there was no round."""

    is_written = False
    has_values = False


class Skipped(Ended):
    """The cells were so close to each other that nothing moved; the round does not count, and the steps wait on."""

    counts = False
    is_written = False


Outcome = Averaged | HandedOver | Empty | Skipped
"""What became of a round: exactly one of these."""


def outcome_of(report: RoundReport, taken: Snapshot, cell: int, *, is_absent: bool) -> Averaged | Empty | Skipped:
    """Return what a report says became of a round to which this cell was to give what was taken."""
    if report.is_skipped:
        return Skipped(report, taken, {report.fragment: Part.NEITHER})
    if not any(report.weights):
        return Empty(report, taken, {report.fragment: Part.NEITHER})
    is_left_out = is_absent or cell in report.dropped
    return Averaged(report, taken, {report.fragment: Part.NEITHER if is_left_out else Part.GAVE})
