"""Ranks that have not met: who is missing, who tells of it, and how long the store stays for all to read why."""

from __future__ import annotations

import sys
from contextlib import suppress
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from xffl.cluster.environment import ProcessEnvironment
from xffl.cluster.launch.failure import note_unmet
from xffl.cluster.reaching import UnansweredError
from xffl.errors import XfflError
from xffl.topology import ranks_text

__all__ = ["name_absent", "note_meeting_failed", "tell_absent", "wait_for_readers"]

_READ_S = 10.0
"""How long rank 0 stays for the others to read the verdict"""


def note_meeting_failed(error: XfflError, place: ProcessEnvironment) -> None:
    """Note which rank tells all of an error by which the ranks have not met; nothing in a process that is alone."""
    rank = place.rank
    is_speaker = rank == 0
    if rank and isinstance(error, UnansweredError):
        # Rank 0 need not know that nobody reaches it, and others may be missing with it: ranks 1, 2, 4, 8 and so on
        # tell what to do, a few lines in any world.
        is_speaker = rank & (rank - 1) == 0
    if place.world_size > 1:
        note_unmet(error, rank, is_speaker=is_speaker)


def wait_for_readers(store: Store, rank: int | None, world_size: int | None, timeout_s: float) -> None:
    """Note that this rank knows the verdict; rank 0, in which the store may live, waits until all others do, too."""
    if store.add("read", 1) == world_size:
        store.set("all_read", "")
    if rank == 0:
        with suppress(RuntimeError):  # the verdict says more than who has not come for it
            store.wait(["all_read"], timedelta(seconds=min(timeout_s, _READ_S)))


def name_absent(store: Store, world_size: int) -> str:
    """Say which ranks have not come to the store where all meet."""
    try:
        absent = [rank for rank in range(world_size) if not store.check([f"here/{rank}"])]
    except RuntimeError:  # it went with rank 0
        absent = []
    return f"{ranks_text(absent)} did not come" if absent else "not all came"


def tell_absent(store: Store, world_size: int, waited_s: float) -> None:
    """Write which ranks have not come to the store where all meet."""
    print(
        f"xffl: rank 0 has waited {waited_s:g} s for all of {world_size} ranks to meet: "
        f"{name_absent(store, world_size)}. See their output, and that all were given the same MASTER_ADDR and "
        "MASTER_PORT",
        file=sys.stderr,
    )
