"""The tensors of a model that is spread: what they are called in files, and which of their elements a rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from xffl.aggregation.engine.tensors import tensors_of, ties_of
from xffl.distributed.sharding import local_tensor
from xffl.errors import ConfigError
from xffl.parallel.pipeline import PipelineModel

__all__ = ["Held", "adapted_layers", "bare_model", "held_tensors", "is_adapter", "local_part", "places_held"]

ADAPTERS = frozenset({"lora_A", "lora_B"})
"""Parts of names that peft gives to what trains."""

PREFIX = "base_model.model."
"""What peft puts before the names of the model that it wraps."""


@dataclass(frozen=True)
class Held:
    """A tensor of the model that belongs into files.

    ``names`` are what files may call it, several where it is tied; ``name`` is the first of them. The tensor lies at
    ``leaf`` of ``module``.
    """

    name: str
    names: tuple[str, ...]
    module: nn.Module
    leaf: str
    tensor: torch.Tensor


def bare_model(model: nn.Module) -> nn.Module:
    """Return the model that DDP or ``torch.compile`` has wrapped.

    :param model: The model that is used.
    :return: The model inside, or the model itself.
    :raises ConfigError: if it is a stage of a pipeline, which knows nothing of the others' tensors.
    """
    if isinstance(model, PipelineModel):
        raise ConfigError("the files of Hugging Face hold whole models, which no stage of a pipeline has; use pp=1")
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    compiled: nn.Module = getattr(inner, "_orig_mod", inner)
    return compiled


def is_adapter(name: str) -> bool:
    """Tell whether a tensor is part of an adapter.

    :param name: Its name.
    :return: Whether peft has named it.
    """
    return not ADAPTERS.isdisjoint(name.split("."))


def held_tensors(model: nn.Module) -> Iterator[Held]:
    """Yield the tensors that belong into files, each once: no non-persistent buffers, no adapters; local.

    :param model: The model, spread or not, with or without adapters.
    :yield: The tensors, in the order of the modules.
    """
    inner = bare_model(model)
    ties = ties_of(inner)
    for name, module, leaf, tensor in tensors_of(inner):
        if leaf in module._non_persistent_buffers_set or is_adapter(name):
            continue
        names = tuple(other.removeprefix(PREFIX).replace(".base_layer.", ".") for other in ties[id(tensor)])
        yield Held(names[0], names, module, leaf, tensor)


def adapted_layers(model: nn.Module) -> dict[int, Any]:
    """Return the layers of peft that hold adapters, by the id of the layer inside, whose weights they change; local.

    :param model: The model.
    :return: The layers; none without adapters.
    """
    layers = (module for module in bare_model(model).modules() if hasattr(module, "lora_A"))
    return {id(layer.base_layer): layer for layer in layers}


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor that this rank holds, as a view.

    :param tensor: A plain tensor or a DTensor.
    :return: A plain tensor without gradient.
    """
    return local_tensor(tensor).detach()


def places_held(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return, for each dimension, the indices of the elements that this rank holds. Nothing moves.

    Whichever way torch cuts a dimension, over one dimension of a mesh or over two in turn: its own function cuts the
    indices here.

    :param tensor: A plain tensor or a DTensor.
    :return: Ascending indices, on the CPU, for each dimension; empty where this rank holds nothing.
    """
    if not isinstance(tensor, DTensor):
        return tuple(torch.arange(size) for size in tensor.shape)
    mesh, found = tensor.device_mesh, []
    for dim, size in enumerate(tensor.shape):
        line = torch.arange(size, device=mesh.device_type)
        line = line.view([size if axis == dim else 1 for axis in range(tensor.dim())])
        placements = [place if getattr(place, "dim", None) == dim else Replicate() for place in tensor.placements]
        part = distribute_tensor(line, mesh, placements, src_data_rank=None)
        found.append(part.to_local().flatten().cpu())
    return tuple(found)
