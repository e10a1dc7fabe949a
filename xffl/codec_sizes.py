"""The names of codecs with their options, and how many bytes encoded values take; without torch, for forecasts."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from xffl.checks import decimal, did_you_mean, integer, one_of, real
from xffl.errors import ConfigError

__all__ = [
    "MAX_BLOCK",
    "CodecSpec",
    "block_bytes",
    "codec_bytes",
    "codec_ratio",
    "kept_values",
    "read_codec",
    "scale_bytes",
    "topk_bytes",
]

CODECS: dict[str, dict[str, tuple[str, ...]]] = {
    "none": {},
    "bf16": {},
    "fp16": {},
    "int8": {"block": (), "scale": ("fp16", "fp32"), "rounding": ("nearest", "stochastic")},
    "int4": {"block": (), "scale": ("fp16", "fp32"), "rounding": ("nearest", "stochastic")},
    "topk": {"value": ("fp32", "fp16")},
}
"""What a codec's name may begin with, and the options that may follow with what they may be."""
NAMES = ", ".join(CODECS) + ":DENSITY"
MAX_BLOCK = 2**16
"""Largest block: more values share one scale only where the scale's bytes no longer matter."""
LARGE = 2**20  # values of which a ratio is taken


@dataclass(frozen=True)
class CodecSpec:
    """What a codec's name says, and how many bytes it writes; :func:`read_codec` makes one."""

    kind: str
    block: int = 64
    scale: str = "fp16"
    rounding: str = "nearest"
    density: float = 1.0
    value: str = "fp32"

    def nbytes(self, numel: int) -> int:
        """Return the exact size of encoded values; 0 for no values."""
        if self.kind in ("int8", "int4"):
            return block_bytes(numel, int(self.kind.removeprefix("int")), self.block, self.scale)
        if self.kind == "topk":
            return topk_bytes(numel, self.density, self.value)
        return numel * (4 if self.kind == "none" else 2)


def scale_bytes(numel: int, block: int, scale: str) -> int:
    """Return the size of the scales of blocks of values: fp16 ones have the fp32 number in front that they refer to."""
    scales = -(-numel // block)
    return 4 * scales if scale == "fp32" or not numel else 4 + 2 * scales


def block_bytes(numel: int, bits: int, block: int, scale: str) -> int:
    """Return the size of values of so many bits in blocks, with their scales."""
    return scale_bytes(numel, block, scale) + -(-numel * bits // 8)


def topk_bytes(numel: int, density: float, value: str) -> int:
    """Return the size of the values that a density keeps, each with a position of 32 bits."""
    return kept_values(numel, density) * (8 if value == "fp32" else 6)


def kept_values(numel: int, density: float) -> int:
    """Return how many of some values a density keeps, rounded up."""
    # The decimal number that was written: 0.07 of 100 values are 7, where floats would round up to 8.
    fraction = Fraction(repr(float(density)))
    return -(-numel * fraction.numerator // fraction.denominator)


def read_codec(name: object) -> CodecSpec:
    """Read a codec's name with its options; pure."""
    if not isinstance(name, str):
        raise ConfigError(f"codec {name!r} is neither a name nor a Codec; give one of {NAMES}")
    kind, colon, text = name.partition(":")
    if kind not in CODECS:
        raise ConfigError(f"codec {name!r} is unknown{did_you_mean(kind, CODECS)}; give one of {NAMES}")
    parts = text.split(",") if colon else []
    options: dict[str, Any] = {}
    if kind == "topk":
        density = parts.pop(0) if parts else ""
        options["density"] = real(density) or 0.0
        if not 0 < options["density"] <= 1:
            raise ConfigError(
                f"codec {name!r}: the density, the share of values that it sends, must be a number above 0 and at most "
                f"1, got {density!r}; give topk:0.01 for 1 %"
            )
    known = CODECS[kind]
    for part in parts:
        key, equals, value = part.partition("=")
        if key not in known or not equals or key in options:
            knob = "give " + " or ".join(f"{key}=..." for key in known) if known else "give the codec without options"
            meant = did_you_mean(key, known)
            raise ConfigError(f"codec {name!r}: option {part!r} is unknown or given twice{meant}; {knob}")
        options[key] = value
        if key == "block":
            number = value if decimal(value) is None else decimal(value)
            options[key] = integer(f"codec {name!r}: block", number, 1, MAX_BLOCK, hint="give block=64")
        else:
            one_of(f"codec {name!r}: {key}", value, known[key], hint=f"give {key}={known[key][0]}")
    return CodecSpec(kind, **options)


def codec_bytes(codec: str, numel: int) -> int:
    """Return the bytes of so many values, encoded as ``int8``, ``int4:block=128``, ``topk:0.01`` or another name says.

    Local, without torch. ``none`` stands for fp32.
    """
    return read_codec(codec).nbytes(numel)


def codec_ratio(codec: str, bytes_per_parameter: float = 4.0) -> float:
    """Return the bytes that cross over the bytes of the model, for large tensors; local.

    The codec is as in :func:`codec_bytes`; ``none`` gives 1, whatever a parameter takes.
    """
    return 1.0 if codec == "none" else codec_bytes(codec, LARGE) / (bytes_per_parameter * LARGE)
