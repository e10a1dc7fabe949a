"""Traffic, from sizes alone: of a round between and inside cells, and of a training step inside a cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from xffl.checks import number
from xffl.planning.memory import Amount, ModelSize, Share, TrainingSize, form_of, shards_of, share_of
from xffl.topology import Topology

__all__ = ["PCIE_GBPS", "TRAFFIC_ASSUMPTIONS", "round_traffic", "step_traffic"]

PCIE_GBPS = 200.0
"""What copies between a GPU and its host get, in Gbit/s, if nothing else is said: 25 of the 32 GB/s of PCIe 4.0 x16."""
PCIE_ASSUMPTION = (
    "between cells values go through the host's memory: each sender copies its shard there once, and the new shard "
    "back to its GPU once, each GPU over a connection of its own; replicas get it from there over NCCL, and copy "
    "nothing; seconds are those of both, though a round copies bucket by bucket while others cross; in a round behind "
    "local steps a sender without replicas copies to the host twice: at its start and when it is merged; a server "
    "optimizer that steps everywhere has every rank with replicas copy the mean to the host and the new shard back"
)

ROUND_ASSUMPTIONS = (
    "every parameter is averaged, every cell has a weight above 0, nothing is compressed, the model is one fragment",
    "shards are even: a sender's share of the model is 1 / shards",
    "all-gather: each sender sends its shard to every other cell",
    "two-hop: each sender exchanges 1/C of its shard with every other cell, combines, and all-gathers the results",
    "inside a cell: each sender sends its shard to the replicas that hold the same one; with rails the replicas share "
    "that work, with the same bytes",
    "seconds: each cell has one full-duplex link to the others, shared by its senders, of the given rate (1 Gbit/s is "
    "10^9 bits/s), without latency or protocol overhead; each cell receives as much as it sends; "
    "nothing is hidden behind local steps (xffl plan --simulate tells more)",
)
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
    "losses, overflow checks of float16 and norms for clipping are left out",
)
"""Assumptions of :func:`step_traffic`."""


def round_traffic(
    topology: Topology,
    parameters: float,
    bytes_per_parameter: float = 4.0,
    link_gbps: float | None = None,
    *,
    pcie_gbps: float | None = None,
    moments: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Calculate the bytes that one round moves, and how long the slow link takes for them.

    Local and pure; no process group is needed. With ``C`` cells and a model of ``M`` bytes, each cell sends
    ``(C-1) M`` with all-gather and ``2 (C-1)/C M`` with the two-hop form, whatever its size and number of replicas; its
    senders share that evenly. ``R`` replicas cost ``(R-1) M`` inside the cell. The result rests on its
    ``assumptions``.

    :param topology: The federation.
    :param parameters: Number of parameters that are averaged, at least 0.
    :param bytes_per_parameter: Bytes of one parameter as it crosses: 4 for fp32, 2 for bf16.
    :param link_gbps: Rate of each cell's link to the others, in Gbit/s; ``None`` leaves the times out.
    :param pcie_gbps: Rate between each GPU and its host, in Gbit/s, where what crosses goes through the host's memory
        (``link_backend="gloo"`` on GPUs); ``None``: nothing is copied.
    :param moments: Moments of optimizers that rounds average, by name with their periods in rounds.
    :return: ``model_bytes``, ``cells``, ``link_gbps``; for ``all_gather`` and ``two_hop`` each ``copies`` (how often a
        shard leaves its cell), ``bytes_per_cell``, ``bytes_total`` (over all cells) and ``seconds`` (``None`` without a
        rate); ``cell_kinds``, one entry for each size of cell with ``ranks``, ``cells`` (how many there are),
        ``replicas``, ``shards``, ``senders`` (per cell), ``shard_bytes``, ``all_gather_bytes_per_sender``,
        ``two_hop_bytes_per_sender``, ``home_bytes_per_sender`` and ``home_bytes_per_cell``; ``home_bytes_total``;
        ``assumptions``; with ``moments`` also ``moments``: their ``periods``, and by how much the model's bytes grow
        with them in the mean over rounds (``mean_bytes``), and in a round that moves all (``most_bytes``); with
        ``pcie_gbps`` also ``pcie``: ``gbps``, ``bytes_total`` and in ``cell_kinds`` for each size
        of cell ``ranks``, and for a ``sender`` and for a ``replica`` (a rank that sends nothing, ``None`` where there
        is none) the ``bytes_to_host``, the ``bytes_to_gpu`` and their ``seconds``.
    :raises ConfigError: if a number is invalid.
    """
    number("parameters", parameters, 0, hint="give the model's parameter count, such as 8e9")
    number("bytes_per_parameter", bytes_per_parameter, above=0, hint="give 4 for fp32, 2 for bf16")
    if link_gbps is not None:
        number("link_gbps", link_gbps, above=0, hint="give the link's rate in Gbit/s, such as 10")
    if pcie_gbps is not None:
        number("pcie_gbps", pcie_gbps, above=0, hint="give the rate between a GPU and its host in Gbit/s, such as 200")
    cells = topology.cells
    model = float(parameters) * float(bytes_per_parameter)
    copies = {"all_gather": float(cells - 1), "two_hop": 2 * (cells - 1) / cells}
    forms = {
        form: {
            "copies": count,
            "bytes_per_cell": count * model,
            "bytes_total": count * model * cells,
            "seconds": None if link_gbps is None else count * model * 8 / (link_gbps * 1e9),
        }
        for form, count in copies.items()
    }
    kinds = []
    for size, count in sorted(Counter(topology.sizes).items(), reverse=True):
        cell = topology.sizes.index(size)
        replicas, shards = topology.replicas(cell), topology.shards(cell)
        kinds.append(
            {
                "ranks": size,
                "cells": count,
                "replicas": replicas,
                "shards": shards,
                "senders": shards,
                "shard_bytes": model / shards,
                **{f"{form}_bytes_per_sender": copies[form] * (model / shards) for form in copies},
                "home_bytes_per_sender": (replicas - 1) * (model / shards),
                "home_bytes_per_cell": (replicas - 1) * model,
            }
        )
    traffic: dict[str, Any] = {
        "model_bytes": model,
        "cells": cells,
        "link_gbps": link_gbps,
        **forms,
        "cell_kinds": kinds,
        "home_bytes_total": sum(kind["cells"] * kind["home_bytes_per_cell"] for kind in kinds),
        "assumptions": list(ROUND_ASSUMPTIONS),
    }
    if moments:
        traffic["moments"] = {
            "periods": dict(moments),
            "mean_bytes": model * sum(1 / period for period in moments.values()),
            "most_bytes": model * len(moments),
        }
    if pcie_gbps is not None:
        traffic["pcie"] = _host_copies(kinds, pcie_gbps)
        traffic["assumptions"].append(PCIE_ASSUMPTION)
    return traffic


def _host_copies(kinds: Sequence[Mapping[str, Any]], gbps: float) -> dict[str, Any]:
    """Count the bytes between GPUs and their hosts in a round that goes through the hosts' memory."""

    def copies(nbytes: float) -> dict[str, float]:
        return {"bytes_to_host": nbytes, "bytes_to_gpu": nbytes, "seconds": 2 * nbytes * 8 / (gbps * 1e9)}

    by_kind, total = [], 0.0
    for kind in kinds:
        shard = kind["shard_bytes"]
        replica = copies(0.0) if kind["replicas"] > 1 else None
        by_kind.append({"ranks": kind["ranks"], "sender": copies(shard), "replica": replica})
        total += kind["cells"] * kind["senders"] * 2 * shard
    return {"gbps": gbps, "bytes_total": total, "cell_kinds": by_kind}


def step_traffic(
    axes: Mapping[str, int], model: ModelSize, training: TrainingSize, *, zero: int = 0
) -> tuple[Amount, ...]:
    """Calculate what a rank sends inside its cell in a forward and backward pass.

    Local and pure. It rests on :data:`TRAFFIC_ASSUMPTIONS`. Sources: Rajbhandari et al.,
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
    passes_text = "weights twice, gradients once" if zero == 3 else "gradients and weights once each"
    moved = passes * (ranks - 1) / ranks * share.whole * training.used_bytes
    return Amount("dp_shard", moved, f"{passes} (n-1)/n x U x {training.used_bytes}: {passes_text}")


def _fsdp(axes: Mapping[str, int], share: Share, training: TrainingSize) -> list[Amount]:
    """Return the gathered weights, the reduced gradients, and what replicas sum."""
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
