"""Workarounds of torch's FSDP2, which has setters of what a backward pass reduces, and nothing that tells it.

torch 2.13: https://github.com/pytorch/pytorch/blob/v2.11.0/torch/distributed/fsdp/_fully_shard/_fully_shard.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["GradientSync", "gradient_sync"]


class GradientSync(NamedTuple):
    """What backward passes do with the gradients of a module of FSDP2.

    torch 2.13 keeps it in private objects: https://pytorch.org/docs/2.13/distributed.fsdp.fully_shard.html.
    """

    reduces: bool
    """As given to ``set_requires_gradient_sync``"""
    all_reduces: bool
    """As given to ``set_requires_all_reduce``, which concerns replicas only"""


def gradient_sync(module: FSDPModule) -> GradientSync:
    """Return what backward passes do with a module's gradients, or where it has none, with those of modules inside."""
    assert isinstance(module, nn.Module)
    for inner in module.modules():
        if not isinstance(inner, FSDPModule):
            continue
        state: Any = inner._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch 2.11 has one group a module
            group = state._fsdp_param_group
            groups = [] if group is None else [group]
        if groups:
            return GradientSync(groups[0].reduce_grads, groups[0].all_reduce_grads)
    return GradientSync(reduces=True, all_reduces=True)
