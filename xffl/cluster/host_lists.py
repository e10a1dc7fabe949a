"""Lists of hosts and of tasks by node, as batch systems write them: ``n[1-4]``, ``4(x2),3``."""

from __future__ import annotations

import re
from itertools import product
from math import prod

from xffl.checks import is_decimal, shown
from xffl.errors import LaunchError

__all__ = [
    "MAX_HOSTS",
    "expand_counts",
    "expand_hosts",
]


MAX_HOSTS = 100_000
"""The most hosts of a list; the largest machines have some ten thousand"""

_MAX_DIGITS = 18


def expand_hosts(text: str) -> tuple[str, ...]:
    """Expand a host list such as ``a[1-3,07],b09,login``, in its order; several brackets in one name multiply."""
    pieces = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if not pieces or ",".join(pieces) != text:
        raise LaunchError(f"host list {shown(text)} cannot be read; write it like a[1-3,07],b09,login")
    names: list[str] = []
    for piece in pieces:
        # Splitting at a captured group alternates: plain text, inside of a bracket, plain text, ...
        parts = re.split(r"\[([^\[\]]*)\]", piece)
        choices = [_numbers(part, text) if index % 2 else (part,) for index, part in enumerate(parts)]
        _check_hosts(len(names) + prod(map(len, choices)), text)
        names += map("".join, product(*choices))
    return tuple(names)


def _numbers(ranges: str, text: str) -> tuple[str, ...]:
    numbers: list[str] = []
    for item in ranges.split(","):
        first, dash, last = item.partition("-")
        last = last if dash else first
        is_number = is_decimal(first) and is_decimal(last) and max(len(first), len(last)) <= _MAX_DIGITS
        if not (is_number and int(first) <= int(last)):
            raise LaunchError(f"host list {shown(text)} has the range {shown(item)}; write ranges like 1-3 or 08-10")
        _check_hosts(len(numbers) + int(last) - int(first) + 1, text)
        # The width of the first number is kept: n[08-10] is n08, n09, n10.
        numbers.extend(str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return tuple(numbers)


def _check_hosts(count: int, text: str) -> None:
    """Raise before a list is written out that has more hosts than any machine."""
    if count > MAX_HOSTS:
        raise LaunchError(f"host list {shown(text)} has {count} hosts; give at most {MAX_HOSTS}")


def expand_counts(text: str) -> tuple[int, ...]:
    """Expand counts by node such as ``4(x2),3`` into ``(4, 4, 3)``."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", item)
        if match is None:
            raise LaunchError(f"tasks per node {shown(text)} cannot be read at {shown(item)}; write them like 4(x2),3")
        nodes = len(counts) + int(match[2] or 1)
        if nodes > MAX_HOSTS:
            raise LaunchError(f"tasks per node {shown(text)} are of {nodes} nodes; give at most {MAX_HOSTS}")
        counts.extend([int(match[1])] * int(match[2] or 1))
    return tuple(counts)
