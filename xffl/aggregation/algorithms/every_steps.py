"""When a round is due: schedules of local steps, and the default schedule, a fixed number of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from xffl.aggregation.algorithms import registry
from xffl.aggregation.report import RoundReport
from xffl.checks import integer_fields
from xffl.naming import Writer

__all__ = [
    "EverySteps",
    "Schedule",
    "schedule_of",
]


class Schedule(ABC):
    """Number of local steps that a cell makes until the next round.

    Schedules hold options only, no state: the ranks compare them as text, which lists the attributes.
    ``has_threshold`` says that a round may be skipped if the cells' models are close to each other.
    """

    has_threshold: ClassVar[bool] = False

    def check(self, cells: int) -> None:  # noqa: B027 - most schedules fit any federation
        """Raise a ``ConfigError`` where the schedule is for another number of cells; local."""

    @abstractmethod
    def steps(self, rounds: int, cell: int, report: RoundReport | None) -> int:
        """Return the local steps of a cell until the next round, at least 1; local, the same on all ranks of the cell.

        ``rounds`` is the number of rounds so far. ``report`` is that of the last round, or of the last check that
        skipped a round, and ``None`` before the first. Use only values that are the same on all ranks.
        """

    def least_divergence(self, rounds: int) -> float | None:
        """Return how far apart the cells' models must be for the next round; ``None`` if it takes place in any case.

        This is the least root mean square, with the cells' weights, of their L2 distances from the last agreed model;
        the same on all ranks.
        """
        return None

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in sorted(vars(self).items()))
        return f"{type(self).__qualname__}({options})"


def schedule_of(every: object) -> Schedule:
    """Return a schedule for what ``every`` may be: local steps, a schedule, or a spec of one; local."""
    if isinstance(every, Schedule):
        return every
    if isinstance(every, (str, Mapping)):
        schedule: Schedule = registry.make("schedule", every, writer=Writer.USER)
        return schedule
    return EverySteps(every)  # type: ignore[arg-type]


@dataclass(frozen=True)
class EverySteps(Schedule):
    """Meet after a fixed number of local steps, the same in all cells.

    :param every: Local steps, at least 1.
    """

    every: int

    def __post_init__(self) -> None:
        integer_fields(self, "every", hint="give the local steps between two rounds")

    def steps(self, rounds: int, cell: int, report: RoundReport | None) -> int:  # noqa: D102
        return self.every
