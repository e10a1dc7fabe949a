"""Bytes of the messages by which ranks vote, of few ranks and of many; ranks and forecasts share it. Without torch."""

from __future__ import annotations

from xffl.costs import MOST_IN_TABLES, STATUS_BYTES

__all__ = [
    "BALLOT_LENGTH_BYTES",
    "BALLOT_ROOM_BYTES",
    "ballot_head_bytes",
    "ranks_below",
    "vote_message_bytes",
]

BALLOT_LENGTH_BYTES = 8
"""What stands before the statuses of a message of a vote: how many bytes they are."""

_WORD_BYTES = 4 * (STATUS_BYTES // 8)
"""What stands before the words of statuses: how many runs of equal ones there are of each."""

BALLOT_ROOM_BYTES = 1024
"""For how many bytes the first message of a vote to a rank has room, beside one status and what describes it."""


def ranks_below(place: int, size: int) -> int:
    """Return how many ranks of a cell vote through one: itself, and those below it in the cell's binary tree; pure.

    :param place: The rank, as the cell counts.
    :param size: The cell's ranks.
    :return: How many.
    """
    ranks = 0
    low = high = place
    while low < size:
        ranks += min(high, size - 1) - low + 1
        low, high = 2 * low + 1, 2 * high + 2
    return ranks


def ballot_head_bytes(ranks: int) -> int:
    """Return the bytes of the first message that tells a vote's statuses of so many ranks to another one; pure.

    There is no second message, unless ranks of a cell tell unlike numbers in more than these bytes. See
    :class:`xffl.aggregation.engine.voting.ballots.Ballots`.
    """
    most = _WORD_BYTES + STATUS_BYTES * ranks
    return BALLOT_LENGTH_BYTES + min(most, _WORD_BYTES + STATUS_BYTES + BALLOT_ROOM_BYTES)


def vote_message_bytes(ranks: int, world_size: int) -> int:
    """Return the bytes of a vote's message that tells the statuses of ``ranks`` ranks of a world; pure."""
    return STATUS_BYTES * ranks if world_size <= MOST_IN_TABLES else ballot_head_bytes(ranks)
