"""Rounds of one job whose cells a network joins, and what they have in common with those of an elastic federation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import nn

from xffl.aggregation.aggregator import Aggregator
from xffl.aggregation.federations.hierarchical import Levels
from xffl.aggregation.report import RoundReport
from xffl.aggregation.rounds.config import RoundConfig, aggregator_options
from xffl.aggregation.rounds.delayed import StartedRound
from xffl.aggregation.rounds.offer import Empty, Outcome, RoundOffer, outcome_of
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import CheckpointError, StateError, XfflError

if TYPE_CHECKING:
    from xffl.aggregation.federations.elastic import ElasticAggregator

__all__ = ["AveragingRounds", "NetworkRounds"]


Held = TypeVar("Held", bound="Aggregator | Levels | ElasticAggregator")


class AveragingRounds(Generic[Held]):
    """Rounds of an aggregator, which may be made only when the block is entered.

    :param aggregator: The aggregator; ``None`` where it is made later.
    """

    def __init__(self, aggregator: Held | None) -> None:
        self._aggregator = aggregator
        self._started: StartedRound | None = None
        self._weight_taken = 0.0  # over all fragments, in the rounds that this cell has seen

    @property
    def aggregator(self) -> Held:
        """The aggregator; StateError before it is made."""
        if self._aggregator is None:
            raise StateError("the aggregator is made on entering the with block; enter it first")
        return self._aggregator

    @property
    def rounds(self) -> int:
        """Number of rounds that this cell's model has behind it."""
        return 0 if self._aggregator is None else self._aggregator.rounds

    @property
    def fragments(self) -> int:
        """Parts of the model that rounds move in turn."""
        return 1 if self._aggregator is None else self._aggregator.fragments

    @property
    def next_fragment(self) -> int:
        """The part that the next round moves, if this cell is not behind."""
        return self.aggregator.next_fragment

    @property
    def is_under_way(self) -> bool:
        """Whether a delayed round was started and is not merged."""
        return self._started is not None

    @property
    def can_go_on(self) -> bool:
        """Whether another round may follow a rejected one: the model is whole, and there are cells for it."""
        return self.aggregator.can_go_on

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs; local, each rank saves its own."""
        return {"aggregator": self.aggregator.state_dict(), "start": None, "total_weight": self._weight_taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        if state["aggregator"] is None:
            raise CheckpointError(
                "the state was saved in a job of other rounds (over files, or over a network); resume with the same"
            )
        self.aggregator.load_state_dict(state["aggregator"])  # drops a round under way, and a doubt
        self._started = None
        self._weight_taken = float(state.get("total_weight", 0.0))  # older checkpoints do not tell

    def continues(self, state: Mapping[str, Any]) -> bool:
        """Tell that steps that waited still wait."""
        return True

    def _merge(self, started: StartedRound) -> RoundReport:
        """Merge the round under way; an interrupted wait is taken up again by another call."""
        try:
            return started.merge()
        finally:
            if self.aggregator.under_way is not started.pending:
                self._started = None


class NetworkRounds(AveragingRounds[Aggregator | Levels]):
    """Rounds of an :class:`~xffl.Aggregator`, or of :class:`~xffl.aggregation.Levels`, which is given or made here.

    :param model: The model that trains.
    :param state: The state that describes the federation.
    :param config: What the rounds are like.
    :param aggregator: An aggregator of the caller's own, which is not closed here; ``None`` to make one.
    """

    meets_others = True
    may_join = False
    needs_join = False
    may_resume = False
    lineage = ""
    doubted = None

    def __init__(
        self, model: nn.Module, state: DistributedState, config: RoundConfig, aggregator: Aggregator | Levels | None
    ) -> None:
        super().__init__(aggregator)
        self._model = model
        self._state = state
        self._cell = state.cell
        self._config = config
        self._is_own = aggregator is None
        self.may_average = state.cells > 1

    @property
    def total_weight(self) -> float:
        """Sum of the weights of all cells, of which a round of a fragment counts for its part of the model."""
        return self._weight_taken / self.fragments

    def open(self) -> None:
        """Make the aggregator where it belongs to the block, and drop a round that an error has left under way."""
        if self._aggregator is None or (self._is_own and self._aggregator.is_closed):
            # A second block goes on where the first has ended.
            saved = None if self._aggregator is None else self._aggregator.state_dict()
            options = aggregator_options(self._config, self._model, is_first=self._aggregator is None)
            kind = Levels if "levels" in options else Aggregator
            self._aggregator = kind(self._model, self._state, **options)
            if saved is not None:
                self._aggregator.load_state_dict(saved)
        self.discard()

    def join(self, offer: RoundOffer) -> tuple[Outcome, ...]:
        """Do nothing: all cells have begun with the same model."""
        return ()

    def round(self, offer: RoundOffer) -> tuple[Outcome, ...]:
        """Make a round, and return what became of it; collective over the world."""
        aggregator = self.aggregator
        given = offer.claim(aggregator.next_fragment)
        least = self._config.schedule.least_divergence(aggregator.rounds)
        report = aggregator.participate(given, least_divergence=least)
        if report is None:
            return (Empty(None),)
        self._weight_taken += report.weight_taken
        return (outcome_of(report, offer.take(report.fragment), self._cell, is_absent=given.is_absent),)

    def start(self, offer: RoundOffer) -> tuple[Outcome, ...]:
        """Start a delayed round; nothing ends before it."""
        aggregator = self.aggregator
        given = offer.claim(aggregator.next_fragment)
        pending = aggregator.aggregate_async(
            given.weight, alpha=self._config.alpha, steps=given.steps, seconds=given.seconds
        )
        taken = offer.take(aggregator.next_fragment)
        self._started = StartedRound(pending=pending, offer=offer, taken=taken, is_absent=given.is_absent)
        return ()

    def settle(self) -> tuple[Outcome, ...]:
        """Merge the round under way, if any; a rejected one raises, and its steps wait for the next."""
        started = self._started
        if started is None:
            return ()
        try:
            report = self._merge(started)
        except XfflError:
            started.put_back()
            raise
        self._weight_taken += report.weight_taken
        return (outcome_of(report, started.taken, self._cell, is_absent=started.is_absent),)

    def discard(self) -> None:
        """Drop the round under way, if any, and put back what it had taken."""
        started = self._started
        if started is not None:
            self.aggregator.discard()  # waits; interrupted, the round is still under way
            started.put_back()
            self._started = None

    def close(self, error: BaseException | None) -> None:
        """Close the aggregator that was made here; nothing where an error has ended the loop, in which nobody waits."""
        if error is None and self._is_own:
            self.aggregator.close()
