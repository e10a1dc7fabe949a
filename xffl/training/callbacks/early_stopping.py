"""Early stopping, and the monitored metric that decides on it and on the best checkpoint."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from xffl.aggregation.report import ElasticRoundReport
from xffl.checks import integer, number, one_of
from xffl.errors import ConfigError
from xffl.training.callbacks.base import Callback

if TYPE_CHECKING:
    from xffl.aggregation import RoundReport
    from xffl.training.trainer import BaseTrainer

__all__ = ["EarlyStoppingCallback", "MonitoredMetric"]

LOG = logging.getLogger(__name__)


class MonitoredMetric:
    """The newest and the best value of a metric, of which the smallest (``min``) or largest (``max``) is the best.

    A value that is not a number is never better; others are where they differ from the best by more than ``min_delta``.
    """

    def __init__(self, name: str, mode: str = "min", min_delta: float = 0.0) -> None:
        one_of("mode", mode, ("min", "max"))
        self.name = name
        self.mode = mode
        self.min_delta = number("min_delta", min_delta, 0.0)
        self.newest: float | None = None
        self.best: float | None = None

    def update(self, metrics: Mapping[str, float]) -> None:
        """Take the value out of what a validation has measured; local."""
        if self.name not in metrics:
            raise ConfigError(
                f"the validation has no metric {self.name!r}, but {', '.join(sorted(metrics)) or 'none'}; give one of "
                "them"
            )
        self.newest = float(metrics[self.name])

    def take(self) -> float | None:
        """Return the value of the validation since the last call, if there was one; local."""
        newest = self.newest
        self.newest = None
        return newest

    def take_mean(self, trainer: BaseTrainer) -> float | None:
        """Return the mean of what the cells have measured since the last call; the same on all ranks.

        Collective over the world: one all-reduce of two numbers. Each cell that has validated since counts by its
        ranks; ``None`` where none has.
        """
        newest = self.take()
        local = torch.tensor(
            [0.0, 0.0] if newest is None else [newest, 1.0], dtype=torch.float64, device=trainer.device
        )
        total, count = trainer.world.all_reduce(local, "sum", "world").tolist()
        return total / count if count else None

    def told_mean(self, report: ElasticRoundReport) -> float | None:
        """Return the mean of what cells have measured, weighted by their ranks; ``None`` if none has validated.

        Local; the same on all ranks of all of these cells.
        """
        self.newest = None
        values_of_cells = [
            (message["metrics"].get(self.name), message["ranks"]) for message in report.told if "metrics" in message
        ]
        known = [(value, ranks) for value, ranks in values_of_cells if value is not None]
        return sum(value * ranks for value, ranks in known) / sum(ranks for _, ranks in known) if known else None

    def is_better(self, value: float) -> bool:
        """Compare a value with the best, whose place it takes where it is better; local."""
        sign = 1.0 if self.mode == "min" else -1.0
        if math.isnan(value) or (self.best is not None and not sign * (self.best - value) > self.min_delta):
            return False
        self.best = value
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the newest and the best value, and of what."""
        return {"newest": self.newest, "best": self.best, "of": [self.name, self.mode]}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Take over a saved state and return True, unless it is of another metric, whose values mean nothing here."""
        asked = [self.name, self.mode]
        saved = list(state.get("of", asked))  # older states do not say
        if saved != asked:
            LOG.warning(
                "the checkpoint has the best value of %s (%s); that of %s (%s) is determined anew", *saved, *asked
            )
            return False
        self.newest = state["newest"]
        self.best = state["best"]
        return True


class EarlyStoppingCallback(Callback):
    """Stop training when a validation metric has not become better for a while.

    ``over="federation"``: all cells stop together. They decide at rounds, where all are, by the mean of what the cells
    have measured since the round before (each counts by its ranks; a cell without a new validation does not). Rounds
    without any new validation change nothing. This costs one all-reduce of two numbers over the world at each round.
    With one cell each validation decides. In an elastic run cells tell each other what they have measured as they meet
    for a round; one that decides to stop tells the others so at its last round, and they stop, too.

    ``over="cell"``: each cell decides by its own validations. A cell that stops early keeps answering the others'
    rounds with the weight 0, until all have finished. In an elastic run it leaves, and the others go on without it.

    A value that is not a number counts as not better; with ``stops_at_nonfinite`` it stops training at once. The best
    value and the patience used up are kept in checkpoints. A run that had stopped stays so when it is started again,
    unless another ``metric``, ``mode``, ``patience`` or ``min_delta`` is asked for.

    :param metric: Name of the metric, such as ``val/loss``.
    :param mode: Whether the smallest (``min``) or largest (``max``) value is the best.
    :param patience: Decisions without a better value after which training stops.
    :param min_delta: How much better a value must be to count.
    :param over: ``federation`` or ``cell``.
    :param stops_at_nonfinite: Whether a value that is infinite or not a number stops training.
    :raises ConfigError: if an argument is invalid.
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
        one_of("over", over, ("federation", "cell"))
        self.metric = metric
        self.mode = mode
        self.min_delta = min_delta
        self.monitored = MonitoredMetric(metric, mode, min_delta)
        self.patience = integer("patience", patience)
        self.over = over
        self.stops_at_nonfinite = stops_at_nonfinite
        self.waited = 0
        self.reason: str | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the decisions since."""
        asked = [self.patience, self.min_delta]
        return {"metric": self.monitored.state_dict(), "waited": self.waited, "reason": self.reason, "asked": asked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state."""
        if not self.monitored.load_state_dict(state["metric"]):
            return
        self.waited = int(state["waited"])
        asked = [self.patience, self.min_delta]
        self.reason = state["reason"] if list(state.get("asked", asked)) == asked else None

    def pre_fit(self, trainer: BaseTrainer) -> None:
        """See that cells can decide together."""
        asked = getattr(trainer.config, "federation", None)
        if self._is_common(trainer) and (asked is None or not asked.has_rounds):
            raise ConfigError(
                "cells that stop together decide at rounds, and there are none; give federation.every, or over: cell"
            )

    def pre_train(self, trainer: BaseTrainer) -> None:
        """Do not go on where the run that was resumed had stopped."""
        if self.reason is not None:
            trainer.stop(self.reason)

    def post_validation(self, trainer: BaseTrainer, metrics: Mapping[str, float]) -> None:
        """Note the value, and decide where this cell does so alone."""
        self.monitored.update(metrics)
        if not self._is_common(trainer):
            self._decide(trainer, self.monitored.take())

    def post_round(self, trainer: BaseTrainer, report: RoundReport) -> None:
        """Decide with the other cells; collective over the world."""
        if not self._is_common(trainer) or report.is_last:
            return
        if not isinstance(report, ElasticRoundReport):
            self._decide(trainer, self.monitored.take_mean(trainer))
            return
        self._decide(trainer, self.monitored.told_mean(report))
        messages = zip(report.cells, report.told, strict=True)
        asked = next(((cell, message["stopped"]) for cell, message in messages if "stopped" in message), None)
        if asked is not None and self.reason is None:
            self._stop(trainer, "cell {} has stopped: {}".format(*asked))

    def _is_common(self, trainer: BaseTrainer) -> bool:
        return self.over == "federation" and (trainer.state.topology.cells > 1 or trainer.state.elastic is not None)

    def _decide(self, trainer: BaseTrainer, value: float | None) -> None:
        if value is None:
            return
        if self.stops_at_nonfinite and not math.isfinite(value):
            self._stop(trainer, f"{self.metric} is {value}")
            return
        if self.monitored.is_better(value):
            self.waited = 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            best = "no finite value" if self.monitored.best is None else f"{self.monitored.best:.6g}"
            self._stop(trainer, f"{self.metric} was not better than {best} {self.waited} times")

    def _stop(self, trainer: BaseTrainer, reason: str) -> None:
        self.reason = reason
        if self._is_common(trainer):
            trainer.stopped_cells = reason
        trainer.stop(reason)
