"""What is asked of the ranks inside a cell: the sizes of its mesh, data types, memory savers and timeouts. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any, Literal

from xffl.checks import integer, integer_fields, number, one_of
from xffl.errors import ConfigError
from xffl.journal.place import parse_journal

__all__ = [
    "CommParameters",
    "DeviceParameters",
    "ElasticParameters",
    "FaultToleranceParameters",
    "MeshSizes",
    "Options",
]

AUTO: Literal["auto"] = "auto"  # as a size: what the others leave of the cell's ranks

# The axes of the mesh inside a cell, outermost first: pipeline stages, parts of a sequence, replicas, FSDP's shards,
# parts of a layer.
AXES = ("pp", "cp", "dp_replicate", "dp_shard", "tp")
# Axes that count as one: ranks with data of their own; those that FSDP cuts a copy over; those whose losses differ.
JOINED = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("cp", "dp_shard"),
    "dp_cp": ("cp", "dp_replicate", "dp_shard"),
}
AXES_OF: dict[str, tuple[str, ...]] = {axis: (axis,) for axis in AXES} | JOINED

Size = int | Literal["auto"]

DTYPES = ("float32", "bfloat16", "float16")
SCHEDULES = ("1f1b", "gpipe")
_CHOICES = {
    **dict.fromkeys(("param_dtype", "reduce_dtype"), DTYPES),
    "activation_checkpointing": ("none", "selective", "full"),
    "pp_schedule": SCHEDULES,
}


_ELSEWHERE = {
    "dp_degree": "give dp_shard={value} for FSDP, or dp_replicate={value} for DDP",
    "enable_fsdp": "FSDP is what dp_shard means: DeviceParameters.FSDP()",
    "enable_ddp": "DDP is what dp_replicate means: DeviceParameters.DDP()",
    "tp_degree": "give tp={value}",
    "pp_degree": "give pp={value}",
    "cp_degree": "give cp={value}",
    "fsdp_limit_all_gathers": "FSDP2 always limits how many layers are gathered; leave it out",
    "mixed_precision": "give param_dtype and reduce_dtype",
}
"""Options that the reference documents or other packages have, and what is written here in their place."""


class Options:
    """Options by name: one that is unknown is refused with what to write."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Make the object where all names are known."""
        cls.check_names(options)
        return super().__new__(cls)

    @classmethod
    def check_names(cls, options: Mapping[str, object], what: str | None = None) -> None:
        """Raise where there is no option of a name.

        :param options: Options by name.
        :param what: What messages call them; by default the class.
        :raises ConfigError: with the option to give instead, or the closest name.
        """
        known = [item.name for item in fields(cls)]  # type: ignore[arg-type]
        what = cls.__name__ if what is None else what
        for name, value in options.items():
            if name in known:
                continue
            if (advice := _ELSEWHERE.get(name)) is None:
                one_of(f"{what} option", name, known)
            else:
                raise ConfigError(f"{what} has no option {name!r}; {advice.format(value=value)}")


@dataclass(frozen=True)
class MeshSizes:
    """The mesh inside each cell, in numbers."""

    axes: dict[str, int]
    """Ranks along each of :data:`AXES`; -1 for the one along which cells of unequal size have different numbers"""
    replica_size: int | None
    """Ranks that together hold one copy of the model (``hsdp``); ``None`` where a cell is one, sharded by FSDP alone"""
    cell_shape: dict[str, int] | None
    """What :class:`xffl.topology.Topology` needs to know of the axes; ``None`` where ``replica_size`` says all"""


@dataclass(frozen=True, kw_only=True)
class CommParameters(Options):
    """How long ranks wait for each other, in seconds.

    :param init_timeout_seconds: For all ranks to have joined.
    :param train_timeout_seconds: For a collective over the world; three quarters of it between cells, half within one.
    """

    init_timeout_seconds: float = 600.0
    train_timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        for name in ("init_timeout_seconds", "train_timeout_seconds"):
            number(f"comm.{name}", getattr(self, name), above=0.0, hint="give seconds, such as 600")


@dataclass(frozen=True, kw_only=True)
class FaultToleranceParameters(Options):
    """How a job trains as one of several replica groups that may be lost and come back.

    :param enable: Whether it is one of several; else the world is a plain one.
    :param min_replica_size: Groups that must live for a step to be taken.
    :param max_consecutive_failures: Steps that may fail one after the other; one more raises. ``None`` means any
        number.
    """

    enable: bool = True
    min_replica_size: int = 1
    max_consecutive_failures: int | None = None

    def __post_init__(self) -> None:
        one_of("fault_tolerance.enable", self.enable, (True, False))
        integer_fields(self, "min_replica_size", prefix="fault_tolerance.")
        integer_fields(self, "max_consecutive_failures", minimum=0, prefix="fault_tolerance.", may_be_none=True)


@dataclass(frozen=True, kw_only=True)
class ElasticParameters(Options):
    """How a cell that is a job of its own makes rounds with others that may be lost, come back, or come late.

    :param lighthouse: Where the lighthouse listens, ``http://HOST:PORT``, or ``file:PATH`` with a file that names it.
    :param journal: Where the run's journal is: a folder that all cells share, or ``http://HOST:PORT`` of a service; by
        default what ``XFFL_JOURNAL`` says, else it is found by the lighthouse.
    :param restarts: How often this cell's job was started before.
    :param least_cells: Cells that a round needs; ``None`` means more than half of all, of two one, to begin the run,
        and any number of them to continue it.
    :param meeting_timeout_s: How long a cell waits for others to make a round with.
    :param message_timeout_s: How long it waits for a message of a first round; later ones are measured.
    """

    lighthouse: str
    journal: str | None = None
    restarts: int = 0
    least_cells: int | None = None
    meeting_timeout_s: float = 1800.0
    message_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.journal is not None:
            object.__setattr__(self, "journal", parse_journal("elastic.journal", self.journal))
        integer_fields(self, "restarts", minimum=0, prefix="elastic.")
        integer_fields(self, "least_cells", prefix="elastic.", may_be_none=True)
        for name in ("meeting_timeout_s", "message_timeout_s"):
            number(f"elastic.{name}", getattr(self, name), above=0, below=1e9, hint="give seconds")


@dataclass(frozen=True, kw_only=True)
class DeviceParameters(Options):
    """How the ranks of a cell share the work on one model; checked before any process group exists.

    :param pp: Stages of a pipeline.
    :param dp_replicate: Replicas of the model in a cell.
    :param dp_shard: Ranks that FSDP cuts the model over.
    :param cp: Ranks that share a sequence (context parallel).
    :param tp: Ranks that share a layer (tensor parallel).
    :param param_dtype: What computation is done in: ``float32``, ``bfloat16`` or ``float16``; weights are kept in their
        own data type.
    :param reduce_dtype: What gradients are added up in by FSDP.
    :param cpu_offload: Whether FSDP keeps shards, gradients and the optimizer's state in the host's memory.
    :param activation_checkpointing: What is computed again in the backward pass instead of being kept, for each wrapped
        layer: ``none`` of it, ``full``: all, ``selective``: all but products of matrices and attention.
    :param compile: Whether each wrapped layer is compiled.
    :param sequence_parallel: With ``tp``, whether norms work on a part of the sequence each.
    :param loss_parallel: With ``tp``, whether logits stay cut along the vocabulary for the loss.
    :param reshard_after_forward: Whether FSDP frees gathered weights between the forward and the backward pass.
    :param fsdp_forward_prefetch: Whether FSDP gathers the next wrapped layer's weights while one computes.
    :param pp_schedule: Order of a pipeline's micro-batches: ``1f1b`` or ``gpipe``.
    :param pp_micro_batches: Micro-batches of a pipeline's step; ``None`` means one for each stage.
    :param comm: Timeouts.
    :raises ConfigError: if a value is invalid, or more than one size is ``auto``.
    """

    pp: Size = 1
    dp_replicate: Size = 1
    dp_shard: Size = 1
    cp: Size = 1
    tp: Size = 1
    param_dtype: str = "float32"
    reduce_dtype: str = "float32"
    cpu_offload: bool = False
    activation_checkpointing: str = "none"
    compile: bool = False
    sequence_parallel: bool = True
    loss_parallel: bool = False
    reshard_after_forward: bool = True
    fsdp_forward_prefetch: bool = False
    pp_schedule: str = "1f1b"
    pp_micro_batches: int | None = None
    comm: CommParameters = field(default_factory=CommParameters)

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) != AUTO:
                size = integer(axis, getattr(self, axis), hint="give at least 1, or auto")
                object.__setattr__(self, axis, size)
        autos = [axis for axis in AXES if getattr(self, axis) == AUTO]
        if len(autos) > 1:
            raise ConfigError(f"{' and '.join(autos)} are all 'auto'; give the sizes of all but one of them")
        for name, choices in _CHOICES.items():
            one_of(name, getattr(self, name), choices)
        for switch in (item.name for item in fields(self) if isinstance(item.default, bool)):
            one_of(switch, getattr(self, switch), (True, False))
        integer_fields(self, "pp_micro_batches", hint="give at least 1", may_be_none=True)
        if not isinstance(self.comm, CommParameters):
            raise ConfigError(f"comm must be a CommParameters, which holds timeouts, got {self.comm!r}")
        if self.param_dtype == "float16" and self.pp != 1:
            raise ConfigError("param_dtype 'float16' needs a gradient scaler, which no pipeline has; give 'bfloat16'")
        if self.cpu_offload and self.dp_shard == 1 and self.cp == 1:
            raise ConfigError("cpu_offload is FSDP's; give dp_shard more than one rank, or leave it out")
        if self.reduce_dtype != "float32" and self.dp_shard == 1 and self.cp == 1:
            raise ConfigError(f"reduce_dtype {self.reduce_dtype!r} is FSDP's; for DDP give a communication_hook")
        if self.loss_parallel and self.tp == 1:
            raise ConfigError("loss_parallel cuts logits over tp, which is 1; give tp, or leave it out")
        if self.pp_micro_batches is not None and self.pp == 1:
            raise ConfigError(f"pp_micro_batches {self.pp_micro_batches} are a pipeline's, but pp is 1; give pp")

    @classmethod
    def SINGLE_DEVICE(cls, **options: Any) -> DeviceParameters:
        """Return parameters for cells of one rank; options are the other fields."""
        return cls(**options)

    @classmethod
    def DDP(cls, *, dp_replicate: Size = AUTO, **options: Any) -> DeviceParameters:
        """Return parameters for a whole copy of the model on each rank; by default all ranks of a cell are replicas."""
        return cls(dp_replicate=dp_replicate, **options)

    @classmethod
    def FSDP(cls, *, dp_shard: Size = AUTO, **options: Any) -> DeviceParameters:
        """Return parameters for one copy of the model in a cell, cut over the ranks that other axes leave."""
        return cls(dp_shard=dp_shard, **options)

    @classmethod
    def HSDP(cls, *, dp_shard: Size, dp_replicate: Size = AUTO, **options: Any) -> DeviceParameters:
        """Return parameters for several copies of the model in a cell, each cut over ``dp_shard`` ranks."""
        return cls(dp_shard=dp_shard, dp_replicate=dp_replicate, **options)

    def resolve(self, cell_sizes: Sequence[int]) -> MeshSizes:
        """Fit the sizes to cells of given sizes; pure.

        :param cell_sizes: Ranks of each cell; without federation the world is the only one.
        :return: The sizes.
        :raises ConfigError: if they do not multiply to the size of each cell.
        """
        asked = {axis: getattr(self, axis) for axis in AXES}
        known = prod(size for size in asked.values() if size != AUTO)
        auto = next((axis for axis in AXES if asked[axis] == AUTO), None)
        for cell, ranks in enumerate(cell_sizes):
            if ranks % known or (auto is None and ranks != known):
                raise ConfigError(self._misfit(cell, ranks, known, auto, is_alone=len(cell_sizes) == 1))
        rest = {ranks // known for ranks in cell_sizes}
        auto_size = rest.pop() if len(rest) == 1 else -1
        axes = {axis: auto_size if axis == auto else size for axis, size in asked.items()}
        is_data_parallel = all(axes[axis] == 1 for axis in ("pp", "cp", "tp"))
        is_one_replica = asked["dp_replicate"] == 1
        if is_data_parallel and is_one_replica:
            return MeshSizes(axes, None, None)
        if auto not in (None, "dp_replicate") and auto_size == -1:
            raise ConfigError(
                f"{auto}='auto' gives cells of {tuple(cell_sizes)} ranks meshes that differ in more than their "
                "replicas; give its size and leave dp_replicate 'auto'"
            )
        replica = prod(size for axis, size in axes.items() if axis != "dp_replicate")
        return MeshSizes(axes, replica, None if is_data_parallel else axes)

    @property
    def strategy(self) -> str:
        """The plainest strategy that can do this: ``single``, ``ddp``, ``fsdp`` or ``hsdp``."""
        is_one_device = all(getattr(self, axis) == 1 for axis in AXES if axis != "dp_replicate")
        if self.dp_replicate == 1:
            return "single" if is_one_device else "fsdp"
        return "ddp" if is_one_device else "hsdp"

    def _misfit(self, cell: int, ranks: int, known: int, auto: str | None, *, is_alone: bool) -> str:
        shown = ", ".join(f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) != 1) or "all sizes 1"
        where = f"the world has {ranks} ranks" if is_alone else f"cell {cell} has {ranks} ranks"
        if auto is not None:
            return f"{shown}: {where}, which {known} does not divide; give sizes that multiply to a divisor of {ranks}"
        other = ", or a strategy for several ranks (fsdp, ddp)" if known == 1 else ""
        return f"{shown} multiply to {known}, but {where}; give sizes that multiply to {ranks}, or one 'auto'{other}"
