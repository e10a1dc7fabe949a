"""Random draws that are the same on every machine.

numpy promises that the raw bits of a seeded generator stay as they are, but neither the draws that ``Generator`` makes
of them (they may change with its version) nor the last digit of ``log`` and ``exp`` (it depends on the processor). A
last digit can move a sample to another cell. So everything here is made of raw bits by operations that IEEE 754 rounds
in one way only: ``+ - * /``, square roots, and sums in a fixed order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from xffl.checks import integer

__all__ = ["AUGMENTING", "ORDER", "PROPORTIONS", "REPAIR", "SHUFFLING", "Draws", "Floats", "Indices", "portions"]

Floats = npt.NDArray[np.float64]
"""An array of real numbers."""
Indices = npt.NDArray[np.int64]
"""An array of integers: samples of a dataset, or counts of them."""

# What a stream is drawn for. Streams of one seed are independent: shuffling knows nothing of the parts.
ORDER = 0
"""In which order samples are dealt."""
PROPORTIONS = 1
"""How much each cell gets, and of what."""
REPAIR = 2
"""Which samples move for the minimum."""
SHUFFLING = 3
"""A cell's order in an epoch."""
AUGMENTING = 4
"""What a dataset draws while a batch is read."""

LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
"""ln 2 in two numbers; the high one has so few digits that a product with a small integer is exact."""


class Draws:
    """The random stream of a seed and one of the purposes of this module, then of a cell and an epoch if given."""

    def __init__(self, seed: int, *stream: int) -> None:
        # A spawn key, as it cannot run together with a long seed.
        self._bits = np.random.PCG64(np.random.SeedSequence(integer("seed", seed, 0), spawn_key=stream))

    def keys(self, count: int) -> npt.NDArray[np.uint64]:
        """Draw 64 random bits ``count`` times."""
        drawn: Any = self._bits.random_raw(count)
        return np.asarray(drawn, dtype=np.uint64)

    def uniform(self, count: int) -> Floats:
        """Draw numbers between 0 and 1, both excluded; their mirror images ``1 - u`` are as likely and as exact."""
        return ((self.keys(count) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52

    def permutation(self, count: int) -> Indices:
        """Draw an order of ``range(count)``."""
        return np.argsort(self.keys(count), kind="stable").astype(np.int64, copy=False)

    def log_gamma(self, shapes: npt.ArrayLike) -> Floats:
        """Draw the logarithms of Gamma variates of scale 1.

        Logarithms, because a variate of a small shape is often less than the least number above 0, while ratios of
        such variates still matter.

        Marsaglia and Tsang, 2000, doi 10.1145/358407.358414.
        """
        wanted = np.asarray(shapes, dtype=np.float64)
        small = wanted.ravel()
        d = np.where(small < 1.0, small + 1.0, small) - 1.0 / 3.0
        c = 1.0 / np.sqrt(9.0 * d)
        drawn = np.empty(len(small))
        waiting = np.arange(len(small))
        while len(waiting):
            a, b, u = self.uniform(3 * len(waiting)).reshape(3, -1)
            a, b = 2.0 * a - 1.0, 2.0 * b - 1.0
            square = a * a + b * b
            inside = square < 1.0
            at, square = waiting[inside], square[inside]
            normal = a[inside] * np.sqrt(-2.0 * _log(square) / square)
            root = 1.0 + c[at] * normal
            positive = root > 0.0
            at, normal, root = at[positive], normal[positive], root[positive]
            log_v = 3.0 * _log(root)
            bound = 0.5 * normal * normal + d[at] * (1.0 - root * root * root + log_v)
            taken = _log(u[inside][positive]) < bound
            drawn[at[taken]] = _log(d[at[taken]]) + log_v[taken]
            is_waiting = np.zeros(len(small), dtype=bool)
            is_waiting[waiting] = True
            is_waiting[at[taken]] = False
            waiting = np.flatnonzero(is_waiting)
        boost = np.where(small < 1.0, _log(self.uniform(len(small))) / small, 0.0)
        return (drawn + boost).reshape(wanted.shape)


def portions(logs: Floats) -> Floats:
    """Return numbers in proportion to ``exp(logs)`` that sum to 1 along the last axis.

    Of Gamma variates' logarithms this makes a Dirichlet variate.
    """
    weights = _exp(logs - logs.max(axis=-1, keepdims=True))
    # A running sum has one order; a plain one depends on the processor.
    return weights / np.cumsum(weights, axis=-1)[..., -1:]


def _log(x: Floats) -> Floats:
    """Return natural logarithms of positive numbers, to about two units in the last place."""
    mantissa, exponent = np.frexp(x)
    is_low = mantissa < 0.7071067811865476
    mantissa = np.where(is_low, 2.0 * mantissa, mantissa)
    power = exponent - is_low.astype(np.float64)
    # ln m = 2 artanh z, and |z| < 0.172.
    z = (mantissa - 1.0) / (mantissa + 1.0)
    square = z * z
    series = np.zeros_like(z)
    for odd in range(23, 1, -2):
        series = (series + 1.0 / odd) * square
    return power * LN2_HIGH + (2.0 * z * (1.0 + series) + power * LN2_LOW)


def _exp(x: Floats) -> Floats:
    """Return exponentials of numbers of 0 or less, to about two units in the last place; 0 below -745."""
    x = np.maximum(x, -760.0)
    power = np.floor(x / (LN2_HIGH + LN2_LOW) + 0.5)
    rest = (x - power * LN2_HIGH) - power * LN2_LOW
    series = np.ones_like(rest)
    for term in range(15, 0, -1):
        series = 1.0 + series * rest / term
    return np.ldexp(series, power.astype(np.int64))
