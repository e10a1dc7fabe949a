"""The scope of rounds in a job whose cells are worlds of their own: all of its ranks, which meet at the job's store."""

from __future__ import annotations

import torch.distributed as dist

from xffl.aggregation.engine.groups import RoundScope
from xffl.aggregation.engine.several_worlds.cell_groups import make_cell_groups
from xffl.aggregation.engine.several_worlds.compared_at_once import ComparisonAtOnce
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.several_worlds.isolated_cell import IsolatedCell
from xffl.distributed.several_worlds.job_ranks import join_job

__all__ = ["open_scope"]


def open_scope(state: DistributedState, isolated: IsolatedCell, *, overlaps: bool) -> RoundScope:
    """Join the ranks of all cells; collective over the job.

    :param state: The state of an isolated cell.
    :param isolated: The place of this rank in the job.
    :param overlaps: Whether rounds run while the cell trains, so that they need groups of their own inside it.
    :return: The scope of the whole job.
    :raises LaunchError: if the others do not come.
    """
    topology = state.job_topology
    first = -topology.offsets[isolated.cell]
    group = join_job(isolated, "rounds", state.timeouts.session_s, first=first)
    made: list[dist.ProcessGroup] = []
    groups = make_cell_groups(state, made, overlaps=overlaps)

    def leave() -> None:
        group.barrier(0)  # no rank still waits for a message of another one that has closed its connections
        group.close()

    return RoundScope(
        state,
        topology=topology,
        first=first,
        groups=groups,
        own=tuple(made),
        cross_world=group,
        leave=leave,
        compare=ComparisonAtOnce,
    )
