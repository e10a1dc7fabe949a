"""A cell that does not fit, fails, or whose own ranks do not go together: it ends, and the others go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import xffl
from tests.ports import free_port
from tests.ranks.test_elastic import journal, lighthouse, pytestmark  # noqa: F401 - fixtures and marks of this module
from tests.ranks.test_elastic_state import play
from tests.worlds import be_launched, run_world
from xffl.aggregation.engine.decision.consensus import RoundBroken, RoundInput
from xffl.aggregation.engine.exchange import RoundRun
from xffl.aggregation.engine.transport import CrossCellTransport, ExactValues
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


def open_rounds(state: Any, model: nn.Module, **options: Any) -> ElasticAggregator:
    return ElasticAggregator(model, state, gradients_reduced_by_caller=True, **options)


def make_round(rounds: ElasticAggregator, value: float, **given: Any) -> tuple[float, ...]:
    """Make a step of the cell's own, and a round; return what the cells have given to it."""
    with torch.no_grad():
        for parameter in rounds.model.parameters():
            parameter.mul_(0.9).add_(value)
    while True:
        rounds.open()
        with suppress(RoundBroken):
            report = rounds.participate(RoundInput(**{"weight": 1.0, **given}))
            assert report is not None
            return report.weights


class Left(Exception):
    """Ends the session of a cell whose ranks are no longer connected, as an error of a round does."""


def lack_a_file() -> None:
    raise FileNotFoundError("what this rank needs")


def lack_memory(*_: object) -> None:
    raise MemoryError("no room for what has come")


def be_apart(state: Any, place: int, told: dict[str, str]) -> None:
    """Be a rank of a cell whose two ranks do not go together, each time in another way; note what it has raised."""

    def note(name: str, call: Callable[[], Any]) -> None:
        begun = time.monotonic()
        try:
            call()
        except xffl.XfflError as error:
            told[name] = f"{type(error).__name__}: {error}"
        assert time.monotonic() - begun < 20, name  # a rank that waits in vain for another one does so for 60 s

    model = nn.Linear(5, 3)
    note("options", lambda: open_rounds(state, model, **({"server": "fedavgm:lr=0.5"} if place else {})))
    note("model", lambda: open_rounds(state, nn.Linear(5 + place, 3)))
    rounds = open_rounds(state, model)
    rounds.join()
    saved = []
    for _ in range(2):
        make_round(rounds, 0.1)
        saved.append(rounds.state_dict())
    rounds.close()
    rounds = open_rounds(state, model)
    rounds.load_state_dict(saved[place])
    note("rounds", rounds.join)
    rounds.close()
    given: dict[str, tuple[float, dict[str, Any]]] = {
        "values": (0.1 * (1 + place), {}),
        "weights": (0.1, {"weight": 1.0 if place else None}),
        "failure": (0.1, {"prepare": lack_a_file if place else None}),
        "counts": (0.1, {"weight": None}),
        "combining": (0.1, {}),
        "crossing": (0.1, {}),
        "exchange": (0.1, {}),
        "leaving": (0.1, {}),
    }
    failing = {"combining": (CrossCellTransport, "combine"), "crossing": (ExactValues, "prepare")}
    failing |= {"exchange": (RoundRun, "walk"), "leaving": (RoundRun, "walk")}
    # From the second one on ranks leave the exchange, and the other cell cannot hear why; in the last one a rank leaves
    # its own cell, too.
    failing_ranks = {"combining": (0,), "crossing": (0,), "exchange": (0, 1), "leaving": (0,)}
    for name, (value, options) in given.items():
        rounds = open_rounds(state, model)
        rounds.join()
        fails = place in failing_ranks.get(name, ())
        with mock.patch.object(*failing[name], lack_memory) if fails else nullcontext():
            note(name, partial(make_round, rounds, value, **options))
        rounds.close()


def come_apart(rank: int, world: int, url: str, ports: tuple[int, ...], folder: str) -> Any:
    """Be the only rank of a cell that makes rounds, or one of the two of a cell that comes again and again."""
    cell = int(rank > 0)
    place = max(rank - 1, 0)
    be_launched(place, 1 + cell, ports[cell])
    begun = Path(folder, "begun")
    ended = Path(folder, "ended")
    while cell and not begun.exists():
        time.sleep(0.05)
    told: dict[str, str] = {}
    parameters = ElasticParameters(lighthouse=url)
    with suppress(Left), xffl.session(cell=cell, cells=2, elastic=parameters, timeout_s=60) as state:
        if cell:
            be_apart(state, place, told)
            ended.touch()
            raise Left
        rounds = open_rounds(state, nn.Linear(5, 3))
        rounds.join()
        weights = []
        while not ended.exists() or len(weights[-1]) != 2 or weights[-1][1]:
            weights.append(make_round(rounds, 0.1))
            begun.touch()
            time.sleep(0.02)
        rounds.close()
        return rounds.rounds, weights
    return told


def test_a_cell_whose_ranks_do_not_go_together_ends_and_the_others_lose_no_round(
    lighthouse: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    ports = (free_port(), free_port())
    told = run_world(3, come_apart, lighthouse, ports, str(tmp_path), init=False, timeout_s=100)
    made, weights = told[0]
    assert made == 1 + len(weights)
    assert all(of_round[0] == 1 for of_round in weights)
    assert sum(of_round[1] == 2 for of_round in weights) >= 2
    left = [of_rank.pop("leaving") for of_rank in told[1:]]
    assert "no room for what has come" in left[0]
    assert left[1].startswith("RoundError: another rank of this cell has left it")
    assert told[1] == told[2]
    for name, begins, names in (
        ("options", "ConfigError", "'(options)' differs"),
        ("model", "ConfigError", "'weight' differs"),
        ("rounds", "ConfigError", "load one checkpoint on all ranks of the cell"),
        ("values", "RoundError", "is not the same on rank 0 and rank 1 of cell 1 "),
        ("weights", "ConfigError", "gave no weight and others gave one"),
        ("failure", "RoundError", "what this rank needs"),
        ("counts", "ConfigError", "gave no weight and others gave one"),
        ("combining", "RoundError", "no room for what has come"),
        ("crossing", "RoundError", "no room for what has come"),
        ("exchange", "RoundError", "no room for what has come"),
    ):
        assert told[1][name].startswith(begins) and names in told[1][name]


def weigh_unlike(rank: int, world: int, url: str, ports: tuple[int, ...]) -> str:
    """Be one of two cells that begin a run, of which the first, whose model both take, gives no weight."""
    be_launched(0, 1, ports[rank])
    elastic = ElasticParameters(lighthouse=url, least_cells=world, meeting_timeout_s=30)
    with xffl.session(cell=rank, cells=world, elastic=elastic, timeout_s=60) as state:
        rounds = open_rounds(state, nn.Linear(5, 3))
        rounds.join()
        try:
            make_round(rounds, 0.1, weight=None if rank == 0 else 3.0)
        except xffl.XfflError as refused:
            return f"{type(refused).__name__}: {refused}"
        finally:
            rounds.close()
    return ""


def test_cells_that_weigh_unlike_from_the_beginning_all_end(lighthouse: str) -> None:  # noqa: F811
    """Nobody knows which of them is wrong: no cell has said how it weighs in the round that begins a run."""
    told = run_world(2, weigh_unlike, lighthouse, (free_port(), free_port()), init=False, timeout_s=100)
    assert [text.partition(" gave no weight")[0] for text in told] == ["ConfigError: ranks [0]"] * 2


def step_apart(rank: int, world: int, url: str, port: int) -> str:
    """Be a rank of a cell whose ranks load checkpoints with other steps since the round; return what it has raised."""
    be_launched(rank, world, port)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with xffl.session(cell=0, cells=1, elastic=ElasticParameters(lighthouse=url), timeout_s=60) as state:
        options = {"gradients_reduced_by_caller": True}
        scaling = xffl.FederatedScaling(model, optimizer, state, every=4, aggregator=options)

        def step() -> None:
            model(torch.ones(2)).sum().backward()
            optimizer.step()

        saved = []
        with scaling:
            for _ in range(2):
                step()
                saved.append(scaling.state_dict())
        try:
            with scaling:
                scaling.load_state_dict(saved[rank])
                step()
        except xffl.ConfigError as refused:
            return str(refused)
    return ""


def test_ranks_of_a_cell_that_have_made_other_numbers_of_steps_are_refused(lighthouse: str) -> None:  # noqa: F811
    for told in run_world(2, step_apart, lighthouse, free_port(), init=False, timeout_s=60):
        assert "numbers of steps since the last round: rank 0: 1; rank 1: 2" in told
