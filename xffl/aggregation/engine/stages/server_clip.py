"""The server's clip: the mean pseudo-gradient is made no longer than a limit, before the server rule sees it.

Its L2 norm is that of the part of the model that the round exchanges. Every rank measures a part of it, such that all
parts have each element once, in fp64, and tells the square of its norm in the second vote. All ranks add the squares up
in the same order, so all scale the step by the same number. Where cells are worlds of their own, the squares are told
before the second vote: a rank that loses the others during it may have to write the round without having heard it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from xffl.aggregation.algorithms.combiners import total_of
from xffl.aggregation.engine.exchange import Memory, RoundRun
from xffl.aggregation.engine.global_model import GlobalModel
from xffl.aggregation.engine.planning.transfers import RoundContext
from xffl.aggregation.engine.stages.stage import RoundStage
from xffl.aggregation.engine.voting.votes import RoundStatus

__all__ = ["ServerClip"]


class ServerClip(RoundStage):
    """Scales the server's step down where the pseudo-gradient is longer than ``limit``."""

    weighs_result = True

    def __init__(self, limit: float, global_model: GlobalModel, memory: Memory, *, cell: int, cells: int) -> None:
        self._limit = limit
        self._global_model = global_model
        self._memory = memory
        self._cell = cell
        self._cells = cells

    def result(self, run: RoundRun) -> Mapping[str, Any]:
        """Tell the squared norm of this rank's part of the way to the combined values.

        A bucket is cut over the cells, and one rank of each cell sends it, so it is counted once.
        """
        squares: list[torch.Tensor] = []
        for transfer, bucket in run.sent():
            part = bucket.part(self._cell, self._cells)
            own = bucket._replace(start=bucket.start + part.start, stop=bucket.start + part.stop)
            squares.append(self._global_model.squared_distance(transfer, own, self._memory.staging_of(transfer, own)))
        return {"square": total_of(torch.stack(squares).tolist() if squares else ())}

    def conclude(self, context: RoundContext, statuses: Sequence[RoundStatus]) -> RoundContext:
        """Multiply the step by ``limit / norm``, where the norm is above the limit."""
        norm = abs(context.scale) * math.sqrt(total_of([status.square for status in statuses]))
        scale = context.scale * (self._limit / norm) if norm > self._limit else context.scale
        return replace(context, scale=scale, step_norm=norm)
