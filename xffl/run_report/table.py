"""A small table: columns of numbers by name, from which the figures about rounds are drawn."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

__all__ = ["Table"]


@dataclass(frozen=True)
class Table:
    """Columns of equal length, by name. Where a row lacks a value, the column has 0 there."""

    columns: Mapping[str, NDArray[np.float64]]

    @classmethod
    def of_rows(cls, rows: Iterable[Mapping[str, float]]) -> Table:
        """Make a table of rows, which may have different names; columns stand in the order in which names appear."""
        columns: dict[str, array[float]] = {}
        count = 0
        for row in rows:
            for name, value in row.items():
                column = columns.setdefault(name, array("d"))
                column.extend([0.0] * (count - len(column)))
                column.append(value)
            count += 1
        for column in columns.values():
            column.extend([0.0] * (count - len(column)))
        return cls({name: np.array(column) for name, column in columns.items()})

    def __len__(self) -> int:
        """Count the rows."""
        return len(next(iter(self.columns.values()), ()))

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        """Return a column; one that the table does not have is 0 in every row."""
        column = self.columns.get(name)
        return np.zeros(len(self)) if column is None else column

    def names(self, *patterns: str) -> list[str]:
        """Return the names of columns that fit a pattern such as ``phase/*``, pattern by pattern."""
        return [name for pattern in patterns for name in self.columns if fnmatchcase(name, pattern)]

    def where(self, name: str, value: float) -> Table:
        """Return the rows in which a column has a value."""
        rows = self[name] == value
        return Table({name: column[rows] for name, column in self.columns.items()})

    def sorted_by(self, name: str) -> Table:
        """Return the rows in the order of a column; equal ones stay in theirs."""
        order = np.argsort(self[name], kind="stable")
        return Table({name: column[order] for name, column in self.columns.items()})
