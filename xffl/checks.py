"""Checks of arguments that every room makes."""

from __future__ import annotations

import operator
from typing import Any

from xffl.errors import ConfigError, XfflError

__all__ = ["index_of", "integer", "integer_fields"]

_KINDS = {None: "an integer", 0: "an integer of 0 or more", 1: "a positive integer"}


def integer(
    what: str,
    value: Any,
    minimum: int | None = 1,
    maximum: int | None = None,
    *,
    hint: str = "",
    error: type[XfflError] = ConfigError,
) -> int:
    """Return a plain ``int`` for whatever counts as an integer, see :func:`index_of`.

    Keep, hash and send what this returns: a NumPy integer draws, prints and serializes in other ways than an ``int``.

    :param what: What the value is given as, for the message.
    :param value: The value.
    :param minimum: The smallest that is allowed; ``None`` for any.
    :param maximum: The largest that is allowed; ``None`` for any. It needs a minimum.
    :param hint: What to give, for the message.
    :param error: Class of the error.
    :return: The integer.
    :raises XfflError: of that class, if it is none, or outside the limits.
    """
    number = index_of(value)
    is_low = number is not None and minimum is not None and number < minimum
    is_high = number is not None and maximum is not None and number > maximum
    if number is None or is_low or is_high:
        kind = _KINDS.get(minimum, f"an integer of {minimum} or more")
        if maximum is not None:
            kind = f"an integer from {minimum} to {maximum}"
        raise error(f"{what} must be {kind}, got {value!r}" + (f"; {hint}" if hint else ""))
    return number


def integer_fields(
    holder: Any, *names: str, minimum: int = 1, prefix: str = "", hint: str = "", may_be_none: bool = False
) -> None:
    r"""Check fields of a dataclass, frozen or not, and keep plain integers in them.

    :param holder: The dataclass.
    :param \*names: Names of the fields.
    :param minimum: The smallest that is allowed.
    :param prefix: Put before the names in messages.
    :param hint: What to give, for the message.
    :param may_be_none: Whether they may be ``None``.
    :raises ConfigError: if one is no integer, or too small.
    """
    for name in names:
        value = getattr(holder, name)
        if value is not None or not may_be_none:
            object.__setattr__(holder, name, integer(f"{prefix}{name}", value, minimum, hint=hint))


def index_of(value: Any) -> int | None:
    """Return what :func:`operator.index` makes of a value as a plain ``int``, ``None`` where it is no integer.

    Integers of NumPy and tensors of one integer are integers. Booleans of Python, NumPy and PyTorch are not: a switch
    in the place of a number is a mistake.

    :param value: Any value.
    :return: The integer, or ``None``.
    """
    if type(value) is int:  # the common case is fast
        return value
    if isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool"):
        return None
    try:
        return int(operator.index(value))
    except (TypeError, ValueError, RuntimeError):  # no number, several, or a tensor on the meta device
        return None
