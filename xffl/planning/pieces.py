"""Which part of the model crosses between which senders: what the pictures show of a round's exchange.

Every tensor is taken as cut evenly. Cells that cut alike exchange shard by shard; cells that cut differently exchange
the common refinement of their cuts, so a sender may own several pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from xffl.topology import Topology

__all__ = ["Piece", "count_pieces", "exchange_pieces"]


class Piece(NamedTuple):
    """The share of the model from ``start`` to ``stop``, each between 0 and 1."""

    start: Fraction
    stop: Fraction

    def shard(self, topology: Topology, cell: int) -> int:
        """Return the shard of a cell that the piece lies in."""
        return int(self.start * topology.shards(cell))

    def owner(self, topology: Topology, cell: int) -> int:
        """Return the rank that carries the piece between a cell and the others."""
        return topology.sender(cell, self.shard(topology, cell))


def exchange_pieces(topology: Topology) -> Iterator[Piece]:
    """Yield the pieces of the exchange from the model's start to its end; with equal cuts these are the shards.

    :param topology: The federation.
    :yield: One piece after the other.
    """
    counts = _shard_counts(topology)
    start = Fraction(0)
    while start < 1:
        stop = min(Fraction(int(start * count) + 1, count) for count in counts)
        yield Piece(start, stop)
        start = stop


def count_pieces(topology: Topology) -> int:
    """Count the pieces of the exchange.

    :param topology: The federation.
    :return: As many as :func:`exchange_pieces` yields.
    """
    counts = _shard_counts(topology)
    if len(counts) == 1:
        return counts[0]
    return len({Fraction(shard, count) for count in counts for shard in range(count)})


def _shard_counts(topology: Topology) -> list[int]:
    """Return the different numbers of shards that cells cut the model into."""
    if topology.replica_size is not None:
        return [topology.replica_size]
    return sorted(set(topology.sizes))
