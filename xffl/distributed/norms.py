"""Norms of gradients that the ranks of a cell hold parts of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from xffl.distributed.parallel_dims import JOINED, ParallelDims
from xffl.distributed.parameters import AXES
from xffl.distributed.sharding import local_tensor
from xffl.errors import ConfigError

__all__ = ["alike", "norms_of", "total_norm", "values_of"]


AXES_OF = {
    **{axis: (axis,) for axis in AXES},
    **JOINED,
    "shard": tuple(axis for axis in AXES if axis != "dp_replicate"),
    "replica": ("dp_replicate",),
}
"""Axes of a cell that a dimension of a mesh stands for; the last two are those of a state's own meshes."""


def total_norm(
    parameters: Iterable[torch.Tensor],
    norm_type: float,
    dims: ParallelDims,
    cell: dist.ProcessGroup,
    device: torch.device,
) -> torch.Tensor:
    """Return the norm of the gradients of all ranks of a cell; collective over it: one all-reduce of one number.

    What several ranks hold counts on the one whose coordinate is 0 along every axis that does not cut the tensor.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    held = [_whole(gradient) for gradient in gradients]
    local = [values_of(gradient) for gradient in held]
    if math.isinf(norm_type):
        largest = norms_of([part for part in local if part.numel()], norm_type, device)
        own = largest.max() if len(largest) else largest.sum()
        # gloo's maximum skips NaN, so a flag for it goes beside the value.
        both = torch.stack([own.isnan().to(own), own.nan_to_num(0.0, posinf=torch.inf)])
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=cell)
        return both[1].where(both[0] == 0, torch.nan).float()
    counted = [part for part, gradient in zip(local, held, strict=True) if _counts_here(gradient, dims)]
    total = (norms_of(counted, norm_type, device) ** norm_type).sum()
    dist.all_reduce(total, group=cell)
    return (total ** (1.0 / norm_type)).float()


def norms_of(parts: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Return the norm of each tensor by itself; local."""
    norms = [torch.zeros(0, dtype=torch.float64, device=device)]
    for same in alike(parts):
        dtype = torch.promote_types(same[0].dtype, torch.float32)
        norms.append(torch.stack(torch._foreach_norm(same, norm_type, dtype=dtype)).to(device, torch.float64))
    return torch.cat(norms)


def alike(parts: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors of each device and data type, which one kernel can work on; local."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for part in parts:
        by_kind.setdefault((part.device, part.dtype), []).append(part)
    yield from by_kind.values()


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
            raise ConfigError(
                f"a gradient lies on {gradient.device_mesh}, whose dimensions have no names; shard over world.get_mesh"
            )
        for name, placement in zip(names, gradient.placements, strict=True):
            if placement.is_replicate():
                continue
            stem = name.rstrip("0123456789").removesuffix("_")  # later meshes of a process have a number behind
            if stem not in AXES_OF:
                raise ConfigError(
                    f"a gradient is cut along {name!r}, not along an axis of the world; shard over world.get_mesh"
                )
            cut.update(AXES_OF[stem])
    return all(axis in cut or dims.at[axis] == 0 for axis in AXES)
