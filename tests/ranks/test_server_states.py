"""Server optimizers that keep something only later, or one number in a tensor of one element: whoever steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import xffl
from tests.ranks.test_algorithms import vector
from tests.ranks.test_protected import moved, same_bits
from tests.ranks.test_round import make_state
from tests.worlds import run_world
from xffl.aggregation.algorithms.server import ServerOptimizer


class Lazy(torch.optim.Optimizer):
    """Steps that get momentum from some round on: what it keeps for that is made then, and not before."""

    def __init__(
        self, params: Iterable[torch.Tensor], lr: float = 0.5, begin: int = 3, shape: tuple[int, ...] = ()
    ) -> None:
        super().__init__(params, {"lr": lr, "begin": begin, "shape": shape})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        for tensor in (one for one in group["params"] if one.grad is not None):
            state = self.state[tensor]
            count = state.setdefault("count", torch.zeros(group["shape"]))
            count += 1
            first = state.setdefault("first", tensor.grad.clone())
            if count >= group["begin"] and "late" not in state:
                state["late"] = torch.zeros_like(tensor)
            if "late" in state:
                state["late"].mul_(0.9).add_(tensor.grad)
            tensor.add_(state.get("late", tensor.grad) / count + 0.1 * first, alpha=-group["lr"])


class Sizes(nn.Module):
    """A parameter of one element behind larger ones, which is a bucket of its own where buckets are small."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.linspace(-1, 1, 20).double())
        self.wide = nn.Parameter(torch.linspace(0, 1, 15))
        self.scale = nn.Parameter(torch.ones(1))
        self.alone = nn.Parameter(torch.ones((), dtype=torch.float64))


def rounds(state: xffl.DistributedState, begin: int, shape: tuple[int, ...], **options: Any) -> nn.Module:
    """Make rounds, and go on from a state before what is late comes, and from one behind it."""

    def make() -> xffl.Aggregator:
        server = ServerOptimizer(Lazy, {"begin": begin, "shape": shape})
        return xffl.Aggregator(model, state, server=server, **options)

    model = Sizes()
    aggregator = make()
    for number in range(begin + 2):
        if number in (begin - 1, begin + 1):
            saved, aggregator = aggregator.state_dict(), make()
            aggregator.load_state_dict(saved)
        moved(model, state, number)
        aggregator.aggregate()
    return model


WAYS: list[dict[str, Any]] = [{"bucket_bytes": nbytes} for nbytes in (8, 2**20)]


def alike(rank: int, world_size: int, begin: int, shape: tuple[int, ...]) -> None:
    """All ways to cut the model, and to share the steps out, end where one step of all of it ends."""
    state = make_state(rank, (1, 1), None)
    ends = {}
    for way in WAYS:
        model = rounds(state, begin, shape, **way)
        assert same_bits(model, world_size) and np.isfinite(vector(model)).all()
        ends[str(way)] = vector(model)
    for way, end in ends.items():
        np.testing.assert_array_equal(end, ends[str(WAYS[1])], way)


@pytest.mark.parametrize("begin, shape", [(1, (1,)), (3, ()), (7, ())])
def test_what_a_server_keeps_is_what_it_has_made(begin: int, shape: tuple[int, ...]) -> None:
    run_world(2, alike, begin, shape)
