"""Progress of a run, shown while it goes: a live display on a terminal, lines of text elsewhere."""

from __future__ import annotations

import shlex
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console, RenderableType
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text
from torch.distributed.tensor import DTensor

from xffl.aggregation.report import ElasticRoundReport
from xffl.checks import number
from xffl.training.callbacks.base import Callback
from xffl.training.callbacks.monitors import TrainingClock, count_tokens
from xffl.training.metrics import find_loss

if TYPE_CHECKING:
    from xffl.aggregation import RoundReport
    from xffl.training.mixins.base import TrainerMixin
    from xffl.training.trainer import BaseTrainer

__all__ = ["ProgressCallback", "ending_line", "name_of"]

REFRESHES_PER_S = 2.0
RATE_WINDOW_S = 30.0
"""How far back rates look, at most"""
SHOWN_VALUES = 4
"""Metrics in a run's last line"""


class _LiveDisplay(Progress):
    """What a terminal shows: name, bar and counts in one line, and the other facts below it."""

    _facts = ""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description} ", style="bold", markup=False),
            BarColumn(bar_width=30),
            TextColumn(" {task.fields[counts]}", markup=False),
        )
        # rich's own thread would draw without any news.
        super().__init__(*columns, console=console, auto_refresh=False)
        self._bar = self.add_task("", total=None, counts="")

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text(self._facts, style="dim", overflow="ellipsis", no_wrap=True)

    def show(self, run: _Run, step: int, counts: list[str], facts: list[str]) -> None:
        """Draw where a run stands."""
        self._facts = "  ".join(facts)
        self.update(self._bar, description=run.name, total=run.steps, completed=step, counts="  ".join(counts))
        self.refresh()


@dataclass
class _Run:
    """What is shown of a run, and since when."""

    name: str
    console: Console
    steps: int | None
    """Of the whole run"""
    start: tuple[float, int]
    """Time, and step"""
    clock: TrainingClock
    """Runs while the run trains: rates are those of training"""
    seen: deque[tuple[float, int, int]]
    """Times of the clock in seconds, with samples and tokens"""
    interval_s: float
    next_s: float
    display: _LiveDisplay | None = None
    batches: int | None = None
    """Of a validation"""
    loss: torch.Tensor | None = None
    tokens: int = 0
    sent: int = 0
    first_round_at: int | None = None
    """The step of the first round since the start, until it comes"""
    cells: str | None = None
    """Who took part in the last round of an elastic run"""
    doing: str | None = None
    """What goes on instead of training, such as ``validation 3 of 10``"""
    ending: str | None = None
    """How it has ended"""


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
    :raises ConfigError: if an argument is invalid.
    """

    def __init__(self, *, every_s: float = 5.0, is_live: bool = True, tokens: str | None = "input_ids") -> None:
        self.every_s = number("every_s", every_s, above=0.0)
        self.is_live = is_live
        self.tokens = tokens
        self._now = self.make_clock()
        self._run: _Run | None = None

    def make_console(self) -> Console:
        """Return where to show it; override it for another place."""
        return Console()

    def make_clock(self) -> Callable[[], float]:
        """Return what tells the time in seconds; override it for another clock."""
        return time.monotonic

    def pre_train(self, trainer: BaseTrainer) -> None:
        """Begin to show."""
        topology, rank = trainer.state.topology, trainer.world.rank
        if rank not in topology.offsets[:-1]:
            return
        now, console, clock = self._now(), self.make_console(), TrainingClock(self._now)
        run = self._run = _Run(
            name=f"cell {topology.cell_of(rank)}" if topology.cells > 1 else name_of(trainer),
            console=console,
            steps=_steps_of(trainer),
            start=(now, trainer.global_step),
            clock=clock,
            seen=deque([(clock.read(), trainer.samples, 0)]),
            interval_s=self.every_s,
            next_s=now + self.every_s,
            first_round_at=_first_round_of(trainer),
        )
        if self.is_live and console.is_terminal and not console.is_dumb_terminal and rank == 0:
            run.interval_s = 1.0 / REFRESHES_PER_S
            run.next_s = now + run.interval_s
            run.display = _LiveDisplay(console)
            self._draw(trainer, run)
            run.display.start()

    def post_train_batch(self, trainer: BaseTrainer, output: Any, batch: Any, batch_idx: int) -> None:
        """Count tokens, keep the loss, and show where it is time."""
        run = self._run
        if run is None:
            return
        run.tokens += count_tokens(batch, self.tokens)
        loss = find_loss(output)
        run.loss = loss if loss is None else loss.detach()  # not the graph, which would stay in memory
        self._show(trainer)

    def post_round(self, trainer: BaseTrainer, report: RoundReport) -> None:
        """Count what was sent."""
        if self._run is not None:
            self._run.sent += report.bytes_across
            self._run.first_round_at = None
            if isinstance(report, ElasticRoundReport):
                self._run.cells = "cells {} known, {} alive, {} averaged".format(*report.cell_counts)
            self._show(trainer)

    def pre_val_epoch(self, trainer: BaseTrainer) -> None:
        """Show that a validation begins."""
        if self._run is not None:
            self._run.batches = _length(trainer.val_dataloader)
            self._pause(trainer, "validation")

    def post_val_batch(self, trainer: BaseTrainer, output: Any, batch: Any, batch_idx: int) -> None:
        """Show how far a validation is."""
        if self._run is not None:
            of = "" if self._run.batches is None else f" of {self._run.batches}"
            self._run.doing = f"validation {batch_idx + 1}{of}"
            self._show(trainer)

    def pre_save_checkpoint(self, trainer: BaseTrainer, path: str) -> None:
        """Show that a checkpoint is written."""
        self._pause(trainer, "saving")

    def post_train(self, trainer: BaseTrainer) -> None:
        """Show that this cell has finished; rounds of others may follow."""
        if self._run is not None:
            others = "" if trainer.state.topology.cells == 1 else ", answering other cells"
            self._run.doing = self._run.ending = _finished(trainer) + others
            self._show(trainer)

    def post_fit(self, trainer: BaseTrainer) -> None:
        """Show the end."""
        self._close(trainer, _finished(trainer))

    def preemption(self, trainer: BaseTrainer, path: str | None) -> None:
        """Show that the run stops early."""
        self._close(trainer, "stopped early" if path is None else f"stopped early, saved as {Path(path).name}")

    def exception(self, trainer: BaseTrainer, error: BaseException) -> None:
        """Give the terminal back."""
        if self._run is not None:
            self._run.loss = None  # a device that failed is not to be asked
        self._close(trainer, f"failed: {type(error).__name__}")

    def show_ending(self, line: str) -> None:
        """Show the run's last line, below everything else; the trainer calls it on rank 0."""
        _print(self.make_console(), line)

    def _pause(self, trainer: BaseTrainer, doing: str) -> None:
        if self._run is not None:
            self._run.clock.stop()
            self._run.doing = doing
            self._show(trainer)

    def _resume(self, *_: Any, **__: Any) -> None:
        """Go on with training."""
        if self._run is not None:
            self._run.clock.resume()
            self._run.doing = self._run.ending

    post_validation = post_save_checkpoint = _resume

    def _show(self, trainer: BaseTrainer) -> None:
        """Draw or print, if it is time; local."""
        run, now = self._run, self._now()
        if run is not None and now >= run.next_s:
            run.next_s = now + run.interval_s
            self._draw(trainer, run)

    def _close(self, trainer: BaseTrainer, ending: str) -> None:
        run = self._run
        self._run = None
        if run is not None:
            run.doing = run.ending = ending
            self._draw(trainer, run)
            if run.display is not None:
                run.display.stop()

    def _draw(self, trainer: BaseTrainer, run: _Run) -> None:
        """Draw or print where the run stands; waits for the device to tell the loss."""
        training, step = trainer.config.training, trainer.global_step
        counts = [
            f"epoch {min(trainer.current_epoch + 1, training.epochs)}/{training.epochs}",
            f"step {step}" if run.steps is None else f"step {step}/{run.steps}",
        ]
        facts = [] if run.doing is None else [run.doing]
        if (loss := _number(run.loss)) is not None:
            facts.append(f"loss {loss:.4g}")
        facts += _rate(run, trainer)
        federation: Any = getattr(trainer.config, "federation", None)
        if federation is not None and federation.has_rounds:
            following = ""
            if isinstance(federation.every, int) and run.ending is None:
                left = federation.every - trainer.steps_since_round
                if run.first_round_at is not None:
                    left = run.first_round_at - step
                left = max(0, left)
                following = f", next in {left} step{'' if left == 1 else 's'}"
            facts += [f"round {trainer.rounds}{following}", *([run.cells] if run.cells else [])]
            facts.append(f"sent {decimal(run.sent)}")
        began, first = run.start
        if run.steps is not None and step > first and run.ending is None:
            left_s = (self._now() - began) / (step - first) * max(0, run.steps - step)
            facts.append(f"{_duration(left_s)} left")
        if run.display is not None:
            run.display.show(run, step, counts, facts)
        else:
            _print(run.console, "  ".join([run.name, *counts, *facts]))


def ending_line(
    *,
    name: str,
    how: str,
    cells: int,
    validations: Sequence[Mapping[str, float]],
    rounds: int | None,
    bytes_sent: int,
    seconds: float,
    folder: str,
) -> str:
    """Return the last line of a run, over all cells.

    ``how`` is such as ``finished``. ``validations`` are the last values of the federation, or else of each cell that is
    known of. ``rounds`` is ``None`` where none were asked for. ``bytes_sent`` between cells and ``seconds`` are those
    since this start.
    """
    facts = [name, how]
    if cells > 1:
        facts.append(f"{cells} cells")
    metrics = list(dict.fromkeys(metric for values in validations for metric in values))
    for metric in metrics[:SHOWN_VALUES]:
        shown = {f"{values[metric]:.4g}": values[metric] for values in validations if metric in values}
        low, high = (pick(sorted(shown.items()), key=lambda item: item[1])[0] for pick in (min, max))
        shown_name = " ".join(metric.split())  # a line break would make two lines of the last one
        facts.append(f"{shown_name} {low}" if low == high else f"{shown_name} {low} to {high}")
    if len(metrics) > SHOWN_VALUES:
        facts.append(f"{len(metrics) - SHOWN_VALUES} more values")
    if rounds is not None:
        facts.append(f"{rounds} round{'' if rounds == 1 else 's'}")
        if cells > 1:
            facts.append(f"sent {decimal(bytes_sent)} between cells")
    folder = shlex.quote(folder)
    facts += [f"took {_duration(seconds)}", f"records in {folder}; xffl report {folder} makes a page of them"]
    return "  ".join(facts)


def _print(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _rate(run: _Run, trainer: BaseTrainer) -> list[str]:
    """Return tokens or samples per second of the cell, since some seconds ago; nothing where none were trained on."""
    if run.doing is None:
        run.seen.append((run.clock.read(), trainer.samples, run.tokens))
    while len(run.seen) > 2 and run.seen[1][0] < run.seen[-1][0] - RATE_WINDOW_S:
        run.seen.popleft()
    (first, samples, tokens), (last, samples_now, tokens_now) = run.seen[0], run.seen[-1]
    seconds = last - first
    if seconds <= 0 or samples_now == samples:
        return []
    unit, per_s = "samples", (samples_now - samples) / seconds
    if tokens_now != tokens:
        unit, per_s = "tokens", (tokens_now - tokens) * trainer.world.dp_size / seconds
    return [f"{per_s:.3g} {unit}/s" if per_s < 100 else f"{per_s:,.0f} {unit}/s"]


def _duration(seconds: float) -> str:
    """Return a time as ``0:12:34``, or with days as ``2 d 0:12:34``."""
    days, rest = divmod(round(seconds), 86400)
    return f"{days} d {timedelta(seconds=rest)}" if days else str(timedelta(seconds=rest))


def name_of(trainer: TrainerMixin) -> str:
    """Return what a run is called, and which cell of it this job is, where it is one of several."""
    name, cell = trainer.config.experiment.name, trainer.world.lone_cell
    return name if cell is None else f"{name} cell {cell}"


def _finished(trainer: BaseTrainer) -> str:
    return "finished" if trainer.stop_reason is None else f"finished, as {trainer.stop_reason}"


def _number(loss: torch.Tensor | None) -> float | None:
    """Return a loss; ``None`` where other ranks would have to help."""
    if isinstance(loss, DTensor):
        loss = loss.to_local() if all(placement.is_replicate() for placement in loss.placements) else None
    return None if loss is None or loss.numel() != 1 else loss.item()


def _steps_of(trainer: BaseTrainer) -> int | None:
    """Return the optimizer steps of a run, where they are known before it ends; local.

    Those that were made count as they are: epochs had another length, if the run has gone on with other cells.
    """
    if getattr(getattr(trainer.config, "federation", None), "max_samples", None) is not None:
        return None
    training = trainer.config.training
    batches = _length(trainer.train_dataloader)
    steps = None
    if batches is not None:
        window = training.gradient_accumulation
        later = max(0, training.epochs - trainer.current_epoch - 1)
        steps = trainer.global_step + later * -(-batches // window)
        if trainer.current_epoch < training.epochs:
            steps += -(-_batches_left(trainer, batches) // window)
    return min((limit for limit in (steps, training.max_steps, trainer.last_step) if limit is not None), default=None)


def _first_round_of(trainer: BaseTrainer) -> int | None:
    """Return the step of the next round; ``None`` without rounds. What came before may have been in other cells."""
    scaling = trainer.find_rounds()
    every = getattr(getattr(trainer.config, "federation", None), "every", None)
    # Over files there are no steps until a round.
    if scaling is None or not isinstance(every, int) or scaling.steps_left > every:
        return None
    return trainer.global_step + scaling.steps_left


def _batches_left(trainer: BaseTrainer, batches: int) -> int:
    """Return the batches of the current epoch that are still to come; all where the loader does not know its place."""
    loader = trainer.train_dataloader
    epoch = getattr(loader, "epoch", trainer.current_epoch)
    if epoch > trainer.current_epoch:
        return 0
    return batches - (int(getattr(loader, "position", 0)) if epoch == trainer.current_epoch else 0)


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
