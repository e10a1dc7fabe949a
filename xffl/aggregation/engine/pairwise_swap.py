"""The swap of two cells: whole buckets, of one holder in each cell, whose mean is taken while the model is written."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from xffl.aggregation.engine.buffers import FiniteCheck, Layout, RoundBuffers, StagingBuffers
from xffl.aggregation.engine.groups import start_moves
from xffl.aggregation.engine.plan import Bucket, GroupTransfer, RoundContext
from xffl.aggregation.engine.transport import TAG, CrossCellTransport, Link
from xffl.aggregation.mean import weighted_mean
from xffl.aggregation.report import RoundProfile
from xffl.distributed.collectives import Work
from xffl.distributed.faults import inject

__all__ = ["PairwiseSwap"]


class PairwiseSwap:
    """The exchange of groups with ``deferred_mean``: two cells swap whole buckets, of one holder in each cell.

    Each rank takes the mean where its values lie in the model, when it writes it: one pass over memory less. Values are
    checked when they are sent. What the check says of how to combine them is told with the last vote; where cells are
    worlds of their own, to the other holder right behind the values, since a rank in doubt does not learn of that vote.
    """

    def __init__(
        self, layout: Layout, staging: StagingBuffers, link: Link, profile: RoundProfile, finite_check: FiniteCheck
    ) -> None:
        self._layout, self._staging, self._link = layout, staging, link
        self._profile, self._finite_check = profile, finite_check
        self._cell, self._other = self._link.cell, 1 - self._link.cell
        # The groups with values of the two holders whose squares leave fp32.
        self._large: set[int] = set()

    def swap(self, transfer: GroupTransfer, round_buffers: RoundBuffers, transport: CrossCellTransport) -> None:
        """Swap all of a group with its sender in the other cell, unless that is lost."""
        if transport.is_cut_off:
            return
        try:
            inject("exchange")
            self._swap(transfer, round_buffers, transport.context)
        except RuntimeError as lost:
            transport.lose(lost)

    def _swap(self, transfer: GroupTransfer, round_buffers: RoundBuffers, context: RoundContext) -> None:
        """Ask for a group's buckets and send them.

        A loop of its own instead of a generator for each bucket: where buckets empty the caches, a step of Python costs
        ten times as much, and there are hundreds.
        """
        buckets, sources, ahead = transfer.buckets, context.source_cells(transfer.group), transfer.ahead
        sends, receives = self._cell in sources, self._other in sources
        round_groups, profile = self._link.round_groups, self._profile
        groups = round_groups.across or (None,)
        peer = round_groups.first + transfer.senders_of(buckets[0])[self._other]
        stages = self._staging.stages_of(transfer)
        arriving: deque[list[Work]] = deque()
        leaving: deque[tuple[Bucket, torch.Tensor | None, list[Work]]] = deque()
        # Each tick asks for a bucket, sends the one `ahead` before it, and waits for the one `depth` before that.
        for tick in range(len(buckets) + ahead + transfer.depth):
            if tick >= ahead + transfer.depth:
                bucket, lent, works = leaving.popleft()
                with profile.phase("across"):
                    for work in arriving.popleft() + works:
                        work.wait()
                if lent is not None:
                    round_buffers.keep(bucket, lent)
            if ahead <= tick < len(buckets) + ahead:
                bucket = buckets[tick - ahead]
                values, lent = self._read(transfer, bucket, round_buffers)
                profile.record_send(values.nbytes if sends else 0)
                with profile.phase("post"):
                    moves = [(values, peer)] if sends else []
                    leaving.append((bucket, lent, start_moves([], moves, groups[bucket.number % len(groups)], TAG)))
            if tick < len(buckets):
                profile.record_send(0)  # what is asked for counts, too
                with profile.phase("post"):
                    moves = [(stages[tick], peer)] if receives else []
                    arriving.append(start_moves(moves, [], groups[tick % len(groups)], TAG))
        if round_groups.is_cross_world:
            mine = torch.tensor([not self._finite_check.report().squares_fit_fp32], dtype=torch.bool)
            theirs = torch.tensor([False], dtype=torch.bool)
            for work in start_moves([(theirs, peer)], [(mine, peer)], groups[0], TAG):
                work.wait()
            if mine | theirs:
                self._large.add(transfer.number)
        profile.arrived()

    def _read(
        self, transfer: GroupTransfer, bucket: Bucket, round_buffers: RoundBuffers
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a bucket's values, checked, and the buffer lent for them, if any."""
        values, lent = round_buffers.acquire_values(transfer, bucket)
        with self._profile.capture_failure("pack"):
            if lent is not None:
                round_buffers.fill_now(bucket, values)
            self._finite_check.add(bucket, values)
        return values, lent

    def write(self, transfers: Sequence[GroupTransfer], round_buffers: RoundBuffers, context: RoundContext) -> None:
        """Write the mean of groups into the model; local."""
        # What shares memory is written once all of it has been read.
        waits = self._layout.shares_memory
        for transfer in transfers:
            sources = context.source_cells(transfer.group)
            counts = [context.counts[cell] for cell in sources] if context.source is None else [1.0]
            is_fused = context.is_fused and transfer.number not in self._large
            for bucket, stage in zip(transfer.buckets, self._staging.stages_of(transfer), strict=True):
                values, lent = round_buffers.acquire_values(transfer, bucket)
                if lent is not None:
                    round_buffers.fill_now(bucket, values)
                both = (values, stage) if self._cell == 0 else (stage, values)
                mean = stage if waits else values
                weighted_mean([both[cell] for cell in sources], counts, mean, is_fused=is_fused)
                if lent is not None and not waits:
                    self._layout.unpack(bucket, values)
                round_buffers.release(lent)
        for transfer in transfers if waits else ():
            for bucket, stage in zip(transfer.buckets, self._staging.stages_of(transfer), strict=True):
                self._layout.unpack(bucket, stage)
