"""Which cells hold other values than the others, by sums of their bits."""

from __future__ import annotations

import torch

from xffl.distributed.agreement.consistency import control_device
from xffl.distributed.collectives import Group, all_reduce

__all__ = ["find_unequal_cells", "list_unequal_cells"]

CHECKSUM_RANGE = 2**40
"""Sums of ranks are taken modulo this before they are added up, so that thousands fit 64 bits."""


def find_unequal_cells(
    sums: torch.Tensor, cell: int, cells: int, group: Group | None = None
) -> tuple[int, list[int]] | None:
    """Return the first tensor of which some cells hold other values than cell 0, and these cells; ``None`` without.

    As :func:`list_unequal_cells`, collective over ``group``.
    """
    return next(iter(list_unequal_cells(sums, cell, cells, group).items()), None)


def list_unequal_cells(sums: torch.Tensor, cell: int, cells: int, group: Group | None = None) -> dict[int, list[int]]:
    """Return, by tensor, which cells hold other values of it than cell 0; nothing of tensors that all hold alike.

    ``sums`` are those of this rank's elements of each tensor; each element must count once in each cell. Collective
    over ``group``: moves one number for each tensor and cell.
    """
    table = torch.zeros(cells, len(sums), dtype=torch.int64)
    table[cell] = sums % CHECKSUM_RANGE
    table = table.to(control_device(group))
    all_reduce(table, group=group)
    unequal: dict[int, list[int]] = {}
    for index, column in enumerate((table % CHECKSUM_RANGE).t().tolist()):
        others = [number for number, value in enumerate(column) if value != column[0]]
        if others:
            unequal[index] = others
    return unequal
