"""The arithmetic of the lossy codecs: a few bits for each value with one scale for each block, or the largest values.

Local, on the tensors' device, without a wait for it. The same input gives the same bytes on every CPU and GPU: each
step is one operation that IEEE 754 rounds correctly (or that is exact), none sums in an order that depends on the width
of a vector, and none multiplies and adds at once, where a CPU with fused instructions would round differently.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = [
    "block_maxima",
    "chunk_length",
    "dequantize",
    "largest_positions",
    "pack",
    "quantize",
    "read_scales",
    "scratch_for",
    "unpack",
    "write_scales",
]

CHUNK = 2**16
"""Elements taken at a time on a CPU: their scratch stays in a core's cache, where fresh memory costs ten times more."""

LARGEST = 2.0**128 - 2.0**119
"""Where block maxima saturate (0.2 % below the largest fp32), so that a scale that was rounded up never overflows."""

TINY = 2.0**-120
"""Smallest scale, a normal fp32. Zeros have it, too: no ratio is 0 / 0."""

SMALLEST_TOP = 2.0**-75
"""Smallest power of two that fp16 scales are relative to: every one of them is then above :data:`TINY`."""


def chunk_length(numel: int, block: int, device: torch.device) -> int:
    """Return how many values to take at a time: whole blocks, an even number; on a GPU all of them.

    :param numel: Number of values, at least 1.
    :param block: Values in a block.
    :param device: Where the values are.
    :return: A multiple of ``2 * block``.
    """
    wanted = CHUNK if device.type == "cpu" else numel
    return -(-wanted // (2 * block)) * 2 * block


def scratch_for(values: torch.Tensor, length: int) -> torch.Tensor:
    """Return scratch for chunks of the values: made once, since memory that is made for each chunk is fresh each time.

    :param values: fp32, 1-D, not empty.
    :param length: Values in a chunk.
    :return: fp32, two rows, neither shorter than a chunk; the length is a multiple of 4.
    """
    return values.new_empty(2, -(-min(length, values.numel()) // 4) * 4)


def block_maxima(values: torch.Tensor, block: int) -> torch.Tensor:
    """Return the largest magnitude of each block, at most :data:`LARGEST`.

    :param values: fp32, 1-D, not empty.
    :param block: Values in a block; the last one may be short.
    :return: fp32, one for each block.
    """
    length = chunk_length(values.numel(), block, values.device)
    maxima = values.new_empty(-(-values.numel() // block))
    scratch = scratch_for(values, length)[0]
    for chunk, part in zip(torch.split(values, length), torch.split(maxima, length // block), strict=True):
        magnitudes = torch.abs(chunk, out=scratch[: chunk.numel()])
        for rows, column in _blocks(magnitudes, part, block):
            torch.amax(rows, 1, keepdim=True, out=column)
    return maxima.clamp_(max=LARGEST)


def write_scales(maxima: torch.Tensor, levels: int, is_half: bool, out: torch.Tensor) -> None:
    """Encode the scales ``maximum / levels``.

    fp16 alone reaches from 6e-8 to 65504, too little for the differences that training makes. Its scales are therefore
    relative to a power of two near the largest one (4 bytes in front), and rounded up, so that no value exceeds
    ``levels`` steps and no scale is 0: by at most 0.1 %, and more only in blocks of less than ``2**-28`` of the largest
    one, where the spacing of fp16 is ``2**-41`` of it or less.

    :param maxima: fp32, of :func:`block_maxima`; overwritten.
    :param levels: Largest whole number, 127 or 7.
    :param is_half: fp16 scales, else fp32.
    :param out: uint8, at any offset: 4 bytes for each scale, or 4 bytes and 2 for each.
    """
    # A tensor, since a GPU multiplies by the reciprocal of a plain number, which rounds differently.
    divisor = maxima.new_full((1,), float(levels))
    if not is_half:
        out.copy_(maxima.div_(divisor).clamp_(min=TINY).view(torch.uint8))
        return
    exponent = maxima.amax().view(1).view(torch.int32).bitwise_and(0x7F800000)
    top = exponent.view(torch.float32).clamp_(min=SMALLEST_TOP)
    lift = 2.0 ** (14 + levels.bit_length())  # the largest scale comes between 2**14 and the largest fp16
    relative = maxima.div_(top).div_(divisor).mul_(lift)
    scales = relative.half()
    # Positive floats are ordered as their bits are: adding 1 gives the next larger one, and 1 is the smallest above 0.
    scales.view(torch.int16).add_(scales.float() < relative).clamp_(min=1)
    out[:4].copy_(top.mul_(1.0 / lift).view(torch.uint8))
    out[4:].copy_(scales.view(torch.uint8))


def read_scales(data: torch.Tensor, is_half: bool) -> torch.Tensor:
    """Decode what :func:`write_scales` wrote.

    :param data: uint8, at any offset.
    :param is_half: fp16 scales, else fp32.
    :return: fp32, one for each block; the same on all ranks, since a power of two times an fp16 is exact.
    """
    # A copy is aligned.
    if not is_half:
        return data.clone().view(torch.float32)
    return data[4:].clone().view(torch.float16).float().mul_(data[:4].clone().view(torch.float32))


def quantize(
    values: torch.Tensor,
    scales: torch.Tensor,
    block: int,
    levels: int,
    generator: torch.Generator | None,
    scratch: torch.Tensor,
) -> torch.Tensor:
    """Divide by the scales and round to whole numbers from ``-levels`` to ``levels``.

    The scales are the decoded ones: what rounding did to them is thus part of the ratio, not of the error.

    :param values: fp32, 1-D, whole blocks from the first on.
    :param scales: fp32, one for each block.
    :param block: Values in a block.
    :param levels: Largest whole number.
    :param generator: Source of stochastic rounding; ``None`` rounds to the nearest, ties to even.
    :param scratch: Of :func:`scratch_for`; overwritten.
    :return: fp32, the whole numbers, in the first row of the scratch.
    """
    numbers, noise = scratch[0, : values.numel()], scratch[1, : values.numel()]
    if generator is not None:
        # 16 random bits for each value cost a third of torch.rand. The noise is symmetric, so its mean is exactly 0,
        # and less than half a step, so a whole number keeps its value: zeros stay zeros.
        bits = scratch[0].view(torch.int64)[: -(-values.numel() // 4)].random_(-(2**63), None, generator=generator)
        noise.copy_(bits.view(torch.int16)[: values.numel()]).add_(0.5).mul_(2.0**-16)
    for (rows, column), (ratios, _) in zip(
        _blocks(values, scales, block), _blocks(numbers, scales, block), strict=True
    ):
        torch.div(rows, column, out=ratios)
    if generator is not None:
        # Ratios pass ``levels`` by a rounding (by 0.2 % where the maximum saturates); with noise that could be a step.
        numbers.clamp_(-levels, levels).add_(noise)
    return numbers.round_()


def dequantize(numbers: torch.Tensor, scales: torch.Tensor, block: int) -> None:
    """Multiply whole numbers by their block's scale, in place.

    :param numbers: fp32, 1-D, whole blocks from the first on.
    :param scales: fp32, one for each block.
    :param block: Values in a block.
    """
    for rows, column in _blocks(numbers, scales, block):
        rows.mul_(column)


def pack(numbers: torch.Tensor, bits: int, block: int, out: torch.Tensor) -> None:
    """Write whole numbers as bytes, or two of them in one: a number and 16 times the one in the block after its own.

    In this order everything is contiguous, and contiguous operations are several times faster than strided ones. What
    is left after pairs of blocks is paired half with half; an odd number in the middle is alone.

    :param numbers: fp32, 1-D, whole numbers from ``-(2**(bits - 1) - 1)`` to ``2**(bits - 1) - 1``; overwritten.
    :param bits: 8 or 4.
    :param block: Values in a block.
    :param out: uint8, ``ceil(numbers * bits / 8)`` bytes, at any offset.
    """
    if bits == 8:
        out.view(torch.int8).copy_(numbers)
        return
    for data, first, second in _pairs(out.view(torch.int8), numbers, block):
        first[:, : second.shape[1]].add_(second, alpha=16)
        data.copy_(first)


def unpack(data: torch.Tensor, bits: int, block: int, out: torch.Tensor) -> None:
    """Read what :func:`pack` wrote.

    :param data: uint8, 1-D, at any offset.
    :param bits: 8 or 4.
    :param block: Values in a block.
    :param out: fp32, 1-D: the whole numbers.
    """
    if bits == 8:
        out.copy_(data.view(torch.int8))
        return
    for both, first, second in _pairs(data.view(torch.int8), out, block):
        first.copy_(both)
        # The first number is less than half of 16, so rounding finds the second.
        torch.mul(first[:, : second.shape[1]], 1 / 16, out=second).round_()
        first[:, : second.shape[1]].sub_(second, alpha=16)


def largest_positions(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the positions of the values of largest magnitude; of equal ones the first.

    :param values: fp32, 1-D, not empty, at most ``2**32`` values.
    :param count: How many, at least 1, at most all.
    :return: int64, ascending.
    """
    # Magnitude (floats are ordered as their bits are) and position in one number: no two keys are equal, so the result
    # cannot depend on how ties are broken. Chunk by chunk, since the selection takes 24 bytes for each key.
    length = min(max(4 * CHUNK, count), values.numel())
    last = values.numel() - 1
    backwards = torch.arange(last, last - length, -1, device=values.device)
    keys = torch.full((count + length,), -1, dtype=torch.int64, device=values.device)
    scratch = values.new_empty(length)
    for index, chunk in enumerate(torch.split(values, length)):
        fresh = keys[count : count + chunk.numel()]
        fresh.copy_(torch.abs(chunk, out=scratch[: chunk.numel()]).view(torch.int32)).bitwise_left_shift_(32)
        fresh.add_(backwards[: chunk.numel()]).sub_(index * length)
        best = torch.topk(keys[: count + chunk.numel()], count, sorted=False).values
        keys[:count].copy_(best)
    return keys[:count].bitwise_and_(0xFFFFFFFF).neg_().add_(last).sort().values


def _blocks(flat: torch.Tensor, each: torch.Tensor, block: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the whole blocks as rows, then the short last one, with the column of what belongs to each block."""
    whole = flat.numel() // block
    if whole > 0:
        yield flat[: whole * block].view(whole, block), each[:whole].unsqueeze(1)
    if flat.numel() > whole * block:
        yield flat[whole * block :].unsqueeze(0), each[whole:].unsqueeze(1)


def _pairs(
    data: torch.Tensor, numbers: torch.Tensor, block: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield rows of bytes with the rows of the first and of the second numbers in them, which may be one less."""
    pairs, left = divmod(numbers.numel(), 2 * block)
    whole, middle = pairs * block, (left + 1) // 2
    if whole:
        rows = numbers[: 2 * whole].view(pairs, 2, block)
        yield data[:whole].view(pairs, block), rows[:, 0], rows[:, 1]
    if data.numel() > whole:
        rest = numbers[2 * whole :].unsqueeze(0)
        yield data[whole:].unsqueeze(0), rest[:, :middle], rest[:, middle:]
