"""What a job is asked for that trains one cell of several by itself, in rounds over files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from xffl.compat.datasets import ENVIRON
from xffl.errors import ConfigError

__all__ = ["OverFiles", "read_over_files"]


@dataclass(frozen=True)
class OverFiles:
    """What a job is asked for that trains one cell by itself, in rounds over files; falsy where it is none."""

    cell: str | None = None  # which cell it is, such as "0/2"
    start: str | None = None  # the global model to start from
    export: str | None = None  # where to write what a round would average
    measure: str | None = None  # where to write what the global model is worth, in place of training

    def __bool__(self) -> bool:
        return self.cell is not None or self.measure is not None

    def variables(self) -> dict[str, str]:
        """Return the variables from which ranks read it."""
        values = {"XFFL_CELL": self.cell, "XFFL_FROM": self.start, "XFFL_EXPORT": self.export}
        return {name: text for name, text in values.items() if text is not None}


def read_over_files(options: Mapping[str, str | None] | None = None, environ: Mapping[str, str] = ENVIRON) -> OverFiles:
    """Return what a job of one cell is asked for."""
    given = options or {}
    cell, start, export = (
        given.get(name) or environ.get(f"XFFL_{name.upper()}", "").strip() or None
        for name in ("cell", "from", "export")
    )
    asked = OverFiles(cell, start, export, given.get("measure"))
    for name, value in (("from", asked.start), ("export", asked.export)):
        if value is not None and not asked:
            raise ConfigError(
                f"--{name} {value} is for a cell that is a job of its own; give --cell, such as 0/2 (XFFL_CELL)"
            )
    return asked
