"""Early stopping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from xffl.checks import integer
from xffl.errors import ConfigError
from xffl.training.callbacks.base import Callback
from xffl.training.callbacks.watching import WatchedMetric

if TYPE_CHECKING:
    from xffl.aggregation import RoundReport
    from xffl.training.trainer import BaseTrainer

__all__ = ["EarlyStoppingCallback"]

OVER = ("federation", "cell")


class EarlyStoppingCallback(Callback):
    """Stop training when a validation metric has not become better for a while.

    ``over="federation"``: all cells stop together. They decide at rounds, where all are, by the mean of what the cells
    have measured since the round before (each counts by its ranks; a cell without a new validation does not). Rounds
    without any new validation change nothing. This costs one all-reduce of two numbers over the world at each round.
    With one cell each validation decides.

    ``over="cell"``: each cell decides by its own validations. A cell that stops early keeps answering the others'
    rounds with the weight 0, until all have finished.

    A value that is not a number counts as not better; with ``stops_at_nonfinite`` it stops training at once. The best
    value and the patience used up are kept in checkpoints. A run that had stopped stays so when it is started again,
    unless another ``metric``, ``mode``, ``patience`` or ``min_delta`` is asked for.

    :param metric: Name of the metric, such as ``val/loss``.
    :param mode: Whether the smallest (``min``) or largest (``max``) value is the best.
    :param patience: Decisions without a better value after which training stops.
    :param min_delta: How much better a value must be to count.
    :param over: ``federation`` or ``cell``.
    :param stops_at_nonfinite: Whether a value that is infinite or not a number stops training.
    :raises ConfigError: if an argument cannot be meant.
    """

    def __init__(
        self,
        *,
        metric: str = "val/loss",
        mode: str = "min",
        patience: int = 3,
        min_delta: float = 0.0,
        over: str = "federation",
        stops_at_nonfinite: bool = True,
    ) -> None:
        if over not in OVER:
            raise ConfigError(f"over {over!r} is none of {', '.join(OVER)}")
        self.metric, self.mode, self.min_delta = metric, mode, min_delta
        self.watched = WatchedMetric(metric, mode, min_delta)
        self.patience = integer("patience", patience)
        self.over = over
        self.stops_at_nonfinite = stops_at_nonfinite
        self.waited = 0
        self.reason: str | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the decisions since."""
        asked = [self.patience, self.min_delta]
        return {"metric": self.watched.state_dict(), "waited": self.waited, "reason": self.reason, "asked": asked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state.

        :param state: The state.
        """
        if not self.watched.load_state_dict(state["metric"]):
            return
        self.waited = int(state["waited"])
        asked = [self.patience, self.min_delta]
        self.reason = state["reason"] if list(state.get("asked", asked)) == asked else None

    def pre_fit(self, trainer: BaseTrainer) -> None:
        """See that cells can decide together.

        :param trainer: The trainer.
        :raises ConfigError: where cells have no rounds at which to decide.
        """
        asked = getattr(trainer.config, "federation", None)
        if self._is_common(trainer) and (asked is None or not asked.has_rounds):
            raise ConfigError(
                "cells that stop together decide at rounds, and there are none; give federation.every, or over: cell"
            )

    def pre_train(self, trainer: BaseTrainer) -> None:
        """Do not go on where the run that was resumed had stopped.

        :param trainer: The trainer.
        """
        if self.reason is not None:
            trainer.stop(self.reason)

    def post_validation(self, trainer: BaseTrainer, metrics: Mapping[str, float]) -> None:
        """Note the value, and decide where this cell does so alone.

        :param trainer: The trainer.
        :param metrics: What was measured.
        :raises ConfigError: if there is no such metric.
        """
        self.watched.note(metrics)
        if not self._is_common(trainer):
            self._decide(trainer, self.watched.take())

    def post_round(self, trainer: BaseTrainer, report: RoundReport) -> None:
        """Decide with the other cells; collective over the world.

        :param trainer: The trainer.
        :param report: What the round did.
        """
        if self._is_common(trainer) and not report.is_last:
            self._decide(trainer, self.watched.agree(trainer))

    def _is_common(self, trainer: BaseTrainer) -> bool:
        return self.over == "federation" and trainer.state.topology.cells > 1

    def _decide(self, trainer: BaseTrainer, value: float | None) -> None:
        if value is None:
            return
        if self.stops_at_nonfinite and not math.isfinite(value):
            self._stop(trainer, f"{self.metric} is {value}")
            return
        if self.watched.judge(value):
            self.waited = 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            best = "no finite value" if self.watched.best is None else f"{self.watched.best:.6g}"
            self._stop(trainer, f"{self.metric} was not better than {best} {self.waited} times")

    def _stop(self, trainer: BaseTrainer, reason: str) -> None:
        self.reason = reason
        trainer.stop(reason)
