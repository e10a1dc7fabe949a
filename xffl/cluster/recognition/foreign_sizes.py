"""Sizes of cells that are only given as alpha-unito/xffl reads them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

__all__ = ["FOREIGN_SIZES", "tell_foreign_sizes"]

FOREIGN_SIZES = "XFFL_FEDERATED_LOCAL_WORLD_SIZE"
"""What alpha-unito/xffl reads the sizes of cells from."""


def _line_of(environ: Mapping[str, str]) -> str | None:
    """Return the line for sizes that nothing reads; ``None`` without any, and in a job that is one of several cells."""
    text = environ.get(FOREIGN_SIZES, "").strip()
    if not text or environ.get("XFFL_FEDERATED", "").strip() or environ.get("XFFL_CELL", "").strip():
        return None
    return (
        f"xffl: {FOREIGN_SIZES}={text} has no effect: alpha-unito/xffl reads the sizes of cells from it, this package "
        f"from XFFL_FEDERATED; set XFFL_FEDERATED={text}"
    )


def tell_foreign_sizes() -> None:
    """Say in a line where sizes are given that nothing reads; local."""
    line = _line_of(os.environ)
    if line is not None:
        print(line, file=sys.stderr, flush=True)
