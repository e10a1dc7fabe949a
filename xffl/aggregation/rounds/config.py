"""The settings of a :class:`xffl.FederatedScaling`, parsed and checked."""

from __future__ import annotations

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
from xffl.aggregation.federations.hierarchical import Levels
from xffl.aggregation.steps.step_observers import are_plain
from xffl.aggregation.steps.wrapped_optimizers import unwrap
from xffl.checks import integer
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
    "parse_arguments",
    "parse_delay",
    "parse_moments",
    "parse_round_config",
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
        from xffl.aggregation.rounds.config_features import check_given

        check_given(asked, aggregator, model)
    config = parse_arguments(asked)
    if not counted and (config.client is not None or config.moments is not None):
        from xffl.aggregation.rounds.config_features import refuse_without_optimizers

        refuse_without_optimizers(config)
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


def parse_arguments(asked: RoundArguments) -> RoundConfig:
    """Parse what needs neither a model nor the cells; local."""
    aggregator, algorithm = asked.aggregator, asked.algorithm
    options, preset = ({}, {}) if algorithm is None else registry.resolve_algorithm(algorithm, writer=Writer.USER)
    schedule = schedule_of(preset.get("every") if asked.every is None else asked.every)
    is_made = isinstance(aggregator, Aggregator | Levels)
    if not is_made and (aggregator is not None or options):
        from xffl.aggregation.rounds.config_features import read_options

        options = read_options(options, aggregator)
    if asked.client is not None and "client" in preset:
        raise ConfigError(f"algorithm {algorithm!r} has a client of its own; give either, or client as its option")
    config = RoundConfig(
        schedule,
        client=preset.get("client")
        if asked.client is None
        else registry.make("client", asked.client, writer=Writer.USER),
        options=options,
        delay=parse_delay(preset.get("delay", 0) if asked.delay is None else asked.delay, schedule),
        alpha=preset.get("alpha") if asked.alpha is None else asked.alpha,
        moments=parse_moments(preset.get("moments") if asked.moments is None else asked.moments, options),
    )
    if config.delay or config.alpha is not None or config.client is not None or schedule.has_threshold:
        from xffl.aggregation.rounds.config_features import check_features

        check_features(config, aggregator)
    return config


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


def parse_moments(spec: object, options: Mapping[str, Any]) -> Moments | None:
    """Return what rounds do with what optimizers keep beside the parameters; local."""
    if spec is None:
        return None
    from xffl.aggregation.rounds.config_features import read_moments

    return read_moments(spec, options)


def parse_delay(delay: object, schedule: Schedule) -> int:
    """Return the delay, which must end before the next round is due; local."""
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
