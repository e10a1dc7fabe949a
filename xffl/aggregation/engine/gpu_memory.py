"""The memory of rounds beside a GPU whose values cross in the host's memory (gloo).

Where values cross in the host's memory and NCCL works inside the cell, both lie on the GPU. A sender's bucket then goes
through memory as follows, each arrow behind the one before on streams of their own, bucket by bucket::

    model --copy stream--> pinned host ..gloo.. pinned host --round's stream--> GPU --NCCL--> replicas' GPUs
                          event: host waits     event: before the host's memory is used again
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Sequence

import torch

from xffl.aggregation.engine.buffers import BucketMemory, Copies, FiniteCheck, Layout, ModelCopy
from xffl.aggregation.engine.cell import mean_in_cell
from xffl.aggregation.engine.exchange import Inspection, Memory, RoundMemory, staging_bytes
from xffl.aggregation.engine.planning.transfers import Bucket, BucketRun, GroupTransfer
from xffl.aggregation.engine.transport import Link
from xffl.aggregation.report import RoundProfile

__all__ = ["GpuMemory", "HostCopies"]


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
        elsewhere = [transfer for transfer in transfers if not transfer.is_shared_on_gpu]
        super().__init__(layout, elsewhere, link.device, copies=link.copies, atomic=atomic, arena=link.arena)
        if link.arena is not None:  # also for what this rank sends of groups whose result comes on the GPU
            link.arena.restart(staging_bytes(self._crossing(transfers)))
        self.link = link
        self.on_gpu: Memory | None = None
        if link.home_device is not None:
            shared = [transfer for transfer in transfers if transfer.is_shared_on_gpu]
            self.on_gpu = Memory(layout, shared, link.home_device, copies=link.copies, atomic=atomic)
            # On the GPU where the cell gets them there.
            self.results = ChainMap(self.on_gpu.staging, self.staging)

    def _crossing(self, transfers: Sequence[GroupTransfer]) -> list[GroupTransfer]:
        """Return the groups that need the host's memory on this rank."""
        return [transfer for transfer in transfers if transfer.is_sender or not transfer.is_shared_on_gpu]

    def of_round(self, transfers: Sequence[GroupTransfer], copy: ModelCopy, profile: RoundProfile) -> RoundMemory:
        """Make what a round needs on both sides."""
        self.copies.finish()  # those of a round that did not take place, or is still being written
        self.link.home_progress.forget()
        self.prepare(self._crossing(transfers), copy)
        on_gpu: RoundMemory | None = None
        if self.on_gpu is not None:
            # What is sent is copied in the host's memory, what steps are measured from where the result comes.
            kept = copy if copy is ModelCopy.KEPT else ModelCopy.NONE
            shared = [transfer for transfer in transfers if transfer.is_shared_on_gpu]
            on_gpu = self.on_gpu.of_round(shared, kept, profile)
        return _GpuRoundMemory(self, on_gpu, copy, profile)


class _GpuRoundMemory(RoundMemory):
    """The memory of one round on both sides: this object's own is with the host."""

    def __init__(self, buffers: GpuMemory, on_gpu: RoundMemory | None, copy: ModelCopy, profile: RoundProfile) -> None:
        super().__init__(buffers, copy, profile)
        self._on_gpu: RoundMemory = self if on_gpu is None else on_gpu
        self._link = buffers.link
        assert isinstance(buffers.copies, HostCopies)
        self._copies = buffers.copies

    def inspect(self, buckets: BucketRun, inspection: Inspection) -> None:
        super().inspect(buckets, inspection)
        self._copies.hold_writes()

    def inspect_bucket(self, transfer: GroupTransfer, bucket: Bucket, inspection: Inspection) -> None:
        """Check what lies on a GPU there; copy it to the host while others cross, unless it may change before."""
        finite_check = inspection.finite_check
        is_average = transfer.group.rule == "average"
        is_sender = transfer.sends[bucket.number]
        is_read = self.copy is ModelCopy.KEPT or transfer.group.is_mean_in_cell or is_sender
        if transfer.is_shared_on_gpu:
            is_read = is_sender and not transfer.group.is_mean_in_cell
            self._pack_on_gpu(transfer, bucket, finite_check)
        if not is_read:
            return
        is_inspected = is_sender and transfer.group.is_stepped and bool(inspection.stages)
        checked = self._find_on_gpu(bucket)
        if checked is not None and self.copy is ModelCopy.NONE and not is_inspected:
            self.postpone(bucket)
            if is_average:
                finite_check.add(bucket, checked)
            return
        place = super().acquire(transfer, bucket)
        self.pack(bucket, place.values)
        if is_average:
            finite_check.add(bucket, place.values if checked is None else checked)
        if is_inspected:
            self.settle(bucket)
            for stage in inspection.stages:
                stage.inspect(transfer, bucket, place.values)
        if place.lent is not None:
            self.keep(bucket, place.lent)

    def _find_on_gpu(self, bucket: Bucket) -> torch.Tensor | None:
        """Return a bucket's values where they lie, if that is a GPU and they are sent from the host's memory."""
        layout = self.lasting.layout
        device = layout.device_of(bucket)
        is_apart = device is not None and device.type == "cuda" and device != self._link.device
        return layout.values_of(bucket) if is_apart else None

    def _pack_on_gpu(self, transfer: GroupTransfer, bucket: Bucket, finite_check: FiniteCheck) -> None:
        """Copy what the GPU needs beside the model: what steps are measured from, and buffers before their mean."""
        if self.copy is ModelCopy.KEPT or transfer.group.is_mean_in_cell:
            place = self._on_gpu.acquire(transfer, bucket)
            self._on_gpu.pack(bucket, place.values)
            if place.lent is not None:
                self._on_gpu.keep(bucket, place.lent)
            if transfer.group.is_mean_in_cell and transfer.group.rule == "average":
                finite_check.add(bucket, place.values)

    def acquire(self, transfer: GroupTransfer, bucket: Bucket) -> BucketMemory:
        if not transfer.is_shared_on_gpu:
            return super().acquire(transfer, bucket)
        there = self._on_gpu.acquire(transfer, bucket)
        if not transfer.sends[bucket.number]:
            return there._replace(lent=None, result_lent=there.lent)
        return super().acquire(transfer, bucket)._replace(result=there.result, result_lent=there.lent)

    def read(self, transfer: GroupTransfer, bucket: Bucket) -> BucketMemory:
        home = transfer.cell_group if transfer.group.is_mean_in_cell else None
        if home is None or not transfer.is_shared_on_gpu:
            return super().read(transfer, bucket)
        place = self.acquire(transfer, bucket)
        with self.profile.capture_failure("pack"):
            if self._on_gpu.is_to_fill(bucket, place.result_lent):
                self._on_gpu.fill(bucket, place.result)
        mean_in_cell(self._on_gpu.lasting.cell_rows, self.profile, home, place.result)
        if transfer.sends[bucket.number]:
            with self.profile.capture_failure("pack"):
                self._copies.start_from(place.result, bucket, place.values)
        return place

    def release(self, place: BucketMemory) -> None:
        super().release(place)
        self._on_gpu.lasting.packs.release(place.result_lent)

    def merge(self, transfer: GroupTransfer, bucket: Bucket, mean: torch.Tensor, alpha: float | None) -> None:
        if transfer.is_shared_on_gpu:
            self._on_gpu.merge(transfer, bucket, mean, alpha)
        else:
            super().merge(transfer, bucket, mean, alpha)

    def drain(self) -> None:
        """Wait for the GPU; time that where results come on the host's time, since its own phases are on its stream."""
        if self._link.home_device is None:
            self._link.home_progress.drain()
            return
        with self.profile.phase("home"):
            self._link.home_progress.drain()
