"""How a trainer leaves before its time is up: where it looks for it, and what it saves then."""

from __future__ import annotations

from pathlib import Path

from xffl.checkpoint import CheckpointManager
from xffl.training.callbacks.checkpointing import CheckpointCallback
from xffl.training.mixins.state import StateMixin
from xffl.training.preemption import Preemption

__all__ = ["LeavingMixin"]


class LeavingMixin(StateMixin):
    """Save and leave where all ranks agree to; every trainer has it."""

    preemption: Preemption
    """Hears of signals, while :meth:`fit` runs"""
    _first_step: int = 0
    """Optimizer steps of this cell when training began or went on"""

    def watch_signals(self) -> None:
        """Stop before the first step, where this is due; called on every rank when the counters stand."""
        self._first_step = self.global_step
        if (rounds := self.find_rounds()) is not None:
            self.preemption.follow(rounds, self._save_and_tell)
        self.leave_if_due()

    def leave_if_due(self) -> None:
        """Save and leave, where this is due after the step that was made.

        Local, unless it is due: then collective over the world.

        :raises PreemptedExit: on all ranks alike, where it is due.
        """
        if self.preemption.is_due(self.global_step):
            self._save_and_tell()
            self.preemption.leave()

    def leave_if_due_at_end(self) -> None:
        """Save and leave, where this is due after the last step of this cell.

        Nothing moves where there is one cell, or rounds, which a cell that has finished answers; else collective over
        the world.

        :raises PreemptedExit: on all ranks alike, where it is due.
        """
        if self.state.topology.cells > 1 and self.find_rounds() is None and self.preemption.is_due_at_end():
            self._save_and_tell()
            self.preemption.leave()

    def _save_and_tell(self) -> None:
        """Save into the run's folder, where it is looked for, and let callbacks and loggers end in order.

        Collective over the world. Where no cell has made a step since the start there is nothing new to save.
        """
        step, made = self.furthest(self.global_step, self.global_step - self._first_step)
        path: Path | None = None
        if made > 0:
            manager = CheckpointManager(self.config.experiment.output_dir, keep_last=self._kept())
            manager.save(self, step)
            path = manager.output_dir / f"step_{step}"
        self.callbacks.preemption(self, None if path is None else str(path))

    def _kept(self) -> int:
        """Return how many checkpoints stay: as many as the run's own callback keeps."""
        kept = [callback.keep_last_n for callback in self.callbacks if isinstance(callback, CheckpointCallback)]
        return max(kept, default=CheckpointCallback().keep_last_n)
