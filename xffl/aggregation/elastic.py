"""Rounds of an elastic federation: repeated with whoever is there until one is taken, in epochs with one group each."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from xffl.aggregation.aggregator import Aggregator, PendingRound
from xffl.aggregation.engine.buffers import Arena
from xffl.aggregation.engine.consensus import RoundBroken, RoundInDoubt, RoundInput
from xffl.aggregation.engine.coverage import check_lone_cell
from xffl.aggregation.engine.global_model import GlobalModel
from xffl.aggregation.engine.groups import RoundScope
from xffl.aggregation.hand_over import read_hand_over, write_hand_over
from xffl.aggregation.report import ElasticRoundReport, RoundReport
from xffl.distributed.collectives import all_gather_json
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.faults import inject, start_round
from xffl.distributed.groups import Groups, make_round_groups
from xffl.elastic.federation import ElasticFederation, RoundEnd
from xffl.elastic.roster import Epoch, Version
from xffl.errors import CheckpointError, ConfigError, RoundError, StateError, XfflError

__all__ = ["ElasticAggregator"]

LEAST_TIMEOUT_S = 10.0
"""Seconds that a message may take at least: a link that was quick may be slow for a while."""
PATIENCE = 20.0
"""How much longer than all of the last exchange a message may take: a link with a tenth of its rate cuts nobody.

Only who is stopped or hangs holds the others up for as long: a host that is gone is found by its connections.
"""
QUICK_PATIENCE = 5.0
"""The same where messages take less than a twentieth of a second each."""

FOUNDING = ("policies", "bucket_bytes", "nonfinite", "form", "rails", "gradients_reduced_by_caller")
"""Options of the first round of a federation, which takes one cell's model over and is no step of a server."""


class ElasticRound:
    """A round of an elastic federation under way; :meth:`merge` ends it on all ranks of the cell."""

    def __init__(self, merge: Callable[[bool], RoundReport], begun: Sequence[PendingRound]) -> None:
        self._merge, self._begun = merge, begun

    def merge(self, *, keeps_steps: bool = True) -> RoundReport:
        """Wait for the round and merge its result into the model, as :meth:`xffl.aggregation.PendingRound.merge`."""
        return self._merge(keeps_steps)

    def discard(self) -> None:
        """Wait for this rank's part, and drop its result; local."""
        for pending in self._begun:
            pending.wait()


class ElasticAggregator:
    """Average a model over the cells that are there, each a world of its own; see :class:`~xffl.Aggregator`.

    A round is made by the cells that have met for it (an epoch), and repeated with those that are left where one is
    lost on the way: it counts for all of them or for none, and the steps that a round did not take count in the next.
    A cell that comes late, or again, takes the model over in a round in which it counts 0.

    Making one is collective over the cell. It meets the other cells with :meth:`join`, which each cell calls before its
    first step.

    It takes a model, which the cells may cut over different numbers of ranks, the state of this cell's world, which was
    joined with ``elastic``, and the options of an Aggregator. Raises ConfigError where torchft is not installed, or an
    option is not supported in an elastic federation.
    """

    def __init__(self, model: nn.Module, state: DistributedState, **options: Any) -> None:
        if options.get("secure"):
            raise ConfigError(
                f"secure={options['secure']!r} is not supported in an elastic federation: a round could not be made "
                "where fewer than three cells contribute; leave it out"
            )
        if options.get("atomic", True) is not True:
            raise ConfigError("rounds of an elastic federation are repeated where cells are lost; leave atomic=True")
        # Before this cell meets others, which would be told of it, too.
        check_lone_cell(model, state, is_reduced_by_caller=bool(options.get("gradients_reduced_by_caller", False)))
        self.fragments: int = options.get("fragments", 1)
        self.overlaps, self.is_closed = bool(options.get("overlap")), False
        # A cell that comes late takes all parts over, as they were agreed on last.
        self._keeps_agreed = any(options.get(name) for name in ("server", "privacy", "norms", "combine"))
        if self.fragments != 1:
            self._keeps_agreed = options["norms"] = True
        self.model, self._state, self._options = model, state, options
        self.under_way: ElasticRound | None = None
        self._federation = ElasticFederation(state)
        self._groups = self._make_groups()
        self._aggregator: Aggregator | None = None
        # The round in doubt: its epoch, what has made it, and how it is written if it was taken.
        self._doubted: tuple[Epoch, Aggregator, Callable[[], RoundReport]] | None = None
        # What has made the last round that was taken, and holds what servers and norms go on from; before the first
        # round of a resumed run, what was saved of it.
        self._last: Aggregator | Mapping[str, Any] | None = None
        self._privacy: dict[str, Any] | None = None
        self._arena = Arena()
        self.has_taken_over = False
        """Whether the last round has replaced this cell's model, whatever steps it had made."""
        self._epoch: Epoch | None = None
        self._is_leaving = False
        # Another round may follow: cells have met for the last one, all know how it ended, and not all have finished.
        self._has_others = True
        self._tries, self._opened_at = 0, 0.0
        self._exchange_s = 0.0

    def _make_groups(self) -> Groups:
        """Return the groups inside the cell: for rounds behind local steps of their own; collective over the cell."""
        state = self._state
        if self.overlaps:
            create, rank = state.create_process_group, dist.get_rank()
            made = make_round_groups(create, state.topology, rank, state.timeouts.session_s, state.handle_count)
            return {kind: made.get(kind) for kind in ("federation", "replica")}
        assert dist.group.WORLD is not None
        replica = None if state.hsdp_mesh is None else (state.hsdp_mesh.get_group(0),)
        return {"federation": (dist.group.WORLD,), "replica": replica}

    @property
    def rounds(self) -> int:
        """Number of rounds that this cell's model has behind it."""
        return self._federation.standing.version.round

    @property
    def lineage(self) -> str:
        """Digest of these rounds: cells of one lineage hold the same model; empty before the first round."""
        return self._federation.standing.version.lineage

    @property
    def total_weight(self) -> float:
        """Sum of the weights that all cells had in these rounds, of which each fragment has its part."""
        return self._federation.standing.total_weight / self.fragments

    @property
    def next_fragment(self) -> int:
        """The part of the model that the next round moves, if this cell is not behind."""
        return self.rounds % self.fragments

    @property
    def is_behind(self) -> bool:
        """Whether this cell holds another model than that from which the cells that have met go on."""
        return self._epoch is not None and self._federation.cell in self._epoch.behind

    @property
    def is_in_doubt(self) -> bool:
        """Whether this cell does not know yet what became of the last round; :meth:`open` tells."""
        return self._doubted is not None

    @property
    def can_go_on(self) -> bool:
        """Whether another round may follow a rejected one: the model is whole, and there are cells for it."""
        return self._has_others and (self._aggregator is None or not self._aggregator.is_torn)

    def check(self) -> None:
        """Raise while the model is inconsistent; local."""
        if self._aggregator is not None:
            self._aggregator.check()

    def join(self, prepare: Callable[[], None] | None = None, *, is_stopping: Callable[[], bool] | None = None) -> None:
        """Take over the model of the cells that are there, or give them this one's; collective over the cell.

        The cells that begin a federation take the model of the lowest of them. A cell that comes late waits until the
        others make their next round. ``prepare`` is called before each try. Raises MeetingLeft where ``is_stopping``.
        """
        is_agreed, has_taken_over = self._federation.standing.version.is_agreed, False
        while True:
            if self.open(is_stopping=is_stopping) is not None:  # the others wait for this round, too
                is_agreed, prepare, has_taken_over = True, None, has_taken_over or self.has_taken_over
            try:
                self.participate(RoundInput(is_absent=is_agreed, prepare=prepare))
            except RoundBroken:
                continue  # with those that are left
            self.has_taken_over = self.has_taken_over or has_taken_over
            return

    def open(
        self,
        *,
        is_finished: bool = False,
        told: Mapping[str, Any] | None = None,
        is_stopping: Callable[[], bool] | None = None,
    ) -> RoundReport | None:
        """Meet the other cells for a round; collective over the cell. One try to make it has to follow.

        Returns the report of the round before where this cell was in doubt of it, and it was taken; it stands then.
        ``is_finished`` says that this cell leaves after the round; ``told`` are plain values that all members learn by
        the round's report, the same on all ranks of the cell. ``is_stopping`` is asked on the cell's first rank
        while others are waited for. Raises MeetingLeft where it says so: there is no round then, and the model is as it
        was; RoundError where the others do not come.
        """
        if self.is_closed:
            raise StateError("this aggregator is closed; make another one")
        self.check()
        if not self._tries:
            self._opened_at = time.perf_counter()
        self._tries += 1
        start_round(self.rounds + 1)
        inject("meet")
        text = json.dumps(told) if told else ""
        self._has_others = False
        self._epoch = self._federation.meet(is_finished=is_finished, told=text, is_stopping=is_stopping)
        self._has_others = True
        self._is_leaving = is_finished
        self.has_taken_over = False
        doubted, self._doubted = self._doubted, None
        if not self._federation.standing.settle(self._epoch, self._federation.cell):
            return None
        assert doubted is not None, "kept while the round is in doubt"
        epoch, aggregator, write = doubted
        report = write()
        self._note_taken(aggregator, epoch, report)
        return self._spread(report, epoch, 1, report.seconds, is_last=False)

    def participate(self, given: RoundInput, *, least_divergence: float | None = None) -> RoundReport | None:
        """Try to make a round with the cells that :meth:`open` has met; collective over the cell.

        Returns ``None`` where all of these cells have finished and none had anything to give. Below
        ``least_divergence`` nothing moves, as for an Aggregator, unless a cell is there that has to catch up. Where one
        is and no cell contributes, all take over the model of the lowest cell that is not behind. Raises
        RoundBroken where the round is to be tried again, and RoundError where it was refused by a reason that lies in a
        model or an option, as :meth:`xffl.Aggregator.participate`, or where the cells cannot reach each other.
        """
        is_absent, epoch = given.is_absent or self.is_behind, self._opened()
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

        As :meth:`xffl.Aggregator.aggregate_async`, for a cell that is not behind. A round that breaks is told when it
        is merged, by RoundBroken: the steps that it took in are to count in the next one, unless it is in doubt.
        """
        epoch = self._opened()
        begun: list[PendingRound] = []
        failures: list[Exception] = []
        try:
            aggregator = self._begin(epoch)
            begun.append(aggregator.aggregate_async(weight, alpha=alpha, steps=steps, seconds=seconds))
        except (XfflError, RuntimeError) as error:  # the other ranks of the cell hear of it when they merge
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

        self.under_way = ElasticRound(merge, begun)
        return self.under_way

    def _opened(self) -> Epoch:
        epoch, self._epoch = self._epoch, None
        if epoch is None:
            raise StateError("a round of an elastic federation has to be opened first, each time")
        return epoch

    def _begin(self, epoch: Epoch) -> Aggregator:
        """Return what makes the round of an epoch."""
        start_round(epoch.base.round + 1)
        try:
            aggregator = self._enter(epoch)
        except XfflError as error:
            # A cell that comes with another model or other options is told so; those that agree go on without it.
            if self._federation.cell in epoch.behind or not epoch.behind or not epoch.base.is_agreed:
                raise
            raise RoundBroken(str(error)) from error
        aggregator.rounds = epoch.base.round
        return aggregator

    def _conclude(self, epoch: Epoch, run: Callable[[], RoundReport | None], **merge: Any) -> RoundReport | None:
        """Run this rank's part of a try, or the end of it, and draw the cell's conclusion; collective over the cell."""
        federation = self._federation
        report: RoundReport | None = None
        error: XfflError | None = None
        try:
            report = run()
            end = RoundEnd.REFUSED if report is not None and report.is_skipped else RoundEnd.TAKEN
        except RoundBroken as broken:
            end, error = RoundEnd.IN_DOUBT if isinstance(broken, RoundInDoubt) else RoundEnd.BROKEN, broken
        except XfflError as wrong:
            end, error = RoundEnd.REFUSED, wrong
        except RuntimeError as lost:  # the group could not be made, or broke while models were compared
            end, error = RoundEnd.BROKEN, RoundBroken(str(lost))
        if end in (RoundEnd.BROKEN, RoundEnd.IN_DOUBT):
            federation.poison()
        aggregator = self._aggregator
        if aggregator is not None and aggregator.accountant is not None:
            self._privacy = aggregator.accountant.state_dict()
        self._has_others = False
        agreed = federation.agree_on_end(end, epoch)
        self._has_others = not (agreed is RoundEnd.REFUSED and all(member.is_finished for member in epoch.members))
        if agreed in (RoundEnd.BROKEN, RoundEnd.IN_DOUBT):
            self._aggregator = None
            if agreed is RoundEnd.IN_DOUBT:
                assert aggregator is not None, "it has voted"
                later = {"is_merged": True} if merge else {}  # with the steps that are made until the doubt ends
                self._doubted = epoch, aggregator, partial(aggregator.resolve, **{**merge, **later})
            raise RoundBroken(f"the round is tried again: {error or 'another rank of the cell has lost one'}")
        tries, self._tries = self._tries, 0
        if agreed is RoundEnd.REFUSED and error is not None:
            if aggregator is None:  # the next one is compared anew, by all that come then
                federation.drop()
            raise error
        if agreed is RoundEnd.TAKEN:
            assert aggregator is not None, "it has made the round"
            if end is RoundEnd.IN_DOUBT:
                report = aggregator.resolve(**merge)
            self._note_taken(aggregator, epoch, report)
            if not epoch.base.is_agreed:
                self._aggregator = None
        if report is None:
            return None
        self._limit_messages(report)
        seconds = time.perf_counter() - self._opened_at
        return self._spread(report, epoch, tries, seconds, is_last=self._is_leaving)

    def _note_taken(self, aggregator: Aggregator, epoch: Epoch, report: RoundReport | None) -> None:
        """Keep what the next round goes on from."""
        self._last = aggregator
        is_behind, standing = self._federation.cell in epoch.behind, self._federation.standing
        if is_behind or epoch.total_weight > standing.total_weight:
            standing.total_weight = epoch.total_weight
        if report is not None and epoch.base.is_agreed:  # the first round takes a model over, and no step in
            standing.total_weight += report.weight_taken
        if is_behind and self.fragments > 1 and epoch.base.is_agreed:
            assert aggregator.global_model is not None, "kept with fragments"
            aggregator.global_model.write()
        # Where no cell has contributed the model of one has replaced that of all.
        is_replaced = report is not None and not any(report.weights) and self.fragments == 1
        self.has_taken_over = is_behind or (bool(epoch.behind) and is_replaced)

    def _enter(self, epoch: Epoch) -> Aggregator:
        """Join the ranks of an epoch, and compare models with those that are new."""
        place = self._federation.enter(epoch)
        if not place.is_new and self._aggregator is not None:
            return self._aggregator
        if self._aggregator is not None:
            self._aggregator.give_back_groups()
        groups = self._groups
        scope = RoundScope(self._state, place.topology, place.first, groups, cross_world=place.group, arena=self._arena)
        self._aggregator = None
        if not epoch.base.is_agreed:
            options = {name: self._options[name] for name in FOUNDING if name in self._options}
            # Measured only so that what has been agreed is kept, for the aggregator that follows.
            options["norms"] = self._keeps_agreed
            self._aggregator = Aggregator(self.model, scope, **options)  # type: ignore[arg-type]
            return self._aggregator
        aggregator = Aggregator(self.model, replace(scope, goes_on=True), **self._options)  # type: ignore[arg-type]
        if aggregator.global_model is not None:
            self._bring_up(aggregator, scope, epoch)
        self._aggregator = aggregator
        return aggregator

    def _bring_up(self, aggregator: Aggregator, scope: RoundScope, epoch: Epoch) -> None:
        """Let an epoch's aggregator go on from what was agreed on last, in the cells that are behind, too.

        Collective over the epoch.
        """
        model, accountant = aggregator.global_model, aggregator.accountant
        assert model is not None, "asked for where there is one"
        spent = [] if self._privacy is None else [self._privacy]
        if self._federation.cell not in epoch.behind:
            self._take_up_agreed(model, epoch)
        if epoch.behind:
            told = self._share_agreed(aggregator, model, scope, epoch)
            spent += [] if told is None else [told]
        if accountant is not None:
            for counted in spent:
                accountant.cover(counted)

    def _take_up_agreed(self, model: GlobalModel, epoch: Epoch) -> None:
        """Let a global model go on from what this rank keeps, or has loaded; local."""
        if isinstance(self._last, Aggregator) and self._last.global_model is not None:
            model.take_over(self._last.global_model)
            return
        state = self._agreed()
        if epoch.base.round == 1 and not state["optimizers"]:  # the first round is no step of a server
            model.load_model(state["model"])
        else:
            model.load_state_dict(state)

    def _share_agreed(
        self, aggregator: Aggregator, model: GlobalModel, scope: RoundScope, epoch: Epoch
    ) -> dict[str, Any] | None:
        """Bring what the lowest cell that is not behind keeps beside the model to those that are.

        Collective over the epoch. Equal to the bit, in whatever cut a cell has. Returns what that cell's privacy has
        cost.
        """
        given = ""
        if self._federation.cell == epoch.first:
            given = write_hand_over(model.plain_state(), self._privacy)
        texts = all_gather_json(given, torch.device("cpu"), scope.cross_world)
        told = [read_hand_over(text, epoch.first) for text in texts if text]
        if not told:
            raise RoundError(f"cell {epoch.first} has handed nothing over; start it again")
        state: dict[str, Any] = {"model": {}, "optimizers": told[0].optimizers}
        if self._federation.cell in epoch.behind:
            model.load_plain_state(state)
        source, *targets = map(epoch.index_of, (epoch.first, *epoch.behind))
        aggregator.share_global_model(state, source, targets)
        return told[0].privacy

    def _agreed(self) -> dict[str, Any]:
        """Return the state of the global model that goes with the model which this rank holds."""
        last = self._last
        agreed = last.global_model.state_dict() if isinstance(last, Aggregator) and last.global_model else None
        if isinstance(last, Mapping):
            agreed = last.get("agreed")
        if agreed is None:
            raise CheckpointError(
                "the state lacks the last agreed model of server, norms or privacy; it was saved without, so resume "
                "with the same options"
            )
        return dict(agreed)

    def _limit_messages(self, report: RoundReport) -> None:
        """Let a message take a few times as long as all of this exchange did, so that a slow link is no lost one."""
        # Of the slowest of late; one that was slow long ago counts less and less.
        self._exchange_s = max(sum(report.phases.values()), 0.5 * self._exchange_s)
        limits = (max(LEAST_TIMEOUT_S, patience * self._exchange_s) for patience in (PATIENCE, QUICK_PATIENCE))
        self._federation.limit_messages(*limits)

    def _spread(self, report: RoundReport, epoch: Epoch, tries: int, seconds: float, *, is_last: bool) -> RoundReport:
        """Return a report by the cells' own numbers, 0 for those that were not there."""
        cells = epoch.cells

        def of_all(values: Sequence[float]) -> tuple[float, ...]:
            by_cell = dict(zip(cells, values, strict=False))
            return tuple(by_cell.get(cell, 0.0) for cell in range(self._federation.cells)) if values else ()

        told = {one.name: getattr(report, one.name) for one in fields(report)}
        return ElasticRoundReport(
            **told
            | {name: of_all(told[name]) for name in ("weights", "shares", "steps", "step_seconds")}
            | {"update_norms": of_all(report.update_norms) if report.update_norms is not None else None}
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
        """Drop the round under way, if any, and a doubt: where other weights are loaded; collective over the cell."""
        if self.under_way is not None:
            self.under_way.discard()
            self.under_way = None
        self._federation.drop()  # the next round's aggregator goes on from what is loaded, and is brought up anew
        self._aggregator = self._doubted = None
        self._federation.standing.refuse()

    def inherit_vote(self, file: Path) -> None:
        """Take over what :meth:`close` has written in the life of this cell before this one, and will write; local.

        Call it before joining, with a path in the cell's own folder.
        """
        self._federation.inherit_vote(file)

    def close(self) -> None:
        """Leave the other cells, which go on; local."""
        self.is_closed = True
        self._aggregator = self._doubted = None
        self._federation.leave()

    def state_dict(self) -> dict[str, Any]:
        """Return which version of the model this cell holds, and what goes with it; local, each rank saves its own.

        Raises StateError while a round is under way.
        """
        if self.under_way is not None:
            raise StateError("a round of this aggregator is under way; merge it before saving")
        standing, last = self._federation.standing, self._last
        version = standing.version
        memory = {} if self._privacy is None else {"privacy": self._privacy}
        if (isinstance(last, Mapping) and "agreed" in last) or (isinstance(last, Aggregator) and last.global_model):
            memory["agreed"] = self._agreed()
        return {
            "rounds": version.round,
            "elastic": {
                "created": version.created,
                "lineage": version.lineage,
                "voters": list(version.voters),
                "left": list(standing.left),
            },
            "total_weight": standing.total_weight,
            **memory,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned; call it on all ranks, after loading the model, before joining."""
        if "elastic" not in state:
            raise CheckpointError(
                "the state is that of a federation that is not elastic; resume it as it was, or load the model alone"
            )
        self.discard()
        plain, standing = {"round": state["rounds"], **state["elastic"]}, self._federation.standing
        standing.version = Version.from_plain(plain, "the state of an elastic federation", hint="load another one")
        standing.left = tuple(plain.get("left", ()))  # older states do not tell, nor the weight
        standing.total_weight = float(state.get("total_weight", 0.0))
        self._last, self._privacy = dict(state), state.get("privacy")
