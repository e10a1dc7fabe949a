"""Positions of tokens for models that would count them from the length of what they see."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["POSITIONS", "fill_positions", "find_positions"]

POSITIONS = ("positions", "position_ids")
"""Arguments by which models take positions: of shape (sequence), and of shape (1, sequence)."""


def find_positions(model: nn.Module) -> str | None:
    """Return the argument by which a model's ``forward`` takes positions.

    :param model: The model.
    :return: The name, or ``None`` where it takes none.
    """
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in POSITIONS if name in parameters), None)


def fill_positions(
    model: nn.Module, name: str, make: Callable[[torch.Tensor], torch.Tensor | None], *, is_first: bool
) -> RemovableHandle:
    """Give a model positions wherever a call leaves them out. Nothing moves.

    :param model: The model, as it is called.
    :param name: The argument, as :func:`find_positions` tells it.
    :param make: Makes the positions (sequence) from the first tensor of the call; ``None`` leaves them out.
    :param is_first: Whether it comes before what else fills positions, or behind it.
    :return: A handle that takes it off again.
    """
    place = list(inspect.signature(model.forward).parameters).index(name)

    def fill(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = args[place] if place < len(args) else kwargs.get(name)
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
        positions = None if given is not None or first is None else make(first)
        if positions is None:
            return args, kwargs
        if name == "position_ids":
            positions = positions[None]
        if place < len(args):
            return (*args[:place], positions, *args[place + 1 :]), kwargs
        return args, {**kwargs, name: positions}

    return model.register_forward_pre_hook(fill, prepend=is_first, with_kwargs=True)
