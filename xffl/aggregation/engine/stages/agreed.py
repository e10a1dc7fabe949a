"""The global model in a round: the server rule, or the mean itself, takes it on behind the second vote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from xffl.aggregation.engine.buffers import ModelCopy
from xffl.aggregation.engine.exchange import Memory, RoundRun
from xffl.aggregation.engine.global_model import GlobalModel
from xffl.aggregation.engine.planning.transfers import Bucket, GroupTransfer, RoundContext
from xffl.aggregation.engine.stages.stage import RoundStage
from xffl.aggregation.engine.voting.votes import RoundStatus
from xffl.topology import Topology

__all__ = ["AgreedModel"]


class AgreedModel(RoundStage):
    """Steps the global model, bucket by bucket, while the model is written: no copy is kept for a rollback.

    With codecs the new values are put where the mean was, since codecs measure the next steps from them.
    """

    key = "agreed"

    def __init__(self, global_model: GlobalModel, memory: Memory, topology: Topology, *, is_encoded: bool) -> None:
        self.global_model = global_model
        self._memory = memory
        self._topology = topology
        self._is_encoded = is_encoded
        self._numbers: dict[str, float] = {}
        """What this rank would compute the step with; all take those of one rank."""

    def open(self, fragment: int, *, is_weighed: bool) -> None:
        """Raise where the global model is not known."""
        self.global_model.check()

    def begin(self, fragment: int, copy: ModelCopy) -> ModelCopy:
        """Make the state of a first step, so that it does not run out of memory behind the votes."""
        self.global_model.reserve(fragment)
        self._numbers = self.global_model.numbers(fragment)
        return copy

    def status(self, fragment: int) -> Mapping[str, Any]:
        """Tell the numbers of the step, such as a learning rate."""
        return {"numbers": tuple(self._numbers.values())}

    def count(self, context: RoundContext, statuses: Sequence[RoundStatus]) -> RoundContext:
        """Take the numbers of the first rank that contributes.

        They come from functions of the system's mathematical library, which other ranks may have another version of.
        """
        lowest = next(cell for cell, weight in enumerate(context.weights) if weight)
        return replace(context, numbers=statuses[self._topology.offsets[lowest]].numbers)

    def write(self, run: RoundRun, context: RoundContext) -> Iterator[tuple[GroupTransfer, Bucket, torch.Tensor]]:
        """Step, and yield the new values of all buckets that training changes."""
        if context.source is not None and self.global_model.has_optimizer:
            return  # what was agreed on last has come to all cells
        numbers = dict(zip(self._numbers, context.numbers, strict=False))  # a vote has room for more than these
        for transfer, bucket, new in self.global_model.step(run.fragment, self._memory.results, context.scale, numbers):
            if self._is_encoded and transfer.number in self._memory.staging:
                self._memory.staging_of(transfer, bucket).copy_(new)
            yield transfer, bucket, new

    def start_from_model(self) -> None:
        """Take the model as it is for the global model."""
        self.global_model.reset_from_model()

    def forget(self) -> None:
        """Note that ranks may hold different states."""
        self.global_model.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the global model and what the server keeps."""
        return self.global_model.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        self.global_model.load_state_dict(state)

    def take_over(self, last: RoundStage) -> None:
        """Go on from the global model of rounds with other cells."""
        assert isinstance(last, AgreedModel), "of the same kind"
        self.global_model.take_over(last.global_model)
