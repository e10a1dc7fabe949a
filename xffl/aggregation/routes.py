"""Which process groups a round uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.groups import make_round_groups

__all__ = ["Routes", "communication_device", "routes_of"]


@dataclass(frozen=True)
class Routes:
    """The process groups that a rank's rounds use, and who carries what.

    :param world: The group of all ranks, which votes.
    :param across: The group in which carriers swap shards; ``None`` on a rank that sends nothing.
    :param replica: The ranks of the cell that hold this rank's shard; ``None`` where there is one.
    :param cell: All ranks of the cell; ``None`` where there is one.
    :param is_railed: Whether the replicas of a shard take turns in carrying its buckets, instead of one sender.
    :param own: Groups that were made for this alone, placeholders too.
    """

    world: dist.ProcessGroup | None
    across: dist.ProcessGroup | None
    replica: dist.ProcessGroup | None
    cell: dist.ProcessGroup | None
    is_railed: bool = False
    own: tuple[dist.ProcessGroup, ...] = ()


def communication_device(state: DistributedState) -> torch.device:
    """Return where tensors must lie for the state's backend."""
    if "nccl" not in str(state.backend):
        return torch.device("cpu")
    device = state.current_device if state.current_device is not None else torch.cuda.current_device()
    return torch.device("cuda", device) if isinstance(device, int) else device


def routes_of(state: DistributedState, *, is_railed: bool, is_own: bool) -> Routes:
    """Pick the groups of a round; groups of one rank are left out.

    :param state: The state that describes the federation.
    :param is_railed: Whether replicas take turns: then any rank may meet any other.
    :param is_own: Make groups that nobody else uses, collectively over the world, instead of taking the state's: for
        rounds beside which the caller's own collectives go on.
    :return: The groups.
    """
    world = dist.group.WORLD
    across = replica = cell = None
    own: tuple[dist.ProcessGroup, ...] = ()
    if is_own:
        made: list[dist.ProcessGroup] = []

        def create(ranks: tuple[int, ...], name: str) -> dist.ProcessGroup:
            made.append(state.create_process_group(ranks, name))
            return made[-1]

        groups = make_round_groups(create, state.topology, dist.get_rank(), state._timeout_s)
        own = (*made, *(groups["world"] or ()))
        world, across, replica, cell = (
            handles[0] if (handles := groups.get(kind)) else None
            for kind in ("world", "federated", "replica", "federation")
        )
    elif state.is_federated_scaling_setup():
        across = state.federated_group[0] if state.federated_group else None
        replica = state.replica_group[0] if state.replica_group else None
        cell = state.federation
    else:
        replica = state.hsdp_mesh.get_group(0) if state.hsdp_mesh is not None else None
        cell = world
    replica, cell = (None if group is None or group.size() == 1 else group for group in (replica, cell))
    return Routes(world, world if is_railed else across, replica, cell, is_railed, own)
