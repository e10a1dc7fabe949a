"""A rank that fails alone while its cell enters an epoch: its cell ends with the error, and the others continue."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import xffl
from tests.ports import free_port
from tests.ranks.test_elastic import journal, lighthouse, pytestmark  # noqa: F401 - fixtures and marks of this module
from tests.ranks.test_elastic_state import Stage, play
from tests.worlds import be_launched, run_world
from xffl.aggregation.engine.buffers import Copies
from xffl.aggregation.engine.decision.consensus import RoundBroken, RoundInput
from xffl.aggregation.engine.stages.hand_over import SharedValues
from xffl.aggregation.federations.elastic import ElasticAggregator
from xffl.aggregation.federations.fixed_tensors import FixedTensors
from xffl.distributed import ElasticParameters
from xffl.distributed.agreement.consistency import gather_objects
from xffl.distributed.parameters import DeviceParameters
from xffl.distributed.several_worlds.cross_world import CrossWorldGroup

LAST_ROUNDS = 3
LACKS = "a part of the server's state is missing"


def lack_state() -> None:
    raise xffl.CheckpointError(LACKS)


def lack_memory() -> None:
    torch.empty(2**60, dtype=torch.uint8)


def make_part(rank: int) -> nn.Module:
    """Return one of two parts of a layer."""
    model = nn.Linear(3, 8, bias=False)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model.weight = nn.Parameter(distribute_tensor(torch.linspace(-1, 1, 24).reshape(8, 3), mesh, [Shard(0)]))
    return model


CASES: dict[str, tuple[DeviceParameters, Callable[[int], nn.Module], Callable[[], None], str]] = {
    "stages": (DeviceParameters(pp=2), Stage, lack_state, LACKS),
    "parts of layers": (DeviceParameters(tp=2), make_part, lack_memory, "DefaultCPUAllocator: can't allocate memory"),
}


def be_part(rank: int, world: int, url: str, ports: tuple[int, ...], folder: str, case: str) -> tuple[int, float, str]:
    """Be one of two ranks of a cell. Of the second cell, which comes late, the last rank fails on entering.

    Return the rounds made after that, how many seconds it took to end, and what this rank has raised.
    """
    cell, place = divmod(rank, 2)
    be_launched(place, 2, ports[cell])
    shape, make, fail, _ = CASES[case]
    elastic = ElasticParameters(lighthouse=url)
    bring_up = ElasticAggregator._bring_up

    def bringing_up(self: ElasticAggregator, *given: Any) -> None:
        if rank == 3:
            fail()
        bring_up(self, *given)

    begun = Path(folder, "begun")
    ended = Path(folder, "ended")
    while cell == 1 and not begun.exists():
        time.sleep(0.05)
    with (
        mock.patch.object(ElasticAggregator, "_bring_up", bringing_up),
        xffl.session(cell=cell, cells=2, device_parameters=shape, elastic=elastic, timeout_s=60) as state,
    ):
        rounds = ElasticAggregator(make(place), state, server="fedadam:lr=0.1")
        told = ""
        last = 0
        started = time.monotonic()
        if cell == 0:
            rounds.join()
            while last < LAST_ROUNDS:
                play(rounds.model, rounds, cell, rounds.rounds + 1)
                begun.touch()
                time.sleep(0.1)
                [has_ended] = gather_objects(ended.exists())[:1]
                last += has_ended
        else:
            try:
                rounds.join()
            except Exception as error:  # noqa: BLE001 - compared below
                told = f"{type(error).__name__}: {error}"
            ended.touch()
        seconds = time.monotonic() - started
        with suppress(Exception):
            rounds.close()
    return last, seconds, told


@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_fails_alone_on_entering_ends_its_cell_and_no_other(
    lighthouse: str,  # noqa: F811
    tmp_path: Path,
    case: str,
) -> None:
    told = run_world(4, be_part, lighthouse, (free_port(), free_port()), str(tmp_path), case, init=False, timeout_s=100)
    for last, _, error in told[:2]:
        assert (last, error) == (LAST_ROUNDS, "")
    for _, seconds, error in told[2:]:
        assert CASES[case][-1] in error
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


def lack_room(*_: object) -> None:
    raise MemoryError("no room for what has come")


def hand_over(rank: int, world: int, url: str, ports: tuple[int, ...], folder: str) -> tuple[str, list[float], int]:
    """Be one of two cells that make rounds, or a third one, which comes twice with another frozen parameter.

    The first time it cannot take that over, and the second time the cell that gives it cannot. Return what this rank
    has raised, the frozen parameter, and the rounds that it has made after all that.
    """
    be_launched(0, 1, ports[rank])
    begun = Path(folder, "begun")
    again = Path(folder, "again")
    ended = Path(folder, "ended")
    while rank == 2 and not begun.exists():
        time.sleep(0.05)
    torch.manual_seed(rank)
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    take_over = FixedTensors.take_over

    def taking_over(self: FixedTensors, *given: Any) -> list[str]:
        # A failure that the rank goes on with and tells in the vote, and one with which it leaves the exchange.
        failing = {(0, True): (Copies, "settle"), (2, False): (SharedValues, "prepare")}.get((rank, again.exists()))
        is_late = begun.exists()  # and it is not the beginning of the run, at which all take over from the first
        with mock.patch.object(*failing, lack_room) if failing and is_late else nullcontext():
            return take_over(self, *given)

    told = ""
    last = 0
    elastic = ElasticParameters(lighthouse=url, meeting_timeout_s=40)
    with (
        mock.patch.object(FixedTensors, "take_over", taking_over),
        xffl.session(cell=rank, cells=3, elastic=elastic, timeout_s=60) as state,
    ):
        for _ in range(1 + (rank == 2)):
            rounds = ElasticAggregator(model, state)
            try:
                rounds.join()
                while last < LAST_ROUNDS:
                    with suppress(RoundBroken):
                        rounds.open()
                        rounds.participate(RoundInput(1.0))
                    if rounds.rounds > 2:
                        begun.touch()
                    time.sleep(0.05)
                    last += ended.exists()
            except xffl.XfflError as error:
                told += f"{type(error).__name__}: {error}"
                (again if rank else ended).touch()
            with suppress(Exception):
                rounds.close()
    return told, model.bias.tolist(), last


def test_a_cell_that_cannot_hand_a_frozen_part_over_or_take_it_ends_alone(lighthouse: str, tmp_path: Path) -> None:  # noqa: F811
    ports = tuple(free_port() for _ in range(3))
    told = run_world(3, hand_over, lighthouse, ports, str(tmp_path), init=False, timeout_s=100)
    for rank in (0, 2):
        assert told[rank][0].startswith("RoundError") and "no room for what has come" in told[rank][0]
    assert told[1][0] == ""
    assert told[2][1] == told[1][1] == told[0][1]
    assert [last for _, _, last in told] == [0, LAST_ROUNDS, LAST_ROUNDS]
