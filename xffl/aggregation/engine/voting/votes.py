"""A vote: what each rank says in it, as bytes, and how all ranks learn what everybody has said.

:mod:`xffl.aggregation.engine.decision.consensus` decides what follows.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from xffl.aggregation.engine.transport import Move, Progress, start_moves
from xffl.compat.gloo_connections import is_lazy
from xffl.costs import STATUS_BYTES, peers_in_votes
from xffl.distributed.collectives import Group, group_size
from xffl.distributed.several_worlds.cross_world import CrossWorldGroup
from xffl.topology import Topology

__all__ = [
    "MOST_NUMBERS",
    "PACKED",
    "MergeMode",
    "RoundStatus",
    "Seal",
    "VotePhase",
    "VoteTree",
    "Votes",
    "by_cell",
    "swap",
]


VOTE_TAG = 7_001
"""Tells a vote's messages from those that a caller sends over the same group."""


class VotePhase(IntEnum):
    """The votes of a round (two-phase commit)."""

    PREPARE = 0  # whether the round takes place, and what each cell counts for
    COMMIT = 1  # whether all ranks have the result
    # Before COMMIT, what ranks have combined: where all have to know it before they write, and a rank may have to write
    # without having heard how COMMIT went.
    RESULT = 2
    SEAL = 3  # after COMMIT, in an elastic federation: whether the round's record stands in the journal


class Seal(IntEnum):
    """What a rank knows of the record without which the round does not count; see RoundScope."""

    NOT_ASKED = 0  # another rank publishes it
    STANDS = 1
    OTHER_STANDS = 2  # another record has its number
    UNKNOWN = 3  # the journal did not answer


class MergeMode(IntEnum):
    """How a rank writes the result of a round into its model."""

    REPLACE = 0  # it takes the place of the old values
    BLEND = 1  # alpha * local + (1 - alpha) * result, of a round that went on behind local steps
    KEEP_STEPS = 2  # result + (local - copy): the steps made meanwhile stay


# The bytes do not depend on the machine; each number begins a word of eight bytes, as ballots.py needs it.
MOST_NUMBERS = 8
"""Numbers of a server's step that a vote has room for."""

_FIELDS = f"<3q5d8?3B5x2q2?6xd{MOST_NUMBERS}d"
PACKED = struct.Struct(f"{_FIELDS}{STATUS_BYTES - struct.calcsize(_FIELDS)}x")
"""A status as bytes: three integers, five numbers, eight flags, three enums, two integers, two flags, nine
numbers."""


class RoundStatus(NamedTuple):
    """What one rank says in one vote of a round; the fields are in the order of :data:`PACKED`."""

    round: int  # number of the round that the rank believes to be in
    aggregator: int = 0  # number of the aggregator whose round it is, see consensus.RoundCoordinator
    attempt: int = 0  # the next number of masks that it can use in a secure sum
    weight: float = 0.0  # its count; 1 where cells count alike
    alpha: float = 0.0  # the part of a local value that stays, with MergeMode.BLEND
    norm: float = 0.0  # squared L2 norm of its part of the cell's update, where that is measured
    steps: float = 0.0  # effective local steps of its cell since the last round
    seconds: float = 0.0  # seconds of a local step here; 0 where nobody has measured
    is_flushing: bool = False  # its thread takes subnormal numbers for zero
    is_uniform: bool = False  # it gave no count
    is_absent: bool = False  # it has nothing to contribute any more
    is_finished: bool = False  # its cell has no more steps to make
    is_nonfinite: bool = False  # it holds a value that is not finite
    is_failed: bool = False  # it cannot go on; the reason is gathered afterwards
    is_cut_off: bool = False  # it lost a rank of another cell
    is_encoding: bool = False  # it knows the agreed state that lossy codecs start from
    phase: VotePhase = VotePhase.PREPARE
    merge: MergeMode = MergeMode.REPLACE
    seal: Seal = Seal.NOT_ASKED
    held: int = 0  # see first_round.ValueDigest, in a first round
    shared: int = 0
    is_trained: bool = False
    is_accepted: bool = False  # see fitting_cells.AcceptedTraits, between jobs
    square: float = 0.0  # squared L2 norm of its part of the mean pseudo-gradient, where steps are clipped
    numbers: tuple[float, ...] = ()  # what it would step its part of the global model with, at most MOST_NUMBERS

    @property
    def merge_text(self) -> str:
        """How it writes the result, for messages."""
        return {MergeMode.REPLACE: "aggregate", MergeMode.KEEP_STEPS: "no alpha"}.get(self.merge, f"alpha={self.alpha}")

    def packed(self) -> bytes:
        """Return it as bytes; numbers that it has not are zeros."""
        *plain, numbers = self
        return PACKED.pack(*plain, *numbers, *(0.0,) * (MOST_NUMBERS - len(numbers)))

    @classmethod
    def unpacked(cls, values: tuple[Any, ...]) -> RoundStatus:
        """Return the status whose bytes hold these values."""
        status = cls._make((*values[:-MOST_NUMBERS], values[-MOST_NUMBERS:]))
        return status._replace(
            phase=VotePhase(status.phase),
            merge=MergeMode(status.merge),
            seal=Seal(status.seal),
        )


def by_cell(values: Sequence[float], topology: Topology, of: Callable[[Sequence[float]], float]) -> tuple[float, ...]:
    """Fold one value of each rank into one number for each cell; pure."""
    folded: list[float] = []
    for start, stop in pairwise(topology.offsets):
        folded.append(of(values[start:stop]))
    return tuple(folded)


class Votes(Protocol):
    """How all ranks learn what everybody says in a vote; see :class:`VoteTree`."""

    def connect(self, group: Group | None, within_s: float) -> None:
        """Open the connections of votes where a large group has those of collectives alone; collective."""

    def gather(self, status: RoundStatus, group: Group | None, within_s: float) -> list[RoundStatus]:
        """Give this rank's status and return everybody's, by rank; collective."""
        ...


class VoteTree:
    """The way of a vote: every rank gives a row of 192 bytes, and gets a table with the rows of all.

    Tables go up a binary tree inside each cell, from each cell's first rank to those of the others, and down again. The
    slow link is crossed once, by all cells at the same time, where an all-gather over the world would cross it ring
    step by ring step.

    :param topology: The cells whose ranks vote.
    :param rank: This rank, as the topology counts.
    :param first: The rank of the world that the topology counts from.
    :param device: The control device of the group that votes.
    """

    def __init__(self, topology: Topology, rank: int, first: int, device: torch.device) -> None:
        self._device = device
        self._rank = rank
        cell = topology.cell_of(rank)
        peers = peers_in_votes(topology, rank)
        below = [first + peer for peer in peers.below]
        self._is_first = peers.above is None
        # The table outlives a vote, so it must not be an inference tensor if that is where it is made.
        with torch.inference_mode(False):
            self._table = torch.zeros(topology.world_size, STATUS_BYTES, dtype=torch.uint8, device=device)
            rows = torch.split(self._table, [stop - start for start, stop in pairwise(topology.offsets)])
            self._here = rows[cell]
            self._tables_below = self._here.new_zeros(len(below), *self._here.shape)
            self._from_below: list[Move] = list(zip(self._tables_below.unbind(), below, strict=True))
        self._to_below: list[Move] = [(self._table, child) for child in below]
        self._to_above: list[Move] = []
        self._from_above: list[Move] = []
        if peers.above is not None:
            self._to_above.append((self._here, first + peers.above))
            self._from_above.append((self._table, first + peers.above))
        self._from_others: list[Move] = [(rows[topology.cell_of(peer)], first + peer) for peer in peers.others]
        self._to_others: list[Move] = [(self._here, first + peer) for peer in peers.others]

    def connect(self, group: Group | None, within_s: float) -> None:
        """Open the connections of votes where a large group over gloo has those of collectives alone.

        Collective over ``group``, all ranks that vote; elsewhere nothing is done. A rank that is lost later is noticed
        at once, by connections that are open.
        """
        if not isinstance(group, CrossWorldGroup) and is_lazy(group_size(group), world_size=dist.get_world_size()):
            from xffl.aggregation.engine.voting.connections import connect_tree

            moves = (self._from_below, self._to_above, self._to_others)
            connect_tree([[peer for _, peer in each] for each in moves], group, self._device, within_s)

    def gather(self, status: RoundStatus, group: Group | None, within_s: float) -> list[RoundStatus]:
        """Give this rank's status and return everybody's, by rank; collective over ``group``, all ranks that vote.

        Over NCCL it raises RuntimeError after ``within_s`` seconds; gloo has its own timeout.
        """
        self._table.zero_()
        self._table[self._rank] = torch.frombuffer(bytearray(status.packed()), dtype=torch.uint8)
        swap(self._from_below, [], group)
        self._here.add_(self._tables_below.sum(0, dtype=torch.uint8))  # each row is zero in all tables but one
        if self._is_first:
            self.cross(status.phase, self._from_others, self._to_others, group)
        else:
            swap([], self._to_above, group)
            swap(self._from_above, [], group)
        swap([], self._to_below, group)
        if self._device.type == "cuda":
            Progress(self._device, within_s).drain()
        rows = PACKED.iter_unpack(self._table.cpu().numpy().tobytes())
        return [RoundStatus.unpacked(row) for row in rows]

    def cross(self, phase: VotePhase, receive: Sequence[Move], send: Sequence[Move], group: Group | None) -> None:
        """Swap the cells' parts of the table, as the first rank of a cell, with those of the others."""
        swap(receive, send, group)


def swap(receive: Sequence[Move], send: Sequence[Move], group: Group | None) -> None:
    """Receive from some ranks of the world and send to some, at the same time."""
    try:
        for work in start_moves(receive, send, group, VOTE_TAG):
            work.wait()
    except RuntimeError as broken:
        first = group.first if isinstance(group, CrossWorldGroup) else 0  # worlds that share no numbers
        ranks = sorted({rank - first for _, rank in (*send, *receive)})
        raise RuntimeError(f"{broken}, in a vote with ranks {ranks}") from broken
