"""A model's parameters as its optimizer holds them: FSDP2 puts others in their place while a unit is gathered.

The outermost unit stays gathered after a forward pass that no backward pass follows (a validation). Whoever compares
parameters by identity, or reads their gradients, asks here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

__all__ = ["load_optimizer", "reshard", "sharded_parameters", "spread_as", "spread_whole"]


def reshard(model: nn.Module) -> None:
    """Put every FSDP2 module into its sharded state, so that no stale gathered copy outlives a round; nothing moves."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def spread_as(values: torch.Tensor, like: DTensor) -> DTensor:
    """Return this rank's elements as a tensor that is spread like another, in the same memory; nothing moves.

    ``DTensor.from_local`` copies what does not lie where the mesh computes, such as shards that FSDP keeps on the CPU.

    :param values: This rank's elements, as many as those of the other.
    :param like: A spread tensor.
    :return: The tensor, without gradient.
    """
    spread: Any = like.detach()
    names, made_of = spread.__tensor_flatten__()
    parts = {name: getattr(spread, name) for name in names} | {"_local_tensor": values.detach()}
    made: DTensor = spread.__tensor_unflatten__(parts, made_of, like.shape, like.stride())
    return made


def spread_whole(values: torch.Tensor, beside: DTensor) -> DTensor:
    """Return whole values as a tensor that each rank of another one's mesh holds, in the same memory; nothing moves.

    :param values: The values, the same on all ranks.
    :param beside: A spread tensor.
    :return: The tensor, without gradient.
    """
    mesh = beside.device_mesh
    # from_local moves all but meta tensors to the mesh's device; shards may lie on the CPU.
    everywhere = DTensor.from_local(values.to("meta"), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return spread_as(values, everywhere)


def sharded_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's parameters by name, tied ones once, as its optimizer holds them; nothing moves."""
    reshard(model)
    return dict(model.named_parameters())


def load_optimizer(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Load an optimizer's state in the data types that it was saved in; nothing moves between ranks.

    :param optimizer: The optimizer.
    :param state_dict: As :meth:`torch.optim.Optimizer.state_dict` gives it.
    """
    optimizer.load_state_dict(state_dict)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, kept in state_dict["state"].items():
        # torch casts a state to its parameter's dtype, which would round an fp32 state of bf16 weights.
        for key, value in kept.items():
            if isinstance(value, torch.Tensor):
                cast = optimizer.state[parameters[number]][key]
                if cast.dtype != value.dtype:
                    optimizer.state[parameters[number]][key] = value.to(device=cast.device)
