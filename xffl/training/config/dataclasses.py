"""Sections of a configuration: the start of its processes, and what every trainer has; mixins add their own."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from xffl.checks import integer_fields, number, one_of
from xffl.cluster.sizes import read_federation, read_replica_size
from xffl.distributed.parameters import DeviceParameters, FaultToleranceParameters
from xffl.errors import ConfigError
from xffl.parallel.config import DistributedConfig, TrainingConfig
from xffl.training.callbacks.base import Callback
from xffl.training.mixins.logging import LoggerConfigMixin
from xffl.training.signals import DEFAULT_SIGNALS, check_signals

__all__ = ["BaseTrainerConfig", "ExperimentConfig", "LaunchConfig", "TrainingParameters"]


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How ``xffl exec`` starts a configuration.

    :param processes: Processes to start; by default 1 on this machine, and as many as the job has tasks inside of one.
        Where a launcher has started them, as many.
    :param federated: Ranks of each cell, or of all cells, or a rule such as ``auto`` that finds them; the session takes
        them as ``XFFL_FEDERATED``.
    :param hsdp: Ranks that hold one copy of the model; the session takes them as ``XFFL_HSDP``.
    :param timeout_s: Seconds after which processes started here are ended.
    """

    processes: int | None = None
    federated: int | tuple[int, ...] | str | None = None
    hsdp: int | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        hint = "give such a number, or leave it out"
        object.__setattr__(self, "hsdp", read_replica_size(self.hsdp, "launch.hsdp"))
        integer_fields(self, "processes", "hsdp", prefix="launch.", hint=hint, may_be_none=True)
        if self.timeout_s is not None:
            number("launch.timeout_s", self.timeout_s, above=0, hint=hint)
        object.__setattr__(self, "federated", read_federation(self.federated, "launch.federated"))


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """Which run this is, and where it is kept.

    :param name: The run's name.
    :param output_dir: The run's folder, on a file system that all ranks share; by default ``runs/`` and the name.
    :param resume: Whether to go on from the newest checkpoint in that folder, where there is one.
    :param reset: Whether what each rank keeps for itself in a checkpoint (random numbers, the rounds' state, pending
        records) begins anew; it only loads into the layout that saved it, so other numbers of ranks or cells need this.
        Where the steps have another size now, the epoch that was under way begins anew, too. Steps, epochs, rounds and
        samples are counted on. A checkpoint that is damaged is not skipped by it.
    :param seed: Of the weights, the order of the data and whatever else is random; each has a stream of its own.
    :param preempt_signals: Names of signals (``USR1``, ``USR2``, ``TERM``, ``HUP``, ``XCPU``) at which all ranks save
        and leave with exit code 75, to go on when the run is started again; none to leave signals alone.
    :param deterministic: Whether to compute with deterministic algorithms only, which may be slower.
    """

    name: str = "run"
    output_dir: str = ""
    resume: bool = True
    reset: bool = False
    seed: int = 0
    preempt_signals: list[str] = field(default_factory=lambda: list(DEFAULT_SIGNALS))
    deterministic: bool = False

    def __post_init__(self) -> None:
        if not self.name.isprintable() or not self.name or os.sep in self.name:
            raise ConfigError(f"experiment.name must be the name of a folder such as 'digits', got {self.name!r}")
        check_signals(self.preempt_signals)
        integer_fields(self, "seed", minimum=0, prefix="experiment.")
        if not self.output_dir:
            object.__setattr__(self, "output_dir", os.path.join("runs", self.name))


@dataclass(frozen=True, kw_only=True)
class TrainingParameters(TrainingConfig):
    """How long and in which rhythm a trainer trains.

    :param epochs: Passes over each cell's data.
    :param max_steps: Optimizer steps of a cell after which it ends at the latest; ``None`` for no such limit.
    :param validate_every_epochs: Epochs between two validations of each cell; ``None`` for none at an epoch's end.
    :param validate_every_steps: Optimizer steps between two validations of each cell; ``None`` for none inside epochs.
    :param validate_every_rounds: Rounds between two validations of the federation's model, by all cells together;
        ``None`` for none at rounds.
    :param log_every: Optimizer steps between two records of what ``log_scalar`` was given.
    :param scheduler_interval: Whether learning-rate schedulers step at every ``epoch`` or every optimizer ``step``.
    """

    epochs: int = 1
    max_steps: int | None = None
    validate_every_epochs: int | None = 1
    validate_every_steps: int | None = None
    validate_every_rounds: int | None = None
    log_every: int = 10
    scheduler_interval: str = "epoch"

    def __post_init__(self) -> None:
        super().__post_init__()
        integer_fields(self, "epochs", "log_every", prefix="training.")
        rare = ("max_steps", "validate_every_epochs", "validate_every_steps", "validate_every_rounds")
        integer_fields(self, *rare, prefix="training.", may_be_none=True)
        one_of("scheduler_interval", self.scheduler_interval, ("epoch", "step"))


@dataclass(kw_only=True)
class BaseTrainerConfig(LoggerConfigMixin):
    """What every trainer is asked for.

    :param experiment: Which run this is.
    :param distributed: How the model is spread inside a cell, and which cells there are.
    :param training: How long and in which rhythm it trains.
    :param callbacks: What is called at the stages of the run, in this order.
    :param fault_tolerance: Whether the job is one of several replica groups, which may be lost and come back.
    :param enable_fault_tolerance: The same as ``fault_tolerance: {enable: true}``.
    """

    experiment: ExperimentConfig = field(default_factory=ExperimentConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    training: TrainingParameters = field(default_factory=TrainingParameters)
    callbacks: list[Callback] = field(default_factory=list)
    fault_tolerance: FaultToleranceParameters = field(default_factory=lambda: FaultToleranceParameters(enable=False))
    enable_fault_tolerance: bool = False

    def __post_init__(self) -> None:
        if self.enable_fault_tolerance and not self.fault_tolerance.enable:
            self.fault_tolerance = replace(self.fault_tolerance, enable=True)
        following = getattr(super(), "__post_init__", None)  # of a mixin
        if following is not None:
            following()
        every = self.training.validate_every_rounds
        asked = getattr(self, "federation", None)
        if self.fault_tolerance.enable and asked is not None and asked.has_rounds:
            raise ConfigError(
                "federation asks for rounds between cells, but a job with fault_tolerance is one replica of one model; "
                "leave one of them out"
            )
        if every is not None and (asked is None or not (asked.has_rounds or asked.is_alone)):
            raise ConfigError(
                f"training.validate_every_rounds {every} is for rounds, and there are none; give federation.every, or "
                "leave it out"
            )

    @property
    def training_parameters(self) -> TrainingParameters:
        """The section ``training`` by its other name."""
        return self.training

    @property
    def device_parameters(self) -> DeviceParameters | None:
        """The mesh inside a cell, as ``distributed`` asks for it."""
        return self.distributed.device_parameters
