"""Arithmetic that gives the same bits on every processor: elementary operations, roots, and what refuses all others.

IEEE 754 prescribes every bit of a sum, difference, product, quotient and conversion. What follows the mean of a round
(server rules, combiners) is made of these alone, each in a kernel of its own, so that every rank may compute it for
itself. Fused operations (``addcmul``, ``lerp``, ``alpha=``), powers, reductions and fp32 roots are not prescribed: they
differ between processors, versions of torch, and the vector units of one family of CPUs.

Two things remain that a program cannot write around: a thread that flushes subnormal numbers to zero gives other bits,
and the sign and payload of a NaN differ between CPUs and GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from xffl.compat.pytorch import DispatchMode
from xffl.errors import ConfigError

__all__ = [
    "CHUNK",
    "ElementaryOnly",
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


_ROUNDED_ONCE = ("add", "sub", "rsub", "mul", "div", "_foreach_add", "_foreach_sub", "_foreach_mul", "_foreach_div")
"""Operators that IEEE 754 prescribes, in fp32 and fp64; with what :func:`_wrong_operands` refuses."""

_CHOICES = """
eq ne lt le gt ge equal isnan isinf isposinf isneginf is_nonzero where sign sgn signbit copysign abs neg positive
minimum maximum fmin fmax amin amax clamp clamp_min clamp_max relu nan_to_num any all round floor ceil trunc
logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_xor bitwise_not
_foreach_abs _foreach_neg _foreach_sign _foreach_minimum _foreach_maximum
"""
_COPIES = """
clone copy _to_copy cat stack fill zero masked_fill index index_select gather scatter flip roll repeat constant_pad_nd
zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full scalar_tensor arange
empty empty_like new_empty empty_strided new_empty_strided resize set
lift lift_fresh lift_fresh_copy _local_scalar_dense _foreach_copy _foreach_zero
"""
_VIEWS = """
view _unsafe_view _reshape_alias as_strided slice select split split_with_sizes unbind expand t transpose permute
unsqueeze squeeze alias detach diagonal unfold
"""
_EXACT = frozenset(" ".join((_CHOICES, _COPIES, _VIEWS)).split())
"""Operators that round nothing."""

_INSTEAD = {
    "sqrt": "fp32 roots come from a vector library: take xffl.aggregation.arithmetic.square_root",
    "rsqrt": "take xffl.aggregation.arithmetic.square_root, and divide",
    "pow": "write it as products; a power of a number is xffl.aggregation.arithmetic.power",
    "square": "write it as x * x",
    "reciprocal": "divide a tensor of ones by it",
    "sort": "stable=True leaves zeros of both signs in their order",
    "lerp": "write it as sub, mul and add",
    "addcmul": "write it as mul and add, each by itself",
    "addcdiv": "write it as div, mul and sub, each by itself",
    "sum": "its order is the processor's: add the rows one after another",
    "mean": "its order is the processor's: add the rows one after another, and divide",
    "median": "take stable sorted rows, or minimum and maximum",
}
"""What to write in place of operators that one thinks of first."""


class ElementaryOnly(DispatchMode):  # type: ignore[no-untyped-call]
    """Refuse, while it is entered, every operator of torch whose bits may differ between processors; local.

    ``with ElementaryOnly("server rule Mine"): ...`` lets pass: ``add``, ``sub``, ``mul`` and ``div`` of fp32 or fp64,
    tensor by tensor, or with a number by which is added or multiplied (it is rounded to the tensor's type first); roots
    in fp64; and all that rounds nothing: copies, casts, views, comparisons, ``where``, signs, minimum and maximum. Not
    ``alpha=`` and ``value=``, fused operators, powers, reductions, nor a division by a number or a tensor without
    dimensions, which is a product with the reciprocal on a GPU. Python's own floats it does not see.

    :param who: Whose operators these are, for the messages.
    :raises ConfigError: out of the operator, with its name and what to use.
    """

    def __init__(self, who: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._who = who

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator that is allowed."""
        named = dict(kwargs or {})
        if why := _refusal(str(func), list(args), named):
            raise ConfigError(
                f"{self._who} calls {func}, whose bits may differ between processors: {why}; a rule or combiner that "
                "is to give the same bits on all of them takes elementary operations only, each by itself"
            )
        call: Callable[..., Any] = func
        return call(*args, **named)


def _refusal(operator: str, args: Sequence[Any], named: Mapping[str, Any]) -> str:
    """Return why an operator, such as ``aten.add_.Tensor``, may give other bits elsewhere; empty if it may not."""
    namespace, name, overload = operator.split(".", 2)
    # In-place forms end in an underscore; "_foreach_" and "_to_copy" begin with one.
    plain = name.rstrip("_") if namespace == "aten" else ""
    if plain in _ROUNDED_ONCE:
        return _wrong_operands(plain, args, named)
    if plain in _EXACT:
        return ""
    if plain == "sqrt" and _floats(args) <= {torch.float64}:
        return ""
    if plain == "sort" and (named.get("stable") or (overload.startswith("stable") and True in args[1:2])):
        return ""
    return _INSTEAD.get(plain, "it is none of the operations that IEEE 754 prescribes to the last bit")


def _wrong_operands(name: str, args: Sequence[Any], named: Mapping[str, Any]) -> str:
    """Return what makes a sum, product or quotient one that is rounded otherwise on some processors."""
    operands = args[:2]
    alpha = named.get("alpha", args[2] if len(args) > 2 and "foreach" not in name else 1)
    if alpha != 1:
        return f"alpha={alpha} may be fused with the sum: multiply first, and add then"
    if (floats := _floats(operands)) and not floats & {torch.float32, torch.float64}:
        return f"it computes in {', '.join(map(str, floats))}: convert to fp32 first"
    if not name.endswith("div"):
        return ""
    if named.get("rounding_mode") is not None:
        return f"rounding_mode={named['rounding_mode']!r} takes several steps"
    divisors = operands[1] if isinstance(operands[1], (list, tuple)) else [operands[1]]
    if all(isinstance(divisor, torch.Tensor) and divisor.dim() > 0 for divisor in divisors):
        return ""
    return (
        "a number, or a tensor without dimensions, divides by its reciprocal on a GPU: take "
        "xffl.aggregation.arithmetic.divide, or a tensor of shape (1,) on the same device"
    )


def _floats(operands: Sequence[Any]) -> set[torch.dtype]:
    """Return the floating-point types of the tensors among operands, also in lists of them."""
    found: set[torch.dtype] = set()
    for operand in operands:
        if isinstance(operand, (list, tuple)):
            found |= _floats(operand)
        elif isinstance(operand, torch.Tensor) and (operand.is_floating_point() or operand.is_complex()):
            found.add(operand.dtype)
    return found
