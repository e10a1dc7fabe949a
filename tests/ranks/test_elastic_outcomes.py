"""What clients and schedules see of rounds in which no cell of an elastic federation had anything to give."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import xffl
from tests.ports import free_port
from tests.ranks.test_elastic import (  # noqa: F401 - fixtures and marks of this module
    check_alike,
    journal,
    lighthouse,
    of_all,
    pytestmark,
    run,
)
from tests.worlds import be_launched, run_world
from xffl.aggregation.algorithms.clients import FedProx, Scaffold

CLIENTS = {"fedprox": lambda: FedProx(mu=0.1), "scaffold": Scaffold}


def kept_by(client: Any) -> dict[str, float]:
    """Return what a client of a model with one weight keeps, without what only a round uses."""
    kept = client.state_dict()
    return {what: float(kept[what]["weight"]) for what in ("anchors", "corrections") if what in kept}


def go_back(rank: int, world: int, url: str, ports: tuple[int, ...], name: str) -> dict[str, Any]:
    """Be one of two cells that load what they hold: after a round, then one an older round's, then some steps later."""
    be_launched(0, 1, ports[rank])
    os.environ["XFFL_TOKEN"] = "the run's own token"
    client = CLIENTS[name]()
    told: dict[str, Any] = {}
    with xffl.session(cell=rank, cells=world, elastic=of_all(url, world), timeout_s=60) as state:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train(steps: int) -> None:
            for _ in range(steps):
                model(torch.zeros(1, 1))
                model.weight.grad = torch.full_like(model.weight, -1.0 - rank)
                optimizer.step()

        def save() -> tuple[Any, Any]:
            return {key: value.clone() for key, value in model.state_dict().items()}, scaling.state_dict()

        def load(saved: tuple[Any, Any]) -> None:
            model.load_state_dict(saved[0])
            scaling.load_state_dict(saved[1])
            told["before"] = kept_by(client), model.weight.item()
            scaling.join()

        with xffl.FederatedScaling(model, optimizer, state, every=5, client=client) as scaling:
            train(5)
            load(save())
            told["nothing given"] = told["before"], (kept_by(client), model.weight.item())
            older = save()
            train(5)
            load(older if rank else save())
            told["handed over"] = told["before"], (kept_by(client), model.weight.item())
            train(3)
            load(save())
            told["given"] = told["before"], (kept_by(client), model.weight.item())
            told["waiting"] = scaling.state_dict()["ledger"]["steps"]
    return told


@pytest.mark.parametrize("name", CLIENTS)
def test_clients_are_not_told_of_a_round_in_which_no_value_came_in(lighthouse: str, name: str) -> None:  # noqa: F811
    told = run_world(2, go_back, lighthouse, (free_port(), free_port()), name, init=False, timeout_s=60)
    for one in told:
        before, after = one["nothing given"]
        assert before == after
        assert before[0]["anchors"] == before[1] != 0.0
    for one in told:
        (before, _), (after, model) = one["handed over"]
        assert after.pop("anchors") == model == told[0]["handed over"][0][1]
        assert {what: before[what] for what in after} == after, "corrections are a mean of what cells give"
    for one in told:
        (before, _), (after, model) = one["given"]
        assert after["anchors"] == model == told[0]["given"][1][1] != before["anchors"]
        assert one["waiting"] == [0]


@pytest.mark.parametrize(
    "schedule", [{"name": "seconds", "seconds": 0.1, "first": 4}, {"name": "balanced", "every": 4}]
)
def test_schedules_by_time_outlive_a_round_in_doubt(
    lighthouse: str,  # noqa: F811
    schedule: dict[str, Any],
) -> None:
    """In the round behind it nobody has anything to give, so nobody tells how long a step takes."""
    told = run(lighthouse, (1, 1), mortal=(0,), fault="0:0:published:3", rounds=8, keywords={"every": schedule})
    [survivor] = told
    assert survivor.cells[3] == (0, 1)
    assert survivor.cells[8] == (1,)
    assert sum(weights[1] for weights in survivor.weights.values()) == survivor.steps
