"""How far a run is, shown while it goes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from xffl.training.callbacks.arguments import check_seconds
from xffl.training.callbacks.base import Callback
from xffl.training.callbacks.status import Status, live_display, status_line
from xffl.training.metrics import find_loss

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from xffl.aggregation import RoundReport
    from xffl.training.trainer import BaseTrainer

__all__ = ["ProgressCallback"]

REFRESHES_PER_S = 2.0
RATE_WINDOW_S = 30.0
"""How far back rates look, at most"""


@dataclass
class _Run:
    """What is shown of a run, and what it was shown from."""

    name: str
    console: Console
    steps: int | None
    """Of the whole run"""
    began: tuple[float, int]
    """When, and at which step"""
    seen: deque[tuple[float, int, int]]
    """Times in seconds, with samples and tokens"""
    interval_s: float
    next_s: float
    live: Live | None = None
    paused_at: float | None = None
    batches: int | None = None
    """Of a validation"""
    loss: torch.Tensor | None = None
    tokens: int = 0
    sent: int = 0
    doing: str | None = None
    resting: str | None = None
    """What it does for good"""


class ProgressCallback(Callback):
    """Show how far a run is: epoch, step, loss, samples or tokens per second, rounds, traffic, and the time left.

    The first rank of each cell shows its cell, the others nothing. On a terminal rank 0 of the world draws a live
    display, at most twice a second; everything else (a pipe, a file, the other cells) is one line at most every
    ``every_s`` seconds, and one at the end. The run's last line is rank 0's: the federation's last validation, rounds,
    traffic, time, and where the records are. The loss is this rank's last one, and the device is waited for only when
    something is shown. Samples and tokens are the cell's, taken from this rank's batches where they hold tokens; the
    traffic is what this rank has sent to other cells. Time left counts validations and checkpoints as they were so far.

    Nothing moves, and a step costs some microseconds.

    :param every_s: Seconds between two lines where there is no live display.
    :param is_live: Whether to draw live on a terminal; False for lines everywhere.
    :param tokens: Key of a tensor in batches that are mappings: its elements are tokens; ``None`` where there are none.
    :raises ConfigError: if an argument cannot be meant.
    """

    def __init__(self, *, every_s: float = 5.0, is_live: bool = True, tokens: str | None = "input_ids") -> None:
        self.every_s = check_seconds("every_s", every_s)
        self.is_live = is_live
        self.tokens = tokens
        self._now = self.make_clock()
        self._run: _Run | None = None

    def make_console(self) -> Console:
        """Return where to show it; overload it for another place."""
        from rich.console import Console

        return Console()

    def make_clock(self) -> Callable[[], float]:
        """Return what tells the time in seconds; overload it for another clock."""
        return time.monotonic

    def pre_train(self, trainer: BaseTrainer) -> None:
        """Begin to show.

        :param trainer: The trainer.
        """
        topology, rank = trainer.state.topology, trainer.world.rank
        if rank not in topology.offsets[:-1]:
            return
        now, console = self._now(), self.make_console()
        run = self._run = _Run(
            name=f"cell {topology.cell_of(rank)}" if topology.cells > 1 else trainer.config.experiment.name,
            console=console,
            steps=_steps_of(trainer),
            began=(now, trainer.global_step),
            seen=deque([(now, trainer.samples, 0)]),
            interval_s=self.every_s,
            next_s=now + self.every_s,
        )
        if self.is_live and console.is_terminal and not console.is_dumb_terminal and rank == 0:
            from rich.live import Live

            run.interval_s = 1.0 / REFRESHES_PER_S
            # rich's own thread would draw without any news.
            run.live = Live(live_display(self._status(trainer, run)), console=console, auto_refresh=False)
            run.live.start(refresh=True)
            run.next_s = now + run.interval_s

    def post_train_batch(self, trainer: BaseTrainer, output: Any, batch: Any, batch_idx: int) -> None:
        """Count tokens, keep the loss, and show where it is time.

        :param trainer: The trainer.
        :param output: What the training step returned.
        :param batch: The batch.
        :param batch_idx: Its number.
        """
        del batch_idx
        run = self._run
        if run is None:
            return
        if self.tokens is not None and isinstance(batch, Mapping):
            found = batch.get(self.tokens)
            if isinstance(found, torch.Tensor):
                run.tokens += found.numel()
        loss = find_loss(output)
        run.loss = loss if loss is None else loss.detach()  # not the graph, which would stay in memory
        self._show(trainer)

    def post_round(self, trainer: BaseTrainer, report: RoundReport) -> None:
        """Count what was sent.

        :param trainer: The trainer.
        :param report: What the round did.
        """
        if self._run is not None:
            self._run.sent += report.bytes_across
            self._show(trainer)

    def pre_val_epoch(self, trainer: BaseTrainer) -> None:
        """Show that a validation begins.

        :param trainer: The trainer.
        """
        if self._run is not None:
            self._run.batches = _length(trainer.val_dataloader)
            self._pause(trainer, "validation")

    def post_val_batch(self, trainer: BaseTrainer, output: Any, batch: Any, batch_idx: int) -> None:
        """Show how far a validation is.

        :param trainer: The trainer.
        :param output: What the validation step returned.
        :param batch: The batch.
        :param batch_idx: Its number.
        """
        del output, batch
        if self._run is not None:
            of = "" if self._run.batches is None else f" of {self._run.batches}"
            self._run.doing = f"validation {batch_idx + 1}{of}"
            self._show(trainer)

    def post_validation(self, trainer: BaseTrainer, metrics: Mapping[str, float]) -> None:
        """Go on with training.

        :param trainer: The trainer.
        :param metrics: What was measured.
        """
        del trainer, metrics
        self._go_on()

    def pre_save_checkpoint(self, trainer: BaseTrainer, path: str) -> None:
        """Show that a checkpoint is written.

        :param trainer: The trainer.
        :param path: The checkpoint.
        """
        del path
        self._pause(trainer, "saving")

    def post_save_checkpoint(self, trainer: BaseTrainer, path: str) -> None:
        """Go on with training.

        :param trainer: The trainer.
        :param path: The checkpoint.
        """
        del trainer, path
        self._go_on()

    def post_train(self, trainer: BaseTrainer) -> None:
        """Show that this cell has finished; rounds of others may follow.

        :param trainer: The trainer.
        """
        if self._run is not None:
            others = "" if trainer.state.topology.cells == 1 else ", answering other cells"
            self._run.doing = self._run.resting = _finished(trainer) + others
            self._show(trainer)

    def post_fit(self, trainer: BaseTrainer) -> None:
        """Show the end.

        :param trainer: The trainer.
        """
        if self._run is not None:
            self._run.resting = _finished(trainer)
            self._close(trainer, self._run)

    def preemption(self, trainer: BaseTrainer, path: str | None) -> None:
        """Show that the run leaves.

        :param trainer: The trainer.
        :param path: The checkpoint that it goes on from.
        """
        if self._run is not None:
            self._run.resting = "stopped early" if path is None else f"stopped early, saved as {Path(path).name}"
            self._close(trainer, self._run)

    def exception(self, trainer: BaseTrainer, error: BaseException) -> None:
        """Give the terminal back.

        :param trainer: The trainer.
        :param error: What went wrong.
        """
        if self._run is not None:
            self._run.resting = f"failed: {type(error).__name__}"
            self._run.loss = None  # a device that failed is not to be asked
            self._close(trainer, self._run)

    def show_ending(self, line: str) -> None:
        """Show what the run has come to, below everything else; the trainer calls it on rank 0.

        :param line: The line.
        """
        self.make_console().print(line, markup=False, highlight=False, soft_wrap=True)

    def _pause(self, trainer: BaseTrainer, doing: str) -> None:
        if self._run is not None:
            self._run.paused_at = self._now()
            self._run.doing = doing
            self._show(trainer)

    def _go_on(self) -> None:
        run = self._run
        if run is None:
            return
        run.doing = run.resting
        if run.paused_at is not None:  # rates are those of training
            pause = self._now() - run.paused_at
            run.paused_at = None
            run.seen = deque((then + pause, samples, tokens) for then, samples, tokens in run.seen)

    def _show(self, trainer: BaseTrainer) -> None:
        """Draw or print, if it is time; local."""
        run, now = self._run, self._now()
        if run is None or now < run.next_s:
            return
        run.next_s = now + run.interval_s
        status = self._status(trainer, run)
        if run.live is not None:
            run.live.update(live_display(status), refresh=True)
        else:
            _print(run, status)

    def _close(self, trainer: BaseTrainer, run: _Run) -> None:
        self._run = None
        run.doing = run.resting
        status = self._status(trainer, run)
        if run.live is not None:
            run.live.update(live_display(status))
            run.live.stop()  # draws it a last time
        else:
            _print(run, status)

    def _status(self, trainer: BaseTrainer, run: _Run) -> Status:
        """Return where the run stands now; waits for the device to tell the loss."""
        now = self._now()
        began, first = run.began
        made = trainer.global_step - first
        left = None
        if run.steps is not None and made and run.resting is None:
            left = (now - began) / made * max(0, run.steps - trainer.global_step)
        samples, tokens = _rates(run, now, trainer)
        federation: Any = getattr(trainer.config, "federation", None)
        has_rounds = federation is not None and federation.has_rounds
        every = federation.every if has_rounds and run.resting is None else None
        return Status(
            name=run.name,
            epoch=trainer.current_epoch,
            epochs=trainer.config.training.epochs,
            step=trainer.global_step,
            steps=run.steps,
            loss=_number(run.loss),
            samples_per_s=samples,
            tokens_per_s=tokens,
            rounds=trainer.rounds if has_rounds else None,
            steps_to_round=max(0, every - trainer.steps_since_round) if isinstance(every, int) else None,
            bytes_sent=run.sent,
            left_s=left,
            doing=run.doing,
        )


def _rates(run: _Run, now: float, trainer: BaseTrainer) -> tuple[float | None, float | None]:
    """Return samples and tokens per second of the cell, since some seconds ago."""
    if run.paused_at is None and run.resting is None:
        run.seen.append((now, trainer.samples, run.tokens))
    while len(run.seen) > 2 and run.seen[1][0] < run.seen[-1][0] - RATE_WINDOW_S:
        run.seen.popleft()
    (then, samples, tokens), (last, samples_now, tokens_now) = run.seen[0], run.seen[-1]
    seconds = last - then
    if seconds <= 0 or samples_now == samples:
        return None, None
    per_token = (tokens_now - tokens) * trainer.world.dp_size / seconds
    return (samples_now - samples) / seconds, per_token or None


def _finished(trainer: BaseTrainer) -> str:
    return "finished" if trainer.stop_reason is None else f"finished, as {trainer.stop_reason}"


def _print(run: _Run, status: Status) -> None:
    run.console.print(status_line(status), markup=False, highlight=False, soft_wrap=True)


def _number(loss: torch.Tensor | None) -> float | None:
    """Return a loss; ``None`` where other ranks would have to help."""
    if isinstance(loss, DTensor):
        loss = loss.to_local() if all(placement.is_replicate() for placement in loss.placements) else None
    return None if loss is None or loss.numel() != 1 else loss.item()


def _steps_of(trainer: BaseTrainer) -> int | None:
    """Return the optimizer steps of a run, where its loader has a length; local."""
    training = trainer.config.training
    batches = _length(trainer.train_dataloader)
    steps = None if batches is None else training.epochs * -(-batches // training.gradient_accumulation)
    return min((one for one in (steps, training.max_steps, trainer.last_step) if one is not None), default=None)


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
