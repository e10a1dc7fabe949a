"""Opening the connections of a large group over gloo, which connects its ranks lazily, when it is made."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["open_connections"]

_TAG = 7_002
"""Tells the messages that connect pairs from those of votes and of callers."""


def open_connections(group: dist.ProcessGroup, *, has_messages: bool) -> None:
    """Open those connections that a group's messages will use; collective over the group.

    A rank that is lost from here on is noticed as fast as in a mesh: no collective connects first.

    :param group: The group.
    :param has_messages: Whether single ranks message each other in it, instead of collectives alone.
    """
    if not has_messages:
        dist.barrier(group)
        return
    rank = group.rank()
    values = torch.zeros(1, dtype=torch.uint8)
    # In this order on all ranks the first pair that is not connected yet is always next for both of its ranks.
    for peer in range(group.size()):
        if peer < rank:
            group.recv([values], peer, _TAG).wait()
        elif peer > rank:
            group.send([values], peer, _TAG).wait()
