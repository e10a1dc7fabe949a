"""The rounds of one ``fit`` in one cell, and their state beside Lightning's checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xffl.aggregation.federated_scaling import FederatedScaling
from xffl.aggregation.report import RoundReport
from xffl.checkpoint.generators import RandomState
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.several_worlds.cell_notes import CellNotes
from xffl.integrations.checkpoints import CellCheckpoints, WholeCheckpoint
from xffl.integrations.entering import enter_rounds
from xffl.integrations.frozen import check_frozen
from xffl.integrations.lightning.closures import call_closure_first
from xffl.integrations.lightning.lightning_files import LightningFiles
from xffl.integrations.weights import BatchCount

__all__ = ["CellRounds"]


class CellRounds:
    """Makes the rounds of one ``fit``.

    :param trainer: The Trainer.
    :param state: The state of this rank.
    :param notes: What the cells of this job tell each other.
    :param files: Where Lightning keeps the cell's checkpoints.
    :param checkpoints: Which of them are whole.
    :param count: Counts what this rank trains on.
    :param options: Keywords of :class:`xffl.FederatedScaling`.
    :param resumed: The checkpoint that Lightning goes on from, if any.
    """

    def __init__(
        self,
        trainer: Any,
        state: DistributedState,
        *,
        notes: CellNotes,
        files: LightningFiles,
        checkpoints: CellCheckpoints,
        count: BatchCount,
        options: Mapping[str, Any],
        resumed: WholeCheckpoint | None,
    ) -> None:
        self.notes = notes
        """What the cells of this job tell each other."""
        self.reports: list[RoundReport] = []
        """The reports of this process's rounds."""
        self.total_weight = 0.0
        """Sum of the weights that all cells had in all rounds before the newest step."""
        self._trainer = trainer
        self._state = state
        self._files = files
        self._checkpoints = checkpoints
        self._count = count
        self._options = options
        self._resumed = resumed
        self._random = RandomState(trainer.strategy.root_device)
        self._remove = trainer.strategy.remove_checkpoint
        self._scaling: FederatedScaling | None = None
        self._noted: list[Any] = []
        """The batch of this moment, until it counts."""

    def begin(self) -> None:
        """Begin with one model in all cells, or go on from a checkpoint that was loaded; collective over the job."""
        model = self._trainer.strategy.model
        check_frozen(model, self._state, self.notes, seeding="call lightning.seed_everything")
        for optimizer in self._trainer.optimizers:
            call_closure_first(optimizer)
            if not self._trainer.lightning_module.automatic_optimization:
                # Not Lightning's event, which torch's own optimizer does not cause. Before the rounds' own hooks.
                optimizer.register_step_pre_hook(self._count_before_step)
        self._scaling, saved = enter_rounds(
            model,
            self._trainer.optimizers,
            self._state,
            count=self._count,
            on_round=self.reports.append,
            options=self._options,
            checkpoints=self._checkpoints,
            resumed=self._resumed,
        )
        if saved:
            self._random.load_state_dict(saved["random"])
        self._scaling.join()  # Lightning calls training_step, and not the module, where the first batch would join
        self.note_total_weight()

    def note(self, batch: Any) -> None:
        """Note a batch that is about to be trained on, or skipped; local."""
        self._noted = [batch]

    def count(self) -> None:
        """Count the noted batch, once: it is trained on; local."""
        for batch in self._noted:
            self._count.add(batch)
        self._noted = []

    def note_total_weight(self) -> None:
        """Note what all cells have trained on together; local."""
        if self._scaling is not None:
            self.total_weight = self._scaling.total_weight

    def count_rounds(self) -> int:
        """Return how many rounds, and checks that skipped one, the cell has behind it, in all starts; local."""
        if self._scaling is None:
            return self._rounds_before()
        return self._rounds_before() + self._scaling.meetings - int(self._scaling.is_under_way)

    def _rounds_before(self) -> int:
        """Return how many the cell had entered before this start."""
        return 0 if self._resumed is None else self._resumed.meetings

    def _count_before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Count the batch of a module that calls ``loss.backward`` itself."""
        self.count()

    def finish(self) -> None:
        """Make the last rounds until all cells have finished, and hold the same model; collective over the job."""
        scaling = self._scaling
        self._scaling = None
        if scaling is not None:
            scaling.__exit__(None, None, None)

    def leave(self, error: BaseException) -> None:
        """Leave the other cells after an error; local."""
        scaling = self._scaling
        self._scaling = None
        if scaling is not None:
            scaling.__exit__(type(error), error, error.__traceback__)

    def save(self, path: Path, write: Callable[[], None]) -> None:
        """Write a checkpoint of Lightning's, and add the state of rounds; collective over the cell.

        A round that is under way is merged before.

        :param path: Lightning's file, or folder.
        :param write: Writes it.
        """
        if self._scaling is None or not self._files.has(path):
            self.save_without_rounds(path, write)
            return
        self._scaling.settle()
        folder = self._files.folder_of(path)
        self._checkpoints.prepare(folder)
        if self._state.cell_rank == 0:
            self._files.note_wanted(folder)
        write()
        saved = {
            "rounds": self._scaling.state_dict(),
            "count": self._count.counted(),
            "random": self._random.state_dict(),
        }
        self._checkpoints.save(folder, self._trainer.global_step, self._rounds_before() + self._scaling.meetings, saved)

    def save_without_rounds(self, path: Path, write: Callable[[], None]) -> None:
        """Write a checkpoint of Lightning's that nothing continues from, also where there was another one before.

        :param path: Lightning's file, or folder.
        :param write: Writes it.
        """
        written = path.resolve()  # last.ckpt may be a link, through which Lightning writes
        if self._files.has(written):
            self._checkpoints.unmark(self._files.folder_of(written))
        write()

    def remove(self, path: Path) -> None:
        """Remove a checkpoint of Lightning's, unless a slower cell may still need it; on all ranks of the cell."""
        if not self._files.has(path):
            self._remove(path)
            return
        if self._state.cell_rank != 0:
            return
        folder = self._files.folder_of(path)
        if self._checkpoints.is_whole(folder):
            self._files.note_unwanted(folder)
            self._checkpoints.remove_surplus()
        else:
            if folder.is_dir():  # those of weights alone have none
                self._files.note_unwanted(folder)
            self._files.remove(folder)
