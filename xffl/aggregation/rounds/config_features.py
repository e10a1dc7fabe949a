"""What features ask of a loop's rounds: options of the aggregator, moments, clients, delays; and which go together."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from xffl.aggregation.aggregator import Aggregator
from xffl.aggregation.algorithms.moments import Moments, moments_of
from xffl.aggregation.federations.hierarchical import Levels, read_levels
from xffl.aggregation.options import REMOVED, check_merge, refuse_removed
from xffl.checks import one_of
from xffl.errors import ConfigError

if TYPE_CHECKING:
    from xffl.aggregation.rounds.config import RoundArguments, RoundConfig

__all__ = [
    "check_features",
    "check_given",
    "check_keywords",
    "read_moments",
    "read_options",
    "refuse_without_optimizers",
]


def check_given(asked: RoundArguments, aggregator: Aggregator | Levels, model: nn.Module) -> None:
    """Raise ConfigError where an aggregator of the caller's own does not fit the model or what else is asked; local."""
    if aggregator.model is not model:
        raise ConfigError("the aggregator was made for another model; give FederatedScaling the same one")
    if aggregator.is_closed:
        raise ConfigError("the aggregator is closed; make another one, or give a mapping of its options")
    of_making = (("algorithm", asked.algorithm), ("client", asked.client), ("moments", asked.moments))
    for what, value in of_making:
        if value is not None:
            raise ConfigError(
                f"{what} {value!r} has a say in how the aggregator is made; give aggregator={{option: value}} "
                "instead of one that is made already"
            )


def refuse_without_optimizers(config: RoundConfig) -> None:
    """Raise ConfigError for what needs the optimizers, which were not given; local."""
    if config.client is not None:
        raise ConfigError(
            f"client {config.client} changes gradients in the optimizer's step, but optimizer is None; give the "
            "optimizer, or leave the client out"
        )
    if config.moments is not None:
        raise ConfigError(
            f"moments={config.moments} is about what optimizers keep, but optimizer is None; give the optimizer, or "
            "leave moments out"
        )


def read_options(options: Mapping[str, Any], aggregator: object) -> dict[str, Any]:
    """Return the options of the aggregator to make: an algorithm's, and those that were given; local."""
    if not isinstance(aggregator, Mapping | None):
        raise ConfigError(
            f"aggregator must be an Aggregator or a mapping of its options, got {aggregator!r}; give either"
        )
    if twice := sorted(options.keys() & (aggregator or {}).keys()):
        raise ConfigError(
            f"aggregator sets {', '.join(twice)}, and so does the algorithm; give it as an option of the algorithm only"
        )
    merged = {**options, **(aggregator or {})}
    check_keywords(merged)
    return merged


def read_moments(spec: object, options: Mapping[str, Any]) -> Moments | None:
    """Return what rounds do with moments; ``None`` where it is nothing; local."""
    moments = moments_of(spec)
    if moments is not None and "levels" in options:
        raise ConfigError(f"moments={moments} does not go with levels; leave one of them out")
    return moments


def check_keywords(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for what is no keyword of an aggregator; local."""
    if "levels" in options:
        read_levels(options["levels"], {name: value for name, value in options.items() if name != "levels"})
        return
    parameters = inspect.signature(Aggregator).parameters.values()
    known = [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    for name in options:
        if name in REMOVED:
            refuse_removed([name])
        if name == "moments":
            raise ConfigError("moments are those of the loop's optimizers; give them beside aggregator, not in it")
        one_of("aggregator option", name, known)


def _check_delay(config: RoundConfig, aggregator: object) -> None:
    """Check what delayed rounds need."""
    delay = config.delay
    if config.moments is not None and config.moments.mode == "average" and delay and config.alpha is None:
        raise ConfigError(
            f"moments={config.moments} with a delay needs alpha: mean + (local - copy) may make a second moment "
            "negative; give alpha, such as 0.5"
        )
    if config.alpha is not None and not delay:
        raise ConfigError(f"alpha {config.alpha!r} is for delayed rounds, but delay is 0; give a delay, too")
    check_merge(config.alpha)
    if not delay:
        return
    overlaps = config.options.get("overlap", "levels" not in config.options)
    if not (aggregator.overlaps if isinstance(aggregator, Aggregator | Levels) else overlaps):
        raise ConfigError(f"delay {delay} needs an aggregator made with overlap=True, and without levels")
    if config.client is not None:
        raise ConfigError(
            f"client {config.client} needs to know where the last round left the model, but delay is {delay}; leave "
            "one of them out"
        )
    if config.schedule.has_threshold:
        raise ConfigError(
            f"schedule {config.schedule} measures the model before a round starts, but delay is {delay}; leave one out"
        )


def check_features(config: RoundConfig, aggregator: object) -> None:
    """Raise ConfigError where a delay, a client or a threshold does not go with the rest; local."""
    _check_delay(config, aggregator)
    options = config.options
    fragments = aggregator.fragments if isinstance(aggregator, Aggregator | Levels) else options.get("fragments", 1)
    if config.schedule.has_threshold and fragments != 1:
        raise ConfigError(
            f"schedule {config.schedule} looks at the whole model, but fragments is {fragments}; leave one of them out"
        )
    if config.client is not None and options.get("fragments", 1) != 1:
        raise ConfigError(
            f"client {config.client} needs rounds of the whole model, but fragments is {options['fragments']}; leave "
            "one of them out"
        )
