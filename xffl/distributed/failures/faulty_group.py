"""A group over several worlds in which this process ends, where ``XFFL_FAULT`` says so, before it exchanges weights."""

from __future__ import annotations

import torch

from xffl.distributed.failures.faults import inject
from xffl.distributed.several_worlds.cross_world import WEIGHTS_TAG, CrossWorldGroup, Work

__all__ = ["FaultyGroup"]


class FaultyGroup(CrossWorldGroup):
    """The group of the cells of an elastic federation, with the point ``exchange`` of a fault."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        """End before weights are sent, or start to send."""
        if tag >= WEIGHTS_TAG:
            inject("exchange")
        return super().send(tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        """End before weights can arrive, or start to receive: what is received is posted before what is sent."""
        if tag >= WEIGHTS_TAG:
            inject("exchange")
        return super().recv(tensors, rank, tag)
