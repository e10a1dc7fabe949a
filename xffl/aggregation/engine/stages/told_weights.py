"""What a combiner of the user's own makes of the cells' weights, the same on all ranks."""

from __future__ import annotations

from dataclasses import replace

import torch

from xffl.aggregation.engine.exchange import RoundRun
from xffl.aggregation.engine.planning.transfers import RoundContext
from xffl.aggregation.engine.stages.stage import RoundStage
from xffl.distributed.agreement.consistency import control_device

__all__ = ["ToldWeights"]


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
