"""What moves in a round, and between whom: pure arithmetic, computed once, the same on all ranks.

A tensor's elements stand in one canonical order (row-major, the axis it is cut along first). Every cell cuts that order
into parts of equal length, one for each shard; the *common refinement* of all cells' cuts is a list of intervals, each
with exactly one owner in each cell. Intervals with the same owners form a *lane*; a lane is walked in *buckets* of
bounded size. Equal cuts give one interval for each shard, unequal cuts more and shorter ones; there is no other path.

Deadlock freedom: all ranks walk their lanes in the order of :attr:`Lane.key`, bucket by bucket, and every participant
of a lane sees the same buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xffl.topology import Topology

__all__ = ["Bucket", "Cut", "Item", "Lane", "Piece", "plan_lanes"]


class Cut(NamedTuple):
    """How one cell cuts one tensor: consecutive parts of ``chunk`` elements, the last ones shorter or empty.

    ``is_held_by_part`` tells a sharded tensor (a rank holds its part only) from a replicated one (every rank of the
    cell holds all of it, and the parts only share out the carrying).
    """

    numel: int
    chunk: int
    is_held_by_part: bool

    def bounds(self, part: int) -> tuple[int, int]:
        """Return the first element of a part and the first one after it."""
        return min(part * self.chunk, self.numel), min((part + 1) * self.chunk, self.numel)

    def part_of(self, element: int) -> int:
        """Return the part that an element belongs to."""
        return element // self.chunk

    @classmethod
    def of_axis(cls, length: int, inner: int, parts: int) -> Cut:
        """Cut an axis of ``length`` entries of ``inner`` elements into shards, as ``torch.chunk`` and FSDP2 do."""
        return cls(length * inner, max(1, -(-length // parts) * inner), True)

    @classmethod
    def of_copy(cls, numel: int, parts: int) -> Cut:
        """Share out a tensor that every rank holds over the senders of its cell."""
        return cls(numel, max(1, -(-numel // parts)), False)


class Item(NamedTuple):
    """One tensor of the manifest: its place there, data type, rule, and one cut for each cell.

    ``is_mean_at_home`` asks for the mean over the ranks at home before anything crosses (buffers).
    """

    position: int
    dtype: str
    rule: str
    is_mean_at_home: bool
    cuts: tuple[Cut, ...]


class Piece(NamedTuple):
    """The elements ``start`` to ``stop`` of a tensor, in canonical order."""

    item: int
    start: int
    stop: int


class Bucket(NamedTuple):
    """A run of a lane's elements, with the pieces of tensors that lie in it."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Lane:
    """All intervals with the same owners and the same treatment.

    :param owners: The shard that carries the lane, in each cell.
    :param held_by_part: For each cell, whether ranks hold the lane's elements only as a part of their shard.
    :param dtype: Data type of every element.
    :param rule: ``average`` or ``first``.
    :param is_mean_at_home: Whether the ranks at home are averaged first.
    :param pieces: The intervals, by tensor.
    """

    owners: tuple[int, ...]
    held_by_part: tuple[bool, ...]
    dtype: str
    rule: str
    is_mean_at_home: bool
    pieces: tuple[Piece, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """The lane's place in the order that all ranks keep."""
        return (self.dtype, self.rule, self.is_mean_at_home, self.held_by_part, self.owners)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(stop - start for _, start, stop in self.pieces)

    def buckets(self, limit: int) -> Iterator[Bucket]:
        """Cut the lane into buckets of at most ``limit`` elements; tensors that do not fit are split."""
        start = filled = 0
        pieces: list[Piece] = []
        for item, first, last in self.pieces:
            while first < last:
                stop = min(last, first + limit - filled)
                pieces.append(Piece(item, first, stop))
                filled += stop - first
                first = stop
                if filled == limit:
                    yield Bucket(start, start + filled, tuple(pieces))
                    start, filled, pieces = start + filled, 0, []
        if pieces:
            yield Bucket(start, start + filled, tuple(pieces))


def plan_lanes(items: Sequence[Item], topology: Topology, rank: int) -> tuple[Lane, ...]:
    """List the lanes that a rank takes part in, as owner or at home, in the order in which all ranks walk them.

    :param items: The tensors that take part in the round, in the manifest's order.
    :param topology: The federation.
    :param rank: The rank to plan for.
    :return: The lanes, by :attr:`Lane.key`.
    """
    at = topology.coordinates(rank)
    lanes: dict[tuple[str, str, bool, tuple[bool, ...], tuple[int, ...]], list[Piece]] = {}
    for item in items:
        mine = item.cuts[at.cell]
        start, end = mine.bounds(at.shard) if mine.is_held_by_part else (0, mine.numel)
        for owners, piece in _refine(item, start, end):
            held = tuple(cut.is_held_by_part for cut in item.cuts)
            key = (item.dtype, item.rule, item.is_mean_at_home, held, owners)
            lanes.setdefault(key, []).append(piece)
    return tuple(
        Lane(owners, held, dtype, rule, is_mean, tuple(pieces))
        for (dtype, rule, is_mean, held, owners), pieces in sorted(lanes.items())
    )


def _refine(item: Item, start: int, end: int) -> Iterator[tuple[tuple[int, ...], Piece]]:
    while start < end:
        owners = tuple(cut.part_of(start) for cut in item.cuts)
        stop = min(end, *(cut.bounds(owner)[1] for cut, owner in zip(item.cuts, owners, strict=True)))
        yield owners, Piece(item.position, start, stop)
        start = stop
