"""Processes that tests have started through others: whether they are still there."""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from pathlib import Path

__all__ = ["is_alive", "still_there"]


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
