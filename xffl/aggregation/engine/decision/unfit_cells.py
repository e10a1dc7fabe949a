"""Cells whose values are not finite: the round is refused on all ranks, or they are left out of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from xffl.distributed.agreement.consistency import check_consistent, control_device
from xffl.distributed.collectives import Group, all_gather_json
from xffl.errors import RoundError, XfflError
from xffl.topology import Topology

__all__ = ["find_nonfinite", "refuse_nonfinite"]

SHOWN = 3
"""Tensors of a rank that are named, at most."""


def refuse_nonfinite(cells: Collection[int], cell: int, tensors: Sequence[str], *, world: Group | None) -> None:
    """Raise RoundError on all ranks, with the cell and the tensors that a rank of it has found; collective."""
    error: XfflError | None = None
    if cell in cells and tensors:
        error = RoundError(
            f"cell {cell} holds values that are not finite in {', '.join(map(repr, tensors[:SHOWN]))}; all ranks keep "
            "their weights; nonfinite='drop_cell' leaves the cell out, policy 'first' or 'local' the tensor"
        )
    check_consistent("finite values", "", error=error, group=world)


def find_nonfinite(
    cells: Collection[int], topology: Topology, tensors: Sequence[str], *, world: Group | None
) -> dict[int, tuple[str, ...]]:
    """Return the tensors for which cells are left out, of the tensors that each rank has found; collective."""
    gathered: list[list[str]] = all_gather_json(list(tensors[:SHOWN]), control_device(world), world)
    return {
        cell: tuple(sorted({name for rank in topology.federation(cell) for name in gathered[rank]})) for cell in cells
    }
