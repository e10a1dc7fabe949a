"""Where a rank's elements lie: the model's tensors as views, read and written bucket by bucket."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from xffl.aggregation.axes import canonical_axis
from xffl.aggregation.entries import Entry
from xffl.aggregation.plan import Bucket, Item, Piece
from xffl.errors import ConfigError
from xffl.topology import Coordinates

__all__ = ["Layout"]


class Layout:
    """This rank's elements of the moving tensors, in canonical order.

    Views are kept from round to round while the model keeps its tensors where they are.

    :param entries: The moving tensors, in the plan's order; ``None`` for one that this rank does not hold.
    :param items: The same tensors as the plan sees them.
    :param axes: For each cell, the axis along which it cuts each tensor.
    :param at: This rank's place in the federation.
    :param is_written_in_place: Whether tensors are written while others are still read, so that none may share memory.
    """

    def __init__(
        self,
        entries: Sequence[Entry | None],
        items: Sequence[Item],
        axes: Sequence[Sequence[int]],
        at: Coordinates,
        *,
        is_written_in_place: bool = False,
    ) -> None:
        self._is_written_in_place = is_written_in_place
        self._entries = tuple(entries)
        self._slots = [entry.slot for entry in entries if entry is not None]
        self._axis = tuple(
            0 if entry is None else canonical_axis(entry, [cell[i] for cell in axes]) for i, entry in enumerate(entries)
        )
        # Where this rank's part of each tensor begins, in canonical order.
        cuts = [item.cuts[at.cell] for item in items]
        held = [cut.held(at.shard) for cut in cuts]
        self._origin = tuple(start for start, _ in held)
        self._held = tuple(stop - start for start, stop in held)
        self._found: list[list[object]] = []
        # Flat, where a tensor's elements follow each other in memory.
        self._views: list[torch.Tensor] = []
        # By identity: the exchange keeps its buckets, and hashing one would cost as much as walking it.
        self._of_bucket: dict[int, list[torch.Tensor]] = {}
        self._flat_on: dict[int, torch.device | None] = {}

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

    def look_up(self) -> None:
        """Look all tensors up anew; local.

        :raises ConfigError: if one has another shape or data type, or another part of it is held here.
        """
        found = _places([held.get(leaf) for held, leaf in self._slots])
        if found == self._found:
            return
        views = [
            torch.empty(0) if entry is None else entry.elements(axis)
            for entry, axis in zip(self._entries, self._axis, strict=True)
        ]
        for entry, view, held in zip(self._entries, views, self._held, strict=True):
            if entry is not None and view.numel() != held:
                raise ConfigError(
                    f"this rank holds {view.numel()} elements of tensor {entry.name!r} and held {held} when the "
                    "Aggregator was made; make a new Aggregator after sharding the model"
                )
        if self._is_written_in_place:
            self._check_apart(views)
        self._views = [view.view(-1) if view.is_contiguous() else view for view in views]
        self._found = found
        self._of_bucket.clear()
        self._flat_on.clear()

    def _check_apart(self, views: Sequence[torch.Tensor]) -> None:
        """Raise where the memory of two tensors overlaps."""
        ends = (sum((n - 1) * step for n, step in zip(v.shape, v.stride(), strict=True)) for v in views)
        found = [
            (str(view.device), view.data_ptr(), view.data_ptr() + (end + 1) * view.itemsize, index)
            for index, (view, end) in enumerate(zip(views, ends, strict=True))
            if view.numel()
        ]
        for (device, _, end, one), (other_device, start, _, other) in itertools.pairwise(sorted(found)):
            if device == other_device and start < end:
                raise ConfigError(
                    f"tensors {self.name(one)!r} and {self.name(other)!r} share memory, which atomic=False cannot "
                    "average; make them one parameter, or take atomic=True"
                )

    def run_of(self, bucket: Bucket, device: torch.device) -> torch.Tensor | None:
        """Return a bucket's elements where they lie, if they are one run of memory that can be sent from as it is.

        :param bucket: The bucket.
        :param device: Where the groups' backend communicates from.
        :return: A flat view of the model; ``None`` where the elements have to be packed.
        """
        views = self._views_of(bucket)
        if len(views) == 1 and views[0].device == device and views[0].dim() == 1 and views[0].is_contiguous():
            return views[0]
        return None

    def pack(self, bucket: Bucket, into: torch.Tensor) -> None:
        """Copy a bucket's elements out of the model.

        :param bucket: The bucket.
        :param into: Flat tensor of as many elements.
        """
        views = self._views_of(bucket)
        if self._is_flat(bucket, into.device):
            torch.cat(views, out=into)  # one call, where many small tensors would cost one each
            return
        for view, part in zip(views, torch.split(into, [view.numel() for view in views]), strict=True):
            part.view(view.shape).copy_(view)

    def unpack(self, bucket: Bucket, values: torch.Tensor) -> None:
        """Write a bucket's elements into the model.

        :param bucket: The bucket.
        :param values: Flat tensor of as many elements; the model's own run of them is left as it is.
        """
        views = self._views_of(bucket)
        if len(views) == 1 and views[0].dim() == 1:
            if views[0].data_ptr() != values.data_ptr():
                views[0].copy_(values)
            return
        sizes = [view.numel() for view in views]
        if self._is_flat(bucket, values.device):
            torch.split_with_sizes_copy(values, sizes, out=views)
            return
        for view, part in zip(views, torch.split(values, sizes), strict=True):
            view.copy_(part.view(view.shape))

    def nonfinite(self, bucket: Bucket) -> list[int]:
        """Tell which tensors have a value in a bucket that is not finite; local.

        :param bucket: The bucket.
        :return: Their places in the plan.
        """
        return [piece.item for piece in bucket.pieces if not all(map(_is_finite, self._views_of_piece(piece)))]

    def _views_of(self, bucket: Bucket) -> list[torch.Tensor]:
        """Return the model's elements in a bucket, as views that follow each other."""
        kept = self._of_bucket.get(id(bucket))
        if kept is None:
            kept = [view for piece in bucket.pieces for view in self._views_of_piece(piece)]
            self._of_bucket[id(bucket)] = kept
        return kept

    def _is_flat(self, bucket: Bucket, device: torch.device) -> bool:
        """Tell whether a bucket's views are all 1-D and on a device."""
        if id(bucket) not in self._flat_on:
            views = self._views_of(bucket)
            places = {view.device if view.dim() == 1 else None for view in views}
            self._flat_on[id(bucket)] = places.pop() if len(places) == 1 else None
        return self._flat_on[id(bucket)] == device

    def _views_of_piece(self, piece: Piece) -> list[torch.Tensor]:
        elements = self._views[piece.item]
        if elements.dim() == 1 and piece.stop - piece.start == elements.numel():
            return [elements]
        return _spans(elements, piece.start - self._origin[piece.item], piece.stop - piece.start)


def _places(tensors: list[torch.Tensor | None]) -> list[list[object]]:
    """Return what changes when the model keeps its tensors elsewhere or otherwise; cheap."""
    held = [tensor for tensor in tensors if tensor is not None]
    is_any_sharded = any(issubclass(kind, DTensor) for kind in set(map(type, held)))
    local = (
        [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in held] if is_any_sharded else held
    )
    # An address cannot be taken by another tensor, since the views keep the old one alive. Numbers only, where there
    # can be thousands: tuples would set off Python's garbage collector.
    look_at = (torch.Tensor.data_ptr, torch.Tensor.numel, torch.Tensor.is_contiguous, operator.attrgetter("dtype"))
    gaps: list[object] = [tensor.stride() for tensor in local if not tensor.is_contiguous()]
    return [list(map(id, tensors)), gaps, *(list(map(look, local)) for look in look_at)]


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
