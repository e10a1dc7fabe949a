"""What rounds of cells that reach each other have in common: an aggregator, and one delayed round at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from xffl.aggregation.report import RoundReport
from xffl.aggregation.rounds.delayed import StartedRound
from xffl.errors import CheckpointError, StateError

if TYPE_CHECKING:
    from xffl.aggregation.aggregator import Aggregator
    from xffl.aggregation.federations.elastic import ElasticAggregator
    from xffl.aggregation.federations.hierarchical import Levels

__all__ = ["AveragingRounds"]

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
