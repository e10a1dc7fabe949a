"""What ranks run: versions of software and kinds of processors, and how they differ.

A federation may be mixed: processors, torch, CUDA, NCCL, xffl and Python may differ. Only the number of the exchange
format (:data:`xffl.costs.EXCHANGE_FORMAT`) must be the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import TypeVar

from xffl.checks import group

__all__ = [
    "Runtime",
    "differing_columns",
    "group_by_runtime",
    "runtime_table",
]

T = TypeVar("T")

_HEADS = {"cuda": "CUDA", "nccl": "NCCL", "python": "Python"}  # heads of columns that are not written as the field


@dataclass(frozen=True)
class Runtime:
    """What a rank runs; an empty text where that is not known."""

    processor: str = ""  # name of the GPU, or machine and vector units of the CPU
    torch: str = ""
    cuda: str = ""  # CUDA or ROCm that torch was built with, or "none"
    nccl: str = ""  # NCCL or RCCL, or "none"
    xffl: str = ""
    python: str = ""


def group_by_runtime(named: Iterable[tuple[T, Runtime]]) -> dict[Runtime, list[T]]:
    """Return who has which runtime, in the order given."""
    return group((runtime, name) for name, runtime in named)


def differing_columns(runtimes: Iterable[Runtime]) -> list[str]:
    """Return the names of the fields in which runtimes differ; what is not known of one does not count."""
    columns = zip(*map(astuple, runtimes), strict=True)
    named = zip((field.name for field in fields(Runtime)), columns, strict=False)
    return [name for name, values in named if len({*values} - {""}) > 1]


def runtime_table(rows: Sequence[tuple[str, Runtime]], head: str = "cells") -> list[str]:
    """Return the lines of a table: for each row its name, and the columns that differ; none where all are alike."""
    names = differing_columns(runtime for _, runtime in rows)
    if not names:
        return []
    table = [[head, *(_HEADS.get(name, name) for name in names)]]
    table += [[label, *(getattr(runtime, name) or "unknown" for name in names)] for label, runtime in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
