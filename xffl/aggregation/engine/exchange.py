"""The exchange of a round: swap buckets between cells, combine them, and hand the result round inside each cell.

A bucket's way is a generator, :meth:`Exchange._exchange_bucket`; :class:`BucketPipeline` keeps several under way::

    bucket 0   pack  recv.. send ....wire....  mean  bcast-in-cell  write
    bucket 1         pack  recv.. send ....wire....  mean  bcast ...
    bucket 2               pack  recv.. send ....wire....  mean ...

Each ``yield n`` means "wake me after n more buckets were started": ``transfer.ahead`` between asking for what comes
and sending (over gloo), ``transfer.depth`` while a hop is on the wire, ``HOME_LAG`` while the cell gets the result.
Pauses count starts, not seconds, so all ranks that take part in a group do the same steps in the same order.

Three ways to the mean: all-gather (every cell combines all of a bucket), reduce-scatter (each cell combines a part, a
second hop sends the results round; both in :class:`~xffl.aggregation.engine.transport.CrossCellTransport`), and
:class:`PairwiseSwap` (two cells swap whole buckets and take the mean while they write the model).

A local failure (memory, a tensor that went away) stops nothing: the rank keeps sending and receiving, so that nobody
waits for it, and reports the failure to the vote. Only a failed communication ends an exchange.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import NamedTuple

import torch
import torch.distributed as dist

from xffl.aggregation.algorithms.combiners import CellStats, Combiner, WeightedCombiner, total_of
from xffl.aggregation.compression.error_feedback import ResidualStore
from xffl.aggregation.engine.buffers import Layout, Pool, StagingBuffers, aligned
from xffl.aggregation.engine.global_model import GlobalModel
from xffl.aggregation.engine.groups import Progress, RoundGroups, start_moves
from xffl.aggregation.engine.plan import Bucket, GroupTransfer, RoundContext
from xffl.aggregation.engine.transport import TAG, CrossCellTransport, add_distances
from xffl.aggregation.mean import weighted_mean
from xffl.aggregation.options import Options
from xffl.aggregation.privacy.differential import Accountant, Privacy, privatize
from xffl.aggregation.privacy.secure_sum import Masker
from xffl.aggregation.report import RoundProfile
from xffl.costs import MOST_IN_FLIGHT
from xffl.distributed.consistency import control_device
from xffl.topology import Topology

__all__ = [
    "BucketPipeline",
    "Exchange",
    "FiniteCheck",
    "FiniteReport",
    "PairwiseSwap",
    "Protection",
    "sum_of_squares",
    "weigh_cells",
]


HOME_LAG = 2
"""Buckets after which a broadcast at home is waited for: the next one is combined meanwhile."""


class Exchange:
    """Everything that one rank moves in a round.

    With ``atomic`` the new values are collected beside the model, one copy of this rank's shard, until :meth:`commit`
    writes them; else they are written bucket by bucket.
    """

    def __init__(
        self,
        layout: Layout,
        transfers: Sequence[GroupTransfer],
        transport: CrossCellTransport,
        *,
        topology: Topology,
        rank: int,
        round_groups: RoundGroups,
        device: torch.device,
        options: Options,
        global_model: GlobalModel | None,
        progress: Progress,
        masker: Masker | None,
    ) -> None:
        self._layout = layout
        self._transfers = tuple(transfers)
        self._transport = transport
        self._device = device
        self._atomic = options.atomic
        self._topology = topology
        self._cell = topology.cell_of(rank)
        self._round_groups = round_groups
        self.combiner = options.combiner
        self._is_gathering = isinstance(self.combiner, WeightedCombiner) and self.combiner.needs_distances
        self.global_model, self._progress = global_model, progress
        self.has_norms = options.has_norms
        privacy = options.privacy
        self._protection = None if privacy is None else Protection(privacy, round_groups.first + rank, masker)
        self.masker = masker
        self.context = RoundContext((1.0,), 0)
        # Buffers are made in the first round and kept, since fresh memory is slow.
        self._homes = Pool(0, device)
        self._staging = StagingBuffers(layout, device, atomic=options.atomic)
        self.memory = ResidualStore(transfers, transport.feedback)
        self.profile = RoundProfile(device)
        self._pairwise_swap = PairwiseSwap(layout, self._staging, transport, round_groups, self._cell)

    @property
    def accountant(self) -> Accountant | None:
        """What privacy has cost so far; ``None`` where rounds are not private."""
        return None if self._protection is None else self._protection.accountant

    @property
    def needs_one_arithmetic(self) -> bool:
        """Whether ranks compute new values by themselves, beyond the mean."""
        has_scale = isinstance(self.combiner, WeightedCombiner) and self.combiner.has_scale
        return has_scale or (self.global_model is not None and self.global_model.has_optimizer)

    @torch.no_grad()
    def inspect(self, fragment: int, *, is_snapshot: bool = False, keeps_snapshot: bool = False) -> FiniteReport:
        """Look the tensors up and read those of this round that this rank sends; local.

        What is combined late is looked at when it is sent, while the processor has it at hand: see :meth:`settle`.
        """
        self.profile = RoundProfile(self._device, self.profile)
        self._progress.forget()
        self.memory.begin()
        self._staging.begin(is_snapshot=is_snapshot or self._protection is not None, keeps_snapshot=keeps_snapshot)
        with self.profile.phase("pack"):
            self._layout.look_up()
            # Buffers outlive the round, so they must not be inference tensors if that is where the round takes place.
            with torch.inference_mode(False):
                self._make_buffers(fragment)
            self._pairwise_swap.begin()
            finite_check = FiniteCheck(self._layout)
            norms: list[torch.Tensor] = []
            for transfer, bucket in self._walk(fragment):
                if transfer.deferred_mean:
                    continue
                is_sender = self._transport.senders.is_here(transfer.group, bucket)
                if keeps_snapshot or transfer.group.is_mean_at_home or is_sender:
                    values, lent = self._staging.pack(transfer, bucket)
                    if transfer.group.rule == "average":
                        finite_check.add(bucket, values)
                    if is_sender and self.has_norms and transfer.group.is_stepped:
                        assert self.global_model is not None
                        norms.append(self.global_model.squared_distance(transfer, bucket, values))
                    self._staging.keep(bucket, lent)
            return finite_check.report()._replace(norm=total_of(torch.stack(norms).tolist() if norms else ()))

    def check(self, context: RoundContext) -> None:
        """Raise where these cells cannot be combined as was asked; pure, the same on all ranks."""
        self.combiner.check(len(context.cells))
        if self.masker is not None:
            self.masker.check(context.cells)
        if not self._is_gathering:
            weigh_cells(context, self.combiner)

    @torch.no_grad()
    def run(self, context: RoundContext, fragment: int) -> None:
        """Swap, combine and hand round every bucket of every group, once :meth:`inspect` has read them.

        Collective over the world; a GPU has done its part then. Afterwards :attr:`profile` tells what this rank sent,
        how long it took, and what failed here, and :attr:`context` what the cells counted for.
        """
        self.context = context if self._is_gathering else weigh_cells(context, self.combiner)
        if self.masker is not None:
            self.masker.begin(context.attempt, context.cells)
        self._transport.begin(self.context, self.profile)
        if self._protection is not None:
            assert self.global_model is not None
            self._protection.apply(
                list(self._carried(fragment)),
                self.global_model,
                self._staging,
                self.profile,
                cells=context.cells,
                cell=self._cell,
                home=self._round_groups.cell,
            )
        if not self._is_gathering:
            self._run_pipeline(fragment, self._exchange_bucket)
            return
        self._run_pipeline(fragment, self._gather)
        with self.profile.phase("weigh"):
            distances = self._compare(fragment)
        self.context = weigh_cells(context, self.combiner, distances)
        self._transport.weigh(self.context)
        self._run_pipeline(fragment, self._spread)

    def inspect_deferred(self) -> FiniteReport:
        """Return what was found in the values that are combined late, once :meth:`run` has sent them; local."""
        return self._pairwise_swap.report()

    def settle(self, *, squares_fit_fp32: bool) -> None:
        """Go on with what all ranks have found in the values that are combined late; local."""
        self.context = replace(self.context, is_fused=self.context.is_fused and squares_fit_fp32)

    def _run_pipeline(self, fragment: int, start: Callable[[GroupTransfer, Bucket], Iterator[int]]) -> None:
        """Start a flight for each bucket, in order, and keep several under way."""
        pipeline = BucketPipeline()
        before: tuple[object, ...] = ()
        for transfer in self._transfers_of(fragment):
            # Others are in step with this rank only as long as they walk the same groups; and what is asked for is sent
            # in the same order only as long as it is asked for as far ahead.
            if transfer.pace != before or transfer.deferred_mean:
                pipeline.drain()
            before = transfer.pace
            if transfer.deferred_mean:
                self._pairwise_swap.swap(transfer, self.context, self.profile)
                continue
            for bucket in transfer.buckets:
                pipeline.start(start(transfer, bucket))
        pipeline.drain()
        self._progress.drain()

    def _compare(self, fragment: int) -> list[list[float]]:
        """Return the squared distances between all cells' models; collective over the world.

        The senders of the first cell measure what they hold, and all ranks get the same sums from its first rank.
        """
        cells = self._topology.cells
        table = torch.zeros(cells, cells, dtype=torch.float64, device=self._device)
        if self._cell == 0:
            with self.profile.capture_failure("weigh"):
                for transfer, bucket in self._carried(fragment):
                    rows = self._transport.gathered.rows(transfer, bucket, self._kept_dtype(transfer))
                    add_distances(rows, self.context.cells, table)
        table = table.to(control_device(self._round_groups.world))
        if self._cell == 0 and self._round_groups.cell is not None:
            dist.all_reduce(table, group=self._round_groups.cell)
        dist.broadcast(table, src=self._round_groups.first, group=self._round_groups.world)
        distances: list[list[float]] = table.tolist()
        return distances

    @torch.no_grad()
    def commit(self, fragment: int, *, is_merged: bool = False, alpha: float | None = None) -> None:
        """Write the collected values into the model; local. Without ``atomic`` they are there already.

        Where another cell's values were collected and not the mean, the mean is written.
        """
        with self.profile.phase("commit"):
            if is_merged or self._staging.is_snapshot:
                self._layout.look_up()
            if self.global_model is not None:
                self.global_model.step(fragment, self._staging.stages, self.context.scale)
            self._pairwise_swap.write(
                [transfer for transfer in self._transfers_of(fragment) if transfer.deferred_mean], self.context
            )
            for transfer, bucket in self._walk(fragment) if self._atomic else ():
                if transfer.deferred_mean:
                    continue
                mean = self._staging.stage(transfer, bucket)
                if (
                    is_merged
                    and alpha != 0.0
                    and transfer.group.rule == "average"
                    and not transfer.group.is_mean_at_home
                ):
                    self._staging.merge(transfer, bucket, mean, alpha)
                else:
                    self._layout.unpack(bucket, mean)
            self.memory.settle(fragment, self._staging.stages)

    def carried_parts(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield what training changes of the model that this rank carries: tensor, first element, values; local."""
        for transfer in self._transfers:
            for bucket in transfer.buckets if transfer.group.is_stepped else ():
                if not self._transport.senders.is_here(transfer.group, bucket):
                    continue
                values = torch.empty(bucket.stop - bucket.start, dtype=transfer.dtype, device=self._device)
                self._layout.pack(bucket, values)
                sizes = [piece.stop - piece.start for piece in bucket.pieces]
                for piece, part in zip(bucket.pieces, torch.split(values, sizes), strict=True):
                    yield piece.item, piece.start, part

    def _make_buffers(self, fragment: int) -> None:
        """Make what a round needs, so that it does not run out of memory on its way."""
        transfers = self._transfers_of(fragment)
        pauses = {transfer.number: self._transport.pause(transfer) + HOME_LAG for transfer in transfers}
        # What is combined late is free again once it has been sent; a few more spare small models a second packing.
        pauses |= {
            transfer.number: min(pauses[transfer.number], MOST_IN_FLIGHT)
            for transfer in transfers
            if transfer.deferred_mean
        }
        self._staging.make(transfers, pauses)
        for transfer in transfers if self._is_gathering else ():
            if any(self._transport.senders.is_here(transfer.group, bucket) for bucket in transfer.buckets):
                self._transport.gathered.reserve(transfer, self._kept_dtype(transfer))
        self._transport.reserve(transfers)
        homes = [
            aligned((bucket.stop - bucket.start) * transfer.dtype.itemsize) * transfer.home.size()
            for transfer, bucket in self._walk(fragment)
            if transfer.group.is_mean_at_home and transfer.home is not None
        ]
        self._homes.reserve(bool(homes), max(homes, default=0))

    def _carried(self, fragment: int) -> Iterator[tuple[GroupTransfer, Bucket]]:
        """Yield what this rank carries of what training changes."""
        for transfer, bucket in self._walk(fragment):
            if transfer.group.is_stepped and self._transport.senders.is_here(transfer.group, bucket):
                yield transfer, bucket

    def _walk(self, fragment: int) -> Iterator[tuple[GroupTransfer, Bucket]]:
        return ((transfer, bucket) for transfer in self._transfers_of(fragment) for bucket in transfer.buckets)

    def _transfers_of(self, fragment: int) -> list[GroupTransfer]:
        return [transfer for transfer in self._transfers if transfer.group.fragment == fragment]

    def _exchange_bucket(self, transfer: GroupTransfer, bucket: Bucket) -> Iterator[int]:
        """Take one bucket from the model across and back; yields for how many buckets it can pause."""
        group = transfer.group
        values, out, lent = self._staging.own(transfer, bucket)
        if lent is not None:
            with self.profile.capture_failure("pack"):
                self._staging.fill(bucket, values)
        if group.is_mean_at_home and transfer.home is not None:
            self._mean_at_home(transfer.home, values)
        is_sender = self._transport.senders.is_here(group, bucket)
        if is_sender:
            yield from self._transport.exchange(transfer, bucket, values, out, is_encoded=self._is_encoded(transfer))
        if transfer.home is not None:
            if not is_sender:  # in step with the rank that is
                yield self._transport.pause(transfer)
            yield from self._share(transfer, bucket, out, is_sender=is_sender)
        self._write(transfer, bucket, out, lent)

    def _gather(self, transfer: GroupTransfer, bucket: Bucket) -> Iterator[int]:
        """Take one bucket to the other cells, and keep what comes back until all have been compared."""
        values, _, lent = self._staging.own(transfer, bucket)
        if lent is not None:
            with self.profile.capture_failure("pack"):
                self._staging.fill(bucket, values)
        if transfer.group.is_mean_at_home and transfer.home is not None:
            self._mean_at_home(transfer.home, values)
        if self._transport.senders.is_here(transfer.group, bucket):
            yield from self._transport.gather(transfer, bucket, values, is_encoded=self._is_encoded(transfer))
        self._staging.give(lent)

    def _spread(self, transfer: GroupTransfer, bucket: Bucket) -> Iterator[int]:
        """Combine one bucket of what was kept, and hand it round."""
        _, out, lent = self._staging.own(transfer, bucket)
        is_sender = self._transport.senders.is_here(transfer.group, bucket)
        if is_sender:
            self._transport.settle(transfer, bucket, out, is_encoded=self._is_encoded(transfer))
        if transfer.home is not None:
            yield from self._share(transfer, bucket, out, is_sender=is_sender)
        self._write(transfer, bucket, out, lent)

    def _kept_dtype(self, transfer: GroupTransfer) -> torch.dtype:
        return torch.float32 if self._is_encoded(transfer) else transfer.dtype

    def _is_encoded(self, transfer: GroupTransfer) -> bool:
        return transfer.codec is not None and self.memory.is_encoding(transfer.group.fragment)

    def _write(self, transfer: GroupTransfer, bucket: Bucket, out: torch.Tensor, lent: torch.Tensor | None) -> None:
        """Write a bucket into the model, unless it waits for the commit."""
        if self._atomic:
            return
        with self.profile.capture_failure("commit"):
            self._layout.unpack(bucket, out)
            feedback = self._transport.feedback.get(transfer.number)
            if feedback is not None:
                feedback.reference[bucket.start : bucket.stop].copy_(out)
        self._staging.give(lent)

    def _mean_at_home(self, home: dist.ProcessGroup, values: torch.Tensor) -> None:
        """Replace a bucket by its mean over the ranks of ``home``, each counted alike."""
        with self.profile.phase("home"):
            lent = self._homes.take(aligned(values.nbytes) * home.size())
            rows = [row[: values.nbytes] for row in self._homes.rows(lent, torch.uint8, home.size())]
            dist.all_gather(rows, values.view(torch.uint8), group=home)
            self.profile.bytes_home += values.nbytes * (len(rows) - 1)
        with self.profile.capture_failure("combine"):
            weighted_mean([row.view(values.dtype) for row in rows], [1.0] * len(rows), values)
        self._homes.give(lent)

    def _share(
        self, transfer: GroupTransfer, bucket: Bucket, values: torch.Tensor, *, is_sender: bool
    ) -> Iterator[int]:
        """Hand a result round at home."""
        home = transfer.home
        assert home is not None
        with self.profile.phase("home"):
            source = self._round_groups.first + self._transport.senders.at_home(transfer.group, bucket)
            work = dist.broadcast(values.view(torch.uint8), src=source, group=home, async_op=True)
        self.profile.bytes_home += values.nbytes * (home.size() - 1) if is_sender else 0
        yield HOME_LAG
        with self.profile.phase("home"):
            work.wait()
        self._progress.note()


class BucketPipeline:
    """What is under way: iterators that yield for how many starts of others they can pause; local and deterministic."""

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


class PairwiseSwap:
    """The groups of a rank that are combined late, see :class:`~xffl.aggregation.engine.plan.GroupTransfer`."""

    def __init__(
        self,
        layout: Layout,
        staging: StagingBuffers,
        transport: CrossCellTransport,
        round_groups: RoundGroups,
        cell: int,
    ) -> None:
        self._layout, self._staging, self._transport, self._round_groups = layout, staging, transport, round_groups
        self._cell, self._other = cell, 1 - cell
        self._finite_check = FiniteCheck(layout)

    def begin(self) -> None:
        """Forget what was found in the round before."""
        self._finite_check = FiniteCheck(self._layout)

    def report(self) -> FiniteReport:
        """Return what was found in the values that were sent; local."""
        return self._finite_check.report()

    def swap(self, transfer: GroupTransfer, context: RoundContext, profile: RoundProfile) -> None:
        """Swap all of a group with its sender in the other cell.

        A loop of its own instead of a flight for each bucket: where buckets empty the caches, a step of Python costs
        ten times as much, and there are hundreds.
        """
        buckets, sources, ahead = transfer.buckets, context.source_cells(transfer.group), transfer.ahead
        sends, receives = self._cell in sources, self._other in sources
        groups = self._round_groups.across or (None,)
        peer = self._round_groups.first + self._transport.senders.of(transfer.group, buckets[0])[self._other]
        stages = self._staging.stages_of(transfer)
        arriving: deque[list[dist.Work]] = deque()
        leaving: deque[tuple[Bucket, torch.Tensor | None, list[dist.Work]]] = deque()
        for tick in range(len(buckets) + ahead + transfer.depth):
            if tick >= ahead + transfer.depth:
                bucket, lent, works = leaving.popleft()
                with profile.phase("across"):
                    for work in arriving.popleft() + works:
                        work.wait()
                if lent is not None:
                    self._staging.keep(bucket, lent)
            if ahead <= tick < len(buckets) + ahead:
                bucket = buckets[tick - ahead]
                values, lent = self._read(transfer, bucket, profile)
                profile.record_send(values.nbytes if sends else 0)
                with profile.phase("post"):
                    moves = [(values, peer)] if sends else []
                    leaving.append((bucket, lent, start_moves([], moves, groups[bucket.number % len(groups)], TAG)))
            if tick < len(buckets):
                profile.record_send(0)  # what is asked for counts, too
                with profile.phase("post"):
                    moves = [(stages[tick], peer)] if receives else []
                    arriving.append(start_moves(moves, [], groups[tick % len(groups)], TAG))
        profile.arrived()

    def _read(
        self, transfer: GroupTransfer, bucket: Bucket, profile: RoundProfile
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a bucket's values, looked at, and the buffer lent for them, if any."""
        values, lent = self._staging.lend(transfer, bucket)
        with profile.capture_failure("pack"):
            if lent is not None:
                self._staging.fill(bucket, values)
            self._finite_check.add(bucket, values)
        return values, lent

    def write(self, transfers: Sequence[GroupTransfer], context: RoundContext) -> None:
        """Write the mean of groups into the model; local."""
        # What shares memory is written once all of it has been read.
        waits = self._layout.shares_memory
        for transfer in transfers:
            sources = context.source_cells(transfer.group)
            counts = [context.counts[cell] for cell in sources]
            for bucket, stage in zip(transfer.buckets, self._staging.stages_of(transfer), strict=True):
                values, lent = self._staging.lend(transfer, bucket)
                if lent is not None:
                    self._staging.fill(bucket, values)
                both = (values, stage) if self._cell == 0 else (stage, values)
                mean = stage if waits else values
                weighted_mean([both[cell] for cell in sources], counts, mean, is_fused=context.is_fused)
                if lent is not None and not waits:
                    self._layout.unpack(bucket, values)
                self._staging.give(lent)
        for transfer in transfers if waits else ():
            for bucket, stage in zip(transfer.buckets, self._staging.stages_of(transfer), strict=True):
                self._layout.unpack(bucket, stage)


class FiniteReport(NamedTuple):
    """What a rank has found in the values that it sends."""

    nonfinite: list[str]  # names of tensors to be averaged that hold a value which is not finite
    squares_fit_fp32: bool  # whether no value is so large that its square leaves fp32
    norm: float = 0.0  # squared L2 norm of what they differ by from the last agreed model; 0 where nobody asks


class FiniteCheck:
    """Looks at the values of a round, bucket by bucket; local."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._energies: list[tuple[Bucket, torch.Tensor]] = []

    def add(self, bucket: Bucket, values: torch.Tensor) -> None:
        """Look at a bucket's values; a GPU is not waited for."""
        self._energies.append((bucket, sum_of_squares(values)))

    def report(self) -> FiniteReport:
        """Return what was found in all of them."""
        energies = torch.stack([energy for _, energy in self._energies]).tolist() if self._energies else []
        found: set[int] = set()
        for (bucket, _), energy in zip(self._energies, energies, strict=True):
            if not math.isfinite(energy):
                found.update(self._layout.nonfinite(bucket))
        return FiniteReport([self._layout.name(item) for item in sorted(found)], all(map(math.isfinite, energies)))


def sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    """Return a number that is finite only if all values are: the sum of squares, or of the values of a narrow type."""
    if not values.is_floating_point():
        return values.new_zeros((), dtype=torch.float32)
    if values.dtype.itemsize < 4:
        values = values.float() if values.dtype.itemsize == 1 else values  # torch adds no 8-bit floats up
        return values.sum(dtype=torch.float32)
    energy = values.dot(values)
    return energy if energy.dtype == torch.float32 else energy.float()


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

    def apply(
        self,
        carried: Sequence[tuple[GroupTransfer, Bucket]],
        global_model: GlobalModel,
        staging: StagingBuffers,
        profile: RoundProfile,
        *,
        cells: Collection[int],
        cell: int,
        home: dist.ProcessGroup | None,
    ) -> None:
        """Clip this cell's update and add noise to what this rank carries of it, in the stages.

        Collective over the cell. The norm is added up inside the cell only: it tells about the data, too. Where
        something fails, nothing of the update is left in the stages, since they are sent all the same; and they are
        sent without masks, since masked they would bare the sum of the other cells, which then has too little noise.
        """
        self.accountant.spend(len(cells))  # also where the round is rejected later: it has been seen then
        if cell not in cells:
            return
        staging.read_from_stages()
        # What could not be measured is too long to be clipped, on all ranks of the cell.
        total = torch.full((), math.inf, dtype=torch.float64, device=global_model.device)
        with profile.capture_failure("protect"):
            for transfer, bucket in carried:
                stage = staging.stage(transfer, bucket)
                values = staging.copied(transfer, bucket)
                if values.data_ptr() != stage.data_ptr():
                    stage.copy_(values)  # the snapshot is what later steps are measured from
            norms = [
                global_model.squared_distance(transfer, bucket, staging.stage(transfer, bucket))
                for transfer, bucket in carried
            ]
            total = torch.stack(norms).sum() if norms else torch.zeros_like(total)
        if home is not None:
            with profile.phase("home"):
                total = total.to(control_device(home))
                dist.all_reduce(total, group=home)
        protected = 0
        with profile.capture_failure("protect"):
            scale = self._privacy.scale_of(math.sqrt(total.item()))
            deviation = self._privacy.deviation(len(cells))
            noise = self._privacy.noise_of(self._rank, self.accountant.rounds)
            for transfer, bucket in carried:
                privatize(
                    staging.stage(transfer, bucket), global_model.written(transfer, bucket), scale, deviation, noise
                )
                protected += 1
        if profile.failure is None:
            return
        for transfer, bucket in carried[protected:]:
            staging.stage(transfer, bucket).zero_()
        if self._masker is not None:
            self._masker.abandon()
