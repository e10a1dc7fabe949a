"""What ranks of a world have done, as one row of a table, and how it grows from one world to the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.scale.recorded import Counts, Play
from xffl.topology import Topology

__all__ = ["HEADINGS", "Row", "exponents", "measure"]

HEADINGS = (
    *("ranks", "store req", "store B/rank", "connections", "groups"),
    *("msg start", "msg plan", "B plan", "msg round", "B round", "ms start", "ms plan", "ms round"),
)
"""Requests are of all ranks; all else is of the rank that has most."""


@dataclass(frozen=True)
class Row:
    """What the ranks of one world do, by the headings after the first.

    :param ranks: Ranks of the world.
    :param counts: Numbers that are the same in each run.
    :param seconds: Processor seconds of start, plan and a round.
    """

    ranks: int
    counts: tuple[int, ...]
    seconds: tuple[float, ...]

    def shown(self) -> tuple[str, ...]:
        """Return its cells as text."""
        return (f"{self.ranks}", *map(str, self.counts), *(f"{1e3 * one:.1f}" for one in self.seconds))


def measure(topology: Topology, plays: Sequence[Play]) -> Row:
    """Return the row of a world of which some ranks have been played.

    Requests of all ranks are summed where all were played; else each rank counts as the one that makes most.
    """

    def most(of: Callable[[Counts], float], *phases: str) -> float:
        return max(sum(of(play.phases[phase]) for phase in phases) for play in plays)

    every = ("start", "plan", "first round", "round", "end")
    each = [sum(play.phases[phase].requests for phase in every) for play in plays]
    requests = sum(each) if len(plays) == topology.world_size else max(each) * topology.world_size
    counts = (
        requests,
        most(lambda counts: counts.store_bytes, *every),
        most(lambda counts: counts.connections, *every),
        most(lambda counts: counts.groups, *every),
        most(lambda counts: counts.messages, "start"),
        most(lambda counts: counts.messages, "plan"),
        most(lambda counts: counts.message_bytes, "plan"),
        most(lambda counts: counts.messages, "round"),
        most(lambda counts: counts.message_bytes, "round"),
    )
    seconds = [most(lambda counts: counts.python_s, phase) for phase in ("start", "plan", "round")]
    return Row(topology.world_size, tuple(map(int, counts)), tuple(seconds))


def exponents(smaller: Row, larger: Row) -> tuple[str, ...]:
    """Return the exponents of the number of ranks by which counts and seconds grow, as text."""
    growth = math.log(larger.ranks / smaller.ranks)
    pairs = zip((*smaller.counts, *smaller.seconds), (*larger.counts, *larger.seconds), strict=True)
    return tuple(f"{math.log(after / before) / growth:.2f}" if before and after else "0" for before, after in pairs)
