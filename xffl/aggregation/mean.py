"""The weighted mean of a round, and other ways to combine element by element."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from xffl.aggregation.arithmetic import divide, piece_length

__all__ = ["combined", "piece_length", "weighted_mean", "wide_type"]

TINY = 1e-30
"""Ratio of two weights below which 32 bits cannot hold their share."""


def weighted_mean(values: Sequence[torch.Tensor], weights: Sequence[float], out: torch.Tensor) -> None:
    """Write ``sum(w * x) / sum(w)`` of flat tensors into ``out``, rounded once from 64 bits (fp16, bf16: from fp32).

    Two fp32 values are combined in fp32, within ``1e-6 * sum(w * |x|) / sum(w)``.

    Local and deterministic: the same values and weights give the same bits everywhere. The sum runs, in the given
    order, over the differences from the heaviest value and is divided once. Equal values therefore keep every bit (the
    sign of a zero, too: that is why the shift is subtracted), also in fp64, where the plain sum would lose one.
    """
    scaled = _scaled(tuple(weights))
    base, numbers, others = scaled
    is_of_two = len(others) == 1 and out.dtype == torch.float32 and numbers[others[0]] > TINY * numbers[base]
    if not others:
        out.copy_(values[base])
    elif is_of_two:
        _mean_of_two(values[base], values[others[0]], numbers[others[0]] / (numbers[base] + numbers[others[0]]), out)
    else:
        _mean_of_many(values, scaled, out)


class _Scaled(NamedTuple):
    """The weights of a mean, scaled such that their digits stay and none overflows."""

    base: int  # the place of the heaviest value
    weights: list[float]
    others: list[int]  # the places of all others that count


@lru_cache(maxsize=64)
def _scaled(weights: tuple[float, ...]) -> _Scaled:
    """Scale weights; a round asks for each bucket."""
    heaviest = max(range(len(weights)), key=lambda index: weights[index])
    # A power of two keeps the weights' digits and prevents overflow.
    exponent = math.frexp(weights[heaviest])[1]
    scaled = [math.ldexp(weight, -exponent) for weight in weights]
    others = [index for index, weight in enumerate(scaled) if index != heaviest and weight > 0.0]
    return _Scaled(heaviest, scaled, others)


def _mean_of_two(base: torch.Tensor, other: torch.Tensor, share: float, out: torch.Tensor) -> None:
    """Write the mean of two fp32 values, of which ``other`` has a share of at most a half.

    Two values need no 64 bits. No step fuses two roundings, so that CPUs with and without fused instructions get the
    same bits; halves do not overflow. ``out`` may be either of the two.
    """
    length = min(piece_length(out.device), out.numel())
    step, half = torch.empty(2, length, dtype=out.dtype, device=out.device)
    for start in range(0, out.numel(), length or 1):
        before = base[start : start + length]
        after = other[start : start + length]
        result = out[start : start + length]
        if result.numel() < length:
            step, half = step[: result.numel()], half[: result.numel()]
        torch.mul(before, 0.5, out=step)
        torch.mul(after, 0.5, out=half)
        torch.sub(step, half, out=step)
        if share != 0.5:
            torch.mul(step, 2.0 * share, out=step)
        torch.sub(before, step, out=result)


def _mean_of_many(values: Sequence[torch.Tensor], scaled: _Scaled, out: torch.Tensor) -> None:
    """Write the mean of values of any type, of which at least two have a weight; ``out`` may be one of them."""
    base = values[scaled.base]
    others = [(values[index], scaled.weights[index]) for index in scaled.others]
    total = math.fsum(scaled.weights)
    length = min(piece_length(out.device), out.numel())
    # Made once: pages that the system hands out anew for each piece cost more than the arithmetic.
    origin, shift, term = torch.empty(3, length, dtype=torch.float64, device=out.device)
    for start in range(0, out.numel(), length or 1):
        result = out[start : start + length]
        if result.numel() < length:
            origin, shift, term = (memory[: result.numel()] for memory in (origin, shift, term))
        origin.copy_(base[start : start + length])
        for number, (value, weight) in enumerate(others):
            difference = term if number else shift
            difference.copy_(value[start : start + length])
            torch.sub(origin, difference, out=difference)
            difference.mul_(weight)
            if number:
                shift.add_(term)
        divide(shift, total, out=shift)
        mean = torch.sub(origin, shift, out=shift)
        # A GPU is not asked, since its answer would be waited for.
        if out.dtype == torch.float64 and (mean.device.type != "cpu" or not mean.isfinite().all()):
            # Differences that leave 64 bits: half as large they do not.
            pieces = [(value[start : start + length], weight) for value, weight in others]
            halves = [torch.sub(origin * 0.5, piece * 0.5).mul_(weight / total) for piece, weight in pieces]
            mean = torch.where(mean.isfinite(), mean, (origin * 0.5 - sum(halves)) * 2.0)
        result.copy_(mean if out.dtype in (torch.float32, torch.float64) else mean.float())


def combined(
    combine: Callable[[torch.Tensor, torch.Tensor], None], values: Sequence[torch.Tensor], out: torch.Tensor
) -> None:
    """Combine values element by element in fp32 (fp64 for fp64), rounded once; local."""
    wide = wide_type(out.dtype)
    length = piece_length(out.device)
    for into, *chunk in zip(*(torch.split(tensor, length) for tensor in (out, *values)), strict=True):
        result = torch.empty(into.shape, dtype=wide, device=into.device)
        combine(torch.stack([value.to(wide) for value in chunk]), result)
        into.copy_(result)


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type that values are computed in: fp32, or fp64 for fp64. torch promotes no 8-bit floats."""
    return dtype if dtype.itemsize > 4 else torch.float32
