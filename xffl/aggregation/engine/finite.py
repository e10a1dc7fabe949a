"""Values that are not finite in what a rank sends: found bucket by bucket, each by one number."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from xffl.aggregation.engine.buffers import Layout
from xffl.aggregation.engine.plan import Bucket

__all__ = ["FiniteCheck", "FiniteReport", "sum_of_squares"]


class FiniteReport(NamedTuple):
    """What a rank has found in the values that it sends."""

    nonfinite: list[str]  # names of tensors to be averaged that hold a value which is not finite
    squares_fit_fp32: bool  # whether no value is so large that its square leaves fp32
    norm: float = 0.0  # squared L2 norm of what they differ by from the last agreed model; 0 where nobody asks


class FiniteCheck:
    """Looks at the values of a round, bucket by bucket; local."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._energies: dict[torch.device, list[tuple[Bucket, torch.Tensor]]] = {}

    def add(self, bucket: Bucket, values: torch.Tensor) -> None:
        """Look at a bucket's values; a GPU is not waited for."""
        self._energies.setdefault(values.device, []).append((bucket, sum_of_squares(values)))

    def report(self) -> FiniteReport:
        """Return what was found in all of them."""
        energies: list[float] = []
        found: set[int] = set()
        for some in self._energies.values():  # each GPU is read once
            read = torch.stack([energy for _, energy in some]).tolist()
            energies += read
            for (bucket, _), energy in zip(some, read, strict=True):
                if not math.isfinite(energy):
                    found.update(self._layout.nonfinite(bucket))
        return FiniteReport([self._layout.name(item) for item in sorted(found)], all(map(math.isfinite, energies)))


def sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    """Return a number that is finite only if all values are: the sum of squares, or of the values of a narrow type."""
    if not values.is_floating_point():
        return values.new_zeros((), dtype=torch.float32)
    if values.dtype.itemsize < 4:
        values = values.float() if values.dtype.itemsize == 1 else values  # torch adds no 8-bit floats up
        return values.sum(dtype=torch.float32)
    energy = values.dot(values)
    return energy if energy.dtype == torch.float32 else energy.float()
