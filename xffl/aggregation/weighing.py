"""What the cells' values count for in a round: the combiner's judgement on what all ranks know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from xffl.aggregation.combine import Combiner, Seen, Weighting
from xffl.aggregation.tracks import Turnout

__all__ = ["weighed"]


def weighed(turnout: Turnout, combiner: Combiner, distances: Sequence[Sequence[float]] | None = None) -> Turnout:
    """Let a combiner weigh the cells that contribute; pure, the same on all ranks.

    :param turnout: What all ranks know about them.
    :param combiner: The combiner; one that looks at every element by itself counts all cells alike.
    :param distances: Squared distances between all cells, where the combiner asks for them.
    :return: The turnout with counts and scale.
    """
    cells = turnout.cells
    if not isinstance(combiner, Weighting):
        return replace(turnout, counts=tuple(float(cell in cells) for cell in range(len(turnout.weights))))
    seen = Seen(
        weights=tuple(turnout.weights[cell] for cell in cells),
        steps=tuple(turnout.steps[cell] for cell in cells),
        norms=None if turnout.norms is None else tuple(turnout.norms[cell] for cell in cells),
        distances=None if distances is None else tuple(tuple(distances[c][d] for d in cells) for c in cells),
    )
    result = combiner.weigh(seen)
    counts = dict(zip(cells, result.weights, strict=True))
    return replace(
        turnout, counts=tuple(counts.get(cell, 0.0) for cell in range(len(turnout.weights))), scale=result.scale
    )
