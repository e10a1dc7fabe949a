"""A delayed round: it was started, goes on while the cell makes local steps, and is merged some steps later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from xffl.aggregation.report import RoundReport
from xffl.aggregation.rounds.offer import RoundOffer, Snapshot

__all__ = ["StartedRound"]


class Mergeable(Protocol):
    """What an aggregator returns for a round that it has started."""

    def merge(self, *, keeps_steps: bool = True) -> RoundReport:
        """Wait for the round and merge its result into the model."""


@dataclass(frozen=True)
class StartedRound:
    """A round under way, and what it has taken of this rank's local steps."""

    pending: Mergeable
    offer: RoundOffer
    taken: Snapshot
    is_absent: bool

    def merge(self) -> RoundReport:
        """Merge it; steps that were made meanwhile stay, and where there are none nothing local does."""
        return self.pending.merge(keeps_steps=self.offer.is_waiting(self.taken.fragment))

    def put_back(self) -> None:
        """Let the steps that it has taken wait for the next round."""
        self.offer.put_back(self.taken)
