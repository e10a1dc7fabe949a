"""The exchange of a round: send buckets between cells, combine them, and broadcast the result inside each cell.

A bucket's way is a generator, :meth:`Walk.steps`; :func:`interleave` keeps several under way::

    bucket 0   pack  recv.. send ....wire....  mean  bcast-in-cell  write
    bucket 1         pack  recv.. send ....wire....  mean  bcast ...
    bucket 2               pack  recv.. send ....wire....  mean ...

Each ``yield n`` means "resume me after n more buckets were started": ``transfer.ahead`` between posting receives and
sending (over gloo), ``transfer.depth`` while a hop is on the wire, ``HOME_LAG`` while the cell gets the result.
Pauses count starts, not seconds, so all ranks that take part in a group do the same steps in the same order.

Two ways to the mean: all-gather (every cell combines all of a bucket), and reduce-scatter (each cell combines a part, a
second hop sends the results round); both in :class:`~xffl.aggregation.engine.transport.CrossCellTransport`. Combiners
that compare whole models, and a cell that hands its model over, have walks of their own (``stages``).

A local failure (out of memory, a tensor that is gone) stops nothing: the rank keeps sending and receiving, so that no
other rank waits for it, and votes no afterwards. Only a failed communication ends an exchange.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from xffl.aggregation.engine.arena import Arena
from xffl.aggregation.engine.buffers import (
    BucketMemory,
    Copies,
    FiniteCheck,
    Layout,
    ModelCopy,
    Pool,
    aligned,
    host_or_gpu,
)
from xffl.aggregation.engine.cell import mean_in_cell
from xffl.aggregation.engine.groups import RoundGroups
from xffl.aggregation.engine.planning.transfers import (
    Bucket,
    BucketRun,
    FragmentPlan,
    GroupTransfer,
    RoundContext,
    plan_fragments,
)
from xffl.aggregation.engine.transport import CrossCellTransport, Crossing, ExactValues, Link
from xffl.aggregation.engine.voting.votes import RoundStatus
from xffl.aggregation.report import RoundProfile
from xffl.distributed.collectives import broadcast

if TYPE_CHECKING:
    from xffl.aggregation.engine.stages.stage import RoundStage

__all__ = [
    "HOME_LAG",
    "Exchange",
    "ExchangeWalk",
    "Inspection",
    "Memory",
    "RoundMemory",
    "RoundRun",
    "Walk",
    "Way",
    "interleave",
    "share_in_cell",
    "staging_bytes",
]


HOME_LAG = 2
"""Number of buckets to start before a broadcast inside the cell is waited for; they are combined meanwhile."""


def share_in_cell(
    link: Link, profile: RoundProfile, transfer: GroupTransfer, bucket: Bucket, out: torch.Tensor, result: torch.Tensor
) -> Iterator[int]:
    """Broadcast a sender's ``out`` inside the cell, into ``result`` of all ranks, which may be the same memory."""
    home = transfer.cell_group
    is_sender = transfer.sends[bucket.number]
    assert home is not None
    if is_sender and result is not out:
        with profile.capture_failure("home"):
            link.copies.bring(out, result)
    with profile.phase("home"):
        source = link.round_groups.first + transfer.senders[bucket.number][transfer.cell]
        work = dist.broadcast(result.view(torch.uint8), src=source, group=home, async_op=True)
    profile.bytes_home += result.nbytes * (home.size() - 1) if is_sender else 0
    yield HOME_LAG
    with profile.phase("home"):
        work.wait()
    link.home_progress.note()


Stage = TypeVar("Stage", bound="RoundStage")


class Exchange:
    """What one rank exchanges, what features do to it, and the buffers that rounds use again.

    With ``atomic`` the new values are collected beside the model, one copy of this rank's shard, until
    :meth:`RoundRun.commit` writes them; else they are written bucket by bucket.
    """

    def __init__(
        self,
        layout: Layout,
        transfers: Sequence[GroupTransfer],
        link: Link,
        memory: Memory,
        *,
        atomic: bool,
        way: Way,
    ) -> None:
        self.layout = layout
        self.transfers = tuple(transfers)
        self.plans = plan_fragments(transfers)
        self.link = link
        self.device = link.device
        self.atomic = atomic
        self.way = way
        self.round_groups = link.round_groups
        self.memory = memory
        self.stages: tuple[RoundStage, ...] = ()
        """What features do to each round, in order; see :func:`xffl.aggregation.engine.stages.order.in_order`."""

    def find(self, kind: type[Stage]) -> Stage | None:
        """Return the stage of a kind, if rounds have it."""
        return next((stage for stage in self.stages if isinstance(stage, kind)), None)

    def take_over(self, last: Exchange) -> None:
        """Go on from what rounds with other cells remember; local."""
        for stage in self.stages:
            before = last.find(type(stage))
            if before is not None:
                stage.take_over(before)

    def check(self, context: RoundContext) -> None:
        """Raise where these cells cannot be combined as was asked; pure, the same on all ranks."""
        self.way.check(context)
        for stage in self.stages:
            stage.check(context)

    def own_values(self, *, with_buffers: bool = False) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield what training changes of the model that this rank sends: tensor, first element, values; local.

        With ``with_buffers`` all else that this rank sends, too.
        """
        for transfer in self.transfers:
            for bucket in transfer.buckets if transfer.group.is_stepped or with_buffers else ():
                if not transfer.sends[bucket.number]:
                    continue
                values = torch.empty(bucket.stop - bucket.start, dtype=transfer.dtype, device=self.device)
                self.layout.pack(bucket, values)
                sizes = [piece.stop - piece.start for piece in bucket.pieces]
                for piece, part in zip(bucket.pieces, torch.split(values, sizes), strict=True):
                    yield piece.item, piece.start, part

    @property
    def weighs_result(self) -> bool:
        """Whether all ranks have to know something of the result before they write."""
        return any(stage.weighs_result for stage in self.stages)

    def conclude(self, context: RoundContext, statuses: Sequence[RoundStatus]) -> RoundContext:
        """Return the context with what follows from what all ranks tell of the result; pure."""
        for stage in self.stages:
            context = stage.conclude(context, statuses)
        return context

    def end_round(self) -> None:
        """Conclude a round; stages that rounds no longer need are left out of the next one."""
        staying: list[RoundStage] = []
        for stage in self.stages:
            stage.end()
            if not stage.is_over:
                staying.append(stage)
        self.stages = tuple(staying)

    @torch.no_grad()
    def start_from_model(self) -> None:
        """Let codecs and a server optimizer go on from the model as it stands; local, with the same in all cells."""
        self.layout.look_up()
        for stage in self.stages:
            stage.start_from_model()


class Inspection(NamedTuple):
    """What looks at this rank's values before the first vote."""

    finite_check: FiniteCheck
    stages: Sequence[RoundStage]


def _cell_rows_nbytes(transfer: GroupTransfer) -> int:
    """Return what a bucket's values of all ranks of a cell take up where their mean is taken; 0 where it is not."""
    if not transfer.group.is_mean_in_cell or transfer.cell_group is None:
        return 0
    largest = max((bucket.stop - bucket.start for bucket in transfer.buckets), default=0)
    return aligned(largest * transfer.dtype.itemsize) * transfer.cell_group.size()


class Memory:
    """The memory that rounds of a rank use again: made in the first round and kept, since fresh memory is slow.

    With ``atomic``, ``staging`` has the new values of each transfer, by its number, until they are committed. This form
    is for values that are sent from where the model lies. Beside a GPU whose values cross in the host's memory there is
    another one, see :mod:`xffl.aggregation.engine.gpu_memory`.
    """

    def __init__(
        self,
        layout: Layout,
        transfers: Sequence[GroupTransfer],
        device: torch.device,
        *,
        copies: Copies,
        atomic: bool,
        arena: Arena | None = None,
    ) -> None:
        self.layout = layout
        self.device = device
        self.copies = copies
        self.atomic = atomic
        self._arena = arena
        if arena is not None:
            arena.restart(staging_bytes(transfers))
        self.staging: dict[int, torch.Tensor] = {}
        self.results: Mapping[int, torch.Tensor] = self.staging
        """Where new values wait, by the number of the transfer"""
        self.kept: dict[int, torch.Tensor] = {}
        """Where old values are kept, with ``ModelCopy.KEPT``"""
        self.packs = Pool(0, device)
        self.packed: dict[int, torch.Tensor] = {}
        """By the id of a bucket its values, until the exchange asks for them"""
        self.keeps_packed = True
        """Whether there is room for all that a round packs"""
        cell_rows_bytes = max(map(_cell_rows_nbytes, transfers), default=0)
        self.cell_rows = Pool(cell_rows_bytes, device)
        """Buffers for the values of all ranks of a cell whose mean is taken"""
        self._cell_rows_count = 1 if cell_rows_bytes else 0

    def of_round(self, transfers: Sequence[GroupTransfer], copy: ModelCopy, profile: RoundProfile) -> RoundMemory:
        """Make what a round needs, so that it does not run out of memory on its way."""
        self.prepare(transfers, copy)
        return RoundMemory(self, copy, profile)

    def prepare(self, transfers: Sequence[GroupTransfer], copy: ModelCopy) -> None:
        """Make where the values of groups wait, once; take back what a round that did not take place has packed."""
        while self.packed:
            self.packs.release(self.packed.popitem()[1])
        for transfer in transfers:
            if self.atomic and transfer.number not in self.staging:
                self.staging[transfer.number] = self._make_staging(transfer)
            if copy is ModelCopy.KEPT and transfer.number not in self.kept:
                self.kept[transfer.number] = host_or_gpu(transfer.group.numel, transfer.dtype, self.device)
        if not self.atomic:
            self._reserve_packs(transfers)
        self.cell_rows.reserve(self._cell_rows_count)

    def _make_staging(self, transfer: GroupTransfer) -> torch.Tensor:
        if self._arena is None:
            # With a codec it takes turns with the memory of the agreed values.
            is_lasting = transfer.codec is not None
            return host_or_gpu(transfer.group.numel, transfer.dtype, self.device, is_lasting=is_lasting)
        return self._arena.take(transfer.group.numel, transfer.dtype)

    def _reserve_packs(self, transfers: Sequence[GroupTransfer]) -> None:
        """Make buffers for the buckets that are no run of memory: for all of them, or for those under way at a time."""
        packed = [
            ((bucket.stop - bucket.start) * transfer.dtype.itemsize, transfer.pause + HOME_LAG)
            for transfer in transfers
            for bucket in transfer.buckets
            if self.layout.run_of(bucket, self.device) is None
        ]
        count = min(len(packed), max((pause for _, pause in packed), default=0))
        self.keeps_packed = count == len(packed)
        self.packs.reserve(count, max((nbytes for nbytes, _ in packed), default=0))

    def staging_of(self, transfer: GroupTransfer, bucket: Bucket) -> torch.Tensor:
        """Return where a bucket's new values wait."""
        return self.staging[transfer.number][bucket.start : bucket.stop]


def staging_bytes(transfers: Sequence[GroupTransfer]) -> int:
    """Return how many bytes the new values of all these groups take up, each aligned."""
    return sum(aligned(transfer.group.numel * transfer.dtype.itemsize) for transfer in transfers)


class RoundMemory:
    """Where one round reads this rank's values and leaves its results; local."""

    def __init__(self, memory: Memory, copy: ModelCopy, profile: RoundProfile) -> None:
        self.lasting = memory
        """The memory of all rounds"""
        self.copy = copy
        self.profile = profile
        self.is_atomic = memory.atomic
        self._layout = memory.layout
        self._reads_staging = False
        self._postponed: set[int] = set()  # by the id of a bucket

    def inspect(self, buckets: BucketRun, inspection: Inspection) -> None:
        """Pack what has to be copied; check what this rank sends for NaN and infinity."""
        for transfer, bucket in buckets:
            self.inspect_bucket(transfer, bucket, inspection)
        for stage in inspection.stages:
            stage.end_inspection()

    def inspect_bucket(self, transfer: GroupTransfer, bucket: Bucket, inspection: Inspection) -> None:
        """Pack a bucket where it has to be copied, and check it."""
        is_sender = transfer.sends[bucket.number]
        if not (self.copy is ModelCopy.KEPT or transfer.group.is_mean_in_cell or is_sender):
            return
        place = self.acquire(transfer, bucket)
        self.pack(bucket, place.values)
        if transfer.group.rule == "average":
            inspection.finite_check.add(bucket, place.values)
        if is_sender and transfer.group.is_stepped:
            for stage in inspection.stages:
                stage.inspect(transfer, bucket, place.values)
        if place.lent is not None:
            self.keep(bucket, place.lent)

    def acquire(self, transfer: GroupTransfer, bucket: Bucket) -> BucketMemory:
        """Return where a bucket's values are read and its result goes."""
        if not self.is_atomic:
            return self._acquire_in_place(transfer, bucket)
        staging = self.lasting.staging_of(transfer, bucket)
        values: torch.Tensor | None = staging
        if not (transfer.group.is_mean_in_cell or self._reads_staging):
            if self.copy is ModelCopy.NONE:
                values = self._layout.run_of(bucket, self.lasting.device)
            else:
                values = self.copy_of(transfer, bucket)
        return BucketMemory(staging if values is None else values, out=staging, lent=None, result=staging)

    def _acquire_in_place(self, transfer: GroupTransfer, bucket: Bucket) -> BucketMemory:
        """Return where a bucket's values lie in the model, or a buffer to pack them into, which is lent."""
        values = self._layout.run_of(bucket, self.lasting.device)
        lent: torch.Tensor | None = None
        if values is None:
            nbytes = (bucket.stop - bucket.start) * transfer.dtype.itemsize
            lent = self.lasting.packed.get(id(bucket))
            if lent is None:
                lent = self.lasting.packs.acquire(nbytes)
            values = lent[:nbytes].view(transfer.dtype)
        return BucketMemory(values, out=values, lent=lent, result=values)

    def pack(self, bucket: Bucket, values: torch.Tensor) -> None:
        """Copy a bucket out of the model, unless it is read there; a copy from a GPU may still be on its way."""
        run = self._layout.run_of(bucket, self.lasting.device)
        if run is None or run.data_ptr() != values.data_ptr():
            self.lasting.copies.start(self._layout, bucket, values)

    def keep(self, bucket: Bucket, lent: torch.Tensor) -> None:
        """Keep what :meth:`pack` has copied until :meth:`fill` asks for it, where there is room for all of a round."""
        if self.lasting.keeps_packed:
            self.lasting.packed[id(bucket)] = lent
        else:
            self.lasting.packs.release(lent)

    def postpone(self, bucket: Bucket) -> None:
        """Leave a bucket in the model until :meth:`fill` asks for it."""
        self._postponed.add(id(bucket))

    def read(self, transfer: GroupTransfer, bucket: Bucket) -> BucketMemory:
        """Return where a bucket lies, with its values, of buffers their mean over the cell."""
        place = self.acquire(transfer, bucket)
        home = transfer.cell_group if transfer.group.is_mean_in_cell else None
        if (home is not None or transfer.sends[bucket.number]) and self.is_to_fill(bucket, place.lent):
            with self.profile.capture_failure("pack"):
                self.fill(bucket, place.values)
        if home is not None:
            with self.profile.capture_failure("pack"):
                self.settle(bucket)
            mean_in_cell(self.lasting.cell_rows, self.profile, home, place.values)
        return place

    def is_to_fill(self, bucket: Bucket, lent: torch.Tensor | None) -> bool:
        """Tell whether :meth:`fill` is to be called before a bucket's values are read."""
        return lent is not None or id(bucket) in self._postponed

    def fill(self, bucket: Bucket, values: torch.Tensor) -> None:
        """Copy a bucket out of the model where it was postponed, or was not kept; it may still be on its way."""
        if self.lasting.packed.pop(id(bucket), None) is None:
            self.lasting.copies.start(self._layout, bucket, values)

    def settle(self, bucket: Bucket) -> None:
        """Let the host wait until a bucket's values have come."""
        self.lasting.copies.settle(bucket)

    def release(self, place: BucketMemory) -> None:
        """Give the buffers of a bucket back."""
        self.lasting.packs.release(place.lent)

    def drain(self) -> None:
        """Wait until what was handed round inside the cell has come, if that is not yet so."""

    def copy_of(self, transfer: GroupTransfer, bucket: Bucket) -> torch.Tensor:
        """Return a bucket as it was copied out of the model when the round began."""
        copies = self.lasting.kept if self.copy is ModelCopy.KEPT else self.lasting.staging
        return copies[transfer.number][bucket.start : bucket.stop]

    def read_from_staging(self) -> None:
        """Read values from where new ones wait, since something has written there what is to leave this rank."""
        self._reads_staging = True

    def merge(self, transfer: GroupTransfer, bucket: Bucket, mean: torch.Tensor, alpha: float | None) -> None:
        """Write a mean into a model that has gone on since; ``mean`` itself stays what all ranks agreed on."""
        from xffl.aggregation.engine.merging import merge_values

        lent = self.lasting.packs.acquire(mean.nbytes)
        local = lent[: mean.nbytes].view(mean.dtype)
        self._layout.pack(bucket, local)
        copy = mean if alpha is not None else self.copy_of(transfer, bucket)
        self.settle(bucket)
        merge_values(local, copy, mean, alpha)
        self._layout.unpack(bucket, local)
        self.lasting.packs.release(lent)


class RoundRun:
    """One round of this rank, from the values that it reads to those that it writes.

    Making one is local: it makes the buffers that the round needs, and reads and checks those values of this rank that
    are sent.
    """

    @torch.no_grad()
    def __init__(
        self, exchange: Exchange, fragment: int, profile: RoundProfile, copy: ModelCopy = ModelCopy.NONE
    ) -> None:
        self._exchange = exchange
        self.link = exchange.link
        self._layout = exchange.layout
        self.fragment = fragment
        self.plan = exchange.plans.get(fragment, FragmentPlan())
        self.stages = exchange.stages
        self.profile = profile
        self.way = exchange.way
        self._transport: CrossCellTransport | None = None  # of the last walk
        self._lost: RuntimeError | None = None  # what has ended a message before there was a walk
        for stage in self.stages:
            copy = stage.begin(fragment, copy)
        with profile.phase("pack"):
            self._layout.look_up()
            # Made now, so that the round does not run out of memory on its way. Buffers outlive the round, so they must
            # not be inference tensors if that is where it takes place.
            with torch.inference_mode(False):
                self.memory = exchange.memory.of_round(self.plan.transfers, copy, profile)
                self.way.reserve(self.plan.transfers)
                self.link.reserve(fragment, self.plan)
            inspection = Inspection(FiniteCheck(self._layout), [stage for stage in self.stages if stage.inspects])
            self.memory.inspect(self.plan.buckets, inspection)
            self.nonfinite = inspection.finite_check.find_nonfinite()
            """Tensors to be averaged of which this rank would send a value that is not finite"""

    @property
    def reported(self) -> dict[str, Any]:
        """What stages add to the round's report."""
        fields: dict[str, Any] = {}
        for stage in self.stages:
            fields |= stage.report()
        return fields

    @property
    def round_groups(self) -> RoundGroups:
        """The process groups of the round."""
        return self._exchange.round_groups

    @property
    def device(self) -> torch.device:
        """The device that values are sent from."""
        return self._exchange.device

    @torch.no_grad()
    def exchange(self, context: RoundContext) -> RoundContext:
        """Swap, combine and hand round every bucket of every group; return what the cells counted for.

        Collective over the world; a GPU has done its part then. Afterwards :attr:`profile` tells what this rank sent,
        how long it took, and what failed here.
        """
        return self.way.exchange(self, context)

    @torch.no_grad()
    def commit(self, context: RoundContext, *, is_merged: bool = False, alpha: float | None = None) -> None:
        """Write the collected values into the model; local. Without ``atomic`` they are there."""
        exchange = self._exchange
        results = self.memory.lasting.results
        stepped: set[int] = set()
        with self.profile.phase("commit"):
            if is_merged or self.memory.copy is not ModelCopy.NONE:
                self._layout.look_up()  # local steps may have moved tensors since
            for stage in self.stages:
                for transfer, bucket, new in stage.write(self, context):
                    stepped.add(transfer.number)
                    self._write_agreed(transfer, bucket, new, is_merged=is_merged, alpha=alpha)
            for transfer, bucket in self.plan.buckets if exchange.atomic else ():
                if transfer.number not in stepped:
                    new = results[transfer.number][bucket.start : bucket.stop]
                    self._write_agreed(transfer, bucket, new, is_merged=is_merged, alpha=alpha)
            self.link.copies.end_writes()
            for stage in self.stages:
                stage.commit(self)

    def _write_agreed(
        self, transfer: GroupTransfer, bucket: Bucket, new: torch.Tensor, *, is_merged: bool, alpha: float | None
    ) -> None:
        """Write a bucket's new values, which all ranks have agreed on, into the model."""
        keeps_some = is_merged and alpha != 0.0 and transfer.group.rule == "average"
        if keeps_some and not transfer.group.is_mean_in_cell:
            self.memory.merge(transfer, bucket, new, alpha)
        else:
            self.link.copies.write(self._layout, bucket, new)

    @torch.no_grad()
    def result(self) -> dict[str, Any]:
        """Return what this rank tells all others of the combined values, in its status; local."""
        told: dict[str, Any] = {}
        for stage in self.stages:
            if stage.weighs_result:
                with self.profile.capture_failure("combine"):
                    told |= stage.result(self)
        return told

    def sent(self) -> Iterator[tuple[GroupTransfer, Bucket]]:
        """Yield what this rank sends of what training changes."""
        for transfer, bucket in self.plan.buckets:
            if transfer.group.is_stepped and transfer.sends[bucket.number]:
                yield transfer, bucket

    def walk(self, walk: Walk) -> None:
        """Start the way of each bucket, in order, and keep several under way."""
        self._transport = walk.transport
        if self._lost is not None:
            walk.transport.lose(self._lost)
        for buckets in self.plan.runs:
            interleave(walk.steps(transfer, bucket) for transfer, bucket in buckets)
        self.memory.drain()

    def write(self, transfer: GroupTransfer, bucket: Bucket, memory: BucketMemory) -> None:
        """Write a bucket into the model while others are exchanged, where it does not wait for the commit."""
        with self.profile.capture_failure("commit"):
            self._layout.unpack(bucket, memory.result)
            for stage in self.stages:
                stage.written(transfer, bucket, memory.out)
        self.memory.release(memory)

    def tell_all(self, numbers: torch.Tensor) -> None:
        """Replace numbers by those of the first rank; collective over the world."""
        groups = self._exchange.round_groups
        try:
            broadcast(numbers, groups.first, groups.world)
        except RuntimeError as lost:
            if self._transport is None:  # ranks of the cell that have heard it still wait for this one
                self._lost = lost
            else:
                self._transport.lose(lost)


class Walk(ABC):
    """A walk over buckets: each is read, crosses, is handed round inside the cell, and is put where it belongs.

    The methods follow in the order in which they are called for a bucket.
    """

    crosses = True
    """Whether a bucket's sender exchanges it with other cells."""

    reaches_cell = True
    """Whether a bucket's sender hands the result round inside its cell."""

    def __init__(self, transport: CrossCellTransport) -> None:
        self.transport = transport
        self.link = transport.link
        self.profile = transport.profile

    def steps(self, transfer: GroupTransfer, bucket: Bucket) -> Iterator[int]:
        """Take one bucket on its way; yields the number of buckets to start before it resumes."""
        memory = self.read(transfer, bucket)
        if self.crosses and transfer.sends[bucket.number]:
            yield from self._cross(Crossing(self.transport, transfer, bucket, values=memory.values, out=memory.out))
        elif pause := self.pause(transfer):
            yield pause
        if self.reaches_cell and transfer.cell_group is not None:
            yield from share_in_cell(
                self.link, profile=self.profile, transfer=transfer, bucket=bucket, out=memory.out, result=memory.result
            )
        self.end(transfer, bucket, memory)

    def _cross(self, crossing: Crossing) -> Iterator[int]:
        """Exchange a bucket with other cells; a rank that cannot go on with that stays in step with its own cell."""
        passed = 0
        try:
            for pause in self.transport.move(self.payload(crossing)):
                yield pause
                passed += pause
            return
        except Exception as error:  # noqa: BLE001 - raised where no other cell can be left
            self.transport.fail(error)
        if (remaining := self.pause(crossing.transfer) - passed) > 0:
            yield remaining

    @abstractmethod
    def read(self, transfer: GroupTransfer, bucket: Bucket) -> BucketMemory:
        """Return where a bucket lies, with its values."""

    @abstractmethod
    def payload(self, crossing: Crossing) -> ExactValues:
        """Return what this rank exchanges of a bucket with other cells."""

    def pause(self, transfer: GroupTransfer) -> int:
        """Return how many buckets are started meanwhile by a rank that does not send this one, to stay in step."""
        return 0 if transfer.cell_group is None else transfer.pause

    @abstractmethod
    def end(self, transfer: GroupTransfer, bucket: Bucket, memory: BucketMemory) -> None:
        """Put the result where it belongs."""


class ExchangeWalk(Walk):
    """Takes each bucket of a round from the model to the other cells, and the combined values back."""

    def __init__(self, run: RoundRun, context: RoundContext) -> None:
        super().__init__(CrossCellTransport(run.link, context, run.profile))
        self.run = run
        self._is_atomic = run.memory.is_atomic

    def read(self, transfer: GroupTransfer, bucket: Bucket) -> BucketMemory:
        """Read a bucket from the model, of buffers their mean over the cell."""
        return self.run.memory.read(transfer, bucket)

    def payload(self, crossing: Crossing) -> ExactValues:
        """Send what the first stage makes of a bucket that has a payload of its own, or the values as they are."""
        for stage in self.run.stages:
            payload = stage.payload(crossing)
            if payload is not None:
                return payload
        return ExactValues(crossing)

    def end(self, transfer: GroupTransfer, bucket: Bucket, memory: BucketMemory) -> None:
        """Write the result into the model, or leave it where it waits for the commit."""
        if not self._is_atomic:
            self.run.write(transfer, bucket, memory)


class Way:
    """How the values of a round get to all ranks; this one takes their mean bucket by bucket, in one walk."""

    def check(self, context: RoundContext) -> None:
        """Raise where these cells cannot be combined; pure, the same on all ranks. A mean can be of any."""

    def weigh(self, context: RoundContext) -> RoundContext:
        """Return the context with what each contributing cell counts for: its weight; pure, the same on all ranks."""
        return replace(context, counts=context.weights)

    def reserve(self, transfers: Sequence[GroupTransfer]) -> None:
        """Make the buffers that only this way needs; local."""

    def exchange(self, run: RoundRun, context: RoundContext) -> RoundContext:
        """Walk over the buckets; return what the cells counted for. Collective over the world."""
        context = self.weigh(context)
        for stage in run.stages:
            context = stage.weighed(run, context)
        for stage in run.stages:
            stage.before_exchange(run, context)
        run.walk(ExchangeWalk(run, context))
        return context


def interleave(buckets: Iterable[Iterator[int]]) -> None:
    """Interleave the steps of several buckets, so that link, processor and cell work at the same time.

    A bucket is an iterator that yields how many buckets, one or more, to start before it resumes. Local and
    deterministic: the order of steps depends on these numbers alone.
    """
    coming = iter(buckets)
    # By the tick at which they resume: the tick at which they were started, and the bucket.
    due: dict[int, list[tuple[int, Iterator[int]]]] = {}
    for tick in itertools.count():
        started = next(coming, None)
        if started is not None:
            due.setdefault(tick, []).append((tick, started))
        elif not due:
            return
        for number, bucket in sorted(due.pop(tick, ()), key=lambda one: one[0]):
            pause = next(bucket, None)
            if pause is not None:
                due.setdefault(tick + pause, []).append((number, bucket))
