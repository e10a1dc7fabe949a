"""The votes of a round between worlds: its record has to stand, and what became of it may be in doubt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace

from xffl.aggregation.engine.alike.unequal_replicas import ReplicasDiffer
from xffl.aggregation.engine.decision.consensus import (
    AgreedRound,
    Exchanged,
    PreparedRound,
    RoundBroken,
    RoundCoordinator,
    RoundPhase,
    cell_weights,
)
from xffl.aggregation.engine.decision.fitting_cells import AcceptedTraits, find_failed_cells, find_faulty_cells
from xffl.aggregation.engine.decision.injected_faults import FaultyVoteTree
from xffl.aggregation.engine.decision.left_exchange import LeftExchange
from xffl.aggregation.engine.exchange import Exchange, RoundRun
from xffl.aggregation.engine.groups import RoundScope
from xffl.aggregation.engine.planning.transfers import RoundContext
from xffl.aggregation.engine.stages.agreed import AgreedModel
from xffl.aggregation.engine.stages.hand_over import HandOver
from xffl.aggregation.engine.voting.votes import RoundStatus, Seal, VotePhase, VoteTree
from xffl.aggregation.options import Options
from xffl.aggregation.report import RoundProfile
from xffl.compat.pytorch import is_out_of_memory
from xffl.costs import MOST_IN_TABLES
from xffl.distributed.agreement.consistency import barrier
from xffl.distributed.failures.faults import is_planned
from xffl.distributed.several_worlds.cross_world import CrossWorldGroup
from xffl.errors import ConfigError, RoundError, XfflError

__all__ = ["CellFailed", "ElasticCoordinator", "RankFailed", "RoundInDoubt", "is_lost_contact"]


class RoundInDoubt(RoundBroken):
    """This rank voted to commit and lost contact before it saw the result.

    ``outcome`` is what it voted for; :meth:`xffl.Aggregator.resolve` writes it, once it is known to be taken.
    """

    def __init__(self, text: str, outcome: AgreedRound) -> None:
        super().__init__(text)
        self.outcome = outcome


class CellFailed(RoundError):
    """A round failed on ranks of this cell, as all cells know: it ends by that, and the others go on."""


class RankFailed(RoundError):
    """A round failed on this rank alone, and the others could not hear why: its cell ends by that."""


def is_lost_contact(error: BaseException) -> bool:
    """Tell whether an error may say that another rank is lost, and not that something is wrong with this one."""
    if isinstance(error, XfflError):
        return isinstance(error, RoundBroken)
    return isinstance(error, RuntimeError) and not is_out_of_memory(error)


class ElasticCoordinator(RoundCoordinator):
    """The votes of a round between cells that are worlds of their own, and may be lost at any time.

    ==========================  =======================================================================================
    what happens                what follows, other than where all ranks are in one world
    ==========================  =======================================================================================
    the second vote breaks      after this rank's yes the round is in doubt: its values wait until it is known what
                                became of it, and nothing is torn
    all say yes                 all ask in a third vote for the round's record: the round is committed if it stands, all
                                keep their weights if another one does, and the round is in doubt if nobody knows
    nobody gives anything       all take over the model of the ``source``, if one is given, which is no step of a
                                server; without one the record has to stand all the same, also where all have finished
    ranks weigh the result      they tell each other of it in a vote before the second one, since a round in doubt is
                                written without having heard the second one
    a cell is at fault          a rank of it cannot take part, or fails while values are exchanged; its ranks do not go
                                together with each other, or the cell comes with something else than others whose rounds
                                were taken: it raises the reason, and the others repeat the round without it
    ==========================  =======================================================================================

    :param exchange: What this rank exchanges.
    :param scope: The ranks that vote.
    :param options: The options of the rounds, with ``atomic``.
    :param number: What tells the aggregator from all others that these ranks have; the same on all of them.
    :param seal: Called on each rank after all have voted for a round, with the cells' weights. One rank publishes the
        record and returns what stands, the others ``NOT_ASKED``.
    :param accepted: What this rank has said in its rounds before, with whatever cells.
    """

    def __init__(
        self,
        exchange: Exchange,
        scope: RoundScope,
        options: Options,
        number: int,
        *,
        seal: Callable[[tuple[float, ...]], Seal],
        accepted: AcceptedTraits | None = None,
    ) -> None:
        if is_planned() and scope.topology.world_size > MOST_IN_TABLES:
            raise ConfigError(f"faults of votes (XFFL_FAULT) need at most {MOST_IN_TABLES} ranks in all cells")
        super().__init__(exchange, scope, options, number, vote_tree=FaultyVoteTree if is_planned() else VoteTree)
        self._seal = seal
        self._accepted = AcceptedTraits() if accepted is None else accepted
        self._cell = scope.topology.cell_of(scope.rank)
        """As the round counts it"""
        lone = scope.state.lone_cell
        self._number_of_cell = self._cell if lone is None else lone[0]
        self._first = scope.first
        agreed = exchange.find(AgreedModel)
        self._hand_over = HandOver(None if agreed is None else agreed.global_model)

    def _open(self, prepared: PreparedRound) -> list[RoundStatus]:
        """Vote on whether there is a round, with whether others have accepted before what this rank says."""
        return super()._open(replace(prepared, status=self._accepted.mark(prepared.status)))

    def _compare(self, statuses: Sequence[RoundStatus], error: XfflError | None) -> None:
        """Raise on all ranks where some cannot take part or do not go together; RoundBroken where other cells' do."""
        faulty: frozenset[int]
        wrong: XfflError
        try:
            super()._compare(statuses, error)
            cell_weights(statuses, self._topology)
            return
        except RoundBroken:
            raise
        except ReplicasDiffer as unequal:
            faulty = unequal.cells
            wrong = unequal
            if self._cell in faulty:
                wrong = unequal.of_cell(self._cell, number=self._number_of_cell, first=self._first)
        except XfflError as reason:
            faulty = find_faulty_cells(statuses, self._topology)
            wrong = reason
        try:
            if faulty:
                self._await_heard()
                if self._cell not in faulty:
                    # With its cause, whose traceback is dropped with its own: it refers to groups that are given back.
                    raise RoundBroken(f"another cell cannot take part: {wrong}") from wrong
            raise wrong
        finally:
            del wrong  # its traceback refers to this frame

    def _await_heard(self) -> None:
        """Wait until all ranks have heard what is wrong: who repeats the round closes its connections at once."""
        with suppress(RuntimeError):
            barrier(self._round_groups.world)

    def _decide(
        self, prepared: PreparedRound, statuses: Sequence[RoundStatus], least_divergence: float | None
    ) -> AgreedRound:
        """Return what follows from the first vote; where no cell contributes, all take over the ``source``'s model.

        So they do where the counts of all that contribute are 0: its steps count as much. Without a source nothing
        moves, and a record tells so, also where all have finished.
        """
        run, source, number = prepared.run, prepared.source, prepared.status.round
        assert run is not None, "a rank without one has failed, which its status says"
        weights = cell_weights(statuses, self._topology)
        if source is None or any(weights):
            outcome = super()._decide(prepared, statuses, least_divergence)
            if outcome is not None and not outcome.is_empty:
                return outcome
        if source is None:
            return AgreedRound(run, RoundContext(weights, 0, number), is_last=self.all_finished, is_empty=True)
        run.way = self._hand_over
        return AgreedRound(run, RoundContext(weights, source, number, source=source), is_last=self.all_finished)

    def _count(
        self, statuses: Sequence[RoundStatus], weights: tuple[float, ...], dropped: tuple[int, ...]
    ) -> RoundContext:
        """Return whose values count; a cell of weight 0 may only just have come, so it is nobody's first."""
        context = super()._count(statuses, weights, dropped)
        return replace(context, first=context.cells[0])

    def _take(self, outcome: AgreedRound) -> AgreedRound:
        """Do what the first vote has agreed on; a round that moves nothing still needs its record."""
        if not outcome.is_empty:
            return super()._take(outcome)
        try:
            is_recorded = self._is_recorded(outcome)
        except BaseException as error:
            raise self._unknown_outcome(outcome, error, can_wait=isinstance(error, Exception)) from error
        if not is_recorded:
            raise _other_stands(outcome.context.number)
        return outcome

    def _move(self, run: RoundRun, context: RoundContext) -> Exchanged:
        """Exchange; where this rank cannot go on, close its connections: others wait for what it was still to send."""
        try:
            return self._move_and_tell(run, context)
        except XfflError:  # of what all ranks know, so all raise it
            raise
        except Exception as error:
            world = self._round_groups.world
            if isinstance(world, CrossWorldGroup) and not is_lost_contact(error):
                world.poison()
            raise

    def _move_and_tell(self, run: RoundRun, context: RoundContext) -> Exchanged:
        """Exchange; where all have to know something of the result before they write, tell it, and hear the others'."""
        if context.source is not None:  # a model that is handed over is no step, of which there is anything to know
            return Exchanged(run.exchange(context), failure=run.profile.failure)
        exchanged = super()._move(run, context)
        if exchanged.is_concluded:
            return exchanged
        status = RoundStatus(
            context.number,
            phase=VotePhase.RESULT,
            is_failed=exchanged.failure is not None,
            **exchanged.told,
        )
        exchanged = exchanged._replace(is_concluded=True)
        try:
            statuses = self._gather_status(status, run.profile, self._closes_within_s)
            self._check_point(statuses)
        except (RoundError, RuntimeError) as broken:
            lost = RoundBroken(f"what other ranks have combined could not be learned: {broken}")
            return exchanged._replace(failure=exchanged.failure or lost)
        if any(other.is_failed for other in statuses):  # who has failed says why after the vote
            return exchanged
        return exchanged._replace(context=self._exchange.conclude(exchanged.context, statuses))

    def _settle(self, outcome: AgreedRound) -> None:
        """Note that the round counts, if its record stands."""
        if self._is_recorded(outcome):
            super()._settle(outcome)

    def _is_recorded(self, outcome: AgreedRound) -> bool:
        """Tell whether the round's record stands, the same on all ranks; RuntimeError where that is not known."""
        context = outcome.context
        status = RoundStatus(context.number, phase=VotePhase.SEAL, seal=self._seal(context.weights))
        statuses = self._gather_status(status, outcome.run.profile, self._closes_within_s)
        self._check_point(statuses)
        answers = {other.seal for other in statuses} - {Seal.NOT_ASKED}
        if answers not in ({Seal.STANDS}, {Seal.OTHER_STANDS}):
            raise RuntimeError("the journal did not tell what stands there")
        return answers == {Seal.STANDS}

    def _gather_reasons(self, failure: Exception | None) -> list[str]:
        """Return each rank's reason for its no, once all ranks know them."""
        reasons = super()._gather_reasons(failure)
        self._await_heard()
        return reasons

    def _refusal(self, number: int, reasons: Sequence[str], statuses: Sequence[RoundStatus]) -> Exception:
        """Return what this rank raises where the round does not count: the reasons, where its own cell has failed.

        The others repeat the round. Nobody said no where another record stands.
        """
        if not reasons:
            return _other_stands(number)
        refusal = super()._refusal(number, reasons, statuses)
        failed = find_failed_cells(statuses, self._topology)
        if not failed:
            return refusal
        return CellFailed(str(refusal)) if self._cell in failed else RoundBroken(f"another cell failed: {refusal}")

    def _voting_without_values(self) -> AbstractContextManager[None]:
        """Return a block in which others stop waiting for this rank: what becomes of the round is the journal's."""
        return LeftExchange(self._round_groups, self._interrupt)

    def _unheard(self, number: int, why: BaseException, failure: Exception | None, profile: RoundProfile) -> RoundError:
        """Return what this rank raises where others may not have heard its no: its cell ends if the rank has failed."""
        broken = super()._unheard(number, why, failure, profile)
        if failure is None or profile.is_cut_off:
            return broken
        # What has made it leave the other cells was no message that did not come.
        has_failed = profile.has_left or not is_lost_contact(failure)
        return RankFailed(str(broken)) if has_failed else broken

    def _unknown_outcome(self, outcome: AgreedRound, why: BaseException, *, can_wait: bool) -> Exception:
        """Return what is raised where others may have taken the round: it is in doubt, unless this was interrupted."""
        unknown = super()._unknown_outcome(outcome, why, can_wait=can_wait)
        if not can_wait:
            return unknown
        self._phase = RoundPhase.CUT_OFF
        return RoundInDoubt(str(unknown), outcome)


def _other_stands(number: int) -> RoundBroken:
    return RoundBroken(
        f"round {number} was not taken, all ranks keep their weights of before: another record has its place in the "
        "journal"
    )
