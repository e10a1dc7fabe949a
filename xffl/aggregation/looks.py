"""What a rank finds in the values that it sends: whether they are finite, and how large they are."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from xffl.aggregation.layout import Layout
from xffl.aggregation.plan import Bucket

__all__ = ["Findings", "Looks", "energy_of"]


class Findings(NamedTuple):
    """What a rank has found in the values that it sends.

    :param nonfinite: Names of tensors to be averaged that hold a value which is not finite.
    :param is_moderate: Whether no value is so large that its square leaves fp32.
    :param norm: Squared L2 norm of what they differ by from the last agreed model; 0 where nobody asks.
    """

    nonfinite: list[str]
    is_moderate: bool
    norm: float = 0.0


class Looks:
    """Looks at the values of a round, bucket by bucket; local.

    :param layout: Where this rank's elements lie.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._energies: list[tuple[Bucket, torch.Tensor]] = []

    def add(self, bucket: Bucket, values: torch.Tensor) -> None:
        """Look at a bucket's values; a GPU is not waited for."""
        self._energies.append((bucket, energy_of(values)))

    def findings(self) -> Findings:
        """Return what was found in all of them."""
        energies = torch.stack([energy for _, energy in self._energies]).tolist() if self._energies else []
        found: set[int] = set()
        for (bucket, _), energy in zip(self._energies, energies, strict=True):
            if not math.isfinite(energy):
                found.update(self._layout.nonfinite(bucket))
        return Findings([self._layout.name(item) for item in sorted(found)], all(map(math.isfinite, energies)))


def energy_of(values: torch.Tensor) -> torch.Tensor:
    """Return a number that is finite only if all values are: the sum of squares, or of the values of a narrow type."""
    if not values.is_floating_point():
        return values.new_zeros((), dtype=torch.float32)
    if values.dtype.itemsize < 4:
        values = values.float() if values.dtype.itemsize == 1 else values  # torch adds no 8-bit floats up
        return values.sum(dtype=torch.float32)
    energy = values.dot(values)
    return energy if energy.dtype == torch.float32 else energy.float()
