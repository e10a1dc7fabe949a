"""The moments of the cells' optimizers: they move in some rounds beside their parameters, or start anew behind one.

What moves in a round is what the plan has for its fragment. Moments have numbers of their own behind those of the
fragments, moment by moment, and this stage puts those that are due into the plan before a round begins. All ranks know
which are: it follows from the round's number, and from whether cells are behind, which get all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, cast

import torch

from xffl.aggregation.algorithms.moments import Moments
from xffl.aggregation.engine.buffers import ModelCopy
from xffl.aggregation.engine.exchange import Exchange, RoundRun
from xffl.aggregation.engine.planning.tensors import NUMBERS, TensorInfo, TensorsBeside, kinds_of_moments
from xffl.aggregation.engine.planning.transfers import Bucket, FragmentPlan, GroupTransfer, RoundContext
from xffl.aggregation.engine.stages.stage import PlanStage
from xffl.errors import ConfigError

__all__ = ["MomentsOfOptimizers", "StepState", "make_moments"]


class StepState(Protocol):
    """What optimizers keep beside parameters."""

    @property
    def asked(self) -> Moments:
        """What rounds do with it."""

    def refresh(self) -> None:
        """Look it up anew before it is read."""

    def take_numbers(self) -> None:
        """Take the counts of steps over that a round has brought."""

    def restart(self, parameters: Sequence[torch.Tensor]) -> None:
        """Start that of some parameters anew."""


class MomentsOfOptimizers(PlanStage):
    """Puts moments that are due into the plan of a round, or starts them anew behind it."""

    def __init__(
        self,
        state: StepState,
        exchange: Exchange,
        moving: Sequence[TensorInfo],
        *,
        fragments: int,
        rounds: Callable[[], int],
    ) -> None:
        self._state = state
        self._exchange = exchange
        self._kinds = kinds_of_moments(moving)
        self._fragments = fragments
        self._rounds = rounds
        self._plans = dict(exchange.plans)
        self._fragment = 0
        self._has_cells_behind = False
        self._context: RoundContext | None = None

    def note_cells_behind(self, is_behind: bool) -> None:
        """Note whether the next round brings cells up to date."""
        self._has_cells_behind = is_behind

    def open(self, fragment: int, *, is_weighed: bool) -> None:
        """Note which part of the model moves."""
        self._fragment = fragment

    def read(self, *, has_steps: bool) -> None:
        """Put what is due into the plan."""
        self._context = None
        if self._state.asked.mode != "average":
            return
        self._state.refresh()
        self._exchange.plans[self._fragment] = _joined([self._plans.get(number) for number in self._due()])

    def begin(self, fragment: int, copy: ModelCopy) -> ModelCopy:
        """Refuse to keep steps of second moments: what a cell's have lost since may be more than the mean has."""
        if copy is ModelCopy.KEPT and self._state.asked.mode == "average":
            raise ConfigError(
                "moments='average' with a delay needs alpha: mean + (local - copy) may make a second moment negative; "
                "give alpha, such as 0.5"
            )
        return copy

    def write(self, run: RoundRun, context: RoundContext) -> Iterator[tuple[GroupTransfer, Bucket, torch.Tensor]]:
        """Note who counts in the round; moments are written as what was collected.

        Optimizers that bind a new tensor in each step have others by now, if steps were made during the round.
        """
        self._context = context
        if self._state.asked.mode == "average":
            self._state.refresh()
            self._exchange.layout.look_up()
        return iter(())

    def commit(self, run: RoundRun) -> None:
        """Start moments anew, or take over the counts of steps that go with those of other cells."""
        assert self._context is not None, "noted before"
        cell = run.link.cell
        was_behind = self._has_cells_behind and not self._context.weights[cell] and self._context.source != cell
        if self._state.asked.mode == "reset":
            if was_behind or self._is_due(self._state.asked.every):
                fragments = range(self._fragments) if was_behind else (run.fragment,)
                moving = self._exchange.layout.moving
                self._state.restart([tensor for fragment in fragments for tensor in moving(fragment)])
        elif was_behind:
            self._state.take_numbers()

    def _is_due(self, period: int) -> bool:
        """Tell whether the round under way is one in so many of its fragment."""
        return (self._rounds() // self._fragments + 1) % period == 0

    def _due(self) -> list[int]:
        """Return the numbers of what moves in the round: its fragment, and moments."""
        numbers = [self._fragment]
        for place, kind in enumerate(self._kinds, 1):
            first = place * self._fragments
            if self._has_cells_behind:
                numbers += range(first, first + self._fragments)
            elif kind != NUMBERS and self._is_due(self._state.asked.period(kind)):
                numbers.append(first + self._fragment)
        return numbers


def make_moments(
    beside: TensorsBeside,
    exchange: Exchange,
    moving: Sequence[TensorInfo],
    *,
    fragments: int,
    rounds: Callable[[], int],
) -> MomentsOfOptimizers:
    """Return the stage of what lies beside the parameters of an exchange."""
    return MomentsOfOptimizers(cast(StepState, beside), exchange, moving, fragments=fragments, rounds=rounds)


def _joined(plans: Sequence[FragmentPlan | None]) -> FragmentPlan:
    """Return the plan of what several say, one after the other."""
    there = [plan for plan in plans if plan is not None]
    return FragmentPlan(
        tuple(transfer for plan in there for transfer in plan.transfers),
        tuple(run for plan in there for run in plan.runs),
        tuple(bucket for plan in there for bucket in plan.buckets),
    )
