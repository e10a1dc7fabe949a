"""Combiners that resist faulty cells: medians, a trimmed mean, and choices by the distances between the cells."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from xffl.aggregation.algorithms.combiners import (
    AggregationWeights,
    CellStats,
    Coordinatewise,
    WeightedCombiner,
    reduced,
    total_of,
)
from xffl.aggregation.arithmetic import piece_length, weighted_mean
from xffl.checks import integer_fields, number
from xffl.errors import ConfigError

__all__ = ["CoordinateMedian", "GeometricMedian", "Krum", "MultiKrum", "TrimmedMean"]

FAR = 1e300  # squared distances above this are not added up: their sums could overflow a 64-bit float
SETTLED = 1e-12  # the geometric median has converged if no weight changes by more than this, relatively


@dataclass(frozen=True)
class CoordinateMedian(Coordinatewise):
    """Take the median of every element; of an even number of cells the mean of the two middle values.

    The result is bounded as long as fewer than half of the cells are faulty. The cells' weights are not used. The
    median of zeros of both signs may have either sign; equal values keep every bit.

    Yin et al., 2018, arXiv 1803.01498 (definition 1). flwr's ``aggregate_median`` is the same.
    """

    def combine(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Combine the rows; local."""
        _middle_mean(values, (values.shape[0] - 1) // 2, out)


@dataclass(frozen=True)
class TrimmedMean(Coordinatewise):
    """Take, of every element, the mean without the largest and the smallest values.

    ``int(share * n)`` of ``n`` values are left out at each end, so as many cells may be faulty. The cells' weights are
    not used. A share that would leave out nothing is refused, since the result would be the plain mean; ``share=0``
    asks for it.

    Yin et al., 2018, arXiv 1803.01498 (definition 2), where ``share * n`` is an integer. flwr's
    ``aggregate_trimmed_avg`` rounds in the same way, but takes the plain mean of too few cells.

    :param share: Part of the cells that is left out at each end, at least 0, below 0.5.
    """

    share: float = 0.2

    def __post_init__(self) -> None:
        number("share", self.share, 0.0, below=0.5, hint="give share=0.2 for 20 % at each end")

    def check(self, cells: int) -> None:
        """Raise if nothing would be left out."""
        super().check(cells)
        if self.share > 0 and self._cut(cells) == 0:
            raise ConfigError(
                f"a trimmed mean with share {self.share} leaves out nothing of {cells} contributing cells, but it must "
                f"leave out one at each end; give at least {math.ceil(1 / self.share)} cells, a larger share= (of 3 "
                "cells or more), or share=0 for the plain mean"
            )

    def combine(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Combine the rows; local."""
        _middle_mean(values, self._cut(values.shape[0]), out)

    def _cut(self, cells: int) -> int:
        return int(self.share * cells)


@dataclass(frozen=True)
class Krum(WeightedCombiner):
    """Take the values of the cell that lies closest to its nearest neighbours.

    A cell's score is the sum of its squared distances to the ``n - faulty - 2`` other cells that are nearest to it; the
    lowest score wins, and of equal scores the cell with the lowest number. The cells' weights are not used.

    Blanchard et al., 2017, arXiv 1703.02757. flwr's ``aggregate_krum`` computes the same scores, but in the data's own
    precision (distances of large fp32 values are infinite) and takes any number of cells, where the paper's guarantee
    needs ``n >= 2 * faulty + 3``.

    :param faulty: Number of cells whose values may be arbitrary, 0 or more.
    """

    needs_distances = True

    faulty: int = 1

    def __post_init__(self) -> None:
        integer_fields(self, "faulty", minimum=0, hint="give faulty=1 for one bad cell")

    def check(self, cells: int) -> None:
        """Raise if the faulty cells could win."""
        super().check(cells)
        least = 2 * self.faulty + 3
        if cells < least:
            raise ConfigError(
                f"{cells} contributing cells are too few for Krum with faulty={self.faulty}: it takes 2 * faulty + 3, "
                f"{least}; give as many cells or a smaller faulty="
            )

    def weigh(self, seen: CellStats) -> AggregationWeights:
        """Choose the cells of the lowest scores."""
        assert seen.distances is not None, "needs_distances asks for them"
        cells = len(seen.distances)
        scores = []
        for cell, row in enumerate(seen.distances):
            others = sorted(row[:cell] + row[cell + 1 :])
            scores.append(total_of(others[: cells - self.faulty - 2]))
        # The sort is stable: of equal scores the lowest cell comes first, on all ranks.
        chosen = sorted(range(cells), key=lambda cell: scores[cell])[: self._chosen(cells)]
        return AggregationWeights(tuple(float(cell in chosen) for cell in range(cells)))

    def _chosen(self, cells: int) -> int:
        """Return how many cells are taken."""
        return 1


@dataclass(frozen=True)
class MultiKrum(Krum):
    """Take the plain mean of the cells with the lowest scores of :class:`Krum`.

    As in the paper, the chosen cells count equally; the cells' weights are not used.

    Blanchard et al., 2017, arXiv 1703.02757. flwr's ``aggregate_krum`` with ``to_keep`` weights the chosen cells by
    their numbers of examples, which a faulty cell may misreport.

    :param faulty: Number of cells whose values may be arbitrary, 0 or more.
    :param selected: Number of cells that are averaged, 1 or more; ``None`` for all but ``faulty``. With more, a
        faulty cell may be among them.
    """

    selected: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        integer_fields(self, "selected", hint="leave it out for all but faulty", may_be_none=True)

    def check(self, cells: int) -> None:
        """Raise if the faulty cells could win, or if more cells are to be chosen than there are."""
        super().check(cells)
        if self.selected is not None and self.selected > cells:
            raise ConfigError(
                f"Multi-Krum has to select {self.selected} of {cells} contributing cells; give selected={cells} or less"
            )

    def _chosen(self, cells: int) -> int:
        return cells - self.faulty if self.selected is None else self.selected


@dataclass(frozen=True)
class GeometricMedian(WeightedCombiner):
    """Take the point with the least sum of weighted distances to the cells (RFA).

    The result is bounded as long as faulty cells have less than half of the weight. It is computed by the paper's
    smoothed Weiszfeld steps, which start from the mean: each cell has the weight ``w_c / max(smoothing, ||x_c - v||)``
    in the next ``v``. Since ``v`` is always a mean of the cells, the distances between the cells suffice; a step costs
    ``n * n`` operations and moves no data.

    Pillutla et al., 2019, arXiv 1912.13445. The paper makes only a few steps, since each is a round of communication
    there; here steps are made until no weight changes by more than 1e-12 of itself.

    :param iterations: Most steps to make, 1 or more.
    :param smoothing: Distance, over the whole model, below which a smaller distance does not increase a cell's weight
        further; above 0.
    """

    needs_distances = True

    iterations: int = 1000
    smoothing: float = 1e-6

    def __post_init__(self) -> None:
        integer_fields(self, "iterations", hint="give iterations=1000")
        number("smoothing", self.smoothing, above=0.0, hint="give smoothing=1e-6")

    def weigh(self, seen: CellStats) -> AggregationWeights:
        """Weigh the cells by their distances from the geometric median."""
        assert seen.distances is not None, "needs_distances asks for them"
        near = _near(seen.distances)
        shares = self._settle(
            _shares(list(reduced(tuple(seen.weights[cell] for cell in near)))),
            tuple(tuple(seen.distances[cell][other] for other in near) for cell in near),
        )
        share_of = dict(zip(near, shares, strict=True))
        return AggregationWeights(tuple(share_of.get(cell, 0.0) for cell in range(len(seen.weights))))

    def _settle(self, weights: list[float], distances: tuple[tuple[float, ...], ...]) -> list[float]:
        """Return the shares of the cells in their geometric median."""
        products = _products(distances, weights)
        shares = weights
        for _ in range(self.iterations):
            before = shares
            # ||x_c - v||^2 = <x_c, x_c> - 2 <x_c, v> + <v, v>, with v = sum of shares * x
            along = [math.fsum(share * number for share, number in zip(shares, row, strict=True)) for row in products]
            middle = math.fsum(share * number for share, number in zip(shares, along, strict=True))
            squares = [row[cell] - 2.0 * along[cell] + middle for cell, row in enumerate(products)]
            lengths = [max(self.smoothing, math.sqrt(max(square, 0.0))) for square in squares]
            shares = _shares([weight / length for weight, length in zip(weights, lengths, strict=True)])
            if all(abs(new - old) <= SETTLED * old for new, old in zip(shares, before, strict=True)):
                break
        return shares


def _middle_mean(values: torch.Tensor, cut: int, out: torch.Tensor) -> None:
    """Write the mean of each column's values without the ``cut`` smallest and largest ones into ``out``.

    A sorting network over rows: it moves whole rows through minimum and maximum, 20 times as fast on a CPU as sorting
    short columns, and NaN stays NaN. Ascending sums do not depend on the order of the cells.
    """
    cells, numel = values.shape
    comparisons = _network(cells)
    length = piece_length(values.device)
    scratch = values.new_empty(min(length, numel))
    for chunk, part in zip(torch.split(values, length, dim=1), torch.split(out, length), strict=True):
        rows = list(chunk.unbind())
        first = rows[0].clone()
        spare = scratch[: part.numel()]
        for low, high in comparisons:
            torch.minimum(rows[low], rows[high], out=spare)
            torch.maximum(rows[low], rows[high], out=rows[high])
            rows[low], spare = spare, rows[low]
        weighted_mean(rows[cut : cells - cut], [1.0] * (cells - 2 * cut), part)
        # Which of -0 and 0 counts as smaller depends on the processor: zeros get the first cell's sign, if it has one.
        torch.where(part == 0.0, torch.where(first == 0.0, first, 0.0), part, out=part)


def _network(rows: int) -> list[tuple[int, int]]:
    """Return the comparisons of Batcher's odd-even merge sort (Knuth, TAOCP 3, section 5.3.4)."""
    comparisons = []
    run = 1
    while run < rows:
        gap = run
        while gap >= 1:
            for start in range(gap % run, rows - gap, 2 * gap):
                for low in range(start, min(start + gap, rows - gap)):
                    if low // (2 * run) == (low + gap) // (2 * run):
                        comparisons.append((low, low + gap))
            gap //= 2
        run *= 2
    return comparisons


def _near(distances: tuple[tuple[float, ...], ...]) -> list[int]:
    """Return the cells near the one with the most others near it, without those so far off that squares overflow."""

    def rank(row: tuple[float, ...]) -> tuple[int, float]:
        near = [math.sqrt(square) for square in row if square <= FAR]
        return -len(near), math.fsum(near)

    return [cell for cell, square in enumerate(sorted(distances, key=rank)[0]) if square <= FAR]


def _products(distances: tuple[tuple[float, ...], ...], weights: list[float]) -> list[list[float]]:
    """Return the inner products of the cells' vectors, with the cell nearest to all others as the origin.

    With this origin honest cells have short vectors, and the rounding errors of a cell that is 1e38 away do not affect
    their products.
    """
    lengths = [[math.sqrt(square) for square in row] for row in distances]
    sums = [math.fsum(weight * length for weight, length in zip(weights, row, strict=True)) for row in lengths]
    away = distances[sums.index(min(sums))]
    return [
        [0.5 * (away[cell] + (away[other] - square)) for other, square in enumerate(row)]
        for cell, row in enumerate(distances)
    ]


def _shares(weights: list[float]) -> list[float]:
    """Return the weights divided by their sum."""
    total = math.fsum(weights)
    return [weight / total for weight in weights]
