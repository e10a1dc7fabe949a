"""Views of a rank's elements in the model, bucket by bucket, and the buffers that a round copies them to."""

from __future__ import annotations

import collections
import itertools
import math
import operator
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from xffl.aggregation.engine.planning.plan import Item
from xffl.aggregation.engine.planning.tensors import Axis, ModelTensor, canonical_axis
from xffl.aggregation.engine.planning.transfers import Bucket, Piece
from xffl.compat.pytorch import lasting_memory, memory_of
from xffl.distributed.values.sharding import local_tensor
from xffl.errors import ConfigError
from xffl.topology import Coordinates

__all__ = [
    "BucketMemory",
    "Copies",
    "FiniteCheck",
    "Layout",
    "ModelCopy",
    "Pool",
    "TensorWatch",
    "aligned",
    "copy_memory",
    "host_or_gpu",
    "sum_of_squares",
]


class Places(NamedTuple):
    """Where a bucket's elements lie."""

    views: list[torch.Tensor]  # the elements, as views that follow each other
    device: torch.device | None  # the device of all views, if they are 1-D
    run: torch.Tensor | None  # the only view, if its elements are one run of memory
    # the bytes of each view, for a copy without torch, where they are several runs of memory on the CPU
    memory: list[memoryview]


class Layout:
    """This rank's elements of the moving tensors, in canonical order.

    Views are kept from round to round while the model keeps its tensors where they are.
    """

    def __init__(
        self,
        entries: Sequence[ModelTensor | None],
        items: Sequence[Item],
        axes: Sequence[Sequence[Axis]],
        at: Coordinates,
        *,
        needs_memory_of_its_own: bool = False,
    ) -> None:
        self._needs_memory_of_its_own = needs_memory_of_its_own
        self._entries = tuple(entries)
        self._fragments = tuple(item.fragment for item in items)
        # A module's parameters and buffers, once each: taken together they cost less than one by one.
        self._dicts = list({id(entry.held): entry.held for entry in entries if entry is not None}.values())
        self._tensors: list[torch.Tensor | None] = []
        self._axis = tuple(
            0 if entry is None else canonical_axis(entry, [cell[i] for cell in axes]) for i, entry in enumerate(entries)
        )
        # Where this rank's part of each tensor begins, in canonical order.
        cuts = [item.cuts[at.cell] for item in items]
        held = [cut.held(at.shard) for cut in cuts]
        self._origin = tuple(start for start, _ in held)
        self._held = tuple(stop - start for start, stop in held)
        self._moving: list[torch.Tensor] = []
        self._is_sharded = False
        self._memory_seen: list[list[object]] = []
        # Flat, where a tensor's elements follow each other in memory.
        self._views: list[torch.Tensor] = []
        # By identity: the exchange keeps its buckets, and hashing one would cost as much as walking it.
        self._of_bucket: dict[int, Places] = {}
        self._cuts: dict[int, tuple[torch.Tensor, list[memoryview]]] = {}

    def name(self, item: int) -> str:
        """Return a tensor's name."""
        entry = self._entries[item]
        assert entry is not None, "groups hold only what this rank holds"
        return entry.name

    def entry(self, item: int) -> tuple[ModelTensor, Axis] | None:
        """Return a tensor of this rank, and the axis that its canonical order begins with; ``None`` without a part."""
        entry = self._entries[item]
        return None if entry is None else (entry, self._axis[item])

    def held(self, item: int) -> tuple[int, int]:
        """Return where this rank's part of a tensor begins in canonical order, and its elements."""
        return self._origin[item], self._held[item]

    def moving(self, fragment: int) -> list[torch.Tensor]:
        """Return the model's tensors of a fragment, also those of which this rank has no elements; local."""
        entries = zip(self._entries, self._fragments, strict=True)
        kept = [entry.held[entry.leaf] for entry, number in entries if entry is not None and number == fragment]
        return [tensor for tensor in kept if tensor is not None]

    def look_up(self) -> None:
        """Look all tensors up anew, where any has changed; local."""
        tensors = [tensor for held in self._dicts for tensor in held.values()]
        is_same = len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))
        if not is_same or self._look_at_memory() != self._memory_seen:
            self._look_up_again(tensors)

    def _look_at_memory(self) -> list[list[object]]:
        """Return what changes when the model keeps its tensors elsewhere or otherwise; cheap."""
        local = [local_tensor(tensor) for tensor in self._moving] if self._is_sharded else self._moving
        # An address cannot be taken by another tensor, since the views keep the old one alive. Numbers only, where
        # there can be thousands: tuples would set off Python's garbage collector.
        is_whole: list[object] = [tensor.is_contiguous() for tensor in local]
        return [
            is_whole,
            [tensor.stride() for tensor, whole in zip(local, is_whole, strict=True) if not whole],
            [tensor.data_ptr() for tensor in local],
            [tensor.numel() for tensor in local],
            [tensor.dtype for tensor in local],
        ]

    def _look_up_again(self, tensors: list[torch.Tensor | None]) -> None:
        """Find the views of ``tensors``, all that the model has."""
        views = [
            torch.empty(0, dtype=torch.float32) if entry is None else entry.elements(axis)
            for entry, axis in zip(self._entries, self._axis, strict=True)
        ]
        for entry, view, held in zip(self._entries, views, self._held, strict=True):
            if entry is not None and view.numel() and not view.data_ptr():
                raise ConfigError(f"tensor {entry.name!r} has no memory now; give it back before the round")
            if entry is not None and view.numel() != held:
                raise ConfigError(
                    f"this rank holds {view.numel()} elements of tensor {entry.name!r} and held {held} when the "
                    "Aggregator was made; make a new Aggregator after sharding the model"
                )
        if self._needs_memory_of_its_own:
            from xffl.aggregation.engine.planning.shared_memory import find_shared

            shared = find_shared(views)
            if shared is not None:
                raise ConfigError(
                    f"tensors {self.name(shared[0])!r} and {self.name(shared[1])!r} share memory, which atomic=False "
                    "and overlap=True cannot average; make them one parameter, or leave these options out"
                )
        self._views = [view.view(-1) if view.is_contiguous() else view for view in views]
        self._moving = [entry.tensor() for entry in self._entries if entry is not None]
        self._is_sharded = any(isinstance(tensor, DTensor) for tensor in self._moving)
        self._of_bucket.clear()
        self._cuts.clear()
        # Last: an interrupt before this has the next round look once more.
        self._tensors = tensors
        self._memory_seen = self._look_at_memory()

    def run_of(self, bucket: Bucket, device: torch.device) -> torch.Tensor | None:
        """Return a bucket's elements where they lie, if they are one run of memory that can be sent from as it is."""
        places = self._places_of(bucket)
        return places.run if places.device == device else None

    def device_of(self, bucket: Bucket) -> torch.device | None:
        """Return the device of a bucket's elements, where it is one and they can be copied together."""
        return self._places_of(bucket).device

    def values_of(self, bucket: Bucket) -> torch.Tensor:
        """Return a bucket's elements on the device of the model, which is one; a copy where they are several runs."""
        views = self._places_of(bucket).views
        return torch.cat(views) if len(views) > 1 else views[0]

    def pack(self, bucket: Bucket, into: torch.Tensor, *, is_behind: bool = False) -> None:
        """Copy a bucket's elements out of the model; between two devices the host waits, unless it is ``is_behind``."""
        views, device, _, memory = self._places_of(bucket)
        if memory and into.device == device:
            copy_memory(memory, self._cut(bucket, into, memory))
        elif into.device == device:
            torch.cat(views, out=into)  # one call, where many small tensors would cost one each
        elif device is not None:
            into.copy_(self.values_of(bucket), non_blocking=is_behind)
        else:
            for view, values in zip(views, torch.split(into, [view.numel() for view in views]), strict=True):
                values.view(view.shape).copy_(view)

    def unpack(self, bucket: Bucket, values: torch.Tensor, *, is_behind: bool = False) -> None:
        """Write a bucket's elements into the model; a GPU takes them behind the host with ``is_behind``."""
        views, device, _, memory = self._places_of(bucket)
        if len(views) == 1 and device is not None:
            if views[0].data_ptr() != values.data_ptr():
                views[0].copy_(values, non_blocking=is_behind)
            else:
                increment_version(views)  # what has changed it need not have been torch
        elif memory and values.device == device:
            copy_memory(self._cut(bucket, values, memory), memory)
            increment_version(views)  # so that autograd still finds out about what was saved for a backward pass
        elif values.device == device:
            torch.split_with_sizes_copy(values, [view.numel() for view in views], out=views)
        elif device is not None:
            there = values.to(device, non_blocking=is_behind)
            torch.split_with_sizes_copy(there, [view.numel() for view in views], out=views)
        else:
            for view, new in zip(views, torch.split(values, [view.numel() for view in views]), strict=True):
                view.copy_(new.view(view.shape))

    def nonfinite(self, bucket: Bucket) -> list[int]:
        """Tell which tensors have a value in a bucket that is not finite; local."""
        return [piece.item for piece in bucket.pieces if not all(map(_is_finite, self._views_of_piece(piece)))]

    def _cut(self, bucket: Bucket, buffer: torch.Tensor, like: Sequence[memoryview]) -> list[memoryview]:
        """Return a buffer's bytes view by view; kept, since a bucket is often packed into the same buffer."""
        kept = self._cuts.get(id(bucket))
        if kept is None or kept[0].data_ptr() != buffer.data_ptr():
            whole, ends = memory_of(buffer), itertools.accumulate(part.nbytes for part in like)
            parts = [whole[end - part.nbytes : end] for part, end in zip(like, ends, strict=True)]
            kept = self._cuts[id(bucket)] = (buffer, parts)
        return kept[1]

    def _places_of(self, bucket: Bucket) -> Places:
        """Return where a bucket's elements lie in the model."""
        kept = self._of_bucket.get(id(bucket))
        if kept is None:
            found = [view for piece in bucket.pieces for view in self._views_of_piece(piece)]
            views = [_flat(view) if view.is_contiguous() else view for view in found]
            devices = {view.device if view.dim() == 1 else None for view in views}
            device = devices.pop() if len(devices) == 1 else None
            run, memory = None, []
            if device is not None and all(view.is_contiguous() for view in views):
                run = views[0] if len(views) == 1 else None
                memory = [*map(memory_of, views)] if len(views) > 1 and device.type == "cpu" else []
            kept = self._of_bucket[id(bucket)] = Places(views, device, run, memory)
        return kept

    def _views_of_piece(self, piece: Piece) -> list[torch.Tensor]:
        elements = self._views[piece.item]
        if elements.dim() == 1 and piece.stop - piece.start == elements.numel():
            return [elements]
        return _spans(elements, piece.start - self._origin[piece.item], piece.stop - piece.start)


class TensorWatch:
    """Tells, cheaply enough for each round, whether a model still has the tensors that it had.

    ``changed`` is called where it has others, and raises where rounds cannot go on.
    """

    def __init__(self, roots: Sequence[nn.Module], changed: Callable[[], None]) -> None:
        self._roots = tuple(roots)
        self._changed = changed
        self._tensors: list[torch.Tensor | None] = []
        self._trains: list[bool | None] = []
        self.note()

    def note(self) -> None:
        """Take the tensors that there are now; they are kept alive, so that no other gets the address of one."""
        self._tensors = self._look()
        self._trains = _trains(self._tensors)

    def check(self) -> None:
        """Call ``changed`` where the model has other tensors, or trains others; local."""
        tensors = self._look()
        is_same = len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))
        if not is_same or _trains(tensors) != self._trains:
            self._changed()
            self.note()

    def _look(self) -> list[torch.Tensor | None]:
        """Return parameters and buffers, also those that are ``None``; a step of Python for each module only."""
        tensors: list[torch.Tensor | None] = []
        for root in self._roots:
            for module in root.modules():
                tensors += module._parameters.values()
                tensors += module._buffers.values()
        return tensors


def _trains(tensors: Sequence[torch.Tensor | None]) -> list[bool | None]:
    """Return which tensors train; ``None`` for what is none."""
    return [None if tensor is None else tensor.requires_grad for tensor in tensors]


def _flat(view: torch.Tensor) -> torch.Tensor:
    """Return the elements of a contiguous tensor in one dimension, of step 1 even where there is one and no step."""
    flat = view.view(-1)
    return flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))


def copy_memory(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
    """Copy memory run by run, without a step of Python or a call into torch for each.

    Of 2,000 tensors of 1 KB, on one core with torch 2.13: 0.28 ms; ``torch.cat`` takes 0.48, ``torch._foreach_copy_``
    1.39, and ``torch.split_with_sizes_copy``, which this replaces in the other direction, 1.90.
    """
    write: Callable[[memoryview, slice, memoryview], None] = memoryview.__setitem__
    collections.deque(map(write, targets, itertools.repeat(slice(None)), sources), maxlen=0)


def _spans(view: torch.Tensor, start: int, count: int) -> list[torch.Tensor]:
    """Return ``count`` elements of a tensor from ``start`` on, in row-major order, as views."""
    if view.is_contiguous():
        return [view.view(-1)[start : start + count]]
    inner = view.numel() // view.shape[0]
    views: list[torch.Tensor] = []
    while count:
        row, offset = divmod(start, inner)
        rows = count // inner
        if offset == 0 and rows:
            views.append(view[row : row + rows])
            taken = rows * inner
        else:
            taken = min(count, inner - offset)
            views.extend(_spans(view[row], offset, taken))
        start, count = start + taken, count - taken
    return views


def _is_finite(values: torch.Tensor) -> bool:
    # torch knows no infinity of 8-bit floats
    return bool(torch.isfinite(values.float() if values.dtype.itemsize == 1 else values).all())


class ModelCopy(Enum):
    """What a round copies of this rank's values when it starts."""

    NONE = auto()
    """Nothing: values are read from the model while they are exchanged."""
    STAGED = auto()
    """All values, to where the mean will take their place."""
    KEPT = auto()
    """All values, until the result is merged: the steps made since are measured from them."""


class Copies:
    """How values get between the model and the memory that they are sent from.

    This form is for a model that lies in that memory: nothing is waited for.
    """

    def start(self, layout: Layout, bucket: Bucket, into: torch.Tensor) -> None:
        """Start to copy a bucket out of the model; :meth:`settle` waits for it."""
        layout.pack(bucket, into)

    def settle(self, bucket: Bucket) -> None:
        """Let the host wait until a bucket's values have come, if they are on their way."""

    def bring(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Copy a bucket's result to where the ranks of the cell get it."""
        into.copy_(values)

    def write(self, layout: Layout, bucket: Bucket, values: torch.Tensor) -> None:
        """Write a bucket's new values into the model."""
        layout.unpack(bucket, values)

    def end_writes(self) -> None:
        """Note the end of all that was written."""

    def finish(self) -> None:
        """Let the host wait for all copies, before their memory is used again."""


def host_or_gpu(numel: int, dtype: torch.dtype, device: torch.device, *, is_lasting: bool = False) -> torch.Tensor:
    """Return memory to send from and to receive into; beside a GPU what lies with the host is pinned.

    What lies on a GPU and crosses in the host's memory (gloo) is copied there without a detour, and behind the host.
    With ``is_lasting`` large memory of the host is of huge pages.
    """
    is_pinned = device.type == "cpu" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if is_lasting and device.type == "cpu" and not is_pinned:
        return lasting_memory(numel, dtype)
    return torch.empty(numel, dtype=dtype, device=device, pin_memory=is_pinned)


class BucketMemory(NamedTuple):
    """Where a bucket's values lie on one rank in a round, and the buffers lent for them."""

    values: torch.Tensor  # as they are sent to other cells
    out: torch.Tensor  # what the cells have made of them
    lent: torch.Tensor | None
    result: torch.Tensor  # what all ranks of the cell get: out, or memory of the GPU
    result_lent: torch.Tensor | None = None


LINE = 64
"""Bytes of a cache line, at whose multiples rows start, so that values of any data type are aligned."""


class Pool:
    """Buffers of one size; as many as were ever lent at a time, since fresh memory is slow."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nbytes = nbytes
        self._device = device
        self._free: deque[torch.Tensor] = deque()
        self._rows: dict[tuple[int, torch.dtype, int], tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def reserve(self, count: int, nbytes: int = 0) -> None:
        """Make as many buffers of at least ``nbytes`` as will be lent at a time, where all are here."""
        if nbytes > self._nbytes:
            self.widen(nbytes)
        while len(self._free) < count:
            self._free.append(self._make())

    def widen(self, nbytes: int) -> None:
        """Have all buffers from now on hold at least ``nbytes``."""
        if nbytes > self._nbytes:
            self._nbytes = nbytes
            self._free.clear()
            self._rows.clear()

    def acquire(self, nbytes: int = 0) -> torch.Tensor:
        """Lend a buffer of at least ``nbytes``."""
        if nbytes > self._nbytes:
            self.widen(nbytes)
        # In turn, so that a round uses each for what the round before did.
        return self._free.popleft() if self._free else self._make()

    def _make(self) -> torch.Tensor:
        # A buffer outlives the round, so it must not be an inference tensor if that is where the round takes place.
        with torch.inference_mode(False):
            return host_or_gpu(self._nbytes, torch.uint8, self._device)

    def release(self, buffer: torch.Tensor | None) -> None:
        """Take a buffer back, if there is one."""
        if buffer is not None and buffer.numel() == self._nbytes:
            self._free.append(buffer)

    def rows(self, buffer: torch.Tensor, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        """Cut a buffer that is lent into aligned rows, as long as there is room; kept, since to cut takes its time."""
        kept = self._rows.get((id(buffer), dtype, count))
        if kept is None:
            step = buffer.numel() // max(1, count) // LINE * LINE
            with torch.inference_mode(False):  # a view made there would stay an inference tensor
                rows = [buffer[row * step : (row + 1) * step].view(dtype) for row in range(count)]
            kept = self._rows[id(buffer), dtype, count] = (buffer, rows)  # what is kept keeps its id
        return kept[1]


def aligned(nbytes: int) -> int:
    """Return the bytes that a row takes up."""
    return -(-nbytes // LINE) * LINE


class FiniteCheck:
    """Looks at the values of a round, bucket by bucket; local."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        # By device: buckets, and a number for each that is finite only if all values are.
        self._seen: dict[torch.device, tuple[list[Bucket], list[torch.Tensor]]] = {}

    def add(self, bucket: Bucket, values: torch.Tensor) -> None:
        """Look at a bucket's values; a GPU is not waited for."""
        buckets, energies = self._seen.setdefault(values.device, ([], []))
        buckets.append(bucket)
        energies.append(sum_of_squares(values))

    def find_nonfinite(self) -> list[str]:
        """Return the names of tensors that hold a value which is not finite."""
        items: set[int] = set()
        for buckets, energies in self._seen.values():  # each GPU is read once
            for bucket, energy in zip(buckets, torch.stack(energies).tolist(), strict=True):
                if not math.isfinite(energy):
                    items.update(self._layout.nonfinite(bucket))
        return [self._layout.name(item) for item in sorted(items)]


def sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    """Return a number that is finite only if all values are: the sum of squares, or of the values of a narrow type."""
    if not values.is_floating_point():
        return values.new_zeros((), dtype=torch.float32)
    if values.dtype.itemsize < 4:
        values = values.float() if values.dtype.itemsize == 1 else values  # torch adds no 8-bit floats up
        return values.sum(dtype=torch.float32)
    energy = values.dot(values)
    return energy if energy.dtype == torch.float32 else energy.float()
