"""One start for all: rank 0's weights on the ranks of all cells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from xffl.distributed.backends import connect, transfer_device
from xffl.distributed.collectives import bytes_of, from_bytes
from xffl.distributed.distributed_state import DistributedState
from xffl.parallel.checks import named_tensors

__all__ = ["send_weights"]

BROADCAST_BYTES = 32 * 2**20
"""How much of a model is sent at a time."""


@torch.no_grad()
def send_weights(model: nn.Module, state: DistributedState) -> None:
    """Copy rank 0's parameters and buffers to all ranks: once to the first rank of each cell, then on at home.

    Collective over the world.

    :param model: The whole model, on any device.
    :param state: The state that says where this rank stands.
    """
    topology, rank = state.topology, dist.get_rank()
    heads = topology.offsets[:-1]
    head = heads[topology.cell_of(rank)]
    # Outside a federation the world is the only cell.
    home = state.federation if state.federation is not None else dist.group.WORLD
    across = state.federated_group[0] if state.federated_group else None
    device = transfer_device(state)
    connect((across, dist.group.WORLD, home), device)
    for tensors in _batches(tensor.detach() for _, tensor in named_tensors(model)):
        flat = torch.cat([bytes_of(tensor) for tensor in tensors]).to(device)
        if rank == 0:
            moves = [dist.P2POp(dist.isend, flat, peer, across) for peer in heads[1:]]
        else:
            moves = [dist.P2POp(dist.irecv, flat, 0, across)] if rank == head else []
        # Together: for a single message NCCL would connect its two ranks anew, and keep that.
        for work in dist.batch_isend_irecv(moves) if moves else ():
            work.wait()
        dist.broadcast(flat, src=head, group=home)
        for tensor, part in zip(tensors, torch.split(flat, [tensor.nbytes for tensor in tensors]), strict=True):
            tensor.copy_(from_bytes(part, tensor.dtype, tensor.shape))


def _batches(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    batch: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if batch and size + tensor.nbytes > BROADCAST_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(tensor)
        size += tensor.nbytes
    if batch:
        yield batch
