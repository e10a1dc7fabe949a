"""The check of what a trainer's configuration asks of its rounds, before there is a model."""

from __future__ import annotations

from collections.abc import Mapping

from xffl.aggregation.algorithms import registry
from xffl.aggregation.algorithms.every_steps import schedule_of
from xffl.aggregation.options import check_merge
from xffl.aggregation.rounds.config import RoundArguments, parse_arguments, parse_delay, parse_moments
from xffl.aggregation.rounds.config_features import check_keywords
from xffl.naming import Writer

__all__ = ["validate_round_config"]


def validate_round_config(asked: RoundArguments) -> None:
    """Raise ConfigError where these arguments of a configuration are invalid or do not go together; local.

    An algorithm's options, and how they go with the rest, are left to
    :func:`~xffl.aggregation.rounds.config.parse_round_config`: to make an algorithm's server optimizer takes slow
    imports.
    """
    if asked.algorithm is None:
        parse_arguments(asked)
        return
    entry, _ = registry.find_algorithm(asked.algorithm)
    schedule = schedule_of(entry.scaling.get("every") if asked.every is None else asked.every)
    assert isinstance(asked.aggregator, Mapping), "a configuration makes no aggregator"
    check_keywords(asked.aggregator)
    if asked.delay is not None:
        parse_delay(asked.delay, schedule)
    check_merge(asked.alpha)
    parse_moments(asked.moments, asked.aggregator)
    if asked.client is not None:
        registry.make("client", asked.client, writer=Writer.USER)
