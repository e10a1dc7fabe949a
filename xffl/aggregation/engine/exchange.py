"""The exchange: walk the plan's lanes, swap shards between cells, combine, and hand the result round at home.

One body for every layout, form and codec. A bucket's way is a generator, :meth:`Exchange._fly`, that pauses wherever
something has to arrive; :meth:`Exchange.run` keeps several under way, so that the slow link waits neither for the
processor nor for the home network. All ranks that take part in a lane run the same program on it.

A local failure (memory, a tensor that went away) does not stop the dance: the rank keeps sending and receiving, so that
nobody waits for it, and reports the failure to the vote. Only a failed communication stops it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import NamedTuple

import torch
import torch.distributed as dist

from xffl.aggregation.algorithms.combiners import CellStats, Combiner, WeightedCombiner, total_of
from xffl.aggregation.compression.error_feedback import ResidualStore
from xffl.aggregation.engine.buffers import Layout, Pool, Staging, aligned
from xffl.aggregation.engine.global_model import GlobalState
from xffl.aggregation.engine.groups import Progress, Routes, start_moves
from xffl.aggregation.engine.plan import Bucket, Track, Turnout
from xffl.aggregation.engine.transport import TAG, Crossing, add_distances
from xffl.aggregation.mean import weighted_mean
from xffl.aggregation.options import Options
from xffl.aggregation.privacy.differential import Accountant, Privacy, privatize
from xffl.aggregation.privacy.secure_sum import Masker
from xffl.aggregation.report import Journal
from xffl.costs import MOST_IN_FLIGHT
from xffl.distributed.consistency import control_device
from xffl.topology import Topology

__all__ = ["Exchange", "Findings", "Flights", "Late", "Looks", "Protection", "energy_of", "weighed"]


HOME_LAG = 2
"""Buckets after which a broadcast at home is waited for: the next one is combined meanwhile."""


class Exchange:
    """Everything that one rank moves in a round.

    With ``atomic`` the new values are collected beside the model, one copy of this rank's shard, until :meth:`commit`
    writes them; else they are written bucket by bucket.

    :param layout: Where this rank's elements lie.
    :param tracks: All lanes of this rank.
    :param crossing: The slow link.
    :param topology: The federation.
    :param rank: This rank.
    :param routes: Its process groups.
    :param device: Where buffers live: where the groups' backend communicates from.
    :param options: What the aggregator was asked for.
    :param agreed: The last agreed model, where the options need it.
    :param progress: How far the host is ahead of a GPU.
    :param masker: The masks of a secure sum.
    """

    def __init__(
        self,
        layout: Layout,
        tracks: Sequence[Track],
        crossing: Crossing,
        *,
        topology: Topology,
        rank: int,
        routes: Routes,
        device: torch.device,
        options: Options,
        agreed: GlobalState | None,
        progress: Progress,
        masker: Masker | None,
    ) -> None:
        self._layout = layout
        self._tracks = tuple(tracks)
        self._crossing = crossing
        self._device = device
        self._atomic = options.atomic
        self._topology = topology
        self._cell = topology.cell_of(rank)
        self._routes = routes
        self.combiner = options.combiner
        self._is_gathering = isinstance(self.combiner, WeightedCombiner) and self.combiner.needs_distances
        self.agreed, self._progress = agreed, progress
        self.has_norms = options.has_norms
        privacy = options.privacy
        self._protection = None if privacy is None else Protection(privacy, routes.first + rank, masker)
        self.masker = masker
        self.turnout = Turnout((1.0,), 0)
        # Buffers are made in the first round and kept, since fresh memory is slow.
        self._homes = Pool(0, device)
        self._staging = Staging(layout, device, atomic=options.atomic)
        self.memory = ResidualStore(tracks, crossing.feedback)
        self.journal = Journal(device)
        self._late = Late(layout, self._staging, crossing, routes, self._cell)

    @property
    def accountant(self) -> Accountant | None:
        """What privacy has cost so far; ``None`` where rounds are not private."""
        return None if self._protection is None else self._protection.accountant

    @property
    def needs_one_arithmetic(self) -> bool:
        """Whether ranks compute new values by themselves, beyond the mean."""
        has_scale = isinstance(self.combiner, WeightedCombiner) and self.combiner.has_scale
        return has_scale or (self.agreed is not None and self.agreed.has_optimizer)

    @torch.no_grad()
    def look(self, fragment: int, *, is_snapshot: bool = False, keeps_snapshot: bool = False) -> Findings:
        """Look the tensors up and read those of this round that this rank sends; local.

        What is combined late is looked at when it is sent, while the processor has it at hand: see :meth:`settle`.

        :param fragment: The part of the model that takes part in the round.
        :param is_snapshot: Whether the model may change before the round has read it: then all of it is copied now.
        :param keeps_snapshot: Whether that copy is to outlive the round, on every rank.
        :return: What was found.
        """
        self.journal = Journal(self._device, self.journal)
        self._progress.forget()
        self.memory.begin()
        self._staging.begin(is_snapshot=is_snapshot or self._protection is not None, keeps_snapshot=keeps_snapshot)
        with self.journal.phase("pack"):
            self._layout.look_up()
            # Buffers outlive the round, so they must not be inference tensors if that is where the round takes place.
            with torch.inference_mode(False):
                self._make_buffers(fragment)
            self._late.begin()
            looks = Looks(self._layout)
            norms: list[torch.Tensor] = []
            for track, bucket in self._walk(fragment):
                if track.is_late:
                    continue
                is_carrier = self._crossing.carriers.is_here(track.lane, bucket)
                if keeps_snapshot or track.lane.is_mean_at_home or is_carrier:
                    values, lent = self._staging.pack(track, bucket)
                    if track.lane.rule == "average":
                        looks.add(bucket, values)
                    if is_carrier and self.has_norms and track.lane.is_stepped:
                        assert self.agreed is not None
                        norms.append(self.agreed.squared_distance(track, bucket, values))
                    self._staging.keep(bucket, lent)
            return looks.findings()._replace(norm=total_of(torch.stack(norms).tolist() if norms else ()))

    def check(self, turnout: Turnout) -> None:
        """Raise where these cells cannot be combined as was asked; pure, the same on all ranks.

        :param turnout: Whose values count.
        :raises Exception: whatever the combiner or the secure sum has against it.
        """
        self.combiner.check(len(turnout.cells))
        if self.masker is not None:
            self.masker.check(turnout.cells)
        if not self._is_gathering:
            weighed(turnout, self.combiner)

    @torch.no_grad()
    def run(self, turnout: Turnout, fragment: int) -> None:
        """Swap, combine and hand round every bucket of every lane, once :meth:`look` has read them.

        Collective over the world; a GPU has done its part then. Afterwards :attr:`journal` tells what this rank sent,
        how long it took, and what failed here, and :attr:`turnout` what the cells counted for.

        :param turnout: Whose values count; the same on all ranks.
        :param fragment: As in :meth:`look`.
        """
        self.turnout = turnout if self._is_gathering else weighed(turnout, self.combiner)
        if self.masker is not None:
            self.masker.begin(turnout.attempt, turnout.cells)
        self._crossing.begin(self.turnout, self.journal)
        if self._protection is not None:
            assert self.agreed is not None
            self._protection.apply(
                list(self._carried(fragment)),
                self.agreed,
                self._staging,
                self.journal,
                cells=turnout.cells,
                cell=self._cell,
                home=self._routes.cell,
            )
        if not self._is_gathering:
            self._march(fragment, self._fly)
            return
        self._march(fragment, self._gather)
        with self.journal.phase("weigh"):
            distances = self._compare(fragment)
        self.turnout = weighed(turnout, self.combiner, distances)
        self._crossing.weigh(self.turnout)
        self._march(fragment, self._spread)

    def looked_late(self) -> Findings:
        """Return what was found in the values that are combined late, once :meth:`run` has sent them; local."""
        return self._late.findings()

    def settle(self, *, is_moderate: bool) -> None:
        """Go on with what all ranks have found in the values that are combined late; local.

        :param is_moderate: Whether none of them is so large that its square leaves fp32.
        """
        self.turnout = replace(self.turnout, is_fused=self.turnout.is_fused and is_moderate)

    def _march(self, fragment: int, start: Callable[[Track, Bucket], Iterator[int]]) -> None:
        """Start a flight for each bucket, in order, and keep several under way."""
        flights = Flights()
        before: tuple[object, ...] = ()
        for track in self._tracks_of(fragment):
            # Others are in step with this rank only as long as they walk the same lanes; and what is asked for is sent
            # in the same order only as long as it is asked for as far ahead.
            if track.pace != before or track.is_late:
                flights.drain()
            before = track.pace
            if track.is_late:
                self._late.swap(track, self.turnout, self.journal)
                continue
            for bucket in track.buckets:
                flights.start(start(track, bucket))
        flights.drain()
        self._progress.drain()

    def _compare(self, fragment: int) -> list[list[float]]:
        """Return the squared distances between all cells' models; collective over the world.

        The carriers of the first cell measure what they hold, and all ranks get the same sums from its first rank.
        """
        cells = self._topology.cells
        table = torch.zeros(cells, cells, dtype=torch.float64, device=self._device)
        if self._cell == 0:
            with self.journal.noting("weigh"):
                for track, bucket in self._carried(fragment):
                    rows = self._crossing.gathered.rows(track, bucket, self._kept_dtype(track))
                    add_distances(rows, self.turnout.cells, table)
        table = table.to(control_device(self._routes.world))
        if self._cell == 0 and self._routes.cell is not None:
            dist.all_reduce(table, group=self._routes.cell)
        dist.broadcast(table, src=self._routes.first, group=self._routes.world)
        distances: list[list[float]] = table.tolist()
        return distances

    @torch.no_grad()
    def commit(self, fragment: int, *, is_merged: bool = False, alpha: float | None = None) -> None:
        """Write the collected values into the model; local. Without ``atomic`` they are there already.

        Where another cell's values were collected and not the mean, the mean is written.

        :param fragment: As in :meth:`look`.
        :param is_merged: Whether the model has changed since and its changes count, by ``alpha``.
        :param alpha: The part of the model's value that stays; ``None``: what it has changed by since is added.
        """
        with self.journal.phase("commit"):
            if is_merged or self._staging.is_snapshot:
                self._layout.look_up()
            if self.agreed is not None:
                self.agreed.step(fragment, self._staging.stages, self.turnout.scale)
            self._late.write([track for track in self._tracks_of(fragment) if track.is_late], self.turnout)
            for track, bucket in self._walk(fragment) if self._atomic else ():
                if track.is_late:
                    continue
                mean = self._staging.stage(track, bucket)
                if is_merged and alpha != 0.0 and track.lane.rule == "average" and not track.lane.is_mean_at_home:
                    self._staging.merge(track, bucket, mean, alpha)
                else:
                    self._layout.unpack(bucket, mean)
            self.memory.settle(fragment, self._staging.stages)

    def carried_parts(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield what training changes of the model that this rank carries: tensor, first element, values; local."""
        for track in self._tracks:
            for bucket in track.buckets if track.lane.is_stepped else ():
                if not self._crossing.carriers.is_here(track.lane, bucket):
                    continue
                values = torch.empty(bucket.stop - bucket.start, dtype=track.dtype, device=self._device)
                self._layout.pack(bucket, values)
                sizes = [piece.stop - piece.start for piece in bucket.pieces]
                for piece, part in zip(bucket.pieces, torch.split(values, sizes), strict=True):
                    yield piece.item, piece.start, part

    def _make_buffers(self, fragment: int) -> None:
        """Make what a round needs, so that it does not run out of memory on its way."""
        tracks = self._tracks_of(fragment)
        pauses = {track.number: self._crossing.pause(track) + HOME_LAG for track in tracks}
        # What is combined late is free again once it has been sent; a few more spare small models a second packing.
        pauses |= {track.number: min(pauses[track.number], MOST_IN_FLIGHT) for track in tracks if track.is_late}
        self._staging.make(tracks, pauses)
        for track in tracks if self._is_gathering else ():
            if any(self._crossing.carriers.is_here(track.lane, bucket) for bucket in track.buckets):
                self._crossing.gathered.reserve(track, self._kept_dtype(track))
        self._crossing.reserve(tracks)
        homes = [
            aligned((bucket.stop - bucket.start) * track.dtype.itemsize) * track.home.size()
            for track, bucket in self._walk(fragment)
            if track.lane.is_mean_at_home and track.home is not None
        ]
        self._homes.reserve(bool(homes), max(homes, default=0))

    def _carried(self, fragment: int) -> Iterator[tuple[Track, Bucket]]:
        """Yield what this rank carries of what training changes."""
        for track, bucket in self._walk(fragment):
            if track.lane.is_stepped and self._crossing.carriers.is_here(track.lane, bucket):
                yield track, bucket

    def _walk(self, fragment: int) -> Iterator[tuple[Track, Bucket]]:
        return ((track, bucket) for track in self._tracks_of(fragment) for bucket in track.buckets)

    def _tracks_of(self, fragment: int) -> list[Track]:
        return [track for track in self._tracks if track.lane.fragment == fragment]

    def _fly(self, track: Track, bucket: Bucket) -> Iterator[int]:
        """Take one bucket from the model across and back; yields for how many buckets it can pause."""
        lane = track.lane
        values, out, lent = self._staging.own(track, bucket)
        if lent is not None:
            with self.journal.noting("pack"):
                self._staging.fill(bucket, values)
        if lane.is_mean_at_home and track.home is not None:
            self._mean_at_home(track.home, values)
        is_carrier = self._crossing.carriers.is_here(lane, bucket)
        if is_carrier:
            yield from self._crossing.carry(track, bucket, values, out, is_encoded=self._is_encoded(track))
        if track.home is not None:
            if not is_carrier:  # in step with the rank that is
                yield self._crossing.pause(track)
            yield from self._share(track, bucket, out, is_carrier=is_carrier)
        self._write(track, bucket, out, lent)

    def _gather(self, track: Track, bucket: Bucket) -> Iterator[int]:
        """Take one bucket to the other cells, and keep what comes back until all have been compared."""
        values, _, lent = self._staging.own(track, bucket)
        if lent is not None:
            with self.journal.noting("pack"):
                self._staging.fill(bucket, values)
        if track.lane.is_mean_at_home and track.home is not None:
            self._mean_at_home(track.home, values)
        if self._crossing.carriers.is_here(track.lane, bucket):
            yield from self._crossing.gather(track, bucket, values, is_encoded=self._is_encoded(track))
        self._staging.give(lent)

    def _spread(self, track: Track, bucket: Bucket) -> Iterator[int]:
        """Combine one bucket of what was kept, and hand it round."""
        _, out, lent = self._staging.own(track, bucket)
        is_carrier = self._crossing.carriers.is_here(track.lane, bucket)
        if is_carrier:
            self._crossing.settle(track, bucket, out, is_encoded=self._is_encoded(track))
        if track.home is not None:
            yield from self._share(track, bucket, out, is_carrier=is_carrier)
        self._write(track, bucket, out, lent)

    def _kept_dtype(self, track: Track) -> torch.dtype:
        return torch.float32 if self._is_encoded(track) else track.dtype

    def _is_encoded(self, track: Track) -> bool:
        return track.codec is not None and self.memory.is_encoding(track.lane.fragment)

    def _write(self, track: Track, bucket: Bucket, out: torch.Tensor, lent: torch.Tensor | None) -> None:
        """Write a bucket into the model, unless it waits for the commit."""
        if self._atomic:
            return
        with self.journal.noting("commit"):
            self._layout.unpack(bucket, out)
            feedback = self._crossing.feedback.get(track.number)
            if feedback is not None:
                feedback.reference[bucket.start : bucket.stop].copy_(out)
        self._staging.give(lent)

    def _mean_at_home(self, home: dist.ProcessGroup, values: torch.Tensor) -> None:
        """Replace a bucket by its mean over the ranks of ``home``, each counted alike."""
        with self.journal.phase("home"):
            lent = self._homes.take(aligned(values.nbytes) * home.size())
            rows = [row[: values.nbytes] for row in self._homes.rows(lent, torch.uint8, home.size())]
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
            source = self._routes.first + self._crossing.carriers.at_home(track.lane, bucket)
            work = dist.broadcast(values.view(torch.uint8), src=source, group=home, async_op=True)
        self.journal.bytes_home += values.nbytes * (home.size() - 1) if is_carrier else 0
        yield HOME_LAG
        with self.journal.phase("home"):
            work.wait()
        self._progress.note()


class Flights:
    """What is under way: iterators that yield for how many starts of others they can pause; local and deterministic."""

    def __init__(self) -> None:
        self._tick = 0
        # With their numbers, by the tick at which they go on.
        self._due: dict[int, list[tuple[int, Iterator[int]]]] = {}

    def start(self, flight: Iterator[int]) -> None:
        """Let one begin, and all whose time has come take their next step, in the order in which they began."""
        self._due.setdefault(self._tick, []).append((self._tick, flight))
        self._advance(self._tick)
        self._tick += 1

    def drain(self) -> None:
        """Let all come to their end."""
        while self._due:
            self._advance(min(self._due))

    def _advance(self, tick: int) -> None:
        for number, flight in sorted(self._due.pop(tick, ()), key=itemgetter(0)):
            if (pause := next(flight, None)) is not None:
                self._due.setdefault(tick + pause, []).append((number, flight))


class Late:
    """The lanes of a rank that are combined late, see :class:`~xffl.aggregation.engine.plan.Track`.

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


class Findings(NamedTuple):
    """What a rank has found in the values that it sends.

    :param nonfinite: Names of tensors to be averaged that hold a value which is not finite.
    :param is_moderate: Whether no value is so large that its square leaves fp32.
    :param norm: Squared L2 norm of what they differ by from the last agreed model; 0 where nobody asks.
    """

    nonfinite: list[str]
    is_moderate: bool
    norm: float = 0.0


class Looks:
    """Looks at the values of a round, bucket by bucket; local.

    :param layout: Where this rank's elements lie.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._energies: list[tuple[Bucket, torch.Tensor]] = []

    def add(self, bucket: Bucket, values: torch.Tensor) -> None:
        """Look at a bucket's values; a GPU is not waited for."""
        self._energies.append((bucket, energy_of(values)))

    def findings(self) -> Findings:
        """Return what was found in all of them."""
        energies = torch.stack([energy for _, energy in self._energies]).tolist() if self._energies else []
        found: set[int] = set()
        for (bucket, _), energy in zip(self._energies, energies, strict=True):
            if not math.isfinite(energy):
                found.update(self._layout.nonfinite(bucket))
        return Findings([self._layout.name(item) for item in sorted(found)], all(map(math.isfinite, energies)))


def energy_of(values: torch.Tensor) -> torch.Tensor:
    """Return a number that is finite only if all values are: the sum of squares, or of the values of a narrow type."""
    if not values.is_floating_point():
        return values.new_zeros((), dtype=torch.float32)
    if values.dtype.itemsize < 4:
        values = values.float() if values.dtype.itemsize == 1 else values  # torch adds no 8-bit floats up
        return values.sum(dtype=torch.float32)
    energy = values.dot(values)
    return energy if energy.dtype == torch.float32 else energy.float()


def weighed(turnout: Turnout, combiner: Combiner, distances: Sequence[Sequence[float]] | None = None) -> Turnout:
    """Let a combiner weigh the cells that contribute; pure, the same on all ranks.

    :param turnout: What all ranks know about them.
    :param combiner: The combiner; one that looks at every element by itself counts all cells alike.
    :param distances: Squared distances between all cells, where the combiner asks for them.
    :return: The turnout with counts and scale.
    """
    cells = turnout.cells
    if not isinstance(combiner, WeightedCombiner):
        return replace(turnout, counts=tuple(float(cell in cells) for cell in range(len(turnout.weights))))
    seen = CellStats(
        weights=tuple(turnout.weights[cell] for cell in cells),
        steps=tuple(turnout.steps[cell] for cell in cells),
        norms=None if turnout.norms is None else tuple(turnout.norms[cell] for cell in cells),
        distances=None if distances is None else tuple(tuple(distances[c][d] for d in cells) for c in cells),
    )
    result = combiner.weigh(seen)
    counts = dict(zip(cells, result.weights, strict=True))
    return replace(
        turnout, counts=tuple(counts.get(cell, 0.0) for cell in range(len(turnout.weights))), scale=result.scale
    )


class Protection:
    """One rank's clipping and noise, and what they have cost so far.

    :param privacy: What was asked for.
    :param rank: This rank.
    :param masker: The masks of a secure sum, if it is one.
    """

    def __init__(self, privacy: Privacy, rank: int, masker: Masker | None) -> None:
        self._privacy = privacy
        self._rank = rank
        self._masker = masker
        self.accountant = Accountant(privacy)

    def apply(
        self,
        carried: Sequence[tuple[Track, Bucket]],
        agreed: GlobalState,
        staging: Staging,
        journal: Journal,
        *,
        cells: Collection[int],
        cell: int,
        home: dist.ProcessGroup | None,
    ) -> None:
        """Clip this cell's update and add noise to what this rank carries of it, in the stages.

        Collective over the cell. The norm is added up inside the cell only: it tells about the data, too. Where
        something fails, nothing of the update is left in the stages, since they are sent all the same; and they are
        sent without masks, since masked they would bare the sum of the other cells, which then has too little noise.

        :param carried: The buckets that this rank carries.
        :param agreed: The last agreed model.
        :param staging: Where values are read from and collected.
        :param journal: Where seconds and failures are noted.
        :param cells: The cells that contribute.
        :param cell: This cell; where it does not contribute, nothing of it is sent, and nothing is done.
        :param home: The group of the cell; ``None`` where there is one rank.
        """
        self.accountant.spend(len(cells))  # also where the round is rejected later: it has been seen then
        if cell not in cells:
            return
        staging.read_from_stages()
        # What could not be measured is too long to be clipped, on all ranks of the cell.
        total = torch.full((), math.inf, dtype=torch.float64, device=agreed.device)
        with journal.noting("protect"):
            for track, bucket in carried:
                stage = staging.stage(track, bucket)
                values = staging.copied(track, bucket)
                if values.data_ptr() != stage.data_ptr():
                    stage.copy_(values)  # the snapshot is what later steps are measured from
            norms = [agreed.squared_distance(track, bucket, staging.stage(track, bucket)) for track, bucket in carried]
            total = torch.stack(norms).sum() if norms else torch.zeros_like(total)
        if home is not None:
            with journal.phase("home"):
                total = total.to(control_device(home))
                dist.all_reduce(total, group=home)
        protected = 0
        with journal.noting("protect"):
            scale = self._privacy.scale_of(math.sqrt(total.item()))
            deviation = self._privacy.deviation(len(cells))
            noise = self._privacy.noise_of(self._rank, self.accountant.rounds)
            for track, bucket in carried:
                privatize(staging.stage(track, bucket), agreed.written(track, bucket), scale, deviation, noise)
                protected += 1
        if journal.failure is None:
            return
        for track, bucket in carried[protected:]:
            staging.stage(track, bucket).zero_()
        if self._masker is not None:
            self._masker.abandon()
