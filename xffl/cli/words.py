"""Numbers and assumptions, as the commands print them."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Sequence

__all__ = ["assumed", "in_bytes"]


def assumed(assumptions: Sequence[str]) -> list[str]:
    """Lay assumptions out as a list that fills the terminal.

    :param assumptions: Sentences.
    :return: Lines.
    """
    width = shutil.get_terminal_size((100, 24)).columns
    lines = ["Assumed:"]
    for assumption in assumptions:
        lines += textwrap.wrap(assumption, width, initial_indent="  - ", subsequent_indent="    ")
    return lines


def in_bytes(count: float) -> str:
    """Write a number of bytes with three digits and a decimal unit.

    :param count: Bytes.
    :return: Such as ``3.2 GB``.
    """
    power = min(5, int(math.log10(count)) // 3) if count >= 1 else 0
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB', 'PB')[power]}"
