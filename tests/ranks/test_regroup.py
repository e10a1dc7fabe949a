"""Rounds whose cells change: what an aggregator keeps of the rounds before."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import xffl
from tests.ranks.test_round import make_state
from tests.worlds import run_world
from xffl.aggregation.engine.decision.consensus import RoundInput
from xffl.aggregation.engine.groups import RoundScope
from xffl.aggregation.engine.several_worlds.members_first_round import ComparedCells, MembersFirstRound
from xffl.aggregation.engine.stages.first_round import FirstRound
from xffl.aggregation.engine.transport import CrossCellTransport

STEPS = 40
WEIGHTS = (1.0, 2.0, 1.0)


class Counted(nn.Module):
    """A model whose values are the sum of numbered steps."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(STEPS, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(7, dtype=dtype))

    @torch.no_grad()
    def step(self, number: int, cell: int) -> None:
        """Make a step that no other cell or round makes."""
        generator = torch.Generator().manual_seed(100 * number + cell)
        for parameter in self.parameters():
            parameter.add_(torch.rand(parameter.shape, generator=generator).to(parameter.dtype))


def counted(rounds: dict[int, tuple[float, ...]]) -> torch.Tensor:
    """Return what the model is if each of these rounds has counted once, whose cells had these weights."""
    total = torch.zeros(STEPS + 7, dtype=torch.float64)
    for number, weights in rounds.items():
        for cell, weight in enumerate(weights):
            if weight:
                model = Counted()
                model.step(number, cell)
                total += weight / sum(weights) * torch.cat([one.detach().double() for one in model.parameters()])
    return total


def follow(rank: int, world: int, options: dict[str, Any], case: str) -> torch.Tensor:
    """Make rounds, change the groups, and make more; the sum of all steps that the model has not."""
    state = make_state(rank, (1,) * world, None)
    model = Counted()
    fragments = options.get("fragments", 1)
    aggregator = xffl.Aggregator(model, state, gradients_reduced_by_caller=True, **options)
    weights = WEIGHTS[:world]
    taken: dict[int, tuple[float, ...]] = {}
    number = 0

    def make_rounds(count: int, absent: int | None = None, *, has_steps: bool = True) -> None:
        nonlocal number
        for _ in range(count):
            if has_steps:
                number += 1
                taken[number] = tuple(0.0 if cell == absent else weight for cell, weight in enumerate(weights))
                if rank != absent:
                    model.step(number, rank)
            aggregator.participate(RoundInput(None if rank == absent else weights[rank], is_absent=rank == absent))

    def break_a_round() -> None:
        with (
            mock.patch.object(CrossCellTransport, "combine", side_effect=RuntimeError("broken")),
            pytest.raises(xffl.XfflError),
        ):
            aggregator.participate(RoundInput(weights[rank]))

    def missing() -> torch.Tensor:
        return torch.cat([parameter.detach().double() for parameter in model.parameters()]) - counted(taken)

    make_rounds(4 * fragments)
    if case == "broken":
        break_a_round()
    aggregator.regroup(RoundScope(state, state.topology, goes_on=True))
    if case == "broken":
        break_a_round()
        aggregator.regroup(RoundScope(state, state.topology, goes_on=True))
    if case == "absent":
        make_rounds(fragments, absent=0)
        make_rounds(2 * fragments)
        aggregator.regroup(RoundScope(state, state.topology, goes_on=True))
    before = missing()
    assert before.abs().max() > 0.1
    # The first rounds with other cells are exact.
    make_rounds(fragments, has_steps=False)
    return missing()


@pytest.mark.parametrize(
    "cells, options, case",
    [
        *((2, {"codec": "topk:0.05"}, case) for case in ("changed", "broken", "absent")),
        *((3, {"codec": "topk:0.05", "form": "two_hop"}, case) for case in ("changed", "broken", "absent")),
        (2, {"codec": "topk:0.05", "fragments": 2}, "changed"),
    ],
)
def test_what_a_codec_has_left_out_counts_once_where_cells_change(
    cells: int, options: dict[str, Any], case: str
) -> None:
    for missing in run_world(cells, follow, options, case):
        assert missing.abs().max() < 1e-4


def look_again(rank: int, world: int) -> list[int]:
    """Be a rank of three cells whose members change; how often this rank had looked at its values after each step."""
    state = make_state(rank, (1, 1, 2), 1)
    cell = min(rank, 2)
    looks: list[int] = []
    told: list[int] = []
    read = FirstRound._read_sums

    def counting(self: FirstRound) -> list[int]:
        looks.append(1)
        return read(self)

    def scope_of(lives: str, compared: ComparedCells) -> RoundScope:
        make = partial(MembersFirstRound, lives=tuple(lives), compared=compared)
        return RoundScope(state, state.topology, goes_on=True, make_first_round=make)

    def make_round(number: int, *, newcomer: int | None = None) -> None:
        aggregator.resume_at(number, brings_up=newcomer is not None)
        if cell != newcomer:
            model.step(number, cell)
        aggregator.participate(RoundInput(is_absent=cell == newcomer))
        told.append(len(looks))

    with mock.patch.object(FirstRound, "_read_sums", counting):
        model = Counted()
        compared = ComparedCells()
        aggregator = xffl.Aggregator(model, scope_of("abc", compared), gradients_reduced_by_caller=True)
        make_round(0)
        make_round(1)
        aggregator.regroup(scope_of("abc", compared))
        make_round(2)
        # Another cell comes in the place of the last one, and its ranks train apart.
        if cell == 2:
            compared = ComparedCells()
            aggregator = xffl.Aggregator(model, scope_of("abd", compared), gradients_reduced_by_caller=True)
        else:
            aggregator.regroup(scope_of("abd", compared))
        make_round(3, newcomer=2)
        shared = model.bias.detach().clone()
        with torch.no_grad():
            model.bias.add_(float(rank == 3))
        with pytest.raises(xffl.RoundError, match=r"'bias'.* rank 2 and rank 3 of cell 2"):
            make_round(4)
        with torch.no_grad():
            model.bias.copy_(shared)
        make_round(4)
        aggregator.regroup(scope_of("abd", compared))
        make_round(5)
        # Of the cells that have met nobody knows whether they differ from this one.
        aggregator.regroup(scope_of("aed", compared if cell != 1 else ComparedCells()))
        make_round(6)
        make_round(7)
    return told


def test_cells_are_compared_once_and_not_with_each_change_of_members() -> None:
    of_first, _, *of_newcomer = run_world(4, look_again)
    assert of_first == [1, 1, 1, 1, 1, 1, 2, 2]
    assert of_newcomer == [[1, 1, 1, 1, 3, 3, 4, 4]] * 2
