"""Arithmetic that ranks and forecasts share: the form of an exchange, its pipeline and format.

Without torch, so that ``xffl plan`` forecasts what the ranks will do.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from xffl import __version__
from xffl.topology import Topology

__all__ = [
    "EXCHANGE_FORMAT",
    "EXPORT_FORMAT",
    "FORMS",
    "IN_FLIGHT",
    "IN_FLIGHT_BYTES",
    "MOST_IN_FLIGHT",
    "MOST_IN_TABLES",
    "STATUS_BYTES",
    "TINY",
    "TINY_FOR_TWO",
    "VotePeers",
    "form_of",
    "format_refusal",
    "neighbours_of_barrier",
    "own_format",
    "peers_in_votes",
    "pipeline_depth",
]

FORMS = ("auto", "all_gather", "two_hop")
"""Every cell sends all of its values to every other, or each cell combines one part and sends the result round."""

TINY = 2**18
"""Bytes up to which three cells or more do not take a second latency to send less."""

TINY_FOR_TWO = 2**25
"""Bytes up to which two cells, which send no less in two hops, do not take a second latency to combine half as much."""

IN_FLIGHT = 4
"""Buckets that a rank has on the slow link at a time, at least; while they cross, those before are combined."""

MOST_IN_FLIGHT = 16
"""And at most; more were not measured."""

IN_FLIGHT_BYTES = 2**25
"""Bytes that are under way towards a rank, where that takes more buckets than :data:`IN_FLIGHT`."""

STATUS_BYTES = 192
"""What each rank tells all others in a vote, see :class:`xffl.aggregation.engine.voting.votes.RoundStatus`."""

MOST_IN_TABLES = 64
"""Ranks up to which a vote has a row for each: more of them would say mostly the same in them."""

EXCHANGE_FORMAT = 6
"""Number of the format of all that cells of a network give each other: votes, values, records of elastic cells.

Raise it with each change after which one side would read otherwise what the other has written
(docs/round_formats.rst, "Format of an exchange").
"""

EXPORT_FORMAT = 1
"""The same of what cells give each other in files: exports, and the models that are combined from them."""


def own_format() -> str:
    """Return this xffl's exchange format as messages show it."""
    return f"{EXCHANGE_FORMAT} (xffl {__version__})"


def format_refusal(who: str, theirs: str, others: str = "this process", ours: str | None = None) -> str:
    """Return the line that tells why who has another exchange format is refused."""
    return (
        f"the exchange format of {who} is {theirs}, that of {others} is {own_format() if ours is None else ours}; run "
        "versions of xffl that have one exchange format in all cells"
    )


def form_of(nbytes: float, cells: int, asked: str, *, is_exact: bool = True) -> str:
    """Choose how averaged values reach all cells; the same on all ranks.

    With all-gather ``C - 1`` copies of a shard leave each of ``C`` cells, with two hops ``2 (C - 1) / C`` at a second
    latency, which what is tiny does not earn back. ``nbytes`` are those that the same ranks exchange. In two
    hops a codec, whose values are not exact, writes the result once more.
    """
    if cells == 1:
        return "all_gather"
    if asked != "auto":
        return asked
    is_worth_it = nbytes > TINY if cells > 2 else is_exact and nbytes > TINY_FOR_TWO
    return "two_hop" if is_worth_it else "all_gather"


def pipeline_depth(nbytes: float, count: float, cells: int, form: str) -> int:
    """Return how many of ``count`` buckets of ``nbytes`` a rank has on the slow link at a time, in each hop."""
    arriving = nbytes * (cells - 1) / (cells if form == "two_hop" else 1)
    # A third of them at most, so that the work on the others and their way inside the cell overlap these.
    most = min(MOST_IN_FLIGHT, count / 3, IN_FLIGHT_BYTES / arriving if arriving else IN_FLIGHT)
    return max(IN_FLIGHT, int(most))


def neighbours_of_barrier(rank: int, size: int) -> set[int]:
    """Return the ranks of a group with which a barrier connects one: those that are 1, 2, 4 and so on away; pure.

    Gloo's ring collectives and its broadcasts use these, too.
    """
    away = [2**exponent for exponent in range(math.ceil(math.log2(size)))] if size > 1 else []
    return {(rank + sign * distance) % size for distance in away for sign in (1, -1)} - {rank}


class VotePeers(NamedTuple):
    """The ranks with which one exchanges messages in a vote."""

    below: tuple[int, ...]
    """Its children in the binary tree of its cell."""
    above: int | None
    """Its parent there; ``None`` for the cell's first rank."""
    others: tuple[int, ...]
    """The first ranks of the other cells, by cell, if it is a first one itself."""

    @property
    def ranks(self) -> set[int]:
        """All of them."""
        return {*self.below, *self.others} | (set() if self.above is None else {self.above})


def peers_in_votes(topology: Topology, rank: int) -> VotePeers:
    """Return the ranks with which one exchanges messages in a vote; pure.

    A vote goes up a binary tree in each cell, once between the cells' first ranks, and down again.
    """
    cell = topology.cell_of(rank)
    start, stop = topology.offsets[cell : cell + 2]
    place = rank - start
    below = tuple(start + child for child in (2 * place + 1, 2 * place + 2) if start + child < stop)
    if place:
        return VotePeers(below, start + (place - 1) // 2, ())
    return VotePeers(below, None, topology.offsets[:cell] + topology.offsets[cell + 1 : -1])
