"""Codecs: how a bucket is encoded while it crosses the slow link, and the residuals of what was not sent."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from xffl.checks import integer, number, one_of
from xffl.compat.pytorch import lasting_memory
from xffl.errors import CheckpointError, ConfigError
from xffl.message_sizes.codecs import MAX_BLOCK, block_bytes, kept_values, read_codec, scale_bytes, topk_bytes

if TYPE_CHECKING:
    from xffl.aggregation.engine.planning.transfers import Bucket

__all__ = ["Blockwise", "Cast", "CodePlace", "Codec", "ErrorFeedback", "TopK", "codec_of"]

MAX_POSITIONS = 2**31  # the most values with distinct 32-bit positions

FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Data types by the names that options give them."""


class Codec(ABC):
    """Turn fp32 values into fewer bytes, and back.

    Local: nothing is communicated. Codecs have options and no state; codecs with equal options are equal, and
    ``codec_of(str(codec))`` returns an equal codec. The same values and seed give the same bytes, and the same bytes
    decode to the same values on every rank. No method waits for a GPU.
    """

    decay: float = 1.0
    """What a residual is multiplied by before it is added to the next values."""

    @property
    def alignment(self) -> int:
        """Of how many values the lengths of buckets of a large tensor are multiples."""
        return 1

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Return the exact size of encoded values in bytes; 0 for no values."""

    @abstractmethod
    def encode(self, values: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        """Encode finite values (fp32, 1-D, contiguous, not changed) into ``out``.

        ``out`` is uint8, 1-D and contiguous, with ``nbytes(values.numel())`` bytes on the same device, at any offset.
        The noise of stochastic rounding depends on the seed (0 or more) only: torch's global generators are not used.
        It differs between CPU and GPU.
        """

    @abstractmethod
    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Decode the result of :meth:`encode` (not changed) into ``out``: fp32, 1-D, contiguous, on the same device."""

    def encode_with_residual(
        self, values: torch.Tensor, out: torch.Tensor, *, residual: torch.Tensor, spare: torch.Tensor, seed: int = 0
    ) -> None:
        """Encode as :meth:`encode` does, and write what the code leaves out: ``values`` minus what it decodes to.

        ``residual`` and ``spare`` are like ``values``, and do not overlap it; ``spare`` is overwritten. A codec may
        compute the residual on the way, without a pass that decodes.
        """
        self.encode(values, out, seed)
        self.decode(out, spare)
        torch.sub(values, spare, out=residual)

    def _check(self, values: torch.Tensor, data: torch.Tensor) -> None:
        needed = self.nbytes(values.numel())
        if data.numel() != needed:
            raise ConfigError(
                f"the buffer has {data.numel()} bytes; {values.numel()} values as {self} take nbytes(numel) = {needed}"
            )


@dataclass(frozen=True)
class Cast(Codec):
    """Round to a 16-bit float, to the nearest, ties to even; 0.5 of the bytes.

    Error: ``bf16`` at most ``2**-8 * |x|`` (``2**-134`` where ``|x| < 2**-126``), ``fp16`` at most ``2**-11 * |x|``
    (``2**-25`` where ``|x| < 2**-14``). Values beyond the type's largest number become that number, not infinity.
    Values that the type can represent keep every bit.
    """

    kind: str

    def __post_init__(self) -> None:
        one_of("float type", self.kind, ("bf16", "fp16"))

    def __str__(self) -> str:
        return self.kind

    def nbytes(self, numel: int) -> int:
        """Return two bytes for each value."""
        return 2 * numel

    def encode(self, values: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        """Round the values; see :meth:`Codec.encode`."""
        self._check(values, out)
        if values.numel() == 0:
            return
        dtype = FLOATS[self.kind]
        largest = torch.finfo(dtype).max
        length = min(chunk_length(values.numel(), 1, values.device, CHUNK), values.numel())
        clamped, scratch = values.new_empty(length), values.new_empty(length, dtype=dtype)
        for chunk, part in zip(torch.split(values, length), torch.split(out, 2 * length), strict=True):
            inside = torch.clamp(chunk, -largest, largest, out=clamped[: chunk.numel()])
            part.copy_(scratch[: chunk.numel()].copy_(inside).view(torch.uint8))

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Widen the values, exactly; see :meth:`Codec.decode`."""
        self._check(out, data)
        if out.numel() == 0:
            return
        length = min(chunk_length(out.numel(), 1, out.device, CHUNK), out.numel())
        scratch = out.new_empty(length, dtype=FLOATS[self.kind])
        for chunk, part in zip(torch.split(out, length), torch.split(data, 2 * length), strict=True):
            words = scratch[: chunk.numel()]
            words.view(torch.uint8).copy_(part)
            chunk.copy_(words)


@dataclass(frozen=True)
class Blockwise(Codec):
    """Round to whole multiples of a step: 8 or 4 bits for each value, one step (scale) for each block of values.

    The step of a block is ``s = max|x| / 127`` (8 bits) or ``max|x| / 7`` (4 bits), symmetric around 0. Blocks of 1 to
    65536 values run over the flat values in the order given; the last may be short. With blocks of 64 and fp16 scales 8
    bits take 0.258 and 4 bits 0.133 of the fp32 bytes. Rounding is ``nearest`` (ties to even) or ``stochastic``.

    Error: with ``t`` the step as it is stored, nearest rounding is off by at most ``t / 2 * (1 + 2**-15)``, stochastic
    rounding by at most ``t * (1 + 2**-15)``. fp32: ``t <= s * (1 + 2**-23) + 2**-120``. fp16, with ``largest`` the
    largest magnitude of all the values given: ``t <= 1.001 * s + 2**-41 * max(largest, 2**-75)``, since these scales
    are relative to ``largest`` and rounded up (:func:`xffl.aggregation.compression.write_scales` says why).
    Stochastic rounding is unbiased up to ``2**-16`` of a step. Zeros stay zeros. With nearest rounding and fp16 scales
    decoded values encode to themselves again, but for blocks of less than ``2**-28`` of the largest one. Values from
    0.998 of the largest fp32 on saturate.

    Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022 (arXiv:2110.02861); stochastic rounding:
    Alistarh et al., QSGD, 2017 (arXiv:1610.02132).
    """

    bits: int
    block: int = 64
    scale: str = "fp16"
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", integer("bits", self.bits))
        one_of("bits", self.bits, (8, 4))
        object.__setattr__(self, "block", integer("block", self.block, 1, MAX_BLOCK, hint="give block=64"))
        one_of("scale", self.scale, ("fp16", "fp32"))
        one_of("rounding", self.rounding, ("nearest", "stochastic"))

    def __str__(self) -> str:
        scale = "" if self.scale == "fp16" else f",scale={self.scale}"
        rounding = "" if self.rounding == "nearest" else f",rounding={self.rounding}"
        return f"int{self.bits}:block={self.block}{scale}{rounding}"

    def nbytes(self, numel: int) -> int:
        """Return the bytes of scales and values."""
        return block_bytes(numel, self.bits, self.block, self.scale)

    def encode(self, values: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        """Compute and store the scales, then round with the stored scales; see :meth:`Codec.encode`."""
        self._check(values, out)
        if values.numel():
            numbers, spare = values.new_empty(2, min(self._length(values), values.numel()))
            self._encode(values, out, seed=seed, numbers=numbers, residual=spare)

    def encode_with_residual(
        self, values: torch.Tensor, out: torch.Tensor, *, residual: torch.Tensor, spare: torch.Tensor, seed: int = 0
    ) -> None:
        """Encode, and take what is left out from the rounded values; see :meth:`Codec.encode_with_residual`."""
        self._check(values, out)
        if values.numel():
            self._encode(values, out, seed=seed, numbers=spare, residual=residual, is_residual_wanted=True)

    def _encode(
        self,
        values: torch.Tensor,
        out: torch.Tensor,
        seed: int,
        numbers: torch.Tensor,
        residual: torch.Tensor,
        is_residual_wanted: bool = False,
    ) -> None:
        """Encode; ``numbers`` and ``residual`` are scratch memory for a chunk, or as large as ``values``."""
        head = out[: scale_bytes(values.numel(), self.block, self.scale)]
        write_scales(block_maxima(values, self.block, numbers), self._levels, self._is_half, head)
        generator = None
        if self.rounding == "stochastic":
            # The CPU's generator uses 32 bits of a seed only, so the upper ones are folded in.
            generator = torch.Generator(values.device).manual_seed((seed ^ (seed >> 32)) & 0xFFFFFFFF)
        start = 0
        for chunk, scale, part in self._chunks(values, out):
            rounded = numbers[: chunk.numel()]
            left = residual[start : start + chunk.numel()] if is_residual_wanted else residual[: chunk.numel()]
            quantize(chunk, scale, block=self.block, levels=self._levels, generator=generator, out=rounded, noise=left)
            pack_integers(rounded, self.bits, self.block, part, scratch=left)
            if is_residual_wanted:
                for (rows, column), (lefts, _) in zip(
                    _blocks(rounded, scale, self.block), _blocks(left, scale, self.block), strict=True
                ):
                    torch.mul(rows, column, out=lefts)
                torch.sub(chunk, left, out=left)
            start += chunk.numel()

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Multiply by the scales; see :meth:`Codec.decode`. With fp16 scales the product is exact."""
        self._check(out, data)
        if out.numel() == 0:
            return
        for chunk, scale, part in self._chunks(out, data):
            unpack_integers(part, self.bits, self.block, chunk)
            for rows, column in _blocks(chunk, scale, self.block):
                rows.mul_(column)

    @property
    def _levels(self) -> int:
        return int(2 ** (self.bits - 1)) - 1

    @property
    def _is_half(self) -> bool:
        return self.scale == "fp16"

    def _length(self, values: torch.Tensor) -> int:
        """Return the number of values per step."""
        at_a_time = NOISE_CHUNK if self.rounding == "stochastic" else CHUNK
        return chunk_length(values.numel(), self.block, values.device, at_a_time)

    def _chunks(self, values: torch.Tensor, data: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """Return values, their stored scales, and the bytes of their integers, chunk by chunk."""
        head = scale_bytes(values.numel(), self.block, self.scale)
        scales = read_scales(data[:head], self._is_half)
        length = self._length(values)
        rows = torch.split(values, length), torch.split(scales, length // self.block)
        return zip(*rows, torch.split(data[head:], length * self.bits // 8), strict=True)


@dataclass(frozen=True)
class TopK(Codec):
    """Keep the ``ceil(density * numel)`` values of largest magnitude, with their 32-bit positions; the others become 0.

    Of equal magnitudes the first are kept. Costs 8 bytes for each value kept (``value=fp16``: 6): 0.02 of the fp32
    bytes at a density of 0.01.

    Error: what is dropped is at most as large as the smallest value kept; what is kept is exact (``fp16``: rounded as
    :class:`Cast` does). Without error feedback small values would never be sent.

    Aji and Heafield, Sparse Communication for Distributed Gradient Descent, 2017 (arXiv:1704.05021); with error
    feedback: Stich et al., Sparsified SGD with Memory, 2018 (arXiv:1809.07599).
    """

    density: float
    value: str = "fp32"

    def __post_init__(self) -> None:
        number("density", self.density, above=0.0, maximum=1.0, hint="give topk:0.01 for 1 %")
        one_of("value", self.value, ("fp32", "fp16"))

    def __str__(self) -> str:
        return f"topk:{float(self.density)!r}" + ("" if self.value == "fp32" else f",value={self.value}")

    def nbytes(self, numel: int) -> int:
        """Return the bytes of positions and values."""
        return topk_bytes(numel, self.density, self.value)

    def encode(self, values: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        """Write the positions, ascending, then the values; see :meth:`Codec.encode`."""
        self._check(values, out)
        if values.numel() > MAX_POSITIONS:
            raise ConfigError(f"{values.numel()} values are too many for 32-bit positions; give smaller buckets")
        if values.numel() == 0:
            return
        positions = largest_positions(values, kept_values(values.numel(), self.density))
        selected = values[positions]
        if self.value == "fp16":
            largest = torch.finfo(torch.float16).max
            selected = selected.clamp_(-largest, largest).half()
        out[: 4 * selected.numel()].copy_(positions.int().view(torch.uint8))
        out[4 * selected.numel() :].copy_(selected.view(torch.uint8))

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Write zeros, then the values that were kept; see :meth:`Codec.decode`."""
        self._check(out, data)
        split = 4 * kept_values(out.numel(), self.density)
        # The parts of a buffer may be unaligned, copies are not.
        positions = data[:split].clone().view(torch.int32).long()
        selected = data[split:].clone().view(FLOATS[self.value]).float()
        out.zero_().scatter_(0, positions, selected)


def codec_of(name: str | Codec) -> Codec | None:
    """Return the codec of a name such as ``int8:block=128`` or ``topk:0.01,value=fp16``, ``None`` for ``none``.

    A codec is returned as it is. ``xffl.message_sizes.codecs.CODECS`` has the names with their options.
    """
    if isinstance(name, Codec):
        return name
    spec = read_codec(name)
    if spec.kind == "topk":
        return TopK(spec.density, spec.value)
    if spec.kind in ("int8", "int4"):
        return Blockwise(int(spec.kind.removeprefix("int")), spec.block, spec.scale, spec.rounding)
    if spec.kind in ("int2", "sparseloco"):
        # Only where they are asked for: a plain round reads nothing of them.
        from xffl.aggregation.two_bits import SparseBlocks, TwoBits

        return TwoBits(spec.block) if spec.kind == "int2" else SparseBlocks(spec.density, spec.decay)
    return None if spec.kind == "none" else Cast(spec.kind)


CHUNK = 2**20
"""Elements per step on a CPU: a bucket of the default size, which stays in the cache that cores share.

Steps of 64 Ki elements, for a core's own cache, take half as long again: more calls, which cost more than they save.
"""

SELECTION_CHUNK = 2**18
"""The same where values are selected, with 24 bytes of scratch memory for each."""

NOISE_CHUNK = 2**16
"""The same where rounding is stochastic: the noise of a value depends on the step that it is in."""

LARGEST = 2.0**128 - 2.0**119
"""Limit of block maxima, 0.2 % below the largest fp32, so that a scale that is rounded up does not overflow."""

TINY = 2.0**-120
"""Smallest scale, a normal fp32; also of blocks of zeros, so that no ratio is 0 / 0."""

SMALLEST_TOP = 2.0**-75
"""Smallest power of two to which fp16 scales are relative, so that every scale is above :data:`TINY`."""


def chunk_length(numel: int, block: int, device: torch.device, at_a_time: int) -> int:
    """Return the number of values per step: a multiple of ``2 * block``; on a GPU all values."""
    wanted = at_a_time if device.type == "cpu" else numel
    return -(-wanted // (2 * block)) * 2 * block


def block_maxima(values: torch.Tensor, block: int, scratch: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each block of 1-D fp32 values, at most :data:`LARGEST`; the last may be short.

    ``scratch`` is fp32 memory for some whole blocks, or for all values; it is overwritten.
    """
    length = max(min(chunk_length(values.numel(), block, values.device, CHUNK), scratch.numel()) // block, 1) * block
    maxima = values.new_empty(-(-values.numel() // block))
    for chunk, part in zip(torch.split(values, length), torch.split(maxima, length // block), strict=True):
        magnitudes = torch.abs(chunk, out=scratch[: chunk.numel()])
        for rows, column in _blocks(magnitudes, part, block):
            torch.amax(rows, 1, keepdim=True, out=column)
    return maxima.clamp_(max=LARGEST)


def write_scales(maxima: torch.Tensor, levels: int, is_half: bool, out: torch.Tensor) -> None:
    """Encode the scales ``maximum / levels``.

    fp16 has a range from 6e-8 to 65504, too small for the differences that training makes. fp16 scales are therefore
    relative to a power of two near the largest scale (4 bytes before them), and rounded up, so that no value exceeds
    ``levels`` steps and no scale is 0: by at most 0.1 %, and by more only in blocks below ``2**-28`` of the largest
    one, where the spacing of fp16 is at most ``2**-41`` of it.

    ``levels`` is 127 or 7; ``maxima`` is overwritten; ``out`` is uint8 at any offset, 4 bytes a scale,
    or in fp16 4 bytes and 2 a scale.
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
    # Positive floats have the order of their bits as integers: adding 1 gives the next larger float.
    scales.view(torch.int16).add_(scales.float() < relative).clamp_(min=1)
    out[:4].copy_(top.mul_(1.0 / lift).view(torch.uint8))
    out[4:].copy_(scales.view(torch.uint8))


def read_scales(data: torch.Tensor, is_half: bool) -> torch.Tensor:
    """Decode what :func:`write_scales` wrote, uint8 at any offset, to fp32; the same on all ranks."""
    # The data may be unaligned, a copy is not.
    if not is_half:
        return data.clone().view(torch.float32)
    return data[4:].clone().view(torch.float16).float().mul_(data[:4].clone().view(torch.float32))


def quantize(
    values: torch.Tensor,
    scales: torch.Tensor,
    block: int,
    levels: int,
    generator: torch.Generator | None,
    *,
    out: torch.Tensor,
    noise: torch.Tensor,
) -> None:
    """Divide by the scales and round to integers from ``-levels`` to ``levels``, in fp32.

    The scales are the decoded ones, so that their own rounding adds no error. With a generator rounding is stochastic,
    with ``None`` to the nearest, ties to even. ``noise`` is memory like ``out``, which is overwritten.
    """
    for (rows, scale), (ratios, _) in zip(_blocks(values, scales, block), _blocks(out, scales, block), strict=True):
        torch.div(rows, scale, out=ratios)
    if generator is not None:
        # 16 random bits for each value cost a third of torch.rand. The noise is symmetric, so its mean is exactly 0,
        # and less than half a step, so an integer keeps its value: zeros stay zeros.
        bits = torch.empty(-(-values.numel() // 4), dtype=torch.int64, device=values.device)
        bits.random_(-(2**63), None, generator=generator)
        noise.copy_(bits.view(torch.int16)[: values.numel()]).add_(0.5).mul_(2.0**-16)
        # Ratios may exceed ``levels`` by a rounding error (by 0.2 % at LARGEST), which noise could turn into a step.
        out.clamp_(-levels, levels).add_(noise)
    out.round_()


def pack_integers(numbers: torch.Tensor, bits: int, block: int, out: torch.Tensor, scratch: torch.Tensor) -> None:
    """Write 8-bit integers as bytes, and pairs of 4-bit integers as one byte.

    The second integer of a pair, times 16, is from the block after that of the first. So all memory accesses are
    contiguous, and several times as fast as strided ones. After the last pair of blocks the rest is cut in two halves,
    which are paired; a number in the middle is alone. ``out`` takes ``ceil(numbers * bits / 8)`` bytes at any offset;
    ``scratch`` is memory like ``numbers``, which is overwritten.
    """
    if bits == 8:
        out.view(torch.int8).copy_(numbers)
        return
    whole = scratch.view(torch.int8)[: numbers.numel()].copy_(numbers)
    for data, first, second in _pairs(out.view(torch.int8), whole, block):
        paired = data[:, : second.shape[1]]
        torch.mul(second, 16, out=paired)
        paired.add_(first[:, : second.shape[1]])
        if first.shape[1] > second.shape[1]:
            data[:, second.shape[1] :].copy_(first[:, second.shape[1] :])


def unpack_integers(data: torch.Tensor, bits: int, block: int, out: torch.Tensor) -> None:
    """Read the result of :func:`pack_integers`."""
    if bits == 8:
        out.copy_(data.view(torch.int8))
        return
    both = data.view(torch.int8)
    lower = (both + 8).bitwise_and_(15).sub_(8)  # a byte is first + 16 * second, and the first is from -7 to 7
    for (byte, first, second), (low, *_) in zip(_pairs(both, out, block), _pairs(lower, out, block), strict=True):
        first.copy_(byte)
        # Rounding gives the second, with the sign of the byte where it is 0.
        torch.mul(first[:, : second.shape[1]], 1 / 16, out=second).round_()
        first.copy_(low)


def largest_positions(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the positions (int64, ascending) of the ``count`` values of largest magnitude; of equal ones the first."""
    # A key has the magnitude (floats have the order of their bits) and the position: no two keys are equal, so the
    # result does not depend on how ties are broken. Chunk by chunk, since the selection needs 24 bytes for each key.
    length = min(max(SELECTION_CHUNK, count), values.numel())
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
    """Yield the whole blocks as rows, then the short last one, each with the column of ``each`` for its blocks."""
    whole = flat.numel() // block
    if whole > 0:
        yield flat[: whole * block].view(whole, block), each[:whole].unsqueeze(1)
    if flat.numel() > whole * block:
        yield flat[whole * block :].unsqueeze(0), each[whole:].unsqueeze(1)


def _pairs(data: torch.Tensor, numbers: torch.Tensor, block: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield rows of bytes with the rows of their first and second numbers, of which there may be one less."""
    pairs, remainder = divmod(numbers.numel(), 2 * block)
    whole, middle = pairs * block, (remainder + 1) // 2
    if whole:
        rows = numbers[: 2 * whole].view(pairs, 2, block)
        yield data[:whole].view(pairs, block), rows[:, 0], rows[:, 1]
    if data.numel() > whole:
        rest = numbers[2 * whole :].unsqueeze(0)
        yield data[whole:].unsqueeze(0), rest[:, :middle], rest[:, middle:]


class CodePlace(NamedTuple):
    """The place of a code: a part of a bucket, for one cell, or the result that this cell has combined."""

    bucket: int
    cell: int | None  # None for the result

    @property
    def number(self) -> int:
        """The cell in seeds and in saved states, where -1 stands for the result."""
        return -1 if self.cell is None else self.cell

    @classmethod
    def of_number(cls, bucket: int, number: int) -> CodePlace:
        """Return the place that a saved state names."""
        return cls(bucket, None if number == -1 else number)


HUGE = 1e30  # types whose largest number is below this have a smaller range than fp32, the type of decoded values


LINE = 16
"""Values in fp32 of a cache line, 64 bytes."""


class ErrorFeedback:
    """The agreed values and residuals of one bucket group on one sender, sharded like the group.

    The part of a value that a code leaves out is added to the next value of the same place (error feedback: Seide et
    al., 2014; Karimireddy et al., arXiv 1901.09847). It takes effect with :meth:`commit` only, so a round that does not
    count changes nothing.
    """

    def __init__(self, codec: Codec, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._codec = codec
        is_on_cpu = device.type == "cpu"
        self.reference = lasting_memory(numel, dtype) if is_on_cpu else torch.zeros(numel, dtype=dtype, device=device)
        self._residuals: dict[CodePlace, torch.Tensor] = {}
        self._new_residuals: dict[CodePlace, torch.Tensor] = {}
        self._spare: dict[CodePlace, torch.Tensor] = {}
        self._norms: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._block = torch.empty(0, dtype=torch.float32)
        """What is left of the last block of memory for residuals, on a CPU"""

    @property
    def residuals(self) -> Mapping[CodePlace, torch.Tensor]:
        """What the codes of the rounds so far have left out, by the place that it is added to next."""
        return self._residuals

    def rollback(self) -> None:
        """Discard the residuals of a round that does not count."""
        self._spare |= self._new_residuals
        self._new_residuals.clear()
        self._norms.clear()

    def forget(self) -> None:
        """Forget the residuals."""
        self.rollback()
        self._residuals.clear()

    def encode(
        self, place: CodePlace, values: torch.Tensor, code: torch.Tensor, spare: torch.Tensor, seed: int
    ) -> None:
        """Encode values plus the residual of their place, and keep the new residual."""
        if place in self._residuals:
            values.add_(self._residuals[place])
        norm = self._limit(values)
        residual = self._spare.pop(place, None)
        if residual is None:
            residual = self._new_residual(values.numel())
        self._codec.encode_with_residual(values, code, residual=residual, spare=spare, seed=seed)
        self._norms.append((norm, residual.dot(residual)))
        self._new_residuals[place] = residual if self._codec.decay == 1.0 else residual.mul_(self._codec.decay)

    @torch.inference_mode(False)
    def _new_residual(self, numel: int) -> torch.Tensor:
        """Return memory for a residual; on a CPU it is cut from a block as large as the agreed values.

        At multiples of a cache line, as torch's own: the last bits of a sum of squares depend on where values begin.
        """
        device = self.reference.device
        if device.type != "cpu":
            return torch.empty(numel, dtype=torch.float32, device=device)
        length = -(-numel // LINE) * LINE
        if self._block.numel() < length:
            of_all = self.reference.numel()
            self._block = lasting_memory(max(length, of_all + of_all // 256), torch.float32)  # with gaps between them
        residual, self._block = self._block[:numel], self._block[length:]
        return residual

    @staticmethod
    def _limit(values: torch.Tensor) -> torch.Tensor:
        """Replace what has left fp32 by its largest number; return the sum of squares."""
        norm = values.dot(values)
        if values.device.type != "cpu" or not math.isfinite(norm.item()):  # nobody waits for a GPU here
            limit = torch.finfo(torch.float32).max
            norm = torch.dot(values.clamp_(-limit, limit), values)
        return norm

    def difference(self, bucket: Bucket, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write how far a bucket's values are from the agreed ones."""
        reference = self._agreed(bucket)
        if values.dtype == out.dtype:
            torch.sub(values, reference, out=out)
        elif values.dtype.itemsize > out.itemsize:  # subtract before rounding, which could cancel the difference
            out.copy_(torch.sub(values, reference))
        else:  # subtract in the wider type, since a narrow one would round the difference or overflow
            out.copy_(values).sub_(reference)

    def advance(self, bucket: Bucket, mean: torch.Tensor, out: torch.Tensor) -> None:
        """Write a bucket's agreed values plus the mean of the cells' decoded steps, rounded once."""
        limit = torch.finfo(out.dtype).max
        if limit < HUGE:
            out.copy_(mean.add_(self._agreed(bucket)).clamp_(-limit, limit))
        else:
            torch.add(self._agreed(bucket), mean, out=out)

    def _agreed(self, bucket: Bucket) -> torch.Tensor:
        """Return a bucket's agreed values; of 8-bit floats, which torch cannot add, a copy in fp32."""
        reference = self.reference[bucket.start : bucket.stop]
        return reference.float() if reference.itemsize == 1 else reference

    def decode(self, code: torch.Tensor, out: torch.Tensor) -> None:
        """Decode values."""
        self._codec.decode(code, out)

    def commit(self, stage: torch.Tensor | None) -> torch.Tensor | None:
        """Commit a round, whose agreed values ``stage`` holds; return the memory of the old agreed values."""
        for place, residual in self._new_residuals.items():
            if place in self._residuals:
                self._spare[place] = self._residuals[place]
            self._residuals[place] = residual
        self._new_residuals.clear()
        if stage is None:
            return None
        self.reference, spare = stage, self.reference
        return spare

    def norms(self) -> list[tuple[float, float]]:
        """Return, for each code of this round, the squared norms of the values to send and of the residual."""
        if not self._norms:
            return []
        whole, left = torch.stack([torch.stack(column) for column in zip(*self._norms, strict=True)]).tolist()
        return list(zip(whole, left, strict=True))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return copies of the agreed values and of the residuals on this rank."""
        left = {f"left {place.bucket} {place.number}": left.clone() for place, left in self._residuals.items()}
        return {"reference": self.reference.clone()} | left

    @torch.inference_mode(False)
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load what :meth:`state_dict` returned on this rank."""
        reference = state.get("reference")
        if reference is None or reference.shape != self.reference.shape or reference.dtype != self.reference.dtype:
            got = "nothing" if reference is None else f"{reference.numel()} {reference.dtype} values"
            raise CheckpointError(
                f"the codec's state holds {got} for a bucket group of {self.reference.numel()} {self.reference.dtype} "
                "values; resume with the same model, federation, bucket_bytes, form and codec"
            )
        self.rollback()
        self.reference.copy_(reference)
        self._residuals = {}
        for name, left in state.items():
            if name.startswith("left "):
                _, bucket, number = name.split()
                place = CodePlace.of_number(int(bucket), int(number))
                self._residuals[place] = self._new_residual(left.numel()).copy_(left)
