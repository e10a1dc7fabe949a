"""The exchange: walk the plan's lanes, swap shards between cells, combine, and hand the result round at home.

One body for every layout: a bucket is packed, averaged at home where asked (buffers), swapped between its owners point
to point, combined by each owner in the order of the cells, broadcast at home and unpacked.

A local failure (memory, a tensor that went away) does not stop the dance: the rank keeps sending and receiving, so that
nobody waits for it, and reports the failure to the vote. Only a failed communication stops it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from xffl.aggregation.manifest import Entry, canonical_axis, spans
from xffl.aggregation.mean import weighted_mean
from xffl.aggregation.plan import Bucket, Item, Lane
from xffl.topology import Topology

__all__ = ["Exchange", "Homes", "Turnout"]


@dataclass(frozen=True)
class Homes:
    """The process groups that a rank's exchange uses.

    :param across: The group in which owners swap shards; ``None`` on a rank that sends nothing.
    :param replica: The ranks of the cell that hold this rank's shard; ``None`` where there is one.
    :param cell: All ranks of the cell; ``None`` where there is one.
    """

    across: dist.ProcessGroup | None
    replica: dist.ProcessGroup | None
    cell: dist.ProcessGroup | None


@dataclass(frozen=True)
class Turnout:
    """Whose values count in a round.

    :param weights: One weight for each cell; cells of weight 0 send nothing.
    :param first: The cell that tensors of policy ``first`` are taken from.
    """

    weights: tuple[float, ...]
    first: int

    def senders(self, lane: Lane) -> tuple[int, ...]:
        """Return the cells whose values a lane needs, in order."""
        if lane.rule == "first":
            return (self.first,)
        return tuple(cell for cell, weight in enumerate(self.weights) if weight > 0.0)


class Exchange:
    """Everything that one rank moves in a round.

    With ``atomic`` the new values are collected beside the model, one copy of this rank's shard, until :meth:`commit`
    writes them; else they are written bucket by bucket.

    :param entries: The moving tensors, in the plan's order.
    :param items: The same tensors as the plan sees them.
    :param axes: For each cell, the axis along which it cuts each tensor.
    :param lanes: The lanes of this rank.
    :param topology: The federation.
    :param rank: This rank.
    :param homes: Its process groups.
    :param device: Where buffers live: where the groups' backend communicates from.
    :param bucket_bytes: Size of a bucket.
    :param atomic: Whether new values wait for :meth:`commit`.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        items: Sequence[Item],
        axes: Sequence[Sequence[int]],
        lanes: Sequence[Lane],
        *,
        topology: Topology,
        rank: int,
        homes: Homes,
        device: torch.device,
        bucket_bytes: int,
        atomic: bool,
    ) -> None:
        self._entries = tuple(entries)
        self._lanes = tuple(lanes)
        self._topology = topology
        self._at = topology.coordinates(rank)
        self._homes = homes
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._atomic = atomic
        self._axis = tuple(canonical_axis(entry, [cell[i] for cell in axes]) for i, entry in enumerate(entries))
        # Where this rank's part of each tensor begins, in canonical order.
        cuts = [item.cuts[self._at.cell] for item in items]
        self._origin = tuple(cut.bounds(self._at.shard)[0] if cut.is_held_by_part else 0 for cut in cuts)
        # A lane's values: all of them with ``atomic``, else one bucket. Made in the first round and kept: fresh memory is slow.
        self._own: list[torch.Tensor] = []
        self._turnout = Turnout((1.0,), 0)
        self.failure: Exception | None = None
        self.bytes_across = 0
        self.bytes_home = 0

    def run(self, turnout: Turnout) -> None:
        """Swap, combine and hand round every bucket of every lane.

        Collective over the world. Afterwards :attr:`failure` holds the first local failure, ``bytes_across`` and
        ``bytes_home`` what this rank sent.

        :param turnout: Whose values count; the same on all ranks.
        """
        self._turnout, self.failure = turnout, None
        self.bytes_across = self.bytes_home = 0
        self._own = self._own or [self._buffer(lane) for lane in self._lanes]
        for lane, own in zip(self._lanes, self._own, strict=True):
            for bucket in lane.buckets(self._limit(lane)):
                part = own[bucket.start : bucket.stop] if self._atomic else own[: bucket.stop - bucket.start]
                self._move(lane, bucket, part)
                if not self._atomic:
                    with self._noting():
                        self._unpack(bucket, part)

    def commit(self) -> None:
        """Write the collected values into the model; local. Without ``atomic`` they are there already."""
        for lane, own in zip(self._lanes, self._own, strict=True) if self._atomic else ():
            for bucket in lane.buckets(lane.numel):
                self._unpack(bucket, own)

    def _limit(self, lane: Lane) -> int:
        """Return the elements of a bucket."""
        return max(1, self._bucket_bytes // _dtype(lane).itemsize)

    def _buffer(self, lane: Lane) -> torch.Tensor:
        length = lane.numel if self._atomic else min(self._limit(lane), lane.numel)
        return torch.empty(length, dtype=_dtype(lane), device=self._device)

    def _move(self, lane: Lane, bucket: Bucket, own: torch.Tensor) -> None:
        """Turn this rank's values of a bucket, packed into ``own``, into the round's."""
        cell = self._at.cell
        owner = self._topology.sender(cell, lane.owners[cell])
        is_owner = owner == self._at.rank
        home = self._homes.replica if lane.held_by_part[cell] else self._homes.cell
        if is_owner or lane.is_mean_at_home:
            with self._noting():
                self._pack(bucket, own)
        if lane.is_mean_at_home and home is not None:
            self._mean_at_home(home, own)
        if is_owner:
            self._combine(lane, own)
        if home is not None:
            dist.broadcast(own.view(torch.uint8), src=owner, group=home)
            self.bytes_home += own.nbytes * (dist.get_world_size(home) - 1) if is_owner else 0

    def _mean_at_home(self, home: dist.ProcessGroup, own: torch.Tensor) -> None:
        """Replace a bucket by its mean over the ranks of ``home``, each counted alike."""
        values = [torch.empty_like(own) for _ in range(dist.get_world_size(home))]
        dist.all_gather([value.view(torch.uint8) for value in values], own.view(torch.uint8), group=home)
        self.bytes_home += own.nbytes * (len(values) - 1)
        with self._noting():
            weighted_mean(values, [1.0] * len(values), own)

    def _combine(self, lane: Lane, own: torch.Tensor) -> None:
        """Swap a bucket with its owners in the other cells and combine what came, in the order of the cells."""
        senders = self._turnout.senders(lane)
        values = self._swap(lane, senders, own)
        with self._noting():
            if lane.rule == "first":
                own.copy_(values[0])
            else:
                weighted_mean(values, [self._turnout.weights[cell] for cell in senders], own)

    def _swap(self, lane: Lane, senders: Sequence[int], own: torch.Tensor) -> list[torch.Tensor]:
        """Send a bucket to its other owners, where this cell's values count, and return those of ``senders``."""
        here = self._at.cell
        peers = [self._topology.sender(cell, owner) for cell, owner in enumerate(lane.owners)]
        values = [own if cell == here else torch.empty_like(own) for cell in senders]
        group = self._homes.across
        moves = [
            dist.P2POp(dist.irecv, value.view(torch.uint8), peers[cell], group=group)
            for cell, value in zip(senders, values, strict=True)
            if cell != here
        ]
        if here in senders:
            others = [peer for cell, peer in enumerate(peers) if cell != here]
            moves += [dist.P2POp(dist.isend, own.view(torch.uint8), peer, group=group) for peer in others]
            self.bytes_across += own.nbytes * len(others)
        for work in dist.batch_isend_irecv(moves) if moves else ():
            work.wait()
        return values

    def _pack(self, bucket: Bucket, into: torch.Tensor) -> None:
        for view, part in self._parts(bucket, into):
            part.view(view.shape).copy_(view)

    def _unpack(self, bucket: Bucket, values: torch.Tensor) -> None:
        for view, part in self._parts(bucket, values):
            view.copy_(part.view(view.shape))

    def _parts(self, bucket: Bucket, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pair views of the model's tensors with the stretches of a bucket that belong to them."""
        offset = 0
        for index, start, stop in bucket.pieces:
            origin = self._origin[index]
            elements = self._entries[index].elements(self._axis[index])
            for view in spans(elements, start - origin, stop - origin):
                yield view, flat[offset : offset + view.numel()]
                offset += view.numel()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Note a local failure for the vote and go on, so that no other rank waits for this one."""
        try:
            yield
        except Exception as error:
            self.failure = self.failure or error


def _dtype(lane: Lane) -> torch.dtype:
    dtype = getattr(torch, lane.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
