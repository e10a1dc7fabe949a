"""Callback interface: methods for the stages of a run, each under two names, and the collection that calls them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from xffl.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from xffl.aggregation import RoundReport
    from xffl.training.trainer import BaseTrainer

__all__ = ["REMOVED", "STAGES", "Callback", "CallbackCollection"]

LOG = logging.getLogger(__name__)

REMOVED: Mapping[str, str] = {
    "LearningRateMonitor": "write self.log_scalar('train/learning_rate', self.optimizer.param_groups[0]['lr']) in the "
    "trainer's training_step",
    "ModelSummaryCallback": "write print(self.model) in the trainer's configure_models; xffl plan counts the memory",
}
"""Callbacks of earlier versions, which saved configurations may name, and what to do instead."""


class Callback:
    """Base class of callbacks: methods that are called at the stages of a run.

    Every stage has two names (:data:`STAGES`); override either, or both. All ranks call their callbacks in the order in
    which they were given, so a callback may communicate inside its cell (:attr:`trainer.world`), and over the world
    where cells meet: ``post_round``, ``pre_save_checkpoint`` and ``post_save_checkpoint``, ``post_load_checkpoint``,
    ``pre_fit``, ``pre_train``, ``preemption`` and ``post_fit``. ``on_exception`` must not communicate.
    """

    # What a checkpoint keeps ------------------------------------------------------------------------------------------

    @property
    def state_name(self) -> str:
        """Name of the state in checkpoints: that of the class; give another where a run has two of a class."""
        return type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: numbers, texts, tensors, mappings and lists; the same on a cell's ranks."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""

    # The run ----------------------------------------------------------------------------------------------------------

    def pre_fit(self, trainer: BaseTrainer) -> None:
        """Stage: the ranks have joined, nothing is made yet."""

    def post_fit(self, trainer: BaseTrainer) -> None:
        """Stage: training has ended on all cells; the ranks are still joined."""

    def pre_configure(self, trainer: BaseTrainer) -> None:
        """Stage: before ``configure_models``."""

    def post_configure(self, trainer: BaseTrainer) -> None:
        """Stage: models exist, maybe on the meta device, and are whole."""

    def pre_setup(self, trainer: BaseTrainer) -> None:
        """Stage: before models are spread."""

    def post_setup(self, trainer: BaseTrainer) -> None:
        """Stage: models, optimizers, loaders and metrics are ready; no checkpoint is loaded yet."""

    def pre_train(self, trainer: BaseTrainer) -> None:
        """Stage: before the first epoch, after a checkpoint was loaded."""

    def post_train(self, trainer: BaseTrainer) -> None:
        """Stage: after this cell's last epoch; other cells may go on."""

    # Epochs and batches -----------------------------------------------------------------------------------------------

    def pre_train_epoch(self, trainer: BaseTrainer) -> None:
        """Stage: before an epoch's first batch, or its next one after a resume."""

    def post_train_epoch(self, trainer: BaseTrainer) -> None:
        """Stage: after an epoch's last batch; ``current_epoch`` is still that epoch."""

    def pre_train_batch(self, trainer: BaseTrainer, batch: Any, batch_idx: int) -> None:
        """Stage: before ``training_step``."""

    def post_train_batch(self, trainer: BaseTrainer, output: Any, batch: Any, batch_idx: int) -> None:
        """Stage: after ``training_step``, whose result is ``output``; the counters have not moved yet."""

    def pre_optimizer_step(self, trainer: BaseTrainer) -> None:
        """Stage: gradients are complete and clipped."""

    def post_optimizer_step(self, trainer: BaseTrainer) -> None:
        """Stage: the optimizer has stepped, the counters have moved, and a round that was due is recorded.

        Nothing of the batch is open any more: in a single cell a checkpoint may be written here.
        """

    # Rounds -----------------------------------------------------------------------------------------------------------

    def post_round(self, trainer: BaseTrainer, report: RoundReport) -> None:
        """Stage: a round has written the new weights; all ranks of all cells are here together."""

    # Validation -------------------------------------------------------------------------------------------------------

    def pre_val_epoch(self, trainer: BaseTrainer) -> None:
        """Stage: before a validation's first batch."""

    def pre_val_batch(self, trainer: BaseTrainer, batch: Any, batch_idx: int) -> None:
        """Stage: before ``validation_step``."""

    def post_val_batch(self, trainer: BaseTrainer, output: Any, batch: Any, batch_idx: int) -> None:
        """Stage: after ``validation_step``, whose result is ``output``."""

    def val_metrics(self, trainer: BaseTrainer, metrics: Mapping[str, float]) -> None:
        """Stage: a validation's metrics are known, the same on all ranks of the cell."""

    def post_val_epoch(self, trainer: BaseTrainer) -> None:
        """Stage: after a validation's last batch and its metrics."""

    def post_validation(self, trainer: BaseTrainer, metrics: Mapping[str, float]) -> None:
        """Stage: models are back in training mode."""

    # Checkpoints and failures -----------------------------------------------------------------------------------------

    def pre_save_checkpoint(self, trainer: BaseTrainer, path: str) -> None:
        """Stage: before a checkpoint is written; all ranks are here together."""

    def post_save_checkpoint(self, trainer: BaseTrainer, path: str) -> None:
        """Stage: after a checkpoint was written, or handed over to be written."""

    def post_load_checkpoint(self, trainer: BaseTrainer, path: str) -> None:
        """Stage: after a checkpoint was loaded."""

    def preemption(self, trainer: BaseTrainer, path: str | None) -> None:
        """Stage: the run stops early and resumes when it is started again; all ranks are here together.

        ``path`` is the checkpoint that was written; ``None`` where no step was made since the last start.
        """

    def exception(self, trainer: BaseTrainer, error: BaseException) -> None:
        """Stage: this rank fails; others may not know yet."""

    # The second names, by which the same may be overridden ------------------------------------------------------------

    on_fit_start = pre_fit
    on_fit_end = post_fit
    on_configure_start = pre_configure
    on_configure_end = post_configure
    on_setup_start = pre_setup
    on_setup_end = post_setup
    on_train_start = pre_train
    on_train_end = post_train
    on_train_epoch_start = pre_train_epoch
    on_train_epoch_end = post_train_epoch
    on_train_batch_start = pre_train_batch
    on_train_batch_end = post_train_batch
    on_optimizer_step_start = pre_optimizer_step
    on_optimizer_step_end = post_optimizer_step
    on_round_end = post_round
    on_validation_start = pre_val_epoch
    on_validation_epoch_end = post_val_epoch
    on_validation_batch_start = pre_val_batch
    on_validation_batch_end = post_val_batch
    on_val_epoch_end = val_metrics
    on_validation_end = post_validation
    on_save_checkpoint_start = pre_save_checkpoint
    on_save_checkpoint_end = post_save_checkpoint
    on_load_checkpoint_end = post_load_checkpoint
    on_preemption = preemption
    on_exception = exception


STAGES = {method.__name__: name for name, method in vars(Callback).items() if name.startswith("on_")}
"""Stages in the order of a run, each with its second name; both get the same arguments, the first one first."""


class CallbackCollection:
    """Call the callbacks of a run in their order; ``collection.pre_train_batch(trainer, ...)`` calls all of them.

    A stage may be called by either name. Only what a callback has overridden is called, so that stages cost nothing
    where nobody listens. At ``exception`` all are called, whatever one of them raises: that is logged, since the error
    that ends the run is another one.

    :param callbacks: The callbacks, in order.
    :raises ConfigError: if one is not a callback, or two have the same name for their state.
    """

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self._callbacks = list(callbacks)
        names: list[str] = []
        for callback in self._callbacks:
            if not isinstance(callback, Callback):
                raise ConfigError(f"{callback!r} is not a callback; derive its class from xffl.training.Callback")
            if callback.state_name in names:
                raise ConfigError(
                    f"two callbacks are called {callback.state_name!r} in checkpoints; give one another state_name"
                )
            names.append(callback.state_name)
        for first, second in STAGES.items():
            # What is overridden of the stage, callback by callback.
            listeners = [
                getattr(callback, name)
                for callback in self._callbacks
                for name in (first, second)
                if getattr(type(callback), name) is not getattr(Callback, name)
            ]
            call = partial(_call, listeners, suppresses=first == "exception")
            setattr(self, first, call)
            setattr(self, second, call)

    if TYPE_CHECKING:

        def __getattr__(self, stage: str) -> Callable[..., None]:
            """Call a stage."""

    def __iter__(self) -> Iterator[Callback]:
        """Iterate over the callbacks in order."""
        return iter(self._callbacks)

    def __len__(self) -> int:
        """Count the callbacks."""
        return len(self._callbacks)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the callbacks that have one, by name."""
        return {callback.state_name: state for callback in self._callbacks if (state := callback.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the callbacks their states back; one that has none in the checkpoint starts from its beginning."""
        by_name = {callback.state_name: callback for callback in self._callbacks}
        for name, saved in state.items():
            if name in by_name:
                by_name[name].load_state_dict(saved)
            else:
                raise CheckpointError(
                    f"the checkpoint has the state of a callback {name!r}, which this run does not have; add it"
                )


def _call(listeners: list[Callable[..., None]], *arguments: Any, suppresses: bool) -> None:
    for listener in listeners:
        try:
            listener(*arguments)
        except Exception:
            if not suppresses:
                raise
            LOG.exception("a callback failed while it handled the failure of the run")
