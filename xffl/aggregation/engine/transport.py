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
from xffl.aggregation.engine.groups import Progress, Routes, start_moves
from xffl.aggregation.engine.plan import Bucket, Carriers, Track, Turnout
from xffl.aggregation.mean import combined, piece_length, weighted_mean
from xffl.aggregation.privacy.secure_sum import Masker
from xffl.aggregation.report import Journal
from xffl.topology import Topology

__all__ = ["Crossing", "Gathered", "add_distances"]


TAG = 7_100
"""Tells a round's messages from those that a caller sends over the same group."""


class Crossing:
    """The slow link, as one rank uses it.

    :param tracks: All lanes of the rank.
    :param topology: The federation.
    :param rank: This rank.
    :param routes: Its process groups.
    :param device: Where the groups' backend communicates from.
    :param combiner: What makes one value of the cells' values.
    :param progress: How far the host is ahead of a GPU.
    :param masker: Masks for what is averaged; ``None`` where cells may see each other's values.
    """

    def __init__(
        self,
        tracks: Sequence[Track],
        topology: Topology,
        rank: int,
        routes: Routes,
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
        self._routes = routes
        self._combiner = combiner
        self._masker, self._progress = masker, progress
        self.gathered = Gathered(topology.cells, device)
        self.carriers = Carriers(topology, rank, is_railed=routes.is_railed)
        self._needed: dict[tuple[int, ...], int] = {}
        # NCCL matches what is sent and received by order alone, so there both are posted together.
        self._is_on_cpu = device.type == "cpu"
        # Buffers are made in the first round and kept, since fresh memory is slow.
        self._slots = Pool(max((self._slot_bytes(t, b) for t in tracks for b in t.buckets), default=0), device)
        self.feedback = {
            track.number: ErrorFeedback(track.codec, track.lane.numel, track.dtype, device)
            for track in tracks
            if track.codec is not None and any(self.carriers.is_here(track.lane, bucket) for bucket in track.buckets)
        }
        # A row for each cell's values as the codec gives them back, one for what it leaves out, one for their mean.
        widest = max((b.stop - b.start for t in tracks if t.codec is not None for b in t.buckets), default=0)
        rows = topology.cells + 2 if widest else 0
        self._scratch = torch.empty(rows, widest, dtype=torch.float32, device=device)
        self._turnout = Turnout((1.0,), 0)
        self._journal = Journal(device)

    def begin(self, turnout: Turnout, journal: Journal) -> None:
        """Get ready for a round.

        :param turnout: Whose values count; the same on all ranks.
        :param journal: Where bytes and seconds are noted.
        """
        self._turnout, self._journal = turnout, journal

    def carry(
        self, track: Track, bucket: Bucket, values: torch.Tensor, out: torch.Tensor, *, is_encoded: bool
    ) -> Iterator[int]:
        """Exchange a bucket with its carriers in the other cells; yields for how many buckets it can pause.

        :param track: The bucket's lane.
        :param bucket: The bucket, which this rank carries.
        :param values: This rank's values, flat.
        :param out: Where the combined values go; may be ``values``.
        :param is_encoded: Whether the lane's codec is used.
        :return: The steps.
        """
        return (self._cross_encoded if is_encoded else self._cross)(track, bucket, values, out)

    def gather(self, track: Track, bucket: Bucket, values: torch.Tensor, *, is_encoded: bool) -> Iterator[int]:
        """Exchange a bucket like :meth:`carry`, but only keep what arrives, for :meth:`settle`; by all-gather.

        :param track: The bucket's lane.
        :param bucket: The bucket, which this rank carries.
        :param values: This rank's values, flat.
        :param is_encoded: Whether the lane's codec is used.
        :return: The steps.
        """
        return (self._gather_codes if is_encoded else self._gather_exact)(track, bucket, values)

    def _gather_codes(self, track: Track, bucket: Bucket, values: torch.Tensor) -> Iterator[int]:
        slot, codes, _ = yield from self._swap_codes(track, bucket, values)
        rows = self.gathered.rows(track, bucket, torch.float32)
        with self._journal.noting("combine"):
            for cell in self._turnout.senders(track.lane):
                self.feedback[track.number].decode(codes[cell], rows[cell])
        self._slots.give(slot)

    def _gather_exact(self, track: Track, bucket: Bucket, values: torch.Tensor) -> Iterator[int]:
        here, others = self._cell, self._others
        senders = self._turnout.senders(track.lane)
        rows = self.gathered.rows(track, bucket, track.dtype)
        with self._journal.noting("pack"):
            rows[here].copy_(values)
        send = {cell: rows[here] for cell in others if here in senders}
        works = yield from self._swap(track, bucket, send, {cell: rows[cell] for cell in others if cell in senders})
        yield track.depth
        self._arrive(works)

    def settle(self, track: Track, bucket: Bucket, out: torch.Tensor, *, is_encoded: bool) -> None:
        """Combine what :meth:`gather` has kept of a bucket; local.

        :param track: The bucket's lane.
        :param bucket: The bucket.
        :param out: Where the combined values go.
        :param is_encoded: As in :meth:`gather`.
        """
        rows = self.gathered.rows(track, bucket, torch.float32 if is_encoded else track.dtype)
        values = [rows[cell] for cell in self._turnout.senders(track.lane)]
        with self._journal.noting("combine"):
            if is_encoded:
                mean = self._scratch[-1, : out.numel()]
                self._combine(track, values, mean, is_fused=False)
                self.feedback[track.number].advance(bucket, mean, out)
            else:
                self._combine(track, values, out, is_fused=self._turnout.is_fused)

    def weigh(self, turnout: Turnout) -> None:
        """Go on with what a combiner has made of the cells' weights; local.

        :param turnout: The same cells as in :meth:`begin`, weighed.
        """
        self._turnout = turnout

    def reserve(self, tracks: Sequence[Track]) -> None:
        """Make the buffers that a round over some lanes needs; local."""
        key = tuple(track.number for track in tracks)
        if key not in self._needed:
            groups = itertools.groupby(tracks, key=lambda track: track.pace)  # these go on one behind the other
            self._needed[key] = max((self._at_a_time(list(lanes)) for _, lanes in groups), default=0)
        self._slots.reserve(self._needed[key])

    def _at_a_time(self, lanes: Sequence[Track]) -> int:
        """Return how many buffers lanes that follow each other take at a time."""
        under_way = max(self._ahead(t) + t.depth * (2 if t.is_two_hop and t.codec is not None else 1) for t in lanes)
        sums = [0, *itertools.accumulate(self._takes_slot(lane, bucket) for lane in lanes for bucket in lane.buckets)]
        return max(stop - start for start, stop in zip(sums, sums[under_way:] or sums[-1:], strict=False))

    def _takes_slot(self, track: Track, bucket: Bucket) -> bool:
        here = track.parts(bucket)[self._cell]
        is_needed = (here.stop > here.start or track.codec is not None or self._is_masked(track)) and not track.is_late
        return is_needed and self.carriers.is_here(track.lane, bucket)

    def pause(self, track: Track) -> int:
        """Return for how many buckets :meth:`carry` pauses in all."""
        return self._ahead(track) + track.depth * (2 if track.is_two_hop else 1)

    def _ahead(self, track: Track) -> int:
        return track.ahead if self._is_on_cpu else 0

    def _slot_bytes(self, track: Track, bucket: Bucket) -> int:
        """Return what a bucket needs for what arrives from each other cell, and for what leaves encoded."""
        numel = max(part.stop - part.start for part in track.parts(bucket))
        arriving = len(self._others)
        rows = arriving + (self._topology.cells if track.is_two_hop else 1)
        if self._is_masked(track):
            return aligned(numel * torch.int64.itemsize) * rows
        exact = aligned(numel * track.dtype.itemsize) * arriving
        return exact if track.codec is None else max(exact, aligned(track.codec.nbytes(numel)) * rows)

    def _is_masked(self, track: Track) -> bool:
        return self._masker is not None and track.lane.rule == "average"

    def _cross(self, track: Track, bucket: Bucket, values: torch.Tensor, out: torch.Tensor) -> Iterator[int]:
        """Exchange a bucket as it is or masked: all of it with every cell, or a part with each and then the results."""
        here, others = self._cell, self._others
        senders = self._turnout.senders(track.lane)
        leaving_for = (range(self._topology.cells) if track.is_two_hop else [here]) if self._is_masked(track) else []
        parts = leaving = track.cut(bucket, values)
        results = parts if out is values else track.cut(bucket, out)
        numel, held = parts[here].numel(), {here: parts[here]}
        coming = [cell for cell in others if cell in senders]
        if coming and not leaving_for and out.data_ptr() != values.data_ptr():
            held[coming.pop()] = results[here]  # combined where it arrives
        slot = self._slots.take() if leaving_for or (coming and numel) else None
        dtype = torch.int64 if leaving_for else track.dtype
        rows = [] if slot is None else self._slots.rows(slot, dtype, len(others) + len(leaving_for))
        held |= {cell: row[:numel] for cell, row in zip(coming, rows, strict=False)}
        write = None
        if leaving_for:
            masked = dict(zip(leaving_for, rows[len(others) :], strict=True))
            leaving = [masked.get(cell, masked[here])[: part.numel()] for cell, part in enumerate(parts)]
            held[here] = leaving[here]
            shares = {cell: leaving[cell] for cell in leaving_for if here in senders}
            write = partial(self._mask, track, bucket, values, shares)
        send = {cell: leaving[cell] for cell in others if here in senders}
        receive = {cell: held[cell] for cell in others if cell in held}
        works = yield from self._swap(track, bucket, send, receive, write)
        yield track.depth
        self._arrive(works)
        if numel:
            found = [held[cell] for cell in senders]
            with self._journal.noting("combine"):
                if leaving_for:
                    assert self._masker is not None
                    self._masker.decode(found, results[here])
                else:
                    self._combine(track, found, results[here], is_fused=self._turnout.is_fused)
        self._slots.give(slot)
        if track.is_two_hop:
            works = self._post(track, bucket, 2, dict.fromkeys(others, results[here]), {c: results[c] for c in others})
            yield track.depth
            self._arrive(works)

    def _mask(self, track: Track, bucket: Bucket, values: torch.Tensor, rows: Mapping[int, torch.Tensor]) -> None:
        """Write this cell's share of a bucket so that only the sum over the cells can be read, part by part."""
        assert self._masker is not None
        for row in rows.values():
            row.zero_()  # what is sent if masking fails
        parts = track.parts(bucket)
        ranks = enumerate(self.carriers.of(track.lane, bucket))
        carriers = {cell: rank for cell, rank in ranks if cell in self._turnout.cells}
        for cell, row in rows.items():
            place = (track.lane.key, bucket.number, cell if track.is_two_hop else -1)
            share = self._turnout.share(self._cell)
            self._masker.encode(values[parts[cell]], share, row, place=place, carriers=carriers)

    def _swap_codes(
        self, track: Track, bucket: Bucket, values: torch.Tensor
    ) -> Generator[int, None, tuple[torch.Tensor, dict[int, torch.Tensor], dict[int, torch.Tensor]]]:
        """Exchange codes of what a bucket differs by from the last agreed state.

        Returns the buffer lent, by cell the codes of this cell's part (this cell's own too), and by cell a row that the
        second hop may use.
        """
        here, others = self._cell, self._others
        senders = self._turnout.senders(track.lane)
        parts = track.parts(bucket)
        assert track.codec is not None
        sizes = [track.codec.nbytes(part.stop - part.start) for part in parts]
        slot = self._slots.take()
        leaving_for = range(self._topology.cells) if track.is_two_hop else [here]
        rows = self._slots.rows(slot, torch.uint8, len(others) + len(leaving_for))
        arriving = {cell: row[: sizes[here]] for cell, row in zip(others, rows, strict=False)}
        leaving = {cell: row[: sizes[cell]] for cell, row in zip(leaving_for, rows[len(others) :], strict=True)}
        write = partial(self._encode, track, bucket, values, leaving) if here in senders else None
        send = {cell: leaving.get(cell, leaving[here]) for cell in others if here in senders}
        receive = {cell: arriving[cell] for cell in others if cell in senders}
        works = yield from self._swap(track, bucket, send, receive, write)
        yield track.depth
        self._arrive(works)
        arriving[here] = leaving[here]
        spare = {cell: row[: sizes[cell]] for cell, row in zip(others, rows, strict=False)}
        return slot, arriving, spare | {here: leaving[here]}

    def _cross_encoded(self, track: Track, bucket: Bucket, values: torch.Tensor, out: torch.Tensor) -> Iterator[int]:
        """Exchange what a bucket differs by from the last agreed state, written by the lane's codec.

        Everybody, the sender too, goes on with what the codes say, so that all ranks stay the same to the bit.
        """
        here, others = self._cell, self._others
        senders = self._turnout.senders(track.lane)
        feedback, parts = self.feedback[track.number], track.parts(bucket)
        slot, codes, second = yield from self._swap_codes(track, bucket, values)
        mean = self._scratch[-1, : values.numel()]
        if track.is_two_hop:
            with self._journal.noting("combine"):
                self._combine_codes(track, [codes[cell] for cell in senders], mean[parts[here]])
                spare = self._scratch[-2, : mean[parts[here]].numel()]
                place, seed = (bucket.number, -1), self._seed(track, bucket, -1)
                feedback.encode(place, mean[parts[here]], second[here], spare, seed)
            works = self._post(track, bucket, 2, dict.fromkeys(others, second[here]), {c: second[c] for c in others})
            yield track.depth
            self._arrive(works)
        with self._journal.noting("combine"):
            if track.is_two_hop:
                for cell, part in enumerate(parts):
                    feedback.decode(second[cell], mean[part])
            else:
                self._combine_codes(track, [codes[cell] for cell in senders], mean)
            feedback.advance(bucket, mean, out)
        self._slots.give(slot)

    def _encode(self, track: Track, bucket: Bucket, values: torch.Tensor, codes: Mapping[int, torch.Tensor]) -> None:
        """Write this rank's step since the last agreed state, part by part."""
        feedback = self.feedback[track.number]
        step = self._scratch[-1, : values.numel()]
        feedback.difference(bucket, values, step)
        parts = track.parts(bucket)
        for cell, code in codes.items():
            spare = self._scratch[-2, : parts[cell].stop - parts[cell].start]
            feedback.encode((bucket.number, cell), step[parts[cell]], code, spare, self._seed(track, bucket, cell))

    def _combine_codes(self, track: Track, codes: list[torch.Tensor], out: torch.Tensor) -> None:
        rows = [self._scratch[row, : out.numel()] for row in range(len(codes))]
        for code, row in zip(codes, rows, strict=True):
            self.feedback[track.number].decode(code, row)
        self._combine(track, rows, out, is_fused=False)

    def _seed(self, track: Track, bucket: Bucket, part: int) -> int:
        """Return a seed for stochastic rounding that no other code of the run has."""
        rank = self._routes.first + self._rank
        numbers = (self._turnout.number, track.number, bucket.number, part, rank, self._topology.sizes)
        return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=7).digest(), "little")

    def _swap(
        self,
        track: Track,
        bucket: Bucket,
        send: Mapping[int, torch.Tensor],
        receive: Mapping[int, torch.Tensor],
        write: Callable[[], None] | None = None,
    ) -> Generator[int, None, list[dist.Work]]:
        """Get ready to receive in the first hop, and some buckets later write what is sent, and send it."""
        works: list[dist.Work] = []
        if ahead := self._ahead(track):
            works, receive = self._post(track, bucket, 1, {}, receive), {}
            yield ahead
        if write is not None:
            with self._journal.noting("encode"):
                write()
        return works + self._post(track, bucket, 1, send, receive)

    def _post(
        self,
        track: Track,
        bucket: Bucket,
        hop: int,
        send: Mapping[int, torch.Tensor],
        receive: Mapping[int, torch.Tensor],
    ) -> list[dist.Work]:
        """Start sending to other cells' carriers of a bucket, and receiving from them."""
        groups, first = self._routes.across, self._routes.first
        group = groups[bucket.number % len(groups)] if groups else None
        carriers = self.carriers.of(track.lane, bucket)
        # What belongs together is matched by hop and order.
        arriving = [(values, first + carriers[cell]) for cell, values in receive.items() if values.numel()]
        leaving = [(values, first + carriers[cell]) for cell, values in send.items() if values.numel()]
        if arriving or leaving:
            self._journal.posted(sum(values.nbytes for values, _ in leaving))
        with self._journal.phase("post"):
            return start_moves(arriving, leaving, group, TAG + hop)

    def _arrive(self, works: list[dist.Work]) -> None:
        with self._journal.phase("across"):
            for work in works:
                work.wait()
        if works:
            self._journal.arrived()
            self._progress.note()

    def _combine(self, track: Track, values: list[torch.Tensor], out: torch.Tensor, *, is_fused: bool) -> None:
        """Combine the senders' values, in the order of the cells."""
        if track.lane.rule == "first":
            out.copy_(values[0])
        elif isinstance(self._combiner, Coordinatewise):
            combined(self._combiner.combine, values, out)
        else:
            counts = [self._turnout.counts[cell] for cell in self._turnout.senders(track.lane)]
            weighted_mean(values, counts, out, is_fused=is_fused)


class Gathered:
    """Of each lane that this rank carries one row for each cell; as large as the cells' shards together.

    :param cells: Number of cells.
    :param device: Where buffers live.
    """

    def __init__(self, cells: int, device: torch.device) -> None:
        self._cells = cells
        self._device = device
        self._rows: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def reserve(self, track: Track, dtype: torch.dtype) -> None:
        """Make a lane's rows; local."""
        if (track.number, dtype) not in self._rows:
            with torch.inference_mode(False):
                self._rows[track.number, dtype] = torch.empty(
                    self._cells, track.lane.numel, dtype=dtype, device=self._device
                )

    def rows(self, track: Track, bucket: Bucket, dtype: torch.dtype) -> torch.Tensor:
        """Return a bucket's rows, ``[cells, elements]``.

        :param track: The bucket's lane.
        :param bucket: The bucket.
        :param dtype: The lane's data type, or fp32 for differences from the last agreed state.
        :return: A view.
        """
        return self._rows[track.number, dtype][:, bucket.start : bucket.stop]


@torch.no_grad()
def add_distances(rows: torch.Tensor, cells: Sequence[int], table: torch.Tensor) -> None:
    """Add the squared distances between cells' values to a table; local.

    From the differences themselves: with inner products, one huge model would drown the distances between the others.

    :param rows: One row of values for each cell.
    :param cells: The cells to compare.
    :param table: fp64, ``[cells, cells]``; both halves are added to.
    """
    for chunk in torch.split(rows, piece_length(rows.device), dim=1):
        wide = [chunk[cell].double() for cell in cells]
        for index, one in enumerate(cells):
            for other, values in zip(cells[index + 1 :], wide[index + 1 :], strict=True):
                step = torch.sub(wide[index], values)
                distance = step.dot(step)
                table[one, other] += distance
                table[other, one] += distance
