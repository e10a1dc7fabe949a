"""The process groups inside a cell that is a world of its own, whose rounds cross to other worlds."""

from __future__ import annotations

import torch.distributed as dist

from xffl.aggregation.engine.groups import make_creator
from xffl.distributed.agreement.consistency import control_device
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.groups import ON_GPUS, Groups, make_groups, new_group
from xffl.distributed.separate_groups import make_separate_groups

__all__ = ["make_cell_groups"]


def make_cell_groups(state: DistributedState, made: list[dist.ProcessGroup], *, overlaps: bool) -> Groups:
    """Return the groups inside a cell that is a world of its own; collective over the cell.

    ``made`` takes those that are made here and not the state's, placeholders too. ``overlaps`` tells whether rounds go
    on during local steps, whose own collectives must not meet theirs.
    """
    topology = state.topology
    rank = dist.get_rank()
    timeout_s = state.timeouts.session_s
    if control_device(dist.group.WORLD).type != "cpu":
        # A framework has made this world with NCCL alone, and what crosses between worlds lies in the host's memory.
        def create(ranks: tuple[int, ...], name: str) -> dist.ProcessGroup:
            made.append(new_group(ranks, timeout_s, name, ON_GPUS))
            return made[-1]

        return make_groups(create, topology=topology, rank=rank, kinds=("federation", "replica"), handles=1)
    if overlaps:
        groups = make_separate_groups(
            make_creator(state, made, 0), topology=topology, rank=rank, timeout_s=timeout_s, senders=0
        )
        made += groups["world"] or ()
        return {kind: groups.get(kind) for kind in ("federation", "replica")}
    assert dist.group.WORLD is not None, "a cell is a world"
    replica = None if state.hsdp_mesh is None else (state.hsdp_mesh.get_group(0),)
    return {"federation": (dist.group.WORLD,), "replica": replica}
