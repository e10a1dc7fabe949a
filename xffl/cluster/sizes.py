"""Sizes of cells as they are asked for: numbers, or the text of a rule that finds them (:mod:`xffl.cluster.cells`)."""

from __future__ import annotations

import re
from typing import Any

from xffl.checks import decimal, index_of, is_decimal, shown
from xffl.errors import ConfigError, TopologyError
from xffl.topology import MAX_RANKS

__all__ = [
    "FORMS",
    "Federation",
    "check_cells",
    "lone_cell",
    "parse_cell",
    "parse_federation",
    "parse_sizes",
    "read_federation",
    "read_replica_size",
]


Federation = int | tuple[int, ...] | str
"""Sizes of cells, or a rule that finds them."""

FORMS = "give auto, auto:LEVEL, hosts:REGEX, file:PATH, or sizes like 4,4"
"""What a message says may be given"""

_SIZE = re.compile(r"-?[0-9]{1,18}")

_LONGEST = 200  # characters of a text that a message writes out


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


def read_replica_size(value: Any, knob: str) -> Any:
    """Return the size of a replica: a text's number, a plain integer, or what the topology refuses, as it is."""
    if isinstance(value, str):
        if not _SIZE.fullmatch(value.strip()):
            raise ConfigError(
                f"{knob} is {value[:_LONGEST]!r}; give the ranks that hold one copy of the model, such as 2"
            )
        return int(value)
    return value if index_of(value) is None else index_of(value)


def parse_cell(text: str, knob: str) -> tuple[int, int | tuple[int, ...]]:
    """Read which cell a job is and how many there are, or the ranks of each, as ``0/2`` or ``0/4,2`` say."""
    number, _, rest = text.strip().partition("/")
    cells = parse_sizes(rest, knob) if rest else 0
    count = cells if isinstance(cells, int) else len(cells)
    own = decimal(number)
    if own is None or not own < count <= MAX_RANKS or (isinstance(cells, tuple) and min(cells) < 1):
        raise ConfigError(
            f"{knob} is {shown(text)}; give the cell's number, from 0, and how many there are, such as 0/2, or the "
            "ranks of each, such as 0/4,2"
        )
    return own, cells


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


def read_federation(federation: Federation | None, knob: str) -> Federation | None:
    """Return a federation, wherever it is given: text is parsed as on the command line, integers become plain ones."""
    if isinstance(federation, str):
        return parse_federation(federation, knob)

    def plain(size: Any) -> Any:
        return size if index_of(size) is None else index_of(size)

    return tuple(map(plain, federation)) if isinstance(federation, (list, tuple)) else plain(federation)


def check_cells(cells: int, required: int | None, asked: Federation | None) -> None:
    """Refuse fewer cells than are required."""
    if required is not None and cells < required:
        how = "no federation was asked for" if asked is None else f"federated {_shown(asked)} makes {cells}"
        raise TopologyError(
            f"at least {required} cells are required (--require-cells, XFFL_REQUIRE_CELLS), but {how}; give other "
            "sizes, another rule, or nodes of several cells"
        )


def lone_cell(asked: Federation, world_size: int) -> str:
    """Return the line that says that a federation was asked for, and all ranks are in one cell."""
    ranks = "the only rank" if world_size == 1 else f"all {world_size} ranks"
    return (
        f"xffl: federated {_shown(asked)} puts {ranks} into one cell: there is no federation, and nothing is averaged "
        "between cells (xffl exec --require-cells 2 refuses that)"
    )


def _shown(federation: Federation) -> str:
    return ",".join(map(str, federation)) if isinstance(federation, tuple) else str(federation)
