"""Texts of others: JSON, within limits.

:func:`parse_json` refuses what would cost unbounded time or memory, or would fail far away from where it was read:
texts that are too long; values nested too deep; numbers of hundreds of digits; names given twice; halves of Unicode
surrogates. :func:`xffl.yaml_text.parse_yaml` has the same limits. Both raise ValueError that says what is wrong with
the text; the caller knows the file and the remedy. :class:`xffl.reading.Fields` reads the values.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from xffl import checks

__all__ = [
    "DEPTH_LIMIT",
    "DIGIT_LIMIT",
    "JSON_LIMIT",
    "check_depth",
    "has_surrogate",
    "number_of_digits",
    "parse_json",
]

JSON_LIMIT = 2**28
"""The most characters of a JSON text"""
DEPTH_LIMIT = 64
"""How deep lists and mappings may be nested; Python's own functions of nested values recurse"""
DIGIT_LIMIT = 300
"""The most digits of an integer, so that each is a float, too"""

_MANY_DIGITS = re.compile(f"[0-9]{{{DIGIT_LIMIT + 1}}}")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json(text: str | bytes, *, limit: int = JSON_LIMIT, depth: int = DEPTH_LIMIT, is_finite: bool = False) -> Any:
    """Return the value of a JSON text; a ValueError says what is wrong with it.

    Bytes are decoded as UTF-8. ``NaN`` and ``Infinity``, which Python writes and standard JSON does not know, are
    refused with ``is_finite``, and so are numbers beyond the range of a float.
    """
    if len(text) > limit:
        raise ValueError(f"it has {len(text)} characters; at most {limit} are read")
    if isinstance(text, bytes):
        text = text.decode("utf-8")  # its UnicodeDecodeError is a ValueError and says where
    decoder = _STRICT if is_finite else _CAREFUL if _MANY_DIGITS.search(text) else _PLAIN
    try:
        value = decoder.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"its values are nested more than {depth} deep") from error
    if text.count("[") + text.count("{") > depth:
        check_depth(value, depth)
    if _SURROGATE_ESCAPE.search(text) and has_surrogate(json.dumps(value, ensure_ascii=False)):
        raise ValueError("a text in it holds half of a surrogate pair, which is no character")
    return value


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


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"{checks.shown(name)} is given twice in one object")
            seen.add(name)
    return found


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is beyond the range of a float")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"it holds {text}, which is no number of JSON")


_PLAIN = json.JSONDecoder(object_pairs_hook=_unique_names)
"""For most texts: a call for each number would take longer than all else"""
_CAREFUL = json.JSONDecoder(object_pairs_hook=_unique_names, parse_int=number_of_digits)
_STRICT = json.JSONDecoder(
    object_pairs_hook=_unique_names,
    parse_int=number_of_digits,
    parse_float=_finite_float,
    parse_constant=_refuse_constant,
)
