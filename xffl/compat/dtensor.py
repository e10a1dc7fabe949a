"""Workarounds of torch's DTensor."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _random

__all__ = ["keep_random_state"]


def keep_random_state(mesh: DeviceMesh) -> None:
    """Keep each rank's own random state when it draws numbers for DTensors on GPUs.

    torch 2.13 gives all ranks of the world rank 0's state at the first draw, by a broadcast, and has no public way to
    leave that out: https://github.com/pytorch/pytorch/blob/v2.11.0/torch/distributed/tensor/_random.py
    (``OffsetBasedRNGTracker``). Cells come to that draw at different times, or never, and the seeds that were asked for
    would be lost.
    """
    if mesh.device_type == "cuda" and torch.cuda.is_available() and _random._rng_tracker is None:
        _random._rng_tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False)
