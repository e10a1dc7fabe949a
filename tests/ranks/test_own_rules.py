"""Server rules over rounds: one's own, and states that are saved, cut otherwise, and of before there were rules."""

from __future__ import annotations

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


class Anchored:
    """A rule with a state that depends on where it starts, and with a number that depends on the step."""

    def __init__(self, lr: float = 0.5, pull: float = 0.1) -> None:
        self.lr = lr
        self.pull = pull

    def init(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"anchor": values.clone(), "sum": torch.zeros_like(values)}

    def numbers(self, step: int) -> dict[str, float]:
        return {"lr": self.lr / (1 + step)}

    def step(self, values: torch.Tensor, pseudo_gradient: torch.Tensor, state: Any, numbers: Any) -> None:
        state["sum"].add_(pseudo_gradient)
        away = torch.sub(values, state["anchor"]).mul_(self.pull)
        values.sub_(torch.add(state["sum"], away).mul_(numbers["lr"]))


class Sizes(nn.Module):
    """A parameter of one element behind larger ones, which is a bucket of its own where buckets are small."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.linspace(-1, 1, 20).double())
        self.wide = nn.Parameter(torch.linspace(0, 1, 15))
        self.scale = nn.Parameter(torch.ones(1))
        self.alone = nn.Parameter(torch.ones((), dtype=torch.float64))


def alike(rank: int, world_size: int) -> None:
    """All ways to cut the model, and to stop before the first step or later, end where one step of all of it ends."""
    state = make_state(rank, (1, 1), None)
    ends = []
    for options in ({}, {"bucket_bytes": 8}, {"bucket_bytes": 24, "fragments": 2}):
        for stops in ((), (0, 2)):
            model = Sizes()
            aggregator = xffl.Aggregator(model, state, server=Anchored(), **options)
            for number in range(4 * options.get("fragments", 1)):
                if number in stops:
                    saved, last, model = aggregator.state_dict(), model, Sizes()
                    aggregator = xffl.Aggregator(model, state, server=Anchored(), **{**options, "bucket_bytes": 16})
                    model.load_state_dict(last.state_dict())
                    aggregator.load_state_dict(saved)
                moved(model, state, number)
                aggregator.aggregate()
            assert "fragments" in options or same_bits(model, world_size)
            ends.append(vector(model))
    assert np.isfinite(ends[0]).all()
    for end, wanted in zip(ends, [ends[0]] * 4 + [ends[4]] * 2, strict=True):
        np.testing.assert_array_equal(end, wanted)


def test_a_rule_of_ones_own_steps_alike_however_the_model_is_cut() -> None:
    run_world(2, alike)


# Saved before there were rules ----------------------------------------------------------------------------------------

OLD_NAMES = {"momentum": "momentum_buffer", "m": "exp_avg", "v": "exp_avg_sq"}
OLD: dict[str, tuple[dict[str, Any], dict[str, str], dict[str, str]]] = {
    "diloco": (
        {"name": "diloco", "schedule": "StepLR:step_size=2,gamma=0.5"},
        {"class": "SGD", "lr": "0.7", "momentum": "0.9", "dampening": "0", "weight_decay": "0", "nesterov": "True"},
        {"schedule": "StepLR", "schedule's step_size": "2", "schedule's gamma": "0.5", "initial_lr": "0.7"},
    ),
    "adam": (
        {"name": "torch.optim.AdamW", "lr": 0.05},
        {"class": "AdamW", "lr": "0.05", "betas": "(0.9, 0.999)", "eps": "1e-08", "weight_decay": "0.01"},
        {"amsgrad": "False", "maximize": "False", "foreach": "None", "schedule": "none"},
    ),
    "fedyogi": (
        {"name": "fedyogi", "lr": 0.05, "is_bias_corrected": True},
        {"class": "Adaptive", "lr": "0.05", "betas": "(0.9, 0.99)", "tau": "0.001", "rule": "'yogi'"},
        {"initial": "1e-06", "is_bias_corrected": "True", "schedule": "none"},
    ),
}
"""Servers, and what was written of them when torch's optimizers made the steps."""


def written_before(saved: dict[str, Any], name: str, holds: set[int]) -> dict[str, Any]:
    """Return an aggregator's state as it was saved before there were rules."""
    old = {}
    for fragment, one in saved["agreed"]["optimizers"].items():
        if fragment in holds:  # ranks knew of those alone
            counts = {} if name == "diloco" else {"step": torch.tensor(float(one["step"]))}
            renames = {} if name == "fedyogi" else OLD_NAMES
            old[fragment] = {
                "elements": {renames.get(key, key): tensors for key, tensors in one["elements"].items()},
                "numbers": counts,
                "options": {"lr": 0.05},
                "schedule": {"last_epoch": one["step"]} if name == "diloco" else None,
                "ended": None,
                "asked": OLD[name][1] | OLD[name][2],
            }
    return {**saved, "agreed": {**saved["agreed"], "optimizers": old}}


def resumed(rank: int, world_size: int, name: str) -> None:
    """What was saved by optimizers of torch goes on as if nothing had stopped, also where a rank holds nothing."""
    state = make_state(rank, (2, 1), None)
    server = OLD[name][0]

    def make() -> tuple[nn.Module, xffl.Aggregator]:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(12, 1, bias=False), nn.Linear(1, 12, bias=False))
        model = xffl.shard(layers, state, wrap=[nn.Linear])
        return model, xffl.Aggregator(model, state, server=server, fragments=2)

    model, aggregator = make()
    other, again = make()
    for number in range(5):
        moved(model, state, number)
        aggregator.aggregate()
    with torch.no_grad():
        for mine, its in zip(other.parameters(), model.parameters(), strict=True):
            mine.copy_(its)
    exchange = aggregator._exchange
    holds = {transfer.group.fragment for transfer in exchange.transfers}
    assert (rank == 1) == (len(holds) == 1)  # of one row the first rank holds all
    again.load_state_dict(written_before(aggregator.state_dict(), name, holds))
    assert again.global_model is not None and aggregator.global_model is not None
    assert again.global_model.steps == aggregator.global_model.steps == {0: 3, 1: 2}
    for number in range(5, 9):
        for one, runs in ((model, aggregator), (other, again)):
            moved(one, state, number)
            runs.aggregate()
    assert np.array_equal(vector(model), vector(other))


@pytest.mark.parametrize("name", OLD)
def test_states_of_torchs_optimizers_go_on(name: str) -> None:
    run_world(3, resumed, name)
