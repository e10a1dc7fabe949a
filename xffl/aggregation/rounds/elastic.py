"""Rounds of an elastic federation: cells that are jobs of their own, which may be lost, come back, or come late."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from xffl.aggregation.engine.decision.consensus import RoundBroken, RoundInput
from xffl.aggregation.federations.elastic import ElasticAggregator
from xffl.aggregation.federations.own_ranks import compare_steps
from xffl.aggregation.report import RoundReport
from xffl.aggregation.rounds.config import RoundConfig, aggregator_options
from xffl.aggregation.rounds.delayed import StartedRound
from xffl.aggregation.rounds.network import AveragingRounds
from xffl.aggregation.rounds.offer import Averaged, Empty, HandedOver, Outcome, Part, RoundOffer, Snapshot, outcome_of
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import ConfigError, MeetingLeft, StateError, XfflError

__all__ = ["ElasticRounds"]


class ElasticRounds(AveragingRounds[ElasticAggregator]):
    """Rounds of cells that come and go: met for, and tried until one is taken.

    :class:`~xffl.aggregation.federations.elastic.ElasticAggregator` makes each try.

    A round that broke while this cell had voted for it is in doubt until the journal tells whether its record stands.
    What it took of the local steps is kept aside until then, and counts if it does.

    :param model: The model that trains.
    :param state: The state of this cell's world, which was joined with ``elastic``.
    :param config: What the rounds are like.
    """

    meets_others = True
    may_join = True
    may_average = True

    def __init__(self, model: nn.Module, state: DistributedState, config: RoundConfig) -> None:
        super().__init__(None)
        self._model = model
        self._state = state
        self._cell = state.cell
        self._config = config
        self.needs_join = False
        self.doubted: Snapshot | None = None

    @property
    def lineage(self) -> str:
        """Digest of these rounds: cells of one lineage hold the same model."""
        return self.aggregator.lineage

    @property
    def total_weight(self) -> float:
        """Sum of the weights of all cells in the rounds behind this cell's model, also those that it was not in."""
        return self._weight_taken if self._aggregator is None else float(self._aggregator.total_weight)

    @property
    def may_resume(self) -> bool:
        """Whether this cell was in the run before, and holds no model of it that it could join with."""
        return self.aggregator.may_resume

    def open(self) -> None:
        """Make the aggregator, where there is none or it was closed; the other cells are met later, by :meth:`join`."""
        self.discard()  # a round may be under way that an error has left in the block before
        if self._aggregator is None or self._aggregator.is_closed:
            # A second block goes on where the first has ended.
            saved = None
            if self._aggregator is not None:
                saved = self._aggregator.state_dict()
                self._aggregator.give_back_groups()
            options = aggregator_options(self._config, self._model, is_first=self._aggregator is None)
            if "levels" in options:
                raise ConfigError("an elastic federation has no levels; leave levels out")
            self._aggregator = ElasticAggregator(self._model, self._state, **options)
            if saved is not None:
                self._aggregator.load_state_dict(saved)
        self._state.activity.note_round()  # a cell that comes and goes may be in none, which is no mistake
        self.needs_join = True

    def join(self, offer: RoundOffer) -> Iterator[Outcome]:
        """Take over the model of the cells that are there, or give them this one's; collective over the cell.

        Waits for the other cells' next round. A cell that holds the newest model gives the steps that it has made
        since, as where its checkpoint was saved some steps after that round; only then there is a report.
        """
        self.needs_join = False
        aggregator = self.aggregator
        gives_steps = self.doubted is not None  # to a round in doubt, when this cell was asked to stop last time
        is_compared = False
        while True:
            try:
                if gives_steps:
                    yield from self._end_doubt(offer)
                elif (doubted := aggregator.end_doubt(offer.hooks.is_stopping)) is not None:
                    yield self._joined(doubted)
                given = offer.claim(aggregator.next_fragment)
                if not is_compared:
                    compare_steps(given.steps, is_waiting=not given.is_absent)
                    is_compared = True
                aggregator.open(is_stopping=offer.hooks.is_stopping)
            except MeetingLeft:
                self.needs_join = True
                if offer.hooks.before_final_rounds is not None:
                    offer.hooks.before_final_rounds()
                raise
            if aggregator.is_founding:
                given = RoundInput(prepare=given.prepare)
            gives_steps = not (aggregator.is_founding or aggregator.is_behind or given.is_absent)
            try:
                report = aggregator.participate(given)
            except RoundBroken:
                if gives_steps:
                    self._set_aside(offer)
                continue
            if report is None or not gives_steps:
                yield self._joined(report)
            else:
                yield self._end(report, offer.take(report.fragment), is_absent=False)
            return

    def _joined(self, report: RoundReport | None) -> Averaged | HandedOver | Empty:
        """Return what became of a round that brought this cell up to date, of which the loop is not told."""
        parts = self._parts_of_model()
        if report is not None and any(report.weights):
            return Averaged(None, parts=parts)
        return HandedOver(None, parts=parts) if parts else Empty(None)

    def round(self, offer: RoundOffer) -> Iterator[Outcome]:
        """Make a round with the cells that are there, again until one is taken; collective over the cell.

        Yields what became of a doubt first. Where this cell is asked to stop while it waits for others there is no
        round: its steps wait for the next one, also in a checkpoint.
        """
        aggregator = self.aggregator
        least = self._config.schedule.least_divergence(aggregator.rounds)
        while True:
            try:
                yield from self._end_doubt(offer)
                given = offer.claim(aggregator.next_fragment)
                self._meet(offer, is_finished=given.is_finished)
            except MeetingLeft:
                return
            try:
                report = aggregator.participate(given, least_divergence=least)
            except RoundBroken:
                self._set_aside(offer)
                continue
            if report is None:
                yield Empty(None)
            else:
                # Of the fragment that the epoch says: this cell may have been behind.
                yield self._end(report, offer.take(report.fragment), is_absent=given.is_absent)
            return

    def start(self, offer: RoundOffer) -> Iterator[Outcome]:
        """Meet the other cells and start a delayed round; a cell that is behind takes the model over in its place."""
        aggregator = self.aggregator
        try:
            yield from self._end_doubt(offer)
            self._meet(offer, is_finished=False)
        except MeetingLeft:
            return
        if aggregator.is_behind:
            yield from self._catch_up(offer)
            return
        fragment = aggregator.next_fragment
        given = offer.claim(fragment)
        pending = aggregator.aggregate_async(
            given.weight, alpha=self._config.alpha, steps=given.steps, seconds=given.seconds
        )
        taken = offer.take(fragment)
        self._started = StartedRound(pending=pending, offer=offer, taken=taken, is_absent=given.is_absent)

    def settle(self) -> Iterator[Outcome]:
        """Merge the round under way, if any; the steps of one that broke wait for the next, or until the doubt ends."""
        started = self._started
        if started is None:
            return
        report: RoundReport | None = None
        try:
            report = self._merge(started)
        except RoundBroken:
            self._keep_or_put_back(started.offer, started.taken)
        except XfflError:
            started.put_back()
            raise
        if report is not None:
            yield self._end(report, started.taken, is_absent=started.is_absent)

    def discard(self) -> None:
        """Drop the round under way, if any, and put back what it had taken; forget one that is in doubt."""
        started = self._started
        if started is not None or self.doubted is not None:
            self.aggregator.discard()  # waits; interrupted, the round is still under way
            if started is not None:
                started.put_back()
            self._started = None
        self.doubted = None

    def close(self, error: BaseException | None) -> None:
        """Leave the other cells, which are not to wait for this one; without an error collective over the cell.

        After an error the groups inside the cell stay until the next block.
        """
        if self._aggregator is None:
            return
        self._aggregator.close()
        if error is None:
            self._aggregator.give_back_groups()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned; the cell joins the others anew."""
        super().load_state_dict(state)
        self.doubted = None
        self.needs_join = True

    def _meet(self, offer: RoundOffer, *, is_finished: bool) -> None:
        """Meet the other cells for a round."""
        hooks = offer.hooks
        self.aggregator.open(
            is_finished=is_finished,
            told=None if hooks.tell is None else hooks.tell(),
            is_stopping=hooks.is_stopping,
        )

    def _end_doubt(self, offer: RoundOffer) -> Iterator[Outcome]:
        """End a doubt: the round before was taken, or there was none."""
        report = self.aggregator.end_doubt(offer.hooks.is_stopping)
        taken = self.doubted
        self.doubted = None
        if report is not None:
            if taken is None:
                raise StateError("a round of which nothing is kept was in doubt; load a checkpoint before going on")
            yield self._end(report, taken, is_absent=False)
        elif taken is not None:
            offer.put_back(taken)

    def _catch_up(self, offer: RoundOffer) -> Iterator[Outcome]:
        """Take the model over in a round in which this cell counts 0."""
        try:
            report = self.aggregator.participate(RoundInput(is_absent=True))
        except RoundBroken:
            self._set_aside(offer)
            return
        if report is not None:
            yield self._end(report, offer.take(report.fragment, has_ended=False), is_absent=True)

    def _set_aside(self, offer: RoundOffer) -> None:
        """Let the steps wait that a broken round had, or keep them aside while it is in doubt."""
        self._keep_or_put_back(offer, offer.take(self.next_fragment, has_ended=False))

    def _keep_or_put_back(self, offer: RoundOffer, taken: Snapshot) -> None:
        if self.aggregator.is_in_doubt:
            self.doubted = taken
        else:
            offer.put_back(taken)

    def _end(self, report: RoundReport, taken: Snapshot, *, is_absent: bool) -> Outcome:
        """Return what became of a round that has ended."""
        self._weight_taken += report.weight_taken
        outcome = outcome_of(report, taken, self._cell, is_absent=is_absent)
        parts = self._parts_of_model()
        if not parts:
            return outcome
        if not any(report.weights):
            return HandedOver(report, taken, parts)
        return replace(outcome, parts={**outcome.parts, **parts})

    def _parts_of_model(self) -> dict[int, Part]:
        """Return what this cell has taken over in the last round, or that others have taken its own model over."""
        aggregator = self.aggregator
        if aggregator.has_handed_over:
            return dict.fromkeys(range(self.fragments), Part.GAVE)
        return dict.fromkeys(sorted(aggregator.taken_over), Part.TOOK_OVER)
