"""The exchange of a round: swap buckets between cells, combine them, and hand the result round inside each cell.

A bucket's way is a generator, :meth:`RoundRun._exchange_bucket`; :class:`BucketPipeline` keeps several under way::

    bucket 0   pack  recv.. send ....wire....  mean  bcast-in-cell  write
    bucket 1         pack  recv.. send ....wire....  mean  bcast ...
    bucket 2               pack  recv.. send ....wire....  mean ...

Each ``yield n`` means "wake me after n more buckets were started": ``transfer.ahead`` between asking for what comes
and sending (over gloo), ``transfer.depth`` while a hop is on the wire, ``HOME_LAG`` while the cell gets the result.
Pauses count starts, not seconds, so all ranks that take part in a group do the same steps in the same order.

Two ways to the mean: all-gather (every cell combines all of a bucket), and reduce-scatter (each cell combines a part, a
second hop sends the results round); both in :class:`~xffl.aggregation.engine.transport.CrossCellTransport`.

A local failure (memory, a tensor that went away) stops nothing: the rank keeps sending and receiving, so that nobody
waits for it, and reports the failure to the vote. Only a failed communication ends an exchange.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from operator import itemgetter

import torch
import torch.distributed as dist

from xffl.aggregation.algorithms.combiners import CellStats, Combiner, WeightedCombiner, total_of
from xffl.aggregation.arithmetic import is_built_in
from xffl.aggregation.compression import ResidualStore
from xffl.aggregation.engine.buffers import (
    FiniteCheck,
    FiniteReport,
    Layout,
    ModelCopy,
    Pool,
    RoundBuffers,
    StagingBuffers,
    aligned,
)
from xffl.aggregation.engine.cell import HOME_LAG, BucketMemory, mean_in_cell, reserve_cell_rows, share_in_cell
from xffl.aggregation.engine.global_model import GlobalModel
from xffl.aggregation.engine.plan import Bucket, GroupTransfer, RoundContext
from xffl.aggregation.engine.transport import CrossCellTransport, Link, add_distances
from xffl.aggregation.options import Options
from xffl.aggregation.privacy import Accountant, Masker, Noise, Privacy, privatize
from xffl.aggregation.report import RoundProfile
from xffl.distributed.collectives import broadcast
from xffl.distributed.consistency import control_device

__all__ = [
    "BucketPipeline",
    "Exchange",
    "Protection",
    "RoundRun",
    "weigh_cells",
]


class Exchange:
    """What one rank exchanges, and what rounds use again: buffers, codecs' memories, the last global model.

    With ``atomic`` the new values are collected beside the model, one copy of this rank's shard, until
    :meth:`RoundRun.commit` writes them; else they are written bucket by bucket.
    """

    def __init__(
        self,
        layout: Layout,
        transfers: Sequence[GroupTransfer],
        link: Link,
        *,
        options: Options,
        global_model: GlobalModel | None,
        residuals: ResidualStore | None,
    ) -> None:
        self.layout, self.transfers, self.link = layout, tuple(transfers), link
        self.device, self.atomic = link.device, options.atomic
        self.combiner = options.combiner
        self.compares_models = self.combiner.needs_distances
        self.global_model = global_model
        self.has_norms = options.has_norms
        self.clip = getattr(options.server, "clip", None)
        self.round_groups, self.masker = link.round_groups, link.masker
        # Where cells are worlds of their own, ranks of these would have the same numbers.
        rank = link.rank if self.round_groups.is_cross_world else self.round_groups.first + link.rank
        self.protection = None if options.privacy is None else Protection(options.privacy, rank, self.masker)
        self.accountant = None if self.protection is None else self.protection.accountant
        # Buffers are made in the first round and kept, since fresh memory is slow.
        self.cell_rows = {device: Pool(0, device) for device in {link.device, link.home_device or link.device}}
        if link.arena is not None:
            link.arena.restart(sum(aligned(one.group.numel * one.dtype.itemsize) for one in transfers))
        copies, arena = link.host_copies, link.arena
        self.staging = StagingBuffers(layout, self.device, atomic=options.atomic, arena=arena, host_copies=copies)
        # Of the groups whose result the cell gets on its GPUs, though it has crossed in the host's memory.
        self.gpu_staging: StagingBuffers | None = None
        if link.home_device is not None:
            self.gpu_staging = StagingBuffers(layout, link.home_device, atomic=options.atomic, host_copies=copies)
        self.residuals = residuals

    @property
    def results(self) -> dict[int, torch.Tensor]:
        """Where what the cells have agreed on lies, all of it, by the number of the transfer."""
        return self.staging.stages if self.gpu_staging is None else self.staging.stages | self.gpu_staging.stages

    def check(self, context: RoundContext) -> None:
        """Raise where these cells cannot be combined as was asked; pure, the same on all ranks."""
        self.combiner.check(len(context.cells))
        if self.masker is not None:
            self.masker.check(context.cells)
        if not self.compares_models:
            weigh_cells(context, self.combiner)

    def own_values(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield what training changes of the model that this rank sends: tensor, first element, values; local."""
        for transfer in self.transfers:
            for bucket in transfer.buckets if transfer.group.is_stepped else ():
                if not transfer.is_sent_here(bucket):
                    continue
                values = torch.empty(bucket.stop - bucket.start, dtype=transfer.dtype, device=self.device)
                self.layout.pack(bucket, values)
                sizes = [piece.stop - piece.start for piece in bucket.pieces]
                for piece, part in zip(bucket.pieces, torch.split(values, sizes), strict=True):
                    yield piece.item, piece.start, part

    @torch.no_grad()
    def restart(self) -> None:
        """Let codecs and a server optimizer go on from the model as it stands; local, with the same in all cells."""
        self.layout.look_up()
        for transfer in self.transfers:
            if (feedback := self.link.feedback.get(transfer.number)) is not None:
                for bucket in transfer.buckets:
                    self.layout.pack(bucket, feedback.reference[bucket.start : bucket.stop])
        if self.global_model is not None:
            self.global_model.reset_from_model()


class RoundRun:
    """One round of this rank, from the values that it reads to those that it writes.

    Making one is local: it makes the buffers that the round needs, and reads and checks those values of this rank that
    are sent.
    """

    @torch.no_grad()
    def __init__(
        self, exchange: Exchange, fragment: int, profile: RoundProfile, copy: ModelCopy = ModelCopy.NONE
    ) -> None:
        self._exchange, self._link, self._layout = exchange, exchange.link, exchange.layout
        self.fragment, self.profile = fragment, profile
        self._transfers = [transfer for transfer in exchange.transfers if transfer.group.fragment == fragment]
        self._transports: list[CrossCellTransport] = []
        self.numbers: dict[str, float] = {}
        self._lost: RuntimeError | None = None  # what has ended a message before the next transport
        self._link.home_progress.forget()
        self._is_encoding = exchange.residuals is not None and exchange.residuals.is_encoding(fragment)
        if exchange.residuals is not None:
            exchange.residuals.rollback()  # of a round that was not taken
        if exchange.protection is not None and copy is ModelCopy.NONE:
            copy = ModelCopy.STAGED  # what is clipped and noised is not the model itself
        with profile.phase("pack"):
            self._layout.look_up()
            # Buffers outlive the round, so they must not be inference tensors if that is where the round takes place.
            with torch.inference_mode(False):
                self._buffers = self._make_buffers(copy)
            self.findings = self._inspect()

    @property
    def codec_error(self) -> float | None:
        """What lossy codecs have left out of what this rank sent, see :class:`xffl.RoundReport`."""
        return None if self._exchange.residuals is None else self._exchange.residuals.codec_error

    def _make_buffers(self, copy: ModelCopy) -> RoundBuffers:
        """Make what a round needs, so that it does not run out of memory on its way."""
        transfers, link = self._transfers, self._link
        pauses = {transfer.number: link.pause(transfer) + HOME_LAG for transfer in transfers}
        crossing = [transfer for transfer in transfers if transfer.is_sender or not transfer.is_shared_on_gpu]
        buffers = RoundBuffers(self._exchange.staging, crossing, pauses, copy)
        self._gpu_buffers = buffers
        if self._exchange.gpu_staging is not None:
            # What is sent is copied in the host's memory, what steps are measured from where the result comes.
            kept = copy if copy is ModelCopy.KEPT else ModelCopy.NONE
            shared = [transfer for transfer in transfers if transfer.is_shared_on_gpu]
            self._gpu_buffers = RoundBuffers(self._exchange.gpu_staging, shared, pauses, kept)
        for transfer in transfers if self._exchange.compares_models else ():
            if transfer.is_sender:
                link.reserve_rows(transfer, is_encoded=transfer.codec is not None and self._is_encoding)
        link.reserve(transfers)
        reserve_cell_rows(link, self._exchange.cell_rows, transfers)
        return buffers

    def _buffers_of(self, transfer: GroupTransfer) -> RoundBuffers:
        """Return the buffers between the model and the result of a group."""
        return self._gpu_buffers if transfer.is_shared_on_gpu else self._buffers

    def _inspect(self) -> FiniteReport:
        """Pack what has to be copied, and check what this rank sends for NaN and infinity; measure its update.

        What lies on a GPU is checked there, and copied to the host while others cross, unless it may change before.
        """
        keeps = self._buffers.copy is ModelCopy.KEPT
        finite_check = FiniteCheck(self._layout)
        norms: list[torch.Tensor] = []
        for transfer, bucket in self._walk():
            is_sender = transfer.is_sent_here(bucket)
            is_read = keeps or transfer.group.is_mean_in_cell or is_sender
            if transfer.is_shared_on_gpu:
                is_read = is_sender and not transfer.group.is_mean_in_cell
                self._pack_on_gpu(transfer, bucket, finite_check)
            if is_read:
                has_norm = is_sender and self._exchange.has_norms and transfer.group.is_stepped
                checked = self._buffers.find_on_gpu(bucket)
                if checked is not None and self._buffers.copy is ModelCopy.NONE and not has_norm:
                    self._buffers.postpone(bucket)
                    if transfer.group.rule == "average":
                        finite_check.add(bucket, checked)
                    continue
                values, lent = self._buffers.pack(transfer, bucket)
                if transfer.group.rule == "average":
                    finite_check.add(bucket, values if checked is None else checked)
                if has_norm:
                    assert self._exchange.global_model is not None
                    self._buffers.settle(bucket)
                    norms.append(self._exchange.global_model.squared_distance(transfer, bucket, values))
                self._buffers.keep(bucket, lent)
        self._buffers.hold_writes()
        return finite_check.report()._replace(norm=total_of(torch.stack(norms).tolist() if norms else ()))

    def _pack_on_gpu(self, transfer: GroupTransfer, bucket: Bucket, finite_check: FiniteCheck) -> None:
        """Copy what the GPU needs beside the model: what steps are measured from, and buffers before their mean."""
        if self._buffers.copy is ModelCopy.KEPT or transfer.group.is_mean_in_cell:
            values, lent = self._gpu_buffers.pack(transfer, bucket)
            self._gpu_buffers.keep(bucket, lent)
            if transfer.group.is_mean_in_cell and transfer.group.rule == "average":
                finite_check.add(bucket, values)

    @torch.no_grad()
    def exchange(self, context: RoundContext) -> RoundContext:
        """Swap, combine and hand round every bucket of every group; return what the cells counted for.

        Collective over the world; a GPU has done its part then. Afterwards :attr:`profile` tells what this rank sent,
        how long it took, and what failed here.
        """
        exchange = self._exchange
        if context.source is not None:
            self._hand_over(context, context.source)
            return context
        if not exchange.compares_models:
            context = self._weigh(context)
        if exchange.masker is not None:
            exchange.masker.start_attempt(context.attempt, context.cells)
        if exchange.protection is not None:
            exchange.protection.apply(self, context.cells)
        self._transports = [transport := self._transport(context)]
        if not exchange.compares_models:
            self._run_pipeline(context, partial(self._exchange_bucket, transport))
            return context
        self._run_pipeline(context, partial(self._gather, transport))
        with self.profile.phase("weigh"):
            distances = self._compare(context)
        context = self._weigh(context, distances)
        self._transports.append(transport := self._transport(context))
        self._run_pipeline(context, partial(self._spread, transport))
        return context

    @torch.no_grad()
    def commit(self, context: RoundContext, *, is_merged: bool = False, alpha: float | None = None) -> None:
        """Write the collected values into the model; local. Without ``atomic`` they are there."""
        exchange = self._exchange
        stages, results = exchange.staging.stages, exchange.results
        with self.profile.phase("commit"):
            if is_merged or self._buffers.copy is not ModelCopy.NONE:
                self._layout.look_up()  # local steps may have moved tensors since
            stepped, is_step = set(), context.source is None  # else what was agreed on last has come to all cells
            if exchange.global_model is not None and (is_step or not exchange.global_model.has_optimizer):
                for transfer, bucket, new in exchange.global_model.step(self.fragment, results, context.scale):
                    stepped.add(transfer.number)
                    if exchange.residuals is not None and transfer.number in stages:
                        exchange.staging.stage(transfer, bucket).copy_(new)
                    self._write_agreed(transfer, bucket, new, is_merged=is_merged, alpha=alpha)
            for transfer, bucket in self._walk() if exchange.atomic else ():
                if transfer.number not in stepped:
                    new = results[transfer.number][bucket.start : bucket.stop]
                    self._write_agreed(transfer, bucket, new, is_merged=is_merged, alpha=alpha)
            self._buffers.end_writes()
            if exchange.residuals is not None:
                exchange.residuals.commit(self.fragment, stages)

    def _write_agreed(
        self, transfer: GroupTransfer, bucket: Bucket, new: torch.Tensor, *, is_merged: bool, alpha: float | None
    ) -> None:
        """Write a bucket's new values, which all ranks have agreed on, into the model."""
        keeps_some = is_merged and alpha != 0.0 and transfer.group.rule == "average"
        if keeps_some and not transfer.group.is_mean_in_cell:
            self._buffers_of(transfer).merge(transfer, bucket, new, alpha)
        else:
            self._buffers.write_behind(bucket, new)

    @property
    def is_clipped(self) -> bool:
        """Whether the step that this round makes has a longest length."""
        return self._exchange.clip is not None

    @torch.no_grad()
    def measure_step(self) -> float:
        """Return the squared L2 norm of this rank's part of the way to the combined values, in fp64; local.

        All ranks' parts have each element once: a bucket is cut over the cells, and one rank of each cell sends it.
        """
        model, cell, cells = self._exchange.global_model, self._link.cell, self._link.cells
        assert model is not None, "kept where there is a server"
        squares: list[torch.Tensor] = []
        with self.profile.capture_failure("weigh"):
            for transfer, bucket in self._sent():
                part = bucket.part(cell, cells)
                own = bucket._replace(start=bucket.start + part.start, stop=bucket.start + part.stop)
                squares.append(model.squared_distance(transfer, own, self._exchange.staging.stage(transfer, own)))
        return total_of(torch.stack(squares).tolist() if squares else ())

    def clip_step(self, context: RoundContext, squares: Sequence[float]) -> RoundContext:
        """Return what the step is scaled by once it is no longer than the server's clip; pure, the same on all ranks.

        ``squares`` is what :meth:`measure_step` has returned on each rank.
        """
        limit = self._exchange.clip
        assert limit is not None, "asked for where there is one"
        norm = abs(context.scale) * math.sqrt(total_of(squares))
        scale = context.scale * (limit / norm) if norm > limit else context.scale
        return replace(context, scale=scale, step_norm=norm)

    @property
    def is_cut_off(self) -> bool:
        """Whether another cell was lost while values were exchanged."""
        return any(transport.is_cut_off for transport in self._transports)

    def _transport(self, context: RoundContext) -> CrossCellTransport:
        transport = CrossCellTransport(self._link, context, self.profile, is_encoding=self._is_encoding)
        lost, self._lost = self._lost, None
        if lost is not None:
            transport.lose(lost)
        return transport

    def _weigh(self, context: RoundContext, distances: Sequence[Sequence[float]] | None = None) -> RoundContext:
        """Let the combiner weigh the cells that contribute.

        All ranks get the same from a combiner of xffl, which calls no function of the system's mathematical library
        that rounds. Of one of the user's own all take the numbers of the first rank; collective over the world then.
        """
        combiner = self._exchange.combiner
        context = weigh_cells(context, combiner, distances)
        if is_built_in(combiner) or not isinstance(combiner, WeightedCombiner):
            return context
        place = control_device(self._exchange.round_groups.world)
        numbers = torch.tensor([context.scale, *context.counts], dtype=torch.float64, device=place)
        self._lost = self._tell_all(numbers)
        scale, *counts = numbers.tolist()
        return replace(context, scale=scale, counts=tuple(counts))

    def _walk(self) -> Iterator[tuple[GroupTransfer, Bucket]]:
        return ((transfer, bucket) for transfer in self._transfers for bucket in transfer.buckets)

    def _sent(self) -> Iterator[tuple[GroupTransfer, Bucket]]:
        """Yield what this rank sends of what training changes."""
        for transfer, bucket in self._walk():
            if transfer.group.is_stepped and transfer.is_sent_here(bucket):
                yield transfer, bucket

    def _run_pipeline(self, context: RoundContext, start: Callable[[GroupTransfer, Bucket], Iterator[int]]) -> None:
        """Start the way of each bucket, in order, and keep several under way."""
        pipeline = BucketPipeline()
        before: tuple[object, ...] = ()
        for transfer in self._transfers:
            # Others are in step with this rank only as long as they walk the same groups; and what is asked for is sent
            # in the same order only as long as it is asked for as far ahead.
            if transfer.pace != before:
                pipeline.drain()
            before = transfer.pace
            for bucket in transfer.buckets:
                pipeline.start(start(transfer, bucket))
        pipeline.drain()
        # A GPU's own phases are timed on its stream.
        with nullcontext() if self._link.home_device is None else self.profile.phase("home"):
            self._link.home_progress.drain()

    def _exchange_bucket(self, transport: CrossCellTransport, transfer: GroupTransfer, bucket: Bucket) -> Iterator[int]:
        """Take one bucket from the model across and back; yields for how many buckets it can pause."""
        memory = self._read(transfer, bucket)
        if transfer.is_sent_here(bucket):
            yield from transport.exchange(transfer, bucket, memory.values, memory.out)
        elif transfer.cell_group is not None:  # in step with the rank that does
            yield self._link.pause(transfer)
        if transfer.cell_group is not None:
            yield from share_in_cell(self._link, self.profile, transfer, bucket, memory.out, memory.result)
        self._write(transfer, bucket, memory)

    def _hand_over(self, context: RoundContext, source: int) -> None:
        """Bring one cell's model to all others: nothing is clipped, combined or stepped."""
        targets = {*range(self._link.cells)} - {source}
        transport = CrossCellTransport(self._link, context, self.profile, is_encoding=False, targets=targets)
        self._transports = [transport]
        self._run_pipeline(context, partial(self._pass_on, transport))

    def _pass_on(self, transport: CrossCellTransport, transfer: GroupTransfer, bucket: Bucket) -> Iterator[int]:
        """Bring one bucket from the source to all others, and round inside this cell."""
        is_source, model = self._link.cell == transport.context.source, self._exchange.global_model
        memory = self._read(transfer, bucket) if is_source else self._acquire(transfer, bucket)
        values = memory.values
        plain = replace(transfer, reduce_scatter=False, codec=None)  # as it is, in one hop
        with self.profile.capture_failure("pack"):
            self._link.host_copies.settle(bucket)  # before anything arrives there
            if is_source and model is not None and transfer.group.is_stepped:
                values = model.written(transfer, bucket)  # without steps since: these are not clipped
        if transfer.is_sent_here(bucket):
            yield from transport.share(plain, bucket, values, memory.out)
        elif transfer.cell_group is not None:  # in step with the rank that does
            yield self._link.pause(plain)
        if transfer.cell_group is not None:
            yield from share_in_cell(self._link, self.profile, transfer, bucket, memory.out, memory.result)
        self._write(transfer, bucket, memory)

    def _gather(self, transport: CrossCellTransport, transfer: GroupTransfer, bucket: Bucket) -> Iterator[int]:
        """Take one bucket to the other cells, and keep what comes back until all have been compared."""
        memory = self._read(transfer, bucket)
        if transfer.is_sent_here(bucket):
            yield from transport.gather(transfer, bucket, memory.values)
        self._release(memory)

    def _spread(self, transport: CrossCellTransport, transfer: GroupTransfer, bucket: Bucket) -> Iterator[int]:
        """Combine one bucket of what was kept, and hand it round."""
        memory = self._acquire(transfer, bucket)
        if transfer.is_sent_here(bucket):
            transport.combine_gathered(transfer, bucket, memory.out)
        if transfer.cell_group is not None:
            yield from share_in_cell(self._link, self.profile, transfer, bucket, memory.out, memory.result)
        self._write(transfer, bucket, memory)

    def _acquire(self, transfer: GroupTransfer, bucket: Bucket) -> BucketMemory:
        """Return where a bucket's values are read and its result goes."""
        if not transfer.is_shared_on_gpu:
            values, out, lent = self._buffers.acquire(transfer, bucket)
            return BucketMemory(values, out, lent, out)
        own, result, result_lent = self._gpu_buffers.acquire(transfer, bucket)
        if not transfer.is_sent_here(bucket):
            return BucketMemory(own, result, None, result, result_lent)
        return BucketMemory(*self._buffers.acquire(transfer, bucket), result, result_lent)

    def _read(self, transfer: GroupTransfer, bucket: Bucket) -> BucketMemory:
        """Return where a bucket lies, with its values, of buffers their mean over the cell."""
        memory = self._acquire(transfer, bucket)
        home = transfer.cell_group if transfer.group.is_mean_in_cell else None
        if home is not None and transfer.is_shared_on_gpu:
            with self.profile.capture_failure("pack"):
                if self._gpu_buffers.is_to_fill(bucket, memory.result_lent):
                    self._gpu_buffers.fill(bucket, memory.result)
            mean_in_cell(self._exchange.cell_rows, self.profile, home, memory.result)
            if transfer.is_sent_here(bucket):
                with self.profile.capture_failure("pack"):
                    self._buffers.fill_from(memory.result, bucket, memory.values)
            return memory
        if (home is not None or transfer.is_sent_here(bucket)) and self._buffers.is_to_fill(bucket, memory.lent):
            with self.profile.capture_failure("pack"):
                self._buffers.fill(bucket, memory.values)
        if home is not None:
            with self.profile.capture_failure("pack"):
                self._buffers.settle(bucket)
            mean_in_cell(self._exchange.cell_rows, self.profile, home, memory.values)
        return memory

    def _release(self, memory: BucketMemory) -> None:
        self._buffers.release(memory.lent)
        self._gpu_buffers.release(memory.result_lent)

    def _write(self, transfer: GroupTransfer, bucket: Bucket, memory: BucketMemory) -> None:
        """Write a bucket into the model, unless it waits for the commit."""
        if self._exchange.atomic:
            return
        with self.profile.capture_failure("commit"):
            self._layout.unpack(bucket, memory.result)
            feedback = self._link.feedback.get(transfer.number)
            if feedback is not None:
                feedback.reference[bucket.start : bucket.stop].copy_(memory.out)
        self._release(memory)

    def _tell_all(self, numbers: torch.Tensor) -> RuntimeError | None:
        """Replace numbers by those of the first rank; return the error where a rank was lost meanwhile; collective."""
        groups = self._exchange.round_groups
        try:
            broadcast(numbers, groups.first, groups.world)
        except RuntimeError as lost:  # ranks of the cell that have heard it still wait for this one
            return lost
        return None

    def _compare(self, context: RoundContext) -> list[list[float]]:
        """Return the squared distances between all cells' models, as the senders of cell 0 see them; collective."""
        cells, groups = self._link.cells, self._exchange.round_groups
        table = torch.zeros(cells, cells, dtype=torch.float64, device=self._exchange.device)
        if self._link.cell == 0:
            with self.profile.capture_failure("weigh"):
                for transfer, bucket in self._sent():
                    add_distances(self._link.rows_of(transfer, bucket), context.cells, table)
        table = table.to(control_device(groups.world))
        if self._link.cell == 0 and groups.cell is not None:
            dist.all_reduce(table, group=groups.cell)
        if (lost := self._tell_all(table)) is not None:
            self._transports[-1].lose(lost)
        distances: list[list[float]] = table.tolist()
        return distances


class BucketPipeline:
    """Keeps the ways of several buckets under way, so that link, processor and cell work at the same time.

    A way is an iterator that yields for how many starts of others it can pause. Local and deterministic: which step
    follows which depends on the numbers of starts alone.
    """

    def __init__(self) -> None:
        self._tick = 0
        # With their numbers, by the tick at which they go on.
        self._due: dict[int, list[tuple[int, Iterator[int]]]] = {}

    def start(self, bucket: Iterator[int]) -> None:
        """Let one begin, and all whose time has come take their next step, in the order in which they began."""
        self._due.setdefault(self._tick, []).append((self._tick, bucket))
        self._advance(self._tick)
        self._tick += 1

    def drain(self) -> None:
        """Let all come to their end."""
        while self._due:
            self._advance(min(self._due))

    def _advance(self, tick: int) -> None:
        for number, bucket in sorted(self._due.pop(tick, ()), key=itemgetter(0)):
            if (pause := next(bucket, None)) is not None:
                self._due.setdefault(tick + pause, []).append((number, bucket))


def weigh_cells(
    context: RoundContext, combiner: Combiner, distances: Sequence[Sequence[float]] | None = None
) -> RoundContext:
    """Let a combiner weigh the cells that contribute; pure, the same on all ranks."""
    cells = context.cells
    if not isinstance(combiner, WeightedCombiner):
        return replace(context, counts=tuple(float(cell in cells) for cell in range(len(context.weights))))
    seen = CellStats(
        weights=tuple(context.weights[cell] for cell in cells),
        steps=tuple(context.steps[cell] for cell in cells),
        norms=None if context.norms is None else tuple(context.norms[cell] for cell in cells),
        distances=None if distances is None else tuple(tuple(distances[c][d] for d in cells) for c in cells),
    )
    result = combiner.weigh(seen)
    counts = dict(zip(cells, result.weights, strict=True))
    return replace(
        context, counts=tuple(counts.get(cell, 0.0) for cell in range(len(context.weights))), scale=result.scale
    )


class Protection:
    """One rank's clipping and noise, and what they have cost so far."""

    def __init__(self, privacy: Privacy, rank: int, masker: Masker | None) -> None:
        self._privacy = privacy
        self._rank = rank
        self._masker = masker
        self.accountant = Accountant(privacy)

    def apply(self, run: RoundRun, cells: Collection[int]) -> None:
        """Clip this cell's update and add noise to what this rank sends of it, in the stages.

        Collective over the cell. The norm is added up inside the cell only: it tells about the data, too. Where
        something fails, nothing of the update is left in the stages, since they are sent all the same; and they are
        sent without masks, since masked they would bare the sum of the other cells, which then has too little noise.
        """
        exchange, buffers, profile, sent = run._exchange, run._buffers, run.profile, list(run._sent())
        global_model, staging, group = exchange.global_model, exchange.staging, exchange.round_groups.cell
        assert global_model is not None, "kept where updates are clipped"
        self.accountant.spend(len(cells))  # also where the round is rejected later: it has been seen then
        if exchange.link.cell not in cells:
            return
        buffers.read_from_stages()
        # What could not be measured is too long to be clipped, on all ranks of the cell.
        total = torch.full((), math.inf, dtype=torch.float64, device=global_model.device)
        with profile.capture_failure("protect"):
            for transfer, bucket in sent:
                buffers.settle(bucket)
                stage = staging.stage(transfer, bucket)
                values = buffers.copy_of(transfer, bucket)
                if values.data_ptr() != stage.data_ptr():
                    stage.copy_(values)  # the copy is what later steps are measured from
            norms = [
                global_model.squared_distance(transfer, bucket, staging.stage(transfer, bucket))
                for transfer, bucket in sent
            ]
            total = torch.stack(norms).sum() if norms else torch.zeros_like(total)
        if group is not None:
            with profile.phase("home"):
                total = total.to(control_device(group))
                dist.all_reduce(total, group=group)
        protected = 0
        with profile.capture_failure("protect"):
            scale = self._privacy.scale_of(math.sqrt(total.item()))
            deviation = self._privacy.deviation(len(cells))
            noise = Noise(self._rank, self._privacy.seed, self.accountant.rounds)
            for transfer, bucket in sent:
                privatize(
                    staging.stage(transfer, bucket), global_model.written(transfer, bucket), scale, deviation, noise
                )
                protected += 1
        if profile.failure is None:
            return
        for transfer, bucket in sent[protected:]:
            staging.stage(transfer, bucket).zero_()
        if self._masker is not None:
            self._masker.abandon()
