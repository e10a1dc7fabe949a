"""What is wrong where the ranks are not at the same point of the same round."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from xffl.aggregation.engine.voting.votes import MergeMode, RoundStatus, VotePhase
from xffl.distributed.agreement.consistency import ranks_text
from xffl.errors import RoundError
from xffl.topology import Topology

__all__ = ["check_rounds"]


def check_rounds(statuses: Sequence[RoundStatus], topology: Topology) -> None:
    """Raise RoundError, on all ranks alike, where they are not at the same point of the same round."""
    called = {status.aggregator: rank for rank, status in reversed(list(enumerate(statuses)))}
    if len(called) > 1:
        shown = ", ".join(f"rank {rank} of number {number}" for number, rank in sorted(called.items()))
        raise RoundError(
            f"the ranks are in rounds of different aggregators, counted as they were made ({shown}); call those of "
            "several models in the same order on every rank"
        )
    points = {(status.round, status.phase): rank for rank, status in reversed(list(enumerate(statuses)))}
    if len(points) > 1:
        shown = ", ".join(
            f"rank {rank} {'at the end of' if phase is VotePhase.COMMIT else 'in'} round {number}"
            for (number, phase), rank in sorted(points.items())
        )
        raise RoundError(f"the ranks are in different rounds ({shown}); call aggregate equally often on every rank")
    if len({status.is_encoding for status in statuses}) > 1:
        without = [rank for rank, status in enumerate(statuses) if not status.is_encoding]
        raise RoundError(
            f"ranks {without} do not know the state that the codec starts from and others do; load the aggregator's "
            "state dict on every rank or on none"
        )
    # All computed alike when the aggregator was made.
    flushing = [rank for rank, status in enumerate(statuses) if status.is_flushing]
    if flushing and len(flushing) < len(statuses):
        raise RoundError(
            f"subnormal numbers are flushed to zero on {ranks_text(flushing)} and nowhere else, so models would drift "
            "apart; call torch.set_flush_denormal with the same value on all ranks, before the Aggregator is made, or "
            "nowhere"
        )
    for cell, (start, stop) in enumerate(pairwise(topology.offsets)):
        # Ignore failed ranks here; their reasons are gathered after the vote.
        modes = {status.merge_text for status in statuses[start:stop] if not status.is_failed}
        if len(modes) > 1:
            raise RoundError(
                f"the ranks of cell {cell} merge in different ways ({', '.join(sorted(modes))}); call the same on all "
                "of them"
            )
    # A cell that has finished takes the result at once, while others go on.
    going_on = (one for one in statuses if not one.is_failed and one.merge is not MergeMode.REPLACE)
    alphas = {status.merge_text for status in going_on}
    if len(alphas) > 1:
        raise RoundError(
            f"the cells merge with different alphas ({', '.join(sorted(alphas))}); give the same in all of them"
        )
