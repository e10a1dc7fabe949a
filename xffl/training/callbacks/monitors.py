"""Throughput, memory and profiles of a run while it trains."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from xffl.checks import integer, integer_fields
from xffl.cluster.hardware import resident_bytes
from xffl.training.callbacks.base import Callback

if TYPE_CHECKING:
    from xffl.training.trainer import BaseTrainer

__all__ = [
    "MemoryCallback",
    "ProfilerCallback",
    "ThroughputCallback",
    "TrainingClock",
    "count_tokens",
]


def count_tokens(batch: Any, key: str | None) -> int:
    """Count the elements of a tensor of a batch that is a mapping; 0 where there is none."""
    tokens = batch.get(key) if key is not None and isinstance(batch, Mapping) else None
    return tokens.numel() if isinstance(tokens, torch.Tensor) else 0


class TrainingClock:
    """A clock in seconds that can be stopped, for as long as any of those that have stopped it has not resumed it."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._paused_s = self._stopped_at = 0.0
        self._depth = 0

    def read(self) -> float:
        """Return the seconds that have passed while it was not stopped, from any beginning."""
        return (self._stopped_at if self._depth else self._now()) - self._paused_s

    def stop(self) -> None:
        """Stop it until as many calls of :meth:`resume`."""
        if self._depth == 0:
            self._stopped_at = self._now()
        self._depth += 1

    def resume(self) -> None:
        """Let it run on; nothing happens where it was not stopped."""
        if self._depth == 1:
            self._paused_s += self._now() - self._stopped_at
        self._depth = max(0, self._depth - 1)


class ThroughputCallback(Callback):
    """Log how fast the cell trains: ``throughput/samples_per_s``, ``tokens_per_s`` and ``steps_per_s``.

    Over windows of optimizer steps, of all ranks of the cell together, rounds included; validations and checkpoints
    are not. The first steps after the start or a resume, in which memory is allocated and code is compiled, do not
    count. Each window ends with one all-gather of a few numbers over the cell.

    :param window: Optimizer steps of a window.
    :param skip: Optimizer steps at the start that do not count.
    :param tokens: Key of a tensor in batches that are mappings: its elements are tokens; ``None`` where there are none.
        Batches without it give no ``tokens_per_s``.
    :raises ConfigError: if an argument is invalid.
    """

    def __init__(self, *, window: int = 50, skip: int = 1, tokens: str | None = "input_ids") -> None:
        self.window = integer("window", window)
        self.skip = integer("skip", skip, 0)
        self.tokens = tokens
        self._clock = self.make_clock()
        self._left = self._steps = self._tokens = 0
        self._start = (0.0, 0)
        """Time and samples at the start of the window"""

    def make_clock(self) -> TrainingClock:
        """Return the clock; override it for another one."""
        return TrainingClock()

    def pre_train(self, trainer: BaseTrainer) -> None:
        """Begin."""
        self._left = self.skip
        self._begin(trainer)

    def pre_train_batch(self, trainer: BaseTrainer, batch: Any, batch_idx: int) -> None:
        """Count tokens."""
        self._tokens += count_tokens(batch, self.tokens)

    def post_optimizer_step(self, trainer: BaseTrainer) -> None:
        """Count the step, and log at the end of a window."""
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
        since, samples = self._start
        world = trainer.world
        local = torch.tensor([self._clock.read() - since, self._tokens], dtype=torch.float64, device=trainer.device)
        of_ranks = world.all_gather(local, "cell")
        seconds = of_ranks[:, 0].max().item()
        # Ranks that share their data have each counted it.
        tokens = of_ranks[:, 1].sum().item() * world.dp_size / len(of_ranks)
        rates = {
            "samples": (trainer.samples - samples) / seconds,
            "steps": self._steps / seconds,
            **({"tokens": tokens / seconds} if tokens else {}),
        }
        trainer.log_metrics({f"throughput/{name}_per_s": rate for name, rate in rates.items()})
        self._begin(trainer)

    def _stop_clock(self, *_: Any, **__: Any) -> None:
        self._clock.stop()

    def _resume_clock(self, *_: Any, **__: Any) -> None:
        self._clock.resume()

    pre_val_epoch = pre_save_checkpoint = _stop_clock
    post_validation = post_save_checkpoint = _resume_clock

    def _begin(self, trainer: BaseTrainer) -> None:
        self._steps = self._tokens = 0
        self._start = (self._clock.read(), trainer.samples)


class MemoryCallback(Callback):
    """Log the memory of the rank of the cell that uses most: ``memory/resident_bytes``, ``memory/device_bytes``.

    The first is what the process has in main memory now (Linux tells it), the second the most that torch has had on the
    device since the last record; it is not logged on a CPU. Each record is one all-reduce of two numbers over the cell.

    :param every: Optimizer steps between two records; ``None`` for ``training.log_every``.
    :raises ConfigError: if an argument is invalid.
    """

    def __init__(self, *, every: int | None = None) -> None:
        self.every = every
        integer_fields(self, "every", may_be_none=True)

    def post_optimizer_step(self, trainer: BaseTrainer) -> None:
        """Log, where it is due."""
        if trainer.global_step % (self.every or trainer.config.training.log_every):
            return
        device, is_cuda = trainer.device, trainer.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(device) if is_cuda else 0
        local = torch.tensor([resident_bytes("VmRSS"), peak], dtype=torch.int64, device=device)
        resident, peak = trainer.world.all_reduce(local, "max", "cell").tolist()
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(device)
        trainer.log_metrics({"memory/resident_bytes": resident, **({"memory/device_bytes": peak} if is_cuda else {})})


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
        self.wait = wait
        self.warmup = warmup
        self.active = active
        self.repeat = repeat
        integer_fields(self, "wait", "warmup", "repeat", minimum=0)
        integer_fields(self, "active")
        self.with_memory = with_memory
        self.with_shapes = with_shapes
        self.with_stack = with_stack
        self._profile: profile | None = None
        self._cycles = 0

    def pre_train(self, trainer: BaseTrainer) -> None:
        """Start."""
        folder = Path(trainer.config.experiment.output_dir) / "traces"
        rank = trainer.world.rank
        self._cycles = 0

        def keep(profiled: profile) -> None:
            self._cycles += 1
            folder.mkdir(parents=True, exist_ok=True)
            number = f"_{self._cycles}" if self._cycles > 1 else ""
            name = f"rank_{rank}{number}.json"
            # torch opens a path, and would follow a link: the folder aside is this user's alone.
            with tempfile.TemporaryDirectory(dir=folder) as aside:
                profiled.export_chrome_trace(os.path.join(aside, name))
                os.replace(os.path.join(aside, name), folder / name)

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

    def _stop(self, *_: Any, **__: Any) -> None:
        """Write what there is."""
        running = self._profile
        self._profile = None
        if running is not None:
            running.stop()

    post_train = preemption = exception = _stop
