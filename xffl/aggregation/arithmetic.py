"""Arithmetic that gives the same bits on every processor: elementary operations, roots, and the mean of a round.

IEEE 754 prescribes every bit of a sum, difference, product, quotient and conversion. The mean of a round and what
follows it (server rules, combiners) are made of these alone, each in a kernel of its own, so that every rank may
compute them for itself. Fused operations (``addcmul``, ``lerp``, ``alpha=``), powers, reductions and fp32 roots are not
prescribed: they differ between processors, versions of torch, and the vector units of one family of CPUs.

Two things remain that a program cannot write around: a thread that flushes subnormal numbers to zero gives other bits,
and the sign and payload of a NaN differ between CPUs and GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from xffl.compat.pytorch import memory_of

__all__ = [
    "CHUNK",
    "combined",
    "divide",
    "flushes_subnormals",
    "is_built_in",
    "piece_length",
    "square_root",
    "weighted_mean",
    "wide_type",
]

CHUNK = 2**16
"""Elements taken at a time: their 64-bit copies stay in a core's cache, where fresh memory costs ten times more."""

GPU_CHUNK = 2**22
"""The same on a GPU, where each call has a price of its own, and the copies are only not to take much memory."""


_SMALLEST, _ONE = 5e-324, 1.0


def flushes_subnormals() -> bool:
    """Tell whether this thread takes subnormal numbers for zero (``torch.set_flush_denormal``); local, 0.1 us."""
    return _SMALLEST * _ONE == 0.0  # by the processor, as tensors: Python's floats go through the same units


def piece_length(device: torch.device) -> int:
    """Return how many elements to combine at a time."""
    return CHUNK if device.type == "cpu" else GPU_CHUNK


def square_root(values: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the square roots of fp32 values, taken in fp64 and rounded to fp32: the nearest fp32 number; local.

    ``torch.sqrt`` of fp32 comes from a vector library that is off by a unit in one of six values. A root in fp64 that
    is off by a unit still rounds right, since the root of a 24-bit number lies no closer to a midpoint than 2^-51. Of
    fp64 values the result is ``torch.sqrt``'s, which only the check at the start compares between ranks.

    :param values: A flat tensor, fp32 or fp64.
    :param out: Where to write, of the same shape and type; may be ``values``. ``None`` for a new tensor.
    :return: ``out``, or the new tensor.
    """
    result = torch.empty_like(values) if out is None else out
    if values.dtype == torch.float64:
        return torch.sqrt(values, out=result)
    length = piece_length(values.device)
    for piece, into in zip(torch.split(values, length), torch.split(result, length), strict=True):
        into.copy_(piece.double().sqrt_())
    return result


def divide(values: torch.Tensor, divisor: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the values divided by one number of their type; local.

    On GPUs torch multiplies by the reciprocal where the divisor is a Python number or a tensor without dimensions.

    :param values: A tensor, fp32 or fp64.
    :param divisor: The number, which is rounded to the values' type first.
    :param out: Where to write, of the same shape and type; may be ``values``. ``None`` for a new tensor.
    :return: ``out``, or the new tensor.
    """
    divisors = torch.full((1,), divisor, dtype=values.dtype, device=values.device)
    return torch.div(values, divisors, out=out)


def is_built_in(part: object) -> bool:
    """Tell whether a combiner, codec or rule is xffl's, which is made of elementary operations; pure."""
    return type(part).__module__.partition(".")[0] == "xffl"


TINY = 1e-30
"""Ratio of two weights below which 32 bits cannot hold their share."""


def weighted_mean(
    values: Sequence[torch.Tensor], weights: Sequence[float], out: torch.Tensor, *, are_scratch: bool = False
) -> None:
    """Write ``sum(w * x) / sum(w)`` of flat tensors into ``out``, rounded once from 64 bits (fp16, bf16: from fp32).

    Two fp32 values are combined in fp32, within ``1e-6 * sum(w * |x|) / sum(w)``.

    Local and deterministic: the same values and weights give the same bits everywhere. The sum runs, in the given
    order, over the differences from the heaviest value and is divided once. Equal values therefore keep every bit (the
    sign of a zero, too: that is why the shift is subtracted), also in fp64, where the plain sum would lose one.

    With ``are_scratch`` the values, of which none is ``out``, may be overwritten, which spares memory and time.
    """
    scaled = _scaled(tuple(weights))
    base, numbers, others = scaled
    is_of_two = len(others) == 1 and out.dtype == torch.float32 and numbers[others[0]] > TINY * numbers[base]
    with np.errstate(all="ignore"):
        if not others:
            out.copy_(values[base])
        elif is_of_two:
            other = others[0]
            share = numbers[other] / (numbers[base] + numbers[other])
            mean_of_two = _mean_of_two_in_place if are_scratch else _mean_of_two
            mean_of_two(values[base], values[other], share, out)
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
    memory = torch.empty(2, length, dtype=out.dtype, device=out.device)
    # Half of the other value waits where the result goes, unless that is where the base lies: the fewer places, the
    # more of them stay in the cache.
    is_over_base = out.data_ptr() == base.data_ptr()
    ops, (base, other, out, step, spare) = _quickest([base, other, out], memory.unbind())
    for start in range(0, len(out), length or 1):
        before = base[start : start + length]
        result = out[start : start + length]
        if len(result) < length:
            step, spare = step[: len(result)], spare[: len(result)]
        half = spare if is_over_base else result
        ops.multiply(other[start : start + length], 0.5, out=half)
        ops.multiply(before, 0.5, out=step)
        ops.subtract(step, half, out=step)
        if share != 0.5:
            ops.multiply(step, 2.0 * share, out=step)
        ops.subtract(before, step, out=result)


def _mean_of_two_in_place(base: torch.Tensor, other: torch.Tensor, share: float, out: torch.Tensor) -> None:
    """Write the same as :func:`_mean_of_two`, operation by operation, and overwrite ``other``.

    For values that have just been decoded into scratch memory: they are in the cache, where an operation that writes
    over what it reads takes two thirds of one that writes elsewhere.
    """
    other.mul_(0.5)
    torch.mul(base, 0.5, out=out)
    out.sub_(other)
    if share != 0.5:
        out.mul_(2.0 * share)
    torch.sub(base, out, out=out)


def _mean_of_many(values: Sequence[torch.Tensor], scaled: _Scaled, out: torch.Tensor) -> None:
    """Write the mean of values of any type, of which at least two have a weight; ``out`` may be one of them."""
    dtype, length = out.dtype, min(piece_length(out.device), out.numel())
    # Weights that are all halves, as those of cells that count alike, are doubled, which changes no bit where nothing
    # overflows: products with 1 are left out.
    factor = 2.0 if dtype != torch.float64 and {0.0, 0.5}.issuperset(scaled.weights) else 1.0
    total = factor * math.fsum(scaled.weights)
    # A quotient by a power of two is a product, which takes half as long.
    is_product = math.frexp(total)[0] == 0.5
    # Made once: pages that the system hands out anew for each piece cost more than the arithmetic.
    memory = torch.empty(3, length, dtype=torch.float64, device=out.device)
    number = 1.0 / total if is_product else total
    scale = torch.full((1,), number, dtype=torch.float64, device=out.device)
    ops, arrays = _quickest([*values, out], [*memory.unbind(), scale])
    *values, out, origin, shift, term, scale = arrays
    base = values[scaled.base]
    others = [(values[index], factor * scaled.weights[index]) for index in scaled.others]
    for start in range(0, len(out), length or 1):
        result = out[start : start + length]
        if len(result) < length:
            origin, shift, term = (wide[: len(result)] for wide in (origin, shift, term))
        origin[:] = base[start : start + length]
        for place, (value, weight) in enumerate(others):
            difference = term if place else shift
            difference[:] = value[start : start + length]
            ops.subtract(origin, difference, out=difference)
            if weight != 1.0:
                ops.multiply(difference, weight, out=difference)
            if place:
                ops.add(shift, term, out=shift)
        (ops.multiply if is_product else ops.divide)(shift, scale, out=shift)
        mean = ops.subtract(origin, shift, out=shift)
        # A GPU is not asked, since its answer would be waited for.
        if dtype == torch.float64 and (mean.device.type != "cpu" or not mean.isfinite().all()):
            # Differences that leave 64 bits: half as large they do not.
            pieces = [(value[start : start + length], weight) for value, weight in others]
            halves = [torch.sub(origin * 0.5, piece * 0.5).mul_(weight / total) for piece, weight in pieces]
            mean = torch.where(mean.isfinite(), mean, (origin * 0.5 - sum(halves)) * 2.0)
        result[:] = mean if dtype in (torch.float32, torch.float64) else mean.float()


def _quickest(values: Sequence[torch.Tensor], memory: Sequence[torch.Tensor]) -> tuple[Any, list[Any]]:
    """Return whose operations are quickest, numpy's or torch's, and the tensors, all flat, as these take them.

    The caller keeps the values, but not the memory of temporaries. Elementary operations have the same names and bits
    in both. For 65,536 elements in the cache numpy's take two thirds of the time, on one thread; it has no bfloat16,
    and is slow with fp16.
    """
    if all(one.device.type == "cpu" and one.dtype == torch.float32 and one.is_contiguous() for one in values):
        arrays = [np.ndarray(one.numel(), np.float32, memory_of(one)) for one in values]
        return np, [*arrays, *(part.numpy() for part in memory)]
    return torch, [*values, *memory]


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
