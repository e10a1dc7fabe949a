"""What a Trainer of Lightning may be asked to do that does not go together with rounds."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader

from xffl.aggregation.algorithms.schedules import EveryEpochs, Schedule
from xffl.compat.lightning import saves_by_time
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.several_worlds.cell_notes import CellNotes
from xffl.errors import ConfigError
from xffl.integrations.cells import find_unlike_schedule
from xffl.integrations.dealing import is_dealt_out
from xffl.integrations.lightning.round_checkpoint import RoundCheckpoint
from xffl.training.data.loaders import CellLoader
from xffl.training.data.sampler import CellOrder
from xffl.training.data.streams import CellStream

__all__ = ["check_data", "check_epochs", "check_loggers", "check_saves", "check_trainer"]

_STRATEGIES = (DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy)
_COUNTERS = ("epoch", "step", "global_step")
"""What ``monitor`` names where the newest checkpoints are to stay: it is alike in all cells"""
_REASONS = {
    callbacks.StochasticWeightAveraging: "it replaces a cell's model by an average of its own at the end",
    callbacks.WeightAveraging: "it replaces a cell's model by an average of its own after the last round",
    callbacks.BatchSizeFinder: "it trains one cell for a trial while the others wait for it; give batch_size",
    callbacks.LearningRateFinder: "it trains one cell for a trial, and each cell would find another rate; give lr",
    callbacks.OnExceptionCheckpoint: "rounds stop where one cell fails, and nothing continues from what it saves",
}


def check_trainer(trainer: Any) -> None:
    """Refuse a Trainer under which cells would not train one model; local.

    :param trainer: The Trainer, in ``setup``.
    :raises ConfigError: if there is such an argument or callback; the text has its name and the reason.
    """
    for callback in trainer.callbacks:
        for kind, reason in _REASONS.items():
            if isinstance(callback, kind):
                raise ConfigError(f"FederatedRounds does not go together with {kind.__name__}: {reason}")
    strategy = trainer.strategy
    if not isinstance(strategy, _STRATEGIES):
        raise ConfigError(
            f"FederatedRounds does not know {type(strategy).__name__}; give Trainer(strategy='ddp'), or "
            "ModelParallelStrategy for FSDP2"
        )
    is_written_by_plugin = not isinstance(strategy, ModelParallelStrategy)
    if is_written_by_plugin and isinstance(strategy.checkpoint_io, AsyncCheckpointIO):
        raise ConfigError(
            "FederatedRounds does not know AsyncCheckpointIO: the state of rounds is added to a checkpoint that is on "
            "the disk; leave the plugin out"
        )
    for callback in trainer.checkpoint_callbacks:
        _check_saves(callback)
        if "://" in str(getattr(callback, "dirpath", "")):
            raise ConfigError(
                f"FederatedRounds cannot add the state of rounds to checkpoints at {callback.dirpath}; give "
                "ModelCheckpoint(dirpath=...) a folder that the ranks of the cell share"
            )


def _check_saves(callback: Any) -> None:
    """Refuse checkpoints that one cell writes over while others may still need them to go on."""
    if getattr(callback, "save_on_exception", False):
        raise ConfigError(
            "FederatedRounds does not go together with ModelCheckpoint(save_on_exception=True): "
            + _REASONS[callbacks.OnExceptionCheckpoint]
        )
    saves_last = getattr(callback, "save_last", None)
    if saves_last and (callback.save_top_k == 0 or (saves_last is True and callback.monitor is not None)):
        raise ConfigError(
            "FederatedRounds does not go together with ModelCheckpoint(save_last=True) where last.ckpt is the only "
            "checkpoint of its step: a cell writes over it, and after a kill no checkpoints of all cells may go "
            "together; leave save_last out, and add ModelCheckpoint(every_n_train_steps=...)"
        )


def check_saves(trainer: Any, state: DistributedState, every: Any) -> None:
    """Refuse isolated cells whose only checkpoints are saved after unlike rounds; local.

    That is where a cell's own metric or clock says when to save, or where cells make unlike numbers of steps between
    two rounds. After a kill they go on from checkpoints with the same number of rounds behind them, of which there may
    be none.

    :param trainer: The Trainer, in ``setup``.
    :param state: The state of this rank.
    :param every: What :class:`xffl.FederatedScaling` is given.
    :raises ConfigError: if no callback saves after the same rounds in all cells; the text has the line to write.
    """
    if state.isolated is None or state.cells == 1:
        return
    saving = _find_saving(trainer)
    reasons = [_find_unlike(callback) for callback in saving]
    if reasons and all(reasons):
        raise ConfigError(
            f"ModelCheckpoint({reasons[0]}) saves after unlike rounds in the cells, and after a kill no checkpoints of "
            "all cells may go together; add ModelCheckpoint(every_n_train_steps=100), from which the cells continue"
        )
    schedule = find_unlike_schedule(every)
    alike = [callback for callback, reason in zip(saving, reasons, strict=True) if reason is None]
    if alike and schedule is not None and not any(_saves_with_rounds(callback, schedule) for callback in alike):
        raise ConfigError(
            f"with every={schedule} the cells make unlike numbers of steps between two rounds, so that ModelCheckpoint "
            "saves after unlike rounds in them, and after a kill no checkpoints of all cells may go together; add "
            "RoundCheckpoint(every_n_rounds=10) of xffl.integrations.lightning, from which the cells continue"
        )


def check_epochs(trainer: Any, state: DistributedState, notes: CellNotes, every: Any) -> None:
    """Refuse isolated cells that save at ends of epochs only, which come after unlike rounds in them.

    Collective over the job. Rounds at ends of epochs, as by the schedule ``epochs``, are not refused.

    :param trainer: The Trainer, whose loaders are there.
    :param state: The state of this rank.
    :param notes: What the cells tell each other.
    :param every: What :class:`xffl.FederatedScaling` is given.
    :raises ConfigError: if no callback saves between; on all ranks, and the text has the line to write.
    """
    if state.isolated is None or state.cells == 1:
        return
    batches = trainer.num_training_batches
    # A stream does not tell its length, which is taken for another one in each cell.
    length = f"cell {state.cell}'s stream" if batches == float("inf") else str(batches)
    notes.write("epochs", f"{length} {trainer.accumulate_grad_batches}")
    lengths = [text.rpartition(" ")[0] for text in notes.gather("epochs")]
    saving = [callback for callback in _find_saving(trainer) if _find_unlike(callback) is None]
    is_unlike = len(set(notes.gather("epochs"))) > 1 and find_unlike_schedule(every) is None
    if is_unlike and saving and all(callback.every_n_epochs for callback in saving):
        raise ConfigError(
            f"ModelCheckpoint saves at ends of epochs, which have {', '.join(lengths)} batches in the cells and so end "
            "after unlike rounds, and after a kill no checkpoints of all cells may go together; add "
            "ModelCheckpoint(every_n_train_steps=100), from which the cells continue, or make rounds at ends of epochs "
            "with every={'name': 'epochs', ...}"
        )


def _find_saving(trainer: Any) -> list[callbacks.ModelCheckpoint]:
    """Return the callbacks that save more than weights."""
    return [
        callback
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, callbacks.ModelCheckpoint)
        and callback.save_top_k != 0
        and not callback.save_weights_only
    ]


def _saves_with_rounds(callback: callbacks.ModelCheckpoint, schedule: Schedule) -> bool:
    """Tell whether a callback saves after rounds, or at ends of epochs, after which there are rounds, too."""
    return isinstance(callback, RoundCheckpoint) or (
        bool(callback.every_n_epochs) and isinstance(schedule, EveryEpochs)
    )


def _find_unlike(callback: callbacks.ModelCheckpoint) -> str | None:
    """Return the argument by which a callback saves after other steps in each cell, if there is one."""
    if callback.monitor not in (None, *_COUNTERS) and callback.save_top_k > 0:
        return f"monitor={callback.monitor!r}"
    if saves_by_time(callback):
        return "train_time_interval=..."
    return None


def check_data(trainer: Any, state: DistributedState) -> None:
    """Refuse loaders that give all cells the same samples, as far as can be seen; local, when training begins.

    :param trainer: The Trainer, whose loaders are there.
    :param state: The state of this rank.
    :raises ConfigError: if there is one whose data was not dealt out to the cells; the text has the lines to write.
    """
    loaders = trainer.train_dataloader
    if state.cells == 1 or loaders is None:  # with limit_train_batches=0
        return
    for loader in CombinedLoader(loaders).flattened:
        if not _is_of_cell(loader):
            raise ConfigError(
                f"nothing deals the data of the {type(loader).__name__} out to the {state.cells} cells, so all of them "
                "would train on the same samples; give DataLoader(cell_split(dataset), ...), with "
                "xffl.integrations.lightning.cell_split around all else that is made of the dataset, or xffl's "
                "CellLoader; where each cell has data of its own, give FederatedRounds(data='own')"
            )


def _is_of_cell(loader: Any) -> bool:
    if isinstance(loader, CellLoader | CellStream):
        return True
    samplers = (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
    return any(isinstance(sampler, CellOrder) for sampler in samplers) or is_dealt_out(getattr(loader, "dataset", None))


def check_loggers(trainer: Any, notes: CellNotes) -> None:
    """Refuse cells of one job whose loggers write into one folder, where they would write over each other.

    Collective over the job.

    :param trainer: The Trainer, in ``setup``.
    :param notes: What the cells tell each other.
    :raises ConfigError: if there is such a folder; the text has the line to write.
    """
    loggers = [logger for logger in trainer.loggers if isinstance(logger, CSVLogger | TensorBoardLogger)]
    folders = sorted({str(logger.log_dir) for logger in loggers})
    notes.write("loggers", "\n".join(folders))
    written = [folder for text in notes.gather("loggers") for folder in text.splitlines()]
    shared = sorted(folder for folder in set(written) if written.count(folder) > 1)
    if shared:
        raise ConfigError(
            f"the loggers of several cells write into {shared[0]}; give Trainer(default_root_dir=cell_folder('runs')), "
            "or the logger save_dir=cell_folder('runs'), with xffl.integrations.lightning.cell_folder"
        )
