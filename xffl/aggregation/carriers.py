"""Who carries a bucket between the cells."""

from __future__ import annotations

import math

from xffl.aggregation.plan import Bucket, Lane
from xffl.topology import Topology

__all__ = ["Carriers"]


class Carriers:
    """The ranks that carry buckets, as one rank asks for them; pure.

    :param topology: The federation.
    :param rank: The rank that asks.
    :param is_railed: Whether the holders of a shard take turns.
    """

    def __init__(self, topology: Topology, rank: int, *, is_railed: bool) -> None:
        self._topology, self._rank = topology, rank
        self._cell = topology.cell_of(rank)
        # After so many buckets, every cell's carriers come round again.
        self._turns = math.lcm(*topology.replica_counts) if is_railed else 1
        self._known: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}

    def of(self, lane: Lane, bucket: Bucket) -> tuple[int, ...]:
        """Return the rank of each cell that carries a bucket."""
        # What is taken from one cell is taken from one rank.
        turn = bucket.number % self._turns if lane.rule == "average" else 0
        carriers = self._known.get((lane.owners, turn))
        if carriers is None:
            carriers = tuple(self._topology.carrier(c, owner, turn) for c, owner in enumerate(lane.owners))
            self._known[lane.owners, turn] = carriers
        return carriers

    def at_home(self, lane: Lane, bucket: Bucket) -> int:
        """Return the rank that carries a bucket for this rank's cell."""
        return self.of(lane, bucket)[self._cell]

    def is_here(self, lane: Lane, bucket: Bucket) -> bool:
        """Tell whether this rank carries a bucket for its cell."""
        return self.at_home(lane, bucket) == self._rank
