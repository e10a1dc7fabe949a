"""How the command line reads numbers: counts such as ``7b``, sizes such as ``64MiB``, and plain numbers."""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from xffl import checks

__all__ = ["NUMBER_TYPES", "count", "real", "size_in"]

_NUMBER = r"([+-]?[0-9](?:_?[0-9])*(?:\.[0-9](?:_?[0-9])*)?(?:[eE][+-]?[0-9]{1,3})?)"
_COUNT = re.compile(rf"{_NUMBER}\s*([kmbgt]?)", re.IGNORECASE | re.ASCII)
_TIMES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_SIZE = re.compile(rf"{_NUMBER}\s*([kmgt]?)(i?)(b?)", re.IGNORECASE | re.ASCII)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_LONGEST = 64
_LARGEST = 10**24


def count(text: str | int) -> int:
    """Read a whole number: ``12``, ``7b``, ``1.3B``, ``70e9`` or ``7_000_000_000``.

    k, m, b (or g) and t stand for thousands, millions, billions and trillions.

    :param text: What stands on the command line, or a default.
    :return: The number.
    :raises ArgumentTypeError: if it is none, or has a fraction.
    """
    match = _match(_COUNT, text)
    if match is not None:
        value = Decimal(match[1]) * _TIMES[match[2].lower()]
        if abs(value) <= _LARGEST and value == value.to_integral_value():
            return int(value)
    raise ArgumentTypeError(f"{_shown(text)} is no whole number; give one such as 12, 70e9, 7b or 7_000_000_000")


def size_in(unit: int) -> Callable[[Any], float]:
    """Return what reads a size in units of some bytes: ``4``, ``64MiB`` or ``5GB``; a bare number counts units.

    ``MB`` are 10^6 bytes, ``MiB`` 2^20.
    """

    def size(text: str | float) -> float:
        match = _match(_SIZE, text)
        if match is not None and not (match[3] and not match[2]):
            base = 1024 if match[3] else 1000
            is_bare = not (match[2] or match[4])
            value = Decimal(match[1]) * (1 if is_bare else Decimal(base ** _POWERS[match[2].lower()]) / unit)
            if abs(value) <= _LARGEST:
                return float(value)
        raise ArgumentTypeError(f"{_shown(text)} is no size; give one such as 4, 64MiB or 5GB")

    return size


def real(text: str | float) -> float:
    """Read a number: ``25``, ``0.5`` or ``8e9``.

    :param text: What stands on the command line, or a default.
    :return: The number.
    :raises ArgumentTypeError: if it is none, or not finite.
    """
    value = checks.real(text) if isinstance(text, str) else float(text)
    if value is None or not math.isfinite(value):
        raise ArgumentTypeError(f"{_shown(text)} is no number; give one such as 25 or 8e9")
    return value


NUMBER_TYPES: dict[Any, Callable[[Any], Any]] = {int: count, float: real}
"""What the commands' parsers read an option of Python's types by."""


def _match(pattern: re.Pattern[str], text: object) -> re.Match[str] | None:
    """Return the match of what has a sensible length: a thousand digits take seconds to compute with."""
    plain = str(text).strip()
    return pattern.fullmatch(plain) if len(plain) <= _LONGEST else None


def _shown(text: object) -> str:
    shown = str(text)
    return repr(shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}...")
