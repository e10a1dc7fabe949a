"""What codecs had left out when the cells of rounds changed: added to the next values that this rank sends."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from xffl.aggregation.compression import HUGE, ErrorFeedback
from xffl.aggregation.engine.buffers import Layout
from xffl.aggregation.engine.named import named_pieces
from xffl.aggregation.engine.planning.transfers import Bucket, GroupTransfer, RoundContext

__all__ = ["Leftovers"]


class Leftovers:
    """The residuals of rounds with other cells, on one rank, until a round to which this rank gives them is taken.

    What is kept is what the mean lacks: a residual of this cell's values times the share that the cell had in the mean,
    since it may have another one now, and a residual of results, which this cell combined for all, as it is. There is
    room for all that this rank holds, since it may send another part of that than before (``rails``).
    """

    def __init__(self, transfers: Sequence[GroupTransfer], layout: Layout, cell: int) -> None:
        self._transfers = [transfer for transfer in transfers if transfer.group.codec != "none"]
        self._layout = layout
        self._cell = cell
        self._values: dict[int, torch.Tensor] = {}
        """By the number of the transfer, in fp32"""
        self._given: dict[int, list[Bucket]] = {}
        """By transfer the buckets to which the round under way has added them"""
        self._share: float | None = None
        """What this cell's values count for in the mean of the round under way, if it contributes"""
        self._shares: dict[int, float] = {}
        """What they counted for when they last did, by fragment"""

    def rollback(self) -> None:
        """Keep what a round that was not taken has been given."""
        self._share = None
        self._given.clear()

    def note_share(self, context: RoundContext) -> None:
        """Note what this cell's values count for in the round under way."""
        self._share = share_of(context, self._cell)

    def has(self, transfer: GroupTransfer) -> bool:
        """Return whether there may be leftovers of a group."""
        return transfer.number in self._values

    def add(self, transfer: GroupTransfer, bucket: Bucket, values: torch.Tensor) -> None:
        """Add a bucket's leftovers to what this rank is about to send of it."""
        if not self.has(transfer) or self._share is None:
            return
        left = self._values[transfer.number][bucket.start : bucket.stop]
        left = left / left.new_tensor(self._share)
        limit = torch.finfo(values.dtype).max
        if values.dtype.itemsize >= left.itemsize:
            values.add_(left)
        elif limit < HUGE:
            values.copy_(left.add_(values.float()).clamp_(-limit, limit))
        else:
            values.copy_(left.add_(values.float()))
        self._given.setdefault(transfer.number, []).append(bucket)

    def commit(self, fragment: int) -> None:
        """Forget what the round that was taken has been given."""
        if self._share is not None:
            self._shares[fragment] = self._share
        for number, buckets in self._given.items():
            for bucket in buckets:
                self._values[number][bucket.start : bucket.stop].zero_()
            if not self._values[number].any():
                del self._values[number]
        self.rollback()

    def forget(self) -> None:
        """Forget all leftovers."""
        self._values.clear()
        self.rollback()

    def by_name(self, feedback: Mapping[int, ErrorFeedback]) -> dict[str, torch.Tensor]:
        """Return copies of the leftovers and of residuals, given by the number of the transfer, by names of tensors."""
        left = {number: values.clone() for number, values in self._values.items()}
        for transfer in self._transfers:
            residuals = feedback[transfer.number].residuals if transfer.number in feedback else {}
            share = self._shares.get(transfer.group.fragment, 0.0)
            for place, residual in residuals.items():
                bucket = transfer.buckets[place.bucket]
                part = transfer.parts(bucket)[self._cell if place.cell is None else place.cell]
                if transfer.number not in left:
                    left[transfer.number] = _zeros(transfer)
                place_here = left[transfer.number][bucket.start + part.start : bucket.start + part.stop]
                place_here.add_(residual if place.cell is None else residual * residual.new_tensor(share))
        named: dict[str, torch.Tensor] = {}
        for piece in named_pieces(left, self._transfers, self._layout):
            if piece.name not in named:
                named[piece.name] = torch.zeros(piece.numel, dtype=torch.float32, device="cpu")
            named[piece.name][piece.part].copy_(piece.values)
        return named

    def load(self, named: Mapping[str, torch.Tensor], given: Collection[int] = ()) -> None:
        """Take over what :meth:`by_name` returned on this rank, in rounds with other cells.

        Without what belongs to the fragments ``given``: a later round has it.
        """
        self.forget()
        if not named:
            return
        for transfer in self._transfers:
            if transfer.group.fragment not in given:
                self._values[transfer.number] = _zeros(transfer)
        for piece in named_pieces(self._values, self._transfers, self._layout):
            if piece.name in named and named[piece.name].numel() == piece.numel:
                piece.values.copy_(named[piece.name][piece.part])


def share_of(context: RoundContext, cell: int) -> float | None:
    """Return what a cell's values count for in the mean; ``None`` where it gives none.

    A combiner that compares whole models says so only when all have come: there each cell counts as the mean does.
    """
    if cell not in context.cells:
        return None
    share = context.share(cell) if context.counts else 1.0
    return share or None


def _zeros(transfer: GroupTransfer) -> torch.Tensor:
    """Return leftovers of a group: rounds whose cells change send from the host's memory."""
    with torch.inference_mode(False):
        return torch.zeros(transfer.group.numel, dtype=torch.float32, device="cpu")
