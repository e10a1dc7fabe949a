"""Means that scale each cell's update beside its weight: FedNova, and norm clipping."""

from __future__ import annotations

import math
from dataclasses import dataclass

from xffl.aggregation.algorithms.combiners import AggregationWeights, CellStats, WeightedCombiner, reduced
from xffl.checks import number
from xffl.errors import ConfigError

__all__ = ["NormClipping", "NormalizedMean"]


@dataclass(frozen=True)
class NormalizedMean(WeightedCombiner):
    """Take the mean of the updates for each local step: cells that made more steps do not count more (FedNova).

    With ``p_c = w_c / sum(w)``, ``a_c`` the effective steps of cell ``c`` and ``tau = sum(p_c * a_c)``, a cell's update
    counts ``p_c * tau / a_c`` times. Where all cells made as many steps, this is :class:`Mean` to the last bit.

    Wang et al., 2020, arXiv 2007.07481.
    """

    has_scale = True

    def weigh(self, seen: CellStats) -> AggregationWeights:
        """Divide each cell's weight by its steps."""
        contributing = [index for index, weight in enumerate(seen.weights) if weight > 0.0]
        for index in contributing:
            if not 0.0 < seen.steps[index] < math.inf:
                raise ConfigError(
                    f"contributing cell {index} reports {seen.steps[index]} local steps, but its update is divided by "
                    "them; give steps= above 0, or the weight 0"
                )
        # Relative to the fewest steps, so that nothing overflows, and equal steps leave the weights as they are.
        least = min(seen.steps[index] for index in contributing)
        shares = reduced(seen.weights)
        cells = zip(seen.weights, seen.steps, strict=True)
        ratios = [steps / least if weight > 0.0 else 1.0 for weight, steps in cells]
        slowed = tuple(share / ratio for share, ratio in zip(shares, ratios, strict=True))
        total = math.fsum(shares)
        # The scale is sum(p_c * tau / a_c): unlike a mean's weights the updates' factors do not add up to 1.
        longer = math.fsum(share * ratio for share, ratio in zip(shares, ratios, strict=True))
        return AggregationWeights(slowed, math.fsum(slowed) / total * (longer / total))


@dataclass(frozen=True)
class NormClipping(WeightedCombiner):
    """Clip the updates to a greatest norm, then take the mean with the cells' weights.

    An update ``x_c - x_global`` of L2 norm ``u`` counts ``min(1, clip / u)`` times, so that no cell moves the model by
    more than its share of ``clip``.

    Sun et al., 2019, arXiv 1911.07963.

    :param clip: Greatest L2 norm of an update, over the whole model; above 0.
    """

    needs_norms = True
    has_scale = True

    clip: float

    def __post_init__(self) -> None:
        number("clip", self.clip, above=0.0, hint="give the usual length of an honest update")

    def weigh(self, seen: CellStats) -> AggregationWeights:
        """Clip the updates by the choice of weights and scale."""
        assert seen.norms is not None, "needs_norms asks for them"
        # g + s (sum(w f x) / sum(w f) - g) with s = sum(w f) / sum(w) is the mean of the updates f (x - g).
        weights = reduced(seen.weights)
        factors = [self.clip / norm if norm > self.clip else 1.0 for norm in seen.norms]
        clipped = tuple(weight * factor for weight, factor in zip(weights, factors, strict=True))
        return AggregationWeights(clipped, math.fsum(clipped) / math.fsum(weights))
