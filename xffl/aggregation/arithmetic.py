"""Arithmetic that gives the same bits on every processor: elementary operations, and roots.

IEEE 754 prescribes every bit of a sum, difference, product, quotient and conversion. What follows the mean of a round
(server rules, combiners) is made of these alone, each in a kernel of its own, so that every rank may compute it for
itself. Fused operations (``addcmul``, ``lerp``, ``alpha=``), powers, reductions and fp32 roots are not prescribed: they
differ between processors, versions of torch, and the vector units of one family of CPUs.

Two things remain that a program cannot write around: a thread that flushes subnormal numbers to zero gives other bits,
and the sign and payload of a NaN differ between CPUs and GPUs.
"""

from __future__ import annotations

import torch

__all__ = [
    "CHUNK",
    "divide",
    "flushes_subnormals",
    "is_built_in",
    "piece_length",
    "power",
    "square_root",
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


def power(base: float, exponent: int) -> float:
    """Return ``base ** exponent`` by repeated products, for an exponent of 0 or more; pure.

    ``math.pow`` is libm's, which differs between systems.
    """
    result = 1.0
    square = base
    while exponent:
        if exponent & 1:
            result *= square
        square *= square
        exponent >>= 1
    return result


def is_built_in(part: object) -> bool:
    """Tell whether a combiner, codec or rule is xffl's, which is made of elementary operations; pure."""
    return type(part).__module__.partition(".")[0] == "xffl"
