"""Norms of the gradients of a whole model, of which each rank holds parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from xffl.checks import group
from xffl.distributed.parameters import AXES, AXES_OF
from xffl.distributed.values.sharding import local_tensor
from xffl.errors import ConfigError

if TYPE_CHECKING:
    from xffl.distributed.cell_meshes import ParallelDims

__all__ = [
    "alike",
    "norms_of",
    "total_norm",
    "values_of",
]

# Axes of a cell that a dimension of a state's own meshes stands for.
AXES_OF_STATE = {"shard": tuple(axis for axis in AXES if axis != "dp_replicate"), "replica": ("dp_replicate",)}


def total_norm(
    gradients: Iterable[torch.Tensor],
    order: float,
    dims: ParallelDims,
    cell: dist.ProcessGroup,
    device: torch.device,
) -> torch.Tensor:
    """Return the norm of the gradients of all ranks of a cell; collective over it: one all-reduce of one number.

    What several ranks hold counts on the one whose coordinate is 0 along every axis that does not cut the tensor.
    """
    held = [_whole(gradient) for gradient in gradients]
    local = [values_of(gradient) for gradient in held]
    if math.isinf(order):
        largest = norms_of([part for part in local if part.numel()], order, device)
        own = largest.max() if len(largest) else largest.sum()
        # gloo's maximum skips NaN, so a flag for it goes beside the value.
        both = torch.stack([own.isnan().to(own), own.nan_to_num(0.0, posinf=torch.inf)])
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=cell)
        return both[1].where(both[0] == 0, torch.nan).float()
    counted = [part for part, gradient in zip(local, held, strict=True) if _counts_here(gradient, dims)]
    total = (norms_of(counted, order, device) ** order).sum()
    dist.all_reduce(total, group=cell)
    return (total ** (1.0 / order)).float()


def norms_of(parts: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Return the norm of each tensor by itself; local."""
    norms = [torch.zeros(0, dtype=torch.float64, device=device)]
    for same in alike(parts):
        dtype = torch.promote_types(same[0].dtype, torch.float32)
        norms.append(torch.stack(torch._foreach_norm(same, norm_type, dtype=dtype)).to(device, torch.float64))
    return torch.cat(norms)


def alike(parts: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Return the tensors of each device and data type, which one kernel can work on; local."""
    return group(((part.device, part.dtype), part) for part in parts).values()


def values_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's numbers of a gradient; of a sparse one those that are not 0, each once."""
    local = local_tensor(gradient)
    return local.coalesce().values() if local.is_sparse else local


def _whole(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient whose parts are values, not summands that are still to be added up."""
    if not isinstance(gradient, DTensor) or not any(place.is_partial() for place in gradient.placements):
        return gradient
    return gradient.redistribute(placements=[Replicate() if p.is_partial() else p for p in gradient.placements])


def _counts_here(gradient: torch.Tensor, dims: ParallelDims) -> bool:
    """Tell whether this rank is the one that counts its part: 0 along every axis that does not cut the tensor."""
    cut = {"pp"}
    if isinstance(gradient, DTensor):
        names = gradient.device_mesh.mesh_dim_names
        if not names:
            raise ConfigError(f"a gradient's mesh {gradient.device_mesh} has no names; shard over world.get_mesh")
        for name, placement in zip(names, gradient.placements, strict=True):
            if placement.is_replicate():
                continue
            text = str(name)  # those of later meshes of a process equal no text
            axes = AXES_OF.get(text) or AXES_OF_STATE.get(text)
            if axes is None:
                raise ConfigError(f"a gradient is cut along {name!r}, no axis of the world; shard over world.get_mesh")
            cut.update(axes)
    return all(axis in cut or dims.at[axis] == 0 for axis in AXES)
