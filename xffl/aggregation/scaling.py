"""Rounds in a training loop that somebody else owns."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from xffl.aggregation.aggregator import Aggregator
from xffl.aggregation.report import RoundReport
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import ConfigError, StateError

__all__ = ["FederatedScaling"]


class FederatedScaling:
    """Run a round after every ``every`` optimizer steps, for as long as the ``with`` block lasts.

    Entering is collective over the world (an :class:`~xffl.Aggregator` is made), and so is leaving it normally: a cell
    that has finished keeps answering the others' rounds until all have finished, so cells with loaders of different
    length do not hang. Steps made since a cell's last round count in the first round that it answers; from then on its
    weight is 0. Leaving by an exception does not communicate.

    .. code-block:: python

       with xffl.FederatedScaling(model, optimizer, state, every=100):
           for batch in loader:
               model(batch).loss.backward()
               optimizer.step()
               optimizer.zero_grad()

    :param model: The model that trains.
    :param optimizer: Its optimizer; a call of ``step`` is a local step.
    :param state: The state that describes the federation.
    :param every: Local steps between two rounds, at least 1.
    :param weight: Called on each rank before a round: the count (samples, tokens) since the last one. ``None``: every
        cell that made a step counts 1.
    :param on_round: Called on every rank with the report of each round, after the new weights stand.
    :param aggregator: An aggregator made with options of one's own; ``None`` makes one with the defaults.
    :raises ConfigError: if ``every`` is no positive whole number.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        state: DistributedState,
        *,
        every: int,
        weight: Callable[[], float] | None = None,
        on_round: Callable[[RoundReport], None] | None = None,
        aggregator: Aggregator | None = None,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(f"every {every!r} is no positive whole number; give the local steps between two rounds")
        self._optimizer = optimizer
        self._every = every
        self._weight = weight
        self._on_round = on_round
        self._make = (model, state)
        self._aggregator = aggregator
        self._handles: list[RemovableHandle] = []
        self._pending = 0

    @property
    def aggregator(self) -> Aggregator:
        """The aggregator that runs the rounds.

        :raises StateError: outside the ``with`` block, if none was given.
        """
        if self._aggregator is None:
            raise StateError("the aggregator is made on entering the with block; enter it first")
        return self._aggregator

    def __enter__(self) -> FederatedScaling:
        if self._handles:
            raise StateError("this FederatedScaling is already entered; make one for each with block")
        if self._aggregator is None:
            self._aggregator = Aggregator(*self._make)
        self._pending = 0
        self._handles = [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._handles:
            self._handles.pop().remove()
        if kind is None:
            while not self._round(is_finished=True):
                pass

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.aggregator.check()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._pending += 1
        if self._pending >= self._every:
            self._round(is_finished=False)

    def _round(self, *, is_finished: bool) -> bool:
        """Take part in a round; tell whether it was the last."""
        is_absent = self._pending == 0
        weight = self._weight() if self._weight is not None and not is_absent else None
        report = self.aggregator.take_part(weight, is_absent=is_absent, is_finished=is_finished)
        self._pending = 0
        if report is not None and self._on_round is not None:
            self._on_round(report)
        return report is None or report.is_last
