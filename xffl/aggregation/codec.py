"""Codecs: what a bucket looks like while it crosses the slow link."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction

import torch

from xffl.aggregation import quantize as q
from xffl.checks import integer, integer_fields
from xffl.errors import ConfigError

__all__ = ["Blockwise", "Cast", "Codec", "TopK", "codec_of"]

MAX_BLOCK = 2**16
"""Largest block: more values share one scale only where the scale's bytes no longer matter."""

MAX_POSITIONS = 2**31
"""Values that 32-bit positions can tell apart."""

NAMES = ("none", "bf16", "fp16", "int8", "int4", "topk")
"""What a codec's name may begin with."""

FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Data types by the names that options give them."""


class Codec(ABC):
    """Turn fp32 values into fewer bytes, and back.

    Local: nothing is communicated. Codecs hold parameters and no state; those with equal parameters are equal, and
    ``codec_of(str(codec))`` gives an equal one. The same values and seed give the same bytes, and the same bytes decode
    to the same values on every rank. Nothing waits for a GPU.
    """

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Return the exact size of encoded values.

        :param numel: Number of values.
        :return: Bytes; 0 for no values.
        """

    @abstractmethod
    def encode(self, values: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        """Encode finite values.

        :param values: fp32, 1-D, contiguous, finite; only read.
        :param out: uint8, 1-D, contiguous, ``nbytes(values.numel())`` bytes on the same device, at any offset;
            overwritten.
        :param seed: Seed of stochastic rounding, not negative. It alone decides the noise: torch's own generators are
            neither used nor moved. On a CPU and on a GPU the noise differs.
        :raises ConfigError: if ``out`` has another length.
        """

    @abstractmethod
    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Decode what :meth:`encode` wrote.

        :param data: uint8, 1-D, contiguous, ``nbytes(out.numel())`` bytes, at any offset; only read.
        :param out: fp32, 1-D, contiguous, on the same device; overwritten.
        :raises ConfigError: if ``data`` has another length.
        """

    def _check(self, values: torch.Tensor, data: torch.Tensor) -> None:
        needed = self.nbytes(values.numel())
        if data.numel() != needed:
            raise ConfigError(
                f"the buffer has {data.numel()} bytes, but {values.numel()} values as {self} take {needed}; "
                "give one of nbytes(numel)"
            )


@dataclass(frozen=True)
class Cast(Codec):
    """Round to a 16-bit float, to the nearest, ties to even; 0.5 of the bytes.

    Error: ``bf16`` at most ``2**-8 * |x|`` (``2**-134`` where ``|x| < 2**-126``), ``fp16`` at most ``2**-11 * |x|``
    (``2**-25`` where ``|x| < 2**-14``). What lies beyond the type's largest number becomes that number, not infinity.
    Values that the type holds keep every bit.

    :param kind: ``bf16`` or ``fp16``.
    :raises ConfigError: if ``kind`` is anything else.
    """

    kind: str

    def __post_init__(self) -> None:
        _check_choice("float type", self.kind, ("bf16", "fp16"))

    def __str__(self) -> str:
        return self.kind

    def nbytes(self, numel: int) -> int:
        """Return two bytes for each value.

        :param numel: Number of values.
        :return: Bytes.
        """
        return 2 * numel

    def encode(self, values: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        """Round the values; see :meth:`Codec.encode`.

        :param values: fp32 values.
        :param out: Bytes to write.
        :param seed: Not used: the rounding is to the nearest.
        """
        self._check(values, out)
        if values.numel() == 0:
            return
        dtype = FLOATS[self.kind]
        largest = torch.finfo(dtype).max
        length = min(q.chunk_length(values.numel(), 1, values.device), values.numel())
        clamped, scratch = values.new_empty(length), values.new_empty(length, dtype=dtype)
        for chunk, part in zip(torch.split(values, length), torch.split(out, 2 * length), strict=True):
            inside = torch.clamp(chunk, -largest, largest, out=clamped[: chunk.numel()])
            part.copy_(scratch[: chunk.numel()].copy_(inside).view(torch.uint8))

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Widen the values, exactly; see :meth:`Codec.decode`.

        :param data: Bytes of :meth:`encode`.
        :param out: fp32 values to write.
        """
        self._check(out, data)
        if out.numel() == 0:
            return
        length = min(q.chunk_length(out.numel(), 1, out.device), out.numel())
        scratch = out.new_empty(length, dtype=FLOATS[self.kind])
        for chunk, part in zip(torch.split(out, length), torch.split(data, 2 * length), strict=True):
            words = scratch[: chunk.numel()]
            words.view(torch.uint8).copy_(part)
            chunk.copy_(words)


@dataclass(frozen=True)
class Blockwise(Codec):
    """Round to whole multiples of a step: 8 or 4 bits for each value, one step (scale) for each block of values.

    The step of a block is ``s = max|x| / 127`` (8 bits) or ``max|x| / 7`` (4 bits), symmetric around 0. Blocks run over
    the flat values in the order given; the last may be short. With blocks of 64 and fp16 scales 8 bits take 0.258 and
    4 bits 0.133 of the fp32 bytes.

    Error: with ``t`` the step as it is stored, nearest rounding is off by at most ``t / 2 * (1 + 2**-15)``, stochastic
    rounding by at most ``t * (1 + 2**-15)``. fp32: ``t <= s * (1 + 2**-23) + 2**-120``. fp16, with ``largest`` the
    largest magnitude of all the values given: ``t <= 1.001 * s + 2**-41 * max(largest, 2**-75)``, since these scales
    are relative to ``largest`` and rounded up (:func:`xffl.aggregation.quantize.write_scales` says why). Stochastic
    rounding is unbiased up to ``2**-16`` of a step. Zeros stay zeros. With nearest rounding and fp16 scales decoded
    values encode to themselves again, but for blocks of less than ``2**-28`` of the largest one. Values from 0.998 of
    the largest fp32 on saturate.

    Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022 (arXiv:2110.02861); stochastic rounding:
    Alistarh et al., QSGD, 2017 (arXiv:1610.02132).

    :param bits: Bits for each value, 8 or 4.
    :param block: Values that share a scale, from 1 to 65536.
    :param scale: Type of the scales, ``fp16`` (with 4 bytes more in front) or ``fp32``.
    :param rounding: ``nearest`` (ties to even) or ``stochastic``.
    :raises ConfigError: if a parameter is anything else.
    """

    bits: int
    block: int = 64
    scale: str = "fp16"
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        integer_fields(self, "bits")
        if self.bits not in (8, 4):
            raise ConfigError(f"{self.bits!r} bits for each value are not offered; give 8 or 4")
        object.__setattr__(self, "block", integer("block", self.block, 1, MAX_BLOCK, hint="give block=64"))
        _check_choice("scale", self.scale, ("fp16", "fp32"))
        _check_choice("rounding", self.rounding, ("nearest", "stochastic"))

    def __str__(self) -> str:
        scale = "" if self.scale == "fp16" else f",scale={self.scale}"
        rounding = "" if self.rounding == "nearest" else f",rounding={self.rounding}"
        return f"int{self.bits}:block={self.block}{scale}{rounding}"

    def nbytes(self, numel: int) -> int:
        """Return the bytes of scales and values.

        :param numel: Number of values.
        :return: Bytes.
        """
        return self._head(numel) + -(-numel * self.bits // 8)

    def encode(self, values: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        """Find the scales, then round with them as they are stored; see :meth:`Codec.encode`.

        :param values: fp32 values.
        :param out: Bytes to write.
        :param seed: Seed of stochastic rounding.
        """
        self._check(values, out)
        if values.numel() == 0:
            return
        head, body = self._parts(out, values.numel())
        q.write_scales(q.block_maxima(values, self.block), self._levels, self._is_half, head)
        scales = q.read_scales(head, self._is_half)
        generator = None
        if self.rounding == "stochastic":
            # The CPU's generator takes 32 bits only: the upper ones are folded in.
            generator = torch.Generator(values.device).manual_seed((seed ^ (seed >> 32)) & 0xFFFFFFFF)
        length = q.chunk_length(values.numel(), self.block, values.device)
        scratch = q.scratch_for(values, length)
        for chunk, scale, part in zip(*self._chunks(values, scales, body, length), strict=True):
            numbers = q.quantize(chunk, scale, self.block, self._levels, generator, scratch)
            q.pack(numbers, self.bits, self.block, part)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Multiply by the scales; see :meth:`Codec.decode`. With fp16 scales the product is exact.

        :param data: Bytes of :meth:`encode`.
        :param out: fp32 values to write.
        """
        self._check(out, data)
        if out.numel() == 0:
            return
        head, body = self._parts(data, out.numel())
        scales = q.read_scales(head, self._is_half)
        length = q.chunk_length(out.numel(), self.block, out.device)
        for chunk, scale, part in zip(*self._chunks(out, scales, body, length), strict=True):
            q.unpack(part, self.bits, self.block, chunk)
            q.dequantize(chunk, scale, self.block)

    @property
    def _levels(self) -> int:
        return int(2 ** (self.bits - 1)) - 1

    @property
    def _is_half(self) -> bool:
        return self.scale == "fp16"

    def _head(self, numel: int) -> int:
        """Return the bytes of the scales."""
        scales = -(-numel // self.block)
        return 4 * scales if not self._is_half or numel == 0 else 4 + 2 * scales

    def _parts(self, data: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the bytes of the scales and those of the values."""
        return data[: self._head(numel)], data[self._head(numel) :]

    def _chunks(
        self, values: torch.Tensor, scales: torch.Tensor, body: torch.Tensor, length: int
    ) -> tuple[tuple[torch.Tensor, ...], ...]:
        return (
            torch.split(values, length),
            torch.split(scales, length // self.block),
            torch.split(body, length * self.bits // 8),
        )


@dataclass(frozen=True)
class TopK(Codec):
    """Keep the ``ceil(density * numel)`` values of largest magnitude, with their 32-bit positions; the others become 0.

    Of equal magnitudes the first are kept. Costs 8 bytes for each value kept (``value=fp16``: 6): 0.02 of the fp32
    bytes at a density of 0.01.

    Error: what is dropped is at most as large as the smallest value kept; what is kept is exact (``fp16``: rounded as
    :class:`Cast` does). Without error feedback the small values never cross.

    Aji and Heafield, Sparse Communication for Distributed Gradient Descent, 2017 (arXiv:1704.05021); with error
    feedback: Stich et al., Sparsified SGD with Memory, 2018 (arXiv:1809.07599).

    :param density: Part of the values that is kept, above 0, at most 1.
    :param value: Type of the values kept, ``fp32`` or ``fp16``.
    :raises ConfigError: if a parameter is anything else.
    """

    density: float
    value: str = "fp32"

    def __post_init__(self) -> None:
        if isinstance(self.density, bool) or not isinstance(self.density, (int, float)) or not 0 < self.density <= 1:
            raise ConfigError(f"density {self.density!r} is not above 0 and at most 1; give topk:0.01 for 1 %")
        _check_choice("value", self.value, ("fp32", "fp16"))

    def __str__(self) -> str:
        return f"topk:{float(self.density)!r}" + ("" if self.value == "fp32" else f",value={self.value}")

    def nbytes(self, numel: int) -> int:
        """Return the bytes of positions and values.

        :param numel: Number of values.
        :return: Bytes.
        """
        return self._kept(numel) * (4 + FLOATS[self.value].itemsize)

    def encode(self, values: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        """Write the positions, ascending, then the values; see :meth:`Codec.encode`.

        :param values: fp32 values, fewer than ``2**31``.
        :param out: Bytes to write.
        :param seed: Not used.
        :raises ConfigError: if there are too many values for 32-bit positions.
        """
        self._check(values, out)
        if values.numel() > MAX_POSITIONS:
            raise ConfigError(f"{values.numel()} values at once pass 32-bit positions; give smaller buckets")
        if values.numel() == 0:
            return
        positions = q.largest_positions(values, self._kept(values.numel()))
        kept = values[positions]
        if self.value == "fp16":
            largest = torch.finfo(torch.float16).max
            kept = kept.clamp_(-largest, largest).half()
        out[: 4 * kept.numel()].copy_(positions.int().view(torch.uint8))
        out[4 * kept.numel() :].copy_(kept.view(torch.uint8))

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Write zeros, then the values that were kept; see :meth:`Codec.decode`.

        :param data: Bytes of :meth:`encode`.
        :param out: fp32 values to write.
        """
        self._check(out, data)
        split = 4 * self._kept(out.numel())
        # Copies are aligned.
        positions = data[:split].clone().view(torch.int32).long()
        kept = data[split:].clone().view(FLOATS[self.value]).float()
        out.zero_().scatter_(0, positions, kept)

    def _kept(self, numel: int) -> int:
        # The decimal number that was written: 0.07 of 100 values are 7, where floats would round up to 8.
        density = Fraction(repr(float(self.density)))
        return -(-numel * density.numerator // density.denominator)


def codec_of(name: str | Codec) -> Codec | None:
    """Return the codec that a name stands for.

    ``none``, ``bf16``, ``fp16``, ``int8``, ``int4`` (options ``block=64``, ``scale=fp16`` or ``fp32``,
    ``rounding=nearest`` or ``stochastic``), ``topk:DENSITY`` (option ``value=fp32`` or ``fp16``); options follow a
    colon and are separated by commas: ``int8:block=128,rounding=stochastic``, ``topk:0.01,value=fp16``.

    :param name: The name; a codec stands for itself.
    :return: The codec; ``None`` for ``none``: values cross as they are.
    :raises ConfigError: if the name, an option or its value is unknown.
    """
    if isinstance(name, Codec):
        return name
    if not isinstance(name, str):
        raise ConfigError(f"codec {name!r} is neither a name nor a Codec; give one of {', '.join(NAMES)}")
    kind, colon, text = name.partition(":")
    if kind not in NAMES:
        raise ConfigError(f"codec {name!r} is unknown; give one of {', '.join(NAMES)}")
    try:
        return _made(kind, text.split(",") if colon else [])
    except ConfigError as error:
        raise ConfigError(f"codec {name!r}: {error}") from error


def _made(kind: str, parts: list[str]) -> Codec | None:
    if kind in ("int8", "int4"):
        options = _options(parts, ("block", "scale", "rounding"))
        block = options.pop("block", "64")
        if not (block.isascii() and block.isdecimal()):
            raise ConfigError(f"block {block!r} is no whole number from 1 to {MAX_BLOCK}; give block=64")
        return Blockwise(int(kind.removeprefix("int")), int(block), **options)
    if kind == "topk":
        try:
            density = float(parts[0]) if parts else 0.0
        except ValueError:
            density = 0.0
        if not 0 < density <= 1:
            raise ConfigError(
                f"density {','.join(parts[:1])!r} is no number above 0 and at most 1; give topk:0.01 for 1 %"
            )
        return TopK(density, **_options(parts[1:], ("value",)))
    _options(parts, ())
    return None if kind == "none" else Cast(kind)


def _options(parts: list[str], known: tuple[str, ...]) -> dict[str, str]:
    """Return what stands on both sides of each equals sign."""
    options: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if key not in known or not equals:
            told = f"give {' or '.join(f'{k}=...' for k in known)}" if known else "give the codec without options"
            raise ConfigError(f"option {part!r} is unknown; {told}")
        if key in options:
            raise ConfigError(f"option {key!r} is given twice; give it once")
        options[key] = value
    return options


def _check_choice(what: str, given: str, choices: tuple[str, ...]) -> None:
    if given not in choices:
        raise ConfigError(f"{what} {given!r} is not offered; give {' or '.join(choices)}")
