"""The weighted mean of a round."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["weighted_mean"]

CHUNK = 2**16
"""Elements taken at a time: their 64-bit copies stay in a core's cache, where fresh memory would cost ten times more."""


def weighted_mean(values: Sequence[torch.Tensor], weights: Sequence[float], out: torch.Tensor) -> None:
    """Write ``sum(w * x) / sum(w)`` into ``out``, rounded once from 64 bits (fp16 and bf16: from the fp32 mean).

    Local and deterministic: the same values and weights give the same bits everywhere. The sum runs, in the given
    order, over the differences from the heaviest value and is divided once. Equal values therefore keep every bit (the
    sign of a zero, too: that is why the shift is subtracted), also in fp64, where the plain sum would lose one.

    :param values: Real 1-D tensors of one length and data type; ``out`` may be one of them.
    :param weights: One finite weight for each value, none negative, at least one positive. A value of weight 0 is not read.
    :param out: Tensor of the same length and data type.
    """
    heaviest = max(range(len(weights)), key=lambda index: weights[index])
    # A power of two keeps the weights' digits and prevents overflow.
    exponent = math.frexp(weights[heaviest])[1]
    scaled = [math.ldexp(weight, -exponent) for weight in weights]
    for chunk in zip(out.split(CHUNK), *(value.split(CHUNK) for value in values), strict=True):
        _mean_of_chunk(chunk[1:], scaled, heaviest, chunk[0])


def _mean_of_chunk(values: Sequence[torch.Tensor], weights: Sequence[float], base: int, out: torch.Tensor) -> None:
    origin = values[base].double()
    shift: torch.Tensor | None = None
    for index, value in enumerate(values):
        if index != base and weights[index] > 0.0:
            term = torch.sub(origin, value.double()).mul_(weights[index])
            shift = term if shift is None else shift.add_(term)
    if shift is None:
        out.copy_(values[base])
        return
    mean = torch.sub(origin, shift.div_(math.fsum(weights)), out=shift)
    out.copy_(mean if out.dtype in (torch.float32, torch.float64) else mean.float())
