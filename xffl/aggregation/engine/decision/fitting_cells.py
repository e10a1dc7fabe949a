"""Which cells a round between jobs has to do without.

Cells come and go, so that one may come with something else than the others have. Each rank says in its vote whether a
round was taken before in which it said the same; so all know who of them comes with something new, and that one ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from xffl.aggregation.engine.voting.votes import MergeMode, RoundStatus
from xffl.topology import Topology

__all__ = ["AcceptedTraits", "find_failed_cells", "find_faulty_cells"]

SUBNORMALS = "subnormals"
WEIGHTS = "weights"
MERGE = "merge"
LASTING = (SUBNORMALS, WEIGHTS, MERGE)
"""Traits that do not change from round to round."""


@dataclass
class AcceptedTraits:
    """What this rank has said in rounds that were taken, of what all ranks have to say alike."""

    _accepted: dict[str, object] = field(default_factory=dict)
    _told: dict[str, object] = field(default_factory=dict)
    """In the last vote on a round"""

    def mark(self, vote: RoundStatus) -> RoundStatus:
        """Return a vote on a round, with whether all that it says was accepted before."""
        self._told = {name: trait for name, trait in _traits_of(vote).items() if name in LASTING}
        return vote._replace(is_accepted=self._told.items() <= self._accepted.items())

    def accept(self) -> None:
        """Note that the round of the last vote was taken."""
        self._accepted |= self._told


def find_faulty_cells(statuses: Sequence[RoundStatus], topology: Topology) -> frozenset[int]:
    """Return the cells that keep the others from a round by what they have said; pure, so the same on all ranks.

    That is a cell of which a rank cannot take part, or whose ranks do not go together with each other. Where there is
    none, it is those that do not fit the cells which say what was accepted before. None are returned where nobody has
    said anything before, or those that have do not go together: then nobody knows who is wrong.
    """
    by_cell = [[statuses[rank] for rank in topology.federation(cell)] for cell in range(topology.cells)]
    faulty = {cell for cell, votes in enumerate(by_cell) if not _is_whole(votes)}
    if faulty or _fit(statuses):
        return frozenset(faulty)
    accepted = [cell for cell, votes in enumerate(by_cell) if all(vote.is_accepted for vote in votes)]
    known = [vote for cell in accepted for vote in by_cell[cell]]
    if not known or not _fit(known):
        return frozenset()
    others = frozenset(range(topology.cells)) - {*accepted}
    return frozenset(cell for cell in others if not _fit([*known, *by_cell[cell]])) or others


def find_failed_cells(statuses: Sequence[RoundStatus], topology: Topology) -> frozenset[int]:
    """Return the cells of which a rank has failed, and none has lost contact to another cell; pure."""
    failed: set[int] = set()
    for cell in range(topology.cells):
        votes = [statuses[rank] for rank in topology.federation(cell)]
        if any(vote.is_failed for vote in votes) and not any(vote.is_cut_off for vote in votes):
            failed.add(cell)
    return frozenset(failed)


def _is_whole(votes: Sequence[RoundStatus]) -> bool:
    """Tell whether the ranks of one cell go together with each other, which also write the result in the same way."""
    return not any(vote.is_failed for vote in votes) and _fit(votes) and len({vote.merge_text for vote in votes}) == 1


def _fit(votes: Sequence[RoundStatus]) -> bool:
    """Tell whether ranks can make a round together."""
    alike: dict[str, object] = {}
    for vote in votes:
        for name, trait in _traits_of(vote).items():
            if alike.setdefault(name, trait) != trait:
                return False
    return math.isfinite(sum(vote.weight for vote in votes))


def _traits_of(vote: RoundStatus) -> dict[str, object]:
    """Return what all ranks have to say alike, as far as a rank says it."""
    traits: dict[str, object] = {
        "point": (vote.aggregator, vote.round, vote.phase),
        "encoding": vote.is_encoding,
        SUBNORMALS: vote.is_flushing,
    }
    if not vote.is_absent:
        traits[WEIGHTS] = vote.is_uniform
    if vote.merge is not MergeMode.REPLACE:  # a cell that has finished takes the result at once
        traits[MERGE] = vote.merge_text
    return traits
