"""Sizes of cells as they are asked for, by numbers or by a text (:mod:`xffl.cluster.sizes_text`), and their check."""

from __future__ import annotations

import re
from typing import Any

from xffl.checks import index_of
from xffl.errors import ConfigError, TopologyError

__all__ = [
    "Federation",
    "check_cells",
    "lone_cell",
    "read_federation",
    "read_replica_size",
]


Federation = int | tuple[int, ...] | str
"""Sizes of cells, or a rule that finds them."""

_SIZE = re.compile(r"-?[0-9]{1,18}")

_LONGEST = 200  # characters of a text that a message writes out


def read_replica_size(value: Any, knob: str) -> Any:
    """Return the size of a replica: a text's number, a plain integer, or what the topology refuses, as it is."""
    if isinstance(value, str):
        if not _SIZE.fullmatch(value.strip()):
            raise ConfigError(
                f"{knob} is {value[:_LONGEST]!r}; give the ranks that hold one copy of the model, such as 2"
            )
        return int(value)
    return value if index_of(value) is None else index_of(value)


def read_federation(federation: Federation | None, knob: str) -> Federation | None:
    """Return a federation, wherever it is given: text is parsed as on the command line, integers become plain ones."""
    if isinstance(federation, str):
        from xffl.cluster.sizes_text import parse_federation

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
