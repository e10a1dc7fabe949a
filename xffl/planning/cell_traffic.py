"""What a step of training moves between the ranks of a cell, from sizes alone."""

from __future__ import annotations

from collections.abc import Mapping

from xffl.planning.memory import Amount, ModelSize, Share, TrainingSize, form_of, shards_of, share_of

__all__ = ["TRAFFIC_ASSUMPTIONS", "step_traffic"]

TRAFFIC_ASSUMPTIONS = (
    "traffic is what a rank sends in one forward and backward pass of --batch sequences, and it receives as much; "
    "collectives are rings: of a tensor of M bytes over n ranks, an all-gather or a reduce-scatter sends (n-1)/n M, an "
    "all-reduce twice that (gloo of torch 2.13 runs a reduce-scatter as an all-reduce)",
    "the batch is that of a rank with data of its own: meshes with fewer of them train on less in a step",
    "nothing is computed twice in the backward pass (activation checkpointing gathers and reduces once more)",
    "with a pipeline FSDP gathers each layer once for each micro-batch and once more for the backward passes, as GPipe "
    "does, and 1F1B at most; activations are those of a stage in the middle",
    "tensor parallelism: activations between layers are cut along the sequence, too (whole ones move as many bytes); "
    "the traffic of embedding and head is that of a rank that has both; gradients of norms are left out",
    "losses, votes of float16 and norms for clipping are left out",
)
"""What :func:`step_traffic` takes for granted."""


def step_traffic(
    axes: Mapping[str, int], model: ModelSize, training: TrainingSize, *, zero: int = 0
) -> tuple[Amount, ...]:
    """Calculate what a rank sends inside its cell in a forward and backward pass.

    Local and pure. What is taken for granted is listed in :data:`TRAFFIC_ASSUMPTIONS`. Sources: Rajbhandari et al.,
    ZeRO, 2020 (arXiv:1910.02054); Korthikanti et al., Reducing activation recomputation, 2022 (arXiv:2205.05198);
    Llama 3, 2024 (arXiv:2407.21783), section 3.3.2; Huang et al., GPipe, 2019 (arXiv:1811.06965).

    :param axes: Ranks along the axes of the mesh in a cell; those left out have 1.
    :param model: The model.
    :param training: Data types, batch and sequence.
    :param zero: Stage of DeepSpeed's ZeRO over the ranks of ``dp_shard``, 1 to 3; 0 for torch's own parts.
    :return: A part for each axis along which something moves, with its formula; bytes are ``None`` where the model's
        layers or width, the batch or the sequence are needed and not known.
    """
    share = share_of(axes, model)
    parts = []
    if zero:
        parts.append(_zero(shards_of(axes), zero, share, training))
    elif form_of(axes) == "ddp":
        ranks = axes["dp_replicate"]
        moved = 2 * (ranks - 1) / ranks * share.whole * training.kept_bytes
        parts.append(Amount("dp_replicate", moved, f"2 (R-1)/R x U x {training.kept_bytes}: all-reduce of gradients"))
    elif form_of(axes) == "fsdp":
        parts += _fsdp(axes, share, training)
    parts += _activations(axes, model, training, share)
    return tuple(parts)


def _zero(ranks: int, zero: int, share: Share, training: TrainingSize) -> Amount:
    passes = 3 if zero == 3 else 2
    told = "weights twice, gradients once" if zero == 3 else "gradients and weights once each"
    moved = passes * (ranks - 1) / ranks * share.whole * training.used_bytes
    return Amount("dp_shard", moved, f"{passes} (n-1)/n x U x {training.used_bytes}: {told}")


def _fsdp(axes: Mapping[str, int], share: Share, training: TrainingSize) -> list[Amount]:
    """Return the gathered weights, the reduced gradients, and what replicas add up."""
    n, replicas, stages = shards_of(axes), axes.get("dp_replicate", 1), axes.get("pp", 1)
    used, summed = training.used_bytes, training.summed_bytes
    parts = []
    if n > 1:
        forward = (training.micro_batches or stages) if stages > 1 else 1
        gathers = forward + 1 if training.reshard_after_forward else 1
        layers = share.layers * share.layer
        root = share.root
        weights = (n - 1) / n * (root + gathers * layers) * used
        gradients = (n - 1) / n * share.whole * summed
        written = f"root + {gathers} x layers" if layers else "U"
        parts.append(Amount("dp_shard, cp", weights, f"(n-1)/n x ({written}) x {used}: all-gather of weights"))
        parts.append(Amount("dp_shard, cp", gradients, f"(n-1)/n x U x {summed}: reduce-scatter of gradients"))
    if replicas > 1:
        moved = 2 * (replicas - 1) / replicas * share.whole / n * summed
        parts.append(Amount("dp_replicate", moved, f"2 (R-1)/R x U / n x {summed}: all-reduce of shards of gradients"))
    return parts


def _activations(axes: Mapping[str, int], model: ModelSize, training: TrainingSize, share: Share) -> list[Amount]:
    """Return what tensor, context and pipeline parallelism move: activations, keys and values."""
    tp, cp, pp = (axes.get(axis, 1) for axis in ("tp", "cp", "pp"))
    used = training.used_bytes
    tokens = None
    if training.batch is not None and training.sequence is not None:
        tokens = training.batch * training.sequence / cp  # of this rank's part of each sequence
    layers = share.layers or None
    width = model.width
    parts = []
    if tp > 1:
        moved = None
        if tokens is not None and layers is not None and width is not None:
            ends = 4 * width + (model.vocabulary or 0) * (not training.loss_parallel) if model.vocabulary else 0
            moved = (tp - 1) / tp * tokens * (8 * layers * width + ends) * used
        logits = "" if training.loss_parallel else " + vocabulary"
        written = f"(t-1)/t x tokens x (8 layers x width + 4 width{logits}) x {used}: activations"
        parts.append(Amount("tp", moved, written))
    if cp > 1:
        moved = None
        summed = max(used, 4)
        if tokens is not None and layers is not None and width is not None:
            keys = (model.kv_width or width) / tp
            moved = 2 * (cp - 1) * tokens * layers * keys * (used + summed)
        written = f"(c-1) x tokens x layers x 2 kv_width / t x ({used} + {summed}): keys and values, their gradients"
        parts.append(Amount("cp", moved, written))
    if pp > 1:
        moved = None
        if tokens is not None and width is not None:
            moved = (2 if pp > 2 else 1) * tokens / tp * width * used
        each = "2 x " if pp > 2 else ""
        parts.append(Amount("pp", moved, f"{each}tokens / t x width x {used}: activations and their gradients"))
    return parts
