"""How a bucket gets from cell to cell: as it is or encoded, in one hop or two."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

from xffl.aggregation.algorithms.combiners import Combiner, Coordinatewise
from xffl.aggregation.compression.error_feedback import ErrorFeedback
from xffl.aggregation.engine.buffers import Pool, aligned
from xffl.aggregation.engine.groups import Progress, RoundGroups, start_moves
from xffl.aggregation.engine.plan import Bucket, GroupTransfer, RoundContext, SenderMap
from xffl.aggregation.mean import combined, piece_length, weighted_mean
from xffl.aggregation.privacy.secure_sum import Masker
from xffl.aggregation.report import RoundProfile
from xffl.topology import Topology

__all__ = ["CrossCellTransport", "GatheredRows", "add_distances"]


TAG = 7_100
"""Tells a round's messages from those that a caller sends over the same group."""


class CrossCellTransport:
    """The slow link, as one rank uses it."""

    def __init__(
        self,
        transfers: Sequence[GroupTransfer],
        topology: Topology,
        rank: int,
        round_groups: RoundGroups,
        device: torch.device,
        *,
        combiner: Combiner,
        progress: Progress,
        masker: Masker | None = None,
    ) -> None:
        self._topology = topology
        self._rank = rank
        self._cell = topology.cell_of(rank)
        self._others = [cell for cell in range(topology.cells) if cell != self._cell]
        self._round_groups = round_groups
        self._combiner = combiner
        self._masker, self._progress = masker, progress
        self.gathered = GatheredRows(topology.cells, device)
        self.senders = SenderMap(topology, rank, multi_rail=round_groups.multi_rail)
        self._needed: dict[tuple[int, ...], int] = {}
        # NCCL matches what is sent and received by order alone, so there both are posted together.
        self._is_on_cpu = device.type == "cpu"
        # Buffers are made in the first round and kept, since fresh memory is slow.
        self._slots = Pool(max((self._slot_bytes(t, b) for t in transfers for b in t.buckets), default=0), device)
        self.feedback = {
            transfer.number: ErrorFeedback(transfer.codec, transfer.group.numel, transfer.dtype, device)
            for transfer in transfers
            if transfer.codec is not None
            and any(self.senders.is_here(transfer.group, bucket) for bucket in transfer.buckets)
        }
        # A row for each cell's values as the codec gives them back, one for what it leaves out, one for their mean.
        widest = max((b.stop - b.start for t in transfers if t.codec is not None for b in t.buckets), default=0)
        rows = topology.cells + 2 if widest else 0
        self._scratch = torch.empty(rows, widest, dtype=torch.float32, device=device)
        self._context = RoundContext((1.0,), 0)
        self._profile = RoundProfile(device)

    def begin(self, context: RoundContext, profile: RoundProfile) -> None:
        """Get ready for a round."""
        self._context, self._profile = context, profile

    def exchange(
        self, transfer: GroupTransfer, bucket: Bucket, values: torch.Tensor, out: torch.Tensor, *, is_encoded: bool
    ) -> Iterator[int]:
        """Exchange a bucket with its senders in the other cells; yields for how many buckets it can pause."""
        return (self._exchange_encoded if is_encoded else self._exchange_exact)(transfer, bucket, values, out)

    def gather(
        self, transfer: GroupTransfer, bucket: Bucket, values: torch.Tensor, *, is_encoded: bool
    ) -> Iterator[int]:
        """Exchange a bucket like :meth:`exchange`, but only keep what arrives, for :meth:`settle`; by all-gather."""
        return (self._gather_codes if is_encoded else self._gather_exact)(transfer, bucket, values)

    def _gather_codes(self, transfer: GroupTransfer, bucket: Bucket, values: torch.Tensor) -> Iterator[int]:
        slot, codes, _ = yield from self._swap_codes(transfer, bucket, values)
        rows = self.gathered.rows(transfer, bucket, torch.float32)
        with self._profile.capture_failure("combine"):
            for cell in self._context.source_cells(transfer.group):
                self.feedback[transfer.number].decode(codes[cell], rows[cell])
        self._slots.give(slot)

    def _gather_exact(self, transfer: GroupTransfer, bucket: Bucket, values: torch.Tensor) -> Iterator[int]:
        here, others = self._cell, self._others
        sources = self._context.source_cells(transfer.group)
        rows = self.gathered.rows(transfer, bucket, transfer.dtype)
        with self._profile.capture_failure("pack"):
            rows[here].copy_(values)
        send = {cell: rows[here] for cell in others if here in sources}
        works = yield from self._swap(transfer, bucket, send, {cell: rows[cell] for cell in others if cell in sources})
        yield transfer.depth
        self._arrive(works)

    def settle(self, transfer: GroupTransfer, bucket: Bucket, out: torch.Tensor, *, is_encoded: bool) -> None:
        """Combine what :meth:`gather` has kept of a bucket; local."""
        rows = self.gathered.rows(transfer, bucket, torch.float32 if is_encoded else transfer.dtype)
        values = [rows[cell] for cell in self._context.source_cells(transfer.group)]
        with self._profile.capture_failure("combine"):
            if is_encoded:
                mean = self._scratch[-1, : out.numel()]
                self._combine(transfer, values, mean, is_fused=False)
                self.feedback[transfer.number].advance(bucket, mean, out)
            else:
                self._combine(transfer, values, out, is_fused=self._context.is_fused)

    def weigh(self, context: RoundContext) -> None:
        """Go on with what a combiner has made of the cells' weights; local."""
        self._context = context

    def reserve(self, transfers: Sequence[GroupTransfer]) -> None:
        """Make the buffers that a round over some groups needs; local."""
        key = tuple(transfer.number for transfer in transfers)
        if key not in self._needed:
            runs = itertools.groupby(transfers, key=lambda transfer: transfer.pace)  # these go on one behind the other
            self._needed[key] = max((self._at_a_time(list(transfers)) for _, transfers in runs), default=0)
        self._slots.reserve(self._needed[key])

    def _at_a_time(self, transfers: Sequence[GroupTransfer]) -> int:
        """Return how many buffers groups that follow each other take at a time."""
        under_way = max(
            self._ahead(t) + t.depth * (2 if t.reduce_scatter and t.codec is not None else 1) for t in transfers
        )
        sums = [
            0,
            *itertools.accumulate(
                self._takes_slot(transfer, bucket) for transfer in transfers for bucket in transfer.buckets
            ),
        ]
        return max(stop - start for start, stop in zip(sums, sums[under_way:] or sums[-1:], strict=False))

    def _takes_slot(self, transfer: GroupTransfer, bucket: Bucket) -> bool:
        here = transfer.parts(bucket)[self._cell]
        is_needed = (
            here.stop > here.start or transfer.codec is not None or self._is_masked(transfer)
        ) and not transfer.deferred_mean
        return is_needed and self.senders.is_here(transfer.group, bucket)

    def pause(self, transfer: GroupTransfer) -> int:
        """Return for how many buckets :meth:`exchange` pauses in all."""
        return self._ahead(transfer) + transfer.depth * (2 if transfer.reduce_scatter else 1)

    def _ahead(self, transfer: GroupTransfer) -> int:
        return transfer.ahead if self._is_on_cpu else 0

    def _slot_bytes(self, transfer: GroupTransfer, bucket: Bucket) -> int:
        """Return what a bucket needs for what arrives from each other cell, and for what leaves encoded."""
        numel = max(part.stop - part.start for part in transfer.parts(bucket))
        arriving = len(self._others)
        rows = arriving + (self._topology.cells if transfer.reduce_scatter else 1)
        if self._is_masked(transfer):
            return aligned(numel * torch.int64.itemsize) * rows
        exact = aligned(numel * transfer.dtype.itemsize) * arriving
        return exact if transfer.codec is None else max(exact, aligned(transfer.codec.nbytes(numel)) * rows)

    def _is_masked(self, transfer: GroupTransfer) -> bool:
        return self._masker is not None and transfer.group.rule == "average"

    def _exchange_exact(
        self, transfer: GroupTransfer, bucket: Bucket, values: torch.Tensor, out: torch.Tensor
    ) -> Iterator[int]:
        """Exchange a bucket as it is or masked: all of it with every cell, or a part with each and then the results."""
        here, others = self._cell, self._others
        sources = self._context.source_cells(transfer.group)
        leaving_for = (
            (range(self._topology.cells) if transfer.reduce_scatter else [here]) if self._is_masked(transfer) else []
        )
        parts = leaving = transfer.cut(bucket, values)
        results = parts if out is values else transfer.cut(bucket, out)
        numel, held = parts[here].numel(), {here: parts[here]}
        coming = [cell for cell in others if cell in sources]
        if coming and not leaving_for and out.data_ptr() != values.data_ptr():
            held[coming.pop()] = results[here]  # combined where it arrives
        slot = self._slots.take() if leaving_for or (coming and numel) else None
        dtype = torch.int64 if leaving_for else transfer.dtype
        rows = [] if slot is None else self._slots.rows(slot, dtype, len(others) + len(leaving_for))
        held |= {cell: row[:numel] for cell, row in zip(coming, rows, strict=False)}
        write = None
        if leaving_for:
            masked = dict(zip(leaving_for, rows[len(others) :], strict=True))
            leaving = [masked.get(cell, masked[here])[: part.numel()] for cell, part in enumerate(parts)]
            held[here] = leaving[here]
            shares = {cell: leaving[cell] for cell in leaving_for if here in sources}
            write = partial(self._mask, transfer, bucket, values, shares)
        send = {cell: leaving[cell] for cell in others if here in sources}
        receive = {cell: held[cell] for cell in others if cell in held}
        works = yield from self._swap(transfer, bucket, send, receive, write)
        yield transfer.depth
        self._arrive(works)
        if numel:
            found = [held[cell] for cell in sources]
            with self._profile.capture_failure("combine"):
                if leaving_for:
                    assert self._masker is not None
                    self._masker.decode(found, results[here])
                else:
                    self._combine(transfer, found, results[here], is_fused=self._context.is_fused)
        self._slots.give(slot)
        if transfer.reduce_scatter:
            works = self._post(
                transfer, bucket, 2, dict.fromkeys(others, results[here]), {c: results[c] for c in others}
            )
            yield transfer.depth
            self._arrive(works)

    def _mask(
        self, transfer: GroupTransfer, bucket: Bucket, values: torch.Tensor, rows: Mapping[int, torch.Tensor]
    ) -> None:
        """Write this cell's share of a bucket so that only the sum over the cells can be read, part by part."""
        assert self._masker is not None
        for row in rows.values():
            row.zero_()  # what is sent if masking fails
        parts = transfer.parts(bucket)
        ranks = enumerate(self.senders.of(transfer.group, bucket))
        senders = {cell: rank for cell, rank in ranks if cell in self._context.cells}
        for cell, row in rows.items():
            place = (transfer.group.key, bucket.number, cell if transfer.reduce_scatter else -1)
            share = self._context.share(self._cell)
            self._masker.encode(values[parts[cell]], share, row, place=place, carriers=senders)

    def _swap_codes(
        self, transfer: GroupTransfer, bucket: Bucket, values: torch.Tensor
    ) -> Generator[int, None, tuple[torch.Tensor, dict[int, torch.Tensor], dict[int, torch.Tensor]]]:
        """Exchange codes of what a bucket differs by from the last agreed state.

        Returns the buffer lent, by cell the codes of this cell's part (this cell's own too), and by cell a row that the
        second hop may use.
        """
        here, others = self._cell, self._others
        sources = self._context.source_cells(transfer.group)
        parts = transfer.parts(bucket)
        assert transfer.codec is not None
        sizes = [transfer.codec.nbytes(part.stop - part.start) for part in parts]
        slot = self._slots.take()
        leaving_for = range(self._topology.cells) if transfer.reduce_scatter else [here]
        rows = self._slots.rows(slot, torch.uint8, len(others) + len(leaving_for))
        arriving = {cell: row[: sizes[here]] for cell, row in zip(others, rows, strict=False)}
        leaving = {cell: row[: sizes[cell]] for cell, row in zip(leaving_for, rows[len(others) :], strict=True)}
        write = partial(self._encode, transfer, bucket, values, leaving) if here in sources else None
        send = {cell: leaving.get(cell, leaving[here]) for cell in others if here in sources}
        receive = {cell: arriving[cell] for cell in others if cell in sources}
        works = yield from self._swap(transfer, bucket, send, receive, write)
        yield transfer.depth
        self._arrive(works)
        arriving[here] = leaving[here]
        spare = {cell: row[: sizes[cell]] for cell, row in zip(others, rows, strict=False)}
        return slot, arriving, spare | {here: leaving[here]}

    def _exchange_encoded(
        self, transfer: GroupTransfer, bucket: Bucket, values: torch.Tensor, out: torch.Tensor
    ) -> Iterator[int]:
        """Exchange what a bucket differs by from the last agreed state, written by the group's codec.

        Everybody, the sender too, goes on with what the codes say, so that all ranks stay the same to the bit.
        """
        here, others = self._cell, self._others
        sources = self._context.source_cells(transfer.group)
        feedback, parts = self.feedback[transfer.number], transfer.parts(bucket)
        slot, codes, second = yield from self._swap_codes(transfer, bucket, values)
        mean = self._scratch[-1, : values.numel()]
        if transfer.reduce_scatter:
            with self._profile.capture_failure("combine"):
                self._combine_codes(transfer, [codes[cell] for cell in sources], mean[parts[here]])
                spare = self._scratch[-2, : mean[parts[here]].numel()]
                place, seed = (bucket.number, -1), self._seed(transfer, bucket, -1)
                feedback.encode(place, mean[parts[here]], second[here], spare, seed)
            works = self._post(transfer, bucket, 2, dict.fromkeys(others, second[here]), {c: second[c] for c in others})
            yield transfer.depth
            self._arrive(works)
        with self._profile.capture_failure("combine"):
            if transfer.reduce_scatter:
                for cell, part in enumerate(parts):
                    feedback.decode(second[cell], mean[part])
            else:
                self._combine_codes(transfer, [codes[cell] for cell in sources], mean)
            feedback.advance(bucket, mean, out)
        self._slots.give(slot)

    def _encode(
        self, transfer: GroupTransfer, bucket: Bucket, values: torch.Tensor, codes: Mapping[int, torch.Tensor]
    ) -> None:
        """Write this rank's step since the last agreed state, part by part."""
        feedback = self.feedback[transfer.number]
        step = self._scratch[-1, : values.numel()]
        feedback.difference(bucket, values, step)
        parts = transfer.parts(bucket)
        for cell, code in codes.items():
            spare = self._scratch[-2, : parts[cell].stop - parts[cell].start]
            feedback.encode((bucket.number, cell), step[parts[cell]], code, spare, self._seed(transfer, bucket, cell))

    def _combine_codes(self, transfer: GroupTransfer, codes: list[torch.Tensor], out: torch.Tensor) -> None:
        rows = [self._scratch[row, : out.numel()] for row in range(len(codes))]
        for code, row in zip(codes, rows, strict=True):
            self.feedback[transfer.number].decode(code, row)
        self._combine(transfer, rows, out, is_fused=False)

    def _seed(self, transfer: GroupTransfer, bucket: Bucket, part: int) -> int:
        """Return a seed for stochastic rounding that no other code of the run has."""
        rank = self._round_groups.first + self._rank
        numbers = (self._context.number, transfer.number, bucket.number, part, rank, self._topology.sizes)
        return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=7).digest(), "little")

    def _swap(
        self,
        transfer: GroupTransfer,
        bucket: Bucket,
        send: Mapping[int, torch.Tensor],
        receive: Mapping[int, torch.Tensor],
        write: Callable[[], None] | None = None,
    ) -> Generator[int, None, list[dist.Work]]:
        """Get ready to receive in the first hop, and some buckets later write what is sent, and send it."""
        works: list[dist.Work] = []
        if ahead := self._ahead(transfer):
            works, receive = self._post(transfer, bucket, 1, {}, receive), {}
            yield ahead
        if write is not None:
            with self._profile.capture_failure("encode"):
                write()
        return works + self._post(transfer, bucket, 1, send, receive)

    def _post(
        self,
        transfer: GroupTransfer,
        bucket: Bucket,
        hop: int,
        send: Mapping[int, torch.Tensor],
        receive: Mapping[int, torch.Tensor],
    ) -> list[dist.Work]:
        """Start sending to other cells' senders of a bucket, and receiving from them."""
        groups, first = self._round_groups.across, self._round_groups.first
        group = groups[bucket.number % len(groups)] if groups else None
        senders = self.senders.of(transfer.group, bucket)
        # What belongs together is matched by hop and order.
        arriving = [(values, first + senders[cell]) for cell, values in receive.items() if values.numel()]
        leaving = [(values, first + senders[cell]) for cell, values in send.items() if values.numel()]
        if arriving or leaving:
            self._profile.record_send(sum(values.nbytes for values, _ in leaving))
        with self._profile.phase("post"):
            return start_moves(arriving, leaving, group, TAG + hop)

    def _arrive(self, works: list[dist.Work]) -> None:
        with self._profile.phase("across"):
            for work in works:
                work.wait()
        if works:
            self._profile.arrived()
            self._progress.note()

    def _combine(
        self, transfer: GroupTransfer, values: list[torch.Tensor], out: torch.Tensor, *, is_fused: bool
    ) -> None:
        """Combine the senders' values, in the order of the cells."""
        if transfer.group.rule == "first":
            out.copy_(values[0])
        elif isinstance(self._combiner, Coordinatewise):
            combined(self._combiner.combine, values, out)
        else:
            counts = [self._context.counts[cell] for cell in self._context.source_cells(transfer.group)]
            weighted_mean(values, counts, out, is_fused=is_fused)


class GatheredRows:
    """Of each group that this rank carries one row for each cell; as large as the cells' shards together."""

    def __init__(self, cells: int, device: torch.device) -> None:
        self._cells = cells
        self._device = device
        self._rows: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def reserve(self, transfer: GroupTransfer, dtype: torch.dtype) -> None:
        """Make a group's rows; local."""
        if (transfer.number, dtype) not in self._rows:
            with torch.inference_mode(False):
                self._rows[transfer.number, dtype] = torch.empty(
                    self._cells, transfer.group.numel, dtype=dtype, device=self._device
                )

    def rows(self, transfer: GroupTransfer, bucket: Bucket, dtype: torch.dtype) -> torch.Tensor:
        """Return a bucket's rows, ``[cells, elements]``."""
        return self._rows[transfer.number, dtype][:, bucket.start : bucket.stop]


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
