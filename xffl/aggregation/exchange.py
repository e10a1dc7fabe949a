"""The exchange: walk the plan's lanes, swap shards between cells, combine, and hand the result round at home.

One body for every layout: a bucket is packed, averaged at home where asked (buffers), swapped between its owners point
to point, combined by each owner in the order of the cells, broadcast at home and unpacked.

A local failure (memory, a tensor that went away) does not stop the dance: the rank keeps sending and receiving, so that
nobody waits for it, and reports the failure to the vote. Only a failed communication stops it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from xffl.aggregation.manifest import Entry, canonical_axis, spans
from xffl.aggregation.mean import weighted_mean
from xffl.aggregation.plan import Bucket, Item, Lane
from xffl.errors import ConfigError
from xffl.topology import Topology

__all__ = ["Exchange", "Homes", "Turnout"]

IN_FLIGHT = 2
"""Buckets under way at a time: while one crosses, the one before is combined and handed round."""


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


@dataclass
class _Flight:
    """A bucket on its way across."""

    lane: Lane
    bucket: Bucket
    own: torch.Tensor
    values: list[torch.Tensor] = field(default_factory=list)
    works: list[dist.Work] = field(default_factory=list)


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
        self._atomic = atomic
        self._buckets = tuple(tuple(lane.buckets(self._limit(lane, bucket_bytes))) for lane in lanes)
        self._axis = tuple(canonical_axis(entry, [cell[i] for cell in axes]) for i, entry in enumerate(entries))
        # Where this rank's part of each tensor begins, in canonical order.
        cuts = [item.cuts[self._at.cell] for item in items]
        spans_held = [cut.bounds(self._at.shard) if cut.is_held_by_part else (0, cut.numel) for cut in cuts]
        self._origin = tuple(start for start, _ in spans_held)
        self._held = tuple(stop - start for start, stop in spans_held)
        # Made in the first round and kept, since fresh memory is slow.
        self._stages: list[torch.Tensor] = []
        self._slots: list[torch.Tensor] = []
        self._at_home = torch.empty(0)
        # This rank's elements of each tensor, in this round; flat, where they follow each other in memory.
        self._views: list[torch.Tensor] = []
        self._posted = 0
        self._turnout = Turnout((1.0,), 0)
        self.failure: Exception | None = None
        self.bytes_across = 0
        self.bytes_home = 0

    @torch.no_grad()
    def nonfinite(self) -> list[str]:
        """Name tensors to be averaged that hold a value which is not finite, among those that this rank sends; local.

        One pass over the values, which packs them as well.

        :return: The names, in order.
        """
        self._prepare()
        found: set[int] = set()
        for lane, bucket, own in self._walk():
            if self._is_packed(lane):
                self._pack(bucket, own)
                if lane.rule == "average" and not _is_finite(own):
                    parts = torch.split(own, [piece.stop - piece.start for piece in bucket.pieces])
                    pieces = zip(bucket.pieces, parts, strict=True)
                    found.update(piece.item for piece, part in pieces if not _is_finite(part))
        return [self._entries[index].name for index in sorted(found)]

    @torch.no_grad()
    def run(self, turnout: Turnout) -> None:
        """Swap, combine and hand round every bucket of every lane, once :meth:`nonfinite` has looked at them.

        Collective over the world. While a bucket crosses, the one before is combined and handed round at home.
        Afterwards :attr:`failure` holds the first local failure, ``bytes_across`` and ``bytes_home`` what this rank
        sent.

        :param turnout: Whose values count; the same on all ranks.
        """
        self._turnout, self.failure = turnout, None
        self.bytes_across = self.bytes_home = 0
        flights: deque[_Flight] = deque()
        for lane, bucket, own in self._walk():
            # The mean at home is a collective that other ranks may enter with fewer buckets under way: land them first.
            while flights and (len(flights) == IN_FLIGHT or lane.is_mean_at_home):
                self._land(flights.popleft())
            flights.append(self._take_off(lane, bucket, own))
        while flights:
            self._land(flights.popleft())

    @torch.no_grad()
    def commit(self) -> None:
        """Write the collected values into the model; local. Without ``atomic`` they are there already."""
        for _, bucket, own in self._walk() if self._atomic else ():
            self._unpack(bucket, own)

    def _prepare(self) -> None:
        """Look all tensors up anew, the ones that are only received too, and make the buffers if there are none yet."""
        elements = (entry.elements(axis) for entry, axis in zip(self._entries, self._axis, strict=True))
        self._views = [view.view(-1) if view.is_contiguous() else view for view in elements]
        for entry, view, held in zip(self._entries, self._views, self._held, strict=True):
            if view.numel() != held:
                raise ConfigError(
                    f"this rank holds {view.numel()} elements of tensor {entry.name!r} and held {held} when the "
                    "Aggregator was made; make a new Aggregator after sharding the model"
                )
        # Buffers outlive the round, so they must not be inference tensors if that is where the first round takes place.
        with torch.inference_mode(False):
            self._make_buffers()

    def _make_buffers(self) -> None:
        if not self._slots:
            room = _room(zip(self._lanes, self._buckets, strict=True))
            self._slots = [
                torch.empty(self._topology.cells, room, dtype=torch.uint8, device=self._device)
                for _ in range(IN_FLIGHT)
            ]
            means = [
                (lane, buckets)
                for lane, buckets in zip(self._lanes, self._buckets, strict=True)
                if lane.is_mean_at_home
            ]
            homes = [home.size() for lane, _ in means if (home := self._home(lane)) is not None]
            shape = (max(homes, default=0), _room(means))
            self._at_home = torch.empty(shape, dtype=torch.uint8, device=self._device)
        if self._atomic and not self._stages:
            self._stages = [torch.empty(lane.numel, dtype=_dtype(lane), device=self._device) for lane in self._lanes]

    def _limit(self, lane: Lane, bucket_bytes: int) -> int:
        """Return the elements of a bucket; fewer where a whole cell's buckets come together for a mean at home.

        All participants of a lane must find the same number, so the largest home of all cells counts.
        """
        members = 1
        if lane.is_mean_at_home:
            homes = zip(lane.held_by_part, self._topology.replica_counts, self._topology.sizes, strict=True)
            members = max(replicas if is_part else size for is_part, replicas, size in homes)
        return max(1, bucket_bytes // (_dtype(lane).itemsize * members))

    def _walk(self) -> Iterator[tuple[Lane, Bucket, torch.Tensor]]:
        """Yield all buckets, each with the buffer for this rank's values: its stage, or the slot that is free next."""
        slots = itertools.cycle(range(IN_FLIGHT))
        for number, (lane, buckets) in enumerate(zip(self._lanes, self._buckets, strict=True)):
            for bucket in buckets:
                if self._atomic:
                    yield lane, bucket, self._stages[number][bucket.start : bucket.stop]
                else:
                    yield lane, bucket, self._slot(lane, bucket, next(slots), self._at.cell)

    def _slot(self, lane: Lane, bucket: Bucket, slot: int, cell: int) -> torch.Tensor:
        """Return a buffer for a cell's values of a bucket."""
        dtype = _dtype(lane)
        return self._slots[slot][cell, : (bucket.stop - bucket.start) * dtype.itemsize].view(dtype)

    def _is_owner(self, lane: Lane) -> bool:
        return self._at.is_sender and lane.owners[self._at.cell] == self._at.shard

    def _is_packed(self, lane: Lane) -> bool:
        """Tell whether this rank's values of a lane are needed: by its peers, or by its cell for a mean at home."""
        return self._is_owner(lane) or lane.is_mean_at_home

    def _home(self, lane: Lane) -> dist.ProcessGroup | None:
        return self._homes.replica if lane.held_by_part[self._at.cell] else self._homes.cell

    def _take_off(self, lane: Lane, bucket: Bucket, own: torch.Tensor) -> _Flight:
        """Pack a bucket and start it on its way across."""
        if self._is_packed(lane) and not self._atomic:  # a stage has been packed by nonfinite()
            with self._noting():
                self._pack(bucket, own)
        home = self._home(lane)
        if lane.is_mean_at_home and home is not None:
            self._mean_at_home(home, own)
        flight = _Flight(lane, bucket, own)
        if self._is_owner(lane):
            self._send(flight)
        return flight

    def _land(self, flight: _Flight) -> None:
        """Combine a bucket once its peers' values are here, hand it round at home and unpack it."""
        lane, own = flight.lane, flight.own
        if self._is_owner(lane):
            for work in flight.works:
                work.wait()
            with self._noting():
                self._combine(flight)
        home = self._home(lane)
        if home is not None:
            owner = self._topology.sender(self._at.cell, lane.owners[self._at.cell])
            dist.broadcast(own.view(torch.uint8), src=owner, group=home)
            self.bytes_home += own.nbytes * (home.size() - 1) if self._is_owner(lane) else 0
        if not self._atomic:
            with self._noting():
                self._unpack(flight.bucket, own)

    def _mean_at_home(self, home: dist.ProcessGroup, own: torch.Tensor) -> None:
        """Replace a bucket by its mean over the ranks of ``home``, each counted alike."""
        gathered = [row[: own.nbytes] for row in self._at_home[: home.size()]]
        dist.all_gather(gathered, own.view(torch.uint8), group=home)
        values = [row.view(own.dtype) for row in gathered]
        self.bytes_home += own.nbytes * (len(values) - 1)
        with self._noting():
            weighted_mean(values, [1.0] * len(values), own)

    def _send(self, flight: _Flight) -> None:
        """Post a bucket to its other owners, where this cell's values count, and the receipt of theirs."""
        lane, own, here = flight.lane, flight.own, self._at.cell
        senders = self._turnout.senders(lane)
        peers = [self._topology.sender(cell, owner) for cell, owner in enumerate(lane.owners)]
        slot = self._posted % IN_FLIGHT
        self._posted += 1
        group = self._homes.across
        moves = []
        for cell in senders:
            value = own if cell == here else self._slot(lane, flight.bucket, slot, cell)
            flight.values.append(value)
            if cell != here:
                moves.append(dist.P2POp(dist.irecv, value.view(torch.uint8), peers[cell], group=group))
        if here in senders:
            others = [peer for cell, peer in enumerate(peers) if cell != here]
            moves += [dist.P2POp(dist.isend, own.view(torch.uint8), peer, group=group) for peer in others]
            self.bytes_across += own.nbytes * len(others)
        flight.works.extend(dist.batch_isend_irecv(moves) if moves else ())

    def _combine(self, flight: _Flight) -> None:
        """Combine the values of a bucket, in the order of the cells."""
        if flight.lane.rule == "first":
            flight.own.copy_(flight.values[0])
        else:
            weights = [self._turnout.weights[cell] for cell in self._turnout.senders(flight.lane)]
            weighted_mean(flight.values, weights, flight.own)

    def _pack(self, bucket: Bucket, into: torch.Tensor) -> None:
        views = self._views_of(bucket)
        if all(view.dim() == 1 and view.device == into.device for view in views):
            torch.cat(views, out=into)  # one call, where many small tensors would cost one each
            return
        for view, part in zip(views, _split(into, views), strict=True):
            part.view(view.shape).copy_(view)

    def _unpack(self, bucket: Bucket, values: torch.Tensor) -> None:
        views = self._views_of(bucket)
        for view, part in zip(views, _split(values, views), strict=True):
            view.copy_(part.view(view.shape) if view.dim() != 1 else part)

    def _views_of(self, bucket: Bucket) -> list[torch.Tensor]:
        """Return the model's elements in a bucket, as views that follow each other."""
        views: list[torch.Tensor] = []
        for item, start, stop in bucket.pieces:
            elements = self._views[item]
            if elements.dim() == 1 and stop - start == elements.numel():
                views.append(elements)
            else:
                views += spans(elements, start - self._origin[item], stop - start)
        return views

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Note a local failure for the vote and go on, so that no other rank waits for this one."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - told to all ranks by the vote
            self.failure = self.failure or error


def _dtype(lane: Lane) -> torch.dtype:
    dtype = getattr(torch, lane.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _room(walks: Iterable[tuple[Lane, Sequence[Bucket]]]) -> int:
    """Return the bytes that the largest bucket needs, in whole cache lines so that any data type is aligned."""
    sizes = (_dtype(lane).itemsize * max(b.stop - b.start for b in buckets) for lane, buckets in walks)
    return -(-max(sizes, default=0) // 64) * 64


def _split(values: torch.Tensor, views: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Cut a bucket's values into the parts that belong to views."""
    return torch.split(values, [view.numel() for view in views])


def _is_finite(values: torch.Tensor) -> bool:
    """Tell whether all values are finite."""
    if not values.is_floating_point() or not values.numel():
        return True
    if values.dtype.itemsize == 1:
        values = values.float()  # torch finds no extremes of 8-bit floats
    return bool(torch.stack(torch.aminmax(values)).isfinite().all())
