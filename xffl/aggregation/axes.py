"""Along which axis the cells cut a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Shard

from xffl.aggregation.entries import Entry, Facts
from xffl.aggregation.plan import Cut
from xffl.errors import ConfigError
from xffl.topology import Coordinates, Topology

__all__ = ["BY_PARTS", "REPLICATED", "axis_of", "canonical_axis", "cuts_of", "gather_axes"]

REPLICATED = -1
"""In a list of axes: every rank of the cell holds the whole tensor."""

BY_PARTS = -2
"""In a list of axes: shards hold parts that no cut along one axis makes, or not all of them hold one."""


def canonical_axis(entry: Facts, axes: Sequence[int]) -> int:
    """Return the one axis along which the cells cut a tensor; 0 where none does.

    :param entry: The tensor.
    :param axes: The axis of each cell, ``REPLICATED`` for none.
    :return: The axis that comes first in canonical order.
    :raises ConfigError: if they cut it along different axes.
    """
    cut = {axis for axis in axes if axis != REPLICATED}
    if len(cut) > 1:
        raise ConfigError(
            f"tensor {entry.name!r} is cut along axis {axes[0]} in cell 0 and along others elsewhere "
            f"({list(axes)}); use the same shard placement in every cell"
        )
    return cut.pop() if cut else 0


def gather_axes(
    axes: Sequence[int], topology: Topology, group: dist.ProcessGroup | None = None
) -> tuple[tuple[int, ...], ...]:
    """Exchange along which axes the cells cut their tensors.

    Collective over the topology's ranks; a rank sends a few bytes (runs of equal axes are folded).

    :param axes: This rank's axes, from :meth:`Manifest.axes`.
    :param topology: The federation.
    :param group: A group of all ranks; by default the world.
    :return: The axes of each cell.
    :raises ConfigError: if two ranks of a cell differ.
    """
    runs: list[tuple[int, int]] = []
    for axis in axes:
        count = runs.pop()[1] if runs and runs[-1][0] == axis else 0
        runs.append((axis, count + 1))
    gathered: list[list[tuple[int, int]]] = [[] for _ in range(topology.world_size)]
    dist.all_gather_object(gathered, runs, group=group)
    cells = []
    for cell in range(topology.cells):
        ranks = topology.federation(cell)
        if any(gathered[rank] != gathered[ranks[0]] for rank in ranks):
            raise ConfigError(f"the ranks of cell {cell} shard the model differently; shard it alike on all of them")
        cells.append(tuple(axis for axis, count in gathered[ranks[0]] for _ in range(count)))
    return tuple(cells)


def cuts_of(tensor: DTensor) -> list[tuple[int, Placement]]:
    """Return the mesh dimensions along which a tensor is not the same everywhere, and its placements there."""
    cuts = [(dim, place) for dim, place in enumerate(tensor.placements) if not place.is_replicate()]
    return [(dim, place) for dim, place in cuts if place.is_partial() or tensor.device_mesh.size(dim) > 1]


def axis_of(entry: Entry, shards: int, at: Coordinates) -> int:
    """Return the axis along which a rank's part of a tensor is cut, checked against the state's arithmetic."""
    tensor = entry.tensor()
    if not isinstance(tensor, DTensor):
        return REPLICATED
    knob = "shard it with xffl.shard, or over the state's own mesh, or tell the state the cell_shape"
    cuts = cuts_of(tensor)
    if not cuts:
        return REPLICATED
    dim, place = cuts[0]
    if len(cuts) > 1 or not isinstance(place, Shard) or type(place) is not Shard:
        raise ConfigError(
            f"tensor {entry.name!r} has placements {tensor.placements}; a round takes tensors cut along one axis of "
            f"one mesh dimension; {knob}"
        )
    parts, part = tensor.device_mesh.size(dim), tensor.device_mesh.get_local_rank(dim)
    if (parts, part) != (shards, at.shard):
        raise ConfigError(
            f"tensor {entry.name!r} is part {part} of {parts} here, but the state says shard {at.shard} of {shards}; "
            f"{knob}"
        )
    axis = place.dim
    length, inner = entry.real_shape[axis], prod(entry.real_shape) // max(1, entry.real_shape[axis])
    first, last = Cut.of_axis(length, inner, shards).bounds(at.shard)
    if entry.elements(axis).numel() != last - first:
        raise ConfigError(f"tensor {entry.name!r} is cut unevenly along axis {axis}, not as torch.chunk does; {knob}")
    return axis
