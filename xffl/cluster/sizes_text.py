"""Sizes of cells read from text: numbers, one cell of several jobs, or a rule (:mod:`xffl.cluster.cells`)."""

from __future__ import annotations

import re

from xffl.checks import decimal, is_decimal, shown
from xffl.cluster.sizes import Federation
from xffl.errors import ConfigError
from xffl.topology import MAX_RANKS

__all__ = ["FORMS", "parse_cell", "parse_federation", "parse_sizes"]

FORMS = "give auto, auto:LEVEL, hosts:REGEX, file:PATH, or sizes like 4,4"
"""What a message says may be given"""


def parse_sizes(text: str, knob: str) -> int | tuple[int, ...]:
    """Read federated sizes such as ``4``, ``4,4`` or ``(4, 4)``."""
    plain = text.strip()
    if plain[:1] + plain[-1:] in ("()", "[]"):
        plain = plain[1:-1]
    items = [item.strip() for item in plain.strip().removesuffix(",").split(",")]
    if any(decimal(item.removeprefix("-")) is None for item in items):
        raise ConfigError(f"{knob} is {shown(text)}; give sizes like 4,4, or one number for equal cells")
    sizes = tuple(int(item) for item in items)
    return sizes[0] if len(sizes) == 1 else sizes


def parse_cell(text: str, knob: str) -> tuple[int, int | tuple[int, ...]]:
    """Read which cell a job is and how many there are, or the ranks of each, as ``0/2`` or ``0/4,2`` say."""
    number, _, rest = text.strip().partition("/")
    cells = parse_sizes(rest, knob) if rest else 0
    count = cells if isinstance(cells, int) else len(cells)
    as_number = decimal(number)
    if as_number is None or not as_number < count <= MAX_RANKS or (isinstance(cells, tuple) and min(cells) < 1):
        raise ConfigError(
            f"{knob} is {shown(text)}; give the cell's number, from 0, and how many there are, such as 0/2, or the "
            "ranks of each, such as 0/4,2"
        )
    return as_number, cells


def parse_federation(text: str, knob: str) -> Federation:
    """Read federated sizes, or a rule that finds them on the machine.

    Rules are ``auto`` (cells are what stands below the top switch), ``auto:LEVEL`` (what stands that many levels below
    it), ``hosts:REGEX`` (the expression is searched in a host's name; its first group, or else the whole match, names
    the cell) and ``file:PATH`` (lines such as ``a n[1-4]``, or the same as YAML). A file is not read yet.
    """
    plain = text.strip()
    kind, colon, rest = plain.partition(":")
    if kind == "auto" and (not colon or (decimal(rest) or 0) > 0):
        return plain
    if kind == "auto":
        raise ConfigError(
            f"{knob} is {shown(text)}; write auto:LEVEL with a level from 1 on, 1 for what is below the root"
        )
    if kind == "hosts" and rest:
        try:
            re.compile(rest)
        except re.error as error:
            raise ConfigError(f"{knob} is {shown(text)}, whose regular expression is invalid: {error}") from error
        return plain
    if kind == "file" and rest:
        return plain
    if kind in ("hosts", "file"):
        raise ConfigError(f"{knob} is {text!r}, which names nothing; write hosts:REGEX or file:PATH")
    if not any(map(is_decimal, plain)):
        raise ConfigError(f"{knob} is {shown(text)}; {FORMS}")
    return parse_sizes(text, knob)
