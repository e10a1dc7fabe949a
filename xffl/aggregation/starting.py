"""Whether all cells start from the same model, told without moving it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from xffl.aggregation.entries import Facts
from xffl.aggregation.exchange import Exchange
from xffl.distributed.sharding import reshard
from xffl.errors import ConfigError
from xffl.topology import Topology

__all__ = ["agree_start", "digest_of"]

PRIME = 1_000_003
"""Steps of the factors that elements are multiplied by, so that two that change places change the sum."""

RANGE = 2**40
"""What sums are kept below, so that those of thousands of ranks stay in 64 bits."""

CHUNK = 2**20
"""Elements of a tensor that are summed up at a time: each needs 24 bytes more."""

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def agree_start(
    entries: Sequence[Facts],
    exchange: Exchange,
    topology: Topology,
    rank: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Raise where the cells hold different parameters.

    Collective over the topology's ranks; moves one number for each tensor and cell. Each element is counted once in
    each cell, whatever its cut, by the bits of its value and its place.

    :param entries: The moving tensors, in the plan's order.
    :param exchange: What holds this rank's elements.
    :param topology: The federation.
    :param rank: This rank.
    :param device: Where the world's backend communicates from.
    :param group: A group of all ranks; by default the world.
    :raises ConfigError: if two cells differ; on all ranks, with the tensor and the cells.
    """
    sums = torch.zeros(topology.cells, len(entries), dtype=torch.int64, device=device)
    mine = sums[topology.cell_of(rank)]
    for item, start, values in exchange.carried_parts():
        mine[item] = (mine[item] + _sum_of_bits(values, start) % RANGE) % RANGE
    dist.all_reduce(sums, group=group)
    by_tensor = (sums % RANGE).t().tolist()
    for entry, column in zip(entries, by_tensor, strict=True):
        others = [cell for cell, value in enumerate(column) if value != column[0]]
        if others:
            raise ConfigError(
                f"cells {others} start from other values of tensor {entry.name!r} than cell 0, but a server optimizer, "
                "norms and privacy need one model to start from; use xffl.shard, or load the same checkpoint "
                "everywhere before making the Aggregator. To resume between two rounds, make it first, then load the "
                "model, then its own state"
            )


@torch.no_grad()
def digest_of(model: nn.Module) -> list[int]:
    """Return a number for this rank's elements of each trainable parameter, by their bits and places; local.

    Versions of tensors would be cheaper, and do not tell of what was changed through ``.data``.
    """
    reshard(model)
    sums = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            values = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
            values = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)
            parts = torch.split(values, CHUNK) if len(values) else ()
            sums.append(sum(_sum_of_bits(part, CHUNK * index) for index, part in enumerate(parts)))
    return [int(one) for one in sums]


def _sum_of_bits(values: torch.Tensor, start: int) -> torch.Tensor:
    """Return the sum over the elements of a row of what each one's bits and place come to, modulo 2^64."""
    bits = values.contiguous().view(BITS[values.itemsize]).to(torch.int64, copy=True)
    factors = torch.arange(start, start + len(bits), device=bits.device).mul_(2).add_(1).mul_(PRIME)
    bits.add_(PRIME).mul_(factors)
    # Without it a change of all elements from 1 to 0.5 would add up to a multiple of a high power of two, that is to 0.
    return bits.bitwise_xor_(bits >> 31).sum()
