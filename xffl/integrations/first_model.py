"""The model that rounds begin with: that of cell 0, or that of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from xffl.aggregation.aggregator import Aggregator
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.values.sharding import local_tensor, reshard
from xffl.parallel.zero.mark import find_masters

__all__ = ["take_model_of_first_cell", "weights_put_aside"]


def take_model_of_first_cell(model: nn.Module, state: DistributedState) -> None:
    """Let all cells begin with the model of cell 0, whatever seeds and files they have; collective over the job.

    :param model: The model, as a framework has wrapped it.
    :param state: The state of this rank.
    """
    aggregator = Aggregator(model, state)
    aggregator.aggregate(weight=1.0 if state.job_rank == 0 else 0.0)
    aggregator.close()


@contextmanager
def weights_put_aside(model: nn.Module) -> Iterator[None]:
    """Let the model be zero while the block runs, and keep what it trains, and its buffers, in the host's memory.

    Between two rounds the cells' models differ, and rounds are set up for one that all have.

    :param model: The model, as a framework has wrapped it.
    :yield: Nothing.
    """
    reshard(model)  # what FSDP2 has gathered is no part of it
    masters = find_masters(model)
    if masters is not None:
        masters.read()
    rounded = model if masters is None else masters.view
    trained = [parameter for parameter in rounded.parameters() if parameter.requires_grad]
    tensors = [local_tensor(tensor.detach()) for tensor in (*trained, *model.buffers())]
    kept = [tensor.to("cpu", copy=True) for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    if masters is not None:
        masters.write()
    try:
        yield
    finally:
        for tensor, values in zip(tensors, kept, strict=True):
            tensor.copy_(values)
        if masters is not None:
            masters.write()
