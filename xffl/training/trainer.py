"""Trainer: a loop made of the public parts, with hooks for all that differs between two runs."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from xffl.aggregation.report import RoundReport
from xffl.checkpoint.manager import auto_resume, find_latest_checkpoint
from xffl.distributed.agreement.consistency import check_consistent
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.replicas.fault_tolerance import FaultTolerantWorld
from xffl.errors import ConfigError, LaunchError, StateError
from xffl.parallel.strategy import DistributedStrategy
from xffl.training.callbacks.base import Callback, CallbackCollection
from xffl.training.config.dataclasses import BaseTrainerConfig
from xffl.training.data.sampler import CellBatchSampler
from xffl.training.metrics import find_loss
from xffl.training.mixins.base import StatePart
from xffl.training.mixins.logging import LoggerMixin
from xffl.training.preemption import PreemptedExit, Preemption, PreemptionMixin
from xffl.training.run_directory import RunDirectory, plain_config
from xffl.training.signals import SignalInbox, check_signals

__all__ = ["BaseTrainer", "Loader"]

LOG = logging.getLogger(__name__)


@runtime_checkable
class Loader(Protocol):
    """A training loader that knows where it stands, such as :class:`CellLoader` and :class:`CellStream`.

    Any other iterable will do: its batches are counted from the start of each epoch.
    """

    @property
    def epoch(self) -> int:
        """The epoch that comes next, or is being drawn."""

    @property
    def position(self) -> int:
        """Batches of the epoch that the loop has taken."""

    @property
    def samples_seen(self) -> int:
        """Samples that the whole cell has taken since the first epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; the current one keeps its position, another starts at its first batch."""


class BaseTrainer(PreemptionMixin, LoggerMixin):
    """Train models for some epochs, in all cells, with rounds, validation, records and checkpoints.

    A trainer is a class of this one and of mixins; it says what its models, optimizers and data are, and what a step
    does:

    .. code-block:: python

       class MyTrainer(BaseTrainer, SetupMixin, EvalMetricMixin, FederatedMixin):
           config: MyTrainerConfig

           def configure_models(self):
               self.model = build_model()

           def configure_optimizers(self):
               self.optimizer = torch.optim.AdamW(self.model.parameters())

           def configure_dataloaders(self):
               return self.train_loader(training_set), self.validation_loader(held_out)

           def training_step(self, batch, batch_idx):
               loss = loss_of(self.model(batch[0]), batch[1])
               self.backward(loss)
               if not self.is_accumulating_gradients:
                   self.step(self.model, self.optimizer)
               self.log_scalar("train/loss", loss)
               return {"loss": loss}


       MyTrainer(MyTrainerConfig()).fit()

    Every rank makes one and calls :meth:`fit`. A ``training_step`` that only returns a loss is stepped by the trainer.

    :param config: What is asked for, of the class that the trainer's annotation ``config`` names.
    :param callbacks: More callbacks, after those of the configuration.
    :param origins: Where each value of the configuration comes from, for the run's folder.
    :raises ConfigError: if the configuration or a callback is invalid.
    """

    config: BaseTrainerConfig

    def __init__(
        self, config: BaseTrainerConfig, *, callbacks: Iterable[Callback] = (), origins: Mapping[str, str] | None = None
    ) -> None:
        if not isinstance(config, BaseTrainerConfig):
            raise ConfigError(
                f"config is a {type(config).__name__}; give a BaseTrainerConfig with the mixins' sections"
            )
        self.config = config
        self.strategy = DistributedStrategy.from_config(config)
        if config.fault_tolerance.enable:
            self.world = FaultTolerantWorld(self.strategy.world, config.fault_tolerance)
        self.callbacks = CallbackCollection([*config.callbacks, *callbacks])
        self.last_round: RoundReport | None = None
        self._origins = origins
        self.stop_reason: str | None = None
        """Why training stops before its last epoch, where it does"""
        self._reports: list[RoundReport] = []
        self._reports_before: list[RoundReport] = []
        """Rounds of a cell that resumes, of which the callbacks hear when training has begun"""
        self._has_begun = False
        """Whether the callbacks have heard that training begins"""
        self._is_in_batch = self._has_backward = self._has_stepped = False
        self._samples_before = 0
        """Samples of this cell that its loader has not counted"""

    # What a trainer says ----------------------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Train on a micro-batch; override it.

        Either call :meth:`backward` and, where :attr:`is_accumulating_gradients` is False, :meth:`step`; or return the
        mean loss, alone or as ``{"loss": loss}``, and the trainer does both.

        :param batch: What the loader gave, on this rank's device.
        :param batch_idx: Its number in the epoch.
        :return: The loss, alone or among others; callbacks see it.
        """
        raise ConfigError(f"{type(self).__name__} has no training_step; override it")

    # What a step calls ------------------------------------------------------------------------------------------------

    @property
    def is_accumulating_gradients(self) -> bool:
        """Whether more micro-batches follow before the optimizer steps."""
        return self.strategy.is_accumulating_gradients

    @property
    def _num_gradient_accumulation_steps(self) -> int:
        return self.config.training.gradient_accumulation

    @property
    def _is_last_training_batch(self) -> bool:
        """Whether the epoch has no batch after this one."""
        return not self.is_accumulating_gradients and self._batches_left() == 0

    def no_gradient_sync(self, *models: nn.Module) -> AbstractContextManager[None]:
        r"""Return a context in which backward passes add gradients up without communication; local.

        The trainer does so itself in all micro-batches of a window but the last.

        :param \*models: The models; all of the trainer by default.
        :return: The context.
        """
        return self.strategy.no_gradient_sync(*(models or self.named_models().values()))

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients of a micro-batch's mean loss, divided by the micro-batches of its window.

        Collective over the cell in a window's last micro-batch.

        :param loss: The mean loss of this rank's micro-batch.
        """
        self._has_backward = True
        self.strategy.backward(loss)

    def forward_backward(
        self, model: nn.Module, *inputs: torch.Tensor, target: torch.Tensor, **named: Any
    ) -> torch.Tensor:
        r"""Run a model and :meth:`compute_loss` forward and backward, through a pipeline's stages, too.

        Collective over the cell as :meth:`DistributedStrategy.forward_backward`.

        :param model: The model.
        :param \*inputs: What it is called with.
        :param target: What its output is compared with.
        :param \**named: Keyword arguments of the model.
        :return: The mean loss of this rank's micro-batch, without gradient.
        """
        self._has_backward = True
        return self.strategy.forward_backward(model, *inputs, target=target, **named)

    def step(self, model: nn.Module, *optimizers: Optimizer) -> torch.Tensor | None:
        r"""Clip the gradients of a model, step its optimizers and zero the gradients; collective over the cell.

        A round that is due takes place in the last optimizer's step, over the world.

        :param model: The model whose gradients are clipped to ``training.max_grad_norm``.
        :param \*optimizers: Its optimizers.
        :return: The gradients' norm before it was clipped; ``None`` without ``max_grad_norm``.
        :raises StateError: in the middle of a window.
        """
        limit = self.config.training.max_grad_norm
        norm = None if limit is None else self.strategy.clip_grad_norm(model, limit)
        self.callbacks.pre_optimizer_step(self)
        self._has_stepped = True
        if self.strategy.step(*optimizers):
            self.step_schedulers("step", *optimizers)
        return norm

    def stop(self, reason: str) -> None:
        """End training after this step; other cells go on. All ranks of a cell call it in the same step.

        A run that is resumed goes on, unless whoever has stopped it does so again (in ``pre_train``).

        :param reason: Why, for the log and for whoever watches.
        """
        LOG.info("training stops after step %d: %s", self.global_step, reason)
        self.stop_reason = reason

    # The run ----------------------------------------------------------------------------------------------------------

    def fit(self, state: DistributedState | None = None) -> None:
        """Train from the start, or from the newest checkpoint of the run; collective over the world.

        Joins the other processes (unless a state is given), configures, sets up, trains, and leaves again. Where a
        signal of ``experiment.preempt_signals`` comes, all ranks save after the same step and leave early.

        :param state: The state of a world that is joined already.
        :raises XfflError: what any part of the run raises.
        :raises PreemptedExit: where a signal has come; uncaught, it ends Python with exit code 75.
        """
        if state is not None:
            self.strategy.setup(state)
        preempted: PreemptedExit | None = None
        names = self.config.experiment.preempt_signals
        # From before the ranks have joined: a signal that comes meanwhile is kept.
        with SignalInbox(check_signals(names)) as inbox, self.strategy:
            try:
                with Preemption(self.state, names, inbox=inbox) as self.preemption:
                    self._fit()
            except PreemptedExit as early:
                preempted = early
            except BaseException as error:
                self.callbacks.exception(self, error)
                try:
                    self.teardown(error)
                except Exception:  # what ended the run is what its user has to see
                    LOG.exception("giving back what the run had taken failed, too")
                raise
            self.teardown(None)
        if preempted is not None:
            raise preempted

    def _fit(self) -> None:
        self._take_own_folder()
        experiment = self.config.experiment
        self._began_s = time.monotonic()
        self._bytes_across = 0
        self.last_validation = None
        has_place = self.read_place()
        is_resumed = has_place or (experiment.resume and find_latest_checkpoint(experiment.output_dir) is not None)
        self.run_directory = RunDirectory.open(
            experiment.output_dir,
            self.state,
            self.config,
            origins=self._origins,
            is_resumed=is_resumed,
            may_restart=experiment.resume,
        )
        check_consistent("configurations", json.dumps(plain_config(self.config), sort_keys=True, default=str))
        self.callbacks.pre_fit(self)
        self.callbacks.pre_configure(self)
        self.configure()
        self.callbacks.post_configure(self)
        self.callbacks.pre_setup(self)
        self.setup()
        self.callbacks.post_setup(self)
        self._has_begun = False
        with self.training_rounds():
            has_loaded = experiment.resume and auto_resume(self.config, self)
            if self.take_place() or has_loaded:
                self.run_directory.confirm()
            self.take_global()
            others = {name: part for name, part in self._others().items() if part is not self.world.ft_manager}
            common = replace(self.config, experiment=replace(self.config.experiment, output_dir="."))
            text = json.dumps(plain_config(common), sort_keys=True, default=str)
            others["configuration"] = StatePart(lambda: {"text": text}, partial(_check_same, text), True)
            self.strategy.register(self.named_models(), self.named_optimizers(), others=others)
            self.callbacks.pre_train(self)
            self._has_begun = True
            while self._reports_before:
                self.callbacks.post_round(self, self._reports_before.pop(0))
            self.watch_signals()
            self._run_epochs()
            self.leave_if_due_at_end()
            self.flush_scalars()
            self.callbacks.post_train(self)
        if self.rounds > self.measured_rounds and self.val_dataloader is not None:
            self.measured_rounds = self.rounds
            self.perform_validation_epoch(over="federation")
        self.callbacks.post_fit(self)
        self.give_to_round()  # when its steps are kept: the next job, which goes on from them, may follow at once
        self.tell_ending("finished" if self.stop_reason is None else f"finished, as {self.stop_reason}")

    def _take_own_folder(self) -> None:
        """Give each replica group a folder of its own in that of the run."""
        if self.world.ft_manager is None:
            return
        if self.world.replica_group is None:
            raise LaunchError(
                "fault tolerance is asked for, but XFFL_ISLAND is not set; give each replica group its number and the "
                "most groups, such as 0/2, by which samples are dealt out"
            )
        folder = os.path.join(self.config.experiment.output_dir, f"island_{self.world.replica_group[0]}")
        self.config = replace(self.config, experiment=replace(self.config.experiment, output_dir=folder))

    def _run_epochs(self) -> None:
        while self.current_epoch < self.config.training.epochs:
            # A checkpoint between the last batch of an epoch and its end: the end is owed.
            is_end_owed = self.global_step > 0 and self.ended_epochs <= self.current_epoch and self._batches_left() == 0
            if self._has_ended and not is_end_owed:
                break
            is_whole = self.perform_training_epoch()
            if self.strategy.has_taken_over:
                self.on_resumed()  # and on from where the other replica groups are
            elif self.strategy.is_step_lost:
                self.strategy.is_step_lost = False  # and on with the same batches
            elif is_whole:
                self.current_epoch += 1
            else:
                break

    def _batches_left(self) -> int | None:
        """Return how many batches of the epoch the loader has not given yet; ``None`` where it does not say.

        A loader of xffl that was asked for more than there was stands at the start of the next epoch.
        """
        loader = self.train_dataloader
        if not isinstance(loader, Loader):
            return None
        if loader.epoch > self.current_epoch:
            return 0
        if not isinstance(loader, Sized):  # a stream
            return None
        return len(loader) - (loader.position if loader.epoch == self.current_epoch else 0)

    def perform_training_epoch(self) -> bool:
        """Train for an epoch, or for what is left of it after a resume; collective over the cell.

        :return: Whether it came to its end; False where training ends inside it, or goes on elsewhere, since this
            replica group has taken another one's state over.
        """
        self.train()
        self.callbacks.pre_train_epoch(self)
        loader, left = self.train_dataloader, self._batches_left()
        if hasattr(loader, "set_epoch") and left != 0:
            loader.set_epoch(self.current_epoch)
        first = loader.position if isinstance(loader, Loader) else 0
        is_whole = True
        self._note_place()
        rest: Iterable[Any] = () if left == 0 else loader
        with closing(self.strategy.micro_batches(rest, *self.named_models().values())) as batches:
            for batch_idx, batch in enumerate(batches, first):
                self._train_on(batch, batch_idx)
                if self.strategy.is_step_lost:
                    self._go_back()
                    break
                if not self.is_accumulating_gradients:
                    self._note_place()
                if self._has_ended and not self.is_accumulating_gradients:
                    is_whole = self._is_last_training_batch
                    break
        is_whole = is_whole and not (self.strategy.has_taken_over or self.strategy.is_step_lost)
        if is_whole and self.ended_epochs <= self.current_epoch:  # else a checkpoint of its end was loaded
            self.ended_epochs = self.current_epoch + 1
            self.step_schedulers("epoch", *self.named_optimizers().values())
            every = self.config.training.validate_every_epochs
            if every is not None and (self.current_epoch + 1) % every == 0 and self.val_dataloader is not None:
                self.perform_validation_epoch()
            self.callbacks.post_train_epoch(self)
        return is_whole

    def on_resumed(self) -> None:
        """Count samples on from where they stand, whatever the loader has counted in another layout."""
        loader = self.train_dataloader
        self._samples_before = self.samples - loader.samples_seen if isinstance(loader, Loader) else 0
        super().on_resumed()

    def _note_place(self) -> None:
        """Note where the next step begins, where it may be lost with another replica group."""
        if self.world.ft_manager is not None:
            loader = self.checkpoint_parts().get("train_dataloader")
            place = None if loader is None else loader.state_dict()
            self._place_before = loader, place, (self.local_batches, self.samples)

    def _go_back(self) -> None:
        """Stand where the step that was lost began, so that its batches come again."""
        loader, place, (self.local_batches, self.samples) = self._place_before
        if loader is not None:
            loader.load_state_dict(place)

    def _train_on(self, batch: Any, batch_idx: int) -> None:
        """Train on a micro-batch, and do what follows an optimizer step."""
        self._is_in_batch = True
        self._has_backward = False
        self._has_stepped = False
        self.callbacks.pre_train_batch(self, batch, batch_idx)
        sampler = getattr(self.train_dataloader, "sampler", None)
        count = sampler.samples_of(batch_idx) if isinstance(sampler, CellBatchSampler) else self.count_samples(batch)
        self.note_batch(count)
        with self.train_context():
            output = self.training_step(batch, batch_idx)
            self._finish_step(output)
        self.callbacks.post_train_batch(self, output, batch, batch_idx)
        self.local_batches += 1
        loader = self.train_dataloader
        # That other ranks have as many is all that is known of a loader that does not say.
        if isinstance(loader, Loader):
            self.samples = self._samples_before + loader.samples_seen
        else:
            self.samples += count * self.world.dp_size
        self._is_in_batch = False
        if not self.is_accumulating_gradients and not self.strategy.is_step_lost:
            self.global_step += 1
            self.steps_since_round += 1
            self._after_step()

    def _finish_step(self, output: Any) -> None:
        """Do what a training step has left to the trainer."""
        if not self._has_backward:
            loss = find_loss(output)
            if loss is not None and not loss.requires_grad:
                raise StateError(
                    f"the loss that {type(self).__name__}.training_step returned has no gradient; return the loss of "
                    "this rank's own batch: world.all_reduce, detach and item give copies without one. Gradients are "
                    "averaged over the cell in any case, and log_scalar averages what it is given"
                )
            if loss is None:
                raise StateError(
                    f"{type(self).__name__}.training_step has neither called backward nor returned a loss; do one of "
                    "them"
                )
            self.backward(loss)
            if not self.is_accumulating_gradients and not self._has_stepped:
                models = self.named_models()
                if len(models) != 1:
                    raise StateError(f"the trainer has the models {sorted(models)}; call step in training_step")
                (model,) = models.values()
                self.step(model, *self.named_optimizers().values())
        if not self.is_accumulating_gradients and not self._has_stepped:
            raise StateError(
                f"{type(self).__name__}.training_step has not stepped at the end of a window; call self.step(model, "
                "optimizer) where is_accumulating_gradients is False"
            )

    def _after_step(self) -> None:
        """Record, validate, and let callbacks save: nothing of the step is open any more."""
        training = self.config.training
        if self.global_step % training.log_every == 0:
            self.flush_scalars()
        every = training.validate_every_steps
        if every is not None and self.global_step % every == 0 and self.val_dataloader is not None:
            self.perform_validation_epoch()
        recorded = self._take_rounds()
        self.callbacks.post_optimizer_step(self)
        self._tell_of(recorded)
        self.leave_if_due()

    @property
    def _has_ended(self) -> bool:
        limits = (self.config.training.max_steps, self.last_step)
        is_over = any(limit is not None and self.global_step >= limit for limit in limits)
        return is_over or self.stop_reason is not None or self.has_federation_ended

    # Rounds -----------------------------------------------------------------------------------------------------------

    def note_round(self, report: RoundReport) -> None:
        """Hear of a round, and tell the callbacks where the batch is done; called on all ranks."""
        self._reports.append(report)
        if not self._is_in_batch:
            self._tell_of(self._take_rounds())

    def _tell_of(self, recorded: Sequence[RoundReport]) -> None:
        """Tell the callbacks of rounds, where they have heard already that training begins."""
        if self._has_begun:
            for report in recorded:
                self.callbacks.post_round(self, report)
        else:
            self._reports_before.extend(recorded)
        if recorded:
            self.keep_place()

    def _take_rounds(self) -> list[RoundReport]:
        """Record the rounds that nobody has heard of, and validate what they made; all ranks of all cells come here."""
        every = self.config.training.validate_every_rounds
        reports = self._reports
        self._reports = []
        for report in reports:
            self.last_round = report
            self._bytes_across += report.bytes_across
            if not report.is_skipped:
                self.rounds = report.round
                self.steps_since_round = 0
            self.log_round(report, divergence=_divergence_of(report))
            is_due = every is not None and report.round % every == 0 and not report.is_skipped
            if is_due and self.val_dataloader is not None:
                self.measured_rounds = report.round
                self.perform_validation_epoch(over="federation")
        return reports


def _divergence_of(report: RoundReport) -> dict[str, float] | None:
    """Return how far the cells were from their last common model, as a schedule by divergence sees it."""
    total = math.fsum(report.weights)
    if report.update_norms is None or total == 0.0:
        return None
    pairs = zip(report.weights, report.update_norms, strict=True)
    # A cell that was left out because of its values has a norm that is not finite.
    squares = math.fsum(weight * norm * norm for weight, norm in pairs if weight > 0.0)
    return {"rms": math.sqrt(squares / total)}


def _check_same(text: str, state: Mapping[str, Any]) -> None:
    if state["text"] != text:
        raise ConfigError("the replica groups have different configurations; give all of them the same")
