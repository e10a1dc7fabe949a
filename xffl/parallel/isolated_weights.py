"""How the first rank's weights reach the other cells where cells are worlds of their own, in one job."""

from __future__ import annotations

import torch

from xffl.distributed.distributed_state import DistributedState

__all__ = ["swap_between_worlds"]

MODEL_TAG = 7_000
"""Of the messages"""


def swap_between_worlds(flat: torch.Tensor, state: DistributedState) -> torch.Tensor:
    """Send the job's first rank's bytes to the first rank of each isolated cell; these ranks call it."""
    group = state.job_group
    assert group is not None, "an isolated cell has one"
    on_host = flat.cpu()
    if state.is_first_of_job:
        works = [group.send([on_host], peer, MODEL_TAG) for peer in state.job_topology.offsets[1:-1]]
    else:
        works = [group.recv([on_host], 0, MODEL_TAG)]
    for work in works:
        work.wait()
    return on_host.to(flat.device)
