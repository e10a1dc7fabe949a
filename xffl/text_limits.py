"""Limits of texts of others, JSON and YAML: how deep and long their values may be, and what they may hold."""

from __future__ import annotations

import math
import re
from typing import Any, NoReturn

from xffl import checks

__all__ = [
    "DEPTH_LIMIT",
    "DIGIT_LIMIT",
    "check_depth",
    "finite_float",
    "has_surrogate",
    "number_of_digits",
    "refuse_constant",
    "unique_names",
]

DEPTH_LIMIT = 64
"""How deep lists and mappings may be nested; Python's own functions of nested values recurse"""
DIGIT_LIMIT = 300
"""The most digits of an integer, so that each is a float, too"""

_SURROGATE = re.compile("[\ud800-\udfff]")


def number_of_digits(text: str) -> int:
    """Return the integer that decimal digits write, or raise ValueError where they are more than ``DIGIT_LIMIT``."""
    if len(text) > DIGIT_LIMIT:
        raise ValueError(f"it holds a number of {len(text)} digits; at most {DIGIT_LIMIT} are read")
    return int(text)


def has_surrogate(text: str) -> bool:
    """Say whether a text holds half of a surrogate pair, so that it cannot be written as UTF-8."""
    return _SURROGATE.search(text) is not None


def check_depth(value: Any, depth: int = DEPTH_LIMIT) -> None:
    """Raise ValueError where lists and mappings are nested deeper, without recursion."""
    level = [value]
    for _ in range(depth + 1):
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                below.extend(one.values())
            elif isinstance(one, list):
                below.extend(one)
        if not below:
            return
        level = below
    raise ValueError(f"its values are nested more than {depth} deep")


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the mapping of pairs of a JSON object, or raise ValueError where a name is given twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"{checks.shown(name)} is given twice in one object")
            seen.add(name)
    return found


def finite_float(text: str) -> float:
    """Return a JSON number as a float, or raise ValueError where it is beyond the range."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is beyond the range of a float")
    return value


def refuse_constant(text: str) -> NoReturn:
    """Raise ValueError for ``NaN`` and ``Infinity``."""
    raise ValueError(f"it holds {text}, which is no number of JSON")
