"""How cells cut a tensor that a mesh inside them shards, or that only some pipeline stages hold."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

__all__ = ["MeshCut", "Part"]


class Part(NamedTuple):
    """A part of a tensor, and the shards that each hold all of it."""

    numel: int
    holders: tuple[int, ...]


class MeshCut(NamedTuple):
    """How every cell cuts a tensor whose shards hold parts of any size; the parts follow each other.

    If several shards hold the same part, they divide the sending, at least ``least`` elements each.
    """

    parts: tuple[Part, ...]
    ends: tuple[int, ...]
    least: int

    @classmethod
    def of_parts(cls, parts: Sequence[Part], least: int) -> MeshCut:
        """Make the cut from non-empty parts, in their order."""
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
        """Return the range of elements that a shard sends."""
        for (numel, holders), end in zip(self.parts, self.ends, strict=True):
            if part in holders:
                chunk = self._chunk(numel, holders)
                first = min(holders.index(part) * chunk, numel)
                return end - numel + first, end - numel + min(first + chunk, numel)
        return 0, 0

    def part_of(self, element: int) -> int:
        """Return the shard that sends an element."""
        index = bisect_right(self.ends, element)
        numel, holders = self.parts[index]
        return holders[(element - self.ends[index] + numel) // self._chunk(numel, holders)]

    def held(self, shard: int) -> tuple[int, int]:
        """Return the range of elements that the ranks of a shard hold."""
        for (numel, holders), end in zip(self.parts, self.ends, strict=True):
            if shard in holders:
                return end - numel, end
        return 0, 0

    def holders(self, element: int) -> tuple[int, ...]:
        """Return the shards that hold an element, if there are several; else nothing."""
        holders = self.parts[bisect_right(self.ends, element)].holders
        return holders if len(holders) > 1 else ()

    def _chunk(self, numel: int, holders: tuple[int, ...]) -> int:
        return max(1, self.least, -(-numel // len(holders)))
