"""Which form a lane takes, and how many of its buckets are under way."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rounds import options_of
from xffl.aggregation.compression import codec_of
from xffl.aggregation.engine.groups import RoundGroups
from xffl.aggregation.engine.planning.plan import plan_transfers
from xffl.aggregation.engine.planning.transfers import BucketGroup, GroupTransfer, Piece
from xffl.costs import IN_FLIGHT, IN_FLIGHT_BYTES, MOST_IN_FLIGHT, TINY, TINY_FOR_TWO, form_of, pipeline_depth
from xffl.topology import Topology

MIB = 2**20


@pytest.mark.parametrize(
    "nbytes, cells, form",
    [
        (1e12, 1, "all_gather"),
        (TINY_FOR_TWO, 2, "all_gather"),
        (TINY_FOR_TWO + 1, 2, "two_hop"),
        (TINY, 3, "all_gather"),
        (TINY + 1, 3, "two_hop"),
        (TINY + 1, 8, "two_hop"),
    ],
)
def test_forms_follow_from_cells_and_size(nbytes: float, cells: int, form: str) -> None:
    assert form_of(nbytes, cells, "auto") == form
    for asked in ("all_gather", "two_hop"):
        assert form_of(nbytes, cells, asked) == (asked if cells > 1 else "all_gather")


def test_two_cells_write_a_code_once_only() -> None:
    assert form_of(1e12, 2, "auto", is_exact=False) == "all_gather"
    assert form_of(1e12, 3, "auto", is_exact=False) == "two_hop"


@given(st.integers(0, 10**12), st.integers(0, 200), st.integers(1, 100), st.sampled_from(["all_gather", "two_hop"]))
def test_buckets_under_way_keep_within_their_bytes(nbytes: int, count: int, cells: int, form: str) -> None:
    depth = pipeline_depth(nbytes, count, cells, form)
    assert IN_FLIGHT <= depth <= MOST_IN_FLIGHT
    copies = (cells - 1) / cells if form == "two_hop" else cells - 1
    assert depth == IN_FLIGHT or (depth * nbytes * copies <= IN_FLIGHT_BYTES and 3 * depth <= count)
    if nbytes * copies and IN_FLIGHT < depth < MOST_IN_FLIGHT:
        assert (depth + 1) * nbytes * copies > IN_FLIGHT_BYTES or 3 * (depth + 1) > count


def track_of(
    elements: list[int],
    topology: Topology,
    rule: str = "average",
    codec: str = "none",
    rails: bool = False,
    *,
    on_cpu: bool = True,
    form: str = "auto",
    dtype: str = "float32",
    by_part: bool = True,
    at_home: bool = False,
) -> GroupTransfer:
    pieces = tuple(Piece(item, 0, count) for item, count in enumerate(elements))
    cells = topology.cells
    group = BucketGroup(0, (by_part,) * cells, (0,) * cells, dtype, rule, at_home, codec, False, pieces)
    (transfer,) = plan_transfers(
        [group],
        topology,
        0,
        RoundGroups(None, (), None, None, multi_rail=rails),
        options_of(form=form),
        {"none": None, "int8": codec_of("int8")},
        is_on_cpu=on_cpu,
    )
    return transfer


@pytest.mark.parametrize(
    "elements, rule, cells, reduce_scatter, depth",
    [
        ([64 * MIB], "average", 2, True, 16),  # 2 MiB of each bucket arrive
        ([8 * MIB], "average", 2, False, 4),  # eight buckets in all
        ([5 * MIB] * 2, "average", 2, True, 4),
        ([256 * 1024] * 21, "average", 2, False, 7),
        ([64 * MIB], "average", 4, True, 10),
        ([64 * MIB], "first", 4, False, 4),
        ([1000] * 60_000, "average", 2, True, 4),  # each bucket is packed
        ([], "average", 3, False, 4),
    ],
)
def test_a_lane_has_the_form_and_depth_of_its_bytes(
    elements: list[int], rule: str, cells: int, reduce_scatter: bool, depth: int
) -> None:
    transfer = track_of(elements, Topology(cells, 1), rule)
    assert (transfer.reduce_scatter, transfer.depth, transfer.ahead) == (reduce_scatter, depth, depth // 2)


@pytest.mark.parametrize(
    "elements, cells, options, combiners",
    [
        ([12 * MIB], 2, {}, (0, 1) * 6),
        ([13 * MIB], 2, {}, (0, 1) * 6 + (None,)),
        ([MIB] * 8 + [MIB // 2] * 2 + [MIB, MIB // 2], 2, {}, (0, 1) * 5 + (None, None)),
        ([12 * MIB], 3, {}, ()),
        ([12 * MIB], 2, {"rails": True}, ()),
        ([12 * MIB], 2, {"on_cpu": False}, ()),  # NCCL would use one direction at a time
        ([12 * MIB], 2, {"rule": "first"}, ()),
    ],
)
def test_two_cells_take_turns_over_gloo(
    elements: list[int], cells: int, options: dict[str, Any], combiners: tuple[int | None, ...]
) -> None:
    transfer = track_of(elements, Topology(cells, 1), **options)
    assert transfer.combiners == combiners
    for bucket in transfer.buckets:
        numel, parts = bucket.stop - bucket.start, transfer.parts(bucket)
        sizes = [part.stop - part.start for part in parts]
        if not transfer.reduce_scatter:
            assert sizes == [numel] * cells
            continue
        assert sum(sizes) == numel and all(one.stop == two.start for one, two in itertools.pairwise(parts))
        combiner = combiners[bucket.number] if combiners else None
        assert combiner is None or sizes[combiner] == numel


def test_codes_of_two_cells_go_in_one_hop() -> None:
    assert not track_of([64 * MIB], Topology(2, 1), codec="int8").reduce_scatter
    assert track_of([64 * MIB], Topology(3, 1), codec="int8").reduce_scatter


def test_replicas_that_take_turns_have_a_depth_each() -> None:
    railed, single = (track_of([256 * MIB], Topology(6, (2, 4), 1), rails=rails) for rails in (True, False))
    assert (railed.depth, single.depth) == (64, 16)
