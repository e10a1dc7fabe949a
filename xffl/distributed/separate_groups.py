"""The groups of rounds that have some of their own, beside those of the state: delayed rounds, and elastic cells."""

from __future__ import annotations

from xffl.distributed.groups import IN_TURN, Create, Groups, make_groups, new_group
from xffl.topology import Topology

__all__ = ["make_separate_groups"]


def make_separate_groups(
    create: Create,
    topology: Topology,
    rank: int,
    timeout_s: float,
    senders: int,
) -> Groups:
    """Make groups for rounds that run while the caller trains, whose own collectives must not meet theirs.

    Collective over the world. ``senders`` is how many groups of the senders of a shard there are, which buckets use in
    turn; none where nothing crosses, or in another group.
    """
    kinds = {"federation", "replica", "federated"} if senders else {"federation", "replica"}
    world = new_group(range(topology.world_size), timeout_s, "xffl_world")
    return {
        "world": (world,),
        **make_groups(
            create,
            topology=topology,
            rank=rank,
            kinds=kinds,
            handles=senders,
            streamed=IN_TURN,
        ),
    }
