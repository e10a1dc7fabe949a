"""A model's parameters as the ranks of a cell hold them: each rank's own elements, and norms over all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from xffl.aggregation.engine.tensors import tensors_of
from xffl.distributed.sharding import local_tensor, reshard, spread_as
from xffl.errors import ConfigError

if TYPE_CHECKING:
    from xffl.distributed.world import DistributedWorld
    from xffl.training.trainer import BaseTrainer

__all__ = ["check_own_weights", "copies_of", "local", "norm_of", "spread_like", "trained_parameters"]


@dataclass(frozen=True)
class _Held:
    """A tensor where a norm looks for gradients."""

    grad: torch.Tensor


def trained_parameters(models: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Return the parameters that train, tied ones once; nothing moves.

    :param models: Models by name.
    :return: Parameters by the model's name, a dot and their own name without wrappers.
    """
    for model in models.values():
        reshard(model)
    return {
        f"{name}.{key}": tensor
        for name, model in models.items()
        for key, _, _, tensor in tensors_of(model)
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad
    }


def check_own_weights(trainer: BaseTrainer, what: str) -> None:
    """Raise where an engine keeps weights and gradients to itself; local, the same on all ranks.

    :param trainer: The trainer.
    :param what: Who asks, for the message.
    :raises ConfigError: with DeepSpeed.
    """
    if trainer.strategy.name == "deepspeed":
        raise ConfigError(
            f"{what} reads weights and gradients, which DeepSpeed keeps in buffers of its engine; leave it out, or "
            "train with distributed.strategy fsdp or hsdp"
        )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements of a tensor, in the same memory; nothing moves.

    :param tensor: A tensor, spread or not.
    :return: A plain tensor without gradient.
    """
    return local_tensor(tensor).detach()


def copies_of(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy this rank's elements; nothing moves.

    :param parameters: Parameters by name.
    :return: Plain tensors by name.
    """
    return {name: local(parameter).clone() for name, parameter in parameters.items()}


def spread_like(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements as a tensor that is spread like a parameter; nothing moves.

    :param values: A plain tensor of the shape of the parameter's own elements.
    :param parameter: The parameter.
    :return: A tensor in the same memory.
    """
    return spread_as(values, parameter) if isinstance(parameter, DTensor) else values


def norm_of(world: DistributedWorld, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the L2 norm of tensors that are spread over a cell, each element counted once.

    Collective over the cell: one all-reduce of a number.

    :param world: The world.
    :param tensors: This rank's tensors, spread like parameters.
    :return: One number on this rank's device, the same on all ranks of the cell.
    """
    held = [_Held(tensor) for tensor in tensors]
    return world.get_total_norm(cast("list[torch.Tensor]", held))
