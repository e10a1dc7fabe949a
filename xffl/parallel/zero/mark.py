"""The mark of a model that ZeRO has cut: whoever reads a model's weights looks for it, with or without DeepSpeed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch import nn

from xffl.errors import ConfigError, StateError

if TYPE_CHECKING:
    from xffl.parallel.zero.view import Masters

__all__ = ["MARK", "NO_ENGINE", "UNREADY", "find_masters", "is_cut", "mark"]

MARK = "_xffl_zero"
"""The attribute of a module that holds the mark"""
UNREADY = "unready"
"""The mark of a model that ZeRO is to cut, so that nobody uses it before"""
NO_ENGINE = (
    "DeepSpeed has no optimizer yet; call optimizer = strategy.wrap_optimizer(model, optimizer) before the model is "
    "used"
)
"""What is wrong with a model that is marked so"""


def mark(model: nn.Module, masters: Masters | str | None) -> None:
    """Mark a model with what ZeRO has cut it into, or as :data:`UNREADY`; local."""
    object.__setattr__(model, MARK, masters)


def is_cut(model: nn.Module) -> bool:
    """Tell whether an engine has cut a model, or a part of it; local."""
    is_marked = any(module.__dict__.get(MARK) not in (None, UNREADY) for module in model.modules())
    return is_marked or any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def find_masters(model: nn.Module) -> Masters | None:
    """Return the masters of a model; local."""
    for module in model.modules():
        masters: Masters | str | None = module.__dict__.get(MARK)
        if masters == UNREADY:
            raise StateError(NO_ENGINE)
        if masters is not None and not isinstance(masters, str):
            return masters
    if "deepspeed" not in sys.modules:
        return None
    # Called in each round, so names are put together only for the message.
    for parameter in (parameter for module in model.modules() for parameter in module._parameters.values()):
        if parameter is not None and "ds_tensor" in parameter.__dict__:
            name = next(name for name, other in model.named_parameters() if other is parameter)
            raise ConfigError(f"parameter {name!r} is cut by a DeepSpeed engine of others; use DeepSpeedStrategy")
    return None
