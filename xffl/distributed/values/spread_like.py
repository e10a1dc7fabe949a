"""Values that take the place of others: spread over ranks like these, or in the data types that they were saved in."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

__all__ = ["load_optimizer", "spread_as", "spread_whole"]


def spread_as(values: torch.Tensor, like: DTensor) -> DTensor:
    """Return this rank's elements as a tensor that is spread like another, in the same memory; nothing moves."""
    # DTensor.from_local copies what does not lie where the mesh computes, such as shards that FSDP keeps on the CPU.
    spread: Any = like.detach()
    names, made_of = spread.__tensor_flatten__()
    # A class of tensors may forget its data type in detach(), so only what needs it is detached.
    local = values.detach() if values.requires_grad else values
    parts = {name: getattr(spread, name) for name in names} | {"_local_tensor": local}
    made: DTensor = spread.__tensor_unflatten__(parts, made_of, like.shape, like.stride())
    return made


def spread_whole(values: torch.Tensor, beside: DTensor) -> DTensor:
    """Return whole values as a tensor that each rank of another one's mesh holds, in the same memory; nothing moves."""
    mesh = beside.device_mesh
    # from_local moves all but meta tensors to the mesh's device; shards may lie on the CPU.
    everywhere = DTensor.from_local(values.to("meta"), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return spread_as(values, everywhere)


def load_optimizer(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Load an optimizer's state in the data types that it was saved in; nothing moves between ranks."""
    optimizer.load_state_dict(state_dict)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, state in state_dict["state"].items():
        # torch casts a state to its parameter's dtype, which would round an fp32 state of bf16 weights.
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                cast = optimizer.state[parameters[number]][key]
                if cast.dtype != value.dtype:
                    optimizer.state[parameters[number]][key] = value.to(device=cast.device)
