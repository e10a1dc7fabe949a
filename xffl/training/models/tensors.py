"""Tensors of a sharded model: what files call them, which elements this rank holds, and whether all cells agree."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from xffl.aggregation.engine.tensors import tensors_of, ties_of
from xffl.checkpoint.format import this_cell
from xffl.distributed.consistency import find_unequal_cells, run_on_all_ranks, sum_of_bits
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.sharding import local_tensor, reshard
from xffl.errors import ConfigError
from xffl.extras import optional_import
from xffl.parallel.pipeline import PipelineModel

__all__ = [
    "INDEX",
    "SINGLE",
    "FileTensor",
    "adapted_layers",
    "agree_on_base",
    "bare_model",
    "file_tensors",
    "is_adapter",
    "local_indices",
    "package",
]

SINGLE = "model.safetensors"
"""The one file of a small model."""
INDEX = "model.safetensors.index.json"
"""The file that lists the tensors of each file, where there are several."""
EXTRAS = {"transformers": "hf", "huggingface_hub": "hf", "safetensors": "hf", "peft": "lora"}

ADAPTERS = frozenset({"lora_A", "lora_B"})
"""Parts of names that peft gives to what trains."""

PREFIX = "base_model.model."
"""What peft puts before the names of the model that it wraps."""

CHUNK = 2**20
"""Elements of one step of a checksum."""


def package(name: str) -> Any:
    """Import a package of the extras ``hf`` and ``lora``, or a module of one; local."""
    top = name.partition(".")[0]
    with optional_import(EXTRAS[top], f"Hugging Face models need {top}"):
        return importlib.import_module(name)


@dataclass(frozen=True)
class FileTensor:
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
    """Return the model that DDP or ``torch.compile`` has wrapped; raise for a pipeline's stage, which lacks tensors."""
    if isinstance(model, PipelineModel):
        raise ConfigError("files of Hugging Face hold whole models, which no stage of a pipeline has; use pp=1")
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    compiled: nn.Module = getattr(inner, "_orig_mod", inner)
    return compiled


def is_adapter(name: str) -> bool:
    """Tell whether a tensor's name is one that peft gives to parts of adapters."""
    return not ADAPTERS.isdisjoint(name.split("."))


def file_tensors(model: nn.Module) -> Iterator[FileTensor]:
    """Yield the tensors that belong into files, each once: no non-persistent buffers, no adapters; local."""
    inner = bare_model(model)
    ties = ties_of(inner)
    for name, module, leaf, tensor in tensors_of(inner):
        if leaf in module._non_persistent_buffers_set or is_adapter(name):
            continue
        names = tuple(other.removeprefix(PREFIX).replace(".base_layer.", ".") for other in ties[id(tensor)])
        yield FileTensor(names[0], names, module, leaf, tensor)


def adapted_layers(model: nn.Module) -> dict[int, Any]:
    """Return peft's layers with adapters, by the id of the layer inside, whose weights they change; local."""
    layers = (module for module in bare_model(model).modules() if hasattr(module, "lora_A"))
    return {id(layer.base_layer): layer for layer in layers}


def local_indices(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return, for each dimension, the ascending indices of the elements that this rank holds; nothing moves."""
    if not isinstance(tensor, DTensor):
        return tuple(torch.arange(size) for size in tensor.shape)
    mesh, found = tensor.device_mesh, []
    for dim, size in enumerate(tensor.shape):
        # Whichever way torch cuts a dimension, over one dimension of a mesh or over two in turn: its own function cuts
        # the indices here.
        line = torch.arange(size, device=mesh.device_type)
        line = line.view([size if axis == dim else 1 for axis in range(tensor.dim())])
        placements = [place if getattr(place, "dim", None) == dim else Replicate() for place in tensor.placements]
        part = distribute_tensor(line, mesh, placements, src_data_rank=None)
        found.append(part.to_local().flatten().cpu())
    return tuple(found)


@torch.no_grad()
def agree_on_base(model: nn.Module, state: DistributedState, *, only_frozen: bool = True) -> None:
    """Raise where the cells hold different weights under their adapters.

    Collective over the world; every rank reads its part of the weights once, and one number for each tensor and cell
    moves. Rounds leave frozen weights where they are, so cells that begin with others would average adapters that
    belong to different models, without any other sign.

    :param model: The model, sharded in any way.
    :param state: The state that says where this rank stands.
    :param only_frozen: Whether trainable weights may differ.
    :raises ConfigError: if two cells differ, with the first such tensor; on all ranks alike.
    """
    with run_on_all_ranks("base models") as share:
        cell = this_cell(state)
        reshard(model)
        tensors = [one for one in file_tensors(model) if not (only_frozen and one.tensor.requires_grad)]
        listed = "\n".join(f"{one.name} {tuple(one.tensor.shape)} {one.tensor.dtype}" for one in tensors)
        share(hashlib.sha256(listed.encode()).hexdigest())
    if not dist.is_initialized():
        return
    sums = [_checksum(one.tensor) if _counts(one.tensor, cell.place == 0) else 0 for one in tensors]
    found = find_unequal_cells(torch.tensor(sums, dtype=torch.int64), cell.number, len(cell.sizes))
    if found is not None:
        index, others = found
        raise ConfigError(
            f"cells {others} hold other values of {tensors[index].name!r} than cell 0, but all must train the same "
            "base model; give them the same files, or the same seed"
        )


def _counts(tensor: torch.Tensor, is_first: bool) -> bool:
    """Tell whether this rank's part counts: one of those that hold the same elements."""
    if not isinstance(tensor, DTensor):
        return is_first
    at = tensor.device_mesh.get_coordinate()
    assert at is not None, "a rank belongs to the mesh of its tensors"
    return all(place == 0 for place, cut in zip(at, tensor.placements, strict=True) if cut.is_replicate())


def _checksum(tensor: torch.Tensor) -> int:
    """Add up the bits of this rank's elements, each times a factor for its place in the whole tensor."""
    part, shape, indices = local_tensor(tensor), tuple(tensor.shape), local_indices(tensor)
    if not part.numel():
        return 0
    if part.is_complex():  # as pairs
        part, shape, indices = torch.view_as_real(part.resolve_conj()), (*shape, 2), (*indices, torch.arange(2))
    places = torch.zeros((), dtype=torch.int64)
    inner = 1
    # Places of one row of the first dimension; the rows themselves come in chunks.
    for dim in range(len(shape) - 1, 0, -1):
        line = indices[dim] * inner
        places = line.view(-1, *[1] * (len(shape) - 1 - dim)) + places
        inner *= shape[dim]
    rows = indices[0] * inner if len(shape) else torch.zeros(1, dtype=torch.int64)
    flat, places = part.reshape(len(rows), -1), places.reshape(1, -1)
    step = max(1, CHUNK // max(1, places.numel()))
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for start in range(0, len(rows), step):
        at = (rows[start : start + step, None] + places).to(part.device)
        total += sum_of_bits(flat[start : start + step], at)
    return int(total)
