"""Checks of arguments that every room makes, and what is as small and as common."""

from __future__ import annotations

import difflib
import math
import numbers
import operator
import unicodedata
from collections.abc import Iterable
from typing import Any, TypeVar

from xffl.errors import ConfigError, XfflError

__all__ = [
    "closest",
    "decimal",
    "did_you_mean",
    "group",
    "index_of",
    "integer",
    "integer_fields",
    "is_decimal",
    "number",
    "one_of",
    "real",
    "shorten",
    "shown",
    "visible",
]

K = TypeVar("K")
V = TypeVar("V")

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
    """Return a plain ``int`` for whatever counts as an integer (see :func:`index_of`) within the limits, or raise.

    Keep, hash and send what this returns: a NumPy integer draws, prints and serializes in other ways than an ``int``.
    ``what`` and ``hint`` are for the message; a maximum needs a minimum.
    """
    number = index_of(value)
    is_low = number is not None and minimum is not None and number < minimum
    is_high = number is not None and maximum is not None and number > maximum
    if number is None or is_low or is_high:
        kind = _KINDS.get(minimum, f"an integer of {minimum} or more")
        if maximum is not None:
            kind = f"an integer from {minimum} to {maximum}"
        raise error(f"{what} must be {kind}, got {shown(value)}" + (f"; {hint}" if hint else ""))
    return number


def integer_fields(
    holder: Any, *names: str, minimum: int = 1, prefix: str = "", hint: str = "", may_be_none: bool = False
) -> None:
    """Check fields of a dataclass, frozen or not, and keep plain integers in them."""
    for name in names:
        value = getattr(holder, name)
        if value is not None or not may_be_none:
            object.__setattr__(holder, name, integer(f"{prefix}{name}", value, minimum, hint=hint))


def number(
    what: str,
    value: Any,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    *,
    above: float = -math.inf,
    below: float = math.inf,
    hint: str = "",
    error: type[XfflError] = ConfigError,
) -> float:
    """Return a finite ``float`` in ``[minimum, maximum]`` that lies above ``above`` and below ``below``, or raise.

    Booleans and texts are no numbers.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool) and _is_finite(value)
    if not (is_number and minimum <= value <= maximum and above < value < below):
        limits = [(">=", minimum), (">", above), ("<=", maximum), ("<", below)]
        rule = " and ".join(f"{sign} {limit:g}" for sign, limit in limits if math.isfinite(limit))
        kind = f"a number {rule}" if rule else "a finite number"
        raise error(f"{what} must be {kind}, got {shown(value)}" + (f"; {hint}" if hint else ""))
    return float(value)


def _is_finite(value: Any) -> bool:
    """Say whether a number is finite as a float; an integer of hundreds of digits is none."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def one_of(
    what: str, value: Any, choices: Iterable[Any], *, hint: str = "", error: type[XfflError] = ConfigError
) -> None:
    """Raise where a value is none of the choices; the message names the closest one."""
    known = list(choices)
    # A switch is no number, so 1 is not True; but names of a type of their own, such as torch's backends, are texts.
    kind = str if isinstance(value, str) else type(value)
    if any(kind is type(choice) and value == choice for choice in known):
        return
    names = [choice for choice in known if isinstance(choice, str)]
    meant = did_you_mean(value, names, 0.5) if isinstance(value, str) else ""
    listed = ", ".join(repr(choice) for choice in known)
    raise error(f"{what} must be one of {listed}, got {shown(value)}{meant}" + (f"; {hint}" if hint else ""))


def closest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return which of the names is nearest to a misspelled one, ``None`` where none is near."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the question that follows a misspelled name in a message, empty where none of the names is near."""
    near = closest(name[:100], names, cutoff)
    return "" if near is None else f" (did you mean {near!r}?)"


def shorten(items: Iterable[Any], most: int = 5, separator: str = ", ") -> str:
    """Write the first items of a list and how many more there are: ``a, b and 3 more``."""
    texts = [str(item) for item in items]
    more = len(texts) - most
    return separator.join(texts[:most]) + (f" and {more} more" if more > 0 else "")


def decimal(text: str, most: int = 18) -> int | None:
    """Return the integer that a text of at most ``most`` decimal digits writes, ``None`` where it is none.

    Digits are those of ASCII: Python reads the digits of every script, which no other program that gets the text does.
    It raises where a text has thousands of digits, and so do many who are handed such a number.
    """
    return int(text) if len(text) <= most and is_decimal(text) else None


def is_decimal(text: str) -> bool:
    """Tell whether a text consists of the digits 0 to 9, at least one, however many."""
    return text.isascii() and text.isdecimal()


def real(text: str) -> float | None:
    """Return the number that a text of ASCII writes, ``None`` where it is none; infinity and NaN are numbers here."""
    try:
        return float(text) if text.isascii() else None
    except ValueError:
        return None


def shown(value: Any, most: int = 200) -> str:
    """Return a value as Python writes it, for an error: cut where it is long, described where it has no such text."""
    if type(value) is int and value.bit_length() > 4 * most:
        return f"an integer of some {int(value.bit_length() * math.log10(2)) + 1} digits"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits inside it, or too deep
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= most else f"{text[:most]}..."


def visible(text: str) -> str:
    """Write out what a terminal would obey, or not show: control characters, and marks that turn or hide text.

    Names and messages of others go through here before they are printed; line breaks and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(_escaped(letter) if unicodedata.category(letter) in _HIDDEN else letter for letter in text)


_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")


def _escaped(letter: str) -> str:
    return letter if letter in "\n\t" else letter.encode("unicode_escape").decode()


def group(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of each key, both in the order given."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def index_of(value: Any) -> int | None:
    """Return what :func:`operator.index` makes of a value as a plain ``int``, ``None`` where it is no integer.

    Integers of NumPy and tensors of one integer are integers. Booleans of Python, NumPy and PyTorch are not: a switch
    in the place of a number is a mistake.
    """
    if type(value) is int:  # the common case is fast
        return value
    if isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool"):
        return None
    try:
        return int(operator.index(value))
    except (TypeError, ValueError, RuntimeError):  # no number, several, or a tensor on the meta device
        return None
