"""Processes that tests have started through others: whether they are there, and are there no longer."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["await_cells", "give_way", "is_alive", "still_there"]


def await_cells(cells: int, folder: str | Path = ".") -> None:
    """Wait until each cell of an elastic run has come here; all have one folder.

    Two seconds after it has entered, a cell begins without those that it has not seen. Where all processes are started
    at once on a busy machine, some come later than that.
    """
    cell, _, _ = os.environ["XFFL_CELL"].partition("/")
    Path(folder, f"cell_{cell}.here").touch()
    while not all(Path(folder, f"cell_{number}.here").exists() for number in range(cells)):
        time.sleep(0.02)


def give_way(seconds: float) -> None:
    """Let other threads of this process run for so long; time for which the process was stopped does not count."""
    for _ in range(round(seconds / 0.02)):
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; one that only waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def still_there(pids: Sequence[int], deadline_s: float) -> list[int]:
    """Wait for the end of processes that are no children of this one; return those that have not ended by then."""
    left = []
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ready, _, _ = select.select([handle], [], [], deadline_s)
        os.close(handle)
        if not ready:
            left.append(pid)
    return left
