"""What moves in a round, as one rank walks it: buckets of groups, who sends them, and whose values count.

Deadlock freedom: all ranks walk their groups in the order of :attr:`BucketGroup.key`, bucket by bucket, and every
participant of a group sees the same buckets. Groups that follow each other with the same
:attr:`BucketGroup.participants` may overlap if their receives are posted equally far ahead; others wait for the ones
before.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from xffl.aggregation.compression import Codec
from xffl.aggregation.engine.groups import RoundGroups
from xffl.costs import IN_FLIGHT
from xffl.distributed.agreement.consistency import sends_from_gpu

__all__ = [
    "Bucket",
    "BucketGroup",
    "BucketRun",
    "FragmentPlan",
    "GroupTransfer",
    "Piece",
    "RoundContext",
    "plan_fragments",
]


class Piece(NamedTuple):
    """The elements ``start`` to ``stop`` of a tensor, in canonical order."""

    item: int
    start: int
    stop: int


class Bucket(NamedTuple):
    """A run of a group's elements, with the pieces of tensors that lie in it, and its number in the group."""

    number: int
    start: int
    stop: int
    pieces: tuple[Piece, ...]

    def part(self, index: int, parts: int, multiple: int = 1) -> slice:
        """Return the elements, counted in the bucket, that one of ``parts`` cells combines in two hops."""
        numel = self.stop - self.start
        chunk = -(-numel // (parts * multiple)) * multiple
        return slice(min(index * chunk, numel), min((index + 1) * chunk, numel))


@dataclass(frozen=True)
class BucketGroup:
    """All intervals with the same owners and the same treatment."""

    fragment: int  # part of the model that the group belongs to
    # for each cell, whether ranks hold the group's elements only as a part of their shard
    held_by_part: tuple[bool, ...]
    owners: tuple[int, ...]  # the shard that sends the group, in each cell
    dtype: str  # data type of every element
    rule: str  # average or first
    is_mean_in_cell: bool  # whether the cell's ranks are averaged first
    codec: str  # how values are written on the link between cells
    is_stepped: bool  # whether they are what training changes: parameters that are averaged and not frozen
    pieces: tuple[Piece, ...]  # the intervals, by tensor
    # the shards that hold the group's elements, all of them, where they are several but not all
    holders: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """The group's place in the order that all ranks keep."""
        return (*self.participants, self.dtype, self.rule, self.is_mean_in_cell, self.codec, self.is_stepped)

    @property
    def participants(self) -> tuple[object, ...]:
        """What decides which ranks take part in the group."""
        return (self.fragment, self.held_by_part, self.owners, self.holders)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(stop - start for _, start, stop in self.pieces)

    def buckets(self, limit: int, multiple: int = 1) -> Iterator[Bucket]:
        """Cut the group into buckets of at most ``limit`` elements, or the next multiple.

        Large pieces are cut evenly into buckets of their own, which need not be packed where they lie in one run of
        memory; small ones share buckets.
        """
        large = [piece for piece in self.pieces if piece.stop - piece.start >= limit / 8]
        small = [piece for piece in self.pieces if piece.stop - piece.start < limit / 8]
        groups: list[list[Piece]] = []
        for item, start, stop in large:
            count = -(-(stop - start) // limit)
            size = -(-(stop - start) // (count * multiple)) * multiple
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


@dataclass(frozen=True)
class RoundContext:
    """Whose values count in a round."""

    weights: tuple[float, ...]  # one weight for each cell; cells of weight 0 send nothing
    first: int  # the cell that tensors of policy first are taken from
    number: int = 1  # the round's number, from 1
    steps: tuple[float, ...] = ()  # effective local steps of each cell since its last round
    # the L2 norm of each cell's update, of what training changes; None where nobody keeps the state that it started
    # from
    norms: tuple[float, ...] | None = None
    counts: tuple[float, ...] = ()  # what each cell's values count for, once a combiner has looked at all of this
    scale: float = 1.0  # what the way from the last agreed model to the combined one is multiplied by
    numbers: tuple[float, ...] = ()  # what all ranks step the global model with, those of one of them
    step_norm: float | None = None  # the L2 norm of the pseudo-gradient before it was clipped; None where it is not
    attempt: int = 0  # number of the masks of a secure sum
    source: int | None = None  # the cell whose model all take over, where no cell contributes

    def share(self, cell: int) -> float:
        """Return what a cell's values count for, of all."""
        return self.counts[cell] / math.fsum(self.counts)

    @cached_property
    def cells(self) -> tuple[int, ...]:
        """The cells that contribute, in order."""
        return tuple(cell for cell, weight in enumerate(self.weights) if weight)

    def source_cells(self, group: BucketGroup) -> tuple[int, ...]:
        """Return the cells whose values a group needs, in order."""
        if group.rule == "first":
            return (self.first,)
        return self.cells if self.source is None else (self.source,)


@dataclass(frozen=True)
class GroupTransfer:
    """A group as this rank walks it."""

    number: int  # its place among the rank's groups
    group: BucketGroup  # what it moves
    buckets: tuple[Bucket, ...]  # its pieces on the way
    dtype: torch.dtype  # data type of its values
    reduce_scatter: bool  # whether each cell combines one part of what crosses, instead of all of it
    codec: Codec | None  # how values are written on the link between cells; None as they are
    round_groups: RoundGroups  # the process groups
    rank: int  # this rank, as the topology counts
    cell: int  # and its cell
    senders: tuple[tuple[int, ...], ...]  # by bucket: the sender in each cell
    # buckets that are on the link between cells at a time, in each hop, of all replicas that take turns
    depth: int = IN_FLIGHT
    # Buckets that a rank is ready to receive before it sends its own. gloo sends only what a receiver has asked for,
    # and the asking queues behind what the receiver sends itself: without this the link between cells would pause for
    # its latency. Over NCCL both directions are posted together.
    ahead: int = IN_FLIGHT // 2
    # in two hops, by bucket the cell that combines all of it; None where each cell combines a part
    combiners: tuple[int | None, ...] = ()
    # the GPU from which NCCL sends inside cells, where values cross in the host's memory
    home_device: torch.device | None = None

    @property
    def cell_group(self) -> dist.ProcessGroup | None:
        """The ranks of this cell that get the result; ``None`` where nobody else does."""
        if self.group.holders:
            return self.round_groups.holders[self.group.holders]
        return self.round_groups.replica if self.group.held_by_part[self.cell] else self.round_groups.cell

    @cached_property
    def is_shared_on_gpu(self) -> bool:
        """Whether the ranks of this cell get the result on their GPUs, though it has crossed in the host's memory."""
        return self.home_device is not None and self.cell_group is not None and sends_from_gpu(self.cell_group)

    @cached_property
    def sends(self) -> tuple[bool, ...]:
        """By bucket, whether this rank sends it for its cell."""
        return tuple(senders[self.cell] == self.rank for senders in self.senders)

    @property
    def is_sender(self) -> bool:
        """Whether this rank sends any bucket."""
        return any(self.sends)

    @cached_property
    def pace(self) -> tuple[object, ...]:
        """What groups have in common whose buckets follow each other without a pause: who takes part, how far ahead."""
        return self.group.participants, self.depth // 2

    @cached_property
    def pause(self) -> int:
        """Buckets that are started while one is on its way across and back."""
        return self.ahead + self.depth * (2 if self.reduce_scatter else 1)

    def as_plain(self) -> GroupTransfer:
        """Return the group with values that move as they are, in one hop."""
        return replace(self, reduce_scatter=False, codec=None)

    def parts(self, bucket: Bucket) -> list[slice]:
        """Return what each cell combines of a bucket, counted in it."""
        cells, numel = len(self.group.owners), bucket.stop - bucket.start
        if not self.reduce_scatter:
            return [slice(0, numel)] * cells
        combiner = self.combiners[bucket.number] if self.combiners else None
        if combiner is None:
            multiple = 1 if self.codec is None else self.codec.alignment
            return [bucket.part(cell, cells, multiple) for cell in range(cells)]
        return [slice(numel * (cell > combiner), numel * (cell >= combiner)) for cell in range(cells)]

    def cut(self, bucket: Bucket, values: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return what each cell combines of a bucket's values, as views."""
        if self.reduce_scatter:  # in one call, and in one of torch's that does not go through Python
            return values.split_with_sizes(self._sizes[bucket.number])
        return [values] * len(self.group.owners)

    @cached_property
    def _sizes(self) -> list[list[int]]:
        """Elements of each part of each bucket."""
        return [[part.stop - part.start for part in self.parts(bucket)] for bucket in self.buckets]


BucketRun: TypeAlias = tuple[tuple[GroupTransfer, Bucket], ...]
"""Buckets that follow each other without a pause, with their groups."""


class FragmentPlan(NamedTuple):
    """What this rank exchanges in a round, of the part of the model that the round averages."""

    transfers: tuple[GroupTransfer, ...] = ()
    # Buckets of two groups may overlap only if the same ranks take part in both and post receives equally far ahead:
    # runs wait for the ones before.
    runs: tuple[BucketRun, ...] = ()
    buckets: BucketRun = ()  # of all runs


def plan_fragments(transfers: Sequence[GroupTransfer]) -> dict[int, FragmentPlan]:
    """Return what this rank exchanges in a round, by fragment."""
    by_fragment: dict[int, list[GroupTransfer]] = {}
    for transfer in transfers:
        by_fragment.setdefault(transfer.group.fragment, []).append(transfer)
    plans = {}
    for fragment, some in by_fragment.items():
        runs = tuple(
            tuple((transfer, bucket) for transfer in alike for bucket in transfer.buckets)
            for _, alike in itertools.groupby(some, key=lambda transfer: transfer.pace)
        )
        plans[fragment] = FragmentPlan(tuple(some), runs, tuple(itertools.chain.from_iterable(runs)))
    return plans
