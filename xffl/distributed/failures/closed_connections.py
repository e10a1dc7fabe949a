"""Closing the connections of a rank in a group, so that no rank waits for it there until its time is over."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from xffl.compat.gloo_connections import is_lazy
from xffl.distributed.collectives import Group
from xffl.distributed.several_worlds.cross_world import CrossWorldGroup

__all__ = ["close_connections"]

_TAG = 7_902
"""Nobody sends with it."""


def close_connections(group: Group) -> None:
    """Close this rank's connections in a group over gloo: all waits in it end at once, and it is of no more use; local.

    The waits of a group that sends from GPUs alone have a deadline of their own (``transport.Progress``), and in one
    that connects lazily a message to a rank may have to connect first: these are left as they are.

    :param group: The group.
    """
    if isinstance(group, CrossWorldGroup):
        group.poison()
        return
    if "cpu:gloo" not in dist.get_backend_config(group) or is_lazy(group.size(), world_size=dist.get_world_size()):
        return
    for nobody in {*range(group.size())} - {group.rank()}:
        try:  # a receive that runs out of time closes all connections of its group, see CrossWorldGroup.poison
            group.recv([torch.zeros(1, dtype=torch.uint8)], nobody, _TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:
            continue
