"""Rounds of an elastic federation: repeated with whoever is there until one is taken, in epochs with one group each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch.distributed as dist
from torch import nn

from xffl.aggregation.aggregator import Aggregator, PendingRound
from xffl.aggregation.engine.consensus import RoundBroken, RoundInDoubt, RoundInput
from xffl.aggregation.engine.groups import RoundScope
from xffl.aggregation.report import ElasticRoundReport, RoundReport
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

NOT_YET: dict[str, object] = {"server": None, "privacy": None, "secure": False, "norms": False, "fragments": 1}
"""Options that need more than the model to go over to a cell that comes back, and what they are without."""


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
        for name, without in NOT_YET.items():
            if options.get(name, without) not in (without, False, None):
                raise ConfigError(
                    f"{name}={options[name]!r} is not supported in an elastic federation: a cell that comes back would "
                    "lack its state; leave it out"
                )
        if options.get("overlap") or options.get("atomic", True) is not True:
            raise ConfigError(
                "rounds of an elastic federation are repeated where cells are lost, so they need atomic=True and no "
                "overlap"
            )
        self.model, self._state, self._options = model, state, options
        self.fragments, self.overlaps, self.is_closed = 1, False, False
        self.under_way: PendingRound | None = None
        self._federation = ElasticFederation(state)
        self._aggregator: Aggregator | None = None
        self._doubted: tuple[Aggregator, Epoch] | None = None
        self.on_settled: Callable[[RoundReport], None] | None = None
        """Called with the report of a round that was in doubt and is found to be taken, once its weights stand."""
        self._exchange_s = 0.0

    @property
    def rounds(self) -> int:
        """Number of rounds that this cell's model has behind it."""
        return self._federation.standing.version.round

    @property
    def next_fragment(self) -> int:
        """The part of the model that the next round moves: there is one."""
        return 0

    @property
    def can_go_on(self) -> bool:
        """Whether another round may follow a rejected one."""
        return self._aggregator is None or not self._aggregator.is_torn

    def check(self) -> None:
        """Raise while the model is inconsistent; local."""
        if self._aggregator is not None:
            self._aggregator.check()

    def join(self) -> None:
        """Take over the model of the cells that are there, or give them this one's; collective over the cell.

        The cells that begin a federation take the model of the lowest of them. A cell that comes late waits until the
        others make their next round.
        """
        self.participate(RoundInput(1.0, is_absent=self._federation.standing.version.is_agreed))

    def participate(self, given: RoundInput, *, least_divergence: float | None = None) -> RoundReport | None:
        """Make a round with the cells that are there, until one is taken; collective over the cell.

        Returns ``None`` where all of these cells have finished and none had anything to give. Raises RoundError where
        the round was refused by a reason that lies in a model or an option, as :meth:`xffl.Aggregator.participate`, or
        where the cells that have met cannot reach each other.
        """
        assert least_divergence is None, "it needs norms"
        if self.is_closed:
            raise StateError("this aggregator is closed; make another one")
        self.check()
        start, tries = time.perf_counter(), 0
        while True:
            tries += 1
            start_round(self.rounds + 1)
            inject("meet")
            epoch = self._federation.meet(is_finished=given.is_finished)
            if self._settle(epoch):  # the steps have counted; the others wait for this cell in the next round
                given = replace(given, is_absent=True)
            is_taken, report = self._try_round(epoch, given)
            if is_taken:
                seconds = time.perf_counter() - start
                return None if report is None else self._spread(report, epoch, tries, given.is_finished, seconds)

    def _settle(self, epoch: Epoch) -> bool:
        """End this cell's doubt by what the others have told; tell whether its round was taken."""
        doubted, self._doubted = self._doubted, None
        is_taken = self._federation.standing.settle(epoch, self._federation.cell)
        if is_taken:
            assert doubted is not None, "kept while the round is in doubt"
            aggregator, its_epoch = doubted
            report = aggregator.resolve()
            if self.on_settled is not None:
                self.on_settled(self._spread(report, its_epoch, 1, False, report.seconds))
        return bool(is_taken)

    def _try_round(self, epoch: Epoch, given: RoundInput) -> tuple[bool, RoundReport | None]:
        """Make one try; tell whether the round was taken, and what it did, or it is to be made again."""
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
            report = aggregator.participate(replace(given, is_absent=given.is_absent or is_behind))
            end = RoundEnd.TAKEN
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
        agreed = federation.agree_on_end(end, epoch)
        if agreed is RoundEnd.TAKEN:
            if end is RoundEnd.IN_DOUBT:
                report = aggregator.resolve()
            if report is not None:
                self._limit_messages(report)
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
        scope = RoundScope(state, place.topology, place.first, groups, cross_world=place.group)
        self._aggregator = None
        self._aggregator = Aggregator(self.model, scope, **self._options)  # type: ignore[arg-type]
        return self._aggregator

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
        """Return the version of the model that this cell holds; local, the same on all ranks of the cell."""
        version = self._federation.standing.version
        return {
            "rounds": version.round,
            "elastic": {"created": version.created, "lineage": version.lineage, "voters": list(version.voters)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned; call it on all ranks, after loading the model, before joining."""
        if "elastic" not in state:
            raise CheckpointError(
                "the state is that of a federation that is not elastic; resume it as it was, or load the model alone"
            )
        plain = {"round": state["rounds"], **state["elastic"]}
        self._federation.standing.version = Version.from_plain(plain)
