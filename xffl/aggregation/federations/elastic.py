"""Rounds between cells that are jobs of their own: repeated with the cells that are left until one is taken.

The cells that have met for a round are an epoch, which has a process group. The aggregator lives as long as the model:
a new epoch changes only whom it exchanges with.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from xffl.aggregation.aggregator import Aggregator
from xffl.aggregation.engine.arena import Arena
from xffl.aggregation.engine.decision.consensus import RoundBroken, RoundInput
from xffl.aggregation.engine.decision.elastic_votes import ElasticCoordinator, RankFailed, RoundInDoubt, is_lost_contact
from xffl.aggregation.engine.decision.fitting_cells import AcceptedTraits
from xffl.aggregation.engine.global_model import GlobalModel
from xffl.aggregation.engine.global_state import agree_on_steps
from xffl.aggregation.engine.groups import RoundScope
from xffl.aggregation.engine.planning.lone_coverage import check_lone_cell
from xffl.aggregation.engine.setup import make_copies
from xffl.aggregation.engine.several_worlds.compared_at_once import ComparisonAtOnce
from xffl.aggregation.engine.several_worlds.members_first_round import ComparedCells, MembersFirstRound
from xffl.aggregation.engine.voting.votes import Seal
from xffl.aggregation.federations.catch_up_state import read_catch_up_state, write_catch_up_state
from xffl.aggregation.federations.elastic_cell_groups import ElasticCellGroups
from xffl.aggregation.federations.first_memory import measure_memory
from xffl.aggregation.federations.fixed_tensors import FixedTensors, find_fixed
from xffl.aggregation.federations.own_ranks import compare_held, compare_options
from xffl.aggregation.pending import PendingRound
from xffl.aggregation.report import ElasticRoundReport, RoundReport
from xffl.checks import shorten
from xffl.distributed.agreement.consistency import cell_gpu, check_consistent, run_on_all_ranks
from xffl.distributed.collectives import all_gather_json
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.failures.faults import inject, start_round
from xffl.elastic.federation import ElasticFederation, RoundEnd
from xffl.elastic.roster import Epoch
from xffl.errors import CheckpointError, ConfigError, MeetingLeft, RoundError, StateError, XfflError
from xffl.journal.records import RoundRecord, read_record, record_text
from xffl.journal.who_continues import Fate

__all__ = ["ElasticAggregator"]

LOG = logging.getLogger(__name__)

LEAST_TIMEOUT_S = 10.0
"""Shortest message timeout, in seconds: a fast link may be slow for a while."""
PATIENCE = 20.0
"""Message timeout as a multiple of the last exchange; tolerates a tenth of the rate.

Only a process that is stopped or hangs makes the others wait so long: of one that has ended, its connections tell.
"""
QUICK_PATIENCE = 5.0
"""The same multiple where a message takes less than 50 ms."""

FOUNDING = ("policies", "bucket_bytes", "nonfinite", "form", "rails", "gradients_reduced_by_caller")
"""Options of a federation's first round, in which all cells take over the model of one, and no server steps."""


@dataclass(frozen=True)
class Doubt:
    """A round of which this cell does not know whether its record stands: the journal tells."""

    epoch: Epoch
    aggregator: Aggregator
    """Holds the result."""
    write: Callable[[], RoundReport]
    """Writes it into the model, if the round was taken."""


class ElasticRound:
    """A delayed round of an elastic federation; :meth:`merge` ends it on all ranks of the cell."""

    def __init__(
        self,
        merge: Callable[[bool], RoundReport],
        begun: Sequence[PendingRound],
        failures: list[Exception],
        handled: BaseException | None,
    ) -> None:
        self._merge = merge
        self._begun = begun
        self._failures = failures
        """Why it could not begin"""
        self._handled = handled
        """What the caller was handling when it began"""

    def merge(self, *, keeps_steps: bool = True) -> RoundReport:
        """Wait for the round and merge its result into the model, as :meth:`xffl.aggregation.PendingRound.merge`."""
        return self._merge(keeps_steps)

    def discard(self) -> None:
        """Wait until this rank's part of the round is over, and drop the result; local."""
        for pending in self._begun:
            pending.wait()
        for failure in self._failures:
            _forget_calls(failure, self._handled)


class ElasticAggregator:
    """Average a model over the cells of an elastic federation, each a world of its own; see :class:`~xffl.Aggregator`.

    The cells that have met for a round (an epoch) make it. If one is lost during the round, the others meet again and
    repeat it, so a round counts in all of its cells or in none. A cell that comes late, or again, takes the model over
    in a round in which its weight is 0.

    Making one is collective over the cell. :meth:`join` meets the other cells for the first time; each cell calls it
    before its first step.

    The cells may shard the model over different numbers of ranks. ``state`` is that of this cell's world, joined with
    ``elastic``; ``options`` are those of an Aggregator. Raises ConfigError where torchft is not installed, or an option
    is not supported in an elastic federation.
    """

    def __init__(self, model: nn.Module, state: DistributedState, **options: Any) -> None:
        if options.get("secure"):
            raise ConfigError(
                f"secure={options['secure']!r} is not supported in an elastic federation: a round could not be made "
                "where fewer than three cells contribute; leave it out"
            )
        if options.get("tensor_weights") is not None:
            raise ConfigError(
                "tensor_weights is not supported in an elastic federation: counts of a cell that was lost would not be "
                "known; leave it out"
            )
        if options.get("atomic", True) is not True:
            raise ConfigError("rounds of an elastic federation are repeated where cells are lost; leave atomic=True")
        # Before this cell meets others, which would get the same error.
        check_lone_cell(model, state, is_reduced_by_caller=bool(options.get("gradients_reduced_by_caller", False)))
        compare_options(model, state, options)
        self.fragments: int = options.get("fragments", 1)
        self.overlaps = bool(options.get("overlap"))
        self.is_closed = False
        # A late cell takes over all parts of the model as they were last agreed on.
        self._keeps_agreed = any(options.get(name) for name in ("server", "privacy", "norms", "combine"))
        if self.fragments != 1:
            self._keeps_agreed = options["norms"] = True
        self.model = model
        self._state = state
        self._options = options
        self.under_way: ElasticRound | None = None
        self._federation = ElasticFederation(state)
        self._groups = ElasticCellGroups(
            model, state, policies=options.get("policies"), extra=options.get("extra"), overlaps=self.overlaps
        )
        self._founder: Aggregator | None = None
        """Makes the first round of a federation, and has its agreed model until the second one begins."""
        self._aggregator: Aggregator | None = None
        """Makes all other rounds."""
        self._compared = ComparedCells()
        """What its rounds have found, with whatever cells."""
        self._accepted = AcceptedTraits()
        """What this rank has said in rounds that were taken."""
        self._is_grouped = False
        """Whether the aggregator of the next round has the groups of the last epoch."""
        self._agreed: Mapping[str, Any] | None = None
        """The agreed model by name, where it is not the aggregator's.

        That is in a resumed run before its first round, and while the cell takes over a newer one, until that counts.
        """
        self._spent: Mapping[str, Any] | None = None
        """What privacy had cost where the run was resumed."""
        self._residuals: Mapping[str, torch.Tensor] | None = None
        """What codecs had left out where the run was resumed, until its first round."""
        self._doubted: Doubt | None = None
        self._arena = Arena(make_copies(None))
        self.taken_over: frozenset[int] = frozenset()
        """Fragments of this cell's model that the last round replaced, and with them the steps made on them."""
        self.has_handed_over = False
        """Whether the other cells took over this cell's model in the last round, with its steps since."""
        self._fellows: frozenset[str] = frozenset()
        """Lives of the cells of the last round that this cell has taken part in."""
        self._epoch: Epoch | None = None
        self._is_leaving = False
        # Whether another round may follow: the cells met for the last one, all know its end, not all have finished, and
        # each rank of this cell could enter, or knows as the others why it could not.
        self._has_others = True
        self._is_compared = False
        """Whether the ranks of this cell are known to hold the model of one round."""
        self._tries = 0  # of the next round
        self._opened_at = 0.0  # when the first of them began
        self._exchange_s = 0.0

    @property
    def rounds(self) -> int:
        """Number of rounds that this cell's model has behind it."""
        record = self._federation.record
        return 0 if record is None else record.round

    @property
    def lineage(self) -> str:
        """Digest of these rounds: cells of one lineage hold the same model; empty before the first round."""
        record = self._federation.record
        return "" if record is None else record.lineage

    @property
    def total_weight(self) -> float:
        """Sum of the weights that all cells had in these rounds, of which each fragment has its part."""
        return self._federation.total_weight / self.fragments

    @property
    def next_fragment(self) -> int:
        """The part of the model that the next round moves, if this cell is not behind."""
        return self.rounds % self.fragments

    @property
    def is_behind(self) -> bool:
        """Whether the cells that have met go on from a newer model than this cell holds."""
        return self._epoch is not None and self._federation.cell in self._epoch.behind

    @property
    def is_founding(self) -> bool:
        """Whether the cells that have met begin the run: its first round only hands the lowest cell's model over."""
        return self._epoch is not None and self._epoch.base is None

    @property
    def has_taken_over(self) -> bool:
        """Whether the last round replaced any part of this cell's model, and with it the steps made on that part."""
        return bool(self.taken_over)

    @property
    def is_in_doubt(self) -> bool:
        """Whether it is unknown here if the last round was taken; the next :meth:`end_doubt` tells."""
        return self._doubted is not None

    @property
    def may_resume(self) -> bool:
        """Whether this cell was in the run before, and has not loaded what it held then."""
        return self._federation.record is None and self._federation.was_here

    @property
    def can_go_on(self) -> bool:
        """Whether another round may follow a rejected one: the model is whole, and there are cells for it."""
        return self._has_others and not any(aggregator.is_torn for aggregator in self._aggregators)

    @property
    def _aggregators(self) -> list[Aggregator]:
        """Those that there are, the one with the newest agreed model first."""
        return [aggregator for aggregator in (self._aggregator, self._founder) if aggregator is not None]

    def check(self) -> None:
        """Raise while the model is inconsistent; local."""
        for aggregator in self._aggregators:
            aggregator.check()

    def join(self) -> RoundReport | None:
        """Take over the model of the other cells, or give them this cell's, without steps; collective over the cell.

        In a new federation all cells take over the model of the lowest one. A late cell waits for the next round of the
        others. Returns the report of the round that was taken.
        """
        while True:
            self.open()
            try:
                return self.participate(RoundInput(is_absent=not self.is_founding))
            except RoundBroken:
                continue  # with the cells that are left

    def open(
        self,
        *,
        is_finished: bool = False,
        told: Mapping[str, Any] | None = None,
        is_stopping: Callable[[], bool] | None = None,
    ) -> RoundReport | None:
        """Meet the other cells for a round; collective over the cell. One try to make the round must follow.

        If the last round was in doubt, :meth:`end_doubt` comes first, and what it returns is returned.
        ``is_finished`` says that this cell leaves after the round. ``told`` are plain values, the same on all ranks of
        the cell, that all cells find in the round's report. While this cell waits for others, its first rank asks
        ``is_stopping``, and MeetingLeft is raised if that returns True: there is no round, and the model is unchanged.
        Raises RoundError where the others do not come in time.
        """
        if self.is_closed:
            raise StateError("this aggregator is closed; make another one")
        self.check()
        if not self._is_compared:
            compare_held(self._federation.record)
            self._is_compared = True
            if self._federation.is_likely_behind():
                is_shared_on_gpus = cell_gpu(self._state) is not None
                memory = measure_memory(
                    self.model, self._options, keeps_agreed=self._keeps_agreed, is_shared_on_gpus=is_shared_on_gpus
                )
                self._arena.prepare(*memory)
        report = self.end_doubt(is_stopping)
        if not self._tries:
            self._opened_at = time.perf_counter()
        self._tries += 1
        start_round(self.rounds + 1)
        inject("meet")
        text = json.dumps(told) if told else ""
        self._has_others = False
        try:
            self._epoch = self._federation.meet(is_finished=is_finished, told=text, is_stopping=is_stopping)
        except MeetingLeft:
            self._tries = 0  # what follows is another round
            raise
        self._has_others = True
        self._is_leaving = is_finished
        return report

    def end_doubt(self, is_stopping: Callable[[], bool] | None = None) -> RoundReport | None:
        """Ask the journal whether the last round was taken, if that is in doubt; collective over the cell.

        If it was, its result is written now, and its report is returned. Raises RoundError where the journal does not
        answer in time. While it does not, the cell's first rank asks ``is_stopping``, and MeetingLeft is raised if that
        returns True: the doubt stays.
        """
        self.taken_over = frozenset()
        self.has_handed_over = False
        doubted = self._doubted
        if doubted is None:
            return None
        fate = self._federation.end_doubt(is_stopping)
        self._doubted = None
        if fate is Fate.PUT_BACK:
            return None
        report = doubted.write()
        self._note_taken(doubted.aggregator, doubted.epoch, report, fate)
        return self._spread(report, doubted.epoch, 1, report.seconds, is_last=False)

    def participate(self, given: RoundInput, *, least_divergence: float | None = None) -> RoundReport | None:
        """Try to make a round with the cells that :meth:`open` has met; collective over the cell.

        Returns ``None`` where all of these cells have finished and none had anything to give. If a cell is behind, the
        round always takes place, also below ``least_divergence``; if then no cell contributes, all take over the model
        of the lowest cell that is not behind. Raises RoundBroken where the round has to be tried again; RoundError
        where a model or an option is the reason, as :meth:`xffl.Aggregator.participate` does, or where the cells cannot
        reach each other.
        """
        is_absent = given.is_absent or self.is_behind
        epoch = self._opened()
        source = epoch.index_of(epoch.first) if epoch.behind else None
        given = replace(given, is_absent=is_absent, is_finished=self._is_leaving, source=source)
        least = None if epoch.behind else least_divergence
        return self._conclude(epoch, lambda: self._begin(epoch).participate(given, least_divergence=least))

    def aggregate_async(
        self,
        weight: float | Callable[[], float] | None = None,
        *,
        alpha: float | None = None,
        steps: float = 1.0,
        seconds: float = 0.0,
    ) -> ElasticRound:
        """Start a round with the cells that :meth:`open` has met, and return at once; collective over the cell.

        As :meth:`xffl.Aggregator.aggregate_async`, for a cell that is not behind. If the round breaks, its merge raises
        RoundBroken; the caller then counts the steps of this round in the next one, unless the round is in doubt.
        """
        epoch = self._opened()
        begun: list[PendingRound] = []
        failures: list[Exception] = []
        try:
            aggregator = self._begin(epoch)
            begun.append(aggregator.aggregate_async(weight, alpha=alpha, steps=steps, seconds=seconds))
        except Exception as error:  # noqa: BLE001 - raised in the merge, where the cell's other ranks raise it, too
            self._federation.poison()
            failures.append(error)

        def merge(keeps_steps: bool) -> RoundReport:
            def write() -> RoundReport:
                for failure in failures:
                    raise failure
                return begun[0].merge(keeps_steps=keeps_steps)

            try:
                report = self._conclude(epoch, write, is_merged=keeps_steps, alpha=alpha)
            finally:
                if not begun or aggregator.under_way is not begun[0]:  # else the wait was interrupted
                    self.under_way = None
            assert report is not None, "a cell that has not finished always gets a round"
            return report

        self.under_way = ElasticRound(merge, begun, failures, sys.exc_info()[1])
        return self.under_way

    def _opened(self) -> Epoch:
        epoch = self._epoch
        self._epoch = None
        if epoch is None:
            raise StateError("a round of an elastic federation has to be opened first, each time")
        return epoch

    def _begin(self, epoch: Epoch) -> Aggregator:
        """Return the aggregator for the round of an epoch."""
        start_round(epoch.base_round + 1)
        try:
            aggregator = self._enter(epoch)
        except XfflError as error:
            if self._is_newcomer(epoch):
                raise
            raise RoundBroken(str(error)) from error
        aggregator.resume_at(epoch.base_round, brings_up=bool(epoch.behind))
        return aggregator

    def _is_newcomer(self, epoch: Epoch) -> bool:
        """Tell whether this cell has to end where the cells of an epoch have other models or options; local.

        A cell that comes, or comes back, with other ones fails; the cells that agree continue without it. Where all are
        new to each other nobody knows which of them is wrong.
        """
        if epoch.base is None:
            return True
        is_behind = self._federation.cell in epoch.behind
        if self._fellows:
            return is_behind or self._fellows >= {*epoch.lives}
        return is_behind or not epoch.behind

    def _conclude(self, epoch: Epoch, run: Callable[[], RoundReport | None], **merge: Any) -> RoundReport | None:
        """Run this rank's part of a try, or of its merge, and agree on how it ended; collective over the cell."""
        federation = self._federation
        handled = sys.exc_info()[1]
        report: RoundReport | None = None
        error: XfflError | None = None
        weights: tuple[float, ...] = ()
        is_alone = False  # whether other ranks of the epoch may not have this error
        leave: Callable[[], None] | None = None
        try:
            report = run()
            # Without a report, or below a divergence, no round was made, and no record published.
            is_made = report is not None and not report.is_skipped
            end = RoundEnd.TAKEN if is_made else RoundEnd.REFUSED
            weights = () if report is None else report.weights
        except RoundInDoubt as doubt:
            end = RoundEnd.IN_DOUBT
            error = doubt
            weights = doubt.outcome.context.weights
            _forget_calls(doubt, handled)
        except RoundBroken as broken:
            end = RoundEnd.BROKEN
            error = broken
            _forget_calls(broken, handled)
        except RankFailed as failed:
            end = RoundEnd.FAILED
            error = RoundError(str(failed))
            error.__cause__ = failed.__cause__
            is_alone = True
            leave = self._groups.close_connections
        except XfflError as wrong:
            end = RoundEnd.REFUSED if self._is_grouped else RoundEnd.FAILED
            error = wrong
        except Exception as lost:
            if is_lost_contact(lost):  # the group could not be made, or broke while models were compared
                end = RoundEnd.BROKEN
                error = RoundBroken(str(lost))
                _forget_calls(lost, handled)
            elif self._is_grouped:
                raise
            else:
                end = RoundEnd.FAILED
                error = RoundError(f"this rank could not join the other cells: {type(lost).__name__}: {lost}")
                error.__cause__ = lost
                is_alone = True
        if end in (RoundEnd.BROKEN, RoundEnd.IN_DOUBT) or is_alone:
            federation.poison()
        self._has_others = False
        try:
            agreed, fate = federation.agree_on_end(end, epoch, weights, leave=leave)
        except XfflError:
            raise
        except RuntimeError as lost:
            if error is not None and is_alone:
                raise error from lost
            raise RoundError(f"another rank of this cell has left it: {lost}; see the other ranks' output") from lost
        cannot_enter = is_alone or agreed is RoundEnd.FAILED
        has_ended = agreed is RoundEnd.REFUSED and all(member.is_finished for member in epoch.members)
        self._has_others = not (cannot_enter or has_ended)
        if agreed is RoundEnd.REFUSED and error is not None and self._groups.renew():
            federation.drop()  # so that all cells make a new group, and this one plans with the groups that it has now
        elif agreed is not RoundEnd.FAILED and not federation.has_group:
            self._groups.renew()
        if agreed in (RoundEnd.BROKEN, RoundEnd.IN_DOUBT):
            self._is_grouped = False
            if agreed is RoundEnd.IN_DOUBT:
                assert isinstance(error, RoundInDoubt), "all ranks of the cell are in doubt"
                aggregator = self._maker(epoch)
                later = {"is_merged": True} if merge else {}  # keeps the steps that are made until the doubt ends
                write = partial(aggregator.resolve, error.outcome, **{**merge, **later})
                self._doubted = Doubt(epoch, aggregator, write)
            raise RoundBroken(f"the round is tried again: {error or 'another rank of the cell has lost one'}")
        if agreed is RoundEnd.FAILED:
            self._is_grouped = False
            self._tries = 0
            check_consistent("cells that join others", "", error=error if end is RoundEnd.FAILED else None)
        tries = self._tries
        self._tries = 0
        if agreed is RoundEnd.REFUSED and error is not None:
            if not self._is_grouped:  # the models differ: the next epoch gets a new group, and compares them again
                federation.drop()
            raise error
        if agreed is RoundEnd.TAKEN:
            aggregator = self._maker(epoch)
            if isinstance(error, RoundInDoubt):  # other ranks of the cell know that the round was taken
                report = aggregator.resolve(error.outcome, **merge)
            self._note_taken(aggregator, epoch, report, fate)
        is_over = report is not None and report.is_last and not any(report.weights) and not epoch.behind
        if report is None or is_over:
            return None
        self._limit_messages(report)
        seconds = time.perf_counter() - self._opened_at
        return self._spread(report, epoch, tries, seconds, is_last=self._is_leaving)

    def _note_taken(self, aggregator: Aggregator, epoch: Epoch, report: RoundReport | None, fate: Fate) -> None:
        """Note what the next round starts from, and what this cell took over."""
        if epoch.base is not None:  # in the first round no cell says how it weighs
            self._accepted.accept()
        self._agreed = None
        self._fellows = frozenset(epoch.lives)
        is_behind = fate is not Fate.GAVE
        federation = self._federation
        if is_behind or epoch.total_weight > federation.total_weight:
            federation.total_weight = epoch.total_weight
        # In the first round a model is taken over, and no step counts.
        if report is not None and epoch.base is not None:
            federation.total_weight += report.weight_taken
        if is_behind and self.fragments > 1 and epoch.base is not None:
            assert aggregator.global_model is not None, "kept with fragments"
            aggregator.global_model.write()
        is_replaced = is_behind
        moved: Sequence[int] = range(self.fragments)
        if report is not None and not is_behind:
            if not any(report.weights):
                # The model of one cell has replaced those of all others. Its own stays, with its steps since, unless it
                # has a global model to hand over.
                is_handed_over = bool(epoch.behind)
                is_source = federation.cell == epoch.first and aggregator.global_model is None
                is_replaced = is_handed_over and not is_source
                self.has_handed_over = is_handed_over and is_source
            if epoch.base is not None:
                moved = (report.fragment,)
        self.taken_over = frozenset(moved if is_replaced else ())

    def _enter(self, epoch: Epoch) -> Aggregator:
        """Join the ranks of an epoch, and return the aggregator of its round; in a new group models are compared."""
        was_grouped = self._is_grouped
        self._is_grouped = False  # until this rank has entered
        place = self._federation.enter(epoch)
        if was_grouped and not place.is_new and (epoch.base is None) == (self._aggregator is None):
            self._is_grouped = True
            return self._maker(epoch)
        scope = RoundScope(
            self._state,
            place.topology,
            place.first,
            self._groups.by_kind,
            own=self._groups.made,
            holders=self._groups.holders,
            cross_world=place.group,
            arena=self._arena,
            compare=ComparisonAtOnce,
            coordinate=partial(ElasticCoordinator, seal=partial(_seal, self._federation), accepted=self._accepted),
        )
        if epoch.base is None:
            self._found(scope)
        else:
            make_first_round = partial(MembersFirstRound, lives=epoch.lives, compared=self._compared)
            self._regroup(replace(scope, goes_on=True, make_first_round=make_first_round), epoch)
        self._share_fixed(scope, epoch)
        self._arena.drop_prepared()
        self._is_grouped = True
        return self._maker(epoch)

    def _maker(self, epoch: Epoch) -> Aggregator:
        """Return the aggregator that makes the round of an epoch which this cell has entered."""
        aggregator = self._founder if epoch.base is None else self._aggregator
        assert aggregator is not None, "made on entering"
        return aggregator

    def _found(self, scope: RoundScope) -> None:
        """Make what makes the first round of a federation; collective over its cells."""
        self._forget()
        self._residuals = None
        options = {name: self._options[name] for name in FOUNDING if name in self._options}
        # With norms it keeps the agreed model, which later rounds start from.
        options["norms"] = self._keeps_agreed
        self._founder = Aggregator(self.model, scope, **options)  # type: ignore[arg-type]

    def _regroup(self, scope: RoundScope, epoch: Epoch) -> None:
        """Exchange the groups of the aggregator, which is made at first; collective over the epoch."""
        is_behind = self._federation.cell in epoch.behind
        if is_behind and self._agreed is None:
            self._agreed = self._copy_agreed()
        if self._aggregator is not None:
            self._aggregator.regroup(scope)
        else:
            aggregator = Aggregator(self.model, scope, **self._options)  # type: ignore[arg-type]
            if self._founder is not None:
                aggregator.take_over(self._founder)
            elif self._agreed is None and aggregator.global_model is not None and not is_behind:
                raise CheckpointError(
                    "the state lacks the last agreed model of server, norms or privacy; it was saved without, so "
                    "resume with the same options"
                )
            if self._residuals is not None:
                aggregator.load_residuals(self._residuals, self._find_given(epoch))
                self._residuals = None
            self._aggregator = aggregator
            self._founder = None
        self._bring_up(self._aggregator, scope, epoch)

    def _find_given(self, epoch: Epoch) -> set[int]:
        """Return the fragments to which this cell has given something since the round that it holds; collective."""
        return {(given.round - 1) % self.fragments for given in self._federation.find_given(epoch)}

    def _forget(self) -> None:
        """Give up the aggregators, whose memory is that of another model; local."""
        self._aggregator = None
        self._founder = None
        self._compared = ComparedCells()
        self._is_grouped = False

    def _share_fixed(self, scope: RoundScope, epoch: Epoch) -> None:
        """Bring what no round moves to the cells that are behind; collective over the epoch."""
        if not epoch.behind:
            return
        # With fragments, the buffers of those that this round does not move.
        with_buffers = self.fragments > 1 and epoch.base is not None
        names = find_fixed(self.model, self._options.get("policies"), with_buffers=with_buffers)
        source, *targets = map(epoch.index_of, (epoch.first, *epoch.behind))
        taken = set(FixedTensors(self.model, names).take_over(scope, source, targets))
        if self._federation.cell == epoch.first and self._state.rank == 0:
            fixed = find_fixed(self.model, self._options.get("policies"))
            unlike = [several[0] for several in fixed if taken & {*several}]
            if unlike:
                LOG.warning("cells that have come held other values of %s, which no round moves", shorten(unlike))

    def _bring_up(self, aggregator: Aggregator, scope: RoundScope, epoch: Epoch) -> None:
        """Have all cells of an epoch remember the same beside the model; collective over it."""
        model = aggregator.global_model
        accountant = aggregator.accountant
        if model is None:
            return
        if self._agreed is not None and self._federation.cell not in epoch.behind:
            self._load_agreed(model, self._agreed, epoch)
        if accountant is not None and self._spent is not None:
            accountant.cover(self._spent)
        if epoch.behind:
            spent = self._share_agreed(aggregator, model, scope, epoch)
            if accountant is not None and spent is not None:
                accountant.cover(spent)

    def _load_agreed(self, model: GlobalModel, agreed: Mapping[str, Any], epoch: Epoch) -> None:
        """Fill a global model from a state; collective over the cell."""
        is_of_first = epoch.base_round == 1 and not agreed["optimizers"]  # which is no step of a server
        with run_on_all_ranks("states of servers"):
            if is_of_first:
                model.load_model(agreed["model"])
            else:
                model.load_state_dict(agreed)
        if not is_of_first:
            agree_on_steps(model, None)

    def _share_agreed(
        self, aggregator: Aggregator, model: GlobalModel, scope: RoundScope, epoch: Epoch
    ) -> dict[str, Any] | None:
        """Bring what the lowest cell that is not behind keeps beside the model to those that are.

        Collective over the epoch. Equal to the bit, in whatever cut a cell has. Returns what that cell's privacy has
        cost.
        """
        given = ""
        if self._federation.cell == epoch.first:
            accountant = aggregator.accountant
            given = write_catch_up_state(model.plain_state(), None if accountant is None else accountant.state_dict())
        texts = all_gather_json(given, torch.device("cpu"), scope.cross_world)
        told = [read_catch_up_state(text, epoch.first) for text in texts if text]
        if not told:
            raise RoundError(f"cell {epoch.first} has handed nothing over; start it again")
        state: dict[str, Any] = {"model": {}, "optimizers": told[0].optimizers}
        if self._federation.cell in epoch.behind:
            model.load_plain_state(state)
        source, *targets = map(epoch.index_of, (epoch.first, *epoch.behind))
        aggregator.share_global_model(state, source, targets)
        return told[0].privacy

    def _copy_agreed(self) -> Mapping[str, Any] | None:
        """Return the agreed model that belongs to the round whose model this rank holds, if one is kept; local."""
        if self._agreed is not None:
            return self._agreed
        for aggregator in self._aggregators:
            if aggregator.global_model is not None:
                return aggregator.global_model.state_dict()
        return None

    def _copy_residuals(self) -> Mapping[str, torch.Tensor] | None:
        """Return what codecs have left out on this rank, if the run has any; local."""
        return self._residuals if self._aggregator is None else self._aggregator.residuals()

    def _copy_spent(self) -> Mapping[str, Any] | None:
        """Return what privacy has cost, if the run has any; local."""
        accountant = None if self._aggregator is None else self._aggregator.accountant
        return self._spent if accountant is None else accountant.state_dict()

    def _limit_messages(self, report: RoundReport) -> None:
        """Set the message timeout to a multiple of the last exchange, so that a slow link does not look like a loss."""
        # The slowest exchange counts half as much after each round.
        self._exchange_s = max(sum(report.phases.values()), 0.5 * self._exchange_s)
        limits = (max(LEAST_TIMEOUT_S, patience * self._exchange_s) for patience in (PATIENCE, QUICK_PATIENCE))
        self._federation.limit_messages(*limits)

    def _spread(self, report: RoundReport, epoch: Epoch, tries: int, seconds: float, *, is_last: bool) -> RoundReport:
        """Return a report indexed by the federation's cells instead of the epoch's, with 0 for absent cells."""
        cells = epoch.cells

        def of_all(values: Sequence[float]) -> tuple[float, ...]:
            by_cell = dict(zip(cells, values, strict=False))
            return tuple(by_cell.get(cell, 0.0) for cell in range(self._federation.cells)) if values else ()

        norms = report.update_norms
        if norms is not None:
            # What a cell holds that is behind, or was left out, is no update; it may not even be finite.
            pairs = zip(norms, report.weights, strict=True)
            norms = of_all([norm if weight > 0 else 0.0 for norm, weight in pairs])
        told = {one.name: getattr(report, one.name) for one in fields(report)}
        return ElasticRoundReport(
            **told
            | {name: of_all(told[name]) for name in ("weights", "shares", "steps", "step_seconds")}
            | {"update_norms": norms}
            | {
                "dropped": tuple(cells[index] for index in report.dropped),
                "nonfinite": {cells[index]: names for index, names in report.nonfinite.items()},
                "is_last": is_last,
                "seconds": seconds,
            },
            cells=cells,
            membership=epoch.membership,
            tries=tries,
            restarts=tuple(member.restarts for member in epoch.members),
            left=epoch.left,
            told=tuple(member.told_values() for member in epoch.members),
        )

    def discard(self) -> None:
        """Drop the round under way and a doubt, because other weights are loaded; collective over the cell."""
        if self.under_way is not None:
            self.under_way.discard()
            self.under_way = None
            self._groups.renew()
        for aggregator in self._aggregators:
            aggregator.discard()
        self._federation.drop()
        self._is_grouped = False
        self._doubted = None
        self._federation.drop_doubt()

    def close(self) -> None:
        """Leave the other cells, which go on without this one; local."""
        self.is_closed = True
        self._doubted = None
        if self.under_way is not None:
            self._federation.poison()  # neither its thread nor the other cells wait for the rest of the round
        self._federation.leave()

    def give_back_groups(self) -> None:
        """Give the groups inside the cell back, behind :meth:`close`; collective over the cell.

        A second call does nothing.
        """
        if self.under_way is not None:
            self.under_way.discard()  # it may still use them
        self._groups.give_back()

    def state_dict(self) -> dict[str, Any]:
        """Return which model this cell holds, and what belongs to it; local, each rank saves its own.

        While a round is in doubt that is the model from before it. A cell that starts from such a state is behind those
        that have taken the round. Raises StateError while a round is under way.
        """
        if self.under_way is not None:
            raise StateError("a round of this aggregator is under way; merge it before saving")
        record = self._federation.record
        memory = {
            "privacy": self._copy_spent(),
            "agreed": self._copy_agreed(),
            "residuals": self._copy_residuals(),
        }
        return {
            "rounds": self.rounds,
            "elastic": {"record": "" if record is None else record_text(record)},
            "total_weight": self._federation.total_weight,
            **{name: part for name, part in memory.items() if part is not None},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned; call it on all ranks, after loading the model, before joining."""
        if "elastic" not in state:
            raise CheckpointError(
                "the state is that of a federation that is not elastic; resume it as it was, or load the model alone"
            )
        self.discard()
        self._is_compared = False
        record = _read_held(state["elastic"])
        self._federation.restore(record, 0.0 if record is None else float(state["total_weight"]))
        self._forget()
        self._agreed = state.get("agreed")
        self._spent = state.get("privacy")
        self._residuals = state.get("residuals")  # older states lack them


def _forget_calls(error: BaseException, handled: BaseException | None) -> None:
    """Drop the tracebacks of an error that nobody is shown, and of those that led to it.

    Their calls refer to the round, which refers to the error: groups that are given back would live until the garbage
    collector runs. An error of the caller's own, which it was handling meanwhile, is not touched.
    """
    errors: list[BaseException | None] = [error]
    while errors:
        at = errors.pop()
        if at is not None and at is not handled and at.__traceback__ is not None:
            at.__traceback__ = None
            errors += [at.__cause__, at.__context__]


def _seal(federation: ElasticFederation, weights: tuple[float, ...]) -> Seal:
    """Publish the record of a round, where this rank does, and tell what stands; local."""
    if not federation.publishes:
        return Seal.NOT_ASKED
    try:
        is_standing = federation.publish(weights)
    except XfflError as error:
        LOG.warning("the record of a round may not stand: %s", error)
        return Seal.UNKNOWN
    return Seal.STANDS if is_standing else Seal.OTHER_STANDS


def _read_held(elastic: Mapping[str, Any]) -> RoundRecord | None:
    """Return the round whose model a state holds; ``None`` where it is none that a journal has."""
    text = elastic.get("record")
    if text is None:
        LOG.warning(
            "the state was saved before elastic runs had a journal: its weights are loaded, and the run counts its "
            "rounds anew"
        )
        return None
    if not text:
        return None
    record = read_record(text, "the state of an elastic federation")
    if not isinstance(record, RoundRecord):
        raise CheckpointError(
            f"the state of an elastic federation has a record of kind {record.kind}; load another one"
        )
    return record
