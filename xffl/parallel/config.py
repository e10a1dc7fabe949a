"""Configuration of a strategy: its name, the mesh, and what it has to know of the training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

from xffl.checks import integer, integer_fields, number, one_of
from xffl.cluster.sizes import read_federation
from xffl.distributed.parameters import CommParameters, DeviceParameters, Options
from xffl.errors import ConfigError

__all__ = ["DDPConfig", "DistributedConfig", "StrategyConfig", "TrainingConfig", "read_config"]

HOOKS = ("none", "fp16", "bf16", "powersgd")
PRECISIONS = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class DDPConfig:
    """How replicas of whole models add their gradients up.

    :param find_unused_parameters: Whether parameters may go without a gradient in a step.
    :param gradient_as_bucket_view: Whether gradients lie in the buckets that are sent, which saves a copy of them.
    :param static_graph: Whether every step uses the same parameters in the same way.
    :param bucket_cap_mb: Size of a bucket, in MiB; ``None`` means torch's.
    :param communication_hook: How gradients are written on their way: ``none`` as they are, ``fp16`` or ``bf16``
        rounded, ``powersgd`` as products of thin matrices (Vogels et al. 2019, arXiv:1905.13727).
    :param powersgd_rank: Columns of these matrices.
    :param powersgd_start: Steps with whole gradients before the first with matrices.
    """

    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    bucket_cap_mb: float | None = None
    communication_hook: str = "none"
    powersgd_rank: int = 1
    powersgd_start: int = 1000

    def __post_init__(self) -> None:
        for name in ("find_unused_parameters", "gradient_as_bucket_view", "static_graph"):
            one_of(f"ddp.{name}", getattr(self, name), (True, False))
        if self.bucket_cap_mb is not None:
            number("ddp.bucket_cap_mb", self.bucket_cap_mb, above=0.0, hint="give MiB, or None")
        one_of("communication_hook", self.communication_hook, HOOKS)
        integer_fields(self, "powersgd_rank", hint="give the columns of a matrix")
        integer_fields(self, "powersgd_start", minimum=2, hint="DDP needs 2 steps to settle its buckets")


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Which strategy, and on what mesh.

    :param strategy: ``single``, ``ddp``, ``fsdp``, ``hsdp`` or ``deepspeed``.
    :param device_parameters: The mesh inside a cell; by default the strategy's preset.
    :param federated: Sizes of the federated groups, or a rule that finds them, as :func:`xffl.session` takes them.
    :param wrap: Layer classes that are gathered, computed again or compiled one at a time.
    :param keep_whole: Names or patterns of parameters that FSDP leaves whole on every rank, as :func:`xffl.shard` takes
        them.
    :param ddp: What DDP is asked for.
    :param backend: Communication backend; by default ``gloo``, and ``cpu:gloo,cuda:nccl`` on CUDA.
    :param link_backend: Communication backend between federated groups, as :func:`xffl.session` takes it: ``gloo``
        keeps NCCL inside them.
    :param device: Device of this process, such as ``cpu``; by default the GPU of its local rank where there are GPUs.
    :param zero_stage: What DeepSpeed cuts: 1 the optimizer's state, 2 the gradients, too, 3 the weights, too.
    :param offload: Whether DeepSpeed keeps the optimizer's state in the host's memory.
    """

    strategy: str = "single"
    device_parameters: DeviceParameters | None = None
    federated: int | tuple[int, ...] | str | None = None
    wrap: tuple[type, ...] = ()
    keep_whole: tuple[str, ...] = ()
    ddp: DDPConfig = field(default_factory=DDPConfig)
    backend: str | None = None
    link_backend: str | None = None
    device: str | None = None
    zero_stage: int = 2
    offload: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "zero_stage", integer("zero_stage", self.zero_stage, 0, 3))
        object.__setattr__(self, "federated", read_federation(self.federated, "distributed.federated"))
        object.__setattr__(self, "wrap", tuple(self.wrap))
        if isinstance(self.keep_whole, str):
            raise ConfigError(f"distributed.keep_whole must be a list of names of parameters, got {self.keep_whole!r}")
        object.__setattr__(self, "keep_whole", tuple(self.keep_whole))
        if not all(isinstance(layer, type) for layer in self.wrap):
            raise ConfigError(f"wrap must be layer classes, such as [nn.TransformerEncoderLayer], got {self.wrap!r}")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """What a strategy has to know of the training.

    :param batch_size: Examples in a micro-batch of a rank.
    :param gradient_accumulation: Micro-batches of an optimizer step.
    :param mixed_precision: What computation is done in: ``no`` (float32), ``bf16`` or ``fp16``; ``None`` means what the
        device parameters say.
    :param max_grad_norm: Norm that gradients are clipped to before each step; ``None`` for no clipping. A trainer clips
        to it with every strategy. In a loop of one's own only DeepSpeed does: with the others call ``clip_grad_norm``.
    """

    batch_size: int = 1
    gradient_accumulation: int = 1
    mixed_precision: str | None = None
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        integer_fields(self, "batch_size", "gradient_accumulation", prefix="training.")
        if self.mixed_precision is not None:
            one_of("mixed_precision", self.mixed_precision, PRECISIONS)
        if self.max_grad_norm is not None:
            number("training.max_grad_norm", self.max_grad_norm, above=0.0, hint="give None for no clipping")


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """Both parts together.

    :param distributed: Which strategy.
    :param training: What it has to know of the training.
    """

    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)


def read_config(config: object) -> StrategyConfig:
    """Return what a configuration of any make says of a strategy; pure.

    :param config: A :class:`StrategyConfig`, or a mapping or an object with ``distributed`` and, maybe, ``training``;
        an object may have fields that are not for strategies, a mapping given by ``distributed`` may not.
    :return: The configuration.
    :raises ConfigError: if a value is invalid, or a name is unknown.
    """
    if isinstance(config, StrategyConfig):
        return config
    parts = {
        name: config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        for name in ("distributed", "training")
    }
    if parts["distributed"] is None:
        raise ConfigError(f"configuration {config!r} has no 'distributed'; give distributed.strategy")
    return StrategyConfig(
        distributed=_read(DistributedConfig, parts["distributed"], "distributed", is_strict=True),
        training=_read(TrainingConfig, parts["training"], "training", is_strict=False),
    )


def read_ddp(options: object) -> DDPConfig:
    """Return the options of DDP; pure."""
    if not isinstance(options, DDPConfig | Mapping | None):
        raise ConfigError(f"ddp must be a mapping of DDP's options, or a DDPConfig, got {options!r}")
    return _read(DDPConfig, options, "ddp", is_strict=True)


PARTS: dict[str, type[Any]] = {"device_parameters": DeviceParameters, "comm": CommParameters, "ddp": DDPConfig}
"""Options that have options of their own."""


def _read(kind: type[T], source: object, where: str, *, is_strict: bool) -> T:
    """Make a part of the configuration from a mapping or an object with the same names, and the parts in it."""
    if source is None:
        return kind()
    if isinstance(source, kind):
        return source
    assert is_dataclass(kind)
    names = [f.name for f in fields(kind)]
    if isinstance(source, Mapping):
        if is_strict and issubclass(kind, Options):
            kind.check_names(source, where)
        for name in source if is_strict else ():
            one_of(f"{where} option", name, names)
        values = {name: source[name] for name in names if name in source}
    else:
        values = {name: getattr(source, name) for name in names if hasattr(source, name)}
    for name, part in PARTS.items():
        if values.get(name) is not None:
            values[name] = _read(part, values[name], f"{where}.{name}", is_strict=True)
    try:
        return kind(**values)
    except TypeError as wrong:
        raise ConfigError(f"the options of {where} cannot be read: {wrong}; give the documented types") from wrong
