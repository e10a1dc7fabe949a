"""Checks of arguments that every room makes."""

from __future__ import annotations

import operator
from typing import Any

from xffl.errors import ConfigError, XfflError

__all__ = ["integer"]

_KINDS = {0: "an integer of 0 or more", 1: "a positive integer"}


def integer(
    what: str, value: Any, minimum: int | None = 1, maximum: int | None = None, *, error: type[XfflError] = ConfigError
) -> int:
    """Return a plain ``int`` for whatever counts as one by :func:`operator.index`, such as a NumPy integer.

    What is kept, hashed or sent to other ranks is what this returns. Booleans are no integers here, although Python's
    are: a switch in the place of a number is a mistake.

    :param what: What the value is given as, for the message.
    :param value: The value.
    :param minimum: The smallest that is allowed; ``None`` for any.
    :param maximum: The largest that is allowed; ``None`` for any.
    :param error: Class of the error.
    :return: The integer.
    :raises XfflError: of that class, if it is none, or outside the limits.
    """
    try:
        number = None if _is_bool(value) else int(operator.index(value))
    except (TypeError, RuntimeError):  # a tensor on the meta device has no value
        number = None
    is_low = number is not None and minimum is not None and number < minimum
    is_high = number is not None and maximum is not None and number > maximum
    if number is None or is_low or is_high:
        kind = "an integer" if minimum is None else _KINDS.get(minimum, f"an integer of at least {minimum}")
        if maximum is not None:
            kind = f"an integer of {minimum} to {maximum}" if minimum is not None else f"an integer up to {maximum}"
        raise error(f"{what} must be {kind}, got {value!r}")
    return number


def _is_bool(value: Any) -> bool:
    """Tell a boolean of Python, NumPy or PyTorch, of which some have an index, without importing any of them."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
