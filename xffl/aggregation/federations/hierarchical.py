"""Rounds on several levels: the cells of a facility average often, the facilities rarely.

The units of the lowest level are the state's cells. Each further level joins adjacent units to larger ones (a node's
cells, a facility's nodes) and averages these. A round of a level takes place right after a round of the level below,
when all cells of a unit hold the same model. The unit is then like one HSDP cell whose replicas are its cells, so each
shard leaves it once, however many cells it has.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from typing import Any

import torch.distributed as dist
from torch import nn

from xffl.aggregation.aggregator import Aggregator
from xffl.aggregation.algorithms.registry import make
from xffl.aggregation.compression import Codec, codec_of
from xffl.aggregation.engine.decision.consensus import RoundInput, checked_weight
from xffl.aggregation.engine.groups import RoundScope, make_creator
from xffl.aggregation.pending import PendingRound
from xffl.aggregation.report import RoundReport
from xffl.checks import did_you_mean, integer
from xffl.distributed.agreement.consistency import barrier, run_on_all_ranks
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.groups import IN_TURN, destroy_group, make_groups
from xffl.errors import CheckpointError, ConfigError, StateError, XfflError
from xffl.naming import Writer
from xffl.topology import REPLICATE_AXIS, Topology

__all__ = ["Level", "Levels", "read_levels", "worlds_of"]

ROUND_KINDS = ("federation", "replica", "federated")
"""Kinds of groups that a round uses."""


@dataclass
class _Stage:
    """The state of one level on this rank."""

    aggregator: Aggregator  # runs its rounds
    every: int  # as in Level
    unit: int  # number of this rank's unit among those that meet
    is_first: bool  # whether this is the first rank of its unit, which reports the unit's weight
    since: int = 0  # rounds of the level below since this level's last round
    count: float = 0.0  # the weight that this rank reports for its unit since then
    is_over: bool = False  # whether all units that meet here have finished
    is_apart: bool = False  # whether these units ended with different models, since their last round was rejected


class Levels:
    r"""Aggregators of several levels, used like a single one by :class:`xffl.FederatedScaling` or your loop.

    Making the object is collective over the world, and so is :meth:`close`, which destroys its process groups. A round
    is collective over the ranks that meet in it: a facility that is ahead of the others waits for them only in common
    rounds.

    .. code-block:: python

       levels = Levels(model, state, [Level(), Level(every=5, codec="int8", groups=(2, 2))])
       with xffl.FederatedScaling(model, optimizer, state, every=10, aggregator=levels):
           ...  # cells meet within a facility after 10 steps, facilities after 50

    *Weights.* A unit's weight is the sum of its cells' weights in the rounds below since the unit's last round; without
    weights, a cell counts 1 in each. If all levels meet in every round, this is the mean over all cells.

    *Failures.* A rejected round raises on the ranks that meet in it; others are not told. The models stay as the rounds
    of the levels below have left them, weights that these rounds have used are not used in them again, and the failed
    level is due again after the next round below. A facility that repeats a round meets the others later. If a facility
    leaves by an uncaught exception, the others wait until their timeout. A facility that finishes while its last round
    is rejected contributes nothing to the levels above, and takes their result.

    *Ends.* A facility whose cells have all finished meets the others at once with what it has not contributed yet, and
    then answers their rounds until all have finished.

    *Codecs and server optimizers* of a level start from the level's last agreed model, or from that of a level above if
    it is newer.

    :param model: As for :class:`xffl.Aggregator`.
    :param state: The state that describes the federation; the lowest level averages its cells. For more than one level
        all cells must have replicas of one size, or be of one size.
    :param levels: The levels, the lowest first; each an object or a mapping of its fields.
    :param \**options: Keywords of all levels' aggregators: ``policies``, ``bucket_bytes``, ``atomic``, ``nonfinite``,
        ``form``, ``rails``, ``combine``, ``server``, ``gradients_reduced_by_caller``.
    :raises StateError: if torch.distributed is not initialized.
    :raises ConfigError: if the levels or an option are invalid; on all ranks.
    """

    # The attributes of an aggregator whose rounds are of the whole model and blocking.
    fragments = 1
    next_fragment = 0
    overlaps = False
    accountant = None
    under_way = None

    def __init__(
        self, model: nn.Module, state: DistributedState, levels: Sequence[Level | Mapping[str, Any]], **options: Any
    ) -> None:
        if not dist.is_initialized():
            raise StateError("torch.distributed is not initialized; open xffl.session(), or call init_process_group")
        with run_on_all_ranks("levels") as share:
            if state.isolated is not None:
                raise ConfigError(
                    "levels hand models round among the ranks of several cells, which share no world where cells are "
                    "isolated; leave levels out, or isolate"
                )
            base = state.topology
            given = read_levels(levels, options)
            worlds = worlds_of(base, [level.groups for level in given[1:]], dist.get_rank())
            given = tuple(_with_parts(number, level, options) for number, level in enumerate(given))
            share([(level.every, level.groups) for level in given])
        self.model = model
        self._scopes = [_make_scope(state, topology, first) for topology, first in worlds]
        self._stages: list[_Stage] = []
        try:
            for number, (level, scope) in enumerate(zip(given, self._scopes, strict=True)):
                self._stages.append(_make_stage(number, model=model, level=level, scope=scope, options=options))
        except XfflError:
            self._destroy()
            raise
        before, cells = base.cell_of(worlds[0][1]), worlds[0][0].cells
        self._neighbours = before, cells, base.cells - before - cells
        self._taken = 0.0
        self._steps_taken = 0.0
        self._has_ended = False
        self._reports: list[RoundReport | None] = [None] * len(given)

    @property
    def _lowest(self) -> Aggregator:
        return self._stages[0].aggregator

    @property
    def rounds(self) -> int:
        """Number of rounds of the lowest level that have taken place."""
        return self._lowest.rounds

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` has destroyed the process groups."""
        return self._lowest.is_closed

    @property
    def is_torn(self) -> bool:
        """Whether a failed round may have left different weights on different ranks."""
        return self._lowest.is_torn

    @property
    def reports(self) -> tuple[RoundReport | None, ...]:
        """The reports of the last call, the lowest level first; ``None`` for a level without a round.

        The cells of a report are the level's units that met, and ``bytes_across`` counts bytes to other units.
        """
        return tuple(self._reports)

    @property
    def can_go_on(self) -> bool:
        """Whether another round may follow a rejected one: the model is consistent, and other ranks are still there."""
        is_out_of_step = any(stage.aggregator.is_out_of_step for stage in self._stages)
        return not (self.is_closed or self.is_torn or self._has_ended or is_out_of_step)

    def check(self) -> None:
        """Raise RoundError while the model is inconsistent, as :meth:`xffl.Aggregator.check`; local."""
        self._lowest.check()

    def aggregate(self, weight: float | None = None, *, steps: float = 1.0) -> RoundReport:
        """Run a round of the lowest level and of all that are due above, as :meth:`xffl.Aggregator.aggregate`."""
        report = self.participate(RoundInput(weight, steps=steps))
        assert report is not None, "a rank that has not finished always gets a report"
        return report

    def aggregate_async(self, *args: Any, **options: Any) -> PendingRound:
        """Raise StateError: rounds of several levels are blocking."""
        return self._lowest.aggregate_async(*args, **options)

    def participate(self, given: RoundInput, *, least_divergence: float | None = None) -> RoundReport | None:
        """Run a round of the lowest level, and of each level above that is due then.

        Collective over the ranks that meet. After an error pass the weight and steps since the last call that returned:
        levels whose rounds were committed subtract what they have used. Returns the report of the highest level that
        had a round, as :meth:`xffl.Aggregator.participate`; ``step_seconds`` are by the state's cells, 0 for those of
        other facilities.
        """
        if least_divergence is not None:
            raise StateError("levels meet after a number of rounds; give a schedule without a threshold")
        self._lowest.check_free()
        self._reports = [None] * len(self._stages)
        self._has_ended = False
        asked, weight = self._taken, given.weight

        def count() -> float:
            nonlocal asked
            asked = checked_weight(weight)
            return max(0.0, asked - self._taken)

        # After an error in a level above, the lowest level has already used some of the weight that is passed again.
        has_new = given.steps > self._steps_taken or not (given.is_finished and self._steps_taken)
        lowest = replace(
            given,
            weight=None if weight is None else count,
            is_absent=given.is_absent or not has_new,
            steps=given.steps - self._steps_taken if given.steps > self._steps_taken else given.steps,
        )
        report: RoundReport | None = None
        if not self._stages[0].is_over:
            report = self._round(0, lowest)
            self._taken = asked
            self._steps_taken = given.steps
        for number, (below, stage) in enumerate(pairwise(self._stages), 1):
            if stage.is_over:
                continue
            if not below.is_over and stage.since < stage.every:
                break
            unit_weight = 0.0 if below.is_apart else stage.count
            unit = RoundInput(
                unit_weight,
                is_absent=not unit_weight,
                is_finished=below.is_over,
                steps=float(stage.since),
                seconds=given.seconds,
            )
            report = self._round(number, unit)
        self._taken = 0.0
        self._steps_taken = 0.0
        if self._stages[-1].is_over:
            self._end()
        if report is None:
            return None
        # By the state's cells; 0 for cells that this rank has not met. () if no cell contributed.
        before, cells, after = self._neighbours
        here = () if self._reports[0] is None else self._reports[0].step_seconds
        return replace(report, step_seconds=(0.0,) * before + (here or (0.0,) * cells) + (0.0,) * after)

    def _round(self, number: int, given: RoundInput) -> RoundReport | None:
        """Take part in a round of one level, and update the levels below and above."""
        stage = self._stages[number]
        try:
            report = stage.aggregator.participate(given)
        except XfflError as error:
            if stage.aggregator.all_finished:
                stage.is_over = stage.is_apart = True
                if stage is self._stages[-1]:
                    self._end()
            raise type(error)(f"{error}{_where(number, self._scopes[number])}") from error
        stage.is_over = report is None or report.is_last
        self._reports[number] = report
        if report is None:
            return None
        stage.since = 0
        stage.count = 0.0
        for below in self._stages[:number]:
            below.is_apart = False
            below.aggregator.restart()
        for above in self._stages[number + 1 : number + 2]:
            above.since += 1
            above.count += report.weights[stage.unit] if stage.is_first else 0.0
        return report

    def _end(self) -> None:
        """Note that all ranks of the world have finished; they may start again together."""
        self._has_ended = True
        for stage in self._stages:
            stage.is_over = stage.is_apart = False

    def discard(self) -> None:
        """Do nothing: no round is ever under way."""

    def close(self) -> None:
        """Destroy the process groups; the levels cannot be used afterwards. Collective over the world.

        A second call does nothing.
        """
        if self.is_closed:
            return
        self._lowest.check_free()
        self._lowest.retire()
        barrier()  # no rank still uses a group that another rank destroys
        self._destroy()

    def _destroy(self) -> None:
        groups = [*(stage.aggregator.own_groups for stage in self._stages), *(scope.own for scope in self._scopes)]
        for group in dict.fromkeys(itertools.chain.from_iterable(groups)):
            destroy_group(group)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, of all levels; local, each rank saves its own.

        :return: Numbers, texts and copies of tensors.
        """
        above = [
            {
                "aggregator": stage.aggregator.state_dict(),
                "every": stage.every,
                "since": stage.since,
                "count": stage.count,
            }
            for stage in self._stages[1:]
        ]
        return {**self._lowest.state_dict(), "above": above, "taken": [self._taken, self._steps_taken]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; call it on all ranks, after loading the model.

        :param state: The saved state of this rank.
        :raises CheckpointError: if it was saved with other levels.
        """
        above = state.get("above", ())
        if len(above) != len(self._stages) - 1:
            raise CheckpointError(
                f"the state is that of {len(above) + 1} levels, and there are {len(self._stages)}; resume with the same"
            )
        for number, (stage, saved) in enumerate(zip(self._stages[1:], above, strict=True), 1):
            if (every := saved.get("every", stage.every)) != stage.every:
                raise CheckpointError(
                    f"the state is that of a level {number} which meets every {every} rounds of the level below, and "
                    f"this one meets every {stage.every}; resume with the same levels"
                )
        self._lowest.load_state_dict({part: value for part, value in state.items() if part != "above"})
        for stage, saved in zip(self._stages[1:], above, strict=True):
            stage.aggregator.load_state_dict(saved["aggregator"])
            stage.since = int(saved["since"])
            stage.count = float(saved["count"])
        for stage in self._stages:
            stage.is_over = stage.is_apart = False
        self._taken, self._steps_taken = map(float, state["taken"])


def _with_parts(number: int, level: Level, options: Mapping[str, Any]) -> Level:
    """Return a level whose codec is known by name, and whose server and combiner are objects; local.

    An error in their options does not depend on the level's ranks, so the message names only the level.
    """
    parts = {kind: part for kind, part in {**options, **level.options}.items() if kind in ("server", "combine")}
    try:
        for name in level.codec.values() if isinstance(level.codec, Mapping) else (level.codec,):
            codec_of(name)
        made = {kind: make(kind, part, writer=Writer.USER) for kind, part in parts.items() if _is_spec(part)}
    except ConfigError as wrong:
        raise ConfigError(f"level {number}: {wrong}") from wrong
    return replace(level, options={**level.options, **made})


def _is_spec(part: object) -> bool:
    return isinstance(part, (str, Mapping))


def _make_scope(state: DistributedState, topology: Topology, first: int) -> RoundScope:
    """Make the groups of a part of the world; collective over the world.

    All parts that are made together have replicas of one size, so that every rank makes the same number of groups.
    """
    made: list[dist.ProcessGroup] = []
    create = make_creator(state, made, first)
    groups = make_groups(
        create,
        topology=topology,
        rank=dist.get_rank() - first,
        kinds=ROUND_KINDS,
        handles=state.handle_count,
        streamed=IN_TURN,
    )
    if topology.world_size < dist.get_world_size():
        groups["world"] = (create(tuple(range(topology.world_size)), "xffl_part"),)
    return RoundScope(state, topology=topology, first=first, groups=groups, own=tuple(made))


def _make_stage(number: int, model: nn.Module, level: Level, scope: RoundScope, options: Mapping[str, Any]) -> _Stage:
    """Make the aggregator of one level; collective over the world."""
    keywords = {**options, **level.options}
    # If it fails here, ranks elsewhere may have made theirs.
    with run_on_all_ranks(f"aggregators of level {number}"):
        try:
            aggregator = Aggregator(model, scope, codec=level.codec, **keywords)  # type: ignore[arg-type]
        except XfflError as wrong:
            raise type(wrong)(f"{wrong}{_where(number, scope)}") from wrong
    at = scope.topology.coordinates(scope.rank)
    return _Stage(aggregator, level.every, at.cell, at.local_rank == 0)


def _where(number: int, scope: RoundScope) -> str:
    """Return the end of a message: its level, and how its cells and ranks are numbered."""
    first, ranks = scope.first, scope.topology.world_size
    return f" (level {number}: cells and ranks are counted in ranks {first} to {first + ranks - 1} of the world)"


KEYWORDS = frozenset(
    {
        "policies",
        "bucket_bytes",
        "atomic",
        "nonfinite",
        "form",
        "rails",
        "combine",
        "server",
        "gradients_reduced_by_caller",
    }
)
"""Keywords of an aggregator that a level may have. ``codec`` is a field of the level; others need a single level."""


@dataclass(frozen=True)
class Level:
    """One level of rounds.

    :param every: Number of rounds of the level below for each round of this one, at least 1; 1 for the lowest level.
    :param codec: The codec of its rounds, as for :class:`xffl.Aggregator`.
    :param groups: How many units of the level below make up each unit of this one, in order; ``None`` for the lowest,
        whose units are the state's cells.
    :param options: Keywords of this level's aggregator only, such as ``{"server": "fedavgm:lr=0.7"}``.
    """

    every: int = 1
    codec: str | Codec | Mapping[str, str | Codec] = "none"
    groups: tuple[int, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def worlds_of(base: Topology, groups: Sequence[tuple[int, ...] | None], rank: int) -> list[tuple[Topology, int]]:
    """Return, for each level, the part of the world in which a rank's rounds take place; pure.

    This is a topology of the units that meet, and their first rank. ``groups`` has, for each level above the lowest,
    how many units of the level below make up each of its units. Raises ConfigError if they do not contain all units of
    the level below, or cells cut the model differently.
    """
    if groups and not base.is_cut_alike:
        raise ConfigError(
            f"cells of {base.sizes} ranks without HSDP cut the model in different ways, so no larger unit holds the "
            "same shards; give cells of one size, or hsdp"
        )
    shards = base.shards(0)
    units = [base]
    for number, sizes in enumerate(groups, 1):
        below = units[-1]
        if sizes is None or sum(sizes) != below.cells:
            raise ConfigError(
                f"groups {sizes} of level {number} do not hold the {below.cells} units of the level below; give how "
                "many of them make up each unit, in order"
            )
        ends = [below.offsets[end] for end in accumulate(sizes, initial=0)]
        joined = tuple(stop - start for start, stop in pairwise(ends))
        units.append(Topology(base.world_size, joined, shards, _joined_shape(base)))
    worlds = []
    for topology, above in pairwise(units):
        ranks = above.federation(above.cell_of(rank))
        first = topology.cell_of(ranks[0])
        sizes = topology.sizes[first : topology.cell_of(ranks[-1]) + 1]
        worlds.append((Topology(len(ranks), sizes, topology.replica_size, topology.cell_shape), ranks[0]))
    return [*worlds, (units[-1], 0)]


def _joined_shape(base: Topology) -> tuple[tuple[str, int], ...] | None:
    """Return the shape of units of several cells: replicas are the outermost axis, cell after cell."""
    if base.cell_shape is None:
        return None
    sizes = dict(base.cell_shape)
    axes = list(sizes)
    outer = {axis: sizes[axis] for axis in axes[: axes.index(REPLICATE_AXIS)] if sizes[axis] > 1}
    if outer and max(base.replica_counts) > 1:
        raise ConfigError(
            f"cells of shape {sizes} have {max(base.replica_counts)} replicas inside of {', '.join(outer)}, which do "
            f"not line up with other cells' in a larger unit; give a cell_shape with {REPLICATE_AXIS} outermost, or a "
            "single level"
        )
    return ((REPLICATE_AXIS, -1), *((axis, size) for axis, size in sizes.items() if axis != REPLICATE_AXIS))


def read_levels(levels: Sequence[Level | Mapping[str, Any]], options: Mapping[str, Any]) -> tuple[Level, ...]:
    """Read levels from objects or mappings of their fields, and check all that does not depend on the model; local."""
    if not isinstance(levels, Sequence) or not levels:
        raise ConfigError(f"levels must be a list of at least one Level, the lowest first, got {levels!r}")
    return tuple(_read_level(number, level, options) for number, level in enumerate(levels))


def _read_level(number: int, level: Level | Mapping[str, Any], options: Mapping[str, Any]) -> Level:
    """Return one level with plain integers; raise ConfigError where it is invalid."""
    if isinstance(level, Mapping):
        names = [item.name for item in fields(Level)]
        if unknown := sorted(level.keys() - set(names)):
            misspelled = ", ".join(f"{name}{did_you_mean(str(name), names)}" for name in unknown)
            raise ConfigError(f"a level has no {misspelled}; choose from {', '.join(names)}")
        sizes = level.get("groups")
        level = Level(**{**level, "groups": tuple(sizes) if isinstance(sizes, Sequence) else sizes})
    if not isinstance(level, Level):
        raise ConfigError(f"level {number} must be a Level or a mapping of its fields, got {level!r}")
    hint = "give the number of rounds of the level below, and 1 for level 0, whose rounds the caller starts"
    every = integer(f"every of level {number}", level.every, 1, None if number else 1, hint=hint)
    groups, what = level.groups, f"groups={level.groups!r} of level {number}"
    if (isinstance(groups, tuple) and bool(groups)) != bool(number) or (not number and groups is not None):
        raise ConfigError(
            f"{what} is invalid; give a tuple of the numbers of units that make up each larger one, and None for "
            "level 0, whose units are the cells"
        )
    if groups is not None:
        groups = tuple(integer(what, size, hint="give the units that make up each larger one") for size in groups)
    if unknown := sorted({*options, *level.options} - KEYWORDS):
        raise ConfigError(
            f"levels take no {', '.join(unknown)}; choose from {', '.join(sorted(KEYWORDS))}, and codec for each level"
        )
    return replace(level, every=every, groups=groups)
