"""Where a rank's elements lie: the model's tensors as views, read and written bucket by bucket."""

from __future__ import annotations

import collections
import ctypes
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from xffl.aggregation.axes import canonical_axis
from xffl.aggregation.entries import Entry
from xffl.aggregation.plan import Bucket, Item, Piece
from xffl.errors import ConfigError
from xffl.topology import Coordinates

__all__ = ["Layout"]


class Places(NamedTuple):
    """Where a bucket's elements lie.

    :param views: The elements, as views that follow each other.
    :param device: The device of all views, if they are 1-D.
    :param run: The only view, if its elements are one run of memory.
    :param memory: The bytes of each view, for a copy without torch, where they are several runs of memory on the CPU.
    """

    views: list[torch.Tensor]
    device: torch.device | None
    run: torch.Tensor | None
    memory: list[memoryview]


class Layout:
    """This rank's elements of the moving tensors, in canonical order.

    Views are kept from round to round while the model keeps its tensors where they are. ``shares_memory`` tells, once
    they have been looked up, whether some of them overlap.

    :param entries: The moving tensors, in the plan's order; ``None`` for one that this rank does not hold.
    :param items: The same tensors as the plan sees them.
    :param axes: For each cell, the axis along which it cuts each tensor.
    :param at: This rank's place in the federation.
    :param needs_memory_of_its_own: Whether tensors are written while others are still read, so that none may share
        memory.
    """

    def __init__(
        self,
        entries: Sequence[Entry | None],
        items: Sequence[Item],
        axes: Sequence[Sequence[int]],
        at: Coordinates,
        *,
        needs_memory_of_its_own: bool = False,
    ) -> None:
        self._needs_memory_of_its_own = needs_memory_of_its_own
        self._entries = tuple(entries)
        self._fragments = tuple(item.fragment for item in items)
        # A module's parameters and buffers, once each: taken together they cost less than one by one.
        self._dicts = list({id(entry.held): entry.held for entry in entries if entry is not None}.values())
        self.shares_memory = False
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
        self._found: list[list[object]] = []
        # Flat, where a tensor's elements follow each other in memory.
        self._views: list[torch.Tensor] = []
        # By identity: the exchange keeps its buckets, and hashing one would cost as much as walking it.
        self._of_bucket: dict[int, Places] = {}
        self._cuts: dict[int, tuple[torch.Tensor, list[memoryview]]] = {}

    def name(self, item: int) -> str:
        """Return a tensor's name.

        :param item: Its place in the plan.
        :return: The name, without wrappers.
        """
        entry = self._entries[item]
        assert entry is not None, "lanes hold only what this rank holds"
        return entry.name

    def held(self, item: int) -> tuple[int, int]:
        """Return where this rank's part of a tensor begins in canonical order, and its elements.

        :param item: Its place in the plan.
        :return: First element and number of elements.
        """
        return self._origin[item], self._held[item]

    def moving(self, fragment: int) -> list[torch.Tensor]:
        """Return the model's tensors of a fragment, also those of which this rank has no elements; local.

        :param fragment: The part of the model.
        :return: Its parameters and buffers as the model keeps them.
        """
        entries = zip(self._entries, self._fragments, strict=True)
        kept = [entry.held[entry.leaf] for entry, number in entries if entry is not None and number == fragment]
        return [tensor for tensor in kept if tensor is not None]

    def look_up(self) -> None:
        """Look all tensors up anew; local.

        :raises ConfigError: if one has another shape or data type, or another part of it is held here.
        """
        tensors = [*itertools.chain.from_iterable(held.values() for held in self._dicts)]
        is_same = len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))
        if is_same and _places(self._moving) == self._found:
            return
        views = [
            torch.empty(0) if entry is None else entry.elements(axis)
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
        shared = self._find_shared(views)
        if shared is not None and self._needs_memory_of_its_own:
            raise ConfigError(
                f"tensors {self.name(shared[0])!r} and {self.name(shared[1])!r} share memory, which atomic=False and "
                "overlap=True cannot average; make them one parameter, or leave these options out"
            )
        self.shares_memory = shared is not None
        self._views = [view.view(-1) if view.is_contiguous() else view for view in views]
        self._moving = [entry.tensor() for entry in self._entries if entry is not None]
        self._of_bucket.clear()
        self._cuts.clear()
        # Last: an interrupt before this has the next round look once more.
        self._tensors, self._found = tensors, _places(self._moving)

    def _find_shared(self, views: Sequence[torch.Tensor]) -> tuple[int, int] | None:
        """Return two tensors whose memory overlaps, by their places in the plan, if there are any."""
        ends = (sum((n - 1) * step for n, step in zip(v.shape, v.stride(), strict=True)) for v in views)
        found = [
            (str(view.device), view.data_ptr(), view.data_ptr() + (end + 1) * view.itemsize, index)
            for index, (view, end) in enumerate(zip(views, ends, strict=True))
            if view.numel()
        ]
        for (device, _, end, one), (other_device, start, _, other) in itertools.pairwise(sorted(found)):
            if device == other_device and start < end:
                return one, other
        return None

    def run_of(self, bucket: Bucket, device: torch.device) -> torch.Tensor | None:
        """Return a bucket's elements where they lie, if they are one run of memory that can be sent from as it is.

        :param bucket: The bucket.
        :param device: Where the groups' backend communicates from.
        :return: A flat view of the model; ``None`` where the elements have to be packed.
        """
        places = self._places_of(bucket)
        return places.run if places.device == device else None

    def pack(self, bucket: Bucket, into: torch.Tensor) -> None:
        """Copy a bucket's elements out of the model.

        :param bucket: The bucket.
        :param into: Flat tensor of as many elements.
        """
        views, device, _, memory = self._places_of(bucket)
        if memory and into.device == device:
            _copy(memory, self._cut(bucket, into, memory))
        elif into.device == device:
            torch.cat(views, out=into)  # one call, where many small tensors would cost one each
        elif device is not None:  # one copy between two devices, which the host waits for
            into.copy_(torch.cat(views) if len(views) > 1 else views[0])
        else:
            for view, values in zip(views, torch.split(into, [view.numel() for view in views]), strict=True):
                values.view(view.shape).copy_(view)

    def unpack(self, bucket: Bucket, values: torch.Tensor) -> None:
        """Write a bucket's elements into the model.

        :param bucket: The bucket.
        :param values: Flat tensor of as many elements; the model's own run of them is left as it is.
        """
        views, device, _, memory = self._places_of(bucket)
        if len(views) == 1 and device is not None:
            if views[0].data_ptr() != values.data_ptr():
                views[0].copy_(values)
        elif memory and values.device == device:
            _copy(self._cut(bucket, values, memory), memory)
            increment_version(views)  # so that autograd still finds out about what was saved for a backward pass
        elif values.device == device:
            torch.split_with_sizes_copy(values, [view.numel() for view in views], out=views)
        elif device is not None:
            torch.split_with_sizes_copy(values.to(device), [view.numel() for view in views], out=views)
        else:
            for view, new in zip(views, torch.split(values, [view.numel() for view in views]), strict=True):
                view.copy_(new.view(view.shape))

    def nonfinite(self, bucket: Bucket) -> list[int]:
        """Tell which tensors have a value in a bucket that is not finite; local.

        :param bucket: The bucket.
        :return: Their places in the plan.
        """
        return [piece.item for piece in bucket.pieces if not all(map(_is_finite, self._views_of_piece(piece)))]

    def _cut(self, bucket: Bucket, buffer: torch.Tensor, like: Sequence[memoryview]) -> list[memoryview]:
        """Return a buffer's bytes view by view; kept, since a bucket is often packed into the same buffer."""
        kept = self._cuts.get(id(bucket))
        if kept is None or kept[0].data_ptr() != buffer.data_ptr():
            whole, ends = _bytes_of(buffer), itertools.accumulate(part.nbytes for part in like)
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
                memory = [*map(_bytes_of, views)] if len(views) > 1 and device.type == "cpu" else []
            kept = self._of_bucket[id(bucket)] = Places(views, device, run, memory)
        return kept

    def _views_of_piece(self, piece: Piece) -> list[torch.Tensor]:
        elements = self._views[piece.item]
        if elements.dim() == 1 and piece.stop - piece.start == elements.numel():
            return [elements]
        return _spans(elements, piece.start - self._origin[piece.item], piece.stop - piece.start)


def _places(tensors: list[torch.Tensor]) -> list[list[object]]:
    """Return what changes when the model keeps its tensors elsewhere or otherwise; cheap."""
    is_any_sharded = any(issubclass(kind, DTensor) for kind in set(map(type, tensors)))
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors] if is_any_sharded else tensors
    # An address cannot be taken by another tensor, since the views keep the old one alive. Numbers only, where there
    # can be thousands: tuples would set off Python's garbage collector.
    look_at = (torch.Tensor.data_ptr, torch.Tensor.numel, operator.attrgetter("dtype"))
    is_whole: list[object] = list(map(torch.Tensor.is_contiguous, local))
    gaps: list[object] = [tensor.stride() for tensor, whole in zip(local, is_whole, strict=True) if not whole]
    return [gaps, is_whole, *(list(map(look, local)) for look in look_at)]


def _flat(view: torch.Tensor) -> torch.Tensor:
    """Return the elements of a contiguous tensor in one dimension, of step 1 even where there is one and no step."""
    flat = view.view(-1)
    return flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))


def _bytes_of(values: torch.Tensor) -> memoryview:
    """Return the bytes of a flat tensor on the CPU, to be read and written while somebody keeps the tensor.

    Not by way of numpy, after which nobody could resize the tensor's storage any more.
    """
    return memoryview((ctypes.c_char * values.nbytes).from_address(values.data_ptr())).cast("B")


def _copy(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
    """Copy memory run by run, without a step of Python or a call into torch for each."""
    write: Callable[[memoryview, slice, memoryview], None] = memoryview.__setitem__
    collections.deque(map(write, targets, itertools.repeat(slice(None)), sources), maxlen=0)


def _spans(view: torch.Tensor, start: int, count: int) -> list[torch.Tensor]:
    """Return ``count`` elements of a tensor from ``start`` on, in row-major order, as views.

    :param view: A tensor of any strides; one with gaps gives several views.
    :param start: First element.
    :param count: Number of elements.
    :return: The views, whose elements follow each other.
    """
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
