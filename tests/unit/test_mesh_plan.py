"""The plan of tensors whose parts lie on any shards of a cell: nothing lost, nothing twice."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from xffl.aggregation.engine.planning.mesh_cut import MeshCut, Part
from xffl.aggregation.engine.planning.plan import Item, plan_groups
from xffl.topology import Topology


@st.composite
def mesh_plans(draw: st.DrawFn) -> tuple[Topology, tuple[Item, ...]]:
    """Tensors whose parts lie on any shards, some on several."""
    shards = draw(st.integers(1, 4))
    sizes = tuple(shards * count for count in draw(st.lists(st.integers(1, 2), min_size=1, max_size=3)))
    items = []
    for index in range(draw(st.integers(0, 4))):
        places = draw(st.lists(st.integers(-1, 2), min_size=shards, max_size=shards))
        holders = [tuple(s for s, at in enumerate(places) if at == part) for part in range(3)]
        parts = [Part(draw(st.integers(1, 9)), one) for one in holders if one]
        cut = MeshCut.of_parts(parts, draw(st.integers(1, 5)))
        items.append(Item(index, "float32", "average", draw(st.booleans()), (cut,) * len(sizes)))
    return Topology(sum(sizes), sizes, shards), tuple(items)


@settings(max_examples=200, deadline=None)
@given(mesh_plans())
def test_parts_are_carried_once_and_seen_by_all_their_holders(case: tuple[Topology, tuple[Item, ...]]) -> None:
    topology, items = case
    planned = {rank: plan_groups(items, topology, rank) for rank in range(topology.world_size)}
    groups = {group.key: group for group in planned[0]}
    for rank, own in planned.items():
        at = topology.coordinates(rank)
        for group in own:
            assert groups.setdefault(group.key, group) == group
            assert at.shard in (group.holders or group.owners) and set(group.owners) <= {*group.holders, *group.owners}
        for item in items:
            seen = sorted(e for group in own for i, a, b in group.pieces if i == item.position for e in range(a, b))
            assert seen == list(range(*item.cuts[at.cell].held(at.shard)))
    for cell in range(topology.cells):
        for item in items:
            senders = {shard: planned[rank] for shard, rank in enumerate(topology.senders(cell))}
            carried = [
                element
                for shard, own in senders.items()
                for group in own
                if group.owners[cell] == shard
                for index, start, stop in group.pieces
                if index == item.position
                for element in range(start, stop)
            ]
            assert sorted(carried) == list(range(item.cuts[cell].numel))
