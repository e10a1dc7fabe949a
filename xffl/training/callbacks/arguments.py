"""What callbacks accept as arguments."""

from __future__ import annotations

import math

from xffl.checks import integer
from xffl.errors import ConfigError

__all__ = ["check_seconds", "find_count"]


def find_count(name: str, value: object) -> int | None:
    """Return a whole number of at least 1, or ``None`` where none is given.

    :param name: The argument, for the message.
    :param value: What was given.
    :return: The number.
    :raises ConfigError: if it is something else.
    """
    return None if value is None else integer(name, value)


def check_seconds(name: str, value: object) -> float:
    """Return a positive number.

    :param name: The argument, for the message.
    :param value: What was given.
    :return: The number.
    :raises ConfigError: if it is none, or not above 0.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigError(f"{name} {value!r} is no number above 0")
    return float(value)
