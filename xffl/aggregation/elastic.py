"""Rounds of an elastic federation: repeated with whoever is there until one is taken, in epochs with one group each."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from xffl.aggregation.aggregator import Aggregator, PendingRound
from xffl.aggregation.engine.buffers import Arena
from xffl.aggregation.engine.consensus import RoundBroken, RoundInDoubt, RoundInput
from xffl.aggregation.engine.global_model import GlobalModel, StateTensors, plain_of
from xffl.aggregation.engine.groups import RoundScope
from xffl.aggregation.report import ElasticRoundReport, RoundReport
from xffl.distributed.collectives import all_gather_json
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.faults import inject, start_round
from xffl.distributed.groups import Groups
from xffl.elastic.federation import ElasticFederation, RoundEnd
from xffl.elastic.roster import Epoch, Version
from xffl.errors import CheckpointError, ConfigError, RoundError, StateError, XfflError

__all__ = ["ElasticAggregator"]

LEAST_TIMEOUT_S = 10.0
"""Seconds that a message may take at least: a link that was quick may be slow for a while."""
PATIENCE = 5.0
"""How much longer than all of the last exchange a message may take."""

FOUNDING = ("policies", "bucket_bytes", "nonfinite", "form", "rails")
"""Options of the first round of a federation, which takes one cell's model over and is no step of a server."""


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
        if options.get("overlap") or options.get("atomic", True) is not True:
            raise ConfigError(
                "rounds of an elastic federation are repeated where cells are lost, so they need atomic=True and no "
                "overlap"
            )
        self.fragments: int = options.get("fragments", 1)
        self.overlaps, self.is_closed = False, False
        # A cell that comes late takes all parts over, as they were agreed on last.
        self._keeps_agreed = any(options.get(name) for name in ("server", "privacy", "norms", "combine"))
        if self.fragments != 1:
            self._keeps_agreed = options["norms"] = True
        self.model, self._state, self._options = model, state, options
        self.under_way: PendingRound | None = None
        self._federation = ElasticFederation(state)
        self._aggregator: Aggregator | None = None
        self._doubted: tuple[Aggregator, Epoch] | None = None
        # What has made the last round that was taken, and holds what servers and norms go on from; before the first
        # round of a resumed run, what was saved of it.
        self._last: Aggregator | Mapping[str, Any] | None = None
        self._privacy: dict[str, Any] | None = None
        self._arena = Arena()
        self.on_settled: Callable[[RoundReport], RoundInput] | None = None
        """Called with the report of a round that was in doubt and is found to be taken, once its weights stand; returns
        what this cell gives to the next one, which others wait for."""
        self.has_taken_over = False
        """Whether the last round has replaced this cell's model, whatever steps it had made."""
        self._exchange_s = 0.0

    @property
    def rounds(self) -> int:
        """Number of rounds that this cell's model has behind it."""
        return self._federation.standing.version.round

    @property
    def next_fragment(self) -> int:
        """The part of the model that the next round moves, if this cell is not behind."""
        return self.rounds % self.fragments

    @property
    def can_go_on(self) -> bool:
        """Whether another round may follow a rejected one."""
        return self._aggregator is None or not self._aggregator.is_torn

    def check(self) -> None:
        """Raise while the model is inconsistent; local."""
        if self._aggregator is not None:
            self._aggregator.check()

    def join(self, prepare: Callable[[], None] | None = None) -> None:
        """Take over the model of the cells that are there, or give them this one's; collective over the cell.

        The cells that begin a federation take the model of the lowest of them. A cell that comes late waits until the
        others make their next round. ``prepare`` is called before each try.
        """
        is_absent = self._federation.standing.version.is_agreed
        self.participate(RoundInput(is_absent=is_absent, prepare=prepare))

    def participate(self, given: RoundInput, *, least_divergence: float | None = None) -> RoundReport | None:
        """Make a round with the cells that are there, until one is taken; collective over the cell.

        Returns ``None`` where all of these cells have finished and none had anything to give. Below
        ``least_divergence`` nothing moves, as for an Aggregator, unless a cell is there that has to catch up. Raises
        RoundError where the round was refused by a reason that lies in a model or an option, as
        :meth:`xffl.Aggregator.participate`, or where the cells that have met cannot reach each other.
        """
        if self.is_closed:
            raise StateError("this aggregator is closed; make another one")
        self.check()
        start, tries, is_leaving = time.perf_counter(), 0, given.is_finished
        while True:
            tries += 1
            start_round(self.rounds + 1)
            inject("meet")
            epoch = self._federation.meet(is_finished=is_leaving)
            given = replace(self._settle(epoch) or given, is_finished=is_leaving)
            has_ended, report = self._try_round(epoch, given, None if epoch.behind else least_divergence)
            if has_ended:
                seconds = time.perf_counter() - start
                return None if report is None else self._spread(report, epoch, tries, is_leaving, seconds)

    def _settle(self, epoch: Epoch) -> RoundInput | None:
        """End this cell's doubt by what the others have told; return what it gives now, where its round was taken."""
        doubted, self._doubted = self._doubted, None
        if not self._federation.standing.settle(epoch, self._federation.cell):
            return None
        assert doubted is not None, "kept while the round is in doubt"
        aggregator, its_epoch = doubted
        report = aggregator.resolve()
        self._note_taken(aggregator, its_epoch)
        told = self._spread(report, its_epoch, 1, False, report.seconds)
        # The steps have counted; the others wait for this cell in the next round.
        return RoundInput(is_absent=True) if self.on_settled is None else self.on_settled(told)

    def _note_taken(self, aggregator: Aggregator, epoch: Epoch) -> None:
        """Keep what the next round goes on from."""
        self._last = aggregator
        self.has_taken_over = self._federation.cell in epoch.behind
        if self.has_taken_over and self.fragments > 1 and epoch.base.is_agreed:
            assert aggregator.global_model is not None, "kept with fragments"
            aggregator.global_model.write()

    def _try_round(
        self, epoch: Epoch, given: RoundInput, least_divergence: float | None
    ) -> tuple[bool, RoundReport | None]:
        """Make one try; tell whether the round was taken or skipped, and what it did, or it is to be made again."""
        federation = self._federation
        is_behind = federation.cell in epoch.behind
        report: RoundReport | None = None
        refusal: XfflError | None = None
        try:
            try:
                aggregator = self._enter(epoch)
            except XfflError as error:
                # A cell that comes with another model or other options is told so; those that agree go on without it.
                if is_behind or not epoch.behind or not epoch.base.is_agreed:
                    raise
                raise RoundBroken(str(error)) from error
            aggregator.rounds = epoch.base.round
            start_round(epoch.base.round + 1)
            mine = replace(given, is_absent=given.is_absent or is_behind)
            report = aggregator.participate(mine, least_divergence=least_divergence)
            end = RoundEnd.REFUSED if report is not None and report.is_skipped else RoundEnd.TAKEN
        except RoundInDoubt:
            end = RoundEnd.IN_DOUBT
        except RoundBroken:
            end = RoundEnd.BROKEN
        except XfflError as error:
            end, refusal = RoundEnd.REFUSED, error
        except RuntimeError as error:  # the group could not be made, or broke while models were compared
            end, refusal = RoundEnd.BROKEN, RoundError(str(error))
        if end in (RoundEnd.BROKEN, RoundEnd.IN_DOUBT):
            federation.poison()
        aggregator = self._aggregator  # type: ignore[assignment]
        if aggregator is not None and aggregator.accountant is not None:
            self._privacy = aggregator.accountant.state_dict()
        agreed = federation.agree_on_end(end, epoch)
        if agreed is RoundEnd.TAKEN:
            if end is RoundEnd.IN_DOUBT:
                report = aggregator.resolve()
            if report is not None:
                self._limit_messages(report)
            self._note_taken(aggregator, epoch)
            if not epoch.base.is_agreed:
                self._last, self._aggregator = self.state_dict(), None
            return True, report
        if agreed is RoundEnd.REFUSED and refusal is None:
            return True, report
        if agreed is RoundEnd.REFUSED and refusal is not None:
            if aggregator is None:  # the next one is compared anew, by all that come then
                federation.drop()
            raise refusal
        self._aggregator = None
        self._doubted = (aggregator, epoch) if agreed is RoundEnd.IN_DOUBT else None
        return False, None

    def _enter(self, epoch: Epoch) -> Aggregator:
        """Join the ranks of an epoch, and compare models with those that are new."""
        place = self._federation.enter(epoch)
        if not place.is_new and self._aggregator is not None:
            return self._aggregator
        state, world = self._state, dist.group.WORLD
        assert world is not None
        replica = None if state.hsdp_mesh is None else (state.hsdp_mesh.get_group(0),)
        groups: Groups = {"federation": (world,), "replica": replica}
        scope = RoundScope(state, place.topology, place.first, groups, cross_world=place.group, arena=self._arena)
        self._aggregator = None
        if not epoch.base.is_agreed:
            options = {name: self._options[name] for name in FOUNDING if name in self._options}
            # Measured only so that what has been agreed is kept, for the aggregator that follows.
            options["norms"] = self._keeps_agreed
            self._aggregator = Aggregator(self.model, scope, **options)  # type: ignore[arg-type]
            return self._aggregator
        aggregator = Aggregator(self.model, scope, **self._options)  # type: ignore[arg-type]
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
        state: dict[str, Any] | None = None
        spent = [] if self._privacy is None else [self._privacy]
        if self._federation.cell not in epoch.behind:
            state = self._agreed()
        if epoch.behind:
            state, told = self._share_agreed(model, scope, epoch, state)
            spent += [] if told is None else [told]
        assert state is not None, "kept or told"
        if epoch.base.round == 1 and not state["optimizers"]:  # the first round is no step of a server
            model.load_model(state["model"])
        else:
            model.load_state_dict(state)
        if accountant is not None:
            for counted in spent:
                accountant.cover(counted)

    def _share_agreed(
        self, model: GlobalModel, scope: RoundScope, epoch: Epoch, state: dict[str, Any] | None
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Bring what the lowest cell that is not behind keeps beside the model to those that are.

        Collective over the epoch. The tensors go in a round of their own, in whatever cut a cell has, equal to the bit.
        Returns the global model's state of this rank, and what that cell's privacy has cost.
        """
        is_giving, given = self._federation.cell == epoch.first, ""
        if is_giving:
            assert state is not None, "it is not behind"
            given = _encode({"agreed": plain_of(state), "privacy": self._privacy})
        texts = [text for text in all_gather_json(given, torch.device("cpu"), scope.cross_world) if text]
        # A rank that holds nothing of the model has no optimizer either.
        told = max(map(_decode, texts), key=lambda one: len(one["agreed"]["optimizers"]))
        tensors = StateTensors(model.layout, told["agreed"] if state is None else state)
        try:
            carrier = Aggregator(tensors, replace(scope, arena=None))  # type: ignore[arg-type]
            carrier.participate(RoundInput(is_absent=not is_giving))
        except RoundInDoubt as doubt:  # nothing depends on whether others have them: all try again
            raise RoundBroken(str(doubt)) from doubt
        if state is None:
            tensors.read()
            state = told["agreed"]
            state["optimizers"] = {part: one for part, one in state["optimizers"].items() if part in model.fragments}
        return state, told["privacy"]

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
        self._federation.limit_messages(max(LEAST_TIMEOUT_S, PATIENCE * self._exchange_s))

    def _spread(self, report: RoundReport, epoch: Epoch, tries: int, is_finished: bool, seconds: float) -> RoundReport:
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
                "is_last": is_finished,
                "seconds": seconds,
            },
            cells=cells,
            membership=epoch.group,
            tries=tries,
        )

    def aggregate_async(self, weight: float | Callable[[], float] | None = None, **more: Any) -> PendingRound:
        """Raise StateError: a round that goes on behind local steps could not be repeated."""
        raise StateError("an elastic federation makes no rounds behind local steps")

    def discard(self) -> None:
        """Do nothing: no round is ever under way."""

    def close(self) -> None:
        """Leave the other cells, which go on; local."""
        self.is_closed = True
        self._aggregator = self._doubted = None
        self._federation.leave()

    def state_dict(self) -> dict[str, Any]:
        """Return which version of the model this cell holds, and what goes with it; local, each rank saves its own."""
        version, last = self._federation.standing.version, self._last
        memory = {} if self._privacy is None else {"privacy": self._privacy}
        if (isinstance(last, Mapping) and "agreed" in last) or (isinstance(last, Aggregator) and last.global_model):
            memory["agreed"] = self._agreed()
        return {
            "rounds": version.round,
            "elastic": {"created": version.created, "lineage": version.lineage, "voters": list(version.voters)},
            **memory,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned; call it on all ranks, after loading the model, before joining."""
        if "elastic" not in state:
            raise CheckpointError(
                "the state is that of a federation that is not elastic; resume it as it was, or load the model alone"
            )
        plain = {"round": state["rounds"], **state["elastic"]}
        self._federation.standing.version = Version.from_plain(plain)
        self._last, self._privacy = dict(state), state.get("privacy")


def _encode(plain: object) -> str:
    """Return plain values and small tensors as a text."""
    file = io.BytesIO()
    torch.save(plain, file)
    return base64.b64encode(file.getvalue()).decode()


def _decode(text: str) -> Any:
    """Return what :func:`_encode` has made a text of; nothing that is read runs code."""
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
