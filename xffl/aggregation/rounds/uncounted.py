"""What finds a loop that trains the model without counting its steps, at the end of its block."""

from __future__ import annotations

import torch
from torch import nn

from xffl.distributed.agreement.consistency import run_on_all_ranks, sum_of_bits
from xffl.distributed.values.sharding import local_tensor, reshard
from xffl.errors import StateError

__all__ = ["CountingCheck", "digest_of"]

SUM_CHUNK = 2**20
"""Elements of a tensor that are summed up at a time: each needs 24 bytes more."""


class CountingCheck:
    """Finds a loop that trains the model and counts no step, so that each cell is left with a model of its own."""

    def __init__(self, model: nn.Module, *, has_optimizers: bool) -> None:
        self._model = model
        self._has_optimizers = has_optimizers
        self._first_rounds = 0
        self._first_digest: list[int] = []

    def note_start(self, rounds: int) -> None:
        """Note what the model is before the first step; local."""
        self._first_rounds = rounds
        self._first_digest = digest_of(self._model)

    def check(self, rounds: int) -> None:
        """Raise StateError where the model was trained and no rank has counted a step; collective over the world.

        A step that a rank has counted has led to a round by now, which all ranks know of.
        """
        if rounds > self._first_rounds:
            return
        advice = "With optimizer=None call scaling.step() after each local step"
        if self._has_optimizers:
            advice = (
                "The step() of the optimizers that were given was never called; give those whose step() trains the "
                "model, or, where none is called (as in SAM, or in fused backward passes), give optimizer=None and "
                "call scaling.step() after each local step"
            )
        with run_on_all_ranks("parameters that no step has changed"):
            if digest_of(self._model) != self._first_digest:
                raise StateError(
                    "parameters have changed in the block, but no local step was counted, so there was no round "
                    f"and each cell has a model of its own. {advice}"
                )


@torch.no_grad()
def digest_of(model: nn.Module) -> list[int]:
    """Return a number for this rank's elements of each trainable parameter, by their bits and places; local.

    Versions of tensors would be cheaper, and do not tell of what was changed through ``.data``.
    """
    reshard(model)
    sums = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            values = local_tensor(parameter).detach()
            values = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)
            starts = range(0, len(values), SUM_CHUNK)
            sums.append(sum(_sum_of_row(values[start : start + SUM_CHUNK], start) for start in starts))
    return [int(one) for one in sums]


def _sum_of_row(values: torch.Tensor, start: int) -> torch.Tensor:
    return sum_of_bits(values, torch.arange(start, start + len(values), device=values.device))
