"""Memory of a rank during training, from sizes alone: weights, gradients, the optimizer's state, copies.

Of a model's ``P`` parameters a rank has ``U = P / (pp tp)``, those of one stage, and FSDP cuts them over
``n = dp_shard cp`` ranks. What tensor parallelism leaves whole (norms), and stages that hold more than others, are
counted where the model's width, layers and vocabulary are known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from xffl.checks import integer_fields, number, one_of
from xffl.errors import ConfigError
from xffl.planning.stages import layers_of_stages

__all__ = [
    "MEMORY_ASSUMPTIONS",
    "MOMENTS",
    "Amount",
    "ModelSize",
    "Share",
    "TrainingSize",
    "rank_memory",
    "total_bytes",
]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MOMENTS = {"momentum": ("momentum_buffer",), "adamw": ("exp_avg", "exp_avg_sq")}
"""What optimizers call what they keep of each parameter, where rounds can average it."""
# Values that an optimizer keeps for each parameter; Adafactor keeps some for each row and column of a matrix.
OPTIMIZERS = {"sgd": 0.0, "momentum": 1.0, "adamw": 2.0, "adafactor": math.nan}
MASTER_BYTES = 4  # DeepSpeed updates a copy of the weights in float32
LIVE_PARAMETERS = 1e9  # parameters that DeepSpeed leaves whole with ZeRO 3, by default, at most

MEMORY_ASSUMPTIONS = (
    "memory is that of the stage with most parameters, without activations, temporary tensors of operators, buffers of "
    "the communication library, and the allocator's cache",
    "shards are even: FSDP cuts dimension 0 of each parameter, and a rank holds at most one row of each more than this",
    "wrapped layers (--layers) are alike; embedding, head and last norm (--vocabulary, --width) stay with the root, "
    "which FSDP gathers once; without --layers nothing is wrapped and the root is the whole model; without "
    "--vocabulary layers share the embedding, too",
    "with FSDP two layers are whole at a time, the current one and the next; the gradients of one (or of the root, if "
    "that is larger) are whole, and once more in reduce_dtype while they are summed; peaks at different times are "
    "added; nothing is accumulated without synchronization",
    "tensor parallelism without FSDP: the gradient of the embedding, on the first stage, is whole on each rank",
    "the optimizer's state is in the data type of the weights, as torch's is; Adafactor keeps a row and a column for "
    "each matrix of width x width",
    "DeepSpeed's ZeRO keeps the optimizer's state and the weights that it updates in float32, and with stage 3 leaves "
    "at most 1e9 parameters whole; its buckets are left out",
    "rounds: the fewest buckets; a codec's memory is that of a rank that sends all of its shard",
)
"""Assumptions of :func:`rank_memory`."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The size of a decoder-only transformer, as far as memory and traffic depend on it.

    :param parameters: Number of parameters, above 0.
    :param layers: Layers that are wrapped one by one; ``None`` where none is, or none is known.
    :param width: Features between layers.
    :param vocabulary: Rows of the embedding, and of a head of its own.
    :param kv_width: Features of the keys, and of the values; ``None`` means the width (no grouped queries).
    :raises ConfigError: if a number is invalid, or the embedding has more parameters than the model.
    """

    parameters: float
    layers: int | None = None
    width: int | None = None
    vocabulary: int | None = None
    kv_width: int | None = None

    def __post_init__(self) -> None:
        number("parameters", self.parameters, above=0, hint="give the model's, such as 8e9")
        integer_fields(self, "layers", "width", "vocabulary", "kv_width", may_be_none=True)
        if self.vocabulary is not None and self.width is None:
            raise ConfigError(f"vocabulary {self.vocabulary} needs the number of features; give the width, too")
        if self.first + self.last >= self.parameters:
            raise ConfigError(
                f"embedding and head of {self.vocabulary} x {self.width} have more than the model's "
                f"{self.parameters:g} parameters; give other sizes, or leave the vocabulary out"
            )

    @property
    def first(self) -> float:
        """Parameters before the layers: the embedding."""
        return float((self.vocabulary or 0) * (self.width or 0))

    @property
    def last(self) -> float:
        """Parameters after the layers: the last norm and the head."""
        return self.first + self.width if self.vocabulary is not None and self.width is not None else 0.0

    @property
    def layer(self) -> float:
        """Parameters of one layer; of all where layers are not known."""
        return (self.parameters - self.first - self.last) / (self.layers or 1)


@dataclass(frozen=True, kw_only=True)
class TrainingSize:
    """Settings of training that memory and traffic depend on, beside the model and the mesh.

    :param dtype: Type of weights, gradients and the optimizer's state.
    :param param_dtype: Type of computation; ``None`` or ``float32``: that of ``dtype``, nothing is cast.
    :param reduce_dtype: Type in which FSDP sums gradients where computation has another type than weights.
    :param optimizer: ``sgd``, ``momentum`` (SGD with it), ``adamw`` or ``adafactor``.
    :param batch: Sequences of a forward and backward pass, for each rank with data of its own; of all micro-batches.
    :param sequence: Tokens of a sequence.
    :param micro_batches: Of a pipeline; ``None`` means one for each stage.
    :param reshard_after_forward: Whether FSDP gathers a layer anew for the backward pass.
    :param loss_parallel: Whether tensor-parallel logits stay cut.
    :param gradient_as_bucket_view: Whether DDP's gradients lie in the buckets that are sent.
    :raises ConfigError: if a value is invalid.
    """

    dtype: str = "float32"
    param_dtype: str | None = None
    reduce_dtype: str = "float32"
    optimizer: str = "adamw"
    batch: int | None = None
    sequence: int | None = None
    micro_batches: int | None = None
    reshard_after_forward: bool = True
    loss_parallel: bool = False
    gradient_as_bucket_view: bool = True

    def __post_init__(self) -> None:
        for name in ("dtype", "reduce_dtype") + ("param_dtype",) * (self.param_dtype is not None):
            one_of(name, getattr(self, name), DTYPE_BYTES)
        one_of("optimizer", self.optimizer, OPTIMIZERS)
        integer_fields(self, "batch", "sequence", "micro_batches", may_be_none=True)

    @property
    def kept_bytes(self) -> int:
        """Bytes of a weight in memory."""
        return DTYPE_BYTES[self.dtype]

    @property
    def used_bytes(self) -> int:
        """Bytes of a weight in computation."""
        return DTYPE_BYTES[self.param_dtype or self.dtype] if self.is_mixed else self.kept_bytes

    @property
    def summed_bytes(self) -> int:
        """Bytes of a gradient that FSDP sums."""
        return DTYPE_BYTES[self.reduce_dtype] if self.is_mixed else self.kept_bytes

    @property
    def is_mixed(self) -> bool:
        """Whether weights are cast for computation."""
        return self.param_dtype not in (None, "float32")


class Amount(NamedTuple):
    """A part of a rank's memory or traffic; ``bytes`` is ``None`` where a number is missing that the formula needs."""

    what: str
    bytes: float | None
    formula: str


class Share(NamedTuple):
    """Parameters of a rank after tensor parallelism and the pipeline, of the stage that has most.

    ``whole`` is all of it (``U``), ``layer`` one of its ``layers`` layers, and ``root`` what no wrapped layer holds.
    """

    whole: float
    layer: float
    root: float
    layers: int


def form_of(axes: Mapping[str, int]) -> str:
    """Return how ranks hold the model or their stage, ``plain``, ``ddp`` or ``fsdp``, as :func:`xffl.shard` does."""
    replicas = axes.get("dp_replicate", 1)
    # DDP knows nothing of parameters that are cut by tensor parallelism; FSDP with shards of one rank does.
    if shards_of(axes) > 1 or (axes.get("tp", 1) > 1 and replicas > 1):
        return "fsdp"
    return "ddp" if replicas > 1 else "plain"


def shards_of(axes: Mapping[str, int]) -> int:
    """Count the ranks that FSDP cuts over, ``n``."""
    return axes.get("dp_shard", 1) * axes.get("cp", 1)


def share_of(axes: Mapping[str, int], model: ModelSize) -> Share:
    """Return the part of the model on the stage that has most of it, after tensor parallelism."""
    stages, parts = axes.get("pp", 1), axes.get("tp", 1)
    norm = float(model.width or 0) if model.layers is not None else 0.0
    layer = (model.layer - 2 * norm) / parts + 2 * norm  # two norms are whole on each rank
    first = model.first / parts
    last = (model.last - norm) / parts + norm if model.last else 0.0
    if model.layers is None:
        outer, inner = (first + last) / stages, layer / stages
        return Share(outer + inner, outer + inner, outer + inner, 0)
    if stages > model.layers:
        raise ConfigError(f"pp={stages} stages cannot share {model.layers} layers; give at most {model.layers} stages")
    shares = []
    for stage, count in enumerate(layers_of_stages(model.layers, stages)):
        root = first * (stage == 0) + last * (stage == stages - 1)
        shares.append(Share(count * layer + root, layer, root, count))
    return max(shares, key=lambda share: share.whole)


def rank_memory(
    axes: Mapping[str, int],
    model: ModelSize,
    training: TrainingSize,
    *,
    zero: int = 0,
    is_federated: bool = False,
    atomic: bool = True,
    codec: bool = False,
    server: bool = False,
) -> tuple[Amount, ...]:
    """Calculate the memory of a rank beside activations.

    Local and pure. It rests on :data:`MEMORY_ASSUMPTIONS`. Sources: Rajbhandari et al.,
    ZeRO, 2020 (arXiv:1910.02054); Zhao et al., PyTorch FSDP, 2023 (arXiv:2304.11277).

    :param axes: Ranks along the axes of the mesh in a cell; those left out have 1.
    :param model: The model.
    :param training: Data types and the optimizer.
    :param zero: Stage of DeepSpeed's ZeRO over the ranks of ``dp_shard``, 1 to 3; 0 for torch's own parts.
    :param is_federated: Whether there are rounds.
    :param atomic: Whether rounds collect new values beside the model.
    :param codec: Whether rounds are written in a lossy code.
    :param server: Whether rounds end with a server optimizer.
    :return: ``parameters``, ``gradients``, ``optimizer``, ``gathered`` and ``round``, each with its formula.
    :raises ConfigError: if the optimizer cannot work on the mesh, or there are fewer layers than stages.
    """
    form, share = form_of(axes), share_of(axes, model)
    n = shards_of(axes) if form == "fsdp" else 1
    if training.optimizer == "adafactor" and (zero or form == "fsdp" or axes.get("tp", 1) > 1):
        raise ConfigError(
            "optimizer 'adafactor' needs whole matrices: PyTorch's refuses those that FSDP or tensor parallelism has "
            "cut; give another, or a mesh of pp and dp_replicate alone"
        )
    kept = training.kept_bytes
    held, cut = share.whole / n, " / n" if n > 1 else ""
    per = OPTIMIZERS[training.optimizer]
    states: float | None = held * per * kept
    formula = f"U{cut} x {per:g} x {kept}" if per else "0"
    if training.optimizer == "adafactor":
        states = None if model.width is None else held * (2 / model.width) * kept
        formula = f"U{cut} x 2 / width x {kept}"
    extra = model.first * (1 - 1 / axes.get("tp", 1)) if form != "fsdp" else 0.0
    whole = f" + (1 - 1/t) x embedding x {kept}" if extra else ""
    parts = [
        Amount("parameters", held * kept, f"U{cut} x {kept}"),
        Amount("gradients", (held + extra) * kept, f"U{cut} x {kept}{whole}"),
        Amount("optimizer", states, formula),
        _gathered(form, share, training),
    ]
    if zero:
        parts = _zero_parts(n, zero, share, training)
    if is_federated:
        averaged = MASTER_BYTES if zero else kept  # with ZeRO, a round averages the weights in float32
        copies = averaged * atomic + (averaged + 8) * codec + max(averaged, 4) * server
        parts.append(Amount("round", held * copies, f"U{cut} x {copies}"))
    return tuple(parts)


def total_bytes(parts: tuple[Amount, ...]) -> float | None:
    """Sum parts; ``None`` where one is not known."""
    counts = [part.bytes for part in parts]
    return None if None in counts else float(sum(count or 0.0 for count in counts))


def _gathered(form: str, share: Share, training: TrainingSize) -> Amount:
    """Count temporary copies: whole layers of FSDP, buckets of DDP, weights that autocast has cast."""
    used, summed = training.used_bytes, training.summed_bytes
    if form != "fsdp":
        buckets = share.whole * training.kept_bytes * (form == "ddp" and not training.gradient_as_bucket_view)
        casts = share.whole * used * (used < training.kept_bytes)
        terms = [f"U x {training.kept_bytes} (buckets)"] * bool(buckets) + [f"U x {used} (cast)"] * bool(casts)
        return Amount("gathered", buckets + casts, " + ".join(terms) or "0")
    if not share.layers:  # weights are freed before gradients are added up
        most = max(used, summed)
        return Amount("gathered", share.whole * (used + most), f"U x ({used} + {most})")
    gradients = max(share.layer, share.root) * (used + summed)
    written = f"largest x ({used} + {summed})"
    if training.reshard_after_forward:
        weights = share.root + min(2, share.layers) * share.layer
        return Amount("gathered", weights * used + gradients, f"(root + 2 layers) x {used} + {written}")
    return Amount("gathered", share.whole * used + gradients, f"U x {used} + {written}")


def _zero_parts(ranks: int, zero: int, share: Share, training: TrainingSize) -> list[Amount]:
    """Return the parts with a stage of ZeRO."""
    used, whole = training.used_bytes, share.whole
    weights, gradients = (" / n" if zero >= least else "" for least in (3, 2))
    states = MASTER_BYTES * (1 + OPTIMIZERS[training.optimizer])
    live = min(whole, LIVE_PARAMETERS) if zero == 3 else 0.0
    return [
        Amount("parameters", whole * used / (ranks if weights else 1), f"U{weights} x {used}"),
        Amount("gradients", whole * used / (ranks if gradients else 1), f"U{gradients} x {used}"),
        Amount("optimizer", whole * states / ranks, f"U / n x {states:g}"),
        Amount("gathered", live * used, f"min(U, 1e9) x {used}" if live else "0"),
    ]
