"""Buckets on their way through a rank's resources: closed forms for the stages that can be the slowest."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from xffl.planning.forecast import SIMULATED, Pace, Stages, follow, simulate


def stages(**changed: Any) -> Stages:
    given_ = {"pack": 0.0, "hops": (1.0,), "combine": (0.0,), "latency": 0.0}
    return Stages(**{**given_, "is_asked": False, "home": 0.0, "home_latency": 0.0, **changed})


@pytest.mark.parametrize("pace", [Pace(2), Pace(4, 2, 2), Pace(1, 3, 1)])
@pytest.mark.parametrize("is_asked", [False, True])
def test_one_bucket_passes_all_stages_one_after_the_other(is_asked: bool, pace: Pace) -> None:
    one = stages(pack=1.0, hops=(2.0, 3.0), combine=(4.0, 5.0), latency=10.0, is_asked=is_asked, home=6.0)
    words = 2 * 10.0 if is_asked else 0.0
    assert simulate(one, 1, 1.0, pace).end == 1 + 2 + 10 + 4 + 3 + 10 + 5 + 6 + words
    assert simulate(one, 1, 0.5, pace).end == (1 + 2 + 4 + 3 + 5 + 6) / 2 + 20 + words


# Which stage is the slowest: the link; the processor before and after; the network inside the cell, which goes on while
# the next bucket is combined, unless it is waited for before that; the latency, shared by the buckets under way.
BOUND = {
    "link": ({"hops": (5.0,), "pack": 1.0, "combine": (2.0,), "home": 3.0, "latency": 1.0}, Pace(2, 0, 2), 5.0),
    "processor": ({"hops": (1.0,), "pack": 2.0, "combine": (3.0,), "home": 1.0}, Pace(2, 0, 2), 5.0),
    "home": ({"hops": (1.0,), "pack": 1.0, "combine": (1.0,), "home": 7.0}, Pace(2, 0, 2), 7.0),
    "home, next": ({"hops": (1.0,), "pack": 1.0, "combine": (1.0,), "home": 7.0}, Pace(2, 0, 1), 7.0 + 1.0),
    "home at once": ({"hops": (1.0,), "pack": 1.0, "combine": (1.0,), "home": 7.0}, Pace(2), 7.0 + 1.0 + 1.0),
    "latency": ({"hops": (1.0,), "pack": 1.0, "combine": (2.0,), "latency": 100.0}, Pace(2), (1 + 1 + 100 + 2) / 2),
    "two hops": ({"hops": (3.0, 3.0), "combine": (1.0, 1.0), "latency": 0.5}, Pace(2, 1, 2), 6.0),
}


@pytest.mark.parametrize(("changed", "pace", "period"), BOUND.values(), ids=BOUND)
@pytest.mark.parametrize("buckets", [500.0, 100_000.0])
def test_a_long_pipeline_takes_the_time_of_its_slowest_stage(
    changed: dict[str, Any], pace: Pace, period: float, buckets: float
) -> None:
    """Closed form: every bucket costs what the busiest resource needs, or a full turn shared by those in flight."""
    slow = stages(**changed)
    hops = len(slow.hops)
    through = slow.pack + sum(slow.hops) + sum(slow.combine) + hops * slow.latency + slow.home
    assert follow(slow, buckets, pace).end == pytest.approx(through + (buckets - 1) * period, rel=0.01)


@pytest.mark.parametrize("in_flight", [2, 3, 4])
def test_words_that_queue_behind_data_cost_a_latency_for_every_bucket_in_flight_but_one(in_flight: int) -> None:
    """Closed form for gloo, where the link is slower than all else; the rule was found by measuring (see the docs)."""
    slow = stages(hops=(5.0,), latency=1.0, is_asked=True)
    period = 5.0 + 1.0 / (in_flight - 1)
    assert follow(slow, 3000.0, Pace(in_flight)).end == pytest.approx(2 * 1.0 + 3000 * period, rel=0.01)


@pytest.mark.parametrize("in_flight", [2, 3, 4])
def test_words_sent_one_bucket_ahead_still_cost_a_latency_for_every_bucket_in_flight(in_flight: int) -> None:
    slow = stages(hops=(5.0,), latency=1.0, is_asked=True)
    assert follow(slow, 3000.0, Pace(in_flight, 1)).end == pytest.approx(3000 * (5.0 + 1.0 / in_flight), rel=0.01)


@pytest.mark.parametrize("ahead", [2, 3])
@pytest.mark.parametrize("in_flight", [2, 3, 4])
def test_words_sent_ahead_leave_the_link_no_pause(in_flight: int, ahead: int) -> None:
    """Exact: the first word and the last byte travel, and between them the link is always busy."""
    slow = stages(hops=(5.0,), latency=1.0, is_asked=True)
    assert follow(slow, 300.0, Pace(in_flight, ahead)).end == pytest.approx(1.0 + 300 * 5.0 + 1.0)


def test_a_second_hop_holds_up_nothing_while_it_waits_for_its_word() -> None:
    """Its word is sent no sooner than its data; first hops that have been heard of keep the link busy meanwhile."""
    two = stages(hops=(5.0, 5.0), combine=(0.0, 0.0), latency=1.0, is_asked=True)
    assert follow(two, 300.0, Pace(2, 2)).end == pytest.approx(300 * 10.0, rel=0.01)
    # A link that is short and far is idle until word and data of the second hop have travelled.
    far = two._replace(hops=(1.0, 1.0), latency=100.0)
    assert follow(far, 300.0, Pace(1, 2)).end == pytest.approx(300 * 201.0, rel=0.02)


@pytest.mark.parametrize("in_flight", [4, 16])
def test_two_hops_fill_a_link_whose_latency_is_less_than_what_is_under_way(in_flight: int) -> None:
    two = stages(hops=(1.0, 1.0), combine=(0.1, 0.1), latency=in_flight / 4, is_asked=True)
    course = follow(two, 1000.0, Pace(in_flight, in_flight // 2, 2))
    assert course.last - course.first == pytest.approx(2000.0, rel=0.01)


def test_words_alone_cost_a_round_trip_for_each_bucket() -> None:
    slow = stages(hops=(1.0,), latency=10.0, is_asked=True)
    assert follow(slow, 100.0, Pace(1)).end == pytest.approx(100 * 21.0)
    assert follow(slow, 100.0, Pace(1, 2)).end == pytest.approx(10.0 + 100 * 11.0)


@given(
    st.floats(0, 3),
    st.tuples(st.floats(0, 3)) | st.tuples(st.floats(0, 3), st.floats(0, 3)),
    st.floats(0, 3),
    st.floats(0, 9),
    st.booleans(),
    st.floats(0, 3),
    st.builds(Pace, st.integers(1, 4), st.integers(0, 3), st.integers(0, 3)),
)
@example(2.7647712212844633, (2.25,), 0.0, 8.0, True, 2.0, Pace(3, 1, 0))  # runs otherwise after 1,200 buckets
@settings(deadline=None, max_examples=40)
def test_extrapolation_agrees_with_simulating_all(
    pack: float,
    hops: tuple[float, ...],
    combine: float,
    latency: float,
    is_asked: bool,
    home: float,
    pace: Pace,
) -> None:
    some = Stages(pack, hops, (combine,) * len(hops), latency, is_asked, home, 0.0)
    count = 3 * SIMULATED * pace.in_flight + 7
    for short, full in zip(follow(some, float(count), pace), simulate(some, count, 1.0, pace), strict=True):
        assert short == pytest.approx(full, rel=0.01, abs=1e-9)
