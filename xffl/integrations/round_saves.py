"""Saves after the same round in all cells, whose own steps would make them save after unlike ones.

Cells with unequally long data reach the end of an epoch, and that of their training, after unlike rounds. Checkpoints
of unlike rounds do not go together, so a cell does not save where it wants to, but asks for a save after its next
round. It asks before it enters that round, and no cell has made a round that another one has not entered. So all cells
find the request behind that round, and save there.
"""

from __future__ import annotations

from xffl.aggregation.federated_scaling import FederatedScaling
from xffl.distributed.agreement.consistency import gather_objects
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.several_worlds.cell_notes import CellNotes

__all__ = ["RoundSaves"]


class RoundSaves:
    """Says when a cell is to save: after a round for which a cell has asked.

    :param scaling: The rounds of this cell, which has made none of them yet.
    :param state: The state of this rank.
    :param notes: What the cells of the job tell each other.
    :param before: How many rounds the cells have behind them where they begin.
    """

    def __init__(self, scaling: FederatedScaling, state: DistributedState, notes: CellNotes, before: int) -> None:
        self._scaling = scaling
        self._state = state
        self._notes = notes
        self._before = before
        self._looked_after = before
        """The round behind which this rank has looked for requests"""
        self._is_due = False

    def request(self) -> None:
        """Ask all cells to save after the next round that this one enters; on all ranks of the cell."""
        self._notes.write(_name(self._before + self._scaling.meetings + 1), "requested")

    def is_due(self) -> bool:
        """Tell whether the cell is to save, between two rounds; collective over the cell."""
        made = self._before + self._scaling.meetings - int(self._scaling.is_under_way)
        if made > self._looked_after:
            self._looked_after = made
            is_first = self._state.cell_rank == 0
            is_requested = is_first and any(text is not None for text in self._notes.read(_name(made)))
            self._is_due = gather_objects(is_requested)[0]
        return self._is_due

    def note_saved(self) -> None:
        """Save no second time after the same round; local."""
        self._is_due = False


def _name(meetings: int) -> str:
    return f"save after {meetings}"
