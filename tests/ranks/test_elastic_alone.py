"""A rank that fails alone while its cell enters an epoch: its cell ends with the error, and the others continue."""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn

import xffl
from tests.ports import free_port
from tests.ranks.test_elastic import journal, lighthouse, pytestmark  # noqa: F401 - fixtures and marks of this module
from tests.ranks.test_elastic_state import Stage, play
from tests.worlds import be_launched, run_world
from xffl.aggregation.engine.decision.consensus import RoundInput
from xffl.aggregation.federations.elastic import ElasticAggregator
from xffl.distributed import ElasticParameters
from xffl.distributed.cross_world import CrossWorldGroup
from xffl.distributed.parameters import DeviceParameters

ROUNDS = 50
ERRORS = {
    "checkpoint": xffl.CheckpointError("a part of the server's state is missing"),
    "value": ValueError("no such value"),
}


def be_stage(rank: int, world: int, url: str, ports: tuple[int, ...], folder: str, kind: str) -> tuple[int, float, str]:
    """Be one of two stages of a cell. Of the second cell, which comes late, the last rank fails on entering.

    Return the rounds that were made, how many seconds it took to end, and what this rank has raised.
    """
    cell, stage = divmod(rank, 2)
    be_launched(stage, 2, ports[cell])
    shape, elastic = DeviceParameters(pp=2), ElasticParameters(lighthouse=url)
    bring_up = ElasticAggregator._bring_up

    def bringing_up(self: ElasticAggregator, *given: Any) -> None:
        if rank == 3:
            raise ERRORS[kind]
        bring_up(self, *given)

    begun = Path(folder, "begun")
    while cell == 1 and not begun.exists():
        time.sleep(0.05)
    with (
        mock.patch.object(ElasticAggregator, "_bring_up", bringing_up),
        xffl.session(cell=cell, cells=2, device_parameters=shape, elastic=elastic, timeout_s=60) as state,
    ):
        rounds = ElasticAggregator(Stage(stage), state, server="fedadam:lr=0.1")
        told = ""
        started = time.monotonic()
        if cell == 0:
            rounds.join()
            while rounds.rounds < ROUNDS:
                play(rounds.model, rounds, cell, rounds.rounds + 1)
                begun.touch()
                time.sleep(0.1)
        else:
            try:
                rounds.join()
            except Exception as error:  # noqa: BLE001 - compared below
                told = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - started
        with suppress(Exception):
            rounds.close()
    return rounds.rounds, seconds, told


@pytest.mark.parametrize("kind", ERRORS)
def test_a_rank_that_fails_alone_on_entering_ends_its_cell_and_no_other(
    lighthouse: str,  # noqa: F811
    tmp_path: Path,
    kind: str,
) -> None:
    told = run_world(4, be_stage, lighthouse, (free_port(), free_port()), str(tmp_path), kind, init=False, timeout_s=60)
    for rounds, _, error in told[:2]:
        assert (rounds, error) == (ROUNDS, "")
    for _, seconds, error in told[2:]:
        assert str(ERRORS[kind]) in error
        assert seconds < 10.0


def lose_the_group(rank: int, world: int, url: str, port: int) -> str:
    """Be a rank of the only cell, whose last rank cannot make its second group; return what this rank has raised."""
    be_launched(rank, world, port)
    told = ""
    with xffl.session(cell=0, cells=1, elastic=ElasticParameters(lighthouse=url), timeout_s=60) as state:
        rounds = ElasticAggregator(xffl.shard(nn.Linear(2, 2), state), state)
        rounds.join()
        rounds._federation.drop()  # as where the journal was out of reach
        rounds.open()
        failure = OSError(24, "Too many open files")
        failing = mock.patch.object(CrossWorldGroup, "unproven", side_effect=failure) if rank else nullcontext()
        try:
            with failing:
                rounds.participate(RoundInput(1.0))
        except Exception as error:  # noqa: BLE001 - compared below
            told = f"{type(error).__name__}: {error}"
            assert not rounds.can_go_on, "the end of a block would try again and again"
        with suppress(Exception):
            rounds.close()
    return told


def test_a_rank_that_fails_alone_on_entering_ends_its_cell_also_where_it_has_made_rounds(lighthouse: str) -> None:  # noqa: F811
    for told in run_world(2, lose_the_group, lighthouse, free_port(), init=False, timeout_s=60):
        assert told.startswith("RoundError") and "Too many open files" in told
