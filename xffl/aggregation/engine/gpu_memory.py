"""The memory of rounds beside a GPU whose values cross in the host's memory (gloo).

Where values cross in the host's memory and NCCL works inside the cell, both lie on the GPU. A sender's bucket then goes
through memory as follows, each arrow behind the one before on streams of their own, bucket by bucket::

    model --copy stream--> pinned host ..gloo.. pinned host --round's stream--> GPU --NCCL--> replicas' GPUs
                          event: host waits     event: before the host's memory is used again
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from xffl.aggregation.engine.buffers import (
    BucketMemory,
    Copies,
    FiniteCheck,
    Layout,
    ModelCopy,
    Pool,
    RoundBuffers,
    StagingBuffers,
)
from xffl.aggregation.engine.cell import mean_in_cell
from xffl.aggregation.engine.exchange import Inspection, Memory, RoundMemory
from xffl.aggregation.engine.planning.transfers import Bucket, GroupTransfer
from xffl.aggregation.engine.transport import Link
from xffl.aggregation.report import RoundProfile

__all__ = ["GpuMemory", "HostCopies", "make_copies", "make_memory"]


def make_copies(home_device: torch.device | None) -> Copies:
    """Return how values get between model and memory; ``home_device`` is where results are handed round, if apart."""
    return HostCopies() if home_device is not None or torch.cuda.is_available() else Copies()


def make_memory(layout: Layout, transfers: Sequence[GroupTransfer], link: Link, *, atomic: bool) -> Memory:
    """Return the memory of rounds, in the form that their copies need."""
    kind = GpuMemory if isinstance(link.copies, HostCopies) else Memory
    return kind(layout, transfers, link, atomic=atomic)


class HostCopies(Copies):
    """Copies of buckets between a GPU and the host's memory, which the host waits for as late as it can.

    Out of the model they go on a stream beside the caller's, so that one bucket crosses PCIe while those before cross
    the slow link. Where the model lies in the memory that buckets are sent from, nothing of this takes place.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._coming: dict[int, torch.cuda.Event] = {}  # by the id of a bucket
        self._written: list[torch.cuda.Event] = []
        self._devices_written: set[torch.device] = set()

    def start(self, layout: Layout, bucket: Bucket, into: torch.Tensor) -> None:
        """Start to copy a bucket out of the model, beside the caller's stream."""
        device = layout.device_of(bucket)
        if device is None or device.type != "cuda" or into.device == device:
            layout.pack(bucket, into)
        else:
            self._start(bucket, device, lambda: layout.pack(bucket, into, is_behind=True))

    def start_from(self, values: torch.Tensor, bucket: Bucket, into: torch.Tensor) -> None:
        """Start to copy a bucket out of other memory of a GPU, which stays as it is until :meth:`settle`."""
        if values.device.type == "cuda":
            self._start(bucket, values.device, lambda: into.copy_(values, non_blocking=True))
        else:
            into.copy_(values)

    def _start(self, bucket: Bucket, device: torch.device, copy: Callable[[], object]) -> None:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            copy()
        self._coming[id(bucket)] = _mark(stream)

    def bring(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Copy values to a GPU on its current stream; the host's memory is used again behind that stream."""
        into.copy_(values, non_blocking=True)
        if into.device.type == "cuda":
            self.note_written(into.device)

    def settle(self, bucket: Bucket) -> None:
        """Let the host wait for a bucket's copy."""
        if (event := self._coming.pop(id(bucket), None)) is not None:
            event.synchronize()

    def hold_writes(self) -> None:
        """Make the caller's streams wait for pending device-to-host copies."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def write(self, layout: Layout, bucket: Bucket, values: torch.Tensor) -> None:
        """Write a bucket's new values; a copy to a GPU takes place behind the host."""
        device = layout.device_of(bucket)
        is_behind = device is not None and device.type == "cuda" and values.device.type == "cpu"
        layout.unpack(bucket, values, is_behind=is_behind)
        if device is not None and is_behind:
            self._devices_written.add(device)

    def end_writes(self) -> None:
        """Note the end of all that was written."""
        for device in self._devices_written:
            self.note_written(device)
        self._devices_written.clear()

    def note_written(self, device: torch.device) -> None:
        """Note that the current stream copies the host's values, which must stay as they are until it has."""
        self._written.append(_mark(torch.cuda.current_stream(device)))

    def finish(self) -> None:
        """Let the host wait for all copies, before their memory is used again."""
        for event in (*self._coming.values(), *self._written):
            event.synchronize()
        self._coming.clear()
        self._written.clear()


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


class GpuMemory(Memory):
    """Buffers in the host's memory, and on the GPU for groups whose result the cell gets there."""

    def __init__(self, layout: Layout, transfers: Sequence[GroupTransfer], link: Link, *, atomic: bool) -> None:
        super().__init__(layout, transfers, link, atomic=atomic)
        self.gpu_staging: StagingBuffers | None = None
        if link.home_device is not None:
            self.gpu_staging = StagingBuffers(layout, link.home_device, atomic=atomic, moving=link.copies)
            self.cell_rows.setdefault(link.home_device, Pool(0, link.home_device))

    @property
    def results(self) -> dict[int, torch.Tensor]:
        """Where new values wait, on the GPU where the cell gets them there."""
        return self.staging.stages if self.gpu_staging is None else self.staging.stages | self.gpu_staging.stages

    def home_device_of(self, transfer: GroupTransfer) -> torch.device:
        """Return where the ranks of this cell get a group's result, on the GPU for some."""
        home = self.link.home_device
        return home if home is not None and transfer.is_shared_on_gpu else self.link.device

    def of_round(self, transfers: Sequence[GroupTransfer], copy: ModelCopy, profile: RoundProfile) -> RoundMemory:
        """Make what a round needs on both sides."""
        pauses = self.pauses(transfers)
        crossing = [transfer for transfer in transfers if transfer.is_sender or not transfer.is_shared_on_gpu]
        buffers = RoundBuffers(self.staging, crossing, pauses, copy)
        gpu_buffers = buffers
        if self.gpu_staging is not None:
            # What is sent is copied in the host's memory, what steps are measured from where the result comes.
            kept = copy if copy is ModelCopy.KEPT else ModelCopy.NONE
            shared = [transfer for transfer in transfers if transfer.is_shared_on_gpu]
            gpu_buffers = RoundBuffers(self.gpu_staging, shared, pauses, kept)
        return _GpuRoundMemory(self, buffers, gpu_buffers, profile)


class _GpuRoundMemory(RoundMemory):
    """The memory of one round on both sides."""

    def __init__(self, memory: Memory, buffers: RoundBuffers, gpu_buffers: RoundBuffers, profile: RoundProfile) -> None:
        super().__init__(memory, buffers, profile)
        self._gpu_buffers = gpu_buffers
        assert isinstance(memory.link.copies, HostCopies)
        self._copies = memory.link.copies

    def buffers_of(self, transfer: GroupTransfer) -> RoundBuffers:
        return self._gpu_buffers if transfer.is_shared_on_gpu else self.buffers

    def inspect(self, transfer: GroupTransfer, bucket: Bucket, inspection: Inspection) -> None:
        """Check what lies on a GPU there; copy it to the host while others cross, unless it may change before."""
        buffers = self.buffers
        finite_check = inspection.finite_check
        is_average = transfer.group.rule == "average"
        is_sender = transfer.is_sent_here(bucket)
        is_read = buffers.copy is ModelCopy.KEPT or transfer.group.is_mean_in_cell or is_sender
        if transfer.is_shared_on_gpu:
            is_read = is_sender and not transfer.group.is_mean_in_cell
            self._pack_on_gpu(transfer, bucket, finite_check)
        if not is_read:
            return
        is_inspected = is_sender and transfer.group.is_stepped and bool(inspection.stages)
        checked = self._find_on_gpu(bucket)
        if checked is not None and buffers.copy is ModelCopy.NONE and not is_inspected:
            buffers.postpone(bucket)
            if is_average:
                finite_check.add(bucket, checked)
            return
        values, lent = buffers.pack(transfer, bucket)
        if is_average:
            finite_check.add(bucket, values if checked is None else checked)
        if is_inspected:
            buffers.settle(bucket)
            for stage in inspection.stages:
                stage.inspect(transfer, bucket, values)
        buffers.keep(bucket, lent)

    def _find_on_gpu(self, bucket: Bucket) -> torch.Tensor | None:
        """Return a bucket's values where they lie, if that is a GPU and they are sent from the host's memory."""
        layout, sent_from = self.memory.layout, self.memory.link.device
        device = layout.device_of(bucket)
        is_apart = device is not None and device.type == "cuda" and device != sent_from
        return layout.values_of(bucket) if is_apart else None

    def _pack_on_gpu(self, transfer: GroupTransfer, bucket: Bucket, finite_check: FiniteCheck) -> None:
        """Copy what the GPU needs beside the model: what steps are measured from, and buffers before their mean."""
        if self.buffers.copy is ModelCopy.KEPT or transfer.group.is_mean_in_cell:
            values, lent = self._gpu_buffers.pack(transfer, bucket)
            self._gpu_buffers.keep(bucket, lent)
            if transfer.group.is_mean_in_cell and transfer.group.rule == "average":
                finite_check.add(bucket, values)

    def acquire(self, transfer: GroupTransfer, bucket: Bucket) -> BucketMemory:
        if not transfer.is_shared_on_gpu:
            return super().acquire(transfer, bucket)
        own, result, result_lent = self._gpu_buffers.acquire(transfer, bucket)
        if not transfer.is_sent_here(bucket):
            return BucketMemory(own, out=result, lent=None, result=result, result_lent=result_lent)
        return BucketMemory(*self.buffers.acquire(transfer, bucket), result, result_lent)

    def read(self, transfer: GroupTransfer, bucket: Bucket) -> BucketMemory:
        home = transfer.cell_group if transfer.group.is_mean_in_cell else None
        if home is None or not transfer.is_shared_on_gpu:
            return super().read(transfer, bucket)
        memory = self.acquire(transfer, bucket)
        with self.profile.capture_failure("pack"):
            if self._gpu_buffers.is_to_fill(bucket, memory.result_lent):
                self._gpu_buffers.fill(bucket, memory.result)
        mean_in_cell(self.memory.cell_rows, self.profile, home, memory.result)
        if transfer.is_sent_here(bucket):
            with self.profile.capture_failure("pack"):
                self._copies.start_from(memory.result, bucket, memory.values)
        return memory

    def release(self, memory: BucketMemory) -> None:
        super().release(memory)
        self._gpu_buffers.release(memory.result_lent)

    def drain(self) -> None:
        """Time the wait where results come on the host's time; a GPU's own phases are timed on its stream."""
        if self.memory.link.home_device is None:
            super().drain()
            return
        with self.profile.phase("home"):
            super().drain()
