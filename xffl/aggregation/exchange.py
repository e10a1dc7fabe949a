"""The exchange: walk the plan's lanes, swap shards between cells, combine, and hand the result round at home.

One body for every layout, form and codec. A bucket's way is a generator, :meth:`Exchange._fly`, that pauses wherever
something has to arrive; :meth:`Exchange.run` keeps several under way, so that the slow link waits neither for the
processor nor for the home network. All ranks that take part in a lane run the same program on it.

A local failure (memory, a tensor that went away) does not stop the dance: the rank keeps sending and receiving, so that
nobody waits for it, and reports the failure to the vote. Only a failed communication stops it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from xffl.aggregation.crossing import Crossing
from xffl.aggregation.journal import Journal
from xffl.aggregation.layout import Layout
from xffl.aggregation.manifest import Manifest
from xffl.aggregation.mean import weighted_mean
from xffl.aggregation.plan import Bucket, Item, plan_lanes
from xffl.aggregation.pool import Pool, aligned, rows_of
from xffl.aggregation.routes import Routes
from xffl.aggregation.tracks import Track, Turnout, make_tracks
from xffl.errors import CheckpointError
from xffl.topology import Topology

__all__ = ["Exchange", "make_exchange"]

HOME_LAG = 2
"""Buckets after which a broadcast at home is waited for: the next one is combined meanwhile."""


class Exchange:
    """Everything that one rank moves in a round.

    With ``atomic`` the new values are collected beside the model, one copy of this rank's shard, until :meth:`commit`
    writes them; else they are written bucket by bucket.

    :param layout: Where this rank's elements lie.
    :param tracks: All lanes of this rank.
    :param crossing: The slow link.
    :param device: Where buffers live: where the groups' backend communicates from.
    :param atomic: Whether new values wait for :meth:`commit`.
    """

    def __init__(
        self, layout: Layout, tracks: Sequence[Track], crossing: Crossing, *, device: torch.device, atomic: bool
    ) -> None:
        self._layout = layout
        self._tracks = tuple(tracks)
        self._crossing = crossing
        self._device = device
        self._atomic = atomic
        # Buffers are made in the first round and kept, since fresh memory is slow.
        self._packs = Pool(0, device)
        self._homes = Pool(0, device)
        self._stages: dict[int, torch.Tensor] = {}
        self._seeded: set[int] = set()
        self._snapshots: dict[int, torch.Tensor] = {}
        self._is_snapshot = self._keeps_snapshot = False
        self.journal = Journal()

    @property
    def codec_error(self) -> float | None:
        """Error of what this rank sent in the last round, relative to what it had to send, in the L2 norm."""
        norms = [norm for feedback in self._crossing.feedback.values() for norm in feedback.norms()]
        if not norms:
            return None
        whole = sum(norm[0] for norm in norms)
        return math.sqrt(sum(norm[1] for norm in norms) / whole) if whole else 0.0

    @torch.no_grad()
    def look(self, fragment: int, *, is_snapshot: bool = False, keeps_snapshot: bool = False) -> tuple[list[str], bool]:
        """Look the tensors up and read those of this round that this rank sends; local.

        :param fragment: The part of the model that takes part in the round.
        :param is_snapshot: Whether the model may change before the round has read it: then all of it is copied now.
        :param keeps_snapshot: Whether that copy is to outlive the round, on every rank.
        :return: The names of tensors to be averaged that hold a value which is not finite, and whether no value is so
            large that its square leaves fp32.
        """
        self.journal = Journal()
        self._is_snapshot, self._keeps_snapshot = is_snapshot, keeps_snapshot
        with self.journal.phase("pack"):
            self._layout.look_up()
            # Buffers outlive the round, so they must not be inference tensors if that is where the round takes place.
            with torch.inference_mode(False):
                self._make_buffers(fragment)
            looks: list[tuple[Bucket, torch.Tensor]] = []
            for track, bucket in self._walk(fragment):
                if keeps_snapshot or track.lane.is_mean_at_home or self._crossing.is_carrier(track.lane, bucket):
                    looks += self._look(track, bucket)
            energies = torch.stack([energy for _, energy in looks]).tolist() if looks else []
            found: set[int] = set()
            for (bucket, _), energy in zip(looks, energies, strict=True):
                if not math.isfinite(energy):
                    found.update(self._layout.nonfinite(bucket))
        return [self._layout.name(item) for item in sorted(found)], all(map(math.isfinite, energies))

    @torch.no_grad()
    def run(self, turnout: Turnout, fragment: int) -> None:
        """Swap, combine and hand round every bucket of every lane, once :meth:`look` has read them.

        Collective over the world. Afterwards :attr:`journal` tells what this rank sent, how long it took, and what
        failed here.

        :param turnout: Whose values count; the same on all ranks.
        :param fragment: As in :meth:`look`.
        """
        self._crossing.begin(turnout, self.journal)
        flights: list[tuple[int, Iterator[int]]] = []
        before: tuple[object, ...] = ()
        for tick, (track, bucket) in enumerate(self._walk(fragment)):
            if track.lane.participants != before:
                # Others are in step with this rank only as long as they walk the same lanes.
                self._drain(flights)
            before = track.lane.participants
            flights[:] = self._advance(flights, tick)
            flight = self._fly(track, bucket)
            flights += [(tick + pause, flight) for pause in (next(flight, None),) if pause is not None]
        self._drain(flights)

    @torch.no_grad()
    def commit(self, fragment: int, *, is_merged: bool = False, alpha: float | None = None) -> None:
        """Write the collected values into the model; local. Without ``atomic`` they are there already.

        :param fragment: As in :meth:`look`.
        :param is_merged: Whether the model has changed since and its changes count, by ``alpha``.
        :param alpha: The part of the model's value that stays; ``None``: what it has changed by since is added.
        """
        with self.journal.phase("commit"):
            if is_merged or self._is_snapshot:
                self._layout.look_up()
            for track, bucket in self._walk(fragment) if self._atomic else ():
                mean = self._stages[track.number][bucket.start : bucket.stop]
                if is_merged and alpha != 0.0 and track.lane.rule == "average" and not track.lane.is_mean_at_home:
                    self._merge(track, bucket, mean, alpha)
                else:
                    self._layout.unpack(bucket, mean)
            for track in self._tracks:
                feedback = self._crossing.feedback.get(track.number)
                if feedback is not None and track.lane.fragment == fragment:
                    spare = feedback.settle(self._stages.get(track.number))
                    if spare is not None:
                        self._stages[track.number] = spare
            self._seeded.add(fragment)

    def _merge(self, track: Track, bucket: Bucket, mean: torch.Tensor, alpha: float | None) -> None:
        """Write a mean into a model that has gone on since; ``mean`` itself stays what all ranks agreed on."""
        lent = self._packs.take(mean.nbytes)
        local = lent[: mean.nbytes].view(mean.dtype)
        self._layout.pack(bucket, local)
        if alpha is not None:
            torch.lerp(mean, local, alpha, out=local)
        else:
            copy = self._snapshots[track.number][bucket.start : bucket.stop]
            wide = torch.promote_types(mean.dtype, torch.float32)  # rounded once
            moved = torch.sub(local.to(wide), copy).add_(mean)
            local.copy_(torch.where(local == copy, mean.to(wide), moved))  # what has not moved keeps the sign of a zero
        self._layout.unpack(bucket, local)
        self._packs.give(lent)

    def is_encoding(self, fragment: int) -> bool:
        """Tell whether a round has made the agreed state that lossy codecs start from."""
        return fragment in self._seeded

    def state_dict(self, plan: str) -> dict[str, Any]:
        """Return what lossy codecs carry from round to round on this rank.

        That is which fragments have an agreed state, and by lane that state and what is still to be sent.

        :param plan: What the lanes and buckets follow from.
        :return: Copies.
        """
        memory = self._crossing.feedback
        lanes = {str(self._tracks[number].lane.key): feedback.state_dict() for number, feedback in memory.items()}
        return {"plan": plan, "seeded": sorted(self._seeded), "lanes": lanes}

    def load_state_dict(self, state: Mapping[str, Any], plan: str) -> None:
        """Take over what :meth:`state_dict` returned on this rank.

        :param state: The saved state.
        :param plan: What the lanes and buckets follow from.
        :raises CheckpointError: if it is that of another exchange.
        """
        if state["plan"] != plan:
            raise CheckpointError(
                f"the codecs' memory is that of another exchange ({state['plan']}) than this one ({plan}); resume with "
                "the same model, federation, bucket_bytes, form, rails and codec"
            )
        self.forget()
        for number, feedback in self._crossing.feedback.items():
            if self._tracks[number].lane.fragment in state["seeded"]:
                feedback.load_state_dict(state["lanes"].get(str(self._tracks[number].lane.key), {}))
        self._seeded = set(state["seeded"])

    def forget(self) -> None:
        """Forget what lossy codecs remember, where cells may no longer have the same: the next round is exact."""
        self._seeded.clear()
        for feedback in self._crossing.feedback.values():
            feedback.forget()

    def _walk(self, fragment: int) -> Iterator[tuple[Track, Bucket]]:
        for track in self._tracks:
            if track.lane.fragment == fragment:
                for bucket in track.buckets:
                    yield track, bucket

    def _make_buffers(self, fragment: int) -> None:
        """Make what a round needs, so that it does not run out of memory on its way."""
        tracks = [track for track in self._tracks if track.lane.fragment == fragment]
        for track in tracks:
            for kept, is_needed in ((self._stages, self._atomic), (self._snapshots, self._keeps_snapshot)):
                if is_needed and track.number not in kept:
                    kept[track.number] = torch.empty(track.lane.numel, dtype=track.dtype, device=self._device)
        self._crossing.reserve(tracks)
        homes = [
            aligned((bucket.stop - bucket.start) * track.dtype.itemsize) * track.home.size()
            for track, bucket in self._walk(fragment)
            if track.lane.is_mean_at_home and track.home is not None
        ]
        self._homes.reserve(bool(homes), max(homes, default=0))
        if not self._atomic:
            packed = [
                ((bucket.stop - bucket.start) * track.dtype.itemsize, self._crossing.pause(track) + HOME_LAG)
                for track, bucket in self._walk(fragment)
                if self._layout.run_of(bucket, self._device) is None
            ]
            count = min(len(packed), max((pause for _, pause in packed), default=0))
            self._packs.reserve(count, max((nbytes for nbytes, _ in packed), default=0))

    def _own(self, track: Track, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return where a bucket's values of this rank are read and written, and the buffer lent for that, if any."""
        run = self._layout.run_of(bucket, self._device)
        if self._atomic:
            stage = self._stages[track.number][bucket.start : bucket.stop]
            if track.lane.is_mean_at_home:
                return stage, stage, None
            if self._is_snapshot:
                copy = self._snapshots if self._keeps_snapshot else self._stages
                return copy[track.number][bucket.start : bucket.stop], stage, None
            return (stage if run is None else run), stage, None
        if run is not None:
            return run, run, None
        lent = self._packs.take((bucket.stop - bucket.start) * track.dtype.itemsize)
        values = lent[: (bucket.stop - bucket.start) * track.dtype.itemsize].view(track.dtype)
        return values, values, lent

    def _look(self, track: Track, bucket: Bucket) -> list[tuple[Bucket, torch.Tensor]]:
        """Pack a bucket where it has to be, and measure it: the sum of squares is finite only if all values are."""
        values, _, lent = self._own(track, bucket)
        run = self._layout.run_of(bucket, self._device)
        if run is None or run.data_ptr() != values.data_ptr():
            self._layout.pack(bucket, values)
        if lent is not None:
            self._packs.give(lent)
        if track.lane.rule != "average":
            return []
        return [(bucket, _energy(values))]

    def _advance(self, flights: list[tuple[int, Iterator[int]]], tick: int) -> list[tuple[int, Iterator[int]]]:
        """Let the flights whose time has come take their next step, in order; return those still under way."""
        left = []
        for due, flight in flights:
            if due > tick:
                left.append((due, flight))
            elif (pause := next(flight, None)) is not None:
                left.append((tick + pause, flight))
        return left

    def _drain(self, flights: list[tuple[int, Iterator[int]]]) -> None:
        while flights:
            flights[:] = self._advance(flights, min(due for due, _ in flights))

    def _fly(self, track: Track, bucket: Bucket) -> Iterator[int]:
        """Take one bucket from the model across and back; yields for how many buckets it can pause."""
        lane = track.lane
        values, out, lent = self._own(track, bucket)
        if lent is not None:
            with self.journal.noting("pack"):
                self._layout.pack(bucket, values)
        if lane.is_mean_at_home and track.home is not None:
            self._mean_at_home(track.home, values)
        is_carrier = self._crossing.is_carrier(lane, bucket)
        if is_carrier:
            is_encoded = track.codec is not None and lane.fragment in self._seeded
            yield from self._crossing.carry(track, bucket, values, out, is_encoded=is_encoded)
        if track.home is not None:
            if not is_carrier:  # in step with the rank that is
                yield self._crossing.pause(track)
            yield from self._share(track, bucket, out, is_carrier=is_carrier)
        if self._atomic:
            return
        with self.journal.noting("commit"):
            self._layout.unpack(bucket, out)
            feedback = self._crossing.feedback.get(track.number)
            if feedback is not None:
                feedback.reference[bucket.start : bucket.stop].copy_(out)
        if lent is not None:
            self._packs.give(lent)

    def _mean_at_home(self, home: dist.ProcessGroup, values: torch.Tensor) -> None:
        """Replace a bucket by its mean over the ranks of ``home``, each counted alike."""
        with self.journal.phase("home"):
            lent = self._homes.take(aligned(values.nbytes) * home.size())
            rows = rows_of(lent, values.nbytes, home.size())
            dist.all_gather(rows, values.view(torch.uint8), group=home)
            self.journal.bytes_home += values.nbytes * (len(rows) - 1)
        with self.journal.noting("combine"):
            weighted_mean([row.view(values.dtype) for row in rows], [1.0] * len(rows), values)
        self._homes.give(lent)

    def _share(self, track: Track, bucket: Bucket, values: torch.Tensor, *, is_carrier: bool) -> Iterator[int]:
        """Hand a result round at home."""
        home = track.home
        assert home is not None
        with self.journal.phase("home"):
            source = self._crossing.carrier(track.lane, bucket)
            work = dist.broadcast(values.view(torch.uint8), src=source, group=home, async_op=True)
        self.journal.bytes_home += values.nbytes * (home.size() - 1) if is_carrier else 0
        yield HOME_LAG
        with self.journal.phase("home"):
            work.wait()


def make_exchange(
    manifest: Manifest,
    items: Sequence[Item],
    axes: Sequence[Sequence[int]],
    *,
    topology: Topology,
    rank: int,
    routes: Routes,
    device: torch.device,
    bucket_bytes: int,
    form: str,
    atomic: bool,
) -> Exchange:
    """Plan a rank's lanes and prepare what walks them; local.

    :param manifest: The tensors of the model.
    :param items: Those that move, as the plan sees them.
    :param axes: For each cell, the axis along which it cuts each of them.
    :param topology: The federation.
    :param rank: This rank.
    :param routes: Its process groups.
    :param device: Where the groups' backend communicates from.
    :param bucket_bytes: Bytes of a bucket, at most.
    :param form: One of :data:`xffl.aggregation.plan.FORMS`.
    :param atomic: Whether new values wait for :meth:`Exchange.commit`.
    :return: The exchange.
    """
    tracks = make_tracks(
        plan_lanes(items, topology, rank),
        topology=topology,
        rank=rank,
        routes=routes,
        bucket_bytes=bucket_bytes,
        form=form,
        codecs=manifest.codecs,
    )
    crossing = Crossing(tracks, topology, rank, routes, device)
    layout = Layout(manifest.moving, items, axes, topology.coordinates(rank), is_written_in_place=not atomic)
    return Exchange(layout, tracks, crossing, device=device, atomic=atomic)


def _energy(values: torch.Tensor) -> torch.Tensor:
    """Return a number that is finite only if all values are: the sum of squares, or of the values of a narrow type."""
    if not values.is_floating_point():
        return values.new_zeros((), dtype=torch.float32)
    if values.dtype.itemsize < 4:
        values = values.float() if values.dtype.itemsize == 1 else values  # torch adds no 8-bit floats up
        return values.sum(dtype=torch.float32)
    return values.dot(values).float()
