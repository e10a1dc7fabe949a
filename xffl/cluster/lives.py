"""Lives of an elastic run's cells on one machine: which of them have not ended, as the kernel knows it.

A life is one start of a cell's job. The process that leads it holds a lock on a file for as long as it is there,
however it ends. The folder is that of the launcher which has started all cells of the run.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO

__all__ = ["CellLives", "lives_of_run"]


def lives_of_run() -> CellLives | None:
    """Return the lives of the run's cells where ``XFFL_LIVES`` names their folder: all are on this machine."""
    folder = os.environ.get("XFFL_LIVES", "").strip()
    return CellLives(folder) if folder else None


class CellLives:
    """The lives of all cells of a run, as one process sees them, in a folder of this machine that all of them share."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._own: tuple[str, IO[bytes]] | None = None

    def begin(self, life: str) -> None:
        """Note that this process leads a life that may hold the run's model from now on, and until it ends."""
        if self._own is not None:
            return
        hidden = self._folder / f".{life}"
        file = hidden.open("wb")
        # A record lock: children of this process do not have it, so it ends with this process alone.
        fcntl.lockf(file, fcntl.LOCK_EX)
        hidden.rename(self._folder / f"life.{life}")
        self._own = life, file

    def living(self) -> tuple[str, ...]:
        """Return the lives that have begun, and have not ended."""
        lives = [path.name.removeprefix("life.") for path in self._folder.glob("life.*")]
        return tuple(sorted(life for life in lives if self._is_alive(life)))

    def _is_alive(self, life: str) -> bool:
        if self._own is not None and life == self._own[0]:
            return True  # to close the file a second time would end the lock
        with (self._folder / f"life.{life}").open("rb") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def end_cell(self, cell: int, code: int) -> None:
        """Note how a cell has ended that is not started again."""
        (self._folder / f"cell.{cell}.{code}").touch()

    def ended_cells(self) -> Mapping[int, int]:
        """Return the exit codes of the cells that are not started again, and of which no life lasts."""
        names = [path.name.split(".") for path in self._folder.glob("cell.*.*")]
        # A leader may outlive its launcher for a moment, where that was killed.
        living = {life.partition(".")[0] for life in self.living()} if names else set()
        return {int(cell): int(code) for _, cell, code in names if cell not in living}
