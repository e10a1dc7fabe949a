"""Votes of many ranks: what they say stands once where ranks say the same, so that no rank gets 192 bytes of each.

Few ranks vote by :class:`~xffl.aggregation.engine.voting.votes.VoteTree`, whose messages are all of one size.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
import torch.distributed as dist

from xffl.aggregation.engine.transport import Move, Progress
from xffl.aggregation.engine.voting.connections import connect_tree
from xffl.aggregation.engine.voting.votes import PACKED, RoundStatus, swap
from xffl.compat.gloo_connections import is_lazy
from xffl.costs import STATUS_BYTES, peers_in_votes
from xffl.distributed.collectives import Group, group_size
from xffl.distributed.several_worlds.cross_world import CrossWorldGroup
from xffl.message_sizes.ballots import BALLOT_LENGTH_BYTES, ballot_head_bytes, ranks_below
from xffl.topology import Topology

__all__ = ["BallotTree", "Ballots"]


WORD = 8
"""Bytes of a word of a status."""

_WORDS = STATUS_BYTES // WORD
_SECONDS_WORD = struct.calcsize("<3q4d") // WORD
_RUNS = struct.Struct(f"<{_WORDS}I")


class Run(NamedTuple):
    """Ranks one after the other that have the same word in their statuses."""

    ranks: int
    word: bytes


@dataclass(frozen=True)
class Ballots:
    """The statuses of several ranks, word by word: ranks mostly say the same, so a word stands once for a run of them.

    As bytes: the number of runs of each word as uint32, then for each word those of its runs, before them the counts of
    the ranks as uint32 where there are several runs and fewer than ranks. Of 16,384 ranks that say the same these are
    288 bytes, and 131 kB for each number that no two neighbours share.

    :param count: The ranks.
    :param words: The runs of each word.
    """

    count: int
    words: tuple[tuple[Run, ...], ...]

    @classmethod
    def of(cls, status: RoundStatus) -> Ballots:
        """Return those of one rank."""
        row = status.packed()
        return cls(1, tuple((Run(1, row[start : start + WORD]),) for start in range(0, STATUS_BYTES, WORD)))

    @classmethod
    def joined(cls, parts: Sequence[Ballots]) -> Ballots:
        """Return those of all, in this order."""
        words = tuple(_joined([run for part in parts for run in part.words[place]]) for place in range(_WORDS))
        return cls(sum(part.count for part in parts), words)

    def with_longest_step(self) -> Ballots:
        """Let all give the longest of their seconds of a local step: nobody asks for more than a cell's longest."""
        runs = self.words[_SECONDS_WORD]
        if len(runs) == 1:
            return self
        longest = max((run.word for run in runs), key=lambda word: struct.unpack("<d", word))
        before, behind = self.words[:_SECONDS_WORD], self.words[_SECONDS_WORD + 1 :]
        return Ballots(self.count, (*before, (Run(self.count, longest),), *behind))

    def reordered(self, order: Sequence[int]) -> Ballots:
        """Return those of the same ranks, of which ``order`` tells the places that they stand at now."""

        def placed(runs: tuple[Run, ...]) -> tuple[Run, ...]:
            if len(runs) == 1:
                return runs
            words = _each(runs)
            return _joined([Run(1, words[place]) for place in order])

        return Ballots(self.count, tuple(map(placed, self.words)))

    def to_bytes(self) -> bytes:
        """Return them as bytes."""
        numbers: list[int] = []
        parts: list[bytes] = []
        for runs in self.words:
            is_dense = len(runs) * (WORD + 4) >= self.count * WORD
            if is_dense and len(runs) > 1:
                numbers.append(self.count)
                parts += _each(runs)
                continue
            numbers.append(len(runs))
            if len(runs) > 1:
                parts.append(struct.pack(f"<{len(runs)}I", *(run.ranks for run in runs)))
            parts += [run.word for run in runs]
        return _RUNS.pack(*numbers) + b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes, count: int) -> Ballots:
        """Return those of so many ranks from their bytes."""
        at = _RUNS.size
        words: list[tuple[Run, ...]] = []
        for number in _RUNS.unpack_from(data):
            counts = (count,) if number == 1 else (1,) * number
            if 1 < number < count:
                counts = struct.unpack_from(f"<{number}I", data, at)
                at += 4 * number
            starts = range(at, at + WORD * number, WORD)
            runs = [Run(length, data[start : start + WORD]) for length, start in zip(counts, starts, strict=True)]
            words.append(_joined(runs))
            at += WORD * number
        return cls(count, tuple(words))

    def statuses(self) -> list[RoundStatus]:
        """Return the status of each rank; those that say the same share one."""
        row = b"".join(runs[0].word for runs in self.words)
        unlike = [place for place, runs in enumerate(self.words) if len(runs) > 1]
        if not unlike:
            return [_status_of(row)] * self.count
        known: dict[tuple[bytes, ...], RoundStatus] = {}
        told: list[RoundStatus] = []
        for words in zip(*(_each(self.words[place]) for place in unlike), strict=True):
            status = known.get(words)
            if status is None:
                mutable = bytearray(row)
                for place, word in zip(unlike, words, strict=True):
                    mutable[place * WORD : (place + 1) * WORD] = word
                status = known[words] = _status_of(mutable)
            told.append(status)
        return told


def _status_of(row: bytes | bytearray) -> RoundStatus:
    return RoundStatus.unpacked(PACKED.unpack(row))


def _joined(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Return runs of which no two neighbours have the same word."""
    if len(runs) == 1:
        return (runs[0],)
    return tuple(Run(sum(run.ranks for run in alike), word) for word, alike in groupby(runs, key=lambda run: run.word))


def _each(runs: Sequence[Run]) -> list[bytes]:
    """Return the word of each rank."""
    words: list[bytes] = []
    for run in runs:
        words += [run.word] * run.ranks
    return words


class Letter(NamedTuple):
    """What goes to another rank, or comes from it, in a vote."""

    peer: int
    """A rank of the world."""
    ranks: int
    """How many ranks' statuses it has."""


class BallotTree:
    """The way of a vote of many ranks: every rank gives its status, and gets those of all.

    They go as in :class:`~.votes.VoteTree`, as :class:`Ballots`, whose length depends on what
    ranks say. A message is a head of a fixed size, which begins with the length, and a second message behind it in the
    rare case that the head has no room for all.

    :param topology: The cells whose ranks vote.
    :param rank: This rank, as the topology counts.
    :param first: The rank of the world that the topology counts from.
    :param device: The control device of the group that votes.
    """

    def __init__(self, topology: Topology, rank: int, first: int, device: torch.device) -> None:
        self._device = device
        self._cell = cell = topology.cell_of(rank)
        start = topology.offsets[cell]
        size = topology.sizes[cell]
        peers = peers_in_votes(topology, rank)
        self._is_first = peers.above is None
        self._below = [Letter(first + peer, ranks_below(peer - start, size)) for peer in peers.below]
        self._above = [] if peers.above is None else [Letter(first + peers.above, topology.world_size)]
        self._others = [Letter(first + peer, topology.sizes[topology.cell_of(peer)]) for peer in peers.others]
        self._order = _order_of_ranks(size) if self._is_first else []

    def connect(self, group: Group | None, within_s: float) -> None:
        """Open the connections of votes; see :meth:`~xffl.aggregation.engine.voting.votes.VoteTree.connect`."""
        if not isinstance(group, CrossWorldGroup) and is_lazy(group_size(group), world_size=dist.get_world_size()):
            peers = [[peer for peer, _ in letters] for letters in (self._below, self._above, self._others)]
            connect_tree(peers, group, self._device, within_s)

    def gather(self, status: RoundStatus, group: Group | None, within_s: float) -> list[RoundStatus]:
        """Give this rank's status and return everybody's, by rank; collective over ``group``, all ranks that vote.

        All ranks of a cell give the longest seconds of a local step of any. Over NCCL it raises RuntimeError where a
        message takes ``within_s`` seconds; gloo has its own timeout.
        """
        post = _Post(group, self._device, within_s)
        ballots = Ballots.joined([Ballots.of(status), *post.swap(self._below, [])]).with_longest_step()
        if self._is_first:
            ballots = ballots.reordered(self._order)
            of_cells = post.swap(self._others, self._others, ballots)
            of_cells.insert(self._cell, ballots)
            ballots = Ballots.joined(of_cells)
        else:
            post.swap([], self._above, ballots)
            (ballots,) = post.swap(self._above, [])
        post.swap([], self._below, ballots)
        return ballots.statuses()


def _order_of_ranks(size: int) -> list[int]:
    """Return for each rank of a cell where its status stands when all have come up: a rank is before those below it."""
    places: list[int] = []
    left = [0]
    while left:
        place = left.pop()
        places.append(place)
        left += [child for child in (2 * place + 2, 2 * place + 1) if child < size]
    order = [0] * size
    for at, place in enumerate(places):
        order[place] = at
    return order


class _Post:
    """The messages of one vote, over the group of the ranks that vote."""

    def __init__(self, group: Group | None, device: torch.device, within_s: float) -> None:
        self._group = group
        self._device = device
        self._progress = Progress(device, within_s)

    def swap(self, receive: Sequence[Letter], send: Sequence[Letter], ballots: Ballots | None = None) -> list[Ballots]:
        """Receive the ballots of ranks while these are sent to others."""
        data = b"" if ballots is None else ballots.to_bytes()
        data = len(data).to_bytes(BALLOT_LENGTH_BYTES, "little") + data
        length = ballot_head_bytes(0 if ballots is None else ballots.count)
        heads = [self._empty(ballot_head_bytes(ranks)) for _, ranks in receive]
        self._move(
            [(head, peer) for head, (peer, _) in zip(heads, receive, strict=True)],
            send,
            data[:length].ljust(length, b"\0"),
        )
        texts = [head.cpu().numpy().tobytes() for head in heads]
        tails: dict[int, torch.Tensor] = {}
        for number, text in enumerate(texts):
            missing = int.from_bytes(text[:BALLOT_LENGTH_BYTES], "little") + BALLOT_LENGTH_BYTES - len(text)
            if missing > 0:
                tails[number] = self._empty(missing)
        rest = data[length:]
        self._move([(tail, receive[number].peer) for number, tail in tails.items()], send if rest else [], rest)
        for number, tail in tails.items():
            texts[number] += tail.cpu().numpy().tobytes()
        return [
            Ballots.from_bytes(text[BALLOT_LENGTH_BYTES:], ranks)
            for text, (_, ranks) in zip(texts, receive, strict=True)
        ]

    def _empty(self, length: int) -> torch.Tensor:
        return torch.zeros(length, dtype=torch.uint8, device=self._device)

    def _move(self, receive: Sequence[Move], send: Sequence[Letter], data: bytes) -> None:
        if not receive and not send:
            return
        values = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device) if send else None
        swap(receive, [(values, peer) for peer, _ in send] if values is not None else [], self._group)
        self._progress.drain()
