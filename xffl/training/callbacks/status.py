"""Where a run stands, as a line of text and as a live display."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Ending", "Status", "ending_line", "live_display", "status_line"]

SHOWN_VALUES = 4


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


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What a run has come to, over all cells."""

    name: str
    how: str
    """Such as ``finished``"""
    cells: int
    validations: Sequence[Mapping[str, float]]
    """Last values of the federation, or else of each cell that is known of"""
    rounds: int | None
    """``None`` where none were asked for"""
    bytes_sent: int
    """Between cells, by all ranks since this start"""
    seconds: float
    """Since this start"""
    folder: str


def ending_line(ending: Ending) -> str:
    """Return the last line of a run."""
    from rich.filesize import decimal

    facts = [ending.name, ending.how]
    if ending.cells > 1:
        facts.append(f"{ending.cells} cells")
    names = list(dict.fromkeys(name for values in ending.validations for name in values))
    for name in names[:SHOWN_VALUES]:
        found = sorted({f"{values[name]:.4g}": values[name] for values in ending.validations if name in values}.items())
        low, high = (pick(found, key=lambda item: item[1])[0] for pick in (min, max))
        facts.append(f"{name} {low}" if low == high else f"{name} {low} to {high}")
    if len(names) > SHOWN_VALUES:
        facts.append(f"{len(names) - SHOWN_VALUES} more values")
    if ending.rounds is not None:
        facts.append(f"{ending.rounds} round{'' if ending.rounds == 1 else 's'}")
    if ending.rounds is not None and ending.cells > 1:
        facts.append(f"sent {decimal(ending.bytes_sent)} between cells")
    folder = shlex.quote(ending.folder)
    facts += [f"took {_duration(ending.seconds)}", f"records in {folder}; xffl report {folder} makes a page of them"]
    return "  ".join(facts)


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
