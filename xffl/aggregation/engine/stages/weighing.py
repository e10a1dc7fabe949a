"""What combiners other than the mean make of the cells' weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from xffl.aggregation.algorithms.combiners import CellStats, Combiner, WeightedCombiner
from xffl.aggregation.engine.exchange import RoundRun, Way
from xffl.aggregation.engine.planning.transfers import RoundContext
from xffl.aggregation.engine.stages.stage import RoundStage
from xffl.distributed.agreement.consistency import control_device
from xffl.errors import RoundError

__all__ = ["ToldWeights", "Weighed", "weigh_cells"]


class Weighed(Way):
    """The way of a combiner that weighs cells otherwise than by their weights, or combines element by element."""

    def __init__(self, combiner: Combiner) -> None:
        self.combiner = combiner

    def check(self, context: RoundContext) -> None:
        """Raise where these cells cannot be combined; pure, the same on all ranks."""
        self.combiner.check(len(context.cells))
        self.weigh(context)

    def weigh(self, context: RoundContext) -> RoundContext:
        """Return the context with what the combiner lets each contributing cell count for; pure."""
        return weigh_cells(context, self.combiner)


def weigh_cells(
    context: RoundContext, combiner: Combiner, distances: Sequence[Sequence[float]] | None = None
) -> RoundContext:
    """Return the context with what the combiner lets each contributing cell count for; pure, the same on all ranks."""
    cells = context.cells
    if not isinstance(combiner, WeightedCombiner):
        return replace(context, counts=tuple(float(cell in cells) for cell in range(len(context.weights))))
    seen = CellStats(
        weights=tuple(context.weights[cell] for cell in cells),
        steps=tuple(context.steps[cell] for cell in cells),
        norms=None if context.norms is None else tuple(context.norms[cell] for cell in cells),
        distances=None if distances is None else tuple(tuple(distances[c][d] for d in cells) for c in cells),
    )
    result = combiner.weigh(seen)
    if len(result.weights) != len(cells):
        raise RoundError(
            f"{type(combiner).__name__}.weigh returned {len(result.weights)} weights for {len(cells)} cells; return "
            "one for each"
        )
    counts = [0.0] * len(context.weights)
    for cell, weight in zip(cells, result.weights, strict=True):
        counts[cell] = weight
    return replace(context, counts=tuple(counts), scale=result.scale)


class ToldWeights(RoundStage):
    """Lets all ranks take the weights and the scale that the first rank has computed.

    All ranks get the same from a combiner of xffl, which calls no function of the system's mathematical library that
    rounds. One of the user's own may call any.
    """

    def weighed(self, run: RoundRun, context: RoundContext) -> RoundContext:
        """Take the first rank's numbers; collective over the world."""
        place = control_device(run.round_groups.world)
        numbers = torch.tensor([context.scale, *context.counts], dtype=torch.float64, device=place)
        run.tell_all(numbers)
        scale, *counts = numbers.tolist()
        return replace(context, scale=scale, counts=tuple(counts))
