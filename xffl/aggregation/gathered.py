"""All cells' values at once, for combiners that have to compare whole models."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xffl.aggregation.mean import piece_length
from xffl.aggregation.plan import Bucket
from xffl.aggregation.tracks import Track

__all__ = ["Gathered", "add_distances"]


class Gathered:
    """Of each lane that this rank carries one row for each cell; as large as the cells' shards together.

    :param cells: Number of cells.
    :param device: Where buffers live.
    """

    def __init__(self, cells: int, device: torch.device) -> None:
        self._cells = cells
        self._device = device
        self._rows: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def reserve(self, track: Track, dtype: torch.dtype) -> None:
        """Make a lane's rows; local."""
        if (track.number, dtype) not in self._rows:
            with torch.inference_mode(False):
                self._rows[track.number, dtype] = torch.empty(
                    self._cells, track.lane.numel, dtype=dtype, device=self._device
                )

    def rows(self, track: Track, bucket: Bucket, dtype: torch.dtype) -> torch.Tensor:
        """Return a bucket's rows, ``[cells, elements]``.

        :param track: The bucket's lane.
        :param bucket: The bucket.
        :param dtype: The lane's data type, or fp32 for differences from the last agreed state.
        :return: A view.
        """
        return self._rows[track.number, dtype][:, bucket.start : bucket.stop]


@torch.no_grad()
def add_distances(rows: torch.Tensor, cells: Sequence[int], table: torch.Tensor) -> None:
    """Add the squared distances between cells' values to a table; local.

    From the differences themselves: with inner products, one huge model would drown the distances between the others.

    :param rows: One row of values for each cell.
    :param cells: The cells to compare.
    :param table: fp64, ``[cells, cells]``; both halves are added to.
    """
    for chunk in torch.split(rows, piece_length(rows.device), dim=1):
        wide = [chunk[cell].double() for cell in cells]
        for index, one in enumerate(cells):
            for other, values in zip(cells[index + 1 :], wide[index + 1 :], strict=True):
                step = torch.sub(wide[index], values)
                distance = step.dot(step)
                table[one, other] += distance
                table[other, one] += distance
