"""Costs of a round that rounds and forecasts share: the form of an exchange, the depth of its pipeline, codec sizes.

Without torch, so that ``xffl plan`` forecasts what the ranks will do.
"""

from __future__ import annotations

from fractions import Fraction

from xffl.errors import ConfigError

__all__ = [
    "FORMS",
    "IN_FLIGHT",
    "IN_FLIGHT_BYTES",
    "MOST_IN_FLIGHT",
    "STATUS_BYTES",
    "TINY",
    "TINY_FOR_TWO",
    "codec_bytes",
    "codec_ratio",
    "form_of",
    "pipeline_depth",
]

FORMS = ("auto", "all_gather", "two_hop")
"""Every cell sends all of its values to every other, or each cell combines one part and sends the result round."""

TINY = 2**18
"""Bytes up to which three cells or more do not take a second latency to send less."""

TINY_FOR_TWO = 2**25
"""Bytes up to which two cells, which send no less in two hops, do not take a second latency to combine half as much."""

IN_FLIGHT = 4
"""Buckets that a rank has on the slow link at a time, at least; while they cross, those before are combined."""

MOST_IN_FLIGHT = 16
"""And at most; more were not measured."""

IN_FLIGHT_BYTES = 2**25
"""Bytes that are under way towards a rank, where that takes more buckets than :data:`IN_FLIGHT`."""

STATUS_BYTES = 128
"""What each rank tells all others in a vote, see :class:`xffl.aggregation.engine.status.RoundStatus`."""

WIDTHS = {"fp32": 4, "fp16": 2}
"""Bytes of the types that options name."""
BITS = {"int8": 8, "int4": 4}
KINDS = ("none", "bf16", "fp16", "int8", "int4", "topk:DENSITY")
LARGE = 2**20
"""Values of which a ratio is taken."""


def form_of(nbytes: float, cells: int, asked: str, *, is_exact: bool = True) -> str:
    """Choose how averaged values reach all cells; the same on all ranks.

    With all-gather ``C - 1`` copies of a shard leave each of ``C`` cells, with two hops ``2 (C - 1) / C`` at a second
    latency, which what is tiny does not earn back.

    :param nbytes: Bytes of what the same ranks exchange.
    :param cells: Number of cells.
    :param asked: One of :data:`FORMS`.
    :param is_exact: Whether values cross as they are; in two hops, a codec writes the result once more.
    :return: ``all_gather`` or ``two_hop``.
    """
    if cells == 1:
        return "all_gather"
    if asked != "auto":
        return asked
    is_worth_it = nbytes > TINY if cells > 2 else is_exact and nbytes > TINY_FOR_TWO
    return "two_hop" if is_worth_it else "all_gather"


def pipeline_depth(nbytes: float, count: float, cells: int, form: str) -> int:
    """Return how many buckets a rank has on the slow link at a time, in each hop; the same on all ranks.

    :param nbytes: Bytes of a bucket.
    :param count: Number of buckets; a third of them are under way at most, so that work and home overlap the others.
    :param cells: Number of cells.
    :param form: ``all_gather`` or ``two_hop``.
    :return: The number.
    """
    arriving = nbytes * (cells - 1) / (cells if form == "two_hop" else 1)
    most = min(MOST_IN_FLIGHT, count / 3, IN_FLIGHT_BYTES / arriving if arriving else IN_FLIGHT)
    return max(IN_FLIGHT, int(most))


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
            raise ConfigError(f"codec {codec!r}: block {block!r} must be an integer from 1 to 65536; give block=64")
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
