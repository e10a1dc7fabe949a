"""How much memory a cell that takes a model over is about to write to for the first time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from xffl.aggregation.algorithms.server_optimizer import server_of
from xffl.aggregation.arithmetic import wide_type
from xffl.aggregation.engine.planning.tensors import Manifest
from xffl.aggregation.engine.weights.weight_keepers import read_weights
from xffl.errors import XfflError
from xffl.naming import Writer

__all__ = ["measure_memory"]

SLACK = 1 << 16
"""Bytes for the alignment of a table's parts."""


def measure_memory(
    model: nn.Module, given: Mapping[str, Any], *, keeps_agreed: bool, is_shared_on_gpus: bool
) -> tuple[int, list[int]]:
    """Return the bytes of a round's new values, and those of each table of the global model; local.

    :param model: The model.
    :param given: Options of :class:`xffl.Aggregator`.
    :param keeps_agreed: Whether rounds keep the model that was agreed on last.
    :param is_shared_on_gpus: Whether ranks get a round's values on their GPUs. In the host's memory these are then on
        the ranks alone that send them, which this does not know.
    :return: What this rank is about to need, as far as is known before it has met others; nothing where its model or
        options are wrong, which it is told on entering. A table is the agreed model, or what the server keeps for each
        of its elements.
    """
    try:
        weights, _ = read_weights(model)
        manifest = Manifest(weights, given.get("policies"), given.get("codec", "none"), extra=given.get("extra"))
        server = server_of(given.get("server"), writer=Writer.USER)
    except XfflError:
        return 0, []
    moving = [(entry.elements(0), entry.is_stepped) for entry in manifest.moving]
    values = sum(elements.numel() * elements.itemsize for elements, _ in moving)
    table = sum(elements.numel() * wide_type(elements.dtype).itemsize for elements, is_stepped in moving if is_stepped)
    tables = 0
    if keeps_agreed and (server is None or server.device is None or torch.device(server.device).type == "cpu"):
        tables = 1 if server is None else 1 + len(server.state_names)
    return 0 if is_shared_on_gpus else values + SLACK, [table + SLACK] * tables
