"""Groups of the ranks of a cell that hold the same elements, where a mesh inside the cells spreads the model."""

from __future__ import annotations

from collections.abc import Collection

import torch.distributed as dist

from xffl.distributed.groups import Create
from xffl.topology import Topology

__all__ = ["make_holder_groups"]


def make_holder_groups(
    create: Create, *, topology: Topology, rank: int, holders: Collection[tuple[int, ...]]
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Make a group of the ranks of this cell that hold one of the same shards, for all sets that this rank is in.

    Collective over the world.
    """
    # Sets without a common shard are made together, so that ranks make few placeholders.
    together: list[list[tuple[int, ...]]] = []
    for shards in sorted(holders):
        free = next((sets for sets in together if not set(shards) & {shard for one in sets for shard in one}), None)
        if free is None:
            together.append(free := [])
        free.append(shards)
    at = topology.coordinates(rank)
    made = {}
    for sets in together:
        mine = next((shards for shards in sets if at.shard in shards), None)
        if mine is None:
            create((rank,), "xffl_holders_placeholder")
            continue
        replicas = range(topology.replicas(at.cell))
        ranks = (topology.rank_of(at.cell, replica, shard) for replica in replicas for shard in mine)
        made[mine] = create(tuple(sorted(ranks)), "xffl_holders")
    return made
