"""The scope of rounds in a job whose cells are worlds of their own: all of its ranks, which meet at the job's store."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from xffl.aggregation.engine.groups import RoundScope, make_cell_groups
from xffl.distributed.cross_world import CrossWorldGroup
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.isolated_cell import IsolatedCell
from xffl.errors import LaunchError

__all__ = ["open_scope"]


def open_scope(state: DistributedState, isolated: IsolatedCell, *, overlaps: bool) -> RoundScope:
    """Join the ranks of all cells; collective over the job.

    :param state: The state of an isolated cell.
    :param isolated: The place of this rank in the job.
    :param overlaps: Whether rounds run while the cell trains, so that they need groups of their own inside it.
    :return: The scope of the whole job.
    :raises LaunchError: if the others do not come.
    """
    topology = state.data_place.topology
    first = -topology.offsets[isolated.cell]
    timeout_s = state.timeouts.session_s
    try:
        group = CrossWorldGroup(
            address=isolated.store,
            name=f"rounds/{_count_scope(isolated, timeout_s)}",
            rank=isolated.rank,
            size=topology.world_size,
            first=first,
            connect_s=timeout_s,
            timeout_s=timeout_s,
        )
    except RuntimeError as broken:
        raise LaunchError(
            f"rank {isolated.rank} could not join the ranks of all cells at {isolated.store}: {broken}; see the other "
            "ranks' output, and name the network interface with XFFL_IFNAME"
        ) from broken
    made: list[dist.ProcessGroup] = []
    groups = make_cell_groups(state, made, overlaps=overlaps)

    def leave() -> None:
        group.barrier(0)  # no rank still waits for a message of another one that has closed its connections
        group.close()

    return RoundScope(
        state, topology=topology, first=first, groups=groups, own=tuple(made), cross_world=group, leave=leave
    )


def _count_scope(isolated: IsolatedCell, timeout_s: float) -> int:
    """Return which scope of this rank this is: the same number on all ranks, which make their scopes together."""
    host, _, port = isolated.store.rpartition(":")
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    return int(store.add(f"scopes/{isolated.rank}", 1))
