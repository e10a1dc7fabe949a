"""Profiler of torch over some batches of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from xffl.checks import integer_fields
from xffl.training.callbacks.base import Callback

if TYPE_CHECKING:
    from xffl.training.trainer import BaseTrainer

__all__ = ["ProfilerCallback"]

FOLDER = "traces"


class ProfilerCallback(Callback):
    """Profile some micro-batches with :class:`torch.profiler.profile`, on each rank; nothing moves.

    After ``wait`` batches that are left alone come ``warmup`` batches that are profiled and thrown away, and ``active``
    ones that are kept, ``repeat`` times. The traces lie in the run's folder as ``traces/rank_N.json``, those of further
    cycles as ``traces/rank_N_2.json`` and so on; open them in https://ui.perfetto.dev or ``chrome://tracing``. Training
    that ends inside a cycle writes what it has.

    :param wait: Batches before each cycle.
    :param warmup: Batches that only warm the profiler up.
    :param active: Batches that are kept.
    :param repeat: Cycles; 0 for as many as there are.
    :param with_memory: Whether to note what is allocated and freed.
    :param with_shapes: Whether to note the shapes of inputs.
    :param with_stack: Whether to note where in the code an operation was called.
    :raises ConfigError: if an argument is invalid.
    """

    def __init__(
        self,
        *,
        wait: int = 5,
        warmup: int = 1,
        active: int = 3,
        repeat: int = 1,
        with_memory: bool = False,
        with_shapes: bool = False,
        with_stack: bool = False,
    ) -> None:
        self.wait, self.warmup, self.active, self.repeat = wait, warmup, active, repeat
        integer_fields(self, "wait", "warmup", "repeat", minimum=0)
        integer_fields(self, "active")
        self.with_memory, self.with_shapes, self.with_stack = with_memory, with_shapes, with_stack
        self._profile: profile | None = None
        self._cycles = 0

    def pre_train(self, trainer: BaseTrainer) -> None:
        """Start."""
        folder = Path(trainer.config.experiment.output_dir) / FOLDER
        rank = trainer.world.rank
        self._cycles = 0

        def keep(profiled: profile) -> None:
            self._cycles += 1
            folder.mkdir(parents=True, exist_ok=True)
            number = f"_{self._cycles}" if self._cycles > 1 else ""
            profiled.export_chrome_trace(str(folder / f"rank_{rank}{number}.json"))

        activities = [ProfilerActivity.CPU]
        if trainer.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=self.wait, warmup=self.warmup, active=self.active, repeat=self.repeat),
            on_trace_ready=keep,
            profile_memory=self.with_memory,
            record_shapes=self.with_shapes,
            with_stack=self.with_stack,
        )
        self._profile.start()

    def post_train_batch(self, trainer: BaseTrainer, output: Any, batch: Any, batch_idx: int) -> None:
        """Go on to the next batch."""
        if self._profile is None:
            return
        if trainer.device.type == "cuda":
            # So that each batch's kernels are among its own; a delayed round goes on behind them.
            torch.cuda.current_stream(trainer.device).synchronize()
        self._profile.step()
        cycle = self.wait + self.warmup + self.active
        if self.repeat and self._profile.step_num >= cycle * self.repeat:
            self._stop()

    def post_train(self, trainer: BaseTrainer) -> None:
        """Write what there is."""
        self._stop()

    def preemption(self, trainer: BaseTrainer, path: str | None) -> None:
        """Write what there is."""
        self._stop()

    def exception(self, trainer: BaseTrainer, error: BaseException) -> None:
        """Write what there is."""
        self._stop()

    def _stop(self) -> None:
        running, self._profile = self._profile, None
        if running is not None:
            running.stop()
