"""Collectives over the ranks of a world, or over those along an axis of a cell's mesh, by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from xffl.distributed.consistency import barrier
from xffl.distributed.parallel_dims import JOINED, ParallelDims, WorldDims
from xffl.distributed.parameters import AXES
from xffl.errors import ConfigError

__all__ = ["Collectives", "alike", "bytes_of", "from_bytes", "norms_of", "total_norm", "values_of"]


OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements in order as one flat row of bytes, whatever the tensor's memory layout.

    A view where the elements follow each other in memory, else a copy: read it, do not write to it.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    # A single element, or none, counts as contiguous with any stride, but only one of 1 can be viewed as bytes.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def from_bytes(data: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return a copy of what :func:`bytes_of` gave as a tensor; the copy is aligned for any data type."""
    return data.clone().view(dtype).view(shape)


class Collectives(WorldDims):
    """What ranks tell each other; every call is collective over the ranks of its mesh."""

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", mesh: str = "world") -> torch.Tensor:
        """Combine a tensor of each rank, element by element.

        Collective over the ranks of the mesh; each sends and receives about twice the tensor's bytes.

        :param tensor: This rank's values, of the same shape and data type on all ranks; left as it is.
        :param op: ``sum``, ``mean``, ``max`` or ``min``.
        :param mesh: ``world`` (all ranks, across the slow link), ``cell``, or a name that :meth:`get_mesh` knows.
        :return: The same values on all of them.
        :raises ConfigError: if the operation, the mesh or the tensor cannot be meant.
        """
        if op not in OPERATIONS:
            raise ConfigError(f"op {op!r} is none of {', '.join(OPERATIONS)}")
        if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ConfigError(f"a {tensor.dtype} tensor has no mean; give a floating-point one")
        group = self._made.group(mesh)
        result = _own_values(tensor).clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, op=OPERATIONS[op], group=group)
        return result.div_(group.size()) if op == "mean" else result

    def all_gather(self, tensor: torch.Tensor, mesh: str = "world") -> torch.Tensor:
        """Collect a tensor of each rank.

        Collective over the ranks of the mesh; each receives the tensors of all others.

        :param tensor: This rank's values, of the same shape and data type on all ranks.
        :param mesh: As in :meth:`all_reduce`.
        :return: The tensors stacked by rank, shape ``(ranks, *tensor.shape)``, the same on all of them.
        """
        group = self._made.group(mesh)
        values = _own_values(tensor).contiguous()
        gathered = [torch.empty_like(values) for _ in range(group.size())]
        dist.all_gather(gathered, values, group=group)
        return torch.stack(gathered)

    def broadcast(self, tensor: torch.Tensor, src: int = 0, mesh: str = "world") -> torch.Tensor:
        """Give a tensor of one rank to the others.

        Collective over the ranks of the mesh.

        :param tensor: The values on the rank that sends; elsewhere a tensor of the same shape and data type.
        :param src: The rank that sends, counted along the mesh.
        :param mesh: As in :meth:`all_reduce`.
        :return: The same values on all ranks.
        :raises ConfigError: if there is no such rank.
        """
        group = self._made.group(mesh)
        if not 0 <= src < group.size():
            raise ConfigError(f"src {src} is outside mesh {mesh!r} of {group.size()} ranks; count along the mesh")
        result = _own_values(tensor).clone(memory_format=torch.contiguous_format)
        dist.broadcast(result, group=group, group_src=src)
        return result

    def barrier(self, mesh: str = "world") -> None:
        """Wait until all ranks of the mesh have come here.

        :param mesh: As in :meth:`all_reduce`.
        """
        barrier(self._made.group(mesh))


def _own_values(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        raise ConfigError(
            f"a DTensor of placements {tensor.placements} is spread already; give its to_local() or full_tensor()"
        )
    # A backend moves the memory, which does not tell whether it is to be conjugated or negated.
    return tensor.detach().resolve_conj().resolve_neg()


HELD = {"shard": tuple(axis for axis in AXES if axis != "dp_replicate"), "replica": ("dp_replicate",)}
"""Axes that the dimensions of a state's own meshes stand for."""


def total_norm(
    parameters: Iterable[torch.Tensor],
    norm_type: float,
    dims: ParallelDims,
    cell: dist.ProcessGroup,
    device: torch.device,
) -> torch.Tensor:
    """Return the norm of the gradients of all ranks of a cell.

    Collective over the cell: one all-reduce of one number. What several ranks hold is counted on one of them: the one
    whose coordinate is 0 along every axis that does not cut the tensor; stages of a pipeline hold different tensors.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    held = [_whole(gradient) for gradient in gradients]
    local = [values_of(gradient) for gradient in held]
    if math.isinf(norm_type):
        largest = norms_of([part for part in local if part.numel()], norm_type, device)
        found = largest.max() if len(largest) else largest.sum()
        # gloo's maximum passes over what is not a number, so that goes beside it.
        both = torch.stack([found.isnan().to(found), found.nan_to_num(0.0, posinf=torch.inf)])
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=cell)
        return both[1].where(both[0] == 0, torch.nan).float()
    counted = [part for part, gradient in zip(local, held, strict=True) if _counts_here(gradient, dims)]
    total = (norms_of(counted, norm_type, device) ** norm_type).sum()
    dist.all_reduce(total, group=cell)
    return (total ** (1.0 / norm_type)).float()


def norms_of(parts: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Return the norm of each tensor by itself; local."""
    found = [torch.stack(torch._foreach_norm(same, norm_type, dtype=_wide(same[0]))) for same in alike(parts)]
    return torch.cat(
        [norms.to(device, torch.float64) for norms in found] or [torch.zeros(0, dtype=torch.float64, device=device)]
    )


def alike(parts: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors of each device and data type, which one kernel can work on; local."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for part in parts:
        found.setdefault((part.device, part.dtype), []).append(part)
    yield from found.values()


def values_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's numbers of a gradient; of a sparse one those that are not 0, each once."""
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return local.coalesce().values() if local.is_sparse else local


def _whole(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient whose parts are values, not summands that are still to be added up."""
    if not isinstance(gradient, DTensor) or not any(place.is_partial() for place in gradient.placements):
        return gradient
    return gradient.redistribute(placements=[Replicate() if p.is_partial() else p for p in gradient.placements])


def _counts_here(gradient: torch.Tensor, dims: ParallelDims) -> bool:
    cut = {"pp"}
    if isinstance(gradient, DTensor):
        names = gradient.device_mesh.mesh_dim_names or ()
        for name, placement in zip(names, gradient.placements, strict=True):
            if not placement.is_replicate():
                cut.update(_axes(name))
        if not names:
            raise ConfigError(
                f"a gradient lies on {gradient.device_mesh}, whose dimensions have no names; shard over world.get_mesh"
            )
    return all(axis in cut or dims.at[axis] == 0 for axis in AXES)


def _axes(name: str) -> tuple[str, ...]:
    """Return the axes of the cell that a dimension of a mesh stands for; names may end in a number."""
    stem = name.rstrip("0123456789").removesuffix("_")
    known = {axis: (axis,) for axis in AXES} | JOINED | HELD
    if stem not in known:
        raise ConfigError(f"a gradient is cut along {name!r}, which is no axis of the world; shard over world.get_mesh")
    return known[stem]


def _wide(part: torch.Tensor) -> torch.dtype:
    return torch.promote_types(part.dtype, torch.float32)
