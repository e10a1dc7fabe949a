"""Second copies of the weights are found in an optimizer's state, and moments of gradients are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.low_bit import LowBitSGD
from xffl.aggregation.steps.weight_copies import CopyWatch, find_copies, swaps_weights

SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
MOMENTS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, SGD),
    (torch.optim.Adam, {"amsgrad": True}),
    *((getattr(torch.optim, name), {}) for name in ("Adadelta", "Adagrad", "Adamax", "AdamW", "NAdam", "RAdam")),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Rprop, {}),
    (LowBitSGD, {}),
]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 20, scale: float = 1.0) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        (model(torch.randn(8, 16)).square().mean() * scale).backward()
        optimizer.step()
        optimizer.zero_grad()


def watch_copies(optimizer: torch.optim.Optimizer, say: Any) -> None:
    watch = CopyWatch(say)
    optimizer.register_step_post_hook(lambda stepped, *_: watch.after_step(stepped))


@pytest.mark.parametrize("kind, options", MOMENTS, ids=lambda one: getattr(one, "__name__", ""))
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_moments_are_no_copies(kind: Any, options: dict[str, Any], scale: float) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16))
    optimizer = kind(model.parameters(), **options)
    said: list[str] = []
    watch_copies(optimizer, said.append)
    trained(model, optimizer, scale=scale)
    assert not said and not swaps_weights(optimizer) and find_copies(optimizer) == []


class Lookahead(torch.optim.SGD):
    """Every few steps the weights are pulled back to a slow copy, which is made then."""

    def __init__(self, parameters: Any, key: str, dtype: torch.dtype) -> None:
        super().__init__(parameters, **SGD)
        self.key, self.dtype, self.steps = key, dtype, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.steps += 1
        for group in self.param_groups if self.steps % 5 == 0 else ():
            for parameter in group["params"]:
                slow = self.state[parameter].setdefault(self.key, parameter.to(self.dtype, copy=True))
                parameter.copy_(slow.lerp_(parameter.to(self.dtype), 0.5))


@pytest.mark.parametrize("key, dtype", [("slow", torch.float32), ("master", torch.float64)])
def test_a_slow_copy_is_told_once_when_it_comes(key: str, dtype: torch.dtype) -> None:
    model = nn.Linear(16, 16)
    optimizer = Lookahead(model.parameters(), key, dtype)
    said: list[str] = []
    watch_copies(optimizer, said.append)
    trained(model, optimizer, 4)
    assert not said
    trained(model, optimizer, 16)
    assert len(said) == 1 and f"Lookahead keeps a copy of the weights in its state ('{key}')" in said[0]


def test_a_copy_of_a_few_numbers_is_not_looked_for() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trained_small = model(torch.ones(1, 2)).sum()
    trained_small.backward()
    optimizer.step()
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = parameter.detach().clone()
    assert find_copies(optimizer) == []
