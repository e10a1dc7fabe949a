"""Tensors of a model that share memory, which rounds that read it late cannot average."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

__all__ = ["find_shared"]


def find_shared(views: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Return two tensors whose memory overlaps, by their places among all, if there are any; local."""
    ends = (sum((n - 1) * step for n, step in zip(v.shape, v.stride(), strict=True)) for v in views)
    found = [
        (str(view.device), view.data_ptr(), view.data_ptr() + (end + 1) * view.itemsize, index)
        for index, (view, end) in enumerate(zip(views, ends, strict=True))
        if view.numel()
    ]
    for (device, _, end, one), (other_device, start, _, other) in itertools.pairwise(sorted(found)):
        if device == other_device and start < end:
            return one, other
    return None
