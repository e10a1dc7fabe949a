"""The levels of rounds, and which units meet on each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from typing import Any

from xffl.aggregation.codec import Codec
from xffl.checks import index_of
from xffl.errors import ConfigError
from xffl.topology import REPLICATE_AXIS, Topology

__all__ = ["Level", "read_levels", "worlds_of"]

KEYWORDS = frozenset({"policies", "bucket_bytes", "atomic", "nonfinite", "form", "rails", "combine", "server"})
"""Keywords of an aggregator that a level may have; codecs are the levels' own, and the others need a single level."""


@dataclass(frozen=True)
class Level:
    """One level of rounds.

    :param every: Rounds of the level below between two of this one, at least 1; of the lowest level 1.
    :param codec: How its values are written, as :class:`xffl.Aggregator` takes it.
    :param groups: How many units of the level below make up each unit of this one, in order; ``None`` for the lowest,
        whose units are the state's cells.
    :param options: Keywords of this level's aggregator alone, such as ``{"server": "fedavgm:lr=0.7"}``.
    """

    every: int = 1
    codec: str | Codec | Mapping[str, str | Codec] = "none"
    groups: tuple[int, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def worlds_of(base: Topology, groups: Sequence[tuple[int, ...] | None], rank: int) -> list[tuple[Topology, int]]:
    """Return, for each level, the part of the world in which a rank's rounds take place; pure.

    :param base: The cells.
    :param groups: For each level above the lowest, how many units of the level below make up each of its own.
    :param rank: The rank.
    :return: The units that meet, as a topology of the part's own, and the part's first rank.
    :raises ConfigError: if the groups do not hold all units of the level below, or cells are cut unlike.
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
    for level, topology in enumerate(units):
        if level + 1 == len(units):
            worlds.append((topology, 0))
            continue
        above = units[level + 1]
        ranks = above.federation(above.cell_of(rank))
        first = topology.cell_of(ranks[0])
        sizes = topology.sizes[first : topology.cell_of(ranks[-1]) + 1]
        worlds.append((Topology(len(ranks), sizes, topology.replica_size, topology.cell_shape), ranks[0]))
    return worlds


def _joined_shape(base: Topology) -> tuple[tuple[str, int], ...] | None:
    """Return the shape of units of several cells: replicas lie outermost, one cell's after the other's."""
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
    """Read the levels that were asked for, and check what does not depend on the model; local.

    :param levels: The levels, the lowest first; each an object or its fields, as a configuration file has them.
    :param options: Keywords of all levels' aggregators.
    :return: The levels.
    :raises ConfigError: if a level or an option cannot be meant.
    """
    given = tuple(_plain(_read(level)) for level in levels) if isinstance(levels, Sequence) else ()
    if not given or not all(isinstance(level, Level) for level in given):
        raise ConfigError(f"levels {levels!r} are no list of Level; give at least one, the lowest first")
    for number, level in enumerate(given):
        every, groups = level.every, level.groups
        if index_of(every) is None or every < 1 or (not number and every != 1):
            raise ConfigError(
                f"every={every!r} of level {number} is no number of rounds of the level below; give a positive whole "
                "number, and 1 for level 0, whose rounds are those that the caller asks for"
            )
        is_list = isinstance(groups, tuple) and bool(groups)
        if is_list != bool(number) or (groups and not all(index_of(size) is not None and size > 0 for size in groups)):
            raise ConfigError(
                f"groups={groups!r} of level {number} cannot be meant; give a tuple of the numbers of units that make "
                "up each larger one, and None for level 0, whose units are the cells"
            )
        if unknown := sorted({*options, *level.options} - KEYWORDS):
            raise ConfigError(
                f"levels take no {', '.join(unknown)}; choose from {', '.join(sorted(KEYWORDS))}, and codec for each "
                "level"
            )
    return given


def _plain(level: Level) -> Level:
    """Return a level with plain integers in the place of whatever else counts as such."""
    if not isinstance(level, Level):
        return level  # is refused

    def plain(value: Any) -> Any:
        return value if index_of(value) is None else index_of(value)

    groups = tuple(map(plain, level.groups)) if isinstance(level.groups, tuple) else level.groups
    return replace(level, every=plain(level.every), groups=groups)


def _read(level: Level | Mapping[str, Any]) -> Level:
    if not isinstance(level, Mapping):
        return level
    names = [one.name for one in fields(Level)]
    if unknown := sorted(level.keys() - set(names)):
        raise ConfigError(f"a level has no {', '.join(map(str, unknown))}; choose from {', '.join(names)}")
    groups = level.get("groups")
    return Level(**{**level, "groups": tuple(groups) if isinstance(groups, Sequence) else groups})
