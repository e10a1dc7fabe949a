"""Messages between ranks, and the transport of a bucket from cell to cell: as it is or encoded; in one hop or two."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from xffl.aggregation.algorithms.combiners import Combiner, Coordinatewise
from xffl.aggregation.arithmetic import combined, weighted_mean
from xffl.aggregation.engine.buffers import Copies, Pool, aligned
from xffl.aggregation.engine.groups import RoundGroups, RoundScope
from xffl.aggregation.engine.planning.transfers import Bucket, BucketRun, FragmentPlan, GroupTransfer, RoundContext
from xffl.aggregation.report import RoundProfile
from xffl.costs import MOST_IN_FLIGHT
from xffl.distributed.collectives import Group
from xffl.distributed.several_worlds.cross_world import WEIGHTS_TAG, CrossWorldGroup, Work

__all__ = ["CrossCellTransport", "Crossing", "ExactValues", "Link", "Move", "Progress", "start_moves"]


Move: TypeAlias = tuple[torch.Tensor, int]
"""What is sent or received, and the rank of the world at the other end."""


def start_moves(receive: Sequence[Move], send: Sequence[Move], group: Group | None, tag: int) -> list[Work]:
    """Start receiving from some ranks and sending to some; local, its peers do the same."""
    if not receive and not send:
        return []
    if (receive or send)[0][0].device.type != "cpu":
        # NCCL matches by order alone, so both directions start at once; and it does not know all types.
        assert not isinstance(group, CrossWorldGroup), "between worlds weights move over gloo"
        moves = [
            dist.P2POp(operation, values.view(torch.uint8), peer=peer, group=group, tag=tag)
            for operation, given in ((dist.irecv, receive), (dist.isend, send))
            for values, peer in given
        ]
        return list(dist.batch_isend_irecv(moves))
    transport = dist.group.WORLD if group is None else group
    assert transport is not None, "messages go over a world"
    # By the group itself: irecv and isend look at much more first, some hundred times in a round.
    works: list[Work] = []
    for values, peer in receive:
        works.append(transport.recv([values], _rank_in(transport, peer), tag))
    for values, peer in send:
        works.append(transport.send([values], _rank_in(transport, peer), tag))
    return works


def _rank_in(group: Group, rank: int) -> int:
    """Return which rank of a group a rank of this world is."""
    return rank - group.first if isinstance(group, CrossWorldGroup) else dist.get_group_rank(group, rank)


HASTE = 0.8
"""How much of a timeout the host waits for a GPU.

At the end of it NCCL ends the process, and counts from when a message is given, before it is noted here.
"""

POLL_S = 1e-4
"""How often a GPU is asked."""


class Progress:
    """Waits for a GPU some messages behind what it has been given; without a GPU gloo's own waits do that.

    NCCL's clock for a message starts when it is given, and ``work.wait()`` holds up the stream, not the host. If all of
    an exchange were given at once, its timeout would be one for the whole of it, and the host would learn of a peer
    that is gone from NCCL's watchdog, which ends the process. So the host waits, with a deadline, for what it gave
    :data:`~xffl.costs.MOST_IN_FLIGHT` messages before.
    """

    def __init__(self, device: torch.device, within_s: float) -> None:
        self._device = device
        self._within_s = HASTE * within_s
        self._marks: deque[tuple[torch.cuda.Event, float]] = deque()

    def note(self) -> None:
        """Note that the current stream waits for a message, and wait for one of those before."""
        if self._device.type == "cuda":
            mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
            mark.record(torch.cuda.current_stream(self._device))
            self._marks.append((mark, time.monotonic()))
            self._await(MOST_IN_FLIGHT)

    def drain(self) -> None:
        """Wait until the GPU has done all that the current stream was given."""
        if self._device.type == "cuda":
            self.note()
            self._await(0)

    def forget(self) -> None:
        """Begin anew, whatever became of the messages before."""
        self._marks.clear()

    def _await(self, behind: int) -> None:
        """Wait for all that was noted but the last few."""
        while len(self._marks) > behind:
            mark, noted = self._marks.popleft()
            while not mark.query():  # type: ignore[no-untyped-call]
                if time.monotonic() > noted + self._within_s:
                    raise RuntimeError(f"a rank did not answer within {self._within_s:g} s")
                time.sleep(POLL_S)


class Link:
    """The link between cells as one rank uses it: who sends what, and the buffers that rounds use again."""

    def __init__(
        self,
        transfers: Sequence[GroupTransfer],
        scope: RoundScope,
        round_groups: RoundGroups,
        combiner: Combiner,
        copies: Copies,
    ) -> None:
        self.sizes = scope.topology.sizes
        self.cells = scope.topology.cells
        self.rank = scope.rank
        self.number = scope.number
        self.is_elastic = scope.is_elastic
        self.cell = scope.topology.cell_of(scope.rank)
        self.others = [cell for cell in range(self.cells) if cell != self.cell]
        self.round_groups = round_groups
        self.arena = scope.arena
        self.copies = copies if scope.arena is None else scope.arena.copies
        self.combiner = combiner
        self.device = device = scope.device
        self.home_device = scope.home_device
        timeouts = scope.state.timeouts
        self.progress = self.home_progress = Progress(device, timeouts.across_s)
        if self.home_device is not None:  # as the groups that hand results on, which outlast the exchange
            self.home_progress = Progress(self.home_device, (timeouts.across_s + timeouts.session_s) / 2)
        self._needed: dict[int, int] = {}  # slots, by fragment
        # Buffers are made in the first round and kept, since fresh memory is slow.
        self.slots = Pool(max((self._slot_bytes(t, b) for t in transfers for b in t.buckets), default=0), device)
        # Hops for which each bucket of a group holds a slot, whatever arrives; by the number of the transfer.
        self._held: dict[int, int] = {}

    def hold_slots(self, transfer: GroupTransfer, nbytes: int, hops: int = 1) -> None:
        """Have each bucket of a group hold a slot of so many bytes for that many hops; before the first round."""
        self._held[transfer.number] = hops
        self.slots.widen(nbytes)

    def reserve(self, fragment: int, plan: FragmentPlan) -> None:
        """Make the buffers that a round over a fragment needs; local."""
        if fragment not in self._needed:
            self._needed[fragment] = max((self._at_a_time(run) for run in plan.runs), default=0)
        self.slots.reserve(self._needed[fragment])

    def _at_a_time(self, run: BucketRun) -> int:
        """Return how many slots are lent at a time while buckets follow each other."""
        under_way = max((t.ahead + t.depth * self._held.get(t.number, 1) for t, _ in run), default=0)
        sums = [0, *itertools.accumulate(self._takes_slot(transfer, bucket) for transfer, bucket in run)]
        return max(stop - start for start, stop in zip(sums, sums[under_way:] or sums[-1:], strict=False))

    def _takes_slot(self, transfer: GroupTransfer, bucket: Bucket) -> bool:
        if not transfer.sends[bucket.number]:
            return False
        here = transfer.parts(bucket)[self.cell]
        return here.stop > here.start or transfer.number in self._held

    def _slot_bytes(self, transfer: GroupTransfer, bucket: Bucket) -> int:
        """Return what a bucket needs for what arrives from each other cell."""
        numel = max(part.stop - part.start for part in transfer.parts(bucket))
        return aligned(numel * transfer.dtype.itemsize) * len(self.others)


class CrossCellTransport:
    """The exchange of buckets between cells in one round, among the senders of each bucket.

    All forms and encodings take the same steps, in :meth:`move`; what is sent, what arrives, and what is made of it is
    up to the payload: :class:`ExactValues`, or a class derived from it. In the all-gather form each cell combines all
    of a bucket, in the reduce-scatter form one part of it (:meth:`GroupTransfer.parts`), whose result a second hop
    sends to all cells.
    """

    def __init__(self, link: Link, context: RoundContext, profile: RoundProfile) -> None:
        self.link = link
        self.context = context
        self.profile = profile

    def move(self, payload: ExactValues) -> Iterator[int]:
        """Exchange a bucket with its senders in the other cells; yields how many buckets to start before it resumes."""
        transfer, bucket = payload.transfer, payload.bucket
        works: list[Work] = []
        receive = payload.receive
        if transfer.ahead:
            works = self._post(transfer, bucket=bucket, hop=1, send={}, receive=receive)
            receive = {}
            yield transfer.ahead
        with self.profile.capture_failure("pack"):
            self.link.copies.settle(bucket)
        payload.write()
        works += self._post(transfer, bucket=bucket, hop=1, send=payload.send, receive=receive)
        yield transfer.depth
        self._arrive(works)
        payload.combine()
        if transfer.reduce_scatter:
            works = self._post(transfer, bucket, 2, *payload.second_hop())
            yield transfer.depth
            self._arrive(works)
        payload.finish()

    def lose(self, lost: RuntimeError) -> None:
        """Where cells are worlds of their own, go on without one and let all others know; else raise the error.

        This rank goes on inside its cell, so that no replica waits, and votes no.
        """
        world = self.link.round_groups.world
        if not isinstance(world, CrossWorldGroup):
            raise lost
        self.profile.is_cut_off = True
        # Its lines say nothing that its text does not, but their calls, and who has called these, refer to the groups:
        # they would live until the garbage collector runs.
        lost.__traceback__ = None
        self._leave(lost, world)

    def fail(self, error: Exception) -> None:
        """Where cells may be lost, exchange nothing more, as a rank that has lost one; else raise the error.

        Elsewhere the other ranks of the cell, which have their result, would have said yes and not learn what others
        say: their model would be torn.
        """
        world = self.link.round_groups.world
        if not self.link.is_elastic or not isinstance(world, CrossWorldGroup):
            raise error
        self._leave(error, world)

    def _leave(self, error: Exception, world: CrossWorldGroup) -> None:
        self.profile.has_left = True
        self.profile.failure = self.profile.failure or error
        world.poison()

    def combine(self, transfer: GroupTransfer, values: list[torch.Tensor], out: torch.Tensor) -> None:
        """Combine the senders' values, in the order of the cells."""
        if transfer.group.rule == "first":
            out.copy_(values[0])
        elif isinstance(self.link.combiner, Coordinatewise):
            combined(self.link.combiner.combine, values, out)
        else:
            counts = tuple(self.context.counts[cell] for cell in self.context.source_cells(transfer.group))
            weighted_mean(values, counts, out)

    def _post(
        self,
        transfer: GroupTransfer,
        bucket: Bucket,
        hop: int,
        send: Mapping[int, torch.Tensor],
        receive: Mapping[int, torch.Tensor],
    ) -> list[Work]:
        """Start sending to other cells' senders of a bucket, and receiving from them."""
        if self.profile.has_left:
            return []
        groups = self.link.round_groups.across
        group = groups[bucket.number % len(groups)] if groups else None
        first = self.link.round_groups.first
        senders = transfer.senders[bucket.number]
        arriving: list[Move] = []
        for cell, values in receive.items():
            if values.numel():
                arriving.append((values, first + senders[cell]))
        leaving: list[Move] = []
        nbytes = 0
        for cell, values in send.items():
            if values.numel():
                leaving.append((values, first + senders[cell]))
                nbytes += values.nbytes
        if arriving or leaving:
            self.profile.record_send(nbytes)
        # Messages are matched by tag (the hop) and by order.
        with self.profile.phase("post"):
            try:
                return start_moves(arriving, leaving, group, WEIGHTS_TAG + hop)
            except RuntimeError as lost:
                self.lose(lost)
                return []

    def _arrive(self, works: list[Work]) -> None:
        if self.profile.has_left:
            return
        with self.profile.phase("across"):
            try:
                for work in works:
                    work.wait()
            except RuntimeError as lost:
                self.lose(lost)
        if works:
            self.profile.arrived()
            self.link.progress.note()


class Crossing(NamedTuple):
    """A bucket that this rank exchanges with its senders in the other cells."""

    transport: CrossCellTransport
    transfer: GroupTransfer
    bucket: Bucket
    values: torch.Tensor  # what this rank sends, as the model has it
    out: torch.Tensor  # where the result goes; may be the same memory


class ExactValues:
    """A bucket's values on their way, as they are.

    ``send`` and ``receive`` are what the first hop moves, by the other cell; the methods follow in the order in which
    :class:`CrossCellTransport` calls them.
    """

    send: dict[int, torch.Tensor]
    receive: dict[int, torch.Tensor]

    def __init__(self, crossing: Crossing) -> None:
        self.transport = crossing.transport
        self.link = crossing.transport.link
        self.transfer = crossing.transfer
        self.bucket = crossing.bucket
        self.values = crossing.values
        self.out = crossing.out
        self.here = self.link.cell
        self.others = self.link.others
        self.sources = self.transport.context.source_cells(self.transfer.group)
        self.is_source = self.here in self.sources
        self.arriving = list(self.sources)
        if self.is_source:
            self.arriving.remove(self.here)
        self.slot: torch.Tensor | None = None
        self.prepare()

    def prepare(self) -> None:
        """Find what the first hop moves, and where."""
        parts = self.transfer.cut(self.bucket, self.values)
        self.results = parts if self.out is self.values else self.transfer.cut(self.bucket, self.out)
        own = parts[self.here]
        self.held = {self.here: own}
        arriving = list(self.arriving)
        if arriving and self.out.data_ptr() != self.values.data_ptr():
            self.held[arriving.pop()] = self.results[self.here]  # combined where it arrives
        if arriving and own.numel():
            self.slot = self.link.slots.acquire()
            rows = self.link.slots.rows(self.slot, self.transfer.dtype, len(self.others))
            for cell, row in zip(arriving, rows, strict=False):
                self.held[cell] = row[: own.numel()]
        self.send = {}
        self.receive = {}
        for cell in self.others:
            if self.is_source:
                self.send[cell] = parts[cell]
            if cell in self.held:
                self.receive[cell] = self.held[cell]

    def write(self) -> None:
        """Write what is sent, just before it is sent."""

    def combine(self) -> None:
        """Combine what has arrived."""
        result = self.results[self.here]
        if result.numel():
            with self.transport.profile.capture_failure("combine"):
                values = [self.held[cell] for cell in self.sources]
                self.transport.combine(self.transfer, values, result)
        self.link.slots.release(self.slot)

    def second_hop(self) -> tuple[Mapping[int, torch.Tensor], Mapping[int, torch.Tensor]]:
        """Return what to send of the result and where to receive the others' results, by the other cell."""
        return dict.fromkeys(self.others, self.results[self.here]), {cell: self.results[cell] for cell in self.others}

    def finish(self) -> None:
        """Take over what all cells have made of the bucket."""
