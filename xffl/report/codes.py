"""How many bytes a codec makes of values: the sizes of :mod:`xffl.aggregation.compression.codecs`, without torch."""

from __future__ import annotations

from fractions import Fraction

from xffl.errors import ConfigError

__all__ = ["codec_bytes", "codec_ratio"]

WIDTHS = {"fp32": 4, "fp16": 2}
"""Bytes of the types that options name."""
BITS = {"int8": 8, "int4": 4}
KINDS = ("none", "bf16", "fp16", "int8", "int4", "topk:DENSITY")
LARGE = 2**20
"""Values of which a ratio is taken."""


def codec_bytes(codec: str, numel: int) -> int:
    """Return the size of encoded values, as ``codec_of(codec).nbytes(numel)`` does; local, without torch.

    :param codec: A codec's name, such as ``int8``, ``int4:block=128,scale=fp32`` or ``topk:0.01``; ``none`` stands for
        fp32 as it is.
    :param numel: Number of values.
    :return: Bytes; 0 for no values.
    :raises ConfigError: if the name, an option or its value is unknown.
    """
    kind, colon, text = codec.partition(":")
    parts = text.split(",") if colon else []
    if kind in ("none", "bf16", "fp16"):
        _options(codec, parts, ())
        return numel * (4 if kind == "none" else 2)
    if kind in BITS:
        options = _options(codec, parts, ("block", "scale", "rounding"))
        block = options.get("block", "64")
        if not (block.isascii() and block.isdecimal() and 1 <= int(block) <= 2**16):
            raise ConfigError(f"codec {codec!r}: block {block!r} is no whole number from 1 to 65536; give block=64")
        scales = -(-numel // int(block))
        # fp16 scales have an fp32 number in front that all of them are relative to.
        head = 4 * scales if _width(codec, options.get("scale", "fp16")) == 4 or not numel else 4 + 2 * scales
        return head + -(-numel * BITS[kind] // 8)
    if kind == "topk" and not parts:
        raise ConfigError(f"codec {codec!r} lacks its density, the share of values that it sends; give topk:0.01")
    if kind == "topk":
        try:
            density = Fraction(repr(float(parts[0])))
        except (ValueError, OverflowError):
            density = Fraction(0)
        if not 0 < density <= 1:
            raise ConfigError(f"codec {codec!r}: density {parts[0]!r} is not above 0 and at most 1; give topk:0.01")
        value = _options(codec, parts[1:], ("value",)).get("value", "fp32")
        return -(-numel * density.numerator // density.denominator) * (4 + _width(codec, value))
    raise ConfigError(f"codec {codec!r} is unknown; give one of {', '.join(KINDS)}")


def codec_ratio(codec: str, bytes_per_parameter: float = 4.0) -> float:
    """Return the bytes that cross over the bytes of the model, for large tensors; local.

    :param codec: As in :func:`codec_bytes`; ``none`` gives 1, whatever a parameter takes.
    :param bytes_per_parameter: Bytes of a parameter in the model, above 0.
    :return: The ratio.
    :raises ConfigError: if the name, an option or its value is unknown.
    """
    return 1.0 if codec == "none" else codec_bytes(codec, LARGE) / (bytes_per_parameter * LARGE)


def _options(codec: str, parts: list[str], known: tuple[str, ...]) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if key not in known or not equals or key in options:
            told = "give " + " or ".join(f"{name}=..." for name in known) if known else "give the codec without options"
            raise ConfigError(f"codec {codec!r}: option {part!r} is unknown or given twice; {told}")
        if key == "rounding" and value not in ("nearest", "stochastic"):
            raise ConfigError(f"codec {codec!r}: rounding {value!r} is not offered; give nearest or stochastic")
        options[key] = value
    return options


def _width(codec: str, name: str) -> int:
    if name not in WIDTHS:
        raise ConfigError(f"codec {codec!r}: type {name!r} is not offered; give {' or '.join(WIDTHS)}")
    return WIDTHS[name]
