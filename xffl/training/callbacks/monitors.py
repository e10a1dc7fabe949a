"""What a run does while it trains: learning rates, throughput, memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from xffl.checks import integer
from xffl.cluster.hardware import resident_bytes
from xffl.training.callbacks.base import Callback
from xffl.training.callbacks.pauses import TrainingClock

if TYPE_CHECKING:
    from xffl.training.trainer import BaseTrainer

__all__ = ["LearningRateMonitor", "MemoryCallback", "ThroughputCallback"]


class LearningRateMonitor(Callback):
    """Log the learning rate of each optimizer: ``train/learning_rate``; nothing moves.

    Several optimizers are told apart as ``train/learning_rate/OPTIMIZER``, groups of parameters with other rates as
    ``.../group_1`` and so on; the first group has no number.

    :param every: Optimizer steps between two records; ``None`` for ``training.log_every``.
    :raises ConfigError: if an argument cannot be meant.
    """

    def __init__(self, *, every: int | None = None) -> None:
        self.every = None if every is None else integer("every", every)
        self._told: int | None = None

    def pre_train(self, trainer: BaseTrainer) -> None:
        """Begin.

        :param trainer: The trainer.
        """
        del trainer
        self._told = None

    def pre_optimizer_step(self, trainer: BaseTrainer) -> None:
        """Log the rates that the step takes, where it is due.

        :param trainer: The trainer.
        """
        step = trainer.global_step
        if step % (self.every or trainer.config.training.log_every) or self._told == step:
            return
        self._told = step  # where a step has several optimizers, the first one tells of all
        optimizers = trainer.named_optimizers()
        rates: dict[str, float] = {}
        for name, optimizer in optimizers.items():
            home = f"train/learning_rate/{name}" if len(optimizers) > 1 else "train/learning_rate"
            for place, group in enumerate(optimizer.param_groups):
                rate = float(group["lr"])
                if place == 0 or rate != rates[home]:
                    rates[f"{home}/group_{place}" if place else home] = rate
        trainer.log_metrics(rates)


class ThroughputCallback(Callback):
    """Log how fast the cell trains: ``throughput/samples_per_s``, ``tokens_per_s`` and ``steps_per_s``.

    Over windows of optimizer steps, of all ranks of the cell together, rounds included; validations and checkpoints
    are not. The first steps after the start or a resume, in which memory is allocated and code is compiled, do not
    count. Each window ends with one all-gather of a few numbers over the cell.

    :param window: Optimizer steps of a window.
    :param skip: Optimizer steps at the start that do not count.
    :param tokens: Key of a tensor in batches that are mappings: its elements are tokens; ``None`` where there are none.
        Batches without it give no ``tokens_per_s``.
    :raises ConfigError: if an argument cannot be meant.
    """

    def __init__(self, *, window: int = 50, skip: int = 1, tokens: str | None = "input_ids") -> None:
        self.window = integer("window", window)
        self.skip = integer("skip", skip, 0)
        self.tokens = tokens
        self._clock = self.make_clock()
        self._left = 0
        self._steps = 0
        self._tokens = 0
        self._from = (0.0, 0)

    def make_clock(self) -> TrainingClock:
        """Return the clock; overload it for another one."""
        return TrainingClock()

    def pre_train(self, trainer: BaseTrainer) -> None:
        """Begin.

        :param trainer: The trainer.
        """
        self._left = self.skip
        self._begin(trainer)

    def pre_train_batch(self, trainer: BaseTrainer, batch: Any, batch_idx: int) -> None:
        """Count tokens.

        :param trainer: The trainer.
        :param batch: The batch.
        :param batch_idx: Its number.
        """
        del trainer, batch_idx
        if self.tokens is not None and isinstance(batch, Mapping):
            found = batch.get(self.tokens)
            if isinstance(found, torch.Tensor):
                self._tokens += found.numel()

    def post_optimizer_step(self, trainer: BaseTrainer) -> None:
        """Count the step, and log at the end of a window.

        :param trainer: The trainer.
        """
        if self._left:
            self._left -= 1
            if self._left == 0:
                self._begin(trainer)
            return
        self._steps += 1
        if self._steps < self.window:
            return
        if trainer.device.type == "cuda":
            torch.cuda.current_stream(trainer.device).synchronize()  # not that of a delayed round
        since, samples = self._from
        world = trainer.world
        own = torch.tensor([self._clock.read() - since, self._tokens], dtype=torch.float64, device=trainer.device)
        told = world.all_gather(own, "cell")
        seconds = told[:, 0].max().item()
        # Ranks that share their data have each counted it.
        tokens = told[:, 1].sum().item() * world.dp_size / len(told)
        rates = {
            "samples": (trainer.samples - samples) / seconds,
            "steps": self._steps / seconds,
            **({"tokens": tokens / seconds} if tokens else {}),
        }
        trainer.log_metrics({f"throughput/{name}_per_s": rate for name, rate in rates.items()})
        self._begin(trainer)

    def pre_val_epoch(self, trainer: BaseTrainer) -> None:
        """Stop the clock.

        :param trainer: The trainer.
        """
        del trainer
        self._clock.stop()

    def post_validation(self, trainer: BaseTrainer, metrics: Mapping[str, float]) -> None:
        """Let the clock run on.

        :param trainer: The trainer.
        :param metrics: What was measured.
        """
        del trainer, metrics
        self._clock.go_on()

    def pre_save_checkpoint(self, trainer: BaseTrainer, path: str) -> None:
        """Stop the clock.

        :param trainer: The trainer.
        :param path: The checkpoint.
        """
        del trainer, path
        self._clock.stop()

    def post_save_checkpoint(self, trainer: BaseTrainer, path: str) -> None:
        """Let the clock run on.

        :param trainer: The trainer.
        :param path: The checkpoint.
        """
        del trainer, path
        self._clock.go_on()

    def _begin(self, trainer: BaseTrainer) -> None:
        self._steps = self._tokens = 0
        self._from = (self._clock.read(), trainer.samples)


class MemoryCallback(Callback):
    """Log the memory of the rank of the cell that uses most: ``memory/resident_bytes``, ``memory/device_bytes``.

    The first is what the process has in main memory now (Linux tells it), the second the most that torch has had on the
    device since the last record; it is not logged on a CPU. Each record is one all-reduce of two numbers over the cell.

    :param every: Optimizer steps between two records; ``None`` for ``training.log_every``.
    :raises ConfigError: if an argument cannot be meant.
    """

    def __init__(self, *, every: int | None = None) -> None:
        self.every = None if every is None else integer("every", every)

    def post_optimizer_step(self, trainer: BaseTrainer) -> None:
        """Log, where it is due.

        :param trainer: The trainer.
        :raises ConfigError: if this system does not tell the resident memory.
        """
        if trainer.global_step % (self.every or trainer.config.training.log_every):
            return
        device, is_cuda = trainer.device, trainer.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(device) if is_cuda else 0
        own = torch.tensor([resident_bytes("VmRSS"), peak], dtype=torch.int64, device=device)
        resident, peak = trainer.world.all_reduce(own, "max", "cell").tolist()
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(device)
        trainer.log_metrics({"memory/resident_bytes": resident, **({"memory/device_bytes": peak} if is_cuda else {})})
