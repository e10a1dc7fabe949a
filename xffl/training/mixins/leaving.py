"""How a trainer leaves before its time is up: where it looks for it, and what it saves then."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch.distributed as dist

from xffl.checkpoint.manager import CheckpointManager
from xffl.training.callbacks.checkpoint import CheckpointCallback
from xffl.training.callbacks.progress import ProgressCallback, ending_line
from xffl.training.mixins.state import StateMixin
from xffl.training.mixins.validation import ValidationMixin
from xffl.training.preemption import Preemption

__all__ = ["LeavingMixin"]

LOG = logging.getLogger(__name__)


class LeavingMixin(StateMixin, ValidationMixin):
    """Save and leave where all ranks agree to; every trainer has it."""

    preemption: Preemption
    """Hears of signals, while :meth:`fit` runs"""
    _first_step: int = 0
    """Optimizer steps of this cell when training began or went on"""

    _began_s: float = 0.0
    _bytes_across: int = 0
    """Sent by this rank to other cells since the start"""

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
        self.tell_ending("stopped early" if path is None else f"stopped early, saved as {path.name}")

    def tell_ending(self, how: str) -> None:
        """Log what the federation has come to, and let progress callbacks show it as the run's last line.

        Where there are rounds, collective over the world: a gather of some numbers, after which no other cell has
        anything left to show. Without rounds cells end on their own, and nothing is waited for.
        """
        scope, values = self.last_validation or ("cell", {})
        told = [(scope, values if self.run_folder.is_cell_writer else {}, self._bytes_across)]
        has_rounds = self.find_rounds() is not None
        if has_rounds and dist.is_initialized():
            told *= dist.get_world_size()
            dist.all_gather_object(told, told[0])
        if self.state.rank != 0:
            return
        experiment = self.config.experiment
        line = ending_line(
            name=experiment.name,
            how=how,
            cells=self.state.topology.cells,
            validations=[values for one, values, _ in told if one == scope and values],
            rounds=self.rounds if has_rounds else None,
            bytes_sent=sum(sent for *_, sent in told),
            seconds=time.monotonic() - self._began_s,
            folder=str(experiment.output_dir),
        )
        LOG.info("%s", line)
        for callback in self.callbacks:
            if isinstance(callback, ProgressCallback):
                callback.show_ending(line)

    def _kept(self) -> int:
        """Return how many checkpoints stay: as many as the run's own callback keeps."""
        kept = [callback.keep_last_n for callback in self.callbacks if isinstance(callback, CheckpointCallback)]
        return max(kept, default=CheckpointCallback().keep_last_n)
