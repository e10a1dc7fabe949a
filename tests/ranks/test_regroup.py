"""Rounds whose cells change: what an aggregator keeps of the rounds before."""

from __future__ import annotations

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
