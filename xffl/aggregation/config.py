"""The settings of a :class:`xffl.FederatedScaling`, parsed and checked."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from xffl.aggregation.aggregator import Aggregator
from xffl.aggregation.algorithms import registry
from xffl.aggregation.algorithms.clients import Client, set_up
from xffl.aggregation.algorithms.every_steps import EverySteps, Schedule, schedule_of
from xffl.aggregation.engine.weights.weight_keepers import may_be_cut
from xffl.aggregation.federations.hierarchical import Levels, read_levels
from xffl.aggregation.options import REMOVED, check_merge, refuse_removed
from xffl.aggregation.steps.step_observers import are_plain
from xffl.aggregation.steps.wrapped_optimizers import unwrap
from xffl.checks import integer, one_of
from xffl.distributed.values.sharding import sharded_parameters
from xffl.errors import ConfigError
from xffl.naming import Writer
from xffl.parallel.zero.mark import is_cut

if TYPE_CHECKING:
    from xffl.aggregation.algorithms.moments import Moments

__all__ = [
    "RoundArguments",
    "RoundConfig",
    "aggregator_options",
    "check_stepped",
    "parse_round_config",
    "validate_round_config",
]


@dataclass(frozen=True)
class RoundConfig:
    """When rounds take place, what cells do in between, and how a round's result is taken over."""

    schedule: Schedule
    client: Client | None
    options: Mapping[str, Any]  # keywords of the aggregator to make
    delay: int  # local steps that go on while a round is under way
    alpha: float | None  # part of a local value that stays when a delayed mean is merged
    optimizers: tuple[Optimizer, ...] = ()  # whose steps are counted; none where the loop counts them
    moments: Moments | None = None  # what rounds do with what optimizers keep beside the parameters

    def __str__(self) -> str:
        counted = "by optimizers" if self.optimizers else "by step()"
        moments = "" if self.moments is None else f", moments={self.moments}"
        return f"every={self.schedule} {counted}, client={self.client}, delay={self.delay}, alpha={self.alpha}{moments}"


@dataclass(frozen=True)
class RoundArguments:
    """What rounds are asked for, as :class:`xffl.FederatedScaling` and configurations are given it."""

    every: object
    aggregator: Aggregator | Levels | Mapping[str, Any] | None
    delay: int | None
    alpha: float | None
    client: object
    algorithm: object
    moments: object = None


def parse_round_config(
    model: nn.Module, optimizers: Sequence[Optimizer] | None, asked: RoundArguments, *, cells: int, weight: object
) -> RoundConfig:
    """Parse and check the arguments, those of an algorithm where nothing was given; local."""
    counted: list[Optimizer] = []
    aggregator = asked.aggregator
    if optimizers is not None:
        if not optimizers or not all(isinstance(one, Optimizer) for one in optimizers):
            shown = optimizers[0] if len(optimizers) == 1 else list(optimizers)
            raise ConfigError(
                f"optimizer must be a torch.optim.Optimizer or a list of them, got {shown!r}; give one, or None and "
                "call scaling.step() after each local step"
            )
        counted = list(optimizers) if are_plain(optimizers) else unwrap(optimizers)
        check_stepped(model, counted)
    if isinstance(aggregator, Aggregator | Levels):
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
    config = _parse(asked)
    if config.client is not None and not counted:
        raise ConfigError(
            f"client {config.client} changes gradients in the optimizer's step, but optimizer is None; give the "
            "optimizer, or leave the client out"
        )
    if config.moments is not None and not counted:
        raise ConfigError(
            f"moments={config.moments} is about what optimizers keep, but optimizer is None; give the optimizer, or "
            "leave moments out"
        )
    config.schedule.check(cells)
    if weight is not None and not callable(weight):
        raise ConfigError(f"weight {weight!r} is not callable; give a function that returns this rank's count")
    is_private = aggregator.accountant if isinstance(aggregator, Aggregator | Levels) else config.options.get("privacy")
    if weight is not None and is_private is not None:
        raise ConfigError(
            "privacy counts all cells alike, since weights tell about the data; leave weight out (federation.weight: "
            "equal in a trainer's configuration)"
        )
    return replace(config, optimizers=tuple(counted))


def validate_round_config(asked: RoundArguments) -> None:
    """Check the arguments of :func:`parse_round_config` that a configuration holds, before there is a model; local.

    An algorithm's options, and how they go with the rest, are left to that function: to make an algorithm's server
    optimizer takes slow imports.
    """
    if asked.algorithm is None:
        _parse(asked)
        return
    entry, _ = registry.find_algorithm(asked.algorithm)
    schedule = schedule_of(entry.scaling.get("every") if asked.every is None else asked.every)
    assert isinstance(asked.aggregator, Mapping), "a configuration makes no aggregator"
    _check_keywords(asked.aggregator)
    if asked.delay is not None:
        _parse_delay(asked.delay, schedule)
    check_merge(asked.alpha)
    _parse_moments(asked.moments, asked.aggregator)
    if asked.client is not None:
        registry.make("client", asked.client, writer=Writer.USER)


def _parse(asked: RoundArguments) -> RoundConfig:
    """Parse what needs neither a model nor the cells."""
    aggregator, algorithm = asked.aggregator, asked.algorithm
    options, preset = ({}, {}) if algorithm is None else registry.resolve_algorithm(algorithm, writer=Writer.USER)
    schedule = schedule_of(preset.get("every") if asked.every is None else asked.every)
    if not isinstance(aggregator, Aggregator | Levels):
        if not isinstance(aggregator, Mapping | None):
            raise ConfigError(
                f"aggregator must be an Aggregator or a mapping of its options, got {aggregator!r}; give either"
            )
        if twice := sorted(options.keys() & (aggregator or {}).keys()):
            raise ConfigError(
                f"aggregator sets {', '.join(twice)}, and so does the algorithm; give it as an option of the algorithm "
                "only"
            )
        options = {**options, **(aggregator or {})}
        _check_keywords(options)
    if asked.client is not None and "client" in preset:
        raise ConfigError(f"algorithm {algorithm!r} has a client of its own; give either, or client as its option")
    config = RoundConfig(
        schedule,
        client=preset.get("client")
        if asked.client is None
        else registry.make("client", asked.client, writer=Writer.USER),
        options=options,
        delay=_parse_delay(preset.get("delay", 0) if asked.delay is None else asked.delay, schedule),
        alpha=preset.get("alpha") if asked.alpha is None else asked.alpha,
        moments=_parse_moments(preset.get("moments") if asked.moments is None else asked.moments, options),
    )
    _check_delay(config, aggregator)
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
    return config


def _parse_moments(spec: object, options: Mapping[str, Any]) -> Moments | None:
    """Return what rounds do with moments."""
    if spec is None:
        return None
    from xffl.aggregation.algorithms.moments import moments_of

    moments = moments_of(spec)
    if moments is not None and "levels" in options:
        raise ConfigError(f"moments={moments} does not go with levels; leave one of them out")
    return moments


def _check_keywords(options: Mapping[str, Any]) -> None:
    """Check the names of an aggregator's keywords."""
    if "levels" in options:
        read_levels(options["levels"], {name: value for name, value in options.items() if name != "levels"})
        return
    parameters = inspect.signature(Aggregator).parameters.values()
    known = [one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]
    for name in options:
        if name in REMOVED:
            refuse_removed([name])
        if name == "moments":
            raise ConfigError("moments are those of the loop's optimizers; give them beside aggregator, not in it")
        one_of("aggregator option", name, known)


def check_stepped(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that hold other tensors than the model: rounds would be about a model that is not trained."""
    if may_be_cut() and is_cut(model):
        return  # the engine's optimizer steps masters of its own
    held = {id(one): one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
    named = sharded_parameters(model)
    trained = {id(one) for one in named.values() if one.requires_grad} or set(map(id, named.values()))
    if trained.isdisjoint(held):
        raise ConfigError(
            "no optimizer holds a parameter of the model that trains, so it would not be trained; make the optimizer "
            "after xffl.shard, load_state_dict(assign=True), or whatever else puts other parameters in the place of "
            "the model's"
        )
    # A parameter without an optimizer may be meant to stay, unless an optimizer holds what looks like its predecessor.
    own = set(map(id, named.values()))
    orphans = {(one.shape, one.dtype) for key, one in held.items() if key not in own and one.requires_grad}
    untrained = trained - held.keys()
    replaced = [name for name, one in named.items() if id(one) in untrained and (one.shape, one.dtype) in orphans]
    if replaced:
        raise ConfigError(
            f"no optimizer holds parameter {replaced[0]!r}, but one holds a tensor of its shape and type that is not "
            "the model's: make the optimizer after whatever replaces parameters (load_state_dict(assign=True), "
            "nn.Parameter(...), a parametrization); if it is not to be trained, call requires_grad_(False) on it"
        )


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


def _parse_delay(delay: object, schedule: Schedule) -> int:
    """Return the delay, which must end before the next round is due."""
    most = schedule.every - 1 if isinstance(schedule, EverySteps) else None
    return integer("delay", delay, 0, most, hint="give local steps, fewer than every")


def aggregator_options(config: RoundConfig, model: nn.Module, *, is_first: bool) -> dict[str, Any]:
    """Return the keywords of the aggregator to make, with what the schedule, a delay and the client need of it.

    Collective over the world where there is a client and the aggregator ``is_first``: the client takes the weights that
    training starts from.
    """
    client, options = config.client, dict(config.options)
    if "levels" not in options:
        options.setdefault("overlap", config.delay > 0)
        options.setdefault("norms", config.schedule.has_threshold)
    if client is not None and is_first:
        set_up(client, model, config.optimizers, options.get("policies"))
    if client is not None and client.extra is not None:
        options["extra"] = client.extra
    if config.moments is not None:
        from xffl.aggregation.optimizer_moments import OptimizerMoments

        options["moments"] = OptimizerMoments(config.moments, config.optimizers)
    return options
