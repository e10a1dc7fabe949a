"""What makes the rounds of a training loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from xffl.aggregation.rounds.offer import Outcome, RoundOffer, Snapshot

if TYPE_CHECKING:
    from xffl.aggregation.aggregator import Aggregator
    from xffl.aggregation.federations.elastic import ElasticAggregator
    from xffl.aggregation.federations.hierarchical import Levels

__all__ = ["RoundBackend"]


class RoundBackend(Protocol):
    """Makes the rounds of one :class:`xffl.FederatedScaling`. Collective over the ranks that make them, if not local.

    Methods that return outcomes may be generators: the caller iterates to the end, and accounts for each outcome before
    it asks for the next. So the report of a round that was in doubt is passed on while the model still is that round's.
    """

    @property
    def meets_others(self) -> bool:
        """Whether rounds take place between local steps, with cells that run at the same time."""

    @property
    def may_average(self) -> bool:
        """Whether there may be other cells, with whose weights those of this one are averaged."""

    @property
    def may_join(self) -> bool:
        """Whether there may be other cells to join, whose model takes the place of this one's."""

    @property
    def needs_join(self) -> bool:
        """Whether :meth:`join` has to be called before the next step."""

    @property
    def may_resume(self) -> bool:
        """Whether this cell may have a checkpoint of the run that it has not loaded yet."""

    @property
    def aggregator(self) -> Aggregator | Levels | ElasticAggregator:
        """What averages the model; StateError before :meth:`open` where none was given."""

    @property
    def rounds(self) -> int:
        """Number of rounds that the model has behind it."""

    @property
    def lineage(self) -> str:
        """Digest of these rounds in an elastic federation; else empty."""

    @property
    def fragments(self) -> int:
        """Parts of the model that rounds move in turn."""

    @property
    def next_fragment(self) -> int:
        """The part that the next round moves."""

    @property
    def total_weight(self) -> float:
        """Sum of the weights that all cells had in all rounds so far."""

    @property
    def doubted(self) -> Snapshot | None:
        """The steps of this rank in a round that is in doubt."""

    @property
    def is_under_way(self) -> bool:
        """Whether a delayed round was started and is not merged."""

    @property
    def can_go_on(self) -> bool:
        """Whether another round may follow a rejected one."""

    def open(self) -> None:
        """Prepare for rounds of the model as it is set up now, and drop a round that is still under way."""

    def join(self, offer: RoundOffer) -> Iterable[Outcome]:
        """Take over the model of the cells that are there already, or give them this one's, in one round or several.

        There is a report only of a round to which this cell gave steps.
        """

    def round(self, offer: RoundOffer) -> Iterable[Outcome]:
        """Make a round. First comes what became of an earlier one that was in doubt, then what became of this one.

        Nothing comes of this one if the cell was asked to stop while it waited for other cells.
        """

    def start(self, offer: RoundOffer) -> Iterable[Outcome]:
        """Start a delayed round. What comes has ended before it, or took its place, because this cell was behind."""

    def settle(self) -> Iterable[Outcome]:
        """Merge the delayed round, if one is under way. Nothing comes of one that was lost and is to be repeated."""

    def discard(self) -> None:
        """Drop the round under way, if any, and put back what it had taken."""

    def close(self, error: BaseException | None) -> None:
        """Give back what :meth:`open` has made; local where an error has ended the loop."""

    def state_dict(self) -> dict[str, Any]:
        """Return ``aggregator``, ``start`` and ``total_weight``: what a resumed run needs; local."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned, and drop what is under way or in doubt."""

    def continues(self, state: Mapping[str, Any]) -> bool:
        """Tell whether the steps that waited when a state was saved still wait; local."""
