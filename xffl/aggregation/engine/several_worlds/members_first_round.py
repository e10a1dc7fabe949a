"""The comparison of values where cells come and go: each cell is compared once, not again with every change.

Ranks of a cell are compared with each other in the first round to which it gives something. A group of cells is
compared with each other until some of its cells were seen to differ: cells that go on with each other need no second
look. A round that brings cells up to date compares nothing, since these give nothing to it; the next one does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from xffl.aggregation.engine.stages.first_round import FirstRound
from xffl.aggregation.engine.voting.votes import RoundStatus

__all__ = ["ComparedCells", "MembersFirstRound"]


@dataclass
class ComparedCells:
    """What the rounds of a rank have found of cells, which are named by their lives."""

    has_looked: bool = False
    """Whether the ranks of this rank's cell were compared with each other"""
    sums: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """What cells have told of their values, in the last round in which all did that gave something"""
    unlike: frozenset[str] = frozenset()
    """Cells of which others knew that they differ, when this one came"""

    def are_unlike(self, lives: Sequence[str]) -> bool:
        """Tell whether some of these cells are known to differ."""
        told = {self.sums[life] for life in lives if life in self.sums}
        return len(told) > 1 or (bool(self.unlike) and self.unlike.issubset(lives))


@dataclass(kw_only=True)
class MembersFirstRound(FirstRound):
    """The comparison in the first rounds of a group of cells, some of which may have been compared before.

    Cells that need no look tell zeros, and take part in what follows from those of others.
    """

    lives: tuple[str, ...]  # of the cells of the group
    compared: ComparedCells  # of the rounds before, and of this one once it has ended
    _has_cells_behind: bool = field(default=False, init=False)
    _learnt: ComparedCells | None = field(default=None, init=False)

    def note_cells_behind(self, is_behind: bool) -> None:
        """Note whether the next round brings cells up to date."""
        self._has_cells_behind = is_behind

    def read(self, *, has_steps: bool) -> None:
        """Look at the values, where this cell or the group was not compared."""
        has_no_others = self.is_private or len(self.lives) == 1  # with which it would be compared
        is_known = self.compared.has_looked and (has_no_others or self.compared.are_unlike(self.lives))
        if not is_known and not self._has_cells_behind:
            super().read(has_steps=has_steps)

    def compare(self, statuses: Sequence[RoundStatus]) -> None:
        """Compare what ranks have told, unless cells are behind; see :meth:`FirstRound.compare`."""
        if self._has_cells_behind or self.is_over:
            return
        super().compare(statuses)
        self._learnt = self._learn(statuses)

    def end(self) -> None:
        """Keep what the group's first round has found, for later groups."""
        super().end()
        if self._learnt is not None and self.is_over:
            self.compared.has_looked = self._learnt.has_looked
            self.compared.sums = self._learnt.sums
            self.compared.unlike = self._learnt.unlike

    def _learn(self, statuses: Sequence[RoundStatus]) -> ComparedCells:
        """Return what is known of cells once this round is taken; pure."""
        sums: dict[str, tuple[int, ...]] = {}
        has_looked = self.compared.has_looked
        are_known = False  # whether cells gave something without a look
        for cell, life in enumerate(self.lives):
            told = [statuses[rank] for rank in self.scope.topology.federation(cell)]
            if any(one.is_absent or one.is_nonfinite for one in told):
                continue
            if not any(one.held or one.shared or one.is_trained for one in told):
                are_known = True
                continue
            sums[life] = self.sums_of(cell, statuses)
            if cell == self._at.cell:
                has_looked = True
        if are_known and len(self.lives) > 1:
            return ComparedCells(has_looked, self.compared.sums, frozenset(self.lives))
        if len(sums) > 1:
            return ComparedCells(has_looked, sums, self.compared.unlike)
        return ComparedCells(has_looked, self.compared.sums, self.compared.unlike)
