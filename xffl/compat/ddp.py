"""Workarounds of torch's DistributedDataParallel, which does not tell the public whose gradients it reduces.

torch 2.13: https://github.com/pytorch/pytorch/blob/v2.11.0/torch/nn/parallel/distributed.py. Each name may be missing
in another version; then nothing is known.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["delayed_parameters", "find_in_reducer", "parameters_at_start", "running_wrapper"]


def parameters_at_start(module: DistributedDataParallel) -> list[nn.Parameter] | None:
    """Return the parameters that DDP was made with; ``None`` where torch does not tell."""
    made_with: list[nn.Parameter] | None = getattr(module, "_module_parameters", None)
    return made_with


def delayed_parameters(module: DistributedDataParallel) -> list[nn.Parameter]:
    """Return the parameters whose gradients DDP leaves to a hook of its own, and counts among those that it ignores."""
    return list(getattr(module, "_delay_all_reduce_params", ()))


def find_in_reducer(module: DistributedDataParallel, training: int) -> set[int] | None:
    """Return the ids of the parameters that DDP's reducer has, where they may be others than those that train.

    ``None`` where all parameters train, as many as the reducer has, or torch does not tell: it fails where a gradient
    is sparse. For a moment it takes as much memory as the gradients.
    """
    tell = getattr(module, "_get_ddp_logging_data", None)
    show = getattr(getattr(module, "reducer", None), "_get_zeros_like_grad_buckets", None)
    if tell is None or show is None:
        return None
    are_all_training = all(one.requires_grad for one in module.module.parameters())
    if are_all_training and tell().get("num_parameter_tensors") == training:
        return None
    try:
        buckets = show()
    except RuntimeError:
        return None
    return {id(one) for bucket in buckets for one in bucket.parameters()}


def running_wrapper() -> DistributedDataParallel | None:
    """Return the DDP module in whose ``forward`` the call lies, the innermost one; ``None`` outside of all.

    DDP keeps it for torch.compile. A hook of the module inside DDP is not told who has called it.
    """
    tell = getattr(DistributedDataParallel, "_get_active_ddp_module", None)
    wrapper: DistributedDataParallel | None = None if tell is None else tell()
    return wrapper
