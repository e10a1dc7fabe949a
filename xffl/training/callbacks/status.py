"""Where a run stands, as a line of text and as a live display."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Status", "live_display", "status_line"]


@dataclass(frozen=True, kw_only=True)
class Status:
    """Where a run stands; what is ``None`` is not known, or does not exist."""

    name: str
    epoch: int
    epochs: int
    step: int
    steps: int | None
    loss: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    rounds: int | None
    steps_to_round: int | None
    bytes_sent: int
    """By this rank to other cells"""
    left_s: float | None
    doing: str | None
    """What goes on instead of training, such as ``validation 3 of 10``"""


def status_line(status: Status) -> str:
    """Return a line of text."""
    return "  ".join([status.name, *_counts(status), *_facts(status)])


def live_display(status: Status) -> RenderableType:
    """Return what a terminal shows: a bar with the counts, and the facts below it."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    bar = ProgressBar(
        total=status.steps or 100,
        completed=status.step if status.steps else 0,
        pulse=status.steps is None,
        width=30,
        animation_time=float(status.step),
    )
    head = Table.grid(padding=(0, 2))
    head.add_row(Text(status.name, style="bold"), bar, *(Text(told) for told in _counts(status)))
    return Group(head, Text("  ".join(_facts(status)), style="dim", overflow="ellipsis", no_wrap=True))


def _counts(status: Status) -> Iterator[str]:
    yield f"epoch {min(status.epoch + 1, status.epochs)}/{status.epochs}"
    yield f"step {status.step}" if status.steps is None else f"step {status.step}/{status.steps}"


def _facts(status: Status) -> Iterator[str]:
    from rich.filesize import decimal

    if status.doing is not None:
        yield status.doing
    if status.loss is not None:
        yield f"loss {status.loss:.4g}"
    if status.tokens_per_s is not None:
        yield f"{_count(status.tokens_per_s)} tokens/s"
    elif status.samples_per_s is not None:
        yield f"{_count(status.samples_per_s)} samples/s"
    if status.rounds is not None:
        ahead = "" if status.steps_to_round is None else f", next in {status.steps_to_round} steps"
        yield f"round {status.rounds}{ahead}"
        yield f"sent {decimal(status.bytes_sent)}"
    if status.left_s is not None:
        yield f"{_duration(status.left_s)} left"


def _count(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _duration(seconds: float) -> str:
    """Return a time as ``0:12:34``, or with days."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days} d {hour}:{minute:02}:{second:02}" if days else f"{hour}:{minute:02}:{second:02}"
