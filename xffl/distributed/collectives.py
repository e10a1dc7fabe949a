"""Collectives over the ranks of a world, or over those along an axis of a cell's mesh, by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from xffl.distributed.backends import barrier
from xffl.distributed.standing import Standing
from xffl.errors import ConfigError

__all__ = ["Collectives", "bytes_of", "from_bytes"]

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


class Collectives(Standing):
    """What ranks tell each other; every call is collective over the ranks of its mesh.

    :param device_parameters: What is asked of the ranks inside a cell.
    """

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
