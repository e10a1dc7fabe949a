"""The norms of the cells' updates, which all ranks learn with the first vote."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from xffl.aggregation.algorithms.combiners import total_of
from xffl.aggregation.engine.buffers import ModelCopy
from xffl.aggregation.engine.global_model import GlobalModel
from xffl.aggregation.engine.planning.transfers import Bucket, GroupTransfer, RoundContext
from xffl.aggregation.engine.stages.stage import RoundStage
from xffl.aggregation.engine.voting.votes import RoundStatus, by_cell
from xffl.topology import Topology

__all__ = ["Norms"]


class Norms(RoundStage):
    """Measures how far this rank's values are from the last agreed model."""

    inspects = True

    def __init__(self, global_model: GlobalModel, topology: Topology) -> None:
        self._global_model = global_model
        self._topology = topology
        self._squares: list[torch.Tensor] = []
        self._total = 0.0

    def begin(self, fragment: int, copy: ModelCopy) -> ModelCopy:
        """Forget the last round's."""
        self._squares.clear()
        self._total = 0.0
        return copy

    def inspect(self, transfer: GroupTransfer, bucket: Bucket, values: torch.Tensor) -> None:
        """Measure one bucket."""
        self._squares.append(self._global_model.squared_distance(transfer, bucket, values))

    def end_inspection(self) -> None:
        """Add up, in one order on all ranks."""
        self._total = total_of(torch.stack(self._squares).tolist() if self._squares else ())

    def status(self, fragment: int) -> Mapping[str, Any]:
        """Tell the squared norm of this rank's part."""
        return {"norm": self._total}

    def count(self, context: RoundContext, statuses: Sequence[RoundStatus]) -> RoundContext:
        """Add the parts of each cell up, for combiners and for who asks how far the cells have gone."""
        squares = by_cell([status.norm for status in statuses], self._topology, total_of)
        return replace(context, norms=tuple(map(math.sqrt, squares)))
