"""A cell that comes back with other settings than it had: it ends, and the others wait for it as for any other cell."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import xffl
from tests.ports import free_port
from tests.ranks.test_elastic import journal, lighthouse, pytestmark  # noqa: F401 - fixtures and marks of this module
from tests.ranks.test_elastic_state import play
from tests.worlds import be_launched, run_world
from xffl.aggregation.federations.elastic import ElasticAggregator
from xffl.distributed import ElasticParameters

SETTINGS: dict[str, tuple[dict[str, Any], int, str]] = {
    "server": ({"server": "fedavgm:lr=0.5"}, 5, "server"),
    "model": ({}, 4, r"\(3, 4\) float32 parameter"),
}


def come_back(rank: int, world: int, url: str, ports: tuple[int, ...], name: str) -> int:
    """Be one of two cells, of which neither makes a round alone; return how many rounds were made.

    The second one comes back twice with the newest model: with other settings, then with its own.
    """
    be_launched(0, 1, ports[rank])
    options, width, told = SETTINGS[name]
    elastic = ElasticParameters(lighthouse=url, least_cells=2)
    with xffl.session(cell=rank, cells=world, elastic=elastic, timeout_s=60) as state:
        model = nn.Linear(5, 3)
        rounds = ElasticAggregator(model, state)
        rounds.join()
        play(model, rounds, rank, 3)
        if rank == 1:
            saved = rounds.state_dict()
            rounds.close()
            other = ElasticAggregator(nn.Linear(width, 3), state, **options)
            other.load_state_dict(saved)
            with pytest.raises(xffl.ConfigError, match=told):
                other.join()
            other.close()
            rounds = ElasticAggregator(model, state)
            rounds.load_state_dict(saved)
        play(model, rounds, rank, 5)
        rounds.close()
    return rounds.rounds


@pytest.mark.parametrize("name", SETTINGS)
def test_a_cell_that_comes_back_with_other_settings_ends_and_the_others_go_on(lighthouse: str, name: str) -> None:  # noqa: F811
    told = run_world(2, come_back, lighthouse, (free_port(), free_port()), name, init=False, timeout_s=100)
    assert told == [5, 5]
