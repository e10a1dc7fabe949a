"""A model's parameters as its optimizer holds them: FSDP2 puts others in their place while a unit is gathered.

The outermost unit stays gathered after a forward pass that no backward pass follows (a validation). Whoever compares
parameters by identity, or reads their gradients, asks here.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["reshard", "sharded_parameters"]


def reshard(model: nn.Module) -> None:
    """Put every FSDP2 module into its sharded state, so that no stale gathered copy outlives a round; nothing moves."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def sharded_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's parameters by name, tied ones once, as its optimizer holds them; nothing moves."""
    reshard(model)
    return dict(model.named_parameters())
