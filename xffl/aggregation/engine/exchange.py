"""The exchange of a round: send buckets between cells, combine them, and broadcast the result inside each cell.

A bucket's way is a generator, :meth:`Walk.steps`; :class:`BucketPipeline` keeps several under way::

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

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from xffl.aggregation.algorithms.combiners import CellStats, Combiner, WeightedCombiner
from xffl.aggregation.engine.buffers import (
    BucketMemory,
    FiniteCheck,
    FiniteReport,
    Layout,
    ModelCopy,
    Pool,
    RoundBuffers,
    StagingBuffers,
    aligned,
)
from xffl.aggregation.engine.cell import cell_rows_nbytes, mean_in_cell
from xffl.aggregation.engine.groups import RoundGroups
from xffl.aggregation.engine.planning.transfers import Bucket, GroupTransfer, RoundContext
from xffl.aggregation.engine.transport import CrossCellTransport, Crossing, ExactValues, Link
from xffl.aggregation.engine.votes import RoundStatus
from xffl.aggregation.report import RoundProfile
from xffl.distributed.collectives import broadcast
from xffl.errors import RoundError

__all__ = [
    "HOME_LAG",
    "BucketPipeline",
    "Exchange",
    "ExchangeWalk",
    "Inspection",
    "Memory",
    "RoundMemory",
    "RoundRun",
    "RoundStage",
    "Walk",
    "Way",
    "share_in_cell",
    "weigh_cells",
]


HOME_LAG = 2
"""Number of buckets to start before a broadcast inside the cell is waited for; they are combined meanwhile."""


def share_in_cell(
    link: Link, profile: RoundProfile, transfer: GroupTransfer, bucket: Bucket, out: torch.Tensor, result: torch.Tensor
) -> Iterator[int]:
    """Broadcast a sender's ``out`` inside the cell, into ``result`` of all ranks, which may be the same memory."""
    home, is_sender = transfer.cell_group, transfer.is_sent_here(bucket)
    assert home is not None
    if is_sender and result is not out:
        with profile.capture_failure("home"):
            link.copies.bring(out, result)
    with profile.phase("home"):
        source = link.round_groups.first + transfer.senders_of(bucket)[transfer.cell]
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
        hand_over: Way,
    ) -> None:
        self.layout = layout
        self.transfers = tuple(transfers)
        self.link = link
        self.device = link.device
        self.atomic = atomic
        self.way = way
        self.hand_over = hand_over
        self.round_groups = link.round_groups
        self.memory = memory
        self.stages: tuple[RoundStage, ...] = ()
        """What features do to each round, in order; see :func:`xffl.aggregation.engine.stages.order.in_order`."""

    def find(self, kind: type[Stage]) -> Stage | None:
        """Return the stage of a kind, if rounds have it."""
        return next((stage for stage in self.stages if isinstance(stage, kind)), None)

    def check(self, context: RoundContext) -> None:
        """Raise where these cells cannot be combined as was asked; pure, the same on all ranks."""
        self.way.combiner.check(len(context.cells))
        for stage in self.stages:
            stage.check(context)
        self.way.check(context)

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
        for stage in self.stages:
            stage.end()
        self.stages = tuple(stage for stage in self.stages if not stage.is_over)

    @torch.no_grad()
    def restart(self) -> None:
        """Let codecs and a server optimizer go on from the model as it stands; local, with the same in all cells."""
        self.layout.look_up()
        for stage in self.stages:
            stage.restart()


class RoundStage:
    """What a feature does to a round; a plain round has none.

    The methods follow in the order of a round, and do nothing here. They are local where they do not say otherwise.
    """

    key: str | None = None
    """The name, in an aggregator's state dict, of what the stage remembers from round to round."""

    weighs_result = False
    """Whether :meth:`result` tells something that all ranks have to know before they write."""

    inspects = False
    """Whether :meth:`inspect` looks at values, which have to be with the host then."""

    def open(self, fragment: int, *, is_weighed: bool) -> None:
        """Raise, before the model is read, where no round can be made: the first vote tells all ranks.

        ``is_weighed`` tells whether the caller gave a weight.
        """

    def read(self, *, has_steps: bool) -> None:
        """Look at the model before its values are read; ``has_steps`` tells whether this cell has trained."""

    def begin(self, fragment: int, copy: ModelCopy) -> ModelCopy:
        """Forget a round that was not taken; return what this one has to copy, if that is more than ``copy``."""
        return copy

    def inspect(self, transfer: GroupTransfer, bucket: Bucket, values: torch.Tensor) -> None:
        """Look at what this rank is going to send of a bucket that training changes."""

    def end_inspection(self) -> None:
        """Conclude what :meth:`inspect` has seen."""

    def status(self, fragment: int) -> Mapping[str, Any]:
        """Return fields of this rank's status in the first vote."""
        return {}

    def compare(self, statuses: Sequence[RoundStatus]) -> None:
        """Compare what ranks have told in the first vote; raise on all alike. May communicate over all ranks."""

    def count(self, context: RoundContext, statuses: Sequence[RoundStatus]) -> RoundContext:
        """Add to what a round counts with what all ranks have told; pure."""
        return context

    def check(self, context: RoundContext) -> None:
        """Raise where these cells cannot be combined so; pure, the same on all ranks."""

    def weighed(self, run: RoundRun, context: RoundContext) -> RoundContext:
        """Change what the combiner has weighed the cells with; may communicate over all ranks."""
        return context

    def before_exchange(self, run: RoundRun, context: RoundContext) -> None:
        """Change what is sent, once it is known who contributes; may communicate within the cell."""

    def payload(self, crossing: Crossing) -> ExactValues | None:
        """Return what crosses in place of the values as they are."""
        return None

    def written(self, transfer: GroupTransfer, bucket: Bucket, new: torch.Tensor) -> None:
        """Note what a bucket has become, where it is written during the exchange (``atomic=False``)."""

    def write(self, run: RoundRun, context: RoundContext) -> Iterator[tuple[GroupTransfer, Bucket, torch.Tensor]]:
        """Yield what is written in place of the collected values, behind the second vote."""
        return iter(())

    def result(self, run: RoundRun) -> Mapping[str, Any]:
        """Return fields of this rank's status that tell of the combined values, for the second vote; local."""
        return {}

    def conclude(self, context: RoundContext, statuses: Sequence[RoundStatus]) -> RoundContext:
        """Return the context with what follows from everybody's :meth:`result`; pure, the same on all ranks."""
        return context

    def commit(self, run: RoundRun) -> None:
        """Conclude a round that was taken and written."""

    def report(self) -> Mapping[str, Any]:
        """Return fields of the round's report."""
        return {}

    def end(self) -> None:
        """Conclude a round, also one that moved nothing."""

    @property
    def is_over(self) -> bool:
        """Whether rounds no longer need this stage: it is taken out of their list."""
        return False

    def restart(self) -> None:
        """Go on from the model as it stands, the same in all cells."""

    def forget(self) -> None:
        """Forget what may differ between ranks since a round tore the model."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, of a stage that has a ``key``."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""


class Inspection(NamedTuple):
    """What looks at this rank's values before the first vote."""

    finite_check: FiniteCheck
    stages: Sequence[RoundStage]


class Memory:
    """The memory that rounds of a rank use again: made in the first round and kept, since fresh memory is slow.

    This form is for values that are sent from where the model lies. Beside a GPU whose values cross in the host's
    memory there is another one, see :mod:`xffl.aggregation.engine.gpu_memory`.
    """

    def __init__(self, layout: Layout, transfers: Sequence[GroupTransfer], link: Link, *, atomic: bool) -> None:
        self.layout = layout
        self.link = link
        self.cell_rows = {link.device: Pool(0, link.device)}
        """Buffers for the values of all ranks of a cell whose mean is taken, by the device where it is."""
        if link.arena is not None:
            link.arena.restart(sum(aligned(one.group.numel * one.dtype.itemsize) for one in transfers))
        self.staging = StagingBuffers(layout, link.device, atomic=atomic, moving=link.copies, arena=link.arena)

    @property
    def results(self) -> dict[int, torch.Tensor]:
        """Where new values wait, by the number of the transfer."""
        return self.staging.stages

    def of_round(self, transfers: Sequence[GroupTransfer], copy: ModelCopy, profile: RoundProfile) -> RoundMemory:
        """Make what a round needs, so that it does not run out of memory on its way."""
        return RoundMemory(self, RoundBuffers(self.staging, transfers, self.pauses(transfers), copy), profile)

    def pauses(self, transfers: Sequence[GroupTransfer]) -> dict[int, int]:
        """Return, by the number of the transfer, how many buckets are started while one of them is under way."""
        return {transfer.number: self.link.pause(transfer) + HOME_LAG for transfer in transfers}

    def home_device_of(self, transfer: GroupTransfer) -> torch.device:
        """Return where the ranks of this cell get a group's result."""
        return self.link.device

    def reserve_cell_rows(self, transfers: Sequence[GroupTransfer]) -> None:
        """Make room for the buckets whose mean over the cell is taken; local."""
        for device, pool in self.cell_rows.items():
            nbytes = [cell_rows_nbytes(transfer) for transfer in transfers if self.home_device_of(transfer) == device]
            if any(nbytes):
                pool.reserve(1, max(nbytes))


class RoundMemory:
    """The memory of one round."""

    def __init__(self, memory: Memory, buffers: RoundBuffers, profile: RoundProfile) -> None:
        self.memory = memory
        self.buffers = buffers
        self.profile = profile

    def buffers_of(self, transfer: GroupTransfer) -> RoundBuffers:
        """Return the buffers between the model and the result of a group."""
        return self.buffers

    def inspect(self, transfer: GroupTransfer, bucket: Bucket, inspection: Inspection) -> None:
        """Pack a bucket where it has to be copied; check what this rank sends for NaN and infinity."""
        is_sender = transfer.is_sent_here(bucket)
        if not (self.buffers.copy is ModelCopy.KEPT or transfer.group.is_mean_in_cell or is_sender):
            return
        values, lent = self.buffers.pack(transfer, bucket)
        if transfer.group.rule == "average":
            inspection.finite_check.add(bucket, values)
        if is_sender and transfer.group.is_stepped:
            for stage in inspection.stages:
                stage.inspect(transfer, bucket, values)
        self.buffers.keep(bucket, lent)

    def acquire(self, transfer: GroupTransfer, bucket: Bucket) -> BucketMemory:
        """Return where a bucket's values are read and its result goes."""
        values, out, lent = self.buffers.acquire(transfer, bucket)
        return BucketMemory(values, out, lent, out)

    def read(self, transfer: GroupTransfer, bucket: Bucket) -> BucketMemory:
        """Return where a bucket lies, with its values, of buffers their mean over the cell."""
        memory = self.acquire(transfer, bucket)
        home = transfer.cell_group if transfer.group.is_mean_in_cell else None
        if (home is not None or transfer.is_sent_here(bucket)) and self.buffers.is_to_fill(bucket, memory.lent):
            with self.profile.capture_failure("pack"):
                self.buffers.fill(bucket, memory.values)
        if home is not None:
            with self.profile.capture_failure("pack"):
                self.buffers.settle(bucket)
            mean_in_cell(self.memory.cell_rows, self.profile, home, memory.values)
        return memory

    def release(self, memory: BucketMemory) -> None:
        """Give the buffers of a bucket back."""
        self.buffers.release(memory.lent)

    def drain(self) -> None:
        """Wait until what was handed round inside the cell has come."""
        self.memory.link.home_progress.drain()


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
        self._link = exchange.link
        self._layout = exchange.layout
        self.fragment = fragment
        self.profile = profile
        self._transfers = [transfer for transfer in exchange.transfers if transfer.group.fragment == fragment]
        self.way = exchange.way
        self._transports: list[CrossCellTransport] = []
        self._lost: RuntimeError | None = None  # what has ended a message before there was a transport
        self._link.home_progress.forget()
        for stage in exchange.stages:
            copy = stage.begin(fragment, copy)
        with profile.phase("pack"):
            self._layout.look_up()
            # Buffers outlive the round, so they must not be inference tensors if that is where the round takes place.
            with torch.inference_mode(False):
                self.memory = self._make_memory(copy)
            self.findings = self._inspect()

    @property
    def reported(self) -> dict[str, Any]:
        """What stages add to the round's report."""
        return {name: value for stage in self._exchange.stages for name, value in stage.report().items()}

    @property
    def stages(self) -> dict[int, torch.Tensor]:
        """Where new values wait that this rank sends, by the number of the transfer."""
        return self._exchange.memory.staging.stages

    @property
    def results(self) -> dict[int, torch.Tensor]:
        """Where new values wait, also those that only come back to GPUs."""
        return self._exchange.memory.results

    @property
    def staging(self) -> StagingBuffers:
        """The buffers between the model and the exchange."""
        return self._exchange.memory.staging

    @property
    def buffers(self) -> RoundBuffers:
        """Where this round reads values and leaves its results."""
        return self.memory.buffers

    @property
    def link(self) -> Link:
        """The link between cells."""
        return self._link

    @property
    def round_groups(self) -> RoundGroups:
        """The process groups of the round."""
        return self._exchange.round_groups

    def before_exchange(self, context: RoundContext) -> None:
        """Let features change what is sent."""
        for stage in self._exchange.stages:
            stage.before_exchange(self, context)

    @property
    def device(self) -> torch.device:
        """The device that values are sent from."""
        return self._exchange.device

    def _make_memory(self, copy: ModelCopy) -> RoundMemory:
        """Make what a round needs, so that it does not run out of memory on its way."""
        memory = self._exchange.memory
        made = memory.of_round(self._transfers, copy, self.profile)
        self.way.reserve(self._transfers)
        self._link.reserve(self._transfers)
        memory.reserve_cell_rows(self._transfers)
        return made

    def _inspect(self) -> FiniteReport:
        """Pack what has to be copied, and check what this rank sends for NaN and infinity."""
        inspecting = [stage for stage in self._exchange.stages if stage.inspects]
        inspection = Inspection(FiniteCheck(self._layout), inspecting)
        for transfer, bucket in self.buckets():
            self.memory.inspect(transfer, bucket, inspection)
        self._link.copies.hold_writes()
        for stage in inspecting:
            stage.end_inspection()
        return inspection.finite_check.report()

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
        results = exchange.memory.results
        stepped: set[int] = set()
        with self.profile.phase("commit"):
            if is_merged or self.memory.buffers.copy is not ModelCopy.NONE:
                self._layout.look_up()  # local steps may have moved tensors since
            for stage in exchange.stages:
                for transfer, bucket, new in stage.write(self, context):
                    stepped.add(transfer.number)
                    self._write_agreed(transfer, bucket, new, is_merged=is_merged, alpha=alpha)
            for transfer, bucket in self.buckets() if exchange.atomic else ():
                if transfer.number not in stepped:
                    new = results[transfer.number][bucket.start : bucket.stop]
                    self._write_agreed(transfer, bucket, new, is_merged=is_merged, alpha=alpha)
            self._link.copies.end_writes()
            for stage in exchange.stages:
                stage.commit(self)

    def _write_agreed(
        self, transfer: GroupTransfer, bucket: Bucket, new: torch.Tensor, *, is_merged: bool, alpha: float | None
    ) -> None:
        """Write a bucket's new values, which all ranks have agreed on, into the model."""
        keeps_some = is_merged and alpha != 0.0 and transfer.group.rule == "average"
        if keeps_some and not transfer.group.is_mean_in_cell:
            self.memory.buffers_of(transfer).merge(transfer, bucket, new, alpha)
        else:
            self._link.copies.write(self._layout, bucket, new)

    @torch.no_grad()
    def result(self) -> dict[str, Any]:
        """Return what this rank tells all others of the combined values, in its status; local."""
        told: dict[str, Any] = {}
        if not self._exchange.weighs_result:
            return told
        with self.profile.capture_failure("combine"):
            for stage in self._exchange.stages:
                told |= stage.result(self)
        return told

    @property
    def is_cut_off(self) -> bool:
        """Whether another cell was lost while values were exchanged."""
        return any(transport.is_cut_off for transport in self._transports)

    def transport(self, context: RoundContext) -> CrossCellTransport:
        """Make what takes buckets to the other cells from now on."""
        transport = CrossCellTransport(self._link, context, self.profile)
        lost = self._lost
        self._lost = None
        if lost is not None:
            transport.lose(lost)
        self._transports.append(transport)
        return transport

    def weighed(self, context: RoundContext) -> RoundContext:
        """Return what cells count for once all ranks have it from one of them, where they have to; collective then."""
        for stage in self._exchange.stages:
            context = stage.weighed(self, context)
        return context

    def payload(self, crossing: Crossing) -> ExactValues:
        """Return what this rank exchanges of a bucket."""
        for stage in self._exchange.stages:
            payload = stage.payload(crossing)
            if payload is not None:
                return payload
        return ExactValues(crossing)

    def buckets(self) -> Iterator[tuple[GroupTransfer, Bucket]]:
        """Yield all buckets of the round, by their groups."""
        return ((transfer, bucket) for transfer in self._transfers for bucket in transfer.buckets)

    def sent(self) -> Iterator[tuple[GroupTransfer, Bucket]]:
        """Yield what this rank sends of what training changes."""
        for transfer, bucket in self.buckets():
            if transfer.group.is_stepped and transfer.is_sent_here(bucket):
                yield transfer, bucket

    def walk(self, walk: Walk) -> None:
        """Start the way of each bucket, in order, and keep several under way."""
        pipeline = BucketPipeline()
        before: tuple[object, ...] = ()
        for transfer in self._transfers:
            # Buckets of two groups may overlap only if the same ranks take part in both and post receives equally far
            # ahead.
            if transfer.pace != before:
                pipeline.drain()
            before = transfer.pace
            for bucket in transfer.buckets:
                pipeline.start(walk.steps(transfer, bucket))
        pipeline.drain()
        self.memory.drain()

    def write(self, transfer: GroupTransfer, bucket: Bucket, memory: BucketMemory) -> None:
        """Write a bucket into the model, unless it waits for the commit."""
        if self._exchange.atomic:
            return
        with self.profile.capture_failure("commit"):
            self._layout.unpack(bucket, memory.result)
            for stage in self._exchange.stages:
                stage.written(transfer, bucket, memory.out)
        self.memory.release(memory)

    def tell_all(self, numbers: torch.Tensor) -> None:
        """Replace numbers by those of the first rank; collective over the world."""
        groups = self._exchange.round_groups
        try:
            broadcast(numbers, groups.first, groups.world)
        except RuntimeError as lost:  # ranks of the cell that have heard it still wait for this one
            if self._transports:
                self._transports[-1].lose(lost)
            else:
                self._lost = lost


class Walk(ABC):
    """A walk over buckets: each is read, crosses, is handed round inside the cell, and is put where it belongs.

    The methods follow in the order in which they are called for a bucket.
    """

    reaches_cell = True
    """Whether a bucket's sender hands the result round inside its cell."""

    def __init__(self, transport: CrossCellTransport) -> None:
        self.transport = transport
        self.link = transport.link
        self.profile = transport.profile

    def steps(self, transfer: GroupTransfer, bucket: Bucket) -> Iterator[int]:
        """Take one bucket on its way; yields the number of buckets to start before it resumes."""
        memory = self.read(transfer, bucket)
        payload = self.payload(transfer, bucket, memory)
        if payload is not None:
            yield from self.transport.move(payload)
        elif pause := self.pause(transfer):
            yield pause
        if self.reaches_cell and transfer.cell_group is not None:
            yield from share_in_cell(
                self.link, profile=self.profile, transfer=transfer, bucket=bucket, out=memory.out, result=memory.result
            )
        self.end(transfer, bucket, memory)

    @abstractmethod
    def read(self, transfer: GroupTransfer, bucket: Bucket) -> BucketMemory:
        """Return where a bucket lies, with its values."""

    def crossing(self, transfer: GroupTransfer, bucket: Bucket, memory: BucketMemory) -> Crossing:
        """Return a bucket that was read, as a payload takes it to the other cells."""
        return Crossing(self.transport, transfer, bucket, values=memory.values, out=memory.out)

    @abstractmethod
    def payload(self, transfer: GroupTransfer, bucket: Bucket, memory: BucketMemory) -> ExactValues | None:
        """Return what this rank exchanges of a bucket with other cells, if it does."""

    def pause(self, transfer: GroupTransfer) -> int:
        """Return how many buckets are started meanwhile by a rank that does not send this one, to stay in step."""
        return 0 if transfer.cell_group is None else self.link.pause(transfer)

    @abstractmethod
    def end(self, transfer: GroupTransfer, bucket: Bucket, memory: BucketMemory) -> None:
        """Put the result where it belongs."""


class ExchangeWalk(Walk):
    """Takes each bucket of a round from the model to the other cells, and the combined values back."""

    def __init__(self, run: RoundRun, transport: CrossCellTransport) -> None:
        super().__init__(transport)
        self.run = run

    def read(self, transfer: GroupTransfer, bucket: Bucket) -> BucketMemory:
        """Read a bucket from the model, of buffers their mean over the cell."""
        return self.run.memory.read(transfer, bucket)

    def payload(self, transfer: GroupTransfer, bucket: Bucket, memory: BucketMemory) -> ExactValues | None:
        """Send what the first stage makes of a bucket that has a payload of its own, or the values as they are."""
        if not transfer.is_sent_here(bucket):
            return None
        return self.run.payload(self.crossing(transfer, bucket, memory))

    def end(self, transfer: GroupTransfer, bucket: Bucket, memory: BucketMemory) -> None:
        """Write the result into the model, or leave it where it waits for the commit."""
        self.run.write(transfer, bucket, memory)


class Way:
    """How the values of a round get to all ranks; this one combines them bucket by bucket, in one walk."""

    def __init__(self, combiner: Combiner) -> None:
        self.combiner = combiner

    def check(self, context: RoundContext) -> None:
        """Raise where these cells cannot be combined; pure, the same on all ranks."""
        weigh_cells(context, self.combiner)

    def reserve(self, transfers: Sequence[GroupTransfer]) -> None:
        """Make the buffers that only this way needs; local."""

    def exchange(self, run: RoundRun, context: RoundContext) -> RoundContext:
        """Walk over the buckets; return what the cells counted for. Collective over the world."""
        context = run.weighed(weigh_cells(context, self.combiner))
        run.before_exchange(context)
        run.walk(ExchangeWalk(run, run.transport(context)))
        return context


class BucketPipeline:
    """Interleaves the steps of several buckets, so that link, processor and cell work at the same time.

    A bucket is an iterator that yields how many buckets to start before it resumes. Local and deterministic: the order
    of steps depends on these numbers alone.
    """

    def __init__(self) -> None:
        self._tick = 0
        # By the tick at which they resume: the tick at which they were started, and the bucket.
        self._due: dict[int, list[tuple[int, Iterator[int]]]] = {}

    def start(self, bucket: Iterator[int]) -> None:
        """Start a bucket, and resume all that are due, in the order in which they were started."""
        self._due.setdefault(self._tick, []).append((self._tick, bucket))
        self._advance(self._tick)
        self._tick += 1

    def drain(self) -> None:
        """Run all buckets to their end."""
        while self._due:
            self._advance(min(self._due))

    def _advance(self, tick: int) -> None:
        for number, bucket in sorted(self._due.pop(tick, ()), key=itemgetter(0)):
            if (pause := next(bucket, None)) is not None:
                self._due.setdefault(tick + pause, []).append((number, bucket))


def weigh_cells(
    context: RoundContext, combiner: Combiner, distances: Sequence[Sequence[float]] | None = None
) -> RoundContext:
    """Return the context with what the combiner lets each contributing cell count for; pure, the same on all ranks."""
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
    if len(result.weights) != len(cells):
        raise RoundError(
            f"{type(combiner).__name__}.weigh returned {len(result.weights)} weights for {len(cells)} cells; return "
            "one for each"
        )
    counts = dict(zip(cells, result.weights, strict=True))
    return replace(
        context, counts=tuple(counts.get(cell, 0.0) for cell in range(len(context.weights))), scale=result.scale
    )
