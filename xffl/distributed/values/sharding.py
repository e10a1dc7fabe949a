"""Tensors of models that are wrapped and cut over ranks: their names, parts and bytes.

FSDP2 puts other parameters in the place of an optimizer's while a unit is gathered, and the outermost unit stays
gathered after a forward pass that no backward pass follows (a validation). Whoever compares parameters by identity, or
reads their gradients, asks here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from xffl.checks import shown

__all__ = [
    "WRAPPERS",
    "bytes_of",
    "dtype_of",
    "from_bytes",
    "local_tensor",
    "sharded_parameters",
    "without_wrappers",
]


WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module"})
"""Parts of names that DDP, torch.compile and activation checkpointing insert."""


def without_wrappers(model: nn.Module) -> nn.Module:
    """Take DDP and torch.compile off a model."""
    while True:
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        inner = getattr(inner, "_orig_mod", inner)
        if inner is model or not isinstance(inner, nn.Module):
            return model
        model = inner


def reshard(model: nn.Module) -> None:
    """Put every FSDP2 module into its sharded state, so that no stale gathered copy outlives a round; nothing moves."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements of a tensor, spread or not, in the same memory."""
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def sharded_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's parameters by name, tied ones once, as its optimizer holds them; nothing moves."""
    reshard(model)
    return dict(model.named_parameters())


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements in order as one flat row of bytes, whatever the tensor's memory layout.

    A view where the elements follow each other in memory, else a copy: read it, do not write to it.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    # A single element, or none, counts as contiguous with any stride, but only one of 1 can be viewed as bytes.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def from_bytes(data: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return a copy of what :func:`bytes_of` gave as a tensor; the copy is aligned for any data type."""
    return data.clone().view(dtype).view(shape)


def dtype_of(name: object) -> torch.dtype:
    """Return the data type of a name that somebody else may have written, or raise ValueError; local."""
    # Not by getattr: torch imports modules of its own when it is asked for their names.
    dtype = vars(torch).get(name) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{shown(name)} is no data type of torch")
    return dtype
