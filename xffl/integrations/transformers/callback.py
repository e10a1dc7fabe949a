"""The rounds of a Trainer: what happens at its events."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from xffl.aggregation.federated_scaling import FederatedScaling
from xffl.aggregation.report import RoundReport
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.several_worlds.cell_notes import CellNotes
from xffl.errors import StateError
from xffl.integrations.checkpoints import CellCheckpoints, WholeCheckpoint
from xffl.integrations.entering import enter_rounds
from xffl.integrations.frozen import check_frozen
from xffl.integrations.transformers.reference import check_reference
from xffl.integrations.transformers.zero import take_engine
from xffl.integrations.weights import BatchCount

__all__ = ["TrainerRounds"]


class Phase(Enum):
    """Where the one training is that rounds are made for."""

    BEFORE = "before"
    UNDER_WAY = "under way"
    OVER = "over"


class TrainerRounds(TrainerCallback):  # type: ignore[misc]
    """Makes the rounds of one ``trainer.train()``, and keeps their state in Trainer's checkpoints.

    :param trainer: The Trainer.
    :param state: The state of this rank.
    :param count: Counts what it trains on.
    :param options: Keywords of :class:`xffl.FederatedScaling`.
    """

    def __init__(self, trainer: Any, state: DistributedState, count: BatchCount, options: Mapping[str, Any]) -> None:
        self.state = state
        """Describes this rank's cell."""
        self.reports: list[RoundReport] = []
        """The reports of this process's rounds."""
        self.total_weight = 0.0
        """Sum of the weights that all cells had in all rounds before the newest step; the same in all cells that made
        the newest round."""
        self.resumed: WholeCheckpoint | None = None
        """The checkpoint that training goes on from."""
        self._trainer = trainer
        self._count = count
        self._options = options
        self._checkpoints: CellCheckpoints | None = None
        self._notes: CellNotes | None = None
        self._scaling: FederatedScaling | None = None
        self._phase = Phase.BEFORE
        self._logged = 0
        """Reports that Trainer's log has."""
        self._saved_step: int | None = None
        """The step of the newest whole checkpoint"""

    def begin(self, checkpoints: CellCheckpoints, notes: CellNotes, arguments: str, *, starts_over: bool) -> str | None:
        """Return the folder that Trainer is to resume from, if any; collective over the job.

        :param checkpoints: The cell's checkpoints.
        :param notes: What the cells of this job tell each other.
        :param arguments: What the cells must have in common.
        :param starts_over: Whether no checkpoint is to be used.
        :return: The folder of a checkpoint of this cell.
        :raises StateError: if rounds were made for another training before.
        :raises ConfigError: if the cells do not go together.
        """
        if self._phase is not Phase.BEFORE:
            raise StateError("federate() makes the rounds of one trainer.train(); make another Trainer for the next")
        self._phase = Phase.UNDER_WAY
        self._checkpoints = checkpoints
        self._notes = notes
        self._trainer.add_callback(SavePreparation(self))
        self.resumed = checkpoints.agree(arguments, starts_over=starts_over)
        check_reference(self._trainer, self.state, notes)
        if self.resumed is None:
            return None
        self._saved_step = self.resumed.step
        return str(self.resumed.folder)

    def end(self, error: BaseException) -> None:
        """Leave the other cells after an error; local."""
        self._phase = Phase.OVER
        scaling = self._scaling
        self._scaling = None
        if scaling is not None:
            scaling.__exit__(type(error), error, error.__traceback__)

    def on_train_begin(self, args: Any, trainer_state: Any, control: Any, **kwargs: Any) -> None:
        """Begin with one model in all cells: optimizer, wrappers and checkpoint are there."""
        model, optimizer = self._trainer.model_wrapped, self._trainer.optimizer
        if self._trainer.is_deepspeed_enabled:
            model, optimizer = take_engine(model)
        if self._notes is not None:
            check_frozen(model, self.state, self._notes, seeding="call transformers.set_seed")
        scaling, _ = enter_rounds(
            model,
            optimizer,
            self.state,
            count=self._count,
            on_round=self.reports.append,
            options=self._options,
            checkpoints=self._checkpoints,
            resumed=self.resumed,
        )
        self._scaling = scaling
        if self.resumed is not None and trainer_state.max_steps <= trainer_state.global_step:
            control.should_training_stop = True  # was killed behind its last step
        scaling.join()  # before the first batch, which Trainer reads before the optimizer steps
        self.total_weight = scaling.total_weight

    def on_step_end(self, args: Any, trainer_state: Any, control: Any, **kwargs: Any) -> None:
        """Write rounds into Trainer's log."""
        if self._scaling is not None:
            self.total_weight = self._scaling.total_weight
        self._log_rounds(control)

    def prepare_save(self, trainer_state: Any, control: Any) -> None:
        """Merge a round that is under way before a save, and leave out one that would write over a whole checkpoint.

        A training that goes on behind its last step comes to the end of an epoch again.

        :param trainer_state: Trainer's state.
        :param control: What Trainer does next, as all other callbacks have left it.
        """
        if not control.should_save or self._scaling is None:
            return
        if trainer_state.global_step == self._saved_step:
            control.should_save = False
            return
        self._scaling.settle()
        self._log_rounds(control)

    def on_save(self, args: Any, trainer_state: Any, control: Any, **kwargs: Any) -> None:
        """Add the state of rounds to Trainer's checkpoint; without an optimizer in it nobody resumes from it."""
        if self._scaling is None or self._checkpoints is None or args.save_only_model:
            return
        before = 0 if self.resumed is None else self.resumed.meetings
        meetings = before + self._scaling.meetings
        saved = {"rounds": self._scaling.state_dict(), "count": self._count.counted()}
        folder = Path(args.output_dir) / f"checkpoint-{trainer_state.global_step}"
        self._checkpoints.save(folder, trainer_state.global_step, meetings, saved)
        self._saved_step = trainer_state.global_step

    def on_train_end(self, args: Any, trainer_state: Any, control: Any, **kwargs: Any) -> None:
        """Make the last rounds, until all cells have finished; all hold the same model then."""
        scaling = self._scaling
        self._scaling = None
        self._phase = Phase.OVER
        if scaling is not None:
            scaling.__exit__(None, None, None)
            self._log_rounds(control)

    def _log_rounds(self, control: Any) -> None:
        """Write the rounds since the last call into Trainer's log, from which all of its loggers read.

        Through ``Trainer.log``: TRL's trainers override it, and would add the means of their metrics to these lines and
        start them anew.
        """
        should_log = control.should_log
        reports = self.reports[self._logged :]
        self._logged = len(self.reports)
        for report in reports:
            cells = sum(weight > 0 for weight in report.weights) - len(report.dropped)
            Trainer.log(
                self._trainer,
                {
                    "xffl/round": report.round,
                    "xffl/cells": cells,
                    "xffl/bytes": report.bytes_across,
                    "xffl/seconds": round(report.seconds, 4),
                },
            )
        control.should_log = should_log  # a log has unset it, and Trainer's own of this step is still to come


class SavePreparation(TrainerCallback):  # type: ignore[misc]
    """Prepares saves when all other callbacks have said whether there is one: it is to be the last.

    :param rounds: The rounds.
    """

    def __init__(self, rounds: TrainerRounds) -> None:
        self._rounds = rounds

    def on_step_end(self, args: Any, trainer_state: Any, control: Any, **kwargs: Any) -> None:
        """Prepare a save after a step."""
        self._rounds.prepare_save(trainer_state, control)

    def on_epoch_end(self, args: Any, trainer_state: Any, control: Any, **kwargs: Any) -> None:
        """Prepare a save after an epoch."""
        self._rounds.prepare_save(trainer_state, control)
