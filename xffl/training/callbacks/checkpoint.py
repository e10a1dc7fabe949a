"""Checkpoints of a run: when it is saved, which ones are kept, and which one is the best."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xffl.checkpoint.manager import CheckpointManager
from xffl.checkpoint.save import AsyncSaver
from xffl.checks import integer, integer_fields
from xffl.errors import ConfigError
from xffl.training.callbacks.base import Callback
from xffl.training.callbacks.early_stopping import MonitoredMetric

if TYPE_CHECKING:
    from xffl.aggregation import RoundReport
    from xffl.training.trainer import BaseTrainer

__all__ = ["CheckpointCallback"]

BEST = "best"


class CheckpointCallback(Callback):
    """Save the run into ``checkpoints/step_N`` of its folder, where a resumed run looks, and keep the newest ones.

    A checkpoint is collective over the world, so it is written where all ranks of all cells are together. In one cell
    that is after any optimizer step (never inside a window of micro-batches), at the end of an epoch, after a
    validation. **With several cells it is at rounds** and at the end, since between rounds cells make different numbers
    of steps: ``save_frequency`` then means the first round at or after that many steps, ``every_epochs`` the first one
    at or after that many epochs, both of the cell that has gone furthest. The number in the name is that cell's step.
    That costs one all-reduce of two numbers over the world at each round.

    **It comes last**: what a callback after it would still learn from the same step would not be in the checkpoint, so
    callbacks with a state are refused there.

    :param checkpoint_dir: Where checkpoints go; ``None`` for ``checkpoints`` in the run's folder, the only place where
        a run that is started again looks for them.
    :param save_frequency: Optimizer steps between two checkpoints; ``None`` for none by steps.
    :param every_epochs: Epochs between two; ``None`` for none by epochs.
    :param every_rounds: Rounds between two; ``None`` for none by rounds.
    :param keep_last_n: How many to keep; ``final`` and ``best`` do not count and are never deleted.
    :param save_final: Whether to save ``final`` at the end, after the last round.
    :param is_async: Whether a thread writes while training goes on. Needs memory of the host for a copy of what the
        rank holds. The end waits for it; ``final`` is written at once.
    :param best: Name of a validation metric: whenever it is better than ever, the run is saved as ``best``. With
        several cells it is the mean of what they have measured since the round before.
    :param mode: Whether its smallest (``min``) or largest (``max``) value is the best.
    :raises ConfigError: if an argument is invalid.
    """

    def __init__(
        self,
        *,
        checkpoint_dir: str | None = None,
        save_frequency: int | None = None,
        every_epochs: int | None = None,
        every_rounds: int | None = None,
        keep_last_n: int = 3,
        save_final: bool = True,
        is_async: bool = False,
        best: str | None = None,
        mode: str = "min",
    ) -> None:
        self.checkpoint_dir = None if checkpoint_dir is None else Path(checkpoint_dir)
        self.save_frequency = save_frequency
        self.every_epochs = every_epochs
        self.every_rounds = every_rounds
        integer_fields(self, "save_frequency", "every_epochs", "every_rounds", may_be_none=True)
        self.save_final = save_final
        self.is_async = is_async
        self.keep_last_n = integer("keep_last_n", keep_last_n)
        self.best = best
        self.mode = mode
        self.monitored = None if best is None else MonitoredMetric(best, mode)
        self._manager = CheckpointManager("", keep_last=self.keep_last_n)
        self._saver: AsyncSaver | None = None
        self._saved = {"step": 0, "epoch": 0, "round": 0}

    @property
    def folder(self) -> Path:
        """Where the checkpoints lie; known from the start of a run."""
        return self._manager.output_dir

    def state_dict(self) -> dict[str, Any]:
        """Return when it was saved last, and the best value."""
        return {"saved": dict(self._saved), "best": None if self.monitored is None else self.monitored.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state."""
        self._saved = dict(state["saved"])
        if self.monitored is not None and state["best"] is not None:
            self.monitored.load_state_dict(state["best"])

    def pre_fit(self, trainer: BaseTrainer) -> None:
        """Check that it comes last, and that there are rounds where it is to save at them."""
        is_after = False
        for callback in trainer.callbacks:
            if is_after and type(callback).state_dict is not Callback.state_dict:
                raise ConfigError(
                    f"{type(callback).__name__} comes after CheckpointCallback, which would save it before it has seen "
                    "the step; give CheckpointCallback last"
                )
            is_after = is_after or callback is self
        asked = getattr(trainer.config, "federation", None)
        has_rounds = asked is not None and (asked.has_rounds or asked.is_alone)
        wants_rounds = self.every_rounds is not None or (
            not _is_alone(trainer)
            and (self.save_frequency is not None or self.every_epochs is not None or self.best is not None)
        )
        if wants_rounds and not has_rounds:
            raise ConfigError("checkpoints at rounds were asked for, and there are none; give federation.every")
        if self.checkpoint_dir is None:
            self._manager = CheckpointManager(trainer.config.experiment.output_dir, keep_last=self.keep_last_n)
        else:
            self._manager.output_dir = self.checkpoint_dir

    def post_setup(self, trainer: BaseTrainer) -> None:
        """Make what saves in the background; collective over the world."""
        if self.is_async:
            self._saver = AsyncSaver(trainer.state)

    def post_optimizer_step(self, trainer: BaseTrainer) -> None:
        """Save where it is due, in one cell.

        Cells with equal numbers of steps and of batches could save here as well, between two rounds.
        """
        if _is_alone(trainer) and self._is_due(step=trainer.global_step):
            self._save(trainer, step=trainer.global_step)

    def post_train_epoch(self, trainer: BaseTrainer) -> None:
        """Save where it is due, in one cell."""
        if _is_alone(trainer) and self._is_due(epoch=trainer.current_epoch + 1):
            self._save(trainer, step=trainer.global_step, epoch=trainer.current_epoch + 1)

    def post_round(self, trainer: BaseTrainer, report: RoundReport) -> None:
        """Save where it is due; collective over the world."""
        place = {"round": trainer.rounds}
        if not _is_alone(trainer) and (self.save_frequency is not None or self.every_epochs is not None):
            place["step"], place["epoch"] = trainer.furthest(trainer.global_step, trainer.current_epoch)
        if self._is_due(**place):
            self._save(trainer, **({"step": trainer.furthest(trainer.global_step)[0]} | place))
        if not _is_alone(trainer):
            self._save_best(trainer)

    def post_validation(self, trainer: BaseTrainer, metrics: Mapping[str, float]) -> None:
        """Note the metric, and save the best in one cell."""
        if self.monitored is not None:
            self.monitored.update(metrics)
            if _is_alone(trainer):
                self._save_best(trainer)

    def pre_save_checkpoint(self, trainer: BaseTrainer, path: str) -> None:
        """Wait for what is being written; collective over the world."""
        if self._saver is not None:
            self._saver.wait()

    def preemption(self, trainer: BaseTrainer, path: str | None) -> None:
        """Wait for what is being written; collective over the world. The trainer has saved by itself."""
        self._close_saver()

    def post_fit(self, trainer: BaseTrainer) -> None:
        """Save the end; collective over the world."""
        if not _is_alone(trainer):
            self._save_best(trainer)
        self._close_saver()
        if self.save_final or trainer.lone_cell() is not None:  # the next round's job goes on from there
            self._write(trainer, self._manager.path_of("final"))

    def _is_due(self, **now: int) -> bool:
        """Tell whether one of the counts has come to or passed a multiple of what was asked for."""
        asked = {"step": self.save_frequency, "epoch": self.every_epochs, "round": self.every_rounds}
        return any(
            (every := asked[name]) is not None and count // every > self._saved[name] // every
            for name, count in now.items()
        )

    def _save(self, trainer: BaseTrainer, *, step: int, **place: int) -> None:
        self._saved |= {"step": step, **place}
        self._write(trainer, self._manager.path_of(step))

    def _save_best(self, trainer: BaseTrainer) -> None:
        """Save, where the metric is better than ever; collective over the world."""
        if self.monitored is None:
            return
        value = self.monitored.take() if _is_alone(trainer) else self.monitored.take_mean(trainer)
        if value is not None and self.monitored.is_better(value):
            trainer.save_checkpoint(self.folder / BEST, saver=None if self._saver is None else self._saver.save)

    def _write(self, trainer: BaseTrainer, path: Path) -> None:
        """Write a checkpoint, in the background where that is asked for, and delete the oldest when it is whole."""
        saver = None if self._saver is None else self._saver.save
        self._manager.rotate(path, trainer.save_checkpoint(path, saver=saver))

    def _close_saver(self) -> None:
        if self._saver is not None:
            self._saver.close()
            self._saver = None


def _is_alone(trainer: BaseTrainer) -> bool:
    return trainer.state.topology.cells == 1
