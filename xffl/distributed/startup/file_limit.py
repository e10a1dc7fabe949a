"""How many files this process may open."""

from __future__ import annotations

import math
import resource
from contextlib import suppress

__all__ = ["is_ample", "raise_file_limit"]

SPARE = 4096
"""Files that a process may have open for other things than its session, where nobody counts them."""
FILES_OF_RANK = 64
"""More than a session opens for each rank of its world: a connection in each of its groups."""


def raise_file_limit() -> float:
    """Raise this process's limit as far as it may, for the processes that it starts, too, and return it; local.

    :return: How many files this process may open; ``inf`` without a limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # macOS has a lower one beside it
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return math.inf if soft == resource.RLIM_INFINITY else soft


def is_ample(most: float, world_size: int) -> bool:
    """Tell whether a session of so many ranks certainly needs fewer files than ``most``; local."""
    return most >= SPARE + FILES_OF_RANK * world_size
