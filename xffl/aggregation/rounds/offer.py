"""What a training loop gives to a round, the local steps that wait for one, and what became of the round."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from xffl.aggregation.engine.decision.consensus import RoundInput, checked_weight
from xffl.aggregation.report import RoundReport
from xffl.aggregation.rounds.config import RoundConfig
from xffl.aggregation.rounds.loop_hooks import LoopHooks
from xffl.aggregation.steps.normalized_steps import NormalizedSteps
from xffl.errors import CheckpointError

__all__ = [
    "Averaged",
    "ContributionTracker",
    "Empty",
    "FinalOffer",
    "HandedOver",
    "Outcome",
    "Part",
    "RoundOffer",
    "Skipped",
    "Snapshot",
    "StepLedger",
    "StepTimer",
    "outcome_of",
]


class Snapshot(NamedTuple):
    """What one round takes in of a fragment."""

    fragment: int
    steps: int
    effort: float
    amount: float
    is_changed: bool

    @property
    def has_steps(self) -> bool:
        """Whether there are steps in it, whole ones or not."""
        return self.steps > 0 or self.is_changed


class ContributionTracker:
    """Steps and counts that wait for a round, for each fragment that rounds take in turn; local.

    Optimizers that step after the one whose steps are local steps change the model, too: that waits for a round beside
    the steps, and counts for something in it.
    """

    def __init__(self, fragments: int) -> None:
        self._steps = [0] * fragments
        self._efforts = [0.0] * fragments
        self._counts = [0.0] * fragments
        self._is_changed = [False] * fragments
        self._usual_count = 0.0  # of a local step, in the last round that took some in

    def note_change(self) -> None:
        """Note that an optimizer is about to change every fragment."""
        self._is_changed = [True] * len(self._is_changed)

    def add_effort(self, effort: float) -> None:
        """Note effective steps, without a local step."""
        for fragment in range(len(self._efforts)):
            self._efforts[fragment] += effort

    def add_step(self, effort: float = 1.0) -> None:
        """Note a local step, which changes every fragment, and its effective number."""
        for fragment in range(len(self._steps)):
            self._steps[fragment] += 1
            self._efforts[fragment] += effort

    def add_count(self, count: float) -> None:
        """Note what was counted (samples, tokens) since the last call."""
        for fragment in range(len(self._counts)):
            self._counts[fragment] += count

    def is_waiting(self, fragment: int) -> bool:
        """Tell whether steps wait for a round of a fragment, whole ones or not."""
        return self._steps[fragment] > 0 or self._is_changed[fragment]

    def effort(self, fragment: int) -> float:
        """Return the effective steps that wait for a fragment's round; 1 for a change that nobody measured."""
        return self._efforts[fragment] or float(self._is_changed[fragment])

    def count(self, fragment: int) -> float:
        """Return the count that waits for a fragment's round; a local step's where the samples were counted before."""
        if not self._counts[fragment] and not self._steps[fragment] and self._is_changed[fragment]:
            return self._usual_count
        return self._counts[fragment]

    def has_others(self, fragment: int) -> bool:
        """Tell whether steps wait for rounds of other fragments."""
        return any(self.is_waiting(other) for other in range(len(self._steps)) if other != fragment)

    def snapshot(self, fragment: int) -> Snapshot:
        """Take what waits for a fragment's round; either :meth:`commit` or :meth:`rollback` follows."""
        steps, effort, is_changed = self._steps[fragment], self._efforts[fragment], self._is_changed[fragment]
        # Counts are subtracted by the commit: a weight function that counts meanwhile adds to them.
        snapshot = Snapshot(fragment, steps=steps, effort=effort, amount=self._counts[fragment], is_changed=is_changed)
        self._steps[fragment], self._efforts[fragment], self._is_changed[fragment] = 0, 0.0, False
        return snapshot

    def commit(self, snapshot: Snapshot) -> None:
        """Subtract what a round has taken in."""
        self._counts[snapshot.fragment] -= snapshot.amount
        if snapshot.steps:
            self._usual_count = snapshot.amount / snapshot.steps

    def rollback(self, snapshot: Snapshot) -> None:
        """Let what a rejected or skipped round did not take in wait for the next."""
        self._steps[snapshot.fragment] += snapshot.steps
        self._efforts[snapshot.fragment] += snapshot.effort
        self._is_changed[snapshot.fragment] |= snapshot.is_changed

    def forget(self, fragments: Collection[int]) -> None:
        """Forget what waits for rounds of some fragments."""
        for fragment in fragments:
            self._steps[fragment] = 0
            self._efforts[fragment] = 0.0
            self._counts[fragment] = 0.0
            self._is_changed[fragment] = False

    def state_dict(self, doubted: Snapshot | None = None) -> dict[str, Any]:
        """Return what waits, with what an open snapshot has taken: a resumed run does not know of its round."""
        waiting = self
        if doubted is not None:
            waiting = copy.deepcopy(self)
            waiting.rollback(doubted)
        return {
            "steps": list(waiting._steps),
            "efforts": list(waiting._efforts),
            "counts": list(self._counts),
            "changed": list(waiting._is_changed),
            "usual_count": self._usual_count,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned; ``CheckpointError`` for another number of fragments."""
        if len(state["steps"]) != len(self._steps):
            raise CheckpointError(
                f"the saved steps are those of {len(state['steps'])} fragments, and there are {len(self._steps)}; "
                "resume with the same fragments"
            )
        self._steps = [int(steps) for steps in state["steps"]]
        self._efforts = [float(effort) for effort in state["efforts"]]
        self._counts = [float(count) for count in state["counts"]]
        # Older checkpoints know whole steps only.
        self._is_changed = [bool(one) for one in state.get("changed", [False] * len(self._steps))]
        self._usual_count = float(state.get("usual_count", 0.0))


class StepTimer:
    """Measure how long this rank's local steps take, without the rounds between them; local.

    What the caller does between two steps counts (loading, evaluating), since it makes others wait, too. Work that the
    device has still to do when a round comes is waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self.steps = 0
        """Local steps since the last :meth:`clear`."""
        self._since = time.perf_counter()

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a step since the last :meth:`clear`, up to the last pause; 0 without a step."""
        return self._seconds / self.steps if self.steps else 0.0

    def clear(self) -> None:
        """Forget the steps so far: a round has reported how long they took."""
        self._seconds = 0.0
        self.steps = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock for work that is not a local step."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # only this one: a round under way has its own
        self._seconds += time.perf_counter() - self._since
        try:
            yield
        finally:
            self._since = time.perf_counter()


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
