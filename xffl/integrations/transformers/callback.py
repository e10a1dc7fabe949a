"""The rounds of a Trainer: what happens at its events."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import SaveStrategy, has_length

from xffl.aggregation.federated_scaling import FederatedScaling
from xffl.aggregation.report import RoundReport
from xffl.aggregation.rounds.loop_hooks import LoopHooks
from xffl.compat.transformers import save_checkpoint
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.several_worlds.cell_notes import CellNotes
from xffl.errors import StateError
from xffl.integrations.cells import find_unlike_schedule
from xffl.integrations.checkpoints import CellCheckpoints, WholeCheckpoint
from xffl.integrations.entering import enter_rounds
from xffl.integrations.frozen import check_frozen
from xffl.integrations.round_saves import RoundSaves
from xffl.integrations.transformers.reference import check_reference
from xffl.integrations.transformers.trainer_files import find_name_aside
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
        self._saves: RoundSaves | None = None
        """Where the cells would save after unlike rounds by themselves: when they save."""

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
        scaling = self._scaling
        is_left = self._phase is Phase.OVER
        self._phase = Phase.OVER
        self._scaling = None
        if scaling is not None and not is_left:
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
        notes = self._notes
        if notes is not None and not args.save_only_model and self._saves_unlike(notes, args, trainer_state, **kwargs):
            self._saves = RoundSaves(scaling, self.state, notes, before=self._rounds_before())
            scaling.attach(LoopHooks(before_final_rounds=self._save_behind_end, defers_start=self._saves.is_due))
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

        A training that goes on behind its last step comes to the end of an epoch again. Cells that would save after
        unlike rounds save after the next one instead.

        :param trainer_state: Trainer's state.
        :param control: What Trainer does next, as all other callbacks have left it.
        """
        if self._scaling is None:
            return
        is_saved = trainer_state.global_step == self._saved_step
        if self._saves is not None:
            if control.should_save and not is_saved and not self._saves.is_due():
                self._saves.request()
            control.should_save = self._saves.is_due()
        elif is_saved:
            control.should_save = False
        if not control.should_save:
            return
        self._scaling.settle()
        self._log_rounds(control)

    def on_save(self, args: Any, trainer_state: Any, control: Any, **kwargs: Any) -> None:
        """Add the state of rounds to Trainer's checkpoint; without an optimizer in it nobody resumes from it."""
        if self._scaling is None or self._checkpoints is None or args.save_only_model:
            return
        meetings = self._rounds_before() + self._scaling.meetings
        saved = {"rounds": self._scaling.state_dict(), "count": self._count.counted()}
        folder = self._folder_of(args, trainer_state)
        self._checkpoints.save(folder, trainer_state.global_step, meetings, saved)
        self._saved_step = trainer_state.global_step
        if self._saves is not None:
            self._saves.note_saved()

    def on_train_end(self, args: Any, trainer_state: Any, control: Any, **kwargs: Any) -> None:
        """Make the last rounds, until all cells have finished; all hold the same model then."""
        self._phase = Phase.OVER
        if self._scaling is not None:
            self._scaling.__exit__(None, None, None)
            self._save_behind_end()
            if self._saves is not None and self._notes is not None:
                self._notes.end()
            self._log_rounds(control)
        self._scaling = None

    def _folder_of(self, args: Any, trainer_state: Any) -> Path:
        return Path(args.output_dir) / f"checkpoint-{trainer_state.global_step}"

    def _rounds_before(self) -> int:
        """Return how many rounds, and checks that skipped one, the cell had entered before this start."""
        return 0 if self.resumed is None else self.resumed.meetings

    def _saves_unlike(
        self, notes: CellNotes, args: Any, trainer_state: Any, *, train_dataloader: Any, **kwargs: Any
    ) -> bool:
        """Tell whether the cells of a job would save after unlike rounds by themselves; collective over the job."""
        steps = trainer_state.save_steps
        if args.save_strategy == SaveStrategy.EPOCH:
            # A stream does not tell its length, which is taken for another one in each cell.
            steps = len(train_dataloader) if has_length(train_dataloader) else f"cell {self.state.cell}"
        is_fixed = find_unlike_schedule(self._options["every"]) is None
        accumulated = args.gradient_accumulation_steps
        notes.write("saves", f"{args.save_strategy} {steps} {accumulated} {trainer_state.max_steps} {is_fixed}")
        told = notes.gather("saves")
        return len(told) > 1 and (len(set(told)) > 1 or not is_fixed)

    def _save_behind_end(self) -> None:
        """Save behind this cell's last step if the others save, too: between two of its last rounds, or behind them."""
        if self._saves is None or self._checkpoints is None or not self._saves.is_due():
            return
        self._checkpoints.put_aside(self._folder_of(self._trainer.args, self._trainer.state), find_name_aside)
        save_checkpoint(self._trainer)

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
