"""What refuses every operator of torch whose bits may differ between processors; see ``arithmetic``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from xffl.compat.pytorch import DispatchMode
from xffl.errors import ConfigError

__all__ = ["ElementaryOnly"]

_ROUNDED_ONCE = ("add", "sub", "rsub", "mul", "div", "_foreach_add", "_foreach_sub", "_foreach_mul", "_foreach_div")
"""Operators that IEEE 754 prescribes, in fp32 and fp64; with what :func:`_wrong_operands` refuses."""

_CHOICES = """
eq ne lt le gt ge equal isnan isinf isposinf isneginf is_nonzero where sign sgn signbit copysign abs neg positive
minimum maximum fmin fmax amin amax clamp clamp_min clamp_max relu nan_to_num any all round floor ceil trunc
logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_xor bitwise_not
bitwise_left_shift bitwise_right_shift
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
    "pow": "write it as products; a power of a number is xffl.aggregation.algorithms.server_rules.power",
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
