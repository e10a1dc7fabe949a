"""A torn model refuses to be used until it is whole again, however that comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import xffl
from xffl.aggregation.engine.decision.inconsistent import INCONSISTENT_COUNT, find_inconsistent
from xffl.aggregation.engine.decision.inconsistent_model import mark_inconsistent
from xffl.errors import TornError

INPUTS = torch.ones(2, 4)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def tear(model: nn.Module) -> None:
    with pytest.raises(xffl.RoundError, match="planted"):
        mark_inconsistent(model, TornError("planted"))


def check_torn(model: nn.Module, *uses: Callable[[torch.Tensor], Any]) -> None:
    assert find_inconsistent(model) is not None
    for use in (model, *uses):
        with pytest.raises(xffl.RoundError, match="torn"):
            use(INPUTS)


def test_only_a_load_that_succeeds_mends() -> None:
    model = net()
    whole = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    tear(model)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**whole, "1.weight": torch.zeros(3, 3)})
    check_torn(model)
    model.load_state_dict({"0.weight": whole["0.weight"]}, strict=False)
    check_torn(model)
    model.load_state_dict(whole)
    assert find_inconsistent(model) is None and not model(INPUTS).any()


def test_one_load_mends_what_was_torn_twice() -> None:
    model = net()
    for number in range(1, 3):
        tear(model)
        assert getattr(model, INCONSISTENT_COUNT) == number
    seen: list[Any] = []
    handle = model.register_load_state_dict_post_hook(lambda *args: seen.append(args))  # a user's, behind xffl's
    for _ in range(2):
        model.load_state_dict(model.state_dict())
        model(INPUTS)
    assert find_inconsistent(model) is None and len(seen) == 2
    handle.remove()
    for hooks in (model._load_state_dict_pre_hooks, model._load_state_dict_post_hooks, model[0]._forward_pre_hooks):
        assert not hooks, "nothing of it stays"
    tear(model)
    check_torn(model)
    assert getattr(model, INCONSISTENT_COUNT) == 3


def test_what_was_compiled_around_a_torn_model_refuses_too() -> None:
    model = net()

    def use(inputs: torch.Tensor) -> torch.Tensor:
        return model(inputs).sum()  # type: ignore[no-any-return]

    compiled = torch.compile(use, backend="eager")
    expected = compiled(INPUTS)
    tear(model)
    check_torn(model, compiled)
    model.load_state_dict(model.state_dict())
    assert torch.equal(compiled(INPUTS), expected)
