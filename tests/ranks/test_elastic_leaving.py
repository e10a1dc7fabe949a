"""A cell of an elastic federation that is asked to stop while it waits for others."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import xffl
from tests.ports import free_port
from tests.ranks.test_elastic import journal, lighthouse, pytestmark  # noqa: F401 - fixtures and marks
from tests.worlds import be_launched, run_world
from xffl.aggregation.engine.decision.consensus import RoundInput
from xffl.aggregation.federations.elastic import ElasticAggregator
from xffl.aggregation.report import ElasticRoundReport
from xffl.aggregation.rounds.loop_hooks import LoopHooks
from xffl.distributed import ElasticParameters
from xffl.errors import MeetingLeft

LATER_S = 5.0


def wait_and_leave(rank: int, world: int, url: str, ports: tuple[int, ...], folder: str) -> list[float]:
    """Be one of three cells of which each round needs two; the last one ends early, and the first waits for it in vain.

    Return how many seconds it took the cell to leave its block, and how long the others' rounds took from then on.
    """
    be_launched(0, 1, ports[rank])
    os.environ["XFFL_TOKEN"] = "the run's own token"
    rounds, asked, left = [0], Path(folder, "asked"), Path(folder, "left")
    hooks = LoopHooks(is_stopping=lambda: rank == 0 and asked.exists())
    elastic = ElasticParameters(lighthouse=url, least_cells=2)
    seconds: list[float] = []

    def on_round(report: xffl.RoundReport) -> None:
        rounds[0] = report.round
        if left.exists():
            seconds.append(report.seconds)

    with xffl.session(cell=rank, cells=world, elastic=elastic, timeout_s=60) as state:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        began = 0.0

        def train(steps: int) -> None:
            for _ in range(steps):
                model(torch.ones(4, 2)).square().mean().backward()
                optimizer.step()

        with xffl.FederatedScaling(model, optimizer, state, every=2, on_round=on_round, hooks=hooks):
            train(4)
            if rank == 0:
                asked.touch()
                began = time.monotonic()
                train(4)  # waits for no round any more
            else:
                while not asked.exists():
                    time.sleep(0.01)
                time.sleep(1.0)  # for the request of the cell that stops, which it takes back
                left.touch()
                train(8)
        if rank == 0:
            seconds = [time.monotonic() - began]
            while len(list(Path(folder).glob("ended*"))) < world - 1:
                time.sleep(0.05)  # its process goes on
        else:
            Path(folder, f"ended{rank}").touch()
    return seconds


def test_a_cell_that_is_asked_to_stop_leaves_its_block_and_nobody_waits_for_it(
    lighthouse: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    ports = tuple(free_port() for _ in range(3))
    told = run_world(3, wait_and_leave, lighthouse, ports, str(tmp_path), init=False, timeout_s=100)
    assert told[0][0] < 30.0
    for seconds in told[1:]:
        assert len(seconds) >= 4
        assert max(seconds) < 15.0  # a cell that has not left is waited for 20 s


def stop_and_go_on(rank: int, world: int, url: str, ports: tuple[int, ...]) -> tuple[int, float]:
    """Be one of two cells that make rounds together only; the first one withdraws once, and asks again later.

    Return how often the round after that was tried, and how long it took.
    """
    be_launched(0, 1, ports[rank])
    elastic = ElasticParameters(lighthouse=url, least_cells=2)
    with xffl.session(cell=rank, cells=world, elastic=elastic, timeout_s=60) as state:
        rounds = ElasticAggregator(nn.Linear(2, 1), state)
        rounds.join()
        if rank == 0:
            with pytest.raises(MeetingLeft):
                rounds.open(is_stopping=lambda: True)
        time.sleep(LATER_S)
        rounds.open()
        report = rounds.participate(RoundInput(1.0))
        rounds.close()
    assert isinstance(report, ElasticRoundReport)
    return report.tries, report.seconds


def test_a_round_after_one_that_was_left_is_counted_from_its_own_beginning(lighthouse: str) -> None:  # noqa: F811
    told = run_world(2, stop_and_go_on, lighthouse, (free_port(), free_port()), init=False, timeout_s=60)
    for tries, seconds in told:
        assert tries == 1
        assert seconds < LATER_S
