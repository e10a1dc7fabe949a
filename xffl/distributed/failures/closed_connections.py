"""Closing the connections of a rank in a group, so that no rank waits for it there until its time is over."""

from __future__ import annotations

import torch.distributed as dist

from xffl.compat.gloo_connections import is_lazy
from xffl.compat.pytorch import close_gloo_connections
from xffl.distributed.collectives import Group
from xffl.distributed.several_worlds.cross_world import CrossWorldGroup

__all__ = ["close_connections"]


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
    close_gloo_connections(group, group.rank(), group.size())
