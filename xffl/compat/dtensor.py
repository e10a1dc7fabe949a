"""Workarounds of torch's DTensor and of its meshes."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _random

__all__ = ["AxisName", "keep_random_state"]


def keep_random_state(mesh: DeviceMesh) -> None:
    """Keep each rank's own random state when it draws numbers for DTensors on GPUs.

    torch 2.13 gives all ranks of the world rank 0's state at the first draw, by a broadcast, and has no public way to
    leave that out: https://github.com/pytorch/pytorch/blob/v2.11.0/torch/distributed/tensor/_random.py
    (``OffsetBasedRNGTracker``). Cells come to that draw at different times, or never, and the seeds that were asked for
    would be lost.
    """
    if mesh.device_type == "cuda" and torch.cuda.is_available() and _random._rng_tracker is None:
        _random._rng_tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False)


class AxisName(str):
    """The name of a mesh's dimension from the second generation of meshes on: ``dp_shard``, equal to ``dp_shard_2``.

    It is needed where torch 2.13 would take two meshes for one, see :func:`xffl.compat.group_names.fresh_names`, and
    https://github.com/pytorch/pytorch/blob/v2.11.0/torch/distributed/device_mesh.py.

    Users see the documented name. torch compares names, so that two meshes of the same ranks are not the same mesh; a
    copy, also one from a file, is a plain text with the number of the generation, and equals the name it was made of.
    """

    generation: int

    def __new__(cls, text: str, generation: int) -> AxisName:
        """Make the name of a dimension of one generation of meshes."""
        name = super().__new__(cls, text)
        name.generation = generation
        return name

    def __eq__(self, other: object) -> bool:
        return self._numbered() == (other._numbered() if isinstance(other, AxisName) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._numbered())

    def __str__(self) -> str:
        return "".join(self)  # a plain text

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self._numbered(),)

    def _numbered(self) -> str:
        return f"{self!s}_{self.generation}"
