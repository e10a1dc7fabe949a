"""How averaged values get from cell to cell, and how many buckets are under way; rounds and forecasts read it here."""

from __future__ import annotations

__all__ = ["FLIGHT_BYTES", "FORMS", "IN_FLIGHT", "MOST_IN_FLIGHT", "TINY", "TINY_FOR_TWO", "form_of", "in_flight"]

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

FLIGHT_BYTES = 2**25
"""Bytes that are under way towards a rank, where that takes more buckets than :data:`IN_FLIGHT`."""


def form_of(nbytes: float, cells: int, asked: str, *, is_exact: bool = True) -> str:
    """Choose how averaged values reach all cells; the same on all ranks.

    With all-gather ``C - 1`` copies of a shard leave each of ``C`` cells, with two hops ``2 (C - 1) / C`` at a second
    latency, which what is tiny does not earn back.

    :param nbytes: Bytes of what the same ranks exchange.
    :param cells: Number of cells.
    :param asked: One of :data:`FORMS`.
    :param is_exact: Whether values cross as they are; in two hops, a codec writes the result once more.
    :return: ``all_gather`` or ``two_hop``.
    """
    if cells == 1:
        return "all_gather"
    if asked != "auto":
        return asked
    is_worth_it = nbytes > TINY if cells > 2 else is_exact and nbytes > TINY_FOR_TWO
    return "two_hop" if is_worth_it else "all_gather"


def in_flight(nbytes: float, count: float, cells: int, form: str) -> int:
    """Return how many buckets a rank has on the slow link at a time, in each hop; the same on all ranks.

    :param nbytes: Bytes of a bucket.
    :param count: Number of buckets; a third of them are under way at most, so that work and home overlap the others.
    :param cells: Number of cells.
    :param form: ``all_gather`` or ``two_hop``.
    :return: The number.
    """
    arriving = nbytes * (cells - 1) / (cells if form == "two_hop" else 1)
    most = min(MOST_IN_FLIGHT, count / 3, FLIGHT_BYTES / arriving if arriving else IN_FLIGHT)
    return max(IN_FLIGHT, int(most))
