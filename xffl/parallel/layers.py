"""What a configuration asks of each layer: to be computed again in the backward pass, or to be compiled."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

__all__ = ["prepare_layers"]

aten = torch.ops.aten

# What selective checkpointing keeps: what takes longest to compute again.
SAVED_OPERATORS = [
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_dot_product_cudnn_attention.default),
    *(aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_flash_attention.default),
    aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def prepare_layers(
    model: nn.Module, layers: tuple[type[nn.Module], ...], *, checkpointing: str, is_compiled: bool
) -> None:
    """Let layers be computed again in the backward pass, and compile them; names stay as they are.

    :param model: The model, or this rank's stage of it.
    :param layers: Classes of layers.
    :param checkpointing: What is computed again: ``none``, ``full``, or what is quick to compute, ``selective``.
    :param is_compiled: Whether each layer is compiled.
    """
    for module in model.modules():
        if not isinstance(module, layers):
            continue
        if checkpointing != "none":
            selected = partial(create_selective_checkpoint_contexts, SAVED_OPERATORS)
            is_full = checkpointing == "full"
            contexts: dict[str, Any] = {} if is_full else {"context_fn": selected}
            module.forward = partial(checkpoint, module.forward, use_reentrant=False, **contexts)
        if is_compiled:
            module.compile()
