"""A vote: what each rank says in it, as bytes, and how all ranks learn what everybody has said.

:mod:`xffl.aggregation.engine.decision.consensus` decides what follows.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from xffl.aggregation.engine.groups import Move, Progress, start_moves
from xffl.costs import STATUS_BYTES
from xffl.distributed.collectives import Group
from xffl.topology import Topology

__all__ = ["MOST_NUMBERS", "PACKED", "MergeMode", "RoundStatus", "Seal", "VotePhase", "VoteTree", "by_cell", "swap"]


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


# The bytes do not depend on the machine; the padding leaves room for more fields at the same price.
MOST_NUMBERS = 8
"""Numbers of a server's step that a vote has room for."""

_FIELDS = f"<3q5d8?3B2q?d{MOST_NUMBERS}d"
PACKED = struct.Struct(f"{_FIELDS}{STATUS_BYTES - struct.calcsize(_FIELDS)}x")
"""A status as bytes: three integers, five numbers, eight flags, three enums, two integers, a flag, nine numbers."""


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
        self._cell = topology.cell_of(rank)
        self._sizes = [stop - start for start, stop in pairwise(topology.offsets)]
        start, stop = topology.offsets[self._cell], topology.offsets[self._cell + 1]
        place = rank - start
        children = (2 * place + 1, 2 * place + 2)
        self._children = [first + start + child for child in children if start + child < stop]
        self._parent = None if place == 0 else first + start + (place - 1) // 2
        self._others = {cell: first + offset for cell, offset in enumerate(topology.offsets[:-1]) if cell != self._cell}

    def gather(self, status: RoundStatus, group: Group | None, within_s: float) -> list[RoundStatus]:
        """Give this rank's status and return everybody's, by rank; collective over ``group``, all ranks that vote.

        Over NCCL it raises RuntimeError after ``within_s`` seconds; gloo has its own timeout.
        """
        table = torch.zeros(sum(self._sizes), STATUS_BYTES, dtype=torch.uint8, device=self._device)
        table[self._rank] = torch.frombuffer(bytearray(status.packed()), dtype=torch.uint8)
        rows = torch.split(table, self._sizes)
        here = rows[self._cell]
        below = here.new_zeros(len(self._children), *here.shape)
        swap(list(zip(below, self._children, strict=True)), [], group)
        here += below.sum(0, dtype=torch.uint8)  # each row is zero in all tables but one
        if self._parent is None:
            receive = [(rows[cell], rank) for cell, rank in self._others.items()]
            self.cross(status.phase, receive, [(here, rank) for _, rank in receive], group)
        else:
            swap([], [(here, self._parent)], group)
            swap([(table, self._parent)], [], group)
        swap([], [(table, child) for child in self._children], group)
        if self._device.type == "cuda":
            Progress(self._device, within_s).drain()
        return [RoundStatus.unpacked(row) for row in PACKED.iter_unpack(table.cpu().numpy().tobytes())]

    def cross(self, phase: VotePhase, receive: Sequence[Move], send: Sequence[Move], group: Group | None) -> None:
        """Swap the cells' parts of the table, as the first rank of a cell, with those of the others."""
        swap(receive, send, group)


def swap(receive: Sequence[Move], send: Sequence[Move], group: Group | None) -> None:
    """Receive from some ranks of the world and send to some, at the same time."""
    try:
        for work in start_moves(receive, send, group, VOTE_TAG):
            work.wait()
    except RuntimeError as broken:
        ranks = sorted({rank for _, rank in (*send, *receive)})
        raise RuntimeError(f"{broken}, in a vote with ranks {ranks}") from broken
