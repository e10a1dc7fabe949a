"""A longest length of the server's step, which all ranks measure together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from xffl.aggregation.algorithms.combiners import total_of
from xffl.aggregation.engine.exchange import RoundRun, RoundStage
from xffl.aggregation.engine.global_model import GlobalModel
from xffl.aggregation.engine.transfers import RoundContext

__all__ = ["Clip"]


class Clip(RoundStage):
    """Scales the mean pseudo-gradient so that its L2 norm is ``limit`` at most.

    Each rank adds up the squares of its own part in fp64; the sums travel with the second vote, and all ranks add them
    in the order of ranks, so that all have the same norm to the bit.
    """

    measures_step = True

    def __init__(self, limit: float, global_model: GlobalModel) -> None:
        self._limit = limit
        self._global_model = global_model

    @torch.no_grad()
    def measure_step(self, run: RoundRun) -> float:
        """Return the squared norm of this rank's part of the way to the combined values.

        All ranks' parts have each element once: a bucket is cut over the cells, and one rank of each cell sends it.
        """
        squares: list[torch.Tensor] = []
        for transfer, bucket in run.sent():
            part = bucket.part(run.link.cell, run.link.cells)
            own = bucket._replace(start=bucket.start + part.start, stop=bucket.start + part.stop)
            squares.append(self._global_model.squared_distance(transfer, own, run.staging.stage(transfer, own)))
        return total_of(torch.stack(squares).tolist() if squares else ())

    def resize_step(self, context: RoundContext, squares: Sequence[float]) -> RoundContext:
        """Scale the step down to the limit, if it is longer."""
        norm = abs(context.scale) * math.sqrt(total_of(squares))
        scale = context.scale * (self._limit / norm) if norm > self._limit else context.scale
        return replace(context, scale=scale, step_norm=norm)
