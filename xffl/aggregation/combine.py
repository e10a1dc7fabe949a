"""How the values of the cells become one: what every combiner is, and the two means."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from xffl.errors import ConfigError

__all__ = [
    "Combiner",
    "Coordinatewise",
    "Mean",
    "NormalizedMean",
    "Seen",
    "Weighed",
    "Weighting",
    "reduced",
    "total_of",
]


@dataclass(frozen=True)
class Seen:
    """What a round knows about the cells that contribute to it, in their order; the same numbers on all ranks.

    :param weights: Weight of each cell, finite, none negative, at least one positive.
    :param steps: Effective number of local steps of each cell since the last round.
    :param norms: L2 norm of each cell's update ``x_c - x_global`` over the whole stepped model, finite; ``None`` unless
        the combiner asks for them.
    :param distances: Squared L2 distance between any two cells over the whole stepped model, ``[n][n]``, finite,
        symmetric, 0 on the diagonal; ``None`` unless the combiner asks for them.
    """

    weights: tuple[float, ...]
    steps: tuple[float, ...]
    norms: tuple[float, ...] | None = None
    distances: tuple[tuple[float, ...], ...] | None = None


@dataclass(frozen=True)
class Weighed:
    """What is made of the cells: stepped tensors become ``x_global + scale * (sum(w * x) / sum(w) - x_global)``.

    :param weights: One for each contributing cell, finite, none negative, at least one positive.
    :param scale: Length of the step, in units of the way to the mean; finite.
    :raises ConfigError: if the numbers cannot be meant.
    """

    weights: tuple[float, ...]
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not all(math.isfinite(weight) and weight >= 0.0 for weight in self.weights) or not any(self.weights):
            raise ConfigError(
                f"the cells were given the weights {self.weights}, which must be finite, none negative and one "
                "positive; choose another combiner or mend its options"
            )
        if not math.isfinite(self.scale):
            raise ConfigError(f"the step was given the scale {self.scale}, which must be finite; mend the combiner")


def reduced(weights: tuple[float, ...]) -> tuple[float, ...]:
    """Return the weights times the power of two that makes the largest of them 0.5 to 1; pure.

    Sums of them stay in range, and all digits are kept (but of weights that are nothing beside the largest).

    :param weights: Finite weights, none negative, at least one positive.
    :return: As many weights.
    """
    exponent = math.frexp(max(weights))[1]
    return tuple(math.ldexp(weight, -exponent) for weight in weights)


def total_of(parts: Sequence[float]) -> float:
    """Return the sum of numbers of which none is negative, infinite where it leaves the range; pure."""
    try:
        return math.fsum(parts)
    except OverflowError:
        return math.inf


class Combiner:
    """Make one value of the cells' values. Derive from :class:`Coordinatewise` or :class:`Weighting`.

    Combiners are local, pure and deterministic: every rank gets the same result from the same numbers. They keep no
    state. Whoever runs the round calls :meth:`check` with the number of cells that contribute before anything else.
    """

    def check(self, cells: int) -> None:
        """Raise if so few cells cannot be combined.

        :param cells: Number of cells that contribute to the round.
        :raises ConfigError: if they are too few.
        """
        if cells < 1:
            raise ConfigError(f"{cells} cells contribute to the round, but it takes 1; give a cell a positive weight")


class Coordinatewise(Combiner, ABC):
    """Combine every element by itself, from all cells' values of it. The cells' weights play no part."""

    @abstractmethod
    def combine(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Combine the rows.

        :param values: ``[n, numel]``, fp32 or fp64, a row for each contributing cell in order; may be overwritten.
        :param out: ``[numel]`` of the same data type and device, no part of ``values``; overwritten.
        """


class Weighting(Combiner, ABC):
    """Choose a weight for each cell, from what is known about whole cells.

    The class attributes ``needs_distances`` and ``needs_norms`` say what has to be measured: each costs a pass over all
    values and a small reduction. ``has_scale`` says that the step may be longer or shorter than the way to the mean.
    """

    needs_distances: bool = False
    needs_norms: bool = False
    has_scale: bool = False

    @abstractmethod
    def weigh(self, seen: Seen) -> Weighed:
        """Weigh the cells.

        :param seen: What is known about those that contribute.
        :return: Their weights, and the length of the step.
        """


@dataclass(frozen=True)
class Mean(Weighting):
    """Take the mean by the cells' own weights.

    McMahan et al., 2017, arXiv 1602.05629.
    """

    def weigh(self, seen: Seen) -> Weighed:
        """Return the weights as they are.

        :param seen: What is known about the cells.
        :return: The same weights.
        """
        return Weighed(seen.weights)


@dataclass(frozen=True)
class NormalizedMean(Weighting):
    """Take the mean of the updates for each local step: cells that made more steps do not pull harder (FedNova).

    With ``p_c = w_c / sum(w)``, ``a_c`` the effective steps of cell ``c`` and ``tau = sum(p_c * a_c)``, a cell's update
    counts ``p_c * tau / a_c`` times. Where all cells made as many steps, this is :class:`Mean` to the last bit.

    Wang et al., 2020, arXiv 2007.07481.
    """

    has_scale = True

    def weigh(self, seen: Seen) -> Weighed:
        """Divide each cell's weight by its steps.

        :param seen: What is known about the cells; steps are positive where weights are.
        :return: Weights in the ratios ``p_c / a_c``, and the scale ``tau * sum(p_c / a_c)``.
        :raises ConfigError: if a cell with a weight has no positive, finite number of steps.
        """
        least = math.inf
        for index, (weight, steps) in enumerate(zip(seen.weights, seen.steps, strict=True)):
            if weight > 0.0 and not (math.isfinite(steps) and steps > 0.0):
                raise ConfigError(
                    f"contributing cell {index} reports {steps} local steps, but its update is divided by them; "
                    "give steps= above 0, or the weight 0"
                )
            if weight > 0.0:
                least = min(least, steps)
        # Against the fewest steps no number leaves its range, and equal ones leave the weights as they are.
        shares = reduced(seen.weights)
        paces = [steps / least if weight > 0.0 else 1.0 for weight, steps in zip(seen.weights, seen.steps, strict=True)]
        slowed = tuple(share / pace for share, pace in zip(shares, paces, strict=True))
        total = math.fsum(shares)
        longer = math.fsum(share * pace for share, pace in zip(shares, paces, strict=True))
        return Weighed(slowed, math.fsum(slowed) / total * (longer / total))
