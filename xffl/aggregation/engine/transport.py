"""Transport of a bucket from cell to cell: as it is, masked or encoded; in one hop or two."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from xffl.aggregation.algorithms.combiners import Combiner, Coordinatewise
from xffl.aggregation.compression import ErrorFeedback
from xffl.aggregation.engine.buffers import HostCopies, Pool, aligned
from xffl.aggregation.engine.groups import Progress, RoundGroups, RoundScope, start_moves
from xffl.aggregation.engine.plan import Bucket, GroupTransfer, RoundContext
from xffl.aggregation.mean import combined, piece_length, weighted_mean
from xffl.aggregation.privacy import Masker
from xffl.aggregation.report import RoundProfile
from xffl.distributed.cross_world import CrossWorldGroup, Work
from xffl.distributed.faults import inject

__all__ = ["CrossCellTransport", "Link", "add_distances"]


TAG = 7_100
"""Tells a round's messages from those that a caller sends over the same group."""


class Link:
    """The link between cells as one rank uses it: who sends what, and the buffers that rounds use again."""

    def __init__(
        self,
        transfers: Sequence[GroupTransfer],
        scope: RoundScope,
        round_groups: RoundGroups,
        combiner: Combiner,
        masker: Masker | None,
    ) -> None:
        self.sizes, self.cells = scope.topology.sizes, scope.topology.cells
        self.rank, self.cell = scope.rank, scope.topology.cell_of(scope.rank)
        self.others = [cell for cell in range(self.cells) if cell != self.cell]
        self.round_groups, self.arena = round_groups, scope.arena
        self.host_copies = HostCopies() if scope.arena is None else scope.arena.host_copies
        self.combiner, self.masker = combiner, masker
        self.device = device = scope.device
        self.home_device, timeouts = scope.home_device, scope.state.timeouts
        self.progress = self.home_progress = Progress(device, timeouts.across_s)
        if self.home_device is not None:  # as the groups that hand results on, which outlast the exchange
            self.home_progress = Progress(self.home_device, (timeouts.across_s + timeouts.session_s) / 2)
        self._needed: dict[tuple[int, ...], int] = {}
        self._gathered: dict[int, torch.Tensor] = {}
        # Buffers are made in the first round and kept, since fresh memory is slow.
        self.slots = Pool(max((self._slot_bytes(t, b) for t in transfers for b in t.buckets), default=0), device)
        self.feedback = {
            transfer.number: ErrorFeedback(transfer.codec, transfer.group.numel, transfer.dtype, device)
            for transfer in transfers
            if transfer.codec is not None and transfer.is_sender
        }
        # A row for each cell's values as the codec gives them back, one for what it leaves out, one for their mean.
        widest = max((b.stop - b.start for t in transfers if t.codec is not None for b in t.buckets), default=0)
        rows = self.cells + 2 if widest else 0
        self.scratch = torch.empty(rows, widest, dtype=torch.float32, device=device)

    def reserve(self, transfers: Sequence[GroupTransfer]) -> None:
        """Make the buffers that a round over some groups needs; local."""
        key = tuple(transfer.number for transfer in transfers)
        if key not in self._needed:
            runs = itertools.groupby(transfers, key=lambda transfer: transfer.pace)  # these go on one behind the other
            self._needed[key] = max((self._at_a_time(list(transfers)) for _, transfers in runs), default=0)
        self.slots.reserve(self._needed[key])

    def _at_a_time(self, transfers: Sequence[GroupTransfer]) -> int:
        """Return how many buffers groups that follow each other take at a time."""
        under_way = max(
            self.ahead(t) + t.depth * (2 if t.reduce_scatter and t.codec is not None else 1) for t in transfers
        )
        takes = (self._takes_slot(transfer, bucket) for transfer in transfers for bucket in transfer.buckets)
        sums = [0, *itertools.accumulate(takes)]
        return max(stop - start for start, stop in zip(sums, sums[under_way:] or sums[-1:], strict=False))

    def _takes_slot(self, transfer: GroupTransfer, bucket: Bucket) -> bool:
        if not transfer.is_sent_here(bucket):
            return False
        here = transfer.parts(bucket)[self.cell]
        return here.stop > here.start or transfer.codec is not None or self.is_masked(transfer)

    def reserve_rows(self, transfer: GroupTransfer, *, is_encoded: bool) -> None:
        """Make a row for each cell's values of a group: as large as the cells' shards together; local."""
        dtype = torch.float32 if is_encoded else transfer.dtype
        if transfer.number not in self._gathered or self._gathered[transfer.number].dtype != dtype:
            with torch.inference_mode(False):
                rows = torch.empty(self.cells, transfer.group.numel, dtype=dtype, device=self.device)
            self._gathered[transfer.number] = rows

    def rows_of(self, transfer: GroupTransfer, bucket: Bucket) -> torch.Tensor:
        """Return a bucket's rows, ``[cells, elements]``."""
        return self._gathered[transfer.number][:, bucket.start : bucket.stop]

    def pause(self, transfer: GroupTransfer) -> int:
        """Return for how many buckets a group's way to this cell and back pauses in all."""
        hops = 2 if transfer.reduce_scatter else 1
        return self.ahead(transfer) + transfer.depth * hops

    def ahead(self, transfer: GroupTransfer) -> int:
        """Return how many buckets before it sends its own a rank is ready to receive; NCCL posts both together."""
        return transfer.ahead if self.device.type == "cpu" else 0

    def _slot_bytes(self, transfer: GroupTransfer, bucket: Bucket) -> int:
        """Return what a bucket needs for what arrives from each other cell, and for what leaves encoded."""
        numel = max(part.stop - part.start for part in transfer.parts(bucket))
        arriving = len(self.others)
        rows = arriving + (self.cells if transfer.reduce_scatter else 1)
        if self.is_masked(transfer):
            return aligned(numel * torch.int64.itemsize) * rows
        exact = aligned(numel * transfer.dtype.itemsize) * arriving
        return exact if transfer.codec is None else max(exact, aligned(transfer.codec.nbytes(numel)) * rows)

    def seed_of(self, round_number: int, transfer: GroupTransfer, bucket: Bucket, part: int) -> int:
        """Return a seed for stochastic rounding that no other code of the run has."""
        rank = self.round_groups.first + self.rank
        numbers = (round_number, transfer.number, bucket.number, part, rank, self.sizes)
        return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=7).digest(), "little")

    def is_masked(self, transfer: GroupTransfer) -> bool:
        """Tell whether the cells learn only the sum of a group's values."""
        return self.masker is not None and transfer.group.rule == "average"


class CrossCellTransport:
    """The exchange of buckets between cells in one round, among the senders of each bucket.

    All forms and encodings take the same steps, in :meth:`exchange`; what is sent, what arrives, and what is made of it
    is up to one of the classes below: :class:`ExactValues`, :class:`MaskedValues`, :class:`EncodedSteps`, and for
    combiners that compare whole models :class:`GatheredValues` and :class:`GatheredSteps`; and for what one cell hands
    over :class:`SharedValues`. In the all-gather form each cell combines all of a bucket, in the reduce-scatter form
    one part of it (:meth:`GroupTransfer.parts`), whose result a second hop sends to all cells.
    """

    def __init__(
        self,
        link: Link,
        context: RoundContext,
        profile: RoundProfile,
        *,
        is_encoding: bool,
        targets: Collection[int] = (),
    ) -> None:
        self.link, self.context, self.profile = link, context, profile
        self.targets = targets  # the cells that take over what is shared
        self._is_encoding = is_encoding  # lossy codecs know the agreed state that they start from
        self.is_cut_off = False
        """Whether another cell was lost. This rank goes on inside its cell, so that no replica waits, and says no."""

    def is_encoded(self, transfer: GroupTransfer) -> bool:
        """Tell whether a group's values cross encoded."""
        return transfer.codec is not None and self._is_encoding

    def exchange(
        self, transfer: GroupTransfer, bucket: Bucket, values: torch.Tensor, out: torch.Tensor
    ) -> Iterator[int]:
        """Exchange a bucket with its senders in the other cells; yields for how many buckets it can pause."""
        masked = MaskedValues if self.link.is_masked(transfer) else ExactValues
        kind = EncodedSteps if self.is_encoded(transfer) else masked
        return self._exchange(kind(self, transfer, bucket, values, out))

    def share(self, transfer: GroupTransfer, bucket: Bucket, values: torch.Tensor, out: torch.Tensor) -> Iterator[int]:
        """Send values of a bucket from the only source to the targets; both have them in ``out`` then."""
        return self._exchange(SharedValues(self, transfer, bucket, values, out))

    def gather(self, transfer: GroupTransfer, bucket: Bucket, values: torch.Tensor) -> Iterator[int]:
        """Exchange a bucket like :meth:`exchange`, but only keep what arrives, for :meth:`combine_gathered`."""
        kind = GatheredSteps if self.is_encoded(transfer) else GatheredValues
        with self.profile.capture_failure("pack"):
            self.link.host_copies.settle(bucket)  # read as soon as the payload is made
        return self._exchange(kind(self, transfer, bucket, values, values))

    def _exchange(self, payload: ExactValues) -> Iterator[int]:
        transfer, bucket = payload.transfer, payload.bucket
        works: list[Work] = []
        receive = payload.receive
        if ahead := self.link.ahead(transfer):
            works, receive = self._post(transfer, bucket, 1, {}, receive), {}
            yield ahead
        with self.profile.capture_failure("pack"):
            self.link.host_copies.settle(bucket)
        payload.write()
        works += self._post(transfer, bucket, 1, payload.send, receive)
        yield transfer.depth
        self._arrive(works)
        payload.combine()
        if transfer.reduce_scatter:
            works = self._post(transfer, bucket, 2, *payload.second_hop())
            yield transfer.depth
            self._arrive(works)
        payload.finish()

    def lose(self, lost: RuntimeError) -> None:
        """Where cells are worlds of their own, go on without one and let all others know; else raise the error."""
        world = self.link.round_groups.world
        if not isinstance(world, CrossWorldGroup):
            raise lost
        self.is_cut_off = True
        self.profile.failure = self.profile.failure or lost
        world.poison()

    def combine_gathered(self, transfer: GroupTransfer, bucket: Bucket, out: torch.Tensor) -> None:
        """Combine what :meth:`gather` has kept of a bucket; local."""
        rows = self.link.rows_of(transfer, bucket)
        values = [rows[cell] for cell in self.context.source_cells(transfer.group)]
        with self.profile.capture_failure("combine"):
            if self.is_encoded(transfer):
                mean = self.link.scratch[-1, : out.numel()]
                self.combine(transfer, values, mean)
                self.link.feedback[transfer.number].advance(bucket, mean, out)
            else:
                self.combine(transfer, values, out)

    def combine(self, transfer: GroupTransfer, values: list[torch.Tensor], out: torch.Tensor) -> None:
        """Combine the senders' values, in the order of the cells."""
        if transfer.group.rule == "first":
            out.copy_(values[0])
        elif isinstance(self.link.combiner, Coordinatewise):
            combined(self.link.combiner.combine, values, out)
        else:
            counts = [self.context.counts[cell] for cell in self.context.source_cells(transfer.group)]
            weighted_mean(values, counts, out)

    def _post(
        self,
        transfer: GroupTransfer,
        bucket: Bucket,
        hop: int,
        send: Mapping[int, torch.Tensor],
        receive: Mapping[int, torch.Tensor],
    ) -> list[Work]:
        """Start sending to other cells' senders of a bucket, and receiving from them."""
        groups, first = self.link.round_groups.across, self.link.round_groups.first
        group = groups[bucket.number % len(groups)] if groups else None
        senders = transfer.senders_of(bucket)
        # What belongs together is matched by hop and order.
        arriving = [(values, first + senders[cell]) for cell, values in receive.items() if values.numel()]
        leaving = [(values, first + senders[cell]) for cell, values in send.items() if values.numel()]
        if self.is_cut_off:
            return []
        if arriving or leaving:
            self.profile.record_send(sum(values.nbytes for values, _ in leaving))
        with self.profile.phase("post"):
            try:
                inject("exchange")
                return start_moves(arriving, leaving, group, TAG + hop)
            except RuntimeError as lost:
                self.lose(lost)
                return []

    def _arrive(self, works: list[Work]) -> None:
        if self.is_cut_off:
            return
        with self.profile.phase("across"):
            try:
                for work in works:
                    work.wait()
            except RuntimeError as lost:
                self.lose(lost)
        if works:
            self.profile.arrived()
            self.link.progress.note()


class ExactValues:
    """A bucket's values on their way, as they are.

    ``send`` and ``receive`` are what the first hop moves, by the other cell; the methods follow in the order in which
    :class:`CrossCellTransport` calls them.
    """

    send: Mapping[int, torch.Tensor]
    receive: Mapping[int, torch.Tensor]

    def __init__(
        self,
        transport: CrossCellTransport,
        transfer: GroupTransfer,
        bucket: Bucket,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        self.transport, self.link = transport, transport.link
        self.transfer, self.bucket, self.values, self.out = transfer, bucket, values, out
        self.here, self.others = self.link.cell, self.link.others
        self.sources = transport.context.source_cells(transfer.group)
        self.is_source = self.here in self.sources
        self.arriving = [cell for cell in self.others if cell in self.sources]
        self.slot: torch.Tensor | None = None
        self._prepare()

    def _prepare(self) -> None:
        parts = self.transfer.cut(self.bucket, self.values)
        self._results = parts if self.out is self.values else self.transfer.cut(self.bucket, self.out)
        own = parts[self.here]
        held, arriving = {self.here: own}, list(self.arriving)
        if arriving and self.out.data_ptr() != self.values.data_ptr():
            held[arriving.pop()] = self._results[self.here]  # combined where it arrives
        if arriving and own.numel():
            self.slot = self.link.slots.acquire()
            rows = self.link.slots.rows(self.slot, self.transfer.dtype, len(self.others))
            held |= {cell: row[: own.numel()] for cell, row in zip(arriving, rows, strict=False)}
        self._held = held
        self.send = {cell: parts[cell] for cell in self.others} if self.is_source else {}
        self.receive = {cell: held[cell] for cell in self.others if cell in held}

    def write(self) -> None:
        """Write what is sent, just before it is sent."""

    def combine(self) -> None:
        """Combine what has arrived."""
        result = self._results[self.here]
        if result.numel():
            with self.transport.profile.capture_failure("combine"):
                found = [self._held[cell] for cell in self.sources]
                self._combine(found, result)
        self._release()

    def _combine(self, values: list[torch.Tensor], out: torch.Tensor) -> None:
        self.transport.combine(self.transfer, values, out)

    def second_hop(self) -> tuple[Mapping[int, torch.Tensor], Mapping[int, torch.Tensor]]:
        """Return what to send of the result and where to receive the others' results, by the other cell."""
        return dict.fromkeys(self.others, self._results[self.here]), {cell: self._results[cell] for cell in self.others}

    def finish(self) -> None:
        """Take over what all cells have made of the bucket."""

    def _release(self) -> None:
        self.link.slots.release(self.slot)
        self.slot = None


class MaskedValues(ExactValues):
    """A bucket's values as fixed-point numbers under masks, of which the cells learn only the sum."""

    def _prepare(self) -> None:
        transfer, cells = self.transfer, self.link.cells
        parts = transfer.cut(self.bucket, self.values)
        self._parts = transfer.parts(self.bucket)
        self._results = parts if self.out is self.values else transfer.cut(self.bucket, self.out)
        # All-gather: one row for all cells. Reduce-scatter: each cell gets the row of its part.
        addressees = range(cells) if transfer.reduce_scatter else [self.here]
        self.slot = self.link.slots.acquire()
        rows = self.link.slots.rows(self.slot, torch.int64, len(self.others) + len(addressees))
        numel = parts[self.here].numel()
        masked = dict(zip(addressees, rows[len(self.others) :], strict=True))
        leaving = [masked.get(cell, masked[self.here])[: part.numel()] for cell, part in enumerate(parts)]
        self._shares = {cell: leaving[cell] for cell in addressees} if self.is_source else {}
        self._held = {cell: row[:numel] for cell, row in zip(self.arriving, rows, strict=False)}
        self.receive = dict(self._held)
        self._held[self.here] = leaving[self.here]
        self.send = {cell: leaving[cell] for cell in self.others} if self.is_source else {}

    def write(self) -> None:
        """Write this cell's share of the bucket so that only the sum over the cells can be read, part by part."""
        link, context, transfer = self.link, self.transport.context, self.transfer
        assert link.masker is not None
        with self.transport.profile.capture_failure("encode"):
            for row in self._shares.values():
                row.zero_()  # what is sent if masking fails
            ranks = enumerate(transfer.senders_of(self.bucket))
            senders = {cell: rank for cell, rank in ranks if cell in context.cells}
            for cell, row in self._shares.items():
                place = (transfer.group.key, self.bucket.number, cell if transfer.reduce_scatter else -1)
                values, share = self.values[self._parts[cell]], context.share(self.here)
                link.masker.encode(values, share, row, place=place, senders=senders)

    def _combine(self, values: list[torch.Tensor], out: torch.Tensor) -> None:
        assert self.link.masker is not None
        self.link.masker.decode(values, out)


class EncodedSteps(ExactValues):
    """What a bucket differs by from the last agreed state, written by the group's codec.

    Everybody, the sender too, goes on with what the codes say, so that all ranks stay the same to the bit.
    """

    def _prepare(self) -> None:
        transfer, here = self.transfer, self.here
        self._parts = transfer.parts(self.bucket)
        assert transfer.codec is not None
        sizes = [transfer.codec.nbytes(part.stop - part.start) for part in self._parts]
        addressees = range(self.link.cells) if transfer.reduce_scatter else [here]
        self.slot = self.link.slots.acquire()
        rows = self.link.slots.rows(self.slot, torch.uint8, len(self.others) + len(addressees))
        own = {cell: row[: sizes[cell]] for cell, row in zip(addressees, rows[len(self.others) :], strict=True)}
        self._leaving = own
        self.send = {cell: own.get(cell, own[here]) for cell in self.others} if self.is_source else {}
        incoming = dict(zip(self.others, rows, strict=False))
        self._codes = {cell: row[: sizes[here]] for cell, row in incoming.items()} | {here: own[here]}
        self.receive = {cell: self._codes[cell] for cell in self.arriving}
        # In the second hop, the codes of the results: their rows are free again once this cell has combined its part.
        self._result_codes = {cell: row[: sizes[cell]] for cell, row in incoming.items()} | {here: own[here]}
        self._feedback = self.link.feedback[transfer.number]
        self._mean = self.link.scratch[-1, : self.values.numel()]

    def write(self) -> None:
        """Write this rank's step since the last agreed state, part by part."""
        if not self.is_source:
            return
        with self.transport.profile.capture_failure("encode"):
            step = self._mean  # free until the mean is taken
            self._feedback.difference(self.bucket, self.values, step)
            for cell, code in self._leaving.items():
                self._encode(step[self._parts[cell]], code, cell)

    def _encode(self, values: torch.Tensor, code: torch.Tensor, part: int) -> None:
        """Encode one part of the bucket, -1 for the result of this cell's."""
        seed = self.link.seed_of(self.transport.context.number, self.transfer, self.bucket, part)
        spare = self.link.scratch[-2, : values.numel()]
        self._feedback.encode((self.bucket.number, part), values, code, spare, seed)

    def combine(self) -> None:
        """Combine what the codes of this cell's part say, and encode the result for the second hop."""
        if not self.transfer.reduce_scatter:
            return
        own = self._mean[self._parts[self.here]]
        with self.transport.profile.capture_failure("combine"):
            self._combine_codes(own)
            self._encode(own, self._result_codes[self.here], -1)

    def _combine_codes(self, out: torch.Tensor) -> None:
        rows = [self.link.scratch[row, : out.numel()] for row in range(len(self.sources))]
        for cell, row in zip(self.sources, rows, strict=True):
            self._feedback.decode(self._codes[cell], row)
        self.transport.combine(self.transfer, rows, out)

    def second_hop(self) -> tuple[Mapping[int, torch.Tensor], Mapping[int, torch.Tensor]]:
        """Return the codes of this cell's result and where to receive the others', by the other cell."""
        codes = self._result_codes
        return dict.fromkeys(self.others, codes[self.here]), {cell: codes[cell] for cell in self.others}

    def finish(self) -> None:
        """Move the agreed state by what the codes of the result say."""
        with self.transport.profile.capture_failure("combine"):
            if self.transfer.reduce_scatter:
                for cell, part in enumerate(self._parts):
                    self._feedback.decode(self._result_codes[cell], self._mean[part])
            else:
                self._combine_codes(self._mean)
            self._feedback.advance(self.bucket, self._mean, self.out)
        self._release()


class GatheredValues(ExactValues):
    """A bucket's values, of which those of all cells are kept."""

    def _prepare(self) -> None:
        rows = self.link.rows_of(self.transfer, self.bucket)
        with self.transport.profile.capture_failure("pack"):
            rows[self.here].copy_(self.values)
        self.send = dict.fromkeys(self.others, rows[self.here]) if self.is_source else {}
        self.receive = {cell: rows[cell] for cell in self.arriving}

    def combine(self) -> None:
        """Leave what has arrived where it is."""


class SharedValues(ExactValues):
    """Values that one cell has and some others take over as they are."""

    def _prepare(self) -> None:
        targets = self.transport.targets
        self.send = dict.fromkeys(targets, self.values) if self.is_source else {}
        self.receive = dict.fromkeys(self.arriving, self.out) if self.here in targets else {}

    def combine(self) -> None:
        """Leave what has arrived where it is; what was sent goes there, too."""
        if self.is_source and self.out is not self.values:
            with self.transport.profile.capture_failure("combine"):
                self.out.copy_(self.values)


class GatheredSteps(EncodedSteps):
    """What a bucket differs by from the last agreed state in each cell, which is kept."""

    def combine(self) -> None:
        """Keep what the codes say."""
        rows = self.link.rows_of(self.transfer, self.bucket)
        with self.transport.profile.capture_failure("combine"):
            for cell in self.sources:
                self._feedback.decode(self._codes[cell], rows[cell])

    def finish(self) -> None:
        """Give the buffers back; what was kept is combined later."""
        self._release()


@torch.no_grad()
def add_distances(rows: torch.Tensor, cells: Sequence[int], table: torch.Tensor) -> None:
    """Add the squared distances between cells' values to a table; local.

    From the differences themselves: with inner products, one huge model would drown the distances between the others.
    """
    for chunk in torch.split(rows, piece_length(rows.device), dim=1):
        wide = [chunk[cell].double() for cell in cells]
        for index, one in enumerate(cells):
            for other, values in zip(cells[index + 1 :], wide[index + 1 :], strict=True):
                step = torch.sub(wide[index], values)
                distance = step.dot(step)
                table[one, other] += distance
                table[other, one] += distance
