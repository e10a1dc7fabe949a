"""Rounds in a Trainer of Lightning: the callback that is called at its events."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info

from xffl.aggregation.algorithms.clients import Client
from xffl.aggregation.algorithms.every_steps import Schedule
from xffl.aggregation.report import RoundReport
from xffl.compat.lightning import choose_checkpoint
from xffl.distributed.adoption import adopt
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.several_worlds.cell_notes import open_notes
from xffl.errors import ConfigError, StateError
from xffl.integrations.cells import check_cells
from xffl.integrations.checkpoints import CellCheckpoints, WholeCheckpoint, trained_names
from xffl.integrations.lightning.cell_rounds import CellRounds
from xffl.integrations.lightning.lightning_files import LightningFiles
from xffl.integrations.lightning.places import folder_in
from xffl.integrations.lightning.refusals import (
    check_data,
    check_epochs,
    check_loggers,
    check_saves,
    check_trainer,
)
from xffl.integrations.lightning.round_checkpoint import RoundCheckpoint
from xffl.integrations.weights import find_count, label_names, shifts_labels

__all__ = ["FederatedRounds"]


AUTO_REQUEUE = "hpc_ckpt_"
"""How the names begin of checkpoints that Lightning saves when SLURM is about to end the job"""


class Phase(Enum):
    """Where the one ``fit`` is that rounds are made for."""

    BEFORE = "before"
    SET_UP = "set up"
    UNDER_WAY = "under way"
    OVER = "over"


class FederatedRounds(Callback):  # type: ignore[misc]
    """Lets a Trainer of Lightning train one cell of a federation.

    In a script that is started with ``xffl exec --isolate`` or ``--elastic`` (:doc:`/frameworks`) Lightning trains over
    the ranks of its cell as it always does, by DDP or by ``ModelParallelStrategy`` (FSDP2), and rounds are made between
    its optimizer steps. Isolated cells begin with the model of cell 0. Checkpoints of ``ModelCheckpoint`` callbacks go
    into ``cell_N`` below their folder and have the state of rounds beside them; ``trainer.fit()`` continues by itself
    from the newest ones that all cells have.

    .. code-block:: python

       trainer = L.Trainer(default_root_dir=cell_folder("runs"), callbacks=[FederatedRounds(every=100)])
       trainer.fit(module, DataLoader(cell_split(dataset), batch_size=8, shuffle=True))

    :param every: As for :class:`xffl.FederatedScaling`.
    :param algorithm: As for :class:`xffl.FederatedScaling`.
    :param weight: What a cell's model counts in a round: the ``samples`` that it was trained on since the last one (the
        rows of a batch's first tensor), the ``tokens`` (labels other than -100, where a batch is a mapping with
        ``labels``), or a number for this cell.
    :param data: ``split`` where :func:`cell_split <xffl.integrations.lightning.places.cell_split>` or a loader of
        xffl's deals the samples out to the cells, without which training does not begin; ``own`` where each cell has
        data of its own.
    :param delay: As for :class:`xffl.FederatedScaling`.
    :param alpha: As for :class:`xffl.FederatedScaling`.
    :param client: As for :class:`xffl.FederatedScaling`.
    :param moments: As for :class:`xffl.FederatedScaling`.
    :param aggregator: Keywords of the aggregator, such as ``{"codec": "int8"}``.
    :param resume: Whether training continues from the newest checkpoint that all cells have.
    :raises ConfigError: if the weight or ``data`` is invalid.
    """

    def __init__(
        self,
        *,
        every: int | str | Mapping[str, Any] | Schedule | None = None,
        algorithm: str | Mapping[str, Any] | None = None,
        weight: Literal["samples", "tokens"] | float = "samples",
        data: Literal["split", "own"] = "split",
        delay: int | None = None,
        alpha: float | None = None,
        client: str | Mapping[str, Any] | Client | None = None,
        moments: str | Mapping[str, Any] | None = None,
        aggregator: Mapping[str, Any] | None = None,
        resume: bool = True,
    ) -> None:
        find_count(weight, 0)
        if data not in ("split", "own"):
            raise ConfigError(f"data is {data!r}; give 'split' or 'own'")
        self.state: DistributedState | None = None
        """Describes this rank's cell, from ``setup`` on."""
        self.resumed: WholeCheckpoint | None = None
        """The checkpoint that training goes on from."""
        self._weight = weight
        self._data = data
        self._resume = resume
        self._options: dict[str, Any] = {
            "every": every,
            "algorithm": algorithm,
            "delay": delay,
            "alpha": alpha,
            "client": client,
            "moments": moments,
            "aggregator": aggregator,
        }
        self._phase = Phase.BEFORE
        self._rounds: CellRounds | None = None

    @property
    def reports(self) -> list[RoundReport]:
        """The reports of this process's rounds."""
        return [] if self._rounds is None else self._rounds.reports

    @property
    def total_weight(self) -> float:
        """Sum of the weights that all cells had in all rounds before the newest step.

        It is the same in all cells that made the newest round.
        """
        return 0.0 if self._rounds is None else self._rounds.total_weight

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Find the cell, and the checkpoint to go on from: the process group is there, and nothing is loaded yet.

        Collective over the job.

        :param trainer: The Trainer.
        :param pl_module: The module.
        :param stage: What the Trainer does.
        :raises ConfigError: if its ranks are no single cell, or what it is asked for does not go together with rounds.
        :raises StateError: if rounds were made for another ``fit`` before.
        """
        if stage != "fit":
            return
        if self._phase is not Phase.BEFORE:
            raise StateError("FederatedRounds makes the rounds of one trainer.fit(); make another one for the next")
        check_trainer(trainer)
        state = adopt()
        check_cells(state, "Lightning's Trainer")
        notes = open_notes(state, "lightning")
        check_saves(trainer, state, self._options["every"])
        check_loggers(trainer, notes)
        callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
        folders = [_take_folder(callback, trainer, state.cell) for callback in callbacks]
        files = LightningFiles(folders, trainer.strategy.remove_checkpoint)
        checkpoints = CellCheckpoints(files, state, notes, trained_names(pl_module))
        is_shifted, names = shifts_labels(pl_module), label_names(pl_module)
        count = find_count(self._weight, state.cell_rank, is_shifted=is_shifted, names=names)
        counted = self._weight if isinstance(self._weight, str) else "a number"
        self.resumed = checkpoints.agree(f"weight={counted}", starts_over=not self._resume)
        self.state = state
        self._rounds = CellRounds(
            trainer,
            state,
            notes=notes,
            files=files,
            checkpoints=checkpoints,
            count=count,
            options=self._options,
            resumed=self.resumed,
        )
        for callback in callbacks:
            if isinstance(callback, RoundCheckpoint):
                callback.follow(self._rounds.count_rounds)
        self._phase = Phase.SET_UP
        path = None if self.resumed is None else str(files.path_of(self.resumed.folder))
        self._go_on_from(trainer, path)
        self._save_with_rounds(trainer, self._rounds)
        self._finish_without_steps(trainer)
        # First, so that the other callbacks see the last round's model in on_train_end.
        trainer.callbacks = [self, *(callback for callback in trainer.callbacks if callback is not self)]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin with one model in all cells: optimizers, wrappers and checkpoint are there."""
        if self._rounds is None or self.state is None:
            return
        if self._data == "split":
            check_data(trainer, self.state)
        check_epochs(trainer, self.state, self._rounds.notes, self._options["every"])
        self._phase = Phase.UNDER_WAY
        self._rounds.begin()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note the batch, which the module's hook of this name may still skip."""
        if self._rounds is not None:
            self._rounds.note(batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        """Count the batch, unless ``training_step`` has skipped it."""
        if self._rounds is not None:
            self._rounds.count()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the newest round, in each step, so that it is there in those that Lightning writes."""
        if self._rounds is not None:
            if not pl_module.automatic_optimization:
                self._rounds.count()  # a gradient was accumulated, without a step
            self._rounds.note_total_weight()
        if self.reports:
            values = {name: torch.tensor(value, dtype=torch.float64) for name, value in self._newest_round().items()}
            self.log_dict(values, on_step=True, on_epoch=False)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Make the last rounds, until all cells have finished; all hold the same model then."""
        if self._rounds is None or self._phase is not Phase.UNDER_WAY:
            return
        self._phase = Phase.OVER
        self._rounds.finish()
        if self.reports:
            newest = self._newest_round()
            trainer.logged_metrics.update(newest)
            for logger in trainer.loggers:
                logger.log_metrics(newest, step=trainer.global_step)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the other cells after an error."""
        if self._rounds is not None:
            self._phase = Phase.OVER
            self._rounds.leave(exception)

    def _newest_round(self) -> dict[str, float]:
        report = self.reports[-1]
        return {
            "xffl/round": float(report.round),
            "xffl/cells": float(sum(weight > 0 for weight in report.weights) - len(report.dropped)),
            "xffl/bytes": float(report.bytes_across),
            "xffl/seconds": report.seconds,
        }

    def _go_on_from(self, trainer: Any, path: str | None) -> None:
        """Let ``fit`` load the checkpoint that the cells have agreed on."""

        def choose(given: Any) -> Any:
            if self._phase is not Phase.SET_UP:
                return given
            if given is not None and Path(given).name.startswith(AUTO_REQUEUE):
                raise ConfigError(
                    f"{given} was saved by Lightning's auto-requeue without rounds, and nothing continues from it; "
                    "move it away"
                )
            if given is not None:
                raise ConfigError(
                    f"fit(ckpt_path={str(given)!r}): FederatedRounds continues from the newest checkpoint that all "
                    "cells have; leave it out, or give FederatedRounds(resume=False) to begin anew"
                )
            return path

        choose_checkpoint(trainer, choose)

    def _save_with_rounds(self, trainer: Any, rounds: CellRounds) -> None:
        """Add the state of rounds to what is saved, and keep what other cells may need; weights alone have none.

        Nothing is saved where SLURM is about to requeue the job.
        """
        save_checkpoint = trainer.save_checkpoint

        @wraps(save_checkpoint)
        def save_with_rounds(filepath: Any, weights_only: bool | None = None, *args: Any, **kwargs: Any) -> None:
            def write() -> None:
                save_checkpoint(filepath, weights_only, *args, **kwargs)

            if Path(filepath).name.startswith(AUTO_REQUEUE):
                # Lightning saves these in the handler of a signal, where a rank may be in the middle of a round.
                rank_zero_info("FederatedRounds: the job continues from the newest checkpoint of ModelCheckpoint")
            elif weights_only or self._phase is not Phase.UNDER_WAY:
                rounds.save_without_rounds(Path(filepath), write)
            else:
                rounds.save(Path(trainer.strategy.broadcast(str(filepath))), write)

        def remove_checkpoint(filepath: Any) -> None:
            rounds.remove(Path(filepath))

        trainer.save_checkpoint = save_with_rounds
        trainer.strategy.remove_checkpoint = remove_checkpoint

    def _finish_without_steps(self, trainer: Any) -> None:
        """Make the last rounds also where no step is left: Lightning calls no hook of a training that was over."""
        run = trainer.fit_loop.run

        @wraps(run)
        def run_and_finish() -> None:
            run()
            if self._phase is Phase.SET_UP:
                self.on_train_start(trainer, trainer.lightning_module)
                self.on_train_end(trainer, trainer.lightning_module)

        trainer.fit_loop.run = run_and_finish


def _take_folder(callback: Any, trainer: Any, cell: int) -> Path:
    """Give a callback's checkpoints a folder of the cell, which is the same after another start; return it.

    That of a logger, which Lightning would take, is another one then.
    """
    given = Path(trainer.default_root_dir, "checkpoints") if callback.dirpath is None else Path(callback.dirpath)
    folder = folder_in(given.expanduser().resolve(), cell)
    callback.dirpath = str(folder)
    return folder
