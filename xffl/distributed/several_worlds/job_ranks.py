"""Groups of all ranks of a job whose cells are worlds of their own; they meet at the store of the job."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from xffl.distributed.several_worlds.cross_world import CrossWorldGroup
from xffl.distributed.several_worlds.isolated_cell import IsolatedCell
from xffl.errors import LaunchError

__all__ = ["connect_job_store", "join_job"]


def join_job(isolated: IsolatedCell, name: str, timeout_s: float, *, first: int = 0) -> CrossWorldGroup:
    """Return a new group of the ranks of all cells; collective over the job.

    :param isolated: The place of this rank in the job.
    :param name: What the group is for; all ranks make their groups of a name in the same order.
    :param timeout_s: How long ranks are waited for.
    :param first: The number from which the group counts its ranks; by default the job's numbers.
    :return: The group.
    :raises LaunchError: if the others do not come.
    """
    try:
        # Each rank counts its own groups of this name: the same number on all of them.
        number = connect_job_store(isolated, timeout_s).add(f"groups/{name}/{isolated.rank}", 1)
        return CrossWorldGroup(
            address=isolated.store,
            name=f"{name}/{number}",
            rank=isolated.rank,
            size=sum(isolated.sizes),
            first=first,
            connect_s=timeout_s,
            timeout_s=timeout_s,
        )
    except RuntimeError as broken:
        raise LaunchError(
            f"rank {isolated.rank} could not join the ranks of all cells at {isolated.store}: {broken}; see the other "
            "ranks' output, and name the network interface with XFFL_IFNAME"
        ) from broken


def connect_job_store(isolated: IsolatedCell, timeout_s: float) -> TCPStore:
    """Return a connection to the store of the job; local.

    :param isolated: The place of this rank in the job.
    :param timeout_s: How long the store is waited for, now and in each call.
    :return: The store.
    """
    host, _, port = isolated.store.rpartition(":")
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
