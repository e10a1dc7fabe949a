"""The two-phase commit of a round.

In each vote every rank tells every rank its status, and all draw the same conclusion. :class:`RoundCoordinator` opens
the round with the first vote, has it exchange, and closes it with the second; its table says what follows from what.
Where a rank cannot learn what the others have written, it raises TornError, and the aggregator marks the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, NamedTuple

import torch

from xffl.aggregation.algorithms.combiners import total_of
from xffl.aggregation.engine.decision.unlike_votes import check_rounds
from xffl.aggregation.engine.exchange import Exchange, RoundRun
from xffl.aggregation.engine.groups import RoundScope
from xffl.aggregation.engine.planning.transfers import RoundContext
from xffl.aggregation.engine.voting.votes import RoundStatus, VotePhase, Votes, VoteTree, by_cell
from xffl.aggregation.options import Options
from xffl.aggregation.report import RoundProfile, RoundReport
from xffl.checks import number
from xffl.costs import MOST_IN_TABLES
from xffl.distributed.agreement.consistency import check_consistent, control_device
from xffl.distributed.collectives import all_gather_json
from xffl.distributed.failures.waits import NamedWait
from xffl.errors import ConfigError, RoundError, StateError, TornError, XfflError
from xffl.topology import Topology

__all__ = [
    "AgreedRound",
    "PreparedRound",
    "RoundBroken",
    "RoundCoordinator",
    "RoundInput",
    "RoundNumbers",
    "checked_number",
    "checked_weight",
]


def checked_weight(weight: object) -> float:
    """Return a rank's count, or what a function returns for it, as a float; see :func:`checked_number`."""
    count = weight() if callable(weight) else weight
    return checked_number("weight", count, "give this rank's count of samples or tokens, or None")


def checked_number(what: str, value: object, hint: str) -> float:
    """Return a real number or a tensor of one element as a float; raise ConfigError unless it is finite and >= 0."""
    if type(value) is float and 0.0 <= value < math.inf:
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return number(what, value, 0.0, hint=hint)


def cell_weights(statuses: Sequence[RoundStatus], topology: Topology) -> tuple[float, ...]:
    """Add the ranks' counts up to one weight for each cell; where no rank gave one, 1, or 0 once a cell is absent."""
    uniform: list[int] = []
    weighed: list[int] = []
    for rank, status in enumerate(statuses):
        if not status.is_absent:
            (uniform if status.is_uniform else weighed).append(rank)
    if uniform and weighed:
        raise ConfigError(f"ranks {uniform} gave no weight and others gave one; give a weight on every rank or on none")
    weights = by_cell([status.weight for status in statuses], topology, max if uniform else sum)
    if not math.isfinite(sum(weights)):
        raise ConfigError(f"the weights of the cells {weights} have no finite sum; give smaller counts")
    return weights


def divergence_of(context: RoundContext) -> float:
    """Return the root mean square of the norms of the cells' updates, by the cells' weights; pure."""
    assert context.norms is not None, "checked by who asks for it"
    squares = [context.weights[cell] * context.norms[cell] * context.norms[cell] for cell in context.cells]
    return math.sqrt(total_of(squares) / math.fsum(context.weights))


class RoundBroken(RoundError):
    """No rank took the round, because ranks lost each other; the cells that are left may repeat it."""


AFRESH = "start the processes anew, or end the process group on all ranks and join again"
"""Advice where messages may be in flight that nobody receives: a new aggregator on the same group would get them."""


@dataclass(frozen=True)
class RoundNumbers:
    """What a rank says of itself in the first vote, checked; zeros of a rank that cannot take part."""

    weight: float = 0.0
    steps: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class RoundInput:
    """What a rank gives to a round, and what it says of itself."""

    # its own count since the last round (samples, tokens), or what returns it; None on all ranks: every cell counts 1
    weight: float | Callable[[], float] | None = None
    is_absent: bool = False  # counts as 0: the round's result is taken over, nothing is contributed
    is_finished: bool = False  # this rank makes no further step; the report's is_last tells that all have
    steps: float = 1.0  # effective local steps of this cell since the last round, for combiners that ask for it
    seconds: float = 0.0  # seconds of a local step here, told to all in the report; 0 where nobody has measured
    prepare: Callable[[], None] | None = None  # called before the model is read; what it raises is told to all ranks
    source: int | None = None  # in an elastic federation: the cell whose model all take over if nobody contributes

    def numbers(self) -> RoundNumbers:
        """Ask for the numbers, and check them; raise ConfigError unless they are finite and not negative."""
        steps = checked_number("steps", self.steps, "give the effective number of local steps")
        seconds = checked_number("seconds", self.seconds, "give those of a local step, or 0")
        if self.is_absent:
            return RoundNumbers(0.0, steps, seconds)
        weight = 1.0 if self.weight is None else checked_weight(self.weight)
        return RoundNumbers(weight, steps, seconds)


@dataclass(frozen=True)
class PreparedRound:
    """What a rank opens a round with: its status, and the values that it has read, or why it cannot take part."""

    status: RoundStatus
    profile: RoundProfile
    run: RoundRun | None
    error: XfflError | None = None
    source: int | None = None  # see RoundInput


@dataclass(frozen=True)
class AgreedRound:
    """A round that all ranks have agreed to take, or, before the second vote, that they are about to agree on."""

    run: RoundRun  # what this rank has exchanged, and still has to write
    context: RoundContext  # whose values counted
    dropped: tuple[int, ...] = ()  # cells that were left out for values that are not finite
    is_last: bool = False  # all ranks had finished
    is_empty: bool = False  # no cell had anything for this part of the model, so that nothing moved
    is_skipped: bool = False  # the cells' models were so close that nothing moved
    nonfinite: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # of dropped cells, the tensors
    unfit: frozenset[int] = frozenset()  # all cells with values that are not finite, those of weight 0, too
    step_seconds: tuple[float, ...] = ()  # seconds of a local step in each cell

    def report(self, seconds: float) -> RoundReport:
        """Tell what the round did, and that it took so many seconds here; local."""
        context = self.context
        profile = self.run.profile
        total = math.fsum(context.counts)
        shares: list[float] = []
        for count in context.counts:
            shares.append(count / total)
        return RoundReport(
            round=context.number,
            weights=context.weights,
            bytes_across=profile.bytes_across,
            bytes_home=profile.bytes_home,
            seconds=seconds,
            dropped=self.dropped,
            is_last=self.is_last,
            fragment=self.run.fragment,
            shares=tuple(shares),
            scale=context.scale,
            step_norm=context.step_norm,
            steps=context.steps,
            step_seconds=self.step_seconds,
            update_norms=context.norms,
            nonfinite=self.nonfinite,
            is_skipped=self.is_skipped,
            phases=profile.phases,
            hidden=profile.hidden,
            **self.run.reported,
        )


class Exchanged(NamedTuple):
    """What an exchange has come to on this rank, before the second vote."""

    context: RoundContext
    told: Mapping[str, Any] = {}  # fields of this rank's status that tell of the combined values
    failure: Exception | None = None  # what failed here: this rank votes no
    is_concluded: bool = True  # whether the context has what follows from what all ranks tell


class RoundPhase(Enum):
    """How far a rank is in a round. :class:`RoundCoordinator` alone moves it on; the last two are never left."""

    READY = auto()
    """Another round may follow."""
    COMMITTED = auto()
    """All ranks have agreed on new values, which this one has not written yet: what stops it tears the model."""
    INTERRUPTED = auto()
    """Messages of an exchange may be under way that nobody waits for. The next opening tells all ranks so."""
    CUT_OFF = auto()
    """Messages of a vote may be under way: what is still to come would be taken for an answer to the next one."""


class RoundCoordinator:
    """The votes around an exchange, over the group of all ranks.

    ==========================  =======================================================================================
    what happens                what follows
    ==========================  =======================================================================================
    a rank cannot take part     it says so in the first vote, all raise its reason, nobody has moved anything
    the first vote breaks       this rank raises; it cannot know what others do, so it is cut off
    the exchange fails here     the rank goes on to the second vote and says no there; all keep their weights
    a rank says no              all gather the reasons and raise them; all keep their weights
    all say yes                 the round is committed; from here on a rank that does not write tears the model
    the second vote breaks      before this rank's yes nobody writes, so it keeps its weights and is cut off; after it
                                others may write, so the model is torn
    without ``atomic``          values are written while they are exchanged, so each failure in between tears the model
    ==========================  =======================================================================================

    Where cells are worlds of their own, :class:`~xffl.aggregation.engine.decision.elastic_votes.ElasticCoordinator`
    decides otherwise where nobody gives anything, and lets a round wait that is in doubt.

    :param exchange: What this rank exchanges.
    :param scope: The ranks that vote.
    :param options: The options of the rounds.
    :param number: What tells the aggregator from all others that these ranks have; the same on all of them.
    :param vote_tree: How a vote's messages go, unless there are too many ranks for tables.
    """

    def __init__(
        self,
        exchange: Exchange,
        scope: RoundScope,
        options: Options,
        number: int,
        *,
        vote_tree: Callable[[Topology, int, int, torch.device], Votes] = VoteTree,
    ) -> None:
        self._exchange = exchange
        self._topology = scope.topology
        self._has_gpu = scope.gpu is not None
        self._round_groups = exchange.round_groups
        self._control_device = control_device(self._round_groups.world)
        if self._topology.world_size > MOST_IN_TABLES:
            from xffl.aggregation.engine.voting.ballots import BallotTree

            vote_tree = BallotTree
        self._votes = vote_tree(self._topology, scope.rank, self._round_groups.first, self._control_device)
        self._atomic = options.atomic
        self._drops_cells = options.nonfinite == "drop_cell"
        limits = scope.state.timeouts
        self._opens_within_s = limits.session_s
        self._closes_within_s = limits.across_s
        self._phase = RoundPhase.READY
        self.all_finished = False
        """Whether all ranks had finished when they last opened a round."""
        self._number = number

    def connect(self) -> None:
        """Open the connections that votes need, and no other call has opened; collective over the ranks that vote."""
        self._votes.connect(self._round_groups.world, self._opens_within_s)

    def check(self) -> None:
        """Raise StateError where a vote was cut off; local."""
        if self._phase is RoundPhase.CUT_OFF:
            raise StateError(f"a vote of this aggregator was cut off, so the ranks are out of step; {AFRESH}")

    @property
    def is_out_of_step(self) -> bool:
        """Whether messages of this rank may be under way that nobody waits for, so that no round can follow."""
        return self._phase in (RoundPhase.INTERRUPTED, RoundPhase.CUT_OFF)

    def release(self) -> None:
        """End a committed round: its values are written here, or given up; local."""
        if self._phase is RoundPhase.COMMITTED:
            self._phase = RoundPhase.READY

    def _interrupt(self) -> None:
        """Note that messages of an exchange may be under way."""
        if self._phase is not RoundPhase.CUT_OFF:
            self._phase = RoundPhase.INTERRUPTED

    def run(self, prepared: PreparedRound, least_divergence: float | None = None) -> AgreedRound | None:
        """Vote, exchange, and vote on what came of it; the new values then wait to be committed.

        Collective over the world. Where the root mean square of the updates' norms is below ``least_divergence``, the
        same on all ranks, nothing moves. Returns ``None`` where all ranks have finished and none had anything to give.
        Raises on all ranks ConfigError, if the weights are invalid, and RoundError, if the round does not take place;
        all keep their weights then. TornError: ranks may hold different weights now.
        """
        self.release()
        statuses = self._open(prepared)
        outcome = self._decide(prepared, statuses, least_divergence)
        if outcome is None or outcome.is_skipped:
            return outcome
        return self._take(outcome)

    def torn_by(self, stop: BaseException) -> TornError | None:
        """Return what is wrong with the model where this has stopped a round; ``None`` where all keep their weights.

        That is where all ranks have agreed and this one has not written its part, or cannot learn what others do.
        """
        if self._phase is not RoundPhase.COMMITTED:
            return stop if isinstance(stop, TornError) else None
        self.release()
        torn = TornError(f"a round was agreed, but {type(stop).__name__} came before it was written")
        torn.__cause__ = stop
        return torn

    @contextmanager
    def _exchange_reasons(self) -> Iterator[None]:
        """Let ranks tell each other what they have found; no round for one that is stopped then: it is out of step."""
        try:
            yield
        except XfflError:
            raise
        except Exception as broken:
            self._phase = RoundPhase.CUT_OFF
            raise RoundBroken(
                f"a round did not take place, and this rank could not learn what others have found; it keeps its "
                f"weights: {broken}; see the other ranks' output"
            ) from broken
        except BaseException:
            self._interrupt()
            raise

    def _open(self, prepared: PreparedRound) -> list[RoundStatus]:
        """Vote on whether there is a round, and with what weights."""
        status, error = prepared.status, prepared.error
        if self._phase is RoundPhase.INTERRUPTED:  # what was posted then would take the next attempt's messages
            status = status._replace(is_failed=True)
            error = RoundError(f"an exchange was interrupted here, and its messages may still be under way; {AFRESH}")
        try:
            statuses = self._gather_status(status, prepared.profile, self._opens_within_s)
        except RuntimeError as broken:
            self._abort()
            self._phase = RoundPhase.CUT_OFF
            raise RoundBroken(
                f"round {status.round} could not be opened, this rank keeps its weights: {broken}; see the other "
                "ranks' output"
            ) from broken
        except BaseException:
            self._phase = RoundPhase.CUT_OFF
            raise
        self.all_finished = all(status.is_finished for status in statuses)
        self._compare(statuses, error)
        return statuses

    def _compare(self, statuses: Sequence[RoundStatus], error: XfflError | None) -> None:
        """Raise where a rank cannot take part, as this one with an error, or the ranks do not go together; on all."""
        self._check_point(statuses)
        if any(status.is_failed for status in statuses):
            what = f"opening of round {statuses[0].round}"
            with self._exchange_reasons():
                check_consistent(what, "", error=error, group=self._round_groups.world)
        for stage in self._exchange.stages:
            with self._exchange_reasons():
                stage.compare(statuses)

    def _decide(
        self, prepared: PreparedRound, statuses: Sequence[RoundStatus], least_divergence: float | None
    ) -> AgreedRound | None:
        """Return what follows from the first vote, the same on all ranks; ``None`` where no round follows."""
        run, number = prepared.run, prepared.status.round
        assert run is not None, "a rank without one has failed, which its status says"
        weights = cell_weights(statuses, self._topology)
        if self.all_finished and not any(weights):
            return None
        if all(status.is_absent for status in statuses):
            return AgreedRound(run, RoundContext(weights, 0, number), is_last=self.all_finished, is_empty=True)
        if not any(weights):
            raise ConfigError(f"the weights of all cells are 0 {weights}; a round needs at least one positive weight")
        unfit: set[int] = set()
        for rank, status in enumerate(statuses):
            if status.is_nonfinite:
                unfit.add(self._topology.cell_of(rank))
        dropped = tuple(cell for cell in sorted(unfit) if weights[cell])
        if dropped and not self._drops_cells:
            from xffl.aggregation.engine.decision.unfit_cells import refuse_nonfinite

            with self._exchange_reasons():
                refuse_nonfinite(dropped, self._exchange.link.cell, run.nonfinite, world=self._round_groups.world)
        context = self._count(statuses, weights, dropped)
        nonfinite: Mapping[int, tuple[str, ...]] = {}
        if dropped:
            from xffl.aggregation.engine.decision.unfit_cells import find_nonfinite

            with self._exchange_reasons():
                nonfinite = find_nonfinite(dropped, self._topology, run.nonfinite, world=self._round_groups.world)
        outcome = AgreedRound(
            run,
            context,
            dropped,
            self.all_finished,
            nonfinite=nonfinite,
            unfit=frozenset(unfit),
            step_seconds=by_cell([status.seconds for status in statuses], self._topology, max),
        )
        if least_divergence is not None and not self.all_finished and divergence_of(context) < least_divergence:
            return replace(outcome, is_skipped=True)
        self._check_possible(context)
        return outcome

    def _count(
        self, statuses: Sequence[RoundStatus], weights: tuple[float, ...], dropped: tuple[int, ...]
    ) -> RoundContext:
        """Return whose values count, and what the combiner is told about them."""
        counted = list(weights)
        for cell in dropped:
            counted[cell] = 0.0
        if not any(counted):
            raise RoundError(
                f"no cell with a positive weight is left after dropping cells {dropped}; all ranks keep their weights"
            )
        first = 0  # tensors of policy "first" are taken from this cell, which may have the weight 0
        while first in dropped:
            first += 1
        context = RoundContext(
            tuple(counted),
            first=first,
            number=statuses[0].round,
            steps=by_cell([status.steps for status in statuses], self._topology, lambda of_cell: of_cell[0]),
        )
        for stage in self._exchange.stages:
            context = stage.count(context, statuses)
        return context

    def _check_possible(self, context: RoundContext) -> None:
        """Raise, on all ranks alike, where these cells cannot do what was asked for."""
        try:
            self._exchange.check(context)
        except Exception as wrong:
            why = wrong if isinstance(wrong, XfflError) else f"{type(wrong).__name__}: {wrong}"
            raise RoundError(
                f"round {context.number} has values of cells {context.cells}: {why}; all ranks keep their weights"
            ) from wrong

    def _gather_status(self, status: RoundStatus, profile: RoundProfile, within_s: float) -> list[RoundStatus]:
        """Vote: give this rank's status, and return everybody's."""
        world = self._round_groups.world
        with profile.phase("vote"), NamedWait(f"the votes of round {status.round}", world):
            return self._votes.gather(status._replace(aggregator=self._number), world, within_s)

    def _check_point(self, statuses: Sequence[RoundStatus]) -> None:
        """Raise RoundError, on all ranks alike, where they are not at the same point of the same round."""
        points = {
            (one.aggregator, one.round, one.phase, one.is_encoding, one.is_flushing, one.merge, one.alpha)
            for one in statuses
        }
        if len(points) > 1:
            check_rounds(statuses, self._topology)

    def _take(self, outcome: AgreedRound) -> AgreedRound:
        """Do what the first vote has agreed on; return the round that is to be written."""
        return outcome if outcome.is_empty else self._close(outcome)

    def _move(self, run: RoundRun, context: RoundContext) -> Exchanged:
        """Exchange, and look at the result."""
        context = run.exchange(context)
        told: Mapping[str, Any] = {} if run.profile.failure is not None else run.result()
        return Exchanged(context, told, run.profile.failure, is_concluded=not self._exchange.weighs_result)

    def _close(self, outcome: AgreedRound) -> AgreedRound:
        """Exchange and vote on the result; return the round with what cells counted for."""
        run, number = outcome.run, outcome.context.number
        # 1. Exchange. A local failure waits for the vote, so that no other rank waits for this one.
        voting: AbstractContextManager[None] = nullcontext()
        try:
            exchanged = self._move(run, outcome.context)
        except Exception as error:  # noqa: BLE001 - told to all ranks by the vote
            exchanged = Exchanged(outcome.context, failure=error)
            voting = self._voting_without_values()
        except BaseException as stop:
            if not self._atomic:
                raise TornError(f"round {number} was interrupted by {type(stop).__name__}") from stop
            self._interrupt()
            raise
        outcome = replace(outcome, context=exchanged.context)
        failure = exchanged.failure
        # 2. Vote. Nobody writes without this rank's yes: whatever stops it before has left the old weights everywhere.
        others_may_write = failure is None
        try:
            status = RoundStatus(
                number,
                phase=VotePhase.COMMIT,
                is_failed=failure is not None,
                is_cut_off=run.profile.is_cut_off or isinstance(failure, RoundBroken),
                **exchanged.told,
            )
            with voting:
                statuses = self._gather_status(status, run.profile, self._closes_within_s)
            # All ranks see the same statuses. One of another vote is no yes: that rank was interrupted, and went on.
            yes = (number, VotePhase.COMMIT, False)
            is_agreed = all((vote.round, vote.phase, vote.is_failed) == yes for vote in statuses)
            others_may_write = is_agreed
            self._check_point(statuses)
            if is_agreed:
                self._settle(outcome)
            reasons = [] if is_agreed else self._gather_reasons(failure)
        except BaseException as error:
            self._abort()
            why = error if failure is None or not isinstance(error, Exception) else failure
            if self._atomic and not others_may_write:
                self._phase = RoundPhase.CUT_OFF
                if not isinstance(error, Exception):
                    raise
                raise self._unheard(number, why, failure, run.profile) from why
            raise self._unknown_outcome(outcome, why, can_wait=isinstance(error, Exception)) from why
        # 3. All ranks know the same now.
        if self._phase is RoundPhase.COMMITTED:
            if exchanged.is_concluded:
                return outcome
            return replace(outcome, context=self._exchange.conclude(outcome.context, statuses))
        self._abort()
        raise self._refusal(number, reasons, statuses) from failure

    def _settle(self, outcome: AgreedRound) -> None:
        """Note that the round counts, since all ranks have said yes; what stops this rank from here on tears it."""
        self._phase = RoundPhase.COMMITTED

    def _refusal(self, number: int, reasons: Sequence[str], statuses: Sequence[RoundStatus]) -> Exception:
        """Return what all ranks raise where the round does not count, with the reasons of those that said no."""
        shown = "; ".join(
            f"rank {rank} (cell {self._topology.cell_of(rank)}): {why}" for rank, why in enumerate(reasons) if why
        )
        if not self._atomic:
            return TornError(f"round {number} failed with atomic=False: {shown}")
        kind = RoundBroken if any(vote.is_cut_off for vote in statuses) else RoundError
        return kind(f"round {number} was not taken, all ranks keep their weights of before: {shown}")

    def _voting_without_values(self) -> AbstractContextManager[None]:
        """Return the block of the vote of a rank that has left the exchange by an error.

        Ranks that still wait for its values come to the vote after their timeout. Connections are not closed here: a
        rank that has said yes, and learns no result, has a torn model.
        """
        return nullcontext()

    def _unheard(self, number: int, why: BaseException, failure: Exception | None, profile: RoundProfile) -> RoundError:
        """Return what this rank raises where it has not said yes, and the vote broke in which it would have said no.

        ``failure`` is what has failed here before.
        """
        return RoundBroken(
            f"round {number} was not taken, this rank keeps its weights: {type(why).__name__}: {why}; {AFRESH}"
        )

    def _unknown_outcome(self, outcome: AgreedRound, why: BaseException, *, can_wait: bool) -> Exception:
        """Return what is raised where others may have taken the round, and this rank cannot learn it.

        ``can_wait`` tells whether it was an error, no interrupt, that has ended the vote.
        """
        return TornError(
            f"the outcome of round {outcome.context.number} could not be learned ({why or type(why).__name__})"
        )

    def _abort(self) -> None:
        """Let what a GPU was given for the round come to an end, so that the model can be read; local.

        All ranks come here after a round that was refused, so that all can make new groups before the next one.
        """
        if self._has_gpu:
            self._round_groups.abort()
            if self._round_groups.make is None:  # others belong to more than this aggregator's rounds
                self._phase = RoundPhase.CUT_OFF

    def reconnect(self) -> None:
        """Make new groups after a round that failed on GPUs; collective over the world then, or RoundError."""
        if not self._round_groups.is_aborted:
            return
        try:
            self._round_groups.renew()
        except Exception as broken:
            self._phase = RoundPhase.CUT_OFF
            raise RoundError(
                f"the ranks could not make new process groups after a failed round, this rank keeps its weights: "
                f"{broken}; see the other ranks' output"
            ) from broken

    def _gather_reasons(self, failure: Exception | None) -> list[str]:
        """Return each rank's reason for its no; collective over the world."""
        own = "" if failure is None else f"{type(failure).__name__}: {failure}"
        return all_gather_json(own, self._control_device, self._round_groups.world)
