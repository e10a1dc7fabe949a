"""The comparison of the values that cells hold, where they have to hold the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from xffl.aggregation.engine.groups import RoundScope
from xffl.aggregation.engine.planning.tensors import TensorInfo
from xffl.distributed.agreement.consistency import sum_of_bits
from xffl.distributed.agreement.unequal_cells import find_unequal_cells, list_unequal_cells
from xffl.errors import ConfigError

__all__ = ["check_start", "find_unequal"]


@torch.no_grad()
def check_start(
    entries: Sequence[TensorInfo], own_values: Iterable[tuple[int, int, torch.Tensor]], scope: RoundScope
) -> None:
    """Raise ConfigError, on all ranks, where the cells hold different parameters.

    Collective over the scope. ``own_values`` are what this rank sends, by tensor and first element, so that each
    element is counted once in each cell, whatever its cut.
    """
    sums = _sums_of(entries, own_values, scope)
    found = find_unequal_cells(sums, scope.topology.cell_of(scope.rank), scope.topology.cells, scope.world)
    if found is not None:
        item, cells = found
        raise ConfigError(
            f"cells {cells} start from other values of tensor {entries[item].name!r} than cell 0, but a server "
            "optimizer, norms and privacy need one model to start from; use xffl.shard, or load the same checkpoint "
            "everywhere before making the Aggregator. To resume between two rounds, make it first, then load the "
            "model, then its own state"
        )


@torch.no_grad()
def find_unequal(
    entries: Sequence[TensorInfo], own_values: Iterable[tuple[int, int, torch.Tensor]], scope: RoundScope
) -> list[str]:
    """Return the names of the tensors that cells hold otherwise than cell 0; as :func:`check_start`."""
    sums = _sums_of(entries, own_values, scope)
    cell = scope.topology.cell_of(scope.rank)
    return [entries[item].name for item in list_unequal_cells(sums, cell, scope.topology.cells, scope.world)]


def _sums_of(
    entries: Sequence[TensorInfo], own_values: Iterable[tuple[int, int, torch.Tensor]], scope: RoundScope
) -> torch.Tensor:
    """Return a sum of the bits that this rank sends of each tensor; local."""
    sums = torch.zeros(len(entries), dtype=torch.int64, device=scope.device)
    for item, start, values in own_values:
        sums[item] += sum_of_bits(values, torch.arange(start, start + len(values), device=values.device))
    return sums
