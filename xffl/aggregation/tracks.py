"""The plan as one rank walks it: its lanes with their buckets, forms, codecs and process groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from xffl.aggregation.codec import Codec
from xffl.aggregation.plan import Bucket, Lane
from xffl.aggregation.routes import Routes
from xffl.report.forms import IN_FLIGHT, form_of, in_flight
from xffl.topology import Topology

__all__ = ["Track", "Turnout", "make_tracks"]

MOST_UNLIKE = 1.25
"""Ratio of the sizes of two buckets up to which two cells take turns in combining them."""


@dataclass(frozen=True)
class Turnout:
    """Whose values count in a round.

    :param weights: One weight for each cell; cells of weight 0 send nothing.
    :param first: The cell that tensors of policy ``first`` are taken from.
    :param number: The round's number, from 1.
    :param is_fused: Whether two values may be combined in one fused step: no rank holds one whose square leaves fp32,
        so that differences do not either, and all have the same arithmetic.
    :param steps: Effective local steps of each cell since its last round.
    :param norms: The L2 norm of each cell's update, of what training changes; ``None`` where nobody keeps the
        state that it started from.
    :param counts: What each cell's values count for, once a combiner has looked at all of this.
    :param scale: What the way from the last agreed model to the combined one is multiplied by.
    :param attempt: Number of the masks of a secure sum.
    """

    weights: tuple[float, ...]
    first: int
    number: int = 1
    is_fused: bool = False
    steps: tuple[float, ...] = ()
    norms: tuple[float, ...] | None = None
    counts: tuple[float, ...] = ()
    scale: float = 1.0
    attempt: int = 0

    def share(self, cell: int) -> float:
        """Return what a cell's values count for, of all."""
        return self.counts[cell] / math.fsum(self.counts)

    @cached_property
    def cells(self) -> tuple[int, ...]:
        """The cells that contribute, in order."""
        return tuple(cell for cell, weight in enumerate(self.weights) if weight > 0.0)

    def senders(self, lane: Lane) -> tuple[int, ...]:
        """Return the cells whose values a lane needs, in order."""
        if lane.rule == "first":
            return (self.first,)
        return self.cells


@dataclass(frozen=True)
class Track:
    """A lane as this rank walks it.

    :param number: Its place among the rank's lanes.
    :param lane: What it moves.
    :param buckets: Its pieces on the way.
    :param dtype: Data type of its values.
    :param is_two_hop: Whether each cell combines one part of what crosses, instead of all of it.
    :param codec: How values are written on the slow link; ``None`` as they are.
    :param routes: The process groups.
    :param is_part: Whether a rank of the cell holds a part of it, and not all.
    :param depth: Buckets that are on the slow link at a time, in each hop, of all replicas that take turns.
    :param is_late: Whether two cells swap all their values, and each rank combines them where they lie in the model,
        when the round is written: so the values are passed over once less, and looked at when they are sent.
    :param combiners: In two hops, by bucket the cell that combines all of it; ``None`` where each cell combines a part.
    """

    number: int
    lane: Lane
    buckets: tuple[Bucket, ...]
    dtype: torch.dtype
    is_two_hop: bool
    codec: Codec | None
    routes: Routes
    is_part: bool
    depth: int = IN_FLIGHT
    is_late: bool = False
    combiners: tuple[int | None, ...] = ()

    @property
    def home(self) -> dist.ProcessGroup | None:
        """Who gets the result at home; ``None`` where nobody else does."""
        if self.lane.holders:
            return self.routes.holders[self.lane.holders]
        return self.routes.replica if self.is_part else self.routes.cell

    @property
    def ahead(self) -> int:
        """Buckets that a rank is ready to receive before it sends its own.

        gloo sends only what a receiver has asked for, and the asking queues behind what the receiver sends itself:
        without this the slow link would pause for its latency. What is combined late arrives where it stays.
        """
        return self.depth if self.is_late else self.depth // 2

    @property
    def pace(self) -> tuple[object, ...]:
        """What lanes have in common whose buckets follow each other without a pause: who takes part, how far ahead."""
        return self.lane.participants, self.ahead

    def parts(self, bucket: Bucket) -> list[slice]:
        """Return what each cell combines of a bucket, counted in it."""
        cells, numel = len(self.lane.owners), bucket.stop - bucket.start
        if not self.is_two_hop:
            return [slice(0, numel)] * cells
        combiner = self.combiners[bucket.number] if self.combiners else None
        if combiner is None:
            return [bucket.part(cell, cells) for cell in range(cells)]
        return [slice(numel * (cell > combiner), numel * (cell >= combiner)) for cell in range(cells)]

    def cut(self, bucket: Bucket, values: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return what each cell combines of a bucket's values, as views."""
        if self.is_two_hop:  # in one call, and in one of torch's that does not go through Python
            return values.split_with_sizes(self._sizes[bucket.number])
        return [values] * len(self.lane.owners)

    @cached_property
    def _sizes(self) -> list[list[int]]:
        """Elements of each part of each bucket."""
        return [[part.stop - part.start for part in self.parts(bucket)] for bucket in self.buckets]


def make_tracks(
    lanes: Sequence[Lane],
    *,
    topology: Topology,
    rank: int,
    routes: Routes,
    bucket_bytes: int,
    form: str,
    codecs: Mapping[str, Codec | None],
    device: torch.device,
    combines_late: bool,
) -> tuple[Track, ...]:
    """Prepare the lanes of a rank; all participants of a lane find the same buckets and form.

    :param lanes: The lanes, in the order in which all ranks walk them.
    :param topology: The federation.
    :param rank: The rank.
    :param routes: Its process groups.
    :param bucket_bytes: Bytes of a bucket, at most.
    :param form: One of :data:`xffl.report.forms.FORMS`.
    :param codecs: The codec of each name that lanes carry.
    :param device: Where the groups' backend communicates from.
    :param combines_late: Whether values may be combined when the round is written.
    :return: The tracks, in the lanes' order.
    """
    cell = topology.cell_of(rank)
    tracks = []
    for number, lane in enumerate(lanes):
        dtype = getattr(torch, lane.dtype)
        assert isinstance(dtype, torch.dtype)
        limit = bucket_bytes // dtype.itemsize
        if lane.is_mean_at_home:
            # A whole cell's buckets come together; all participants must find the same limit, so the largest counts.
            homes = zip(lane.held_by_part, topology.replica_counts, topology.sizes, strict=True)
            holders = max(1, len(lane.holders))
            limit //= max(replicas * holders if is_part else size for is_part, replicas, size in homes)
        turns = max(topology.replica_counts) if routes.is_railed else 1
        if routes.is_railed:
            limit = min(limit, -(-lane.numel // (IN_FLIGHT * turns)))  # all have some to carry
        buckets = tuple(lane.buckets(max(1, limit)))
        codec = codecs.get(lane.codec) if topology.cells > 1 else None  # nothing crosses in one cell
        # What is taken from one cell needs no combining.
        taken = "all_gather"
        # Over NCCL this was not measured; other types than fp32 take long to combine, so each cell does half of that.
        is_late = combines_late and not routes.is_railed and device.type == "cpu" and _is_alone(lane, topology)
        is_late = is_late and lane.dtype == "float32" and codec is None and form != "two_hop"
        if lane.rule == "average" and not is_late:
            taken = form_of(lane.numel * dtype.itemsize, topology.cells, form, is_exact=codec is None)
        # Small tensors are packed, and each bucket of them under way takes a buffer more.
        is_packed = sum(len(bucket.pieces) > 1 for bucket in buckets) > IN_FLIGHT
        largest = max((bucket.stop - bucket.start for bucket in buckets), default=0) * dtype.itemsize
        depth = IN_FLIGHT if is_packed else in_flight(largest, len(buckets) / turns, topology.cells, taken)
        is_part = lane.held_by_part[cell]
        is_two_hop = taken == "two_hop"
        takes_turns = is_two_hop and topology.cells == 2 and codec is None and not routes.is_railed
        # NCCL works off what is posted on a group bucket by bucket, so each bucket has to use both directions there.
        combiners = _take_turns(buckets) if takes_turns and device.type == "cpu" else ()
        tracks.append(
            Track(number, lane, buckets, dtype, is_two_hop, codec, routes, is_part, depth * turns, is_late, combiners)
        )
    return tuple(tracks)


def _is_alone(lane: Lane, topology: Topology) -> bool:
    """Tell whether two cells average a lane of which each has one holder, so that nobody at home waits for the mean."""
    if topology.cells != 2 or lane.rule != "average" or lane.is_mean_at_home or lane.holders:
        return False
    homes = zip(lane.held_by_part, topology.replica_counts, topology.sizes, strict=True)
    return all((replicas if is_part else size) == 1 for is_part, replicas, size in homes)


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
