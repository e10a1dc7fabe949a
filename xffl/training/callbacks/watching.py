"""A metric that decides: which value of it is the best so far, and what all cells together make of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from xffl.errors import ConfigError

if TYPE_CHECKING:
    from xffl.training.trainer import BaseTrainer

__all__ = ["MODES", "WatchedMetric"]

LOG = logging.getLogger(__name__)

MODES = ("min", "max")
"""Whether the smallest or the largest value is the best."""


class WatchedMetric:
    """The newest and the best value of a metric.

    A value that is not a number is never better.

    :param name: The metric, such as ``val/loss``.
    :param mode: ``min`` or ``max``.
    :param min_delta: How much better than the best so far a value must be to count as better.
    :raises ConfigError: if an argument cannot be meant.
    """

    def __init__(self, name: str, mode: str = "min", min_delta: float = 0.0) -> None:
        if mode not in MODES:
            raise ConfigError(f"mode {mode!r} is none of {', '.join(MODES)}")
        if not 0.0 <= min_delta < math.inf:
            raise ConfigError(f"min_delta {min_delta!r} is negative or not finite; give 0 or more")
        self.name, self.mode, self.min_delta = name, mode, min_delta
        self.newest: float | None = None
        self.best: float | None = None

    def note(self, metrics: Mapping[str, float]) -> None:
        """Take in what a validation has measured; local.

        :param metrics: All metrics by name.
        :raises ConfigError: if this one is not among them.
        """
        if self.name not in metrics:
            raise ConfigError(
                f"the validation has no metric {self.name!r}, but {', '.join(sorted(metrics)) or 'none'}; give one of "
                "them"
            )
        self.newest = float(metrics[self.name])

    def take(self) -> float | None:
        """Return the value of the validation since the last call, if there was one; local."""
        newest, self.newest = self.newest, None
        return newest

    def agree(self, trainer: BaseTrainer) -> float | None:
        """Return the mean of what the cells have measured since the last call; the same on all ranks.

        Collective over the world: one all-reduce of two numbers.

        :param trainer: The trainer.
        :return: The mean over the cells that have validated since, each counting by its ranks; ``None`` where none has.
        """
        newest = self.take()
        own = torch.tensor([0.0, 0.0] if newest is None else [newest, 1.0], dtype=torch.float64, device=trainer.device)
        total, count = trainer.world.all_reduce(own, "sum", "world").tolist()
        return total / count if count else None

    def judge(self, value: float) -> bool:
        """Compare a value with the best, whose place it takes where it is better; local.

        :param value: The value.
        :return: Whether it is better.
        """
        sign = 1.0 if self.mode == "min" else -1.0
        if math.isnan(value) or (self.best is not None and not sign * (self.best - value) > self.min_delta):
            return False
        self.best = value
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the newest and the best value, and of what."""
        return {"newest": self.newest, "best": self.best, "of": [self.name, self.mode]}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Take over a saved state, unless it is of another metric, whose values mean nothing here.

        :param state: The state.
        :return: Whether it was taken over.
        """
        asked = [self.name, self.mode]
        saved = list(state.get("of", asked))  # older states do not say
        if saved != asked:
            LOG.warning(
                "the checkpoint knows the best value of %s (%s); that of %s (%s) is looked for anew", *saved, *asked
            )
            return False
        self.newest, self.best = state["newest"], state["best"]
        return True
