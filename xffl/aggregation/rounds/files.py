"""Rounds over files: a job that is one cell starts from the global model and ends with an export for the next round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from xffl.aggregation.aggregator import Aggregator
from xffl.aggregation.engine.decision.consensus import checked_weight
from xffl.aggregation.engine.planning.lone_coverage import check_lone_cell
from xffl.aggregation.exports import RoundPlan, export_cell, load_agreed_global
from xffl.aggregation.rounds.config import RoundArguments, RoundConfig
from xffl.aggregation.rounds.offer import Outcome, RoundOffer
from xffl.cluster.over_files import read_over_files
from xffl.distributed.agreement.consistency import run_on_all_ranks
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import CheckpointError, ConfigError, RoundError, StateError

__all__ = ["FileRounds"]


class FileRounds:
    """The part that a job of one cell has in a round over files: ``xffl aggregate`` makes the round behind it.

    :param model: The model that trains.
    :param state: The state of this job, which is one cell.
    :param config: What the rounds are like.
    :param asked: The arguments as they were given, of which the export tells.
    :raises ConfigError: if something is asked for that rounds over files do not have.
    """

    meets_others = False
    may_join = False
    needs_join = False
    may_resume = False
    is_under_way = False
    can_go_on = False
    lineage = ""
    doubted = None
    fragments = 1
    next_fragment = 0

    def __init__(self, model: nn.Module, state: DistributedState, config: RoundConfig, asked: RoundArguments) -> None:
        if config.moments is not None:
            raise ConfigError(
                f"moments={config.moments} is for rounds over a network; leave it out of rounds over files"
            )
        if config.client is not None or config.delay or not isinstance(asked.aggregator, Mapping | None):
            raise ConfigError(
                f"this job is one cell by itself, whose rounds go over files, but client is {config.client}, delay "
                f"{config.delay} and aggregator {asked.aggregator!r}; give keywords for the aggregator, and leave the "
                "others out"
            )
        options = dict(asked.aggregator or {})
        self._policies = options.pop("policies", None)
        self._plan = RoundPlan(asked.algorithm, options)
        self._plan.check()
        self._model = model
        self._state = state
        self._cell, self._sizes = state.lone_cell or (0, (1,))
        self._folders = read_over_files({"cell": f"{self._cell}/{len(self._sizes)}"})
        self._rounds_before = 0
        self._is_open = False
        self._start: str | None = None  # the digest of the global model that this cell has started from
        self._weight_before = 0.0
        self.rounds = 0
        self.may_average = state.cells > 1

    @property
    def aggregator(self) -> Aggregator:
        """There is none."""
        raise StateError("the aggregator is made on entering the with block; enter it first")

    @property
    def total_weight(self) -> float:
        """Nothing is known of other cells, nor of the rounds before but what a state has told."""
        return self._weight_before

    def open(self) -> None:
        """Start from the global model of ``XFFL_FROM``, if any; collective over the world."""
        if self._is_open:
            raise StateError("a job of one cell makes one export, so its with block is entered once; start another job")
        self._is_open = True
        check_lone_cell(
            self._model,
            self._state,
            is_reduced_by_caller=bool(self._plan.options.get("gradients_reduced_by_caller", False)),
        )
        if self._folders.start is not None:
            self._rounds_before, self._start = load_agreed_global(
                self._folders.start, self._model, self._state, policies=self._policies
            )

    def join(self, offer: RoundOffer) -> tuple[Outcome, ...]:
        """Do nothing: there is nobody to join."""
        return ()

    def round(self, offer: RoundOffer) -> tuple[Outcome, ...]:
        """Export what the steps since the start have made, to ``XFFL_EXPORT``, if that is set.

        Collective over the world. What becomes of it is not known here.
        """
        given = offer.claim(0)
        if given.is_absent:
            offer.check_counted()
        weight: float | None = None
        with run_on_all_ranks(
            "weights", convert=lambda error: RoundError(f"the weight cannot be read: {type(error).__name__}: {error}")
        ):
            if given.weight is not None:
                weight = checked_weight(given.weight)
        if self._folders.export is not None and self._state.lone_cell is not None:
            export_cell(
                self._folders.export,
                self._model,
                self._state,
                cell=self._cell,
                cells=len(self._sizes),
                weight=0.0 if given.is_absent else weight,
                steps=given.steps,
                round=self._rounds_before + 1,
                policies=self._policies,
                start=self._start,
                plan=self._plan,
                sizes=self._sizes,
            )
        offer.commit(offer.take(0))
        return ()

    def start(self, offer: RoundOffer) -> tuple[Outcome, ...]:
        """Raise StateError: a round over files does not go on beside local steps."""
        raise StateError("rounds over files are not delayed; leave delay out")

    def settle(self) -> tuple[Outcome, ...]:
        """Do nothing: no round is under way."""
        return ()

    def discard(self) -> None:
        """Do nothing: no round is under way."""

    def close(self, error: BaseException | None) -> None:
        """Do nothing: the export stands."""

    def state_dict(self) -> dict[str, Any]:
        """Return which global model this job has started from; local, each rank saves its own."""
        return {"aggregator": None, "start": self._start, "total_weight": self._weight_before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        if state["aggregator"] is not None:
            raise CheckpointError(
                "the state was saved in a job of other rounds (over files, or over a network); resume with the same"
            )
        self._weight_before = float(state.get("total_weight", 0.0))  # older checkpoints do not tell

    def continues(self, state: Mapping[str, Any]) -> bool:
        """Tell whether the steps that waited still wait: those from before this job's global model are in it."""
        return bool(state["start"] == self._start)
