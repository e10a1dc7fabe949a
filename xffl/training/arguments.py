"""Arguments of partitions: what can be meant, and how it is told."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence, Sized

import numpy as np

from xffl.checks import integer
from xffl.errors import ConfigError
from xffl.training.data.rng import Floats, Indices

__all__ = [
    "check_reached",
    "checked_alpha",
    "checked_cells",
    "checked_shares",
    "checked_sizes",
    "count_of",
    "shown",
    "told",
]

LEAST_ALPHA, MOST_ALPHA = 1e-9, 1e9
"""Beyond these, a Dirichlet draw is one cell or the mean, to the last digit."""


def count_of(samples: int | Sized) -> int:
    """Return how many samples there are.

    :param samples: Their number, or anything of that length.
    :return: The number.
    :raises ConfigError: if it is no whole number from 0.
    """
    return len(samples) if isinstance(samples, Sized) else integer("samples", samples, 0)


def checked_cells(cells: int, samples: int, minimum: int) -> int:
    """Return the number of cells.

    :param cells: What was given.
    :param samples: Samples that there are.
    :param minimum: Samples that every cell gets at least.
    :return: The number of cells.
    :raises ConfigError: if it is none, or the samples are too few for the minimum.
    """
    cells = integer("cells", cells)
    if cells * integer("minimum", minimum, 0) > samples:
        raise ConfigError(
            f"{samples} samples are too few for {cells} cells of at least {minimum}; lower minimum to "
            f"{samples // cells} or less, or take fewer cells"
        )
    return cells


def checked_alpha(alpha: object) -> float:
    """Return a concentration.

    :param alpha: What was given.
    :return: The number.
    :raises ConfigError: if it is none, or outside the range.
    """
    is_number = isinstance(alpha, numbers.Real) and not isinstance(alpha, bool)
    if not is_number or not LEAST_ALPHA <= alpha <= MOST_ALPHA:  # type: ignore[operator]
        raise ConfigError(f"alpha {alpha!r} is no number from {LEAST_ALPHA:g} to {MOST_ALPHA:g}; give one, such as 0.5")
    return float(alpha)  # type: ignore[arg-type]


def checked_shares(shares: Sequence[float] | None, cells: int) -> Floats:
    """Return each cell's share of all samples.

    :param shares: Relative sizes; ``None`` for equal ones.
    :param cells: Number of cells.
    :return: Shares that sum to 1.
    :raises ConfigError: if they are not one positive number for each cell.
    """
    try:
        given = [1.0] * cells if shares is None else [float(share) for share in shares]
        whole = math.fsum(given)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"shares {shares!r} cannot be added up ({error}); give relative sizes, such as (2, 1)"
        ) from error
    if len(given) != cells:
        raise ConfigError(f"there are {len(given)} shares for {cells} cells; give one for each cell")
    if not all(math.isfinite(share) and share > 0 for share in given):
        raise ConfigError(f"shares {shown(given)} are not all positive numbers; give relative sizes, such as (2, 1)")
    return np.array(given) / whole


def checked_sizes(sizes: Sequence[int], cells: int, *, what: str = "sizes", least: int = 0) -> Indices:
    """Return a whole number for each cell.

    :param sizes: What was given.
    :param cells: Number of cells.
    :param what: Its name, for messages.
    :param least: The least number that may be meant.
    :return: The numbers.
    :raises ConfigError: if they are not one such number for each cell.
    """
    given = [integer(f"{what}: entry", size, least) for size in sizes]
    if len(given) != cells:
        raise ConfigError(f"{what} has {len(given)} entries for {cells} cells; give one for each cell")
    return np.array(given, dtype=np.int64)


def check_reached(owners: Indices, cells: int, minimum: int, what: str, knob: str) -> None:
    """Raise where a cell has fewer samples than the minimum.

    :param owners: The cell of each sample.
    :param cells: Number of cells.
    :param minimum: Samples that every cell gets at least.
    :param what: What was dealt, for the message.
    :param knob: What to change.
    :raises ConfigError: if one has.
    """
    sizes = np.bincount(owners, minlength=cells)
    if sizes.min() < minimum:
        cell = int(sizes.argmin())
        raise ConfigError(
            f"{what} leave cell {cell} of {cells} with {sizes[cell]}, below the minimum {minimum}; take {knob}, or a "
            "lower minimum"
        )


def shown(values: Sequence[object] | Indices) -> str:
    """Return the first of some values, for messages.

    :param values: Any.
    :return: Up to sixteen of them, and how many more there are.
    """
    first = ", ".join(str(value) for value in values[:16])
    return f"({first})" if len(values) <= 16 else f"({first}, and {len(values) - 16} more)"


def told(cells: int, seed: int, minimum: int, **options: object) -> str:
    r"""Write the arguments of a call, as far as they tell partitions of one dataset apart.

    :param cells: Number of cells.
    :param seed: The seed.
    :param minimum: Samples that every cell gets at least.
    :param \**options: What else was given; ``None`` where nothing was.
    :return: ``name=value`` for each, with commas.
    """
    given = {name: value for name, value in options.items() if value is not None}
    given = {"cells": integer("cells", cells), **given, "minimum": integer("minimum", minimum, 0)}
    given["seed"] = integer("seed", seed, 0)
    return ", ".join(
        f"{name}={value if isinstance(value, numbers.Real) else shown(list(value))}"  # type: ignore[call-overload]
        for name, value in given.items()
    )
