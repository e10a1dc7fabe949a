"""Combiners, which make a single value of the cells' values, and the default combiner, the weighted mean."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from xffl.errors import ConfigError

__all__ = [
    "AggregationWeights",
    "CellStats",
    "Combiner",
    "Coordinatewise",
    "Mean",
    "WeightedCombiner",
]


@dataclass(frozen=True)
class CellStats:
    """What a round knows about the contributing cells, in their order; the same on all ranks."""

    weights: tuple[float, ...]
    steps: tuple[float, ...]
    norms: tuple[float, ...] | None = None
    distances: tuple[tuple[float, ...], ...] | None = None


@dataclass(frozen=True)
class AggregationWeights:
    """Weights of the cells: stepped tensors become ``x_global + scale * (sum(w * x) / sum(w) - x_global)``."""

    weights: tuple[float, ...]
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, self.weights)) or min(self.weights, default=0.0) < 0.0 or not any(self.weights):
            raise ConfigError(
                f"the cells were given the weights {self.weights}, which must be finite, none negative and one "
                "positive; choose another combiner or correct its options"
            )
        if not math.isfinite(self.scale):
            raise ConfigError(f"the step was given the scale {self.scale}, which must be finite; correct the combiner")


def reduced(weights: tuple[float, ...]) -> tuple[float, ...]:
    """Return the weights times the power of two that brings the largest into [0.5, 1); exact."""
    exponent = math.frexp(max(weights))[1]
    return tuple(math.ldexp(weight, -exponent) for weight in weights)


def total_of(parts: Sequence[float]) -> float:
    """Return the sum of numbers of which none is negative; infinity if it overflows; pure."""
    try:
        return math.fsum(parts)
    except OverflowError:
        return math.inf


class Combiner:
    """Make a single value of the cells' values. Derive from :class:`Coordinatewise` or :class:`WeightedCombiner`.

    Combiners are local, pure and deterministic: every rank gets the same result from the same numbers. They keep no
    state. A round first calls :meth:`check` with the number of contributing cells.
    """

    needs_distances: bool = False
    needs_norms: bool = False
    has_scale: bool = False

    def check(self, cells: int) -> None:
        """Raise a ``ConfigError`` if so few contributing cells cannot be combined."""
        if cells < 1:
            raise ConfigError(f"{cells} cells contribute to the round, but it takes 1; give a cell a positive weight")


class Coordinatewise(Combiner, ABC):
    """Combine every element by itself, from all cells' values of it. The cells' weights are not used."""

    @abstractmethod
    def combine(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Combine the rows.

        :param values: ``[n, numel]``, fp32 or fp64, a row for each contributing cell in order; may be overwritten.
        :param out: ``[numel]`` of the same data type and device, no part of ``values``; overwritten.
        """


class WeightedCombiner(Combiner, ABC):
    """Choose a weight for each cell, from numbers about whole cells.

    The class attributes ``needs_distances`` and ``needs_norms`` say what must be measured: each costs a pass over all
    values and a small reduction. ``has_scale`` says that the global model may move by more or less than the difference
    to the mean.
    """

    @abstractmethod
    def weigh(self, seen: CellStats) -> AggregationWeights:
        """Weigh the cells."""


@dataclass(frozen=True)
class Mean(WeightedCombiner):
    """Take the mean by the cells' own weights.

    McMahan et al., 2017, arXiv 1602.05629.
    """

    def weigh(self, seen: CellStats) -> AggregationWeights:
        """Return the weights as they are."""
        return AggregationWeights(seen.weights)
