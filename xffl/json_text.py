"""Texts of others: JSON, within limits.

:func:`parse_json` refuses what would cost unbounded time or memory, or would fail far away from where it was read:
texts that are too long; values nested too deep; numbers of hundreds of digits; names given twice; halves of Unicode
surrogates. :func:`xffl.yaml_text.parse_yaml` has the same limits. Both raise ValueError that says what is wrong with
the text; the caller knows the file and the remedy. :class:`xffl.reading.Fields` reads the values.
"""

from __future__ import annotations

import json
import re
from typing import Any

from xffl.text_limits import (
    DEPTH_LIMIT,
    DIGIT_LIMIT,
    check_depth,
    finite_float,
    has_surrogate,
    number_of_digits,
    refuse_constant,
    unique_names,
)

__all__ = ["JSON_LIMIT", "parse_json"]

JSON_LIMIT = 2**28
"""The most characters of a JSON text"""
_MANY_DIGITS = re.compile(f"[0-9]{{{DIGIT_LIMIT + 1}}}")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


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


_PLAIN = json.JSONDecoder(object_pairs_hook=unique_names)
"""For most texts: a call for each number would take longer than all else"""
_CAREFUL = json.JSONDecoder(object_pairs_hook=unique_names, parse_int=number_of_digits)
_STRICT = json.JSONDecoder(
    object_pairs_hook=unique_names,
    parse_int=number_of_digits,
    parse_float=finite_float,
    parse_constant=refuse_constant,
)
