"""Lanes that two cells swap, and of which every rank takes the mean when the round is written.

What is collected is what the other cell has sent, so the mean goes into the model in the pass that takes it: nothing is
combined beside the model and copied afterwards. Values are looked at when they are sent, while the processor has them
at hand; what that finds is part of the last vote, before which no weight has changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from xffl.aggregation.crossing import TAG, Crossing
from xffl.aggregation.journal import Journal
from xffl.aggregation.layout import Layout
from xffl.aggregation.looks import Findings, Looks
from xffl.aggregation.mean import weighted_mean
from xffl.aggregation.plan import Bucket
from xffl.aggregation.routes import Routes, start_moves
from xffl.aggregation.staging import Staging
from xffl.aggregation.tracks import Track, Turnout

__all__ = ["Late"]


class Late:
    """The lanes of a rank that are combined late, see :class:`~xffl.aggregation.tracks.Track`.

    :param layout: Where this rank's elements lie.
    :param staging: Where what arrives is collected.
    :param crossing: The slow link.
    :param routes: This rank's process groups.
    :param cell: This rank's cell, 0 or 1.
    """

    def __init__(self, layout: Layout, staging: Staging, crossing: Crossing, routes: Routes, cell: int) -> None:
        self._layout, self._staging, self._crossing, self._routes = layout, staging, crossing, routes
        self._cell, self._other = cell, 1 - cell
        self._looks = Looks(layout)

    def begin(self) -> None:
        """Forget what was found in the round before."""
        self._looks = Looks(self._layout)

    def findings(self) -> Findings:
        """Return what was found in the values that were sent; local."""
        return self._looks.findings()

    def swap(self, track: Track, turnout: Turnout, journal: Journal) -> None:
        """Swap all of a lane with its carrier in the other cell.

        A loop of its own instead of a flight for each bucket: where buckets empty the caches, a step of Python costs
        ten times as much, and there are hundreds.

        :param track: The lane, which this rank carries.
        :param turnout: Whose values count; the others' stay where they are.
        :param journal: Where bytes, seconds and failures are noted.
        """
        buckets, senders, ahead = track.buckets, turnout.senders(track.lane), track.ahead
        sends, receives = self._cell in senders, self._other in senders
        groups = self._routes.across or (None,)
        peer = self._routes.first + self._crossing.carriers.of(track.lane, buckets[0])[self._other]
        stages = self._staging.stages_of(track)
        arriving: deque[list[dist.Work]] = deque()
        leaving: deque[tuple[Bucket, torch.Tensor | None, list[dist.Work]]] = deque()
        for tick in range(len(buckets) + ahead + track.depth):
            if tick >= ahead + track.depth:
                bucket, lent, works = leaving.popleft()
                with journal.phase("across"):
                    for work in arriving.popleft() + works:
                        work.wait()
                if lent is not None:
                    self._staging.keep(bucket, lent)
            if ahead <= tick < len(buckets) + ahead:
                bucket = buckets[tick - ahead]
                values, lent = self._read(track, bucket, journal)
                journal.posted(values.nbytes if sends else 0)
                with journal.phase("post"):
                    moves = [(values, peer)] if sends else []
                    leaving.append((bucket, lent, start_moves([], moves, groups[bucket.number % len(groups)], TAG)))
            if tick < len(buckets):
                journal.posted(0)  # what is asked for counts, too
                with journal.phase("post"):
                    moves = [(stages[tick], peer)] if receives else []
                    arriving.append(start_moves(moves, [], groups[tick % len(groups)], TAG))
        journal.arrived()

    def _read(self, track: Track, bucket: Bucket, journal: Journal) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a bucket's values, looked at, and the buffer lent for them, if any."""
        values, lent = self._staging.lend(track, bucket)
        with journal.noting("pack"):
            if lent is not None:
                self._staging.fill(bucket, values)
            self._looks.add(bucket, values)
        return values, lent

    def write(self, tracks: Sequence[Track], turnout: Turnout) -> None:
        """Write the mean of lanes into the model; local.

        :param tracks: The lanes.
        :param turnout: Whose values count, and for what.
        """
        # What shares memory is written once all of it has been read.
        waits = self._layout.shares_memory
        for track in tracks:
            senders = turnout.senders(track.lane)
            counts = [turnout.counts[cell] for cell in senders]
            for bucket, stage in zip(track.buckets, self._staging.stages_of(track), strict=True):
                values, lent = self._staging.lend(track, bucket)
                if lent is not None:
                    self._staging.fill(bucket, values)
                both = (values, stage) if self._cell == 0 else (stage, values)
                mean = stage if waits else values
                weighted_mean([both[cell] for cell in senders], counts, mean, is_fused=turnout.is_fused)
                if lent is not None and not waits:
                    self._layout.unpack(bucket, values)
                self._staging.give(lent)
        for track in tracks if waits else ():
            for bucket, stage in zip(track.buckets, self._staging.stages_of(track), strict=True):
                self._layout.unpack(bucket, stage)
