"""Rounds in a training loop that somebody else owns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from xffl.aggregation.aggregator import Aggregator, PendingRound
from xffl.aggregation.ledger import Claim, Ledger
from xffl.aggregation.options import check_merge
from xffl.aggregation.report import RoundReport
from xffl.aggregation.vote import checked_weight
from xffl.distributed.agreement import agree
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import ConfigError, StateError, XfflError

__all__ = ["FederatedScaling"]


class FederatedScaling:
    """Run a round after every ``every`` optimizer steps, for as long as the ``with`` block lasts.

    Making it, entering it (an :class:`~xffl.Aggregator` is made) and leaving it normally are collective over the world:
    a cell that has finished keeps answering the others' rounds until all have finished, so cells with loaders of
    different length do not hang. Steps made since a cell's last round count in the first round that it answers; from
    then on its weight is 0. Leaving by an exception does not communicate.

    .. code-block:: python

       with xffl.FederatedScaling(model, optimizer, state, every=100):
           for batch in loader:
               model(batch).loss.backward()
               optimizer.step()
               optimizer.zero_grad()

    :param model: The model that trains.
    :param optimizer: Its optimizer, or several; a call of the last one's ``step`` is a local step.
    :param state: The state that describes the federation.
    :param every: Local steps between two rounds, at least 1.
    :param weight: Called on each rank before a round: the count (samples, tokens) since the last call. What a rejected
        round did not use counts in the next. ``None``: every cell that made a step counts 1.
    :param on_round: Called on every rank with the report of each round, after the new weights stand.
    :param aggregator: An aggregator made with options of one's own; ``None`` makes one with the defaults.
    :param delay: Local steps that go on while a round is under way, less than ``every``; 0 waits for it. With a delay
        the aggregator needs ``overlap=True``.
    :param alpha: With a delay, the part of a local value that stays when the mean is merged; ``None`` keeps the steps
        made meanwhile. See :meth:`xffl.Aggregator.aggregate_async`.
    :raises ConfigError: if ``every`` is no positive whole number, or differs between ranks, or the aggregator is
        another model's; on all ranks alike.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        state: DistributedState,
        *,
        every: int,
        weight: Callable[[], float] | None = None,
        on_round: Callable[[RoundReport], None] | None = None,
        aggregator: Aggregator | None = None,
        delay: int = 0,
        alpha: float | None = None,
    ) -> None:
        optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        error: ConfigError | None = None
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            error = ConfigError(f"every {every!r} is no positive whole number; give the local steps between two rounds")
        elif not optimizers or not all(isinstance(one, Optimizer) for one in optimizers):
            error = ConfigError(f"optimizer {optimizer!r} is no torch.optim.Optimizer, nor a list of some; give one")
        elif aggregator is not None and aggregator.model is not model:
            error = ConfigError("the aggregator was made for another model; give FederatedScaling the same one")
        elif weight is not None and not callable(weight):
            error = ConfigError(f"weight {weight!r} cannot be called; give a function that returns this rank's count")
        elif isinstance(delay, bool) or not isinstance(delay, int) or not 0 <= delay < every:
            error = ConfigError(
                f"delay {delay!r} is no whole number from 0 to below every={every}; give the local steps"
            )
        elif alpha is not None and not delay:
            error = ConfigError(f"alpha {alpha!r} merges late results, but delay is 0; give a delay, too")
        elif delay and aggregator is not None and not aggregator.overlaps:
            error = ConfigError(f"delay {delay} needs an aggregator made with overlap=True")
        else:
            try:
                check_merge(alpha)
            except ConfigError as wrong:
                error = wrong
        agree(
            "steps between rounds (every) and ways to weigh and merge",
            f"every={every!r}, weighed={weight is not None}, delay={delay!r}, alpha={alpha!r}",
            error=error,
        )
        self._optimizer = optimizers[-1]
        self._every = every
        self._weight = weight
        self._delay, self._alpha = delay, alpha
        self._under_way: tuple[PendingRound, Claim] | None = None
        self._on_round = on_round
        self._make = (model, state)
        self._aggregator = aggregator
        self._is_own = aggregator is None
        self._handles: list[RemovableHandle] = []
        self._ledger = Ledger(1)
        self._since = 0

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
        if self._aggregator is None or (self._is_own and self._aggregator.is_closed):
            self._aggregator = Aggregator(*self._make, overlap=self._delay > 0)
        self._ledger = Ledger(self._aggregator.fragments)
        self._since = 0
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
            self._finish()
            if self._is_own:
                self.aggregator.close()

    def settle(self) -> None:
        """Merge the round that is under way, if any: before a checkpoint is written in the middle of a delay.

        Call it on every rank, after the same number of steps within a cell.
        """
        if self._under_way is not None:
            self._merge(*self._under_way)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.aggregator.check()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._since += 1
        self._ledger.add_step()
        if self._under_way is not None and self._since == self._delay:
            self._merge(*self._under_way)
        if self._since >= self._every:
            if self._delay:
                self._start()
            else:
                self._round()
            self._since = 0

    def _start(self) -> None:
        """Start a round that is merged some steps later."""
        fragment = self.aggregator.next_fragment
        pending = self.aggregator.aggregate_async(self._weigh(), alpha=self._alpha)
        self._under_way = pending, self._ledger.claim(fragment)

    def _merge(self, pending: PendingRound, claim: Claim) -> None:
        """Take the result of a round that was started some steps ago."""
        try:
            # Where no step was made meanwhile, nothing local is to stay.
            report = pending.merge(keeps_steps=self._ledger.steps(claim.fragment) > 0)
        except XfflError:
            self._ledger.put_back(claim)
            raise
        finally:
            if self.aggregator.under_way is not pending:  # else the wait was interrupted, and can be taken up again
                self._under_way = None
        self._took_place(claim, report)

    def _finish(self) -> None:
        """Answer the others' rounds until all have finished; raise at the end what a rejected one of them raised."""
        rejected: XfflError | None = None
        is_last = False
        while not is_last:
            try:
                self.settle()
                is_last = self._round(is_finishing=True, gives_up=rejected is not None)
            except XfflError as error:
                if not self.aggregator.can_go_on:
                    raise
                rejected = rejected or error
        if rejected is not None:
            raise rejected

    def _round(self, *, is_finishing: bool = False, gives_up: bool = False) -> bool:
        """Take part in a round; tell whether it was the last."""
        fragment = self.aggregator.next_fragment
        report = self.aggregator.take_part(
            self._weigh(),
            is_absent=self._ledger.steps(fragment) == 0,
            is_finished=is_finishing and (gives_up or not self._ledger.has_others(fragment)),
        )
        claim = self._ledger.claim(fragment)
        if report is None:
            return True
        self._took_place(claim, report)
        return report.is_last

    def _took_place(self, claim: Claim, report: RoundReport) -> None:
        self._ledger.settle(claim)
        if self._on_round is not None and any(report.weights):
            self._on_round(report)

    def _weigh(self) -> Callable[[], float] | None:
        return self._count if self._weight is not None else None

    def _count(self) -> float:
        """Return what counts for the next round's part of the model since a round last took it in."""
        assert self._weight is not None, "asked for only where there is one"
        self._ledger.add_count(checked_weight(self._weight()))
        return self._ledger.count(self.aggregator.next_fragment)
