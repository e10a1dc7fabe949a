"""What a backend carries: where tensors must lie for it, and how NCCL's groups are connected before they are used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from xffl.distributed.distributed_state import DistributedState

__all__ = ["barrier", "connect", "control_device", "transfer_device"]


def control_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return where small messages lie (votes, agreements): on the CPU, unless the group has NCCL alone.

    :param group: The group that carries them; by default the world.
    :return: The CPU, or this rank's current GPU.
    """
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def transfer_device(state: DistributedState) -> torch.device:
    """Return where weights lie while they move: on the GPU over NCCL, else on the CPU, since gloo sends from there.

    :param state: The state that describes the world.
    :return: The device, a GPU with its index.
    """
    if "nccl" not in str(state.backend):
        return torch.device("cpu")
    device = state.current_device if state.current_device is not None else torch.cuda.current_device()
    return torch.device("cuda", device) if isinstance(device, int) else device


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait until all ranks of a group have come here.

    Collective over the group. NCCL is told this rank's GPU; by itself it counts GPUs by the rank, which is another one
    where nodes have unlike numbers of them.

    :param group: The group; by default the world.
    """
    device = control_device(group)
    dist.barrier(group, device_ids=None if device.type == "cpu" else [device.index])


def connect(groups: Iterable[dist.ProcessGroup | None], device: torch.device) -> None:
    """Connect groups over NCCL; elsewhere nothing is done.

    Collective over each group. NCCL connects a group in its first call, in which all its ranks must take part: where
    some send and others do not, that call would wait for ever. All ranks name kinds of groups in the same order, so
    that none waits for another in a circle.

    :param groups: The groups, of which one may be named again; ``None`` stands for one that this rank is not in.
    :param device: What :func:`transfer_device` gives.
    """
    for group in dict.fromkeys(groups) if device.type != "cpu" else ():
        if group is not None:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
