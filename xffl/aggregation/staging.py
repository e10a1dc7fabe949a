"""Where a rank's values are read from, and where new ones wait until all ranks have agreed on them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xffl.aggregation.layout import Layout
from xffl.aggregation.mean import piece_length, wide_type
from xffl.aggregation.plan import Bucket
from xffl.aggregation.pool import Pool
from xffl.aggregation.tracks import Track

__all__ = ["Staging"]


class Staging:
    """The buffers between the model and the exchange; local.

    :param layout: Where this rank's elements lie.
    :param device: Where the groups' backend communicates from.
    :param atomic: Whether new values are collected beside the model, one copy of what this rank holds.
    """

    def __init__(self, layout: Layout, device: torch.device, *, atomic: bool) -> None:
        self._layout = layout
        self._device = device
        self._atomic = atomic
        # Buffers are made in the first round and kept, since fresh memory is slow.
        self._packs = Pool(0, device)
        self._kept: dict[int, torch.Tensor] = {}
        self._has_room = False
        self._snapshots: dict[int, torch.Tensor] = {}
        self.stages: dict[int, torch.Tensor] = {}
        self._by_bucket: dict[int, tuple[torch.Tensor, ...]] = {}
        self.is_snapshot = self.keeps_snapshot = self._is_read_from_stage = False

    def begin(self, *, is_snapshot: bool, keeps_snapshot: bool) -> None:
        """Get ready for a round.

        :param is_snapshot: Whether values are copied before the exchange begins.
        :param keeps_snapshot: Whether that copy outlives the round.
        """
        self.is_snapshot, self.keeps_snapshot, self._is_read_from_stage = is_snapshot, keeps_snapshot, False
        while self._kept:  # of a round that did not take place
            self._packs.give(self._kept.popitem()[1])

    def make(self, tracks: Sequence[Track], pause_of: dict[int, int]) -> None:
        """Make what a round needs, so that it does not run out of memory on its way.

        :param tracks: The lanes of the round.
        :param pause_of: By lane, for how many buckets one is under way.
        """
        for track in tracks:
            for kept, is_needed in ((self.stages, self._atomic), (self._snapshots, self.keeps_snapshot)):
                if is_needed and track.number not in kept:
                    kept[track.number] = torch.empty(track.lane.numel, dtype=track.dtype, device=self._device)
            if track.is_late:
                self.stages_of(track)
        packed = [
            ((bucket.stop - bucket.start) * track.dtype.itemsize, pause_of[track.number])
            for track in tracks
            for bucket in (track.buckets if track.is_late or not self._atomic else ())
            if self._layout.run_of(bucket, self._device) is None
        ]
        count = min(len(packed), max((pause for _, pause in packed), default=0))
        self._has_room = count == len(packed)
        self._packs.reserve(count, max((nbytes for nbytes, _ in packed), default=0))

    def stage(self, track: Track, bucket: Bucket) -> torch.Tensor:
        """Return where a bucket's new values wait."""
        return self.stages[track.number][bucket.start : bucket.stop]

    def stages_of(self, track: Track) -> tuple[torch.Tensor, ...]:
        """Return where the values of each of a lane's buckets wait; kept, since to cut takes its time."""
        if track.number not in self._by_bucket:
            sizes = [bucket.stop - bucket.start for bucket in track.buckets]
            self._by_bucket[track.number] = self.stages[track.number].split_with_sizes(sizes)
        return self._by_bucket[track.number]

    def own(self, track: Track, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return where a bucket's values of this rank are read and written, and the buffer lent for that, if any."""
        if not self._atomic:
            values, lent = self.lend(track, bucket)
            return values, values, lent
        stage = self.stage(track, bucket)
        if track.lane.is_mean_at_home or self._is_read_from_stage:
            return stage, stage, None
        if self.is_snapshot:
            return self.copied(track, bucket), stage, None
        run = self._layout.run_of(bucket, self._device)
        return (stage if run is None else run), stage, None

    def lend(self, track: Track, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return where a bucket's values lie in the model, or a buffer to pack them into, which is lent."""
        run = self._layout.run_of(bucket, self._device)
        if run is not None:
            return run, None
        lent = self._kept.get(id(bucket))
        if lent is None:
            lent = self._packs.take((bucket.stop - bucket.start) * track.dtype.itemsize)
        return lent[: (bucket.stop - bucket.start) * track.dtype.itemsize].view(track.dtype), lent

    def copied(self, track: Track, bucket: Bucket) -> torch.Tensor:
        """Return a bucket as it was copied out of the model when the round began."""
        copy = self._snapshots if self.keeps_snapshot else self.stages
        return copy[track.number][bucket.start : bucket.stop]

    def give(self, lent: torch.Tensor | None) -> None:
        """Take back what was lent."""
        self._packs.give(lent)

    def keep(self, bucket: Bucket, lent: torch.Tensor | None) -> None:
        """Keep what :meth:`pack` has copied until :meth:`fill` asks for it, where there is room for all of a round."""
        if lent is not None and self._has_room:
            self._kept[id(bucket)] = lent
        else:
            self.give(lent)

    def fill(self, bucket: Bucket, values: torch.Tensor) -> None:
        """Copy a bucket out of the model into a buffer that was lent for it, unless it is there already."""
        if self._kept.pop(id(bucket), None) is None:
            self._layout.pack(bucket, values)

    def read_from_stages(self) -> None:
        """Read values from the stages from now on: something has written there what is to leave this rank."""
        self._is_read_from_stage = True

    def pack(self, track: Track, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Copy a bucket out of the model where it has to be.

        :param track: Its lane.
        :param bucket: The bucket.
        :return: Its values, and the buffer lent for them, if any.
        """
        values, _, lent = self.own(track, bucket)
        run = self._layout.run_of(bucket, self._device)
        if run is None or run.data_ptr() != values.data_ptr():
            self._layout.pack(bucket, values)
        return values, lent

    def merge(self, track: Track, bucket: Bucket, mean: torch.Tensor, alpha: float | None) -> None:
        """Write a mean into a model that has gone on since; ``mean`` itself stays what all ranks agreed on."""
        lent = self._packs.take(mean.nbytes)
        local = lent[: mean.nbytes].view(mean.dtype)
        self._layout.pack(bucket, local)
        copy = mean if alpha is not None else self._snapshots[track.number][bucket.start : bucket.stop]
        # Piece by piece on a CPU: what is computed stays in its cache, and in memory that it has at hand.
        length = piece_length(local.device)
        for pieces in zip(*(torch.split(one, length) for one in (local, copy, mean)), strict=True):
            now, before, agreed = (piece.to(wide_type(mean.dtype)) for piece in pieces)  # rounded once
            if alpha is not None:
                merged = torch.lerp(agreed, now, alpha)
            else:  # what has not moved keeps the sign of a zero
                merged = torch.where(now == before, agreed, torch.sub(now, before).add_(agreed))
            pieces[0].copy_(merged)
        self._layout.unpack(bucket, local)
        self._packs.give(lent)
