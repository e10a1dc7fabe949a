"""Votes in which this process ends, where ``XFFL_FAULT`` says so: see :mod:`xffl.distributed.failures.faults`."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from xffl.aggregation.engine.transport import Move
from xffl.aggregation.engine.voting.votes import RoundStatus, VotePhase, VoteTree, swap
from xffl.distributed.collectives import Group
from xffl.distributed.failures.faults import inject, is_armed

__all__ = ["FaultyVoteTree"]


class FaultyVoteTree(VoteTree):
    """The way of a vote, with the points at which this process may have to end."""

    def gather(self, status: RoundStatus, group: Group | None, within_s: float) -> list[RoundStatus]:
        """Vote, and end before it or once it is known here."""
        if status.phase is VotePhase.PREPARE:
            inject("open")
        if status.phase is VotePhase.COMMIT:
            inject("close")
        statuses = super().gather(status, group, within_s)
        if status.phase is VotePhase.PREPARE:
            inject("opened")
        if status.phase is VotePhase.COMMIT:
            inject("agreed")
        return statuses

    def cross(self, phase: VotePhase, receive: Sequence[Move], send: Sequence[Move], group: Group | None) -> None:
        """Tell the other cells, and end when one of them has been told, or all have."""
        unaware = list(send)
        if phase is VotePhase.COMMIT and is_armed("half"):
            first_told = min(unaware, key=itemgetter(1))
            unaware.remove(first_told)
            swap([], [first_told], group)
            inject("half")
        super().cross(phase, receive, unaware, group)
        if phase is VotePhase.COMMIT:
            inject("told")
