"""Whether all cells stand on the same weights, told without moving them."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from xffl.checkpoint.format import this_cell
from xffl.distributed.consistency import check_consistent, control_device
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.sharding import bytes_of, reshard
from xffl.errors import ConfigError, XfflError
from xffl.training.models.held import Held, held_tensors, local_part, places_held

__all__ = ["agree_on_base"]

FACTOR = 1_000_003
"""What places are multiplied by, so that two elements that change places change the sum."""

RANGE = 2**40
"""What sums are kept below, so that those of thousands of ranks stay in 64 bits."""

CHUNK = 2**20
"""Elements that are looked at together."""

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def agree_on_base(model: nn.Module, state: DistributedState, *, only_frozen: bool = True) -> None:
    """Raise where the cells hold different weights under their adapters.

    Collective over the world; every rank reads its part of the weights once, and one number for each tensor and cell
    moves. Rounds leave frozen weights where they are, so cells that begin with others would average adapters that
    belong to different models, without any other sign.

    :param model: The model, spread in any way.
    :param state: The state that says where this rank stands.
    :param only_frozen: Whether trainable weights may differ.
    :raises ConfigError: if two cells differ, with the first such tensor; on all ranks alike.
    """
    error: XfflError | None = None
    tensors: list[Held] = []
    text = ""
    try:
        cell = this_cell(state)
        reshard(model)
        tensors = [held for held in held_tensors(model) if not (only_frozen and held.tensor.requires_grad)]
        told = "\n".join(f"{held.name} {tuple(held.tensor.shape)} {held.tensor.dtype}" for held in tensors)
        text = hashlib.sha256(told.encode()).hexdigest()
    except XfflError as wrong:
        error = wrong
    check_consistent("base models", text, error=error)
    if not dist.is_initialized():
        return
    sums = torch.zeros(len(cell.sizes), len(tensors), dtype=torch.int64)
    for index, held in enumerate(tensors):
        if _counts(held.tensor, cell.is_first):
            sums[cell.number, index] = _checksum(held.tensor)
    sums = sums.to(control_device())
    dist.all_reduce(sums)
    by_tensor = (sums % RANGE).t().tolist()
    for held, column in zip(tensors, by_tensor, strict=True):
        others = [number for number, value in enumerate(column) if value != column[0]]
        if others:
            raise ConfigError(
                f"cells {others} hold other values of {held.name!r} than cell 0, but all must train the same base "
                "model; give them the same files, or the same seed"
            )


def _counts(tensor: torch.Tensor, is_first: bool) -> bool:
    """Tell whether this rank's part counts: one of those that hold the same elements."""
    if not isinstance(tensor, DTensor):
        return is_first
    at = tensor.device_mesh.get_coordinate()
    assert at is not None, "a rank belongs to the mesh of its tensors"
    return all(place == 0 for place, cut in zip(at, tensor.placements, strict=True) if cut.is_replicate())


def _checksum(tensor: torch.Tensor) -> int:
    """Add up the bits of this rank's elements, each times a factor for its place in the whole tensor."""
    part, shape, held = local_part(tensor), tuple(tensor.shape), places_held(tensor)
    if not part.numel():
        return 0
    if part.is_complex():  # as pairs
        part, shape, held = torch.view_as_real(part.resolve_conj()), (*shape, 2), (*held, torch.arange(2))
    places = torch.zeros((), dtype=torch.int64)
    inner = 1
    # Places of one row of the first dimension; the rows themselves come in chunks.
    for dim in range(len(shape) - 1, 0, -1):
        line = held[dim] * inner
        places = line.view(-1, *[1] * (len(shape) - 1 - dim)) + places
        inner *= shape[dim]
    rows = held[0] * inner if len(shape) else torch.zeros(1, dtype=torch.int64)
    flat, places = part.reshape(len(rows), -1), places.reshape(1, -1)
    step = max(1, CHUNK // max(1, places.numel()))
    total = 0
    for start in range(0, len(rows), step):
        at = (rows[start : start + step, None] + places).to(part.device)
        bits = bytes_of(flat[start : start + step]).view(BITS[part.itemsize]).long().view(at.shape)
        total += int(((bits + FACTOR) * (2 * at + 1) * FACTOR).sum()) % RANGE
    return total % RANGE
