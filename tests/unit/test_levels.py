"""Where a rank's rounds take place on each level, for every rank."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import xffl
from xffl.aggregation.federations.hierarchical import Level, Levels, worlds_of
from xffl.topology import Topology


@st.composite
def federations(draw: st.DrawFn) -> tuple[Topology, list[tuple[int, ...]]]:
    cells = draw(st.integers(1, 12))
    shards = draw(st.integers(1, 3))
    if draw(st.booleans()):
        sizes = tuple(shards * draw(st.integers(1, 3)) for _ in range(cells))
        base = Topology(sum(sizes), sizes, shards)
    else:
        base = Topology(cells * shards, (shards,) * cells)
    groups, units = [], cells
    for _ in range(draw(st.integers(0, 3))):
        ends = sorted(draw(st.sets(st.integers(1, units), max_size=3)) | {units})
        groups.append(tuple(b - a for a, b in pairwise([0, *ends])))
        units = len(ends)
    return base, groups


@settings(max_examples=200, deadline=None)
@given(federations())
def test_the_parts_of_each_level_are_the_units_of_the_next(given: tuple[Topology, list[tuple[int, ...]]]) -> None:
    base, groups = given
    world = range(base.world_size)
    by_rank = [worlds_of(base, groups, rank) for rank in world]
    cells = [[(cell,) for cell in range(base.cells)]]  # of each unit of each level
    for sizes in groups:
        below = cells[-1]
        cells.append([sum(below[a:b], ()) for a, b in pairwise(accumulate(sizes, initial=0))])
    for rank, worlds in enumerate(by_rank):
        at = base.coordinates(rank)
        assert len(worlds) == len(groups) + 1 and worlds[-1][0].world_size == base.world_size and worlds[-1][1] == 0
        for level, (topology, first) in enumerate(worlds):
            here = topology.coordinates(rank - first)
            assert here.shard == at.shard and topology.shards(here.cell) == base.shards(at.cell)
            # The unit holds the ranks of its cells and no others; so does the part, of the unit of the next level.
            for ranks, level_of in ((topology.federation(here.cell), level), (range(topology.world_size), level + 1)):
                unit = next(unit for unit in [*cells, [tuple(range(base.cells))]][level_of] if at.cell in unit)
                assert {base.cell_of(first + member) for member in ranks} == set(unit)
                assert len(ranks) == sum(base.sizes[cell] for cell in unit)
            for member in range(topology.world_size):
                assert by_rank[first + member][level] == (topology, first)


def test_without_levels_above_cells_may_differ() -> None:
    base = Topology(5, (3, 2))
    assert worlds_of(base, [], 4) == [(base, 0)]
    with pytest.raises(xffl.ConfigError, match="give cells of one size, or hsdp"):
        worlds_of(base, [(1, 1)], 4)


@pytest.mark.parametrize("sizes", [None, (), (1,), (2, 2)])
def test_groups_hold_all_units(sizes: tuple[int, ...] | None) -> None:
    with pytest.raises(xffl.ConfigError, match="of level 1 do not hold the 3 units of the level below"):
        worlds_of(Topology(3, 1), [sizes], 0)


def test_levels_need_a_world() -> None:
    with pytest.raises(xffl.StateError, match="not initialized"):
        Levels(nn.Linear(1, 1), xffl.DistributedState(), [Level()])
