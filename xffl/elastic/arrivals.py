"""How long the cells of an elastic federation wait at a meeting for one that lives and has not come yet.

This module is pure. Cells may need unlike times for the steps of a round, so no fixed time fits them all. Each cell
measures by its own clock how long it takes from one meeting to the next, and tells the others at each meeting how long
it may take until the one after it (its reach). All cells leave a meeting at the same moment, so they count from there,
each by its own clock; clocks of two hosts are never compared.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

__all__ = ["UNKNOWN_FACTOR", "Arrivals", "may_still_come", "reach_of"]

ROUNDS = 8
"""Rounds that count: a cell that has become slower is expected to stay so after half of them."""
MEDIAN_FACTOR = 4.0
"""A cell may suddenly need four times as long as it does at the median."""
SPREAD_FACTOR = 2.0
"""It may be late by twice as much as it was at the latest."""
UNKNOWN_FACTOR = 10.0
"""A cell whose reach is not known may need ten times as long as the one that waits for it."""
LEAST_RESERVE_S = 60.0
"""Seconds of the meeting timeout that are left for a round without the cells that have not come."""


def reach_of(seconds: Sequence[float]) -> float:
    """Return how long after a meeting a cell may come to the next one.

    :param seconds: How long it took in its last rounds.
    :return: Seconds; 0 if nothing is known of it.
    """
    if not seconds:
        return 0.0
    median = statistics.median(seconds)
    return MEDIAN_FACTOR * median + SPREAD_FACTOR * (max(seconds) - median)


def may_still_come(
    reach_s: float,
    *,
    own_s: float,
    stretch: float,
    since_meeting_s: float,
    waited_s: float,
    meeting_timeout_s: float,
) -> bool:
    """Tell whether a cell that lives may still be making the steps of this round.

    :param reach_s: How long after the last meeting it may come, as it told there; 0 if it could not know.
    :param own_s: How long the cell that waits took since that meeting.
    :param stretch: How many times as long as usual that was, at least 1. If all cells evaluate in this round, the late
        one takes so many times as long, too.
    :param since_meeting_s: How long ago that meeting was.
    :param waited_s: How long the cell that waits has been at this one.
    :param meeting_timeout_s: How long it may be there at all, also if no round comes about.
    :return: Whether to wait for it.
    """
    # A cell that used up all of its timeout would end itself instead of going on without the late one.
    most_s = max(0.5 * meeting_timeout_s, meeting_timeout_s - LEAST_RESERVE_S)
    return waited_s < most_s and since_meeting_s < (stretch * reach_s or UNKNOWN_FACTOR * own_s)


class Arrivals:
    """When this cell has left its last meeting, and how long it took to the next one in its last rounds.

    Times are those of one monotonic clock.
    """

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=ROUNDS)
        self._left_at: float | None = None
        """When the last meeting ended"""
        self.own_s = 0.0
        """How long this cell took from there to the meeting at which it is now"""
        self.stretch = 1.0
        """How many times as long that was as it took at the median of its rounds before, at least 1"""

    @property
    def reach_s(self) -> float:
        """How long after a meeting this cell may come to the next one; 0 if that is not known yet."""
        return reach_of(self._seconds)

    def note_arrival(self, now: float, *, is_again: bool) -> None:
        """Note that this cell comes to a meeting.

        :param now: The time.
        :param is_again: Whether it has come to repeat a round that was not made, and so has made no steps.
        """
        if self._left_at is None:
            return
        self.own_s = now - self._left_at
        usual_s = statistics.median(self._seconds) if self._seconds else self.own_s
        self.stretch = max(1.0, self.own_s / usual_s) if usual_s > 0 else 1.0
        if not is_again:
            self._seconds.append(self.own_s)

    def note_end(self, now: float) -> None:
        """Note that a meeting has ended, and that its cells make a round."""
        self._left_at = now

    def since_meeting(self, now: float) -> float | None:
        """Return how long ago the last meeting ended; ``None`` if this cell was at none."""
        return None if self._left_at is None else now - self._left_at
