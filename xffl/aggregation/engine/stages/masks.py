"""Secure sums: values cross as fixed-point numbers under masks, of which the cells learn only the sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from xffl.aggregation.engine.buffers import aligned
from xffl.aggregation.engine.exchange import RoundRun
from xffl.aggregation.engine.planning.transfers import GroupTransfer, RoundContext
from xffl.aggregation.engine.stages.stage import RoundStage
from xffl.aggregation.engine.transport import Crossing, ExactValues, Link
from xffl.aggregation.engine.voting.votes import RoundStatus
from xffl.aggregation.privacy import Masker

__all__ = ["Masks"]


class Masks(RoundStage):
    """Masks over the averaged values of a round; each try of an exchange has new ones."""

    def __init__(self, masker: Masker, transfers: Sequence[GroupTransfer], link: Link) -> None:
        self.masker = masker
        for transfer in transfers:
            if not _is_masked(transfer):
                continue
            rows = len(link.others) + (link.cells if transfer.reduce_scatter else 1)
            numel = max((part.stop - part.start for b in transfer.buckets for part in transfer.parts(b)), default=0)
            link.hold_slots(transfer, aligned(numel * torch.int64.itemsize) * rows)

    def status(self, fragment: int) -> Mapping[str, Any]:
        """Tell the next number of masks that this rank can use."""
        return {"attempt": self.masker.next_attempt}

    def check(self, context: RoundContext) -> None:
        """Raise where too few cells contribute for a sum to hide them."""
        self.masker.check(context.cells)

    def count(self, context: RoundContext, statuses: Sequence[RoundStatus]) -> RoundContext:
        """Take the highest number of all ranks: none of them has used its masks."""
        return replace(context, attempt=max(status.attempt for status in statuses))

    def before_exchange(self, run: RoundRun, context: RoundContext) -> None:
        """Get ready to mask the rows of this try."""
        self.masker.start_attempt(context.attempt, context.cells)

    def payload(self, crossing: Crossing) -> ExactValues | None:
        """Mask what is averaged."""
        return MaskedValues(crossing, self.masker) if _is_masked(crossing.transfer) else None


def _is_masked(transfer: GroupTransfer) -> bool:
    return transfer.group.rule == "average"


class MaskedValues(ExactValues):
    """A bucket's values as fixed-point numbers under masks, of which the cells learn only the sum."""

    def __init__(self, crossing: Crossing, masker: Masker) -> None:
        self._masker = masker
        super().__init__(crossing)

    def prepare(self) -> None:
        """Make room for rows of fixed-point numbers."""
        transfer, cells = self.transfer, self.link.cells
        parts = transfer.cut(self.bucket, self.values)
        self._parts = transfer.parts(self.bucket)
        self.results = parts if self.out is self.values else transfer.cut(self.bucket, self.out)
        # All-gather: one row for all cells. Reduce-scatter: each cell gets the row of its part.
        addressees = range(cells) if transfer.reduce_scatter else [self.here]
        self.slot = self.link.slots.acquire()
        rows = self.link.slots.rows(self.slot, torch.int64, len(self.others) + len(addressees))
        numel = parts[self.here].numel()
        masked = dict(zip(addressees, rows[len(self.others) :], strict=True))
        leaving = [masked.get(cell, masked[self.here])[: part.numel()] for cell, part in enumerate(parts)]
        self._shares = {cell: leaving[cell] for cell in addressees} if self.is_source else {}
        self.held = {cell: row[:numel] for cell, row in zip(self.arriving, rows, strict=False)}
        self.receive = dict(self.held)
        self.held[self.here] = leaving[self.here]
        self.send = {cell: leaving[cell] for cell in self.others} if self.is_source else {}

    def write(self) -> None:
        """Write this cell's share of the bucket so that only the sum over the cells can be read, part by part."""
        context, transfer = self.transport.context, self.transfer
        with self.transport.profile.capture_failure("encode"):
            for row in self._shares.values():
                row.zero_()  # what is sent if masking fails
            ranks = enumerate(transfer.senders[self.bucket.number])
            senders = {cell: rank for cell, rank in ranks if cell in context.cells}
            for cell, row in self._shares.items():
                place = (transfer.group.key, self.bucket.number, cell if transfer.reduce_scatter else -1)
                values, share = self.values[self._parts[cell]], context.share(self.here)
                self._masker.encode(values, share, row, place=place, senders=senders)

    def combine(self) -> None:
        """Add the rows up: the masks cancel."""
        result = self.results[self.here]
        if result.numel():
            with self.transport.profile.capture_failure("combine"):
                self._masker.decode([self.held[cell] for cell in self.sources], result)
        self.link.slots.release(self.slot)
