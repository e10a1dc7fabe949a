"""Rows of tables of which CI runs only some; ``make nightly ONLY=rows`` runs the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["some_of"]


def some_of(rows: Iterable[Any], *long: Any) -> list[Any]:
    """Return the rows for ``pytest.mark.parametrize``, those marked of which only the nightly run has the time.

    :param rows: All rows; each is one value, or a tuple of values.
    :param long: Those of them which CI leaves out.
    """
    rows = list(rows)
    unknown = [row for row in long if row not in rows]
    assert not unknown, f"no rows of this table: {unknown}"
    return [_marked(row) if row in long else row for row in rows]


def _marked(row: Any) -> Any:
    return pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.long)
