"""Which form a lane takes, and how many of its buckets are under way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xffl.aggregation.plan import Lane, Piece
from xffl.aggregation.routes import Routes
from xffl.aggregation.tracks import make_tracks
from xffl.report.forms import FLIGHT_BYTES, IN_FLIGHT, MOST_IN_FLIGHT, TINY, TINY_FOR_TWO, form_of, in_flight
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


@given(st.integers(0, 10**12), st.integers(1, 100), st.sampled_from(["all_gather", "two_hop"]))
def test_buckets_under_way_keep_within_their_bytes(nbytes: int, cells: int, form: str) -> None:
    depth = in_flight(nbytes, cells, form)
    assert IN_FLIGHT <= depth <= MOST_IN_FLIGHT
    copies = (cells - 1) / cells if form == "two_hop" else cells - 1
    assert depth == IN_FLIGHT or depth * nbytes * copies <= FLIGHT_BYTES
    if copies and IN_FLIGHT < depth < MOST_IN_FLIGHT:
        assert (depth + 1) * nbytes * copies > FLIGHT_BYTES


@pytest.mark.parametrize(
    "elements, rule, cells, is_two_hop, depth",
    [
        ([64 * MIB], "average", 2, True, 16),  # 2 MiB of each bucket arrive
        ([MIB], "average", 2, False, 8),
        ([64 * MIB], "average", 4, True, 10),
        ([64 * MIB], "first", 4, False, 4),
        ([1000] * 60_000, "average", 2, True, 4),  # each bucket is packed
        ([], "average", 3, False, 4),
    ],
)
def test_a_lane_has_the_form_and_depth_of_its_bytes(
    elements: list[int], rule: str, cells: int, is_two_hop: bool, depth: int
) -> None:
    pieces = tuple(Piece(item, 0, count) for item, count in enumerate(elements))
    lane = Lane(0, (True,) * cells, (0,) * cells, "float32", rule, False, "none", False, pieces)
    (track,) = make_tracks(
        [lane],
        topology=Topology(cells, 1),
        rank=0,
        routes=Routes(None, None, None, None),
        bucket_bytes=4 * MIB,
        form="auto",
        codecs={},
    )
    assert (track.is_two_hop, track.depth, track.ahead) == (is_two_hop, depth, depth // 2)
