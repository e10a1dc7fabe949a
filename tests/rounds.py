"""What tests plant into the rounds of an aggregator: another exchange, a look at what was agreed, options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

from torch import nn

import xffl
from xffl.aggregation.engine.exchange import RoundRun
from xffl.aggregation.engine.planning.transfers import RoundContext
from xffl.aggregation.federations.hierarchical import Levels
from xffl.aggregation.options import Options

__all__ = ["aggregator_of", "agreed_contexts", "make_rounds", "options_of", "replace_exchange"]


def aggregator_of(model: nn.Module, state: xffl.DistributedState, **options: Any) -> xffl.Aggregator:
    """Make an aggregator of a model that nothing spreads: the test changes it alike on all ranks of a cell."""
    return xffl.Aggregator(model, state, gradients_reduced_by_caller=True, **options)


def replace_exchange(aggregator: xffl.Aggregator, instead: Callable[[Callable[[], RoundContext]], Any]) -> None:
    """Have all further rounds of an aggregator call ``instead``, which is given their exchange, in its place."""
    exchange = RoundRun.exchange

    def called(run: RoundRun, context: RoundContext) -> Any:
        if run._exchange is not aggregator._exchange:
            return exchange(run, context)
        return instead(partial(exchange, run, context))

    RoundRun.exchange = called  # type: ignore[method-assign]


@contextmanager
def agreed_contexts() -> Iterator[list[RoundContext]]:
    """Collect what the rounds that are written meanwhile have agreed on."""
    contexts: list[RoundContext] = []
    commit = RoundRun.commit

    def noting(run: RoundRun, context: RoundContext, **options: Any) -> None:
        contexts.append(context)
        commit(run, context, **options)

    with mock.patch.object(RoundRun, "commit", noting):
        yield contexts


def options_of(**asked: Any) -> Options:
    """Return the options of an aggregator that is asked for nothing else."""
    usual = {
        "combine": "mean",
        "server": None,
        "privacy": None,
        "secure": False,
        "bucket_bytes": 4 * 2**20,
        "atomic": True,
        "nonfinite": "reject",
        "form": "auto",
        "rails": False,
        "fragments": 1,
        "overlap": False,
        "norms": False,
    }
    return Options.of(**{**usual, **asked})


def make_rounds(
    aggregator: xffl.Aggregator | Levels,
    step: Callable[[], None],
    count: int,
    weight: float | None,
    behind: float | bool,
) -> None:
    """Make rounds with a step before each, and one behind it where it is delayed (with an ``alpha``, if a number)."""
    for _ in range(count):
        step()
        if behind:
            under_way = aggregator.aggregate_async(weight, alpha=behind if isinstance(behind, float) else None)
            step()
            under_way.merge()
        else:
            aggregator.aggregate(weight)
    aggregator.close()
