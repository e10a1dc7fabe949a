"""The plan: nothing lost, nothing twice, the same on all ranks that share a lane."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from xffl.aggregation.engine.planning.mesh_cut import MeshCut, Part
from xffl.aggregation.engine.planning.plan import Cut, Item, digest, plan_groups
from xffl.aggregation.engine.planning.transfers import BucketGroup, Piece
from xffl.topology import Topology


@st.composite
def plans(draw: st.DrawFn) -> tuple[Topology, tuple[Item, ...], int]:
    """A federation, tensors of any size cut in any way, and a bucket size."""
    replica_size = draw(st.none() | st.integers(1, 3))
    replicas = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    sizes = tuple(count * (replica_size or 1) for count in replicas)
    topology = Topology(sum(sizes), sizes, replica_size)
    items = []
    for index in range(draw(st.integers(0, 5))):
        length, inner = draw(st.integers(0, 12)), draw(st.integers(0, 5))
        is_cut = [draw(st.booleans()) for _ in sizes]
        cuts = tuple(
            Cut.of_axis(length, inner, topology.shards(cell))
            if cut
            else Cut.of_copy(length * inner, topology.shards(cell))
            for cell, cut in enumerate(is_cut)
        )
        rule = draw(st.sampled_from(["average", "first"]))
        dtype, codec = draw(st.sampled_from(["float32", "int64"])), draw(st.sampled_from(["none", "int8"]))
        items.append(
            Item(index, dtype, rule, draw(st.booleans()), cuts, codec, draw(st.integers(0, 2)), draw(st.booleans()))
        )
    return topology, tuple(items), draw(st.integers(1, 40))


@settings(max_examples=200, deadline=None)
@given(plans())
def test_every_element_has_one_owner_in_each_cell(case: tuple[Topology, tuple[Item, ...], int]) -> None:
    topology, items, _ = case
    planned = {rank: plan_groups(items, topology, rank) for rank in range(topology.world_size)}
    for cell in range(topology.cells):
        owned: dict[int, list[int]] = {item.position: [] for item in items}
        for rank in topology.federation(cell):
            at = topology.coordinates(rank)
            for group in planned[rank]:
                if at.is_sender and group.owners[cell] == at.shard:
                    for index, start, stop in group.pieces:
                        owned[index].extend(range(start, stop))
        for item in items:
            assert sorted(owned[item.position]) == list(range(item.cuts[cell].numel))


@settings(max_examples=200, deadline=None)
@given(plans())
def test_a_rank_sees_all_elements_that_it_holds(case: tuple[Topology, tuple[Item, ...], int]) -> None:
    topology, items, _ = case
    for rank in range(topology.world_size):
        at = topology.coordinates(rank)
        seen: dict[int, list[int]] = {item.position: [] for item in items}
        for group in plan_groups(items, topology, rank):
            for index, start, stop in group.pieces:
                seen[index].extend(range(start, stop))
        for item in items:
            cut = item.cuts[at.cell]
            held = cut.bounds(at.shard) if cut.is_held_by_part else (0, cut.numel)
            assert sorted(seen[item.position]) == list(range(*held))


@settings(max_examples=200, deadline=None)
@given(plans())
def test_participants_of_a_lane_see_the_same_lane_in_the_same_order(
    case: tuple[Topology, tuple[Item, ...], int],
) -> None:
    topology, items, limit = case
    groups: dict[tuple[object, ...], BucketGroup] = {}
    for rank in range(topology.world_size):
        own = plan_groups(items, topology, rank)
        assert [group.key for group in own] == sorted(group.key for group in own)  # type: ignore[type-var]
        for group in own:
            assert groups.setdefault(group.key, group) == group
            assert list(groups[group.key].buckets(limit)) == list(group.buckets(limit))


@settings(max_examples=200, deadline=None)
@given(plans())
def test_buckets_hold_everything_once_and_none_is_too_large(case: tuple[Topology, tuple[Item, ...], int]) -> None:
    topology, items, limit = case
    for group in plan_groups(items, topology, 0):
        buckets = list(group.buckets(limit))
        elements = [
            (piece.item, e) for bucket in buckets for piece in bucket.pieces for e in range(piece.start, piece.stop)
        ]
        assert sorted(elements) == [(index, e) for index, start, stop in group.pieces for e in range(start, stop)]
        assert [bucket.number for bucket in buckets] == list(range(len(buckets)))
        assert [b.start for b in buckets] == [0, *itertools.accumulate(b.stop - b.start for b in buckets)][:-1]
        assert all(0 < b.stop - b.start == sum(p.stop - p.start for p in b.pieces) <= limit for b in buckets)
        # Two neighbours of small pieces do not fit into one bucket.
        shared = [b.stop - b.start for b in buckets if max(p.stop - p.start for p in b.pieces) < limit / 8]
        assert all(a + b > limit * 7 / 8 for a, b in itertools.pairwise(shared))


@settings(max_examples=200, deadline=None)
@given(plans(), st.integers(1, 5))
def test_the_parts_of_a_bucket_hold_it_once(case: tuple[Topology, tuple[Item, ...], int], cells: int) -> None:
    topology, items, limit = case
    for group in plan_groups(items, topology, 0):
        for bucket in group.buckets(limit):
            held = [e for cell in range(cells) for e in range(1000)[bucket.part(cell, cells)]]
            assert held == list(range(bucket.stop - bucket.start))


def test_large_pieces_get_even_buckets_of_their_own() -> None:
    pieces = (Piece(0, 0, 3), Piece(1, 0, 250), Piece(2, 5, 9))
    group = BucketGroup(0, (True,), (0,), "float32", "average", False, "none", False, pieces)
    buckets = list(group.buckets(100))
    assert [b.pieces for b in buckets[:3]] == [((1, 0, 84),), ((1, 84, 168),), ((1, 168, 250),)]
    assert buckets[3].pieces == ((0, 0, 3), (2, 5, 9))


def test_small_pieces_fill_as_many_buckets_as_they_need() -> None:
    group = BucketGroup(
        0, (True,), (0,), "float32", "average", False, "none", False, tuple(Piece(i, 0, 5) for i in range(45))
    )
    assert [len(bucket.pieces) for bucket in group.buckets(64)] == [12, 12, 12, 9]


def test_a_small_replicated_tensor_is_not_shared_out() -> None:
    assert Cut.of_copy(1000, 8).chunk == 125
    assert Cut.of_copy(1000, 8, 300).chunk == 300
    assert Cut.of_copy(1000, 8, 5000).bounds(0) == (0, 1000)
    on_a_mesh = MeshCut.of_parts([Part(1000, (0, 1, 2))], 400)
    assert [on_a_mesh.bounds(shard) for shard in range(3)] == [(0, 400), (400, 800), (800, 1000)]


def test_the_digest_tells_plans_apart() -> None:
    topology = Topology(4, (2, 2))
    item = Item(0, "float32", "average", False, (Cut.of_axis(7, 3, 2),) * 2)
    assert digest([item], topology) == digest([item], Topology(4, (2, 2)))
    others = [
        digest([item._replace(codec="int8")], topology),
        digest([], topology),
        digest([item], Topology(4, (3, 1))),
        digest([item], Topology(4, (2, 2), 1)),
        digest([item], Topology(4, (2, 2), 2)),
        digest([item], Topology(4, (2, 2), cell_shape={"dp_replicate": 1, "tp": 2})),
    ]
    assert len({digest([item], topology), *others}) == 7


def test_equal_cuts_make_one_lane_for_each_shard() -> None:
    topology = Topology(8, (4, 4), 2)
    item = Item(0, "float32", "average", False, (Cut.of_axis(7, 3, 2),) * 2)
    (group,) = plan_groups([item], topology, 6)
    assert group.owners == (0, 0)
    assert group.pieces == ((0, 0, 12),)


def test_unequal_cuts_meet_in_the_common_refinement() -> None:
    topology = Topology(6, (4, 2))
    item = Item(0, "float32", "average", False, (Cut.of_axis(10, 1, 4), Cut.of_axis(10, 1, 2)))
    # Cell 0 cuts at 3, 6, 9; cell 1 at 5.
    pieces = {
        rank: [(group.owners, *group.pieces[0][1:]) for group in plan_groups([item], topology, rank)]
        for rank in range(6)
    }
    assert pieces[1] == [((1, 0), 3, 5), ((1, 1), 5, 6)]
    assert pieces[5] == [((1, 1), 5, 6), ((2, 1), 6, 9), ((3, 1), 9, 10)]
