"""Numbers and names of runs, as a reader wants them: few digits, units, nothing that breaks a page or a picture."""

from __future__ import annotations

import math
import re

__all__ = ["bytes_text", "label_text", "number_text", "printable", "seconds_text", "stem_of"]

LONGEST_LABEL = 44
"""Letters of a name in a picture; of longer ones the middle is left out."""
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def number_text(value: float) -> str:
    """Write a number with four digits, or whole with commas.

    :param value: The number; may be NaN or infinite.
    :return: Such as ``0.1234``, ``1,234,567`` or ``3.2e-05``.
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "infinity" if value > 0 else "-infinity"
    size = abs(value)
    if value == int(value) and size < 1e15:
        return f"{int(value):,}"
    if size >= 1e15 or size < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.0f}" if size >= 1e4 else f"{value:.4g}"


def bytes_text(count: float) -> str:
    """Write a number of bytes with three digits and a decimal unit.

    :param count: Bytes.
    :return: Such as ``3.2 GB``.
    """
    if not math.isfinite(count):
        return number_text(count)
    power = 0
    # 999.6 would round to 1e+03.
    while power < len(_UNITS) - 1 and abs(count) / 1000**power >= 999.5:
        power += 1
    scaled = count / 1000**power
    return f"{scaled:,.0f} {_UNITS[power]}" if abs(scaled) >= 1000 else f"{scaled:.3g} {_UNITS[power]}"


def seconds_text(seconds: float) -> str:
    """Write a duration with two or three digits' worth of units.

    :param seconds: The duration.
    :return: Such as ``350 ms``, ``12.3 s``, ``5 min 20 s`` or ``2 h 5 min``.
    """
    if not math.isfinite(seconds):
        return number_text(seconds)
    size = abs(seconds)
    if size == 0:
        return "0 s"
    if size < 0.9995e-3:
        return f"{1e6 * seconds:.3g} µs"
    if size < 0.9995:
        return f"{1e3 * seconds:.3g} ms"
    if size < _MINUTE - 0.05:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    for large, small, names in ((_DAY, _HOUR, ("d", "h")), (_HOUR, _MINUTE, ("h", "min")), (_MINUTE, 1, ("min", "s"))):
        if abs(whole) >= large:
            units = round(whole / small)
            first, rest = divmod(units, large // small)
            return f"{first:,} {names[0]}" + (f" {rest} {names[1]}" if rest else "")
    return f"{whole} s"


def printable(text: object) -> str:
    """Replace what may stand in no page and no picture: control characters, and halves of characters.

    :param text: What to show, such as the name of a folder.
    :return: The same text, with such characters as the replacement character.
    """
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in str(text)
    )


def label_text(text: object) -> str:
    """Make a name fit for a picture: one line, not too long, without matplotlib's formulas and hidden labels.

    :param text: The name.
    :return: A label.
    """
    line = " ".join(printable(text).split())
    if len(line) > LONGEST_LABEL:
        half = (LONGEST_LABEL - 1) // 2
        line = f"{line[:half]}…{line[-half:]}"
    # Labels with a leading underscore stay out of legends; dollars would begin a formula, and a backslash before one
    # would undo its escape.
    line = line.replace("\\$", "\\ $").replace("$", r"\$")
    return f" {line}" if line.startswith("_") else line or "(no name)"


def stem_of(name: str, taken: set[str]) -> str:
    """Find a file name for a picture, and take it.

    :param name: What the picture shows, such as ``train/loss``.
    :param taken: Names that other pictures have, in small letters; this one is added.
    :return: Such as ``train_loss``.
    """
    base = re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("._")[:80] or "picture"
    stem, number = base, 1
    while stem.lower() in taken:
        number += 1
        stem = f"{base}_{number}"
    taken.add(stem.lower())
    return stem
