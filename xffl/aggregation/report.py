"""What a round tells its caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["RoundReport"]


@dataclass(frozen=True)
class RoundReport:
    """What one round did, as this rank saw it.

    :param round: The round's number, from 1; the same on all ranks.
    :param weights: The weight of each cell; the same on all ranks.
    :param bytes_across: Bytes that this rank sent to other cells.
    :param bytes_home: Bytes that this rank sent inside its cell.
    :param seconds: Wall-clock time on this rank, from the call to the new weights; of a delayed round with the steps
        made meanwhile.
    :param dropped: Cells whose values were left out for not being finite; the same on all ranks.
    :param is_last: Whether all ranks had finished: no round follows; the same on all ranks.
    :param fragment: Part of the model that was exchanged, from 0; the same on all ranks.
    :param phases: Seconds that this rank spent in each phase: ``vote``, ``pack``, ``encode``, ``post`` (handing
        messages to the backend), ``across`` (waiting for the slow link), ``combine``, ``home`` (waiting for the cell),
        ``commit``; of a delayed round all but ``pack`` and ``commit`` in the background, and ``wait``, how long its
        merge had to wait for them.
    :param hidden: Seconds between the first post and the last arrival in which this rank did not wait for the slow
        link, but worked.
    :param shares: What each cell's values counted for, as the combiner has weighed them; they sum to 1.
    :param scale: What the way from the last agreed model to the combined one was multiplied by.
    :param steps: Effective local steps of each cell since its last round.
    :param step_seconds: Seconds that a local step took in each cell; 0 where nobody has measured.
    :param update_norms: L2 norm of each cell's update, of the part that was exchanged; ``None`` where nobody measures.
    :param nonfinite: For each dropped cell the tensors with values that were not finite (three at most of each rank).
    :param is_skipped: Whether the cells' models were so close that nothing moved; such a round does not count.
    :param codec_error: What lossy codecs left out of what this rank had to send, relative to it, in the L2 norm; it is
        sent later. ``None`` where none was used, or where it had to send so much that squares left fp32.
    """

    round: int
    weights: tuple[float, ...]
    bytes_across: int
    bytes_home: int
    seconds: float
    dropped: tuple[int, ...] = ()
    is_last: bool = False
    fragment: int = 0
    shares: tuple[float, ...] = ()
    scale: float = 1.0
    steps: tuple[float, ...] = ()
    step_seconds: tuple[float, ...] = ()
    update_norms: tuple[float, ...] | None = None
    nonfinite: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    is_skipped: bool = False
    phases: Mapping[str, float] = field(default_factory=dict)
    hidden: float = 0.0
    codec_error: float | None = None
