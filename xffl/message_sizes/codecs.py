"""The names of codecs with their options, and how many bytes encoded values take; without torch, for forecasts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from xffl.checks import decimal, did_you_mean, integer, number, one_of, real
from xffl.errors import ConfigError

__all__ = [
    "DECAY",
    "DENSITY",
    "LARGEST_EXACT_BLOCK",
    "MAX_BLOCK",
    "SPARSE_BLOCK",
    "CodecSpec",
    "block_bytes",
    "codec_bytes",
    "codec_ratio",
    "kept_in_blocks",
    "kept_values",
    "read_codec",
    "scale_bytes",
    "sparse_bytes",
    "topk_bytes",
    "two_bit_bytes",
]

CODECS: dict[str, dict[str, tuple[str, ...]]] = {
    "none": {},
    "bf16": {},
    "fp16": {},
    "int8": {"block": (), "scale": ("fp16", "fp32"), "rounding": ("nearest", "stochastic")},
    "int4": {"block": (), "scale": ("fp16", "fp32"), "rounding": ("nearest", "stochastic")},
    "int2": {"block": ()},
    "sparseloco": {"density": (), "decay": ()},
    "topk": {"value": ("fp32", "fp16")},
}
"""What a codec's name may begin with, and the options that may follow with what they may be."""
NAMES = ", ".join(CODECS) + ":DENSITY"
MAX_BLOCK = 2**16
"""Largest block: more values share one scale only where the scale's bytes no longer matter."""
LARGEST_EXACT_BLOCK = 2**12
"""Largest block of ``int2``, whose sums are exact."""
SPARSE_BLOCK = 2**12
"""Values of a block of ``sparseloco``: as many as 12 bits can tell apart."""
DENSITY = 1 / 64
"""Share of the values that ``sparseloco`` sends: 64 of 4096."""
DECAY = 0.95
"""What ``sparseloco`` multiplies residuals by before they are added to the next values."""
SHARES = {"density": DENSITY, "decay": DECAY}
"""Options that are numbers from 0 to 1, with what ``sparseloco`` takes without them."""
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
    decay: float = 1.0

    def nbytes(self, numel: int) -> int:
        """Return the exact size of encoded values; 0 for no values."""
        if self.kind in ("int8", "int4"):
            return block_bytes(numel, int(self.kind.removeprefix("int")), self.block, self.scale)
        if self.kind == "int2":
            return two_bit_bytes(numel, self.block)
        if self.kind == "sparseloco":
            return sparse_bytes(numel, self.density)
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


def two_bit_bytes(numel: int, block: int) -> int:
    """Return the size of values of two bits in blocks, each with two magnitudes of 16 bits."""
    return 4 * -(-numel // block) + -(-numel // 4)


def sparse_bytes(numel: int, density: float) -> int:
    """Return the size of what is kept of each block, with 14 bits for each value, and two magnitudes for each block."""
    kept = kept_in_blocks(numel, density)
    return 4 * -(-numel // SPARSE_BLOCK) + -(-3 * kept // 2) + -(-kept // 4)


def kept_in_blocks(numel: int, density: float) -> int:
    """Return how many values a density keeps, of each block of ``sparseloco`` for itself."""
    whole, rest = divmod(numel, SPARSE_BLOCK)
    return whole * kept_values(SPARSE_BLOCK, density) + kept_values(rest, density)


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
    if kind == "sparseloco":
        options = dict(SHARES)
    known = CODECS[kind]
    given: set[str] = set()
    for part in parts:
        key, equals, value = part.partition("=")
        if key not in known or not equals or key in given:
            knob = "give " + " or ".join(f"{key}=..." for key in known) if known else "give the codec without options"
            meant = did_you_mean(key, known)
            raise ConfigError(f"codec {name!r}: option {part!r} is unknown or given twice{meant}; {knob}")
        given.add(key)
        options[key] = value
        if key == "block":
            most = LARGEST_EXACT_BLOCK if kind == "int2" else MAX_BLOCK
            given_number = value if decimal(value) is None else decimal(value)
            options[key] = integer(f"codec {name!r}: block", given_number, 1, most, hint="give block=64")
        elif key in SHARES:
            share = value if real(value) is None else real(value)
            above = 0.0 if key == "density" else -math.inf
            hint = f"give {key}={SHARES[key]:g}"
            options[key] = number(f"codec {name!r}: {key}", share, 0.0, maximum=1.0, above=above, hint=hint)
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
