"""How what ranks do grows with their number: xffl's own code, played for chosen ranks of large worlds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from unittest import mock

import pytest

from tests.scale.play import play_rank, sampled_ranks
from tests.scale.recorded import Play
from xffl.aggregation.engine.voting.ballots import Ballots
from xffl.aggregation.engine.voting.votes import PACKED, RoundStatus
from xffl.cli.main import main
from xffl.compat import gloo_connections
from xffl.costs import peers_in_votes
from xffl.planning.startup import forecast_rank, forecast_startup, vote_of_rank
from xffl.topology import Topology

LIMIT = 24
"""Ranks of the largest mesh here, so that worlds and cells of the smallest world are larger."""
WORLDS = (64, 256, 1024)


@pytest.fixture(scope="module")
def played() -> Iterator[dict[int, list[Play]]]:
    """Chosen ranks of worlds of two cells; what their counts are compared with is found with the same limit."""
    with mock.patch.object(gloo_connections, "MESH_LIMIT", LIMIT):
        plays = {}
        for size in WORLDS:
            topology = Topology(size, (size // 2,) * 2)
            plays[size] = [play_rank(topology, rank) for rank in sampled_ranks(topology, 0)]
        yield plays


def grows_at_most(before: float, after: float, of: tuple[int, int], *, with_logarithm: bool) -> bool:
    """Tell whether a count grows no faster than the number of ranks, or than that times its logarithm."""
    smaller, larger = of
    bound = larger / smaller * (math.log(larger) / math.log(smaller) if with_logarithm else 1)
    return after <= 1.02 * bound * before


@pytest.mark.parametrize("phase", ["start", "plan", "first round", "round", "end"])
def test_what_a_rank_does_grows_with_the_ranks_at_most(played: dict[int, list[Play]], phase: str) -> None:
    for name in ("messages", "message_bytes", "requests", "store_bytes"):
        most = [max(getattr(play.phases[phase], name) for play in plays) for plays in played.values()]
        for of, (before, after) in zip(pairwise(WORLDS), pairwise(most), strict=True):
            assert grows_at_most(before, after, of, with_logarithm=True), (name, of, most)


def test_connections_and_messages_of_rounds_grow_with_the_logarithm(played: dict[int, list[Play]]) -> None:
    for name, phases in (("connections", ("start", "plan", "first round", "round")), ("messages", ("round",))):
        most = [
            max(sum(getattr(play.phases[one], name) for one in phases) for play in plays) for plays in played.values()
        ]
        assert most[2] - most[1] <= most[1] - most[0] + 2 < 20, (name, most)


def test_the_store_of_rank_0_serves_requests_that_grow_with_the_logarithm(played: dict[int, list[Play]]) -> None:
    # The number of requests of all is W times this; a mesh of W ranks would make it W * W.
    each = [max(sum(counts.requests for counts in play.phases.values()) for play in plays) for plays in played.values()]
    assert each[2] - each[1] <= each[1] - each[0] + 2 < 20, each


def test_the_plan_forecasts_what_ranks_do(played: dict[int, list[Play]]) -> None:
    with mock.patch.object(gloo_connections, "MESH_LIMIT", LIMIT):
        for plays in played.values():
            for play in plays:
                start = forecast_rank(play.topology, play.rank)
                opened = [play.phases[phase].connections for phase in ("start", "plan", "first round", "round")]
                assert sum(opened) == start.connections, (play.topology, play.rank, opened)
                vote = play.phases["round"].calls["vote"]
                assert vote == 2 * vote_of_rank(play.topology, play.rank)[0]


def test_no_connection_is_opened_by_a_round(played: dict[int, list[Play]]) -> None:
    for plays in played.values():
        assert not any(play.phases[phase].connections for play in plays for phase in ("first round", "round", "end"))


def test_the_plan_prints_the_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--world", "4096", "--federated", "512", "--hsdp", "8", "--startup"]) == 0
    lines = capsys.readouterr().out
    assert "Start-up of 4096 ranks in 8 cells, over gloo:" in lines
    assert f"{forecast_startup(Topology(4096, (512,) * 8, 8)).requests} requests" in lines


@pytest.mark.parametrize("sizes", [(1,), (5,), (1, 1, 1), (7, 1, 4)])
def test_ranks_of_a_vote_agree_on_who_sends_to_whom(sizes: tuple[int, ...]) -> None:
    topology = Topology(sum(sizes), sizes)
    peers = [peers_in_votes(topology, rank) for rank in range(topology.world_size)]
    for rank, (below, above, others) in enumerate(peers):
        assert all(peers[child].above == rank for child in below)
        assert above is None or rank in peers[above].below
        assert all(rank in peers[other].others for other in others)
        assert len(others) == (topology.cells - 1 if rank in topology.offsets else 0)


def _status(rank: int, world: int) -> RoundStatus:
    return RoundStatus(
        7,
        weight=float(rank % 5),
        seconds=rank / 3,
        norm=rank / 7 if rank >= world // 2 else 0.0,
        is_nonfinite=rank == world - 1,
        numbers=(0.5, 1 / 3),
    )


@pytest.mark.parametrize("world", [1, 2, 3, 50])
def test_ballots_keep_what_each_rank_says(world: int) -> None:
    statuses = [RoundStatus.unpacked(PACKED.unpack(_status(rank, world).packed())) for rank in range(world)]
    ballots = Ballots.joined([Ballots.of(status) for status in statuses])
    assert ballots.statuses() == statuses
    data = ballots.to_bytes()
    assert Ballots.from_bytes(data, world) == ballots and len(data) <= 96 + 192 * world
    order = [*range(world)][::-1]
    assert ballots.reordered(order).statuses() == statuses[::-1]
    longest = max(status.seconds for status in statuses)
    assert {status.seconds for status in ballots.with_longest_step().statuses()} == {longest}


def test_ballots_of_ranks_that_say_the_same_are_few_bytes() -> None:
    ballots = Ballots.joined([Ballots.of(RoundStatus(3))] * 16384)
    assert len(ballots.to_bytes()) == 288 and len(set(map(id, ballots.statuses()))) == 1


def test_with_many_cells_what_the_store_serves_a_rank_does_not_jump() -> None:
    """Cells of 64 and of 256 ranks: both are no meshes, and groups of one rank of each cell read short addresses."""
    asked = []
    for world in (4096, 16384):
        topology = Topology(world, (world // 64,) * 64)
        play = play_rank(topology, 0)
        start = forecast_rank(topology, 0)
        assert sum(counts.connections for counts in play.phases.values()) == start.connections
        requests = sum(counts.requests for counts in play.phases.values())
        nbytes = sum(counts.store_bytes for counts in play.phases.values() if counts is not play.phases["plan"])
        asked.append((requests, nbytes))
    (before, bytes_before), (after, bytes_after) = asked
    assert before < after <= before + 20 and bytes_after < 2 * 16384 * 150 and bytes_before < 2 * 4096 * 200, asked
