"""What a cell of an elastic federation holds after its block has ended and begun again."""

from __future__ import annotations

import gc
import os
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import xffl
from tests.ports import free_port
from tests.ranks.test_elastic import journal, lighthouse, of_all, pytestmark  # noqa: F401 - fixtures and marks
from tests.worlds import be_launched, run_world
from xffl.aggregation.federations.elastic import ElasticAggregator, _forget_calls
from xffl.distributed import DeviceParameters, ElasticParameters
from xffl.distributed.several_worlds.cross_world import CrossWorldGroup
from xffl.elastic.federation import ElasticFederation
from xffl.journal.records import JournalUnreachable

BLOCKS = 6
RANKS = 2


def count_held() -> tuple[int, int, int]:
    """Return how many threads, descriptors and process groups this process has."""
    groups = len(dist.distributed_c10d._world.pg_map)
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), groups


def enter_again(rank: int, world: int, url: str, ports: tuple[int, ...], folder: str) -> list[tuple[int, int, int]]:
    """Train in several blocks, every other one of which an error ends, with a round under way.

    The cells begin each of them together. One may end it without the other, where that is lost for a moment.

    Return what is held in each of them.
    """
    cell, place = divmod(rank, RANKS)
    be_launched(place, RANKS, ports[cell])
    os.environ["XFFL_TOKEN"] = "the run's own token"
    held: list[tuple[int, int, int]] = []
    are_under_way: list[bool] = []
    gc.disable()  # nobody knows when it would run
    elastic = ElasticParameters(lighthouse=url)
    with xffl.session(cell=cell, cells=world // RANKS, elastic=elastic, timeout_s=60) as state:
        model = xffl.shard(nn.Linear(2, 2), state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaling = xffl.FederatedScaling(model, optimizer, state, every=2, delay=1)
        generator = torch.Generator().manual_seed(rank)
        for block in range(BLOCKS):
            fails = block % 2 == 1
            Path(folder, f"{block}.{rank}").touch()
            while len(list(Path(folder).glob(f"{block}.*"))) < world:
                time.sleep(0.02)
            with pytest.raises(KeyError, match="an error of the loop") if fails else nullcontext(), scaling:
                for _ in range(4 if fails else 5):
                    model(torch.randn(4, 2, generator=generator)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                held.append(count_held())
                are_under_way.append(scaling.is_under_way)
                assert fails or not are_under_way[-1]
                if fails:
                    raise KeyError("an error of the loop")
    assert any(are_under_way)
    return held


def test_a_block_that_ends_gives_back_its_threads_descriptors_and_groups(lighthouse: str, tmp_path: Path) -> None:  # noqa: F811
    ports = tuple(free_port() for _ in range(2))
    for held in run_world(2 * RANKS, enter_again, lighthouse, ports, str(tmp_path), init=False, timeout_s=100):
        # Threads that look at a meeting, or wait for a message, end a moment later.
        for values, slack in zip(zip(*held[1:], strict=True), (4, 2, 0), strict=True):
            assert max(values[-2:]) <= max(values[:2]) + slack, held


def lose(*_: object) -> None:
    raise RuntimeError("lost")


def lose_journal(*_: object) -> None:
    raise JournalUnreachable("lost")


WAYS = (
    (CrossWorldGroup, "unproven", lose),  # the round does not begin
    (CrossWorldGroup, "_wait_apart", lose),  # it breaks while local steps are made
    (ElasticFederation, "publish", lose_journal),  # and is in doubt
)


def lose_contact_again(rank: int, world: int, url: str, port: int) -> list[tuple[int, int, int]]:
    """Be a rank of the only cell, whose first delayed round breaks in each block, in all ways in turn.

    Return what is held behind each block.
    """
    be_launched(rank, world, port)
    held: list[tuple[int, int, int]] = []
    gc.disable()  # nobody knows when it would run
    with xffl.session(cell=0, cells=1, elastic=of_all(url, 1), timeout_s=60) as state:
        model = xffl.shard(nn.Linear(2, 2), state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaling = xffl.FederatedScaling(model, optimizer, state, every=2, delay=1)
        for number in range(len(WAYS) + 1):
            failing = mock.patch.object(*WAYS[number % len(WAYS)])
            with scaling:
                for step in range(5):
                    if step == 1:  # the next round starts
                        scaling.aggregator._federation.drop()
                        failing.start()
                    model(torch.ones(4, 2)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if step == 2:  # it was merged
                        failing.stop()
            held.append(count_held())
    return held


def test_a_delayed_round_that_broke_keeps_nothing(lighthouse: str) -> None:  # noqa: F811
    """Its error's traceback refers to groups that are given back, and to what refers to the error."""
    for held in run_world(RANKS, lose_contact_again, lighthouse, free_port(), init=False, timeout_s=100):
        for values, slack in zip(zip(*held, strict=True), (2, 4, 0), strict=True):
            assert max(values) <= min(values) + slack, held


def make_round_in_an_except_clause(broken: list[RuntimeError]) -> None:
    try:
        raise KeyError("of the loop")
    except KeyError as own:
        try:
            lose()
        except RuntimeError as lost:
            _forget_calls(lost, own)
            broken.append(lost)
        raise


def test_an_error_that_the_caller_was_handling_keeps_its_traceback() -> None:
    broken: list[RuntimeError] = []
    with pytest.raises(KeyError) as own:
        make_round_in_an_except_clause(broken)
    assert broken[0].__context__ is own.value and broken[0].__traceback__ is None
    assert own.traceback[-1].lineno == make_round_in_an_except_clause.__code__.co_firstlineno + 1


class Stage(nn.Module):
    """One of three stages of a pipeline: two share a parameter, and two a frozen one."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.register_parameter("abc"[stage], nn.Parameter(torch.ones(4)))
        if stage < 2:
            self.shared = nn.Parameter(torch.ones(3))
        if stage > 0:
            self.still = nn.Parameter(torch.ones(2), requires_grad=False)


def in_three_stages(rank: int, world: int, url: str, port: int) -> list[int]:
    """Be a stage of the only cell; return how many groups there are at first, made, with rounds made, and at last."""
    be_launched(rank, world, port)
    counts: list[int] = []
    elastic = ElasticParameters(lighthouse=url, least_cells=1)
    shape = DeviceParameters(pp=3)
    with xffl.session(cell=0, cells=1, device_parameters=shape, elastic=elastic, timeout_s=60) as state:
        counts.append(count_held()[2])
        rounds = ElasticAggregator(Stage(rank), state, gradients_reduced_by_caller=True)
        counts.append(count_held()[2])
        rounds.join()
        counts.append(count_held()[2])
        rounds.close()
        rounds.give_back_groups()
        counts.append(count_held()[2])
    return counts


def test_groups_inside_a_cell_are_made_before_it_meets_others(lighthouse: str) -> None:  # noqa: F811
    """In a try that breaks, some ranks of a cell would have made them and others not, and all later ones mismatch."""
    for before, made, joined, after in run_world(3, in_three_stages, lighthouse, free_port(), init=False):
        assert before < made == joined
        assert after == before


def end_with_evaluations(rank: int, world: int, url: str, port: int) -> int:
    """Be a rank of the only cell, whose blocks end with an evaluation, which leaves FSDP2's outermost module gathered.

    Before the last round of each second block the cell loses contact, so that this round has another group.
    """
    be_launched(rank, world, port)
    with xffl.session(cell=0, cells=1, elastic=of_all(url, 1), timeout_s=60) as state:
        model = xffl.shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaling = xffl.FederatedScaling(model, optimizer, state, every=2)
        for loses_contact in (False, True):
            with scaling:
                for _ in range(3):
                    model(torch.ones(4, 2)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                with torch.no_grad():
                    model(torch.ones(4, 2))
                assert not any(isinstance(one, DTensor) for one in model.parameters()), "nothing is tested"
                if loses_contact:
                    scaling.aggregator._federation.drop()
        return scaling.aggregator.rounds


def test_blocks_may_end_with_an_evaluation(lighthouse: str) -> None:  # noqa: F811
    told = run_world(RANKS, end_with_evaluations, lighthouse, free_port(), init=False, timeout_s=100)
    assert told == [told[0]] * RANKS
    assert told[0] >= 4
