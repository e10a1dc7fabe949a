"""What a round tells its caller."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RoundReport"]


@dataclass(frozen=True)
class RoundReport:
    """What one round did, as this rank saw it.

    :param round: The round's number, from 1; the same on all ranks.
    :param weights: The weight of each cell; the same on all ranks.
    :param bytes_across: Bytes that this rank sent to other cells.
    :param bytes_home: Bytes that this rank sent inside its cell.
    :param seconds: Wall-clock time on this rank, from the call to the new weights.
    :param dropped: Cells whose values were left out for not being finite; the same on all ranks.
    :param is_last: Whether all ranks had finished: no round follows; the same on all ranks.
    """

    round: int
    weights: tuple[float, ...]
    bytes_across: int
    bytes_home: int
    seconds: float
    dropped: tuple[int, ...] = ()
    is_last: bool = False
