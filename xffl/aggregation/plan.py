"""What moves in a round, and between whom: pure arithmetic, computed once, the same on all ranks.

A tensor's elements stand in one canonical order (row-major, the axis it is cut along first). Every cell cuts that order
into parts of equal length, one for each shard; the *common refinement* of all cells' cuts is a list of intervals, each
with exactly one owner in each cell. Intervals with the same owners form a *lane*; a lane is walked in *buckets* of
bounded size. Equal cuts give one interval for each shard, unequal cuts more and shorter ones; there is no other path.

Where a mesh inside the cells cuts a tensor along several dimensions, or a pipeline gives it to some shards only, the
order is that of the parts that shards hold, one after the other; all cells cut it alike then.

Deadlock freedom: all ranks walk their lanes in the order of :attr:`Lane.key`, bucket by bucket, and every participant
of a lane sees the same buckets. Lanes that follow each other with the same :attr:`Lane.participants` may overlap where
they are asked for as far ahead; others wait for the ones before to land.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from xffl.topology import Topology

__all__ = ["Bucket", "Cut", "Item", "Lane", "MeshCut", "Part", "Piece", "digest", "plan_lanes"]

_Key = tuple[
    tuple[int, tuple[bool, ...], tuple[int, ...], tuple[int, ...]],
    tuple[str, str, bool, str, bool],
]
"""Who takes part in a lane, and what it moves: see :class:`Lane`."""


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

    def held(self, shard: int) -> tuple[int, int]:
        """Return the first element that the ranks of a shard hold, and the first one after these."""
        return self.bounds(shard) if self.is_held_by_part else (0, self.numel)

    def holders(self, element: int) -> tuple[int, ...]:
        """Return the shards that hold an element, where these are neither one nor all of the cell."""
        return ()

    @classmethod
    def of_axis(cls, length: int, inner: int, parts: int) -> Cut:
        """Cut an axis of ``length`` entries of ``inner`` elements into shards, as ``torch.chunk`` and FSDP2 do."""
        return cls(length * inner, max(1, -(-length // parts) * inner), True)

    @classmethod
    def of_copy(cls, numel: int, parts: int, least: int = 1) -> Cut:
        """Share out a tensor that every rank holds over the senders of its cell, ``least`` elements or more to each."""
        return cls(numel, max(1, least, -(-numel // parts)), False)


class Part(NamedTuple):
    """Elements of a tensor that some shards hold, each all of them."""

    numel: int
    holders: tuple[int, ...]


class MeshCut(NamedTuple):
    """How every cell cuts a tensor of which shards hold parts of any size: an order of the parts, one after the other.

    Where several shards hold the same part, they share out the carrying, ``least`` elements or more to each.
    """

    parts: tuple[Part, ...]
    ends: tuple[int, ...]
    least: int

    @classmethod
    def of_parts(cls, parts: Sequence[Part], least: int) -> MeshCut:
        """Put parts that are not empty one after the other."""
        return cls(tuple(parts), tuple(accumulate(part.numel for part in parts)), least)

    @property
    def numel(self) -> int:
        """Number of elements of all parts."""
        return self.ends[-1] if self.ends else 0

    @property
    def is_held_by_part(self) -> bool:
        """Whether ranks hold their part only."""
        return True

    def bounds(self, part: int) -> tuple[int, int]:
        """Return the first element that a shard carries and the first one after these."""
        for (numel, holders), end in zip(self.parts, self.ends, strict=True):
            if part in holders:
                chunk = self._chunk(numel, holders)
                first = min(holders.index(part) * chunk, numel)
                return end - numel + first, end - numel + min(first + chunk, numel)
        return 0, 0

    def part_of(self, element: int) -> int:
        """Return the shard that carries an element."""
        index = bisect_right(self.ends, element)
        numel, holders = self.parts[index]
        return holders[(element - self.ends[index] + numel) // self._chunk(numel, holders)]

    def held(self, shard: int) -> tuple[int, int]:
        """Return the first element that the ranks of a shard hold, and the first one after these."""
        for (numel, holders), end in zip(self.parts, self.ends, strict=True):
            if shard in holders:
                return end - numel, end
        return 0, 0

    def holders(self, element: int) -> tuple[int, ...]:
        """Return the shards that hold an element, where they are several."""
        holders = self.parts[bisect_right(self.ends, element)].holders
        return holders if len(holders) > 1 else ()

    def _chunk(self, numel: int, holders: tuple[int, ...]) -> int:
        return max(1, self.least, -(-numel // len(holders)))


class Item(NamedTuple):
    """One tensor of the manifest: its place there, data type, rule, and one cut for each cell.

    ``is_mean_at_home`` asks for the mean over the ranks at home before anything crosses (buffers); ``codec`` names how
    its values are written on the slow link, ``fragment`` says in which rounds it takes part, ``is_stepped`` whether
    training changes it.
    """

    position: int
    dtype: str
    rule: str
    is_mean_at_home: bool
    cuts: tuple[Cut, ...] | tuple[MeshCut, ...]
    codec: str = "none"
    fragment: int = 0
    is_stepped: bool = False


class Piece(NamedTuple):
    """The elements ``start`` to ``stop`` of a tensor, in canonical order."""

    item: int
    start: int
    stop: int


class Bucket(NamedTuple):
    """A run of a lane's elements, with the pieces of tensors that lie in it, and its number in the lane."""

    number: int
    start: int
    stop: int
    pieces: tuple[Piece, ...]

    def part(self, index: int, parts: int) -> slice:
        """Return the elements, counted in the bucket, that one of ``parts`` cells combines in two hops."""
        numel = self.stop - self.start
        chunk = -(-numel // parts)
        return slice(min(index * chunk, numel), min((index + 1) * chunk, numel))


@dataclass(frozen=True)
class Lane:
    """All intervals with the same owners and the same treatment.

    :param fragment: Part of the model that the lane belongs to.
    :param held_by_part: For each cell, whether ranks hold the lane's elements only as a part of their shard.
    :param owners: The shard that carries the lane, in each cell.
    :param dtype: Data type of every element.
    :param rule: ``average`` or ``first``.
    :param is_mean_at_home: Whether the ranks at home are averaged first.
    :param codec: How values are written on the slow link.
    :param is_stepped: Whether they are what training changes: parameters that are averaged and not frozen.
    :param pieces: The intervals, by tensor.
    :param holders: The shards that hold the lane's elements, all of them, where they are several but not all.
    """

    fragment: int
    held_by_part: tuple[bool, ...]
    owners: tuple[int, ...]
    dtype: str
    rule: str
    is_mean_at_home: bool
    codec: str
    is_stepped: bool
    pieces: tuple[Piece, ...]
    holders: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """The lane's place in the order that all ranks keep."""
        return (*self.participants, self.dtype, self.rule, self.is_mean_at_home, self.codec, self.is_stepped)

    @property
    def participants(self) -> tuple[object, ...]:
        """What decides which ranks take part in the lane."""
        return (self.fragment, self.held_by_part, self.owners, self.holders)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(stop - start for _, start, stop in self.pieces)

    def buckets(self, limit: int) -> Iterator[Bucket]:
        """Cut the lane into buckets of at most ``limit`` elements.

        Large pieces are cut evenly into buckets of their own, which need not be packed where they lie in one run of
        memory; small ones share buckets.
        """
        large = [piece for piece in self.pieces if piece.stop - piece.start >= limit / 8]
        small = [piece for piece in self.pieces if piece.stop - piece.start < limit / 8]
        groups: list[list[Piece]] = []
        for item, start, stop in large:
            count = -(-(stop - start) // limit)
            size = -(-(stop - start) // count)
            groups += [[Piece(item, first, min(first + size, stop))] for first in range(start, stop, size)]
        room = 0
        for piece in small:
            numel = piece.stop - piece.start
            if numel > room:
                groups.append([])
                room = limit
            groups[-1].append(piece)
            room -= numel
        start = 0
        for number, pieces in enumerate(groups):
            stop = start + sum(piece.stop - piece.start for piece in pieces)
            yield Bucket(number, start, stop, tuple(pieces))
            start = stop


def plan_lanes(items: Sequence[Item], topology: Topology, rank: int) -> tuple[Lane, ...]:
    """List the lanes that a rank takes part in, as owner or at home, in the order in which all ranks walk them.

    :param items: The tensors that take part in the round, in the manifest's order.
    :param topology: The federation.
    :param rank: The rank to plan for.
    :return: The lanes, by :attr:`Lane.key`.
    """
    at = topology.coordinates(rank)
    lanes: dict[_Key, list[Piece]] = {}
    for item in items:
        mine = item.cuts[at.cell]
        start, end = mine.held(at.shard)
        held = tuple(cut.is_held_by_part for cut in item.cuts)
        for owners, piece in _refine(item, start, end):
            key = (
                (item.fragment, held, owners, mine.holders(piece.start)),
                (item.dtype, item.rule, item.is_mean_at_home, item.codec, item.is_stepped),
            )
            lanes.setdefault(key, []).append(piece)
    return tuple(
        Lane(fragment, held, owners, dtype, rule, is_mean, codec, is_stepped, tuple(pieces), holders)
        for ((fragment, held, owners, holders), (dtype, rule, is_mean, codec, is_stepped)), pieces in sorted(
            lanes.items()
        )
    )


def digest(items: Sequence[Item], topology: Topology) -> str:
    """Return a hash of everything that all ranks derive their lanes and buckets from.

    :param items: The tensors that take part in the round.
    :param topology: The federation.
    :return: Hexadecimal digits.
    """
    shape = () if topology.cell_shape is None else (topology.cell_shape,)
    facts = (topology.sizes, topology.replica_size, *shape, [tuple(item) for item in items])
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _refine(item: Item, start: int, end: int) -> Iterator[tuple[tuple[int, ...], Piece]]:
    while start < end:
        cuts: tuple[Cut | MeshCut, ...] = item.cuts
        owners = tuple(cut.part_of(start) for cut in cuts)
        stop = min(end, *(cut.bounds(owner)[1] for cut, owner in zip(cuts, owners, strict=True)))
        yield owners, Piece(item.position, start, stop)
        start = stop
