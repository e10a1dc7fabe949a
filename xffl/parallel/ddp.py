"""DDP over the replicas of a cell, with its hooks that compress gradients."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from xffl.distributed.agreement.consistency import compute_device
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.world import DistributedWorld
from xffl.parallel.config import DDPConfig, read_ddp

__all__ = ["replicate"]


def replicate(
    model: nn.Module,
    state: DistributedState,
    world: DistributedWorld | None,
    options: DDPConfig | Mapping[str, Any] | None,
) -> nn.Module:
    """Wrap a whole copy, or a stage, with DDP over its replicas; the weights are the same already."""
    config = read_ddp(options)
    device = compute_device(state)
    with torch.no_grad():
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            if tensor.is_contiguous():
                # Dimensions of size 1 may have any stride, but DDP refuses to copy between tensors of other strides.
                tensor.as_strided_(tensor.shape, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").stride())
    if world is not None and world.pp_enabled:
        group: dist.ProcessGroup | None = world.get_group("dp_replicate")
    else:
        group = state.replica_group[0] if state.replica_group else dist.group.WORLD
    ddp = nn.parallel.DistributedDataParallel(
        model,
        process_group=group,
        device_ids=[device] if device.type == "cuda" else None,
        init_sync=False,
        find_unused_parameters=config.find_unused_parameters,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        static_graph=config.static_graph,
        bucket_cap_mb=config.bucket_cap_mb,
    )
    if config.communication_hook == "fp16":
        ddp.register_comm_hook(group, default_hooks.fp16_compress_hook)
    elif config.communication_hook == "bf16":  # a lambda, since DDP refuses the hook by its name where NCCL is missing
        ddp.register_comm_hook(group, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket))
    elif config.communication_hook == "powersgd":
        hook_state = powerSGD_hook.PowerSGDState(
            group, config.powersgd_rank, start_powerSGD_iter=config.powersgd_start, use_error_feedback=True
        )
        ddp.register_comm_hook(hook_state, powerSGD_hook.powerSGD_hook)
    return ddp
