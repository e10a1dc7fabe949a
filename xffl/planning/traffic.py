"""What a round moves, from sizes alone."""

from __future__ import annotations

import math
import numbers
from collections import Counter
from typing import Any

from xffl.errors import ConfigError
from xffl.topology import Topology

__all__ = ["round_traffic"]

ASSUMPTIONS = (
    "every parameter is averaged, every cell has a weight above 0, nothing is compressed, the model is one fragment",
    "shards are even: a sender's share of the model is 1 / shards",
    "all-gather: each sender sends its shard to every other cell",
    "two-hop: each sender exchanges 1/C of its shard with every other cell, combines, and all-gathers the results",
    "at home: each sender sends its shard to the replicas that hold the same one; with rails the replicas share that "
    "out, with the same bytes",
    "seconds: each cell has one full-duplex link to the others, shared by its senders, of the given rate (1 Gbit/s is "
    "10^9 bits/s), without latency or protocol overhead; each cell receives as much as it sends; "
    "nothing is hidden behind local steps (xffl plan --simulate tells more)",
)


def round_traffic(
    topology: Topology, parameters: float, bytes_per_parameter: float = 4.0, link_gbps: float | None = None
) -> dict[str, Any]:
    """Calculate the bytes that one round moves, and how long the slow link takes for them.

    Local and pure; no process group is needed. With ``C`` cells and a model of ``M`` bytes, each cell sends
    ``(C-1) M`` with all-gather and ``2 (C-1)/C M`` with the two-hop form, whatever its size and however many replicas
    it has; its senders share that evenly. ``R`` replicas cost ``(R-1) M`` inside the cell. What is taken for granted is
    listed under ``assumptions``.

    :param topology: The federation.
    :param parameters: Number of parameters that are averaged, at least 0.
    :param bytes_per_parameter: Bytes of one parameter as it crosses: 4 for fp32, 2 for bf16.
    :param link_gbps: Rate of each cell's link to the others, in Gbit/s; ``None`` leaves the times out.
    :return: ``model_bytes``, ``cells``, ``link_gbps``; for ``all_gather`` and ``two_hop`` each ``copies`` (how often a
        shard leaves its cell), ``bytes_per_cell``, ``bytes_total`` (over all cells) and ``seconds`` (``None`` without a
        rate); ``cell_kinds``, one entry for each size of cell with ``ranks``, ``cells`` (how many there are),
        ``replicas``, ``shards``, ``senders`` (per cell), ``shard_bytes``, ``all_gather_bytes_per_sender``,
        ``two_hop_bytes_per_sender``, ``home_bytes_per_sender`` and ``home_bytes_per_cell``; ``home_bytes_total``;
        ``assumptions``.
    :raises ConfigError: if a number cannot be meant.
    """
    _check("parameters", parameters, "give the model's parameter count, such as 8e9", zero=True)
    _check("bytes_per_parameter", bytes_per_parameter, "give 4 for fp32, 2 for bf16")
    if link_gbps is not None:
        _check("link_gbps", link_gbps, "give the link's rate in Gbit/s, such as 10")
    cells = topology.cells
    model = float(parameters) * float(bytes_per_parameter)
    all_gather = _form(float(cells - 1), model, cells, link_gbps)
    two_hop = _form(2 * (cells - 1) / cells, model, cells, link_gbps)
    kinds = [
        _kind(topology, size, count, model, all_gather["copies"], two_hop["copies"])
        for size, count in sorted(Counter(topology.sizes).items(), reverse=True)
    ]
    return {
        "model_bytes": model,
        "cells": cells,
        "link_gbps": link_gbps,
        "all_gather": all_gather,
        "two_hop": two_hop,
        "cell_kinds": kinds,
        "home_bytes_total": sum(kind["cells"] * kind["home_bytes_per_cell"] for kind in kinds),
        "assumptions": list(ASSUMPTIONS),
    }


def _form(copies: float, model: float, cells: int, link_gbps: float | None) -> dict[str, Any]:
    """Describe one form of the exchange, in which each shard leaves its cell ``copies`` times."""
    per_cell = copies * model
    seconds = None if link_gbps is None else per_cell * 8 / (link_gbps * 1e9)
    return {"copies": copies, "bytes_per_cell": per_cell, "bytes_total": per_cell * cells, "seconds": seconds}


def _kind(
    topology: Topology, size: int, count: int, model: float, all_gather_copies: float, two_hop_copies: float
) -> dict[str, Any]:
    """Describe the cells of one size."""
    cell = topology.sizes.index(size)
    replicas, shards = topology.replicas(cell), topology.shards(cell)
    shard_bytes = model / shards
    return {
        "ranks": size,
        "cells": count,
        "replicas": replicas,
        "shards": shards,
        "senders": shards,
        "shard_bytes": shard_bytes,
        "all_gather_bytes_per_sender": all_gather_copies * shard_bytes,
        "two_hop_bytes_per_sender": two_hop_copies * shard_bytes,
        "home_bytes_per_sender": (replicas - 1) * shard_bytes,
        "home_bytes_per_cell": (replicas - 1) * model,
    }


def _check(what: str, value: object, knob: str, *, zero: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ConfigError(f"{what} {value!r} is no finite number; {knob}")
    if value < 0 or (value == 0 and not zero):
        raise ConfigError(f"{what} {value} is {'less than' if zero else 'not above'} 0; {knob}")
