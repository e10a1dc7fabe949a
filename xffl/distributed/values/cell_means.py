"""The mean of a value over the ranks of a cell, for logs and decisions of training loops of one's own."""

from __future__ import annotations

from typing import overload

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from xffl.distributed.agreement.consistency import control_device, message_device
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import StateError

__all__ = ["mean_over_cell"]


@overload
def mean_over_cell(value: float, state: DistributedState, *, weight: float | torch.Tensor = 1.0) -> float: ...


@overload
def mean_over_cell(
    value: torch.Tensor, state: DistributedState, *, weight: float | torch.Tensor = 1.0
) -> torch.Tensor: ...


def mean_over_cell(
    value: float | torch.Tensor, state: DistributedState, *, weight: float | torch.Tensor = 1.0
) -> float | torch.Tensor:
    """Return the mean of the ranks' values over this rank's cell, equal to the bit on all of them.

    Collective over the cell, and over no other: all ranks of the cell call it equally often, not only those that print.
    The same line is right where all cells are in one world, where they are isolated or elastic, and in one process.

    .. code-block:: python

       loss = xffl.mean_over_cell(loss, state, weight=tokens)
       if state.cell_rank == 0:
           print(f"cell {state.cell}: {loss.item():.4f}")

    :param value: This rank's value: a number, or a tensor of the same shape on all ranks of the cell, on any device.
        It is left as it is.
    :param state: The state of :func:`xffl.session` or :func:`xffl.adopt`.
    :param weight: What this rank's value counts for, such as its tokens, at least 0. With 0 it may be NaN.
    :return: For a number a number; for a tensor one without gradient, on its device, of its data type, or float32 where
        that has no fractions. NaN if all weights are 0. It is computed in float64.
    :raises StateError: if the default process group is not that of the cell's ranks, since there is none yet, or none
        any more, or since replica groups of the cell are jobs of their own.
    """
    if isinstance(value, torch.Tensor):
        given = value.full_tensor() if isinstance(value, DTensor) else value
        mean = _mean_of_tensors(given.detach(), state, weight)
        return mean.to(given.dtype if given.is_floating_point() else torch.float32)
    return _mean_of_tensors(torch.tensor(value, dtype=torch.float64, device="cpu"), state, weight).item()


def _mean_of_tensors(given: torch.Tensor, state: DistributedState, weight: float | torch.Tensor) -> torch.Tensor:
    """Return the weighted mean of tensors of the cell's ranks, as 64-bit floats on the tensor's device."""
    values = given.to(torch.float64)
    factor = torch.as_tensor(weight, dtype=torch.float64, device=given.device).detach()
    weighted = torch.where(factor == 0, 0.0, values * factor)
    sums = _sum_over_cell(torch.cat((weighted.flatten(), factor.reshape(1))), state)
    return sums[:-1].view(values.shape) / sums[-1]


def _sum_over_cell(values: torch.Tensor, state: DistributedState) -> torch.Tensor:
    """Return the sum of vectors of the cell's ranks, on the vector's device."""
    group = state.federation
    size = dist.get_world_size(group) if dist.is_initialized() else 1
    if size != state.cell_size:
        raise StateError(
            f"cell {state.cell} has {state.cell_size} ranks, but this rank's group of the cell has {size}; call "
            "mean_over_cell() while the session, or the group that adopt() was called for, is there, and not in cells "
            "whose replica groups are jobs of their own"
        )
    if size == 1:
        return values
    device = control_device(group) if values.device.type == "cpu" else message_device(values.device, group)
    moved = values.to(device, copy=True)
    dist.all_reduce(moved, group=group)
    return moved.to(values.device)
