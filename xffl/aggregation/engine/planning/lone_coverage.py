"""The check that the ranks of a job with a single cell train one model, though some may hold only parts of it."""

from __future__ import annotations

from torch import nn

from xffl.aggregation.engine.planning.coverage import check_gradients
from xffl.aggregation.engine.planning.tensors import tensors_of
from xffl.distributed.agreement.consistency import gather_objects, run_on_all_ranks
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.values.sharding import reshard

__all__ = ["check_lone_cell"]


def check_lone_cell(model: nn.Module, state: DistributedState, *, is_reduced_by_caller: bool) -> None:
    """Check a model as :func:`check_gradients` does, in a job with a single cell; collective over the world.

    Gathers the tensor names of all ranks once.
    """
    with run_on_all_ranks("models"):
        reshard(model)
        names = [name for name, *_ in tensors_of(model)]
    holders: dict[str, list[int]] = {}
    for rank, held in enumerate(gather_objects(names)):
        for name in held:
            holders.setdefault(name, []).append(rank)
    with run_on_all_ranks("models"):
        check_gradients(model, state, is_reduced_by_caller=is_reduced_by_caller, holders_of=lambda name: holders[name])
