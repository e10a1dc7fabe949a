"""The plan of a round, which elements move between which ranks: pure arithmetic, computed once, equal on all ranks.

A tensor's elements have a canonical order (row-major, with the sharded axis first). Every cell cuts that order into
parts of equal length, one for each shard; the *common refinement* of all cells' cuts is a list of intervals, each
with exactly one owner in each cell. Intervals with the same owners form a *group*; a group is walked in *buckets* of
bounded size. Equal cuts give one interval for each shard, unequal cuts more and shorter ones; both take the same path.

If a mesh inside the cells shards a tensor along several dimensions, or only some pipeline stages hold it, the order is
that of the parts that shards hold, one after the other; all cells must then cut it alike.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from xffl.aggregation.compression import Codec
from xffl.aggregation.engine.groups import RoundGroups
from xffl.aggregation.engine.planning.mesh_cut import MeshCut
from xffl.aggregation.engine.planning.transfers import Bucket, BucketGroup, GroupTransfer, Piece
from xffl.aggregation.options import Options
from xffl.costs import IN_FLIGHT, form_of, pipeline_depth
from xffl.distributed.values.sharding import dtype_of
from xffl.topology import Topology

__all__ = [
    "Cut",
    "Item",
    "digest",
    "plan_groups",
    "plan_transfers",
]


class Cut(NamedTuple):
    """How one cell cuts one tensor: consecutive parts of ``chunk`` elements, the last ones shorter or empty.

    ``is_held_by_part`` distinguishes a sharded tensor (a rank holds only its part) from a replicated tensor (every rank
    of the cell holds all of it, and the ranks share the sending part by part).
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
        """Return the range of elements that the ranks of a shard hold."""
        return self.bounds(shard) if self.is_held_by_part else (0, self.numel)

    def holders(self, element: int) -> tuple[int, ...]:
        """Return the shards that hold an element, if there are several but not all of the cell; else nothing."""
        return ()

    @classmethod
    def of_axis(cls, length: int, inner: int, parts: int) -> Cut:
        """Cut an axis of ``length`` entries of ``inner`` elements into shards, as ``torch.chunk`` and FSDP2 do."""
        return cls(length * inner, max(1, -(-length // parts) * inner), True)

    @classmethod
    def of_copy(cls, numel: int, parts: int, least: int = 1) -> Cut:
        """Divide a tensor that every rank holds between the cell's senders, at least ``least`` elements each."""
        return cls(numel, max(1, least, -(-numel // parts)), False)


class Item(NamedTuple):
    """A tensor of the manifest: its position there, data type, rule, and a cut for each cell.

    With ``is_mean_in_cell`` the cell's ranks are averaged before the exchange (buffers). ``codec`` encodes the values
    between cells, ``fragment`` selects the rounds that the tensor takes part in, and ``is_stepped`` tells whether
    training changes it.
    """

    position: int
    dtype: str
    rule: str
    is_mean_in_cell: bool
    cuts: tuple[Cut, ...] | tuple[MeshCut, ...]
    codec: str = "none"
    fragment: int = 0
    is_stepped: bool = False


def plan_groups(items: Sequence[Item], topology: Topology, rank: int) -> tuple[BucketGroup, ...]:
    """Return the groups that a rank sends or receives within its cell, in the order in which all ranks walk them."""
    at = topology.coordinates(rank)
    groups: dict[BucketGroup, list[Piece]] = {}  # without their pieces
    for item in items:
        mine = item.cuts[at.cell]
        start, end = mine.held(at.shard)
        held = tuple(cut.is_held_by_part for cut in item.cuts)
        for owners, piece in _refine(item, start, end):
            group = BucketGroup(
                item.fragment,
                held_by_part=held,
                owners=owners,
                dtype=item.dtype,
                rule=item.rule,
                is_mean_in_cell=item.is_mean_in_cell,
                codec=item.codec,
                is_stepped=item.is_stepped,
                pieces=(),
                holders=mine.holders(piece.start),
            )
            groups.setdefault(group, []).append(piece)
    return tuple(replace(group, pieces=tuple(groups[group])) for group in sorted(groups, key=lambda group: group.key))


def digest(items: Sequence[Item], topology: Topology) -> str:
    """Return a hash of everything that all ranks derive their groups and buckets from."""
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


MOST_UNLIKE = 1.25
"""Two cells combine whole buckets in turn as long as the sizes of two buckets differ by no more than this ratio."""


def _depth_of(buckets: Sequence[Bucket], dtype: torch.dtype, turns: int, cells: int, form: str) -> int:
    """Return how many of its own buckets a sender has under way."""
    # Small tensors are packed, and each such bucket under way needs another buffer.
    if sum(len(bucket.pieces) > 1 for bucket in buckets) > IN_FLIGHT:
        return IN_FLIGHT
    largest = max((bucket.stop - bucket.start for bucket in buckets), default=0) * dtype.itemsize
    return pipeline_depth(largest, len(buckets) / turns, cells, form)


def plan_transfers(
    groups: Sequence[BucketGroup],
    topology: Topology,
    rank: int,
    round_groups: RoundGroups,
    options: Options,
    codecs: Mapping[str, Codec | None],
    *,
    is_on_cpu: bool,
    home_device: torch.device | None = None,
) -> tuple[GroupTransfer, ...]:
    """Prepare the groups of a rank; all participants of a group find the same buckets and form.

    ``is_on_cpu`` tells whether values cross in the host's memory. ``home_device``: see :class:`GroupTransfer`.
    """
    transfers = []
    cell, form = topology.cell_of(rank), options.form_of_groups
    senders: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}
    for number, group in enumerate(groups):
        dtype = dtype_of(group.dtype)
        turns = max(topology.replica_counts) if round_groups.multi_rail else 1
        limit = _bucket_limit(group, topology, options.bucket_bytes // dtype.itemsize)
        if round_groups.multi_rail:
            limit = min(limit, -(-group.numel // (IN_FLIGHT * turns)))  # all have some to send
        codec = codecs.get(group.codec) if topology.cells > 1 else None  # nothing crosses in one cell
        buckets = tuple(group.buckets(max(1, limit), 1 if codec is None else codec.alignment))
        taken = "all_gather"  # what is taken from one cell needs no combining
        if group.rule == "average":
            taken = form_of(group.numel * dtype.itemsize, topology.cells, form, is_exact=codec is None)
        depth = _depth_of(buckets, dtype=dtype, turns=turns, cells=topology.cells, form=taken)
        reduce_scatter = taken == "two_hop"
        takes_turns = reduce_scatter and topology.cells == 2 and codec is None and not round_groups.multi_rail
        # NCCL works off what is posted on a group bucket by bucket, so each bucket has to use both directions there.
        combiners = _take_turns(buckets) if takes_turns and is_on_cpu else ()
        # After so many buckets all cells' senders come round again. What is taken from one cell is taken from one rank.
        period = math.lcm(*topology.replica_counts) if round_groups.multi_rail and group.rule == "average" else 1
        keys = [(group.owners, turn) for turn in range(max(1, min(period, len(buckets))))]
        for owners, turn in set(keys) - senders.keys():
            senders[owners, turn] = tuple(topology.sender(at, owner, turn) for at, owner in enumerate(owners))
        transfers.append(
            GroupTransfer(
                number=number,
                group=group,
                buckets=buckets,
                dtype=dtype,
                reduce_scatter=reduce_scatter,
                codec=codec,
                round_groups=round_groups,
                rank=rank,
                cell=cell,
                senders=tuple(senders[keys[bucket.number % len(keys)]] for bucket in buckets),
                depth=depth * turns,
                ahead=depth * turns // 2 if is_on_cpu else 0,
                combiners=combiners,
                home_device=home_device,
            )
        )
    return tuple(transfers)


def _bucket_limit(group: BucketGroup, topology: Topology, numel: int) -> int:
    """Return the elements of a group's buckets where ``numel`` may come together, the same on all participants."""
    if not group.is_mean_in_cell:
        return numel
    # A whole cell's buckets come together; all participants must find the same limit, so the largest counts.
    homes = zip(group.held_by_part, topology.replica_counts, topology.sizes, strict=True)
    holders = max(1, len(group.holders))
    return numel // max(replicas * holders if is_part else size for is_part, replicas, size in homes)


def _take_turns(buckets: Sequence[Bucket]) -> tuple[int | None, ...]:
    """Let two cells combine buckets in turn: half as many messages as where each combines half of each bucket.

    Both directions of the link stay busy, since of two buckets that follow each other one goes each way: they must be
    about as large.
    """
    combiners: list[int | None] = []
    for one, other in zip(buckets[::2], buckets[1::2], strict=False):
        small, large = sorted(bucket.stop - bucket.start for bucket in (one, other))
        combiners += (0, 1) if large <= MOST_UNLIKE * small else (None, None)
    return (*combiners, None) if len(buckets) % 2 else tuple(combiners)
